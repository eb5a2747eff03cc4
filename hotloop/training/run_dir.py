"""The folder of a run: one owner at a time, its config.py, an older run moved aside."""

import glob
import os

from configurator import as_file
from hotloop.system.distributed import print0
from hotloop.system.files import free_number, is_inside, lock, replacing
from hotloop.system.host import first_line_of
from hotloop.system.text import script, shell
from hotloop.training.checkpoint import MIRRORED, Checkpoints


def holds_run(folder):
    """Return whether a folder holds files of a run that would be overwritten."""
    if Checkpoints(folder).paths():
        return True
    return any(os.path.exists(os.path.join(folder, name)) for name in MIRRORED[1:])


def open_folder(folder, is_new, config_text):
    """
    Lock the folder of a run and write its config.py. A new run moves an older one aside. Returns
    the lock, which the process holds until its end, and (new name of the older run or None).
    Raises ValueError if another process has the folder, or it cannot be written.
    """
    moved = None
    try:
        if is_new and holds_run(folder):
            held = take_lock(folder)
            moved = move_aside(folder)
            held.close()  # the new folder gets its own
        os.makedirs(os.path.realpath(folder), exist_ok=True)
        held = take_lock(folder)
        for name in MIRRORED:  # files that a killed process was writing
            for path in glob.glob(os.path.join(glob.escape(folder), f'{name}.*.tmp')):
                os.remove(path)
        with replacing(os.path.join(folder, 'config.py')) as f:
            f.write(config_text.encode())
    except OSError as e:
        raise ValueError(f'out_dir={folder!r} cannot be written: {e.strerror or e}') from None
    return held, moved


def take_lock(folder):
    """Take the lock of a run folder. The process holds it until it ends, even by kill -9."""
    try:
        return lock(os.path.join(folder, '.lock'))
    except ValueError as e:
        raise ValueError(f'{e}; wait for it, or choose another --out_dir') from None


def move_aside(folder):
    """Rename a folder, or what a link points to, to the first free folder.1, folder.2, ..."""
    real = os.path.realpath(folder)
    if is_inside(os.curdir, real):
        raise ValueError(f'{folder} holds a run and cannot be moved aside, because it contains the '
                         'current directory; choose another --out_dir, or give --resume')
    target = free_number(real)
    os.replace(real, target)
    return target


def open_mirror(folder, out_dir, is_new):
    """
    Prepare the second folder of a run. Another run in it is moved aside: one whose log begins
    differently. Returns its new name or None.
    """
    moved = None
    logs = [first_line_of(os.path.join(path, 'log.jsonl')) for path in (folder, out_dir)]
    try:
        if holds_run(folder) and (is_new or logs[0] != logs[1]):
            moved = move_aside(folder)
        os.makedirs(os.path.realpath(folder), exist_ok=True)
    except OSError as e:
        raise ValueError(f'mirror_dir={folder!r} cannot be written: {e.strerror or e}; choose '
                         'another folder, or --mirror_dir=None') from None
    return moved


def resume_command(cfg):
    """Return the command that resumes a run, on as many processes."""
    launcher, world = 'python', os.environ.get('WORLD_SIZE', '1')
    if world != '1':
        launcher = 'torchrun ...'
        if os.environ.get('LOCAL_WORLD_SIZE') == world:
            launcher = f'torchrun --standalone --nproc_per_node={world}'
    flags = ''
    for name in ('device', 'backend'):
        if getattr(cfg, name) != 'auto':
            flags += f' --{name}={getattr(cfg, name)}'
    return f'{launcher} {shell(script("train.py"))} --init_from=resume --out_dir={shell(cfg.out_dir)}{flags}'


def write_config(folder, config, schedule):
    """Write config.py, a config file that repeats the run without its clock. Prints a failure."""
    path = os.path.join(folder, 'config.py')
    try:
        with replacing(path) as f:
            f.write(config_text(config, schedule).encode())
    except OSError as e:
        print0(f'{path} could not be written: {e.strerror or e}')


def config_text(config, schedule):
    """Return the text of a run's config.py. A decided time budget becomes an ordinary schedule."""
    if config['time_budget'] is not None and not schedule.is_open:
        config = {**config, 'time_budget': None, 'max_epochs': None,
                  'max_iters': schedule.max_iters, 'lr_schedule': schedule.kind,
                  'decay_fraction': schedule.decay_fraction,
                  'warmup_iters': schedule.warmup_iters}
    return as_file(config)
