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
    """One bin of a dataset, memory-mapped: windows of T tokens and their targets, the next tokens."""

    def __init__(self, folder, name, meta, T):
        self.path, self.T = os.path.join(folder, f'{name}.bin'), T
        self.tokens = open_bin(self.path, meta['dtype'])
        self.num_tokens = len(self.tokens)
        self.splits = [self]  # a Mixture has several
        self.known_vocab = math.inf if meta['foreign'] else meta['vocab_size']
        # a cache for each split: a shared one would evict orders of large mixtures or keep old epochs
        self.order = functools.lru_cache(maxsize=2)(epoch_order)
        expected = meta['splits'].get(name, {}).get('tokens', self.num_tokens)
        if self.num_tokens != expected:
            raise ValueError(f'{self.path} has {self.num_tokens:,} tokens, but meta.json says {expected:,}; '
                             'prepare it again')
        if self.num_tokens <= T:
            shorter = f', or --block_size={self.num_tokens - 1} at most' if self.num_tokens > 1 else ''
            raise ValueError(f'{self.path} has {self.num_tokens:,} tokens, too few for one window of '
                             f'block_size={T} and its target; use more text{shorter}')
        mask_path = os.path.join(folder, f'{name}.mask.bin')
        self.mask = open_bin(mask_path, np.uint8) if os.path.exists(mask_path) else None  # 0: not in the loss
        if self.mask is not None and len(self.mask) != self.num_tokens:
            raise ValueError(f'{mask_path} has {len(self.mask):,} bytes for {self.num_tokens:,} tokens')
        if self.mask is not None and not self.mask.any():
            raise ValueError(f'{self.path} has no target that counts: {mask_path} is 0 everywhere')

    def check_ids(self, vocab_size):
        """ValueError if a token is not below vocab_size; on a GPU it would end in a nameless assert."""
        if self.tokens.nbytes > 1e9 and self.known_vocab <= vocab_size:
            return  # reading it takes minutes, and prepare.py wrote only ids that it knew
        for start in range(0, self.num_tokens, 1 << 24):
            block = self.tokens[start:start + (1 << 24)]
            if block.max() >= vocab_size:
                at = start + int(np.argmax(block >= vocab_size))
                raise ValueError(f'{self.path} has token id {self.tokens[at]} at position {at:,}, but the '
                                 f"vocabulary has {vocab_size} ids; prepare it with the model's tokenizer")

    def fingerprint(self):
        """A hash of the size and of 64 blocks spread over the bin and its mask."""
        h = hashlib.sha256(str(self.num_tokens).encode())
        for start in np.linspace(0, max(self.num_tokens - 4096, 0), 64).astype(np.int64):
            h.update(self.tokens[start:start + 4096].tobytes())
            if self.mask is not None:
                h.update(self.mask[start:start + 4096].tobytes())
        return h.hexdigest()[:16]

    def num_bytes(self):
        """The size of what arrays() returns."""
        return self.tokens.nbytes + (0 if self.mask is None else self.mask.nbytes)

    def arrays(self, dtype=None):
        """(tokens, mask or None) in memory; tokens as int16 or int32: torch cannot index unsigned types."""
        tokens = np.array(self.tokens, dtype=dtype or self.tokens.dtype)
        return tokens.view(f'i{tokens.itemsize}'), None if self.mask is None else np.array(self.mask)

    def gather(self, starts):
        """Inputs and targets of the windows at these positions: two (B, T) int64 arrays; -1 where masked."""
        positions = np.asarray(starts)[:, None] + np.arange(self.T + 1)  # (B, T + 1)
        tokens = self.tokens[positions].astype(np.int64)
        x, y = tokens[:, :-1], tokens[:, 1:].copy()
        if self.mask is not None:
            y[self.mask[positions[:, 1:]] == 0] = -1
        return np.ascontiguousarray(x), y

    def num_targets(self, starts):
        """How many targets of the windows at these positions count."""
        if self.mask is None:
            return len(starts) * self.T
        return sum(int(np.count_nonzero(self.mask[s + 1:s + 1 + self.T])) for s in starts)

    def starts(self, seed, index):
        """The positions of windows by number, counted over all epochs. index: int64 array of any shape."""
        per_epoch = windows_per_epoch(self.num_tokens, self.T)
        epochs, starts = index // per_epoch, np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            starts[chosen] = self.order(seed, self.num_tokens, self.T, epoch)[index[chosen] % per_epoch]
        return starts


def windows_per_epoch(num_tokens, T):
    return max((num_tokens - 1) // T - 1, 1)


def epoch_order(seed, num_tokens, T, epoch):
    """The positions of an epoch's windows, shuffled; each epoch cuts the text at another offset."""
    rng = np.random.default_rng((seed, epoch))
    windows = windows_per_epoch(num_tokens, T)
    offset = rng.integers(num_tokens - windows * T)
    return offset + T * rng.permutation(windows)


class Mixture:
    """
    Several splits as one, from which windows are drawn by weight. Positions continue from one split to the
    next. Of every INTERLEAVE windows each split has its exact share, in an order that the seed shuffles.
    """
    INTERLEAVE = 10_000

    def __init__(self, names, splits, weights):
        self.names, self.splits, self.T = names, splits, splits[0].T
        self.weights = [weight / sum(weights) for weight in weights]
        self.bases = np.cumsum([0, *(split.num_tokens for split in splits)])  # each split's first position
        self.num_tokens = int(self.bases[-1])
        ends = np.round(np.cumsum(self.weights) * self.INTERLEAVE).astype(np.int64)
        self.shares = np.diff(ends, prepend=0)
        if not self.shares.all():
            raise ValueError(f'{names[int(self.shares.argmin())]} would never be drawn: its weight is below '
                             f'1/{2 * self.INTERLEAVE} of the sum; raise it, or leave the dataset out')

    def num_bytes(self):
        return sum(split.num_bytes() for split in self.splits)

    def arrays(self):
        """Split.arrays() of all splits, one after another; without a mask every token counts."""
        dtype = np.result_type(*(split.tokens.dtype for split in self.splits))
        tokens, masks = zip(*(split.arrays(dtype) for split in self.splits), strict=True)
        if all(mask is None for mask in masks):
            return np.concatenate(tokens), None
        masks = [np.ones(len(t), np.uint8) if m is None else m for t, m in zip(tokens, masks, strict=True)]
        return np.concatenate(tokens), np.concatenate(masks)

    def starts(self, seed, index):
        blocks, places, starts = index // self.INTERLEAVE, index % self.INTERLEAVE, np.empty_like(index)
        for block in np.unique(blocks).tolist():
            split_of, nth_of = interleave(seed, block, tuple(self.shares.tolist()))
            for k, split in enumerate(self.splits):
                chosen = (blocks == block) & (split_of[places] == k)
                windows = block * self.shares[k] + nth_of[places[chosen]]
                starts[chosen] = self.bases[k] + split.starts(seed + k, windows)
        return starts

    def by_split(self, starts):
        """Yields (split, its first position, which of the starts lie in it) of the splits that have some."""
        for k, split in enumerate(self.splits):
            chosen = (starts >= self.bases[k]) & (starts < self.bases[k + 1])
            if chosen.any():
                yield split, self.bases[k], chosen

    def gather(self, starts):
        x, y = np.empty((2, len(starts), self.T), dtype=np.int64)
        for split, base, chosen in self.by_split(starts):
            x[chosen], y[chosen] = split.gather(starts[chosen] - base)
        return x, y

    def num_targets(self, starts):
        return sum(split.num_targets(starts[chosen] - base) for split, base, chosen in self.by_split(starts))


@functools.lru_cache(maxsize=2)  # a step can meet two blocks
def interleave(seed, block, shares):
    """Of each window of a block: (the number of its split, how many of that split come before it)."""
    split_of = np.random.default_rng((seed, block)).permutation(np.repeat(np.arange(len(shares)), shares))
    nth_of = np.empty_like(split_of)
    for k, share in enumerate(shares):
        nth_of[split_of == k] = np.arange(share)
    return split_of, nth_of


def open_split(datasets, name, T):
    """The Split 'train' or 'val' of one dataset, or the Mixture of several."""
    splits = [Split(dataset.folder, name, dataset.meta, T) for dataset in datasets]
    if len(splits) == 1:
        return splits[0]
    return Mixture([dataset.name for dataset in datasets], splits, [dataset.weight for dataset in datasets])


def share_batch(batch_size, accumulation, world):
    """
    (micro-batch, accumulation) of one process for a global batch of batch_size x accumulation sequences,
    with the largest micro-batch up to batch_size. ValueError names the nearest batches that can be shared.
    """
    total = batch_size * accumulation
    if total % world:
        low = total // world * world
        nearest = f'{low} or {low + world}' if low else f'{world}'
        raise ValueError(f'batch_size={batch_size} x gradient_accumulation_steps={accumulation} = {total} '
                         f'sequences cannot be shared equally by {world} processes; {nearest} could')
    share = total // world
    micro_batch = max(n for n in range(1, min(batch_size, share) + 1) if share % n == 0)
    return micro_batch, share // micro_batch


def kept_on_device(split, cfg, env):
    """Whether the split is copied to the device; auto: on a GPU, if it takes up to a tenth of free memory."""
    if cfg.data_on_device != 'auto':
        return cfg.data_on_device
    return env.device.type == 'cuda' and split.num_bytes() <= 0.1 * torch.cuda.mem_get_info(env.device)[0]


def micro_seed(seed, step, micro):
    """Dropout's seed for micro-batch `micro` of the global batch, whatever process computes it."""
    return int(np.random.SeedSequence((seed, step, micro)).generate_state(1, np.uint64)[0] >> 1)


class Batches:
    """
    The micro-batches of this process, step by step. On a GPU the split is in its memory and gathered there;
    if it is too large, a thread reads the next micro-batch into pinned memory while this one is computed.
    """

    def __init__(self, split, cfg, env):
        self.split, self.cfg, self.env = split, cfg, env
        self.global_batch = cfg.batch_size * cfg.gradient_accumulation_steps
        self.micro_batch, self.accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps,
                                                          env.world)
        self.waited = 0.0  # seconds spent on loading
        self.tokens = self.mask = None  # the split, if it is kept on the device
        self.reader, self.ahead = None, {}  # {(step, micro): Future} of what is read ahead
        if kept_on_device(split, cfg, env):
            tokens, mask = split.arrays()
            self.tokens = torch.from_numpy(tokens).to(env.device)
            self.mask = None if mask is None else torch.from_numpy(mask).to(env.device)
        elif env.device.type == 'cuda':
            self.reader = ThreadPoolExecutor(1)

    def step(self, step):
        """(targets of the global batch that count, a load() for each micro-batch of this process)."""
        index = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        num_targets = self.split.num_targets(self.split.starts(self.cfg.seed, index))
        return num_targets, [functools.partial(self.load, step, micro) for micro in range(self.accumulation)]

    def load(self, step, micro):
        """(x, y, seed) of a micro-batch: two (B, T) int64 tensors on the device, and dropout's seed."""
        began, device = time.perf_counter(), self.env.device
        if self.tokens is not None:
            x, y = self.gather(torch.from_numpy(self.starts(step, micro)).to(device))
        elif self.reader is not None:
            x, y = self.read_ahead(step, micro)
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        else:
            x, y = self.split.gather(self.starts(step, micro))
            x, y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
        self.waited += time.perf_counter() - began
        return x, y, micro_seed(self.cfg.seed, step, self.env.rank * self.accumulation + micro)

    def starts(self, step, micro):
        """The positions of the windows of a micro-batch of this process."""
        first = step * self.global_batch + (self.env.rank * self.accumulation + micro) * self.micro_batch
        return self.split.starts(self.cfg.seed, np.arange(first, first + self.micro_batch))

    def gather(self, starts):
        """Split.gather() on the device."""
        positions = starts[:, None] + torch.arange(self.split.T + 1, device=starts.device)  # (B, T + 1)
        tokens = self.tokens[positions].long()
        if self.tokens.dtype == torch.int16:
            tokens &= 0xffff  # they are uint16
        x, y = tokens[:, :-1], tokens[:, 1:]
        if self.mask is not None:
            y = torch.where(self.mask[positions[:, 1:]] == 0, -1, y)
        return x.contiguous(), y.contiguous()

    def read_ahead(self, step, micro):
        """A micro-batch that the thread has read; the thread starts on the next one."""
        ready = self.ahead.get((step, micro)) or self.reader.submit(self.read, step, micro)
        following = (step, micro + 1) if micro + 1 < self.accumulation else (step + 1, 0)
        self.ahead = {following: self.reader.submit(self.read, *following)}
        return ready.result()

    def read(self, step, micro):
        """A micro-batch in pinned memory, which torch keeps until its copy to the device is done."""
        return [torch.from_numpy(part).pin_memory() for part in self.split.gather(self.starts(step, micro))]
