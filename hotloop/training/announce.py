"""The summary of a run, printed once before it starts, with the reasons for its choices."""

import torch

from configurator import differences
from hotloop.system.device import attention_kernels
from hotloop.system.files import counted
from hotloop.system.flops import flops_of
from hotloop.system.text import wrapped
from hotloop.training.schedule import NO_LIMIT, is_open


def announce(run, settings, meta):
    """Prints the summary of this run once, with the reasons for its choices."""
    objects = [settings.model, settings.lora, run.cfg]
    changed = differences(objects, settings.given, hidden=[NO_LIMIT])  # which nobody has set
    heading = f'settings that differ from the defaults:\n{changed}'
    if settings.resumed:  # the notes have those that the command changes
        heading = 'settings: those of the checkpoint, and those of this command'
    lines = describe_machine(run) + describe_work(run, meta)
    if not run.cfg.eval_only:
        lines += describe_length(run, settings)
    for line in [*settings.notes, heading, *map(wrapped, lines)]:
        run.env.print_once(line)


def describe_machine(run):
    """Device, processes, dtype, compilation, attention."""
    env, cfg = run.env, run.cfg
    kernels = ', '.join(attention_kernels(run.model.config, env))
    threads = counted(env.threads, 'thread')
    lines = [f'device: {env.device} ({env.reasons["device"]}), {env.world} x {threads}',
             f'dtype: {str(env.dtype).removeprefix("torch.")} ({env.reasons["dtype"]})',
             f'compile: {"on" if env.compile else "off"} ({env.reasons["compile"]})',
             f'attention: scaled_dot_product_attention; kernels available: {kernels}']
    if run.model.config.window or cfg.document_mask or cfg.pack_rows:
        how = 'FlexAttention' if env.device.type == 'cuda' else 'by documents and blocks of queries'
        lines.append(f'attention within windows and documents: {how}')
    gpus = torch.cuda.device_count()
    if env.device.type == 'cuda' and gpus > env.world == 1:
        lines.append(f'note: to use all {gpus} GPUs: torchrun --standalone --nproc_per_node={gpus} '
                     'train.py ...')
    return lines


def describe_work(run, meta):
    """Data, model and batch of the run."""
    cfg, batches, model, c = run.cfg, run.batches, run.model, run.model.config
    data = cfg.dataset
    if len(run.val.weights) > 1:
        data += f' ({", ".join(f"{weight:.1%}" for weight in run.val.weights)})'
    data += (f', {batches.split.num_tokens:,} training and {run.val.num_tokens:,} validation tokens, '
             f'{meta["tokenizer"].get("name") or meta["tokenizer"]["kind"]} tokenizer')
    if meta['foreign']:
        data += " (no meta.json: read with nanoGPT's assumptions)"
    if batches.tokens is not None:
        data += ', in GPU memory'
    num_params = run.context.get('lora', {}).get('parameters') or model.num_params()
    chunks = f', loss in {model.loss_chunks} chunks to save memory' if model.loss_chunks > 1 else ''
    return [f'data: {data}',
            f'model: {c.preset}, {counted(c.n_layer, "layer")} x {c.n_embd} channels x '
            f'{counted(c.n_head, "head")}, context {c.block_size}, vocabulary {c.vocab_size}',
            f'  {num_params:,} parameters, '
            f'{flops_of(model, c.block_size)[1] / 1e6:,.1f} MFLOP per token',
            f'batch: {counted(batches.micro_batch, "sequence")} x '
            f'{counted(batches.accumulation, "micro-batch")} x {counted(run.env.world, "process")} = '
            f'{batches.global_batch * c.block_size:,} tokens per step{chunks}']


def describe_length(run, settings):
    """Length and folder of the run, and notes on a schedule that is probably a mistake."""
    cfg, batches = run.cfg, run.batches
    windows = batches.windows_before(cfg.max_iters)
    epochs = windows / batches.split.num_windows
    length = f'{counted(cfg.max_iters, "step")}, {windows * run.val.T:,} tokens, {epochs:.2f} epochs'
    if is_open(cfg):
        most = f', at most {length}' if cfg.max_iters < NO_LIMIT else ''
        used = f', {run.state.seconds_used / 60:.1f} already used' if settings.resumed else ''
        length = f'a time budget of {cfg.time_budget:g} min{used}{most}'
    lines = [f'run: {length}, into {cfg.out_dir}']
    if settings.resumed:
        lines.append(f'resuming at step {run.state.iter_num:,}')
    if cfg.decay_lr and cfg.min_lr > cfg.learning_rate:
        lines.append(f'note: min_lr={cfg.min_lr:g} is above learning_rate: the rate will increase')
    if run.state.iter_num >= cfg.max_iters:
        clock = '' if cfg.time_budget is None else ' --time_budget=None'
        lines.append(f'nothing to do: the run is at step {run.state.iter_num:,} of {cfg.max_iters:,}; '
                     f'to train further, give --max_iters=N{clock}')
    if cfg.decay_lr and cfg.warmup_iters >= cfg.max_iters:
        lines.append(f'note: the warmup of {counted(cfg.warmup_iters, "step")} takes the complete run')
    if not cfg.decay_lr and {'warmup_iters', 'warmup_fraction'} & settings.given.keys():
        lines.append('note: decay_lr=False turns the warmup off; a warmup to a constant rate is '
                     f'--decay_lr=True --min_lr={cfg.learning_rate:g}')
    if cfg.max_epochs is not None and cfg.max_iters < 10:
        lines.append(f'note: {counted(cfg.max_iters, "step")} change the weights little; raise --max_epochs '
                     'or lower --gradient_accumulation_steps')
    return lines
