"""Loss and bits per byte of a text: of each document, and of all together."""

import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hotloop.data.chat import TEMPLATES
from hotloop.data.documents import ReadConfig, RowCounts, documents_in, open_text, template_of
from hotloop.data.sources import check_kinds, files_of
from hotloop.data.tokenizer import encode_parts
from hotloop.inference.generate import NOT_FINITE
from hotloop.system.files import Progress

LOGITS = 2**26  # that are computed at once: 256 MB
SEPARATOR = '<|endoftext|>'  # between the documents of a text file


@dataclass
class Score:
    """A document's targets: their number, their UTF-8 bytes, and their summed loss in nats."""
    file: str
    tokens: int
    bytes: int
    nats: float = 0.0


def score(model, tokenizer, template, cfg):
    """
    Prints the scores of the documents that cfg.score names, each and all together. template: that of rows;
    'none': what suits each. ValueError if there is nothing to score or a loss is not finite.
    """
    template = template if template in TEMPLATES else None
    reading = ReadConfig(cfg.format, cfg.text_field)
    with tempfile.TemporaryDirectory() as folder:  # standard input is stored there
        files = files_of(cfg.score, reading, cfg.data_dir, os.path.join(folder, 'stdin'))
        check_kinds({file.kind for file in files}, cfg, cfg.score)
        reading = replace(reading, template=template_of(files, reading, template))
        counts, progress = RowCounts(), Progress(sum(os.path.getsize(file.path) for file in files))
        documents = documents_of(files, tokenizer, reading, counts)
        scores = measure(model, tokenizer, documents, cfg.batch_size, progress)
        progress.close()
    total = Score(cfg.score, sum(s.tokens for s in scores), sum(s.bytes for s in scores),
                  sum(s.nats for s in scores))
    for sentence in counts.left_out():
        print(sentence, file=sys.stderr)
    if not scores:
        raise ValueError(f'{cfg.score} contains no tokens to score')
    if reading.template:
        print(f'only the answers are scored; template: {reading.template}', file=sys.stderr)
    if cfg.output == 'text':
        print(f'document  {"file":<24}      tokens        bytes     loss  perplexity  bits per byte')
    for number, s in [*enumerate(scores, 1), ('all', total)]:
        loss = s.nats / s.tokens  # in nats a token
        row = {'document': number, 'file': s.file, 'tokens': s.tokens, 'bytes': s.bytes, 'loss': loss,
               'perplexity': math.exp(min(loss, 700)), 'bpb': s.nats / math.log(2) / max(s.bytes, 1)}
        if cfg.output == 'text':
            row['file'] = s.file[-24:]
            print('{:>8}  {:<24}  {:>10,}  {:>11,}  {:>7.4f}  {:>10.2f}  {:.4f}'.format(*row.values()))
        else:
            print_json(row)


def documents_of(files, tokenizer, reading, counts):
    """
    Yields (file name, ids, mask, bytes read) of each document; mask is 1 where a token counts toward the
    loss. The bytes are those read from the disk since the last document. Fills counts, a RowCounts.
    """
    for file in files:
        separator = None  # with one, line ends around documents are dropped
        if file.kind == 'text':
            with open_text(file.path, errors='replace') as f:
                separator = SEPARATOR if any(SEPARATOR in line for line in f) else None
        parts, read = [], []  # read: numbers of bytes
        counter = SimpleNamespace(add=read.append)
        for piece in documents_in([file], replace(reading, separator=separator), counter, counts):
            parts += piece.parts
            if piece.end:
                ids, mask = encode_parts(tokenizer, parts)
                yield file.name, ids, np.ones(len(ids), np.uint8) if mask is None else mask, sum(read)
                parts, read[:] = [], []


def windows_of(documents, tokenizer, T, scores):
    """
    Appends the Score of each document and yields (Score, inputs, targets, its share of the bytes read) of
    windows of up to T tokens that cover it. A target counts only in its first window; most have T / 2 tokens
    of context or more.
    """
    begin = tokenizer.eot if tokenizer.begin is None else tokenizer.begin
    for name, ids, mask, num_bytes in documents:
        if begin is not None:  # without it, nothing predicts the first token
            ids, mask = np.append(begin, ids), np.append(0, mask)
        ids = ids.astype(np.int64)
        targets = np.where(mask, ids, -1)[1:]
        counted = targets[targets >= 0]
        if not len(counted):
            continue
        scores.append(Score(name, len(counted), int(tokenizer.sizes[counted].sum())))
        done, start = 0, 0
        while done < len(targets):
            y = targets[start:start + T].copy()
            y[:done - start] = -1
            share = num_bytes * (start + len(y) - done) / len(targets)
            yield scores[-1], torch.from_numpy(ids[start:start + len(y)]), torch.from_numpy(y), share
            done, start = start + len(y), start + max(T // 2, 1)


@torch.no_grad()
def measure(model, tokenizer, documents, batch_size, progress):
    """The Score of each document of documents_of(). progress gets the bytes of what is computed."""
    T, device, scores = model.config.block_size, model.cos.device, []
    windows = windows_of(documents, tokenizer, T, scores)
    window = T * model.config.vocab_size  # its logits
    most = max(LOGITS // window, 1)
    model.loss_chunks = min(T, -(-window // LOGITS))
    while batch := list(islice(windows, min(batch_size, most))):
        x = pad_sequence([x for _, x, _, _ in batch], batch_first=True)
        y = pad_sequence([y for _, _, y, _ in batch], batch_first=True, padding_value=-1)
        for (s, _, _, share), loss in zip(batch, model(x.to(device), y.to(device)).tolist(), strict=True):
            if not math.isfinite(loss):
                raise ValueError(NOT_FINITE.format(f'a loss on {s.file} that is'))
            s.nats += loss
            progress.add(share)
    return scores


def print_json(row):
    """Prints a line of JSON, in ASCII unless stdout is UTF-8."""
    is_utf8 = (sys.stdout.encoding or '').lower() in ('utf-8', 'utf8')
    print(json.dumps(row, ensure_ascii=not is_utf8), flush=True)
