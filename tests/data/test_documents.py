"""Files of every kind -> documents in pieces: what is read, where it is cut, and what is refused."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import LLAMA3_SPLIT

import hotloop.data.documents as documents_room
from hotloop.data.bpe import GPT2_SPLIT
from hotloop.data.documents import (
    PIECE,
    documents_in,
    functions_of,
    hold_out,
    holdout_hash,
    open_text,
    pieces_of,
    safe_cut,
    template_of,
)
from hotloop.data.sources import open_file, stdlib_files

ROWS = [f'row {i} — ünï\n' * (i + 1) for i in range(12)]


def read(*paths, text_field=None, format='auto'):
    """The documents of files, as texts."""
    files = [open_file(str(path), path.name, format) for path in paths]
    texts = []
    for piece in documents_in(files, template_of(files, text_field=text_field), text_field):
        text = ''.join(text for text, *_ in piece.parts)
        texts.append(text if piece.start else texts.pop() + text)
    return texts


# -----------------------------------------------------------------------------
# text files

def compress(suffix, data):
    if suffix == '.zst':
        zstd = pytest.importorskip('compression.zstd' if sys.version_info >= (3, 14) else 'backports.zstd')
        window = {zstd.CompressionParameter.window_log: 28}  # as zstd --long=28
        return zstd.compress(data[:99]) + zstd.compress(data[99:], options=window)  # two frames
    return {'.gz': gzip, '.bz2': bz2, '.xz': lzma, '.lzma': lzma}[suffix].compress(data)


@pytest.mark.parametrize('suffix', ['.gz', '.bz2', '.xz', '.lzma', '.zst'])
def test_a_compressed_file_is_the_file(tmp_path, suffix):
    """Line ends and characters that blocks cut included."""
    text = 'xGröße\r\n' + 'Größe\r\n' * 130_000
    path = tmp_path / f'a.txt{suffix}'
    path.write_bytes(compress(suffix, text.encode()))
    assert read(path) == [text]
    with open_text(str(path)) as f:
        assert list(f) == text.splitlines(keepends=True)


def test_a_cut_or_damaged_file_is_named(tmp_path):
    for suffix in ('.gz', '.bz2', '.xz', '.zst'):
        path = tmp_path / f'a.txt{suffix}'
        data = compress(suffix, random.Random(0).randbytes(100_000).hex().encode())
        for damaged in (data[:-1], data[:len(data) // 2], b'x' + data):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf'a\.txt\{suffix} cannot be read: '):
                read(path)


def test_text_is_utf8_with_or_without_a_byte_order_mark(tmp_path):
    (tmp_path / 'a.txt').write_bytes(b'x' * (1 << 20) + b'caf\xe9 noir ' * 3)  # beyond the first block
    with pytest.raises(ValueError, match=r'a\.txt is not UTF-8 text: .* byte 0xe9; .* iconv'):
        read(tmp_path / 'a.txt')
    for name, text in (('a.txt', '\ufeffx\ufeff'), ('b.jsonl', '\ufeff{"text": "x\ufeff"}')):
        (tmp_path / name).write_text(text, encoding='utf-8')
        assert read(tmp_path / name) == ['x\ufeff']


def test_a_text_with_separators_on_their_own_lines_is_documents(tmp_path):
    """As TinyStories. Code that only mentions the separator is one document."""
    story = 'Once\nupon.\r\n'
    (tmp_path / 'a.txt').write_text(f'{story}\n<|endoftext|>\n{story}<|endoftext|>\n\n<|endoftext|> x')
    assert read(tmp_path / 'a.txt') == ['Once\nupon.', 'Once\nupon.', ' x']
    # at each place of a block, and not split where one begins to look like it
    for shift in range(14):
        before = 'x' * ((1 << 20) - shift)
        (tmp_path / 'c.txt').write_text(f'{story}<|endoftext|>\n{before}<|endoftext|><|endof')
        assert read(tmp_path / 'c.txt') == ['Once\nupon.', before, '<|endof']
    (tmp_path / 'b.py').write_text('EOT = "<|endoftext|>"\n')
    assert read(tmp_path / 'b.py') == ['EOT = "<|endoftext|>"\n']


# -----------------------------------------------------------------------------
# pieces

@settings(max_examples=50, deadline=None)
@given(st.text('ab\n .é', max_size=300), st.integers(1, 40), st.integers(20, 60))
def test_pieces_are_the_text_whatever_the_blocks(text, size, piece):
    documents_room.PIECE = piece
    try:
        pieces = list(pieces_of((text[i:i + size] for i in range(0, len(text), size)), 'key'))
    finally:
        documents_room.PIECE = PIECE
    assert ''.join(p.parts[0][0] for p in pieces) == text and {p.key for p in pieces} <= {'key'}
    assert [p.start for p in pieces] == [i == 0 for i in range(len(pieces))]
    assert [p.end for p in pieces] == [i + 1 == len(pieces) for i in range(len(pieces))]


DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s"


@pytest.mark.parametrize('pattern', [GPT2_SPLIT, LLAMA3_SPLIT, DIGITS], ids=['gpt2', 'llama3', 'digits'])
def test_a_safe_cut_changes_no_token(pattern):
    """Words as each split rule sees them, in real text cut at 300 places."""
    import regex
    rule = regex.compile(pattern)
    text = ''.join(Path(path).read_bytes().decode() for path in stdlib_files()[:40])
    text += 'Prose, with "quotes".\r\nAnd  CRLF\r\n\r\nlines 12345\n\n\n x' * 300
    text += 'Die Straße\nvon Zürich 25½ x²\n' * 300
    rng, cuts = random.Random(0), 0
    for _ in range(300):
        start = rng.randrange(len(text) - 3000)
        part = text[start:start + rng.randrange(100, 3000)]
        size = rng.randrange(50, len(part))
        cut = safe_cut(part, size)
        if cut != size:
            cuts += 1
            assert rule.findall(part[:cut]) + rule.findall(part[cut:]) == rule.findall(part)
    assert cuts > 270


# -----------------------------------------------------------------------------
# rows

def as_jsonl(rows):
    return '\n'.join(json.dumps(row) for row in rows).encode()


def as_csv(rows, delimiter=','):
    out = io.StringIO(newline='')
    writer = csv.DictWriter(out, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def as_parquet(rows):
    pyarrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), out, row_group_size=5)
    return out.getvalue()


@pytest.mark.parametrize('name, write', [
    ('a.jsonl', as_jsonl), ('a.jsonl.gz', lambda rows: gzip.compress(as_jsonl(rows))), ('a.csv', as_csv),
    ('a.tsv', lambda rows: as_csv(rows, '\t')), ('a.csv', lambda rows: as_csv(rows, ';')),
    ('a.parquet', as_parquet),
    ('a.json', lambda rows: json.dumps(rows, indent=2).encode()), ('a.json.gz', lambda rows: gzip.compress(
        as_jsonl(rows)))])
@pytest.mark.parametrize('field', ['text', 'body'])
def test_a_row_is_a_document(tmp_path, monkeypatch, name, write, field):
    """Its key, which decides whether it is held out, is its first piece."""
    monkeypatch.setattr(documents_room, 'PIECE', 40)
    path = tmp_path / name
    path.write_bytes(write([{'id': i, field: text} for i, text in enumerate(ROWS)]))
    text_field = 'body' if field == 'body' else None
    assert read(path, text_field=text_field) == ROWS
    files = [open_file(str(path), name, 'auto')]
    keys = {piece.key for piece in documents_in(files, None, text_field)}
    assert len(keys) == len(ROWS) and ROWS[0] in keys and max(map(len, keys)) < 100
    with pytest.raises(ValueError, match=r"a\..* \d has no field 'title', only id, "):
        read(path, text_field='title')


def test_a_field_of_csv_may_hold_a_book(tmp_path):
    book = 'word ' * 40_000
    (tmp_path / 'a.csv').write_bytes(as_csv([{'text': book}]))
    assert read(tmp_path / 'a.csv') == [book]


def test_json_that_is_a_list_of_texts_or_is_not_rows(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text(json.dumps(ROWS))
    assert read(path) == ROWS
    path.write_text('{"data": [\n{"text": "some"}]}')  # as in folders of source code
    assert read(path) == ['{"data": [\n{"text": "some"}]}']
    path.write_text('[[1.5, 2], [3, 4]]')
    assert read(path) == ['[[1.5, 2], [3, 4]]']
    path.write_text('\n{"text": "a"} \n\n{"text": "b"}\n')
    assert read(path) == ['a', 'b']
    path.write_text(json.dumps({'text': 'a'}, indent=1))
    assert read(path, format='json') == ['a']


@pytest.mark.parametrize('name, data, words', [
    ('a.jsonl', b'{"text": "a"}\n{"text": \n', r'a\.jsonl, line 2 is not JSON: .*--format=text'),
    ('a.jsonl', b'[' * 100_000, r'a\.jsonl, line 1 is not JSON: .*--format=text'),
    ('a.csv', b'text,label\nHello, world,1\n', r'a\.csv, line 2: 1 values beyond the header'),
    ('a.csv', b'text,label\n"Hello,1\nsecond,2\n', r'a\.csv, line 3: unexpected end of data'),
    ('a.parquet', b'PAR1 not really', r'a\.parquet cannot be read as parquet')])
def test_rows_that_cannot_be_read_are_named(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / name)


@pytest.mark.parametrize('rows, asked, of_model, expected', [
    ([{'text': 'a'}], 'auto', 'chatml', None), ([{'prompt': 'a', 'completion': 'b'}], 'auto', None, 'joined'),
    ([{'prompt': 'a', 'completion': 'b'}], 'auto', 'gemma', 'gemma'),
    ([{'prompt': 'a', 'completion': 'b'}], 'llama3', 'gemma', 'llama3'),
    ([{'messages': []}, {'prompt': 'a', 'completion': 'b'}], 'auto', None, 'chatml'),
    ([{'messages': None, 'prompt': None, 'completion': None}], 'auto', None, 'joined'),
    ([{'messages': None, 'text': None}, {'text': 'a'}], 'auto', None, None),
    ([{'messages': [{'role': 'tool'}]}, {'prompt': 'a', 'completion': 'b'}], 'auto', None, 'joined')])
def test_a_dataset_has_one_template(tmp_path, rows, asked, of_model, expected):
    """That of the settings, else of the model, else what suits the first row. Texts have none."""
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl(rows))
    (tmp_path / 'b.txt').write_text('text')
    files = [open_file(str(tmp_path / name), name, 'auto') for name in ('b.txt', 'a.jsonl')]
    assert template_of(files, asked, None, of_model) == expected
    assert template_of(files[:1], 'auto', None, of_model) is None
    for flags in (dict(asked='llama3'), dict(text_field='body')):
        with pytest.raises(ValueError, match='apply to rows'):
            template_of(files[:1], **flags)


SOURCE = '''
def area(w, h):
    """The area."""

    # of a rectangle
    return w * h

class Shape:
    async def grow(
            self, by):
        """
        Grows.
        """
        self.w += by  # in place

    def undocumented(self):
        return 1

    def abstract(self):
        """Only a docstring."""
'''


def test_documented_functions_become_prompts_and_bodies(capsys):
    """At the margin; functions without a docstring or a body of their own are left out."""
    rows = list(functions_of(SOURCE, 'a.py'))
    assert [row['prompt'] for row in rows] == [
        'def area(w, h):\n    """The area."""',
        'async def grow(\n        self, by):\n    """\n    Grows.\n    """']
    assert [row['completion'] for row in rows] == [
        '\n\n    # of a rectangle\n    return w * h\n', '\n    self.w += by  # in place\n']
    assert list(functions_of('print "2"', 'a.py')) == []
    assert 'a.py is left out, because it is not Python' in capsys.readouterr().err


# -----------------------------------------------------------------------------
# validation

def test_documents_are_held_out_by_hash_to_make_up_the_fraction():
    choices = set()
    for seed in range(20):
        sizes = {holdout_hash(f'{i}.txt', seed): 100 * (i + 1) for i in range(6)}
        for fraction in (0.01, 0.1, 0.5, 0.99):
            held_out = hold_out(sizes, fraction)
            assert 0 < len(held_out) < 6 and held_out == hold_out(dict(reversed(sizes.items())), fraction)
            small = sum(size for size in sizes.values() if size <= min(2 * fraction, 0.5) * 2100)
            assert sum(sizes[h] for h in held_out) >= fraction * small or len(held_out) == 5
        choices.add(tuple(h in hold_out(sizes, 0.5) for h in sizes))
    assert len(choices) > 3
    # One of more than half of all bytes is for training, beside a share of the others.
    notes = {bytes([i]): 1 for i in range(40)}
    for size, fraction, number in ((100, 0.5, 20), (400, 0.1, 4)):
        assert len(hold_out({b'book': size, **notes}, fraction)) == number
    # So is one of more than twice the fraction, unless there are no others.
    assert hold_out({b'a': 30, b'b': 10, b'c': 60}, 0.1) == {b'b'} == hold_out({b'a': 45, b'b': 10}, 0.01)
