"""The length of a run, the learning rate of each step, and what is due after it."""

import math
from typing import NamedTuple

from hotloop.system.files import counted

# max_iters of a run whose time budget alone limits it, eval_interval of one that evaluates only at its end
NO_LIMIT = 10**9


def schedule_problems(cfg):
    """The problems with the settings of the schedule, one sentence each."""
    wrong = []
    if not 0 < cfg.decay_fraction <= 1:
        wrong.append(f'decay_fraction={cfg.decay_fraction} must be above 0 and at most 1')
    if cfg.warmup_fraction is not None and cfg.warmup_fraction > 1:
        wrong.append(f'warmup_fraction={cfg.warmup_fraction} must be at least 0 and at most 1')
    if cfg.time_budget == 0:
        wrong.append('time_budget=0 must be above 0 minutes; --time_budget=None sets no budget')
    decays = cfg.time_budget is not None or (cfg.lr_schedule == 'linear' and cfg.decay_lr)
    if cfg.decay_start is not None and not decays:
        wrong.append(f"decay_start={cfg.decay_start} applies only with lr_schedule='linear', decay_lr=True")
    if cfg.decay_start is not None and cfg.max_epochs is None and cfg.decay_start >= cfg.max_iters:
        wrong.append(f'decay_start={cfg.decay_start} must be below max_iters={cfg.max_iters}')
    if cfg.decay_start is not None and cfg.lr_decay_iters is not None and cfg.time_budget is None:
        wrong.append(f'lr_decay_iters={cfg.lr_decay_iters} has no effect with decay_start={cfg.decay_start}, '
                     'whose decay ends with the run; give --lr_decay_iters=None')
    return wrong


def is_open(cfg):
    """Whether the last step of a run is not known yet, because its time budget will decide."""
    return cfg.time_budget is not None and cfg.decay_start is None


def learning_rate(step, cfg):
    """
    The rate of a step, counted from 0: warmup to learning_rate, then a decay to min_lr.

    cosine    a linear warmup, then half a cosine
    linear    a linear warmup, a constant rate, and a linear decay in the last decay_fraction of the steps,
              or from decay_start on
    onecycle  half a cosine up from min_lr, half a cosine down: torch's OneCycleLR with total_steps = the end
              of the decay, pct_start = warmup_iters / total_steps, div_factor = learning_rate / min_lr and
              final_div_factor = 1, so the last step has min_lr
    """
    if is_open(cfg) or cfg.decay_start is not None:
        return constant_then_decay(step, cfg)
    if not cfg.decay_lr:  # as in nanoGPT, whose card for fine-tuning leaves warmup_iters at 2,000
        return cfg.learning_rate
    end = cfg.max_iters if cfg.lr_decay_iters is None else cfg.lr_decay_iters
    # share: of the way from min_lr up to learning_rate
    if step < cfg.warmup_iters:
        if cfg.lr_schedule != 'onecycle':
            return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
        share = half_cosine(1 - step / (cfg.warmup_iters - 1)) if cfg.warmup_iters > 1 else 1.0
    elif step >= end:
        share = 0.0
    elif cfg.lr_schedule == 'cosine':
        share = half_cosine((step - cfg.warmup_iters) / (end - cfg.warmup_iters))
    elif cfg.lr_schedule == 'onecycle':  # the last step of the warmup has the peak rate
        share = half_cosine((step - cfg.warmup_iters + 1) / (end - cfg.warmup_iters))
    else:
        share = min(1.0, (end - step) / (cfg.decay_fraction * end))
    return cfg.min_lr + share * (cfg.learning_rate - cfg.min_lr)


def constant_then_decay(step, cfg):
    """The rate of a step with decay_start. A decay that begins in the warmup begins at the rate reached."""
    reached, rate = step, cfg.learning_rate
    if cfg.decay_start is not None:
        reached = min(step, cfg.decay_start)
    if reached < cfg.warmup_iters:
        rate *= (reached + 1) / (cfg.warmup_iters + 1)
    if reached == step:
        return rate
    share = max(cfg.max_iters - step, 0) / max(cfg.max_iters - cfg.decay_start, 1)
    return cfg.min_lr + share * (rate - cfg.min_lr)


def set_length(cfg, num_windows, global_batch, shift=0):
    """
    Turns max_epochs into max_iters, warmup_fraction into warmup_iters. num_windows: of an epoch. shift: as in
    RunState. ValueError if decay_start is not below max_iters.
    """
    notes = []
    if cfg.max_epochs is not None:
        cfg.max_iters = max(math.ceil((cfg.max_epochs * num_windows - shift) / global_batch), 0)
        notes.append(f'max_epochs={cfg.max_epochs:g}: {counted(cfg.max_iters, "step")}')
        if cfg.decay_start is not None and cfg.decay_start >= cfg.max_iters:
            raise ValueError(f'decay_start={cfg.decay_start} must be below the {cfg.max_iters} steps of '
                             f'max_epochs={cfg.max_epochs:g}')
    if cfg.warmup_fraction is not None:
        cfg.warmup_iters = round(cfg.warmup_fraction * cfg.max_iters)
        notes.append(f'warmup_fraction={cfg.warmup_fraction:g}: {counted(cfg.warmup_iters, "step")}')
    return notes


def half_cosine(progress):
    """From 1 at progress 0 down to 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizers, lr, peak):
    """Every group follows the schedule in proportion to its own peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak'] * (lr / peak if peak else 0.0)


class Due(NamedTuple):
    """The actions due after a step, the same on all processes."""
    last: bool
    log: bool
    evaluation: bool
    sample: bool
    save: bool


def what_is_due(state, cfg):
    """The Due at a RunState. With a time budget, evaluations wait for its first plan."""
    step, waits = state.iter_num, is_open(cfg) and not state.eval_fitted
    last = step == cfg.max_iters
    return Due(last,
               log=last or step == 1 or step % cfg.log_interval == 0,
               evaluation=last or (step % cfg.eval_interval == 0 and not waits),
               sample=bool(cfg.sample_interval) and step % cfg.sample_interval == 0,
               save=bool(cfg.save_interval) and step % cfg.save_interval == 0)
