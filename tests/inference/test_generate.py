"""The laws of generation: cached is uncached, a batch is its rows alone, draws follow the probabilities."""

import math
import shutil

import numpy as np
import pytest
import torch
from test_model import MIXERS, SHAPES, make

from hotloop.inference.generate import Sampling, generate, sample_token
from hotloop.inference.kv_cache import KVCache
from hotloop.inference.quantize import prepare_for_inference
from model import GPT


def ids(n):
    return torch.randint(61, (n,), generator=torch.Generator().manual_seed(n)).tolist()


PROMPTS = [ids(n) for n in (3, 7, 1, 16, 5)]  # block_size is 16


@pytest.fixture
def fixed_shapes(monkeypatch):
    """compiled=True takes the step of fixed shapes, but does not compile it."""
    monkeypatch.setattr(torch, 'compile', lambda function, **options: function)


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of idx that forward is called with."""
    seen, forward = [], GPT.forward

    def watched(self, idx, targets=None, cache=None):
        seen.append(tuple(idx.shape))
        return forward(self, idx, targets, cache=cache)
    monkeypatch.setattr(GPT, 'forward', watched)
    return seen


def run(model, prompts, num_tokens, seeds=None, compiled=False, ends=(), **how):
    """Return the tokens of each sequence, which ends with an id of `ends`."""
    texts, sampling = [[] for _ in prompts], Sampling(num_tokens, **how)
    stopped = set()
    for new in generate(model, prompts, sampling, seeds, stopped, compiled):
        for sequence, token, _ in new:
            texts[sequence].append(token)
            if token in ends:
                stopped.add(sequence)
    return texts


@torch.no_grad()
def next_logits(model, context):
    return model(torch.tensor([context]))[0]


@pytest.mark.parametrize('shape', [*SHAPES, *MIXERS])
@pytest.mark.parametrize('length', [1, 16])
def test_cached_greedy_generation_equals_uncached(shape, length):
    """Past block_size too, where the oldest eighth, two tokens, is dropped and the rest is computed again."""
    model, context, expected = make(shape), ids(length), []
    for _ in range(20):
        if len(context) > 16:
            context = context[2:]
        expected.append(next_logits(model, context).argmax().item())
        context.append(expected[-1])
    assert run(model, [ids(length)], 20, temperature=0) == [expected]


def test_samples_share_a_prefill_and_a_slide_costs_one_in_an_eighth_of_the_context(shapes):
    """nanoGPT computes the complete context for each token."""
    texts = run(make(block_size=32), [ids(32), ids(5)] * 3, 21, seeds=range(6))
    assert shapes[0] == (2, 32) and len(set(map(tuple, texts))) == 6
    assert shapes.count((3, 28)) == 5 and shapes.count((6, 1)) == 20 and len(shapes) == 26


def test_prompts_longer_than_the_context_keep_their_end():
    assert run(make(), PROMPTS, 0) == [[]] * 5
    assert run(make(), [ids(40)], 5, temperature=0) == run(make(), [ids(40)[-16:]], 5, temperature=0)


def test_a_bos_stays_when_the_oldest_tokens_are_dropped():
    """Llama and Gemma have learned to attend to it."""
    model, bos, context, expected = make(), 60, ids(40), []
    kept = context[-15:]
    for _ in range(24):
        if len(kept) > 15:
            kept = kept[2:]
        expected.append(next_logits(model, [bos, *kept]).argmax().item())
        kept.append(expected[-1])
    assert run(model, [[bos, *context]], 24, temperature=0, bos=bos) == [expected]


@pytest.mark.parametrize('shape', [*SHAPES, *MIXERS])
def test_a_ragged_batch_equals_its_rows_alone(shape, fixed_shapes):
    """Token for token, past the context, with sequences that end on the way; at fixed shapes too."""
    model, how = make(shape), dict(top_k=20, repetition_penalty=1.1, ends={3, 5, 12})
    alone = [run(model, [prompt], 20, seeds=[i], **how)[0] for i, prompt in enumerate(PROMPTS)]
    assert len(set(map(len, alone))) > 2, 'or nothing ends on the way'
    for compiled in (False, True):
        assert run(model, PROMPTS, 20, seeds=range(5), compiled=compiled, **how) == alone


def test_int8_in_a_batch_of_any_size_equals_int8_alone():
    """The prefill of all prompts and the step of 40 rows use another kernel than those of one."""
    model = prepare_for_inference(make(n_embd=64), torch.device('cpu'), torch.float32, 'int8')
    assert model.lm_head.on_cpu
    batch = run(model, PROMPTS * 8, 6, seeds=range(40))
    assert batch[:5] == [run(model, [PROMPTS[i]], 6, seeds=[i])[0] for i in range(5)]


@pytest.mark.parametrize('compiled', [False, True])
def test_finished_sequences_leave_when_they_are_half_of_the_batch(compiled, fixed_shapes, shapes):
    """
    The caller ends them here. They yield nothing more, and nobody else's text changes. A compiled step keeps
    its shape.
    """
    stopped, texts = set(), [[] for _ in PROMPTS]
    sampling = Sampling(9, temperature=0)
    for n, new in enumerate(generate(make(), PROMPTS, sampling, stopped=stopped, compiled=compiled)):
        for sequence, token, _ in new:
            texts[sequence].append(token)
        stopped.add([4, 0, 2, 1][min(n, 3)])
    assert [rows for rows, T in shapes if T == 1] == ([5] * 8 if compiled else [5, 5, 2, 1, 1, 1, 1, 1])
    complete = run(make(), PROMPTS, 9, temperature=0)
    assert texts == [text[:n] for text, n in zip(complete, [2, 4, 3, 9, 1], strict=True)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a C++ compiler')
def test_a_compiled_step_draws_what_the_eager_one_draws():
    """Of two models in turn, because a compiled step holds weights as constants."""
    torch._dynamo.reset()
    how = dict(seeds=range(10), top_k=20)
    models = [make('swiglu, grouped'), make('swiglu, grouped')]
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1.5)
    texts = [run(model, PROMPTS * 2, 30, compiled=True, **how) for model in models]
    assert texts == [run(model, PROMPTS * 2, 30, **how) for model in models] and texts[0] != texts[1]
    counts = torch._dynamo.utils.counters['stats']
    compilations = counts['unique_graphs']
    run(models[1], PROMPTS[::-1] * 2, 12, compiled=True, **how)
    assert counts['unique_graphs'] == compilations > 0, 'other texts compile again'


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a C++ compiler')
@pytest.mark.parametrize('shape, dtype, quantize', [('swiglu, grouped', torch.float32, 'int8'),
                                                    ('gpt2', torch.bfloat16, 'none')])
def test_a_compiled_step_with_bf16_keys_is_close_to_the_eager_one(shape, dtype, quantize, capfd):
    torch._dynamo.reset()
    model = make(shape, n_embd=64)
    prepare_for_inference(model, torch.device('cpu'), dtype, quantize, pack=False)
    assert KVCache(model, 1, 1, static=True).k[0].dtype == torch.bfloat16
    assert KVCache(model, 1, 1).k[0].dtype == torch.float32
    sampling = Sampling(10, temperature=0, logprobs=True)
    eager, fast = ([new for step in generate(model, PROMPTS, sampling, compiled=compiled) for new in step]
                   for compiled in (False, True))
    different = set()
    for (sequence, token, logprob), (_, other_token, other_logprob) in zip(eager, fast, strict=True):
        assert sequence in different or logprob == pytest.approx(other_logprob, abs=0.05)
        if token != other_token:  # two tokens may be about equally likely
            different.add(sequence)
    assert len(different) <= 3
    assert 'AUTOTUNE' not in ''.join(capfd.readouterr()), "Inductor's tables are on the terminal"


def test_a_text_is_a_function_of_its_seed():
    model, prompt = make(), [ids(4)]
    text = run(model, prompt, 10, seeds=[3])
    assert run(model, prompt, 10, seeds=[3]) == text != run(model, prompt, 10, seeds=[4])
    assert run(model, prompt, 4, seeds=[3])[0] == text[0][:4]


def test_limits_that_leave_one_token_are_greedy():
    greedy = run(make(), PROMPTS, 10, temperature=0)
    for how in (dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0), dict(temperature=1e-39)):
        assert run(make(), PROMPTS, 10, **how) == greedy


def test_padding_is_never_drawn():
    model = make(bias=False, tie=False)
    model.lm_head.weight.data[40:] *= 50  # the most probable by far
    for how in (dict(), dict(temperature=0), dict(top_k=5), dict(top_p=0.9), dict(repetition_penalty=1.3)):
        assert max(map(max, run(model, PROMPTS, 12, vocab=40, **how))) < 40


@pytest.mark.parametrize('how', [dict(), dict(top_k=4), dict(top_p=0.5), dict(temperature=0.5),
                                 dict(min_p=0.5), dict(top_k=8, top_p=0.7, min_p=0.3, temperature=1.5)])
def test_draws_follow_the_probabilities(how):
    """Chi-square over 20,000 draws; 30 is beyond the 99.9th percentile of 9 degrees of freedom."""
    logits = torch.linspace(0, 2, 10)[torch.randperm(10, generator=torch.Generator().manual_seed(0))]
    p = (logits / how.get('temperature', 1.0)).softmax(0).double()
    p[p < p.sort(descending=True).values[how.get('top_k', 10) - 1]] = 0
    p /= p.sum()
    by_size = p.sort(descending=True).values
    last = int((by_size.cumsum(0) < how.get('top_p', 1.0)).sum().clamp_max(9))  # this one reaches top_p
    p[p < max(by_size[last], how.get('min_p', 0.0) * p.max())] = 0
    p /= p.sum()
    numbers = torch.rand(20000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = sample_token(logits.repeat(20000, 1), numbers, Sampling(1, **how))
    counts = drawn.flatten().bincount(minlength=10)
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * 20000
    assert ((counts[p > 0] - expected) ** 2 / expected).sum() < 30


def test_the_smallest_and_the_largest_number_draw_an_id_with_probability():
    logits = torch.tensor([[-math.inf, 0.0, -200.0, 1.0, -math.inf]]).repeat(2, 1)
    numbers = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    assert sample_token(logits, numbers, Sampling(1)).tolist() == [[1], [3]]


def test_the_repetition_penalty_is_that_of_the_paper():
    """It divides logits of ids that occurred, in the prompt or since, or multiplies negative ones (CTRL)."""
    model, context, expected = make(), list(PROMPTS[1]), []
    for _ in range(8):
        logits = next_logits(model, context)
        for i in set(context):
            logits[i] = logits[i] * 1.7 if logits[i] < 0 else logits[i] / 1.7
        expected.append(logits.argmax().item())
        context.append(expected[-1])
    assert run(model, [PROMPTS[1]], 8, temperature=0, repetition_penalty=1.7) == [expected]
    assert run(model, [PROMPTS[1]], 8, temperature=0) != [expected], 'or the test shows nothing'


@pytest.mark.parametrize('compiled', [False, True])
def test_dry_is_the_penalty_on_each_earlier_time_of_a_text(fixed_shapes, monkeypatch, compiled):
    """Of the newest text, not of its prompt; rows that end leave it to the others."""
    monkeypatch.setattr('hotloop.inference.generate.DRY_WINDOW', 128)
    sizes = np.arange(61) % 5
    model, prompts, ends = make(block_size=192), [[1, 2, 3] * 4, *PROMPTS], [5]
    expected = []
    for prompt in prompts:
        text = []
        for _ in range(150):
            logits = next_logits(model, prompt + text)
            for end in range(64 if len(text) > 128 else 0, len(text)):
                token, size, same = text[end], sizes[text[end]], 0
                while same < end and text[end - 1 - same] == text[-1 - same]:
                    size += sizes[text[-1 - same]]
                    same += 1
                if size >= 2:
                    half = 0.5 if size == 2 else 1
                    logits[token] -= round(half * 0.2 * 1024 * 1.25 ** (size - 2)) / 1024
            text.append(logits.argmax().item())
            if text[-1] in ends:
                break
        expected.append(text)
    how = dict(temperature=0, sizes=sizes, compiled=compiled, ends=ends)
    found = run(model, prompts, 150, dry=0.2, **how)
    assert found == expected
    assert run(model, prompts, 150, **how) != expected, 'or the test shows nothing'


def test_log_probabilities_are_the_models():
    model, context = make(), list(PROMPTS[1])
    for new in generate(model, [context], Sampling(8, temperature=2.0, top_k=5, logprobs=True), seeds=[1]):
        _, token, logprob = new[0]
        assert logprob == pytest.approx(next_logits(model, context).log_softmax(-1)[token].item(), abs=1e-5)
        context.append(token)


@pytest.mark.parametrize('how', [dict(), dict(temperature=0), dict(top_k=3), dict(logprobs=True)])
def test_logits_that_are_not_finite_are_an_error(how):
    model = make()
    for model.lm_head.weight.data[3, 3] in (math.nan, math.inf):
        with pytest.raises(ValueError, match='not finite'):
            run(model, PROMPTS, 3, **how)
