"""Sharding by torch's FSDP2: each process holds its part of weights, gradients and optimizer states."""

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map


def shard_model(model, shard, env):
    """
    Divides the rows of a GPT's parameters among all processes and moves them to the device. Gradients and
    optimizer states follow. shard: 'optimizer' gathers all weights once a step (ZeRO-2, arXiv 1910.02054),
    'full' those of a block each time it runs, forward or backward (ZeRO-3).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    env.mesh = mesh = init_device_mesh(env.device.type, (env.world,))
    # Blocks cast their weights to the compute dtype, so these are sent in it. Embedding and head are not:
    # if they are one matrix, their gradients are added before they are reduced
    dtype = None if env.dtype == torch.float32 else env.dtype
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=shard == 'full')
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
                reshard_after_forward=False)
    for part in sharded_parts(model):
        part.set_force_sum_reduction_for_comms(True)  # and divides: gloo cannot average


def is_sharded(model):
    """Whether shard_model() has sharded a model. Then a forward needs all processes."""
    return hasattr(model, 'reshard')


def sharded_parts(model):
    """The modules whose parameters are gathered together."""
    return [module for module in model.modules() if is_sharded(module)]


def reshard(model):
    """Frees the weights that a forward without a backward has gathered."""
    for part in sharded_parts(model):
        part.reshard()


def local(tensor):
    """The rows of a tensor that this process holds; all, if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def gather(state):
    """
    A nested state with complete tensors in place of sharded ones: on rank 0 in host memory, on others empty.
    All processes must call it.
    """
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
    """This process's part of the saved state of an optimizer, {number of the parameter: {name: tensor}}."""
    params = [p for group in optimizer.param_groups for p in group['params']]
    if not hasattr(params[0], 'placements'):
        return state
    from torch.distributed.tensor import distribute_tensor
    sharded = {}
    for i, values in state.items():
        sharded[i] = dict(values)
        for name, value in values.items():
            if name != 'step':
                sharded[i][name] = distribute_tensor(value, params[i].device_mesh, params[i].placements,
                                                     src_data_rank=None)
    return sharded


def rows_to_matrices(rows, world):
    """
    (N, r, C), this process's r rows of N matrices, to (N / world, world * r, C), all rows of its share of the
    matrices.
    """
    N, r, C = rows.shape
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received.view(world, N // world, r, C).transpose(0, 1).reshape(N // world, world * r, C)


def matrices_to_rows(matrices, world):
    """The inverse of rows_to_matrices()."""
    share, R, C = matrices.shape
    rows = matrices.view(share, world, R // world, C).transpose(0, 1).contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received.view(world * share, R // world, C)
