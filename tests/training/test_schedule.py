"""The length of a run, its learning rates, and what is due after a step."""

import math

import pytest
import torch
from conftest import error_of, rows

from hotloop.system.distributed import Env
from hotloop.training.checkpoint import RunState
from hotloop.training.dataloader import windows_per_epoch
from hotloop.training.optim import build_optimizers
from hotloop.training.schedule import Due, learning_rate, set_learning_rate, what_is_due
from model import GPT, GPTConfig
from train import TrainConfig


@pytest.mark.parametrize('settings, expected', [
    (dict(), {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 8: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 12: 0.55,
              20: 0.1}),
    (dict(lr_decay_iters=12), {4: 1.0, 8: 0.55, 12: 0.1, 13: 0.1, 19: 0.1}),
    (dict(decay_lr=False), {0: 1.0, 4: 1.0, 10: 1.0, 19: 1.0}),
    (dict(lr_schedule='linear'), {0: 0.2, 4: 1.0, 10: 1.0, 15: 0.55, 18: 0.28, 20: 0.1}),
    (dict(lr_schedule='linear', decay_fraction=0.25), {14: 1.0, 15: 1.0, 16: 0.82, 20: 0.1}),
    (dict(lr_schedule='linear', min_lr=0.0, lr_decay_iters=16, decay_fraction=0.5),
     {8: 1.0, 12: 0.5, 15: 0.125}),
    (dict(lr_schedule='linear', decay_start=10), {0: 0.2, 4: 1.0, 10: 1.0, 15: 0.55, 18: 0.28, 20: 0.1}),
    (dict(lr_schedule='linear', decay_start=15, lr_decay_iters=7), {14: 1.0, 15: 1.0, 16: 0.82, 20: 0.1}),
    (dict(lr_schedule='linear', decay_start=2, warmup_iters=9), {1: 0.2, 2: 0.3, 11: 0.2, 20: 0.1}),
    (dict(lr_schedule='cosine', time_budget=1.0), {0: 0.2, 4: 1.0, 19: 1.0, 10**6: 1.0}),
    (dict(warmup_iters=0), {0: 1.0, 10: 0.55, 20: 0.1}),
    (dict(lr_schedule='onecycle', warmup_iters=5), {0: 0.1, 2: 0.55, 4: 1.0, 19: 0.1, 20: 0.1}),
    (dict(lr_schedule='onecycle', warmup_iters=1), {0: 1.0, 19: 0.1}),
])
def test_learning_rates_by_hand(settings, expected):
    """Peak 1, min_lr 0.1, 4 warmup steps, 20 steps."""
    cfg = TrainConfig(**dict(dict(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=20), **settings))
    for step, lr in expected.items():
        assert learning_rate(step, cfg) == pytest.approx(lr, rel=1e-9), step
    rates = [learning_rate(step, cfg) for step in range(20)]
    assert rates[0] > 0 and max(rates) == (0.3 if cfg.warmup_iters == 9 else 1.0)


@pytest.mark.parametrize('warmup', [0, 2, 7, 19])
@pytest.mark.parametrize('min_lr', [1e-4, 1e-3])
def test_onecycle_is_torchs(warmup, min_lr):
    """OneCycleLR with cosine annealing, from min_lr to learning_rate to min_lr."""
    cfg = TrainConfig(lr_schedule='onecycle', learning_rate=3e-3, min_lr=min_lr, warmup_iters=warmup,
                      max_iters=20)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=20, pct_start=warmup / 20, div_factor=3e-3 / min_lr, final_div_factor=1,
        cycle_momentum=False)
    for step in range(20):
        expected = optimizer.param_groups[0]['lr']
        assert learning_rate(step, cfg) == pytest.approx(expected, rel=1e-9), step
        optimizer.step()
        if step < 19:
            scheduler.step()


def test_the_warmup_can_be_a_fraction_of_the_run(train_tiny, tmp_path, capsys):
    """Of the steps that max_epochs gives, too."""
    train_tiny(warmup_fraction=0.25, max_epochs=0.5, eval_interval=100)
    assert 'warmup_fraction=0.25: 4 steps' in capsys.readouterr().out
    assert rows(tmp_path / 'out', 'lr')[0]['lr'] == pytest.approx(5e-3 / 5)
    assert 'warmup_fraction=1.5 must be' in error_of(train_tiny, warmup_fraction=1.5)


def test_every_peak_follows_the_schedule_in_proportion():
    cfg = TrainConfig(optimizer='muon', learning_rate=0.01, muon_lr=0.05, embed_lr=0.3, min_lr=0.001,
                      max_iters=20, warmup_iters=4)
    model = GPT(GPTConfig(vocab_size=65, block_size=16, n_layer=2, n_head=2, n_embd=32,
                          preset='modern'))
    optimizers = build_optimizers(model, cfg, Env())
    for step in (0, 4, 12, 19):
        lr = learning_rate(step, cfg)
        set_learning_rate(optimizers, lr, cfg.learning_rate)
        rates = [g['lr'] for o in optimizers for g in o.param_groups]
        assert rates == pytest.approx([lr, lr, 30 * lr, 5 * lr], rel=1e-9)


def test_what_is_due_after_a_step():
    cfg = TrainConfig(max_iters=10, eval_interval=4, log_interval=3, save_interval=5, sample_interval=6)
    due = {step: what_is_due(RunState(step), cfg) for step in range(1, 11)}
    found = {name: [step for step in due if getattr(due[step], name)] for name in Due._fields}
    assert found == {'last': [10], 'log': [1, 3, 6, 9, 10], 'evaluation': [4, 8, 10], 'sample': [6],
                     'save': [5, 10]}
    cfg.time_budget = 1.0  # before its first plan nothing is evaluated
    known = [what_is_due(RunState(4, eval_fitted=known), cfg).evaluation for known in (False, True)]
    assert known == [False, True]


def test_epochs_are_converted_to_steps(train_tiny, tmp_path, capsys):
    """249 windows an epoch and 8 sequences a step: half an epoch is 16 steps, and the decay ends there."""
    train_tiny(max_epochs=0.5, eval_interval=100)
    steps = math.ceil(0.5 * windows_per_epoch(4001, 16) / 8)
    assert steps == 16 and 'max_epochs=0.5: 16 steps' in capsys.readouterr().out
    last = rows(tmp_path / 'out', 'lr')[-1]
    assert last['step'] == 16 and last['lr'] < 6e-4
    train_tiny('few', max_epochs=0.1)
    assert 'note: 4 steps change the weights little; raise --max_epochs' in capsys.readouterr().out


@pytest.mark.parametrize('settings', [dict(warmup_iters=2), dict(warmup_fraction=0.5)])
def test_a_note_says_what_has_a_warmup_and_a_constant_rate(train_tiny, tmp_path, capsys, settings):
    train_tiny(decay_lr=False, max_iters=4, **settings)
    note = 'note: decay_lr=False turns the warmup off; a warmup to a constant rate is'
    flags = '--decay_lr=True --min_lr=0.005'
    assert f'{note} {flags}' in ' '.join(capsys.readouterr().out.split())
    train_tiny(decay_lr=True, min_lr=5e-3, max_iters=4, **settings)
    assert 'no warmup' not in capsys.readouterr().out
    rates = [row['lr'] for row in rows(tmp_path / 'out', 'lr')]
    assert rates == pytest.approx([5e-3 / 3, 1e-2 / 3, 5e-3, 5e-3])
