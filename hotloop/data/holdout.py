"""The validation split: a separate source, the end of one document, or documents chosen by hash."""

import hashlib
import os
from collections import Counter
from typing import NamedTuple

from hotloop.data.documents import documents_in, text_blocks

SMALL = 1 << 24  # bytes of files; documents of larger ones are held out by probability


class Holdout(NamedTuple):
    """How documents are split: by a cut, or by hash, those in held_out or below limit for validation."""
    several: bool  # documents, whose ends are marked
    cut: int | None = None  # number of characters of one document, or tokens of shards, to train on
    seed: int | None = None  # of the hash
    held_out: frozenset = frozenset()
    limit: bytes = b''


def holdout_hash(key, seed):
    """A pure function of a document's key and the seed. The lowest hashes are held out."""
    return hashlib.sha256(f'{seed} {key}'.encode('utf-8', 'surrogateescape')).digest()


def hold_out(sizes, fraction):
    """
    The hashes of the documents to hold out, from {hash: bytes}: the lowest ones, up to the fraction of all
    bytes. Each side gets at least one document. One with more than twice the fraction, or half of all bytes,
    is for training, unless all are so large: then the smallest is held out.
    """
    total, held_bytes, held_out = sum(sizes.values()), 0, set()
    largest = min(2 * fraction, 0.5) * total
    candidates = sorted(key for key in sizes if sizes[key] <= largest)
    if not candidates:
        candidates = sorted(sizes, key=lambda key: (sizes[key], key))[:1]
    for key in candidates[:len(sizes) - 1]:
        if not held_out or held_bytes < fraction * total:
            held_out.add(key)
            held_bytes += sizes[key]
    return frozenset(held_out)


def is_single(files, reading):
    """Whether the files are one document."""
    is_one_text = len(files) == 1 and files[0].kind == 'text' and not reading.separator
    return is_one_text or files[0].kind == 'joined'


def plan_holdout(files, val_files, cfg, reading):
    """
    The Holdout of these files. One document is cut at a character. The last pieces of token shards are held
    out. Otherwise documents are held out, up to the fraction of bytes or, if there are many, each with that
    probability. Reads the files once more, unless each is a document.
    """
    single = is_single(files, reading) and (not val_files or is_single(val_files, reading))
    if val_files:
        return Holdout(several=not single)
    if single or files[0].kind == 'tokens':
        if files[0].kind == 'text':
            lengths = map(len, text_blocks(files[0], reading))
        else:
            pieces = documents_in(files, reading)
            lengths = (len(piece.parts[0][0] if single else piece.parts) for piece in pieces)
        return Holdout(not single, int(sum(lengths) * (1 - cfg.val_fraction)))
    if all(file.kind in ('text', 'functions') for file in files) and not reading.separator:
        sizes = {holdout_hash(file.name, cfg.seed): os.path.getsize(file.path) for file in files}
    else:
        num_bytes = sum(os.path.getsize(file.path) for file in files)
        sizes = Counter()
        for piece in documents_in(files, reading):
            sizes[holdout_hash(piece.key, cfg.seed)] += sum(len(text.encode()) for text, *_ in piece.parts)
            if num_bytes > SMALL and len(sizes) > min(50 / cfg.val_fraction, 1e6):
                limit = int(cfg.val_fraction * 2**64).to_bytes(8, 'big')
                return Holdout(several=True, seed=cfg.seed, limit=limit)
    return Holdout(several=True, seed=cfg.seed, held_out=hold_out(sizes, cfg.val_fraction))


def split_pieces(files, val_files, reading, holdout, progress=None, counts=None):
    """Yields (split, Piece) of all documents. The other arguments are those of documents_in()."""
    pieces = documents_in(files, reading, progress, counts)
    if holdout.cut is None:
        for piece in pieces:
            if piece.start:
                order = holdout_hash(piece.key, holdout.seed)
                split = 'val' if order in holdout.held_out or order < holdout.limit else 'train'
            yield split, piece
    elif files[0].kind == 'tokens':
        left = holdout.cut
        for piece in pieces:  # never split, because each begins with a document
            left -= len(piece.parts)
            yield 'train' if left >= 0 else 'val', piece
    else:
        yield from cut_document(pieces, holdout.cut)
    for piece in documents_in(val_files, reading, progress, counts):
        yield 'val', piece


def cut_document(pieces, cut):
    """Yields (split, Piece) of one document: training up to the cut, then validation."""
    val_started = False
    for piece in pieces:
        text = piece.parts[0][0]
        head, tail = text[:cut], text[cut:]
        cut -= len(head)
        if head:
            yield 'train', piece._replace(parts=[(head, False, True)], end=cut == 0)
        if tail:
            yield 'val', piece._replace(parts=[(tail, False, True)], start=not val_started)
            val_started = True
