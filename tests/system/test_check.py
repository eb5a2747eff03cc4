"""The report on a machine: what it has, and a line of advice for each thing that is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotloop.system import check

ROOT = Path(check.__file__).parents[2]


@pytest.fixture
def report(monkeypatch):
    """report(...) -> (the lines, the lines of advice) of a machine without GPUs, or with two."""
    def run(capability=None, failure=None, free=40e9):
        monkeypatch.setattr(check, 'try_compile', lambda device: failure)
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: capability is not None)
        if capability:
            monkeypatch.setattr(torch._C, '_cuda_getDriverVersion', lambda: 12040, raising=False)
            monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
            monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA Test')
            monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
            monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (free, 42e9))
            monkeypatch.setattr(check, 'attention_kernels', lambda config, env: ['flash', 'math'])
        lines = check.report()
        return lines, [line for line in lines if line.startswith('  advice: ')]
    return run


def test_the_command_reports_on_this_machine_and_writes_nothing(tmp_path):
    done = subprocess.run([sys.executable, '-m', 'hotloop.system.check'], cwd=tmp_path, check=True,
                          env={'PYTHONPATH': str(ROOT)}, capture_output=True, text=True)
    for words in (f'torch {torch.__version__}', 'gpu: ', 'cpu: ', 'a run uses: ',
                  'attention kernels that run: ', 'compile: ', 'GB free in this folder'):
        assert words in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('capability, words, dtype', [
    ((9, 0), 'capability 9.0, 40.0 of 42.0 GB free, bf16 yes, fp16 yes, TF32 yes', 'bfloat16'),
    ((7, 5), 'capability 7.5, 40.0 of 42.0 GB free, bf16 no, fp16 yes, TF32 no', 'float16')])
def test_gpus_one_by_one(report, capability, words, dtype):
    lines, advice = report(capability)
    assert 'the driver supports 12.4' in lines[1] and not advice
    assert lines[2:4] == [f'  cuda:{i}: NVIDIA Test, {words}' for i in range(2)]
    assert any(line.startswith('a run uses: cuda:0 ') and dtype in line for line in lines)


def test_advice_for_what_is_missing(report, monkeypatch):
    _, advice = report((8, 0), failure='no Triton', free=1e9)
    expected = ('memory of cuda:0', 'memory of cuda:1', 'needs Triton')
    for words, line in zip(expected, advice, strict=True):
        assert words in line
    monkeypatch.setattr('shutil.which', lambda name: '/usr/bin/' + name)
    for version, words in ((None, 'built without CUDA'), ('13.0', 'its CUDA 13.0 may need')):
        monkeypatch.setattr(torch.version, 'cuda', version)
        _, advice = report(failure='no g++')
        assert words in advice[0] and 'a C++ compiler' in advice[1] and len(advice) == 2
