"""Text generation, one token per step for a batch of prompts: sampling, and compilation of the step."""

import math
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop.inference.kv_cache import KVCache
from hotloop.inference.quantize import Int8Linear

GREEDY_BELOW = 1e-6  # temperatures that mean 0; dividing by a smaller one would overflow
NOT_FINITE = ('the model returned {} not finite: its weights are damaged, it diverged, or its numbers exceed '
              'the range of float16 (then use --dtype=float32)')
# where lengths vary: cuDNN would build a plan for each, which takes tens of milliseconds on the host (Hopper)
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# DRY ("don't repeat yourself"): a token that would complete a text of n bytes (Tokenizer.repeat_sizes) loses
# dry x 1.25^(n - 2) of its logit for each time that the row has drawn this text, from n = 3 on; for n = 2,
# a sign or a letter or two, half as much. Other programs count tokens, and take the longest text alone:
# tests/bench/LOG.md. The default is that of sampling_of() in texts.py.
DRY_GROWTH = 1.25
DRY_WINDOW = 512  # tokens, of which the older half is then forgotten, or common words would become rare
DRY_UNIT = 2.0**-10  # of a logit: CUDA adds integers in any order to the same sum


@dataclass(frozen=True)
class Sampling:
    """The sampling settings. The order is repetition_penalty, dry, top_k, temperature, top_p, min_p."""
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None  # only the k most probable ids
    top_p: float | None = None  # only the smallest set of most probable ids that has this probability
    min_p: float | None = None  # only ids with at least this share of the highest probability
    repetition_penalty: float = 1.0  # divides positive logits of ids that occurred, multiplies negative ones
    dry: float = 0.0  # strength of the penalty on repeated texts
    sizes: np.ndarray | None = field(default=None, compare=False)  # Tokenizer.repeat_sizes, for dry
    bos: int | None = None  # the id that begins every text; it stays when the oldest tokens are dropped
    vocab: int | None = None  # ids from here on are padding of the vocabulary and are never drawn
    logprobs: bool = False  # compute each token's log-probability: the model's own, before any limit


def sample_token(logits, number, sampling):
    """Sample one id per row, (B, 1), from (B, V) logits and a uniform number in [0, 1) per row, (B, 1)."""
    s, V = sampling, logits.size(-1)
    if s.temperature < GREEDY_BELOW:
        return logits.argmax(dim=-1, keepdim=True)
    order = None
    if s.top_k is not None or s.top_p is not None:  # top_k first: it leaves less to sort and sum
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


def draw(logits, seen, repeats, numbers, sampling):
    """
    Draw one token per row from (B, V) logits, as (B, 2) float32: its id, exact below 2^24, and its
    log-probability (0 unless requested, NaN where logits are not finite). seen: (B, V), ids that occurred.
    repeats: what Written.add() returned, or None.
    """
    logits = limited = logits[:, :sampling.vocab]
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
        limited = torch.where(seen[:, :sampling.vocab], penalized, logits)
    if repeats is not None:
        total = torch.zeros_like(limited, dtype=torch.int32).scatter_add(1, *repeats)
        limited = limited - total * DRY_UNIT
    token = sample_token(limited, numbers, sampling)  # (B, 1)
    logprob = torch.zeros_like(token, dtype=torch.float32)
    if sampling.logprobs:
        logprob = logits.log_softmax(-1).gather(-1, token)
    finite = logits.sum(-1, keepdim=True).isfinite()  # one bad logit spoils the sum; checking each costs more
    return torch.cat((token.float(), torch.where(finite, logprob, math.nan)), dim=1)


class Written:
    """
    What each row has drawn: ids, and for each of them, how many bytes drawing it next would repeat.
    static: the step is compiled for fixed shapes.
    """

    def __init__(self, num_rows, sampling, device, static):
        self.device = device
        self.static = static
        self.sizes = sampling.sizes
        # a power of two, because each width is compiled
        width = min(max(128, 1 << (sampling.max_new_tokens - 1).bit_length()), DRY_WINDOW)
        self.ids = np.zeros((num_rows, width), np.int64)
        self.repeated = np.zeros_like(self.ids)
        self.length = 0
        penalty = sampling.dry / DRY_UNIT * DRY_GROWTH ** np.arange(-2, 100)
        penalty[:3] *= 0, 0, 0.5
        # at most 1024 of a logit: the sum over the window fits in int32
        self.penalty = penalty.clip(max=2**20).round().astype(np.int32)

    def add(self, tokens):
        """
        Append a token to each row. Returns ids that would repeat something, (B, N), each perhaps several
        times, and their penalties in DRY_UNIT.
        """
        n = self.length
        tokens = np.array(tokens)[:, None]
        before = np.zeros((len(tokens), n + 1), np.int64)  # bytes before each that are the row's last, too
        before[:, 1:] = self.repeated[:, :n] * (self.ids[:, :n] == tokens)
        if n == self.ids.shape[1]:
            n //= 2
            self.ids[:, :n] = self.ids[:, n:]
            self.repeated[:, n:] = 0
            before = before[:, n:]
        self.ids[:, n:n + 1] = tokens
        self.length = n + 1
        self.repeated[:, :n + 1] = self.sizes[self.ids[:, :n + 1]] + before
        used = slice(None) if self.static else slice(n + 1)
        ids = self.ids[:, used]
        penalty = self.penalty[self.repeated[:, used].clip(max=len(self.penalty) - 1)]
        return [torch.from_numpy(part).to(self.device) for part in (ids, penalty)]

    def select(self, rows):
        self.ids = self.ids[rows]
        self.repeated = self.repeated[rows]


def decode_step(model, cache, tokens, seen, repeats, numbers, sampling):
    """Feed each row its newest token, (B, 1), and draw the next. Returns what draw() returns."""
    return draw(model(tokens, cache=cache), seen, repeats, numbers, sampling)


# On a CPU weights become constants, laid out for products that Inductor times: GPT-2 124M in int8 from 14.5
# to 7.3 ms per token. The cache on disk would store the constants; the last two print no tables.
CPU_STEP = dict(freezing=True, max_autotune=True, fx_graph_cache=False, autotune_num_choices_displayed=0,
                max_autotune_report_choices_stats=False)
# Inductor then generates the product of one row with int8 weights on CUDA, without a copy of them in bf16.
INT8_CUDA_STEP = dict(coordinate_descent_tuning=True)


def compile_step(model):
    """Compile decode_step() of a model for fixed shapes; on CUDA as a graph."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor
    device, options = model.cos.device, {}
    if device.type == 'cpu':
        options = CPU_STEP
    elif device.type == 'cuda' and isinstance(model.lm_head, Int8Linear):
        options = INT8_CUDA_STEP
    mode = 'reduce-overhead' if device.type == 'cuda' else None
    compiled, known = torch.compile(decode_step, dynamic=False, mode=mode), set()

    def step(model, cache, *args):
        shape = cache.num_positions, len(cache.length)
        if shape in known:  # patching the settings takes 0.2 ms
            return compiled(model, cache, *args)
        known.add(shape)
        if device.type == 'cuda':  # a graph writes to these in place
            for tensor in cache.tensors():
                torch._dynamo.mark_static_address(tensor)
        # after 8 shapes of a function, or 256 of all models, torch would continue without compiling
        with (dynamo.patch(recompile_limit=1000, accumulated_recompile_limit=1000), inductor.patch(options),
              warnings.catch_warnings()):
            warnings.filterwarnings('ignore', 'TypedStorage is deprecated')  # torch warns about itself
            return compiled(model, cache, *args)
    return step


def last_tokens(prompt, size, bos):
    """Return the last `size` ids of a prompt, after its bos if it begins with one."""
    if len(prompt) > size > 1 and prompt[0] == bos:
        return [bos, *prompt[1 - size:]]
    return list(prompt[-size:])


class Row(NamedTuple):
    """The state of one row of the batch on the host."""
    sequence: int
    context: list  # ids of the prompt and the text; the newest is not in the cache yet
    generator: torch.Generator


def uniform_numbers(rows, device):
    """Draw the next number in [0, 1) of each row, (B, 1), on the CPU: it is the same on every device."""
    numbers = torch.stack([torch.rand(1, dtype=torch.float64, generator=row.generator) for row in rows])
    return numbers.to(device, torch.float32 if device.type == 'mps' else torch.float64)  # MPS has no float64


@sdpa_kernel(WITHOUT_CUDNN)
def prefill(model, contexts):
    """Feed lists of ids in one forward. Returns a cache that holds them and the (B, V) logits after each."""
    device, longest = model.cos.device, max(map(len, contexts))
    padded = [[*context, *[0] * (longest - len(context))] for context in contexts]
    cache = KVCache(model, len(contexts), longest)
    cache.prompt_lengths = torch.tensor([len(context) for context in contexts], device=device)
    return cache, model(torch.tensor(padded, device=device), cache=cache)


def slide(model, cache, rows, bos):
    """Drop the oldest eighth of each full context, but a bos, and compute the rest again."""
    size = model.config.block_size
    full = [index for index, row in enumerate(rows) if len(row.context) > size]
    for index in full:
        first = int(rows[index].context[0] == bos and size > 1)
        del rows[index].context[first:first + max(size // 8, 1)]
    if full:
        filled, _ = prefill(model, [rows[index].context[:-1] for index in full])
        cache.put(full, filled, slice(None))


@torch.no_grad()
def generate(model, prompts, sampling, seeds=None, stopped=frozenset(), compiled=False):
    """
    Continue prompts, lists of ids of any lengths, in one batch; equal ones share a prefill. Yields a list of
    (index of the prompt, token, log-probability) each step.

    seeds: one per prompt, by default its index; a text depends only on prompt and seed. stopped: indices of
    finished sequences, to which the caller may add; once half of the batch has finished, they are dropped.
    compiled: compile the step for the complete batch; on a CPU with the weights as constants. Raises
    ValueError when logits are not finite.
    """
    size, device = model.config.block_size, model.cos.device
    contexts = [last_tokens(prompt, size, sampling.bos) for prompt in prompts]
    assert all(contexts), 'a prompt is empty'
    rows, seen = [], torch.zeros(len(contexts), model.config.vocab_size, dtype=torch.bool, device=device)
    for sequence, (context, seed) in enumerate(zip(contexts, seeds or range(len(contexts)), strict=True)):
        rows.append(Row(sequence, context, torch.Generator().manual_seed(seed)))
        seen[sequence, context] = True
    places = {}  # {context: its row of the prefill}
    sources = [places.setdefault(tuple(context), len(places)) for context in contexts]
    prefilled, logits = prefill(model, list(places))
    cache = KVCache(model, len(rows), max(map(len, contexts)) + sampling.max_new_tokens, static=compiled)
    cache.put(slice(None), prefilled, sources)
    drawn = draw(logits[sources], seen, None, uniform_numbers(rows, device), sampling)
    written = Written(len(rows), sampling, device, compiled) if sampling.dry else None
    repeats = None
    del prefilled, logits
    step = compile_step(model) if compiled else sdpa_kernel(WITHOUT_CUDNN)(decode_step)
    for left in reversed(range(sampling.max_new_tokens)):
        tokens = drawn[:, :1].long()  # a copy, because a CUDA graph overwrites at each step what it returned
        seen.scatter_(1, tokens, True)
        new = []
        for row, (token, logprob) in zip(rows, drawn.tolist(), strict=True):
            row.context.append(int(token))
            if row.sequence in stopped:
                continue
            if math.isnan(logprob):
                raise ValueError(NOT_FINITE.format('logits that are'))
            new.append((row.sequence, int(token), logprob))
        yield new
        alive = [index for index, row in enumerate(rows) if row.sequence not in stopped]
        if not alive or not left:
            return
        if not compiled and len(alive) <= len(rows) // 2:  # another shape would compile again
            rows = [rows[index] for index in alive]
            tokens, seen = tokens[alive], seen[alive]
            cache.select(alive)
            if written:
                written.select(alive)
        if written:
            repeats = written.add([row.context[-1] for row in rows])
        slide(model, cache, rows, sampling.bos)
        drawn = step(model, cache, tokens, seen, repeats, uniform_numbers(rows, device), sampling)
