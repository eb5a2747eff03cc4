"""The report: every number of a run is on the page, spikes survive, nothing is loaded."""

import json
import math
import os
import re
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from conftest import at_step, rows

from hotloop.system.text import with_error
from hotloop.training.report import BUCKETS, exact, write_report
from hotloop.training.report import __file__ as REPORT


class Page:
    """A report: its text, its tooltips and its body as a tree, in which every tag is closed."""

    def __init__(self, path):
        self.source = Path(path).read_text(encoding='utf-8')
        self.body = ET.fromstring(re.search('<body>.*</body>', self.source, re.S)[0])
        tooltips = list(self.body.iter('title'))
        self.titles = ''.join(f'{e.text}\n' for e in tooltips)
        for e in tooltips:
            e.text = ''
        self.text = ' '.join(filter(None, self.body.itertext()))

    def figure(self, name):
        """(the svg, {kind of axis: [(percent, label)]}) of a panel by its title."""
        text = next(t for t in self.source.split('<figure')[1:] if f'<b>{name}</b>' in t)
        svg = ET.fromstring(re.search('<svg.*?</svg>', text, re.S)[0])
        ticks = {}
        for axis, place, label in re.findall(r'class="t ([xy])" style="\w+:([\d.]+)%">([^<]*)<', text):
            value = float(label.replace('k', 'e3').replace(',', ''))
            ticks.setdefault(axis, []).append((float(place), value))
        return svg, ticks


def points(svg, kind):
    """The points of the first curve of a kind, (N, 2), in thousandths from the lower left."""
    path = next(p.get('d') for p in svg.iter('path') if kind in p.get('class', '').split())
    return np.array([[int(x), 1000 - int(y)] for x, y in re.findall(r'(-?\d+),(-?\d+)', path)])


def write_log(folder, lines, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'log.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
    text = ''.join(f'{name} = {value!r}\n' for name, value in settings.items())
    (folder / 'config.py').write_text(f'# settings\n\n{text}')
    return str(folder)


def lines_of_a_run(number, every=10, final=3.0):
    """Log lines of steps 1 to `number`, with an evaluation of `every` steps."""
    lines = []
    for step in range(1, number + 1):
        loss = final + 7 / step
        lines.append({'step': step, 'loss': loss, 'lr': 1e-3 * (1 - step / 1000), 'grad_norm': 0.5 + 1 / step,
                      'tokens_seen': 128 * step, 'peak_memory_mb': 1500 + step})
        if step > 1:
            lines[-1] |= {'ms': 600.0, 'tokens_per_s': 20000.0 + step}
        if step % every == 0:
            lines.append({'step': step, 'val_loss': loss + 0.25, 'val_stderr': 0.0125, 'val_bpb': loss / 3})
    return lines


def page_of(*folders):
    return Page(write_report([str(folder) for folder in folders]))


def test_every_number_of_the_log_is_on_the_page(tmp_path):
    """And what the run is, and how it ended. A line that a kill has torn is left out."""
    start = {'step': 0, 'event': 'start', 'model': 'gpt2, 1 layer', 'device': '8 x A100',
             'command': 'python train.py a.py', 'changed': ['max_iters']}
    lines = [start, *lines_of_a_run(40), {'step': 40, 'event': 'stopped: SIGTERM'}]
    folder = write_log(tmp_path / 'out', lines, max_iters=50, dataset='tiny', learning_rate=6e-4)
    with (tmp_path / 'out' / 'log.jsonl').open('a') as f:
        f.write('{"step": 41, "lo')
    page = page_of(folder)
    for words in ('out tiny · gpt2, 1 layer · 8 x A100 · python train.py a.py',
                  'Steps 40 stopped: SIGTERM', '3.4250 ± 0.0125', 'at step 40', f'{3.175 / 3:.4f}',
                  f'{40 * 128:,}', '24s',
                  'max_iters 50', 'learning_rate 0.0006', "dataset 'tiny'"):
        assert words in page.text, words
    marked = re.findall('class="set"><span>(.*?)<', page.source)
    assert marked == ['max_iters']
    for line in lines:  # fewer steps than columns
        for name in ('lr', 'grad_norm', 'peak_memory_mb', 'tokens_per_s', 'loss'):
            label = 'training' if name == 'loss' else page.text.split()[0]
            assert name not in line or f'{label}, step {line["step"]}: {exact(line[name])}\n' in page.titles
        if 'val_loss' in line:
            assert f'validation, step {line["step"]}: {line["val_loss"]:.4f} ± 0.0125' in page.titles


def test_curves_are_where_the_axes_say(tmp_path):
    lines = lines_of_a_run(40)
    page = page_of(write_log(tmp_path / 'out', lines))
    svg, ticks = page.figure('Learning rate')
    found = points(svg, 'line')
    for side, column in (('x', 'step'), ('y', 'lr')):
        values = [line[column] for line in lines if 'lr' in line]
        (p0, low), *_, (p1, high) = ticks[side]
        if side == 'y':
            p0, p1 = 100 - p0, 100 - p1
        places = found[:, int(side == 'y')] / 10
        assert low + (places - p0) / (p1 - p0) * (high - low) == pytest.approx(values, abs=max(values) / 500)
    svg, ticks = page.figure('Loss')  # a log axis: equal ratios are equal lengths
    (p0, low), *_, (p1, high) = ticks['y']
    per_place = math.log(high / low) / (p0 - p1)
    found = low * np.exp((points(svg, 'c0')[:, 1] / 10 - 100 + p0) * per_place)
    assert found == pytest.approx([line['loss'] for line in lines if 'loss' in line], rel=0.01)
    bars = next(p.get('d') for p in svg.iter('path') if p.get('class') == 'c1')
    top, bottom = map(int, re.match(r'M\d+,(\d+)V(\d+)', bars).groups())
    ratio = math.exp((bottom - top) / 10 * per_place)
    assert ratio == pytest.approx((3.95 + 0.0125) / (3.95 - 0.0125), rel=0.003)


def test_a_long_run_keeps_its_spikes_and_a_small_page(tmp_path):
    lines = [{'step': step, 'loss': 3.0 + step % 7 / 100, 'lr': 1e-3, 'tokens_seen': step}
             for step in range(1, 20001)]
    lines[7777]['loss'], lines[9999]['loss'] = 9.0, 1.0
    found = points(page_of(write_log(tmp_path / 'out', lines)).figure('Loss')[0], 'faint')
    assert found[:, 1].max() == 1000 and found[:, 1].min() == 0  # the ends of the axis
    assert BUCKETS <= len(found) <= 2 * BUCKETS + 2 and found[-1][0] == 1000
    assert os.path.getsize(tmp_path / 'out' / 'report.html') < 150_000


@pytest.mark.parametrize('lines', [
    [{'step': 0, 'event': 'start', 'changed': []}],  # stopped before the first step
    [{'step': 1, 'loss': 5.0, 'lr': 1e-3, 'grad_norm': 1.0, 'tokens_seen': 9}],
    [{'step': 1, 'loss': 1e300, 'lr': 0.0, 'tokens_seen': 9},
     {'step': 2, 'loss': 1e-300, 'lr': 0.0, 'tokens_seen': 9}, {'step': 2, 'val_loss': 5.0}]])
def test_a_page_of_little(tmp_path, lines):
    folder = write_log(tmp_path / 'out', lines)
    other = write_log(tmp_path / 'other', lines_of_a_run(3))
    for page in (page_of(folder), page_of(folder, other)):
        assert 'nan' not in page.source.replace('nance', '') and 'inf' not in page.source


def test_nothing_is_loaded_and_nothing_is_run(tmp_path, monkeypatch):
    evil = '<script src="https://example.com/x.js"></script>'
    monkeypatch.chdir(tmp_path)
    name = write_log(Path('<img src=x>&'), lines_of_a_run(3), start=evil)
    other = write_log(Path('b'), lines_of_a_run(3))
    for folders in ([name], [name, other]):
        page = page_of(*folders)
        assert evil in page.text and 'url(' not in page.source and '@import' not in page.source
        assert not {e.tag for e in page.body.iter()} & {'script', 'img', 'iframe', 'link', 'a'}
        assert {attribute for e in page.body.iter() for attribute in e.attrib} <= {
            'class', 'style', 'd', 'viewBox', 'preserveAspectRatio', 'x', 'width', 'height'}


def test_several_runs_are_compared(tmp_path, monkeypatch):
    """Losses, the time and the tokens to a loss that all have reached, settings that differ."""
    monkeypatch.chdir(tmp_path)
    common = dict(dataset='tiny', n_layer=2)
    write_log(Path('a'), lines_of_a_run(40), learning_rate=1e-3, out_dir='a', **common)
    write_log(Path('b'), lines_of_a_run(80, final=2.0), learning_rate=2e-3, out_dir='b', **common)
    page = page_of('a', 'b')
    assert 'a tiny Best validation loss 3.4250 ± 0.0125 at step 40' in page.text
    assert f'To a loss of 3.4250 24s {40 * 128:,} tokens b tiny ' in page.text
    assert f'To a loss of 3.4250 6s {10 * 128:,} tokens ' in page.text
    assert 'Settings that differ learning_rate 0.001 0.002 From' in page.text
    assert f'b, tokens {80 * 128:,}: 2.3375 ± 0.0125' in page.titles
    assert 'a, minutes 0.4: 3.4250 ± 0.0125' in page.titles
    write_log(Path('c'), lines_of_a_run(40), vocab_size=65, **common)
    page = page_of('a', 'c')
    assert 'compare bits per byte' in page.text and 'To a loss' not in page.text
    with pytest.raises(FileNotFoundError):
        write_report(['a', 'no'])


# -----------------------------------------------------------------------------
# the report of a run as it goes

def test_a_run_draws_itself(train_tiny, tmp_path, monkeypatch):
    """At evaluations and at the end."""
    seen = []
    at_step(monkeypatch, 5, lambda: seen.append((tmp_path / 'out' / 'report.html').read_text()))
    train_tiny(max_iters=6, log_interval=2)
    assert '>Loss<' in seen[0]
    train_tiny(init_from='resume', max_iters=9)
    best = min(rows(tmp_path / 'out', 'val_loss'), key=lambda row: row['val_loss'])
    page = Page(tmp_path / 'out' / 'report.html')
    assert with_error(best['val_loss'], best['val_stderr']) in page.text and 'Steps 9' in page.text


def test_a_report_that_fails_is_a_warning(train_tiny, monkeypatch, capsys):
    def write_report(folders):
        raise IndexError('a bug')
    monkeypatch.setattr('hotloop.training.logger.write_report', write_report)
    assert train_tiny(max_iters=2) == 0
    assert 'report.html could not be written: a bug' in capsys.readouterr().out


def test_the_command_draws_a_report(tmp_path, monkeypatch, capsys):
    folder = write_log(tmp_path / 'a b', lines_of_a_run(3))
    monkeypatch.setattr(sys, 'argv', ['report', folder])
    runpy.run_path(REPORT, run_name='__main__')
    assert capsys.readouterr().out == f'report: {folder}/report.html\n'
