"""A device, dtype or compilation requested by name is used or is an error; auto gives its reason."""

from functools import partial

import pytest
import torch

from hotloop.system import host
from hotloop.system.device import (
    choose_compile,
    choose_device,
    choose_dtype,
    device_memory,
    peak_flops,
    peak_memory,
)

CPU = torch.device('cpu')
CUDA = torch.device('cuda', 0)


@pytest.mark.parametrize('name', ['cuda:1', 'mps', 'tpu'])
def test_a_device_that_does_not_exist_is_an_error(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
    with pytest.raises(ValueError, match=f'device={name!r} was requested, but PyTorch .*--device=cpu'):
        choose_device(name)
    assert choose_device('auto') == (CPU, 'no GPU found')


def test_each_process_has_the_gpu_of_its_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda index: f'GPU {index}')
    assert choose_device('auto', local_rank=1) == (torch.device('cuda', 1), 'GPU 1, GPU found')
    assert choose_device('cuda:0') == (CUDA, 'GPU 0, requested')
    with pytest.raises(ValueError, match=r'cuda:2 .* is 2; lower --nproc_per_node'):
        choose_device('auto', local_rank=2)


def test_an_emulated_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda gpu: (7, 0))
    with pytest.raises(ValueError, match=r'dtype=bfloat16 was requested, but .* only emulates it.*float16'):
        choose_dtype('bfloat16', CUDA)
    assert choose_dtype('auto', CUDA)[0] == torch.float16
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda gpu: (8, 0))
    assert choose_dtype('auto', CUDA)[0] == choose_dtype('bfloat16', CUDA)[0] == torch.bfloat16


@pytest.mark.parametrize('amx, avx512, vendor, has', [
    (True, False, 'GenuineIntel', True), (False, True, 'AuthenticAMD', True),
    (False, True, 'GenuineIntel', False), (False, False, '', False)])
def test_cpus_train_in_bf16_where_it_is_faster(monkeypatch, tmp_path, amx, avx512, vendor, has):
    (tmp_path / 'proc').mkdir()
    (tmp_path / 'proc' / 'cpuinfo').write_text(f'processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 6\n')
    monkeypatch.setattr('hotloop.system.host.vendor', partial(host.vendor, root=str(tmp_path)))
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: avx512, raising=False)
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: True)
    assert choose_dtype('auto', CPU)[0] == torch.float32
    chosen, reason = choose_dtype('auto', CPU, training=True)
    assert chosen == (torch.bfloat16 if has else torch.float32) and 'fast bf16 units' in reason
    assert choose_dtype('bfloat16', CPU) == (torch.bfloat16, 'requested')


def test_compilation_that_fails_is_one_line(monkeypatch):
    """auto runs without it; by name it is an error; False tries nothing."""
    def fail(function, **settings):
        raise RuntimeError('No C++ compiler found\nin any of these places')
    monkeypatch.setattr(torch, 'compile', fail)
    assert choose_compile('auto', CPU) == (False, 'No C++ compiler found')
    assert choose_compile('auto', torch.device('mps')) == (False, 'not tried on Apple GPUs')
    with pytest.raises(ValueError, match=r'compile=True was requested, but .* found; use --compile=False'):
        choose_compile(True, CPU)
    monkeypatch.delattr(torch, 'compile')
    assert choose_compile(False, CPU) == (False, 'requested')


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA H100 PCIe', 756e12), ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA RTX A1000', None),
    ('NVIDIA A100-SXM4-40GB MIG 1g.5gb', None), ('NVIDIA GeForce RTX 3090 Ti', None)])
def test_no_peak_is_better_than_a_wrong_one(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda gpu: name)
    assert peak_flops(CUDA, torch.bfloat16) == peak
    assert peak_flops(CUDA, torch.float32) is None and peak_flops(CPU, torch.bfloat16) is None


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    assert 2**20 < peak_memory(CPU) < device_memory(CPU)
    monkeypatch.setattr('hotloop.system.host.memory', lambda: 16 * 10**9)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '8')
    assert device_memory(CPU) == 2 * 10**9
