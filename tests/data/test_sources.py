"""A source as the command line names it -> files: folders, patterns, URLs, streams, corpora by name."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import contents, error_of
from test_download import answer

from hotloop.data.documents import documents_in
from hotloop.data.sources import (
    CORPORA,
    files_of,
    find_corpus,
    missing_dataset,
    open_corpus,
    stdlib_files,
)


@pytest.fixture
def files(tmp_path):
    """files(source, format) -> [(name, kind)] of its files."""
    def run(source, format='auto'):
        spool = str(tmp_path / 'spool')
        found = files_of(str(source), format, str(tmp_path / 'data'), spool)
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
    ('a', 'text'), ('a.unknown', 'text'), ('a.ndjson.xz', 'jsonl'), ('a.json', 'json'), ('a.tsv', 'csv')])
def test_the_name_decides_the_kind_unless_the_settings_do(tmp_path, files, name, kind):
    make(tmp_path, name)
    if kind == 'json':  # package.json, for example, is a text
        (tmp_path / name).write_text('[{}]')
    assert files(tmp_path / name) == [(name, kind)]
    assert files(tmp_path / name, format='jsonl') == [(name, 'jsonl')]


def test_a_folder_is_its_text_files_in_order(tmp_path, files, capsys):
    """Hidden files and datasets are not entered; a format of rows takes all files."""
    make(tmp_path, 'b.txt', 'a/z.md', 'a/rows.jsonl', 'a/.hidden.txt', '.git/config.txt', 'image.png',
         'README.md', 'dataset_infos.json', 'shard.bin', 'data/x/meta.json', 'data/x/train.bin',
         'data/x/notes.txt')
    assert files(tmp_path) == [('a/rows.jsonl', 'jsonl'), ('a/z.md', 'text'), ('b.txt', 'text')]
    assert '4 files of other names left out' in capsys.readouterr().err
    assert len(files(tmp_path, format='text')) == 3
    assert [name for name, _ in files(tmp_path, format='jsonl')] == [
        'a/rows.jsonl', 'a/z.md', 'b.txt', 'image.png', 'shard.bin']


def test_a_folder_that_links_lead_to_again_is_read_once(tmp_path, files):
    """Two links to a folder above would otherwise be followed 2^40 times."""
    make(tmp_path, 'here/a.txt', 'here/sub/b.txt', 'elsewhere/c.txt')
    for name, target in (('up', '..'), ('again', '..'), ('other', tmp_path / 'elsewhere')):
        (tmp_path / 'here' / 'sub' / name).symlink_to(target)
    (tmp_path / 'here' / 'gone.txt').symlink_to('nowhere')  # is left out
    assert files(tmp_path / 'here') == [(name, 'text') for name in ('a.txt', 'sub/b.txt', 'sub/other/c.txt')]


def test_a_pattern_gives_names_below_what_all_files_share(tmp_path, files):
    """So that the same files are held out wherever the folder is."""
    make(tmp_path, 'one/a.txt', 'one/sub/b.md', 'two/a.txt')
    expected = [('one/a.txt', 'text'), ('one/sub/b.md', 'text'), ('two/a.txt', 'text')]
    assert files(f'{tmp_path}/[ot]*/**/*.*') == expected
    make(tmp_path, '[a].txt')
    assert files(tmp_path / '[a].txt') == [('[a].txt', 'text')]  # looks like a pattern


@pytest.mark.parametrize('source, words', [
    ('nowhere.txt', 'is not a file, a folder or a pattern'), ('a.tar.gz', 'unpack it, or convert it'),
    ('sheet.xlsx', 'convert it'),
    ('pictures', "no files to read with format='auto'"), ('set', 'no files to read'),
    ('saved', 'to_parquet')])
def test_a_source_without_files_to_read(tmp_path, monkeypatch, files, source, words):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, 'a.tar.gz', 'sheet.xlsx', 'pictures/image.png', 'set/meta.json', 'set/train.bin',
         'set/notes.txt', 'saved/data.arrow', 'saved/state.json')
    with pytest.raises(ValueError, match=words):
        files(source)


def test_the_standard_library_in_a_fixed_order_without_test_suites(files):
    names = [name for name, _ in files('stdlib')]
    assert names == sorted(set(names)) and all(name.endswith('.py') for name in names)
    assert {'argparse.py', 'json/decoder.py', 'unittest/case.py'} <= set(names)
    parts = {part for name in names for part in name.split('/')}
    assert not parts & {'test', 'tests', 'site-packages', '__pycache__', 'encodings', 'pydoc_data'}
    assert not [name for name in names if os.path.basename(name).startswith(('test_', '_sysconfigdata'))]
    assert 5e6 < sum(os.path.getsize(path) for path in stdlib_files()) < 5e7


def test_standard_input_is_copied(tmp_path, files, monkeypatch):
    """Its name is the same wherever the spool is."""
    monkeypatch.setattr('sys.stdin', SimpleNamespace(buffer=io.BytesIO(b'from a pipe')))
    assert files('-', format='jsonl') == [('stdin', 'jsonl')]
    assert (tmp_path / 'spool').read_bytes() == b'from a pipe'


def test_a_url_is_downloaded_once(tmp_path, files, server):
    server.script = [answer(b'{"text": "words"}')]
    url = server.url.replace('file.bin', 'a/tale.jsonl?raw=true')
    assert files(url) == files(url) == [('tale.jsonl', 'jsonl')]
    (name, body), = contents(tmp_path / 'data' / 'downloads').items()
    assert name.endswith('-tale.jsonl') and body == b'{"text": "words"}' and len(server.seen) == 1


# -----------------------------------------------------------------------------
# corpora by name

@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of datasets: repository[path] = bytes. Records what is asked for in `asked`."""
    hub = pytest.importorskip('huggingface_hub')
    stored = {}

    def snapshot_download(name, repo_type, allow_patterns, local_dir):
        assert repo_type == 'dataset'
        for path in allow_patterns:
            place = Path(local_dir, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(stored[name, path])
        return local_dir
    monkeypatch.setattr(hub, 'snapshot_download', snapshot_download)
    return stored


def test_some_files_of_a_corpus():
    one, five = find_corpus(['fineweb_edu:1']), find_corpus(['fineweb_edu:5'])
    assert (one.train, len(five.train)) == (('sample/10BT/000_00000.parquet',), 5)
    assert five.download == 5 * one.download and find_corpus(['fineweb_edu']) == CORPORA['fineweb_edu']
    assert find_corpus(['book.txt:1']).train == find_corpus(['fineweb_edu', 'a.txt']).train == ()
    for wrong in ('fineweb_edu:all', 'stdlib:1'):
        assert 'fineweb_edu:2' in error_of(find_corpus, [wrong])


def test_lines_of_wikitext_from_the_hub_become_one_document(tmp_path, repository):
    pyarrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    for split in ('train', 'validation'):
        out = io.BytesIO()
        parquet.write_table(pyarrow.table({'text': ['', f' = {split} = \n', '']}), out)
        path = f'wikitext-2-v1/{split}-00000-of-00001.parquet'
        repository['Salesforce/wikitext', path] = out.getvalue()
    for paths, split in ((CORPORA['wikitext2'].train, 'train'), (CORPORA['wikitext2'].val, 'validation')):
        piece, = documents_in(open_corpus(CORPORA['wikitext2'], paths, str(tmp_path)))
        assert piece.parts == [(f' \n = {split} = \n \n', False, True)]


def test_a_missing_dataset_is_a_command(tmp_path, monkeypatch):
    assert missing_dataset('x', 'wikitext2', 'data').endswith('make it with: python prepare.py wikitext2')
    assert missing_dataset('x', 'mine', 'd').endswith('FILE_OR_FOLDER --name=mine --data_dir=d')
    make(tmp_path, 'd/mine/train.bin', 'nano/shakespeare/prepare.py')
    monkeypatch.chdir(tmp_path)
    assert missing_dataset('x', 'd/mine', 'd').endswith('without its folder: --data_dir=d --dataset=mine')
    assert missing_dataset('x', 'shakespeare', 'nano').endswith('python nano/shakespeare/prepare.py')
