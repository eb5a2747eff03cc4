"""A run with a time budget ends on time with a decayed rate; its config.py repeats it without a clock."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, at_step, load, rows, same

import train
from hotloop.system import host
from hotloop.system.device import choose_compile
from hotloop.system.distributed import Env
from hotloop.training.checkpoint import RunState
from hotloop.training.schedule import EXIT, Deadline, Schedule
from model import GPT

STARTUP = 2.0  # seconds of a process before its first step
FEW = dict(gradient_accumulation_steps=1, eval_interval=1000, eval_tokens=256, max_iters=1000)


class Clock:
    """A clock that only the work moves: seconds of a step, and of a batch of an evaluation."""

    def __init__(self, m, step=1.0, batch=0.1):
        self.now, self.step, self.batch = STARTUP, step, batch
        m.setattr(host, 'process_seconds', self.read)
        train_step, forward = train.train_step, GPT.forward

        def timed_step(*args):
            self.now += self.step
            return train_step(*args)

        def timed_forward(model, *args, **kwargs):
            if not model.training:
                self.now += self.batch
            return forward(model, *args, **kwargs)
        m.setattr(train, 'train_step', timed_step)
        m.setattr(GPT, 'forward', timed_forward)

    def read(self):
        """Stand still in the thread that saves, or a save would last as long as the steps beside it."""
        return self.now if threading.current_thread() is threading.main_thread() else 0.0


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_budget_that_ends_within_the_warmup_is_noted(train_tiny, clock, capsys):
    train_tiny(**FEW, time_budget=1, warmup_iters=500)
    assert 'before the end of its warmup of 500 steps' in capsys.readouterr().out


@pytest.mark.parametrize('minutes, fraction', [(1, 0.5), pytest.param(3, 0.2, marks=pytest.mark.slow)])
def test_a_run_ends_on_time_with_a_decayed_rate(train_tiny, tmp_path, clock, minutes, fraction):
    """Its config.py repeats it without a clock."""
    settings = dict(time_budget=minutes, decay_fraction=fraction, min_lr=0.0, dropout=0.1)
    assert train_tiny(**FEW, **settings) == 0
    assert 0.95 * 60 * minutes < clock.now < 1.02 * 60 * minutes
    state = load(tmp_path / 'out' / 'ckpt.pt')['state']
    decayed = (state['max_iters'] - state['decay_start']) / state['max_iters']
    assert state['iter_num'] == state['max_iters'] and decayed == pytest.approx(fraction, abs=0.03)
    rates = [row['lr'] for row in rows(tmp_path / 'out', 'lr')]
    assert rates[state['decay_start']] == 5e-3 and rates[-1] < 5e-3 / (state['max_iters'] * fraction - 2)
    train.main([str(tmp_path / 'out' / 'config.py'), f'--out_dir={tmp_path / "again"}'])
    first, again = (load(tmp_path / out / 'ckpt.pt') for out in ('out', 'again'))
    assert again['config']['time_budget'] is None and same(first['model'], again['model'])


def test_evaluations_are_part_of_the_budget_and_max_iters_can_end_it_earlier(train_tiny, tmp_path, clock):
    train_tiny(**{**FEW, 'eval_interval': 10}, time_budget=2)
    assert 0.93 * 120 < clock.now < 1.03 * 120 and len(rows(tmp_path / 'out', 'val_loss')) > 8
    clock.now = STARTUP
    train_tiny('short', **{**FEW, 'max_iters': 20}, time_budget=3)
    state = load(tmp_path / 'short' / 'ckpt.pt')['state']
    assert (state['iter_num'], state['decay_start']) == (20, 10)


def test_a_step_that_ends_the_budget_at_once_is_logged(train_tiny, tmp_path, clock):
    clock.step = 40
    train_tiny(**FEW, time_budget=1, log_interval=100)
    assert [row['step'] for row in rows(tmp_path / 'out', 'loss')] == [1, 2]


def test_an_evaluation_that_is_too_long_is_named(train_tiny, clock, capsys):
    clock.batch = 3.0
    train_tiny(**FEW, time_budget=2)
    note = capsys.readouterr().out
    seconds, tokens = re.search(r'an evaluation takes (\d+)s .* --eval_tokens=(\d+) takes', note).groups()
    assert int(tokens) == pytest.approx(256 * 12 / int(seconds), rel=0.05)


# before and after the decay has begun
@pytest.mark.parametrize('kill', [pytest.param(5, marks=pytest.mark.slow), 70])
def test_a_run_that_is_stopped_uses_its_budget_once(train_tiny, tmp_path, monkeypatch, clock, kill):
    at_step(monkeypatch, kill, lambda: os.kill(os.getpid(), signal.SIGTERM))
    settings = dict(**FEW, time_budget=2)
    assert train_tiny(**settings) == 143
    used = clock.now
    clock.now = STARTUP
    assert train_tiny(init_from='resume', **settings) == 0
    assert 0.95 * 120 < used + clock.now < 1.03 * 120
    assert rows(tmp_path / 'out', 'lr')[-1]['lr'] < 7e-4


def test_the_pace_is_that_of_the_later_half_of_the_steps(clock):
    """The first steps compile, and an evaluation is not a step: 20 steps, then of a second each."""
    deadline = Deadline(10, RunState(), Env())
    schedule = Schedule('linear', max_iters=10**6, warmup_iters=0, decay_fraction=1.0, is_open=True)
    for step in range(1, 21):
        clock.now += 10.0 if step <= 5 else 1.0
        if step == 15:
            clock.now += 100.0
            deadline.excluded += 100.0
        last = deadline.last_step(step, schedule, save=0.1, eval_interval=1000)
    assert last == 20 + int(600 - clock.now - 2 * 0.1 - EXIT)


@pytest.mark.parametrize('fraction, max_iters', [(1.0, 10**6), (0.9, 90)])
def test_nothing_is_decided_before_the_pace_is_known(clock, fraction, max_iters):
    deadline = Deadline(10, RunState(), Env())
    schedule = Schedule('linear', max_iters, warmup_iters=0, decay_fraction=fraction, is_open=True)
    found = []
    while not found or not found[-1]:
        clock.now += 20.0
        found.append(deadline.last_step(len(found) + 1, schedule, save=0.1, eval_interval=1000))
    assert 11 <= len(found) < found[-1] < 600 / 20


def test_two_steps_give_a_pace(clock):
    deadline = Deadline(1, RunState(), Env())
    schedule = Schedule('linear', max_iters=10**6, warmup_iters=0, decay_fraction=0.5, is_open=True)
    found = []
    for step in (1, 2):
        clock.now += 24.0
        found.append(deadline.last_step(step, schedule, save=0.1, eval_interval=1000))
    assert found == [0, 3]  # a third ends soonest after the budget


def test_a_step_that_ends_after_the_budget_is_the_last(clock):
    """Though a tenth of the steps should decay."""
    deadline = Deadline(1, RunState(), Env())
    schedule = Schedule('linear', max_iters=10**6, warmup_iters=0, decay_fraction=0.1, is_open=True)
    clock.now += 100.0
    assert deadline.last_step(1, schedule, save=0.1, eval_interval=1000) == 1


def test_a_short_budget_is_not_compiled(monkeypatch):
    monkeypatch.setattr('hotloop.system.device.try_compile', lambda device: None)
    cpu = train.torch.device('cpu')
    assert [choose_compile('auto', cpu, minutes)[0] for minutes in (None, 2.9, 3.0)] == [True, False, True]
    assert choose_compile(True, cpu, 0.1)[0]


@pytest.mark.slow
def test_the_clock_starts_before_torch_is_imported():
    code = ('import sys, builtins\nimport hotloop.system.host as host\n'
            'assert "torch" not in sys.modules\nimport train\nprint(host.process_seconds())')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True,
                          capture_output=True, text=True)
    assert float(done.stdout) > 0.3
