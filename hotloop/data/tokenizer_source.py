"""Find or learn the tokenizer that --tokenizer names. Reads checkpoints without torch."""

import os
import sys
from typing import NamedTuple

from hotloop.data.bpe import BYTE_OF, count_words, learn_merges
from hotloop.data.chat import CHATS, MARK, SPEAKERS, TEMPLATES
from hotloop.data.dataset import read_meta, read_plain
from hotloop.data.download import TOKENIZER_FILES, hub_folder, is_hub_name
from hotloop.data.tokenizer import (
    GPT2_SPEC,
    GPT2_VOCAB_SIZES,
    TIKTOKEN_NAMES,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    TiktokenTokenizer,
    spec_of,
    template_of_record,
    tokenizer_from,
)
from hotloop.system.files import checkpoint_paths, first_intact, read_json
from hotloop.system.text import counted

# The usual names, where tokenizer_config.json has none.
EOS_NAMES = ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>')


class TokenizerSource(NamedTuple):
    """Hold a tokenizer, and its model if it has one."""
    tokenizer: object = None  # None if it is built from the text
    model: str | None = None  # what init_from takes
    block_size: int | None = None  # to tune it with; None: its own context
    template: str | None = None  # of its chats, if it is one of ours


def find_tokenizer(name, data_dir):
    """Find a tokenizer by its name, a path, a path inside data_dir, or a model of the hub."""
    kind, _, size = name.partition(':')
    if name == 'char' or (kind == 'bpe' and size.isdecimal() and int(size) > 256):
        return TokenizerSource()
    if name == 'byte':
        return TokenizerSource(ByteTokenizer())
    if name in TIKTOKEN_NAMES:
        return TokenizerSource(TiktokenTokenizer(name))
    paths = [path for path in (name, os.path.join(data_dir, name)) if os.path.exists(path)]
    for path in paths:
        found = tokenizer_at(path, data_dir)
        if found:  # a folder of texts may have the name of a dataset
            return found
    if paths:
        raise ValueError(f'{paths[0]} has no tokenizer: no tokenizer.json, no train.bin and no checkpoint')
    if is_hub_name(name):
        folder = hub_folder(name, TOKENIZER_FILES)
        return of_folder(folder, name)
    raise ValueError(f'tokenizer={name!r} is not one of byte, char, bpe:SIZE (257 or more), '
                     f'{", ".join(TIKTOKEN_NAMES)}, and neither a run, a dataset, a tokenizer.json nor a '
                     'model of the hub')


def learn_tokenizer(name, pieces, template, several, every):
    """
    Learn the tokenizer `char` or `bpe:SIZE` from (split, Piece) pairs. Characters are collected
    from all pieces; merges are learned from every n-th, if it is for training. The marks of the
    chat template become special ids. several: whether documents need an end-of-text id.
    """
    if name == 'char':
        chars = set()
        for _, piece in pieces:
            for text, *_ in piece.parts:
                chars.update(text)
        return CharTokenizer(''.join(sorted(chars)), several)

    def texts():
        for i, (split, piece) in enumerate(pieces):
            if split == 'train' and i % every == 0:
                for text, markup, _ in piece.parts:
                    yield MARK.sub('', text) if markup else text
    marks = set()
    if template:
        for role in SPEAKERS:
            marks.update(MARK.findall(''.join(getattr(TEMPLATES[template], role))))
    specials = [*sorted(marks), '<|endoftext|>']
    tokens = learn_merges(count_words(texts()), int(name[4:]) - len(specials))
    ids = {special: len(tokens) + i for i, special in enumerate(specials)}
    return BPETokenizer(tokens, specials=ids, eot=ids['<|endoftext|>'])


def tokenizer_at(path, data_dir):
    """Read the TokenizerSource of a Hugging Face folder, a dataset, a run or a checkpoint, or None."""
    if os.path.basename(path) == 'tokenizer.json':
        path = os.path.dirname(path) or '.'
    if path.endswith(('.json', '.model', '.bpe', '.tiktoken')) and os.path.isfile(path):
        raise ValueError(f'{path}: of files with a tokenizer only tokenizer.json is read; rename one to '
                         'that, if it has this form; transformers makes one: '
                         'AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)')
    names = os.listdir(path) if os.path.isdir(path) else []
    if 'adapter_config.json' in names:
        record = read_optional(path, 'hotloop.json')  # peft writes none
        if record.get('tokenizer'):
            base, block_size = record['base'], None
            if is_hub_name(base) or os.path.exists(os.path.join(base, 'config.json')):
                block_size = tuning_length(base)
            return TokenizerSource(tokenizer_from(spec_of(record)), path, block_size, chat_of(record))
    if {'config.json', 'tokenizer.json', 'tokenizer_config.json'} & set(names):
        model = path if {'config.json', 'adapter_config.json'} & set(names) else None
        return of_folder(path, model)
    if 'train.bin' in names:
        meta = read_meta(path)
        return TokenizerSource(tokenizer_from(meta['tokenizer']), template=chat_of(meta))
    files = [path]
    if os.path.isdir(path):
        files = checkpoint_paths(path, best=True)
        if not files:
            return None
    _, (tokenizer, template, block_size) = first_intact(
        files, lambda file: checkpoint_tokenizer(file, data_dir))
    return TokenizerSource(tokenizer, path, block_size, template)


def of_folder(folder, model):
    """Return the TokenizerSource of a Hugging Face folder. model: what init_from takes, or None."""
    return TokenizerSource(read_tokenizer_json(folder), model, tuning_length(folder), known_template(folder))


def tuning_length(folder):
    """Return the block_size to tune the model of a Hugging Face folder with: its context, at most 512."""
    config = read_optional(folder, 'config.json')
    return min(config.get('max_position_embeddings') or config.get('n_positions') or 512, 512)


def read_tokenizer_json(folder):
    """Read the HFTokenizer of a folder with a tokenizer.json."""
    path = os.path.join(folder, 'tokenizer.json')
    try:
        with open(path, encoding='utf-8') as f:
            tokenizer = HFTokenizer(f.read())
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror}; transformers makes one: AutoTokenizer.'
                         'from_pretrained(MODEL).save_pretrained(FOLDER)') from None
    except ValueError as e:
        raise ValueError(f'{path} cannot be used: {e}') from None
    about = {**read_optional(folder, 'tokenizer_config.json'), 'chat_template': chat_template_of(folder)}
    for role in ('eos_token', 'bos_token', 'pad_token'):
        if isinstance(about.get(role), dict):
            about[role] = about[role]['content']
    about['generation'] = read_optional(folder, 'generation_config.json')
    for key in ('bos_token', 'pad_token', 'chat_template', 'generation'):
        if about.get(key):
            tokenizer.settings['kept'][key] = about[key]
    for known in (about.get('eos_token'), *EOS_NAMES):
        if known in tokenizer.specials:
            tokenizer.eot = tokenizer.settings['eot'] = tokenizer.specials[known]
            break
    config = {**read_optional(folder, 'config.json'), **about['generation']}
    stops = config.get('eos_token_id') or []
    if not isinstance(stops, list):
        stops = [stops]
    tokenizer.stops = tuple(i for i in stops if i != tokenizer.eot)
    tokenizer.bos = tokenizer.specials.get('<|bos|>')  # nanochat's file does not put it before a text
    encoding = tokenizer.backend.encode('a', add_special_tokens=True)
    if encoding.special_tokens_mask[:1] == [1]:  # Some files put a special id after a text instead.
        tokenizer.bos = encoding.ids[0]
    return tokenizer


def check_bytes(tokenizer, name):
    """Refuse an HFTokenizer that drops white space. Name the bytes that it has no tokens for."""
    text = 'a b\n c'
    if b''.join(tokenizer.pieces[i] for i in tokenizer.encode(text, inside=True)) != text.encode():
        raise ValueError(f'tokenizer={name!r} does not give the text {text!r} back')
    if tokenizer.byte_level:
        known = tokenizer.backend.get_vocab().keys()
        # in UTF-8 two bytes and those from 0xf5 never occur, and those from 0xf1 begin no letters
        lost = [byte for letter, byte in BYTE_OF.items()
                if letter not in known and byte < 0xf1 and byte not in (0xc0, 0xc1)]
        if lost:
            print(f'note: {name} has no token for {counted(len(lost), "byte")}, such as {min(lost):#x}; text '
                  'loses them', file=sys.stderr)


def read_optional(folder, name):
    """Read a JSON file of the folder, {} if it is missing."""
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}


def chat_template_of(folder):
    """Read the chat template of a Hugging Face folder: Jinja, a list of {'name', 'template'}, or None."""
    path = os.path.join(folder, 'chat_template.jinja')
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            return f.read()
    return read_optional(folder, 'tokenizer_config.json').get('chat_template')


def known_template(folder):
    """Find the template of a Hugging Face folder by how a turn begins. Returns None for others."""
    chat = str(chat_template_of(folder) or '')
    for template in CHATS:
        # other models, too, write "### Instruction:", so Alpaca's preamble must be there
        begin = TEMPLATES[template].preamble.format('') or TEMPLATES[template].user[0].strip()
        mark = MARK.match(begin)
        if (mark[0] if mark else begin) in chat:
            return template
    return None


def checkpoint_tokenizer(path, data_dir):
    """
    Read the tokenizer of a checkpoint, the template of its chats or None, and, with adapters, the
    block_size of the run, because the context of its base may be long, or None.
    """
    checkpoint = read_plain(path)
    try:
        spec = spec_of(checkpoint)
        vocab_size = checkpoint['model_args']['vocab_size']
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f'{path} is damaged or not a checkpoint ({type(e).__name__}: {e})') from None
    spec = spec or dataset_spec(path, checkpoint.get('config', {}), vocab_size, data_dir)
    block_size = None
    if 'lora' in checkpoint:
        block_size = checkpoint['model_args']['block_size']
    return tokenizer_from(spec), chat_of(checkpoint), block_size


def chat_of(record):
    """Return the template of the chats in a meta.json, a checkpoint or adapters, or None."""
    template = template_of_record(record)
    return template if template in CHATS else None


def dataset_spec(path, config, vocab_size, data_dir):
    """
    Find the tokenizer's spec for a nanoGPT checkpoint: a tokenizer.json beside it, or that of the
    dataset in its config, or GPT-2's if that has no meta file. Raises ValueError if its size is not
    the model's.
    """
    if os.path.isfile(path) and os.path.exists(os.path.join(os.path.dirname(path), 'tokenizer.json')):
        return read_tokenizer_json(os.path.dirname(path)).spec()
    dataset = config.get('dataset')
    folder = os.path.join(data_dir, dataset) if dataset else data_dir
    meta = read_meta(folder)
    sizes = (meta['vocab_size'], -(-meta['vocab_size'] // 64) * 64)  # as it is, and padded
    if vocab_size not in (GPT2_VOCAB_SIZES if meta['tokenizer'] == GPT2_SPEC else sizes):
        place = 'beside it'
        if os.path.isdir(path):
            place = 'there (AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER) makes one)'
        raise ValueError(f'{path} has no tokenizer, and {folder} has none for {vocab_size:,} ids; set '
                         f'--data_dir to where its dataset is, or put its tokenizer.json {place}')
    return meta['tokenizer']
