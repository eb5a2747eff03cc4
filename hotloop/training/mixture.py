"""The data of a run: one split of a dataset, or splits of several mixed by weight."""

import functools

import numpy as np

from hotloop.training.dataloader import Split, windows_per_epoch
from hotloop.training.packing import Packed

INTERLEAVE = 10_000  # windows in which each split has its exact share


class Mixture:
    """Splits, mixed by weight and shuffled by the seed, with the methods of a Split."""

    def __init__(self, names, splits, weights):
        self.names = names
        self.splits = splits
        self.weights = [weight / sum(weights) for weight in weights]
        self.T = splits[0].T
        self.end_id = splits[0].end_id
        ends = np.cumsum([split.num_tokens for split in splits])
        self.bases = [0, *ends[:-1].tolist()]  # positions continue from one split to the next
        self.num_tokens = int(ends[-1])
        self.num_bytes = sum(split.num_bytes for split in splits)
        self.num_windows = windows_per_epoch(self.num_tokens, self.T)
        if isinstance(splits[0], Packed):
            self.num_windows = sum(split.num_windows for split in splits)
        last = np.round(np.cumsum(self.weights) * INTERLEAVE).astype(np.int64)
        self.shares = tuple(np.diff(last, prepend=0).tolist())
        if not all(self.shares):
            raise ValueError(f'{names[self.shares.index(0)]} would never be drawn: its weight is '
                             f'below 1/{2 * INTERLEAVE} of the sum; raise it, or leave it out')

    def starts(self, seed, index):
        blocks = index // INTERLEAVE
        places = index % INTERLEAVE
        starts = np.empty_like(index)
        for block in np.unique(blocks).tolist():
            split_of, nth_of = interleave(seed, block, self.shares)
            for k, split in enumerate(self.splits):
                chosen = (blocks == block) & (split_of[places] == k)
                windows = block * self.shares[k] + nth_of[k][places[chosen]]
                starts[chosen] = self.bases[k] + split.starts(seed + k, windows)
        return starts

    def by_split(self, starts):
        """Yield (split, which of the starts lie in it, their positions there)."""
        owner = np.searchsorted(self.bases, starts, side='right') - 1
        for k, split in enumerate(self.splits):
            yield split, owner == k, starts[owner == k] - self.bases[k]

    def gather(self, starts):
        result = None
        for split, chosen, positions in self.by_split(starts):
            parts = split.gather(positions)
            if result is None:
                result = np.empty((len(parts), len(starts), self.T), dtype=np.int64)
            result[:, chosen] = parts
        return tuple(result)

    def num_targets(self, starts):
        return sum(split.num_targets(positions) for split, _, positions in self.by_split(starts))


@functools.lru_cache(maxsize=2)  # a step can meet two blocks
def interleave(seed, block, shares):
    """Return the split of each window of a block, and how many of each split come before it."""
    split_of = np.repeat(np.arange(len(shares)), shares)
    split_of = np.random.default_rng((seed, block)).permutation(split_of)
    return split_of, [np.cumsum(split_of == k) - 1 for k in range(len(shares))]


def open_split(datasets, name, T, document_mask=False, pack_rows=False):
    """
    Open the Split 'train' or 'val' of one Dataset, or the Mixture of several.

    document_mask: windows carry the documents of their tokens. pack_rows: windows hold complete rows.
    """
    splits = []
    for dataset in datasets:
        if pack_rows:
            splits.append(Packed(dataset.folder, name, dataset.meta, T))
            continue
        split = Split(dataset.folder, name, dataset.meta, T, document_mask)
        if split.num_tokens <= T:
            raise ValueError(f'{split.path} has {split.num_tokens:,} tokens, too few for a window '
                             f'of block_size={T} and its target; use more text or a smaller '
                             'block_size')
        splits.append(split)
    if len(splits) == 1:
        return splits[0]
    return Mixture([dataset.name for dataset in datasets], splits,
                   [dataset.weight for dataset in datasets])
