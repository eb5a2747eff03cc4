"""
Report what this machine can do for a run.

    $ python -m hotloop.system.check
"""

import contextlib
import shutil
import sys
import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop.system import host
from hotloop.system.device import choose_device, choose_dtype, cpu_has_bf16, try_compile


def report():
    """List what this machine has, one line each."""
    device, why = choose_device('auto')
    dtype, why_dtype = choose_dtype('auto', device, training=True)
    failure = try_compile(device)
    return [f'python {sys.version.split()[0]}, torch {torch.__version__}, {sys.platform}',
            *list_gpus(),
            f'cpu: {host.cores(physical=True)} cores, {host.memory() / 1e9:,.1f} GB, bf16: {cpu_has_bf16()}',
            f'a run uses: {device} ({why}), {str(dtype).removeprefix("torch.")} ({why_dtype})',
            f'attention kernels that run: {", ".join(attention_kernels(device, dtype))}',
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


def attention_kernels(device, dtype):
    """List torch's attention kernels that run here for heads of 64 channels."""
    if device.type == 'cpu':
        dtype = torch.float32  # see Attention in model.py
    names = []
    for name in ('CUDNN_ATTENTION', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH'):
        with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, name)):
            warnings.simplefilter('ignore')  # torch warns at length about unsupported kernels
            with contextlib.suppress(RuntimeError):
                q = torch.zeros(1, 12, 128, 64, device=device, dtype=dtype)
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
                names.append(name.lower().removesuffix('_attention'))
    return names


if __name__ == '__main__':
    print('\n'.join(report()))
