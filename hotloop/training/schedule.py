"""The length of a run, the learning rate of each step, and the decision of a run with a time budget."""

import math
from typing import NamedTuple

from hotloop.system import host
from hotloop.system.distributed import print0
from hotloop.system.text import duration
from hotloop.training.evaluate import count_windows, eval_windows, evaluate

EXIT = 1.0  # seconds from the last save to the end of the process: 0.9 to 1.7 on 2 busy CPU cores


class Schedule(NamedTuple):
    """The length of a run and the shape of its learning rate."""
    kind: str  # cosine, linear, onecycle or constant
    max_iters: int  # the last step; with an open time budget the most steps
    warmup_iters: int
    decay_fraction: float  # final fraction of the steps in which a linear schedule decays
    is_open: bool = False  # the time budget has not decided yet when the decay begins


def plan_schedule(cfg, num_windows, global_batch, shift, state):
    """
    Resolve the settings of the schedule: max_epochs to steps, a warmup below 1 to steps, a time
    budget to what it has decided. num_windows: of an epoch. shift: windows read before step 0 in
    the current batch size. state: the RunState.
    """
    max_iters, warmup_iters = cfg.max_iters, cfg.warmup_iters
    if cfg.time_budget is not None and max_iters == type(cfg).max_iters:
        max_iters = 10**12  # the default is no limit; a long budget may exceed it
    if cfg.max_epochs is not None:
        max_iters = max(math.ceil((cfg.max_epochs * num_windows - shift) / global_batch), 0)
    if warmup_iters < 1:
        warmup_iters = round(warmup_iters * max_iters)
    if not cfg.decay_lr:  # nor a warmup, as in nanoGPT
        return Schedule('constant', max_iters, warmup_iters, cfg.decay_fraction)
    if cfg.time_budget is None:
        return Schedule(cfg.lr_schedule, max_iters, warmup_iters, cfg.decay_fraction)
    if state.decay_start is None:
        return Schedule('linear', max_iters, warmup_iters, cfg.decay_fraction, is_open=True)
    last = min(state.max_iters, max_iters)  # which may have been lowered since
    fraction = max(last - state.decay_start, 1) / max(last, 1)
    return Schedule('linear', last, warmup_iters, fraction)


def learning_rate(step, schedule, cfg):
    """
    Return the rate of a step, counted from 0: warmup to learning_rate, then a decay to min_lr.

    cosine    a linear warmup, then half a cosine
    linear    a linear warmup, a constant rate, a linear decay in the last decay_fraction of the steps
    onecycle  half a cosine up from min_lr and half a cosine down, as in torch's OneCycleLR
    """
    kind, warmup, peak = schedule.kind, schedule.warmup_iters, cfg.learning_rate
    if kind == 'constant':
        return peak
    reached = peak
    is_warmup = step < warmup and kind != 'onecycle'
    if is_warmup:
        reached = peak * (step + 1) / (warmup + 1)
    if schedule.is_open or (is_warmup and cfg.time_budget is None):
        return reached
    end = schedule.max_iters
    if cfg.lr_decay_iters is not None:
        end = cfg.lr_decay_iters
    # share: of the way from min_lr up to the peak
    if kind == 'onecycle' and step < warmup - 1:
        share = half_cosine(1 - step / (warmup - 1))
    elif step >= end:
        share = 0.0
    elif kind == 'onecycle':  # the last step of the warmup has the peak rate
        share = half_cosine((step - warmup + 1) / max(end - warmup, 1))
    elif kind == 'cosine':
        share = half_cosine((step - warmup) / (end - warmup))
    else:
        share = min(1.0, (end - step) / (schedule.decay_fraction * end))
    decayed = cfg.min_lr + share * (peak - cfg.min_lr)
    if is_warmup:  # in which a time budget has begun the decay, at the rate that was reached
        return min(reached, decayed)
    return decayed


def half_cosine(progress):
    """Return half a cosine: 1 at progress 0, 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def progress(step, schedule, deadline):
    """Return the share of the run before a step, 0 to 1; of its time while a time budget is open."""
    if schedule.is_open:
        return 1 - deadline.left() / deadline.budget
    return step / schedule.max_iters


def ahead_weights(first, share):
    """
    Return the weights in the loss of the tokens two and three ahead: they fall from `first` and half of it
    to 0, at two thirds and one third of the run (modded-nanogpt, record 53). share: as progress() returns it.
    """
    return first * max(1 - 1.5 * share, 0.0), first / 2 * max(1 - 3 * share, 0.0)


class Deadline:
    """
    Decide once when the rate of a run with a time budget decays: when the time left is what the last
    decay_fraction of the steps take, with their evaluations and saves.
    """

    def __init__(self, minutes, state, env):
        self.budget = 60 * minutes
        self.before = state.seconds_used  # by earlier processes of this run
        self.env = env
        self.laps = []  # the clock after each step, without evaluations and saves
        self.excluded = 0.0  # seconds of evaluations and saves up to now
        self.evaluation_seconds = None  # None: not known yet

    def used(self):
        """Return the seconds of the budget that are used."""
        return self.before + host.process_seconds()

    def left(self):
        """Return the seconds until the deadline, negative after it."""
        return self.budget - self.used()

    def last_step(self, step, schedule, save, eval_interval):
        """
        Return the last step if the decay begins after this one, otherwise 0, by the clock of this process.
        save: seconds. To be called after each step of an open schedule.
        """
        self.laps.append(host.process_seconds() - self.excluded)
        if self.left() <= 0:
            return step
        # the pace is that of the later half: first steps compile, or share the machine with startup
        middle = (len(self.laps) - 1) // 2
        pace = (self.laps[-1] - self.laps[middle]) / max(len(self.laps) - 1 - middle, 1)
        last = schedule.max_iters
        is_early = last - step > 10 and len(self.laps) <= 10 and self.left() >= self.budget / 4
        if is_early or (pace == 0 and last > step + 1):
            return 0
        if pace > 0:
            evaluation = self.evaluation_seconds or 0.0
            evaluated = (step - 1) // eval_interval * eval_interval  # one at `step` is still to come
            # reached: the last step by the deadline at this pace.
            # n steps take n * pace, and evaluation + save after each eval_interval of them: solve for n.
            # Not counted: this save, the last evaluation and save, and the end of the process.
            left = self.left() - evaluation - 2 * save - EXIT + (step - evaluated) * pace
            rounds, rest = divmod(left, eval_interval * pace + evaluation + save)
            reached = evaluated + int(rounds) * eval_interval + min(int(rest / pace), eval_interval)
            last = min(last, reached)
        last = max(last, step + 1)
        if last - step > schedule.decay_fraction * last:  # more steps are left than the decay takes
            return 0
        return last

    def estimate_evaluation(self, fraction, model, splits, cfg, batch):
        """
        Estimate the seconds of an evaluation by some batches, once, half way to the decay of this
        fraction. Returns the seconds that this took. All processes call it. Prints a note if an
        evaluation takes more than a tenth of the budget.
        """
        is_due = self.used() > self.budget * (1 - fraction) / 2
        if self.evaluation_seconds is not None or not self.env.broadcast(is_due):
            return 0.0
        val = splits['val']
        began = host.process_seconds()
        evaluate(model, val, batch * self.env.world, batch, self.env)  # may compile
        compiled = host.process_seconds()
        some = 8 * batch * self.env.world
        evaluate(model, val, some, batch, self.env)
        now = host.process_seconds()
        self.excluded += now - began
        num_val, num_train = eval_windows(cfg, val)
        num_val = count_windows(val, num_val)
        total = num_val + count_windows(splits['train'], num_train)
        self.evaluation_seconds = self.env.broadcast((now - compiled) * total / count_windows(val, some))
        if self.evaluation_seconds > self.budget / 10:
            tenth = math.ceil(num_val * val.T * self.budget / 10 / self.evaluation_seconds)
            print0(f'note: an evaluation takes {duration(self.evaluation_seconds)} of a time budget of '
                   f'{duration(self.budget)}; --eval_tokens={tenth} takes a tenth of it')
        return now - began
