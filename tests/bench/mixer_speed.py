"""
Speed and memory of the mixers by length, beside attention: training and generation, in turns.

    $ python tests/bench/mixer_speed.py
    $ python tests/bench/mixer_speed.py --compile --rounds=1 --lengths 256 1024 4096
    $ python tests/bench/mixer_speed.py --rounds=1 --lengths 32768      # peak memory; a token and its cache

The model has 4 layers of 128 channels and 1,024 ids (preset=modern). Parts: `layer`, forward and
backward of the mixer of one layer, without norm and MLP; `model`, those of the model and its loss; both over
4,096 tokens, or one window that is longer. `token` and `int8`: one token of generation, the last of a context
of this length, and the same with 8-bit weights.

Each turn is a process of its own; figures are medians of the turns. Memory is the most that a process holds
beyond what it held before it made the model. The factor is relative to the first row.
"""

import itertools
import json
import time
from functools import partial
from statistics import median

from bench import alternate, cores, forget_peak, machine, memory_now, parser_of, table
from step_speed import turn

MIXERS = ('attention', 'conv', 'CCAC', 'EEAE', 'eigen', 'kernel')
PARTS = ('layer', 'model', 'token', 'int8')
TOKENS = 4096  # of a training step
MIN_SECONDS = 1.0  # that a turn measures, in at least one call


def call_of(a):
    """Return the function that a turn measures, the tokens of a call, and the memory before the model."""
    import torch

    from hotloop.inference.generate import Sampling, compile_step, decode_step
    from hotloop.inference.kv_cache import KVCache
    from hotloop.inference.quantize import prepare_for_inference
    from model import GPT, Context, GPTConfig
    idle = memory_now('VmRSS')
    T, part, dtype = a['length'], a['part'], getattr(torch, a['dtype'])
    torch.manual_seed(0)
    model = GPT(GPTConfig(preset='modern', mixer=a['mixer'], n_layer=4, n_head=4, n_embd=128,
                          block_size=T, vocab_size=1024))
    model.compute_dtype = dtype
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.02  # layers start as nothing
    rows = max(TOKENS // T, 1)
    if part == 'layer':
        mixer = model.transformer.h[0].attn
        mixer = torch.compile(mixer, dynamic=False) if a['compile'] else mixer
        x = torch.randn(rows, T, 128, dtype=dtype, requires_grad=True)
        context = Context(model.cos, model.sin, {}, None)
        return lambda: mixer(x, context).sum().backward(), rows * T, idle
    if part == 'model':
        forward = torch.compile(model, dynamic=False) if a['compile'] else model
        ids = torch.randint(1024, (rows, T))
        return lambda: forward(ids, ids).sum().backward(), rows * T, idle
    kind = 'int8' if part == 'int8' else 'none'
    prepare_for_inference(model, torch.device('cpu'), dtype, kind, pack=not a['compile'])
    cache = KVCache(model, 1, T, static=a['compile'])
    step = compile_step(model) if a['compile'] else decode_step
    token, number = torch.ones(1, 1, dtype=torch.int64), torch.full((1, 1), 0.5, dtype=torch.float64)
    seen = torch.zeros(1, 1024, dtype=torch.bool)

    def draw():
        cache.length.fill_(T - 1)
        with torch.no_grad():
            step(model, cache, token, seen, None, number, Sampling(1, top_k=200))
    return draw, 1, idle


def work(a):
    """Print the seconds of a call, its tokens and the peak memory."""
    from hotloop.system import host
    host.end_spins_early(10_000)  # as sample.py: beside a busy process a token took 0.3 s, not 0.2 ms
    import torch
    torch.set_num_threads(a['threads'])
    seconds = []
    call, tokens, idle = call_of(a)
    forget_peak()
    began = time.perf_counter()
    call()  # compiles
    if a['compile'] or time.perf_counter() - began < 10 * MIN_SECONDS:
        began = time.perf_counter()
    else:
        seconds.append(time.perf_counter() - began)
    while sum(seconds) < MIN_SECONDS:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({'seconds': median(seconds), 'tokens': tokens, 'peak': memory_now('VmHWM') - idle}))


def cell(turns, first, part):
    """Return the text of a side, with its factor to the first one's turns."""
    failed = [each['failed'] for each in turns if 'failed' in each]
    if failed:
        return f'failed: {failed[0]}'
    seconds = median(each['seconds'] for each in turns)
    text = f'{turns[0]["tokens"] / seconds:,.0f}/s'
    if part in ('token', 'int8'):
        text = f'{seconds * 1000:.2f} ms'
    if 'failed' not in first[0]:
        text += f' ({median(each["seconds"] for each in first) / seconds:.2f})'
    return f'{text}, {median(each["peak"] for each in turns) / 1e6:,.0f} MB'


def main():
    parser = parser_of(__doc__, rounds=3, threads=cores(), dtype='float32', compile=False)
    parser.add_argument('--work', help='for the processes that this starts')
    parser.add_argument('--lengths', type=int, nargs='*', default=[256, 1024, 4096, 16384])
    parser.add_argument('--parts', nargs='*', default=PARTS, choices=PARTS)
    parser.add_argument('--mixers', nargs='*', default=MIXERS, help='or patterns of their letters')
    args = parser.parse_args()
    if args.work:
        return work(json.loads(args.work))
    sides = {}
    for part, name, length in itertools.product(args.parts, args.mixers, args.lengths):
        if part != 'layer' or not name.isupper():
            a = dict(part=part, mixer=name, length=length, dtype=args.dtype, compile=args.compile,
                     threads=args.threads)
            sides[part, name, length] = partial(turn, a, __file__)
    found = alternate(sides, args.rounds)
    print(f'{machine()}, {args.dtype}, {"compiled" if args.compile else "eager"}, {args.threads} threads')
    for part in args.parts:
        names = [name for name in args.mixers if (part, name, args.lengths[0]) in sides]
        rows = [[name, *(cell(found[part, name, length], found[part, names[0], length], part)
                         for length in args.lengths)] for name in names]
        print(f'\n{part}\n{table(["", *(f"{length:,} tokens" for length in args.lengths)], rows)}')


if __name__ == '__main__':
    main()
