"""The folder of a run: lock, latest, best and older checkpoints, mirror."""

import contextlib
import errno
import glob
import os
import queue
import shutil
import threading
from dataclasses import dataclass

from hotloop.checkpoint import load_checkpoint, save_checkpoint
from hotloop.distributed import tell
from hotloop.files import is_inside, lock


def move_aside(path):
    """Renames a folder, or what a link leads to, to the first free of path.1, path.2, ...; ValueError if it cannot."""
    plain = os.path.realpath(path)
    aside = next(f'{plain}.{n}' for n in range(1, 10**6) if not os.path.lexists(f'{plain}.{n}'))
    try:
        if is_inside(os.curdir, plain):
            raise OSError(errno.EBUSY, 'it is where this command was started')
        os.rename(plain, aside)
    except OSError as e:
        raise ValueError(f'{path} holds a run, and cannot be moved aside ({e.strerror or e}); choose another folder, '
                         'or go on with that run: --init_from=resume') from None
    return aside


RUN_FILES = ('config.py', 'log.jsonl', 'best.pt', 'ckpt.pt')


class RunDir:
    """The folder of a run, owned by one process: its lock, its checkpoints, its log."""

    def __init__(self, path):
        self.path, self.lock, self.saved_step = path, None, None
        self.spare = None  # the step of a checkpoint that stays beyond its time: where a rollback would go

    def __truediv__(self, name):
        return os.path.join(self.path, name)

    def checkpoints(self):
        """Checkpoint files, the newest first."""
        older = glob.glob(glob.escape(self / 'ckpt-') + '[0-9]' * 9 + '.pt')  # no copy that somebody made by hand
        return [p for p in [self / 'ckpt.pt', *sorted(older, reverse=True)] if os.path.exists(p)]

    def holds_run(self):
        return bool(self.checkpoints()) or any(os.path.exists(self / name) for name in ('best.pt', 'log.jsonl'))

    def open(self, fresh, config):
        """Takes the folder, moving the run that is in it aside if this one is fresh. Returns what to tell the user."""
        said = []
        try:
            if fresh and self.holds_run():
                self.take_lock()
                aside = move_aside(self.path)
                self.lock = self.lock and self.lock.release()  # None: the new folder has a lock of its own
                said.append(f'{self.path} held a run: moved to {aside}')
            os.makedirs(os.path.realpath(self.path), exist_ok=True)
            self.take_lock()
            for name in RUN_FILES:  # left by a save that was killed; the lock says that nobody is writing it
                for left in glob.glob(glob.escape(self / name) + '*.tmp'):
                    os.remove(left)
            with open(self / 'config.py', 'w', encoding='utf-8') as f:
                f.write(config)
        except OSError as e:
            raise ValueError(f'out_dir={self.path!r} cannot be written: {e.strerror or e}') from None
        if self.lock is None:
            said.append('out_dir is not locked on this system: start no second run in it')
        return said

    def take_lock(self):
        """Held until the process ends, however it ends. ValueError where another process holds it."""
        if not self.lock:
            self.lock = lock(self / '.lock')

    def numbered(self, step):
        return None if step is None else self / f'ckpt-{step:09d}.pt'

    def save(self, checkpoint, keep):
        """Makes this the latest checkpoint and keeps the one before under its number; removes those beyond `keep`."""
        latest = self / 'ckpt.pt'
        save_checkpoint(latest, checkpoint, keep_old=self.numbered(self.saved_step)
                        if self.saved_step != checkpoint['iter_num'] else None)
        self.saved_step = checkpoint['iter_num']
        for old in self.checkpoints()[keep:]:
            if old != self.numbered(self.spare):
                with contextlib.suppress(OSError):  # it goes with the next
                    os.remove(old)

    def promote(self, resumed):
        """Makes the checkpoint gone on from the latest; damaged ones are set aside, those rolled back removed."""
        for path in resumed.damaged:
            os.replace(path, path + '.damaged')
        for path in resumed.later:
            os.remove(path)
        if resumed.path != self / 'ckpt.pt':
            os.replace(resumed.path, self / 'ckpt.pt')
        self.saved_step = resumed.checkpoint['iter_num']


@dataclass
class Resumed:
    """A checkpoint to go on from, where it was, the newer ones that are damaged ({path: why}) or not wanted."""
    checkpoint: dict
    path: str
    damaged: dict
    later: list


def find_latest(out_dir, wanted=lambda checkpoint: True):
    """The newest checkpoint that is whole and wanted, None if those are not wanted; ValueError where none is whole."""
    damaged, later = {}, []
    for path in out_dir.checkpoints():
        try:
            checkpoint = load_checkpoint(path)
        except ValueError as e:
            damaged[path] = str(e)
        else:
            if wanted(checkpoint):
                return Resumed(checkpoint, path, damaged, later)
            later.append(path)
    if later:
        return None
    if not damaged:
        raise ValueError(f'init_from=resume, but {out_dir.path} holds no checkpoint; start with --init_from=scratch')
    raise ValueError('\n  '.join([f'no checkpoint in {out_dir.path} is whole:', *damaged.values()])
                     + '\nto start anew: --init_from=scratch')


class Mirror:
    """
    A second place for what is finished in out_dir. A thread copies it, so that the run never waits for a slow disk, and
    what goes wrong there is said and harms nothing: it is tried again with the next checkpoint.
    """

    def __init__(self, out, path):
        self.out, self.path, self.copied, self.asked = out, path, {}, queue.SimpleQueue()
        try:
            os.makedirs(os.path.realpath(path), exist_ok=True)
            with open(os.path.join(path, '.hotloop'), 'w'):
                pass
            os.remove(os.path.join(path, '.hotloop'))
        except OSError as e:
            raise ValueError(f'mirror_dir={path!r} cannot be written: {e.strerror or e}; choose '
                             'another place, or --mirror_dir=None') from None

    def open(self, ours):
        """Starts copying, once out_dir is ours; another run that is there is moved aside."""
        if not ours and RunDir(self.path).holds_run():
            tell(f'mirror_dir: {self.path} held a run: moved to {move_aside(self.path)}')
        self.thread = threading.Thread(target=self.copy_all, daemon=True)
        self.thread.start()

    def update(self):
        """Asks for a copy of what is new; one that is under way comes first."""
        self.asked.put(True)

    def copy_all(self):
        while self.asked.get():
            for name in (name for name in RUN_FILES if os.path.exists(self.out / name)):
                try:
                    os.makedirs(os.path.realpath(self.path), exist_ok=True)
                    self.copy(self.out / name, os.path.join(self.path, name))
                except OSError as e:
                    tell(f'mirror_dir: {name} could not be copied to {self.path}: {e.strerror or e}; training goes on')

    def copy(self, source, target):
        with open(source, 'rb') as f:  # a file that is replaced meanwhile stays as it was opened
            about = os.fstat(f.fileno())
            version = about.st_ino, about.st_mtime_ns, about.st_size
            if self.copied.get(target) == version and os.path.exists(target):
                return
            with open(f'{target}.tmp', 'wb') as g:
                shutil.copyfileobj(f, g, 2**20)
                g.flush()
                os.fsync(g.fileno())
        os.replace(f'{target}.tmp', target)
        self.copied[target] = version

    def close(self, seconds):
        """Waits for the last copy, but not for ever."""
        self.asked.put(True)
        self.asked.put(False)
        self.thread.join(seconds)
        if self.thread.is_alive():
            tell(f'mirror_dir: {self.path} did not take the last checkpoint within {seconds} s')
