"""The report on a machine, with advice if PyTorch was built without CUDA."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotloop.system import check

ROOT = Path(check.__file__).parents[2]


@pytest.mark.slow  # it compiles a function
def test_the_command_reports_on_this_machine_and_writes_nothing(tmp_path):
    done = subprocess.run([sys.executable, '-m', 'hotloop.system.check'], cwd=tmp_path, check=True,
                          env={'PYTHONPATH': str(ROOT)}, capture_output=True, text=True)
    for words in (f'torch {torch.__version__}', 'gpu: ', 'cpu: ', 'a run uses: ',
                  'attention kernels that run: ', 'compile: ', 'GB free in this folder'):
        assert words in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('capability, words, dtype', [
    ((9, 0), 'capability 9.0, 40.0 of 42.0 GB free, bf16: True, fp16: True, TF32: True', 'bfloat16'),
    ((7, 5), 'capability 7.5, 40.0 of 42.0 GB free, bf16: False, fp16: True, TF32: False', 'float16')])
def test_gpus_one_by_one(monkeypatch, capability, words, dtype):
    monkeypatch.setattr(check, 'try_compile', lambda device: 'no Triton')
    monkeypatch.setattr(check, 'attention_kernels', lambda device, dtype: ['flash', 'math'])
    monkeypatch.setattr(torch._C, '_cuda_getDriverVersion', lambda: 12040, raising=False)
    for name, answer in (('is_available', True), ('device_count', 2), ('get_device_name', 'NVIDIA Test'),
                         ('get_device_capability', capability), ('mem_get_info', (40e9, 42e9))):
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    lines = check.report()
    assert 'the driver supports 12.4' in lines[1]
    assert lines[2:4] == [f'  cuda:{i}: NVIDIA Test, {words}' for i in range(2)]
    assert any(line.startswith('a run uses: cuda:0 ') and dtype in line for line in lines)
    assert 'compile: fails: no Triton' in lines


def test_advice_for_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr('shutil.which', lambda name: '/usr/bin/' + name)
    monkeypatch.setattr(torch.version, 'cuda', None)
    assert 'built without CUDA' in check.list_gpus()[1]
