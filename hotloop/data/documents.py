"""Read files of any kind as documents, and choose those that are held out for validation."""

import ast
import bz2
import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import lzma
import os
import re
import sys
import textwrap
import warnings
import zlib
from collections import Counter
from typing import NamedTuple

from hotloop.data.chat import (
    ROW_FIELDS,
    TASK_FIELDS,
    UnknownRole,
    choose_template,
    parts_of,
    read_row,
    standard_row,
)
from hotloop.system.files import json_lines, optional, parse_json

PIECE = 1 << 20  # characters tokenized at a time
MANY = 100_000  # documents; more are held out by probability, not up to an exact size
SEPARATOR = '<|endoftext|>'
# how a list of objects or texts begins, or an object on each line: no single one has }, a line break and {
ROWS = re.compile(r'\s*(\[\s*["{]|\{.*\}\s*\n\s*\{)', re.DOTALL)
AS_TEXT = '; --format=text of prepare.py reads the file as plain text'


class Piece(NamedTuple):
    """
    A stretch of one document. parts: [(text, markup, counts)], tokenized separately where `counts`
    (in the loss) changes. Names of special ids in markup, which a template adds, become ids.
    """
    parts: list
    start: bool  # of the document
    end: bool  # of the document; encode.py then appends the end-of-text id
    key: str  # of the document; decides whether it is held out
    row: dict | None = None  # of instruction data


# -----------------------------------------------------------------------------
# text files

@contextlib.contextmanager
def open_zstd(path, mode, **options):
    """Open a .zst file, also one of zstd --long=31, as a text."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        zstd = optional('backports.zstd', 'reads .zst files', 'backports.zstd')
    try:
        with zstd.open(path, mode, options={zstd.DecompressionParameter.window_log_max: 31}, **options) as f:
            yield f
    except zstd.ZstdError as e:
        raise EOFError(e) from None


OPENERS = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open, '.lzma': lzma.open, '.zst': open_zstd}


@contextlib.contextmanager
def open_text(path):
    """Open UTF-8 text: decompress by suffix, drop a byte-order mark, keep line ends."""
    opener = OPENERS.get(os.path.splitext(path)[1].lower(), open)
    try:
        with opener(path, 'rt', encoding='utf-8-sig', newline='\n') as f:
            yield f
    except UnicodeDecodeError as e:
        raise ValueError(f'{path} is not UTF-8 text: {e.reason} {e.object[e.start]:#x}; convert it with '
                         'iconv -f utf-16 (or latin1) -t utf-8, or drop damaged bytes with iconv -c -f utf-8 '
                         '-t utf-8') from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:
        raise ValueError(f'{path} cannot be read: {e}') from None


def text_blocks(path):
    """Yield the text of a file in blocks of about a megabyte."""
    with open_text(path) as f:
        while block := f.read(1 << 20):
            yield block


# -----------------------------------------------------------------------------
# documents

def documents_in(files, template=None, text_field=None, skipped=None):
    """
    Yield the Pieces of all documents of the files. template: that of rows, None if they are texts.
    text_field: as in standard_row(). skipped: a Counter of the reasons why rows have no document.
    """
    if files and files[0].kind == 'joined':
        yield from pieces_of(joined_blocks(files), files[0].name)
        return
    if skipped is None:
        skipped = Counter()
    for file in files:
        if file.kind == 'text':
            yield from pieces_of(text_blocks(file.path), file.name)
        elif file.kind == 'texts':
            for text in separated_texts(file.path):
                yield from pieces_of([text])
        else:
            yield from row_pieces(file, template, text_field, skipped)


def joined_blocks(files):
    """Yield the text of WikiText: rows are lines; empty ones have lost their space and newline."""
    for file in files:
        for _, row in parquet_rows(file.path):
            yield row['text'] or ' \n'


def separated_texts(path):
    """Yield the texts between separators, without the newlines around them."""
    parts = []  # of a text
    with open_text(path) as f:
        while block := f.read(1 << 20) + f.readline():  # complete lines, so it cuts no separator
            first, *others = block.split(SEPARATOR)
            parts.append(first)
            for other in others:
                yield ''.join(parts).strip('\r\n')
                parts = [other]
    yield ''.join(parts).strip('\r\n')


def row_pieces(file, template, text_field, skipped):
    """Yield the Pieces of the documents in a file of rows."""
    key = None
    if file.kind == 'functions':
        key = file.name  # Functions of a file resemble each other: all are held out, or none.
    for where, given in rows_in(file, text_field):
        row = standard_row(given, where, text_field)
        try:
            parts = parts_of(row, where, template)
        except UnknownRole as e:
            skipped[str(e).removeprefix(f'{where}: ')] += 1
            continue
        if parts is None:
            skipped['no text or answer, or none that the template can write'] += 1
        elif template is None:
            yield from pieces_of([parts[0][0]], key)
        else:
            # as given, so that every template holds out the same rows
            texts = '\0'.join(text for _, text in read_row(row, where)[1])
            if 'test_list' in given:  # sample.py --eval_code knows MBPP's names
                row = given
            yield Piece(parts, True, True, key or texts, row)


def pieces_of(blocks, key=None):
    """Yield the Pieces of one document in blocks of text. The default key is the first piece."""
    text = ''
    start = True
    for block in blocks:
        text += block
        while len(text) > 2 * PIECE:
            cut = safe_cut(text, PIECE)
            key = key or text[:cut]
            yield Piece([(text[:cut], False, True)], start, False, key)
            text = text[cut:]
            start = False
    if text:
        yield Piece([(text, False, True)], start, True, key or text)


# split points that no tokenizer merges across, best first
SAFE_CUTS = [
    re.compile(r'(?<=\S\n)(?=[^\W\d_])'),  # before a line that begins with a letter
    re.compile(r'(?<=[^\W\d_])(?=\r?\n)'),  # between a letter and a newline
    re.compile(r'(?<=[^\W\d_])(?= )'),  # between a letter and a space
]


def safe_cut(text, size):
    """Return the last index up to `size` where a cut changes no token, or `size` if none is near."""
    for rule in SAFE_CUTS:
        cuts = [match.start() for match in rule.finditer(text, max(size - 65_536, 1), size + 1)]
        if cuts:
            return cuts[-1]
    return size


# -----------------------------------------------------------------------------
# rows

def rows_in(file, text_field=None):
    """Yield (where, row) of each row of a file. A row is a dict, or a str in a JSON list."""
    if file.kind == 'parquet':
        yield from parquet_rows(file.path, text_field)
        return
    with open_text(file.path) as lines:
        if file.kind == 'json':
            text = lines.read()
            if text.lstrip().startswith('['):
                for number, row in enumerate(parse_json(text, file.path, AS_TEXT), 1):
                    yield f'{file.path}, element {number}', row
                return
            lines = text.split('\n')
            if re.match(r'\s*\{\s*\n', text):  # one object, indented
                lines = [text]
        if file.kind in ('json', 'jsonl'):
            yield from json_lines(lines, file.path, AS_TEXT)
        elif file.kind == 'csv':
            yield from csv_rows(lines, file.path)
        else:
            for row in functions_of(lines.read(), file.path):
                yield file.path, row


def csv_rows(lines, path):
    """
    Yield (where, row) of lines of CSV, or TSV by the file's name. A header names fields; one with
    semicolons and no comma is that of a European spreadsheet.
    """
    header = next(lines, '')
    unquoted = re.sub('"[^"]*"', '', header)
    delimiter = ','
    if '.tsv' in os.path.basename(path).lower():
        delimiter = '\t'
    elif ';' in unquoted and ',' not in unquoted:
        delimiter = ';'
    csv.field_size_limit(2**31 - 1)  # a field may hold a book
    reader = csv.DictReader(itertools.chain([header], lines), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:
                raise csv.Error(f'{len(row[None])} values beyond the header')
            yield f'{path}, line {reader.line_num}', row
    except csv.Error as e:
        raise ValueError(f'{path}, line {reader.reader.line_num}: {e}{AS_TEXT}') from None


def functions_of(source, path):
    """
    Yield {'prompt': signature and docstring, 'completion': body} of each function with a docstring
    and more code, dedented and without decorators.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # about strings such as '\d'
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        print(f'{path} is left out, because it is not Python: {e}', file=sys.stderr)
        return
    # These are the lines that Python counts; splitlines() also splits at form feeds.
    lines = list(io.StringIO(source, newline=None))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not ast.get_docstring(node):
            continue
        first = node.lineno - 1
        docstring_end = node.body[0].end_lineno
        if len(node.body) == 1 or node.body[1].lineno <= docstring_end:
            continue
        text = textwrap.dedent(''.join(lines[first:node.end_lineno]))
        if text.startswith(('def ', 'async def ')):  # no string kept dedent from it
            # Tokenizers join the newline between them with the indentation, so it is the body's.
            prompt = ''.join(list(io.StringIO(text))[:docstring_end - first]).rstrip('\n')
            yield {'prompt': prompt, 'completion': text[len(prompt):]}


def parquet_rows(path, text_field=None):
    """Yield (where, row) of a parquet file, 256 rows at a time. Fields not needed are None."""
    parquet = optional('pyarrow.parquet', 'reads parquet files')
    wanted = ROW_FIELDS
    if text_field:
        wanted = text_field.split(',')
    wanted = {*wanted, *TASK_FIELDS}
    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            for batch in table.iter_batches(256, columns=[name for name in names if name in wanted]):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{path}, row {number}', dict.fromkeys(names) | row
    except (OSError, ValueError) as e:  # a text may not be UTF-8
        raise ValueError(f'{path} cannot be read as parquet: {str(e)[:200]}') from None


def template_of(files, asked='auto', text_field=None, of_model=None):
    """
    Choose the template of all rows: that of the settings, or of the model, or what suits the first
    row. Returns None for texts. Raises ValueError if settings of rows are given without rows.
    """
    for file in files:
        if file.kind in ('text', 'texts', 'joined'):
            continue
        for where, row in rows_in(file, text_field):
            try:
                suited, _ = read_row(standard_row(row, where, text_field), where)
            except UnknownRole:
                continue
            if asked == 'auto' and suited and of_model and file.kind != 'functions':
                return of_model  # Functions are continued.
            return choose_template(asked, suited)
    if asked != 'auto' or text_field:
        raise ValueError(f'template={asked!r} and text_field={text_field!r} apply to rows, and '
                         f'{files[0].path} has none')
    return None


# -----------------------------------------------------------------------------
# validation

def holdout_hash(key, seed):
    """Hash a document's key and the seed to a number in [0, 1). The lowest are held out."""
    digest = hashlib.sha256(f'{seed} {key}'.encode('utf-8', 'surrogateescape')).digest()
    return int.from_bytes(digest[:8]) / 2**64


def hold_out(sizes, fraction):
    """
    Choose hashes from {hash: bytes}: the lowest, up to the fraction of bytes, but not all. One above
    twice the fraction, or half of all bytes, stays in training, and the fraction is that of the
    others. If all are so large, the smallest is held out.
    """
    largest = min(2 * fraction, 1 / 2) * sum(sizes.values())
    candidates = sorted(key for key in sizes if sizes[key] <= largest)
    wanted = fraction * sum(sizes[key] for key in candidates)
    if not candidates:
        candidates = sorted(sizes, key=lambda key: (sizes[key], key))[:1]
    held_out = set()
    held_bytes = 0
    for key in candidates[:len(sizes) - 1]:
        if held_out and held_bytes >= wanted:
            break
        held_out.add(key)
        held_bytes += sizes[key]
    return held_out


def is_document(files):
    """Test whether the files are one document."""
    return files[0].kind == 'joined' or (len(files) == 1 and files[0].kind == 'text')


def plan_holdout(files, val_files, fraction, seed, read):
    """
    Choose what is held out of these files, of which read(files) yields the Pieces. Returns (cut,
    is_held_out). One document, also the only one among rows, is cut after so many characters. Of
    several, those with the lowest hashes are held out, up to the fraction of bytes; rows are read once
    more for this. Of many, each is held out with that probability. is_held_out(key) tests a document.
    """
    if val_files:
        return None, lambda key: False
    sizes = Counter()
    if not is_document(files):
        for key, size in document_sizes(files, read):
            sizes[holdout_hash(key, seed)] += size
            if len(sizes) > MANY:
                return None, lambda key: holdout_hash(key, seed) < fraction
    is_text = is_document(files)
    if len(sizes) == 1:  # a folder or a table may hold one text, which is cut; a row of a chat is not
        is_text = [piece.row for piece in read(files) if piece.start] == [None]
    if is_text:
        length = sum(len(piece.parts[0][0]) for piece in read(files))
        return int(length * (1 - fraction)), None
    held_out = hold_out(sizes, fraction)
    share = sum(sizes[key] for key in held_out) / max(sizes.total(), 1)
    if sizes and not fraction / 2 <= share <= 2 * fraction:
        print(f'note: {share:.1%} of the text is held out, not {fraction:.1%}, because documents are held '
              'out whole; --val=FILE names a validation text')
    return None, lambda key: holdout_hash(key, seed) in held_out


def document_sizes(files, read):
    """Yield (key, bytes) of each Piece of the documents. A text or Python file counts as one."""
    for file in files:
        if file.kind in ('text', 'functions'):
            yield file.name, os.path.getsize(file.path)
            continue
        for piece in read([file]):
            yield piece.key, sum(len(text.encode()) for text, markup, _ in piece.parts if not markup)


def split_pieces(files, val_files, cut, is_held_out, read):
    """Yield (split, Piece) of all documents, as plan_holdout() chose."""
    for piece in read(files):
        if cut is not None:
            text = piece.parts[0][0]
            here = max(cut, 0)
            if text[:here]:
                yield 'train', piece._replace(parts=[(text[:here], False, True)], end=cut <= len(text))
            if text[here:]:
                yield 'val', piece._replace(parts=[(text[here:], False, True)], start=cut >= 0)
            cut -= len(text)
        elif is_held_out(piece.key):
            yield 'val', piece
        else:
            yield 'train', piece
    for piece in read(val_files):
        yield 'val', piece
