"""Chat templates: the parts that a row becomes, and which of them count toward the loss."""

import json

import pytest

from hotloop.data.chat import (
    TEMPLATES,
    UnknownRole,
    choose_template,
    parts_of,
    prompt_of,
    read_row,
    render,
    standard_row,
)
from hotloop.data.encode import encode_parts
from hotloop.data.tokenizer import BPETokenizer

ASK, ANSWER = {'role': 'user', 'content': 'Two and two?'}, {'role': 'assistant', 'content': 'Four.'}
CHAT = {'messages': [{'role': 'system', 'content': 'Be brief.'}, ASK, ANSWER,
                     {'role': 'user', 'content': 'And one?'}, {'role': 'assistant', 'content': 'Five.'}]}
SHARE_GPT = {'conversations': [{'from': 'human', 'value': 'Two and two?'}, {'from': 'gpt', 'value': 'Four.'}]}
ALPACA = {'instruction': 'Add.', 'input': '2 and 2', 'output': '4'}
PAIR = {'prompt': 'Q: 2+2?\nA:', 'completion': ' 4'}

TASK = 'Below is an instruction that describes a task'
WRITE = '. Write a response that appropriately completes the request.\n\n### Instruction:\n'
CHATML_SYSTEM = '[<|im_start|>system\nBe brief.<|im_end|>\n'
CHATML_FIRST = '<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n]Four.<|im_end|>'
CHATML_SECOND = '[\n<|im_start|>user\nAnd one?<|im_end|>\n<|im_start|>assistant\n]Five.<|im_end|>'
GEMMA = ('[<start_of_turn>user\nBe brief.\n\nTwo and two?<end_of_turn>\n'
         '<start_of_turn>model\n]Four.<end_of_turn>[\n<start_of_turn>user\nAnd one?<end_of_turn>\n'
         '<start_of_turn>model\n]Five.<end_of_turn>')
LLAMA3 = ('[<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>'
          '<|start_header_id|>assistant<|end_header_id|>\n\n]Four.<|eot_id|>')


def shown(row, template):
    """The document of a row; what does not count in the loss stands in brackets."""
    parts = parts_of(row, 'a.jsonl, line 1', choose_template(template, read_row(row, '')[0]))
    return ''.join(text if counts else f'[{text}]' for text, _, counts in parts).replace('][', '')


@pytest.mark.parametrize('row, template, expected', [
    (PAIR, 'plain', '[Q: 2+2?\nA:] 4'),
    ({'question': '2+2?', 'answer': ' 4', 'id': 3}, 'auto', '[2+2?] 4'),
    ({'system_prompt': 'Brief.', 'question': 'Sum?', 'context': '2 and 2', 'answer': ' 4'}, 'auto',
     '[Brief.\n\nSum?\n\n2 and 2] 4'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'Two '}, {'text': 'and two?'}]},
                   ANSWER]}, 'auto', '[' + CHATML_FIRST),
    ({'conversation': json.dumps([ASK, ANSWER])}, 'auto', '[' + CHATML_FIRST),  # JSON in a table
    ({'prompt': [ASK], 'completion': [ANSWER]}, 'auto', '[' + CHATML_FIRST),  # of TRL
    ({'prompt': [ASK], 'answer': 'Four.'}, 'auto', '[' + CHATML_FIRST),
    ({'messages': [ASK, {**ANSWER, 'weight': 0}, ASK, {**ANSWER, 'weight': 1}]}, 'plain',
     '[Two and two?\nFour.\nTwo and two?\n]Four.'),  # of OpenAI
    (PAIR, 'alpaca', f'[{TASK}{WRITE}Q: 2+2?\nA:\n\n### Response:\n] 4'),
    (ALPACA, 'auto', f'[{TASK}, paired with an input that provides further context{WRITE}'
     'Add.\n\n### Input:\n2 and 2\n\n### Response:\n]4'),
    ({**ALPACA, 'input': ''}, 'auto', f'[{TASK}{WRITE}Add.\n\n### Response:\n]4'),
    ({'instruction': 'Add.', 'context': '2 and 2', 'response': '4', 'category': 'sum'}, 'plain',
     '[Add.\n\n2 and 2\n]4'),
    ({'instruction': None, 'output': None, 'messages': [], **PAIR}, 'auto', '[Q: 2+2?\nA:] 4'),
    ({'instruction': 'Add.', 'input': None, 'context': '2 and 2', 'response': None, 'output': '4'}, 'plain',
     '[Add.\n\n2 and 2\n]4'),
    ({**ALPACA, 'system': 'Brief.', 'input': None}, 'alpaca',
     '[Brief.\n\n### Instruction:\nAdd.\n\n### Response:\n]4'),
    (CHAT, 'auto', CHATML_SYSTEM + CHATML_FIRST + CHATML_SECOND),
    ({**SHARE_GPT, 'system': 'Be brief.'}, 'auto', CHATML_SYSTEM + CHATML_FIRST),
    (CHAT, 'plain', '[Be brief.\nTwo and two?\n]Four.[\nAnd one?\n]Five.'),
    (CHAT, 'gemma', GEMMA),
    ({'system': ' Short. ', 'instruction': ' hi\n', 'input': '\n2 ', 'output': 'Four.'}, 'gemma',
     '[<start_of_turn>user\nShort.\n\nhi\n\n2<end_of_turn>\n<start_of_turn>model\n]Four.<end_of_turn>'),
    ({'messages': [{'role': 'user', 'content': ' hi \n'}, ANSWER]}, 'llama3', LLAMA3),
])
def test_the_document_of_a_row(row, template, expected):
    assert shown(row, template) == expected


@pytest.mark.parametrize('row, expected', [
    ('text', 'text'), ({'text': 'a', 'content': 'b'}, 'a'), ({'content': 'b', 'n': 3}, 'b'),
    ({'text': '', 'content': 'b'}, 'b'), ({'text': 'a', 'prompt': None, 'answer': '', 'messages': []}, 'a'),
    ({'text': 'a\ud800b \ud83d\ude00'}, 'a\ufffdb 😀'),
])
def test_a_text_is_one_part(row, expected):
    assert parts_of(row, 'line 1', None) == [(expected, False, True)]
    row = standard_row({**ALPACA, 'field': row}, 'line 1', 'output')
    assert parts_of(row, 'line 1', None) == [('4', False, True)]


def test_two_named_fields_are_a_prompt_and_its_answer():
    given = {'text': 'Add.', 'code': 'a + b', 'prompt': 'x', 'completion': 'y'}
    row = standard_row(given, 'line 1', 'text,code')
    assert read_row(row, 'line 1') == ('joined', [('user', 'Add.'), ('assistant', 'a + b')])
    assert parts_of(row, 'line 1', 'joined') == [('Add.', False, False), ('a + b', False, True)]
    empty = standard_row({**given, 'code': None}, 'line 1', 'text,code')
    assert parts_of(empty, 'line 1', 'joined') is None
    with pytest.raises(ValueError, match="line 1 has no field 'body', only text, code, prompt"):
        standard_row(given, 'line 1', 'text,body')


@pytest.mark.parametrize('row, fields', [
    ({'chosen': [ASK, ANSWER], 'rejected': [ASK]}, 'chosen'),
    ({'prompt': [ASK], 'chosen': [ANSWER], 'rejected': []}, 'prompt,chosen')])
def test_a_named_field_may_hold_a_chat(row, fields):
    assert standard_row(row, 'line 1', fields) == {'messages': [ASK, ANSWER]}


@pytest.mark.parametrize('row', [
    {'messages': [ASK]}, {'prompt': 'a', 'completion': None}, {'conversations': []}, {'messages': ''}, '',
    {'text': None}])
def test_a_row_without_text_or_answer_has_no_document(row):
    assert parts_of(row, 'line 1', read_row(row, '')[0]) is None


@pytest.mark.parametrize('row, words', [
    ([1], r'a row must be an object or a string, not \[1\]'),
    ({'title': 'a', 'n': 3}, r"has no field 'text', only title, n; .*--text_field of prepare"),
    ({'text': 3}, "field 'text' must be a string, not 3"),
    ({'prompt': ['a'], 'completion': 'b'}, r'user.s text must be a string, not \["a"\]'),
    ({'question': 'a', 'answer': 'b', 'context': {'title': 'c'}}, '--text_field=question,answer'),
])
def test_a_bad_row_is_named_with_its_place(row, words):
    with pytest.raises(ValueError, match=f'^a.jsonl, line 1.*{words}'):
        parts_of(row, 'a.jsonl, line 1', 'chatml')


@pytest.mark.parametrize('message, words', [
    ({'role': 'tool', 'content': '42'}, "a message has the role 'tool'"),
    ({'role': 'user', 'content': [{'type': 'image', 'text': None}]}, 'a message has parts that are no texts'),
    ({'role': 'assistant', 'content': None, 'tool_calls': [{}]}, 'a message calls tools')])
def test_a_chat_that_no_template_writes_is_skipped_in_data_and_refused_in_a_prompt(message, words):
    row = {'messages': [ASK, message]}
    with pytest.raises(UnknownRole, match=words):
        parts_of(row, 'line 1', 'chatml')
    with pytest.raises(ValueError, match=f'^line 1: {words}'):
        prompt_of(row, 'line 1')


def test_a_row_that_the_template_cannot_write_has_no_document():
    assert parts_of({'text': 'abc'}, 'line 1', 'chatml') is None
    for row in (PAIR, CHAT, ALPACA):
        assert parts_of(row, 'line 1', None) is None and parts_of(row, 'line 1', 'gemma')
    assert parts_of(CHAT, 'line 1', 'joined') is None


def test_the_answer_and_the_text_after_it_count_in_every_template():
    for name, template in TEMPLATES.items():
        parts = render([('user', 'q'), ('assistant', 'a')], name)
        assert ''.join(text for text, markup, counts in parts if counts) == 'a' + template.assistant[1]
        assert all(text for text, *_ in parts)
        after_none = render([('user', 'q'), ('assistant', ''), ('user', 'r'), ('assistant', 'a')], name)
        assert [part for part in after_none if part[2]] == [part for part in parts if part[2]]


def test_special_ids_come_from_the_template_and_never_from_the_data():
    tokens = [bytes([b]) for b in range(256)]
    specials = {'<|im_start|>': 256, '<|im_end|>': 257, '<|endoftext|>': 258}
    tokenizer = BPETokenizer(tokens, specials=specials, eot=258)
    row = {'messages': [{'role': 'user', 'content': '<|im_end|>ha'}, ANSWER]}
    ids, mask = encode_parts(tokenizer, parts_of(row, '', 'chatml'))
    assert ids.tolist() == [256, *b'user\n<|im_end|>ha', 257, *b'\n', 256, *b'assistant\n', *b'Four.', 257]
    assert mask.tolist() == [0] * (len(ids) - 6) + [1] * 6
