"""Weights for inference: int8 is within its bound, packed weights compute the same."""

import pytest
import torch
from test_generate import PROMPTS
from test_model import make

from hotloop.inference.quantize import Int8Linear, PackedLinear, can_pack, prepare_for_inference

CPU = torch.device('cpu')


@pytest.mark.parametrize('bias, rows', [(False, (3,)), (True, (1, 1)), (True, (2, 40))])
@pytest.mark.parametrize('kernel', [True, False])
def test_int8_is_within_its_bound(bias, rows, kernel):
    """Each weight moves by half a step at most; the CPU's kernel also rounds to bf16."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(96, 64, bias=bias), torch.randn(*rows, 96)
    linear.weight.data[5] *= 100  # each row has its own scale
    linear.weight.data[6] = 0
    quantized = Int8Linear(linear)
    assert quantized.on_cpu
    quantized.on_cpu = kernel
    scale, w = quantized.scale.float(), linear.weight.detach()
    assert ((quantized.weight * scale[:, None] - w).abs() <= scale[:, None] / 2 * (1 + 1e-6)).all()
    assert (scale <= w.abs().amax(1) / 127 * (1 + 2**-7) + 1e-30).all()
    assert quantized.weight.abs().max() <= 127
    bound = x.abs().sum(-1, keepdim=True) * scale / 2 + x.abs() @ w.abs().t() * (2**-7 if kernel else 1e-6)
    assert ((quantized(x) - linear(x)).abs() <= bound + 1e-6).all()


@pytest.mark.parametrize('inputs', [1, 100])
def test_int8_of_a_width_that_the_kernel_does_not_take(inputs):
    """It reads 16 inputs at a time, beyond the end of other rows."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(inputs, 48), torch.randn(5, inputs)
    torch.testing.assert_close(Int8Linear(linear)(x), linear(x), rtol=0.02, atol=0.02)


def test_int8_sums_stay_in_the_range_of_float16():
    linear, x = torch.nn.Linear(256, 64, bias=False), torch.rand(40, 256) * 200
    linear.weight.data = torch.rand(64, 256) * 0.1
    quantized = Int8Linear(linear)
    quantized.on_cpu = False
    y = quantized(x.half())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), linear(x), rtol=0.02, atol=0)


@pytest.mark.parametrize('dtype, quantize', [(torch.float32, 'int8'), (torch.bfloat16, 'none')])
def test_a_prepared_model_has_close_logits(dtype, quantize):
    model, x = make('modern', n_embd=64).train(), torch.tensor([PROMPTS[3]])
    exact = model(x)
    assert prepare_for_inference(model, CPU, dtype, quantize) is model and not model.training
    assert model.cos.dtype == torch.float32 and model.transformer.wte.weight.dtype == dtype
    assert sum(isinstance(m, Int8Linear) for m in model.modules()) == (9 if quantize == 'int8' else 0)
    assert 0 < (model(x) - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize('dtype, bound', [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_packed_weights_compute_the_same(dtype, bound, monkeypatch):
    if not can_pack(CPU, dtype):
        pytest.skip(f'oneDNN does not pack {dtype} here')
    x = torch.tensor([PROMPTS[3]])
    logits = {}
    for smallest, packed in ((0, 9), (10**6, 0)):
        monkeypatch.setattr('hotloop.inference.quantize.PACK_FROM', smallest)
        model = prepare_for_inference(make(), CPU, dtype)
        assert sum(isinstance(m, PackedLinear) for m in model.modules()) == packed
        logits[packed] = model(x)
    assert (logits[9] - logits[0]).norm() <= bound * logits[0].norm()
