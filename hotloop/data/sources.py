"""Turn a source named on the command line into files, in a fixed order."""

import glob
import hashlib
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass, replace
from typing import NamedTuple

from hotloop.data.documents import OPENERS, ROWS, SEPARATOR, text_blocks
from hotloop.data.download import download, hub_folder
from hotloop.system.files import optional
from hotloop.system.text import counted, script, shell


class File(NamedTuple):
    path: str
    name: str  # decides whether the document is held out, so it is the same on every machine
    kind: str  # a format; 'texts': one with separators; 'joined': rows that are lines of one text


@dataclass(frozen=True)
class Corpus:
    """Where the files of a corpus are, and what to know before downloading them."""
    about: str = ''
    license: str = ''
    repository: str | None = None  # of the hub
    train: tuple = ()  # paths in the repository, or URLs
    val: tuple = ()
    download: float = 0.0  # bytes to download, about
    tokenizer: str = 'gpt2'
    kind: str = 'text'  # of a File
    val_fraction: float | None = 0.1  # None: val lists the files


PLAIN = Corpus(tokenizer='byte')  # defaults of sources that are not a corpus
SHAKESPEARE = Corpus(
    'the plays of Shakespeare that nanoGPT trains on', 'public domain',
    train=('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',),
    download=1.1e6)
CORPORA = {
    'stdlib': Corpus('the source code of this Python', 'PSF-2.0', val_fraction=0.05,
                     tokenizer='bpe:1024'),  # best in the minutes of quickstart.py
    'shakespeare': SHAKESPEARE,
    'shakespeare_char': replace(SHAKESPEARE, tokenizer='char'),
    'wikitext2': Corpus(
        'Wikipedia, 2 million words, with a validation set', 'CC BY-SA 3.0', 'Salesforce/wikitext',
        train=('wikitext-2-v1/train-00000-of-00001.parquet',),
        val=('wikitext-2-v1/validation-00000-of-00001.parquet',),
        download=7e6, kind='joined', val_fraction=None),
    'wikitext103': Corpus(
        'Wikipedia, 100 million words, with a validation set', 'CC BY-SA 3.0', 'Salesforce/wikitext',
        train=tuple(f'wikitext-103-v1/train-0000{i}-of-00002.parquet' for i in range(2)),
        val=('wikitext-103-v1/validation-00000-of-00001.parquet',),
        download=0.3e9, kind='joined', val_fraction=None),
    'tinystories': Corpus(
        'short stories by GPT-4 for small models, with a validation set', 'CDLA-Sharing-1.0',
        'roneneldan/TinyStories', train=('TinyStoriesV2-GPT4-train.txt',),
        val=('TinyStoriesV2-GPT4-valid.txt',),
        download=2.3e9, kind='texts', val_fraction=None),
    'openwebtext': Corpus(
        'a reproduction of the training data of GPT-2: 8 million web pages', 'CC0-1.0',
        'Skylion007/openwebtext',
        train=tuple(f'plain_text/train-{i:05d}-of-00080.parquet' for i in range(80)),
        download=25e9, kind='parquet', val_fraction=0.0005),
    'fineweb_edu': Corpus(
        'educational web pages, a sample of 10 billion tokens', 'ODC-By 1.0',
        'HuggingFaceFW/fineweb-edu',
        train=tuple(f'sample/10BT/{i:03d}_00000.parquet' for i in range(14)),
        download=28.5e9, kind='parquet', val_fraction=0.0005),
}
KINDS = {'.jsonl': 'jsonl', '.jsonlines': 'jsonl', '.ndjson': 'jsonl', '.json': 'json',
         '.csv': 'csv', '.tsv': 'csv', '.parquet': 'parquet'}
FOLDER_SUFFIXES = {  # of the files that a format reads in a folder; other formats read all
    'functions': ('.py',),
    'auto': (*KINDS, '.txt', '.text', '.md', '.rst', '.tex', '.org', '.log', '.html', '.htm', '.xml', '.css',
             '.toml', '.yaml', '.yml', '.ini', '.sql', '.sh', '.bat', '.py', '.pyi', '.c', '.h', '.cc',
             '.cpp', '.hpp', '.cu', '.cs', '.js', '.jsx', '.ts', '.tsx', '.java', '.kt', '.go', '.rs', '.rb',
             '.php', '.pl', '.lua', '.r', '.jl', '.hs', '.ml', '.scala', '.swift')}
FOLDER_SUFFIXES['text'] = FOLDER_SUFFIXES['auto']
DATASET_CARD = ('README.md', 'dataset_infos.json')  # beside the rows of a dataset of the hub
# below the standard library: test suites, installed packages and generated files
NOT_STDLIB = ('test', 'tests', 'idle_test', '__pycache__', 'site-packages', 'dist-packages',
              'encodings', 'pydoc_data', 'turtledemo', 'ensurepip')


# -----------------------------------------------------------------------------
# files

def files_under(folder, left_out=()):
    """
    List the paths of the files below a folder, sorted. Hidden files and folders, datasets, the
    folders left_out and those that a link leads to again are skipped.
    """
    def fail(error):
        raise ValueError(f'{folder} cannot be read: {error}')
    found, visited = [], set()
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(here)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        # sorted: on every machine it is the same path by which a file is found first
        folders[:] = sorted(name for name in folders if name not in left_out and name[0] != '.')
        if {'meta.json', 'train.bin'} <= set(names):
            folders.clear()
            continue
        found += [os.path.join(here, name) for name in names if name[0] != '.']
    return sorted(path for path in found if os.path.isfile(path))  # no pipes, no dangling links


def stdlib_files():
    """List the source files of the running Python, about 10 MB of real text on every machine."""
    paths = files_under(sysconfig.get_path('stdlib'), NOT_STDLIB)
    return [path for path in paths if path.endswith('.py') and '_sysconfigdata' not in path]


def files_in_folder(folder, format):
    """List the files in a folder that a format reads."""
    suffixes = FOLDER_SUFFIXES.get(format)
    found = files_under(folder)
    if any(path.endswith('.arrow') for path in found):
        raise ValueError(f'{folder} holds .arrow files, as save_to_disk() of datasets writes; its '
                         'to_parquet(FILE) writes what is read here')
    paths = [path for path in found if not suffixes or suffix_of(path) in suffixes]
    if any(suffix_of(path) in ('.parquet', '.jsonl') for path in paths):
        paths = [path for path in paths if os.path.basename(path) not in DATASET_CARD]
    if not paths:
        raise ValueError(f'{folder} contains no files to read with format={format!r}; a pattern reads files '
                         f'of another name: {shell(os.path.join(folder, "**", "*"))}')
    if len(paths) < len(found) and format != 'functions':
        print(f'{folder}: {counted(len(found) - len(paths), "file")} of other names left out; a pattern '
              f'reads them: {shell(os.path.join(folder, "**", "*.SUFFIX"))}', file=sys.stderr)
    return paths


def suffix_of(path):
    """Return the suffix of a file's name, without a compression suffix, in lower case."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in OPENERS:
        suffix = os.path.splitext(stem)[1]
    return suffix


def download_source(url, data_dir):
    """Return the path of the file at a URL, which is downloaded once to data_dir/downloads."""
    base = os.path.basename(re.split('[?#]', url)[0].rstrip('/')) or 'index'
    name = hashlib.sha256(url.encode()).hexdigest()[:8] + '-' + re.sub(r'[^\w.-]', '_', base)
    return download(url, os.path.join(data_dir, 'downloads', name))


def open_file(path, name, format='auto'):
    """Make the File of a path. Its kind is the format or, if auto, follows its suffix and content."""
    if re.search(r'\.(tar(\.\w+)?|tgz|zip|7z|rar|arrow|pdf|docx?|xlsx?|pptx?|odt|epub|mobi)$', name.lower()):
        raise ValueError(f'{path} cannot be read; unpack it, or convert it to text or rows')
    kind = format
    if format == 'auto':
        kind = KINDS.get(suffix_of(name), 'text')
    if kind == 'text' or (format == 'auto' and kind == 'json'):
        first = next(text_blocks(path), '')
        if kind == 'text' or not ROWS.match(first):  # package.json, for example
            kind = 'text'
            if SEPARATOR in map(str.strip, first.split('\n')):
                kind = 'texts'
    return File(path, name, kind)


def looks_like_json(path):
    """Test whether a text begins as JSON does."""
    return re.match(r'\s*[\[{]\s*["\[{]', next(text_blocks(path), ''))


def files_of(source, format, data_dir, spool):
    """
    List the Files of a source: stdlib, a URL (which is downloaded), a folder, a file, a glob
    pattern, or - (which is copied to the file spool, because it can be read only once).
    """
    if source == '-':
        with open(spool, 'wb') as f:
            shutil.copyfileobj(sys.stdin.buffer, f, 1 << 20)
        return [open_file(spool, 'stdin', format)]
    if source.startswith(('http://', 'https://')):
        path = download_source(source, data_dir)
        return [open_file(path, os.path.basename(path).split('-', 1)[1], format)]
    if source == 'stdlib':
        base = sysconfig.get_path('stdlib')
        paths = stdlib_files()
    elif os.path.isdir(source):
        base = source
        paths = files_in_folder(source, format)
    else:
        matches = [source] if os.path.exists(source) else glob.glob(source, recursive=True)
        paths = sorted(path for path in matches if os.path.isfile(path))
        if not paths:
            raise ValueError(f'{source} is not a file, a folder or a pattern that matches files; the '
                             f'corpora, of which one is prepared alone: {", ".join(CORPORA)}')
        base = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [open_file(path, os.path.relpath(path, base), format) for path in paths]


def all_files(sources, format, data_dir, spool):
    """
    List the Files of all sources. With several, a file's name begins with its source, because files
    of two may share a name. Empty texts are left out, unless there is nothing else.
    """
    files = []
    base = os.path.commonpath([os.path.abspath(source) for source in sources])
    for source in sources:
        for file in files_of(source, format, data_dir, spool):
            if len(sources) > 1:
                folder = os.path.relpath(os.path.abspath(source), base)
                file = file._replace(name=f'{folder}/{file.name}')
            files.append(file)
    files = [file for file in files if file.kind != 'text' or os.path.getsize(file.path)] or files
    if format == 'auto' and all(file.kind == 'text' and looks_like_json(file.path) for file in files):
        print(f'note: {sources[0]} looks like JSON and is read as plain text; --format=jsonl reads an object '
              'on each line, --format=json a list of objects, or one', file=sys.stderr)
    return files


# -----------------------------------------------------------------------------
# corpora by name

def find_corpus(sources):
    """Return the Corpus that the sources name: NAME, or NAME:2 for two of its files; else PLAIN."""
    name, _, number = sources[0].partition(':')
    if len(sources) > 1 or name not in CORPORA:
        return PLAIN
    corpus = CORPORA[name]
    if number:
        if not number.isdecimal() or int(number) == 0 or not corpus.train:
            raise ValueError(f'{sources[0]}: a number of files follows the colon of a corpus of several, '
                             'such as fineweb_edu:2')
        train = corpus.train[:int(number)]
        corpus = replace(corpus, train=train, download=corpus.download * len(train) / len(corpus.train))
    return corpus


def open_corpus(corpus, paths, data_dir):
    """Download files of a corpus: its `train` or its `val`. Returns the Files."""
    if corpus.kind in ('joined', 'parquet'):
        optional('pyarrow', 'reads parquet files')  # before gigabytes are downloaded
    if not corpus.repository:
        return [File(download_source(url, data_dir), os.path.basename(url), corpus.kind) for url in paths]
    folder = os.path.join(data_dir, 'downloads', os.path.basename(corpus.repository))
    hub_folder(corpus.repository, list(paths), 'dataset', folder)
    return [File(os.path.join(folder, path), os.path.basename(path), corpus.kind) for path in paths]


def missing_dataset(path, name, data_dir):
    """Explain how to make a dataset whose file or folder does not exist."""
    script_of_data = os.path.join(data_dir, name, 'prepare.py')  # of a clone of nanoGPT
    if os.path.exists(script_of_data):
        return f'{path} does not exist; make it with: python {shell(script_of_data)}'
    if os.path.exists(os.path.join(name, 'train.bin')):
        folder, name = os.path.split(os.path.abspath(name))
        words = shell(f'--data_dir={os.path.relpath(folder)}', f'--dataset={name}')
        return f'{path} does not exist; a dataset is named without its folder: {words}'
    words = name
    if name not in CORPORA:
        words = f'FILE_OR_FOLDER --name={name}'
    if data_dir != 'data':
        words += ' ' + shell(f'--data_dir={data_dir}')
    return f'{path} does not exist; make it with: python {shell(script("prepare.py"))} {words}'
