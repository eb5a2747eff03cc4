"""
Time one matrix for queries, keys and values against three, forward and backward, in turns.

    $ python tests/bench/fused_qkv.py    # the shapes of the quickstart and of GPT-2
    $ python tests/bench/fused_qkv.py --dtype=float32 --compile

The three matrices make the same tensors from the same weights. Figures are medians of the rounds.
"""

import time
from statistics import median

import torch
from bench import alternate, machine, parser_of, table
from torch.nn import functional as F

SHAPES = {'128 channels, 8 x 256 tokens': (128, 2048), '768 channels, 2 x 1,024 tokens': (768, 2048),
          '768 channels, 1 token': (768, 1)}


def fused(x, weight):
    return F.linear(x, weight).chunk(3, dim=-1)


def separate(x, *weights):
    return [F.linear(x, w) for w in weights]


def side(project, x, weights, args):
    """Return a function that returns the median milliseconds of a forward and a backward pass."""
    if args.compile:
        project = torch.compile(project, dynamic=False)

    def once():
        began = time.perf_counter()
        q, k, v = project(x, *weights)
        if x.requires_grad:
            torch.autograd.backward([q, k, v], [q, k, v])
        return 1e3 * (time.perf_counter() - began)

    def turn():
        return median(once() for _ in range(args.steps))
    turn()
    return turn


def main():
    parser = parser_of(__doc__, dtype='bfloat16', compile=False, steps=30, rounds=7)
    args = parser.parse_args()
    lines = []
    for name, (channels, tokens) in SHAPES.items():
        trains = tokens > 1
        dtype = getattr(torch, args.dtype)
        x = torch.randn(tokens, channels, dtype=dtype, requires_grad=trains)
        whole = torch.randn(3 * channels, channels, dtype=dtype, requires_grad=trains)
        parts = [part.clone().requires_grad_(trains) for part in whole.detach().chunk(3)]
        sides = {'one': side(fused, x, [whole], args), 'three': side(separate, x, parts, args)}
        one, three = (median(times) for times in alternate(sides, args.rounds).values())
        lines.append([name, f'{one:.3f}', f'{three:.3f}', f'{three / one:.2f}'])
    print(f'{machine()}, {args.dtype}, {"" if args.compile else "not "}compiled\n')
    print(table(['shape', 'one matrix, ms', 'three, ms', 'three / one'], lines))


if __name__ == '__main__':
    main()
