"""How training runs the blocks of a GPT: recomputed, compiled one by one, sharded by torch's FSDP2."""

import contextlib
import importlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ATTENTION = [torch.ops.aten._scaled_dot_product_flash_attention.default,
             torch.ops.aten._scaled_dot_product_cudnn_attention.default,
             torch.ops.aten._scaled_dot_product_efficient_attention.default,
             torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
             torch.ops.higher_order.flex_attention]  # not run: it needs a GPU


def set_blocks(model, recompute, compiles=False):
    """
    Set how training runs each block of a GPT. The results keep their bits.

    recompute: 'none' stores all that the backward pass needs; 'full' stores a block's inputs and
    computes the rest again; 'selective' stores the output of attention too. compiles: compile each
    block, and the loss, by itself, so that gradients leave during the backward pass.
    """
    if recompute == 'none' and not compiles:
        return
    blocks = model.transformer.h
    run = type(blocks[0]).forward
    if recompute != 'none':
        keep = {}
        if recompute == 'selective':
            keep['context_fn'] = partial(create_selective_checkpoint_contexts, ATTENTION)
        draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in blocks.modules())
        # Compiled on a GPU, recomputed dropout of attention would draw from generators of its own, which
        # no manual_seed() reaches: a resumed run would draw other numbers. A private option.
        functorch = importlib.import_module('torch._functorch.config')
        functorch.graphsafe_rng_functionalization = False
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=draws, **keep)
    if compiles:
        torch._dynamo.config.optimize_ddp = False  # it would split a block at the end of a bucket
        torch._dynamo.config.recompile_limit = 64  # of kinds of blocks; beyond 8 they would stay eager
        run = torch.compile(run, dynamic=False)  # compiled once for all blocks
        model.loss = torch.compile(model.loss, dynamic=False)
    for block in blocks:
        block.forward = partial(run, block)


def gradient_sync(model, shard, last):
    """Reduce gradients in the last micro-batch; with shard='full' in each, to hold no complete ones."""
    if is_sharded(model) and shard == 'optimizer':
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


# -----------------------------------------------------------------------------
# FSDP2

def shard_model(model, shard, env):
    """
    Divide the rows of weights, gradients and optimizer states among all processes. 'optimizer' gathers
    all weights once a step (ZeRO-2, arXiv 1910.02054), 'full' a block's each time it runs (ZeRO-3).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    model.mesh = mesh = init_device_mesh(env.device.type, (env.world,))
    # Blocks cast their weights to the compute dtype, so these are sent in it. Embedding and head
    # are not: if they are one matrix, their gradients are added before they are reduced
    policy = MixedPrecisionPolicy(env.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=shard == 'full')
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for part in (*model.transformer.h, model):
        part.set_force_sum_reduction_for_comms(True)  # and divides: gloo cannot average


def is_sharded(model):
    """Return whether shard_model() has sharded a model. Then a forward needs all processes."""
    return hasattr(model, 'reshard')


def release_mesh(model):
    """Let the process group end. DTensor's caches keep the mesh of a model, and it keeps the group."""
    getattr(getattr(model, 'mesh', None), '_pg_registry', {}).clear()


def reshard(model):
    """Free the weights that a forward without a backward has gathered."""
    if is_sharded(model):
        for part in (*model.transformer.h, model):
            part.reshard()


def local(tensor):
    """Return the rows of a tensor that this process holds; all if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def all_rows(rows, p, dtype):
    """Return the complete tensor of which each process has its rows of p; they are sent in dtype."""
    if not hasattr(p, 'placements'):
        return rows
    from torch.distributed.tensor import DTensor
    part = DTensor.from_local(rows.to(dtype), p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    return part.full_tensor().to(rows.dtype)


def own_rows(tensor, p):
    """Shard a complete tensor as p is, without communication."""
    if not hasattr(p, 'placements'):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor, p.device_mesh, p.placements, src_data_rank=None)


def gather(state):
    """Make sharded tensors complete: on rank 0 in host memory, empty elsewhere. All must call it."""
    gathered = {}  # a tied matrix stays one

    def complete(value):
        if not hasattr(value, 'full_tensor'):
            return value
        if id(value) not in gathered:
            tensor = value.full_tensor()
            gathered[id(value)] = tensor.cpu() if dist.get_rank() == 0 else torch.empty(0)
        return gathered[id(value)]
    return tree_map(complete, state)


def shard_state(state, optimizer):
    """Keep this process's rows of an optimizer's saved state, {parameter: {name: tensor}}."""
    params = [p for group in optimizer.param_groups for p in group['params']]
    for i, values in state.items():
        for name, value in values.items():
            if name != 'step':
                values[name] = own_rows(value, params[i])
