"""NF4: codes and errors of the paper and of bitsandbytes; a step saves 4 bits per weight."""

import shutil

import pytest
import torch
from torch import nn

from hotloop.weights.nf4 import CODE, NF4Linear, dequantize, look_up, pairs_of, quantize, rounded

# bitsandbytes 0.50.2's quantize_4bit(torch.linspace(-1, 1, 64), blocksize=64, quant_type='nf4')
LINSPACE = [0, 0, 1, 17, 17, 17, 18, 34, 34, 51, 52, 68, 69, 85, 102, 103, 120, 136, 153, 170, 171, 187, 204,
            204, 221, 221, 238, 238, 238, 239, 255, 255]


def saved_bytes(run, x):
    """Bytes of the storages that autograd keeps for the backward of run(x), except x itself."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run(x)
    y.sum().backward()
    kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_codes_are_those_of_bitsandbytes_and_errors_those_of_the_paper():
    """The paper's format has 0.0920 before the scales are quantized too; storage is 4.127 bits."""
    assert quantize(torch.linspace(-1, 1, 64)).codes.tolist() == LINSPACE
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024)
    nf4 = quantize(weight)
    error = (dequantize(nf4, pairs_of('cpu'), weight.shape, torch.float32) - weight).norm() / weight.norm()
    assert 0.091 < error <= 0.0925
    assert 8 * sum(tensor.nbytes for tensor in nf4) / weight.numel() == pytest.approx(4.127, abs=0.001)
    on_the_code = torch.tensor(CODE)[torch.randint(16, (17, 101))]  # an odd number, which is padded
    torch.testing.assert_close(rounded(on_the_code), on_the_code, rtol=0.02, atol=0.02)
    assert not rounded(torch.zeros(3, 5)).any()


def test_both_look_ups_find_the_two_weights_of_each_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([[CODE[byte // 16], CODE[byte % 16]] for byte in range(256)])
    for on_cpu in (True, False):
        assert torch.equal(look_up(codes, pairs_of('cpu'), on_cpu), expected)


@pytest.mark.parametrize('bias, dtype', [(True, torch.float32), (False, torch.bfloat16)])
def test_the_product_and_its_gradient_are_those_of_the_rounded_weights(bias, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(96, 48, bias=bias)
    quantized, x = NF4Linear(linear).requires_grad_(False), torch.randn(5, 96, dtype=dtype)
    linear.weight.data = rounded(linear.weight)
    gradients = []
    for module in (quantized, linear.to(dtype)):
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        y.square().sum().backward()
        gradients.append((y.detach(), inputs.grad))
    torch.testing.assert_close(*gradients)


def test_a_backward_keeps_4_bits_per_weight():
    linear, x = nn.Linear(512, 1024, bias=False), torch.randn(2, 512, requires_grad=True)
    quantized = NF4Linear(linear).requires_grad_(False)
    assert saved_bytes(quantized, x) == 0  # the buffers are there anyway, and the product is computed again
    assert saved_bytes(linear.requires_grad_(False), x) == linear.weight.nbytes
    assert sum(buffer.nbytes for buffer in quantized.buffers()) < linear.weight.nbytes / 7


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a C++ compiler')
def test_a_compiled_backward_keeps_4_bits_per_weight():
    linears = nn.Linear(512, 1024), nn.Linear(1024, 512)
    network = nn.Sequential(NF4Linear(linears[0]), nn.GELU(), NF4Linear(linears[1])).requires_grad_(False)
    x = torch.randn(4, 512, requires_grad=True)
    network(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    kept = saved_bytes(torch.compile(network, dynamic=False), x)
    assert kept < 0.6 * 2 * linears[0].weight.numel() + 10**5
    torch.testing.assert_close(x.grad, expected)
