"""Saving during a run: its folder, the latest checkpoint, the best weights, and failed saves."""

import dataclasses
import math
import os

from configurator import as_file
from hotloop.checkpoint import checkpoint_of, save_checkpoint
from hotloop.logger import Log
from hotloop.run_dir import Mirror


def take_folder(run, resumed):
    """Locks out_dir and the mirror for this run, and opens the log."""
    cfg, env = run.cfg, run.env
    if env.rank == 0:
        if cfg.mirror_dir:
            run.mirror = Mirror(run.out, cfg.mirror_dir)
        repeats = [run.model.config, dataclasses.replace(cfg, init_from=run.settings['init_from'])]
        text = as_file(repeats, 'all settings of the run in this folder; as a config file it repeats the run')
        for note in run.out.open(resumed is None, text):
            env.print_once(note)
        if run.mirror:
            before = resumed and resumed.checkpoint.get('config', {}).get('mirror_dir')
            run.mirror.open(ours=before and os.path.realpath(str(before)) == os.path.realpath(cfg.mirror_dir))
        if resumed:
            run.out.promote(resumed)
    run.log = Log(run.out, cfg, run.settings, env, run.state if resumed else None)


def track_best(run, evaluation):
    """Saves best.pt if this is the lowest validation loss so far, and returns whether it is."""
    state, loss = run.state, evaluation.val['loss']
    if loss < state.best_val_loss:
        save_best(run, loss)
        return True
    if state.iter_num >= run.cfg.max_iters and not math.isfinite(state.best_val_loss):
        raise ValueError(f'step {state.iter_num}: no validation loss of this run was finite, so it diverged; '
                         'start again with a lower learning_rate')
    return False


def save_best(run, loss):
    """
    Writes best.pt: weights, settings and tokenizer, which sampling needs; a third of a checkpoint's size.
    """
    before, run.state.best_val_loss = run.state.best_val_loss, loss
    if run.env.rank:
        return
    best = checkpoint_of(run)
    for name in ('optimizer', 'muon', 'scaler', 'state'):
        best.pop(name, None)
    try:
        save_checkpoint(run.out / 'best.pt', best)
    except ValueError as e:
        if run.state.iter_num >= run.cfg.max_iters:
            raise
        run.state.best_val_loss = before  # the next improvement is saved
        run.env.print_once(f'{e}; training continues')


def save(run, final=False):
    """
    Saves the latest checkpoint. A full disk does not end the run: the next save tries again, and the third
    failure in a row is an error. The final save of a process must succeed.
    """
    if run.env.rank:
        return
    checkpoint = checkpoint_of(run)
    try:
        run.out.save(checkpoint, run.cfg.keep_last)
    except ValueError as e:
        run.failed_saves += 1
        if run.failed_saves == 3 or final:
            raise
        run.env.print_once(f'{e}; training continues')
    else:
        run.failed_saves = 0
        if run.mirror:
            run.mirror.update()
