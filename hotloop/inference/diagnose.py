"""Diagnose a checkpoint: its training, weights, activations, and loss by position."""

import math
import re
from collections import defaultdict
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from hotloop.inference.score import print_json
from hotloop.system.text import text_of

MAX_LOGITS = 2**24  # A forward pass holds at most this many logits at once.
INACTIVE = 1e-3  # An inactive unit never exceeds this fraction of the RMS of its layer.
SETTINGS = ('max_iters', 'dataset', 'init_from', 'lora_rank', 'preset', 'optimizer', 'learning_rate',
            'lr_schedule', 'min_lr')


@torch.no_grad()
def diagnose(model, source, parts, batches, output):
    """
    Print tables about a model in eval mode, or with output='jsonl' lines of JSON. source: the
    Weights it was opened from. parts: {part: its parameters}. batches: tuples (x, y) or
    (x, y, documents) of (B, T) arrays, y being -1 where there is no target; they are not read if
    a weight is not finite.
    """
    print_table('training', [describe_training(source, model)], output)
    print_table('parameters', [{'part': part, 'parameters': n} for part, n in parts.items()], output)
    weights = [measure_tensor(name, p) for name, p in model.named_parameters()]
    print_table('weights', weights if output == 'jsonl' else group_by_kind(weights), output)
    problems = find_bad_weights(weights)
    if not any(row['not_finite'] for row in weights):
        recorder = Recorder(model)
        for batch in batches:
            recorder.run(*[torch.from_numpy(part).to(model.cos.device) for part in batch])
        print_table('blocks', recorder.blocks(), output)
        problems += recorder.problems()
        by_position = recorder.loss_by_position()
        if by_position:
            print_table('loss by position', by_position, output)
    print_table('problems', [{'problem': problem} for problem in problems or ['none found']], output)


def random_batches(config, num_tokens=2**14, batch_tokens=2**12):
    """Yield batches (x, y) of random ids, without targets."""
    T = min(config.block_size, batch_tokens)
    rng = np.random.default_rng(0)
    for _ in range(num_tokens // batch_tokens):
        x = rng.integers(0, config.vocab_size, (batch_tokens // T, T))
        yield x, np.full_like(x, -1)


def describe_training(source, model):
    """Describe what a model was trained on and for how long, as {what: value}."""
    config = source.checkpoint.get('config', {})
    facts = {'weights': source.path, 'step': source.checkpoint.get('iter_num')}
    if 'best_val_loss' in source.checkpoint:
        facts['best val loss'] = float(source.checkpoint['best_val_loss'])
    batch = [config.get(name) for name in ('batch_size', 'gradient_accumulation_steps', 'block_size')]
    if facts['step'] is not None and all(isinstance(size, int) for size in batch):
        facts['tokens'] = facts['step'] * math.prod(batch)
        facts['tokens per parameter'] = facts['tokens'] / model.num_params()
    for name in SETTINGS:
        facts[name] = config.get(name)
    return {name: value for name, value in facts.items() if value is not None}


# -----------------------------------------------------------------------------
# weights

def measure_tensor(name, p):
    """Measure the finite values of a tensor, and count those that are zero or not finite."""
    w = p.detach().float()
    w = w[w.isfinite()]
    norm = torch.linalg.vector_norm(w, dtype=torch.float64).item()
    return {'name': name, 'shape': list(p.shape), 'parameters': p.numel(), 'norm': norm,
            'rms': norm / max(len(w), 1)**0.5, 'min': w.min().item() if len(w) else math.nan,
            'max': w.max().item() if len(w) else math.nan, 'zeros': int((w == 0).sum()),
            'not_finite': p.numel() - len(w)}


def group_by_kind(rows):
    """Join the rows of the same tensor in all blocks."""
    kinds = defaultdict(list)
    for row in rows:
        kind = re.sub(r'\.\d+\.', '.*.', row['name']).removeprefix('transformer.')
        kinds[kind].append(row)
    joined = []
    for kind, same in kinds.items():
        rms = [row['rms'] for row in same]
        joined.append({'name': kind, 'parameters': sum(row['parameters'] for row in same),
                       'lowest rms': min(rms), 'highest rms': max(rms),
                       'min': min(row['min'] for row in same), 'max': max(row['max'] for row in same),
                       'zeros': sum(row['zeros'] for row in same),
                       'not finite': sum(row['not_finite'] for row in same)})
    return joined


def find_bad_weights(rows):
    """List the tensors with values that are not finite, and the matrices of zeros."""
    problems = []
    for row in rows:
        if row['not_finite']:
            problems.append(f'{row["name"]}: {row["not_finite"]:,} of {row["parameters"]:,} values are NaN '
                            'or infinite; the model was not run')
        elif row['norm'] == 0 and len(row['shape']) > 1:
            problems.append(f'{row["name"]}: all {row["parameters"]:,} values are zero')
    return problems


# -----------------------------------------------------------------------------
# activations and losses

class Recorder:
    """Record activations and losses of a model with forward hooks."""

    def __init__(self, model):
        self.model = model
        self.squares = defaultdict(float)  # sums of squared activations by (place, layer)
        self.counts = defaultdict(int)
        self.peaks = {}  # the largest |output| of each MLP unit so far, by layer: (n_ff,)
        self.losses = []  # (2, N) tensors: positions, losses
        self.y = self.position = None  # (B, T), of the batch that runs
        self.start = 0  # of the next logits in T; they come in chunks
        for layer, block in enumerate(model.transformer.h):
            block.register_forward_pre_hook(partial(self.record_input, 'stream', layer))
            block.mlp.c_proj.register_forward_pre_hook(partial(self.record_input, 'units', layer))
            block.ln_1_post.register_forward_hook(partial(self.record_output, 'attention', layer))
            block.ln_2_post.register_forward_hook(partial(self.record_output, 'MLP', layer))
        model.lm_head.register_forward_hook(self.record_losses)

    def run(self, x, y, documents=None):
        """Run the model on a batch. Positions begin again with each of the documents."""
        B, T = x.shape
        position = torch.arange(T, device=x.device).expand(B, T)
        if documents is not None:
            is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
            position = position - torch.where(is_first, position, 0).cummax(1).values
        self.y = y
        self.position = position
        self.start = 0
        self.model.loss_chunks = min(T, math.ceil(B * T * self.model.config.vocab_size / MAX_LOGITS))
        self.model(x, y, documents)

    def record_input(self, place, layer, module, args):
        x = args[0].float()  # (B, T, C)
        self.record(place, layer, x)
        if place == 'units':
            peaks = x.abs().amax((0, 1))
            self.peaks[layer] = torch.maximum(self.peaks.get(layer, peaks), peaks)

    def record_output(self, place, layer, module, args, output):
        self.record(place, layer, output.float())

    def record(self, place, layer, x):
        self.squares[place, layer] += x.square().sum().item()
        self.counts[place, layer] += x.numel()

    def record_losses(self, module, args, logits):
        """Record the loss of each target from (B, T, V) logits, or from the next chunk of T."""
        chunk = slice(self.start, self.start + logits.size(1))
        self.start = chunk.stop
        y = self.y[:, chunk]
        targets = y[y >= 0]
        losses = F.cross_entropy(self.model.softcap(logits.float())[y >= 0], targets, reduction='none')
        self.losses.append(torch.stack([self.position[:, chunk][y >= 0], losses]).cpu().double())

    def rms(self, place, layer):
        return math.sqrt(self.squares[place, layer] / self.counts[place, layer])

    def blocks(self):
        """List the RMS of each block's input and of what attention and MLP add, and inactive units."""
        rows = []
        for layer, peaks in self.peaks.items():
            inactive = int((peaks <= INACTIVE * self.rms('units', layer)).sum())
            rows.append({'block': layer, 'stream': self.rms('stream', layer),
                         'attention': self.rms('attention', layer), 'MLP': self.rms('MLP', layer),
                         'dead units': inactive, 'units': len(peaks)})
        return rows

    def problems(self):
        """List the parts whose output is zero or not finite, and layers with many inactive units."""
        problems = []
        for row in self.blocks():
            for part in ('attention', 'MLP'):
                where = f'block {row["block"]}, {part}'
                if not math.isfinite(row[part]):  # All that follows is not finite either.
                    return [*problems, f'{where}: its output is NaN or infinite, but all weights are finite']
                if row[part] <= 1e-6 * row['stream']:
                    problems.append(f'{where}: its output is zero')
            if row['dead units'] >= row['units'] / 2:
                problems.append(f'block {row["block"]}, MLP: {row["dead units"]:,} of {row["units"]:,} units '
                                'are inactive')
        if not torch.cat(self.losses, 1).isfinite().all():
            problems.append('logits: NaN or infinite, but the outputs of all blocks are finite')
        return problems

    def loss_by_position(self):
        """Average the losses at positions 1, 2, 3-4, 5-8, ...; [] without targets or finite losses."""
        position, loss = torch.cat(self.losses, 1)  # (N,)
        if not loss.isfinite().all():
            return []
        rows = []
        power = torch.frexp(position).exponent  # positions from 0: 0 | 1 | 2 3 | 4 to 7
        for k in power.unique():
            chosen = power == k
            rows.append({'from': int(position[chosen].min()) + 1, 'to': int(position[chosen].max()) + 1,
                         'tokens': int(chosen.sum()), 'loss': loss[chosen].mean().item()})
        return rows


# -----------------------------------------------------------------------------
# output

def print_table(section, rows, output):
    """Print rows, {column: value}, as a table, a single row as a list; or as lines of JSON."""
    if output == 'jsonl':
        for row in rows:
            finite = {'section': section, **row}
            for name, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):  # JSON has no NaN.
                    finite[name] = None
            print_json(finite)
        return
    table = [list(rows[0])]
    for row in rows:
        table.append([text_of(value) for value in row.values()])
    if len(rows) == 1:
        table = list(zip(*table, strict=True))
    print(f'\n{section}')
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for first, *others in table:
        line = '  ' + first.ljust(widths[0])
        for cell, width in zip(others, widths[1:], strict=True):
            line += '  ' + cell.rjust(width)
        print(line.rstrip())
