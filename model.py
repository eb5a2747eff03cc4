"""
The transformer, all of it: settings, blocks, KV cache, generation, counts, weights in and out.

Letters: B batch, T time, C channels (n_embd), H heads, K key/value heads, D channels of a head, V vocabulary, L layers.

One class, GPT, and two named shapes of it over a few independent settings (PRESETS). 'gpt2' is OpenAI's GPT-2 as
nanoGPT has it, weight for weight; 'modern' is what has been found to learn faster since. Each setting is resolved once
in __init__ to a module or a function, so that forward has no branches but cache or no cache, loss or no loss.

References:
1) GPT-2: https://github.com/openai/gpt-2/blob/master/src/model.py and nanoGPT: https://github.com/karpathy/nanoGPT
2) the modern parts: https://github.com/KellerJordan/modded-nanogpt and https://github.com/karpathy/nanochat
"""

import contextlib
import dataclasses
import json
import math
import mmap
import os
import pickletools
import re
import shutil
import struct
import warnings
import zipfile
from collections import deque
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.nn import functional as F

# every setting of GPTConfig that is None takes its value from the preset's row
PRESETS = {
    'gpt2': dict(position='learned', norm='layernorm', mlp='gelu', qk_norm=False, tie=True, zero_init=False,
                 softcap=0.0, x0_mix=False),
    'modern': dict(position='rope', norm='rmsnorm', mlp='relu2', qk_norm=True, tie=False, zero_init=True,
                   softcap=15.0, x0_mix=True),
}


@dataclass
class GPTConfig:
    # --- model
    preset: Literal['gpt2', 'modern'] = 'gpt2'  # gives every setting below that is None its value
    block_size: int = 1024  # context length in tokens
    vocab_size: int | None = None  # None: the tokenizer's, rounded up to a multiple of 64 when it is large
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads a block
    n_kv_head: int | None = None  # heads of keys and values (grouped-query attention); None: n_head
    n_embd: int = 768  # channels
    n_ff: int | None = None  # channels inside the MLP; None: 4 * n_embd (swiglu: 8/3, rounded up to 64)
    dropout: float = 0.0  # 0 for pre-training, 0.1 and more when the data is seen many times
    bias: bool = False  # biases in Linears and LayerNorms, as in OpenAI's GPT-2; False is a bit better and faster
    position: Literal['learned', 'rope'] | None = None  # learned embeddings, or rotary (arXiv 2104.09864)
    norm: Literal['layernorm', 'rmsnorm'] | None = None  # rmsnorm has no weights here
    mlp: Literal['gelu', 'gelu_tanh', 'relu2', 'swiglu'] | None = None  # gelu_tanh is what OpenAI's weights want
    qk_norm: bool | None = None  # RMSNorm on queries and keys, keeps attention logits bounded
    tie: bool | None = None  # token embedding and head share one matrix
    zero_init: bool | None = None  # blocks start as the identity, the head as uniform
    softcap: float | None = None  # logits -> c * tanh(logits / c); 0: off
    x0_mix: bool | None = None  # each block sees a learned mix of the residual stream and the embedding
    label_smoothing: float = 0.0  # over all vocab_size ids; acts in training only, never in an evaluation

    def problems(self):
        """What is wrong with the settings, a sentence each."""
        c, wrong = self.resolved(), []
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_kv_head', 'n_ff'):
            if getattr(c, name) is not None and getattr(c, name) < 1:
                wrong.append(f'{name}={getattr(c, name)} must be at least 1')
        if wrong:
            return wrong
        D = c.n_embd // c.n_head
        if c.n_embd % c.n_head:
            near = max(1, (2 * c.n_embd + c.n_head) // (2 * c.n_head)) * c.n_head
            wrong.append(f'n_embd={c.n_embd} is not divisible by n_head={c.n_head}; n_embd={near} would do')
        elif c.position == 'rope' and D % 2:
            wrong.append(f'rotary positions turn pairs of channels: n_embd / n_head = {D} is odd')
        elif c.position == 'rope' and D * c.block_size > 2**27:  # 0.5 GB of angles
            wrong.append(f'block_size={c.block_size} is too long: with heads of {D} channels there '
                         f'are angles for at most {2**27 // D:,}')
        if c.n_head % c.n_kv_head:
            wrong.append(f'n_head={c.n_head} is not divisible by n_kv_head={c.n_kv_head}')
        for name in ('dropout', 'label_smoothing'):
            if not 0 <= getattr(c, name) < 1:
                wrong.append(f'{name}={getattr(c, name)} must be at least 0 and below 1')
        choices = {'position': ('learned', 'rope'), 'norm': ('layernorm', 'rmsnorm'), 'mlp': ACTIVATIONS}
        for name, known in choices.items():
            if getattr(c, name) not in known:
                wrong.append(f'{name}={getattr(c, name)!r} is not one of {", ".join(known)}')
        if not 0 <= c.softcap <= 1e6:
            wrong.append(f'softcap={c.softcap} must not be negative, nor above a million; 0 turns it off')
        return wrong

    def resolved(self):
        """A copy with the preset's values in place of None (vocab_size stays as it is)."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        c = GPTConfig(**{'n_kv_head': self.n_head, **PRESETS[self.preset], **given})
        if c.n_ff is None:
            c.n_ff = -(-8 * c.n_embd // 3 // 64) * 64 if c.mlp == 'swiglu' else 4 * c.n_embd
        return c

    def model_args(self):
        """
        What a checkpoint needs to rebuild the model. Where the shape is nanoGPT's own these are exactly its seven
        names, so that nanoGPT reads our checkpoints; where it is not, all of them, so that nanoGPT refuses instead of
        computing something else.
        """
        plain = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
        seven = {name: getattr(self, name) for name in plain}
        every = dataclasses.replace(self.resolved(), label_smoothing=0.0)  # which is for training only
        return seven if every == GPTConfig(**seven).resolved() else dataclasses.asdict(every)


# -----------------------------------------------------------------------------
# where it computes, for train.py and sample.py alike; each choice with its reason

def choose_device(name, local_rank=0):
    """(device, reason). A device asked for by name that is not there is an error, never another one."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not re.fullmatch(r'auto|cpu|mps|cuda(:[0-9]+)?', name):
        raise ValueError(f'device={name!r} is not one of auto, cuda, cuda:N, mps, cpu')
    kind, reason = name.split(':')[0], 'asked for'
    if name == 'auto':
        kind = 'cuda' if cuda else 'mps' if mps else 'cpu'
        reason = {'cuda': 'there is one', 'mps': 'no CUDA, Apple GPU', 'cpu': 'no GPU found'}[kind]
    if kind == 'cuda' and not cuda:
        built = 'this PyTorch was built without CUDA' if torch.version.cuda is None else 'no usable GPU was found'
        raise ValueError(f'device={name!r} was asked for, but {built}; use --device=cpu or --device=auto')
    if kind == 'mps' and not mps:
        raise ValueError(f'device={name!r} was asked for, but there is no Apple GPU; use --device=cpu')
    if kind == 'cuda':
        index = int(name.split(':')[1]) if ':' in name else local_rank
        if index >= torch.cuda.device_count():
            raise ValueError(f'there is no device cuda:{index} among {torch.cuda.device_count()} GPUs; under torchrun '
                             'start as many processes as there are (--nproc_per_node)')
        return torch.device('cuda', index), f'{torch.cuda.get_device_name(index)}, {reason}'
    return torch.device(kind), reason


def choose_dtype(name, device, training=False):
    """
    (dtype, reason). bf16 where the hardware computes in it, fp16 on older GPUs, float32 elsewhere; on CPUs bf16 only to
    train, where it is up to 1.4 times as fast and the master weights are float32.
    """
    if name != 'auto':
        if name == 'bfloat16' and device.type == 'cuda' and torch.cuda.get_device_capability(device) < (8, 0):
            raise ValueError(f'dtype=bfloat16 was asked for, but {torch.cuda.get_device_name(device)} computes in it '
                             'by emulation only; use --dtype=float16')
        return getattr(torch, name), 'asked for'
    if device.type == 'cuda':
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, 'this GPU computes in it'
        return torch.float16, 'this GPU has no bf16 units; losses are scaled'
    if device.type == 'cpu' and training and cpu_has_bf16():
        return torch.bfloat16, 'this CPU has bf16 units'
    return torch.float32, f'on {device.type} the safe choice'


def cpu_has_bf16():
    """Whether this CPU multiplies bf16 itself (AVX512-BF16 or AMX); emulated, it is slower than float32."""
    tests = (getattr(torch.cpu, name, None) for name in ('_is_avx512_bf16_supported', '_is_amx_tile_supported'))
    return torch.backends.mkldnn.is_available() and any(test is not None and test() for test in tests)


def try_compile(device):
    """None when torch.compile works here, otherwise what it said, in one line."""
    if device.type == 'mps':
        return 'not tried on Apple GPUs'
    try:
        torch.compile(lambda x: (x * 2).relu().sum(), dynamic=False)(torch.ones(8, device=device))
    except Exception as e:  # inductor wraps what a missing compiler raises in types of its own
        return str(getattr(e, 'inner_exception', e)).strip().split('\n')[0][:120] or type(e).__name__
    finally:
        torch._dynamo.reset()
    return None


# -----------------------------------------------------------------------------
# the parts, small ones first

class Linear(nn.Linear):
    """
    A linear layer that computes in the dtype of its input. Weights stay in float32 for the optimizer and are cast
    where they are used: mixed precision without autocast, the same on every device, and free where dtypes agree.
    """

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """Computes in float32 whatever comes in, and gives the input's dtype back."""

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2)) over the last dimension, without weights (arXiv 1910.07467)."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class Softcap(nn.Module):
    """Bounds logits to (-cap, cap), smoothly (Gemma 2, arXiv 2408.00118)."""

    def __init__(self, cap):
        super().__init__()
        self.cap = cap

    def forward(self, x):
        return self.cap * torch.tanh(x / self.cap)


class NoPosition(nn.Module):
    """Stands where learned positions would be added."""

    def forward(self, position):
        return 0.0


class X0Mix(nn.Module):
    """x <- a x + b x0 with two learned numbers a block (modded-nanogpt, record 9)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0):
        a, b = self.scale.to(x.dtype)
        return a * x + b * x0


def rotation_angles(num_positions, D, base=10000.0):
    """cos and sin of position * base^(-2i/D): two tensors of (T, D/2), in float32 whatever the model computes in."""
    frequency = base ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)  # (D/2)
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency  # (T, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turns channel i together with channel i + D/2, the half-split form of Hugging Face. x: (B, H, T, D)."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def unchanged(x, *_):
    """Stands where rotary positions, or a mix of the residual stream and the embedding, would be."""
    return x


def norm_of(config):
    return LayerNorm(config.n_embd, bias=config.bias) if config.norm == 'layernorm' else RMSNorm()


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


class Attention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        D = config.n_embd // config.n_head
        # queries, keys and values of all heads in one matrix, in that order
        self.c_attn = Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * D, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = RMSNorm() if config.qk_norm else nn.Identity()
        self.rotate = rotate if config.position == 'rope' else unchanged
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin, cache=None):
        B, T, C = x.shape
        H, K = self.n_head, self.n_kv_head
        qkv = self.c_attn(x).view(B, T, H + 2 * K, C // H).transpose(1, 2)  # (B, H + 2K, T, D)
        q, k, v = qkv.split((H, K, K), dim=1)
        q = self.rotate(self.qk_norm(q), cos, sin)
        k = self.rotate(self.qk_norm(k), cos, sin)
        if x.device.type == 'cpu':
            # the CPU's kernel in bf16 takes 3.6 times as long backward (12 x 4 x 64 x 32, EPYC, torch 2.13) and 7 times
            # as long for one query (12 heads, 700 keys of 64)
            q, k, v = q.float(), k.float(), v.float()
        if cache is not None:
            y = cache.attend(self.layer, q, k, v)
        else:
            # is_causal and no mask: masks cost the fast kernels, and gave NaN gradients on Hopper (pytorch#196678)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p if self.training else 0.0,
                                               is_causal=True, enable_gqa=K < H)  # (B, H, T, D)
        return self.dropout(self.c_proj(y.to(x.dtype).transpose(1, 2).reshape(B, T, C)))


def relu2(x):
    return F.relu(x).square()


def swiglu(x):
    up, gate = x.chunk(2, dim=-1)
    return up * F.silu(gate)


ACTIVATIONS = {'gelu': F.gelu, 'gelu_tanh': partial(F.gelu, approximate='tanh'),
               'relu2': relu2, 'swiglu': swiglu}


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        gated = config.mlp == 'swiglu'  # two matrices in one: up, gate (arXiv 2002.05202)
        self.c_fc = Linear(config.n_embd, config.n_ff * (2 if gated else 1), bias=config.bias)
        self.act = ACTIVATIONS[config.mlp]
        self.c_proj = Linear(config.n_ff, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.mix = X0Mix() if config.x0_mix else unchanged
        self.ln_1 = norm_of(config)
        self.attn = Attention(config, layer)
        self.ln_2 = norm_of(config)
        self.mlp = MLP(config)

    def forward(self, x, x0, cos, sin, cache=None):
        x = self.mix(x, x0)
        x = x + self.attn(self.ln_1(x), cos, sin, cache)
        return x + self.mlp(self.ln_2(x))


# -----------------------------------------------------------------------------
# the loss

def head_gradients(x, w, targets, cap, smoothing):
    """
    The summed cross-entropy behind a head, and what its gradient is at the inputs and at the weights: (1,), (N, C),
    (V, C), from x (N, C), w (V, C), targets (N).
    """
    logits = (x @ w.T).float()  # (N, V)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum', label_smoothing=smoothing)
    V = w.size(0)
    d = logits.softmax(1) - smoothing / V
    d = d - (torch.arange(V, device=x.device) == targets[:, None]) * (1 - smoothing)
    if cap:
        d = d * (1 - (logits / cap).square())
    d = (d * (targets >= 0)[:, None]).to(x.dtype)
    return loss.view(1), d @ w, d.T @ x


class ChunkedLoss(torch.autograd.Function):
    """
    The summed cross-entropy behind a head, (1,), of which the logits never stand in memory all at once.

    What backward needs is computed while a chunk's logits are there, so nothing is computed twice; that is possible
    because a sum gives every row the same gradient, known before backward but for a factor.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, cap, smoothing, chunks, compiled):
        gradients = torch.compile(head_gradients, dynamic=False) if compiled else head_gradients
        w, total, dx, dw = weight.to(x.dtype), 0.0, [], torch.zeros_like(weight)
        for part, target in zip(x.chunk(chunks), targets.chunk(chunks), strict=True):
            loss, d_part, d_weight = gradients(part, w, target, cap, smoothing)
            total = total + loss
            dx.append(d_part)
            dw += d_weight
        ctx.save_for_backward(torch.cat(dx), dw)
        return total

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return (dx.float() * grad).to(dx.dtype), dw * grad, None, None, None, None, None


# compiled as one with the rest, the chunks would be fused again; so each is compiled alone
chunked_loss = torch.compiler.disable(ChunkedLoss.apply)


# -----------------------------------------------------------------------------
# the whole

class GPT(nn.Module):

    def __init__(self, config):
        """config: a GPTConfig whose vocab_size is set. ValueError where its settings do not fit together."""
        super().__init__()
        if wrong := config.problems():
            raise ValueError('; '.join(wrong))
        assert config.vocab_size is not None, 'vocab_size comes from the data; see train.py'
        self.config = c = config.resolved()
        self.compute_dtype = torch.float32  # train.py and sample.py set it to what the machine is fast at
        self.loss_chunks = 1  # parts in which head and loss are computed; train.py sets more where memory is short
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd),
            wpe=nn.Embedding(c.block_size, c.n_embd) if c.position == 'learned' else NoPosition(),
            # without learned positions nothing else would set the scale at which the stream starts
            ln_e=RMSNorm() if c.position == 'rope' else nn.Identity(),
            drop=nn.Dropout(c.dropout),
            h=nn.ModuleList([Block(c, layer) for layer in range(c.n_layer)]),
            ln_f=norm_of(c),
        ))
        self.lm_head = Linear(c.n_embd, c.vocab_size, bias=False)
        self.softcap = Softcap(c.softcap) if c.softcap else nn.Identity()
        if c.tie:
            self.transformer.wte.weight = self.lm_head.weight
        cos, sin = rotation_angles(c.block_size, c.n_embd // c.n_head)
        self.register_buffer('cos', cos, persistent=False)  # (T, D/2)
        self.register_buffer('sin', sin, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        All initialisation, here alone. GPT-2: N(0, 0.02), the projections onto the residual stream divided by
        sqrt(2 L). With zero_init those projections and the head start at zero, and other matrices keep the size of
        what they are given; Muon takes it from there.
        """
        c = self.config
        for name, p in self.named_parameters():
            std = 0.02
            if name.endswith('c_proj.weight'):
                std = 0.0 if c.zero_init else 0.02 / math.sqrt(2 * c.n_layer)
            elif c.zero_init and not (c.tie and 'wte' in name):
                std = 1.0 if 'wte' in name else 0.0 if 'lm_head' in name else 0.5 / math.sqrt(p.size(-1))
            if p.dim() > 1:
                nn.init.normal_(p, std=std)
            elif name.endswith('bias'):  # all other vectors start as their modules made them
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, cache=None):
        """
        idx: (B, T) token ids. With targets, (B, T) ids or -1 where a token does not count: the summed cross-entropy
        of each sequence, (B,), float32, in nats; with gradients and loss_chunks above 1 that of all together, (1,).
        Without: logits of the last position, (B, V), float32.
        With a cache, idx continues what the cache holds: any length into an empty one, one token at a time after.
        """
        B, T = idx.shape
        assert 0 < T <= self.config.block_size, f'{T} tokens do not fit block_size={self.config.block_size}'
        if cache is None:
            position, cos, sin = torch.arange(T, device=idx.device), self.cos[:T], self.sin[:T]
        else:
            position = cache.begin(T)
            cos, sin = self.cos[position].unsqueeze(-3), self.sin[position].unsqueeze(-3)  # (B or 1, 1, T, D/2)
        x = self.transformer.wte(idx) + self.transformer.wpe(position)  # (B, T, C)
        x = x0 = self.transformer.drop(self.transformer.ln_e(x.to(self.compute_dtype)))
        for block in self.transformer.h:
            x = block(x, x0, cos, sin, cache)
        if targets is None:
            x = x[:, -1] if cache is None else cache.finish(x)  # (B, C)
            return self.softcap(self.lm_head(self.transformer.ln_f(x)).float())
        x = self.transformer.ln_f(x)
        smoothing = self.config.label_smoothing if self.training else 0.0
        if self.loss_chunks > 1 and torch.is_grad_enabled():
            return chunked_loss(x.view(B * T, -1), self.lm_head.weight, targets.reshape(B * T), self.config.softcap,
                                smoothing, self.loss_chunks, torch.compiler.is_compiling())
        losses = []
        for part, target in zip(x.chunk(self.loss_chunks, 1), targets.chunk(self.loss_chunks, 1), strict=True):
            # float32 from here on; compiled, the cast, cap and cross-entropy are one pass over the bf16 logits
            logits = self.softcap(self.lm_head(part).float())  # (B, T, V), or a part of T
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction='none',
                                   label_smoothing=smoothing)
            losses.append(loss.view(B, -1).sum(1))
        return sum(losses)

    # counts

    def num_params(self):
        """Every parameter, shared ones once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T):
        """
        Floating-point operations a token, forward and backward, in sequences of T: 6 for each weight that multiplies
        (the head counts, embeddings only look up), and causal attention over (T + 1) / 2 positions on average.
        """
        c = self.config
        qkv = c.n_embd + 2 * c.n_kv_head * (c.n_embd // c.n_head)
        rows = qkv + c.n_embd + c.n_ff * (3 if c.mlp == 'swiglu' else 2)
        weights = c.n_embd * (c.n_layer * rows + c.vocab_size)
        attention = c.n_layer * 2 * c.n_embd * (T + 1) / 2  # q k^T and the weighted sum of v, multiply-adds
        return 6 * (weights + attention)

    # generation

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, num_samples=1, seeds=None, stop=(), stopped=None, past_context='slide',
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
        size, sampling, stopped = self.config.block_size, Sampling(**sampling), set() if stopped is None else stopped
        contexts = [list(prompt[-size:]) for prompt in prompts for _ in range(num_samples)]
        assert all(contexts), 'a prompt is empty'
        if max_new_tokens < 1 or not contexts:
            return
        room = min(size, max(map(len, contexts)) + max_new_tokens)
        if decode != 'eager':  # so that a longer prompt seldom means another graph, or another compilation
            room = min(size, max(128, 2**(room - 1).bit_length()) if decode == 'compiled' else -(-room // 128) * 128)
        prefilled, logits = self.prefill(contexts[::num_samples])
        sources = torch.arange(len(prompts)).repeat_interleave(num_samples).tolist()
        cache, sequences = self.new_cache(len(contexts), room, decode), list(range(len(contexts)))
        cache.put(sequences, prefilled, sources)
        draws = Draws(contexts, seeds, sampling, self.config.vocab_size, self.cos.device)
        draws.draw(logits[sources])
        del prefilled, logits
        waiting, step = deque(), None  # tokens on their way to the host, which reads them a step late where that helps
        for left in reversed(range(max_new_tokens)):
            waiting.append((sequences, read_later(draws.told)))
            full = [s for s, length in zip(sequences, cache.lengths, strict=True) if length == size]
            while len(waiting) > (self.cos.device.type in READ_LATE and left and not full):
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
            self.slide(cache, sequences, contexts, stopped)
            if (max_new_tokens - left) % AHEAD == 0:
                draws.make_numbers()
            if decode == 'eager':
                draws.draw(self(draws.token, cache=cache))
                continue
            step = step or fixed_step(self, cache, draws, decode)
            step()
            cache.lengths = [n + 1 for n in cache.lengths]

    def prefill(self, contexts):
        """(a cache that holds these lists of ids, (B, V) logits after each) by one forward."""
        lengths = [len(context) for context in contexts]
        idx = torch.tensor([context + [0] * (max(lengths) - len(context)) for context in contexts])
        cache = self.new_cache(len(contexts), max(lengths))
        cache.coming = lengths
        return cache, self(idx.to(self.cos.device), cache=cache)

    def slide(self, cache, sequences, contexts, stopped):
        """
        Makes room in the rows that are full: the oldest eighth of their context goes, and the rest is computed anew,
        but for the newest token, which is the next to be fed. A prefill in size / 8 steps, for nanoGPT's in each.
        """
        size = self.config.block_size
        full = [row for row, length in enumerate(cache.lengths) if length == size]
        for row in full:
            contexts[sequences[row]] = contexts[sequences[row]][max(size // 8, 1):]
            cache.lengths[row] = cache.length[row] = 0  # a row that is finished, but not dropped yet, starts anywhere
        full = [row for row in full if sequences[row] not in stopped and size > 1]
        if full:
            anew, _ = self.prefill([contexts[sequences[row]][:-1] for row in full])
            cache.put(full, anew, list(range(len(full))))

    def for_inference(self, device, dtype, quantize='none', pack=True):
        """
        Moves the model to a device with its matrices in dtype: there is no optimizer that would need more. pack: on
        CPUs, as oneDNN reads them fastest. With quantize='int8' all but embeddings are rounded to 8 bits.
        """
        self.to(device)
        for p in self.parameters():
            if p.dim() > 1:
                p.data = p.data.to(dtype)
        self.compute_dtype = dtype
        packing = pack and can_pack(device, dtype)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if type(child) is Linear and quantize == 'int8':
                    setattr(module, name, Int8Linear(child))
                elif type(child) is Linear and packing and child.weight.numel() >= PACK_FROM:
                    setattr(module, name, PackedLinear(child))
        return self.eval()

    def new_cache(self, batch, num_positions, decode='eager'):
        dtype = self.compute_dtype
        if self.cos.device.type == 'cpu':
            if decode != 'compiled':
                dtype = torch.float32  # see Attention
            elif dtype == torch.float32 and type(self.lm_head) is Int8Linear:
                dtype = torch.bfloat16  # to which the products round what they are given anyway
        return KVCache(self.config, batch, num_positions, self.cos.device, dtype)

    def crop_block_size(self, block_size):
        """Shortens the context, as when a GPT-2 of 1024 positions is tuned on shorter text."""
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        self.cos, self.sin = self.cos[:block_size], self.sin[:block_size]
        if self.config.position == 'learned':
            self.transformer.wpe = nn.Embedding.from_pretrained(self.transformer.wpe.weight[:block_size].clone(),
                                                                freeze=False)


# -----------------------------------------------------------------------------
# generation: what GPT.generate draws with

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


# -----------------------------------------------------------------------------
# Linears for inference

PACK_FROM = 2**18  # numbers in a matrix; a smaller one stays in the CPU's cache, and the call costs more than it gains


class PackedLinear(nn.Module):
    """
    A Linear whose weights lie as oneDNN wants them. On 2 cores of an EPYC with AVX512 a float32 matrix of 50304 x 768
    takes 8.4 ms for one row and 9.7 for eight, where F.linear takes 11.6 and 25; in bf16 3.2 and 4.9 for 7.8 and 9.9.
    """

    def __init__(self, linear):
        super().__init__()
        self.bias = None if linear.bias is None else linear.bias.detach().to(linear.weight.dtype)
        # the 8 is the number of rows that the layout is chosen for; for one row it is as good, for many no worse
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, 'none', [], '')


def can_pack(device, dtype):
    """Whether PackedLinear works here in this dtype, by trying it."""
    if device.type != 'cpu' or not torch.backends.mkldnn.is_available():
        return False
    linear, x = nn.utils.skip_init(nn.Linear, 64, 32, dtype=dtype), torch.ones(2, 64, dtype=dtype)
    for p in linear.parameters():
        p.data = torch.linspace(0, 1, p.numel(), dtype=dtype).view(p.shape)
    try:
        y = PackedLinear(linear)(x)
    except (RuntimeError, AttributeError, NotImplementedError):  # another CPU, or another build
        return False
    return torch.allclose(y.float(), linear(x).float(), rtol=0.05, atol=0.05)


class Int8Linear(nn.Module):
    """
    Weights in 8 bits, q s with one scale s a row: half a step, s / 2 = max|w| / 254, is the most that a weight moves
    (s is rounded up to bf16, so up to 1/128 more). Activations keep their dtype; on CPUs they and what comes out are
    rounded to bf16.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach().float()
        # rounded to what the kernel takes before anything is divided by it, so that it adds no error of its own
        scale = (weight.abs().amax(1) * (1 + 2**-8) / 127).clamp_min(1e-30).bfloat16()
        self.register_buffer('scale', scale)  # (out,)
        self.register_buffer('weight', (weight / scale.float()[:, None]).round().to(torch.int8))  # (out, in)
        self.bias = linear.bias
        self.on_cpu = weight.device.type == 'cpu' and hasattr(torch, '_weight_int8pack_mm')

    def forward(self, x):
        if self.on_cpu:
            rows = x.reshape(-1, x.size(-1)).bfloat16()
            # the kernel reads the weights anew for each row: from some tens on, one pass to unpack them is less;
            # rounded as it rounds, or a text would depend on what is computed beside it
            y = (torch._weight_int8pack_mm(rows, self.weight, self.scale) if len(rows) <= 32 else
                 (F.linear(rows.float(), self.weight.float()) * self.scale.float()).bfloat16())
            y = y.view(*x.shape[:-1], -1).to(x.dtype)
        elif x.dtype == torch.float16:  # its numbers end at 65504, and these weights are up to 127
            y = F.linear(x / 128, self.weight.to(x.dtype)) * (self.scale.float() * 128).to(x.dtype)
        else:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


# -----------------------------------------------------------------------------
# weights in and out

def load_checkpoint(path):
    """
    Reads a checkpoint file, ours or nanoGPT's, and proves it whole first: torch.load never looks at the CRC-32 that
    torch.save wrote, and of 400 flipped bits 398 loaded as wrong numbers without a word. Only plain values and tensors
    are unpickled. ValueError says what is wrong with the file.
    """
    if torch.__version__ < (2, 10):  # what weights_only=True lets through there runs code
        raise ValueError(f'torch {torch.__version__} loads no file safely (CVE-2026-24747): pip install "torch>=2.11"')
    try:
        wrong = check_records(path)
        checkpoint = None if wrong else torch.load(path, map_location='cpu', weights_only=True)
    except UnpicklingError:  # torch's own text for this advises the unsafe way
        wrong = MORE_THAN_TENSORS.format('an instruction that is not followed')
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except (zipfile.BadZipFile, struct.error, EOFError, ArithmeticError, AssertionError, AttributeError, LookupError,
            RuntimeError, TypeError, ValueError) as e:  # what unpickling of any bytes has been seen to raise
        raise ValueError(f'{path} is not a whole checkpoint: {first_line(e)}{other_format(path)}') from None
    if not wrong and (odd := wrong_with(checkpoint)):
        wrong = f"is no checkpoint of ours or nanoGPT's: {odd}"
    if wrong:
        raise ValueError(f'{path} {wrong}')
    # names without what torch.compile and DDP put before them, in any nesting
    checkpoint['model'] = {re.sub(r'^(_orig_mod\.|module\.)+', '', k): v for k, v in checkpoint['model'].items()}
    if 'transformer.h.0.ln_1.bias' in checkpoint['model']:  # nanoGPT's before it had the setting
        checkpoint['model_args'].setdefault('bias', True)
    return checkpoint


def other_format(path):
    """What to do with a file that is no checkpoint of ours but something else that is known, or ''."""
    with open(path, 'rb') as f:
        head = f.read(16)
    if head.startswith(b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'):
        return "; it is in torch's format of before 1.6: load it and save it again with a newer torch"
    if head[8:9] == b'{':
        return '; it may be a safetensors file: name its folder, which has a config.json too'
    return ''


# torch allows more, some of which takes any amount of memory: bytearray(10**12), an instruction of 30 bytes
CHECKPOINT_NAMES = re.compile(r'collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)'
                              r'|torch (Float|Double|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage')

MORE_THAN_TENSORS = 'holds more than tensors and plain values ({}); loading it could run code, so it is refused'


def check_records(path):
    """
    What is wrong with the records of a checkpoint, by their checksums and by the names in its pickle, or None.
    ValueError where the file is no list of records, each as long as it says.
    """
    with open(path, 'rb') as f, zipfile.ZipFile(f) as z:
        f.seek(0)
        names = z.namelist()
        # of two records of a name torch reads the first and zipfile the last; what has others before it, as no zip file
        if f.read(4) != b'PK\3\4' or len(set(names)) < len(names) or [n[-8:] for n in names].count('data.pkl') != 1:
            raise ValueError('it does not begin with records of different names, one of them data.pkl')
        if any(r.compress_type for r in z.infolist()) or sum(r.file_size for r in z.infolist()) > os.path.getsize(path):
            raise ValueError('its records claim more bytes than it has')
        # one bit there makes a record a folder to torch, which then hands out memory as it was (1 of 10,000 files)
        if any(r.external_attr or r.volume or r.is_dir() for r in z.infolist()):
            raise ValueError('its list of records is damaged')
        if damaged := z.testzip():
            return f'is damaged: the checksum of its record {damaged} does not match'
        pickled = z.read(next(name for name in names if name.endswith('data.pkl')))
    names = [arg for op, arg, _ in pickletools.genops(pickled) if op.name in ('GLOBAL', 'STACK_GLOBAL', 'INST')]
    strange = [name for name in names if not CHECKPOINT_NAMES.fullmatch(str(name))]
    return MORE_THAN_TENSORS.format(strange[0]) if strange else None


def wrong_with(checkpoint):
    """What is wrong with the containers of a checkpoint, or None: what is read from them later relies on it."""
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= checkpoint.keys():
        return "'model' and 'model_args' are missing"
    flat = ('model_args', 'config', 'data', 'versions', 'machine')
    for name in ('model', 'optimizer', 'muon', 'scaler', 'state', 'tokenizer', *flat):
        part = checkpoint.get(name, {})
        if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
            return f'{name!r} is no dict of names'
        if name in flat and not all(isinstance(value, str | int | float | None) for value in part.values()):
            return f'{name!r} holds more than numbers and text'
    if next(tensors_in(checkpoint.get('tokenizer')), None) is not None:
        return "'tokenizer' holds a tensor"
    for t in tensors_in(checkpoint):
        # an expanded tensor shows more numbers than it has, and a copy of it would need the memory
        if t.numel() * t.element_size() > t.untyped_storage().nbytes():
            return f'a tensor of {tuple(t.shape)} lies in {t.untyped_storage().nbytes()} bytes'
    for name, weight in checkpoint['model'].items():
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return f'the weight {name!r} is no tensor of floating-point numbers'
    return None


def save_checkpoint(path, checkpoint, keep_old=None):
    """
    Writes aside, flushes to the disk, reads every record back, renames. A kill at any moment leaves the old file or
    the new one: of 100 kills during plain torch.save onto one file 43 left it unreadable, of 100 during this none.
    keep_old: a second name that the old file keeps. ValueError, with free and needed space, where it cannot be written.
    """
    partial = f'{path}.{os.getpid()}.tmp'
    try:
        with open(partial, 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if wrong := check_records(partial):
            raise RuntimeError(f'what was written does not read back: it {wrong}')
        if keep_old and os.path.exists(path) and not os.path.lexists(keep_old):
            try:
                os.link(path, keep_old)
            except OSError:  # a file system without links
                shutil.copyfile(path, keep_old)
        os.replace(partial, path)
        sync_folder(os.path.dirname(path) or '.')
    # torch turns a full disk into a RuntimeError that hides the cause; the others are what reading back raises
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as e:
        with contextlib.suppress(OSError):
            os.remove(partial)
        free = ''
        with contextlib.suppress(OSError):  # where the folder itself has gone
            free = f'{shutil.disk_usage(os.path.dirname(path) or ".").free / 1e6:,.1f} MB are free, '
        need = sum(t.numel() * t.element_size() for t in tensors_in(checkpoint))
        why = getattr(e, 'strerror', None) or first_line(e)
        why = 'the disk takes no more' if 'unexpected pos' in why else why
        raise ValueError(f'{path} could not be written: {why}; {free}{need / 1e6:,.1f} MB are needed') from e


def sync_folder(folder):
    """Makes a rename durable. Windows cannot open folders, and does it on its own."""
    if os.name == 'posix':
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def tensors_in(value):
    """Every tensor in nested containers; looks into each container once, for a file can make one hold itself."""
    left, seen = [value], set()
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value


def first_line(error):
    return str(error).strip().split('\n')[0]


def config_from(args):
    """The GPTConfig that a checkpoint's model_args describe."""
    hints = get_type_hints(GPTConfig)
    wrong = [f'{name} is not known to this version' for name in args if name not in hints]
    wrong += [f'{name}={value!r} is of the wrong type' for name, value in args.items()
              if name in hints and not of_kind(value, hints[name])]
    wrong += ['vocab_size is missing'] if args.get('vocab_size') is None else []
    if wrong := wrong or GPTConfig(**args).problems():
        raise ValueError(f'model_args cannot be used: {"; ".join(wrong)}')
    return GPTConfig(**args)


def of_kind(value, kind):
    """Whether an annotation of GPTConfig allows the value; a whole number does where a number is asked."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if alternatives := get_args(kind):
        return any(of_kind(value, k) for k in alternatives)
    return isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))


def model_from(args, state_dict, **override):
    """Builds a GPT from a checkpoint's model_args and weights. ValueError where they do not belong together."""
    config = dataclasses.replace(config_from(args), **override)
    # before anything is allocated: the matrices that every shape has
    c, total = config.resolved(), sum(v.numel() for v in state_dict.values())
    rows = c.vocab_size + (c.block_size if c.position == 'learned' else 0) + c.n_layer * (c.n_embd + c.n_ff)
    if rows * c.n_embd > total or c.n_layer > len(state_dict):
        raise ValueError(f'model_args claims a larger model than the weights beside it: {rows * c.n_embd:,} numbers or '
                         f'more in {c.n_layer} layers, not {total:,} in {len(state_dict)} tensors')
    model = GPT(config)
    load_weights(model, state_dict)
    return model


def load_weights(model, state_dict):
    """Strict, whatever the order; ValueError lists what does not fit."""
    own = model.state_dict()
    # nanoGPT of PyTorch 1.x days kept the causal mask as a buffer
    given = {k: v for k, v in state_dict.items() if not k.endswith(('.attn.bias', '.attn.masked_bias'))}
    wrong = [f'{k} is missing' for k in own if k not in given]
    wrong += [f'{k} is unknown' for k in given if k not in own]
    wrong += [f'{k} is {tuple(given[k].shape)}, not {tuple(own[k].shape)}' for k in own
              if k in given and given[k].shape != own[k].shape]
    if not wrong and model.config.tie:
        wte, head = given['transformer.wte.weight'], given['lm_head.weight']
        if wte.data_ptr() != head.data_ptr() and not torch.equal(wte, head):
            wrong.append('embedding and head differ, and this model has one matrix for both')
    if wrong:
        raise ValueError('weights do not fit the model: ' + '; '.join(wrong[:5]) + ('; ...' if wrong[5:] else ''))
    model.load_state_dict(given)


SAFETENSORS_DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
                      'I64': torch.int64, 'I32': torch.int32, 'I16': torch.int16, 'I8': torch.int8,
                      'U8': torch.uint8, 'BOOL': torch.bool}


def read_safetensors(path):
    """
    {name: tensor} of a .safetensors file, mapped and not copied. The format: 8 bytes of length, a JSON header, raw
    row-major bytes (https://github.com/huggingface/safetensors). Anything that does not add up is a ValueError.
    """
    with open(path, 'rb') as f:
        size = os.fstat(f.fileno()).st_size
        length = struct.unpack('<Q', f.read(8))[0] if size >= 8 else -1
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f'{path} is no safetensors file, or cut short: {size} bytes, header of {length}')
        try:
            header = json.loads(f.read(length))
            entries = []
            for name, e in header.items():
                if name != '__metadata__':
                    a, b = e['data_offsets']
                    if not isinstance(e['shape'], list) or not all(type(n) is int for n in (a, b, *e['shape'])):
                        raise ValueError(f'{name} has a shape or place that is not whole numbers')
                    entries.append((name, SAFETENSORS_DTYPES[e['dtype']], e['shape'], a, b))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f'{path} has a header that cannot be read: {e!r}') from None
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors, end = {}, 0
    for name, dtype, shape, a, b in sorted(entries, key=lambda entry: entry[3:]):
        count = math.prod(shape)
        fits = min(shape, default=0) >= 0 and a == end and b - a == count * dtype.itemsize
        if not fits or 8 + length + b > size or math.prod(n or 1 for n in shape) >= 2**62 or len(shape) > 64:
            raise ValueError(f'{path}: {name} of shape {shape} does not fit its place {a}..{b} in {size} bytes')
        whole = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + length + a) if count else torch.empty(0)
        tensors[name], end = whole.to(dtype).view(shape), b
    return tensors


def read_json(path):
    """The object in a JSON file; ValueError where there is none."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f'{path} cannot be read: {e}') from None
    if not isinstance(value, dict):
        raise ValueError(f'{path} holds no object of names and values')
    return value


def load_gpt2(folder, **override):
    """
    A GPT from a Hugging Face folder of the GPT-2 family: config.json beside model.safetensors, in one file or in the
    shards that model.safetensors.index.json lists. ValueError where it is another family or does not fit.
    """
    path = os.path.join(folder, 'config.json')
    hf = read_json(path)
    activation = {'gelu_new': 'gelu_tanh', 'gelu': 'gelu', 'gelu_pytorch_tanh': 'gelu_tanh'}
    if hf.get('model_type') != 'gpt2':
        raise ValueError(f'{path}: model_type={hf.get("model_type")!r} is not read by this version, only gpt2')
    if str(hf.get('activation_function', 'gelu_new')) not in activation:
        raise ValueError(f'{path}: activation_function={hf["activation_function"]!r} is not supported, only '
                         f'{", ".join(activation)}')
    for name, usual in (('layer_norm_epsilon', 1e-5), ('scale_attn_weights', True),
                        ('scale_attn_by_inverse_layer_idx', False), ('add_cross_attention', False)):
        if hf.get(name, usual) != usual:
            raise ValueError(f'{path}: {name}={hf[name]} is not supported, only {usual}')
    try:
        args = dict(n_layer=hf['n_layer'], n_head=hf['n_head'], n_embd=hf['n_embd'], n_ff=hf.get('n_inner'),
                    block_size=hf.get('n_positions', 1024), vocab_size=hf['vocab_size'], bias=True,
                    mlp=activation[hf.get('activation_function', 'gelu_new')], tie=hf.get('tie_word_embeddings', True))
    except KeyError as e:
        raise ValueError(f'{path} does not give {e}') from None

    index = os.path.join(folder, 'model.safetensors.index.json')
    files = ['model.safetensors']
    if os.path.exists(index):
        places = read_json(index).get('weight_map')
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f'{index} does not say which file holds which weight')
        files = sorted({os.path.basename(name) for name in places.values()})
    state_dict = {}
    for name in files:
        if not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f'{os.path.join(folder, name)} does not exist; weights must be in safetensors files')
        for key, tensor in read_safetensors(os.path.join(folder, name)).items():
            key = key if key.startswith(('transformer.', 'lm_head.')) else f'transformer.{key}'
            # OpenAI's "Conv1D" stores (in, out)
            conv = key.endswith(('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight'))
            state_dict[key] = (tensor.t() if conv else tensor).float()
    wte = state_dict.get('transformer.wte.weight', torch.empty(0))
    args['tie'] = args['tie'] and torch.equal(state_dict.get('lm_head.weight', wte), wte)  # as transformers has it
    if args['tie']:
        state_dict['lm_head.weight'] = wte
    try:
        return model_from(args, state_dict, **override)
    except ValueError as e:
        raise ValueError(f'{folder}: {e}') from None
