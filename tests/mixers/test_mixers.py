"""Mixers equal their definitions. test_model.py and test_generate.py hold what holds for attention, too."""

import pytest
import torch
from conftest import all_logits
from test_model import make

from hotloop.mixers.eigen import scan, scan_op
from hotloop.mixers.feedback import feedback_matrices
from hotloop.mixers.kernel import (
    add_orthogonal_gradient,
    linear_attention,
    orthogonal_features,
    positive_features,
)
from model import Context

LENGTHS = (1, 256, 300)


@pytest.mark.parametrize('shape', ['conv', 'eigen', 'paper', 'kernel'])
def test_the_parameters_of_blocks_may_come_in_the_compute_dtype(shape):
    """As sharding hands them to a block."""
    model = make(shape)
    for p in model.transformer.h.parameters():
        p.data = p.data.bfloat16()
    model.compute_dtype = torch.bfloat16
    ids = torch.randint(61, (2, 16))
    assert model(ids, ids).isfinite().all()


def recurrence(a, b):
    """The definition of scan()."""
    c = torch.zeros_like(b[:, 0])
    states = []
    for t in range(b.size(1)):
        c = a[:, t] * c + b[:, t]
        states.append(c)
    return torch.stack(states, 1)


def gradients_of(function, inputs, weights):
    y = function(*inputs)
    product = y * weights
    return torch.autograd.grad(product.real.sum() + product.imag.sum(), inputs)


@pytest.mark.parametrize('T', LENGTHS)
@pytest.mark.parametrize('dtype, tolerance', [(torch.complex128, 1e-9), (torch.complex64, 1e-4)])
def test_a_scan_equals_its_recurrence_with_gradients(T, dtype, tolerance):
    torch.manual_seed(T)
    a = torch.polar(torch.rand(2, T, 5, dtype=torch.float64), 6 * torch.rand(2, T, 5, dtype=torch.float64))
    a[:, T // 2] = 0  # a document begins
    b, weights = torch.randn(2, 2, T, 5, dtype=torch.complex128).unbind()
    expected = recurrence(a, b)
    assert (scan(a.to(dtype), b.to(dtype)) - expected).abs().max() < tolerance * expected.abs().max()
    truth = gradients_of(recurrence, (a.requires_grad_(), b.requires_grad_()), weights)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (a, b)]
    ours = gradients_of(scan_op, leaves, weights.to(dtype))
    for found, right in zip(ours, truth, strict=True):
        assert (found - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize('T', LENGTHS)
@pytest.mark.parametrize('documents', [False, True])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_kernel_attention_equals_its_sums_with_gradients(T, documents, dtype, tolerance):
    torch.manual_seed(T)
    place = None
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    if documents:
        begins = torch.rand(2, T) < 0.02
        begins[:, 0] = True
        count = torch.arange(T).expand(2, T)
        place = count - (count * begins).cummax(1).values
        number = begins.cumsum(1)
        seen = seen & (number[:, None, :, None] == number[:, None, None])

    def definition(q, k, v):
        weights = (q @ k.mT) * seen
        return weights @ v / weights.sum(-1, keepdim=True)

    inputs = [torch.rand(2, 3, T, size, dtype=torch.float64) for size in (8, 8, 6)]
    weights = torch.randn(2, 3, T, 6, dtype=torch.float64)
    results = []
    for function, kind in ((definition, torch.float64), (lambda *x: linear_attention(*x, place)[0], dtype)):
        leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
        y = function(*leaves)
        results.append([y, *torch.autograd.grad((y * weights.to(kind)).sum(), leaves)])
    for right, found in zip(*results, strict=True):
        assert (found - right).abs().max() <= tolerance * (right.abs().max() + 0.01)


def test_random_features_estimate_softmax_attention():
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 4, 64, 16), dim=-1) * 2
    features = orthogonal_features(16, 4096).expand(4, 16, 4096)
    estimate = positive_features(q, features) @ positive_features(k, features).mT / 4096
    exact = (q @ k.mT / 4).exp()
    assert ((estimate - exact).abs() / exact).mean() < 0.1  # directions of one length: a bias of some percent
    products = features[0, :, :16].T @ features[0, :, :16]
    torch.testing.assert_close(products, 16 * torch.eye(16), atol=1e-3, rtol=0)


@pytest.mark.parametrize('shape', ['kernel', 'KECA'])
def test_a_document_does_not_see_the_one_before(shape):
    """Alone it would differ: random features depend a little on rotary positions."""
    model, a = make(shape), torch.randint(61, (1, 16))
    documents = (torch.arange(16) >= 7).long()[None]
    b = torch.cat((torch.randint(61, (1, 7)), a[:, 7:]), 1)
    ours, theirs = all_logits(model, a, documents), all_logits(model, b, documents)
    torch.testing.assert_close(ours[:, 7:], theirs[:, 7:], atol=1e-5, rtol=1e-5)


def test_the_orthogonal_gradient_is_that_of_the_penalty():
    model = make('kernel', mixer='KA', n_head=2)
    p = model.transformer.h[0].attn.c_attn.weight
    rows = p[:64].unflatten(0, (4, 16))  # queries and keys of two heads
    penalty = 0.3 * (rows @ rows.mT - torch.eye(16)).square().sum()
    expected, = torch.autograd.grad(penalty, p)
    for q in model.parameters():
        q.grad = torch.zeros_like(q)
    add_orthogonal_gradient(model, 0.3)
    torch.testing.assert_close(p.grad, expected)
    assert not model.transformer.h[1].attn.c_attn.weight.grad.any()


def test_feedback_equals_its_definition():
    """Each block's gradient is that of its own output times the error through the block's matrix."""
    model = make('modern', x0_mix=False)
    matrices = feedback_matrices(model.config, seed=1)
    ids = torch.randint(61, (2, 16))
    model.feedback = matrices
    loss = model(ids, ids).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.feedback = None
    parts = model.transformer
    context = Context(model.cos[:16], model.sin[:16], {}, None)
    x = parts.ln_e(parts.wte(ids))
    outputs = [x]
    for block in parts.h:
        x = block(x.detach(), None, context)
        outputs.append(x)
    last = outputs[-1].detach().requires_grad_()
    expected_loss = model.loss(last, ids).sum()
    error, = torch.autograd.grad(expected_loss, last)
    total = model.loss(outputs[-1], ids).sum()
    for output, matrix in zip(outputs, matrices, strict=False):
        total = total + (output * (error @ matrix)).sum()
    model.zero_grad()
    total.backward()
    torch.testing.assert_close(loss, expected_loss)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, msg=name)
