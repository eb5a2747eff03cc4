"""CPUs and memory of this machine, within the limits of a container. Does not import torch."""

import contextlib
import math
import os
import resource
import sys
import time

# iterations that an idle OpenMP thread of torch (libgomp) spins before it sleeps: about 25 microseconds. Its
# own value is 300,000, 7 milliseconds; two runs on the same cores then wait for each other at every barrier
SPINS = 1000
STARTED = time.perf_counter()  # when this process started: train.py imports this before torch


def process_seconds():
    """Seconds since this process started, by a clock that never jumps."""
    return time.perf_counter() - STARTED


def end_spins_early():
    """Sets how long threads spin, before torch is imported, unless the user has set how they wait."""
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', str(SPINS))


def threads_for(processes):
    """
    CPU threads for each of the processes on this machine: OMP_NUM_THREADS if the user has set it, otherwise a
    share of the physical cores. torchrun sets 1 for several processes, so a 1 counts for a single one only.
    """
    asked = os.environ.get('OMP_NUM_THREADS', '').split(',')[0].strip()  # the first of nested levels
    if asked.isdecimal() and int(asked) > (processes > 1):
        return int(asked)
    return max(1, cores(physical=True) // processes)


def cores(physical=False, root=''):
    """
    The CPUs this process may use: those in its affinity mask, limited by a container's quota.
    physical: count the hyper-threads of a core once, because they share its multiplication units.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count() or 1)
    count = len(cpus)
    if physical:
        siblings = f'{root}/sys/devices/system/cpu/cpu{{}}/topology/thread_siblings_list'
        count = len({first_line_of(siblings.format(cpu)) or cpu for cpu in cpus})
    for folder in control_groups('cpu', root):
        old = ' '.join(first_line_of(f'{folder}/cpu.cfs_{name}_us') for name in ('quota', 'period'))
        quota, _, period = (first_line_of(f'{folder}/cpu.max') or old).partition(' ')
        if quota.isdecimal() and period.isdecimal():  # unlimited: max, or -1
            count = min(count, math.ceil(int(quota) / int(period)))
    return max(count, 1)


def memory(root=''):
    """Bytes of memory of this machine, or of the container or job."""
    size = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    for folder in control_groups('memory', root):
        limit = first_line_of(f'{folder}/memory.max') or first_line_of(f'{folder}/memory.limit_in_bytes')
        if limit.isdecimal():
            size = min(size, int(limit))
    return size


def control_groups(controller, root):
    """The folders of the control groups that this process is in, innermost first; of version 2 or 1."""
    lines = []
    with contextlib.suppress(OSError), open(f'{root}/proc/self/cgroup', encoding='utf-8') as f:
        lines = f.read().splitlines()
    for line in lines:
        _, controllers, path = line.split(':', 2)
        if controllers and controller not in controllers.split(','):
            continue
        mount = f'{root}/sys/fs/cgroup' + (controllers and f'/{controller}')
        while path not in ('', '/'):  # a container's own group is its root, even if it is not called that
            yield mount + path
            path = os.path.dirname(path)
        yield mount


def peak_memory():
    """Return the most bytes this process has used so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == 'darwin':
        return peak
    return peak * 1024


def first_line_of(path):
    """The first line of a file; '' if it is not there."""
    with contextlib.suppress(OSError), open(path, encoding='ascii', errors='replace') as f:
        return f.readline().strip()
    return ''
