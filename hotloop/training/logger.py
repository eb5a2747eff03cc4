"""The log of a run: readable lines, log.jsonl for programs, report.html, TensorBoard, wandb."""

import contextlib
import json
import math
import os
import sys
import time
from typing import NamedTuple

import torch

from hotloop.system.device import peak_memory
from hotloop.system.distributed import print0
from hotloop.system.files import counted, first_line, replacing
from hotloop.system.text import compact, duration, file_size, rate, short
from hotloop.training.report import write_report

# names in TensorBoard; other numbers keep those of log.jsonl
TENSORBOARD = {'loss': 'Loss/train', 'val_loss': 'Loss/val', 'lr': 'LearningRate',
               'grad_norm': 'GradientNorm', 'tokens_per_s': 'Throughput/tokens_per_sec',
               'mfu': 'Throughput/mfu', 'peak_memory_mb': 'Memory/allocated_gb'}
REPORT_COST = 1 / 200  # the most of a run's time that its reports take, beside the last one
MAX_BAD_STEPS = 20  # in a row, after which a run has diverged; fp16 halves its loss scale at each


class Window(NamedTuple):
    """The steps since the last log line."""
    loss: float  # mean over their targets
    skipped: int  # steps with a non-finite loss or gradient
    norm: float  # of the last step's gradients
    steps: int
    seconds: float  # in steps alone
    waited: float  # of these, seconds spent on data
    is_first: bool  # whether they include startup and compilation


class Meter:
    """
    Sum losses and times between log lines. The sums stay on the device; read() is the one wait.
    logged: the sums of a resumed run since its last line, [loss, targets, skipped, steps].
    """

    def __init__(self, batches, logged, bad_in_a_row, device):
        dtype = torch.float64
        if device.type == 'mps':  # which has no float64
            dtype = torch.float32
        self.sums = torch.tensor(logged or [0.0] * 4, dtype=dtype, device=device)
        self.bad = torch.tensor(bad_in_a_row, device=device)  # in a row up to now
        self.worst = self.bad.clone()  # the most in a row
        self.batches, self.norm, self.is_first = batches, None, True
        self.began, self.steps, self.waited = time.perf_counter(), 0, batches.waited

    def add(self, result, num_targets):
        """Add the StepResult of a step. A skipped step never enters an average."""
        skipped = result.skipped.to(self.sums.dtype)
        loss = torch.where(result.skipped > 0, 0.0, result.loss).to(self.sums.dtype)
        self.sums += torch.stack((loss, num_targets * (1 - skipped), skipped, 1 + 0 * skipped))
        self.bad = (self.bad + 1) * result.skipped.to(self.bad.dtype)
        self.worst = torch.maximum(self.worst, self.bad)
        self.norm, self.steps = result.norm, self.steps + 1

    def exclude(self, seconds):
        """Leave the time of an evaluation or a save out of the steps' time."""
        self.began += seconds

    def state(self):
        """Return (sums since the last log line, bad steps in a row) for a checkpoint."""
        return self.sums.tolist(), int(self.bad)

    def check(self, step, advice):
        """Raise ValueError after MAX_BAD_STEPS non-finite steps in a row."""
        if int(self.worst) >= MAX_BAD_STEPS:
            raise ValueError(f'step {step}: loss or gradients were not finite for {MAX_BAD_STEPS} '
                             'steps in a row. Those steps were skipped. With dtype=float16, try '
                             f'bfloat16 or float32. {advice}')

    def read(self):
        """Wait for the device and return the Window of the steps since the last call."""
        loss, targets, skipped, _ = self.sums.tolist()
        now, waited = time.perf_counter(), self.batches.waited
        window = Window(loss / targets if targets else math.nan, int(skipped), self.norm.item(),
                        self.steps, now - self.began, waited - self.waited, self.is_first)
        self.sums.zero_()
        self.began, self.waited, self.steps, self.is_first = now, waited, 0, False
        return window


class Log:
    """
    Write the same numbers to the terminal, log.jsonl and, if enabled, TensorBoard and wandb, and
    draw log.jsonl in report.html. Only rank 0 has a log.
    """

    def __init__(self, cfg, settings, env, resumed_at=None):
        """resumed_at: the step of a resumed run, whose later lines are dropped."""
        self.file, self.wandb, self.tensorboard, self.failed = None, None, None, False
        if env.rank:
            return
        self.path = os.path.join(cfg.out_dir, 'log.jsonl')
        self.next_report = 0.0
        if resumed_at is not None and os.path.exists(self.path):
            keep_lines(self.path, resumed_at)
        self.file = open(self.path, 'a', encoding='utf-8', buffering=1)  # noqa: SIM115
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            # purge_step hides the events after a checkpoint, which come again
            purge = None if resumed_at is None else resumed_at + 1
            self.tensorboard = SummaryWriter(os.path.join(cfg.out_dir, 'tensorboard'),
                                             purge_step=purge)
        if cfg.wandb_log:
            import wandb
            try:
                wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or cfg.out_dir,
                           config=settings)
            except Exception as e:  # of any kind: no login, no network
                raise ValueError(f'wandb did not start: {first_line(e)}; run `wandb login`, set '
                                 'WANDB_MODE=offline, or give --wandb_log=False') from None
            self.wandb = wandb

    def write(self, text, **numbers):
        """Print the text and write the numbers that are finite."""
        print0(text)
        if self.file:
            row = {}
            for name, value in numbers.items():
                if value is not None and math.isfinite(value):
                    row[name] = value
            try:
                self.file.write(json.dumps(row) + '\n')
                if self.tensorboard:
                    add_events(self.tensorboard, row)
            except OSError as e:  # lines wait in the file's buffer for room
                if not self.failed:
                    print0(f'{self.path} could not be written: {e.strerror or e}')
                self.failed = True
        if self.wandb:
            try:
                self.wandb.log(numbers, step=numbers['step'])
            except Exception as e:  # of any kind: a lost connection must not end a run
                print0(f'wandb failed: {first_line(e)}; training continues')
                self.wandb = None

    def step(self, state, lr, window, env, speed, left):
        """
        Log a line for the steps of a Window. speed: a Speed. left(seconds of a step): seconds to
        the end of the run.
        """
        step, memory = state.iter_num, peak_memory(env.device)
        numbers = {'loss': window.loss, 'lr': lr, 'grad_norm': window.norm,
                   'tokens_seen': state.tokens_seen, 'skipped': window.skipped or None,
                   'peak_memory_mb': memory and memory / 1e6}
        if window.is_first:
            numbers['resumed'] = step - window.steps or None
            self.write(step_line(step, numbers, startup=window.seconds), step=step, **numbers)
            return
        each = window.seconds / window.steps
        tokens_per_s = speed.tokens / each
        numbers |= {'ms': each * 1000, 'tokens_per_s': tokens_per_s,
                    'data_share': window.waited / window.seconds}
        if speed.peak:
            numbers['mfu'] = tokens_per_s * speed.flops_per_token / env.world / speed.peak
        self.write(step_line(step, numbers, left=left(each)), step=step, **numbers)

    def evaluation(self, step, evaluation):
        """Log a line for an Evaluation and redraw the report."""
        text, numbers = evaluation_text(step, evaluation)
        self.write(text, step=step, **numbers)
        self.report()

    def report(self, last=False):
        """Write report.html unless reports would take more than REPORT_COST of the time."""
        began = time.monotonic()
        if self.file is None or not (last or began >= self.next_report):
            return
        try:
            if os.path.getsize(self.path):
                write_report(os.path.dirname(self.path))
        except Exception as e:  # of any kind: a picture must not end a run
            print0(f'report.html could not be written: {first_line(e)}')
        self.next_report = began + (time.monotonic() - began) / REPORT_COST

    def close(self):
        if self.file:
            with contextlib.suppress(OSError):
                self.file.close()
            self.report(last=True)
        if self.tensorboard:
            with contextlib.suppress(OSError):
                self.tensorboard.close()
        if self.wandb:
            with contextlib.suppress(Exception):
                self.wandb.finish(exit_code=int(sys.exc_info()[0] is not None))


class Speed(NamedTuple):
    """What turns the time of a step into tokens per second and utilization."""
    tokens: int  # of a step
    flops_per_token: float
    peak: float | None  # FLOP/s of a device; None: unknown


def add_events(writer, row):
    """Add the numbers of a line of log.jsonl to TensorBoard's event file."""
    for name, value in row.items():
        if name == 'peak_memory_mb':
            writer.add_scalar(TENSORBOARD[name], value / 1000, row['step'])
        elif name != 'step':
            writer.add_scalar(TENSORBOARD.get(name, name), value, row['step'])


def keep_lines(path, last_step):
    """Drop the lines after a step, which will be written again, and incomplete ones."""
    try:
        with open(path, encoding='utf-8', errors='replace') as f, replacing(path) as kept:
            for line in f:
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if line.endswith('\n') and json.loads(line)['step'] <= last_step:
                        kept.write(line.encode())
    except OSError as e:
        raise ValueError(f'{path} cannot be written: {e.strerror or e}') from None


def step_line(step, numbers, left=None, startup=None):
    """
    Format the line of a step, at most 80 columns, from the numbers that are logged. left: seconds
    to the end of the run. startup: seconds of the first steps, which include startup.
    """
    parts = [f'step {step}: loss {short(numbers["loss"])}', f'lr {rate(numbers["lr"])}']
    if 'tokens_per_s' in numbers:
        parts.append(f'{compact(numbers["tokens_per_s"])} tok/s')
    if 'mfu' in numbers:
        parts.append(f'mfu {numbers["mfu"]:.0%}')
    if numbers['peak_memory_mb']:
        parts.append(file_size(1e6 * numbers['peak_memory_mb']))
    if startup is None:
        parts.append(f'{duration(left)} left')
    else:
        parts.append(f'{startup:.1f} s including startup')
    line = ', '.join(parts)
    if numbers['skipped']:
        line += f'\nstep {step}: {counted(numbers["skipped"], "non-finite step")} skipped'
    elif math.isnan(numbers['loss']):
        line += f'\nstep {step}: no token since the last line counts toward the loss'
    return line


def evaluation_text(step, evaluation):
    """Return the lines of an Evaluation, at most 80 columns, and the numbers to log."""
    val, train = evaluation.val, evaluation.train
    numbers = {f'val_{name}': val[name] for name in ('loss', 'stderr', 'bpb', 'tokens')}
    numbers |= {'val_perplexity': math.exp(min(val['loss'], 700)), 'train_loss': train['loss'],
                'eval_seconds': evaluation.seconds}
    prefix = ''
    if step:  # with eval_only the step of the weights may be unknown
        prefix = f'step {step}: '
    text = f'{prefix}val loss {short(val["loss"])}'
    if math.isfinite(val['stderr']):
        text += f' +- {short(val["stderr"])}'
    if val['bpb'] is not None:
        text += f', {short(val["bpb"])} bits per byte'
    text += f', train loss {short(train["loss"])}'
    for name, loss in val.get('losses', {}).items():  # of a mixture's datasets
        text += f'\n{prefix}val loss {short(loss)} on {name}'
        numbers[f'val_loss_{name}'] = loss
    return text, numbers
