"""Files: atomic replacement, locks, hashes, JSON; a progress line."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib
import json
import os
import sys
import time

from hotloop.system.text import file_size

# File systems of networks and virtual machines return these if they cannot lock or sync.
UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def replacing(path):
    """Open a binary file that becomes `path` when the block ends. An error or a kill leaves `path`."""
    partial = f'{path}.{os.getpid()}.tmp'
    try:
        with open(partial, 'wb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
        sync_folder(os.path.dirname(path) or '.')
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise


def sync_folder(folder):
    """Make a rename in the folder durable, where folders can be synced."""
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
    Lock a file until the returned file is closed or this process ends, even by kill -9. Raises
    ValueError with the process that holds the lock.
    """
    held = open(path, 'a+', encoding='ascii')  # noqa: SIM115
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.seek(0)
        owner = held.read()
        held.close()
        raise ValueError(f'{os.path.dirname(path)} is in use by process {owner}') from None
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise
    held.truncate(0)
    held.write(str(os.getpid()))
    held.flush()
    return held


def free_number(path):
    """Find the first of path.1, path.2, ... that does not exist."""
    number = 1
    while os.path.lexists(f'{path}.{number}'):
        number += 1
    return f'{path}.{number}'


def checkpoint_paths(folder, best=False):
    """List the checkpoints of a run folder, the newest first; best: after best.pt, as they are sampled."""
    pattern = os.path.join(glob.escape(folder), 'ckpt-' + '[0-9]' * 9 + '.pt')  # no copies of the user's
    paths = [os.path.join(folder, 'ckpt.pt'), *sorted(glob.glob(pattern), reverse=True)]
    if best:
        paths.insert(0, os.path.join(folder, 'best.pt'))
    return [path for path in paths if os.path.exists(path)]


def first_intact(paths, load):
    """Return (path, load(path)) of the first that loads. Prints why others do not; the last raises."""
    for path in paths[:-1]:
        try:
            return path, load(path)
        except ValueError as e:
            print(f'{e}; trying the next checkpoint', file=sys.stderr)
    return paths[-1], load(paths[-1])


def is_inside(path, folder):
    """Test whether `path` is `folder` or is inside it, after resolving links."""
    folder = os.path.join(os.path.realpath(folder), '')
    return os.path.join(os.path.realpath(path), '').startswith(folder)


def hash_file(path):
    """Hash a file with SHA-256, in hexadecimal."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def read_json(path):
    """Read the object in a JSON file. Raises ValueError if it cannot be read or holds no object."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f'{path} cannot be read: {e}') from None
    if not isinstance(value, dict):
        raise ValueError(f'{path} does not hold a JSON object')
    return value


def parse_json(text, where, remedy=''):
    """Parse a JSON text. Raises ValueError with the place and the remedy."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{where} is not JSON: {e}{remedy}') from None


def json_lines(lines, path, remedy=''):
    """Yield (where, value) of each line of JSON that is not empty. Raises as parse_json() does."""
    for number, line in enumerate(lines, 1):
        where = f'{path}, line {number}'
        if line.strip():
            yield where, parse_json(line, where, remedy)


def optional(module, purpose, package=None):
    """
    Import a module that requirements.txt does not install. package: its name for pip, unless that is the
    first part of the module's. Raises ValueError if it is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if not f'{module}.'.startswith(f'{e.name}.'):  # a package that this one needs
            raise
        package = package or module.split('.')[0]
        raise ValueError(f'{package} is not installed; it {purpose}: pip install {package}') from None


def counting(chunks, size_of, total=0):
    """Yield the chunks. Every two seconds the bytes that are done are shown on stderr. total=0: unknown."""
    done = 0
    last = time.time()
    end = ''
    for chunk in chunks:
        yield chunk
        done += size_of(chunk)
        if time.time() - last > 2:
            of_total = f' of {file_size(total)}' if total else ''
            print(f'\r{file_size(done)}{of_total}   ', end='', flush=True, file=sys.stderr)
            last = time.time()
            end = '\n'
    print(end=end, file=sys.stderr)
