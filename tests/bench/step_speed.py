"""
Tokens per second and peak memory of one training step: forward, loss, backward, clipping, optimizer.

    $ python tests/bench/step_speed.py --peer=../nanoGPT         # the shape of nanoGPT's README on a CPU, both sides
    $ python tests/bench/step_speed.py --peer=../nanoGPT --shape=124m --batch=2 --steps=2 --rounds=3
    $ python tests/bench/step_speed.py --table                   # each of our optimizations switched off in turn
    $ python tests/bench/step_speed.py --loop                    # train.py's whole loop against its step alone

The same architecture (nanoGPT's GPT-2, no biases, dropout 0) on the same random tokens on disk. Each side is a process
that stays and waits for its turn, compiles before the first one, and has the machine to itself while it is measured.
Memory is what the process holds at most during the steps, beyond one that has imported torch and done nothing else; on
a GPU the allocator's peak.
"""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bench import machine, median, nanogpt, table

SHAPES = {'small': dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65),
          '124m': dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
          '355m': dict(n_layer=24, n_head=16, n_embd=1024, block_size=1024, vocab_size=50304)}

# what --table switches off, or puts into its place, one at a time: settings of the worker
WITHOUT = {'as it is': {}, 'without compile': dict(compile=False), 'float32': dict(dtype='float32'),
           'unfused AdamW': dict(fused=False), 'vocabulary not padded': dict(vocab_size=50257),
           'no flash attention': dict(attention='math'), 'data not resident': dict(data_on_device=False),
           'with a mask of ones': dict(mask=True), 'not deterministic': dict(deterministic=False),
           'loss in 4 chunks': dict(loss_chunks=4), 'casts computed again': dict(recompute=True),
           'casts kept': dict(recompute=False), 'modern, Muon': dict(preset='modern', optimizer='muon')}


def write_data(folder, vocab_size, num_tokens):
    """A dataset of random tokens, with meta.json."""
    rng = np.random.default_rng(0)
    for name, n in (('train', num_tokens), ('val', max(num_tokens // 10, 2048))):
        rng.integers(0, min(vocab_size, 50257), n).astype('<u2').tofile(os.path.join(folder, f'{name}.bin'))
    meta = {'format': 1, 'dtype': 'uint16', 'vocab_size': max(min(vocab_size, 50257), 257), 'eot': None,
            'tokenizer': {'kind': 'byte'}, 'splits': {name: {'tokens': n} for name, n in
                                    (('train', num_tokens), ('val', max(num_tokens // 10, 2048)))}, 'source': 'random'}
    with open(os.path.join(folder, 'meta.json'), 'w') as f:
        json.dump(meta, f)


# -----------------------------------------------------------------------------
# one side, in a process of its own: builds its step, then does as many as stdin asks for and tells their seconds

def memory_now(field):
    with open('/proc/self/status') as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith(field))


def our_step(a, folder, device):
    """The step of train.py, as main() puts it together."""
    import torch

    import model
    import prepare
    import train
    shape = {**SHAPES[a['shape']], **({'vocab_size': a['vocab_size']} if a.get('vocab_size') else {})}
    cfg = train.TrainConfig(batch_size=a['batch'], gradient_accumulation_steps=1, device=device, dtype=a['dtype'],
                            compile=a['compile'], optimizer=a.get('optimizer', 'adamw'), learning_rate=1e-3,
                            **{k: a[k] for k in ('data_on_device', 'deterministic') if k in a})
    here = train.setup(cfg)
    torch.manual_seed(0)
    gpt = model.GPT(model.GPTConfig(preset=a.get('preset', 'gpt2'), **shape)).to(here.device)
    gpt.compute_dtype = here.dtype
    gpt.loss_chunks = a.get('loss_chunks', 1)
    optimizers = train.build_optimizers(gpt, cfg, here)
    if not a.get('fused', True):
        optimizers = [torch.optim.AdamW([dict(g) for g in o.param_groups], fused=False, foreach=False)
                      if isinstance(o, torch.optim.AdamW) else o for o in optimizers]
    params = list(gpt.parameters())
    scaler = torch.amp.GradScaler(here.device.type, enabled=here.dtype == torch.float16)
    forward = train.compiled(gpt, cfg, here)
    if 'recompute' in a:
        importlib.import_module('torch._functorch.config').ban_recompute_materialized_backward = not a['recompute']
    split = train.Split(folder, 'train', {**prepare.read_meta(folder), 'foreign': True}, gpt.config.block_size)
    if a.get('mask'):
        split.mask = np.ones(split.num_tokens, dtype=np.uint8)
    batches = train.Batches(split, cfg, here)

    def step(n):
        num_targets, loads = batches.step(n)
        train.set_learning_rate(optimizers, 1e-3, cfg.learning_rate)
        return train.train_step(forward, params, loads, num_targets, optimizers, scaler, 1.0)[0]
    if a.get('data') == 'fixed':
        num_targets, loads = batches.step(0)
        fixed = [load() for load in loads]

        def fixed_step(n):
            return train.train_step(forward, params, [lambda batch=batch: batch for batch in fixed], num_targets,
                                    optimizers, scaler, 1.0)[0]
        return fixed_step, here
    if a.get('loop'):
        return the_loop(train, cfg, here, gpt, forward, batches, optimizers, scaler, params), here
    if a.get('attention') == 'math':
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def math_step(n, step=step):
            with sdpa_kernel(SDPBackend.MATH):
                return step(n)
        return math_step, here
    return step, here


def the_loop(train, cfg, *parts):
    """train.train() itself, a line of log at each step, without its evaluations and saves: (step, number of steps)."""
    import torch
    here, gpt, forward, batches, optimizers, scaler, params = parts

    class Lines:
        def write(self, text, **numbers):
            self.last = numbers

    def evaluated(run, **kwargs):
        run.state.evaluation_left = False
    train.evaluate_and_save, train.save = evaluated, lambda *args, **kwargs: None
    run = train.Run(cfg, {}, here, gpt, forward, batches, batches.split, None, optimizers, scaler, params,
                    train.RunState(), None, Lines(), {}, train.StopRequest(None))

    def steps(n, number=1):
        cfg.max_iters = n + number
        train.train(run)
        return torch.tensor(run.log.last['loss'])
    steps.takes_many = True
    return steps


def peers_step(a, folder, device):
    """nanoGPT's step, with its own model and optimizer and its settings."""
    import contextlib
    from types import SimpleNamespace

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
        return loss
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
    n = 0
    for _ in range(3 if device == 'cuda' else 2):  # compiles, and makes the optimizer's state
        loss = float(step(n).detach().float().mean())
        n += 1
    sync()
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
    else:
        with open('/proc/self/clear_refs', 'w') as f:
            f.write('5')  # the peak starts anew
    print(json.dumps({'loss': loss, 'finite': math.isfinite(loss), 'dtype': str(here.dtype).removeprefix('torch.'),
                      'compile': bool(here.compile)}), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        if hasattr(step, 'takes_many'):
            step(n, int(line))
            n += int(line)
        else:
            for _ in range(int(line)):
                step(n)
                n += 1
        sync()
        peak = torch.cuda.max_memory_allocated() if device == 'cuda' else memory_now('VmHWM') - idle
        print(json.dumps({'seconds': time.perf_counter() - began, 'peak': peak}), flush=True)


class Side:
    """A worker process."""

    def __init__(self, name, **a):
        self.name, self.a = name, a
        env = {**os.environ, 'OMP_NUM_THREADS': str(a['threads'])}
        self.process = subprocess.Popen([sys.executable, __file__, '--work', json.dumps(a)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=env)
        self.seconds, self.peak = [], 0
        self.about = self.read()

    def read(self):
        for line in self.process.stdout:
            if line.startswith('{'):
                return json.loads(line)
        raise RuntimeError(f'{self.name} ended with {self.process.wait()}')

    def measure(self, steps):
        self.process.stdin.write(f'{steps}\n')
        self.process.stdin.flush()
        told = self.read()
        self.seconds.append(told['seconds'] / steps)
        self.peak = max(self.peak, told['peak'])

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def row(self, reference):
        tokens = self.a['batch'] * SHAPES[self.a['shape']]['block_size'] / median(self.seconds)
        base = reference.a['batch'] * SHAPES[reference.a['shape']]['block_size'] / median(reference.seconds)
        return [self.name, self.a['batch'], self.about['dtype'], 'on' if self.about['compile'] else 'off',
                f'{median(self.seconds) * 1000:.1f}', f'{tokens:,.0f}', f'{tokens / base:.2f}',
                f'{self.peak / 1e6:,.0f}', f'{self.peak / reference.peak:.2f}']


def main():
    import torch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--work', help=argparse.SUPPRESS)
    parser.add_argument('--peer', help='a clone of karpathy/nanoGPT')
    parser.add_argument('--shape', choices=SHAPES, default='small')
    parser.add_argument('--batch', type=int, default=12, help="sequences of a step, the same for both sides")
    parser.add_argument('--batches', type=int, nargs='*', default=[], help='of ours too, to find its best')
    parser.add_argument('--peer_batches', type=int, nargs='*', default=[], help="of the peer's too")
    parser.add_argument('--steps', type=int, default=50, help='of each turn')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--compile', default='auto', choices=['auto', 'on', 'off'])
    parser.add_argument('--table', action='store_true', help='our step with each optimization switched off in turn')
    parser.add_argument('--loop', action='store_true', help="the step alone on one batch, and train.py's whole loop")
    args = parser.parse_args()
    if args.work:
        return work(json.loads(args.work))
    compiling = {'auto': 'auto', 'on': True, 'off': False}[args.compile]
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[args.shape]
        write_data(folder, shape['vocab_size'], 2_000_000)
        common = dict(folder=folder, shape=args.shape, device=args.device, threads=args.threads)
        ours = {**common, 'dtype': args.dtype, 'compile': compiling}
        sides = []
        if args.peer:
            theirs = {**common, 'peer': os.path.abspath(args.peer), 'compile': args.compile != 'off'}
            sides += [Side('nanoGPT', batch=b, **theirs) for b in [args.batch, *args.peer_batches]]
        sides += [Side('ours', batch=b, **ours) for b in [args.batch, *args.batches] if not args.loop]
        if args.table:
            sides += [Side(name, batch=args.batch, **{**ours, **change}) for name, change in WITHOUT.items() if change
                      and not (args.shape == 'small' and 'vocab_size' in change)]
        if args.loop:
            sides += [Side('the step alone', batch=args.batch, **ours, data='fixed'),
                     Side("train.py's loop", batch=args.batch, **ours, loop=True)]
        for _ in range(args.rounds):
            for side in sides:
                side.measure(args.steps)
        device = torch.cuda.get_device_name() if args.device == 'cuda' else machine()
        print(f'{device}, torch {torch.__version__}, {args.threads} threads, {args.shape}: {shape}')
        print(table(['step of', 'batch', 'dtype', 'compile', 'ms', 'tokens/s', 'ratio', 'peak MB', 'ratio'],
                    [side.row(sides[0]) for side in sides]))
        for side in sides:
            side.close()


if __name__ == '__main__':
    main()
