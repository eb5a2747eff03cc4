"""The length of a run, its learning rates, and the settings of a depth."""

import math
import os

import pytest
import torch
from conftest import error_of, rows
from ranks import on_ranks

from hotloop.system.distributed import Env, close_process_group
from hotloop.training import recipes
from hotloop.training.checkpoint import RunState
from hotloop.training.optim import build_optimizers, set_learning_rate
from hotloop.training.recipes import choose_depth, depth_settings, num_parameters, tokens_within
from hotloop.training.schedule import ahead_weights, learning_rate, plan_schedule
from model import GPT, GPTConfig
from train import TrainConfig, read_settings


def rate(step, cfg):
    return learning_rate(step, plan_schedule(cfg, 100, 8, 0, RunState()), cfg)


@pytest.mark.parametrize('settings, expected', [
    (dict(), {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 8: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 12: 0.55,
              20: 0.1}),
    (dict(lr_decay_iters=12), {4: 1.0, 8: 0.55, 12: 0.1, 13: 0.1, 19: 0.1}),
    (dict(decay_lr=False), {0: 1.0, 4: 1.0, 10: 1.0, 19: 1.0}),
    (dict(lr_schedule='linear'), {0: 0.2, 4: 1.0, 10: 1.0, 15: 0.55, 18: 0.28, 20: 0.1}),
    (dict(lr_schedule='linear', decay_fraction=0.25), {14: 1.0, 15: 1.0, 16: 0.82, 20: 0.1}),
    (dict(lr_schedule='linear', min_lr=0.0, lr_decay_iters=16, decay_fraction=0.5),
     {8: 1.0, 12: 0.5, 15: 0.125}),
    (dict(lr_schedule='cosine', time_budget=1.0), {0: 0.2, 4: 1.0, 19: 1.0, 10**6: 1.0}),
    (dict(warmup_iters=0), {0: 1.0, 10: 0.55, 20: 0.1}),
])
def test_learning_rates_by_hand(settings, expected):
    """Peak 1, min_lr 0.1, 4 warmup steps, 20 steps."""
    cfg = TrainConfig(**dict(dict(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=20), **settings))
    for step, lr in expected.items():
        assert rate(step, cfg) == pytest.approx(lr, rel=1e-9), step
    rates = [rate(step, cfg) for step in range(20)]
    assert rates[0] > 0 and max(rates) == 1.0


@pytest.mark.parametrize('start, warmup, expected', [
    (15, 4, {0: 0.2, 4: 1.0, 14: 1.0, 15: 1.0, 16: 0.82, 20: 0.1}),
    (5, 9, {0: 0.1, 3: 0.4, 8: 0.82, 15: 0.4, 20: 0.1})])  # during the warmup
def test_a_time_budget_decays_from_its_step(start, warmup, expected):
    cfg = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=warmup, time_budget=1.0)
    schedule = plan_schedule(cfg, 100, 8, 0, RunState(decay_start=start, max_iters=20))
    for step, lr in expected.items():
        assert learning_rate(step, schedule, cfg) == pytest.approx(lr, rel=1e-9), step


def test_the_default_of_max_iters_does_not_end_a_time_budget():
    assert plan_schedule(TrainConfig(time_budget=1440), 100, 8, 0, RunState()).max_iters > 10**9
    assert plan_schedule(TrainConfig(time_budget=1440, max_iters=7), 100, 8, 0, RunState()).max_iters == 7


def test_max_iters_can_end_a_decided_time_budget_earlier():
    cfg = TrainConfig(learning_rate=1.0, min_lr=0.0, warmup_iters=0, time_budget=1.0, max_iters=18)
    schedule = plan_schedule(cfg, 100, 8, 0, RunState(decay_start=10, max_iters=20))
    assert schedule.max_iters == 18
    assert [learning_rate(step, schedule, cfg) for step in (10, 14, 18)] == pytest.approx([1.0, 0.5, 0.0])


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
        assert rate(step, cfg) == pytest.approx(expected, rel=1e-9), step
        optimizer.step()
        if step < 19:
            scheduler.step()


def test_every_peak_follows_the_schedule_in_proportion():
    cfg = TrainConfig(optimizer='muon', learning_rate=0.01, muon_lr=0.05, min_lr=0.001,
                      max_iters=20, warmup_iters=4)
    model = GPT(GPTConfig(vocab_size=65, block_size=16, n_layer=2, n_head=2, n_embd=32,
                          preset='modern'))
    optimizers = build_optimizers(model, cfg, Env())
    for step in (0, 4, 12, 19):
        lr = rate(step, cfg)
        set_learning_rate(optimizers, lr, cfg.learning_rate)
        rates = [g['lr'] for o in optimizers for g in o.param_groups]
        assert rates == pytest.approx([lr, lr, lr, 5 * lr], rel=1e-9)


def test_epochs_are_converted_to_steps_and_a_warmup_can_be_a_fraction_of_them(train_tiny, tmp_path, capsys):
    """249 windows an epoch and 8 sequences a step: half an epoch is 16 steps, and the decay ends there."""
    train_tiny(max_epochs=0.5, warmup_iters=0.25, eval_interval=100)
    assert 'run: 16 steps' in capsys.readouterr().out
    first, *_, last = rows(tmp_path / 'out', 'lr')
    assert first['lr'] == pytest.approx(5e-3 / 5) and last['step'] == 16 and last['lr'] < 6e-4


# -----------------------------------------------------------------------------
# depths

@pytest.mark.parametrize('depth, world, width, heads, block_size', [
    (3, 1, 96, 3, 512), (4, 3, 128, 2, 512), (8, 1, 384, 6, 512), (12, 3, 768, 6, 1024)])
def test_a_depth_sets_a_shape_and_a_step(depth, world, width, heads, block_size):
    values = depth_settings(depth, world)
    assert (values['n_embd'], values['n_head'], values['block_size']) == (width, heads, block_size)
    sequences = values['batch_size'] * values['gradient_accumulation_steps']
    assert sequences % world == 0 and sequences * block_size >= 2048
    tokens = values['max_iters'] * sequences * block_size
    assert tokens == pytest.approx(20 * num_parameters(depth), rel=0.01)


def test_a_time_budget_chooses_the_depth_that_reads_8_tokens_per_parameter():
    assert choose_depth(180, 1e9) == 3 and choose_depth(1e6, 1e15) == 24
    for seconds, flops in ((600, 1e12), (3600, 1e13), (3600, 1e14)):
        depth = choose_depth(seconds, flops)
        assert 3 < tokens_within(depth, seconds, flops) / num_parameters(depth) < 22


def test_a_depth_is_a_layer_below_flags(data_dir):
    flags = [f'--data_dir={data_dir}', '--dataset=tiny', '--device=cpu', '--depth=3']
    model, _, cfg, *_ = read_settings([*flags, '--n_layer=2'])
    assert (cfg.depth, model.preset, model.n_layer) == (3, 'hybrid', 2)
    model = read_settings([*flags, '--preset=qwen3']).model.resolved()
    assert (model.preset, model.mlp, model.embed_norm) == ('qwen3', 'swiglu', False)
    assert 'init_from=gpt2' in error_of(read_settings, [*flags, '--init_from=gpt2'])


@pytest.mark.parametrize('flags, words', [
    (['config/quickstart.py', '--depth=6'], '--depth=6 and config/quickstart.py, line '),
    (['--depth=0'], 'depth=0 must'), (['--time_budget=-5'], r'time_budget=-5.0 must')])
def test_a_depth_that_cannot_be(data_dir, flags, words):
    assert words in error_of(read_settings, [*flags, f'--data_dir={data_dir}', '--dataset=tiny'])


def test_a_time_budget_chooses_a_depth_of_the_requested_preset(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr('hotloop.training.recipes.measure_flops', lambda *args: 1e9)
    (tmp_path / 'theirs').mkdir()
    for name in ('train.bin', 'val.bin'):  # without meta.json, as nanoGPT writes it
        os.link(f'{data_dir}/tiny/{name}', tmp_path / 'theirs' / name)
    flags = [f'--data_dir={tmp_path}', '--dataset=theirs', '--time_budget=9', '--device=cpu']
    for preset in ('hybrid', 'qwen3'):
        model, _, cfg, *_ = read_settings(flags + [f'--preset={preset}'] * (preset == 'qwen3'))
        assert (cfg.depth, cfg.optimizer, model.n_layer, model.preset) == (3, 'muon', 3, preset)
        # the text is read often
        assert model.dropout == 0.2 and bool(model.x0_mix) == (preset == 'hybrid')


def settings_of_rank(flags):
    """Read a command line on a process whose machine is faster, the higher its rank."""
    recipes.measure_flops = lambda *args: 1e9 * 1e4 ** int(os.environ['RANK'])
    try:
        return read_settings(flags).train
    finally:
        close_process_group(False)


def test_all_processes_choose_by_the_speed_of_the_first(data_dir):
    """With settings of their own they would wait for one another in different evaluations."""
    flags = [f'--data_dir={data_dir}', '--dataset=tiny', '--time_budget=30', '--device=cpu']
    first, second = on_ranks(2, settings_of_rank, flags)
    assert first == second and first.depth == choose_depth(1800, 2e9) != choose_depth(1800, 2e13)


def test_the_weights_of_later_tokens_fall_to_zero():
    assert ahead_weights(0.5, 0.0) == (0.5, 0.25)
    assert ahead_weights(0.5, 1 / 3) == (pytest.approx(0.25), pytest.approx(0.0))
    assert ahead_weights(0.5, 0.7) == (0.0, 0.0)
