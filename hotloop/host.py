"""CPUs and memory of this machine, as a container has them."""

import contextlib
import math
import os


def cores(physical=False, system='/sys'):
    """
    The CPUs this process may use: those of its affinity, and no more than a container's quota pays for. physical: the
    hyper-threads of a core count once, as they share what multiplies.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count() or 1)
    found, most = len(cpus), math.inf
    if physical:
        found = len({first_of(f'{system}/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list') or cpu
                     for cpu in cpus})
    with contextlib.suppress(ValueError):  # no quota, or no Linux
        quota, period = first_of(f'{system}/fs/cgroup/cpu.max').split()
        most = math.ceil(int(quota) / int(period))
    return max(min(found, most), 1)


def first_of(path):
    """The first line of a file of the system's; empty where there is none."""
    try:
        with open(path, encoding='ascii') as f:
            return f.readline().strip()
    except OSError:
        return ''
