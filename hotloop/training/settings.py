"""Check the settings of a training run."""

import dataclasses
import importlib.util
import os

from hotloop.system.files import is_inside
from hotloop.training.schedule import schedule_problems

# settings with values that need a package beyond requirements.txt
PACKAGES = (('wandb_log', True, 'wandb'), ('tensorboard', True, 'tensorboard'),
            ('optimizer', 'adamw8bit', 'bitsandbytes'))

def setting_problems(cfg):
    """List the problems with the settings of train.py, one sentence each."""
    wrong = []
    above_0 = ('learning_rate', 'muon_lr', 'max_iters', 'max_epochs', 'batch_size',
               'gradient_accumulation_steps', 'eval_interval', 'eval_tokens', 'eval_iters',
               'log_interval', 'loss_chunks', 'patience', 'depth')
    for name, value in dataclasses.asdict(cfg).items():
        if isinstance(value, int | float) and value < 0:
            wrong.append(f'{name}={value} must not be negative')
        if name in above_0 and value == 0:
            wrong.append(f'{name}=0 must be above 0')
        if name in ('beta1', 'beta2', 'muon_momentum') and value >= 1:
            wrong.append(f'{name}={value} must be at least 0 and below 1')
    wrong += schedule_problems(cfg)
    if cfg.seed >= 2**63:
        wrong.append(f'seed={cfg.seed} must be below 2**63')
    for name in ('out_dir', 'mirror_dir'):
        path = getattr(cfg, name)
        if path is not None and (not path):
            wrong.append(f'{name}={path!r} is not a valid folder name')
    if not wrong and cfg.mirror_dir and is_inside(cfg.out_dir, cfg.mirror_dir):
        wrong.append(f'out_dir={cfg.out_dir!r} lies inside mirror_dir={cfg.mirror_dir!r}; to '
                     'continue a run in its mirror, give --mirror_dir=None')
    is_start = os.path.exists(cfg.init_from) and not cfg.eval_only
    if is_start and is_inside(cfg.init_from, cfg.out_dir):
        wrong.append(f'init_from={cfg.init_from!r} would be moved aside with out_dir; choose '
                     'another')
    if cfg.pack_rows and cfg.document_mask:
        wrong.append('pack_rows=True keeps rows apart already; remove document_mask=True')
    if cfg.shard != 'none' and cfg.auto_batch:
        wrong.append(f'auto_batch=True does not try sharded models; with shard={cfg.shard!r} set '
                     'batch_size')
    if cfg.shard != 'none' and cfg.optimizer == 'adamw8bit':
        wrong.append(f'shard={cfg.shard!r} divides the states of adamw and muon, not of adamw8bit')
    for name, value, package in PACKAGES:
        if getattr(cfg, name) == value and importlib.util.find_spec(package) is None:
            wrong.append(f'{name}={value!r} needs {package}: pip install {package}')
    return wrong
