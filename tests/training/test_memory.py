"""auto_batch finds what fits, by trial; a batch that does not fit ends with one that does."""

import re
from types import SimpleNamespace

import pytest
import torch

from hotloop.system.distributed import Env
from hotloop.training.memory import choose_batch_size, choose_loss_chunks, memory_advice
from model import GPT, GPTConfig

GB = 2**30


@pytest.fixture
def model():
    return GPT(GPTConfig(block_size=16, vocab_size=61, n_layer=1, n_head=2, n_embd=16))


def config(batch_size, accumulation, recompute='none'):
    return SimpleNamespace(batch_size=batch_size, gradient_accumulation_steps=accumulation,
                           loss_chunks='auto', recompute=recompute)


SPLIT = SimpleNamespace(T=16, num_bytes=0)


def short_of_memory(monkeypatch, most, error=None):
    """A machine without memory for more than `most` sequences. Returns the batches that are tried."""
    original, tried = GPT.forward, []

    def forward(self, idx, targets=None, cache=None):
        tried.append(len(idx))
        if len(idx) > most:
            raise error or RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8")
        return original(self, idx, targets, cache)
    monkeypatch.setattr(GPT, 'forward', forward)
    return tried


@pytest.mark.parametrize('error', [
    None, torch.OutOfMemoryError('CUDA out of memory. Tried to allocate'), MemoryError(),
    RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')])
def test_the_largest_micro_batch_that_fits_the_same_step_is_found(model, monkeypatch, error):
    """24 sequences a step, of which 24, 12 and 8 do not fit; no setting, weight or gradient changes."""
    tried, cfg = short_of_memory(monkeypatch, 7, error), config(12, 2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert choose_batch_size(model, SPLIT, Env(), cfg) == 6 and tried == [24, 12, 8, 6]
    assert cfg == config(12, 2) and model.loss_chunks == 1
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_processes_take_what_fits_on_all_of_them(model, monkeypatch):
    """Here 8 sequences fit, on another process only 4; a share is 16."""
    tried = short_of_memory(monkeypatch, 8)

    class Two(Env):
        def sum(self, values):
            return values + float(tried[-1] > 4)
    assert choose_batch_size(model, SPLIT, Two(0, 2), config(16, 2)) == 4


def test_a_cpu_is_not_asked_for_more_than_half_its_memory(model, monkeypatch):
    """It would grant it, and kill the process: an estimate comes before the trial."""
    tried = short_of_memory(monkeypatch, 100)
    sequence = 16 * (12 * 61 + 40 * 16)
    memory = 2 * (5 * sequence + 8 * model.num_params())
    monkeypatch.setattr('hotloop.training.memory.device_memory', lambda device: memory)
    assert choose_batch_size(model, SPLIT, Env(), config(24, 1)) == 4 and tried == [4]


def test_the_trial_and_the_estimate_see_what_is_recomputed(model, monkeypatch):
    """Here a layer keeps 4 of 40 bytes; the trial runs each block a second time in its backward pass."""
    deep = GPT(GPTConfig(block_size=16, vocab_size=61, n_layer=10, n_head=2, n_embd=16))
    kept = 16 * (12 * 61 + (40 + 9 * 4) * 16)
    memory = 2 * (4 * kept + 8 * deep.num_params())
    monkeypatch.setattr('hotloop.training.memory.device_memory', lambda device: memory)
    calls = []
    deep.transformer.h[3].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert choose_batch_size(deep, SPLIT, Env(), config(4, 1)) == 1 and len(calls) == 1
    assert choose_batch_size(deep, SPLIT, Env(), config(4, 1, 'full')) == 4 and len(calls) == 3


@pytest.mark.parametrize('error, kind, words', [
    (None, ValueError, 'not even one sequence of 16 tokens fits in the memory of cpu'),
    (RuntimeError('CUDA error: illegal memory access'), RuntimeError, 'illegal memory access')])
def test_what_does_not_fit_at_all_and_any_other_error_end_the_search(model, monkeypatch, error, kind, words):
    short_of_memory(monkeypatch, 0, error)
    with pytest.raises(kind, match=words):
        choose_batch_size(model, SPLIT, Env(), config(12, 2))


def test_the_message_names_what_does_not_fit():
    full, batches = MemoryError(), SimpleNamespace(micro_batch=8, global_batch=16, split=SPLIT)
    assert 'of cpu (MemoryError); reduce n_layer' in memory_advice(None, Env(), full)
    assert 'a step of 16 sequences' in memory_advice(batches, Env(), full)
    assert re.search('a micro-batch of 8 sequences of 16 .* cpu; --auto_batch .* --recompute=full',
                     memory_advice(batches, Env(), RuntimeError('out of memory')))


@pytest.mark.parametrize('env, per_logit', [
    (Env(), 12), (Env(dtype=torch.bfloat16), 12),
    (Env(dtype=torch.bfloat16, compile=True), 5), (Env(compile=True), 10)])
def test_the_loss_is_computed_in_chunks_if_its_logits_would_fill_the_memory(monkeypatch, env, per_logit):
    """A compiled step needs fewer bytes for each logit."""
    monkeypatch.setattr('hotloop.training.memory.device_memory', lambda device: 80 * GB)
    most = 80 * GB // 4 // per_logit // 50304  # tokens
    assert choose_loss_chunks('auto', most, 50304, env) == 1
    chunks = choose_loss_chunks('auto', most + 1, 50304, env)
    assert 4 <= chunks <= 5 and per_logit * (most + 1) * 50304 / chunks <= 80 * GB / 16
    assert choose_loss_chunks(4, 12 * 1024, 50304, env) == 4
    assert choose_loss_chunks(99, 10, 50304, env) == 10
