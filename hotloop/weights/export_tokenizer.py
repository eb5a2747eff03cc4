"""Write a tokenizer as the files of a Hugging Face folder, without a package."""

import json
import re
from itertools import pairwise

from hotloop.data.bpe import BYTE_OF, GPT2_SPLIT
from hotloop.data.chat import CHATS, SPEAKERS, TEMPLATES

LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
# in Jinja; transformers passes messages, bos_token and add_generation_prompt
LOOP = '{{% for message in messages{} %}}{}{{% endfor %}}'
PUT = '{{{{ {} }}}}'
WHEN = '{{% if {} %}}{}{{% endif %}}'


def tokenizer_files(tokenizer, template, max_length):
    """
    Return {file: content} of a tokenizer and of its chat template, each content as text or as an
    object; {} for a char tokenizer, which tokenizer.json cannot hold.
    """
    spec = tokenizer.spec()
    if spec['kind'] == 'char':
        return {}
    names = {i: name for name, i in tokenizer.specials.items()}
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': max_length,
              'clean_up_tokenization_spaces': False}
    config |= spec.get('kept', {})  # a template of ours replaces that of the folder
    theirs = config.pop('generation', {})
    for role, i in (('eos_token', tokenizer.eot), ('bos_token', tokenizer.bos)):
        if i in names:
            config[role] = names[i]
    ends = {tokenizer.eot, *tokenizer.stops}
    if template in CHATS:
        config['chat_template'] = chat_template(template, tokenizer.bos is not None)
        ends.add(tokenizer.specials.get(TEMPLATES[template].assistant[1]))
    generation = {**theirs, 'eos_token_id': sorted(ends - {None}) or None}
    if tokenizer.bos is not None:
        generation['bos_token_id'] = tokenizer.bos
    content = spec['json'] if spec['kind'] == 'hf' else tokenizer_json(tokenizer)
    return {'tokenizer.json': content, 'tokenizer_config.json': config, 'generation_config.json': generation}


def chat_template(name, begins):
    """Write a chat template in Jinja, like render(). begins: with a begin token first."""
    template = TEMPLATES[name]
    is_system = "messages[0]['role'] == 'system'"
    trim = ' | trim' if template.strips else ''
    start = PUT.format('bos_token') if begins else ''
    between = PUT.format(json.dumps(template.between))
    if template.preamble:
        preamble = PUT.format(json.dumps(template.preamble.format('')))
        start += WHEN.format(f'not {is_system}', preamble + between)
    text = f"message['content']{trim}"
    chosen = ''
    if template.folds_system:
        chosen = " if message['role'] != 'system'"
        system = f"messages[0]['content']{trim}"
        text = rf'({system} + "\n\n" if loop.first and {is_system} else "") + ({text})'
    turns = ''
    for role in SPEAKERS:
        before, after = getattr(template, role)
        turn = PUT.format(f'{json.dumps(before)} + ({text}) + {json.dumps(after)}')
        turns += WHEN.format(f"message['role'] == '{role}'", turn)
    answer = PUT.format(json.dumps(template.assistant[0]))
    return start + LOOP.format(chosen, turns + between) + WHEN.format('add_generation_prompt', answer)


def tokenizer_json(tokenizer):
    """Return the tokenizer.json of bytes, or of a byte-level BPE that tiktoken runs."""
    ranks = {bytes([b]): b for b in range(256)}
    specials = tokenizer.specials
    pattern = GPT2_SPLIT
    encoding = getattr(tokenizer, 'encoding', None)
    if encoding:  # tiktoken has no public names for these
        ranks = encoding._mergeable_ranks
        specials = encoding._special_tokens
        pattern = encoding._pat_str
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    merges = []
    for token in ranks:
        if pair := pair_of(token, ranks):
            merges.append(f'{spelled(pair[0])} {spelled(pair[1])}')
    # In Oniguruma, which reads it there, {1,3}+ is not possessive but repeats {1,3}.
    pattern = re.sub(r'(\{[\d,]+\})\+', r'\1', pattern)
    split = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
    levels = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
    flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    return {
        'version': '1.0', 'truncation': None, 'padding': None,
        'added_tokens': [{'id': i, 'content': name, **flags} for name, i in specials.items()],
        'normalizer': None, 'post_processor': None, 'decoder': levels,
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [split, levels]},
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                  'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False,
                  'ignore_merges': True,  # like tiktoken: a word that is a token needs no merges
                  'vocab': {spelled(token): i for token, i in ranks.items()} | specials,
                  'merges': merges}}


def spelled(token):
    """Spell the bytes of a token in the letters of byte-level BPE."""
    return ''.join(LETTER_OF[byte] for byte in token)


def pair_of(token, ranks):
    """
    Find the two tokens whose merge gives this one: what merges of lower rank leave of its bytes.
    Returns None if they leave more, because then no text reaches it by merges.
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
