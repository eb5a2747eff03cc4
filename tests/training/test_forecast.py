"""The forecast of --dry_run: counts equal those of real steps, and nothing is downloaded or written."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import contents, error_of, noise, write_bins
from torch.utils.flop_counter import FlopCounterMode

import train
from hotloop.system.distributed import Env
from hotloop.training.flops import flops_of
from hotloop.training.footprint import Need, activation_bytes, count_step, update_bytes
from hotloop.training.forecast import MACHINES, PARTS, advise, describe_model
from hotloop.training.memory import choose_loss_chunks
from hotloop.training.optim import build_optimizers, matrix_rows
from hotloop.training.shard import set_blocks
from hotloop.weights.families import settings_of
from hotloop.weights.lora import LoRAConfig, add_adapters, trainable
from model import GPT, GPTConfig, config_from
from train import TrainConfig

ROOT = Path(train.__file__).parent


def gpt(device, lora=None, dtype=torch.float32, **settings):
    tiny = dict(block_size=64, vocab_size=101, n_layer=2, n_head=2, n_embd=32)
    with torch.device(device):
        model = GPT(GPTConfig(**{**tiny, **settings}))
        if lora:
            add_adapters(model, lora, {}, Env(device=torch.device(device), dtype=dtype), 0)
    model.compute_dtype = dtype
    return model


LORA, QLORA = LoRAConfig(lora_rank=4), LoRAConfig(lora_rank=4, quantize='nf4')
GATED = dict(preset='modern', mlp='swiglu', n_kv_head=1)


@pytest.mark.parametrize('settings', [
    {}, dict(preset='modern'), dict(mlp='swiglu', n_layer=1, bias=True), dict(preset='modern', n_kv_head=1),
    dict(bias=True, lora=QLORA), dict(lora=LORA, **GATED)])
@pytest.mark.parametrize('chunks, recompute', [(1, 'none'), (4, 'none'), (1, 'selective'), (1, 'full')])
def test_a_step_on_the_meta_device_stores_what_a_real_step_stores(settings, chunks, recompute):
    """In bytes, when the loss begins and at most."""
    real, meta = gpt('cpu', **settings), gpt('meta', **settings)
    for model in (real, meta):
        model.loss_chunks = chunks
        set_blocks(model, recompute)
    for stored, counted in zip(count_step(real, 3), count_step(meta, 3), strict=True):
        # the state of the dropout generator is all that may differ
        assert abs(stored - counted) < 200 < stored


@pytest.mark.parametrize('lora, settings', [
    (None, dict(n_layer=5)), (None, dict(n_layer=7, preset='modern', block_size=32)),
    (replace(QLORA, lora_targets='mlp'), dict(n_layer=5))])
@pytest.mark.parametrize('dtype, recompute', [
    (torch.float32, 'none'), (torch.bfloat16, 'none'), (torch.bfloat16, 'selective')])
def test_two_blocks_tell_what_all_of_them_store(lora, settings, dtype, recompute):
    """A count of one and two blocks equals a full count, also if adapters spare the first one a gradient."""
    model = gpt('meta', lora, dtype, **settings)
    set_blocks(model, recompute)
    stored, most = count_step(model, 4)
    assert activation_bytes(model, 4, dtype, 1, recompute, lora) == (stored, most - stored)


def test_attention_weights_are_not_stored():
    """Of T x T; the activations of a context of twice the length are twice as many."""
    models = [gpt('meta', block_size=T, vocab_size=8, position='rope') for T in (512, 1024)]
    short, long = (activation_bytes(model, 1, torch.float32, 1)[0] for model in models)
    assert 1.9 < long / short < 2.01


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('settings', [{}, dict(preset='modern'), dict(mlp='swiglu', bias=True)])
def test_the_state_of_the_optimizer_is_counted(optimizer, settings):
    model, cfg = gpt('cpu', **settings), TrainConfig(optimizer=optimizer)
    optimizers = build_optimizers(model, cfg, Env())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for o in optimizers:
        o.found_inf = torch.zeros(())
        o.step()
    held = sum(value.nbytes for o in optimizers for state in o.state.values() for value in state.values()
               if value.dim())
    assert Need(model, cfg).optimizer == held


def test_what_muon_allocates_in_an_update_is_counted():
    """It decides where micro-batches are small. AdamW allocates nothing."""
    real, meta = (gpt(device, preset='modern', block_size=4) for device in ('cpu', 'meta'))
    allocated = update_bytes(meta, torch.bfloat16)
    assert update_bytes(real, torch.bfloat16) == allocated > 2 * sum(p.nbytes for p in matrix_rows(meta))
    cfg = TrainConfig(optimizer='muon', batch_size=1)
    assert Need(meta, cfg).parts(1, torch.bfloat16, 1)['update'] == allocated
    assert 'update' not in Need(meta, cfg).parts(500, torch.bfloat16, 1)
    assert 'update' not in Need(meta, TrainConfig(batch_size=1)).parts(1, torch.bfloat16, 1)


def test_one_micro_batch_starts_without_gradients():
    model = gpt('meta')
    one, two = (Need(model, TrainConfig(batch_size=8, gradient_accumulation_steps=n)) for n in (1, 2))
    difference = sum(two.parts(8, torch.float32, 1).values()) - sum(one.parts(8, torch.float32, 1).values())
    assert difference == one.weights and one.parts(8, torch.float32, 1)['activations'] > one.weights


@pytest.mark.parametrize('preset', ['gpt2', 'modern'])
def test_the_parts_add_up(preset):
    model = gpt('meta', preset=preset, bias=True)
    line = describe_model(model)
    total, *parts = [int(n.replace(',', '')) for n in re.findall(r' ([\d,]+)(?=[ ,;)])', line)]
    assert sum(parts) == total == model.num_params() and len(parts) == len(PARTS) - (preset == 'gpt2')


# -----------------------------------------------------------------------------
# adapters

GEMMA_2_2B = dict(  # its published config.json, without what transformers assumes
    model_type='gemma2', num_hidden_layers=26, hidden_size=2304, num_attention_heads=8,
    num_key_value_heads=4, intermediate_size=9216, vocab_size=256000, max_position_embeddings=8192,
    rms_norm_eps=1e-6, hidden_activation='gelu_pytorch_tanh')
@pytest.mark.parametrize('settings', [dict(bias=True), GATED])
@pytest.mark.parametrize('lora', [LORA, QLORA])
def test_frozen_weights_adapters_and_their_optimizer_are_counted(settings, lora):
    """In bytes, those of a run in bfloat16."""
    model = gpt('cpu', lora, torch.bfloat16, **settings)
    parts = Need(gpt('meta', **settings), TrainConfig(batch_size=1), lora).parts(1, torch.bfloat16, 1)
    learned = sum(p.nbytes for p in trainable(model))
    assert parts['adapters'] == parts['gradients'] == learned and parts['optimizer'] == 2 * learned
    held = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert parts['frozen weights'] == held - learned


@pytest.mark.parametrize('tokens, vocab_size, chunks', [(768, 50304, 1), (6144, 50304, 1), (6144, 256000, 6)])
def test_the_loss_of_a_frozen_head_is_chunked_as_in_a_compiled_step(monkeypatch, tokens, vocab_size, chunks):
    monkeypatch.setattr('hotloop.training.memory.device_memory', lambda device: 85e9)
    model = gpt('meta', block_size=tokens, vocab_size=vocab_size)
    env = Env(device=torch.device('cuda'), dtype=torch.bfloat16, compile=True)
    assert choose_loss_chunks('auto', tokens, vocab_size, env, frozen=True) == chunks
    assert Need(model, TrainConfig(), LORA).chunks(1, 85e9) == chunks
    assert Need(model, TrainConfig(loss_chunks=3), LORA).chunks(1, 85e9) == 3


def test_frozen_weights_cost_no_products_for_their_gradients():
    """Torch counts fewer: the first block has no gradients below its first adapter."""
    lora = replace(LORA, lora_targets='mlp')
    forward, both = flops_of(gpt('meta', lora, n_layer=3), 64)
    assert flops_of(gpt('meta', replace(lora, quantize='nf4'), n_layer=3), 64) == (forward, both)
    model, ids = gpt('cpu', lora, n_layer=3), torch.zeros(1, 64, dtype=torch.int64)
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


@pytest.mark.slow
@pytest.mark.parametrize('quantize, recompute, expected', [
    ('nf4', 'full', 7.63), ('nf4', 'selective', 8.28), ('nf4', 'none', 29.71),
    ('none', 'full', 10.63), ('none', 'selective', 11.29), ('none', 'none', 32.71)])
def test_adapters_of_rank_16_on_gemma_2_2b(quantize, recompute, expected):
    """In GB, 8 x 768 tokens on an H100, uncompiled."""
    with torch.device('meta'):
        model = GPT(config_from(settings_of(GEMMA_2_2B, 'config.json')))
    model.crop_block_size(768)
    cfg = TrainConfig(batch_size=8, gradient_accumulation_steps=2, recompute=recompute)
    need = Need(model, cfg, LoRAConfig(lora_rank=16, quantize=quantize))
    chunks = need.chunks(8, MACHINES['H100'][1])
    parts = need.parts(8, torch.bfloat16, chunks)
    assert chunks == 6 and sum(parts.values()) / 1e9 == pytest.approx(expected, abs=0.01)
    assert parts['frozen weights'] / 1e9 == pytest.approx(2.23 if quantize == 'nf4' else 5.23, abs=0.01)


# -----------------------------------------------------------------------------
# the lines

def need_of(size, recomputed):
    """A Need without a model: the bytes of a sequence, and if blocks are recomputed."""
    def fits(batch, dtype, memory, recompute):
        return batch * {'none': size, 'full': recomputed}[recompute] <= memory
    return SimpleNamespace(recompute='none', lora=None, fits=fits,
                           chunks=lambda batch, memory: 1 + (memory < 30),
                           parts=lambda batch, dtype, chunks: {'all': batch * size})


@pytest.mark.parametrize('memory, words', [
    (100, 'fits'), (24, 'fits (the loss in 2 chunks)'),
    (20, 'does not fit; the same step fits with --batch_size=16 --gradient_accumulation_steps=3 (the loss in '
         '2 chunks) or --recompute=full (the loss in 2 chunks)'),
    (0.5, 'does not fit; the same step fits with --recompute=full --batch_size=4 '
          '--gradient_accumulation_steps=12 (the loss in 2 chunks)'),
    (0.1, 'does not fit: one sequence needs 1 bytes; reduce n_layer, n_embd or block_size')])
def test_what_does_not_fit_comes_with_what_does(memory, words):
    """24 sequences x 2, of 1 byte each, or of 1/8."""
    assert advise(need_of(1, 0.125), 24, 2, None, memory) == words


def test_adapters_that_do_not_fit_come_with_their_own_remedies():
    need = SimpleNamespace(**vars(need_of(1, 1)) | {'lora': LORA})
    assert advise(need, 4, 1, None, 0.1).endswith('use --quantize=nf4 and a smaller block_size')


def test_recomputation_costs_a_quarter_of_the_speed(forecast_of):
    rates = [float(re.search(r'H100 +85.0 GB +([\d,]+)', forecast_of(recompute=how))[1].replace(',', ''))
             for how in ('none', 'full')]
    assert rates[1] == pytest.approx(0.75 * rates[0], abs=1)


@pytest.fixture
def forecast_of(tmp_path, monkeypatch, capsys):
    """forecast_of(*words, **flags) -> what --dry_run prints; nothing may be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('hotloop.training.forecast.measure_flops', lambda device, dtype: 1e12)
    monkeypatch.setattr('hotloop.training.forecast.device_memory', lambda device: 10e9)
    monkeypatch.setattr('hotloop.data.download.download', lambda *args: pytest.fail('a download'))

    def run(*words, **flags):
        before = contents(tmp_path)
        shape = {} if 'init_from' in flags else {'n_layer': 2, 'n_embd': 32, 'n_head': 2}
        flags = {'data_dir': 'data', 'batch_size': 2, **shape, **flags}
        assert train.main([*words, '--dry_run', *(f'--{k}={v}' for k, v in flags.items())]) == 0
        assert contents(tmp_path) == before
        return capsys.readouterr().out
    return run


def test_a_gpu_without_free_memory_has_no_known_speed(forecast_of, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError('CUDA out of memory')
    monkeypatch.setattr('hotloop.training.forecast.measure_flops', fail)
    assert re.search('this cpu +10.0 GB +unknown', forecast_of(device='cpu'))


def test_a_dataset_that_is_absent_is_assumed(forecast_of):
    """Its tokens are unknown, its ids GPT-2's. With max_epochs the time is unknown, too."""
    printed = forecast_of(dataset='wikitext103')
    assert 'assumes a vocabulary of 50,304 ids, because data/wikitext103 does not exist; make it' in printed
    assert 'assumes a vocabulary of 65 ids, because' in forecast_of(dataset='shakespeare_char', vocab_size=65)
    assert 'embeddings 1,642,496' in printed and 'an unknown number' in printed
    assert all(re.search(rf'^{name} .* fits', printed, re.M) for name in (*MACHINES, 'this cpu'))
    assert re.search(r'^A100 40GB +42\.3 GB +[\d,]+ +\d+h \d+m  fits$', printed, re.M)
    for numbers, flags in ((r'[\d,]+ +unknown', dict(max_epochs=2)),
                           ('unknown +unknown', dict(dtype='float32'))):
        printed = forecast_of(time_budget=None, **flags)
        assert re.search(rf'^A100 40GB +42\.3 GB +{numbers}  fits$', printed, re.M)


def test_a_time_budget_is_the_time_of_every_machine(forecast_of):
    printed = forecast_of(time_budget=90, dtype='float32', gradient_accumulation_steps=1)
    assert 'run: at most 90 minutes (time_budget); the number of steps of 512 tokens depends' in printed
    assert all(re.search(rf'^{name} .* 1h 30m  fits$', printed, re.M) for name in (*MACHINES, 'this cpu'))


def test_a_dataset_that_is_there_is_counted(forecast_of, tmp_path):
    write_bins(tmp_path / 'data' / 'mine', noise(4001), noise(487))
    flags = dict(dataset='mine', block_size=16, gradient_accumulation_steps=4)
    assert 'run: 63 steps of 128 tokens, 8,064 tokens, 2.02 epochs' in forecast_of(max_epochs=2, **flags)
    assert 'run: 50 steps' in forecast_of(max_iters=50, warmup_iters=0.1, **flags)


def test_pretrained_weights_and_checkpoints_are_not_needed_or_only_read(forecast_of, train_tiny, tmp_path):
    """GPT-2's shapes are known without a download; a run of one's own says its own."""
    assert 'parameters: 124,439,808' in forecast_of(init_from='gpt2')
    assert 'parameters: 1,557,611,200' in forecast_of(init_from='gpt2-xl')
    assert '--n_layer: n_layer=3, but gpt2 has 12; use --n_layer=12' in error_of(
        forecast_of, init_from='gpt2', n_layer=3)
    train_tiny(max_iters=1)
    out, new = tmp_path / 'out', tmp_path / 'new'
    for settings in (dict(init_from=out, out_dir=new), dict(init_from='resume', out_dir=out)):
        assert 'mixes 160' in forecast_of(dataset='tiny', **settings)


def test_a_resumed_run_is_forecast_from_its_step(forecast_of, train_tiny, tmp_path):
    train_tiny(max_iters=12)
    resumed = dict(init_from='resume', out_dir=tmp_path / 'out', dataset='tiny', data_dir=tmp_path / 'none',
                   batch_size=4)
    assert 'run: 4 more steps of 128 tokens, 512 tokens' in forecast_of(max_iters=16, **resumed)
    assert 'run: 0 more steps' in forecast_of(**resumed)
    assert 'vocabulary of 50,304' not in forecast_of(**resumed)


@pytest.mark.parametrize('rank, times', [('0', 1), ('1', 0)])
def test_one_process_of_torchrun_prints_the_forecast(forecast_of, monkeypatch, rank, times):
    monkeypatch.setenv('RANK', rank)
    assert forecast_of().count('a forecast, not a measurement') == times


def test_the_size_of_a_checkpoint(train_tiny, tmp_path):
    """Beside the tensors it holds settings and names; of a run with adapters no frozen weights."""
    settings = dict(n_embd=128, n_layer=3, block_size=16, vocab_size=300)
    train_tiny('plain', max_iters=1, **settings)
    train_tiny('tuned', max_iters=1, init_from=tmp_path / 'plain', lora_rank=32, **settings)
    for out, lora in (('plain', None), ('tuned', LoRAConfig(lora_rank=32))):
        need = Need(gpt('meta', **settings), TrainConfig(), lora)
        for name, size in (('ckpt.pt', need.weights + need.optimizer), ('best.pt', need.weights)):
            assert 0 <= (tmp_path / out / name).stat().st_size - size < 6e4, (out, name)


def test_the_lines_of_a_run_with_adapters(forecast_of, train_tiny, tmp_path):
    """No line is about sharding, which adapters do not have."""
    train_tiny('base', max_iters=1)
    flags = dict(lora_rank=4, lora_alpha=8.0, quantize='nf4')
    train_tiny('tuned', max_iters=1, init_from=tmp_path / 'base', **flags)
    for settings in (dict(init_from=tmp_path / 'base', **flags),
                     dict(init_from='resume', out_dir=tmp_path / 'tuned')):
        printed = ' '.join(forecast_of(dataset='tiny', **settings).split())
        assert 'adapters: rank 4, scale 2, on attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj; ' in printed
        assert f'of {tmp_path / "base"} are frozen in NF4, embedding and head in ' in printed
        assert re.search(r'compiled: frozen weights [\d.]+ kB, adapters [\d.]+ kB, ', printed)
        assert 'shard=' not in printed


def test_a_folder_needs_only_its_config_and_the_context_is_that_of_the_run(forecast_of, tmp_path):
    """Of 8,192 tokens in its config.json the run asks for 16."""
    sizes = dict(num_hidden_layers=2, hidden_size=32, head_dim=8, intermediate_size=64, vocab_size=97)
    (tmp_path / 'tiny-gemma').mkdir()
    (tmp_path / 'tiny-gemma' / 'config.json').write_text(json.dumps(GEMMA_2_2B | sizes))
    for settings, tokens in ((dict(block_size=16, lora_rank=2), 16), ({}, 8192)):
        printed = forecast_of(init_from='tiny-gemma', **settings)
        assert f'for a micro-batch of 2 x {tokens} tokens in bfloat16' in printed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='ru_maxrss in kilobytes')
@pytest.mark.parametrize('settings', [dict(n_layer=6), dict(n_layer=4, preset='modern')])
def test_a_real_step_needs_what_the_forecast_says(settings):
    """The peak of the process grows by it within 25%."""
    settings = dict(block_size=512, vocab_size=8192, n_head=4, n_embd=256) | settings
    script = f'''
import resource, torch
from model import GPT, GPTConfig
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model = GPT(GPTConfig(**{settings!r}))
ids = torch.zeros(1, 512, dtype=torch.int64)
model(ids[:, :8], ids[:, :8]).sum().backward()  # code and gradients
before = peak()
ids = torch.zeros(8, 512, dtype=torch.int64)
model(ids, ids).sum().backward()
print(peak() - before)
'''
    env = {**os.environ, 'OMP_NUM_THREADS': '2'}  # with one, gradients of attention take other buffers
    result = subprocess.run([sys.executable, '-c', script], cwd=ROOT, env=env, check=True,
                            capture_output=True)
    forecast = sum(activation_bytes(gpt('meta', **settings), 8, torch.float32, 1))
    assert forecast == pytest.approx(int(result.stdout), rel=0.25)
