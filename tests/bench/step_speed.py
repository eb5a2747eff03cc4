"""
Tokens per second and peak memory of one training step: forward, loss, backward, clipping, optimizer.

    $ python tests/bench/step_speed.py --peer=../nanoGPT   # the CPU shape of nanoGPT's README, both sides
    $ python tests/bench/step_speed.py --peer=../nanoGPT --shape=124m --batch=2 --steps=2 --rounds=3
    $ python tests/bench/step_speed.py --table                   # each optimization switched off in turn
    $ python tests/bench/step_speed.py --table float32 'unfused AdamW'   # only these
    $ python tests/bench/step_speed.py --shape=32k --batch=1 --steps=1 --rounds=1 --compile=off \\
          --set recompute=selective loss_chunks=4                # a long context

The same architecture (nanoGPT's GPT-2, no biases, dropout 0) on the same random tokens on disk. Each turn of
a side is a process of its own, which compiles first and has the machine to itself; the sides take turns, and
the table has medians. Memory is the most that the process holds during the steps, beyond one that has only
imported torch; on a GPU it is the allocator's peak.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from functools import partial
from statistics import median
from types import SimpleNamespace

import numpy as np
from bench import alternate, answer, cores, forget_peak, machine, memory_now, nanogpt, parser_of, table

SHAPES = {'small': dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65),
          '124m': dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
          '32k': dict(preset='modern', n_layer=8, n_head=8, n_embd=1024, block_size=32768, rope_base=5e5,
                      vocab_size=50304)}

# what --table switches off or replaces, one at a time: settings of the worker
WITHOUT = {'without compile': dict(compile=False), 'float32': dict(dtype='float32'),
           'unfused AdamW': dict(fused=False), 'vocabulary not padded': dict(vocab_size=50257),
           'no flash attention': dict(attention='math'), 'not deterministic': dict(deterministic=False),
           'deterministic': dict(deterministic=True), 'max-autotune': dict(mode='max-autotune-no-cudagraphs'),
           'loss in 4 chunks': dict(loss_chunks=4), 'modern, Muon': dict(preset='modern', optimizer='muon')}


def write_data(folder, vocab_size, num_tokens):
    """Write a dataset of random tokens, with meta.json."""
    rng = np.random.default_rng(0)
    splits = {'train': num_tokens, 'val': num_tokens // 10}
    for name, n in splits.items():
        rng.integers(0, min(vocab_size, 50257), n).astype('<u2').tofile(os.path.join(folder, f'{name}.bin'))
    meta = {'format': 1, 'dtype': 'uint16', 'vocab_size': max(min(vocab_size, 50257), 257), 'eot': None,
            'tokenizer': {'kind': 'byte'}, 'splits': {name: {'tokens': n} for name, n in splits.items()},
            'source': 'random'}
    with open(os.path.join(folder, 'meta.json'), 'w') as f:
        json.dump(meta, f)


# -----------------------------------------------------------------------------
# one turn of a side, in a process of its own

def our_step(a, folder, device):
    """Return the step of a run that train.Run() puts together."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import train
    data_dir, dataset = os.path.split(folder)
    flags = dict(**SHAPES[a['shape']], data_dir=data_dir, dataset=dataset, device=device,
                 batch_size=a['batch'], gradient_accumulation_steps=1, learning_rate=1e-3, loss_chunks=1)
    changed = ('vocab_size', 'preset', 'dtype', 'compile', 'optimizer', 'deterministic', 'loss_chunks')
    flags |= {name: a[name] for name in changed if name in a}
    argv = [f'--{name}={value}' for name, value in flags.items()]
    settings = train.read_settings([*argv, *(f'--{word}' for word in a.get('set', ()))])
    env = train.setup(settings.train)
    datasets = train.open_datasets(dataset, data_dir)
    datasets[0].meta['foreign'] = True  # a shape may have fewer ids than its tokenizer
    if 'mode' in a:
        torch.compile = partial(torch.compile, mode=a['mode'])
    run = train.Run(settings, datasets, env)
    if not a.get('fused', True):
        class Unfused(torch.optim.AdamW):
            found_inf = property(lambda self: None, lambda self, skipped: None)  # only fused kernels take it
        run.optimizers[0] = Unfused([{**group, 'fused': False} for group in run.optimizers[0].param_groups])

    def step(n):
        data = run.batches.step(n)
        kernels = sdpa_kernel(SDPBackend.MATH) if a.get('attention') else contextlib.nullcontext()
        with kernels:
            train.train_step(run.train_model, data, run.optimizers, run.scaler, run.cfg, env)
    return step, env


def peers_step(a, folder, device):
    """Return nanoGPT's step, with its own model, optimizer and settings."""
    import torch
    theirs = nanogpt(a['peer'])
    torch.manual_seed(0)
    if device == 'cuda':
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    gpt = theirs.GPT(theirs.GPTConfig(dropout=0.0, bias=False, **SHAPES[a['shape']])).to(device)
    optimizer = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device)
    forward = torch.compile(gpt) if a['compile'] else gpt
    tokens = np.memmap(os.path.join(folder, 'train.bin'), dtype=np.uint16, mode='r')
    T, B = gpt.config.block_size, a['batch']
    precision = torch.autocast('cuda', torch.bfloat16) if device == 'cuda' else contextlib.nullcontext()
    rng = torch.Generator().manual_seed(0)

    def step(n):
        at = torch.randint(len(tokens) - T, (B,), generator=rng).tolist()
        x, y = (torch.stack([torch.from_numpy(tokens[i + shift:i + shift + T].astype(np.int64)) for i in at])
                for shift in (0, 1))
        if device == 'cuda':
            x, y = (t.pin_memory().to(device, non_blocking=True) for t in (x, y))
        with precision:
            _, loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step, SimpleNamespace(dtype='bfloat16' if device == 'cuda' else 'float32', compile=a['compile'])


def work(a):
    """Print the seconds of a step and the peak memory of one side."""
    import torch
    torch.set_num_threads(a['threads'])
    device = a['device']
    torch.ones(8, device=device).sum()
    idle = 0 if device == 'cuda' else memory_now('VmRSS')
    step, here = (peers_step if a.get('peer') else our_step)(a, a['folder'], device)

    def run(first, number):
        for n in range(first, first + number):
            step(n)
        if device == 'cuda':
            torch.cuda.synchronize()
    run(0, 3)  # compiles, and makes the optimizer's state
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()
    began = time.perf_counter()
    run(3, a['steps'])
    seconds = (time.perf_counter() - began) / a['steps']
    peak = torch.cuda.max_memory_allocated() if device == 'cuda' else memory_now('VmHWM') - idle
    dtype = str(here.dtype).removeprefix('torch.')
    print(json.dumps({'seconds': seconds, 'peak': peak, 'dtype': dtype, 'compile': bool(here.compile)}))


def turn(a, script=__file__):
    """Return what a turn of a side prints, or {'failed': why}, such as too little memory."""
    env = {'OMP_NUM_THREADS': str(a['threads'])}
    try:
        return answer([sys.executable, script, '--work', json.dumps(a)], env=env)
    except RuntimeError as e:
        return {'failed': str(e).strip().splitlines()[-1][:200]}


def rows(found, batches, T):
    """Return the rows of the table. found: {name: its turns}; ratios are to the first side."""
    lines, first = [], None
    for name, turns in found.items():
        failed = [each['failed'] for each in turns if 'failed' in each]
        if failed:
            lines.append([name, batches[name], f'failed: {failed[0]}', *[''] * 6])
            continue
        seconds = median([each['seconds'] for each in turns])
        peak = max(each['peak'] for each in turns)
        tokens = batches[name] * T / seconds
        first = first or (tokens, peak)
        lines.append([name, batches[name], turns[0]['dtype'], 'on' if turns[0]['compile'] else 'off',
                      f'{seconds * 1000:.1f}', f'{tokens:,.0f}', f'{tokens / first[0]:.2f}',
                      f'{peak / 1e6:,.0f}', f'{peak / first[1]:.2f}'])
    return lines


def main():
    import torch
    parser = parser_of(__doc__, rounds=7, threads=cores(), dtype='auto',
                       device='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--work', help='for the processes that this starts')
    parser.add_argument('--peer', help='a clone of karpathy/nanoGPT')
    parser.add_argument('--shape', choices=SHAPES, default='small')
    parser.add_argument('--batch', type=int, default=12, help="sequences of a step, the same for both sides")
    parser.add_argument('--batches', type=int, nargs='*', default=[], help='of ours too, to find its best')
    parser.add_argument('--peer_batches', type=int, nargs='*', default=[], help="of the peer's too")
    parser.add_argument('--steps', type=int, default=50, help='of each turn')
    parser.add_argument('--compile', default='auto', choices=['auto', 'on', 'off'])
    parser.add_argument('--table', nargs='*', choices=WITHOUT, metavar='NAME',
                        help='each optimization switched off in turn, or only these')
    parser.add_argument('--set', nargs='*', default=[], metavar='NAME=VALUE', help='more settings of ours')
    args = parser.parse_args()
    if args.work:
        return work(json.loads(args.work))
    shape = SHAPES[args.shape]
    sides, batches = {}, {}

    def add(name, settings, batch=args.batch):
        if batch != args.batch:
            name = f'{name}, batch {batch}'
        batches[name] = batch
        sides[name] = partial(turn, {**settings, 'batch': batch})
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder, shape['vocab_size'], 2_000_000)
        common = dict(folder=folder, shape=args.shape, device=args.device, threads=args.threads,
                      steps=args.steps)
        compiling = {'auto': 'auto', 'on': True, 'off': False}[args.compile]
        ours = {**common, 'dtype': args.dtype, 'compile': compiling, 'set': args.set}
        if args.peer:
            theirs = {**common, 'peer': os.path.abspath(args.peer), 'compile': args.compile != 'off'}
            for batch in (args.batch, *args.peer_batches):
                add('nanoGPT', theirs, batch)
        for batch in (args.batch, *args.batches):
            add('ours', ours, batch)
        if args.table is not None:
            default = 'deterministic' if args.device == 'cpu' else 'not deterministic'  # what 'auto' is there
            for name in args.table or [name for name in WITHOUT if name != default]:
                if args.shape != 'small' or 'vocab_size' not in WITHOUT[name]:
                    add(name, {**ours, **WITHOUT[name]})
        found = alternate(sides, args.rounds)
    device = torch.cuda.get_device_name() if args.device == 'cuda' else machine()
    print(f'{device}, torch {torch.__version__}, {args.threads} threads, {args.shape}: {shape}')
    print(table(['step of', 'batch', 'dtype', 'compile', 'ms', 'tokens/s', 'ratio', 'peak MB', 'ratio'],
                rows(found, batches, shape['block_size'])))


if __name__ == '__main__':
    main()
