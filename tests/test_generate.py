"""The laws of generation: cached = uncached, batch = rows alone, compiled = eager, draws = probabilities, int8."""

import math

import pytest
import torch
from test_model import SHAPES, ids, make

from hotloop.generate import Sampling, closing_gaps, generate, new_cache, sample_token
from hotloop.quantize import Int8Linear, PackedLinear, can_pack, for_inference
from model import GPT, Linear

PROMPTS = [ids(n, seed=n).tolist() for n in (3, 7, 1, 16, 5)]  # block_size is 16


@pytest.fixture(autouse=True)
def one_thread(as_it_was):
    """Models this small gain nothing from two, and lose much where the machine is busy."""
    torch.set_num_threads(1)


def run(model, prompts, num_tokens, num_samples=1, **more):
    """The tokens of each sequence."""
    texts = [[] for _ in range(len(prompts) * num_samples)]
    for told in generate(model, prompts, num_tokens, num_samples=num_samples, **more):
        for sequence, token, _ in told:
            texts[sequence].append(token)
    return texts


def watch(monkeypatch):
    """The shapes of idx that forward is called with."""
    shapes, forward = [], GPT.forward

    def watched(self, idx, targets=None, cache=None):
        shapes.append(tuple(idx.shape))
        return forward(self, idx, targets, cache)
    monkeypatch.setattr(GPT, 'forward', watched)
    return shapes


# -----------------------------------------------------------------------------
# the cache

@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('length', [1, 5, 16])
def test_cached_greedy_generation_equals_uncached(shape, length):
    """Past block_size too: there the oldest eighth, two tokens, goes, and the next token is that of what is left."""
    model, context = make(shape), ids(length).tolist()
    expected = []
    for _ in range(40):
        if len(context) > 16:
            context = context[2:]
        with torch.no_grad():
            expected.append(model(torch.tensor([context])).argmax().item())
        context.append(expected[-1])
    assert run(model, [ids(length).tolist()], 40, temperature=0) == [expected]


def test_a_slide_costs_one_prefill_in_an_eighth_of_the_context(monkeypatch):
    """nanoGPT computes the whole context for each token."""
    model = make(block_size=32)
    shapes = watch(monkeypatch)
    run(model, [ids(32).tolist()], 41, temperature=0)
    assert shapes[0] == (1, 32) and shapes.count((1, 28)) == 10 and shapes.count((1, 1)) == 40 and len(shapes) == 51


def test_a_context_of_one_token_and_one_of_two():
    for size in (1, 2):
        (text,) = run(make(block_size=size), [[3]], 5, temperature=0)
        assert len(text) == 5


def test_past_context_stop_ends_the_sequence():
    model = make()
    assert [len(text) for text in run(model, PROMPTS, 40, temperature=0, past_context='stop')] == [14, 10, 16, 1, 12]
    longer = run(model, PROMPTS, 40, temperature=0)
    assert all(a == b[:len(a)] for a, b in zip(run(model, PROMPTS, 40, temperature=0, past_context='stop'), longer,
                                               strict=True))


def test_prompts_longer_than_the_context_are_cut():
    long = ids(40).tolist()
    assert run(make(), [long], 5, temperature=0) == run(make(), [long[-16:]], 5, temperature=0)


def test_no_tokens_are_no_steps(monkeypatch):
    shapes = watch(monkeypatch)
    assert run(make(), PROMPTS, 0) == [[]] * 5 and run(make(), [], 5) == [] and not shapes


# -----------------------------------------------------------------------------
# batches

@pytest.mark.parametrize('decode', ['eager', 'graph'])  # off CUDA a graph is the step of fixed shapes, as it is
@pytest.mark.parametrize('shape', SHAPES)
def test_a_ragged_batch_is_its_rows_alone(shape, decode):
    """Token for token, greedy and sampled, past the context, with sequences that end on the way."""
    model = make(shape)
    single = [run(model, [prompt], 40, temperature=0, stop={3})[0] for prompt in PROMPTS]
    assert run(model, PROMPTS, 40, temperature=0, stop={3}, decode=decode) == single
    how = dict(top_k=20, repetition_penalty=1.1, min_p=0.01, stop={3, 5})
    single = [run(model, [PROMPTS[i // 2]], 40, seeds=[i], **how)[0] for i in range(10)]
    assert run(model, PROMPTS, 40, num_samples=2, seeds=list(range(10)), decode=decode, **how) == single
    assert len(set(map(len, single))) > 2, 'or nothing ends on the way'


@pytest.mark.parametrize('decode', ['eager', 'graph'])
def test_random_numbers_made_a_few_at_once_are_the_same(decode, monkeypatch):
    model, how = make(), dict(num_samples=2, seeds=list(range(10)), stop=set(range(4)), decode=decode)
    expected = run(model, PROMPTS, 40, **how)
    monkeypatch.setattr('hotloop.generate.AHEAD', 3)
    assert run(model, PROMPTS, 40, **how) == expected and max(map(len, expected)) > 9
    assert len(next(generate(model, PROMPTS, 10**12))) == 5, 'or they are all made before the first token'


def test_int8_in_a_batch_of_any_size_is_int8_alone():
    """The prefill of all has another kernel than that of one."""
    model = for_inference(make(n_embd=64), torch.device('cpu'), torch.float32, 'int8')
    assert next(m for m in model.modules() if isinstance(m, Int8Linear)).on_cpu
    batch = run(model, PROMPTS, 20, num_samples=8, seeds=list(range(40)))
    assert batch == [run(model, [PROMPTS[i // 8]], 20, seeds=[i])[0] for i in range(40)]


@pytest.mark.parametrize('decode', ['eager', 'graph'])
def test_reading_tokens_a_step_late_changes_none(monkeypatch, decode):
    """As on CUDA, where a sequence that is finished has drawn once more before the host knows."""
    model, seeds, how = make(), list(range(10)), dict(num_samples=2, top_k=20, stop=set(range(4)))
    expected = {policy: run(model, PROMPTS, 40, seeds=seeds, past_context=policy, **how)
                for policy in ('slide', 'stop')}

    def read_later(values):
        kept = values.clone()
        return lambda: kept
    monkeypatch.setattr('hotloop.generate.READ_LATE', ('cpu',))
    monkeypatch.setattr('hotloop.generate.read_later', read_later)
    for policy, texts in expected.items():
        assert run(model, PROMPTS, 40, seeds=seeds, past_context=policy, decode=decode, **how) == texts
    for n in (1, 2):
        assert [len(text) for text in run(model, PROMPTS, n)] == [n] * 5


@pytest.mark.slow
@pytest.mark.parametrize('shape', ['gpt2', 'swiglu, grouped'])
def test_compiled_equals_eager(shape):
    """Of two models in turn: a compiled step holds weights as constants."""
    torch._dynamo.reset()
    how = dict(num_samples=2, seeds=list(range(10)), top_k=20)
    models = [make(shape), make(shape)]
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1.5)
    texts = [run(model, PROMPTS, 30, decode='compiled', **how) for model in models]
    assert texts == [run(model, PROMPTS, 30, **how) for model in models] and texts[0] != texts[1]
    compilations = torch._dynamo.utils.counters['stats']['unique_graphs']
    run(models[1], PROMPTS[::-1], 12, decode='compiled', **how)
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == compilations > 0, 'other texts compile anew'


@pytest.mark.slow
@pytest.mark.parametrize('dtype, quantize', [(torch.float32, 'int8'), (torch.bfloat16, 'none')])
def test_compiled_is_close_to_eager_where_keys_are_rounded(dtype, quantize, capfd):
    """In bf16 and int8 a compiled step on a CPU keeps keys and values in bf16, an eager one in float32."""
    torch._dynamo.reset()
    model = for_inference(make('swiglu, grouped', n_embd=64), torch.device('cpu'), dtype, quantize, pack=False)
    capfd.readouterr()
    drawn = [[told for step in generate(model, PROMPTS, 10, temperature=0, logprobs=True, decode=decode)
              for told in sorted(step)] for decode in ('eager', 'compiled')]
    assert new_cache(model, 1, 1, 'compiled').k[0].dtype == torch.bfloat16
    assert new_cache(model, 1, 1).k[0].dtype == torch.float32
    compared, apart = 0, set()
    for (sequence, token, logprob), (other, other_token, other_logprob) in zip(*drawn, strict=True):
        assert sequence == other
        if sequence not in apart:  # where two tokens are about as likely, texts may part
            assert logprob == pytest.approx(other_logprob, abs=0.05)
            compared += 1
        if token != other_token:
            apart.add(sequence)
    assert compared >= 30
    assert 'AUTOTUNE' not in ''.join(capfd.readouterr()), 'tables of Inductor on the terminal'


def test_several_samples_share_one_prefill(monkeypatch):
    model = make()
    shapes = watch(monkeypatch)
    texts = run(model, PROMPTS[:2], 6, num_samples=3, seeds=list(range(6)))
    assert shapes == [(2, 7)] + [(6, 1)] * 5 and len(set(map(tuple, texts))) == 6


def test_sequences_that_are_finished_cost_nothing(monkeypatch):
    """The rows of a step are those that go on; to a fixed shape they go by halves."""
    model = make()
    how = dict(seeds=list(range(5)), stop=set(range(6)))
    alive = [sum(len(text) > n for text in run(model, PROMPTS, 9, **how)) for n in range(1, 9)]
    assert alive[0] > alive[1] > alive[-1], 'or too few end'
    shapes = watch(monkeypatch)
    run(model, PROMPTS, 9, **how)
    assert [rows for rows, T in shapes[1:] if T == 1] == [n for n in alive if n]
    shapes.clear()
    stopped = set()
    for n, _ in enumerate(generate(model, PROMPTS, 9, stopped=stopped, decode='graph')):
        stopped.add([4, 0, 2, 1][min(n, 3)])  # the caller ends them
    assert [rows for rows, T in shapes[1:] if T == 1] == [5, 5, 2, 1, 1, 1, 1, 1]


def test_rows_move_into_the_gaps():
    assert closing_gaps([0, 1, 2]) == [0, 1, 2] and closing_gaps([3]) == [3] and closing_gaps([1, 3, 5]) == [5, 1, 3]
    assert closing_gaps([1, 4, 5]) in ([5, 1, 4], [4, 1, 5])


def test_a_seed_repeats_and_says_all():
    model, prompt = make(), [ids(4).tolist()]
    assert run(model, prompt, 10, seeds=[3]) == run(model, prompt, 10, seeds=[3]) != run(model, prompt, 10, seeds=[4])
    assert run(model, prompt, 4, seeds=[3])[0] == run(model, prompt, 10, seeds=[3])[0][:4]  # whatever was asked for
    assert run(model, prompt, 30) != run(model, prompt, 30)
    before = torch.random.get_rng_state()
    run(model, prompt, 10)
    assert torch.equal(before, torch.random.get_rng_state())


def test_limits_that_leave_one_token_are_greedy():
    model, greedy = make(), run(make(), PROMPTS, 20, temperature=0)
    for how in (dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0), dict(temperature=1e-39)):
        assert run(model, PROMPTS, 20, **how) == greedy, how


def test_a_stop_is_told_and_padding_is_never_drawn():
    model = make()
    (first, *_), = run(model, [PROMPTS[0]], 12, temperature=0)
    assert run(model, [PROMPTS[0]], 12, temperature=0, stop={first}) == [[first]]
    model.lm_head.weight.data[40:] *= 50  # the likeliest by far
    for how in (dict(), dict(temperature=0), dict(top_k=5), dict(top_p=0.9), dict(repetition_penalty=1.3)):
        assert max(map(max, run(model, PROMPTS, 12, vocab=40, **how))) < 40


# -----------------------------------------------------------------------------
# draws

@pytest.mark.parametrize('how', [dict(), dict(top_k=4), dict(top_p=0.5), dict(temperature=0.5), dict(min_p=0.5),
                                 dict(top_k=8, top_p=0.7, min_p=0.3, temperature=1.5)], ids=str)
def test_draws_follow_the_probabilities(how):
    """Chi-square over 20,000 draws; 30 is beyond the 99.9th percentile of 9 degrees of freedom."""
    logits = torch.linspace(0, 2, 10)[torch.randperm(10, generator=torch.Generator().manual_seed(0))]
    p = (logits / how.get('temperature', 1.0)).softmax(0).double()
    by_size = p.sort(descending=True).values
    p[p < by_size[how.get('top_k', 10) - 1]] = 0
    p /= p.sum()
    by_size = p.sort(descending=True).values
    last = int((by_size.cumsum(0) < how.get('top_p', 1.0)).sum().clamp_max(9))  # the first that reaches top_p is in
    p[p < max(by_size[last], how.get('min_p', 0.0) * p.max())] = 0
    p /= p.sum()
    numbers = torch.rand(20000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = sample_token(logits.repeat(20000, 1), numbers, Sampling(**how)).flatten().bincount(minlength=10)
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * 20000
    assert ((counts[p > 0] - expected) ** 2 / expected).sum() < 30
    if how:
        assert (p == 0).any() or 'temperature' in how


def test_the_ends_of_the_numbers_draw_what_has_probability():
    logits = torch.tensor([[-math.inf, 0.0, -200.0, 1.0, -math.inf]])
    for number in (0.0, 1 - 2**-53):
        assert sample_token(logits, torch.tensor([[number]], dtype=torch.float64), Sampling()).item() in (1, 3)


def test_the_repetition_penalty_is_that_of_the_paper():
    """Logits of what occurred, in the prompt or since, are divided by it, or multiplied where negative (CTRL)."""
    model, context, expected = make(), list(PROMPTS[1]), []
    for _ in range(8):
        with torch.no_grad():
            logits = model(torch.tensor([context]))[0]
        for i in set(context):
            logits[i] = logits[i] * 1.7 if logits[i] < 0 else logits[i] / 1.7
        expected.append(logits.argmax().item())
        context.append(expected[-1])
    assert run(model, [PROMPTS[1]], 8, temperature=0, repetition_penalty=1.7) == [expected]
    assert run(model, [PROMPTS[1]], 8, temperature=0) != [expected], 'or the test shows nothing'


def test_log_probabilities_are_the_models():
    model, context = make(), list(PROMPTS[1])
    for told in generate(model, [context], 8, temperature=2.0, top_k=5, logprobs=True, seeds=[1]):
        (_, token, logprob), = told
        with torch.no_grad():
            assert logprob == pytest.approx(model(torch.tensor([context]))[0].log_softmax(-1)[token].item(), abs=1e-5)
        context.append(token)


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_logits_that_are_not_finite_are_named(value):
    model = make()
    model.lm_head.weight.data[3, 3] = value
    for how in (dict(), dict(temperature=0), dict(top_k=3)):
        with pytest.raises(ValueError, match='not finite'):
            run(model, PROMPTS, 3, **how)


# -----------------------------------------------------------------------------
# Linears for inference

@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('rows', [(3,), (1, 1), (2, 40)])
@pytest.mark.parametrize('kernel', [True, False])
def test_int8_is_within_its_bound(bias, rows, kernel, monkeypatch):
    """Each weight moves by half a step at most; where the kernel is used, rounding to bf16 comes on top."""
    if not kernel:
        monkeypatch.delattr(torch, '_weight_int8pack_mm')
    torch.manual_seed(0)
    linear, x = Linear(96, 64, bias=bias), torch.randn(*rows, 96)
    linear.weight.data[5] *= 100  # rows have scales of their own
    linear.weight.data[6] = 0
    quantized = Int8Linear(linear)
    assert quantized.on_cpu == kernel
    scale, w = quantized.scale.float(), linear.weight.detach()
    assert ((quantized.weight * scale[:, None] - w).abs() <= scale[:, None] / 2 * (1 + 1e-6)).all()
    assert (scale <= w.abs().amax(1) / 127 * (1 + 2**-7) + 1e-30).all() and quantized.weight.abs().max() <= 127
    bound = x.abs().sum(-1, keepdim=True) * scale / 2 + x.abs() @ w.abs().t() * (2**-7 if kernel else 1e-6)
    assert ((quantized(x) - linear(x)).abs() <= bound + 1e-6).all()


def test_int8_sums_fit_float16(monkeypatch):
    """Weights from -127 to 127 must not meet large activations before they are scaled."""
    monkeypatch.delattr(torch, '_weight_int8pack_mm')
    torch.manual_seed(0)
    linear, x = Linear(256, 64, bias=False), torch.rand(40, 256) * 200
    linear.weight.data = torch.rand(64, 256) * 0.1
    y = Int8Linear(linear)(x.half())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), linear(x), rtol=0.02, atol=0)


def test_an_int8_model_has_a_head_of_its_own_and_close_logits():
    model, x = make(n_embd=64), ids(2, 16)
    exact = model(x)
    for_inference(model, torch.device('cpu'), torch.float32, 'int8')
    assert model.lm_head.weight.dtype == torch.int8 and model.transformer.wte.weight.dtype == torch.float32
    assert sum(isinstance(m, Int8Linear) for m in model.modules()) == 9
    error = (model(x) - exact).norm() / exact.norm()
    assert 0 < error < 0.05
    assert [len(text) for text in run(model, PROMPTS, 20, top_k=5)] == [20] * 5


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_packed_weights_compute_the_same(dtype, monkeypatch):
    if not can_pack(torch.device('cpu'), dtype):
        pytest.skip(f'oneDNN does not pack {dtype} here')
    monkeypatch.setattr('hotloop.quantize.PACK_FROM', 0)
    plain, packed, x = make(bias=True), make(bias=True), ids(2, 16)
    for_inference(plain, torch.device('cpu'), dtype, pack=False)
    for_inference(packed, torch.device('cpu'), dtype)
    assert sum(isinstance(m, PackedLinear) for m in packed.modules()) == 9
    error = (plain(x) - packed(x)).norm() / plain(x).norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)
    if dtype == torch.float32:
        assert run(plain, PROMPTS, 20, temperature=0) == run(packed, PROMPTS, 20, temperature=0)


def test_where_packing_fails_weights_stay_as_they_are(monkeypatch):
    def refuse(*args):
        raise RuntimeError('not on this CPU')
    monkeypatch.setattr(torch.ops.mkldnn, '_reorder_linear_weight', refuse)
    assert not can_pack(torch.device('cpu'), torch.float32)
    model = for_inference(make(n_embd=512, n_head=4), torch.device('cpu'), torch.float32)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
