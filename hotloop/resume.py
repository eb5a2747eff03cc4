"""Resuming: which checkpoint a run continues from, and which of its settings may change."""

import dataclasses
import os

from hotloop.run_dir import RunDir, find_latest

# these depend on the command and its machine, and do not come from a checkpoint
OWN = {'out_dir', 'init_from', 'eval_only', 'check', 'dry_run', 'max_minutes', 'device', 'backend'}


def resolve_auto(cfg, notes):
    """
    The flags that init_from=auto stands for: resume if out_dir, or only the mirror, holds a checkpoint, even
    a damaged one; otherwise scratch. Adds to the notes.
    """
    if RunDir(cfg.out_dir).checkpoints():
        return ['--init_from=resume']
    if cfg.mirror_dir and RunDir(cfg.mirror_dir).checkpoints():
        notes.append(f'init_from=auto: {cfg.out_dir} holds no checkpoint, but its mirror does: the run '
                     f'continues in {cfg.mirror_dir}')
        return ['--init_from=resume', f'--out_dir={cfg.mirror_dir}', '--mirror_dir=None']
    notes.append(f'init_from=auto: {cfg.out_dir} holds no checkpoint; starting from scratch')
    return ['--init_from=scratch']


def find_resumed(cfg, notes):
    """
    The Resumed to continue from: with init_from=resume, or if torchrun restarted the process; otherwise None.
    Adds to the notes. ValueError if there is no intact checkpoint.
    """
    out, resumed = RunDir(cfg.out_dir), None
    run_id = os.environ.get('TORCHELASTIC_RUN_ID', 'none')
    restarted = run_id != 'none' and os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') != '0'
    if restarted and out.checkpoints():
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
    """{name: value} that a checkpoint gives the run that resumes it; shape: resolved, of its model."""
    saved = {**checkpoint['model_args'], **checkpoint.get('config', {}), **shape}
    own = OWN
    if 'state' not in checkpoint:  # nanoGPT's: its dtype and compile were chosen for another machine
        own = OWN | {'dtype', 'compile'}
        if saved.get('compile') is False:  # not its default, so a wish
            own = OWN | {'dtype'}
    return {name: value for name, value in saved.items() if name not in own}


def is_renamed(checkpoint, dataset):
    """Whether `dataset` may name the data of a checkpoint: they have fingerprints and equal weights."""
    settings = [checkpoint.get('config', {}).get('dataset', ''), dataset]
    before, now = ([word.partition(':')[2] for word in setting.split(',')] for setting in settings)
    return 'data' in checkpoint and before == now


def compare_settings(objects, given, base, bound):
    """
    A note for each setting given with another value than `base`, the checkpoint's. ValueError for one in
    `bound`, where None stands for the checkpoint's value.
    """
    notes = []
    for o in objects:
        for name, now in dataclasses.asdict(o).items():
            before = base.get(name, now)
            if name not in given or now == before or (name in bound and now is None):
                continue
            if name in bound:
                raise ValueError(f'{given[name]}: {name}={now!r}, but the checkpoint has {before!r}, which '
                                 'cannot change on resume; for a new run from its weights: --init_from=PATH')
            notes.append(f'{name}: {before!r} before, {now!r} now')
    return notes
