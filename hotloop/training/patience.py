"""
The end of a run whose validation loss no longer improves.

Such a run stops; it does not begin to decay. A loss that rises because the model memorizes its data rises at
a lower rate too, and a decay that one noisy evaluation has begun cannot be taken back. A stop can: the run
resumes where it was and finishes its schedule, whichever it has. The last lines say so if the rate had not
decayed, because a decay alone often lowers the loss.
"""

from hotloop.system.files import counted
from hotloop.system.text import rate, short
from hotloop.training.schedule import learning_rate


def is_out(run):
    """Whether cfg.patience evaluations in a row had no lower loss, before the last step."""
    cfg, state = run.cfg, run.state
    is_over = cfg.patience is not None and state.evals_since_best >= cfg.patience
    return is_over and state.iter_num < cfg.max_iters


def describe(run):
    """Why a run that is out of patience stopped, and its rate unless that has decayed to min_lr."""
    cfg, state = run.cfg, run.state
    why = (f'patience={cfg.patience}: no lower val loss than {short(state.best_val_loss)} in '
           f'{counted(state.evals_since_best, "evaluation")}')
    last = learning_rate(state.iter_num - 1, cfg)
    if cfg.decay_lr and last > 1.001 * cfg.min_lr:
        why += f'\nthe learning rate, {rate(last)}, has not decayed to min_lr={rate(cfg.min_lr)}'
    return why
