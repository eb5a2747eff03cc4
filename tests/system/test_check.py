"""--check: what a machine can do, and one line of advice for each thing that is missing."""

import ntpath
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import contents

import train
from hotloop.system.check import check, check_disk, check_gpus
from hotloop.system.device import attention_kernels
from hotloop.system.distributed import Env


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(capability, **settings) -> the lines for a CPU, or for a GPU of this capability."""
    def report(capability=None, failure=None, free=40e9, **settings):
        monkeypatch.setattr('hotloop.system.check.try_compile', lambda device: failure)
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: capability is not None)
        if capability:
            monkeypatch.setattr(torch._C, '_cuda_getDriverVersion', lambda: 12040, raising=False)
            monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
            monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA Test')
            monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
            monkeypatch.setattr(torch.cuda, 'get_device_properties',
                                lambda device: SimpleNamespace(total_memory=42e9))
            monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (free, 42e9))
            monkeypatch.setattr('hotloop.system.check.attention_kernels',
                                lambda config, env: ['flash', 'math'])
        cfg = train.TrainConfig(out_dir=str(tmp_path / 'out'), data_dir=str(tmp_path), **settings)
        return check(cfg)
    return report


def advice(lines):
    return [line for line in lines if line.startswith('  advice: ') and 'little space' not in line]


def test_a_cpu_in_order(machine, capsys, tmp_path):
    lines = machine(device='cpu')
    for words in (f'torch {torch.__version__}', 'gpu: none', 'cpu: ', 'a run uses: cpu (requested), ',
                  'attention kernels that run: flash, math', 'compile: works', 'gloo yes',
                  f'out_dir={tmp_path}/out: '):
        assert any(words in line for line in lines), words
    assert not advice(lines) and not (tmp_path / 'out').exists()


@pytest.mark.parametrize('capability, words', [
    ((9, 0), 'capability 9.0, 40.0 of 42.0 GB free, bf16 yes, fp16 yes, TF32 yes'),
    ((7, 5), 'capability 7.5, 40.0 of 42.0 GB free, bf16 no, fp16 yes, TF32 no')])
def test_gpus_one_by_one(machine, capability, words, monkeypatch):
    monkeypatch.setattr(dist, 'is_nccl_available', lambda: True)
    lines = machine(capability)
    assert 'the driver supports 12.4' in lines[1] and not advice(lines)
    assert lines[2:4] == [f'  cuda:{i}: NVIDIA Test, {words}' for i in range(2)]
    assert any(re.match('a run uses: cuda:0 .*' + ('bf16' if words.count('yes') == 3 else 'float16'), line)
               for line in lines)


def test_advice_for_what_is_missing(machine, monkeypatch, tmp_path):
    """One line for each."""
    monkeypatch.setattr(dist, 'is_nccl_available', lambda: False)
    found = advice(machine((8, 0), failure='no Triton', free=1e9))
    expected = ('memory of cuda:0', 'memory of cuda:1', 'needs Triton', 'need nccl')
    for words, line in zip(expected, found, strict=True):
        assert words in line
    monkeypatch.setattr(dist, 'is_gloo_available', lambda: False)
    monkeypatch.setattr('hotloop.system.check.attention_kernels', lambda config, env: ['math'])
    monkeypatch.setattr('shutil.which', lambda name: '/usr/bin/' + name)
    monkeypatch.setattr('os.access', lambda path, mode: False)
    monkeypatch.setattr(torch.version, 'cuda', None)
    found = advice(machine(failure='no g++'))
    words = ('built without CUDA', 'short block_size', r'a C\+\+ compiler', 'need gloo',
             f'{tmp_path} is not writable; choose another folder with --out_dir', '--data_dir')
    for expected, line in zip(words, found, strict=True):
        assert re.search(expected, line), line
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    assert 'its CUDA 13.0 may need a newer driver' in advice(machine())[0]


def test_a_gpu_that_another_process_fills_is_reported(machine, monkeypatch):
    """No context fits on it."""
    def fail(*args, **settings):
        raise RuntimeError('CUDA error: out of memory')
    machine((8, 0))
    monkeypatch.setattr(torch.cuda, 'mem_get_info', fail)
    monkeypatch.setattr(torch, 'zeros', fail)
    assert attention_kernels(SimpleNamespace(n_head=2, n_kv_head=2, head_dim=64), Env()) == []
    lines = check_gpus()
    assert '0.0 of 42.0 GB free' in lines[1] and 'memory of cuda:0' in lines[2]


def test_little_space_is_mentioned(machine, monkeypatch):
    monkeypatch.setattr('shutil.disk_usage', lambda path: SimpleNamespace(free=1e9))
    assert sum('little space; --dry_run says' in line for line in machine(device='cpu')) == 2


def test_the_command_writes_nothing(monkeypatch, tmp_path, capsys):
    """And trains nothing. A device that is not there is an error, as in a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('hotloop.system.check.try_compile', lambda device: None)
    assert train.main(['--check', '--device=cpu']) == 0
    assert 'attention kernels that run' in capsys.readouterr().out and contents(tmp_path) == {}
    with pytest.raises(ValueError, match='cuda:99'):
        train.main(['--check', '--device=cuda:99'])


def test_a_drive_of_windows_that_does_not_exist(monkeypatch):
    nothing = Mock(wraps=ntpath, exists=lambda path: False)
    monkeypatch.setattr('hotloop.system.check.os', SimpleNamespace(path=nothing))
    assert check_disk('data_dir', r'Z:\data')[0] == r'data_dir=Z:\data: Z:\ does not exist'
