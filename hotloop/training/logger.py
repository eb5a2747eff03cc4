"""The log of a run: readable lines, log.jsonl for programs, report.html, TensorBoard, wandb."""

import contextlib
import json
import math
import os
import sys
import time

from hotloop.data.chat import CHATS
from hotloop.system.device import peak_flops, peak_memory
from hotloop.system.files import counted, first_line, replacing
from hotloop.system.flops import flops_of
from hotloop.system.text import compact, duration, file_size, rate, shell, short
from hotloop.training.report import write_report
from hotloop.training.schedule import is_open

# names in TensorBoard; other numbers keep those of log.jsonl
TENSORBOARD = {'loss': 'Loss/train', 'val_loss': 'Loss/val', 'lr': 'LearningRate',
               'grad_norm': 'GradientNorm', 'tokens_per_s': 'Throughput/tokens_per_sec',
               'mfu': 'Throughput/mfu', 'peak_memory_mb': 'Memory/allocated_gb'}
REPORT_COST = 1 / 200  # the most of a run's time that its reports take, except for the first and the last


class Log:
    """
    Writes the same numbers to the terminal, log.jsonl and, if enabled, TensorBoard and wandb, and draws
    log.jsonl in report.html. Only rank 0 has a log.
    """

    def __init__(self, out, cfg, settings, env, state):
        """state: of a resumed run, whose later lines are dropped; None for a new run."""
        self.env, self.file, self.wandb, self.tensorboard, self.failed = env, None, None, None, False
        if env.rank:
            return
        self.path, self.next_report = out / 'log.jsonl', 0.0
        if state is not None and os.path.exists(self.path):
            try:
                keep_lines(self.path, state.iter_num)
            except OSError as e:
                raise ValueError(f'{self.path} cannot be written: {e.strerror or e}') from None
        self.file = open(self.path, 'a', encoding='utf-8', buffering=1)  # noqa: SIM115
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            # purge_step hides the events after a checkpoint, which come again
            self.tensorboard = SummaryWriter(out / 'tensorboard', purge_step=state and state.iter_num + 1)
        if cfg.wandb_log:
            import wandb
            try:
                wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or cfg.out_dir, config=settings)
            except Exception as e:  # of any kind: no login, no network
                raise ValueError(f'wandb did not start: {first_line(e)}; run `wandb login`, set '
                                 'WANDB_MODE=offline, or give --wandb_log=False') from None
            self.wandb = wandb

    def write(self, text, **numbers):
        """Prints the text and writes the numbers; the files leave out those that are None or not finite."""
        self.env.print_once(text)
        if self.file:
            row = {}
            for name, value in numbers.items():
                if isinstance(value, str) or (value is not None and math.isfinite(value)):
                    row[name] = value
            try:
                self.file.write(json.dumps(row) + '\n')
                if self.tensorboard:
                    add_events(self.tensorboard, row)
            except OSError as e:  # lines wait in the file's buffer for room
                if not self.failed:
                    self.env.print_once(f'{self.path} could not be written: {e.strerror or e}')
                self.failed = True
        if self.wandb:
            try:
                self.wandb.log(numbers, step=numbers['step'])
            except Exception as e:  # of any kind: a lost connection must not end a run
                self.env.print_once(f'wandb failed: {first_line(e)}; training continues')
                self.wandb = None

    def lacks_evaluation(self, step):
        """Whether log.jsonl has lines, but no evaluation of this step."""
        if self.file is None:
            return False
        with open(self.path, encoding='utf-8') as f:
            rows = [json.loads(line) for line in f]
        return bool(rows) and not any(row['step'] == step and 'val_loss' in row for row in rows)

    def report(self, last=False):
        """
        Writes report.html if it is the last time, or if enough time has passed that reports take at most
        REPORT_COST of it.
        """
        began = time.monotonic()
        if self.file is None or not (last or began >= self.next_report):
            return
        try:
            if os.path.getsize(self.path):
                write_report(os.path.dirname(self.path))
        except Exception as e:  # of any kind: a picture must not end a run
            self.env.print_once(f'report.html could not be written: {first_line(e)}')
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


def add_events(writer, row):
    """Adds the numbers and the sample of a line of log.jsonl to TensorBoard's event file."""
    for name, value in row.items():
        if isinstance(value, str):
            writer.add_text(name, value, row['step'])
        elif name == 'peak_memory_mb':
            writer.add_scalar(TENSORBOARD[name], value / 1000, row['step'])
        elif name != 'step':
            writer.add_scalar(TENSORBOARD.get(name, name), value, row['step'])


def keep_lines(path, last_step):
    """Drops the lines after a step, which will be written again, and incomplete ones."""
    with open(path, encoding='utf-8', errors='replace') as f:
        lines = f.readlines()
    with replacing(path) as kept:  # Windows cannot replace a file that is open
        for line in lines:
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


def step_line(step, numbers, left=None, startup=None):
    """
    The line of a step, at most 80 columns, from the numbers that are logged; what is unknown is left out.
    left: seconds to the end of the run; startup: seconds of a lap that includes it.
    """
    parts = [f'step {step}: loss {short(numbers["loss"])}', f'lr {rate(numbers["lr"])}']
    if 'tokens_per_s' in numbers:
        parts.append(f'{compact(numbers["tokens_per_s"])} tok/s')
    if 'mfu' in numbers:
        parts.append(f'mfu {numbers["mfu"]:.0%}')
    if numbers['peak_memory_mb']:
        parts.append(file_size(1e6 * numbers['peak_memory_mb']))
    parts.append(f'{duration(left)} left' if startup is None else f'{startup:.1f} s including startup')
    line = ', '.join(parts)
    if numbers['skipped']:
        line += f'\nstep {step}: {counted(numbers["skipped"], "non-finite step")} skipped'
    elif math.isnan(numbers['loss']):
        line += f'\nstep {step}: no token since the last line counts toward the loss'
    return line


def log_step(run, lr, norm, lap):
    """Logs one line for the steps of a lap. The first lap includes compilation."""
    state, cfg, env = run.state, run.cfg, run.env
    steps, seconds, waited, first = lap
    loss_sum, targets, skipped, _ = state.logged
    state.logged = []
    memory = peak_memory(env.device)
    numbers = {'loss': loss_sum / targets if targets else math.nan, 'lr': lr, 'grad_norm': norm,
               'tokens_seen': state.tokens_seen, 'skipped': skipped or None,
               'peak_memory_mb': memory and memory / 1e6}
    if first:
        numbers['resumed'] = state.iter_num - steps or None
        text = step_line(state.iter_num, numbers, startup=seconds)
    else:
        each = seconds / steps
        tokens_per_s = run.batches.global_batch * run.val.T / each
        numbers |= {'ms': each * 1000, 'tokens_per_s': tokens_per_s, 'data_share': waited / seconds}
        if peak := peak_flops(env.device, env.dtype):
            numbers['mfu'] = tokens_per_s * flops_of(run.model, run.val.T)[1] / env.world / peak
        left = max(run.deadline.left(), 0) if is_open(cfg) else (cfg.max_iters - state.iter_num) * each
        text = step_line(state.iter_num, numbers, left=left)
    run.log.write(text, step=state.iter_num, **numbers)


def evaluation_line(numbers):
    """The losses of an evaluation, at most 66 columns, from the numbers that are logged."""
    parts = [f'val loss {short(numbers["val_loss"])}']
    if math.isfinite(numbers['val_stderr']):
        parts[0] += f' +- {short(numbers["val_stderr"])}'
    if numbers['val_bpb'] is not None:
        parts.append(f'{short(numbers["val_bpb"])} bits per byte')
    parts.append(f'train loss {short(numbers["train_loss"])}')
    return ', '.join(parts)


def log_evaluation(run, evaluation):
    """Logs one line for an Evaluation. With eval_only it is printed, not logged."""
    val, train, step = evaluation.val, evaluation.train, run.state.iter_num
    numbers = {f'val_{name}': val[name] for name in ('loss', 'stderr', 'bpb', 'tokens')}
    numbers |= {'val_perplexity': math.exp(min(val['loss'], 700)), 'train_loss': train['loss'],
                'eval_seconds': evaluation.seconds}
    prefix = f'step {step}: ' if step else ''  # with eval_only the step of the weights may be unknown
    text = prefix + evaluation_line(numbers)
    for name, loss in val.get('losses', {}).items():  # of a mixture's datasets
        text += f'\n{prefix}val loss {short(loss)} on {name}'
        numbers[f'val_loss_{name}'] = loss
    if run.log is None:
        text += f'\nperplexity {short(numbers["val_perplexity"])}, {val["tokens"]:,} tokens'
        run.env.print_once(f'{text}, {evaluation.seconds:.1f} s')
    else:
        run.log.write(text, step=step, **numbers)
        run.log.report()


def log_done(run):
    """The last lines of a run that has reached max_iters or is out of patience."""
    memory = peak_memory(run.env.device)
    peak = f', peak memory {file_size(memory)}' if memory else ''
    run.env.print_once(f'done: best val loss {short(run.state.best_val_loss)}{peak}')
    run.env.print_once(f'curves: {run.out / "report.html"}')
    words, chats = [f'--out_dir={run.cfg.out_dir}'], run.context.get('template') in CHATS
    if 'lora' in run.context and run.cfg.data_dir != type(run.cfg).data_dir:  # which has a base of the hub
        words.append(f'--data_dir={run.cfg.data_dir}')
    if chats:
        words.append('--chat')
    run.env.print_once(f'to {"chat" if chats else "sample"}: python sample.py {shell(*words)}')
