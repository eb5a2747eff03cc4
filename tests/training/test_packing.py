"""Windows of complete rows: each row once an epoch, never cut, apart from the others; documents of texts."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import error_of, load, noise, rows, same, write_bins

import prepare
from hotloop.data.dataset import Dataset, read_meta
from hotloop.training.dataloader import Packed, Split, open_split, pack
from model import GPT

T = 64


def row_of(i):
    return {'messages': [{'role': 'user', 'content': f'{i}?' * (i % 4)},
                         {'role': 'assistant', 'content': 'abcdefgh'[:i % 7 + 1] * (i % 3 + 1)}]}


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
    """data_dir with the dataset chats: 60 rows of 13 to 19 tokens in the chatml template."""
    folder = tmp_path_factory.mktemp('rows')
    text = ''.join(json.dumps(row_of(i)) + '\n' for i in range(60))
    (folder / 'chats.jsonl').write_text(text, encoding='utf-8')
    prepare.main([str(folder / 'chats.jsonl'), f'--data_dir={folder}', '--tokenizer=bpe:300',
                  '--val=0.2'])
    return folder


def open_rows(data_dir, name='train', T=T):
    folder = str(data_dir / 'chats')
    return Packed(folder, name, read_meta(folder), T)


def rows_on_disk(split):
    """[(ids, mask)] of each row of a Packed, by what prepare.py wrote."""
    ids, masks = (np.split(part, split.ends[:-1]) for part in (split.tokens, split.mask))
    return list(zip(ids, masks, strict=True))


def test_rows_are_packed_tightly_and_none_is_cut():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 300, 2000)
    windows = pack(lengths.tolist(), 1025)
    used = np.bincount(windows, weights=lengths)
    assert used.max() <= 1025 and used.min() > 0 and len(used) == np.ceil(lengths.sum() / 1025)
    assert pack([5, 5, 5], 9).tolist() == [0, 1, 2] and pack([9, 1, 8], 9).tolist() == [0, 1, 1]


def test_an_epoch_holds_each_row_once_with_its_answers_as_targets(data_dir):
    split = open_rows(data_dir)
    on_disk = rows_on_disk(split)
    assert len(on_disk) == 47 and split.num_windows < 16
    starts = split.starts(7, np.arange(3 * split.num_windows)).reshape(3, -1)
    assert not np.array_equal(starts[0], starts[1])
    for epoch in starts:
        assert sorted(np.concatenate([split.rows[start] for start in epoch]).tolist()) == list(range(47))
        x, y, documents = split.gather(epoch)
        for window, start in enumerate(epoch):
            for number, row in enumerate(split.rows[start]):
                ids, mask = on_disk[row]
                here, n = documents[window] == number, len(ids) - 1  # the last token may be a target only
                assert np.array_equal(x[window, here], ids[:here.sum()]) and here.sum() >= n
                assert np.array_equal(y[window, here][:n], np.where(mask, ids.astype(np.int64), -1)[1:])
                assert (y[window, here][n:] == -1).all()
            assert (y[window, documents[window] > number] == -1).all()
        assert split.num_targets(epoch) == (y >= 0).sum() == sum(mask[1:].sum() for _, mask in on_disk)


def test_rows_that_do_not_fit_are_counted_and_left_out(data_dir, capsys):
    split = open_rows(data_dir)
    lengths = np.diff(split.ends, prepend=0)
    limit = int(np.median(lengths))
    capsys.readouterr()
    short = open_rows(data_dir, T=limit - 1)
    kept = int((lengths <= limit).sum())
    assert 0 < kept < len(lengths) and sum(map(len, short.rows)) == kept
    assert re.fullmatch(rf'packing: train, {kept} rows in \d+ windows of {limit} tokens, \d+\.\d% padding; '
                        rf'{len(lengths) - kept} rows left out '
                        rf'\(the longest row has {lengths.max()} tokens\)\n'
                        rf'note: \d\d% of the tokens are in the rows left out, .* block_size={limit - 1}; '
                        r'--pack_rows=False reads .*\n', capsys.readouterr().out)
    words = rf'block_size=3 is too small for the rows of .*train\.bin, .* --block_size={lengths.min() - 1}'
    with pytest.raises(ValueError, match=words):
        open_rows(data_dir, T=3)


ROWS = dict(dataset='chats', block_size=T, pack_rows=True)


def test_a_run_learns_and_prints_how_it_packs(train_tiny, tmp_path, capsys):
    train_tiny('a', **ROWS, max_epochs=8)
    out = capsys.readouterr().out
    note, = re.findall(r'packing: train, \d+ rows in (\d+) windows of 65 tokens, \d+\.\d% padding;', out)
    assert f'run: {note} steps' in out and ' 8.00 epochs' in out  # eight windows a step
    losses = [row['val_loss'] for row in rows(tmp_path / 'a', 'val_loss')]
    assert losses[-1] < losses[0] - 0.5


def test_texts_without_an_end_of_documents_cannot_be_packed(data_dir, train_tiny):
    write_bins(data_dir / 'text', noise(900), noise(100))
    error = error_of(train_tiny, dataset='text', data_dir=data_dir, pack_rows=True)
    assert 'pack_rows=True needs rows, or texts with an end-of-text id' in error


def test_a_truncated_list_of_rows_is_an_error(data_dir, tmp_path):
    shutil.copytree(data_dir / 'chats', tmp_path / 'chats')
    path = tmp_path / 'chats' / 'train.docs.bin'
    for size in (80, 0):
        os.truncate(path, size)
        assert f'{path} does not end at' in error_of(open_rows, tmp_path)


def test_a_mixture_of_rows(data_dir):
    folder = str(data_dir / 'chats')
    datasets = [Dataset(name, folder, read_meta(folder), 1.0) for name in 'ab']
    mixture = open_split(datasets, 'train', T, pack_rows=True)
    assert mixture.num_windows == 2 * open_rows(data_dir).num_windows
    starts = mixture.starts(3, np.arange(20))
    parts = mixture.gather(starts)
    assert [part.shape for part in parts] == [(20, T)] * 3
    for split, chosen, positions in mixture.by_split(starts):
        assert chosen.any() and same([p[chosen].tolist() for p in parts],
                                     [p.tolist() for p in split.gather(positions)])
    assert mixture.num_targets(starts) == (parts[1] >= 0).sum()


# -----------------------------------------------------------------------------
# documents of texts

def test_a_run_masks_documents_in_training_and_evaluation(train_tiny, tmp_path):
    """Of about 30 bytes, each with an end-of-text id: its last loss is that of each document alone."""
    words = np.random.default_rng(0).integers(97, 107, 9000).astype(np.uint8).tobytes().decode()
    lines = [json.dumps({'text': words[i:i + 20 + i % 7 * 3]}) + '\n' for i in range(0, 8900, 30)]
    (tmp_path / 'texts.jsonl').write_text(''.join(lines), encoding='utf-8')
    prepare.main([str(tmp_path / 'texts.jsonl'), f'--data_dir={tmp_path}', '--tokenizer=byte'])
    train_tiny('masked', dataset='texts', data_dir=tmp_path, block_size=T, pack_rows=True)
    checkpoint = load(tmp_path / 'masked' / 'ckpt.pt')

    model = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model'])
    folder = str(tmp_path / 'texts')
    tokens, nats = Split(folder, 'val', read_meta(folder), T).tokens.astype(np.int64), 0.0
    for start in range(0, len(tokens) - 1, T):
        window = tokens[start:start + T + 1]
        begin = 0
        for end in [*(np.flatnonzero(window[:-1] == 256) + 1), len(window) - 1]:
            if end > begin:  # the first token of the next document is a target too
                part = torch.tensor(window[begin:end + 1])[None]
                nats += model(part[:, :-1], part[:, 1:]).item()
            begin = end
    found = rows(tmp_path / 'masked', 'val_loss')[-1]['val_loss']
    assert found == pytest.approx(nats / (len(tokens) - 1), rel=1e-4)
