"""The summary of a run, printed once before it starts, with the reasons for its choices."""

import torch

from hotloop.system.device import attention_kernels
from hotloop.system.distributed import print0
from hotloop.system.files import counted
from hotloop.system.text import wrapped
from hotloop.training.forecast import flops_of
from hotloop.training.settings import threads


def print_run(model, batches, val, meta, cfg, env):
    """Print the machine, the data, the model and the batch of a run."""
    for line in describe_machine(model, cfg, env) + describe_work(model, batches, val, meta, cfg):
        print0(wrapped(line))


def describe_machine(model, cfg, env):
    """List lines about device, processes, dtype, compilation and attention."""
    kernels = ', '.join(attention_kernels(model.config, env))
    onoff = 'on' if env.compile else 'off'
    lines = [f'device: {env.device} ({env.reasons["device"]}), {env.world} x '
             f'{counted(threads(), "thread")}',
             f'dtype: {str(env.dtype).removeprefix("torch.")} ({env.reasons["dtype"]})',
             f'compile: {onoff} ({env.reasons["compile"]})',
             f'attention: scaled_dot_product_attention; kernels available: {kernels}']
    if model.config.window or cfg.document_mask or cfg.pack_rows:
        how = 'FlexAttention' if env.device.type == 'cuda' else 'a mask'
        lines.append(f'attention within windows and documents: {how}')
    if cfg.shard != 'none' and env.world == 1:
        lines.append(f'shard={cfg.shard}: no effect, because there is only one process')
    gpus = torch.cuda.device_count()
    if env.device.type == 'cuda' and gpus > env.world == 1:
        lines.append(f'note: to use all {gpus} GPUs: torchrun --standalone '
                     f'--nproc_per_node={gpus} train.py ...')
    return lines


def describe_work(model, batches, val, meta, cfg):
    """List lines about data, model and batch."""
    c, data = model.config, cfg.dataset
    if len(val.weights) > 1:
        data += f' ({", ".join(f"{weight:.1%}" for weight in val.weights)})'
    data += (f', {batches.split.num_tokens:,} training and {val.num_tokens:,} validation tokens, '
             f'{meta["tokenizer"].get("name") or meta["tokenizer"]["kind"]} tokenizer')
    if meta['foreign']:
        data += " (no meta.json: read with nanoGPT's assumptions)"
    if batches.tokens is not None:
        data += ', in GPU memory'
    chunks = ''
    if model.loss_chunks > 1:
        chunks = f', loss in {model.loss_chunks} chunks to save memory'
    return [f'data: {data}',
            f'model: {c.preset}, {counted(c.n_layer, "layer")} x {c.n_embd} channels x '
            f'{counted(c.n_head, "head")}, context {c.block_size}, vocabulary {c.vocab_size}',
            f'  {model.num_params():,} parameters, '
            f'{flops_of(model, c.block_size)[1] / 1e6:,.1f} MFLOP per token',
            f'batch: {counted(batches.micro_batch, "sequence")} x '
            f'{counted(batches.accumulation, "micro-batch")} x '
            f'{counted(batches.env.world, "process")} = '
            f'{batches.global_batch * c.block_size:,} tokens per step{chunks}']


def print_length(cfg, schedule, state, batches, is_resumed):
    """Print the length of a run, and notes on a schedule that is probably a mistake."""
    steps = schedule.max_iters
    windows = batches.windows_before(steps)
    length = (f'{counted(steps, "step")}, {windows * batches.split.T:,} tokens, '
              f'{windows / batches.split.num_windows:.2f} epochs')
    if schedule.is_open:
        length = f'a time budget of {cfg.time_budget:g} min'
        if is_resumed:
            length += f', {state.seconds_used / 60:.1f} already used'
    print0(f'run: {length}, into {cfg.out_dir}')
    if cfg.decay_lr and cfg.min_lr > cfg.learning_rate:
        print0(f'note: min_lr={cfg.min_lr:g} is above learning_rate: the rate will increase')
    if state.iter_num >= steps:
        clock = '' if cfg.time_budget is None else ' --time_budget=None'
        print0(f'nothing to do: the run is at step {state.iter_num:,} of {steps:,}; to train '
               f'further, give --max_iters=N{clock}')
    if cfg.decay_lr and schedule.warmup_iters >= steps:
        print0(f'note: the warmup of {counted(schedule.warmup_iters, "step")} takes all of the run')
    if cfg.max_epochs is not None and steps < 10:
        print0(f'note: {counted(steps, "step")} change the weights little; raise --max_epochs or '
               'lower --gradient_accumulation_steps')
