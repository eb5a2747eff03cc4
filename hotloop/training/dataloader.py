"""The order of the data, as a pure function of the seed and the step."""

import bisect
import functools
import hashlib
import math
import os
import time
from typing import NamedTuple

import numpy as np
import torch

from hotloop.data.dataset import open_bin
from hotloop.system.distributed import print0

INTERLEAVE = 10_000  # windows of a mixture in which each split has its exact share


class Windows:
    """
    Windows of T tokens, in an order that depends on the seed, with gather() and num_targets(). A subclass has
    `period`, the number of windows in an epoch, and order(seed, epoch), their positions.
    """

    def starts(self, seed, index):
        """Find the positions of windows by number, counted over all epochs. index: int64 array."""
        epochs = index // self.period
        starts = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            starts[chosen] = self.order(seed, epoch)[index[chosen] % self.period]
        return starts


class Split(Windows):
    """One bin of a dataset, memory-mapped; targets are the next tokens."""

    def __init__(self, folder, name, meta, T, masks_documents=False):
        self.meta = meta
        self.T = T
        self.splits = [self]  # a Mixture has several
        self.weights = [1.0]
        self.path = os.path.join(folder, f'{name}.bin')
        self.tokens = open_bin(self.path, meta['dtype'])
        self.num_tokens = len(self.tokens)
        self.num_bytes = self.tokens.nbytes
        self.num_windows = self.period = windows_per_epoch(self.num_tokens, T)
        self.order = functools.lru_cache(maxsize=2)(self.epoch_order)
        expected = meta['splits'].get(name, {}).get('tokens', self.num_tokens)
        if self.num_tokens != expected:
            raise ValueError(f'{self.path} has {self.num_tokens:,} tokens, not {expected:,}; prepare again')
        self.mask = None
        mask_path = os.path.join(folder, f'{name}.mask.bin')
        if os.path.exists(mask_path):
            self.mask = open_bin(mask_path, np.uint8)  # 0: not in the loss
            self.num_bytes += len(self.mask)
            if len(self.mask) != self.num_tokens or not self.mask[1:].any():
                raise ValueError(f'{mask_path} is not of {self.num_tokens:,} tokens, or all 0; prepare again')
        self.end_id = None  # the id that ends each document, if attention stays within documents
        if masks_documents:
            self.end_id = meta.get('eot')
            if self.end_id is None or self.mask is not None:
                raise ValueError('pack_rows=True needs rows, or texts with an end-of-text id, unlike '
                                 f'{folder}; prepare it again, with a tokenizer such as gpt2 or bpe:4096')

    def check_ids(self, vocab_size):
        """Raise ValueError if a token is not below vocab_size; a GPU would give no reason."""
        if not self.meta['foreign'] and self.meta['vocab_size'] <= vocab_size:
            return  # prepare.py writes valid ids, and reading all of them may take minutes
        largest = self.tokens.max()
        if largest >= vocab_size:
            raise ValueError(f'{self.path} has token id {largest}, but the model has {vocab_size} ids; '
                             "prepare it with the model's tokenizer: --tokenizer=RUN_OR_MODEL")

    def fingerprint(self):
        """Hash the size and 64 blocks spread over the bin and its mask."""
        h = hashlib.sha256(str(self.num_tokens).encode())
        for start in np.linspace(0, max(self.num_tokens - 4096, 0), 64).astype(np.int64):
            h.update(self.tokens[start:start + 4096].tobytes())
            if self.mask is not None:
                h.update(self.mask[start:start + 4096].tobytes())
        return h.hexdigest()[:16]

    def epoch_order(self, seed, epoch):
        """Shuffle the positions of an epoch's windows. Each epoch starts at another offset."""
        rng = np.random.default_rng((seed, epoch))
        offset = rng.integers(self.num_tokens - self.num_windows * self.T)
        return offset + self.T * rng.permutation(self.num_windows)

    def consecutive_starts(self):
        """Find consecutive windows that have a target: all, and all but a shorter last one."""
        starts = np.arange(0, self.num_tokens - 1, self.T)
        if self.mask is not None:
            starts = starts[np.logical_or.reduceat(self.mask[1:], starts)]
        return starts, starts[starts + self.T < self.num_tokens]

    def gather(self, starts):
        """Read the windows at these positions from disk. Returns gather()'s tensors as arrays."""
        parts = gather(self.tokens, self.mask, torch.as_tensor(starts), self.T, self.end_id)
        return [part.numpy() for part in parts]

    def num_targets(self, starts):
        """Count the unmasked targets of the windows at these positions."""
        if self.mask is None:
            return len(starts) * self.T
        return sum(int(np.count_nonzero(self.mask[s + 1:s + 1 + self.T])) for s in starts)


class Packed(Split):
    """
    A Split whose windows hold complete rows, each a document, and padding. A `start` is the number
    of a window. Each epoch shuffles the windows, not their rows, which do not see one another.
    """

    def __init__(self, folder, name, meta, T):
        super().__init__(folder, name, meta, T)
        if self.mask is None:
            self.mask = np.ones(self.num_tokens, np.uint8)  # the rows of this split are texts
        path = os.path.join(folder, f'{name}.docs.bin')
        self.ends = open_bin(path, '<u8').astype(np.int64)
        if not len(self.ends) or self.ends[-1] != self.num_tokens:
            raise ValueError(f'{path} does not end at {self.num_tokens:,} tokens; prepare again')
        lengths = np.diff(self.ends, prepend=0)
        self.begins = self.ends - lengths
        kept = np.flatnonzero(lengths <= T + 1)
        if not len(kept):
            raise ValueError(f'block_size={T} is too small for the rows of {self.path}, of which the '
                             f'shortest needs --block_size={lengths.min() - 1}')
        window_of = pack(lengths[kept].tolist(), T + 1)
        order = np.argsort(window_of, kind='stable')
        self.rows = np.split(kept[order], np.cumsum(np.bincount(window_of))[:-1])  # of each window
        self.num_windows = self.period = len(self.rows)
        counts = np.append(0, np.cumsum(self.mask != 0))
        targets = counts[self.ends] - counts[self.begins + 1]  # of each row
        self.targets = np.array([targets[rows].sum() for rows in self.rows])
        self.num_bytes = math.inf  # windows are put together on the host, never on the device
        padding = 1 - lengths[kept].sum() / (self.num_windows * (T + 1))
        print0(f'packing: {name}, {len(kept):,} rows in {self.num_windows:,} windows of {T + 1} tokens, '
               f'{padding:.1%} padding; {len(lengths) - len(kept):,} rows left out (the longest row has '
               f'{lengths.max():,} tokens)')
        share = 1 - lengths[kept].sum() / self.num_tokens
        if share > 0.1:
            print0(f'note: {share:.0%} of the tokens are in the rows left out, which are longer than '
                   f'block_size={T}; --pack_rows=False reads rows in parts')

    def epoch_order(self, seed, epoch):
        return np.random.default_rng((seed, epoch)).permutation(self.num_windows)

    def consecutive_starts(self):
        windows = np.flatnonzero(self.targets)
        return windows, windows

    def gather(self, starts):
        """Put windows together. The first token of a row is not a target."""
        tokens = np.full((len(starts), self.T + 1), self.meta['eot'] or 0)
        targets = np.full_like(tokens, -1)
        documents = np.zeros_like(tokens)
        for window, start in enumerate(starts):
            place = 0
            for row in self.rows[start]:
                part = slice(self.begins[row], self.ends[row])
                ids = self.tokens[part].astype(np.int64)
                end = place + len(ids)
                tokens[window, place:end] = ids
                targets[window, place:end] = np.where(self.mask[part], ids, -1)
                targets[window, place] = -1
                documents[window, end:] += 1
                place = end
        return [tokens[:, :-1], targets[:, 1:], documents[:, :-1]]

    def num_targets(self, starts):
        return int(self.targets[starts].sum())


def pack(lengths, size):
    """
    Choose a window for each row, by best fit, the longest rows first. Returns the numbers of the
    windows, (N,). lengths: of rows, at most `size`, that of a window.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    num_windows = 0
    windows = {}  # {free space: the windows that have it}
    spaces = [size]  # the free spaces of these, sorted, and that of a new window
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        place = bisect.bisect_left(spaces, lengths[row])
        space = spaces[place]
        if space == size:
            window = num_windows
            num_windows += 1
        else:
            window = windows[space].pop()
            if not windows[space]:
                spaces.pop(place)
        window_of[row] = window
        left = space - lengths[row]
        if not windows.setdefault(left, []):
            bisect.insort(spaces, left)
        windows[left].append(window)
    return window_of


class Mixture(Windows):
    """Splits, mixed by weight. Positions continue from one split to the next."""

    def __init__(self, names, splits, weights):
        self.names = names
        self.splits = splits
        self.weights = [weight / sum(weights) for weight in weights]
        self.T = splits[0].T
        self.end_id = splits[0].end_id
        ends = np.cumsum([split.num_tokens for split in splits])
        self.bases = [0, *ends[:-1].tolist()]
        self.num_tokens = int(ends[-1])
        self.num_bytes = sum(split.num_bytes for split in splits)
        self.num_windows = windows_per_epoch(self.num_tokens, self.T)
        if any(isinstance(split, Packed) for split in splits):
            self.num_windows = sum(split.num_windows for split in splits)
        self.period = INTERLEAVE
        self.order = functools.lru_cache(maxsize=2)(self.interleave)
        last = np.round(np.cumsum(self.weights) * INTERLEAVE).astype(np.int64)
        self.shares = np.diff(last, prepend=0)  # windows of each split in a period
        if not all(self.shares):
            raise ValueError(f'{names[self.shares.argmin()]} would never be drawn: its weight is below '
                             f'1/{2 * INTERLEAVE} of the sum')

    def interleave(self, seed, block):
        """Shuffle the splits, each of which keeps its own order. Returns the positions of windows."""
        split_of = np.repeat(np.arange(len(self.splits)), self.shares)
        split_of = np.random.default_rng((seed, block)).permutation(split_of)
        starts = np.empty_like(split_of)
        for k, split in enumerate(self.splits):
            index = block * self.shares[k] + np.arange(self.shares[k])
            starts[split_of == k] = self.bases[k] + split.starts(seed + k, index)
        return starts

    def by_split(self, starts):
        """Yield (split, which of the starts lie in it, their positions there)."""
        owner = np.searchsorted(self.bases, starts, side='right') - 1
        for k, split in enumerate(self.splits):
            yield split, owner == k, starts[owner == k] - self.bases[k]

    def gather(self, starts):
        result = None
        for split, chosen, positions in self.by_split(starts):
            parts = split.gather(positions)
            if result is None:
                result = np.empty((len(parts), len(starts), self.T), dtype=np.int64)
            result[:, chosen] = parts
        return list(result)

    def num_targets(self, starts):
        return sum(split.num_targets(positions) for split, _, positions in self.by_split(starts))


def open_split(datasets, name, T, pack_rows=False):
    """
    Open 'train' or 'val' of one Dataset, or the Mixture of several. pack_rows: rows and documents do not see
    one another. Raises ValueError.
    """
    splits = []
    for dataset in datasets:
        ends = os.path.join(dataset.folder, f'{name}.docs.bin')  # of rows, which texts do not have
        if pack_rows and os.path.exists(ends):
            splits.append(Packed(dataset.folder, name, dataset.meta, T))
            continue
        split = Split(dataset.folder, name, dataset.meta, T, masks_documents=pack_rows)
        if split.num_tokens <= T:
            raise ValueError(f'{split.path} has {split.num_tokens:,} tokens, too few for block_size={T}; '
                             'lower --block_size, or prepare more text, such as --val=FILE')
        splits.append(split)
    if len(splits) == 1:
        return splits[0]
    names = [dataset.name for dataset in datasets]
    return Mixture(names, splits, [dataset.weight for dataset in datasets])


def gather(tokens, mask, starts, T, end_id):
    """
    Return inputs, targets and, with end_id, the documents of windows at positions (B,): (B, T) int64
    tensors. Targets are -1 where the mask is 0, and beyond the end of the split. tokens, mask: arrays
    on the host, or tensors on the device of starts.
    """
    positions = starts[:, None] + torch.arange(T + 1, device=starts.device)  # (B, T + 1)
    beyond = positions >= len(tokens)
    positions = positions.masked_fill(beyond, 0)  # any token, which those before do not see
    ids = torch.as_tensor(tokens[positions]).long()
    if tokens.dtype == torch.int16:
        ids &= 0xffff  # a GPU has no uint16
    x = ids[:, :-1].contiguous()
    y = ids[:, 1:].masked_fill(beyond[:, 1:], -1)
    if mask is not None:
        y = y.masked_fill(torch.as_tensor(mask[positions[:, 1:]]) == 0, -1)
    if end_id is None:
        return x, y
    # The first token of a document stays a target: the id that ends the one before predicts it
    documents = torch.zeros_like(x)
    documents[:, 1:] = (x[:, :-1] == end_id).cumsum(1)
    return x, y, documents


def windows_per_epoch(num_tokens, T):
    """Return one fewer than fit, so that an epoch can start at any of T offsets."""
    return max((num_tokens - 1) // T - 1, 1)


def share_batch(batch_size, accumulation, world):
    """Divide a step among processes: (micro-batch of at most batch_size, accumulation) of each."""
    total = batch_size * accumulation
    if total % world:
        raise ValueError(f'batch_size={batch_size} x gradient_accumulation_steps={accumulation} = {total} '
                         f'sequences must be a multiple of the {world} processes, such as '
                         f'{total + world - total % world}')
    share = total // world
    micro_batch = min(batch_size, share)
    while share % micro_batch:
        micro_batch -= 1
    return micro_batch, share // micro_batch


def micro_seed(seed, step, micro):
    """Return dropout's seed of a micro-batch of the global batch, whichever process computes it."""
    words = np.random.SeedSequence((seed, step, micro)).generate_state(1, np.uint64)
    return int(words[0]) >> 1  # numpy 1.26 cannot shift its own uint64


def kept_on_device(split, env):
    """Return whether a GPU holds the split: if it takes up to a tenth of the free memory."""
    if env.device.type != 'cuda':
        return False
    return split.num_bytes <= 0.1 * torch.cuda.mem_get_info(env.device)[0]


def copy_to_device(split, device):
    """Return the tokens of all splits, int16 or int32, and their mask or None, on the device."""
    tokens = np.concatenate([part.tokens for part in split.splits])
    tokens = torch.from_numpy(tokens.view(f'i{tokens.itemsize}')).to(device)
    if all(part.mask is None for part in split.splits):
        return tokens, None
    masks = [np.ones(part.num_tokens, np.uint8) if part.mask is None else part.mask
             for part in split.splits]
    return tokens, torch.from_numpy(np.concatenate(masks)).to(device)


def upload(array, device):
    """Copy an array to a device; to a GPU from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == 'cuda':
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class StepData(NamedTuple):
    """The data of a step."""
    num_targets: int  # unmasked targets of the global batch
    loaders: list  # a function for each micro-batch of this process: Batches.load()


class Batches:
    """The micro-batches of this process: of a split that a GPU holds, or read while it computes."""

    def __init__(self, split, cfg, env, shift=0):
        """shift: windows read before step 0, as RunState.shift() counts them."""
        self.split = split
        self.seed = cfg.seed
        self.env = env
        self.shift = shift
        self.micro_batch, self.accumulation = share_batch(
            cfg.batch_size, cfg.gradient_accumulation_steps, env.world)
        self.global_batch = cfg.batch_size * cfg.gradient_accumulation_steps
        self.waited = 0.0  # seconds spent on loading
        self.on_device = None  # tokens and mask, if the device has room for them
        if kept_on_device(split, env):
            self.on_device = copy_to_device(split, env.device)

    def windows_before(self, step):
        """Count the windows that the steps before this one read, over all epochs."""
        return step * self.global_batch + self.shift

    def step(self, step):
        """Return the StepData of a step, counted from 0."""
        index = np.arange(self.windows_before(step), self.windows_before(step + 1))
        starts = self.split.starts(self.seed, index)
        num_targets = self.split.num_targets(starts)
        starts = starts.reshape(self.env.world, self.accumulation, self.micro_batch)[self.env.rank]
        if self.on_device:
            starts = upload(starts, self.env.device)  # before the GPU is busy with this step
        loaders = [functools.partial(self.load, step, n, starts[n]) for n in range(self.accumulation)]
        return StepData(num_targets, loaders)

    def load(self, step, micro, starts):
        """Return gather()'s tensors of a micro-batch on the device, and the seed of its dropout."""
        began = time.perf_counter()
        if self.on_device:
            batch = gather(*self.on_device, starts, self.split.T, self.split.end_id)
        else:
            batch = [upload(part, self.env.device) for part in self.split.gather(starts)]
        self.waited += time.perf_counter() - began
        return *batch, micro_seed(self.seed, step, self.env.rank * self.accumulation + micro)
