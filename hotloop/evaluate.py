"""The loss on fixed windows, with its standard error."""

import math

import numpy as np
import torch

from hotloop.dataloader import Split


@torch.no_grad()
def evaluate(model, split, num_windows, batch, env, byte_counts=None, stop=None):
    """
    The loss on fixed windows of a split, the same ones whatever the batch or the number of processes: all of it, the
    tail included, or num_windows spread evenly. Label smoothing and dropout do not act.
    Returns {'loss': nats a token, 'stderr': its standard error over windows, 'tokens', 'bpb': bits per byte of the very
    tokens evaluated, None without byte_counts}; None when stop(), asked before each batch, said True on any process.
    """
    T, N = split.T, split.num_tokens
    total = -(-(N - 1) // T)
    windows = np.arange(total) if num_windows is None or num_windows >= total else \
        np.linspace(0, (N - 1) // T - 1, num_windows).round().astype(np.int64)
    sums = np.zeros((3, len(windows)))  # loss, targets, bytes of each window
    mine = np.arange(env.rank, len(windows), env.world)
    losses, stopped = [], False
    was_training = model.training
    model.eval()
    for at in range(0, len(mine), batch):
        if stopped := bool(stop and stop()):
            break
        chosen = mine[at:at + batch]
        x, y = eval_batch(split, windows[chosen], batch)
        losses.append(model(*(torch.from_numpy(a).to(env.device) for a in (x, y)))[:len(chosen)])
        y = y[:len(chosen)]
        sums[1, chosen] = (y >= 0).sum(1)
        if byte_counts is not None:
            sums[2, chosen] = np.where(y >= 0, byte_counts[np.maximum(y, 0)], 0).sum(1)
    model.train(was_training)
    if losses and not stopped:
        sums[0, mine] = torch.cat(losses).cpu().double().numpy()
    *sums, stops = env.sum(np.append(sums.ravel(), float(stopped)))
    if stops:
        return None
    loss, targets, num_bytes = np.reshape(sums, (3, -1))
    counted = targets > 0
    if not counted.any():
        raise ValueError(f'{split.path} has no target that counts in the windows evaluated; raise eval_tokens')
    mean = loss.sum() / targets.sum()
    spread = (loss - mean * targets)[counted]  # of a ratio of sums, windows being the sample
    n = int(counted.sum())
    stderr = float(np.sqrt((spread**2).sum() * n / max(n - 1, 1)) / targets.sum()) if n > 1 else float('nan')
    return {'loss': float(mean), 'stderr': stderr, 'tokens': int(targets.sum()),
            'bpb': float(loss.sum() / math.log(2) / num_bytes.sum()) if num_bytes.sum() > 0 else None}


def evaluate_any(model, split, num_windows, batch, env, byte_counts=None, stop=None):
    """
    evaluate(), of a Mixture too: each of its splits on its share of the windows, and their mean by weight, as if the
    windows had been drawn as in training. 'losses' holds those of each.
    """
    if isinstance(split, Split):
        return evaluate(model, split, num_windows, batch, env, byte_counts, stop)
    shares = [num_windows and max(round(num_windows * weight), 1) for weight in split.weights]
    each = [evaluate(model, s, n, batch, env, byte_counts, stop)
            for s, n in zip(split.splits, shares, strict=True)]
    if None in each:
        return None
    loss, bits = float(np.dot(split.weights, [e['loss'] for e in each])), None
    if all(e['bpb'] for e in each):  # bits a token over bytes a token, both of the mixture
        bits = float(loss / np.dot(split.weights, [e['loss'] / e['bpb'] for e in each]))
    return {'loss': loss, 'stderr': float(np.linalg.norm(np.multiply(split.weights, [e['stderr'] for e in each]))),
            'tokens': sum(e['tokens'] for e in each), 'bpb': bits,
            'losses': {name: e['loss'] for name, e in zip(split.names, each, strict=True)}}


def eval_batch(split, windows, batch):
    """Windows by index as (batch, T) arrays: rows and the end of the last window that are not there count as -1."""
    T, N = split.T, split.num_tokens
    x, y = np.zeros((batch, T), dtype=np.int64), np.full((batch, T), -1, dtype=np.int64)
    starts = windows * T
    full = starts + T + 1 <= N
    if full.any():
        x[:len(windows)][full], y[:len(windows)][full] = split.gather(starts[full])
    for row in np.flatnonzero(~full):  # the last window of a split is shorter than T
        tail = split.tokens[starts[row]:].astype(np.int64)
        x[row, :len(tail) - 1], y[row, :len(tail) - 1] = tail[:-1], tail[1:]
        if split.mask is not None:
            y[row, :len(tail) - 1][split.mask[starts[row] + 1:] == 0] = -1
    return x, y


def eval_windows(cfg, T):
    """How many windows of the validation and of the training split an evaluation reads; None: all."""
    if cfg.eval_iters is not None:
        return cfg.eval_iters * cfg.batch_size, cfg.eval_iters * cfg.batch_size
    val = None if cfg.eval_tokens is None else max(cfg.eval_tokens // T, 1)
    # the training split is there to see over-fitting, for which a quarter is enough
    return val, max((2**18 if val is None else cfg.eval_tokens // 4) // T, 1)
