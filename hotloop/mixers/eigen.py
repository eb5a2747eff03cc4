"""Eigenstates (Temporal Eigenstate Networks): each layer carries K complex numbers that decay and turn."""

import math

import torch
from torch import nn
from torch.nn import functional as F

SHORT = 32  # steps of a recurrence that are computed one after the other
COUPLING = 0.01  # strength of the paper's coupling of states


@torch.no_grad()
def scan(a, b):
    """
    Compute c_t = a_t c_{t-1} + b_t along dimension 1, with c_{-1} = 0. a, b: (B, T, K), complex. All chunks
    of about sqrt(T) steps run side by side; then their last states are carried on by the same function.
    """
    B, T, K = b.shape
    if T <= SHORT:
        c = torch.empty_like(b)
        c[:, 0] = b[:, 0]
        for t in range(1, T):
            torch.addcmul(b[:, t], a[:, t], c[:, t - 1], out=c[:, t])
        return c
    L = 1 << (T.bit_length() // 2)
    a, b = (F.pad(part, (0, 0, 0, -T % L)).view(B, -1, L, K) for part in (a, b))
    c, product = torch.empty_like(b), torch.empty_like(a)  # product: of a since the start of the chunk
    c[:, :, 0] = b[:, :, 0]
    product[:, :, 0] = a[:, :, 0]
    for t in range(1, L):
        torch.mul(a[:, :, t], product[:, :, t - 1], out=product[:, :, t])
        torch.addcmul(b[:, :, t], a[:, :, t], c[:, :, t - 1], out=c[:, :, t])
    carry = scan(product[:, :, -1], c[:, :, -1])  # (B, chunks, K)
    c[:, 1:].addcmul_(product[:, 1:], carry[:, :-1, None])
    return c.view(B, -1, K)[:, :T]


@torch.library.custom_op('hotloop::scan', mutates_args=())  # Dynamo cannot trace the loops of scan()
def scan_op(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute scan() as one operator, which torch.compile keeps as it is, with a gradient."""
    return scan(a, b).contiguous()


@scan_op.register_fake
def scan_shape(a, b):
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def save_scan(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def scan_backward(ctx, grad):
    """Return the gradients of a and b. That of a linear recurrence is the same recurrence, from the end."""
    a, c = ctx.saved_tensors
    after = F.pad(a[:, 1:], (0, 0, 0, 1)).conj()
    d = scan_op(after.flip(1).resolve_conj(), grad.flip(1)).flip(1)
    return F.pad(d[:, 1:] * c[:, :-1].conj(), (0, 0, 1, 0)), d


scan_op.register_autograd(scan_backward, setup_context=save_scan)


class Eigen(nn.Module):
    """
    Mix tokens by K states, c_t = a_t c_{t-1} + b_t, whose decays depend on the input, and gate the result.

    eigen='long': memories from 1 token to the context, evenly over log time; inputs scaled so that states
    have their variance. eigen='paper': memories of at most 1.4 tokens at the start, turns that depend on the
    input too, bounded changes, coupled states (github.com/genovotechnologies/temporal-eigenstate-networks).
    """

    def __init__(self, config, layer, Linear):
        super().__init__()
        C, K = config.n_embd, config.num_eigenstates
        self.layer = layer
        self.num_states = K
        self.is_paper = config.eigen == 'paper'
        self.part_sizes = [2 * K, 2 * K if self.is_paper else K, C]  # inputs, changes of eigenvalues, gates
        self.state_shapes = {'eigen': (K, 2)}
        self.c_attn = Linear(C, sum(self.part_sizes), bias=False)
        self.c_proj = Linear(2 * K, C, bias=config.bias)
        self.gate_shift = nn.Parameter(torch.full((C,), -2.0))  # nearly closed at the start
        self.dropout = nn.Dropout(config.dropout)
        if self.is_paper:
            self.change = 0.1  # the most by which an input moves a logit of a decay, or a turn
            self.decay = nn.Parameter(torch.empty(K).uniform_(-3.0, -0.1))
            self.turn = nn.Parameter(torch.arange(K) * (2 * math.pi / K))
            heads = math.gcd(K, 4)
            self.coupling = nn.Parameter(torch.randn(heads, K // heads, K // heads) * (heads / K) ** 0.5)
        else:
            self.change = 4.0
            memory = torch.linspace(0, math.log(config.block_size), K).exp()  # in tokens
            self.decay = nn.Parameter(-torch.expm1(1 / memory).log())
            self.turn = nn.Parameter(torch.rand(K) * math.pi)

    def forward(self, x, context):
        K, cache, place = self.num_states, context.cache, context.place
        inputs, changes, gate = self.c_attn(x).split(self.part_sizes, dim=-1)
        b = torch.view_as_complex(inputs.float().unflatten(-1, (K, 2)).contiguous())  # (B, T, K)
        changes = self.change * changes.float().tanh()
        # float(): sharded, parameters come in the compute dtype
        size = torch.sigmoid(self.decay.float() + changes[..., :K])
        turn = self.turn.float().expand_as(size)
        if self.is_paper:
            turn = turn + changes[..., K:]
        else:
            b = b * (1 - size.square()).clamp_min(1e-12).sqrt()
        a = torch.polar(size, turn)
        if place is not None:
            a = a.masked_fill((place == 0)[..., None], 0)
        c = scan_op(a, b) if cache is None else self.carry_on(a, b, cache)
        c = torch.view_as_real(c)  # (B, T, K, 2)
        if self.is_paper:
            heads = len(self.coupling)
            mixed = c.unflatten(2, (heads, -1))
            coupled = torch.einsum('bthki,hjk->bthji', mixed, self.coupling.float())
            c = (mixed + COUPLING * coupled).flatten(2, 3)
        y = self.c_proj(c.flatten(2).to(x.dtype))
        return self.dropout(y * torch.sigmoid(gate + self.gate_shift.to(x.dtype)))

    def carry_on(self, a, b, cache):
        """Run the recurrence from the states of a cache, and store each row's state after its last token."""
        state = cache.state[self.layer, 'eigen']
        if cache.prompt_lengths is not None:  # padding keeps the state
            padding = (torch.arange(b.size(1), device=b.device) >= cache.prompt_lengths[:, None])[..., None]
            a = a.masked_fill(padding, 1)
            b = b.masked_fill(padding, 0)
        first = b[:, :1] + a[:, :1] * torch.view_as_complex(state)[:, None]
        c = scan(a, torch.cat((first, b[:, 1:]), dim=1))
        state.copy_(torch.view_as_real(c[:, -1]))
        return c
