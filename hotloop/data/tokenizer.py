"""Tokenizers: text to ids and back, rebuilt from the spec() that datasets and checkpoints carry."""

import re
import reprlib
from functools import cached_property

import numpy as np

from hotloop.data.bpe import GPT2_SPLIT
from hotloop.data.download import read_url
from hotloop.data.hf_tokenizer import TokenizerJson, read_file
from hotloop.system.files import counted, reason_of

MAX_VOCAB = 2**20  # ids of a tokenizer
GPT2_SPEC = {'kind': 'tiktoken', 'name': 'gpt2', 'bos': None, 'stops': []}
GPT2_VOCAB_SIZES = (50257, 50304)  # OpenAI's, and padded to a multiple of 64
TIKTOKEN_NAMES = ('gpt2', 'r50k_base', 'p50k_base', 'cl100k_base', 'o200k_base')


class Tokenizer:
    """
    Share what all tokenizers need; each adds encode(text) -> array of ids, and settings().

    eot: the id that ends a document, or None. bos: the id that begins every document, as in most
    families of Hugging Face, or None. stops: other ids that end an answer. pieces: the bytes of
    each id; eot, bos and unused ids have none. specials: {name: id}, for prompts and templates;
    encode() never returns one of them.
    """
    n_vocab = 0
    eot = None
    bos = None
    stops = ()

    def spec(self):
        """Describe this tokenizer for meta.json and checkpoints; tokenizer_from() builds it again."""
        return {**self.settings(), 'bos': self.bos, 'stops': [*self.stops]}

    def encode_next(self, text, after_special):
        """
        Encode a text inside a document; differs from encode() if encode() adds a leading space.
        """
        return self.encode(text)

    def decode(self, ids):
        """
        Return the bytes of ids. Ids beyond n_vocab (padding of a model's vocabulary) have none.
        """
        return b''.join(self.pieces[i] for i in ids if i < self.n_vocab)

    @cached_property
    def sizes(self):
        """Count the UTF-8 bytes of each id, (n_vocab,) int64, for bits per byte."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    @cached_property
    def specials(self):
        return {} if self.eot is None else {'<|endoftext|>': self.eot}

    @cached_property
    def special_names(self):
        """Match the names of special ids, the longest first."""
        names = map(re.escape, sorted(self.specials, key=len, reverse=True))
        return re.compile(f'({"|".join(names) or "(?!)"})')  # (?!) matches nothing


class ByteTokenizer(Tokenizer):
    """Encode any text as the 256 bytes of UTF-8, with an end-of-text id. Needs no package."""
    n_vocab, eot = 257, 256
    pieces = (*(bytes([b]) for b in range(256)), b'')

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'surrogatepass'), dtype=np.uint8)

    def settings(self):
        return {'kind': 'byte'}


class CharTokenizer(Tokenizer):
    """
    Give each character of `chars` an id, then the end of text if `eot`. In a list, as from
    nanoGPT's meta.pkl, longer texts may stand between the characters; they are decoded, but never
    encoded.
    """

    def __init__(self, chars, eot=False):
        self.chars = chars
        self.pieces = [c.encode('utf-8', 'surrogatepass') for c in chars]
        if eot:
            self.eot = len(chars)
            self.pieces.append(b'')
        self.n_vocab = len(self.pieces)
        ids = {ord(c): i for i, c in enumerate(chars) if len(c) == 1}  # by code point
        # code point -> id; the last entry stands for unknown ones
        self.table = np.full(max(ids, default=0) + 2, -1)
        self.table[list(ids)] = list(ids.values())

    def encode(self, text):
        points = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype=np.uint32)
        ids = self.table[np.minimum(points, len(self.table) - 1)]
        if (ids < 0).any():
            unknown = ''.join(sorted({chr(p) for p in points[ids < 0]}))
            raise ValueError('the vocabulary of this char tokenizer lacks '
                             f'{counted(len(unknown), "character")} of the text or of its chat '
                             f'template: {unknown[:20]!r}')
        return ids

    def settings(self):
        return {'kind': 'char', 'chars': self.chars, 'eot': self.eot is not None}


class TiktokenTokenizer(Tokenizer):
    """
    Wrap one of OpenAI's encodings from the tiktoken package, which downloads it once and caches it.
    """

    def __init__(self, name):
        import tiktoken.load
        # tiktoken's own would wait for ever behind a firewall that drops packets.
        tiktoken.load.read_file = read_url
        self.name = name
        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as e:  # requests, urllib3 and the file system raise many types here
            raise ValueError(f'the tokenizer {name!r} could not be loaded: {reason_of(e)}; without '
                             "a network, set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's "
                             'cache, or prepare the data with --tokenizer=bpe:8192') from None
        self.n_vocab, self.eot = self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text):
        text = fix_surrogates(text)
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # A million characters of white space exceed the stack of its regex.
            half = len(text) // 2
            if not half:
                raise
            return np.concatenate([self.encode(text[:half]), self.encode(text[half:])])

    @cached_property
    def pieces(self):
        pieces = [b''] * self.n_vocab
        names = [name.encode() for name in self.encoding.special_tokens_set]
        for piece in self.encoding.token_byte_values() + names:
            i = self.encoding.encode_single_token(piece)
            if i not in (self.eot, self.bos):
                pieces[i] = piece
        return pieces

    def settings(self):
        return {'kind': 'tiktoken', 'name': self.name}


class BPETokenizer(TiktokenTokenizer):
    """
    Run a byte-level BPE that carries its tokens with tiktoken. tokens: the bytes of each id, None
    for special and unused ids; lower ids merge first. The end-of-text id follows the tokens.
    """

    def __init__(self, tokens, pattern=GPT2_SPLIT, specials=None, eot=None):
        import tiktoken
        if specials is None:
            eot = len(tokens)
            specials = {'<|endoftext|>': eot}
        self.tokens = tokens
        self.pattern = pattern
        self.specials = specials
        self.eot = eot
        ranks = {token: i for i, token in enumerate(tokens) if token is not None}
        self.encoding = tiktoken.Encoding('own', pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens=specials)
        self.n_vocab = self.encoding.n_vocab

    def settings(self):
        tokens = [None if token is None else token.decode('latin-1') for token in self.tokens]
        return {'kind': 'bpe', 'tokens': tokens, 'pattern': self.pattern, 'specials': self.specials,
                'eot': self.eot}


class HFTokenizer(Tokenizer):
    """
    Wrap a TokenizerJson. If that adds a leading space, the ids have one byte more than the text.
    """

    def __init__(self, file, eot):
        self.file = file
        self.eot = eot
        self.specials = file.specials
        self.n_vocab = file.n_vocab

    def encode(self, text):
        return self.file.encode(fix_surrogates(text))

    def encode_next(self, text, after_special):
        inside = not after_special or self.file.space != 'always'
        return self.file.encode(fix_surrogates(text), inside)

    @cached_property
    def pieces(self):
        return self.file.pieces(blank=(self.eot, self.bos))

    def settings(self):
        return {'kind': 'hf', 'json': self.file.text, 'eot': self.eot}


KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'tiktoken': TiktokenTokenizer,
         'bpe': BPETokenizer, 'hf': HFTokenizer}


def read_tokenizer_json(path):
    """Read the HFTokenizer of a tokenizer.json, or of the folder that has one."""
    file, eot, stops = read_file(path)
    tokenizer = HFTokenizer(file, eot)
    tokenizer.bos = file.first_id()
    tokenizer.stops = stops
    return tokenizer


def tokenizer_from(spec):
    """
    Build the tokenizer that a spec() describes. Raises ValueError if it does not describe one.
    """
    try:
        settings = dict(spec)
        kind = KINDS[settings.pop('kind')]
        bos = settings.pop('bos', None)
        stops = settings.pop('stops', ())
        if 'tokens' in settings:
            settings['tokens'] = [t if t is None else t.encode('latin-1')
                                  for t in settings['tokens']]
        if 'json' in settings:
            settings['file'] = TokenizerJson(settings.pop('json'))
        tokenizer = kind(**settings)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f'{reprlib.repr(spec)} does not describe a tokenizer of this '
                         'version') from None
    tokenizer.bos = bos
    tokenizer.stops = tuple(stops)
    return tokenizer


def spec_of(record):
    """
    Return the tokenizer's spec in a meta.json or a checkpoint, or None. Older ones hold `bos` and
    the stops (`ends`) beside the spec, whose own `bos` is only the name that a file has for it.
    """
    spec = record.get('tokenizer')
    if not spec or 'stops' in spec:
        return spec
    stops = [i for i in record.get('ends', ()) if i != spec.get('eot')]
    spec = {**spec, 'bos': record.get('bos'), 'stops': stops}
    spec.pop('nfc', None)
    return spec


def template_of_record(record):
    """Return the chat template in a meta.json or a checkpoint, or None. Older ones may list several."""
    names = record.get('templates', ())
    if len(names) == 1:
        return names[0]
    template = record.get('template')
    return None if template == 'none' else template


def same_tokenizer(a, b):
    """
    Test whether two specs give each id the same bytes, as GPT-2's tokenizer.json and tiktoken do.
    """
    if a == b:
        return True
    try:
        a, b = tokenizer_from(a), tokenizer_from(b)
    except ValueError:  # one of them cannot be built here
        return False
    return list(a.pieces) == list(b.pieces) and a.eot == b.eot


def fix_surrogates(text):
    """
    Join surrogate pairs and replace lone ones, which UTF-8 cannot hold. JSON may contain either.
    """
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def encode_parts(tokenizer, parts, start=True):
    """
    Encode a stretch of a document as (ids, mask). parts: those of a Piece. start: whether the
    document begins here. mask: 1 where a token counts toward the loss; None for a single part of
    plain text.
    """
    runs = []  # [text or special id, counts]; adjacent texts with equal `counts` form one run
    for text, markup, counts in parts:
        for word in tokenizer.special_names.split(text) if markup else [text]:
            if markup and word in tokenizer.specials:
                runs.append([tokenizer.specials[word], counts])
            elif runs and isinstance(runs[-1][0], str) and runs[-1][1] == counts:
                runs[-1][0] += word
            elif word or not runs:
                runs.append([word, counts])
    ids = []
    mask = []
    for i, (run, counts) in enumerate(runs):
        if not isinstance(run, str):
            ids.append(np.array([run]))
        elif start and i == 0:
            ids.append(tokenizer.encode(run))
        else:
            after_special = i > 0 and not isinstance(runs[i - 1][0], str)
            ids.append(tokenizer.encode_next(run, after_special))
        mask.append(np.full(len(ids[-1]), counts, dtype=np.uint8))
    if len(parts) == 1 and not parts[0][1]:
        return ids[0], None
    return np.concatenate(ids), np.concatenate(mask)


def prompt_ids(tokenizer, text):
    """
    Encode a prompt, in which the names of special ids count, after the bos; never empty.
    """
    ids = encode_parts(tokenizer, [(text, True, True)])[0].tolist()
    if tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids = [tokenizer.bos, *ids]
    return ids or [0 if tokenizer.eot is None else tokenizer.eot]
