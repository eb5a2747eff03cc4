"""Distributed processes: their environment, start and stop."""

import contextlib
import errno
import importlib
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist


@dataclass
class Env:
    """Where and how this process computes, with the reasons for the choices."""
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device('cpu'))
    dtype: torch.dtype = torch.float32
    compile: bool = False
    threads: int = 1
    reasons: dict = field(default_factory=dict)
    stop: 'StopRequest | None' = None

    def print_once(self, text):
        """Prints on rank 0 only."""
        if self.rank == 0:
            print_safely(text)

    def sum(self, array):
        """Sums a float64 array over all processes; all of them must call it."""
        if self.world == 1:
            return array
        total = torch.tensor(array, dtype=torch.float64, device=self.device)  # a copy, reduced in place
        dist.all_reduce(total)
        return total.cpu().numpy()


def print_safely(text):
    """Prints. A closed terminal or a broken pipe must not end a training run."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # on a full disk the next line may fit
            sys.stdout = None


def open_process_group(backend, device, rank, world, timeout_minutes):
    """Joins the process group described by torchrun's environment variables. backend: auto, nccl or gloo."""
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    options = {}
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
        # torchrun keeps one store over all restarts. Without a prefix for each restart, the keys of dead
        # processes are read again: 9 of 14 restarts failed (pytorch#135712)
        store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), world)
        store = dist.PrefixStore(f'try{os.environ["TORCHELASTIC_RESTART_COUNT"]}', store)
        options = {'store': store, 'rank': rank, 'world_size': world}
    # Optimizers import this module at their first step, and its default arguments reference the group that
    # exists then: gloo's threads outlived destroy_process_group and aborted 4 of 128 finished runs
    importlib.import_module('torch.distributed.nn.functional')
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **options)


def check_same_step(step, env):
    """ValueError on every rank unless all found the same step (the same checkpoint) in out_dir."""
    steps = np.zeros(env.world)
    steps[env.rank] = step
    steps = env.sum(steps)  # after this no process reads out_dir, so rank 0 may rename files in it
    if (steps != step).any():
        raise ValueError(f'rank {env.rank} starts from step {step:,}, but the mean of all {env.world} '
                         f'processes is {steps.mean():,g}; out_dir must be a folder that they all share')


class StopRequest:
    """Records a signal or the end of max_minutes; the loop then saves and stops. A second SIGINT kills."""

    def __init__(self, max_minutes):
        self.signal = None
        self.deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        signal.signal(signal.SIGTERM, self.receive)
        signal.signal(signal.SIGINT, self.receive)
        # nohup ignores SIGHUP, and it stays ignored; Windows does not have it
        if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number, frame):
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.environ.get('RANK', '0') == '0':
                with contextlib.suppress(OSError):  # not print: the signal may have come inside print()
                    os.write(2, b'\nstopping after the next save; Ctrl-C again exits without saving\n')

    def __call__(self):
        """Whether to stop, because of a signal or the time limit."""
        return self.by_signal() or time.monotonic() >= self.deadline

    def by_signal(self):
        return self.signal is not None

    def exit_code(self):
        """0 after max_minutes, else 128 + the signal's number, as in shells: 143, 130, 129."""
        return 128 + self.signal if self.signal else 0


class DelayedFlag:
    """Reads a flag computed on the device. On CUDA it returns the previous call's flag, so no call waits."""

    def __init__(self):
        self.before = None  # (pinned copy, event) of the step before

    def __call__(self, flag):
        if flag.device.type != 'cuda':
            return bool(flag)
        copy = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True).copy_(flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        before, self.before = self.before, (copy, event)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])
