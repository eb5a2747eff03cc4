"""What holds of training: the step, the order of the data, evaluation, checkpoints and resuming, signals, bad input."""

import fcntl
import functools
import importlib.util
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, at_step, noise, write_bins

import train
from hotloop.dataloader import Batches, Split, epoch_order, share_batch, windows_per_epoch
from hotloop.dataset import read_meta
from hotloop.device import choose_dtype, try_compile
from hotloop.distributed import Env
from hotloop.evaluate import eval_batch, evaluate
from hotloop.optim import build_optimizers
from model import GPT, GPTConfig
from train import TrainConfig

ROOT = Path(train.__file__).parent
RECIPES = [dict(optimizer='adamw'), dict(optimizer='muon', preset='modern')]
no_scaler = torch.amp.GradScaler('cpu', enabled=False)


def tiny_gpt(seed=0, **settings):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**dict(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=32, **settings)))


def load(path):
    return torch.load(path, weights_only=True)


def same(a, b):
    """Equal to the bit, through containers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def final(out):
    """All that a run has learnt, from its last checkpoint."""
    checkpoint = load(out / 'ckpt.pt')
    return {k: checkpoint.get(k) for k in ('model', 'optimizer', 'muon', 'scaler', 'iter_num', 'state')}


def log(out, *names):
    """The lines of log.jsonl as text, less times and memory; with names, these of the lines that have the last."""
    lines = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    lines = [line for line in lines if not names or names[-1] in line]
    names = names or ('step', 'loss', 'lr', 'grad_norm', 'tokens_seen', 'skipped', 'val_loss', 'val_bpb', 'train_loss')
    return [json.dumps({k: line[k] for k in names if k in line}) for line in lines]


def snapshot(folder):
    """Every file below a folder with its bytes and its time."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob('*')) if p.is_file()}


def error_of(call, *args, **kwargs):
    """The sentence a call ends with. The exception itself is let go, for its frames would hold a run's lock."""
    try:
        call(*args, **kwargs)
    except ValueError as e:
        return str(e)
    pytest.fail('nothing was raised')


def signal_at(monkeypatch, step, number=signal.SIGTERM):
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))


def interrupted(train_tiny, monkeypatch, out, step, **settings):
    """A run that SIGTERM ended after this step."""
    signal_at(monkeypatch, step)
    assert train_tiny(out, **settings) == 143


# -----------------------------------------------------------------------------
# the step

@pytest.fixture
def masked(tmp_path):
    """A dataset whose mask grows denser along the text, so that no two micro-batches count the same."""
    rng = np.random.default_rng(2)
    masks = {name: rng.random(n) < np.linspace(0.05, 1, n) ** 2 for name, n in (('train', 4001), ('val', 487))}
    return write_bins(tmp_path / 'masked', noise(4001), noise(487, seed=1), masks=masks)


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def one_step(folder, batch_size, accumulation, env):
    """Gradient and loss of one step, weights after one of Muon and AdamW, and an evaluation."""
    split, val = (Split(folder, name, read_meta(folder), 16) for name in ('train', 'val'))
    cfg = TrainConfig(batch_size=batch_size, gradient_accumulation_steps=accumulation, optimizer='muon')
    num_targets, loads = Batches(split, cfg, env).step(3)
    model = tiny_gpt(preset='modern', zero_init=False)
    params = list(model.parameters())
    evaluation = evaluate(model, val, None, 5, env)
    loss, *_ = train.train_step(model, params, loads, num_targets, [], no_scaler, 0.0, env.world)
    gradient = gradient_of(model)
    train.train_step(model, params, loads, num_targets, build_optimizers(model, cfg, env), no_scaler, 1.0,
                     env.world)
    return {'gradient': gradient, 'loss': loss / num_targets, 'weights': model.state_dict(), 'val': evaluation['loss']}


def whole_batch_gradient(folder):
    """What one_step must find: the mean over all unmasked targets of the global batch, in one piece."""
    split = Split(folder, 'train', read_meta(folder), 16)
    x, y = map(torch.from_numpy, split.gather(step_starts(1337, split.num_tokens, 16, 3, 16)))
    model = tiny_gpt(preset='modern', zero_init=False)
    loss = model(x, y).sum() / (y >= 0).sum()
    loss.backward()
    return loss.detach(), gradient_of(model)


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize('shape', [(16, 1), (8, 2), (4, 4), (1, 16)])
def test_gradient_does_not_depend_on_how_the_batch_is_split(masked, shape):
    """Micro-batches of unequal masks weigh by their targets, not equally."""
    loss, gradient = whole_batch_gradient(masked)
    found = one_step(masked, *shape, Env())
    assert distance(found['gradient'], gradient) < 1e-6
    assert found['loss'].item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize('world', [2, 4, 8])
def test_gradients_of_the_ranks_add_up(masked, world):
    """The sum over processes is the gradient of the global batch, and so is that of the losses."""
    split, model = Split(masked, 'train', read_meta(masked), 16), tiny_gpt(preset='modern', zero_init=False)
    total = 0.0
    for rank in range(world):
        batches = Batches(split, TrainConfig(batch_size=4, gradient_accumulation_steps=4), Env(rank, world))
        num_targets, loads = batches.step(3)
        train.train_step(model, list(model.parameters()), loads, num_targets, [], no_scaler, 0.0)
        total = total + gradient_of(model)
    assert distance(total, whole_batch_gradient(masked)[1]) < 1e-6


GLOO = """
import sys
import torch
import test_train, train
machine = train.open_machine(train.TrainConfig(device='cpu', dtype='float32', compile=False, threads=1))
assert machine.world == 2
found = test_train.one_step(sys.argv[1], 4, 4, machine)
if machine.rank == 0:
    torch.save(found, sys.argv[2])
torch.distributed.barrier()  # gloo's threads let go of the last tensors meanwhile; at exit they would abort
torch.distributed.destroy_process_group()
"""


def torchrun(processes, *command, **kwargs):
    """Runs a script on several gloo processes; returns the finished process."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}', 'PYTHONWARNINGS': 'ignore'}
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone',
                           f'--nproc_per_node={processes}', *map(str, command)], cwd=ROOT, env=env, timeout=300,
                          capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_processes_compute_what_one_does(masked, tmp_path):
    """Gradient, loss, the update of a sharded Muon and the evaluation, over gloo."""
    (tmp_path / 'script.py').write_text(GLOO)
    torchrun(2, tmp_path / 'script.py', masked, tmp_path / 'found.pt')
    two, one = load(tmp_path / 'found.pt'), one_step(masked, 4, 4, Env())
    assert distance(two['gradient'], one['gradient']) < 1e-6
    assert two['loss'].item() == pytest.approx(one['loss'].item(), rel=1e-6)
    assert two['val'] == pytest.approx(one['val'], rel=1e-6)
    for name, weight in one['weights'].items():
        assert torch.allclose(two['weights'][name], weight, atol=1e-4), name


def test_a_sum_over_processes_leaves_its_argument_alone(monkeypatch):
    """On CPUs torch.from_numpy shares memory, and all_reduce writes into what it is given."""
    monkeypatch.setattr(train.dist, 'all_reduce', lambda t: t.mul_(2))
    mine = np.array([3.0, 0.25])
    assert Env(0, 2).sum(mine).tolist() == [6.0, 0.5]
    assert mine.tolist() == [3.0, 0.25]


def test_gradients_are_clipped_to_the_norm_that_is_reported(masked):
    """The reported norm is the one before clipping; a gradient shorter than grad_clip stays as it is."""
    split, model = Split(masked, 'train', read_meta(masked), 16), tiny_gpt()
    num_targets, loads = Batches(split, TrainConfig(), Env()).step(0)
    step = functools.partial(train.train_step, model, list(model.parameters()), loads, num_targets, [], no_scaler)
    norm = step(0.0)[1].item()
    assert norm == pytest.approx(gradient_of(model).norm().item(), rel=1e-6)
    assert step(norm / 3)[1].item() == pytest.approx(norm, rel=1e-6)
    assert gradient_of(model).norm().item() == pytest.approx(norm / 3, rel=1e-4)
    step(norm * 3)
    assert gradient_of(model).norm().item() == pytest.approx(norm, rel=1e-6)


def test_decay_is_for_matrices_only():
    """With gradients of zero AdamW shrinks matrices and embeddings by lr x weight_decay, vectors not at all."""
    model = tiny_gpt(bias=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    cfg = TrainConfig(learning_rate=0.1, weight_decay=0.5)
    [adamw] = build_optimizers(model, cfg, Env())
    assert {len(g['params']) > 0 for g in adamw.param_groups} == {True} and adamw.defaults['fused']
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    adamw.step()
    for name, p in model.named_parameters():
        expected = before[name] * (0.95 if p.dim() >= 2 else 1.0)
        assert torch.allclose(p, expected, rtol=1e-6, atol=0), name
    assert any(p.dim() < 2 and p.any() for p in model.parameters())


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest():
    """Every parameter is in one group of one optimizer."""
    model = tiny_gpt(preset='modern')
    adamw, muon = build_optimizers(model, TrainConfig(optimizer='muon', embed_lr=0.3), Env())
    groups = [g for o in (adamw, muon) for g in o.param_groups]
    assert sorted(id(p) for g in groups for p in g['params']) == sorted(map(id, model.parameters()))
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)].split('.')[-2] for p in muon.param_groups[0]['params']} == {'c_attn', 'c_proj', 'c_fc'}


# -----------------------------------------------------------------------------
# what is not finite

@pytest.mark.parametrize('recipe', RECIPES)
@pytest.mark.parametrize('where', ['loss', 'gradient'])
def test_a_step_that_is_not_finite_changes_nothing(masked, recipe, where):
    """Neither weights nor optimizer state, and found_inf says so."""
    split = Split(masked, 'train', read_meta(masked), 16)
    cfg = TrainConfig(optimizer=recipe['optimizer'])
    model = tiny_gpt(preset=recipe.get('preset', 'gpt2'), zero_init=False)  # or all that Muon has would be zero
    optimizers, params = build_optimizers(model, cfg, Env()), list(model.parameters())
    broken = []

    def forward(x, y):
        loss = GPT.forward(model, x, y)
        return loss * math.nan if broken and where == 'loss' else loss
    weight = model.transformer.h[1].mlp.c_fc.weight
    weight.register_hook(lambda g: g.index_fill(0, torch.tensor(3), math.inf) if broken and where == 'gradient' else g)

    def step(n):
        num_targets, loads = Batches(split, cfg, Env()).step(n)
        return train.train_step(forward, params, loads, num_targets, optimizers, no_scaler, 1.0)

    def everything():
        return [model.state_dict(), [o.state_dict()['state'] for o in optimizers]]
    assert step(0)[2].item() == 0
    buffer = pickle.dumps(everything())
    broken.append(True)
    assert step(1)[2].item() == 1
    assert same(everything(), pickle.loads(buffer))
    broken.clear()
    assert step(2)[2].item() == 0 and not same(everything(), pickle.loads(buffer))


def nan_at(monkeypatch, *micro_batches):
    """Makes the loss of these training micro-batches, counted from 0, not a number."""
    forward, count = GPT.forward, itertools.count()

    def broken(self, idx, targets=None, cache=None):
        loss = forward(self, idx, targets, cache)
        return loss * math.nan if self.training and next(count) in micro_batches else loss
    monkeypatch.setattr(GPT, 'forward', broken)


def test_a_skipped_step_never_enters_the_average(train_tiny, tmp_path, monkeypatch):
    """Step 3 of 6 is skipped: its own line has no loss, and the mean over steps 2 to 4 is that of 2 and 4."""
    for out, interval in (('single', 1), ('average', 3)):
        with monkeypatch.context() as m:
            nan_at(m, 4)
            train_tiny(out, max_iters=6, log_interval=interval, eval_interval=100)
    lines = [json.loads(line) for line in (tmp_path / 'single' / 'log.jsonl').read_text().splitlines()]
    losses = {line['step']: line.get('loss') for line in lines if 'lr' in line}
    assert losses.pop(3) is None and all(map(math.isfinite, losses.values()))
    assert [line['step'] for line in lines if line.get('skipped')] == [3]
    average = {line['step']: line for line in
               map(json.loads, (tmp_path / 'average' / 'log.jsonl').read_text().splitlines()) if 'lr' in line}
    assert average[3]['loss'] == pytest.approx(losses[2], rel=1e-12) and average[3]['skipped'] == 1
    assert average[6]['loss'] == pytest.approx((losses[4] + losses[5] + losses[6]) / 3, rel=1e-12)


def test_too_many_steps_that_are_not_finite_end_the_run(train_tiny, tmp_path, monkeypatch):
    """One good step in between starts the count anew; the checkpoints before stay finite."""
    monkeypatch.setattr('hotloop.divergence.MAX_BAD_STEPS', 3)
    nan_at(monkeypatch, 2, 4, *range(8, 100))  # steps 2, 3 and from 5 on
    sentence = error_of(train_tiny, max_iters=50, save_interval=1)
    assert re.search('step 7: loss or gradient was not finite for 3 steps in a row.*[Ll]ower the learning', sentence)
    assert all(v.isfinite().all() for v in load(tmp_path / 'out' / 'ckpt.pt')['model'].values())


def test_the_log_is_strict_json(train_tiny, tmp_path, monkeypatch):
    """Also where a number is not finite: the standard error of one window, the loss of broken weights."""
    write_bins(tmp_path / 'data' / 'one', noise(200), noise(17))
    nan_at(monkeypatch, 2, 3)
    train_tiny(dataset='one', data_dir=tmp_path / 'data', max_iters=3)
    for line in (tmp_path / 'out' / 'log.jsonl').read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f'{name} in {line}'))  # noqa: B023


# -----------------------------------------------------------------------------
# fp16

def high_scale(monkeypatch, power=30):
    """A scale at which a tiny model's gradients do not fit fp16 for the first steps."""
    monkeypatch.setattr(torch.amp, 'GradScaler', functools.partial(torch.amp.GradScaler, init_scale=2.0**power))


def test_an_overflow_skips_the_update_and_halves_the_scale(masked):
    """fp16 with a loss scale that is too large."""
    split, model = Split(masked, 'train', read_meta(masked), 16), tiny_gpt()
    model.compute_dtype = torch.float16
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**30)
    optimizers, params = build_optimizers(model, TrainConfig(), Env()), list(model.parameters())
    num_targets, loads = Batches(split, TrainConfig(batch_size=4, gradient_accumulation_steps=2), Env()).step(0)
    before, scale = pickle.dumps(model.state_dict()), 2.0**30
    for _ in range(30):
        _, _, bad, _ = train.train_step(model, params, loads, num_targets, optimizers, scaler, 1.0)
        if not bad:
            break
        scale /= 2
        assert scaler.get_scale() == scale
        assert same(model.state_dict(), pickle.loads(before))
    assert 2.0 < scale < 2.0**30 and scaler.get_scale() == scale
    assert not same(model.state_dict(), pickle.loads(before))


def test_a_storm_of_overflows_ends_the_run_with_advice(train_tiny, monkeypatch):
    """The scale is halved until it is below 1, and helps no more."""
    scales = []

    class Scaler(torch.amp.GradScaler):
        def update(self):
            super().update()
            scales.append(self.get_scale())
    monkeypatch.setattr(torch.amp, 'GradScaler', Scaler)
    nan_at(monkeypatch, *range(100))
    assert re.search('step 20: .* for 20 steps in a row.*with dtype=float16 try bfloat16 or float32',
                     error_of(train_tiny, dtype='float16', max_iters=50))
    assert scales == [2.0**(15 - n) for n in range(20)]


def test_fp16_resumes_with_its_scale(train_tiny, tmp_path, monkeypatch):
    """Five plus seven steps equal twelve to the bit, overflows among the first; without the scaler they do not."""
    high_scale(monkeypatch)
    fp16 = dict(dtype='float16', max_iters=12, dropout=0.1)
    train_tiny('whole', **fp16)
    interrupted(train_tiny, monkeypatch, 'parts', 5, **fp16)
    assert load(tmp_path / 'parts' / 'ckpt.pt')['scaler']['scale'] == 2.0**25, 'five overflows, each halving 2**30'
    shutil.copytree(tmp_path / 'parts', tmp_path / 'mutant')
    train_tiny('parts', init_from='resume', **fp16)
    assert same(final(tmp_path / 'parts'), final(tmp_path / 'whole'))
    assert log(tmp_path / 'parts') == log(tmp_path / 'whole')
    mutate(tmp_path / 'mutant', lambda c: c.pop('scaler'))
    train_tiny('mutant', init_from='resume', **fp16)
    assert not same(final(tmp_path / 'mutant')['model'], final(tmp_path / 'whole')['model'])


# -----------------------------------------------------------------------------
# the order of the data

class Windows(Split):
    """The order of a split's windows, without the split."""

    def __init__(self, num_tokens, T):
        self.num_tokens, self.T, self.order = num_tokens, T, epoch_order


def step_starts(seed, num_tokens, T, step, global_batch):
    return Windows(num_tokens, T).starts(seed, np.arange(step * global_batch, (step + 1) * global_batch))


def test_order_is_a_pure_function():
    """The same step gives the same windows, asked in any order and by another process's empty cache."""
    ask = functools.partial(step_starts, 7, 1000, 16, global_batch=24)
    forwards = [ask(step=s) for s in range(12)]
    for s in (11, 0, 5, 5, 2, 9):
        assert np.array_equal(ask(step=s), forwards[s])
    assert not np.array_equal(step_starts(8, 1000, 16, 0, 24), forwards[0]), 'the seed has no effect'


@pytest.mark.parametrize('num_tokens, T', [(1000, 16), (49, 16), (35, 16), (34, 16), (18, 16), (17, 16), (4001, 1)])
def test_an_epoch_sees_each_of_its_windows_once(num_tokens, T):
    """Non-overlapping windows inside the split, and as many as fit but at most one."""
    per_epoch = windows_per_epoch(num_tokens, T)
    assert per_epoch >= (num_tokens - 1) // T - 1
    stream = np.concatenate([step_starts(7, num_tokens, T, s, 5) for s in range(per_epoch)])  # five epochs
    for epoch in stream.reshape(5, per_epoch):
        assert np.array_equal(np.sort(epoch) - epoch.min(), T * np.arange(per_epoch))
        assert epoch.min() >= 0 and epoch.max() + T < num_tokens


def test_epochs_differ_in_order_and_offset():
    """And over many epochs every offset that fits is drawn, the last token of the split among the targets."""
    orders = [epoch_order(7, 100, 16, e) for e in range(300)]
    assert {int(o.min()) for o in orders} == set(range(100 - 5 * 16))
    assert len({tuple(o - o.min()) for o in orders}) > 50


@pytest.mark.parametrize('world', [1, 2, 4, 8])
def test_processes_share_out_the_global_batch(masked, world):
    """Their micro-batches one after another are the windows of the step, whatever their number."""
    split, cfg = Split(masked, 'train', read_meta(masked), 16), TrainConfig(batch_size=8, gradient_accumulation_steps=4)
    x, y, counts = [], [], set()
    for rank in range(world):
        num_targets, loads = Batches(split, cfg, Env(rank, world)).step(6)
        counts.add(num_targets)
        for load_one in loads:
            a, b, _ = load_one()
            x.append(a)
            y.append(b)
    expected = split.gather(step_starts(cfg.seed, split.num_tokens, 16, 6, 32))
    assert np.array_equal(torch.cat(x), expected[0]) and np.array_equal(torch.cat(y), expected[1])
    assert counts == {(expected[1] >= 0).sum()}


def test_targets_are_the_next_tokens(data_dir):
    """y is x one further; nothing else has to hold for a loss to look good and be wrong."""
    split = Split(f'{data_dir}/tiny', 'train', read_meta(f'{data_dir}/tiny'), 16)
    x, y = split.gather([0, 5, 3984])
    assert np.array_equal(x[1], noise(4001)[5:21]) and np.array_equal(y[1], noise(4001)[6:22])
    assert y[2, -1] == noise(4001)[-1]


def test_dropout_seeds_do_not_depend_on_the_process(masked):
    """The same micro-batch of the same step has the same seed on one process and on two; no two are alike."""
    split, cfg = Split(masked, 'train', read_meta(masked), 16), TrainConfig(batch_size=4, gradient_accumulation_steps=4)
    seeds = {world: [load_one()[2] for step in (0, 1) for rank in range(world)
                     for load_one in Batches(split, cfg, Env(rank, world)).step(step)[1]] for world in (1, 2)}
    assert seeds[1] == seeds[2] and len(set(seeds[1])) == 8


@pytest.mark.parametrize('num_tokens', [17, 18, 33])
def test_the_smallest_data_trains(train_tiny, tmp_path, num_tokens):
    """block_size + 1 tokens are one window and its target."""
    write_bins(tmp_path / 'data' / 'least', noise(num_tokens), noise(num_tokens))
    assert train_tiny(data_dir=tmp_path / 'data', dataset='least', max_iters=3) == 0


def test_share_batch():
    """The largest micro-batch up to batch_size; the global batch stays."""
    assert share_batch(20, 2, 8) == (5, 1)
    assert share_batch(12, 40, 8) == (12, 5)
    for size, accumulation in ((32, 1), (20, 2), (16, 4), (8, 8)):
        for world in (1, 2, 4, 8):
            micro, steps = share_batch(size, accumulation, world)
            assert micro * steps * world == size * accumulation and micro <= size
    for (size, accumulation), world, nearest in (((10, 1), 8, '8 or 16'), ((3, 1), 4, '4'), ((7, 3), 2, '20 or 22')):
        with pytest.raises(ValueError, match=rf'{size * accumulation} sequences.* {world} processes; {nearest} could'):
            share_batch(size, accumulation, world)


# -----------------------------------------------------------------------------
# evaluation

def by_hand(model, folder, mask=None):
    """Nats of every validation target, one position after another, (N - 1,), and whether it counts."""
    tokens = torch.tensor(noise(487, seed=1))
    nats = torch.zeros(486, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for rows, length in ((torch.arange(30) * 16, 16), (torch.tensor([480]), 6)):
            for t in range(length):
                places = rows[:, None] + torch.arange(t + 1)
                logp = model(tokens[places]).log_softmax(-1).double()
                nats[rows + t] = -logp.gather(1, tokens[rows + t + 1][:, None])[:, 0]
    model.train()
    counts = torch.ones(486, dtype=torch.bool) if mask is None else torch.from_numpy(mask[1:] == 1)
    return nats, counts


def val_split(folder):
    return Split(folder, 'val', read_meta(folder), 16)


def test_evaluation_is_the_mean_over_every_target(data_dir, masked):
    """Tail included, masks counted out, and bits per byte over the bytes of those very targets."""
    model, num_bytes = tiny_gpt(bias=True), np.random.default_rng(3).integers(0, 4, 257)
    for folder in (f'{data_dir}/tiny', masked):
        split = val_split(folder)
        nats, counts = by_hand(model, folder, split.mask)
        found = evaluate(model, split, None, 7, Env(), num_bytes)
        targets = torch.tensor(noise(487, seed=1)[1:])[counts]
        assert found['tokens'] == counts.sum()
        assert found['loss'] == pytest.approx(nats[counts].mean().item(), rel=1e-6)
        bits = nats[counts].sum().item() / math.log(2)
        assert found['bpb'] == pytest.approx(bits / num_bytes[targets].sum(), rel=1e-6)
        assert model.training, 'the model was left in evaluation mode'


def test_standard_error_is_that_of_the_mean_over_windows(data_dir):
    """For windows of equal length: the standard deviation of their means, over the square root of their number."""
    model, split = tiny_gpt(), val_split(f'{data_dir}/tiny')
    nats, _ = by_hand(model, f'{data_dir}/tiny')
    means = nats[:480].view(30, 16).mean(1)
    found = evaluate(model, split, 30, 8, Env())
    assert found['tokens'] == 480
    assert found['stderr'] == pytest.approx((means.std() / 30**0.5).item(), rel=1e-4)


def evaluate_on(world, model, split, num_windows, batch):
    """An evaluation shared out over processes, played one after another."""
    parts = []

    class Rank(Env):
        def sum(self, values):
            parts.append(values)
            return sum(parts) if len(parts) == world else np.ones_like(values)
    num_bytes = np.arange(257) % 4
    return [evaluate(model, split, num_windows, batch, Rank(rank, world), num_bytes) for rank in range(world)][-1]


@pytest.mark.parametrize('num_windows', [None, 11, 2])
def test_evaluation_does_not_depend_on_batch_or_processes(masked, num_windows):
    """The same windows, and the same loss, tokens and error."""
    model, split = tiny_gpt(), val_split(masked)
    reference = evaluate(model, split, num_windows, 4, Env(), np.arange(257) % 4)
    for world, batch in ((1, 1), (1, 64), (2, 4), (4, 3), (8, 2)):
        assert evaluate_on(world, model, split, num_windows, batch) == pytest.approx(reference, rel=1e-6,
                                                                                             nan_ok=True)


def test_capped_evaluation_reads_windows_spread_evenly(data_dir, monkeypatch):
    """The first and the last whole window are among them, and gaps differ by one at most."""
    seen, original = [], eval_batch
    monkeypatch.setattr('hotloop.evaluate.eval_batch', lambda s, windows, b: (seen.extend(windows), original(s, windows, b))[1])
    split = val_split(f'{data_dir}/tiny')
    for num in (2, 7, 29, 30):
        seen.clear()
        found = evaluate(tiny_gpt(), split, num, 4, Env())
        assert len(seen) == num and found['tokens'] == num * 16
        assert seen[0] == 0 and seen[-1] == 29 and np.ptp(np.diff(seen)) <= 1
    seen.clear()
    assert evaluate(tiny_gpt(), split, 31, 4, Env())['tokens'] == 486, 'the tail belongs to the whole'


def test_how_much_an_evaluation_reads(train_tiny, tmp_path):
    """eval_tokens caps tokens; eval_iters means batches of batch_size, nanoGPT's meaning."""
    for out, settings, tokens in (('all', dict(eval_tokens='None'), 486), ('cap', dict(eval_tokens=100), 96),
                                  ('iters', dict(eval_iters=3), 3 * 4 * 16)):
        train_tiny(out, max_iters=1, **settings)
        assert json.loads((tmp_path / out / 'log.jsonl').read_text().splitlines()[-1])['val_tokens'] == tokens


def test_label_smoothing_and_dropout_do_not_act_in_evaluation(data_dir):
    """They do in training."""
    split = val_split(f'{data_dir}/tiny')
    plain, regularised = tiny_gpt(), tiny_gpt(label_smoothing=0.2, dropout=0.5)
    a, b = (evaluate(m, split, None, 8, Env()) for m in (plain, regularised))
    assert a == b
    x, y = map(torch.from_numpy, split.gather([0]))
    assert not torch.allclose(plain(x, y), regularised(x, y), rtol=1e-3)


@pytest.mark.parametrize('recipe', RECIPES)
def test_evaluations_do_not_disturb_training(train_tiny, tmp_path, recipe):
    """One after every step or one at the end: the same weights to the bit, dropout on."""
    for out, interval in (('often', 1), ('never', 100)):
        train_tiny(out, dropout=0.1, eval_interval=interval, max_iters=6, **recipe)
    a, b = (load(tmp_path / out / 'ckpt.pt') for out in ('often', 'never'))
    assert same(a['model'], b['model']) and same(a['optimizer'], b['optimizer'])


@pytest.mark.parametrize('recipe', RECIPES)
def test_samples_do_not_disturb_training(train_tiny, tmp_path, recipe, capsys):
    """Drawn at every second step or never: the same weights to the bit, dropout on; a step always writes the same."""
    for out, more in (('with', dict(sample_interval=2)), ('again', dict(sample_interval=1)), ('without', {})):
        train_tiny(out, dropout=0.1, max_iters=6, sample_prompt='ab', sample_tokens=20, **recipe, **more)
    a, b = (load(tmp_path / out / 'ckpt.pt') for out in ('with', 'without'))
    assert same(a['model'], b['model']) and same(a['optimizer'], b['optimizer'])
    said = capsys.readouterr().out
    assert said.count('--- step 4 writes:\nab') == 2 and 'note: sample_prompt does nothing' in said
    few, every = (log(tmp_path / out, 'step', 'sample') for out in ('with', 'again'))
    assert [json.loads(line)['step'] for line in few] == [2, 4, 6] and set(few) < set(every) and len(every) == 6
    assert len({json.loads(line)['sample'] for line in every}) == 6
    assert all(json.loads(line)['sample'].startswith('ab') for line in every)


def test_a_sample_that_cannot_be_drawn_does_not_end_the_run(train_tiny, tmp_path, monkeypatch):
    def generate(*args, **kwargs):
        raise ValueError('the model returned logits that are not finite')
        yield
    monkeypatch.setattr('sample.generate', generate)
    assert train_tiny(max_iters=2, sample_interval=1) == 0
    assert 'nothing: the model returned logits' in log(tmp_path / 'out', 'sample')[0]


def test_a_sample_prompt_that_cannot_be_read_is_refused_at_the_start(train_tiny, tmp_path):
    write_bins(tmp_path / 'chars', noise(4001, low=0, high=3), noise(487, low=0, high=3), vocab_size=3,
               tokenizer={'kind': 'char', 'chars': 'abc', 'eot': False})
    flags = dict(data_dir=tmp_path, dataset='chars', sample_interval=5)
    assert "the characters '\\n' do not occur" in error_of(train_tiny, **flags)
    train_tiny(**flags, sample_prompt='ab', max_iters=5)


# -----------------------------------------------------------------------------
# schedules

@pytest.mark.parametrize('settings, expected', [
    (dict(), {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 8: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 12: 0.55, 20: 0.1}),
    (dict(lr_decay_iters=12), {4: 1.0, 8: 0.55, 12: 0.1, 13: 0.1, 19: 0.1}),
    (dict(decay_lr=False), {0: 0.2, 4: 1.0, 10: 1.0, 19: 1.0}),
    (dict(lr_schedule='linear'), {0: 0.2, 4: 1.0, 10: 1.0, 15: 0.55, 18: 0.28, 20: 0.1}),
    (dict(lr_schedule='linear', decay_fraction=0.25), {14: 1.0, 15: 1.0, 16: 0.82, 20: 0.1}),
    (dict(lr_schedule='linear', min_lr=0.0, lr_decay_iters=16, decay_fraction=0.5), {8: 1.0, 12: 0.5, 15: 0.125}),
    (dict(warmup_iters=0), {0: 1.0, 10: 0.55, 20: 0.1}),
])
def test_learning_rates_by_hand(settings, expected):
    """Peak 1, min_lr 0.1, 4 steps of warm-up, 20 steps."""
    cfg = TrainConfig(**dict(dict(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=20), **settings))
    for step, lr in expected.items():
        assert train.learning_rate(step, cfg) == pytest.approx(lr, rel=1e-9), step
    rates = [train.learning_rate(step, cfg) for step in range(20)]
    assert rates[0] > 0 and max(rates) == 1.0


def test_every_peak_follows_the_schedule_in_proportion():
    """Muon, embedding and AdamW together at the same share of their peaks."""
    cfg = TrainConfig(optimizer='muon', learning_rate=0.01, muon_lr=0.05, embed_lr=0.3, min_lr=0.001, max_iters=20,
                      warmup_iters=4)
    model = tiny_gpt(preset='modern')
    optimizers = build_optimizers(model, cfg, Env())
    for step in (0, 4, 12, 19):
        lr = train.learning_rate(step, cfg)
        train.set_learning_rate(optimizers, lr, cfg.learning_rate)
        rates = [g['lr'] for o in optimizers for g in o.param_groups]
        assert rates == pytest.approx([lr, lr, 30 * lr, 5 * lr], rel=1e-9)


def test_epochs_are_converted_to_steps(train_tiny, tmp_path, capsys):
    """249 windows an epoch and 8 sequences a step: half an epoch is 16 steps, and the schedule ends there."""
    train_tiny(max_epochs=0.5)
    steps = math.ceil(0.5 * windows_per_epoch(4001, 16) / 8)
    assert steps == 16 and f'{steps} steps' in capsys.readouterr().out
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == steps
    last = json.loads(log(tmp_path / 'out', 'step', 'lr')[-1])
    assert last['step'] == 16 and last['lr'] < 6e-4


# -----------------------------------------------------------------------------
# resuming

@pytest.mark.parametrize('recipe', RECIPES)
def test_ten_steps_equal_five_plus_five(train_tiny, tmp_path, monkeypatch, recipe):
    """To the bit: weights, optimizers, counters, and every number of the log; dropout, accumulation, warm-up, decay."""
    train_tiny('whole', dropout=0.1, **recipe)
    interrupted(train_tiny, monkeypatch, 'parts', 5, dropout=0.1, **recipe)
    assert load(tmp_path / 'parts' / 'ckpt.pt')['iter_num'] == 5
    train_tiny('parts', init_from='resume')
    assert same(final(tmp_path / 'parts'), final(tmp_path / 'whole'))
    assert log(tmp_path / 'parts') == log(tmp_path / 'whole')
    assert same(load(tmp_path / 'parts' / 'best.pt')['model'], load(tmp_path / 'whole' / 'best.pt')['model'])


def test_a_chain_of_resumes_equals_one_run(train_tiny, tmp_path):
    """One step a life, ten lives."""
    train_tiny('whole', dropout=0.1)
    train_tiny('chain', dropout=0.1, max_minutes=0)
    for step in range(1, 10):
        assert load(tmp_path / 'chain' / 'ckpt.pt')['iter_num'] == step
        assert train_tiny('chain', init_from='resume', max_minutes=0) == 0
    a, b = final(tmp_path / 'chain'), final(tmp_path / 'whole')
    assert same(a['model'], b['model']) and same(a['optimizer'], b['optimizer'])
    assert log(tmp_path / 'chain', 'step', 'loss') == log(tmp_path / 'whole', 'step', 'loss')


def test_the_embeddings_rate_may_change_on_resume(train_tiny, tmp_path, capsys):
    """And acts: under Muon the embedding has a group of its own, with a rate of its own or not."""
    runs = {'same': {}, 'other': {'embed_lr': 0.02}}
    for out, more in runs.items():
        train_tiny(out, max_iters=3, **RECIPES[1])
        assert train_tiny(out, init_from='resume', **more) == 0
    assert 'embed_lr: None before, 0.02 from here on' in capsys.readouterr().out
    a, b = (final(tmp_path / out)['model']['transformer.wte.weight'] for out in runs)
    assert not torch.equal(a, b)


def test_a_stop_loses_no_evaluation(train_tiny, tmp_path, monkeypatch):
    """Stopped at a step at which an evaluation was due: log and best.pt end as those of the unbroken run."""
    train_tiny('whole')
    interrupted(train_tiny, monkeypatch, 'parts', 4)
    train_tiny('parts', init_from='resume')
    assert log(tmp_path / 'parts', 'step', 'val_loss') == log(tmp_path / 'whole', 'step', 'val_loss')


def mutate(out, change):
    checkpoint = load(out / 'ckpt.pt')
    change(checkpoint)
    torch.save(checkpoint, out / 'ckpt.pt')


def first_step_again(checkpoint):
    checkpoint['iter_num'] = checkpoint['state']['iter_num'] = 0


def zero_state(name):
    def change(checkpoint):
        for optimizer in ('optimizer', 'muon'):
            for state in checkpoint[optimizer]['state'].values():
                if name in state:
                    state[name].zero_()
    return change


MUTATIONS = {
    'nothing': (lambda c: None, True),
    'no optimizer state': (lambda c: c['optimizer'].update(state={}), False),
    'no momentum of Muon': (lambda c: c['muon'].update(state={}), False),
    'step set to 0': (first_step_again, False),
    "AdamW's count set to 0": (zero_state('step'), False),
    'no first moments': (zero_state('exp_avg'), False),
    'no second moments': (zero_state('exp_avg_sq'), False),
    'zeroed momentum': (zero_state('momentum_buffer'), False),
    'one weight off by an ulp': (lambda c: c['model']['lm_head.weight'][0, :1].mul_(1 + 2**-23), False),
}


@pytest.fixture(scope='module')
def halves(tmp_path_factory, data_dir):
    """A whole run with Muon, and one that was stopped at step 5."""
    folder = tmp_path_factory.mktemp('halves')
    flags = {**TINY, 'data_dir': data_dir, 'dropout': 0.1, **RECIPES[1], 'save_interval': 5}

    def run(out, **settings):
        return train.main([f'--{k}={v}' for k, v in {**flags, 'out_dir': folder / out, **settings}.items()])
    with pytest.MonkeyPatch.context() as m:
        run('whole')
        signal_at(m, 5)
        run('stopped')
    return folder


@pytest.mark.parametrize('name', MUTATIONS)
def test_exactness_notices_what_is_missing(train_tiny, tmp_path, halves, name):
    """Each thing that a checkpoint holds is needed: without it the bits differ."""
    change, equal = MUTATIONS[name]
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    mutate(tmp_path / 'out', change)
    train_tiny(init_from='resume')
    assert same(final(tmp_path / 'out')['model'], final(halves / 'whole')['model']) is equal


def test_resuming_a_finished_run_touches_nothing(train_tiny, tmp_path, capsys):
    """No step, no file, no new time on a file."""
    train_tiny()
    before = snapshot(tmp_path)
    assert train_tiny(init_from='resume') == 0
    assert snapshot(tmp_path) == before
    assert 'nothing to do: the run is at step 10 of 10' in capsys.readouterr().out


def test_config_of_the_run_repeats_it(train_tiny, tmp_path, data_dir):
    """out_dir/config.py as a config file gives the same bits."""
    train_tiny('a', dropout=0.1, **RECIPES[1])
    train.main([str(tmp_path / 'a' / 'config.py'), f'--out_dir={tmp_path / "b"}'])
    assert same(final(tmp_path / 'a'), final(tmp_path / 'b'))
    assert log(tmp_path / 'a') == log(tmp_path / 'b')


def test_config_of_a_tuned_run_repeats_it(train_tiny, tmp_path, data_dir):
    """Also where the shape came from the weights that it started with."""
    train_tiny('base', max_iters=2)
    flags = {k: v for k, v in TINY.items() if not k.startswith(('n_', 'block'))}
    train.main([f'--{k}={v}' for k, v in {**flags, 'data_dir': data_dir, 'init_from': tmp_path / 'base' / 'ckpt.pt',
                                          'out_dir': tmp_path / 'a'}.items()])
    train.main([str(tmp_path / 'a' / 'config.py'), f'--out_dir={tmp_path / "b"}'])
    assert same(final(tmp_path / 'a'), final(tmp_path / 'b'))


def test_bound_settings_cannot_change_on_resume(train_tiny, tmp_path, halves, data_dir):
    """The error names both values, and nothing is touched."""
    shutil.copytree(f'{data_dir}/tiny', tmp_path / 'data' / 'tiny')
    shutil.copytree(f'{data_dir}/tiny', tmp_path / 'data' / 'other')
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    before = snapshot(tmp_path / 'out')
    for name, value, both in (('n_layer', 3, 'n_layer=3.* 2;'), ('dataset', 'other', "dataset='other'.* 'tiny';"),
                              ('preset', 'gpt2', "preset='gpt2'.* 'modern';"),
                              ('block_size', 8, 'block_size=8.* 16;'), ('softcap', 0, 'softcap=0.0.* 15.0;'),
                              ('optimizer', 'adamw', "optimizer='adamw'.* 'muon';")):
        sentence = error_of(train_tiny, init_from='resume', data_dir=tmp_path / 'data', **{name: value})
        assert re.search(both, sentence), sentence
    assert snapshot(tmp_path / 'out') == before


def test_resume_refuses_data_that_changed(train_tiny, tmp_path, halves):
    """The same name over other tokens."""
    write_bins(tmp_path / 'data' / 'tiny', noise(4001, seed=5), noise(487, seed=1))
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    assert 'not the one this run was trained on' in error_of(train_tiny, init_from='resume',
                                                             data_dir=tmp_path / 'data')


def test_announced_and_free_settings_on_resume(train_tiny, tmp_path, capsys, halves):
    """Rates and batches may change and both values are printed; lengths, intervals and dropout are simply taken."""
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    train_tiny(init_from='resume', learning_rate=0.25, batch_size=8, seed=3, max_iters=7, eval_interval=1, dropout=0.0)
    out = capsys.readouterr().out
    for line in ('learning_rate: 0.005 before, 0.25 from here on', 'batch_size: 4 before, 8 from here on',
                 'seed: 1337 before, 3 from here on'):
        assert line in out.splitlines()
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    assert checkpoint['iter_num'] == 7 and checkpoint['config']['dropout'] == 0.0
    assert json.loads(log(tmp_path / 'out', 'step', 'lr')[-1])['lr'] > 0.005
    assert [json.loads(line)['step'] for line in log(tmp_path / 'out', 'step', 'val_loss')] == [4, 6, 7]
    assert 'dropout' not in ''.join(line for line in out.splitlines() if 'from here on' in line)


def test_resume_takes_the_settings_of_the_run(tmp_path, halves, capsys):
    """--init_from=resume and the folder are enough: shape, data, rates and recipe come from the checkpoint."""
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    train.main(['--init_from=resume', f'--out_dir={tmp_path / "out"}'])
    assert same(final(tmp_path / 'out'), final(halves / 'whole'))
    assert 'resuming at step 5' in capsys.readouterr().out


def test_max_iters_on_resume_ends_a_run_that_counted_epochs(train_tiny, tmp_path):
    """A length given by name is never overruled by one from the checkpoint."""
    train_tiny(max_epochs=0.1)
    steps = load(tmp_path / 'out' / 'ckpt.pt')['iter_num']
    train_tiny(init_from='resume', max_iters=steps + 2)
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == steps + 2


# -----------------------------------------------------------------------------
# starting from other weights

def test_init_from_a_path_starts_at_step_0_with_those_weights(train_tiny, tmp_path):
    """A folder (its best.pt first) or a file; learning rate 0 shows what was loaded."""
    train_tiny('base', max_iters=6)
    for number, source in enumerate(('base', 'base/ckpt.pt', 'base/best.pt')):
        out = f'tuned{number}'
        train_tiny(out, init_from=tmp_path / source, max_iters=2, learning_rate=0, min_lr=0)
        tuned, base = load(tmp_path / out / 'ckpt.pt'), load(tmp_path / ('base/best.pt' if not number else source))
        assert tuned['iter_num'] == 2 and same(tuned['model'], base['model'])
    os.remove(tmp_path / 'base' / 'best.pt')
    train_tiny('tuned3', init_from=tmp_path / 'base', max_iters=1, learning_rate=0, min_lr=0)
    assert same(load(tmp_path / 'tuned3' / 'ckpt.pt')['model'], load(tmp_path / 'base' / 'ckpt.pt')['model'])


def test_init_from_a_path_names_contradictions(train_tiny, tmp_path):
    """Shape, context and tokenizer must be those of the weights."""
    train_tiny('base', max_iters=1)
    write_bins(tmp_path / 'data' / 'chars', noise(100, high=60) - 32, noise(100, high=60) - 32,
               tokenizer={'kind': 'char', 'chars': ''.join(map(chr, range(32, 64))), 'eot': False}, vocab_size=32)
    for settings, match in ((dict(n_layer=3), '--n_layer: n_layer=3, but .*base has 2'),
                            (dict(preset='modern'), "preset='modern', but .* has 'gpt2'"),
                            (dict(block_size=32), 'block_size=32, but .* has 16; leave it out'),
                            (dict(dataset='chars', data_dir=tmp_path / 'data'), r'tokenizer byte.*char \(32')):
        sentence = error_of(train_tiny, 'tuned', init_from=tmp_path / 'base', **settings)
        assert re.search(match, sentence), sentence
    assert not (tmp_path / 'tuned').exists()


def test_init_from_a_path_with_a_shorter_context(train_tiny, tmp_path):
    """block_size crops positions, as nanoGPT does for GPT-2."""
    train_tiny('base', max_iters=1)
    train_tiny('tuned', init_from=tmp_path / 'base', block_size=8, max_iters=1)
    assert load(tmp_path / 'tuned' / 'ckpt.pt')['model']['transformer.wpe.weight'].shape == (8, 32)


def nanogpt_checkpoint(folder, gpt, adamw, **config):
    """What nanoGPT's train.py writes, compiled: names with _orig_mod., a tensor for the best loss, its own config."""
    config = dict(out_dir='out-chars', eval_interval=250, log_interval=10, eval_iters=2, eval_only=False,
                  always_save_checkpoint=False, init_from='scratch', wandb_log=False, wandb_project='chars',
                  wandb_run_name='mini-gpt', dataset='chars', gradient_accumulation_steps=2, batch_size=4,
                  block_size=16, n_layer=2, n_head=2, n_embd=32, dropout=0.0, bias=False, learning_rate=1e-3,
                  max_iters=5, weight_decay=0.1, beta1=0.9, beta2=0.99, grad_clip=1.0, decay_lr=True, warmup_iters=2,
                  lr_decay_iters=5, min_lr=1e-4, backend='nccl', device='cuda', dtype='bfloat16', compile=True,
                  **config)
    args = {k: config[k] for k in ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'dropout')}
    os.makedirs(folder)
    torch.save({'model': {f'_orig_mod.{k}': v for k, v in gpt.state_dict().items()}, 'optimizer': adamw.state_dict(),
                'model_args': {**args, 'vocab_size': 65}, 'iter_num': 3, 'best_val_loss': torch.tensor(4.1),
                'config': config}, folder / 'ckpt.pt')


def test_a_run_of_nanogpt_is_continued(tmp_path, capsys):
    """Steps 4 and 5 after nanoGPT's third are those of torch.optim.AdamW with its groups, betas and schedule."""
    tokens, chars = noise(2001) - 32, ''.join(chr(32 + i) for i in range(65))
    folder = write_bins(tmp_path / 'data' / 'chars', tokens, tokens[:300], tokenizer=False)
    with open(f'{folder}/meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 65, 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}, f)
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32))
    params = [p for _, p in gpt.named_parameters()]
    adamw = torch.optim.AdamW([{'params': [p for p in params if p.dim() >= 2], 'weight_decay': 0.1},
                               {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}],
                              lr=1e-3, betas=(0.9, 0.99))

    def step(n):
        x, y = Split(folder, 'train', read_meta(folder), 16).gather(step_starts(1337, 2001, 16, n, 8))
        (gpt(torch.from_numpy(x), torch.from_numpy(y)).sum() / y.size).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adamw.param_groups[0]['lr'] = adamw.param_groups[1]['lr'] = (
            1e-3 * (n + 1) / 3 if n < 2 else 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (n - 2) / 3)))
        adamw.step()
        adamw.zero_grad()
    for n in range(3):
        step(n)
    nanogpt_checkpoint(tmp_path / 'out', gpt, adamw)
    for n in (3, 4):
        step(n)
    train.main(['--init_from=resume', '--dtype=float32', f'--out_dir={tmp_path}/out', f'--data_dir={tmp_path}/data',
                '--device=cpu', '--compile=False', '--threads=1'])
    ours = load(tmp_path / 'out' / 'ckpt.pt')
    assert ours['iter_num'] == 5 and ours['config']['beta2'] == 0.99
    for name, weight in gpt.state_dict().items():
        assert torch.allclose(ours['model'][name], weight, atol=1e-5), name
    assert 'char tokenizer' in capsys.readouterr().out


def test_a_checkpoint_of_nanogpt_from_before_bias_was_a_setting(train_tiny, tmp_path):
    """Its weights have biases, and its model_args do not say so."""
    train_tiny(bias=True, max_iters=2)
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    del checkpoint['model_args']['bias'], checkpoint['config']['bias']
    torch.save(checkpoint, tmp_path / 'out' / 'ckpt.pt')
    assert train_tiny(init_from='resume', max_iters=3) == 0
    resumed = load(tmp_path / 'out' / 'ckpt.pt')
    assert resumed['iter_num'] == 3 and resumed['model_args']['bias'] is True


# -----------------------------------------------------------------------------
# checkpoints

def test_a_best_in_the_place_of_a_checkpoint_is_named(train_tiny, tmp_path):
    train_tiny(max_iters=4)
    (tmp_path / 'other').mkdir()
    shutil.copy(tmp_path / 'out' / 'best.pt', tmp_path / 'other' / 'ckpt.pt')
    assert 'holds no state of an optimizer, as best.pt' in error_of(train_tiny, 'other', init_from='resume')


def test_weights_that_are_not_finite_are_named_on_resume(train_tiny, tmp_path):
    train_tiny(max_iters=4)
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    checkpoint['model']['transformer.wpe.weight'][0, 0] = math.nan
    torch.save(checkpoint, tmp_path / 'out' / 'ckpt.pt')
    assert 'the weights to start from are not finite' in error_of(train_tiny, init_from='resume', max_iters=6)


def test_a_run_of_which_no_loss_was_finite_is_an_error(train_tiny, tmp_path, capsys):
    assert 'no validation loss of this run was finite' in error_of(
        train_tiny, learning_rate=1e30, decay_lr=False, warmup_iters=0, max_iters=6, eval_interval=3)
    assert 'done' not in capsys.readouterr().out and not (tmp_path / 'out' / 'best.pt').exists()


def test_commands_that_are_offered_can_be_typed(train_tiny, tmp_path, capsys):
    train_tiny('a b/c', max_iters=1)
    assert f"python sample.py --out_dir='{tmp_path}/a b/c'" in capsys.readouterr().out


@pytest.mark.parametrize('what, error, words', [
    ('build_model', RuntimeError("DefaultCPUAllocator: can't allocate memory"), 'the model does not fit the memory of'),
    ('train', MemoryError('Unable to allocate 29.8 GiB'), 'a step of 8 sequences, batch_size x')])
def test_what_does_not_fit_the_memory_is_named(train_tiny, monkeypatch, what, error, words):
    def fail(*_):
        raise error
    monkeypatch.setattr(train, what, fail)
    assert words in error_of(train_tiny)


def test_contents_of_a_checkpoint(train_tiny, tmp_path):
    """Plain values only; nanoGPT's seven model_args and its other keys, ours beside them; no compiler's prefixes."""
    train_tiny(max_iters=2)
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    assert set(checkpoint['model_args']) == {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size',
                                             'dropout'}
    assert set(checkpoint) >= {'model', 'optimizer', 'iter_num', 'best_val_loss', 'config', 'tokenizer', 'data',
                               'versions', 'scaler', 'state'}
    assert set(checkpoint['model']) == set(tiny_gpt().state_dict())
    shared = {checkpoint['model'][n].data_ptr() for n in ('lm_head.weight', 'transformer.wte.weight')}
    assert len(shared) == 1, 'the tied matrix was written twice'
    assert set(load(tmp_path / 'out' / 'best.pt')) >= {'model', 'model_args', 'config', 'tokenizer'}
    train_tiny('modern', max_iters=1, preset='modern')
    assert set(load(tmp_path / 'modern' / 'ckpt.pt')['model_args']) > set(checkpoint['model_args'])


def test_the_last_checkpoints_are_kept(train_tiny, tmp_path, monkeypatch):
    """keep_last files, the latest among them, each whole and at its step, after each of 50 saves."""
    original, out = train.save, tmp_path / 'out'

    def save(run, *args, **kwargs):
        original(run, *args, **kwargs)
        step = run.state.iter_num
        steps = range(max(step - 2, 1), step + 1)
        names = [*(f'ckpt-{n:09d}.pt' for n in steps[:-1]), 'ckpt.pt']
        assert sorted(p.name for p in out.glob('ckpt*')) == names
        assert [load(out / name)['iter_num'] for name in names] == [*steps]
    monkeypatch.setattr(train, 'save', save)
    assert train_tiny(save_interval=1, keep_last=3, max_iters=50, eval_interval=50) == 0


def scripted_losses(monkeypatch, losses):
    """Evaluations that find these validation losses, one after another."""
    losses = iter(losses)

    def fake(run, stop):
        step = run.state.iter_num
        return f'step {step}: scripted', {'step': step, 'val_loss': next(losses)}
    monkeypatch.setattr(train, 'evaluate_both', fake)


def test_best_is_written_when_it_improves(train_tiny, tmp_path, monkeypatch):
    """And at no other evaluation; a worse loss never becomes the best one, as it does in nanoGPT, nor one
    that is no number."""
    scripted_losses(monkeypatch, [5.0, 3.0, math.nan, 4.0, 3.5])
    train_tiny(eval_interval=2)
    best, last = load(tmp_path / 'out' / 'best.pt'), load(tmp_path / 'out' / 'ckpt.pt')
    assert best['iter_num'] == 4 and best['best_val_loss'] == last['best_val_loss'] == 3.0


@pytest.mark.parametrize('always, steps', [(True, [2, 4, 6, 8, 10, 10]), (False, [2, 4, 10, 10])])
def test_which_evaluations_save(train_tiny, tmp_path, monkeypatch, always, steps):
    """always_save_checkpoint=False saves those that improve, and the end, before and after its evaluation."""
    saved, original = [], train.save
    monkeypatch.setattr(train, 'save', lambda run, *best, **final: (saved.append(run.state.iter_num),
                                                                  original(run, *best, **final)))
    scripted_losses(monkeypatch, [5.0, 3.0, 4.0, 4.0, 4.0])
    train_tiny(eval_interval=2, always_save_checkpoint=always)
    assert saved == steps


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == 'flipped':
        at = data.index(load(path)['model']['lm_head.weight'].numpy().tobytes())
        data[at + 100] ^= 1
    path.write_bytes({'flipped': data, 'truncated': data[:-500], 'empty': b''}[how])


@pytest.mark.parametrize('how', ['flipped', 'truncated', 'empty'])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(train_tiny, tmp_path, monkeypatch, capsys, halves, how):
    """It is named, and the run still ends with the reference bits."""
    interrupted(train_tiny, monkeypatch, 'out', 7, dropout=0.1, save_interval=5, **RECIPES[1])
    damage(tmp_path / 'out' / 'ckpt.pt', how)
    capsys.readouterr()
    train_tiny(init_from='resume')
    out = capsys.readouterr().out
    assert same(final(tmp_path / 'out'), final(halves / 'whole'))
    assert log(tmp_path / 'out') == log(halves / 'whole')
    assert 'resuming at step 5' in out
    assert re.search(r'ckpt\.pt is (damaged|not a whole)', out), 'the damaged file is not named'
    assert (tmp_path / 'out' / 'ckpt.pt.damaged').exists()


def test_the_checkpoint_resumed_from_is_the_latest_at_once(train_tiny, tmp_path, monkeypatch):
    """A run that fell back and is killed before its first save falls back to the same place."""
    interrupted(train_tiny, monkeypatch, 'out', 7, save_interval=5)
    damage(tmp_path / 'out' / 'ckpt.pt', 'truncated')
    monkeypatch.setattr(train, 'train', lambda run: 137)
    assert train_tiny(init_from='resume') == 137
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 5
    assert sorted(p.name for p in (tmp_path / 'out').glob('ckpt*')) == ['ckpt.pt', 'ckpt.pt.damaged']


def test_the_checkpoint_resumed_from_is_kept_beside_the_next(train_tiny, tmp_path, halves):
    """keep_last counts over the lives of a run."""
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    train_tiny(init_from='resume', eval_interval=100, save_interval=100)
    assert sorted(p.name for p in (tmp_path / 'out').glob('ckpt*')) == ['ckpt-000000005.pt', 'ckpt.pt']


def test_when_every_checkpoint_is_damaged_the_run_stops(train_tiny, tmp_path, monkeypatch):
    """It lists each file and reason and touches none: never a silent fresh start."""
    interrupted(train_tiny, monkeypatch, 'out', 7, save_interval=5)
    damage(tmp_path / 'out' / 'ckpt.pt', 'flipped')
    damage(tmp_path / 'out' / 'ckpt-000000005.pt', 'truncated')
    before = snapshot(tmp_path / 'out')
    sentence = error_of(train_tiny, init_from='resume')
    assert re.search(r'ckpt\.pt is damaged.*checksum', sentence) and 'ckpt-000000005.pt is not a whole' in sentence
    assert snapshot(tmp_path / 'out') == before


def test_what_a_killed_save_left_is_removed(train_tiny, tmp_path, halves):
    """Whole or not, a .tmp file is nobody's checkpoint."""
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    (tmp_path / 'out' / 'ckpt.pt.4242.tmp').write_bytes(b'half')
    train_tiny(init_from='resume')
    assert not list((tmp_path / 'out').glob('*.tmp'))


def test_a_new_run_moves_the_old_one_aside(train_tiny, tmp_path, capsys):
    """To out.1, then out.2, file for file."""
    train_tiny(max_iters=1)
    first = {p.name: p.read_bytes() for p in (tmp_path / 'out').iterdir() if p.name != '.lock'}
    train_tiny(max_iters=2)
    train_tiny(max_iters=3)
    assert {p.name: p.read_bytes() for p in (tmp_path / 'out.1').iterdir() if p.name != '.lock'} == first
    assert [load(tmp_path / out / 'ckpt.pt')['iter_num'] for out in ('out.1', 'out.2', 'out')] == [1, 2, 3]
    assert f'moved to {tmp_path / "out.2"}' in capsys.readouterr().out


@pytest.mark.parametrize('settings', [dict(init_from='scratch'), dict(init_from='resume')])
def test_a_second_run_in_the_same_folder_is_refused(train_tiny, tmp_path, halves, settings):
    """While the lock is held, naming its holder; no file changes."""
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    with open(tmp_path / 'out' / '.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write('4242')
        lock.flush()
        before = snapshot(tmp_path)
        assert re.search('out is in use by process 4242.*--out_dir', error_of(train_tiny, **settings))
        assert snapshot(tmp_path) == before
    assert train_tiny(**settings) == 0, 'the lock outlives its holder'


def full_disk(monkeypatch, fails):
    """torch.save as on a full disk where fails(number of the call, checkpoint) is true."""
    original, count = torch.save, itertools.count(1)

    def save(checkpoint, *args):
        if fails(next(count), checkpoint):
            raise RuntimeError('[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598')
        return original(checkpoint, *args)
    monkeypatch.setattr(torch, 'save', save)


def test_training_outlives_a_save_that_fails(train_tiny, tmp_path, monkeypatch, capsys):
    """The checkpoint before it stays, and the message tells free and needed space."""
    full_disk(monkeypatch, lambda number, _: number in (2, 3, 5, 6))
    assert train_tiny(save_interval=1, eval_interval=100, max_iters=9) == 0
    assert len(re.findall(r'could not be written.* MB are free, .* MB are needed; training goes on',
                          capsys.readouterr().out)) == 4
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 9 and not list((tmp_path / 'out').glob('*.tmp'))


def test_what_does_not_read_back_takes_no_other_checkpoints_place(train_tiny, tmp_path, monkeypatch, capsys):
    """As when memory fails between the sum of a record and its write."""
    original, count = torch.save, itertools.count(1)

    def save(checkpoint, f):
        original(checkpoint, f)
        if next(count) in (3, 4):
            f.seek(1000)
            f.write(b'\0\1\2\3' * 9)
    monkeypatch.setattr(torch, 'save', save)
    assert train_tiny(save_interval=1, eval_interval=100, max_iters=4, keep_last=5) == 0
    assert capsys.readouterr().out.count('what was written does not read back: it is damaged: ') == 2
    assert [load(p)['iter_num'] for p in sorted((tmp_path / 'out').glob('ckpt*.pt'))] == [1, 2, 4]


def test_training_stops_after_three_failed_saves(train_tiny, tmp_path, monkeypatch):
    """In a row; the last good checkpoint is there to resume from."""
    full_disk(monkeypatch, lambda number, _: number > 2)
    sentence = error_of(train_tiny, save_interval=1, eval_interval=100)
    assert 'MB are needed' in sentence
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 2
    assert len(log(tmp_path / 'out', 'step', 'lr')) == 5


def test_training_outlives_a_best_that_cannot_be_written(train_tiny, tmp_path, monkeypatch):
    """best.pt is a convenience: a disk that is full at that moment must not end the run either."""
    full_disk(monkeypatch, lambda number, checkpoint: 'optimizer' not in checkpoint and checkpoint['iter_num'] < 10)
    assert train_tiny(eval_interval=2) == 0
    assert load(tmp_path / 'out' / 'best.pt')['iter_num'] == 10


def test_the_checkpoint_is_saved_where_best_cannot_be(train_tiny, tmp_path, monkeypatch):
    full_disk(monkeypatch, lambda number, checkpoint: 'optimizer' not in checkpoint)
    assert 'best.pt could not be written' in error_of(train_tiny, eval_interval=2)
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 10 and not (tmp_path / 'out' / 'best.pt').exists()


def test_out_dir_that_cannot_be_written(train_tiny, tmp_path):
    """A sentence before the first step."""
    (tmp_path / 'file').write_text('')
    assert re.search(r"out_dir='.*file/out' cannot be written: Not a dir", error_of(train_tiny, 'file/out'))


@pytest.mark.skipif(os.geteuid() == 0, reason='root writes everywhere')
def test_out_dir_without_permission(train_tiny, tmp_path):
    """As above, by permissions."""
    (tmp_path / 'locked').mkdir(mode=0o500)
    assert 'cannot be written: Permission denied' in error_of(train_tiny, 'locked/out')


def test_used_out_dir_that_cannot_be_moved(train_tiny, tmp_path, monkeypatch):
    """--out_dir=. for the second time, a mount: a sentence, not a traceback."""
    monkeypatch.chdir(tmp_path)
    for out in ('.', 'mount'):
        train_tiny(out, max_iters=1)
    assert 'cannot be moved aside (it is where this command was started)' in error_of(train_tiny, '.', max_iters=1)
    monkeypatch.setattr(train.os, 'rename', lambda *args: (_ for _ in ()).throw(OSError(16, 'Device or resource busy')))
    assert 'aside (Device or resource busy); choose another' in error_of(train_tiny, 'mount', max_iters=1)


def test_a_link_to_a_folder_stays_one(train_tiny, tmp_path):
    """And what it led to stays on its disk, under another name."""
    os.makedirs(tmp_path / 'disk' / 'run')
    os.symlink(tmp_path / 'disk' / 'run', tmp_path / 'out')
    for steps in (1, 2):
        train_tiny(max_iters=steps)
    assert os.path.islink(tmp_path / 'out') and load(tmp_path / 'disk' / 'run' / 'ckpt.pt')['iter_num'] == 2
    assert load(tmp_path / 'disk' / 'run.1' / 'ckpt.pt')['iter_num'] == 1 and not (tmp_path / 'out.1').exists()


def test_weights_alone_are_a_run_that_is_not_overwritten(train_tiny, tmp_path):
    """As they are copied for sampling; nor are files that are somebody else's, whatever they are called."""
    train_tiny(max_iters=1)
    shutil.copytree(tmp_path / 'out', tmp_path / 'kept', ignore=shutil.ignore_patterns('ckpt*', 'log*'))
    weights = (tmp_path / 'kept' / 'best.pt').read_bytes()
    train_tiny('kept', max_iters=2)
    assert (tmp_path / 'kept.1' / 'best.pt').read_bytes() == weights
    os.makedirs(tmp_path / 'mine' / 'folder.tmp')
    (tmp_path / 'mine' / 'notes.tmp').write_text('mine')
    (tmp_path / 'mine' / 'ckpt.pt.77.tmp').write_text('of a save that was killed')
    train_tiny('mine', max_iters=1)
    assert {'folder.tmp', 'notes.tmp'} == {name for name in os.listdir(tmp_path / 'mine') if name.endswith('.tmp')}


# -----------------------------------------------------------------------------
# signals and limits

@pytest.mark.parametrize('number, code', [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_ends_with_its_code(train_tiny, tmp_path, monkeypatch, capsys, halves, number, code):
    """At the step during which it came, and the resumed run ends with the reference bits."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be run by nohup
    signal_at(monkeypatch, 6, number)
    assert train_tiny(dropout=0.1, **RECIPES[1]) == code
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 6
    assert 'stopped at step 6 and saved; go on with: python train.py --init_from=resume' in capsys.readouterr().out
    train_tiny(init_from='resume')
    assert same(final(tmp_path / 'out')['model'], final(halves / 'whole')['model'])


def test_a_signal_between_micro_batches_gives_up_the_step(train_tiny, tmp_path, monkeypatch, capfd, halves):
    """Which may take minutes, where whoever sent it waits for seconds; the resumed run ends with the reference bits."""
    forward, calls = GPT.forward, []

    def stopping(*args):
        calls.append(None)
        if len(calls) == 2 * 2 + 1:  # the first of the third step's two; evaluations come later
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*args)
    with monkeypatch.context() as m:
        m.setattr(GPT, 'forward', stopping)
        assert train_tiny(dropout=0.1, **RECIPES[1]) == 130
    out, err = capfd.readouterr()
    assert len(calls) == 5 and 'stopped at step 2 and saved' in out and 'Ctrl-C again ends at once' in err
    train_tiny(init_from='resume')
    assert same(final(tmp_path / 'out')['model'], final(halves / 'whole')['model'])


def test_a_signal_in_the_first_step_leaves_nothing_to_save(train_tiny, tmp_path, monkeypatch, capsys):
    forward = GPT.forward
    monkeypatch.setattr(GPT, 'forward', lambda *args: os.kill(os.getpid(), signal.SIGTERM) or forward(*args))
    assert train_tiny() == 143
    assert 'stopped before step 1' in capsys.readouterr().out and not (tmp_path / 'out' / 'ckpt.pt').exists()


def test_a_run_under_nohup_stays_deaf_to_the_terminals_end(train_tiny):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    train_tiny(max_iters=1)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_output_that_nobody_reads_ends_no_run(tmp_path, data_dir):
    """As when tee was killed."""
    flags = {**TINY, 'data_dir': data_dir, 'out_dir': tmp_path / 'out'}
    run = subprocess.Popen([sys.executable, ROOT / 'train.py', *(f'--{k}={v}' for k, v in flags.items())],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.stdout.readline()
    run.stdout.close()
    assert run.stderr.read() == '' and run.wait() == 0
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 10


def test_a_limit_of_time_is_of_one_command(train_tiny, tmp_path):
    train_tiny(max_minutes=0)
    train_tiny(init_from='resume')
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 10


def test_a_signal_during_the_last_step_is_a_normal_end(train_tiny, monkeypatch):
    """There is nothing left to resume."""
    signal_at(monkeypatch, 10)
    assert train_tiny() == 0


def test_max_minutes_ends_after_a_step_with_code_0(train_tiny, tmp_path):
    """0 minutes are one step."""
    assert train_tiny(max_minutes=0) == 0
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 1


@pytest.mark.parametrize('init_from', ['resume', 'scratch', 'path'])
def test_eval_only_writes_nothing(train_tiny, tmp_path, capsys, init_from):
    """nanoGPT trains on and overwrites its checkpoint when resumed with eval_only."""
    train_tiny(max_iters=4)
    loss = re.findall(r'val loss [\d.]+', capsys.readouterr().out)[-1]
    before = snapshot(tmp_path)
    for out in ('out', 'new') if init_from != 'resume' else ('out',):
        assert train_tiny(out, eval_only=True,
                          init_from=str(tmp_path / 'out') if init_from == 'path' else init_from) == 0
    assert snapshot(tmp_path) == before and not (tmp_path / 'new').exists()
    out = capsys.readouterr().out
    assert (loss in out) == (init_from != 'scratch') and ('step 4: val loss' in out) == (init_from == 'resume')


# -----------------------------------------------------------------------------
# bad input: one sentence with the values, the place and the remedy

def test_missing_dataset(train_tiny):
    assert re.search(r'data/nowhere does not exist; make it with: python prepare\.py .*--name=nowhere',
                     error_of(train_tiny, dataset='nowhere', data_dir='data'))


def test_bins_that_cannot_be_opened_or_hold_next_to_nothing(train_tiny, tmp_path):
    folder = write_bins(tmp_path / 'data' / 'bad', noise(100), noise(100), tokenizer=False)
    os.remove(f'{folder}/val.bin')
    os.mkdir(f'{folder}/val.bin')
    assert 'bad/val.bin cannot be read: Is a directory' in error_of(train_tiny, dataset='bad',
                                                                   data_dir=tmp_path / 'data')
    os.rmdir(f'{folder}/val.bin')
    noise(1).astype(np.uint16).tofile(f'{folder}/val.bin')
    said = error_of(train_tiny, dataset='bad', data_dir=tmp_path / 'data')
    assert re.search(r'val\.bin has 1 tokens, too few for one window .*; use more text$', said)


def test_missing_split(train_tiny, tmp_path):
    folder = write_bins(tmp_path / 'data' / 'half', noise(100), noise(100))
    os.remove(f'{folder}/val.bin')
    assert re.search(r'half/val\.bin does not exist; make it', error_of(train_tiny, dataset='half',
                                                                        data_dir=tmp_path / 'data'))


@pytest.mark.parametrize('split', ['train', 'val'])
def test_data_shorter_than_a_window(train_tiny, tmp_path, split):
    sizes = {'train': 100, 'val': 100, split: 16}
    write_bins(tmp_path / 'data' / 'short', noise(sizes['train']), noise(sizes['val']))
    assert re.search(rf'{split}\.bin has 16 tokens.*block_size=16.*--block_size=15',
                     error_of(train_tiny, dataset='short', data_dir=tmp_path / 'data'))


@pytest.mark.parametrize('split', ['train', 'val'])
def test_token_beyond_the_vocabulary(train_tiny, tmp_path, split):
    tokens = {'train': noise(100), 'val': noise(100)}
    tokens[split][42] = 300
    write_bins(tmp_path / 'data' / 'beyond', tokens['train'], tokens['val'])
    assert re.search(rf'{split}\.bin has token id 300 at position 42, but the vocabulary has 257',
                     error_of(train_tiny, dataset='beyond', data_dir=tmp_path / 'data'))


@pytest.mark.parametrize('tokenizer', [None, False])
def test_bin_of_odd_size(train_tiny, tmp_path, tokenizer):
    folder = write_bins(tmp_path / 'data' / 'odd', noise(100), noise(100), tokenizer=tokenizer)
    with open(f'{folder}/train.bin', 'ab') as f:
        f.write(b'x')
    assert re.search(r'train\.bin has 201 bytes, which is no whole number of', error_of(train_tiny, dataset='odd',
                                                                                 data_dir=tmp_path / 'data'))


def test_mask_of_another_size(train_tiny, tmp_path):
    folder = write_bins(tmp_path / 'data' / 'm', noise(100), noise(100))
    np.ones(99, dtype=np.uint8).tofile(f'{folder}/val.mask.bin')
    assert re.search(r'val\.mask\.bin has 99 bytes for 100 tokens', error_of(train_tiny, dataset='m',
                                                                             data_dir=tmp_path / 'data'))


@pytest.mark.parametrize('split', ['train', 'val'])
def test_mask_that_counts_nothing(train_tiny, tmp_path, split):
    masks = {'train': np.ones(100), 'val': np.ones(100), split: np.zeros(100)}
    write_bins(tmp_path / 'data' / 'm', noise(100), noise(100), masks=masks)
    assert re.search(rf'{split}\.bin has no target that counts: its mask is 0 everywhere',
                     error_of(train_tiny, dataset='m', data_dir=tmp_path / 'data'))


def test_windows_that_count_nothing(train_tiny, tmp_path):
    """Of the one window evaluated no target counts, though others of the split have some."""
    masks = {'train': np.ones(100), 'val': np.append(np.zeros(99), 1)}
    write_bins(tmp_path / 'data' / 'm', noise(100), noise(100), masks=masks)
    assert re.search(r'val\.bin has no target that counts in the windows evaluated; raise eval_tokens',
                     error_of(train_tiny, dataset='m', data_dir=tmp_path / 'data', eval_tokens=16))


def test_resume_with_another_tokenizer(train_tiny, tmp_path, halves):
    shutil.copytree(halves / 'stopped', tmp_path / 'out')
    write_bins(tmp_path / 'data' / 'tiny', noise(4001), noise(487, seed=1), vocab_size=96,
               tokenizer={'kind': 'char', 'chars': ''.join(map(chr, range(96))), 'eot': False})
    assert re.search(r'tokenizer byte, the dataset was made with char \(96 characters\)',
                     error_of(train_tiny, init_from='resume', data_dir=tmp_path / 'data'))


@pytest.mark.parametrize('settings, match', [
    (dict(n_embd=30, n_head=4), 'n_embd=30 is not divisible by n_head=4; n_embd=.*would do'),
    (dict(vocab_size=100), 'vocab_size=100 is smaller than the 257 ids of the tokenizer of tiny'),
    (dict(init_from='resume'), 'holds no checkpoint; start with --init_from=scratch'),
    (dict(init_from='nowhere'), "init_from='nowhere' is not scratch, resume or gpt2.*no such file"),
    (dict(init_from='gpt2-huge'), "init_from='gpt2-huge' is not one of gpt2, gpt2-medium"),
    (dict(dataset='../tiny'), r"dataset='\.\./tiny' must be a name below data_dir"),
    (dict(device='tpu'), "device='tpu' is not one of"),
    (dict(keep_last=1), 'keep_last=1 must be at least 2'),
    (dict(embed_lr=0.1), "embed_lr=0.1 acts under optimizer='muon' only"),
    (dict(eval_interval=0), 'eval_interval=0 must be at least 1'),
    (dict(beta2=1.0), 'beta2=1.0 must be at least 0 and below 1'),
    (dict(decay_fraction=0), 'decay_fraction=0.0 must be above 0'),
    (dict(weight_decay=-1), 'weight_decay=-1.0 must not be negative'),
])
def test_settings_that_cannot_work(train_tiny, tmp_path, settings, match):
    """And no folder is left behind."""
    assert re.search(match, error_of(train_tiny, **settings))
    assert not (tmp_path / 'out').exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_cuda_that_is_not_there(train_tiny):
    assert re.search("device='cuda' was asked for, but .*--device=cpu", error_of(train_tiny, device='cuda'))


@pytest.mark.skipif(importlib.util.find_spec('wandb') is not None, reason='wandb is installed')
def test_wandb_that_is_not_installed(train_tiny):
    assert 'pip install wandb' in error_of(train_tiny, wandb_log=True)


def test_bfloat16_that_is_emulated(monkeypatch):
    """Asked for by name it is refused; auto takes float16 with the reason."""
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'V100')
    with pytest.raises(ValueError, match=r'dtype=bfloat16 was asked for, but V100.*--dtype=float16'):
        choose_dtype('bfloat16', torch.device('cuda'))
    assert choose_dtype('auto', torch.device('cuda'))[0] == torch.float16


def test_compile_that_cannot_be_had(train_tiny, monkeypatch, capsys):
    """By name an error; auto goes on without and says why."""
    monkeypatch.setattr('hotloop.device.try_compile', lambda device: 'no C++ compiler')
    assert re.search('compile=True was asked for, but .*no C.. compiler; use --compile=False',
                     error_of(train_tiny, compile=True))
    assert train_tiny(compile='auto', max_iters=1) == 0
    assert 'compile: off (no C++ compiler)' in capsys.readouterr().out


def test_processes_that_cannot_work(train_tiny, monkeypatch):
    """nccl on CPUs, and a batch that two processes cannot share."""
    for name, value in (('WORLD_SIZE', '2'), ('RANK', '0'), ('LOCAL_RANK', '0'), ('LOCAL_WORLD_SIZE', '2')):
        monkeypatch.setenv(name, value)
    assert re.search('backend=nccl works between GPUs, and the device is cpu; use --backend=gloo',
                     error_of(train_tiny, backend='nccl'))
    monkeypatch.setattr('hotloop.distributed.open_process_group', lambda *args: None)
    monkeypatch.setattr(train.dist, 'destroy_process_group', lambda: None)
    assert re.search('= 5 sequences cannot be shared equally by 2 processes; 4 or 6 could',
                     error_of(train_tiny, batch_size=5, gradient_accumulation_steps=1))


# -----------------------------------------------------------------------------
# whole processes

def command_line(tmp_path, data_dir, out, **settings):
    flags = {**TINY, 'data_dir': data_dir, **settings, 'out_dir': tmp_path / out}
    return [ROOT / 'train.py', *(f'--{k}={v}' for k, v in flags.items())]


@pytest.mark.slow
@pytest.mark.parametrize('processes', [2, 8])
def test_torchrun_trains_as_one_process_does(train_tiny, tmp_path, data_dir, processes):
    """The same losses within rounding, one log and one set of checkpoints; it resumes on one process."""
    recipe = dict(batch_size=4, gradient_accumulation_steps=4, **RECIPES[1])
    train_tiny('one', **recipe)
    torchrun(processes, *command_line(tmp_path, data_dir, 'many', **recipe))
    for name in ('loss', 'val_loss'):
        one, many = ([json.loads(line)[name] for line in log(tmp_path / out, 'step', name)] for out in ('one', 'many'))
        assert len(one) == len(many) > 2 and many == pytest.approx(one, rel=1e-4)
    assert train_tiny('many', init_from='resume', max_iters=12) == 0
    assert load(tmp_path / 'many' / 'ckpt.pt')['iter_num'] == 12


@pytest.mark.slow
def test_a_compiled_run_is_the_same_run(train_tiny, tmp_path, monkeypatch):
    """Within rounding of an eager one; it resumes to its own bits, and its checkpoints carry no compiler's names."""
    if sentence := try_compile(torch.device('cpu')):
        pytest.skip(sentence)
    recipe = dict(max_iters=8)
    train_tiny('eager', **recipe)
    train_tiny('whole', compile=True, **recipe)
    interrupted(train_tiny, monkeypatch, 'parts', 5, compile=True, **recipe)
    train_tiny('parts', init_from='resume', compile=True, **recipe)
    assert same(final(tmp_path / 'parts'), final(tmp_path / 'whole'))
    for name, weight in load(tmp_path / 'eager' / 'ckpt.pt')['model'].items():
        assert torch.allclose(load(tmp_path / 'whole' / 'ckpt.pt')['model'][name], weight, atol=1e-3), name


@pytest.mark.slow
def test_torchrun_stops_and_resumes(tmp_path, data_dir):
    """SIGTERM to the launcher reaches both processes: they save at one step, and the resumed run has the same bits."""
    recipe = dict(max_iters=400, eval_interval=1000, dropout=0.1, learning_rate=1e-3, min_lr=1e-4)
    torchrun(2, *command_line(tmp_path, data_dir, 'whole', **recipe))
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               *map(str, command_line(tmp_path, data_dir, 'parts', **recipe))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        for line in process.stdout:
            if line.startswith('step 20/'):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
    assert process.returncode != 0
    assert 20 <= load(tmp_path / 'parts' / 'ckpt.pt')['iter_num'] < 400
    torchrun(2, *command_line(tmp_path, data_dir, 'parts', init_from='resume', **recipe))
    assert same(final(tmp_path / 'parts')['model'], final(tmp_path / 'whole')['model'])


@pytest.mark.slow
@pytest.mark.parametrize('number, code', [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_exit_codes_of_the_program(tmp_path, data_dir, number, code):
    """A real process, stopped in the middle, has saved and says how to go on."""
    command = [sys.executable, *map(str, command_line(tmp_path, data_dir, 'out', max_iters=10**6, eval_interval=10**6))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith('step 20/'):
                process.send_signal(number)
                break
        rest = process.stdout.read()
    assert process.returncode == code
    step = int(re.search(r'stopped at step (\d+) and saved', rest)[1])
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == step >= 20


@pytest.mark.slow
def test_a_mistake_is_one_line_and_status_1(tmp_path, data_dir):
    """No traceback for what a user can cause."""
    command = [sys.executable, *map(str, command_line(tmp_path, data_dir, 'out', n_layers=3))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: --n_layers: unknown setting 'n_layers'; did you mean 'n_layer'?\n"
