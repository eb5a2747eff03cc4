"""Weights prepared for inference: in 8 bits, or in the layout that oneDNN reads fastest."""

import time

import torch
from torch import nn
from torch.nn import functional as F

PACK_FROM = 2**18  # numbers in a matrix; a smaller one stays in the CPU's cache, where packing gains nothing


class PackedLinear(nn.Module):
    """
    A Linear whose weights are stored in oneDNN's own layout. With 2 threads of an EPYC with AVX512 a
    float32 matrix of 50304 x 768 takes 8.4 ms for 1 row and 9.7 for 8; F.linear takes 11.6 and 25.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach().to(weight.dtype)
        # 8 is the number of rows that the layout is chosen for; it is as good for 1, and no worse for many
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, 'none', [], '')


@torch.no_grad()
def can_pack(device, dtype):
    """Whether PackedLinear works here in this dtype, by trying it: it calls private functions of torch."""
    if device.type != 'cpu' or not torch.backends.mkldnn.is_available():
        return False
    linear, x = nn.Linear(64, 32, dtype=dtype), torch.ones(2, 64, dtype=dtype)
    try:
        return torch.allclose(PackedLinear(linear)(x), linear(x), rtol=0.05, atol=0.05)
    except (RuntimeError, AttributeError, NotImplementedError):  # this CPU or this build of torch cannot
        return False


@torch.no_grad()
def seconds(module, inputs):
    start = time.perf_counter()
    for x in inputs:
        module(x)
    return time.perf_counter() - start


def packing_pays(linear):
    """
    Tries it with 1 row and 8 rows, for some milliseconds, because it depends on CPU, dtype and shape. Of five
    rounds one that packing wins is enough, so that other load on the machine does not decide.
    """
    inputs = [linear.weight.new_ones(num_rows, linear.in_features) for num_rows in (1, 8)]
    packed = PackedLinear(linear)
    return any(seconds(packed, inputs) < seconds(linear, inputs) for _ in range(5))


class Int8Linear(nn.Module):
    """
    A Linear with weights in 8 bits, q * s, and one scale s for each row of the matrix. A weight moves by
    at most half a step, s / 2 = max|w| / 254 (s is rounded up to bf16, which adds up to 1/128 of it).
    Activations keep their dtype; on a CPU inputs and outputs are rounded to bf16.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach().float()
        # rounded to the kernel's dtype before weights are divided by it, so that rounding it adds no error
        scale = (weight.abs().amax(1) * (1 + 2**-8) / 127).clamp_min(1e-30).bfloat16()
        self.register_buffer('scale', scale)  # (out,)
        self.register_buffer('weight', (weight / scale.float()[:, None]).round().to(torch.int8))  # (out, in)
        self.bias = linear.bias
        self.on_cpu = weight.device.type == 'cpu' and hasattr(torch, '_weight_int8pack_mm')

    def forward(self, x):
        rows = x.reshape(-1, x.size(-1))
        if self.on_cpu and len(rows) <= 32:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale)
        elif self.on_cpu:  # faster for many rows; rounded as the kernel rounds, so the batch changes no text
            y = (F.linear(rows.bfloat16().float(), self.weight.float()) * self.scale.float()).bfloat16()
        elif x.dtype == torch.float16:  # float16 ends at 65504, and these weights are up to 127
            y = F.linear(rows / 128, self.weight.to(x.dtype)) * (self.scale.float() * 128).to(x.dtype)
        else:
            y = F.linear(rows, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        y = y.view(*x.shape[:-1], -1).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def prepare_for_inference(model, device, dtype, quantize='none', pack=True):
    """
    Moves a model to a device and returns it in eval mode, with its matrices in dtype. quantize='int8' stores
    every Linear in 8 bits; embeddings keep dtype. pack: on a CPU, pack large matrices where that is faster.
    """
    model.to(device)
    for p in model.parameters():
        if p.dim() > 1:
            p.data = p.data.to(dtype)
    model.compute_dtype = dtype
    pack = pack and quantize == 'none' and can_pack(device, dtype)
    pays = {}  # shape of a matrix -> whether packing it pays
    # names, not the Linears themselves, so that each is freed when it is replaced
    linears = [(module, name) for module in model.modules() for name, child in module.named_children()
               if isinstance(child, nn.Linear)]
    for module, name in linears:
        linear = getattr(module, name)
        shape = linear.weight.shape
        if quantize == 'int8':
            setattr(module, name, Int8Linear(linear))
        elif pack and shape.numel() >= PACK_FROM:
            if shape not in pays:
                pays[shape] = packing_pays(linear)
            if pays[shape]:
                setattr(module, name, PackedLinear(linear))
    return model.eval()
