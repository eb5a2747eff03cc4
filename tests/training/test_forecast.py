"""The forecast of --dry_run: its counts, its advice, and that nothing is downloaded or written."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import contents, error_of, noise, write_bins
from test_memory import GEMMA_2_2B, LORA, gpt
from torch.utils.flop_counter import FlopCounterMode

import train
from hotloop.training.forecast import LAUNCHES, MACHINES, PARTS, advise, describe_model, flops_of
from hotloop.training.memory import MemoryEstimate
from hotloop.weights.lora import LoRAConfig
from train import TrainConfig


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


@pytest.mark.parametrize('preset', ['gpt2', 'modern'])
def test_the_parts_add_up(preset):
    model = gpt(preset=preset, bias=True)
    line = describe_model(model)
    total, *parts = [int(n.replace(',', '')) for n in re.findall(r' ([\d,]+)(?=[ ,;)])', line)]
    assert sum(parts) == total == model.num_params() and len(parts) == len(PARTS) - (preset == 'gpt2')


@pytest.mark.parametrize('memory, words', [
    (100, 'fits'),
    (20, 'does not fit; the same step fits with --batch_size=16 --gradient_accumulation_steps=3 or '
         '--recompute=full'),
    (0.5, 'does not fit; the same step fits with --recompute=full --batch_size=4 '
          '--gradient_accumulation_steps=12'),
    (0.1, 'does not fit: not even one sequence; use a smaller model or block_size')])
def test_what_does_not_fit_comes_with_what_does(memory, words):
    """24 sequences x 2, of 1 byte each, or of 1/8 if blocks are recomputed."""
    def fits(batch, env, memory, recompute):
        return batch * {'none': 1, 'full': 0.125}[recompute] <= memory
    cfg = TrainConfig(batch_size=24, gradient_accumulation_steps=2)
    assert advise(SimpleNamespace(cfg=cfg, fits=fits), None, memory) == words


# -----------------------------------------------------------------------------
# the lines

@pytest.fixture
def forecast_of(tmp_path, monkeypatch, capsys):
    """forecast_of(**flags) -> what --dry_run prints; nothing may be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('hotloop.training.forecast.measure_flops', lambda device, dtype: 1e12)
    monkeypatch.setattr('hotloop.training.forecast.device_memory', lambda device: 10e9)

    def run(**flags):
        before = contents(tmp_path)
        shape = {} if 'init_from' in flags else {'n_layer': 2, 'n_embd': 32, 'n_head': 2}
        flags = {'data_dir': 'data', 'batch_size': 2, **shape, **flags}
        assert train.main(['--dry_run', *(f'--{k}={v}' for k, v in flags.items())]) == 0
        assert contents(tmp_path) == before
        return capsys.readouterr().out
    return run


def test_an_absent_dataset_is_assumed(forecast_of):
    """Its ids are GPT-2's, and with max_epochs the time is unknown."""
    printed = forecast_of(dataset='wikitext103')
    assert 'assumes a vocabulary of 50,304 ids, because data/wikitext103' in printed
    assert 'embeddings 1,642,496' in printed and 'epochs' not in printed
    for name in (*MACHINES, 'this cpu'):
        assert re.search(rf'^{name} +[\d.]+ GB +[\d,]+ +\d+\w \d+\w  fits$', printed, re.M), name
    for numbers, flags in ((r'[\d,]+ +unknown', dict(max_epochs=2)),
                           ('unknown +unknown', dict(dtype='float32')),
                           (r'[\d,]+ +1h 30m', dict(time_budget=90))):
        assert re.search(rf'^A100 40GB +42\.3 GB +{numbers}  fits$', forecast_of(dataset='no', **flags), re.M)


def test_recomputation_costs_a_quarter_of_the_speed(forecast_of):
    rates = [speed_of(forecast_of(recompute=how, n_embd=2048, n_head=16)) for how in ('none', 'full')]
    assert rates[1] == pytest.approx(0.75 * rates[0], abs=1)


def speed_of(printed):
    """Read the tokens per second of an H100."""
    return int(re.search(r'H100 +85.0 GB +([\d,]+)', printed)[1].replace(',', ''))


def test_a_small_model_waits_for_its_kernels_and_an_evaluation_has_no_steps(forecast_of):
    assert speed_of(forecast_of()) == pytest.approx(2 * 256 / (2 * LAUNCHES), rel=1e-3)
    printed = forecast_of(eval_only=True)
    assert 'run: one evaluation' in printed and re.search(r'H100 .* unknown  fits', printed)


def test_a_dataset_is_counted(forecast_of, tmp_path):
    write_bins(tmp_path / 'data' / 'mine', noise(4001), noise(487))
    flags = dict(dataset='mine', block_size=16, gradient_accumulation_steps=4)
    assert 'run: 63 steps of 128 tokens, 8,064 tokens, 2.02 epochs' in forecast_of(max_epochs=2, **flags)
    assert 'run: 50 steps' in forecast_of(max_iters=50, warmup_iters=0.1, **flags)


def test_weights_are_not_needed_but_their_shape_is(forecast_of, train_tiny, tmp_path, monkeypatch):
    """GPT-2's is known, a checkpoint has its own, and a folder needs only its config.json."""
    monkeypatch.setattr('hotloop.data.download.download', lambda *args: pytest.fail('a download'))
    assert 'parameters: 124,439,808' in forecast_of(init_from='gpt2')
    assert '--n_layer: n_layer=3, but gpt2 has 12' in error_of(forecast_of, init_from='gpt2', n_layer=3)
    train_tiny(max_iters=1)
    out, new = tmp_path / 'out', tmp_path / 'new'
    for settings in (dict(init_from=out, out_dir=new), dict(init_from='resume', out_dir=out)):
        assert 'mixes 160' in forecast_of(dataset='tiny', **settings)
    sizes = dict(num_hidden_layers=2, hidden_size=32, head_dim=8, intermediate_size=64, vocab_size=97)
    (tmp_path / 'tiny-gemma').mkdir()
    (tmp_path / 'tiny-gemma' / 'config.json').write_text(json.dumps(GEMMA_2_2B | sizes))
    for settings, tokens in ((dict(block_size=16, lora_rank=2), 16), ({}, 8192)):
        printed = forecast_of(init_from='tiny-gemma', **settings)
        assert f'for a micro-batch of 2 x {tokens} tokens' in ' '.join(printed.split())
        assert ('frozen weights' in printed) == ('lora_rank' in settings)


@pytest.mark.parametrize('rank, times', [('0', 1), ('1', 0)])
def test_one_process_of_torchrun_prints_the_forecast(forecast_of, monkeypatch, rank, times):
    monkeypatch.setenv('RANK', rank)
    assert forecast_of().count('a forecast, not a measurement') == times


def test_the_size_of_a_checkpoint(train_tiny, tmp_path):
    """Beside the tensors it has settings and names; that of a run with adapters has no frozen weights."""
    settings = dict(n_embd=128, n_layer=3, block_size=16, vocab_size=300)
    train_tiny('plain', max_iters=1, **settings)
    train_tiny('tuned', max_iters=1, init_from=tmp_path / 'plain', lora_rank=32, **settings)
    for out, lora in (('plain', None), ('tuned', LoRAConfig(lora_rank=32))):
        estimate = MemoryEstimate(gpt(**settings).config, TrainConfig(), lora)
        for name, size in (('ckpt.pt', estimate.weights + estimate.optimizer), ('best.pt', estimate.weights)):
            assert 0 <= (tmp_path / out / name).stat().st_size - size < 6e4, (out, name)
