"""Loss and bits per byte of a text: of each document, and of all together."""

import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hotloop.chat_template import TEMPLATES
from hotloop.dataset import show
from hotloop.documents import ReadConfig, documents_in, open_text
from hotloop.generate import NOT_FINITE
from hotloop.sources import check_kinds, files_of
from hotloop.tokenizer import encode_parts

SEPARATOR = '<|endoftext|>'  # between the documents of a text file


@dataclass
class Score:
    """A document's targets: how many they are, their UTF-8 bytes, and their summed loss in nats."""
    file: str
    beginning: str
    tokens: int
    bytes: int
    nats: float = 0.0

    def numbers(self):
        """Counts, loss in nats a token, perplexity, bits per byte; NaN if there is nothing to divide by."""
        loss = self.nats / self.tokens if self.tokens else math.nan
        bpb = self.nats / math.log(2) / self.bytes if self.bytes else math.nan
        return {'tokens': self.tokens, 'bytes': self.bytes, 'loss': loss,
                'perplexity': math.exp(min(loss, 700)), 'bpb': bpb}


def score(model, tokenizer, template, cfg):
    """
    Prints the scores of the documents that cfg.score names, each and all together. template: the one of the
    model's data; cfg.template wins. ValueError if there is nothing to score or a loss is not finite.
    """
    if cfg.template != 'auto' or template not in TEMPLATES:
        template = cfg.template
    reading = ReadConfig(text_field=cfg.text_field, template=template, bad_utf8=cfg.bad_utf8)
    scores = measure(model, tokenizer, documents_of(cfg, tokenizer, reading), cfg.batch_size)
    total = Score('', '', *(sum(getattr(s, name) for s in scores) for name in ('tokens', 'bytes', 'nats')))
    if not total.tokens:
        raise ValueError(f'{cfg.score} holds no token to score')
    by_file = len({s.file for s in scores}) > 1
    if cfg.output == 'text':
        print(f'{"document":>8}  {"file" if by_file else "begins":<24}  {"tokens":>10}  {"bytes":>11}  '
              f'{"loss":>7}  {"perplexity":>10}  bits per byte')
    for number, s in [*enumerate(scores, 1), ('all', total)]:
        row = {'document': number, 'file': s.file, **s.numbers()}
        if cfg.output == 'jsonl':
            if not by_file or number == 'all':
                del row['file']
            for name in ('loss', 'perplexity', 'bpb'):
                row[name] = row[name] if math.isfinite(row[name]) else None  # JSON has no NaN
            print_json(row)
        else:
            label = s.file if by_file else s.beginning
            print(f'{number:>8}  {label[-24:]:<24}  {s.tokens:>10,}  {s.bytes:>11,}  {row["loss"]:>7.4f}  '
                  f'{row["perplexity"]:>10.2f}  {row["bpb"]:.4f}')


def documents_of(cfg, tokenizer, reading):
    """Yields (file name, ids, mask) of each document; mask is 1 where a token counts in the loss."""
    with tempfile.TemporaryDirectory() as folder:  # standard input is stored there
        files = files_of(cfg.score, reading, cfg.data_dir, os.path.join(folder, 'stdin'))
        check_kinds({file.kind for file in files}, cfg, cfg.score)
        for file in files:
            if file.kind == 'tokens':
                raise ValueError(f'{file.path} holds the ids of an unknown tokenizer; score the text itself')
            separator = SEPARATOR if file.kind == 'text' and has_separator(file.path) else None
            ids, masks = [], []
            for piece in documents_in([file], replace(reading, separator=separator)):
                new, mask = encode_parts(tokenizer, piece.parts, piece.start)
                ids.append(np.asarray(new, dtype=np.int64))
                masks.append(np.ones(len(new), dtype=np.uint8) if mask is None else mask)
                if piece.end:
                    yield file.name, np.concatenate(ids), np.concatenate(masks)
                    ids, masks = [], []


def has_separator(path):
    """Whether a text file has several documents. Line ends around a separator are dropped, others kept."""
    with open_text(path, errors='replace') as f:
        return any(SEPARATOR in line for line in f)


@torch.no_grad()
def measure(model, tokenizer, documents, batch_size):
    """The Score of each document, (file name, ids, mask)."""
    c, scores = model.config, []
    begin = tokenizer.eot if tokenizer.begin is None else tokenizer.begin

    def all_windows():
        for name, ids, mask in documents:
            beginning = show(tokenizer, ids[:20].tolist())[:24]
            if begin is not None:  # without it, nothing predicts the first token
                ids, mask = np.append(begin, ids), np.append(np.uint8(0), mask)
            targets = ids[1:][mask[1:] > 0]
            scores.append(Score(name, beginning, len(targets), int(tokenizer.sizes[targets].sum())))
            for x, y in windows(ids, mask, c.block_size):
                yield scores[-1], torch.from_numpy(x), torch.from_numpy(y)

    remaining = all_windows()
    most = max(2**26 // (c.block_size * c.vocab_size), 1)  # their logits take 256 MB
    while batch := list(islice(remaining, min(batch_size, most))):
        x = pad_sequence([x for _, x, _ in batch], batch_first=True)
        y = pad_sequence([y for _, _, y in batch], batch_first=True, padding_value=-1)
        losses = model(x.to(model.cos.device), y.to(model.cos.device)).tolist()
        for (s, _, _), loss in zip(batch, losses, strict=True):
            if not math.isfinite(loss):
                raise ValueError(NOT_FINITE.format(f'a loss on {s.file} that is'))
            s.nats += loss
    return scores


def windows(ids, mask, T):
    """
    Yields (inputs, targets) of up to T tokens that cover a document. Each target counts once, in the first
    window that has it, so after the first T all targets see at least half a context.
    """
    targets = np.where(mask[1:], ids[1:], -1)
    done, start = 0, 0
    while done < len(targets):
        end = min(start + T, len(targets))
        yield ids[start:end], np.append(np.full(done - start, -1), targets[done:end])
        done, start = end, start + max(T // 2, 1)


def print_json(row):
    """Prints a line of JSON, in ASCII unless stdout is UTF-8."""
    is_utf8 = (sys.stdout.encoding or '').lower() in ('utf-8', 'utf8')
    print(json.dumps(row, ensure_ascii=not is_utf8), flush=True)
