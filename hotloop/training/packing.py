"""The choice of a window for each row of instruction data."""

import bisect

import numpy as np


def pack(lengths, size):
    """
    Choose a window for each row, by best fit, the longest rows first. Returns the numbers of the
    windows, (N,). lengths: of rows, at most `size`, that of a window.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    num_windows = 0
    windows = {}  # {free space: the windows that have it}
    spaces = [size]  # the free spaces of these, sorted, and that of a new window
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        place = bisect.bisect_left(spaces, lengths[row])
        space = spaces[place]
        if space == size:
            window = num_windows
            num_windows += 1
        else:
            window = windows[space].pop()
            if not windows[space]:
                spaces.pop(place)
        window_of[row] = window
        left = space - lengths[row]
        if not windows.setdefault(left, []):
            bisect.insort(spaces, left)
        windows[left].append(window)
    return window_of
