"""Reads files of rows: JSON lines, JSON, CSV, parquet, and the functions of Python source."""

import ast
import csv
import io
import os
import re
import textwrap
import warnings
from functools import partial

from hotloop.data.chat import ROW_FIELDS
from hotloop.data.text_file import open_file
from hotloop.system.files import first_line, json_lines, optional, parse_json

AS_TEXT = '; --format=text reads the file as plain text'


def rows_in(file, reading, progress, counts):
    """(where, row) of each row of a file; a row is a dict, or a str in a JSON file of texts."""
    readers = {'jsonl': partial(json_lines, remedy=AS_TEXT), 'csv': csv_rows, 'json': json_rows,
               'functions': partial(function_rows, reading=reading, counts=counts)}
    if file.kind in readers:
        with open_file(file, reading, progress, counts) as f:
            yield from readers[file.kind](f, file.path)
    else:
        yield from parquet_rows(file, reading, progress)


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
        raise ValueError(f'{path}, line {reader.reader.line_num}: {e}') from None


def json_rows(lines, path, remedy=AS_TEXT):
    """(where, row) of a .json file: a list of rows, or an object per line. Anything else is one text."""
    text = ''.join(lines)  # lines.read() would bypass the progress
    if re.match(r'\s*\{.*\}\s*\n\s*\{', text):
        yield from json_lines(text.split('\n'), path, remedy)
        return
    is_list = text.lstrip().startswith('[')  # package.json, for example, is a text
    rows = parse_json(text, path, remedy) if is_list else [text]
    for number, row in enumerate(rows, 1):
        yield f'{path}, element {number}', row


def function_rows(lines, path, reading, counts):
    """
    (where, row) of the functions of Python source that have at most reading.max_function characters. Source
    that is not Python has none. Fills the RowCounts.
    """
    source = ''.join(lines)
    try:
        for number, row in enumerate(functions_of(source), 1):
            if reading.max_function and sum(map(len, row.values())) > reading.max_function:
                counts.long_functions += 1
            else:
                yield f'{path}, function {number}', row
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        counts.not_python.append(f'{path}: {first_line(e)}')


def functions_of(source):
    """
    Yields {'prompt': signature and docstring, 'completion': body} of each documented function and method in
    Python source, without its decorators and moved to the margin. Functions without more than a docstring
    are left out. SyntaxError, or ValueError for a null byte, if it is not Python.
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
        if text.startswith(('def ', 'async def ')):  # a string at the margin keeps dedent from moving it
            # the newline between them belongs to the body, as tokenizers join it with the indentation
            prompt = ''.join(list(io.StringIO(text))[:docstring_end - first]).rstrip('\n')
            yield {'prompt': prompt, 'completion': text[len(prompt):]}


def parquet_rows(file, reading, progress):
    """(where, row) of a parquet file, a few hundred rows in memory at a time. Unread fields are None."""
    pyarrow = optional('pyarrow', 'reads parquet files')
    parquet = optional('pyarrow.parquet', 'reads parquet files')
    wanted = (reading.text_field,) if reading.text_field and file.kind != 'joined' else ROW_FIELDS
    number, size = 0, os.path.getsize(file.path)
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
