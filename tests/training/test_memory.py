"""The count of a step is what a real step needs; auto_batch finds what fits; the loss in chunks."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of

import model as model_file
from hotloop.system.distributed import Env
from hotloop.training.memory import (
    MemoryEstimate,
    activation_bytes,
    choose_batch_size,
    choose_loss_chunks,
    count_step,
    memory_advice,
    trial_fits,
)
from hotloop.training.optim import build_optimizers
from hotloop.training.shard import set_blocks
from hotloop.weights.families import model_args_from
from hotloop.weights.lora import LoRAConfig, add_adapters, trainable
from model import GPT, GPTConfig, config_from
from train import TrainConfig

TINY = dict(block_size=64, vocab_size=101, n_layer=4, n_head=2, n_embd=32)
LORA, QLORA = LoRAConfig(lora_rank=4), LoRAConfig(lora_rank=4, quantize='nf4')
GATED = dict(preset='modern', mlp='swiglu', n_kv_head=1)
GPU = Env(device=torch.device('cuda'), dtype=torch.bfloat16)


def gpt(lora=None, dtype=torch.float32, **settings):
    model = GPT(GPTConfig(**{**TINY, **settings}))
    if lora:
        add_adapters(model, lora, {}, Env(dtype=dtype), 0)
    return model


# -----------------------------------------------------------------------------
# counting

@pytest.mark.parametrize('chunks, recompute', [(1, 'none'), (4, 'none'), (1, 'selective'), (1, 'full')])
@pytest.mark.parametrize('lora, settings', [
    (None, {}), (None, dict(preset='modern')), (None, GATED), (LORA, GATED), (QLORA, dict(bias=True)),
    (LoRAConfig(lora_rank=4, lora_targets='mlp'), {})])
def test_the_count_of_three_blocks_is_what_a_real_step_needs(lora, settings, chunks, recompute):
    """In bytes, also if adapters spare the first block a gradient."""
    model = gpt(lora, **settings)
    model.loss_chunks = chunks
    set_blocks(model, recompute)
    counted = activation_bytes(model.config, 3, torch.float32, chunks, recompute, lora)
    assert abs(count_step(model, 3) - counted) < 200  # the state of the dropout generator


def test_attention_weights_are_not_stored():
    """Of T x T; the activations of a context of twice the length are twice as many."""
    short, long = (activation_bytes(GPTConfig(**TINY | dict(block_size=T, vocab_size=8, position='rope')),
                                    1, torch.float32, 1) for T in (512, 1024))
    assert 1.9 < long / short < 2.01


@pytest.mark.parametrize('settings', [{}, dict(preset='modern'), dict(mlp='swiglu', bias=True)])
@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_the_state_of_the_optimizer_is_counted(optimizer, settings):
    model, cfg, held = gpt(**settings), TrainConfig(optimizer=optimizer), 0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for o in build_optimizers(model, cfg, Env()):
        o.found_inf = torch.zeros(())
        o.step()
        for state in o.state.values():
            held += sum(value.nbytes for value in state.values() if value.dim())
    assert MemoryEstimate(model.config, cfg).optimizer == held


@pytest.mark.parametrize('settings', [dict(bias=True), GATED])
@pytest.mark.parametrize('lora', [LORA, QLORA])
def test_frozen_weights_adapters_and_their_optimizer_are_counted(settings, lora):
    model = gpt(lora, torch.bfloat16, **settings)
    parts = MemoryEstimate(model.config, TrainConfig(batch_size=1), lora).parts(1, GPU, 85e9, 'none')
    learned = sum(p.nbytes for p in trainable(model))
    assert parts['adapters'] == parts['gradients'] == learned and parts['optimizer'] == 2 * learned
    held = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert parts['frozen weights'] == held - learned


def test_a_single_micro_batch_starts_without_gradients():
    one, two = (MemoryEstimate(GPTConfig(**TINY), TrainConfig(batch_size=8, gradient_accumulation_steps=n))
                for n in (1, 2))
    parts = one.parts(8, GPU, 85e9, 'none')
    assert parts['activations and logits'] > one.weights and parts['gradients'] == 0
    assert sum(two.parts(8, GPU, 85e9, 'none').values()) - sum(parts.values()) == one.weights


GEMMA_2_2B = dict(  # its published config.json, without what transformers assumes
    model_type='gemma2', num_hidden_layers=26, hidden_size=2304, num_attention_heads=8,
    num_key_value_heads=4, intermediate_size=9216, vocab_size=256000, max_position_embeddings=8192,
    rms_norm_eps=1e-6, hidden_activation='gelu_pytorch_tanh')


@pytest.mark.slow
@pytest.mark.parametrize('quantize, recompute, expected', [
    ('nf4', 'full', 7.63), ('nf4', 'none', 29.71), ('none', 'selective', 11.29)])
def test_adapters_of_rank_16_on_gemma_2_2b(quantize, recompute, expected):
    """In GB, 8 x 768 tokens on an H100, uncompiled."""
    config = config_from(model_args_from({**GEMMA_2_2B, 'max_position_embeddings': 768}, 'config.json'))
    cfg = TrainConfig(batch_size=8, gradient_accumulation_steps=2)
    estimate = MemoryEstimate(config, cfg, LoRAConfig(lora_rank=16, quantize=quantize))
    parts = estimate.parts(8, GPU, 85e9, recompute)
    assert sum(parts.values()) / 1e9 == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='ru_maxrss in kilobytes')
def test_a_real_process_grows_by_the_count():
    """Within 25%."""
    settings = dict(block_size=512, vocab_size=8192, n_head=4, n_embd=256, n_layer=4, preset='modern')
    script = f'''
import resource, torch
from model import GPT, GPTConfig
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.set_num_threads(2)  # with one, gradients of attention take other buffers
model = GPT(GPTConfig(**{settings!r}))
ids = torch.zeros(1, 512, dtype=torch.int64)
model(ids[:, :8], ids[:, :8]).sum().backward()  # code and gradients
before = peak()
ids = torch.zeros(8, 512, dtype=torch.int64)
model(ids, ids).sum().backward()
print(peak() - before)
'''
    result = subprocess.run([sys.executable, '-c', script], cwd=Path(model_file.__file__).parent,
                            check=True, capture_output=True)
    counted = activation_bytes(GPTConfig(**settings), 8, torch.float32, 1)
    assert counted == pytest.approx(int(result.stdout), rel=0.25)


# -----------------------------------------------------------------------------
# the chunks of the loss

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


# -----------------------------------------------------------------------------
# the largest micro-batch

SPLIT = SimpleNamespace(T=64, num_bytes=0)


def config(batch_size, accumulation, **settings):
    return TrainConfig(batch_size=batch_size, gradient_accumulation_steps=accumulation, **settings)


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


def test_a_cpu_counts_what_fits_in_half_of_its_memory(monkeypatch):
    """Linux would grant more, and kill the process. 24 sequences: 5 fit, and 4 make the same step."""
    for recompute in ('none', 'full'):
        cfg, c = config(12, 2, recompute=recompute), gpt().config
        five = sum(MemoryEstimate(c, cfg).parts(5, Env(), 1e12, recompute).values())
        monkeypatch.setattr('hotloop.training.memory.device_memory', lambda device: 2 * five / 0.93)  # noqa: B023
        cfg = config(12, 2, recompute=recompute, loss_chunks=1)
        assert choose_batch_size(gpt(), SPLIT, Env(), cfg) == 4


def test_processes_take_what_fits_on_all_of_them(monkeypatch):
    """Here 16 sequences, a share, fit; on another process only 4."""
    class Two(Env):
        def any(self, flag):
            asked.append(flag)
            return flag or len(asked) < 3
    asked = []
    monkeypatch.setattr('hotloop.training.memory.device_memory', lambda device: 1e12)
    assert choose_batch_size(gpt(), SPLIT, Two(0, 2), config(16, 2)) == 4 and not any(asked)


def test_what_does_not_fit_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr('hotloop.training.memory.device_memory', lambda device: 1e3)
    error = error_of(choose_batch_size, gpt(), SPLIT, Env(), config(4, 1))
    assert 'auto_batch=True: not even one sequence of 64 tokens' in error


def test_the_message_names_what_does_not_fit():
    error, batches = RuntimeError('out of memory'), SimpleNamespace(micro_batch=8, split=SPLIT)
    assert 'of cpu (out of memory); reduce n_layer' in memory_advice(None, Env(), error)
    assert 'a micro-batch of 8 sequences of 64 tokens' in memory_advice(batches, Env(), error)
