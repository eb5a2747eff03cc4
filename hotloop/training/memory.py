"""What fits in memory: auto_batch and the chunks of the loss."""

import math
import re

import numpy as np
import torch

from hotloop.system.device import device_memory, forget_trial
from hotloop.system.files import counted, first_line
from hotloop.training.dataloader import kept_on_device, share_batch
from hotloop.training.shard import set_blocks
from hotloop.weights.lora import trainable

EAGER_LOGIT = 12  # bytes of a logit in an uncompiled step
# tokens in a chunk of a frozen head, which has no gradient. Uncompiled on a Xeon, 128 keep the logits in the
# cache: 1.5 times the tokens/s of one piece; compiled, 0.7 times. For GPUs these are estimates
FROZEN_CHUNK = {'cpu': 128, 'cuda': 1024, 'mps': 1024}
FROZEN_LOGITS = {False: 2**28, True: 2**32}  # bytes from which on it is chunked, by whether it is compiled
MAX_TRIAL_TOKENS = 2**17  # per micro-batch; larger ones are no faster


def choose_loss_chunks(asked, num_tokens, vocab_size, env, frozen=False):
    """The number of chunks in which a head, frozen or not, and the loss of num_tokens are computed here."""
    # bytes: logit and gradient in bf16, float32 copies of both; a compiled step does not store the copies
    per_logit = 2.5 * env.dtype.itemsize if env.compile else EAGER_LOGIT
    need = per_logit * num_tokens * vocab_size
    chunks = chunks_within(asked, num_tokens, need, device_memory(env.device))
    if asked == 'auto' and frozen and need > FROZEN_LOGITS[env.compile]:
        chunks = max(chunks, math.ceil(num_tokens / FROZEN_CHUNK[env.device.type]))
    return chunks


def chunks_within(asked, num_tokens, need, memory):
    """
    The number of chunks, `asked` or by need. auto: one, which is fastest, unless the `need` in bytes is over
    a quarter of the memory; then as many as reduce it to a sixteenth.
    """
    chunks = asked
    if asked == 'auto':
        chunks = 1 if need <= memory / 4 else math.ceil(16 * need / memory)
    return min(chunks, num_tokens)


def out_of_memory(error):
    """Whether an exception is an out-of-memory error; torch has no type for these on CPUs."""
    words = '(allocate|out of) memory|ALLOC_FAILED'  # the last is cuBLAS's, which starts again for backward
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def batch_fits(model, batch, env, cfg, reserve):
    """Whether forward and backward of `batch` sequences fit beside `reserve` bytes, on all processes."""
    c, failed, loss_chunks = model.config, 0.0, model.loss_chunks
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, batch * c.block_size, c.vocab_size, env,
                                           frozen=not model.lm_head.weight.requires_grad)
    try:
        reserved = torch.empty(reserve, dtype=torch.uint8, device=env.device)
        for p in trainable(model):
            p.grad = torch.zeros_like(p)  # of the micro-batches before
        ids = torch.zeros(batch, c.block_size, dtype=torch.int64, device=env.device)
        model(ids, ids).sum().backward()  # eager; compiled, it needs less
        del reserved
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        failed = 1.0
    model.zero_grad()
    model.loss_chunks = loss_chunks
    forget_trial(env.device)
    return env.sum(np.array([failed]))[0] == 0


def choose_batch_size(model, split, env, cfg, fits=batch_fits):
    """The largest micro-batch that fits and gives the same step, found by trials. ValueError if none fits."""
    micro_batch, accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, env.world)
    sequences, c = micro_batch * accumulation, model.config  # of this process
    reserve = 8 * sum(p.numel() for p in trainable(model))  # the optimizer's two moments
    if kept_on_device(split, env):
        reserve += split.num_bytes
    set_blocks(model, cfg.recompute)
    limit = min(sequences, max(MAX_TRIAL_TOKENS // c.block_size, 1))
    if env.device.type == 'cpu':
        # Linux overcommits memory and kills the process that uses it. So a CPU's limit is
        # estimated: half of its memory, at 12 bytes for each logit and 40 for each channel of each layer,
        # or what recompute keeps of all layers but one
        kept = {'none': 40, 'selective': 8, 'full': 4}[cfg.recompute]
        channel_bytes = 40 + kept * (c.n_layer - 1)
        sequence_bytes = c.block_size * (12 * c.vocab_size + channel_bytes * c.n_embd)
        limit = min(limit, max((device_memory(env.device) // 2 - reserve) // sequence_bytes, 1))
    for batch in range(limit, 0, -1):
        if sequences % batch == 0 and fits(model, batch, env, cfg, reserve):
            return batch
    raise ValueError(f'auto_batch=True: not even one sequence of {split.T} tokens fits in the memory of '
                     f'{env.device}; use a smaller model or block_size, --loss_chunks=16 or --recompute=full')


def memory_advice(batches, env, error):
    """Return the message for a model (without batches), a step or a micro-batch that does not fit."""
    if batches is None:
        return (f'the model does not fit in the memory of {env.device} ({first_line(error)}); '
                'reduce n_layer, n_embd, block_size or batch_size')
    if isinstance(error, MemoryError):  # numpy's, for the windows of a step; torch has its own
        return (f'a step of {counted(batches.global_batch, "sequence")}, batch_size x '
                f'gradient_accumulation_steps, does not fit in memory: {first_line(error)}')
    return (f'a micro-batch of {counted(batches.micro_batch, "sequence")} of {batches.split.T} tokens '
            f'does not fit in the memory of {env.device}; --auto_batch finds the largest that does, '
            'for the same step, and --recompute=full needs less memory')
