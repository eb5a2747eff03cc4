"""The log of a run: strict JSON, no line twice, the same numbers everywhere."""

import json
import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import at_step, noise, rows, stop_at, write_bins

from hotloop.system.distributed import Env
from hotloop.system.text import duration
from hotloop.training.checkpoint import RunState
from hotloop.training.evaluate import Evaluation
from hotloop.training.logger import Log, Meter, evaluation_text, keep_lines, shape_text, step_line
from model import GPTConfig


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
    lines = ['{"step": 0, "event": "start"}\n', '{"step": 1, "loss": 5}\n', '{"step": 2, "los\n',
             '{"step": 2}\n', '{"step": 2, "event": "stopped: SIGTERM"}\n', '{"step": 3}\n', '{"step": 2']
    path.write_bytes(''.join(lines).encode().replace(b'los\n', b'los\xff\n'))
    keep_lines(path, 2)
    assert path.read_text() == lines[0] + lines[1] + lines[3]


def test_the_log_has_the_start_and_the_end_of_a_run(train_tiny, tmp_path, monkeypatch, capsys):
    """A resume drops the end, and an error is one."""
    stop_at(monkeypatch, 2)
    train_tiny(n_layer=1)
    [start, end] = rows(tmp_path / 'out', 'event')
    assert start['step'] == 0 and 'n_layer' in start['changed'] and 'beta1' not in start['changed']
    assert start['model'].startswith('gpt2, 1 layer x 32 channels') and start['command'].startswith('python')
    assert (end['step'], end['event']) == (2, 'stopped: a signal')
    train_tiny(init_from='resume', max_iters=4, n_layer=1)
    assert [row['event'] for row in rows(tmp_path / 'out', 'event')] == ['start', 'done']
    at_step(monkeypatch, 1, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_tiny('failed')
    assert rows(tmp_path / 'failed', 'event')[-1]['event'] == 'stopped: division by zero'


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / 'log.jsonl').symlink_to('/dev/full')
    log = Log(SimpleNamespace(out_dir=tmp_path, wandb_log=False, tensorboard=False), {}, Env())

    def fail(*_):
        raise OSError('full')
    log.tensorboard = SimpleNamespace(add_scalar=fail)
    log.write('s', step=1, loss=2.0)
    log.write('s', step=2, loss=2.0)
    printed = capsys.readouterr().out
    assert 'log.jsonl could not be written: No space left on device; training' in printed
    assert printed.count('tensorboard could not be written: full; training continues') == 1


def test_speed_is_measured_in_steps_alone(monkeypatch):
    now = iter([10.0, 21.0])
    monkeypatch.setattr('hotloop.system.host.STARTED', 0.0)
    monkeypatch.setattr(time, 'perf_counter', lambda: next(now))
    batches = SimpleNamespace(waited=1.0, global_batch=7, split=SimpleNamespace(T=10))
    meter = Meter(batches, RunState(), Env(), 1.0)
    result = SimpleNamespace(loss=torch.tensor(6.0), norm=torch.tensor(1.0), skipped=torch.tensor(0.0))
    meter.add(result, 2)
    meter.add(result, 4)
    means = {'loss': 2.0, 'grad_norm': 1.0, 'skipped': None}
    assert meter.read() == (10.0, means)
    meter.add(result, 3)
    meter.exclude(4.0)
    batches.waited = 3.0
    assert meter.read() == (7.0, {**means, 'ms': 7000.0, 'tokens_per_s': 10.0, 'data_share': 2 / 7})


def test_what_a_run_prints_about_itself(train_tiny, capsys):
    train_tiny(max_iters=2)
    out = capsys.readouterr().out
    for line in (r'^  max_iters = 2  \(--max_iters\)$', r'^device: cpu \(requested\), 1 x 1 thread$',
                 r'^data: tiny, 4,001 training and 487 validation tokens, byte tokenizer$',
                 r'^batch: 4 sequences x 2 micro-batches x 1 process = 128 tokens per step$',
                 r'^run: 2 steps, 256 tokens, 0.06 epochs, into',
                 r'^step 1: loss [\d.]+, lr [\d.]+e-\d+, [\d.]+ [MG]B, [\d.]+ s including startup$',
                 r'^step 2: loss [\d.]+, lr [\d.]+e-\d+, [\d.,]+k? tok/s, [\d.]+ [MG]B, 0s left$',
                 r'^step 2: val loss [\d.]+ \+- [\d.]+, [\d.]+ bits per byte, train loss [\d.]+$',
                 r'^done: best val loss [\d.]+, peak memory [\d.]+ [MG]B$', r'^to sample: python sample.py'):
        assert re.search(line, out, re.M), line


def test_a_model_is_named_by_its_family_or_preset():
    assert shape_text(GPTConfig(), {'hf_config': {'model_type': 'qwen3'}}).startswith('qwen3, 12 layers')
    assert shape_text(GPTConfig(preset='modern'), {}).startswith('modern, ')


def test_lines_of_steps_and_evaluations_fit_into_80_columns():
    longest = {'lr': 9.96e-10, 'peak_memory_mb': 191_999.0, 'skipped': 1200, 'tokens_per_s': 9_999_999.0,
               'mfu': 1.0}
    for loss, skipped in ((0.0, 9), (12345.6, 9), (1e30, 9), (math.nan, 1200), (math.nan, None)):
        numbers = {**longest, 'loss': loss, 'skipped': skipped}
        line = step_line(600_000, numbers, f'{duration(1e9)} left')
        assert ('--pack_rows' in line) == (skipped is None)  # a prompt alone is no divergence
        assert max(map(len, line.splitlines())) <= 80, line
    numbers = {'loss': 3.1234, 'lr': 6e-4, 'peak_memory_mb': 79123.0, 'skipped': 2,
               'tokens_per_s': 9_999_999.0, 'mfu': 0.4567}
    assert step_line(600_000, numbers, '34d 17h left') == (
        'step 600000: loss 3.1234, lr 6.0e-04, 10M tok/s, mfu 46%, 79.1 GB, 34d 17h left\n'
        'step 600000: 2 non-finite steps skipped')

    def evaluated(loss, error, bpb, train, step=600_000):
        val = {'loss': loss, 'stderr': error, 'bpb': bpb, 'tokens': 1}
        return evaluation_text(step, Evaluation(val, {'loss': train}, 1.0))[0]
    assert len(evaluated(1e30, 12345, 999.9, 1e30)) <= 80
    assert evaluated(3.1234, 0.0075, 1.1777, 3.1023, 0) == (
        'val loss 3.1234 +- 0.0075, 1.1777 bits per byte, train loss 3.1023')
    assert evaluated(3.1234, math.nan, None, 3.1023, 8) == 'step 8: val loss 3.1234, train loss 3.1023'


def test_a_run_of_a_mixture_tells_the_loss_of_each(train_tiny, capsys):
    train_tiny(max_iters=4, dataset='tiny:0.7,tiny:0.3')
    assert re.search('^step 4: val loss [0-9.]+ on tiny$', capsys.readouterr().out, re.M)


# -----------------------------------------------------------------------------
# TensorBoard

def test_tensorboard_has_the_numbers_of_the_log(train_tiny, tmp_path):
    """Also after a resume, which hides what comes again."""
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    settings = dict(tensorboard=True, save_minutes=0)
    train_tiny(max_iters=5, **settings)
    (tmp_path / 'out' / 'ckpt.pt').unlink()  # back to an earlier checkpoint
    train_tiny(init_from='resume', max_iters=8, **settings)
    events = EventAccumulator(str(tmp_path / 'out' / 'tensorboard'))
    events.Reload()
    for name in ('loss', 'lr', 'val_loss', 'train_loss', 'val_bpb', 'tokens_per_s'):
        logged = [(row['step'], row[name]) for row in rows(tmp_path / 'out', name)]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in logged], name
        assert [value for _, value in found] == pytest.approx([value for _, value in logged], rel=1e-6)
