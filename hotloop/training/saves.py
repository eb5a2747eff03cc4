"""Saving during a run: its folder, checkpoints that a thread writes while the run continues, failed saves."""

import dataclasses
import math
import os
import time

import torch

from configurator import as_file
from hotloop.system.files import replacing
from hotloop.system.host import first_line_of, memory
from hotloop.training import patience
from hotloop.training.checkpoint import DiskFull, checkpoint_of, settings_to_save, size_in_bytes, snapshot
from hotloop.training.evaluate import evaluate_both
from hotloop.training.logger import Log, log_done, log_evaluation
from hotloop.training.run_dir import Mirror, RunDir, find_latest
from hotloop.training.schedule import what_is_due
from hotloop.training.shard import is_sharded


def take_folder(run, resumed):
    """Locks out_dir, starts the mirror, and opens the log."""
    cfg, env = run.cfg, run.env
    if env.rank == 0:
        for note in run.out.open(resumed is None, config_text(run)):
            env.print_once(note)
        if resumed:
            run.out.promote(resumed)
        if cfg.mirror_dir:
            run.mirror = Mirror(run.out, cfg.mirror_dir, is_mirror(cfg.mirror_dir, run.out, resumed))
    is_best = bool(resumed) and not ('state' in resumed.checkpoint or os.path.exists(run.out / 'best.pt'))
    run.out.best_loss = math.inf if is_best else run.state.best_val_loss
    run.log = Log(run.out, cfg, settings_to_save(run), env, run.state if resumed else None)
    if env.any(is_best):  # nanoGPT's only file: its loss is that of these weights
        save(run)


def is_mirror(folder, out, resumed):
    """Whether a folder is the mirror of the run to resume from the folder `out`, and not ahead of it."""
    before = resumed and resumed.checkpoint.get('config', {}).get('mirror_dir')
    if not before or os.path.realpath(before) != os.path.realpath(folder):
        return False
    if first_line_of(os.path.join(folder, 'log.jsonl')) != first_line_of(out / 'log.jsonl'):
        return False  # of another run, which had this mirror_dir since
    try:
        return find_latest(RunDir(folder)).checkpoint['iter_num'] <= resumed.checkpoint['iter_num']
    except ValueError:  # it holds no intact checkpoint
        return True


def config_text(run):
    """The config.py of a run. With the schedule that its time budget has led to, it needs no clock."""
    cfg = dataclasses.replace(run.cfg, init_from=run.origin)
    if cfg.decay_start is not None:
        cfg.time_budget = None
    return as_file([run.model.config, run.lora, cfg])


def rewrite_config(run):
    """Replaces config.py after the settings have changed. A failure must not end the run."""
    path = run.out / 'config.py'
    try:
        with replacing(path) as f:
            f.write(config_text(run).encode())
    except OSError as e:
        run.env.print_once(f'{path} could not be written: {e.strerror or e}')


def track_best(run, evaluation):
    """
    Returns whether this is the lowest validation loss yet; the next save() then writes best.pt too. Counts
    the evaluations since. All processes call it.
    """
    state, loss = run.state, evaluation.val['loss']
    with run.env.patience():
        finish_save(run)  # if it fails, the loss that counts is the one before
        # only rank 0 knows that, and the processes save together
        is_lower = run.env.any(run.env.rank == 0 and loss < state.best_val_loss)
    if is_lower:
        state.best_val_loss, state.evals_since_best = loss, 0
    elif state.evaluated_at != state.iter_num:  # repeated if a kill came between its save and its log line
        state.evals_since_best += 1
    state.evaluated_at = state.iter_num
    diverged = not math.isfinite(state.best_val_loss)
    if diverged and (state.iter_num >= run.cfg.max_iters or patience.is_out(run)):
        raise ValueError(f'step {state.iter_num}: no validation loss of this run was finite: it '
                         'diverged; start again with a lower learning_rate')
    return is_lower


def save(run, final=False):
    """
    Saves the latest checkpoint, and best.pt after track_best(), from a thread: the run waits only for the
    save before and a copy of the tensors. Without memory for a copy it waits for the disk. All processes call
    it. final: wait; a failure is an error.
    """
    is_first = run.env.rank == 0
    with run.env.patience():
        if is_first:
            finish_save(run)
        if run.deadline:
            run.state.seconds_used = run.deadline.used()
        if is_first or is_sharded(run.model):
            checkpoint = checkpoint_of(run)
        if is_first:
            # batch_size=auto takes half of the memory of a CPU for a step; a copy takes at most a quarter
            waits = final or size_in_bytes(checkpoint) > memory() / 4
            if not waits:
                checkpoint = snapshot(checkpoint, {})
                if run.env.device.type == 'cuda':
                    torch.cuda.synchronize()
            run.out.start_save(checkpoint, run.cfg.keep_last)
            if waits:
                finish_save(run, final=final)
        run.env.barrier()  # waits for rank 0
    run.saved_at = time.monotonic()


def save_is_late(run, together):
    """Whether the last save was save_minutes ago; processes, whose clocks differ, agree where all call it."""
    late = time.monotonic() - run.saved_at > 60 * run.cfg.save_minutes
    return late if run.env.world == 1 else together and run.env.any(late)


def finish_save(run, wait=True, final=False):
    """
    Reports how the save under way ended, if there is one; without wait, only if it has ended. A failure is
    printed; the third in a row, or a final one, is an error.
    """
    saving = run.out.saving
    if saving is None or not (wait or saving.done()):
        return
    run.out.saving = None
    try:
        saving.result()
    except ValueError as e:
        run.state.best_val_loss = run.out.best_loss  # the next improvement is saved
        run.failed_saves += 1
        if run.failed_saves == 3 or final:
            advice = 'free space; ' if isinstance(e, DiskFull) else ''
            raise ValueError(f'{e}; {advice}{run.out.how_to_go_on()}') from e
        run.env.print_once(f'{e}; training continues')
        return
    run.failed_saves = 0
    if run.mirror:
        run.mirror.update()


def evaluate_missing(run):
    """
    Runs the evaluation of the first step if it is due and not in the log. Returns whether to continue: not if
    it was interrupted, and not if the run had ended for want of improvement.
    """
    state, missing = run.state, False
    if state.iter_num and what_is_due(state, run.cfg).evaluation:
        missing = run.log.lacks_evaluation(state.iter_num)
    if not run.env.any(missing):  # only rank 0 has a log
        return not patience.is_out(run)
    evaluation = evaluate_both(run, run.env.stop.by_signal)
    if evaluation is None:
        return False
    track_best(run, evaluation)
    save(run)
    finish_save(run)  # the checkpoint of this step lacks the result, so a new one comes before the log line
    log_evaluation(run, evaluation)
    return not patience.is_out(run)


def stop_run(run):
    """Prints why, if the run is out of patience, and how to resume; returns the exit code."""
    saved = 'this was before step 1; there is nothing to save'
    if run.state.iter_num:
        saved = run.out.how_to_go_on()
    if patience.is_out(run):
        run.env.print_once(f'stopped: {patience.describe(run)}\n{saved} --patience=None')
        log_done(run)
    else:
        run.env.print_once(f'stopped: {saved}')
    run.env.barrier()  # torchrun kills the others 30 seconds after the first has ended
    return run.env.stop.exit_code()
