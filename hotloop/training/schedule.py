"""The length of a run, the learning rate of each step, and the decision of a run with a time budget."""

import math
from typing import NamedTuple

from hotloop.system import host
from hotloop.system.distributed import print0
from hotloop.system.text import duration
from hotloop.training.evaluate import count_batches, eval_windows, evaluate

ENOUGH_STEPS = 10  # steps after which their pace is known
EXIT = 1.0  # seconds from the last save to the end of the process: 0.9 to 1.7 on 2 busy CPU cores


class Schedule(NamedTuple):
    """The length of a run and the shape of its learning rate."""
    kind: str  # cosine, linear, onecycle or constant
    max_iters: int  # the last step; with an open time budget the most steps
    warmup_iters: int
    decay_fraction: float  # final fraction of the steps in which a linear schedule decays
    is_open: bool = False  # the time budget has not decided yet when the decay begins


def schedule_problems(cfg):
    """List the problems with the settings of the schedule, one sentence each."""
    wrong = []
    if not 0 < cfg.decay_fraction <= 1:
        wrong.append(f'decay_fraction={cfg.decay_fraction} must be above 0 and at most 1')
    if cfg.time_budget is None:
        return wrong
    if cfg.time_budget == 0:
        wrong.append('time_budget=0 must be above 0 minutes; --time_budget=None sets no budget')
    if not cfg.decay_lr:
        wrong.append('decay_lr=False contradicts time_budget, which ends with a decay; remove one')
    if cfg.lr_decay_iters is not None:
        wrong.append(f'lr_decay_iters={cfg.lr_decay_iters} contradicts time_budget, which decides '
                     'when the decay ends; give --lr_decay_iters=None')
    is_fraction = 0 < cfg.warmup_iters < 1
    if is_fraction and cfg.max_epochs is None and cfg.max_iters == type(cfg).max_iters:
        wrong.append(f'warmup_iters={cfg.warmup_iters:g} is a fraction of the steps, whose '
                     'number a time_budget leaves open; give a number of steps, or --max_iters')
    return wrong


def plan_schedule(cfg, num_windows, global_batch, shift, state):
    """
    Resolve the settings of the schedule: max_epochs to steps, a warmup below 1 to steps, a
    time budget to what it has decided. num_windows: of an epoch. shift: windows read before step 0
    in the current batch size. state: the RunState.
    """
    kind = cfg.lr_schedule
    if not cfg.decay_lr:  # as in nanoGPT, whose card for fine-tuning leaves warmup_iters at 2,000
        kind = 'constant'
    max_iters, decay_fraction = cfg.max_iters, cfg.decay_fraction
    if cfg.max_epochs is not None:
        max_iters = max(math.ceil((cfg.max_epochs * num_windows - shift) / global_batch), 0)
    warmup_iters = cfg.warmup_iters
    if warmup_iters < 1:
        warmup_iters = round(warmup_iters * max_iters)
    if cfg.time_budget is None:
        return Schedule(kind, max_iters, warmup_iters, decay_fraction)
    schedule = Schedule('linear', max_iters, warmup_iters, decay_fraction, is_open=True)
    if state.decay_start is not None:
        schedule = decide(schedule, state.decay_start, state.max_iters)
    return schedule


def decide(schedule, decay_start, max_iters):
    """Fix a schedule that was open: the rate decays from decay_start to max_iters."""
    fraction = (max_iters - decay_start) / max_iters
    return schedule._replace(max_iters=max_iters, decay_fraction=fraction, is_open=False)


def learning_rate(step, schedule, cfg):
    """
    Return the rate of a step, counted from 0: warmup to learning_rate, then a decay to min_lr.

    cosine    a linear warmup, then half a cosine
    linear    a linear warmup, a constant rate, and a linear decay in the last decay_fraction of
              the steps
    onecycle  half a cosine up from min_lr, half a cosine down: torch's OneCycleLR with total_steps
              = the end of the decay, pct_start = warmup_iters / total_steps, div_factor =
              learning_rate / min_lr and final_div_factor = 1, so the last step has min_lr
    """
    kind, warmup, rate = schedule.kind, schedule.warmup_iters, cfg.learning_rate
    if kind == 'constant':
        return rate
    end = schedule.max_iters
    if cfg.lr_decay_iters is not None:
        end = cfg.lr_decay_iters
    # share: of the way from min_lr up to learning_rate
    if step < warmup and kind != 'onecycle':
        reached = rate * (step + 1) / (warmup + 1)
        if cfg.time_budget is None or schedule.is_open:
            return reached
        # a decay that began during the warmup begins at the rate that was reached
        share = min(1.0, (end - step) / (schedule.decay_fraction * end))
        return min(reached, cfg.min_lr + share * (rate - cfg.min_lr))
    if schedule.is_open:
        return rate
    if step < warmup:
        share = 1.0
        if warmup > 1:
            share = half_cosine(1 - step / (warmup - 1))
    elif step >= end:
        share = 0.0
    elif kind == 'cosine':
        share = half_cosine((step - warmup) / (end - warmup))
    elif kind == 'onecycle':  # the last step of the warmup has the peak rate
        share = half_cosine((step - warmup + 1) / (end - warmup))
    else:
        share = min(1.0, (end - step) / (schedule.decay_fraction * end))
    return cfg.min_lr + share * (rate - cfg.min_lr)


def half_cosine(progress):
    """Return half a cosine: 1 at progress 0, 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizers, lr, peak):
    """Set the rate of every group in proportion to its own peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak'] * (lr / peak if peak else 0.0)


class Deadline:
    """
    Decide once when the rate of a run with a time budget decays: when the time left is what the last
    decay_fraction of the steps take, with their evaluations and saves. Rank 0's clock counts.
    """

    def __init__(self, minutes, state, env):
        self.budget = 60 * minutes
        self.before = state.seconds_used
        self.env = env
        self.excluded = 0.0
        self.laps = []  # the clock after each step, without evaluations and saves
        self.evaluation = None  # seconds of an evaluation

    def used(self):
        """Return the seconds of the budget used by this process and those before it."""
        return self.before + host.process_seconds()

    def left(self):
        """Return the seconds until the deadline, negative after it."""
        return self.budget - self.used()

    def exclude(self, seconds):
        """Leave the time of an evaluation or a save out of the pace of the steps."""
        self.excluded += seconds

    def needs_evaluation(self, schedule):
        """Return whether an evaluation is to be measured: once, half way to the decay."""
        if self.evaluation is not None:
            return False
        return self.env.broadcast(self.used() > self.budget * (1 - schedule.decay_fraction) / 2)

    def begins_decay(self, step, schedule, save_seconds, eval_interval):
        """
        Return (whether the decay begins after this step, the last step). All processes call it
        after each step of an open schedule.
        """
        self.laps.append(host.process_seconds() - self.excluded)
        # the pace is that of the later half: first steps compile, or share the machine with startup
        middle = len(self.laps) // 2
        pace = (self.laps[-1] - self.laps[middle]) / max(len(self.laps) - 1 - middle, 1)
        last = schedule.max_iters
        is_known = len(self.laps) > ENOUGH_STEPS or self.left() < self.budget / 4
        if is_known and pace > 0:
            evaluation = self.evaluation or 0.0
            save = max(save_seconds, 0.1)
            left = self.left() - evaluation - 2 * save - EXIT  # this save, and the end of the run
            last = min(last, last_step(step, left, pace, evaluation + save, eval_interval))
        last = int(self.env.broadcast(max(last, step + 1)))
        fraction = schedule.decay_fraction
        return (last - step) * (1 - fraction) <= step * fraction, last


def last_step(step, left, pace, evaluation, eval_interval):
    """Return the step that a run reaches in the seconds left, with an evaluation at each interval."""
    evaluated = (step - 1) // eval_interval * eval_interval  # the one due at `step` is still to come
    seconds = left + (step - evaluated) * pace
    rounds, rest = divmod(seconds, eval_interval * pace + evaluation)
    return evaluated + int(rounds) * eval_interval + min(int(rest / pace), eval_interval)


def measure_evaluation(deadline, model, splits, cfg, batch, env):
    """
    Estimate the seconds of an evaluation by some batches, after one that may compile. All processes
    call it. Prints a note if an evaluation takes more than a tenth of the budget.
    """
    began = host.process_seconds()
    for windows in (batch * env.world, 8 * batch * env.world):
        lap = host.process_seconds()
        evaluate(model, splits['val'], windows, batch, env)
    each = (host.process_seconds() - lap) / count_batches(splits['val'], windows, batch, env.world)
    total = 0
    for name, number in zip(('val', 'train'), eval_windows(cfg, splits['val']), strict=True):
        total += count_batches(splits[name], number, batch, env.world)
    deadline.evaluation = env.broadcast(each * total)
    deadline.exclude(host.process_seconds() - began)
    if deadline.evaluation > deadline.budget / 10:
        print0(f'note: an evaluation takes {duration(deadline.evaluation)} of a time budget of '
               f'{duration(deadline.budget)}; lower --eval_tokens={cfg.eval_tokens}')
