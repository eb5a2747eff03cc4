"""The report on a machine, with advice if PyTorch was built without CUDA."""

import torch

from hotloop.system import check


def test_this_machine(monkeypatch):
    monkeypatch.setattr(check, 'try_compile', lambda device: None)
    printed = '\n'.join(check.report())
    for words in (f'torch {torch.__version__}', 'gpu: ', 'math\ncompile: works', 'GB free in this folder'):
        assert words in printed


def test_gpus_one_by_one(monkeypatch):
    monkeypatch.setattr(check, 'try_compile', lambda device: 'no Triton')
    monkeypatch.setattr(check, 'attention_kernels', lambda device, dtype: ['flash', 'math'])
    monkeypatch.setattr(torch._C, '_cuda_getDriverVersion', lambda: 12040, raising=False)
    for name, answer in (('is_available', True), ('device_count', 2), ('get_device_name', 'NVIDIA Test'),
                         ('get_device_capability', (7, 5)), ('mem_get_info', (40e9, 42e9))):
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    lines = check.report()
    assert 'the driver supports 12.4' in lines[1]
    words = 'NVIDIA Test, capability 7.5, 40.0 of 42.0 GB free, bf16: False, fp16: True, TF32: False'
    assert lines[2:4] == [f'  cuda:{i}: {words}' for i in range(2)]
    assert any(line.startswith('a run uses: cuda:0 ') and 'float16' in line for line in lines)
    assert 'compile: fails: no Triton' in lines


def test_advice_for_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr('shutil.which', lambda name: '/usr/bin/' + name)
    monkeypatch.setattr(torch.version, 'cuda', None)
    assert 'built without CUDA' in check.list_gpus()[1]
