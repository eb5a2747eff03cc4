"""
What happens to a run: faults, by name. Under torchrun this file is train.py with a fault:

    torchrun --nproc_per_node=2 tests/faults.py kill 20 --dataset=...    # the last rank dies in its 20th step
    python tests/faults.py torchrun --nproc_per_node=2 tests/faults.py kill 20 ...    # the same, in forks

The second is torchrun itself, with two of its options by which its processes do not import torch again.
"""

import functools
import importlib
import itertools
import math
import os
import pkgutil
import signal
import sys
import time
import traceback
from datetime import timedelta

import torch
from conftest import load, rows, same

import hotloop.system.distributed
import train
from configurator import call_main

STEP = 'train.train_step'
SAVE = 'hotloop.training.checkpoint.Checkpoints.write'  # runs in a thread


# -----------------------------------------------------------------------------
# what a run leaves

def final(out):
    """Return everything that a run has learned, from its last checkpoint."""
    checkpoint = load(out / 'ckpt.pt')
    learned = {k: checkpoint.get(k) for k in ('model', 'optimizer', 'muon', 'scaler', 'iter_num', 'state')}
    for name in ('optimizer', 'muon'):  # learning rates are set before each step
        learned[name] = learned[name] and learned[name]['state']
    return learned


def log(out, *names):
    """Read log.jsonl without times; with names only these, of the lines that have the last one."""
    names = names or ('loss', 'lr', 'grad_norm', 'tokens_seen', 'skipped', 'val_loss', 'train_loss', 'step')
    return [{name: line[name] for name in names if name in line} for line in rows(out, names[-1])]


def leftovers(out):
    return len(list(out.glob('*.tmp')))


def assert_equal_runs(a, b):
    assert same(final(a), final(b)) and log(a) == log(b) and leftovers(a) == 0


# -----------------------------------------------------------------------------
# faults, in the process of the run

def before_call(name, times, action):
    """Call action(*args) before the times-th call of a function, by its full name; None: before each."""
    owner, _, attribute = name.rpartition('.')
    owner = pkgutil.resolve_name(owner)
    original, count = getattr(owner, attribute), itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(count) == times or times is None:
            action(*args)
        return original(*args, **kwargs)
    setattr(owner, attribute, wrapped)


def signals(*numbers):
    def send(*args):
        for number in numbers:
            os.kill(os.getpid(), number)
    return send


def hang(*args):
    while True:
        time.sleep(1000)


def nan_loss(model, *args):
    def hook(module, args, output):
        handle.remove()
        return output * math.nan
    handle = model.register_forward_hook(hook)


IN_STEP = {'kill': signals(signal.SIGKILL), 'stop': signals(signal.SIGSTOP),
           'terminate': signals(signal.SIGTERM), 'hang': hang, 'nan': nan_loss}


def small_files(size, *numbers):
    """Let no file grow above this size from the first of these saves to the second, and so on."""
    import resource

    def limit(limits, *args):
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # Python ignores its signal
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for number, soft in zip(numbers, itertools.cycle([size, hard])):
        before_call(SAVE, number, functools.partial(limit, (soft, hard)))


def happen(name=None, *args):
    """Prepare a fault in this process: one of a step, small files, or signals in a call of a function."""
    if name in IN_STEP:
        before_call(STEP, args[0], IN_STEP[name])
    elif name == 'small files':
        small_files(*args)
    elif name == 'signal in':
        function, times, *numbers = args
        before_call(function, times, signals(*numbers))


# -----------------------------------------------------------------------------
# torchrun

def import_all():
    """Import what a run imports when it needs it, so that forks have it."""
    torch.set_num_threads(1)
    for name in ('torch._dynamo', 'torch.distributed.nn.functional'):
        importlib.import_module(name)
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    torch.optim.AdamW([p], fused=True).step()  # imports what it needs


def environment():
    here = os.path.dirname(os.path.abspath(__file__))
    return {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore',
            'PYTHONPATH': f'{os.path.dirname(here)}:{here}'}


def main():
    if sys.argv[1] == 'torchrun':
        import_all()
        from torch.distributed.run import main as torchrun
        return torchrun(['--run-path', '--start-method=fork', *sys.argv[2:]])
    name, step, *argv = sys.argv[1:]
    if name in ('hang', 'stop'):
        hotloop.system.distributed.TIMEOUT = timedelta(seconds=5)
    last_rank = int(os.environ.get('RANK', '0')) == int(os.environ.get('WORLD_SIZE', '1')) - 1
    if last_rank and os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') == '0':
        happen(name, int(step))
    try:
        return call_main(functools.partial(train.main, argv))
    except Exception:  # as Python prints it; in a fork torchrun would keep it for its summary
        traceback.print_exc()
        sys.exit(1)


if __name__ == '__main__':
    main()
