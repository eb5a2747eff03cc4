"""Floating-point operations of a model."""

import math

from torch import nn

from hotloop.weights.nf4 import NF4Linear


def flops_per_token(config, T):
    """
    FLOPs per token, forward and backward, in sequences of T: 6 for each weight that multiplies (not
    embeddings), plus causal attention over (T + 1) / 2 positions on average, or fewer where a window ends
    before that. config: a resolved GPTConfig.
    """
    c = config
    projections = 2 * (c.n_head + c.n_kv_head) * c.head_dim
    weights = c.n_embd * (c.n_layer * (projections + c.n_ff * (2 + c.is_gated)) + c.vocab_size)
    reach = [min(window or T, T) for window in c.windows()]
    keys = sum(W - W * (W - 1) / (2 * T) for W in reach)  # on average over the positions, in all layers
    attention = 2 * c.n_head * c.head_dim * keys  # multiply-adds: q k^T, weights v
    return 6 * (weights + attention)


def flops_of(model, T):
    """
    FLOPs per token in sequences of T: (of the forward pass, forward and backward). Frozen weights have no
    gradients, and those of adapters cost as much as any others.
    """
    total = flops_per_token(model.config, T)
    adapters = sum(p.numel() for name, p in model.named_parameters() if '.lora_' in name)
    if not adapters:
        return total / 3, total
    frozen = sum(math.prod(m.shape) if isinstance(m, NF4Linear) else m.weight.numel()
                 for m in model.modules() if isinstance(m, nn.Linear | NF4Linear))
    return total / 3 + 2 * adapters, total - 2 * frozen + 6 * adapters
