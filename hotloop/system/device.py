"""Device, dtype and compilation, each with the reason for its choice; speed and memory."""

import os
import re
import time

import torch

from hotloop.system import host
from hotloop.system.text import first_line


def choose_device(name, local_rank=0):
    """Choose (device, reason). name: auto, cuda (the GPU of the local rank), cuda:N, mps or cpu."""
    has = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    reason = 'requested'
    if name == 'auto':
        name = next(kind for kind in has if has[kind])
        reason = 'no GPU found' if name == 'cpu' else 'GPU found'
    kind, _, number = name.partition(':')
    if not has.get(kind):  # the version shows whether this PyTorch was built without CUDA
        raise ValueError(f'device={name!r} was requested, but PyTorch {torch.__version__} found no such '
                         'device; use --device=cpu or --device=auto')
    if kind != 'cuda':
        return torch.device(name), reason
    index, count = int(number or local_rank), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f'device=cuda:{index} does not exist, because the number of GPUs is {count}; lower '
                         '--nproc_per_node, or choose another --device')
    return torch.device('cuda', index), f'{torch.cuda.get_device_name(index)}, {reason}'


def choose_dtype(name, device, training=False):
    """
    Choose (dtype, reason). auto: bfloat16 where the hardware supports it, on CPUs for training
    only, float16 on older GPUs, float32 elsewhere.
    """
    gpu_has_bf16 = device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (8, 0)
    if name == 'bfloat16' and device.type == 'cuda' and not gpu_has_bf16:
        raise ValueError('dtype=bfloat16 was requested, but this GPU only emulates it; use --dtype=float16')
    if name != 'auto':
        return getattr(torch, name), 'requested'
    if gpu_has_bf16:
        return torch.bfloat16, 'this GPU has bf16 units'
    if device.type == 'cuda':
        return torch.float16, 'this GPU has no bf16 units; the loss is scaled'
    if device.type == 'mps' or not training:
        return torch.float32, f'the safe default on {device.type}'
    if cpu_has_bf16():  # up to 1.4 times as fast as float32
        return torch.bfloat16, 'this CPU has fast bf16 units'
    return torch.float32, 'this CPU has no fast bf16 units'


def cpu_has_bf16():
    """
    Return whether this CPU multiplies bf16 faster than float32: by AMX, or by AVX512-BF16 of AMD. On a Xeon
    without AMX products with AVX512-BF16 took twice as long as in float32 (tests/bench/LOG.md).
    """
    # private functions, which another torch may lack
    has_avx512 = getattr(torch.cpu, '_is_avx512_bf16_supported', bool)()
    has_amx = getattr(torch.cpu, '_is_amx_tile_supported', bool)()
    is_fast = has_amx or (has_avx512 and host.vendor() == 'AuthenticAMD')
    return torch.backends.mkldnn.is_available() and is_fast


def try_compile(device):
    """Compile a tiny function. Returns None if torch.compile works here, else its error."""
    if device.type == 'mps':
        return 'not tried on Apple GPUs'
    # or Inductor first compiles a test for each of the CPU's instruction sets, 3 s each
    os.environ.setdefault('TORCHINDUCTOR_VEC_ISA_OK', '1')
    failure = None
    try:
        torch.compile(lambda x: (x * 2).relu().sum(), dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # Inductor wraps a missing C++ compiler in exceptions of its own
        failure = first_line(getattr(error, 'inner_exception', error))[:120]
    torch._dynamo.reset()  # not after Ctrl-C, which may leave it half imported
    return failure


# On 2 CPU cores compiling 3 or 4 layers took 35 to 45 s (7 s if cached), and steps were then 1.25
# to 1.7 times as fast: that pays after 1.8 to 2.9 minutes of a time budget. Not measured on GPUs
COMPILE_PAYS = {'cpu': 3.0, 'cuda': 2.0}  # minutes
COMPILE_EVAL_PAYS = 10.0  # minutes: compiling the model for evaluations, too, took 10 to 20 s


def choose_compile(asked, device, minutes=None):
    """
    Choose (whether to use torch.compile, reason). asked: True, False or 'auto', which does not
    compile for a run of too few minutes. minutes: None if it has no limit.
    """
    if asked is False:
        return False, 'requested'
    least = COMPILE_PAYS.get(device.type, 0.0)
    if asked == 'auto' and minutes is not None and minutes < least:
        return False, f'it pays after {least:g} minutes'
    failure = try_compile(device)
    if not failure:
        return True, 'a test compilation worked; the first step takes longer'
    if asked is True:
        raise ValueError(f'compile=True was requested, but fails here: {failure}; use --compile=False')
    return False, failure


# dense bf16 peak in FLOP/s (fp16 on GPUs without bf16), from the vendors' data sheets
PEAK_FLOPS = {'H200': 989e12, 'H200 NVL': 835e12, 'GH200': 989e12, 'H100 PCIe': 756e12,
              'H100 NVL': 835e12, 'H100': 989e12, 'B200': 2250e12, 'A100': 312e12, 'A10G': 70e12,
              'A10': 125e12, 'A40': 150e12, 'L40S': 362e12, 'L4': 121e12, 'V100': 125e12,
              'T4': 65e12, 'RTX 3090': 71e12, 'RTX 4090': 165e12, 'RTX 5090': 210e12,
              'MI300X': 1307e12}


def peak_flops(device, dtype):
    """Return the peak FLOP/s of a GPU in bf16 or fp16; None if unknown."""
    if device.type != 'cuda' or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r'Laptop|MIG| Ti\b| D\b', name):  # slower or faster kinds, and parts of a GPU
        return None
    matches = [key for key in PEAK_FLOPS if re.search(rf'\b{key}\b', name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def device_memory(device):
    """Return the bytes of a GPU; elsewhere this process's share of the machine or its container."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    return host.memory() // int(os.environ.get('LOCAL_WORLD_SIZE', '1'))


def peak_memory(device):
    """Return the most bytes used: by torch on a GPU since the last trial, else by the process."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    return host.peak_memory()


def use_threads():
    """Use this process's share of the machine's cores. torchrun gives each process one thread."""
    torch.set_num_threads(host.threads_for(int(os.environ.get('LOCAL_WORLD_SIZE', '1'))))


def measure_flops(device, dtype):
    """
    Measure the FLOP/s of a large matrix product on this machine, the best of five. On a CPU, at most twice
    those of float32: bf16 units hasten products alone, and the rest of a step moves half as many bytes.
    """
    n = 8192 if device.type == 'cuda' else 1024
    a = torch.ones(n, n, device=device, dtype=dtype)
    best = float('inf')
    for _ in range(5):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    flops = 2 * n**3 / best
    if device.type == 'cpu' and dtype != torch.float32:
        flops = min(flops, 2 * measure_flops(device, torch.float32))
    return flops
