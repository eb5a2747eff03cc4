"""The head in float8, whose products a Hopper or Ada GPU computes twice as fast as those of bfloat16."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # precision, for inputs and weights; range, for gradients


def float8_head(model):
    """
    Let the head of a GPT multiply in float8 in training (nanochat, modded-nanogpt); evaluation stays exact.
    No GPU has run it yet; torch refuses those with a compute capability below 8.9.
    """
    V, C = model.lm_head.weight.shape
    if V % 16 or C % 16 or model.loss_chunks > 1:
        raise ValueError(f'fp8_head=True needs a vocabulary and n_embd divisible by 16, not {V} and {C}, and '
                         f'loss_chunks=1, not {model.loss_chunks}')
    head, exact = model.lm_head, model.lm_head.forward

    def forward(x):
        if not torch.is_grad_enabled():
            return exact(x)
        return Float8Product.apply(x.flatten(0, -2), head.weight).view(*x.shape[:-1], V)
    head.forward = forward


def to_float8(x, dtype):
    """Return x in float8, divided by a scale that uses the whole range, and the scale."""
    scale = x.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


class Float8Product(torch.autograd.Function):
    """Compute x w^T, (N, V), of x, (N, C), and w, (V, C), and its gradients, from operands in float8."""

    @staticmethod
    def forward(ctx, x, w):
        x8, x_scale = to_float8(x, E4M3)
        w8, w_scale = to_float8(w, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        return torch._scaled_mm(x8, w8.T, x_scale, w_scale, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = to_float8(grad, E5M2)
        w8 = w8.T.contiguous().T  # by columns, as the second factor must be
        dx = torch._scaled_mm(g8, w8, g_scale, w_scale, out_dtype=grad.dtype)
        dw = None
        if ctx.needs_input_grad[1]:
            x8 = x8.T.contiguous().T
            dw = torch._scaled_mm(g8.T.contiguous(), x8, g_scale, x_scale, out_dtype=torch.float32)
        return dx, dw
