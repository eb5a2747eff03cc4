"""What a run does about itself: divergence, memory that is short, a second place for checkpoints, a signal any time."""

import json
import os
import re
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
from conftest import TINY, at_step, contents, noise, write_bins

import train
from hotloop.checkpoint import RunState, save_checkpoint
from hotloop.dataloader import Batches, epoch_order, open_split
from hotloop.dataset import open_datasets
from hotloop.distributed import Env, StopRequest
from hotloop.divergence import collect_steps
from hotloop.evaluate import eval_batch
from hotloop.logger import Log
from hotloop.memory import batch_fits
from hotloop.optim import build_optimizers
from hotloop.run_dir import Mirror, RunDir
from model import GPT, GPTConfig
from train import TrainConfig

POISON = 200  # a token that no other text here has


def state_of(out):
    return torch.load(out / 'ckpt.pt', weights_only=True)


def lines_of(out):
    return [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]


def weights_equal(a, b):
    return all(torch.equal(a['model'][name], b['model'][name]) for name in a['model'])


@pytest.fixture
def poisoned(tmp_path, monkeypatch):
    """poisoned(steps) -> a data_dir whose dataset makes the loss NaN at these steps; batches of 8 windows of 16."""
    original = GPT.forward

    def forward(self, idx, targets=None, cache=None):
        out = original(self, idx, targets, cache)
        return out * float('nan') if self.training and (idx == POISON).any() else out
    monkeypatch.setattr(GPT, 'forward', forward)
    monkeypatch.setattr('hotloop.divergence.MAX_BAD_STEPS', 3)

    def write(steps):
        tokens = noise(4001)
        order = epoch_order(1337, len(tokens), TINY['block_size'], 0)
        for step in steps:
            tokens[order[8 * step] + 2] = POISON
        write_bins(tmp_path / 'data' / 'tiny', tokens, noise(487, seed=1))
        return str(tmp_path / 'data')
    return write


# -----------------------------------------------------------------------------
# divergence

def test_a_rollback_goes_past_the_data_and_stays_exact(poisoned, train_tiny, tmp_path):
    """Three bad steps in a row: back to the checkpoint before, then on with other data, as a resume does too."""
    settings = dict(data_dir=poisoned(range(5, 9)), on_divergence='rollback', save_interval=4, eval_interval=100,
                    max_iters=12, lr_decay_iters=12, keep_last=3, dropout=0.1)
    assert train_tiny(**settings) == 0
    whole, lines = state_of(tmp_path / 'out'), lines_of(tmp_path / 'out')
    assert [(line['step'], line['rolled_back_from']) for line in lines if 'rolled_back_from' in line] == [(4, 8)]
    steps = [line['step'] for line in lines if 'loss' in line]
    assert steps == sorted(set(steps))
    assert whole['state']['skips'] == [[4, 4]]  # 5 to 8: the data of steps 4 to 7, of which the last three were bad
    assert whole['iter_num'] == 12 and whole['state']['tokens_seen'] == 12 * 8 * 16
    for stop in (5, 6, 10):
        train_tiny(f'cut{stop}', **{**settings, 'max_iters': stop})
        train_tiny(f'cut{stop}', '--init_from=resume', **settings)
        assert weights_equal(whole, state_of(tmp_path / f'cut{stop}')), stop


def test_a_step_that_was_skipped_loses_neither_the_best_nor_the_checkpoint(poisoned, train_tiny, tmp_path, monkeypatch):
    """The one is written at the evaluation all the same, the other with the next step."""
    losses = iter([3.0, 4.0])
    monkeypatch.setattr(train, 'evaluate_both', lambda run, stop: (
        'scripted', {'step': run.state.iter_num, 'val_loss': next(losses)}))
    train_tiny(data_dir=poisoned([3]), eval_interval=4, max_iters=8, save_interval=4)
    best = torch.load(tmp_path / 'out' / 'best.pt', weights_only=True)
    assert (best['iter_num'], best['best_val_loss'], state_of(tmp_path / 'out')['best_val_loss']) == (4, 3.0, 3.0)
    assert os.path.exists(tmp_path / 'out' / 'ckpt-000000005.pt')


def test_a_rollback_saves_no_step_that_was_not_due(poisoned, train_tiny, tmp_path):
    """The first one after it would push out the checkpoint before."""
    with pytest.raises(ValueError, match='4 times after step 4'):
        train_tiny(data_dir=poisoned(step for step in range(5, 20) if step % 4), on_divergence='rollback',
                   save_interval=2, eval_interval=100, max_iters=30)  # good are those that a rollback begins with
    assert sorted(path.name for path in (tmp_path / 'out').glob('ckpt*')) == ['ckpt-000000002.pt', 'ckpt.pt']
    assert state_of(tmp_path / 'out')['iter_num'] == 4


def test_data_that_is_left_out_is_not_seen(data_dir):
    split = open_split(open_datasets(TrainConfig(dataset='tiny', data_dir=data_dir)), 'train', 16)
    cfg = TrainConfig(batch_size=4, gradient_accumulation_steps=2)
    plain, skipping = (Batches(split, cfg, Env()) for _ in range(2))
    skipping.skip([[3, 2], [3, 1], [6, 4]])
    for step, place in [(0, 0), (2, 2), (3, 6), (5, 8), (6, 13), (7, 14)]:
        np.testing.assert_array_equal(skipping.starts(step), plain.starts(place))


def test_a_run_that_diverges_again_and_again_stops(poisoned, train_tiny):
    with pytest.raises(ValueError, match='4 times after step 4, each time with other data'):
        train_tiny(data_dir=poisoned(range(5, 31)), on_divergence='rollback', save_interval=4, eval_interval=100,
                   max_iters=30)


def test_nothing_to_roll_back_to_is_said(poisoned, train_tiny):
    with pytest.raises(ValueError, match='there is no checkpoint from before to go back to'):
        train_tiny(data_dir=poisoned(range(1, 9)), on_divergence='rollback', eval_interval=100, max_iters=12)


class Told:
    def __init__(self):
        self.lines = []

    def write(self, text, **numbers):
        self.lines.append(text)


def book(losses, **settings):
    """settle() over these losses of one target each, step by step: (lines, state, steps at which it had diverged)."""
    run = train.Run(TrainConfig(**settings), *[None] * 10, RunState(), None, Told(), {})
    diverged = []
    for step, loss in enumerate(losses, 1):
        run.state.iter_num = step
        bad = torch.tensor(float(not np.isfinite(loss)))
        collect_steps(run, [(torch.tensor(float(loss)), bad, 1)])
        diverged += [run.diverged_at] if run.diverged_at else []
    return run.log.lines, run.state, diverged


def steady(n, seed=0):
    return list(3 + 0.1 * np.random.default_rng(seed).standard_normal(n))


def test_a_spike_is_told_once_and_no_other_step():
    lines, state, diverged = book([*steady(200), 5.0, 5.1, *steady(50), float('nan'), *steady(50)])
    assert len(lines) == 1 and lines[0].startswith('step 201: loss 5.0000 is a spike: the 128 steps before had 2.99')
    assert not diverged and len(state.recent) == 128 and np.isfinite(state.recent).all() and max(state.recent) < 4


def test_a_new_level_of_loss_is_no_spike_for_ever():
    lines, _, diverged = book([*steady(100), *[5.0] * 200])
    assert len(lines) == 1 and not diverged


def test_spikes_in_a_row_are_a_divergence_only_where_it_rolls_back():
    losses = [*steady(100), *[5.0] * 15, float('nan'), *[6.0] * 10]
    assert book(losses, on_divergence='rollback')[2][0] == 120
    assert not book(losses)[2]


def test_weights_that_are_not_finite_are_never_saved(train_tiny, tmp_path, monkeypatch):
    original = train.train_step

    def damaging(model, loads, *rest, **kwargs):
        out = original(model, loads, *rest, **kwargs)
        if load_count.append(0) or len(load_count) == 6:
            next(iter(model.parameters())).data[0, 0] = float('inf')
        return out
    load_count = []
    monkeypatch.setattr(train, 'train_step', damaging)
    with pytest.raises(ValueError, match='step 6: the weights are not finite'):
        train_tiny(save_interval=1, eval_interval=100)
    assert state_of(tmp_path / 'out')['iter_num'] == 5


@pytest.mark.parametrize('log_interval, save_minutes', [(1, 15), (5, 15), (12, 15), (12, 0)])
@pytest.mark.parametrize('bad, skips', [(range(5, 8), [[4, 4]]), (range(5, 7), [])])
def test_where_a_run_diverges_depends_on_its_steps_alone(poisoned, train_tiny, tmp_path, log_interval, save_minutes,
                                                        bad, skips):
    """Not on when somebody looks: at log lines, at saves by the clock, or at the end."""
    train_tiny(data_dir=poisoned(bad), on_divergence='rollback', save_interval=4, eval_interval=100, max_iters=12,
               log_interval=log_interval, save_minutes=save_minutes)
    assert state_of(tmp_path / 'out')['state']['skips'] == skips


def test_bad_steps_that_are_seen_together_end_a_run_too(poisoned, train_tiny):
    with pytest.raises(ValueError, match='step 8: loss or gradient was not finite for 3 steps in a row'):
        train_tiny(data_dir=poisoned(range(5, 8)), eval_interval=100, max_iters=12, log_interval=12)


def test_a_worse_model_never_takes_the_place_of_best(train_tiny, tmp_path, monkeypatch):
    """Nor after a save that failed, whichever of the two files it was."""
    found = iter([3.0, 2.9, 5.0, 2.8, 4.0])
    monkeypatch.setattr(train, 'evaluate_both',
                        lambda run, stop: ('', {'step': run.state.iter_num, 'val_loss': next(found)}))
    original = save_checkpoint

    def full(path, checkpoint, **kwargs):
        if (os.path.basename(path), checkpoint['iter_num']) in (('best.pt', 4), ('ckpt.pt', 8)):
            raise ValueError('full for a moment')
        original(path, checkpoint, **kwargs)
    monkeypatch.setattr('hotloop.checkpoint.save_checkpoint', full)
    train_tiny(eval_interval=2)
    assert torch.load(tmp_path / 'out' / 'best.pt', weights_only=True)['iter_num'] == 8
    assert state_of(tmp_path / 'out')['best_val_loss'] == 2.8


# -----------------------------------------------------------------------------
# memory

def short_of_memory(monkeypatch, most, error=None):
    """A machine on which a training forward of more than `most` sequences asks for more memory than there is."""
    original, seen = GPT.forward, []

    def forward(self, idx, targets=None, cache=None):
        if targets is not None and torch.is_grad_enabled():
            seen.append(len(idx))
            if len(idx) > most:
                raise error or RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return original(self, idx, targets, cache)
    monkeypatch.setattr(GPT, 'forward', forward)
    return seen


@pytest.mark.parametrize('error', [None, torch.OutOfMemoryError('CUDA out of memory. Tried to allocate'),
                                   MemoryError()])
def test_the_largest_micro_batch_that_fits_is_found_for_the_same_step(train_tiny, tmp_path, monkeypatch, error, capsys):
    """24 sequences a step; 24, 12 and 8 do not fit, 6 does."""
    seen = short_of_memory(monkeypatch, 7, error)
    train_tiny(batch_size='auto', gradient_accumulation_steps=2, max_iters=2)  # the default is 12
    assert 'batch_size=auto: 6, gradient_accumulation_steps=4' in capsys.readouterr().out
    assert seen[:4] == [24, 12, 8, 6] and set(seen[4:]) == {6}
    config = state_of(tmp_path / 'out')['config']
    assert (config['batch_size'], config['gradient_accumulation_steps']) == (6, 4)


def test_auto_keeps_the_step_of_a_card_and_of_a_resumed_run(train_tiny, tmp_path, monkeypatch, capsys):
    card = tmp_path / 'card.py'
    card.write_text('batch_size = 10\ngradient_accumulation_steps = 3\n')
    short_of_memory(monkeypatch, 5)
    flags = {k: v for k, v in TINY.items() if k not in ('batch_size', 'gradient_accumulation_steps')}
    def run(*words):
        return train.main([*map(str, words), *(f'--{k}={v}' for k, v in flags.items()), f'--out_dir={tmp_path}/out',
                           f'--data_dir={data}'])
    write_bins(tmp_path / 'data' / 'tiny', noise(4001), noise(487, seed=1))
    data = tmp_path / 'data'
    run(card, '--batch_size=auto', '--max_iters=2')
    assert 'batch_size=auto: 5, gradient_accumulation_steps=6' in capsys.readouterr().out
    short_of_memory(monkeypatch, 3)
    for again in ((), (card,)):  # as torchrun, which repeats the command
        run(*again, '--init_from=resume', '--batch_size', 'auto', f'--max_iters={3 + len(again)}')
        assert 'batch_size=auto: 3, gradient_accumulation_steps=10' in capsys.readouterr().out


def test_auto_keeps_the_step_however_often_the_command_is_repeated(train_tiny, monkeypatch, capsys):
    short_of_memory(monkeypatch, 9)
    for step in (1, 2, 3):  # 12 x 3 sequences, the first number being the default
        train_tiny(init_from='scratch' if step == 1 else 'resume', batch_size='auto', gradient_accumulation_steps=3,
                   max_iters=step)
        assert 'batch_size=auto: 9, gradient_accumulation_steps=4' in capsys.readouterr().out


def test_gradients_of_the_trial_do_not_enter_the_run(train_tiny, tmp_path):
    train_tiny('auto', batch_size='auto', gradient_accumulation_steps=1)
    train_tiny('plain', batch_size=12, gradient_accumulation_steps=1)
    assert weights_equal(state_of(tmp_path / 'auto'), state_of(tmp_path / 'plain'))


def test_not_even_one_sequence_fits(train_tiny, monkeypatch):
    short_of_memory(monkeypatch, 0)
    with pytest.raises(ValueError, match='not even one sequence of 16 tokens fits the memory of cpu'):
        train_tiny(batch_size='auto')
    with pytest.raises(ValueError, match=r'micro-batch of 4 sequences .* neither does a smaller one'):
        train_tiny()


def test_a_batch_that_does_not_fit_ends_with_one_that_would(train_tiny, monkeypatch):
    short_of_memory(monkeypatch, 3)
    with pytest.raises(ValueError, match='a micro-batch of 8 sequences of 16 tokens does not fit the memory of cpu; '
                                         '--batch_size=2 --gradient_accumulation_steps=8 does and is the same step'):
        train_tiny(batch_size=8)


def test_an_evaluation_that_does_not_fit_is_a_sentence(train_tiny, monkeypatch):
    train_tiny(max_iters=2)

    def full(*args):
        raise torch.OutOfMemoryError('CUDA out of memory')
    monkeypatch.setattr('hotloop.evaluate.eval_batch', full)
    with pytest.raises(ValueError, match=r'does not fit the memory of cpu .*batch_size must be smaller'):
        train_tiny(init_from='resume', eval_only=True)


def test_another_error_of_the_machine_keeps_its_traceback(train_tiny, monkeypatch):
    short_of_memory(monkeypatch, 0, RuntimeError('CUDA error: an illegal memory access was encountered'))
    for batch in ('auto', 4):
        with pytest.raises(RuntimeError, match='illegal memory access'):
            train_tiny(batch_size=batch)


# -----------------------------------------------------------------------------
# a second place

def test_a_mirror_holds_what_out_dir_holds_and_can_be_resumed(train_tiny, tmp_path):
    train_tiny(mirror_dir=tmp_path / 'drive', max_iters=6, lr_decay_iters=10)
    out, drive = contents(tmp_path / 'out'), contents(tmp_path / 'drive')
    assert set(drive) == {'ckpt.pt', 'best.pt', 'config.py', 'log.jsonl'}
    assert all(drive[name] == out[name] for name in ('ckpt.pt', 'best.pt', 'config.py'))
    train_tiny('drive', init_from='resume', max_iters=10)
    train_tiny('whole')
    assert weights_equal(state_of(tmp_path / 'drive'), state_of(tmp_path / 'whole'))


def test_a_fresh_run_leaves_the_mirror_of_another_alone(train_tiny, tmp_path):
    train_tiny(mirror_dir=tmp_path / 'drive', max_iters=4)
    before = contents(tmp_path / 'drive')
    train_tiny(mirror_dir=tmp_path / 'drive', max_iters=2)
    assert contents(tmp_path / 'drive.1') == before and state_of(tmp_path / 'drive')['iter_num'] == 2


def test_a_resumed_run_leaves_the_mirror_of_another_alone(train_tiny, tmp_path):
    train_tiny(mirror_dir=tmp_path / 'drive', max_iters=4)
    before = contents(tmp_path / 'drive')
    train_tiny('b', max_iters=1)
    train_tiny('b', init_from='resume', mirror_dir=tmp_path / 'drive', max_iters=2)
    assert contents(tmp_path / 'drive.1') == before and state_of(tmp_path / 'drive')['iter_num'] == 2
    for step, flags in ((3, {}), (4, {'mirror_dir': tmp_path / 'b' / '..' / 'drive'})):  # its own by now
        train_tiny('b', init_from='resume', max_iters=step, **flags)
        assert state_of(tmp_path / 'drive')['iter_num'] == step and not (tmp_path / 'drive.2').exists()


def test_copies_that_somebody_made_are_no_checkpoints(train_tiny, tmp_path):
    train_tiny(max_iters=4, save_interval=1)
    shutil.copy(tmp_path / 'out' / 'ckpt-000000003.pt', tmp_path / 'out' / 'ckpt-keep.pt')
    train_tiny(max_iters=6, save_interval=1, init_from='resume')
    assert {name for name in os.listdir(tmp_path / 'out') if name.startswith('ckpt')} == {
        'ckpt.pt', 'ckpt-000000005.pt', 'ckpt-keep.pt'}


def test_a_run_that_is_refused_leaves_the_mirror_of_the_running_one(train_tiny, tmp_path):
    train_tiny(mirror_dir=tmp_path / 'drive', max_iters=2)
    owner = RunDir(str(tmp_path / 'out'))
    owner.take_lock()
    before = contents(tmp_path / 'drive')
    with pytest.raises(ValueError, match='is in use by process'):
        train_tiny(mirror_dir=tmp_path / 'drive')
    owner.lock.close()
    assert contents(tmp_path / 'drive') == before and not (tmp_path / 'drive.1').exists()


def test_a_log_that_cannot_be_written_ends_no_run(train_tiny, tmp_path, monkeypatch, capsys):
    """/dev/full is a disk without a byte; it is told once."""
    def full(log, state):
        log.file = open('/dev/full', 'a', buffering=1)  # noqa: SIM115
    monkeypatch.setattr(Log, 'open', full)
    assert train_tiny() == 0
    assert capsys.readouterr().out.count('log.jsonl could not be written: No space left') == 1
    assert torch.load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 10


def test_a_folder_that_vanishes_is_three_failed_saves(train_tiny, tmp_path, monkeypatch, capsys):
    at_step(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / 'out'))
    with pytest.raises(ValueError, match=r'\.pt could not be written: No such file or directory; .* MB are needed'):
        train_tiny(save_interval=1)
    assert len(re.findall('ckpt.pt could not be written.*training goes on', capsys.readouterr().out)) == 2


def test_a_mirror_is_a_place_of_its_own(train_tiny, tmp_path):
    """Neither out_dir by another name, nor what it lies in."""
    (tmp_path / 'link').symlink_to(tmp_path / 'out')
    with pytest.raises(ValueError, match='is or lies in mirror_dir'):
        train_tiny(mirror_dir=tmp_path / 'link')
    with pytest.raises(ValueError, match=r'lies in mirror_dir=.* would be moved aside'):
        train_tiny(mirror_dir=tmp_path)
    for name in ('out_dir', 'mirror_dir'):
        with pytest.raises(ValueError, match=f"{name}='' can be no folder"):
            train.main([f'--{name}='])


def test_a_disk_that_takes_nothing_at_the_start_is_a_sentence(train_tiny, tmp_path, monkeypatch):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'config.py').symlink_to('/dev/full')
    with pytest.raises(ValueError, match=r'out_dir=.* cannot be written: No space left'):
        train_tiny()


def test_a_mirror_that_was_emptied_is_filled_again(train_tiny, tmp_path, monkeypatch):
    """With what has not changed since, too."""
    at_step(monkeypatch, 8, lambda: shutil.rmtree(tmp_path / 'drive'))
    train_tiny(mirror_dir=tmp_path / 'drive', save_interval=3)
    assert set(os.listdir(tmp_path / 'drive')) >= {'config.py', 'log.jsonl', 'ckpt.pt', 'best.pt'}


def test_a_lost_out_dir_says_where_its_mirror_is(train_tiny, tmp_path):
    train_tiny(mirror_dir=tmp_path / 'drive', max_iters=2)
    with pytest.raises(ValueError, match=f'lost holds no checkpoint; its mirror does: .*--out_dir={tmp_path}/drive'):
        train_tiny('lost', init_from='resume', mirror_dir=tmp_path / 'drive')


def test_a_mirror_that_fails_harms_nothing(train_tiny, tmp_path, monkeypatch, capsys):
    """It is full for one copy, and takes the next."""
    original, left = train.shutil.copyfileobj, [OSError(28, 'No space left on device')]

    def full(*args):
        if left:
            raise left.pop()
        original(*args)
    monkeypatch.setattr(train.shutil, 'copyfileobj', full)
    assert train_tiny(mirror_dir=tmp_path / 'drive') == 0
    assert 'No space left on device; training goes on' in capsys.readouterr().out
    assert contents(tmp_path / 'drive')['ckpt.pt'] == contents(tmp_path / 'out')['ckpt.pt']


def test_a_mirror_that_hangs_does_not_hold_the_run(train_tiny, tmp_path, monkeypatch, capsys):
    released = threading.Event()
    monkeypatch.setattr(train.shutil, 'copyfileobj', lambda *args: released.wait(60))
    monkeypatch.setattr(Mirror, 'close', lambda self, seconds, close=Mirror.close: close(self, 0.01))
    assert train_tiny(mirror_dir=tmp_path / 'drive') == 0
    released.set()
    assert 'did not take the last checkpoint' in capsys.readouterr().out
    assert state_of(tmp_path / 'out')['iter_num'] == 10


@pytest.mark.parametrize('place, sentence', [('out', 'is or lies in'), ('file/below', 'cannot be written'),
                                             ('a\0b', 'can be no folder')])
def test_a_mirror_that_cannot_be_is_told_before_the_first_step(train_tiny, tmp_path, place, sentence):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ValueError, match=sentence):
        train_tiny(mirror_dir=tmp_path / place)
    assert not (tmp_path / 'out' / 'ckpt.pt').exists()


# -----------------------------------------------------------------------------
# signals

def test_a_signal_cuts_an_evaluation_short_and_the_next_process_does_it(train_tiny, tmp_path, monkeypatch):
    original, calls = eval_batch, []

    def signalling(*args):
        calls.append(0)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)
    monkeypatch.setattr('hotloop.evaluate.eval_batch', signalling)
    assert train_tiny() == 143
    assert len(calls) == 2 and state_of(tmp_path / 'out')['iter_num'] == 4
    assert not any('val_loss' in line for line in lines_of(tmp_path / 'out'))
    assert train_tiny('out', '--init_from=resume') == 0
    train_tiny('whole')
    assert weights_equal(state_of(tmp_path / 'out'), state_of(tmp_path / 'whole'))
    found, whole = ([(line['step'], line['val_loss']) for line in lines_of(tmp_path / out) if 'val_loss' in line]
                    for out in ('out', 'whole'))
    assert found == whole


def test_a_signal_cuts_an_evaluation_that_was_left_too(train_tiny, tmp_path, monkeypatch):
    train_tiny(max_iters=4)
    path = tmp_path / 'out' / 'ckpt.pt'
    checkpoint = state_of(tmp_path / 'out')
    checkpoint['state']['evaluation_left'] = True
    torch.save(checkpoint, path)
    original = eval_batch
    monkeypatch.setattr('hotloop.evaluate.eval_batch', lambda *args: (os.kill(os.getpid(), signal.SIGTERM), original(*args))[1])
    assert train_tiny('out', '--init_from=resume', max_iters=10) == 143
    assert state_of(tmp_path / 'out')['state']['evaluation_left'] and state_of(tmp_path / 'out')['iter_num'] == 4


def test_only_a_second_interrupt_ends_at_once(capfd):
    """The first signal is the one whose code the process ends with."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        stop = StopRequest(None)
        for number in (signal.SIGTERM, signal.SIGINT):
            assert signal.getsignal(signal.SIGINT) == stop.receive
            os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL and stop.exit_code() == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert 'Ctrl-C again ends at once' in capfd.readouterr().err


def test_a_kill_during_the_last_evaluation_loses_neither_steps_nor_the_evaluation(train_tiny, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(run, stop):
        raise Killed
    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(train, 'evaluate_both', kill)
        train_tiny(eval_interval=100)
    assert state_of(tmp_path / 'out')['iter_num'] == 10
    train_tiny('out', '--init_from=resume', eval_interval=100)
    assert [line['step'] for line in lines_of(tmp_path / 'out') if 'val_loss' in line] == [10]
    assert (tmp_path / 'out' / 'best.pt').exists()


def test_a_signal_before_the_first_step_ends_the_start(train_tiny, tmp_path, monkeypatch, capsys):
    original = build_optimizers

    def signalled(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)
    monkeypatch.setattr('hotloop.optim.build_optimizers', signalled)
    assert train_tiny() == 143
    assert 'stopped before step 1' in capsys.readouterr().out and not (tmp_path / 'out' / 'ckpt.pt').exists()


@pytest.mark.slow
def test_compiled_runs_repeat_and_resume_to_the_bit(tmp_path):
    """Unless deterministic=False: then Inductor adds up the embedding's gradient atomically, in any order."""
    write_bins(tmp_path / 'tiny', noise(40001), noise(487, seed=1))
    settings = {**TINY, 'compile': True, 'threads': 2, 'batch_size': 32, 'block_size': 64, 'n_embd': 64, 'dropout': 0.1,
                'lr_decay_iters': 10, 'data_dir': tmp_path}

    def run(out, **more):
        torch._dynamo.reset()
        train.main([f'--{k}={v}' for k, v in {**settings, 'out_dir': tmp_path / out, **more}.items()])
        return state_of(tmp_path / out)
    whole = run('whole')
    assert weights_equal(whole, run('again'))
    run('halves', max_iters=5)
    assert weights_equal(whole, run('halves', init_from='resume'))


def test_a_small_model_with_an_exact_batch_needs_no_parts():
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=1, n_embd=8))
    assert batch_fits(model, 4, Env(), TrainConfig(), 100) and model.loss_chunks == 1
    assert all(p.grad is None for p in model.parameters())
