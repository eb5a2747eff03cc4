"""Loss and bits per byte of a text."""

import json
import math
import os
import sys
import tempfile
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hotloop.chat_template import TEMPLATES
from hotloop.dataset import show
from hotloop.documents import ReadConfig, byte_blocks, documents_in
from hotloop.generate import NOT_FINITE
from hotloop.sources import check_kinds, files_of
from hotloop.tokenizer import encode_parts


def documents(cfg, template, tokenizer):
    """
    (its file's name, ids, mask of what counts) of each document of what cfg.score names: its files, their parts between
    <|endoftext|>, rows, which are put into the template that was asked for or the one of the model's data.
    """
    template = cfg.template if cfg.template != 'auto' or template not in TEMPLATES else template
    reading = ReadConfig(bad_utf8=cfg.bad_utf8, text_field=cfg.text_field,
                                    template=template)
    with tempfile.TemporaryDirectory() as folder:  # where standard input is put
        files = files_of(cfg.score, reading, cfg.data_dir, os.path.join(folder, 'spool'))
        check_kinds({file.kind for file in files}, cfg, cfg.score)
        for file in files:
            for ids, mask in documents_of(file, tokenizer, reading):
                yield file.name, ids, mask


def documents_of(file, tokenizer, reading):
    """(ids, mask) of each document of a file."""
    if file.kind == 'tokens':
        raise ValueError(f'{file.path} holds ids of a tokenizer, and which one it does not say; score the text itself')
    marked = file.kind == 'text' and holds(file.path, b'<|endoftext|>')
    ids, masks = [], []
    for piece in documents_in([file], replace(reading, separator='<|endoftext|>' if marked else None)):
        new, mask = encode_parts(tokenizer, piece.parts)
        ids.append(np.asarray(new, dtype=np.int64))
        masks.append(np.ones(len(new), dtype=np.uint8) if mask is None else mask)
        if piece.end:
            yield np.concatenate(ids), np.concatenate(masks)
            ids, masks = [], []


def holds(path, mark):
    """Whether these bytes occur in what a file holds, decompressed."""
    end = b''
    for block in byte_blocks(path):
        if mark in end + block:
            return True
        end = (end + block)[1 - len(mark):]
    return False


def windows(ids, mask, T, begin):
    """
    (inputs, targets) of up to T tokens that cover a document; each target counts once, in the first window that has
    it, so that all but the first T see at least half a context. The first token is predicted from `begin`: what begins
    a document, or ends the one before.
    """
    if begin is not None:
        ids, mask = np.append(begin, ids), np.append(np.uint8(0), mask)
    targets, done, start = np.where(mask[1:], ids[1:], -1), 0, 0
    while done < len(targets):
        end = min(start + T, len(targets))
        yield ids[start:end], np.append(np.full(done - start, -1), targets[done:end])
        done, start = end, start + max(T // 2, 1)


@torch.no_grad()
def score(model, tokenizer, template, cfg):
    """Prints tokens, bytes, loss in nats a token, perplexity and bits per byte of each document and of all."""
    c, rows, device = model.config, [], model.cos.device
    begin = tokenizer.eot if tokenizer.begin is None else tokenizer.begin

    def all_windows():
        for name, ids, mask in documents(cfg, template, tokenizer):
            counted = ids[mask > 0] if begin is not None else ids[1:][mask[1:] > 0]
            rows.append({'file': name, 'begins': show(tokenizer, ids[:20].tolist())[:24],
                         'tokens': len(counted), 'bytes': int(tokenizer.sizes[counted].sum()), 'nats': 0.0})
            for x, y in windows(ids, mask, c.block_size, begin):
                yield rows[-1], torch.from_numpy(x), torch.from_numpy(y)
    left = all_windows()
    at_once = min(cfg.batch_size, max(2**26 // (c.block_size * c.vocab_size), 1))  # as many logits as fit into 256 MB
    while batch := list(islice(left, at_once)):
        x = pad_sequence([x for _, x, _ in batch], batch_first=True)
        y = pad_sequence([y for _, _, y in batch], batch_first=True, padding_value=-1)
        for (row, *_), loss in zip(batch, model(x.to(device), y.to(device)).tolist(), strict=True):
            if not math.isfinite(loss):
                raise ValueError(NOT_FINITE.format(f'a loss on {row["file"]} that is'))
            row['nats'] += loss
    if not sum(row['tokens'] for row in rows):
        raise ValueError(f'{cfg.score} holds no token to score')
    total = {key: sum(row[key] for row in rows) for key in ('tokens', 'bytes', 'nats')}
    of_files = len({row['file'] for row in rows}) > 1  # then names tell more than beginnings
    label = 'file' if of_files else 'begins'
    if cfg.output == 'text':
        print(f'{"document":>8}  {label:<24}  {"tokens":>10}  {"bytes":>11}  {"loss":>7}  {"perplexity":>10}  '
              'bits per byte')
    for number, row in [*enumerate(rows, 1), ('all', total)]:
        loss = row['nats'] / row['tokens'] if row['tokens'] else math.nan
        numbers = {'tokens': row['tokens'], 'bytes': row['bytes'], 'loss': loss, 'perplexity': math.exp(min(loss, 700)),
                   'bpb': row['nats'] / math.log(2) / row['bytes'] if row['bytes'] else math.nan}
        if cfg.output == 'jsonl':
            told = {k: v if math.isfinite(v) else None for k, v in numbers.items()}  # JSON knows no NaN
            named = {'file': row['file']} if of_files and number != 'all' else {}
            print(as_json({'document': number, **named, **told}))
        else:
            print(f'{number:>8}  {row.get(label, "")[-24:]:<24}  {row["tokens"]:>10,}  '
                  f'{row["bytes"]:>11,}  {loss:>7.4f}  {numbers["perplexity"]:>10.2f}  {numbers["bpb"]:.4f}')


def as_json(row):
    """A line of JSON; of ASCII where the output takes no other characters, which JSON writes in its own way."""
    return json.dumps(row, ensure_ascii=(sys.stdout.encoding or '').lower() not in ('utf-8', 'utf8'))
