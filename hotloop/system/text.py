"""Numbers, errors and commands as short text, for the lines of a run and the axes of a report."""

import math
import os
import shlex
import sys

SCRIPTS = ('train.py', 'sample.py', 'prepare.py')


def short(loss):
    """Write a loss in at most six characters: 3.1234, 10.83, 1e+09."""
    if loss < 9.99995:
        return f'{loss:.4f}'
    return f'{loss:.4g}' if loss < 9999.5 else f'{loss:.0e}'


def compact(value):
    """Write a number with at most four significant digits: 0.015, 9,990, 25.4k, 1.23M."""
    for unit, size, least in (('T', 1e12, 1e12), ('B', 1e9, 1e9), ('M', 1e6, 1e6), ('k', 1e3, 1e4)):
        if 0.9995 * least <= abs(value) < 1e15:
            return f'{value / size:.3g}{unit}'
    return f'{value:,.0f}' if 999.5 <= abs(value) < 1e4 else f'{value:.3g}'.replace('e-0', 'e-')


def duration(seconds):
    """Write seconds in the two largest units: 16s, 12m 34s, 5h 12m, 34d 17h; or days alone."""
    left = int(seconds)
    if left >= 100 * 86400:
        return f'{left // 86400}d'
    for unit, size, below, part in (('d', 86400, 'h', 3600), ('h', 3600, 'm', 60), ('m', 60, 's', 1)):
        if left >= size:
            return f'{left // size}{unit} {left % size // part}{below}'
    return f'{left}s'


def file_size(num_bytes):
    """Write bytes of a file or of memory in three digits: 12 bytes, 3.4 kB, 613 MB, 79.1 GB."""
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if num_bytes >= 0.9995 * size:
            return f'{num_bytes / size:.3g} {unit}'
    return f'{num_bytes:.0f} bytes'


def with_error(loss, error):
    """Write a loss with its standard error, unless that is nan: 1.1212 ± 0.0075."""
    return f'{loss:.4f}' + (f' ± {error:.4f}' if math.isfinite(error) else '')


def counted(number, noun):
    """Write a number with its noun: 1 step, 1,200 steps, 2 processes."""
    if number == 1:
        return f'1 {noun}'
    return f'{number:,} {noun}{"es" if noun.endswith(("s", "ch")) else "s"}'


def first_line(error):
    """Return the first line of an exception's text, or its type if it has none."""
    return str(error).strip().split('\n')[0] or type(error).__name__


def reason_of(error):
    """Find the cause of an exception in the system's words, like Connection refused, or its type."""
    cause = error
    while cause is not None and not getattr(cause, 'strerror', None):
        cause = cause.__context__
    return cause.strerror if cause else type(error).__name__


def shell(*words):
    """Join the words of a command line, quoted as a shell needs it."""
    return shlex.join(words)


def script(name):
    """Name a script as this process was started, by its path if it ran from another folder."""
    folder, own = os.path.split(sys.argv[0])
    return os.path.join(folder, name) if own in SCRIPTS else name
