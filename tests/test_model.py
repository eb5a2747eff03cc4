"""The laws of the model: causality, cache, loss, counts, weights in and out, and Muon's update."""

import json
import math
import os
import shutil
import struct
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import train
from hotloop.checkpoint import load_checkpoint, save_checkpoint
from hotloop.device import choose_device, choose_dtype
from hotloop.distributed import Env
from hotloop.optim import build_optimizers, orthogonalize
from hotloop.pretrained import load_gpt2, read_safetensors
from hotloop.quantize import for_inference
from model import GPT, PRESETS, GPTConfig

SHAPES = {'gpt2': dict(preset='gpt2'), 'gpt2 with biases': dict(preset='gpt2', bias=True),
          'modern': dict(preset='modern'), 'swiglu, grouped': dict(preset='modern', mlp='swiglu', n_kv_head=2),
          'tied rope': dict(preset='gpt2', position='rope', softcap=5.0)}


def make(shape='gpt2', seed=0, **more):
    """A small model with every weight drawn anew, so that no zero or one hides a mistake."""
    settings = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_embd=32) | SHAPES.get(shape, {}) | more
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**settings)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def ids(*size, seed=0, vocab=61):
    return torch.randint(vocab, size, generator=torch.Generator().manual_seed(seed))


def every_logit(model, idx):
    """(B, T, V): what forward computes before it takes the last position."""
    kept = []
    hook = model.softcap.register_forward_hook(lambda module, args, out: kept.append(out))
    model(idx, idx)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize('shape', SHAPES)
def test_a_token_changes_later_outputs_and_no_earlier_one(shape):
    """The law that a project broke by giving attention (B, T, H, D): nothing ever looked back."""
    model, a = make(shape), ids(1, 12)
    for place in (0, 5, 11):
        b = a.clone()
        b[0, place] = (b[0, place] + 1) % 61
        moved = (every_logit(model, a) != every_logit(model, b)).any(-1)[0]
        assert not moved[:place].any() and moved[place:].all()


@pytest.mark.parametrize('shape', SHAPES)
def test_loss_is_the_cross_entropy_of_the_targets_that_count(shape):
    model, x, y = make(shape), ids(3, 16), ids(3, 16, seed=1)
    y[0, :5], y[2] = -1, -1
    expected = F.cross_entropy(every_logit(model, x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction='none')
    assert torch.allclose(model(x, y), expected.view(3, 16).sum(1)) and model(x, y)[2] == 0


def test_label_smoothing_acts_in_training_only():
    plain, smooth = make(), make(label_smoothing=0.2)
    x, y = ids(2, 16), ids(2, 16, seed=1)
    assert torch.equal(plain(x, y), smooth(x, y))
    assert not torch.allclose(plain.train()(x, y), smooth.train()(x, y))


def test_softcap_bounds_logits():
    model = make(softcap=3.0)
    model.lm_head.weight.data *= 100
    assert 2.9 < every_logit(model, ids(1, 16)).abs().max() <= 3.0


def test_gpt2_has_as_many_parameters_as_openais():
    with torch.device('meta'):
        assert GPT(GPTConfig(vocab_size=50257, bias=True)).num_params() == 124_439_808


@pytest.mark.parametrize('shape', SHAPES)
def test_flops_equal_what_a_counter_counts(shape):
    """The counter sees the matmuls; on the CPU attention is one kernel that it does not, so it is added by hand."""
    model, x = make(shape).train(), ids(2, 16)
    with FlopCounterMode(display=False) as counter:
        model(x, x).sum().backward()
    matmuls = sum(n for op, n in counter.get_flop_counts()['Global'].items() if 'attention' not in str(op))
    pairs = 16 * 17 / 2  # of a query and a key it may see; 2 matmuls forward, 4 backward, 2 FLOP each, D a head
    attention = 2 * 2 * 6 * pairs * 32
    per_token = (matmuls / 2 / 16, attention * 1 / 16)
    assert model.flops_per_token(16) == pytest.approx(per_token[0] + per_token[1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a C++ compiler')
@pytest.mark.parametrize('shape', ['gpt2', 'modern'])
def test_compiled_equals_eager(shape):
    torch._dynamo.reset()
    model, x = make(shape).train(), ids(2, 16)
    grads = []
    for forward in (model, torch.compile(model, dynamic=False)):
        model.zero_grad()
        loss = forward(x, x).sum()
        loss.backward()
        grads.append(torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())]))
    assert (grads[0] - grads[1]).norm() < 1e-5 * grads[0].norm()


def test_bfloat16_is_close_and_positions_stay_exact():
    model, x = make('modern'), ids(2, 16)
    exact = model(x)
    for_inference(model, torch.device('cpu'), torch.bfloat16)
    assert model.cos.dtype == torch.float32 and model.transformer.wte.weight.dtype == torch.bfloat16
    assert 0 < (model(x) - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize('shape', SHAPES)
def test_a_shorter_context_computes_the_same(shape):
    model, x = make(shape), ids(1, 7)
    before = model(x)
    model.crop_block_size(8)
    assert torch.equal(before, model(x))


def test_blocks_start_as_the_identity_and_the_head_as_uniform():
    torch.manual_seed(0)
    model = GPT(GPTConfig(preset='modern', block_size=16, vocab_size=61, n_layer=2, n_head=4, n_embd=32))
    assert model(ids(2, 16), ids(2, 16)).tolist() == pytest.approx([16 * math.log(61)] * 2)


@pytest.mark.parametrize('settings, words', [
    (dict(n_embd=30, n_head=4), 'n_embd=30 is not divisible by n_head=4; n_embd=32'),
    (dict(n_head=4, n_embd=64, n_kv_head=3), 'n_kv_head=3'), (dict(n_layer=0), 'n_layer=0'),
    (dict(preset='modern', n_embd=12, n_head=4), 'is odd'), (dict(dropout=1.0), 'dropout=1.0'),
    (dict(softcap=-1.0), 'softcap=-1.0'), (dict(vocab_size=0), 'vocab_size=0'),
    (dict(preset='modern', block_size=10**400), 'at most')])
def test_settings_that_do_not_fit(settings, words):
    with pytest.raises(ValueError, match=words):
        GPT(GPTConfig(**{'vocab_size': 61, **settings}))


# -----------------------------------------------------------------------------
# checkpoints

def checkpoint(model, **more):
    return {'model': model.state_dict(), 'model_args': model.config.model_args(), 'iter_num': 1, **more}


def test_plain_shapes_have_nanogpts_seven_names_and_others_all():
    as_gpt2 = GPTConfig(**{**PRESETS['gpt2'], 'preset': 'modern', 'vocab_size': 61})
    assert as_gpt2.model_args()['preset'] == 'modern'  # or a resume under the same flags would contradict it
    seven = {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout'}
    assert set(make().config.model_args()) == set(make(dropout=0.1, label_smoothing=0.1).config.model_args()) == seven
    for other in (dict(mlp='gelu_tanh'), dict(preset='modern'), dict(n_ff=64), dict(tie=False), dict(softcap=15.0)):
        config = make(**other).config
        assert set(config.model_args()) > seven
        assert GPTConfig(**config.model_args()).resolved() == config


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('prefix', ['', '_orig_mod.', 'module.', '_orig_mod.module.', 'module._orig_mod.'])
def test_checkpoints_come_back_whatever_wrapped_the_model(tmp_path, shape, prefix):
    model, path = make(shape), str(tmp_path / 'c.pt')
    saved = checkpoint(model)
    save_checkpoint(path, {**saved, 'model': {prefix + k: v for k, v in saved['model'].items()}})
    loaded = load_checkpoint(path)
    again = GPT.from_checkpoint(loaded['model_args'], loaded['model']).eval()
    assert torch.equal(model(ids(1, 9)), again(ids(1, 9)))


def test_no_flipped_bit_is_ever_loaded_as_a_number(tmp_path):
    """torch.load alone lets nearly all of them through, which the same flips prove."""
    model, path = make(), str(tmp_path / 'c.pt')
    save_checkpoint(path, checkpoint(model))
    whole = open(path, 'rb').read()  # noqa: SIM115
    rng, caught, silent = np.random.default_rng(0), 0, 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        with open(path, 'wb') as f:
            f.write(damaged)
        try:
            loaded = load_checkpoint(path)['model']
            assert all(torch.equal(v, loaded[k]) for k, v in model.state_dict().items())
        except ValueError as e:
            caught += 1
            assert path in str(e)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try:
                naive = torch.load(path, weights_only=True)['model']
                silent += any(not torch.equal(v, naive[k]) for k, v in model.state_dict().items())
            except Exception:
                pass
    assert caught > 60 and silent > 60


@pytest.mark.parametrize('how', ['missing', 'empty', 'cut', 'folder', 'text', 'zip', 'other'])
def test_files_that_are_no_checkpoint(tmp_path, how):
    path = tmp_path / 'c.pt'
    save_checkpoint(str(path), checkpoint(make()))
    if how == 'cut':
        path.write_bytes(path.read_bytes()[:-500])
    elif how in ('empty', 'text'):
        path.write_bytes(b'' if how == 'empty' else b'<html>404</html>')
    elif how in ('missing', 'folder'):
        path.unlink()
        if how == 'folder':
            path.mkdir()
    elif how == 'zip':
        shutil.make_archive(str(tmp_path / 'x'), 'zip', tmp_path)
        os.replace(tmp_path / 'x.zip', path)
    else:
        torch.save({'weights': torch.ones(3)}, path)
    with pytest.raises(ValueError, match=r'c\.pt') as error:
        load_checkpoint(str(path))
    assert '\n' not in str(error.value)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_checkpoint_cannot_run_code(tmp_path):
    torch.save({**checkpoint(make()), 'x': Malicious(str(tmp_path / 'ran'))}, tmp_path / 'c.pt')
    with pytest.raises(ValueError, match='refused') as error:
        load_checkpoint(str(tmp_path / 'c.pt'))
    assert not (tmp_path / 'ran').exists() and 'weights_only' not in str(error.value)


@pytest.mark.parametrize('args, words', [(dict(n_layer=10**6), 'larger model'), (dict(vocab_size=10**9), 'larger'),
                                         (dict(moe=3), 'moe'), (dict(n_embd=64), 'not'), (dict(bias=True), 'missing')])
def test_model_args_that_do_not_fit_the_weights(args, words):
    model = make()
    with pytest.raises(ValueError, match=words):
        GPT.from_checkpoint({**model.config.model_args(), **args}, model.state_dict())


def test_weights_that_do_not_fit_are_named():
    model = make()
    state = dict(model.state_dict())
    state['extra'] = state.pop('transformer.wpe.weight')
    with pytest.raises(ValueError, match=r'transformer\.wpe\.weight is missing; extra is unknown'):
        model.load_weights(state)


@pytest.mark.parametrize('where', ['fsync', 'replace'])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, where):
    path, model = str(tmp_path / 'c.pt'), make()
    save_checkpoint(path, checkpoint(model))

    def full(*args):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, where, full)
    with pytest.raises(ValueError, match='MB are free'):
        save_checkpoint(path, checkpoint(make(seed=1)))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ['c.pt'] and torch.equal(load_checkpoint(path)['model']['lm_head.weight'],
                                                            model.lm_head.weight)


# -----------------------------------------------------------------------------
# other people's weights

def hugging_face(tmp_path, **save):
    """A random GPT-2 of transformers, none of its weights trivial, and the folder it saved itself to."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=32, vocab_size=61, bos_token_id=0,
                                     eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    theirs.save_pretrained(tmp_path, **save)
    return theirs, str(tmp_path)


@pytest.mark.parametrize('save', [{}, {'max_shard_size': '20KB'}])
def test_hugging_faces_gpt2_computes_the_same(tmp_path, save):
    """To 1e-5 of the largest logit, a bound that the other GELU breaks."""
    theirs, folder = hugging_face(tmp_path, **save)
    ours, x = load_gpt2(folder).eval(), ids(2, 32)
    expected = theirs(x).logits
    assert (every_logit(ours, x) - expected).abs().max() < 1e-5 * expected.abs().max()
    ours.config.mlp = 'gelu'
    erf = GPT.from_checkpoint(ours.config.model_args(), ours.state_dict()).eval()
    assert (every_logit(erf, x) - expected).abs().max() > 1e-5 * expected.abs().max()


def test_a_checkpoint_whose_tied_matrices_differ_is_refused():
    model = make()
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    GPT.from_checkpoint(model.config.model_args(), weights)  # a copy for each is as good as one for both
    weights['transformer.wte.weight'] += 1
    with pytest.raises(ValueError, match='embedding and head differ'):
        GPT.from_checkpoint(model.config.model_args(), weights)


def test_a_head_that_differs_from_tied_embeddings_is_taken(tmp_path):
    """As transformers does, which says so."""
    theirs, folder = hugging_face(tmp_path)
    ours, x = load_gpt2(folder).eval(), ids(2, 32)
    weights = read_safetensors(os.path.join(folder, 'model.safetensors'))
    head = torch.randn_like(theirs.transformer.wte.weight)
    package = pytest.importorskip('safetensors.torch')
    package.save_file({**weights, 'lm_head.weight': head}, os.path.join(folder, 'model.safetensors'))
    own = load_gpt2(folder).eval()
    assert ours.config.tie and not own.config.tie and torch.equal(own.lm_head.weight, head)
    assert not torch.allclose(every_logit(own, x), every_logit(ours, x))


@pytest.mark.parametrize('change, words', [(dict(model_type='llama'), 'llama'), (dict(n_embd=None), 'n_embd|not'),
                                           (dict(activation_function='relu'), 'relu'),
                                           (dict(scale_attn_by_inverse_layer_idx=True), 'scale_attn_by'),
                                           (dict(n_layer=3), 'missing|larger')])
def test_folders_that_cannot_be_read(tmp_path, change, words):
    _, folder = hugging_face(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps({k: v for k, v in {**config, **change}.items() if v is not None}))
    with pytest.raises(ValueError, match=words):
        load_gpt2(folder)


def test_every_kind_of_safetensors(tmp_path):
    package = pytest.importorskip('safetensors.torch')
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8, torch.bool)
    tensors = {str(k): torch.arange(6).view(2, 3).to(k) for k in kinds}
    tensors |= {'scalar': torch.tensor(2.5), 'empty': torch.empty(0, 3)}
    package.save_file(tensors, tmp_path / 'x.safetensors')
    read = read_safetensors(str(tmp_path / 'x.safetensors'))
    assert read.keys() == tensors.keys()
    for name, t in tensors.items():
        assert read[name].dtype == t.dtype and torch.equal(read[name], t), name


def test_damaged_safetensors_are_refused(tmp_path):
    entry = {'dtype': 'F32', 'shape': [2, 2], 'data_offsets': [0, 16]}
    path = tmp_path / 'x.safetensors'

    def write(header, data=bytes(16), length=None):
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack('<Q', len(raw) if length is None else length) + raw + data)
    write({'a': entry, 'empty': {**entry, 'shape': [0], 'data_offsets': [0, 0]}})
    assert [t.numel() for t in read_safetensors(str(path)).values()] == [0, 4]
    write({'a': entry})
    whole = path.read_bytes()
    assert read_safetensors(str(path))['a'].shape == (2, 2)
    cases = [lambda n=n: path.write_bytes(whole[:n]) for n in range(0, len(whole), 7)]
    cases += [lambda: write({'a': entry}, length=2**60), lambda: write(b'{"a": '), lambda: write(b'[1, 2]'),
              lambda: write(b'[' * 50000), lambda: write(b'\xff\xfe\xfd')]
    changes = [dict(shape=[3, 2]), dict(shape=[-2, -2]), dict(shape='xx'), dict(dtype='F31'),
               dict(data_offsets=[4, 20]), dict(data_offsets=[0]), dict(data_offsets=[-16, 0]), dict(shape=[2, 2.5])]
    cases += [lambda c=c: write({'a': {**entry, **c}}) for c in changes]
    cases += [lambda: write({'a': entry, 'b': entry}), lambda: write({'a': 3})]
    for i, damage in enumerate(cases):
        damage()
        try:
            read_safetensors(str(path))
        except ValueError as e:
            assert 'x.safetensors' in str(e)
        else:
            pytest.fail(f'case {i} was read')


@pytest.mark.parametrize('name', ['cuda', 'cuda:1', 'mps', 'tpu', ''])
def test_a_device_that_is_not_there_is_an_error(name):
    if name and getattr(torch, name.split(':')[0], None) and torch.get_device_module(name.split(':')[0]).is_available():
        pytest.skip('it is there')
    with pytest.raises(ValueError, match=f'device={name!r}'):
        choose_device(name)


def test_types_asked_for_are_taken():
    cpu = torch.device('cpu')
    assert choose_dtype('bfloat16', cpu)[0] == torch.bfloat16 and choose_dtype('auto', cpu)[0] == torch.float32


# -----------------------------------------------------------------------------
# Muon

@pytest.mark.parametrize('shape', [(64, 64), (32, 128)])
def test_orthogonalized_matrices_have_singular_values_near_1(shape):
    G = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    together = orthogonalize(G, torch.float32)
    values = torch.linalg.svdvals(together)
    # a square random matrix has a few that are next to nothing, which five iterations do not lift
    assert values.max() < 1.3 and values.quantile(0.05) > 0.6
    assert torch.linalg.svdvals(G / G.norm(dim=(1, 2), keepdim=True)).max() < 0.3
    one_by_one = torch.cat([orthogonalize(g[None], torch.float32) for g in G])
    assert torch.allclose(together, one_by_one, atol=1e-5)


def muon_update(model, world=1):
    """What one step of Muon adds to each parameter, at a learning rate of 1."""
    cfg = train.TrainConfig(optimizer='muon', muon_lr=1.0, weight_decay=0.0, learning_rate=0.0)
    *_, muon = build_optimizers(model, cfg, Env())
    muon.param_groups[0]['lr'] = 1.0
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    muon.step()
    return {n: before[n] - p.detach() for n, p in model.named_parameters()}, muon


def test_muon_moves_every_matrix_of_a_block_by_an_orthogonal_one():
    """Queries, keys and values each by their own, gate and up too; tall matrices grow by the root of their shape."""
    model = make('swiglu, grouped')
    model(ids(2, 16), ids(2, 16, seed=1)).sum().backward()
    update, _ = muon_update(model)
    for block in ('transformer.h.0.', 'transformer.h.1.'):
        parts = [*update[block + 'attn.c_attn.weight'].split((32, 16, 16)), update[block + 'attn.c_proj.weight'],
                 *update[block + 'mlp.c_fc.weight'].chunk(2), update[block + 'mlp.c_proj.weight']]
        for part in parts:
            values = torch.linalg.svdvals(part) / max(1.0, part.size(0) / part.size(1)) ** 0.5
            assert values.max() < 1.3 and values.median() > 0.6, part.shape
    assert not update['lm_head.weight'].any() and not update['transformer.wte.weight'].any()


def test_a_skipped_step_of_muon_changes_not_a_bit():
    model = make('modern')
    model(ids(2, 16), ids(2, 16)).sum().backward()
    _, muon = muon_update(model)
    before = [p.detach().clone() for p in model.parameters()]
    momenta = [s['momentum_buffer'].clone() for s in muon.state.values()]
    for p in model.parameters():
        p.grad.fill_(math.nan)
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert momenta and all(torch.equal(a, s['momentum_buffer'])
                           for a, s in zip(momenta, muon.state.values(), strict=True))


@pytest.mark.parametrize('settings', [{}, {'preset': 'modern'}, {'preset': 'modern', 'label_smoothing': 0.1}])
@pytest.mark.parametrize('chunks', [3, 48])
def test_a_loss_in_chunks_is_the_loss_and_has_its_gradients(settings, chunks):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=67, n_layer=2, n_embd=16, n_head=2, block_size=16, **settings))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    idx, targets = torch.randint(0, 67, (3, 16)), torch.randint(-1, 67, (3, 16))
    targets[0, 3:9] = -1
    found = []
    for model.loss_chunks in (1, chunks):
        model.zero_grad()
        loss = model(idx, targets).sum() * 0.01
        loss.backward()
        with torch.no_grad():
            found.append((loss.detach(), model(idx, targets), [p.grad.clone() for p in model.parameters()]))
    (loss, each, gradients), (loss2, each2, gradients2) = found
    torch.testing.assert_close(loss2, loss)
    torch.testing.assert_close(each2, each)  # of each sequence, where no gradients are asked for
    for a, b in zip(gradients, gradients2, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
