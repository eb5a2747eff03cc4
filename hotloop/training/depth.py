"""One number, the depth, sets shape, batch and rates of a modern GPT."""

import math

from hotloop.system.cards import MODEL
from hotloop.training.schedule import NO_LIMIT

SMALL, LARGE = 8, 12  # depths from which on heads, contexts and rates are those of larger models
TOKENS_PER_PARAMETER = 20  # of a run without a length of its own (arXiv 2203.15556)


def width(depth):
    """Channels of a depth: about 128 x (depth / 4)^1.63, which is 128 for 4 layers and 768 for 12."""
    heads = int(128 * (depth / 4)**1.63 / head_channels(depth) + 0.5)
    return head_channels(depth) * max(heads, 1)


def head_channels(depth):
    """Channels of an attention head of a depth."""
    return 32 if depth < SMALL else 64 if depth < LARGE else 128


def rung(depth, world=1, block_size=None):
    """
    {setting: value} of a depth. block_size: replaces the depth's own. A step has 128 x depth^2 tokens,
    rounded down to a power of two, but at least 2,048. Its sequences are rounded up to a multiple of the
    processes.
    """
    is_small = depth < SMALL
    block_size = block_size or (256 if is_small else 512 if depth < LARGE else 1024)
    tokens = max(2 ** int(math.log2(128 * depth**2)), 2048)
    sequences = math.ceil(tokens / block_size / world) * world
    batch_size = max(n for n in range(1, 33) if sequences % n == 0)
    return {'preset': 'modern', 'n_layer': depth, 'n_embd': width(depth), 'block_size': block_size,
            'n_head': width(depth) // head_channels(depth),
            'batch_size': batch_size, 'gradient_accumulation_steps': sequences // batch_size,
            'optimizer': 'muon', 'muon_momentum': 0.85 if is_small else 0.95,
            'learning_rate': 8e-3 if is_small else 2e-3, 'min_lr': 0.0, 'lr_schedule': 'linear',
            'warmup_iters': 10 if is_small else 100, 'log_interval': 20}


def tokens_per_step(depth, world=1):
    """Tokens of a step of a depth, over all processes."""
    values = rung(depth, world)
    return values['batch_size'] * values['gradient_accumulation_steps'] * values['block_size']


def muon_rate(depth, steps):
    """Muon's peak rate. Small steps are noisy, so the more of them there are, the smaller they must be."""
    if depth >= SMALL:
        return 0.02
    return min(max(0.025 * (1000 / steps)**0.5, 0.01), 0.06)


def set_weight_decay(cfg, given, epochs):
    """The more often a text is read, the more decay keeps a model from learning it by heart."""
    if 'weight_decay' not in given:
        cfg.weight_decay = 0.1 * max(epochs, 1) ** 0.5  # measured in tests/bench/LOG.md; arXiv 2509.14786


def num_parameters(depth):
    """Parameters of the blocks of a depth: those that a token is multiplied with, without the head."""
    return 12 * depth * width(depth)**2


def applies(cfg, given):
    """Whether a command without a card has a depth, or a time budget that chooses one."""
    shape = MODEL if cfg.depth is None else MODEL - {'block_size', 'optimizer'}  # a depth may have other ones
    is_new = cfg.init_from == 'scratch' and not cfg.eval_only and shape.isdisjoint(given)
    return is_new and (cfg.time_budget is not None or cfg.depth is not None)


def set_depth(depth, model_cfg, cfg, given, world, steps=None):
    """
    Sets what a depth decides and `given`, {name: place}, does not. steps: their expected number, if max_iters
    is not known. ValueError if the model comes from somewhere else.
    """
    taken = [name for name in ('n_layer', 'n_embd', 'n_head', 'preset') if name in given]
    if given.get('depth') == '--depth' and taken:
        raise ValueError(f'--depth={depth} sets {taken[0]}, and so does {given[taken[0]]}; remove one of '
                         'them')
    if cfg.init_from != 'scratch':
        raise ValueError(f'{given["depth"]}: depth={depth} shapes a new model, and init_from='
                         f'{cfg.init_from} has a shape; omit one of them')
    values = rung(depth, world, model_cfg.block_size if 'block_size' in given else None)
    sequences = values['batch_size'] * values['gradient_accumulation_steps']
    if 'batch_size' in given:
        values['gradient_accumulation_steps'] = matching_factor(cfg.batch_size, sequences, world)
    elif 'gradient_accumulation_steps' in given:
        values['batch_size'] = matching_factor(cfg.gradient_accumulation_steps, sequences, world)
    for name, value in values.items():
        if name not in given:
            setattr(model_cfg if hasattr(model_cfg, name) else cfg, name, value)
    is_open = cfg.time_budget is not None or cfg.max_epochs is not None
    if not is_open and 'max_iters' not in given:
        step = cfg.batch_size * cfg.gradient_accumulation_steps * model_cfg.block_size
        cfg.max_iters = max(round(TOKENS_PER_PARAMETER * num_parameters(depth) / step), 1)
    if 'muon_lr' not in given:
        is_known = cfg.max_epochs is None and ('max_iters' in given or not is_open)
        cfg.muon_lr = muon_rate(depth, min(cfg.max_iters if is_known else NO_LIMIT, steps or NO_LIMIT))


def matching_factor(size, sequences, world):
    """
    The smallest n for which a step of size x n sequences has at least `sequences` and divides evenly among
    the processes. size: the given batch_size (n: accumulation steps), or the other way around.
    """
    multiple = world // math.gcd(size, world)
    return math.ceil(sequences / size / multiple) * multiple


def adapt_to_length(cfg, given, resumed, epochs):
    """
    Sets what a depth decides by the length of the run, which is known when its data are open: the rate of
    Muon after max_epochs has become max_iters, and weight decay, which the ladder sets with a time budget.
    """
    if cfg.depth and not resumed:
        if cfg.max_epochs is not None and 'muon_lr' not in given:
            cfg.muon_lr = max(cfg.muon_lr, muon_rate(cfg.depth, cfg.max_iters))
        if cfg.time_budget is None:
            set_weight_decay(cfg, given, epochs)
