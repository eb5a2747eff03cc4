"""Choose the settings of a new run: the recipe card of this machine, or those of a depth."""

import math
import os

import torch

from configurator import check_problems
from hotloop.data.dataset import open_datasets
from hotloop.system.device import choose_device, choose_dtype, measure_flops, use_threads
from hotloop.system.distributed import Env, open_process_group, print0

# (least GB of GPU memory, card, its dataset). PyTorch reports up to a tenth less than is sold
CARDS = ((36, 'a100_fast', 'wikitext103'), (21.6, 'vram_24gb', 'wikitext103'),
         (14.4, 'vram_16gb', 'wikitext103'), (7.2, 'vram_8gb', 'wikitext103'),
         (0, 'quickstart', 'stdlib'))
# with a dataset, a command that gives one of these settings gets no card
OWN_MODEL = {'n_layer', 'n_head', 'n_embd', 'optimizer'}
DEPTHS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24)  # that a time budget chooses from
MANY_EPOCHS = 5  # from which on a small model gains by dropout, which costs a fifth of its speed
TOKENS_PER_PARAMETER = 20  # of a compute-optimal run (arXiv 2203.15556)
BUDGET_TOKENS = 8  # for each parameter of the depth that a time budget chooses: tests/bench/LOG.md


def card_for_machine(device):
    """Return (recipe card, its dataset, reason) for this machine, or for the requested device."""
    if torch.cuda.is_available() and device.startswith(('auto', 'cuda')):
        gpu, _ = choose_device(device)
        memory = torch.cuda.get_device_properties(gpu).total_memory / 1e9
        for least, card, dataset in CARDS:
            if memory >= least:
                return f'config/{card}.py', dataset, f'{memory:.0f} GB of GPU memory'
    if torch.backends.mps.is_available() and device in ('auto', 'mps'):
        return 'config/shakespeare_char.py', 'shakespeare_char', 'Apple GPU'
    return 'config/quickstart.py', 'stdlib', 'no GPU'


def shape_of(depth):
    """Return the shape of a depth, about 128 x (depth / 4)^1.63 channels: 128 for 4 layers, 768 for 12."""
    channels, block_size = 64, 512  # channels: of a head
    if depth >= 12:
        channels, block_size = 128, 1024
    elif depth < 4:
        channels = 32
    n_head = max(int(128 * (depth / 4)**1.63 / channels + 0.5), 1)
    return {'n_layer': depth, 'n_head': n_head, 'n_embd': n_head * channels, 'block_size': block_size}


def num_parameters(depth):
    """Return the parameters of the blocks of a depth as if all layers attended."""
    return 12 * depth * shape_of(depth)['n_embd']**2


def depth_settings(depth, world=1, tokens=None, text_tokens=None):
    """
    Return {setting: value} of a modern GPT with so many layers. A step has 128 x depth^2 tokens,
    rounded down to a power of two, at least 2,048; its sequences are a multiple of the processes.
    tokens: that the run will read; None: 20 for each parameter. text_tokens: in the training split.
    """
    shape = shape_of(depth)
    step = max(2 ** int(math.log2(128 * depth**2)), 2048)
    sequences = math.ceil(step / shape['block_size'] / world) * world
    batch_size = max(n for n in range(1, 33) if sequences % n == 0)
    tokens = tokens or TOKENS_PER_PARAMETER * num_parameters(depth)
    max_iters = max(round(tokens / (sequences * shape['block_size'])), 1)
    # the more often a text is read, the more decay keeps a model from memorizing it: measured in
    # tests/bench/LOG.md; arXiv 2509.14786
    epochs = max(tokens / text_tokens, 1) if text_tokens else 1
    settings = {**shape, 'preset': 'hybrid', 'batch_size': batch_size,
                'gradient_accumulation_steps': sequences // batch_size, 'max_iters': max_iters,
                'embed_lr': 0.05, 'weight_decay': 0.1 * epochs**0.5,
                'optimizer': 'muon', 'muon_momentum': 0.95, 'learning_rate': 2e-3, 'muon_lr': 0.02,
                'min_lr': 0.0, 'lr_schedule': 'linear', 'warmup_iters': 100, 'log_interval': 20}
    if depth < 8:
        # small steps are noisy, so the more of them there are, the smaller they must be
        muon_lr = min(max(0.025 * (1000 / max_iters)**0.5, 0.01), 0.06)
        settings |= {'muon_momentum': 0.85, 'learning_rate': 8e-3, 'muon_lr': muon_lr, 'warmup_iters': 10,
                     'weight_decay': 0.05 * epochs**0.75, 'multi_token': 0.5}
        if epochs > MANY_EPOCHS:
            settings |= {'dropout': 0.2, 'x0_mix': True}  # what the mix gains: tests/bench/LOG.md
    return settings


def flops_share(width):
    """Return the share of a large product's FLOP/s that a model of so many channels reaches."""
    return width / (width + 768)


def tokens_within(depth, seconds, flops):
    """Return the tokens that a depth reads in so many seconds. flops: FLOP/s of a large product."""
    share = flops_share(shape_of(depth)['n_embd'])
    return seconds * share * flops / (6 * num_parameters(depth))


def choose_depth(seconds, flops):
    """Return the depth that reads about BUDGET_TOKENS for each parameter in so many seconds."""
    def misfit(depth):
        tokens = tokens_within(depth, seconds, flops)
        return abs(math.log(tokens / (BUDGET_TOKENS * num_parameters(depth))))
    return min(DEPTHS, key=misfit)


def choose_settings(cfg, given):
    """
    Return the {setting: value} of the depth that a command names, or that its time budget chooses by
    the speed of this machine. With a time budget, the rest follows from the tokens that the run will
    read.
    """
    check_problems([cfg])  # such as a depth of 0
    if cfg.init_from != 'scratch':
        raise ValueError(f'depth={cfg.depth} shapes a new model, and init_from={cfg.init_from} has a '
                         'shape; omit one of them')
    world = int(os.environ.get('WORLD_SIZE', '1'))
    dataset = cfg.dataset
    if 'dataset' not in given:
        _, dataset, _ = card_for_machine(cfg.device)
    if cfg.time_budget is None:
        return {'dataset': dataset, **depth_settings(cfg.depth, world)}
    text_tokens = 0
    for one in open_datasets(dataset, cfg.data_dir):
        text_tokens += one.num_tokens()
    device, _ = choose_device(cfg.device, int(os.environ.get('LOCAL_RANK', '0')))
    dtype, _ = choose_dtype(cfg.dtype, device, training=True)
    if cfg.deterministic is True:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # read by cuBLAS at its first product
    use_threads()  # those of the run
    flops = world * measure_flops(device, dtype)
    if world > 1:  # the settings must be those of all processes
        open_process_group(cfg.backend, device)
        flops = Env(int(os.environ['RANK']), world).broadcast(flops)
    depth = cfg.depth or choose_depth(60 * cfg.time_budget, flops)
    if cfg.depth is None:
        print0(f'depth: {depth}, for the speed of this machine; --depth=N chooses another')
    tokens = tokens_within(depth, 60 * cfg.time_budget, flops)
    settings = depth_settings(depth, world, tokens, text_tokens)
    steps = settings.pop('max_iters')  # about: the clock decides
    if 'preset' in given:  # one that other programs run has no such mix
        settings.pop('x0_mix', None)
    # 5 evaluations take about 8% of the run: without a backward pass, a third of the work of a step
    eval_tokens = 0.08 * tokens / 5 / 2 * 3
    return {**settings, 'dataset': dataset, 'depth': depth, 'eval_interval': max(round(steps / 5), 1),
            'log_interval': max(round(steps / 100), 1),
            'eval_tokens': 2 ** int(min(max(math.log2(eval_tokens), 14), 20))}
