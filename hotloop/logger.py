"""The log of a run: readable lines, log.jsonl for programs, wandb."""

import contextlib
import datetime
import json
import math
import os
import shlex
import time

from hotloop.device import peak_flops, peak_memory
from hotloop.files import counted, replacing
from hotloop.lora import flops_of
from hotloop.schedule import is_open


class Log:
    """Writes the same numbers to the terminal, log.jsonl and, if enabled, wandb. Only rank 0 has a log."""

    def __init__(self, out, cfg, settings, env, state):
        """state: of a resumed run, whose later lines are dropped; None for a new run."""
        self.env, self.file, self.wandb, self.failed = env, None, None, False
        if env.rank:
            return
        self.path = out / 'log.jsonl'
        if state is not None and os.path.exists(self.path):
            keep_lines(self.path, state.iter_num)
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
            try:
                self.file.write(json.dumps(row) + '\n')
            except OSError as e:  # lines wait in the file's buffer for room
                if not self.failed:
                    self.env.print_once(f'{self.path} could not be written: {e.strerror or e}')
                self.failed = True
        if self.wandb:
            self.wandb.log(numbers, step=numbers['step'])

    def lacks_evaluation(self, step):
        """Whether log.jsonl has lines, but no evaluation of this step."""
        if self.file is None:
            return False
        with open(self.path, encoding='utf-8') as f:
            rows = [json.loads(line) for line in f]
        return bool(rows) and not any(row['step'] == step and 'val_loss' in row for row in rows)

    def close(self):
        if self.file:
            with contextlib.suppress(OSError):
                self.file.close()
        if self.wandb:
            self.wandb.finish()


def keep_lines(path, last_step):
    """Drops the lines after a step, which will be written again, and incomplete ones."""
    with open(path, encoding='utf-8', errors='replace') as f, replacing(path) as kept:
        for line in f:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                if line.endswith('\n') and json.loads(line)['step'] <= last_step:
                    kept.write(line.encode())


class StepTimer:
    """Measures the steps between log lines, without what happens between pause() and resume()."""

    def __init__(self, batches, step):
        self.batches, self.step, self.first = batches, step, True
        self.began, self.waited = time.perf_counter(), batches.waited

    def lap(self, step):
        """(steps, seconds, seconds of these spent on data, whether it is the first lap), up to this step."""
        now = time.perf_counter()
        lap = step - self.step, now - self.began, self.batches.waited - self.waited, self.first
        self.step, self.began, self.waited, self.first = step, now, self.batches.waited, False
        return lap

    def pause(self):
        self.paused = time.perf_counter()

    def resume(self):
        self.began += time.perf_counter() - self.paused


def log_step(run, lr, norm, lap):
    """Logs one line for the steps of a lap. The first lap includes compilation."""
    state, cfg, env = run.state, run.cfg, run.env
    steps, seconds, waited, first = lap
    loss_sum, targets, skipped, _ = state.logged
    state.logged = []
    loss = loss_sum / targets if targets else math.nan
    memory = peak_memory(env.device)
    numbers = {'loss': loss, 'lr': lr, 'grad_norm': norm, 'tokens_seen': state.tokens_seen,
               'skipped': skipped or None, 'peak_memory_mb': memory and memory / 1e6}
    total = '' if is_open(cfg) else f'/{cfg.max_iters}'
    text = f'step {state.iter_num}{total}: loss {loss:.4f}, lr {lr:.2e}, norm {norm:.2f}, '
    if first:
        text += f'{seconds:.1f} s, including startup'
    else:
        each = seconds / steps
        tokens_per_s = run.batches.global_batch * run.val.T / each
        numbers |= {'ms': each * 1000, 'tokens_per_s': tokens_per_s, 'data_share': waited / seconds}
        text += f'{each * 1000:.1f} ms, {tokens_per_s:,.0f} tok/s, '
        if peak := peak_flops(env.device, env.dtype):
            numbers['mfu'] = tokens_per_s * flops_of(run.model, run.val.T)[1] / env.world / peak
            text += f'mfu {numbers["mfu"]:.1%}, '
        left = (cfg.max_iters - state.iter_num) * each
        if is_open(cfg):
            left = max(run.deadline.left(), 0)
        left = datetime.timedelta(seconds=int(left))
        text += f'data {waited / seconds:.1%}, {left} left'
    if skipped:
        text += f'; {counted(skipped, "non-finite step")} skipped'
    run.log.write(text, step=state.iter_num, **numbers)


def log_evaluation(run, evaluation):
    """Logs one line for an Evaluation. With eval_only it is printed, not logged."""
    val, train, step = evaluation.val, evaluation.train, run.state.iter_num
    numbers = {f'val_{name}': val[name] for name in ('loss', 'stderr', 'bpb', 'tokens')}
    numbers |= {'val_perplexity': math.exp(min(val['loss'], 700)), 'train_loss': train['loss'],
                'eval_seconds': evaluation.seconds}
    text = f'step {step}: ' if step else ''  # with eval_only the step of the weights may be unknown
    text += (f'val loss {val["loss"]:.4f} +- {val["stderr"]:.4f}, '
             f'perplexity {numbers["val_perplexity"]:.2f}')
    if val['bpb'] is not None:
        text += f', {val["bpb"]:.4f} bits per byte'
    text += f' ({val["tokens"]:,} tokens); train loss {train["loss"]:.4f}; {evaluation.seconds:.1f} s'
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
    run.env.print_once(f'done: best val loss {run.state.best_val_loss:.4f}{peak}; to sample from the '
                       f'model: python sample.py --out_dir={shlex.quote(run.cfg.out_dir)}')
