"""The loss on fixed windows, with its standard error."""

import math

import numpy as np
import torch

from hotloop.dataloader import Mixture


def evaluate(model, split, num_windows, batch, env, byte_counts=None, stop=None):
    """
    The loss on fixed windows of a Split: all of them, the shorter last one included, or num_windows spread
    evenly. They do not depend on `batch` or the number of processes. Dropout and label smoothing are off.
    A Mixture's splits are evaluated one by one and averaged by weight, as training draws from them.

    Returns {'loss': nats per token, 'stderr': its standard error, 'tokens': targets that count, 'bpb': bits
    per byte, None without byte_counts, the UTF-8 bytes of each id, (V,)}; of a Mixture also 'losses':
    {name: loss}. Returns None if stop() was true before a batch on any process.
    """
    if not isinstance(split, Mixture):
        return evaluate_split(model, split, num_windows, batch, env, byte_counts, stop)
    results = []
    for part, weight in zip(split.splits, split.weights, strict=True):
        share = None if num_windows is None else max(round(num_windows * weight), 1)
        result = evaluate_split(model, part, share, batch, env, byte_counts, stop)
        if result is None:
            return None
        results.append(result)
    losses = [result['loss'] for result in results]
    loss, bpb = float(np.dot(split.weights, losses)), None
    if all(result['bpb'] for result in results):
        # loss / bpb is in proportion to the bytes per token, which average by weight; bpb itself does not
        bpb = float(loss / np.dot(split.weights, [result['loss'] / result['bpb'] for result in results]))
    errors = np.multiply(split.weights, [result['stderr'] for result in results])
    return {'loss': loss, 'stderr': float(np.linalg.norm(errors)), 'bpb': bpb,
            'tokens': sum(result['tokens'] for result in results),
            'losses': dict(zip(split.names, losses, strict=True))}


@torch.no_grad()
def evaluate_split(model, split, num_windows, batch, env, byte_counts, stop):
    """evaluate() of one Split."""
    windows = np.arange(-(-(split.num_tokens - 1) // split.T))
    if num_windows is not None and num_windows < len(windows):
        last_full = (split.num_tokens - 1) // split.T - 1
        windows = np.linspace(0, last_full, num_windows).round().astype(np.int64)
    mine = np.arange(env.rank, len(windows), env.world)
    sums = np.zeros((3, len(windows)))  # zero at the windows of other processes
    loss, targets, num_bytes = sums
    batch_losses, stopped = [], False
    was_training = model.training
    model.eval()
    for first in range(0, len(mine), batch):
        if stop is not None and stop():
            stopped = True
            break
        rows = mine[first:first + batch]
        x, y = eval_batch(split, windows[rows], batch)
        losses = model(torch.from_numpy(x).to(env.device), torch.from_numpy(y).to(env.device))  # (batch,)
        batch_losses.append(losses[:len(rows)])  # on the device: reading them now would wait for it
        y = y[:len(rows)]
        targets[rows] = (y >= 0).sum(1)
        if byte_counts is not None:
            num_bytes[rows] = np.where(y >= 0, byte_counts[np.maximum(y, 0)], 0).sum(1)
    model.train(was_training)
    if batch_losses and not stopped:
        loss[mine] = torch.cat(batch_losses).cpu().double().numpy()
    *sums, stops = env.sum(np.append(sums.ravel(), float(stopped)))
    if stops:
        return None
    loss, targets, num_bytes = np.reshape(sums, (3, -1))
    if not targets.any():
        raise ValueError(f'{split.path} has no target that counts in the windows evaluated; '
                         'raise eval_tokens')
    bpb = float(loss.sum() / math.log(2) / num_bytes.sum()) if num_bytes.any() else None
    return {'loss': float(loss.sum() / targets.sum()), 'stderr': standard_error(loss, targets),
            'tokens': int(targets.sum()), 'bpb': bpb}


def standard_error(loss, targets):
    """The standard error of loss.sum() / targets.sum(), from the sums of each window, both (N,)."""
    # The sample is the windows, as the losses within one are correlated. The mean is a ratio of two sums over
    # them, so what varies is the residual, loss - mean * targets: a window with many targets has a large
    # loss without being unusual (Cochran, Sampling Techniques, 1977, 6.4)
    mean = loss.sum() / targets.sum()
    residuals = (loss - mean * targets)[targets > 0]
    n = len(residuals)
    if n < 2:
        return math.nan
    return float(np.sqrt((residuals**2).sum() * n / (n - 1)) / targets.sum())


def eval_batch(split, windows, batch):
    """
    Inputs and targets of windows by number: two (batch, T) int64 arrays, one shape for every batch, so a
    model is compiled once. Missing rows, and what a shorter last window lacks, have targets of -1.
    """
    T, N = split.T, split.num_tokens
    x, y = np.zeros((batch, T), dtype=np.int64), np.full((batch, T), -1, dtype=np.int64)
    starts = windows * T
    full = np.flatnonzero(starts + T + 1 <= N)
    if len(full):
        x[full], y[full] = split.gather(starts[full])
    for row in np.flatnonzero(starts + T + 1 > N):
        tail = split.tokens[starts[row]:].astype(np.int64)
        x[row, :len(tail) - 1] = tail[:-1]
        y[row, :len(tail) - 1] = tail[1:]
        if split.mask is not None:
            y[row, :len(tail) - 1][split.mask[starts[row] + 1:] == 0] = -1
    return x, y


def eval_windows(cfg, T):
    """How many windows an evaluation reads of the validation split (None: all) and of the training split."""
    if cfg.eval_iters is not None:  # batches of batch_size, as in nanoGPT
        return cfg.eval_iters * cfg.batch_size, cfg.eval_iters * cfg.batch_size
    if cfg.eval_tokens is None:
        return None, max(2**18 // T, 1)
    # the training loss is there to show over-fitting, for which a quarter is enough
    return max(cfg.eval_tokens // T, 1), max(cfg.eval_tokens // 4 // T, 1)
