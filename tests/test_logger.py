"""The log of a run: strict JSON, no line twice, and what a run prints about itself."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from conftest import noise, rows, write_bins

from hotloop.checkpoint import RunState
from hotloop.distributed import Env
from hotloop.logger import Log, StepTimer, keep_lines


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
    cfg = SimpleNamespace(wandb_log=False)
    log = Log(tmp_path, cfg, {}, Env(), RunState(iter_num=4))
    assert not log.lacks_evaluation(4)
    log.write('', step=4, loss=1.0)
    assert log.lacks_evaluation(4)
    log.write('', step=4, val_loss=1.0)
    assert not log.lacks_evaluation(4) and log.lacks_evaluation(8)
    assert not Log(tmp_path, cfg, {}, Env(rank=1, world=2), None).lacks_evaluation(4)


def test_a_log_on_a_full_disk_is_reported_once(tmp_path, capsys):
    (tmp_path / 'log.jsonl').symlink_to('/dev/full')
    log = Log(tmp_path, SimpleNamespace(wandb_log=False), {}, Env(), None)
    for step in (1, 2):
        log.write(f'step {step}', step=step)
    log.close()
    words = 'could not be written: No space left on device'
    assert [line.endswith(words) for line in capsys.readouterr().out.splitlines()] == [False, True, False]


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
    train_tiny(max_iters=2, min_lr=1, warmup_iters=5)
    out = capsys.readouterr().out
    for line in (r'^  max_iters = 2  \(--max_iters\)$', r'^device: cpu \(requested\), 1 x 1 thread$',
                 r'^dtype: float32 \(requested\)$', r'^compile: off \(requested\)$',
                 r'^attention: scaled_dot_product_attention; kernels available: .*math',
                 r'^data: tiny, 4,001 training and 487 validation tokens, byte tokenizer$',
                 r'^model: gpt2, 2 layers x 32 channels x 2 heads, context 16, vocabulary 257: [\d,]+ '
                 r'parameters, ',
                 r'^batch: 4 sequences x 2 micro-batches x 1 process = 128 tokens per step$',
                 r'^run: 2 steps, 256 tokens, 0.06 epochs, into ',
                 r'^note: min_lr=1 is above learning_rate: ', r'^note: the warmup of 5 steps is longer',
                 r'^step 1/2: loss [\d.]+, lr .*including startup$',
                 r'^step 2/2: loss .*, [\d.]+ ms, [\d,]+ tok/s, data [\d.]+%, 0:00:00 left$',
                 r'^done: best val loss [\d.]+, peak memory [\d,]+ MB; to sample from the model: python '
                 r'sample.py'):
        assert re.search(line, out, re.M), line
