"""What a run prints and records: summary, log lines, log.jsonl, report.html, TensorBoard, wandb."""

import contextlib
import json
import math
import os
import sys
import time

import torch

from hotloop.data.chat import CHATS
from hotloop.system import host
from hotloop.system.device import peak_flops, peak_memory
from hotloop.system.distributed import print0
from hotloop.system.files import checkpoint_paths, replacing
from hotloop.system.text import compact, counted, duration, file_size, first_line, script, shell, short
from hotloop.training.forecast import flops_of
from hotloop.training.report import read_rows, write_report
from hotloop.training.run_dir import resume_command
from hotloop.weights.lora import trainable

REPORT_COST = 1 / 200  # the most of a run's time that its reports take, beside the last one
FEW_STEPS = 20  # too few to tune a model
MAX_BAD_STEPS = 20  # in a row, after which a run has diverged; fp16 halves its loss scale at each
BAD_AT_A_STOP = 10  # in a row, after which a run that is stopped is not saved over the last good checkpoint


# -----------------------------------------------------------------------------
# the summary before the first step

def print_run(model, record, batches, val, meta, cfg, env):
    """Print the machine, the data, the model and the batch of a run."""
    c = model.config
    tokenizer = meta['tokenizer'].get('name') or meta['tokenizer']['kind']
    data = (f'{cfg.dataset}, {batches.split.num_tokens:,} training and {val.num_tokens:,} validation tokens, '
            f'{tokenizer} tokenizer')
    if meta['foreign']:
        data += " (no meta.json: read with nanoGPT's assumptions)"
    chunks = ''
    if model.loss_chunks > 1:
        chunks = f', loss in {model.loss_chunks} chunks to save memory'
    lines = [f'device: {env.device} ({env.reasons["device"]}), {env.world} x '
             f'{counted(torch.get_num_threads(), "thread")}',
             f'dtype: {str(env.dtype).removeprefix("torch.")} ({env.reasons["dtype"]})',
             f'compile: {"on" if env.compile else "off"} ({env.reasons["compile"]})',
             f'data: {data}',
             f'model: {shape_text(c, record)}',
             f'  {model.num_params():,} parameters, '
             f'{flops_of(model, c.block_size).training / 1e6:,.1f} MFLOP per token',
             f'batch: {counted(batches.micro_batch, "sequence")} x '
             f'{counted(batches.accumulation, "micro-batch")} x {counted(env.world, "process")} = '
             f'{batches.global_batch * c.block_size:,} tokens per step{chunks}']
    if 'lora' in record:
        lora = record['lora']
        count = sum(p.numel() for p in trainable(model))
        stored = 'NF4' if lora['quantize'] == 'nf4' else str(env.dtype).removeprefix('torch.')
        lines.append(f'adapters: rank {lora["lora_rank"]}, scale {lora["scale"]:g}; {count:,} parameters are '
                     f'trained, and the {lora["parameters"]:,} of {lora["base"]} are frozen in {stored}')
    if cfg.shard != 'none' and env.world == 1:
        lines.append(f'shard={cfg.shard}: no effect, because there is only one process')
    gpus = torch.cuda.device_count()
    if env.device.type == 'cuda' and gpus > env.world == 1:
        launcher = f'torchrun --standalone --nproc_per_node={gpus}'
        lines.append(f'note: to use all {gpus} GPUs: {launcher} train.py ...')
    print0('\n'.join(lines))


def shape_text(c, record):
    """Return the shape of a model of this GPTConfig as text. record: of its run, with what it came from."""
    kind = record.get('hf_config', {}).get('model_type', c.preset)
    return (f'{kind}, {counted(c.n_layer, "layer")} x {c.n_embd} channels x {counted(c.n_head, "head")}, '
            f'context {c.block_size}, vocabulary {c.vocab_size}')


def print_length(cfg, schedule, state, batches):
    """Print the length of a run."""
    steps = schedule.max_iters
    windows = batches.windows_before(steps)
    length = (f'{counted(steps, "step")}, {windows * batches.split.T:,} tokens, '
              f'{windows / batches.split.num_windows:.2f} epochs')
    if schedule.is_open:
        length = f'a time budget of {cfg.time_budget:g} min'
        if cfg.max_epochs is not None or cfg.max_iters != type(cfg).max_iters:
            length += f' or {counted(steps, "step")}, whichever ends first'
    print0(f'run: {length}, into {cfg.out_dir}')
    if cfg.max_epochs is not None and 0 < steps < FEW_STEPS:
        print0(f'note: few steps, because one takes {batches.global_batch} of {batches.split.num_windows} '
               'windows of the data; give a lower --batch_size or --gradient_accumulation_steps')
    if schedule.kind != 'constant' and cfg.min_lr > cfg.learning_rate:
        print0(f'note: min_lr={cfg.min_lr} is above learning_rate={cfg.learning_rate}, so the rate rises '
               'at the end; give a lower --min_lr')
    if schedule.kind != 'constant' and schedule.warmup_iters >= steps:
        print0(f'note: the run ends within its warmup of {counted(schedule.warmup_iters, "step")}; give '
               'a lower --warmup_iters')
    if state.iter_num >= steps:
        clock = '' if cfg.time_budget is None else ' --time_budget=None'
        print0(f'nothing to do: the run is at step {state.iter_num:,} of {steps:,}; to train '
               f'further, give --max_iters=N{clock}')


# -----------------------------------------------------------------------------
# the log

class Meter:
    """
    Sum losses and times between log lines. The sums stay on the device; read() is the one wait. A
    resumed run continues those of its RunState: [loss, targets, skipped] since its last line.
    """

    def __init__(self, batches, state, env, flops_per_token):
        dtype = torch.float64
        if env.device.type == 'mps':  # which has no float64
            dtype = torch.float32
        self.sums = torch.tensor((state.logged or [0.0] * 3)[:3], dtype=dtype, device=env.device)
        self.bad = torch.tensor(state.bad_in_a_row, device=env.device)  # in a row up to now
        self.batches = batches
        self.tokens = batches.global_batch * batches.split.T  # of a step
        self.peak = peak_flops(env.device, env.dtype)  # FLOP/s of a device; None: unknown
        self.flops = flops_per_token / env.world  # of a device
        self.is_first = True  # whether startup and compilation are included
        self.start(host.STARTED)

    def start(self, now):
        """Begin with the steps of the next log line."""
        self.steps = 0
        self.began = now
        self.waited = self.batches.waited

    def exclude(self, seconds):
        """Leave out the time of an evaluation or a save."""
        self.began += seconds

    def add(self, result, num_targets):
        """Add the StepResult of a step. A skipped step never enters an average."""
        skipped = result.skipped.to(self.sums.dtype)
        loss = torch.where(result.skipped > 0, 0.0, result.loss).to(self.sums.dtype)
        self.sums += torch.stack((loss, num_targets * (1 - skipped), skipped))
        self.bad = (self.bad + 1) * result.skipped.to(self.bad.dtype)
        self.norm = result.norm
        self.steps += 1

    def state(self):
        """Return (sums since the last log line, bad steps in a row) for a checkpoint."""
        return self.sums.tolist(), int(self.bad)

    def check(self, step, cfg, stopping=False):
        """Raise ValueError after too many non-finite steps in a row."""
        bad = int(self.bad)
        if bad >= MAX_BAD_STEPS or (stopping and bad >= BAD_AT_A_STOP):
            advice = f'Lower the learning rate and resume with: {resume_command(cfg)}'
            if not checkpoint_paths(cfg.out_dir):
                advice = 'No step is saved; start with a lower --learning_rate or a longer --warmup_iters'
            raise ValueError(f'step {step}: loss or gradients were not finite for {bad} steps in a '
                             f'row; with dtype=float16, try bfloat16 or float32. {advice}')

    def read(self):
        """Wait for the device. Returns the seconds and the numbers of the steps since the last call."""
        loss, targets, skipped = self.sums.tolist()
        now = time.perf_counter()
        seconds = now - self.began
        numbers = {'loss': loss / targets if targets else math.nan, 'grad_norm': self.norm.item(),
                   'skipped': int(skipped) or None}
        if not self.is_first:
            speed = self.tokens * self.steps / seconds
            numbers |= {'ms': 1000 * seconds / self.steps, 'tokens_per_s': speed,
                        'data_share': (self.batches.waited - self.waited) / seconds}
            if self.peak:
                numbers['mfu'] = speed * self.flops / self.peak
        self.sums.zero_()
        self.is_first = False
        self.start(now)
        return seconds, numbers


class Log:
    """
    Write the same numbers to the terminal, log.jsonl and, if enabled, TensorBoard and wandb, and
    draw log.jsonl in report.html. Only rank 0 has a log.
    """

    def __init__(self, cfg, settings, env, resumed_at=None):
        """resumed_at: the step of a resumed run, whose later lines are dropped."""
        self.path = self.wandb = self.tensorboard = None
        self.cfg = cfg
        self.device = env.device
        self.next_report = 0.0
        if env.rank:
            return
        self.path = os.path.join(cfg.out_dir, 'log.jsonl')
        purge_step = None
        if resumed_at is not None:
            purge_step = resumed_at + 1  # hides the events after a checkpoint, which come again
            if os.path.exists(self.path):
                try:
                    keep_lines(self.path, resumed_at)
                except OSError as e:
                    raise ValueError(f'{self.path} could not be written: {e.strerror or e}') from None
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            folder = os.path.join(cfg.out_dir, 'tensorboard')
            self.tensorboard = SummaryWriter(folder, purge_step=purge_step)
        if cfg.wandb_log:
            import wandb
            self.wandb = wandb
            try:
                wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or cfg.out_dir, config=settings,
                           dir=os.environ.get('WANDB_DIR', cfg.out_dir))  # ./wandb could be imported
            except Exception as e:
                raise ValueError(f'wandb_log=True: {first_line(e)}; run wandb login first, or set '
                                 'WANDB_MODE=offline') from None

    def append(self, row):
        """Append a line to log.jsonl."""
        if self.path is None:
            return
        try:
            with open(self.path, 'a', encoding='utf-8') as f:
                f.write(f'{json.dumps(row)}\n')
        except OSError as e:
            print0(f'{self.path} could not be written: {e.strerror or e}; training continues')

    def start(self, model, record, changed):
        """Log what a new run is. changed: the settings that are not at their defaults."""
        device = '{world} x {device}, {dtype}'.format(**record['machine'])
        self.append({'step': 0, 'event': 'start', 'time': round(time.time(), 2),
                     'command': shell('python', *sys.argv),
                     'model': f'{shape_text(model.config, record)}, {model.num_params():,} parameters',
                     'device': device.replace('torch.', ''), 'changed': list(changed)})

    def end(self, state, is_done, out_of_patience, template):
        """Log and print how a run ended and what to do next."""
        event = 'done'
        saved = 'before step 1; there is nothing to save'
        if state.iter_num:
            path = os.path.join(self.cfg.out_dir, 'ckpt.pt')
            saved = f'step {state.iter_num} is saved in {path}; resume with: {resume_command(self.cfg)}'
        if out_of_patience:
            event = 'stopped: patience'
            print0(f'stopped: patience={self.cfg.patience}: no lower val loss than '
                   f'{short(state.best_val_loss)} in {counted(state.evals_since_best, "evaluation")}; '
                   f'{saved} --patience=None')
        elif not is_done:
            event = 'stopped: a signal'
            print0(f'stopped: {saved}')
        self.append({'step': state.iter_num, 'event': event})  # without a time: repeated, it is the same
        if is_done or out_of_patience:
            print0(f'done: best val loss {short(state.best_val_loss)}, peak memory '
                   f'{file_size(peak_memory(self.device))}')
            print0(f'curves: {os.path.join(self.cfg.out_dir, "report.html")}')
            purpose, flag = ('chat', ' --chat') if template in CHATS else ('sample', '')
            command = shell('python', script('sample.py'), f'--out_dir={self.cfg.out_dir}')
            print0(f'to {purpose}: {command}{flag}')

    def write(self, text, **numbers):
        """Print the text and write the numbers that are finite."""
        print0(text)
        row = {}
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                row[name] = value
        self.append({**row, 'time': round(time.time(), 2)})
        step = row.pop('step')
        if self.wandb:
            self.wandb.log(row, step=step)
        if self.tensorboard:
            try:
                for name, value in row.items():
                    self.tensorboard.add_scalar(name, value, step)
            except OSError as e:  # of an earlier write, by its thread
                print0(f'{self.cfg.out_dir}/tensorboard could not be written: {e.strerror or e}; training '
                       'continues')
                self.tensorboard = None

    def step(self, state, lr, meter, left):
        """Log a line for the steps since the last one. left(seconds of a step): until the end."""
        seconds, numbers = meter.read()
        numbers |= {'lr': lr, 'tokens_seen': state.tokens_seen,
                    'peak_memory_mb': peak_memory(self.device) / 1e6}
        pace = f'{seconds:.1f} s including startup'
        if 'ms' in numbers:
            pace = f'{duration(left(numbers["ms"] / 1000))} left'
        self.write(step_line(state.iter_num, numbers, pace), step=state.iter_num, **numbers)

    def evaluation(self, step, evaluation):
        """Log a line for an Evaluation and redraw the report."""
        text, numbers = evaluation_text(step, evaluation)
        self.write(text, step=step, **numbers)
        if time.monotonic() >= self.next_report:
            self.report()

    def report(self):
        """Write report.html. The next is due when this one has cost REPORT_COST of the time."""
        if self.path is None:
            return
        began = time.monotonic()
        try:
            write_report([os.path.dirname(self.path)])
        except Exception as e:  # of any kind: a picture must not end a run
            print0(f'report.html could not be written: {first_line(e)}')
        self.next_report = began + (time.monotonic() - began) / REPORT_COST

    def close(self, step):
        """Log an error that ends the run in a step, and draw the last report."""
        error = sys.exc_info()[1]
        if error:
            self.append({'step': step, 'event': f'stopped: {first_line(error)}'})
        self.report()
        if self.tensorboard:
            with contextlib.suppress(OSError):  # a full disk
                self.tensorboard.close()


def keep_lines(path, last_step):
    """Drop the lines of log.jsonl after a step, which will be written again, torn ones and the end."""
    with replacing(path) as f:
        for row in read_rows(path):
            if row['step'] <= last_step and row.get('event', 'start') == 'start':
                f.write(f'{json.dumps(row)}\n'.encode())


def step_line(step, numbers, pace):
    """Format the line of a step, at most 80 columns, from the numbers that are logged."""
    parts = [f'step {step}: loss {short(numbers["loss"])}', f'lr {numbers["lr"]:.1e}']
    if 'tokens_per_s' in numbers:
        parts.append(f'{compact(numbers["tokens_per_s"])} tok/s')
    if 'mfu' in numbers:
        parts.append(f'mfu {numbers["mfu"]:.0%}')
    line = ', '.join([*parts, file_size(1e6 * numbers['peak_memory_mb']), pace])
    if math.isnan(numbers['loss']) and not numbers['skipped']:
        line += f'\nstep {step}: none of its tokens counts in the loss; see --pack_rows'
    if numbers['skipped']:
        line += f'\nstep {step}: {counted(numbers["skipped"], "non-finite step")} skipped'
    return line


def evaluation_text(step, evaluation):
    """Return the lines of an Evaluation, at most 80 columns, and the numbers to log."""
    val = evaluation.val
    numbers = {f'val_{name}': val[name] for name in ('loss', 'stderr', 'bpb', 'tokens')}
    numbers |= {'val_perplexity': math.exp(min(val['loss'], 700)), 'train_loss': evaluation.train['loss'],
                'eval_seconds': evaluation.seconds}
    prefix = f'step {step}: ' if step else ''  # with eval_only the step of the weights may be unknown
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
