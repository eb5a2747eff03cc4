"""Checkpoint files: what is loaded is what was saved, or an error; what is restored fits."""

import contextlib
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of, same
from test_dataset import Touch
from torch.torch_version import TorchVersion

from hotloop.system.distributed import Env
from hotloop.training.checkpoint import RunState, checkpoint_of, restore, save_checkpoint, snapshot
from hotloop.training.optim import build_optimizers
from hotloop.weights.load import load_checkpoint
from model import GPT, GPTConfig
from train import TrainConfig

NO_SCALER = torch.amp.GradScaler('cpu', enabled=False)


def tiny_run(optimizer='adamw', **settings):
    """Train one small layer for a step. Returns what checkpoint_of() reads of a run."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=11, **settings))
    optimizers = build_optimizers(model, TrainConfig(optimizer=optimizer, device='cpu'), Env())
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(ids, ids).sum().backward()
    for o in optimizers:
        o.step()
    return SimpleNamespace(model=model, optimizers=optimizers, state=RunState(iter_num=1))


def saved(run):
    """Return the checkpoint of a run."""
    record = {'tokenizer': {'kind': 'byte'}, 'config': {}}
    return checkpoint_of(run.model, run.optimizers, NO_SCALER, run.state, record)


@pytest.fixture
def path(tmp_path):
    """Save a checkpoint file. Returns its path."""
    save_checkpoint(str(tmp_path / 'c.pt'), saved(tiny_run()))
    return tmp_path / 'c.pt'


# -----------------------------------------------------------------------------
# loading

@pytest.mark.skipif(not os.path.exists('/proc/self/maps'), reason='not Linux')
def test_several_processes_share_the_memory_of_a_file(path, monkeypatch):
    """Each may change its tensors, and a save may replace the file; the values are the same."""
    maps, alone = Path('/proc/self/maps'), load_checkpoint(str(path))
    assert str(path) not in maps.read_text()
    monkeypatch.setenv('WORLD_SIZE', '2')
    shared = load_checkpoint(str(path))
    assert str(path) in maps.read_text() and same(alone, shared)
    shared['model']['lm_head.weight'].zero_()
    save_checkpoint(str(path), alone)
    assert same(load_checkpoint(str(path)), alone) and not shared['model']['lm_head.weight'].any()


@pytest.mark.parametrize('bias', [True, False])
def test_weights_tell_whether_a_checkpoint_from_before_the_bias_setting_has_biases(path, bias):
    checkpoint = saved(tiny_run(bias=bias))
    del checkpoint['model_args']['bias']
    save_checkpoint(str(path), checkpoint)
    assert load_checkpoint(str(path))['model_args'].get('bias', False) is bias


@pytest.mark.parametrize('bits', [1, pytest.param(8, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_the_list_of_records_is_loaded(path, bits):
    """No checksum covers it. One bit makes a record a folder: torch then returns uninitialized memory."""
    torch.save({'model': {'w': torch.arange(9.0)}, 'model_args': {}}, path)
    data, expected = path.read_bytes(), load_checkpoint(str(path))
    start = data.rindex(b'PK\1\2')  # the last entry and all that follows
    for at in range(start, len(data)):
        for bit in range(at % 8, at % 8 + bits):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1:])
            with contextlib.suppress(ValueError):
                assert same(load_checkpoint(str(path)), expected), f'byte {at - start}, bit {bit % 8}'
    path.write_bytes(data[:start + 38] + bytes([data[start + 38] ^ 0x10]) + data[start + 39:])
    assert 'the list of records is invalid' in error_of(load_checkpoint, str(path))


def test_a_file_that_is_not_a_checkpoint_is_an_error(path):
    torch.save({'model': {}}, path)
    assert f'{path} is not a hotloop or nanoGPT checkpoint' in error_of(load_checkpoint, str(path))
    path.write_bytes(b'')
    assert f'{path} is damaged or not a checkpoint: File is not a zip' in error_of(load_checkpoint, str(path))
    path.unlink()
    assert f'{path} cannot be read: No such file' in error_of(load_checkpoint, str(path))


def test_loading_never_runs_code(path, tmp_path):
    torch.save({'model': {}, 'model_args': {}, 'x': Touch(tmp_path / 'ran')}, path)
    torch.load(path, weights_only=False)['x'].close()
    (tmp_path / 'ran').unlink()  # so the code works
    message = error_of(load_checkpoint, str(path))
    assert f'it is not plain data ({open.__module__}.open)' in message
    assert 'weights_only' not in message and not (tmp_path / 'ran').exists()


def test_a_torch_whose_loader_is_not_safe_is_refused(path, monkeypatch):
    monkeypatch.setattr(torch, '__version__', TorchVersion('2.9.1+cpu'))
    with pytest.raises(ValueError, match=r'2\.9\.1.*CVE-2026-24747.*pip install'):
        load_checkpoint(str(path))


# -----------------------------------------------------------------------------
# what a run saves and restores

def test_a_file_that_was_written_wrong_does_not_replace_the_old_one(path, monkeypatch):
    """As when memory fails between the checksum of a record and its write."""
    def write_other_bytes(checkpoint, f, save=torch.save):
        save(checkpoint, f)
        f.seek(1000)
        f.write(b'\0\1\2\3' * 9)
    data = path.read_bytes()
    monkeypatch.setattr(torch, 'save', write_other_bytes)
    error = error_of(save_checkpoint, str(path), saved(tiny_run()))
    assert 'c.pt could not be written: the checksum of record' in error
    assert os.listdir(path.parent) == ['c.pt'] and path.read_bytes() == data


def test_a_reader_finds_a_checkpoint_while_another_is_written(path, monkeypatch):
    old, newer, seen = load_checkpoint(str(path)), saved(tiny_run('muon')), []
    sync = os.fsync
    monkeypatch.setattr('os.fsync', lambda file: (seen.append(path.exists()), sync(file)))
    save_checkpoint(str(path), newer, str(path) + '.old')
    assert seen and all(seen)
    assert same(load_checkpoint(str(path) + '.old'), old) and 'muon' in load_checkpoint(str(path))


def test_a_snapshot_stays_as_it_is_while_the_run_goes_on(tmp_path):
    """And the file is as large: the tied matrix is in it once."""
    run, undisturbed = (tiny_run('muon', preset='modern', tie=True) for _ in range(2))
    checkpoint = saved(run)
    copy = snapshot(checkpoint)
    for name, value in (('a', checkpoint), ('b', copy)):
        save_checkpoint(str(tmp_path / name), value)
    assert (tmp_path / 'a').stat().st_size == pytest.approx((tmp_path / 'b').stat().st_size, rel=0.01)
    for o in run.optimizers:
        o.step()
    assert same(copy, saved(undisturbed)) and not same(checkpoint, copy)


def test_weights_that_are_not_finite_are_not_saved():
    run = tiny_run()
    run.model.transformer.wte.weight.data[0, 0] = math.nan
    assert 'step 1: weights are not finite' in error_of(saved, run)


@pytest.mark.parametrize('change, words', [
    (lambda c: c.pop('optimizer'), 'of 0 optimizers, not of 1 (best.pt has none)'),
    (lambda c: c['optimizer']['param_groups'].pop(), 'does not fit: zip'),
    (lambda c: c['optimizer']['param_groups'][0]['params'].pop(), 'does not fit: loaded state dict'),
    (lambda c: c['optimizer']['state'][0].update(exp_avg=torch.zeros(2, 3)),
     'exp_avg has shape (2, 3), not (11, 8)'),
    (lambda c: c['optimizer']['state'][0].pop('exp_avg_sq'), 'is not AdamW: its state is step')])
def test_an_optimizer_state_that_does_not_fit_is_an_error(change, words):
    """torch does not compare shapes: AdamW's fused kernel wrote behind an exp_avg that was too short."""
    run, checkpoint = tiny_run(), saved(tiny_run())
    change(checkpoint)
    error = error_of(restore, checkpoint, run.optimizers, NO_SCALER)
    assert words in error and '--init_from=PATH' in error
