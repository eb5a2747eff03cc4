"""
Tokenize text into bins: documents -> tokenizer -> DATA_DIR/NAME/{train,val}.bin + meta.json.

    $ python prepare.py                             # the built-in corpus: this Python's standard library
    $ python prepare.py book.txt notes/ --name=mine --tokenizer=bpe:8192   # files, and folders of files
    $ python prepare.py 'pages/*.jsonl.gz' --name=pages --tokenizer=gpt2   # one document per row; CSV, ...
    $ zcat dump.gz | python prepare.py - --name=dump       # standard input, a text; https://... is downloaded
    $ python prepare.py fineweb_edu:1                      # a named corpus, or some of its files
    $ python prepare.py chats.jsonl --tokenizer=out        # the tokenizer of a run, for tuning from it
    $ python -m hotloop.data.dataset data/mine             # what is in a dataset

A bin is nanoGPT's: raw little-endian token ids, uint16 (uint32 if the vocabulary needs it), no header.
meta.json beside the bins holds the tokenizer itself and the counts. A dataset appears only when complete; a
different one of its name is moved to NAME.1, NAME.2, ... The same input gives the same bytes with any number
of processes, and memory does not grow with the corpus (a .json file is read at once).
"""

import functools
import json
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from configurator import call_main, configure
from hotloop.data import dataset
from hotloop.data.chat import TEMPLATES
from hotloop.data.documents import documents_in, is_document, plan_holdout, split_pieces, template_of
from hotloop.data.encode import batches_of, encode_all, id_type
from hotloop.data.sources import all_files, find_corpus, open_corpus
from hotloop.data.tokenizer import HFTokenizer
from hotloop.data.tokenizer_source import check_bytes, find_tokenizer, learn_tokenizer
from hotloop.system.files import replacing
from hotloop.system.host import cores
from hotloop.system.text import counted, file_size, script, shell

BPE_BYTES = 1 << 28  # size of the files that merges are learned from
Format = Literal['auto', 'text', 'jsonl', 'json', 'csv', 'parquet', 'functions']


@dataclass(frozen=True)
class PrepareConfig:
    # --- dataset
    name: str | None = None  # folder under data_dir; None: the name of the source
    data_dir: str = 'data'  # folder of datasets and downloads
    # --- reading
    format: Format = 'auto'  # auto: by suffix; functions: Python functions as rows
    text_field: str | None = None  # field of the text, or two: prompt,answer; None: the usual names
    template: Literal[('auto', *(t for t in TEMPLATES if t != 'joined'))] = 'auto'  # of instruction data
    # --- validation
    val: float | str | None = None  # fraction to hold out, or a source of text; None: 0.1, or a corpus's
    seed: int = 1337  # chooses which documents are held out
    # --- tokens
    tokenizer: str | None = None  # byte, char, bpe:SIZE (learned), gpt2, a run, ...; None: byte or a corpus's
    num_proc: int | None = None  # number of tokenizer processes; None: one per CPU core

    def problems(self):
        """List the problems with the settings, one sentence each."""
        problems = []
        if isinstance(self.val, float) and not 0 < self.val < 1:
            problems.append(f'val={self.val} must be between 0 and 1, or a source')
        if self.num_proc is not None and self.num_proc < 1:
            problems.append(f'num_proc={self.num_proc} must be at least 1')
        if self.name and re.search('[,:]', self.name):
            problems.append(f'name={self.name!r} must not contain a comma or a colon, which mix datasets')
        return problems


# -----------------------------------------------------------------------------
# settings and sources

def resolve(cfg, sources):
    """Fill in the settings that the sources decide, below those of the user."""
    corpus = find_corpus(sources)
    return replace(cfg, name=cfg.name or default_name(sources), val=cfg.val or corpus.val_fraction,
                   tokenizer=cfg.tokenizer or corpus.tokenizer, num_proc=cfg.num_proc or cores())


def default_name(sources):
    """Name a dataset after its only source. Raises ValueError if that suggests no name."""
    name = re.split('[.:?#]', os.path.basename(os.path.abspath(sources[0])))[0]
    if len(sources) > 1 or not re.fullmatch(r'\w[\w -]*', name):
        raise ValueError(f'{" ".join(sources)}: give the dataset a name with --name')
    return name


def open_sources(sources, cfg, spool):
    """Return (training files, validation files). Standard input is copied to the file `spool`."""
    val_files = []
    if isinstance(cfg.val, str):
        val_files = all_files([cfg.val], cfg.format, cfg.data_dir, spool)
    corpus = find_corpus(sources)
    if corpus.train:
        print(f'{corpus.about}; license {corpus.license}; about {file_size(corpus.download)} to download',
              flush=True)
        files = open_corpus(corpus, corpus.train, cfg.data_dir)
        if cfg.val is None:
            val_files = open_corpus(corpus, corpus.val, cfg.data_dir)
    else:
        files = all_files(sources, cfg.format, cfg.data_dir, spool)
        note_test_files(files, val_files)
    once = {os.path.realpath(file.path): file for file in files}  # sources may overlap
    for file in val_files:
        once.pop(os.path.realpath(file.path), None)
    if not once:
        raise ValueError('all files are validation files; none is left to train on')
    return list(once.values()), val_files


def note_test_files(files, val_files):
    """Say that files which are named as a test split are read as training text."""
    names = '/'.join(file.name for file in files).split('/')  # also of folders
    tests = [name for name in names if re.match('(test|val|valid|validation|dev)(?![a-z])', name)]
    if tests and not val_files and any(name.startswith('train') for name in names):
        print(f'note: {tests[0]} is text to train on, too; --val=SOURCE keeps it out')


# -----------------------------------------------------------------------------
# the dataset

def keep_rows(pieces, path):
    """Yield (split, Piece) pairs without their rows. Writes those for validation to a .jsonl file."""
    with open(path, 'w', encoding='utf-8') as f:  # sample.py --eval_code judges a model by it
        for split, piece in pieces:
            if split == 'val' and piece.row is not None:
                f.write(json.dumps(piece.row, default=str) + '\n')
            yield split, piece._replace(row=None)


def write_dataset(folder, files, val_files, template, tokenizer, cfg):
    """Write the documents of the files to an empty folder. Returns meta.json without the source."""
    num_bytes = sum(os.path.getsize(file.path) for file in (*files, *val_files))
    print(f'{counted(len(files) + len(val_files), "file")}, {file_size(num_bytes)}', flush=True)
    skipped = Counter()
    read = functools.partial(documents_in, template=template, text_field=cfg.text_field, skipped=skipped)
    holdout = plan_holdout(files, val_files, cfg.val, cfg.seed, read)
    read_pieces = functools.partial(split_pieces, files, val_files, *holdout, read)
    # The ends of documents are marked, unless each split is one document.
    several = not (is_document(files) and is_document(val_files or files))
    if tokenizer is None:
        every = max(-(-num_bytes // BPE_BYTES), 1)
        tokenizer = learn_tokenizer(cfg.tokenizer, read_pieces(), template, several, every)
    skipped.clear()
    pieces = note_special_texts(read_pieces(), tokenizer)
    if template:
        pieces = keep_rows(pieces, os.path.join(folder, 'val.jsonl'))
    eot = tokenizer.eot if several else None
    if several and eot is None:
        print('note: the tokenizer has no end-of-text id; nothing marks where documents end')
    batches = encode_all(tokenizer, batches_of(pieces), cfg.num_proc, eot)
    splits = dataset.write_bins(folder, batches, template is not None)
    for reason, count in skipped.most_common(5):
        print(f'skipped {counted(count, "row")}: {reason}')
    for name, counts in splits.items():
        if not counts['bytes']:
            raise ValueError(f'there is no text for the {name} split with val={cfg.val!r}; --val names a '
                             'validation source, --text_field the field of a text')
    return {'format': dataset.FORMAT, 'dtype': np.dtype(id_type(tokenizer)).name,
            'vocab_size': tokenizer.n_vocab, 'tokenizer': tokenizer.spec(), 'eot': tokenizer.eot,
            'splits': splits, 'template': template}


def note_special_texts(pieces, tokenizer):
    """
    Yield the (split, Piece) pairs. Says if the first 100 have the name of a special id in a text, such as
    a rendered chat, because that is not the id.
    """
    found = []
    for number, (split, piece) in enumerate(pieces):
        if number < 100 and not found:
            text = ''.join(text[:10_000] for text, markup, _ in piece.parts if not markup)
            found = [name for name in tokenizer.specials if name in text]
            if found:
                print(f'note: {found[0]} in the texts is read as plain characters, not as its id; rows with '
                      'messages get the ids of a chat template, and documents that of their end')
        yield split, piece


def training_command(cfg, found, has_rows):
    """Return the command that trains on a dataset, or tunes the model that its tokenizer is from."""
    words = [script('config/quickstart.py'), f'--dataset={cfg.name}']
    if found.model:
        words = [script('config/lora.py'), f'--init_from={found.model}', f'--dataset={cfg.name}']
        if not has_rows:
            words.append('--pack_rows=False')
        if found.block_size:
            words.append(f'--block_size={found.block_size}')
    if cfg.data_dir != PrepareConfig.data_dir:
        words.append(f'--data_dir={cfg.data_dir}')
    return f'python {shell(script("train.py"), *words)}'


def main(argv=None):
    (cfg,), _, sources = configure(PrepareConfig, argv=argv, files=False, about=__doc__)
    sources = sources or ['stdlib']
    cfg = resolve(cfg, sources)
    folder = os.path.normpath(os.path.join(cfg.data_dir, cfg.name))
    if os.path.lexists(folder) and not os.path.isfile(os.path.join(folder, 'meta.json')):
        raise ValueError(f'{folder} exists and was not created by prepare.py; choose another --name')
    with dataset.partial_folder(folder) as partial:
        found = find_tokenizer(cfg.tokenizer, cfg.data_dir)  # errors before downloads
        if isinstance(found.tokenizer, HFTokenizer):
            check_bytes(found.tokenizer, cfg.tokenizer)
        files, val_files = open_sources(sources, cfg, f'{partial}.stdin')
        template = template_of([*files, *val_files], cfg.template, cfg.text_field, found.template)
        has_other = found.tokenizer and found.tokenizer.spec().get('kept', {}).get('chat_template')
        if template and has_other and cfg.template == 'auto' and not found.template:
            print(f'note: the chat template of {cfg.tokenizer} is not one of ours; rows are written in '
                  f'{template}, which fine-tuning has to teach')
        meta = write_dataset(partial, files, val_files, template, found.tokenizer, cfg)
        with replacing(os.path.join(partial, 'meta.json')) as f:
            f.write(json.dumps({**meta, 'source': shell(*sources)}, indent=1).encode())
    print(f'tokenizer: {cfg.tokenizer}, {meta["vocab_size"]:,} ids; template: {template}')
    for split, counts in meta['splits'].items():
        print(f'{split:>5}: {counted(counts["tokens"], "token")}, {counted(counts["bytes"], "byte")}, '
              f'{counted(counts["documents"], "document")}, '
              f'{counts["bytes"] / max(counts["tokens"], 1):.2f} bytes per token')
    print(f'train on it with: {training_command(cfg, found, template is not None)}')


if __name__ == '__main__':
    call_main(main)
