"""The kernels that Inductor would make for an H100, planned without one: fake CUDA tensors, and no Triton."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

H100 = SimpleNamespace(
    name='H100', type='cuda', index=0, major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    total_memory=80 << 30, L2_cache_size=50 << 20, shared_memory_per_block=49152, gcnArchName='',
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472)
ANSWERS = {name: lambda *args, answer=answer, **settings: answer for name, answer in dict(
    is_available=True, device_count=1, current_device=0, get_device_properties=H100, synchronize=None,
    get_device_capability=(9, 0), is_initialized=False, is_bf16_supported=True, set_rng_state=None).items()}
INTERFACE = {**ANSWERS, 'get_compute_capability': lambda *args: 90, 'is_triton_capable': lambda *args: True}


class Kernel(NamedTuple):
    backward: bool
    triton: bool  # or a matrix product, attention and the like
    megabytes: float  # read and written


@contextmanager
def on_h100():
    with ExitStack() as stack:
        for name, answer in ANSWERS.items():
            stack.enter_context(mock.patch(f'torch.cuda.{name}', answer))
        for name, answer in INTERFACE.items():
            for owner in (CudaInterface, CudaInterface.Worker):
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, staticmethod(answer)))
        stack.enter_context(mock.patch('torch._inductor.scheduler.has_triton', lambda: True))
        yield


def kernels_of(run, function, **options):
    """Compile a function with these options of Inductor, call run(compiled), return its Kernels."""
    planned = []

    def plan(graph, inputs, is_backward=False, is_inference=False, **settings):
        fake = next(node.meta['val'].fake_mode for node in graph.graph.nodes
                    if node.op == 'placeholder' and hasattr(node.meta.get('val'), 'fake_mode'))
        with (on_h100(), unset_fake_temporarily(), V.set_fake_mode(fake), DebugContext(),
              tracing(TracingContext(fake))):
            compile_fx.record_original_output_strides(graph)
            view_to_reshape(graph)
            compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
            lowered = GraphLowering(graph, shape_env=fake.shape_env, is_inference=is_inference,
                                    is_backward=is_backward, const_output_index={}, cpp_wrapper=False)
            with V.set_graph_handler(lowered):
                lowered.run(*inputs)
                lowered._update_scheduler()
                planned.extend(Kernel(is_backward, not node.is_extern(),
                                      node.get_read_write_buffers_sizes() / 1e6)
                               for node in lowered.scheduler.nodes)
        outputs = [node and node.meta['val'] for node in graph.graph.output_node().args[0]]
        return make_boxed_func(lambda *args: [
            torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
            if torch.is_tensor(out) else out for out in outputs])

    def backend(graph, inputs):
        return compile_fx.compile_fx(graph, inputs, inner_compile=plan)
    torch._dynamo.reset()
    with config.patch(joint_graph_constant_folding=False, **options):
        run(torch.compile(function, dynamic=False, backend=backend))
    return planned
