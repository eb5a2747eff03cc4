"""The log of a run: lines for people, log.jsonl for programs, wandb; and what the run is, printed once."""

import json
import math
import os
import shlex
import time
from typing import NamedTuple

import torch

from configurator import differences
from hotloop.dataloader import Mixture, windows_per_epoch
from hotloop.device import attention_kernels, peak_flops, peak_memory


class Log:
    """
    Writes the same numbers to the terminal, to log.jsonl and, if asked for, to wandb. Only rank 0 has a log.
    """

    def __init__(self, out, cfg, settings, env, state):
        """state: of the run that resumes, whose later lines are dropped; None for a new run."""
        self.env, self.file, self.wandb, self.failed = env, None, None, False
        if env.rank:
            return
        self.path = out / 'log.jsonl'
        if state is not None and os.path.exists(self.path):
            self.attempt(keep_lines, self.path, state.iter_num)
        self.file = open(self.path, 'a', encoding='utf-8', buffering=1)  # noqa: SIM115
        if cfg.wandb_log:
            import wandb
            wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or cfg.out_dir, config=settings)
            self.wandb = wandb

    def write(self, text, **numbers):
        """
        Prints the text, and writes the numbers; those that are None, infinite or NaN are left out of the
        file.
        """
        self.env.print_once(text)
        if self.file:
            row = {}
            for name, value in numbers.items():
                if isinstance(value, str) or (value is not None and math.isfinite(value)):
                    row[name] = value
            self.attempt(self.file.write, json.dumps(row) + '\n')
        if self.wandb:
            self.wandb.log(numbers, step=numbers['step'])

    def lacks_evaluation(self, step):
        """Whether log.jsonl has lines, but no evaluation of this step."""
        if self.file is None:
            return False
        with open(self.path, encoding='utf-8') as f:
            rows = [json.loads(line) for line in f if line.endswith('\n')]
        return bool(rows) and not any(row['step'] == step and 'val_loss' in row for row in rows)

    def attempt(self, action, *args):
        """
        Calls the action. On a full disk, reported once, lines wait in the file's buffer until there is room.
        """
        try:
            action(*args)
        except OSError as e:
            if not self.failed:
                self.env.print_once(f'{self.path} could not be written: {e.strerror or e}; training '
                                    'continues')
            self.failed = True

    def close(self):
        if self.file:
            self.attempt(self.file.close)
        if self.wandb:
            self.wandb.finish()


def keep_lines(path, last_step):
    """
    Drops the lines of a log after a step, which will be written again, and lines that a crash left
    incomplete.
    """
    with open(path, encoding='utf-8', errors='replace') as f, open(f'{path}.tmp', 'w',
                                                                   encoding='utf-8') as kept:
        for line in f:
            try:
                belongs = line.endswith('\n') and json.loads(line)['step'] <= last_step
            except (ValueError, KeyError, TypeError, RecursionError):
                belongs = False
            if belongs:
                kept.write(line)
    os.replace(f'{path}.tmp', path)


class Lap(NamedTuple):
    """What the steps since the last log line took."""
    steps: int
    seconds: float
    waited: float  # seconds of these spent on data
    first: bool  # the seconds contain the compilation, and say nothing about speed


class StepTimer:
    """
    Measures the steps between log lines, without the evaluations and saves between pause() and resume().
    """

    def __init__(self, batches, step):
        self.batches, self.step, self.first = batches, step, True
        self.began, self.waited = time.perf_counter(), batches.waited

    def lap(self, step):
        """The Lap up to this step; the next one starts here."""
        now = time.perf_counter()
        lap = Lap(step - self.step, now - self.began, self.batches.waited - self.waited, self.first)
        self.step, self.began, self.waited, self.first = step, now, self.batches.waited, False
        return lap

    def pause(self):
        self.paused = time.perf_counter()

    def resume(self):
        self.began += time.perf_counter() - self.paused


def log_step(run, lr, norm, lap):
    """One line about the steps of a Lap."""
    state, cfg, env = run.state, run.cfg, run.env
    loss_sum, targets, skipped, _ = state.logged
    state.logged = []
    loss = loss_sum / targets if targets else None
    memory = peak_memory(env.device)
    numbers = {'loss': loss, 'lr': lr, 'grad_norm': norm, 'tokens_seen': state.tokens_seen,
               'skipped': skipped or None,
               'peak_memory_mb': memory and memory / 1e6}
    parts = ['loss n/a' if loss is None else f'loss {loss:.4f}', f'lr {lr:.2e}', f'norm {norm:.2f}']
    if lap.first:
        parts.append(f'{lap.seconds:.1f} s, start-up included')
    else:
        each = lap.seconds / lap.steps
        tokens_per_s = run.batches.global_batch * run.val.T / each
        peak = peak_flops(env.device, env.dtype)
        mfu = tokens_per_s * run.model.flops_per_token(run.val.T) / env.world / peak if peak else None
        numbers |= {'ms': each * 1000, 'tokens_per_s': tokens_per_s, 'mfu': mfu,
                    'data_share': lap.waited / lap.seconds}
        parts += [f'{each * 1000:.1f} ms', f'{tokens_per_s:,.0f} tok/s', f'mfu {mfu:.1%}' if mfu
                  else 'mfu n/a',
                  f'data {lap.waited / lap.seconds:.1%}',
                  f'{duration((cfg.max_iters - state.iter_num) * each)} left']
    text = f'step {state.iter_num}/{cfg.max_iters}: {", ".join(parts)}'
    if skipped:
        text += f'; {skipped} steps skipped, not finite'
    run.log.write(text, step=state.iter_num, **numbers)


def log_evaluation(run, evaluation):
    """One line about an Evaluation; with eval_only it is printed and not logged."""
    val, train, step = evaluation.val, evaluation.train, run.state.iter_num
    perplexity = math.exp(min(val['loss'], 700))
    text = f'step {step}: val loss {val["loss"]:.4f} +- {val["stderr"]:.4f}, perplexity {perplexity:.2f}'
    if val['bpb'] is not None:
        text += f', {val["bpb"]:.4f} bits per byte'
    text += f' ({val["tokens"]:,} tokens); train loss {train["loss"]:.4f}; {evaluation.seconds:.1f} s'
    numbers = {'val_loss': val['loss'], 'val_stderr': val['stderr'], 'val_bpb': val['bpb'],
               'val_tokens': val['tokens'], 'val_perplexity': perplexity, 'train_loss': train['loss'],
               'eval_seconds': evaluation.seconds}
    for name, loss in val.get('losses', {}).items():  # of a mixture's datasets
        text += f', {name} {loss:.4f}'
        numbers[f'val_loss_{name}'] = loss
    if run.log is None:
        run.env.print_once(text)
    else:
        run.log.write(text, step=step, **numbers)


def log_done(run):
    """The last line of a run that has reached max_iters."""
    memory = peak_memory(run.env.device)
    peak = f', peak memory {memory / 1e6:,.0f} MB' if memory else ''
    run.env.print_once(f'done: best val loss {run.state.best_val_loss:.4f}{peak}; to see what the model '
                       f'writes: python sample.py --out_dir={shlex.quote(run.cfg.out_dir)}')


def duration(seconds):
    """90 -> 1m30s."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours}h{minutes:02d}m'
    return f'{minutes}m{seconds:02d}s' if minutes else f'{seconds}s'


def announce(run, settings, meta):
    """Prints what this run is, once, with the reasons."""
    origin = 'checkpoint' if settings.resumed else 'derived'
    changed = differences([settings.model, run.cfg], settings.given, origin)
    for line in [*settings.notes, f'settings that differ from the defaults:\n{changed}',
                 *describe_machine(run),
                 *describe_work(run, settings, meta), *describe_oddities(run, settings.given)]:
        run.env.print_once(line)


def describe_machine(run):
    """Device, processes, dtype, compilation, attention."""
    cfg, env = run.cfg, run.env
    lines = [f'device: {env.device} ({env.reasons["device"]}), processes: {env.world}, threads of each: '
             f'{env.threads}']
    gpus = torch.cuda.device_count() if env.device.type == 'cuda' else 1
    if gpus > 1 and env.world == 1:
        lines.append(f'note: for all {gpus} GPUs, replace "python" with "torchrun --standalone '
                     f'--nproc_per_node={gpus}"')
    if env.world > 1:
        lines.append(f'timeout: a process gives up after waiting {cfg.timeout_minutes:g} minutes for the '
                     'others')
    kernels = ', '.join(attention_kernels(run.model.config, env))
    return [*lines, f'dtype: {str(env.dtype).removeprefix("torch.")} ({env.reasons["dtype"]})',
            f'compile: {"on" if env.compile else "off"} ({env.reasons["compile"]})',
            f'attention: scaled_dot_product_attention; kernels available: {kernels}']


def describe_work(run, settings, meta):
    """Data, model, batch and length of the run."""
    cfg, batches, model, c = run.cfg, run.batches, run.model, run.model.config
    data = cfg.dataset
    if isinstance(run.val, Mixture):
        data += f' ({", ".join(f"{weight:.1%}" for weight in run.val.weights)})'
    data += (f', {batches.split.num_tokens:,} training and {run.val.num_tokens:,} validation tokens, '
             f'{meta["tokenizer"].get("name") or meta["tokenizer"]["kind"]} tokenizer')
    if meta['foreign']:
        data += " (no meta.json: read with nanoGPT's assumptions)"
    if batches.tokens is not None:
        data += ', in GPU memory'
    tokens = batches.global_batch * c.block_size
    epochs = cfg.max_iters * batches.global_batch / windows_per_epoch(batches.split.num_tokens, c.block_size)
    length = f'{cfg.max_iters:,} steps, {cfg.max_iters * tokens:,} tokens, {epochs:.2f} epochs'
    length += f', into {cfg.out_dir}'
    if settings.resumed:
        length += f'; resuming at step {run.state.iter_num:,}'
    chunks = f', loss in {model.loss_chunks} chunks to save memory' if model.loss_chunks > 1 else ''
    return [f'data: {data}',
            f'model: {c.preset}, {c.n_layer} layers x {c.n_embd} channels x {c.n_head} heads, context '
            f'{c.block_size}, vocabulary {c.vocab_size}: {model.num_params():,} parameters, '
            f'{model.flops_per_token(c.block_size) / 1e6:,.1f} MFLOP per token',
            f'batch: {batches.micro_batch} sequences x {batches.accumulation} micro-batches x '
            f'{run.env.world} processes = {tokens:,} tokens per step{chunks}',
            f'run: {length}']


def describe_oddities(run, given):
    """Settings that work, but may not do what was meant."""
    cfg, lines = run.cfg, []
    if cfg.decay_lr and cfg.min_lr > cfg.learning_rate:
        lines.append(f'note: min_lr={cfg.min_lr:g} is above learning_rate={cfg.learning_rate:g}: the rate '
                     'will rise')
    if cfg.warmup_iters >= cfg.max_iters:
        lines.append(f'note: the warm-up of {cfg.warmup_iters} steps is longer than the run')
    has_effect = {'muon_lr': cfg.optimizer == 'muon', 'muon_momentum': cfg.optimizer == 'muon',
                  'min_lr': cfg.decay_lr,
                  'lr_schedule': cfg.decay_lr, 'lr_decay_iters': cfg.decay_lr,
                  'compile_mode': run.env.compile,
                  'decay_fraction': cfg.decay_lr and cfg.lr_schedule == 'linear',
                  'eval_tokens': cfg.eval_iters is None,
                  'sample_prompt': cfg.sample_interval, 'sample_tokens': cfg.sample_interval}
    names = [name for name in has_effect if name in given and not has_effect[name]]
    return lines + [f'note: {name} has no effect with the other settings' for name in names]
