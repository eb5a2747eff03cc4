"""Saving during a run: its folder, the latest checkpoint, the best weights, and failed saves."""

import dataclasses
import math

import numpy as np

from configurator import as_file
from hotloop.checkpoint import OPTIMIZERS, DiskFull, checkpoint_of
from hotloop.logger import Log
from hotloop.run_dir import Mirror
from hotloop.shard import is_sharded


def take_folder(run, resumed):
    """Locks out_dir and the mirror for this run, and opens the log."""
    cfg, env = run.cfg, run.env
    if env.rank == 0:
        repeats = [run.model.config, dataclasses.replace(cfg, init_from=run.settings['init_from'])]
        text = as_file(repeats, 'all settings of the run in this folder; as a config file it repeats the run')
        for note in run.out.open(resumed is None, text):
            env.print_once(note)
        if resumed:
            run.out.promote(resumed)
        if cfg.mirror_dir:
            ours = resumed and resumed.checkpoint.get('config', {}).get('mirror_dir') == cfg.mirror_dir
            run.mirror = Mirror(run.out, cfg.mirror_dir, ours)
    run.log = Log(run.out, cfg, run.settings, env, run.state if resumed else None)


def track_best(run, evaluation):
    """Saves best.pt, without optimizers, if this is the lowest validation loss yet; returns whether it is."""
    state, loss, before = run.state, evaluation.val['loss'], run.state.best_val_loss
    last = state.iter_num >= run.cfg.max_iters
    # only rank 0 knows whether the best one before was saved, and a sharded run saves together
    if not run.env.sum(np.array([float(run.env.rank == 0 and loss < before)]))[0]:
        if last and not math.isfinite(before):
            raise ValueError(f'step {state.iter_num}: no validation loss of this run was finite: it '
                             'diverged; start again with a lower learning_rate')
        return False
    state.best_val_loss = loss
    best = checkpoint_of(run) if run.env.rank == 0 or is_sharded(run.model) else None
    if run.env.rank == 0:
        for name in (*OPTIMIZERS, 'scaler', 'state'):
            best.pop(name, None)
        try:
            run.out.write('best.pt', best)
        except ValueError as e:
            if last:
                raise save_error(run, e) from e
            state.best_val_loss = before  # the next improvement is saved
            run.env.print_once(f'{e}; training continues')
    return True


def save(run, final=False):
    """Saves the latest checkpoint. The third failure in a row, or one in a final save, is an error."""
    if run.env.rank and not is_sharded(run.model):
        return
    checkpoint = checkpoint_of(run)
    if run.env.rank:
        return
    try:
        run.out.save(checkpoint, run.cfg.keep_last)
    except ValueError as e:
        run.failed_saves += 1
        if run.failed_saves == 3 or final:
            raise save_error(run, e) from e
        run.env.print_once(f'{e}; training continues')
        return
    run.failed_saves = 0
    if run.mirror:
        run.mirror.update()


def save_error(run, error):
    """The ValueError that ends a run whose save failed: why, what is saved, and how to go on."""
    advice = 'free space; ' if isinstance(error, DiskFull) else ''
    return ValueError(f'{error}; {advice}{run.out.how_to_go_on()}')
