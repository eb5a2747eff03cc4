"""Mixtures: exact shares by weight, each split in its own order, and what open_split() opens."""

import os

import numpy as np
import pytest
from conftest import noise, write_bins

from hotloop.data.dataset import Dataset, read_meta
from hotloop.training.dataloader import Split
from hotloop.training.mixture import Mixture, open_split

T = 16


@pytest.fixture
def splits(tmp_path):
    """{name: Split} of three datasets, and their mixture."""
    write_bins(tmp_path / 'plain', noise(900, low=60000, high=65535), noise(100))
    write_bins(tmp_path / 'short', noise(700), noise(100))
    write_bins(tmp_path / 'wide', noise(800, low=2**17, high=2**31 - 1), noise(100), dtype='uint32')
    kinds = {}
    for name in ('plain', 'short', 'wide'):
        folder = str(tmp_path / name)
        kinds[name] = Split(folder, 'train', read_meta(folder), T)
    return {**kinds, 'mixture': Mixture(list(kinds), list(kinds.values()), [0.5, 0.3, 0.2])}


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


def test_a_window_must_fit(tmp_path):
    folder = write_bins(tmp_path, noise(17), noise(16))
    datasets = [Dataset('tiny', folder, read_meta(folder), 1.0)]
    open_split(datasets, 'train', T)
    with pytest.raises(ValueError, match=r'val\.bin has 16 tokens, too few .* block_size=16'):
        open_split(datasets, 'val', T)
