"""Windows of complete rows of instruction data."""

import bisect
import math
import os

import numpy as np

from hotloop.data.dataset import open_bin
from hotloop.system.files import counted
from hotloop.training.dataloader import Split


class Packed(Split):
    """
    A split of rows of instruction data. A window holds complete rows, each a document, and padding. Its
    `start` is the number of the window, not a position. Each epoch shuffles the windows, but not the rows
    within them, which do not affect one another.
    """

    def __init__(self, folder, name, meta, T):
        super().__init__(folder, name, meta, T)
        path = os.path.join(folder, f'{name}.docs.bin')
        if not os.path.exists(path):
            raise ValueError(f'pack_rows=True needs {path}, which is made of rows of instruction data; for '
                             'texts use --document_mask; prepare rows of an earlier version again')
        if self.mask is None:
            self.mask = np.ones(self.num_tokens, np.uint8)  # rows of this split are texts
        self.ends = open_bin(path, '<u8').astype(np.int64)
        lengths = np.diff(self.ends, prepend=0)
        if not len(lengths) or lengths.min() < 1 or self.ends[-1] != self.num_tokens:
            raise ValueError(f'{path} does not divide {self.num_tokens:,} tokens; prepare the dataset again')
        self.begins, self.padding_id = self.ends - lengths, meta['eot'] or 0
        kept = np.flatnonzero(lengths <= T + 1)
        if not len(kept):
            raise ValueError(f'no row of {self.path} fits into block_size={T}; the shortest has '
                             f'{lengths.min():,} tokens: use --block_size={lengths.min() - 1} or more')
        window_of = pack(lengths[kept].tolist(), T + 1)
        order = np.argsort(window_of, kind='stable')
        self.rows = np.split(kept[order], np.cumsum(np.bincount(window_of))[:-1])  # of each window
        self.num_windows = len(self.rows)
        counts = np.append(0, np.cumsum(self.mask != 0))
        targets = counts[self.ends] - counts[self.begins + 1]  # of each row
        self.targets = np.array([targets[rows].sum() for rows in self.rows])
        self.num_bytes = math.inf  # windows are put together on the host, never on the device
        self.note = self.describe(name, lengths, kept)

    def describe(self, name, lengths, kept):
        """The line about the windows of this split. lengths: of all rows; kept: those that fit."""
        padding = 1 - lengths[kept].sum() / (self.num_windows * (self.T + 1))
        note = (f'packing: {name}, {counted(len(kept), "row")} in {counted(self.num_windows, "window")} of '
                f'{self.T + 1} tokens, {padding:.1%} padding')
        left_out = len(lengths) - len(kept)
        if left_out:
            note += (f'; {counted(left_out, "row")} left out, longer than block_size + 1 = {self.T + 1} '
                     f'(the longest has {lengths.max():,} tokens)')
        return note

    def epoch_order(self, seed, epoch):
        return np.random.default_rng((seed, epoch)).permutation(self.num_windows)

    def consecutive_starts(self):
        windows = np.flatnonzero(self.targets)
        return windows, windows

    def gather(self, starts):
        """
        Inputs, targets and documents of these windows: three (B, T) int64 arrays. The first token of a row is
        not a target, because the last one of another row would predict it.
        """
        shape = len(starts), self.T + 1
        tokens, targets = np.full(shape, self.padding_id), np.full(shape, -1)
        documents = np.zeros(shape, dtype=np.int64)
        for window, start in enumerate(starts):
            place = 0
            for row in self.rows[start]:
                part = slice(self.begins[row], self.ends[row])
                ids = self.tokens[part].astype(np.int64)
                here = slice(place, place + len(ids))
                tokens[window, here] = ids
                targets[window, here] = np.where(self.mask[part], ids, -1)
                targets[window, place] = -1
                place += len(ids)
                documents[window, place:] += 1
        return tuple(np.ascontiguousarray(part) for part in
                     (tokens[:, :-1], targets[:, 1:], documents[:, :-1]))

    def num_targets(self, starts):
        return int(self.targets[starts].sum())


def pack(lengths, size):
    """
    The number of the window of each row, (N,): best fit, the longest rows first. lengths: of rows, at most
    `size`, that of a window.
    """
    window_of, num_windows = np.empty(len(lengths), dtype=np.int64), 0
    spaces, windows = [], {}  # the free spaces of windows, sorted; {space: the windows that have it}
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        place = bisect.bisect_left(spaces, lengths[row])
        if place == len(spaces):
            space, window = size, num_windows
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
