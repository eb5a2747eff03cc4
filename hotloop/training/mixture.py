"""The data of a run: one split of a dataset, or splits of several mixed by weight."""

import functools

import numpy as np

from hotloop.training.dataloader import Split, windows_per_epoch
from hotloop.training.packing import Packed


class Mixture:
    """
    Splits, mixed by weight: each has its exact share of INTERLEAVE windows, shuffled by the seed. Batches and
    evaluate() use it like a Split.
    """
    INTERLEAVE = 10_000

    def __init__(self, names, splits, weights):
        self.names, self.splits, self.T = names, splits, splits[0].T
        self.weights = [weight / sum(weights) for weight in weights]
        ends = np.cumsum([split.num_tokens for split in splits])
        self.num_tokens, self.num_bytes = int(ends[-1]), sum(split.num_bytes for split in splits)
        self.bases = [0, *ends[:-1].tolist()]  # positions continue from one split to the next
        if isinstance(splits[0], Packed):
            self.num_windows = sum(split.num_windows for split in splits)
        else:
            self.num_windows = windows_per_epoch(self.num_tokens, self.T)
        self.end_id = splits[0].end_id
        last = np.round(np.cumsum(self.weights) * self.INTERLEAVE).astype(np.int64)
        self.shares = tuple(np.diff(last, prepend=0).tolist())
        if not all(self.shares):
            raise ValueError(f'{names[self.shares.index(0)]} would never be drawn: its weight is below '
                             f'1/{2 * self.INTERLEAVE} of the sum; raise it, or leave the dataset out')

    def starts(self, seed, index):
        blocks, places, starts = index // self.INTERLEAVE, index % self.INTERLEAVE, np.empty_like(index)
        for block in np.unique(blocks).tolist():
            split_of, nth_of = interleave(seed, block, self.shares)
            for k, split in enumerate(self.splits):
                chosen = (blocks == block) & (split_of[places] == k)
                windows = block * self.shares[k] + nth_of[k][places[chosen]]
                starts[chosen] = self.bases[k] + split.starts(seed + k, windows)
        return starts

    def by_split(self, starts):
        """Yields (split, which of the starts lie in it, their positions there)."""
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
    """(the split of each window of a block, for each split: how many of its windows come before)."""
    split_of = np.random.default_rng((seed, block)).permutation(np.repeat(np.arange(len(shares)), shares))
    return split_of, [np.cumsum(split_of == k) - 1 for k in range(len(shares))]


def open_split(datasets, name, T, document_mask=False, pack_rows=False):
    """
    The Split 'train' or 'val' of one dataset, or the Mixture of several. document_mask: its windows carry
    the documents of their tokens; pack_rows: it is Packed. ValueError if a dataset has none.
    """
    kind = Packed if pack_rows else Split
    splits = [kind(dataset.folder, name, dataset.meta, T) for dataset in datasets]
    if document_mask:
        for split in splits:
            split.mask_documents()
    if len(splits) == 1:
        return splits[0]
    return Mixture([dataset.name for dataset in datasets], splits, [dataset.weight for dataset in datasets])
