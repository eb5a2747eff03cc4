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

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
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

    def crop_block_size(self, block_size):
        """Shortens the context, as when a GPT-2 of 1024 positions is tuned on shorter text."""
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        self.cos, self.sin = self.cos[:block_size], self.sin[:block_size]
        if self.config.position == 'learned':
            self.transformer.wpe = nn.Embedding.from_pretrained(self.transformer.wpe.weight[:block_size].clone(),
                                                                freeze=False)

    # weights in

    @classmethod
    def from_checkpoint(cls, args, state_dict, **override):
        """Builds a GPT from a checkpoint's model_args and weights. ValueError where they do not belong together."""
        config = dataclasses.replace(config_from(args), **override)
        # before anything is allocated: the matrices that every shape has
        c, total = config.resolved(), sum(v.numel() for v in state_dict.values())
        rows = c.vocab_size + (c.block_size if c.position == 'learned' else 0) + c.n_layer * (c.n_embd + c.n_ff)
        if rows * c.n_embd > total or c.n_layer > len(state_dict):
            raise ValueError(f'model_args claims a larger model than the weights beside it: {rows * c.n_embd:,} numbers or '
                             f'more in {c.n_layer} layers, not {total:,} in {len(state_dict)} tensors')
        model = cls(config)
        model.load_weights(state_dict)
        return model

    def load_weights(self, state_dict):
        """Strict, whatever the order; ValueError lists what does not fit."""
        own = self.state_dict()
        # nanoGPT of PyTorch 1.x days kept the causal mask as a buffer
        given = {k: v for k, v in state_dict.items() if not k.endswith(('.attn.bias', '.attn.masked_bias'))}
        wrong = [f'{k} is missing' for k in own if k not in given]
        wrong += [f'{k} is unknown' for k in given if k not in own]
        wrong += [f'{k} is {tuple(given[k].shape)}, not {tuple(own[k].shape)}' for k in own
                  if k in given and given[k].shape != own[k].shape]
        if not wrong and self.config.tie:
            wte, head = given['transformer.wte.weight'], given['lm_head.weight']
            if wte.data_ptr() != head.data_ptr() and not torch.equal(wte, head):
                wrong.append('embedding and head differ, and this model has one matrix for both')
        if wrong:
            raise ValueError('weights do not fit the model: ' + '; '.join(wrong[:5]) + ('; ...' if wrong[5:] else ''))
        self.load_state_dict(given)


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
