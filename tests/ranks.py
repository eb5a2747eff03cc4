"""
Several processes for tests: forks that join a gloo group and call a function.

Forks need no import of torch, but autograd refuses to run in forks of a process in which it has run. So they
are made when this is imported, which is when pytest collects.
"""

import importlib
import os
import pickle
import socket
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

forks = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')


def rank(number, world, port, module, name, args, settings):
    """What a function returns, pickled, in a process with torchrun's environment variables."""
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world),
                      LOCAL_WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    warnings.simplefilter('ignore')  # torch announces a new name of broadcast_buffers
    if not hasattr(sys.modules.get(module), name):
        sys.modules.pop(module, None)  # it was being imported when this process was forked
    return pickle.dumps(getattr(importlib.import_module(module), name)(*args, **settings))


def on_ranks(world, function, *args, **settings):
    """What a function returns in each of `world` processes. It joins and leaves their group."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    name = function.__module__, function.__name__
    jobs = [RANKS.submit(rank, number, world, port, *name, args, settings) for number in range(world)]
    return [pickle.loads(job.result(timeout=300)) for job in jobs]


if hasattr(os, 'fork'):
    RANKS = ProcessPoolExecutor(8, get_context('fork'))
    RANKS.submit(int).result()
