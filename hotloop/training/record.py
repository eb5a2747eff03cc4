"""What a run folder records: numbers of log.jsonl, settings. Needs no torch."""

import ast
import contextlib
import json
import math
import os
from array import array
from collections import defaultdict

import numpy as np

from hotloop.system.files import counted
from hotloop.system.text import with_error


class Record:
    """The log and settings of a run folder. Raises ValueError if the log is missing or empty."""

    def __init__(self, folder):
        self.name = os.path.normpath(folder)
        self.damaged = 0
        self.settings = {}
        self.columns = defaultdict(lambda: (array('d'), array('d')))  # {name: (steps, values)}
        path = os.path.join(folder, 'log.jsonl')
        try:
            with open(path, encoding='utf-8', errors='replace') as f:
                for line in f:
                    self.read(line)
        except OSError as e:
            raise ValueError(f'{path}: {e.strerror or e}; give the folders of runs') from None
        if not self.columns:
            damaged = f', only {counted(self.damaged, "damaged line")}' if self.damaged else ''
            raise ValueError(f'{path} has no log entries yet{damaged}')
        with contextlib.suppress(OSError, SyntaxError, ValueError, AttributeError):
            with open(os.path.join(folder, 'config.py'), encoding='utf-8') as f:
                source = ast.parse(f.read())  # which is never run
            for node in source.body:
                self.settings[node.targets[0].id] = ast.literal_eval(node.value)

    def read(self, line):
        """Add the numbers of a line. A torn or damaged one is counted."""
        try:
            row = json.loads(line)
            step = float(row['step'])
            if not math.isfinite(step):
                raise ValueError('no step')
            for name, value in row.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    steps, values = self.columns[name]
                    steps.append(step)
                    values.append(value)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            self.damaged += 1

    def __getitem__(self, name):
        """Return (steps, values) of the lines that have this name: two float64 arrays, by step."""
        steps, values = map(np.array, self.columns.get(name, ((), ())))
        order = np.argsort(steps, kind='stable')
        return steps[order], values[order]

    def at(self, name, steps):
        """Return the values of a name at these steps, (N,) like them; nan where the log has none."""
        known, values = self[name]
        if not len(known):
            return np.full(len(steps), math.nan)
        nearest = np.searchsorted(known, steps).clip(max=len(known) - 1)
        return np.where(known[nearest] == steps, values[nearest], math.nan)

    def tokens(self, steps):
        """Return the tokens seen after these steps; nan if the log does not have them."""
        known = self['tokens_seen']
        return np.interp(steps, *known) if len(known[0]) else np.full(np.shape(steps), math.nan)

    def minutes(self, steps):
        """Return the minutes in training steps alone up to these steps; nan if unknown."""
        ends, _ = self['lr']
        ms = self.at('ms', ends)
        if np.isnan(ms).all():
            return np.full(np.shape(steps), math.nan)
        ms[np.isnan(ms)] = np.nanmedian(ms)  # of first laps, whose time includes compilation
        return np.interp(steps, ends, np.cumsum(np.diff(ends, prepend=ends[0]) * ms) / 6e4)

    def best(self):
        """Return (step, loss, standard error, bits per byte) of the best evaluation; nan where unknown."""
        steps, losses = self['val_loss']
        if not len(losses):
            return (math.nan,) * 4
        best = losses.argmin()
        step = steps[best:best + 1]
        return step[0], losses[best], self.at('val_stderr', step)[0], self.at('val_bpb', step)[0]

    def events(self):
        """List (kind, step, loss or None, sentence) by step; kind: resumed, skipped or best."""
        found = []
        for _, step in zip(*self['resumed'], strict=True):
            found.append(('resumed', step, None, f'step {step:,.0f}: resumed'))
        for step, number in zip(*self['skipped'], strict=True):
            steps = counted(int(number), 'non-finite step')
            found.append(('skipped', step, None, f'step {step:,.0f}: {steps} skipped'))
        step, loss, error, _ = self.best()
        if math.isfinite(loss):
            text = f'step {step:,.0f}: best validation loss, {with_error(loss, error)}'
            found.append(('best', step, loss, text))
        return sorted(found, key=lambda event: event[1])


def running_mean(x, y, parts=2000):
    """Return (x, mean of y around it) in at most `parts` points, with a Hann window over a 25th of them."""
    starts = np.unique(np.linspace(0, len(x), min(len(x), parts), endpoint=False).astype(int))
    y = np.add.reduceat(y, starts) / np.diff(starts, append=len(x))  # first the mean of each part
    window = np.hanning(2 * (len(starts) // 50) + 5)
    return x[starts], np.convolve(y, window, 'same') / np.convolve(np.ones(len(y)), window, 'same')
