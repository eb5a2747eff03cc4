"""Tokenizers: text to ids and back, rebuilt from the spec() that datasets and checkpoints carry."""

import json
import os
import re
import reprlib
from functools import cached_property
from typing import ClassVar

import numpy as np

from hotloop.data.bpe import BYTE_OF, GPT2_SPLIT
from hotloop.data.download import open_url
from hotloop.system.files import optional
from hotloop.system.text import counted, first_line, reason_of

GPT2_SPEC = {'kind': 'tiktoken', 'name': 'gpt2', 'bos': None, 'stops': []}
GPT2_VOCAB_SIZES = (50257, 50304)  # OpenAI's, and padded to a multiple of 64
SIGN = re.compile(rb'[^A-Za-z_\s\x80-\xff]')  # or a digit
TIKTOKEN_NAMES = ('gpt2', 'r50k_base', 'p50k_base', 'cl100k_base', 'o200k_base')


class Tokenizer:
    """
    Share what all tokenizers need; each adds encode(text) -> array of ids.

    settings: {'kind': a name of KINDS, and what the class is built from}.
    eot: the id that ends a document, or None. bos: the id that begins every document, or None.
    stops: other ids that end an answer. pieces: the bytes of each id; eot, bos and unused ids have
    none. specials: {name: id}, for prompts and templates; encode() never returns one of them.
    """
    n_vocab = 0
    eot = None
    bos = None
    stops = ()

    def spec(self):
        """Describe this tokenizer for meta.json and checkpoints; tokenizer_from() builds it again."""
        return {**self.settings, 'bos': self.bos, 'stops': [*self.stops]}

    def encode_next(self, text, after_special):
        """Encode a text inside a document; differs from encode() if that adds a leading space."""
        return self.encode(text)

    def decode(self, ids):
        """Return the bytes of ids. Those beyond n_vocab, which pad a model's vocabulary, have none."""
        return b''.join(self.pieces[i] for i in ids if i < self.n_vocab)

    @cached_property
    def sizes(self):
        """Count the UTF-8 bytes of each id, (n_vocab,) int64, for bits per byte. Special ids are no text."""
        sizes = np.array([len(piece) for piece in self.pieces], dtype=np.int64)
        sizes[list(self.specials.values())] = 0
        return sizes

    @cached_property
    def repeat_sizes(self):
        """
        Measure each id for the penalty on repeats: its bytes that are not white space, ASCII signs and
        digits twice, and at least 2, unless the tokens are characters, where a letter is no repeat.
        """
        sizes = np.array([len(b''.join(piece.split())) + len(SIGN.findall(piece)) for piece in self.pieces])
        if sizes.max() > 4:  # not the tokens of characters
            sizes[sizes == 1] = 2
        return np.where(self.sizes > 0, sizes, 0)

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
    settings: ClassVar = {'kind': 'byte'}
    n_vocab, eot = 257, 256
    pieces = (*(bytes([b]) for b in range(256)), b'')

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'surrogatepass'), dtype=np.uint8)


class CharTokenizer(Tokenizer):
    """
    Give each character of `chars` an id, then the end of text if `eot`. In a list, as from nanoGPT's
    meta.pkl, longer texts may stand between the characters; they are never encoded.
    """

    def __init__(self, chars, eot=False):
        self.settings = {'kind': 'char', 'chars': chars, 'eot': eot}
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
            raise ValueError(f'{counted(len(unknown), "character")} of the text or of its chat template '
                             f'are not in the vocabulary of this char tokenizer: {unknown[:20]!r}')
        return ids


class TiktokenTokenizer(Tokenizer):
    """Wrap one of OpenAI's encodings from the tiktoken package, which downloads it once."""

    def __init__(self, name):
        import tiktoken.load
        # tiktoken's own never times out
        tiktoken.load.read_file = lambda url: open_url(url).content
        self.settings = {'kind': 'tiktoken', 'name': name}
        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as e:  # requests, urllib3 and the file system raise many types here
            raise ValueError(f'the tokenizer {name!r} could not be loaded: {reason_of(e)}; set '
                             "TIKTOKEN_CACHE_DIR to tiktoken's cache, or use --tokenizer=bpe:8192") from None
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


class BPETokenizer(TiktokenTokenizer):
    """
    Run our own byte-level BPE with tiktoken. tokens: the bytes of each id, None
    for special and unused ids; lower ids merge first. The end-of-text id follows the tokens.
    """

    def __init__(self, tokens, pattern=GPT2_SPLIT, specials=None, eot=None):
        import tiktoken
        if specials is None:
            eot = len(tokens)
            specials = {'<|endoftext|>': eot}
        texts = [None if token is None else token.decode('latin-1') for token in tokens]
        self.settings = {'kind': 'bpe', 'tokens': texts, 'pattern': pattern, 'specials': specials, 'eot': eot}
        self.tokens = tokens
        self.specials = specials
        self.eot = eot
        ranks = {token: i for i, token in enumerate(tokens) if token is not None}
        self.encoding = tiktoken.Encoding('own', pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens=specials)
        self.n_vocab = self.encoding.n_vocab


class HFTokenizer(Tokenizer):
    """
    Run a tokenizer.json with the package tokenizers: a byte-level BPE (GPT-2, Llama 3, Qwen) or a
    sentencepiece BPE (Llama 2, Mistral, Gemma), which may put a space before a text. kept: what its
    tokenizer_config.json has for others, {'bos_token': name, 'pad_token': name, 'chat_template': Jinja,
    'generation': generation_config.json}, or less.
    """

    def __init__(self, text, eot=None, kept=None):
        self.settings = {'kind': 'hf', 'json': text, 'eot': eot, 'kept': kept or {}}
        self.eot = eot
        self.backend = self.inside = open_backend(text)  # inside: for a text that continues another
        file = json.loads(self.backend.to_str())  # the same file with every default spelled out
        steps = []
        for part, parts in (('normalizer', 'normalizers'), ('pre_tokenizer', 'pretokenizers')):
            if file[part]:
                steps += file[part].get(parts, [file[part]])
        self.byte_level = any(step['type'] == 'ByteLevel' for step in steps)
        model = file['model']
        is_bpe = model['type'] == 'BPE' and (self.byte_level or model['byte_fallback'])
        if not is_bpe or any(step.get('add_prefix_space') for step in steps):
            raise ValueError('it is not a BPE like those of GPT-2, Llama, Mistral, Qwen and Gemma, or adds a '
                             'space before each text')
        self.space = 'never'  # added space: 'first' in a document, or 'always': after special ids too
        for step in steps:
            if step['type'] == 'Prepend':
                self.space = 'always'
                step['prepend'] = ''
            elif step['type'] == 'Metaspace':
                self.space = step['prepend_scheme']
                step['prepend_scheme'] = 'never'
        if self.space != 'never':
            self.inside = open_backend(json.dumps(file))
        self.added = self.backend.get_added_tokens_decoder()
        self.specials = {self.added[i].content: i for i in sorted(self.added) if self.added[i].special}
        self.n_vocab = max(self.backend.get_vocab().values()) + 1

    def __reduce__(self):  # the package's own pickle loses encode_special_tokens
        return tokenizer_from, (self.spec(),)

    def encode(self, text, inside=False):
        backend = self.inside if inside else self.backend
        # encode() is slower, because it computes offsets.
        encoding, = backend.encode_batch_fast([fix_surrogates(text)], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def encode_next(self, text, after_special):
        return self.encode(text, inside=not after_special or self.space != 'always')

    @cached_property
    def pieces(self):
        pieces = [b''] * self.n_vocab
        for token, i in self.backend.get_vocab().items():
            if i in (self.eot, self.bos) or i >= self.n_vocab:  # of which a model may have fewer
                continue
            if self.byte_level and i not in self.added and BYTE_OF.keys() >= set(token):
                pieces[i] = bytes(BYTE_OF[letter] for letter in token)
            elif self.byte_level:
                pieces[i] = token.encode()
            elif re.fullmatch('<0x[0-9A-F]{2}>', token):
                pieces[i] = bytes.fromhex(token[3:5])
            else:
                pieces[i] = token.replace('▁', ' ').encode()
        return pieces


def open_backend(text):
    """Build the package's tokenizer of a file's text, which encodes special names as plain text."""
    package = optional('tokenizers', 'reads tokenizer.json files')
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # encode.py forks
    try:
        backend = package.Tokenizer.from_str(text)
    except Exception as e:  # the package raises plain Exception
        raise ValueError(f'tokenizers {package.__version__} cannot read it: {first_line(e)[:200]}') from None
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'tiktoken': TiktokenTokenizer,
         'bpe': BPETokenizer, 'hf': HFTokenizer}


def tokenizer_from(spec):
    """Build the tokenizer that a spec() describes. Raises ValueError if it does not describe one."""
    try:
        settings = dict(spec)
        kind = KINDS[settings.pop('kind')]
        bos = settings.pop('bos', None)
        stops = settings.pop('stops', ())
        if 'tokens' in settings:
            settings['tokens'] = [t if t is None else t.encode('latin-1') for t in settings['tokens']]
        if 'json' in settings:
            settings['text'] = settings.pop('json')
        tokenizer = kind(**settings)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f'{reprlib.repr(spec)} does not describe a tokenizer of this version') from None
    tokenizer.bos = bos
    tokenizer.stops = tuple(stops)
    return tokenizer


def spec_of(record):
    """
    Return the tokenizer's spec in a meta.json or a checkpoint, or None. Older ones hold `bos` beside
    the spec, whose own `bos` is only a name, and no stops.
    """
    spec = record.get('tokenizer')
    if not spec or 'stops' in spec:
        return spec
    spec = {**spec, 'bos': record.get('bos'), 'stops': []}
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
    """Test whether two specs give each id the same bytes, as GPT-2's in two formats do."""
    if a == b:
        return True
    try:
        a, b = tokenizer_from(a), tokenizer_from(b)
    except ValueError:  # one of them cannot be built here
        return False
    return list(a.pieces) == list(b.pieces) and a.eot == b.eot


def fix_surrogates(text):
    """Join surrogate pairs and replace lone ones, which JSON may hold and UTF-8 cannot."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
