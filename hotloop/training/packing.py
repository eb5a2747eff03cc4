"""Windows of complete rows of instruction data."""

import bisect
import math
import os

import numpy as np

from hotloop.data.dataset import open_bin
from hotloop.training.dataloader import Split


class Packed(Split):
    """
    A split whose windows hold complete rows, each a document, and padding. A `start` is the number
    of a window, not a position. Each epoch shuffles the windows, but not the rows within them,
    which do not see one another.
    """

    def __init__(self, folder, name, meta, T):
        super().__init__(folder, name, meta, T)
        path = os.path.join(folder, f'{name}.docs.bin')
        if not os.path.exists(path):
            raise ValueError(f'pack_rows=True needs {path}, which prepare.py makes of rows of '
                             'instruction data; for texts use --document_mask')
        if self.mask is None:
            self.mask = np.ones(self.num_tokens, np.uint8)  # the rows of this split are texts
        self.padding_id = meta['eot'] or 0
        self.ends = open_bin(path, '<u8').astype(np.int64)
        lengths = np.diff(self.ends, prepend=0)
        self.begins = self.ends - lengths
        kept = np.flatnonzero(lengths <= T + 1)
        if not len(kept):
            shortest = lengths.min()
            raise ValueError(f'no row of {self.path} fits into block_size={T}; the shortest has '
                             f'{shortest:,} tokens: use --block_size={shortest - 1} or more')
        window_of = pack(lengths[kept].tolist(), T + 1)
        order = np.argsort(window_of, kind='stable')
        self.rows = np.split(kept[order], np.cumsum(np.bincount(window_of))[:-1])  # of each window
        self.num_windows = len(self.rows)
        counts = np.append(0, np.cumsum(self.mask != 0))
        targets = counts[self.ends] - counts[self.begins + 1]  # of each row
        self.targets = np.array([targets[rows].sum() for rows in self.rows])
        self.num_bytes = math.inf  # windows are put together on the host, never on the device
        padding = 1 - lengths[kept].sum() / (self.num_windows * (T + 1))
        self.note = (f'packing: {name}, {len(kept):,} rows in {self.num_windows:,} windows of '
                     f'{T + 1} tokens, {padding:.1%} padding; {len(lengths) - len(kept):,} rows '
                     f'left out (the longest row has {lengths.max():,} tokens)')

    def epoch_order(self, seed, epoch):
        return np.random.default_rng((seed, epoch)).permutation(self.num_windows)

    def consecutive_starts(self):
        windows = np.flatnonzero(self.targets)
        return windows, windows

    def gather(self, starts):
        """
        Return inputs, targets and documents of these windows: three (B, T) int64 arrays. The first
        token of a row is not a target, because the last one of another row would predict it.
        """
        tokens = np.full((len(starts), self.T + 1), self.padding_id)
        targets = np.full_like(tokens, -1)
        documents = np.zeros_like(tokens)
        for window, start in enumerate(starts):
            place = 0
            for row in self.rows[start]:
                part = slice(self.begins[row], self.ends[row])
                ids = self.tokens[part].astype(np.int64)
                end = place + len(ids)
                tokens[window, place:end] = ids
                targets[window, place:end] = np.where(self.mask[part], ids, -1)
                targets[window, place] = -1
                documents[window, end:] += 1
                place = end
        parts = tokens[:, :-1], targets[:, 1:], documents[:, :-1]
        return tuple(map(np.ascontiguousarray, parts))

    def num_targets(self, starts):
        return int(self.targets[starts].sum())


def pack(lengths, size):
    """
    Choose a window for each row, by best fit, the longest rows first. Returns the numbers of the
    windows, (N,). lengths: of rows, at most `size`, that of a window.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    num_windows = 0
    windows = {}  # {free space: the windows that have it}
    spaces = []  # the free spaces of these, sorted
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        place = bisect.bisect_left(spaces, lengths[row])
        space = size
        window = num_windows
        if place == len(spaces):
            num_windows += 1
        else:
            space = spaces[place]
            window = windows[space].pop()
            if not windows[space]:
                spaces.pop(place)
        window_of[row] = window
        left = space - lengths[row]
        if not windows.setdefault(left, []):
            bisect.insort(spaces, left)
        windows[left].append(window)
    return window_of
