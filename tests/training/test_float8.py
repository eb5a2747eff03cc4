"""The head in float8: the products of rounded operands, exact evaluation, and where it cannot be had."""

import torch
from conftest import error_of

from hotloop.training.float8 import Float8Product, float8_head
from model import GPT, GPTConfig


def make():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=2, n_embd=32))


def rounded(x, dtype):
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


def test_the_products_are_those_of_rounded_operands():
    """16 rows: as many as the second product of backward needs."""
    x, w, grad = torch.randn(16, 32), torch.randn(64, 32), torch.randn(16, 64) * 1e-6
    x8, w8 = (rounded(t, torch.float8_e4m3fn) for t in (x, w))
    g8 = rounded(grad, torch.float8_e5m2)
    x.requires_grad_()
    w.requires_grad_()
    y = Float8Product.apply(x, w)
    y.backward(grad)
    for ours, exact in ((y, x8 @ w8.T), (x.grad, g8 @ w8), (w.grad, g8.T @ x8)):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-10)


def test_training_rounds_and_evaluation_does_not():
    exact, model = make(), make()
    float8_head(model)
    x = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(model(x, x), exact(x, x))
    difference = (model(x, x) - exact(x, x)).abs().max()
    assert 0 < difference < 0.01 * exact(x, x).max()


def test_where_it_cannot_be_had(train_tiny):
    assert '257' in error_of(train_tiny, fp8_head=True)
    assert 'loss_chunks=1, not 3' in error_of(train_tiny, fp8_head=True, vocab_size=320, loss_chunks=3)
