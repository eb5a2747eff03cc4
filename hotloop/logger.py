"""The line for people, log.jsonl for programs, wandb; what a run is, once."""

import json
import math
import os

import torch

from configurator import differences
from hotloop.dataloader import Mixture, windows_per_epoch
from hotloop.device import attention_kernel, peak_flops, peak_memory


class Log:
    """The same numbers as a line for people, a line of log.jsonl for programs, and to wandb when asked."""

    def __init__(self, out, cfg, settings, env, resumed):
        self.env, self.file, self.wandb, self.told = env, None, None, False
        if env.rank:
            return
        self.path = out / 'log.jsonl'
        self.open(resumed)
        if cfg.wandb_log:
            import wandb
            wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or cfg.out_dir, config=settings)
            self.wandb = wandb

    def write(self, text, **numbers):
        self.env.print_once(text)
        if self.file:  # JSON knows neither NaN nor infinity
            told = {k: v for k, v in numbers.items() if v is not None and (isinstance(v, str) or math.isfinite(v))}
            self.attempt(self.file.write, json.dumps(told) + '\n')
        if self.wandb:
            self.wandb.log(numbers, step=numbers['step'])

    def open(self, state):
        """Forgets what comes after the state, if there is one, that the run goes on from."""
        if state is not None and os.path.exists(self.path):
            self.attempt(keep_lines, self.path, state.iter_num, state.evaluation_left)
        self.file = open(self.path, 'a', encoding='utf-8', buffering=1)  # noqa: SIM115

    def attempt(self, action, *args):
        """On a full disk, which is told once, a line waits in the buffer for the first that finds room."""
        try:
            action(*args)
        except OSError as e:
            if not self.told:
                self.env.print_once(f'{self.path} could not be written: {e.strerror or e}; training goes on')
            self.told = True

    def go_back(self, state):
        if self.file:
            self.attempt(self.file.close)
            self.open(state)

    def close(self):
        if self.file:
            self.attempt(self.file.close)
        if self.wandb:
            self.wandb.finish()


def keep_lines(path, last_step, evaluation_left):
    """
    Drops the lines of a log that will come again, those after a step and, where it is left, its evaluation, and those
    that a crash left torn.
    """
    def belongs(line):
        try:
            told = json.loads(line)
            return told['step'] <= last_step - (evaluation_left and 'val_loss' in told)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
    with open(path, encoding='utf-8', errors='replace') as f, open(f'{path}.tmp', 'w', encoding='utf-8') as kept:
        kept.writelines(line for line in f if line.endswith('\n') and belongs(line))
    os.replace(f'{path}.tmp', path)


def duration(seconds):
    """90 -> 1m30s."""
    m, s = divmod(int(seconds), 60)
    h, m = divmod(m, 60)
    return f'{h}h{m:02d}m' if h else f'{m}m{s:02d}s' if m else f'{s}s'


def count(n, noun):
    """1 process, 2 processes."""
    return f'{n} {noun}' + ('' if n == 1 else 'es' if noun.endswith(('s', 'h')) else 's')


def log_step(run, lr, norm, seconds, steps, waited, first):
    """One line on the steps since the last. first: its seconds hold the compilation and say nothing about speed."""
    state, cfg, env = run.state, run.cfg, run.env
    loss_sum, targets, skipped, _ = state.logged
    state.logged = []
    loss = loss_sum / targets if targets else None
    tokens = steps * run.batches.global_batch * run.val.T
    flops = tokens * run.model.flops_per_token(run.val.T) / seconds / env.world
    peak = peak_flops(env.device, env.dtype)
    mfu = flops / peak if peak else None
    memory = peak_memory(env.device)
    left = (cfg.max_iters - state.iter_num) * seconds / steps
    speed = (f'{seconds / steps * 1000:.1f} ms, {tokens / seconds:,.0f} tok/s, mfu {f"{mfu:.1%}" if mfu else "n/a"}, '
             f'data {waited / seconds:.1%}, {duration(left)} left')
    text = (f'step {state.iter_num}/{cfg.max_iters}: loss {"n/a" if loss is None else f"{loss:.4f}"}, lr {lr:.2e}, '
            f'norm {norm:.2f}, {f"{seconds:.1f} s, start-up included" if first else speed}'
            + (f'; {skipped} steps skipped, not finite' if skipped else ''))
    speeds = {} if first else {'ms': seconds / steps * 1000, 'tokens_per_s': tokens / seconds, 'mfu': mfu,
                               'data_share': waited / seconds}
    run.log.write(text, step=state.iter_num, loss=loss, lr=lr, grad_norm=norm, tokens_seen=state.tokens_seen,
                  skipped=skipped or None, peak_memory_mb=memory and memory / 1e6, **speeds)


def announce(run, model_cfg, given, said, meta, resumed):
    """What this run is, once, with the reasons."""
    cfg, env, model, batches, print_once = run.cfg, run.env, run.model, run.batches, run.env.print_once
    for line in said:
        print_once(line)
    told = differences([model_cfg, cfg], given, 'checkpoint' if resumed else 'derived')
    print_once(f'settings that differ from the defaults:\n{told}')
    more = torch.cuda.device_count() if env.device.type == 'cuda' and env.world == 1 else 1
    print_once(f'device: {env.device} ({env.reasons["device"]}), {count(env.world, "process")} of '
        f'{count(env.threads, "thread")}'
        + (f'; {more} GPUs are here: "torchrun --standalone --nproc_per_node={more}" in place of "python" uses all'
           if more > 1 else ''))
    if env.world > 1:
        print_once(f'processes: one that hears nothing of the others for {cfg.timeout_minutes:g} minutes gives up '
            '(timeout_minutes)')
    print_once(f'dtype: {str(env.dtype).removeprefix("torch.")} ({env.reasons["dtype"]})')
    print_once(f'compile: {"on" if env.compile else "off"} ({env.reasons["compile"]})')
    print_once(f'attention: scaled_dot_product_attention, {attention_kernel(model, batches.micro_batch, env)} kernel')
    kind = meta['tokenizer'].get('name') or meta['tokenizer']['kind']
    shares = f' ({", ".join(f"{w:.1%}" for w in run.val.weights)})' if isinstance(run.val, Mixture) else ''
    print_once(f'data: {cfg.dataset}{shares}, {batches.split.num_tokens:,} training and {run.val.num_tokens:,} validation '
        f'tokens, {kind} tokenizer' + (' (no meta.json: read as nanoGPT would)' if meta['foreign'] else '')
        + (', kept on the device' if batches.tokens is not None else ''))
    c = model.config
    print_once(f'model: {c.preset}, {c.n_layer} layers x {c.n_embd} channels x {c.n_head} heads, context {c.block_size}, '
        f'vocabulary {c.vocab_size}: {model.num_params():,} parameters, '
        f'{model.flops_per_token(c.block_size) / 1e6:,.1f} MFLOP a token')
    print_once(f'batch: {count(batches.micro_batch, "sequence")} x {count(batches.accumulation, "micro-batch")} x '
        f'{count(env.world, "process")} = '
        f'{batches.global_batch * c.block_size:,} tokens a step')
    epochs = cfg.max_iters * batches.global_batch / windows_per_epoch(batches.split.num_tokens, c.block_size)
    print_once(f'run: {cfg.max_iters:,} steps, {cfg.max_iters * batches.global_batch * c.block_size:,} tokens, {epochs:.2f} '
        f'epochs, into {cfg.out_dir}' + (f'; resuming at step {run.state.iter_num:,}' if resumed else ''))
    if model.loss_chunks > 1:
        print_once(f'loss: in {model.loss_chunks} parts, for memory')
    if cfg.decay_lr and cfg.min_lr > cfg.learning_rate:
        print_once(f'note: min_lr={cfg.min_lr:g} is above learning_rate={cfg.learning_rate:g}: the rate will rise')
    idle = {'muon_lr': cfg.optimizer == 'muon', 'muon_momentum': cfg.optimizer == 'muon', 'lr_schedule': cfg.decay_lr,
            'min_lr': cfg.decay_lr, 'lr_decay_iters': cfg.decay_lr, 'compile_mode': env.compile,
            'decay_fraction': cfg.decay_lr and cfg.lr_schedule == 'linear', 'eval_tokens': cfg.eval_iters is None,
            'sample_prompt': cfg.sample_interval, 'sample_tokens': cfg.sample_interval}
    for name in (name for name, acts in idle.items() if name in given and not acts):
        print_once(f'note: {name} does nothing under the other settings')
    if cfg.warmup_iters >= cfg.max_iters:
        print_once(f'note: the warm-up of {cfg.warmup_iters} steps is longer than the run')
