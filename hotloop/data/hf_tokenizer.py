"""Read Hugging Face's tokenizer.json with the optional tokenizers package."""

import json
import os
import re

import numpy as np

from hotloop.data.bpe import BYTES_IN_GPT2S_ORDER
from hotloop.system.files import first_line, optional, read_json

# byte-level BPE writes each byte as a printable letter
BYTE_OF = {chr(b if i < 188 else 68 + i): b for i, b in enumerate(BYTES_IN_GPT2S_ORDER)}
# The usual names, where tokenizer_config.json has none.
EOS_NAMES = ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>')


class TokenizerJson:
    """
    Run a byte-level BPE (GPT-2, Llama 3, Qwen) or sentencepiece BPE (Llama 2, Mistral, Gemma).
    Raises ValueError if the file is neither. specials: {name: id}; encode() takes their names as
    text. space: when the file puts one before a text: 'never', 'first' (in a document), 'always'
    (also after special ids).
    """

    def __init__(self, text):
        self.text = text
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
            raise ValueError('it is not a BPE like those of GPT-2, Llama, Mistral, Qwen and Gemma')
        self.space = 'never'
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
        self.specials = {}
        for i in sorted(self.added):
            if self.added[i].special:
                self.specials[self.added[i].content] = i
        self.n_vocab = max(self.backend.get_vocab().values()) + 1

    def __reduce__(self):  # the package's own pickle loses encode_special_tokens
        return TokenizerJson, (self.text,)

    def encode(self, text, inside=False):
        """
        Encode a text, (n,) uint32. inside: without the space that the file may put before a text.
        """
        backend = self.inside if inside else self.backend
        # encode() is slower, because it computes offsets.
        encoding, = backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def first_id(self):
        """Find the special id that the file puts before each text, or None."""
        encoding = self.backend.encode('a', add_special_tokens=True)
        # Some files put a special id after a text instead.
        return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None

    def pieces(self, blank):
        """List the bytes of each id; unused ids and those in `blank` have none."""
        pieces = [b''] * self.n_vocab
        for token, i in self.backend.get_vocab().items():
            if i in blank:
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
    """
    Build the package's tokenizer from the text of a file. It encodes special names as plain text.
    """
    package = optional('tokenizers', 'reads tokenizer.json files')
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # encode.py forks
    try:
        backend = package.Tokenizer.from_str(text)
    except Exception as e:  # the package raises plain Exception
        raise ValueError(f'tokenizers {package.__version__} cannot read it: '
                         f'{first_line(e)[:200]}') from None
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_file(path):
    """
    Read (TokenizerJson, end id or None, other ids that end an answer) of a tokenizer.json or the
    folder that has one. The end is what tokenizer_config.json names, or the usual one.
    """
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        folder = path
        path = os.path.join(path, 'tokenizer.json')
    try:
        with open(path, encoding='utf-8') as f:
            file = TokenizerJson(f.read())
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror}; transformers makes one of other '
                         f'files: AutoTokenizer.from_pretrained({folder!r})'
                         f'.save_pretrained({folder!r})') from None
    except ValueError as e:
        raise ValueError(f'{path} cannot be used: {e}') from None
    name = read_optional(folder, 'tokenizer_config.json').get('eos_token')
    if isinstance(name, dict):
        name = name['content']
    eot = None
    for known in (name, *EOS_NAMES):
        if known in file.specials:
            eot = file.specials[known]
            break
    config = {**read_optional(folder, 'config.json'), **read_optional(folder, 'generation_config.json')}
    stops = config.get('eos_token_id') or []
    if not isinstance(stops, list):
        stops = [stops]
    return file, eot, tuple(i for i in stops if i != eot)


def read_optional(folder, name):
    """Read a JSON file of the folder, {} if it is missing."""
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}
