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

import binascii
import bz2
import codecs
import contextlib
import csv
import glob
import gzip
import hashlib
import heapq
import io
import json
import lzma
import math
import multiprocessing
import os
import pickle
import pickletools
import re
import reprlib
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import unicodedata
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import chain, groupby, islice, pairwise
from typing import Literal, NamedTuple

import numpy as np

from configurator import call_main, configure

try:
    import fcntl  # Linux and macOS; elsewhere two commands that write one dataset at a time are not noticed
except ImportError:
    fcntl = None

FORMAT = 1  # of meta.json
MAX_VOCAB = 2**20  # ids of a tokenizer
TIKTOKEN_NAMES = ('gpt2', 'r50k_base', 'p50k_base', 'cl100k_base', 'o200k_base')


@dataclass
class PrepareConfig:
    # --- dataset
    name: str | None = None  # folder under data_dir; None: the source's own name
    data_dir: str = 'data'  # where datasets live, and downloads
    append: bool = False  # add to the dataset of that name, with its tokenizer
    inspect: bool = False  # instead: show what is in the datasets that are named, ours or nanoGPT's
    # --- reading
    format: Literal['auto', 'text', 'jsonl', 'json', 'csv', 'parquet', 'tokens'] = 'auto'  # auto: by their names
    text_field: str | None = None  # of a row; None: text or content, or what instruction data is made of
    separator: str | None = None  # text between the documents of a file, such as <|endoftext|>; \n is a line end
    bad_utf8: Literal['refuse', 'replace'] = 'refuse'  # what to do with bytes that are not UTF-8
    shards: int | None = None  # only so many files of a corpus by name
    # --- validation
    val: str | None = None  # a source of its own; None: whole documents are held out, or the end of a single one
    val_fraction: float | None = None  # how much is held out; None: 0.1, and what suits a corpus by name
    seed: int = 1337  # chooses which documents are held out
    # --- tokens
    tokenizer: str | None = None  # byte, char, bpe:SIZE (learned here), gpt2 and others of tiktoken, a tokenizer.json
    bos: bool = False  # begin each document with the tokenizer's begin-of-text id
    template: Literal['auto', 'plain', 'alpaca', 'chatml', 'gemma', 'llama3'] = 'auto'  # of chats; auto: by row
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
        if self.separator == '':
            wrong.append('separator is empty; leave it out, or name the text between documents')
        if self.template != 'auto' and self.text_field:
            wrong.append(f'template={self.template!r} is for instruction data, and text_field={self.text_field!r} asks '
                         'for one text of a row; leave out one of them')
        if self.append and self.tokenizer:
            wrong.append('append=True takes the tokenizer of the dataset; leave out --tokenizer')
        if self.append and not self.name:
            wrong.append('append=True needs the --name of the dataset to add to')
        if self.val and self.val_fraction is not None:
            wrong.append(f'val={self.val!r} is validated on as it is; leave out val_fraction={self.val_fraction}')
        return wrong


# -----------------------------------------------------------------------------
# tokenizers: encode a text, decode to bytes, and rebuild from what spec() puts into meta.json

class Tokenizer:
    """
    n_vocab: number of ids. eot, bos: the ids that end and begin a document, or None; begin: bos, where the data at hand
    was made with it. specials: {name: id} of the ids that a prompt and a chat template may name; text that is data
    never becomes one.
    """
    n_vocab, eot, bos, begin = 0, None, None, None

    @cached_property
    def sizes(self):
        """UTF-8 bytes of each id, (n_vocab,) int64; the end-of-text id has none. For bits per byte."""
        return np.array([len(self.decode([i])) for i in range(self.n_vocab)], dtype=np.int64)

    @cached_property
    def specials(self):
        return {} if self.eot is None else {'<|endoftext|>': self.eot}

    @cached_property
    def special_names(self):
        """An expression that finds the names of special ids, the longest first; nothing, where there are none."""
        return re.compile(f'({"|".join(map(re.escape, sorted(self.specials, key=len, reverse=True))) or "(?!)"})')


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and an end-of-text id. Needs nothing, reads everything."""
    n_vocab, eot = 257, 256

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'surrogatepass'), dtype=np.uint8)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256)

    def spec(self):
        return {'kind': 'byte'}


class CharTokenizer(Tokenizer):
    """One id a character, in order of code point, then an end-of-text id if there is more than one document."""

    def __init__(self, chars, eot=False):
        self.chars = chars
        self.n_vocab = len(chars) + bool(eot)
        self.eot = len(chars) if eot else None
        points = np.array([ord(c) for c in chars], dtype=np.int64)
        self.table = np.full(int(points.max(initial=0)) + 2, -1, dtype=np.int64)  # code point -> id; last: others
        self.table[points] = np.arange(len(chars))

    def encode(self, text):
        points = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype=np.uint32)
        ids = self.table[np.minimum(points, len(self.table) - 1)]
        if (ids < 0).any():
            strange = sorted({chr(p) for p in points[ids < 0]})
            raise ValueError(f'the characters {"".join(strange[:20])!r} do not occur in the data that this char '
                             f'tokenizer was made from ({len(self.chars)} characters)')
        return ids

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids if i < len(self.chars)).encode('utf-8', 'surrogatepass')

    def spec(self):
        return {'kind': 'char', 'chars': self.chars, 'eot': self.eot is not None}


class TiktokenTokenizer(Tokenizer):
    """A byte-pair encoding of OpenAI's, by tiktoken, which keeps a copy of what it downloads."""
    nfc = False

    def __init__(self, name):
        import tiktoken
        self.name = name
        try:
            ranks = gpt2_ranks() if name in ('gpt2', 'r50k_base') else None
            self.encoding = tiktoken.get_encoding(name) if ranks is None else tiktoken.Encoding(
                name, pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={'<|endoftext|>': len(ranks)})
        except Exception as e:  # requests, urllib3 and the file system each fail in a way of their own here
            install = ', or pip install --no-deps openai-whisper, which holds them' if name == 'gpt2' else ''
            raise ValueError(f'the tokenizer {name!r} could not be loaded ({type(e).__name__}); without a network, set '
                             "TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's cache of its ranks" + install) from e
        self.n_vocab, self.eot = self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text):
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode(mended(text))

    @cached_property
    def pieces(self):
        """The bytes of each id; none for the ids that begin and end a document, nor for holes in the vocabulary."""
        pieces = [b''] * self.n_vocab
        for piece in self.encoding.token_byte_values():
            pieces[self.encoding.encode_single_token(piece)] = piece
        for name in self.encoding.special_tokens_set:
            i = self.encoding.encode_single_token(name)
            pieces[i] = b'' if i in (self.eot, self.bos) else name.encode()
        return pieces

    def decode(self, ids):
        return b''.join(self.pieces[i] for i in ids if i < self.n_vocab)

    def spec(self):
        return {'kind': 'tiktoken', 'name': self.name}


def gpt2_ranks():
    """
    GPT-2's ranks from the one file that holds them all, where tiktoken keeps it for r50k_base or the package
    openai-whisper carries it: read in a fifth of the time of the two that tiktoken keeps for gpt2. None elsewhere.
    """
    kept = os.path.join(tempfile.gettempdir(), 'data-gym-cache')
    kept = os.environ.get('TIKTOKEN_CACHE_DIR', os.environ.get('DATA_GYM_CACHE_DIR', kept))
    whisper = find_spec('whisper')
    for path in (os.path.join(kept, '0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4'),  # the sha1 of its address
                 os.path.join(os.path.dirname(whisper.origin or ''), 'assets', 'gpt2.tiktoken') if whisper else ''):
        if os.path.exists(path) and hash_file(path) == GPT2_RANKS:
            with open(path, 'rb') as f:
                return {binascii.a2b_base64(token): int(rank) for token, rank in map(bytes.split, f)}
    return None


GPT2_RANKS = '306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930'  # sha256


# how text falls into words, within which pairs are merged: GPT-2's rule (https://github.com/openai/tiktoken)
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class BPETokenizer(TiktokenTokenizer):
    """
    A byte-level byte-pair encoding that carries its own tables. tokens: bytes by id, None where an id is special or
    unused; lower ids merge first. specials: {name: id}; without them the end of text follows the tokens.
    """

    def __init__(self, tokens, pattern=GPT2_SPLIT, specials=None, eot=None, bos=None, nfc=False):
        import tiktoken
        self.tokens, self.pattern, self.nfc = tokens, pattern, nfc
        self.specials = {'<|endoftext|>': len(tokens)} if specials is None else specials
        self.eot, self.bos = len(tokens) if specials is None else eot, bos
        ranks = {token: i for i, token in enumerate(tokens) if token is not None}
        ids = [i for i, token in enumerate(tokens) if token is not None] + list(self.specials.values())
        if len(ranks) + len(self.specials) != len(set(ids)) or not ranks.keys() >= {bytes([b]) for b in range(256)}:
            raise KeyError('tokens')
        # whatever else there is would come to tiktoken's core, which panics, or take a table as long as an id is large
        ends = {self.eot, bos} - {None}
        if not all(type(i) is int and 0 <= i < MAX_VOCAB for i in (*ids, *ends)) or not ends <= set(ids) or \
                pattern not in (GPT2_SPLIT, DIGITS_SPLIT, *KNOWN_SPLITS) or type(nfc) is not bool:
            raise KeyError('specials')
        self.encoding = tiktoken.Encoding('own', pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens=self.specials)
        self.n_vocab = max(ids) + 1

    def encode(self, text):
        return super().encode(unicodedata.normalize('NFC', text) if self.nfc else text)

    def spec(self):
        return {'kind': 'bpe', 'tokens': [token and token.decode('latin-1') for token in self.tokens],
                'pattern': self.pattern, 'specials': self.specials, 'eot': self.eot, 'bos': self.bos, 'nfc': self.nfc}


BYTES_IN_GPT2S_ORDER = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES_IN_GPT2S_ORDER += [b for b in range(256) if b not in BYTES_IN_GPT2S_ORDER]


def train_bpe(texts, num_tokens):
    """
    The tokens, in order of rank, of a byte-level BPE (arXiv 1508.07909): 256 bytes, then merges of the most frequent
    pair within words, or of several such the pair of the smallest ranks, as Hugging Face's tokenizers have it; up to
    num_tokens in all. Words are counted once, the rarest of more than MAX_WORDS left out, and a merge visits only the
    words that hold its pair.
    """
    tokens = [bytes([b]) for b in BYTES_IN_GPT2S_ORDER]
    rank = {token: i for i, token in enumerate(tokens)}
    counts = count_words(texts)
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


MAX_WORDS = 400_000  # different words that merges are learned from; each costs about a kilobyte


def count_words(texts):
    """How often each word occurs, of the MAX_WORDS most frequent; long runs that no space breaks are cut."""
    import regex  # tiktoken needs it too
    split, counts = regex.compile(GPT2_SPLIT), Counter()
    for text in texts:
        counts.update(word[:1000] for word in split.findall(text))
        if len(counts) > 4 * MAX_WORDS:
            counts = Counter(dict(counts.most_common(2 * MAX_WORDS)))
    return counts if len(counts) <= MAX_WORDS else Counter(dict(counts.most_common(MAX_WORDS)))


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


def read_tokenizer_json(path):
    """
    The tokenizer of a Hugging Face tokenizer.json, or of the folder that holds one, or the vocab.json and merges.txt
    from before. ValueError unless it is a byte-level BPE split as GPT-2, Llama 3, Qwen or SmolLM2 split.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    path = os.path.join(folder, 'tokenizer.json')
    try:
        config_path = os.path.join(folder, 'tokenizer_config.json')
        config = read_json(config_path) if os.path.exists(config_path) else {}
        if os.path.exists(os.path.join(folder, 'vocab.json')) and not os.path.exists(path):
            path, file = os.path.join(folder, 'vocab.json'), of_two_files(folder, config)
        else:
            file = read_json(path)
        model, added = file['model'], {t['content']: t['id'] for t in file.get('added_tokens') or ()}
        for key, allowed in (('type', (None, 'BPE')), ('dropout', (None, 0)), ('byte_fallback', (None, False)),
                             ('continuing_subword_prefix', (None, '')), ('end_of_word_suffix', (None, ''))):
            if model.get(key) not in allowed:
                raise ValueError(f'its model has {key}={model[key]!r}, which is not a byte-level BPE')
        byte_of = {chr(b if i < 188 else 68 + i): b for i, b in enumerate(BYTES_IN_GPT2S_ORDER)}
        vocab = {token: i for token, i in model['vocab'].items() if token not in added}
        if not all(type(i) is int and 0 <= i < MAX_VOCAB for i in vocab.values()):
            raise ValueError(f'an id of its vocabulary is no whole number from 0 to {MAX_VOCAB - 1:,}')
        tokens = [None] * (max(vocab.values(), default=-1) + 1)
        for token, i in vocab.items():
            if set(token) - byte_of.keys():
                raise ValueError(f'its token {token!r} is not written in the letters of byte-level BPE')
            tokens[i] = bytes(byte_of[letter] for letter in token)
        check_merges(model['merges'], vocab)
        specials = {name: added[name] for name in sorted(added, key=added.get)}
        normalizer = file.get('normalizer')
        steps = normalizer.get('normalizers', [normalizer]) if normalizer else []
        if any(step['type'] != 'NFC' for step in steps):
            raise ValueError(f'its normalizer {json.dumps(normalizer)[:200]} is not known here')

        def special(role, *usual):
            told = config.get(f'{role}_token')
            told = told.get('content') if isinstance(told, dict) else told
            return next((specials[name] for name in (told, *usual) if name in specials), None)
        return BPETokenizer(tokens, split_pattern(file.get('pre_tokenizer')), specials,
                            special('eos', '<|endoftext|>', '<|end_of_text|>', '</s>'),
                            special('bos', '<|begin_of_text|>', '<s>'), bool(steps))
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except ValueError as e:
        raise ValueError(f'{path}: {e}') from None
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise ValueError(f'{path} is not a tokenizer.json of a byte-level BPE ({type(e).__name__}: {e})') from None


def read_json(path):
    with open(path, encoding='utf-8') as f:
        return json.load(f)


def of_two_files(folder, config):
    """What GPT-2's vocab.json, merges.txt and, where there is one, added_tokens.json say, as a tokenizer.json does."""
    vocab, added_path = read_json(os.path.join(folder, 'vocab.json')), os.path.join(folder, 'added_tokens.json')
    added = {'<|endoftext|>': vocab['<|endoftext|>']} if '<|endoftext|>' in vocab else {}
    if os.path.exists(added_path):
        added |= read_json(added_path)
    with open(os.path.join(folder, 'merges.txt'), encoding='utf-8') as f:
        merges = [line for line in f.read().split('\n') if line and not line.startswith('#version')]
    return {'model': {'type': 'BPE', 'vocab': vocab, 'merges': merges},
            'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': config.get('add_prefix_space', False)},
            'added_tokens': [{'content': name, 'id': i} for name, i in added.items()]}


def check_merges(merges, vocab):
    """
    ValueError unless tiktoken, which merges whatever makes the token of the lowest id, and takes a word that is a token
    as it is, merges as this list does: in order of ids, and every token from its own letters.
    """
    rank, last = {}, -1
    for pair in merges:
        left, right = pair.split(' ') if isinstance(pair, str) else pair
        new = vocab[left + right]
        if new < last:
            raise ValueError(f'its merge {left!r} + {right!r} comes later than that of a higher id')
        last = new
        rank.setdefault((left, right), len(rank))
    for token in vocab:
        word = list(token)
        while len(word) > 1:
            best = min(pairwise(word), key=lambda pair: rank.get(pair, len(rank)))
            if best not in rank:
                raise ValueError(f'its merges leave its token {token!r} in pieces: {" ".join(word)!r}')
            word = merge(word, best, ''.join(best))


# Llama 3's rule, Qwen's, which takes digits one by one, and GPT-2's as a plain expression
KNOWN_SPLITS = [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
                r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+' for digits in (r'\p{N}{1,3}', r'\p{N}')]
KNOWN_SPLITS.append(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
# digits fall out one by one before GPT-2's rule sees the rest: to it, a digit is where the text ends
DIGITS_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s"""


def split_pattern(pre):
    """The regular expression that splits as the pre_tokenizer of a tokenizer.json does. ValueError if unknown."""
    steps = pre['pretokenizers'] if pre and pre['type'] == 'Sequence' else [pre] if pre else []
    if steps and not steps[-1].get('add_prefix_space'):
        kinds, first, by_regex = [step['type'] for step in steps], steps[0], steps[-1].get('use_regex', True)
        if kinds == ['ByteLevel'] and by_regex:
            return GPT2_SPLIT
        if kinds == ['Digits', 'ByteLevel'] and by_regex and first.get('individual_digits'):
            return DIGITS_SPLIT
        if kinds == ['Split', 'ByteLevel'] and not by_regex and first['behavior'] == 'Isolated' and \
                not first.get('invert') and first['pattern'].get('Regex') in KNOWN_SPLITS:
            return first['pattern']['Regex']
    raise ValueError(f'its pre_tokenizer {json.dumps(pre)[:200]} is not known here')


def tokenizer_from(spec):
    """The tokenizer that a spec() describes. ValueError where it describes none."""
    try:
        if spec['kind'] == 'byte':
            return ByteTokenizer()
        if spec['kind'] == 'char' and isinstance(spec['chars'], str) and len(set(spec['chars'])) == len(spec['chars']):
            return CharTokenizer(spec['chars'], bool(spec.get('eot')))
        if spec['kind'] == 'bpe':
            options = {k: v for k, v in spec.items() if k not in ('kind', 'tokens')}
            return BPETokenizer([token and token.encode('latin-1') for token in spec['tokens']], **options)
        if spec['kind'] == 'tiktoken':
            return TiktokenTokenizer(str(spec['name']))
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError, OverflowError):
        pass
    raise ValueError(f'{reprlib.repr(spec)} describes no tokenizer that this version knows')


def encode_marked(tokenizer, text):
    """Token ids of a text in which the names of special ids, such as <|endoftext|>, stand for them."""
    return encode_parts(tokenizer, [(text, True, True)])[0].tolist()


def prompt_ids(tokenizer, text):
    """Token ids of a prompt, special ids by their names, behind what begins a document; of no text, what ends one."""
    begin, ids = [tokenizer.begin] if tokenizer.begin is not None else [], encode_marked(tokenizer, text)
    ids = ids if ids[:1] == begin else begin + ids
    return ids or [tokenizer.eot if tokenizer.eot is not None else 0]


def same_tokenizer(a, b):
    """Whether two specs give every text the same ids: what a tokenizer.json holds may be one of tiktoken's by name."""
    if a == b:
        return True
    try:
        a, b = tokenizer_from(a), tokenizer_from(b)
    except ValueError:  # its ranks cannot be had here
        return False
    return all(isinstance(t, TiktokenTokenizer) for t in (a, b)) and \
        (a.pieces, a.eot, a.encoding._pat_str, a.nfc) == (b.pieces, b.eot, b.encoding._pat_str, b.nfc)


def mended(text):
    """The text as UTF-8 can hold it: surrogate pairs joined, lone ones replaced. JSON's escapes can write either."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


# -----------------------------------------------------------------------------
# downloads

ATTEMPTS, PAUSE = 6, 1.0  # in a row without a byte of progress; seconds before the second, doubling after that
PATIENCE = 30.0  # seconds without a byte after which a connection counts as cut


def hub():
    return os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')


def pretrained(init_from, data_dir):
    """
    (folder in Hugging Face's layout, spec of its tokenizer) where init_from names one: a folder, or OpenAI's weights by
    name, downloaded once. None where it names none. Where no tokenizer lies there, GPT-2's by its vocabulary, or None.
    """
    names, folder = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'), init_from
    if init_from.startswith('gpt2') and not os.path.exists(init_from):
        if init_from not in names:
            raise ValueError(f'init_from={init_from!r} is not one of {", ".join(names)}, and no file or folder')
        folder = os.path.join(data_dir, 'pretrained', init_from)
        for file in ('config.json', 'model.safetensors'):
            download(f'{hub()}/openai-community/{init_from}/resolve/main/{file}', os.path.join(folder, file))
    elif not os.path.exists(os.path.join(init_from, 'config.json')):
        return None
    if any(os.path.exists(os.path.join(folder, name)) for name in ('tokenizer.json', 'vocab.json')):
        return folder, read_tokenizer_json(folder).spec()
    try:
        vocab_size = read_json(os.path.join(folder, 'config.json')).get('vocab_size')
    except (OSError, ValueError, RecursionError, AttributeError):  # model.py says what is wrong with it
        vocab_size = None
    return folder, {'kind': 'tiktoken', 'name': 'gpt2'} if vocab_size in (50257, 50304) else None


def download(url, path, sha256=None):
    """
    One file, unless it is there already: written aside and renamed when its length and its hash (sha256, or the ETag
    where that is one) are right. A cut connection is resumed, a server's failure retried, now or by the next command.
    HF_ENDPOINT, HF_TOKEN and proxies are honoured. ValueError says what is wrong.
    """
    import requests
    if os.path.exists(path):
        return path
    print(f'downloading {url}', file=sys.stderr)
    attempt, most = 0, 0
    while True:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return fetch(url, path, sha256)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError, Interrupted) as e:
            here = sum(os.path.getsize(p) for p in glob.glob(glob.escape(path) + '.*.part'))
            attempt, most = 1 if here > most else attempt + 1, max(here, most)
            if attempt == ATTEMPTS:
                raise ValueError(f'{url} could not be downloaded, after {ATTEMPTS} attempts: '
                                 f'{type(e).__name__}: {e}') from None
            time.sleep(max(PAUSE * 2**(attempt - 1), min(getattr(e, 'wait', 0), 60)))
        except (requests.RequestException, OSError) as e:
            raise ValueError(f'{url} could not be downloaded: {type(e).__name__}: {e}') from None


class Interrupted(Exception):
    """An answer that another attempt may better; wait: seconds that the server asks for."""

    def __init__(self, text, wait=0.0):
        super().__init__(text)
        self.wait = wait


def fetch(url, path, sha256):
    """One attempt of download()."""
    import requests
    token = os.environ.get('HF_TOKEN') if url.startswith(hub() + '/') else None
    headers = {'Accept-Encoding': 'identity', **({'Authorization': f'Bearer {token}'} if token else {})}

    def get(more=()):
        return requests.get(url, headers=headers | dict(more), stream=True, timeout=PATIENCE)
    with get() as answer:
        check_answer(url, answer)
        # the hub tells length and hash on its first answer and redirects to where the bytes are
        told = {k.lower(): v for a in [*answer.history, answer] for k, v in a.headers.items()}
        encoded = answer.headers.get('Content-Encoding', 'identity') != 'identity'
        length = '' if encoded else answer.headers.get('Content-Length') or told.get('x-linked-size') or ''
        length = int(length) if length.isdecimal() else -1
        etag = sha256 or (told.get('x-linked-etag') or told.get('etag') or '').removeprefix('W/').strip('"')
        is_hash = sha256 or 'x-linked-etag' in told or url.startswith(hub() + '/')
        # the name of what is there so far says which version of the file it is of
        version = hashlib.sha256(f'{etag} {told.get("last-modified")} {length}'.encode()).hexdigest()[:8]
        part = f'{path}.{version}.part'
        with open(part, 'ab') as f:
            lock(f.fileno(), part)
            have, goes_on = f.tell(), False
            if 0 < have < length:
                with get({'Range': f'bytes={have}-'}) as rest:
                    told_range = rest.headers.get('Content-Range', '')
                    if goes_on := rest.status_code == 206 and told_range.startswith(f'bytes {have}-'):
                        receive(rest, f, length)
            if have != length and not goes_on:
                f.seek(f.truncate(0))
                receive(answer, f, length)
            size = f.tell()
            os.fsync(f.fileno())
    if 0 <= length != size:
        if size > length:
            os.remove(part)
        raise Interrupted(f'{size:,} bytes came, not {length:,}')
    # the hub's ETag is a SHA-256, or the SHA-1 of a git blob; other servers' say what they like
    kind = {64: hashlib.sha256, 40: lambda: hashlib.sha1(f'blob {size}\0'.encode())}.get(len(etag))
    found = hash_file(part, kind) if is_hash and kind and re.fullmatch('[0-9a-f]+', etag) else etag
    if found != etag:
        os.remove(part)
        raise ValueError(f'{url}: the hash of what came is {found}, not {etag}; run it again')
    os.replace(part, path)
    for left in glob.glob(glob.escape(path) + '.*.part'):  # of versions before this one
        os.remove(left)
    return path


def check_answer(url, answer):
    """ValueError or Interrupted unless the answer is a file."""
    if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
        wait = answer.headers.get('Retry-After', '')
        raise Interrupted(f'it answered {answer.status_code} {answer.reason}', int(wait) if wait.isdigit() else 0)
    if answer.status_code != 200:
        hint = '; set HF_TOKEN if it is yours to read' if answer.status_code in (401, 403) else ''
        raise ValueError(f'{url} answered {answer.status_code} {answer.reason}{hint}')
    if 'text/html' in answer.headers.get('Content-Type', '') and not url.partition('?')[0].endswith(('.html', '.htm')):
        raise ValueError(f'{url} is a web page, not the file; give the address of the file itself')


def receive(answer, f, length):
    """Writes the body behind what the file holds."""
    progress = Progress(length)
    progress.add(f.tell())
    for chunk in answer.iter_content(1 << 20):
        f.write(chunk)
        progress.add(len(chunk))
    f.flush()
    progress.close()


def hash_file(path, kind=hashlib.sha256):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, kind).hexdigest()


def lock(descriptor, name):
    """Held until the file is closed or the process ends. ValueError where another process holds it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f'another process is writing {name}') from None


class Progress:
    """A line with share, rate and time left, once the work has taken two seconds."""

    def __init__(self, total):
        self.total, self.done, self.start, self.shown = max(total, 1), 0, time.time(), 0.0
        self.skipped, self.templates = 0, set()  # of rows: how many hold nothing to learn, and what the others are

    def add(self, num_bytes):
        self.done += num_bytes
        now = time.time()
        if now - self.start > 2 and now - self.shown > 0.5:
            rate = self.done / (now - self.start)
            left = max(self.total - self.done, 0) / rate
            self.show(f'{self.done / max(self.total, self.done):4.0%}  {rate / 1e6:.1f} MB/s  {left:.0f} s left ')
            self.shown = now

    def close(self):
        if self.shown:
            self.show(f'100%  {self.done / 1e6:.1f} MB in {time.time() - self.start:.0f} s        \n')

    def show(self, line):
        with contextlib.suppress(OSError):  # there may be nobody left who reads it
            print('\r' + line, end='', flush=True, file=sys.stderr)


# -----------------------------------------------------------------------------
# sources: a word of the command line -> files, in a fixed order

class File(NamedTuple):
    path: str
    name: str  # decides whether the document is held out, so it is the same on every machine
    kind: str  # a format, 'joined' for rows that are the lines of one document


@dataclass(frozen=True)
class Corpus:
    """A corpus by name: where its files are, and what a person should know before fetching them."""
    about: str
    licence: str
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


def files_of(source, cfg, spool):
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
        path = fetch_to_downloads(source, cfg.data_dir)
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
    print(f'{name}: {corpus.about}; licence {corpus.licence}; {len(urls) + len(val)} files to download, about '
          f'{corpus.download * share / 1e6:,.0f} MB, and {need / 1e6:,.0f} MB of disk with the bins', flush=True)
    os.makedirs(cfg.data_dir, exist_ok=True)
    free = shutil.disk_usage(cfg.data_dir).free
    have = glob.glob(glob.escape(os.path.join(cfg.data_dir, 'downloads')) + '/*')
    if free + sum(os.path.getsize(path) for path in have) < need:
        raise ValueError(f'{cfg.data_dir} has {free / 1e6:,.0f} MB free, and {name} needs about {need / 1e6:,.0f} MB; '
                         'use another --data_dir' + (', or --shards' if len(corpus.train) > 1 else ''))
    return [[File(fetch_to_downloads(url, cfg.data_dir, corpus.sha256), url.rsplit('/', 1)[1], corpus.kind)
             for url in side] for side in (urls, val)]


# -----------------------------------------------------------------------------
# files -> documents, in pieces: a document may be larger than memory

PIECE = 1 << 20  # characters that are tokenized at a time


class Piece(NamedTuple):
    """
    A stretch of one document. parts: [(text, markup, counts)] that are tokenized apart where `counts` (in the loss)
    changes; in markup, which is a template's, the names of special ids stand for them. Or an array of token ids.
    """
    parts: list | np.ndarray
    start: bool  # of the document
    end: bool
    key: str  # of the document: decides whether it is held out


def documents_in(files, cfg, progress=None):
    """The pieces of all documents of the files, in order."""
    if files and files[0].kind == 'joined':
        # the rows of WikiText are the lines of one document, of which the empty ones have lost their blank
        rows = (row for file in files for _, row in rows_in(file, cfg, progress))
        yield from pieces_of((row['text'] or ' \n' for row in rows), files[0].name)
        return
    for file in files:
        if file.kind == 'tokens':
            yield from token_pieces(file, progress)
        elif file.kind == 'text':
            separator = cfg.separator and cfg.separator.replace('\\n', '\n').replace('\\t', '\t')
            yield from pieces_of(text_blocks(file, cfg, progress), None if separator else file.name, separator)
        else:
            yield from row_pieces(file, cfg, progress)


def pieces_of(blocks, key=None, separator=None):
    """
    The documents in blocks of text, as pieces: one, or those between separators, less the line ends around them. The
    key is the one given, or the first piece of the text. Tokenizing the pieces gives the tokens of the whole.
    """
    text, start, name = '', True, key
    for block in chain(blocks, [None]):
        text += block or ''
        documents = text.split(separator) if separator else [text]
        text = '' if block is None else documents.pop()
        for document in documents:
            if separator:
                document = document.strip('\r\n') if start else document.rstrip('\r\n')
            if document or not start:
                yield Piece([(document, False, True)], start, True, document if name is None else name)
            start, name = True, key
        while len(text) > 2 * PIECE:
            text = text.lstrip('\r\n') if separator and start else text
            at = safe_cut(text, PIECE)
            head, text = text[:at], text[at:]
            name = head if name is None else name
            yield Piece([(head, False, True)], start, False, name)
            start = False


# no split rule of these tokenizers has a word across: the start of a line that begins with a letter, after a line that
# ends without a blank; a line end after a letter; a space after a letter
SAFE_CUTS = [re.compile(rule) for rule in (r'(?<=\S\n)(?=[^\W\d_])', r'(?<=[^\W\d_])(?=\r?\n)', r'(?<=[^\W\d_])(?= )')]


def safe_cut(text, size):
    """The last place up to `size` where cutting the text changes no token; `size` itself where none is near."""
    for rule in SAFE_CUTS:
        for near in (1 << 10, 1 << 16):
            places = [match.start() for match in rule.finditer(text, max(size - near, 1), size + 1)]
            if places:
                return places[-1]
    return size


def text_blocks(file, cfg, progress=None):
    """A file's text in blocks, decompressed, line ends as they are, less a byte-order mark."""
    decoder, at = codecs.getincrementaldecoder('utf-8')('replace' if cfg.bad_utf8 == 'replace' else 'strict'), 0
    for block in chain(byte_blocks(file.path, progress), [b'']):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:
            place = at - len(decoder.getstate()[0]) + e.start
            kind = ' (UTF-16?)' if place == 0 and e.object[:2] in (b'\xff\xfe', b'\xfe\xff') else ''
            raise ValueError(f'{file.path} is not UTF-8 text{kind}: byte {e.object[e.start]:#04x} at {place}; convert '
                             'it, or read on with --bad_utf8=replace') from None
        yield text.removeprefix('\ufeff') if at == 0 else text
        at += len(block)


def standard_input():
    """Its bytes; ValueError where it is closed."""
    if sys.stdin is None:
        raise ValueError('standard input is closed; give it something to read, or name a file')
    return sys.stdin.buffer


def byte_blocks(path, progress=None):
    """A file's bytes in blocks of a megabyte, decompressed as its name says; progress is told of bytes on the disk."""
    suffix, seen = os.path.splitext(path)[1].lower(), 0
    try:
        with open(path, 'rb') as raw:
            f = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open, '.lzma': lzma.open}.get(suffix, lambda f: f)(raw)
            for block in zstandard_blocks(raw) if suffix == '.zst' else iter(lambda: f.read(1 << 20), b''):
                yield block
                if progress:
                    progress.add(raw.tell() - seen)
                    seen = raw.tell()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f'{path} is damaged: {e}') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None


def zstandard_blocks(raw):
    """What a .zst file holds, frame by frame; the package's own reader takes a file that was cut for a whole one."""
    zstandard = optional('zstandard', 'reads .zst files')
    try:
        frame, data = None, raw.read(1 << 14)
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if block := frame.decompress(data):
                yield block
            data = frame.unused_data or raw.read(1 << 14)
            frame = None if frame.eof else frame
    except zstandard.ZstdError as e:
        raise EOFError(e) from None
    if frame:
        raise EOFError('it ends in the middle')


def optional(module, what):
    """A package that is not in requirements.txt; ValueError names the command that installs it."""
    if find_spec(module.split('.')[0]) is None:
        raise ValueError(f'{module.split(".")[0]} {what}: pip install {module.split(".")[0]}')
    return __import__(module, fromlist=['_'])


def token_pieces(file, progress=None):
    """The token ids of one of llm.c's shards: 256 int32 (magic, version, count), then that many uint16."""
    size = os.path.getsize(file.path)
    try:
        header = np.fromfile(file.path, dtype='<i4', count=256)
    except OSError as e:
        raise ValueError(f'{file.path} cannot be read: {e.strerror or e}') from None
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
        raise ValueError(f'{file.path} is no shard of GPT-2 tokens: its header does not begin with 20240520 and 1')
    if size != 1024 + 2 * int(header[2]):
        raise ValueError(f'{file.path} has {size:,} bytes, not those of the {header[2]:,} tokens that it tells of; '
                         'fetch it again')
    tokens = np.memmap(file.path, dtype='<u2', mode='r', offset=1024, shape=(int(header[2]),))
    at, size = 0, min(PIECE, max(len(tokens) // 256, 1024))
    while at < len(tokens):
        block = np.array(tokens[at:at + size])
        if at + len(block) < len(tokens):  # a document begins with its end-of-text id here; cut where one does
            ends = np.flatnonzero(block == 50256)
            block = block[:ends[-1]] if len(ends) and ends[-1] else block
        if block.max() > 50256:
            raise ValueError(f"{file.path} has token id {block.max()}, beyond GPT-2's 50256")
        yield Piece(block, True, True, file.name)
        at += len(block)
        if progress:
            progress.add(2 * len(block))


# -----------------------------------------------------------------------------
# rows -> documents: a text, or a prompt and the answer that is learned

def row_pieces(file, cfg, progress=None):
    """The documents of a file of rows."""
    for place, row in rows_in(file, cfg, progress):
        parts = parts_of(row, place, cfg, progress and progress.templates)
        if parts is None:
            if progress:
                progress.skipped += 1
        elif len(parts) == 1:
            text = parts[0][0]
            yield from pieces_of(text[i:i + PIECE] for i in range(0, len(text), PIECE))
        else:
            yield Piece(parts, True, True, '\0'.join(text for text, *_ in parts))


def rows_in(file, cfg, progress=None):
    """(place, row) of each row; a row is a dict, or a str in a JSON file of texts."""
    if file.kind in ('parquet', 'joined'):
        yield from parquet_rows(file, cfg, progress)
    elif file.kind == 'csv':
        csv.field_size_limit(2**31 - 1)
        delimiter = '\t' if '.tsv' in os.path.basename(file.path).lower() else ','
        reader = csv.DictReader(lines_of(text_blocks(file, cfg, progress)), delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise csv.Error(f'{len(row[None])} values more than the head has fields: {str(row[None])[:50]}')
                yield f'{file.path}, line {reader.line_num}', row
        except csv.Error as e:
            raise ValueError(f'{file.path}, line {reader.line_num}: {e}') from None
    elif file.kind == 'json':
        yield from json_elements(file, cfg, progress)
    else:
        for number, line in enumerate(lines_of(text_blocks(file, cfg, progress)), 1):
            if line.strip():
                try:
                    yield f'{file.path}, line {number}', json.loads(line)
                except (ValueError, RecursionError) as e:
                    raise ValueError(f'{file.path}, line {number} is not JSON: {e}') from None


def lines_of(blocks):
    """Lines with their line feed, from blocks."""
    held = []
    for block in blocks:
        *ended, rest = block.split('\n')
        if ended:
            yield ''.join(held) + ended[0] + '\n'
            yield from (line + '\n' for line in ended[1:])
            held = []
        held.append(rest)
    if last := ''.join(held):
        yield last


def json_elements(file, cfg, progress=None):
    """(place, element) of a JSON list, read element by element."""
    decoder, text, at, number = json.JSONDecoder(), '', 0, 0
    blocks = text_blocks(file, cfg, progress)
    while True:
        at = re.compile(r'\s*[,\[]?\s*' if number == 0 else r'\s*,?\s*').match(text, at).end()
        if text[at:at + 1] == ']':
            if text[at + 1:].strip() or any(block.strip() for block in blocks):
                raise ValueError(f'{file.path} goes on behind the end of its list, after element {number}')
            return
        try:
            element, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as e:
            block = next(blocks, None)
            if block is None or len(text) - at > 2**28:
                raise ValueError(f'{file.path} is not a JSON list: element {number + 1}: {e}') from None
            text, at = text[at:] + block, 0
            continue
        number += 1
        yield f'{file.path}, element {number}', element


def parquet_rows(file, cfg, progress=None):
    """(place, row) of a parquet file, a few hundred rows in memory at a time."""
    parquet = optional('pyarrow.parquet', 'reads parquet files')
    number, size = 0, os.path.getsize(file.path)
    try:
        with parquet.ParquetFile(file.path) as table:
            known = (cfg.text_field,) if cfg.text_field else ROW_FIELDS
            wanted = [name for name in table.schema_arrow.names if name in known] or None
            for batch in table.iter_batches(256, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{file.path}, row {number}', row
                if progress:
                    progress.add(size * batch.num_rows // max(table.metadata.num_rows, 1))
    except (OSError, optional('pyarrow', '').ArrowException) as e:
        raise ValueError(f'{file.path} is not a parquet file that can be read: {str(e)[:200]}') from None


ANSWERS = ('completion', 'response', 'output', 'answer')
ROW_FIELDS = ['text', 'content', 'messages', 'conversations', 'prompt', 'instruction', 'input', 'system', 'history',
              *ANSWERS]

# the marks around what each role says; those that end an answer are learned with it
TEMPLATES = {
    'plain': {'system': ('', ''), 'user': ('', ''), 'assistant': ('', '')},
    'joined': {'system': ('', ''), 'user': ('', ''), 'assistant': ('', '')},  # prompts say what stands behind them
    'alpaca': {'system': ('', ''), 'user': ('### Instruction:\n', ''), 'assistant': ('### Response:\n', '')},
    'chatml': {role: (f'<|im_start|>{role}\n', '<|im_end|>') for role in ('system', 'user', 'assistant')},
    'gemma': {role: (f'<start_of_turn>{name}\n', '<end_of_turn>') for role, name in
              (('system', 'user'), ('user', 'user'), ('assistant', 'model'))},
    'llama3': {role: (f'<|start_header_id|>{role}<|end_header_id|>\n\n', '<|eot_id|>')
               for role in ('system', 'user', 'assistant')},
}
BETWEEN = {'plain': '\n', 'joined': '', 'alpaca': '\n\n', 'chatml': '\n', 'gemma': '\n', 'llama3': ''}  # turns
ROLES = {'human': 'user', 'gpt': 'assistant', 'model': 'assistant', 'developer': 'system'}
ALPACA = ('Below is an instruction that describes a task{}. Write a response that appropriately completes the request.',
          ', paired with an input that provides further context')


def parts_of(row, place, cfg, templates=None):
    """
    The parts of the document that a row holds, or None where there is no text or no answer in it: its text_field, or
    messages (chat), instruction and output (Alpaca), prompt and completion, text, content. Adds to the set templates.
    """
    if isinstance(row, str):
        row = {'text': row}
    if not isinstance(row, dict):
        raise ValueError(f'{place}: a row must be an object with fields, or a text, not {json.dumps(row)[:50]}')
    field, (turns, template) = cfg.text_field, (None, None) if cfg.text_field else turns_of(row, place)
    if turns is not None:
        as_they_are = cfg.template == 'plain' and template == 'joined'
        chosen = template if cfg.template == 'auto' or as_they_are else cfg.template
        if not any(role == 'assistant' and text for role, text in turns):
            return None
        if templates is not None:
            templates.add(chosen)
        return render(turns, chosen)
    field = field or next((name for name in ('text', 'content') if name in row), None)
    if field not in row:
        has = ', '.join(map(str, row)) or 'none'
        raise ValueError(f'{place} has no field {field or "text"!r}; its fields are: {has}. Name the one with the text '
                         'by --text_field')
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise ValueError(f'{place}: field {field!r} is no text but {json.dumps(text, default=str)[:50]}')
    return [(mended(text), False, True)] if text else None


def turns_of(row, place):
    """([(role, text)], the template that suits), or (None, None) where a row is no instruction data."""
    def text(value):
        if value is not None and not isinstance(value, str):
            raise ValueError(f'{place}: {json.dumps(value, default=str)[:50]} stands where a text was expected')
        return mended(value or '')

    def told_before():
        return [('system', text(row['system']))] if row.get('system') else []
    messages = next((row[name] for name in ('messages', 'conversations') if row.get(name) is not None), None)
    if messages is None and row.keys() & {'messages', 'conversations'} and \
            not row.keys() & {'text', 'content', 'instruction', 'prompt'}:
        messages = []  # a chat without a word
    answer = next((name for name in ANSWERS if name in row), None)
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        turns = []
        for message in messages:
            role = message.get('role') or message.get('from')
            role = ROLES.get(role, role) if isinstance(role, str) else role
            if role not in ('system', 'user', 'assistant'):
                raise ValueError(f'{place}: a message of role {role!r}; known are system, user and assistant')
            turns.append((role, text(message.get('content') or message.get('value'))))
        return ([] if any(role == 'system' for role, _ in turns) else told_before()) + turns, 'chatml'
    if 'instruction' in row and answer:
        turns = [('input', text(row['input']))] if row.get('input') else []
        turns = [('user', text(row['instruction'])), *turns, ('assistant', text(row[answer]))]
        try:
            past = [(role, text(said)) for pair in row.get('history') or ()
                    for role, said in zip(('user', 'assistant'), [*pair] if type(pair) is not str else '', strict=True)]
        except (TypeError, ValueError):
            raise ValueError(f'{place}: history is no list of pairs of texts') from None
        return told_before() + past + turns, 'alpaca'
    if 'prompt' in row and answer:
        return [('user', text(row['prompt'])), ('assistant', text(row[answer]))], 'joined'
    return None, None


def render(turns, template):
    """The parts of a conversation: only what the assistant says, and the mark that ends it, counts in the loss."""
    marks, between = TEMPLATES[template], BETWEEN[template]
    joined = []  # what a template has no turn of its own for goes into the user's
    for role, text in turns:
        if joined and (role == 'input' or (template == 'gemma' and role == 'user' and joined[-1][0] == 'system')):
            before = '\n\n### Input:\n' if role == 'input' and template == 'alpaca' else '\n\n'
            joined[-1] = 'user', joined[-1][1] + before + text
        else:
            joined.append((role, text.strip() if template in ('gemma', 'llama3') else text))
    if template == 'alpaca' and joined[0][0] != 'system':
        joined.insert(0, ('system', ALPACA[0].format(ALPACA[1] if any(role == 'input' for role, _ in turns) else '')))
    parts = []
    for i, (role, text) in enumerate(joined):
        before, after = marks[role]
        counts = role == 'assistant'
        parts += [((between if i else '') + before, True, False), (text, False, counts), (after, True, counts)]
    return [part for part in parts if part[0]]


# -----------------------------------------------------------------------------
# pieces -> token ids, in processes

class Encoded(NamedTuple):
    """What a batch adds to a split. mask: 1 where a token counts in the loss; None where all do."""
    ids: np.ndarray
    mask: np.ndarray | None
    num_bytes: int
    documents: int


def encode_parts(tokenizer, parts):
    """(token ids, mask or None) of a stretch of a document."""
    if len(parts) == 1 and not parts[0][1]:
        return tokenizer.encode(parts[0][0]), None
    runs = []  # [text or array of one id, counts], texts that touch joined
    for text, markup, counts in parts:
        for word in tokenizer.special_names.split(text) if markup else [text]:
            if markup and word in tokenizer.specials:
                runs.append([np.array([tokenizer.specials[word]]), counts])
            elif runs and isinstance(runs[-1][0], str) and runs[-1][1] == counts:
                runs[-1][0] += word
            elif word or not runs:
                runs.append([word, counts])
    ids = [tokenizer.encode(run) if isinstance(run, str) else run for run, _ in runs]
    return np.concatenate(ids), np.repeat(np.array([c for _, c in runs], dtype=np.uint8), [len(i) for i in ids])


def encode_batch(tokenizer, batch, bos=None, eot=None):
    """
    {split: Encoded} of a batch of (split, Piece). bos, eot: ids before and after each document, or None.
    """
    made = {}
    for split, piece in batch:
        arrays, masks, documents = made.setdefault(split, ([], [], []))
        if isinstance(piece.parts, np.ndarray):  # ids already
            ids, mask = piece.parts, None
            documents.append(np.count_nonzero(ids == tokenizer.eot))
        else:
            ids, mask = encode_parts(tokenizer, piece.parts)
            documents.append(piece.end)
            if piece.start and bos is not None:
                ids, mask = np.append(bos, ids), mask if mask is None else np.append(np.uint8(0), mask)
            if piece.end and eot is not None and not (mask is not None and ids[-1] == eot):  # as a template's end
                ids, mask = np.append(ids, eot), mask if mask is None else np.append(mask, np.uint8(1))
        arrays.append(ids)
        masks.append(mask)
    return {split: encoded(tokenizer, *of_split) for split, of_split in made.items()}


def encoded(tokenizer, arrays, masks, documents):
    ids = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    assert not ids.size or ids.max() < tokenizer.n_vocab, 'a tokenizer gave an id beyond its vocabulary'
    mask = None
    if any(m is not None for m in masks):
        mask = np.concatenate([np.ones(len(a), np.uint8) if m is None else m
                               for a, m in zip(arrays, masks, strict=True)])
    return Encoded(ids.astype(id_type(tokenizer)), mask, int(tokenizer.sizes[ids].sum()), int(sum(documents)))


def id_type(tokenizer):
    return '<u2' if tokenizer.n_vocab <= 2**16 else '<u4'


def batches_of(pieces):
    """Lists of pieces that hold about PIECE characters together."""
    batch, size = [], 0
    for item in pieces:
        batch.append(item)
        parts = item[1].parts
        size += 64 + (len(parts) if isinstance(parts, np.ndarray) else sum(len(text) for text, *_ in parts))
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(tokenizer, batches, num_proc, bos=None, eot=None):
    """
    encode_batch() of each batch, in order. By num_proc processes where there is enough to do for them; Python's threads
    would wait for each other, and bytes and characters are encoded faster than they are sent to a process.
    """
    first = list(islice(batches, 4))
    batches = chain(first, batches)
    if len(first) < 4 or not isinstance(tokenizer, TiktokenTokenizer):
        yield from (encode_batch(tokenizer, batch, bos, eot) for batch in batches)
        return
    assert len(tokenizer.sizes) == tokenizer.n_vocab  # made before the fork, once for all
    context = multiprocessing.get_context('fork' if sys.platform == 'linux' else 'spawn')  # macOS forks badly
    pool, waiting = ProcessPoolExecutor(num_proc, context, start_process, (tokenizer, bos, eot)), deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(encode_here, batch))
            if len(waiting) > 2 * num_proc:
                yield result_of(waiting.popleft())
        yield from map(result_of, waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(future):
    """Its result, or its error raised here: that is how call_main() knows a sentence from a defect."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise ValueError('a process that tokenizes has died, perhaps for want of memory; try a smaller --num_proc')
    if error:
        raise error
    return future.result()


def start_process(*settings):
    """What a process that tokenizes does first. It ends with the one that started it, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent says when to end
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    encode_here.settings = settings


def encode_here(batch):
    tokenizer, bos, eot = encode_here.settings
    return encode_batch(tokenizer, batch, bos, eot)


# -----------------------------------------------------------------------------
# which documents are held out

SMALL = 1 << 24  # bytes of files that are read once more in order to be split exactly


class Division(NamedTuple):
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


def rank_of(key, seed):
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


def divide(files, val_files, cfg, fraction):
    """
    The Division of these files. Whole documents are held out: of files exactly the fraction, by their sizes; of rows
    and the like exactly when they are few or small enough to be read twice, otherwise each with that probability. A
    single document is cut at a character, a large one (which is read once, unless the tokenizer rereads it) at a line.
    """
    rereads = (cfg.tokenizer or '').startswith(('char', 'bpe'))

    def single(files):
        return files[0].kind == 'joined' or (len(files) == 1 and not cfg.separator and files[0].kind == 'text')
    one, size = single(files), sum(os.path.getsize(file.path) for file in files)
    several = cfg.append or not (one and (not val_files or single(val_files)))
    if val_files:
        return Division(several)
    if files[0].kind == 'tokens' or (one and size > SMALL and not rereads):
        return Division(several, tail=True)
    if one:
        characters = sum(len(piece.parts[0][0]) for piece in documents_in(files, cfg))
        return Division(several, cut=int(characters * (1 - fraction)), to_line=size > SMALL)
    if cfg.separator or not all(file.kind == 'text' for file in files):
        sizes, limit = Counter(), int(fraction * 2**64).to_bytes(8, 'big')
        for piece in documents_in(files, cfg):
            sizes[rank_of(piece.key, cfg.seed)] += sum(len(text.encode()) for text, *_ in piece.parts)
            if size > SMALL and len(sizes) > min(50 / fraction, 1e6):
                return Division(several, lambda key: rank_of(key, cfg.seed)[:8] < limit)
    else:
        sizes = {rank_of(file.name, cfg.seed): os.path.getsize(file.path) for file in files}
    held = hold_out(sizes, fraction)
    return Division(several, lambda key: rank_of(key, cfg.seed) in held)


def assign(files, val_files, cfg, division, progress=None):
    """(split's name, Piece) of everything, in order."""
    done, side = 0, 'train'
    for piece in documents_in(files, cfg, progress):
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
    for piece in documents_in(val_files, cfg, progress):
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

class BinWriter:
    """Appends to one bin, and to its mask once there is one, and counts what went in."""

    def __init__(self, folder, name, dtype, before=None):
        self.path, self.mask_path = (os.path.join(folder, f'{name}{end}') for end in ('.bin', '.mask.bin'))
        self.file = open(self.path, 'ab')  # noqa: SIM115
        self.mask = open(self.mask_path, 'ab') if os.path.exists(self.mask_path) else None  # noqa: SIM115
        self.dtype = np.dtype(dtype)
        self.counts = {name: (before or {}).get(name, 0) for name in ('tokens', 'bytes', 'documents')}

    def add(self, made):
        if made.mask is not None:
            self.begin_mask()
        self.file.write(made.ids.tobytes())
        if self.mask:
            self.mask.write(b'\1' * len(made.ids) if made.mask is None else made.mask.tobytes())
        for name, number in (('tokens', len(made.ids)), ('bytes', made.num_bytes), ('documents', made.documents)):
            self.counts[name] += number

    def begin_mask(self):
        """All before the first prompt counts."""
        if not self.mask:
            self.mask = open(self.mask_path, 'wb')  # noqa: SIM115
            for at in range(0, self.counts['tokens'], 1 << 20):
                self.mask.write(b'\1' * min(1 << 20, self.counts['tokens'] - at))

    def move_tail(self, to, counts):
        """Moves what is behind the first counts['tokens'] to another bin."""
        pairs = [(self.file, to.file, self.dtype.itemsize)]
        if self.mask or to.mask:
            self.begin_mask()
            to.begin_mask()
            pairs.append((self.mask, to.mask, 1))
        for mine, other, size in pairs:
            mine.flush()
            with open(mine.name, 'rb') as f:
                f.seek(counts['tokens'] * size)
                shutil.copyfileobj(f, other, 1 << 20)
            mine.truncate(counts['tokens'] * size)
        for name in self.counts:
            to.counts[name] += self.counts[name] - counts[name]
            self.counts[name] = counts[name]

    def close(self):
        """The counts, and hashes of what is on the disk."""
        for f in (self.file, self.mask):
            if f:
                f.flush()
                os.fsync(f.fileno())
                f.close()
        hashes = {'sha256': hash_file(self.path)} | ({'mask_sha256': hash_file(self.mask_path)} if self.mask else {})
        return self.counts | hashes


def write_dataset(folder, files, val_files, cfg, fraction, source):
    """
    Writes the documents of files as a dataset, or behind the one that is there if cfg.append, and returns its meta.
    Whatever stood under the name is replaced at the end, at once.
    """
    size = sum(os.path.getsize(file.path) for file in (*files, *val_files))
    division = divide(files, val_files, cfg, fraction)
    with partial_folder(folder) as partial:
        old = copy_dataset(folder, partial) if cfg.append else {}
        tokenizer = tokenizer_from(old['tokenizer']) if old else \
            make_tokenizer(cfg.tokenizer, lambda: assign(files, val_files, cfg, division), division.several, size)
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
        pieces = assign(files, val_files, cfg, division, progress)
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
            hint = f' (or does {cfg.separator!r} not occur in it?)' if cfg.separator else ''
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


OWN_FILES = ('train.bin', 'val.bin', 'train.mask.bin', 'val.mask.bin', 'meta.json')


def copy_dataset(folder, partial):
    """Copies the bins of a dataset, proves them whole, and returns its meta."""
    meta = read_meta(folder)
    for s in ('train', 'val'):
        for name, key in ((f'{s}.bin', 'sha256'), (f'{s}.mask.bin', 'mask_sha256')):
            path = os.path.join(partial, name)
            if os.path.exists(os.path.join(folder, name)):
                shutil.copyfile(os.path.join(folder, name), path)
                if hash_file(path) != meta['splits'][s].get(key):
                    raise ValueError(f'{os.path.join(folder, name)} is not what meta.json says of it; prepare it again')
    return meta


def remove(path):
    """A file, or a folder with all that is in it."""
    shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)


@contextlib.contextmanager
def partial_folder(folder):
    """The empty folder that a dataset is written into, locked as long as it is."""
    partial = folder + '.partial'
    os.makedirs(partial, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if fcntl:
            stack.callback(os.close, descriptor := os.open(partial, os.O_RDONLY))
            lock(descriptor, partial)
        for entry in os.scandir(partial):  # of a run that was killed
            remove(entry.path)
        try:
            yield partial
        except BaseException:
            remove(partial)
            raise


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


def cores(physical=False, system='/sys'):
    """
    The CPUs this process may use: those of its affinity, and no more than a container's quota pays for. physical: the
    hyper-threads of a core count once, as they share what multiplies.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count() or 1)
    found, most = len(cpus), math.inf
    if physical:
        found = len({first_of(f'{system}/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list') or cpu
                     for cpu in cpus})
    with contextlib.suppress(ValueError):  # no quota, or no Linux
        quota, period = first_of(f'{system}/fs/cgroup/cpu.max').split()
        most = math.ceil(int(quota) / int(period))
    return max(min(found, most), 1)


def first_of(path):
    """The first line of a file of the system's; empty where there is none."""
    try:
        with open(path, encoding='ascii') as f:
            return f.readline().strip()
    except OSError:
        return ''


# -----------------------------------------------------------------------------
# what train.py and sample.py ask of a dataset

class PlainUnpickler(pickle.Unpickler):
    """Containers, text and numbers only: a pickle that names anything importable is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'{module}.{name}')


def dataset_folder(data_dir, dataset):
    """The folder of a dataset by name; a name that leads out of data_dir is refused."""
    parts = dataset.replace('\\', '/').rstrip('/').split('/')
    if os.path.isabs(dataset) or {'', '.', '..'} & set(parts) or '\0' in dataset or ':' in dataset:
        raise ValueError(f'dataset={dataset!r} must be a name below data_dir={data_dir!r}; for another place set '
                         '--data_dir')
    if re.search(r'\.partial(\.|$)', parts[-1]):
        raise ValueError(f'dataset={dataset!r} is a dataset that is being written, or was when it was killed')
    return os.path.join(data_dir, *parts)


def read_meta(folder):
    """
    What is known of a dataset: meta.json, or as much as nanoGPT's meta.pkl says, or as nanoGPT would assume without
    either: uint16 ids of GPT-2's BPE. Keys: dtype, vocab_size, tokenizer, splits ({} when foreign), foreign.
    """
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        try:
            meta = read_json(path)
            numbers = [meta['format'], meta['vocab_size'], *(meta['splits'][s]['tokens'] for s in ('train', 'val')),
                       *(meta['splits'][s].get(key, 0) for s in ('train', 'val') for key in ('bytes', 'documents'))]
            if meta['format'] > FORMAT or meta['dtype'] not in ('uint16', 'uint32') or \
                    not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(meta.get('eot'), int | None):
                raise KeyError('format')
            if not set(meta.get('templates', [])) <= TEMPLATES.keys():
                raise KeyError('templates')
            made = tokenizer_from({'kind': 'byte'} if meta['tokenizer']['kind'] == 'tiktoken' else meta['tokenizer'])
            if not made.n_vocab <= meta['vocab_size'] <= MAX_VOCAB:
                raise KeyError('vocab_size')
            if meta.get('bos') is not None and not (type(meta['bos']) is int and 0 <= meta['bos'] < meta['vocab_size']):
                raise KeyError('bos')
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f'{path} is damaged or of a later version ({e}); prepare the dataset again') from None
        return {**meta, 'foreign': False}
    path = os.path.join(folder, 'meta.pkl')
    foreign = {'dtype': 'uint16', 'splits': {}, 'foreign': True}
    if not os.path.exists(path):
        return {**foreign, 'vocab_size': 50304, 'tokenizer': {'kind': 'tiktoken', 'name': 'gpt2'}}
    try:
        with open(path, 'rb') as f:
            pickled = f.read()
        # a number in a pickle of 7 bytes can ask for a table of 16 GB
        if any(op.name.endswith('PUT') and arg > len(pickled) for op, arg, _ in pickletools.genops(pickled)):
            raise ValueError('it numbers more values than it holds')
        meta = PlainUnpickler(io.BytesIO(pickled)).load()
        chars, size = [meta['itos'][i] for i in range(len(meta['itos']))], int(meta['vocab_size'])
        if not all(isinstance(c, str) and len(c) == 1 for c in chars) or len(set(chars)) < len(chars):
            raise ValueError('itos is not one character an id')
        if not len(chars) <= size <= MAX_VOCAB:
            raise ValueError(f'vocab_size={size} for {len(chars)} characters')
        return {**foreign, 'vocab_size': size, 'tokenizer': {'kind': 'char', 'chars': ''.join(chars), 'eot': False}}
    except Exception as e:  # unpickling arbitrary bytes can raise nearly anything
        raise ValueError(f"{path} is not nanoGPT's meta.pkl of a character dataset ({type(e).__name__}: {e}); "
                         "without that file the bins are read as GPT-2's tokens") from None


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


def open_bin(path, dtype):
    """A bin as a mapped array of ids; one that is missing or empty has none. ValueError where it cannot be read."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return np.zeros(0, dtype=dtype)
    if os.path.getsize(path) % np.dtype(dtype).itemsize:
        raise ValueError(f'{path} has {os.path.getsize(path):,} bytes, which is no whole number of {dtype}; prepare it '
                         'again')
    try:
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder('<'), mode='r')
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None


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
    names = {10: '\\n', 13: '\\r', 9: '\\t'}
    return ''.join(c if c.isprintable() else names.get(ord(c), f'\\x{ord(c):02x}') for c in text)


def how_to_make(dataset):
    """The command that makes a dataset, for messages that miss it."""
    if dataset == 'stdlib' or dataset in CORPORA:
        return f'python prepare.py {dataset}'
    return f'python prepare.py FILE_OR_FOLDER --name={dataset} --tokenizer=gpt2'


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


def open_sources(sources, cfg, spool):
    """(files, validation files, cfg with what a corpus by name brings along, val_fraction) of the command's words."""
    if [*sources, cfg.val].count('-') > 1:
        raise ValueError('standard input can be read once only, and is named twice')
    corpus = CORPORA.get(sources[0]) if len(sources) == 1 and not os.path.exists(sources[0]) else None
    if cfg.shards and not corpus:
        raise ValueError(f'shards={cfg.shards} is for a corpus by name: {", ".join(CORPORA)}')
    val_files = files_of(cfg.val, cfg, spool + '.val') if cfg.val else []
    if corpus:
        cfg = replace(cfg, tokenizer=cfg.tokenizer or corpus.tokenizer, separator=cfg.separator or corpus.separator)
        load_tokenizer(cfg.tokenizer)  # before the download, should it be missing
        files, own_val = open_corpus(sources[0], cfg)
        fraction = corpus.val_fraction
        val_files = val_files or own_val
    else:
        places = [os.path.basename(os.path.abspath(source)) + '/' if len(sources) > 1 else '' for source in sources]
        files = [file._replace(name=place + file.name) for source, place in zip(sources, places, strict=True)
                 for file in files_of(source, cfg, f'{spool}.{sources.index(source)}')]
        fraction = 0.05 if sources == ['stdlib'] else 0.1
    files = without_repeats(files, val_files)
    kinds = {file.kind for file in (*files, *val_files)}
    check_kinds(kinds, cfg, ' '.join(sources))
    tokens = 'tokens' in kinds
    if tokens and len(kinds) > 1:
        raise ValueError('shards of tokens and files of text cannot be one dataset; train on both with --dataset=A,B')
    if tokens and (cfg.tokenizer or 'gpt2') != 'gpt2':
        raise ValueError(f"shards hold GPT-2's tokens; tokenizer={cfg.tokenizer!r} cannot change that")
    cfg = replace(cfg, tokenizer=cfg.tokenizer or ('gpt2' if tokens else 'byte'))
    return files, val_files, cfg, cfg.val_fraction or fraction


def check_kinds(kinds, cfg, place):
    """ValueError where a setting for files of one kind finds none there."""
    rows = kinds - {'text', 'tokens'}
    for name, acts in (('text_field', rows), ('template', rows), ('separator', 'text' in kinds)):
        if getattr(cfg, name, None) not in (None, 'auto') and not acts:
            raise ValueError(f'{name}={getattr(cfg, name)!r} acts on {"text" if name == "separator" else "rows"}, and '
                             f'there is none in {place}')


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
    cfg, given, sources = configure(PrepareConfig, argv=argv, files=False, about=__doc__)
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
        files, val_files, cfg, fraction = open_sources(sources, cfg, spool)
        if before != ' '.join(sources):
            print(f'note: the dataset that is there, made from {before}, is replaced; --name gives this one another '
                  'place')
        total = sum(os.path.getsize(file.path) for file in (*files, *val_files))
        print(f'{" ".join(sources)}: {len(files) + len(val_files):,} files, {total / 1e6:.1f} MB -> {folder}, '
              f'tokenizer {"of the dataset" if cfg.append else cfg.tokenizer}', flush=True)
        meta = write_dataset(folder, files, val_files, cfg, fraction, ' '.join(sources))
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
