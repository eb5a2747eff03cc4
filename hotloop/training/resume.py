"""What a checkpoint records of its run, and what a resume takes from it or compares with it."""

import dataclasses

import numpy as np
import torch

from hotloop.data.dataset import name_of_path
from hotloop.system.text import shell

# these settings belong to a command and its machine, not to the run that is resumed
OWN = {'out_dir', 'init_from', 'resume', 'eval_only', 'dry_run', 'device', 'backend'}


def checkpoint_settings(checkpoint, shape):
    """Return {setting: value} that a checkpoint gives the run that resumes it. shape: its model's."""
    saved = {**checkpoint['model_args'], **checkpoint.get('config', {}), **shape}
    own = set(OWN)
    if 'state' not in checkpoint:  # nanoGPT's, whose defaults were for another machine
        if saved.get('dtype') != 'float32':
            own.add('dtype')
        if isinstance(saved.get('dataset'), str):
            saved['dataset'] = name_of_path(saved['dataset'])
        if saved.get('compile') is not False:
            own.add('compile')
    if saved.get('batch_size') == 'auto':  # a setting of its own now
        own.add('batch_size')
    if saved.get('warmup_fraction') is not None:  # warmup_iters holds it now
        saved['warmup_iters'] = saved['warmup_fraction']
    return {name: value for name, value in saved.items() if name not in own}


def compare_settings(objects, given, below, bound):
    """
    List a line for each setting given with another value than the checkpoint's, `below`. Raises
    ValueError for those in `bound`, for which None stands for the checkpoint's value.
    """
    lines, wrong, right = [], [], []
    for o in objects:
        for name, now in dataclasses.asdict(o).items():
            before = below.get(name, now)
            if name not in given or now == before or (name in bound and now is None):
                continue
            if name in bound:
                wrong.append(f'{given[name]}: {name}={now!r}, but the checkpoint has {before!r}, '
                             'which cannot change on resume')
                right.append(f'--{name}={before}')
            else:
                lines.append(f'{name}: {before!r} before, {now!r} now')
    if wrong:
        raise ValueError('\n'.join([*wrong, f'to continue it: {shell(*right)}; for a new run from '
                                    'its weights: --init_from=PATH']))
    return lines


def record_of(settings, model, datasets, splits, env):
    """Return the settings, data, tokenizer and machine as a checkpoint records them."""
    cfg = settings.train
    origin = cfg.init_from
    if settings.latest:  # the command that began the run
        origin = str(settings.latest.checkpoint.get('config', {}).get('init_from', 'scratch'))
    if origin == 'resume':
        origin = 'scratch'
    config = {**dataclasses.asdict(model.config), **dataclasses.asdict(settings.lora),
              **dataclasses.asdict(cfg), 'init_from': origin, 'resume': False}
    fingerprints = {}
    for name, split in splits.items():
        fingerprints[name] = ' '.join(part.fingerprint() for part in split.splits)
    device = env.device.type
    if device == 'cuda':
        device = torch.cuda.get_device_name(env.device)
    metas = [dataset.meta for dataset in datasets]
    machine = {'device': device, 'dtype': str(env.dtype), 'world': env.world,
               'threads': torch.get_num_threads(), 'compile': env.compile}
    record = {'config': config, 'tokenizer': metas[0]['tokenizer'], 'data': fingerprints,
              'versions': {'torch': str(torch.__version__), 'numpy': np.__version__},
              'machine': machine}
    templates = {meta['template'] for meta in metas} - {None}
    if len(templates) == 1:  # with several, the template for chat is ambiguous
        record['template'] = templates.pop()
    return record


def compare_record(checkpoint, record, dataset):
    """
    List a line for versions or a machine that differ from the checkpoint's. Raises ValueError if
    the data differ. record: of this run, as a checkpoint has it.
    """
    if 'data' in checkpoint and checkpoint['data'] != record['data']:
        before = checkpoint.get('config', {}).get('dataset', '')
        raise ValueError(f'dataset={dataset!r} is not the data that this run was trained on '
                         f'({before!r}): their fingerprints are {record["data"]} now, '
                         f'{checkpoint["data"]} before; name the right one with --dataset, or start '
                         'a new run with --init_from=PATH')
    before = {**checkpoint.get('versions', {}), **checkpoint.get('machine', {})}
    changed = []
    for name, now in {**record['versions'], **record['machine']}.items():
        if before.get(name, now) != now:
            changed.append(f'{name} {before[name]} before, {now} now')
    if not changed:
        return []
    return [f'{"; ".join(changed)}; results may differ from an uninterrupted run']
