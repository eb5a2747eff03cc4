"""Draw a panel of curves as inline SVG that scales to any width. Its words are HTML: they keep their size."""

import html
import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hotloop.system.text import compact, with_error

BUCKETS = 500  # of a curve: each keeps its lowest and its highest point, so spikes stay visible
COLUMNS = 60  # of a panel: each has a tooltip
DOTS = 200  # of a curve with errors


class Curve(NamedTuple):
    """A line of a panel. error: standard errors of y; its points are then drawn as dots with bars."""
    label: str
    color: int
    x: np.ndarray
    y: np.ndarray
    kind: str = 'line'  # or faint, for a line behind others
    error: np.ndarray | None = None


class Axis:
    """Map values to 0...1000 along the side of a panel; ticks, [(place, label)], are at round numbers."""

    def __init__(self, values, log=False, parts=6, least=0.0, rounded=False):
        """parts: between ticks, about; least: the smallest of them; rounded: also the ends."""
        low, high = float(values.min()), float(values.max())
        self.log = log and low > 0
        if low == high:
            low, high = (low / 1.5, high * 1.5) if self.log else (min(low, 0.0), max(high, 0.0) or 1.0)
        part = (high - low) / parts
        step = 10.0 ** math.floor(math.log10(part))
        step = max(least, next(step * factor for factor in (1, 2, 5, 10) if step * factor >= 0.999 * part))
        if rounded and not self.log:
            low, high = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
        self.low, self.high = low, high
        ticks = np.arange(math.ceil(low / step), math.floor(high / step + 1e-9) + 1) * step
        if self.log and high > 8 * low:
            powers = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = np.outer(powers, (1, 2, 5) if len(powers) <= 4 else 1).ravel()
            ticks, step = ticks[(ticks >= low) & (ticks <= high)], math.nan
        ticks = ticks[::math.ceil(len(ticks) / (parts + 1))]
        self.ticks = [(place, tick_label(tick, step)) for place, tick in zip(self(ticks), ticks, strict=True)]

    def __call__(self, values):
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log(values), math.log(low), math.log(high)
        return np.rint(1000 * (values - low) / (high - low)).astype(int)


def tick_label(tick, step):
    """Return the label of a tick, with as many digits as it needs. step: nan on a log axis."""
    if tick and 1e-5 < step < 1:
        return f'{tick:.{-math.floor(math.log10(step))}f}'
    return f'{tick:,.0f}' if 1 <= step < abs(tick) / 100 else compact(tick)


def exact(value):
    """Format a number for a tooltip or a table: 25,391 or 0.0015."""
    return f'{value:,.0f}' if abs(value) >= 1e4 else f'{value:,.5g}'.replace('e-0', 'e-')


def outline(x, y):
    """Return the numbers of the points to draw: the first, lowest, highest and last of each bucket of x."""
    if len(x) <= 2 * BUCKETS:
        return range(len(x))
    kept = set()
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(x * BUCKETS // 1001)) + 1):
        kept |= {part[0], part[y[part].argmin()], part[y[part].argmax()], part[-1]}
    return sorted(kept)


def draw(curve, x_axis, y_axis, x_name):
    """Return the SVG of a curve. Each dot has its error bar and a tooltip."""
    x, y, color = x_axis(curve.x), 1000 - y_axis(curve.y), f'c{curve.color % 6}'
    line = ' '.join(f'{x[i]},{y[i]}' for i in outline(x, y))
    shapes = [f'<path class="{color} {curve.kind if len(x) > 1 else "dot"}" d="M{line}h0"/>']
    if curve.error is None:
        return shapes
    error = np.nan_to_num(curve.error)
    tops = 1000 - y_axis(curve.y + error)
    bottoms = 1000 - y_axis(np.maximum(curve.y - error, y_axis.low))  # a log axis has no 0
    for i in sorted({*np.linspace(0, len(x) - 1, min(len(x), DOTS)).astype(int), curve.y.argmin()}):
        title = f'{curve.label}, {x_name} {exact(curve.x[i])}: {with_error(curve.y[i], curve.error[i])}'
        shapes.append(f'<g class="{color}"><path d="M{x[i]},{tops[i]}V{bottoms[i]}"/><path class="dot" '
                      f'd="M{x[i]},{y[i]}h0"/><title>{html.escape(title)}</title></g>')
    return shapes


def tooltips(curves, x_axis, x_name):
    """Return invisible SVG columns, which name the point of each curve that is nearest."""
    centers = np.linspace(x_axis.low, x_axis.high, 2 * COLUMNS + 1)[1::2]
    nearest = [np.searchsorted((c.x[1:] + c.x[:-1]) / 2, centers) for c in curves]
    shapes = []
    for column in range(COLUMNS):
        lines = []
        for c, points in zip(curves, nearest, strict=True):
            i = points[column]
            lines.append(f'{html.escape(c.label)}, {x_name} {exact(c.x[i])}: {exact(c.y[i])}')
        title = '\n'.join(lines)
        shapes.append(f'<rect x="{1000 * column / COLUMNS:.1f}" width="{1000 / COLUMNS:.1f}" height="1000">'
                      f'<title>{title}</title></rect>')
    return shapes


def panel(title, unit, curves, x_name='step', marks=(), wide=False, log=False):
    """
    Return a figure of curves, with direct labels if it is wide. marks: [(class, x, y or None for a vertical
    line, tooltip)]. Without log the y axis includes 0. Returns '' if no curve has points.
    """
    curves = [c for c in curves if len(c.x)]
    if not curves:
        return ''
    xs, ys = np.concatenate([c.x for c in curves]), [c.y for c in curves]
    for c in curves:
        if c.error is not None:
            ys += [c.y - np.nan_to_num(c.error), c.y + np.nan_to_num(c.error)]
    ys += [[y for _, _, y, _ in marks if y is not None], [] if log else [0.0]]
    if xs.min() < 0.2 * xs.max() or len(xs) == 1:
        xs = np.append(xs, 0.0)
    x_axis = Axis(xs, least=0.0 if x_name == 'minutes' else 1.0)
    y_axis = Axis(np.concatenate(ys), log, parts=6 if wide else 4, rounded=True)
    grid = ''.join(f'M0,{1000 - place}H1000' for place, _ in y_axis.ticks)
    shapes = [f'<path class="grid" d="{grid}"/>', *tooltips(curves, x_axis, x_name)]
    for c in curves:
        shapes += draw(c, x_axis, y_axis, x_name)
    for kind, x, y, tooltip in marks:
        at = x_axis(x)
        path = f'M{at},0V1000' if y is None else f'M{at},{1000 - y_axis(y)}h0'
        shapes.append(f'<path class="{kind}" d="{path}"><title>{html.escape(tooltip)}</title></path>')
    words = [f'<span class="t y" style="top:{100 - place / 10:.1f}%">{label}</span>'
             for place, label in y_axis.ticks]
    words += [f'<span class="t x" style="left:{place / 10:.1f}%">{label}</span>'
              for place, label in x_axis.ticks]
    if wide:
        words += direct_labels(curves, [1000 - y_axis(c.y[-1]) for c in curves])
    last = '' if wide or len({c.color for c in curves}) > 1 else compact(curves[-1].y[-1])
    return (f'<figure{" class=wide" if wide else ""}><figcaption><b>{title}</b><small>{unit}</small>'
            f'<span>{last}</span></figcaption><div class="plot"><svg viewBox="0 0 1000 1000" '
            f'preserveAspectRatio="none">{"".join(shapes)}</svg>{"".join(words)}'
            f'<span class="t unit">{x_name}</span></div></figure>')


def direct_labels(curves, places, gap=58):
    """Return the names of curves beside their ends, at least a gap apart."""
    order = sorted(range(len(curves)), key=places.__getitem__)
    for before, after in pairwise(order):
        places[after] = max(places[after], places[before] + gap)
    excess = max(max(places) - 1000, 0)
    labels = []
    for c, place in zip(curves, places, strict=True):
        top = (place - excess) / 10
        weight = ' light' if c.kind == 'faint' and c.error is None else ''
        labels.append(f'<b class="name{weight} c{c.color % 6}" style="top:{top:.1f}%">'
                      f'{html.escape(c.label)}</b>')
    return labels
