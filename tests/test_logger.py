"""The log of a run: strict JSON, no line twice, and what a run prints about itself."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from conftest import noise, rows, write_bins

from hotloop.checkpoint import RunState
from hotloop.distributed import Env
from hotloop.logger import Log, StepTimer, duration, keep_lines


def test_the_log_is_strict_json(train_tiny, tmp_path):
    """Also if a number is not finite, such as the standard error of a single window."""
    write_bins(tmp_path / 'data' / 'one', noise(200), noise(17))
    train_tiny(dataset='one', data_dir=tmp_path / 'data', max_iters=3)
    for line in (tmp_path / 'out' / 'log.jsonl').read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f'{name} in the log'))
    [last] = rows(tmp_path / 'out', 'val_loss')
    assert last['step'] == 3 and 'val_stderr' not in last and last['val_perplexity'] > 1


def test_lines_that_come_again_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / 'log.jsonl'
    lines = ['{"step": 1, "loss": 5}\n', '{"step": 2, "los\n', '[1]\n', '{"step": 2}\n', '{"step": 3}\n',
             '{"step": 2']
    path.write_text(''.join(lines))
    keep_lines(path, 2)
    assert path.read_text() == lines[0] + lines[3]


def test_an_evaluation_is_missing_only_from_a_log_that_has_lines(tmp_path):
    class Folder:
        def __truediv__(self, name):
            return str(tmp_path / name)
    cfg = SimpleNamespace(wandb_log=False)
    log = Log(Folder(), cfg, {}, Env(), RunState(iter_num=4))
    assert not log.lacks_evaluation(4)
    log.write('', step=4, loss=1.0)
    assert log.lacks_evaluation(4)
    log.write('', step=4, val_loss=1.0)
    assert not log.lacks_evaluation(4) and log.lacks_evaluation(8)
    assert not Log(Folder(), cfg, {}, Env(rank=1, world=2), None).lacks_evaluation(4)


def test_a_log_that_cannot_be_written_does_not_end_the_run(train_tiny, tmp_path, monkeypatch, capsys):
    """It is reported once."""
    def full(*args):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr('hotloop.logger.json.dumps', lambda row: '')
    real = Log.attempt
    monkeypatch.setattr(Log, 'attempt', lambda self, action,
                        *args: real(self, full if args else action, *args))
    assert train_tiny(max_iters=3) == 0
    message = 'could not be written: No space left on device; training continues'
    assert capsys.readouterr().out.count(message) == 1


@pytest.mark.parametrize('seconds, text', [(0, '0s'), (59.9, '59s'), (90, '1m30s'), (3600, '1h00m'),
                                           (90061, '25h01m')])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_speed_is_measured_without_pauses(monkeypatch):
    now = iter([0.0, 10.0, 11.0, 15.0, 21.0])
    monkeypatch.setattr(time, 'perf_counter', lambda: next(now))
    timer = StepTimer(batches := SimpleNamespace(waited=1.0), 4)
    assert timer.lap(6) == (2, 10.0, 0.0, True)
    timer.pause()
    timer.resume()
    batches.waited = 3.0
    assert timer.lap(7) == (1, 7.0, 2.0, False)


def test_what_a_run_prints_about_itself(train_tiny, capsys):
    train_tiny(max_iters=2, min_lr=1, warmup_iters=5, muon_lr=0.1)
    out = capsys.readouterr().out
    for line in (r'^  max_iters = 2  \(--max_iters\)$', r'^device: cpu \(asked for\), 1 x 1 threads$',
                 r'^dtype: float32 \(asked for\)$', r'^compile: off \(asked for\)$',
                 r'^attention: scaled_dot_product_attention; kernels available: .*math',
                 r'^data: tiny, 4,001 training and 487 validation tokens, byte tokenizer$',
                 r'^model: gpt2, 2 layers x 32 channels x 2 heads, context 16, vocabulary 257: [\d,]+ '
                 r'parameters, ',
                 r'^batch: 4 sequences x 2 micro-batches x 1 processes = 128 tokens per step$',
                 r'^run: 2 steps, 256 tokens, 0.06 epochs, into ',
                 r'^note: min_lr=1 is above learning_rate: ', r'^note: the warm-up of 5 steps is longer',
                 r'^note: muon_lr has no effect', r'^step 1/2: loss [\d.]+, lr .*start-up included$',
                 r'^step 2/2: loss .*, [\d.]+ ms, [\d,]+ tok/s, mfu n/a, data [\d.]+%, 0s left$',
                 r'^done: best val loss [\d.]+, peak memory [\d,]+ MB; to see what the model writes: python '
                 r'sample.py'):
        assert re.search(line, out, re.M), line
