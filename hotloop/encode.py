"""Documents -> token ids, in processes."""

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

from hotloop.documents import PIECE
from hotloop.tokenizer import TiktokenTokenizer, encode_parts


class Encoded(NamedTuple):
    """What a batch adds to a split. mask: 1 where a token counts in the loss; None where all do."""
    ids: np.ndarray
    mask: np.ndarray | None
    num_bytes: int
    documents: int


def encode_batch(tokenizer, batch, bos=None, eot=None):
    """
    {split: Encoded} of a batch of (split, Piece). bos, eot: ids before and after each document, or None.
    """
    made = {}
    for split, piece in batch:
        arrays, masks, documents = made.setdefault(split, ([], [], []))
        if isinstance(piece.parts, np.ndarray):  # ids already
            ids, mask = piece.parts, None
            documents.append(np.count_nonzero(ids == tokenizer.eot))
        else:
            ids, mask = encode_parts(tokenizer, piece.parts)
            documents.append(piece.end)
            if piece.start and bos is not None:
                ids, mask = np.append(bos, ids), mask if mask is None else np.append(np.uint8(0), mask)
            if piece.end and eot is not None and not (mask is not None and ids[-1] == eot):  # as a template's end
                ids, mask = np.append(ids, eot), mask if mask is None else np.append(mask, np.uint8(1))
        arrays.append(ids)
        masks.append(mask)
    return {split: encoded(tokenizer, *of_split) for split, of_split in made.items()}


def encoded(tokenizer, arrays, masks, documents):
    ids = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    assert not ids.size or ids.max() < tokenizer.n_vocab, 'a tokenizer gave an id beyond its vocabulary'
    mask = None
    if any(m is not None for m in masks):
        mask = np.concatenate([np.ones(len(a), np.uint8) if m is None else m
                               for a, m in zip(arrays, masks, strict=True)])
    return Encoded(ids.astype(id_type(tokenizer)), mask, int(tokenizer.sizes[ids].sum()), int(sum(documents)))


def id_type(tokenizer):
    return '<u2' if tokenizer.n_vocab <= 2**16 else '<u4'


def batches_of(pieces):
    """Lists of pieces that hold about PIECE characters together."""
    batch, size = [], 0
    for item in pieces:
        batch.append(item)
        parts = item[1].parts
        size += 64 + (len(parts) if isinstance(parts, np.ndarray) else sum(len(text) for text, *_ in parts))
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(tokenizer, batches, num_proc, bos=None, eot=None):
    """
    encode_batch() of each batch, in order. By num_proc processes where there is enough to do for them; Python's threads
    would wait for each other, and bytes and characters are encoded faster than they are sent to a process.
    """
    first = list(islice(batches, 4))
    batches = chain(first, batches)
    if len(first) < 4 or not isinstance(tokenizer, TiktokenTokenizer):
        yield from (encode_batch(tokenizer, batch, bos, eot) for batch in batches)
        return
    assert len(tokenizer.sizes) == tokenizer.n_vocab  # made before the fork, once for all
    context = multiprocessing.get_context('fork' if sys.platform == 'linux' else 'spawn')  # macOS forks badly
    pool, waiting = ProcessPoolExecutor(num_proc, context, start_process, (tokenizer, bos, eot)), deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(encode_here, batch))
            if len(waiting) > 2 * num_proc:
                yield result_of(waiting.popleft())
        yield from map(result_of, waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(future):
    """Its result, or its error raised here: that is how call_main() knows a sentence from a defect."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise ValueError('a process that tokenizes has died, perhaps for want of memory; try a smaller --num_proc')
    if error:
        raise error
    return future.result()


def start_process(*settings):
    """What a process that tokenizes does first. It ends with the one that started it, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent says when to end
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    encode_here.settings = settings


def encode_here(batch):
    tokenizer, bos, eot = encode_here.settings
    return encode_batch(tokenizer, batch, bos, eot)
