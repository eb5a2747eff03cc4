"""The folders of a run: one owner at a time, an older run moved aside, config.py."""

import glob
import os

from hotloop.data.dataset import read_plain
from hotloop.system.distributed import print0
from hotloop.system.files import checkpoint_paths, free_number, is_inside, lock, replacing
from hotloop.system.host import first_line_of
from hotloop.system.text import script, shell
from hotloop.training.checkpoint import MIRRORED


def open_folder(name, folder, is_new):
    """
    Make and lock the folder that a setting names. A new run moves an older one aside, to the first
    free folder.1, folder.2, ... Returns the lock, which the process holds until its end, even by
    kill -9. Raises ValueError if another process has the folder, or it cannot be written.
    """
    real = os.path.realpath(folder)  # a link stays one
    try:
        os.makedirs(real, exist_ok=True)
        held = lock(os.path.join(folder, '.lock'))
        holds_run = checkpoint_paths(folder, best=True) or os.path.exists(os.path.join(folder, 'log.jsonl'))
        if is_new and holds_run:
            if is_inside(os.curdir, real):
                raise ValueError(f'{folder} holds a run and contains the current directory')
            for inside, _, names in os.walk(real):
                if '.lock' in names and inside != real:  # of a run that must not lose its folder
                    lock(os.path.join(inside, '.lock')).close()
            moved = free_number(real)
            os.replace(real, moved)
            held.close()
            print0(f'{name}: {folder} held a run, which was moved to {moved}')
            return open_folder(name, folder, is_new)
        for file in MIRRORED:  # what a killed process was writing
            for path in glob.glob(os.path.join(glob.escape(folder), f'{file}.*.tmp')):
                os.remove(path)
    except OSError as e:
        raise ValueError(f'{name}={folder!r} cannot be written or moved: {e.strerror or e}') from None
    except ValueError as e:
        remedy = f'choose another --{name}' if is_new else 'wait for it, or end it with kill'
        raise ValueError(f'{e}; {remedy}') from None
    return held


def may_replace(mirror, folder, step):
    """
    Test whether a mirror holds no checkpoint, or an earlier copy of the run in a folder, which is at this
    step: logs of one run begin alike, and a mirror that went on alone is ahead.
    """
    if not checkpoint_paths(mirror, best=True):
        return True
    own, others = (first_line_of(os.path.join(path, 'log.jsonl')) for path in (folder, mirror))
    if own != others or not own:
        return False
    try:
        return read_plain(os.path.join(mirror, 'ckpt.pt'))['iter_num'] <= step
    except ValueError:  # it is damaged
        return True


def resume_command(cfg):
    """Return the command that resumes a run, on as many processes of this machine."""
    launcher = 'python'
    if os.environ.get('WORLD_SIZE', '1') != '1':
        launcher = f'torchrun --standalone --nproc_per_node={os.environ.get("LOCAL_WORLD_SIZE", "1")}'
    flags = ''
    for name in ('device', 'backend'):
        if getattr(cfg, name) != 'auto':
            flags += f' --{name}={getattr(cfg, name)}'
    return f'{launcher} {shell(script("train.py"))} --init_from=resume --out_dir={shell(cfg.out_dir)}{flags}'


def write_config(folder, config, schedule):
    """
    Write config.py, a config file that repeats the run. A time budget that has decided becomes an
    ordinary schedule. Prints a failure.
    """
    repeats = 'repeats'
    if config['time_budget'] is not None and not schedule.is_open:
        if config['multi_token']:  # whose weights followed the clock
            repeats = 'nearly repeats'
        config = {**config, 'time_budget': None, 'max_epochs': None, 'max_iters': schedule.max_iters,
                  'lr_schedule': schedule.kind, 'decay_fraction': schedule.decay_fraction,
                  'warmup_iters': schedule.warmup_iters}
    text = f'# all settings of the run in this folder; as a config file it {repeats} the run\n\n'
    for name, value in config.items():
        text += f'{name} = {value!r}\n'
    path = os.path.join(folder, 'config.py')
    try:
        with replacing(path) as f:
            f.write(text.encode())
    except OSError as e:
        print0(f'{path} could not be written: {e.strerror or e}')
