"""Saves of a run: a thread writes what the run had at that step, and nothing ends before it has written."""

import math
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import at_step, error_of, load, same

import train
from hotloop.system.distributed import Env
from hotloop.training import run_dir, saves
from hotloop.training.run_dir import RunDir


def before_each_save(monkeypatch, action):
    """Calls action(path, checkpoint) in the thread before each file of weights is written."""
    original = run_dir.save_checkpoint

    def wrapped(path, checkpoint, keep_old=None):
        action(path, checkpoint)
        original(path, checkpoint, keep_old)
    monkeypatch.setattr(run_dir, 'save_checkpoint', wrapped)


def slow_disk(monkeypatch):
    """Each file takes a tenth of a second."""
    before_each_save(monkeypatch, lambda path, checkpoint: time.sleep(0.1))


def test_a_run_goes_on_while_a_thread_writes_what_it_had_at_that_step(train_tiny, tmp_path, monkeypatch):
    """The save of step 2 begins to write after step 4; the save of step 4 waits for it."""
    settings = dict(max_iters=6, eval_interval=100, keep_last=9)
    train_tiny('whole', save_interval=1, **settings)
    step_4, waited, saved = threading.Event(), [], []

    def wait(path, checkpoint):
        saved.append(checkpoint['iter_num'])
        waited.append(step_4.wait(30))
    before_each_save(monkeypatch, wait)
    at_step(monkeypatch, 4, step_4.set)
    assert train_tiny(save_interval=2, **settings) == 0 and all(waited) and saved[:2] == [2, 4]
    for step, name in ((2, 'ckpt-000000002.pt'), (4, 'ckpt-000000004.pt'), (6, 'ckpt.pt')):
        ours, theirs = load(tmp_path / 'out' / name), load(tmp_path / 'whole' / name)
        for part in ('model', 'optimizer', 'state', 'iter_num'):
            assert same(ours[part], theirs[part]), (step, part)


def test_without_memory_for_a_copy_a_run_waits_for_the_disk(train_tiny, tmp_path, monkeypatch):
    """It saves the tensors themselves, and no step changes them meanwhile."""
    settings = dict(max_iters=4, save_interval=1, eval_interval=100, keep_last=9)
    train_tiny('whole', **settings)
    monkeypatch.setattr(saves, 'memory', lambda: 10**5)
    monkeypatch.setattr(saves, 'snapshot', lambda *args: pytest.fail('a copy was made'))
    slow_disk(monkeypatch)
    assert train_tiny(**settings) == 0
    for name in ('ckpt-000000002.pt', 'ckpt-000000003.pt', 'ckpt.pt'):
        ours, theirs = (load(tmp_path / out / name) for out in ('out', 'whole'))
        assert same(ours['model'], theirs['model']) and same(ours['optimizer'], theirs['optimizer'])


def test_an_error_in_training_lets_the_save_under_way_finish(train_tiny, tmp_path, monkeypatch):
    slow_disk(monkeypatch)

    def fail():
        raise RuntimeError('step 3 failed')
    at_step(monkeypatch, 3, fail)
    with pytest.raises(RuntimeError, match='step 3 failed'):
        train_tiny(save_interval=2)
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 2


def test_a_failed_save_is_reported_while_the_run_goes_on(train_tiny, tmp_path, monkeypatch, capsys):
    """Not when the next save but one is due."""
    failed = threading.Event()

    def fail(path, checkpoint):
        if checkpoint['iter_num'] == 3:
            failed.set()
            raise ValueError(f'{path} could not be written')
    before_each_save(monkeypatch, fail)
    at_step(monkeypatch, 4, lambda: failed.wait(30))
    assert train_tiny(save_interval=3, eval_interval=100, max_iters=10) == 0
    lines = capsys.readouterr().out.splitlines()
    report = next(i for i, line in enumerate(lines) if 'training continues' in line)
    before, after = (next(i for i, line in enumerate(lines) if line.startswith(f'step {n}: loss'))
                     for n in (3, 9))
    assert before < report < after


def test_a_message_names_the_step_that_is_saved_once_the_thread_has_written(tmp_path, monkeypatch):
    slow_disk(monkeypatch)
    out = RunDir(str(tmp_path))
    out.start_save({'iter_num': 7, 'best_val_loss': math.inf}, 2)
    assert out.how_to_go_on().startswith('step 7 is saved in')


def test_the_loss_of_a_best_that_was_not_written_does_not_count(tmp_path, monkeypatch, capsys):
    """The next evaluation is compared with the one before, once the thread has failed."""
    def fail(path, checkpoint):
        raise ValueError('no room')
    before_each_save(monkeypatch, fail)
    out = RunDir(str(tmp_path))
    out.best_loss = 3.0
    run = SimpleNamespace(env=Env(), out=out, state=SimpleNamespace(best_val_loss=3.0, iter_num=4),
                          cfg=SimpleNamespace(max_iters=9), failed_saves=0, mirror=None)
    evaluation = SimpleNamespace(val={'loss': 2.0})
    assert saves.track_best(run, evaluation) and run.state.best_val_loss == 2.0
    out.start_save({'iter_num': 4, 'best_val_loss': 2.0}, 2)
    evaluation.val['loss'] = 2.5
    assert saves.track_best(run, evaluation) and run.state.best_val_loss == 2.5
    assert capsys.readouterr().out == 'no room; training continues\n'
    assert run.failed_saves == 1 and out.best_loss == 3.0 and not list(tmp_path.glob('*.pt'))
    out.start_save({'iter_num': 9, 'best_val_loss': 2.5}, 2)  # the last save must succeed
    assert error_of(saves.finish_save, run, final=True) == 'no room; no step of this run is saved'


def test_an_evaluation_is_logged_after_a_checkpoint_without_its_result_is_replaced(
        train_tiny, tmp_path, monkeypatch):
    """Or a kill between the two would lose it: at the end, and after a resume with an evaluation to do."""
    settings, found, log_evaluation = dict(eval_interval=2, max_iters=5), [], train.log_evaluation
    with monkeypatch.context() as m:
        m.setattr(train, 'evaluate_both', lambda run, stop: None)  # as when a signal comes in it
        train_tiny(**settings)

    def check(run, evaluation):
        checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
        if checkpoint['iter_num'] == run.state.iter_num:
            found.append((checkpoint['iter_num'], checkpoint['best_val_loss'] <= evaluation.val['loss']))
        log_evaluation(run, evaluation)
    for part in (train, saves):
        monkeypatch.setattr(part, 'log_evaluation', check)
    slow_disk(monkeypatch)
    train_tiny(init_from='resume', **settings)
    assert found == [(2, True), (5, True)]


def test_a_resumed_run_does_not_keep_the_tensors_of_its_checkpoint(train_tiny, monkeypatch):
    kept, take_folder = [], train.take_folder

    def look(run, resumed):
        kept.extend(resumed.checkpoint)
        take_folder(run, resumed)
    train_tiny(max_iters=1, optimizer='muon')
    monkeypatch.setattr(train, 'take_folder', look)
    assert train_tiny(init_from='resume', max_iters=2, optimizer='muon') == 0
    assert kept and not {'model', 'optimizer', 'muon'} & set(kept)
