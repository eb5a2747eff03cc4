"""
Report what this machine can do for a run, with advice where something is missing.

    $ python -m hotloop.system.check
"""

import shutil
import sys
from types import SimpleNamespace

import torch

from hotloop.system import host
from hotloop.system.device import (
    attention_kernels,
    choose_device,
    choose_dtype,
    cpu_has_bf16,
    try_compile,
)


def report():
    """List what this machine has, one line each, followed by advice if something is missing."""
    device, why = choose_device('auto')
    dtype, why_dtype = choose_dtype('auto', device, training=True)
    heads = SimpleNamespace(n_head=12, n_kv_head=12, head_dim=64)
    kernels = attention_kernels(heads, SimpleNamespace(device=device, dtype=dtype))
    return [f'python {sys.version.split()[0]}, torch {torch.__version__}, {sys.platform}',
            *check_gpus(),
            f'cpu: {host.cores(physical=True)} cores, {host.memory() / 1e9:,.1f} GB, '
            f'bf16 units: {yes(cpu_has_bf16())}',
            f'a run uses: {device} ({why}), {str(dtype).removeprefix("torch.")} ({why_dtype})',
            f'attention kernels that run: {", ".join(kernels)}',
            *check_compile(device),
            f'disk: {shutil.disk_usage(".").free / 1e9:,.1f} GB free in this folder']


def yes(value):
    return 'yes' if value else 'no'


def check_gpus():
    """Report the driver and each GPU, with its free memory and number formats."""
    if torch.backends.mps.is_available():
        return ['gpu: Apple (mps)']
    if not torch.cuda.is_available():
        lines = ['gpu: none that PyTorch can use']
        if shutil.which('nvidia-smi') and torch.version.cuda is None:
            lines.append('  advice: nvidia-smi is here, but this PyTorch was built without CUDA; '
                         'install another build of torch')
        elif shutil.which('nvidia-smi'):
            lines.append('  advice: nvidia-smi is here, but PyTorch finds no GPU; its CUDA '
                         f'{torch.version.cuda} may need a newer driver')
        return lines
    driver = torch._C._cuda_getDriverVersion()  # private, but no public function returns it
    lines = [f'gpu: CUDA {torch.version.cuda}, '
             f'the driver supports {driver // 1000}.{driver % 1000 // 10}']
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        modern = major >= 8
        free, total = torch.cuda.mem_get_info(i)
        lines.append(f'  cuda:{i}: {torch.cuda.get_device_name(i)}, capability {major}.{minor}, '
                     f'{free / 1e9:,.1f} of {total / 1e9:,.1f} GB free, '
                     f'bf16 {yes(modern)}, fp16 {yes(major >= 7)}, TF32 {yes(modern)}')
        if free < 0.9 * total:
            lines.append(f'  advice: another process uses memory of cuda:{i}; nvidia-smi names it')
    return lines


def check_compile(device):
    """Report whether torch.compile works."""
    failure = try_compile(device)
    if not failure:
        return ['compile: works']
    lines = [f'compile: fails: {failure}']
    if device.type == 'cuda':
        lines.append('  advice: torch.compile needs Triton and a C compiler')
    elif device.type == 'cpu':
        lines.append('  advice: torch.compile needs a C++ compiler (apt install g++)')
    return lines


if __name__ == '__main__':
    print('\n'.join(report()))
