"""The tokenizer.json of Hugging Face, by the optional package tokenizers: text to ids, and their bytes."""

import json
import os
import re

import numpy as np

from hotloop.bpe import BYTES_IN_GPT2S_ORDER
from hotloop.files import first_line, optional, read_json

# byte-level BPE writes each byte as a printable letter
BYTE_OF = {chr(b if i < 188 else 68 + i): b for i, b in enumerate(BYTES_IN_GPT2S_ORDER)}
EOS_NAMES = ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>')  # where no tokenizer_config.json names it
BOS_NAMES = ('<|begin_of_text|>', '<s>', '<bos>')


class TokenizerJson:
    """
    The contents of a tokenizer.json: a byte-level BPE (GPT-2, Llama 3, Qwen) or a sentencepiece BPE (Llama 2,
    Mistral, Gemma); ValueError if it is neither. specials: {name: id}.

    Names of special ids in a text are encoded as text. Some files put a space before a text: self.space says
    'never', 'first' (at the start of a document) or 'always' (also after a special id).
    """

    def __init__(self, text):
        self.text = text
        self.backend = self.inside = open_backend(text)  # inside: for a text that continues another
        file = json.loads(self.backend.to_str())  # the same file with every default spelled out
        steps = steps_of(file['pre_tokenizer']) + steps_of(file['decoder'])
        kinds = {step['type'] for step in steps}
        self.byte_level = 'ByteLevel' in kinds
        if not kinds & {'ByteLevel', 'ByteFallback', 'Metaspace'}:
            raise ValueError(f'its steps {sorted(kinds)} are not those of a byte-level or sentencepiece BPE')
        self.added = self.backend.get_added_tokens_decoder()
        self.specials = {self.added[i].content: i for i in sorted(self.added) if self.added[i].special}
        for name, i in self.specials.items():
            if i in self.encode(name) and name != file['model'].get('unk_token'):
                raise ValueError(f'its {file["model"]["type"]} model reads {name!r} in a text as special')
        self.n_vocab = max(self.backend.get_vocab().values()) + 1
        self.space = remove_space(file)
        if self.space != 'never':
            self.inside = open_backend(json.dumps(file))

    def __reduce__(self):  # the package's own pickle forgets that texts have no special ids
        return TokenizerJson, (self.text,)

    def encode(self, text):
        """The ids of a text that begins a document, (n,) uint32."""
        return run(self.backend, text)

    def encode_next(self, text, after_special):
        """The ids of a text inside a document, behind a special id or a text."""
        if after_special and self.space == 'always':
            return run(self.backend, text)
        return run(self.inside, text)

    def pieces(self, blank):
        """The bytes of each id; unused ids and those in `blank` have none."""
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
    """The package's tokenizer of the contents of a tokenizer.json, for texts in which nothing is special."""
    package = optional('tokenizers', 'reads tokenizer.json files')
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # encode.py forks
    try:
        backend = package.Tokenizer.from_str(text)
    except Exception as e:  # the package raises plain Exception
        raise ValueError(f'tokenizers {package.__version__} cannot read it: {first_line(e)[:200]}') from None
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, 'dropout', None):  # random ids
        backend.model.dropout = None
    return backend


def run(backend, text):
    """The ids of a text. The batch of one is faster than encode(), which also computes offsets."""
    encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
    return np.array(encoding.ids, dtype=np.uint32)


def steps_of(step):
    """The steps of a normalizer, pre-tokenizer or decoder, which may be None or a sequence of sequences."""
    if step is None:
        return []
    if step['type'] != 'Sequence':
        return [step]
    steps = []
    for value in step.values():
        if isinstance(value, list):
            for part in value:
                steps += steps_of(part)
    return steps


def remove_space(file):
    """Edits a file so that it puts no space before a text. Returns where it did: TokenizerJson.space."""
    space = 'never'
    for step in steps_of(file['normalizer']) + steps_of(file['pre_tokenizer'])[:1]:  # later ones act on words
        if step['type'] == 'Prepend':
            step['prepend'] = ''
            space = 'always'
        elif step['type'] == 'Metaspace':
            space = step['prepend_scheme']
            step['prepend_scheme'] = 'never'
        elif step.get('add_prefix_space'):
            step['add_prefix_space'] = False
            space = 'always'
    return space


def read_file(path):
    """
    (TokenizerJson, end id or None, begin id or None) of a tokenizer.json, or of the one in a folder.
    tokenizer_config.json names the ids; otherwise the usual names count. ValueError if it cannot be used.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    path = os.path.join(folder, 'tokenizer.json')
    for name in ('tokenizer.model', 'vocab.json'):
        if os.path.exists(os.path.join(folder, name)) and not os.path.exists(path):
            raise ValueError(f'{folder} has {name} but no tokenizer.json; convert it with transformers: '
                             f'AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})')
    try:
        with open(path, encoding='utf-8') as f:
            file = TokenizerJson(f.read())
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror}') from None
    except ValueError as e:
        raise ValueError(f'{path} cannot be used: {e}') from None
    config_path = os.path.join(folder, 'tokenizer_config.json')
    config = read_json(config_path) if os.path.exists(config_path) else {}
    ends = []
    for role, usual in (('eos_token', EOS_NAMES), ('bos_token', BOS_NAMES)):
        name = config.get(role)
        if isinstance(name, dict):
            name = name.get('content')
        ids = [file.specials[n] for n in (str(name), *usual) if n in file.specials]
        ends.append(ids[0] if ids else None)
    return file, *ends
