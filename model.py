"""
The transformer: config, attention, MLP, block, loss, initial weights, counts. It imports torch and, when a
setting names one, hotloop/mixers.

Letters: B batch, T time, C channels (n_embd), H heads, K key/value heads, D head channels, V vocabulary.

Four presets (PRESETS) set a few independent settings. 'gpt2' is OpenAI's GPT-2 as in nanoGPT, weight for
weight; 'modern' collects later changes that learn faster, from modded-nanogpt and nanochat; 'hybrid' adds
those that help small models most; 'qwen3' is Qwen3's architecture (arXiv 2505.09388), which llama.cpp and
transformers run.
__init__ resolves each setting to a module or a function, so forward rarely consults them.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# -----------------------------------------------------------------------------
# settings

# A setting of GPTConfig that is None takes its value from here.
PRESETS = {
    'gpt2': dict(mixer='attention', position='learned', norm='layernorm', mlp='gelu', qk_norm=False, tie=True,
                 zero_init=False, key_shift=False, softcap=0.0, x0_mix=False, bigram_rows=0,
                 value_embed=False, head_gate=False),
    'modern': dict(mixer='attention', position='rope', norm='rmsnorm', mlp='relu2', qk_norm=True, tie=False,
                   zero_init=True, key_shift=True, softcap=15.0, x0_mix=True, bigram_rows=0,
                   value_embed=False, head_gate=False),
    'qwen3': dict(mixer='attention', position='rope', norm='rmsnorm_weight', mlp='swiglu', qk_norm=True,
                  tie=False, zero_init=True, key_shift=False, softcap=0.0, x0_mix=False, bigram_rows=0,
                  value_embed=False, head_gate=False, embed_norm=False)}
PRESETS['hybrid'] = {**PRESETS['modern'], 'mixer': 'CCA', 'x0_mix': False, 'bigram_rows': 32768,
                     'value_embed': True, 'head_gate': True}

TRAINING_ONLY = ('dropout', 'label_smoothing')  # settings that do not shape a model
MIXER_LETTERS = {'attention': 'A', 'conv': 'C', 'eigen': 'E', 'kernel': 'K'}  # of GPTConfig.mixer
GATED = ('swiglu', 'geglu')  # these MLPs multiply two projections

# (least, less than, the range in words, settings)
LIMITS = (
    (1, math.inf, 'at least 1', ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_kv_head',
                                 'n_ff', 'head_dim', 'window', 'rope_context', 'num_taps',
                                 'num_eigenstates', 'num_features')),
    (0, math.inf, 'at least 0', ('bigram_rows',)),
    (0, 1, 'at least 0 and below 1', ('dropout', 'label_smoothing')),
    (0, math.inf, 'at least 0 and finite; 0 turns it off', ('softcap', 'attn_softcap')),
    (1e-30, math.inf, 'above 0 and finite', ('norm_eps', 'embed_scale', 'query_scale', 'rope_factor')),
    (1 + 1e-9, math.inf, 'above 1 and finite', ('rope_base', 'rope_local_base')))


@dataclass(frozen=True)
class GPTConfig:
    # --- model
    preset: Literal['gpt2', 'modern', 'hybrid', 'qwen3'] = 'gpt2'  # values of settings below that are None
    block_size: int = 1024  # context length in tokens
    vocab_size: int | None = None  # None: the tokenizer's, rounded up to a multiple of 64 if it is large
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: int = 768  # embedding channels
    head_dim: int | None = None  # channels of a head; None: n_embd / n_head
    n_ff: int | None = None  # hidden channels of the MLP; None: 4 * n_embd (gated: 8/3, to a multiple of 64)
    dropout: float = 0.0  # 0 for pretraining, 0.1 or more if the data is seen many times
    bias: bool = False  # biases in Linears and LayerNorms, as in GPT-2; False is a bit better and faster
    qkv_bias: bool | None = None  # biases of queries, keys and values (Qwen 2); None: bias
    mixer: str | None = None  # attention, conv, eigen, kernel, or initials of the layers, repeated: CCAC
    num_taps: int = 4  # tokens that a layer with mixer='conv' mixes
    eigen: Literal['long', 'paper'] = 'long'  # long: memories up to the context; paper: as published, coupled
    num_eigenstates: int = 64  # of a layer with mixer='eigen' (Temporal Eigenstate Networks)
    num_features: int | None = None  # of a head with mixer='kernel' (FAVOR+); None: 2 * head_dim
    position: Literal['learned', 'rope'] | None = None  # learned embeddings, or rotary (arXiv 2104.09864)
    rope_base: float = 10000.0  # base of rotary positions; contexts beyond 8K use 500000 (Llama 3) or more
    rope_local_base: float | None = None  # rope_base of layers with a window (Gemma 3); None: rope_base
    rope_factor: float = 1.0  # divides the frequencies of rope_base, for a context longer than in training
    rope_context: int | None = None  # context of pretraining; if given, high frequencies stay (Llama 3)
    norm: Literal['layernorm', 'rmsnorm', 'rmsnorm_weight', 'rmsnorm_offset'] | None = None  # normalization
    norm_eps: float | None = None  # added to the variance; None: 1e-5 for layernorm, 1e-6 for the others
    post_norm: bool = False  # also normalize the outputs of attention and MLP (Gemma 2)
    embed_norm: bool | None = None  # RMSNorm after the embedding; None: with rotary positions, not in qwen3
    embed_scale: float = 1.0  # factor of the embedding (Gemma: sqrt(n_embd))
    bigram_rows: int | None = None  # rows of a hashed embedding of each token with the one before; 0: none
    value_embed: bool | None = None  # attention adds a learned vector of each token to its values
    head_gate: bool | None = None  # each token scales the output of each attention head by a gate
    mlp: Literal['gelu', 'gelu_tanh', 'relu2', 'swiglu', 'geglu'] | None = None  # OpenAI used gelu_tanh
    window: int | None = None  # attention reaches this many tokens, including the query; None: the context
    window_pattern: str | None = None  # layers with (S) or without (L) the window, repeated; None: S
    qk_norm: bool | None = None  # RMSNorm on queries and keys, which bounds attention logits
    key_shift: bool | None = None  # half of each key is the previous token's; see shift_keys()
    query_scale: float | None = None  # factor of attention logits; None: head_dim ** -0.5
    attn_softcap: float = 0.0  # like softcap, for attention logits (Gemma 2); 0: off
    tie: bool | None = None  # token embedding and head share one matrix
    zero_init: bool | None = None  # blocks start as the identity; untied, the first predictions are uniform
    softcap: float | None = None  # logits -> c * tanh(logits / c); 0: off
    x0_mix: bool | None = None  # each block sees a learned mix of the residual stream and the embedding
    label_smoothing: float = 0.0  # over all vocab_size ids; used in training only

    def problems(self):
        """List the problems with the settings, one sentence each."""
        c = self.resolved()
        wrong = []
        for least, below, words, names in LIMITS:
            for name in names:
                value = getattr(c, name)
                if value is not None and not least <= value < below:
                    wrong.append(f'{name}={value} must be {words}')
        letters = ''.join(MIXER_LETTERS.values())
        if not set(c.mixer_pattern()) <= set(letters) or not c.mixer:
            names = ', '.join(MIXER_LETTERS)
            wrong.append(f'mixer={c.mixer!r} must be one of {names}, or letters of {letters}')
        if wrong:
            return wrong
        if self.head_dim is None and c.n_embd % c.n_head:
            nearest = max(1, round(c.n_embd / c.n_head)) * c.n_head
            wrong.append(f'n_embd={c.n_embd} is not divisible by n_head={c.n_head}; try n_embd={nearest}')
        elif c.position == 'rope' and c.head_dim % 2:
            wrong.append(f'head_dim={c.head_dim} is odd; rotary positions need an even one (n_embd / n_head)')
        is_rope = c.position == 'rope'
        attends = 'A' in c.mixers()
        for name, applies, where in (
                ('window', attends, "mixer='attention'"), ('attn_softcap', attends, "mixer='attention'"),
                ('rope_base', is_rope, "position='rope'"), ('rope_factor', is_rope, "position='rope'"),
                ('rope_context', is_rope and c.rope_factor != 1, "position='rope' and a rope_factor"),
                ('rope_local_base', is_rope and c.window, "position='rope' and a window"),
                ('num_taps', 'C' in c.mixers(), "mixer='conv'"),
                ('eigen', 'E' in c.mixers(), "mixer='eigen'"),
                ('num_eigenstates', 'E' in c.mixers(), "mixer='eigen'"),
                ('num_features', 'K' in c.mixers(), "mixer='kernel'"),
                ('embed_scale', not c.embed_norm, 'embed_norm=False')):
            value = getattr(c, name)
            if value != getattr(GPTConfig, name) and not applies:
                wrong.append(f'{name}={value} applies only with {where}')
        pattern = c.window_pattern
        if pattern is not None and (c.window is None or not {'S'} <= set(pattern) <= {'S', 'L'}):
            wrong.append(f'window_pattern={pattern!r} must contain an S, only S and L, and need a window')
        elif c.window and {'A'} < set(c.mixers()) and not any(c.attention_windows()):
            wrong.append(f'window={c.window} is in no layer: where window_pattern={pattern!r} has an S, '
                         f'mixer={c.mixer!r} does not attend')
        if c.n_head % c.n_kv_head:
            wrong.append(f'n_head={c.n_head} is not divisible by n_kv_head={c.n_kv_head}')
        return wrong

    def resolved(self):
        """Return a copy with the preset's values in place of None. vocab_size may stay None."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        known = {**PRESETS[self.preset], **given}
        n_ff = 4 * self.n_embd
        if known['mlp'] in GATED:
            n_ff = math.ceil(8 * self.n_embd / 3 / 64) * 64
        if (self.vocab_size or 0) > 0 and 'bigram_rows' not in given:
            # no more rows than pairs, as a power of two
            known['bigram_rows'] = min(known['bigram_rows'], 2 ** int(2 * math.log2(self.vocab_size)))
        norm_eps = 1e-6
        if known['norm'] == 'layernorm':
            norm_eps = 1e-5
        # Without learned positions nothing else sets the scale of the residual stream.
        embed_norm = known['position'] == 'rope'
        return GPTConfig(**{'n_kv_head': self.n_head, 'head_dim': self.n_embd // max(self.n_head, 1),
                            'n_ff': n_ff, 'qkv_bias': self.bias, 'norm_eps': norm_eps,
                            'embed_norm': embed_norm, **known})

    @property
    def is_gated(self):
        """Return whether c_fc holds two projections, up and gate, that are multiplied (arXiv 2002.05202)."""
        return self.mlp in GATED

    def build(self):
        """Build the GPT with these settings, for modules of hotloop/, which do not import model.py."""
        return GPT(self)

    @property
    def gate_channels(self):
        """Return how many channels of a layer's input scale its heads."""
        return min(12, self.n_embd)

    def mixer_pattern(self):
        """Return the letters of mixers that the layers repeat."""
        return MIXER_LETTERS.get(self.mixer, self.mixer)

    def mixers(self):
        """List the letter of each layer's mixer."""
        pattern = self.mixer_pattern()
        return [pattern[i % len(pattern)] for i in range(self.n_layer)]

    def windows(self):
        """List the window of each layer in tokens; None where attention reaches the complete context."""
        pattern = self.window_pattern or 'S'
        return [self.window if pattern[i % len(pattern)] == 'S' else None for i in range(self.n_layer)]

    def attention_windows(self):
        """Return the set of the windows of the layers that attend."""
        return {w for w, letter in zip(self.windows(), self.mixers(), strict=True) if letter == 'A'}

    def model_args(self):
        """
        Return the settings that rebuild the model from a checkpoint: nanoGPT's seven names for a shape
        that it supports, all of ours for any other, which nanoGPT rejects.
        """
        names = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
        nanogpt = {name: getattr(self, name) for name in names}
        complete = replace(self.resolved(), label_smoothing=0.0)  # not recorded: it acts in training only
        return nanogpt if complete == GPTConfig(**nanogpt).resolved() else asdict(complete)


# -----------------------------------------------------------------------------
# layers that compute in the dtype of their input

class Linear(nn.Linear):
    """Compute in the dtype of the input. The weights stay in float32 for the optimizer and are cast here."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """Compute in float32 and return the dtype of the input."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.float()  # sharded, parameters come in compute_dtype
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """
    RMSNorm with offset + weights (arXiv 1910.07467; offset 1: Gemma). Computes in float32 and returns the
    dtype of the input.
    """

    def __init__(self, size, eps, offset):
        super().__init__(size, eps)
        self.offset = offset
        nn.init.constant_(self.weight, 1 - offset)

    def forward(self, x):
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_rms_norm(config, size):
    """Make a norm that computes x / sqrt(mean(x^2) + eps) over the last dimension, of this size."""
    if config.norm in ('rmsnorm_weight', 'rmsnorm_offset'):
        return RMSNorm(size, config.norm_eps, int(config.norm == 'rmsnorm_offset'))
    # the norms of queries and keys in a model with layernorm, whose norm_eps is that of its LayerNorms
    return nn.RMSNorm(size, 1e-6 if config.norm == 'layernorm' else config.norm_eps, elementwise_affine=False)


def make_norm(config):
    """Make the norm of a block's inputs."""
    if config.norm == 'layernorm':
        return LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)
    return make_rms_norm(config, config.n_embd)


def unchanged(x, *_):
    """Stand in for a part that the config turns off. Calling nn.Identity() would take longer."""
    return x


class PositionEmbedding(nn.Embedding):
    """Add a learned vector for each position (GPT-2)."""

    def forward(self, x, position):
        return x + super().forward(position)


class BigramEmbedding(nn.Embedding):
    """Add a vector for each token and the one before it, whose row is a hash (modded-nanogpt, record 62)."""

    def forward(self, x, idx, position, cache):
        """x: (B, T, C). idx: (B, T). position: (T) or (B, T), in documents. cache: a KVCache, or None."""
        ids = idx + 1  # 0: there is none
        if cache is None:
            before = F.pad(ids[:, :-1], (1, 0)).masked_fill(position == 0, 0)
        else:
            extended = cache.extend(-1, ids[:, None, :, None])  # layer -1 keeps the last id: (B, 1, 1 + T, 1)
            before = extended[:, 0, :-1, 0]
        return x + super().forward(((36313 * idx) ^ (27191 * before)) % self.num_embeddings)


class X0Mix(nn.Module):
    """Compute a x + b x0 with two learned numbers per block (modded-nanogpt, record 9)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0):
        a, b = self.scale.to(x.dtype)
        return a * x + b * x0


def softcap(logits, *_, cap):
    """Bound float32 logits to (-cap, cap) (arXiv 2408.00118), also as a score_mod of FlexAttention."""
    return cap * (2 * torch.sigmoid(2 / cap * logits) - 1)  # cap * tanh(logits / cap), faster if compiled


# -----------------------------------------------------------------------------
# positions

def rotation_angles(num_positions, D, base, factor=1.0, context=None):
    """
    Return cos and sin of position * base^(-2i/D), two float32 tensors of (T, D/2). factor divides the
    frequencies. With `context`, that of pretraining, it divides those of at most one turn in the context;
    those of four turns or more stay, and it fades between the two (Llama 3).
    """
    # In float32 an angle at position 32,000 would be wrong by 2e-3.
    frequency = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)  # (D/2)
    kept = 0.0 if context is None else ((context * frequency / (2 * math.pi) - 1) / 3).clamp(0, 1)
    frequency = frequency * (kept + (1 - kept) / factor)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency  # (T, D/2)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """Rotate channels i and i + D/2 together, Hugging Face's half-split form. x: (B, H, T, D)."""
    x1, x2 = x.transpose(1, 2).float().chunk(2, dim=-1)  # stored as (B, T, H, D), as attention's output
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype).transpose(1, 2)


def shift_keys(k, layer, cache, place):
    """
    Replace the slower half of the channels of each key by those of the token before (modded-nanogpt): an
    induction head, which finds what followed an earlier occurrence of a token, then takes one layer, not
    two. k: (B, K, T, D). place: (B, T), positions in documents.
    """
    before = (F.pad(k, (0, 0, 1, 0)) if cache is None else cache.extend(layer, k))[:, :, :-1]  # (B, K, T, D)
    if place is not None:
        before = before.masked_fill((place == 0)[:, None, :, None], 0)
    half = k.size(-1) // 2
    is_slow = torch.arange(k.size(-1), device=k.device) % half >= (half + 1) // 2
    return torch.where(is_slow, before, k)


def positions_in(documents):
    """Count the position of each token within its document, (B, T). documents: (B, T), non-decreasing ids."""
    position = torch.arange(documents.size(1), device=documents.device)
    begins = F.pad(documents.diff(dim=1) != 0, (1, 0))
    return position - (position * begins).cummax(1).values


# -----------------------------------------------------------------------------
# attention

# Without a mask: torch's SDPA. With a window, documents or a soft cap: FlexAttention on GPUs; elsewhere SDPA
# one block of queries at a time, or explicit weights if there is a soft cap.
# In generation the cache (hotloop/inference/kv_cache.py) chooses the keys and calls attend() or sdpa().

QUERY_BLOCK = 512  # in a block; 256 and 512 were fastest of 64 to 1,024 on a CPU


def plain_attention(q, k, v, mask=None, dropout=0.0, is_causal=False):
    """Compute the attention of q, (B, H, T, D), over k and v, (B, K, T, D), by torch's kernels."""
    groups = q.size(1) // k.size(1)
    if groups > 1 and q.size(2) == 1:  # one new token: heads that share keys are queries of one head
        y = F.scaled_dot_product_attention(q.reshape(q.size(0), k.size(1), groups, -1), k, v, attn_mask=mask,
                                           dropout_p=dropout)
        return y.reshape(q.shape)
    if groups > 1 and q.device.type == 'cuda' and (mask is not None or q.dtype != torch.bfloat16):
        # Only the flash kernel takes groups, and T4s and float32 have none. Others store T x T weights.
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal,
                                          enable_gqa=q.size(1) > k.size(1))


def attend_in_window(q, k, v, dropout, window, sdpa):
    """
    Compute causal attention over the last `window` keys (None: all) for blocks of queries, each with the keys
    it reaches: there is no T x T mask and no work beyond the window. q: (B, H, T, D), k, v: (B, K, T, D).
    """
    T = q.size(2)
    size, window = min(T, QUERY_BLOCK), min(window or T, T)
    if window == T and sdpa is plain_attention:
        return plain_attention(q, k, v, dropout=dropout, is_causal=True)
    # Rows are a block of queries; columns are the keys of the window before the block, then its own.
    row, column = torch.arange(size, device=q.device), torch.arange(window - 1 + size, device=q.device)
    age = row[:, None] + window - 1 - column
    mask = (age >= 0) & (age < window)
    parts = []
    for start in range(0, T, size):
        end, first = min(start + size, T), max(start - window + 1, 0)
        left = first - (start - window + 1)  # the first blocks have fewer keys before them
        part = q[:, :, start:end], k[:, :, first:end], v[:, :, first:end]
        parts.append(sdpa(*part, mask[:end - start, left:left + end - first], dropout))
    return torch.cat(parts, 2)


def attend_in_documents(q, k, v, dropout, window, documents, sdpa):
    """Compute attend_in_window() within each document. documents: (B, T), ids, or None."""
    if documents is None:
        return attend_in_window(q, k, v, dropout, window, sdpa)
    rows = []
    for row, ids in enumerate(documents):
        lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(*(tensor[row:row + 1].split(lengths, 2) for tensor in (q, k, v)), strict=True)
        rows.append(torch.cat([attend_in_window(*part, dropout, window, sdpa) for part in parts], 2))
    return torch.cat(rows)


# Unlike torch.compiler.disable, this imports torch._dynamo, which takes 2 s, when it is called and not here.
run_eagerly = getattr(torch, '_disable_dynamo', torch.compiler.disable)
attend_outside_graph = run_eagerly(attend_in_documents)  # the shapes of documents depend on the data
FLEX_DEVICES = ('cuda',)  # where FlexAttention attends within windows and documents; tests add the CPU


def compiled(function, **options):
    """Return a function compiled at its first call; while a graph is traced, itself, to become part of it."""
    return function if torch.compiler.is_compiling() else compiled_alone(function, **options)


@cache
def compiled_alone(function, **options):
    """Compile a function for many windows and shapes. After 8 torch runs it eagerly, in T x T memory."""
    made = torch.compile(function, **options)
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return made


def flex_options(q):
    """Choose FlexAttention's kernel, and blocks where its own exceed shared memory (pytorch#198224)."""
    # its kernel for fewer than 128 queries fails for 65 or more queries per key head (pytorch#185349)
    options = {'FORCE_USE_FLEX_ATTENTION': True}
    row = q.size(-1) * q.dtype.itemsize
    if row <= 256:
        return options
    memory = torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor
    if memory > 160_000:
        return options
    names = 'fwd_BLOCK_M', 'fwd_BLOCK_N', 'bwd_BLOCK_M1', 'bwd_BLOCK_N1', 'bwd_BLOCK_M2', 'bwd_BLOCK_N2'
    return options | dict.fromkeys(names, 32 if 192 * row < memory else 16) | {'num_stages': 1}


def block_mask(T, window, documents, device):
    """Make FlexAttention's mask for T tokens of what attend_in_documents() reaches. Not tested on GPUs."""
    from torch.nn.attention.flex_attention import create_block_mask
    def visible(b, h, i, j):
        seen = j <= i if window is None else (j <= i) & (i - j < window)
        return seen if documents is None else seen & (documents[b, i] == documents[b, j])
    rows = None if documents is None else len(documents)
    return compiled(create_block_mask)(visible, rows, None, T, T, device=device)  # eager holds T x T scores


class Context(NamedTuple):
    """What the layers of a forward pass share besides their input."""
    cos: torch.Tensor  # of the rotation of each position, (T, 1, D/2); with a cache (B, T, 1, D/2)
    sin: torch.Tensor
    masks: dict  # {window: FlexAttention's mask}, on GPUs
    idx: torch.Tensor  # (B, T), the token ids
    cache: object = None  # a KVCache in generation
    documents: torch.Tensor | None = None  # (B, T), non-decreasing ids; None: each row is one document
    place: torch.Tensor | None = None  # (B, T), positions in documents; None without documents


class Attention(nn.Module):
    """Causal self-attention with optional rotary positions, QK-norm and grouped queries."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        self.window = config.windows()[layer]
        self.head_dim = D = config.head_dim
        # One matrix computes queries, keys and values of all heads, in that order; Muon treats them as three.
        self.part_sizes = [config.n_head * D, config.n_kv_head * D, config.n_kv_head * D]
        self.c_attn = Linear(config.n_embd, sum(self.part_sizes), bias=config.qkv_bias)
        self.c_proj = Linear(config.n_head * D, config.n_embd, bias=config.bias)
        self.value_embed = None
        if config.value_embed:  # a vector of each token for the values (modded-nanogpt, record 14)
            self.value_embed = nn.Embedding(config.vocab_size, config.n_kv_head * D)
        self.head_gate = None
        if config.head_gate:  # from the first channels of the input (modded-nanogpt, record 28)
            self.head_gate = nn.Parameter(torch.zeros(config.n_head, config.gate_channels))
        # what a KVCache keeps for each row; here the last key
        self.state_shapes = {'past': (config.n_kv_head, 1, D)} if config.key_shift else {}
        self.features = None  # a KernelAttention with mixer='kernel'; named as in checkpoints
        if config.mixers()[layer] == 'K':
            from hotloop.mixers.kernel import KernelAttention
            self.features = KernelAttention(config, layer)
            self.state_shapes |= self.features.state_shapes
        self.q_norm = make_rms_norm(config, D) if config.qk_norm else unchanged
        self.k_norm = make_rms_norm(config, D) if config.qk_norm else unchanged
        self.shift_keys = shift_keys if config.key_shift else unchanged
        self.rotate = rotate if config.position == 'rope' else unchanged
        if config.rope_local_base is not None:
            self.rotate = partial(rotate_part, part=int(self.window is not None))
        # Attention multiplies by D ** -0.5; the rest of query_scale multiplies the queries.
        own_scale = config.query_scale not in (None, D**-0.5)
        self.scale_query = partial(torch.mul, other=config.query_scale * D**0.5) if own_scale else unchanged
        self.cap = partial(softcap, cap=config.attn_softcap) if config.attn_softcap else None
        self.sdpa = partial(capped_attention, cap=config.attn_softcap) if self.cap else plain_attention
        self.dropout = nn.Dropout(config.dropout)
        # GPT-2 also drops attention weights; with rotary positions none are, and the fast kernels apply
        self.weight_dropout = config.dropout if config.position == 'learned' else 0.0

    def attend(self, q, k, v, documents=None, mask=None):
        """
        Compute the attention of q, (B, H, T, D), over k and v, (B, K, T, D). documents: as in Context. mask:
        FlexAttention's, of documents and window.
        """
        dropout = self.weight_dropout if self.training else 0.0
        if documents is None and mask is None and (self.window is None or self.window >= q.size(2)):
            # A mask disables the fast kernels, and gave NaN gradients on Hopper (pytorch#196678).
            return attend_in_window(q, k, v, dropout, None, self.sdpa)
        if mask is None:
            attend = attend_outside_graph if torch.compiler.is_compiling() else attend_in_documents
            return attend(q, k, v, dropout, self.window, documents, self.sdpa)
        assert not dropout, 'FlexAttention drops no weights; see check_masks() in train.py'
        from torch.nn.attention.flex_attention import flex_attention
        return compiled(flex_attention)(q, k, v, self.cap, mask, enable_gqa=q.size(1) > k.size(1),
                                        kernel_options=flex_options(q))

    def forward(self, x, context):
        B, T, _ = x.shape
        H, K, D = self.n_head, self.n_kv_head, self.head_dim
        cos, sin, cache, place = context.cos, context.sin, context.cache, context.place
        q, k, v = self.c_attn(x).view(B, T, H + 2 * K, D).split((H, K, K), dim=2)
        if self.value_embed is not None:
            v = v + self.value_embed(context.idx).view(B, T, K, D).to(v.dtype)
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))  # (B, H or K, T, D)
        q = self.rotate(q, cos, sin)
        k = self.rotate(self.shift_keys(k, self.layer, cache, place), cos, sin)
        if x.device.type == 'cpu':
            # bf16 attention is slow on a CPU: backward takes 3.6 times as long, one query 7 times (EPYC).
            q, k, v = q.float(), k.float(), v.float()
        q = self.scale_query(q)
        if self.features is not None:
            y = self.features(q, k, v, place, cache)
        elif cache is None:
            y = self.attend(q, k, v, context.documents, context.masks.get(self.window))
        else:
            y = cache.attend(self, q, k, v)
        y = y.to(x.dtype).transpose(1, 2)  # (B, T, H, D)
        if self.head_gate is not None:
            logits = F.linear(x[..., :self.head_gate.size(1)], self.head_gate.to(x.dtype))  # (B, T, H)
            y = y * (2 * torch.sigmoid(logits))[..., None]
        y = y.reshape(B, T, H * D)
        return self.dropout(self.c_proj(y))


class Conv(nn.Module):
    """
    Gated short convolution: a causal depthwise convolution over num_taps tokens, scaled by sigmoid gates.
    Where most layers do this and few attend, a model learns faster and a step costs less (as in H3, arXiv
    2212.14052).
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.part_sizes = [config.n_embd, config.n_embd]  # values, gates
        self.state_shapes = {'past': (1, config.num_taps - 1, config.n_embd)}  # the last values
        self.c_attn = Linear(config.n_embd, 2 * config.n_embd, bias=config.bias)
        taps = torch.randn(config.n_embd, 1, config.num_taps) / config.num_taps
        self.taps = nn.Parameter(taps)  # the last is for the token itself
        self.gate_shift = nn.Parameter(torch.full((config.n_embd,), -2.0))  # bias; gates start nearly closed
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, context):
        T, cache, place = x.size(1), context.cache, context.place
        v, gate = self.c_attn(x).chunk(2, dim=-1)  # (B, T, C)
        taps = self.taps[:, 0].to(x.dtype).unbind(1)
        if cache is None:
            past = F.pad(v, (0, 0, len(taps) - 1, 0))
        else:
            past = cache.extend(self.layer, v[:, None])[:, 0]
        y = 0
        for i, tap in enumerate(taps):
            before = past[:, i:i + T]  # (B, T, C)
            if place is not None:  # nothing from the document before
                before = before * (place >= len(taps) - 1 - i)[..., None]
            y = y + tap * before
        return self.dropout(self.c_proj(y) * torch.sigmoid(gate + self.gate_shift.to(x.dtype)))


def make_mixer(config, layer):
    """Make what mixes the tokens in a layer."""
    letter = config.mixers()[layer]
    if letter == 'E':
        from hotloop.mixers.eigen import Eigen
        return Eigen(config, layer, Linear)
    return Conv(config, layer) if letter == 'C' else Attention(config, layer)


# -----------------------------------------------------------------------------
# the MLP and the block

def relu2(x):
    """Square the positive part (arXiv 2109.08668)."""
    return F.relu(x).square()


def gated(x, activation):
    """Multiply two halves of x, (..., 2 n_ff), of which the second passes through the activation."""
    up, gate = x.chunk(2, dim=-1)
    return up * activation(gate)


gelu_tanh = partial(F.gelu, approximate='tanh')
ACTIVATIONS = {'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu2': relu2,
               'swiglu': partial(gated, activation=F.silu), 'geglu': partial(gated, activation=gelu_tanh)}


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, (1 + config.is_gated) * config.n_ff, bias=config.bias)
        self.act = ACTIVATIONS[config.mlp]
        self.c_proj = Linear(config.n_ff, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.mix = X0Mix() if config.x0_mix else unchanged
        self.ln_1 = make_norm(config)
        self.attn = make_mixer(config, layer)
        self.ln_1_post = make_norm(config) if config.post_norm else nn.Identity()  # a module, for diagnose.py
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.ln_2_post = make_norm(config) if config.post_norm else nn.Identity()

    def forward(self, x, x0, context):
        x = self.mix(x, x0)
        x = x + self.ln_1_post(self.attn(self.ln_1(x), context))
        return x + self.ln_2_post(self.mlp(self.ln_2(x)))


# -----------------------------------------------------------------------------
# the loss in chunks

def head_gradients(x, w, targets, cap, smoothing, frozen):
    """
    Compute the summed cross-entropy of a head, (1,), and its gradients, (N, C) and (V, C), with respect to
    its inputs x, (N, C), and weights w, (V, C). targets: (N). frozen: the weights need no gradient.
    """
    logits = (x @ w.T).float()  # (N, V)
    logits = softcap(logits, cap=cap) if cap else logits
    loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum', label_smoothing=smoothing)
    N, V = logits.shape
    d = logits.softmax(1) - smoothing / V
    if torch.compiler.is_compiling():  # fused
        d = d - (torch.arange(V, device=x.device) == targets[:, None]) * (1 - smoothing)
    else:
        d[torch.arange(N, device=x.device), targets.clamp(min=0)] -= 1 - smoothing
    if cap:
        d = d * (1 - (logits / cap).square())
    d = (d * (targets >= 0)[:, None]).to(x.dtype)
    return loss.view(1), d @ w, None if frozen else d.T @ x


class ChunkedLoss(torch.autograd.Function):
    """
    Compute the summed cross-entropy of a head, (1,), without all logits in memory at once. forward computes
    the gradients of each chunk while its logits exist; backward scales them all by the same factor.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, cap, smoothing, chunks, compiles):
        frozen = not ctx.needs_input_grad[1]
        gradients = compiled(head_gradients, dynamic=False) if compiles else head_gradients
        w, total, dx, dw = weight.to(x.dtype), 0.0, [], None if frozen else torch.zeros_like(weight)
        for part, target in zip(x.chunk(chunks), targets.chunk(chunks), strict=True):
            loss, d_part, d_weight = gradients(part, w, target, cap, smoothing, frozen)
            total = total + loss
            dx.append(d_part)
            if not frozen:
                dw += d_weight
        ctx.save_for_backward(torch.cat(dx), dw)
        return total

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        dw = None if dw is None else dw * grad
        return (dx.float() * grad).to(dx.dtype), dw, None, None, None, None, None


def loss_ahead(logits, targets, documents, weights, smoothing):
    """
    Compute the cross-entropy of the next tokens, (B,), from their logits, (B, T, V). Its gradient, not its
    value, includes the weighted cross-entropy of the tokens after the next one (modded-nanogpt, record 53).
    weights: of the token two ahead, three ahead, and so on. documents: as in GPT.forward(); these tokens are
    of the same document.
    """
    # One softmax of flat logits for all: compiled, other forms read and write all logits several times more.
    logp = logits.flatten(0, 1).log_softmax(1)

    def cross_entropy(target):
        loss = F.nll_loss(logp, target.flatten(), ignore_index=-1, reduction='none')
        return loss.view(target.shape).sum(1)

    loss, more = cross_entropy(targets), 0
    if smoothing:
        uniform = (targets >= 0) * -logp.mean(1).view(targets.shape)
        loss = (1 - smoothing) * loss + smoothing * uniform.sum(1)
    for shift, weight in enumerate(weights.unbind(), start=1):
        target = targets[:, shift:]
        if documents is not None:
            target = target.masked_fill(documents[:, shift:] != documents[:, :-shift], -1)
        more = more + weight * cross_entropy(F.pad(target, (0, targets.size(1) - target.size(1)), value=-1))
    return loss + (more - more.detach())


# In one graph the chunks would be fused again, so each is compiled alone.
compiled_loss = run_eagerly(lambda *args: ChunkedLoss.apply(*args, True))


# -----------------------------------------------------------------------------
# the model

class Uninitialized(TorchFunctionMode):
    """Skip initialization inside the block: for billions of weights it takes minutes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        is_init = getattr(function, '__module__', None) == 'torch.nn.init'
        return None if is_init else function(*args, **(kwargs or {}))


class GPT(nn.Module):
    def __init__(self, config):
        """Build a GPTConfig with vocab_size set. Raises ValueError if its settings do not fit together."""
        super().__init__()
        wrong = config.problems()
        if wrong:
            raise ValueError('; '.join(wrong))
        assert config.vocab_size is not None, 'vocab_size comes from the data; see train.py'
        self.config = c = config.resolved()
        # train.py sets these, and the buffers `feedback` and `ahead` below, after construction.
        self.compute_dtype = torch.float32  # of activations
        self.loss_chunks = 1  # for head and loss; more if memory is short
        # the names are those of nanoGPT's checkpoints
        self.transformer = parts = nn.Module()
        parts.wte = nn.Embedding(c.vocab_size, c.n_embd)
        parts.wpe = PositionEmbedding(c.block_size, c.n_embd) if c.position == 'learned' else unchanged
        parts.bigrams = BigramEmbedding(c.bigram_rows, c.n_embd) if c.bigram_rows else unchanged
        scale = partial(rescale, factors=rounded_factors(c.embed_scale)) if c.embed_scale != 1 else unchanged
        parts.ln_e = make_rms_norm(c, c.n_embd) if c.embed_norm else scale
        parts.drop = nn.Dropout(c.dropout)
        parts.h = nn.ModuleList([Block(c, layer) for layer in range(c.n_layer)])
        parts.ln_f = make_norm(c)
        self.lm_head = Linear(c.n_embd, c.vocab_size, bias=False)
        self.softcap = partial(softcap, cap=c.softcap) if c.softcap else unchanged
        if c.tie:
            self.transformer.wte.weight = self.lm_head.weight
        # cos and sin are (T, 1, D/2), or (T, 1, D) where layers with a window have their own base.
        tables = [rotation_angles(c.block_size, c.head_dim, c.rope_base, c.rope_factor, c.rope_context)]
        if c.rope_local_base is not None:
            tables.append(rotation_angles(c.block_size, c.head_dim, c.rope_local_base))
        cos, sin = (torch.cat(columns, dim=1)[:, None] for columns in zip(*tables, strict=True))
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)
        self.register_buffer('feedback', None, persistent=False)  # of direct feedback alignment
        self.register_buffer('ahead', None, persistent=False)  # weights of later tokens in the training loss
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        Initialize as GPT-2: N(0, 0.02), with projections onto the residual stream divided by sqrt(2 n_layer).
        With zero_init these and the head start at zero, the embedding at N(0, 1), vectors for values at
        N(0, 0.5), as values themselves; other matrices at N(0, 0.5 / sqrt(inputs)). Tied, embedding and head
        start at N(0, 0.02). Bigrams start at zero.
        """
        c = self.config
        stds = {'bigrams': 0.0, 'c_proj': 0.02 / math.sqrt(2 * c.n_layer)}
        if c.zero_init:
            stds |= {'c_proj': 0.0, 'lm_head': 0.0, 'value_embed': 0.5, 'wte': 0.02 if c.tie else 1.0}
        for name, p in self.named_parameters():
            kind = name.split('.')[-2]  # of the module
            if p.dim() > 1 and name.endswith('weight'):
                other = 0.5 / math.sqrt(p.size(-1)) if c.zero_init else 0.02
                nn.init.normal_(p, std=stds.get(kind, other))
            elif name.endswith('bias'):
                nn.init.zeros_(p)
            # Other parameters start as their modules made them.

    def forward(self, idx, targets=None, documents=None, cache=None):
        """
        Return the logits of the last position, (B, V); with targets, the summed cross-entropy in nats:
        (1, B), of each sequence, or (1, 1) in training with loss_chunks above 1; callers use .sum(). Both are
        float32. The first dimension is 1, so that nanoGPT's `logits, loss = model(x, y)` fails on any batch.

        idx: (B, T) token ids, which continue the sequences in the cache if there is one.
        targets: (B, T) ids, or -1 for a masked token.
        documents: (B, T), ids of each token's document, non-decreasing along a row: attention stays within a
        document, and learned positions restart in each. None: each row is one. Not with a cache.
        """
        T, c = idx.size(1), self.config
        assert 0 < T <= c.block_size, f'{T} tokens exceed block_size={c.block_size}'
        if cache is None:
            position = torch.arange(T, device=idx.device) if documents is None else positions_in(documents)
            cos, sin = self.cos[:T], self.sin[:T]  # (T, 1, D/2)
        else:
            position = cache.begin(T)
            cos, sin = self.cos[position], self.sin[position]  # (B, T, 1, D/2)
        x = self.transformer.wpe(self.transformer.wte(idx), position)  # (B, T, C)
        x = self.transformer.bigrams(x, idx, position, cache)
        x = x0 = self.transformer.drop(self.transformer.ln_e(x.to(self.compute_dtype)))
        masks = {}
        if cache is None and x.device.type in FLEX_DEVICES:
            masks = {window: block_mask(T, window, documents, x.device) for window in c.attention_windows()
                     if documents is not None or c.attn_softcap or (window or T) < T}
        place = None if documents is None else position
        context = Context(cos, sin, masks, idx, cache, documents, place)
        outputs = []  # of the embedding and the blocks, for direct feedback
        is_direct = self.feedback is not None and torch.is_grad_enabled()
        for block in self.transformer.h:
            if is_direct:
                outputs.append(x)
                x, x0 = x.detach(), x0.detach()
            x = block(x, x0, context)
        if is_direct:
            from hotloop.mixers.feedback import Feedback
            x = Feedback.apply(self.feedback, *outputs, x)
        if targets is not None:
            return torch.stack((self.loss(x, targets, documents),))  # a copy: FSDP2 warns of views
        x = x[:, -1] if cache is None else cache.finish(x)  # (B, C)
        return self.softcap(self.lm_head(self.transformer.ln_f(x)).float())

    def loss(self, x, targets, documents=None):
        """Compute the row that forward returns, (B,) or (1,), from the (B, T, C) output of the blocks."""
        c, chunks, x = self.config, self.loss_chunks, self.transformer.ln_f(x)
        smoothing = c.label_smoothing if self.training else 0.0
        if chunks > 1 and torch.is_grad_enabled():
            args = x.flatten(0, 1), self.lm_head.weight, targets.flatten(), c.softcap, smoothing, chunks
            return compiled_loss(*args) if torch.compiler.is_compiling() else ChunkedLoss.apply(*args, False)
        if self.ahead is not None and self.training:  # loss_chunks is 1
            logits = self.softcap(self.lm_head(x).float())
            return loss_ahead(logits, targets, documents, self.ahead, smoothing)
        total = 0
        for part, target in zip(x.chunk(chunks, 1), targets.chunk(chunks, 1), strict=True):
            # Compiled, the cast, the cap and the cross-entropy are one pass over the bf16 logits.
            logits = self.softcap(self.lm_head(part).float())  # (B, T, V), or a part of T
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction='none',
                                   label_smoothing=smoothing)
            total = total + loss.view(target.shape).sum(1)
        return total

    def num_params(self):
        """Count all parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    def crop_block_size(self, block_size):
        """Shorten the context, for example to fine-tune a GPT-2 of 1024 positions on shorter text."""
        assert block_size <= self.config.block_size
        self.config = replace(self.config, block_size=block_size)
        self.cos, self.sin = self.cos[:block_size], self.sin[:block_size]
        if self.config.position == 'learned':
            self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].clone())

    @classmethod
    def from_checkpoint(cls, model_args, weights, **override):
        """Build a GPT from a checkpoint. override: settings. Raises ValueError if the weights do not fit."""
        with torch.device('cpu'), Uninitialized():
            model = cls(replace(config_from(model_args), **override))
        model.load_weights(weights)
        return model

    def load_weights(self, weights):
        """Copy {name: tensor} into the model. Raises ValueError with the names or shapes that differ."""
        buffers = ('.attn.bias', '.attn.masked_bias')  # that nanoGPT saved under PyTorch 1.x
        weights = {name: w for name, w in weights.items() if not name.endswith(buffers)}
        try:
            missing, unexpected = self.load_state_dict(weights, strict=False)
        except RuntimeError as e:
            raise ValueError(f'the weights do not fit the model: {" ".join(str(e).split())[:500]}') from None
        wrong = []
        for names, what in ((missing, 'are missing'), (unexpected, 'have no place')):
            if names:
                wrong.append(f'{len(names)} {what} ({", ".join(names[:3])})')
        if wrong:
            raise ValueError(f'the weights do not fit the model: {"; ".join(wrong)}')
        wte, head = weights['transformer.wte.weight'], weights['lm_head.weight']
        # the same tensor may hold NaN, which differs from itself
        if self.config.tie and wte.data_ptr() != head.data_ptr() and not torch.equal(wte, head):
            raise ValueError('the weights do not fit the model: tie=True, but embedding and head differ')


def config_from(model_args):
    """Read the GPTConfig of a checkpoint's model_args. Raises ValueError for names that it does not have."""
    unknown = sorted(model_args.keys() - {f.name for f in fields(GPTConfig)})
    if unknown:
        raise ValueError(f'the model has settings that this version does not have: {", ".join(unknown)}')
    # what checkpoints had before these were settings
    earlier = {'key_shift': False, 'mixer': 'attention', 'bigram_rows': 0, 'value_embed': False,
               'head_gate': False}
    return GPTConfig(**{**earlier, **model_args})


# -----------------------------------------------------------------------------
# what only imported families need

def rescale(x, factors):
    """Multiply by the factor of the dtype of the input."""
    return x * factors[x.dtype]


def rounded_factors(factor):
    """Round a factor to each dtype, as in Gemma's training, on the host: a graph would not round it."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    return {dtype: torch.tensor(factor, dtype=dtype, device='cpu').item() for dtype in dtypes}


def rotate_part(x, cos, sin, part):
    """Rotate by one of two angles, side by side in (T, D): 0 is rope_base, 1 rope_local_base."""
    return rotate(x, cos.chunk(2, dim=-1)[part], sin.chunk(2, dim=-1)[part])


def capped_attention(q, k, v, mask, dropout=0.0, *, cap):
    """Compute plain_attention() with softcap() on the logits, for which torch has no kernel."""
    k, v = (part.repeat_interleave(q.size(1) // k.size(1), 1) for part in (k, v))
    logits = softcap((q @ k.mT).float() * q.size(-1)**-0.5, cap=cap)  # (B, H, T, keys)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return F.dropout(logits.softmax(-1).to(v.dtype), dropout) @ v
