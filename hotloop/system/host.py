"""CPUs and memory of this machine, within the limits of a container. Does not import torch."""

import contextlib
import math
import os
import resource
import sys
import time

STARTED = time.perf_counter()  # when this process started: train.py imports this before torch


def process_seconds():
    """Return the seconds since this process started, by a clock that never jumps."""
    return time.perf_counter() - STARTED


def end_spins_early(spins):
    """
    Let idle OpenMP threads of torch (libgomp) sleep after so many spins of about 25 nanoseconds, not
    after 300,000: beside a run on the same cores, each would wait for the other at every barrier. Has to
    be called before torch is imported.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', str(spins))


def threads_for(processes):
    """
    Return the CPU threads of each of the processes on this machine: OMP_NUM_THREADS, else a share of
    the physical cores. torchrun sets 1 for several processes, so a 1 counts for a single one only.
    """
    asked = os.environ.get('OMP_NUM_THREADS', '')
    if asked.isdecimal() and int(asked) > (processes > 1):
        return int(asked)
    return max(1, cores(physical=True) // processes)


def cores(physical=False, root=''):
    """
    Count the CPUs this process may use: those in its affinity mask, limited by a container's quota.
    physical: count the hyper-threads of a core once, because they share its multiplication units.
    """
    cpus = range(os.cpu_count() or 1)
    if hasattr(os, 'sched_getaffinity'):
        cpus = os.sched_getaffinity(0)
    count = len(cpus)
    if physical:
        siblings = f'{root}/sys/devices/system/cpu/cpu{{}}/topology/thread_siblings_list'
        count = len({first_line_of(siblings.format(cpu)) or cpu for cpu in cpus})
    for folder in control_groups(root):
        quota, _, period = first_line_of(f'{folder}/cpu.max').partition(' ')
        if quota.isdecimal():  # unlimited: max
            count = min(count, math.ceil(int(quota) / int(period)))
    return max(count, 1)


def vendor(root=''):
    """Return the vendor of the CPU as Linux names it, such as AuthenticAMD, or '' elsewhere."""
    with contextlib.suppress(OSError), open(f'{root}/proc/cpuinfo', encoding='utf-8') as f:
        for line in f:
            if line.startswith('vendor_id'):
                return line.split()[-1]
    return ''


def memory(root=''):
    """Return the bytes of memory of this machine, or of the container or job."""
    size = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    for folder in control_groups(root):
        limit = first_line_of(f'{folder}/memory.max')
        if limit.isdecimal():
            size = min(size, int(limit))
    return size


def control_groups(root):
    """List the folders of the control groups (version 2) of this process, innermost first."""
    mount = f'{root}/sys/fs/cgroup'
    path = first_line_of(f'{root}/proc/self/cgroup').removeprefix('0::')
    folders = []
    while path not in ('', '/'):  # a container's own group is its root, whatever its name
        folders.append(mount + path)
        path = os.path.dirname(path)
    return [*folders, mount]


def peak_memory():
    """Return the most bytes this process has used so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024


def first_line_of(path):
    """Return the first line of a file; '' if it is not there."""
    with contextlib.suppress(OSError), open(path, encoding='ascii', errors='replace') as f:
        return f.readline().strip()
    return ''
