"""AdamW with 8-bit moments: what it keeps, how it resumes, and where it does not run."""

import importlib.util
import math

import pytest
import torch
from conftest import error_of, load, same

import train
from hotloop.training.adamw8bit import adamw8bit
from hotloop.training.footprint import Need
from model import GPT, GPTConfig

missing = importlib.util.find_spec('bitsandbytes') is None
skip = pytest.mark.skipif(missing, reason='needs the package bitsandbytes')
SETTINGS = dict(optimizer='adamw8bit', dropout=0.1, n_embd=64)


@skip
@pytest.mark.slow  # the import of the package takes seconds
def test_a_run_resumes_with_the_same_bits_from_bytes(train_tiny, tmp_path):
    """Which load as plain data, and make the checkpoint smaller."""
    assert train_tiny('whole', max_iters=6, **SETTINGS) == 0
    train_tiny('adamw', max_iters=6, **SETTINGS | {'optimizer': 'adamw'})
    assert train_tiny(max_iters=3, lr_decay_iters=6, **SETTINGS) == 0
    assert train_tiny(max_iters=6, init_from='resume', **SETTINGS) == 0
    whole, parts, adamw = (load(tmp_path / out / 'ckpt.pt') for out in ('whole', 'out', 'adamw'))
    assert same(whole['model'], parts['model']) and same(whole['optimizer'], parts['optimizer'])
    moments = [values['__bnb_optimizer_quant_state__'] for values in whole['optimizer']['state'].values()]
    assert {m['state1'].dtype for m in moments} == {torch.uint8, torch.float32}
    assert {m['state1'].dtype for m in moments if m['state1'].numel() >= 4096} == {torch.uint8}
    sizes = [(tmp_path / out / 'ckpt.pt').stat().st_size for out in ('whole', 'adamw')]
    assert sizes[0] < 0.65 * sizes[1] and abs(whole['best_val_loss'] - adamw['best_val_loss']) < 0.05


@skip
@pytest.mark.slow  # the import of the package takes seconds
def test_a_step_that_is_not_finite_changes_nothing():
    p = torch.nn.Parameter(torch.ones(4096))
    optimizer = adamw8bit([{'params': [p]}], 0.1, (0.9, 0.95), torch.device('cpu'))
    p.grad = torch.full_like(p, math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert (p == 1).all() and not optimizer.state
    optimizer.found_inf, p.grad = torch.zeros(()), torch.ones(4096)
    optimizer.step()
    assert (p < 0.95).all()


@skip
@pytest.mark.slow  # the import of the package takes seconds
def test_a_moment_that_does_not_fit_is_an_error(train_tiny, tmp_path):
    train_tiny(max_iters=2, **SETTINGS)
    path = tmp_path / 'out' / 'ckpt.pt'
    checkpoint = load(path)
    checkpoint['optimizer']['state'][0]['__bnb_optimizer_quant_state__']['absmax1'] = torch.zeros(3)
    torch.save(checkpoint, path)
    assert 'absmax1 has shape (3,), not (65,)' in error_of(train_tiny, init_from='resume', **SETTINGS)


@skip
@pytest.mark.slow  # the import of the package takes seconds
def test_where_the_package_does_not_run_a_sentence_names_the_device(monkeypatch):
    import bitsandbytes

    def fail(self):
        raise NotImplementedError('no kernel')
    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, 'step', fail)
    error = error_of(adamw8bit, [], 0.1, (0.9, 0.95), torch.device('cpu'))
    assert error == ('optimizer=adamw8bit: bitsandbytes does not run on cpu (no kernel); '
                     'use --optimizer=adamw')


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    error = error_of(train.read_settings, ['--optimizer=adamw8bit', '--dataset=tiny'])
    assert "optimizer='adamw8bit' needs bitsandbytes: pip install bitsandbytes" in error


def test_the_moments_are_forecast():
    """Within 2%: vectors stay float32."""
    with torch.device('meta'):
        model = GPT(GPTConfig(vocab_size=50304))
    assert Need(model, train.TrainConfig(optimizer='adamw8bit')).optimizer == pytest.approx(
        2 * model.num_params() * (1 + 4 / 256), rel=0.02)
