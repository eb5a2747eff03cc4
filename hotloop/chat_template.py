"""Rows and turns of a conversation -> parts of a document, of which only the answers count in the loss."""

import json

from hotloop.tokenizer import fix_surrogates

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
    return [(fix_surrogates(text), False, True)] if text else None


def turns_of(row, place):
    """([(role, text)], the template that suits), or (None, None) where a row is no instruction data."""
    def text(value):
        if value is not None and not isinstance(value, str):
            raise ValueError(f'{place}: {json.dumps(value, default=str)[:50]} stands where a text was expected')
        return fix_surrogates(value or '')

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
