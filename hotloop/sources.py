"""A word of the command line -> files, in a fixed order."""

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass, replace
from typing import NamedTuple

from hotloop.documents import standard_input, text_blocks
from hotloop.download import download, hub


class File(NamedTuple):
    path: str
    name: str  # decides whether the document is held out, so it is the same on every machine
    kind: str  # a format, 'joined' for rows that are the lines of one document


@dataclass(frozen=True)
class Corpus:
    """A corpus by name: where its files are, and what a person should know before fetching them."""
    about: str
    license: str
    train: tuple
    val: tuple = ()
    download: float = 0.0  # about how many bytes come
    bins: float = 0.0  # about how many bytes they become
    tokenizer: str = 'gpt2'
    kind: str = 'text'
    separator: str | None = None
    val_fraction: float = 0.1
    sha256: str | None = None  # where the server tells no hash


def on_hub(dataset, *paths):
    return tuple(f'HUB/datasets/{dataset}/resolve/main/{path}' for path in paths)


SHAKESPEARE = Corpus(
    'the works of Shakespeare that nanoGPT learns from', 'public domain',
    ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',), (), 1.1e6, 0.7e6,
    sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')
CORPORA = {
    'shakespeare': SHAKESPEARE,
    'shakespeare_char': replace(SHAKESPEARE, tokenizer='char', bins=2.2e6),
    'wikitext2': Corpus(
        'Wikipedia, two million words, its own validation set', 'CC BY-SA 3.0',
        on_hub('Salesforce/wikitext', 'wikitext-2-v1/train-00000-of-00001.parquet'),
        on_hub('Salesforce/wikitext', 'wikitext-2-v1/validation-00000-of-00001.parquet'), 7e6, 6e6, kind='joined'),
    'wikitext103': Corpus(
        'Wikipedia, a hundred million words, its own validation set', 'CC BY-SA 3.0',
        on_hub('Salesforce/wikitext', *(f'wikitext-103-v1/train-0000{i}-of-00002.parquet' for i in range(2))),
        on_hub('Salesforce/wikitext', 'wikitext-103-v1/validation-00000-of-00001.parquet'), 0.3e9, 0.25e9,
        kind='joined'),
    'tinystories': Corpus(
        'short stories by GPT-4, for small models, their own validation set', 'CDLA-Sharing-1.0',
        on_hub('roneneldan/TinyStories', 'TinyStoriesV2-GPT4-train.txt'),
        on_hub('roneneldan/TinyStories', 'TinyStoriesV2-GPT4-valid.txt'), 2.3e9, 1.1e9, separator='<|endoftext|>'),
    'openwebtext': Corpus(
        'what GPT-2 was trained on, made again: 8 million pages', 'CC0-1.0',
        on_hub('Skylion007/openwebtext', *(f'plain_text/train-{i:05d}-of-00080.parquet' for i in range(80))), (), 25e9,
        18.1e9, kind='parquet', val_fraction=0.0005),
    'fineweb_edu': Corpus(
        'educational web pages, the sample of 10 billion tokens', 'ODC-By 1.0',
        on_hub('HuggingFaceFW/fineweb-edu', *(f'sample/10BT/{i:03d}_00000.parquet' for i in range(14))), (), 28.5e9,
        20e9, kind='parquet', val_fraction=0.0005),
    'fineweb10b_gpt2': Corpus(
        'web pages, 10 billion tokens of GPT-2 as llm.c and modded-nanogpt read them', 'ODC-By 1.0',
        on_hub('kjj0/fineweb10B-gpt2', *(f'fineweb_train_{i:06d}.bin' for i in range(1, 104))),
        on_hub('kjj0/fineweb10B-gpt2', 'fineweb_val_000000.bin'), 20.8e9, 20.8e9, kind='tokens'),
}
COMPRESSED = ('.gz', '.bz2', '.xz', '.lzma', '.zst')
KINDS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'csv', '.parquet': 'parquet',
         '.bin': 'tokens'}
TEXT_SUFFIXES = ('.txt', '.text', '.md', '.rst', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp', '.cu', '.js',
                 '.jsx', '.ts', '.tsx', '.java', '.kt', '.go', '.rs', '.rb', '.php', '.pl', '.lua', '.r', '.jl', '.hs',
                 '.ml', '.scala', '.swift', '.sql', '.html', '.htm', '.xml', '.css', '.toml', '.yaml', '.yml', '.ini',
                 '.tex', '.org', '.sh', '.bat', '.log')
FOLDER_SUFFIXES = tuple(f'{s}{c}' for s in (*TEXT_SUFFIXES, *KINDS) if s != '.bin' for c in ('', *COMPRESSED))


def files_under(folder, suffixes, left_out=()):
    """
    [(relative path, path)] of the files below a folder, sorted; hidden ones, datasets and the folders left_out are not
    entered, links are followed once.
    """
    def fail(error):
        raise ValueError(f'{error.filename} cannot be read: {error.strerror}') from None
    found, seen = [], set()
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [f for f in folders if f not in left_out and not f.startswith('.')]
        if os.path.realpath(here) in seen or {'meta.json', 'train.bin'} <= set(names):
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        for name in names:
            path = os.path.join(here, name)
            if name.lower().endswith(suffixes) and not name.startswith('.') and os.path.isfile(path):
                found.append((os.path.relpath(path, folder).replace(os.sep, '/'), path))
    return sorted(found)


def stdlib_files():
    """
    The source of the Python that runs, some 10 MB of real language on every machine. Left out: test suites, packages
    installed beside it, and what programs wrote (codec tables, the topics of help(), the build's configuration).
    """
    left_out = ('test', 'tests', 'idle_test', '__pycache__', 'site-packages', 'dist-packages', 'encodings',
                'pydoc_data', 'turtledemo', 'ensurepip')
    files = files_under(sysconfig.get_path('stdlib'), ('.py',), left_out)
    return [(name, path) for name, path in files if not os.path.basename(name).startswith('_sysconfigdata')]


def open_file(path, name, cfg):
    """
    The File of a path, read as cfg.format says, or by its name, compression apart. What is called JSON may be rows, one
    a line (the first is an object, and another begins behind it), or, unless asked for, a document that is no list.
    """
    if re.search(r'\.(tar(\.\w+)?|tgz|zip|7z|rar)$', name.lower()):
        raise ValueError(f'{name} is an archive; unpack it, and name the folder')
    stem, suffix = os.path.splitext(name.lower())
    suffix = os.path.splitext(stem)[1] if suffix in COMPRESSED else suffix
    file = File(path, name, KINDS.get(suffix, 'text') if cfg.format == 'auto' else cfg.format)
    if file.kind != 'json':
        return file
    head = next((block.lstrip() for block in text_blocks(file, cfg) if block.strip()), '')
    first, _, rest = head.partition('\n')
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(first), dict) and rest.lstrip()[:1] == '{':
            return file._replace(kind='jsonl')
    is_list = re.match(r'\[\s*["{]', head) or cfg.format == 'json'
    return file if is_list else file._replace(kind='text')


def files_of(source, cfg, data_dir, spool):
    """
    [File] of a source as the command line names it. URLs are downloaded; standard input and pipes, which can be read
    once only, are written to the file spool. ValueError where there is nothing.
    """
    if source == 'stdlib':
        return [File(path, name, 'text') for name, path in stdlib_files()]
    if source in CORPORA and not os.path.exists(source):
        raise ValueError(f'{source} is a corpus by name, which is prepared alone; train on several datasets with '
                         f'--dataset={source},OTHER')
    is_pipe = os.path.exists(source) and not os.path.isdir(source) and not os.path.isfile(source)
    if source == '-' or is_pipe:
        os.makedirs(os.path.dirname(spool), exist_ok=True)
        with open(spool, 'wb') as f, open(source, 'rb') if is_pipe else contextlib.nullcontext(standard_input()) as g:
            shutil.copyfileobj(g, f, 1 << 20)
        return [open_file(spool, 'stdin', cfg)]
    if source.startswith(('http://', 'https://')):
        path = fetch_to_downloads(source, data_dir)
        return [open_file(path, os.path.basename(path).split('-', 1)[1], cfg)]
    if os.path.isdir(source):
        if os.path.exists(os.path.join(source, 'meta.json')) and os.path.exists(os.path.join(source, 'train.bin')):
            raise ValueError(f'{source} is a dataset, made already; train on it, or prepare what it was made of')
        found = files_under(source, FOLDER_SUFFIXES if cfg.format == 'auto' else '')
        if not found:
            raise ValueError(f'{source} holds no text files '
                             f'({" ".join(s for s in (*TEXT_SUFFIXES, *KINDS) if s != ".bin")})')
        return [open_file(path, name, cfg) for name, path in found]
    if os.path.isfile(source):
        file = open_file(source, os.path.basename(source), cfg)
        if file.kind == 'text' and source.lower().endswith(tuple(f'.json{c}' for c in ('', *COMPRESSED))) and \
                cfg.format == 'auto':
            print(f'note: {source} is no list of rows, and is read as one text with its brackets and quotes; rows are '
                  'a list of objects or of texts, or one object a line', file=sys.stderr)
        return [file]
    if any(c in source for c in '*?['):
        paths = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
        if paths:
            base = os.path.commonpath([os.path.dirname(p) for p in paths])
            return [open_file(p, os.path.relpath(p, base).replace(os.sep, '/'), cfg) for p in paths]
        raise ValueError(f'no file matches {source}')
    raise ValueError(f'{source} is no file or folder, nor a corpus with a name: stdlib, {", ".join(CORPORA)}')


def fetch_to_downloads(url, data_dir, sha256=None):
    """The file under data_dir/downloads that holds what is at the URL, downloaded unless it is there."""
    url = url.replace('HUB', hub(), 1) if url.startswith('HUB/') else url
    base = os.path.basename(url.split('?')[0].split('#')[0].rstrip('/')) or 'index'
    name = hashlib.sha256(url.encode()).hexdigest()[:8] + '-' + re.sub(r'[^\w.-]', '_', base)
    return download(url, os.path.join(data_dir, 'downloads', name), sha256)


def open_corpus(name, cfg):
    """(training files, validation files) of a corpus by name; says what it is before anything is fetched."""
    corpus = CORPORA[name]
    urls, val = corpus.train[:cfg.shards], () if cfg.val or cfg.val_fraction is not None else corpus.val
    share = len(urls) / len(corpus.train)
    need = (corpus.download + corpus.bins) * share
    print(f'{name}: {corpus.about}; licence {corpus.license}; {len(urls) + len(val)} files to download, about '
          f'{corpus.download * share / 1e6:,.0f} MB, and {need / 1e6:,.0f} MB of disk with the bins', flush=True)
    os.makedirs(cfg.data_dir, exist_ok=True)
    free = shutil.disk_usage(cfg.data_dir).free
    have = glob.glob(glob.escape(os.path.join(cfg.data_dir, 'downloads')) + '/*')
    if free + sum(os.path.getsize(path) for path in have) < need:
        raise ValueError(f'{cfg.data_dir} has {free / 1e6:,.0f} MB free, and {name} needs about {need / 1e6:,.0f} MB; '
                         'use another --data_dir' + (', or --shards' if len(corpus.train) > 1 else ''))
    return [[File(fetch_to_downloads(url, cfg.data_dir, corpus.sha256), url.rsplit('/', 1)[1], corpus.kind)
             for url in side] for side in (urls, val)]


def how_to_make(dataset):
    """The command that makes a dataset, for messages that miss it."""
    if dataset == 'stdlib' or dataset in CORPORA:
        return f'python prepare.py {dataset}'
    return f'python prepare.py FILE_OR_FOLDER --name={dataset} --tokenizer=gpt2'


def check_kinds(kinds, cfg, place):
    """ValueError where a setting for files of one kind finds none there."""
    rows = kinds - {'text', 'tokens'}
    for name, acts in (('text_field', rows), ('template', rows), ('separator', 'text' in kinds)):
        if getattr(cfg, name, None) not in (None, 'auto') and not acts:
            raise ValueError(f'{name}={getattr(cfg, name)!r} acts on {"text" if name == "separator" else "rows"}, and '
                             f'there is none in {place}')
