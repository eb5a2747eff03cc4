"""Score text: the loss and bits per byte of each document, and of all documents together."""

import json
import math
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from hotloop.data.documents import documents_in, template_of
from hotloop.data.encode import encode_parts
from hotloop.data.sources import files_of
from hotloop.inference.generate import NOT_FINITE, WITHOUT_CUDNN
from hotloop.system.text import counted

MAX_LOGITS = 2**26  # A batch has at most this many logits: 256 MB.


@dataclass
class Score:
    """The targets of a document: their number, their UTF-8 bytes, and their summed loss in nats."""
    document: int | str  # its number among all documents and rows, from 1
    file: str
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0


def read_documents(source, tokenizer, template, data_dir):
    """
    Yield (number, file name, ids, mask) of each document of a file, folder, URL or - for standard input.
    Rows are written in the template, or with 'none' in the first row's. mask: 1 where a token counts
    toward the loss.
    """
    skipped, number = Counter(), 0
    with tempfile.TemporaryDirectory() as folder:  # Standard input is stored there.
        files = files_of(source, 'auto', data_dir, os.path.join(folder, 'stdin'))
        used = template_of(files, of_model=None if template == 'none' else template)
        for file in files:
            encoded = []
            for piece in documents_in([file], used, None, skipped):
                encoded.append(encode_parts(tokenizer, piece.parts, piece.start))
                if piece.end:
                    ids, mask = map(np.concatenate, zip(*encoded, strict=True))
                    encoded = []
                    number += 1
                    yield number + skipped.total(), file.name, ids, mask
    if skipped:
        print(f'skipped {counted(skipped.total(), "row")} without text or answer, or that the template '
              'cannot write', file=sys.stderr)
    if used:
        print(f'only the answers are scored; template: {used}', file=sys.stderr)


def windows_of(documents, tokenizer, T):
    """
    Yield the windows (Score of its document, x, y, whether it is the last) that cover each document
    with a target. x: up to T ids; y: -1 where a token is no target. A target counts only in its
    first window. Most have T / 2 tokens of context or more.
    """
    first = tokenizer.eot if tokenizer.bos is None else tokenizer.bos
    for number, file, ids, mask in documents:
        if first is not None:  # Without it, nothing predicts the first token.
            ids = np.append(first, ids)
            mask = np.append(0, mask)
        ids = ids.astype(np.int64)
        targets = np.where(mask, ids, -1)[1:]
        scored = targets[targets >= 0]
        if not len(scored):
            continue
        score = Score(number, file, len(scored), int(tokenizer.sizes[scored].sum()))
        start = done = 0
        while done < len(targets):
            y = targets[start:start + T].copy()
            y[:done - start] = -1
            done = start + len(y)
            x = torch.from_numpy(ids[start:done])
            yield score, x, torch.from_numpy(y), done == len(targets)
            start += max(T // 2, 1)


@torch.no_grad()
def score_documents(model, tokenizer, documents, batch_size):
    """Yield the Score of each document with a target, as soon as its last window is computed."""
    T = model.config.block_size
    logits = T * model.config.vocab_size  # of one window
    model.loss_chunks = min(T, math.ceil(logits / MAX_LOGITS))
    batch_size = min(batch_size, max(MAX_LOGITS // logits, 1))
    windows = windows_of(documents, tokenizer, T)
    while batch := list(islice(windows, batch_size)):
        scores, x, y, is_last = zip(*batch, strict=True)
        x = pad_sequence(x, batch_first=True).to(model.cos.device)
        y = pad_sequence(y, batch_first=True, padding_value=-1).to(model.cos.device)
        with sdpa_kernel(WITHOUT_CUDNN):
            losses = model(x, y)[0].tolist()
        for score, last, loss in zip(scores, is_last, losses, strict=True):
            if not math.isfinite(loss):
                raise ValueError(NOT_FINITE.format(f'a loss on {score.file} that is'))
            score.nats += loss
            if last:
                yield score


def print_scores(scores, source, output):
    """Print a row for each Score as it arrives and one for all. Raises ValueError if there are none."""
    total = Score('all', source)
    for score in scores:
        print_score(score, output, is_first=not total.tokens)
        total.tokens += score.tokens
        total.bytes += score.bytes
        total.nats += score.nats
    if not total.tokens:
        raise ValueError(f'{source} contains no tokens to score')
    print_score(total, output)


def print_score(score, output, is_first=False):
    loss = score.nats / score.tokens  # in nats per token
    bpb = score.nats / math.log(2) / max(score.bytes, 1)
    print_row({'document': score.document, 'tokens': score.tokens, 'bytes': score.bytes, 'loss': loss,
               'perplexity': math.exp(min(loss, 700)), 'bpb': bpb, 'file': score.file}, output, is_first)


def print_row(row, output, is_first):
    """Print {column: value} as a line of JSON or of a table, which begins with the names of the columns."""
    if output != 'text':
        print_json(row)
        return
    lines = [row.values()]
    if is_first:
        lines = [row, row.values()]
    for line in lines:
        words = [f'{value:.5g}' if isinstance(value, float) else f'{value}' for value in line]
        print('  '.join(f'{word:>10}' for word in words), flush=True)


def print_json(row):
    """Print a line of JSON, in ASCII unless stdout is UTF-8; numbers that are not finite become null."""
    finite = {}
    for name, value in row.items():
        finite[name] = value
        if isinstance(value, float) and not math.isfinite(value):
            finite[name] = None
    is_utf8 = (sys.stdout.encoding or '').lower() in ('utf-8', 'utf8')
    print(json.dumps(finite, ensure_ascii=not is_utf8), flush=True)
