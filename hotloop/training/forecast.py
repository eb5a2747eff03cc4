"""What a run will need: parameters, FLOPs, memory, time and disk, counted without a run."""

import dataclasses
import functools
import weakref
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop.data.dataset import Dataset, open_datasets
from hotloop.data.sources import CORPORA, PLAIN
from hotloop.system.device import PEAK_FLOPS, choose_device, choose_dtype, device_memory, measure_flops
from hotloop.system.distributed import Env
from hotloop.system.text import duration, file_size
from hotloop.training.checkpoint import KEEP, RunState, state_from
from hotloop.training.dataloader import open_split
from hotloop.training.memory import choose_loss_chunks
from hotloop.training.optim import matrix_rows, tables_of
from hotloop.training.parallel import set_blocks
from hotloop.training.recipes import flops_share
from hotloop.training.schedule import plan_schedule
from hotloop.weights.families import model_args_from
from hotloop.weights.load import shape_of
from hotloop.weights.lora import add_adapters, trainable

MARGIN = 0.93  # usable share of the memory; the rest is CUDA's own and fragments
MFU = 0.4  # assumed share of the peak; nanoGPT, modded-nanogpt and llm.c reach 0.3 to 0.6 at 124M
# seconds of a micro-batch per block on a GPU at least: 60 kernels of 5 microseconds. Assumed, not measured
LAUNCHES = 60 * 5e-6
# {name: (key of PEAK_FLOPS, bytes of memory as PyTorch reports them, about)}
MACHINES = {'A100 40GB': ('A100', 42.3e9), 'A100 80GB': ('A100', 85.0e9), 'H100': ('H100', 85.0e9),
            'H200': ('H200', 150.1e9), 'L40S': ('L40S', 47.7e9), 'RTX 4090': ('RTX 4090', 25.3e9),
            'T4': ('T4', 15.8e9)}
# the config.json of models that cards name, without what transformers assumes
PUBLISHED = {'google/gemma-2-2b': dict(
    model_type='gemma2', num_hidden_layers=26, hidden_size=2304, num_attention_heads=8,
    num_key_value_heads=4, intermediate_size=9216, vocab_size=256000, max_position_embeddings=8192,
    rms_norm_eps=1e-6, hidden_activation='gelu_pytorch_tanh')}


class Flops(NamedTuple):
    """FLOPs per token."""
    forward: float
    training: float  # of forward and backward


def flops_of(model, T):
    """
    Count the Flops per token in sequences of T: 2 forward and 6 in training for each weight that
    multiplies (not embeddings), plus causal attention over (T + 1) / 2 positions on average, or fewer
    where a window ends before that.
    Frozen weights have no gradients; adapters cost as much as any other weights.
    """
    c = model.config
    weights = c.n_embd * (c.n_layer * c.n_ff * (2 + c.is_gated) + c.vocab_size)
    attention = 0.0
    for mixer, window in zip(c.mixers(), c.windows(), strict=True):
        matrices, more = mixer_products(c, mixer, window, T)
        weights += matrices
        attention += more
    adapters = sum(p.numel() for name, p in model.named_parameters() if '.lora_' in name)
    forward = 2 * (weights + attention + adapters)
    if adapters:
        head = c.n_embd * c.vocab_size * model.lm_head.weight.requires_grad
        return Flops(forward, forward + 2 * (weights + head) + 4 * (attention + adapters))
    return Flops(forward, 3 * forward)


def mixer_products(c, mixer, window, T):
    """
    Count the multiply-adds of a layer's mixer for a token, on average over T positions. Returns those
    of its matrices, and the others.
    """
    if mixer == 'C':
        return 3 * c.n_embd**2, c.num_taps * c.n_embd
    if mixer == 'E':
        changes = c.num_eigenstates * (2 if c.eigen == 'paper' else 1)
        return c.n_embd * (4 * c.num_eigenstates + changes + c.n_embd), 4 * c.num_eigenstates
    matrices = 2 * c.n_embd * (c.n_head + c.n_kv_head) * c.head_dim
    if c.head_gate:
        matrices += c.n_head * c.gate_channels
    if mixer == 'K':  # features of queries and keys, sums of values, their products with queries
        features = c.num_features or 2 * c.head_dim
        return matrices, 4 * c.n_head * c.head_dim * features
    W = min(window or T, T)
    keys = W - W * (W - 1) / (2 * T)
    return matrices, 2 * c.n_head * c.head_dim * keys  # q k^T, weights v


# -----------------------------------------------------------------------------
# counting on the meta device

class LiveBytes(TorchDispatchMode):
    """Count the bytes at most of all tensors but the `known` ones."""

    def __init__(self, known):
        super().__init__()
        self.peak = 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}  # of storages, by id

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def flash_on_meta():
    """Replace F.scaled_dot_product_attention, which on the meta device stores T x T weights."""
    def attend(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    return mock.patch.object(F, 'scaled_dot_product_attention', attend)


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
def activation_bytes(config, batch, dtype, chunks, recompute='none', lora=None, ahead=False):
    """
    Count what an uncompiled step of `batch` sequences stores at most: activations, logits and
    temporaries. Blocks are counted for two and three times their pattern of mixers; others are alike.
    ahead: with the loss of later tokens (multi_token).
    """
    # windows and soft-caps need no memory, and their kernels do not exist on the meta device
    plain = dict(window=None, window_pattern=None, rope_local_base=None, attn_softcap=0.0)
    peaks = []
    period = len(config.mixer_pattern())
    for times in (2, 3):
        shallow = dataclasses.replace(config, n_layer=times * period, **plain)
        model = model_on_meta(shallow, lora, dtype)
        model.loss_chunks = chunks
        if ahead:
            model.ahead = torch.zeros(2, device='meta')
        set_blocks(model, recompute)
        ids = torch.zeros(batch, config.block_size, dtype=torch.int64, device='meta')
        known = [ids, *model.parameters(), *model.buffers()]
        for p in trainable(model):
            p.grad = torch.zeros_like(p)  # as after the micro-batches before
            known.append(p.grad)
        with flash_on_meta(), LiveBytes(known) as live:
            model(ids, ids).sum().backward()
        peaks.append(live.peak)
    return round(peaks[0] + (config.n_layer / period - 2) * (peaks[1] - peaks[0]))


def memory_of(config, cfg, lora, env, memory):
    """
    Return {part: bytes} at the peak of a step on a device with this much memory. config: a
    GPTConfig; cfg: the TrainConfig; lora: a LoRAConfig or None.
    """
    model = model_on_meta(config, lora, env.dtype)
    weights = sum(p.nbytes for p in trainable(model))  # float32
    parts = {'weights': weights}
    if lora:
        held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        parts = {'frozen weights': held - weights, 'adapters': weights}
    optimizer = 2 * weights  # AdamW's two moments
    if cfg.optimizer == 'muon':  # which has one
        optimizer -= sum(p.nbytes for p in matrix_rows(model))
    if cfg.optimizer == 'adamw8bit':  # a byte for each moment, and two scales for 256 values
        optimizer = weights // 2 + weights // 128
    c = model.config
    frozen = not model.lm_head.weight.requires_grad
    ahead = cfg.multi_token > 0
    chunks = choose_loss_chunks(cfg.loss_chunks, cfg.batch_size * c.block_size, c.vocab_size, env, frozen,
                                memory, ahead)
    activations = activation_bytes(c, cfg.batch_size, env.dtype, chunks, cfg.recompute, lora, ahead)
    gradients = weights
    if cfg.gradient_accumulation_steps == 1:  # they take the place of activations
        gradients = max(weights - activations, 0)
    if env.device.type != 'cuda':
        parts['copy for a save'] = weights + optimizer
    return {**parts, 'gradients': gradients, 'optimizer': optimizer, 'activations and logits': activations}


# -----------------------------------------------------------------------------
# the forecast

def model_args_of(settings):
    """Return the shape of the weights that a run starts from; None from scratch."""
    cfg = settings.train
    if settings.latest:
        return settings.latest.checkpoint['model_args']
    if cfg.init_from in PUBLISHED:
        return model_args_from(PUBLISHED[cfg.init_from], cfg.init_from)
    return None if cfg.init_from == 'scratch' else shape_of(cfg.init_from)


def dry_run(settings, model_of):
    """
    Return the forecast of a command, in lines. Nothing is downloaded or written.
    model_of(settings, dataset): the model, on the meta device and without adapters.
    """
    cfg = settings.train
    lora = settings.lora if settings.lora.lora_rank else None
    lines = ['a forecast, not a measurement']
    num_windows = None  # of an epoch; None: unknown
    try:
        datasets = open_datasets(cfg.dataset, cfg.data_dir)
    except ValueError as e:
        size = 50304
        tokenizer = CORPORA.get(cfg.dataset, PLAIN).tokenizer
        if tokenizer.startswith('bpe:'):
            size = int(tokenizer.removeprefix('bpe:'))
        model = model_of(settings, Dataset(cfg.dataset, '', {'vocab_size': size, 'foreign': True}, 1.0))
        vocab_size = model.config.vocab_size
        lines.append(f'note: the forecast assumes a vocabulary of {vocab_size:,} ids, because {e}')
    else:
        model = model_of(settings, datasets[0])
        split = open_split(datasets, 'train', model.config.block_size, cfg.pack_rows)
        num_windows = split.num_windows
    c = model.config
    forward, both = flops_of(model_on_meta(c, lora, torch.float32), c.block_size)
    dtype = torch.bfloat16 if cfg.dtype == 'auto' else getattr(torch, cfg.dtype)
    gpu = Env(device=torch.device('cuda'), dtype=dtype)
    parts = memory_of(c, cfg, lora, gpu, MACHINES['H100'][1])
    listed = ', '.join(f'{part} {file_size(size)}' for part, size in parts.items() if size)
    weights = parts['adapters' if lora else 'weights']
    save = weights + parts['optimizer']
    state = state_from(settings.latest.checkpoint) if settings.latest else RunState()
    in_tables = sum(p.numel() for p in tables_of(model))
    steps, length = length_of(cfg, c.block_size, num_windows, state)
    lines += [f'parameters: {model.num_params():,}, {in_tables:,} in embeddings',
              f'compute: {both / 1e6:,.1f} MFLOP per token, forward and backward',
              f'memory: {file_size(sum(parts.values()))} on an H100 for a micro-batch of {cfg.batch_size} x '
              f'{c.block_size} tokens in {str(dtype).removeprefix("torch.")}, or less if compiled: {listed}',
              f'disk: {file_size((KEEP + 1) * save + weights)}: {KEEP} checkpoints of {file_size(save)}, '
              f'another while it is written, and best.pt of {file_size(weights)}',
              f'run: {length}']
    if cfg.recompute != 'none':
        both += forward
    return lines + machine_table(c, cfg, lora, gpu, both, steps)


def length_of(cfg, T, num_windows, state):
    """Return the steps that a run has left, None if they are unknown, and its length as text."""
    batch = cfg.batch_size * cfg.gradient_accumulation_steps
    if cfg.time_budget is not None or (num_windows is None and cfg.max_epochs is not None):
        return None, f'an unknown number of steps of {batch * T:,} tokens'
    steps = plan_schedule(cfg, num_windows, batch, state.shift(T, batch), state).max_iters
    text = f'{steps:,} steps of {batch * T:,} tokens, {steps * batch * T:,} tokens'
    if num_windows is not None:
        text += f', {steps * batch / num_windows:,.2f} epochs'
    if state.iter_num:
        text += f'; {state.iter_num:,} are done'
    return max(steps - state.iter_num, 0), text


def machine_table(config, cfg, lora, gpu, flops_per_token, steps):
    """List the lines about memory, speed and time on seven GPUs and on this machine."""
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * config.block_size  # of a step
    machines = []
    for name, (key, memory) in MACHINES.items():
        machines.append((name, gpu, memory, None if gpu.dtype == torch.float32 else PEAK_FLOPS[key]))
    missing = []
    try:
        device, _ = choose_device(cfg.device)
        dtype, _ = choose_dtype(cfg.dtype, device, training=True)
        flops = measure_flops(device, dtype)
        if device.type == 'cpu':
            flops *= flops_share(config.n_embd) / MFU
        machines.append((f'this {device.type}', Env(device=device, dtype=dtype), device_memory(device),
                         flops))
    except ValueError as e:
        missing.append(f'this machine: {e}')
    lines = [f'machine           memory     tokens/s       time  (one device at {MFU:.0%} of its peak)']
    for name, env, memory, peak in machines:
        speed = time = 'unknown'
        if peak:
            seconds = tokens * flops_per_token / (MFU * peak)
            if env.device.type == 'cuda':
                seconds = max(seconds, cfg.gradient_accumulation_steps * config.n_layer * LAUNCHES)
            speed = f'{tokens / seconds:,.0f}'
            if steps is not None:
                time = duration(steps * seconds)
        fits = 'does not fit; lower batch_size or use --recompute=full'
        if sum(memory_of(config, cfg, lora, env, memory).values()) <= MARGIN * memory:
            fits = 'fits'
        lines.append(f'{name:<12} {memory / 1e9:>8,.1f} GB {speed:>12} {time:>10}  {fits}')
    return lines + missing
