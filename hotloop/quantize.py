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
    In bf16 it takes 3.2 and 4.9 ms; F.linear takes 7.8 and 9.9.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach().to(weight.dtype)
        # 8 is the number of rows that the layout is chosen for; it is as good for 1, and no worse for many
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, 'none', [], '')


def can_pack(device, dtype):
    """Whether PackedLinear works here in this dtype, by trying it: it calls private functions of torch."""
    if device.type != 'cpu' or not torch.backends.mkldnn.is_available():
        return False
    linear = nn.utils.skip_init(nn.Linear, 64, 32, dtype=dtype)
    for p in linear.parameters():
        p.data = torch.linspace(0, 1, p.numel(), dtype=dtype).view(p.shape)
    x = torch.ones(2, 64, dtype=dtype)
    try:
        y = PackedLinear(linear)(x)
    except (RuntimeError, AttributeError, NotImplementedError):  # this CPU or this build of torch cannot
        return False
    return torch.allclose(y.float(), linear(x).float(), rtol=0.05, atol=0.05)


@torch.no_grad()
def seconds(module, inputs):
    start = time.perf_counter()
    for x in inputs:
        module(x)
    return time.perf_counter() - start


def packing_pays(linear, rounds=5):
    """
    Tries it with 1 row and 8 rows, for some milliseconds, because it depends on CPU, dtype and shape: on a
    Sapphire Rapids Xeon packed float32 takes 10 to 30% longer than F.linear for 1 row, and half as long for
    8. One round that packing wins is enough, so that other load on the machine does not decide.
    """
    inputs = [linear.weight.new_ones(num_rows, linear.in_features) for num_rows in (1, 8)]
    packed = PackedLinear(linear)
    return any(seconds(packed, inputs) < seconds(linear, inputs) for _ in range(rounds))


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
        if self.on_cpu:
            y = self.multiply_on_cpu(x.reshape(-1, x.size(-1)).bfloat16())
            y = y.view(*x.shape[:-1], -1).to(x.dtype)
        elif x.dtype == torch.float16:  # float16 ends at 65504, and these weights are up to 127
            y = F.linear(x / 128, self.weight.to(x.dtype)) * (self.scale.float() * 128).to(x.dtype)
        else:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def multiply_on_cpu(self, rows):
        if len(rows) <= 32:
            return torch._weight_int8pack_mm(rows, self.weight, self.scale)
        # that kernel reads the weights again for each row, so from some tens of rows on unpacking them once
        # is faster; rounded as the kernel rounds, so that a text does not depend on the size of its batch
        return (F.linear(rows.float(), self.weight.float()) * self.scale.float()).bfloat16()


def prepare_for_inference(model, device, dtype, quantize='none', pack=True):
    """
    Moves a model to a device and returns it in eval mode, with its matrices in dtype: inference has no
    optimizer that would need more. quantize='int8' stores every Linear in 8 bits; embeddings keep dtype.
    pack: on a CPU, pack large matrices where that is faster.
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
        if quantize == 'int8':
            setattr(module, name, Int8Linear(linear))
        elif pack and linear.weight.numel() >= PACK_FROM:
            shape = linear.weight.shape
            if shape not in pays:
                pays[shape] = packing_pays(linear)
            if pays[shape]:
                setattr(module, name, PackedLinear(linear))
    return model.eval()
