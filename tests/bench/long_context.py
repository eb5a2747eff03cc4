"""
One training step over a long context: minutes and peak memory; or its gradient against the plain one.

    $ python tests/bench/long_context.py                                        # 32,768 tokens
    $ python tests/bench/long_context.py --window=1024 --window_pattern=SSSL
    $ python tests/bench/long_context.py --document=4096                        # attention within documents
    $ python tests/bench/long_context.py --check                                # at 2,048 tokens

The modern preset, 1,024 channels x 8 layers, rotary base 500,000, one sequence of random tokens, forward and
backward, without compilation and optimizer. Blocks are recomputed in the backward pass, except attention, and
the loss is in at least 4 chunks, more if train.py would choose so here. Memory is the most that the process
holds, weights and gradients included. --check computes the gradient also without recomputation and chunks,
and without blocks of queries: with a T x T mask.
"""

import time

from bench import machine, memory_now, parser_of


def arguments():
    parser = parser_of(__doc__)
    parser.add_argument('--tokens', type=int, default=None, help='32,768; with --check 2,048')
    parser.add_argument('--n_layer', type=int, default=8)
    parser.add_argument('--n_embd', type=int, default=1024)
    parser.add_argument('--vocab_size', type=int, default=50304)
    parser.add_argument('--window', type=int, default=None)
    parser.add_argument('--window_pattern', default=None)
    parser.add_argument('--document', type=int, default=None, help='tokens of a document; default: no mask')
    parser.add_argument('--dtype', default=None, help='auto; with --check float32')
    parser.add_argument('--threads', type=int, default=None)
    parser.add_argument('--check', action='store_true')
    args = parser.parse_args()
    args.tokens = args.tokens or (2048 if args.check else 32768)
    args.dtype = args.dtype or ('float32' if args.check else 'auto')
    return args


def dense(q, k, v, dropout, window, documents):
    """model.attend_within() by one T x T mask."""
    import torch
    from torch.nn import functional as F
    T = q.size(2)
    age = torch.arange(T)[:, None] - torch.arange(T)
    mask = (age >= 0) & (age < (window or T))
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None])
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=q.size(1) > k.size(1))


def main():
    args = arguments()
    import torch

    import model
    import train
    from hotloop.memory import choose_loss_chunks
    from hotloop.parallel import set_blocks
    env = train.setup(train.TrainConfig(device='cpu', dtype=args.dtype, threads=args.threads, compile=False))
    config = model.GPTConfig(preset='modern', block_size=args.tokens, n_layer=args.n_layer,
                             n_embd=args.n_embd, n_head=max(args.n_embd // 128, 1), rope_base=5e5,
                             vocab_size=args.vocab_size, zero_init=False, window=args.window,
                             window_pattern=args.window_pattern)
    torch.manual_seed(0)
    ids = torch.randint(args.vocab_size, (1, args.tokens + 1))
    documents = None
    if args.document:
        documents = torch.arange(args.tokens)[None] // args.document

    def step(recompute, chunks):
        """The gradients of one sequence."""
        torch.manual_seed(1)
        gpt = model.GPT(config)
        gpt.compute_dtype, gpt.loss_chunks = env.dtype, chunks
        set_blocks(gpt, recompute)
        began = time.perf_counter()
        loss = gpt(ids[:, :-1], ids[:, 1:], documents).sum() / args.tokens
        loss.backward()
        minutes = (time.perf_counter() - began) / 60
        print(f'recompute={recompute}, {chunks} chunks, {env.dtype}: loss {loss.item():.4f}, {minutes:.2f} '
              f'minutes, peak {memory_now("VmHWM") / 1e9:.2f} GB', flush=True)
        return torch.cat([p.grad.flatten() for p in gpt.parameters()])

    window = f', window {args.window} {args.window_pattern or ""}' if args.window else ''
    document = f', documents of {args.document}' if args.document else ''
    print(f'{args.tokens:,} tokens, {args.n_embd} x {args.n_layer}{window}{document}; {machine()}, '
          f'{env.threads} threads')
    found = step('selective', max(choose_loss_chunks('auto', args.tokens, args.vocab_size, env), 4))
    if args.check:
        model.attend_within = dense
        expected = step('none', 1)
        print(f'relative distance of the gradients: {(found - expected).norm() / expected.norm():.1e}')


if __name__ == '__main__':
    main()
