"""Read files of any kind as documents, and choose those that are held out for validation."""

import ast
import bz2
import codecs
import contextlib
import csv
import gzip
import hashlib
import io
import lzma
import os
import re
import textwrap
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

from hotloop.data.chat import ROW_FIELDS, TEMPLATES, as_object, choose_template, form_of, parts_of
from hotloop.system.files import counted, first_line, json_lines, optional, parse_json

PIECE = 1 << 20  # characters tokenized at a time
SMALL = 1 << 24  # bytes of files; documents of larger ones are held out by probability
AS_TEXT = '; --format=text reads the file as plain text'
Format = Literal['auto', 'text', 'jsonl', 'json', 'csv', 'parquet', 'functions']


@dataclass(frozen=True)
class ReadConfig:
    # --- reading
    format: Format = 'auto'  # auto: by suffix; functions: Python functions as rows
    text_field: str | None = None  # field that holds a row's text; None: text, content, or instruction data
    template: Literal[('auto', *(t for t in TEMPLATES if t != 'joined'))] = 'auto'  # of instruction data
    separator: str | None = None  # text between documents in a file, such as <|endoftext|>; \n: a newline

    def problems(self):
        """List the problems with the settings, one sentence each."""
        problems = []
        if self.template != 'auto' and self.text_field:
            problems.append(f'template={self.template!r} is for instruction data, and text_field='
                            f'{self.text_field!r} selects a single text field; remove one of them')
        return problems


@dataclass
class RowCounts:
    """Count what documents_in() leaves out."""
    skipped: int = 0  # rows
    not_python: list = field(default_factory=list)  # files, and why each cannot be parsed

    def left_out(self):
        """Yield a sentence for each kind of content that is not in the documents."""
        if self.skipped:
            yield (f'skipped {counted(self.skipped, "row")} without text, without an answer, too long, or '
                   'not in the form of the template')
        if self.not_python:
            yield (f'skipped {counted(len(self.not_python), "file")} that this Python cannot parse: '
                   f'{"; ".join(self.not_python[:3])}')


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

class ProgressFile(io.FileIO):
    """Report the bytes read from the disk, so that progress is right for compressed files."""

    def __init__(self, path, progress):
        super().__init__(path)
        self.progress = progress

    def readinto(self, buffer):
        count = super().readinto(buffer)
        if self.progress:
            self.progress.add(count)
        return count


def open_zstd(raw):
    zstandard = optional('zstandard', 'reads .zst files')
    # A window of 2 GB is that of zstd --long=31.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    return decompressor.stream_reader(raw, read_across_frames=True)


OPENERS = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open, '.lzma': lzma.open, '.zst': open_zstd}


@contextlib.contextmanager
def open_text(path, errors='strict', progress=None):
    """
    Open a UTF-8 text file for a with statement: decompressed by the suffix of its name, without a
    byte-order mark, line ends unchanged. Raises ValueError, also while reading, for what cannot be
    read.
    """
    opener = OPENERS.get(os.path.splitext(path)[1].lower())
    try:
        with io.BufferedReader(ProgressFile(path, progress), 1 << 17) as raw:
            data = raw
            if opener:
                data = opener(raw)
            yield io.TextIOWrapper(data, 'utf-8-sig', errors, newline='\n')
    except UnicodeDecodeError as e:
        before = e.object[max(e.start - 20, 0):e.start].decode('utf-8', 'replace')
        raise ValueError(f'{path} is not UTF-8 text: byte {e.object[e.start]:#04x} after {before!r}; convert '
                         f'it with iconv -f latin1 -t utf-8, or leave it out') from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f'{path} is damaged or incomplete: {e}') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None


def text_blocks(file, progress=None):
    """Yield a file's text in blocks of about a megabyte."""
    with open_text(file.path, progress=progress) as f:
        blocks = iter(lambda: f.buffer.read(1 << 20), b'')  # f.read(size) is a third slower
        yield from codecs.iterdecode(blocks, f.encoding, f.errors)


# -----------------------------------------------------------------------------
# documents

def documents_in(files, reading, progress=None, counts=None):
    """
    Yield the pieces of all documents of the files, in order. reading.template: that of
    template_of(). Counts what is left out in counts, a RowCounts.
    """
    counts = counts or RowCounts()
    if files and files[0].kind == 'joined':
        # WikiText: rows are lines of one document; empty ones have lost their space and newline.
        rows = chain.from_iterable(rows_in(file, reading, progress, counts) for file in files)
        yield from pieces_of((row['text'] or ' \n' for _, row in rows), files[0].name)
        return
    separator = (reading.separator or '').replace('\\n', '\n').replace('\\t', '\t')
    for file in files:
        if file.kind == 'text':
            blocks = text_blocks(file, progress)
            yield from pieces_of(blocks, None if separator else file.name, separator)
        else:
            yield from row_pieces(file, reading, progress, counts)


def row_pieces(file, reading, progress, counts):
    """Yield the pieces of the documents in a file of rows."""
    # functions of one file resemble each other: all of them are held out, or none
    key = None
    if file.kind == 'functions':
        key = file.name
    for where, row in rows_in(file, reading, progress, counts):
        parts = parts_of(row, where, reading.template, reading.text_field)
        if parts is None:
            counts.skipped += 1
        elif len(parts) == 1:
            text = parts[0][0]
            yield from pieces_of((text[i:i + PIECE] for i in range(0, len(text), PIECE)), key)
        else:
            yield Piece(parts, True, True, key or '\0'.join(text for text, *_ in parts), row)


def first_row(files, reading):
    """Return (file, row) of the first row in the files, or None if they are texts."""
    for file in files:
        if file.kind not in ('text', 'joined'):
            for where, row in rows_in(file, reading):
                return file, as_object(row, where)
    return None


def template_of(files, reading, of_model=None):
    """
    Return the one template of the rows in the files: that of the settings, or of the model, or what
    suits the first row. None: the rows are texts.
    """
    found = first_row(files, reading)
    if not found:
        return None
    file, row = found
    suited, _ = form_of(row, reading.text_field)
    if reading.template != 'auto':
        return choose_template(reading.template, suited)
    if suited and of_model and file.kind != 'functions':  # functions are continued
        return of_model
    return suited


def pieces_of(blocks, key=None, separator=None):
    """
    Yield the pieces of the documents in blocks of text: a single document, or those between
    separators, without the newlines around them. The default key of a document is its first piece.
    Tokenized separately, the pieces give the same tokens as the complete document.
    """
    text = ''
    start = True
    name = key
    ends = re.compile(re.escape(separator or '').replace('\\\n', '\r?\n'))  # or \r\n
    for block in chain(blocks, [None]):
        text += block or ''
        documents = ends.split(text) if separator else [text]
        text = '' if block is None else documents.pop()
        for document in documents:
            if separator:
                document = document.strip('\r\n') if start else document.rstrip('\r\n')
            if document or not start:
                yield Piece([(document, False, True)], start, True, document if name is None else name)
            start = True
            name = key
        while len(text) > 2 * PIECE:
            if separator and start:
                text = text.lstrip('\r\n')
            cut = safe_cut(text, PIECE)
            head, text = text[:cut], text[cut:]
            if name is None:
                name = head
            yield Piece([(head, False, True)], start, False, name)
            start = False


# split points that no tokenizer merges across, best first
SAFE_CUTS = [
    re.compile(r'(?<=\S\n)(?=[^\W\d_])'),  # before a line that begins with a letter
    re.compile(r'(?<=[^\W\d_])(?=\r?\n)'),  # between a letter and a newline
    re.compile(r'(?<=[^\W\d_])(?= )'),  # between a letter and a space
]


def safe_cut(text, size):
    """Return the last index up to `size` where a cut changes no token, or `size` if none is near."""
    for rule in SAFE_CUTS:
        for near in (1 << 10, 1 << 16):
            cuts = [match.start() for match in rule.finditer(text, max(size - near, 1), size + 1)]
            if cuts:
                return cuts[-1]
    return size


# -----------------------------------------------------------------------------
# rows

def rows_in(file, reading, progress=None, counts=None):
    """Yield (where, row) of each row of a file; a row is a dict, or a str in a JSON list."""
    counts = counts or RowCounts()
    readers = {'jsonl': partial(json_lines, remedy=AS_TEXT), 'csv': csv_rows, 'json': json_rows,
               'functions': partial(function_rows, counts=counts)}
    if file.kind in readers:
        with open_text(file.path, progress=progress) as f:
            yield from readers[file.kind](f, file.path)
    else:
        yield from parquet_rows(file, reading, progress)


def csv_rows(lines, path):
    """Yield (where, row) of lines of CSV or TSV, by the file's name. A header names the fields."""
    delimiter = ','
    if '.tsv' in os.path.basename(path).lower():
        delimiter = '\t'
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:
                raise csv.Error(f'{len(row[None])} values beyond the header: {str(row[None])[:50]}')
            yield f'{path}, line {reader.line_num}', row
    except csv.Error as e:
        raise ValueError(f'{path}, line {reader.reader.line_num}: {e}') from None


def json_rows(lines, path, remedy=AS_TEXT):
    """Yield (where, row) of a .json file: of a list of rows; anything else is one text."""
    text = ''.join(lines)  # lines.read() would bypass the progress
    rows = [text]  # package.json, for example, is a text
    if text.lstrip().startswith('['):
        rows = parse_json(text, path, remedy)
    for number, row in enumerate(rows, 1):
        yield f'{path}, element {number}', row


def function_rows(lines, path, counts):
    """
    Yield (where, row) of the functions of Python source. Source that is not Python has none, and is
    counted in a RowCounts.
    """
    try:
        for number, row in enumerate(functions_of(''.join(lines)), 1):
            yield f'{path}, function {number}', row
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        counts.not_python.append(f'{path}: {first_line(e)}')


def functions_of(source):
    """
    Yield {'prompt': signature and docstring, 'completion': body} of each documented function and
    method in Python source, without its decorators and moved to the margin. Functions without more
    than a docstring are left out. SyntaxError, or ValueError for a null byte, if it is not Python.
    """
    # the lines that Python counts; splitlines() also splits at form feeds
    lines = list(io.StringIO(source, newline=None))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # about strings such as '\d'
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not ast.get_docstring(node):
            continue
        first, docstring_end = node.lineno - 1, node.body[0].end_lineno
        if len(node.body) == 1 or node.body[1].lineno <= docstring_end:
            continue
        text = textwrap.dedent(''.join(lines[first:node.end_lineno]))
        if text.startswith(('def ', 'async def ')):  # no string kept dedent from it
            # Tokenizers join the newline between them with the indentation, so it is the body's.
            prompt = ''.join(list(io.StringIO(text))[:docstring_end - first]).rstrip('\n')
            yield {'prompt': prompt, 'completion': text[len(prompt):]}


def parquet_rows(file, reading, progress):
    """Yield (where, row) of a parquet file, 256 rows at a time. Unread fields are None."""
    pyarrow = optional('pyarrow', 'reads parquet files')
    parquet = optional('pyarrow.parquet', 'reads parquet files')
    wanted = ROW_FIELDS
    if reading.text_field and file.kind != 'joined':
        wanted = [reading.text_field]
    number = 0
    size = os.path.getsize(file.path)
    try:
        with parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            fields = [name for name in names if name in wanted]
            for batch in table.iter_batches(256, columns=fields):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{file.path}, row {number}', dict.fromkeys(names) | row
                if progress:
                    progress.add(size * batch.num_rows // table.metadata.num_rows)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as e:  # a text may not be UTF-8
        raise ValueError(f'{file.path} cannot be read as parquet: {str(e)[:200]}') from None


# -----------------------------------------------------------------------------
# validation

class Holdout(NamedTuple):
    """How documents are split: at a cut, or by hash: in held_out or below limit is validation."""
    several: bool  # documents, whose ends are marked
    cut: int | None = None  # number of characters of one document to train on
    seed: int | None = None  # of the hash
    held_out: frozenset = frozenset()
    limit: bytes = b''


def holdout_hash(key, seed):
    """Hash a document's key and the seed. The lowest hashes are held out."""
    return hashlib.sha256(f'{seed} {key}'.encode('utf-8', 'surrogateescape')).digest()


def hold_out(sizes, fraction):
    """
    Return the hashes of the documents to hold out, from {hash: bytes}: the lowest ones, up to the
    fraction of all bytes. Each side gets at least one document. One with more than twice the
    fraction, or half of all bytes, is for training, unless all are so large: then the smallest is
    held out.
    """
    total = sum(sizes.values())
    held_bytes = 0
    held_out = set()
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
    """Return whether the files are one document."""
    is_one_text = len(files) == 1 and files[0].kind == 'text' and not reading.separator
    return is_one_text or files[0].kind == 'joined'


def plan_holdout(files, val_files, cfg, reading):
    """
    Return the Holdout of these files. One document is cut at a character. Otherwise documents are
    held out, up to the fraction of bytes or, if there are many, each with that probability. Reads
    the files once more, unless each is a document.
    """
    single = is_single(files, reading) and (not val_files or is_single(val_files, reading))
    if val_files:
        return Holdout(several=not single)
    if single:
        if files[0].kind == 'text':
            length = sum(map(len, text_blocks(files[0])))
        else:
            length = sum(len(piece.parts[0][0]) for piece in documents_in(files, reading))
        return Holdout(several=False, cut=int(length * (1 - cfg.val_fraction)))
    if all(file.kind in ('text', 'functions') for file in files) and not reading.separator:
        sizes = {holdout_hash(file.name, cfg.seed): os.path.getsize(file.path) for file in files}
        return Holdout(several=True, seed=cfg.seed, held_out=hold_out(sizes, cfg.val_fraction))
    num_bytes = sum(os.path.getsize(file.path) for file in files)
    sizes = Counter()
    for piece in documents_in(files, reading):
        text = ''.join(text for text, *_ in piece.parts)
        sizes[holdout_hash(piece.key, cfg.seed)] += len(text.encode())
        if num_bytes > SMALL and len(sizes) > min(50 / cfg.val_fraction, 1e6):
            limit = int(cfg.val_fraction * 2**64).to_bytes(8, 'big')
            return Holdout(several=True, seed=cfg.seed, limit=limit)
    return Holdout(several=True, seed=cfg.seed, held_out=hold_out(sizes, cfg.val_fraction))


def split_pieces(files, val_files, reading, holdout, progress=None, counts=None):
    """Yield (split, Piece) of all documents. The other arguments are those of documents_in()."""
    pieces = documents_in(files, reading, progress, counts)
    if holdout.cut is not None:
        yield from cut_document(pieces, holdout.cut)
        return
    for piece in pieces:
        if piece.start:
            order = holdout_hash(piece.key, holdout.seed)
            split = 'train'
            if order in holdout.held_out or order < holdout.limit:
                split = 'val'
        yield split, piece
    for piece in documents_in(val_files, reading, progress, counts):
        yield 'val', piece


def cut_document(pieces, cut):
    """Yield (split, Piece) of one document: training up to the cut, then validation."""
    val_started = False
    for piece in pieces:
        text = piece.parts[0][0]
        head = text[:cut]
        tail = text[cut:]
        cut -= len(head)
        if head:
            yield 'train', piece._replace(parts=[(head, False, True)], end=cut == 0)
        if tail:
            yield 'val', piece._replace(parts=[(tail, False, True)], start=not val_started)
            val_started = True
