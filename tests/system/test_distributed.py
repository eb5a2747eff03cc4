"""Processes start together, sum, and stop together; what ends one of them is a sentence or a signal."""

import contextlib
import errno
import inspect
import io
import os
import signal
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import error_of

from hotloop.system.distributed import Env, StopRequest, check_same_step, open_process_group, print0


@pytest.mark.parametrize('number, lines', [(errno.EPIPE, 1), (errno.EIO, 1), (errno.ENOSPC, 2)])
def test_output_that_nobody_reads_ends_no_run(monkeypatch, number, lines):
    """A full disk may have room for the next line; for a closed pipe or terminal there is none."""
    def fail():
        raise OSError(number, os.strerror(number))
    stdout = io.StringIO()
    monkeypatch.setattr(sys, 'stdout', stdout)
    stdout.flush = fail
    print0('one')
    del stdout.flush
    print0('two')
    assert len(stdout.getvalue().splitlines()) == lines


def test_a_broken_pipe_leaves_the_exit_code_alone():
    """Python flushes stdout once more at its end, and would make the code 120."""
    code = f"""import errno, os, sys
{inspect.getsource(print0)}
for _ in range(3):
    print0('text')
sys.exit(7)"""  # without an import of torch
    reader, writer = os.pipe()
    os.close(reader)
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, b'')


def test_a_sum_leaves_its_argument_alone_and_only_rank_0_prints(monkeypatch, capsys):
    """On CPUs torch.from_numpy shares memory, and all_reduce writes into what it is given."""
    monkeypatch.setattr(dist, 'all_reduce', lambda tensor: tensor.mul_(2))
    mine = np.array([3.0, 0.25])
    for rank in (0, 1):
        monkeypatch.setenv('RANK', str(rank))
        print0(Env(rank, 2).sum(mine)[0] + rank)
    assert capsys.readouterr().out == '6.0\n' and mine.tolist() == [3.0, 0.25]
    assert [Env(rank, 2).broadcast(5.0) for rank in (0, 1)] == [10.0, 0.0]


@pytest.mark.parametrize('steps, words', [
    ([5, 5, 5], ''), ([5, 5, 0], 'the processes start from different steps, 0 to 5; out_dir must be'),
    ([0, 5, 1000], 'different steps, 0 to 1,000; out_dir must be a folder that they all share')])
def test_processes_that_start_from_different_steps_all_stop(steps, words):
    """Each of them: one that went on would wait for the others."""
    class Rank(Env):
        def sum(self, array):
            parts.append(array)
            return np.array(steps, dtype=float)
    parts = []
    for rank, step in enumerate(steps):
        raises = pytest.raises(ValueError, match=words or None)
        with raises if words else contextlib.nullcontext():
            check_same_step(step, Rank(rank, 3))
    assert sum(parts).tolist() == steps


@pytest.mark.parametrize('asked, device, backends', [
    ('auto', 'cuda', 'cpu:gloo,cuda:nccl'), ('nccl', 'cuda', 'cpu:gloo,cuda:nccl'), ('gloo', 'cuda', 'gloo'),
    ('auto', 'cpu', 'gloo')])
def test_the_backend_and_the_timeout_are_those_of_the_settings(monkeypatch, asked, device, backends):
    """And the module whose default arguments would hold on to a group is imported before there is one."""
    calls, waits = [], []

    def init_process_group(backend, timeout, **group):
        imported = 'torch.distributed.nn.functional' in sys.modules
        calls.append((backend, timeout.total_seconds(), group['world_size'], imported))
    monkeypatch.setattr(dist, 'init_process_group', init_process_group)
    monkeypatch.setattr(dist, 'TCPStore', lambda host, port, world, hosts, timeout: waits.append(timeout)
                        or dist.HashStore())
    variables = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1', 'WORLD_SIZE': '2', 'RANK': '0'}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    open_process_group(asked, torch.device(device))
    assert calls == [(backends, 3600.0, 2, True)] and waits == [timedelta(hours=1)]
    monkeypatch.delenv('MASTER_PORT')
    error = error_of(open_process_group, asked, torch.device(device))
    assert 'WORLD_SIZE=2 is set, but MASTER_PORT is not' in error


def test_the_first_signal_asks_and_a_second_interrupt_ends(capfd):
    """The first signal is the one whose code the process ends with."""
    stop = StopRequest(Env())
    assert not stop.requested() and stop.exit_code() == 0
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(signal.SIGINT) == stop.receive
        os.kill(os.getpid(), number)
        assert stop.requested() and stop.by_signal()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL and stop.exit_code() == 143
    assert 'Ctrl-C again exits now' in capfd.readouterr().err


@pytest.mark.skipif(not hasattr(signal, 'SIGHUP'), reason='needs SIGHUP')
def test_a_run_under_nohup_outlives_its_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(Env())
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.requested()
