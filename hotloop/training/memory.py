"""The memory of a step: the chunks of the loss, the largest micro-batch by trial, running out."""

import math
import re

import torch

from hotloop.system.device import device_memory
from hotloop.system.text import counted
from hotloop.training.dataloader import kept_on_device, share_batch
from hotloop.training.parallel import set_blocks
from hotloop.weights.lora import trainable

EAGER_LOGIT = 12  # bytes of a logit in an uncompiled step
# tokens in a chunk of a frozen head, which has no gradient. Uncompiled on a Xeon, 128 keep the
# logits in the cache: 1.5 times the tokens/s of one piece; compiled, 0.7 times. On GPUs a guess
FROZEN_CHUNK = {'cpu': 128, 'cuda': 1024, 'mps': 1024}
MAX_TRIAL_TOKENS = 2**17  # per micro-batch; larger ones are no faster


def choose_loss_chunks(asked, num_tokens, vocab_size, env, frozen=False, memory=None, ahead=False):
    """
    Return the number of chunks in which a head, frozen or not, and the loss of num_tokens are
    computed. auto: one, which is fastest, unless the logits would take more than a quarter of the
    memory (None: that of the device); then as many as reduce them to a sixteenth. ahead: multi_token
    needs all of them at once.
    """
    if asked != 'auto':
        return min(asked, num_tokens)
    if ahead:
        return 1
    memory = memory or device_memory(env.device)
    per_logit = EAGER_LOGIT
    if env.compile:  # logit and gradient in the dtype; a compiled step stores no float32 copies
        per_logit = 2.5 * env.dtype.itemsize
    need = per_logit * num_tokens * vocab_size
    chunks = 1
    if need > memory / 4:
        chunks = math.ceil(16 * need / memory)
    small = 2**28 if env.device.type == 'cpu' and not env.compile else 2**32
    if frozen and need > small:
        chunks = max(chunks, math.ceil(num_tokens / FROZEN_CHUNK[env.device.type]))
    return min(chunks, num_tokens)


def set_loss_chunks(model, num_tokens, cfg, env):
    """Set the chunks of the loss of num_tokens, and the weights of later tokens if multi_token is set."""
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, num_tokens, model.config.vocab_size, env,
                                           not model.lm_head.weight.requires_grad, ahead=cfg.multi_token > 0)
    if cfg.multi_token:
        if model.loss_chunks > 1:
            raise ValueError(f'multi_token={cfg.multi_token} cannot be combined with '
                             f'loss_chunks={model.loss_chunks}; use --loss_chunks=1 or --multi_token=0')
        model.ahead = torch.zeros(2, device=env.device)


def choose_batch_size(model, split, env, cfg):
    """Return the largest micro-batch that gives the same step and fits, by trial, on all processes."""
    if env.device.type == 'cpu':  # Linux kills a process that uses too much
        raise ValueError('auto_batch=True tries sizes on a GPU; on a CPU use --auto_batch=False')
    set_blocks(model, cfg.recompute)
    reserve = 8 * sum(p.numel() for p in trainable(model))  # the optimizer's two moments
    if kept_on_device(split, env):
        reserve += split.num_bytes
    micro_batch, accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps,
                                            env.world)
    sequences = micro_batch * accumulation
    for batch in range(min(sequences, max(MAX_TRIAL_TOKENS // split.T, 1)), 0, -1):
        if sequences % batch == 0 and not env.any(not trial_fits(model, batch, env, cfg, reserve)):
            return batch
    raise ValueError(f'auto_batch=True: not even one sequence of {split.T} tokens fits in the memory '
                     f'of {env.device}; use a smaller model or block_size, or --recompute=full')


def trial_fits(model, batch, env, cfg, reserve):
    """Try forward and backward of `batch` sequences beside `reserve` bytes. Returns if they fit."""
    c = model.config
    set_loss_chunks(model, batch * c.block_size, cfg, env)
    fits = True
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
        fits = False
    model.zero_grad()
    if env.device.type == 'cuda':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(env.device)
    return fits


def out_of_memory(error):
    """Return whether this is an out-of-memory error; torch has no type for those of CPUs."""
    words = '(allocate|out of) memory|ALLOC_FAILED'  # the last is cuBLAS's
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def memory_advice(batches, env):
    """Return the message for a model (without batches) or a micro-batch that does not fit."""
    if batches is None:
        return (f'the model does not fit in the memory of {env.device}; reduce n_layer, n_embd or '
                'block_size')
    remedy = '--auto_batch finds the largest that does'
    if env.device.type == 'cpu':
        remedy = 'halve --batch_size and double --gradient_accumulation_steps'
    return (f'a micro-batch of {counted(batches.micro_batch, "sequence")} of {batches.split.T} tokens '
            f'does not fit in the memory of {env.device}; {remedy}, for the same step, or --recompute=full')
