"""The settings of a run: what is wrong with them, what a checkpoint records, what a resume may change."""

import dataclasses
import importlib.util
import os

import numpy as np
import torch

from hotloop.system.distributed import print0
from hotloop.system.files import is_inside
from hotloop.system.text import shell

# settings with values that need a package beyond requirements.txt
PACKAGES = (('wandb_log', True, 'wandb'), ('tensorboard', True, 'tensorboard'),
            ('optimizer', 'adamw8bit', 'bitsandbytes'))
ABOVE_0 = ('learning_rate', 'muon_lr', 'embed_lr', 'max_iters', 'max_epochs', 'time_budget', 'batch_size',
           'gradient_accumulation_steps', 'eval_interval', 'eval_tokens', 'eval_iters',
           'log_interval', 'loss_chunks', 'patience', 'depth')
BELOW_1 = ('beta1', 'beta2', 'muon_momentum')
# {setting: {another: the values that it allows}}. The budget decides when the rate decays; the states
# of adamw8bit cannot be divided, nor can the penalty of a part of a matrix be computed
ALLOWED = {
    'time_budget': {'decay_lr': (True,), 'lr_decay_iters': (None,)},
    'shard': {'auto_batch': (False,), 'ortho_penalty': (0.0,), 'optimizer': ('adamw', 'muon')}}
# these settings belong to a command and its machine, not to the run that is resumed
OF_THE_COMMAND = {'out_dir', 'init_from', 'resume', 'eval_only', 'dry_run', 'device', 'backend'}


def setting_problems(cfg):
    """List the problems with the settings of train.py, one sentence each."""
    wrong = []
    for name, value in dataclasses.asdict(cfg).items():
        if isinstance(value, int | float) and value < 0:
            wrong.append(f'{name}={value} must not be negative')
        if name in ABOVE_0 and value == 0:
            wrong.append(f'{name}=0 must be above 0')
        if name in BELOW_1 and value >= 1:
            wrong.append(f'{name}={value} must be below 1')
    if not cfg.out_dir:
        wrong.append('out_dir is empty; name a folder, for example --out_dir=out')
    if not 0 < cfg.decay_fraction <= 1:
        wrong.append(f'decay_fraction={cfg.decay_fraction} must be above 0 and at most 1')
    for setting, others in ALLOWED.items():
        for name, values in others.items():
            is_set = getattr(cfg, setting) not in (None, 'none')
            if is_set and getattr(cfg, name) not in values:
                wrong.append(f'{name}={getattr(cfg, name)!r} contradicts {setting}; remove {setting}, '
                             f'or use --{name}={values[0]}')
    is_open = cfg.time_budget is not None and cfg.max_epochs is None and cfg.max_iters == type(cfg).max_iters
    if is_open and 0 < cfg.warmup_iters < 1:
        wrong.append(f'warmup_iters={cfg.warmup_iters:g} is a fraction of steps that time_budget '
                     'leaves open; give a number of steps, or --max_iters')
    if cfg.mirror_dir and is_inside(cfg.out_dir, cfg.mirror_dir):
        wrong.append(f'out_dir={cfg.out_dir!r} lies inside mirror_dir={cfg.mirror_dir!r}; to continue '
                     'a run in its mirror, give --mirror_dir=None')
    if os.path.exists(cfg.init_from) and not cfg.eval_only and is_inside(cfg.init_from, cfg.out_dir):
        wrong.append(f'init_from={cfg.init_from!r} is inside out_dir={cfg.out_dir!r}, which a new run '
                     'renames; give the new run a folder, such as --out_dir=out-tuned')
    for name, value, package in PACKAGES:
        is_used = getattr(cfg, name) == value and not (cfg.eval_only or cfg.dry_run)
        if is_used and importlib.util.find_spec(package) is None:
            wrong.append(f'{name}={value!r} needs {package}: pip install {package}')
    return wrong


def record_of(settings, model, datasets, splits, env):
    """Return the settings, data, tokenizer and machine as a checkpoint records them."""
    config = {**dataclasses.asdict(model.config), **dataclasses.asdict(settings.lora),
              **dataclasses.asdict(settings.train), 'resume': False}
    if settings.latest:  # the command that began the run
        config['init_from'] = settings.latest.checkpoint.get('config', {}).get('init_from', 'scratch')
    fingerprints = {}
    for name, split in splits.items():
        fingerprints[name] = ' '.join(part.fingerprint() for part in split.splits)
    device = env.device.type
    if device == 'cuda':
        device = torch.cuda.get_device_name(env.device)
    record = {'config': config, 'tokenizer': datasets[0].meta['tokenizer'], 'data': fingerprints,
              'versions': {'torch': str(torch.__version__), 'numpy': np.__version__},
              'machine': {'device': device, 'dtype': str(env.dtype), 'world': env.world,
                          'threads': torch.get_num_threads(), 'compile': env.compile}}
    templates = {dataset.meta['template'] for dataset in datasets} - {None}
    if len(templates) == 1:  # with several, the template for chat is ambiguous
        record['template'] = templates.pop()
    return record


# -----------------------------------------------------------------------------
# resuming

def checkpoint_settings(checkpoint, shape):
    """Return {setting: value} that a checkpoint gives the run that resumes it. shape: its model's."""
    without = {'optimizer': 'adamw', 'depth': None, 'lora_rank': 0}  # of nanoGPT's, which lack the settings
    saved = {**without, **checkpoint['model_args'], **checkpoint.get('config', {}), **shape}
    own = set(OF_THE_COMMAND)
    if 'state' not in checkpoint:  # nanoGPT's, whose defaults were for another machine
        for name, value in (('dtype', 'float32'), ('compile', False)):
            if saved.get(name) != value:
                own.add(name)
    if saved.get('warmup_fraction') is not None:  # warmup_iters holds it now
        saved['warmup_iters'] = saved['warmup_fraction']
    if saved.pop('document_mask', False):  # is pack_rows now
        saved['pack_rows'] = True
    return {name: value for name, value in saved.items() if name not in own}


def compare_settings(objects, given, before, fixed):
    """
    Print the given settings that differ from the checkpoint's, {name: value}. Raises ValueError for
    those in `fixed`, for which None stands for the checkpoint's value.
    """
    now = {}
    for o in objects:
        now.update(dataclasses.asdict(o))
    wrong, flags = [], []
    for name, place in given.items():
        value, was = now[name], before.get(name, now[name])
        if name not in fixed:
            print_change(name, was, value)
        elif value not in (was, None):
            wrong.append(f'{place}: {name}={value!r}, but the checkpoint has {was!r}, which cannot '
                         'change on resume')
            flags.append(f'--{name}={was}')
    if wrong:
        raise ValueError('\n'.join([*wrong, f'to continue it: {shell(*flags)}; for a new run from '
                                    'its weights: --init_from=PATH --dataset=NAME']))


def compare_record(now, before, dataset):
    """Print what differs in two records of a run. Raises ValueError if the data do."""
    if before.get('data', now['data']) != now['data']:
        raise ValueError(f'dataset={dataset!r} is not the data of this run, whose fingerprints are '
                         f'{before["data"]}, not {now["data"]}; name the right one with --dataset '
                         '(prepare.py moved an older one to NAME.1), or start a new run with '
                         '--init_from=PATH')
    for part in ('versions', 'machine'):
        for name, value in now[part].items():
            print_change(name, before.get(part, {}).get(name, value), value)


def print_change(name, before, now):
    """Print a value that a resume changes."""
    if before != now:
        print0(f'{name}: {before!r} before, {now!r} now')
