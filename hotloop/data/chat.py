"""Turn rows and conversations into the parts of a document. Only answers count in the loss."""

import json
import re
from typing import NamedTuple

from hotloop.data.tokenizer import fix_surrogates
from hotloop.system.files import parse_json

QUESTIONS = ('instruction', 'prompt', 'question')
ANSWERS = ('completion', 'response', 'output', 'answer')
CHAT_FIELDS = ('messages', 'conversations', 'conversation')
ROW_FIELDS = ['text', 'content', *CHAT_FIELDS, *QUESTIONS, 'input', 'context', 'system', 'system_prompt',
              *ANSWERS]
# of HumanEval and MBPP, which sample.py --eval_code reads
TASK_FIELDS = ['task_id', 'entry_point', 'canonical_solution', 'test', 'code', 'test_list', 'test_setup_code',
               'test_imports']
SPEAKERS = ('system', 'user', 'assistant')
OTHER_ROLES = {'human': 'user', 'prompter': 'user', 'gpt': 'assistant', 'chatgpt': 'assistant',
               'bing': 'assistant', 'bard': 'assistant', 'model': 'assistant', 'bot': 'assistant',
               'ai': 'assistant', 'developer': 'system'}
MARK = re.compile(r'<\|?\w+\|?>')  # in a template: one special id, if the tokenizer has it


class UnknownRole(ValueError):
    """A message that no template can write, such as one of a tool."""


class Template(NamedTuple):
    """Texts before and after the turns of each role, and how turns are put together."""
    system: tuple = ('', '')
    user: tuple = ('', '')
    assistant: tuple = ('', '')  # the text after an answer is part of its loss
    between: str = '\n'  # text between turns
    strips: bool = False  # removes white space around a turn
    folds_system: bool = False  # the user's first turn begins with the system prompt
    preamble: str = ''  # the system prompt of a conversation that has none; {} becomes input_note
    input_note: str = ''  # if an instruction has an input
    input_heading: str = ''

    @property
    def unlearned(self):
        """Return the texts around an answer that is shown and not learned: those of any answer."""
        return self.assistant


TEMPLATES = {
    'plain': Template(),
    'joined': Template(system=('', '\n\n'), between=''),  # a prompt and its completion
    'alpaca': Template(user=('### Instruction:\n', ''), assistant=('### Response:\n', ''), between='\n\n',
                       preamble='Below is an instruction that describes a task{}. Write a response that '
                                'appropriately completes the request.',
                       input_note=', paired with an input that provides further context',
                       input_heading='### Input:\n'),
    'chatml': Template(*((f'<|im_start|>{role}\n', '<|im_end|>') for role in SPEAKERS)),
    'gemma': Template(*((f'<start_of_turn>{role}\n', '<end_of_turn>') for role in ('user', 'user', 'model')),
                      strips=True, folds_system=True),
    'llama3': Template(*((f'<|start_header_id|>{role}<|end_header_id|>\n\n', '<|eot_id|>')
                         for role in SPEAKERS), between='', strips=True),
    'nanochat': Template(*((f'<|{role}_start|>', f'<|{role}_end|>')
                           for role in ('user', 'user', 'assistant')), between='', folds_system=True),
}
CHATS = tuple(name for name, template in TEMPLATES.items() if template.user[0])  # mark turns


def parts_of(row, where, template):
    """
    Return the parts [(text, markup, counts)] of the document in a row, or None if it has no text or
    no answer or cannot be written in the template. template: a name, or None if rows are texts.
    Raises UnknownRole.
    """
    suited, turns = read_row(row, where)
    if suited is None:
        text = text_of(as_object(row, where), where)
        if not text or template:
            return None
        return [(text, False, True)]
    if template is None or (template == 'joined' and suited != 'joined'):
        return None
    if not any(role == 'assistant' and text for role, text in turns):
        return None
    return render(turns, template)


def as_object(row, where):
    """Return a row as a dict; a string is its text. Raises ValueError for anything else."""
    if isinstance(row, str):
        return {'text': row}
    if not isinstance(row, dict):
        raise ValueError(f'{where}: a row must be an object or a string, not {json.dumps(row)[:50]}')
    return row


def is_chat(value):
    """Test whether a field of a row holds the messages of a chat."""
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def standard_row(row, where, text_field=None):
    """
    Return a row as an object with the names of fields that read_row() knows. text_field: the field
    of a text or a chat, or those of a prompt and its completion, with a comma between.
    """
    row = as_object(row, where)
    if text_field:
        name, is_pair, other = text_field.partition(',')
        value = value_of(row, where, name)
        if is_pair:
            row = {'prompt': value, 'completion': value_of(row, where, other)}
        elif is_chat(value):
            row = {'messages': value}
        else:
            row = {'text': check_text(value, f'{where}: field {name!r}')}
    question = first_of(row, QUESTIONS)
    if question and is_chat(row[question]):  # up to the answer, as TRL's rows have it
        answer = row.get(first_of(row, ANSWERS)) or []
        if not is_chat(answer):
            answer = [{'role': 'assistant', 'content': answer}]
        row = {'messages': row[question] + answer}
    return row


def read_row(row, where):
    """
    Read a row of instruction data: messages (a chat), instruction and output (Alpaca), or prompt or
    question and completion or answer. where: file and line, for errors. Returns (the template that
    suits the row, its turns [(role, text)]), or (None, []) for a text. Raises ValueError, as
    UnknownRole for a chat that no template can write.
    """
    row = standard_row(row, where)
    chat = first_of(row, CHAT_FIELDS)
    if chat and isinstance(row[chat], str) and row[chat][:1] == '[':  # tables hold a chat as JSON
        row = {**row, chat: parse_json(row[chat], f'{where}: field {chat!r}')}
    question = first_of(row, QUESTIONS)
    answer = first_of(row, ANSWERS)
    # in tables that were put together, what has a value decides
    has_text = bool(row.get('text') or row.get('content'))
    has_pair = bool(question and answer and (row[question] or row[answer]))
    if chat and isinstance(row[chat], list) and (row[chat] or not (has_pair or has_text)):
        suited = 'chatml'
        turns = [turn_of(message, where) for message in row[chat]]
    elif has_pair or (question and answer and not has_text):
        suited = 'joined'
        if question == 'instruction':
            suited = 'alpaca'
        turns = [('user', row[question])]
        about = row.get('input') or row.get('context')  # the latter is Dolly's name
        if about and not isinstance(about, str):
            raise ValueError(f'{where}: its input or context is not a text; omit it with '
                             f'--text_field={question},{answer}')
        if about:
            turns.append(('input', about))
        turns.append(('assistant', row[answer]))
    elif chat and not row[chat] and not {'text', 'content'} & row.keys():
        return 'chatml', []  # an empty chat
    else:
        return None, []
    system = row.get('system') or row.get('system_prompt')  # the latter is OpenOrca's name
    if system and 'system' not in dict(turns):
        turns.insert(0, ('system', system))
    return suited, [(role, check_text(text, f"{where}: the {role}'s text")) for role, text in turns]


def first_of(row, names):
    """Return the first of the names that is a field of the row, with a value if one has it, or None."""
    fields = [name for name in names if name in row]
    for name in fields:
        if row[name]:  # Tables that were put together have empty fields.
            return name
    return fields[0] if fields else None


def turn_of(message, where):
    """Return (role, text) of a message of a chat, as OpenAI or ShareGPT writes it."""
    message = as_object(message, where)
    role = message.get('role') or message.get('from')
    role = OTHER_ROLES.get(str(role).lower(), str(role).lower())
    if role not in SPEAKERS:
        raise UnknownRole(f'{where}: a message has the role {role!r}; expected system, user or assistant')
    if message.get('tool_calls') or message.get('function_call'):
        raise UnknownRole(f'{where}: a message calls tools, which the chat templates do not have')
    content = message.get('content') or message.get('value')
    if isinstance(content, list):  # OpenAI's parts, of which an image has no text
        texts = [part.get('text') if isinstance(part, dict) else None for part in content]
        if None in texts:
            raise UnknownRole(f'{where}: a message has parts that are no texts, such as images')
        content = ''.join(map(str, texts))
    if role == 'assistant' and message.get('weight') == 0:  # OpenAI's sign of an answer not to learn
        role = 'unlearned'
    return role, content


def choose_template(asked, suited):
    """Return the template asked for or, if that is auto, the one that suits the row."""
    if asked == 'auto' or (asked, suited) == ('plain', 'joined'):
        return suited  # The plain template also puts nothing between a prompt and its completion.
    return asked


def text_of(row, where, field=None):
    """Return the text in a field of a row, by default text or content. Raises ValueError if it has none."""
    field = field or first_of(row, ('text', 'content')) or 'text'
    return check_text(value_of(row, where, field), f'{where}: field {field!r}')


def value_of(row, where, field):
    """Return a field of a row. Raises ValueError if it has none."""
    if field not in row:
        raise ValueError(f'{where} has no field {field!r}, only {", ".join(map(str, row))}; name one with '
                         '--text_field of prepare.py, or two (prompt,answer), or an answer '
                         f'{" or ".join(ANSWERS)}; --format=text reads files of rows as plain text')
    return row[field]


def check_text(value, name):
    """Return a text of a row, '' for None. Raises ValueError if it is anything else."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f'{name} must be a string, not {json.dumps(value, default=str)[:50]}')
    return fix_surrogates(value or '')


def render(turns, name):
    """Write a conversation as parts. Only answers and their end markers count in the loss."""
    template = TEMPLATES[name]
    roles = [role for role, _ in turns]
    merged = []
    if template.preamble and roles[0] != 'system':
        merged.append(('system', template.preamble.format(template.input_note if 'input' in roles else '')))
    for role, text in turns:
        is_after_system = merged and merged[-1][0] == 'system'
        if role == 'input':
            text = template.input_heading + text
        if template.strips:
            text = text.strip()
        if role == 'input' or (role == 'user' and is_after_system and template.folds_system):
            merged[-1] = 'user', merged[-1][1] + '\n\n' + text
        else:
            merged.append((role, text))
    parts = []
    between = ''
    for role, text in merged:
        before, after = getattr(template, role)
        counts = role == 'assistant' and bool(text)  # or the model would learn to answer nothing
        parts += [(between + before, True, False), (text, False, counts), (after, True, counts)]
        between = template.between
    return [part for part in parts if part[0]]


def prompt_of(row, where):
    """
    Return (the prompt as given, the turns up to the last user's, the template that suits them) of a
    row of prompts: a text, which has no template, a chat, or an instruction, prompt or question with
    or without its answer.
    """
    if isinstance(row, str):
        row = fix_surrogates(row)
        return row, [('user', row)], None
    row = {name: value for name, value in standard_row(row, where).items() if name not in ANSWERS}
    suited, turns = read_row({**row, 'completion': ''}, where)
    if suited is None:
        raise ValueError(f'{where}: expected a text, or an object with messages, instruction or prompt')
    while turns and turns[-1][0] not in ('user', 'input'):
        turns.pop()
    if not turns:
        raise ValueError(f'{where}: the chat has no user turn')
    if suited == 'chatml':
        return row[first_of(row, CHAT_FIELDS)], turns, suited
    return dict(turns)['user'], turns, suited


def parts_before_answer(turns, template):
    """Write a conversation and what comes before the assistant's next answer as parts."""
    parts = render([*turns, ('assistant', '')], template)
    if TEMPLATES[template].assistant[1]:
        return parts[:-1]
    return parts
