"""A tokenizer.json becomes tiktoken: the ids of Hugging Face's tokenizers, and a refusal where they would differ."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import prepare
from hotloop.bpe import GPT2_SPLIT
from hotloop.dataset import read_meta
from hotloop.pretrained import pretrained
from hotloop.sources import stdlib_files
from hotloop.tokenizer import (
    KNOWN_SPLITS,
    BPETokenizer,
    encode_marked,
    read_tokenizer_json,
    same_tokenizer,
    tokenizer_from,
)

tokenizers = pytest.importorskip('tokenizers')

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r'\s+(?!\S)|\s+')
QWEN = LLAMA3.replace(r'\p{N}{1,3}', r'\p{N}')
FAMILIES = ('gpt2', 'llama3', 'qwen', 'smollm2')

TEXTS = ['', ' ', "Hello, world! It's 2024; they'll pay 12345.67€.", 'def f(x):\n\treturn  x\r\n\r\n\n   # end',
         'a  b   c    ', 'DON\'T "quote" — Größe, naïve café, e\u0301 vs \u00e9', '日本語のテキスト、한국어 текст',
         '😀👍🏽 \u200d\u200b\ufeff', '   ', '\n\n\n', '1 22 333 4444 ½ ² Ⅷ', 'x' * 300, '<|endoftext|> is text',
         '\x00\x1b[0m\x85\u2028', "'s 'T'LL ''' ... !!!\n!!!", 'tab\tbetween\t\twords ', 'مرحبا بالعالم ١٢٣', 'Å Å ﬁ']


def source(every):
    """Some files of the standard library."""
    return [Path(path).read_text(encoding='utf-8') for _, path in stdlib_files()[5::every]]


def steps(family):
    pre = tokenizers.pre_tokenizers
    if family == 'gpt2':
        return pre.ByteLevel(add_prefix_space=False)
    if family == 'smollm2':
        return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    pattern = tokenizers.Regex(LLAMA3 if family == 'llama3' else QWEN)
    return pre.Sequence([pre.Split(pattern, 'isolated'), pre.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """{family: folder of a tokenizer.json, trained here as the family's is}."""
    made = {}
    for family in FAMILIES:
        t = tokenizers.Tokenizer(tokenizers.models.BPE())
        t.pre_tokenizer = steps(family)
        t.decoder = tokenizers.decoders.ByteLevel()
        if family == 'qwen':
            t.normalizer = tokenizers.normalizers.NFC()
        specials = ['<|endoftext|>', '<|im_start|>', '<|im_end|>'] if family == 'smollm2' else []
        t.train_from_iterator(source(40) + TEXTS * 3, tokenizers.trainers.BpeTrainer(
            vocab_size=3000, special_tokens=specials, show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        names = {'gpt2': ['<|endoftext|>'], 'llama3': ['<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>'],
                 'qwen': ['<|endoftext|>', '<|im_start|>', '<|im_end|>']}.get(family, [])
        t.add_special_tokens(names)
        made[family] = tmp_path_factory.mktemp(family)
        t.save(str(made[family] / 'tokenizer.json'))
    return made


@pytest.mark.parametrize('family', FAMILIES)
def test_the_ids_are_theirs(folders, family):
    theirs = tokenizers.Tokenizer.from_file(str(folders[family] / 'tokenizer.json'))
    ours = read_tokenizer_json(str(folders[family]))
    again = tokenizer_from(json.loads(json.dumps(ours.spec())))
    rng = np.random.default_rng(0)
    letters = [*range(1, 0x250), 0x3b1, 0x4e00, 0x1f600, *b'   \n\r\t19aA']
    wild = [''.join(map(chr, rng.choice(letters, 60))) for _ in range(300)]
    for text in [*TEXTS, *wild, *(text[:20_000] for text in source(60))]:
        if any(name in text for name in ours.specials):
            continue
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == again.encode(text).tolist() == expected, text
        assert ours.decode(expected).decode() == theirs.decode(expected, skip_special_tokens=False) or '�' in text
    assert ours.n_vocab == theirs.get_vocab_size() and again.n_vocab == ours.n_vocab
    assert (again.eot, again.bos, again.specials) == (ours.eot, ours.bos, ours.specials)


def test_special_ids_are_for_markup_alone(folders):
    theirs = tokenizers.Tokenizer.from_file(str(folders['qwen'] / 'tokenizer.json'))
    ours = read_tokenizer_json(str(folders['qwen'] / 'tokenizer.json'))
    text = '<|im_start|>user\nhi<|im_end|>\n<|endoftext|>'
    assert encode_marked(ours, text) == theirs.encode(text).ids
    assert not set(ours.encode(text).tolist()) & set(ours.specials.values())
    assert ours.decode(ours.encode(text).tolist()).decode() == text
    assert ours.eot == ours.specials['<|endoftext|>'] and ours.decode([ours.eot]) == b''
    assert ours.decode([ours.specials['<|im_end|>']]) == b'<|im_end|>'
    assert ours.encode('e\u0301').tolist() == ours.encode('\u00e9').tolist()  # NFC


def test_ends_and_beginnings_are_told_by_the_config_beside_it(folders, tmp_path):
    llama = read_tokenizer_json(str(folders['llama3']))
    assert (llama.bos, llama.eot) == (llama.specials['<|begin_of_text|>'], llama.specials['<|end_of_text|>'])
    (tmp_path / 'tokenizer.json').write_bytes((folders['llama3'] / 'tokenizer.json').read_bytes())
    config = {'eos_token': {'content': '<|eot_id|>'}, 'bos_token': None}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    chat = read_tokenizer_json(str(tmp_path))
    assert chat.eot == llama.specials['<|eot_id|>'] and chat.bos == llama.bos


@pytest.mark.parametrize('bos', [True, False])
def test_a_dataset_of_it(folders, tmp_path, bos):
    for i in range(5):
        (tmp_path / f'{i}.txt').write_text(f'document {i}')
    flags = [f'--tokenizer={folders["llama3"] / "tokenizer.json"}', '--name=x', f'--data_dir={tmp_path}/data']
    prepare.main([str(tmp_path), *flags, *(['--bos'] if bos else [])])
    meta = read_meta(str(tmp_path / 'data' / 'x'))
    tokenizer = tokenizer_from(meta['tokenizer'])
    ids = np.fromfile(tmp_path / 'data' / 'x' / 'train.bin', dtype='<u2').tolist()
    documents = [f'document {i}' for i in range(5)]
    starts = [tokenizer.bos] if bos else []
    every = [[*starts, *tokenizer.encode(d).tolist(), tokenizer.eot] for d in documents]
    size = len(every[0])
    assert len(ids) == 4 * size and all(ids[i:i + size] in every for i in range(0, len(ids), size))
    assert meta['splits']['train']['bytes'] == len(tokenizer.decode(ids)) == 4 * 10
    assert meta.get('bos') == (tokenizer.bos if bos else None)
    add = [str(tmp_path / '0.txt'), '--name=x', f'--data_dir={tmp_path}/data', '--append', '--val_fraction=0.5']
    prepare.main(add)  # as what is there was made
    more = np.fromfile(tmp_path / 'data' / 'x' / 'train.bin', dtype='<u2').tolist()[len(ids):]
    assert more[:len(starts) + 1] == [*starts, *tokenizer.encode('document').tolist()][:len(starts) + 1]
    if not bos:
        with pytest.raises(ValueError, match='was made without bos'):
            prepare.main([*add, '--bos'])


def test_a_large_vocabulary_takes_four_bytes(folders, tmp_path):
    file = json.loads((folders['gpt2'] / 'tokenizer.json').read_text())
    file['added_tokens'] = [{'id': 70_000, 'content': '<|endoftext|>', 'special': True}]
    (tmp_path / 'tokenizer.json').write_text(json.dumps(file))
    (tmp_path / 'a.txt').write_text('text ' * 50)
    (tmp_path / 'b.txt').write_text('more ' * 50)
    prepare.main([f'{tmp_path}/*.txt', f'--tokenizer={tmp_path}', '--name=x', f'--data_dir={tmp_path}/data'])
    meta = read_meta(str(tmp_path / 'data' / 'x'))
    ids = np.fromfile(tmp_path / 'data' / 'x' / 'train.bin', dtype='<u4')
    assert meta['dtype'] == 'uint32' and meta['vocab_size'] == 70_001 and ids[-1] == 70_000


def test_bos_needs_an_id_of_its_own(tmp_path):
    (tmp_path / 'a.txt').write_text('text ' * 50)
    with pytest.raises(ValueError, match='needs a tokenizer with a begin-of-text id of its own'):
        prepare.main([str(tmp_path / 'a.txt'), '--bos', f'--data_dir={tmp_path}/data'])


def replaced(**parts):
    def damage(file):
        for name, value in parts.items():
            place = file['model'] if name in file['model'] and name not in file else file
            place[name] = value
    return damage


SPLIT = {'type': 'Split', 'pattern': {'Regex': LLAMA3}, 'behavior': 'Isolated', 'invert': False}
BYTES = {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': False}


def letters(*tokens):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return {token: i for i, token in enumerate([*alphabet, *tokens])}


def sequence(*steps):
    return replaced(pre_tokenizer={'type': 'Sequence', 'pretokenizers': list(steps)})


@pytest.mark.parametrize('damage, words', [
    (replaced(normalizer={'type': 'NFKC'}), 'its normalizer .*NFKC.* is not known'),
    (replaced(normalizer={'type': 'Sequence', 'normalizers': [{'type': 'NFC'}, {'type': 'Lowercase'}]}), 'normalizer'),
    (replaced(pre_tokenizer=None), 'its pre_tokenizer null is not known'),
    (replaced(pre_tokenizer={'type': 'Metaspace', 'replacement': '_'}), 'pre_tokenizer .*Metaspace'),
    (replaced(pre_tokenizer={'type': 'ByteLevel', 'add_prefix_space': True}), 'pre_tokenizer'),
    (sequence({**SPLIT, 'behavior': 'Removed'}, BYTES), 'pre_tokenizer'),
    (sequence({**SPLIT, 'invert': True}, BYTES), 'pre_tokenizer'),
    (sequence({**SPLIT, 'pattern': {'String': ' '}}, BYTES), 'pre_tokenizer'),
    (sequence({**SPLIT, 'pattern': {'Regex': r'\X+'}}, BYTES), 'pre_tokenizer'),
    (sequence(SPLIT, SPLIT, BYTES), 'pre_tokenizer'),
    (sequence({'type': 'Digits', 'individual_digits': False}, {**BYTES, 'use_regex': True}), 'pre_tokenizer'),
    (replaced(type='Unigram'), "type='Unigram', which is not a byte-level BPE"),
    (replaced(byte_fallback=True), 'byte_fallback'), (replaced(dropout=0.1), 'dropout'),
    (replaced(end_of_word_suffix='</w>'), 'end_of_word_suffix'),
    (lambda file: file['model']['merges'].reverse(), 'comes later than that of a higher id'),
    (lambda file: file['model']['merges'].pop(500), 'its merges leave its token .* in pieces'),
    (lambda file: file['model'].update(merges=['b c', 'a b', 'ab c'], vocab=letters('bc', 'ab', 'abc')),
     "its merges leave its token 'abc' in pieces: 'a bc'"),
    (sequence({**SPLIT, 'pattern': {'Regex': '[a-z]+ ?|.'}}, BYTES), 'pre_tokenizer'),
    (lambda file: file['model']['vocab'].update({'▁the': 9999}), "its token '▁the' is not written"),
    (lambda file: file['model']['vocab'].pop('a'), 'tokenizer.json'),
    (lambda file: file.pop('model'), 'is not a tokenizer.json'), (lambda file: file.update(model=[]), 'tokenizer.json'),
])
def test_what_would_encode_otherwise_is_refused(folders, tmp_path, damage, words):
    file = json.loads((folders['gpt2'] / 'tokenizer.json').read_text())
    damage(file)
    (tmp_path / 'tokenizer.json').write_text(json.dumps(file))
    with pytest.raises(ValueError, match=words) as e:
        read_tokenizer_json(str(tmp_path))
    assert str(tmp_path) in str(e.value) and len(str(e.value)) < 500


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r'tokenizer\.json cannot be read'):
        read_tokenizer_json(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer.json').write_text('{"model": ')
    with pytest.raises(ValueError, match=r'tokenizer\.json: Expecting value'):
        read_tokenizer_json(str(tmp_path))
    with pytest.raises(ValueError, match=r'is unknown; there are byte, char, bpe:SIZE, .*tokenizer\.json'):
        prepare.main(['stdlib', f'--tokenizer={tmp_path}/vocab.json'])


def test_gpt2s_own_is_gpt2s_and_another_is_not(gpt2):
    """So that data made by the one goes with weights that carry the other."""
    name, tokens = {'kind': 'tiktoken', 'name': 'gpt2'}, gpt2.pieces[:-1]
    end = {'<|endoftext|>': 50256}
    assert same_tokenizer(BPETokenizer(tokens, GPT2_SPLIT, end, 50256).spec(), name)
    assert same_tokenizer(name, BPETokenizer(tokens).spec()) and same_tokenizer(name, dict(name))
    others = [BPETokenizer([*tokens[:-2], tokens[-1], tokens[-2]]), BPETokenizer(tokens, KNOWN_SPLITS[0]),
              BPETokenizer(tokens, nfc=True), BPETokenizer(tokens, specials=end)]
    assert not any(same_tokenizer(other.spec(), name) for other in others)
    for nothing in (None, {}, {'kind': []}, {'kind': 'bpe'}, 'gpt2'):
        assert not same_tokenizer(nothing, name) and not same_tokenizer(name, nothing)


def test_the_two_files_that_gpt2s_had_before_are_read_too(folders, tmp_path):
    file = json.loads((folders['gpt2'] / 'tokenizer.json').read_text())
    vocab = {**file['model']['vocab'], '<|endoftext|>': 3000}
    merges = [pair if isinstance(pair, str) else ' '.join(pair) for pair in file['model']['merges']]
    (tmp_path / 'vocab.json').write_text(json.dumps(vocab))
    (tmp_path / 'merges.txt').write_text('\n'.join(['#version: 0.2', *merges, '']))
    (tmp_path / 'added_tokens.json').write_text('{"<pad>": 3001}')
    ours, whole = read_tokenizer_json(str(tmp_path)), read_tokenizer_json(str(folders['gpt2']))
    text = ''.join(source(3))
    assert ours.encode(text).tolist() == whole.encode(text).tolist()
    assert (ours.eot, ours.specials, ours.n_vocab) == (3000, {'<|endoftext|>': 3000, '<pad>': 3001}, 3002)
    (tmp_path / 'tokenizer_config.json').write_text('{"add_prefix_space": true}')
    with pytest.raises(ValueError, match=r'vocab\.json: its pre_tokenizer .* is not known'):
        read_tokenizer_json(str(tmp_path))
    os.remove(tmp_path / 'merges.txt')
    with pytest.raises(ValueError, match='cannot be read'):
        read_tokenizer_json(str(tmp_path))


def test_a_folder_of_weights_has_the_tokenizer_that_lies_in_it(folders, tmp_path):
    shutil.copy(folders['gpt2'] / 'tokenizer.json', tmp_path)
    assert pretrained(str(tmp_path), 'data') is None
    (tmp_path / 'config.json').write_text('{}')
    assert pretrained(str(tmp_path), 'data') == (str(tmp_path), read_tokenizer_json(str(tmp_path)).spec())
    os.remove(tmp_path / 'tokenizer.json')
    gpt2s = {'kind': 'tiktoken', 'name': 'gpt2'}
    for config, expected in (('{"vocab_size": 50257}', gpt2s), ('{"vocab_size": 99}', None), ('[]', None), ('{', None)):
        (tmp_path / 'config.json').write_text(config)
        assert pretrained(str(tmp_path), 'data') == (str(tmp_path), expected)
