"""The folder of a run: its lock, the latest, best and older checkpoints, a thread that saves, a mirror."""

import contextlib
import glob
import math
import os
import queue
import shutil
import threading
from concurrent import futures
from dataclasses import dataclass

from configurator import OWN_FILE
from hotloop.system import host
from hotloop.system.distributed import print_safely
from hotloop.system.files import free_number, is_inside, lock, rename, replacing
from hotloop.system.text import shell
from hotloop.training.checkpoint import OPTIMIZERS, DiskFull, load_checkpoint, save_checkpoint
from hotloop.training.record import DIAGNOSIS
from hotloop.weights.adapter import CONFIG, ORIGIN, TENSORS, write_adapter

ADAPTER_FILES = tuple(f'adapter/{name}' for name in (CONFIG, TENSORS, ORIGIN))  # of a run with lora_rank
RUN_FILES = ('config.py', 'log.jsonl', 'report.html', DIAGNOSIS, *ADAPTER_FILES, 'best.pt', 'ckpt.pt')
NOT_IN_BEST = (*OPTIMIZERS, 'scaler', 'state')


class RunDir:
    """The folder of a run, locked by one process at a time."""

    def __init__(self, path, device='auto', backend='auto'):
        self.path, self.lock = path, None
        self.machine = {'device': device, 'backend': backend}  # settings that the command to resume repeats
        self.saved_step, self.best_loss = None, math.inf  # of ckpt.pt and best.pt
        self.writer, self.saving = futures.ThreadPoolExecutor(1), None  # a Future: the save under way
        self.save_seconds = 0.0  # that the last save took

    def __truediv__(self, name):
        return os.path.join(self.path, name)

    def checkpoints(self):
        """Checkpoint files, the newest first."""
        pattern = glob.escape(self / 'ckpt-') + '[0-9]' * 9 + '.pt'  # excludes a user's own copies
        older = sorted(glob.glob(pattern), reverse=True)
        return [path for path in [self / 'ckpt.pt', *older] if os.path.exists(path)]

    def holds_run(self):
        """Whether anything would be overwritten."""
        return bool(self.checkpoints()) or any(os.path.exists(self / name) for name in RUN_FILES[1:])

    def open(self, fresh, config_text):
        """Locks the folder, writes config.py, and returns notes. A fresh run moves an old one aside first."""
        notes = []
        try:
            if fresh and self.holds_run():
                self.take_lock()
                if os.name == 'nt':
                    self.release_lock()  # Windows cannot rename a folder with an open file
                moved = move_aside(self.path)
                notes.append(f'{self.path} held a run, which was moved to {moved}')
                self.release_lock()  # the new folder gets its own
            if fresh:
                self.check_config()
            os.makedirs(os.path.realpath(self.path), exist_ok=True)
            self.take_lock()
            remove_partial_files(self.path)
            with replacing(self / 'config.py') as f:
                f.write(config_text.encode())
        except OSError as e:
            raise ValueError(f'out_dir={self.path!r} cannot be written: {e.strerror or e}') from None
        return notes

    def check_config(self):
        """ValueError if config.py is not that of a run: a file of the user's would be replaced."""
        path = self / 'config.py'
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, 'rb') as f:
            if not f.read().startswith(OWN_FILE.encode()):
                raise ValueError(f'{path} was not written by a run, which would replace it; rename it, or '
                                 'choose another folder')

    def take_lock(self):
        """Takes the lock. It is held until the process ends, even by kill -9."""
        try:
            self.lock = lock(self / '.lock')
        except ValueError as e:
            raise ValueError(f'{e}; wait for it, or choose another folder with --out_dir') from None

    def release_lock(self):
        if self.lock:
            self.lock.release()

    def start_save(self, checkpoint, keep):
        """save() in a thread. The result is in `saving`, a Future; the save before must have ended."""
        self.saving = self.writer.submit(self.save, checkpoint, keep)

    def wait(self):
        """Waits for the save under way, whether or not it succeeds."""
        if self.saving:
            futures.wait([self.saving])

    def save(self, checkpoint, keep):
        """
        Saves the latest checkpoint, renames the one before by its step, and removes all but `keep`. If its
        best_val_loss is a new one, these weights are the best, and best.pt is saved first: a checkpoint never
        has the loss of a best.pt that could not be written.
        """
        began = host.process_seconds()
        if checkpoint['best_val_loss'] < self.best_loss:
            self.write('best.pt', {k: value for k, value in checkpoint.items() if k not in NOT_IN_BEST})
            if 'lora' in checkpoint:
                write_adapter(self / 'adapter', checkpoint)
            self.best_loss = checkpoint['best_val_loss']
        step, keep_old = checkpoint['iter_num'], None
        if self.saved_step not in (None, step):
            keep_old = self / f'ckpt-{self.saved_step:09d}.pt'
        self.write('ckpt.pt', checkpoint, keep_old)
        self.saved_step = step
        self.remove_older(keep)
        self.save_seconds = host.process_seconds() - began

    def write(self, name, checkpoint, keep_old=None):
        """Saves a checkpoint as `name`. On a full disk it removes the older ones and tries once more."""
        try:
            save_checkpoint(self / name, checkpoint, keep_old)
        except DiskFull:
            removed = self.remove_older(1)
            if not removed:
                raise
            print_safely(f'the disk is full: removed {", ".join(removed)}')
            save_checkpoint(self / name, checkpoint)  # without keep_old, which takes space

    def remove_older(self, keep):
        """Removes all but the newest `keep` checkpoints; returns the names of the removed ones."""
        removed = []
        for path in self.checkpoints()[keep:]:
            with contextlib.suppress(OSError):  # the next save tries again
                os.remove(path)
                removed.append(os.path.basename(path))
        return removed

    def how_to_go_on(self):
        """A clause for an error: the step that is saved, and the command that resumes from it."""
        self.wait()
        if self.saved_step is None:
            return 'no step of this run is saved'
        return f'step {self.saved_step} is saved in {self / "ckpt.pt"}; resume with: {self.resume_command()}'

    def resume_command(self):
        """The command that resumes this run, on as many processes."""
        launcher, world = 'python', os.environ.get('WORLD_SIZE', '1')
        if world != '1':
            on_a_node = os.environ.get('LOCAL_WORLD_SIZE') == world
            launcher = f'torchrun --standalone --nproc_per_node={world}' if on_a_node else 'torchrun ...'
        flags = ''.join(f' --{name}={value}' for name, value in self.machine.items() if value != 'auto')
        return f'{launcher} train.py --init_from=resume --out_dir={shell(self.path)}{flags}'

    def promote(self, resumed):
        """Makes the checkpoint of a resume the latest one, and renames the damaged ones."""
        for path in resumed.damaged:
            rename(path, path + '.damaged')
        if resumed.path != self / 'ckpt.pt':
            rename(resumed.path, self / 'ckpt.pt')
        self.saved_step = resumed.checkpoint['iter_num']


def move_aside(path):
    """Renames a folder, or what a link points to, to the first free path.1, path.2, ...; returns that."""
    folder = os.path.realpath(path)
    if is_inside(os.curdir, folder):
        raise ValueError(f'{path} holds a run and cannot be moved aside, because it contains the current '
                         'directory; choose another folder, or resume that run with --init_from=resume')
    target = free_number(folder)
    rename(folder, target)
    return target


def remove_partial_files(folder):
    """Removes the files that a killed process was writing."""
    for name in RUN_FILES:
        for path in glob.glob(glob.escape(os.path.join(folder, name)) + '*.tmp'):
            os.remove(path)


@dataclass
class Resumed:
    """The checkpoint to resume from, its path, and the newer ones that are damaged, {path: why}."""
    checkpoint: dict
    path: str
    damaged: dict


def find_latest(run_dir, remedy='start with --init_from=scratch'):
    """The newest intact checkpoint, as a Resumed. ValueError says why there is none, and the remedy."""
    damaged = {}
    for path in run_dir.checkpoints():
        try:
            return Resumed(load_checkpoint(path), path, damaged)
        except ValueError as e:
            damaged[path] = str(e)
    found = 'intact checkpoint' if damaged else 'checkpoint'
    message = f'init_from=resume, but {run_dir.path} holds no {found}; {remedy}'
    raise ValueError('\n'.join([message, *damaged.values()]))


class Mirror:
    """A second folder for the files of a run. A thread copies them, so a slow disk does not block the run."""

    def __init__(self, run_dir, path, ours):
        """Moves a run in `path` aside unless it is ours; run_dir must be locked by now."""
        self.run_dir, self.path, self.copied, self.requests = run_dir, path, {}, queue.SimpleQueue()
        self.thread = threading.Thread(target=self.copy_on_request, daemon=True)
        try:
            if not ours:
                if RunDir(path).holds_run():
                    moved = move_aside(path)
                    print(f'mirror_dir: {path} held a run, which was moved to {moved}', flush=True)
                RunDir(path).check_config()
            os.makedirs(os.path.realpath(path), exist_ok=True)
            remove_partial_files(path)
        except OSError as e:
            raise ValueError(f'mirror_dir={path!r} cannot be written: {e.strerror or e}; '
                             'choose another folder, or --mirror_dir=None') from None
        self.thread.start()

    def update(self):
        self.requests.put('copy')

    def close(self, seconds):
        """Waits up to this many seconds for a last copy."""
        self.update()
        self.requests.put(None)
        self.thread.join(seconds)
        if self.thread.is_alive():
            print(f'mirror_dir={self.path!r} lacks the last checkpoint after {seconds} s', flush=True)

    def copy_on_request(self):
        while self.requests.get():
            with contextlib.ExitStack() as stack:
                sources = {}
                # An open file stays the same even if the run replaces it. ckpt.pt is opened first, so that
                # the others are not older; a resume drops what is newer
                for name in reversed(RUN_FILES):
                    with contextlib.suppress(OSError):  # best.pt comes with the first evaluation
                        sources[name] = stack.enter_context(open(self.run_dir / name, 'rb'))
                for name in RUN_FILES:
                    try:
                        if name in sources:
                            self.copy(name, sources[name])
                    except OSError as e:  # the next checkpoint tries again
                        print(f'mirror_dir={self.path!r}: {name} not copied: {e.strerror or e}', flush=True)

    def copy(self, name, source):
        stat = os.fstat(source.fileno())
        version = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if self.copied.get(name) != version:
            os.makedirs(os.path.dirname(os.path.join(self.path, name)), exist_ok=True)
            with replacing(os.path.join(self.path, name)) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            self.copied[name] = version
