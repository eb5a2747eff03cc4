"""Checkpoint files: what is loaded is what was saved, or an error; what is restored fits."""

import contextlib
import errno
import math
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import same
from torch.torch_version import TorchVersion

from hotloop.system.distributed import Env
from hotloop.training.checkpoint import (
    RunState,
    checkpoint_of,
    restore,
    save_checkpoint,
    snapshot,
    state_from,
)
from hotloop.training.optim import build_optimizers
from hotloop.weights.load import load_checkpoint
from model import GPT, GPTConfig
from train import TrainConfig

NO_SCALER = torch.amp.GradScaler('cpu', enabled=False)


def tiny_run(optimizer='adamw', steps=1, **settings):
    """A run of one small layer after some steps, as far as checkpoint_of() looks at it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=11, **settings))
    optimizers = build_optimizers(model, TrainConfig(optimizer=optimizer, device='cpu'), Env())
    ids = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(steps):
        model(ids, ids).sum().backward()
        for o in optimizers:
            o.step()
    return SimpleNamespace(model=model, optimizers=optimizers, state=RunState(iter_num=steps))


def saved(run):
    """The checkpoint of a run."""
    record = {'tokenizer': {'kind': 'byte'}, 'config': {}}
    return checkpoint_of(run.model, run.optimizers, NO_SCALER, run.state, record)


@pytest.fixture
def path(tmp_path):
    """A checkpoint file."""
    save_checkpoint(str(tmp_path / 'c.pt'), saved(tiny_run()))
    return tmp_path / 'c.pt'


def error_of(path):
    """The one-line message with which a file is refused."""
    with pytest.raises(ValueError) as error:
        load_checkpoint(str(path))
    assert str(path) in str(error.value) and '\n' not in str(error.value)
    return str(error.value)


# -----------------------------------------------------------------------------
# loading

@pytest.mark.parametrize('prefix', ['_orig_mod.module.', 'module._orig_mod.'])
def test_names_lose_the_prefixes_of_compile_and_ddp(path, prefix):
    checkpoint = load_checkpoint(str(path))
    torch.save({**checkpoint, 'model': {prefix + k: v for k, v in checkpoint['model'].items()}}, path)
    assert same(load_checkpoint(str(path)), checkpoint)


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


def test_no_flipped_bit_is_loaded_as_a_number(path):
    """torch.load alone loads nearly all of them, which shows that the flips do harm."""
    data, expected, rng = path.read_bytes(), load_checkpoint(str(path)), np.random.default_rng(0)
    refused, silent = 0, 0
    for _ in range(80):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            assert same(load_checkpoint(str(path)), expected)
        except ValueError as e:
            refused += 1
            assert str(path) in str(e) and '\n' not in str(e)
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter('ignore')
            silent += not same(torch.load(path, weights_only=True), expected)
    assert refused > 40 and silent > 40


def test_no_flipped_bit_of_the_list_of_records_is_loaded(path):
    """No checksum covers it. One bit makes a record a folder: torch then returns uninitialized memory."""
    torch.save({'model': {'w': torch.arange(9.0)}, 'model_args': {}}, path)
    data, expected = path.read_bytes(), load_checkpoint(str(path))
    start = data.rindex(b'PK\1\2')  # the last entry and all that follows
    for at in range(start, len(data)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:])
            with contextlib.suppress(ValueError):
                assert same(load_checkpoint(str(path)), expected), f'byte {at - start}, bit {bit}'
    path.write_bytes(data[:start + 38] + bytes([data[start + 38] ^ 0x10]) + data[start + 39:])
    assert 'the list of records is invalid' in error_of(path)


@pytest.mark.parametrize('content, words', [
    (None, 'cannot be read: No such file'), (b'', 'damaged or not a checkpoint: File is not a zip file'),
    ({'model': {}}, 'is not a hotloop or nanoGPT checkpoint'), ('zip', 'damaged or not a checkpoint')])
def test_a_file_that_is_not_a_checkpoint_is_an_error(tmp_path, content, words):
    path = tmp_path / 'c.pt'
    if content == 'zip':
        with zipfile.ZipFile(path, 'w') as z:
            z.writestr('a.txt', 'text')
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    assert words in error_of(path)


class MakesFolder:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize('new', [True, False])
def test_loading_never_runs_code(path, tmp_path, new):
    """In a zip file, or in the single pickle that torch wrote before version 1.6."""
    content = {'model': {}, 'model_args': {}, 'x': MakesFolder(tmp_path / 'ran')}
    torch.save(content, path, _use_new_zipfile_serialization=new)
    torch.load(path, weights_only=False)
    (tmp_path / 'ran').rmdir()  # so the code works
    message = error_of(path)
    rejected = f'was rejected: it is not plain data ({os.mkdir.__module__}.mkdir) and could run code; save it'
    assert (rejected if new else 'not a zip file') in message
    assert 'weights_only' not in message and not (tmp_path / 'ran').exists()


def test_a_torch_whose_loader_is_not_safe_is_refused(path, monkeypatch):
    monkeypatch.setattr(torch, '__version__', TorchVersion('2.9.1+cpu'))
    with pytest.raises(ValueError, match=r'2\.9\.1.*CVE-2026-24747.*pip install'):
        load_checkpoint(str(path))


# -----------------------------------------------------------------------------
# saving

def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, 'No space left on device')


def write_other_bytes(checkpoint, f, save=torch.save):
    """As when memory fails between the checksum of a record and its write."""
    save(checkpoint, f)
    f.seek(1000)
    f.write(b'\0\1\2\3' * 9)


@pytest.mark.parametrize('target, error, words', [
    ('os.fsync', fail, 'No space left on device'), ('os.replace', fail, 'No space left on device'),
    ('torch.save', write_other_bytes, 'the checksum of record .* does not match')])
def test_a_save_that_fails_leaves_the_old_file_and_gives_the_space(path, monkeypatch, target, error, words):
    data = path.read_bytes()
    monkeypatch.setattr(target, error)
    match = rf'c\.pt could not be written: {words}'
    with pytest.raises(ValueError, match=match):
        save_checkpoint(str(path), saved(tiny_run(steps=2)))
    assert os.listdir(path.parent) == ['c.pt'] and path.read_bytes() == data


def test_a_save_into_a_folder_that_is_gone_is_an_error(path):
    shutil.rmtree(path.parent)
    with pytest.raises(ValueError, match=r'c\.pt could not be written: No such file or directory$'):
        save_checkpoint(str(path), {'w': torch.ones(3)})


@pytest.mark.parametrize('links', [True, False])
def test_the_old_file_keeps_a_second_name_that_is_never_overwritten(path, monkeypatch, links):
    """By a link, or by a copy where the file system has none."""
    if not links:
        monkeypatch.setattr(os, 'link', fail)
    old, first = path.parent / 'old.pt', path.read_bytes()
    for steps in (2, 3):
        save_checkpoint(str(path), saved(tiny_run(steps=steps)), keep_old=old)
        assert old.read_bytes() == first and load_checkpoint(str(path))['iter_num'] == steps


# -----------------------------------------------------------------------------
# what a run saves and restores

def test_a_snapshot_stays_as_it_is_while_the_run_goes_on(tmp_path):
    """And the file is the same to the byte: the tied matrix is in it once."""
    run, undisturbed = (tiny_run('muon', preset='modern', tie=True) for _ in range(2))
    checkpoint = saved(run)
    copy = snapshot(checkpoint, {})
    for name, value in (('a', checkpoint), ('b', copy)):
        (tmp_path / name).mkdir()
        save_checkpoint(str(tmp_path / name / 'c.pt'), value)
    assert (tmp_path / 'a' / 'c.pt').read_bytes() == (tmp_path / 'b' / 'c.pt').read_bytes()
    for o in run.optimizers:
        o.step()
    assert same(copy, saved(undisturbed)) and not same(checkpoint, copy)


def test_a_checkpoint_has_nanogpts_names_and_plain_values(path):
    checkpoint = load_checkpoint(str(path))
    assert set(checkpoint) == {'model', 'optimizer', 'scaler', 'model_args', 'iter_num', 'best_val_loss',
                               'config', 'state', 'tokenizer'}
    assert set(checkpoint['model_args']) == {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias',
                                             'vocab_size', 'dropout'}
    tied = [checkpoint['model'][name].data_ptr() for name in ('lm_head.weight', 'transformer.wte.weight')]
    assert tied[0] == tied[1], 'the tied matrix was saved twice'


def test_weights_that_are_not_finite_are_not_saved():
    run = tiny_run()
    run.model.transformer.wte.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match='step 1: weights are not finite'):
        saved(run)


@pytest.mark.parametrize('change, words', [
    (lambda c: c.pop('optimizer'), r'of 0 optimizers, not of 1 \(best\.pt has none\); .*--init_from=PATH'),
    (lambda c: c['optimizer']['param_groups'].pop(), r'has groups of \[\d+\] parameters, .*--init_from=PATH'),
    (lambda c: c['optimizer']['param_groups'][0]['params'].pop(), r'groups of \[\d, \d\] parameters, not'),
    (lambda c: c['optimizer']['state'][0].update(exp_avg=torch.zeros(2, 3)),
     r'exp_avg has shape \(2, 3\), not \(11, 8\)'),
    (lambda c: c['optimizer']['state'][0].pop('exp_avg_sq'), 'is not AdamW: its state is step'),
    (lambda c: c['optimizer']['state'][0].update(step=torch.zeros(5)), r'step has shape \(5,\), not \(\)')])
def test_an_optimizer_state_that_does_not_fit_is_an_error(change, words):
    """torch does not compare shapes: AdamW's fused kernel wrote behind an exp_avg that was too short."""
    run, checkpoint = tiny_run(), saved(tiny_run())
    change(checkpoint)
    with pytest.raises(ValueError, match=words):
        restore(checkpoint, run.optimizers, NO_SCALER)


def test_the_state_of_nanogpt_and_of_earlier_versions_is_read():
    assert state_from({'iter_num': 3, 'best_val_loss': torch.tensor(4.5)}) == RunState(3, 4.5)
    earlier = {'iter_num': 7, 'best_val_loss': 2.0, 'evaluation_left': True, 'skips': [[5, 20]]}
    assert state_from({'iter_num': 7, 'state': earlier}) == RunState(7, 2.0)
