"""Processes that start together and stop together."""

import contextlib
import importlib.util
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

from configurator import DISK_FULL, drop_output


def tell(text):
    """Prints what no run ends for: the terminal may be closed, a pipe broken, the disk under a file of output full."""
    try:
        print(text, flush=True)
    except OSError as e:
        if e.errno not in DISK_FULL:  # there it is delivered with the next line, or the one after
            drop_output()


@dataclass
class Env:
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device('cpu'))
    dtype: torch.dtype = torch.float32
    compile: bool = False
    threads: int = 1
    reasons: dict = field(default_factory=dict)

    def print_once(self, text):
        """Prints once for all processes."""
        if self.rank == 0:
            tell(text)

    def sum(self, values):
        """Sums a float64 array over all processes."""
        if self.world == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64, device=self.device)  # a copy: the reduction is in place
        dist.all_reduce(t)
        return t.cpu().numpy()


def end_with_parent():
    """Has Linux send SIGTERM when torchrun dies; after a -9 its processes would go on, and write into out_dir."""
    if sys.platform != 'linux':
        return
    import ctypes
    PR_SET_PDEATHSIG = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)


def open_process_group(backend, device, rank, world, timeout_minutes):
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    options = {}
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
        # the agent keeps one store over all restarts; without a prefix for each, 9 of 14 restarts went wrong
        # (pytorch#135712)
        store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), world, is_master=False)
        options = {'store': dist.PrefixStore(f'try{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', store),
                   'rank': rank, 'world_size': world}
    # the optimizers import this at their first step, and its default arguments take the group that is there then:
    # gloo's threads outlived destroy_process_group and aborted 4 of 128 finished runs. Before there is a group, none is
    importlib.import_module('torch.distributed.nn.functional')
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **options)


class StopRequest:
    """
    SIGTERM, SIGINT, SIGHUP, which comes when the terminal goes, or the end of max_minutes: asks for a save as soon as
    that can be. A second SIGINT ends at once.
    """

    def __init__(self, max_minutes):
        self.signal = None
        self.deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)
        if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number, frame):
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.environ.get('RANK', '0') == '0':
                with contextlib.suppress(OSError):  # not print, in the midst of which we may be
                    os.write(2, b'\nstopping when it is saved; Ctrl-C again ends at once, unsaved\n')

    def __call__(self):
        return self.by_signal() or time.monotonic() >= self.deadline

    def by_signal(self):
        return self.signal is not None

    def exit_code(self):
        """128 + the signal's number, as shells have it: 143, 130, 129; 0 after max_minutes."""
        return 128 + self.signal if self.signal else 0


def check_agreement(model, state, env):
    """
    ValueError unless all processes start from the same step and weights: where nodes share no disk, one of them may
    have found another checkpoint, or none. Also the point after which nobody reads out_dir, and rank 0 may move it.
    """
    weights = sum(p.detach().cpu().double().sum().item() for p in model.parameters())  # Apple GPUs have no float64
    if not math.isfinite(weights):
        raise ValueError('the weights to start from are not finite; start from an earlier checkpoint or anew')
    mine = np.array([state.iter_num, weights])
    mean = env.sum(mine) / env.world
    if not np.allclose(mine, mean, rtol=1e-9, atol=1e-9):
        raise ValueError(f'the processes do not start from the same weights: this one is at step {state.iter_num:,}, '
                         f'all {env.world} on average at {mean[0]:g}; out_dir must be a folder that all of them '
                         'share')
