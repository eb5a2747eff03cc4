"""The layer of settings below files and flags: a recipe card, a depth, or the checkpoint of a resume."""

import dataclasses
import importlib.util
import math
import os

import numpy as np
import torch

from hotloop.data.dataset import name_of_path, open_datasets
from hotloop.system import host
from hotloop.system.device import choose_device, choose_dtype, measure_flops
from hotloop.system.distributed import print0
from hotloop.system.files import is_inside
from hotloop.system.text import shell
from hotloop.training.schedule import schedule_problems

# (least GB of GPU memory, card, its dataset). PyTorch reports up to a tenth less than is sold
CARDS = ((36, 'a100_fast', 'wikitext103'), (21.6, 'vram_24gb', 'wikitext103'),
         (14.4, 'vram_16gb', 'wikitext103'), (7.2, 'vram_8gb', 'wikitext103'),
         (0, 'quickstart', 'stdlib'))
APPLE_CARD = 'shakespeare_char'
# a command that gives one of these settings describes its own model
SHAPE = {'preset', 'n_layer', 'n_head', 'n_embd', 'block_size', 'optimizer'}
# these settings belong to a command and its machine, not to the run that is resumed
OWN = {'out_dir', 'init_from', 'resume', 'eval_only', 'dry_run', 'device', 'backend'}
# depths from which on heads, contexts and rates are those of larger models
SMALL, LARGE = 8, 12
DEPTHS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
TOKENS_PER_PARAMETER = 20  # of a compute-optimal run (arXiv 2203.15556)


def setting_problems(cfg):
    """List the problems with the settings of train.py, one sentence each."""
    wrong = []
    above_0 = ('max_iters', 'max_epochs', 'batch_size', 'gradient_accumulation_steps',
               'eval_interval', 'eval_tokens', 'eval_iters', 'log_interval', 'loss_chunks', 'patience',
               'depth')
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
        if path is not None and (not path or '\0' in path):
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
    needs = (('wandb_log', 'wandb'), ('tensorboard', 'tensorboard'))
    for name, package in needs:
        if getattr(cfg, name) and importlib.util.find_spec(package) is None:
            wrong.append(f'{name}=True needs {package}: pip install {package}')
    if cfg.optimizer == 'adamw8bit' and importlib.util.find_spec('bitsandbytes') is None:
        wrong.append("optimizer='adamw8bit' needs bitsandbytes: pip install bitsandbytes")
    return wrong


# -----------------------------------------------------------------------------
# a recipe card

def card_for_machine(device):
    """Return (recipe card, its dataset, reason) for this machine, or for the requested device."""
    if torch.cuda.is_available() and device.startswith(('auto', 'cuda')):
        gpu, _ = choose_device(device)
        memory = torch.cuda.get_device_properties(gpu).total_memory / 1e9
        for least, card, dataset in CARDS:
            if memory >= least:
                return f'config/{card}.py', dataset, f'{memory:.0f} GB of GPU memory'
    if torch.backends.mps.is_available() and device in ('auto', 'mps'):
        return f'config/{APPLE_CARD}.py', 'shakespeare_char', 'Apple GPU'
    return 'config/quickstart.py', 'stdlib', 'no GPU'


# -----------------------------------------------------------------------------
# a depth

def head_channels(depth):
    """Return the channels of an attention head of a depth."""
    if depth < SMALL:
        return 32
    return 64 if depth < LARGE else 128


def width(depth):
    """Return the channels of a depth, about 128 x (depth / 4)^1.63: 128 for 4 layers, 768 for 12."""
    heads = int(128 * (depth / 4)**1.63 / head_channels(depth) + 0.5)
    return head_channels(depth) * max(heads, 1)


def num_parameters(depth):
    """Return the parameters of the blocks of a depth, by which a token is multiplied."""
    return 12 * depth * width(depth)**2


def depth_settings(depth, world=1, tokens=None, text_tokens=None):
    """
    Return {setting: value} of a modern GPT with so many layers. A step has 128 x depth^2 tokens,
    rounded down to a power of two, at least 2,048; its sequences are a multiple of the processes.
    tokens: that the run will read; None: 20 for each parameter. text_tokens: in the training split.
    """
    block_size = 256
    if depth >= SMALL:
        block_size = 512 if depth < LARGE else 1024
    step = max(2 ** int(math.log2(128 * depth**2)), 2048)
    sequences = math.ceil(step / block_size / world) * world
    batch_size = max(n for n in range(1, 33) if sequences % n == 0)
    tokens = tokens or TOKENS_PER_PARAMETER * num_parameters(depth)
    max_iters = max(round(tokens / (sequences * block_size)), 1)
    settings = {'preset': 'modern', 'n_layer': depth, 'n_embd': width(depth),
                'n_head': width(depth) // head_channels(depth), 'block_size': block_size,
                'batch_size': batch_size, 'gradient_accumulation_steps': sequences // batch_size,
                'max_iters': max_iters, 'optimizer': 'muon', 'muon_momentum': 0.95,
                'learning_rate': 2e-3, 'muon_lr': 0.02, 'min_lr': 0.0, 'lr_schedule': 'linear',
                'warmup_iters': 100, 'log_interval': 20}
    if depth < SMALL:
        # small steps are noisy, so the more of them there are, the smaller they must be
        muon_lr = min(max(0.025 * (1000 / max_iters)**0.5, 0.01), 0.06)
        settings |= {'muon_momentum': 0.85, 'learning_rate': 8e-3, 'muon_lr': muon_lr,
                     'warmup_iters': 10}
    if text_tokens:
        # the more often a text is read, the more decay keeps a model from learning it by heart:
        # measured in tests/bench/LOG.md; arXiv 2509.14786
        settings['weight_decay'] = 0.1 * max(tokens / text_tokens, 1)**0.5
    return settings


def tokens_within(depth, seconds, flops):
    """Return the tokens that a depth reads in so many seconds. Small matrices reach less FLOP/s."""
    share = width(depth) / (width(depth) + 768)
    return seconds * share * flops / (6 * num_parameters(depth))


def choose_depth(seconds, flops):
    """Return the depth that reads about 20 tokens for each parameter in so many seconds."""
    def misfit(depth):
        tokens = tokens_within(depth, seconds, flops)
        return abs(math.log(tokens / (TOKENS_PER_PARAMETER * num_parameters(depth))))
    return min(DEPTHS, key=misfit)


def budget_settings(cfg, world, text_tokens):
    """
    Return {setting: value} of a run with a time budget and no card: the depth, given or chosen by
    this machine's speed, and what follows from the tokens that it will read.
    """
    device, _ = choose_device(cfg.device, int(os.environ.get('LOCAL_RANK', '0')))
    dtype, _ = choose_dtype(cfg.dtype, device, training=True)
    seconds = 60 * cfg.time_budget
    flops = measure_flops(device, dtype) * world
    depth = cfg.depth or choose_depth(seconds, flops)
    tokens = tokens_within(depth, seconds, flops)
    settings = depth_settings(depth, world, tokens, text_tokens)
    del settings['max_iters']  # the clock decides
    # an evaluation has no backward pass, a third of the work
    eval_tokens = 0.08 * tokens / 2 * 3
    settings['eval_tokens'] = 2 ** int(min(max(math.log2(eval_tokens), 14), 20))
    return {'depth': depth, **settings}


def layer_of_depth(cfg, given):
    """Return the {setting: value} of a depth, given or chosen for a time budget."""
    if cfg.init_from != 'scratch':
        raise ValueError(f'depth={cfg.depth} shapes a new model, and init_from={cfg.init_from} has '
                         'a shape; omit one of them')
    world = int(os.environ.get('WORLD_SIZE', '1'))
    dataset = cfg.dataset
    if 'dataset' not in given:
        _, dataset, _ = card_for_machine(cfg.device)
    if cfg.time_budget is None:
        return {'dataset': dataset, **depth_settings(cfg.depth, world)}
    num_tokens = 0
    for one in open_datasets(dataset, cfg.data_dir):
        num_tokens += one.meta['splits'].get('train', {}).get('tokens', 0)
    layer = budget_settings(cfg, world, num_tokens)
    if cfg.depth is None:
        print0(f'depth: {layer["depth"]}, for the speed of this machine; --depth=N chooses '
               'another')
    return {'dataset': dataset, **layer}


# -----------------------------------------------------------------------------
# a resume

def settings_of(checkpoint, shape):
    """Return {setting: value} that a checkpoint gives the run that resumes it. shape: its model's."""
    saved = {**checkpoint['model_args'], **checkpoint.get('config', {}), **shape}
    own = set(OWN)
    if 'state' not in checkpoint:  # nanoGPT's: its dtype and compile were for another machine
        own.add('dtype')
        if isinstance(saved.get('dataset'), str):
            saved['dataset'] = name_of_path(saved['dataset'])
        if saved.get('compile') is not False:  # its default
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
               'threads': threads(), 'compile': env.compile}
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


def threads():
    """Return the CPU threads of this process: OMP_NUM_THREADS, or its share of the cores."""
    return host.threads_for(int(os.environ.get('LOCAL_WORLD_SIZE', '1')))
