"""
Time a token: nanoGPT's sampler, transformers.generate and ours, on one shape of random weights, in turns.

    $ python tests/bench/generate_speed.py --peer=../nanoGPT      # GPT-2 124M, 512 new tokens after 512
    $ python tests/bench/generate_speed.py --shape=small --prompt=16 --new=48    # a try in seconds
    $ python tests/bench/generate_speed.py --peer=../nanoGPT --kinds float32 --batches 1

A turn draws all new tokens with temperature 0.8 among the 200 most probable. The first token includes the
prefill and has a column of its own. nanoGPT computes the complete context for each token, so it draws only 3,
on a GPU 50, at the mean context. Figures are medians of the rounds.
"""

import sys
import time
from importlib.util import find_spec
from statistics import median

import torch
from bench import alternate, machine, nanogpt, parser_of, table
from step_speed import SHAPES

from hotloop.inference.generate import Sampling, generate
from hotloop.inference.quantize import prepare_for_inference
from model import GPT, GPTConfig

SAMPLING = dict(temperature=0.8, top_k=200)
KINDS = ('float32', 'bfloat16', 'int8')


def sync(device):
    if device == 'cuda':
        torch.cuda.synchronize()


def prompts(args, batch, length):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(SHAPES[args.shape]['vocab_size'], 50257), (batch, length), generator=generator)


def our_model(args, kind, pack):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**SHAPES[args.shape]))
    wide = kind == 'float32' or (kind == 'int8' and args.device == 'cpu')
    dtype = torch.float32 if wide else torch.bfloat16
    quantize = 'int8' if kind == 'int8' else 'none'
    return prepare_for_inference(gpt, torch.device(args.device), dtype, quantize, pack)


def first_and_rest(times):
    """(seconds to the first token, seconds a token after it) of times at the start and after each."""
    return times[1] - times[0], (times[-1] - times[1]) / max(len(times) - 2, 1)


def our_side(args, gpt, batch, compiled):
    ids = prompts(args, batch, args.prompt).tolist()

    def turn(new=None):
        times = [time.perf_counter()]
        sampling = Sampling(new or args.new, **SAMPLING)
        for _ in generate(gpt, ids, sampling, seeds=range(batch), compiled=compiled):
            times.append(time.perf_counter())  # the tokens have been read, so the device is done
        return first_and_rest(times)
    began = time.perf_counter()
    turn(5)  # compiles; on CUDA captures the graph at the third step
    print(f'  {batch} at once: warm after {time.perf_counter() - began:.0f} s', file=sys.stderr)
    return turn


def transformers_side(args, batch):
    from transformers import GPT2Config, GPT2LMHeadModel, StoppingCriteriaList
    s = SHAPES[args.shape]
    config = GPT2Config(vocab_size=s['vocab_size'], n_positions=s['block_size'], n_embd=s['n_embd'],
                        n_layer=s['n_layer'], n_head=s['n_head'], eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    dtype = torch.float32 if args.device == 'cpu' else torch.bfloat16
    gpt = GPT2LMHeadModel(config).to(args.device, dtype).eval()
    ids = prompts(args, batch, args.prompt).to(args.device)

    def turn(new=None):
        number, times = new or args.new, [time.perf_counter()]

        def tick(ids, scores, **_):
            if len(times) in (1, number):
                sync(args.device)
            times.append(time.perf_counter())
            return torch.zeros(batch, dtype=torch.bool, device=ids.device)
        with torch.inference_mode():
            gpt.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=number, do_sample=True,
                         pad_token_id=0, stopping_criteria=StoppingCriteriaList([tick]), **SAMPLING)
        return first_and_rest(times)
    turn(3)
    return turn


def nanogpt_side(args, batch):
    theirs = nanogpt(args.peer)
    torch.manual_seed(0)
    gpt = theirs.GPT(theirs.GPTConfig(dropout=0.0, bias=False, **SHAPES[args.shape])).to(args.device).eval()
    ids = prompts(args, batch, args.prompt + args.new // 2).to(args.device)
    number = 50 if args.device == 'cuda' else 3

    def turn():
        began = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == 'cuda'):
            gpt.generate(ids, number, **SAMPLING)
        sync(args.device)
        return None, (time.perf_counter() - began) / number
    if args.device == 'cuda':
        turn()
    return turn


def main():
    parser = parser_of(__doc__, prompt=512, new=512, rounds=3)
    parser.add_argument('--peer', help='a clone of karpathy/nanoGPT')
    parser.add_argument('--shape', choices=SHAPES, default='124m')
    parser.add_argument('--batches', type=int, nargs='*', default=[1, 8], help='sequences at once')
    parser.add_argument('--kinds', nargs='*', default=KINDS, choices=KINDS)
    parser.add_argument('--compiled', action='store_true', help='our compiled step too; a GPU always runs it')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads(), help='on a CPU')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args()
    on_gpu = args.device == 'cuda'
    if args.prompt + args.new > SHAPES[args.shape]['block_size'] or min(args.prompt, args.new) < 2:
        parser.error(f'{args.prompt} + {args.new} tokens, at least 2 each, must fit {args.shape}')
    torch.set_num_threads(args.threads)

    sides, about = {}, {}

    def add(name, batch, kind, turn):
        sides[f'{name}, {kind}, {batch}'], about[f'{name}, {kind}, {batch}'] = turn, (name, batch, kind)
    theirs = 'bfloat16' if on_gpu else 'float32'
    if args.peer:
        add('nanoGPT', 1, theirs, nanogpt_side(args, 1))
    for batch in args.batches:
        if find_spec('transformers'):
            add('transformers', batch, theirs, transformers_side(args, batch))
    for kind in args.kinds:
        for compiled in (False, True) if on_gpu or args.compiled else (False,):
            for batch in args.batches:
                if batch == args.batches[0]:
                    gpt = our_model(args, kind, pack=not compiled)
                name = 'ours, compiled' if compiled else 'ours, eager'
                add(name, batch, kind, our_side(args, gpt, batch, compiled))
    if not find_spec('transformers'):
        print('transformers is not installed and not measured: pip install transformers', file=sys.stderr)

    found = alternate(sides, args.rounds)
    name = torch.cuda.get_device_name() if on_gpu else machine()
    print(f'{name}, torch {torch.__version__}, {args.threads} threads')
    print(f'{args.shape}, {args.new} new tokens after {args.prompt}')
    seconds = {name: median(step for _, step in found[name]) for name in about}
    base = next((seconds[name] for name in about if name.startswith('nanoGPT')), None)
    rows = []
    for name, (side, batch, kind) in about.items():
        first, step = [first for first, _ in found[name]], seconds[name]
        rows.append([side, kind, batch, '' if first[0] is None else f'{median(first) * 1000:.0f}',
                     f'{step * 1000:.2f}', f'{batch / step:,.1f}',
                     f'{base * batch / step:.1f}' if base else ''])
    print(table(['', 'dtype', 'batch', 'first token, ms', 'ms a step', 'tokens/s', "of nanoGPT's"], rows))


if __name__ == '__main__':
    main()
