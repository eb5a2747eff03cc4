"""Weights for inference: in 8 bits, or in the layout that oneDNN reads fastest."""

import functools
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

PACK_FROM = 2**18  # numbers in a matrix; a smaller one stays in the CPU's cache, where packing gains nothing
TRIAL_SIZE = 2**21  # numbers in a matrix of a trial, at most, to keep it short; all shapes exceed an L2 cache
GAIN = 1.1  # how many times as fast packed weights must be; a smaller gain could be noise on a busy machine


class PackedLinear(nn.Module):
    """
    A Linear whose weights are in oneDNN's own layout: on 2 threads of an EPYC a float32 matrix of 50304 x 768
    takes 8.4 ms for 1 row and 9.7 for 8; F.linear takes 11.6 and 25.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach().to(weight.dtype)
        self.packed = packed(weight)

    def forward(self, x):
        return packed_product(x, self.packed, self.bias)


def packed(weight):
    # 8 is the number of rows that the layout is chosen for; it is as fast for 1 and no slower for many
    return torch.ops.mkldnn._reorder_linear_weight(weight, 8)


def packed_product(x, weight, bias=None):
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, 'none', [], '')


@functools.cache
def can_pack(device, dtype):
    """Whether PackedLinear works here, by trying it: it calls private functions of torch."""
    if device.type != 'cpu' or not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.randn(64, 64).to(dtype), torch.ones(8, 64, dtype=dtype)
    try:
        return torch.allclose(packed_product(x, packed(weight)), F.linear(x, weight), rtol=0.05, atol=0.5)
    except (RuntimeError, AttributeError):  # this CPU or this build of torch cannot
        return False


@torch.no_grad()
def shapes_to_pack(linears, rows):
    """
    The shapes of weights that multiply inputs of this many rows faster if they are packed, by a trial of one
    matrix of each shape. On a Xeon, float32 was 1.2 times slower packed for 1 row and 1.6 times faster for 8.
    The choice changes only the rounding of logits. Where both ways take about as long, two loads may choose
    differently, and then draw different tokens at a near tie.
    """
    trials = {}
    for linear in linears:
        if linear.weight.numel() < PACK_FROM:
            continue
        weight = linear.weight[:TRIAL_SIZE // linear.in_features]
        x = torch.ones(rows, linear.in_features, dtype=weight.dtype)
        trials[linear.weight.shape] = (functools.partial(F.linear, x, weight),
                                       functools.partial(packed_product, x, packed(weight)))
    best = {shape: [math.inf, math.inf] for shape in trials}  # seconds of F.linear, and of packed weights
    for _ in range(4):  # the first also builds the kernels
        for way in (0, 1):  # all matrices one way, then the other: none is in a small cache already
            for shape, products in trials.items():
                best[shape][way] = min(best[shape][way], seconds(products[way]))
    return {shape for shape, (plain, fast) in best.items() if fast * GAIN < plain}


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Int8Linear(nn.Module):
    """
    A Linear with weights in 8 bits, q * s, and one scale s for each row of the matrix. A weight changes by at
    most half a step, s / 2 = max|w| / 254 (s is rounded up to bf16). On a CPU inputs and outputs are bf16.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach().float()
        # rounded to the kernel's dtype before weights are divided by it
        scale = (weight.abs().amax(1) * (1 + 2**-8) / 127).clamp_min(1e-30).bfloat16()
        self.register_buffer('scale', scale)  # (out,)
        self.register_buffer('weight', (weight / scale.float()[:, None]).round().to(torch.int8))  # (out, in)
        self.bias = linear.bias
        # torch's kernel reads 16 inputs at a time, the last time beyond the end of a row of another width
        self.on_cpu = (weight.device.type == 'cpu' and linear.in_features % 16 == 0
                       and hasattr(torch, '_weight_int8pack_mm'))

    def forward(self, x):
        rows = x.reshape(-1, x.size(-1))
        if self.on_cpu and len(rows) <= 32:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale)
        elif self.on_cpu:  # faster for many rows; rounds like the kernel, so texts do not depend on the batch
            y = (F.linear(rows.bfloat16().float(), self.weight.float()) * self.scale.float()).bfloat16()
        else:  # divided by 128, because the maximum of float16 is 65504 and these weights are up to 127
            y = F.linear(rows / 128, self.weight.to(x.dtype)) * (self.scale.float() * 128).to(x.dtype)
        y = y.view(*x.shape[:-1], -1).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def prepare_for_inference(model, device, dtype, quantize='none', pack=True, rows=1):
    """
    Moves a model to a device and returns it in eval mode, with its matrices in dtype. quantize='int8' stores
    every Linear in 8 bits; embeddings keep dtype. pack: on a CPU, pack large matrices if that is faster for
    steps of so many rows.
    """
    for p in model.parameters():
        if p.dim() > 1:  # one by one: in float32 the model may not fit on the device
            p.data = p.data.to(device, dtype)
    model.to(device).compute_dtype = dtype
    # names, not the Linears themselves, so that each is freed when it is replaced
    linears = [(module, name) for module in model.modules() for name, child in module.named_children()
               if isinstance(child, nn.Linear)]
    shapes = set()
    if pack and quantize == 'none' and can_pack(device, dtype):
        shapes = shapes_to_pack((getattr(module, name) for module, name in linears), rows)
    for module, name in linears:
        linear = getattr(module, name)
        if quantize == 'int8':
            setattr(module, name, Int8Linear(linear))
        elif linear.weight.shape in shapes:
            setattr(module, name, PackedLinear(linear))
    return model.eval()
