"""Weights to start from: which checkpoint is taken, Hugging Face folders, GPT-2 by name, safetensors."""

import json
import os
import pickle
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of

from hotloop.data.tokenizer import ByteTokenizer
from hotloop.system.distributed import Env
from hotloop.training.checkpoint import save_checkpoint
from hotloop.weights.load import GPT2_SPEC, check_start, load_weights, open_start, shape_of
from hotloop.weights.safetensors import read_safetensors, write_safetensors
from model import GPT

ARGS = dict(n_layer=1, n_head=1, n_embd=4, block_size=8, vocab_size=8, bias=False, dropout=0.0)


def write_checkpoint(path, step, **more):
    save_checkpoint(str(path), {'model': {'w': torch.full((4096,), float(step))}, 'model_args': ARGS,
                                'iter_num': step, 'best_val_loss': 1.0, 'config': {}, **more})


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_best_is_taken_before_the_latest_and_the_latest_before_older_ones(tmp_path, capsys):
    """A damaged one is reported and the next one taken; if none is intact, the last error is raised."""
    steps = {'best.pt': 25, 'ckpt.pt': 30, 'ckpt-000000020.pt': 20}
    for name, step in steps.items():
        write_checkpoint(tmp_path / name, step, tokenizer=ByteTokenizer().spec())
    for number, (name, step) in enumerate(steps.items()):
        found = load_weights(str(tmp_path))
        assert found.path == str(tmp_path / name) and found.weights['w'][0] == step
        assert found.tokenizer == ByteTokenizer().spec() and found.checkpoint['iter_num'] == step
        assert found.model_args == ARGS and 'model' not in found.checkpoint
        assert capsys.readouterr().err.count('is damaged') == number
        flip_a_bit(tmp_path / name)
        assert f'{name} is damaged' in error_of(load_weights, str(tmp_path / name))  # by its path
    assert 'ckpt-000000020.pt' in error_of(load_weights, str(tmp_path))


def test_memory_that_runs_out_is_no_damage(tmp_path, monkeypatch):
    """Or a resume would go back to an older checkpoint that fits."""
    for name in ('ckpt.pt', 'ckpt-000000020.pt'):
        write_checkpoint(tmp_path / name, 20)

    def fail(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    monkeypatch.setattr(torch, 'load', fail)
    with pytest.raises(MemoryError, match=r'not enough memory to load .*ckpt\.pt'):
        load_weights(str(tmp_path))


def test_a_folder_on_disk_wins_over_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir('gpt2')
    assert "'gpt2' holds neither a checkpoint" in error_of(load_weights, 'gpt2')
    write_checkpoint(tmp_path / 'gpt2' / 'ckpt.pt', 3)
    found = load_weights('gpt2')
    assert found.checkpoint['iter_num'] == 3 and found.tokenizer is None  # as in nanoGPT's checkpoints
    assert "'resum' does not exist; did you mean 'resume'?" in error_of(check_start, 'resum')
    for name in ('scratch', 'resume', 'gpt2', 'some/model'):
        check_start(name)


@pytest.mark.parametrize('size, dataset, known', [
    (3, 'chars', {'kind': 'char', 'chars': 'abc', 'eot': False}), (4, 'chars', None),
    (50304, 'other', GPT2_SPEC), (50304, None, GPT2_SPEC)])
def test_a_run_that_starts_from_nanogpts_weights_knows_their_tokenizer(tmp_path, size, dataset, known):
    """Else it would train on ids of another tokenizer, if only they are below the vocabulary of the model."""
    (tmp_path / 'chars').mkdir()
    meta = {'vocab_size': 3, 'itos': dict(enumerate('abc'))}
    (tmp_path / 'chars' / 'meta.pkl').write_bytes(pickle.dumps(meta))
    path = str(tmp_path / 'ckpt.pt')
    save_checkpoint(path, {'model': {}, 'model_args': {**ARGS, 'vocab_size': size},
                           'config': {'dataset': dataset} if dataset else {}})
    cfg = SimpleNamespace(init_from=path, data_dir=str(tmp_path))
    assert open_start(cfg, None, False, Env())[1].tokenizer == known


@pytest.fixture
def gpt2_folder(tmp_path):
    """A tiny GPT-2, written by hand, with the n_inner of transformers."""
    C, V, T = 4, 6, 5
    tensors = {'wte.weight': torch.randn(V, C), 'wpe.weight': torch.randn(T, C)}
    shapes = {'h.0.attn.c_attn': [C, 3 * C], 'h.0.attn.c_proj': [C, C], 'h.0.mlp.c_fc': [C, 4 * C],
              'h.0.mlp.c_proj': [4 * C, C], 'h.0.ln_1': [C], 'h.0.ln_2': [C], 'ln_f': [C]}
    for name, shape in shapes.items():
        tensors |= {f'{name}.weight': torch.randn(shape), f'{name}.bias': torch.randn(shape[-1])}
    write_safetensors(tmp_path / 'model.safetensors', tensors)
    config = dict(model_type='gpt2', n_layer=1, n_head=2, n_embd=C, n_inner=None, n_positions=T, vocab_size=V)
    (tmp_path / 'config.json').write_text(json.dumps(config))
    return tmp_path


def test_a_folder_gives_args_weights_and_tokenizer(gpt2_folder, monkeypatch):
    found = load_weights(str(gpt2_folder))
    model = GPT.from_checkpoint(found.model_args, found.weights)
    assert found.tokenizer is None
    assert found.checkpoint.keys() == {'hf_config'} and found.checkpoint['hf_config']['n_positions'] == 5
    assert model.config.mlp == 'gelu_tanh' and model.config.tie and model.config.block_size == 5
    (gpt2_folder / 'tokenizer.json').write_text('{}')
    monkeypatch.setattr('hotloop.weights.load.read_tokenizer_json', lambda folder: ByteTokenizer())
    assert load_weights(str(gpt2_folder)).tokenizer == ByteTokenizer().spec()


@pytest.mark.parametrize('size, vocab, expected', [
    (50257, None, GPT2_SPEC), (50304, None, GPT2_SPEC), (50256, None, None),
    (50257, {'Ġthe': 262}, GPT2_SPEC), (50257, {'Ġder': 262}, 'tokenizer.json cannot be read')])
def test_gpt2s_tokenizer_is_assumed_for_its_vocabulary_only(gpt2_folder, size, vocab, expected):
    config = json.loads((gpt2_folder / 'config.json').read_text())
    (gpt2_folder / 'config.json').write_text(json.dumps(config | {'vocab_size': size}))
    if vocab:
        (gpt2_folder / 'vocab.json').write_text(json.dumps(vocab))
    if isinstance(expected, str):
        assert expected in error_of(load_weights, str(gpt2_folder))
    else:
        assert load_weights(str(gpt2_folder)).tokenizer == expected


def test_a_head_that_differs_from_tied_embeddings_is_kept(gpt2_folder):
    """As in transformers. A head that equals them is no reason to untie; the file may have it alone."""
    weights = read_safetensors(str(gpt2_folder / 'model.safetensors'))
    embedding = weights.pop('wte.weight')
    for head, tie, more in ((embedding.clone(), True, {'wte.weight': embedding}), (embedding, True, {}),
                            (embedding + 1, False, {'wte.weight': embedding})):
        write_safetensors(gpt2_folder / 'model.safetensors', {**weights, **more, 'lm_head.weight': head})
        found = load_weights(str(gpt2_folder))
        model = GPT.from_checkpoint(found.model_args, found.weights)
        assert model.config.tie == tie and torch.equal(model.lm_head.weight, head)
        assert torch.equal(model.transformer.wte.weight, embedding)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of huggingface_hub, empty and offline."""
    constants = pytest.importorskip('huggingface_hub.constants')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    return tmp_path / 'cache'


def put_into(cache, name, folder):
    """Copy a folder into the cache, as a download leaves it. Returns the place."""
    model = cache / f'models--{name.replace("/", "--")}'
    (model / 'refs').mkdir(parents=True)
    (model / 'refs' / 'main').write_text('abc')
    return shutil.copytree(folder, model / 'snapshots' / 'abc', ignore=shutil.ignore_patterns('cache'))


@pytest.mark.parametrize('name, full', [('gpt2', 'openai-community/gpt2'), ('org/model', 'org/model')])
def test_a_model_of_the_hub_is_found_without_a_network(gpt2_folder, cache, name, full):
    place = put_into(cache, full, gpt2_folder)
    found = load_weights(name)
    assert found.path == str(place) and len(found.weights) == 17
    assert shape_of(full)['n_head'] == 2


def test_an_unsupported_model_of_the_hub_is_refused_before_its_weights_come(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr('hotloop.weights.load.hub_folder', lambda *args: asked.append(args) or str(tmp_path))
    (tmp_path / 'config.json').write_text('{"model_type": "phi3"}')
    assert 'model_type=phi3 is not supported' in error_of(load_weights, 'org/phi')
    (_, patterns), = asked
    assert 'config.json' in patterns and 'model.safetensors' not in patterns
    (tmp_path / 'adapter_config.json').write_text('{}')  # adapters, whose base may have any form
    monkeypatch.setattr('hotloop.weights.load.load_adapter', lambda folder: folder)
    assert load_weights('org/phi') == str(tmp_path)


def test_the_number_of_shards_is_that_in_their_names(gpt2_folder):
    """Or of two sets, one is left from before."""
    first = gpt2_folder / 'model-00001-of-00001.safetensors'
    os.rename(gpt2_folder / 'model.safetensors', first)
    assert load_weights(str(gpt2_folder)).weights
    os.rename(first, gpt2_folder / 'model-00001-of-00002.safetensors')
    assert 'has 1 of 2 files of weights' in error_of(load_weights, str(gpt2_folder))
    shutil.copy(gpt2_folder / 'model-00001-of-00002.safetensors', first)
    shutil.copy(first, gpt2_folder / 'model-00002-of-00003.safetensors')
    assert 'has 3 of 1 files of weights' in error_of(load_weights, str(gpt2_folder))


def test_a_model_that_is_not_on_disk_is_one_sentence(cache):
    error = error_of(load_weights, 'org/model')
    assert error.startswith("'org/model' is not on this disk, and could not be downloaded: ")
    assert '\n' not in error
    assert "'org/model' has no config.json on this disk" in error_of(shape_of, 'org/model')


def test_a_folder_without_safetensors_or_tokenizer_json_is_refused_with_the_conversion(gpt2_folder):
    (gpt2_folder / 'tokenizer.model').write_bytes(b'')
    error = error_of(load_weights, str(gpt2_folder))
    assert 'tokenizer.json cannot be read' in error and 'AutoTokenizer.from_pretrained' in error
    os.rename(gpt2_folder / 'model.safetensors', gpt2_folder / 'pytorch_model.bin')
    error = error_of(load_weights, str(gpt2_folder))
    assert 'has no model.safetensors' in error and 'AutoModelForCausalLM.from_pretrained' in error


@pytest.mark.parametrize('change', [dict(shape=[3, 2]), dict(dtype='F31'), dict(data_offsets=[4, 20]),
                                    dict(data_offsets=[-16, 0])])
def test_files_that_are_cut_or_damaged_are_refused(tmp_path, change):
    path = tmp_path / 'x.safetensors'
    write_safetensors(path, {'a': torch.zeros(2, 2)})
    intact = path.read_bytes()
    path.write_bytes(b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n')
    assert 'a pointer of git-lfs; run git lfs pull' in error_of(read_safetensors, path)
    path.write_bytes(b'')
    assert 'x.safetensors is damaged or not a safetensors file' in error_of(read_safetensors, path)
    header = json.dumps({'a': {'dtype': 'F32', 'shape': [2, 2], 'data_offsets': [0, 16], **change}}).encode()
    wrong = struct.pack('<Q', len(header)) + header + bytes(16)
    long = b'\xff' * 7 + b'\x7f' + bytes(5000)
    for content in (intact[:4], intact[:40], intact[:-1], b'\xff' * 8 + intact[8:], long, wrong):
        path.write_bytes(content)
        error = error_of(read_safetensors, str(path))
        assert f'{path} is damaged' in error and len(error) < len(str(path)) + 200, content[:80]
