"""The processes of a run: their environment and their group."""

import gc
import importlib
import os
import signal
import sys
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(hours=1)  # how long a process waits for the others before it gives up


def print0(text):
    """Print on rank 0. A closed terminal or a broken pipe must not end a training run."""
    if os.environ.get('RANK', '0') != '0':
        return
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = None  # Python would flush it once more and exit with 120


@dataclass(frozen=True)
class Env:
    """Where and how this process computes, with the reasons for the choices."""
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device('cpu'))
    dtype: torch.dtype = torch.float32
    compile: bool = False
    reasons: dict = field(default_factory=dict)

    # All processes must call each of the following. The hosts exchange the numbers, so that they
    # do not wait for the work that is queued on a GPU.

    def sum(self, array):
        """Sum a float64 array or a float over all processes."""
        if self.world == 1:
            return array
        total = torch.tensor(array, dtype=torch.float64)  # a copy, which is reduced in place
        dist.all_reduce(total)
        return total.numpy()

    def any(self, flag):
        """Return whether a flag is true on any process."""
        return bool(self.sum(float(flag)) > 0)

    def broadcast(self, number):
        """Return the number that rank 0 has."""
        return float(self.sum(0.0 if self.rank else float(number)))

    def together(self, function, *args):
        """Return function(*args). If it raises ValueError in one process, the others end silently."""
        result = refused = None
        try:
            result = function(*args)
        except ValueError as e:
            refused = e
        if self.any(refused is not None):
            raise refused or SystemExit(1)
        return result


def open_process_group(backend, device):
    """
    Join the process group that torchrun's environment variables describe, once. Tensors on GPUs travel
    by NCCL, unless the backend is gloo, and those on hosts by gloo.
    """
    if dist.is_initialized():
        return
    if device.type == 'mps':
        raise ValueError('an Apple GPU trains in one process; use python, not torchrun, or --device=cpu')
    backends = 'gloo'
    if device.type == 'cuda' and backend != 'gloo':
        backends = 'cpu:gloo,cuda:nccl'
    elif backend == 'nccl':
        raise ValueError(f'backend=nccl needs GPUs, and the device is {device.type}; use --backend=gloo')
    # torchrun keeps the store over all restarts. Without a prefix for each, the keys of dead
    # processes are read again: 9 of 14 restarts failed (pytorch#135712)
    store, rank, world = next(dist.rendezvous('env://', timeout=TIMEOUT))
    restart = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    store = dist.PrefixStore(f'try{restart}', store)
    # Optimizers import this module at their first step, and its default arguments then hold the
    # group: gloo's threads outlived destroy_process_group and aborted 4 of 128 finished runs
    importlib.import_module('torch.distributed.nn.functional')
    dist.init_process_group(backends, timeout=TIMEOUT, store=store, rank=rank, world_size=world)


def close_process_group(failed):
    """Leave the process group. After an error NCCL would wait for processes that are gone."""
    if not dist.is_initialized() or (failed and 'nccl' in str(dist.get_backend_config())):
        return
    gc.collect()  # DDP holds the group, whose threads must end before Python exits
    dist.destroy_process_group()
    # torchrun then signals the others; Python would die from that signal during shutdown
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def check_same_step(step, env):
    """Raise ValueError unless this process found the same step in out_dir as rank 0."""
    first = env.broadcast(step)
    if first != step:
        raise ValueError(f'rank {env.rank} starts from step {step:,}, and rank 0 from step {first:,.0f}; '
                         'out_dir must be a folder that all processes share')
