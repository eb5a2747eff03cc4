"""Several processes, sharded or not, compute what one process computes, and write its checkpoints."""

import functools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import free_port, load, rows, tiny_flags
from faults import log
from ranks import on_ranks
from test_train import distance
from torch.utils._pytree import tree_flatten_with_path

import train
from hotloop.data.dataset import read_meta
from hotloop.system.distributed import Env, close_process_group
from hotloop.training.checkpoint import Checkpoints
from hotloop.training.dataloader import Batches, Split
from hotloop.training.evaluate import evaluate
from hotloop.training.forecast import memory_of
from hotloop.training.optim import build_optimizers
from hotloop.training.parallel import gather, local
from hotloop.training.run_dir import open_folder
from hotloop.weights.lora import weights_to_save
from model import GPT, GPTConfig
from train import TrainConfig

RECIPES = [dict(optimizer='adamw', bias=True),
           dict(optimizer='muon', preset='modern', mlp='swiglu', zero_init=False)]
CONV, EIGEN, KERNEL = (dict(preset='modern', mixer=mixer) for mixer in ('CA', 'EA', 'KA'))
DFA = dict(CONV, feedback='dfa')


def gpt(**settings):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**dict(vocab_size=257, block_size=16, n_layer=3, n_head=3, n_embd=30,
                                   zero_init=False, dropout=0.1), **settings}))


def steps(folder, number, env=None, dtype='float32', scale=None, optimizer='adamw', shard='none',
          recompute='none', accumulation=4, feedback='backprop', compiled=False, **shape):
    """
    Train `number` steps on any number of processes. Returns the gradient and the norm of the first one, and
    the losses, weights and scales of all, with an evaluation.
    """
    cfg = TrainConfig(optimizer=optimizer, shard=shard, batch_size=4,
                      gradient_accumulation_steps=accumulation, recompute=recompute, feedback=feedback)
    env = replace(env or Env(dtype=getattr(torch, dtype)), compile=compiled)
    model = gpt(**shape)
    if shard == 'none':
        model.to(env.device)
    scaler = torch.amp.GradScaler(env.device.type, init_scale=scale or 1.0, enabled=bool(scale))
    model.compute_dtype, model.loss_chunks = env.dtype, 2 if optimizer == 'muon' else 1
    evaluated, forward = train.wrap(model, cfg, env)
    optimizers = build_optimizers(model, cfg, env)
    splits = [Split(folder, name, read_meta(folder), 16) for name in ('train', 'val')]
    batches, found = Batches(splits[0], cfg, env), SimpleNamespace(losses=[], scales=[])
    for step in range(number):
        result = train.train_step(forward, batches.step(step), optimizers, scaler, cfg, env)
        found.losses.append(result.loss.item())
        found.scales.append(scaler.get_scale())
        if step == 0:
            gradients = gather([p.grad for p in model.parameters()])
            found.gradient = torch.cat([gradient.flatten().cpu() for gradient in gradients])
            found.norm = result.norm.item()
    found.val = evaluate(evaluated, splits[1], None, 5, env)['loss']  # 31 windows
    weights = gather(dict(weights_to_save(model)))
    found.is_tied = weights['lm_head.weight'] is weights['transformer.wte.weight']  # one matrix in the file
    found.weights = {name: weight.cpu() for name, weight in weights.items()}
    last = env.rank + 1 == env.world
    found.stopped = evaluate(evaluated, splits[1], None, 5, env, stop=lambda: last) is None
    return found


def steps_of_rank(*args, dtype='float32', device='cpu', variants=None, **settings):
    """Call steps() in one of several processes, or once with each variant of the settings, in a list."""
    env = train.setup(TrainConfig(device=device, dtype=dtype, compile=False))
    torch.set_float32_matmul_precision('highest')  # on a GPU a run sets TF32
    found = []
    with pytest.MonkeyPatch.context() as m:  # Inductor would take minutes
        backend = 'aot_eager' if device == 'cpu' else 'inductor'
        m.setattr(torch, 'compile', functools.partial(torch.compile, backend=backend))
        for variant in variants or [{}]:
            torch._dynamo.reset()
            found.append(steps(*args, env=env, **settings, **variant))
    close_process_group(False)
    return found if variants else found[0]


def assert_equal_steps(found, one, error=1e-6):
    assert distance(found.gradient, one.gradient) < error
    assert found.norm == pytest.approx(one.norm, rel=error)
    assert found.losses == pytest.approx(one.losses, rel=1e-4)
    assert found.val == pytest.approx(one.val, rel=1e-4)
    assert found.weights.keys() == one.weights.keys()
    for name, weight in one.weights.items():
        assert torch.allclose(found.weights[name], weight, atol=1e-4), name


@pytest.mark.parametrize('world, shard, number, recipe', [
    (2, 'full', 2, RECIPES[0]),
    *(pytest.param(2, shard, 2, recipe, marks=pytest.mark.slow)
      for shard, recipe in (('none', CONV), ('full', EIGEN), ('none', KERNEL), ('none', DFA), ('full', DFA))),
    *(pytest.param(world, shard, 10, recipe, marks=pytest.mark.slow)
      for world in (2, 4) for shard in ('none', 'optimizer', 'full') for recipe in RECIPES)])
def test_steps_of_several_processes_are_those_of_one(masked, world, shard, number, recipe):
    """
    With uneven masks, dropout and rows that do not divide evenly, and an evaluation of 31 windows. Rank 0 has
    everything. A wish to stop on one process ends the evaluation on all.
    """
    one = steps(masked, number, **recipe)
    first, *others = on_ranks(world, steps_of_rank, masked, number, shard=shard, **recipe)
    assert_equal_steps(first, one)
    assert first.is_tied == (recipe is RECIPES[0])
    for other in others:
        assert other.losses == first.losses and other.val == first.val
        assert shard == 'none' or not any(weight.numel() for weight in other.weights.values())
    assert all(found.stopped for found in (first, *others))


def test_two_processes_of_one_micro_batch_each_find_the_bits_of_one_process(masked):
    one = steps(masked, 2, accumulation=2)
    for found in on_ranks(2, steps_of_rank, masked, 2, accumulation=2):
        assert torch.equal(found.gradient, one.gradient) and found.losses == one.losses


@pytest.mark.slow
@pytest.mark.parametrize('shard', ['optimizer', 'full'])
def test_sharded_steps_in_other_dtypes(masked, shard):
    """In float16 an overflow skips the same steps and halves the scale; in bfloat16 the gradient is near."""
    one = steps(masked, 5, dtype='float16', scale=2.0**22)
    found, other = on_ranks(2, steps_of_rank, masked, 5, dtype='float16', scale=2.0**22, shard=shard)
    assert found.scales == other.scales == one.scales and one.scales[2] == one.scales[3] == 2.0**19
    one = steps(masked, 1, dtype='bfloat16', bias=True)
    found = on_ranks(2, steps_of_rank, masked, 1, dtype='bfloat16', shard=shard, bias=True)[0]
    assert distance(found.gradient, one.gradient) < 0.02


# -----------------------------------------------------------------------------
# runs

def main_of_rank(argv):
    """Run train.main() in one of several processes. Threads left by gloo may abort it at its end."""
    code = train.main(argv)
    threads = [path.read_text() for path in Path('/proc/self/task').glob('*/comm')]
    assert not [name for name in threads if 'gloo' in name]
    return code


def write_to_a_full_disk(*args):
    raise ValueError('the disk is full')


def refusal_of_rank(argv, is_full=False):
    if is_full:
        Checkpoints.write = write_to_a_full_disk  # in a process of its own
    with pytest.raises((ValueError, SystemExit)) as refusal:
        train.main(argv)
    return str(refusal.value)


@pytest.mark.slow
def test_what_rank_0_refuses_ends_the_others_quietly(tmp_path, data_dir):
    """A folder in use, weights that do not exist, and a last save that fails."""
    held = open_folder('out_dir', str(tmp_path / 'out'), True)
    first, second = on_ranks(2, refusal_of_rank, tiny_flags(tmp_path / 'out', data_dir))
    assert 'out is in use by process' in first and second == '1'
    held.close()
    flags = tiny_flags(tmp_path / 'out', data_dir, init_from=str(data_dir))
    first, second = on_ranks(2, refusal_of_rank, flags)
    assert 'holds neither a checkpoint' in first and second == '1'
    flags = tiny_flags(tmp_path / 'out', data_dir, max_iters=1)
    first, second = on_ranks(2, refusal_of_rank, flags, is_full=True)
    assert (first, second) == ('the disk is full', '1')


@pytest.fixture
def run_on(tmp_path, data_dir, train_tiny):
    """run_on(world, out, **settings) trains TINY on so many processes. Returns their exit codes."""
    def run(world, out, **settings):
        if world == 1:
            return [train_tiny(out, **settings)]
        return on_ranks(world, main_of_rank, tiny_flags(tmp_path / out, data_dir, **settings))
    return run


def assert_equal_checkpoints(path, expected_path):
    """Check names, shapes, and values within 1e-4, in plain tensors of their own size."""
    found, expected = load(path), load(expected_path)
    assert found.keys() == expected.keys() and found['model_args'] == expected['model_args']
    for part in ('model', 'optimizer', 'muon'):
        states = [state.get(part, {}) for state in (found, expected)]
        flat = [dict(tree_flatten_with_path(state.get('state', state))[0]) for state in states]
        assert flat[0].keys() == flat[1].keys()
        for name, value in flat[1].items():
            assert torch.allclose(flat[0][name], value, atol=1e-4), name
    assert os.path.getsize(path) == pytest.approx(os.path.getsize(expected_path), rel=0.1)


CHAIN = [(1, 'none'), (2, 'full'), (4, 'optimizer'), (4, 'none'), (2, 'optimizer'), (1, 'full')]


@pytest.mark.slow
@pytest.mark.parametrize('recipe', RECIPES)
def test_one_file_for_any_number_of_processes_sharded_or_not(run_on, tmp_path, recipe):
    """Losses, evaluations, ckpt.pt and best.pt are those of one process without a stop."""
    last = 4 * len(CHAIN)
    settings = dict(recipe, batch_size=2, gradient_accumulation_steps=4, dropout=0.1,
                    lr_decay_iters=last)
    assert run_on(1, 'whole', max_iters=last, **settings) == [0]
    for n, (world, shard) in enumerate(CHAIN, 1):
        init_from = 'scratch' if n == 1 else 'resume'
        codes = run_on(world, 'out', shard=shard, max_iters=4 * n, init_from=init_from, **settings)
        assert codes == [0] * world
    whole, out = tmp_path / 'whole', tmp_path / 'out'
    for name in ('ckpt.pt', 'best.pt'):
        assert_equal_checkpoints(out / name, whole / name)
    for found, expected in zip(log(out), log(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


def standing_of_rank():
    """Return the bytes of weights, gradients and optimizer states that one of several processes holds."""
    cfg = TrainConfig(device='cpu', dtype='float32', compile=False, shard='full', optimizer='muon')
    env = train.setup(cfg)
    model = gpt(preset='modern')
    forward = train.wrap(model, cfg, env)[1]
    optimizers = build_optimizers(model, cfg, env)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    forward(ids, ids).sum().backward()
    held = [*model.parameters(), *(p.grad for p in model.parameters())]
    for optimizer in optimizers:
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        held += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    storages = [local(tensor).untyped_storage() for tensor in held]  # gradients share one
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    close_process_group(False)
    return held


@pytest.mark.slow
def test_a_process_holds_its_share():
    """Of weights, gradients and moments."""
    held = on_ranks(2, standing_of_rank)
    parts = memory_of(gpt(preset='modern').config, TrainConfig(optimizer='muon'), None, Env(), 1e12)
    assert held == pytest.approx([(2 * parts['weights'] + parts['optimizer']) / 2] * 2, rel=0.03)


# -----------------------------------------------------------------------------
# torchrun

SETTINGS = dict(RECIPES[1], dropout=0.1, max_iters=24, eval_interval=5)


@pytest.mark.slow
def test_two_agents_are_two_nodes(train_tiny, torchrun, tmp_path):
    """The command lines of the README, with both nodes on this machine; they share out_dir."""
    assert train_tiny('whole', **SETTINGS) == 0
    node = ['--nnodes=2', '--nproc_per_node=1', '--rdzv_backend=c10d',
            f'--rdzv_endpoint=localhost:{free_port()}', '--rdzv_id=one', '--local_addr=127.0.0.1']
    agents = [torchrun('out', node=node, **SETTINGS) for _ in range(2)]
    for agent in agents:
        assert agent.wait(200) == 0, agent.stderr.read()
    losses = [[row['loss'] for row in rows(tmp_path / out, 'loss')] for out in ('out', 'whole')]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_equal_checkpoints(tmp_path / 'out' / 'ckpt.pt', tmp_path / 'whole' / 'ckpt.pt')
