"""Diagnosis: it finds planted faults and names their places; its numbers are those of the model."""

import json
import math

import pytest
import torch
from conftest import all_logits, load, noise, write_bins
from test_sample import write
from torch.nn import functional as F

import sample
from hotloop.data.tokenizer import ByteTokenizer
from hotloop.inference import watch
from hotloop.inference.diagnose import TOKENS, random_batches, text_of
from hotloop.inference.watch import Watch
from hotloop.training.checkpoint import save_checkpoint
from model import GPT, GPTConfig

PRESETS = ['gpt2', 'modern']
MLP_OUT, MLP_IN = 'transformer.h.1.mlp.c_proj.weight', 'transformer.h.1.mlp.c_fc.weight'


def gpt(preset='gpt2', **settings):
    """A model whose parts all put out something, unlike those of a new modern one."""
    torch.manual_seed(0)
    shape = dict(n_layer=3, n_head=2, n_embd=16, n_ff=24, block_size=16, vocab_size=257)
    model = GPT(GPTConfig(preset=preset, **{**shape, **settings})).eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def diagnose(capsys):
    """diagnose(source, **flags) returns {section: rows}; diagnose.text what is printed without output."""
    def run(source, **flags):
        flags = {'device': 'cpu', 'init_from': source, **flags}
        words = [f'--{name}={value}' for name, value in flags.items()]
        capsys.readouterr()
        assert sample.main(['--diagnose', *words]) == 0
        run.text = capsys.readouterr().out
        assert sample.main(['--diagnose', '--output=jsonl', *words]) == 0
        found = {}
        for line in capsys.readouterr().out.splitlines():
            row = json.loads(line, parse_constant=pytest.fail)
            found.setdefault(row.pop('section'), []).append(row)
        found['problems'] = [row['problem'] for row in found['problems']]
        found['notes'] = [row['note'] for row in found.get('notes', [])]
        assert all(sentence in run.text for sentence in found['problems'] + found['notes'])
        return found
    return run


def silence_heads(model):
    model.transformer.h[1].attn.c_attn.weight.data[32:] = 0  # the values


def silence_units(model):
    model.transformer.h[1].mlp.c_fc.bias.data[:20] = -50


def overflow(model):
    model.transformer.h[1].mlp.c_proj.weight.data[0, 0] = 1e38
    model.transformer.h[1].mlp.c_fc.bias.data[0] = 100


@pytest.mark.parametrize('preset, plant, expected', [
    *((preset, MLP_OUT, [f'{MLP_OUT}: all 384 values are zero', 'block 1, MLP: dead: its output is zero'])
      for preset in PRESETS),
    ('modern', MLP_IN, [f'{MLP_IN}: all 384 values are zero',
                        'block 1, MLP: dead: none of its 24 units ever fires']),
    ('gpt2', silence_heads, ['block 1, attention: dead: none of its 2 heads ever fires']),
    ('gpt2', silence_units, ['block 1, MLP: 20 of 24 units never fire']),
    ('gpt2', overflow, ['block 1, MLP: its output is NaN or too large, though all weights are finite']),
    ('gpt2', lambda model: None, ['none found']), ('modern', lambda model: None, ['none found'])])
def test_planted_faults_are_found_and_named(tmp_path, diagnose, preset, plant, expected):
    model = gpt(preset, bias=preset == 'gpt2')
    plant(model) if callable(plant) else model.get_parameter(plant).data.zero_()
    write(tmp_path / 'a.pt', model, ByteTokenizer())
    found = diagnose(tmp_path / 'a.pt')
    assert found['problems'] == expected
    if plant is silence_units:
        assert [row['dead units'] for row in found['blocks']] == [0, 20, 0]


@pytest.mark.parametrize('name', ['transformer.wte.weight', 'transformer.h.2.attn.c_proj.weight'])
@pytest.mark.parametrize('preset', PRESETS)
def test_a_nan_is_found_and_named_also_in_tied_weights(tmp_path, diagnose, preset, name):
    model = gpt(preset)
    weight = model.get_parameter(name)
    weight.data[3, 5] = math.nan
    weight.data[4, 5] = -math.inf
    write(tmp_path / 'a.pt', model, ByteTokenizer())
    found = diagnose(tmp_path / 'a.pt')
    assert found['problems'] == [f'{name}: 2 of {weight.numel():,} values are NaN or infinite']
    assert found['notes'] == ['the model was not run, because its weights are not finite']
    row = next(row for row in found['weights'] if row['name'] == name)
    finite = weight[weight.isfinite()]
    assert (row['not_finite'], row['max']) == (2, finite.max().item())
    assert row['norm'] == pytest.approx(finite.norm().item())


def test_a_run_is_measured_on_the_validation_data_of_its_training(train_tiny, tmp_path, data_dir, diagnose):
    train_tiny()
    found = diagnose(tmp_path / 'out', data_dir=data_dir)
    assert found['problems'] == ['none found'] and not found['notes']
    saved = load(tmp_path / 'out' / 'best.pt')
    (total,), (training,) = found['predictions'], found['training']
    assert total['loss'] == pytest.approx(saved['best_val_loss'], rel=1e-6)
    assert training['best val loss'] == saved['best_val_loss'] and training['dataset'] == 'tiny'
    assert training['step'] == 10 and training['tokens'] == 10 * 8 * 16
    assert sum(row['tokens'] for row in found['loss by position']) == total['tokens'] == 486
    model = GPT.from_checkpoint(saved['model_args'], saved['model']).eval()
    assert {row['part']: row['parameters'] for row in found['parameters']}['all'] == model.num_params()
    tokens = torch.tensor(noise(487, seed=1))
    x, y = tokens[:480].view(30, 16), tokens[1:481].view(30, 16)  # but for the last, shorter window
    first = F.cross_entropy(all_logits(model, x)[:, 0], y[:, 0], reduction='sum')
    last = F.cross_entropy(model(tokens[None, 480:481]), tokens[481:482])
    assert found['loss by position'][0]['loss'] == pytest.approx((first + last).item() / 31, rel=1e-5)
    assert [(row['from'], row['to']) for row in found['loss by position']] == [(1, 1), (2, 2), (3, 4), (5, 8),
                                                                               (9, 16)]


def test_logits_that_overflow_are_a_fault_and_not_a_table(train_tiny, tmp_path, data_dir, diagnose):
    train_tiny(tie=False)
    path = tmp_path / 'out' / 'best.pt'
    checkpoint = load(path)
    checkpoint['model']['lm_head.weight'][:] = torch.tensor([3e38, -3e38]).repeat(16)
    save_checkpoint(str(path), checkpoint)
    found = diagnose(path, data_dir=data_dir)
    assert found['problems'] == ['logits: NaN or too large, though the outputs of all blocks are finite']
    assert 'predictions' not in found


@pytest.mark.parametrize('kind', ['moved', 'changed', 'unnamed'])
def test_without_its_data_the_rest_is_printed(train_tiny, tmp_path, diagnose, kind):
    """Another dataset of the same name is not its data; under another name, NAME.1, it is."""
    write_bins(tmp_path / 'data' / 'a', noise(4001), noise(487, seed=1))
    train_tiny(data_dir=tmp_path / 'data', dataset='a')
    (tmp_path / 'data' / 'a').rename(tmp_path / 'data' / 'a.1')
    if kind == 'changed':
        (tmp_path / 'data' / 'a.1').rename(tmp_path / 'away')
        write_bins(tmp_path / 'data' / 'a', noise(4001), noise(487, seed=2))
    path = tmp_path / 'out' / 'best.pt'
    if kind == 'unnamed':
        path = tmp_path / 'a.pt'
        write(path, gpt(), ByteTokenizer())
    found = diagnose(path, data_dir=tmp_path / 'data')
    why = {'moved': [], 'unnamed': [f'{path} does not say what it was trained on'],
           'changed': [f"the dataset a of the training is not in data_dir='{tmp_path / 'data'}'; name the "
                       'folder that has it with --data_dir']}[kind]
    assert found['notes'] == [f'no loss by position and no calibration, because {reason}' for reason in why]
    assert ('predictions' in found) == (kind == 'moved') and len(found['blocks']) > 1


@pytest.mark.parametrize('size, longest', [(16, 16), (2**17, 2**12)])
def test_random_ids_are_as_many_for_any_context(size, longest):
    shapes = [x.shape for x, _ in random_batches(GPTConfig(block_size=size, vocab_size=9))]
    assert sum(map(math.prod, shapes)) == TOKENS and {T for _, T in shapes} == {longest}


def test_calibration_and_entropy_of_a_uniform_model():
    """A new modern model gives each id the same probability."""
    model = GPT(GPTConfig(preset='modern', n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=50))
    seen = Watch(model.eval())
    y = torch.arange(64).view(4, 16) % 50
    with torch.no_grad():
        seen.run(y, y)
    found = seen.predictions()
    total, (only,) = found['predictions'], found['calibration']
    assert [total['loss'], total['entropy']] == pytest.approx([math.log(50)] * 2)
    assert only['confidence'] == pytest.approx(0.02) and only['accuracy'] == (y == 0).double().mean()
    assert total['calibration error'] == pytest.approx(abs(only['accuracy'] - 0.02))


def test_positions_begin_again_with_a_document_and_chunks_change_nothing(monkeypatch):
    x = torch.arange(32).view(2, 16)
    documents = torch.zeros_like(x)
    documents[1, 5:] = 1
    results = []
    for logits in (2**24, 300):
        monkeypatch.setattr(watch, 'LOGITS', logits)
        seen = Watch(gpt())
        with torch.no_grad():
            seen.run(x, x.where(x != 3, -1), documents)
        assert seen.model.loss_chunks == (1 if logits > 300 else 16)
        results.append(seen.predictions())
    by_place = results[0]['loss by position']
    assert [row['tokens'] for row in by_place] == [3, 3, 6 - 1, 4 + 1 + 4, 8 + 3]
    for section, rows in results[0].items():
        other = results[1][section]
        for a, b in zip(*([r] if isinstance(r, dict) else r for r in (rows, other)), strict=True):
            assert a == pytest.approx(b, rel=1e-5)


def test_adapters_are_merged_and_a_loaded_model_is_one_too(train_tiny, tmp_path, data_dir, diagnose):
    train_tiny('base', eval_interval=100)
    train_tiny('tuned', init_from=tmp_path / 'base', lora_rank=2, max_iters=3)
    found = diagnose(tmp_path / 'tuned', data_dir=data_dir)
    (training,), (total,) = found['training'], found['predictions']
    assert (training['base'], training['lora_rank']) == (str(tmp_path / 'base'), 2)
    assert total['loss'] == pytest.approx(load(tmp_path / 'tuned' / 'best.pt')['best_val_loss'], rel=1e-5)
    assert found['problems'] == ['none found']
    sample.main([f'--out_dir={tmp_path / "base"}', f'--export={tmp_path / "exported"}'])
    found = diagnose(tmp_path / 'exported')
    assert found['problems'] == ['none found'] and len(found['notes']) == 1


def test_the_tables_show_the_same_numbers(train_tiny, tmp_path, data_dir, diagnose):
    train_tiny(preset='modern')
    found = diagnose(tmp_path / 'out', data_dir=data_dir)
    lines = [' '.join(line.split()) for line in diagnose.text.splitlines()]
    for section in ('parameters', 'blocks', 'loss by position', 'calibration'):
        assert ' '.join(found[section][0]) in lines
        for row in found[section]:
            assert ' '.join(map(text_of, row.values())) in lines
    for section in ('training', 'predictions'):
        for name, value in found[section][0].items():
            assert f'{name} {text_of(value)}' in lines
    assert max(map(len, lines)) < 120
