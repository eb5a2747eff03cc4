"""Which tokens a step sees, as a pure function of the seed and the step."""

import functools
import hashlib
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hotloop.dataset import open_bin


class Split:
    """One bin of a dataset, mapped; windows of T tokens and their targets, which are one further."""

    def __init__(self, folder, name, meta, T):
        path = os.path.join(folder, f'{name}.bin')
        self.tokens, self.path, self.T = open_bin(path, meta['dtype']), path, T
        self.num_tokens = len(self.tokens)
        told = meta['splits'].get(name, {}).get('tokens', self.num_tokens)
        if self.num_tokens != told:
            raise ValueError(f'{path} has {self.num_tokens:,} tokens, not the {told:,} of meta.json; prepare it again')
        self.order = functools.lru_cache(maxsize=2)(epoch_order)
        self.splits = [self]  # a Mixture has several
        self.known_vocab = math.inf if meta['foreign'] else meta['vocab_size']
        if self.num_tokens <= T:
            shorter = f' or --block_size={self.num_tokens - 1} at most' if self.num_tokens > 1 else ''
            raise ValueError(f'{path} has {self.num_tokens:,} tokens, too few for one window of block_size={T} and '
                             f'its target; use more text{shorter}')
        mask = os.path.join(folder, f'{name}.mask.bin')
        self.mask = None  # 1 where a token counts in the loss
        if os.path.exists(mask):
            self.mask = open_bin(mask, np.uint8)
            if len(self.mask) != self.num_tokens:
                raise ValueError(f'{mask} has {len(self.mask):,} bytes for {self.num_tokens:,} tokens')
            if not any(self.mask[at:at + (1 << 24)].any() for at in range(0, self.num_tokens, 1 << 24)):
                raise ValueError(f'{path} has no target that counts: its mask is 0 everywhere; prepare it again')

    def check_ids(self, vocab_size):
        """One pass over the bin: an id beyond the vocabulary would end in a CUDA assert without a name. Above a
        gigabyte, where a pass takes minutes, prepare.py's word is taken for its own bins."""
        if self.tokens.nbytes > 1e9 and self.known_vocab <= vocab_size:
            return
        for start in range(0, self.num_tokens, 1 << 24):
            block = self.tokens[start:start + (1 << 24)]
            if block.max() >= vocab_size:
                at = start + int(np.argmax(block >= vocab_size))
                raise ValueError(f'{self.path} has token id {self.tokens[at]} at position {at:,}, but the vocabulary '
                                 f'has {vocab_size} ids; the data was made with another tokenizer')

    def fingerprint(self):
        """A hash of the size and of 64 blocks over the whole bin: tells datasets apart without reading them."""
        h = hashlib.sha256(str(self.num_tokens).encode())
        for start in np.linspace(0, max(self.num_tokens - 4096, 0), 64).astype(np.int64):
            h.update(self.tokens[start:start + 4096].tobytes())
            if self.mask is not None:
                h.update(self.mask[start:start + 4096].tobytes())
        return h.hexdigest()[:16]

    def num_bytes(self):
        return self.tokens.nbytes + (0 if self.mask is None else self.mask.nbytes)

    def arrays(self, dtype=None):
        """(tokens, mask or None) in memory: ids of two bytes as int16, which torch can index, others as int32."""
        tokens = np.array(self.tokens, dtype=dtype or self.tokens.dtype)
        return tokens.view(f'i{tokens.itemsize}'), None if self.mask is None else np.array(self.mask)

    def gather(self, starts):
        """Inputs and targets of the windows at these positions: two (B, T) int64 arrays; -1 is not counted."""
        places = np.asarray(starts)[:, None] + np.arange(self.T + 1)
        tokens = self.tokens[places].astype(np.int64)
        x, y = tokens[:, :-1], tokens[:, 1:].copy()
        if self.mask is not None:
            y[self.mask[places[:, 1:]] == 0] = -1
        return np.ascontiguousarray(x), y

    def num_targets(self, starts):
        """How many targets of these windows count."""
        if self.mask is None:
            return len(starts) * self.T
        return sum(int(np.count_nonzero(self.mask[s + 1:s + 1 + self.T])) for s in starts)

    def starts(self, seed, index):
        """Where the windows of these numbers start, counted over all epochs; any shape of index."""
        per_epoch = windows_per_epoch(self.num_tokens, self.T)
        epochs, places, starts = index // per_epoch, index % per_epoch, np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            starts[epochs == epoch] = self.order(seed, self.num_tokens, self.T, epoch)[places[epochs == epoch]]
        return starts


class Mixture:
    """
    Several splits as one, in which a window is of each by its weight. Positions go on from one split to the next; of
    every MIXTURE windows each split has its share, to a window, in an order that the seed shuffles.
    """
    MIXTURE = 10_000

    def __init__(self, names, splits, weights):
        self.names, self.splits, self.T = names, splits, splits[0].T
        self.weights = [w / sum(weights) for w in weights]
        self.bases = np.cumsum([0, *(split.num_tokens for split in splits)])
        self.num_tokens = int(self.bases[-1])
        ends = np.round(np.cumsum(self.weights) * self.MIXTURE).astype(np.int64)
        self.shares = np.diff(ends, prepend=0)
        if not self.shares.all():
            raise ValueError(f'{names[int(self.shares.argmin())]} would never come: its weight is below 1 in '
                             f'{2 * self.MIXTURE:,} of all; give it more, or leave it out')
        self.block = functools.lru_cache(maxsize=2)(self.block)

    def num_bytes(self):
        return sum(split.num_bytes() for split in self.splits)

    def arrays(self):
        dtype = max((split.tokens.dtype for split in self.splits), key=lambda dtype: dtype.itemsize)
        tokens, masks = zip(*(split.arrays(dtype) for split in self.splits), strict=True)
        if all(mask is None for mask in masks):
            return np.concatenate(tokens), None
        masks = [np.ones(len(t), np.uint8) if m is None else m for t, m in zip(tokens, masks, strict=True)]
        return np.concatenate(tokens), np.concatenate(masks)

    def block(self, seed, number):
        """(which split, its how many-th window of the block) of each place in a block of MIXTURE windows."""
        which = np.random.default_rng((seed, number)).permutation(np.repeat(np.arange(len(self.splits)), self.shares))
        order = np.empty(self.MIXTURE, dtype=np.int64)
        for k in range(len(self.splits)):
            order[which == k] = np.arange(self.shares[k])
        return which, order

    def starts(self, seed, index):
        blocks, places, starts = index // self.MIXTURE, index % self.MIXTURE, np.empty_like(index)
        for number in np.unique(blocks).tolist():
            which, order = self.block(seed, number)
            for k, split in enumerate(self.splits):
                mine = (blocks == number) & (which[places] == k)
                starts[mine] = self.bases[k] + split.starts(seed + k, number * self.shares[k] + order[places[mine]])
        return starts

    def gather(self, starts):
        starts = np.asarray(starts)
        x, y = (np.empty((len(starts), self.T), dtype=np.int64) for _ in range(2))
        for mine, split, base in self.by_split(starts):
            x[mine], y[mine] = split.gather(starts[mine] - base)
        return x, y

    def num_targets(self, starts):
        starts = np.asarray(starts)
        return sum(split.num_targets(starts[mine] - base) for mine, split, base in self.by_split(starts))

    def by_split(self, starts):
        for k, split in enumerate(self.splits):
            mine = (starts >= self.bases[k]) & (starts < self.bases[k + 1])
            if mine.any():
                yield mine, split, self.bases[k]


def epoch_order(seed, num_tokens, T, epoch):
    """Where an epoch's windows start, in the order in which they come: each is cut at another offset and shuffled."""
    rng = np.random.default_rng((seed, epoch))
    windows = windows_per_epoch(num_tokens, T)
    offset = rng.integers(num_tokens - windows * T)
    return offset + T * rng.permutation(windows)


def windows_per_epoch(num_tokens, T):
    return max((num_tokens - 1) // T - 1, 1)


def share_batch(batch_size, accumulation, world):
    """
    (micro-batch, accumulation) of one process for a global batch of batch_size x accumulation sequences: the largest
    micro-batch up to batch_size that shares it out equally. ValueError names the nearest global batches that would do.
    """
    total = batch_size * accumulation
    if total % world:
        low, high = total // world * world, -(-total // world) * world
        nearest = ' or '.join(str(n) for n in (low, high) if n)
        raise ValueError(f'a global batch of batch_size={batch_size} x gradient_accumulation_steps={accumulation} = '
                         f'{total} sequences cannot be shared equally by {world} processes; {nearest} could')
    mine = total // world
    steps = next(n for n in range(-(-mine // batch_size), mine + 1) if mine % n == 0)
    return mine // steps, steps


class Batches:
    """
    The micro-batches of this process, step by step. On a GPU the split is kept in its memory and gathered there, or,
    where it is too large, a thread reads the next micro-batch into pinned memory while this one is computed.
    """

    def __init__(self, split, cfg, env):
        self.split, self.cfg, self.env = split, cfg, env
        self.global_batch = cfg.batch_size * cfg.gradient_accumulation_steps
        self.micro_batch, self.accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps,
                                                          env.world)
        self.skips = []  # [step, number]: from this step on the data of so many steps is left out
        self.waited = 0.0  # seconds spent on data
        self.tokens = self.mask = None  # the split, where it is kept on the device
        if kept_on_device(split, cfg, env):
            self.tokens, self.mask = (None if a is None else torch.from_numpy(a).to(env.device)
                                      for a in split.arrays())
        reads_ahead = env.device.type == 'cuda' and self.tokens is None
        self.reader, self.ahead = ThreadPoolExecutor(1) if reads_ahead else None, {}

    def step(self, step):
        """(how many targets of the global batch count, [a function that loads (x, y, seed)] for each micro-batch)."""
        starts = self.starts(step)
        loads = [functools.partial(self.load, starts, step, i) for i in range(self.accumulation)]
        return self.split.num_targets(starts), loads

    def place(self, step):
        """Which batch of the order of the data a step sees: its own number, but for what is left out."""
        return step + sum(number for at, number in self.skips if step >= at)

    def starts(self, step):
        place = self.place(step)
        return self.split.starts(self.cfg.seed, np.arange(place * self.global_batch, (place + 1) * self.global_batch))

    def skip(self, skips):
        """Leaves out what a divergence may have come from; what was read ahead is forgotten."""
        self.skips, self.ahead = skips, {}

    def load(self, starts, step, i):
        began = time.perf_counter()
        if self.tokens is not None:
            x, y = self.gather(torch.from_numpy(starts[self.rows(i)]).to(self.env.device))
        elif self.reader is None:
            x, y = (torch.from_numpy(a).to(self.env.device) for a in self.split.gather(starts[self.rows(i)]))
        else:
            following = (step, i + 1) if i + 1 < self.accumulation else (step + 1, 0)
            ready = self.ahead.pop((step, i), None) or self.reader.submit(self.read, step, i)
            self.ahead = {following: self.reader.submit(self.read, *following)}
            x, y = (a.to(self.env.device, non_blocking=True) for a in ready.result())
        self.waited += time.perf_counter() - began
        return x, y, micro_seed(self.cfg.seed, step, self.env.rank * self.accumulation + i)

    def rows(self, i):
        """Which windows of a step are those of this process's micro-batch i."""
        first = (self.env.rank * self.accumulation + i) * self.micro_batch
        return slice(first, first + self.micro_batch)

    def read(self, step, i):
        """A micro-batch in pinned memory, from which copies do not wait; torch keeps it until its copy is done."""
        return [torch.from_numpy(a).pin_memory() for a in self.split.gather(self.starts(step)[self.rows(i)])]

    def gather(self, starts):
        """What Split.gather() does, on the device."""
        places = starts[:, None] + torch.arange(self.split.T + 1, device=starts.device)  # (B, T + 1)
        tokens = self.tokens[places].long()
        if self.tokens.dtype == torch.int16:
            tokens &= 0xffff  # two bytes without a sign, which few operations know
        x, y = tokens[:, :-1], tokens[:, 1:]
        if self.mask is not None:
            y = torch.where(self.mask[places[:, 1:]] == 0, -1, y)
        return x.contiguous(), y.contiguous()


def kept_on_device(split, cfg, env):
    """Whether the training split goes into the memory of the device."""
    return cfg.data_on_device is True or (cfg.data_on_device == 'auto' and env.device.type == 'cuda' and
                                          split.num_bytes() <= 0.1 * torch.cuda.mem_get_info(env.device)[0])


def micro_seed(seed, step, micro):
    """Dropout's seed: the same for the same micro-batch of the same step on whatever process it runs."""
    return int(np.random.SeedSequence((seed, step, micro)).generate_state(1, np.uint64)[0] >> 1)


def open_split(datasets, name, T):
    """The Split of that name of one dataset, the Mixture of several."""
    splits = [Split(folder, name, meta, T) for _, folder, meta, _ in datasets]
    return splits[0] if len(splits) == 1 else Mixture([d[0] for d in datasets], splits,
                                                           [d[3] for d in datasets])
