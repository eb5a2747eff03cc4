"""Processes start together, sum, and stop together; what ends one of them is a sentence or a signal."""

import inspect
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch.distributed as dist

from hotloop.system.distributed import Env, check_same_step, print0
from hotloop.system.signals import StopRequest


def test_output_that_nobody_reads_leaves_the_exit_code_alone():
    """Python flushes stdout once more at its end, and would make the code 120."""
    code = f"""import os, sys
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


def test_processes_that_start_from_different_steps_stop(monkeypatch):
    monkeypatch.setattr(Env, 'broadcast', lambda self, step: 1000.0)
    check_same_step(1000, Env(0, 2))
    with pytest.raises(ValueError, match='rank 1 starts from step 0, and rank 0 from step 1,000; out_dir'):
        check_same_step(0, Env(1, 2))


def test_a_run_under_nohup_outlives_its_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(Env())
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.any_signal()
