"""
Runs that something happens to: a server that forks them, and what happens.

The server imports torch once and forks a process for each run, so that a kill costs a third of a second and not four.
Forking is safe there because nothing has started a thread. Under torchrun this file is train.py with a fault:

    torchrun --nproc_per_node=2 tests/faults.py kill 20 --dataset=...    # the last rank dies in its 20th step
"""

import functools
import importlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback

import torch
from conftest import TINY

import train
from configurator import call_main
from hotloop.divergence import MAX_BAD_STEPS

HANGS = 300  # seconds after which a forked run that hangs is ended


# -----------------------------------------------------------------------------
# what happens, in the process of the run

def during_step(step, action):
    """Calls action(model of train_step), and computes with what it returns, in the step-th step of this process."""
    original, count = train.train_step, itertools.count(1)

    def wrapped(model, *args, **kwargs):
        return original(action(model) if next(count) == step else model, *args, **kwargs)
    train.train_step = wrapped


def signals(*numbers):
    def send(model):
        for number in numbers:
            os.kill(os.getpid(), number)
        return model
    return send


def bad_batch(model):
    raise IndexError('a bad batch')


def hang(model):
    while True:
        time.sleep(1000)


IN_STEP = {'kill': signals(signal.SIGKILL), 'terminate': signals(signal.SIGTERM), 'stop': signals(signal.SIGSTOP),
           'interrupt twice': signals(signal.SIGINT, signal.SIGINT), 'hang': hang, 'raise': bad_batch,
           'nan': lambda model: lambda x, y: model(x, y) * math.nan}


def naive_saves():
    """Checkpoints as most trainers write them: onto the file."""
    train.save_checkpoint = lambda path, checkpoint, keep_old=None: torch.save(checkpoint, path)


def small_files(first, last, size):
    """The disk takes no file above this size from one step to another; Python ignores the signal that comes with it."""
    import resource

    def limit(size, model):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return model
    during_step(first, functools.partial(limit, size))
    during_step(last, functools.partial(limit, resource.RLIM_INFINITY))


def terminated_in(name, times):
    """SIGTERM while train's function of this name is entered for the times-th time."""
    original, count = getattr(train, name), itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(count) == times:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)
    setattr(train, name, wrapped)


def dies_before(number):
    """kill -9 before the number-th time that a file of weights is opened, linked, renamed or removed."""
    count = itertools.count(1)

    def hook(event, args):
        if event in ('open', 'os.link', 'os.rename', 'os.remove') and '.pt' in str(args[0]) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)


def diverges(step):
    """From this step on so many losses are NaN that the run has diverged."""
    for n in range(MAX_BAD_STEPS):
        during_step(step + n, IN_STEP['nan'])


FAULTS = {'naive saves': naive_saves, 'diverges': diverges, 'small files': small_files, 'terminated in': terminated_in,
          'dies before': dies_before}


def happen(name, *args):
    if name in IN_STEP:
        during_step(args[0], IN_STEP[name])
    elif name:
        FAULTS[name](*args)


# -----------------------------------------------------------------------------
# the server

def announce_calls(name, pipe):
    """Writes a byte whenever train's function of this name is entered."""
    original = getattr(train, name)

    def wrapped(*args, **kwargs):
        os.write(pipe, b'.')
        return original(*args, **kwargs)
    setattr(train, name, wrapped)


def run_forked(job, pipe):
    """Never returns. os._exit, because the parent's buffers and handlers are not ours to run."""
    signal.alarm(HANGS)
    sys.stdout = sys.stderr = open(job['output'], 'w', buffering=1)  # noqa: SIM115
    code = 70
    try:
        if job['calls']:
            announce_calls(job['calls'], pipe)
        happen(*job['fault'])
        call_main(functools.partial(train.main, job['argv']))
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def watch(job, pid, pipe):
    """Sends the signal when the calls have been entered so many times and the delay is over; returns the exit code."""
    if job['calls'] and all(os.read(pipe, 1) for _ in range(job['times'])):
        time.sleep(job['delay'])
        os.kill(pid, job['signal'])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve():
    torch.set_num_threads(1)
    for name in ('torch._dynamo', 'torch.distributed.nn.functional'):
        importlib.import_module(name)
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    torch.optim.AdamW([p], fused=True).step()  # imports what it needs
    for line in sys.stdin:
        job = json.loads(line)
        listen, tell = os.pipe()
        if (pid := os.fork()) == 0:
            run_forked(job, tell)
        os.close(tell)
        print(watch(job, pid, listen), flush=True)
        os.close(listen)


class Server:
    """server(out, ...) runs train.main in a process of its own and returns its exit code; -9 when it was killed."""

    def __init__(self, folder, data_dir):
        self.folder, self.data_dir = folder, data_dir
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**environment(), 'PYTHONWARNINGS': 'ignore'})

    def __call__(self, out, *fault, calls=None, times=1, delay=0.0, number=signal.SIGKILL, **settings):
        """
        Trains TINY into the folder `out`. fault: a name of IN_STEP or FAULTS and its arguments. With calls, the name of
        a function of train, the process gets signal `number`, `delay` seconds after it entered that `times` times.
        """
        job = {'argv': flags(self.folder / out, self.data_dir, **settings), 'output': str(self.folder / f'{out}.txt'),
               'fault': fault or [None], 'calls': calls, 'times': times, 'delay': delay, 'signal': int(number)}
        self.process.stdin.write(json.dumps(job) + '\n')
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def said(self, out):
        """What the last run into `out` printed."""
        return (self.folder / f'{out}.txt').read_text()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def flags(out_dir, data_dir, **settings):
    return [f'--{k}={v}' for k, v in {**TINY, 'data_dir': data_dir, **settings, 'out_dir': out_dir}.items()]


def environment():
    here = os.path.dirname(os.path.abspath(__file__))
    return {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': f'{os.path.dirname(here)}:{here}'}


def main():
    if len(sys.argv) == 1:
        return serve()
    name, step, *argv = sys.argv[1:]
    last_rank = int(os.environ.get('RANK', '0')) == int(os.environ.get('WORLD_SIZE', '1')) - 1
    if last_rank and os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') == '0':
        happen(name, int(step))
    return call_main(functools.partial(train.main, argv))


if __name__ == '__main__':
    main()
