"""prepare.py from outside: --inspect tells what is in a dataset; names and leftovers."""

import numpy as np
import pytest
from conftest import write_bins

import prepare
from hotloop.dataset import count_ids


@pytest.fixture
def inspect(tmp_path, capsys):
    def run(*names):
        prepare.main(['--inspect', *names, f'--data_dir={tmp_path}'])
        return capsys.readouterr().out
    return run


def test_counts_window_and_ends(inspect, tmp_path):
    """The window shows document ends, and in brackets what the loss does not count."""
    ids = [*b'ab\n', 256, *b'cd', 256, 256]
    mask = np.array([1, 1, 1, 1, 0, 0, 1, 1])
    write_bins(tmp_path / 'x', [0] * 8 + ids, ids, masks={'train': np.concatenate([np.ones(8), mask]), 'val': mask})
    out = inspect('x')
    assert 'byte tokenizer of 257 ids, uint16, from by hand' in out
    assert 'train: 16 tokens, 0.81 bytes a token, 3 document ends, 7 different ids' in out
    assert out.endswith('from 8 on: ab\\n<|endoftext|>[cd]<|endoftext|><|endoftext|>\n')
    assert 'most frequent: "\\x00" 50.0%, "<|endoftext|>" 18.8%' in out


def test_nanogpts_characters(inspect, tmp_path):
    import pickle
    write_bins(tmp_path / 'x', [0, 1, 1, 2] * 3, [1, 2], tokenizer=False)
    with open(tmp_path / 'x' / 'meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 3, 'itos': {0: 'ä', 1: 'b', 2: 'c'}, 'stoi': {'ä': 0, 'b': 1, 'c': 2}}, f)
    out = inspect('x')
    assert "nanoGPT's: no meta.json" in out and '12 tokens, 1.25 bytes a token' in out and 'bcäbbc' in out


def test_several_empty_and_missing_ones(inspect, tmp_path):
    for name in 'ab':
        write_bins(tmp_path / name, list(b'hello'), [])
    assert inspect('a', 'b').count('val: 0 tokens') == 2
    with pytest.raises(ValueError, match='c does not exist; make it with'):
        inspect('c')


def test_blocks_add_up():
    tokens = np.random.default_rng(0).integers(0, 9, (1 << 24) + 77).astype(np.uint16)
    tokens[-1] = 300
    assert count_ids(tokens).tolist() == np.bincount(tokens).tolist()


def test_a_folder_with_a_dot_keeps_its_name_and_leftovers_go(tmp_path):
    (tmp_path / 'notes.v2').mkdir()
    for i in range(3):
        (tmp_path / 'notes.v2' / f'{i}.txt').write_text('text ' * 9)
    (tmp_path / 'data' / 'notes.v2.partial.123').mkdir(parents=True)  # of a kill between two renames
    prepare.main([str(tmp_path / 'notes.v2'), f'--data_dir={tmp_path}/data'])
    assert [p.name for p in (tmp_path / 'data').iterdir()] == ['notes.v2']
