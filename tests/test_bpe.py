"""The byte-pair encoding of our own: which merges it learns, that it loses nothing, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
from hotloop.bpe import train_bpe
from hotloop.dataset import read_meta
from hotloop.sources import stdlib_files
from hotloop.tokenizer import BPETokenizer, encode_marked, tokenizer_from

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


def texts():
    """About a megabyte of the standard library."""
    return [Path(path).read_bytes().decode() for _, path in stdlib_files()[::10]]


@pytest.fixture(scope='module')
def tokenizer():
    return BPETokenizer(train_bpe(texts()[:8], 600))


def test_merges_are_those_of_hugging_faces_tokenizers():
    """The same pre-split and the same rule among equally frequent pairs; theirs writes bytes as printable letters."""
    package = pytest.importorskip('tokenizers')
    theirs = package.Tokenizer(package.models.BPE())
    theirs.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.train_from_iterator(texts(), package.trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    rest = [b for b in range(256) if b not in PRINTABLE]
    byte = {chr(b): b for b in PRINTABLE} | {chr(256 + i): b for i, b in enumerate(rest)}
    vocabulary = sorted(theirs.get_vocab().items(), key=lambda item: item[1])
    assert train_bpe(texts(), 1500) == [bytes(byte[letter] for letter in token) for token, _ in vocabulary]


def test_merges_by_hand():
    """'aab' four times and 'ab' once: 'ab' occurs five times and 'aa' four, of which the first merge leaves
    none; at the end two pairs occur once, and the older one goes first."""
    tokens = train_bpe(['aab', ' aab', 'aab', 'aab ab'], 300)
    assert tokens[256:] == [b'ab', b'aab', b' ab', b' aab']
    assert train_bpe(['xyxyxy'], 258)[256:] == [b'xy', b'xyxy']
    assert len(train_bpe([], 300)) == 256 and sorted(train_bpe([], 300)) == [bytes([b]) for b in range(256)]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=['Cs']), max_size=60))
def test_nothing_is_lost(tokenizer, text):
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text.encode() and max(ids, default=0) < tokenizer.eot


def test_common_words_are_one_token_and_text_is_never_the_end(tokenizer):
    assert len(tokenizer.encode('self')) == len(tokenizer.encode(' return')) == 1
    assert tokenizer.eot not in tokenizer.encode('<|endoftext|>')
    assert encode_marked(tokenizer, '<|endoftext|>self') == [tokenizer.eot, *tokenizer.encode('self')]


def test_its_spec_rebuilds_it(tokenizer):
    again = tokenizer_from(json.loads(json.dumps(tokenizer.spec())))
    text = texts()[9]
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist() and again.n_vocab == tokenizer.n_vocab == 601
    assert again.sizes[again.encode(text)].sum() == len(text.encode()) and again.sizes[again.eot] == 0


def test_a_dataset_has_the_vocabulary_asked_for_and_learned_nothing_from_what_is_held_out(tmp_path):
    for i, word in enumerate(('apple', 'berry', 'cherry', 'damson')):
        (tmp_path / f'{i}.txt').write_text(f'{word} ' * 100)
    assert prepare.main([str(tmp_path), '--name=fruit', f'--data_dir={tmp_path}/data', '--tokenizer=bpe:280']) is None
    meta = read_meta(str(tmp_path / 'data' / 'fruit'))
    tokenizer = tokenizer_from(meta['tokenizer'])
    assert meta['vocab_size'] == tokenizer.n_vocab <= 280 and meta['eot'] == tokenizer.n_vocab - 1
    one_token = [w for w in ('apple', 'berry', 'cherry', 'damson') if len(tokenizer.encode(f' {w}')) == 1]
    assert len(one_token) == 3 and meta['splits']['val']['documents'] == 1


@pytest.mark.parametrize('name', ['bpe', 'bpe:', 'bpe:256', 'bpe:x', 'bpe:-5', 'bpe:9999999999', 'bpe:4096:2'])
def test_sizes_that_cannot_be(name):
    with pytest.raises(ValueError, match='write bpe:SIZE'):
        prepare.main(['stdlib', f'--tokenizer={name}'])


@pytest.mark.parametrize('tokens', [None, 3, [], ['a'], ['a', 'a'], [1], ['€'], {'a': 1}])
def test_specs_that_are_none(tokens):
    with pytest.raises(ValueError, match='describes no tokenizer'):
        tokenizer_from({'kind': 'bpe', 'tokens': tokens})
