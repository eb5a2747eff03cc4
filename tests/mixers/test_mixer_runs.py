"""Runs with mixers: sharded, tuned with adapters, on several processes. test_resume.py resumes one."""

import pytest
import torch
from ranks import on_ranks
from test_shard import assert_equal_steps, steps, steps_of_rank

from hotloop.weights.load import load_weights
from model import GPT

MIXERS = {'conv': dict(preset='modern', mixer='CA'),
          'eigen': dict(preset='modern', mixer='EA', num_eigenstates=8),
          'kernel': dict(preset='modern', mixer='KA'),
          'dfa': dict(preset='modern', mixer='CA', feedback='dfa')}


@pytest.mark.parametrize('name, shard', [
    ('dfa', 'none'),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in (('conv', 'none'), ('eigen', 'full'), ('kernel', 'none'), ('dfa', 'full')))])
def test_two_processes_take_the_steps_of_one(masked, name, shard):
    one = steps(masked, 2, **MIXERS[name])
    assert_equal_steps(on_ranks(2, steps_of_rank, masked, 2, shard=shard, **MIXERS[name])[0], one)


def test_a_run_of_mixed_layers_is_tuned_with_adapters(train_tiny, tmp_path):
    train_tiny('base', **MIXERS['conv'], n_layer=2)
    train_tiny('tuned', init_from=tmp_path / 'base', lora_rank=2, learning_rate=1e-2)
    base, tuned = (load_weights(str(tmp_path / out)) for out in ('base', 'tuned'))
    GPT.from_checkpoint(tuned.model_args, tuned.weights)
    for matrix in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'):
        for layer in range(2):
            name = f'transformer.h.{layer}.{matrix}.weight'
            assert not torch.equal(base.weights[name], tuned.weights[name])
