"""The memory that a step needs, counted on torch's meta device without a run."""

import contextlib
import dataclasses
import functools
import math
import weakref

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop.system.device import device_memory
from hotloop.system.distributed import Env
from hotloop.training.memory import EAGER_LOGIT, FROZEN_CHUNK, FROZEN_LOGITS, chunks_within
from hotloop.training.optim import Muon, matrix_rows
from hotloop.training.shard import set_blocks
from hotloop.weights.lora import add_adapters, trainable

MARGIN = 0.93  # usable share of a GPU's memory; the rest is CUDA's own and fragments


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist, now and at most, except those of `known` tensors."""

    def __init__(self, known):
        super().__init__()
        self.now, self.peak, self.sizes = 0, 0, {}  # {id of a storage: weak reference}
        for tensor in known:
            self.sizes[tensor.untyped_storage()._cdata] = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        """Counts a storage until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key in self.sizes:
            return

        def freed(_):
            self.now -= size
            del self.sizes[key]
        self.sizes[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def flash_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
    """In place of F.scaled_dot_product_attention, which on the meta device would store all T x T weights."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


@contextlib.contextmanager
def flash_on_meta():
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = flash_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def count_step(model, batch):
    """
    (bytes stored for the backward pass when the loss begins, bytes at most) of forward and backward of
    `batch` sequences, beside weights, gradients and buffers. On the meta device nothing is computed.
    """
    for p in trainable(model):
        p.grad = torch.zeros_like(p)  # as after the micro-batches before
    device, T = model.lm_head.weight.device, model.config.block_size
    ids = torch.zeros(batch, T, dtype=torch.int64, device=device)
    known = [ids, *model.parameters(), *(p.grad for p in trainable(model)), *model.buffers()]
    live, stored = LiveBytes(known), []
    hook = model.transformer.ln_f.register_forward_hook(lambda *_: stored.append(live.now))
    with live, flash_on_meta() if device.type == 'meta' else contextlib.nullcontext():
        model(ids, ids).sum().backward()
    hook.remove()
    model.zero_grad()
    return stored[0], live.peak


def as_trained(kind, config, lora, dtype):
    """
    (the GPT that a run in `dtype` trains, of the class `kind` and on the meta device; the record of its
    adapters, None without lora).
    """
    meta = torch.device('meta')
    with meta:
        model = kind(config)
        record = add_adapters(model, lora, {}, Env(device=meta, dtype=dtype), 0) if lora else None
    return model, record


def activation_bytes(model, batch, dtype, chunks, recompute='none', lora=None):
    """
    (bytes of activations, bytes of logits, loss and other temporaries) of a step of `batch` sequences in
    `dtype`, uncompiled, with the loss in `chunks`, blocks recomputed as set_blocks() says and the adapters of
    `lora` if it is given. One and two blocks are counted; the others are like the second.
    """
    counts = []
    for n_layer in (1, 2):
        # windows and soft-caps take the memory of none, and their kernels are not on this device
        config = dataclasses.replace(model.config, n_layer=n_layer, window=None, window_pattern=None,
                                     rope_local_base=None, attn_softcap=0.0)
        small, _ = as_trained(type(model), config, lora, dtype)
        small.compute_dtype, small.loss_chunks = dtype, chunks
        set_blocks(small, recompute)
        counts.append(count_step(small, batch))
    (one, _), (two, peak) = counts
    return two + (model.config.n_layer - 2) * (two - one), peak - two


@functools.cache
def update_bytes(model, dtype):
    """Bytes at most that Muon allocates in an update. AdamW's fused kernel allocates nothing."""
    rows, device = matrix_rows(model), model.lm_head.weight.device
    muon = Muon(rows, 0.0, 0.0, 0.0, Env(device=device, dtype=dtype))
    for p in rows:
        p.grad = torch.zeros_like(p)
    with LiveBytes([*rows, *(p.grad for p in rows)]) as live:
        muon.step()  # the first, which also creates the momenta
    model.zero_grad()
    return live.peak - sum(p.nbytes for p in rows)


class Need:
    """The memory that steps of a model need, in bytes, by part. lora: the LoRAConfig of adapters, or None."""

    def __init__(self, model, cfg, lora=None, world=1):
        self.sharing = cfg.shard, world
        self.model, self.asked_chunks, self.recompute = model, cfg.loss_chunks, cfg.recompute
        self.lora, self.counted = lora, {}
        self.sequences = cfg.batch_size * cfg.gradient_accumulation_steps
        self.weights = 4 * model.num_params()  # those that are trained, in float32
        if lora:
            self.count_adapters()
        self.by_muon = matrix_rows(model) if cfg.optimizer == 'muon' else ()
        # AdamW has two moments, Muon one
        self.optimizer = 2 * self.weights - sum(p.nbytes for p in self.by_muon)
        if cfg.optimizer == 'adamw8bit':  # of a byte each, and two scales for 256 values
            self.optimizer = self.weights // 2 + self.weights // 128

    def count_adapters(self):
        """Sets weights; frozen_matrices, values in the run's dtype; frozen_rest, bytes in NF4 or float32."""
        kind, config = type(self.model), self.model.config
        self.adapted, self.record = as_trained(kind, config, self.lora, torch.float32)
        self.weights = sum(p.nbytes for p in trainable(self.adapted))
        frozen = [p for p in self.adapted.parameters() if not p.requires_grad]
        self.frozen_matrices = sum(p.numel() for p in frozen if p.dim() > 1)
        held = sum(tensor.nbytes for tensor in [*frozen, *self.adapted.buffers()])
        self.frozen_rest = held - 4 * self.frozen_matrices

    def standing(self, dtype, shard, world):
        """Bytes of weights, gradients and optimizer state on one of `world` processes with this `shard`."""
        if world == 1:
            return 2 * self.weights + self.optimizer
        blocks = 4 * sum(p.numel() for p in self.model.transformer.h.parameters())
        block, rest = blocks // self.model.config.n_layer, self.weights - blocks
        if shard == 'optimizer':  # weights in the compute dtype and gradients are complete
            held, gathered, gradients = self.weights + self.optimizer, blocks, self.weights
        else:  # of one block, and the weights of the next one
            held, gathered, gradients = 2 * self.weights + self.optimizer, 2 * block, block + rest
        return held // world + gathered * dtype.itemsize // 4 + rest + gradients

    def chunks(self, batch, memory):
        """The chunks of the loss on a machine with this much memory, as choose_loss_chunks decides."""
        tokens = batch * self.model.config.block_size
        need = EAGER_LOGIT * tokens * self.model.config.vocab_size
        chunks = chunks_within(self.asked_chunks, tokens, need, memory)
        # of a frozen head: as in a compiled step in 16 bits on a GPU; no other step has fewer
        if self.lora and self.asked_chunks == 'auto' and need * 5 / EAGER_LOGIT > FROZEN_LOGITS[True]:
            chunks = max(chunks, math.ceil(tokens / FROZEN_CHUNK['cuda']))
        return chunks

    def activations(self, batch, dtype, chunks, recompute):
        """activation_bytes(), counted once."""
        key = batch, dtype, chunks, recompute
        if key not in self.counted:
            self.counted[key] = activation_bytes(self.model, *key, self.lora)
        return self.counted[key]

    def parts(self, batch, dtype, chunks, recompute=None):
        """{part: bytes} when a step in micro-batches of `batch` sequences needs most."""
        parts = {'weights': self.weights, 'gradients': self.weights, 'optimizer': self.optimizer}
        if self.lora:
            frozen = self.frozen_matrices * dtype.itemsize + self.frozen_rest
            parts = {'frozen weights': frozen, 'adapters': parts.pop('weights'), **parts}
        activations, logits = self.activations(batch, dtype, chunks, recompute or self.recompute)
        before = self.weights if batch < self.sequences else 0  # gradients of earlier micro-batches
        update = update_bytes(self.model, dtype) if self.by_muon else 0
        if before + activations + logits < self.weights + update:
            return parts | {'update': update}
        return parts | {'gradients': before, 'activations': activations, 'logits and loss': logits}

    def fits(self, batch, dtype, memory, recompute):
        """Whether a micro-batch fits on a machine with this much memory."""
        if self.activations(batch, dtype, 1, recompute)[0] > MARGIN * memory:
            return False  # counting the chunks takes longer
        chunks = self.chunks(batch, memory)
        shard, world = self.sharing
        if shard != 'none' and world > 1:
            need = self.standing(dtype, shard, world)
            need += sum(self.activations(batch, dtype, chunks, recompute))
        else:
            need = sum(self.parts(batch, dtype, chunks, recompute).values())
        return need <= MARGIN * memory


def fits_sharded(model, batch, env, cfg, reserve):
    """
    batch_fits() of a model that will be sharded, by counting: after a trial that failed on one process, the
    others would wait for it.
    """
    data = reserve - 8 * model.num_params()
    need, memory = Need(model, cfg, world=env.world), device_memory(env.device) - data
    fits = need.fits(batch, env.dtype, memory, cfg.recompute)
    return not env.any(not fits)
