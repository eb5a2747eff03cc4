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

import torch._dynamo  # noqa: F401  DDP and FSDP import it: here once, not in each fork


def call(sender, number, world, port, module, name, args, settings):
    """Send (True, what a function returns) or (False, its exception), in the environment of torchrun."""
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world),
                      LOCAL_WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
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
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    name = function.__module__, function.__name__
    jobs = [RANKS.submit(rank, number, world, port, *name, args, settings) for number in range(world)]
    results = []
    for job in jobs:
        succeeded, result = pickle.loads(job.result(timeout=300))
        if not succeeded:
            raise result
        results.append(result)
    return results


RANKS = ProcessPoolExecutor(8, get_context('fork'))
RANKS.submit(int).result()
