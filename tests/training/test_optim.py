"""Which parameter is updated by what, and what an update of Muon is."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import load, same

from hotloop.system.distributed import Env
from hotloop.training.optim import build_optimizers
from model import GPT, GPTConfig

SWIGLU = dict(preset='modern', mlp='swiglu', n_kv_head=2)


def config(optimizer='adamw', weight_decay=0.5, embed_lr=None):
    return SimpleNamespace(optimizer=optimizer, learning_rate=0.1, weight_decay=weight_decay, beta1=0.9,
                           beta2=0.95, muon_lr=1.0, muon_momentum=0.95, embed_lr=embed_lr)


def make(**settings):
    """A small model with random weights and gradients, none of them zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_embd=32, **settings))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
        p.grad = torch.randn_like(p)
    return model


def test_decay_is_for_matrices_and_embeddings_only():
    """With gradients of zero AdamW shrinks those by lr x weight_decay, and vectors not at all."""
    model = make(bias=True)
    before = copy.deepcopy(model)
    [adamw] = build_optimizers(model, config(), Env())
    for p in model.parameters():
        p.grad.zero_()
    adamw.step()
    for p, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(p, old * (0.95 if p.dim() >= 2 else 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize('settings, expected', [
    (dict(preset='modern'), [(0.3, 0.0)]), (dict(preset='qwen3'), [(0.1, 0.5)]),
    (dict(preset='modern', tie=True), [(0.1, 0.5)]),
    (dict(preset='modern', bigram_rows=100, value_embed=True), [(0.3, 0.0), (0.3, 0.5)])])
def test_the_rate_and_the_decay_of_embeddings(settings, expected):
    """
    Their own rate is for those that are normalized and not the head, which then do not decay. Tables of pairs
    and values learn as the embedding does, but decay.
    """
    model = make(**settings)
    groups = build_optimizers(model, config('muon', embed_lr=0.3), Env())[0].param_groups[2:]
    assert [(group['peak'], group['weight_decay']) for group in groups] == expected
    names = {p: name.split('.')[-2] for name, p in model.named_parameters()}
    if len(groups) > 1:
        assert [names[p] for p in groups[1]['params']] == ['bigrams', 'value_embed', 'value_embed']


@pytest.mark.parametrize('settings', [{}, SWIGLU])
@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_every_parameter_is_in_one_group(settings, optimizer):
    """Muon has the matrices of blocks; a tied embedding is one parameter."""
    model = make(**settings)
    optimizers = build_optimizers(model, config(optimizer=optimizer), Env())
    groups = [group for o in optimizers for group in o.param_groups]
    assert sorted(id(p) for g in groups for p in g['params']) == sorted(map(id, model.parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    if optimizer == 'muon':
        kinds = {names[id(p)].split('.')[-2] for p in groups[-1]['params']}
        assert kinds == {'c_attn', 'c_proj', 'c_fc'} and len(groups[-1]['params']) == 8


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_muon_moves_every_matrix_of_a_block_by_an_orthogonal_one(dtype):
    """Queries, keys and values each by their own, up and gate too; tall ones by a larger one."""
    model, before = make(**SWIGLU), make(**SWIGLU).state_dict()
    *_, muon = build_optimizers(model, config(optimizer='muon', weight_decay=0.0), Env(dtype=dtype))
    muon.step()
    update = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    for block in ('transformer.h.0.', 'transformer.h.1.'):
        qkv = update[block + 'attn.c_attn.weight'].split((32, 16, 16))
        parts = [*qkv, update[block + 'attn.c_proj.weight'],
                 *update[block + 'mlp.c_fc.weight'].chunk(2), update[block + 'mlp.c_proj.weight']]
        for part in parts:
            values = torch.linalg.svdvals(part) / max(1.0, part.size(0) / part.size(1)) ** 0.5
            assert values.max() < 1.25 and values.median() > 0.8, part.shape
    assert not update['lm_head.weight'].any() and not update['transformer.wte.weight'].any()


# -----------------------------------------------------------------------------
# adamw8bit

@pytest.mark.slow
def test_a_run_with_8_bit_moments_resumes_with_the_same_bits(train_tiny, tmp_path):
    """Its checkpoint is smaller than AdamW's."""
    pytest.importorskip('bitsandbytes')
    settings = dict(optimizer='adamw8bit', dropout=0.1, n_embd=64)
    assert train_tiny('complete', max_iters=6, **settings) == 0
    train_tiny('adamw', max_iters=6, **settings | {'optimizer': 'adamw'})
    assert train_tiny(max_iters=3, lr_decay_iters=6, **settings) == 0
    assert train_tiny(max_iters=6, init_from='resume', **settings) == 0
    complete, parts, adamw = (load(tmp_path / out / 'ckpt.pt') for out in ('complete', 'out', 'adamw'))
    assert same(complete['model'], parts['model']) and same(complete['optimizer'], parts['optimizer'])
    sizes = [(tmp_path / out / 'ckpt.pt').stat().st_size for out in ('complete', 'adamw')]
    assert sizes[0] < 0.65 * sizes[1]
    assert abs(complete['best_val_loss'] - adamw['best_val_loss']) < 0.05
