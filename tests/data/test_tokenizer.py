"""Tokenizers: text to ids and back; rebuilt from specs; a tokenizer.json gives Hugging Face's ids."""

import json
import os
import pickle
import shutil
import socket
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from conftest import error_of, train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.data.documents import safe_cut
from hotloop.data.encode import encode_parts, prompt_ids
from hotloop.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    same_tokenizer,
    spec_of,
    tokenizer_from,
)
from hotloop.data.tokenizer_source import read_tokenizer_json

SOURCES = [path.read_text(encoding='utf-8')[:5000]
           for path in sorted(Path(os.__file__).parent.glob('*.py'))[::20]]
TEXTS = ['', ' ', "Hello, world! It's 2024; they'll pay 12345.67.", 'def f():\n\treturn  x\r\n\r\n\n   # e',
         'a  b   c    ', 'DON\'T "quote" — Größe, café, e\u0301 vs \u00e9', '日本語のテキスト、 текст',
         '😀👍🏽 \u200d\u200b\ufeff', '   ', '\n\n\n', '1 22 333 4444 ½ ² Ⅷ', 'x' * 300,
         '\x00\x1b[0m\x85\u2028', "'s 'T'LL ''' ... !!!\n!!!", 'tab\tbetween\t\twords ', 'مرحبا ١٢٣',
         'Å Å ﬁ', '<|endoftext|> is text', '</s><0x0A><s>', '▁the']

# st.text() never contains lone surrogates
any_text = st.lists(st.characters() | st.integers(0xd800, 0xdfff).map(chr), max_size=40).map(''.join)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(any_text, st.booleans(), any_text)
def test_bytes_and_characters_round_trip(text, eot, other):
    chars = ''.join(sorted(set(text)))
    byte, char = ByteTokenizer(), CharTokenizer(chars, eot)
    utf8 = text.encode('utf-8', 'surrogatepass')
    assert byte.encode(text).tolist() == list(utf8)
    assert char.encode(text).tolist() == [chars.index(c) for c in text]
    assert char.n_vocab == len(chars) + eot and char.eot == (len(chars) if eot else None)
    for tokenizer in (byte, char):
        ids = tokenizer.encode(text)
        end = [] if tokenizer.eot is None else [tokenizer.eot]
        assert tokenizer.decode([*ids.tolist(), *end]) == utf8
        assert tokenizer.sizes[ids].sum() == len(utf8) and not tokenizer.sizes[end].any()
        again = tokenizer_from(tokenizer.spec())  # JSON would join surrogates
        assert type(again) is type(tokenizer) and again.spec() == tokenizer.spec()
        assert again.pieces == tokenizer.pieces and again.encode(text).tolist() == ids.tolist()
    unknown = sorted(set(other) - set(text))[:20]
    if unknown:
        assert error_of(char.encode, other).endswith(f'char tokenizer: {"".join(unknown)!r}')


def test_repeats_are_measured_in_visible_bytes_of_which_signs_and_tokens_have_two():
    pieces = [b'a', b'_b', b' c\n', b' \t', b',', b' 7', b'c="', 'é'.encode(), '，'.encode()]
    sizes = BPETokenizer([*map(bytes, zip(range(256))), *pieces]).repeat_sizes
    assert sizes[256:].tolist() == [2, 2, 2, 0, 2, 2, 5, 2, 3, 0]
    assert CharTokenizer('a_é😀 ,7', True).repeat_sizes.tolist() == [1, 1, 2, 4, 0, 2, 2, 0]


def test_gpt2_round_trips_and_its_sizes_are_bytes(gpt2):
    for text in (*TEXTS, 'a' * 3000, '\ud800 \ud83d\ude00'):
        ids = gpt2.encode(text).tolist()
        utf8 = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').encode()
        assert gpt2.decode([*ids, gpt2.eot, 50300]) == utf8  # 50300: padding of a model's vocabulary
        assert gpt2.eot not in ids and gpt2.sizes[ids].sum() == len(utf8)
    assert (gpt2.eot, gpt2.n_vocab, gpt2.sizes.shape) == (50256, 50257, (50257,))
    assert gpt2.sizes[:50256].min() == 1 and gpt2.sizes[50256] == 0
    assert tokenizer_from(gpt2.spec()).encode('hi there').tolist() == [5303, 612]
    assert same_tokenizer(BPETokenizer(gpt2.pieces[:-1]).spec(), gpt2.spec())
    assert prompt_ids(gpt2, 'hi<|endoftext|> there') == [5303, 50256, 612]


@pytest.mark.slow
def test_white_space_of_any_length_is_encoded():
    text = 'é' + '\n ' * 1_050_000 + 'x'  # tiktoken fails from a million on
    tokenizer = BPETokenizer([bytes([b]) for b in range(256)])
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()


def test_a_spec_that_cannot_be_used_is_refused():
    for spec in (None, {}, {'kind': 'magic'}, {'kind': 'hf'}):
        assert 'does not describe a tokenizer' in error_of(tokenizer_from, spec)
    error = error_of(tokenizer_from, {'kind': 'tiktoken', 'name': 'no-such-bpe'})
    assert "'no-such-bpe' could not be loaded" in error and 'TIKTOKEN_CACHE_DIR' in error


def test_a_prompt_names_special_ids_and_is_never_empty():
    byte, char = ByteTokenizer(), CharTokenizer('ab', eot=True)
    assert prompt_ids(byte, 'a<|endoftext|>b') == [97, 256, 98]
    assert prompt_ids(char, 'b<|endoftext|>a') == [1, 2, 0]
    assert prompt_ids(byte, '') == [256] and prompt_ids(CharTokenizer('a'), '') == [0]
    byte.bos = 256  # comes first, once
    assert prompt_ids(byte, 'a') == prompt_ids(byte, '<|endoftext|>a') == [256, 97]
    assert prompt_ids(byte, '') == [256]


@pytest.mark.parametrize('record', [{}, {'bos': 1}])
def test_older_records_hold_bos_beside_the_spec(record):
    spec = {'kind': 'byte', 'bos': 9, 'eot': 2}  # The bos of an older spec is only a name.
    expected = {'kind': 'byte', 'eot': 2, 'bos': record.get('bos'), 'stops': []}
    assert spec_of({'tokenizer': spec, **record}) == expected == spec_of({'tokenizer': expected})


def test_equal_ids_under_two_names_are_the_same_tokenizer():
    """Data made with one goes with weights that carry the other."""
    small, end = train_bpe(SOURCES, 300), {'<|endoftext|>': 300}
    own = BPETokenizer(small).spec()
    assert same_tokenizer(own, dict(own))
    assert same_tokenizer(BPETokenizer(small, specials=end, eot=300).spec(), own)
    swapped = BPETokenizer([*small[:-2], small[-1], small[-2]])
    for other in (BPETokenizer(small, specials=end).spec(), swapped.spec(), None, {'kind': []}):
        assert not same_tokenizer(other, own) and not same_tokenizer(own, other)


# -----------------------------------------------------------------------------
# tokenizer.json

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
BYTE_LEVEL = ('gpt2', 'llama3', 'qwen')
FAMILIES = (*BYTE_LEVEL, 'llama2', 'mistral', 'gemma')
ENDS = {'llama3': ('<|end_of_text|>', '<|begin_of_text|>'), 'llama2': ('</s>', '<s>'),
        'mistral': ('</s>', '<s>'), 'gemma': ('<eos>', '<bos>')}


def byte_level(family):
    """A byte-level BPE with the family's steps."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if family in ('llama3', 'qwen'):
        pattern = LLAMA3_SPLIT if family == 'llama3' else LLAMA3_SPLIT.replace('{1,3}', '')
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if family == 'qwen':
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(SOURCES + TEXTS, trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.add_special_tokens([*ENDS.get(family, ['<|endoftext|>']), '<|im_start|>', '<|im_end|>'])
    backend.add_tokens(['<think>', '\t' * 9])
    return json.loads(backend.to_str())


def sentencepiece(family):
    """A BPE with byte fallback, as Hugging Face converts the family's sentencepiece model."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    backend = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ['<unk>', *ENDS[family], '<|im_start|>', '<|im_end|>', *(f'<0x{b:02X}>' for b in range(256))]
    backend.train_from_iterator([text.replace('\n', ' ') for text in SOURCES], trainers.BpeTrainer(
        vocab_size=1500, special_tokens=specials, show_progress=False))
    file = json.loads(backend.to_str())
    file['added_tokens'] = file['added_tokens'][:5]
    space = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '▁'}
    file['pre_tokenizer'] = None
    if family == 'llama2':
        file['normalizer'] = {'type': 'Sequence', 'normalizers': [{'type': 'Prepend', 'prepend': '▁'}, space]}
    elif family == 'mistral':
        file['pre_tokenizer'] = {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'first',
                                 'split': False}
    else:
        file['normalizer'] = space
        for name in ('\n\n', '▁▁', '\n'):  # words of white space
            token = {'id': len(file['model']['vocab']), 'content': name, 'special': False}
            file['model']['vocab'][name] = token['id']
            file['added_tokens'].append(file['added_tokens'][0] | token)
    return file


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """{family: a folder with a tokenizer.json like the family's}."""
    pytest.importorskip('tokenizers')
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        file = byte_level(family) if family in BYTE_LEVEL else sentencepiece(family)
        (folders[family] / 'tokenizer.json').write_text(json.dumps(file), encoding='utf-8')
    return folders


def hugging_face(folder, names_are_text):
    """Hugging Face's encode; names_are_text: those of special ids."""
    from tokenizers import Tokenizer
    backend = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    backend.encode_special_tokens = names_are_text
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def first_space(family, text):
    """The space that a tokenizer of the family puts before a text."""
    return b' ' if text and (family == 'llama2' or (family == 'mistral' and text[0] != ' ')) else b''


@pytest.mark.parametrize('family', FAMILIES)
def test_ids_are_hugging_faces_and_their_bytes_are_the_texts(folders, family):
    expected = hugging_face(folders[family], names_are_text=True)
    tokenizer = read_tokenizer_json(str(folders[family]))
    spec = json.loads(json.dumps(tokenizer.spec()))
    copies = (tokenizer_from(spec), pickle.loads(pickle.dumps(tokenizer)))
    rng = np.random.default_rng(0)
    letters = [*range(1, 0x250), 0x3b1, 0x4e00, 0x1f600, *b'   \n\r\t19aA']
    wild = [''.join(map(chr, rng.choice(letters, 60))) for _ in range(30)]
    for text in (*TEXTS, *wild, *SOURCES[:2]):
        ids = tokenizer.encode(text).tolist()
        assert ids == expected(text) and not {*tokenizer.specials.values()} & {*ids}, text
        assert all(copy.encode(text).tolist() == ids for copy in copies)
        if family in BYTE_LEVEL or '▁' not in text:  # which sentencepiece reads as a space
            utf8 = first_space(family, text) + text.encode()
            if family == 'qwen':
                utf8 = unicodedata.normalize('NFC', text).encode()
            assert b''.join(tokenizer.decode([i]) for i in ids) == utf8, text
            assert tokenizer.sizes[ids].sum() == len(utf8)
    for copy in copies:
        assert (copy.eot, copy.bos, copy.specials) == (tokenizer.eot, tokenizer.bos, tokenizer.specials)
    assert tokenizer.encode('\ud83d\ude00 \ud800').tolist() == expected('😀 �')


@pytest.mark.parametrize('family', FAMILIES)
def test_marks_and_pieces_are_encoded_as_the_complete_text(folders, family):
    """A text that continues another gets no space. After a special id it gets what Hugging Face gives it."""
    expected = hugging_face(folders[family], names_are_text=False)
    tokenizer = read_tokenizer_json(str(folders[family]))
    chat = '<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n<think>' + '\t' * 10 + 'x'
    for text in (chat, 'begin ' + chat, *TEXTS):
        assert encode_parts(tokenizer, [(text, True, True)])[0].tolist() == expected(text)
    text = max(SOURCES, key=len)
    ids = tokenizer.encode(text).tolist()
    for size in range(500, len(text), 900):
        cut = safe_cut(text, size)
        head, _ = encode_parts(tokenizer, [(text[:cut], False, True)])
        tail, _ = encode_parts(tokenizer, [(text[cut:], False, True)], start=False)
        assert [*head.tolist(), *tail.tolist()] == ids
    ids, mask = encode_parts(tokenizer, [('ask th', True, False), ('en', False, True)])
    assert tokenizer.decode(ids) == first_space(family, 'ask') + b'ask then'
    assert tokenizer.decode(ids[mask == 1]) == b'en'


@pytest.mark.parametrize('family', FAMILIES)
def test_the_end_is_the_usual_one_or_that_of_the_config(folders, tmp_path, family):
    usual = read_tokenizer_json(str(folders[family]))
    assert usual.eot == usual.specials[ENDS.get(family, ['<|endoftext|>'])[0]]
    assert usual.decode([usual.eot]) == b'' == usual.decode([usual.n_vocab])
    shutil.copy(folders[family] / 'tokenizer.json', tmp_path)
    config = {'eos_token': {'content': '<|im_end|>'}, 'bos_token': None}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    chat = read_tokenizer_json(str(tmp_path))
    assert chat.eot == usual.specials['<|im_end|>']
    assert usual.decode([chat.eot]) == b'<|im_end|>' and chat.decode([chat.eot]) == b''


def test_a_tokenizer_json_that_cannot_be_used_is_refused(folders, tmp_path):
    path = tmp_path / 'tokenizer.json'
    assert 'transformers makes one' in error_of(read_tokenizer_json, str(tmp_path))
    good = (folders['gpt2'] / 'tokenizer.json').read_text(encoding='utf-8')
    words = {'model': {'type': 'WordLevel', 'vocab': {'a': 0}, 'unk_token': 'a'}}
    for raw, sentence in (
            ('{"model": ', 'cannot read it: EOF'), (json.dumps(json.loads(good) | words), 'it is not a BPE'),
            (json.dumps(json.loads(good) | {'pre_tokenizer': None}), 'it is not a BPE'),
            (good.replace('"add_prefix_space": false', '"add_prefix_space": true', 1), 'it is not a BPE')):
        path.write_text(raw)
        error = error_of(read_tokenizer_json, str(tmp_path))
        assert error.startswith(f'{path} cannot be used: ') and sentence in error


def test_a_network_that_drops_packets_does_not_hang_tiktokens_download(monkeypatch, tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as server:  # nobody answers
        monkeypatch.setenv('HTTPS_PROXY', f'http://127.0.0.1:{server.getsockname()[1]}')
        for name in ('NO_PROXY', 'no_proxy', 'https_proxy'):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
        monkeypatch.setattr('tiktoken.registry.ENCODINGS', {})
        monkeypatch.setattr('hotloop.data.download.TIMEOUT', (0.2, 0.05))
        error = error_of(tokenizer_from, {'kind': 'tiktoken', 'name': 'gpt2'})
    assert error.startswith("the tokenizer 'gpt2' could not be loaded: ReadTimeout; set TIKTOKEN_CACHE_DIR")
