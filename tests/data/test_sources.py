"""A source as the command line names it -> files: folders, patterns, URLs, streams, corpora by name."""

import io
import os
from types import SimpleNamespace

import pytest
from conftest import contents

from hotloop.data import sources as sources_room
from hotloop.data.documents import ReadConfig, documents_in
from hotloop.data.sources import (
    CORPORA,
    check_kinds,
    files_of,
    missing_dataset,
    open_corpus,
    stdlib_files,
)


@pytest.fixture
def files(tmp_path):
    """files(source, **reading) -> [(name, kind)] of its files."""
    def run(source, **reading):
        spool = str(tmp_path / 'spool')
        found = files_of(str(source), ReadConfig(**reading), str(tmp_path / 'data'), spool)
        assert all(os.path.isfile(file.path) for file in found)
        return [(file.name, file.kind) for file in found]
    return run


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


# -----------------------------------------------------------------------------
# files and folders

@pytest.mark.parametrize('name, kind', [
    ('a.txt', 'text'), ('a', 'text'), ('a.unknown', 'text'), ('A.TXT.GZ', 'text'), ('a.jsonl', 'jsonl'),
    ('a.ndjson.xz', 'jsonl'), ('a.json', 'json'), ('a.json.zst', 'json'), ('a.csv.bz2', 'csv'),
    ('a.tsv', 'csv'), ('a.parquet', 'parquet')])
def test_the_name_decides_the_kind_unless_the_settings_do(tmp_path, files, name, kind):
    make(tmp_path, name)
    assert files(tmp_path / name) == [(name, kind)]
    assert files(tmp_path / name, format='jsonl') == [(name, 'jsonl')]


@pytest.mark.parametrize('name', ['a.tar.gz', 'a.tgz', 'a.zip', 'b.tar'])
def test_an_archive_is_refused(tmp_path, files, name):
    make(tmp_path, name)
    with pytest.raises(ValueError, match=f'{name} is an archive; unpack it, and name the folder'):
        files(tmp_path / name)


def test_a_folder_is_its_text_files_in_order(tmp_path, files, capsys):
    """Hidden files and datasets are not entered; another format takes all files."""
    make(tmp_path, 'b.txt', 'a/z.md', 'a/rows.jsonl.gz', 'a/.hidden.txt', '.git/config.txt', 'image.png',
         'shard.bin', 'data/x/meta.json', 'data/x/train.bin', 'data/x/notes.txt')
    assert files(tmp_path) == [('a/rows.jsonl.gz', 'jsonl'), ('a/z.md', 'text'), ('b.txt', 'text')]
    assert 'left out 2 files without a known suffix;' in capsys.readouterr().err
    assert [name for name, _ in files(tmp_path, format='text')] == [
        'a/rows.jsonl.gz', 'a/z.md', 'b.txt', 'image.png', 'shard.bin']
    with pytest.raises(ValueError, match='is a dataset; train on it, or prepare what it was made from'):
        files(tmp_path / 'data' / 'x')


@pytest.mark.parametrize('name, format', [('image.png', 'auto'), ('a.txt', 'functions'), ('.hidden', 'text')])
def test_a_folder_without_files_to_read(tmp_path, files, name, format):
    make(tmp_path, name)
    with pytest.raises(ValueError, match=f"contains no files to read with format='{format}'"):
        files(tmp_path, format=format)


def test_linked_folders_are_entered_once(tmp_path, files):
    make(tmp_path, 'notes/a.txt', 'notes/sub/b.txt', 'other/c.txt')
    os.symlink(tmp_path / 'other', tmp_path / 'notes' / 'linked')
    os.symlink(tmp_path / 'notes', tmp_path / 'notes' / 'sub' / 'loop')
    assert [name for name, _ in files(tmp_path / 'notes')] == ['a.txt', 'linked/c.txt', 'sub/b.txt']


def test_a_pattern_gives_names_below_what_all_files_share(tmp_path, files):
    """So that the same files are held out wherever the folder is."""
    make(tmp_path, 'one/a.txt', 'one/sub/b.md', 'two/a.txt')
    expected = [('one/a.txt', 'text'), ('one/sub/b.md', 'text'), ('two/a.txt', 'text')]
    assert files(f'{tmp_path}/[ot]*/**/*.*') == expected
    make(tmp_path, '[a].txt')
    assert files(tmp_path / '[a].txt') == [('[a].txt', 'text')]  # looks like a pattern


@pytest.mark.parametrize('source', ['nowhere.txt', 'no/such/folder/', 'shakespeare', '*.pdf'])
def test_a_source_that_is_not_there(files, source):
    words = 'prepared alone' if source == 'shakespeare' else 'is not a file, a folder or a pattern that'
    with pytest.raises(ValueError, match=words):
        files(source)
    with pytest.raises(ValueError, match=r'tinystorys is not .*; did you mean tinystories\?'):
        files('tinystorys')


def test_the_standard_library_in_a_fixed_order_without_test_suites():
    files = stdlib_files()
    names = [name for name, _ in files]
    assert names == sorted(set(names)) and all(name.endswith('.py') for name in names)
    assert {'argparse.py', 'json/decoder.py', 'unittest/case.py'} <= set(names)
    parts = {part for name in names for part in name.split('/')}
    assert not parts & {'test', 'tests', 'site-packages', '__pycache__', 'encodings', 'pydoc_data'}
    assert not [name for name in names if os.path.basename(name).startswith(('test_', '_sysconfigdata'))]
    assert 5e6 < sum(os.path.getsize(path) for _, path in files) < 5e7
    for _, path in files:
        with open(path, encoding='utf-8') as f:
            f.read()  # all of it is UTF-8


# -----------------------------------------------------------------------------
# streams and URLs

def test_standard_input_is_copied(tmp_path, files, monkeypatch):
    """Its name is the same wherever the spool is."""
    monkeypatch.setattr('sys.stdin', SimpleNamespace(buffer=io.BytesIO(b'from a pipe')))
    assert files('-', format='jsonl') == [('stdin', 'jsonl')]
    assert (tmp_path / 'spool').read_bytes() == b'from a pipe'
    monkeypatch.setattr('sys.stdin', None)
    with pytest.raises(ValueError, match='standard input is closed'):
        files('-')


def test_a_url_is_downloaded_once(tmp_path, files, hub):
    hub.answers['/a/tale.jsonl?raw=true'] = (200, {}, b'{"text": "words"}')
    url = os.environ['HF_ENDPOINT'].rstrip('/') + '/a/tale.jsonl?raw=true'
    assert files(url) == files(url) == [('tale.jsonl', 'jsonl')]
    (name, body), = contents(tmp_path / 'data' / 'downloads').items()
    assert name.endswith('-tale.jsonl') and body == b'{"text": "words"}' and len(hub.requests) == 1


# -----------------------------------------------------------------------------
# corpora by name

def settings(tmp_path, **options):
    defaults = {'data_dir': str(tmp_path), 'shards': None, 'val': None, 'val_fraction': None}
    return SimpleNamespace(**{**defaults, **options})


def test_a_corpus_comes_from_the_hub_with_its_validation_files(tmp_path, hub, capsys):
    for name in ('train', 'valid'):
        path = f'/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-{name}.txt'
        hub.answers[path] = (200, {}, name.encode())
    train, val = open_corpus('tinystories', settings(tmp_path))
    assert [(file.name, file.kind) for file in train + val] == [
        ('TinyStoriesV2-GPT4-train.txt', 'text'), ('TinyStoriesV2-GPT4-valid.txt', 'text')]
    with open(train[0].path, 'rb') as f:
        assert f.read() == b'train'
    out = capsys.readouterr().out
    assert 'license CDLA-Sharing-1.0; 2 files to download, about 2,300 MB; needs 3,400 MB of disk' in out
    for options in (dict(val='a.txt'), dict(val_fraction=0.1)):
        train, val = open_corpus('tinystories', settings(tmp_path, **options))
        assert len(train) == 1 and val == []
    assert len(hub.requests) == 2  # downloads stay


def test_lines_of_wikitext_become_one_document(tmp_path, hub):
    pyarrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    for split in ('train', 'validation'):
        out = io.BytesIO()
        parquet.write_table(pyarrow.table({'text': ['', f' = {split} = \n', '']}), out)
        path = f'/datasets/Salesforce/wikitext/resolve/main/wikitext-2-v1/{split}-00000-of-00001.parquet'
        hub.answers[path] = (200, {}, out.getvalue())
    train, val = open_corpus('wikitext2', settings(tmp_path))
    for files, split in ((train, 'train'), (val, 'validation')):
        for reading in (ReadConfig(), ReadConfig(text_field='page')):  # a field of the rows of --val
            piece, = documents_in(files, reading)
            assert piece.parts == [(f' \n = {split} = \n \n', False, True)]


@pytest.mark.parametrize('kinds', [{'joined'}, {'text'}])
@pytest.mark.parametrize('settings', [dict(text_field='page'), dict(template='chatml')])
def test_settings_of_rows_need_rows(kinds, settings):
    with pytest.raises(ValueError, match='applies to rows, and wikitext2 has none'):
        check_kinds(kinds, ReadConfig(**settings), 'wikitext2')
    check_kinds(kinds | {'jsonl'}, ReadConfig(**settings), 'wikitext2')


def test_a_corpus_that_does_not_fit_on_the_disk_is_not_begun(tmp_path, monkeypatch, hub):
    monkeypatch.setattr(sources_room.shutil, 'disk_usage', lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(ValueError, match=r'1,000 MB free, .*openwebtext needs 43,100 MB;.* fewer --shards'):
        open_corpus('openwebtext', settings(tmp_path))
    assert not hub.requests


def test_every_corpus_says_what_it_is():
    for name, corpus in CORPORA.items():
        assert corpus.license and corpus.about and corpus.download > 0 and corpus.bins > 0
        assert len(set(corpus.train)) == len(corpus.train)
        assert missing_dataset('x', name, 'data').endswith(f'make it with: python prepare.py {name}')
        assert all(url.startswith(('HUB/datasets/', 'https://')) for url in (*corpus.train, *corpus.val))
    assert missing_dataset('x', 'mine', 'd').endswith('FILE_OR_FOLDER --name=mine --data_dir=d')
