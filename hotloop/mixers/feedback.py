"""Direct feedback alignment between blocks (arXiv 1609.01596): no block waits for the next one's gradient."""

import torch


class Feedback(torch.autograd.Function):
    """
    Return the last of the outputs of embedding and blocks, each (B, T, C). Its gradient reaches each output
    before it through that output's fixed matrix, (C, C).
    """

    @staticmethod
    def forward(ctx, matrices, *outputs):
        ctx.save_for_backward(matrices)
        return outputs[-1].view_as(outputs[-1])

    @staticmethod
    def backward(ctx, grad):
        matrices, = ctx.saved_tensors
        return None, *(grad @ matrix.to(grad.dtype) for matrix in matrices), grad


def feedback_matrices(config, seed):
    """Draw the matrices of the embedding and of all blocks but the last, (n_layer, C, C), N(0, 1 / C)."""
    C, generator = config.n_embd, torch.Generator().manual_seed(seed)
    return torch.randn(config.n_layer, C, C, generator=generator) * C**-0.5
