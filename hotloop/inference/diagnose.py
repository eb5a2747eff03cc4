"""Diagnose a model: weights that are not finite, activations of its blocks, dead units, loss by position."""

import math
from collections import defaultdict

import torch
from torch.nn.functional import cosine_similarity

from hotloop.inference.score import print_row

MAX_LOGITS = 2**24  # computed at once
INACTIVE = 1e-3  # An inactive unit never exceeds this fraction of the RMS of its layer.


@torch.no_grad()
def diagnose(model, batches, output, matrices=None):
    """
    Print tables about a model in eval mode, or with output='jsonl' lines of JSON. batches: tuples
    (x, y, position) of (B, T) tensors, or with the documents of the tokens; y is -1 where there is
    no target. matrices: those of direct feedback alignment, if it trained the model. The model does not run
    if a weight is not finite.
    """
    problems = []
    finite = True
    for name, p in model.named_parameters():
        not_finite = p.numel() - int(p.isfinite().sum())
        if not_finite:
            problems.append(f'{name}: {not_finite:,} of {p.numel():,} values are NaN or infinite')
            finite = False
        elif not p.any() and not name.endswith('bias'):
            problems.append(f'{name}: all {p.numel():,} values are zero')
    if finite:
        batches = [[part.to(model.cos.device) for part in batch] for batch in batches]
        blocks, by_position = measure_blocks(model, batches)
        if matrices is not None and by_position:
            for row, cosine in zip(blocks, feedback_cosines(model, batches, matrices), strict=True):
                row['cosine'] = cosine
        print_table('blocks', blocks, output)
        if by_position:
            print_table('loss by position', by_position, output)
        problems += find_problems(blocks, by_position)
    print_table('problems', [{'problem': problem} for problem in problems or ['none found']], output)


def measure_blocks(model, batches):
    """
    Run a model on batches. Returns rows of its blocks, with the RMS of a block's input and of what
    attention and MLP add to it, and rows of its loss by position.
    """
    squares = defaultdict(list)  # {(place, layer): mean squares of the batches}
    peaks = {}  # {layer: the largest |output| of each MLP unit, (n_ff,)}
    outputs = []  # of the last block

    def recorder(place, layer):
        def record(module, args, output=None):
            values = args[0] if output is None else output
            squares[place, layer].append(values.float().square().mean().item())
            if place == 'units':
                peak = values.abs().flatten(0, -2).amax(0)
                peaks[layer] = torch.maximum(peaks.get(layer, peak), peak)
        return record

    last = model.transformer.h[-1]
    hooks = [last.register_forward_hook(lambda module, args, output: outputs.append(output))]
    for layer, block in enumerate(model.transformer.h):
        hooks += [block.register_forward_pre_hook(recorder('stream', layer)),
                  block.mlp.c_proj.register_forward_pre_hook(recorder('units', layer)),
                  block.ln_1_post.register_forward_hook(recorder('attention', layer)),
                  block.ln_2_post.register_forward_hook(recorder('MLP', layer))]
    losses = []
    size = max(MAX_LOGITS // model.config.vocab_size, 1)
    for x, y, position, *documents in batches:
        model(x, None, *documents)
        seen = y >= 0
        for part in zip(*(t[seen].split(size) for t in (outputs.pop(), y, position)), strict=True):
            output, target, place = part
            loss = model.loss(output[:, None], target[:, None])  # Each token is a sequence of one.
            losses.append(torch.stack([place, loss]))
    for hook in hooks:
        hook.remove()
    rows = []
    for layer, peak in peaks.items():
        row = {'block': layer}
        for place in ('stream', 'attention', 'MLP', 'units'):
            means = squares[place, layer]
            row[place] = math.sqrt(sum(means) / len(means))
        row['dead units'] = int((peak <= INACTIVE * row['units']).sum())
        row['units'] = len(peak)
        rows.append(row)
    return rows, group_by_position(torch.cat(losses, 1).cpu())


def feedback_cosines(model, batches, matrices):
    """Return the cosine of each block's gradient by direct feedback with that by backpropagation."""
    gradients = []
    for model.feedback in (None, matrices):
        for x, y, _, *documents in batches:
            with torch.enable_grad():
                model(x, y, *documents).sum().backward()
        gradients.append([torch.cat([p.grad.flatten() for p in block.parameters()])
                          for block in model.transformer.h])
        model.zero_grad()
    return [cosine_similarity(found, exact, dim=0).item() for exact, found in zip(*gradients, strict=True)]


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


def find_problems(blocks, by_position):
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
            problems.append(f'{where}: {row["dead units"]:,} of {row["units"]:,} units are inactive')
    if not all(math.isfinite(row['loss']) for row in by_position):
        problems.append('logits: NaN or infinite, but the outputs of all blocks are finite')
    return problems


def print_table(section, rows, output):
    """Print rows, {column: value}, as a table or as lines of JSON."""
    for row in rows:
        print_row({'section': section, **row}, output, row is rows[0])
