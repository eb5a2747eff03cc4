"""
The documents' systems beside ours: equal tokens, equal minutes, one evaluator, in bits per byte.

    $ python tests/bench/systems.py --originals=.. --texts=stdlib     # clones of the repositories lie in ..
    $ python tests/bench/systems.py --originals=.. --minutes=0.2 --seeds=1    # does it run?
    $ python tests/bench/systems.py --originals=.. --systems=TEN,eigen --texts=stdlib

Originals: temporal-eigenstate-networks (TEN), ortho-ai (OKADFA) and tiny_gpt, imported and never changed.
Each trains with its optimizer, rates, clipping and penalty, once with its published size, context and batch
(TEN: a smaller step), and once ("small") with 4 layers of 128 channels, which ours have. Its schedule
spans the minutes; a step that ends too late is not taken, and a run without a step is a row that says so.
Ours count their start too: the small shape with each mixer, and two cards.
OKADFA trains as published: its direct feedback is off. Weights are judged in float32, in windows of the
context that they were trained with. Novels are another text: --novels=FILE.xz.

A job runs in a process of its own; its numbers, or its error, are a file in --work and are not repeated
while it is there.
"""

import hashlib
import importlib.util
import json
import lzma
import math
import os
import re
import subprocess
import sys
import time
import types
from statistics import mean, stdev

from bench import SHARED, machine, parser_of, run, table

SMALL = {'layers': 4, 'heads': 4, 'width': 128, 'context': 256, 'batch': 8}
VOCAB = 1024
# {name: (its folder, published shape, recipe)}; warmup: share of the run; floor: of the rate at the end.
# TEN's script has 32 x 2,048 tokens a step, too many for minutes on a CPU: 8 x 512 give it more updates.
ORIGINALS = {
    'TEN': ('temporal-eigenstate-networks',
            {'layers': 6, 'heads': 4, 'width': 512, 'context': 512, 'batch': 8},
            {'lr': 3e-4, 'betas': (0.9, 0.999), 'weight_decay': 0.1, 'warmup': 0.1, 'floor': 0.0}),
    'OKADFA': ('ortho-ai',
               {'layers': 6, 'heads': 12, 'width': 768, 'context': 512, 'batch': 8},
               {'lr': 3e-4, 'betas': (0.9, 0.95), 'weight_decay': 0.1, 'warmup': 0.05, 'floor': 0.1,
                'micro': 512}),  # a sequence of its published size takes 2.9 GB
    'tiny_gpt': ('tiny_gpt',
                 {'layers': 5, 'heads': 6, 'width': 360, 'context': 128, 'batch': 128},
                 {'lr': 5e-4, 'betas': (0.9, 0.999), 'weight_decay': 0.01, 'warmup': 0.00625, 'floor': 0.1})}
CARDS = ('ten_cpu', 'okadfa_cpu')  # trained as they are
OURS = {**{name: {'mixer': name} for name in ('attention', 'conv', 'CCAC', 'eigen', 'EEAE', 'kernel')},
        'eigen, paper': {'mixer': 'eigen', 'eigen': 'paper'},
        'kernel, dfa': {'mixer': 'kernel', 'feedback': 'dfa', 'ortho_penalty': 1e-4},
        **{card: {} for card in CARDS}}
MICRO_BATCH = 4096  # tokens of a forward pass of an original, so that no batch fills the memory


# -----------------------------------------------------------------------------
# the models

def load_file(folder, name):
    """Import one Python file of an original, without its package."""
    path = os.path.join(folder, f'{name}.py')
    spec = importlib.util.spec_from_file_location(os.path.basename(name), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def original(name, originals, layers, heads, width, context):
    """Build an original; it computes logits, (B, T, VOCAB)."""
    import torch
    torch.set_flush_denormal(True)  # OKADFA's features underflow: without this a step takes 1.5 times as long
    folder = os.path.join(originals, ORIGINALS[name][0])
    if name == 'TEN':
        build = load_file(os.path.join(folder, 'ten', 'models'), 'ten_unified').TEN
        return build(VOCAB, width, layers, n_heads=heads, max_seq_len=context)
    if name == 'OKADFA':
        sys.path.insert(0, folder)
        from src.models.okadfa_model import OKADFAModel
        return OKADFAModel(VOCAB, width, heads, layers, 4 * width, context)
    sys.modules.setdefault('tqdm', types.SimpleNamespace(tqdm=iter))  # its model does not use it
    return load_file(folder, 'train').TinyGPT(VOCAB, context, layers, heads, width, 4 * width)


# -----------------------------------------------------------------------------
# training

def train_original(job):
    """Train for some minutes by the original's recipe. Returns the module and its numbers."""
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    from hotloop.data.dataset import read_meta
    from hotloop.training.dataloader import Split
    _, published, recipe = ORIGINALS[job['system']]
    shape = dict(SMALL if job['small'] else published)
    batch, T = shape.pop('batch'), shape['context']
    torch.manual_seed(job['seed'])
    net = original(job['system'], job['originals'], **shape)
    optimizer = torch.optim.AdamW(net.parameters(), recipe['lr'], recipe['betas'],
                                  weight_decay=recipe['weight_decay'])
    penalty = None
    if job['system'] == 'OKADFA':
        from src.training.orthogonality_loss import OrthogonalityLoss
        penalty = OrthogonalityLoss(1e-4, 1000)
    split = Split(job['data'], 'train', read_meta(job['data']), T)
    micro = max(recipe.get('micro', MICRO_BATCH) // T, 1)
    index = step = tokens = 0
    net.train()
    began = time.perf_counter()

    def done():
        return (time.perf_counter() - began) / (60 * job['minutes'])
    while done() < 1:
        rate = cosine(done(), recipe['warmup'], recipe['floor'])
        for group in optimizer.param_groups:
            group['lr'] = recipe['lr'] * rate
        # the windows that ours reads with this seed and context
        x, y = map(torch.from_numpy, split.gather(split.starts(job['seed'], np.arange(batch) + index))[:2])
        for part, targets in zip(x.split(micro), y.split(micro), strict=True):
            loss = cross_entropy(net(part).flatten(0, 1), targets.flatten()) * len(part) / batch
            loss.backward()
            tokens += part.numel()
            if done() >= 1:
                break
        if done() >= 1:  # a step that ends too late is not taken
            break
        if penalty is not None:
            net.get_orthogonality_loss(penalty).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        index += batch
        step += 1
    seconds = time.perf_counter() - began
    if not step:
        raise RuntimeError(f'no step of {batch} x {T} tokens in {job["minutes"]:g} minutes; '
                           f'{tokens / seconds:.0f} tokens/s')

    class Judged(torch.nn.Module):
        """Return the summed loss of each row, (1, B), as evaluate() wants it."""

        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, y):
            losses = cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction='none')
            return losses.view(y.shape).sum(1)[None]
    return Judged(), T, {'steps': step, 'tokens_per_s': tokens / seconds, 'seconds': seconds}


def cosine(done, warmup, floor):
    """Return the factor of the rate after a share of the run."""
    if done < warmup:
        return done / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def train_ours(job):
    """Train by train.py. Returns the model and its numbers."""
    from hotloop.training.report import read_rows
    from hotloop.weights.load import load_checkpoint
    from model import GPT
    out = os.path.join(job['work'], 'run', job['name'])
    card = job['system']
    flags = {}
    if card not in CARDS:
        card = 'quickstart'
        flags = {'preset': 'modern', 'n_layer': SMALL['layers'], 'block_size': SMALL['context'],
                 'batch_size': SMALL['batch'], 'embed_lr': 0.1, 'muon_lr': 0.03}
    flags = {**flags, **OURS[job['system']], 'data_dir': os.path.dirname(job['data']), 'seed': job['seed'],
             'dataset': os.path.basename(job['data']), 'time_budget': job['minutes'],
             'eval_interval': 10**6, 'eval_tokens': 4096, 'out_dir': out}
    seconds, _, _ = run([sys.executable, 'train.py', f'config/{card}.py',
                         *(f'--{name}={value}' for name, value in flags.items())])
    checkpoint = load_checkpoint(os.path.join(out, 'ckpt.pt'))
    model = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model'])
    rows = read_rows(os.path.join(out, 'log.jsonl'))
    speeds = [row['tokens_per_s'] for row in rows if 'tokens_per_s' in row]
    steps = max(row['step'] for row in rows)
    return model, model.config.block_size, {'steps': steps, 'seconds': seconds,
                                            'tokens_per_s': mean(speeds) if speeds else math.nan}


def train(job):
    """Train and judge. Returns the numbers of a row."""
    import torch

    from hotloop.data.dataset import byte_table, read_meta
    from hotloop.system.distributed import Env
    from hotloop.training.dataloader import Split
    from hotloop.training.evaluate import evaluate
    model, T, numbers = (train_ours if job['system'] in OURS else train_original)(job)
    meta = read_meta(job['data'])
    split = Split(job['data'], 'val', meta, T)
    result = evaluate(model, split, job['eval_tokens'] // T, max(MICRO_BATCH // T, 1),
                      Env(device=torch.device('cpu')), byte_table(meta, VOCAB))
    return {**numbers, 'bpb': result['bpb'], 'params': sum(p.numel() for p in model.parameters())}


# -----------------------------------------------------------------------------
# the table

def result_of(args, **job):
    """Train in a process, unless its file is there. Returns its numbers, or {'error': reason}."""
    key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:8]
    name = re.sub(r'\W+', '-', job['system']) + f'-{key}'
    path = os.path.join(args.work, f'{name}.json')
    if not os.path.exists(path):
        job |= {'name': name, 'originals': args.originals, 'work': args.work}
        numbers = measure(job, args.limit)
        print(f'  {name}: {numbers}', file=sys.stderr, flush=True)
        with open(f'{path}.part', 'w', encoding='utf-8') as f:
            json.dump({**job, **numbers}, f)
        os.replace(f'{path}.part', path)
    with open(path, encoding='utf-8') as f:
        return json.load(f)


def measure(job, limit):
    command = [sys.executable, os.path.abspath(__file__), f'--job={json.dumps(job)}']
    try:
        done = subprocess.run(command, cwd=job['work'], timeout=limit, check=False,
                              capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return {'error': f'more than {limit} s'}
    if done.returncode:
        return {'error': (done.stderr.strip().splitlines() or [f'ended with {done.returncode}'])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def data_of(text, args):
    """Return the folder of a dataset, and prepare it if it is not there."""
    folder = os.path.join(args.data_dir, text)
    if not os.path.exists(os.path.join(folder, 'meta.json')):
        source = ['stdlib']
        if text == 'novels':
            path = os.path.join(args.work, 'novels.txt')
            with lzma.open(args.novels) as novels, open(path, 'wb') as f:
                f.write(novels.read(20_000_000).decode('utf-8', 'ignore').encode())
            source = [path]
        run([sys.executable, 'prepare.py', *source, f'--name={text}', f'--tokenizer=bpe:{VOCAB}',
             f'--data_dir={args.data_dir}'])
    return folder


def rows_of(args):
    """Yield the cells of each system, as far as --systems asks for it."""
    sides = [(name, small) for name in ORIGINALS for small in (False, True)]
    sides += [(name, True) for name in OURS]
    wanted = args.systems.split(',') if args.systems else [name for name, _ in sides]
    for name, small in sides:
        if name.split(',')[0] not in wanted and name not in wanted:
            continue
        folder = ORIGINALS.get(name, (None,))[0]
        if folder and not os.path.isdir(os.path.join(args.originals, folder)):
            print(f'skipped: {args.originals} has no {folder}', file=sys.stderr)
            continue
        label = f'ours, {name}' if name in OURS else f'{name}{", small" * small}'
        yield [label, *trained(name, small, args)]


def trained(name, small, args):
    """Return the cells of a system: parameters, tokens/s, bits per byte of each text."""
    cells, first = [], None
    for text in args.texts.split(','):
        runs = [result_of(args, system=name, small=small, seed=seed, minutes=args.minutes,
                          data=data_of(text, args), eval_tokens=args.eval_tokens)
                for seed in range(1, args.seeds + 1)]
        failed = [r['error'].replace('|', '/') for r in runs if 'error' in r]
        if failed:
            cells.append(failed[0])
            continue
        first = first or runs[0]
        bpb = [r['bpb'] for r in runs]
        cells.append(f'{mean(bpb):.3f}' + (f' ± {stdev(bpb):.3f}' if len(bpb) > 1 else ''))
    if first is None:
        return ['-', '-', *cells]
    return [f'{first["params"] / 1e6:.2f}M', f'{first["tokens_per_s"]:,.0f}', *cells]


def main():
    parser = parser_of(__doc__, originals='..', systems='', texts='stdlib,novels', minutes=3.0, seeds=3,
                       eval_tokens=2**17, limit=900, data_dir='data', work='out-systems',
                       novels=os.path.join(SHARED, 'novels.txt.xz'), job='')
    args = parser.parse_args()
    if args.job:
        print(json.dumps(train(json.loads(args.job))))
        return
    for folder in ('originals', 'data_dir', 'work', 'novels'):
        setattr(args, folder, os.path.abspath(getattr(args, folder)))
    os.makedirs(args.work, exist_ok=True)
    head = ['system', 'parameters', 'tokens/s in training',
            *(f'bits per byte, {text}, {args.minutes:g} min' for text in args.texts.split(','))]
    rows = list(rows_of(args))
    print(machine())
    print(table(head, rows))


if __name__ == '__main__':
    main()
