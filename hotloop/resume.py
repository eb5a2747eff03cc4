"""Resuming: which checkpoint a run continues from, and which of its settings may change."""

import dataclasses
import os

from hotloop.run_dir import RunDir, find_latest

# these belong to a command and its machine, and are not taken from a checkpoint
OWN = {'out_dir', 'init_from', 'eval_only', 'max_minutes', 'device', 'backend'}


def find_resumable(cfg):
    """The newest intact checkpoint in out_dir; ValueError where there is none."""
    out = RunDir(cfg.out_dir)
    if cfg.mirror_dir and not out.checkpoints() and RunDir(cfg.mirror_dir).checkpoints():
        raise ValueError(f'init_from=resume, but {cfg.out_dir} holds no checkpoint; its mirror does: resume '
                         'there with '
                         f'--out_dir={cfg.mirror_dir}')
    return find_latest(out)


def restarted_by_torchrun(out):
    """
    The latest checkpoint if this process is a later attempt of the torchrun that wrote it, otherwise None.
    """
    run_id = os.environ.get('TORCHELASTIC_RUN_ID', 'none')
    first_attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') == '0'
    if first_attempt or run_id == 'none' or not out.checkpoints():
        return None
    latest = find_latest(out)
    return latest if latest.checkpoint.get('run_id') == run_id else None


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
