"""Splits files into documents, in pieces, because a document may be larger than memory."""

import codecs
import io
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from hotloop.data.chat import TEMPLATES, as_object, form_of, parts_of
from hotloop.data.rows import rows_in
from hotloop.data.text_file import open_file
from hotloop.system.files import counted

PIECE = 1 << 20  # characters tokenized at a time
Format = Literal['auto', 'text', 'jsonl', 'json', 'csv', 'parquet', 'tokens', 'functions']


@dataclass
class ReadConfig:
    # --- reading
    format: Format = 'auto'  # auto: by suffix; functions: Python functions as rows
    text_field: str | None = None  # field that holds a row's text; None: text, content, or instruction data
    template: Literal[('auto', *(t for t in TEMPLATES if t != 'joined'))] = 'auto'  # of instruction data
    max_function: int | None = None  # for functions: leave out those with more characters than this
    separator: str | None = None  # text between documents in a file, such as <|endoftext|>; \n: a newline
    encoding: str = 'utf-8'  # of files, such as latin-1, cp1252 or utf-16
    bad_utf8: Literal['refuse', 'replace'] = 'refuse'  # what to do with bytes invalid in this encoding

    def problems(self):
        """The problems with the settings, one sentence each."""
        problems = []
        try:
            io.TextIOWrapper(io.BytesIO(), codecs.lookup(self.encoding).name)  # a codec of text
        except (LookupError, ValueError):
            problems.append(f'encoding={self.encoding!r} is not a text encoding of Python, such as utf-8, '
                            'latin-1, cp1252 or utf-16')
        if self.max_function is not None and (self.max_function < 1 or self.format != 'functions'):
            problems.append(f'max_function={self.max_function} must be at least 1, and applies only with '
                            '--format=functions')
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
    unseparated: int = 0  # rows without white space between prompt and completion, in the joined template
    fields: dict = field(default_factory=dict)  # {field of the first rows: whether it is used}
    replaced: Counter = field(default_factory=Counter)  # bytes that could not be decoded, by file
    long_functions: int = 0  # longer than max_function
    not_python: list = field(default_factory=list)  # files, as the reason why each was skipped

    def left_out(self):
        """Yields a sentence for each kind of content that is not in the documents."""
        if self.skipped:
            yield f'skipped {counted(self.skipped, "row")} without text or without an answer'
        if self.long_functions:
            yield f'left out {counted(self.long_functions, "function")} longer than max_function'
        if self.not_python:
            more = ', ...' if len(self.not_python) > 3 else ''
            yield (f'skipped {counted(len(self.not_python), "file")} that this Python cannot parse: '
                   f'{"; ".join(self.not_python[:3])}{more}')
        if self.replaced:
            yield (f'replaced {counted(self.replaced.total(), "byte")} in '
                   f'{counted(len(self.replaced), "file")} that could not be decoded')


class Piece(NamedTuple):
    """
    A stretch of one document. parts: an array of token ids, or [(text, markup, counts)], tokenized separately
    where `counts` (in the loss) changes. Names of special ids in markup, which a template adds, become ids.
    """
    parts: list | np.ndarray
    start: bool  # of the document
    end: bool  # hotloop/data/encode.py then appends the end-of-text id
    key: str  # of the document; decides whether it is held out
    row: dict | None = None  # of instruction data


def documents_in(files, reading, progress=None, counts=None):
    """The pieces of all documents of the files, in order. Fills counts, a RowCounts, if one is given."""
    counts = counts or RowCounts()
    if files and files[0].kind == 'joined':
        # WikiText: each row is a line of one document, and empty lines have lost their space and newline
        rows = (row for file in files for _, row in rows_in(file, reading, progress, counts))
        yield from pieces_of((row['text'] or ' \n' for row in rows), files[0].name)
        return
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
    ends = re.compile(re.escape(separator or '').replace('\\\n', '\r?\n'))  # also where lines end with \r\n
    for block in chain(blocks, [None]):
        text += block or ''
        documents = ends.split(text) if separator else [text]
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


def text_blocks(file, reading, progress=None, counts=None):
    """A file's text in blocks of about a megabyte."""
    with open_file(file, reading, progress, counts or RowCounts()) as f:
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
    # functions of one file resemble each other: all of them are held out, or none
    key = file.name if file.kind == 'functions' else None
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
            yield from pieces_of((text[i:i + PIECE] for i in range(0, len(text), PIECE)), key)
        else:
            yield Piece(parts, True, True, key or '\0'.join(text for text, *_ in parts), row)
