"""Diagnose a checkpoint: its training, weights, activations, and loss by position."""

import math
import re
from collections import defaultdict

import torch
from torch.nn import functional as F

from hotloop.inference.score import print_json
from hotloop.system.text import text_of

MAX_LOGITS = 2**24  # computed at once
INACTIVE = 1e-3  # An inactive unit never exceeds this fraction of the RMS of its layer.
SETTINGS = ('max_iters', 'dataset', 'init_from', 'lora_rank', 'preset', 'optimizer', 'learning_rate',
            'lr_schedule', 'min_lr')


@torch.no_grad()
def diagnose(model, source, batches, output):
    """
    Print tables about a model in eval mode, or with output='jsonl' lines of JSON. source: the
    Weights it was opened from. batches: tuples (x, y, position, documents) of (B, T) tensors; y is
    -1 where there is no target. The model does not run if a weight is not finite.
    """
    print_table('training', [describe_training(source)], output)
    weights = [measure_tensor(name, p) for name, p in model.named_parameters()]
    print_table('weights', weights if output != 'text' else join_blocks(weights), output)
    problems = find_bad_weights(weights)
    if not any(row['not finite'] for row in weights):
        blocks, by_position = run(model, batches)
        print_table('blocks', blocks, output)
        if by_position:
            print_table('loss by position', by_position, output)
        problems += find_bad_activations(blocks, by_position)
    print_table('problems', [{'problem': problem} for problem in problems or ['none found']], output)


def describe_training(source):
    """Describe what a model was trained on and for how long, as {what: value}."""
    config = source.checkpoint.get('config', {})
    facts = {'weights': source.path, 'step': source.checkpoint.get('iter_num')}
    if 'best_val_loss' in source.checkpoint:
        facts['best val loss'] = float(source.checkpoint['best_val_loss'])
    for name in SETTINGS:
        facts[name] = config.get(name)
    return {name: value for name, value in facts.items() if value is not None}


# -----------------------------------------------------------------------------
# weights

def measure_tensor(name, p):
    """Measure the finite values of a tensor, and count those that are not finite."""
    w = p.detach().float()
    w = w[w.isfinite()]
    if not len(w):
        w = torch.full((1,), math.nan)
    return {'name': name, 'parameters': p.numel(), 'rms': w.double().square().mean().sqrt().item(),
            'min': w.min().item(), 'max': w.max().item(),
            'not finite': p.numel() - int(p.isfinite().sum())}


def join_blocks(rows):
    """Join the rows of the same tensor in all blocks."""
    kinds = defaultdict(list)
    for row in rows:
        kind = re.sub(r'\.\d+\.', '.*.', row['name']).removeprefix('transformer.')
        kinds[kind].append(row)
    joined = []
    for kind, same in kinds.items():
        values = {name: [row[name] for row in same] for name in same[0]}
        joined.append({'name': kind, 'parameters': sum(values['parameters']),
                       'lowest rms': min(values['rms']), 'highest rms': max(values['rms']),
                       'min': min(values['min']), 'max': max(values['max']),
                       'not finite': sum(values['not finite'])})
    return joined


def find_bad_weights(rows):
    """List the tensors with values that are not finite, and those of zeros."""
    problems = []
    for row in rows:
        if row['not finite']:
            problems.append(f'{row["name"]}: {row["not finite"]:,} of {row["parameters"]:,} values are NaN '
                            'or infinite; the model was not run')
        elif row['rms'] == 0 and not row['name'].endswith('bias'):
            problems.append(f'{row["name"]}: all {row["parameters"]:,} values are zero')
    return problems


# -----------------------------------------------------------------------------
# activations and losses

def run(model, batches):
    """
    Run a model on batches. Returns rows of its blocks, with the RMS of a block's input and of what
    attention and MLP add to it, and rows of its loss by position.
    """
    squares = defaultdict(list)  # {(place, layer): mean squares of the batches}
    peaks = {}  # {layer: the largest |output| of each MLP unit, (n_ff,)}
    outputs = []  # of the last norm

    def recorder(place, layer):
        def record(module, args, output=None):
            values = args[0] if output is None else output
            squares[place, layer].append(values.double().square().mean().item())
            if place == 'units':
                peak = values.abs().flatten(0, -2).amax(0)
                peaks[layer] = torch.maximum(peaks.get(layer, peak), peak)
        return record

    hooks = [model.transformer.ln_f.register_forward_hook(lambda module, args, x: outputs.append(x))]
    for layer, block in enumerate(model.transformer.h):
        hooks += [block.register_forward_pre_hook(recorder('stream', layer)),
                  block.mlp.c_proj.register_forward_pre_hook(recorder('units', layer)),
                  block.ln_1_post.register_forward_hook(recorder('attention', layer)),
                  block.ln_2_post.register_forward_hook(recorder('MLP', layer))]
    losses = []
    for x, y, position, documents in batches:
        model(x, y, documents)
        seen = y >= 0
        losses.append(torch.stack([position[seen], token_losses(model, outputs.pop()[seen], y[seen])]))
    for hook in hooks:
        hook.remove()
    blocks = []
    for layer, peak in peaks.items():
        rms = {}
        for place in ('stream', 'attention', 'MLP', 'units'):
            means = squares[place, layer]
            rms[place] = math.sqrt(sum(means) / len(means))
        inactive = int((peak <= INACTIVE * rms.pop('units')).sum())
        blocks.append({'block': layer, **rms, 'dead units': inactive, 'units': len(peak)})
    return blocks, group_by_position(torch.cat(losses, 1).cpu())


def token_losses(model, x, targets):
    """Compute the loss of each target, (N,), from the (N, C) output of the last norm."""
    losses = [torch.zeros(0, device=x.device)]
    size = max(MAX_LOGITS // model.config.vocab_size, 1)
    for part, target in zip(x.split(size), targets.split(size), strict=True):
        logits = model.softcap(model.lm_head(part).float())
        losses.append(F.cross_entropy(logits, target, reduction='none'))
    return torch.cat(losses)


def group_by_position(losses):
    """Average (2, N) positions and losses over the positions 1, 2, 3-4, 5-8, ..."""
    position, loss = losses
    rows = []
    power = torch.frexp(position).exponent  # positions from 0: 0 | 1 | 2 3 | 4 to 7
    for k in power.unique():
        chosen = power == k
        rows.append({'from': int(position[chosen].min()) + 1, 'to': int(position[chosen].max()) + 1,
                     'tokens': int(chosen.sum()), 'loss': loss[chosen].mean().item()})
    return rows


def find_bad_activations(blocks, by_position):
    """List the parts whose output is zero or not finite, and layers with many inactive units."""
    problems = []
    for row in blocks:
        for part in ('attention', 'MLP'):
            where = f'block {row["block"]}, {part}'
            if not math.isfinite(row[part]):  # All that follows is not finite either.
                return [*problems, f'{where}: its output is NaN or infinite, but all weights are finite']
            if row[part] <= 1e-6 * row['stream']:
                problems.append(f'{where}: its output is zero')
        if row['dead units'] >= row['units'] / 2:
            problems.append(f'block {row["block"]}, MLP: {row["dead units"]:,} of {row["units"]:,} units '
                            'are inactive')
    if not all(math.isfinite(row['loss']) for row in by_position):
        problems.append('logits: NaN or infinite, but the outputs of all blocks are finite')
    return problems


# -----------------------------------------------------------------------------
# output

def print_table(section, rows, output):
    """Print rows, {column: value}, as a table, a single row as a list; or as lines of JSON."""
    if output != 'text':
        for row in rows:
            finite = {'section': section, **row}
            for name, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):  # JSON has no NaN.
                    finite[name] = None
            print_json(finite)
        return
    print(f'\n{section}')
    if len(rows) == 1:
        rows = [{'': name, ' ': value} for name, value in rows[0].items()]
    else:
        rows = [dict.fromkeys(rows[0], 0) | {name: name for name in rows[0]}, *rows]
    for row in rows:
        print('  ' + '  '.join(f'{text_of(value):>10}' for value in row.values()))
