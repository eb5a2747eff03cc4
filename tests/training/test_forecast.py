"""The forecast of --dry_run: the count is what a real step needs; nothing is downloaded or written."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, WITH_BITSANDBYTES, contents, error_of, noise, write_bins
from torch.utils.flop_counter import FlopCounterMode

import train
from hotloop.system.distributed import Env
from hotloop.training.forecast import (
    MACHINES,
    LiveBytes,
    activation_bytes,
    flops_of,
    memory_of,
)
from hotloop.training.optim import build_optimizers
from hotloop.training.parallel import set_blocks
from hotloop.weights.lora import LoRAConfig, add_adapters, trainable
from model import GPT, GPTConfig
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


def test_frozen_weights_cost_no_products_for_their_gradients():
    """Torch counts fewer: the first block has no gradients below its first adapter."""
    lora = replace(LORA, lora_targets='mlp')
    model, ids = gpt(lora, n_layer=3), torch.zeros(1, 64, dtype=torch.int64)
    forward, both = flops_of(model, 64)
    assert flops_of(gpt(replace(lora, quantize='nf4'), n_layer=3), 64) == (forward, both)
    counted = []
    for grad in (False, True):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
            loss = model(ids, ids).sum()
            if grad:
                loss.backward()
        counts = counter.get_flop_counts()['Global'].items()
        counted.append(sum(n for op, n in counts if 'attention' not in str(op)) / 64)
    attention = 6 * 3 * 32 * (64 + 1)  # 3 blocks, 32 channels, half of 64 + 1 keys, two products
    skipped = 2 * (4 * 32 * 32 + 4 * 32 * 32 + 4 * 32)  # by attention, c_fc and its A
    in_place = 2 * 3 * (4 * 128 + 4 * 32)  # forward products with B, which torch does not count
    assert counted == pytest.approx([forward - in_place - attention / 3,
                                     both - in_place - attention - skipped])


# -----------------------------------------------------------------------------
# counting

@pytest.mark.parametrize('chunks, recompute', [
    (4, 'none'), *(pytest.param(1, recompute, marks=pytest.mark.slow)
                   for recompute in ('none', 'selective', 'full'))])
@pytest.mark.parametrize('lora, settings', [
    (None, {}), (None, dict(preset='modern')), (None, GATED), (LORA, GATED), (QLORA, dict(bias=True)),
    (LoRAConfig(lora_rank=4, lora_targets='mlp'), {})])
def test_the_count_of_three_blocks_is_what_a_real_step_needs(lora, settings, chunks, recompute):
    """In bytes, also if adapters spare the first block a gradient."""
    model, ids = gpt(lora, **settings), torch.zeros(3, 64, dtype=torch.int64)
    model.loss_chunks = chunks
    set_blocks(model, recompute)
    for p in trainable(model):
        p.grad = torch.zeros_like(p)
    gradients = [p.grad for p in trainable(model)]
    with LiveBytes([ids, *model.parameters(), *model.buffers(), *gradients]) as live:
        model(ids, ids).sum().backward()
    counted = activation_bytes(model.config, 3, torch.float32, chunks, recompute, lora)
    assert abs(live.peak - counted) < 200  # the state of the dropout generator


@pytest.mark.parametrize('settings', [{}, dict(preset='modern')])
@pytest.mark.parametrize('optimizer', ['adamw', 'muon', pytest.param('adamw8bit', marks=WITH_BITSANDBYTES)])
def test_the_state_of_the_optimizer_is_counted(optimizer, settings):
    """With 8-bit moments within 2%: those of vectors stay float32."""
    model, cfg, held = gpt(n_embd=128, **settings), TrainConfig(optimizer=optimizer), {}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for o in build_optimizers(model, cfg, Env()):
        o.found_inf = torch.zeros(())
        o.step()
        for state in o.state.values():
            tensors = [value for value in state.values() if torch.is_tensor(value) and value.dim()]
            held.update({tensor.data_ptr(): tensor.nbytes for tensor in tensors})  # some are shared
    rel = 0.02 if optimizer == 'adamw8bit' else 0
    forecast = memory_of(model.config, cfg, None, Env(), 1e12)['optimizer']
    assert forecast == pytest.approx(sum(held.values()), rel=rel)


@pytest.mark.parametrize('settings', [dict(bias=True), GATED])
@pytest.mark.parametrize('lora', [LORA, QLORA])
def test_frozen_weights_adapters_and_their_optimizer_are_counted(settings, lora):
    model = gpt(lora, torch.bfloat16, **settings)
    parts = memory_of(model.config, TrainConfig(batch_size=1), lora, GPU, 85e9)
    learned = sum(p.nbytes for p in trainable(model))
    assert parts['adapters'] == parts['gradients'] == learned and parts['optimizer'] == 2 * learned
    held = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert parts['frozen weights'] == held - learned


def test_a_single_micro_batch_starts_without_gradients():
    one, two = (memory_of(GPTConfig(**TINY), TrainConfig(batch_size=8, gradient_accumulation_steps=n), None,
                          GPU, 85e9) for n in (1, 2))
    assert one['activations and logits'] > one['weights'] and one['gradients'] == 0
    assert sum(two.values()) - sum(one.values()) == one['weights']


# -----------------------------------------------------------------------------
# the lines

@pytest.fixture
def forecast_of(tmp_path, monkeypatch, capsys):
    """forecast_of(*words, **flags) -> what --dry_run prints; nothing may be written or downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('hotloop.data.download.download', lambda *args: pytest.fail('a download'))
    monkeypatch.setattr('hotloop.training.forecast.measure_flops', lambda device, dtype: 1e12)
    monkeypatch.setattr('hotloop.training.forecast.device_memory', lambda device: 10e9)

    def run(*words, **flags):
        before = contents(tmp_path)
        shape = {} if words or 'init_from' in flags else {'n_layer': 2, 'n_embd': 32, 'n_head': 2}
        flags = {'data_dir': 'data', 'batch_size': 2, **shape, **flags}
        assert train.main(['--dry_run', *words, *(f'--{k}={v}' for k, v in flags.items())]) == 0
        assert contents(tmp_path) == before
        return capsys.readouterr().out
    return run


@pytest.mark.slow
def test_an_absent_dataset_is_assumed(forecast_of):
    """Its ids are GPT-2's, and with max_epochs the time is unknown."""
    printed = forecast_of(dataset='wikitext103')
    assert 'assumes a vocabulary of 50,304 ids, because data/wikitext103' in printed
    assert '1,609,728 in embeddings' in printed and 'epochs' not in printed
    for name in (*MACHINES, 'this cpu'):
        assert re.search(rf'^{name} +[\d.]+ GB +[\d,]+ +\d+\w( \d+\w)?  fits$', printed, re.M), name
    for numbers, flags in ((r'[\d,]+ +unknown', dict(max_epochs=2)),
                           (r'[\d,]+ +unknown', dict(time_budget=9)),
                           ('unknown +unknown', dict(dtype='float32'))):
        assert re.search(rf'^A100 40GB +42\.3 GB +{numbers}  fits$', forecast_of(dataset='no', **flags), re.M)
    assert 'assumes a vocabulary of 1,024 ids' in forecast_of(dataset='stdlib')
    printed = forecast_of(dataset='no', batch_size=1024, loss_chunks=1)
    assert re.search('T4 .* does not fit; lower batch_size or use', printed)


def test_a_dataset_is_counted(forecast_of, tmp_path):
    write_bins(tmp_path / 'data' / 'mine', noise(4001), noise(487))
    flags = dict(dataset='mine', block_size=16, gradient_accumulation_steps=4)
    assert 'run: 63 steps of 128 tokens, 8,064 tokens, 2.02 epochs' in forecast_of(max_epochs=2, **flags)
    assert re.search(r'disk: [\d.]+ MB: 2 checkpoints of [\d.]+ kB', forecast_of(**flags))
    assert 'run: 50 steps' in forecast_of(max_iters=50, warmup_iters=0.1, **flags)


@pytest.mark.slow  # a model of 2.6 billion parameters, on the meta device
def test_weights_are_not_needed_but_their_shape_is(forecast_of, train_tiny, tmp_path):
    """Those of GPT-2 and of the cards are known; a checkpoint or a folder has its own."""
    assert 'parameters: 124,439,808' in forecast_of(init_from='gpt2')
    assert '--n_layer: n_layer=3, but gpt2 has 12' in error_of(forecast_of, init_from='gpt2', n_layer=3)
    card = str(ROOT / 'config' / 'lora_r16.py')
    printed = ' '.join(forecast_of(card, batch_size=8).split())
    assert 'parameters: 2,614,341,888' in printed and 'for a micro-batch of 8 x 768 tokens' in printed
    assert 'frozen weights' in printed and 'vocabulary of 256,000 ids' in printed
    train_tiny(max_iters=1)
    out, new = tmp_path / 'out', tmp_path / 'new'
    for settings in (dict(init_from=out, out_dir=new), dict(init_from='resume', out_dir=out)):
        printed = forecast_of(dataset='tiny', **settings)
        assert '8,224 in embeddings' in printed
        assert ('; 1 are done' in printed) == (settings['out_dir'] == out)


def test_the_size_of_a_checkpoint(train_tiny, tmp_path):
    """Beside the tensors it has settings and names; that of a run with adapters has no frozen weights."""
    settings = dict(n_embd=128, n_layer=3, block_size=16, vocab_size=300)
    train_tiny('plain', max_iters=1, **settings)
    train_tiny('tuned', max_iters=1, init_from=tmp_path / 'plain', lora_rank=32, **settings)
    for out, lora in (('plain', None), ('tuned', LoRAConfig(lora_rank=32))):
        parts = memory_of(gpt(**settings).config, TrainConfig(), lora, Env(), 1e12)
        weights = parts['adapters' if lora else 'weights']
        for name, size in (('ckpt.pt', weights + parts['optimizer']), ('best.pt', weights)):
            assert 0 <= (tmp_path / out / name).stat().st_size - size < 6e4, (out, name)
