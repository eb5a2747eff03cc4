"""The loss in chunks; auto_batch finds by trial what fits; what does not fit is named."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of
from test_forecast import GPU, gpt

from hotloop.system.distributed import Env
from hotloop.training import memory
from hotloop.training.memory import choose_batch_size, choose_loss_chunks, memory_advice, trial_fits
from model import GPT
from train import TrainConfig

SPLIT = SimpleNamespace(T=64, num_bytes=0)


@pytest.mark.parametrize('env, per_logit', [
    (Env(dtype=torch.bfloat16), 12), (Env(dtype=torch.bfloat16, compile=True), 5), (Env(compile=True), 10)])
def test_logits_that_would_fill_the_memory_are_computed_in_chunks(env, per_logit):
    """A compiled step needs fewer bytes for each logit."""
    choose = partial(choose_loss_chunks, vocab_size=50304, env=env, memory=80e9)
    most = int(80e9 / 4 / per_logit / 50304)  # tokens
    assert choose('auto', most) == 1
    chunks = choose('auto', most + 1)
    assert 4 <= chunks <= 5 and per_logit * (most + 1) * 50304 / chunks <= 80e9 / 16
    assert choose(4, 12 * 1024) == 4 and choose(99, 10) == 10


@pytest.mark.parametrize('vocab_size, env, chunks', [
    (50304, GPU, 1), (256000, GPU, 6), (50304, Env(), 48), (50304, Env(compile=True), 1)])
def test_the_loss_of_a_frozen_head_is_chunked(vocab_size, env, chunks):
    assert choose_loss_chunks('auto', 6144, vocab_size, env, frozen=True, memory=85e9) == chunks


@pytest.mark.parametrize('error', [
    torch.OutOfMemoryError('CUDA out of memory. Tried to allocate'),
    RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')])
def test_a_trial_finds_out_whether_a_micro_batch_fits(monkeypatch, error):
    """It changes no weight and leaves no gradient. Any other error ends it."""
    model, forward = gpt(), GPT.forward
    before = [p.clone() for p in model.parameters()]

    def limited(self, idx, targets=None):
        if len(idx) > 7:
            raise error
        return forward(self, idx, targets)
    monkeypatch.setattr(GPT, 'forward', limited)
    fits = partial(trial_fits, model, env=Env(), cfg=TrainConfig(), reserve=1000)
    assert fits(7) and not fits(8)
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    error = RuntimeError('CUDA error: illegal memory access')
    with pytest.raises(RuntimeError, match='illegal'):
        fits(8)


def auto_batch(monkeypatch, most, env=GPU):
    """Run choose_batch_size() for 16 x 2 sequences on a GPU where `most` fit."""
    monkeypatch.setattr(memory, 'kept_on_device', lambda split, env: False)
    monkeypatch.setattr(memory, 'trial_fits', lambda model, batch, *_: batch <= most)
    cfg = TrainConfig(batch_size=16, gradient_accumulation_steps=2)
    return choose_batch_size(gpt(), SPLIT, env, cfg)


def test_the_largest_micro_batch_of_the_same_step_is_taken(monkeypatch):
    """Of two processes, what fits on both: here 16 sequences, a share, and on another process only 4."""
    class Two(Env):
        def any(self, flag):
            asked.append(flag)
            return flag or len(asked) < 3
    asked = []
    assert auto_batch(monkeypatch, 1000) == 32 and auto_batch(monkeypatch, 15) == 8
    assert auto_batch(monkeypatch, 16, Two(0, 2, GPU.device)) == 4 and not any(asked)
    assert 'auto_batch=True: not even one sequence of 64 tokens' in error_of(auto_batch, monkeypatch, 0)
    assert 'auto_batch=True tries sizes on a GPU' in error_of(auto_batch, monkeypatch, 99, Env())


def test_the_message_names_what_does_not_fit():
    batches = SimpleNamespace(micro_batch=9, split=SPLIT)
    assert 'of cpu; reduce n_layer' in memory_advice(None, Env())
    for env, remedy in ((GPU, '--auto_batch'), (Env(), 'halve --batch_size')):
        message = memory_advice(batches, env)
        assert 'a micro-batch of 9 sequences of 64 tokens' in message and remedy in message
