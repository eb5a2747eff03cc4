"""
Tokens per second and peak memory of one training step: forward, loss, backward, clipping, optimizer.

    $ python tests/bench/step_speed.py --peer=../nanoGPT   # the CPU shape of nanoGPT's README, both sides
    $ python tests/bench/step_speed.py --peer=../nanoGPT --shape=124m --batch=2 --steps=2 --rounds=3
    $ python tests/bench/step_speed.py --table                   # each optimization switched off in turn
    $ python tests/bench/step_speed.py --table float32 'unfused AdamW'   # only these
    $ python tests/bench/step_speed.py --shape=32k --batch=1 --steps=1 --rounds=1 --compile=off \\
          --set recompute=selective loss_chunks=4                # a long context

The same architecture (nanoGPT's GPT-2, no biases, dropout 0) on the same random tokens on disk. Each side is
a process that stays and waits for its turn, compiles before the first one, and has the machine to itself
while it is measured. On a GPU, whose memory does not hold all sides, each runs all of its rounds and ends
before the next one starts. Memory is the most that the process holds during the steps, beyond one that has
only imported torch; on a GPU it is the allocator's peak. --before=CLONE measures an earlier commit of this
repository beside this one.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
from bench import cores, forget_peak, machine, memory_now, nanogpt, parser_of, table

SHAPES = {'small': dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65),
          'quickstart': dict(n_layer=4, n_head=4, n_embd=128, block_size=256, vocab_size=257),
          '124m': dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
          '355m': dict(n_layer=24, n_head=16, n_embd=1024, block_size=1024, vocab_size=50304),
          '32k': dict(preset='modern', n_layer=8, n_head=8, n_embd=1024, block_size=32768, rope_base=5e5,
                      vocab_size=50304)}

# what --table switches off or replaces, one at a time: settings of the worker
WITHOUT = {'without compile': dict(compile=False), 'float32': dict(dtype='float32'),
           'unfused AdamW': dict(fused=False), 'vocabulary not padded': dict(vocab_size=50257),
           'no flash attention': dict(attention='math'),
           'with a mask of ones': dict(mask=True), 'not deterministic': dict(deterministic=False),
           'loss in 4 chunks': dict(loss_chunks=4), 'casts computed again': dict(recompute=True),
           'casts kept': dict(recompute=False), 'modern, Muon': dict(preset='modern', optimizer='muon')}


def write_data(folder, vocab_size, num_tokens):
    """A dataset of random tokens, with meta.json."""
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
# one side, in a process of its own: builds its step, runs as many steps as stdin asks for, prints the seconds

def our_step(a, folder, device):
    """The step of train.py, of the run that its build_run() puts together."""
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
    run = train.build_run(settings, datasets, env)
    if not a.get('fused', True):
        run.optimizers[0] = torch.optim.AdamW([dict(g) for g in run.optimizers[0].param_groups], fused=False,
                                              foreach=False)
    if 'recompute' in a:
        functorch = importlib.import_module('torch._functorch.config')
        functorch.ban_recompute_materialized_backward = not a['recompute']
    if a.get('mask'):
        split = run.batches.split
        split.mask = np.ones(split.num_tokens, dtype=np.uint8)
        run = run._replace(batches=train.Batches(split, run.cfg, env))
    if a.get('fixed'):
        num_targets, (load,) = run.batches.step(0)
        batch = load()
        run.batches.step = lambda n: (num_targets, [lambda: batch])

    def step(n):
        num_targets, loads = run.batches.step(n)
        kernels = sdpa_kernel(SDPBackend.MATH) if a.get('attention') else contextlib.nullcontext()
        with kernels:
            train.train_step(run.forward, loads, num_targets, run.optimizers, run.scaler, run.cfg, env)
    return step, env


def peers_step(a, folder, device):
    """nanoGPT's step, with its own model and optimizer and its settings."""
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
    import torch
    torch.set_num_threads(a['threads'])
    device = a['device']
    torch.ones(8, device=device).sum()
    idle = 0 if device == 'cuda' else memory_now('VmRSS')
    step, here = (peers_step if a.get('peer') else our_step)(a, a['folder'], device)

    def sync():
        if device == 'cuda':
            torch.cuda.synchronize()
    n = 3 if device == 'cuda' else 2
    for i in range(n):  # compiles, and makes the optimizer's state
        step(i)
    sync()
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()
    print(json.dumps({'dtype': str(here.dtype).removeprefix('torch.'), 'compile': bool(here.compile)}),
          flush=True)
    for line in sys.stdin:
        began, number = time.perf_counter(), int(line)
        for i in range(n, n + number):
            step(i)
        n += number
        sync()
        peak = torch.cuda.max_memory_allocated() if device == 'cuda' else memory_now('VmHWM') - idle
        print(json.dumps({'seconds': time.perf_counter() - began, 'peak': peak}), flush=True)


class Side:
    """A worker process, which runs this file or, with `before`, that of a clone of an earlier commit."""

    def __init__(self, name, before=None, **a):
        self.name, self.a = name, a
        self.script = os.path.join(before, 'tests', 'bench', 'step_speed.py') if before else __file__
        self.seconds, self.peak = [], 0

    def start(self):
        env = {**os.environ, 'OMP_NUM_THREADS': str(self.a['threads'])}
        self.process = subprocess.Popen([sys.executable, self.script, '--work', json.dumps(self.a)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.about = self.read()

    def read(self):
        for line in self.process.stdout:
            if line.startswith('{'):
                return json.loads(line)
        raise RuntimeError(f'{self.name} ended with {self.process.wait()}')

    def measure(self, steps):
        self.process.stdin.write(f'{steps}\n')
        self.process.stdin.flush()
        result = self.read()
        self.seconds.append(result['seconds'] / steps)
        self.peak = max(self.peak, result['peak'])

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def row(self, reference):
        tokens = self.a['batch'] * SHAPES[self.a['shape']]['block_size'] / median(self.seconds)
        base = reference.a['batch'] * SHAPES[reference.a['shape']]['block_size'] / median(reference.seconds)
        return [self.name, self.a['batch'], self.about['dtype'], 'on' if self.about['compile'] else 'off',
                f'{median(self.seconds) * 1000:.1f}', f'{tokens:,.0f}', f'{tokens / base:.2f}',
                f'{self.peak / 1e6:,.0f}', f'{self.peak / reference.peak:.2f}']


def measure(sides, rounds, steps, together):
    """Runs the rounds of all sides: together in turns, or one side after another."""
    for group in [sides] if together else [[side] for side in sides]:
        for side in group:
            side.start()
        for _ in range(rounds):
            for side in group:
                side.measure(steps)
        for side in group:
            side.close()


def main():
    import torch
    parser = parser_of(__doc__, rounds=7, threads=cores(), dtype='auto',
                       device='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--work', help='for the processes that this starts')
    parser.add_argument('--peer', help='a clone of karpathy/nanoGPT')
    parser.add_argument('--before', help='a clone of an earlier commit of this repository, to compare with')
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
    compiling = {'auto': 'auto', 'on': True, 'off': False}[args.compile]
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[args.shape]
        write_data(folder, shape['vocab_size'], 2_000_000)
        common = dict(folder=folder, shape=args.shape, device=args.device, threads=args.threads)
        ours = {**common, 'dtype': args.dtype, 'compile': compiling, 'set': args.set}
        sides = []
        if args.peer:
            theirs = {**common, 'peer': os.path.abspath(args.peer), 'compile': args.compile != 'off'}
            sides += [Side('nanoGPT', batch=b, **theirs) for b in [args.batch, *args.peer_batches]]
        if args.before:
            sides.append(Side('before', args.before, batch=args.batch, **ours))
        sides += [Side('ours', batch=b, **ours) for b in [args.batch, *args.batches]]
        if args.table is not None:
            for name in args.table or WITHOUT:
                if args.shape != 'small' or 'vocab_size' not in WITHOUT[name]:
                    sides.append(Side(name, batch=args.batch, **{**ours, **WITHOUT[name]}))
        measure(sides, args.rounds, args.steps, together=args.device != 'cuda')
        device = torch.cuda.get_device_name() if args.device == 'cuda' else machine()
        print(f'{device}, torch {torch.__version__}, {args.threads} threads, {args.shape}: {shape}')
        print(table(['step of', 'batch', 'dtype', 'compile', 'ms', 'tokens/s', 'ratio', 'peak MB', 'ratio'],
                    [side.row(sides[0]) for side in sides]))


if __name__ == '__main__':
    main()
