"""What a run will need: parameters, memory, time and disk, counted on torch's meta device without a run."""

import contextlib
import dataclasses
import functools
import time
import weakref

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop.dataloader import share_batch, windows_per_epoch
from hotloop.device import PEAK_FLOPS, device_memory
from hotloop.distributed import Env
from hotloop.memory import EAGER_LOGIT, chunks_within
from hotloop.optim import Muon, matrix_rows
from hotloop.parallel import set_blocks
from hotloop.pretrained import GPT2_SHAPES, open_weights

MFU = 0.4  # assumed share of the peak; nanoGPT, modded-nanogpt and llm.c reach 0.3 to 0.6 at 124M
MARGIN = 0.93  # usable share of a GPU's memory; the rest is CUDA's own and fragments
# {name: (key of PEAK_FLOPS, bytes of memory as PyTorch reports them, about)}
MACHINES = {'A100 40GB': ('A100', 42.3e9), 'A100 80GB': ('A100', 85.0e9), 'H100': ('H100', 85.0e9),
            'H200': ('H200', 150.1e9), 'L40S': ('L40S', 47.7e9), 'RTX 4090': ('RTX 4090', 25.3e9),
            'T4': ('T4', 15.8e9)}
# part of the model by the name of a parameter; the first match counts
PARTS = {'embeddings': ('.wte.', '.wpe.'), 'attention': ('.attn.',), 'MLP': ('.mlp.',), 'head': ('lm_head.',),
         'norms and mixes': ('.ln_', '.mix.')}


# -----------------------------------------------------------------------------
# memory of a step

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


def flash_attention(q, k, v, dropout_p=0.0, is_causal=False, enable_gqa=False):
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
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # as after the micro-batches before
    device, T = model.lm_head.weight.device, model.config.block_size
    ids = torch.zeros(batch, T, dtype=torch.int64, device=device)
    known = [ids, *model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    live, stored = LiveBytes(known), []
    hook = model.transformer.ln_f.register_forward_hook(lambda *_: stored.append(live.now))
    with live, flash_on_meta() if device.type == 'meta' else contextlib.nullcontext():
        model(ids, ids).sum().backward()
    hook.remove()
    model.zero_grad()
    return stored[0], live.peak


@functools.cache
def activation_bytes(model, batch, dtype, chunks, recompute='none'):
    """
    (bytes of activations, bytes of logits, loss and other temporaries) of a step of `batch` sequences in
    `dtype`, uncompiled, with the loss in `chunks` and blocks recomputed as set_blocks() says. One and two
    blocks are counted; the others are like them.
    """
    counts = []
    for n_layer in (1, 2):
        with torch.device('meta'):
            small = type(model)(dataclasses.replace(model.config, n_layer=n_layer))
        small.compute_dtype, small.loss_chunks = dtype, chunks
        set_blocks(small, recompute)
        counts.append(count_step(small, batch))
    (one, _), (two, peak) = counts
    return two + (model.config.n_layer - 2) * (two - one), peak - two


@functools.cache
def update_bytes(model, dtype):
    """Bytes at most that Muon allocates in an update. AdamW's fused kernel allocates nothing."""
    rows, device = matrix_rows(model), model.lm_head.weight.device
    muon = Muon(list(rows), rows, 0.0, 0.0, 0.0, Env(device=device, dtype=dtype))
    for p in rows:
        p.grad = torch.zeros_like(p)
    with LiveBytes([*rows, *(p.grad for p in rows)]) as live:
        muon.step()  # the first, which also creates the momenta
    model.zero_grad()
    return live.peak - sum(p.nbytes for p in rows)


class Need:
    """The memory that steps of a model need, in bytes, by part."""

    def __init__(self, model, cfg):
        self.model, self.asked_chunks, self.recompute = model, cfg.loss_chunks, cfg.recompute
        self.sequences = cfg.batch_size * cfg.gradient_accumulation_steps
        self.weights = 4 * model.num_params()  # float32
        self.by_muon = matrix_rows(model) if cfg.optimizer == 'muon' else ()
        # AdamW has two moments, Muon one
        self.optimizer = 2 * self.weights - sum(p.nbytes for p in self.by_muon)

    def chunks(self, batch, memory):
        """The chunks of the loss on a machine with this much memory, as choose_loss_chunks decides."""
        tokens = batch * self.model.config.block_size
        need = EAGER_LOGIT * tokens * self.model.config.vocab_size
        return chunks_within(self.asked_chunks, tokens, need, memory)

    def parts(self, batch, dtype, chunks, recompute=None):
        """{part: bytes} when a step in micro-batches of `batch` sequences needs most."""
        parts = {'weights': self.weights, 'gradients': self.weights, 'optimizer': self.optimizer}
        activations, logits = activation_bytes(self.model, batch, dtype, chunks, recompute or self.recompute)
        before = self.weights if batch < self.sequences else 0  # gradients of earlier micro-batches
        update = update_bytes(self.model, dtype) if self.by_muon else 0
        if before + activations + logits < self.weights + update:
            return parts | {'update': update}
        return parts | {'gradients': before, 'activations': activations, 'logits and loss': logits}

    def fits(self, batch, dtype, memory, recompute):
        """Whether a micro-batch fits on a machine with this much memory."""
        if activation_bytes(self.model, batch, dtype, 1, recompute)[0] > MARGIN * memory:
            return False  # counting the chunks takes longer
        parts = self.parts(batch, dtype, self.chunks(batch, memory), recompute)
        return sum(parts.values()) <= MARGIN * memory


# -----------------------------------------------------------------------------
# the report

def forecast(model, cfg, num_tokens, device, dtype):
    """
    The lines of the forecast. model: on the meta device. num_tokens: of the training split; None: unknown.
    device, dtype: of this machine.
    """
    batch, accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, 1)
    steps = None if num_tokens is None and cfg.max_epochs is not None else cfg.max_iters
    tokens = batch * accumulation * model.config.block_size  # per step
    flops_per_token = model.flops_per_token(model.config.block_size)
    gpu_dtype = torch.bfloat16 if cfg.dtype == 'auto' else getattr(torch, cfg.dtype)
    need = Need(model, cfg)
    lines = ['a forecast, counted without a run; only a run gives measured numbers', *describe_model(model),
             *describe_memory(need, batch, gpu_dtype), describe_length(model, steps, tokens, num_tokens),
             f'machine           memory     tokens/s     hours  (at {MFU:.0%} of the peak, on one device)']
    machines = [(name, gpu_dtype, size, None if gpu_dtype == torch.float32 else PEAK_FLOPS[key])
                for name, (key, size) in MACHINES.items()]
    machines.append((f'this {device.type}', dtype, device_memory(device), measure_flops(device, dtype)))
    for name, machine_dtype, memory, flops in machines:
        rate = MFU * flops / flops_per_token if flops else None
        if rate and cfg.recompute != 'none':
            rate *= 3 / 4  # a second forward pass, beside the first and a backward pass of two
        hours = f'{steps * tokens / rate / 3600:,.1f}' if steps is not None and rate else 'unknown'
        lines.append(f'{name:<12} {memory / 1e9:>8,.1f} GB {f"{rate:,.0f}" if rate else "unknown":>12} '
                     f'{hours:>9}  {advise(need, batch, accumulation, machine_dtype, memory)}')
    return lines


def model_args_of(settings):
    """The shape of the checkpoint or of the GPT-2 that a run starts from; None from scratch."""
    cfg = settings.train
    if settings.resumed:
        return settings.resumed.checkpoint['model_args']
    if cfg.init_from in GPT2_SHAPES:
        return GPT2_SHAPES[cfg.init_from]
    return None if cfg.init_from == 'scratch' else open_weights(cfg.init_from, cfg.data_dir).model_args


def describe_model(model):
    """Parameters by part, FLOPs."""
    counts = dict.fromkeys(PARTS, 0)
    for name, p in model.named_parameters():
        part = next(part for part, marks in PARTS.items() if any(mark in name for mark in marks))
        counts[part] += p.numel()
    text = ', '.join(f'{part} {n:,}' for part, n in counts.items() if n)
    tied = '; the head is the token embedding' if model.config.tie else ''
    flops = model.flops_per_token(model.config.block_size)
    return [f'parameters: {model.num_params():,} ({text}{tied})',
            f'compute: {flops / 1e6:,.1f} MFLOP per token, forward and backward']


def describe_memory(need, batch, dtype):
    """Memory by part, disk."""
    size = MACHINES['H100'][1]
    chunks = need.chunks(batch, size)
    parts = need.parts(batch, dtype, chunks)
    text = ', '.join(f'{part} {size / 1e9:,.2f}' for part, size in parts.items() if size)
    pieces = f' in {chunks} chunks' if chunks > 1 else ''
    if need.asked_chunks == 'auto':
        pieces += f' (loss_chunks=auto with {size / 1e9:.0f} GB)'
    name, checkpoint = str(dtype).removeprefix('torch.'), need.weights + need.optimizer
    return [f'memory: {sum(parts.values()) / 1e9:,.2f} GB for a micro-batch of {batch} x '
            f'{need.model.config.block_size} tokens in {name}; compiled, it needs less',
            f'  in GB: {text}{pieces}',
            f'disk: {checkpoint / 1e9:,.2f} GB for a checkpoint, {need.weights / 1e9:,.2f} GB for best.pt']


def describe_length(model, steps, tokens, num_tokens):
    """Steps, tokens and epochs."""
    if steps is None:
        return f'run: unknown steps of {tokens:,} tokens'
    epochs = 'unknown epochs'
    if num_tokens is not None:
        T = model.config.block_size
        epochs = f'{steps * (tokens // T) / windows_per_epoch(num_tokens, T):,.2f} epochs'
    return f'run: {steps:,} steps of {tokens:,} tokens, {steps * tokens:,} tokens, {epochs}'


def advise(need, batch, accumulation, dtype, memory):
    """Whether a micro-batch fits, and otherwise what to change for the same step."""
    sequences, remedies = batch * accumulation, []
    for recompute in dict.fromkeys([need.recompute, 'full']):
        fitting = (n for n in range(batch, 0, -1)
                   if sequences % n == 0 and need.fits(n, dtype, memory, recompute))
        largest = next(fitting, None)
        if largest is None:
            continue
        chunks = need.chunks(largest, memory)
        pieces = f' (the loss in {chunks} chunks)' if chunks > 1 else ''
        if largest == batch and recompute == need.recompute:
            return f'fits{pieces}'
        flags = [] if recompute == need.recompute else ['--recompute=full']
        if largest < batch:
            flags += [f'--batch_size={largest}', f'--gradient_accumulation_steps={sequences // largest}']
        remedies.append(' '.join(flags) + pieces)
    if remedies:
        return f'does not fit; the same step fits with {" or ".join(remedies)}'
    total = sum(need.parts(1, dtype, need.chunks(1, memory)).values())
    return f'does not fit: one sequence needs {total / 1e9:,.1f} GB; reduce n_layer, n_embd or block_size'


def measure_flops(device, dtype):
    """FLOP/s of a large matrix product on this machine, the best of five."""
    n = 8192 if device.type == 'cuda' else 1024
    a, best = torch.ones(n, n, device=device, dtype=dtype), float('inf')
    for _ in range(5):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
