"""Distributed processes: their environment, start and stop."""

import contextlib
import errno
import gc
import importlib
import math
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from hotloop.system.files import first_line

GRACE = 2.0  # seconds in which all processes notice that one was lost
PATIENCE = timedelta(days=1)


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
    store: dist.Store | None = None  # shared by the processes
    timeout_minutes: float = 10.0  # how long a process waits for the others
    mesh: object = None  # the DeviceMesh of a sharded model

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

    def any(self, flag):
        """Whether a flag is true on any process; all of them must call it."""
        return bool(self.sum(np.array([float(flag)]))[0] > 0)

    def of_rank_0(self, numbers):
        """The numbers that rank 0 has, a float64 array; all processes must call it, with as many."""
        numbers = np.asarray(numbers, np.float64)
        return self.sum(numbers if self.rank == 0 else np.zeros_like(numbers))

    def barrier(self):
        """Waits until all processes have called it."""
        self.sum(np.zeros(1))

    @contextlib.contextmanager
    def patience(self):
        """In this block processes wait up to a day for rank 0, which downloads, reads or saves alone."""
        # torch 2.14 renamed _set_pg_timeout
        set_timeout = getattr(dist, 'set_timeout', None) or dist.distributed_c10d._set_pg_timeout
        if self.world > 1:
            set_timeout(PATIENCE)
        try:
            yield
        finally:
            if self.world > 1:
                set_timeout(timedelta(minutes=self.timeout_minutes))

    def leave(self, failed=False):
        """Leaves the process group. After an error NCCL would wait for processes that are gone, and stays."""
        if self.world > 1 and dist.is_initialized() and not (failed and dist.get_backend() == 'nccl'):
            gc.collect()  # DDP, which references the group: its threads must end before Python exits
            if self.mesh:  # DTensor's caches keep the mesh, and it keeps the group
                getattr(self.mesh, '_pg_registry', {}).clear()
            dist.destroy_process_group()
            # torchrun then signals the others; Python would die from that signal during shutdown
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def explain_loss(self, error, run):
        """
        Takes the error that ends this process, and the run or None. If the reason is the loss of another
        process, the lowest rank left raises a ValueError that names it, and the others exit with status 1.
        """
        if self.world == 1:
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending, as in leave()
        by_gloo = isinstance(error, RuntimeError) and 'gloo' in str(error)  # in a path of its source
        is_loss = by_gloo or isinstance(error, dist.DistError)
        if is_loss and dist.get_backend() == 'gloo':
            # the connections close, or a process that waits for this one, not for the lost one, never notices
            traceback.clear_frames(error.__traceback__)
            if run:
                run.forward = run.evaluated = run.model = run.optimizers = None  # DDP and FSDP hold the group
            gc.unfreeze()
            self.leave()
        ends = self.share_end('loss' if is_loss else 'error')
        if not is_loss:
            return
        if ends and ends.index('loss') != self.rank:
            sys.exit(1)
        message = lost_message(ends, error)
        if run and run.log and run.state.iter_num:  # else nothing of it is saved
            go_on = f'resume with: {run.out.resume_command()}'
            if self.rank == 0:
                go_on = run.out.how_to_go_on()
            message += f'; this was after step {run.state.iter_num}; {go_on}'
        raise ValueError(message) from None

    def share_end(self, end):
        """Shares how this process ends. After a loss it returns how each rank did; [] if that is unknown."""
        ends = []
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and it hosted the store
            self.store.set(f'end/{self.rank}', end)
            if end == 'loss':
                time.sleep(1.5 * GRACE if self.rank == 0 else GRACE)  # the host of the store leaves last
                for rank in range(self.world):
                    is_set = self.store.check([f'end/{rank}'])
                    ends.append(self.store.get(f'end/{rank}').decode() if is_set else None)
        return ends


def print_safely(text):
    """Prints. A closed terminal or a broken pipe must not end a training run."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # on a full disk the next line may fit
            sys.stdout = None


def open_process_group(backend, device, rank, world, timeout_minutes):
    """
    Joins the process group described by torchrun's environment variables; returns the store of its processes.
    backend: auto, nccl or gloo. ValueError without the variables.
    """
    for name in ('MASTER_ADDR', 'MASTER_PORT'):
        if name not in os.environ:
            raise ValueError(f'WORLD_SIZE={world} is set, but {name} is not; start with torchrun, or unset '
                             'WORLD_SIZE')
    timeout = timedelta(minutes=timeout_minutes)
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    # torchrun hosts the store and keeps it over all restarts. Without a prefix for each restart, the keys of
    # dead processes are read again: 9 of 14 restarts failed (pytorch#135712)
    hosts = rank == 0 and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
    store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), world, hosts, timeout)
    store = dist.PrefixStore(f'try{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', store)
    # Optimizers import this module at their first step, and its default arguments reference the group that
    # exists then: gloo's threads outlived destroy_process_group and aborted 4 of 128 finished runs
    importlib.import_module('torch.distributed.nn.functional')
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world,
                            device_id=device if backend == 'nccl' else None)
    return store


def lost_message(ends, error):
    """The first process that was lost, by how each rank ended: 'loss', 'error' or None. No ends: unknown."""
    # gloo adds its source file and a guess
    why = re.sub(r'^\[[^]]*gloo[^]]*\] |\. This is typically.*', '', first_line(error))
    if None in ends:
        return f'rank {ends.index(None)} of {len(ends)} processes was lost ({why})'
    if 'error' in ends:
        return f'rank {ends.index("error")} of {len(ends)} processes ended with an error of its own'
    return f'another process was lost ({why})'


def check_same_step(step, env):
    """ValueError on every rank unless all found the same step (the same checkpoint) in out_dir."""
    steps = np.zeros(env.world)
    steps[env.rank] = step
    steps = env.sum(steps)  # after this no process reads out_dir, so rank 0 may rename files in it
    if (steps != step).any():
        raise ValueError(f'the processes start from different steps, {steps.min():,.0f} to '
                         f'{steps.max():,.0f}; out_dir must be a folder that they all share')


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
                    os.write(2, b'\nstopping after this batch and a save; Ctrl-C again exits at once\n')

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
