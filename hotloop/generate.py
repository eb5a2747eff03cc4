"""Text, one token a step for a batch of prompts: KV cache, sampling, decoding."""

import contextlib
import math
import os
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from hotloop.quantize import Int8Linear


class KVCache:
    """
    Keys and values of what the rows of a batch have seen, preallocated: k and v hold a (B, K, T_max, D) tensor a layer.
    lengths: positions filled of each row, and the same on the device as `length`, so that neither asks the other.

    An empty cache takes sequences of any length at once, padded on the right to one (`coming` tells their lengths);
    after that one token of each row at a time, which goes to the row's own position. Work grows with what is filled.
    """

    def __init__(self, config, batch, num_positions, device, dtype):
        c = config.resolved()
        shape = (batch, c.n_kv_head, num_positions, c.n_embd // c.n_head)
        # a mask hides what is not filled, but NaN times a weight of 0 would be NaN: zeros, not empty
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(c.n_layer)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(c.n_layer)]
        self.lengths, self.coming = [0] * batch, None
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)

    def begin(self, T):
        """Positions of the T tokens of each row that come: (T,), or (B, 1) where rows differ."""
        self.filling = not any(self.lengths)
        assert self.filling or T == 1, 'a cache that is not empty takes one token at a time'
        self.end = max(self.lengths) + T
        assert self.end <= self.k[0].size(2), f'{self.end} positions, but the cache has {self.k[0].size(2)}'
        self.even = self.filling or min(self.lengths) == max(self.lengths)
        if self.even:
            return torch.arange(self.end - T, self.end, device=self.length.device)
        return self.begin_uneven()

    def begin_uneven(self):
        self.rows = torch.arange(self.length.size(0), device=self.length.device)
        places = torch.arange(self.end, device=self.length.device)
        self.mask = (places <= self.length[:, None])[:, None, None]  # (B, 1, 1, T_max)
        return self.length[:, None]

    def attend(self, layer, q, k, v):
        """Attention of (B, H, T, D) queries to what the rows have seen, to which k and v, (B, K, T, D), are added."""
        for cached, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.even:
                cached[:, :, self.end - new.size(2):self.end] = new
            else:
                cached[self.rows, :, self.length] = new[:, :, 0].to(cached.dtype)
        if not self.filling:
            k, v = self.k[layer][:, :, :self.end], self.v[layer][:, :, :self.end]
        # one new position may see everything before it: only a cache whose rows differ in length has a mask
        return self.attention(q, k, v, None if self.even else self.mask)

    def attention(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=q.size(2) > 1, enable_gqa=q.size(1) > k.size(1))

    def finish(self, x):
        """Called when all layers have written. (B, T, C) -> (B, C), the last position of each row."""
        if not self.filling:
            self.lengths = [n + 1 for n in self.lengths]
            self.length += 1
            return x[:, -1]
        self.lengths, self.coming = self.coming or [x.size(1)] * x.size(0), None
        self.length.copy_(torch.tensor(self.lengths))
        return x[torch.arange(x.size(0), device=x.device), self.length - 1]

    def put(self, rows, other, sources):
        """Fills these rows anew with what those rows of another cache hold; a source may repeat."""
        end = max(other.lengths)
        for mine, theirs in zip(self.k + self.v, other.k + other.v, strict=True):
            mine[rows, :, :end] = theirs[sources, :, :end].to(mine.dtype)
        self.length[rows] = other.length[sources]
        for row, source in zip(rows, sources, strict=True):
            self.lengths[row] = other.lengths[source]

    def keep(self, order):
        """Row i becomes what row order[i] was; order[i] >= i, so that a row which stays costs nothing."""
        end = max(self.lengths)
        for caches in (self.k, self.v):
            for layer, cached in enumerate(caches):
                for to, row in enumerate(order):
                    if row != to:
                        cached[to, :, :end] = cached[row, :, :end]
                caches[layer] = cached[:len(order)]
        self.lengths, self.length = [self.lengths[row] for row in order], self.length[order]


class FixedShapes(KVCache):
    """A cache as a compiled step or a CUDA graph wants it: always all of T_max, and nothing that the host counts."""

    def __init__(self, cache):
        self.k, self.v, self.length = cache.k, cache.v, cache.length
        self.even = self.filling = False

    def begin(self, T):
        self.end = self.k[0].size(2)
        return self.begin_uneven()

    def attention(self, q, k, v, mask):
        return (attend_in_sums if q.device.type == 'cpu' else super().attention)(q, k, v, mask)

    def finish(self, x):
        self.length += 1
        return x[:, -1]


def attend_in_sums(q, k, v, mask):
    """
    Attention of one query, (B, H, 1, D), to (B, K, T, D) keys, in sums of which a compiler makes loops: on a CPU they
    read bf16 keys in 1.1 ms (12 layers of 12 heads, 1,024 keys of 64) where the kernel takes 2.5 to 2.9 in float32.
    """
    B, K, _, D = k.shape
    q = q.view(B, K, -1, 1, D) * D**-0.5  # queries that share keys side by side
    scores = (q * k[:, :, None].float()).sum(-1)  # (B, K, H / K, T)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return (weights[..., None] * v[:, :, None].float()).sum(-2).view(B, -1, 1, D)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn, in this order; ids from `vocab` on are padding of the vocabulary and are never drawn."""
    repetition_penalty: float = 1.0  # logits of ids that occurred: divided by it if positive, multiplied if negative
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None  # only the k likeliest
    top_p: float | None = None  # only the smallest set of the likeliest with this probability together
    min_p: float | None = None  # only those of at least this share of the likeliest one's probability
    vocab: int | None = None
    logprobs: bool = False  # tell the model's own log-probability of each token, as at temperature 1 without limits


AHEAD = 1024  # random numbers that are made at once
GREEDY_BELOW = 1e-6  # temperatures that mean 0; dividing by less would overflow


class Draws:
    """
    The next token of each row, drawn without a word from the host. The n-th draw of a sequence takes the n-th number
    of its own seed, made on the CPU: the same in any batch and, up to rounding of the logits, on any device.
    """

    def __init__(self, contexts, seeds, sampling, vocab_size, device):
        self.sampling, B = sampling, len(contexts)
        seeds = [int.from_bytes(os.urandom(7), 'big') for _ in contexts] if seeds is None else seeds
        assert len(seeds) == B, f'{len(seeds)} seeds for {B} sequences'
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        # Apple GPUs have no float64
        self.numbers = torch.zeros(B, AHEAD, dtype=torch.float32 if device.type == 'mps' else torch.float64,
                                   device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.token = torch.zeros(B, 1, dtype=torch.int64, device=device)  # what is fed next
        self.told = torch.zeros(B, 2, device=device)  # the id, NaN where logits were not finite, and log-probability
        self.seen = torch.zeros(B if sampling.repetition_penalty != 1 else 0, vocab_size, dtype=torch.bool)
        for row, context in zip(self.seen, contexts, strict=False):
            row[context] = True
        self.seen = self.seen.to(device)[:, :sampling.vocab]
        self.make_numbers()

    def make_numbers(self):
        """The next AHEAD numbers of each seed; wanted again after as many draws."""
        self.numbers.copy_(torch.stack([torch.rand(AHEAD, dtype=torch.float64, generator=g) for g in self.generators]))
        self.count.zero_()

    def draw(self, logits):
        """From (B, V) logits."""
        s, logits = self.sampling, logits[:, :self.sampling.vocab]
        model_logits = logits
        if (r := s.repetition_penalty) != 1:
            logits = torch.where(self.seen, torch.where(logits < 0, logits * r, logits / r), logits)
        token = sample_token(logits, self.numbers.index_select(1, self.count), s)  # (B, 1)
        if r != 1:
            self.seen.scatter_(1, token, True)
        self.token.copy_(token)
        self.count += 1
        # one bad logit spoils the sum: cheaper than asking each of them
        self.told[:, 0] = torch.where(model_logits.sum(-1).isfinite(), token[:, 0], math.nan)
        if s.logprobs:
            self.told[:, 1] = model_logits.log_softmax(-1).gather(-1, token)[:, 0]

    def keep(self, order):
        """Row i becomes what row order[i] was."""
        self.numbers, self.token, self.told = self.numbers[order], self.token[order], self.told[order]
        self.generators = [self.generators[row] for row in order]
        self.seen = self.seen[order] if len(self.seen) else self.seen


def sample_token(logits, number, sampling):
    """One id a row, (B, 1), from (B, V) logits and a uniform number of [0, 1) a row, (B, 1)."""
    s, V = sampling, logits.size(-1)
    if s.temperature < GREEDY_BELOW:
        return logits.argmax(dim=-1, keepdim=True)
    order = None
    if s.top_k is not None or s.top_p is not None:  # sorted, and after top_k short: all that follows is cheap
        k = min(s.top_k or V, V)
        logits, order = logits.sort(descending=True) if k == V else logits.topk(k)
    probs = (logits / s.temperature).softmax(dim=-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if s.top_p is not None:
        keep &= probs.cumsum(dim=-1) - probs < s.top_p  # the probability of everything likelier; 0 for the first
        keep[:, 0] = True
    if s.min_p is not None:
        keep &= probs >= s.min_p * probs.amax(dim=-1, keepdim=True)
    below = torch.where(keep, probs, 0.0).cumsum(dim=-1, dtype=number.dtype)
    place = torch.searchsorted(below, number * below[:, -1:], right=True).clamp_max(below.size(-1) - 1)
    return place if order is None else order.gather(-1, place)


def closing_gaps(alive):
    """An order of these rows in which those beyond their number move into the gaps and the others stay: [0, 3, 2]."""
    order, last = list(range(len(alive))), [row for row in alive if row >= len(alive)]
    for row in sorted(set(order) - set(alive)):
        order[row] = last.pop()
    return order


NOT_FINITE = ('the model returned {} not finite: its weights are damaged, it diverged, or its numbers are beyond '
              'float16, where that is the dtype (--dtype=float32)')


def tell(drawn, contexts, stop, stopped):
    """[(sequence, token, log-probability)] of the sequences that still go on; remembers the tokens, and who stops."""
    sequences, read = drawn
    told = [(s, *pair) for s, pair in zip(sequences, read().tolist(), strict=True) if s not in stopped]
    if any(math.isnan(token) for _, token, _ in told):
        raise ValueError(NOT_FINITE.format('logits that are'))
    told = [(s, int(token), logprob) for s, token, logprob in told]
    for s, token, _ in told:
        contexts[s].append(token)
    stopped.update(s for s, token, _ in told if token in stop)
    return told


READ_LATE = ('cuda',)  # devices on which the host sees a token only after it has started the next step


def read_later(values):
    """
    Starts copying a tensor to the host; calling the result waits for that copy alone. Reading it a step late keeps the
    device busy meanwhile.
    """
    if values.device.type != 'cuda':
        return values.cpu
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return lambda: (copied.synchronize(), host)[1]


def decode_step(model, cache, draws):
    """The next token of each row, all shapes fixed and everything on the device."""
    draws.draw(model(draws.token, cache=FixedShapes(cache)))


# How a step is compiled on a CPU. Its matrices become constants, laid out for products that Inductor writes itself and
# times against the library's: GPT-2 124M in int8 from 14.5 to 7.3 ms a token (tests/bench/LOG.md has the others). As
# constants they would go into Inductor's cache of graphs on disk too, hundreds of megabytes of them. The last two keep
# its tables off the terminal.
CPU_STEP = dict(freezing=True, max_autotune=True, fx_graph_cache=False,
                autotune_num_choices_displayed=0, max_autotune_report_choices_stats=False)


@contextlib.contextmanager
def compiling_steps(device):
    """The settings under which torch.compile compiles decode_step."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor
    ours = CPU_STEP if device.type == 'cpu' else {}
    # after 8 shapes of a function, and then of all models 256, torch would go on without compiling
    with (dynamo.patch(recompile_limit=1000, accumulated_recompile_limit=1000),
          inductor.patch({name: value for name, value in ours.items() if hasattr(inductor, name)}),
          warnings.catch_warnings()):
        warnings.filterwarnings('ignore', 'TypedStorage is deprecated')  # torch's own, of itself
        yield


def fixed_step(model, cache, draws, decode):
    """
    A function that does decode_step, compiled if asked for; on CUDA as a graph, which one launch replays. Compiled on a
    CPU it keeps the weights that the model has now.
    """
    device, compiled = model.cos.device, decode == 'compiled'
    function = torch.compile(decode_step, dynamic=False) if compiled else decode_step
    step = partial(function, model, cache, draws)
    state = [cache.length, draws.count, draws.token, draws.told, draws.seen]  # what a step changes, but the cache

    def rehearse(times):
        """Compiles, and has libraries allocate what they need; then all is as if it had not been."""
        before = [t.clone() for t in state]
        with compiling_steps(device) if compiled else contextlib.nullcontext():
            for _ in range(times):
                step()
                for t, was in zip(state, before, strict=True):
                    t.copy_(was)
    if device.type != 'cuda':
        if compiled:
            rehearse(1)
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rehearse(2)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate(model, prompts, max_new_tokens, num_samples=1, seeds=None, stop=(), stopped=None, past_context='slide',
             decode='eager', **sampling):
    """
    Continues prompts, lists of ids of any lengths, all in one batch. Yields [(sequence, token, log-probability)],
    a list a step; sequence i * num_samples + j is the j-th sample of prompt i, and shares its prefill.

    seeds:        one a sequence; what it draws is a function of its seed, whatever else is in the batch. None: new
    stop:         ids after which a sequence is finished
    stopped:      a set of the sequences that are finished; the caller may add to it. They leave the batch, where
                  steps are compiled or graphs by halves
    past_context: 'slide' drops the oldest eighth of a full context and computes the rest anew, at positions that
                  training has seen; 'stop' finishes the sequence
    decode:       'eager'; 'graph' replays a CUDA graph of a step; 'compiled' compiles it, and replays it on CUDA;
                  on a CPU with the weights as constants, so that a model's later changes are not seen
    sampling:     fields of Sampling
    ValueError when logits are not finite.
    """
    size, sampling, stopped = model.config.block_size, Sampling(**sampling), set() if stopped is None else stopped
    contexts = [list(prompt[-size:]) for prompt in prompts for _ in range(num_samples)]
    assert all(contexts), 'a prompt is empty'
    if max_new_tokens < 1 or not contexts:
        return
    room = min(size, max(map(len, contexts)) + max_new_tokens)
    if decode != 'eager':  # so that a longer prompt seldom means another graph, or another compilation
        room = min(size, max(128, 2**(room - 1).bit_length()) if decode == 'compiled' else -(-room // 128) * 128)
    prefilled, logits = prefill(model, contexts[::num_samples])
    sources = torch.arange(len(prompts)).repeat_interleave(num_samples).tolist()
    cache, sequences = new_cache(model, len(contexts), room, decode), list(range(len(contexts)))
    cache.put(sequences, prefilled, sources)
    draws = Draws(contexts, seeds, sampling, model.config.vocab_size, model.cos.device)
    draws.draw(logits[sources])
    del prefilled, logits
    waiting, step = deque(), None  # tokens on their way to the host, which reads them a step late where that helps
    for left in reversed(range(max_new_tokens)):
        waiting.append((sequences, read_later(draws.told)))
        full = [s for s, length in zip(sequences, cache.lengths, strict=True) if length == size]
        while len(waiting) > (model.cos.device.type in READ_LATE and left and not full):
            if told := tell(waiting.popleft(), contexts, stop, stopped):
                yield told
        if full and past_context == 'stop':
            stopped.update(full)
        alive = [row for row, s in enumerate(sequences) if s not in stopped]
        if not alive or not left:
            return
        # to a compiled step or a graph another batch is another program: they drop rows by halves
        if len(alive) <= (len(sequences) - 1 if decode == 'eager' else len(sequences) // 2):
            order = closing_gaps(alive)
            sequences, step = [sequences[row] for row in order], None
            cache.keep(order)
            draws.keep(order)
        slide(model, cache, sequences, contexts, stopped)
        if (max_new_tokens - left) % AHEAD == 0:
            draws.make_numbers()
        if decode == 'eager':
            draws.draw(model(draws.token, cache=cache))
            continue
        step = step or fixed_step(model, cache, draws, decode)
        step()
        cache.lengths = [n + 1 for n in cache.lengths]


def prefill(model, contexts):
    """(a cache that holds these lists of ids, (B, V) logits after each) by one forward."""
    lengths = [len(context) for context in contexts]
    idx = torch.tensor([context + [0] * (max(lengths) - len(context)) for context in contexts])
    cache = new_cache(model, len(contexts), max(lengths))
    cache.coming = lengths
    return cache, model(idx.to(model.cos.device), cache=cache)


def slide(model, cache, sequences, contexts, stopped):
    """
    Makes room in the rows that are full: the oldest eighth of their context goes, and the rest is computed anew,
    but for the newest token, which is the next to be fed. A prefill in size / 8 steps, for nanoGPT's in each.
    """
    size = model.config.block_size
    full = [row for row, length in enumerate(cache.lengths) if length == size]
    for row in full:
        contexts[sequences[row]] = contexts[sequences[row]][max(size // 8, 1):]
        cache.lengths[row] = cache.length[row] = 0  # a row that is finished, but not dropped yet, starts anywhere
    full = [row for row in full if sequences[row] not in stopped and size > 1]
    if full:
        anew, _ = prefill(model, [contexts[sequences[row]][:-1] for row in full])
        cache.put(full, anew, list(range(len(full))))


def new_cache(model, batch, num_positions, decode='eager'):
    dtype = model.compute_dtype
    if model.cos.device.type == 'cpu':
        if decode != 'compiled':
            dtype = torch.float32  # see Attention
        elif dtype == torch.float32 and type(model.lm_head) is Int8Linear:
            dtype = torch.bfloat16  # to which the products round what they are given anyway
    return KVCache(model.config, batch, num_positions, model.cos.device, dtype)
