"""Patience: a run stops after evaluations without improvement, on all processes, and can go on."""

import os
import signal

import pytest
from conftest import TINY, at_step, error_of, load, same, scripted_losses
from ranks import forks, on_ranks

import train

NAN = float('nan')
SETTINGS = dict(max_iters=12, eval_interval=2, patience=2)


@pytest.mark.parametrize('always', [True, False])
def test_a_run_out_of_patience_stops_saves_and_says_how_to_go_on(train_tiny, tmp_path, monkeypatch, capsys,
                                                                  always):
    scripted_losses(monkeypatch, 4.0, 4.5, 3.0, NAN, 3.0)  # after steps 2 to 10
    assert train_tiny(always_save_checkpoint=always, **SETTINGS) == 0
    *_, why, rate, on, done, _, to_sample = capsys.readouterr().out.splitlines()
    assert why == 'stopped: patience=2: no lower val loss than 3.0000 in 2 evaluations'
    assert done.startswith('done: best val loss 3.0000') and to_sample.startswith('to sample: python')
    assert rate == 'the learning rate, 1.6e-3, has not decayed to min_lr=5.0e-4'
    out = tmp_path / 'out'
    assert on == (f'step 10 is saved in {out}/ckpt.pt; resume with: python train.py --init_from=resume '
                  f'--out_dir={out} --device=cpu --patience=None')
    saved, best = load(out / 'ckpt.pt'), load(out / 'best.pt')
    assert (saved['iter_num'], saved['state']['evals_since_best'], best['iter_num']) == (10, 2, 6)


@pytest.mark.parametrize('schedule', [dict(lr_decay_iters=5), dict(decay_lr=False)])
def test_it_says_nothing_of_a_rate_that_has_decayed_or_never_does(train_tiny, monkeypatch, capsys, schedule):
    scripted_losses(monkeypatch, 4.0, 4.5, 4.2)
    train_tiny(**schedule, **SETTINGS)
    assert 'learning rate' not in capsys.readouterr().out.split('stopped: ')[1]


def test_the_same_command_does_not_go_on_and_without_patience_it_finishes_with_the_same_bits(
        train_tiny, tmp_path, monkeypatch, capsys):
    losses = 4.0, 4.5, 4.2, 3.0, 2.0, 2.0
    scripted_losses(monkeypatch, *losses)
    train_tiny('whole', **{**SETTINGS, 'patience': None})
    scripted_losses(monkeypatch, *losses)
    assert train_tiny(**SETTINGS) == 0
    stopped = capsys.readouterr().out.split('stopped: ')[1].split('done: ')[0]
    assert train_tiny(init_from='auto', **SETTINGS) == 0
    assert f'stopped: {stopped}' in capsys.readouterr().out and 'step 6 is saved' in stopped
    assert train_tiny(init_from='resume', **{**SETTINGS, 'patience': None}) == 0
    ours, theirs = (load(tmp_path / out / 'ckpt.pt') for out in ('out', 'whole'))
    assert ours['iter_num'] == 12 and same(ours['model'], theirs['model'])
    assert ours['state'] == theirs['state'] and ours['state']['evals_since_best'] == 1


def test_a_resume_keeps_the_count(train_tiny, monkeypatch, capsys):
    scripted_losses(monkeypatch, 4.0, 4.5, 4.2)
    at_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_tiny(**SETTINGS) == 143 and 'patience' not in capsys.readouterr().out.split('stopped: ')[1]
    assert train_tiny(init_from='resume', **SETTINGS) == 0
    assert 'step 6 is saved' in capsys.readouterr().out.split('stopped: patience=2')[1]


def test_a_run_that_is_killed_before_the_evaluation_that_ends_it_ends_after_it(train_tiny, tmp_path,
                                                                              monkeypatch, capsys):
    """The checkpoint of that step has no result, so a resume evaluates first."""
    scripted_losses(monkeypatch, 4.0, 4.5)
    evaluate, stopped = train.evaluate_both, iter([False, False, True])
    monkeypatch.setattr(train, 'evaluate_both', lambda *args: None if next(stopped) else evaluate(*args))
    train_tiny(**SETTINGS)
    assert load(tmp_path / 'out' / 'ckpt.pt')['state']['evals_since_best'] == 1
    scripted_losses(monkeypatch, 4.2)
    assert train_tiny(init_from='resume', **SETTINGS) == 0
    assert 'step 6 is saved' in capsys.readouterr().out.split('stopped: patience=2')[1]


@pytest.mark.parametrize('killed_at, count', [(1, 0), (2, 1)])
def test_a_kill_between_a_save_and_its_log_line_counts_no_evaluation_twice(train_tiny, tmp_path, monkeypatch,
                                                                          killed_at, count):
    """The resume evaluates again, because the log lacks that evaluation."""
    losses, logged = [4.0, 4.5], []

    def fail():
        raise ValueError('killed')

    def log(run, evaluation):
        run.out.wait()
        logged.append(evaluation)
        if len(logged) == killed_at:
            fail()
    scripted_losses(monkeypatch, *losses)
    with monkeypatch.context() as patched:
        patched.setattr(train, 'log_evaluation', log)
        assert error_of(train_tiny, **SETTINGS) == 'killed'
    scripted_losses(monkeypatch, losses[killed_at - 1])
    at_step(monkeypatch, 1, fail)
    assert error_of(train_tiny, init_from='resume', **SETTINGS) == 'killed'
    saved = load(tmp_path / 'out' / 'ckpt.pt')
    assert (saved['iter_num'], saved['state']['evals_since_best']) == (2 * killed_at, count)


def test_a_run_at_its_last_step_is_done(train_tiny, monkeypatch, capsys):
    scripted_losses(monkeypatch, 4.0, 4.5, 4.6)
    train_tiny(**{**SETTINGS, 'max_iters': 6})
    assert 'done: best val loss 4.0000' in capsys.readouterr().out


@pytest.mark.parametrize('settings', [SETTINGS, dict(max_iters=4, eval_interval=2)])
def test_losses_that_were_never_finite_are_an_error(train_tiny, tmp_path, monkeypatch, capsys, settings):
    scripted_losses(monkeypatch, NAN, NAN)
    assert 'step 4: no validation loss of this run was finite' in error_of(train_tiny, **settings)
    assert 'done' not in capsys.readouterr().out and not (tmp_path / 'out' / 'best.pt').exists()


def run_of_rank(data_dir, out):
    """A run whose evaluations never improve after the first: (exit code, evaluations)."""
    evaluate, losses = train.evaluate_both, iter([4.0, 4.1, 4.2, 4.3])

    def worse(run, stop=None):
        found = evaluate(run)
        return found._replace(val={**found.val, 'loss': next(losses)})
    train.evaluate_both = worse
    flags = {**TINY, **SETTINGS, 'data_dir': data_dir, 'out_dir': out}
    code = train.main([f'--{name}={value}' for name, value in flags.items()])
    return code, len(list(losses))


@forks
@pytest.mark.slow
def test_all_processes_stop_at_the_same_step(data_dir, tmp_path):
    assert on_ranks(2, run_of_rank, data_dir, str(tmp_path / 'out')) == [(0, 1), (0, 1)]
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 6
