"""What a run will need: parameters, memory, time and disk, counted without a run."""

import contextlib

import torch

from hotloop.data.dataset import Dataset, open_datasets
from hotloop.system.device import PEAK_FLOPS, choose_device, choose_dtype, device_memory, measure_flops
from hotloop.system.text import duration, file_size, wrapped
from hotloop.training.checkpoint import state_from
from hotloop.training.dataloader import share_batch
from hotloop.training.flops import flops_of
from hotloop.training.footprint import Need
from hotloop.training.mixture import open_split
from hotloop.training.schedule import plan_schedule
from hotloop.weights.load import GPT2_SHAPES, shape_of
from hotloop.weights.lora import describe_adapters

MFU = 0.4  # assumed share of the peak; nanoGPT, modded-nanogpt and llm.c reach 0.3 to 0.6 at 124M
# {name: (key of PEAK_FLOPS, bytes of memory as PyTorch reports them, about)}
MACHINES = {'A100 40GB': ('A100', 42.3e9), 'A100 80GB': ('A100', 85.0e9), 'H100': ('H100', 85.0e9),
            'H200': ('H200', 150.1e9), 'L40S': ('L40S', 47.7e9), 'RTX 4090': ('RTX 4090', 25.3e9),
            'T4': ('T4', 15.8e9)}
# part of the model by the name of a parameter; the first match counts
PARTS = {'embeddings': ('.wte.', '.wpe.'), 'attention': ('.attn.',), 'MLP': ('.mlp.',), 'head': ('lm_head.',),
         'norms and mixes': ('.ln_', '.mix.')}


def dry_run(settings, model_of):
    """
    List the lines of the forecast of a command. Nothing is downloaded or written.
    model_of(settings, dataset): the model, on the meta device.
    """
    cfg, lines, datasets, num_windows = settings.train, [], [], None
    first = Dataset(cfg.dataset, '', {'vocab_size': 50304, 'foreign': True}, 1.0)
    try:
        datasets = open_datasets(cfg.dataset, cfg.data_dir)
        first = datasets[0]
    except ValueError as e:
        reason = e
    model = model_of(settings, first)
    if not datasets:
        lines.append(f'note: the forecast assumes a vocabulary of {model.config.vocab_size:,} ids, '
                     f'because {reason}')
    else:
        split = open_split(datasets, 'train', model.config.block_size, cfg.document_mask, cfg.pack_rows)
        num_windows = split.num_windows
    state = state_from(settings.latest.checkpoint if settings.latest else {})
    schedule = None
    if num_windows or cfg.max_epochs is None:
        batch = cfg.batch_size * cfg.gradient_accumulation_steps
        schedule = plan_schedule(cfg, num_windows, batch, state.shift(model.config.block_size, batch), state)
    device, _ = choose_device(cfg.device)
    dtype, _ = choose_dtype(cfg.dtype, device, training=True)
    return lines + forecast(model, settings, schedule, state, num_windows, device, dtype)


def forecast(model, settings, schedule, state, num_windows, device, dtype):
    """
    List the lines of the forecast. model: on the meta device, without adapters. settings: train.py's.
    schedule: its Schedule; None: unknown. state: its RunState. num_windows: of an epoch; None: unknown.
    device, dtype: of this machine.
    """
    cfg = settings.train
    batch, accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, 1)
    steps, is_open = None, schedule is not None and schedule.is_open
    minutes = cfg.time_budget and max(cfg.time_budget - state.seconds_used / 60, 0)
    if schedule is not None and not is_open:
        steps = max(schedule.max_iters - state.iter_num, 0)  # still to do
    tokens = batch * accumulation * model.config.block_size  # per step
    gpu_dtype = torch.bfloat16 if cfg.dtype == 'auto' else getattr(torch, cfg.dtype)
    need = Need(model, cfg, settings.lora if settings.lora.lora_rank else None)
    forward, flops_per_token = flops_of(need.adapted if need.lora else model, model.config.block_size)
    lines = ['a forecast, not a measurement', wrapped(describe_model(model))]
    if need.lora:
        base = settings.latest.checkpoint['lora']['base'] if settings.latest else cfg.init_from
        lines.append(describe_adapters({**need.record, 'base': base}, need.adapted, gpu_dtype))
    rest = [f'compute: {flops_per_token / 1e6:,.1f} MFLOP per token, forward and backward',
            *describe_memory(need, batch, gpu_dtype),
            describe_length(model, steps, state.iter_num, tokens, num_windows, minutes)]
    lines += [*map(wrapped, rest),
              f'machine           memory     tokens/s       time  (one device at {MFU:.0%} of its peak)']
    machines = [(name, gpu_dtype, size, None if gpu_dtype == torch.float32 else PEAK_FLOPS[key])
                for name, (key, size) in MACHINES.items()]
    flops = None
    with contextlib.suppress(RuntimeError):  # another process may fill the GPU
        flops = measure_flops(device, dtype)
    machines.append((f'this {device.type}', dtype, device_memory(device), flops))
    for name, machine_dtype, memory, flops in machines:
        repeated = 0 if cfg.recompute == 'none' else forward
        rate = MFU * flops / (flops_per_token + repeated) if flops else None
        time = duration(steps * tokens / rate) if steps is not None and rate else 'unknown'
        if is_open:
            time = duration(60 * minutes)
        lines.append(f'{name:<12} {memory / 1e9:>8,.1f} GB {f"{rate:,.0f}" if rate else "unknown":>12} '
                     f'{time:>10}  {advise(need, batch, accumulation, machine_dtype, memory)}')
    return lines


def model_args_of(settings):
    """The shape of the checkpoint or of the GPT-2 that a run starts from; None from scratch."""
    cfg = settings.train
    if settings.latest:
        return settings.latest.checkpoint['model_args']
    if cfg.init_from in GPT2_SHAPES:
        return GPT2_SHAPES[cfg.init_from]
    return None if cfg.init_from == 'scratch' else shape_of(cfg.init_from, cfg.data_dir)


def count_parts(model):
    """{part: its parameters} of the PARTS that the model has; a tied head is part of the embeddings."""
    counts = dict.fromkeys(PARTS, 0)
    for name, p in model.named_parameters():
        part = next(part for part, marks in PARTS.items() if any(mark in name for mark in marks))
        counts[part] += p.numel()
    return {part: n for part, n in counts.items() if n}


def describe_model(model):
    """Parameters by part."""
    text = ', '.join(f'{part} {n:,}' for part, n in count_parts(model).items())
    tied = '; the head is the token embedding' if model.config.tie else ''
    return f'parameters: {model.num_params():,} ({text}{tied})'


def describe_memory(need, batch, dtype):
    """Memory by part, disk."""
    memory = MACHINES['H100'][1]
    chunks = need.chunks(batch, memory)
    parts = need.parts(batch, dtype, chunks)
    text = ', '.join(f'{part} {file_size(size)}' for part, size in parts.items() if size)
    pieces = f' in {chunks} chunks' if chunks > 1 else ''
    if need.asked_chunks == 'auto':
        pieces += f' (loss_chunks=auto on a GPU with {memory / 1e9:.0f} GB)'
    name, checkpoint = str(dtype).removeprefix('torch.'), need.weights + need.optimizer
    lines = [f'memory: {file_size(sum(parts.values()))} for a micro-batch of {batch} x '
             f'{need.model.config.block_size} tokens in {name}, or less if compiled: {text}{pieces}']
    for shard in () if need.lora else ('optimizer', 'full'):  # adapters are not sharded
        each = ', '.join(file_size(need.standing(dtype, shard, world)) for world in (2, 4, 8))
        lines.append(f'shard={shard}: weights, gradients and optimizer take {each} on each of 2, 4, 8 GPUs')
    return [*lines, f'disk: {file_size(checkpoint)} for a checkpoint, {file_size(need.weights)} for best.pt']


def describe_length(model, steps, done, tokens, num_windows, minutes):
    """
    Steps, tokens and epochs. done: steps before these. minutes: in which a run without steps ends; None:
    unknown.
    """
    if steps is None and minutes is not None:
        return (f'run: at most {minutes:.3g} minutes (time_budget); the number of steps of {tokens:,} tokens '
                'depends on the speed of the machine')
    if steps is None:
        return f'run: an unknown number of steps of {tokens:,} tokens'
    epochs = 'an unknown number of epochs'
    if num_windows is not None:
        epochs = f'{steps * (tokens // model.config.block_size) / num_windows:,.2f} epochs'
    more = 'more ' if done else ''
    return f'run: {steps:,} {more}steps of {tokens:,} tokens, {steps * tokens:,} tokens, {epochs}'


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
    remedy = 'reduce n_layer, n_embd or block_size'
    if need.lora:
        remedy = 'use --quantize=nf4 and a smaller block_size'
    return f'does not fit: one sequence needs {file_size(total)}; {remedy}'
