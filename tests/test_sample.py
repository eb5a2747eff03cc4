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
from hotloop.bpe import GPT2_SPLIT
from hotloop.chat_template import render
from hotloop.checkpoint import save_checkpoint
from hotloop.pretrained import Weights
from hotloop.tokenizer import ByteTokenizer, CharTokenizer, tokenizer_from
from model import GPT, GPTConfig

CHARS = '\n abcdefgh'  # ten
END = '\n---------------\n'


def gpt(vocab_size=10, seed=0, **settings):
    """A model whose predictions are far from uniform."""
    torch.manual_seed(seed)
    shape = dict(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=vocab_size)
    model = GPT(GPTConfig(**{**shape, **settings}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0)
    return model


def write(path, model=None, tokenizer=None, **more):
    """A checkpoint as training leaves it."""
    model, tokenizer = model or gpt(), tokenizer or CharTokenizer(CHARS)
    path.parent.mkdir(exist_ok=True)
    save_checkpoint(str(path), {'model': model.state_dict(), 'model_args': model.config.model_args(),
                                'iter_num': 7, 'config': {}, 'tokenizer': tokenizer.spec(), **more})


@pytest.fixture
def out(tmp_path):
    """A run folder with a best.pt of ten characters."""
    write(tmp_path / 'out' / 'best.pt')
    return tmp_path / 'out'


@pytest.fixture
def byte_out(out):
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    return out


def main(**flags):
    return sample.main([f'--{name}={value}' for name, value in {'device': 'cpu', **flags}.items()])


@pytest.fixture
def run(capsys, out):
    """run(**flags) runs sample.main and returns what it prints."""
    def run(**flags):
        assert main(**{'out_dir': out, **flags}) == 0
        printed, run.err = capsys.readouterr()
        return printed
    return run


@pytest.fixture
def draw(run):
    """draw(**flags) returns the texts, prompts included; with output=jsonl the rows."""
    def draw(**flags):
        printed = run(**{'num_samples': 1, 'max_new_tokens': 20, 'start': 'ab', **flags})
        draw.err = run.err
        if flags.get('output') == 'jsonl':
            return [json.loads(line) for line in printed.splitlines()]
        assert printed.endswith(END)
        return printed.removesuffix(END).split(END)
    return draw


def play(monkeypatch, *tokens):
    """Replaces generate() by one that draws these tokens for each sequence; returns the list of its calls."""
    calls = []

    def generate(model, prompts, sampling, num_samples=1, seeds=None, stopped=None, compiled=False):
        calls.append(types.SimpleNamespace(prompts=prompts, sampling=sampling, compiled=compiled, stopped=[]))
        for token in tokens:
            calls[-1].stopped.append(set(stopped))
            yield [(i, token, -0.5) for i in range(len(prompts) * num_samples) if i not in stopped]
    monkeypatch.setattr('sample.generate', generate)
    return calls


# -----------------------------------------------------------------------------
# prompts

@pytest.mark.parametrize('name, content', [
    ('a.txt.gz', gzip.compress(b'\xef\xbb\xbfcab\n')), ('a.JSONL', b'\xef\xbb\xbf"cab\\n"\n'),
    ('a.ndjson.gz', gzip.compress(b'{"prompt": "cab\\n", "id": 1}')), ('-', b'\xef\xbb\xbfcab\n')])
def test_a_prompt_may_come_from_a_file_or_standard_input(tmp_path, monkeypatch, name, content):
    (tmp_path / 'a').write_bytes(content)
    (tmp_path / 'a').rename(tmp_path / name)
    monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(content)))
    assert sample.read_prompts('-' if name == '-' else f'FILE:{tmp_path / name}') == ['cab\n']


@pytest.mark.parametrize('name, content, words', [
    ('p.txt', b'a\r\nb', r"characters '\r'"),  # line ends are not translated
    ('p.txt', b'caf\xe9', 'p.txt is not UTF-8 text'),
    ('p.jsonl', b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected JSON: a text, or an object with the field'),
    ('p.jsonl', b'7', 'line 1: expected JSON'), ('p.jsonl', b'{"prompt"', 'line 1: expected JSON'),
    ('p.jsonl', b'\n', 'p.jsonl holds no prompt'), (None, b'', 'p.txt cannot be read: No such file')])
def test_a_prompt_file_that_cannot_be_used_is_named(out, tmp_path, name, content, words):
    if name:
        (tmp_path / name).write_bytes(content)
    assert words in error_of(main, out_dir=out, start=f'FILE:{tmp_path / (name or "p.txt")}')


@pytest.mark.parametrize('flags, words', [
    (dict(start='abéx'), "the characters 'xé' do not occur"),
    (dict(start='ab\udcff'), 'the prompt is not UTF-8 text'),  # as a shell passes the byte 0xff
    (dict(start='-'), 'standard input is closed'), (dict(score='-'), 'standard input is closed'),
    (dict(chat=True, template='plain'), 'standard input is closed'),
    (dict(chat=True), 'choose one with --template: plain, joined, alpaca, chatml'),
    (dict(logprobs=True), 'logprobs=True needs output=jsonl'),
    (dict(stop='a|||'), 'contains an empty string'),
    (dict(repetition_penalty=0), 'repetition_penalty=0.0 must be from 0.01 to 100'),
    (dict(top_p=1.5, min_p=0), 'top_p=1.5 must be from 1e-06 to 1\nmin_p=0.0 must be'),
    (dict(num_samples=0, top_k=0), 'num_samples=0 must be from 1 to inf\ntop_k=0 must be from 1'),
    (dict(temperature=-0.1, seed=2**63), 'temperature=-0.1 must be from 0 to inf\nseed='),
    (dict(max_new_tokens=-1, batch_size=0), 'max_new_tokens=-1 must be from 0 to inf\nbatch_size=0 must be'),
    (dict(device='tpu'), "device='tpu' is not"), (dict(out_dir='nowhere'), 'python train.py --out_dir=nowhere')])
def test_settings_and_input_that_cannot_be_used_are_refused(out, monkeypatch, flags, words):
    monkeypatch.setattr(sys, 'stdin', None)
    assert words in error_of(main, **{'out_dir': out, **flags})


BEGINS = {'kind': 'bpe', 'tokens': [chr(b) for b in range(256)], 'pattern': GPT2_SPLIT, 'nfc': False,
          'specials': {'<|begin|>': 256, '<|end|>': 257}, 'eot': 257, 'bos': 256}


@pytest.mark.parametrize('spec, bos, start, expected', [
    ({'kind': 'char', 'chars': CHARS, 'eot': False}, None, '', [0]),
    ({'kind': 'char', 'chars': CHARS, 'eot': True}, None, '', [10]),
    ({'kind': 'byte'}, None, 'a<|endoftext|>b', [97, 256, 98]),
    (BEGINS, None, 'a', [97]), (BEGINS, 256, 'a', [256, 97]), (BEGINS, 256, '<|begin|>a', [256, 97]),
    (BEGINS, 256, '', [256])])
def test_ids_of_a_prompt(draw, out, monkeypatch, spec, bos, start, expected):
    """An empty prompt starts a document; where the data was made with --bos, every prompt does."""
    tokenizer = tokenizer_from(spec)
    write(out / 'best.pt', gpt(tokenizer.n_vocab), tokenizer, bos=bos)
    calls = play(monkeypatch, 2)
    draw(start=start)
    assert calls[0].prompts == [expected]


def test_the_end_of_a_prompt_that_is_too_long_counts(draw):
    """block_size is 8."""
    (long,) = draw(start='habc' * 5 + 'fedcbahg')
    assert 'the prompt has 28 tokens; the last 8 fit the context' in draw.err
    assert long.startswith('habc' * 5) and [long.removeprefix('habc' * 5)] == draw(start='fedcbahg')


# -----------------------------------------------------------------------------
# what is drawn

def test_a_text_is_a_function_of_prompt_and_seed(draw):
    first = draw(seed=1, num_samples=3)
    assert draw(seed=1, num_samples=3) == first and len(set(first)) == 3
    assert draw(seed=3) == [first[2]]


def test_temperature_0_is_the_likeliest_token_each_time(draw):
    model, ids = gpt().eval(), [2, 3]
    for _ in range(20):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids[-8:]]))[0].argmax().item())
    expected = ''.join(CHARS[i] for i in ids)
    assert draw(temperature=0, seed=1, num_samples=2) == [expected, expected]
    assert draw(temperature=1e-9, num_samples=None) == [expected]
    assert draw(temperature=8.0) != [expected] and len(draw(num_samples=None)) == 3


def test_settings_reach_generate(run, monkeypatch):
    calls = play(monkeypatch, 2)
    flags = dict(max_new_tokens=3, temperature=0.5, top_k=None, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
                 past_context='stop', logprobs=True)
    run(start='ab', output='jsonl', **flags)
    assert {name: getattr(calls[0].sampling, name) for name in flags} == flags
    assert calls[0].sampling.vocab == 10


def test_int8_and_compile(run, out, monkeypatch):
    kinds, calls, prepare = [], play(monkeypatch, 2), sample.prepare_for_inference

    def spy(model, *args, pack):
        model = prepare(model, *args, pack=pack)
        kinds.append((type(model.lm_head).__name__, pack))
        return model
    monkeypatch.setattr('sample.prepare_for_inference', spy)
    monkeypatch.setattr('hotloop.device.try_compile', lambda device: None)
    run(start='ab', quantize='int8', compile='auto')  # auto compiled in earlier versions
    assert run.err.endswith('device: cpu, float32, weights in int8\n')
    run(start='ab', compile=True)
    assert kinds == [('Int8Linear', True), ('Linear', False)]
    assert [call.compiled for call in calls] == [False, True]
    monkeypatch.setattr('hotloop.device.try_compile', lambda device: 'no compiler')
    assert 'torch.compile fails here: no compiler' in error_of(main, out_dir=out, compile=True)


# -----------------------------------------------------------------------------
# text as it comes, and where it ends

def certain(text, tokens):
    """What becomes certain with each token."""
    pieces = []
    for token in tokens:
        before = len(text.text)
        text.add(token, 0.0)
        pieces.append(text.text[before:])
    return pieces


def test_a_character_appears_with_its_last_token():
    text = sample.Text(ByteTokenizer(), [], set())
    assert certain(text, 'é€'.encode()) == ['', 'é', '', '', '€']
    assert certain(text, (0xff, 97, 0xe2)) == ['�', 'a', '']
    text.end('length')
    assert text.text == 'é€�a�' and text.finish == 'length'


def test_what_may_become_a_stop_text_waits_and_no_more():
    text = sample.Text(ByteTokenizer(), ['lo!'], set())
    assert certain(text, b'hello lo!') == ['h', 'e', '', 'l', '', 'lo ', '', '', '']
    assert text.finish == 'stop' and text.text == 'hello ' and len(text.tokens) == 9


@pytest.mark.parametrize('stop, written, expected', [
    ('lo', 'hello', 'hel'), ('l|||e', 'hello', 'h'), ('ell', 'heelal', 'heelal'), ('xy', 'axaxyb', 'axa'),
    (r'\n', 'ab\ncd', 'ab'), (r'\t', 'x\ty', 'x'), ('€', 'a€b', 'a'), ('aab', 'aaab', 'a'), ('lo', 'hel', 'hel')])
def test_a_stop_text_ends_the_sample_and_is_not_printed(draw, byte_out, monkeypatch, stop, written, expected):
    """Each byte is a token here, so most stop texts span several."""
    play(monkeypatch, *written.encode())
    assert draw(start='<', stop=stop) == [f'<{expected}']


def test_special_tokens_and_the_end_of_text_end_it_too(draw, byte_out, monkeypatch):
    assert sample.stops_of(ByteTokenizer(), '<|endoftext|>|||zz', 'm') == (['zz', 'm'], {256})
    assert sample.stops_of(CharTokenizer(CHARS), None) == ([], set())
    calls = play(monkeypatch, *b'hi', 256)
    assert draw() == ['abhi'] and calls[0].sampling.stop == {256}
    assert draw(num_samples=2, stop='h') == ['ab', 'ab']
    assert calls[1].stopped == [set(), {0, 1}, {0, 1}]  # generate() drops a sequence at a stop text too


def test_samples_are_printed_in_order_and_the_first_as_it_comes(monkeypatch):
    """Text is visible before the next token is computed. Sequence 1 finishes first and waits."""
    class Screen(io.StringIO):
        shown = ''

        def flush(self):
            self.shown = self.getvalue()
    screen, seen = Screen(), []

    def steps():
        texts = [types.SimpleNamespace(text='', finish=None) for _ in range(3)]
        for index, piece, finish in [(0, 'a', None), (1, 'b', 'stop'), (0, 'c', None), (2, 'd', None),
                                     (0, '', 'stop'), (2, 'e', 'length')]:
            seen.append(screen.shown)
            texts[index].text += piece
            texts[index].finish = finish
            yield texts
    monkeypatch.setattr(sys, 'stdout', screen)
    sample.print_in_order(steps(), ['<', '(', '['], END)
    assert seen == ['<', '<a', '<a', '<ac', '<ac', f'<ac{END}(b{END}[d']
    assert screen.shown == f'<ac{END}(b{END}[de{END}'


@pytest.mark.parametrize('batch_size', [1, 3])
def test_prompts_of_a_file_are_drawn_together_as_each_alone(draw, tmp_path, batch_size):
    (tmp_path / 'p.jsonl').write_text('{"prompt": "ab"}\n\n{"prompt": ""}\n"habcdefgh"\n')
    alone = [text for start in ('ab', '', 'habcdefgh') for text in draw(start=start, num_samples=2)]
    many = dict(start=f'FILE:{tmp_path / "p.jsonl"}', num_samples=2, batch_size=batch_size)
    assert draw(**many) == alone
    found = draw(output='jsonl', **many)
    assert [row['prompt'] + row['text'] for row in found] == alone
    assert [row['seed'] for row in found] == [1337, 1338] * 3
    assert {row['finish'] for row in found} == {'length'}


def test_jsonl_names_what_ended_a_text(draw, byte_out, monkeypatch):
    (row,) = draw(output='jsonl', past_context='stop')
    assert row['finish'] == 'context' and len(row['text'].encode()) >= 7  # block_size is 8
    (row,) = draw(output='jsonl', max_new_tokens=0)
    assert (row['finish'], row['text']) == ('length', '')
    play(monkeypatch, 97, 256)
    assert draw(output='jsonl', logprobs=True) == [
        {'prompt': 'ab', 'seed': 1337, 'text': 'a', 'finish': 'stop', 'tokens': [97, 256], 'logprobs': [-0.5, -0.5]}]


@pytest.mark.parametrize('encoding, expected', [('ascii', b'caf\\u00e9'), ('utf-8', 'café 😀'.encode())])
def test_json_is_ascii_unless_the_output_is_utf8(monkeypatch, encoding, expected):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(raw, encoding))
    sample.print_json({'text': 'café 😀'})
    assert expected in raw.getvalue() and json.loads(raw.getvalue()) == {'text': 'café 😀'}


# -----------------------------------------------------------------------------
# chat

@pytest.fixture
def talk(run, monkeypatch, out):
    """talk(lines, answers, **flags) is a chat in which the model answers so; returns the prompts, as text."""
    def chat(lines, answers, tokenizer=None, **flags):
        tokenizer, prompts = tokenizer or ByteTokenizer(), []
        write(out / 'best.pt', gpt(tokenizer.n_vocab, block_size=200), tokenizer, template='chatml')
        lines, answers = iter(lines), iter(answers)

        def listen(prompt):
            line = next(lines, None)
            if line is None:
                raise EOFError
            return line

        def generate(model, ids, sampling, stopped, **kwargs):
            prompts.append(tokenizer.decode(ids[0]).decode())
            for token in next(answers).encode():
                if not stopped:
                    yield [(0, token, 0.0)]
        monkeypatch.setattr('builtins.input', listen)
        monkeypatch.setattr('sample.generate', generate)
        chat.out = run(chat=True, **flags)
        chat.err = run.err
        return prompts
    return chat


def test_a_chat_is_in_the_template_that_training_saw(talk):
    prompts = talk(['Two and two?', 'And one?'], ['Four.<|im_end|>x', 'Five.<|im_end|>'])
    turns = [('user', 'Two and two?'), ('assistant', 'Four.'), ('user', 'And one?'), ('assistant', 'Five.')]
    complete = ''.join(text for text, *_ in render(turns, 'chatml'))
    assert complete == prompts[1] + 'Five.<|im_end|>'
    assert prompts[1].startswith(prompts[0]) and prompts[0].endswith('<|im_start|>assistant\n')
    assert talk.out == 'Four.\nFive.\n\n'  # without the mark; the end of the input ends the chat


@pytest.mark.parametrize('template, end, prompt', [
    ('plain', '', 'hi \n'), ('joined', 'exit', 'hi '),
    ('gemma', '  ', '<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n')])
def test_a_template_by_name_and_the_end_of_a_chat(talk, template, end, prompt):
    """A line keeps its blanks, unless the template strips them."""
    assert talk(['hi ', end, 'b'], ['x', 'y'], template=template) == [prompt]


def test_the_oldest_turns_are_dropped_when_the_context_is_full(talk):
    prompts = talk(['one ' * 10, 'two ' * 10, 'three'], ['first', 'second', 'third'], max_new_tokens=20)
    assert 'one' not in prompts[2] and prompts[2].startswith('<|im_start|>user\ntwo')
    assert 'the context is full; the oldest 2 turns are dropped' in talk.err
    prompts = talk(['early', 'x' * 300, 'late'], ['first', 'second'], max_new_tokens=20)
    assert 'tokens, but the context has room for 180 and an answer' in talk.err
    assert 'early' in prompts[1] and 'late' in prompts[1]  # a refused line costs no turn


def test_a_line_that_cannot_be_encoded_does_not_end_a_chat(talk):
    assert talk(['ab\udcff', 'h'], ['x'], template='plain') == ['h\n'] and 'surrogates' in talk.err
    assert talk(['xyz', 'h'], ['a'], CharTokenizer(CHARS), template='plain') == ['h\n']
    assert "note: the characters 'xyz' do not occur" in talk.err


# -----------------------------------------------------------------------------
# checkpoints and tokenizers

def test_best_is_preferred_and_named_on_stderr(draw, out):
    write(out / 'ckpt.pt', gpt(seed=1, preset='modern'), iter_num=9)
    best = draw()
    assert draw.err == f'weights: {out / "best.pt"}, step 7; tokenizer: char\ndevice: cpu, float32\n'
    latest = draw(init_from=out / 'ckpt.pt')
    assert latest != best and f'weights: {out / "ckpt.pt"}, step 9' in draw.err
    (out / 'best.pt').write_bytes((out / 'best.pt').read_bytes()[:-100])
    assert draw() == latest and f'{out / "best.pt"} ' in draw.err and 'trying the next checkpoint' in draw.err


@pytest.mark.parametrize('chars, dataset, words', [
    (CHARS, 'chars', None), ('', 'chars', 'chars has none for 10 ids; set --data_dir'),
    (CHARS + 'xyz', 'chars', 'none for 10 ids'), (CHARS[:5], 'chars', 'none for 10 ids'),
    (CHARS, '../data/chars', 'must be a name below data_dir')])
def test_nanogpts_checkpoint_gets_the_tokenizer_of_its_data_and_no_other(draw, tmp_path, chars, dataset, words):
    """nanoGPT falls back to GPT-2's whatever the vocabulary, and prints garbage."""
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
        assert draw() == draw(**flags) and f'{theirs}, step 250; tokenizer: char' in draw.err


@pytest.mark.parametrize('size', [50257, 50304, 50256, 65])
def test_gpt2s_tokenizer_is_assumed_for_its_vocabulary_only(size):
    """openwebtext has no meta.pkl."""
    weights = Weights('ckpt.pt', {'vocab_size': size}, {}, None, {'config': {'dataset': 'openwebtext'}})
    if size >= 50257:
        assert sample.tokenizer_spec(weights, 'nowhere') == {'kind': 'tiktoken', 'name': 'gpt2'}
    else:
        assert f'has none for {size:,} ids' in error_of(sample.tokenizer_spec, weights, 'nowhere')


def test_a_tokenizer_of_more_ids_than_the_model_is_refused(out):
    write(out / 'best.pt', gpt(9))
    assert 'the tokenizer has 10 ids, but the model has 9' in error_of(main, out_dir=out)
