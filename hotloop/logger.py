"""The log of a run: lines for people, log.jsonl for programs, wandb."""

import contextlib
import json
import math
import os
import shlex
import time
from typing import NamedTuple

from hotloop.device import peak_flops, peak_memory
from hotloop.files import replacing


class Log:
    """Writes the same numbers to the terminal, log.jsonl and, if asked for, wandb. Only rank 0 has a log."""

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
        """Prints the text and writes the numbers; the file leaves out those that are None or not finite."""
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
        """Calls the action. On a full disk, reported once, lines wait in the file's buffer for room."""
        try:
            action(*args)
        except OSError as e:
            if not self.failed:
                why = e.strerror or e
                self.env.print_once(f'{self.path} could not be written: {why}; training continues')
            self.failed = True

    def close(self):
        if self.file:
            self.attempt(self.file.close)
        if self.wandb:
            self.wandb.finish()


def keep_lines(path, last_step):
    """Drops the lines after a step, which will be written again, and those that a crash left incomplete."""
    with open(path, encoding='utf-8', errors='replace') as f, replacing(path) as kept:
        for line in f:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                if line.endswith('\n') and json.loads(line)['step'] <= last_step:
                    kept.write(line.encode())


class Lap(NamedTuple):
    """What the steps since the last log line took."""
    steps: int
    seconds: float
    waited: float  # seconds of these spent on data
    first: bool  # the seconds contain the compilation, and say nothing about speed


class StepTimer:
    """Measures the steps between log lines, without what happens between pause() and resume()."""

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
               'skipped': skipped or None, 'peak_memory_mb': memory and memory / 1e6}
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
        left = duration((cfg.max_iters - state.iter_num) * each)
        parts += [f'{each * 1000:.1f} ms', f'{tokens_per_s:,.0f} tok/s',
                  f'mfu {mfu:.1%}' if mfu else 'mfu n/a',
                  f'data {lap.waited / lap.seconds:.1%}', f'{left} left']
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
