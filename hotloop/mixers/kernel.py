"""
Kernelized orthogonal attention (OKADFA): softmax attention estimated by positive orthogonal random features
(FAVOR+, arXiv 2009.14794), in time that is linear in the context.
"""

import torch
from torch import nn
from torch.nn import functional as F

CHUNK = 128  # tokens whose mutual weights are computed at once


def orthogonal_features(D, M):
    """Draw M directions, (D, M): orthogonal in blocks of D, all of length sqrt(D), the mean of N(0, I)."""
    blocks = [torch.linalg.qr(torch.randn(D, D))[0] for _ in range(-(-M // D))]
    return torch.cat(blocks, dim=1)[:, :M] * D**0.5


def positive_features(x, directions):
    """
    Map x, (B, H, T, D), to features, (B, H, T, M), whose products estimate exp(q k / sqrt(D)), up to a
    factor. directions: (H, D, M). With QK-norm exponents stay below D^(3/4) + sqrt(D) / 2 = 44 at D = 128.
    """
    x = x * x.size(-1) ** -0.25
    return (x @ directions - x.square().sum(-1, keepdim=True) / 2).exp()


def linear_attention(q, k, v, place=None, state=None):
    """
    Compute the causal attention of features q and k, (B, H, T, M), with values v, (B, H, T, D), in chunks.

    place: (B, T), positions in documents, which do not see one another. state: (B, H, M, D + 1), the sums of
    k v^T and of k over the tokens before. Returns (output like v, the state after the last token).
    """
    B, H, T, M = q.shape
    v = F.pad(v, (0, 1), value=1.0)  # the last column sums the weights
    if state is None:
        state = v.new_zeros(B, H, M, v.size(-1))
    if place is not None:
        documents = (place == 0).cumsum(1)  # (B, T)
        before = documents[:, :1]  # the document at the end of the chunk before
    parts = []
    for start in range(0, T, CHUNK):
        q_part, k_part, v_part = (part[:, :, start:start + CHUNK] for part in (q, k, v))
        weights = (q_part @ k_part.mT).tril()
        if place is not None:
            here = documents[:, start:start + CHUNK]
            last = here[:, -1:]  # (B, 1)
            weights = weights * (here[:, None, :, None] == here[:, None, None, :])
            q_part = q_part * (here == before)[:, None, :, None]
            k_part = k_part * (here == last)[:, None, :, None]
        parts.append(weights @ v_part + q_part @ state)
        if place is not None:
            state = state * (last == before)[..., None, None]
            before = last
        state = state + k_part.mT @ v_part
    y = torch.cat(parts, dim=2)
    return y[..., :-1] / y[..., -1:].clamp_min(1e-30), state


class KernelAttention(nn.Module):
    """Attend by random features of queries and keys, drawn once for each head and saved with the weights."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        D = config.head_dim
        M = config.num_features or 2 * D
        self.state_shapes = {'sums': (config.n_head, M, D + 1)}
        directions = [orthogonal_features(D, M) for _ in range(config.n_head)]
        self.register_buffer('directions', torch.stack(directions))  # (H, D, M)

    def forward(self, q, k, v, place=None, cache=None):
        """Return the attention of q, (B, H, T, D), over k and v, (B, K, T, D)."""
        groups = q.size(1) // k.size(1)
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        q = positive_features(q.float(), self.directions)
        k = positive_features(k.float(), self.directions)
        if cache is None:
            return linear_attention(q, k, v.float(), place)[0]
        state = cache.state[self.layer, 'sums']
        if cache.prompt_lengths is not None:  # padding adds nothing to the sums
            is_token = torch.arange(k.size(2), device=k.device) < cache.prompt_lengths[:, None]  # (B, T)
            k = k * is_token[:, None, :, None]
        y, after = linear_attention(q, k, v.float(), state=state)
        state.copy_(after)
        return y


@torch.no_grad()
def add_orthogonal_gradient(model, weight):
    """
    Add the gradient of weight * the sum over heads of |W W^T - I|^2, W the (D, C) rows of a head's queries or
    keys, to the gradients of the layers with kernel attention.
    """
    for block in model.transformer.h:
        if getattr(block.attn, 'features', None) is not None:
            p = block.attn.c_attn.weight
            rows = sum(block.attn.part_sizes[:2])
            W = p[:rows].unflatten(0, (-1, block.attn.head_dim))  # (2 H, D, C)
            excess = W @ W.mT - torch.eye(W.size(1), device=W.device)
            p.grad[:rows] += 4 * weight * (excess @ W).flatten(0, 1)
