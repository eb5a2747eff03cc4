"""The kernels that Inductor would make for a GPU, planned without one: fake CUDA tensors."""

import re
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

# compute capability, multiprocessors, threads on each, shared memory of a block and of a multiprocessor
GPUS = {'T4': (7, 5, 40, 1024, 65536, 65536), 'A10': (8, 6, 72, 1536, 101376, 102400),
        'A100': (8, 0, 108, 2048, 166912, 167936), 'H100': (9, 0, 132, 2048, 232448, 233472)}


def answers_of(name):
    """Return {function: its answer} of torch.cuda on a machine with this GPU, and the GPU's properties."""
    major, minor, multiprocessors, threads, of_block, of_multiprocessor = GPUS[name]
    properties = SimpleNamespace(
        name=name, type='cuda', index=0, major=major, minor=minor, multi_processor_count=multiprocessors,
        warp_size=32, max_threads_per_multi_processor=threads, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, total_memory=80 << 30, L2_cache_size=50 << 20,
        shared_memory_per_block=49152, gcnArchName='', shared_memory_per_block_optin=of_block,
        shared_memory_per_multiprocessor=of_multiprocessor)
    answers = dict(is_available=True, device_count=1, current_device=0, get_device_properties=properties,
                   synchronize=None, get_device_capability=(major, minor), is_initialized=False,
                   is_bf16_supported=major >= 8, set_rng_state=None, get_device_name=name)
    return answers, properties


class Kernel(NamedTuple):
    backward: bool
    triton: bool  # or a matrix product, attention and the like
    megabytes: float  # read and written


@contextmanager
def on_gpu(name):
    """torch.cuda and Inductor see a machine with this GPU."""
    answers, gpu = answers_of(name)
    inductors = {'get_compute_capability': 10 * gpu.major + gpu.minor, 'is_triton_capable': True,
                 'raise_if_triton_unavailable': None}
    with ExitStack() as stack:
        def replace(owner, function, answer):
            stack.enter_context(mock.patch.object(owner, function, lambda *args, **settings: answer))
        for function, answer in answers.items():
            replace(torch.cuda, function, answer)
        for function, answer in (answers | inductors).items():
            for owner in (CudaInterface, CudaInterface.Worker):
                if hasattr(owner, function):
                    replace(owner, function, answer)
        replace(scheduler, 'has_triton', True)
        yield


def planned(run, function, visit, gpu, **options):
    """Compile a function for a GPU with these options of Inductor, call run(compiled), visit(graph) each."""
    def plan(graph, inputs, is_backward=False, is_inference=False, **settings):
        fake = next(node.meta['val'].fake_mode for node in graph.graph.nodes
                    if node.op == 'placeholder' and hasattr(node.meta.get('val'), 'fake_mode'))
        with (on_gpu(gpu), unset_fake_temporarily(), V.set_fake_mode(fake), DebugContext(),
              tracing(TracingContext(fake))):
            compile_fx.record_original_output_strides(graph)
            view_to_reshape(graph)
            compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
            lowered = GraphLowering(graph, shape_env=fake.shape_env, is_inference=is_inference,
                                    is_backward=is_backward, const_output_index={}, cpp_wrapper=False)
            with V.set_graph_handler(lowered):
                lowered.run(*inputs)
                visit(lowered)
        outputs = [node and node.meta['val'] for node in graph.graph.output_node().args[0]]
        return make_boxed_func(lambda *args: [
            torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
            if torch.is_tensor(out) else out for out in outputs])

    def backend(graph, inputs):
        return compile_fx.compile_fx(graph, inputs, inner_compile=plan)
    torch._dynamo.reset()
    properties = answers_of(gpu)[1]  # which the function itself may ask for
    with (config.patch(joint_graph_constant_folding=False, **options),
          mock.patch('torch.cuda.get_device_properties', lambda device: properties)):
        run(torch.compile(function, dynamic=False, backend=backend))


def kernels_of(run, function, **options):
    """Return the Kernels of a function that is compiled for an H100; run(compiled) calls it."""
    kernels = []

    def visit(lowered):
        lowered._update_scheduler()
        kernels.extend(Kernel(lowered.is_backward, not node.is_extern(),
                              node.get_read_write_buffers_sizes() / 1e6) for node in lowered.scheduler.nodes)
    planned(run, function, visit, 'H100', **options)
    return kernels


def shared_memory_of(run, function, gpu, words):
    """Compile a function's kernels whose names contain `words`, by Triton. Return their bytes, a list."""
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    found, capability = [], 10 * GPUS[gpu][0] + GPUS[gpu][1]

    def visit(lowered):
        with mock.patch.object(triton_helpers, 'set_driver_to_gpu', lambda: None):
            code = lowered.codegen()[0].value
            for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL):
                if words in name:
                    kernel = getattr(PyCodeCache.load(source.replace(r"\'\'\'", "'''")), name)
                    kernel.precompile(warm_cache_only=True)
                    found.extend(result.kernel.shared for result in kernel.compile_results)
    target = make_backend(GPUTarget('cuda', capability, 32))
    with mock.patch.object(_triton, 'triton_backend', lambda: target):
        planned(run, function, visit, gpu)
    return found
