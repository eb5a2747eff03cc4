"""What a run prints and records: summary, log lines, log.jsonl, report.html, TensorBoard, wandb."""

import json
import math
import os
import time
from typing import NamedTuple

import torch

from hotloop.data.chat import CHATS
from hotloop.system.device import attention_kernels, peak_memory
from hotloop.system.distributed import print0
from hotloop.system.files import counted, first_line, replacing
from hotloop.system.text import compact, duration, file_size, rate, script, shell, short, wrapped
from hotloop.training.forecast import flops_of
from hotloop.training.report import read_rows, write_report
from hotloop.training.run_dir import resume_command

REPORT_COST = 1 / 200  # the most of a run's time that its reports take, beside the last one
MAX_BAD_STEPS = 20  # in a row, after which a run has diverged; fp16 halves its loss scale at each


# -----------------------------------------------------------------------------
# the summary before the first step

def print_run(model, batches, val, meta, cfg, env):
    """Print the machine, the data, the model and the batch of a run."""
    c = model.config
    data = cfg.dataset
    if len(val.weights) > 1:
        data += f' ({", ".join(f"{weight:.1%}" for weight in val.weights)})'
    data += (f', {batches.split.num_tokens:,} training and {val.num_tokens:,} validation tokens, '
             f'{meta["tokenizer"].get("name") or meta["tokenizer"]["kind"]} tokenizer')
    if meta['foreign']:
        data += " (no meta.json: read with nanoGPT's assumptions)"
    chunks = ''
    if model.loss_chunks > 1:
        chunks = f', loss in {model.loss_chunks} chunks to save memory'
    lines = [f'device: {env.device} ({env.reasons["device"]}), {env.world} x '
             f'{counted(torch.get_num_threads(), "thread")}',
             f'dtype: {str(env.dtype).removeprefix("torch.")} ({env.reasons["dtype"]})',
             f'compile: {"on" if env.compile else "off"} ({env.reasons["compile"]})',
             f'attention: kernels available: {", ".join(attention_kernels(c, env))}',
             f'data: {data}',
             f'model: {c.preset}, {counted(c.n_layer, "layer")} x {c.n_embd} channels x '
             f'{counted(c.n_head, "head")}, context {c.block_size}, vocabulary {c.vocab_size}',
             f'  {model.num_params():,} parameters, '
             f'{flops_of(model, c.block_size)[1] / 1e6:,.1f} MFLOP per token',
             f'batch: {counted(batches.micro_batch, "sequence")} x '
             f'{counted(batches.accumulation, "micro-batch")} x {counted(env.world, "process")} = '
             f'{batches.global_batch * c.block_size:,} tokens per step{chunks}']
    if cfg.shard != 'none' and env.world == 1:
        lines.append(f'shard={cfg.shard}: no effect, because there is only one process')
    gpus = torch.cuda.device_count()
    if env.device.type == 'cuda' and gpus > env.world == 1:
        lines.append(f'note: to use all {gpus} GPUs: torchrun --standalone '
                     f'--nproc_per_node={gpus} train.py ...')
    for line in lines:
        print0(wrapped(line))


def print_end(cfg, state, is_done, out_of_patience, record, device):
    """Print why and how a run ended, and what to do next."""
    if not is_done:
        saved = 'before step 1; there is nothing to save'
        if state.iter_num:
            path = os.path.join(cfg.out_dir, 'ckpt.pt')
            saved = (f'step {state.iter_num} is saved in {path}; '
                     f'resume with: {resume_command(cfg)}')
        if out_of_patience:
            saved = (f'patience={cfg.patience}: no lower val loss than '
                     f'{short(state.best_val_loss)} in '
                     f'{counted(state.evals_since_best, "evaluation")}; {saved} --patience=None')
        print0(f'stopped: {saved}')
    if is_done or out_of_patience:
        peak = ''
        memory = peak_memory(device)
        if memory:
            peak = f', peak memory {file_size(memory)}'
        print0(f'done: best val loss {short(state.best_val_loss)}{peak}')
        print0(f'curves: {os.path.join(cfg.out_dir, "report.html")}')
        command = f'python {shell(script("sample.py"))} {shell(f"--out_dir={cfg.out_dir}")}'
        if record.get('template') in CHATS:
            print0(f'to chat: {command} --chat')
        else:
            print0(f'to sample: {command}')


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


# -----------------------------------------------------------------------------
# the log

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
        self.batches = batches
        self.is_first = True
        self.start(time.perf_counter())

    def start(self, now):
        """Begin a Window."""
        self.steps = 0
        self.began = now
        self.waited = self.batches.waited

    def add(self, result, num_targets):
        """Add the StepResult of a step. A skipped step never enters an average."""
        skipped = result.skipped.to(self.sums.dtype)
        loss = torch.where(result.skipped > 0, 0.0, result.loss).to(self.sums.dtype)
        self.sums += torch.stack((loss, num_targets * (1 - skipped), skipped, 1 + 0 * skipped))
        self.bad = (self.bad + 1) * result.skipped.to(self.bad.dtype)
        self.worst = torch.maximum(self.worst, self.bad)
        self.norm = result.norm
        self.steps += 1

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
        now = time.perf_counter()
        mean = loss / targets if targets else math.nan
        window = Window(mean, int(skipped), self.norm.item(), self.steps, now - self.began,
                        self.batches.waited - self.waited, self.is_first)
        self.sums.zero_()
        self.is_first = False
        self.start(now)
        return window


class Log:
    """
    Write the same numbers to the terminal, log.jsonl and, if enabled, TensorBoard and wandb, and
    draw log.jsonl in report.html. Only rank 0 has a log.
    """

    def __init__(self, cfg, settings, env, resumed_at=None):
        """resumed_at: the step of a resumed run, whose later lines are dropped."""
        self.path = self.wandb = self.tensorboard = None
        self.next_report = 0.0
        if env.rank:
            return
        self.path = os.path.join(cfg.out_dir, 'log.jsonl')
        purge_step = None
        if resumed_at is not None:
            purge_step = resumed_at + 1  # hides the events after a checkpoint, which come again
            if os.path.exists(self.path):
                keep_lines(self.path, resumed_at)
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            folder = os.path.join(cfg.out_dir, 'tensorboard')
            self.tensorboard = SummaryWriter(folder, purge_step=purge_step)
        if cfg.wandb_log:
            import wandb
            self.wandb = wandb
            wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or cfg.out_dir,
                       config=settings)

    def write(self, text, **numbers):
        """Print the text and write the numbers that are finite."""
        print0(text)
        if self.path is None:
            return
        row = {}
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                row[name] = value
        try:
            with open(self.path, 'a', encoding='utf-8') as f:  # time: in seconds since 1970
                f.write(json.dumps({**row, 'time': round(time.time(), 2)}) + '\n')
        except OSError as e:
            print0(f'{self.path} could not be written: {e.strerror or e}; training continues')
        if self.wandb:
            self.wandb.log(row, step=row['step'])
        if self.tensorboard:
            for name in row.keys() - {'step'}:
                self.tensorboard.add_scalar(name, row[name], row['step'])

    def step(self, state, lr, window, env, speed, left):
        """
        Log a line for the steps of a Window. speed: a Speed. left(seconds of a step): seconds to
        the end of the run.
        """
        memory = peak_memory(env.device)
        numbers = {'loss': window.loss, 'lr': lr, 'grad_norm': window.norm,
                   'tokens_seen': state.tokens_seen, 'skipped': window.skipped or None,
                   'peak_memory_mb': memory and memory / 1e6}
        pace = f'{window.seconds:.1f} s including startup'
        if not window.is_first:
            each = window.seconds / window.steps
            tokens_per_s = speed.tokens / each
            numbers |= {'ms': each * 1000, 'tokens_per_s': tokens_per_s,
                        'data_share': window.waited / window.seconds}
            if speed.peak:
                numbers['mfu'] = tokens_per_s * speed.flops_per_token / env.world / speed.peak
            pace = f'{duration(left(each))} left'
        self.write(step_line(state.iter_num, numbers, pace), step=state.iter_num, **numbers)

    def evaluation(self, step, evaluation):
        """Log a line for an Evaluation and redraw the report."""
        text, numbers = evaluation_text(step, evaluation)
        self.write(text, step=step, **numbers)
        if time.monotonic() >= self.next_report:
            self.report()

    def report(self):
        """Write report.html. The next is due when this one has cost REPORT_COST of the time."""
        if self.path is None or not os.path.exists(self.path):
            return
        began = time.monotonic()
        try:
            write_report([os.path.dirname(self.path)])
        except Exception as e:  # of any kind: a picture must not end a run
            print0(f'report.html could not be written: {first_line(e)}')
        self.next_report = began + (time.monotonic() - began) / REPORT_COST

    def close(self):
        self.report()
        if self.tensorboard:
            self.tensorboard.close()


class Speed(NamedTuple):
    """What turns the time of a step into tokens per second and utilization."""
    tokens: int  # of a step
    flops_per_token: float
    peak: float | None  # FLOP/s of a device; None: unknown


def keep_lines(path, last_step):
    """Drop the lines of log.jsonl after a step, which will be written again, and torn ones."""
    with replacing(path) as f:
        for row in read_rows(path):
            if row['step'] <= last_step:
                f.write(f'{json.dumps(row)}\n'.encode())


def step_line(step, numbers, pace):
    """Format the line of a step, at most 80 columns, from the numbers that are logged."""
    parts = [f'step {step}: loss {short(numbers["loss"])}', f'lr {rate(numbers["lr"])}']
    if 'tokens_per_s' in numbers:
        parts.append(f'{compact(numbers["tokens_per_s"])} tok/s')
    if 'mfu' in numbers:
        parts.append(f'mfu {numbers["mfu"]:.0%}')
    if numbers['peak_memory_mb']:
        parts.append(file_size(1e6 * numbers['peak_memory_mb']))
    line = ', '.join([*parts, pace])
    if numbers['skipped']:
        line += f'\nstep {step}: {counted(numbers["skipped"], "non-finite step")} skipped'
    return line


def evaluation_text(step, evaluation):
    """Return the lines of an Evaluation, at most 80 columns, and the numbers to log."""
    val = evaluation.val
    numbers = {f'val_{name}': val[name] for name in ('loss', 'stderr', 'bpb', 'tokens')}
    numbers |= {'val_perplexity': math.exp(min(val['loss'], 700)), 'train_loss': evaluation.train['loss'],
                'eval_seconds': evaluation.seconds}
    prefix = ''
    if step:  # with eval_only the step of the weights may be unknown
        prefix = f'step {step}: '
    text = f'{prefix}val loss {short(val["loss"])}'
    if math.isfinite(val['stderr']):
        text += f' +- {short(val["stderr"])}'
    if val['bpb'] is not None:
        text += f', {short(val["bpb"])} bits per byte'
    text += f', train loss {short(evaluation.train["loss"])}'
    for name, loss in val.get('losses', {}).items():  # of a mixture's datasets
        text += f'\n{prefix}val loss {short(loss)} on {name}'
        numbers[f'val_loss_{name}'] = loss
    return text, numbers
