"""Files -> documents, in pieces: a document may be larger than memory."""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import os
import re
import sys
import zlib
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from hotloop.chat_template import ROW_FIELDS, parts_of
from hotloop.files import optional


@dataclass
class ReadConfig:
    # --- reading
    format: Literal['auto', 'text', 'jsonl', 'json', 'csv', 'parquet', 'tokens'] = 'auto'  # auto: by their names
    text_field: str | None = None  # of a row; None: text or content, or what instruction data is made of
    template: Literal['auto', 'plain', 'alpaca', 'chatml', 'gemma', 'llama3'] = 'auto'  # of chats; auto: by row
    separator: str | None = None  # text between the documents of a file, such as <|endoftext|>; \n is a line end
    bad_utf8: Literal['refuse', 'replace'] = 'refuse'  # what to do with bytes that are not UTF-8

    def problems(self):
        """What is wrong with the settings, a sentence each."""
        wrong = []
        if self.separator == '':
            wrong.append('separator is empty; leave it out, or name the text between documents')
        if self.template != 'auto' and self.text_field:
            wrong.append(f'template={self.template!r} is for instruction data, and text_field={self.text_field!r} asks '
                         'for one text of a row; leave out one of them')
        return wrong


PIECE = 1 << 20  # characters that are tokenized at a time


class Piece(NamedTuple):
    """
    A stretch of one document. parts: [(text, markup, counts)] that are tokenized apart where `counts` (in the loss)
    changes; in markup, which is a template's, the names of special ids stand for them. Or an array of token ids.
    """
    parts: list | np.ndarray
    start: bool  # of the document
    end: bool
    key: str  # of the document: decides whether it is held out


def documents_in(files, cfg, progress=None):
    """The pieces of all documents of the files, in order."""
    if files and files[0].kind == 'joined':
        # the rows of WikiText are the lines of one document, of which the empty ones have lost their blank
        rows = (row for file in files for _, row in rows_in(file, cfg, progress))
        yield from pieces_of((row['text'] or ' \n' for row in rows), files[0].name)
        return
    for file in files:
        if file.kind == 'tokens':
            yield from token_pieces(file, progress)
        elif file.kind == 'text':
            separator = cfg.separator and cfg.separator.replace('\\n', '\n').replace('\\t', '\t')
            yield from pieces_of(text_blocks(file, cfg, progress), None if separator else file.name, separator)
        else:
            yield from row_pieces(file, cfg, progress)


def pieces_of(blocks, key=None, separator=None):
    """
    The documents in blocks of text, as pieces: one, or those between separators, less the line ends around them. The
    key is the one given, or the first piece of the text. Tokenizing the pieces gives the tokens of the whole.
    """
    text, start, name = '', True, key
    for block in chain(blocks, [None]):
        text += block or ''
        documents = text.split(separator) if separator else [text]
        text = '' if block is None else documents.pop()
        for document in documents:
            if separator:
                document = document.strip('\r\n') if start else document.rstrip('\r\n')
            if document or not start:
                yield Piece([(document, False, True)], start, True, document if name is None else name)
            start, name = True, key
        while len(text) > 2 * PIECE:
            text = text.lstrip('\r\n') if separator and start else text
            at = safe_cut(text, PIECE)
            head, text = text[:at], text[at:]
            name = head if name is None else name
            yield Piece([(head, False, True)], start, False, name)
            start = False


# no split rule of these tokenizers has a word across: the start of a line that begins with a letter, after a line that
# ends without a blank; a line end after a letter; a space after a letter
SAFE_CUTS = [re.compile(rule) for rule in (r'(?<=\S\n)(?=[^\W\d_])', r'(?<=[^\W\d_])(?=\r?\n)', r'(?<=[^\W\d_])(?= )')]


def safe_cut(text, size):
    """The last place up to `size` where cutting the text changes no token; `size` itself where none is near."""
    for rule in SAFE_CUTS:
        for near in (1 << 10, 1 << 16):
            places = [match.start() for match in rule.finditer(text, max(size - near, 1), size + 1)]
            if places:
                return places[-1]
    return size


def text_blocks(file, cfg, progress=None):
    """A file's text in blocks, decompressed, line ends as they are, less a byte-order mark."""
    decoder, at = codecs.getincrementaldecoder('utf-8')('replace' if cfg.bad_utf8 == 'replace' else 'strict'), 0
    for block in chain(byte_blocks(file.path, progress), [b'']):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:
            place = at - len(decoder.getstate()[0]) + e.start
            kind = ' (UTF-16?)' if place == 0 and e.object[:2] in (b'\xff\xfe', b'\xfe\xff') else ''
            raise ValueError(f'{file.path} is not UTF-8 text{kind}: byte {e.object[e.start]:#04x} at {place}; convert '
                             'it, or read on with --bad_utf8=replace') from None
        yield text.removeprefix('\ufeff') if at == 0 else text
        at += len(block)


def standard_input():
    """Its bytes; ValueError where it is closed."""
    if sys.stdin is None:
        raise ValueError('standard input is closed; give it something to read, or name a file')
    return sys.stdin.buffer


def byte_blocks(path, progress=None):
    """A file's bytes in blocks of a megabyte, decompressed as its name says; progress is told of bytes on the disk."""
    suffix, seen = os.path.splitext(path)[1].lower(), 0
    try:
        with open(path, 'rb') as raw:
            f = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open, '.lzma': lzma.open}.get(suffix, lambda f: f)(raw)
            for block in zstandard_blocks(raw) if suffix == '.zst' else iter(lambda: f.read(1 << 20), b''):
                yield block
                if progress:
                    progress.add(raw.tell() - seen)
                    seen = raw.tell()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f'{path} is damaged: {e}') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None


def zstandard_blocks(raw):
    """What a .zst file holds, frame by frame; the package's own reader takes a file that was cut for a whole one."""
    zstandard = optional('zstandard', 'reads .zst files')
    try:
        frame, data = None, raw.read(1 << 14)
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if block := frame.decompress(data):
                yield block
            data = frame.unused_data or raw.read(1 << 14)
            frame = None if frame.eof else frame
    except zstandard.ZstdError as e:
        raise EOFError(e) from None
    if frame:
        raise EOFError('it ends in the middle')


def token_pieces(file, progress=None):
    """The token ids of one of llm.c's shards: 256 int32 (magic, version, count), then that many uint16."""
    size = os.path.getsize(file.path)
    try:
        header = np.fromfile(file.path, dtype='<i4', count=256)
    except OSError as e:
        raise ValueError(f'{file.path} cannot be read: {e.strerror or e}') from None
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
        raise ValueError(f'{file.path} is no shard of GPT-2 tokens: its header does not begin with 20240520 and 1')
    if size != 1024 + 2 * int(header[2]):
        raise ValueError(f'{file.path} has {size:,} bytes, not those of the {header[2]:,} tokens that it tells of; '
                         'fetch it again')
    tokens = np.memmap(file.path, dtype='<u2', mode='r', offset=1024, shape=(int(header[2]),))
    at, size = 0, min(PIECE, max(len(tokens) // 256, 1024))
    while at < len(tokens):
        block = np.array(tokens[at:at + size])
        if at + len(block) < len(tokens):  # a document begins with its end-of-text id here; cut where one does
            ends = np.flatnonzero(block == 50256)
            block = block[:ends[-1]] if len(ends) and ends[-1] else block
        if block.max() > 50256:
            raise ValueError(f"{file.path} has token id {block.max()}, beyond GPT-2's 50256")
        yield Piece(block, True, True, file.name)
        at += len(block)
        if progress:
            progress.add(2 * len(block))


def row_pieces(file, cfg, progress=None):
    """The documents of a file of rows."""
    for place, row in rows_in(file, cfg, progress):
        parts = parts_of(row, place, cfg, progress and progress.templates)
        if parts is None:
            if progress:
                progress.skipped += 1
        elif len(parts) == 1:
            text = parts[0][0]
            yield from pieces_of(text[i:i + PIECE] for i in range(0, len(text), PIECE))
        else:
            yield Piece(parts, True, True, '\0'.join(text for text, *_ in parts))


def rows_in(file, cfg, progress=None):
    """(place, row) of each row; a row is a dict, or a str in a JSON file of texts."""
    if file.kind in ('parquet', 'joined'):
        yield from parquet_rows(file, cfg, progress)
    elif file.kind == 'csv':
        csv.field_size_limit(2**31 - 1)
        delimiter = '\t' if '.tsv' in os.path.basename(file.path).lower() else ','
        reader = csv.DictReader(lines_of(text_blocks(file, cfg, progress)), delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise csv.Error(f'{len(row[None])} values more than the head has fields: {str(row[None])[:50]}')
                yield f'{file.path}, line {reader.line_num}', row
        except csv.Error as e:
            raise ValueError(f'{file.path}, line {reader.line_num}: {e}') from None
    elif file.kind == 'json':
        yield from json_elements(file, cfg, progress)
    else:
        for number, line in enumerate(lines_of(text_blocks(file, cfg, progress)), 1):
            if line.strip():
                try:
                    yield f'{file.path}, line {number}', json.loads(line)
                except (ValueError, RecursionError) as e:
                    raise ValueError(f'{file.path}, line {number} is not JSON: {e}') from None


def lines_of(blocks):
    """Lines with their line feed, from blocks."""
    held = []
    for block in blocks:
        *ended, rest = block.split('\n')
        if ended:
            yield ''.join(held) + ended[0] + '\n'
            yield from (line + '\n' for line in ended[1:])
            held = []
        held.append(rest)
    if last := ''.join(held):
        yield last


def json_elements(file, cfg, progress=None):
    """(place, element) of a JSON list, read element by element."""
    decoder, text, at, number = json.JSONDecoder(), '', 0, 0
    blocks = text_blocks(file, cfg, progress)
    while True:
        at = re.compile(r'\s*[,\[]?\s*' if number == 0 else r'\s*,?\s*').match(text, at).end()
        if text[at:at + 1] == ']':
            if text[at + 1:].strip() or any(block.strip() for block in blocks):
                raise ValueError(f'{file.path} goes on behind the end of its list, after element {number}')
            return
        try:
            element, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as e:
            block = next(blocks, None)
            if block is None or len(text) - at > 2**28:
                raise ValueError(f'{file.path} is not a JSON list: element {number + 1}: {e}') from None
            text, at = text[at:] + block, 0
            continue
        number += 1
        yield f'{file.path}, element {number}', element


def parquet_rows(file, cfg, progress=None):
    """(place, row) of a parquet file, a few hundred rows in memory at a time."""
    parquet = optional('pyarrow.parquet', 'reads parquet files')
    number, size = 0, os.path.getsize(file.path)
    try:
        with parquet.ParquetFile(file.path) as table:
            known = (cfg.text_field,) if cfg.text_field else ROW_FIELDS
            wanted = [name for name in table.schema_arrow.names if name in known] or None
            for batch in table.iter_batches(256, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{file.path}, row {number}', row
                if progress:
                    progress.add(size * batch.num_rows // max(table.metadata.num_rows, 1))
    except (OSError, optional('pyarrow', '').ArrowException) as e:
        raise ValueError(f'{file.path} is not a parquet file that can be read: {str(e)[:200]}') from None
