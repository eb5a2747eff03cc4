"""The laws of the transformer: causality, loss, precision, counts, initial weights, weights in and out."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import all_logits
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from hotloop.training.forecast import flops_of
from model import (
    GPT,
    PRESETS,
    Context,
    GPTConfig,
    attend_in_documents,
    config_from,
    flex_options,
    plain_attention,
    shift_keys,
)

SHAPES = {'gpt2': dict(bias=True), 'modern': dict(preset='modern'), 'qwen3': dict(preset='qwen3'),
          'swiglu, grouped': dict(preset='modern', mlp='swiglu', n_kv_head=2),
          'tied rope': dict(position='rope', softcap=5.0),
          'windows': dict(preset='modern', n_kv_head=2, window=5, window_pattern='SL'),
          'tables': dict(preset='modern', n_kv_head=2, bigram_rows=1000, value_embed=True,
                         head_gate=True)}
EVERYTHING = dict(n_kv_head=2, head_dim=6, qkv_bias=True, position='rope', rope_base=500.0, rope_factor=4.0,
                  rope_context=8, norm='rmsnorm_offset', norm_eps=1e-3, post_norm=True, embed_norm=False,
                  embed_scale=3.0, mlp='geglu', qk_norm=True, query_scale=0.3, attn_softcap=1.5, softcap=2.0,
                  window=5, window_pattern='SL', rope_local_base=50.0)  # every setting of the families
MIXERS = {'conv': dict(preset='modern', mixer='CA', num_taps=1),
          'CCAC': dict(preset='modern', mixer='CCAC', n_layer=4, num_taps=7),
          'eigen': dict(preset='modern', mixer='EA', num_eigenstates=8),
          'paper': dict(preset='modern', mixer='E', num_eigenstates=8, eigen='paper'),
          'kernel': dict(preset='modern', mixer='K'),
          'KECA': dict(preset='modern', mixer='KECA', n_layer=4, num_eigenstates=8)}
ALL_SHAPES = {**SHAPES, **MIXERS, 'everything': EVERYTHING}
SMALL = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_embd=32)


def make(shape='gpt2', seed=0, **more):
    """A small model whose weights are all random, so that no zero or one hides a mistake."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SMALL | ALL_SHAPES[shape] | more)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def ids(*size, seed=0):
    return torch.randint(61, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize('shape', ALL_SHAPES)
def test_a_token_changes_later_outputs_and_no_earlier_one(shape):
    """Attention over (B, T, H, D) breaks this law: such a model never looks back."""
    model, a = make(shape), ids(1, 12)
    for place in (0, 5, 11):
        b = a.clone()
        b[0, place] = (b[0, place] + 1) % 61
        changed = (all_logits(model, a) != all_logits(model, b)).any(-1)[0]
        assert not changed[:place].any() and changed[place:].all()


def visible(T, window=None, documents=None):
    """The dense mask that attention within windows and documents equals, (T, T) or (B, 1, T, T)."""
    age = torch.arange(T)[:, None] - torch.arange(T)
    seen = (age >= 0) & (age < (window or T))
    return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None])


DOCUMENTS = torch.tensor([[0] * 9 + [1] + [2] * 3 + [4] * 10, [3] * 23])
CASES = [(5, None), (1, None), (23, None), (None, DOCUMENTS), (4, DOCUMENTS), (9, DOCUMENTS), (30, DOCUMENTS)]


@pytest.mark.parametrize('block', [4, 512])
@pytest.mark.parametrize('window, documents', CASES)
def test_attention_within_windows_and_documents_equals_a_dense_mask(monkeypatch, window, documents, block):
    monkeypatch.setattr('model.QUERY_BLOCK', block)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 23, 8, requires_grad=True) for heads in (4, 2, 2))
    weights, results = torch.randn(2, 4, 23, 8), []
    dense = F.scaled_dot_product_attention(q, k, v, visible(23, window, documents), enable_gqa=True)
    for y in (dense, attend_in_documents(q, k, v, 0.0, window, documents, plain_attention)):
        results.append([y, *torch.autograd.grad((y * weights).sum(), (q, k, v))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('settings', [
    dict(window=100, window_pattern='SL', n_kv_head=1), dict(attn_softcap=5.0), dict(window=37),
    dict(window=37, attn_softcap=5.0, query_scale=0.3, rope_local_base=500.0)], ids=str)
@pytest.mark.parametrize('masked', [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_gpus_attention_computes_the_gradients_of_a_cpus(monkeypatch, settings, masked):
    """The branch of GPT.forward with FlexAttention's masks, run without Inductor."""
    monkeypatch.setattr('torch.nn.attention.flex_attention._validate_device', lambda *args: None)
    monkeypatch.setattr('model.compiled_alone', lambda function, **options: function)
    monkeypatch.setattr('torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG', True)
    model = make('modern', n_head=2, block_size=300, vocab_size=61, **settings).train()
    x, documents = ids(2, 300), (torch.arange(600).view(2, 300) // 130) if masked else None
    results = []
    for devices in ((), ('cpu',)):
        monkeypatch.setattr('model.FLEX_DEVICES', devices)
        model.zero_grad()
        loss = model(x, x, documents).sum()
        loss.backward()
        results.append(torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())]))
    assert (results[0] - results[1]).norm() < 1e-6 * results[0].norm()
    model.transformer.h[0].attn.weight_dropout = 0.1
    with pytest.raises(AssertionError, match='FlexAttention drops no weights'):
        model(x, x, documents)


def test_attention_weights_are_dropped_only_with_learned_positions(monkeypatch):
    """As in GPT-2; with rotary positions attention keeps the kernels without dropout."""
    probabilities, attend = [], F.scaled_dot_product_attention

    def watched(*args, dropout_p, **options):
        probabilities.append(dropout_p)
        return attend(*args, dropout_p=dropout_p, **options)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', watched)
    for shape in ('gpt2', 'modern'):
        make(shape, n_layer=1, dropout=0.25).train()(ids(1, 8))
    assert probabilities == [0.25, 0.0]


@pytest.mark.parametrize('channels, dtype, memory, size', [
    (128, torch.bfloat16, 102_400, None), (256, torch.bfloat16, 167_936, None),  # any GPU; A100
    (256, torch.bfloat16, 102_400, 32), (256, torch.float16, 65_536, 16),  # RTX 4090; T4
    (256, torch.float32, 102_400, 16)])
def test_wide_heads_fit_the_shared_memory_of_a_gpu(monkeypatch, channels, dtype, memory, size):
    """Sizes that Triton compiled for these GPUs to kernels of at most 66,560 bytes; on a T4 of 49,152."""
    gpu = SimpleNamespace(shared_memory_per_multiprocessor=memory)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: gpu)
    options = flex_options(torch.empty(1, 1, 8, channels, dtype=dtype))
    assert options.pop('FORCE_USE_FLEX_ATTENTION')
    if size is None:
        assert not options
    else:
        assert options.pop('num_stages') == 1 and set(options.values()) == {size}
        assert {name.partition('_')[0] for name in options} == {'fwd', 'bwd'}


@pytest.mark.parametrize('shape', [shape for shape in ALL_SHAPES if shape not in ('kernel', 'KECA')])
def test_a_document_in_a_row_is_computed_as_if_it_stood_alone(shape):
    """Its logits, and the gradients of all; rotary positions are relative, learned ones begin again."""
    model, x, y, lengths = make(shape), ids(2, 16), ids(2, 16, seed=1), [(6, 1, 9), (16,)]
    documents = torch.tensor([[0] * 6 + [1] + [2] * 9, [5] * 16])
    results = []
    for losses in ([model(x, y, documents=documents).sum()],
                   [model(a[None], b[None]).sum() for row in range(2) for a, b in
                    zip(x[row].split(lengths[row]), y[row].split(lengths[row]), strict=True)]):
        loss = sum(losses)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('shape', ALL_SHAPES)
def test_the_loss_is_the_cross_entropy_of_the_targets_that_count(shape):
    model, x, y = make(shape), ids(3, 16), ids(3, 16, seed=1)
    y[0, :5], y[2] = -1, -1
    logits = all_logits(model, x)
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction='none')
    torch.testing.assert_close(model(x, y), expected.view(1, 3, 16).sum(2))
    assert model(x, y)[0, 2] == 0
    with pytest.raises(ValueError, match='not enough values to unpack'):  # as nanoGPT's model is called
        _, _ = model(x[:2], y[:2])
    torch.testing.assert_close(model(x), logits[:, -1])


@pytest.mark.parametrize('settings, chunks', [
    ({}, 3), ({'preset': 'modern'}, 48), ({'preset': 'modern', 'label_smoothing': 0.1}, 3)])
def test_a_loss_in_chunks_is_the_loss_and_has_its_gradients(settings, chunks):
    """Also the loss of later tokens, which computes the smoothing itself, if they have no weight."""
    model = make(**settings).train()
    x, y = ids(3, 16), ids(3, 16, seed=1)
    y[0, 3:9] = -1
    results = []
    for model.loss_chunks, model.ahead in ((1, None), (chunks, None), (1, torch.zeros(2))):
        model.zero_grad()
        loss = model(x, y).sum() * 0.01
        loss.backward()
        with torch.no_grad():  # without gradients, the loss of each sequence
            results.append([loss.detach(), model(x, y), *(p.grad.clone() for p in model.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


def test_later_tokens_add_to_the_gradient_and_not_to_the_loss():
    """Written as a loop: the tokens two and three ahead, unmasked, of the same document; in training only."""
    model, x, y = make('modern'), ids(2, 16), ids(2, 16, seed=1)
    y[0, 3:9] = -1
    documents = torch.tensor([[0] * 16, [0] * 5 + [1] * 11])
    model.train()
    plain = model(x, y, documents)
    model.ahead = torch.tensor([0.5, 0.25])
    loss = model(x, y, documents)
    assert torch.allclose(loss, plain, rtol=1e-6)
    loss.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    kept = []
    model.lm_head.register_forward_hook(lambda module, args, out: kept.append(out))
    model(x, y, documents)
    expected, logp = 0, model.softcap(kept[0]).log_softmax(-1)
    for b in range(2):
        for t in range(16):
            for shift, weight in enumerate((1.0, 0.5, 0.25)):
                later = t + shift
                if later < 16 and documents[b, later] == documents[b, t] and y[b, later] >= 0:
                    expected = expected - weight * logp[b, t, y[b, later]]
    model.zero_grad()
    expected.backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.eval()(x, y, documents), make('modern')(x, y, documents))
    model.train()(x[:, :1], y[:, :1]).sum().backward()  # a window of one token has none ahead


@pytest.mark.parametrize('shape', ALL_SHAPES)
def test_a_shorter_context_computes_the_same_and_bfloat16_is_close(shape):
    """The weights stay in float32; rotary angles of positions would lose all precision in bf16."""
    model, x = make(shape), ids(2, 7)
    exact = model(x)
    model.crop_block_size(8)
    assert torch.equal(exact, model(x)) and len(model.cos) == model.config.block_size == 8
    model.compute_dtype = torch.bfloat16
    half = model(x)
    assert half.dtype == model.cos.dtype == model.lm_head.weight.dtype == torch.float32
    assert 0 < (half - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a C++ compiler')
@pytest.mark.parametrize('shape, masked', [('gpt2', False), ('modern', False), ('windows', False),
                                           ('everything', False), ('gpt2', True)])
def test_compiled_equals_eager(shape, masked):
    torch._dynamo.reset()
    model, x = make(shape, n_layer=1).train(), ids(2, 16)
    documents = torch.tensor([[0] * 11 + [1] * 5, [0] * 16]) if masked else None
    results = []
    for forward in (model, torch.compile(model, dynamic=False)):
        model.zero_grad()
        loss = forward(x, x, documents).sum()
        loss.backward()
        results.append(torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())]))
    assert (results[0] - results[1]).norm() < 1e-5 * results[0].norm()


def test_rotary_angles_are_exact_at_long_contexts_and_follow_the_base():
    """float32 angles would be wrong by 2e-3 at position 32,767. A larger base turns the channels slower."""
    for base in (10000.0, 5e5):
        model = make('modern', rope_base=base, block_size=2**15)
        angles = [32767 * base ** (-2 * i / 8) for i in range(4)]
        assert model.cos[-1, 0].tolist() == pytest.approx(list(map(math.cos, angles)), abs=1e-7)
        assert model.sin[-1, 0].tolist() == pytest.approx(list(map(math.sin, angles)), abs=1e-7)
    args = model.config.model_args()
    assert config_from(args).rope_base == args.pop('rope_base') == 5e5
    assert config_from(args).rope_base == 10000  # a checkpoint of an earlier version


def test_the_slower_half_of_each_key_is_that_of_the_token_before():
    """Zero at the start of a row, or of a document. Earlier checkpoints have no shift."""
    k, place = torch.randn(1, 2, 5, 8), torch.tensor([[0, 1, 2, 0, 1]])
    slow = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1]) == 1  # of channels i and i + 4 the first rotate fastest
    for mark, starts in ((None, [0]), (place, [0, 3])):
        shifted = shift_keys(k, 0, None, mark)
        assert torch.equal(shifted[..., ~slow], k[..., ~slow])
        for t in range(5):
            before = 0 * k[:, :, 0] if t in starts else k[:, :, t - 1]
            assert torch.equal(shifted[:, :, t, slow], before[..., slow])
    args = make('modern').config.model_args()
    assert args.pop('key_shift') is True and config_from(args).resolved().key_shift is False


def test_gpt2_has_as_many_parameters_as_openais():
    with torch.device('meta'):
        assert GPT(GPTConfig(vocab_size=50257, bias=True)).num_params() == 124_439_808


@pytest.mark.parametrize('shape, head_dim', [*((shape, 8) for shape in SHAPES), ('swiglu, grouped', 6)])
def test_flops_equal_what_torch_counts(shape, head_dim):
    """The counter sees the matmuls. On CPUs it does not see attention, which is added by hand."""
    model, x = make(shape, head_dim=head_dim).train(), ids(2, 16)
    with FlopCounterMode(display=False) as counter:
        model(x, x).sum().backward()
    matmuls = sum(n for op, n in counter.get_flop_counts()['Global'].items() if 'attention' not in str(op))
    # pairs of a query and a key that it sees, in each layer of a sequence
    pairs = sum(int(visible(16, window).sum()) for window in model.config.windows())
    attention = 2 * 6 * pairs * 4 * head_dim  # 2 FLOPs, 2 matmuls forward and 4 backward, 4 heads
    assert flops_of(model, 16).training == pytest.approx(matmuls / (2 * 16) + attention / 16)


def test_initial_weights_are_a_function_of_the_seed_and_have_gpt2s_scale():
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(GPT(GPTConfig(**SMALL | dict(n_embd=128), bias=True)).state_dict())
    assert all(torch.equal(w, states[1][name]) for name, w in states[0].items())
    assert not torch.equal(states[0]['lm_head.weight'], states[2]['lm_head.weight'])
    for name, w in states[0].items():
        if w.dim() == 2:
            std = 0.02 / 2 if name.endswith('c_proj.weight') else 0.02  # sqrt(2 L) = 2
            assert w.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert w.unique().tolist() == [float('ln_' in name and name.endswith('weight'))], name


def test_modern_blocks_start_as_the_identity_and_the_head_as_uniform():
    model = GPT(GPTConfig(**SMALL, preset='modern'))
    x = torch.randn(1, 3, 32)
    assert torch.equal(model.transformer.h[0](x, x, Context(model.cos[:3], model.sin[:3], {}, None)), x)
    assert model(ids(2, 16), ids(2, 16))[0].tolist() == pytest.approx([16 * math.log(61)] * 2)


@pytest.mark.parametrize('settings, words', [
    (dict(n_embd=30, n_head=4), 'n_embd=30 .* n_head=4; try n_embd=32'),
    (dict(n_head=4, n_embd=64, n_kv_head=3), 'n_head=4 is not divisible by n_kv_head=3'),
    (dict(n_layer=0, vocab_size=0), 'vocab_size=0 must be at least 1; n_layer=0'),
    (dict(dropout=1.0, softcap=math.nan), 'dropout=1.0.*softcap=nan'),
    (dict(preset='modern', n_embd=12, n_head=4), 'head_dim=3 is odd; rotary positions need an even'),
    (dict(preset='hybrid', mixer='CA', window=8, window_pattern='SL'), 'window=8 is in no layer'),
    (dict(window_pattern='SL'), "window_pattern='SL' must contain an S, only S and L, and need a window"),
    (dict(rope_base=5e5), "rope_base=500000.0 applies only with position='rope'"),
    (dict(preset='modern', rope_local_base=50.0), 'rope_local_base=50.0 applies only with .* and a window'),
    (dict(mixer='CXAC'), "mixer='CXAC' must be one of"), (dict(mixer=''), "mixer='' must be one of")])
def test_settings_that_do_not_fit(settings, words):
    with pytest.raises(ValueError, match=words):
        GPT(GPTConfig(**{'vocab_size': 61, **settings}))


def test_shapes_of_nanogpt_have_its_seven_names_and_others_all():
    as_gpt2 = GPTConfig(**{**PRESETS['gpt2'], 'preset': 'modern', 'vocab_size': 61})
    assert as_gpt2.model_args()['preset'] == 'modern'  # or a resume with the same flags would contradict it
    seven = {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout'}
    assert set(make(dropout=0.1, label_smoothing=0.1).config.model_args()) == seven
    for other in (dict(mlp='gelu_tanh'), dict(preset='modern'), dict(n_ff=64), dict(tie=False),
                  dict(window=8, window_pattern='SL'), EVERYTHING):
        config = make(**other).config
        assert set(config.model_args()) > seven
        assert config_from(config.model_args()).resolved() == config


@pytest.mark.parametrize('shape', ALL_SHAPES)
def test_a_model_is_rebuilt_from_its_checkpoint(shape):
    model = make(shape)
    weights = {name: w.clone() for name, w in model.state_dict().items()}  # tied matrices may be two copies
    weights['transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)  # a buffer of nanoGPT under PyTorch 1.x
    again = GPT.from_checkpoint(model.config.model_args(), weights, dropout=0.5)
    assert again.config.dropout == again.transformer.drop.p == 0.5
    assert torch.equal(model(ids(1, 9)), again.eval()(ids(1, 9)))


@pytest.mark.parametrize('args, words', [
    (dict(moe=3, gate=True), 'does not have: gate, moe'), (dict(vocab_size=60), 'lm_head.weight'),
    (dict(bias=True), r'model: 13 are missing .*attn\.c_attn\.bias'),
    (dict(bias=False), r'model: 13 have no place .*attn\.c_attn\.bias')])
def test_model_args_that_do_not_fit_the_weights(args, words):
    model = make(bias=not args.get('bias', False))
    with pytest.raises(ValueError, match=words) as error:
        GPT.from_checkpoint({**model.config.model_args(), **args}, model.state_dict())
    assert '\n' not in str(error.value)


def test_tied_matrices_that_differ_are_refused():
    model = make()
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    weights['transformer.wte.weight'] += 1
    with pytest.raises(ValueError, match='tie=True, but embedding and head differ'):
        model.load_weights(weights)
