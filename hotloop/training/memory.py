"""The memory of a step: chunks of the loss, a count on the meta device, the largest micro-batch."""

import dataclasses
import functools
import math
import re
import weakref
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop.system.device import device_memory, forget_trial
from hotloop.system.distributed import Env
from hotloop.system.files import counted, first_line
from hotloop.training.dataloader import kept_on_device, share_batch
from hotloop.training.optim import matrix_rows
from hotloop.training.shard import set_blocks
from hotloop.weights.lora import add_adapters, trainable

MARGIN = 0.93  # usable share of the memory; the rest is CUDA's own and fragments
EAGER_LOGIT = 12  # bytes of a logit in an uncompiled step
# tokens in a chunk of a frozen head, which has no gradient. Uncompiled on a Xeon, 128 keep the
# logits in the cache: 1.5 times the tokens/s of one piece; compiled, 0.7 times. On GPUs a guess
FROZEN_CHUNK = {'cpu': 128, 'cuda': 1024, 'mps': 1024}
MAX_TRIAL_TOKENS = 2**17  # per micro-batch; larger ones are no faster


def choose_loss_chunks(asked, num_tokens, vocab_size, env, frozen=False, memory=None):
    """
    Return the number of chunks in which a head, frozen or not, and the loss of num_tokens are
    computed. auto: one, which is fastest, unless the logits would take more than a quarter of the
    memory (None: that of the device); then as many as reduce them to a sixteenth.
    """
    if asked != 'auto':
        return min(asked, num_tokens)
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


# -----------------------------------------------------------------------------
# counting on the meta device

class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors but the `known` ones, now and at most."""

    def __init__(self, known):
        super().__init__()
        self.now = 0
        self.peak = 0
        self.sizes = {}  # {id of a storage: weak reference}
        for tensor in known:
            self.sizes[tensor.untyped_storage()._cdata] = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        """Count a storage until it is freed."""
        key = storage._cdata
        size = storage.nbytes()
        if key in self.sizes:
            return

        def freed(_):
            self.now -= size
            del self.sizes[key]
        self.sizes[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def flash_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
    """Replace F.scaled_dot_product_attention, which on the meta device stores T x T weights."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def flash_on_meta():
    return mock.patch.object(F, 'scaled_dot_product_attention', flash_attention)


def count_step(model, batch):
    """Return the bytes at most of forward and backward, beside weights, gradients and buffers."""
    for p in trainable(model):
        p.grad = torch.zeros_like(p)  # as after the micro-batches before
    device = model.lm_head.weight.device
    ids = torch.zeros(batch, model.config.block_size, dtype=torch.int64, device=device)
    gradients = [p.grad for p in trainable(model)]
    with LiveBytes([ids, *model.parameters(), *gradients, *model.buffers()]) as live:
        model(ids, ids).sum().backward()
    model.zero_grad()
    return live.peak


def model_on_meta(config, lora, dtype):
    """Make the GPT that a run in `dtype` trains, on the meta device. lora: a LoRAConfig or None."""
    meta = torch.device('meta')
    with meta:
        model = config.build()
        if lora:
            add_adapters(model, lora, {}, Env(device=meta, dtype=dtype), 0)
    model.compute_dtype = dtype
    return model


@functools.cache
def activation_bytes(config, batch, dtype, chunks, recompute='none', lora=None):
    """
    Count what an uncompiled step of `batch` sequences stores at most: activations, logits and
    temporaries. Two and three blocks are counted; the others are like the third.
    """
    # windows and soft-caps need no memory, and their kernels do not exist on the meta device
    plain = dict(window=None, window_pattern=None, rope_local_base=None, attn_softcap=0.0)
    counts = []
    for n_layer in (2, 3):
        model = model_on_meta(dataclasses.replace(config, n_layer=n_layer, **plain), lora, dtype)
        model.loss_chunks = chunks
        set_blocks(model, recompute)
        with flash_on_meta():
            counts.append(count_step(model, batch))
    two, three = counts
    return two + (config.n_layer - 2) * (three - two)


class MemoryEstimate:
    """Count the bytes that the steps of a run need. config: a GPTConfig; cfg: the TrainConfig."""

    def __init__(self, config, cfg, lora=None):
        self.model = model_on_meta(config, lora, torch.float32)
        self.config = self.model.config
        self.cfg = cfg
        self.lora = lora
        self.weights = sum(p.nbytes for p in trainable(self.model))  # float32
        self.optimizer = 2 * self.weights  # AdamW's two moments
        if cfg.optimizer == 'muon':  # which has one
            self.optimizer -= sum(p.nbytes for p in matrix_rows(self.model))
        if cfg.optimizer == 'adamw8bit':  # a byte for each moment, and two scales for 256 values
            self.optimizer = self.weights // 2 + self.weights // 128

    def parts(self, batch, env, memory, recompute):
        """Return {part: bytes} at the peak of a step on a device with this much memory."""
        parts = {'weights': self.weights, 'gradients': self.weights, 'optimizer': self.optimizer}
        if self.lora:
            model = model_on_meta(self.config, self.lora, env.dtype)
            held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
            parts = {'frozen weights': held - self.weights, 'adapters': self.weights,
                     'gradients': self.weights, 'optimizer': self.optimizer}
        chunks = choose_loss_chunks(self.cfg.loss_chunks, batch * self.config.block_size,
                                    self.config.vocab_size, env, self.lora is not None, memory)
        activations = activation_bytes(self.config, batch, env.dtype, chunks, recompute, self.lora)
        if batch == self.cfg.batch_size * self.cfg.gradient_accumulation_steps:
            # the gradients of a single micro-batch take the place of its activations
            parts['gradients'] = max(self.weights - activations, 0)
        return parts | {'activations and logits': activations}

    def fits(self, batch, env, memory, recompute):
        """Return whether a micro-batch fits on a device with this much memory."""
        return sum(self.parts(batch, env, memory, recompute).values()) <= MARGIN * memory


# -----------------------------------------------------------------------------
# the largest micro-batch

def out_of_memory(error):
    """Return whether this is an out-of-memory error; torch has no type for those of CPUs."""
    words = '(allocate|out of) memory|ALLOC_FAILED'  # the last is cuBLAS's
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def trial_fits(model, batch, env, cfg, reserve):
    """Try forward and backward of `batch` sequences beside `reserve` bytes. Returns if they fit."""
    c = model.config
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, batch * c.block_size, c.vocab_size, env,
                                           frozen=not model.lm_head.weight.requires_grad)
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
    forget_trial(env.device)
    return fits


def choose_batch_size(model, split, env, cfg, lora=None):
    """
    Return the largest micro-batch that fits and gives the same step. A GPU tries. A CPU counts,
    because Linux kills a process that uses too much. Raises ValueError if not one sequence fits.
    """
    if env.device.type == 'cpu':
        memory = device_memory(env.device) / 2  # other programs need some
        estimate = MemoryEstimate(model.config, cfg, lora)
        fits = functools.partial(estimate.fits, env=env, memory=memory, recompute=cfg.recompute)
    else:
        set_blocks(model, cfg.recompute)
        reserve = 8 * sum(p.numel() for p in trainable(model))  # the optimizer's two moments
        if kept_on_device(split, env):
            reserve += split.num_bytes
        fits = functools.partial(trial_fits, model, env=env, cfg=cfg, reserve=reserve)
    micro_batch, accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps,
                                            env.world)
    limit = max(MAX_TRIAL_TOKENS // split.T, 1)
    batch = largest_batch(micro_batch * accumulation, limit, lambda n: not env.any(not fits(n)))
    if batch is None:
        raise ValueError(f'auto_batch=True: not even one sequence of {split.T} tokens fits in the '
                         f'memory of {env.device}; use a smaller model or block_size, '
                         '--loss_chunks=16 or --recompute=full')
    return batch


def largest_batch(sequences, limit, fits):
    """Return the largest divisor of `sequences` up to `limit` that fits; None if 1 does not."""
    for batch in range(min(sequences, limit), 0, -1):
        if sequences % batch == 0 and fits(batch):
            return batch
    return None


def memory_advice(batches, env, error):
    """Return the message for a model (without batches) or a micro-batch that does not fit."""
    if batches is None:
        return (f'the model does not fit in the memory of {env.device} ({first_line(error)}); '
                'reduce n_layer, n_embd, block_size or batch_size')
    return (f'a micro-batch of {counted(batches.micro_batch, "sequence")} of {batches.split.T} '
            f'tokens does not fit in the memory of {env.device}; --auto_batch finds the largest that '
            'does, for the same step, and --recompute=full needs less memory')
