"""
Tokens per second and memory of a tuning step: all weights, LoRA, and LoRA over NF4 (QLoRA), beside peft's
LoRA, on the same random GPT-2 and the same batch.

    $ python tests/bench/finetune_speed.py                 # 124M, in the dtype of this CPU
    $ python tests/bench/finetune_speed.py --compile
    $ python tests/bench/finetune_speed.py --n_layer=4 --n_embd=256 --batch=4 --tokens=256

A step is forward, loss, backward, clipping and AdamW. Adapters of rank 16 are on all four matrices of a
block, without dropout. Each measurement is a process of its own; the sides take turns, and the table has
medians. peft's model is transformers' with attention by scaled_dot_product_attention; its frozen weights have
the dtype, its adapters are float32, as are ours. Time is that of the process on one thread, so other
processes do not count. Memory is the most that a process holds during the timed steps, beyond its imports.
"""

import json
import sys
import time
from functools import partial
from statistics import median

from bench import alternate, answer, forget_peak, machine, memory_now, parser_of, table

SIDES = ('ours: all weights', 'peft: LoRA', 'ours: LoRA', 'ours: QLoRA')
VOCABULARY, WARMUP = 50304, 3


def ours(side, args, dtype):
    """Return a function that runs one step of train.py."""
    import torch

    import train
    from hotloop.system.distributed import Env
    from hotloop.training.memory import choose_loss_chunks
    from hotloop.weights.lora import LoRAConfig, add_adapters
    from model import GPT, GPTConfig
    cfg, env = train.TrainConfig(learning_rate=1e-4), Env(dtype=dtype, compile=args.compile)
    model = GPT(GPTConfig(n_layer=args.n_layer, n_head=args.n_embd // 64, n_embd=args.n_embd, bias=True,
                          block_size=args.tokens, vocab_size=VOCABULARY, mlp='gelu_tanh'))
    adapts = side != 'ours: all weights'
    if adapts:
        quantize = 'nf4' if side == 'ours: QLoRA' else 'none'
        add_adapters(model, LoRAConfig(lora_rank=args.rank, quantize=quantize), {}, env, 0)
    model.compute_dtype = dtype
    tokens = args.batch * args.tokens
    model.loss_chunks = choose_loss_chunks('auto', tokens, VOCABULARY, env, frozen=adapts)
    optimizers = train.build_optimizers(model, cfg, env)
    forward = train.wrap(model, cfg, env)[1]
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    ids = torch.randint(VOCABULARY, (args.batch, args.tokens + 1))
    data = tokens, [lambda: (ids[:, :-1], ids[:, 1:], 0)]
    return partial(train.train_step, forward, data, optimizers, scaler, cfg, env)


def theirs(args, dtype):
    """Return a function that runs one step of peft's model."""
    import peft
    import torch
    import transformers
    config = transformers.GPT2Config(n_layer=args.n_layer, n_head=args.n_embd // 64, n_embd=args.n_embd,
                                     n_positions=args.tokens, vocab_size=VOCABULARY, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    adapters = peft.LoraConfig(r=args.rank, lora_alpha=16, target_modules=['c_attn', 'c_proj', 'c_fc'],
                               fan_in_fan_out=True)
    model = peft.get_peft_model(model, adapters)
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(VOCABULARY, (args.batch, args.tokens))
    forward = torch.compile(model, dynamic=False) if args.compile else model

    def step():
        optimizer.zero_grad()
        forward(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return step


def measure(side, args):
    """Measure one side in this process. Returns {'speed': tokens/s, 'memory': peak megabytes}."""
    import torch
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    if side.startswith('peft'):
        import peft  # noqa: F401  # before memory is compared
    idle = memory_now('VmRSS')
    torch.manual_seed(0)
    step = theirs(args, dtype) if side.startswith('peft') else ours(side, args, dtype)
    for _ in range(WARMUP):
        step()
    forget_peak()  # of building and compiling
    began = time.process_time()
    for _ in range(args.steps):
        step()
    speed = args.steps * args.batch * args.tokens / (time.process_time() - began)
    return {'speed': speed, 'memory': (memory_now('VmHWM') - idle) / 1e6}


def main():
    from hotloop.system.device import cpu_has_bf16
    parser = parser_of(__doc__, dtype='bfloat16' if cpu_has_bf16() else 'float32', compile=False, n_layer=12,
                       n_embd=768, batch=2, tokens=512, rank=16, steps=2, rounds=3)
    parser.add_argument('--work', help='for the processes that this starts')
    args = parser.parse_args()
    if args.work:
        print(json.dumps(measure(args.work, args)))
        return

    def turn(side):
        return answer([sys.executable, __file__, *sys.argv[1:], '--work', side])
    lines = []
    found = alternate({side: partial(turn, side) for side in SIDES}, args.rounds)
    medians = {side: {what: median([r[what] for r in results]) for what in ('speed', 'memory')}
               for side, results in found.items()}
    for side, values in medians.items():
        base = medians['peft: LoRA']
        lines.append([side, f'{values["speed"]:,.0f}', f'{values["speed"] / base["speed"]:.2f}',
                      f'{values["memory"]:,.0f}', f'{values["memory"] / base["memory"]:.2f}'])
    print(f'{machine()}; {args.n_layer} layers x {args.n_embd} channels, {args.batch} x {args.tokens} '
          f'tokens, {args.dtype}, compile={args.compile}, 1 thread')
    print(table(['step', 'tokens/s', "of peft's", 'peak MB', "of peft's"], lines))


if __name__ == '__main__':
    main()
