"""The forecast of --dry_run: counts equal those of real steps, and nothing is downloaded or written."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import contents, noise, write_bins

import train
from hotloop.distributed import Env
from hotloop.footprint import Need, activation_bytes, count_step, update_bytes
from hotloop.forecast import MACHINES, PARTS, advise, describe_model
from hotloop.optim import build_optimizers, matrix_rows
from hotloop.parallel import set_blocks
from model import GPT, GPTConfig
from train import TrainConfig

ROOT = Path(train.__file__).parent


def gpt(device, **settings):
    tiny = dict(block_size=64, vocab_size=101, n_layer=2, n_head=2, n_embd=32)
    with torch.device(device):
        return GPT(GPTConfig(**{**tiny, **settings}))


@pytest.mark.parametrize('settings', [
    {}, dict(preset='modern'), dict(mlp='swiglu', n_layer=1, bias=True), dict(preset='modern', n_kv_head=1)])
@pytest.mark.parametrize('chunks, recompute', [(1, 'none'), (4, 'none'), (1, 'selective'), (1, 'full')])
def test_a_step_on_the_meta_device_stores_what_a_real_step_stores(settings, chunks, recompute):
    """In bytes, when the loss begins and at most."""
    real, meta = gpt('cpu', **settings), gpt('meta', **settings)
    for model in (real, meta):
        model.loss_chunks = chunks
        set_blocks(model, recompute)
    for stored, counted in zip(count_step(real, 3), count_step(meta, 3), strict=True):
        assert abs(stored - counted) < 200, 'the state of the dropout generator is all that may differ'
        assert stored > 3 * 64 * 32 * 4


@pytest.mark.parametrize('settings', [dict(n_layer=5), dict(n_layer=7, preset='modern', block_size=32)])
@pytest.mark.parametrize('dtype, recompute', [
    (torch.float32, 'none'), (torch.bfloat16, 'none'), (torch.bfloat16, 'selective')])
def test_two_blocks_tell_what_all_of_them_store(settings, dtype, recompute):
    """A count of one and two blocks equals a full count, at another size."""
    model = gpt('meta', **settings)
    model.compute_dtype = dtype
    set_blocks(model, recompute)
    stored, most = count_step(model, 4)
    assert activation_bytes(model, 4, dtype, 1, recompute) == (stored, most - stored)


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


def need_of(size, recomputed):
    """A Need without a model: the bytes of a sequence, and if blocks are recomputed."""
    def fits(batch, dtype, memory, recompute):
        return batch * {'none': size, 'full': recomputed}[recompute] <= memory
    return SimpleNamespace(recompute='none', fits=fits, chunks=lambda batch, memory: 1 + (memory < 30),
                           parts=lambda batch, dtype, chunks: {'all': batch * size})


@pytest.mark.parametrize('memory, words', [
    (100, 'fits'), (24, 'fits (the loss in 2 chunks)'),
    (20, 'does not fit; the same step fits with --batch_size=16 --gradient_accumulation_steps=3 (the loss in '
         '2 chunks) or --recompute=full (the loss in 2 chunks)'),
    (0.5, 'does not fit; the same step fits with --recompute=full --batch_size=4 '
          '--gradient_accumulation_steps=12 (the loss in 2 chunks)'),
    (0.1, 'does not fit: one sequence needs 0.0 GB; reduce n_layer, n_embd or block_size')])
def test_what_does_not_fit_comes_with_what_does(memory, words):
    """24 sequences x 2, of 1 byte each, or of 1/8."""
    assert advise(need_of(1, 0.125), 24, 2, None, memory) == words


def test_recomputation_costs_a_quarter_of_the_speed(forecast_of):
    rates = [float(re.search(r'H100 +85.0 GB +([\d,]+)', forecast_of(recompute=how))[1].replace(',', ''))
             for how in ('none', 'full')]
    assert rates[1] == pytest.approx(0.75 * rates[0], abs=1)


@pytest.fixture
def forecast_of(tmp_path, monkeypatch, capsys):
    """forecast_of(*words, **flags) -> what --dry_run prints; nothing may be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('hotloop.forecast.measure_flops', lambda device, dtype: 1e12)
    monkeypatch.setattr('hotloop.forecast.device_memory', lambda device: 10e9)
    monkeypatch.setattr('hotloop.download.download', lambda *args: pytest.fail('a download'))

    def run(*words, **flags):
        before = contents(tmp_path)
        flags = {'data_dir': 'data', 'n_layer': 2, 'n_embd': 32, 'n_head': 2, 'batch_size': 2, **flags}
        assert train.main([*words, '--dry_run', *(f'--{k}={v}' for k, v in flags.items())]) == 0
        assert contents(tmp_path) == before
        return capsys.readouterr().out
    return run


def test_a_dataset_that_is_absent_is_assumed(forecast_of):
    """Its tokens are unknown, its ids GPT-2's. With max_epochs the hours are unknown, too."""
    printed = forecast_of(dataset='wikitext103')
    assert 'data: tokens unknown, 50,304 ids assumed: data/wikitext103 does not exist; make it' in printed
    assert 'embeddings 1,642,496' in printed and 'unknown epochs' in printed
    assert all(re.search(rf'^{name} .* fits', printed, re.M) for name in (*MACHINES, 'this cpu'))
    assert re.search(r'^A100 40GB +42\.3 GB +[\d,]+ +[\d.]+  fits$', printed, re.M)
    assert re.search(r'^A100 40GB +42\.3 GB +[\d,]+ +unknown  fits$', forecast_of(max_epochs=2), re.M)
    assert re.search(r'^A100 40GB +42\.3 GB +unknown +unknown  fits$', forecast_of(dtype='float32'), re.M)


def test_a_dataset_that_is_there_is_counted(forecast_of, tmp_path):
    write_bins(tmp_path / 'data' / 'mine', noise(4001), noise(487))
    flags = dict(dataset='mine', block_size=16, gradient_accumulation_steps=4)
    assert 'run: 63 steps of 128 tokens, 8,064 tokens, 2.02 epochs' in forecast_of(max_epochs=2, **flags)
    assert 'warmup_fraction=0.1: 5 steps' in forecast_of(max_iters=50, warmup_fraction=0.1, **flags)


def test_pretrained_weights_and_checkpoints_are_not_needed_or_only_read(forecast_of, train_tiny, tmp_path):
    """GPT-2's shapes are known without a download; a run of one's own says its own."""
    assert 'parameters: 124,439,808' in forecast_of(init_from='gpt2')
    assert 'parameters: 1,557,611,200' in forecast_of(init_from='gpt2-xl')
    train_tiny(max_iters=1)
    for settings in (dict(init_from=tmp_path / 'out'), dict(init_from='resume', out_dir=tmp_path / 'out')):
        assert 'norms and mixes 160' in forecast_of(dataset='tiny', **settings)


def test_the_size_of_a_checkpoint(forecast_of, train_tiny, tmp_path):
    """Beside the tensors it holds settings and names."""
    settings = dict(n_embd=128, n_layer=3, block_size=16, vocab_size=300)
    train_tiny(max_iters=1, **settings)
    need = Need(gpt('meta', **settings), TrainConfig())
    for name, size in (('ckpt.pt', need.weights + need.optimizer), ('best.pt', need.weights)):
        assert 0 <= (tmp_path / 'out' / name).stat().st_size - size < 6e4, name


@pytest.mark.slow
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
ids = torch.zeros(16, 512, dtype=torch.int64)
model(ids, ids).sum().backward()
print(peak() - before)
'''
    result = subprocess.run([sys.executable, '-c', script], cwd=ROOT, capture_output=True, check=True)
    forecast = sum(activation_bytes(gpt('meta', **settings), 16, torch.float32, 1))
    assert forecast == pytest.approx(int(result.stdout), rel=0.25)
