"""Resuming: which checkpoint a run continues from, and which of its settings may change."""

import dataclasses
import os

from hotloop.run_dir import RunDir, find_latest

# these belong to a command and its machine, and are not taken from a checkpoint
OWN = {'out_dir', 'init_from', 'eval_only', 'max_minutes', 'device', 'backend'}


def find_resumed(cfg, notes):
    """
    The Resumed to continue from: with init_from=resume, or if torchrun restarted the process; otherwise None.
    Adds to the notes. ValueError if there is no intact checkpoint.
    """
    out = RunDir(cfg.out_dir)
    restart = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') != '0'
    run_id = os.environ.get('TORCHELASTIC_RUN_ID', 'none')
    resumed = None
    if restart and run_id != 'none' and out.checkpoints():
        latest = find_latest(out)
        if latest.checkpoint.get('run_id') == run_id:  # not the checkpoint of another run in this folder
            resumed = latest
            notes.append('torchrun restarted this run: resuming')
    if resumed is None and cfg.init_from == 'resume':
        if cfg.mirror_dir and not out.checkpoints() and RunDir(cfg.mirror_dir).checkpoints():
            raise ValueError(f'init_from=resume, but {cfg.out_dir} holds no checkpoint; its mirror does: '
                             f'resume there with --out_dir={cfg.mirror_dir}')
        resumed = find_latest(out)
    if resumed:
        notes += [f'{why}; falling back to {resumed.path}' for why in resumed.damaged.values()]
    return resumed


def settings_of(checkpoint, shape):
    """
    {name: value} that a checkpoint contributes to the settings of the run that resumes it. shape: the
    resolved settings of its model.
    """
    own = set(OWN)
    if 'state' not in checkpoint:  # nanoGPT's: its dtype and compile were chosen for another machine
        own |= {'dtype', 'compile'}
    saved = {**checkpoint['model_args'], **checkpoint.get('config', {}), **shape}
    return {name: value for name, value in saved.items() if name not in own}


def compare_settings(objects, given, base, bound):
    """
    Compares what was given explicitly with the checkpoint's settings, `base`, and returns a note for each
    change. ValueError lists the settings in `bound` that changed; None in one of them means the checkpoint's
    value.
    """
    wrong, notes = [], []
    for o in objects:
        for name, now in dataclasses.asdict(o).items():
            if name not in given or name not in base or now == base[name]:
                continue
            if now is None and name in bound:
                setattr(o, name, base[name])
            elif name in bound:
                wrong.append(f'{given[name]}: {name}={now!r}, but the checkpoint has {base[name]!r}, which '
                             'cannot '
                             'change on resume (to start a new run from these weights: --init_from=PATH)')
            else:
                notes.append(f'{name}: {base[name]!r} before, {now!r} from here on')
    if wrong:
        raise ValueError('\n'.join(wrong))
    return notes
