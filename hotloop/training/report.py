"""
Write the report of a run, or of several, as one HTML file without scripts.

    $ python -m hotloop.training.report out,out.1    # compare runs
"""

import ast
import contextlib
import html
import json
import math
import os
import sys
import time
from typing import NamedTuple

import numpy as np

from configurator import call_main
from hotloop.system.files import replacing
from hotloop.system.text import compact, duration, with_error

BUCKETS = 500  # of a curve: each keeps its lowest and its highest point, so spikes stay visible
DENSE = 200  # points; more are drawn faintly, with this many means over them
COLUMNS = 60  # of a panel: each has a tooltip
SMALL_PANELS = (('lr', 'Learning rate', ''), ('grad_norm', 'Gradient norm', 'before clipping'),
                ('tokens_per_s', 'Speed', 'tokens per second'),
                ('peak_memory_mb', 'Peak memory', 'MB'))
# colors 15 apart in CIELAB, also for the color-blind (simulated as in Machado et al., 2009), and of
# contrast 4.5
STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2126;--soft:#646c75;--line:#e6e8eb;
--c0:#1f77c4;--c1:#c4500a;--c2:#006b55;--c3:#c2408f;--c4:#5a4500;--c5:#2b3138}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--ink:#e4e7ea;--soft:#98a1aa;--line:#2b3036;
--c0:#5db3f5;--c1:#f58742;--c2:#63e0c5;--c3:#e070b8;--c4:#f0d870;--c5:#ffffff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:40px 32px;max-width:1240px;background:var(--page);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;font-variant-numeric:tabular-nums}
h1,h2,b{font-weight:600}h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;margin:40px 0 12px}p{margin:6px 0 0}
p,dt,small,footer,.t,li span{color:var(--soft)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:20px 24px;margin:24px 0 36px}
dt{font-size:12.5px}dd{margin:0;font-size:19px;line-height:1.4}dd small{font-size:12.5px;display:block}
main{display:grid;grid-template-columns:1fr 1fr;gap:36px 40px}
figure{margin:0;min-width:0}
.wide{grid-column:1/-1}figcaption{display:flex;gap:2px 8px;align-items:baseline;margin-bottom:14px}
figcaption b{font-size:15px}figcaption span{margin-left:auto}
.plot{position:relative;height:150px;margin:0 12px 26px 52px}.wide .plot{height:320px;margin-right:100px}
svg{display:block;width:100%;height:100%;overflow:visible}
path{fill:none;stroke:currentColor;stroke-width:1.7;stroke-linejoin:round;vector-effect:non-scaling-stroke}
path.grid{stroke:var(--line);stroke-width:1}path.faint{opacity:.4;stroke-width:1}
path.dot{stroke-width:7;stroke-linecap:round}
rect{fill:transparent}rect:hover{fill:var(--line);opacity:.6}
.t,.name{position:absolute;font-size:12px;line-height:1;white-space:nowrap}
.y{right:100%;padding-right:9px;transform:translateY(-50%)}
.x,.unit{top:100%;padding-top:10px}.x{transform:translateX(-50%)}.unit{right:100%;padding-right:14px}
.name{left:100%;width:100px;padding-left:12px;line-height:1.2;overflow:hidden;text-overflow:ellipsis;
transform:translateY(50%)}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}
ul{columns:240px;column-gap:40px;list-style:none;margin:0;padding:0;font-size:12.5px}
li{display:flex;gap:16px;justify-content:space-between;break-inside:avoid}
li b{font-weight:400;text-align:right;overflow-wrap:anywhere}li b+b{margin-left:12px}
.set span{color:inherit}.set,.set b{font-weight:600}p{overflow-wrap:anywhere}
footer{margin-top:44px;font-size:12.5px}
@media(max-width:760px){body{padding:24px 16px}main{grid-template-columns:1fr}
figcaption{flex-wrap:wrap}.wide .plot{height:260px;margin-right:88px}.name{width:96px}}
"""


# -----------------------------------------------------------------------------
# run folders

def read_rows(path):
    """Read log.jsonl into a list of dicts. A kill or a power cut can damage a line, which is skipped."""
    rows = []
    with open(path, encoding='utf-8', errors='replace') as f:
        for line in f:
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


class Record:
    """The log and the settings of a run folder. Raises OSError if it has none."""

    def __init__(self, folder, name):
        self.name = name
        self.rows = read_rows(os.path.join(folder, 'log.jsonl'))
        if not self.rows:
            raise ValueError(f'{folder} has logged nothing yet')
        self.start = next((row for row in self.rows if row.get('event') == 'start'), {})  # what the run is
        self.end = self.rows[-1].get('event', '')  # done, or what stopped it
        self.settings = {}
        with open(os.path.join(folder, 'config.py'), encoding='utf-8') as f:
            for node in ast.parse(f.read()).body:  # which is never run
                self.settings[node.targets[0].id] = ast.literal_eval(node.value)
        evaluations = [row for row in self.rows if 'val_loss' in row]
        self.best = min(evaluations, key=lambda row: row['val_loss'], default=None)

    def column(self, name, other=None):
        """Return (steps, values) of the rows that have a name; values of `other`, nan if absent."""
        rows = [row for row in self.rows if name in row]
        steps = np.array([row['step'] for row in rows], dtype=float)
        return steps, np.array([row.get(other or name, math.nan) for row in rows], dtype=float)

    def tokens(self, steps):
        """Return the tokens seen after these steps."""
        ends, tokens = self.column('tokens_seen')
        return np.interp(steps, [0, *ends], [0, *tokens])

    def minutes(self, steps):
        """Return the minutes in training steps alone up to these steps."""
        ends, ms = self.column('ms')  # first laps, which compile, have none: they take the next one's
        return np.interp(steps, [0, *ends], [0, *np.cumsum(np.diff(ends, prepend=0) * ms) / 6e4])


# -----------------------------------------------------------------------------
# panels: curves as SVG, which scales to any width; words are HTML, so that they keep their size

class Curve(NamedTuple):
    """A line of a panel. Without a label it is faint; with standard errors of y it is dots with bars."""
    label: str
    color: int
    x: np.ndarray
    y: np.ndarray
    error: np.ndarray | None = None


class Axis:
    """Map values to 0...1000 along a side of a panel; ticks are at round numbers."""

    def __init__(self, values, log=False):
        self.low = float(values.min())
        self.high = float(values.max())
        if self.low == self.high:
            self.high += abs(self.low) or 1.0
        self.log = log and self.low > 0
        part = (self.high - self.low) / 5
        step = 10.0 ** math.floor(math.log10(part))
        step *= next(factor for factor in (1, 2, 5, 10) if step * factor >= 0.999 * part)
        ticks = np.arange(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1) * step
        if self.log and self.high > 8 * self.low:
            powers = 10.0 ** np.arange(math.floor(math.log10(self.low)), math.log10(self.high))
            ticks = np.outer(powers, (1, 2, 5) if len(powers) <= 2 else (1,)).ravel()
            ticks = ticks[(ticks >= self.low) & (ticks <= self.high)]
        self.ticks = ticks[::math.ceil(len(ticks) / 7)]

    def __call__(self, values):
        scale = np.log if self.log else np.asarray
        low, high = scale([self.low, self.high])
        return np.rint(1000 * (scale(values) - low) / (high - low)).astype(int)


def exact(value):
    """Format a number in up to six digits: 25,391 or 0.0015."""
    return f'{value:,.6g}'.replace('e-0', 'e-') if abs(value) < 1e6 else compact(value)


def draw(curve, x_axis, y_axis):
    """Return the SVG of a curve: the lowest and the highest point of each bucket."""
    kept = {0, len(curve.y) - 1}
    for bucket in np.array_split(np.arange(len(curve.y)), min(BUCKETS, len(curve.y))):
        kept |= {bucket[curve.y[bucket].argmin()], bucket[curve.y[bucket].argmax()]}
    x = x_axis(curve.x)
    y = 1000 - y_axis(curve.y)
    color = f'c{curve.color % 6}'
    points = [f'{x[i]},{y[i]}' for i in sorted(kept)]
    kind = 'line' if curve.label and curve.error is None else 'faint'
    shapes = f'<path class="{color} {kind}" d="M{" ".join(points)}"/>'
    if len(points) > 1 and curve.error is None:
        return shapes
    shapes += f'<path class="{color} dot" d="M{"h0M".join(points)}h0"/>'
    if curve.error is not None:
        tops = 1000 - y_axis(curve.y + curve.error)
        bottoms = 1000 - y_axis(np.maximum(curve.y - curve.error, y_axis.low))  # a log axis has no 0
        bars = ''.join(f'M{x[i]},{tops[i]}V{bottoms[i]}' for i in sorted(kept))
        shapes += f'<path class="{color}" d="{bars}"/>'
    return shapes


def tooltips(curves, x_axis, x_name):
    """Return invisible SVG columns, which name the point of each curve that is nearest."""
    shapes = ''
    for column in range(COLUMNS):
        center = x_axis.low + (column + 0.5) / COLUMNS * (x_axis.high - x_axis.low)
        lines = []
        for c in curves:
            i = np.abs(c.x - center).argmin()
            value = exact(c.y[i]) if c.error is None else with_error(c.y[i], c.error[i])
            lines.append(html.escape(f'{c.label}, {x_name} {exact(c.x[i])}: {value}'))
        shapes += (f'<rect x="{1000 * column / COLUMNS:.1f}" width="{1000 / COLUMNS:.1f}" '
                   f'height="1000"><title>{"&#10;".join(lines)}</title></rect>')
    return shapes


def panel(title, unit, curves, x_name='step', wide=False, log=False):
    """Return a figure of curves, with direct labels if it is wide; '' if no curve has points."""
    curves = [c for c in curves if len(c.x)]
    if not curves:
        return ''
    named = [c for c in curves if c.label]
    ys = [] if log else [[0.0]]
    for c in curves:
        error = 0.0 if c.error is None else c.error
        ys += [c.y - error, c.y + error]
    x_axis = Axis(np.concatenate([[0.0], *(c.x for c in curves)]))
    y_axis = Axis(np.concatenate(ys), log)
    if y_axis.log:
        unit = f'{unit}, log scale'
    grid = words = last = ''
    for tick in y_axis.ticks:
        place = y_axis(tick)
        grid += f'M0,{1000 - place}H1000'
        words += f'<span class="t y" style="top:{100 - place / 10:.1f}%">{exact(tick)}</span>'
    for tick in x_axis.ticks:
        words += f'<span class="t x" style="left:{x_axis(tick) / 10:.1f}%">{compact(tick)}</span>'
    if wide:
        words += direct_labels(named, y_axis)
    elif len(named) == 1:
        last = compact(named[0].y[-1])
    shapes = tooltips(named, x_axis, x_name) + ''.join(draw(c, x_axis, y_axis) for c in curves)
    return (f'<figure class="{"wide" if wide else ""}"><figcaption><b>{title}</b><small>{unit}</small>'
            f'<span>{last}</span></figcaption><div class="plot"><svg viewBox="0 0 1000 1000" '
            f'preserveAspectRatio="none"><path class="grid" d="{grid}"/>{shapes}</svg>{words}'
            f'<span class="t unit">{x_name}</span></div></figure>')


def direct_labels(curves, y_axis):
    """Return the names of curves beside their ends, the lowest curve first; a name moves up for room."""
    labels = ''
    below = -60
    for c in sorted(curves, key=lambda c: c.y[-1]):
        below = max(y_axis(c.y[-1]), below + 60)
        labels += (f'<b class="name c{c.color % 6}" style="bottom:{below / 10:.1f}%">'
                   f'{html.escape(c.label)}</b>')
    return labels


# -----------------------------------------------------------------------------
# the page

def noisy(label, color, x, y):
    """Return the curves of noisy numbers: where they are dense, a faint one and the means of its parts."""
    if len(x) < DENSE:
        return [Curve(label, color, x, y)]
    return [Curve('', color, x, y), Curve(label, color, means(x), means(y))]


def means(values):
    """Return the means of DENSE parts of an array."""
    return np.array([part.mean() for part in np.array_split(values, DENSE)])


def loss_panels(runs):
    """Return the wide panels: of one run both losses, of several each loss, and one by time."""
    validation = []
    by_time = []
    training = []
    for number, run in enumerate(runs):
        x, y = run.column('loss')
        steps, losses = run.column('val_loss')
        errors = np.nan_to_num(run.column('val_loss', 'val_stderr')[1])
        if len(runs) == 1:
            curves = [*noisy('training', 0, x, y), Curve('validation', 1, steps, losses, errors)]
            return panel('Loss', 'nats per token', curves, wide=True, log=True)
        validation.append(Curve(run.name, number, run.tokens(steps), losses, errors))
        by_time.append(Curve(run.name, number, run.minutes(steps), losses, errors))
        training += noisy(run.name, number, run.tokens(x), y)
    return (panel('Validation loss', 'nats per token', validation, 'tokens', wide=True, log=True)
            + panel('Training loss', 'nats per token', training, 'tokens', wide=True, log=True)
            + panel('Validation loss', 'by training time', by_time, 'minutes', wide=True, log=True))


def small_panels(runs):
    """Return the panels below the losses."""
    panels = ''
    for name, title, unit in SMALL_PANELS:
        curves = []
        for number, run in enumerate(runs):
            curves += noisy(run.name, number, *run.column(name))
        panels += panel(title, unit, curves, log=name == 'grad_norm')
    return panels


def facts_of(run, goal):
    """List (name, value, detail) of a run. goal: a loss that all runs have reached, or None."""
    facts = []
    if run.best:
        where = f'at step {exact(run.best["step"])}'
        loss = with_error(run.best['val_loss'], run.best.get('val_stderr', math.nan))
        facts.append(('Best validation loss', loss, where))
        if 'val_bpb' in run.best:
            facts.append(('Bits per byte', f'{run.best["val_bpb"]:.4f}', where))
    last = run.rows[-1]['step']
    facts += [('Steps', exact(last), run.end), ('Tokens', exact(run.tokens(last)), 'seen in training'),
              ('Training time', duration(60 * run.minutes(last)), 'of the steps')]
    if goal:
        steps, losses = run.column('val_loss')
        reached = steps[np.argmax(losses <= goal)]
        facts.append((f'To a loss of {goal:.4f}', duration(60 * run.minutes(reached)),
                      f'{exact(run.tokens(reached))} tokens'))
    return facts


def page(runs):
    """Return the HTML of one run or of a comparison, whose runs have colors."""
    colors = ['']
    if len(runs) > 1:
        colors = [f' class="c{number % 6}"' for number in range(len(runs))]
    items = ''
    differing = set()
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [repr(run.settings.get(name)) for run in runs]
        if len(runs) > 1 and (len(set(values)) == 1 or name == 'out_dir'):
            continue
        differing.add(name)
        cells = ''
        for color, value in zip(colors, values, strict=True):
            cells += f'<b{color}>{html.escape(value)}</b>'
        mark = ' class="set"' if len(runs) == 1 and name in runs[0].start.get('changed', []) else ''
        items += f'<li{mark}><span>{name}</span><div>{cells}</div></li>'
    heading = 'Settings that differ'
    lead = ''
    goal = None
    if len(runs) == 1:
        heading = 'Settings <small>bold: not at the default</small>'
    elif {'dataset', 'vocab_size'} & differing:
        lead = '<p>The data or vocabularies differ: compare bits per byte, not losses.</p>'
    elif all(run.best for run in runs):
        goal = max(run.best['val_loss'] for run in runs)
    for color, run in zip(colors, runs, strict=True):
        facts = [run.settings.get('dataset'), *map(run.start.get, ('model', 'device', 'command'))]
        about = html.escape(' · '.join(filter(None, facts)))
        tiles = ''
        for name, text, detail in facts_of(run, goal):
            tiles += f'<div><dt>{name}</dt><dd>{text}<small>{html.escape(detail)}</small></dd></div>'
        lead += f'<h1{color}>{html.escape(run.name)}</h1><p>{about}</p><dl>{tiles}</dl>'
    title = html.escape(' / '.join(run.name for run in runs))
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<style>{STYLE}</style></head><body>{lead}<main>{loss_panels(runs)}{small_panels(runs)}'
            f'</main><h2>{heading}</h2><ul>{items}</ul>'
            f'<footer>From log.jsonl and config.py, {time.strftime("%Y-%m-%d %H:%M")}; config.py repeats the '
            'run. Error bars are one standard error. Training time is that of the steps, without startup, '
            'evaluations and saves.</footer></body></html>')


def write_report(folders):
    """
    Write the report of a run into its folder, or that of several into the current one. Returns its
    path. Raises OSError if a folder holds no run.
    """
    path = 'report-compare.html'
    if len(folders) == 1:
        path = os.path.join(folders[0], 'report.html')
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(folder)) for folder in folders])
    text = page([Record(folder, os.path.relpath(folder, parent)) for folder in folders])
    with replacing(path) as f:
        f.write(text.encode())
    return path


def main():
    """Write the report of the folders on the command line."""
    try:
        folders = [folder for folder in ','.join(sys.argv[1:]).split(',') if folder]
        path = write_report(folders or ['out'])
    except OSError as e:  # the folder is read-only, or holds no run
        raise ValueError(f'the report could not be made: {e}') from None
    print(f'report: {path}')


if __name__ == '__main__':
    call_main(main)
