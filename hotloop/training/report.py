"""
Write the report of a run, or of several: one HTML file without scripts, from log.jsonl and config.py.

    $ python -m hotloop.training.report out,out.1    # compare runs
"""

import html
import math
import os
import sys
import time

import numpy as np

from configurator import call_main
from hotloop.system.files import counted, replacing
from hotloop.system.text import duration, with_error
from hotloop.training.chart import Curve, exact, panel
from hotloop.training.record import Record, running_mean

SMALL_PANELS = (('lr', 'Learning rate', '', 1), ('grad_norm', 'Gradient norm', 'before clipping', 1),
                ('tokens_per_s', 'Speed', 'tokens per second', 1),
                ('peak_memory_mb', 'Peak memory', 'GB', 1000))  # (name in the log, title, unit, its size)
EVENTS = 200  # that are marked in a panel; the last ones
COMPARISON = 'report-compare.html'
# colors 15 apart in CIELAB, also for the color-blind (simulated as in Machado et al., 2009); contrast 4.5
STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2126;--soft:#646c75;--line:#e6e8eb;
--c0:#1f77c4;--c1:#c4500a;--c2:#006b55;--c3:#c2408f;--c4:#5a4500;--c5:#2b3138}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--ink:#e4e7ea;--soft:#98a1aa;--line:#2b3036;
--c0:#5db3f5;--c1:#f58742;--c2:#63e0c5;--c3:#e070b8;--c4:#f0d870;--c5:#ffffff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:40px 32px;max-width:1240px;background:var(--page);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;font-variant-numeric:tabular-nums}
h1,h2,h3,b{font-weight:600}h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;margin:40px 0 12px}h3{font-size:12.5px;margin:20px 0 0;font-weight:400}
h3+.scroll{margin-top:4px}p{margin:6px 0 0}p,h3,dt,small,footer,th,.t,li span{color:var(--soft)}
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
path.dot,path.best{stroke-width:7;stroke-linecap:round}
path.best{stroke-width:17;opacity:.25;color:var(--c1)}
path.resumed,path.skipped{stroke-width:1.3;stroke-dasharray:5 4;color:var(--soft)}
path.skipped{stroke-dasharray:1 4;color:var(--c4)}
rect{fill:transparent}rect:hover{fill:var(--line);opacity:.6}
.t,.name{position:absolute;font-size:12px;line-height:1;white-space:nowrap}
.y{right:100%;padding-right:9px;transform:translateY(-50%)}
.x,.unit{top:100%;padding-top:10px}.x{transform:translateX(-50%)}.unit{right:100%;padding-right:14px}
.name{left:100%;width:100px;padding-left:12px;line-height:1.2;overflow:hidden;text-overflow:ellipsis;
transform:translateY(-50%)}.light{font-weight:400}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}
.scroll{overflow-x:auto;margin:24px 0 36px}table{border-collapse:collapse;white-space:nowrap}
td,th{text-align:right;font-weight:400;padding:6px 0 6px 28px;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left;padding-left:0}
ul{columns:240px;column-gap:40px;list-style:none;margin:0;padding:0;font-size:12.5px}
li{display:flex;gap:16px;justify-content:space-between;break-inside:avoid}
li b{font-weight:400;text-align:right;overflow-wrap:anywhere}
pre{font:12.5px/1.5 ui-monospace,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
margin:4px 0 20px;padding-left:16px;border-left:2px solid var(--line);max-width:100ch}
footer{margin-top:44px;font-size:12.5px}
@media(max-width:760px){body{padding:24px 16px}main{grid-template-columns:1fr}
figcaption{flex-wrap:wrap}
.wide .plot{height:260px;margin-right:88px}.name{width:96px}dl{grid-template-columns:1fr 1fr}}
"""


# -----------------------------------------------------------------------------
# pages

def page(title, lead, panels, sections):
    """Return the complete HTML. lead: HTML under the title; panels: figures; sections: {heading: HTML}."""
    parts = [f'<h2>{heading}</h2>{content}' for heading, content in sections.items() if content]
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1"><meta http-equiv='
            '"Content-Security-Policy" content="default-src \'none\';style-src \'unsafe-inline\'">'
            f'<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>{lead}'
            f'<main>{"".join(panels)}</main>{"".join(parts)}<footer>From log.jsonl and config.py, '
            f'{time.strftime("%Y-%m-%d %H:%M")}. Error bars are one standard error. Training time is that of '
            'the steps, without startup, evaluations and saves.</footer></body></html>')


def table(rows):
    """Return an HTML table from lists of cells, which are HTML; the first row is the head."""
    lines = []
    for number, row in enumerate(rows):
        tag = 'td' if number else 'th'
        lines.append('<tr>' + ''.join(f'<{tag}>{cell}</{tag}>' for cell in row) + '</tr>')
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def columns(pairs):
    """Return an HTML list in columns, of names and values as text."""
    items = [f'<li><span>{html.escape(name)}</span><b>{html.escape(str(value))}</b></li>'
             for name, value in pairs]
    return f'<ul>{"".join(items)}</ul>' if items else ''


def differing_data(runs):
    """Return a sentence if the losses of these runs do not compare, otherwise ''."""
    for name, what in (('dataset', 'datasets'), ('vocab_size', 'vocabularies')):
        if len({run.settings[name] for run in runs if name in run.settings}) > 1:
            return f'The runs have different {what}: compare bits per byte, not losses.'
    return ''


def sentences(runs):
    """Return what is wrong with the logs, as HTML."""
    wrong = [f'{run.name}: {counted(run.damaged, "damaged line")} of log.jsonl left out'
             for run in runs if run.damaged]
    wrong.append(differing_data(runs))
    return ''.join(f'<p>{html.escape(sentence)}</p>' for sentence in wrong if sentence)


def facts_of(run):
    """Return the numbers at the top of a run's page, as HTML."""
    step, loss, error, bpb = run.best()
    last = max(steps[-1] for steps, _ in run.columns.values())
    tokens, minutes, settings = run.tokens(last), run.minutes(last), run.settings
    length = settings.get('max_iters')
    if settings.get('time_budget') is not None and settings.get('decay_start') is None:
        length = None  # the time budget has not decided it yet
    facts = [('Best validation loss', loss, with_error(loss, error), f'at step {exact(step)}'),
             ('Bits per byte', bpb, f'{bpb:.4f}', f'at step {exact(step)}'),
             ('Steps', last, exact(last), f'of {exact(length)}' if length and last <= length else ''),
             ('Tokens', tokens, exact(tokens), 'seen in training'),
             ('Training time', minutes, duration(60 * np.nan_to_num(minutes)), 'of the steps')]
    tiles = [f'<div><dt>{name}</dt><dd>{text}<small>{detail}</small></dd></div>'
             for name, value, text, detail in facts if math.isfinite(value)]
    return f'<dl>{"".join(tiles)}</dl>'


def results(runs):
    """Return the table of a comparison: the best losses, and the way to a loss that all runs have reached."""
    bests = [run.best() for run in runs]
    # nan if a run has no evaluation
    goal = math.nan if differing_data(runs) else np.max([best[1] for best in bests])
    rows = [['Run', 'Best loss', 'at step', 'Bits per byte']]
    if math.isfinite(goal):
        rows[0] += [f'Tokens to {goal:.4f}', f'Training time to {goal:.4f}']
    for number, (run, (step, loss, error, bpb)) in enumerate(zip(runs, bests, strict=True)):
        cells = [with_error(loss, error), exact(step), f'{bpb:.4f}']
        if math.isfinite(goal):
            steps, losses = run['val_loss']
            reached = steps[np.argmax(losses <= goal)]
            minutes = run.minutes(reached)
            cells += [exact(run.tokens(reached)), duration(60 * minutes) if minutes >= 0 else 'nan']
        rows.append([label(run, number), *('n/a' if cell == 'nan' else cell for cell in cells)])
    return table(rows)


def label(run, number):
    """Return the name of a run in its color."""
    return f'<b class="c{number % 6}">{html.escape(run.name)}</b>'


def evaluations(run, label, color, places):
    """Return the Curve of a run's evaluations; places: turns their steps into the x axis."""
    steps, losses = run['val_loss']
    x = places(steps)
    known = np.isfinite(x)
    return Curve(label, color, x[known], losses[known], 'faint', run.at('val_stderr', steps)[known])


def small_panels(runs):
    """Return the panels below the losses."""
    panels = []
    for name, title, unit, size in SMALL_PANELS:
        curves = []
        if unit == 'GB' and all(run[name][1].max(initial=0) < 1000 for run in runs):
            unit, size = 'MB', 1
        for number, run in enumerate(runs):
            x, y = run[name]
            smooth = name in ('lr', 'peak_memory_mb') or len(x) < 10
            curves.append(Curve(run.name, number, x, y / size, 'line' if smooth else 'faint'))
            if not smooth:
                curves.append(Curve('mean', number, *running_mean(x, y)))
        panels.append(panel(title, unit, curves, log=name == 'grad_norm'))
    return panels


def run_page(run):
    """Return the page of one run."""
    events, loss, unit = run.events(), run['loss'], 'nats per token'
    curves = [Curve('training', 0, *loss, 'faint')]
    if len(loss[0]) >= 10:
        curves.append(Curve('mean', 0, *running_mean(*loss)))
    curves.append(evaluations(run, 'validation', 1, np.array))
    for kind, key in (('resumed', 'dashed: resumed'), ('skipped', 'dotted: skipped steps')):
        if any(event[0] == kind for event in events):
            unit += f' · {key}'
    panels = [panel('Loss', unit, curves, marks=events[-EVENTS:], wide=True, log=True)]
    panels += small_panels([run])
    return page(run.name, sentences([run]) + facts_of(run), panels, {
        'Events': columns([(event[3], '') for event in events[-30:]]),
        'Settings': columns(run.settings.items())})


def comparison_page(runs):
    """Return the page of several runs, over tokens if all logs count them."""
    by_tokens = all(math.isfinite(run.tokens(1)) for run in runs)
    x_name = 'tokens' if by_tokens else 'step'
    means, by_step, by_time = [], [], []
    for number, run in enumerate(runs):
        places = run.tokens if by_tokens else np.array
        x, y = run['loss']
        if len(x) >= 10:
            x, y = running_mean(x, y)
        means.append(Curve(run.name, number, places(x), y))
        by_step.append(evaluations(run, run.name, number, places))
        by_time.append(evaluations(run, run.name, number, run.minutes))
    panels = [panel('Validation loss', 'nats per token', by_step, x_name, wide=True, log=True),
              panel('Training loss', 'nats per token, running mean', means, x_name, wide=True, log=True),
              panel('Validation loss', 'by training time', by_time, 'minutes', wide=True, log=True)]
    names = sorted({name for run in runs for name in run.settings} - {'out_dir'})
    rows = [['', *(label(run, number) for number, run in enumerate(runs))]]
    for name in names:
        values = [repr(run.settings.get(name, '')) for run in runs]
        if len(set(values)) > 1:
            rows.append([name, *map(html.escape, values)])
    return page(' / '.join(run.name for run in runs), sentences(runs) + results(runs),
                panels + small_panels(runs), {'Settings that differ': table(rows) if rows[1:] else ''})


# -----------------------------------------------------------------------------
# files

def write_report(folder):
    """Write FOLDER/report.html. Returns its path. Raises ValueError if the folder holds no log; OSError."""
    return write(os.path.join(folder, 'report.html'), run_page(Record(folder)))


def report(folders):
    """
    Write the report of a run into its folder, or that of several, separated by commas, into the current
    one. Returns the text to print. Raises ValueError if a folder holds no log or cannot be written.
    """
    names = [folders] if os.path.isdir(folders) else [n.strip() for n in folders.split(',') if n.strip()]
    if not names:
        raise ValueError('give the folders of runs, separated by commas')
    try:
        if len(names) == 1:
            return f'report: {write_report(names[0])}'
        runs = [Record(name) for name in names]
        return f'report: {write(COMPARISON, comparison_page(runs))}\n{differing_data(runs)}'.rstrip()
    except OSError as e:
        raise ValueError(f'the report of {folders} could not be written: {e.strerror or e}') from None


def write(path, text):
    """Replace a file. Returns its path."""
    with replacing(path) as f:
        f.write(text.encode('utf-8', 'replace'))
    return path


if __name__ == '__main__':
    call_main(lambda: print(report(','.join(sys.argv[1:]))))
