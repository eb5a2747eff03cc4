"""CPUs and memory of this machine, within the limits of a container. Does not import torch."""

import contextlib
import math
import os
import sys


def cores(physical=False, system='/sys'):
    """
    The CPUs this process may use: those in its affinity mask, limited by a container's quota.
    physical: count the hyper-threads of a core once, because they share its multiplication units.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count() or 1)
    count = len(cpus)
    if physical:
        siblings = f'{system}/devices/system/cpu/cpu{{}}/topology/thread_siblings_list'
        count = len({first_line_of(siblings.format(cpu)) or cpu for cpu in cpus})
    with contextlib.suppress(ValueError):  # no quota, or not Linux
        quota, period = first_line_of(f'{system}/fs/cgroup/cpu.max').split()
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(count, 1)


def memory(system='/sys'):
    """Bytes of memory of this machine, or of the container."""
    size = 16 * 2**30  # a guess for Windows, which has no sysconf
    if hasattr(os, 'sysconf'):
        size = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    limit = first_line_of(f'{system}/fs/cgroup/memory.max')
    return min(size, int(limit)) if limit.isdecimal() else size


def peak_memory():
    """The most bytes this process has used so far; None where the system does not count them."""
    if sys.platform == 'win32':
        return None
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024


def first_line_of(path):
    """The first line of a system file; '' if it is not there."""
    with contextlib.suppress(OSError), open(path, encoding='ascii') as f:
        return f.readline().strip()
    return ''
