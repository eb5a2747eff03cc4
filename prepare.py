"""
Text into token bins: documents -> tokenizer -> DATA_DIR/NAME/{train,val}.bin + meta.json.

    $ python prepare.py                             # the embedded corpus: this Python's standard library
    $ python prepare.py book.txt notes/ --name=mine --tokenizer=bpe:8192   # files, and folders of files
    $ python prepare.py 'pages/*.jsonl.gz' --name=pages --tokenizer=gpt2   # a document a row; CSV, parquet
    $ zcat dump.gz | python prepare.py - --name=dump       # standard input; https://... is downloaded
    $ python prepare.py fineweb_edu --shards=1             # a corpus by name
    $ python prepare.py --inspect mine                     # what is in a dataset

A bin is nanoGPT's: raw little-endian token ids, uint16 (uint32 if the vocabulary needs it), no header.
meta.json beside the bins holds the tokenizer itself and what the numbers mean. A dataset is written aside
and renamed when it is complete. The same input gives the same bytes, however many processes tokenize it,
and memory is bounded by them, not by the corpus.
"""

import contextlib
import glob
import hashlib
import json
import os
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from configurator import call_main, configure
from hotloop.bpe import train_bpe
from hotloop.dataset import (
    FORMAT,
    OWN_FILES,
    SPLITS,
    BinWriter,
    count_ids,
    dataset_folder,
    open_bin,
    partial_folder,
    read_meta,
    show,
)
from hotloop.documents import ReadConfig, RowCounts, documents_in
from hotloop.encode import batches_of, encode_all, id_type
from hotloop.files import Progress, replacing
from hotloop.host import cores
from hotloop.sources import COMPRESSED, CORPORA, check_kinds, files_of, how_to_make, open_corpus
from hotloop.tokenizer import (
    MAX_VOCAB,
    TIKTOKEN_NAMES,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    TiktokenTokenizer,
    read_tokenizer_json,
    tokenizer_from,
)

REMOVED = {'append': 'a second dataset of the same tokenizer, and --dataset=A,B in training'}


@dataclass
class PrepareConfig:
    # --- dataset
    name: str | None = None  # folder under data_dir; None: the source's own name
    data_dir: str = 'data'  # where datasets live, and downloads
    inspect: bool = False  # instead: show what is in the datasets that are named, ours or nanoGPT's
    shards: int | None = None  # only so many files of a corpus by name
    # --- validation
    val: str | None = None  # a source of its own; None: documents are held out, or the end of a single one
    val_fraction: float | None = None  # how much is held out; None: 0.1, or what suits a corpus by name
    seed: int = 1337  # chooses which documents are held out
    # --- tokens
    tokenizer: str | None = None  # byte, char, bpe:SIZE (learned here), gpt2 and the like, a tokenizer.json
    bos: bool = False  # begin each document with the tokenizer's begin-of-text id
    num_proc: int | None = None  # processes that tokenize; None: the machine's cores

    def problems(self):
        """What is wrong with the settings, a sentence each."""
        problems = []
        name = self.tokenizer or 'byte'
        kind, _, size = name.partition(':')
        is_file = os.path.basename(name) == 'tokenizer.json' or os.path.isdir(name)
        if kind == 'bpe':
            if not (size.isdecimal() and 257 <= int(size) <= MAX_VOCAB):
                problems.append(f'tokenizer={name!r}: write bpe:SIZE with a vocabulary of 257 (the bytes '
                                f'and the end of text) to {MAX_VOCAB:,}, such as bpe:8192')
        elif name not in ('byte', 'char', *TIKTOKEN_NAMES) and not is_file:
            problems.append(f'tokenizer={name!r} is unknown; there are byte, char, bpe:SIZE, '
                            f'{", ".join(TIKTOKEN_NAMES)}, and the path of a tokenizer.json')
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            problems.append(f'val_fraction={self.val_fraction} must be between 0 and 1')
        if self.val and self.val_fraction is not None:
            problems.append(f'val={self.val!r} is a validation source of its own; leave out '
                            f'val_fraction={self.val_fraction}')
        for name in ('shards', 'num_proc'):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f'{name}={value} must be at least 1')
        return problems


# -----------------------------------------------------------------------------
# sources: the words of the command line -> files

def default_name(sources):
    """The name of a dataset made from these sources. ValueError if they do not suggest one."""
    source = sources[0]
    if source.startswith(('http://', 'https://')):
        source = source.split('?')[0].split('#')[0]
    is_pattern = any(c in source for c in '*?[') and not os.path.exists(source)
    if len(sources) > 1 or is_pattern:
        raise ValueError(f'{" ".join(sources)}: give the dataset a name with --name')
    if source == '-':
        return 'stdin'
    name = os.path.basename(os.path.abspath(source))
    if os.path.isdir(source) or source == 'stdlib' or source in CORPORA:
        return name
    stem, suffix = os.path.splitext(name)
    return os.path.splitext(stem)[0] if suffix.lower() in COMPRESSED else stem


def open_sources(sources, cfg, reading, spool):
    """
    (files, validation files, cfg, reading) of the words of the command line. The settings come back with
    the tokenizer, val_fraction and a corpus's separator filled in. Standard input is copied to `spool`.
    """
    if [*sources, cfg.val].count('-') > 1:
        raise ValueError('standard input is named twice, and can be read only once')
    is_corpus = len(sources) == 1 and sources[0] in CORPORA and not os.path.exists(sources[0])
    if cfg.shards and not is_corpus:
        raise ValueError(f'shards={cfg.shards} is for a corpus by name: {", ".join(CORPORA)}')
    fraction, val_files = 0.1, []
    if cfg.val:
        val_files = files_of(cfg.val, reading, cfg.data_dir, f'{spool}.val')
    if is_corpus:
        corpus = CORPORA[sources[0]]
        cfg = replace(cfg, tokenizer=cfg.tokenizer or corpus.tokenizer)
        reading = replace(reading, separator=reading.separator or corpus.separator)
        load_tokenizer(cfg.tokenizer)  # if it is missing, say so before the download
        files, own_val_files = open_corpus(sources[0], cfg)
        val_files = val_files or own_val_files
        fraction = corpus.val_fraction
    elif len(sources) == 1:
        files = files_of(sources[0], reading, cfg.data_dir, spool)
        if sources[0] == 'stdlib':
            fraction = 0.05
    else:
        files = []
        for number, source in enumerate(sources):
            folder = os.path.basename(os.path.abspath(source))  # files of two folders may share a name
            for file in files_of(source, reading, cfg.data_dir, f'{spool}.{number}'):
                files.append(file._replace(name=f'{folder}/{file.name}'))
    files = without_validation(files, val_files)
    kinds = {file.kind for file in (*files, *val_files)}
    check_kinds(kinds, reading, ' '.join(sources))
    cfg = replace(cfg, tokenizer=choose_tokenizer(cfg.tokenizer, kinds),
                  val_fraction=cfg.val_fraction or fraction)
    return files, val_files, cfg, reading


def without_validation(files, val_files):
    """The files to train on, without those that are validated on."""
    validated = {os.path.realpath(file.path) for file in val_files}
    kept = [file for file in files if os.path.realpath(file.path) not in validated]
    if not kept:
        raise ValueError('all files are validated on, and none is left to train on')
    if len(kept) < len(files):
        print(f'{len(files) - len(kept):,} files are validated on and left out of training')
    return kept


# -----------------------------------------------------------------------------
# validation: a source of its own, a cut in a single document, or whole documents by hash

SMALL = 1 << 24  # bytes: larger texts are cut at the end of a line, more documents chosen one by one


class Holdout(NamedTuple):
    """
    How documents are split. several: whether there is more than one, so that their ends are marked.
    cut: how many characters of a single document, or tokens of shards, to train on; at_line: or fewer, to
    the end of a line. Without a cut, documents are held out whose hash is in `held_out` or below `limit`.
    """
    several: bool
    cut: int | None = None
    at_line: bool = False
    held_out: frozenset = frozenset()
    limit: bytes = b''


def holdout_hash(key, seed):
    """Documents are held out in the order of this: a pure function of the document's key and the seed."""
    return hashlib.sha256(f'{seed} {key}'.encode('utf-8', 'surrogateescape')).digest()


def hold_out(sizes, fraction):
    """
    The hashes of the documents to hold out, from {hash: bytes}: the lowest ones until they make up the
    fraction of all bytes. At least one document stays on either side, and one of more than half of all
    bytes is trained on.
    """
    total, held_bytes, held_out = sum(sizes.values()), 0, set()
    candidates = sorted(key for key in sizes if 2 * sizes[key] <= total)
    for key in candidates[:len(sizes) - 1]:
        if held_out and held_bytes >= fraction * total:
            break
        held_out.add(key)
        held_bytes += sizes[key]
    return frozenset(held_out)


def is_single(files, reading):
    """Whether the files are one document."""
    if files[0].kind == 'joined':
        return True
    return len(files) == 1 and files[0].kind == 'text' and not reading.separator


def plan_holdout(files, val_files, cfg, reading):
    """
    The Holdout of these files. A single document is cut at a character, above SMALL at the end of a line.
    Files that are documents are held out to make up the exact fraction of bytes. So are documents within
    files, unless they are too many to count, then each with that probability. Shards of tokens give their
    end. All but files are read once here, and again when they are tokenized.
    """
    single = is_single(files, reading) and (not val_files or is_single(val_files, reading))
    if val_files:
        return Holdout(several=not single)
    num_bytes = sum(os.path.getsize(file.path) for file in files)
    if single:
        length = sum(len(piece.parts[0][0]) for piece in documents_in(files, reading))
        return Holdout(several=False, cut=int(length * (1 - cfg.val_fraction)), at_line=num_bytes > SMALL)
    if files[0].kind == 'tokens':
        length = sum(len(piece.parts) for piece in documents_in(files, reading))
        return Holdout(several=True, cut=int(length * (1 - cfg.val_fraction)))
    sizes = Counter()
    if all(file.kind == 'text' for file in files) and not reading.separator:
        for file in files:
            sizes[holdout_hash(file.name, cfg.seed)] = os.path.getsize(file.path)
    else:
        for piece in documents_in(files, reading):
            key = holdout_hash(piece.key, cfg.seed)
            sizes[key] += sum(len(text.encode()) for text, *_ in piece.parts)
            if num_bytes > SMALL and len(sizes) > min(50 / cfg.val_fraction, 1e6):
                return Holdout(several=True, limit=int(cfg.val_fraction * 2**64).to_bytes(8, 'big'))
    return Holdout(several=True, held_out=hold_out(sizes, cfg.val_fraction))


def split_documents(pieces, holdout, seed):
    """Yields (split, Piece) of the pieces of all documents."""
    for piece in pieces:
        if piece.start:
            key = holdout_hash(piece.key, seed)
            split = 'val' if key in holdout.held_out or key < holdout.limit else 'train'
        yield split, piece


def cut_document(pieces, holdout):
    """Yields (split, Piece) of a single document, cut as a Holdout says."""
    length, val_started = holdout.cut, False
    for piece in pieces:
        text = piece.parts[0][0]
        if holdout.at_line and 0 < length < len(text):
            length = text.rfind('\n', 0, length) + 1 or length
        head, tail = text[:length], text[length:]
        length -= len(head)
        if head:
            yield 'train', piece._replace(parts=[(head, False, True)], end=length == 0)
        if tail:
            yield 'val', piece._replace(parts=[(tail, False, True)], start=not val_started)
            val_started = True


def cut_shards(pieces, holdout):
    """Yields (split, Piece) of shards of tokens. No piece is cut, because each begins with a document."""
    done = 0
    for piece in pieces:
        done += len(piece.parts)
        yield 'train' if done <= holdout.cut else 'val', piece


# -----------------------------------------------------------------------------
# tokenizer

BPE_BYTES = 1 << 28  # of files that merges are learned from


def choose_tokenizer(name, kinds):
    """The tokenizer for files of these kinds: the one asked for, gpt2 for shards of its tokens, or byte."""
    if 'tokens' not in kinds:
        return name or 'byte'
    if len(kinds) > 1:
        raise ValueError('shards of tokens and files of text cannot be one dataset; make two, and train on '
                         'both with --dataset=A,B')
    if name not in (None, 'gpt2'):
        raise ValueError(f"shards hold GPT-2's tokens; tokenizer={name!r} cannot change that")
    return 'gpt2'


@lru_cache(maxsize=1)  # a corpus asks before its download and after it
def load_tokenizer(name):
    """The tokenizer of a name; None for one that is made from the text."""
    if name == 'char' or name.startswith('bpe:'):
        return None
    if name == 'byte':
        return ByteTokenizer()
    return TiktokenTokenizer(name) if name in TIKTOKEN_NAMES else read_tokenizer_json(name)


def make_tokenizer(name, pieces, several, num_bytes):
    """
    The tokenizer of a name. pieces: (split, Piece) of all documents, num_bytes of files. Characters are
    collected from all of them. Merges are learned from the training split, above BPE_BYTES from pieces
    that are evenly spread over it.
    """
    kind, _, vocab_size = name.partition(':')
    if kind == 'char':
        chars = set()
        for _, piece in pieces:
            for text, *_ in piece.parts:
                chars.update(text)
        return CharTokenizer(''.join(sorted(chars)), eot=several)
    if kind == 'bpe':
        every = max(-(-num_bytes // BPE_BYTES), 1)
        sample = (piece for i, (split, piece) in enumerate(pieces) if split == 'train' and i % every == 0)
        texts = (text for piece in sample for text, *_ in piece.parts)
        return BPETokenizer(train_bpe(texts, int(vocab_size) - 1))
    return load_tokenizer(name)


# -----------------------------------------------------------------------------
# the dataset

def write_dataset(folder, files, val_files, cfg, reading, source):
    """Writes the documents of files as a dataset that replaces `folder` once complete. Returns its meta."""
    num_bytes = sum(os.path.getsize(file.path) for file in (*files, *val_files))
    holdout = plan_holdout(files, val_files, cfg, reading)

    def pieces(*observers):
        documents = documents_in(files, reading, *observers)
        if holdout.cut is None:
            yield from split_documents(documents, holdout, cfg.seed)
        elif files[0].kind == 'tokens':
            yield from cut_shards(documents, holdout)
        else:
            yield from cut_document(documents, holdout)
        for piece in documents_in(val_files, reading, *observers):
            yield 'val', piece

    with partial_folder(folder) as partial:
        tokenizer = make_tokenizer(cfg.tokenizer, pieces(), holdout.several, num_bytes)
        if cfg.bos and tokenizer.bos is None:
            raise ValueError(f'bos=True needs a begin-of-text id, and tokenizer={cfg.tokenizer!r} has none; '
                             'leave it out, because an end-of-text id stands between documents')
        bos = tokenizer.bos if cfg.bos else None
        eot = tokenizer.eot if holdout.several else None
        dtype = id_type(tokenizer)
        writers = {split: BinWriter(partial, split, dtype) for split in SPLITS}
        progress, counts = Progress(num_bytes), RowCounts()
        batches = batches_of(pieces(progress, counts))
        for batch in encode_all(tokenizer, batches, cfg.num_proc or cores(), bos, eot):
            for split, encoded in batch.items():
                writers[split].add(encoded)
        progress.close()
        if counts.skipped:
            print(f'{counts.skipped:,} rows without text, or without an answer, were left out')
        splits = {split: writer.close() for split, writer in writers.items()}
        check_splits(splits, source, cfg.val, reading.separator)
        meta = {'format': FORMAT, 'dtype': np.dtype(dtype).name, 'vocab_size': tokenizer.n_vocab,
                'tokenizer': tokenizer.spec(), 'eot': tokenizer.eot, 'splits': splits, 'source': source,
                'templates': sorted(counts.templates), 'bos': bos}
        with replacing(os.path.join(partial, 'meta.json')) as f:
            f.write(json.dumps(meta, indent=1).encode())
    return meta


def check_splits(splits, source, val, separator):
    """ValueError if there is no text to train on, or none to validate on."""
    empty = [split for split in SPLITS if not splits[split]['bytes']]
    if len(empty) == 2 or (empty and val):
        raise ValueError(f'{source if "train" in empty else val} holds no text')
    if empty:
        hint = f' (does {separator!r} occur in it?)' if separator else ''
        raise ValueError(f'no text of {source} would be in the {empty[0]} split{hint}; name a validation '
                         'source with --val, or change --val_fraction')


def output_folder(data_dir, name):
    """The folder of a new dataset. ValueError if it holds anything but a dataset of this program."""
    folder = dataset_folder(data_dir, name)
    if ',' in name or name.split('/')[0] in ('downloads', 'pretrained'):
        raise ValueError(f'a dataset cannot be called {name!r}: commas separate the datasets of a mixture, '
                         'downloads and pretrained have their own use; choose another --name')
    folder = os.path.realpath(folder) if os.path.islink(folder) else folder
    foreign = []
    if os.path.isdir(folder):
        foreign = sorted(os.listdir(folder))
        if 'meta.json' in foreign:
            foreign = [name for name in foreign if name not in OWN_FILES]
    elif os.path.lexists(folder):
        foreign = ['a file']
    if foreign:
        raise ValueError(f'{folder} exists and was not made by this program: {foreign[0]}; choose another '
                         '--name')
    return folder


# -----------------------------------------------------------------------------
# --inspect

def inspect_dataset(folder):
    """
    The lines that --inspect prints: tokenizer, counts of each split, the most frequent training tokens,
    and text from the middle of the training split.
    """
    meta = read_meta(folder)
    tokenizer = tokenizer_from(meta['tokenizer'])
    if not any(os.path.exists(os.path.join(folder, f'{split}.bin')) for split in SPLITS):
        raise ValueError(f'{folder} holds neither train.bin nor val.bin')
    name = meta['tokenizer'].get('name') or meta['tokenizer']['kind']
    origin = "nanoGPT's: no meta.json" if meta['foreign'] else f'from {meta.get("source", "unknown")}'
    lines = [f'{folder}: {name} tokenizer of {tokenizer.n_vocab:,} ids, {meta["dtype"]}, {origin}']
    counts = {}
    for split in SPLITS:
        counts[split] = count_ids(open_bin(os.path.join(folder, f'{split}.bin'), meta['dtype']))
        lines.append(f'{split:>5}: {describe_counts(counts[split], tokenizer)}')
    frequent = []
    for i in np.argsort(-counts['train'], kind='stable')[:10].tolist():
        if counts['train'][i]:
            share = counts['train'][i] / counts['train'].sum()
            frequent.append(f'"{show(tokenizer, [i])}" {share:.1%}')
    lines.append(f'most frequent: {", ".join(frequent)}')
    lines.append(middle_window(folder, meta['dtype'], tokenizer))
    return lines


def describe_counts(counts, tokenizer):
    """A split in a line. counts: how often each id occurs in it."""
    num_tokens, ends = int(counts.sum()), 0
    if tokenizer.eot is not None and tokenizer.eot < len(counts):
        ends = counts[tokenizer.eot]
    known = min(len(counts), tokenizer.n_vocab)  # larger ids pad the vocabulary
    num_bytes = (counts[:known] * tokenizer.sizes[:known]).sum()
    return (f'{num_tokens:,} tokens, {num_bytes / max(num_tokens, 1):.2f} bytes a token, '
            f'{ends:,} document ends, {np.count_nonzero(counts):,} different ids')


def middle_window(folder, dtype, tokenizer, length=200):
    """Text from the middle of the training split. Brackets enclose what does not count in the loss."""
    tokens = open_bin(os.path.join(folder, 'train.bin'), dtype)
    mask = np.ones(len(tokens), dtype=np.uint8)
    path = os.path.join(folder, 'train.mask.bin')
    if os.path.exists(path):
        mask = open_bin(path, 'uint8')
    if len(mask) != len(tokens):
        raise ValueError(f'{path} has {len(mask):,} bytes for {len(tokens):,} tokens; prepare it again')
    middle = len(tokens) // 2
    window = slice(middle, middle + length)
    pairs = zip(tokens[window].tolist(), mask[window].tolist(), strict=True)
    text = ''
    for counts, run in groupby(pairs, key=lambda pair: pair[1]):
        shown = show(tokenizer, [token for token, _ in run])
        text += shown if counts else f'[{shown}]'
    return f'training tokens from {middle:,} on: {text}'


# -----------------------------------------------------------------------------

def main(argv=None):
    cfg, reading, given, sources = configure(PrepareConfig, ReadConfig, argv=argv, files=False,
                                             about=__doc__, removed=REMOVED)
    if cfg.inspect:
        inspect(sources or [cfg.name or 'stdlib'], cfg.data_dir, given)
        return
    sources = sources or ['stdlib']
    source = ' '.join(sources)
    name = cfg.name or default_name(sources)
    folder = output_folder(cfg.data_dir, name)
    old_source = None
    if os.path.isdir(folder):
        with contextlib.suppress(ValueError):  # a damaged dataset is replaced without a note
            old_source = read_meta(folder).get('source')
    spool = f'{folder}.partial.{os.getpid()}.stdin'
    try:
        files, val_files, cfg, reading = open_sources(sources, cfg, reading, spool)
        if old_source not in (None, source):
            print(f'note: this replaces the dataset made from {old_source}; use --name to keep both')
        num_bytes = sum(os.path.getsize(file.path) for file in (*files, *val_files))
        print(f'{source}: {len(files) + len(val_files):,} files, {num_bytes / 1e6:.1f} MB -> {folder}, '
              f'tokenizer {cfg.tokenizer}', flush=True)
        meta = write_dataset(folder, files, val_files, cfg, reading, source)
    except OSError as e:
        raise ValueError(f'{folder} could not be written: {e.strerror or e}') from e
    finally:
        for path in glob.glob(glob.escape(spool) + '*'):
            os.remove(path)
    if 'seed' in given and (cfg.val or meta['splits']['train']['documents'] == 1):
        print('note: seed has no effect, because no documents were chosen to be held out')
    report(meta, cfg, name)


def inspect(names, data_dir, given):
    """Prints what is in each of the datasets."""
    unused = given.keys() - {'inspect', 'name', 'data_dir'}
    if unused:
        raise ValueError(f'--inspect shows a dataset and makes none; leave out {", ".join(sorted(unused))}')
    for name in names:
        folder = dataset_folder(data_dir, name)
        if not os.path.isdir(folder):
            raise ValueError(f'{folder} does not exist; make it with: {how_to_make(name)}')
        print('\n'.join(inspect_dataset(folder)))


def report(meta, cfg, name):
    """Prints the counts of a new dataset, and the command that trains on it."""
    kind, _, vocab_size = cfg.tokenizer.partition(':')
    if kind == 'bpe' and meta['vocab_size'] < int(vocab_size):
        print(f'the text gives only {meta["vocab_size"]:,} ids, fewer than the {int(vocab_size):,} asked for')
    for split, counts in meta['splits'].items():
        print(f'{split:>5}: {counts["tokens"]:,} tokens, {counts["bytes"]:,} bytes, '
              f'{counts["documents"]:,} documents, '
              f'{counts["bytes"] / max(counts["tokens"], 1):.2f} bytes a token')
    command = f'python train.py config/quickstart.py --dataset={shlex.quote(name)}'
    if cfg.data_dir != PrepareConfig.data_dir:
        command += f' --data_dir={shlex.quote(cfg.data_dir)}'
    print(f'train on it with: {command}')


if __name__ == '__main__':
    call_main(main)
