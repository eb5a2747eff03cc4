"""From what a user has to documents: files of every kind, rows, corpora by name, and what is refused on the way."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SHARED, contents
from hypothesis import given, settings
from hypothesis import strategies as st

import hotloop.documents as documents_room
import prepare
import train
from hotloop.bpe import GPT2_SPLIT
from hotloop.dataset import partial_folder, read_meta
from hotloop.documents import PIECE, ReadConfig, json_elements, pieces_of, safe_cut, text_blocks
from hotloop.sources import CORPORA, File, how_to_make, stdlib_files
from hotloop.tokenizer import tokenizer_from

ROOT = os.path.dirname(os.path.abspath(prepare.__file__))


@pytest.fixture
def make(tmp_path):
    """make(*sources, **settings) -> ({split: [documents as text]}, meta), the end of text being what divides them."""
    def run(*sources, **settings):
        settings = {'name': 'x', 'data_dir': tmp_path / 'data', **settings}
        prepare.main([*map(str, sources), *(f'--{k}={v}' for k, v in settings.items())])
        folder = tmp_path / 'data' / settings['name']
        meta = read_meta(str(folder))
        tokenizer = tokenizer_from(meta['tokenizer'])
        found = {}
        for split in ('train', 'val'):
            ids = np.fromfile(folder / f'{split}.bin', dtype=meta['dtype'])
            ends = np.flatnonzero(ids == tokenizer.eot) if tokenizer.eot is not None else []
            found[split] = [tokenizer.decode(part[part != tokenizer.eot].tolist()).decode('utf-8', 'surrogatepass')
                            for part in np.split(ids, [e + 1 for e in ends]) if len(part)]
            assert meta['splits'][split]['tokens'] == len(ids)
        return found, meta
    return run


def every(found):
    return sorted(found['train'] + found['val'])


ROWS = [f'row {i} — ünï\n' * (i + 1) for i in range(12)]


# -----------------------------------------------------------------------------
# kinds of files

@pytest.mark.parametrize('name, opener', [('a.txt.gz', gzip.open), ('a.txt.xz', lzma.open), ('a.txt.bz2', bz2.open)])
def test_a_compressed_file_is_the_file(tmp_path, make, name, opener):
    text = 'Größe\r\n' * 300
    (tmp_path / 'plain.txt').write_bytes(text.encode())
    with opener(tmp_path / name, 'wb') as f:
        f.write(text.encode())
    found, _ = make(tmp_path / 'plain.txt')
    assert make(tmp_path / name, name='y')[0] == found and ''.join(found['train'] + found['val']) == text


def test_zstandard(tmp_path, make):
    """Both frames of a file, and characters that blocks cut: it gives empty ones in the middle."""
    zstandard = pytest.importorskip('zstandard')
    random.seed(0)
    for text in ('one ' * 99, ''.join(chr(random.randrange(0x4e00, 0x9f00)) for _ in range(100_000))):
        (tmp_path / 'a.txt.zst').write_bytes(zstandard.compress(text.encode()) + zstandard.compress(b'two ' * 99))
        found, _ = make(tmp_path / 'a.txt.zst')
        assert ''.join(found['train'] + found['val']) == text + 'two ' * 99


@pytest.mark.parametrize('package, name', [('zstandard', 'a.txt.zst'), ('pyarrow', 'a.parquet')])
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, make, monkeypatch, package, name):
    monkeypatch.setattr('hotloop.files.find_spec', lambda name: None)
    (tmp_path / name).write_bytes(b'x' * 100)
    with pytest.raises(ValueError, match=f'pip install {package}'):
        make(tmp_path / name)


@pytest.mark.parametrize('name, raw', [('a.txt.gz', gzip.compress(b'text ' * 1000)[:-20]), ('a.txt.gz', b'no gzip'),
                                       ('a.txt.xz', lzma.compress(b'text ' * 1000)[:-20]), ('a.txt.xz', b'no xz'),
                                       ('a.txt.bz2', bz2.compress(os.urandom(5000))[:-20]),
                                       ('a.parquet', b'PAR1 not really')])
def test_a_damaged_file_is_named(tmp_path, make, name, raw):
    if name.endswith('parquet'):
        pytest.importorskip('pyarrow')
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=rf'{name} (is damaged|cannot be read|is not)'):
        make(tmp_path / name)
    assert not (tmp_path / 'data' / 'x').exists()


def as_jsonl(rows):
    return '\n'.join(json.dumps(row) for row in rows).encode()


def as_csv(rows):
    out = io.StringIO(newline='')
    writer = csv.DictWriter(out, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


@pytest.mark.parametrize('name, write', [
    ('a.jsonl', as_jsonl), ('a.ndjson', as_jsonl), ('a.json', lambda rows: json.dumps(rows, indent=2).encode()),
    ('a.csv', as_csv), ('a.jsonl.gz', lambda rows: gzip.compress(as_jsonl(rows)))])
@pytest.mark.parametrize('field', ['text', 'content', 'body'])
def test_a_row_is_a_document(tmp_path, make, name, write, field):
    (tmp_path / name).write_bytes(write([{'id': i, field: text} for i, text in enumerate(ROWS)]))
    found, meta = make(tmp_path / name, **({'text_field': 'body'} if field == 'body' else {}))
    assert every(found) == sorted(ROWS) and found['val'] and found['train']
    assert sum(meta['splits'][s]['documents'] for s in ('train', 'val')) == len(ROWS)
    assert sum(meta['splits'][s]['bytes'] for s in ('train', 'val')) == sum(len(r.encode()) for r in ROWS)


def test_parquet_rows(tmp_path, make):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    table = pyarrow.table({'text': ROWS * 30, 'id': list(range(12 * 30))})
    parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=50)
    assert every(make(tmp_path / 'a.parquet')[0]) == sorted(ROWS * 30)
    with pytest.raises(ValueError, match=r"a\.parquet, row 1 has no field 'body'; its fields are: text, id"):
        make(tmp_path / 'a.parquet', text_field='body')


def test_a_list_of_texts_and_an_object_that_is_a_document(tmp_path, make):
    (tmp_path / 'a.json').write_text(json.dumps(ROWS))
    assert every(make(tmp_path / 'a.json')[0]) == sorted(ROWS)
    (tmp_path / 'b.json').write_text('{"text": "one document"}  ')
    assert ''.join(make(tmp_path / 'b.json', name='y')[0]['train']).startswith('{"text": "one doc')
    with pytest.raises(ValueError, match='is not a JSON list'):
        make(tmp_path / 'b.json', format='json')


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), max_size=8),
       st.integers(1, 50), st.sampled_from([None, 1]))
def test_json_elements_whatever_the_blocks(tmp_path_factory, elements, size, indent):
    path = tmp_path_factory.mktemp('json') / 'a.json'
    path.write_text(json.dumps(elements, indent=indent), encoding='utf-8')
    file, old = File(str(path), 'a.json', 'json'), text_blocks
    try:
        documents_room.text_blocks = lambda *args: (text[i:i + size] for text in old(*args) for i in range(0, len(text), size))
        assert [element for _, element in json_elements(file, ReadConfig())] == elements
    finally:
        documents_room.text_blocks = old


def test_a_folder_and_a_glob_and_several_sources(tmp_path, make):
    """A document a file, a document a row; names of the same file in two folders stay apart."""
    for folder in ('one', 'two'):
        (tmp_path / folder / 'sub').mkdir(parents=True)
        (tmp_path / folder / 'a.txt').write_text(f'{folder} a')
        (tmp_path / folder / 'sub' / 'b.md').write_text(f'{folder} b')
    (tmp_path / 'two' / 'rows.jsonl').write_bytes(as_jsonl([{'text': 'row 1'}, {'text': 'row 2'}]))
    both = ['one a', 'one b', 'row 1', 'row 2', 'two a', 'two b']
    found, meta = make(tmp_path / 'one', tmp_path / 'two')
    assert every(found) == both and meta['source'] == f'{tmp_path / "one"} {tmp_path / "two"}'
    assert every(make(f'{tmp_path}/[ot]*/**/*.*', name='y')[0]) == both
    with pytest.raises(ValueError, match='no file matches'):
        make(f'{tmp_path}/*.pdf')


def test_names_that_datasets_get(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, name in (('notes/', 'notes'), ('book.txt', 'book'), ('book.txt.gz', 'book'), ('-', 'stdin'),
                         ('https://x.org/a/pages.jsonl.xz?raw=1', 'pages'), ('wikitext2', 'wikitext2')):
        assert prepare.default_name([source]) == name
    for sources in (['a.txt', 'b.txt'], ['*.txt']):
        with pytest.raises(ValueError, match='say what the dataset shall be called, with --name'):
            prepare.default_name(sources)


def test_standard_input(tmp_path):
    def run(text, *flags):
        command = [sys.executable, 'prepare.py', '-', f'--data_dir={tmp_path}', *flags]
        return subprocess.run(command, input=text, cwd=ROOT, check=True, capture_output=True)
    run(b'some words ' * 100)
    raw = b''.join((tmp_path / 'stdin' / f'{s}.bin').read_bytes()[::2] for s in ('train', 'val'))
    assert raw == b'some words ' * 100
    run(as_jsonl([{'text': t} for t in ROWS]), '--format=jsonl', '--name=rows')
    assert sum(m['documents'] for m in read_meta(str(tmp_path / 'rows'))['splits'].values()) == len(ROWS)
    assert sorted(os.listdir(tmp_path)) == ['rows', 'stdin']  # what it was kept in for a while is gone


# -----------------------------------------------------------------------------
# odd texts

def test_documents_between_separators(tmp_path, make):
    stories = [f'Story {i}.\n\nIt ends.' for i in range(20)]
    (tmp_path / 'a.txt').write_text('\n<|endoftext|>\n'.join(stories) + '\n<|endoftext|>\n')
    assert every(make(tmp_path / 'a.txt', separator='<|endoftext|>')[0]) == sorted(stories)
    (tmp_path / 'b.txt').write_text('\n'.join(f'line {i}' for i in range(50)) + '\n\n')
    assert every(make(tmp_path / 'b.txt', separator='\\n', name='y')[0]) == sorted(f'line {i}' for i in range(50))


@settings(max_examples=200, deadline=None)
@given(st.text('ab\n .é', max_size=300).map(lambda text: re.sub('\n{9,}', '\n', text)), st.integers(1, 40),
       st.integers(20, 60))
def test_pieces_are_the_text_whatever_the_blocks(text, size, piece):
    old, documents_room.PIECE = PIECE, piece
    try:
        pieces = list(pieces_of((text[i:i + size] for i in range(0, len(text), size)), 'key'))
        documents = list(pieces_of((text[i:i + size] for i in range(0, len(text), size)), None, '.'))
    finally:
        documents_room.PIECE = old
    assert ''.join(p.parts[0][0] for p in pieces) == text and {p.key for p in pieces} == ({'key'} if text else set())
    assert [p.start for p in pieces] == [i == 0 for i in range(len(pieces))]
    assert [p.end for p in pieces] == [i + 1 == len(pieces) for i in range(len(pieces))]
    joined, started = [], True
    for p in documents:
        assert p.start == started
        joined.append(p.parts[0][0]) if p.start else joined.append(joined.pop() + p.parts[0][0])
        started = p.end
    assert started and [d for d in joined if d] == [d.strip('\n') for d in text.split('.') if d.strip('\n')]


@pytest.mark.parametrize('pattern', ['gpt2', 'llama3', 'digits'])
def test_a_safe_cut_changes_no_token(pattern):
    """Words as each split rule sees them, of real text cut at 3,000 places."""
    import regex
    rule = regex.compile({'gpt2': GPT2_SPLIT, 'llama3': LLAMA3, 'digits': DIGITS}[pattern])
    text = ''.join(Path(path).read_bytes().decode() for _, path in stdlib_files()[:40])
    text += 'Prose, with "quotes".\r\nAnd  CRLF\r\n\r\nlines 12345\n\n\n x' * 300
    text += 'Die Straße\nvon Zürich 25½ x²\n' * 300
    rng, cuts = random.Random(0), 0
    for _ in range(3000):
        start = rng.randrange(len(text) - 3000)
        part = text[start:start + rng.randrange(100, 3000)]
        size = rng.randrange(50, len(part))
        at = safe_cut(part, size)
        if at != size:
            cuts += 1
            assert rule.findall(part[:at]) + rule.findall(part[at:]) == rule.findall(part), repr(part[at - 20:at + 20])
    assert cuts > 2800


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r'\s+(?!\S)|\s+')
DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s"


def test_tokens_of_a_document_in_pieces_are_those_of_the_whole(tmp_path, make, gpt2, monkeypatch):
    text = ''.join(Path(path).read_bytes().decode() for _, path in stdlib_files()[:30])
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8', newline='')
    cut = int(len(text) * 0.9)
    expected = [gpt2.encode(text[:cut]).tolist(), gpt2.encode(text[cut:]).tolist()]
    for piece, num_proc in ((1 << 20, 1), (5000, 1), (5000, 3)):
        monkeypatch.setattr('hotloop.documents.PIECE', piece)
        monkeypatch.setattr('hotloop.encode.PIECE', piece)
        make(tmp_path / 'a.txt', tokenizer='gpt2', num_proc=num_proc)
        for ids, split in zip(expected, ('train', 'val'), strict=True):
            assert np.fromfile(tmp_path / 'data' / 'x' / f'{split}.bin', dtype='<u2').tolist() == ids


def test_a_large_file_is_cut_at_a_line(tmp_path, make, monkeypatch):
    """Read once, its end is moved from one bin to the other; char and bpe, which read it anyway, cut at a line too."""
    monkeypatch.setattr(prepare, 'SMALL', 1000)
    monkeypatch.setattr('hotloop.documents.PIECE', 400)
    monkeypatch.setattr('hotloop.encode.PIECE', 400)
    text = ''.join(f'Line {i} of the story goes on\n' for i in range(2000))
    (tmp_path / 'a.txt').write_text(text)
    for tokenizer in ('byte', 'char', 'bpe:300'):
        found, meta = make(tmp_path / 'a.txt', tokenizer=tokenizer, name=tokenizer.replace(':', ''), val_fraction=0.2)
        train, val = ''.join(found['train']), ''.join(found['val'])
        assert train + val == text and val.startswith('Line') and 0.19 < len(val) / len(text) < 0.21
        assert [meta['splits'][s]['documents'] for s in ('train', 'val')] == [1, 1]
        assert [meta['splits'][s]['bytes'] for s in ('train', 'val')] == [len(train), len(val)]


@pytest.mark.parametrize('raw', [b'\0' * 5000, '\0a\x1b[31m\u2028'.encode() * 900, b'a' * 200_000,
                                 ('😀' * 3000).encode(), b'\r\n' * 3000, b'\xef\xbb\xbfx<|endoftext|>y ' * 50])
def test_odd_texts_come_back(tmp_path, make, raw, gpt2):
    (tmp_path / 'a.txt').write_bytes(raw)
    text = raw.decode('utf-8-sig')
    for tokenizer in ('byte', 'char', 'bpe:270', 'gpt2'):
        found, _ = make(tmp_path / 'a.txt', tokenizer=tokenizer, name='t')
        assert ''.join(found['train'] + found['val']) == text, tokenizer


@pytest.mark.slow
def test_one_line_of_fifty_megabytes_and_a_million_lines(tmp_path, make, gpt2):
    line = ''.join(random.Random(0).choices('abcdefghij klmnop', k=1 << 20)) * 50
    (tmp_path / 'a.txt').write_text(line)
    found, _ = make(tmp_path / 'a.txt', tokenizer='gpt2')
    assert ''.join(found['train'] + found['val']) == line
    (tmp_path / 'b.jsonl').write_text(json.dumps({'text': line}) + '\n' + json.dumps({'text': 'short'}))
    found, _ = make(tmp_path / 'b.jsonl', tokenizer='gpt2', name='y')
    assert every(found) == [line, 'short']
    (tmp_path / 'c.txt').write_text(''.join(f'document {i}\n' for i in range(10**6)))
    _, meta = make(tmp_path / 'c.txt', tokenizer='gpt2', name='z', separator='\\n')
    counts = [meta['splits'][s]['documents'] for s in ('train', 'val')]
    assert sum(counts) == 10**6 and 0.098 < counts[1] / 10**6 < 0.102


def test_lone_surrogates_of_json_become_a_sign_and_pairs_are_joined(tmp_path, make, gpt2):
    (tmp_path / 'a.jsonl').write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n"plain \\udfff"\n')
    for tokenizer in ('byte', 'gpt2'):
        found, _ = make(tmp_path / 'a.jsonl', tokenizer=tokenizer)
        assert every(found) == sorted(['a�b', '😀', 'plain �'])


def test_bytes_that_are_not_utf8_can_be_replaced(tmp_path, make):
    (tmp_path / 'a.txt').write_bytes(b'x' * (1 << 20) + b'caf\xe9 noir ' * 3)  # beyond the first block
    with pytest.raises(ValueError, match=r'a\.txt is not UTF-8 text: byte 0xe9 at 1048579; convert it, or'):
        make(tmp_path / 'a.txt')
    found, _ = make(tmp_path / 'a.txt', bad_utf8='replace')
    assert ''.join(found['train'] + found['val']).endswith('caf� noir ')
    (tmp_path / 'b.txt').write_bytes('text'.encode('utf-16'))
    with pytest.raises(ValueError, match=r'UTF-16\?'):
        make(tmp_path / 'b.txt')


@pytest.mark.parametrize('raw, words', [
    (b'{"text": "a"}\n{"text": \n', r'a\.jsonl, line 2 is not JSON'),
    (b'{"text": "a"}\n\n[1]\n', r'a\.jsonl, line 3: a row must be an object'),
    (b'{"title": "a", "n": 3}\n', r"line 1 has no field 'text'; its fields are: title, n. Name the one .*--text_field"),
    (b'{"text": 3}\n', r"line 1: field 'text' is no text but 3"),
    (b'{"messages": [{"role": "robot", "content": "hi"}]}\n', r"line 1: a message of role 'robot'"),
    (b'{"prompt": ["a"], "completion": "b"}\n', r'line 1: \["a"\] stands where a text was expected'),
    (b'[' * 100_000, r'a\.jsonl, line 1 is not JSON'),
    (b'\n\n', r'holds no text|one document'),
])
def test_rows_that_cannot_be_read_are_named(tmp_path, make, raw, words):
    (tmp_path / 'a.jsonl').write_bytes(raw)
    with pytest.raises(ValueError, match=words) as e:
        make(tmp_path / 'a.jsonl')
    assert len(str(e.value)) < 600 and not (tmp_path / 'data' / 'x').exists()


def test_rows_without_text_are_left_out_and_counted(tmp_path, make, capsys):
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl([{'text': t} for t in ('a', '', None, 'b', 'c')]))
    assert every(make(tmp_path / 'a.jsonl')[0]) == ['a', 'b', 'c']
    assert '2 rows without text, or without an answer, were left out' in capsys.readouterr().out


# -----------------------------------------------------------------------------
# validation

def test_a_validation_source_of_its_own(tmp_path, make):
    (tmp_path / 'a.txt').write_text('training ' * 20)
    (tmp_path / 'b.txt').write_text('validation')
    found, meta = make(tmp_path / 'a.txt', val=tmp_path / 'b.txt')
    assert found == {'train': ['training ' * 20], 'val': ['validation']} and meta['splits']['val']['tokens'] == 10
    (tmp_path / 'c.txt').write_text('more')
    found, meta = make(tmp_path / 'a.txt', tmp_path / 'c.txt', val=tmp_path / 'b.txt', name='y')
    assert found['val'] == ['validation'] and meta['splits']['val']['tokens'] == 11  # of several, the end is marked
    with pytest.raises(ValueError, match='leave out val_fraction'):
        make(tmp_path / 'a.txt', val=tmp_path / 'b.txt', val_fraction=0.1)


def test_a_document_is_never_in_both_splits(tmp_path, make, monkeypatch):
    """Rows that occur twice fall on one side, however often, whether few are read twice or many once."""
    rows = [{'text': f'document {i % 1000}'} for i in range(10_000)]
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl(rows))
    for small in (1 << 24, 10):
        monkeypatch.setattr(prepare, 'SMALL', small)
        found, _ = make(tmp_path / 'a.jsonl')
        assert len(found['train']) + len(found['val']) == 10_000 and not set(found['train']) & set(found['val'])
        assert 700 <= len(found['val']) <= 1300
    again, _ = make(tmp_path / 'a.jsonl', name='y', seed=7)
    assert set(again['val']) != set(found['val'])


def test_one_row_cannot_be_both_trained_and_validated_on(tmp_path, make):
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl([{'text': 'alone'}]))
    with pytest.raises(ValueError, match='would be validated on; name a validation source with --val'):
        make(tmp_path / 'a.jsonl')


def test_wikitext_has_its_known_number_of_tokens(make, gpt2):
    folder = os.path.join(SHARED, 'wikitext-2')
    if not os.path.isdir(folder):
        pytest.skip(f'{folder} is not there')
    _, meta = make(f'{folder}/test.txt', val=f'{folder}/valid.txt', tokenizer='gpt2')
    assert meta['splits']['val']['tokens'] == 258_659 and meta['splits']['train']['tokens'] == 295_877


# -----------------------------------------------------------------------------
# shards of tokens

def shard(tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, dtype='<i4')
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, dtype='<u2').tobytes()


@pytest.mark.parametrize('own_val', [True, False])
def test_shards_of_gpt2_tokens_lose_their_header(tmp_path, make, gpt2, own_val):
    documents = [[50256, *gpt2.encode(f'Document number {i}.').tolist()] for i in range(800)]
    tokens = [t for d in documents for t in d]
    (tmp_path / 'a_train_1.bin').write_bytes(shard(tokens[:3000]))
    (tmp_path / 'a_train_2.bin').write_bytes(shard(tokens[3000:]))
    (tmp_path / 'a_val_0.bin').write_bytes(shard(tokens[:60]))
    _, meta = make(f'{tmp_path}/a_train_*.bin', **({'val': tmp_path / 'a_val_0.bin'} if own_val else {}))
    train, val = (np.fromfile(tmp_path / 'data' / 'x' / f'{s}.bin', dtype='<u2').tolist() for s in ('train', 'val'))
    assert meta['tokenizer'] == {'kind': 'tiktoken', 'name': 'gpt2'} and meta['eot'] == 50256
    if own_val:
        assert train == tokens and val == tokens[:60]
        assert meta['splits']['train']['documents'] == 800
    else:
        assert train + val == tokens and val[0] == 50256 and 0 < len(val) < len(train)
    assert meta['splits']['train']['bytes'] == len(gpt2.decode(train))


@pytest.mark.parametrize('raw, words', [
    (b'', 'no shard of GPT-2 tokens'), (shard([1, 2], magic=20240801, version=7), 'no shard of GPT-2 tokens'),
    (shard([1, 2, 3], count=4), 'has 1,030 bytes, not those of the 4 tokens'), (shard([1, 60000]), 'token id 60000'),
    (shard([1, 2], version=2), 'no shard')])
def test_a_damaged_shard_is_refused(tmp_path, make, gpt2, raw, words):
    for name in ('a.bin', 'b.bin'):
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=words):
        make(tmp_path / 'a.bin', val=tmp_path / 'b.bin')


def test_shards_and_text_do_not_mix(tmp_path, make):
    (tmp_path / 'a.bin').write_bytes(shard([1, 2]))
    (tmp_path / 'a.txt').write_text('text')
    with pytest.raises(ValueError, match='shards of tokens and files of text'):
        make(tmp_path / 'a.bin', tmp_path / 'a.txt')
    with pytest.raises(ValueError, match="tokenizer='byte' cannot change that"):
        make(tmp_path / 'a.bin', tokenizer='byte')


# -----------------------------------------------------------------------------
# processes

def test_the_bytes_do_not_depend_on_the_processes(tmp_path, make, monkeypatch):
    monkeypatch.setattr('hotloop.documents.PIECE', 3000)
    monkeypatch.setattr('hotloop.encode.PIECE', 3000)
    rng = random.Random(1)
    words = ['one', 'two', 'γάμμα', 'd\n']
    rows = [{'text': ' '.join(rng.choices(words, k=rng.randrange(1, 2000)))} for _ in range(60)]
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl(rows))
    made = []
    for num_proc in (1, 2, 5):
        make(tmp_path / 'a.jsonl', tokenizer='bpe:300', num_proc=num_proc)
        made.append(contents(tmp_path / 'data' / 'x'))
    assert made[0] == made[1] == made[2] and len(made[0]['train.bin']) > 10_000


def test_a_process_that_dies_is_noticed(tmp_path, make, monkeypatch):
    monkeypatch.setattr('hotloop.documents.PIECE', 1000)
    monkeypatch.setattr('hotloop.encode.PIECE', 1000)
    monkeypatch.setattr('hotloop.encode.encode_batch', lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    (tmp_path / 'a.txt').write_text('words of a text\n' * 2000)
    with pytest.raises(ValueError, match='a process that tokenizes has died'):
        make(tmp_path / 'a.txt', tokenizer='bpe:300', num_proc=2)
    assert not (tmp_path / 'data' / 'x').exists()


def test_an_error_in_a_process_is_the_users_error(tmp_path, make, monkeypatch):
    def fail(*args):
        raise ValueError('what went wrong there')
    monkeypatch.setattr('hotloop.documents.PIECE', 1000)
    monkeypatch.setattr('hotloop.encode.PIECE', 1000)
    monkeypatch.setattr('hotloop.encode.encode_batch', fail)
    (tmp_path / 'a.txt').write_text('words of a text\n' * 2000)
    with pytest.raises(ValueError, match='what went wrong there'):
        make(tmp_path / 'a.txt', tokenizer='bpe:300', num_proc=2)


def children_of(pid):
    with open(f'/proc/{pid}/task/{pid}/children') as f:
        return [int(child) for child in f.read().split()]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/task'), reason='looks for processes in /proc')
def test_killed_at_any_of_twenty_moments_it_leaves_nothing_that_training_accepts(tmp_path):
    """Nor processes; and the next attempt gives the bytes of an undisturbed one."""
    import train
    text = ''.join(Path(path).read_bytes().decode() for _, path in stdlib_files())
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8', newline='')
    command = [sys.executable, 'prepare.py', str(tmp_path / 'a.txt'), '--tokenizer=bpe:300', '--num_proc=2']

    def start(folder):
        return subprocess.Popen([*command, f'--data_dir={folder}'], cwd=ROOT, stdout=subprocess.DEVNULL)
    began = time.monotonic()
    assert start(tmp_path / 'whole').wait() == 0
    length = time.monotonic() - began
    whole = contents(tmp_path / 'whole')
    rng = random.Random(0)
    for _ in range(20):
        process = start(tmp_path / 'data')
        time.sleep(rng.uniform(0, length))
        helpers = children_of(process.pid) if process.poll() is None else []
        process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        process.wait()
        if (tmp_path / 'data' / 'a').exists():
            assert contents(tmp_path / 'data') == whole  # it was done before
            break
        for name in os.listdir(tmp_path / 'data') if (tmp_path / 'data').exists() else ():
            with pytest.raises(ValueError, match='being written'):
                train.main([f'--data_dir={tmp_path / "data"}', f'--dataset={name}', f'--out_dir={tmp_path / "out"}'])
        deadline = time.monotonic() + 5
        while any(os.path.exists(f'/proc/{pid}') for pid in helpers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(os.path.exists(f'/proc/{pid}') for pid in helpers), 'its processes live on'
    assert start(tmp_path / 'data').wait() == 0
    assert contents(tmp_path / 'data') == whole


def test_two_commands_do_not_write_one_dataset(tmp_path, make):
    pytest.importorskip('fcntl')
    (tmp_path / 'a.txt').write_text('text ' * 9)
    with partial_folder(str(tmp_path / 'data' / 'x')), \
            pytest.raises(ValueError, match=r'another process is writing .*x\.partial'):
        make(tmp_path / 'a.txt')
    make(tmp_path / 'a.txt')


# -----------------------------------------------------------------------------
# adding to a dataset

def test_what_is_appended_stands_behind_what_was_there(tmp_path, make):
    (tmp_path / 'a.txt').write_text('first document, cut in two')
    one, before = make(tmp_path / 'a.txt')
    (tmp_path / 'b.jsonl').write_bytes(as_jsonl([{'text': f'row {i}'} for i in range(9)]))
    found, meta = make(tmp_path / 'b.jsonl', append=True)
    assert found['train'][0] == one['train'][0] and found['val'][0] == one['val'][0]
    assert sorted(found['train'][1:] + found['val'][1:]) == [f'row {i}' for i in range(9)]
    assert sum(meta['splits'][s]['documents'] for s in ('train', 'val')) == 11
    assert sum(meta['splits'][s]['bytes'] for s in ('train', 'val')) == 26 + 9 * 5
    assert meta['source'] == f'{before["source"]}, {tmp_path / "b.jsonl"}'
    (tmp_path / 'c.txt').write_text('the last one is cut, too')
    found, meta = make(tmp_path / 'c.txt', append=True)
    assert found['train'][-1] + found['val'][-1] == 'the last one is cut, too'
    assert os.listdir(tmp_path / 'data') == ['x']


def test_empty_files_are_no_documents(tmp_path, make):
    (tmp_path / 'a').mkdir()
    for name, text in (('1.txt', 'one'), ('2.txt', ''), ('3.txt', 'three'), ('4.txt', '')):
        (tmp_path / 'a' / name).write_text(text)
    found, meta = make(tmp_path / 'a', val_fraction=0.5)
    assert sorted(found['train'] + found['val']) == ['one', 'three']
    assert sum(meta['splits'][s]['documents'] for s in ('train', 'val')) == 2


def test_a_json_file_that_is_no_list_of_rows_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in (('a.json', '{"data": [{"text": "some"}]}'),
                          ('b.json', '[{"text": "some text"}, {"text": "of rows"}]')):
        (tmp_path / name).write_text(content)
        prepare.main([name])
        assert ('is no list of rows' in capsys.readouterr().err) == (name == 'a.json')


def test_a_validation_source_without_text_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.txt').write_text('some text')
    (tmp_path / 'empty.txt').write_text('')
    with pytest.raises(ValueError, match=r'^empty\.txt holds no text$'):
        prepare.main(['a.txt', '--val=empty.txt'])


def test_a_dataset_that_is_replaced_by_another_is_told(tmp_path, capsys, monkeypatch):
    """Two files may have one name; made again from the same, it is nothing to tell."""
    monkeypatch.chdir(tmp_path)
    for folder in ('a', 'b'):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'book.txt').write_text(folder * 100)
    told = []
    for source in ('a/book.txt', 'a/book.txt', 'b/book.txt'):
        prepare.main([source])
        told.append('made from a/book.txt, is replaced' in capsys.readouterr().out)
    assert told == [False, False, True]
    with pytest.raises(ValueError):
        prepare.main(['nowhere.txt', '--name=book'])
    assert 'is replaced' not in capsys.readouterr().out
    (tmp_path / 'data' / 'book' / 'meta.json').write_text('{')
    prepare.main(['a/book.txt'])
    assert read_meta(str(tmp_path / 'data' / 'book'))['source'] == 'a/book.txt'


def test_the_command_that_comes_next_can_be_typed(tmp_path, capsys):
    (tmp_path / 'a b.txt').write_text('text ' * 900)
    prepare.main([str(tmp_path / 'a b.txt'), f'--data_dir={tmp_path}/my data'])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].split(': ')[1])
    assert command[:3] == ['python', 'train.py', 'config/quickstart.py']
    assert train.main([*command[2:], '--max_iters=1', '--compile=False', f'--out_dir={tmp_path}/out',
                       '--eval_tokens=1024']) == 0


def test_what_cannot_be_appended(tmp_path, make):
    (tmp_path / 'a.txt').write_text('abc' * 20)
    (tmp_path / 'b.txt').write_text('abcd' * 20)
    with pytest.raises(ValueError, match='does not exist, so nothing can be added to it'):
        make(tmp_path / 'a.txt', append=True)
    make(tmp_path / 'a.txt', tokenizer='char')
    before = contents(tmp_path / 'data' / 'x')
    with pytest.raises(ValueError, match="characters 'd' do not occur"):
        make(tmp_path / 'b.txt', append=True)
    with pytest.raises(ValueError, match='takes the tokenizer of the dataset'):
        make(tmp_path / 'a.txt', append=True, tokenizer='char')
    assert contents(tmp_path / 'data' / 'x') == before
    with pytest.raises(ValueError, match='needs the --name'):
        prepare.main([str(tmp_path / 'a.txt'), '--append'])


# -----------------------------------------------------------------------------
# corpora by name, from a hub of our own

def at(dataset, path):
    return f'/datasets/{dataset}/resolve/main/{path}'


def test_wikitext_by_name(tmp_path, make, hub, gpt2, capsys):
    """Rows that are lines become the file again; the corpus brings its tokenizer and its validation set along."""
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')

    def written(text):
        out = io.BytesIO()
        rows = ['' if line == ' ' else line + '\n' for line in text.split('\n')[:-1]]
        parquet.write_table(pyarrow.table({'text': rows}), out)
        return out.getvalue()
    text = ' \n = Title = \n \n A line of text . \n Another , 3 @,@ 000 . \n \n = = Part = = \n' * 30
    for split in ('train', 'validation'):
        body = written(text * (3 if split == 'train' else 1))
        hub.answers[at('Salesforce/wikitext', f'wikitext-2-v1/{split}-00000-of-00001.parquet')] = (200, {}, body)
    found, meta = make('wikitext2', name='wikitext2')
    assert found == {'train': [text * 3], 'val': [text]} and meta['tokenizer']['name'] == 'gpt2'
    assert meta['splits']['val']['tokens'] == len(gpt2.encode(text))
    out = capsys.readouterr().out
    assert 'licence CC BY-SA 3.0; 2 files to download, about 7 MB, and 13 MB of disk' in out
    requests = len(hub.requests)
    make('wikitext2', name='again', tokenizer='byte')
    assert len(hub.requests) == requests  # what was downloaded stays


def test_tinystories_and_shards_by_name(tmp_path, make, hub, gpt2):
    stories = [f'Once upon a time there were {i} cats.' for i in range(30)]
    body = '\n<|endoftext|>\n'.join(stories).encode()
    for split in ('train', 'valid'):
        hub.answers[at('roneneldan/TinyStories', f'TinyStoriesV2-GPT4-{split}.txt')] = (200, {}, body)
    found, _ = make('tinystories', name='tinystories')
    assert found == {'train': stories, 'val': stories}
    tokens = [50256, *gpt2.encode('some text').tolist()] * 50
    for name in ('train_000001', 'val_000000'):
        hub.answers[at('kjj0/fineweb10B-gpt2', f'fineweb_{name}.bin')] = (200, {}, shard(tokens))
    _, meta = make('fineweb10b_gpt2', name='f', shards=1)
    assert meta['splits']['train']['tokens'] == meta['splits']['val']['tokens'] == len(tokens)


def test_every_corpus_says_what_it_is_and_its_cards_can_be_made():
    for name, corpus in CORPORA.items():
        assert corpus.license and corpus.about and corpus.download > 0 and corpus.bins > 0
        assert len(set(corpus.train)) == len(corpus.train) and how_to_make(name) == f'python prepare.py {name}'
        assert all(url.startswith(('HUB/datasets/', 'https://')) for url in (*corpus.train, *corpus.val))


def test_a_corpus_that_does_not_fit_the_disk_is_not_begun(make, monkeypatch, hub):
    monkeypatch.setattr(prepare.shutil, 'disk_usage', lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(ValueError, match=r'1,000 MB free, and openwebtext needs about 43,100 MB; .* or --shards'):
        make('openwebtext', name='o', tokenizer='byte')
    assert not hub.requests
    with pytest.raises(ValueError, match='is prepared alone'):
        make('openwebtext', 'stdlib', name='o')


# -----------------------------------------------------------------------------
# what a reviewer's hands found

def test_a_folder_that_holds_more_than_a_dataset_is_left_alone(tmp_path, make):
    """Preparing again replaces the folder, which must not cost a dataset below it, or the text it was made from."""
    (tmp_path / 'a.txt').write_text('text ' * 9)
    make(tmp_path / 'a.txt')
    make(tmp_path / 'a.txt', name='x/y')
    with pytest.raises(ValueError, match=r'x exists and was not made by this program: y; choose another --name'):
        make(tmp_path / 'a.txt')
    assert (tmp_path / 'data' / 'x' / 'y' / 'meta.json').exists()


def test_datasets_are_not_text(tmp_path, make, monkeypatch):
    (tmp_path / 'a.txt').write_text('text ' * 9)
    (tmp_path / 'b.txt').write_text('more ' * 9)
    make(tmp_path, name='all')
    assert sum(s['documents'] for s in make(tmp_path, name='all')[1]['splits'].values()) == 2
    with pytest.raises(ValueError, match='is a dataset, made already'):
        make(tmp_path / 'data' / 'all')


def test_folders_that_are_links_are_entered_once(tmp_path, make):
    (tmp_path / 'notes' / 'sub').mkdir(parents=True)
    (tmp_path / 'other').mkdir()
    for name in ('notes/a.txt', 'notes/sub/b.txt', 'other/c.txt'):
        (tmp_path / name).write_text(name)
    os.symlink(tmp_path / 'other', tmp_path / 'notes' / 'linked')
    os.symlink(tmp_path / 'notes', tmp_path / 'notes' / 'sub' / 'loop')
    assert every(make(tmp_path / 'notes')[0]) == ['notes/a.txt', 'notes/sub/b.txt', 'other/c.txt']


def test_a_file_is_read_once_however_often_it_is_named(tmp_path, make, capsys):
    for name in 'abcd':
        (tmp_path / f'{name}.txt').write_text(name)
    found, _ = make(tmp_path, f'{tmp_path}/*.txt', tmp_path / 'a.txt', val=tmp_path / 'b.txt')
    assert found['val'] == ['b'] and sorted(found['train']) == ['a', 'c', 'd']
    assert '6 files are named twice, or are validated on, and are left out' in capsys.readouterr().out
    with pytest.raises(ValueError, match='nothing is left to train on'):
        make(tmp_path / 'b.txt', val=tmp_path / 'b.txt')


def test_the_way_a_folder_is_written_does_not_choose_what_is_held_out(tmp_path, make, monkeypatch):
    for folder in ('one', 'two'):
        (tmp_path / folder).mkdir()
        for i in range(9):
            (tmp_path / folder / f'{i}.txt').write_text(f'{folder} {i}')
    monkeypatch.chdir(tmp_path)
    first, _ = make('one', 'two')
    assert make('one/', tmp_path / 'two', name='y')[0] == first


def test_most_of_the_text_is_never_held_out(tmp_path, make):
    (tmp_path / 'large.txt').write_text('large ' * 2000)
    (tmp_path / 'small.txt').write_text('small')
    for seed in range(6):
        found, _ = make(tmp_path, seed=seed)
        assert found['val'] == ['small']
    (tmp_path / 'small.txt').write_text('')
    with pytest.raises(ValueError, match=r'no text of .* would be validated on; name a validation source'):
        make(tmp_path)


@pytest.mark.parametrize('size', [1, 200, -1])
def test_a_zst_file_that_was_cut_is_damaged(tmp_path, make, size):
    zstandard = pytest.importorskip('zstandard')
    (tmp_path / 'a.txt.zst').write_bytes(zstandard.compress(os.urandom(300_000).hex().encode())[:size])
    with pytest.raises(ValueError, match=r'a\.txt\.zst is damaged'):
        make(tmp_path / 'a.txt.zst')


def test_what_only_looks_like_rows_is_a_text(tmp_path, make, capsys):
    (tmp_path / 'a.json').write_text('{braces}\n{and more}\n' * 9)
    found, _ = make(tmp_path / 'a.json')
    assert ''.join(found['train'] + found['val']).startswith('{braces}')
    assert 'is no list of rows' in capsys.readouterr().err


def test_a_file_without_a_size_is_read(make):
    if not os.path.exists('/proc/cpuinfo'):
        pytest.skip('no /proc here')
    found, _ = make('/proc/cpuinfo', tokenizer='bpe:300')
    assert 'processor' in found['train'][0]


def test_a_name_beside_a_dataset_that_is_being_written(tmp_path, make):
    """It would go when that one is done."""
    (tmp_path / 'a.txt').write_text('abc' * 99)
    for name in ('x.partial', 'x.partial.old', 'x.partial.7'):
        with pytest.raises(ValueError, match='is a dataset that is being written'):
            make(tmp_path / 'a.txt', name=name)
    (tmp_path / 'data' / 'x.partial.7').mkdir(parents=True)
    (tmp_path / 'data' / 'x.partial.8.stdin').write_text('what another command has read')
    make(tmp_path / 'a.txt')
    assert sorted(os.listdir(tmp_path / 'data')) == ['x', 'x.partial.8.stdin']


@pytest.mark.parametrize('raw, words', [
    (b'text,label\nHello, world,1\n', r'a\.csv, line 2: 1 values more than the head has fields'),
    (b'text,label\n"Hello,1\nsecond,2\n', r'a\.csv, line \d: unexpected end of data')])
def test_a_csv_that_would_lose_text_is_refused(tmp_path, make, raw, words):
    (tmp_path / 'a.csv').write_bytes(raw)
    with pytest.raises(ValueError, match=words):
        make(tmp_path / 'a.csv')


def test_json_files_that_are_not_what_they_seem(tmp_path, make):
    (tmp_path / 'a.json').write_bytes(as_jsonl([{'text': t} for t in ROWS]))  # rows in lines, by another name
    assert every(make(tmp_path / 'a.json')[0]) == sorted(ROWS)
    (tmp_path / 'b.json').write_text('["a", "b", "c"]["d"] junk')
    with pytest.raises(ValueError, match='goes on behind the end of its list, after element 3'):
        make(tmp_path / 'b.json')


def test_standard_input_into_a_place_that_is_not_there_yet(tmp_path):
    command = [sys.executable, 'prepare.py', '-', '--name=deep/x', f'--data_dir={tmp_path}/new']
    subprocess.run(command, input=b'words ' * 50, cwd=ROOT, check=True, capture_output=True)
    assert os.listdir(tmp_path / 'new' / 'deep') == ['x']
    done = subprocess.run([*command, '-'], input=b'', cwd=ROOT, check=False, capture_output=True)
    assert b'standard input can be read once only' in done.stderr


@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='has no pipes with names')
def test_a_pipe_is_read_like_standard_input(tmp_path):
    command = f'{sys.executable} prepare.py <(printf "words %.0s" 1 2 3 4) --name=x --data_dir={tmp_path}'
    subprocess.run(['bash', '-c', command], cwd=ROOT, check=True, capture_output=True)
    assert sum(s['bytes'] for s in read_meta(str(tmp_path / 'x'))['splits'].values()) == 24


def test_appending_proves_what_is_there(tmp_path, make, gpt2):
    (tmp_path / 'a.txt').write_text('some text ' * 40)
    make(tmp_path / 'a.txt')
    (tmp_path / 's.bin').write_bytes(shard([50256, 100, 101] * 999))
    with pytest.raises(ValueError, match=r"shards hold GPT-2's tokens, and .*x has another tokenizer"):
        make(tmp_path / 's.bin', append=True)
    with open(tmp_path / 'data' / 'x' / 'train.bin', 'r+b') as f:
        f.truncate(100)
    with pytest.raises(ValueError, match=r'train\.bin is not what meta\.json says of it'):
        make(tmp_path / 'a.txt', append=True)


@pytest.mark.parametrize('settings, words', [
    (dict(shards=1), 'is for a corpus by name'), (dict(text_field='a'), "text_field='a' acts on rows, and there"),
    (dict(template='chatml'), "template='chatml' acts on rows"), (dict(name='a,b'), 'cannot be called'),
    (dict(name='downloads'), 'cannot be called'), (dict(name='C:x'), 'must be a name below'),
    (dict(tokenizer='gpt2:x'), 'is unknown'), (dict(tokenizer='byte:5'), 'is unknown'),
    (dict(val='shakespeare'), 'is a corpus by name, which is prepared alone'),
    (dict(separator='===='), "does '====' not occur in it"), (dict(inspect=True, seed=3), 'leave out seed'),
    (dict(template='plain', text_field='x'), 'leave out one of them')])
def test_settings_that_would_do_nothing_or_harm_are_refused(tmp_path, make, settings, words):
    (tmp_path / 'a.txt').write_text('text ' * 9)
    with pytest.raises(ValueError, match=words):
        make(tmp_path / 'a.txt', **settings)
    assert not (tmp_path / 'data').exists() or os.listdir(tmp_path / 'data') == []


def test_separator_acts_on_text_alone(tmp_path, make):
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl([{'text': t} for t in ROWS]))
    with pytest.raises(ValueError, match="separator='x' acts on text, and there is none"):
        make(tmp_path / 'a.jsonl', separator='x')


def test_archives_are_named(tmp_path, make):
    (tmp_path / 'a.tar.gz').write_bytes(gzip.compress(b'text'))
    with pytest.raises(ValueError, match=r'a\.tar\.gz is an archive; unpack it'):
        make(tmp_path / 'a.tar.gz')


def test_fewer_ids_than_asked_for_are_told(tmp_path, make, capsys):
    (tmp_path / 'a.txt').write_text('abcabd ' * 20)
    _, meta = make(tmp_path / 'a.txt', tokenizer='bpe:1000')
    assert f'gives no more than {meta["vocab_size"]} ids, fewer than the 1,000 asked for' in capsys.readouterr().out


@pytest.mark.parametrize('separator', ['\n---\n', '\n\n'])
@pytest.mark.parametrize('size', [1, 2, 3, 7])
def test_a_separator_may_lie_across_blocks_and_hold_line_ends(separator, size):
    text = separator.join(['one\ntwo', '', 'three', 'four'])
    pieces = pieces_of((text[i:i + size] for i in range(0, len(text), size)), None, separator)
    assert [piece.parts[0][0] for piece in pieces] == ['one\ntwo', 'three', 'four']


def test_inspecting_what_is_damaged(tmp_path, make):
    (tmp_path / 'a.txt').write_text('text ' * 9)
    make(tmp_path / 'a.txt')
    folder = tmp_path / 'data' / 'x'

    def inspect():
        prepare.main(['--inspect', 'x', f'--data_dir={tmp_path}/data'])
    (folder / 'train.mask.bin').write_bytes(b'1')
    with pytest.raises(ValueError, match='has 1 bytes for 40 tokens'):
        inspect()
    (folder / 'train.bin').write_bytes(b'123')
    with pytest.raises(ValueError, match='has 3 bytes, which is no whole number of uint16; prepare it again'):
        inspect()
    for name in ('train.bin', 'val.bin'):
        os.remove(folder / name)
    with pytest.raises(ValueError, match='holds neither'):
        inspect()
