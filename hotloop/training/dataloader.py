"""The order of the data, as a pure function of the seed and the step."""

import functools
import hashlib
import math
import operator
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hotloop.data.dataset import Dataset, command_for, open_bin
from hotloop.system.files import counted


class Split:
    """One bin of a dataset, memory-mapped: windows of T tokens and their targets, the next tokens."""

    def __init__(self, folder, name, meta, T):
        self.path, self.T = os.path.join(folder, f'{name}.bin'), T
        self.splits, self.weights = [self], [1.0]  # as a Mixture has them
        self.tokens = open_bin(self.path, meta['dtype'])
        self.num_tokens = len(self.tokens)
        self.dataset = Dataset(os.path.basename(folder), folder, meta, 1.0)
        self.num_windows = windows_per_epoch(self.num_tokens, T)
        self.order = functools.lru_cache(maxsize=2)(self.epoch_order)
        self.end_id = None  # the id that ends each document, if document_mask is on
        expected = meta['splits'].get(name, {}).get('tokens', self.num_tokens)
        if self.num_tokens != expected:
            raise ValueError(f'{self.path} has {self.num_tokens:,} tokens, but meta.json says {expected:,}; '
                             'prepare it again')
        self.mask, self.num_bytes = None, self.tokens.nbytes
        mask_path = os.path.join(folder, f'{name}.mask.bin')
        if os.path.exists(mask_path):
            self.mask = open_bin(mask_path, np.uint8)  # 0: not in the loss
            self.num_bytes += len(self.mask)
            if len(self.mask) != self.num_tokens:
                raise ValueError(f'{mask_path} has {len(self.mask):,} bytes for {self.num_tokens:,} tokens')
            if not self.mask.any():
                raise ValueError(f'{self.path} has no unmasked target: {mask_path} is 0 everywhere')

    def check_ids(self, vocab_size):
        """ValueError if a token is not below vocab_size; on a GPU it would trigger an opaque assert."""
        folder, meta = self.dataset.folder, self.dataset.meta
        if self.tokens.nbytes > 1e9 and not meta['foreign'] and meta['vocab_size'] <= vocab_size:
            return  # reading it takes minutes, and prepare.py wrote only valid ids
        if self.tokens.max() >= vocab_size:
            command = command_for(self.dataset, os.path.dirname(folder), {'kind': ''}, 'RUN_OR_MODEL')
            raise ValueError(f'{self.path} has token id {self.tokens.max()}, but the vocabulary of the model '
                             f'has {vocab_size} ids; prepare it with the tokenizer of the model: {command}')

    def mask_documents(self):
        """Makes windows carry the documents of their tokens. ValueError if nothing ends them."""
        folder, meta = self.dataset.folder, self.dataset.meta
        if meta['foreign'] or meta.get('eot') is None:
            why = 'has no meta.json, which names it' if meta['foreign'] else 'has none'
            raise ValueError(f'document_mask=True needs the id that ends each document, and {folder} '
                             f'{why}; prepare it with a tokenizer that has such an id, like gpt2 or bpe:4096')
        if self.mask is not None:
            raise ValueError(f'document_mask=True is for texts, and {folder} holds rows of instruction data; '
                             'use --pack_rows')
        self.end_id = meta['eot']

    def fingerprint(self):
        """A hash of the size and of 64 blocks spread over the bin and its mask."""
        h = hashlib.sha256(str(self.num_tokens).encode())
        for start in np.linspace(0, max(self.num_tokens - 4096, 0), 64).astype(np.int64):
            for part in (self.tokens, self.mask):
                if part is not None:
                    h.update(part[start:start + 4096].tobytes())
        return h.hexdigest()[:16]

    def starts(self, seed, index):
        """The positions of windows by number, counted over all epochs. index: int64 array of any shape."""
        epochs, starts = index // self.num_windows, np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            starts[chosen] = self.order(seed, epoch)[index[chosen] % self.num_windows]
        return starts

    def epoch_order(self, seed, epoch):
        """The positions of an epoch's windows, shuffled; each epoch starts at another offset."""
        rng = np.random.default_rng((seed, epoch))
        offset = rng.integers(self.num_tokens - self.num_windows * self.T)
        return offset + self.T * rng.permutation(self.num_windows)

    def consecutive_starts(self):
        """The positions of consecutive windows with a target: of all, and without a shorter last one."""
        starts = np.arange(0, self.num_tokens - 1, self.T)
        if self.mask is not None:
            starts = starts[np.logical_or.reduceat(self.mask[1:], starts)]
        return starts, starts[starts + self.T < self.num_tokens]

    def gather(self, starts):
        """
        Inputs and targets of the windows at these positions: two (B, T) int64 arrays; -1 where masked, and
        beyond the end of the split. With end_id also their documents.
        """
        positions = np.asarray(starts)[:, None] + np.arange(self.T + 1)  # (B, T + 1)
        beyond = positions >= self.num_tokens
        positions[beyond] = 0  # of any token, because those before do not attend to it
        tokens = self.tokens[positions].astype(np.int64)
        x, y = tokens[:, :-1], tokens[:, 1:].copy()
        y[beyond[:, 1:]] = -1
        if self.mask is not None:
            y[self.mask[positions[:, 1:]] == 0] = -1
        x = np.ascontiguousarray(x)
        return (x, y) if self.end_id is None else (x, y, documents_of(x, self.end_id))

    def num_targets(self, starts):
        """The number of unmasked targets in the windows at these positions."""
        if self.mask is None:
            return len(starts) * self.T
        return sum(int(np.count_nonzero(self.mask[s + 1:s + 1 + self.T])) for s in starts)


def documents_of(tokens, end_id):
    """
    The number of each token's document within its row, (B, T), of a numpy array or a torch tensor. The first
    token of a document stays a target: the id that ends the one before predicts it.
    """
    documents = 0 * tokens
    documents[:, 1:] = (tokens[:, :-1] == end_id).cumsum(1)
    return documents


def windows_per_epoch(num_tokens, T):
    """One fewer than fit, so that an epoch can start at any of T offsets."""
    return max((num_tokens - 1) // T - 1, 1)


def check_lengths(splits, T):
    """ValueError if one of the Splits is too short for a window of T tokens and its target."""
    shortest = min(splits, key=operator.attrgetter('num_tokens'))
    if shortest.num_tokens <= T:
        remedy = f' or --block_size={shortest.num_tokens - 1} at most' if shortest.num_tokens > 1 else ''
        raise ValueError(f'{shortest.path} has {counted(shortest.num_tokens, "token")}, too few for one '
                         f'window of block_size={T} and its target; use more text{remedy}')


def share_batch(batch_size, accumulation, world):
    """(micro-batch, accumulation) of each process for the same global batch, micro-batch <= batch_size."""
    total = batch_size * accumulation
    if total % world:
        low = total // world * world
        nearest = f'{low} or {low + world}' if low else f'{world}'
        raise ValueError(f'batch_size={batch_size} x gradient_accumulation_steps={accumulation} = {total} '
                         f'sequences cannot be divided evenly among {world} processes; use {nearest}')
    share = total // world
    micro_batch = next(n for n in range(min(batch_size, share), 0, -1) if share % n == 0)
    return micro_batch, share // micro_batch


def micro_seed(seed, step, micro):
    """The dropout seed of micro-batch `micro` of the global batch, on whichever process computes it."""
    words = np.random.SeedSequence((seed, step, micro)).generate_state(1, np.uint64)
    return int(words[0]) >> 1  # numpy 1.26 cannot shift its own uint64


def kept_on_device(split, env):
    """Return whether the split is copied to a GPU: if it takes up to a tenth of its free memory."""
    return env.device.type == 'cuda' and split.num_bytes <= 0.1 * torch.cuda.mem_get_info(env.device)[0]


def copy_to_device(split, device):
    """(tokens, mask or None); tokens are int16 or int32: torch cannot index unsigned types."""
    tokens, mask = np.concatenate([part.tokens for part in split.splits]), None
    if any(part.mask is not None for part in split.splits):
        masks = [np.ones(s.num_tokens, np.uint8) if s.mask is None else s.mask for s in split.splits]
        mask = torch.from_numpy(np.concatenate(masks)).to(device)
    return torch.from_numpy(tokens.view(f'i{tokens.itemsize}')).to(device), mask


def upload(array, device):
    """A copy of a numpy array on a device. For a GPU it is from pinned memory, so the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == 'cuda':
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Batches:
    """
    The micro-batches of this process. On a GPU the split is in its memory; if it is too large, a thread reads
    the next micro-batch into pinned memory while this one is computed.
    """

    def __init__(self, split, cfg, env, shift=0):
        """shift: windows read before step 0, as RunState.shift() counts them."""
        self.split, self.seed, self.env = split, cfg.seed, env
        sizes = cfg.batch_size, cfg.gradient_accumulation_steps
        self.micro_batch, self.accumulation = share_batch(*sizes, env.world)
        self.global_batch = math.prod(sizes)
        self.shift = shift
        self.windows = functools.lru_cache(maxsize=2)(self.find_windows)  # of this step and of the next
        self.waited = 0.0  # seconds spent on loading
        self.tokens = self.mask = None  # the split, if it is kept on the device
        self.reader, self.ahead = None, {}  # {(step, micro): Future} of what is read ahead
        if kept_on_device(split, env):
            self.tokens, self.mask = copy_to_device(split, env.device)
        elif env.device.type == 'cuda':
            self.reader = ThreadPoolExecutor(1)

    def windows_before(self, step):
        """The number of windows that the steps before this one read, counted over all epochs."""
        return step * self.global_batch + self.shift

    def find_windows(self, step):
        """(unmasked targets of the global batch, positions of this process's windows by micro-batch)."""
        index = np.arange(self.windows_before(step), self.windows_before(step + 1))
        starts = self.split.starts(self.seed, index)
        mine = starts.reshape(self.env.world, self.accumulation, self.micro_batch)[self.env.rank]
        return self.split.num_targets(starts), mine

    def step(self, step):
        """(unmasked targets of the global batch, a load() for each micro-batch of this process)."""
        num_targets, starts = self.windows(step)
        if self.tokens is not None:
            starts = upload(starts, self.env.device)
        return num_targets, [functools.partial(self.load, step, n, starts[n]) for n in range(len(starts))]

    def load(self, step, micro, starts):
        """
        (x, y, seed) of a micro-batch: two (B, T) int64 tensors on the device, and dropout's seed; (x, y,
        documents, seed) if windows carry those. starts: its positions, (B,), on the device if the split is.
        """
        began = time.perf_counter()
        if self.tokens is not None:
            batch = self.gather(starts)
        else:
            parts = self.read_ahead(step, micro) if self.reader else self.read(step, micro)
            batch = [part.to(self.env.device, non_blocking=self.reader is not None) for part in parts]
        self.waited += time.perf_counter() - began
        return *batch, micro_seed(self.seed, step, self.env.rank * self.accumulation + micro)

    def gather(self, starts):
        """Split.gather() on the device."""
        positions = starts[:, None] + torch.arange(self.split.T + 1, device=starts.device)  # (B, T + 1)
        tokens = self.tokens[positions].long()
        if self.tokens.dtype == torch.int16:
            tokens &= 0xffff  # they are uint16
        x, y = tokens[:, :-1], tokens[:, 1:]
        if self.mask is not None:
            y = torch.where(self.mask[positions[:, 1:]] == 0, -1, y)
        x, y, end_id = x.contiguous(), y.contiguous(), self.split.end_id
        return (x, y) if end_id is None else (x, y, documents_of(x, end_id))

    def read_ahead(self, step, micro):
        """A micro-batch that the thread has read. The thread then reads the next one."""
        ready = self.ahead.get((step, micro)) or self.reader.submit(self.read, step, micro)
        following = (step, micro + 1) if micro + 1 < self.accumulation else (step + 1, 0)
        self.ahead = {following: self.reader.submit(self.read, *following)}
        return ready.result()

    def read(self, step, micro):
        """A micro-batch from disk; for a GPU in pinned memory, which torch keeps until the copy is done."""
        parts = [torch.from_numpy(part) for part in self.split.gather(self.windows(step)[1][micro])]
        return [part.pin_memory() for part in parts] if self.reader else parts
