"""The loss on fixed windows, with its standard error."""

import math
from typing import NamedTuple

import numpy as np
import torch

from hotloop.system import host
from hotloop.training.dataloader import upload
from hotloop.training.parallel import reshard


def evaluate(model, split, num_windows, batch, env, byte_counts=None, stop=None):
    """
    Compute the mean loss over fixed windows of a Split, without dropout and label smoothing; of a
    Mixture the mean by weight. Returns None if stop() is true on any process, else
    {'loss': nats per token, 'stderr': its standard error, 'tokens': unmasked targets, 'bpb': bits
    per byte or None}, of a Mixture also 'losses': {name: loss}.

    num_windows: as in fixed_windows(). byte_counts: the UTF-8 bytes of each id, (V,).
    """
    means, errors, sizes, num_tokens = [], [], [], 0
    for part, starts in fixed_windows(split, num_windows):
        sums = window_sums(model, part, starts, batch, env, byte_counts, stop)
        if sums is None:
            return None
        loss, targets, num_bytes = sums
        means.append(float(loss.sum() / targets.sum()))
        errors.append(standard_error(loss, targets))
        sizes.append(num_bytes.sum() / targets.sum())  # bytes per token average by weight; bpb does not
        num_tokens += int(targets.sum())
    loss = float(np.dot(split.weights, means))
    bpb = None
    if all(sizes):
        bpb = float(loss / math.log(2) / np.dot(split.weights, sizes))
    result = {'loss': loss, 'stderr': math.hypot(*np.multiply(split.weights, errors)),
              'tokens': num_tokens, 'bpb': bpb}
    if len(means) > 1:
        result['losses'] = dict(zip(split.names, means, strict=True))
    return result


def fixed_windows(split, num_windows):
    """
    List (Split, the positions of its windows) of num_windows spread evenly over those that have a
    target, of a Mixture by weight; None: of all, with a shorter last one.
    """
    found = []
    for part, weight in zip(split.splits, split.weights, strict=True):
        starts, full = part.consecutive_starts()
        if num_windows is not None:
            number = max(round(num_windows * weight), 1)
            if number < len(starts):
                starts = full[np.linspace(0, len(full) - 1, number).round().astype(np.int64)]
        found.append((part, starts))
    return found


def count_windows(split, num_windows):
    """Count the windows that evaluate() reads."""
    return sum(len(starts) for _, starts in fixed_windows(split, num_windows))


@torch.no_grad()
def window_sums(model, split, starts, batch, env, byte_counts, stop):
    """
    Sum loss, targets and bytes in each of the windows of one Split at these positions, shared among the
    processes: (3, number of windows). Returns None if stop() is true on any process.
    """
    mine = np.arange(env.rank, len(starts), env.world)
    sums = np.zeros((3, len(starts)))  # 0 at windows of other processes
    losses = []
    stopped = False
    was_training = model.training
    model.eval()
    for first in range(0, -(-len(starts) // env.world), batch):  # sharded, all run as many batches
        stopped = stop is not None and env.any(stop())
        if stopped:
            break
        rows = mine[first:first + batch]
        # a short batch repeats windows: one shape, so that the model is compiled once
        parts = split.gather(np.resize(starts[rows], batch))
        loss = model(*[upload(part, env.device) for part in parts])[0]  # (batch,)
        losses.append(loss[:len(rows)])  # stays on the device: reading it would wait
        y = parts[1][:len(rows)]
        sums[1, rows] = (y >= 0).sum(1)
        if byte_counts is not None:
            sums[2, rows] = np.where(y >= 0, byte_counts[np.maximum(y, 0)], 0).sum(1)
    model.train(was_training)
    reshard(model)
    if stopped:
        return None
    sums[0, mine] = torch.cat(losses).cpu().double().numpy()
    return env.sum(sums)


def standard_error(loss, targets):
    """Estimate the error of loss.sum() / targets.sum(), from the sums of each window, both (N,)."""
    # Losses within a window are correlated, so the sample is the windows. For a ratio of two sums
    # loss - mean * targets is what varies (Cochran, Sampling Techniques, 1977, 6.4)
    residuals = (loss - loss.sum() / targets.sum() * targets)[targets > 0]
    if len(residuals) < 2:
        return math.nan
    return float(residuals.std(ddof=1) * len(residuals)**0.5 / targets.sum())


def eval_windows(cfg, val):
    """Return how many windows an evaluation reads, (validation, training); None: all."""
    if cfg.eval_iters is not None:  # batches of batch_size, as in nanoGPT
        return cfg.eval_iters * cfg.batch_size, cfg.eval_iters * cfg.batch_size
    num_val = None
    if cfg.eval_tokens is not None:
        num_val = max(cfg.eval_tokens // val.T, 1)
    # the training loss is there to show overfitting; a quarter is enough for that
    return num_val, max(min(cfg.eval_tokens or 2**20, val.num_tokens) // 4 // val.T, 1)


def reads_other_windows(cfg, config):
    """Test whether evaluations with cfg read other windows than those of a run with this config."""
    names = ['eval_tokens', 'eval_iters', 'pack_rows']
    if cfg.eval_iters is not None:
        names.append('batch_size')
    if ',' in cfg.dataset:  # a mixture, whose weights decide how many windows of each are read
        names.append('dataset')
    return any(config.get(name, getattr(cfg, name)) != getattr(cfg, name) for name in names)


class Evaluation(NamedTuple):
    """The losses of both splits, as evaluate() returns them."""
    val: dict
    train: dict
    seconds: float


def evaluate_both(model, splits, cfg, batch, env, byte_counts=None, stop=None):
    """Return the Evaluation of {'train': split, 'val': split}; None if stop() is true on any process."""
    num_val, num_train = eval_windows(cfg, splits['val'])
    began = host.process_seconds()
    val = evaluate(model, splits['val'], num_val, batch, env, byte_counts, stop)
    if val is None:
        return None
    train = evaluate(model, splits['train'], num_train, batch, env, None, stop)
    if train is None:
        return None
    return Evaluation(val, train, host.process_seconds() - began)
