"""
Time and peak memory of a data-parallel step: DistributedDataParallel, also with blocks that are recomputed
in the backward pass, against one all-reduce by hand.

    $ python tests/bench/parallel_speed.py                   # two gloo processes on this machine
    $ python tests/bench/parallel_speed.py --processes=8     # on a node with eight GPUs, by NCCL
    $ python tests/bench/parallel_speed.py --shapes parameters --sides 'by hand' DDP    # a part of it

By hand means: after the last micro-batch all gradients are concatenated, summed by one all-reduce and copied
back, as this repository did before it used DDP. All sides run the same two micro-batches with the same
weights, one thread per process, without compilation, and take turns. Memory is the most that rank 0 holds
during the steps, beyond a process that has imported torch with its compiler, as DDP does (80 MB), and joined
the group; on a GPU it is the allocator's peak.
"""

import json
import sys
import time
from functools import partial
from statistics import median

from bench import alternate, answer, machine, memory_now, parser_of, table

SHAPES = {  # (model, sequences of a micro-batch)
    'activations': (dict(n_layer=2, n_head=4, n_embd=128, block_size=256, vocab_size=512), 8),
    'layers': (dict(n_layer=12, n_head=4, n_embd=128, block_size=256, vocab_size=512), 8),
    'parameters': (dict(n_layer=4, n_head=8, n_embd=768, block_size=64, vocab_size=8192), 1)}
SIDES = {'by hand': 'none', 'DDP': 'none', 'DDP, all but attention recomputed': 'selective',
         'DDP, blocks recomputed': 'full'}
STEPS = 5


def work(side, shape):
    """One process of one side; rank 0 prints {'ms', 'peak'}."""
    import torch.distributed as dist

    import train
    cfg = train.TrainConfig(compile=False, threads=1, dtype='float32', recompute=SIDES[side])
    env = train.setup(cfg)
    found = measure(train, side, shape, cfg, env)
    if env.rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(train, side, shape, cfg, env):
    """Milliseconds of a step, and peak megabytes."""
    import torch
    import torch._dynamo
    import torch.distributed as dist

    from model import GPT, GPTConfig
    settings, batch = SHAPES[shape]
    on_gpu = env.device.type == 'cuda'
    idle = 0 if on_gpu else memory_now('VmRSS')
    torch.manual_seed(0)
    model = GPT(GPTConfig(**settings)).to(env.device)
    optimizers = train.build_optimizers(model, cfg, env)
    scaler = torch.amp.GradScaler(env.device.type, enabled=False)
    ids = torch.randint(settings['vocab_size'], (batch, settings['block_size'] + 1), device=env.device)
    loads = [lambda: (ids[:, :-1], ids[:, 1:], 0)] * 2
    num_targets = 2 * batch * settings['block_size'] * env.world
    params = list(model.parameters())

    def step_by_hand():
        for p in params:
            p.grad = None
        for load in loads:
            x, y, _ = load()
            (model(x, y).sum() / num_targets).backward()
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat)
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(part.view_as(p))
        torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip)
        for optimizer in optimizers:
            optimizer.step()

    step = step_by_hand
    if side != 'by hand':
        forward = train.wrap(model, cfg, env)[1]
        step = partial(train.train_step, forward, loads, num_targets, optimizers, scaler, cfg, env)
    step()
    step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if on_gpu else memory_now('VmHWM') - idle
    return {'ms': (time.perf_counter() - began) / STEPS * 1000, 'peak': peak / 1e6}


def main():
    parser = parser_of(__doc__, processes=2, rounds=7)
    parser.add_argument('--shapes', nargs='+', default=list(SHAPES), choices=SHAPES)
    parser.add_argument('--sides', nargs='+', default=list(SIDES), choices=SIDES)
    parser.add_argument('--work', nargs=2, help='for the processes that this starts')
    args = parser.parse_args()
    if args.work:
        return work(*args.work)

    def turn(name, shape):
        launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={args.processes}']
        return answer([sys.executable, *launcher, __file__, '--work', name, shape],
                      env={'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'})
    rows = []
    for shape in args.shapes:
        results = alternate({name: partial(turn, name, shape) for name in args.sides}, args.rounds)
        base = None
        for name, found in results.items():
            ms, peak = median([r['ms'] for r in found]), median([r['peak'] for r in found])
            base = base or (ms, peak)
            rows.append([shape, name, f'{ms:.1f}', f'{ms / base[0]:.2f}', f'{peak:,.0f}',
                         f'{peak / base[1]:.2f}'])
    print(f'{machine()}, {args.processes} processes, medians of {args.rounds} rounds; shapes: {SHAPES}')
    print(table(['larger part', 'gradients summed by', 'ms per step', 'ratio', 'peak MB', 'ratio'], rows))


if __name__ == '__main__':
    main()
