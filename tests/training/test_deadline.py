"""A run with a time budget ends on time with a decayed rate; its config.py repeats it without a clock."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import at_step, error_of, load, rows, same, stop_at, tiny_flags
from ranks import forks, on_ranks

import train
from hotloop.system import host
from hotloop.system.device import choose_compile
from hotloop.system.distributed import Env
from hotloop.system.text import duration
from hotloop.training import saves
from hotloop.training.deadline import EXIT
from hotloop.training.schedule import NO_LIMIT
from model import GPT, GPTConfig

ROOT = Path(train.__file__).parent
STARTUP = 2.0  # seconds of a process before its first step
# an evaluation reads 4 + 1 batches: half a second of the clock below, if a process is alone
FEW = dict(gradient_accumulation_steps=1, eval_interval=1, eval_tokens=256, max_iters=1000)


class Clock:
    """A clock that only the work moves: seconds of a step, and of a batch of an evaluation."""

    def __init__(self, m, step=1.0, batch=0.1):
        self.now, self.step, self.batch, self.steps, self.looks = STARTUP, step, batch, 0, []
        m.setattr(host, 'process_seconds', self.read)
        train_step, forward = train.train_step, GPT.forward

        def timed_step(*args):
            self.steps += 1
            self.now += self.step
            return train_step(*args)

        def timed_forward(model, *args, **kwargs):
            if not model.training:
                self.now += self.batch
            return forward(model, *args, **kwargs)
        m.setattr(train, 'train_step', timed_step)
        m.setattr(GPT, 'forward', timed_forward)

    def read(self):
        """It stands still in the thread that saves, or a save would last as long as the steps beside it."""
        return self.now if threading.current_thread() is threading.main_thread() else 0.0


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def budget(train_tiny, clock):
    """budget(out, seconds, **settings) trains in a new process, as far as the clock can tell."""
    def run(out='out', seconds=40, **settings):
        clock.now = STARTUP
        if seconds:
            settings['time_budget'] = seconds / 60
        return train_tiny(out, **{**FEW, **settings})
    return run


def settings_of(out):
    return load(out / 'ckpt.pt')['config']


def numbers(out, name):
    """[(step, number)] of the lines of log.jsonl that have this name."""
    return [(row['step'], row[name]) for row in rows(out, name)]


def repeat(out, again, *flags):
    """Runs a run's config.py."""
    return train.main([str(out / 'config.py'), f'--out_dir={again}', *flags])


def schedule_in(text):
    """(first step of the decay, last step) by the line that announces them."""
    found = re.search(r'the rate decays from step (\d+) to (\d+), expected', text)
    return [int(found[1]), int(found[2])]


def test_a_run_ends_on_time_with_a_decayed_rate(budget, clock, tmp_path, capsys):
    """Constant after the warmup, then linear over half of the steps. The final evaluation is reserved."""
    assert budget() == 0
    config, lrs = settings_of(tmp_path / 'out'), [lr for _, lr in numbers(tmp_path / 'out', 'lr')]
    start, last = config['decay_start'], config['max_iters']
    assert 37.5 < clock.now <= 40 and last == len(lrs) == clock.steps
    assert start == pytest.approx(last / 2, abs=1) and lrs[3:start + 1] == [5e-3] * (start - 2)
    ends = [5e-4 + (5e-3 - 5e-4) * (last - step) / (last - start) for step in range(start, last)]
    assert lrs[start:] == pytest.approx(ends)
    out = capsys.readouterr().out
    assert f'time budget: the rate decays from step {start} to {last}, expected at 39s of 40s' in out
    assert 'run: a time budget of 0.666667 min, at most 1,000 steps' in out and 'late:' not in out
    assert re.search('^step 12: loss .* 2[2-6]s left$', out, re.M) and f'step {last}: loss' in out


def test_the_speed_of_steps_leaves_out_the_trial_of_an_evaluation(budget, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(time, 'perf_counter', clock.read)
    budget()
    assert {round(ms) for _, ms in numbers(tmp_path / 'out', 'ms')} == {1000}


@pytest.mark.parametrize('settings', [
    dict(dropout=0.1, lr_schedule='cosine', max_epochs=30, gradient_accumulation_steps=2),
    dict(optimizer='muon', preset='modern', warmup_fraction=0.9, lr_decay_iters=7, max_iters=50),
    dict(init_from='base', lora_rank=2)])
def test_config_py_repeats_the_run_without_a_clock(budget, train_tiny, clock, tmp_path, settings):
    """The same weights, states, losses and evaluations. The second decays before its warmup is over."""
    if 'lora_rank' in settings:
        train_tiny('base', max_iters=1)
        settings = {**settings, 'init_from': tmp_path / 'base'}
    out, again = tmp_path / 'out', tmp_path / 'again'
    assert budget(**settings) == 0
    text = (out / 'config.py').read_text()
    for line in ('time_budget = None', 'compile = False', 'max_epochs = None', "lr_schedule = 'linear'"):
        assert line in text
    clock.step = 17.0
    assert repeat(out, again) == 0
    ours, theirs = load(again / 'ckpt.pt'), load(out / 'ckpt.pt')
    assert ours['config']['time_budget'] is None and ours['iter_num'] > 20
    for part in ('model', 'optimizer', 'muon', 'best_val_loss'):
        assert same(ours.get(part), theirs.get(part)), part
    for name in ('loss', 'lr', 'val_loss'):
        assert numbers(again, name) == numbers(out, name) and len(numbers(out, name)) > 2
    assert same(load(again / 'best.pt')['model'], load(out / 'best.pt')['model'])


@pytest.mark.parametrize('kills', [(3, 12), (9, 25), (23, 28)])
@pytest.mark.parametrize('how', ['SIGTERM', pytest.param('kill', marks=pytest.mark.slow)])
def test_a_run_that_is_killed_twice_uses_its_budget_once(budget, clock, tmp_path, monkeypatch, kills, how):
    """
    The command is repeated as it was, also the settings that a decision has replaced. What a kill lost is
    repeated, so it does not count; only a start after the decision cannot be made up for.
    """
    def end():
        if how == 'kill':
            raise RuntimeError('killed')
        os.kill(os.getpid(), signal.SIGTERM)
    settings = dict(init_from='auto', save_interval=1 if how == 'kill' else 1000, lr_schedule='cosine')
    decided, names = [], ('decay_start', 'max_iters', 'eval_interval', 'compile')
    for step in kills:
        with monkeypatch.context() as m:
            at_step(m, step - clock.steps, end)
            if how == 'SIGTERM':
                assert budget(**settings) == 143
            else:
                with pytest.raises(RuntimeError, match='killed'):
                    budget(**settings)
                clock.steps -= 1
        config = settings_of(tmp_path / 'out')
        if config['decay_start'] is not None:
            decided.append([config[name] for name in names])
    assert budget(**settings) == 0
    checkpoint, config = load(tmp_path / 'out' / 'ckpt.pt'), settings_of(tmp_path / 'out')
    used = checkpoint['state']['seconds_used'] - STARTUP * len(decided)
    assert len(decided) == sum(step > 20 for step in kills) and 37 < used <= 40
    assert all(values == [config[name] for name in names] for values in decided)
    assert len(numbers(tmp_path / 'out', 'lr')) == config['max_iters'] == checkpoint['iter_num']
    assert repeat(tmp_path / 'out', tmp_path / 'again', '--init_from=scratch') == 0
    assert same(load(tmp_path / 'again' / 'ckpt.pt')['model'], checkpoint['model'])


@pytest.mark.parametrize('step, seconds', [(6, 0.5), (6, 1.5), (3, 2.0)])
def test_a_change_of_speed_before_the_decay_is_noticed(budget, clock, monkeypatch, capsys, step, seconds):
    """It ends on time, and half of the steps decay, or somewhat fewer after a sudden slowdown."""
    at_step(monkeypatch, step, lambda: setattr(clock, 'step', seconds))
    assert budget() == 0 and 37 < clock.now <= 40.5
    start, last = schedule_in(capsys.readouterr().out)
    assert 0.5 <= start / last < 0.65


def test_a_slowdown_in_the_decay_costs_a_later_end_and_a_line_says_why(budget, clock, monkeypatch, capsys):
    at_step(monkeypatch, 25, lambda: setattr(clock, 'step', 2.0))
    at_step(monkeypatch, 30, lambda: setattr(clock, 'batch', 1.0))
    assert budget() == 0 and clock.now > 50
    late = re.search('late: the run took (.*) of 40s: (.*)', capsys.readouterr().out)
    assert late[1] == duration(clock.now + EXIT)
    assert re.fullmatch('a step took 1[0-9]{3}.[0-9] ms in the decay and 1000.0 ms before it, the final '
                        'evaluation took 5.0 s, not 0.5 s', late[2])


@pytest.mark.parametrize('batch, settings, steps', [
    (0.1, {}, [*range(5, 33, 5)]),  # 8 of half a second are a tenth of the budget
    (0.3, {}, [17]), (0.5, {}, []), (0.1, dict(eval_interval=13), [13, 26]),
    (0.001, dict(eval_interval=3), [*range(3, 36, 3)])])
def test_evaluations_take_a_tenth_of_the_budget_at_most(budget, clock, tmp_path, batch, settings, steps):
    """The final one may be dearer than that. The first one follows the first plan."""
    clock.batch = batch
    assert budget(**settings) == 0 and 37 < clock.now <= 40
    found = [step for step, _ in numbers(tmp_path / 'out', 'val_loss')]
    assert found == [*steps, settings_of(tmp_path / 'out')['max_iters']]


def test_an_evaluation_that_takes_most_of_a_budget_is_short(budget, clock, tmp_path, monkeypatch, capsys):
    """
    Of 125 windows of validation data, 17 batches and 4 of training data, so many that it takes a tenth. The
    command that resumes the run asks for all of them again.
    """
    clock.batch = 2.0
    assert budget(eval_tokens=None) == 0 and clock.now <= 44
    assert 0 < settings_of(tmp_path / 'out')['eval_tokens'] <= 300
    note = r'note: an evaluation would take \d+s of 40s; it reads \d+ tokens'
    assert re.search(note, capsys.readouterr().out)
    found = rows(tmp_path / 'out', 'val_loss')
    assert len(found) == 1 and found[0]['val_tokens'] == settings_of(tmp_path / 'out')['eval_tokens']
    for settings in (dict(eval_tokens=None), dict(eval_iters=200)):
        with monkeypatch.context() as m:
            stop_at(m, 20)
            assert budget(**settings) == 143
        assert settings_of(tmp_path / 'out')['decay_start'] < 20
        assert budget(init_from='resume', **settings) == 0
        config, found = settings_of(tmp_path / 'out'), rows(tmp_path / 'out', 'val_loss')
        assert config['eval_iters'] is None and found[-1]['val_tokens'] == config['eval_tokens'] <= 300


@pytest.mark.parametrize('most', [dict(max_iters=12), dict(max_epochs=0.2)])
def test_a_number_of_steps_is_the_most(budget, clock, tmp_path, most):
    """Half of them decay. 0.2 epochs of 249 windows are 13 steps."""
    assert budget(**most) == 0
    config = settings_of(tmp_path / 'out')
    last = most.get('max_iters', 13)
    assert (config['decay_start'], config['max_iters'], clock.steps) == (-(-last // 2), last, last)


def test_max_minutes_interrupts_and_the_resumed_run_uses_what_is_left(budget, clock, tmp_path):
    assert budget(max_minutes=0) == 0 and settings_of(tmp_path / 'out')['decay_start'] is None
    assert budget(init_from='resume') == 0
    assert 37 < load(tmp_path / 'out' / 'ckpt.pt')['state']['seconds_used'] <= 40
    assert clock.now < 38  # the first process used 3


def test_a_budget_that_starting_uses_up_is_two_more_steps_and_a_line(budget, clock, tmp_path, capsys):
    """They decay, and are evaluated and saved."""
    assert budget(seconds=1, max_iters=99) == 0
    config, lrs = settings_of(tmp_path / 'out'), [lr for _, lr in numbers(tmp_path / 'out', 'lr')]
    assert (config['decay_start'], config['max_iters']) == (1, 3) and lrs[2] < lrs[1]
    out = capsys.readouterr().out
    assert 'the warmup of 3 steps ends early' in out
    assert re.search('late: the run took 6s of 1s: 5 s were missing when the decay began$', out, re.M)
    assert len(numbers(tmp_path / 'out', 'val_loss')) == 1
    capsys.readouterr()
    assert budget(seconds=1, init_from='resume') == 0 and 'late' not in capsys.readouterr().out


def test_a_compiled_run_does_not_take_its_first_step_for_its_speed(budget, clock, monkeypatch, capsys):
    monkeypatch.setattr(torch, 'compile', lambda model, **options: model)
    at_step(monkeypatch, 1, lambda: setattr(clock, 'now', clock.now + 12))
    assert budget(compile=True, max_iters=99) == 0 and 37 < clock.now <= 40
    assert schedule_in(capsys.readouterr().out) == [11, 21]


def test_a_run_that_diverges_stops(budget, clock, monkeypatch):
    monkeypatch.setattr('hotloop.training.divergence.MAX_BAD_STEPS', 3)
    forward = GPT.forward

    def broken(model, *args, **kwargs):
        loss = forward(model, *args, **kwargs)
        return loss * math.nan if model.training and clock.steps > 5 else loss
    monkeypatch.setattr(GPT, 'forward', broken)
    assert 'were not finite for 3 steps in a row' in error_of(budget)


def train_on_rank(out, data_dir):
    """(exit code, steps, seconds) of one of several processes, of which all but rank 0 have broken clocks."""
    with pytest.MonkeyPatch.context() as m:
        clock = Clock(m)
        if os.environ['RANK'] != '0':
            clock.now, clock.step = 1e6, -3.0
        code = train.main(tiny_flags(out, data_dir, time_budget=40 / 60, timeout_minutes=1, **FEW))
        return code, clock.steps, clock.now


@forks
@pytest.mark.slow
def test_the_clock_of_rank_0_decides_for_all(tmp_path, data_dir):
    (code, steps, now), *others = on_ranks(2, train_on_rank, str(tmp_path / 'out'), data_dir)
    config = settings_of(tmp_path / 'out')
    assert code == 0 and 37 < now <= 40 and others[0][:2] == (0, steps)
    assert steps == config['max_iters'] and config['decay_start'] == pytest.approx(steps / 2, abs=1)


def test_the_clock_starts_before_torch_is_imported_and_never_jumps(monkeypatch):
    code = "import sys, hotloop.system.early as early; print(early.host.STARTED > 0, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == 'True False\n'
    monkeypatch.setattr(time, 'time', lambda: 0.0)
    before = host.process_seconds()
    assert host.process_seconds() >= before > 0


# -----------------------------------------------------------------------------
# settings

@pytest.mark.parametrize('settings, words', [
    (dict(seconds=0, time_budget=0),
     'time_budget=0 must be above 0 minutes; --time_budget=None sets no budget'),
    (dict(decay_start=5), '--decay_start: decay_start=5, but time_budget=0.666667 .*--decay_start=None'),
    (dict(seconds=0, decay_start=5), "decay_start=5 applies only with lr_schedule='linear'"),
    (dict(seconds=0, decay_start=20, lr_schedule='linear', max_iters=20),
     'decay_start=20 must be below max_iters=20')])
def test_settings_that_contradict_each_other(budget, tmp_path, settings, words):
    assert re.search(words, error_of(budget, **settings))
    assert not (tmp_path / 'out').exists()


def test_a_fraction_needs_to_know_of_what(data_dir):
    argv = ['--dataset=tiny', f'--data_dir={data_dir}', '--time_budget=3', '--warmup_fraction=0.1']
    assert re.search('warmup_fraction=0.1 .* leaves their number open; give --warmup_iters, or .*--max_iters',
                     error_of(train.read_settings, argv))
    cfg = train.read_settings([*argv, '--max_iters=80']).train
    assert cfg.max_iters == 80 and cfg.lr_schedule == 'linear'
    assert train.read_settings([*argv[:3]]).train.max_iters == NO_LIMIT


def test_a_constant_rate_decays_to_0_without_the_warmup_that_it_did_not_have(data_dir, tmp_path):
    """nanoGPT's card for fine-tuning leaves warmup_iters at 2,000 and min_lr above its learning_rate."""
    (tmp_path / 'card.py').write_text('learning_rate = 3e-5\ndecay_lr = False\n')
    argv = [f'{tmp_path}/card.py', '--dataset=tiny', f'--data_dir={data_dir}', '--time_budget=3']
    for flags, expected in (([], (0, 0.0)), (['--warmup_iters=9', '--min_lr=1e-6'], (9, 1e-6))):
        cfg = train.read_settings([*argv, *flags]).train
        assert (cfg.warmup_iters, cfg.min_lr) == expected and cfg.decay_lr


def test_a_budget_on_resume(budget, clock, tmp_path, monkeypatch, capsys):
    """Before the decay it is the total; after it, the schedule stands. A run without one does not get one."""
    with monkeypatch.context() as m:
        stop_at(m, 9)
        assert budget() == 143
    capsys.readouterr()
    with monkeypatch.context() as m:
        stop_at(m, 31)
        assert budget(init_from='resume', seconds=60) == 143
    out = capsys.readouterr().out
    assert 'time_budget: 0.6666666666666666 before, 1.0 now' in out and 'min, 0.2 already used' in out
    assert '1000000000' not in out  # the largest number of steps, which nobody has set
    start, last = (settings_of(tmp_path / 'out')[name] for name in ('decay_start', 'max_iters'))
    assert 20 < start < 31
    assert error_of(budget, init_from='resume', seconds=90) == (
        f'--time_budget: time_budget=1.5, but the decay of this run began at step {start}, and its schedule '
        f'ends at step {last}; to finish it, omit this; for a new run: --init_from={tmp_path}/out/ckpt.pt '
        '--out_dir=NEW --time_budget=1.5')
    assert budget(init_from='resume', seconds=None, max_iters=10**6, eval_interval=3) == 0
    out = capsys.readouterr().out
    for name in ('max_iters=1000000', 'eval_interval=3'):
        assert f'{name}: no effect, because the time budget has decided it' in out
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    assert checkpoint['iter_num'] == last and 60 < checkpoint['state']['seconds_used'] < 64
    budget('plain', seconds=None, max_iters=2)
    assert ('this run began without a time budget, and its schedule ends at step 2; to finish it, omit this; '
            'for a new run: ' in error_of(budget, 'plain', init_from='resume'))
    os.replace(tmp_path / 'out' / 'best.pt', tmp_path / 'out' / 'ckpt.pt')
    assert '(best.pt has none)' in error_of(budget, init_from='resume', seconds=None)


def test_a_resume_without_the_budget_or_with_a_fraction_needs_a_length(budget, monkeypatch):
    stop_at(monkeypatch, 9)
    assert budget(max_iters=NO_LIMIT) == 143
    resumed = dict(init_from='resume', max_iters=NO_LIMIT)
    assert 'leaves their number open' in error_of(budget, warmup_fraction=0.1, **resumed)
    resumed |= dict(seconds=None, time_budget=None)
    assert error_of(budget, **resumed) == (
        'without its time_budget the length of this run is open; give --max_iters too')
    assert budget(eval_only=True, **resumed) == 0


def test_eval_only_and_dry_run_have_no_deadline(budget, tmp_path, capsys):
    assert budget(eval_only=True) == 0
    assert 'time_budget=0.666667: no effect with eval_only=True' in capsys.readouterr().out
    assert budget(dry_run=True) == 0
    out = capsys.readouterr().out
    assert 'minutes (time_budget); the number of steps' in out
    assert not (tmp_path / 'out').exists()


def test_compilation_is_left_out_where_it_does_not_pay(budget, train_tiny, tmp_path, monkeypatch, capsys):
    """A run decides that once; config.py and a resume keep it."""
    cpu = torch.device('cpu')
    monkeypatch.setattr('hotloop.system.device.try_compile', lambda device: None)
    monkeypatch.setattr(torch, 'compile', lambda model, **options: model)
    assert choose_compile('auto', cpu, 3.0)[0] and choose_compile('auto', cpu)[0]
    assert choose_compile(True, cpu, 0.1) == (True, 'a test compilation worked')
    assert choose_compile('auto', cpu, 2.9) == (False, 'it pays with a time_budget of 3 minutes or more')
    assert budget(compile='auto', max_minutes=0) == 0
    assert 'compile: off (it pays with' in capsys.readouterr().out
    monkeypatch.setattr('hotloop.system.device.COMPILE_PAYS', {})
    assert budget(compile='auto', init_from='resume', max_iters=5) == 0
    assert 'compile: off (requested)' in capsys.readouterr().out
    assert 'compile = False' in (tmp_path / 'out' / 'config.py').read_text()


def test_evaluations_of_a_short_budget_are_not_compiled(monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda model, **options: 'compiled')
    model, env = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=9)), Env(compile=True)
    for minutes, evaluated in ((None, 'compiled'), (3.0, model), (60.0, 'compiled')):
        assert train.wrap(model, train.TrainConfig(time_budget=minutes), env) == (evaluated, 'compiled')


def test_a_config_that_cannot_be_rewritten_does_not_end_the_run(budget, monkeypatch, capsys):
    def fail(path):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(saves, 'replacing', fail)
    assert budget(max_iters=9) == 0
    assert re.search('config.py could not be written: No space left on device', capsys.readouterr().out)
