"""Data is a pure function of seed and step, whatever the processes and wherever the tokens are kept."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import noise, same, write_bins

from hotloop.data.dataset import Dataset, read_meta
from hotloop.system.distributed import Env
from hotloop.training.checkpoint import RunState
from hotloop.training.dataloader import (
    Batches,
    Mixture,
    Split,
    copy_to_device,
    kept_on_device,
    micro_seed,
    open_split,
    share_batch,
    windows_per_epoch,
)

T = 16


def config(batch=4, accumulation=4):
    return SimpleNamespace(batch_size=batch, gradient_accumulation_steps=accumulation, seed=1337)


def open_folder(folder, name='train', T=T):
    return Split(str(folder), name, read_meta(str(folder)), T)


@pytest.fixture(scope='module')
def splits(tmp_path_factory):
    """One of each kind: plain, masked more and more densely, of four-byte ids, and a mixture of these."""
    folder = tmp_path_factory.mktemp('data')
    masks = {'train': np.random.default_rng(2).random(700) < np.linspace(0.05, 1, 700), 'val': np.ones(100)}
    write_bins(folder / 'plain', noise(900, low=60000, high=65535), noise(100))
    write_bins(folder / 'masked', noise(700), noise(100), masks=masks)
    write_bins(folder / 'wide', noise(800, low=2**17, high=2**31 - 1), noise(100), dtype='uint32')
    kinds = {name: open_folder(folder / name) for name in ('plain', 'masked', 'wide')}
    write_bins(folder / 'ended', noise(900, low=65500, high=65535), noise(100))
    meta = {**read_meta(str(folder / 'ended')), 'eot': 65505}
    documents = Split(str(folder / 'ended'), 'train', meta, T, masks_documents=True)
    return {**kinds, 'mixture': Mixture(list(kinds), list(kinds.values()), [0.5, 0.3, 0.2]),
            'documents': documents}


KINDS = ['plain', 'masked', 'wide', 'mixture']


def epoch_order(seed, num_tokens, T, epoch):
    split = SimpleNamespace(num_tokens=num_tokens, T=T, num_windows=windows_per_epoch(num_tokens, T))
    return Split.epoch_order(split, seed, epoch)


def load_all(batches, steps):
    """(x, y, seed) of every micro-batch of these steps."""
    return [load() for step in steps for load in batches.step(step)[1]]


def test_the_order_is_that_of_earlier_versions(tmp_path):
    """A run that was started by one resumes with these very windows, dropout masks and data."""
    assert epoch_order(1337, 4001, 16, 0)[:5].tolist() == [649, 2825, 985, 3689, 1129]
    assert epoch_order(7, 100, 16, 3).tolist() == [62, 14, 46, 78, 30]
    assert (micro_seed(1337, 0, 0), micro_seed(2, 3, 4)) == (6791203004760804454, 4142466838686032688)
    for name in 'ab':
        write_bins(tmp_path / name, np.arange(500) % 251, np.arange(100))
    mixture = Mixture(['a', 'b'], [open_folder(tmp_path / name) for name in 'ab'], [3, 1])
    starts = mixture.starts(7, np.array([0, 1, 2, 9_999, 10_000, 123_456]))
    assert starts.tolist() == [242, 754, 178, 144, 241, 270]
    assert mixture.splits[0].fingerprint() == '45d02bbae36f813c'
    write_bins(tmp_path / 'a', np.arange(500) % 251, np.arange(100),
               masks={'train': np.ones(500), 'val': np.ones(100)})
    assert open_folder(tmp_path / 'a').fingerprint() != '45d02bbae36f813c'


@pytest.mark.parametrize('kind', KINDS)
def test_the_order_is_a_pure_function_of_seed_and_step(splits, kind):
    """Any step gives the same windows, asked in any order; over the seam of two blocks of a mixture too."""
    split = splits[kind]
    complete = split.starts(7, np.arange(10_080)).reshape(84, 120)
    for step in (83, 0, 82, 5, 5):
        assert np.array_equal(split.starts(7, np.arange(step * 120, step * 120 + 120)), complete[step])
    assert not np.array_equal(split.starts(8, np.arange(120)), complete[0])


@pytest.mark.parametrize('num_tokens', [1000, 49, 34, 17])
def test_an_epoch_sees_each_of_its_windows_once(tmp_path, num_tokens):
    """Non-overlapping windows within the split, one at least, and at most one fewer than fit."""
    write_bins(tmp_path, noise(num_tokens), noise(100))
    per_epoch = windows_per_epoch(num_tokens, T)
    assert per_epoch >= max((num_tokens - 1) // T - 1, 1)
    starts = open_folder(tmp_path).starts(7, np.arange(5 * per_epoch))
    for epoch in starts.reshape(5, per_epoch):
        assert np.array_equal(np.sort(epoch) - epoch.min(), T * np.arange(per_epoch))
        assert epoch.min() >= 0 and epoch.max() + T < num_tokens
    orders = [epoch_order(7, 100, T, epoch) for epoch in range(300)]
    assert {int(order.min()) for order in orders} == set(range(100 - 5 * T)), 'every offset is drawn'
    assert len({tuple(order - order.min()) for order in orders}) > 50


@pytest.mark.parametrize('kind', KINDS)
def test_targets_are_the_next_tokens(splits, kind):
    """Which a loss that looks good does not prove; -1 where the mask is 0; num_targets counts the others."""
    split = splits[kind]
    starts = split.starts(3, np.arange(60))
    x, y = split.gather(starts)
    tokens = np.concatenate([part.tokens for part in split.splits]).astype(np.int64)
    masks = [np.ones(part.num_tokens) if part.mask is None else part.mask for part in split.splits]
    masks = np.concatenate(masks)
    for row, start in enumerate(starts):
        assert np.array_equal(x[row], tokens[start:start + T])
        counted = masks[start + 1:start + T + 1] > 0
        assert np.array_equal(y[row], np.where(counted, tokens[start + 1:start + T + 1], -1))
    assert split.num_targets(starts) == (y >= 0).sum()
    assert ((y < 0).any()) == (kind in ('masked', 'mixture'))


def test_a_document_begins_after_an_end_id_and_at_the_start_of_a_window(splits):
    split = splits['documents']
    x, _, documents = split.gather(split.starts(3, np.arange(60)))
    assert documents.max() > 1
    for tokens, numbers in zip(x, documents, strict=True):
        assert numbers.tolist() == [int((tokens[:t] == 65505).sum()) for t in range(T)]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('world', [1, 4])
def test_processes_share_the_global_batch(splits, kind, world):
    """Their micro-batches one after another are the windows of the step, and have seeds of their own."""
    split, cfg = splits[kind], config(batch=8)
    processes = [Batches(split, cfg, Env(rank, world)) for rank in range(world)]
    x, y, seeds = zip(*(part for process in processes for part in load_all(process, [6])), strict=True)
    expected = split.gather(split.starts(cfg.seed, np.arange(6 * 32, 7 * 32)))
    assert np.array_equal(torch.cat(x), expected[0]) and np.array_equal(torch.cat(y), expected[1])
    assert {process.step(6)[0] for process in processes} == {(expected[1] >= 0).sum()}
    assert list(seeds) == [micro_seed(1337, 6, micro) for micro in range(len(x))]


def test_with_another_batch_no_window_is_left_out_or_repeated(splits):
    before = RunState(iter_num=6, tokens_seen=6 * 16 * T)
    batches = Batches(splits['plain'], config(batch=8), Env(), before.shift(T, 32))
    expected = splits['plain'].starts(1337, np.arange(6 * 16, 6 * 16 + 32))
    x = torch.cat([load()[0] for load in batches.step(6)[1]])
    assert np.array_equal(x, splits['plain'].gather(expected)[0])


@pytest.mark.parametrize('kind', [*KINDS, 'documents'])
def test_data_on_the_device_is_the_same_data(splits, monkeypatch, kind):
    """Its positions are uploaded before a step: later, the host would wait for the GPU."""
    on_host, on_device = (Batches(splits[kind], config(), Env(1, 2)) for _ in range(2))
    on_device.on_device = copy_to_device(splits[kind], torch.device('cpu'))
    expected = load_all(on_host, range(9))
    loads = [load for step in range(9) for load in on_device.step(step)[1]]
    monkeypatch.setattr(torch, 'from_numpy', lambda array: pytest.fail('a load uploads'))
    found = [load() for load in loads]
    assert same(found, expected)
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in found[0][:-1])


def test_data_goes_to_a_gpu_that_has_room_for_it(splits, monkeypatch):
    gpu = Env(device=torch.device('cuda'))
    for free, fits in ((20 * splits['masked'].num_bytes, True), (9 * splits['masked'].num_bytes, False)):
        monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device, free=free: (free, 0))
        assert kept_on_device(splits['masked'], gpu) is fits
    assert not kept_on_device(splits['masked'], Env())


def test_share_batch():
    """The largest micro-batch up to batch_size, for the same global batch."""
    assert share_batch(20, 2, 8) == (5, 1) and share_batch(12, 40, 8) == (12, 5)
    assert share_batch(32, 1, 1) == (32, 1) and share_batch(8, 8, 2) == (8, 4)


@pytest.mark.parametrize('num_tokens, mask, words', [
    (101, [1] * 100, r'train\.bin has 100 tokens, not 101; prepare again'),
    (100, [1] * 99, r'train\.mask\.bin is not of 100 tokens'),
    (100, [1] + [0] * 99, r'train\.mask\.bin .* or all 0')])  # the first token is not a target
def test_bins_and_masks_that_cannot_be(tmp_path, num_tokens, mask, words):
    write_bins(tmp_path, noise(100), noise(100), masks={'train': np.array(mask), 'val': np.ones(100)})
    meta = {**read_meta(str(tmp_path)), 'splits': {'train': {'tokens': num_tokens}}}
    with pytest.raises(ValueError, match=words):
        Split(str(tmp_path), 'train', meta, T)


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    write_bins(tmp_path, [*noise(100), 300], noise(100), vocab_size=301)
    split = open_folder(tmp_path)
    with pytest.raises(ValueError, match=r'token id 300, but .* has 257 ids; .*--tokenizer=RUN_OR_MODEL'):
        split.check_ids(257)
    split.check_ids(301)


# -----------------------------------------------------------------------------
# mixtures

def test_a_mixture_draws_by_weight_and_each_split_in_its_own_order(splits):
    mixture = splits['mixture']
    starts = mixture.starts(7, np.arange(30_000))
    owner = np.searchsorted(mixture.bases, starts, side='right') - 1
    for block in owner.reshape(3, 10_000):
        assert np.bincount(block).tolist() == [5000, 3000, 2000]
    assert abs(int((owner[:500] == 0).sum()) - 250) < 50  # any stretch has about its share
    for k, split in enumerate(mixture.splits):
        mine = starts[owner == k] - mixture.bases[k]
        assert np.array_equal(mine, split.starts(7 + k, np.arange(len(mine))))


def test_one_dataset_is_a_split_and_several_are_a_mixture(splits):
    def datasets(**weights):
        folders = {name: os.path.dirname(splits[name].path) for name in weights}
        return [Dataset(name, folders[name], read_meta(folders[name]), weights[name]) for name in weights]
    assert isinstance(open_split(datasets(plain=1), 'train', T), Split)
    mixture = open_split(datasets(plain=1, wide=3), 'train', T)
    assert mixture.weights == [0.25, 0.75] and mixture.names == ['plain', 'wide']
    with pytest.raises(ValueError, match='wide would never be drawn: its weight is below 1/20000 of the sum'):
        open_split(datasets(plain=1, wide=1e-5), 'train', T)
    with pytest.raises(ValueError, match=r'val\.bin has 100 tokens, too few for block_size=100; lower'):
        open_split(datasets(plain=1), 'val', 100)
