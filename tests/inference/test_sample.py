"""Sampling: prompts in, texts out, where they end, chat, and which tokenizer a checkpoint gets."""

import gzip
import io
import json
import pickle
import sys
import types

import pytest
import torch
from conftest import error_of

import sample
from hotloop.data.chat import TEMPLATES, choose_template, form_of, parts_of, render
from hotloop.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, encode_parts
from hotloop.data.tokenizer_source import dataset_spec
from hotloop.training.checkpoint import save_checkpoint
from model import GPT, GPTConfig

CHARS = '\n abcdefgh'  # ten
END = '\n---------------\n'


def gpt(vocab_size=10, block_size=8):
    """A model whose predictions are far from uniform."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=vocab_size, block_size=block_size))
    for p in model.parameters():
        p.data *= 8
    return model.eval()


def write(path, model, tokenizer, **more):
    """A checkpoint as training leaves it."""
    save_checkpoint(str(path), {'model': model.state_dict(), 'model_args': model.config.model_args(),
                                'iter_num': 7, 'config': {}, 'tokenizer': tokenizer.spec(), **more})


@pytest.fixture
def out(tmp_path):
    """A run folder with a best.pt of ten characters."""
    (tmp_path / 'out').mkdir()
    write(tmp_path / 'out' / 'best.pt', gpt(), CharTokenizer(CHARS))
    return tmp_path / 'out'


@pytest.fixture
def byte_out(out):
    write(out / 'best.pt', gpt(257), ByteTokenizer(), bos=256)


def main(**flags):
    return sample.main([f'--{name}={value}' for name, value in {'device': 'cpu', **flags}.items()])


@pytest.fixture
def draw(capsys, out):
    """draw(**flags) returns the texts, prompts included; with output=jsonl the rows. draw.err is stderr."""
    def draw(**flags):
        main(**{'out_dir': out, 'num_samples': 1, 'max_new_tokens': 20, 'start': 'ab', **flags})
        printed, draw.err = capsys.readouterr()
        if flags.get('output') == 'jsonl':
            return [json.loads(line) for line in printed.splitlines()]
        assert printed.endswith(END)
        return printed.removesuffix(END).split(END)
    return draw


def play(monkeypatch, *tokens):
    """Replaces generate() by one that draws these tokens for each sequence; returns the list of its calls."""
    calls = []

    def generate(model, prompts, sampling, num_samples=1, seeds=None, stopped=None, compiled=False):
        calls.append(types.SimpleNamespace(prompts=prompts, sampling=sampling, compiled=compiled, stopped=[],
                                           kind=type(model.lm_head).__name__))
        for token in tokens:
            calls[-1].stopped.append(set(stopped))
            yield [(i, token, -0.5) for i in range(len(prompts) * num_samples) if i not in stopped]
    monkeypatch.setattr('sample.generate', generate)
    return calls


@pytest.mark.parametrize('flags, warned', [
    (dict(quantize='int8', compile=False), True), (dict(quantize='int8', compile=True), False),
    (dict(compile=False), False)])
def test_a_gpu_becomes_the_current_device_and_eager_int8_gives_a_warning(draw, monkeypatch, flags, warned):
    """Streams, events and graphs of another GPU would not see this one's work."""
    gpu, current = torch.device('cuda', 1), []
    monkeypatch.setattr('sample.choose_device', lambda name: (gpu, 'requested'))
    monkeypatch.setattr('sample.choose_compile', lambda asked, device: (asked, 'requested'))
    monkeypatch.setattr('sample.prepare_for_inference', lambda model, *args, **kwargs: model)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda gpu: (8, 0))
    monkeypatch.setattr(torch.cuda, 'set_device', current.append)
    play(monkeypatch, 2)
    draw(device='cuda:1', **flags)
    assert current == [gpu]
    warning = '--compile=True each token converts all weights, which is slower than bfloat16 on cuda:1\n'
    assert (warning in draw.err) == warned


@pytest.mark.parametrize('name, content, expected', [
    ('a.txt.gz', gzip.compress(b'\xef\xbb\xbfa\r\nb\n', mtime=0), ['a\r\nb\n']),
    ('-', b'\xef\xbb\xbfcab\n', ['cab\n']),
    ('a.JSONL', b'\xef\xbb\xbf"cab\\n"\n\n"b"', ['cab\n', 'b']),
    ('a.ndjson.gz', gzip.compress(b'{"prompt": "cab\\n", "id": 1}', mtime=0), ['cab\n']),
    ('p.txt', b'caf\xe9', 'p.txt is not UTF-8 text'), ('-', b'caf\xe9', 'input is not UTF-8 at byte 3'),
    ('p.jsonl', b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected a JSON string, or an object'),
    ('p.jsonl', b'\n \n', 'p.jsonl has no prompts'),
    ('p.jsonl', b'7', 'line 1: a row must be an object or a string, not 7'),
    ('p.jsonl', b'{"prompt"', 'line 1 is not JSON'), ('p.jsonl', b'[' * 100_000, 'line 1 is not JSON'),
    ('p.jsonl', b'{"messages": []}', 'line 1: the chat has no user turn'),
    ('p.jsonl', b'{"prompt": 3}', "line 1: the user's text must be a string, not 3"),
    ('p.txt', None, 'p.txt cannot be read: No such file')])
def test_prompts_come_from_a_file_or_standard_input(tmp_path, monkeypatch, name, content, expected):
    start, path = f'FILE:{tmp_path / name}', tmp_path / name
    if name == '-':
        start = '-'
        monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(content)))
    elif content is not None:
        path.write_bytes(content)
    if isinstance(expected, list):
        assert [given for given, *_ in sample.read_prompts(start)] == expected
    else:
        assert expected in error_of(sample.read_prompts, start)
    if content == b'caf\xe9':
        monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(content)))
        assert sample.read_prompts(start, 'replace')[0][0] == 'caf\ufffd'


def test_a_prompt_that_is_the_name_of_a_file_gets_a_note(tmp_path, capsys):
    (tmp_path / 'p.txt').write_text('Hello')
    assert sample.read_prompts(f'{tmp_path}/p.txt')[0][0] == f'{tmp_path}/p.txt'
    assert f'FILE:{tmp_path}/p.txt reads the file' in capsys.readouterr().err


@pytest.mark.parametrize('flags, words', [
    (dict(start='abéx'), "lacks 2 characters of the text or of its chat template: 'xé'"),
    (dict(start='-'), 'standard input is closed'), (dict(chat=True, template='plain'), 'is closed'),
    (dict(chat=True), 'template of the model is not known; choose one with --template: plain, joined'),
    (dict(chat=True, template='none'), 'chat and score need a template'),
    (dict(system='Be brief.'), "system='Be brief.' needs a template: choose one with --template: plain"),
    (dict(logprobs=True), 'logprobs=True needs output=jsonl'),
    (dict(format='jsonl', text_field='a'), "format='jsonl' needs score, the text\ntext_field='a' needs"),
    (dict(diagnose=True, quantize='int8'), 'leave quantize=int8 out'),
    (dict(stop='a|||'), 'contains an empty string'),
    (dict(repetition_penalty=0), 'repetition_penalty=0.0 must be from 0.01 to 100'),
    (dict(top_p=1.5, min_p=0), 'top_p=1.5 must be from 1e-06 to 1\nmin_p=0.0 must be'),
    (dict(num_samples=0, seed=2**63), 'num_samples=0 must be 1 or more\nseed='),
    (dict(device='tpu'), "device='tpu' is not"), (dict(out_dir='none'), "'none' does not exist; train")])
def test_settings_and_input_that_cannot_be_used_are_refused(out, monkeypatch, flags, words):
    monkeypatch.setattr(sys, 'stdin', None)
    assert words in error_of(main, **{'out_dir': out, **flags})


def test_a_prompt_without_its_flag_gets_the_flag():
    assert error_of(sample.main, ['Once upon']).endswith('a prompt is given as --start="Once upon"')


def test_a_card_for_training_is_answered_with_its_folder(tmp_path):
    """nanoGPT's sample.py ignores the settings that it does not have."""
    card = tmp_path / 'card.py'
    card.write_text('out_dir = "out-x"\ndataset = "x"\nbatch_size = 4\nmax_iters = 5\n')
    assert error_of(sample.main, [str(card)]) == (
        f'{card} is for train.py; sample.py finds its run with --out_dir=out-x')


def test_a_text_is_a_function_of_prompt_and_seed(draw):
    """Of the end of a prompt that is too long: block_size is 8."""
    first = draw(seed=1, num_samples=3, start='fedcbahg')
    assert len(set(first)) == 3 and draw(seed=3, start='habc' * 5 + 'fedcbahg') == ['habc' * 5 + first[2]]
    assert 'the prompt has 28 tokens; the last 8 fit the context' in draw.err
    greedy = draw(temperature=0, seed=1, num_samples=None)
    assert draw(temperature=1e-9, num_samples=2) == greedy * 2
    assert len(draw(num_samples=None)) == 3


def test_settings_and_prompts_reach_generate(draw, byte_out, monkeypatch):
    """A prompt begins as the documents of the data, which was made with --bos."""
    calls = play(monkeypatch, 2)
    flags = dict(max_new_tokens=3, temperature=0.5, top_k=None, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
                 past_context='stop', logprobs=True)
    draw(output='jsonl', start='a', **flags)
    assert {name: getattr(calls[0].sampling, name) for name in flags} == flags
    assert calls[0].sampling.vocab == 257 and calls[0].prompts == [[256, 97]]


def test_int8_and_compile(draw, out, monkeypatch):
    calls = play(monkeypatch, 2)
    monkeypatch.setattr('hotloop.system.device.try_compile', lambda device: None)
    tried = []

    def all_shapes(linears, rows):
        tried.append(rows)
        return {linear.weight.shape for linear in linears}
    monkeypatch.setattr('hotloop.inference.quantize.can_pack', lambda *args: True)
    monkeypatch.setattr('hotloop.inference.quantize.shapes_to_pack', all_shapes)
    for flags in ({'quantize': 'int8'}, {'compile': True}, {}, {'num_samples': 5, 'batch_size': 4}):
        draw(**flags)
    assert [call.kind for call in calls[:3]] == ['Int8Linear', 'Linear', 'PackedLinear']
    assert [call.compiled for call in calls[:3]] == [False, True, False]
    assert tried == [1, 4]  # rows of a step; draw() asks for one sample
    monkeypatch.setattr('hotloop.system.device.try_compile', lambda device: 'no compiler')
    assert 'but fails here: no compiler' in error_of(main, out_dir=out, compile=True)


@pytest.mark.parametrize('stops, tokens, texts', [
    ([], 'é€'.encode(), ['', 'é', 'é', 'é', 'é€', 'é€']), ([], (0xff, 97, 0xe2), ['�', '�a', '�a', '�a�']),
    (['lo!'], b'elo lo', ['e', 'e', 'e', 'elo ', 'elo ', 'elo ', 'elo lo'])])
def test_text_appears_when_it_is_certain(stops, tokens, texts):
    """A character with its last byte; what may become a stop text waits, and no more."""
    text, seen = sample.Text(ByteTokenizer(), sample.Prompt('', '', [], (*stops,)), 1, None), []
    for token in tokens:
        text.add(token, 0.0)
        seen.append(text.text)
    text.end('length')
    assert [*seen, text.text] == texts


@pytest.mark.parametrize('stop, written, expected', [
    ('l|||e', 'hello', 'h'), ('ell', 'heelal', 'heelal'), ('xy', 'axaxyb', 'axa'), (r'\n', 'ab\ncd', 'ab'),
    (r'\t', 'x\ty', 'x'), ('€', 'a€b', 'a'), ('aab', 'aaab', 'a'), ('lo', 'hel', 'hel')])
def test_a_stop_text_ends_the_sample_and_is_not_printed(draw, byte_out, monkeypatch, stop, written, expected):
    """Each byte is a token here, so most stop texts span several."""
    play(monkeypatch, *written.encode())
    assert draw(start='<', stop=stop) == [f'<{expected}']


def test_special_tokens_and_the_end_of_text_end_it_too(draw, byte_out, monkeypatch):
    assert sample.stops_of(ByteTokenizer(), '<|endoftext|>|||zz', ['m', '']) == (['zz', 'm'], {256})
    assert sample.stops_of(CharTokenizer(CHARS), None) == ([], set())
    calls = play(monkeypatch, *b'hi', 256, 97)
    assert draw() == ['abhi'] and calls[0].stopped == [set(), set(), set(), {0}]
    assert draw(num_samples=2, stop='h') == ['ab', 'ab']
    assert calls[1].stopped == [set(), *[{0, 1}] * 3]  # generate() drops a sequence at a stop text too


def test_samples_are_printed_in_order_and_the_first_as_it_comes(monkeypatch):
    """Text is visible before the next token is computed. Sequence 1 finishes first and waits."""
    class Screen(io.StringIO):
        shown = ''

        def flush(self):
            self.shown = self.getvalue()
    screen, seen = Screen(), []

    def steps():
        texts = [types.SimpleNamespace(start=start, text='', finish=None) for start in '<([']
        yield texts
        for index, piece, finish in [(0, 'a', None), (1, 'b', 'stop'), (0, 'c', None), (2, 'd', None),
                                     (0, '', 'stop'), (2, 'e', 'length')]:
            seen.append(screen.shown)
            texts[index].text += piece
            texts[index].finish = finish
            yield texts
    monkeypatch.setattr(sys, 'stdout', screen)
    sample.print_in_order(steps(), END)
    assert seen == ['<', '<a', '<a', '<ac', '<ac', f'<ac{END}(b{END}[d']
    assert screen.shown == f'<ac{END}(b{END}[de{END}'


def test_prompts_of_a_file_are_drawn_together_as_each_alone(draw, tmp_path):
    (tmp_path / 'p.jsonl').write_text('{"prompt": "ab"}\n\n{"prompt": ""}\n"habcdefgh"\n')
    alone = [text for start in ('ab', '', 'habcdefgh') for text in draw(start=start, num_samples=2)]
    many = dict(start=f'FILE:{tmp_path / "p.jsonl"}', num_samples=2)
    assert draw(batch_size=1, **many) == alone
    found = draw(output='jsonl', batch_size=5, **many)
    assert [row['prompt'] + row['text'] for row in found] == alone
    assert [row['seed'] for row in found] == [1337, 1338] * 3
    assert {row['finish'] for row in found} == {'length'}


ROWS = [
    {'prompt': 'Two?', 'completion': ' 2'}, {'question': 'Two?', 'answer': '2'},
    {'instruction': 'Add.', 'input': '1, 1', 'output': '2'},
    {'messages': [{'role': 'user', 'content': 'Two?'}, {'role': 'assistant', 'content': ' 2'}]},
    {'messages': [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'a'},
                  {'role': 'assistant', 'content': 'b'}, {'role': 'user', 'content': 'c'},
                  {'role': 'assistant', 'content': 'd'}]}]


@pytest.mark.parametrize('template', [name for name in TEMPLATES if name != 'joined'])
@pytest.mark.parametrize('row', ROWS, ids=lambda row: next(iter(row)))
def test_the_prompt_of_a_row_is_its_training_document_up_to_the_answer(tmp_path, template, row):
    """In the template that the model was tuned in, and in one that is named."""
    specials = {'<|im_end|>': 256, '<e>': 257}
    tokenizer = BPETokenizer([bytes([b]) for b in range(256)], specials=specials, eot=257)
    tokenizer.begin = 257
    used = choose_template(template, form_of(row)[0])
    ids, mask = encode_parts(tokenizer, parts_of(row, 'a', used))
    expected = [257, *ids[:len(mask) - mask[::-1].argmin()].tolist()]
    (tmp_path / 'p.jsonl').write_text(json.dumps(row))
    for asked in ('auto', template):
        cfg = sample.SampleConfig(start=f'FILE:{tmp_path / "p.jsonl"}', template=asked)
        prompt, = sample.make_prompts(sample.read_prompts(cfg.start), tokenizer, template, cfg)
        assert prompt.ids == expected and prompt.stops == TEMPLATES[template].assistant[1:]


def test_a_prompt_is_in_a_template_where_one_is_known(tmp_path):
    """Texts are plain unless a template is named; so are the prompts of rows for a model that knows none."""
    path, tokenizer = tmp_path / 'p.jsonl', ByteTokenizer()

    def made(rows, tuned_in, **settings):
        path.write_text('\n'.join(map(json.dumps, rows)))
        cfg = sample.SampleConfig(**{'start': f'FILE:{path}', **settings})
        template = settings.get('template', tuned_in)
        prompts = sample.make_prompts(sample.read_prompts(cfg.start), tokenizer, template, cfg)
        return [tokenizer.decode(prompt.ids).decode() for prompt in prompts]
    hi, chatml = {'prompt': 'hi'}, '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    system = '<|im_start|>system\nBe brief.<|im_end|>\n'
    assert made(['hi', hi, {'question': 'hi'}, {'instruction': 'hi'}], 'chatml') == ['hi'] + [chatml] * 3
    assert made([hi], 'chatml', template='none') == made([hi], 'none') == made([hi], 'joined') == ['hi']
    assert made(['hi', hi], 'joined', template='chatml') == [chatml] * 2
    assert made([], 'none', template='chatml', start='hi', system='Be brief.') == [system + chatml]
    assert made([hi, ROWS[-1]], 'chatml', system='Be brief.')[0] == system + chatml
    assert made([ROWS[-1]], 'chatml', system='Not this.') == made([ROWS[-1]], 'chatml')
    assert made([hi], 'gemma', system='Be brief.') == [
        '<start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n<start_of_turn>model\n']
    assert made([{'prompt': ''}], 'joined') == ['']
    for row in (ROWS[-1], {'instruction': 'hi'}):
        assert 'which needs a template: choose one with --template' in error_of(made, [row], 'none')
    assert "system='Be brief.' needs a template" in error_of(made, ['hi'], 'chatml', system='Be brief.')


def test_the_answers_to_chats_end_at_the_mark(draw, out, tmp_path, monkeypatch):
    """The output has the prompt as it was given."""
    write(out / 'best.pt', gpt(257), ByteTokenizer(), template='chatml')
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, [ROWS[0], ROWS[-1], 'Two?'])))
    play(monkeypatch, *b'Four.<|im_end|>no')
    start = f'FILE:{tmp_path / "p.jsonl"}'
    rows = draw(start=start, output='jsonl', num_samples=2)
    assert [row['prompt'] for row in rows[::2]] == ['Two?', ROWS[-1]['messages'], 'Two?']
    assert [row['text'] for row in rows[::2]] == ['Four.', 'Four.', 'Four.<|im_end|>no']  # the last is a text
    assert [row['finish'] == 'stop' for row in rows] == [True] * 4 + [False] * 2
    assert draw(start=start) == ['Two?\nFour.', 'c\nFour.', 'Two?Four.<|im_end|>no']
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, ROWS[:3])))
    assert draw(start=start, template='joined', stop='<') == ['Two?Four.', 'Two?Four.', 'Add.Four.']


def test_jsonl_names_what_ended_a_text(draw, byte_out, monkeypatch):
    (row,) = draw(output='jsonl', past_context='stop')
    assert row['finish'] == 'context' and len(row['text'].encode()) >= 7  # block_size is 8
    (row,) = draw(output='jsonl', max_new_tokens=0)
    assert (row['finish'], row['text']) == ('length', '')
    play(monkeypatch, 97, 256)
    (row,) = draw(output='jsonl', logprobs=True)
    assert row == {'prompt': 'ab', 'seed': 1337, 'text': 'a', 'finish': 'stop', 'tokens': [97, 256],
                   'logprobs': [-0.5, -0.5]}


@pytest.fixture
def talk(capsys, monkeypatch, out):
    """talk(lines, answers, **flags) is a chat in which the model answers so; returns the prompts, as text."""
    def talk(lines, answers, **flags):
        tokenizer, prompts, answers = ByteTokenizer(), [], iter(answers)
        write(out / 'best.pt', gpt(257, block_size=200), tokenizer, template='chatml')

        def generate(model, ids, sampling, stopped, **kwargs):
            prompts.append(tokenizer.decode(ids[0]).decode())
            for token in next(answers).encode():
                if not stopped:
                    yield [(0, token, 0.0)]
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(
            io.BytesIO('\n'.join(lines).encode(errors='surrogateescape')), encoding='utf-8'))
        monkeypatch.setattr('sample.generate', generate)
        main(out_dir=out, chat=True, **flags)
        talk.out, talk.err = capsys.readouterr()
        return prompts
    return talk


def test_a_byte_that_is_not_utf8_does_not_end_a_chat(talk):
    prompts = talk(['caf\udce9', 'And now?'], ['x<|im_end|>', 'y<|im_end|>'])
    assert len(prompts) == 2 and 'caf\ufffd' in prompts[0]


def test_a_chat_is_in_the_template_that_training_saw(talk):
    prompts = talk(['Two and two?', 'And one?'], ['Four.<|im_end|>x', 'Five.<|im_end|>'])
    turns = [('user', 'Two and two?'), ('assistant', 'Four.'), ('user', 'And one?'), ('assistant', 'Five.')]
    complete = ''.join(text for text, *_ in render(turns, 'chatml'))
    assert complete == prompts[1] + 'Five.<|im_end|>'
    assert prompts[1].startswith(prompts[0]) and prompts[0].endswith('<|im_start|>assistant\n')
    assert talk.out == '> Four.\n> Five.\n> \n'  # without the mark; the end of the input ends the chat


@pytest.mark.parametrize('template, end, prompt', [('plain', '', 'hi \n'), ('joined', 'exit', 'hi ')])
def test_a_template_by_name_and_the_end_of_a_chat(talk, template, end, prompt):
    assert talk(['hi ', end, 'b'], ['x', 'y'], template=template) == [prompt]


def test_a_system_prompt_and_a_message_of_several_lines(talk):
    flags = dict(system='Be brief.', max_new_tokens=1)
    prompts = talk(['a\\', ' b \\', '', 'three', 'left\\'], ['x', 'y'], **flags)
    turns = [('system', 'Be brief.'), ('user', 'a\n b \n'), ('assistant', 'x'), ('user', 'three')]
    complete = ''.join(text for text, *_ in render([*turns, ('assistant', '')], 'chatml'))
    assert complete == prompts[1] + '<|im_end|>'
    assert prompts[1].startswith(prompts[0]) and len(prompts) == 2
    assert talk.out == '> . . x\n> y\n> . \n' and 'ends with \\ continues on the next' in talk.err
    prompts = talk(['one ' * 10, 'two ' * 10, 'three'], ['', '', ''], **flags)
    assert 'one' not in prompts[2] and prompts[2].startswith('<|im_start|>system\nBe brief.')


def test_the_oldest_turns_are_dropped_when_the_context_is_full(talk):
    prompts = talk(['one ' * 10, 'two ' * 10, 'three'], ['first', 'second', 'third'], max_new_tokens=20)
    assert 'one' not in prompts[2] and prompts[2].startswith('<|im_start|>user\ntwo')
    assert 'the context is full; the oldest 2 turns are dropped' in talk.err
    prompts = talk(['early', 'x' * 300, 'late'], ['first', 'second'], max_new_tokens=20)
    assert 'tokens with its template; the context has room for 180 and an answer' in talk.err
    assert 'early' in prompts[1] and 'late' in prompts[1]  # a refused line costs no turn


@pytest.mark.parametrize('chars, dataset, words', [
    (CHARS, 'chars', None), ('', 'chars', 'chars has none for 10 ids; set --data_dir'),
    (CHARS[:5], 'chars', 'none for 10 ids'),
    (CHARS, '../data/chars', None), (CHARS, '/scratch/chars/', None),  # as nanoGPT's --dataset may be
    (CHARS, '..', 'must be a name inside data_dir')])
def test_nanogpts_checkpoint_gets_the_tokenizer_of_its_data(draw, tmp_path, chars, dataset, words):
    """And no other: nanoGPT falls back to GPT-2's whatever the vocabulary, and prints garbage."""
    (tmp_path / 'data' / 'chars').mkdir(parents=True)
    if chars:
        meta = {'vocab_size': len(chars), 'itos': dict(enumerate(chars))}
        (tmp_path / 'data' / 'chars' / 'meta.pkl').write_bytes(pickle.dumps(meta))
    theirs = tmp_path / 'ckpt.pt'
    torch.save({'model': {f'_orig_mod.{name}': p for name, p in gpt().state_dict().items()}, 'optimizer': {},
                'model_args': gpt().config.model_args(), 'iter_num': 250, 'best_val_loss': torch.tensor(1.4),
                'config': {'dataset': dataset}}, theirs)
    flags = dict(init_from=theirs, data_dir=tmp_path / 'data')
    if words:
        assert words in error_of(main, **flags)
    else:
        assert draw() == draw(**flags)
        assert draw.err == f'weights: {theirs}, step 250; tokenizer: char\ndevice: cpu, float32\n'


def test_gpt2s_tokenizer_is_assumed_for_its_vocabulary_only():
    """openwebtext has no meta.pkl."""
    config = {'dataset': 'openwebtext'}
    for size in (50257, 50304):
        assert dataset_spec('ckpt.pt', config, size, 'nowhere') == {'kind': 'tiktoken', 'name': 'gpt2'}
    assert 'has none for 50,256 ids' in error_of(dataset_spec, 'ckpt.pt', config, 50256, 'nowhere')


def test_a_tokenizer_of_more_ids_than_the_model_is_refused(out):
    write(out / 'best.pt', gpt(9), CharTokenizer(CHARS))
    assert 'the tokenizer has 10 ids, but the model has 9' in error_of(main, out_dir=out)
