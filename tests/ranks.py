"""
Processes for tests: forks that train, or that join a gloo group and call a function.

Forks need no import of torch, but autograd refuses to run in forks of a process in which it has run. So they
are made when this is imported, which is when pytest collects.
"""

import functools
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import faults
from conftest import free_port, tiny_flags

import train
from configurator import call_main

HANGS = 300  # seconds after which a process that hangs is killed


# -----------------------------------------------------------------------------
# a function on each of several processes

def join_group(number, world, port):
    """Set what torchrun sets."""
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world),
                      LOCAL_WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))


def call(sender, number, world, port, module, name, args, settings):
    """Send (True, what a function returns) or (False, its exception), in the environment of torchrun."""
    join_group(number, world, port)
    warnings.simplefilter('error', FutureWarning)
    if not hasattr(sys.modules.get(module), name):
        sys.modules.pop(module, None)  # it was being imported when this process was forked
    try:
        result = True, getattr(importlib.import_module(module), name)(*args, **settings)
    except BaseException as e:
        result = False, e
    sender.send_bytes(pickle.dumps(result))


def rank(*job):
    """Return what call() sends, in a process of its own: torch keeps the meshes of a run."""
    context = get_context('fork')
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=call, args=(sender, *job))
    process.start()
    sender.close()
    try:
        return receiver.recv_bytes()
    finally:
        process.join()


def on_ranks(world, function, *args, **settings):
    """Return what a function returns in each of `world` processes. It joins and leaves their group."""
    port = free_port()
    name = function.__module__, function.__name__
    jobs = [FORKS.submit(rank, number, world, port, *name, args, settings) for number in range(world)]
    results = []
    for job in jobs:
        succeeded, result = pickle.loads(job.result(timeout=HANGS))
        if not succeeded:
            raise result
        results.append(result)
    return results


# -----------------------------------------------------------------------------
# a run in a process of its own

class Runs:
    """runs(out, ...) runs train.main in processes of its own. Returns an exit code, -9 after a kill."""

    def __init__(self, folder, data_dir):
        self.folder = folder
        self.data_dir = data_dir

    def __call__(self, out, *fault, calls=None, times=1, delay=0.0, number=signal.SIGKILL, world=1,
                 **settings):
        """
        Train TINY into the folder `out`. fault: a name in faults.py and its arguments. With calls, a
        function's name, all processes get signal `number`, `delay` seconds after rank 0's `times`-th call.
        """
        argv = tiny_flags(self.folder / out, self.data_dir, **settings)
        job = FORKS.submit(run, argv, self.folder / f'{out}.txt', fault, calls, (times, delay, number), world)
        return job.result(timeout=HANGS)

    def printed(self, out):
        """Return the output of the last run into `out`."""
        return (self.folder / f'{out}.txt').read_text()


def run(argv, output, fault, calls, kill, world):
    """Fork processes that train, and send them a signal. Returns the exit code of rank 0."""
    listen, write = os.pipe()
    port = free_port()
    pids = []
    for r in range(world):
        pids.append(os.fork())
        if pids[-1] == 0:
            if world > 1:
                join_group(r, world, port)
            run_forked(argv, output if r == 0 else os.devnull, fault, calls, write)
    os.close(write)
    times, delay, number = kill
    if calls and all(os.read(listen, 1) for _ in range(times)):
        time.sleep(delay)
        for pid in pids:
            os.kill(pid, number)
    os.close(listen)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes[0]


def run_forked(argv, output, fault, calls, pipe):
    """Train and exit by os._exit(), because the parent's buffers and handlers are not ours to run."""
    signal.alarm(HANGS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    sys.stdout = sys.stderr = open(output, 'w', buffering=1)  # noqa: SIM115
    code = 70
    try:
        if calls:
            faults.before_call(calls, None, lambda *args: os.write(pipe, b'.'))
        faults.happen(*fault)
        call_main(functools.partial(train.main, argv))
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


faults.import_all()
FORKS = ProcessPoolExecutor(8, get_context('fork'))
FORKS.submit(int).result()
