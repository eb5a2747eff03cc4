"""
Report what this machine can do for a run.

    $ python -m hotloop.system.check
"""

import shutil
import sys
from types import SimpleNamespace

import torch

from hotloop.system import host
from hotloop.system.device import attention_kernels, choose_device, choose_dtype, cpu_has_bf16, try_compile


def report():
    """List what this machine has, one line each."""
    device, why = choose_device('auto')
    dtype, why_dtype = choose_dtype('auto', device, training=True)
    heads = SimpleNamespace(n_head=12, n_kv_head=12, head_dim=64)
    kernels = attention_kernels(heads, SimpleNamespace(device=device, dtype=dtype))
    failure = try_compile(device)
    return [f'python {sys.version.split()[0]}, torch {torch.__version__}, {sys.platform}',
            *list_gpus(),
            f'cpu: {host.cores(physical=True)} cores, {host.memory() / 1e9:,.1f} GB, bf16: {cpu_has_bf16()}',
            f'a run uses: {device} ({why}), {str(dtype).removeprefix("torch.")} ({why_dtype})',
            f'attention kernels that run: {", ".join(kernels)}',
            f'compile: {f"fails: {failure}" if failure else "works"}',
            f'disk: {shutil.disk_usage(".").free / 1e9:,.1f} GB free in this folder']


def list_gpus():
    """Report the driver and each GPU, with its free memory and number formats."""
    if torch.backends.mps.is_available():
        return ['gpu: Apple (mps)']
    if not torch.cuda.is_available():
        lines = ['gpu: none that PyTorch can use']
        if shutil.which('nvidia-smi') and torch.version.cuda is None:
            lines.append('  nvidia-smi is here, but this PyTorch was built without CUDA; '
                         'install another build of torch')
        return lines
    driver = torch._C._cuda_getDriverVersion()  # private, but no public function returns it
    lines = [f'gpu: CUDA {torch.version.cuda}, the driver supports {driver // 1000}.{driver % 1000 // 10}']
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        free, total = torch.cuda.mem_get_info(i)
        lines.append(f'  cuda:{i}: {torch.cuda.get_device_name(i)}, capability {major}.{minor}, '
                     f'{free / 1e9:,.1f} of {total / 1e9:,.1f} GB free, '
                     f'bf16: {major >= 8}, fp16: {major >= 7}, TF32: {major >= 8}')
    return lines


if __name__ == '__main__':
    print('\n'.join(report()))
