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

from configurator import did_you_mean
from hotloop.data.documents import OPENERS, standard_input
from hotloop.data.download import download, hub
from hotloop.system.files import counted, optional
from hotloop.system.text import shell


class File(NamedTuple):
    path: str
    name: str  # decides whether the document is held out, so it is the same on every machine
    kind: str  # a format of ReadConfig, or 'joined': rows that are the lines of one document


@dataclass(frozen=True)
class Corpus:
    """A corpus by name: where its files are, and what the user should know before downloading them."""
    about: str
    license: str
    train: tuple  # URLs
    val: tuple = ()
    download: float = 0.0  # bytes to download, about
    bins: float = 0.0  # bytes of the bins, about
    tokenizer: str = 'gpt2'
    kind: str = 'text'
    separator: str | None = None
    val_fraction: float = 0.1
    sha256: str | None = None  # for a server that sends no hash


def on_hub(dataset, *paths):
    """Name files of a dataset on the hub; HUB stands for hub(), which the environment decides."""
    return tuple(f'HUB/datasets/{dataset}/resolve/main/{path}' for path in paths)


SHAKESPEARE = Corpus(
    'the plays of Shakespeare that nanoGPT trains on', 'public domain',
    ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',), (),
    1.1e6, 0.7e6, sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')
CORPORA = {
    'shakespeare': SHAKESPEARE,
    'shakespeare_char': replace(SHAKESPEARE, tokenizer='char', bins=2.2e6),
    'wikitext2': Corpus(
        'Wikipedia, 2 million words, with a validation set', 'CC BY-SA 3.0',
        on_hub('Salesforce/wikitext', 'wikitext-2-v1/train-00000-of-00001.parquet'),
        on_hub('Salesforce/wikitext', 'wikitext-2-v1/validation-00000-of-00001.parquet'), 7e6, 6e6,
        kind='joined'),
    'wikitext103': Corpus(
        'Wikipedia, 100 million words, with a validation set', 'CC BY-SA 3.0',
        on_hub('Salesforce/wikitext', *(f'wikitext-103-v1/train-0000{i}-of-00002.parquet' for i in range(2))),
        on_hub('Salesforce/wikitext', 'wikitext-103-v1/validation-00000-of-00001.parquet'), 0.3e9, 0.25e9,
        kind='joined'),
    'tinystories': Corpus(
        'short stories by GPT-4 for small models, with a validation set', 'CDLA-Sharing-1.0',
        on_hub('roneneldan/TinyStories', 'TinyStoriesV2-GPT4-train.txt'),
        on_hub('roneneldan/TinyStories', 'TinyStoriesV2-GPT4-valid.txt'), 2.3e9, 1.1e9,
        separator='<|endoftext|>'),
    'openwebtext': Corpus(
        'a reproduction of the training data of GPT-2: 8 million web pages', 'CC0-1.0',
        on_hub('Skylion007/openwebtext', *(f'plain_text/train-{i:05d}-of-00080.parquet' for i in range(80))),
        (), 25e9, 18.1e9, kind='parquet', val_fraction=0.0005),
    'fineweb_edu': Corpus(
        'educational web pages, a sample of 10 billion tokens', 'ODC-By 1.0',
        on_hub('HuggingFaceFW/fineweb-edu', *(f'sample/10BT/{i:03d}_00000.parquet' for i in range(14))), (),
        28.5e9, 20e9, kind='parquet', val_fraction=0.0005),
}
PLAIN = Corpus('', '', (), tokenizer='byte')  # the defaults of sources that are no named corpus
STDLIB = replace(PLAIN, tokenizer='bpe:1024', val_fraction=0.05)  # best in the minutes of quickstart.py
URLS = ('http://', 'https://')
KINDS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'csv',
         '.parquet': 'parquet'}
TEXT_SUFFIXES = ('.txt', '.text', '.md', '.rst', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp', '.cu',
                 '.js', '.jsx', '.ts', '.tsx', '.java', '.kt', '.go', '.rs', '.rb', '.php', '.pl', '.lua',
                 '.r', '.jl', '.hs', '.ml', '.scala', '.swift', '.sql', '.html', '.htm', '.xml', '.css',
                 '.toml', '.yaml', '.yml', '.ini', '.tex', '.org', '.sh', '.bat', '.log')
FOLDER_SUFFIXES = tuple(f'{s}{c}' for s in (*TEXT_SUFFIXES, *KINDS) for c in ('', *OPENERS))


def corpus_of(sources, shards):
    """Return the Corpus that the sources are: a named one, STDLIB or PLAIN."""
    is_name = len(sources) == 1 and not os.path.exists(sources[0])
    corpus = PLAIN
    if is_name:
        corpus = CORPORA.get(sources[0], PLAIN)
    if shards and not corpus.train:
        raise ValueError(f'shards={shards} applies only to a named corpus: {", ".join(CORPORA)}')
    if sources == ['stdlib']:
        return STDLIB
    return corpus


def files_under(folder, suffixes, left_out=()):
    """
    List (relative path, path) of the files below a folder with one of the suffixes, sorted. Hidden
    files and folders, datasets and the folders left_out are skipped; links are followed; each
    folder is visited once.
    """
    def fail(error):
        raise ValueError(f'{error.filename} cannot be read: {error.strerror}') from None
    found = []
    seen = set()
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [f for f in sorted(folders) if f not in left_out and not f.startswith('.')]
        if os.path.realpath(here) in seen or {'meta.json', 'train.bin'} <= set(names):
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        for name in names:
            path = os.path.join(here, name)
            if name.lower().endswith(suffixes) and not name.startswith('.') and os.path.isfile(path):
                found.append((os.path.relpath(path, folder), path))
    return sorted(found)


def stdlib_files():
    """
    List (relative path, path) of the source of the running Python, about 10 MB of real text on
    every machine. Test suites, installed packages and generated files (codecs, topics of help())
    are left out.
    """
    left_out = ('test', 'tests', 'idle_test', '__pycache__', 'site-packages', 'dist-packages', 'encodings',
                'pydoc_data', 'turtledemo', 'ensurepip')
    files = files_under(sysconfig.get_path('stdlib'), ('.py',), left_out)
    return [(name, path) for name, path in files if not os.path.basename(name).startswith('_sysconfigdata')]


def open_file(path, name, reading):
    """Return the File of a path, of the kind that the settings or its name say."""
    if re.search(r'\.(tar(\.\w+)?|tgz|zip|7z|rar)$', name.lower()):
        raise ValueError(f'{name} is an archive; unpack it, and name the folder')
    stem, suffix = os.path.splitext(name.lower())
    if suffix in OPENERS:
        suffix = os.path.splitext(stem)[1]
    kind = reading.format
    if kind == 'auto':
        kind = KINDS.get(suffix, 'text')
    return File(path, name, kind)


def files_of(source, reading, data_dir, spool):
    """
    List the Files of a source: stdlib, a URL (which is downloaded), a folder, a file, a glob
    pattern, or - (which is copied to the file spool, because it can be read only once).
    """
    if source == 'stdlib':
        found = stdlib_files()
    elif source == '-':
        with open(spool, 'wb') as f:
            shutil.copyfileobj(standard_input(), f, 1 << 20)
        found = [('stdin', spool)]
    elif source.startswith(URLS):
        path = download_source(source, data_dir)
        found = [(os.path.basename(path).split('-', 1)[1], path)]
    elif os.path.isdir(source):
        found = files_in_folder(source, reading.format)
    else:
        paths = [source]
        if not os.path.isfile(source):
            paths = files_matching(source)
        base = os.path.commonpath([os.path.dirname(path) for path in paths])
        found = [(os.path.relpath(path, base), path) for path in paths]
    return [open_file(path, name, reading) for name, path in found]


def files_in_folder(folder, format):
    """List (name, path) of the files in a folder that a format of ReadConfig reads."""
    if {'meta.json', 'train.bin'} <= set(os.listdir(folder)):
        raise ValueError(f'{folder} is a dataset; train on it, or prepare what it was made from')
    suffixes = {'auto': FOLDER_SUFFIXES, 'functions': '.py'}.get(format, '')
    found = files_under(folder, suffixes)
    if not found:
        raise ValueError(f'{folder} contains no files to read with format={format!r}; hidden files and '
                         'datasets are left out; --format=text reads files of any name')
    left_out = len(files_under(folder, '')) - len(found)
    if left_out and format == 'auto':
        print(f'{folder}: left out {counted(left_out, "file")} without a known suffix; --format=text reads '
              'all', file=sys.stderr)
    return found


def all_files(sources, reading, data_dir, spool):
    """
    List the Files of all sources. With several, a file's name begins with its source, because files
    of two may share a name. Empty texts are left out, unless there is nothing else.
    """
    files = []
    base = os.path.commonpath([os.path.abspath(source) for source in sources])
    for source in sources:
        for file in files_of(source, reading, data_dir, spool):
            if len(sources) > 1:
                folder = os.path.relpath(os.path.abspath(source), base)
                file = file._replace(name=f'{folder}/{file.name}')
            files.append(file)
    return [file for file in files if file.kind != 'text' or os.path.getsize(file.path)] or files


def files_matching(pattern):
    """List the files that match a glob pattern, sorted. Raises ValueError if there are none."""
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        if pattern in CORPORA:
            raise ValueError(f'{pattern} is a named corpus, which must be prepared alone')
        hint = did_you_mean(pattern, {name: name for name in (*CORPORA, 'stdlib', *glob.glob('*'))})
        hint = hint or f'; the corpora are {", ".join(CORPORA)}'
        raise ValueError(f'{pattern} is not a file, a folder or a pattern that matches files{hint}')
    return paths


def download_source(url, data_dir, sha256=None):
    """Return the path of the file at a URL, under data_dir/downloads; downloaded unless it is there."""
    if url.startswith('HUB/'):
        url = url.replace('HUB', hub(), 1)
    base = os.path.basename(url.split('?')[0].split('#')[0].rstrip('/')) or 'index'
    if base.endswith('.parquet'):
        optional('pyarrow', 'reads parquet files')  # before gigabytes are downloaded
    name = hashlib.sha256(url.encode()).hexdigest()[:8] + '-' + re.sub(r'[^\w.-]', '_', base)
    return download(url, os.path.join(data_dir, 'downloads', name), sha256)


def open_corpus(name, cfg):
    """
    Download a corpus by name. Returns its training and its validation files: cfg.shards of the
    first, and none of the second if cfg.val or cfg.val_fraction is given. Describes the corpus
    before the download, and raises ValueError if the disk is too small.
    """
    corpus = CORPORA[name]
    train = corpus.train[:cfg.shards]
    val = corpus.val
    if cfg.val or cfg.val_fraction is not None:
        val = ()
    share = len(train) / len(corpus.train)
    size = corpus.download * share / 1e6
    need = (corpus.download + corpus.bins) * share / 1e6
    files = counted(len(train) + len(val), 'file')
    print(f'{name}: {corpus.about}; license {corpus.license}; {files} to download, '
          f'about {size:,.0f} MB; needs {need:,.0f} MB of disk space, bins included', flush=True)
    os.makedirs(cfg.data_dir, exist_ok=True)
    free = shutil.disk_usage(cfg.data_dir).free / 1e6
    downloaded = glob.glob(glob.escape(os.path.join(cfg.data_dir, 'downloads')) + '/*')
    if free + sum(os.path.getsize(path) for path in downloaded) / 1e6 < need:
        raise ValueError(f'{cfg.data_dir} has {free:,.0f} MB free, and {name} needs {need:,.0f} MB; use '
                         'another --data_dir, or fewer --shards')
    files = []
    for url in (*train, *val):
        path = download_source(url, cfg.data_dir, corpus.sha256)
        files.append(File(path, url.rsplit('/', 1)[1], corpus.kind))
    return files[:len(train)], files[len(train):]


def check_kinds(kinds, settings, where):
    """Raise ValueError if text_field, template or separator is set and no file can use it."""
    found = {'rows': kinds - {'text', 'joined'}, 'text': kinds & {'text'}}
    for name, needs in (('text_field', 'rows'), ('template', 'rows'), ('separator', 'text')):
        value = getattr(settings, name, None)
        if value not in (None, 'auto') and not found[needs]:
            raise ValueError(f'{name}={value!r} applies to {needs}, and {where} has none')


def missing_dataset(path, name, data_dir):
    """Explain how to make a dataset whose file or folder does not exist."""
    if os.path.exists(os.path.join(data_dir, 'train.bin')):
        parent, own = os.path.split(os.path.normpath(data_dir))
        return f'{path} does not exist; {data_dir} is a dataset: --data_dir={parent or "."} --dataset={own}'
    words = [f'FILE_OR_FOLDER --name={name}']
    hint = ''
    others = ''
    if name == 'stdlib' or name in CORPORA:
        words = [name]
    else:
        bins = glob.glob(os.path.join(glob.escape(data_dir), '*', 'train.bin'))
        found = [os.path.basename(os.path.dirname(path)) for path in bins]
        if found:
            others = f'; {data_dir} has {", ".join(sorted(found)[:10])}'
        near = {word: repr(word) for word in (*found, *CORPORA)}
        hint = did_you_mean(os.path.basename(name.rstrip('/')), near)
    if data_dir != 'data':
        words.append(shell(f'--data_dir={data_dir}'))
    command = f'python prepare.py {" ".join(words)}'
    if hint:
        return f'{path} does not exist{hint} If not, make it with: {command}'
    return f'{path} does not exist; make it with: {command}{others}'
