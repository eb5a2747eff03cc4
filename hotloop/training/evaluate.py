"""The loss on fixed windows, with its standard error."""

import math
from typing import NamedTuple

import numpy as np
import torch

from hotloop.system import host
from hotloop.training.dataloader import upload
from hotloop.training.shard import is_sharded, reshard


def evaluate(model, split, num_windows, batch, env, byte_counts=None, stop=None):
    """
    The loss on fixed windows of a Split, all or num_windows spread evenly, without dropout and label
    smoothing. A Mixture's splits are averaged by weight. byte_counts: the UTF-8 bytes of each id, (V,).
    Returns {'loss': nats per token, 'stderr': its standard error, 'tokens': unmasked targets, 'bpb': bits
    per byte or None}, of a Mixture also 'losses': {name: loss}; None if stop() was true on any process.
    """
    results = []
    for part, starts in fixed_windows(split, num_windows):
        results.append(evaluate_split(model, part, starts, batch, env, byte_counts, stop))
        if results[-1] is None:
            return None
    return results[0] if len(results) == 1 else mean_by_weight(split, results)


def fixed_windows(split, num_windows):
    """[(Split, the positions of its windows)] of num_windows, of a Mixture by weight; None: of all."""
    return [(part, spread(part, num_windows and max(round(num_windows * weight), 1)))
            for part, weight in zip(split.splits, split.weights, strict=True)]


def spread(split, num_windows):
    """
    The positions of num_windows windows spread evenly over those of a Split that have a target, (N,); None:
    of all. The last window, which may be shorter, is among them only if all are.
    """
    starts, full = split.consecutive_starts()
    if num_windows is None or num_windows >= len(starts):
        return starts
    return full[np.linspace(0, len(full) - 1, num_windows).round().astype(np.int64)]


def count_batches(split, num_windows, batch, world):
    """The number of batches that evaluate() runs in each process."""
    return sum(-(-len(starts) // (batch * world)) for _, starts in fixed_windows(split, num_windows))


def mean_by_weight(mixture, results):
    """The result of a Mixture from those of its splits."""
    losses, stderrs, tokens = zip(*((r['loss'], r['stderr'], r['tokens']) for r in results), strict=True)
    loss, bpb = float(np.dot(mixture.weights, losses)), None
    if all(result['bpb'] for result in results):
        # loss / bpb is in proportion to the bytes per token, which average by weight; bpb itself does not
        bpb = float(loss / np.dot(mixture.weights, [result['loss'] / result['bpb'] for result in results]))
    return {'loss': loss, 'stderr': math.hypot(*np.multiply(mixture.weights, stderrs)), 'tokens': sum(tokens),
            'bpb': bpb, 'losses': dict(zip(mixture.names, losses, strict=True))}


@torch.no_grad()
def evaluate_split(model, split, starts, batch, env, byte_counts, stop):
    """evaluate() of the windows of one Split at these positions."""
    mine = np.arange(env.rank, len(starts), env.world)
    sums = np.zeros((3, len(starts)))  # loss, targets and bytes; zero at the windows of other processes
    batch_losses, stopped, was_training = [], False, model.training
    model.eval()
    for first in range(0, -(-len(starts) // env.world), batch):  # sharded, all run as many batches
        stopped = stop is not None and stop()
        if stop is not None and is_sharded(model):
            stopped = env.any(stopped)
        if stopped:
            break
        rows = mine[first:first + batch]
        parts = eval_batch(split, starts[rows], batch)
        losses = model(*[upload(part, env.device) for part in parts])  # (batch,)
        batch_losses.append(losses[:len(rows)])  # stays on the device: reading it now would synchronize
        y = parts[1][:len(rows)]
        sums[1, rows] = (y >= 0).sum(1)
        if byte_counts is not None:
            sums[2, rows] = np.where(y >= 0, byte_counts[np.maximum(y, 0)], 0).sum(1)
    model.train(was_training)
    reshard(model)
    if batch_losses and not stopped:
        sums[0, mine] = torch.cat(batch_losses).cpu().double().numpy()
    *sums, stops = env.sum(np.append(sums.ravel(), float(stopped)))
    if stops:
        return None
    loss, targets, num_bytes = np.reshape(sums, (3, -1))
    bpb = float(loss.sum() / math.log(2) / num_bytes.sum()) if num_bytes.any() else None
    return {'loss': float(loss.sum() / targets.sum()), 'stderr': standard_error(loss, targets),
            'tokens': int(targets.sum()), 'bpb': bpb}


def standard_error(loss, targets):
    """The standard error of loss.sum() / targets.sum(), from the sums of each window, both (N,)."""
    # Losses within a window are correlated, so the sample is the windows. For a ratio of two sums over them
    # the residual, loss - mean * targets, is what varies (Cochran, Sampling Techniques, 1977, 6.4)
    residuals = (loss - loss.sum() / targets.sum() * targets)[targets > 0]
    if len(residuals) < 2:
        return math.nan
    return float(residuals.std(ddof=1) * len(residuals)**0.5 / targets.sum())


def eval_batch(split, starts, batch):
    """split.gather() with rows of padding up to `batch`: one shape, so that the model is compiled once."""
    missing = (0, batch - len(starts)), (0, 0)
    x, y, *documents = split.gather(starts)
    x, *documents = (np.pad(part, missing) for part in (x, *documents))
    return x, np.pad(y, missing, constant_values=-1), *documents


def eval_windows(cfg, val):
    """The numbers of windows that an evaluation reads: of the validation split (None: all), of training."""
    if cfg.eval_iters is not None:  # batches of batch_size, as in nanoGPT
        return cfg.eval_iters * cfg.batch_size, cfg.eval_iters * cfg.batch_size
    # the training loss is there to show overfitting; a quarter is enough for that
    num_train = max(min(cfg.eval_tokens or 2**20, val.num_tokens) // 4 // val.T, 1)
    return cfg.eval_tokens and max(cfg.eval_tokens // val.T, 1), num_train


class Evaluation(NamedTuple):
    """The losses of both splits, as evaluate() returns them."""
    val: dict
    train: dict
    seconds: float


def evaluate_both(model, splits, cfg, batch, env, byte_counts=None, stop=None):
    """
    Evaluate a model on both splits, {'train': split, 'val': split}, in batches of `batch` windows. Returns an
    Evaluation; None if stop() was true on any process before it was complete.
    """
    num_val, num_train = eval_windows(cfg, splits['val'])
    began = host.process_seconds()
    val = evaluate(model, splits['val'], num_val, batch, env, byte_counts, stop)
    if val is None:
        return None
    train = evaluate(model, splits['train'], num_train, batch, env, None, stop)
    if train is None:
        return None
    return Evaluation(val, train, host.process_seconds() - began)
