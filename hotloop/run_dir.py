"""The folder of a run: its lock, the latest, best and older checkpoints, its mirror."""

import contextlib
import errno
import glob
import os
import queue
import shutil
import threading
from dataclasses import dataclass

from hotloop.checkpoint import load_checkpoint, save_checkpoint
from hotloop.files import is_inside, lock, replacing

RUN_FILES = ('config.py', 'log.jsonl', 'best.pt', 'ckpt.pt')


class RunDir:
    """The folder of a run, locked by one process at a time."""

    def __init__(self, path):
        self.path = path
        self.lock = None
        self.saved_step = None  # of ckpt.pt

    def __truediv__(self, name):
        return os.path.join(self.path, name)

    def checkpoints(self):
        """Checkpoint files, the newest first."""
        pattern = glob.escape(self / 'ckpt-') + '[0-9]' * 9 + '.pt'  # not the copies that a user made
        older = sorted(glob.glob(pattern), reverse=True)
        return [path for path in [self / 'ckpt.pt', *older] if os.path.exists(path)]

    def holds_run(self):
        """Whether anything would be overwritten."""
        others = os.path.exists(self / 'best.pt') or os.path.exists(self / 'log.jsonl')
        return others or bool(self.checkpoints())

    def open(self, fresh, config_text):
        """
        Locks the folder and writes config.py. A fresh run moves a run that is in the folder aside first.
        Returns notes for the user. ValueError if another process uses the folder or it cannot be written.
        """
        notes = []
        try:
            if fresh and self.holds_run():
                self.take_lock()
                if os.name == 'nt':
                    self.release_lock()  # Windows cannot rename a folder with an open file
                notes.append(f'{self.path} held a run: moved to {move_aside(self.path)}')
                self.release_lock()  # the new folder gets its own
            os.makedirs(os.path.realpath(self.path), exist_ok=True)
            self.take_lock()
            remove_partial_files(self.path)
            with open(self / 'config.py', 'w', encoding='utf-8') as f:
                f.write(config_text)
        except OSError as e:
            raise ValueError(f'out_dir={self.path!r} cannot be written: {e.strerror or e}') from None
        if self.lock is None:
            notes.append('out_dir is not locked on this system: do not start a second run in it')
        return notes

    def take_lock(self):
        """Held until the process ends, even by kill -9."""
        if self.lock is None:
            try:
                self.lock = lock(self / '.lock')
            except ValueError as e:
                raise ValueError(f'{e}; wait for it, or choose another folder with --out_dir') from None

    def release_lock(self):
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def save(self, checkpoint, keep):
        """Saves the latest checkpoint and keeps the one before under its step; `keep` checkpoints stay."""
        step, keep_old = checkpoint['iter_num'], None
        if self.saved_step not in (None, step):
            keep_old = self / f'ckpt-{self.saved_step:09d}.pt'
        save_checkpoint(self / 'ckpt.pt', checkpoint, keep_old)
        self.saved_step = step
        for path in self.checkpoints()[keep:]:
            with contextlib.suppress(OSError):  # the next save tries again
                os.remove(path)

    def promote(self, resumed):
        """Makes the checkpoint of a resume the latest one, and renames the damaged ones."""
        for path in resumed.damaged:
            os.replace(path, path + '.damaged')
        if resumed.path != self / 'ckpt.pt':
            os.replace(resumed.path, self / 'ckpt.pt')
        self.saved_step = resumed.checkpoint['iter_num']


def move_aside(path):
    """Renames a folder, or what a link points to, to the first free path.1, path.2, ... and returns that."""
    folder, number = os.path.realpath(path), 1
    while os.path.lexists(f'{folder}.{number}'):
        number += 1
    try:
        if is_inside(os.curdir, folder):
            raise OSError(errno.EBUSY, 'it is where this command was started')
        os.rename(folder, f'{folder}.{number}')
    except OSError as e:
        raise ValueError(f'{path} holds a run and cannot be moved aside ({e.strerror or e}); '
                         'choose another folder, or resume that run with --init_from=resume') from None
    return f'{folder}.{number}'


def remove_partial_files(folder):
    """Removes the files that a killed process was writing."""
    for name in RUN_FILES:
        for path in glob.glob(glob.escape(os.path.join(folder, name)) + '*.tmp'):
            with contextlib.suppress(OSError):
                os.remove(path)


@dataclass
class Resumed:
    """The checkpoint to resume from, its path, and the newer ones that are damaged, {path: why}."""
    checkpoint: dict
    path: str
    damaged: dict


def find_latest(run_dir):
    """The newest intact checkpoint, as a Resumed. ValueError says why there is none."""
    damaged = {}
    for path in run_dir.checkpoints():
        try:
            return Resumed(load_checkpoint(path), path, damaged)
        except ValueError as e:
            damaged[path] = str(e)
    if not damaged:
        raise ValueError(f'init_from=resume, but {run_dir.path} holds no checkpoint; '
                         'start with --init_from=scratch')
    reasons = '\n  '.join(damaged.values())
    raise ValueError(f'no checkpoint in {run_dir.path} is intact:\n  {reasons}\n'
                     'start a new run with --init_from=scratch')


class Mirror:
    """
    A second folder for the files of a run. A thread copies them, so the run never waits for a slow
    disk. A copy that fails is printed and tried again with the next checkpoint.
    """

    def __init__(self, run_dir, path):
        self.run_dir, self.path = run_dir, path
        self.copied = {}  # {name: version of the file that was copied last}
        self.requests = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.copy_on_request, daemon=True)
        try:
            os.makedirs(os.path.realpath(path), exist_ok=True)
            with replacing(os.path.join(path, '.hotloop')):
                pass
            os.remove(os.path.join(path, '.hotloop'))
        except OSError as e:
            raise ValueError(f'mirror_dir={path!r} cannot be written: {e.strerror or e}; '
                             'choose another folder, or --mirror_dir=None') from None

    def open(self, ours):
        """Starts copying; out_dir must be locked by now. Moves a run that is not ours aside."""
        if not ours and RunDir(self.path).holds_run():
            print(f'mirror_dir: {self.path} held a run: moved to {move_aside(self.path)}', flush=True)
        remove_partial_files(self.path)
        self.thread.start()

    def update(self):
        """Requests a copy of the files that changed."""
        self.requests.put('copy')

    def close(self, seconds):
        """Waits up to so many seconds for a last copy."""
        self.update()
        self.requests.put(None)
        self.thread.join(seconds)
        if self.thread.is_alive():
            print(f'mirror_dir: {self.path} does not have the last checkpoint after {seconds} s', flush=True)

    def copy_on_request(self):
        while self.requests.get():
            for name in RUN_FILES:
                try:
                    self.copy(self.run_dir / name, os.path.join(self.path, name))
                except FileNotFoundError:
                    pass  # best.pt comes with the first evaluation
                except OSError as e:
                    print(f'mirror_dir: {name} could not be copied to {self.path}: {e.strerror or e}; '
                          'training continues', flush=True)

    def copy(self, path, target):
        with open(path, 'rb') as source:  # stays this file even if the run replaces it meanwhile
            stat = os.fstat(source.fileno())
            version = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if self.copied.get(target) == version and os.path.exists(target):
                return
            os.makedirs(os.path.realpath(self.path), exist_ok=True)  # it may have been removed
            with replacing(target) as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        self.copied[target] = version
