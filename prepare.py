"""
Text into token bins: documents -> tokenizer -> DATA_DIR/NAME/{train,val}.bin + meta.json.

    $ python prepare.py                                   # the embedded corpus: this Python's own standard library
    $ python prepare.py book.txt --tokenizer=gpt2         # a file
    $ python prepare.py notes/ --name=notes               # every text file of a folder, a document each
    $ python prepare.py --inspect notes                   # what is in a dataset

A bin is nanoGPT's: raw little-endian token ids, uint16 (uint32 when the vocabulary needs it), no header. meta.json
beside the bins holds the tokenizer itself and what the numbers mean. A dataset is written into NAME.partial and
renamed when it is complete, so whatever stands under its name is whole.
"""

import glob
import hashlib
import heapq
import json
import os
import pickle
import shutil
import sysconfig
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from configurator import call_main, configure

FORMAT = 1  # of meta.json
TIKTOKEN_NAMES = ('gpt2', 'r50k_base', 'p50k_base', 'cl100k_base', 'o200k_base')


@dataclass
class PrepareConfig:
    # --- dataset
    name: str | None = None  # folder under data_dir; None: the source's own name
    data_dir: str = 'data'  # where datasets live
    tokenizer: str = 'byte'  # byte, char (those that occur), bpe:SIZE (learned here), gpt2 or tiktoken's others
    val_fraction: float | None = None  # held out for validation; None: 0.1, and 0.05 of the embedded corpus
    seed: int = 1337  # chooses which documents are held out
    inspect: bool = False  # instead: show what is in the datasets that are named, ours or nanoGPT's

    def problems(self):
        wrong = []
        kind, _, size = self.tokenizer.partition(':')
        if self.tokenizer not in ('byte', 'char', *TIKTOKEN_NAMES) and kind != 'bpe':
            wrong.append(f'tokenizer={self.tokenizer!r} is unknown; there are byte, char, bpe:SIZE, '
                         f'{", ".join(TIKTOKEN_NAMES)}')
        if kind == 'bpe' and not (size.isascii() and size.isdigit() and 257 <= int(size) <= 2**20):
            wrong.append(f'tokenizer={self.tokenizer!r}: write bpe:SIZE with a vocabulary of 257 (the bytes and the '
                         f'end of text) to {2**20:,}, such as bpe:8192')
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            wrong.append(f'val_fraction={self.val_fraction} must lie between 0 and 1')
        return wrong


# -----------------------------------------------------------------------------
# tokenizers: encode a document, decode to bytes, and rebuild from what spec() puts into meta.json

class ByteTokenizer:
    """The 256 bytes of UTF-8 and an end-of-text id. Needs nothing, reads everything."""
    n_vocab, eot = 257, 256

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'surrogatepass'), dtype=np.uint8)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256)

    def spec(self):
        return {'kind': 'byte'}


class CharTokenizer:
    """One id a character, in order of code point, then an end-of-text id if there is more than one document."""

    def __init__(self, chars, eot=False):
        self.chars = chars
        self.n_vocab = len(chars) + bool(eot)
        self.eot = len(chars) if eot else None
        points = np.array([ord(c) for c in chars], dtype=np.int64)
        self.table = np.full(int(points.max(initial=0)) + 1, -1, dtype=np.int64)  # code point -> id
        self.table[points] = np.arange(len(chars))

    def encode(self, text):
        points = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype=np.uint32)
        known = points < len(self.table)
        ids = np.where(known, self.table[np.where(known, points, 0)], -1)
        if (ids < 0).any():
            strange = sorted({chr(p) for p in points[ids < 0]})
            raise ValueError(f'the characters {"".join(strange[:20])!r} do not occur in the data that this char '
                             f'tokenizer was made from ({len(self.chars)} characters)')
        return ids

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids if i < len(self.chars)).encode('utf-8', 'surrogatepass')

    def spec(self):
        return {'kind': 'char', 'chars': self.chars, 'eot': self.eot is not None}


class TiktokenTokenizer:
    """A byte-pair encoding of OpenAI's, by tiktoken, which keeps a copy of what it downloads."""

    def __init__(self, name):
        import tiktoken
        self.name = name
        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as e:  # requests, urllib3 and the file system each fail in a way of their own here
            raise ValueError(f'the tokenizer {name!r} could not be loaded ({type(e).__name__}); without a network, '
                             'set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken\'s cache of it') from e
        self.n_vocab, self.eot = self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        return self.encoding.decode_bytes([i for i in ids if i != self.eot and i < self.n_vocab])

    def spec(self):
        return {'kind': 'tiktoken', 'name': self.name}


# how text falls into words, within which pairs are merged: GPT-2's rule (https://github.com/openai/tiktoken)
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class BPETokenizer(TiktokenTokenizer):
    """A byte-pair encoding of our own: its tokens are bytes in order of rank, the end-of-text id comes last."""

    def __init__(self, tokens):
        import tiktoken
        ranks = {token: rank for rank, token in enumerate(tokens)}
        if len(ranks) != len(tokens) or not ranks.keys() >= {bytes([b]) for b in range(256)}:
            raise KeyError('tokens')
        self.tokens = tokens
        self.encoding = tiktoken.Encoding('own', pat_str=GPT2_SPLIT, mergeable_ranks=ranks,
                                          special_tokens={'<|endoftext|>': len(tokens)})
        self.n_vocab, self.eot = len(tokens) + 1, len(tokens)

    def spec(self):
        return {'kind': 'bpe', 'tokens': [token.decode('latin-1') for token in self.tokens]}


def train_bpe(texts, num_tokens):
    """
    The tokens, in order of rank, of a byte-level BPE with num_tokens of them (256 bytes and the merges), or as many as
    the texts give. Each merge takes the most frequent pair within words; of equally frequent ones the pair whose ranks
    are smallest, bytes being ranked as GPT-2 ranks them. These are the merges of Hugging Face's tokenizers.
    Source: arXiv 1508.07909. Words are counted once, and a merge visits only the words that hold its pair.
    """
    import regex  # tiktoken needs it too
    split = regex.compile(GPT2_SPLIT)
    counts = Counter()
    for text in texts:
        counts.update(split.findall(text))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [bytes([b]) for b in [*printable, *(b for b in range(256) if b not in printable)]]
    rank = {token: i for i, token in enumerate(tokens)}
    words = [[rank[bytes([b])] for b in word.encode('utf-8', 'surrogatepass')] for word in counts]
    times = list(counts.values())
    pairs, holders = Counter(), defaultdict(set)  # how often a pair occurs, and in which words
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += times[i]
            holders[pair].add(i)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while heap and len(tokens) < num_tokens:
        count, pair = heapq.heappop(heap)
        if -count != pairs[pair]:  # merges since then have used some of them up
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
            continue
        merged = tokens[pair[0]] + tokens[pair[1]]
        new = rank.setdefault(merged, len(tokens))
        if new == len(tokens):
            tokens.append(merged)
        change = Counter()
        for i in holders.pop(pair):
            change.update({p: -n * times[i] for p, n in Counter(pairwise(words[i])).items()})
            words[i] = merge(words[i], pair, new)
            for p in pairwise(words[i]):
                change[p] += times[i]
                if new in p:
                    holders[p].add(i)
        for p, difference in change.items():
            pairs[p] += difference
            if difference > 0:
                heapq.heappush(heap, (-pairs[p], p))
    return tokens


def merge(word, pair, new):
    """The word with every occurrence of the pair, from the left, as one token."""
    out, i = [], 0
    while i < len(word):
        if word[i] == pair[0] and i + 1 < len(word) and word[i + 1] == pair[1]:
            out.append(new)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def make_tokenizer(name, texts, training_texts, several):
    """
    The tokenizer that a setting names. texts() and training_texts() go through the documents: characters are
    collected from all of them, merges learned from those that are not held out.
    """
    kind, _, size = name.partition(':')
    if kind == 'byte':
        return ByteTokenizer()
    if kind == 'char':
        return CharTokenizer(''.join(sorted(set().union(*map(set, texts())))), eot=several)
    if kind == 'bpe':
        return BPETokenizer(train_bpe(training_texts(), int(size) - 1))
    return TiktokenTokenizer(name)


def tokenizer_from(spec):
    """The tokenizer that a spec() describes. ValueError where it describes none."""
    try:
        if spec['kind'] == 'byte':
            return ByteTokenizer()
        if spec['kind'] == 'char' and isinstance(spec['chars'], str) and len(set(spec['chars'])) == len(spec['chars']):
            return CharTokenizer(spec['chars'], bool(spec.get('eot')))
        if spec['kind'] == 'bpe':
            return BPETokenizer([token.encode('latin-1') for token in spec['tokens']])
        if spec['kind'] == 'tiktoken':
            return TiktokenTokenizer(str(spec['name']))
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):
        pass
    raise ValueError(f'{str(spec)[:80]} describes no tokenizer that this version knows')


def encode_prompt(tokenizer, text):
    """Token ids of a prompt, in which <|endoftext|> stands for the end-of-text id."""
    parts, ids = text.split('<|endoftext|>') if tokenizer.eot is not None else [text], []
    for i, part in enumerate(parts):
        ids += [tokenizer.eot] if i else []
        ids += tokenizer.encode(part).tolist()
    return ids


def token_bytes(tokenizer):
    """UTF-8 bytes of each id, (n_vocab,) int64; the end-of-text id has none. What bits per byte are counted with."""
    return np.array([len(tokenizer.decode([i])) for i in range(tokenizer.n_vocab)], dtype=np.int64)


# -----------------------------------------------------------------------------
# sources: the documents of a file, a folder, or the embedded corpus, as (name, path) in a fixed order

TEXT_SUFFIXES = ('.txt', '.md', '.rst', '.py', '.c', '.h', '.cpp', '.js', '.ts', '.java', '.go', '.rs', '.html',
                 '.css', '.json', '.toml', '.yaml', '.yml', '.tex', '.org', '.csv', '.sh')


def files_under(folder, suffixes, left_out=()):
    """[(relative path, path)] of the files below a folder, sorted, hidden ones and the folders left_out not entered."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in left_out and not f.startswith('.')]
        for name in names:
            path = os.path.join(here, name)
            if name.endswith(suffixes) and not name.startswith('.') and os.path.isfile(path):
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


def documents_of(source):
    """(documents, default name, default val_fraction) of a source as the command line names it."""
    if source == 'stdlib':
        return stdlib_files(), 'stdlib', 0.05
    name = os.path.basename(os.path.abspath(source))
    if os.path.isdir(source):
        return files_under(source, TEXT_SUFFIXES), name, 0.1
    if os.path.isfile(source):
        return [(name, source)], os.path.splitext(name)[0], 0.1
    raise ValueError(f'{source} is no file or folder, and the only corpus with a name is stdlib')


def read_text(path):
    """A document's text, line ends as they are, less a byte-order mark. ValueError for bytes that are not UTF-8."""
    with open(path, 'rb') as f:
        raw = f.read()
    try:
        return raw.decode('utf-8-sig')
    except UnicodeDecodeError as e:
        raise ValueError(f'{path} is not UTF-8 text: byte {raw[e.start]:#04x} at {e.start}') from None


def hold_out(documents, fraction, seed):
    """
    The names held out for validation: whole documents in the order of a seeded hash of their names, until they make up
    the fraction of all bytes. A pure function of names, sizes and seed; at least one document stays on either side.
    """
    size = {name: os.path.getsize(path) for name, path in documents}
    order = sorted(size, key=lambda name: hashlib.sha256(f'{seed} {name}'.encode('utf-8', 'surrogateescape')).digest())
    held, held_bytes, total = set(), 0, sum(size.values())
    for name in order[:-1]:
        if held and held_bytes >= fraction * total:
            break
        held.add(name)
        held_bytes += size[name]
    return held


# -----------------------------------------------------------------------------
# bins

class Progress:
    """A line with share, rate and time left, once the work has taken two seconds."""

    def __init__(self, total):
        self.total, self.done, self.start, self.shown = max(total, 1), 0, time.time(), 0.0

    def add(self, num_bytes):
        self.done += num_bytes
        now = time.time()
        if now - self.start > 2 and now - self.shown > 0.5:
            rate = self.done / (now - self.start)
            left = (self.total - self.done) / rate
            print(f'\r{self.done / self.total:4.0%}  {rate / 1e6:.1f} MB/s  {left:.0f} s left ', end='', flush=True)
            self.shown = now

    def close(self):
        if self.shown:
            print(f'\r100%  {self.done / 1e6:.1f} MB in {time.time() - self.start:.0f} s        ')


class BinWriter:
    """Appends documents to one bin and counts what went in."""

    def __init__(self, path, tokenizer, dtype):
        self.file = open(path, 'wb')  # noqa: SIM115
        self.tokenizer, self.dtype = tokenizer, dtype
        self.hash = hashlib.sha256()
        self.counts = {'tokens': 0, 'bytes': 0, 'documents': 0}

    def add(self, text, end):
        ids = np.asarray(self.tokenizer.encode(text))
        if end:
            ids = np.append(ids, self.tokenizer.eot)
        assert not ids.size or ids.max() < self.tokenizer.n_vocab, 'a tokenizer gave an id beyond its vocabulary'
        raw = ids.astype(self.dtype).tobytes()
        self.file.write(raw)
        self.hash.update(raw)
        self.counts['tokens'] += len(ids)
        self.counts['bytes'] += len(text.encode('utf-8', 'surrogatepass'))
        self.counts['documents'] += 1

    def close(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {**self.counts, 'sha256': self.hash.hexdigest()}


def write_dataset(folder, documents, tokenizer_name, fraction, seed, source):
    """
    Writes documents as a dataset and returns its meta. One document is cut in two at a character; of several, whole
    ones are held out, and each ends with the end-of-text id. Whatever stood under the name is replaced at the end.
    """
    several = len(documents) > 1
    held = hold_out(documents, fraction, seed) if several else ()

    def texts():
        return (read_text(path) for _, path in documents)

    def training_texts():
        if several:
            return (read_text(path) for name, path in documents if name not in held)
        return (text[:int(len(text) * (1 - fraction))] for text in texts())
    tokenizer = make_tokenizer(tokenizer_name, texts, training_texts, several)
    dtype = '<u2' if tokenizer.n_vocab <= 2**16 else '<u4'
    partial = folder + '.partial'
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    splits = {s: BinWriter(os.path.join(partial, f'{s}.bin'), tokenizer, dtype) for s in ('train', 'val')}
    progress = Progress(sum(os.path.getsize(path) for _, path in documents))
    for name, path in documents:
        text = read_text(path)
        if several:
            splits['val' if name in held else 'train'].add(text, end=True)
        else:
            cut = int(len(text) * (1 - fraction))
            splits['train'].add(text[:cut], end=False)
            splits['val'].add(text[cut:], end=False)
        progress.add(os.path.getsize(path))
    progress.close()
    if not any(writer.counts['bytes'] for writer in splits.values()):
        raise ValueError(f'{source} holds no text')
    meta = {'format': FORMAT, 'dtype': 'uint16' if dtype == '<u2' else 'uint32', 'vocab_size': tokenizer.n_vocab,
            'tokenizer': tokenizer.spec(), 'eot': tokenizer.eot,
            'splits': {s: writer.close() for s, writer in splits.items()}, 'source': source}
    with open(os.path.join(partial, 'meta.json'), 'w', encoding='utf-8') as f:
        json.dump(meta, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    old = f'{partial}.{os.getpid()}'  # a name that nobody gives a dataset
    if os.path.exists(folder):
        os.rename(folder, old)
    os.rename(partial, folder)
    for left in glob.glob(glob.escape(partial) + '.*'):  # this one, and any that a kill left here
        shutil.rmtree(left, ignore_errors=True)
    return meta


# -----------------------------------------------------------------------------
# what train.py and sample.py ask of a dataset

class PlainUnpickler(pickle.Unpickler):
    """Containers, text and numbers only: a pickle that names anything importable is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'{module}.{name}')


def dataset_folder(data_dir, dataset):
    """The folder of a dataset by name; a name that leads out of data_dir is refused."""
    parts = dataset.replace('\\', '/').rstrip('/').split('/')
    if os.path.isabs(dataset) or {'', '.', '..'} & set(parts) or '\0' in dataset:
        raise ValueError(f'dataset={dataset!r} must be a name below data_dir={data_dir!r}; for another place set '
                         '--data_dir')
    return os.path.join(data_dir, *parts)


def read_meta(folder):
    """
    What is known of a dataset: meta.json, or as much as nanoGPT's meta.pkl says, or as nanoGPT would assume without
    either: uint16 ids of GPT-2's BPE. Keys: dtype, vocab_size, tokenizer, splits ({} when foreign), foreign.
    """
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        try:
            with open(path, encoding='utf-8') as f:
                meta = json.load(f)
            numbers = [meta['format'], meta['vocab_size'], *(meta['splits'][s]['tokens'] for s in ('train', 'val'))]
            if meta['format'] > FORMAT or meta['dtype'] not in ('uint16', 'uint32') or \
                    not all(type(n) is int and n >= 0 for n in numbers):
                raise KeyError('format')
            tokenizer_from({'kind': 'byte'} if meta['tokenizer']['kind'] == 'tiktoken' else meta['tokenizer'])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(f'{path} is damaged or of a later version ({e}); prepare the dataset again') from None
        return {**meta, 'foreign': False}
    path = os.path.join(folder, 'meta.pkl')
    if not os.path.exists(path):
        return {'dtype': 'uint16', 'vocab_size': 50304, 'tokenizer': {'kind': 'tiktoken', 'name': 'gpt2'},
                'splits': {}, 'foreign': True}
    try:
        with open(path, 'rb') as f:
            meta = PlainUnpickler(f).load()
        itos = meta['itos']
        chars = ''.join(itos[i] for i in range(len(itos)))
        if len(chars) != len(itos) or len(set(chars)) != len(chars):
            raise ValueError('itos is not one character an id')
        return {'dtype': 'uint16', 'vocab_size': int(meta['vocab_size']), 'splits': {}, 'foreign': True,
                'tokenizer': {'kind': 'char', 'chars': chars, 'eot': False}}
    except Exception as e:  # unpickling arbitrary bytes can raise nearly anything
        raise ValueError(f"{path} is not nanoGPT's meta.pkl of a character dataset ({type(e).__name__}: {e})") from None


def inspect_dataset(folder):
    """
    The lines that --inspect prints: tokenizer, counts of each split, the most frequent tokens, and a window from the
    middle of the training split, its document ends marked and what does not count in the loss in brackets.
    """
    meta = read_meta(folder)
    tokenizer = tokenizer_from(meta['tokenizer'])
    lines = [f'{folder}: {meta["tokenizer"].get("name") or meta["tokenizer"]["kind"]} tokenizer of '
             f'{tokenizer.n_vocab:,} ids, {meta["dtype"]}, '
             + ("nanoGPT's: no meta.json" if meta['foreign'] else f'from {meta["source"]}')]
    for split in ('train', 'val'):
        tokens = open_bin(os.path.join(folder, f'{split}.bin'), meta['dtype'])
        counts = count_ids(tokens)
        sizes = np.pad(token_bytes(tokenizer), (0, max(len(counts) - tokenizer.n_vocab, 0)))[:len(counts)]
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
                counted = open_bin(os.path.join(folder, 'train.mask.bin'), 'uint8')[middle:middle + 200]
            runs = [(bool(c), [i for i, _ in run]) for c, run in
                    groupby(zip(window, counted, strict=True), key=lambda pair: pair[1])]
            text = ''.join(show(tokenizer, ids) if c else f'[{show(tokenizer, ids)}]' for c, ids in runs)
    return [*lines, f'most frequent: {", ".join(shares)}', f'training tokens from {middle:,} on: {text}']


def open_bin(path, dtype):
    """A bin as a mapped array of ids; one that is missing or empty has none."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder('<'), mode='r')


def count_ids(tokens):
    """How often each id occurs, up to the largest that does; block by block, for a bin may be larger than memory."""
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 24):
        block = np.bincount(tokens[start:start + (1 << 24)], minlength=len(counts))
        block[:len(counts)] += counts
        counts = block
    return counts


def show(tokenizer, ids):
    """Ids as text on one line, ends of documents marked."""
    text = ''
    for end, run in groupby(ids, key=lambda i: i == tokenizer.eot):
        run = list(run)
        text += '<|endoftext|>' * len(run) if end else tokenizer.decode(run).decode('utf-8', 'replace')
    return text.translate({10: '\\n', 13: '\\r', 9: '\\t'})


def how_to_make(dataset):
    """The command that makes a dataset, for messages that miss it."""
    if dataset == 'stdlib':
        return 'python prepare.py stdlib'
    return f'python prepare.py FILE_OR_FOLDER --name={dataset} --tokenizer=gpt2'


# -----------------------------------------------------------------------------
# pretrained weights by name

def fetch_gpt2(name, data_dir):
    """
    The folder with OpenAI's weights as Hugging Face serves them ('gpt2', 'gpt2-medium', ...): downloaded once, each
    file checked by length and hash and renamed when whole. HF_ENDPOINT, HF_TOKEN and proxies are honoured.
    """
    folder = os.path.join(data_dir, 'pretrained', name)
    os.makedirs(folder, exist_ok=True)
    base = f'{os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")}/openai-community/{name}/resolve/main'
    for file in ('config.json', 'model.safetensors'):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            download(f'{base}/{file}', path)
    return folder


def download(url, path):
    """One file, checked by the server's length and by its ETag where that is a hash. ValueError says what is wrong."""
    import requests
    token = os.environ.get('HF_TOKEN')
    headers = {'Accept-Encoding': 'identity', **({'Authorization': f'Bearer {token}'} if token else {})}
    partial = f'{path}.{os.getpid()}.partial'
    try:
        with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
            if answer.status_code != 200:
                raise ValueError(f'{url} answered {answer.status_code} {answer.reason}')
            # the hub tells length and hash on its first answer and redirects to where the bytes are
            told = {k.lower(): v for a in [*answer.history, answer] for k, v in a.headers.items()}
            length = int(answer.headers.get('Content-Length') or told.get('x-linked-size') or -1)
            etag = (told.get('x-linked-etag') or told.get('etag') or '').removeprefix('W/').strip('"')
            progress = Progress(length)
            with open(partial, 'wb') as f:
                for chunk in answer.iter_content(1 << 20):
                    f.write(chunk)
                    progress.add(len(chunk))
                f.flush()
                os.fsync(f.fileno())
            progress.close()
    except (requests.RequestException, OSError) as e:
        raise ValueError(f'{url} could not be downloaded: {type(e).__name__}: {e}') from None
    found = hash_like(etag, partial)
    if length >= 0 and os.path.getsize(partial) != length:
        raise ValueError(f'{url}: {os.path.getsize(partial):,} bytes came, not {length:,}; run it again')
    if found != etag:
        os.remove(partial)
        raise ValueError(f'{url}: the hash of what came is {found}, not {etag}; run it again')
    os.replace(partial, path)


def hash_like(etag, path):
    """The file's hash of the kind that the hub's ETag is: SHA-256, or SHA-1 of a git blob; any other is given back."""
    if len(etag) not in (64, 40):
        return etag
    h = hashlib.sha256() if len(etag) == 64 else hashlib.sha1(f'blob {os.path.getsize(path)}\0'.encode())
    with open(path, 'rb') as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


# -----------------------------------------------------------------------------

def main(argv=None):
    cfg, _, sources = configure(PrepareConfig, argv=argv, files=False, about=__doc__)
    if cfg.inspect:
        for name in sources or [cfg.name or 'stdlib']:
            folder = dataset_folder(cfg.data_dir, name)
            if not os.path.isdir(folder):
                raise ValueError(f'{folder} does not exist; make it with: {how_to_make(name)}')
            print('\n'.join(inspect_dataset(folder)))
        return
    source = sources[0] if sources else 'stdlib'
    if len(sources) > 1:
        raise ValueError(f'one source at a time: {" ".join(sources)}')
    documents, name, fraction = documents_of(source)
    if not documents:
        raise ValueError(f'{source} holds no text files ({" ".join(TEXT_SUFFIXES)})')
    folder = dataset_folder(cfg.data_dir, cfg.name or name)
    empty = os.path.isdir(folder) and not os.listdir(folder)
    if os.path.lexists(folder) and not empty and not os.path.exists(os.path.join(folder, 'meta.json')):
        raise ValueError(f'{folder} exists and was not made by this program; choose another --name')
    total = sum(os.path.getsize(path) for _, path in documents)
    print(f'{source}: {len(documents):,} documents, {total / 1e6:.1f} MB -> {folder}, tokenizer {cfg.tokenizer}')
    try:
        meta = write_dataset(folder, documents, cfg.tokenizer, cfg.val_fraction or fraction, cfg.seed, source)
    except OSError as e:
        raise ValueError(f'{folder} could not be written: {e.strerror or e}') from e
    for split, counts in meta['splits'].items():
        print(f'{split:>5}: {counts["tokens"]:,} tokens, {counts["bytes"]:,} bytes, '
              f'{counts["documents"]:,} documents, {counts["bytes"] / max(counts["tokens"], 1):.2f} bytes a token')
    print(f'train on it with: python train.py --dataset={cfg.name or name}')


if __name__ == '__main__':
    call_main(main)
