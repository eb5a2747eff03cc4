"""Encode documents as token ids, in several processes."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from hotloop.data.documents import PIECE
from hotloop.data.tokenizer import ByteTokenizer, CharTokenizer, encode_parts


class Encoded(NamedTuple):
    """
    The part of a split from one batch. mask: 1 where a token counts toward the loss; None: all do.
    ends: the positions after the documents that end here.
    """
    ids: np.ndarray
    mask: np.ndarray | None
    num_bytes: int
    ends: np.ndarray


def encode_batch(tokenizer, batch, eot=None):
    """Encode (split, Piece) pairs as {split: Encoded}. eot: the id after a document, or None."""
    encoded = {}  # split: list of (ids, mask, ends)
    for split, piece in batch:
        encoded.setdefault(split, []).append(encode_piece(tokenizer, piece, eot))
    return {split: combine(tokenizer, pieces) for split, pieces in encoded.items()}


def encode_piece(tokenizer, piece, eot):
    """Encode a Piece. Returns (ids, mask or None, positions after the documents that end here)."""
    ids, mask = encode_parts(tokenizer, piece.parts, piece.start)
    if piece.start and tokenizer.bos is not None:
        ids = np.append(tokenizer.bos, ids)
        if mask is not None:
            mask = np.append(np.uint8(0), mask)
    # A chat template ends with a mark, which may be eot.
    if piece.end and eot is not None and (mask is None or ids[-1] != eot):
        ids = np.append(ids, eot)
        if mask is not None:
            mask = np.append(mask, mask[-1])
    return ids, mask, np.full(int(piece.end), len(ids))


def combine(tokenizer, pieces):
    """Join (ids, mask, ends) into an Encoded. If one has a mask, all ids without one count."""
    ids = np.concatenate([ids for ids, _, _ in pieces])
    assert not ids.size or ids.max() < tokenizer.n_vocab, 'the tokenizer returned an id beyond its vocabulary'
    masks = []
    ends = []
    size = 0  # of the pieces before
    masked = False
    for piece_ids, mask, piece_ends in pieces:
        masked = masked or mask is not None
        if mask is None:
            mask = np.ones(len(piece_ids), np.uint8)
        masks.append(mask)
        ends.append(size + piece_ends)
        size += len(piece_ids)
    mask = None
    if masked:
        mask = np.concatenate(masks)
    num_bytes = int(tokenizer.sizes[ids].sum())
    return Encoded(ids.astype(id_type(tokenizer)), mask, num_bytes, np.concatenate(ends))


def id_type(tokenizer):
    """Return the dtype of a dataset's ids, little-endian."""
    if tokenizer.n_vocab <= 2**16:
        return '<u2'
    return '<u4'


def batches_of(pieces):
    """Yield lists of (split, Piece) that contain about PIECE characters together."""
    batch = []
    size = 0
    for split, piece in pieces:
        batch.append((split, piece))
        size += 64  # short pieces cost time too
        for text, _, _ in piece.parts:
            size += len(text)
        if size >= PIECE:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def encode_all(tokenizer, batches, num_proc, eot=None):
    """
    Yield encode_batch() of each batch, in order. Four or more batches use num_proc processes. Bytes
    and characters do not, because encoding them is faster than sending them. ValueError if a
    process dies.
    """
    first = list(islice(batches, 4))
    batches = chain(first, batches)
    if len(first) < 4 or isinstance(tokenizer, (ByteTokenizer, CharTokenizer)):
        for batch in batches:
            yield encode_batch(tokenizer, batch, eot)
        return
    assert len(tokenizer.sizes) == tokenizer.n_vocab  # computed here, once for all processes
    context = multiprocessing.get_context('fork' if sys.platform == 'linux' else 'spawn')  # macOS: unsafe
    pool = ProcessPoolExecutor(num_proc, context, start_worker, (tokenizer, eot))
    waiting = deque()
    try:
        while True:
            ahead = islice(batches, 2 * num_proc + 1 - len(waiting))
            waiting.extend(pool.submit(encode_in_worker, batch) for batch in ahead)
            if not waiting:
                return
            future = waiting.popleft()
            if future.exception():
                raise future.exception()  # without a traceback
            yield future.result()
    except BrokenProcessPool:
        raise ValueError('a tokenizing process died, perhaps out of memory; lower --num_proc') from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(*settings):
    """Prepare a process of the pool. Ctrl-C reaches all, and the parent decides."""
    global _worker  # noqa: PLW0603
    _worker = settings  # (tokenizer, eot)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent():
    """End this process when its parent ends, even if that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_in_worker(batch):
    tokenizer, eot = _worker
    return encode_batch(tokenizer, batch, eot)
