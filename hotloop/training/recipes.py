"""Choose the settings of a new run: the recipe card of this machine, or those of a depth."""

import math
import os

import torch

from hotloop.data.dataset import open_datasets
from hotloop.system.device import choose_device, choose_dtype, measure_flops
from hotloop.system.distributed import print0

# (least GB of GPU memory, card, its dataset). PyTorch reports up to a tenth less than is sold
CARDS = ((36, 'a100_fast', 'wikitext103'), (21.6, 'vram_24gb', 'wikitext103'),
         (14.4, 'vram_16gb', 'wikitext103'), (7.2, 'vram_8gb', 'wikitext103'),
         (0, 'quickstart', 'stdlib'))
APPLE_CARD = 'shakespeare_char'
# a command that gives one of these settings describes its own model
SHAPE = {'preset', 'n_layer', 'n_head', 'n_embd', 'block_size', 'optimizer'}
# depths from which on heads, contexts and rates are those of larger models
SMALL, LARGE = 8, 12
DEPTHS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
EVALUATIONS, LOG_LINES = 5, 100  # of a run with a time budget, about
TOKENS_PER_PARAMETER = 20  # of a compute-optimal run (arXiv 2203.15556)


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
    steps = settings.pop('max_iters')  # about: the clock decides
    settings['eval_interval'] = max(round(steps / EVALUATIONS), 1)
    settings['log_interval'] = max(round(steps / LOG_LINES), 1)
    # an evaluation has no backward pass, a third of the work
    eval_tokens = 0.08 * tokens / EVALUATIONS / 2 * 3
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
