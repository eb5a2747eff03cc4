"""A depth sets shape, batch and rates of a model, as far as the command does not."""

import math

import pytest
from conftest import error_of

import train
from hotloop.data.dataset import open_datasets
from hotloop.training.dataloader import share_batch
from hotloop.training.depth import matching_factor, muon_rate, num_parameters, rung
from hotloop.training.ladder import DEPTHS
from model import GPT, GPTConfig


def settings(*argv):
    return train.read_settings([*argv, '--device=cpu'])


@pytest.mark.parametrize('depth', DEPTHS)
@pytest.mark.parametrize('world', [1, 3, 8])
def test_every_rung_is_a_valid_run_on_any_number_of_processes(depth, world):
    values = rung(depth, world)
    config = GPTConfig(**{k: v for k, v in values.items() if k in GPTConfig.__dataclass_fields__})
    assert config.problems() == [] and 32 <= config.n_embd / config.n_head <= 128 and config.n_embd % 32 == 0
    sizes = values['batch_size'], values['gradient_accumulation_steps']
    micro_batch, accumulation = share_batch(*sizes, world)
    assert micro_batch * accumulation * world == sizes[0] * sizes[1]
    assert {*values} <= {*GPTConfig.__dataclass_fields__, *train.TrainConfig.__dataclass_fields__}


def test_parameters_of_a_depth_are_those_of_its_matrices():
    for depth in (3, 4):
        shape = {name: rung(depth)[name] for name in ('preset', 'n_layer', 'n_embd', 'n_head')}
        model = GPT(GPTConfig(**shape, vocab_size=11))
        matrices = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
        assert matrices == num_parameters(depth)


def test_depth_fills_in_what_a_command_does_not_give():
    s = settings('--depth=4', '--dataset=mine', '--muon_lr=0.5', '--batch_size=4')
    assert (s.model.preset, s.model.n_layer, s.model.n_embd, s.train.optimizer) == ('modern', 4, 128, 'muon')
    assert s.train.muon_lr == 0.5 and not s.choose_depth
    tokens = s.train.batch_size * s.train.gradient_accumulation_steps * s.model.block_size
    assert s.train.batch_size == 4 and tokens == 2048  # as without --batch_size
    assert s.train.max_iters == pytest.approx(20 * num_parameters(4) / tokens, abs=1)
    short = settings('--depth=4', '--dataset=mine', '--max_iters=100').train
    long = settings('--depth=4', '--dataset=mine', '--max_iters=2000').train
    assert short.max_iters == 100 and short.muon_lr > 3 * long.muon_lr


@pytest.mark.parametrize('argv', [['--block_size=1024'], ['--block_size=64'], ['--batch_size=5'],
                                  ['--gradient_accumulation_steps=4'], ['--batch_size=auto'],
                                  ['--block_size=128', '--gradient_accumulation_steps=3']])
def test_a_step_keeps_its_size_and_a_run_its_tokens_in_other_windows_and_batches(argv):
    s = settings('--depth=6', '--dataset=mine', *argv)
    tokens = s.train.batch_size * s.train.gradient_accumulation_steps * s.model.block_size
    assert 4096 <= tokens <= 1.25 * 4096
    assert s.train.max_iters * tokens == pytest.approx(20 * num_parameters(6), rel=1e-3)
    for flag in argv:
        name, value = flag.removeprefix('--').split('=')
        if value != 'auto':
            assert getattr(s.model if name == 'block_size' else s.train, name) == int(value)


@pytest.mark.parametrize('size', [1, 2, 3, 8, 12])
@pytest.mark.parametrize('world', [1, 2, 3, 8])
def test_a_given_batch_is_completed_to_a_step_that_divides_among_processes(size, world):
    sequences = 16 * world
    number = matching_factor(size, sequences, world)
    assert size * number % world == 0 and size * number >= sequences
    assert size * number < sequences + math.lcm(size, world)


def test_epochs_set_the_rate_of_muon_and_weight_decay(tmp_path, data_dir, monkeypatch):
    """The rate as max_iters does. The number of steps is known only when the data are open."""
    monkeypatch.setattr('hotloop.training.depth.rung',
                        lambda depth, world, block_size: rung(depth, world, 16))
    flags = ['--dataset=tiny', f'--data_dir={data_dir}', '--depth=3', '--device=cpu']
    rates, decays = [], []
    for words in (['--max_epochs=0.5'], ['--max_epochs=500', '--max_iters=9'],
                  ['--max_epochs=0.5', '--muon_lr=0.011'], ['--max_epochs=9', '--weight_decay=0.2']):
        s = train.read_settings([*flags, *words, f'--out_dir={tmp_path}'])
        run = train.build_run(s, open_datasets('tiny', str(data_dir)), train.setup(s.train))
        rates.append((run.cfg.muon_lr, muon_rate(3, run.cfg.max_iters)))
        decays.append(run.cfg.weight_decay)
    assert rates[0][0] == rates[0][1] == 0.06 and rates[2][0] == 0.011
    assert rates[1][0] == rates[1][1] < 0.05
    assert decays == pytest.approx([0.1, 0.1 * 500**0.5, 0.1, 0.2], rel=0.01)


def test_a_depth_that_contradicts_the_command_is_refused(tmp_path):
    for argv, words in (
            (['--depth=4', '--n_layer=3', '--dataset=mine'], '--depth=4 sets n_layer, and so does --n_layer'),
            (['config/quickstart.py', '--depth=4'], 'config/quickstart.py, line'),
            (['--depth=4', '--init_from=gpt2'], 'init_from=gpt2 has a shape'),
            (['--depth=4', '--lr_schedule=linear', '--decay_start=10000'], 'must be below max_iters=7680'),
            (['--depth=0'], 'depth=0 must be above 0')):
        assert words in error_of(settings, *argv)
