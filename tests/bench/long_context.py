"""
One training step over a long context: minutes and peak memory.

    $ python tests/bench/long_context.py                                        # 32,768 tokens
    $ python tests/bench/long_context.py --window=1024 --window_pattern=SSSL
    $ python tests/bench/long_context.py --document=4096                        # attention within documents

The modern preset, 1,024 channels x 8 layers, rotary base 500,000, one sequence of random tokens, forward and
backward, without compilation and optimizer. Blocks are recomputed in the backward pass, except attention, and
the loss is in at least 4 chunks, more if train.py would choose so here. Memory is the most that the process
holds, weights and gradients included. test_parallel.py compares the gradients with the plain ones.
"""

import time

import torch
from bench import machine, memory_now, parser_of

import train
from hotloop.training.memory import choose_loss_chunks
from hotloop.training.shard import set_blocks
from model import GPT, GPTConfig


def main():
    parser = parser_of(__doc__, tokens=32768, n_layer=8, n_embd=1024, vocab_size=50304, dtype='auto')
    parser.add_argument('--window', type=int)
    parser.add_argument('--window_pattern')
    parser.add_argument('--document', type=int, help='tokens of a document; default: no mask')
    parser.add_argument('--threads', type=int)
    args = parser.parse_args()
    env = train.setup(train.TrainConfig(device='cpu', dtype=args.dtype, threads=args.threads, compile=False))
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(preset='modern', block_size=args.tokens, n_layer=args.n_layer, n_embd=args.n_embd,
                        n_head=max(args.n_embd // 128, 1), rope_base=5e5, vocab_size=args.vocab_size,
                        zero_init=False, window=args.window, window_pattern=args.window_pattern))
    gpt.compute_dtype = env.dtype
    gpt.loss_chunks = max(choose_loss_chunks('auto', args.tokens, args.vocab_size, env), 4)
    set_blocks(gpt, 'selective')
    ids = torch.randint(args.vocab_size, (1, args.tokens + 1))
    documents = None
    if args.document:
        documents = torch.arange(args.tokens)[None] // args.document

    window = f', window {args.window} {args.window_pattern or ""}' if args.window else ''
    document = f', documents of {args.document}' if args.document else ''
    print(f'{args.tokens:,} tokens, {args.n_embd} x {args.n_layer}{window}{document}; {machine()}, '
          f'{env.threads} threads')
    began = time.perf_counter()
    loss = gpt(ids[:, :-1], ids[:, 1:], documents).sum() / args.tokens
    loss.backward()
    minutes = (time.perf_counter() - began) / 60
    print(f'{gpt.loss_chunks} chunks, {env.dtype}: loss {loss.item():.4f}, {minutes:.2f} minutes, peak '
          f'{memory_now("VmHWM") / 1e9:.2f} GB')


if __name__ == '__main__':
    main()
