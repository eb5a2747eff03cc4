"""Laws of training: the step, its gradient on any number of processes, the schedule, saves, settings."""

import importlib.util
import itertools
import math
import os
import pickle
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    WITH_BITSANDBYTES,
    contents,
    error_of,
    load,
    noise,
    rows,
    same,
    scripted_losses,
    stop_at,
    write_bins,
)

import train
from hotloop.data.dataset import read_meta
from hotloop.system.distributed import Env, open_process_group
from hotloop.training.checkpoint import Checkpoints
from hotloop.training.dataloader import Batches, Split
from hotloop.training.optim import build_optimizers
from model import GPT, GPTConfig
from train import TrainConfig

no_scaler = torch.amp.GradScaler('cpu', enabled=False)


def tiny_gpt(seed=0, **settings):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**dict(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=32, **settings)))


# -----------------------------------------------------------------------------
# the step

def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def first_step(folder, cfg, env, optimizers=(), model=None, step=0):
    """The StepResult of one step of a tiny model on a dataset."""
    data = Batches(Split(folder, 'train', read_meta(folder), 16), cfg, env).step(step)
    return train.train_step(model, data, optimizers, no_scaler, cfg, env)


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize('shape', [(8, 2), (1, 16)])
def test_gradient_does_not_depend_on_how_the_batch_is_split(masked, shape):
    """Micro-batches with unequal masks weigh by their targets: the mean over all targets, in one piece."""
    split = Split(masked, 'train', read_meta(masked), 16)
    batches = Batches(split, TrainConfig(batch_size=16, gradient_accumulation_steps=1), Env())
    x, y, _ = batches.step(3)[1][0]()
    model = tiny_gpt(preset='modern', zero_init=False)
    loss = model(x, y).sum()
    (loss / (y >= 0).sum()).backward()
    expected = gradient_of(model)
    model.zero_grad()
    cfg = TrainConfig(batch_size=shape[0], gradient_accumulation_steps=shape[1], grad_clip=0.0)
    found = first_step(masked, cfg, Env(), model=model, step=3)
    assert distance(gradient_of(model), expected) < 1e-6
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_gradients_are_clipped_to_the_norm_that_is_reported(masked):
    """The reported norm is the one before clipping; a shorter gradient is not changed."""
    model = tiny_gpt()

    def norm(clip):
        for p in model.parameters():
            p.grad = None
        cfg = TrainConfig(batch_size=4, gradient_accumulation_steps=2, grad_clip=clip)
        return first_step(masked, cfg, Env(), model=model).norm.item()
    full = norm(0.0)
    assert full == pytest.approx(gradient_of(model).norm().item(), rel=1e-6)
    assert norm(full / 3) == pytest.approx(full, rel=1e-6)
    assert gradient_of(model).norm().item() == pytest.approx(full / 3, rel=1e-4)
    norm(full * 3)
    assert gradient_of(model).norm().item() == pytest.approx(full, rel=1e-6)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon', pytest.param('adamw8bit', marks=WITH_BITSANDBYTES)])
@pytest.mark.parametrize('where', ['loss', 'gradient'])
def test_a_step_that_is_not_finite_changes_nothing(masked, optimizer, where):
    """Neither weights nor optimizer state."""
    cfg = TrainConfig(batch_size=4, gradient_accumulation_steps=2, optimizer=optimizer)
    model = tiny_gpt(preset='modern', zero_init=False)  # zeros would hide Muon's update
    optimizers, broken = build_optimizers(model, cfg, Env()), []

    def spoil_gradient(gradient):
        return gradient * math.inf if broken and where == 'gradient' else gradient
    model.transformer.h[1].mlp.c_fc.weight.register_hook(spoil_gradient)

    def spoil_loss(module, args, loss):
        return loss * math.nan if broken and where == 'loss' else loss
    model.register_forward_hook(spoil_loss)

    def everything():
        return [model.state_dict(), [o.state_dict()['state'] for o in optimizers]]
    assert first_step(masked, cfg, Env(), optimizers, model).skipped.item() == 0
    before = pickle.dumps(everything())
    broken.append(True)
    assert first_step(masked, cfg, Env(), optimizers, model, step=1).skipped.item() == 1
    assert same(everything(), pickle.loads(before))
    broken.clear()
    assert first_step(masked, cfg, Env(), optimizers, model, step=2).skipped.item() == 0
    assert not same(everything(), pickle.loads(before))


def test_a_bf16_step_is_near_the_float32_step(masked):
    """Weights and gradients stay float32; the gradient is right within bf16's rounding."""
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_gpt()
        model.compute_dtype = dtype
        first_step(masked, TrainConfig(batch_size=8, gradient_accumulation_steps=1, grad_clip=0), Env(),
                   model=model)
        gradients.append(gradient_of(model))
    assert gradients[1].dtype == torch.float32 and 0 < distance(*gradients) < 0.02


# -----------------------------------------------------------------------------
# evaluations and saves leave the run alone

def test_evaluations_do_not_disturb_training(train_tiny, tmp_path):
    """With dropout, the weights are the same bits."""
    for out, interval in (('never', 100), ('often', 1)):
        train_tiny(out, dropout=0.1, max_iters=4, eval_interval=interval, optimizer='muon', preset='modern')
    never, often = load(tmp_path / 'never' / 'ckpt.pt'), load(tmp_path / 'often' / 'ckpt.pt')
    for part in ('model', 'optimizer', 'muon'):
        assert same(often[part], never[part])


@pytest.mark.parametrize('always, steps', [(True, [2, 4, 6, 8, 10]), (False, [2, 4, 10])])
def test_which_evaluations_save(train_tiny, tmp_path, monkeypatch, always, steps):
    """
    best.pt when the loss improves, never for a worse one, as in nanoGPT, or NaN. ckpt.pt always, or with
    always_save_checkpoint=False after improvements and at the end.
    """
    saved, save = [], Checkpoints.save

    def count(self, checkpoint, best, final=False):
        saved.append(checkpoint['iter_num'])
        save(self, checkpoint, best, final)
    monkeypatch.setattr(Checkpoints, 'save', count)
    scripted_losses(monkeypatch, 5.0, 3.0, math.nan, 4.0, 3.5)
    train_tiny(eval_interval=2, always_save_checkpoint=always)
    assert saved == steps
    best, last = load(tmp_path / 'out' / 'best.pt'), load(tmp_path / 'out' / 'ckpt.pt')
    assert best['iter_num'] == 4 and best['best_val_loss'] == last['best_val_loss'] == 3.0
    assert not {'optimizer', 'scaler', 'state'} & best.keys()


def test_an_evaluation_that_was_given_up_is_done_by_the_next_process(train_tiny, tmp_path, monkeypatch):
    """As after a signal to another process: nothing is trained before it."""
    with monkeypatch.context() as m:
        m.setattr(train, 'evaluate_both', lambda *args: None)
        train_tiny()
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 4
    train_tiny(init_from='resume')
    assert [row['step'] for row in rows(tmp_path / 'out', 'val_loss')] == [4, 8, 10]


@pytest.mark.parametrize('name, call, step', [('train_step', 6, 5), ('evaluate_both', 2, 8)])
def test_a_signal_that_also_ends_the_compiler_saves_and_stops(train_tiny, tmp_path, monkeypatch, name, call,
                                                              step):
    """Ctrl-C reaches the processes of Inductor, too. Without a signal their failure is an error."""
    function, calls = getattr(train, name), itertools.count(1)

    def failing(*args):
        if next(calls) == call:
            if comes:
                os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError('the compiler was killed')
        return function(*args)
    monkeypatch.setattr(train, name, failing)
    comes = False
    with pytest.raises(RuntimeError, match='was killed'):
        train_tiny()
    comes, calls = True, itertools.count(1)
    assert train_tiny() == 143
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == step


# -----------------------------------------------------------------------------
# steps that are not finite, in a run

def nan_at(monkeypatch, *micro_batches):
    """Makes the loss of these training micro-batches, counted from 0, NaN."""
    forward, count = GPT.forward, itertools.count()

    def broken(self, idx, targets=None, cache=None):
        loss = forward(self, idx, targets, cache)
        return loss * math.nan if self.training and next(count) in micro_batches else loss
    monkeypatch.setattr(GPT, 'forward', broken)


def test_a_skipped_step_never_enters_the_average(train_tiny, tmp_path, monkeypatch):
    """Step 3 of 6 is skipped: its line has no loss, and the mean over steps 2 and 3 is that of 2."""
    for out, interval in (('single', 1), ('average', 3)):
        with monkeypatch.context() as m:
            nan_at(m, 4)
            train_tiny(out, max_iters=6, log_interval=interval, eval_interval=100)
    losses = {row['step']: row.get('loss') for row in rows(tmp_path / 'single', 'lr')}
    _, third, sixth = rows(tmp_path / 'average', 'lr')
    assert losses[3] is None and third['skipped'] == 1
    assert third['loss'] == pytest.approx(losses[2], rel=1e-12)
    assert sixth['loss'] == pytest.approx((losses[4] + losses[5] + losses[6]) / 3, rel=1e-12)


def test_too_many_steps_that_are_not_finite_end_the_run(train_tiny, tmp_path, monkeypatch):
    """One good step resets the count; no checkpoint is saved during bad steps, and the last one is finite."""
    monkeypatch.setattr('hotloop.training.logger.MAX_BAD_STEPS', 3)
    with monkeypatch.context() as m:
        nan_at(m, 2, 4, *range(8, 100))  # steps 2, 3 and from 5 on
        message = error_of(train_tiny, max_iters=50, save_minutes=0)
    assert re.search('step 7: loss or gradients were not finite for 3 .*Lower the learning rate', message)
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    assert checkpoint['iter_num'] == 4 and all(v.isfinite().all() for v in checkpoint['model'].values())
    monkeypatch.setattr('hotloop.training.logger.MAX_BAD_STEPS', 99)
    with monkeypatch.context() as m:  # nor is one that is stopped after them
        nan_at(m, *range(100))
        stop_at(m, 12)
        assert 'not finite for 12 steps' in error_of(train_tiny, init_from='resume', max_iters=50)
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 4
    monkeypatch.setattr('hotloop.training.logger.MAX_BAD_STEPS', 3)
    nan_at(monkeypatch, *range(100))
    words = 'step 3: .*float16, try bfloat16 or float32. No step is saved'
    assert re.search(words, error_of(train_tiny, dtype='float16'))


# -----------------------------------------------------------------------------
# settings, commands, processes

def test_init_from_a_path_starts_at_step_0_with_those_weights(train_tiny, tmp_path):
    """A folder (best.pt first) or a file; learning rate 0 shows what was loaded, without its dropout."""
    train_tiny('base', max_iters=2, dropout=0.5)
    for number, source in enumerate(('base', 'base/ckpt.pt')):
        train_tiny(f'tuned{number}', init_from=tmp_path / source, max_iters=1, learning_rate=1e-30, min_lr=0)
        tuned = load(tmp_path / f'tuned{number}' / 'ckpt.pt')
        base = load(tmp_path / ('base/ckpt.pt' if number else 'base/best.pt'))
        assert tuned['iter_num'] == 1 and same(tuned['model'], base['model'])
        assert tuned['config']['dropout'] == 0.0
    torch.save(load(tmp_path / 'base' / 'best.pt') | {'template': 'chatml'}, tmp_path / 'base' / 'best.pt')
    train_tiny('short', init_from=tmp_path / 'base', block_size=8, max_iters=1)
    short = load(tmp_path / 'short' / 'ckpt.pt')
    assert short['model']['transformer.wpe.weight'].shape == (8, 32)
    assert short['template'] == 'chatml'  # texts leave it


def test_init_from_a_path_names_contradictions(train_tiny, tmp_path):
    train_tiny('base', max_iters=1)
    write_bins(tmp_path / 'data' / 'chars', noise(100, low=0, high=3), noise(100, low=0, high=3),
               vocab_size=3, tokenizer={'kind': 'char', 'chars': 'abc', 'eot': False})
    for settings, match in ((dict(n_layer=3), '--n_layer: n_layer=3, but .*base has 2; use --n_layer=2$'),
                            (dict(preset='modern'), "preset='modern', but .* has 'gpt2'; use --preset=gpt2$"),
                            (dict(block_size=32), 'block_size=32, .* 16; use --block_size=16 or less'),
                            (dict(dataset='chars', data_dir=tmp_path / 'data'),
                             r'the tokenizers of .*base and of dataset=chars differ')):
        assert re.search(match, error_of(train_tiny, 'tuned', init_from=tmp_path / 'base', **settings))
    assert not (tmp_path / 'tuned').exists()


def test_eval_only_writes_nothing(train_tiny, tmp_path, capsys):
    """nanoGPT trains and overwrites its checkpoint when resumed with eval_only."""
    train_tiny(max_iters=4)
    loss = re.findall(r'val loss [\d.]+', capsys.readouterr().out)[-1]
    before = contents(tmp_path)
    for out, source in (('out', 'resume'), ('new', tmp_path / 'out'), ('new', 'scratch')):
        assert train_tiny(out, eval_only=True, init_from=source) == 0
        assert contents(tmp_path) == before
        printed = capsys.readouterr().out
        assert (f'step 4: {loss}' in printed) == (source != 'scratch')
        assert ('these weights are new' in printed) == (source == 'scratch')
        assert 'step 0' not in printed and 'run: ' not in printed


@pytest.mark.parametrize('settings, match', [
    (dict(vocab_size=100), 'vocab_size=100 is smaller than the 257 ids of the tokenizer of tiny'),
    (dict(init_from='resume'), 'holds no checkpoint; start with --init_from=scratch'),
    (dict(resume=True, eval_only=True), 'holds no checkpoint'),
    (dict(eval_interval=0), 'eval_interval=0'), (dict(ortho_penalty=0.1), r'ortho_penalty=0\.1 applies only'),
    (dict(multi_token=0.5, loss_chunks=4), r'multi_token=0\.5 .*loss_chunks=4'),
    (dict(time_budget=1, lr_decay_iters=10), 'lr_decay_iters=10 contradicts time_budget'),
    (dict(time_budget=1, decay_lr=False), 'decay_lr=False contradicts time_budget; .*--decay_lr=True'),
    (dict(muon_lr=0.1), "--muon_lr has no effect with optimizer='adamw'"),
    (dict(decay_fraction=0.1), "--decay_fraction has no effect with lr_schedule='cosine'"),
    (dict(time_budget=1, lr_schedule='cosine'), "lr_schedule='cosine' contradicts"),
    (dict(time_budget=1, max_iters=600000, warmup_iters=0.1), 'warmup_iters=0.1 is a fraction'),
    (dict(decay_fraction=0), 'decay_fraction=0.0'), (dict(save_minutes=-1), 'save_minutes=-1.0'),
    (dict(beta2=1), 'beta2=1.0'), (dict(init_from='resum'), "did you mean 'resume'"),
    pytest.param(dict(wandb_log=True), 'pip install wandb', marks=pytest.mark.skipif(
        importlib.util.find_spec('wandb') is not None, reason='wandb is installed'))])
def test_settings_that_cannot_work(train_tiny, tmp_path, settings, match):
    """And no folder is left behind."""
    assert re.search(match, error_of(train_tiny, **settings))
    assert not (tmp_path / 'out').exists()


def test_masks_that_a_gpu_cannot_have(monkeypatch):
    monkeypatch.setattr(train, 'try_compile', lambda device: 'no compiler')
    gpu, packed = Env(device=torch.device('cuda')), TrainConfig(pack_rows=True)
    for settings, words in ((dict(dropout=0.1), r'dropout=0\.1 cannot .*--dropout=0'), ({}, 'no compiler')):
        assert re.search(words, error_of(train.check_masks, GPTConfig(**settings).resolved(), packed, gpu))
    train.check_masks(GPTConfig(mixer='conv').resolved(), packed, gpu)
    train.check_masks(GPTConfig(dropout=0.1).resolved(), packed, Env())


def test_processes_that_cannot_work(train_tiny, monkeypatch):
    """Refused before they wait for each other."""
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert 'backend=nccl needs GPUs' in error_of(train_tiny, backend='nccl')
    assert 'an Apple GPU trains in one process' in error_of(open_process_group, 'auto', torch.device('mps'))
    error = error_of(train_tiny, batch_size=5, gradient_accumulation_steps=1)
    assert re.search('= 5 sequences .* 2 processes, such as 6', error)


@pytest.mark.parametrize('what, error, words', [
    ('build_model', RuntimeError("DefaultCPUAllocator: can't allocate memory"),
     'the model does not fit in the memory of'),
    ('train', MemoryError('Unable to allocate 29.8 GiB'), 'a micro-batch of 4 sequences of 16 tokens does')])
def test_what_does_not_fit_the_memory_is_named(train_tiny, monkeypatch, what, error, words):
    def fail(*_):
        raise error
    monkeypatch.setattr(train, what, fail)
    assert words in error_of(train_tiny)


def test_auto_batch_keeps_the_sequences_of_a_step(train_tiny, tmp_path, capsys, monkeypatch):
    """It changes the micro-batch alone; the settings stay."""
    monkeypatch.setattr(train, 'choose_batch_size', lambda *args: 12)  # which tries on GPUs alone
    train_tiny('plain', batch_size=4, gradient_accumulation_steps=3, max_iters=2)
    train_tiny(batch_size=4, gradient_accumulation_steps=3, max_iters=2, auto_batch=True)
    assert '12 sequences x 1 micro-batch ' in capsys.readouterr().out
    plain, auto = (load(tmp_path / out / 'ckpt.pt') for out in ('plain', 'out'))
    assert auto['config']['batch_size'] == 4 and auto['config']['auto_batch']
    for name, weight in plain['model'].items():
        torch.testing.assert_close(auto['model'][name], weight, atol=1e-5, rtol=0)


def test_restarts_by_torchrun_need_resume(train_tiny, monkeypatch):
    monkeypatch.setenv('TORCHELASTIC_MAX_RESTARTS', '3')
    assert '--resume' in error_of(train_tiny)


def python(*command, **flags):
    """Runs a script in a Python of its own; returns what it printed."""
    command = [sys.executable, *command, *(f'--{k}={v}' for k, v in flags.items())]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '1'}, timeout=300,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_benches_of_the_step_run(tmp_path, data_dir):
    """And the profiler, which leaves no run behind."""
    assert 'ours' in python('tests/bench/step_speed.py', steps=2, rounds=1, compile='off')
    flags = {**TINY, 'data_dir': data_dir, 'out_dir': tmp_path / 'out'}
    assert 'ms per step without the profiler' in python('tests/bench/profile_step.py', **flags)
    assert os.listdir(tmp_path / 'out') == ['trace.json']
