"""Weights for inference: in 8 bits, or in the layout that oneDNN reads fastest."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

PACK_FROM = 2**18  # numbers in a matrix; a smaller one stays in the CPU's cache and gains nothing


class PackedLinear(nn.Module):
    """A Linear in oneDNN's own layout. A token of GPT-2 124M takes 13 ms, not 26 (bf16: 7.9, not 11.3)."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach().to(weight.dtype)
        # The layout is chosen for 8 rows. It is as fast for 1 and no slower for many.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, 'none', [], '')


@functools.cache
def can_pack(device, dtype):
    """Test whether PackedLinear, which calls private functions of torch, works here."""
    if device.type != 'cpu' or not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(64, 64, dtype=dtype)
    x = torch.ones(8, 64, dtype=dtype)
    try:
        return torch.allclose(PackedLinear(linear)(x), linear(x), rtol=0.05, atol=0.1)
    except (RuntimeError, AttributeError):  # this CPU or this build of torch cannot
        return False


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
        self.on_cpu = weight.device.type == 'cpu' and linear.in_features % 16 == 0

    def forward(self, x):
        rows = x.reshape(-1, x.size(-1))
        if self.on_cpu and len(rows) <= 32:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale)
        elif self.on_cpu:  # faster for many rows; rounds nearly as the kernel does
            y = (F.linear(rows.bfloat16().float(), self.weight.float()) * self.scale.float()).bfloat16()
        else:  # divided by 128, because the maximum of float16 is 65504 and these weights are up to 127
            y = F.linear(rows / 128, self.weight.to(x.dtype)) * (self.scale.float() * 128).to(x.dtype)
        y = y.view(*x.shape[:-1], -1).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def prepare_for_inference(model, device, dtype, quantize='none', pack=True):
    """
    Move a model to a device and return it in eval mode, with its matrices in dtype, or every Linear
    in int8. pack: use PackedLinear where it works; a compiled step packs weights itself.
    """
    for p in model.parameters():
        if p.dim() > 1:  # One by one, because in float32 the model may not fit on the device.
            p.data = p.data.to(device, dtype)
    model.to(device).compute_dtype = dtype
    packs = pack and can_pack(device, dtype)
    for module in model.modules():
        for name, linear in list(module.named_children()):
            if not isinstance(linear, nn.Linear):
                continue
            if quantize == 'int8':
                setattr(module, name, Int8Linear(linear))
            elif packs and linear.weight.numel() >= PACK_FROM:
                setattr(module, name, PackedLinear(linear))
    return model.eval()
