"""
What only a GPU can show: the laws of resume, data and decoding in bf16, with its kernels, compiled.

    $ python -m pytest -n 0 -s tests/system/test_gpu.py                    # skips where there is no GPU
    $ TEST_DEVICE=cpu python -m pytest -n 0 -s tests/system/test_gpu.py    # tries the tests themselves
"""

import os
import re

import pytest
import torch
from conftest import load, noise, tiny_flags, write_bins
from test_model import ids, make

import train
from hotloop.inference.generate import Sampling, generate
from hotloop.inference.quantize import prepare_for_inference
from hotloop.training.memory import MAX_TRIAL_TOKENS
from hotloop.weights.nf4 import rounded

DEVICE = os.environ.get('TEST_DEVICE', 'cuda')
pytestmark = pytest.mark.skipif(DEVICE == 'cuda' and not torch.cuda.is_available(), reason='there is no GPU')

# heads of 64 and 128 positions, so that flash attention takes them
SETTINGS = dict(device=DEVICE, dtype='auto', compile=True, n_embd=128, block_size=128, batch_size=8,
                dropout=0.1, eval_interval=5, lr_decay_iters=10)


@pytest.fixture
def run(tmp_path):
    """run(out, **settings) returns the checkpoint that the run leaves."""
    write_bins(tmp_path / 'data' / 'tiny', noise(60_001), noise(4001, seed=1))

    def go(out, **settings):
        torch._dynamo.reset()
        assert train.main(tiny_flags(tmp_path / out, tmp_path / 'data', **{**SETTINGS, **settings})) == 0
        # TF32, by the switch that Inductor's autotuning can read
        assert DEVICE == 'cpu' or torch.get_float32_matmul_precision() == 'high'
        return load(tmp_path / out / 'ckpt.pt')
    return go


def furthest(a, b):
    """Return the largest difference between two checkpoints' weights."""
    return max((a['model'][name] - b['model'][name]).abs().max().item() for name in a['model'])


@pytest.mark.parametrize('recipe', [{}, {'preset': 'modern', 'optimizer': 'muon'}], ids=['gpt2', 'modern'])
def test_resume_is_exact(run, recipe):
    settings = {**recipe, 'deterministic': True}
    whole = run('whole', **settings)
    run('halves', **settings, max_iters=5)
    assert furthest(whole, run('halves', **settings, init_from='resume')) == 0


@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('window, masked', [(100, False), (None, True), (100, True)])
def test_attention_within_windows_and_documents_is_that_of_a_cpu(window, masked, compiled):
    """FlexAttention with its gradients, in float32; on a CPU it agrees within 4e-9."""
    torch._dynamo.reset()
    torch.set_float32_matmul_precision('highest')  # TF32 differs by 1.2e-3, by simulation
    model, x = make('modern', n_embd=128, n_head=2, block_size=300, window=window).train(), ids(2, 300)
    documents = (torch.arange(600).view(2, 300) // 130) if masked else None
    results = []
    for device in ('cpu', DEVICE):
        model.to(device).zero_grad()
        forward = torch.compile(model, dynamic=False) if compiled and device == DEVICE else model
        batch = [part.to(device) for part in (x, x, documents) if part is not None]
        forward(*batch).sum().backward()
        results.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]))
    assert (results[0] - results[1]).norm() < 1e-5 * results[0].norm()


def test_nf4_is_that_of_a_cpu():
    """The look-up differs by device."""
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded(weight.to(DEVICE)).cpu(), rounded(weight))


def test_data_in_the_devices_memory_is_the_data_that_is_read_ahead(run, monkeypatch):
    resident = run('resident', deterministic=True)
    monkeypatch.setattr('hotloop.training.dataloader.kept_on_device', lambda split, env: False)
    assert furthest(resident, run('ahead', deterministic=True)) == 0


def test_adapters_on_the_device_are_written_at_the_last_step(run, tmp_path):
    """The last save takes no copy of the tensors first."""
    run('base', max_iters=1)
    tuned = run('tuned', init_from=tmp_path / 'base', lora_rank=4, max_iters=2, eval_interval=1)
    assert (tmp_path / 'tuned' / 'adapter' / 'adapter_model.safetensors').exists() and tuned['iter_num'] == 2


@pytest.mark.parametrize('preset', ['gpt2', 'modern'])
def test_a_compiled_step_draws_what_the_eager_one_draws(preset):
    """In float32, where kernels differ less than probable ids. Contexts slide; graphs are used again."""
    torch._dynamo.reset()
    torch.set_float32_matmul_precision('highest')
    model = make(preset, n_head=2, n_embd=128, block_size=64)
    prepare_for_inference(model, torch.device(DEVICE), torch.float32, pack=False)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]

    def texts(compiled, temperature):
        sampling = Sampling(90, temperature=temperature, top_k=20, repetition_penalty=1.1)
        steps = generate(model, prompts, sampling, seeds=[1, 2, 3], compiled=compiled)
        return [[(sequence, token) for sequence, token, _ in new] for new in steps]
    for temperature in (0.0, 0.8, 0.8):
        assert texts(True, temperature) == texts(False, temperature)


@pytest.mark.skipif(DEVICE == 'cpu', reason='a CPU has no limit that is safe to reach')
def test_auto_batch_on_a_device_that_is_nearly_full(run, capsys):
    """All but 2 GB are taken."""
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(free - 2 * 10**9, dtype=torch.uint8, device=DEVICE)
    run('auto', auto_batch=True, batch_size=12, gradient_accumulation_steps=1024,
        block_size=1024, n_embd=512, max_iters=2, eval_tokens=2048, vocab_size=50304)
    del taken
    size = int(re.search(r'batch: (\d+) sequence', capsys.readouterr().out)[1])
    assert 1 <= size < MAX_TRIAL_TOKENS // 1024 and 12 * 1024 % size == 0
