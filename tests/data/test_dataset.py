"""dataset.py: what stands on the disk and how it gets there, what is known of it, and mixtures."""

import functools
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, error_of, noise, write_bins

from hotloop.data import dataset
from hotloop.data.dataset import open_bin, open_datasets, partial_folder, read_meta
from hotloop.data.tokenizer import tokenizer_from

BYTE = {'kind': 'byte'}


def files(text):
    return {'train.bin': text.encode(), 'meta.json': text.encode()}


def write(folder, text):
    with partial_folder(str(folder)) as partial:
        for name, raw in files(text).items():
            Path(partial, name).write_bytes(raw)


def finishes(action, calls):
    """Whether action() finishes in a process that ends at once after so many calls that change the disk."""
    child = os.fork()
    if child == 0:
        left = iter(range(calls))

        def counted(call):
            def run(*args, **kwargs):
                if next(left, None) is None:
                    os._exit(9)
                return call(*args, **kwargs)
            return run
        for name in ('makedirs', 'mkdir', 'rename', 'rmdir', 'unlink', 'fsync'):
            setattr(os, name, counted(getattr(os, name)))
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_a_kill_at_any_moment_costs_no_dataset(tmp_path):
    old = files('old')
    finished = False
    calls = 0
    while not finished:
        parent = tmp_path / str(calls)
        folder = parent / 'x'
        write(folder, 'old')
        finished = finishes(functools.partial(write, folder, 'new'), calls)
        after = contents(folder)
        assert after in (old, files('new')) or contents(parent / 'x.1') == old
        write(folder, 'next')
        expected = [files('next'), old]
        if after == files('new'):
            expected.append(after)
        assert [contents(path) for path in sorted(parent.iterdir())] == expected
        calls += 1
    assert calls > 6


def test_two_processes_do_not_write_one_dataset(tmp_path):
    with partial_folder(str(tmp_path / 'x')) as partial:
        Path(partial, 'file').touch()
        assert 'x.partial is in use by process' in error_of(write, tmp_path / 'x', 'other')
    assert os.listdir(tmp_path) == ['x']


def test_a_dataset_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / 'file').touch()
    assert 'file/x was not written: [Errno 20] Not a' in error_of(write, tmp_path / 'file' / 'x', 'new')


def test_meta_json_comes_before_meta_pkl_and_that_before_nanogpts_assumption(tmp_path):
    gpt2 = {'kind': 'tiktoken', 'name': 'gpt2', 'bos': None, 'stops': []}
    assert read_meta(str(tmp_path)) == {'dtype': 'uint16', 'vocab_size': 50304, 'tokenizer': gpt2,
                                        'splits': {}, 'template': None, 'eot': 50256, 'foreign': True}
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(nanogpt_meta('\n abcé')))
    tokenizer = {'kind': 'char', 'chars': '\n abcé', 'eot': False}
    assert read_meta(str(tmp_path)) == {'dtype': 'uint16', 'vocab_size': 6, 'tokenizer': tokenizer,
                                        'template': None, 'splits': {}, 'eot': None, 'foreign': True}
    write_bins(tmp_path, [1, 2], [3])
    meta = json.loads((tmp_path / 'meta.json').read_text())
    found = read_meta(str(tmp_path))
    assert found.pop('tokenizer')['kind'] == meta.pop('tokenizer')['kind']
    assert found == {**meta, 'template': None, 'foreign': False}


@pytest.mark.parametrize('change', [
    b'', b'[]', dict(format=2), dict(dtype='int8'), dict(vocab_size=0), dict(splits=[]), dict(tokenizer={})])
def test_a_damaged_meta_json_is_one_sentence(tmp_path, change):
    write_bins(tmp_path, [1], [2])
    if isinstance(change, dict):
        change = json.dumps({**json.loads((tmp_path / 'meta.json').read_text()), **change}).encode()
    (tmp_path / 'meta.json').write_bytes(change)
    error = error_of(read_meta, str(tmp_path))
    assert 'meta.json is damaged or from a later version (' in error and '\n' not in error


def nanogpt_meta(chars):
    """As nanoGPT's data/shakespeare_char/prepare.py writes it."""
    stoi = {c: i for i, c in enumerate(chars)}
    return {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': stoi}


def test_the_size_of_the_vocabulary_suffices_in_meta_pkl(tmp_path):
    """It is all that nanoGPT's train.py reads."""
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 3}))
    meta = read_meta(str(tmp_path))
    assert meta['vocab_size'] == 3 and tokenizer_from(meta['tokenizer']).pieces == [b'', b'', b'']


class Touch:
    """Makes a file when pickle.load reads it."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


def test_a_meta_pkl_cannot_run_code(tmp_path):
    target = tmp_path / 'touched'
    evil = pickle.dumps({**nanogpt_meta('abc'), 'extra': Touch(target)})
    pickle.loads(evil)['extra'].close()
    target.unlink()  # the trap itself works
    (tmp_path / 'meta.pkl').write_bytes(evil)
    assert read_meta(str(tmp_path))['vocab_size'] == 3 and not target.exists()


def test_a_damaged_meta_pkl_is_told_what_suffices(tmp_path):
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': np.int64(2)}))
    assert "{'vocab_size': N} is enough" in error_of(read_meta, str(tmp_path))


def test_bins_that_are_missing_empty_or_cut(tmp_path):
    for raw in (b'', b'123'):
        assert open_bin(str(tmp_path / 'a.bin'), 'uint16').size == 0
        (tmp_path / 'a.bin').write_bytes(raw)
    assert 'has 3 bytes, not a multiple of 2' in error_of(open_bin, str(tmp_path / 'a.bin'), 'uint16')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    write_bins(folder / 'a', noise(3001), noise(400))
    write_bins(folder / 'wide', noise(501), noise(200), dtype='uint32')
    write_bins(folder / 'other', noise(501), noise(200), tokenizer={'kind': 'char', 'chars': 'abc'})
    return str(folder)


def test_weights_are_those_given_or_the_sizes(data):
    one, = open_datasets('a', data)
    folder = os.path.join(data, 'a')
    assert one == ('a', folder, read_meta(folder), 3001)
    assert [d.weight for d in open_datasets('a,wide', data)] == [3001, 501]
    assert [d.weight for d in open_datasets('a:0.7,wide:.3', data)] == [0.7, 0.3]


def test_datasets_that_cannot_be_opened(data):
    for text in ('a:x', 'a:1,wide', 'a:0,wide:1', 'a:nan,wide:1'):
        assert 'give each dataset a weight above 0' in error_of(open_datasets, text, data)
    for text, words in (('a,other', 'tokenizers of a and other differ'),
                        ('a,nothing', 'nothing does not exist; make it with: python prepare.py')):
        assert words in error_of(open_datasets, text, data)


def test_a_checkpoints_tokenizer_must_be_the_datasets():
    x = dataset.Dataset('x', 'd/x', {'tokenizer': BYTE, 'source': "'a b' c"}, 1.0)
    for spec in (BYTE, None):
        dataset.check_tokenizer(spec, 'out', x)
    error = error_of(dataset.check_tokenizer, {'kind': 'char', 'chars': 'abc', 'eot': False}, 'my run', x)
    assert error.endswith("dataset=x differ; prepare 'a b' c again with '--tokenizer=my run'")


def test_inspect_shows_counts_and_a_window(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dataset, 'COUNT_BLOCK', 3)
    ids = [*b'ab\n', 256, *b'cd', 256, 256]
    masks = {'train': np.append(np.ones(14), [0, 0]), 'val': np.ones(0)}
    write_bins(tmp_path, [0] * 8 + ids, [], masks=masks)
    dataset.inspect(str(tmp_path))
    out = capsys.readouterr().out
    assert 'byte tokenizer of 257 ids, uint16, template None, from by hand' in out and 'val: 0 tokens' in out
    assert 'train: 16 tokens, 14 in the loss, 0.81 bytes per token, 7 distinct ids, the ten most' in out
    assert "\n           8  '\\x00'\n           3  '<|endoftext|>'\n" in out
    assert "from 8: 'ab\\n<|endoftext|>cd<|endoftext|><|endoftext|>'\n" in out
