"""The processes of a run: their environment, their group, requests to stop."""

import contextlib
import errno
import gc
import importlib
import os
import signal
import sys
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

TIMEOUT = timedelta(hours=1)  # how long a process waits for the others before it gives up


def print0(text):
    """Print on rank 0. A closed terminal or a broken pipe must not end a training run."""
    if os.environ.get('RANK', '0') != '0':
        return
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # on a full disk the next line may fit
            sys.stdout = None


@dataclass(frozen=True)
class Env:
    """Where and how this process computes, with the reasons for the choices."""
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device('cpu'))
    dtype: torch.dtype = torch.float32
    compile: bool = False
    reasons: dict = field(default_factory=dict)

    def sum(self, array):
        """
        Sum a float64 array over all processes, which must all call it. The hosts exchange it, so
        that it does not wait for the work that is queued on a GPU.
        """
        if self.world == 1:
            return array
        total = torch.tensor(array, dtype=torch.float64)  # a copy, which is reduced in place
        dist.all_reduce(total)
        return total.numpy()

    def any(self, flag):
        """Return whether a flag is true on any process. All of them must call it."""
        return bool(self.sum(np.array([float(flag)]))[0] > 0)

    def broadcast(self, number):
        """Return the number that rank 0 has. All processes must call it."""
        if self.rank:
            number = 0.0
        return float(self.sum(np.array([float(number)]))[0])

    def barrier(self):
        """Wait until all processes have called it."""
        self.sum(np.zeros(1))


def open_process_group(backend, device):
    """
    Join the process group that torchrun's environment variables describe. Tensors on GPUs travel
    by NCCL (backend auto or nccl), those on hosts by gloo. Raises ValueError without the variables.
    """
    world = int(os.environ['WORLD_SIZE'])
    for name in ('MASTER_ADDR', 'MASTER_PORT'):
        if name not in os.environ:
            raise ValueError(f'WORLD_SIZE={world} is set, but {name} is not; start with torchrun, '
                             'or unset WORLD_SIZE')
    if backend == 'nccl' and device.type != 'cuda':
        raise ValueError(f'backend=nccl needs GPUs, and the device is {device.type}; '
                         'use --backend=gloo')
    backends = 'gloo'
    if device.type == 'cuda' and backend != 'gloo':
        backends = 'cpu:gloo,cuda:nccl'
    # torchrun hosts the store and keeps it over all restarts. Without a prefix for each restart,
    # the keys of dead processes are read again: 9 of 14 restarts failed (pytorch#135712)
    rank = int(os.environ['RANK'])
    is_host = rank == 0 and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
    store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), world,
                          is_host, TIMEOUT)
    store = dist.PrefixStore(f'try{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', store)
    # Optimizers import this module at their first step, and its default arguments then hold the
    # group: gloo's threads outlived destroy_process_group and aborted 4 of 128 finished runs
    importlib.import_module('torch.distributed.nn.functional')
    dist.init_process_group(backends, timeout=TIMEOUT, store=store, rank=rank, world_size=world)


def close_process_group(failed, device):
    """Leave the process group. After an error NCCL would wait for processes that are gone."""
    if not dist.is_initialized() or (failed and device.type == 'cuda'):
        return
    gc.collect()  # DDP holds the group, whose threads must end before Python exits
    dist.destroy_process_group()
    # torchrun then signals the others; Python would die from that signal during shutdown
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def check_same_step(step, env):
    """Raise ValueError on every rank unless all ranks found the same step in out_dir."""
    steps = np.zeros(env.world)
    steps[env.rank] = step
    steps = env.sum(steps)
    if (steps != step).any():
        raise ValueError(f'the processes start from different steps, {steps.min():,.0f} to '
                         f'{steps.max():,.0f}; out_dir must be a folder that they all share')


class StopRequest:
    """
    Record a signal; the loop then saves and stops. A second SIGINT kills the process at once.
    """

    def __init__(self, env):
        self.env = env
        self.signal = None
        signal.signal(signal.SIGTERM, self.receive)
        signal.signal(signal.SIGINT, self.receive)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number, frame):
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if self.env.rank == 0:
                with contextlib.suppress(OSError):  # print() may be what the signal interrupted
                    os.write(2, b'\nstopping after this step and a save; Ctrl-C again exits now\n')

    def by_signal(self):
        """Return whether a signal came to this process."""
        return self.signal is not None

    def requested(self):
        """Return whether any process was asked to stop. All of them must call it."""
        return self.env.any(self.by_signal())

    def exit_code(self):
        """Return 128 + the signal's number, as shells do: 143, 130 or 129; 0 without a signal."""
        return 128 + self.signal if self.signal else 0
