"""Against nanoGPT itself, if NANOGPT names a clone of it: weights, text, checkpoints and config files."""

import ast
import contextlib
import dataclasses
import os
import runpy
import time
from pathlib import Path

import bench
import pytest
import torch

from configurator import configure
from hotloop.inference.generate import Sampling, generate
from hotloop.training.checkpoint import load_checkpoint, save_checkpoint
from model import GPT, GPTConfig
from train import TrainConfig

CLONE = os.environ.get('NANOGPT', '')
pytestmark = pytest.mark.skipif(not os.path.exists(os.path.join(CLONE or '/nowhere', 'model.py')),
                                reason='NANOGPT does not name a clone of karpathy/nanoGPT')
SHAPE = dict(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32, dropout=0.0)


@pytest.fixture(scope='module')
def nanogpt():
    return bench.nanogpt(CLONE)


@pytest.mark.parametrize('bias', [False, True])
def test_each_reads_the_other_ones_checkpoint(nanogpt, tmp_path, bias):
    """Greedy text agrees token for token until the context is full; then ours slides in larger steps."""
    torch.manual_seed(0)
    theirs = nanogpt.GPT(nanogpt.GPTConfig(**SHAPE, bias=bias))
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.2)
    optimizer = theirs.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    theirs(*[torch.zeros(1, 4, dtype=torch.long)] * 2)[1].backward()
    optimizer.step()
    theirs.eval()
    torch.save({'model': theirs.state_dict(), 'optimizer': optimizer.state_dict(), 'iter_num': 1,
                'model_args': SHAPE | {'bias': bias}, 'best_val_loss': torch.tensor(3.0),
                'config': {'dataset': 'shakespeare_char'}}, tmp_path / 'ckpt.pt')
    checkpoint = load_checkpoint(str(tmp_path / 'ckpt.pt'))
    ours = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model']).eval()
    x, y = torch.randint(65, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    expected = theirs(x)[0][:, -1]
    assert (ours(x) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert ours(x, y).sum().item() / y.numel() == pytest.approx(theirs(x, y)[1].item(), rel=1e-6)
    steps = list(generate(ours, x[:, :3].tolist(), Sampling(14, temperature=0)))
    text = [[token for sequence, token, _ in step] for step in steps]
    assert torch.tensor(text).T.tolist() == theirs.generate(x[:, :3], 14, top_k=1)[:, 3:].tolist()
    ours = {'model': ours.state_dict(), 'model_args': ours.config.model_args()}
    save_checkpoint(str(tmp_path / 'ours.pt'), ours)
    checkpoint = torch.load(tmp_path / 'ours.pt')
    again = nanogpt.GPT(nanogpt.GPTConfig(**checkpoint['model_args'])).eval()
    again.load_state_dict(checkpoint['model'])
    assert torch.equal(again(x)[0], theirs(x)[0])


def defaults():
    """{name: value} of the settings at the top of nanoGPT's train.py."""
    found = {}
    for node in ast.parse(Path(CLONE, 'train.py').read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == 'config_keys':  # the settings end here
                break
            with contextlib.suppress(NameError):  # the default of dtype needs torch
                found[node.targets[0].id] = eval(ast.unparse(node.value), {})
    return found


@pytest.mark.parametrize('name', ['train_gpt2', 'finetune_shakespeare', 'eval_gpt2',
                                  'train_shakespeare_char'])
def test_their_config_files_mean_the_same(monkeypatch, name):
    """Every value that a file sets, and every default that training depends on."""
    monkeypatch.setattr(time, 'time', lambda: 1700000000.0)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: name)  # train_gpt2.py asks for wandb
    path = str(Path(CLONE, 'config', f'{name}.py'))
    found = configure(GPTConfig, TrainConfig, argv=[path])
    model_cfg, cfg = found.objects
    given = found.given
    ours = {**dataclasses.asdict(model_cfg), **dataclasses.asdict(cfg)}
    file = {k: v for k, v in runpy.run_path(path).items() if not k.startswith('__') and k != 'time'}
    assert set(file) == set(given) and {k: ours[k] for k in file} == file
    # ours differ on purpose: auto, or None for max_iters and for all of the split
    free = {'device', 'dtype', 'compile', 'backend', 'eval_iters', 'lr_decay_iters', 'wandb_project',
            'wandb_run_name'}
    theirs = {k: v for k, v in defaults().items() if k not in given and k not in free}
    assert {k: ours[k] for k in theirs} == theirs and 'learning_rate' in {*theirs, *file}
