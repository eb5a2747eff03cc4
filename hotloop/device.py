"""Device, dtype and compilation, each chosen with its reason; peak FLOP/s."""

import os
import re
import sys

import torch

from hotloop.host import first_line_of


def choose_device(name, local_rank=0):
    """(device, reason). A device asked for by name that is not there is an error, never another one."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not re.fullmatch(r'auto|cpu|mps|cuda(:[0-9]+)?', name):
        raise ValueError(f'device={name!r} is not one of auto, cuda, cuda:N, mps, cpu')
    kind, reason = name.split(':')[0], 'asked for'
    if name == 'auto':
        kind = 'cuda' if cuda else 'mps' if mps else 'cpu'
        reason = {'cuda': 'there is one', 'mps': 'no CUDA, Apple GPU', 'cpu': 'no GPU found'}[kind]
    if kind == 'cuda' and not cuda:
        built = 'this PyTorch was built without CUDA' if torch.version.cuda is None else 'no usable GPU was found'
        raise ValueError(f'device={name!r} was asked for, but {built}; use --device=cpu or --device=auto')
    if kind == 'mps' and not mps:
        raise ValueError(f'device={name!r} was asked for, but there is no Apple GPU; use --device=cpu')
    if kind == 'cuda':
        index = int(name.split(':')[1]) if ':' in name else local_rank
        if index >= torch.cuda.device_count():
            raise ValueError(f'there is no device cuda:{index} among {torch.cuda.device_count()} GPUs; under torchrun '
                             'start as many processes as there are (--nproc_per_node)')
        return torch.device('cuda', index), f'{torch.cuda.get_device_name(index)}, {reason}'
    return torch.device(kind), reason


def choose_dtype(name, device, training=False):
    """
    (dtype, reason). bf16 where the hardware computes in it, fp16 on older GPUs, float32 elsewhere; on CPUs bf16 only to
    train, where it is up to 1.4 times as fast and the master weights are float32.
    """
    if name != 'auto':
        if name == 'bfloat16' and device.type == 'cuda' and torch.cuda.get_device_capability(device) < (8, 0):
            raise ValueError(f'dtype=bfloat16 was asked for, but {torch.cuda.get_device_name(device)} computes in it '
                             'by emulation only; use --dtype=float16')
        return getattr(torch, name), 'asked for'
    if device.type == 'cuda':
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, 'this GPU computes in it'
        return torch.float16, 'this GPU has no bf16 units; losses are scaled'
    if device.type == 'cpu' and training and cpu_has_bf16():
        return torch.bfloat16, 'this CPU has bf16 units'
    return torch.float32, f'on {device.type} the safe choice'


def cpu_has_bf16():
    """Whether this CPU multiplies bf16 itself (AVX512-BF16 or AMX); emulated, it is slower than float32."""
    tests = (getattr(torch.cpu, name, None) for name in ('_is_avx512_bf16_supported', '_is_amx_tile_supported'))
    return torch.backends.mkldnn.is_available() and any(test is not None and test() for test in tests)


def try_compile(device):
    """None when torch.compile works here, otherwise what it said, in one line."""
    if device.type == 'mps':
        return 'not tried on Apple GPUs'
    try:
        torch.compile(lambda x: (x * 2).relu().sum(), dynamic=False)(torch.ones(8, device=device))
    except Exception as e:  # inductor wraps what a missing compiler raises in types of its own
        return str(getattr(e, 'inner_exception', e)).strip().split('\n')[0][:120] or type(e).__name__
    finally:
        torch._dynamo.reset()
    return None


def device_memory(device, system='/sys'):
    """Bytes of memory that the device has; of the host's, no more than a container may take."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    try:
        memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (AttributeError, ValueError):  # Windows has no sysconf; 16 GB is a guess
        memory = 16 * 2**30
    limit = first_line_of(f'{system}/fs/cgroup/memory.max')
    return min(memory, int(limit)) if limit.isdecimal() else memory


def attention_kernel(model, batch, env):
    """The name of the kernel that scaled_dot_product_attention takes for this shape, or 'unknown'."""
    c = model.config
    try:
        q, k = (torch.empty(batch, heads, c.block_size, c.n_embd // c.n_head, device=env.device,
                            dtype=env.dtype, requires_grad=True) for heads in (c.n_head, c.n_kv_head))
        choice = torch._fused_sdp_choice(q, k, k, dropout_p=c.dropout, is_causal=True,
                                         enable_gqa=c.n_kv_head < c.n_head)
        return {int(v): name.lower() for name, v in torch.nn.attention.SDPBackend.__members__.items()}[choice]
    except (AttributeError, KeyError, RuntimeError):
        return 'unknown'


# dense bf16 peak in FLOP/s (fp16 where there is no bf16) by the device's name, from the makers' data sheets
PEAK_FLOPS = {'H200': 989e12, 'GH200': 989e12, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12, 'B200': 2250e12,
              'A100': 312e12, 'A10G': 70e12, 'A10': 125e12, 'A40': 150e12, 'L40S': 362e12, 'L4': 121e12, 'V100': 125e12,
              'T4': 65e12, 'RTX 3090': 71e12, 'RTX 4090': 165e12, 'RTX 5090': 210e12, 'MI300X': 1307e12}


def peak_flops(device, dtype):
    """Peak of one device in the dtype, or None when it is not known: no figure is better than a wrong one."""
    if device.type != 'cuda' or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    found = [key for key in PEAK_FLOPS if re.search(rf'\b{key}\b', name) and 'Laptop' not in name]
    return PEAK_FLOPS[max(found, key=len)] if found else None


def peak_memory(device):
    """Most bytes in use so far: the allocator's on a GPU, the process's elsewhere; None where neither is told."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024
