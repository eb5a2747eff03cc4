"""Splits files into documents, in pieces, because a document may be larger than memory."""

import codecs
import csv
import io
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from hotloop.chat_template import ROW_FIELDS, as_object, form_of, parts_of
from hotloop.files import optional
from hotloop.text_file import open_text

PIECE = 1 << 20  # characters tokenized at a time


@dataclass
class ReadConfig:
    # --- reading
    format: Literal['auto', 'text', 'jsonl', 'json', 'csv', 'parquet', 'tokens'] = 'auto'  # auto: by suffix
    text_field: str | None = None  # field that holds a row's text; None: text, content, or instruction data
    template: Literal['auto', 'plain', 'alpaca', 'chatml', 'gemma', 'llama3'] = 'auto'  # for chats
    separator: str | None = None  # text between documents in a file, such as <|endoftext|>; \n: a newline
    encoding: str = 'utf-8'  # of files, such as latin-1, cp1252 or utf-16
    bad_utf8: Literal['refuse', 'replace'] = 'refuse'  # what to do with bytes that are not UTF-8

    def problems(self):
        """The problems with the settings, one sentence each."""
        problems = []
        try:
            io.TextIOWrapper(io.BytesIO(), codecs.lookup(self.encoding).name)  # a codec of text
        except (LookupError, ValueError):
            problems.append(f'encoding={self.encoding!r} is not a text encoding of Python, such as utf-8, '
                            'latin-1, cp1252 or utf-16')
        if self.template != 'auto' and self.text_field:
            problems.append(f'template={self.template!r} is for instruction data, and text_field='
                            f'{self.text_field!r} selects a single text field; remove one of them')
        return problems


@dataclass
class RowCounts:
    """What documents_in() found: counts of rows and replaced bytes, chat templates, fields of rows."""
    skipped: int = 0  # rows without text or without an answer
    kinds: Counter = field(default_factory=Counter)  # rows of instruction data, by kind
    templates: set = field(default_factory=set)  # of those rows
    fields: dict = field(default_factory=dict)  # {field of the first rows: whether it is used}
    replaced: Counter = field(default_factory=Counter)  # bytes that are not UTF-8, by file


class Piece(NamedTuple):
    """
    A stretch of one document. parts: an array of token ids, or [(text, markup, counts)], tokenized separately
    where `counts` (in the loss) changes. Names of special ids in markup, which a template adds, become ids.
    """
    parts: list | np.ndarray
    start: bool  # of the document
    end: bool
    key: str  # of the document; decides whether it is held out


def documents_in(files, reading, progress=None, counts=None):
    """The pieces of all documents of the files, in order. Fills counts, a RowCounts, if one is given."""
    if files and files[0].kind == 'joined':
        # WikiText: each row is a line of one document, and empty lines have lost their space and newline
        rows = (row for file in files for _, row in rows_in(file, reading, progress))
        yield from pieces_of((row['text'] or ' \n' for row in rows), files[0].name)
        return
    counts = counts or RowCounts()
    separator = (reading.separator or '').replace('\\n', '\n').replace('\\t', '\t')
    for file in files:
        if file.kind == 'tokens':
            yield from token_pieces(file, progress)
        elif file.kind == 'text':
            blocks = text_blocks(file, reading, progress, counts)
            yield from pieces_of(blocks, None if separator else file.name, separator)
        else:
            yield from row_pieces(file, reading, progress, counts)


def pieces_of(blocks, key=None, separator=None):
    """
    The pieces of the documents in blocks of text: a single document, or those between separators, without
    the newlines around them. The default key of a document is its first piece. The pieces can be tokenized
    separately and give the same tokens as the complete document.
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
            if separator and start:
                text = text.lstrip('\r\n')
            cut = safe_cut(text, PIECE)
            head, text = text[:cut], text[cut:]
            name = head if name is None else name
            yield Piece([(head, False, True)], start, False, name)
            start = False


# split points that no tokenizer merges across, best first
SAFE_CUTS = [
    re.compile(r'(?<=\S\n)(?=[^\W\d_])'),  # before a line that begins with a letter
    re.compile(r'(?<=[^\W\d_])(?=\r?\n)'),  # between a letter and a newline
    re.compile(r'(?<=[^\W\d_])(?= )'),  # between a letter and a space
]


def safe_cut(text, size):
    """The last index up to `size` where a cut does not change any token; `size` if there is none nearby."""
    for rule in SAFE_CUTS:
        for near in (1 << 10, 1 << 16):
            cuts = [match.start() for match in rule.finditer(text, max(size - near, 1), size + 1)]
            if cuts:
                return cuts[-1]
    return size


def standard_input():
    """The bytes of standard input as a file. ValueError if it is closed."""
    if sys.stdin is None:
        raise ValueError('standard input is closed; redirect something into it, or name a file')
    return sys.stdin.buffer


def open_file(file, reading, progress, counts=None):
    """open_text() of a file with the encoding and error handling of the settings."""
    def replace(error):
        counts.replaced[file.path] += error.end - error.start
        return '\ufffd', error.end
    errors = 'strict' if reading.bad_utf8 == 'refuse' else 'replace'
    if errors == 'replace' and counts:
        errors = 'hotloop.count'
        codecs.register_error(errors, replace)  # for all readers, but one file is read at a time
    return open_text(file.path, errors, progress, reading.encoding)


def text_blocks(file, reading, progress, counts):
    """A file's text in blocks of about a megabyte."""
    with open_file(file, reading, progress, counts) as f:
        blocks = iter(lambda: f.buffer.read(1 << 20), b'')  # f.read(size) is a third slower
        yield from codecs.iterdecode(blocks, f.encoding, f.errors)


def token_pieces(file, progress):
    """The token ids of a shard of llm.c: 256 int32 (magic number, version, count), then `count` uint16."""
    header = np.fromfile(file.path, '<i4', 256).tolist()
    if header[:2] != [20240520, 1] or os.path.getsize(file.path) != 1024 + 2 * header[2]:
        raise ValueError(f'{file.path} does not have the header and size of a shard of GPT-2 tokens')
    count = header[2]
    tokens = np.memmap(file.path, '<u2', 'r', offset=1024, shape=(count,))
    start, size = 0, min(PIECE, max(count // 256, 1024))
    while start < count:
        ids = np.array(tokens[start:start + size])
        ends = np.flatnonzero(ids == 50256)  # here a document begins with the end-of-text id: cut before one
        if start + len(ids) < count and len(ends) and ends[-1]:
            ids = ids[:ends[-1]]
        if ids.max() > 50256:
            raise ValueError(f"{file.path} has token id {ids.max()}, beyond GPT-2's 50256")
        yield Piece(ids, True, True, file.name)
        start += len(ids)
        if progress:
            progress.add(2 * len(ids))


def row_pieces(file, reading, progress, counts):
    """The pieces of the documents in a file of rows."""
    for number, (where, row) in enumerate(rows_in(file, reading, progress, counts)):
        parts = parts_of(row, where, reading, counts)
        if number < 100:
            row = as_object(row, where)
            used = form_of(row, reading.text_field)[1]
            counts.fields |= {name: name in used or counts.fields.get(name, False) for name in row}
        if parts is None:
            counts.skipped += 1
        elif len(parts) == 1:
            text = parts[0][0]
            yield from pieces_of(text[i:i + PIECE] for i in range(0, len(text), PIECE))
        else:
            yield Piece(parts, True, True, '\0'.join(text for text, *_ in parts))


def rows_in(file, reading, progress, counts=None):
    """(where, row) of each row of a file; a row is a dict, or a str in a JSON file of texts."""
    readers = {'jsonl': jsonl_rows, 'csv': csv_rows, 'json': json_rows}
    if file.kind in readers:
        with open_file(file, reading, progress, counts) as f:
            yield from readers[file.kind](f, file.path)
    else:
        yield from parquet_rows(file, reading, progress)


def parse(text, where):
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{where} is not JSON: {e}; --format=text reads the file as plain text') from None


def jsonl_rows(lines, path):
    """(where, row) of lines of JSON."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f'{path}, line {number}'
            yield where, parse(line, where)


def csv_rows(lines, path):
    """(where, row) of lines of CSV, or of TSV by the name of the file. The first line names the fields."""
    csv.field_size_limit(2**31 - 1)
    delimiter = '\t' if '.tsv' in os.path.basename(path).lower() else ','
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:
                raise csv.Error(f'{len(row[None])} values beyond the header: {str(row[None])[:50]}')
            yield f'{path}, line {reader.line_num}', row
    except csv.Error as e:
        raise ValueError(f'{path}, line {reader.line_num}: {e}') from None


def json_rows(lines, path):
    """(where, row) of a .json file: a list of rows, or an object per line. Anything else is one text."""
    text = ''.join(lines)  # lines.read() would bypass the progress
    if re.match(r'\s*\{.*\}\s*\n\s*\{', text):
        yield from jsonl_rows(text.split('\n'), path)
        return
    rows = parse(text, path) if text.lstrip().startswith('[') else [text]  # such as package.json
    for number, row in enumerate(rows, 1):
        yield f'{path}, element {number}', row


def parquet_rows(file, reading, progress):
    """(where, row) of a parquet file, a few hundred rows in memory at a time. Unread fields are None."""
    pyarrow = optional('pyarrow', 'reads parquet files')
    parquet = optional('pyarrow.parquet', 'reads parquet files')
    wanted = (reading.text_field,) if reading.text_field else ROW_FIELDS
    number, size = 0, os.path.getsize(file.path)
    try:
        with parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            fields = [name for name in names if name in wanted] or None
            for batch in table.iter_batches(256, columns=fields):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{file.path}, row {number}', dict.fromkeys(names) | row
                if progress:
                    progress.add(size * batch.num_rows // table.metadata.num_rows)
    except (OSError, pyarrow.ArrowException) as e:
        raise ValueError(f'{file.path} cannot be read as parquet: {str(e)[:200]}') from None
