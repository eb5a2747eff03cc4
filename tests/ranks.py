"""
Several processes for tests: forks that join a gloo group and call a function.

Forks need no import of torch, but autograd refuses to run in forks of a process in which it has run. So they
are made when this is imported, which is when pytest collects.
"""

import os
import pickle
import socket
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

forks = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')


def rank(number, world, port, function, args, settings):
    """What function(*args, **settings) returns, pickled, in a process with torchrun's environment variables."""
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world),
                      LOCAL_WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    warnings.simplefilter('ignore')  # torch announces a new name of broadcast_buffers
    return pickle.dumps(function(*args, **settings))


def on_ranks(world, function, *args, **settings):
    """What a function returns in each of `world` processes. It joins and leaves their group."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    jobs = [RANKS.submit(rank, number, world, port, function, args, settings) for number in range(world)]
    return [pickle.loads(job.result(timeout=300)) for job in jobs]


if hasattr(os, 'fork'):
    RANKS = ProcessPoolExecutor(8, get_context('fork'))
    RANKS.submit(int).result()
