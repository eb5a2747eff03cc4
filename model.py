"""
The transformer: config, attention, MLP, block, loss, initial weights, counts. It imports torch only.

Letters: B batch, T time, C channels (n_embd), H heads, K key/value heads, D channels of a head,
V vocabulary, L layers.

Two presets (PRESETS) set a few independent settings. 'gpt2' is OpenAI's GPT-2 as in nanoGPT, weight for
weight; 'modern' collects later changes that learn faster, from modded-nanogpt and nanochat.
__init__ resolves each setting to a module or a function, so forward branches only on cache and loss.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

# a setting of GPTConfig that is None takes its value from here
PRESETS = {
    'gpt2': dict(position='learned', norm='layernorm', mlp='gelu', qk_norm=False, tie=True, zero_init=False,
                 softcap=0.0, x0_mix=False),
    'modern': dict(position='rope', norm='rmsnorm', mlp='relu2', qk_norm=True, tie=False, zero_init=True,
                   softcap=15.0, x0_mix=True),
}


@dataclass
class GPTConfig:
    # --- model
    preset: Literal['gpt2', 'modern'] = 'gpt2'  # fills in every setting below that is None
    block_size: int = 1024  # context length in tokens
    vocab_size: int | None = None  # None: the tokenizer's, rounded up to a multiple of 64 if it is large
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: int = 768  # embedding channels
    n_ff: int | None = None  # hidden channels of the MLP; None: 4 * n_embd (swiglu: 8/3, rounded up to 64)
    dropout: float = 0.0  # 0 for pretraining, 0.1 or more if the data is seen many times
    bias: bool = False  # in Linears and LayerNorms, as in OpenAI's GPT-2; False is a bit better and faster
    position: Literal['learned', 'rope'] | None = None  # learned embeddings, or rotary (arXiv 2104.09864)
    rope_base: float = 10000.0  # of rotary positions; contexts beyond 8K use 500000 (Llama 3) or more
    norm: Literal['layernorm', 'rmsnorm'] | None = None  # rmsnorm has no weights here
    mlp: Literal['gelu', 'gelu_tanh', 'relu2', 'swiglu'] | None = None  # OpenAI's weights need gelu_tanh
    qk_norm: bool | None = None  # RMSNorm on queries and keys, which bounds attention logits
    tie: bool | None = None  # token embedding and head share one matrix
    zero_init: bool | None = None  # blocks start as the identity; the head starts uniform
    softcap: float | None = None  # logits -> c * tanh(logits / c); 0: off
    x0_mix: bool | None = None  # each block sees a learned mix of the residual stream and the embedding
    label_smoothing: float = 0.0  # over all vocab_size ids; used in training only

    def problems(self):
        """The problems with the settings, one sentence each."""
        c = self.resolved()
        wrong = []
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_kv_head', 'n_ff'):
            value = getattr(c, name)
            if value is not None and value < 1:
                wrong.append(f'{name}={value} must be at least 1')
        if wrong:
            return wrong
        D = c.n_embd // c.n_head
        if c.n_embd % c.n_head:
            nearest = max(1, round(c.n_embd / c.n_head)) * c.n_head
            wrong.append(f'n_embd={c.n_embd} is not divisible by n_head={c.n_head}; try n_embd={nearest}')
        elif c.position == 'rope' and D % 2:
            wrong.append(f'n_embd / n_head = {D} is odd; rotary positions rotate pairs of channels')
        if not 1 < c.rope_base < math.inf:
            wrong.append(f'rope_base={c.rope_base} must be above 1 and finite')
        elif c.rope_base != 10000 and c.position != 'rope':
            wrong.append(f"rope_base={c.rope_base} applies only with position='rope'")
        if c.n_head % c.n_kv_head:
            wrong.append(f'n_head={c.n_head} is not divisible by n_kv_head={c.n_kv_head}')
        for name in ('dropout', 'label_smoothing'):
            if not 0 <= getattr(c, name) < 1:
                wrong.append(f'{name}={getattr(c, name)} must be at least 0 and below 1')
        if not 0 <= c.softcap < math.inf:
            wrong.append(f'softcap={c.softcap} must be at least 0 and finite; 0 turns it off')
        return wrong

    def resolved(self):
        """A copy with the preset's values in place of None. vocab_size stays None if it is None."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        c = GPTConfig(**{'n_kv_head': self.n_head, **PRESETS[self.preset], **given})
        if c.n_ff is None:
            c.n_ff = math.ceil(8 * c.n_embd / 3 / 64) * 64 if c.mlp == 'swiglu' else 4 * c.n_embd
        return c

    def model_args(self):
        """
        The settings that rebuild the model from a checkpoint: nanoGPT's seven names for a shape it supports,
        all of ours for any other, so that nanoGPT rejects them instead of computing something else.
        """
        names = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
        nanogpt = {name: getattr(self, name) for name in names}
        complete = dataclasses.replace(self.resolved(), label_smoothing=0.0)  # for training only
        if complete == GPTConfig(**nanogpt).resolved():
            return nanogpt
        return dataclasses.asdict(complete)


class Linear(nn.Linear):
    """Computes in the dtype of its input. The weights stay in float32 for the optimizer and are cast here."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """Computes in float32 and returns the dtype of its input."""

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


def rms_norm(size):
    """x / sqrt(mean(x^2)) over the last dimension, of this size, without weights (arXiv 1910.07467)."""
    return nn.RMSNorm(size, eps=1e-6, elementwise_affine=False)


def norm_of(config):
    if config.norm == 'layernorm':
        return LayerNorm(config.n_embd, bias=config.bias)
    return rms_norm(config.n_embd)


class Identity(nn.Module):
    """Returns its first argument. It takes the place of a part that the config turns off."""

    def forward(self, x, *_):
        return x


class PositionEmbedding(nn.Embedding):
    """Adds a learned vector for each position (GPT-2)."""

    def forward(self, x, position):
        return x + super().forward(position)


class X0Mix(nn.Module):
    """x <- a x + b x0 with two learned numbers per block (modded-nanogpt, record 9)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0):
        a, b = self.scale.to(x.dtype)
        return a * x + b * x0


def softcap(logits, cap):
    """Bounds logits to (-cap, cap), smoothly (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(logits / cap)


def rotation_angles(num_positions, D, base):
    """cos and sin of position * base^(-2i/D): two tensors of (T, D/2), always float32."""
    # in float32 an angle at position 32,000 would be wrong by 2e-3
    frequency = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)  # (D/2)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency  # (T, D/2)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """Rotates channels i and i + D/2 together, Hugging Face's half-split form. x: (B, H, T, D)."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with optional rotary positions, QK-norm and grouped queries."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        D = config.n_embd // config.n_head
        # queries, keys and values of all heads in one matrix, in that order
        self.c_attn = Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * D, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = rms_norm(D) if config.qk_norm else Identity()
        self.rotate = rotate if config.position == 'rope' else Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin, cache=None):
        B, T, C = x.shape
        H, K = self.n_head, self.n_kv_head
        qkv = self.c_attn(x).view(B, T, H + 2 * K, C // H).transpose(1, 2)  # (B, H + 2K, T, D)
        q, k, v = qkv.split((H, K, K), dim=1)
        q = self.rotate(self.qk_norm(q), cos, sin)
        k = self.rotate(self.qk_norm(k), cos, sin)
        if x.device.type == 'cpu':
            # bf16 attention is slow here: backward takes 3.6 times as long, a single query 7 times (EPYC)
            q, k, v = q.float(), k.float(), v.float()
        if cache is not None:
            y = cache.attend(self.layer, q, k, v)
        else:
            # no mask: it disables the fast kernels, and gave NaN gradients on Hopper (pytorch#196678)
            dropout = self.dropout.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=K < H)
        y = y.to(x.dtype).transpose(1, 2).reshape(B, T, C)  # of (B, H, T, D)
        return self.dropout(self.c_proj(y))


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
        matrices = 2 if config.mlp == 'swiglu' else 1  # swiglu: up and gate in one (arXiv 2002.05202)
        self.c_fc = Linear(config.n_embd, matrices * config.n_ff, bias=config.bias)
        self.act = ACTIVATIONS[config.mlp]
        self.c_proj = Linear(config.n_ff, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.mix = X0Mix() if config.x0_mix else Identity()
        self.ln_1 = norm_of(config)
        self.attn = Attention(config, layer)
        self.ln_2 = norm_of(config)
        self.mlp = MLP(config)

    def forward(self, x, x0, cos, sin, cache=None):
        x = self.mix(x, x0)
        x = x + self.attn(self.ln_1(x), cos, sin, cache)
        return x + self.mlp(self.ln_2(x))


def head_gradients(x, w, targets, cap, smoothing, frozen):
    """
    The summed cross-entropy of a head, (1,), and its gradients, (N, C) and (V, C), with respect to its inputs
    x, (N, C), and weights w, (V, C). targets: (N). frozen: the weights need none; it is None.
    """
    logits = (x @ w.T).float()  # (N, V)
    if cap:
        logits = softcap(logits, cap)
    loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum', label_smoothing=smoothing)
    V = w.size(0)
    d = logits.softmax(1) - smoothing / V
    d = d - (torch.arange(V, device=x.device) == targets[:, None]) * (1 - smoothing)
    if cap:
        d = d * (1 - (logits / cap).square())
    d = (d * (targets >= 0)[:, None]).to(x.dtype)
    return loss.view(1), d @ w, None if frozen else d.T @ x


@cache
def compiled_head_gradients():
    """head_gradients, compiled at its first call."""
    return torch.compile(head_gradients, dynamic=False)


def head_gradients_by_autograd(x, w, targets, cap, smoothing, frozen):
    """head_gradients() of a frozen head: uncompiled, on a Xeon, in half the time."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = F.linear(x, w).float()
        if cap:
            logits = softcap(logits, cap)
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum', label_smoothing=smoothing)
        return loss.detach().view(1), torch.autograd.grad(loss, x)[0], None


class ChunkedLoss(torch.autograd.Function):
    """
    The summed cross-entropy of a head, (1,), without all logits in memory at once. forward computes the
    gradients of each chunk while its logits exist; backward scales them all by the same factor.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, cap, smoothing, chunks, compiled):
        frozen = not ctx.needs_input_grad[1]
        gradients = head_gradients_by_autograd if frozen else head_gradients
        if compiled:  # fused, the formulas are faster
            gradients = compiled_head_gradients()
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
        dx = (dx.float() * grad).to(dx.dtype)
        return dx, None if dw is None else dw * grad, None, None, None, None, None


# compiled together with the model, the chunks would be fused again, so each chunk is compiled alone
chunked_loss = torch.compiler.disable(ChunkedLoss.apply)


class GPT(nn.Module):

    def __init__(self, config):
        """config: a GPTConfig with vocab_size set. ValueError if its settings do not fit together."""
        super().__init__()
        if wrong := config.problems():
            raise ValueError('; '.join(wrong))
        assert config.vocab_size is not None, 'vocab_size comes from the data; see train.py'
        self.config = c = config.resolved()
        self.compute_dtype = torch.float32  # train.py and sample.py set the machine's fastest dtype
        self.loss_chunks = 1  # for head and loss; train.py uses more if memory is short
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd),
            wpe=PositionEmbedding(c.block_size, c.n_embd) if c.position == 'learned' else Identity(),
            # without learned positions nothing else sets the scale at which the residual stream starts
            ln_e=rms_norm(c.n_embd) if c.position == 'rope' else Identity(),
            drop=nn.Dropout(c.dropout),
            h=nn.ModuleList([Block(c, layer) for layer in range(c.n_layer)]),
            ln_f=norm_of(c),
        ))
        self.lm_head = Linear(c.n_embd, c.vocab_size, bias=False)
        self.softcap = partial(softcap, cap=c.softcap) if c.softcap else Identity()
        if c.tie:
            self.transformer.wte.weight = self.lm_head.weight
        cos, sin = rotation_angles(c.block_size, c.n_embd // c.n_head, c.rope_base)
        self.register_buffer('cos', cos, persistent=False)  # (T, D/2)
        self.register_buffer('sin', sin, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        GPT-2: N(0, 0.02), and the projections onto the residual stream divided by sqrt(2 L). zero_init: those
        and the head start at zero, the embedding at N(0, 1), and other matrices keep their input's scale.
        """
        c = self.config
        for name, p in self.named_parameters():
            std = 0.02
            if name.endswith('c_proj.weight'):
                std = 0.0 if c.zero_init else 0.02 / math.sqrt(2 * c.n_layer)
            elif c.zero_init and name == 'lm_head.weight':
                std = 0.0
            elif c.zero_init and name == 'transformer.wte.weight':
                std = 0.02 if c.tie else 1.0
            elif c.zero_init:
                std = 0.5 / math.sqrt(p.size(-1))
            if p.dim() > 1:
                nn.init.normal_(p, std=std)
            elif name.endswith('bias'):  # other vectors start as their modules made them
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, cache=None):
        """
        idx: (B, T) token ids, which continue the sequences in the cache if there is one.
        Without targets, returns the logits of the last position, (B, V), float32. With targets, (B, T) ids
        or -1 for a masked token, returns the summed cross-entropy of each sequence, (B,),
        float32, in nats; with gradients and loss_chunks above 1, that of all sequences, (1,).
        """
        T = idx.size(1)
        assert 0 < T <= self.config.block_size, f'{T} tokens exceed block_size={self.config.block_size}'
        if cache is None:
            position = torch.arange(T, device=idx.device)
            cos, sin = self.cos[:T], self.sin[:T]  # (T, D/2)
        else:
            position = cache.begin(T)
            cos = self.cos[position].unsqueeze(-3)  # (B or 1, 1, T, D/2)
            sin = self.sin[position].unsqueeze(-3)
        x = self.transformer.wpe(self.transformer.wte(idx), position)  # (B, T, C)
        x = x0 = self.transformer.drop(self.transformer.ln_e(x.to(self.compute_dtype)))
        for block in self.transformer.h:
            x = block(x, x0, cos, sin, cache)
        if targets is not None:
            return self.loss(x, targets)
        x = x[:, -1] if cache is None else cache.finish(x)  # (B, C)
        return self.softcap(self.lm_head(self.transformer.ln_f(x)).float())

    def loss(self, x, targets):
        """The summed cross-entropy, as forward returns it, from the (B, T, C) output of the blocks."""
        c, chunks, x = self.config, self.loss_chunks, self.transformer.ln_f(x)
        smoothing = c.label_smoothing if self.training else 0.0
        if chunks > 1 and torch.is_grad_enabled():
            return chunked_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), c.softcap, smoothing,
                                chunks, torch.compiler.is_compiling())
        total = 0
        for part, target in zip(x.chunk(chunks, 1), targets.chunk(chunks, 1), strict=True):
            # compiled, the cast, the cap and the cross-entropy are one pass over the bf16 logits
            logits = self.softcap(self.lm_head(part).float())  # (B, T, V), or a part of T
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction='none',
                                   label_smoothing=smoothing)
            total = total + loss.view(target.shape).sum(1)
        return total

    def num_params(self):
        """All parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T):
        """
        Floating-point operations per token, forward and backward, in sequences of T: 6 for each weight that
        multiplies (not embeddings), plus causal attention over (T + 1) / 2 positions on average.
        """
        c = self.config
        qkv = c.n_embd + 2 * c.n_kv_head * (c.n_embd // c.n_head)
        mlp = c.n_ff * (3 if c.mlp == 'swiglu' else 2)
        weights = c.n_embd * (c.n_layer * (qkv + c.n_embd + mlp) + c.vocab_size)
        attention = c.n_layer * 2 * c.n_embd * (T + 1) / 2  # multiply-adds: q k^T, weights v
        return 6 * (weights + attention)

    def crop_block_size(self, block_size):
        """Shortens the context, for example to fine-tune a GPT-2 of 1024 positions on shorter text."""
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        self.cos, self.sin = self.cos[:block_size], self.sin[:block_size]
        if self.config.position == 'learned':
            weight = self.transformer.wpe.weight[:block_size].clone()
            self.transformer.wpe = PositionEmbedding.from_pretrained(weight, freeze=False)

    @classmethod
    def from_checkpoint(cls, model_args, weights, **override):
        """A GPT of a checkpoint. override: settings to replace. ValueError if args and weights do not fit."""
        model = cls(dataclasses.replace(config_from(model_args), **override))
        model.load_weights(weights)
        return model

    def load_weights(self, weights):
        """Copies {name: tensor} into the model. ValueError lists the names or shapes that differ."""
        masks = ('.attn.bias', '.attn.masked_bias')  # buffers that nanoGPT saved under PyTorch 1.x
        weights = {name: w for name, w in weights.items() if not name.endswith(masks)}
        try:
            self.load_state_dict(weights)
        except RuntimeError as e:
            reason = ' '.join(str(e).split())[:500]
            raise ValueError(f'the weights do not fit the model: {reason}') from None
        if self.config.tie and not torch.equal(weights['transformer.wte.weight'], weights['lm_head.weight']):
            raise ValueError('the weights do not fit the model: tie=True, but embedding and head differ')


def config_from(model_args):
    """The GPTConfig of a checkpoint's model_args. ValueError names those that this version does not have."""
    unknown = sorted(model_args.keys() - {f.name for f in dataclasses.fields(GPTConfig)})
    if unknown:
        raise ValueError(f'the model has settings that this version does not have: {", ".join(unknown)}')
    return GPTConfig(**model_args)
