"""Files: replaced at once or not at all, hashed, locked; a line of progress."""

import contextlib
import hashlib
import json
import os
import sys
import time
from importlib.util import find_spec

try:
    import fcntl  # Linux and macOS
except ImportError:
    fcntl = None



def sync_folder(folder):
    """Makes a rename durable. Windows cannot open folders, and does it on its own."""
    if os.name == 'posix':
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def first_line(error):
    return str(error).strip().split('\n')[0]


def read_json(path):
    """The object in a JSON file; ValueError where there is none."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f'{path} cannot be read: {e}') from None
    if not isinstance(value, dict):
        raise ValueError(f'{path} holds no object of names and values')
    return value


def lies_in(path, folder):
    """Whether a path leads to a folder or below it."""
    return os.path.join(os.path.realpath(path), '').startswith(os.path.join(os.path.realpath(folder), ''))


def hash_file(path, kind=hashlib.sha256):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, kind).hexdigest()


def lock(descriptor, name):
    """Held until the file is closed or the process ends. ValueError where another process holds it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f'another process is writing {name}') from None


class Progress:
    """A line with share, rate and time left, once the work has taken two seconds."""

    def __init__(self, total):
        self.total, self.done, self.start, self.shown = max(total, 1), 0, time.time(), 0.0
        self.skipped, self.templates = 0, set()  # of rows: how many hold nothing to learn, and what the others are

    def add(self, num_bytes):
        self.done += num_bytes
        now = time.time()
        if now - self.start > 2 and now - self.shown > 0.5:
            rate = self.done / (now - self.start)
            left = max(self.total - self.done, 0) / rate
            self.show(f'{self.done / max(self.total, self.done):4.0%}  {rate / 1e6:.1f} MB/s  {left:.0f} s left ')
            self.shown = now

    def close(self):
        if self.shown:
            self.show(f'100%  {self.done / 1e6:.1f} MB in {time.time() - self.start:.0f} s        \n')

    def show(self, line):
        with contextlib.suppress(OSError):  # there may be nobody left who reads it
            print('\r' + line, end='', flush=True, file=sys.stderr)


def optional(module, what):
    """A package that is not in requirements.txt; ValueError names the command that installs it."""
    if find_spec(module.split('.')[0]) is None:
        raise ValueError(f'{module.split(".")[0]} {what}: pip install {module.split(".")[0]}')
    return __import__(module, fromlist=['_'])
