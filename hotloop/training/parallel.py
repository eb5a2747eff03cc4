"""Recomputation and compilation of each block by itself; which micro-batches reduce gradients."""

import contextlib
import inspect
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hotloop.training.shard import is_sharded

ATTENTION = [torch.ops.aten._scaled_dot_product_flash_attention.default,
             torch.ops.aten._scaled_dot_product_cudnn_attention.default,
             torch.ops.aten._scaled_dot_product_efficient_attention.default,
             torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
             torch.ops.higher_order.flex_attention]  # not run: it needs a GPU

# torch 2.13 has a new name for an option of DistributedDataParallel, and warns of the old one
is_renamed = 'forward_sync_buffers' in inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS = {'forward_sync_buffers' if is_renamed else 'broadcast_buffers': False}


def set_blocks(model, recompute, compile_mode=None):
    """
    Sets how training runs each block of a GPT. recompute: 'none' keeps all that the backward pass needs,
    'full' only a block's inputs, and computes the rest again; 'selective' also keeps the output of attention.
    The bits are the same. compile_mode: torch.compile's, for each block and for the head with the loss, so
    that gradients leave during the backward pass; None: not compiled here.
    """
    if recompute == 'none' and compile_mode is None:
        return
    blocks = model.transformer.h
    plain = run = type(blocks[0]).forward
    if recompute != 'none':
        keep = {}
        if recompute == 'selective':
            keep = {'context_fn': partial(create_selective_checkpoint_contexts, ATTENTION)}
        draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in blocks.modules())
        run = partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=draws, **keep)
    if compile_mode:
        torch._dynamo.config.optimize_ddp = False  # it would split a block at the end of a bucket
        run = torch.compile(run, dynamic=False, mode=compile_mode)  # compiled once for all blocks
        model.loss = torch.compile(model.loss, dynamic=False, mode=compile_mode)

    def forward(block, x, x0, cos, sin, cache=None, *masks):
        return (run if cache is None else plain)(block, x, x0, cos, sin, cache, *masks)

    for block in blocks:
        block.forward = partial(forward, block)


def micro_batch(forward, shard, last):
    """
    The context of forward and backward of a micro-batch. Gradients are reduced in the last one of a step;
    with shard='full' in each, so that no process keeps all of them.
    """
    if is_sharded(forward) and shard == 'optimizer':
        forward.set_requires_gradient_sync(last)
        forward.set_reshard_after_backward(last)
    elif isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    return contextlib.nullcontext()
