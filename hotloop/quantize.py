"""Weights for inference: in 8 bits, or packed as oneDNN reads them."""

import torch
from torch import nn
from torch.nn import functional as F

PACK_FROM = 2**18  # numbers in a matrix; a smaller one stays in the CPU's cache, and the call costs more than it gains


class PackedLinear(nn.Module):
    """
    A Linear whose weights lie as oneDNN wants them. On 2 cores of an EPYC with AVX512 a float32 matrix of 50304 x 768
    takes 8.4 ms for one row and 9.7 for eight, where F.linear takes 11.6 and 25; in bf16 3.2 and 4.9 for 7.8 and 9.9.
    """

    def __init__(self, linear):
        super().__init__()
        self.bias = None if linear.bias is None else linear.bias.detach().to(linear.weight.dtype)
        # the 8 is the number of rows that the layout is chosen for; for one row it is as good, for many no worse
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, 'none', [], '')


def can_pack(device, dtype):
    """Whether PackedLinear works here in this dtype, by trying it."""
    if device.type != 'cpu' or not torch.backends.mkldnn.is_available():
        return False
    linear, x = nn.utils.skip_init(nn.Linear, 64, 32, dtype=dtype), torch.ones(2, 64, dtype=dtype)
    for p in linear.parameters():
        p.data = torch.linspace(0, 1, p.numel(), dtype=dtype).view(p.shape)
    try:
        y = PackedLinear(linear)(x)
    except (RuntimeError, AttributeError, NotImplementedError):  # another CPU, or another build
        return False
    return torch.allclose(y.float(), linear(x).float(), rtol=0.05, atol=0.05)


class Int8Linear(nn.Module):
    """
    Weights in 8 bits, q s with one scale s a row: half a step, s / 2 = max|w| / 254, is the most that a weight moves
    (s is rounded up to bf16, so up to 1/128 more). Activations keep their dtype; on CPUs they and what comes out are
    rounded to bf16.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach().float()
        # rounded to what the kernel takes before anything is divided by it, so that it adds no error of its own
        scale = (weight.abs().amax(1) * (1 + 2**-8) / 127).clamp_min(1e-30).bfloat16()
        self.register_buffer('scale', scale)  # (out,)
        self.register_buffer('weight', (weight / scale.float()[:, None]).round().to(torch.int8))  # (out, in)
        self.bias = linear.bias
        self.on_cpu = weight.device.type == 'cpu' and hasattr(torch, '_weight_int8pack_mm')

    def forward(self, x):
        if self.on_cpu:
            rows = x.reshape(-1, x.size(-1)).bfloat16()
            # the kernel reads the weights anew for each row: from some tens on, one pass to unpack them is less;
            # rounded as it rounds, or a text would depend on what is computed beside it
            y = (torch._weight_int8pack_mm(rows, self.weight, self.scale) if len(rows) <= 32 else
                 (F.linear(rows.float(), self.weight.float()) * self.scale.float()).bfloat16())
            y = y.view(*x.shape[:-1], -1).to(x.dtype)
        elif x.dtype == torch.float16:  # its numbers end at 65504, and these weights are up to 127
            y = F.linear(x / 128, self.weight.to(x.dtype)) * (self.scale.float() * 128).to(x.dtype)
        else:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def for_inference(model, device, dtype, quantize='none', pack=True):
    """
    Moves the model to a device with its matrices in dtype: there is no optimizer that would need more. pack: on
    CPUs, as oneDNN reads them fastest. With quantize='int8' all but embeddings are rounded to 8 bits.
    """
    model.to(device)
    for p in model.parameters():
        if p.dim() > 1:
            p.data = p.data.to(dtype)
    model.compute_dtype = dtype
    packing = pack and can_pack(device, dtype)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and quantize == 'int8':
                setattr(module, name, Int8Linear(child))
            elif isinstance(child, nn.Linear) and packing and child.weight.numel() >= PACK_FROM:
                setattr(module, name, PackedLinear(child))
    return model.eval()
