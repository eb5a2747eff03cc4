"""Diagnosis: it finds planted faults and names their places; its numbers are those of the model."""

import json
import math

import pytest
import torch
from conftest import load, noise, write_bins
from test_sample import write
from torch.nn import functional as F

import sample
from hotloop.data.tokenizer import ByteTokenizer
from hotloop.inference import diagnose as diagnosis
from model import GPT, GPTConfig, positions_in

PRESETS = ['gpt2', 'modern']
MLP_OUT, MLP_IN = 'transformer.h.1.mlp.c_proj.weight', 'transformer.h.1.mlp.c_fc.weight'


def gpt(preset='gpt2', **settings):
    """Make a model whose parts all have an output, unlike those of a new modern one."""
    torch.manual_seed(0)
    shape = dict(n_layer=3, n_head=2, n_embd=16, n_ff=24, block_size=16, vocab_size=257)
    model = GPT(GPTConfig(preset=preset, **{**shape, **settings})).eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def diagnose(capsys):
    """diagnose(source, **flags) returns {section: rows}; diagnose.text is what is printed as text."""
    def run(source, **flags):
        flags = {'device': 'cpu', 'init_from': source, **flags}
        words = [f'--{name}={value}' for name, value in flags.items()]
        sample.main(['--diagnose', *words])
        run.text = capsys.readouterr().out
        sample.main(['--diagnose', '--output=jsonl', *words])
        captured = capsys.readouterr()
        run.err = captured.err
        found = {}
        for line in captured.out.splitlines():
            row = json.loads(line, parse_constant=pytest.fail)
            found.setdefault(row.pop('section'), []).append(row)
        found['problems'] = [row['problem'] for row in found['problems']]
        assert all(sentence in run.text for sentence in found['problems'])
        return found
    return run


def silence_units(model):
    model.transformer.h[1].mlp.c_fc.bias.data[:20] = -50


def overflow(model):
    model.transformer.h[1].mlp.c_proj.weight.data[0, 0] = 1e38
    model.transformer.h[1].mlp.c_fc.bias.data[0] = 100


def spoil(model):
    model.transformer.wte.weight.data[3, 5] = math.nan
    model.transformer.wte.weight.data[4, 5] = -math.inf


@pytest.mark.parametrize('preset, plant, expected', [
    ('gpt2', spoil, ['transformer.wte.weight: 2 of 4,112 values are NaN or infinite']),
    *((preset, MLP_OUT, [f'{MLP_OUT}: all 384 values are zero', 'block 1, MLP: its output is zero'])
      for preset in PRESETS),
    ('modern', MLP_IN, [f'{MLP_IN}: all 384 values are zero', 'block 1, MLP: its output is zero',
                        'block 1, MLP: 24 of 24 units are inactive']),
    ('gpt2', silence_units, ['block 1, MLP: 20 of 24 units are inactive']),
    ('gpt2', overflow, ['block 1, MLP: its output is NaN or infinite, but all weights are finite']),
    ('gpt2', lambda model: None, ['none found']), ('modern', lambda model: None, ['none found'])])
def test_planted_faults_are_found_and_named(tmp_path, diagnose, preset, plant, expected):
    model = gpt(preset, bias=preset == 'gpt2')
    plant(model) if callable(plant) else model.get_parameter(plant).data.zero_()
    write(tmp_path / 'a.pt', model, ByteTokenizer())
    found = diagnose(tmp_path / 'a.pt')
    assert found['problems'] == expected and ('blocks' in found) == (plant is not spoil)
    if plant is silence_units:
        assert [row['dead units'] for row in found['blocks']] == [0, 20, 0]


def test_a_run_is_measured_on_the_validation_data_of_its_training(train_tiny, tmp_path, data_dir, diagnose):
    train_tiny()
    found = diagnose(tmp_path / 'out', data_dir=data_dir)
    assert found['problems'] == ['none found'] and diagnose.err.startswith(f'weights: {tmp_path}/out/best.pt')
    saved = load(tmp_path / 'out' / 'best.pt')
    rows = found['loss by position']
    assert [(row['from'], row['to']) for row in rows] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]
    assert sum(row['tokens'] for row in rows) == 486
    mean = sum(row['tokens'] * row['loss'] for row in rows) / 486
    assert mean == pytest.approx(saved['best_val_loss'], rel=1e-6)
    model = GPT.from_checkpoint(saved['model_args'], saved['model']).eval()
    tokens = torch.tensor(noise(487, seed=1))
    first = F.cross_entropy(model(tokens[:-1:16, None]), tokens[1::16])
    assert rows[0]['loss'] == pytest.approx(first.item(), rel=1e-5)
    lines = [' '.join(line.split()) for line in diagnose.text.splitlines()]
    assert 'section from to tokens loss' in lines
    assert f'loss by position 1 1 31 {rows[0]["loss"]:.5g}' in lines


@pytest.mark.slow
def test_direct_feedback_is_compared_with_the_true_gradient(train_tiny, tmp_path, data_dir, diagnose):
    train_tiny(feedback='dfa', preset='modern', n_layer=3, seed=5)
    found = diagnose(tmp_path / 'out', data_dir=data_dir)
    cosines = [row['cosine'] for row in found['blocks']]
    assert cosines[-1] == pytest.approx(1, abs=1e-5)  # its own loss reaches the last block
    assert max(cosines[:-1]) < 0.99
    train_tiny('exact', preset='modern')
    assert 'cosine' not in diagnose(tmp_path / 'exact', data_dir=data_dir)['blocks'][0]


@pytest.mark.parametrize('kind, why', [('changed', 'dataset=a'), ('unnamed', 'does not name its dataset')])
def test_without_its_data_the_model_runs_on_random_ids(train_tiny, tmp_path, diagnose, kind, why):
    path = tmp_path / 'out' / 'best.pt'
    if kind == 'changed':
        write_bins(tmp_path / 'data' / 'a', noise(4001), noise(487, seed=1))
        train_tiny(data_dir=tmp_path / 'data', dataset='a')
        write_bins(tmp_path / 'data' / 'a', noise(4001), noise(487, seed=2))
    else:
        path = tmp_path / 'a.pt'
        write(path, gpt(), ByteTokenizer())
    found = diagnose(path, data_dir=tmp_path / 'data')
    assert 'note: random ids' in diagnose.err and why in diagnose.err
    assert 'loss by position' not in found and len(found['blocks']) > 1


def test_positions_begin_again_with_a_document_and_chunks_change_nothing(monkeypatch):
    x = torch.arange(32).view(2, 16)
    documents = torch.zeros_like(x)
    documents[1, 5:] = 1
    results = []
    for logits in (2**24, 300):
        monkeypatch.setattr(diagnosis, 'MAX_LOGITS', logits)
        batch = x, x.where(x != 3, -1), positions_in(documents), documents
        with torch.no_grad():
            results.append(diagnosis.measure_blocks(gpt(), [batch])[1])
    assert [row['tokens'] for row in results[0]] == [3, 3, 6 - 1, 4 + 1 + 4, 8 + 3]
    for row, chunked in zip(*results, strict=True):
        assert row == pytest.approx(chunked, rel=1e-5)
