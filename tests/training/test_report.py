"""The report: every number of a run is on the page, spikes survive, nothing is loaded, faults are named."""

import json
import math
import os
import re
import runpy
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import at_step, error_of, rows

from hotloop.system.distributed import Env
from hotloop.system.text import duration, with_error
from hotloop.training.chart import BUCKETS, COLUMNS, Axis, exact, outline
from hotloop.training.logger import Log
from hotloop.training.record import Record, running_mean
from hotloop.training.report import __file__ as REPORT
from hotloop.training.report import report

VOID = {'meta', '!doctype'}


class Page(HTMLParser):
    """A parsed page: text, tags with their attributes, tooltips. Fails if a tag is not closed."""

    def __init__(self, path):
        super().__init__()
        self.source = Path(path).read_text(encoding='utf-8')
        self.open, self.tags, self.titles, self.words = [], [], [], []
        self.feed(self.source)
        assert self.open == []
        self.text = ' '.join(self.words)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ['style']:
            (self.titles if self.open[-1:] == ['title'] else self.words).append(data)

    def figure(self, name):
        """(the svg, {kind of axis: [(percent, label)]}) of a panel by its title."""
        text = next(t for t in self.source.split('<figure')[1:] if f'<b>{name}</b>' in t)
        svg = ET.fromstring(re.search('<svg.*?</svg>', text, re.S)[0])
        ticks = {}
        for axis, place, label in re.findall(r'class="t ([xy])" style="\w+:([\d.]+)%">([^<]*)<', text):
            ticks.setdefault(axis, []).append((float(place), label))
        return svg, ticks


def points(svg, kind):
    """The points of the first curve of a kind, (N, 2), in thousandths from the lower left."""
    path = next(p.get('d') for p in svg.iter('path') if kind in p.get('class', '').split())
    return np.array([[int(x), 1000 - int(y)] for x, y in re.findall(r'(-?\d+),(-?\d+)', path)])


def values_at(places, ticks, from_top=False):
    """What places in thousandths mean on a linear axis, by its labels."""
    (p0, low), (p1, high) = ticks[0], ticks[-1]
    if from_top:
        p0, p1 = 100 - p0, 100 - p1
    low, high = (float(label.replace(',', '')) for label in (low, high))
    return low + (places / 10 - p0) / (p1 - p0) * (high - low)


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


def page_of(folder):
    line = report(folder)
    return Page(line.removeprefix('report: '))


def test_every_number_of_the_log_is_on_the_page(tmp_path):
    lines = lines_of_a_run(40)
    lines[20] |= {'resumed': 18, 'skipped': 3}
    page = page_of(write_log(tmp_path / 'out', lines, max_iters=50, dataset='tiny', learning_rate=6e-4))
    step = lines[20]['step']
    for words in ('3.4250 ± 0.0125', 'at step 40', f'{3.175 / 3:.4f}', '40 of 50', f'{40 * 128:,}', '23s',
                  'max_iters 50', 'learning_rate 0.0006', 'dataset tiny',
                  'step 18: resumed', f'step {step}: 3 non-finite steps skipped',
                  'step 40: best validation loss, 3.4250 ± 0.0125',
                  'dashed: resumed · dotted: skipped steps'):
        assert words in page.text, words
    assert 'text 10' not in page.text  # the last three
    write_log(tmp_path / 'open', lines, max_iters=600000, time_budget=5.0, decay_start=None)
    assert 'of 600,000' not in page_of(str(tmp_path / 'open')).text
    for step in (10, 20, 30, 40):
        assert f'validation, step {step}: {3 + 7 / step + 0.25:.4f} ± 0.0125' in page.titles
    tooltips = '\n'.join(page.titles)
    for line in lines:
        if 'lr' in line:  # fewer steps than columns
            assert f'step {line["step"]}: {exact(line["lr"])}\n' in f'{tooltips}\n'
            assert f'training, step {line["step"]}: {exact(line["loss"])}\n' in tooltips


def test_curves_are_where_the_axes_say(tmp_path):
    lines = lines_of_a_run(40)
    page = page_of(write_log(tmp_path / 'out', lines))
    for title, name, size in (('Learning rate', 'lr', 1), ('Peak memory', 'peak_memory_mb', 1000)):
        svg, ticks = page.figure(title)
        found = points(svg, 'line')
        logged = [line for line in lines if name in line]
        steps, values = [line['step'] for line in logged], [line[name] / size for line in logged]
        assert values_at(found[:, 0], ticks['x']) == pytest.approx(steps, abs=0.05)
        assert values_at(found[:, 1], ticks['y'], True) == pytest.approx(values, abs=max(values) / 500)
    svg, ticks = page.figure('Loss')  # a log axis: equal ratios are equal lengths
    for memory, unit in ((357.2, 'MB'), (1500.0, 'GB')):
        line = {'step': 1, 'loss': 3.0, 'peak_memory_mb': memory}
        assert f'Peak memory {unit} ' in page_of(write_log(tmp_path / unit, [line])).text
    (p0, low), (p1, high) = ((100 - place, float(label)) for place, label in (ticks['y'][0], ticks['y'][-1]))
    per_place = math.log(high / low) / (p1 - p0)
    found = [low * math.exp((place / 10 - p0) * per_place) for place in points(svg, 'c0')[:, 1]]
    assert found == pytest.approx([line['loss'] for line in lines if 'loss' in line], rel=0.01)
    dots = [g for g in svg.iter('g') if g.find('title').text.startswith('validation, step 10')]
    top, bottom = map(int, re.match(r'M\d+,(\d+)V(\d+)', dots[0].find('path').get('d')).groups())
    ratio = math.exp((bottom - top) / 10 * per_place)
    assert ratio == pytest.approx((3.95 + 0.0125) / (3.95 - 0.0125), rel=0.003)


def test_a_long_run_keeps_its_spikes_and_a_small_page(tmp_path):
    lines = [{'step': step, 'loss': 3.0 + step % 7 / 100, 'lr': 1e-3} for step in range(1, 20001)]
    lines[7777]['loss'], lines[9999]['loss'] = 9.0, 1.0
    path = write_log(tmp_path / 'out', lines)
    svg, _ = page_of(path).figure('Loss')
    found = points(svg, 'faint')
    assert found[:, 1].max() == 1000 and found[:, 1].min() == 0  # the ends of the axis
    assert 2 * BUCKETS <= len(found) <= 4 * BUCKETS
    assert os.path.getsize(tmp_path / 'out' / 'report.html') < 150_000


def test_the_outline_keeps_first_lowest_highest_and_last():
    x = np.repeat(np.arange(1001), 10)
    y = np.random.default_rng(0).integers(0, 1001, len(x))
    kept = outline(x, y)
    for bucket in range(BUCKETS):
        part = np.flatnonzero(x * BUCKETS // 1001 == bucket)
        chosen = y[[i for i in kept if part[0] <= i <= part[-1]]]
        assert chosen.min() == y[part].min() and chosen.max() == y[part].max()
    assert kept[0] == 0 and kept[-1] == len(x) - 1 and list(outline(x[:5], y[:5])) == [0, 1, 2, 3, 4]


def test_the_running_mean():
    x = np.arange(5000.0)
    _, flat = running_mean(x, np.full(5000, 2.5))
    assert flat == pytest.approx(2.5)
    at, line = running_mean(x, x)
    assert len(at) == 2000 and line[100:-100] == pytest.approx(at[100:-100] + 1, abs=1.5)
    _, spiked = running_mean(x, np.where(x == 2500, 1e30, 1.0))
    assert spiked[0] == spiked[-1] == 1.0  # a difference of cumulated sums would have lost them


@pytest.mark.parametrize('values, log, labels', [
    ([0, 1200], False, ['0', '200', '400', '600', '800', '1,000', '1,200']), ([5], False, ['0', '1', '5']),
    ([0, 6e-4], False, ['0', '0.0001', '0.0006']), ([0, 6e-6], False, ['0', '1e-6', '6e-6']),
    ([0.1, 900], True, ['0.1', '1', '100']), ([2.9, 11], True, ['4', '6', '10']),
    ([0, 0], False, ['0', '1.0']), ([0, 3], True, ['0', '3.0']),
    ([600000, 600100], False, ['600,000', '600,020', '600,100']),
    ([-2, 2], False, ['-2', '0', '2']), ([1e18, 3e18], False, ['1e+18', '3e+18'])])
def test_ticks_are_at_round_numbers(values, log, labels):
    found = [label for _, label in Axis(np.array(values, dtype=float), log, rounded=True).ticks]
    assert set(labels) <= set(found) and len(found) == len(set(found)) <= 8, found


@pytest.mark.parametrize('lines', [
    [{'step': 1, 'loss': 5.0, 'lr': 1e-3, 'grad_norm': 1.0}],
    [{'step': 2, 'val_loss': 5.0, 'val_stderr': 0.1}],
    [{'step': 3, 'lr': 0.0}], [{'step': 0, 'loss': 0.0}, {'step': 0, 'loss': 0.0}],
    [{'step': 1, 'loss': 1e300}, {'step': 2, 'loss': 1e-300}, {'step': 3, 'loss': 1e299}],
    [{'step': 5, 'val_loss': 2.0}, {'step': 5, 'val_loss': 2.0, 'val_stderr': 3.0},
     {'step': 1, 'loss': 1.0}]])
def test_a_page_of_little(tmp_path, lines):
    page = page_of(write_log(tmp_path / 'out', lines))
    for svg in re.findall('<svg.*?</svg>', page.source, re.S):
        assert len([*ET.fromstring(svg).iter('rect')]) == COLUMNS
    assert 'nan' not in page.source.replace('nance', '') and 'inf' not in page.source


def test_nothing_is_loaded_and_nothing_is_run(tmp_path, monkeypatch):
    evil = '<script src="https://example.com/x.js"></script>'
    name = tmp_path / '<img src=x>&'
    write_log(name, lines_of_a_run(3), start=evil)
    (name / 'config.py').open('a').write('import os\nos.remove("x")\n')
    other = write_log(tmp_path / 'b', lines_of_a_run(3))
    monkeypatch.chdir(tmp_path)
    for folders in (name.name, f'{name.name},{other}'):
        page = page_of(folders)
        assert {tag for tag, _ in page.tags} <= {
            'html', 'head', 'meta', 'title', 'style', 'body', 'h1', 'h2', 'h3', 'dl', 'div', 'dt', 'dd',
            'small', 'p', 'main', 'figure', 'figcaption', 'b', 'span', 'svg', 'path', 'rect', 'g', 'ul', 'li',
            'pre', 'footer', 'table', 'tr', 'th', 'td'}
        names = {attribute for _, attrs in page.tags for attribute in attrs}
        assert not names & {'src', 'href', 'xlink:href', 'onload', 'onclick', 'srcset', 'data', 'action'}
        style = page.source.split('<style>')[1].split('</style>')[0]
        assert 'url(' not in style and '@import' not in style
        assert any("default-src 'none'" in attrs.get('content', '') for _, attrs in page.tags)
    assert evil in page_of(name.name).text


def test_a_damaged_log_is_a_sentence(tmp_path):
    folder = tmp_path / 'out'
    assert error_of(report, str(folder)) == (f'{folder}/log.jsonl: No such file or directory; give the '
                                             'folders of runs')
    write_log(folder, [])
    assert error_of(report, str(folder)) == f'{folder}/log.jsonl has no log entries yet'
    torn = b'{"step": 2, "lo\n[1]\n{"loss": 4}\n\xff\xfe\n{"step": "x", "loss": 1}\n{"step": 1e999}\n'
    (folder / 'log.jsonl').write_bytes(torn)
    assert error_of(report, str(folder)).endswith('has no log entries yet, only 6 damaged lines')
    (folder / 'log.jsonl').write_bytes(b'{"step": 1, "loss": 5.5, "lr": "x"}\n' + torn)
    (folder / 'config.py').write_text('n_layer = (')
    page = page_of(str(folder))
    assert f'{os.path.normpath(folder)}: 6 damaged lines of log.jsonl left out' in page.text
    assert 'training, step 1: 5.5' in page.titles


def test_several_runs_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = dict(dataset='tiny', n_layer=2)
    write_log(tmp_path / 'a', lines_of_a_run(40), learning_rate=1e-3, out_dir='a', **common)
    write_log(tmp_path / 'b', lines_of_a_run(80, final=2.0), learning_rate=2e-3, out_dir='b', **common)
    assert report('a, b') == 'report: report-compare.html'
    page = Page('report-compare.html')
    cells = re.findall('<tr>(.*?)</tr>', page.source)
    table = [re.findall(r'<t[hd]>(?:<b[^>]*>)?([^<]*)', row) for row in cells]
    assert table == [['Run', 'Best loss', 'at step', 'Bits per byte', 'Tokens to 3.4250',
                      'Training time to 3.4250'],
                     ['a', '3.4250 ± 0.0125', '40', f'{3.175 / 3:.4f}', f'{40 * 128:,}', '23s'],
                     ['b', '2.3375 ± 0.0125', '80', f'{2.0875 / 3:.4f}', f'{10 * 128:,}', '5s'],
                     ['', 'a', 'b'], ['learning_rate', '0.001', '0.002']]
    assert f'b, tokens {80 * 128:,}: 2.3375 ± 0.0125' in page.titles
    assert 'a, minutes 0.39: 3.4250 ± 0.0125' in page.titles
    assert 'n_layer' not in page.text and 'different datasets' not in page.text
    write_log(tmp_path / 'c', [{'step': 4, 'loss': 2.0}], dataset='other')
    write_log(tmp_path / 'd', lines_of_a_run(40), vocab_size=65, **common)
    write_log(tmp_path / 'e', lines_of_a_run(10, every=1)[:2], vocab_size=257, **common)
    for runs, what in (('a,c', 'datasets'), ('d,e', 'vocabularies')):
        assert report(runs).endswith(f'The runs have different {what}: compare bits per byte, not losses.')
        page = Page('report-compare.html')
        assert 'compare bits per byte' in page.text and 'Tokens to' not in page.text
        assert 'nan' not in page.text
    report('a,e')  # the latter without timed steps
    assert Page('report-compare.html').text.count('n/a') == 1
    assert error_of(report, 'a,missing').startswith('missing/log.jsonl: No such file')


def test_training_time_counts_steps_alone():
    record = Record.__new__(Record)
    steps = np.array([1.0, 10, 20, 30])
    known = {'lr': (steps, steps), 'ms': (steps[[1, 3]], np.array([1000.0, 3000.0]))}
    record.columns = {name: known.get(name, ((), ())) for name in ('lr', 'ms')}
    assert record.minutes(np.array([1, 10, 20, 30])) * 60 == pytest.approx([0, 9, 29, 59])
    record.columns = {}
    assert np.isnan(record.minutes(np.array([1.0]))).all() and math.isnan(record.tokens(3))


@pytest.mark.parametrize('seconds, text', [(0.4, '0s'), (59.9, '59s'), (60, '1m 0s'), (3599, '59m 59s'),
                                           (18750, '5h 12m'), (2999000, '34d 17h'), (1e8, '1157d')])
def test_durations(seconds, text):
    assert duration(seconds) == text
    assert with_error(1.0, math.nan) == '1.0000'


# -----------------------------------------------------------------------------
# the report of a run as it goes

def test_a_run_draws_itself(train_tiny, tmp_path, monkeypatch):
    """At evaluations and at the end, and a resume is an event."""
    seen = []
    at_step(monkeypatch, 5, lambda: seen.append((tmp_path / 'out' / 'report.html').read_text()))
    train_tiny(max_iters=6, log_interval=2)
    assert '>Loss<' in seen[0] and 'of 6<' in seen[0]
    train_tiny(init_from='resume', max_iters=9)
    page = Page(tmp_path / 'out' / 'report.html')
    best = min(rows(tmp_path / 'out', 'val_loss'), key=lambda row: row['val_loss'])
    assert with_error(best['val_loss'], best['val_stderr']) in page.text and 'step 6: resumed' in page.text
    assert [row['resumed'] for row in rows(tmp_path / 'out', 'resumed')] == [6]
    assert not [name for name in os.listdir(tmp_path / 'out') if name.endswith('.tmp')]


def test_a_report_that_fails_is_a_warning(train_tiny, tmp_path, monkeypatch, capsys):
    def fail(folder):
        raise IndexError('a bug')
    monkeypatch.setattr('hotloop.training.logger.write_report', fail)
    assert train_tiny(max_iters=2) == 0 and not (tmp_path / 'out' / 'report.html').exists()
    assert 'report.html could not be written: a bug' in capsys.readouterr().out


def test_reports_cost_little_of_a_run(tmp_path, monkeypatch):
    """One that took a second is followed by the next after 200, and in any case by one at the end."""
    clock, written = [1000.0], []

    def write_report(folder):
        clock[0] += 1
        written.append(clock[0])
    monkeypatch.setattr('hotloop.training.logger.write_report', write_report)
    monkeypatch.setattr('time.monotonic', lambda: clock[0])
    log = Log(SimpleNamespace(out_dir=tmp_path, wandb_log=False, tensorboard=False), {}, Env())
    log.report()
    assert written == []  # nothing is logged yet
    log.write('', step=1, loss=1.0)
    for clock[0] in (1100, 1299, 1300, 1301):
        log.report()
    log.close()
    assert written == [1101, 1301, 1302]


def test_the_command_draws_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['report', write_log(tmp_path / 'a, b', lines_of_a_run(3))])
    runpy.run_path(REPORT, run_name='__main__')
    assert capsys.readouterr().out == f'report: {tmp_path}/a, b/report.html\n'
