"""Learning a byte-level BPE: which merges it learns."""

import os
from pathlib import Path

import pytest
from conftest import train_bpe

from hotloop.data import bpe
from hotloop.data.bpe import BYTE_OF, count_words

SOURCES = [path.read_text(encoding='utf-8') for path in sorted(Path(os.__file__).parent.glob('*.py'))[::40]]


def test_merges_equal_those_of_hugging_face():
    """The same words, and the same choice among equally frequent pairs; of no text only bytes."""
    package = pytest.importorskip('tokenizers')
    reference = package.Tokenizer(package.models.BPE())
    reference.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    reference.train_from_iterator(SOURCES, package.trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=alphabet, show_progress=False))
    expected = [bytes(BYTE_OF[letter] for letter in reference.id_to_token(i)) for i in range(1200)]
    assert train_bpe(SOURCES, 1200) == expected and train_bpe([], 300) == expected[:256]


def test_rare_words_are_dropped_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(bpe, 'MAX_WORDS', 3)
    texts = ['often ' * 9, 'some ' * 5, *(f'w{chr(97 + i)} ' for i in range(20)), 'often ']
    counts = count_words(texts)
    assert len(counts) == 3 and counts[' often'] == 8 and counts[' some'] == 4
    assert count_words(['x' * 5000]) == {'x' * 1000: 1}
