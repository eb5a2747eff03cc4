"""
Tokenizes text into bins: documents -> tokenizer -> DATA_DIR/NAME/{train,val}.bin + meta.json.

    $ python prepare.py                             # the built-in corpus: this Python's standard library
    $ python prepare.py book.txt notes/ --name=mine --tokenizer=bpe:8192   # files, and folders of files
    $ python prepare.py 'pages/*.jsonl.gz' --name=pages --tokenizer=gpt2   # one document per row; CSV, ...
    $ zcat dump.gz | python prepare.py - --name=dump       # standard input; https://... is downloaded
    $ python prepare.py fineweb_edu --shards=1             # a named corpus
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
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import urlsplit

import numpy as np

from configurator import call_main, configure
from hotloop.data import dataset
from hotloop.data.bpe import count_words, learn_merges
from hotloop.data.chat import ANSWERS, CHATS, MARK, marks_of
from hotloop.data.documents import ReadConfig, RowCounts
from hotloop.data.encode import batches_of, encode_all, id_type
from hotloop.data.holdout import plan_holdout, split_pieces
from hotloop.data.sources import (
    COMPRESSED,
    URLS,
    all_files,
    check_kinds,
    corpus_of,
    missing_dataset,
    open_corpus,
)
from hotloop.data.tokenizer import BPETokenizer, tokenizer_from
from hotloop.data.tokenizer_source import find_tokenizer
from hotloop.system.files import Progress, counted, is_inside, read_json, replacing
from hotloop.system.host import cores
from hotloop.system.text import file_size, shell


@dataclass
class PrepareConfig:
    # --- dataset
    name: str | None = None  # folder under data_dir; None: the name of the source
    data_dir: str = 'data'  # folder of datasets and downloads
    inspect: bool = False  # only show the contents of the named datasets, ours or nanoGPT's
    shards: int | None = None  # number of files to use from a named corpus; None: all
    # --- validation
    val: str | None = None  # separate source; None: hold out documents, or the end of a single document
    val_fraction: float | None = None  # fraction to hold out; None: 0.1, or a named corpus's default
    seed: int = 1337  # chooses which documents are held out
    # --- tokens
    tokenizer: str | None = None  # byte, char, bpe:SIZE (learned), gpt2, a run, ...; None: byte or a corpus's
    bos: bool | None = None  # begin documents with the begin-of-text id; None: if the tokenizer's file does
    num_proc: int | None = None  # number of tokenizer processes; None: one per CPU core

    def problems(self):
        """The problems with the settings, one sentence each."""
        problems = []
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            problems.append(f'val_fraction={self.val_fraction} must be between 0 and 1')
        if self.val and self.val_fraction is not None:
            problems.append(f'val={self.val!r} is a separate validation source; remove val_fraction')
        for name in ('shards', 'num_proc'):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f'{name}={value} must be at least 1')
        return problems


# -----------------------------------------------------------------------------
# names and sources: the positional arguments

def default_name(sources):
    """The name of a dataset made from these sources. ValueError if they suggest none."""
    source = sources[0]
    if source == '-':
        return 'stdin'
    if source.startswith(URLS):
        source = urlsplit(source).path
    is_pattern = any(c in source for c in '*?[') and not os.path.exists(source)
    if len(sources) > 1 or is_pattern:
        raise ValueError(f'{" ".join(sources)}: give the dataset a name with --name')
    name = os.path.basename(os.path.abspath(source))
    if not os.path.isdir(source):
        name, suffix = os.path.splitext(name)
        name = os.path.splitext(name)[0] if suffix.lower() in COMPRESSED else name
    return re.sub(r'[,:\\]|\.(?=partial(\.|$))', '_', name)  # what dataset_folder() refuses


def output_folder(data_dir, name):
    """The folder of a new dataset. ValueError if it contains anything but a dataset of ours."""
    folder = dataset.dataset_folder(data_dir, name)
    folder = os.path.realpath(folder) if os.path.islink(folder) else folder
    names = os.listdir(folder) if os.path.isdir(folder) else []
    names = [name for name in names if not name.startswith('.')]  # such as .DS_Store
    is_own = set(names) <= {*dataset.OWN_FILES} and (not names or 'meta.json' in names)
    if not is_own or os.path.isfile(folder):
        raise ValueError(f'{folder} exists and was not created by prepare.py; choose another --name')
    return folder


def open_sources(sources, corpus, cfg, reading, spool):
    """
    (training files, validation files) of the positional arguments and --val. corpus: that of corpus_of().
    Standard input is copied to `spool`. ValueError if none is left to train on, or the kinds do not fit.
    """
    val_files = all_files([cfg.val], reading, cfg.data_dir, spool) if cfg.val else []
    if corpus.train:
        files, own_val_files = open_corpus(sources[0], cfg)
        val_files = val_files or own_val_files
    else:
        files = all_files(sources, reading, cfg.data_dir, spool)
    validated = {os.path.realpath(file.path) for file in val_files}
    once = {os.path.realpath(file.path): file for file in files}  # of sources that overlap, too
    kept = [file for path, file in once.items() if path not in validated]
    if not kept:
        raise ValueError('all files are validation files; none is left to train on')
    kinds = {file.kind for file in (*kept, *val_files)}
    check_kinds(kinds, reading, ' '.join(sources))
    if 'tokens' in kinds and (len(kinds) > 1 or cfg.tokenizer not in (None, 'gpt2')):
        raise ValueError('shards of GPT-2 tokens cannot be mixed with text or another tokenizer; '
                         'make two datasets, and train on both with --dataset=A,B')
    return kept, val_files


# -----------------------------------------------------------------------------
# tokenizer

BPE_BYTES = 1 << 28  # size of the files that merges are learned from


def learn_tokenizer(name, read_pieces, several, num_bytes):
    """
    The tokenizer `char` or `bpe:SIZE` of the text. read_pieces(counts=RowCounts()) yields (split, Piece);
    num_bytes: of files. Characters are collected from all pieces. Merges are learned from the training split;
    above BPE_BYTES, from an evenly spaced sample of its pieces. The marks of chat templates become special
    ids. ValueError if SIZE has no room for them.
    """
    counts = RowCounts()
    pieces = read_pieces(counts=counts)
    if name == 'char':
        chars = set()
        for _, piece in pieces:
            for text, *_ in piece.parts:
                chars.update(text)
        return tokenizer_from({'kind': 'char', 'chars': ''.join(sorted(chars)), 'eot': several})
    every = max(-(-num_bytes // BPE_BYTES), 1)
    sample = (piece for i, (split, piece) in enumerate(pieces) if split == 'train' and i % every == 0)
    parts = (part for piece in sample for part in piece.parts)
    words = count_words(MARK.sub('', text) if markup else text for text, markup, _ in parts)
    specials = [*marks_of(counts.templates), '<|endoftext|>']
    size = int(name[4:]) - len(specials)
    if size < 256:
        raise ValueError(f'tokenizer={name} has no room for 256 bytes and the special ids '
                         f'{", ".join(specials)}; use bpe:{256 + len(specials)} or more')
    tokens = learn_merges(words, size)
    ids = {special: len(tokens) + i for i, special in enumerate(specials)}
    return BPETokenizer(tokens, specials=ids, eot=ids['<|endoftext|>'])


# -----------------------------------------------------------------------------
# the dataset

# the flags that command_for() adds, or that do not change a dataset
OTHER_FLAGS = ('name', 'data_dir', 'tokenizer', 'num_proc', 'inspect')


def write_dataset(folder, files, val_files, cfg, reading, tokenizer, origin):
    """Writes the documents of the files to an empty folder. Returns the metadata, which includes `origin`."""
    num_bytes = sum(os.path.getsize(file.path) for file in (*files, *val_files))
    print(f'{origin["source"]}: {counted(len(files) + len(val_files), "file")}, {file_size(num_bytes)}',
          flush=True)
    holdout = plan_holdout(files, val_files, cfg, reading)
    read_pieces = functools.partial(split_pieces, files, val_files, reading, holdout)
    tokenizer = tokenizer or learn_tokenizer(cfg.tokenizer, read_pieces, holdout.several, num_bytes)
    if cfg.bos and tokenizer.bos is None:
        raise ValueError(f'bos=True needs a begin-of-text id, and tokenizer={cfg.tokenizer!r} has none')
    bos = {None: tokenizer.first, True: tokenizer.bos, False: None}[cfg.bos]
    eot = tokenizer.eot if holdout.several else None
    progress, counts, names = Progress(num_bytes), RowCounts(), set()
    pieces, tasks = read_pieces(progress, counts), os.path.join(folder, 'val.jsonl')
    pieces = keep_rows(find_special_names(pieces, tokenizer, names), tasks)
    encoded = encode_all(tokenizer, batches_of(pieces), cfg.num_proc or cores(), bos, eot)
    splits, in_loss = write_bins(folder, encoded, id_type(tokenizer), counts)
    progress.close()
    if names:
        print(f'note: names of special ids in the text, such as {min(names)}, are encoded as plain text; use '
              '--separator to split a text into documents, and rows with messages for chats')
    report(counts, in_loss, sum(split['tokens'] for split in splits.values()))
    check_splits(splits, counts, origin['source'], cfg, reading)
    if not counts.templates:  # no instruction data
        os.remove(tasks)
    meta = {'format': dataset.FORMAT, 'dtype': np.dtype(id_type(tokenizer)).name,
            'vocab_size': tokenizer.n_vocab, 'tokenizer': tokenizer.spec(), 'eot': tokenizer.eot,
            'splits': splits, 'templates': sorted(counts.templates), 'bos': bos, **origin}
    with replacing(os.path.join(folder, 'meta.json')) as f:
        f.write(json.dumps(meta, indent=1).encode())
    return meta


def find_special_names(pieces, tokenizer, names):
    """Yields the pieces, (split, Piece). Adds to names those of special ids at the beginning of texts."""
    for i, (split, piece) in enumerate(pieces):
        if i < 100 and isinstance(piece.parts, list):
            for text, markup, _ in piece.parts:
                names.update(() if markup else tokenizer.special_names.findall(text[:10_000]))
        yield split, piece


def keep_rows(pieces, path):
    """
    Yields the pieces, (split, Piece), without their rows. Writes the rows that are for validation to a .jsonl
    file, by which sample.py --eval_code judges a model.
    """
    with open(path, 'w', encoding='utf-8') as f:
        for split, piece in pieces:
            if split == 'val' and piece.row is not None:
                f.write(json.dumps(piece.row, default=str) + '\n')
            yield split, piece._replace(row=None)


def write_bins(folder, batches, dtype, counts):
    """Writes batches of encode_all(), which fill the RowCounts. Returns ({split: counts}, tokens in loss)."""
    writers = {split: dataset.BinWriter(folder, split, dtype) for split in dataset.SPLITS}
    in_loss = 0
    for batch in batches:
        for split, encoded in batch.items():
            writers[split].add(encoded)
            in_loss += len(encoded.ids) if encoded.mask is None else int(encoded.mask.sum())
    return {split: writer.close(rows=bool(counts.templates)) for split, writer in writers.items()}, in_loss


def check_splits(splits, counts, source, cfg, reading):
    """ValueError if a split has no text. splits: of write_bins(); counts: a RowCounts."""
    empty = [split for split in splits if not splits[split]['bytes']]
    if not empty:
        return
    documents = sum(split['documents'] for split in splits.values())
    skipped = f'{counted(counts.skipped, "row")} without text or without an answer'
    if 'train' in empty and counts.skipped:
        raise ValueError(f'{source}: {skipped}, and none to train on; an answer is in one of '
                         f'{", ".join(ANSWERS)}, or in a message of the assistant; --text_field names the '
                         'field of a text')
    if not documents:
        raise ValueError(f'{source} contains no text')
    found = counted(documents, 'document') + (f' and {skipped}' if counts.skipped else '')
    kind = 'rows with an answer' if counts.templates else 'documents'
    kind = 'files' if reading.format == 'functions' else kind  # each is held out with all its functions
    remedy = f'add other {kind}, or name {"another" if cfg.val else "a"} validation source with --val'
    raise ValueError(f'{source} has {found}: no text for the {empty[0]} split with val={cfg.val!r}, '
                     f'val_fraction={cfg.val_fraction}, separator={reading.separator!r}; {remedy}')


def report(counts, in_loss, tokens):
    """Prints what became of the rows and the bytes: a RowCounts, and the number of tokens in the loss."""
    if counts.kinds:
        kinds = ', '.join(counted(number, kind) for kind, number in sorted(counts.kinds.items()))
        print(f'instruction data ({kinds}) in {named_templates(counts.templates)}: {in_loss:,} of {tokens:,} '
              f'tokens ({in_loss / max(tokens, 1):.0%}) count toward the loss')
    if counts.unseparated:
        print(f'note: prompt and completion are joined as they are, in {counted(counts.unseparated, "row")} '
              'without white space between them; end the prompts with a newline, or use --template=alpaca')
    unused = [name for name, is_used in counts.fields.items() if not is_used]
    if unused:
        more = ', ...' if len(unused) > 10 else ''
        print(f'fields not used: {", ".join(unused[:10])}{more}; --text_field=NAME uses one as the text')
    for sentence in counts.left_out():
        print(sentence)


def named_templates(names):
    """Names of templates in words."""
    words = ', '.join(sorted(names))
    return f'the {words} template' if len(names) == 1 else f'the templates {words}'


def inspect(name, data_dir):
    """
    Prints the tokenizer, counts of each split, the most frequent training tokens, and text from the middle of
    the training split, with tokens that do not count toward the loss in brackets.
    """
    folder = dataset.dataset_folder(data_dir, name)
    if not os.path.exists(os.path.join(folder, 'train.bin')):
        raise ValueError(missing_dataset(folder, name, data_dir))
    meta = dataset.read_meta(folder)
    tokenizer = tokenizer_from(meta['tokenizer'])
    kind = meta['tokenizer'].get('name') or meta['tokenizer']['kind']
    origin = "nanoGPT's: no meta.json" if meta['foreign'] else f'from {meta.get("source", "unknown")}'
    print(f'{folder}: {kind} tokenizer of {tokenizer.n_vocab:,} ids, {meta["dtype"]}, {origin}')
    if meta.get('templates'):
        print(f'instruction data in {named_templates(meta["templates"])}')
    bins = {}
    for split in dataset.SPLITS:
        tokens = dataset.open_bin(os.path.join(folder, f'{split}.bin'), meta['dtype'])
        mask = dataset.open_bin(os.path.join(folder, f'{split}.mask.bin'), 'uint8')
        counts = dataset.count_ids(tokens, tokenizer.n_vocab)
        bins[split] = tokens, mask, counts
        num_bytes = counts[:tokenizer.n_vocab] @ tokenizer.sizes  # larger ids pad the vocabulary
        ends = counted(0 if tokenizer.eot is None else counts[tokenizer.eot], 'document end')
        if 'documents' in meta['splits'].get(split, {}):  # in a chat, other turns may end with this id too
            ends = counted(meta['splits'][split]['documents'], 'document')
        share = f', {np.count_nonzero(mask) / len(mask):.0%} of tokens in the loss' if len(mask) else ''
        distinct = counted(np.count_nonzero(counts), 'distinct id')
        print(f'{split:>5}: {counted(len(tokens), "token")}, {num_bytes / max(len(tokens), 1):.2f} bytes '
              f'per token, {ends}, {distinct}{share}')
    tokens, mask, counts = bins['train']
    most = np.argsort(-counts, kind='stable')[:10].tolist()
    shares = [f'"{dataset.show(tokenizer, [i])}" {counts[i] / counts.sum():.1%}' for i in most if counts[i]]
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
    (cfg, reading), given, sources = configure(PrepareConfig, ReadConfig, argv=argv, files=False, about=__doc__)
    if cfg.inspect:
        for name in sources or [cfg.name or 'stdlib']:
            inspect(name, cfg.data_dir)
        return
    sources = sources or ['stdlib']
    values = {**vars(cfg), **vars(reading)}
    flags = [f'--{key}={values[key]}' for key in given if key not in OTHER_FLAGS]
    origin = {'source': shell(*sources), 'flags': flags}
    name = cfg.name or default_name(sources)
    folder = output_folder(cfg.data_dir, name)
    corpus = corpus_of(sources, cfg.shards)
    try:
        with dataset.partial_folder(folder) as partial:
            found = find_tokenizer(cfg.tokenizer or corpus.tokenizer, cfg.data_dir)  # errors before downloads
            files, val_files = open_sources(sources, corpus, cfg, reading, f'{partial}.stdin')
            if files[0].kind == 'tokens':
                cfg.tokenizer, found = 'gpt2', find_tokenizer('gpt2', cfg.data_dir)
            cfg.tokenizer = cfg.tokenizer or corpus.tokenizer
            cfg.val_fraction = cfg.val_fraction or corpus.val_fraction
            reading.separator = reading.separator or corpus.separator
            if reading.template == 'auto' and files[0].kind != 'functions':  # which are continued, not asked
                reading.template = found.template or 'auto'
            meta = write_dataset(partial, files, val_files, cfg, reading, found.tokenizer, origin)
    except BrokenPipeError:  # of what we print
        raise
    except OSError as e:
        raise ValueError(f'{folder} could not be created: {e}') from e
    if found.template == '' and reading.template == 'auto' and {*CHATS} & {*meta['templates']}:
        print(f'note: the chat template of {cfg.tokenizer} is none of {", ".join(CHATS)}; its model has not '
              'seen the template of these rows, and learns it in tuning')
    print(f'tokenizer: {cfg.tokenizer}, {meta["vocab_size"]:,} ids')
    for split, counts in meta['splits'].items():
        print(f'{split:>5}: {counted(counts["tokens"], "token")}, {counted(counts["bytes"], "byte")}, '
              f'{counted(counts["documents"], "document")}, '
              f'{counts["bytes"] / max(counts["tokens"], 1):.2f} bytes per token')
    train, val = (meta['splits'][split]['bytes'] for split in dataset.SPLITS)
    if not val_files and not 0.5 <= val / (train + val) / cfg.val_fraction <= 2:
        print(f'note: {val / (train + val):.2%} of the text is held out, not {100 * cfg.val_fraction:g}%, '
              'because documents stay complete; --val names a validation source')
    print(f'train on it with: {training_command(name, cfg, found, bool(meta["templates"]))}')


LORA_DIR = 'out-lora'  # of config/lora.py


def training_command(name, cfg, found, has_rows):
    """The command that trains on a dataset, or tunes the model that gave it its tokenizer, by a Found."""
    words = ['config/lora.py', f'--init_from={found.model}'] if found.model else ['config/quickstart.py']
    words.append(f'--dataset={name}')
    if found.model and not has_rows:
        words.append('--pack_rows=False')
    if found.model and not found.is_run:  # its own context may be 100 times as long
        path = os.path.join(found.model, 'config.json')
        config = read_json(path) if os.path.exists(path) else {}  # of a hub model it is not here
        sizes = [config.get(key) or 512 for key in ('n_positions', 'max_position_embeddings')]
        words.append(f'--block_size={min(512, *sizes)}')
    if found.model and is_inside(found.model, LORA_DIR):
        words.append(f'--out_dir={LORA_DIR}-2')
    if cfg.data_dir != PrepareConfig.data_dir:
        words.append(f'--data_dir={cfg.data_dir}')
    return f'python train.py {shell(*words)}'


if __name__ == '__main__':
    call_main(main)
