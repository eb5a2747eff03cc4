"""
Training to a deadline: the rate is constant until the time left is what its decay needs.

Rank 0 looks at its clock after a few steps: at first after each one, until their speed is known, then each
time after a quarter of the way to where it expects the decay to begin. What follows the last step, above all
the final evaluation, is reserved. What was decided is in the settings, so a resume does not decide again.
"""

import bisect
import functools
import math
from typing import NamedTuple

from hotloop.system import host
from hotloop.system.files import counted
from hotloop.system.text import duration
from hotloop.training.divergence import collect_steps
from hotloop.training.evaluate import count_batches, eval_windows, evaluate
from hotloop.training.saves import rewrite_config
from hotloop.training.schedule import NO_LIMIT, is_open

ENOUGH_STEPS, ENOUGH_SECONDS = 10, 3.0  # what the first estimate of the speed is made from
EVALUATIONS = 0.1  # share of the budget that evaluations take at most, if there is more than the final one
SAVE = 0.1  # seconds, at least, of each of the two saves around the final evaluation
EXIT = 1.0  # seconds from the last save to the end of the process: 0.9, compiled 1.7, on 2 busy CPU cores


def set_budget(cfg, given, resumed, notes):
    """
    Adapts the settings of a command to its time budget, and adds to the notes. given: {name: place}. resumed:
    the checkpoint to resume, or None. ValueError for settings that contradict each other or the checkpoint.
    """
    if cfg.time_budget is None:
        if resumed and cfg.max_iters == NO_LIMIT and cfg.max_epochs is None and not cfg.eval_only:
            raise ValueError('without its time_budget the length of this run is open; give --max_iters too')
        return
    budget = f'time_budget={cfg.time_budget:g}'
    if cfg.eval_only:
        if 'time_budget' in given:
            notes.append(f'{budget}: no effect with eval_only=True')
        return
    if 'decay_start' in given and cfg.decay_start is not None:
        raise ValueError(f'{given["decay_start"]}: decay_start={cfg.decay_start}, but {budget} decides when '
                         'the decay begins; give --decay_start=None or --time_budget=None')
    needed = {'lr_schedule': 'linear', 'decay_lr': True, 'lr_decay_iters': None}
    if not cfg.decay_lr and not resumed:  # then these had no effect, and their defaults suit no constant rate
        needed |= {name: value for name, value in (('warmup_iters', 0), ('min_lr', 0.0)) if name not in given}
    for name, value in needed.items():
        if getattr(cfg, name) != value:
            notes.append(f'{budget}: {name}={value!r} replaces {getattr(cfg, name)!r}')
            setattr(cfg, name, value)
    if resumed:
        keep_decisions(cfg, given, resumed, notes)
    elif 'max_iters' not in given:
        cfg.max_iters = NO_LIMIT
    if cfg.warmup_fraction is not None and cfg.max_iters == NO_LIMIT and cfg.max_epochs is None:
        raise ValueError(f'warmup_fraction={cfg.warmup_fraction:g} is a fraction of the steps, and {budget} '
                         'leaves their number open; give --warmup_iters, or the most steps with --max_iters')


def keep_decisions(cfg, given, checkpoint, notes):
    """
    What a run with a time budget has decided outranks the settings of the command that resumes it.
    Adds to the notes. ValueError for a time budget that comes too late.
    """
    fitted = ('eval_interval', 'eval_tokens', 'eval_iters')
    asked = {name: getattr(cfg, name) for name in ('max_iters', 'max_epochs', *fitted)}
    saved, now, why = checkpoint.get('config', {}), f'time_budget={cfg.time_budget:g}', None
    before, cfg.decay_start = saved.get('time_budget'), saved.get('decay_start')
    if before is None:
        why = 'this run began without a time budget'
    elif cfg.decay_start is not None and before != cfg.time_budget:
        why = f'the decay of this run began at step {cfg.decay_start:,}'
    if why:
        raise ValueError(f'{given["time_budget"]}: {now}, but {why}, and its schedule ends at step '
                         f'{saved["max_iters"]:,}; to finish it, omit this; for a new run: '
                         f'--init_from={cfg.out_dir}/ckpt.pt --out_dir=NEW --{now}')
    if cfg.compile == 'auto':
        cfg.compile = saved['compile']
    if checkpoint.get('state', {}).get('eval_fitted'):
        for name in fitted:
            setattr(cfg, name, saved[name])
    if not is_open(cfg):
        cfg.max_iters, cfg.max_epochs = min(cfg.max_iters, saved['max_iters']), None
        if cfg.warmup_fraction is not None:
            cfg.warmup_iters, cfg.warmup_fraction = saved['warmup_iters'], None
    notes += [f'{name}={value}: no effect, because the time budget has decided it; add --time_budget=None'
              for name, value in asked.items() if name in given and getattr(cfg, name) != value]


class Deadline:
    """What a process of a run with a time budget has measured, and when it looks at its clock next."""

    def __init__(self, cfg, env, state):
        self.budget, self.before = 60 * cfg.time_budget, state.seconds_used
        self.evaluating = 0.0  # seconds in evaluations since the start of this process
        self.evaluation = 0.0  # seconds of one: estimated, then those of the last one
        self.pace = None  # seconds of a step when that evaluation was timed; None: not known yet
        self.measured = False
        self.at_decay = None  # the Plan by which this process began the decay
        self.first_step, self.next_look = state.iter_num, state.iter_num + 1
        self.marks = []  # (step, seconds without evaluations)
        if cfg.decay_start is not None:
            self.next_look = cfg.max_iters
        if not env.compile:  # else the first step compiles
            self.mark(state.iter_num)

    def used(self):
        """Seconds of the budget used up to now, by this process and those before it."""
        return self.before + host.process_seconds()

    def left(self):
        """Seconds until the deadline, negative after it."""
        return self.budget - self.used()

    def evaluated(self, seconds):
        """Counts an evaluation."""
        self.evaluation, self.pace = seconds, None
        self.evaluating += seconds

    def mark(self, step):
        """Records the time of a step that the device has finished."""
        self.marks.append((step, host.process_seconds() - self.evaluating))

    def measured_steps(self):
        """(steps, their seconds) of the recent half of what this process has marked."""
        last, now = self.marks[-1]
        middle = (self.marks[0][0] + last) / 2
        first, began = next(mark for mark in reversed(self.marks) if mark[0] <= middle)
        return last - first, now - began

    def is_enough(self):
        """Whether the speed of the steps is known, or too little time is left to measure it."""
        steps, seconds = self.marks[-1][0] - self.marks[0][0], self.marks[-1][1] - self.marks[0][1]
        return steps >= ENOUGH_STEPS or seconds >= min(ENOUGH_SECONDS, self.left() / 20)


def look_at_clock(run, pending, timer):
    """
    All processes call it after each step. If a look is due, it waits for the steps in `pending`, plans with
    rank 0's clock, and begins the decay when it is time. timer: of the steps. Returns whether to save: the
    first plan learns from that what a save takes, and a decision must not be lost.
    """
    deadline, env, step = run.deadline, run.env, run.state.iter_num
    if deadline is None or step != deadline.next_look:
        return False
    collect_steps(run, pending)
    deadline.mark(step)
    if run.cfg.decay_start is not None:  # this was the last step
        return False
    is_first = not deadline.measured
    if is_first and not env.any(env.rank == 0 and deadline.is_enough()):
        deadline.next_look = step + 1
        return False
    if is_first and env.any(env.rank == 0 and deadline.left() > 0):
        timer.pause()
        try_evaluation(run)
        timer.resume()
    deadline.measured = True
    plan = Plan(*env.of_rank_0(make_plan(run)).tolist())
    if not run.state.eval_fitted:
        run.cfg.eval_interval = int(plan.eval_interval)
        run.state.eval_fitted = True
    start = (1 - run.cfg.decay_fraction) * plan.last
    begins = step >= start or plan.last <= step + 2
    if begins:
        begin_decay(run, plan)
    else:
        deadline.next_look = step + max(int((start - step) / 4), 1)
    return is_first or begins


def try_evaluation(run):
    """Estimates the seconds of an evaluation from its first batches, of which the very first may compile."""
    env, deadline, batch = run.env, run.deadline, run.batches.micro_batch
    began = host.process_seconds()
    for num_batches in (1, 2):
        lap = host.process_seconds()
        evaluate(run.evaluated, run.val, num_batches * batch * env.world, batch, env, run.byte_counts)
    now = host.process_seconds()
    each = (now - lap) / count_batches(run.val, 2 * batch * env.world, batch, env.world)
    each = float(env.of_rank_0([each])[0])
    deadline.evaluating += now - began
    deadline.evaluation = each * evaluation_batches(run)
    if deadline.evaluation > deadline.budget / 4:
        shorten_evaluations(run)
        deadline.evaluation = each * evaluation_batches(run)


def evaluation_batches(run):
    """The number of batches of an evaluation, in each process."""
    total, splits = 0, (run.val, run.batches.split)
    for split, windows in zip(splits, eval_windows(run.cfg, run.val), strict=True):
        total += count_batches(split, windows, run.batches.micro_batch, run.env.world)
    return total


def shorten_evaluations(run):
    """Lowers eval_tokens until an evaluation takes about a share of EVALUATIONS of the budget."""
    cfg, deadline, val = run.cfg, run.deadline, run.val
    share = EVALUATIONS * deadline.budget / deadline.evaluation
    num_windows = min(eval_windows(cfg, val)[0] or math.inf, val.num_tokens / val.T)
    cfg.eval_tokens, cfg.eval_iters = max(int(share * num_windows), 1) * val.T, None
    run.env.print_once(f'note: an evaluation would take {duration(deadline.evaluation)} of '
                       f'{duration(deadline.budget)}; it reads {cfg.eval_tokens:,} tokens (eval_tokens)')


class Plan(NamedTuple):
    """What fits into the time left."""
    last: float  # step
    eval_interval: float
    spare: float  # seconds left over at the end; negative: missing
    step_seconds: float
    evaluation: float  # seconds of one


def make_plan(run):
    """The Plan after this step, by the clock of this process."""
    cfg, deadline, step = run.cfg, run.deadline, run.state.iter_num
    steps, seconds = deadline.measured_steps()
    each = seconds / max(steps, 1)
    deadline.pace = deadline.pace or each
    # where others use the machine too, an evaluation has become slower or faster as the steps have
    evaluation = deadline.evaluation * each / deadline.pace if deadline.pace else deadline.evaluation
    left = deadline.left() - evaluation - 2 * max(run.out.save_seconds, SAVE) - EXIT

    def seconds_to(interval, last):
        evaluations = (last - 1) // interval - (step - 1) // interval  # one due after this step is to come
        return (last - step) * each + evaluations * evaluation

    def last_within(interval):
        steps = range(step, cfg.max_iters + 1)
        return step + bisect.bisect(steps, left, key=functools.partial(seconds_to, interval)) - 1

    interval = cfg.eval_interval
    if not run.state.eval_fitted:
        most = int(EVALUATIONS * deadline.budget / evaluation) if evaluation else 0
        interval = NO_LIMIT
        if most > 1:  # there is always the final one
            interval = max(cfg.eval_interval, step, math.ceil(last_within(NO_LIMIT) / most))
    last = min(max(last_within(interval), step + 2), cfg.max_iters)  # of a single step no rate would decay
    return Plan(last, interval, left - seconds_to(interval, last), each, evaluation)


def begin_decay(run, plan):
    """Fixes the schedule: the decay begins after this step. All processes call it."""
    cfg, deadline, step, last = run.cfg, run.deadline, run.state.iter_num, int(plan.last)
    cfg.decay_start, cfg.max_iters = min(step, last - 1), last
    cfg.max_epochs = cfg.warmup_fraction = None  # a resume would set max_iters and warmup_iters by them
    cfg.eval_interval = min(cfg.eval_interval, last)
    deadline.at_decay, deadline.marks, deadline.next_look = plan, [deadline.marks[-1]], last
    run.env.print_once(f'time budget: the rate decays from step {cfg.decay_start:,} to {last:,}, expected at '
                       f'{duration(deadline.budget - plan.spare)} of {duration(deadline.budget)}')
    if step < cfg.warmup_iters:
        run.env.print_once(f'note: the warmup of {counted(cfg.warmup_iters, "step")} ends early')
    if run.env.rank == 0:
        rewrite_config(run)


def report_end(run):
    """Prints why a run ended late, by more than 5% of its budget or 4 seconds, as far as that is known."""
    deadline = run.deadline
    if deadline is None or run.state.iter_num == deadline.first_step:
        return
    used, why = deadline.used() + EXIT, ['it was interrupted in its decay']
    if used - deadline.budget <= max(0.05 * deadline.budget, 4):
        return
    if plan := deadline.at_decay:
        why = []
        (first, began), (last, now) = deadline.marks[0], deadline.marks[-1]
        each = (now - began) / max(last - first, 1)
        if plan.spare < -1:
            why.append(f'{-plan.spare:.0f} s were missing when the decay began')
        if each > 1.03 * plan.step_seconds > 0:
            why.append(f'a step took {each * 1000:.1f} ms in the decay and {plan.step_seconds * 1000:.1f} ms '
                       'before it')
        if deadline.evaluation > 1.1 * plan.evaluation > 0:
            why.append(f'the final evaluation took {deadline.evaluation:.1f} s, not {plan.evaluation:.1f} s')
    reasons = f': {", ".join(why)}' if why else ''
    run.env.print_once(f'late: the run took {duration(used)} of {duration(deadline.budget)}{reasons}')
