"""What fits into memory: batch_size=auto, chunks of the loss."""

import dataclasses
import math
import re

import numpy as np
import torch

from hotloop.dataloader import kept_on_device, share_batch
from hotloop.device import device_memory


def choose_loss_chunks(asked, num_tokens, vocab_size, memory):
    """
    In how many parts a micro-batch's head and loss are computed: one, which is fastest, unless that would take over a
    quarter of the memory; then as many as make it a sixteenth.
    """
    need = 12 * num_tokens * vocab_size  # bytes of the logits, of their gradients, and of float32 copies of both
    if asked != 'auto':
        return min(asked, num_tokens)
    return 1 if need <= memory / 4 else min(math.ceil(16 * need / memory), num_tokens)


def out_of_memory(error):
    """Whether an exception says that memory was asked for and not there; on CPUs torch has no type for that."""
    return isinstance(error, MemoryError) or re.search('(allocate|out of) memory', str(error)) is not None


def batch_fits(model, batch, env, cfg, reserve):
    """Whether forward and backward of so many sequences fit beside `reserve` bytes; all processes answer alike."""
    c, failed = model.config, 0.0
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, batch * c.block_size, c.vocab_size,
                                           device_memory(env.device))
    try:
        held = torch.empty(reserve, dtype=torch.uint8, device=env.device)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # those of the micro-batches before
        ids = torch.zeros(batch, c.block_size, dtype=torch.int64, device=env.device)
        model(ids, ids).sum().backward()  # compiled, it needs less
        if env.device.type == 'cuda':
            torch.cuda.synchronize(env.device)
        del held
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        failed = 1.0
    model.zero_grad()
    if env.device.type == 'cuda':
        torch.cuda.empty_cache()
    return not env.sum(np.array([failed])).any()


def largest_batch(model, sequences, most, env, cfg, reserve):
    """
    The largest micro-batch up to `most` that fits and divides `sequences`, one process's share of a step; None where
    not one does. At most 131,072 tokens, from where on nothing gets faster. CPUs promise memory that they do not have
    and kill who takes it, so there it is estimated first: 12 bytes a logit, 40 a channel of each layer, of half of all.
    """
    c = model.config
    most = min(most, max(2**17 // c.block_size, 1))
    if env.device.type == 'cpu':
        each = c.block_size * (12 * c.vocab_size + 40 * c.n_layer * c.n_embd)
        most = min(most, max((device_memory(env.device) // 2 - reserve) // each, 1))
    sizes = [n for n in range(min(sequences, most), 0, -1) if sequences % n == 0]
    return next((n for n in sizes if batch_fits(model, n, env, cfg, reserve)), None)


def choose_batch_size(model, split, env, cfg):
    """
    Puts the largest micro-batch that fits in place of cfg's, for the same step. What the optimizers and the data on
    the device will take is set aside. Returns what to say.
    """
    total = cfg.batch_size * cfg.gradient_accumulation_steps
    if cfg.eval_iters is not None:  # counts batches, and means those that were asked for
        cfg.eval_tokens, cfg.eval_iters = cfg.eval_iters * cfg.batch_size * split.T, None
    mine = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, env.world)
    reserve = 8 * model.num_params() + (split.num_bytes() if kept_on_device(split, cfg, env) else 0)
    found = largest_batch(model, math.prod(mine), total, env, cfg, reserve)
    if found is None:
        raise ValueError(f'batch_size=auto: not even one sequence of {split.T} tokens fits the memory of '
                         f'{env.device}; the model or block_size must be smaller, or try --loss_chunks=16')
    cfg.batch_size, cfg.gradient_accumulation_steps = found, total // found
    return f'batch_size=auto: {found}, gradient_accumulation_steps={total // found}'


def memory_advice(run):
    """What to say of a batch_size that does not fit, with one that does."""
    batches, alone = run.batches, dataclasses.replace(run.env, world=1)
    reserve = 0 if any(o.state for o in run.optimizers) else 8 * run.model.num_params()
    found = batches.micro_batch > 1 and largest_batch(run.model, batches.micro_batch * batches.accumulation,
                                                      batches.micro_batch - 1, alone, run.cfg, reserve)
    said = (f'a micro-batch of {batches.micro_batch} sequences of {run.val.T} tokens does not fit the memory of '
            f'{run.env.device}; ')
    if not found:
        return f'{said}neither does a smaller one: the model or block_size must be smaller, or try --loss_chunks=16'
    return (f'{said}--batch_size={found} --gradient_accumulation_steps={batches.global_batch // found} does and is the '
            'same step, as --batch_size=auto finds by itself')
