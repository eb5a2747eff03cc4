"""
Tokenize text into bins: documents -> tokenizer -> DATA_DIR/NAME/{train,val}.bin + meta.json.

    $ python prepare.py                             # the built-in corpus: this Python's standard library
    $ python prepare.py book.txt notes/ --name=mine --tokenizer=bpe:8192   # files, and folders of files
    $ python prepare.py 'pages/*.jsonl.gz' --name=pages --tokenizer=gpt2   # one document per row; CSV, ...
    $ zcat dump.gz | python prepare.py - --name=dump       # standard input; https://... is downloaded
    $ python prepare.py fineweb_edu:1                      # a file of a named corpus
    $ python prepare.py chats.jsonl --tokenizer=out        # the tokenizer of a run, for tuning from it
    $ python prepare.py --inspect mine                     # what is in a dataset

A bin is nanoGPT's: raw little-endian token ids, uint16 (uint32 if the vocabulary needs it), no header.
meta.json beside the bins holds the tokenizer itself and the counts. A dataset appears only when complete. If
a different dataset already has the name, that one is moved to NAME.1, NAME.2, ...
The same input gives the same bytes with any number of processes, and memory does not grow with the corpus (a
.json file is read at once).
"""

import functools
import json
import os
import re
from dataclasses import dataclass, replace
from itertools import groupby
from urllib.parse import urlsplit

import numpy as np

from configurator import call_main, configure
from hotloop.data import dataset
from hotloop.data.bpe import count_words, learn_merges
from hotloop.data.chat import ANSWERS, CHATS, MARK, form_of, marks_of
from hotloop.data.documents import (
    OPENERS,
    ReadConfig,
    RowCounts,
    first_row,
    plan_holdout,
    split_pieces,
    template_of,
)
from hotloop.data.encode import batches_of, encode_all, id_type
from hotloop.data.sources import URLS, all_files, check_kinds, find_corpus, missing_dataset, open_corpus
from hotloop.data.tokenizer import BPETokenizer, tokenizer_from
from hotloop.data.tokenizer_source import find_tokenizer
from hotloop.system.files import Progress, counted, is_inside, read_json, replacing
from hotloop.system.host import cores
from hotloop.system.text import file_size, shell

BPE_BYTES = 1 << 28  # size of the files that merges are learned from
LORA_DIR = 'out-lora'  # of config/lora.py
# the flags that command_for() adds, or that do not change a dataset
OTHER_FLAGS = ('name', 'data_dir', 'tokenizer', 'num_proc', 'inspect')


@dataclass(frozen=True)
class PrepareConfig:
    # --- dataset
    name: str | None = None  # folder under data_dir; None: the name of the source
    data_dir: str = 'data'  # folder of datasets and downloads
    inspect: bool = False  # only show the contents of the named datasets, ours or nanoGPT's
    # --- validation
    val: str | None = None  # separate source; None: hold out documents, or the end of a single document
    val_fraction: float | None = None  # fraction to hold out; None: 0.1, or a named corpus's default
    seed: int = 1337  # chooses which documents are held out
    # --- tokens
    tokenizer: str | None = None  # byte, char, bpe:SIZE (learned), gpt2, a run, ...; None: byte or a corpus's
    num_proc: int | None = None  # number of tokenizer processes; None: one per CPU core

    def problems(self):
        """List the problems with the settings, one sentence each."""
        problems = []
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            problems.append(f'val_fraction={self.val_fraction} must be between 0 and 1')
        if self.val and self.val_fraction is not None:
            problems.append(f'val={self.val!r} is a separate validation source; remove val_fraction')
        if self.num_proc is not None and self.num_proc < 1:
            problems.append(f'num_proc={self.num_proc} must be at least 1')
        return problems


# -----------------------------------------------------------------------------
# settings and sources

def resolve(cfg, reading, sources):
    """
    Fill in the settings that the sources decide, below those of the user. Returns (cfg, reading).
    val_fraction stays None if there is a validation source.
    """
    corpus = find_corpus(sources)
    val_fraction = cfg.val_fraction
    if val_fraction is None and not cfg.val and not corpus.val:
        val_fraction = corpus.val_fraction
    cfg = replace(cfg, name=cfg.name or default_name(sources), val_fraction=val_fraction,
                  tokenizer=cfg.tokenizer or corpus.tokenizer, num_proc=cfg.num_proc or cores())
    return cfg, replace(reading, separator=reading.separator or corpus.separator)


def default_name(sources):
    """Name a dataset after its source. Raises ValueError if the sources suggest no name."""
    source = sources[0]
    if source == '-':
        return 'stdin'
    if source.startswith(URLS):
        source = urlsplit(source).path
    is_pattern = any(c in source for c in '*?[') and not os.path.exists(source)
    if len(sources) > 1 or is_pattern:
        raise ValueError(f'{" ".join(sources)}: give the dataset a name with --name')
    if find_corpus(sources).train:
        return source.partition(':')[0]
    name = os.path.basename(os.path.abspath(source))
    if not os.path.isdir(source):
        name, suffix = os.path.splitext(name)
        if suffix.lower() in OPENERS:
            name = os.path.splitext(name)[0]
    return re.sub(r'[,:\\]|\.(?=partial(\.|$))', '_', name)  # what dataset_folder() refuses


def output_folder(data_dir, name):
    """Return the folder of a new dataset. Raises ValueError if it holds anything but a dataset of ours."""
    folder = dataset.dataset_folder(data_dir, name)
    if os.path.islink(folder):
        folder = os.path.realpath(folder)
    names = []
    if os.path.isdir(folder):
        names = os.listdir(folder)
    names = [name for name in names if not name.startswith('.')]  # such as .DS_Store
    is_own = set(names) <= {*dataset.OWN_FILES} and (not names or 'meta.json' in names)
    if not is_own or os.path.isfile(folder):
        raise ValueError(f'{folder} exists and was not created by prepare.py; choose another --name')
    return folder


def open_sources(sources, cfg, reading, spool):
    """Return (training files, validation files). Standard input is copied to the file `spool`."""
    val_files = []
    if cfg.val:
        val_files = all_files([cfg.val], reading.format, cfg.data_dir, spool)
    corpus = find_corpus(sources)
    if corpus.train:
        with_val = not cfg.val and cfg.val_fraction is None
        files, own_val_files = open_corpus(corpus, cfg.data_dir, with_val)
        val_files = val_files or own_val_files
    else:
        files = all_files(sources, reading.format, cfg.data_dir, spool)
    validated = {os.path.realpath(file.path) for file in val_files}
    once = {os.path.realpath(file.path): file for file in files}  # sources may overlap
    kept = [file for path, file in once.items() if path not in validated]
    if not kept:
        raise ValueError('all files are validation files; none is left to train on')
    check_kinds({file.kind for file in (*kept, *val_files)}, reading, ' '.join(sources))
    return kept, val_files


# -----------------------------------------------------------------------------
# the dataset

def learn_tokenizer(name, pieces, marks, several, every):
    """
    Learn the tokenizer `char` or `bpe:SIZE` from (split, Piece) pairs. Characters are collected
    from all pieces; merges are learned from every n-th, if it is for training. marks: of the chat
    template; they become special ids. several: whether documents need an end-of-text id.
    """
    if name == 'char':
        chars = set()
        for _, piece in pieces:
            for text, *_ in piece.parts:
                chars.update(text)
        return tokenizer_from({'kind': 'char', 'chars': ''.join(sorted(chars)), 'eot': several})

    def texts():
        for i, (split, piece) in enumerate(pieces):
            if split == 'train' and i % every == 0:
                for text, markup, _ in piece.parts:
                    yield MARK.sub('', text) if markup else text
    specials = [*marks, '<|endoftext|>']
    size = int(name[4:]) - len(specials)
    if size < 256:
        raise ValueError(f'tokenizer={name} has no room for 256 bytes and the special ids '
                         f'{", ".join(specials)}; use bpe:{256 + len(specials)} or more')
    tokens = learn_merges(count_words(texts()), size)
    ids = {special: len(tokens) + i for i, special in enumerate(specials)}
    return BPETokenizer(tokens, specials=ids, eot=ids['<|endoftext|>'])


def write_dataset(folder, files, val_files, cfg, reading, tokenizer, origin):
    """Write the documents of the files to an empty folder. Returns the metadata, which includes `origin`."""
    num_bytes = sum(os.path.getsize(file.path) for file in (*files, *val_files))
    print(f'{origin["source"]}: {counted(len(files) + len(val_files), "file")}, {file_size(num_bytes)}',
          flush=True)
    holdout = plan_holdout(files, val_files, cfg, reading)
    read_pieces = functools.partial(split_pieces, files, val_files, reading, holdout)
    marks = []
    if reading.template:
        marks = marks_of(reading.template)
    if tokenizer is None:
        every = max(-(-num_bytes // BPE_BYTES), 1)
        tokenizer = learn_tokenizer(cfg.tokenizer, read_pieces(), marks, holdout.several, every)
    eot = None
    if holdout.several:
        eot = tokenizer.eot
    progress = Progress(num_bytes)
    counts = RowCounts()
    pieces = keep_rows(read_pieces(progress, counts), tokenizer, os.path.join(folder, 'val.jsonl'))
    batches = encode_all(tokenizer, batches_of(pieces), cfg.num_proc, eot)
    splits = write_bins(folder, batches, id_type(tokenizer), reading.template)
    progress.close()
    for sentence in counts.left_out():
        print(sentence)
    check_splits(splits, counts.skipped, origin['source'], cfg, reading)
    meta = {'format': dataset.FORMAT, 'dtype': np.dtype(id_type(tokenizer)).name,
            'vocab_size': tokenizer.n_vocab, 'tokenizer': tokenizer.spec(), 'eot': tokenizer.eot,
            'splits': splits, 'template': reading.template, **origin}
    with replacing(os.path.join(folder, 'meta.json')) as f:
        f.write(json.dumps(meta, indent=1).encode())
    return meta


def write_bins(folder, batches, dtype, template):
    """Write the batches of encode_all(). Returns {split: its metadata}. template: of rows, or None."""
    writers = {split: dataset.BinWriter(folder, split, dtype) for split in dataset.SPLITS}
    tokens = 0
    in_loss = 0
    for batch in batches:
        for split, encoded in batch.items():
            writers[split].add(encoded)
            tokens += len(encoded.ids)
            if encoded.mask is None:
                in_loss += len(encoded.ids)
            else:
                in_loss += int(encoded.mask.sum())
    if template:
        print(f'instruction data in the {template} template: {in_loss:,} of {tokens:,} tokens '
              f'({in_loss / max(tokens, 1):.0%}) count toward the loss')
    else:
        os.remove(os.path.join(folder, 'val.jsonl'))
    return {split: writer.close(rows=template is not None) for split, writer in writers.items()}


def keep_rows(pieces, tokenizer, path):
    """
    Yield the pieces, (split, Piece), without their rows. Writes those for validation to a .jsonl
    file, by which sample.py --eval_code judges a model, and notes names of special ids in the first
    texts.
    """
    names = set()
    with open(path, 'w', encoding='utf-8') as f:
        for i, (split, piece) in enumerate(pieces):
            for text, markup, _ in piece.parts if i < 100 else ():
                if not markup:
                    names.update(tokenizer.special_names.findall(text[:10_000]))
            if split == 'val' and piece.row is not None:
                f.write(json.dumps(piece.row, default=str) + '\n')
            yield split, piece._replace(row=None)
    if names:
        print(f'note: names of special ids in the text, such as {min(names)}, are encoded as plain text; use '
              '--separator to split a text into documents, and rows with messages for chats')


def check_splits(splits, skipped, source, cfg, reading):
    """Raise ValueError if a split has no text. splits: their metadata; skipped: number of rows."""
    documents = sum(counts['documents'] for counts in splits.values())
    if not documents and not skipped:
        raise ValueError(f'{source} contains no text')
    for split, counts in splits.items():
        if not counts['bytes']:
            raise ValueError(f'{source}: {counted(documents, "document")}, {counted(skipped, "row")} '
                             f'skipped, and no text for the {split} split with val={cfg.val!r}, val_fraction='
                             f'{cfg.val_fraction}, separator={reading.separator!r}; --val names a validation '
                             f'source, --text_field the field of a text; {", ".join(ANSWERS)} hold answers')


def inspect(name, data_dir):
    """
    Print the tokenizer, counts of each split, the most frequent training tokens, and text from the
    middle of the training split.
    """
    folder = dataset.dataset_folder(data_dir, name)
    if not os.path.exists(os.path.join(folder, 'train.bin')):
        raise ValueError(missing_dataset(folder, name, data_dir))
    meta = dataset.read_meta(folder)
    tokenizer = tokenizer_from(meta['tokenizer'])
    kind = meta['tokenizer'].get('name') or meta['tokenizer']['kind']
    origin = "nanoGPT's: no meta.json" if meta['foreign'] else f'from {meta.get("source", "unknown")}'
    print(f'{folder}: {kind} tokenizer of {tokenizer.n_vocab:,} ids, {meta["dtype"]}, {origin}')
    if meta['template']:
        print(f'instruction data in the {meta["template"]} template')
    for split in dataset.SPLITS:
        tokens = dataset.open_bin(os.path.join(folder, f'{split}.bin'), meta['dtype'])
        mask = dataset.open_bin(os.path.join(folder, f'{split}.mask.bin'), 'uint8')
        counts = dataset.count_ids(tokens, tokenizer.n_vocab)
        num_bytes = counts[:tokenizer.n_vocab] @ tokenizer.sizes  # larger ids pad the vocabulary
        parts = [counted(len(tokens), 'token'), f'{num_bytes / max(len(tokens), 1):.2f} bytes per token']
        if 'documents' in meta['splits'].get(split, {}):
            parts.append(counted(meta['splits'][split]['documents'], 'document'))
        parts.append(counted(np.count_nonzero(counts), 'distinct id'))
        if len(mask):
            parts.append(f'{np.count_nonzero(mask) / len(mask):.0%} of tokens in the loss')
        print(f'{split:>5}: {", ".join(parts)}')
        if split == 'train':
            show_tokens(tokenizer, tokens, mask, counts)


def show_tokens(tokenizer, tokens, mask, counts):
    """Print the most frequent tokens, and those in the middle, in brackets where they are not in the loss."""
    shares = []
    for i in np.argsort(-counts, kind='stable')[:10].tolist():
        if counts[i]:
            shares.append(f'"{dataset.show(tokenizer, [i])}" {counts[i] / counts.sum():.1%}')
    print(f'most frequent: {", ".join(shares)}')
    middle = len(tokens) // 2
    window = tokens[middle:middle + 200].tolist()
    in_loss = mask[middle:middle + 200].tolist() or [1] * len(window)  # without a mask all tokens count
    text = ''
    for counts_in_loss, run in groupby(zip(window, in_loss, strict=True), key=lambda pair: pair[1]):
        shown = dataset.show(tokenizer, [token for token, _ in run])
        text += shown if counts_in_loss else f'[{shown}]'
    print(f'training tokens from position {middle:,}: {text}')


def main(argv=None):
    found = configure(PrepareConfig, ReadConfig, argv=argv, files=False, about=__doc__)
    (cfg, reading), given, sources = found
    if cfg.inspect:
        for name in sources or [cfg.name or 'stdlib']:
            inspect(name, cfg.data_dir)
        return
    sources = sources or ['stdlib']
    values = {**vars(cfg), **vars(reading)}
    flags = [f'--{key}={values[key]}' for key in given if key not in OTHER_FLAGS]
    origin = {'source': shell(*sources), 'flags': flags}
    cfg, reading = resolve(cfg, reading, sources)
    folder = output_folder(cfg.data_dir, cfg.name)
    try:
        with dataset.partial_folder(folder) as partial:
            found = find_tokenizer(cfg.tokenizer, cfg.data_dir)  # errors before downloads
            files, val_files = open_sources(sources, cfg, reading, f'{partial}.stdin')
            reading = replace(reading, template=template_of(files, reading, found.template))
            meta = write_dataset(partial, files, val_files, cfg, reading, found.tokenizer, origin)
            print_fields(files, reading)
    except BrokenPipeError:  # of what we print
        raise
    except OSError as e:
        raise ValueError(f'{folder} could not be created: {e}') from e
    if found.template == '' and 'template' not in given and reading.template in CHATS:
        print(f'note: the model of {cfg.tokenizer} was not trained on the {reading.template} template; '
              'fine-tuning has to teach it')
    print(f'tokenizer: {cfg.tokenizer}, {meta["vocab_size"]:,} ids')
    for split, counts in meta['splits'].items():
        print(f'{split:>5}: {counted(counts["tokens"], "token")}, {counted(counts["bytes"], "byte")}, '
              f'{counted(counts["documents"], "document")}, '
              f'{counts["bytes"] / max(counts["tokens"], 1):.2f} bytes per token')
    share = meta['splits']['val']['bytes'] / sum(split['bytes'] for split in meta['splits'].values())
    if not val_files and not 0.5 <= share / cfg.val_fraction <= 2:
        print(f'note: {share:.2%} of the text is held out, not {100 * cfg.val_fraction:g}%, because '
              'documents stay complete; --val names a validation source')
    print(f'train on it with: {training_command(cfg, found, reading.template is not None)}')


def print_fields(files, reading):
    """Print the fields of the first row that are not used."""
    found = first_row(files, reading)
    if found:
        row = found[1]
        used = form_of(row, reading.text_field)[1]
        unused = [name for name in row if name not in used]
        if unused:
            print(f'fields not used: {", ".join(unused[:10])}; --text_field=NAME uses one as the text')


def training_command(cfg, found, has_rows):
    """Return the command that trains on a dataset, or tunes the model that its tokenizer is from."""
    words = ['config/quickstart.py']
    if found.model:
        words = ['config/lora.py', f'--init_from={found.model}']
    words.append(f'--dataset={cfg.name}')
    if found.model and not has_rows:
        words.append('--pack_rows=False')
    if found.model and not found.is_run:  # its own context may be 100 times as long
        path = os.path.join(found.model, 'config.json')
        config = {}  # that of a hub model is not here
        if os.path.exists(path):
            config = read_json(path)
        sizes = [config.get(key) or 512 for key in ('n_positions', 'max_position_embeddings')]
        words.append(f'--block_size={min(512, *sizes)}')
    if found.model and is_inside(found.model, LORA_DIR):
        words.append(f'--out_dir={LORA_DIR}-2')
    if cfg.data_dir != PrepareConfig.data_dir:
        words.append(f'--data_dir={cfg.data_dir}')
    return f'python train.py {shell(*words)}'


if __name__ == '__main__':
    call_main(main)
