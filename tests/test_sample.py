"""Sampling: a checkpoint in, text out; whose tokenizer it is, and what is refused."""

import gzip
import io
import json
import math
import os
import pickle
import random
import subprocess
import sys
import types
import zipfile

import pytest
import torch

import sample
from hotloop.bpe import GPT2_SPLIT
from hotloop.chat_template import render
from hotloop.checkpoint import load_checkpoint, save_checkpoint
from hotloop.score import holds
from hotloop.tokenizer import ByteTokenizer, CharTokenizer, encode_parts, tokenizer_from
from model import GPT, GPTConfig

REPO = os.path.dirname(os.path.abspath(sample.__file__))
CHARS = '\n abcdefgh'  # ten
END = '\n---------------\n'


def gpt(vocab_size=10, seed=0, **settings):
    """A model with opinions: at their usual size random weights give nearly uniform text."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**dict(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=vocab_size), **settings}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0)
    return model


def write(path, model=None, tokenizer=None, **more):
    """A checkpoint as train.py's save_best has it."""
    model = model or gpt()
    spec = {'tokenizer': (tokenizer or CharTokenizer(CHARS)).spec()} if tokenizer is not False else {}
    path.parent.mkdir(exist_ok=True)
    save_checkpoint(str(path), {'model': model.state_dict(), 'model_args': model.config.model_args(), 'iter_num': 7,
                                'best_val_loss': 1.5, 'config': {'dataset': 'tiny'}, **spec, **more})
    return path


@pytest.fixture
def out(tmp_path):
    """A folder with a best.pt, as training leaves it."""
    write(tmp_path / 'out' / 'best.pt')
    return tmp_path / 'out'


@pytest.fixture
def draw(capsys, out):
    """draw(**flags) runs sample.main; returns the texts, prompts included."""
    def run(*words, **flags):
        flags = {'out_dir': out, 'device': 'cpu', 'num_samples': 1, 'max_new_tokens': 20, 'start': 'ab', **flags}
        assert sample.main([*words, *(f'--{k}={v}' for k, v in flags.items())]) in (None, 0)
        run.out, run.err = capsys.readouterr()
        assert run.out.endswith(END)
        return run.out.removesuffix(END).split(END)
    return run


def refusal(**flags):
    """The one sentence that a command ends with."""
    flags = {'device': 'cpu', 'num_samples': 1, 'max_new_tokens': 5, 'start': 'ab', **flags}
    with pytest.raises(ValueError) as e:
        sample.main([f'--{k}={v}' for k, v in flags.items()])
    assert str(e.value).strip() and '\n' not in str(e.value)
    return str(e.value)


def play(monkeypatch, *tokens):
    """Has GPT.generate yield these tokens to each sequence, whatever the weights; returns the list of its calls."""
    calls = []

    def generate(self, prompts, max_new_tokens, num_samples=1, stop=(), stopped=None, **kwargs):
        calls.append((prompts, max_new_tokens, {'stop': stop, **kwargs}))
        for token in tokens:
            yield [(i, token, -0.5) for i in range(len(prompts) * num_samples) if i not in stopped]

    monkeypatch.setattr('sample.generate', generate)
    return calls


# -----------------------------------------------------------------------------
# the prompt

def test_the_prompt_comes_first_then_its_continuation(draw):
    for start in ('ab', 'h', '\nfed cab', 'a' * 7):
        (text,) = draw(start=start)
        assert text.startswith(start) and len(text) == len(start) + 20 and set(text) <= set(CHARS)


def test_a_prompt_may_come_from_a_file_as_it_is(draw, tmp_path):
    path = tmp_path / 'prompt.txt'
    path.write_bytes(b'cab\n fed\n')
    (text,) = draw(start=f'FILE:{path}')
    assert text.startswith('cab\n fed\n') and len(text) == 29
    assert draw(start='cab\n fed\n') == [text]


def test_line_ends_of_a_prompt_file_are_not_translated(out, tmp_path):
    path = tmp_path / 'prompt.txt'
    path.write_bytes(b'a\r\nb')
    assert repr('\r') in refusal(out_dir=out, start=f'FILE:{path}')


def test_a_prompt_file_that_cannot_be_read_says_so(out, tmp_path):
    assert 'nowhere.txt cannot be read: No such file' in refusal(out_dir=out, start='FILE:nowhere.txt')
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9')
    assert 'latin.txt are not UTF-8 text: byte 0xe9 at 3' in refusal(out_dir=out,
                                                                    start=f'FILE:{tmp_path / "latin.txt"}')
    assert "start='ab\\udcff' holds bytes that are not UTF-8" in refusal(out_dir=out, start='ab\udcff')


def test_prompt_files_may_be_compressed_or_begin_with_a_byte_order_mark(draw, tmp_path, monkeypatch):
    expected = draw(start='cab')
    rows = b'\xef\xbb\xbf"cab"\n'
    for name, content in (('a.txt', b'\xef\xbb\xbfcab'), ('a.JSONL', rows), ('a.jsonl.gz', gzip.compress(rows))):
        (tmp_path / name).write_bytes(content)
        assert draw(start=f'FILE:{tmp_path / name}') == expected
    monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(b'\xef\xbb\xbfcab')))
    assert draw(start='-') == expected


@pytest.mark.parametrize('flags', [['--start=-'], ['--score=-'], ['--chat', '--template=plain']])
def test_a_closed_standard_input_is_named(out, monkeypatch, flags):
    monkeypatch.setattr(sys, 'stdin', None)
    assert 'standard input is closed' in refusal_of(out, *flags)


def test_characters_that_the_tokenizer_does_not_know_are_named(out):
    assert "the characters 'xé' do not occur" in refusal(out_dir=out, start='abéx')


@pytest.mark.parametrize('eot, first', [(False, 0), (True, len(CHARS))])
def test_an_empty_prompt_starts_a_document(draw, out, monkeypatch, eot, first):
    write(out / 'best.pt', gpt(len(CHARS) + eot), CharTokenizer(CHARS, eot=eot))
    (text,) = draw(start='')
    assert text and set(text) <= set(CHARS)
    calls = play(monkeypatch, 2, 3)
    assert draw(start='') == ['ab']
    assert calls[0][0] == [[first]]


def test_of_a_prompt_longer_than_the_context_the_end_counts(draw):
    """block_size is 8."""
    (long,) = draw(start='habc' * 5 + 'fedcbahg')
    (short,) = draw(start='fedcbahg')
    assert long.startswith('habc' * 5 + 'fedcbahg')
    assert long.removeprefix('habc' * 5) == short


def test_the_end_of_text_in_a_prompt_is_its_id(draw, out, monkeypatch):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    calls = play(monkeypatch, 33)
    assert draw(start='a<|endoftext|>b') == ['a<|endoftext|>b!']
    assert calls[0][0] == [[97, 256, 98]]


# -----------------------------------------------------------------------------
# the draw

def test_a_seed_gives_the_same_texts_twice_and_another_seed_others(draw):
    first = draw(seed=1, num_samples=3)
    assert draw(seed=1, num_samples=3) == first
    assert len(set(first)) == 3  # each sample has a seed of its own
    assert set(draw(seed=99, num_samples=3)).isdisjoint(first)


def test_a_sample_does_not_depend_on_those_before_it(draw):
    assert draw(seed=1, num_samples=3)[2] == draw(seed=3)[0]


@pytest.mark.parametrize('num', [1, 2, 5])
def test_num_samples_is_the_number_of_texts(draw, num):
    texts = draw(num_samples=num, max_new_tokens=3)
    assert len(texts) == num and all(len(text) == 5 for text in texts)


@pytest.mark.parametrize('num', [0, 1, 7, 30])
def test_max_new_tokens_is_the_length(draw, num):
    (text,) = draw(max_new_tokens=num)
    assert len(text) == 2 + num


def test_temperature_0_is_the_likeliest_token_each_time(draw, out):
    model = gpt().eval()
    idx = [2, 3]
    for _ in range(20):
        with torch.no_grad():
            idx.append(model(torch.tensor([idx[-8:]]))[0].argmax().item())
    expected = ''.join(CHARS[i] for i in idx)
    assert draw(temperature=0, seed=1, num_samples=2) == [expected, expected]
    assert len(draw(temperature=0, num_samples=None)) == 1 and len(draw(num_samples=None)) == 3
    assert draw(temperature=1.0, top_k=1) == [expected]
    assert draw(temperature=1.0, top_p=1e-6) == [expected]
    assert draw(temperature=8.0) != [expected]


@pytest.mark.parametrize('flags', [{'top_k': 2}, {'top_k': 'None'}, {'top_k': 99}, {'top_p': 0.5}, {'top_p': 1}])
def test_top_k_and_top_p_leave_the_likeliest(draw, flags):
    """The first token after the prompt, over many seeds, stays inside the set and fills it."""
    with torch.no_grad():
        probs = gpt().eval()(torch.tensor([[2, 3]]))[0].div(8.0).softmax(-1)  # from 0.26 down to 0.02
    order = probs.argsort(descending=True).tolist()
    if flags.get('top_k') == 2:
        most = 2
    elif flags.get('top_p') == 0.5:
        most = next(n for n in range(1, 10) if probs[order[:n]].sum() >= 0.5)
        assert 2 < most < 9, 'or the test shows nothing'
    else:
        most = len(CHARS)
    texts = draw(num_samples=300, max_new_tokens=1, temperature=8.0, **flags)
    assert {text[2:] for text in texts} == {CHARS[i] for i in order[:most]}


def test_padding_of_the_vocabulary_is_never_drawn(draw, out):
    """nanoGPT pads 50257 to 50304 and may draw ids that are no tokens."""
    model = gpt(64)
    with torch.no_grad():
        model.lm_head.weight[len(CHARS):] = 0.0
        model.lm_head.weight[:len(CHARS)] *= 0.01
        # without the limit nine of ten draws would be padding
    write(out / 'best.pt', model)
    for text in draw(num_samples=5, max_new_tokens=30, temperature=5.0):
        assert len(text) == 32 and set(text) <= set(CHARS)


def test_the_end_of_text_ends_the_text_and_is_not_printed(draw, out, monkeypatch):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    calls = play(monkeypatch, 104, 105, 256)
    assert draw() == ['abhi']
    (_, _, kwargs), = calls
    assert kwargs['stop'] == {256} and kwargs['vocab'] == 257


def test_generation_stops_at_the_end_of_text(draw, out):
    model = gpt(257)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()  # every logit is 0, and argmax takes the first of them
    write(out / 'best.pt', model, CharTokenizer('', eot=True))
    assert draw(start='', temperature=0, max_new_tokens=1000) == ['']


# -----------------------------------------------------------------------------
# text as it comes

def test_a_character_of_several_tokens_is_printed_when_it_is_complete(draw, out, monkeypatch):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    play(monkeypatch, *'é€😀'.encode())
    assert draw(start='<') == ['<é€😀']
    text = sample.Text(ByteTokenizer(), [], {256})
    pieces = [text.add(token, 0.0) for token in 'é€😀'.encode()]
    assert [piece for piece in pieces if piece] == ['é', '€', '😀']
    assert pieces[0] == '' and pieces[1] == 'é'  # not one token late


def test_bytes_that_never_become_a_character_are_the_replacement_sign(draw, out, monkeypatch):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    play(monkeypatch, 0xff, 97, *'€'.encode()[:2])
    assert draw(start='<') == ['<�a�']
    play(monkeypatch, *'€'.encode()[:2], 256)
    assert draw(start='<') == ['<�']


def test_text_is_flushed_piece_by_piece(out, monkeypatch):
    """Streaming means that the first token is seen before the second is computed."""
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    seen = []

    class Screen(io.StringIO):
        shown = ''

        def flush(self):
            self.shown = self.getvalue()

    screen = Screen()

    def generate(self, prompts, *args, **kwargs):
        for token in b'xyz':
            seen.append(screen.shown)
            yield [(0, token, 0.0)]

    monkeypatch.setattr('sample.generate', generate)
    monkeypatch.setattr(sys, 'stdout', screen)
    sample.main([f'--out_dir={out}', '--start=<', '--num_samples=1', '--device=cpu'])
    assert seen == ['<', '<x', '<xy']


# -----------------------------------------------------------------------------
# where a text ends

@pytest.mark.parametrize('stop, written, expected', [
    ('lo', 'hello', 'hel'), ('l|||e', 'hello', 'h'), ('ell', 'heelal', 'heelal'), ('xy', 'axaxyb', 'axa'),
    (r'\n', 'ab\ncd', 'ab'), ('€', 'a€b', 'a'), ('aab', 'aaab', 'a'), ('h', 'hello', ''), ('lo', 'hel', 'hel')])
def test_a_stop_text_ends_the_sample_and_is_not_printed(draw, out, monkeypatch, stop, written, expected):
    """Here each byte is a token: every stop text lies across several."""
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    play(monkeypatch, *written.encode())
    assert draw(start='<', stop=stop) == [f'<{expected}']


def test_what_may_become_a_stop_text_waits_and_no_more():
    text = sample.Text(ByteTokenizer(), ['lo!'], set())
    assert [text.add(token, 0.0) for token in b'hello lo!x'[:9]] == ['h', 'e', '', 'l', '', 'lo ', '', '', '']
    assert text.finish == 'stop' and text.text == 'hello ' and len(text.tokens) == 9


def test_the_name_of_a_special_id_stops_and_so_does_the_end_of_text(draw, out, monkeypatch):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    calls = play(monkeypatch, 97)
    draw(stop='<|endoftext|>|||zz')
    assert calls[0][2]['stop'] == {256} and sample.stops_of(ByteTokenizer(), '<|endoftext|>|||zz') == (['zz'], {256})


def test_a_stopped_sequence_is_not_computed_on(draw, out, monkeypatch):
    """The stop text is found here, and generation hears of it."""
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    seen = []

    def generate(self, prompts, max_new_tokens, num_samples=1, stopped=None, **kwargs):
        for token in b'xyz':
            seen.append(set(stopped))
            yield [(i, token, 0.0) for i in range(2) if i not in stopped]
    monkeypatch.setattr('sample.generate', generate)
    assert draw(num_samples=2, stop='y') == ['abx', 'abx'] and seen == [set(), set(), {0, 1}]


def test_a_full_context_slides_or_stops(draw):
    assert len(draw(past_context='stop')[0]) == 2 + 7  # block_size is 8: six more are fed, and a seventh drawn
    assert len(draw(past_context='slide')[0]) == 22


# -----------------------------------------------------------------------------
# several prompts, and output for programs

def lines(draw, **flags):
    """The objects of --output=jsonl."""
    flags = {'output': 'jsonl', **flags}
    with pytest.raises(AssertionError):
        draw(**flags)  # it expects text
    return [json.loads(line) for line in draw.out.splitlines()]


@pytest.fixture(params=['prompts.jsonl', 'PROMPTS.NDJSON'])
def prompts(tmp_path, request):
    path = tmp_path / request.param
    path.write_text('{"prompt": "ab", "id": 1}\n"cde"\n\n{"prompt": ""}\n{"prompt": "habcdefgh"}\n')
    return f'FILE:{path}'


@pytest.mark.parametrize('batch_size', [1, 3, 64])
def test_prompts_of_a_file_are_drawn_together_as_each_alone(draw, prompts, batch_size):
    """Streamed text = batch text, whatever is drawn at once."""
    alone = [text for start in ('ab', 'cde', '', 'habcdefgh') for text in draw(start=start, num_samples=2)]
    assert draw(start=prompts, num_samples=2, batch_size=batch_size) == alone
    told = lines(draw, start=prompts, num_samples=2, batch_size=batch_size)
    assert [line['prompt'] + line['text'] for line in told] == alone
    assert [line['seed'] for line in told] == [1337, 1338] * 4
    assert {line['finish'] for line in told} == {'length'} and set(told[0]) == {'prompt', 'seed', 'text', 'finish'}
    assert 'the prompt has 9 tokens, and the context holds 8: its end is taken' in draw.err


def test_json_is_ascii_where_the_output_is_not_utf8(out, monkeypatch, tmp_path):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    for encoding, has in (('ascii', b'caf\\u00e9 \\ud83d\\ude00'), ('utf-8', 'café 😀'.encode())):
        with open(tmp_path / 'told', 'w', encoding=encoding, errors='backslashreplace') as f:
            monkeypatch.setattr(sys, 'stdout', f)
            sample.main([f'--out_dir={out}', '--device=cpu', '--output=jsonl', '--start=café 😀', '--num_samples=1',
                         '--max_new_tokens=3'])
        told = (tmp_path / 'told').read_bytes()
        assert has in told and json.loads(told)['prompt'] == 'café 😀'


def test_jsonl_says_what_ended_a_text(draw, out, monkeypatch):
    assert [line['finish'] for line in lines(draw, past_context='stop')] == ['context']
    assert [(line['finish'], line['text']) for line in lines(draw, max_new_tokens=0)] == [('length', '')]
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    play(monkeypatch, 97, 256)
    assert [(line['finish'], line['text']) for line in lines(draw)] == [('stop', 'a')]


def test_log_probabilities_in_jsonl(draw):
    (line,) = lines(draw, logprobs=True, max_new_tokens=6)
    model, context = gpt().eval(), [2, 3]
    assert ''.join(CHARS[i] for i in line['tokens']) == line['text']
    for token, logprob in zip(line['tokens'], line['logprobs'], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([context]))[0].log_softmax(-1)[token].item()
        assert logprob == pytest.approx(expected, abs=1e-4)
        context.append(token)


def test_the_prompt_may_come_from_standard_input(draw, monkeypatch):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'cab\n')))
    (text,) = draw(start='-')
    assert text.startswith('cab\n') and draw(start='cab\n') == [text]


@pytest.mark.parametrize('content, words', [
    ('{"prompt": "a"}\n{"text": "b"}\n', 'line 2: a prompt is a text, or an object with the field prompt'),
    ('{"prompt": 3}', 'line 1: a prompt is'), ('7', 'line 1: a prompt is'), ('{"prompt"', 'line 1: Expecting'),
    ('\n', 'holds no prompt')])
def test_prompt_files_that_hold_something_else(out, tmp_path, content, words):
    (tmp_path / 'p.jsonl').write_text(content)
    assert words in refusal(out_dir=out, start=f'FILE:{tmp_path / "p.jsonl"}')


def test_samples_are_printed_in_order_and_the_first_as_it_comes(capsys):
    """Sequence 1 is finished first, and waits."""
    def pieces():
        for i, piece, finish in [(0, 'a', None), (1, 'b', 'stop'), (0, 'c', None), (2, 'd', None), (0, '', 'stop'),
                                 (2, 'e', 'length')]:
            seen.append(capsys.readouterr().out)
            yield i, piece, types.SimpleNamespace(finish=finish)
    seen = []
    sample.in_order(pieces(), ['<', '(', '['])
    assert seen == ['<', 'a', '', 'c', '', END + '(b' + END + '[d']
    assert capsys.readouterr().out == 'e' + END


# -----------------------------------------------------------------------------
# settings of the draw that only change how it is computed

def test_int8_packed_and_compiled_are_asked_for_by_name(draw, out, monkeypatch):
    kinds, place = [], sample.place
    monkeypatch.setattr('hotloop.device.try_compile', lambda device: None)

    def placed(model, *where):
        decode = place(model, *where)
        kinds.append((type(model.lm_head).__name__, decode))
        return 'eager'
    monkeypatch.setattr(sample, 'place', placed)
    assert draw(compile=True) == draw(compile=False)
    assert len(draw(quantize='int8')[0]) == 22
    assert kinds == [('Linear', 'compiled'), ('Linear', 'eager'), ('Int8Linear', 'eager')]
    monkeypatch.setattr('hotloop.device.try_compile', lambda device: 'no compiler')
    assert 'torch.compile fails here: no compiler' in refusal(out_dir=out, compile=True)


def test_a_temperature_that_means_0_draws_one_text(draw, out):
    assert len(draw(num_samples='None', temperature=1e-9)) == 1 < len(draw(num_samples='None', temperature=1e-5))


def test_texts_end_at_a_tab(draw, out, monkeypatch):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    play(monkeypatch, *b'x\ty')
    assert draw(stop='\\t') == ['abx']


def test_a_penalty_and_min_p_act(draw):
    plain = draw(temperature=0)
    assert draw(temperature=0, repetition_penalty=50.0) != plain
    assert draw(temperature=5.0, min_p=1) == plain != draw(temperature=5.0)


# -----------------------------------------------------------------------------
# talking

@pytest.fixture
def talk(capsys, monkeypatch, out):
    """talk(lines, answers, **flags): a chat in which the model answers so; the prompts it was given, as text."""
    def run(said, answers, tokenizer=None, model=None, **flags):
        tokenizer, given = tokenizer or ByteTokenizer(), []
        write(out / 'best.pt', model or gpt(257, block_size=200), tokenizer, template='chatml')
        said, answers = iter(said), iter(answers)

        def listen(prompt):
            try:
                return next(said)
            except StopIteration:
                raise EOFError from None

        def generate(self, prompts, *args, stop=(), stopped=None, **kwargs):
            given.append(tokenizer.decode(prompts[0]).decode())
            for token in next(answers).encode():
                if not stopped:
                    yield [(0, token, 0.0)]
        monkeypatch.setattr('builtins.input', listen)
        monkeypatch.setattr('sample.generate', generate)
        flags = {'out_dir': out, 'device': 'cpu', 'chat': True, **flags}
        assert sample.main([f'--{k}={v}' for k, v in flags.items()]) == 0
        run.out, run.err = capsys.readouterr()
        return given
    return run


def test_a_chat_is_the_template_that_training_saw(talk):
    given = talk(['Two and two?', 'And one?'], ['Four.<|im_end|>x', 'Five.<|im_end|>'])
    rows = [('user', 'Two and two?'), ('assistant', 'Four.'), ('user', 'And one?'), ('assistant', 'Five.')]
    whole = ''.join(text for text, *_ in render(rows, 'chatml'))
    assert whole.startswith(given[1]) and whole[len(given[1]):] == 'Five.<|im_end|>'
    assert given[1].startswith(given[0]) and given[0].endswith('<|im_start|>assistant\n')
    assert talk.out == 'Four.\nFive.\n\n'  # the mark is not printed, and the end of the input is an end


@pytest.mark.parametrize('end', ['', 'exit', '  '])
def test_an_empty_line_or_exit_ends_the_chat(talk, end):
    assert len(talk(['a', end, 'b'], ['x', 'y'])) == 1


@pytest.mark.parametrize('template, prompt', [
    ('plain', 'hi\n'), ('joined', 'hi'), ('gemma', '<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n'),
    ('llama3', '<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>'
     '\n\n')])
def test_a_template_by_name(talk, template, prompt):
    assert talk(['hi'], ['x'], template=template) == [prompt]


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(talk):
    given = talk(['one ' * 10, 'two ' * 10, 'three'], ['first', 'second', 'third'], max_new_tokens=20)
    assert 'one' not in given[2] and 'two' in given[2] and given[2].startswith('<|im_start|>user\ntwo')
    assert 'the context of 200 tokens is full; the oldest 2 turns are forgotten' in talk.err
    given = talk(['x' * 300, 'short'], ['first'], max_new_tokens=20)
    assert 'too much for a context of 200' in talk.err and len(given) == 1 and 'xxx' not in given[0]
    given = talk(['early', 'x' * 300, 'late'], ['first', 'second'], max_new_tokens=20)  # what is refused costs no turn
    assert 'forgotten' not in talk.err and len(given) == 2 and 'early' in given[1] and 'late' in given[1]


def test_a_line_of_a_chat_is_kept_as_it_was_typed(talk):
    """Prompts of prompt and completion may end in a blank."""
    assert talk(['say 3: '], ['x'], template='joined') == ['say 3: ']


def test_a_line_that_cannot_be_read_does_not_end_a_chat(talk):
    def listen():
        yield 'ab\udcff'
        yield 'h'
    assert talk(listen(), ['x'], template='plain') == ['h\n'] and 'that was not UTF-8 text' in talk.err
    given = talk(['xyz', 'h'], ['a'], CharTokenizer(CHARS), gpt(10, block_size=200), template='plain')
    assert given == ['h\n'] and "note: the characters 'xyz' do not occur" in talk.err
    talk(['a' * 300], [], template='plain')
    assert 'too much for a context' in talk.err and 'fewer words' not in talk.err


def test_invalid_utf8_typed_into_a_chat(out, monkeypatch, capsys):
    """As Python decodes it in most locales."""
    write(out / 'best.pt', gpt(257, block_size=64), ByteTokenizer())
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'hi\xff\n'), encoding='utf-8', errors='strict'))
    assert sample.main([f'--out_dir={out}', '--device=cpu', '--chat', '--template=plain']) == 0
    assert 'that was not UTF-8 text' in capsys.readouterr().err


def test_a_chat_in_marks_that_the_tokenizer_does_not_know(out):
    assert "the characters '<>_imnrstu|' do not occur" in refusal_of(out, '--chat', '--template=chatml')


def test_a_chat_without_a_known_template_names_the_setting(out):
    assert '--template: plain, joined, alpaca, chatml' in refusal_of(out, '--chat')
    write(out / 'best.pt', template=['chatml'])
    assert "it says ['chatml']" in refusal_of(out, '--chat')


def refusal_of(out, *flags):
    with pytest.raises(ValueError) as e:
        sample.main([f'--out_dir={out}', '--device=cpu', *flags])
    return str(e.value)


@pytest.mark.parametrize('flags, words', [
    (['--chat', '--num_samples=2'], 'num_samples would do nothing in a chat'),
    (['--template=gemma'], 'template would do nothing without --chat'),
    (['--text_field=a'], 'text_field would do nothing without'),
    (['--init_from=gpt2-mine'], "'gpt2-mine' is not one of gpt2, gpt2-medium"),
    (['--score=a.txt', '--top_k=5', '--seed=1'], 'seed, top_k would do nothing where a text is scored'),
    (['--score=a.txt', '--chat'], 'chat and score are two things'),
    (['--logprobs'], 'logprobs=True needs output=jsonl'),
    (['--stop=a|||'], 'has an empty text'),
    (['--repetition_penalty=0'], 'repetition_penalty=0.0 must be from 0.01 to 100'),
    (['--min_p=0'], 'min_p=0.0 must be above 0'), (['--batch_size=0'], 'batch_size=0 must be at least 1'),
    (['--past_context=forget'], 'expected slide or stop'), (['--quantize=int4'], 'expected none or int8')])
def test_settings_of_what_is_to_be_done(out, flags, words):
    assert words in refusal_of(out, *flags)


# -----------------------------------------------------------------------------
# the loss on a text

def scored(capsys, out, source, *flags):
    assert sample.main([f'--out_dir={out}', '--device=cpu', f'--score={source}', '--output=jsonl', *flags]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_hand(model, ids, T):
    """Each token after as much of the context as the windows give it: at least half, from the second one on."""
    nats = 0.0
    for i in range(1, len(ids)):
        start = max(-(-(i - T) // (T // 2)), 0) * (T // 2)
        with torch.no_grad():
            nats -= model(torch.tensor([ids[start:i]]))[0].log_softmax(-1)[ids[i]].item()
    return nats


@pytest.mark.parametrize('eot', [False, True])
def test_scores_are_the_models_log_probabilities(capsys, out, tmp_path, eot):
    model = gpt(len(CHARS) + eot).eval()
    write(out / 'best.pt', model, CharTokenizer(CHARS, eot=eot))
    text = 'habcd efgh\nfed cab' * 3
    (tmp_path / 'a.txt').write_text(text)
    first, total = scored(capsys, out, tmp_path / 'a.txt')
    ids = [len(CHARS)] * eot + [CHARS.index(c) for c in text]
    expected = by_hand(model, ids, 8)
    assert first['tokens'] == len(ids) - 1 and first['bytes'] == len(ids) - 1  # each character is a byte
    assert first['loss'] == pytest.approx(expected / (len(ids) - 1), rel=1e-5)
    assert first['bpb'] == pytest.approx(expected / math.log(2) / (len(ids) - 1), rel=1e-5)
    assert first['perplexity'] == pytest.approx(math.exp(first['loss']))
    assert {**first, 'document': 'all'} == total


def test_documents_are_scored_apart_and_summed(capsys, out, tmp_path):
    """Between <|endoftext|>, of several files, and rows whose answers alone count."""
    write(out / 'best.pt', gpt(257, block_size=256), ByteTokenizer())
    folder = tmp_path / 'texts'
    folder.mkdir()
    (folder / 'a.txt').write_text('one\n<|endoftext|>\ntwo two\n')
    (folder / 'b.txt').write_text('three\n')
    told = scored(capsys, out, folder)
    assert [(line['document'], line['tokens']) for line in told] == [(1, 3), (2, 7), (3, 6), ('all', 16)]
    assert [line.get('file') for line in told] == ['a.txt', 'a.txt', 'b.txt', None]
    assert told[-1]['loss'] * 16 == pytest.approx(sum(line['loss'] * line['tokens'] for line in told[:-1]))
    (tmp_path / 'rows.jsonl').write_text('{"prompt": "Q: 2+2?", "completion": " 4"}\n{"text": "plain"}\n')
    assert [line['tokens'] for line in scored(capsys, out, tmp_path / 'rows.jsonl')] == [2, 5, 7]
    for size in (1, 2):
        assert [line['loss'] for line in scored(capsys, out, folder, f'--batch_size={size}')] == \
            pytest.approx([line['loss'] for line in told], rel=1e-5)


def test_the_mark_between_documents_is_seen_in_compressed_text_and_across_blocks(capsys, out, tmp_path, monkeypatch):
    write(out / 'best.pt', gpt(257, block_size=64), ByteTokenizer())
    text = b'one<|endoftext|>two'
    (tmp_path / 'a.txt').write_bytes(text)
    (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(text))
    told = scored(capsys, out, tmp_path / 'a.txt')
    assert [line['tokens'] for line in told] == [3, 3, 6]
    assert scored(capsys, out, tmp_path / 'a.txt.gz') == told
    for size in range(1, 20):
        monkeypatch.setattr(sample.prepare, 'byte_blocks',
                            lambda path, n=size: (text[i:i + n] for i in range(0, len(text), n)))
        assert holds('a.txt', b'<|endoftext|>') and not holds('a.txt', b'<|endofthis|>')


def test_a_model_whose_loss_is_not_finite_has_no_score(out, tmp_path):
    model = gpt()
    with torch.no_grad():
        model.lm_head.weight[3, 4] = math.nan
    write(out / 'best.pt', model)
    (tmp_path / 'a.txt').write_text('habcd')
    assert 'a loss on a.txt that is not finite' in refusal_of(out, f'--score={tmp_path / "a.txt"}')


def test_scores_as_a_table(capsys, out, tmp_path):
    (tmp_path / 'a.txt').write_text('habcd efgh')
    assert sample.main([f'--out_dir={out}', '--device=cpu', f'--score={tmp_path / "a.txt"}']) == 0
    head, first, total = capsys.readouterr().out.splitlines()
    assert head.split() == ['document', 'begins', 'tokens', 'bytes', 'loss', 'perplexity', 'bits', 'per', 'byte']
    assert first.split()[:3] == ['1', 'habcd', 'efgh'] and total.split()[:3] == ['all', '9', '9']
    assert len({len(line.rsplit('  ', 1)[0]) for line in (head, first, total)}) == 1  # columns stand below each other


def test_a_table_of_several_files_names_them(capsys, out, tmp_path):
    for name in ('a.txt', 'b' * 30 + '.txt'):
        (tmp_path / name).write_text('habcd efgh')
    assert sample.main([f'--out_dir={out}', '--device=cpu', f'--score={tmp_path}/*.txt']) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ['document', 'file']
    assert [line.split()[1] for line in lines] == ['a.txt', 'b' * 20 + '.txt', '18']


def test_bytes_that_are_not_utf8_are_scored_only_when_asked(capsys, out, tmp_path):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    (tmp_path / 'a.txt').write_bytes(b'ab\xffcd')
    assert '--bad_utf8=replace' in refusal_of(out, f'--score={tmp_path / "a.txt"}')
    assert scored(capsys, out, tmp_path / 'a.txt', '--bad_utf8=replace')[0]['tokens'] == 7
    assert 'bad_utf8 would do nothing' in refusal_of(out, '--bad_utf8=replace')


@pytest.mark.parametrize('has, flags, template', [
    ({'template': 'alpaca'}, [], 'alpaca'), ({'template': 'alpaca'}, ['--template=gemma'], 'gemma'), ({}, [], 'chatml'),
    ({'template': 'joined'}, [], 'joined')])
def test_rows_are_scored_in_the_template_of_the_models_data(capsys, tmp_path, has, flags, template):
    model, tokenizer = gpt(257, block_size=256), ByteTokenizer()
    write(tmp_path / 'out' / 'best.pt', model, tokenizer, **has)
    row = {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'ho'}]}
    (tmp_path / 'a.jsonl').write_text(json.dumps(row))
    first, _ = scored(capsys, tmp_path / 'out', tmp_path / 'a.jsonl', *flags)
    ids, mask = encode_parts(tokenizer, render([('user', 'hi'), ('assistant', 'ho')], template))
    ids, mask = torch.from_numpy(ids).long()[None], torch.from_numpy(mask)[None]
    with torch.no_grad():
        nats = model.eval()(torch.cat([torch.tensor([[256]]), ids[:, :-1]], 1), ids.where(mask > 0, -1)).item()
    assert first['tokens'] == mask.sum() and first['loss'] == pytest.approx(nats / mask.sum().item(), rel=1e-4)


def test_a_field_of_rows_is_scored_by_name(capsys, out, tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"body": "ab"}')
    assert '--text_field' in refusal_of(out, f'--score={tmp_path / "a.jsonl"}')
    assert scored(capsys, out, tmp_path / 'a.jsonl', '--text_field=body')[-1]['bytes'] == 1  # there is nothing before a
    (tmp_path / 'a.txt').write_text('ab')
    for flag in ('--text_field=body', '--template=gemma'):
        assert 'acts on rows, and there is none' in refusal_of(out, f'--score={tmp_path / "a.txt"}', flag)


def test_what_begins_a_document_begins_a_prompt(draw, out, monkeypatch):
    """Where the data was made with --bos; once, whoever writes it."""
    spec = {'kind': 'bpe', 'tokens': [chr(b) for b in range(256)], 'pattern': GPT2_SPLIT, 'nfc': False,
            'specials': {'<|begin|>': 256, '<|end|>': 257}, 'eot': 257, 'bos': 256}
    for more, expected in (({'bos': 256}, [256, 97]), ({}, [97])):
        write(out / 'best.pt', gpt(258), tokenizer_from(spec), **more)
        calls = play(monkeypatch, 98)
        draw(start='a')
        assert calls[-1][0] == [expected]
    write(out / 'best.pt', gpt(258), tokenizer_from(spec), bos=256)
    for start, expected in (('<|begin|>a', [256, 97]), ('', [256])):
        calls = play(monkeypatch, 98)
        draw(start=start)
        assert calls[-1][0] == [expected]


def test_a_folder_of_weights_without_its_tokenizer_is_refused(tmp_path, monkeypatch):
    """And one whose tokenizer has ids that the model does not know."""
    (tmp_path / 'config.json').write_text('{"vocab_size": 300}')
    monkeypatch.setattr('hotloop.pretrained.load_gpt2', lambda folder: gpt(300))
    assert "holds no tokenizer.json, and GPT-2's tokenizer has another vocabulary than its 300 ids" in \
        refusal(init_from=tmp_path)
    monkeypatch.setattr(sample.prepare, 'pretrained', lambda *args: (str(tmp_path), CharTokenizer(CHARS).spec()))
    monkeypatch.setattr('hotloop.pretrained.load_gpt2', lambda folder: gpt(9))
    assert 'has 10 ids, and the model knows 9' in refusal(init_from=tmp_path)
    monkeypatch.undo()
    write(tmp_path / 'out' / 'best.pt', gpt(9))
    assert 'has 10 ids, and the model knows 9' in refusal(out_dir=tmp_path / 'out')


@pytest.mark.slow
def test_output_onto_a_full_disk_is_a_sentence(out):
    with open('/dev/full', 'w') as full:
        ended = subprocess.run([sys.executable, f'{REPO}/sample.py', f'--out_dir={out}', '--device=cpu'], check=False,
                               stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith('error: the output could not be written')


@pytest.mark.slow
def test_output_that_nobody_reads_is_no_error(out):
    command = f'{sys.executable} {REPO}/sample.py --out_dir={out} --device=cpu --num_samples=50 | head -1'
    ended = subprocess.run(['bash', '-c', command + '; exit ${PIPESTATUS[0]}'], check=False, capture_output=True,
                           text=True)
    assert ended.returncode in (0, 141) and 'Traceback' not in ended.stderr and 'Exception' not in ended.stderr


def test_a_score_of_nothing_says_so(out, tmp_path):
    (tmp_path / 'empty.txt').write_text('')
    assert 'holds no token to score' in refusal_of(out, f'--score={tmp_path / "empty.txt"}')
    assert 'no-such is no file or folder' in refusal_of(out, '--score=no-such')


def test_ids_of_an_unknown_tokenizer_are_not_scored(out, tmp_path):
    header = [20240520, 1, 4, *[0] * 253]
    data = b''.join(n.to_bytes(4, 'little') for n in header) + b'\1\0\2\0\3\0\4\0'
    (tmp_path / 'ids.bin').write_bytes(data)
    assert 'score the text itself' in refusal_of(out, f'--score={tmp_path / "ids.bin"}')


# -----------------------------------------------------------------------------
# which checkpoint

def test_a_damaged_best_is_named_and_the_latest_taken(draw, out):
    write(out / 'ckpt.pt')
    whole = draw()
    data = bytearray((out / 'best.pt').read_bytes())
    data[len(data) // 2] ^= 1
    (out / 'best.pt').write_bytes(data)
    assert draw() == whole and 'best.pt is damaged' in draw.err and 'the latest checkpoint is taken' in draw.err
    assert 'is damaged' in refusal(init_from=out / 'best.pt')


def test_best_is_preferred_and_said_on_stderr(draw, out):
    write(out / 'ckpt.pt', gpt(seed=1), iter_num=9)
    best = draw()
    assert f'weights: {out / "best.pt"}, step 7; tokenizer: from the checkpoint' in draw.err
    assert 'device: cpu, float32\n' in draw.err
    assert 'weights:' not in draw.out and 'device:' not in draw.out  # stdout is the text alone
    assert draw(out_dir='elsewhere', init_from=out) == best  # a folder by init_from
    (out / 'best.pt').unlink()
    latest = draw()
    assert f'weights: {out / "ckpt.pt"}, step 9' in draw.err
    assert latest != best
    assert draw(out_dir=out / 'ckpt.pt') == latest and draw(out_dir='elsewhere', init_from=out / 'ckpt.pt') == latest


def test_without_a_checkpoint_it_says_how_to_make_one(tmp_path):
    for folder in (tmp_path / 'nothing', tmp_path):
        assert refusal(out_dir=folder) == (f'there is no checkpoint in {str(folder)!r}; train one with: '
                                           f'python train.py --out_dir={folder}')
    assert 'is no file, no folder with a checkpoint' in refusal(init_from=tmp_path / 'nothing.pt')


@pytest.mark.parametrize('preset', ['gpt2', 'modern'])
def test_every_preset_is_rebuilt_from_its_checkpoint(draw, out, preset):
    write(out / 'best.pt', gpt(preset=preset, bias=True))
    (text,) = draw(start='abcdefgh', max_new_tokens=40)
    assert len(text) == 48 and set(text) <= set(CHARS)


@pytest.mark.parametrize('flag, words', [
    ('--num_samples=0', 'num_samples=0 must be at least 1'),
    ('--max_new_tokens=-1', 'max_new_tokens=-1 must be at least 0'),
    ('--temperature=-0.1', 'temperature=-0.1 must be at least 0'),
    ('--temperature=nan', 'expected a number'),
    ('--top_k=0', 'top_k=0 must be at least 1'),
    ('--top_p=0', 'top_p=0.0 must be above 0 and at most 1'),
    ('--top_p=1.5', 'top_p=1.5 must be above 0 and at most 1'),
    ('--seed=-1', 'seed=-1 must be at least 0'),
    ('--seed=99999999999999999999', 'seed=99999999999999999999'),  # a generator takes 64 bits
    ('--dtype=float8', 'expected auto, float32, bfloat16 or float16'),
    ('--device=tpu', "device='tpu' is not one of"),
    ('--strat=a', "did you mean 'start'?"),
])
def test_settings_that_cannot_work_are_refused(out, flag, words):
    with pytest.raises(ValueError) as e:
        sample.main([f'--out_dir={out}', '--start=ab', '--max_new_tokens=1', flag])
    assert words in str(e.value)


def test_the_script_from_another_folder_prints_text_on_stdout_and_one_line_of_error(out, tmp_path):
    def script(*flags):
        return subprocess.run([sys.executable, os.path.join(REPO, 'sample.py'), '--device=cpu', *flags], cwd=tmp_path,
                              capture_output=True, text=True, check=False, encoding='utf-8')
    done = script('--start=ab', '--num_samples=2', '--max_new_tokens=5')
    assert done.returncode == 0 and done.stdout.count(END) == 2 and done.stdout.startswith('ab')
    assert done.stderr.splitlines() == [
        f'weights: {os.path.join("out", "best.pt")}, step 7; tokenizer: from the checkpoint', 'device: cpu, float32']
    done = script('--start=é')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.splitlines()[-1].startswith("error: the characters 'é' do not occur")
    assert 'Traceback' not in done.stderr


# -----------------------------------------------------------------------------
# nanoGPT's checkpoints, which carry no tokenizer

@pytest.fixture
def nanogpt(tmp_path):
    """ckpt.pt as nanoGPT's train.py writes it from a compiled model, with its dataset's meta.pkl under data/."""
    def make(vocab_size=10, chars=CHARS, dataset='shakespeare_char'):
        model = gpt(vocab_size)
        args = dict(n_layer=2, n_head=2, n_embd=16, block_size=8, bias=False, vocab_size=vocab_size, dropout=0.0)
        (tmp_path / 'theirs').mkdir(exist_ok=True)
        torch.save({'model': {f'_orig_mod.{k}': v for k, v in model.state_dict().items()}, 'optimizer': {},
                    'model_args': args, 'iter_num': 250, 'best_val_loss': torch.tensor(1.4),
                    'config': {'dataset': dataset, 'out_dir': 'theirs'}}, tmp_path / 'theirs' / 'ckpt.pt')
        if chars:
            folder = tmp_path / 'data' / dataset
            folder.mkdir(parents=True, exist_ok=True)
            itos = dict(enumerate(chars))
            meta = {'vocab_size': len(chars), 'itos': itos, 'stoi': {c: i for i, c in itos.items()}}
            (folder / 'meta.pkl').write_bytes(pickle.dumps(meta))
        return {'out_dir': tmp_path / 'theirs', 'data_dir': tmp_path / 'data'}
    return make


def test_nanogpts_checkpoint_finds_its_tokenizer_beside_its_data(draw, nanogpt, tmp_path):
    ours = draw(num_samples=2)
    assert draw(**nanogpt(), num_samples=2) == ours  # the same weights and characters, so the same text
    folder = os.path.join(tmp_path / 'data', 'shakespeare_char')
    assert f'ckpt.pt, step 250; tokenizer: from {folder}' in draw.err


def test_a_vocabulary_without_a_tokenizer_is_refused_and_gpt2s_is_never_assumed(nanogpt):
    """nanoGPT falls back to GPT-2's BPE whatever the size, and prints garbage."""
    flags = nanogpt(chars='')
    sentence = refusal(**flags)
    assert 'carries no tokenizer' in sentence and f'its vocabulary of {len(CHARS)}' in sentence
    assert '--data_dir' in sentence and 'shakespeare_char' in sentence


@pytest.mark.parametrize('chars', [CHARS + 'xyz', CHARS[:5]])
def test_a_dataset_of_another_vocabulary_is_not_the_checkpoints(nanogpt, chars):
    """The folder of that name may hold something else by now; nanoGPT never pads a character vocabulary."""
    assert 'carries no tokenizer' in refusal(**nanogpt(chars=chars), start='a')


def test_a_gpt2_checkpoint_of_nanogpt_gets_gpt2s_tokenizer(nanogpt, monkeypatch):
    """Of 50257 or padded 50304 ids, and nothing beside its data: openwebtext has no meta.pkl."""
    monkeypatch.setattr(sample.prepare, 'TiktokenTokenizer', lambda name: f'the tokenizer {name}')
    for size in (50257, 50304):
        tokenizer, source = sample.tokenizer_for({'config': {'dataset': 'openwebtext'}}, size, 'data-of-nobody')
        assert tokenizer == 'the tokenizer gpt2' and 'size of the vocabulary' in source
    for size in (50256, 50258, 257, 65):
        with pytest.raises(ValueError, match=f'its vocabulary of {size}'):
            sample.tokenizer_for({'config': {'dataset': 'openwebtext'}}, size, 'data-of-nobody')


def test_a_checkpoint_cannot_point_out_of_data_dir(nanogpt, tmp_path):
    flags = nanogpt(dataset='shakespeare_char')
    checkpoint = torch.load(tmp_path / 'theirs' / 'ckpt.pt', weights_only=True)
    torch.save({**checkpoint, 'config': {'dataset': '../data/shakespeare_char'}}, tmp_path / 'theirs' / 'ckpt.pt')
    assert 'must be a name below data_dir' in refusal(**flags)


# -----------------------------------------------------------------------------
# files that are not what they should be

def test_a_flipped_bit_among_the_weights_is_seen(out):
    """torch.load alone never looks at the checksum: it would sample from wrong numbers."""
    path = out / 'best.pt'
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as z:
        largest = max(z.infolist(), key=lambda info: info.file_size)
    for offset in (300, 301, largest.file_size // 2):
        damaged = bytearray(raw)
        damaged[largest.header_offset + 200 + offset] ^= 1
        path.write_bytes(damaged)
        assert 'is damaged: the checksum of its record' in refusal(out_dir=out)


def test_a_flipped_byte_anywhere_changes_nothing_or_is_one_sentence(out):
    path, whole = out / 'best.pt', load_checkpoint(str(out / 'best.pt'))
    raw, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(120):
        damaged = bytearray(raw)
        damaged[rng.randrange(len(raw))] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            found = load_checkpoint(str(path))
        except ValueError as e:
            assert str(path) in str(e) and '\n' not in str(e)
            refused += 1
            continue
        assert all(torch.equal(found['model'][k], v) for k, v in whole['model'].items())
        assert {k: v for k, v in found.items() if k != 'model'} == {k: v for k, v in whole.items() if k != 'model'}
    assert refused > 60


def test_damage_to_the_files_own_table_is_one_sentence(out):
    """zipfile has errors of many kinds for it, a plain ValueError without the file's name among them."""
    path = out / 'best.pt'
    raw, refused = path.read_bytes(), 0
    for i in range(1, 99):  # the end records: 56 + 20 + 22 bytes
        path.write_bytes(raw[:-i] + b'\xff' + raw[len(raw) - i + 1:])
        try:
            load_checkpoint(str(path))
        except ValueError as e:
            assert str(path) in str(e) and '\n' not in str(e), f'byte {-i}'
            refused += 1
    assert refused > 20


@pytest.mark.parametrize('share', [0, 0.001, 0.3, 0.9, 0.999])
def test_a_file_cut_short_is_one_sentence(out, share):
    raw = (out / 'best.pt').read_bytes()
    (out / 'best.pt').write_bytes(raw[:int(share * len(raw))])
    assert f'{out / "best.pt"} is not a whole checkpoint' in refusal(out_dir=out)


def test_files_of_other_formats_are_told_apart(out, tmp_path):
    torch.save({'model': {}}, out / 'best.pt', _use_new_zipfile_serialization=False)
    assert "torch's format of before 1.6: load it" in refusal(out_dir=out)
    header = b'{"__metadata__": {"format": "pt"}}'
    (tmp_path / 'model.safetensors').write_bytes(len(header).to_bytes(8, 'little') + header)
    assert 'name its folder' in refusal(init_from=tmp_path / 'model.safetensors')


class Touch:
    """Unpickled by pickle.load, this makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


@pytest.mark.parametrize('form', ['zip', 'legacy', 'pickle'])
def test_a_checkpoint_cannot_run_code(out, tmp_path, form):
    target, path = tmp_path / 'touched', out / 'best.pt'
    evil = {**load_checkpoint(str(path)), 'extra': Touch(target)}
    if form == 'pickle':
        path.write_bytes(pickle.dumps({'extra': Touch(target), 'model': {}, 'model_args': {}}))
        pickle.loads(path.read_bytes())['extra'].close()
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=form == 'zip')
        torch.load(path, weights_only=False)['extra'].close()
    assert target.exists(), 'the trap itself must work'
    target.unlink()
    sentence = refusal(out_dir=out)
    assert str(path) in sentence and 'weights_only' not in sentence  # torch's own advice is the unsafe way
    assert ('could run code' in sentence) == (form == 'zip')
    assert not target.exists()


@pytest.mark.parametrize('content, words', [
    (3, 'is no checkpoint of ours'),
    ({'model': {}}, 'is no checkpoint of ours'),
    ({'model': {}, 'model_args': {'n_layer': 1}}, 'vocab_size'),
    ({'model': {}, 'model_args': dict(n_layer=1, n_head=1, n_embd=4, block_size=8, vocab_size=8)}, 'claims a larger'),
    ({'model': {}, 'model_args': {'n_leyer': 1}}, 'n_leyer'),
])
def test_a_file_of_something_else_is_one_sentence(out, content, words):
    torch.save(content, out / 'best.pt')
    assert words in refusal(out_dir=out)


def test_weights_that_do_not_fit_are_listed(out):
    model = gpt()
    state = model.state_dict()
    state['odd'] = state.pop('transformer.ln_f.weight')
    save_checkpoint(str(out / 'best.pt'), {'model': state, 'model_args': model.config.model_args(),
                                           'tokenizer': CharTokenizer(CHARS).spec()})
    sentence = refusal(out_dir=out)
    assert 'transformer.ln_f.weight is missing' in sentence and 'odd is unknown' in sentence


def test_a_checkpoint_with_a_tokenizer_of_a_later_version_is_one_sentence(out):
    model = gpt()
    save_checkpoint(str(out / 'best.pt'), {'model': model.state_dict(), 'model_args': model.config.model_args(),
                                           'tokenizer': {'kind': 'of next year'}})
    assert 'describes no tokenizer that this version knows' in refusal(out_dir=out)


def test_weights_that_are_not_finite_are_said_and_not_sampled(out):
    model = gpt()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(float('nan'))
    write(out / 'best.pt', model)
    assert 'not finite' in refusal(out_dir=out)
