"""NF4: frozen weights in 4 bits, 4.127 with their scales (QLoRA, arXiv 2305.14314)."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# QLoRA's appendix E: quantiles of N(0, 1), scaled to [-1, 1]
CODE = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0)
BLOCK = 64  # weights that share a scale
GROUP = 256  # scales that share a step


class NF4(NamedTuple):
    """
    A tensor in 4 bits. The largest absolute value of each block of 64 weights is mean + scales * step,
    with one step for 256 scales. Blocks run over the flattened tensor, padded with zeros.
    """
    codes: torch.Tensor  # uint8, two weights per byte, the first in the high bits
    scales: torch.Tensor  # int8, one per block
    steps: torch.Tensor  # float32, one per 256 blocks
    mean: torch.Tensor  # float32, (1,)


def quantize(weight):
    """Round a tensor to NF4. Quantizing the scales too is the paper's double quantization."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    code = torch.tensor(CODE, device=weight.device)
    middles = (code[1:] + code[:-1]) / 2
    nearest = torch.bucketize(blocks / largest.clamp_min(1e-30)[:, None], middles, out_int32=True)
    first, second = nearest.to(torch.uint8).view(-1, 2).unbind(1)
    mean = largest.mean(0, keepdim=True)
    groups = F.pad(largest - mean, (0, -len(largest) % GROUP)).view(-1, GROUP)
    steps = groups.abs().amax(1).clamp_min(1e-30) / 127
    scales = (groups / steps[:, None]).round().to(torch.int8).flatten()[:len(largest)]
    return NF4(first * 16 + second, scales.clone(), steps, mean)


def pairs_of(device):
    """Tabulate the two weights of each byte, (256, 2)."""
    code = torch.tensor(CODE, device=device)
    return torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1)


def look_up(codes, pairs, on_cpu):
    """Return the two weights of each byte, (len(codes), 2)."""
    if on_cpu:  # a pair at once, as an int64. 3072 x 768 on a Xeon: 3 ms, and 19 with one for each weight
        return pairs.view(torch.int64).flatten().index_select(0, codes.int()).view(torch.float32).view(-1, 2)
    return pairs[codes.int()]  # Inductor fuses it with all of dequantize(), but not a view of another dtype


def dequantize(nf4, pairs, shape, dtype):
    """Restore the tensor of this shape that quantize() took, within its rounding. nf4: has NF4's tensors."""
    largest = nf4.scales * nf4.steps.repeat_interleave(GROUP)[:len(nf4.scales)] + nf4.mean
    blocks = look_up(nf4.codes, pairs, nf4.codes.device.type == 'cpu').view(-1, BLOCK)
    return (blocks * largest[:, None]).to(dtype).flatten()[:shape.numel()].view(shape)


class NF4Linear(nn.Module):
    """Apply a frozen Linear whose weights are in NF4. The backward dequantizes them again."""

    def __init__(self, linear):
        super().__init__()
        self.shape = linear.weight.shape
        self.bias = linear.bias
        self.register_buffer('pairs', pairs_of(linear.weight.device))
        for name, tensor in quantize(linear.weight)._asdict().items():
            self.register_buffer(name, tensor)

    def product(self, x):
        weight = dequantize(self, self.pairs, self.shape, x.dtype)
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def forward(self, x):
        # This saves 4 bits and not 16 for backward, also compiled, where the two dequantizations of
        # an autograd.Function were merged into one. The product itself is not computed twice.
        return checkpoint(self.product, x, use_reentrant=False, preserve_rng_state=False)


def rounded(weight):
    """Round a float32 tensor as a run with quantize='nf4' does."""
    return dequantize(quantize(weight), pairs_of(weight.device), weight.shape, torch.float32)
