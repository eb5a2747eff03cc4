"""
What only several GPUs can show: sharded steps and runs on NCCL, and a process that dies.

    $ python -m pytest -n 0 -s tests/system/test_gpus.py          # skips where there are fewer than two GPUs
    $ python -m pytest -n 0 -m slow tests/system/test_gpus.py     # the same functions on a CPU, by gloo
"""

import pytest
import torch
from conftest import tiny_flags
from faults import assert_equal_runs
from ranks import on_ranks  # forks before anything asks for a GPU
from test_shard import RECIPES, assert_equal_checkpoints, assert_equal_steps, main_of_rank, steps_of_rank

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.parametrize('device', [
    pytest.param('cpu', marks=pytest.mark.slow),
    pytest.param('cuda', marks=pytest.mark.skipif(GPUS < 2, reason='there are fewer than two GPUs'))])


def test_steps_are_those_of_one_process(masked, device):
    """In float32 without TF32, and without dropout, whose numbers a compiled block draws in another order."""
    settings = dict(RECIPES[1], dropout=0.0, device=device)
    [one] = on_ranks(1, steps_of_rank, masked, 3, **settings)
    variants = [dict(shard=shard, recompute=recompute, compiled=compiled)
                for shard, recompute in (('none', 'none'), ('optimizer', 'selective'), ('full', 'full'))
                for compiled in (False, True)]
    found = on_ranks(2, steps_of_rank, masked, 3, variants=variants, **settings)[0]
    for steps, variant in zip(found, variants, strict=True):
        print(variant)  # the last one printed is the one that fails
        assert_equal_steps(steps, one, error=1e-6 if device == 'cpu' else 1e-5)


def test_a_run_resumes_on_the_other_layout(tmp_path, data_dir, device):
    settings = dict(RECIPES[1], device=device, batch_size=2, gradient_accumulation_steps=4, lr_decay_iters=8)
    stages = [('whole', 1, dict(max_iters=8)), ('out', 2, dict(max_iters=4, shard='full')),
              ('out', 2, dict(max_iters=6, shard='optimizer', init_from='resume')),
              ('out', 1, dict(max_iters=8, init_from='resume'))]
    for out, world, more in stages:
        argv = tiny_flags(tmp_path / out, data_dir, **settings, **more)
        assert on_ranks(world, main_of_rank, argv) == [0] * world
    assert_equal_checkpoints(tmp_path / 'out' / 'ckpt.pt', tmp_path / 'whole' / 'ckpt.pt')


def test_torchrun_restarts_a_run_whose_process_was_killed(torchrun, tmp_path, device):
    settings = dict(RECIPES[1], device=device, max_iters=24, eval_interval=5, deterministic=True)
    whole = torchrun('whole', forked=device == 'cpu', **settings)
    killed = torchrun('out', 'kill', 20, restarts=2, forked=device == 'cpu', resume=True, **settings)
    for process in (whole, killed):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert 'resuming at step 15' in out
    assert_equal_runs(tmp_path / 'out', tmp_path / 'whole')
