"""Writes a tokenizer as the files of a Hugging Face folder, without a package."""

import json
import re
from itertools import pairwise

from hotloop.data.bpe import GPT2_SPLIT
from hotloop.data.chat import CHATS, SPEAKERS, TEMPLATES
from hotloop.data.hf_tokenizer import BYTE_OF

LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}


def tokenizer_files(tokenizer, template, max_length):
    """
    {file: content} of a tokenizer and the template of its chats, the content as text or as an object; {} for
    a char tokenizer, which has no form there.
    """
    spec, names = tokenizer.spec(), {i: name for name, i in tokenizer.specials.items()}
    if spec['kind'] == 'char':
        return {}
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': max_length,
              'clean_up_tokenization_spaces': False}
    begin = tokenizer.bos if tokenizer.begin is None else tokenizer.begin
    for role, i in (('eos_token', tokenizer.eot), ('bos_token', begin)):
        if i in names:
            config[role] = names[i]
    ends = {tokenizer.eot, *tokenizer.ends}
    if template in CHATS:
        config['chat_template'] = chat_template(template, tokenizer.begin is not None)
        ends.add(tokenizer.specials.get(TEMPLATES[template].assistant[1]))
    name = names.get(tokenizer.begin)
    content = spec['json'] if spec['kind'] == 'hf' else tokenizer_json(tokenizer, name)
    if spec['kind'] == 'hf' and tokenizer.begin != tokenizer.first:  # of data with another --bos
        content = {**json.loads(content), 'post_processor': name and begin_with(name, tokenizer.begin)}
    return {'tokenizer.json': content, 'tokenizer_config.json': config,
            'generation_config.json': {'eos_token_id': sorted(ends - {None}) or None, 'bos_token_id': begin}}


def chat_template(name, begins):
    """The template of chats with this name, in Jinja, as render() makes them. begins: after a begin token."""
    def put(text):
        return f'{{{{ {text} }}}}'

    def when(condition, text):
        return f'{{% if {condition} %}}{text}{{% endif %}}'
    template, is_system = TEMPLATES[name], "messages[0]['role'] == 'system'"
    start, between = put('bos_token') if begins else '', put(json.dumps(template.between))
    if template.preamble:
        start += when(f'not {is_system}', put(json.dumps(template.preamble.format(''))) + between)
    if template.folds_system:
        start += when(is_system, put('raise_exception("put the system prompt into the first turn")'))
    content, turns = "message['content']" + (' | trim' if template.strips else ''), ''
    for role in SPEAKERS:
        before, after = map(json.dumps, getattr(template, role))
        turns += when(f"message['role'] == '{role}'", put(f'{before} + ({content}) + {after}'))
    turns = f'{{% for message in messages %}}{turns}{between}{{% endfor %}}'
    return start + turns + when('add_generation_prompt', put(json.dumps(template.assistant[0])))


def tokenizer_json(tokenizer, begin):
    """
    The content of a tokenizer.json for bytes, or for a byte-level BPE that tiktoken runs. begin: the name of
    the special id that begins a text, or None.
    """
    ranks, specials, pattern = {bytes([b]): b for b in range(256)}, tokenizer.specials, GPT2_SPLIT
    if encoding := getattr(tokenizer, 'encoding', None):  # private names, as tiktoken's pattern has no other
        ranks, specials, pattern = encoding._mergeable_ranks, encoding._special_tokens, encoding._pat_str
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    pairs = [pair for token in ranks if (pair := pair_of(token, ranks))]
    # in Oniguruma, which reads it there, {1,3}+ is not possessive but repeats {1,3}
    pattern = re.sub(r'(\{[\d,]+\})\+', r'\1', pattern)
    split = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
    levels = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
    added = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    return {
        'version': '1.0', 'truncation': None, 'padding': None,
        'added_tokens': [{'id': i, 'content': name, **added} for name, i in specials.items()],
        'normalizer': {'type': 'NFC'} if getattr(tokenizer, 'nfc', False) else None,
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [split, levels]},
        'post_processor': begin and begin_with(begin, specials[begin]), 'decoder': levels,
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                  'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False,
                  'ignore_merges': True,  # like tiktoken: a word that is a token needs no merges
                  'vocab': {spelled(token): i for token, i in ranks.items()} | specials,
                  'merges': [f'{spelled(left)} {spelled(right)}' for left, right in pairs]}}


def begin_with(name, i):
    """The post-processor that puts a special id before each text."""
    special, texts = {'SpecialToken': {'id': name, 'type_id': 0}}, []
    for text in 'AB':
        texts += [special, {'Sequence': {'id': text, 'type_id': 0}}]
    return {'type': 'TemplateProcessing', 'single': texts[:2], 'pair': texts,
            'special_tokens': {name: {'id': name, 'ids': [i], 'tokens': [name]}}}


def spelled(token):
    """The bytes of a token as the letters of byte-level BPE."""
    return ''.join(LETTER_OF[byte] for byte in token)


def pair_of(token, ranks):
    """
    The two tokens whose merge gives this one: what merges of lower rank leave of its bytes. None if they
    leave more, because then no text reaches it by merges.
    """
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged = [ranks.get(left + right, ranks[token]) for left, right in pairwise(parts)]
        first = min(merged)
        if first >= ranks[token]:
            return None
        i = merged.index(first)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts) if len(parts) == 2 else None
