"""Sampling: prompts in, texts out, where they end, chat, and which tokenizer a checkpoint gets."""

import gzip
import io
import json
import os
import pickle
import sys
import types
from threading import Thread

import pytest
import torch
from conftest import error_of
from test_dataset import nanogpt_meta

import sample
from hotloop import load
from hotloop.data.chat import TEMPLATES, choose_template, parts_of, read_row, render
from hotloop.data.encode import encode_parts
from hotloop.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from hotloop.inference.generate import Sampling
from hotloop.inference.quantize import Int8Linear
from hotloop.inference.texts import certain_text, fit_turns, sampling_of, split_stops
from hotloop.training.checkpoint import save_checkpoint
from model import GPT, GPTConfig

CHARS = '\n abcdefgh'
END = '\n---------------\n'


def gpt(vocab_size=10, block_size=8):
    """Make a model whose predictions are far from uniform."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=vocab_size, block_size=block_size))
    for p in model.parameters():
        p.data *= 8
    return model.eval()


def write(path, model, tokenizer, **more):
    """Write a checkpoint as training leaves it."""
    save_checkpoint(str(path), {'model': model.state_dict(), 'model_args': model.config.model_args(),
                                'iter_num': 7, 'config': {}, 'tokenizer': tokenizer.spec(), **more})


@pytest.fixture
def out(tmp_path):
    """Make a run folder with a best.pt of ten characters."""
    (tmp_path / 'out').mkdir()
    write(tmp_path / 'out' / 'best.pt', gpt(), CharTokenizer(CHARS))
    return tmp_path / 'out'


def main(**flags):
    return sample.main([f'--{name}={value}' for name, value in {'device': 'cpu', **flags}.items()])


@pytest.fixture
def draw(capsys, out):
    """draw(**flags) returns the texts, prompts included; with output=jsonl the rows."""
    def draw(**flags):
        main(**{'out_dir': out, 'num_samples': 1, 'max_new_tokens': 20, 'start': 'ab', **flags})
        printed, draw.err = capsys.readouterr()
        if flags.get('output', 'text') != 'text':
            return [json.loads(line) for line in printed.splitlines()]
        assert printed.endswith(END)
        return printed.removesuffix(END).split(END)
    return draw


def play(monkeypatch, *tokens):
    """Replace generate() by one that draws these tokens for each sequence. Returns the list of its calls."""
    calls = []

    def generate(model, prompts, sampling, seeds, stopped, compiled):
        calls.append(types.SimpleNamespace(model=model, prompts=prompts, sampling=sampling, stopped=[]))
        for token in tokens:
            calls[-1].stopped.append(set(stopped))
            yield [(i, token, -0.5) for i in range(len(prompts)) if i not in stopped]
    monkeypatch.setattr('hotloop.inference.texts.generate', generate)
    return calls


def test_a_prompt_comes_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    Thread(target=(tmp_path / 'pipe').write_text, args=('cab',), daemon=True).start()
    assert sample.read_prompts(f'FILE:{tmp_path / "pipe"}')[0][0] == 'cab'


@pytest.mark.parametrize('name, content, expected', [
    ('a.txt.gz', gzip.compress(b'\xef\xbb\xbfa\r\nb\n', mtime=0), ['a\r\nb\n']),
    ('-', b'\xef\xbb\xbfcab\n', ['cab\n']),
    ('a.JSONL', b'\xef\xbb\xbf"cab\\n"\n\n"b"', ['cab\n', 'b']),
    ('a.csv', b'id,prompt\n1,cab\n', ['cab']), ('a.json', b'[{"prompt": "cab"}]', ['cab']),
    ('a.ndjson.gz', gzip.compress(b'{"prompt": "cab\\n", "id": 1}', mtime=0), ['cab\n']),
    ('p.txt', b'caf\xe9', 'p.txt'), ('-', b'caf\xe9', 'the input is not UTF-8'),
    ('p.jsonl', b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2'), ('p.jsonl', b'7', 'line 1'),
    ('p.jsonl', b'{"prompt"', 'line 1 is not JSON'), ('p.jsonl', b'{"messages": []}', 'line 1'),
    ('p.txt', None, 'No such file')])
def test_prompts_come_from_a_file_or_standard_input(tmp_path, monkeypatch, name, content, expected):
    start = f'FILE:{tmp_path / name}'
    if name == '-':
        start = '-'
        monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(content)))
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    if isinstance(expected, list):
        assert [given for given, *_ in sample.read_prompts(start)] == expected
    else:
        assert expected in error_of(sample.read_prompts, start)


@pytest.mark.parametrize('flags, words', [
    (dict(start='abéx'), "'xé'"), (dict(chat=True), 'template of the model is not known'),
    (dict(run_code=True), 'run_code=True needs eval_code'), (dict(score='a', chat=True), 'score and chat'),
    (dict(top_p=1.5, min_p=-1), 'top_p=1.5 must be from 0 to 1\nmin_p=-1.0'),
    (dict(export=''), "export='' names no file"), (dict(serve=8, compile=True), 'no effect with serve'),
    (dict(chat=True, output='jsonl'), 'output=jsonl has no effect'),
    (dict(diagnose=True, quantize='int8'), 'quantize=int8 has no effect'),
    (dict(device='tpu'), "device='tpu'"), (dict(out_dir='a/none'), "a/none' does not exist"),
    (dict(compile=True), 'compile=True')])
def test_settings_and_input_that_cannot_be_used_are_refused(out, monkeypatch, flags, words):
    monkeypatch.setattr('hotloop.system.device.try_compile', lambda device: 'no compiler')
    assert words in error_of(main, **{'out_dir': out, **flags})


def test_a_file_without_prompts_is_an_error(out):
    (out / 'p.jsonl').write_text('')
    assert 'holds no prompt' in error_of(main, out_dir=out, start=f'FILE:{out / "p.jsonl"}')


def test_earlier_answers_leave_their_thoughts():
    opened = types.SimpleNamespace(gpt=gpt(257, block_size=99), tokenizer=ByteTokenizer())
    turns = [('user', 'a'), ('assistant', '<think>\nh\n</think>\n\nb'), ('user', '</think>')]
    turns, ids = fit_turns(opened, turns, 'plain', 9)
    assert turns == [('user', 'a'), ('assistant', 'b'), ('user', '</think>')] and len(ids) < 99


def test_the_number_of_samples_and_the_end_of_a_long_prompt(draw):
    """The block_size is 8."""
    first = draw(seed=1, num_samples=3, start='fedcbahg')
    assert draw(seed=3, start='habc' * 5 + 'fedcbahg') == ['habc' * 5 + first[2]]
    assert 'the prompt has 28 tokens; only the last 8 fit' in draw.err
    greedy = draw(temperature=0, seed=1, num_samples=None)
    assert draw(temperature=1e-9, num_samples=2) == greedy * 2
    assert len(draw(num_samples=None)) == 3


def test_settings_and_prompts_reach_generate(draw, out, monkeypatch):
    """A prompt begins as the documents of the data."""
    tokenizer = ByteTokenizer()
    tokenizer.bos = 256
    write(out / 'best.pt', gpt(257), tokenizer)
    calls = play(monkeypatch, 2)
    flags = dict(max_new_tokens=3, temperature=0.5, top_k=None, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
                 dry=0.4)
    draw(output='logprobs', start='a', quantize='int8', **flags)
    assert calls[0].sampling == Sampling(**flags, bos=256, vocab=257, logprobs=True)
    assert calls[0].prompts == [[256, 97]] and isinstance(calls[0].model.lm_head, Int8Linear)


@pytest.mark.parametrize('flags, is_answer, temperature, dry', [
    ({}, False, 0.8, 0.2), ({}, True, 0.8, 0.0), (dict(temperature=0), False, 0.0, 0.0),
    (dict(eval_code='x'), False, 0.0, 0.0), (dict(eval_code='x', temperature=0.8), False, 0.8, 0.0),
    (dict(dry=1.3), True, 0.8, 1.3)])
def test_texts_have_a_penalty_and_answers_have_none(flags, is_answer, temperature, dry):
    sampling = sampling_of(sample.SampleConfig(**flags), ByteTokenizer(), is_answer)
    assert (sampling.temperature, sampling.dry) == (temperature, dry)
    assert sampling.sizes[[9, 32, 97, 256]].tolist() == [0, 0, 1, 0]  # without white space


@pytest.mark.parametrize('stop, data, expected, stopped', [
    (None, 'é€'.encode(), 'é€', False), (None, 'é€'.encode()[:-1], 'é', False),
    ('', b'\xffa\xe2', '�a', False),
    ('lo!', b'elo', 'e', False), ('lo!', b'elo lo', 'elo ', False), ('l|||e', b'hello', 'h', True),
    ('ell', b'heelal', 'heelal', False), ('xy', b'axaxyb', 'axa', True), (r'\n', b'ab\ncd', 'ab', True),
    (r'\t', b'x\ty', 'x', True), ('€', 'a€b'.encode(), 'a', True), ('aab', b'aaab', 'a', True),
    ('yABC|||AB', b'xyAB', 'xy', True)])
def test_text_appears_when_it_is_certain(stop, data, expected, stopped):
    """A character appears with its last byte; what may become a stop text waits. Nothing is taken back."""
    stops = split_stops(stop)
    assert certain_text(data, stops) == (expected, stopped)
    for n in range(len(data)):
        text, _ = certain_text(data[:n], stops)
        assert expected.startswith(text)


def test_a_model_of_rows_of_one_line_begins_a_new_one(draw, out):
    write(out / 'best.pt', gpt(3), CharTokenizer('ab', eot=True))
    assert draw(start='\n', output='jsonl')[0]['prompt'] == ''


def test_a_text_ends_where_another_begins(draw, out, monkeypatch):
    tokenizer = ByteTokenizer()
    tokenizer.bos = 9
    write(out / 'best.pt', gpt(257), tokenizer)
    play(monkeypatch, 97, 9, 98)
    assert draw(start='x') == ['xa']


def test_a_model_that_does_not_fit_the_memory_is_named(out, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 6.00 GiB')
    monkeypatch.setattr('hotloop.inference.texts.generate', fail)
    assert 'lower --num_samples, --batch_size' in error_of(main, out_dir=out, start='ab')


def test_load_gives_a_model_that_writes_what_the_command_writes(draw, out):
    """At once or in pieces, which begin before the last is drawn."""
    model = load(str(out), device='cpu', top_k=5)
    row, = draw(output='jsonl', start='ab', seed=7, top_k=5)
    assert model.generate('ab', max_new_tokens=20, seed=7) == row['text']
    pieces = model.generate('ab', stream=True, max_new_tokens=20, seed=7)
    assert len(first := next(pieces)) == 1 and first + ''.join(pieces) == row['text']
    greedy = model.generate('ab', temperature=0, max_new_tokens=3)
    assert greedy == model.generate('ab', top_k=1, max_new_tokens=3)
    error = error_of(model.generate, 'ab', max_tokens=3, num_samples=2)
    assert error.startswith('max_tokens, num_samples: generate() returns one text')
    assert error_of(model.generate, 'ab', top_k=0) == 'top_k=0 must be from 1 to inf'
    assert error_of(load, str(out), quantize='nf4').endswith("quantize: expected none or int8, not 'nf4'")
    assert '--template' in error_of(model.generate, [{'role': 'user', 'content': 'a'}])


def test_load_answers_a_chat_in_the_template_of_the_model(out, monkeypatch):
    """Of one that is too long the oldest turns are dropped."""
    write(out / 'best.pt', gpt(257, block_size=128), ByteTokenizer(), template='chatml')
    calls = play(monkeypatch, *b'Four.<|im_end|>no')
    assert load(str(out), device='cpu').generate([{'role': 'user', 'content': 'hi'}]) == 'Four.'
    assert bytes(calls[0].prompts[0]).decode() == CHATML
    load(str(out), device='cpu').generate('hi', template='none')
    assert bytes(calls[-1].prompts[0]) == b'hi'
    long = [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'one ' * 50},
            {'role': 'assistant', 'content': 'x'}, {'role': 'user', 'content': 'hi'}]
    load(str(out), device='cpu').generate(long, max_new_tokens=10)
    assert bytes(calls[-1].prompts[0]).decode() == '<|im_start|>system\nS<|im_end|>\n' + CHATML


def test_a_loaded_model_can_be_trained(out, monkeypatch):
    """Packed weights have no gradients."""
    monkeypatch.setattr('hotloop.inference.quantize.PACK_FROM', 1)
    model = load(str(out), device='cpu').gpt
    model(*torch.randint(10, (2, 1, 8))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_jsonl_names_what_ended_a_text(draw, out, monkeypatch):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    row, = draw(output='jsonl', max_new_tokens=0)
    assert (row['finish'], row['text']) == ('length', '')
    play(monkeypatch, 0xe2)
    assert draw() == ['ab\ufffd']  # an incomplete character at the end
    calls = play(monkeypatch, 97, 256, 98)
    row, = draw(output='logprobs')
    assert row == {'prompt': 'ab', 'seed': 1337, 'text': 'a', 'finish': 'stop', 'tokens': [97, 256],
                   'logprobs': [-0.5, -0.5]}
    assert calls[0].stopped == [set(), set()]  # generate() draws no more.


def test_samples_are_printed_in_order_and_the_first_as_it_comes(monkeypatch):
    """Text is visible before the next token is computed. Sequence 1 finishes first and waits."""
    class Screen(io.StringIO):
        shown = ''

        def flush(self):
            self.shown = self.getvalue()
    screen = Screen()
    seen = []

    def generate(*args):
        for index, piece in [(0, b'a'), (1, b'b'), (1, b'.'), (0, b'c'), (2, b'd'), (0, b'.'), (2, b'e')]:
            seen.append(screen.shown)
            yield [(index, piece[0], 0.0)]
    monkeypatch.setattr(sys, 'stdout', screen)
    monkeypatch.setattr('hotloop.inference.texts.generate', generate)
    opened = types.SimpleNamespace(gpt=gpt(257), tokenizer=ByteTokenizer(), template='none')
    sample.sample(opened, sample.SampleConfig(start='<', stop='.'))
    assert seen == ['<', '<a', '<a', '<a', '<ac', '<ac', f'<ac{END}<b{END}<d']
    assert screen.shown == f'<ac{END}<b{END}<de{END}'


def test_prompts_of_a_file_are_drawn_together_as_each_alone(draw, out, tmp_path):
    (tmp_path / 'p.jsonl').write_text('{"prompt": "ab"}\n\n{"prompt": ""}\n"habcdefgh"\n')
    alone = [text for start in ('ab', '', 'habcdefgh') for text in draw(start=start, num_samples=2)]
    many = dict(start=f'FILE:{tmp_path / "p.jsonl"}', num_samples=2)
    assert draw(batch_size=1, **many) == alone
    found = draw(output='jsonl', batch_size=5, **many)
    assert [row['prompt'] + row['text'] for row in found] == alone
    assert [row['seed'] for row in found] == [1337, 1338] * 3
    (tmp_path / 'mixed.jsonl').write_text('"habcdefgh"\n{"messages": [{"role": "user", "content": "a"}]}\n')
    write(out / 'best.pt', gpt(), CharTokenizer(CHARS), template='joined')  # only answers have no penalty
    assert draw(start=f'FILE:{tmp_path / "mixed.jsonl"}', num_samples=2)[:2] == alone[4:]


ROWS = [
    {'prompt': 'Two?', 'completion': ' 2'}, {'instruction': 'Add.', 'input': '1, 1', 'output': '2'},
    {'messages': [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'a'},
                  {'role': 'assistant', 'content': 'b'}, {'role': 'user', 'content': 'c'},
                  {'role': 'assistant', 'content': 'd'}]}]


def prompt_of_row(row, tokenizer, tuned_in, **settings):
    """Return the prompt of a row for a model that was tuned in a template."""
    rows = [sample.prompt_of(row, 'line 1')]
    opened = types.SimpleNamespace(gpt=gpt(257, block_size=512), tokenizer=tokenizer,
                                   template=settings.get('template', tuned_in))
    return sample.make_prompts(opened, rows, sample.SampleConfig(**settings))[0]


@pytest.mark.parametrize('template', [name for name in TEMPLATES if name != 'joined'])
@pytest.mark.parametrize('row', ROWS, ids=lambda row: next(iter(row)))
def test_the_prompt_of_a_row_is_its_training_document_up_to_the_answer(template, row):
    """This holds in the template that the model was tuned in, and in one that is named."""
    specials = {'<|im_end|>': 256, '<e>': 257}
    tokenizer = BPETokenizer([bytes([b]) for b in range(256)], specials=specials, eot=257)
    tokenizer.bos = 257
    used = choose_template(template, read_row(row, 'a')[0])
    ids, mask = encode_parts(tokenizer, parts_of(row, 'a', used))
    expected = [257, *ids[:len(mask) - mask[::-1].argmin()].tolist()]
    end = TEMPLATES[template].assistant[1]
    for settings in ({}, dict(template=template)):
        prompt = prompt_of_row(row, tokenizer, template, **settings)
        assert prompt.ids == expected and prompt.stops == [end] * bool(end)


HI, CHATML = {'prompt': 'hi'}, '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'


@pytest.mark.parametrize('row, tuned_in, settings, expected', [
    ('hi', 'chatml', {}, 'hi'), (HI, 'chatml', {}, CHATML), ({'instruction': 'hi'}, 'chatml', {}, CHATML),
    (HI, 'chatml', dict(template='none'), 'hi'), (HI, 'none', {}, 'hi'), (HI, 'joined', {}, 'hi'),
    ('hi', 'joined', dict(template='chatml'), CHATML)])
def test_a_prompt_is_in_a_template_where_one_is_known(row, tuned_in, settings, expected):
    """Texts are plain unless a template is named; so are the prompts of rows for a model that knows none."""
    prompt = prompt_of_row(row, ByteTokenizer(), tuned_in, **settings)
    assert ByteTokenizer().decode(prompt.ids).decode() == expected
    assert '--template' in error_of(prompt_of_row, ROWS[-1], ByteTokenizer(), 'none')


def test_the_answers_to_chats_end_at_the_mark(draw, out, tmp_path, monkeypatch):
    """The output has the prompt as it was given. A plain text has no mark."""
    write(out / 'best.pt', gpt(257, block_size=512), ByteTokenizer(), template='chatml')
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, [ROWS[0], ROWS[-1], 'Two?'])))
    play(monkeypatch, *b'Four.<|im_end|>no')
    start = f'FILE:{tmp_path / "p.jsonl"}'
    rows = draw(start=start, output='jsonl')
    assert [row['prompt'] for row in rows] == ['Two?', ROWS[-1]['messages'], 'Two?']
    assert [row['text'] for row in rows] == ['Four.', 'Four.', 'Four.<|im_end|>no']
    assert draw(start=start) == ['Two?\nFour.', 'c\nFour.', 'Two?Four.<|im_end|>no']


def test_who_asks_a_model_that_was_tuned_for_chat_is_told(draw, out):
    write(out / 'best.pt', gpt(257), ByteTokenizer(), template='chatml')
    draw()
    assert 'give --chat' in draw.err
    draw(template='chatml')
    assert 'give --chat' not in draw.err


@pytest.fixture
def talk(capsys, monkeypatch, out):
    """talk(lines, answers, **flags) is a chat in which the model answers so. Returns the prompts."""
    def talk(lines, answers, **flags):
        tokenizer = ByteTokenizer()
        prompts = []
        answers = iter(answers)
        write(out / 'best.pt', gpt(257, block_size=200), tokenizer, template='chatml')

        def generate(model, ids, sampling, seeds, stopped, compiled):
            prompts.append(tokenizer.decode(ids[0]).decode())
            for token in next(answers).encode():
                if not stopped:
                    yield [(0, token, 0.0)]
        monkeypatch.setattr(sys, 'stdin', io.StringIO('\n'.join(lines)))
        monkeypatch.setattr('hotloop.inference.texts.generate', generate)
        main(out_dir=out, chat=True, **flags)
        talk.out, talk.err = capsys.readouterr()
        return prompts
    return talk


def test_a_chat_is_in_the_template_that_training_saw(talk):
    prompts = talk(['Two and two?', 'And one?'], ['Four.<|im_end|>x', 'Five.<|im_end|>'],
                   start='Be brief.', max_new_tokens=1)
    turns = [('system', 'Be brief.'), ('user', 'Two and two?'), ('assistant', 'Four.'), ('user', 'And one?'),
             ('assistant', 'Five.')]
    complete = ''.join(text for text, *_ in render(turns, 'chatml'))
    assert complete == prompts[1] + 'Five.<|im_end|>'
    assert prompts[1].startswith(prompts[0]) and prompts[0].endswith('<|im_start|>assistant\n')
    assert talk.out == '> Four.\n> Five.\n> \n'  # without the mark; the end of the input ends the chat
    assert talk(['hi', '', 'b'], ['x', 'y'], template='plain') == ['hi\n', 'hi\nx\nb\n']
    assert talk(['hi', 'exit'], ['x'], template='joined') == ['hi']


def test_the_oldest_turns_are_dropped_when_the_context_is_full(talk):
    prompts = talk(['one ' * 10, 'two ' * 10, 'three'], ['first', 'second', 'third'], max_new_tokens=20)
    assert 'one' not in prompts[2] and prompts[2].startswith('<|im_start|>user\ntwo')
    assert 'the oldest 2 turns are dropped' in talk.err
    prompts = talk(['early', 'x' * 300, 'late'], ['first', 'second'], max_new_tokens=20)
    assert 'the context has room for 180; write less, or train with a --block_size above' in talk.err
    assert 'early' in prompts[1] and 'late' in prompts[1]  # a refused line costs no turn


@pytest.mark.parametrize('chars, words', [(CHARS, None), ('', '10 ids'), (CHARS + 'ijk', '10 ids')])
def test_nanogpts_checkpoint_gets_the_tokenizer_of_its_data(draw, tmp_path, chars, words):
    """It gets no other: nanoGPT falls back to GPT-2's whatever the vocabulary, and prints garbage."""
    (tmp_path / 'data' / 'chars').mkdir(parents=True)
    if chars:
        (tmp_path / 'data' / 'chars' / 'meta.pkl').write_bytes(pickle.dumps(nanogpt_meta(chars)))
    theirs = tmp_path / 'ckpt.pt'
    torch.save({'model': {f'_orig_mod.{name}': p for name, p in gpt().state_dict().items()}, 'optimizer': {},
                'model_args': gpt().config.model_args(), 'iter_num': 250, 'best_val_loss': torch.tensor(1.4),
                'config': {'dataset': 'chars'}}, theirs)
    flags = dict(init_from=theirs, data_dir=tmp_path / 'data')
    if words:
        assert words in error_of(main, **flags)
    else:
        assert draw() == draw(**flags)
        assert draw.err.endswith(f'weights: {theirs}, step 250; tokenizer: char\ndevice: cpu, float32\n')
