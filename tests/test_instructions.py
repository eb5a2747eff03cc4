"""Instruction data: which tokens a template makes of a conversation, and which of them count in the loss."""

import hashlib
import json
import os

import numpy as np
import pytest
from conftest import SHARED, TINY

import prepare
import train
from hotloop.chat_template import parts_of
from hotloop.checkpoint import load_checkpoint
from hotloop.dataset import read_meta
from hotloop.documents import ReadConfig
from hotloop.tokenizer import BPETokenizer, ByteTokenizer, encode_parts, tokenizer_from

ASK, TELL = {'role': 'user', 'content': 'Two and two?'}, {'role': 'assistant', 'content': 'Four.'}
CHAT = {'messages': [{'role': 'system', 'content': 'Be brief.'}, ASK, TELL, {'role': 'user', 'content': 'And one?'},
                     {'role': 'assistant', 'content': 'Five.'}]}
SHARE_GPT = {'conversations': [{'from': 'human', 'value': 'Two and two?'}, {'from': 'gpt', 'value': 'Four.'}]}
ALPACA = {'instruction': 'Add.', 'input': '2 and 2', 'output': '4'}
PAIR = {'prompt': 'Q: 2+2?\nA:', 'completion': ' 4'}


def shown(row, template='auto'):
    """The document with what does not count in brackets."""
    parts = parts_of(row, 'a.jsonl, line 1', ReadConfig(template=template))
    return ''.join(text if counts else f'[{text}]' for text, _, counts in parts).replace('][', '')


TASK = 'Below is an instruction that describes a task'
WRITE = '. Write a response that appropriately completes the request.\n\n### Instruction:\n'
CHATML = ('[<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n]Four.<|im_end|>'
          '[\n<|im_start|>user\nAnd one?<|im_end|>\n<|im_start|>assistant\n]Five.<|im_end|>')
GEMMA = ('[<start_of_turn>user\nBe brief.\n\nTwo and two?<end_of_turn>\n<start_of_turn>model\n]Four.<end_of_turn>'
         '[\n<start_of_turn>user\nAnd one?<end_of_turn>\n<start_of_turn>model\n]Five.<end_of_turn>')
LLAMA3 = ('[<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n]'
          'Four.<|eot_id|>')


@pytest.mark.parametrize('row, template, expected', [
    (PAIR, 'auto', '[Q: 2+2?\nA:] 4'),
    ({'prompt': 'a', 'response': 'b'}, 'plain', '[a]b'),
    (ALPACA, 'auto', f'[{TASK}, paired with an input that provides further context{WRITE}'
     'Add.\n\n### Input:\n2 and 2\n\n### Response:\n]4'),
    ({**ALPACA, 'input': ''}, 'auto', f'[{TASK}{WRITE}Add.\n\n### Response:\n]4'),
    ({**ALPACA, 'text': 'the whole again'}, 'chatml',
     '[<|im_start|>user\nAdd.\n\n2 and 2<|im_end|>\n<|im_start|>assistant\n]4<|im_end|>'),
    ({**ALPACA, 'system': 'Brief.', 'input': None}, 'alpaca', '[Brief.\n\n### Instruction:\nAdd.\n\n### Response:\n]4'),
    (CHAT, 'auto', CHATML.replace('[', '[<|im_start|>system\nBe brief.<|im_end|>\n', 1)),
    ({'messages': CHAT['messages'][1:]}, 'chatml', CHATML),
    ({**SHARE_GPT, 'system': 'Be brief.'}, 'auto', CHATML.replace('[', '[<|im_start|>system\nBe brief.<|im_end|>\n', 1)
     .split('[\n')[0]),
    ({**ALPACA, 'history': [['Hi.', 'Ho.']]}, 'plain', '[Hi.\n]Ho.[\nAdd.\n\n2 and 2\n]4'),
    (SHARE_GPT, 'auto', '[<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n]Four.<|im_end|>'),
    (CHAT, 'gemma', GEMMA),
    ({'messages': [{'role': 'user', 'content': ' hi \n'}, TELL]}, 'llama3', LLAMA3),
    (ALPACA, 'plain', '[Add.\n\n2 and 2\n]4'),
    (CHAT, 'plain', '[Be brief.\nTwo and two?\n]Four.[\nAnd one?\n]Five.'),
    (PAIR, 'alpaca', f'[{TASK}{WRITE}Q: 2+2?\nA:\n\n### Response:\n] 4'),
])
def test_what_templates_make_of_rows(row, template, expected):
    assert shown(row, template) == expected


@pytest.mark.parametrize('row', [
    {'messages': [ASK]}, {'prompt': 'a', 'completion': ''}, {'prompt': 'a', 'completion': None},
    {'messages': [ASK, {'role': 'assistant', 'content': ''}]}, {'messages': None}, {'conversations': []}])
def test_without_an_answer_there_is_nothing_to_learn(row):
    assert parts_of(row, 'line 1', ReadConfig()) is None


def test_a_chat_that_is_null_leaves_the_text():
    assert parts_of({'messages': None, 'text': 'abc'}, 'line 1', ReadConfig()) == [('abc', False, True)]


@pytest.mark.parametrize('history', ['ab', ['ab', 'cd'], [['a', 'b', 'c']], [['a']], 3, [[1, 2]], {'a': 'b'}])
def test_a_history_is_pairs_of_texts(history):
    with pytest.raises(ValueError, match=r'line 1: .*(history is no list of pairs|stands where a text)'):
        parts_of({**ALPACA, 'history': history}, 'line 1', ReadConfig())


def test_a_field_asked_for_by_name_is_text(tmp_path):
    parts = parts_of({**ALPACA, 'text': 'the whole'}, 'line 1', ReadConfig(text_field='text'))
    assert parts == [('the whole', False, True)]


def write(tmp_path, rows, *flags):
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    prepare.main([str(tmp_path / 'a.jsonl'), '--name=x', f'--data_dir={tmp_path}/data', *flags])
    folder = tmp_path / 'data' / 'x'
    meta = read_meta(str(folder))
    splits = {s: (np.fromfile(folder / f'{s}.bin', dtype=meta['dtype']),
                  np.fromfile(folder / f'{s}.mask.bin', dtype=np.uint8)) for s in ('train', 'val')}
    return tokenizer_from(meta['tokenizer']), splits, meta


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:400'])
def test_prompt_and_answer_are_tokenized_apart_and_the_end_counts(tmp_path, tokenizer):
    """Joined text would let a token straddle the border, which the model never sees when it is asked."""
    rows = [{'prompt': f'ask {i} th', 'completion': f'en answer {i}'} for i in range(20)] + [{'text': 'plain the then'}]
    tokenizer, splits, meta = write(tmp_path, rows, f'--tokenizer={tokenizer}')
    documents = {}
    for row in rows:
        parts = [(row.get('prompt', ''), 0), (row.get('completion', row.get('text')), 1)]
        ids = [(i, counts) for text, counts in parts for i in tokenizer.encode(text).tolist()]
        documents[(*ids, (tokenizer.eot, 1))] = row
    seen = 0
    for ids, mask in splits.values():
        assert len(ids) == len(mask)
        pairs, start = list(zip(ids.tolist(), mask.tolist(), strict=True)), 0
        for i, (token, _) in enumerate(pairs):
            if token == tokenizer.eot:
                assert tuple(pairs[start:i + 1]) in documents
                start, seen = i + 1, seen + 1
        assert start == len(ids)
    assert seen == 21 and meta['splits']['val']['documents'] >= 2


def test_text_that_becomes_instruction_data_keeps_counting(tmp_path):
    """A mask begins with the first prompt; all tokens before it count, and all text after it."""
    rows = [{'text': 'x' * 50}] * 5 + [PAIR] + [{'text': 'y' * 30}] * 5
    (tmp_path / 'val.jsonl').write_text(json.dumps(PAIR))
    _, splits, _ = write(tmp_path, rows, f'--val={tmp_path}/val.jsonl')
    ids, mask = splits['train']
    start = 5 * 51
    assert mask[:start].all() and not mask[start:start + 10].any() and mask[start + 10:].all()
    assert len(ids) == len(mask) == start + 13 + 5 * 31


def test_a_text_that_is_cut_gets_a_mask_behind_instruction_data(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'SMALL', 1000)
    _, splits, _ = write(tmp_path, [{**PAIR, 'prompt': f'{i}?'} for i in range(40)])
    before = {s: len(ids) for s, (ids, _) in splits.items()}
    monkeypatch.setattr('hotloop.documents.PIECE', 400)
    monkeypatch.setattr('hotloop.encode.PIECE', 400)
    (tmp_path / 'b.txt').write_text('long text\n' * 500)
    prepare.main([str(tmp_path / 'b.txt'), '--name=x', f'--data_dir={tmp_path}/data', '--append'])
    meta, added = read_meta(str(tmp_path / 'data' / 'x')), 0
    for s in ('train', 'val'):
        ids, mask = (np.fromfile(tmp_path / 'data' / 'x' / f'{s}{end}', dtype) for end, dtype in
                     (('.bin', '<u2'), ('.mask.bin', np.uint8)))
        assert len(ids) == len(mask) == meta['splits'][s]['tokens'] > before[s] and mask[before[s]:].all()
        assert hashlib.sha256(mask.tobytes()).hexdigest() == meta['splits'][s]['mask_sha256']
        added += len(ids) - before[s]
    assert added == 5001


def test_a_field_beside_a_text_may_be_called_system(tmp_path):
    assert parts_of({'text': 'abc', 'system': True}, 'line 1', ReadConfig()) == [('abc', False, True)]


def test_special_ids_come_from_the_template_and_never_from_the_data(tmp_path):
    tokens = [bytes([b]) for b in range(256)]
    specials = {'<|im_start|>': 256, '<|im_end|>': 257, '<|endoftext|>': 258}
    tokenizer = BPETokenizer(tokens, specials=specials, eot=258)
    row = {'messages': [{'role': 'user', 'content': '<|im_end|>ha'}, TELL]}
    ids, mask = encode_parts(tokenizer, parts_of(row, '', ReadConfig()))
    assert ids.tolist() == [256, *b'user\n<|im_end|>ha', 257, *b'\n', 256, *b'assistant\n', *b'Four.', 257]
    assert mask.tolist() == [0] * (len(ids) - 6) + [1] * 6


def test_text_between_special_ids_is_tokenized_whole():
    """'user', the line end and what is asked are one text, as chat models have seen them."""
    seen = []

    class Spy(ByteTokenizer):
        def encode(self, text):
            seen.append(text)
            return super().encode(text)
    encode_parts(Spy(), parts_of(CHAT, '', ReadConfig(template='chatml')))
    assert len(seen) == 4 and seen[1] == 'Four.<|im_end|>' and seen[2].startswith('\n<|im_start|>user\nAnd one?')


def test_training_learns_answers_alone(tmp_path):
    """Its evaluation counts as many targets as the mask of the validation split has, its first token apart."""
    rows = [{'prompt': 'ask ' * 9, 'completion': 'tell ' * 5}] * 80
    rows = [{**row, 'prompt': f'{i} {row["prompt"]}'} for i, row in enumerate(rows)]
    _, splits, _ = write(tmp_path, rows)
    out = tmp_path / 'out'
    flags = {**TINY, 'data_dir': tmp_path / 'data', 'dataset': 'x', 'out_dir': out, 'max_iters': 2, 'eval_tokens': None}
    assert train.main([f'--{k}={v}' for k, v in flags.items()]) == 0
    lines = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    told = [line for line in lines if 'val_loss' in line][-1]
    assert told['val_tokens'] == int(splits['val'][1][1:].sum()) == sum(splits['val'][1])


def test_the_template_is_kept_with_the_dataset_and_the_checkpoint(tmp_path):
    """For sample.py --chat; where rows of several were mixed, none can be named."""
    chats = [{'messages': [{**ASK, 'content': f'{i}?'}, TELL]} for i in range(40)]
    pairs = [{**PAIR, 'prompt': f'{i}?'} for i in range(40)]

    def template(rows, *flags):
        return write(tmp_path, rows, '--val_fraction=0.3', *flags)[2].get('templates')
    assert template(pairs) == template(pairs, '--template=plain') == ['joined']
    assert template(chats + pairs, '--template=gemma') == ['gemma']
    assert template(chats + pairs) == template(pairs, '--append') == ['chatml', 'joined']
    assert template(chats) == ['chatml']
    assert template(chats, '--append') == ['chatml']
    out = tmp_path / 'out'
    flags = {**TINY, 'data_dir': tmp_path / 'data', 'dataset': 'x', 'out_dir': out, 'max_iters': 1}
    assert train.main([f'--{k}={v}' for k, v in flags.items()]) == 0
    for name in ('ckpt.pt', 'best.pt'):
        assert load_checkpoint(str(out / name))['template'] == 'chatml'


def test_masks_are_shown(tmp_path, capsys):
    write(tmp_path, [{'prompt': f'{i} ask', 'completion': ' tell'} for i in range(60)])
    prepare.main(['--inspect', 'x', f'--data_dir={tmp_path}/data'])
    out = capsys.readouterr().out
    assert ' ask] tell<|endoftext|>[' in out


def test_code_alpaca(tmp_path):
    path = os.path.join(SHARED, 'code', 'codealpaca_2k.json')
    if not os.path.exists(path):
        pytest.skip(f'{path} is not there')
    prepare.main([path, '--name=x', f'--data_dir={tmp_path}', '--tokenizer=bpe:1000'])
    meta = read_meta(str(tmp_path / 'x'))
    with open(path, encoding='utf-8') as f:
        rows = json.load(f)
    assert sum(meta['splits'][s]['documents'] for s in ('train', 'val')) == sum(bool(row['output']) for row in rows)
    mask = np.fromfile(tmp_path / 'x' / 'train.mask.bin', dtype=np.uint8)
    assert 0.2 < mask.mean() < 0.8
