"""Processes start together, sum, and stop together; what ends one of them is a sentence or a signal."""

import contextlib
import errno
import inspect
import io
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import TINY

from hotloop import distributed
from hotloop.distributed import Env, StopRequest, check_same_step, open_process_group, print_safely

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(distributed.__file__)))


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
    ([5, 5, 5], ''), ([5, 5, 0], 'rank {} starts from step {}, but the mean of all 3 processes is 3.33333'),
    ([0, 5, 10], 'rank {} starts from step {}, .* is 5; out_dir must be a folder that they all share')])
def test_processes_that_start_from_different_steps_all_stop(steps, words):
    """Each of them, the one at the mean too: one that went on would wait for the others."""
    class Rank(Env):
        def sum(self, array):
            parts.append(array)
            return np.array(steps, dtype=float)
    parts = []
    for rank, step in enumerate(steps):
        raises = pytest.raises(ValueError, match=words.format(rank, step) or None)
        with raises if words else contextlib.nullcontext():
            check_same_step(step, Rank(rank, 3))
    assert sum(parts).tolist() == steps


@pytest.mark.parametrize('asked, device, backend', [('auto', 'cuda', 'nccl'), ('gloo', 'cuda', 'gloo')])
def test_the_backend_and_the_timeout_are_those_of_the_settings(monkeypatch, asked, device, backend):
    """And the module whose default arguments would hold on to a group is imported before there is one."""
    calls = []

    def init_process_group(backend, timeout):
        calls.append((backend, timeout.total_seconds(), 'torch.distributed.nn.functional' in sys.modules))
    monkeypatch.setattr(dist, 'init_process_group', init_process_group)
    monkeypatch.delenv('TORCHELASTIC_USE_AGENT_STORE', raising=False)
    for name in [name for name in sys.modules if name.startswith('torch.distributed.nn')]:
        monkeypatch.delitem(sys.modules, name)
    open_process_group(asked, torch.device(device), 0, 2, 1.5)
    assert calls == [(backend, 90.0, True)]


WORK = """
import os, sys
import torch
from hotloop.distributed import Env, open_process_group
from hotloop.optim import Muon
rank = int(sys.argv[1])
for restart in range(2):
    os.environ['TORCHELASTIC_RESTART_COUNT'] = str(restart)
    open_process_group('auto', torch.device('cpu'), rank, 2, 1)
    env = Env(rank, 2)
    matrices = [torch.nn.Parameter(torch.eye(4) * k) for k in (1, 2, 3)]
    for matrix in matrices:
        matrix.grad = matrix.detach().clone()
    Muon(matrices, {matrix: [4] for matrix in matrices}, 0.1, 0.9, 0.0, env).step()
    steps = [k - matrix[0, 0].item() for k, matrix in zip((1, 2, 3), matrices)]
    print(env.sum([rank + 1.0])[0], *(round(step, 4) for step in steps))
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_sum_share_muon_and_restart():
    """torchrun's store outlives its processes: a restart must not read the keys of those before it."""
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(store.port), 'OMP_NUM_THREADS': '1',
           'TORCHELASTIC_USE_AGENT_STORE': 'True'}
    processes = [subprocess.Popen([sys.executable, '-c', WORK, str(rank)], stdout=subprocess.PIPE, cwd=ROOT,
                                  env=env, text=True) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs[0] == outputs[1] and [process.returncode for process in processes] == [0, 0]
    for line in outputs[0].splitlines():
        total, *steps = map(float, line.split())
        assert total == 3 and all(0.06 < step < 0.13 for step in steps)  # lr x a singular value near 1
    assert len(outputs[0].splitlines()) == 2


@pytest.mark.slow
def test_runs_of_four_processes_end(tmp_path, data_dir):
    """Three of three, in two minutes each. One hung in gloo at exit: DDP still held the process group."""
    settings = {**TINY, 'data_dir': data_dir, 'batch_size': 2, 'gradient_accumulation_steps': 4}
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=4',
               'train.py', *(f'--{name}={value}' for name, value in settings.items())]
    for run in range(3):
        process = subprocess.Popen([*command, f'--out_dir={tmp_path}/{run}'], cwd=ROOT)
        try:
            assert process.wait(timeout=120) == 0
        finally:
            process.terminate()  # torchrun then ends its processes
            process.wait()


def test_the_first_signal_asks_and_a_second_interrupt_ends(capfd):
    """The first signal is the one whose code the process ends with."""
    stop = StopRequest(None)
    assert not stop() and stop.exit_code() == 0
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(signal.SIGINT) == stop.receive
        os.kill(os.getpid(), number)
        assert stop() and stop.by_signal()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL and stop.exit_code() == 143
    assert 'Ctrl-C again exits without saving' in capfd.readouterr().err


@pytest.mark.parametrize('before, code', [(signal.SIG_DFL, 129), (signal.SIG_IGN, 0)])
def test_a_run_stops_at_the_end_of_the_terminal_but_not_under_nohup(before, code):
    signal.signal(signal.SIGHUP, before)
    stop = StopRequest(None)
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.exit_code() == code


def test_a_time_limit_is_a_stop_without_a_signal(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(distributed, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    stop = StopRequest(2)
    assert not stop()
    now[0] += 120
    assert stop() and not stop.by_signal() and stop.exit_code() == 0
