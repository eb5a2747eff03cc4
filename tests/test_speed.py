"""What makes a run faster changes no result: data on the device, reading ahead, bf16 on CPUs that have it; profiles."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import noise, write_bins

import train
from hotloop.checkpoint import load_checkpoint
from hotloop.dataloader import Batches, Mixture, Split
from hotloop.dataset import read_meta
from hotloop.device import choose_dtype, cpu_has_bf16, device_memory
from hotloop.distributed import Env
from hotloop.memory import choose_loss_chunks
from model import GPT, GPTConfig
from train import TrainConfig

CPU = torch.device('cpu')


@pytest.fixture
def splits(tmp_path):
    """Splits of each kind: plain, masked, of four bytes with ids beyond 2^16, and a mixture of them all."""
    masks = {name: np.arange(n) % 3 > 0 for name, n in (('train', 700), ('val', 100))}
    write_bins(tmp_path / 'plain', noise(900, high=65535, low=60000), noise(100))
    write_bins(tmp_path / 'masked', noise(700), noise(100), masks=masks)
    write_bins(tmp_path / 'wide', noise(800, high=2**31 - 1, low=2**17), noise(100), dtype='uint32')
    made = {name: Split(str(tmp_path / name), 'train', read_meta(str(tmp_path / name)), 16)
            for name in ('plain', 'masked', 'wide')}
    return {**made, 'mixture': Mixture(list(made), list(made.values()), [0.5, 0.3, 0.2])}


def loaded(batches, steps):
    return [(x, y, seed) for step in steps for load in batches.step(step)[1] for x, y, seed in [load()]]


@pytest.mark.parametrize('kind', ['plain', 'masked', 'wide', 'mixture'])
@pytest.mark.parametrize('rank, world', [(0, 1), (1, 2)])
def test_data_on_the_device_is_the_data(splits, kind, rank, world):
    def batches(on_device):
        cfg = TrainConfig(batch_size=4, gradient_accumulation_steps=4, data_on_device=on_device)
        return Batches(splits[kind], cfg, Env(rank, world))
    assert batches('auto').tokens is None and batches(True).tokens is not None
    for (x, y, seed), (a, b, same_seed) in zip(loaded(batches(False), range(9)), loaded(batches(True), range(9)),
                                               strict=True):
        assert torch.equal(x, a) and torch.equal(y, b) and seed == same_seed
        assert a.dtype == b.dtype == torch.int64 and a.is_contiguous() and b.is_contiguous()


def test_reading_ahead_gives_the_same_micro_batches(splits, monkeypatch):
    """In order, after a jump, and with the file's end of a step's micro-batches between."""
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda tensor: tensor)
    cfg = TrainConfig(batch_size=4, gradient_accumulation_steps=3)
    plain, ahead = (Batches(splits['mixture'], cfg, Env()) for _ in range(2))
    ahead.reader = ThreadPoolExecutor(1)
    for (x, y, seed), (a, b, same_seed) in zip(loaded(plain, [0, 1, 2, 9, 10, 3]), loaded(ahead, [0, 1, 2, 9, 10, 3]),
                                               strict=True):
        assert torch.equal(x, a) and torch.equal(y, b) and seed == same_seed
    assert list(ahead.ahead) == [(4, 0)]


def test_a_run_with_its_data_on_the_device_ends_in_the_same_weights(train_tiny, tmp_path):
    assert train_tiny('host', data_on_device=False) == train_tiny('device', data_on_device=True) == 0
    host, device = (load_checkpoint(str(tmp_path / out / 'ckpt.pt'))['model'] for out in ('host', 'device'))
    assert all(torch.equal(host[name], device[name]) for name in host)


@pytest.mark.parametrize('has', [True, False])
def test_bf16_is_chosen_on_cpus_that_have_it_and_for_training_alone(monkeypatch, has):
    monkeypatch.setattr('hotloop.device.cpu_has_bf16', lambda: has)
    assert choose_dtype('auto', CPU)[0] == torch.float32
    dtype, reason = choose_dtype('auto', CPU, training=True)
    assert (dtype, reason) == ((torch.bfloat16, 'this CPU has bf16 units') if has else
                               (torch.float32, 'on cpu the safe choice'))
    assert choose_dtype('float32', CPU, training=True) == (torch.float32, 'asked for')


def test_whether_a_cpu_has_bf16_is_asked_and_never_assumed(monkeypatch):
    for name in ('_is_avx512_bf16_supported', '_is_amx_tile_supported'):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert cpu_has_bf16() is False
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: True, raising=False)
    assert cpu_has_bf16() is torch.backends.mkldnn.is_available()


@pytest.mark.parametrize('preset', ['gpt2', 'modern'])
def test_a_bf16_step_is_near_the_float32_step(preset):
    """Loss within 1%, gradients in nearly the same direction; attention within it is computed in float32 on a CPU."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(preset=preset, block_size=32, vocab_size=97, n_layer=2, n_head=2, n_embd=64, zero_init=False))
    x, y = torch.randint(97, (2, 4, 32))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        gpt.compute_dtype = dtype
        gpt.zero_grad()
        loss = gpt(x, y).sum()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in gpt.parameters()])))
    (a, grad_a), (b, grad_b) = found
    assert a == pytest.approx(b, rel=0.01) and a != b
    assert torch.cosine_similarity(grad_a, grad_b, dim=0) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize('preset', ['gpt2', 'modern'])
def test_what_backward_computes_again_changes_no_gradient(preset):
    """Dropout's least of all. So it is where a CPU compiles a model of over ten million parameters."""
    from torch._functorch import config
    settings = GPTConfig(preset=preset, block_size=64, vocab_size=500, n_layer=2, n_head=4, n_embd=128, dropout=0.3,
                         zero_init=False)
    x, found = torch.randint(500, (2, 64)), []
    for num_params in (10**6, 10**8):
        torch._dynamo.reset()
        torch.manual_seed(0)
        gpt = GPT(settings)
        gpt.num_params = lambda number=num_params: number
        gpt.compute_dtype = torch.bfloat16
        with config.patch(ban_recompute_materialized_backward=True):
            forward = train.compiled(gpt, TrainConfig(), Env(compile=True))
            assert config.ban_recompute_materialized_backward is (num_params == 10**6)
            torch.manual_seed(5)
            forward(x, x).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in gpt.parameters()]))
    assert ((found[0] - found[1]).norm() / found[0].norm()).item() < 1e-3


@pytest.mark.slow
def test_the_loops_bench_takes_its_steps():
    """The table of step_speed.py --loop: a run that had already ended would take no time."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'bench', 'step_speed.py')
    told = subprocess.run([sys.executable, script, '--loop', '--steps=3', '--rounds=1', '--batch=2', '--device=cpu',
                           '--compile=off', '--threads=1'], check=True, capture_output=True, text=True).stdout
    alone, loop = (float(line.split('|')[5]) for line in told.splitlines()[-2:])
    assert 0.1 * alone < loop


def test_a_profile_tells_where_the_time_goes_and_trains_nothing(train_tiny, tmp_path, capsys):
    assert train_tiny(profile=True) == 0
    out = capsys.readouterr().out
    assert 'aten::mm' in out and 'ms a step without the profiler' in out and 'tok/s' in out
    assert os.listdir(tmp_path / 'out') == ['trace.json']
    assert json.loads((tmp_path / 'out' / 'trace.json').read_text())['traceEvents']


@pytest.mark.parametrize('limit, share', [('1000000\n', None), ('max\n', 1), (str(2**60), 1), (None, 1)])
def test_the_memory_of_a_container_is_what_it_may_take(tmp_path, limit, share):
    if limit:
        (tmp_path / 'fs/cgroup').mkdir(parents=True)
        (tmp_path / 'fs/cgroup/memory.max').write_text(limit)
    host = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    assert device_memory(CPU, system=tmp_path) == (host * share if share else 1_000_000)


def test_the_loss_is_taken_in_parts_where_its_logits_would_fill_the_memory():
    gb = 2**30
    assert choose_loss_chunks('auto', 12 * 1024, 50304, 80 * gb) == 1
    parts = choose_loss_chunks('auto', 32768, 262144, 80 * gb)
    assert 12 * 32768 * 262144 / parts <= 80 * gb / 16 < 12 * 32768 * 262144
    assert choose_loss_chunks(4, 12 * 1024, 50304, 80 * gb) == 4
    assert choose_loss_chunks(99, 10, 50304, 80 * gb) == 10
