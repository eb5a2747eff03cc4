"""What a run will need: parameters, FLOPs, memory, time and disk, counted without a run."""

from functools import partial

import torch

from hotloop.data.dataset import Dataset, open_datasets
from hotloop.system.device import (
    PEAK_FLOPS,
    choose_device,
    choose_dtype,
    device_memory,
    measure_flops,
)
from hotloop.system.distributed import Env
from hotloop.system.text import duration, file_size, wrapped
from hotloop.training.checkpoint import RunState
from hotloop.training.dataloader import open_split
from hotloop.training.memory import MemoryEstimate, largest_batch
from hotloop.training.schedule import plan_schedule
from hotloop.weights.load import GPT2_SHAPES, shape_of

MFU = 0.4  # assumed share of the peak; nanoGPT, modded-nanogpt and llm.c reach 0.3 to 0.6 at 124M
# seconds of a micro-batch per block on a GPU at least: 60 kernels of 5 microseconds. Assumed, not measured
LAUNCHES = 60 * 5e-6
# {name: (key of PEAK_FLOPS, bytes of memory as PyTorch reports them, about)}
MACHINES = {'A100 40GB': ('A100', 42.3e9), 'A100 80GB': ('A100', 85.0e9), 'H100': ('H100', 85.0e9),
            'H200': ('H200', 150.1e9), 'L40S': ('L40S', 47.7e9), 'RTX 4090': ('RTX 4090', 25.3e9),
            'T4': ('T4', 15.8e9)}
# part of the model by the name of a parameter; the first match counts
PARTS = {'embeddings': ('.wte.', '.wpe.'), 'attention': ('.attn.',), 'MLP': ('.mlp.',),
         'head': ('lm_head.',), 'norms and mixes': ('.ln_', '.mix.')}


def flops_of(model, T):
    """
    Count the FLOPs per token in sequences of T. Returns those of the forward pass, and those of
    forward and backward: 2 and 6 for each weight that multiplies (not embeddings), plus causal
    attention over (T + 1) / 2 positions on average, or fewer where a window ends before that.
    Frozen weights have no gradients; adapters cost as much as any other weights.
    """
    c = model.config
    projections = 2 * (c.n_head + c.n_kv_head) * c.head_dim
    weights = c.n_embd * (c.n_layer * (projections + c.n_ff * (2 + c.is_gated)) + c.vocab_size)
    keys = 0.0  # on average over the positions, in all layers
    for window in c.windows():
        W = min(window or T, T)
        keys += W - W * (W - 1) / (2 * T)
    attention = 2 * c.n_head * c.head_dim * keys  # multiply-adds: q k^T, weights v
    adapters = sum(p.numel() for name, p in model.named_parameters() if '.lora_' in name)
    forward = 2 * (weights + attention + adapters)
    if adapters:
        return forward, forward + 2 * weights + 4 * (attention + adapters)
    return forward, 3 * forward


def model_args_of(settings):
    """Return the shape of the weights that a run starts from; None from scratch."""
    cfg = settings.train
    if settings.latest:
        return settings.latest.checkpoint['model_args']
    if cfg.init_from in GPT2_SHAPES:
        return GPT2_SHAPES[cfg.init_from]
    return None if cfg.init_from == 'scratch' else shape_of(cfg.init_from, cfg.data_dir)


def dry_run(settings, model_of):
    """
    Return the forecast of a command, in lines. Nothing is downloaded or written.
    model_of(settings, dataset): the model, on the meta device and without adapters.
    """
    cfg = settings.train
    lines = ['a forecast, not a measurement']
    num_windows = None  # of an epoch; None: unknown
    try:
        datasets = open_datasets(cfg.dataset, cfg.data_dir)
    except ValueError as e:
        absent = Dataset(cfg.dataset, '', {'vocab_size': 50304, 'foreign': True}, 1.0)
        model = model_of(settings, absent)
        lines.append(f'note: the forecast assumes a vocabulary of {model.config.vocab_size:,} ids, '
                     f'because {e}')
    else:
        model = model_of(settings, datasets[0])
        split = open_split(datasets, 'train', model.config.block_size, cfg.document_mask,
                           cfg.pack_rows)
        num_windows = split.num_windows
    T = model.config.block_size
    estimate = MemoryEstimate(model.config, cfg, settings.lora if settings.lora.lora_rank else None)
    forward, both = flops_of(estimate.model, T)
    dtype = torch.bfloat16 if cfg.dtype == 'auto' else getattr(torch, cfg.dtype)
    gpu = Env(device=torch.device('cuda'), dtype=dtype)
    steps = count_steps(cfg, num_windows)
    lines += [describe_model(model),
              f'compute: {both / 1e6:,.1f} MFLOP per token, forward and backward',
              describe_memory(estimate, gpu),
              f'disk: {file_size(estimate.weights + estimate.optimizer)} for a checkpoint, '
              f'{file_size(estimate.weights)} for best.pt',
              describe_length(cfg, T, steps, num_windows)]
    if cfg.recompute != 'none':
        both += forward
    lines = [wrapped(line) for line in lines]
    return lines + machine_table(estimate, gpu, both, steps)


def describe_model(model):
    """Return the parameters by part, as text; a tied head is part of the embeddings."""
    counts = dict.fromkeys(PARTS, 0)
    for name, p in model.named_parameters():
        part = next(part for part, marks in PARTS.items() if any(mark in name for mark in marks))
        counts[part] += p.numel()
    text = ', '.join(f'{part} {n:,}' for part, n in counts.items() if n)
    tied = '; the head is the token embedding' if model.config.tie else ''
    return f'parameters: {model.num_params():,} ({text}{tied})'


def describe_memory(estimate, gpu):
    """Return the memory by part on an H100, as text."""
    cfg = estimate.cfg
    parts = estimate.parts(cfg.batch_size, gpu, MACHINES['H100'][1], cfg.recompute)
    text = ', '.join(f'{part} {file_size(size)}' for part, size in parts.items() if size)
    dtype = str(gpu.dtype).removeprefix('torch.')
    return (f'memory: {file_size(sum(parts.values()))} on an H100 for a micro-batch of '
            f'{cfg.batch_size} x {estimate.config.block_size} tokens in {dtype}, or less if '
            f'compiled: {text}')


def count_steps(cfg, num_windows):
    """Return the steps of a run; None if it has none, or they depend on its clock or on absent data."""
    if cfg.eval_only or cfg.time_budget is not None or (num_windows is None and cfg.max_epochs is not None):
        return None
    batch = cfg.batch_size * cfg.gradient_accumulation_steps
    return plan_schedule(cfg, num_windows, batch, 0, RunState()).max_iters


def describe_length(cfg, T, steps, num_windows):
    """Return the steps, tokens and epochs of a run, as text."""
    batch = cfg.batch_size * cfg.gradient_accumulation_steps
    if cfg.eval_only:
        return 'run: one evaluation'
    if steps is None:
        return f'run: an unknown number of steps of {batch * T:,} tokens'
    text = f'run: {steps:,} steps of {batch * T:,} tokens, {steps * batch * T:,} tokens'
    if num_windows is not None:
        text += f', {steps * batch / num_windows:,.2f} epochs'
    return text


def machine_table(estimate, gpu, flops_per_token, steps):
    """List the lines about speed, time and memory on seven GPUs and on this machine."""
    cfg = estimate.cfg
    batch = cfg.batch_size * cfg.gradient_accumulation_steps
    device, _ = choose_device(cfg.device)
    dtype, _ = choose_dtype(cfg.dtype, device, training=True)
    machines = []
    for name, (key, memory) in MACHINES.items():
        peak = None if gpu.dtype == torch.float32 else PEAK_FLOPS[key]
        machines.append((name, gpu, memory, peak))
    machines.append((f'this {device.type}', Env(device=device, dtype=dtype), device_memory(device),
                     measure_flops(device, dtype)))
    lines = ['machine           memory     tokens/s       time  '
             f'(one device at {MFU:.0%} of its peak)']
    for name, env, memory, peak in machines:
        speed = time = 'unknown'
        if peak:
            seconds = batch * estimate.config.block_size * flops_per_token / (MFU * peak)
            if env.device.type == 'cuda':
                launches = cfg.gradient_accumulation_steps * estimate.config.n_layer * LAUNCHES
                seconds = max(seconds, launches)
            speed = f'{batch * estimate.config.block_size / seconds:,.0f}'
            if steps is not None:
                time = duration(steps * seconds)
        if cfg.time_budget is not None and not cfg.eval_only:
            time = duration(60 * cfg.time_budget)
        lines.append(f'{name:<12} {memory / 1e9:>8,.1f} GB {speed:>12} {time:>10}  '
                     f'{advise(estimate, env, memory)}')
    return lines


def advise(estimate, env, memory):
    """Return whether a micro-batch fits, and otherwise what to change for the same step."""
    cfg = estimate.cfg
    if estimate.fits(cfg.batch_size, env, memory, cfg.recompute):
        return 'fits'
    sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    remedies = []
    for recompute in dict.fromkeys([cfg.recompute, 'full']):
        fits = partial(estimate.fits, env=env, memory=memory, recompute=recompute)
        batch = largest_batch(sequences, cfg.batch_size, fits)
        if batch is None:
            continue
        flags = []
        if recompute != cfg.recompute:
            flags.append('--recompute=full')
        if batch < cfg.batch_size:
            flags.append(f'--batch_size={batch} --gradient_accumulation_steps={sequences // batch}')
        remedies.append(' '.join(flags))
    if remedies:
        return f'does not fit; the same step fits with {" or ".join(remedies)}'
    return 'does not fit: not even one sequence; use a smaller model or block_size'
