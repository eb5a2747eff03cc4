"""
Text into token bins: documents -> tokenizer -> DATA_DIR/NAME/{train,val}.bin + meta.json.

    $ python prepare.py                                        # the embedded corpus: this Python's own standard library
    $ python prepare.py book.txt notes/ --name=mine --tokenizer=bpe:8192   # files, and the text files of folders
    $ python prepare.py 'pages/*.jsonl.gz' --name=pages --tokenizer=gpt2   # a document a row; CSV and parquet too
    $ zcat dump.gz | python prepare.py - --name=dump           # standard input; https://... is downloaded
    $ python prepare.py fineweb_edu --shards=1                 # a corpus by name
    $ python prepare.py --inspect mine                         # what is in a dataset

A bin is nanoGPT's: raw little-endian token ids, uint16 (uint32 when the vocabulary needs it), no header. meta.json
beside the bins holds the tokenizer itself and what the numbers mean. A dataset is written into NAME.partial and
renamed when it is complete, so whatever stands under its name is whole. The same input gives the same bytes, however
many processes tokenize it, and memory is bounded by them, not by the corpus.
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
    BinWriter,
    copy_dataset,
    count_ids,
    dataset_folder,
    open_bin,
    partial_folder,
    read_meta,
    remove,
    show,
)
from hotloop.documents import ReadConfig, documents_in
from hotloop.encode import Encoded, batches_of, encode_all, id_type
from hotloop.files import Progress
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


@dataclass
class PrepareConfig:
    # --- dataset
    name: str | None = None  # folder under data_dir; None: the source's own name
    data_dir: str = 'data'  # where datasets live, and downloads
    append: bool = False  # add to the dataset of that name, with its tokenizer
    inspect: bool = False  # instead: show what is in the datasets that are named, ours or nanoGPT's
    shards: int | None = None  # only so many files of a corpus by name
    # --- validation
    val: str | None = None  # a source of its own; None: whole documents are held out, or the end of a single one
    val_fraction: float | None = None  # how much is held out; None: 0.1, and what suits a corpus by name
    seed: int = 1337  # chooses which documents are held out
    # --- tokens
    tokenizer: str | None = None  # byte, char, bpe:SIZE (learned here), gpt2 and others of tiktoken, a tokenizer.json
    bos: bool = False  # begin each document with the tokenizer's begin-of-text id
    num_proc: int | None = None  # processes that tokenize; None: the machine's cores

    def problems(self):
        """What is wrong with the settings, a sentence each."""
        wrong, name = [], self.tokenizer or 'byte'
        kind, _, size = name.partition(':')
        is_file = os.path.basename(name) == 'tokenizer.json' or os.path.isdir(name)
        if name not in ('byte', 'char', *TIKTOKEN_NAMES) and kind != 'bpe' and not is_file:
            wrong.append(f'tokenizer={self.tokenizer!r} is unknown; there are byte, char, bpe:SIZE, '
                         f'{", ".join(TIKTOKEN_NAMES)}, and the path of a tokenizer.json')
        if kind == 'bpe' and not (size.isascii() and size.isdigit() and 257 <= int(size) <= MAX_VOCAB):
            wrong.append(f'tokenizer={self.tokenizer!r}: write bpe:SIZE with a vocabulary of 257 (the bytes and the '
                         f'end of text) to {MAX_VOCAB:,}, such as bpe:8192')
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            wrong.append(f'val_fraction={self.val_fraction} must lie between 0 and 1')
        for name in ('shards', 'num_proc'):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                wrong.append(f'{name}={getattr(self, name)} must be at least 1')
        if self.append and self.tokenizer:
            wrong.append('append=True takes the tokenizer of the dataset; leave out --tokenizer')
        if self.append and not self.name:
            wrong.append('append=True needs the --name of the dataset to add to')
        if self.val and self.val_fraction is not None:
            wrong.append(f'val={self.val!r} is validated on as it is; leave out val_fraction={self.val_fraction}')
        return wrong


# -----------------------------------------------------------------------------
# tokenizers: encode a text, decode to bytes, and rebuild from what spec() puts into meta.json


# -----------------------------------------------------------------------------
# downloads


# -----------------------------------------------------------------------------
# sources: a word of the command line -> files, in a fixed order


# -----------------------------------------------------------------------------
# files -> documents, in pieces: a document may be larger than memory


# -----------------------------------------------------------------------------
# rows -> documents: a text, or a prompt and the answer that is learned


# -----------------------------------------------------------------------------
# pieces -> token ids, in processes


# -----------------------------------------------------------------------------
# which documents are held out

SMALL = 1 << 24  # bytes of files that are read once more in order to be split exactly


class Holdout(NamedTuple):
    """
    How documents fall into train and val. several: whether there is more than one, so that their ends are marked.
    held: whether a document of this key is validated on. cut: the characters of a single document that are trained on,
    at a line's end if to_line. tail: the end of the bin is cut off when it is written.
    """
    several: bool
    held: object = None
    cut: int | None = None
    to_line: bool = False
    tail: bool = False


def holdout_hash(key, seed):
    """Where a document stands in the queue for being held out: a pure function of its key and the seed."""
    return hashlib.sha256(f'{seed} {key}'.encode('utf-8', 'surrogateescape')).digest()


def hold_out(sizes, fraction):
    """
    The ranks held out, {rank: bytes} being given: whole documents, the lowest ranks first, until they make up the
    fraction of all bytes. At least one document stays on either side, and one that is more than half of all is trained.
    """
    held, held_bytes, total = set(), 0, sum(sizes.values())
    for rank in sorted(rank for rank in sizes if 2 * sizes[rank] <= total)[:len(sizes) - 1]:
        if held and held_bytes >= fraction * total:
            break
        held.add(rank)
        held_bytes += sizes[rank]
    return held


def plan_holdout(files, val_files, cfg, reading, fraction):
    """
    The Division of these files. Whole documents are held out: of files exactly the fraction, by their sizes; of rows
    and the like exactly when they are few or small enough to be read twice, otherwise each with that probability. A
    single document is cut at a character, a large one (which is read once, unless the tokenizer rereads it) at a line.
    """
    rereads = (cfg.tokenizer or '').startswith(('char', 'bpe'))

    def single(files):
        return files[0].kind == 'joined' or (len(files) == 1 and not reading.separator and files[0].kind == 'text')
    one, size = single(files), sum(os.path.getsize(file.path) for file in files)
    several = cfg.append or not (one and (not val_files or single(val_files)))
    if val_files:
        return Holdout(several)
    if files[0].kind == 'tokens' or (one and size > SMALL and not rereads):
        return Holdout(several, tail=True)
    if one:
        characters = sum(len(piece.parts[0][0]) for piece in documents_in(files, reading))
        return Holdout(several, cut=int(characters * (1 - fraction)), to_line=size > SMALL)
    if reading.separator or not all(file.kind == 'text' for file in files):
        sizes, limit = Counter(), int(fraction * 2**64).to_bytes(8, 'big')
        for piece in documents_in(files, reading):
            sizes[holdout_hash(piece.key, cfg.seed)] += sum(len(text.encode()) for text, *_ in piece.parts)
            if size > SMALL and len(sizes) > min(50 / fraction, 1e6):
                return Holdout(several, lambda key: holdout_hash(key, cfg.seed)[:8] < limit)
    else:
        sizes = {holdout_hash(file.name, cfg.seed): os.path.getsize(file.path) for file in files}
    held = hold_out(sizes, fraction)
    return Holdout(several, lambda key: holdout_hash(key, cfg.seed) in held)


def split_documents(files, val_files, reading, division, progress=None):
    """(split's name, Piece) of everything, in order."""
    done, side = 0, 'train'
    for piece in documents_in(files, reading, progress):
        if division.cut is not None:
            text = piece.parts[0][0]
            at = min(max(division.cut - done, 0), len(text))
            if division.to_line and 0 < at < len(text):
                at = text.rfind('\n', 0, at) + 1 or at
            crossed = done + len(text) >= division.cut > done - 1
            done += len(text)
            if at:
                yield 'train', piece._replace(parts=[(text[:at], False, True)], end=crossed)
            if at < len(text):
                yield 'val', piece._replace(parts=[(text[at:], False, True)], start=crossed)
                division = division._replace(cut=0) if at == 0 or crossed else division
        else:
            if piece.start and division.held:
                side = 'val' if division.held(piece.key) else 'train'
            yield side, piece
    for piece in documents_in(val_files, reading, progress):
        yield 'val', piece


@lru_cache(maxsize=1)  # of a corpus it is wanted before the download and behind it
def load_tokenizer(name):
    """A tokenizer that is there already; None for one that is made from the text."""
    if name == 'char' or name.startswith('bpe:'):
        return None
    if name == 'byte':
        return ByteTokenizer()
    return TiktokenTokenizer(name) if name in TIKTOKEN_NAMES else read_tokenizer_json(name)


def make_tokenizer(name, pieces, several, size):
    """
    The tokenizer that a setting names. pieces() goes through (split, Piece) of everything, `size` bytes of files:
    characters are collected from all of them, merges learned from what is trained on, evenly spread samples of it where
    it is more than BPE_BYTES.
    """
    kind, _, number = name.partition(':')
    if kind == 'char':
        chars = set()
        for _, piece in pieces():
            chars.update(*(text for text, *_ in piece.parts))
        return CharTokenizer(''.join(sorted(chars)), eot=several)
    if kind == 'bpe':
        every = max(-(-size // BPE_BYTES), 1)
        texts = (text for i, (side, piece) in enumerate(pieces()) if side == 'train' and i % every == 0
                 for text, *_ in piece.parts)
        return BPETokenizer(train_bpe(texts, int(number) - 1))
    return load_tokenizer(name)


BPE_BYTES = 1 << 28  # of files that merges are learned from


# -----------------------------------------------------------------------------
# bins


def write_dataset(folder, files, val_files, cfg, reading, fraction, source):
    """
    Writes the documents of files as a dataset, or behind the one that is there if cfg.append, and returns its meta.
    Whatever stood under the name is replaced at the end, at once.
    """
    size = sum(os.path.getsize(file.path) for file in (*files, *val_files))
    division = plan_holdout(files, val_files, cfg, reading, fraction)
    with partial_folder(folder) as partial:
        old = copy_dataset(folder, partial) if cfg.append else {}
        tokenizer = tokenizer_from(old['tokenizer']) if old else \
            make_tokenizer(cfg.tokenizer, lambda: split_documents(files, val_files, reading, division), division.several, size)
        if cfg.bos and tokenizer.bos is None:
            raise ValueError('bos=True needs a tokenizer with a begin-of-text id of its own, which is one of a '
                             'tokenizer.json; with others, the end-of-text id between documents is both')
        if files[0].kind == 'tokens' and tokenizer.spec() != {'kind': 'tiktoken', 'name': 'gpt2'}:
            raise ValueError(f"shards hold GPT-2's tokens, and {folder} has another tokenizer")
        if cfg.bos and old and old.get('bos') is None:
            raise ValueError(f'{folder} was made without bos; leave it out, or prepare all of it again')
        bos = tokenizer.bos if cfg.bos else old.get('bos')
        dtype, eot = id_type(tokenizer), tokenizer.eot if division.several else None
        bins = {s: BinWriter(partial, s, dtype, old and old['splits'][s]) for s in ('train', 'val')}
        for writer in bins.values():
            last = open_bin(writer.path, dtype)[-1:].tolist()
            if old and eot is not None and last not in ([], [eot]):
                writer.add(Encoded(np.array([eot], dtype), None, 0, 0))  # a single document had no end
        before = {s: dict(writer.counts) for s, writer in bins.items()}
        progress, places = Progress(size), []
        pieces = split_documents(files, val_files, reading, division, progress)
        for made in encode_all(tokenizer, ([p] for p in pieces) if division.tail else batches_of(pieces),
                               cfg.num_proc or cores(), bos, eot):
            for s, part in made.items():
                bins[s].add(part)
            places.append(dict(bins['train'].counts))
        progress.close()
        if progress.skipped:
            print(f'{progress.skipped:,} rows without text, or without an answer, were left out')
        if all(writer.counts['bytes'] == before[s]['bytes'] for s, writer in bins.items()):
            raise ValueError(f'{source} holds no text')
        if division.tail:
            cut_tail(bins, places, before['train']['bytes'], fraction, source)
        empty = [s for s, writer in bins.items() if not writer.counts['bytes']]
        if empty:
            if cfg.val:
                raise ValueError(f'{cfg.val if empty == ["val"] else source} holds no text')
            hint = f' (or does {reading.separator!r} not occur in it?)' if reading.separator else ''
            raise ValueError(f'no text of {source} would be {"trained" if empty == ["train"] else "validated"} on{hint}'
                             '; name a validation source with --val, or change --val_fraction')
        meta = {'format': FORMAT, 'dtype': np.dtype(dtype).name, 'vocab_size': tokenizer.n_vocab,
                'tokenizer': tokenizer.spec(), 'eot': tokenizer.eot,
                'splits': {s: writer.close() for s, writer in bins.items()},
                'source': f'{old.get("source", "unknown")}, {source}' if old else source,
                'templates': sorted(progress.templates | set(old.get('templates', []))), 'bos': bos}
        with open(os.path.join(partial, 'meta.json'), 'w', encoding='utf-8') as f:
            json.dump(meta, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        aside = f'{partial}.{os.getpid()}'  # a name that nobody gives a dataset
        if os.path.exists(folder):
            os.rename(folder, aside)
        try:
            os.rename(partial, folder)
        except BaseException:
            if os.path.exists(aside):
                os.rename(aside, folder)
            raise
        for left in glob.glob(glob.escape(partial) + '.*'):  # this one, and any that a kill left here
            if left.rpartition('.')[2].isdecimal():
                remove(left)
    return meta


def cut_tail(bins, places, before, fraction, source):
    """
    Moves the end of train.bin to val.bin: about that fraction of the bytes beyond the first `before`, from one of the
    places on, which are counts of train.bin.
    """
    wanted = before + (1 - fraction) * (bins['train'].counts['bytes'] - before)
    place = min(places[:-1], key=lambda counts: abs(counts['bytes'] - wanted), default=None)
    if place is None:
        raise ValueError(f'{source} is too short to hold out a part of it; name a validation source with --val')
    bins['train'].move_tail(bins['val'], place)
    for writer in bins.values():
        writer.counts['documents'] = max(writer.counts['documents'], 1)


# -----------------------------------------------------------------------------
# what train.py and sample.py ask of a dataset


def inspect_dataset(folder):
    """
    The lines that --inspect prints: tokenizer, counts of each split, the most frequent tokens, and a window from the
    middle of the training split, its document ends marked and what does not count in the loss in brackets.
    """
    meta = read_meta(folder)
    tokenizer = tokenizer_from(meta['tokenizer'])
    if not any(os.path.exists(os.path.join(folder, f'{split}.bin')) for split in ('train', 'val')):
        raise ValueError(f'{folder} holds neither train.bin nor val.bin')
    lines = [f'{folder}: {meta["tokenizer"].get("name") or meta["tokenizer"]["kind"]} tokenizer of '
             f'{tokenizer.n_vocab:,} ids, {meta["dtype"]}, '
             + ("nanoGPT's: no meta.json" if meta['foreign'] else f'from {meta.get("source", "unknown")}')]
    for split in ('train', 'val'):
        tokens = open_bin(os.path.join(folder, f'{split}.bin'), meta['dtype'])
        counts = count_ids(tokens)
        sizes = np.pad(tokenizer.sizes, (0, max(len(counts) - tokenizer.n_vocab, 0)))[:len(counts)]
        ends = 0 if tokenizer.eot is None else int(counts[tokenizer.eot:tokenizer.eot + 1].sum())
        lines.append(f'{split:>5}: {len(tokens):,} tokens, {(counts * sizes).sum() / max(len(tokens), 1):.2f} bytes a '
                     f'token, {ends:,} document ends, {np.count_nonzero(counts):,} different ids')
        if split == 'train':
            common = [i for i in np.argsort(-counts, kind='stable')[:10].tolist() if counts[i]]
            shares = [f'"{show(tokenizer, [i])}" {counts[i] / len(tokens):.1%}' for i in common]
            middle = len(tokens) // 2
            window = tokens[middle:middle + 200].tolist()
            counted = np.ones(len(window), dtype=np.uint8)
            if os.path.exists(os.path.join(folder, 'train.mask.bin')):
                counted = open_bin(os.path.join(folder, 'train.mask.bin'), 'uint8')
                if len(counted) != len(tokens):
                    raise ValueError(f'{folder}/train.mask.bin has {len(counted):,} bytes for {len(tokens):,} tokens')
                counted = counted[middle:middle + 200]
            runs = [(bool(c), [i for i, _ in run]) for c, run in
                    groupby(zip(window, counted, strict=True), key=lambda pair: pair[1])]
            text = ''.join(show(tokenizer, ids) if c else f'[{show(tokenizer, ids)}]' for c, ids in runs)
    return [*lines, f'most frequent: {", ".join(shares)}', f'training tokens from {middle:,} on: {text}']


# -----------------------------------------------------------------------------

def default_name(sources):
    """What a dataset of these sources is called if nobody says; ValueError where nothing suggests itself."""
    source = sources[0]
    if source.startswith(('http://', 'https://')):
        source = source.split('?')[0].split('#')[0]
    if len(sources) > 1 or (any(c in source for c in '*?[') and not os.path.exists(source)):
        raise ValueError(f'{" ".join(sources)}: say what the dataset shall be called, with --name')
    if source == '-':
        return 'stdin'
    name = os.path.basename(os.path.abspath(source))
    if os.path.isdir(source) or source == 'stdlib' or source in CORPORA:
        return name
    stem, suffix = os.path.splitext(name)
    return os.path.splitext(stem)[0] if suffix.lower() in COMPRESSED else stem


def open_sources(sources, cfg, reading, spool):
    """(files, validation files, cfg and reading with what a corpus by name brings along, val_fraction) of the command's words."""
    if [*sources, cfg.val].count('-') > 1:
        raise ValueError('standard input can be read once only, and is named twice')
    corpus = CORPORA.get(sources[0]) if len(sources) == 1 and not os.path.exists(sources[0]) else None
    if cfg.shards and not corpus:
        raise ValueError(f'shards={cfg.shards} is for a corpus by name: {", ".join(CORPORA)}')
    val_files = files_of(cfg.val, reading, cfg.data_dir, spool + '.val') if cfg.val else []
    if corpus:
        cfg = replace(cfg, tokenizer=cfg.tokenizer or corpus.tokenizer)
        reading = replace(reading, separator=reading.separator or corpus.separator)
        load_tokenizer(cfg.tokenizer)  # before the download, should it be missing
        files, own_val = open_corpus(sources[0], cfg)
        fraction = corpus.val_fraction
        val_files = val_files or own_val
    else:
        places = [os.path.basename(os.path.abspath(source)) + '/' if len(sources) > 1 else '' for source in sources]
        files = [file._replace(name=place + file.name) for source, place in zip(sources, places, strict=True)
                 for file in files_of(source, reading, cfg.data_dir, f'{spool}.{sources.index(source)}')]
        fraction = 0.05 if sources == ['stdlib'] else 0.1
    files = without_repeats(files, val_files)
    kinds = {file.kind for file in (*files, *val_files)}
    check_kinds(kinds, reading, ' '.join(sources))
    tokens = 'tokens' in kinds
    if tokens and len(kinds) > 1:
        raise ValueError('shards of tokens and files of text cannot be one dataset; train on both with --dataset=A,B')
    if tokens and (cfg.tokenizer or 'gpt2') != 'gpt2':
        raise ValueError(f"shards hold GPT-2's tokens; tokenizer={cfg.tokenizer!r} cannot change that")
    cfg = replace(cfg, tokenizer=cfg.tokenizer or ('gpt2' if tokens else 'byte'))
    return files, val_files, cfg, reading, cfg.val_fraction or fraction


def without_repeats(files, val_files):
    """The files to train on, each once, without those to validate on; says how many it leaves out."""
    left = {}
    for file in files:
        left.setdefault(os.path.realpath(file.path), file)
    for file in val_files:
        left.pop(os.path.realpath(file.path), None)
    if len(left) < len(files):
        print(f'{len(files) - len(left):,} files are named twice, or are validated on, and are left out')
    if not left:
        raise ValueError('nothing is left to train on: all files are validated on')
    return [*left.values()]


def main(argv=None):
    cfg, reading, given, sources = configure(PrepareConfig, ReadConfig, argv=argv, files=False, about=__doc__)
    if cfg.inspect:
        if idle := given.keys() - {'inspect', 'name', 'data_dir'}:
            raise ValueError(f'--inspect looks at a dataset as it is; leave out {", ".join(sorted(idle))}')
        for name in sources or [cfg.name or 'stdlib']:
            folder = dataset_folder(cfg.data_dir, name)
            if not os.path.isdir(folder):
                raise ValueError(f'{folder} does not exist; make it with: {how_to_make(name)}')
            print('\n'.join(inspect_dataset(folder)))
        return
    sources = sources or ['stdlib']
    name = cfg.name or default_name(sources)
    folder = dataset_folder(cfg.data_dir, name)
    if ',' in name or name.split('/')[0] in ('downloads', 'pretrained'):
        raise ValueError(f'a dataset cannot be called {name!r}: commas stand between the datasets of a mixture, and '
                         'downloads and pretrained are folders of their own; choose another --name')
    folder = os.path.realpath(folder) if os.path.islink(folder) else folder
    ours = os.path.exists(os.path.join(folder, 'meta.json'))
    foreign = sorted(set(os.listdir(folder)) - set(OWN_FILES if ours else ())) if os.path.isdir(folder) else []
    if foreign or (os.path.lexists(folder) and not os.path.isdir(folder)):
        raise ValueError(f'{folder} exists and was not made by this program{"".join(f": {f}" for f in foreign[:1])}; '
                         'choose another --name')
    if cfg.append and not ours:
        raise ValueError(f'{folder} does not exist, so nothing can be added to it; leave out --append')
    before = ' '.join(sources)
    if ours and not cfg.append:
        with contextlib.suppress(ValueError):  # damaged, it is replaced as well
            before = read_meta(folder).get('source')
    spool = f'{folder}.partial.{os.getpid()}.stdin'
    try:
        files, val_files, cfg, reading, fraction = open_sources(sources, cfg, reading, spool)
        if before != ' '.join(sources):
            print(f'note: the dataset that is there, made from {before}, is replaced; --name gives this one another '
                  'place')
        total = sum(os.path.getsize(file.path) for file in (*files, *val_files))
        print(f'{" ".join(sources)}: {len(files) + len(val_files):,} files, {total / 1e6:.1f} MB -> {folder}, '
              f'tokenizer {"of the dataset" if cfg.append else cfg.tokenizer}', flush=True)
        meta = write_dataset(folder, files, val_files, cfg, reading, fraction, ' '.join(sources))
    except BrokenPipeError:  # whoever read our output has gone
        raise
    except OSError as e:
        raise ValueError(f'{folder} could not be written: {e.strerror or e}') from e
    finally:
        for left in glob.glob(glob.escape(spool) + '*'):
            os.remove(left)
    asked, _, size = (cfg.tokenizer or '').partition(':')
    if asked == 'bpe' and meta['vocab_size'] < int(size):
        print(f'the text gives no more than {meta["vocab_size"]:,} ids, fewer than the {int(size):,} asked for')
    if 'seed' in given and (meta['splits']['train']['documents'] == 1 or cfg.val):
        print('note: seed does nothing where no documents are chosen to be held out')
    for split, counts in meta['splits'].items():
        print(f'{split:>5}: {counts["tokens"]:,} tokens, {counts["bytes"]:,} bytes, '
              f'{counts["documents"]:,} documents, {counts["bytes"] / max(counts["tokens"], 1):.2f} bytes a token')
    place = '' if cfg.data_dir == PrepareConfig.data_dir else f' --data_dir={shlex.quote(cfg.data_dir)}'
    print(f'train on it with: python train.py config/quickstart.py --dataset={shlex.quote(name)}{place}')


if __name__ == '__main__':
    call_main(main)
