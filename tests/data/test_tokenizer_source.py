"""What --tokenizer finds: datasets, runs, checkpoints; without torch, and without running code."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import error_of, noise, write_bins
from test_dataset import Touch, nanogpt_meta

import prepare
from hotloop.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from hotloop.data.tokenizer_source import check_bytes, checkpoint_tokenizer, find_tokenizer, known_template

BPE = BPETokenizer([bytes([b]) for b in range(256)]).spec()
CHAR = CharTokenizer('abc').spec()


def save(path, **more):
    """A checkpoint with a model, tensors of several types and a tokenizer."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)
    tensors = [torch.nn.Parameter(torch.zeros(2)), *(torch.zeros(2, dtype=dtype) for dtype in types)]
    checkpoint = {'model': torch.nn.Linear(2, 3).state_dict(), 'model_args': {'vocab_size': 257},
                  'tensors': tensors, 'config': {}}
    torch.save({**checkpoint, **more}, path)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Data of three kinds in data/, runs beside it, and the current directory there."""
    monkeypatch.chdir(tmp_path)
    write_bins('data/own', noise(99), noise(99), tokenizer=BPE)
    write_bins('data/theirs', [0, 1], [2], tokenizer=False)
    Path('data/theirs/meta.pkl').write_bytes(pickle.dumps(nanogpt_meta('abc')))
    save('out/best.pt', tokenizer=BPE)
    save('out/ckpt.pt', tokenizer=CHAR)
    save('new/ckpt.pt', tokenizer=BPE)
    save('nano/ckpt.pt', config={'dataset': 'theirs'}, model_args={'vocab_size': 64})
    Path('adapter').mkdir()
    Path('adapter/adapter_config.json').write_text('{}')
    Path('adapter/hotloop.json').write_text(json.dumps({'tokenizer': BPE, 'template': 'chatml', 'base': 'b'}))
    Path('text').mkdir()
    Path('text/a.txt').write_text('abc' * 50)


@pytest.mark.parametrize('name, spec', [
    ('own', BPE), ('data/own', BPE), ('theirs', CHAR), ('data/theirs/', CHAR), ('out', BPE),
    ('out/ckpt.pt', CHAR), ('new', BPE), ('nano', CHAR), ('adapter', BPE)])
def test_a_tokenizer_is_found_by_name_and_by_path(places, name, spec):
    assert find_tokenizer(name, 'data').tokenizer.spec() == spec


@pytest.mark.parametrize('name, found', [
    ('out', ('out', None)), ('out/best.pt', ('out/best.pt', None)), ('tuned', ('tuned', 99)),
    ('hf', ('hf', 256)), ('org/model', ('org/model', 256)),
    ('hf/tokenizer.json', ('hf', 256)), ('adapter', ('adapter', None)),
    *((name, (None, None)) for name in ('own', 'data/own', 'theirs', 'org/own', 'byte', 'bpe:300'))])
def test_the_model_of_a_tokenizer_is_what_a_run_starts_from(places, monkeypatch, name, found):
    monkeypatch.setattr('hotloop.data.tokenizer_source.read_tokenizer_json', lambda path: ByteTokenizer())
    monkeypatch.setattr('hotloop.data.tokenizer_source.hub_folder', lambda *names: 'hf')
    Path('hf').mkdir()
    Path('hf/config.json').write_text('{"n_positions": 256}')
    Path('hf/tokenizer.json').write_text('{}')
    save('tuned/best.pt', tokenizer=BPE, lora={}, model_args={'vocab_size': 257, 'block_size': 99})
    Path('hf/chat_template.jinja').write_text('<|im_start|>user')
    shutil.copytree('data/own', 'data/org/own')
    save('byte/best.pt')  # not the one meant by this name
    model, block_size, template = find_tokenizer(name, 'data')[1:]
    assert (model, block_size) == found
    assert template == ('chatml' if name in ('hf', 'org/model', 'hf/tokenizer.json', 'adapter') else None)


@pytest.mark.parametrize('saved, used', [('alpaca', 'alpaca'), ('joined', 'chatml'), (None, 'chatml')])
def test_the_template_of_a_run_is_that_of_the_data_made_for_it(places, capsys, saved, used):
    """Unless it marks no turns, or another one is asked for."""
    save('tuned/best.pt', tokenizer=BPE, **({'template': saved} if saved else {}))
    chats = [[{'role': 'user', 'content': f'Hi {i}'}, {'role': 'assistant', 'content': 'Ho'}]
             for i in range(30)]
    Path('chats.jsonl').write_text('\n'.join(json.dumps({'messages': chat}) for chat in chats))
    for flags, expected in (([], used), (['--template=gemma'], 'gemma')):
        prepare.main(['chats.jsonl', '--tokenizer=tuned', *flags])
        assert json.loads(Path('data/chats/meta.json').read_text())['template'] == expected
        assert '--init_from=tuned --dataset=chats\n' in capsys.readouterr().out
        assert find_tokenizer('chats', 'data').template == expected  # also that of a dataset


def save_letters(folder, lost='', splits=False):
    """Save a tokenizer.json of single bytes, without those lost. splits: at white space, which is dropped."""
    package = pytest.importorskip('tokenizers')
    letters = sorted(set(package.pre_tokenizers.ByteLevel.alphabet()) - set(lost))
    file = package.Tokenizer(package.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    file.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splits:
        file.pre_tokenizer = package.pre_tokenizers.Sequence(
            [package.pre_tokenizers.WhitespaceSplit(), file.pre_tokenizer])
    file.save(f'{folder}/tokenizer.json')


def test_a_checkpoint_without_tokenizer_takes_the_file_beside_it(places):
    save_letters('nano')
    assert find_tokenizer('nano', 'data').tokenizer.n_vocab == 256


def test_a_note_names_a_chat_template_that_is_not_ours(places, capsys):
    save_letters('text')
    rows = [json.dumps({'instruction': f'Add {i}.', 'output': 'Yes'}) for i in range(30)]
    Path('rows.jsonl').write_text('\n'.join(rows))
    for jinja, is_ours in (('[INST] {{ m }} [/INST]', False), ('<|im_start|>user', True)):
        Path('text/chat_template.jinja').write_text(jinja)
        prepare.main(['rows.jsonl', '--tokenizer=text'])
        assert ('is not one of ours' in capsys.readouterr().out) != is_ours


def test_a_file_that_loses_text_is_refused_or_noted(tmp_path, capsys):
    def check():
        check_bytes(find_tokenizer(str(tmp_path), 'data').tokenizer, 'mine')
    save_letters(tmp_path, lost='äÿ')  # GPT-2's letters of two bytes
    check()
    assert 'mine has no token for 1 byte, such as 0xe4;' in capsys.readouterr().err  # no UTF-8 has 0xff
    save_letters(tmp_path, splits=True)
    assert "tokenizer='mine' does not give the text 'a b\\n c' back" in error_of(check)


def test_alpacas_template_is_known_by_its_preamble(tmp_path):
    (tmp_path / 'chat_template.jinja').write_text('You are a coder.\n### Instruction:\n{{ m }}')
    assert known_template(str(tmp_path)) is None


def test_what_has_no_tokenizer_is_named(places, capsys):
    assert 'text has no tokenizer' in error_of(find_tokenizer, 'text', 'data')
    Path('own').mkdir()  # the texts of data/own
    assert find_tokenizer('own', 'data').tokenizer is not None
    for name in ('nowhere', 'bpe:256', '../x'):
        assert f'tokenizer={name!r} is not one of byte' in error_of(find_tokenizer, name, 'data')
    damaged = Path('out/best.pt')
    content = bytearray(damaged.read_bytes())
    content[content.index(b'tokenizer') + 20] ^= 1
    damaged.write_bytes(content)
    assert find_tokenizer('out', 'data').tokenizer.spec() == CHAR  # of ckpt.pt, as sample.py takes it
    assert 'out/best.pt is damaged or not a checkpoint' in capsys.readouterr().err
    save('nano/ckpt.pt', config={'dataset': 'theirs'}, model_args={'vocab_size': 99})
    assert 'nano/ckpt.pt has no tokenizer, and data/theirs has none for 99 ids; set' in error_of(
        find_tokenizer, 'nano', 'data')


def test_a_checkpoint_cannot_run_code(tmp_path):
    """Whatever is no plain data is skipped: nothing is imported or called."""
    evil = {'model_args': {'vocab_size': 3}, 'tokenizer': CHAR, 'x': Touch(tmp_path / 'touched')}
    with zipfile.ZipFile(tmp_path / 'a.pt', 'w') as z:
        z.writestr('ckpt/data.pkl', pickle.dumps(evil))
    assert checkpoint_tokenizer(str(tmp_path / 'a.pt'), '')[0].spec() == CHAR
    assert not (tmp_path / 'touched').exists()
