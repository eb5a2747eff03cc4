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
import re
import shutil
import struct
import zipfile
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Literal

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
        for name in ('block_size', 'n_layer', 'n_head', 'n_embd', 'n_kv_head', 'n_ff'):
            if getattr(c, name) < 1:
                wrong.append(f'{name}={getattr(c, name)} must be at least 1')
        if self.vocab_size is not None and self.vocab_size < 1:
            wrong.append(f'vocab_size={self.vocab_size} must be at least 1')
        if wrong:
            return wrong
        if c.n_embd % c.n_head:
            near = max(1, round(c.n_embd / c.n_head)) * c.n_head
            wrong.append(f'n_embd={c.n_embd} is not divisible by n_head={c.n_head}; n_embd={near} would do')
        elif c.position == 'rope' and c.n_embd // c.n_head % 2:
            wrong.append(f'rotary positions turn pairs of channels: n_embd / n_head = {c.n_embd // c.n_head} is odd')
        if c.n_head % c.n_kv_head:
            wrong.append(f'n_head={c.n_head} is not divisible by n_kv_head={c.n_kv_head}')
        for name in ('dropout', 'label_smoothing'):
            if not 0 <= getattr(c, name) < 1:
                wrong.append(f'{name}={getattr(c, name)} must be at least 0 and below 1')
        choices = {'position': ('learned', 'rope'), 'norm': ('layernorm', 'rmsnorm'), 'mlp': ACTIVATIONS}
        for name, known in choices.items():
            if getattr(c, name) not in known:
                wrong.append(f'{name}={getattr(c, name)!r} is not one of {", ".join(known)}')
        if c.softcap < 0:
            wrong.append(f'softcap={c.softcap} must not be negative; 0 turns it off')
        return wrong

    def resolved(self):
        """A copy with the preset's values in place of None (vocab_size stays as it is)."""
        values = dataclasses.asdict(self)
        values |= {k: v for k, v in PRESETS[self.preset].items() if values[k] is None}
        if values['n_kv_head'] is None:
            values['n_kv_head'] = self.n_head
        if values['n_ff'] is None:
            values['n_ff'] = -(-8 * self.n_embd // 3 // 64) * 64 if values['mlp'] == 'swiglu' else 4 * self.n_embd
        return GPTConfig(**values)

    def model_args(self):
        """
        What a checkpoint needs to rebuild the model. Where the shape is nanoGPT's own these are exactly its seven
        names, so that nanoGPT reads our checkpoints; where it is not, all of them, so that nanoGPT refuses instead of
        computing something else.
        """
        plain = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
        seven = {name: getattr(self, name) for name in plain}
        every = dataclasses.asdict(self.resolved())
        same = dataclasses.asdict(GPTConfig(**seven).resolved())
        training_only = {'label_smoothing': 0.0, 'preset': None}
        return seven if every | training_only == same | training_only else every | {'label_smoothing': 0.0}


# -----------------------------------------------------------------------------
# where it computes, for train.py and sample.py alike; each choice with its reason

def choose_device(name, local_rank=0):
    """(device, reason). A device asked for by name that is not there is an error, never another one."""
    cuda = torch.cuda.is_available()
    mps = torch.backends.mps.is_available()
    if name == 'auto':
        kind = 'cuda' if cuda else 'mps' if mps else 'cpu'
        reason = {'cuda': 'there is one', 'mps': 'no CUDA, Apple GPU', 'cpu': 'no GPU found'}[kind]
    else:
        kind, reason = name.split(':')[0], 'asked for'
    if name != 'auto' and not re.fullmatch(r'cpu|mps|cuda(:[0-9]+)?', name):
        raise ValueError(f'device={name!r} is not one of auto, cuda, cuda:N, mps, cpu')
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


class ResidualOnly(nn.Module):
    """Stands where the residual stream and the embedding would be mixed."""

    def forward(self, x, x0):
        return x


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


def no_rotation(x, cos, sin):
    return x


def norm_of(config):
    return LayerNorm(config.n_embd, bias=config.bias) if config.norm == 'layernorm' else RMSNorm()


class KVCache:
    """
    Keys and values of everything a batch has seen, preallocated: k and v are (L, B, K, T_max, D).
    `length` is how many positions are filled; forward advances it once all layers have written.
    """

    def __init__(self, config, batch, num_positions, device, dtype):
        c = config.resolved()
        shape = (c.n_layer, batch, c.n_kv_head, num_positions, c.n_embd // c.n_head)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def update(self, layer, k, v):
        """Writes (B, K, T, D) behind what is there; returns views of all keys and values so far."""
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length:end] = k
        self.v[layer, :, :, self.length:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        D = config.n_embd // config.n_head
        # queries, keys and values of all heads in one matrix, in that order
        self.c_attn = Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * D, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = RMSNorm() if config.qk_norm else nn.Identity()
        self.rotate = rotate if config.position == 'rope' else no_rotation
        self.grouped = config.n_kv_head < config.n_head
        self.attn_dropout = config.dropout
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin, cache=None):
        B, T, C = x.shape
        H, K = self.n_head, self.n_kv_head
        qkv = self.c_attn(x).view(B, T, H + 2 * K, C // H).transpose(1, 2)  # (B, H + 2K, T, D)
        q, k, v = qkv.split((H, K, K), dim=1)
        q = self.rotate(self.qk_norm(q), cos, sin)
        k = self.rotate(self.qk_norm(k), cos, sin)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        if T > 1 and x.device.type == 'cpu':
            # the CPU's kernel takes 3.6 times as long for its backward in bf16 (12 x 4 x 64 x 32, EPYC, torch 2.13)
            q, k, v = q.float(), k.float(), v.float()
        # is_causal and never a mask: masks cost the fast kernels, and gave NaN gradients on Hopper (pytorch#196678).
        # one new position may see everything before it, so decoding needs no mask either
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_dropout if self.training else 0.0,
                                           is_causal=T > 1, enable_gqa=self.grouped)  # (B, H, T, D)
        return self.dropout(self.c_proj(y.to(x.dtype).transpose(1, 2).reshape(B, T, C)))


def relu2(x):
    return F.relu(x).square()


def gelu_tanh(x):
    return F.gelu(x, approximate='tanh')


def swiglu(x):
    up, gate = x.chunk(2, dim=-1)
    return up * F.silu(gate)


ACTIVATIONS = {'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu2': relu2, 'swiglu': swiglu}


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
        self.mix = X0Mix() if config.x0_mix else ResidualOnly()
        self.ln_1 = norm_of(config)
        self.attn = Attention(config, layer)
        self.ln_2 = norm_of(config)
        self.mlp = MLP(config)

    def forward(self, x, x0, cos, sin, cache=None):
        x = self.mix(x, x0)
        x = x + self.attn(self.ln_1(x), cos, sin, cache)
        return x + self.mlp(self.ln_2(x))


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
            if p.dim() < 2:
                if name.endswith('bias'):
                    nn.init.zeros_(p)  # all other vectors start as their modules made them
            elif name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.0 if c.zero_init else 0.02 / math.sqrt(2 * c.n_layer))
            elif not c.zero_init or (c.tie and 'wte' in name):
                nn.init.normal_(p, std=0.02)
            elif 'wte' in name:
                nn.init.normal_(p, std=1.0)
            elif 'lm_head' in name:
                nn.init.zeros_(p)
            else:
                nn.init.normal_(p, std=0.5 / math.sqrt(p.size(1)))

    def forward(self, idx, targets=None, cache=None):
        """
        idx: (B, T) token ids. With targets, (B, T) ids or -1 where a token does not count: the summed cross-entropy
        of each sequence, (B,), float32, in nats. Without: logits of the last position, (B, V), float32.
        With a cache, idx continues what the cache holds: any length into an empty one, one token at a time after.
        """
        B, T = idx.shape
        start = 0 if cache is None else cache.length
        assert start + T <= self.config.block_size, f'{start + T} tokens do not fit block_size={self.config.block_size}'
        assert start == 0 or T == 1, 'a cache that is not empty takes one token at a time'
        position = torch.arange(start, start + T, device=idx.device)
        cos, sin = self.cos[start:start + T], self.sin[start:start + T]
        x = self.transformer.wte(idx) + self.transformer.wpe(position)  # (B, T, C)
        x = x0 = self.transformer.drop(self.transformer.ln_e(x.to(self.compute_dtype)))
        for block in self.transformer.h:
            x = block(x, x0, cos, sin, cache)
        x = self.transformer.ln_f(x)
        if cache is not None:
            cache.length = start + T
        if targets is None:
            return self.softcap(self.lm_head(x[:, -1]).float())
        # float32 from here on; compiled, the cast, cap and cross-entropy are one pass over the bf16 logits
        logits = self.softcap(self.lm_head(x).float())  # (B, T, V)
        smoothing = self.config.label_smoothing if self.training else 0.0
        loss = F.cross_entropy(logits.view(B * T, -1), targets.reshape(B * T), ignore_index=-1, reduction='none',
                               label_smoothing=smoothing)
        return loss.view(B, T).sum(1)

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
        per_block = c.n_embd * (c.n_embd + 2 * c.n_kv_head * (c.n_embd // c.n_head)) + c.n_embd * c.n_embd
        per_block += c.n_embd * c.n_ff * (3 if c.mlp == 'swiglu' else 2)
        weights = c.n_layer * per_block + c.n_embd * c.vocab_size
        attention = c.n_layer * 2 * c.n_embd * (T + 1) / 2  # q k^T and the weighted sum of v, multiply-adds
        return 6 * (weights + attention)

    # generation

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=None, vocab=None, seed=None):
        """
        Continues idx, (B, T) with T >= 1, one token at a time; yields (B,) ids as they are drawn.

        temperature: 0 is greedy. top_k, top_p: keep the k likeliest, the smallest set with probability p.
        stop:        an id after which a sequence is finished; it goes on yielding `stop` until all are
        vocab:       ids from here on are padding of the vocabulary and never drawn
        seed:        makes the draw repeatable on this device
        Past block_size the last block_size tokens are computed anew for each token, as if they stood alone.
        """
        size = self.config.block_size
        generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        idx = idx[:, -size:]
        cache = self.new_cache(idx.size(0), min(size, idx.size(1) + max_new_tokens))
        new, finished = idx, torch.zeros(idx.size(0), dtype=torch.bool, device=idx.device)
        for _ in range(max_new_tokens):
            if cache.length + new.size(1) <= size:
                logits = self(new, cache=cache)
            else:  # every position has shifted, so nothing cached is true any more
                logits = self(idx)
            token = sample_token(logits[:, :vocab], temperature, top_k, top_p, generator)  # (B,)
            if stop is not None:
                token = torch.where(finished, stop, token)
                finished |= token == stop
            yield token
            if stop is not None and finished.all():
                return
            new = token[:, None]
            idx = torch.cat((idx, new), dim=1)[:, -size:]

    def for_inference(self, device, dtype):
        """Moves the model to a device with its matrices in dtype: there is no optimizer that would need more."""
        self.to(device)
        for p in self.parameters():
            if p.dim() > 1:
                p.data = p.data.to(dtype)
        self.compute_dtype = dtype
        return self.eval()

    def new_cache(self, batch, num_positions):
        return KVCache(self.config, batch, num_positions, self.cos.device, self.compute_dtype)

    def crop_block_size(self, block_size):
        """Shortens the context, as when a GPT-2 of 1024 positions is tuned on shorter text."""
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        self.cos, self.sin = self.cos[:block_size], self.sin[:block_size]
        if self.config.position == 'learned':
            self.transformer.wpe = nn.Embedding.from_pretrained(self.transformer.wpe.weight[:block_size].clone(),
                                                                freeze=False)


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draws one id a row from (B, V) logits. ValueError when they are not finite."""
    if not torch.isfinite(logits).all():
        raise ValueError('the model returned logits that are not finite: its weights are damaged or it diverged')
    if temperature < 1e-6:  # greedy; dividing by less would overflow
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)
    if top_p is not None:
        sorted_probs, order = probs.sort(dim=-1, descending=True)
        before = sorted_probs.cumsum(dim=-1) - sorted_probs  # probability of everything likelier; 0 for the first
        probs = probs.scatter(-1, order, sorted_probs.masked_fill(before >= top_p, 0.0))
    # argmax of p / Exp(1) is a draw from p, in operations that need no word from the host
    noise = torch.empty_like(probs).exponential_(generator=generator).clamp_min(1e-30)
    return (probs / noise).argmax(dim=-1)


# -----------------------------------------------------------------------------
# weights in and out

def load_checkpoint(path):
    """
    Reads a checkpoint file, ours or nanoGPT's, and proves it whole first.

    torch.load never looks at the CRC-32 that torch.save wrote: of 400 flipped bits 398 loaded as wrong numbers
    without a word, so every record is checked before anything is used. Only plain values and tensors are unpickled.
    ValueError says what is wrong with the file.
    """
    if torch.__version__ < (2, 10):  # what weights_only=True lets through there runs code
        raise ValueError(f'torch {torch.__version__} loads no file safely (CVE-2026-24747): pip install "torch>=2.11"')
    try:
        with zipfile.ZipFile(path) as z:
            damaged = z.testzip()
    except FileNotFoundError:
        raise ValueError(f'{path} does not exist') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error) as e:
        raise ValueError(f'{path} is not a whole checkpoint: {first_line(e)}') from None
    if damaged:
        raise ValueError(f'{path} is damaged: the checksum of its record {damaged} does not match')
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except UnpicklingError:  # torch's own text for this advises the unsafe way
        raise ValueError(f'{path} holds more than tensors and plain values; loading it could run code, so it is '
                         'refused') from None
    except (OSError, EOFError, RuntimeError, KeyError, ValueError, struct.error) as e:
        raise ValueError(f'{path} is not a whole checkpoint: {first_line(e)}') from None
    if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get('model'), dict)
            and isinstance(checkpoint.get('model_args'), dict)):
        raise ValueError(f"{path} is no checkpoint of ours or nanoGPT's: 'model' and 'model_args' are missing")
    checkpoint['model'] = {plain_name(k): v for k, v in checkpoint['model'].items()}
    return checkpoint


def save_checkpoint(path, checkpoint, keep_old=None):
    """
    Writes aside, flushes to the disk, renames. A kill at any moment leaves the old file or the new one: of 100 kills
    during plain torch.save onto one file 43 left it unreadable, of 100 during this none. keep_old: a second name
    that the old file keeps. ValueError, with free and needed space, where it cannot be written.
    """
    partial = f'{path}.{os.getpid()}.tmp'
    try:
        with open(partial, 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if keep_old and os.path.exists(path):
            with contextlib.suppress(FileExistsError):
                link(path, keep_old)
        os.replace(partial, path)
        sync_folder(os.path.dirname(path) or '.')
    except (OSError, RuntimeError) as e:  # torch turns a full disk into a RuntimeError that hides the cause
        with contextlib.suppress(OSError):
            os.remove(partial)
        free = shutil.disk_usage(os.path.dirname(path) or '.').free
        need = sum(t.numel() * t.element_size() for t in tensors_in(checkpoint))
        raise ValueError(f'{path} could not be written: {str(e).splitlines()[0]}; {free / 1e6:,.0f} MB are free, '
                         f'{need / 1e6:,.0f} MB are needed') from e


def link(path, name):
    """A second name for a file; a copy where the file system knows no links."""
    try:
        os.link(path, name)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(path, name)


def sync_folder(folder):
    """Makes a rename durable. Windows cannot open folders, and does it on its own."""
    if os.name == 'posix':
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for v in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(v)


def first_line(error):
    return str(error).strip().split('\n')[0]


def plain_name(name):
    """Parameter names without what torch.compile and DDP put before them, in any nesting."""
    while name.startswith(('_orig_mod.', 'module.')):
        name = name.removeprefix('_orig_mod.').removeprefix('module.')
    return name


def config_from(args):
    """The GPTConfig that a checkpoint's model_args describe."""
    if odd := set(args) - {f.name for f in dataclasses.fields(GPTConfig)}:
        raise ValueError(f'model_args has {", ".join(sorted(map(str, odd)))}, which this version does not know')
    config = GPTConfig(**args)
    try:
        wrong = config.problems()
    except (TypeError, KeyError) as e:
        wrong = [repr(e)]
    if config.vocab_size is None:
        wrong.append('vocab_size is missing')
    if wrong:
        raise ValueError(f'model_args cannot be used: {"; ".join(wrong)}')
    return config


def model_from(args, state_dict, **override):
    """Builds a GPT from a checkpoint's model_args and weights. ValueError where they do not belong together."""
    config = dataclasses.replace(config_from(args), **override)
    largest = max((v.numel() for v in state_dict.values()), default=0)
    if config.vocab_size * config.n_embd > largest or config.n_layer > len(state_dict):
        raise ValueError('model_args claims a larger model than the weights beside it')
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
                    if not all(type(n) is int for n in (a, b, *e['shape'])):
                        raise ValueError(f'{name} has a shape or place that is not whole numbers')
                    entries.append((name, SAFETENSORS_DTYPES[e['dtype']], e['shape'], a, b))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f'{path} has a header that cannot be read: {e!r}') from None
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors, end = {}, 0
    for name, dtype, shape, a, b in sorted(entries, key=lambda entry: entry[3]):
        count = math.prod(shape)
        fits = min(shape, default=0) >= 0 and a == end and b - a == count * dtype.itemsize
        if not fits or 8 + length + b > size:
            raise ValueError(f'{path}: {name} of shape {shape} does not fit its place {a}..{b} in {size} bytes')
        whole = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + length + a) if count else torch.empty(0)
        tensors[name], end = whole.to(dtype).view(shape), b
    return tensors


def load_gpt2(folder, **override):
    """
    A GPT from a Hugging Face folder of the GPT-2 family: config.json beside model.safetensors, in one file or in the
    shards that model.safetensors.index.json lists. ValueError where it is another family or does not fit.
    """
    path = os.path.join(folder, 'config.json')
    try:
        with open(path, encoding='utf-8') as f:
            hf = json.load(f)
    except (OSError, ValueError) as e:
        raise ValueError(f'{path} cannot be read: {e}') from None
    activation = {'gelu_new': 'gelu_tanh', 'gelu': 'gelu', 'gelu_pytorch_tanh': 'gelu_tanh'}
    if hf.get('model_type') != 'gpt2' or hf.get('activation_function', 'gelu_new') not in activation:
        raise ValueError(f'{path}: model_type={hf.get("model_type")!r} with activation_function='
                         f'{hf.get("activation_function", "gelu_new")!r} is not a GPT-2 that this version reads')
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
        with open(index, encoding='utf-8') as f:
            files = sorted({os.path.basename(name) for name in json.load(f)['weight_map'].values()})
    state_dict = {}
    for name in files:
        if not os.path.exists(os.path.join(folder, name)):
            raise ValueError(f'{os.path.join(folder, name)} does not exist; weights must be in safetensors files')
        for key, tensor in read_safetensors(os.path.join(folder, name)).items():
            key = key if key.startswith(('transformer.', 'lm_head.')) else f'transformer.{key}'
            # OpenAI's "Conv1D" stores (in, out)
            conv = key.endswith(('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight'))
            state_dict[key] = (tensor.t() if conv else tensor).float()
    if args['tie']:
        state_dict['lm_head.weight'] = state_dict.get('transformer.wte.weight', torch.empty(0))
    return model_from(args, state_dict, **override)
