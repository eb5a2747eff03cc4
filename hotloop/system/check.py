"""What this machine can do for a run: the report of --check, with advice where something is missing."""

import os
import shutil
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hotloop.system import host
from hotloop.system.device import attention_kernels, choose_device, choose_dtype, cpu_has_bf16, try_compile

LITTLE_DISK = 5e9  # bytes; a checkpoint of GPT-2 124M has 1.5e9, and a run keeps two of them and best.pt


def check(cfg):
    """The report on this machine and the folders of a command, one line each. It writes nothing."""
    device, why = choose_device(cfg.device)
    dtype, why_dtype = choose_dtype(cfg.dtype, device, training=True)
    lines = [f'python {sys.version.split()[0]}, torch {torch.__version__}, {sys.platform}', *check_gpus(),
             f'cpu: {host.cores(physical=True)} cores, {host.memory() / 1e9:,.1f} GB, '
             f'bf16 units: {yes(cpu_has_bf16())}',
             f'a run uses: {device} ({why}), {str(dtype).removeprefix("torch.")} ({why_dtype})',
             *check_attention(device, dtype), *check_compile(device), *check_backends(device)]
    for name in ('out_dir', 'data_dir'):
        lines += check_disk(name, getattr(cfg, name))
    return lines


def yes(value):
    return 'yes' if value else 'no'


def check_gpus():
    """Driver, GPUs, number formats."""
    if not torch.cuda.is_available():
        if torch.backends.mps.is_available():
            return ['gpu: Apple (mps)']
        lines = ['gpu: none that PyTorch can use']
        if shutil.which('nvidia-smi') and torch.version.cuda is None:
            lines.append('  advice: nvidia-smi is here, but this PyTorch was built without CUDA; install '
                         'another build of torch')
        elif shutil.which('nvidia-smi'):
            lines.append('  advice: nvidia-smi is here, but PyTorch finds no GPU; its CUDA '
                         f'{torch.version.cuda} may need a newer driver')
        return lines
    driver = torch._C._cuda_getDriverVersion()  # private, and the only source without another package
    lines = [f'gpu: CUDA {torch.version.cuda}, the driver supports {driver // 1000}.{driver % 1000 // 10}']
    for i in range(torch.cuda.device_count()):
        major, minor = capability = torch.cuda.get_device_capability(i)
        modern = capability >= (8, 0)
        total = torch.cuda.get_device_properties(i).total_memory
        try:
            free = torch.cuda.mem_get_info(i)[0]
        except RuntimeError:  # not even a context fits, or the GPU is reserved for another process
            free = 0
        lines.append(f'  cuda:{i}: {torch.cuda.get_device_name(i)}, capability {major}.{minor}, '
                     f'{free / 1e9:,.1f} of {total / 1e9:,.1f} GB free, bf16 {yes(modern)}, '
                     f'fp16 {yes(capability >= (7, 0))}, TF32 {yes(modern)}')
        if free < 0.9 * total:
            lines.append(f'  advice: another process uses memory of cuda:{i}; nvidia-smi names it')
    return lines


def check_attention(device, dtype):
    """The kernels of scaled_dot_product_attention that run, each tried alone."""
    shape = SimpleNamespace(n_head=12, n_kv_head=12, head_dim=64)
    kernels = attention_kernels(shape, SimpleNamespace(device=device, dtype=dtype))
    lines = [f'attention kernels that run: {", ".join(kernels) or "none"}']
    if kernels == ['math'] and device.type != 'mps':
        lines.append('  advice: attention stores all T x T weights here; use a short block_size')
    return lines


def check_compile(device):
    """A real compilation."""
    failure = try_compile(device)
    if not failure:
        return ['compile: works']
    needs = {'cuda': 'Triton and a C compiler', 'cpu': 'a C++ compiler (apt install g++)'}.get(device.type)
    advice = [f'  advice: torch.compile needs {needs}; without it runs are slower'] if needs else []
    return [f'compile: fails: {failure}', *advice]


def check_backends(device):
    """The backends of torch.distributed."""
    found = {'nccl': dist.is_available() and dist.is_nccl_available(),
             'gloo': dist.is_available() and dist.is_gloo_available()}
    lines = [f'distributed: {", ".join(f"{name} {yes(there)}" for name, there in found.items())}']
    needed = 'nccl' if device.type == 'cuda' else 'gloo'
    if not found[needed]:
        lines.append(f'  advice: runs of several processes need {needed}, which this PyTorch does not have')
    return lines


def check_disk(name, path):
    """Free space of a folder, or of the nearest folder above it that exists."""
    folder = os.path.abspath(path)
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    if not os.path.exists(folder):  # a drive of Windows
        return [f'{name}={path}: {folder} does not exist',
                f'  advice: choose another folder with --{name}']
    free = shutil.disk_usage(folder).free
    lines = [f'{name}={path}: {free / 1e9:,.1f} GB free']
    if not os.access(folder, os.W_OK):
        lines.append(f'  advice: {folder} is not writable; choose another folder with --{name}')
    elif free < LITTLE_DISK:
        lines.append(f'  advice: little space; --dry_run says what checkpoints need, and --{name} chooses '
                     'another disk')
    return lines
