"""Files: atomic replacement, locks, hashes, JSON; a progress line."""

import contextlib
import errno
import hashlib
import importlib
import json
import os
import sys
import time
from importlib.util import find_spec

from hotloop.system.text import file_size

# how file systems, above all of networks and virtual machines, say that they do not lock or sync
UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
WAITS = (0.01, 0.1, 0.4, 1.5)  # seconds between attempts to rename on Windows


@contextlib.contextmanager
def replacing(path):
    """A binary file that becomes `path` when the block ends. An error or a kill leaves `path` unchanged."""
    partial = f'{path}.{os.getpid()}.tmp'
    try:
        with open(partial, 'wb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        rename(partial, path)
        sync_folder(os.path.dirname(path) or '.')
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise


def rename(old, new):
    """os.replace(). Windows refuses while another program, such as a virus scanner, reads one of the two."""
    for seconds in WAITS if os.name == 'nt' else ():
        with contextlib.suppress(PermissionError):
            return os.replace(old, new)
        time.sleep(seconds)
    return os.replace(old, new)


def sync_folder(folder):
    """Makes a rename in the folder durable, where folders can be synced. Windows cannot open them."""
    if os.name == 'posix':
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as e:
            if e.errno not in UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)


def lock(path):
    """
    Locks a file until the returned lock is released or this process ends, even by kill -9; None where the
    system does not support that. ValueError names the process that holds the lock.
    """
    from filelock import FileLock, SoftFileLock, Timeout
    held = FileLock(path)
    owner = path + '.pid'  # a separate file, because some versions of filelock truncate the locked file
    try:
        held.acquire(timeout=0)
    except Timeout:
        pid = 'unknown'
        with contextlib.suppress(OSError), open(owner, encoding='ascii') as f:
            pid = f.read()
        raise ValueError(f'{os.path.dirname(path) or "."} is in use by process {pid}') from None
    except (OSError, NotImplementedError) as e:  # the latter: earlier versions of filelock
        if getattr(e, 'errno', errno.ENOSYS) in UNSUPPORTED:
            return None
        raise
    if isinstance(held, SoftFileLock):  # without kernel locks: a plain file, which would outlive a kill -9
        held.release()
        return None
    with open(owner, 'w', encoding='ascii') as f:
        f.write(str(os.getpid()))
    return held


def free_number(path):
    """The first of path.1, path.2, ... that does not exist."""
    number = 1
    while os.path.lexists(f'{path}.{number}'):
        number += 1
    return f'{path}.{number}'


def first_intact(paths, load):
    """(path, load(path)) of the first that loads. Prints the ValueErrors before it, and raises the last."""
    for path in paths[:-1]:
        try:
            return path, load(path)
        except ValueError as e:
            print(f'{e}; trying the next checkpoint', file=sys.stderr)
    return paths[-1], load(paths[-1])


def is_inside(path, folder):
    """Whether `path` is `folder` or is inside it, after resolving links."""
    return os.path.join(os.path.realpath(path), '').startswith(os.path.join(os.path.realpath(folder), ''))


def hash_file(path):
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def read_json(path):
    """The object in a JSON file. ValueError if the file cannot be read or holds anything else."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f'{path} cannot be read: {e}') from None
    if not isinstance(value, dict):
        raise ValueError(f'{path} does not hold a JSON object')
    return value


def parse_json(text, where, remedy=''):
    """The value of a JSON text. ValueError says where it is wrong, and the remedy."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{where} is not JSON: {e}{remedy}') from None


def json_lines(lines, path, remedy=''):
    """Yields (where, value) of each line of JSON that is not empty. ValueError as in parse_json()."""
    for number, line in enumerate(lines, 1):
        where = f'{path}, line {number}'
        if line.strip():
            yield where, parse_json(line, where, remedy)


def counted(number, noun):
    """A number and its noun: 1 step, 1,200 steps, 2 processes."""
    plural = 'es' if noun.endswith(('s', 'ch')) else 's'
    return f'{number:,} {noun}{"" if number == 1 else plural}'


def first_line(error):
    """The first line of an exception's text; its type, if it has none."""
    return str(error).strip().split('\n')[0] or type(error).__name__


def reason_of(error):
    """The system's words for the cause of an exception, such as Connection refused; otherwise its type."""
    cause = error
    while cause is not None and not getattr(cause, 'strerror', None):
        cause = cause.__context__
    return cause.strerror if cause else type(error).__name__


def optional(module, purpose):
    """Imports a package that requirements.txt does not list. ValueError if it is missing."""
    package = module.split('.')[0]
    if find_spec(package) is None:
        raise ValueError(f'{package} {purpose}: pip install {package}')
    return importlib.import_module(module)


class Progress:
    """A progress line on stderr, shown after two seconds of work. total, done: bytes; total=0: unknown."""

    def __init__(self, total, done=0):
        self.total, self.before, self.done, self.start, self.shown = total, done, done, time.time(), 0.0

    def add(self, num_bytes):
        self.done += num_bytes
        now = time.time()
        if self.done > self.before and now - self.start > 2 and now - self.shown > 0.5:
            rate = (self.done - self.before) / (now - self.start)
            done, speed = file_size(self.done), file_size(rate)
            line = f'{done}, {speed}/s'
            if self.total:
                left = max(self.total - self.done, 0) / rate
                line = f'{done} of {file_size(self.total)}, {speed}/s, {left:.0f} s left'
            print(f'\r{line}   ', end='', flush=True, file=sys.stderr)
            self.shown = now

    def close(self):
        if self.shown:
            print(file=sys.stderr)
