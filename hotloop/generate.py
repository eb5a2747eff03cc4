"""Text generation, one token a step for a batch of prompts: the KV cache, how a token is drawn, the loop."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from hotloop.quantize import Int8Linear

GREEDY_BELOW = 1e-6  # temperatures that mean 0; dividing by a smaller one would overflow
NOT_FINITE = ('the model returned {} not finite: its weights are damaged, it diverged, or its numbers exceed '
              'the range of float16 (then use --dtype=float32)')


class KVCache:
    """
    Keys and values of the tokens that each row of a batch has seen. k[layer] and v[layer] are (B, K,
    num_positions, D); row b fills the first length[b] positions.

    An empty cache takes prompts of any lengths, padded on the right; after that each row takes one token
    a step. While all rows are equally long, attention needs no mask, which saves a fifth of its time on a
    CPU. static: no shape depends on what is filled, as a compiled step requires.
    """

    def __init__(self, config, batch, num_positions, device, dtype, static=False):
        c = config.resolved()
        shape = (batch, c.n_kv_head, num_positions, c.n_embd // c.n_head)
        # zeros, not empty: a masked position has weight 0, and 0 times NaN is NaN
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(c.n_layer)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(c.n_layer)]
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.prompt_lengths = None  # (B,), where prompts are padded
        self.mask, self.static = None, static

    def begin(self, T):
        """Prepares for the next T tokens of each row. Returns their positions, (B, T)."""
        device, self.end = self.length.device, self.k[0].size(2)
        positions = self.length[:, None] + torch.arange(T, device=device)
        if not self.static:
            shortest, longest = self.length.aminmax()
            assert T == 1 or longest == 0, 'a cache that is not empty takes one token at a time'
            assert longest + T <= self.end, f'{longest + T} positions, but the cache has {self.end}'
            self.end = int(longest) + T
            if shortest == longest:
                self.mask = None
                return positions
        self.mask = (torch.arange(self.end, device=device) <= positions)[:, None, None]  # (B, 1, 1, end)
        return positions

    def attend(self, layer, q, k, v):
        """Stores k and v, (B, K, T, D); returns what q, (B, H, T, D), reads from all its row has seen."""
        for cached, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.mask is None:
                cached[:, :, self.end - new.size(2):self.end] = new
            else:
                rows = torch.arange(new.size(0), device=new.device)
                cached[rows, :, self.length] = new[:, :, 0].to(cached.dtype)
        k, v = self.k[layer][:, :, :self.end], self.v[layer][:, :, :self.end]
        if self.static and q.device.type == 'cpu':
            return attend_in_sums(q, k, v, self.mask)
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=q.size(2) > 1,
                                              enable_gqa=q.size(1) > k.size(1))

    def finish(self, x):
        """Counts the new tokens when all layers are done. (B, T, C) -> (B, C), each row's last token."""
        self.mask = None
        if self.prompt_lengths is None:
            self.length += x.size(1)
            return x[:, -1]
        self.length += self.prompt_lengths
        return x[torch.arange(x.size(0), device=x.device), self.prompt_lengths - 1]

    def put(self, rows, other, sources):
        """Row rows[i] becomes a copy of row sources[i] of another cache. Both are (N,) ids."""
        end = other.k[0].size(2)
        for ours, theirs in zip(self.k + self.v, other.k + other.v, strict=True):
            ours[rows, :, :end] = theirs[sources].to(ours.dtype)
        self.length[rows] = other.length[sources]

    def select(self, rows):
        """Keeps these rows, (N,) ids, and drops the others."""
        self.length = self.length[rows]
        for caches in (self.k, self.v):
            for layer, cached in enumerate(caches):
                caches[layer] = cached.index_select(0, rows)


def attend_in_sums(q, k, v, mask):
    """
    Attention of one query, (B, H, 1, D), to (B, K, T, D) keys, as sums that a compiler turns into loops.
    On a CPU those read bf16 keys in 1.1 ms (12 layers of 12 heads, 1,024 keys of 64); the kernel needs
    float32 keys and takes 2.5.
    """
    B, K, _, D = k.shape
    q = q.view(B, K, -1, 1, D) * D**-0.5  # queries that share keys stand side by side
    scores = (q * k[:, :, None].float()).sum(-1)  # (B, K, H / K, T)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return (weights[..., None] * v[:, :, None].float()).sum(-2).view(B, -1, 1, D)


def new_cache(model, batch, num_positions, static=False):
    dtype = model.compute_dtype
    if model.cos.device.type == 'cpu':
        if not static:
            dtype = torch.float32  # what Attention computes in on a CPU
        elif dtype == torch.float32 and isinstance(model.lm_head, Int8Linear):
            dtype = torch.bfloat16  # to which int8 products round their inputs anyway
    return KVCache(model.config, batch, num_positions, model.cos.device, dtype, static)


@dataclass(frozen=True)
class Sampling:
    """How texts are drawn. Limits apply in this order: repetition_penalty, top_k, temperature, top_p, min_p."""
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None  # only the k most probable ids
    top_p: float | None = None  # only the smallest set of most probable ids that has this probability
    min_p: float | None = None  # only ids with at least this share of the highest probability
    repetition_penalty: float = 1.0  # divides positive logits of ids that occurred, multiplies negative ones
    stop: frozenset = frozenset()  # ids that end a text
    past_context: str = 'slide'  # slide: a full context drops its oldest eighth; stop: it ends the text
    vocab: int | None = None  # ids from here on are padding of the vocabulary and are never drawn
    logprobs: bool = False  # compute each token's log-probability: the model's own, before any limit


def sample_token(logits, number, sampling):
    """One id a row, (B, 1), from (B, V) logits and a uniform number in [0, 1) a row, (B, 1)."""
    s, V = sampling, logits.size(-1)
    if s.temperature < GREEDY_BELOW:
        return logits.argmax(dim=-1, keepdim=True)
    order = None
    if s.top_k is not None or s.top_p is not None:  # top_k first: it leaves little to sort and to sum
        k = min(s.top_k or V, V)
        logits, order = logits.sort(descending=True) if k == V else logits.topk(k)
    probs = (logits / s.temperature).softmax(dim=-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if s.top_p is not None:
        keep &= probs.cumsum(dim=-1) - probs < s.top_p  # the sum of all more probable ids; 0 for the first
        keep[:, 0] = True
    if s.min_p is not None:
        keep &= probs >= s.min_p * probs.amax(dim=-1, keepdim=True)
    below = torch.where(keep, probs, 0.0).cumsum(dim=-1, dtype=number.dtype)
    index = torch.searchsorted(below, number * below[:, -1:], right=True).clamp_max(below.size(-1) - 1)
    return index if order is None else order.gather(-1, index)


def draw(logits, seen, numbers, sampling):
    """
    One token a row from (B, V) logits, as (B, 2) float32: its id, exact below 2^24, and its log-probability
    (0 unless asked for, NaN where logits are not finite). seen: (B, V), the ids that occurred in each row.
    """
    logits, penalty = logits[:, :sampling.vocab], sampling.repetition_penalty
    limited = logits
    if penalty != 1:
        penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
        limited = torch.where(seen[:, :sampling.vocab], penalized, logits)
    token = sample_token(limited, numbers, sampling)  # (B, 1)
    if sampling.logprobs:
        logprob = logits.log_softmax(-1).gather(-1, token)
    else:
        logprob = torch.zeros_like(token, dtype=torch.float32)
    finite = logits.sum(-1, keepdim=True).isfinite()  # one bad logit spoils the sum; checking each costs more
    return torch.cat((token.float(), torch.where(finite, logprob, math.nan)), dim=1)


def decode_step(model, cache, tokens, seen, numbers, sampling):
    """Feeds each row its newest token, (B, 1), and draws the next. Returns what draw returns."""
    return draw(model(tokens, cache=cache), seen, numbers, sampling)


# How a step is compiled on a CPU. Weights become constants, laid out for products that Inductor writes and
# times against the library's: GPT-2 124M in int8 from 14.5 to 7.3 ms a token (tests/bench/LOG.md). The graph
# cache on disk is off because it would store those constants; the last two keep tables off the terminal.
CPU_STEP = dict(freezing=True, max_autotune=True, fx_graph_cache=False, autotune_num_choices_displayed=0,
                max_autotune_report_choices_stats=False)


def compile_step(device):
    """decode_step, compiled for fixed shapes; on CUDA as a graph."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor
    on_cpu = device.type == 'cpu'
    options = {name: value for name, value in CPU_STEP.items() if on_cpu and hasattr(inductor, name)}
    compiled = torch.compile(decode_step, dynamic=False, mode='reduce-overhead' if device.type == 'cuda' else None)

    def step(model, cache, *args):
        for tensor in (*cache.k, *cache.v, cache.length):
            torch._dynamo.mark_static_address(tensor)  # a graph writes to it in place
        # after 8 shapes of a function, or 256 of all models, torch would continue without compiling
        with (dynamo.patch(recompile_limit=1000, accumulated_recompile_limit=1000), inductor.patch(options),
              warnings.catch_warnings()):
            warnings.filterwarnings('ignore', 'TypedStorage is deprecated')  # torch warns about itself
            return compiled(model, cache, *args)
    return step


def uniform_numbers(generators, device):
    """The next number in [0, 1) of each generator, (B, 1). Made on the CPU, so equal for every device."""
    numbers = torch.stack([torch.rand(1, dtype=torch.float64, generator=g) for g in generators])
    return numbers.to(device, torch.float32 if device.type == 'mps' else torch.float64)  # MPS has no float64


def prefill(model, contexts):
    """Feeds lists of ids in one forward. Returns a cache that holds them and the (B, V) logits after each."""
    device, lengths = model.cos.device, [len(context) for context in contexts]
    padded = [context + [0] * (max(lengths) - len(context)) for context in contexts]
    cache = new_cache(model, len(contexts), max(lengths))
    cache.prompt_lengths = torch.tensor(lengths, device=device)
    return cache, model(torch.tensor(padded, device=device), cache=cache)


def read(drawn, contexts, sequences, stopped):
    """Appends tokens to their contexts. Returns (sequence, token, log-probability) of unfinished sequences."""
    new = []
    for context, sequence, (token, logprob) in zip(contexts, sequences, drawn.tolist(), strict=True):
        context.append(int(token))
        if sequence in stopped:
            continue
        if math.isnan(logprob):
            raise ValueError(NOT_FINITE.format('logits that are'))
        new.append((sequence, int(token), logprob))
    return new


def slide(model, cache, contexts, finished):
    """
    Drops the oldest eighth of each full context and computes the rest again, at positions that training has
    seen: a prefill every size / 8 steps, where nanoGPT runs one in each. The newest token is not in the
    cache yet. contexts and finished: of each row; a finished row keeps only its newest token.
    """
    size = model.config.block_size
    full = [row for row, context in enumerate(contexts) if len(context) > size]
    for row in full:
        dropped = len(contexts[row]) - 1 if finished[row] else max(size // 8, 1)
        del contexts[row][:dropped]
        cache.length[row] = 0
    refill = [row for row in full if len(contexts[row]) > 1]
    if refill:
        filled, _ = prefill(model, [contexts[row][:-1] for row in refill])
        rows = torch.tensor(refill, device=model.cos.device)
        cache.put(rows, filled, torch.arange(len(refill), device=rows.device))


@torch.no_grad()
def generate(model, prompts, sampling, num_samples=1, seeds=None, stopped=None, compiled=False):
    """
    Continues prompts, lists of ids of any lengths, in one batch. Yields a list of (sequence, token,
    log-probability) each step; sequence i * num_samples + j is the j-th sample of prompt i.

    seeds:    one a sequence; its text is a function of prompt and seed, whatever else is in the batch.
              None: random ones
    stopped:  a set of the sequences that are finished; the caller may add to it. They leave the batch when
              they are half of it
    compiled: compile the step; on a CPU with the weights as constants, so later changes have no effect
    Raises ValueError when logits are not finite.
    """
    size, device = model.config.block_size, model.cos.device
    stopped = set() if stopped is None else stopped
    contexts = [list(prompt[-size:]) for prompt in prompts for _ in range(num_samples)]  # of each row
    assert all(contexts), 'a prompt is empty'
    if sampling.max_new_tokens < 1 or not contexts:
        return
    if seeds is None:
        seeds = [torch.Generator().seed() for _ in contexts]
    assert len(seeds) == len(contexts), f'{len(seeds)} seeds for {len(contexts)} sequences'
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    seen = torch.zeros(len(contexts), model.config.vocab_size, dtype=torch.bool)
    for row, context in zip(seen, contexts, strict=True):
        row[context] = True
    seen = seen.to(device)
    room = max(map(len, contexts)) + sampling.max_new_tokens
    if compiled:  # powers of two, so that few prompts need another compilation
        room = max(128, 2**(room - 1).bit_length())
    prefilled, logits = prefill(model, contexts[::num_samples])
    cache = new_cache(model, len(contexts), min(size, room), static=compiled)
    rows = torch.arange(len(contexts), device=device)
    cache.put(rows, prefilled, rows // num_samples)
    drawn = draw(logits[rows // num_samples], seen, uniform_numbers(generators, device), sampling)
    del prefilled, logits
    step = compile_step(device) if compiled else decode_step
    sequences = list(range(len(contexts)))  # of each row, as are contexts and generators
    for left in reversed(range(sampling.max_new_tokens)):
        tokens = drawn[:, :1].long()  # a copy, because a CUDA graph overwrites at each step what it returned
        seen.scatter_(1, tokens, True)
        new = read(drawn, contexts, sequences, stopped)
        stopped.update(sequence for sequence, token, _ in new if token in sampling.stop)
        if new:
            yield new
        if sampling.past_context == 'stop':
            stopped.update(s for s, context in zip(sequences, contexts, strict=True) if len(context) > size)
        alive = [row for row, sequence in enumerate(sequences) if sequence not in stopped]
        if not alive or not left:
            return
        if len(alive) <= len(sequences) // 2:
            contexts = [contexts[row] for row in alive]
            sequences = [sequences[row] for row in alive]
            generators = [generators[row] for row in alive]
            rows = torch.tensor(alive, device=device)
            tokens, seen = tokens[rows], seen[rows]
            cache.select(rows)
        slide(model, cache, contexts, [sequence in stopped for sequence in sequences])
        drawn = step(model, cache, tokens, seen, uniform_numbers(generators, device), sampling)
