"""The diagnosis of a checkpoint: its training, weights, activations, and predictions on validation data."""

import json
import math
import os
import re
import sys
from collections import defaultdict

import numpy as np
import torch

from hotloop.data.dataset import open_datasets
from hotloop.inference.score import print_json
from hotloop.inference.watch import Watch
from hotloop.system.files import replacing
from hotloop.system.text import text_of
from hotloop.training.evaluate import fixed_windows
from hotloop.training.forecast import count_parts
from hotloop.training.mixture import open_split
from hotloop.training.record import DIAGNOSIS
from hotloop.training.report import write_report

TOKENS, AT_ONCE = 2**14, 2**12  # tokens that the model runs on: in all, and in a batch
SETTINGS = ('dataset', 'init_from', 'preset', 'optimizer', 'learning_rate', 'lr_schedule', 'min_lr')


def diagnose(found, model, device, dtype, cfg):
    """
    Prints the diagnosis of a float32 model as tables, or with output='jsonl' as lines of JSON, and adds the
    tables to the report of its run. found: the Weights it was opened from. cfg: sample.py's settings.
    """
    tables = {}
    for section, rows, about in sections(found, model, device, dtype, cfg.data_dir):
        tables[section + about] = by_kind(rows) if section == 'weights' else rows
        show(section, rows if cfg.output == 'jsonl' else tables[section + about], cfg.output, about)
    if os.path.isfile(found.path) and not cfg.adapter:  # an adapter makes another model of it
        add_to_report(os.path.dirname(found.path), tables)


@torch.no_grad()
def sections(found, model, device, dtype, data_dir):
    """
    Yields (section, its rows or one {name: value}, what to add to its title). Without the validation data of
    its training, the model runs on random ids.
    """
    yield 'training', training(found, model), ''
    parts = [*count_parts(model).items(), ('all', model.num_params())]
    yield 'parameters', [{'part': part, 'parameters': n} for part, n in parts], ''
    weights = [measure(name, p) for name, p in model.named_parameters()]
    yield 'weights', weights, ''
    problems, notes = wrong_weights(weights), []
    if any(row['not_finite'] for row in weights):
        notes.append('the model was not run, because its weights are not finite')
    else:
        try:
            batches, source = val_batches(found, model.config, data_dir), 'validation data'
        except ValueError as e:
            notes.append(f'no loss by position and no calibration, because {e}')
            batches, source = random_batches(model.config), 'random ids'
        model.to(device).eval().compute_dtype = dtype
        watch = Watch(model)
        for batch in batches:
            watch.run(*(torch.from_numpy(part).to(device) for part in batch))
        yield 'blocks', watch.blocks(), (': RMS of the residual stream and of what is added to it, on '
                                         f'{watch.num_tokens:,} tokens of {source}')
        problems += watch.problems()
        for section, rows in watch.predictions().items():
            about = ': confidence is the probability p of the likeliest token'
            yield section, rows, about if section == 'predictions' else ''
    yield 'problems', [{'problem': problem} for problem in problems or ['none found']], ''
    if notes:
        yield 'notes', [{'note': note} for note in notes], ''


def training(found, model):
    """What a model was trained on, and how far: {what: value}."""
    checkpoint, config = found.checkpoint, found.checkpoint.get('config', {})
    step = checkpoint.get('iter_num')
    row = {'weights': found.path, 'step': step, 'max_iters': config.get('max_iters')}
    tokens = checkpoint.get('state', {}).get('tokens_seen')  # best.pt has no state
    names = ('batch_size', 'gradient_accumulation_steps', 'block_size')
    if tokens is None and step is not None and all(isinstance(config.get(name), int) for name in names):
        tokens = step * math.prod(config[name] for name in names)
    row['tokens'] = tokens
    row['tokens per parameter'] = tokens and tokens / model.num_params()
    loss = checkpoint.get('best_val_loss')
    row['best val loss'] = None if loss is None else float(loss)
    row |= {name: config.get(name) for name in SETTINGS}
    if 'lora' in checkpoint:
        row |= {name: checkpoint['lora'][name] for name in ('base', 'lora_rank', 'quantize')}
    machine = checkpoint.get('machine', {})
    row |= {'device': machine.get('device'), 'dtype': machine.get('dtype'), 'processes': machine.get('world')}
    return {name: value for name, value in row.items() if value is not None}


# -----------------------------------------------------------------------------
# weights

def measure(name, p):
    """The numbers of a tensor: its size, norm, extremes, zeros, and how many of its values are not finite."""
    w = p.detach().float()
    w = w[torch.isfinite(w)]
    least, most = (x.item() for x in w.aminmax()) if len(w) else (math.nan, math.nan)
    norm = torch.linalg.vector_norm(w, dtype=torch.float64).item()
    return {'name': name, 'shape': list(p.shape), 'parameters': p.numel(), 'norm': norm,
            'rms': norm / max(len(w), 1)**0.5, 'min': least, 'max': most,
            'zeros': int((w == 0).sum()), 'not_finite': p.numel() - len(w)}


def by_kind(rows):
    """The numbers of the same tensor of all blocks in one row, and which block has the extreme ones."""
    kinds = defaultdict(list)
    for row in rows:
        kinds[re.sub(r'\.\d+\.', '.*.', row['name']).removeprefix('transformer.')].append(row)
    result = []
    for kind, same in kinds.items():
        row = {'name': kind, 'parameters': sum(r['parameters'] for r in same),
               'norm': math.hypot(*(r['norm'] for r in same))}
        for column, choose in (('lowest rms', min), ('highest rms', max)):
            extreme = choose(same, key=lambda r: r['rms'])
            layer = re.search(r'\.\d+\.', extreme['name'])
            row[column] = f'{extreme["rms"]:.3g}' + (f' (h{layer[0].rstrip(".")})' if layer else '')
        row |= {'min': min(r['min'] for r in same), 'max': max(r['max'] for r in same)}
        row |= {name.replace('_', ' '): sum(r[name] for r in same) for name in ('zeros', 'not_finite')}
        result.append(row)
    return result


def wrong_weights(rows):
    """Sentences about values that are not finite and matrices of zeros."""
    found = []
    for row in rows:
        if row['not_finite']:
            found.append(f'{row["name"]}: {row["not_finite"]:,} of {row["parameters"]:,} values are NaN or '
                         'infinite')
        elif row['norm'] == 0 and len(row['shape']) > 1:
            found.append(f'{row["name"]}: all {row["parameters"]:,} values are zero')
    return found


# -----------------------------------------------------------------------------
# data

def val_batches(found, config, data_dir):
    """
    Batches (x, y) or (x, y, documents) of windows spread over the val split that the checkpoint names.
    ValueError if it is not in data_dir.
    """
    cfg, T = found.checkpoint.get('config', {}), config.block_size
    name = cfg.get('dataset')
    if not name:
        raise ValueError(f'{found.path} does not say what it was trained on')
    val = open_split(open_datasets(name, data_dir), 'val', T, cfg.get('document_mask', False),
                     cfg.get('pack_rows', False))
    for split in val.splits:
        split.check_ids(config.vocab_size)
    size, windows = max(AT_ONCE // T, 1), fixed_windows(val, max(TOKENS // T, 2))
    return (part.gather(starts[i:i + size]) for part, starts in windows for i in range(0, len(starts), size))


def random_batches(config):
    """Batches (x, y) of random ids, without targets."""
    T, rng = min(config.block_size, AT_ONCE), np.random.default_rng(0)
    for _ in range(TOKENS // AT_ONCE):
        x = rng.integers(0, config.vocab_size, (AT_ONCE // T, T))
        yield x, np.full_like(x, -1)


# -----------------------------------------------------------------------------
# output

def show(section, content, output, about=''):
    """Prints rows, {column: value}, as a table, or one {name: value} as a list; or both as lines of JSON."""
    rows = [content] if isinstance(content, dict) else content
    if output == 'jsonl':
        for row in rows:
            finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                      for name, value in row.items()}
            print_json({'section': section, **finite})
        return
    print(f'\n{section}{about}')
    table = [list(rows[0]), *([text_of(value) for value in row.values()] for row in rows)]
    if rows is not content:
        table = zip(*table, strict=True)
    elif len(rows[0]) == 1:  # sentences
        del table[0]
    table = list(table)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print('  '.join(['  ' + line[0].ljust(widths[0]), *cells]).rstrip())


def add_to_report(folder, tables):
    """Keeps the tables, {title: rows}, in a run folder and draws its report again. Without a log: nothing."""
    if not os.path.exists(os.path.join(folder, 'log.jsonl')):
        return
    try:
        with replacing(os.path.join(folder, DIAGNOSIS)) as f:
            f.write(json.dumps(tables).encode())
        print(f'\nreport: {write_report(folder)}', file=sys.stderr)
    except (OSError, ValueError) as e:
        print(f'note: the diagnosis is not in the report of {folder}: {e}', file=sys.stderr)
