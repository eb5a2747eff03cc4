"""Processes start together, sum, and stop together; what ends one of them is a sentence or a signal."""

import contextlib
import errno
import inspect
import io
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import error_of

from hotloop.system import distributed
from hotloop.system.distributed import Env, StopRequest, check_same_step, open_process_group, print_safely


@pytest.mark.parametrize('number, lines', [(errno.EPIPE, 1), (errno.EIO, 1), (errno.ENOSPC, 2)])
def test_output_that_nobody_reads_ends_no_run(monkeypatch, number, lines):
    """A full disk may have room for the next line; for a closed pipe or terminal there is none."""
    def fail():
        raise OSError(number, os.strerror(number))
    stdout = io.StringIO()
    monkeypatch.setattr(sys, 'stdout', stdout)
    stdout.flush = fail
    print_safely('one')
    del stdout.flush
    print_safely('two')
    assert len(stdout.getvalue().splitlines()) == lines


def test_a_broken_pipe_leaves_the_exit_code_alone():
    """Python flushes stdout once more at its end, and would make the code 120."""
    code = f"""import errno, sys
{inspect.getsource(print_safely)}
for _ in range(3):
    print_safely('text')
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
        Env(rank, 2).print_once(Env(rank, 2).sum(mine)[0] + rank)
    assert capsys.readouterr().out == '6.0\n' and mine.tolist() == [3.0, 0.25]


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


@pytest.mark.parametrize('asked, device, backend', [('auto', 'cuda', 'nccl'), ('gloo', 'cuda', 'gloo')])
def test_the_backend_and_the_timeout_are_those_of_the_settings(monkeypatch, asked, device, backend):
    """And the module whose default arguments would hold on to a group is imported before there is one."""
    calls, waits = [], []

    def init_process_group(backend, timeout, device_id, **group):
        imported = 'torch.distributed.nn.functional' in sys.modules
        calls.append((backend, timeout.total_seconds(), device_id, group['world_size'], imported))
    monkeypatch.setattr(dist, 'init_process_group', init_process_group)
    monkeypatch.setattr(dist, 'TCPStore', lambda host, port, world, hosts, timeout: waits.append(timeout)
                        or dist.HashStore())
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    monkeypatch.setenv('MASTER_PORT', '1')
    for name in [name for name in sys.modules if name.startswith('torch.distributed.nn')]:
        monkeypatch.delitem(sys.modules, name)
    open_process_group(asked, torch.device(device, 3), 0, 2, 1.5)
    assert calls == [(backend, 90.0, torch.device('cuda', 3) if backend == 'nccl' else None, 2, True)]
    assert waits == [timedelta(seconds=90)]
    monkeypatch.delenv('MASTER_PORT')
    error = error_of(open_process_group, asked, torch.device(device, 3), 0, 2, 1.5)
    assert error == 'WORLD_SIZE=2 is set, but MASTER_PORT is not; start with torchrun, or unset WORLD_SIZE'


@pytest.mark.parametrize('name', ['set_timeout', 'distributed_c10d._set_pg_timeout'])
def test_processes_wait_longer_for_rank_0_where_it_works_alone(monkeypatch, name):
    """torch has one of these functions, by its version."""
    waits = []
    monkeypatch.delattr(dist, 'set_timeout', raising=False)
    monkeypatch.setattr(f'torch.distributed.{name}', waits.append, raising=False)
    with Env(timeout_minutes=2.0).patience():
        assert waits == []
    with Env(1, 2, timeout_minutes=2.0).patience():
        assert waits == [timedelta(days=1)]
    assert waits == [timedelta(days=1), timedelta(minutes=2)]
    with contextlib.suppress(KeyError), Env(1, 2, timeout_minutes=3.0).patience():
        raise KeyError('an error ends it too')
    assert waits[3:] == [timedelta(minutes=3)]


GLOO = '[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9. This is typically caused'


def ended(rank, ends, error, run=None):
    """(exit code, message) of a rank that ends with this error, after others ended as in {rank: how}."""
    store = dist.HashStore()
    for other, end in ends.items():
        store.set(f'end/{other}', end)
    try:
        Env(rank, 4, store=store).explain_loss(error, run)
    except ValueError as e:
        return 1, str(e)
    except SystemExit as e:
        return e.code, ''
    return store.get(f'end/{rank}').decode(), ''


def run_at_step(step):
    out = SimpleNamespace(how_to_go_on=lambda: 'step 5 is saved',
                          resume_command=lambda: 'torchrun train.py')
    return SimpleNamespace(forward=None, log=True, state=SimpleNamespace(iter_num=step), out=out)


@pytest.mark.parametrize('rank, ends, result', [
    (0, {1: 'loss', 3: 'loss'}, (1, 'rank 2 of 4 processes was lost (Connection closed by peer [::1]:9); '
                                    'this was after step 7; step 5 is saved')),
    (1, {2: 'loss'}, (1, 'rank 0 of 4 processes was lost (Connection closed by peer [::1]:9); this was after '
                         'step 7; resume with: torchrun train.py')),
    (1, {0: 'error', 2: 'loss', 3: 'error'}, (1, 'rank 0 of 4 processes ended with an error of its own; this '
     'was after step 7; resume with: torchrun train.py')),
    (3, {0: 'loss'}, (1, ''))])  # rank 0 prints
def test_one_sentence_names_the_process_that_was_lost(monkeypatch, rank, ends, result):
    monkeypatch.setattr(distributed, 'GRACE', 0)
    monkeypatch.setattr(dist, 'get_backend', lambda: 'nccl')
    assert ended(rank, ends, RuntimeError(GLOO), run_at_step(7)) == result
    _, message = ended(rank, ends, RuntimeError(GLOO), run_at_step(0))
    assert message == result[1].split('; this was')[0]  # before step 1 nothing is there to resume


def test_an_error_of_its_own_stays_as_it_is_and_is_shared(monkeypatch):
    monkeypatch.setattr(time, 'sleep', lambda seconds: pytest.fail('it need not wait'))
    for error in (ValueError('the file data/gloo is damaged'), RuntimeError('shapes differ'), MemoryError()):
        assert ended(2, {}, error) == ('error', '')
    assert Env().explain_loss(RuntimeError(GLOO), None) is None  # a single process


def test_without_the_store_the_rank_is_not_known(monkeypatch):
    """Rank 0 hosts it where there is no torchrun. The first evaluation of a run has no log yet."""
    class Gone:
        def set(self, key, value):
            raise dist.DistNetworkError('Broken pipe')
    monkeypatch.setattr(dist, 'get_backend', lambda: 'nccl')
    with pytest.raises(ValueError, match=r'^another process was lost \(NCCL error\)$'):
        Env(1, 4, store=Gone()).explain_loss(dist.DistBackendError('NCCL error\nin detail'), None)


def test_the_first_signal_asks_and_a_second_interrupt_ends(capfd):
    """The first signal is the one whose code the process ends with."""
    stop = StopRequest(None)
    assert not stop() and stop.exit_code() == 0
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(signal.SIGINT) == stop.receive
        os.kill(os.getpid(), number)
        assert stop() and stop.by_signal()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL and stop.exit_code() == 143
    assert 'Ctrl-C again exits at once' in capfd.readouterr().err


@pytest.mark.skipif(not hasattr(signal, 'SIGHUP'), reason='needs SIGHUP')
def test_a_run_under_nohup_outlives_its_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(None)
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop()


def test_a_time_limit_is_a_stop_without_a_signal(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(distributed, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    stop = StopRequest(2)
    assert not stop()
    now[0] += 120
    assert stop() and not stop.by_signal() and stop.exit_code() == 0
