"""The order of the data, as a pure function of the seed and the step."""

import functools
import hashlib
import os
import time

import numpy as np
import torch

from hotloop.data.dataset import Dataset, command_for, open_bin


class Split:
    """One bin of a dataset, memory-mapped, in windows of T tokens; targets are the next tokens."""

    def __init__(self, folder, name, meta, T, document_mask=False):
        self.folder = folder
        self.meta = meta
        self.T = T
        self.splits = [self]  # a Mixture has several
        self.weights = [1.0]
        self.path = os.path.join(folder, f'{name}.bin')
        self.tokens = open_bin(self.path, meta['dtype'])
        self.num_tokens = len(self.tokens)
        self.num_bytes = self.tokens.nbytes
        self.num_windows = windows_per_epoch(self.num_tokens, T)
        self.order = functools.lru_cache(maxsize=2)(self.epoch_order)
        expected = meta['splits'].get(name, {}).get('tokens', self.num_tokens)
        if self.num_tokens != expected:
            raise ValueError(f'{self.path} has {self.num_tokens:,} tokens, but meta.json says '
                             f'{expected:,}; prepare it again')
        self.mask = None
        mask_path = os.path.join(folder, f'{name}.mask.bin')
        if os.path.exists(mask_path):
            self.mask = open_bin(mask_path, np.uint8)  # 0: not in the loss
            self.num_bytes += len(self.mask)
            if len(self.mask) != self.num_tokens or not self.mask[1:].any():
                raise ValueError(f'{mask_path} does not fit {self.num_tokens:,} tokens, or is 0 '
                                 'everywhere; prepare it again')
        self.end_id = None  # the id that ends each document, if attention stays within documents
        if document_mask:
            self.end_id = meta.get('eot')
            if self.end_id is None or self.mask is not None:
                raise ValueError(f'document_mask=True needs texts and the id that ends each, which '
                                 f'{folder} does not have; prepare it with a tokenizer that has '
                                 'one, like gpt2 or bpe:4096; for rows use --pack_rows')

    def check_ids(self, vocab_size):
        """Raise ValueError if a token is not below vocab_size; a GPU would give no reason."""
        if not self.meta['foreign'] and self.meta['vocab_size'] <= vocab_size:
            return  # prepare.py writes valid ids, and reading all of them may take minutes
        if self.tokens.max() >= vocab_size:
            dataset = Dataset(os.path.basename(self.folder), self.folder, self.meta, 1.0)
            data_dir = os.path.dirname(self.folder)
            command = command_for(dataset, data_dir, 'RUN_OR_MODEL')
            raise ValueError(f'{self.path} has token id {self.tokens.max()}, but the vocabulary of '
                             f'the model has {vocab_size} ids; prepare it with the tokenizer of '
                             f'the model: {command}')

    def fingerprint(self):
        """Hash the size and 64 blocks spread over the bin and its mask."""
        h = hashlib.sha256(str(self.num_tokens).encode())
        for start in np.linspace(0, max(self.num_tokens - 4096, 0), 64).astype(np.int64):
            h.update(self.tokens[start:start + 4096].tobytes())
            if self.mask is not None:
                h.update(self.mask[start:start + 4096].tobytes())
        return h.hexdigest()[:16]

    def starts(self, seed, index):
        """Find the positions of windows by number, counted over all epochs. index: int64 array."""
        epochs = index // self.num_windows
        starts = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            starts[chosen] = self.order(seed, epoch)[index[chosen] % self.num_windows]
        return starts

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
        return tuple(part.numpy() for part in parts)

    def num_targets(self, starts):
        """Count the unmasked targets of the windows at these positions."""
        if self.mask is None:
            return len(starts) * self.T
        return sum(int(np.count_nonzero(self.mask[s + 1:s + 1 + self.T])) for s in starts)


def gather(tokens, mask, starts, T, end_id):
    """
    Return inputs, targets and, with end_id, the documents of windows: (B, T) int64 tensors. Targets
    are -1 where the mask is 0, and beyond the end of the split.

    starts: positions, (B,). tokens, mask: arrays on the host, or tensors on the device of starts.
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
        raise ValueError(f'batch_size={batch_size} x gradient_accumulation_steps={accumulation} = '
                         f'{total} sequences cannot be divided evenly among {world} processes; '
                         f'use a multiple of {world}, such as {total + world - total % world}')
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
    masks = []
    for part in split.splits:
        masks.append(np.ones(part.num_tokens, np.uint8) if part.mask is None else part.mask)
    mask = None
    if any(part.mask is not None for part in split.splits):
        mask = torch.from_numpy(np.concatenate(masks)).to(device)
    return torch.from_numpy(tokens.view(f'i{tokens.itemsize}')).to(device), mask


def upload(array, device):
    """Copy an array to a device; to a GPU from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == 'cuda':
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Batches:
    """
    The micro-batches of this process. A GPU holds the split if it has room for it. Otherwise the
    host reads each micro-batch while the GPU computes what is queued.
    """

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
        self.tokens = None  # the split, if it is kept on the device
        self.mask = None
        if kept_on_device(split, env):
            self.tokens, self.mask = copy_to_device(split, env.device)

    def windows_before(self, step):
        """Count the windows that the steps before this one read, over all epochs."""
        return step * self.global_batch + self.shift

    def step(self, step):
        """Return the targets of the global batch, and a load() for each micro-batch of this process."""
        index = np.arange(self.windows_before(step), self.windows_before(step + 1))
        starts = self.split.starts(self.seed, index)
        num_targets = self.split.num_targets(starts)
        starts = starts.reshape(self.env.world, self.accumulation, self.micro_batch)[self.env.rank]
        if self.tokens is not None:
            starts = upload(starts, self.env.device)  # before the GPU is busy with this step
        loads = [functools.partial(self.load, step, n, starts[n]) for n in range(self.accumulation)]
        return num_targets, loads

    def load(self, step, micro, starts):
        """Return gather()'s tensors of a micro-batch on the device, and the seed of its dropout."""
        began = time.perf_counter()
        if self.tokens is not None:
            batch = gather(self.tokens, self.mask, starts, self.split.T, self.split.end_id)
        else:
            batch = [upload(part, self.env.device) for part in self.split.gather(starts)]
        self.waited += time.perf_counter() - began
        return *batch, micro_seed(self.seed, step, self.env.rank * self.accumulation + micro)
