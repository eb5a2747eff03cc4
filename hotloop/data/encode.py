"""Encode the parts of a document as token ids, and documents in several processes."""

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice, starmap
from typing import NamedTuple

import numpy as np

from hotloop.data.documents import PIECE
from hotloop.data.tokenizer import ByteTokenizer, CharTokenizer


def encode_parts(tokenizer, parts, start=True):
    """
    Encode a stretch of a document as (ids, mask). parts: those of a Piece. start: whether the
    document begins here. mask: 1 where a token counts toward the loss.
    """
    runs = []  # [text or special id, counts]; adjacent texts with equal `counts` form one run
    for text, markup, counts in parts:
        for word in tokenizer.special_names.split(text) if markup else [text]:
            if markup and word in tokenizer.specials:
                runs.append([tokenizer.specials[word], counts])
            elif runs and isinstance(runs[-1][0], str) and runs[-1][1] == counts:
                runs[-1][0] += word
            elif word or not runs:
                runs.append([word, counts])
    ids = []
    mask = []
    for i, (run, counts) in enumerate(runs):
        if not isinstance(run, str):
            ids.append(np.array([run]))
        elif start and i == 0:
            ids.append(tokenizer.encode(run))
        else:
            after_special = i > 0 and not isinstance(runs[i - 1][0], str)
            ids.append(tokenizer.encode_next(run, after_special))
        mask.append(np.full(len(ids[-1]), counts, dtype=np.uint8))
    return np.concatenate(ids), np.concatenate(mask)


def prompt_ids(tokenizer, text):
    """Encode a prompt after the bos, with special ids by name; never returns []."""
    ids = encode_parts(tokenizer, [(text, True, True)])[0].tolist()
    if tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids = [tokenizer.bos, *ids]
    return ids or [0 if tokenizer.eot is None else tokenizer.eot]


# -----------------------------------------------------------------------------
# documents

class Encoded(NamedTuple):
    """
    One batch of a split. mask: 1 where a token counts toward the loss. ends: the positions after
    the documents that end here.
    """
    split: str
    ids: np.ndarray
    mask: np.ndarray
    num_bytes: int
    ends: np.ndarray


def encode_batch(tokenizer, eot, split, pieces):
    """Encode the Pieces of a split as Encoded. eot: the id after a document, or None."""
    ids = []
    masks = []
    ends = []
    size = 0
    for piece in pieces:
        piece_ids, mask = encode_parts(tokenizer, piece.parts, piece.start)
        if piece.start and tokenizer.bos is not None:
            piece_ids = np.append(tokenizer.bos, piece_ids)
            mask = np.append(np.uint8(0), mask)
        # A chat template ends with a mark, which may be eot.
        if piece.end and eot is not None and (len(piece.parts) == 1 or piece_ids[-1] != eot):
            piece_ids = np.append(piece_ids, eot)
            mask = np.append(mask, np.uint8(piece.parts[-1][2]))
        ids.append(piece_ids)
        masks.append(mask)
        size += len(piece_ids)
        if piece.end:
            ends.append(size)
    ids = np.concatenate(ids)
    assert not ids.size or ids.max() < tokenizer.n_vocab, 'the tokenizer returned an id beyond its vocabulary'
    num_bytes = int(tokenizer.sizes[ids].sum())
    return Encoded(split, ids.astype(id_type(tokenizer)), np.concatenate(masks), num_bytes,
                   np.array(ends, np.int64))


def id_type(tokenizer):
    """Return the dtype of a dataset's ids, little-endian."""
    if tokenizer.n_vocab <= 2**16:
        return '<u2'
    return '<u4'


def batches_of(pieces):
    """Group (split, Piece) pairs: yield (split, Pieces) that contain about PIECE characters together."""
    batches = defaultdict(list)
    sizes = Counter()
    for split, piece in pieces:
        batches[split].append(piece)
        sizes[split] += 64  # short pieces cost time too
        for text, _, _ in piece.parts:
            sizes[split] += len(text)
        if sizes[split] >= PIECE:
            yield split, batches.pop(split)
            del sizes[split]
    yield from batches.items()


def encode_all(tokenizer, batches, num_proc, eot=None):
    """
    Yield encode_batch() of each batch, in order. Four or more batches use num_proc processes. Bytes
    and characters do not, because encoding them is faster than sending them.
    """
    encode = functools.partial(encode_batch, tokenizer, eot)
    first = list(islice(batches, 4))
    batches = chain(first, batches)
    if len(first) < 4 or isinstance(tokenizer, (ByteTokenizer, CharTokenizer)):
        yield from starmap(encode, batches)
        return
    assert len(tokenizer.sizes) == tokenizer.n_vocab  # computed here, once for all processes
    context = multiprocessing.get_context('fork' if sys.platform == 'linux' else 'spawn')  # macOS: unsafe
    waiting = deque()
    try:
        with ProcessPoolExecutor(num_proc, context, start_worker, (encode,)) as pool:
            for batch in batches:
                waiting.append(pool.submit(encode_in_worker, *batch))
                if len(waiting) > 2 * num_proc:
                    yield waiting.popleft().result()
            for future in waiting:
                yield future.result()
    except BrokenProcessPool:
        raise ValueError(f'one of num_proc={num_proc} processes was killed, perhaps for its memory; lower '
                         '--num_proc') from None


def start_worker(encode):
    """Prepare a process of the pool. It ignores Ctrl-C, which the parent handles."""
    global _encode  # noqa: PLW0603
    _encode = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent():
    """End this process when its parent ends, even if that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_in_worker(split, pieces):
    return _encode(split, pieces)
