"""Reads files of rows: JSON lines, JSON, CSV, parquet, and the functions of Python source."""

import csv
import os
import re
from functools import partial

from hotloop.chat_template import ROW_FIELDS
from hotloop.files import first_line, json_lines, optional, parse_json
from hotloop.functions import function_rows
from hotloop.text_file import open_file

AS_TEXT = '; --format=text reads the file as plain text'


def rows_in(file, reading, progress, counts):
    """(where, row) of each row of a file; a row is a dict, or a str in a JSON file of texts."""
    readers = {'jsonl': partial(json_lines, remedy=AS_TEXT), 'csv': csv_rows, 'json': json_rows}
    if file.kind == 'functions':
        yield from functions_in(file, reading, progress, counts)
    elif file.kind in readers:
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


def json_rows(lines, path):
    """(where, row) of a .json file: a list of rows, or an object per line. Anything else is one text."""
    text = ''.join(lines)  # lines.read() would bypass the progress
    if re.match(r'\s*\{.*\}\s*\n\s*\{', text):
        yield from json_lines(text.split('\n'), path, AS_TEXT)
        return
    is_list = text.lstrip().startswith('[')  # package.json, for example, is a text
    rows = parse_json(text, path, AS_TEXT) if is_list else [text]
    for number, row in enumerate(rows, 1):
        yield f'{path}, element {number}', row


def functions_in(file, reading, progress, counts):
    """
    (where, row) of the documented functions in a Python file, without those that are longer than
    reading.max_function. A file that is not Python has none.
    """
    with open_file(file, reading, progress, counts) as f:
        source = ''.join(f)
    try:
        for number, row in enumerate(function_rows(source), 1):
            if reading.max_function and sum(map(len, row.values())) > reading.max_function:
                counts.long_functions += 1
            else:
                yield f'{file.path}, function {number}', row
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        counts.not_python.append(f'{file.path}: {first_line(e)}')


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
