"""Tokenizers: byte, char, tiktoken, byte-level BPE; rebuilt from what spec() puts into meta.json."""

import binascii
import json
import os
import re
import reprlib
import tempfile
import unicodedata
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise

import numpy as np

from hotloop.bpe import BYTES_IN_GPT2S_ORDER, GPT2_SPLIT, merge
from hotloop.files import hash_file, read_json

MAX_VOCAB = 2**20  # ids of a tokenizer
TIKTOKEN_NAMES = ('gpt2', 'r50k_base', 'p50k_base', 'cl100k_base', 'o200k_base')


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
            return self.encode(fix_surrogates(text))

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


def fix_surrogates(text):
    """The text as UTF-8 can hold it: surrogate pairs joined, lone ones replaced. JSON's escapes can write either."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


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
