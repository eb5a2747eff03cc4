"""Sampling: prompts in, texts out, where they end, chat, and which tokenizer a checkpoint gets."""

import gzip
import io
import json
import pickle
import sys
import types

import pytest
import torch

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


@pytest.fixture
def run(capsys, out):
    """run(**flags) runs sample.main and returns what it prints."""
    def main(**flags):
        flags = {'out_dir': out, 'device': 'cpu', **flags}
        assert sample.main([f'--{name}={value}' for name, value in flags.items()]) == 0
        printed, main.err = capsys.readouterr()
        return printed
    return main


@pytest.fixture
def draw(run):
    """draw(**flags) returns the texts, prompts included."""
    def texts(**flags):
        printed = run(**{'num_samples': 1, 'max_new_tokens': 20, 'start': 'ab', **flags})
        texts.err = run.err
        assert printed.endswith(END)
        return printed.removesuffix(END).split(END)
    return texts


@pytest.fixture
def rows(run):
    """rows(**flags) returns the objects of --output=jsonl."""
    def objects(**flags):
        defaults = {'output': 'jsonl', 'num_samples': 1, 'max_new_tokens': 20, 'start': 'ab'}
        return [json.loads(line) for line in run(**{**defaults, **flags}).splitlines()]
    return objects


def refusal(**flags):
    """The error that a command ends with, one line."""
    flags = {'device': 'cpu', **flags}
    with pytest.raises(ValueError) as e:
        sample.main([f'--{name}={value}' for name, value in flags.items()])
    assert '\n' not in str(e.value)
    return str(e.value)


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
    ('a.txt', b'cab\n'), ('a.txt', b'\xef\xbb\xbfcab\n'), ('a.txt.gz', gzip.compress(b'cab\n')),
    ('a.JSONL', b'\xef\xbb\xbf"cab\\n"\n'), ('a.ndjson.gz', gzip.compress(b'{"prompt": "cab\\n", "id": 1}')),
    ('-', b'cab\n')])
def test_a_prompt_may_come_from_a_file_or_standard_input(draw, tmp_path, monkeypatch, name, content):
    expected = draw(start='cab\n')
    assert len(expected) == 1 and expected[0].startswith('cab\n') and len(expected[0]) == 24
    if name == '-':
        monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(content)))
        assert draw(start='-') == expected
    else:
        (tmp_path / name).write_bytes(content)
        assert draw(start=f'FILE:{tmp_path / name}') == expected


@pytest.mark.parametrize('name, content, words', [
    ('p.txt', b'a\r\nb', r"characters '\r'"),  # line ends are not translated
    ('p.txt', b'caf\xe9', 'p.txt is not UTF-8 text'),
    ('p.jsonl', b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected a text, or an object with the field'),
    ('p.jsonl', b'7', 'line 1: expected a text'), ('p.jsonl', b'{"prompt"', 'line 1 is not JSON'),
    ('p.jsonl', b'\n', 'p.jsonl holds no prompt'), (None, b'', 'p.txt cannot be read: No such file')])
def test_a_prompt_file_that_cannot_be_used_is_named(out, tmp_path, name, content, words):
    if name:
        (tmp_path / name).write_bytes(content)
    assert words in refusal(out_dir=out, start=f'FILE:{tmp_path / (name or "p.txt")}')


@pytest.mark.parametrize('flags, words', [
    (dict(start='abéx'), "the characters 'xé' do not occur"),
    (dict(start='ab\udcff'), 'the prompt is not UTF-8 text'),  # as a shell passes the byte 0xff
    (dict(start='-'), 'standard input is closed'), (dict(score='-'), 'standard input is closed'),
    (dict(chat=True, template='plain'), 'standard input is closed'),
    (dict(chat=True, template='chatml'), "the characters '<>_imnrstu|' do not occur"),
    (dict(chat=True), 'choose one with --template: plain, joined, alpaca, chatml')])
def test_input_that_cannot_be_used_is_refused(out, monkeypatch, flags, words):
    monkeypatch.setattr(sys, 'stdin', None)
    assert words in refusal(out_dir=out, **flags)


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
    assert set(draw(seed=99, num_samples=3)).isdisjoint(first)


def test_temperature_0_is_the_likeliest_token_each_time(draw):
    model, ids = gpt().eval(), [2, 3]
    for _ in range(20):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids[-8:]]))[0].argmax().item())
    expected = ''.join(CHARS[i] for i in ids)
    assert draw(temperature=0, seed=1, num_samples=2) == [expected, expected]
    assert draw(temperature=1e-9, num_samples=None) == [expected]
    assert draw(temperature=8.0) != [expected] and len(draw(num_samples=None)) == 3


@pytest.mark.parametrize('name, value', [
    ('max_new_tokens', 3), ('temperature', 0.5), ('top_k', None), ('top_p', 0.9), ('min_p', 0.1),
    ('repetition_penalty', 1.5), ('past_context', 'stop'), ('logprobs', True)])
def test_settings_reach_generate(run, monkeypatch, name, value):
    calls = play(monkeypatch, 2)
    run(start='ab', output='jsonl', **{name: value})
    assert getattr(calls[0].sampling, name) == value and calls[0].sampling.vocab == 10


def test_int8_and_compile(run, out, monkeypatch):
    kinds, calls, prepare = [], play(monkeypatch, 2), sample.prepare_for_inference

    def spy(model, *args, pack):
        model = prepare(model, *args, pack=pack)
        kinds.append((type(model.lm_head).__name__, pack))
        return model
    monkeypatch.setattr('sample.prepare_for_inference', spy)
    monkeypatch.setattr('sample.try_compile', lambda device: None)
    run(start='ab', quantize='int8')
    assert run.err.endswith('device: cpu, float32, weights in int8\n')
    run(start='ab', compile=True)
    assert kinds == [('Int8Linear', True), ('Linear', False)]
    assert [call.compiled for call in calls] == [False, True]
    monkeypatch.setattr('sample.try_compile', lambda device: 'no compiler')
    assert 'torch.compile fails here: no compiler' in refusal(out_dir=out, compile=True)


# -----------------------------------------------------------------------------
# text as it comes, and where it ends

def test_a_character_appears_with_its_last_token():
    text = sample.Text(ByteTokenizer(), sample.Stops([], frozenset()))
    assert [text.add(token, 0.0) for token in 'é€'.encode()] == ['', 'é', '', '', '€']
    assert [text.add(token, 0.0) for token in (0xff, 97, 0xe2)] == ['�', 'a', '']
    assert text.end('length') == '�' and ''.join(text.pieces) == 'é€�a�' and text.finish == 'length'


def test_what_may_become_a_stop_text_waits_and_no_more():
    text = sample.Text(ByteTokenizer(), sample.Stops(['lo!'], frozenset()))
    assert [text.add(i, 0.0) for i in b'hello lo!'] == ['h', 'e', '', 'l', '', 'lo ', '', '', '']
    assert text.finish == 'stop' and ''.join(text.pieces) == 'hello ' and len(text.tokens) == 9


def test_streaming_takes_time_linear_in_the_text():
    """Each token is decoded once, and no more is kept pending than may begin a stop text."""
    decoded = []
    tokenizer = types.SimpleNamespace(decode=lambda ids: decoded.extend(ids) or bytes(ids))
    text = sample.Text(tokenizer, sample.Stops(['abcd'], frozenset()))
    for token in b'abcab' * 100:
        text.add(token, 0.0)
        assert len(text.pending) < 4
    assert len(decoded) == 500


@pytest.mark.parametrize('stop, written, expected', [
    ('lo', 'hello', 'hel'), ('l|||e', 'hello', 'h'), ('ell', 'heelal', 'heelal'), ('xy', 'axaxyb', 'axa'),
    (r'\n', 'ab\ncd', 'ab'), (r'\t', 'x\ty', 'x'), ('€', 'a€b', 'a'), ('aab', 'aaab', 'a'),
    ('h', 'hello', ''), ('lo', 'hel', 'hel')])
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

    def pieces():
        for index, piece, finish in [(0, 'a', None), (1, 'b', 'stop'), (0, 'c', None), (2, 'd', None),
                                     (0, '', 'stop'), (2, 'e', 'length')]:
            seen.append(screen.shown)
            yield index, piece, types.SimpleNamespace(finish=finish)
    monkeypatch.setattr(sys, 'stdout', screen)
    sample.print_in_order(pieces(), ['<', '(', '['])
    assert seen == ['<', '<a', '<a', '<ac', '<ac', f'<ac{END}(b{END}[d']
    assert screen.shown == f'<ac{END}(b{END}[de{END}'


# -----------------------------------------------------------------------------
# many prompts, and output for programs

@pytest.mark.parametrize('batch_size', [1, 3])
def test_prompts_of_a_file_are_drawn_together_as_each_alone(draw, rows, tmp_path, batch_size):
    (tmp_path / 'p.jsonl').write_text('{"prompt": "ab"}\n"cde"\n\n{"prompt": ""}\n{"prompt": "habcdefgh"}\n')
    alone = [text for start in ('ab', 'cde', '', 'habcdefgh') for text in draw(start=start, num_samples=2)]
    many = dict(start=f'FILE:{tmp_path / "p.jsonl"}', num_samples=2, batch_size=batch_size)
    assert draw(**many) == alone
    found = rows(**many)
    assert [row['prompt'] + row['text'] for row in found] == alone
    assert [row['seed'] for row in found] == [1337, 1338] * 4
    assert {row['finish'] for row in found} == {'length'}


def test_jsonl_names_what_ended_a_text(rows, byte_out, monkeypatch):
    (row,) = rows(past_context='stop')
    assert row['finish'] == 'context' and len(row['text'].encode()) >= 7  # block_size is 8
    assert [(row['finish'], row['text']) for row in rows(max_new_tokens=0)] == [('length', '')]
    play(monkeypatch, 97, 256)
    (row,) = rows(logprobs=True)
    assert row == {'prompt': 'ab', 'seed': 1337, 'text': 'a', 'finish': 'stop', 'tokens': [97, 256],
                   'logprobs': [-0.5, -0.5]}


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


@pytest.mark.parametrize('template, prompt', [
    ('plain', 'hi \n'), ('joined', 'hi '),
    ('gemma', '<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n')])
@pytest.mark.parametrize('end', ['', 'exit', '  '])
def test_a_template_by_name_and_the_end_of_a_chat(talk, template, prompt, end):
    """A line keeps its blanks, unless the template strips them."""
    assert talk(['hi ', end, 'b'], ['x', 'y'], template=template) == [prompt]


def test_the_oldest_turns_are_dropped_when_the_context_is_full(talk):
    prompts = talk(['one ' * 10, 'two ' * 10, 'three'], ['first', 'second', 'third'], max_new_tokens=20)
    assert 'one' not in prompts[2] and prompts[2].startswith('<|im_start|>user\ntwo')
    assert 'the context is full; the oldest 2 turns are dropped' in talk.err
    prompts = talk(['early', 'x' * 300, 'late'], ['first', 'second'], max_new_tokens=20)
    assert 'tokens, but the context has room for 180 and an answer' in talk.err
    assert 'early' in prompts[1] and 'late' in prompts[1]  # a refused line costs no turn


def test_a_line_that_cannot_be_read_does_not_end_a_chat(talk):
    assert talk(['ab\udcff', 'h'], ['x'], template='plain') == ['h\n']
    assert 'that was not UTF-8 text' in talk.err
    assert talk(['xyz', 'h'], ['a'], CharTokenizer(CHARS), template='plain') == ['h\n']
    assert "note: the characters 'xyz' do not occur" in talk.err


# -----------------------------------------------------------------------------
# settings, checkpoints, tokenizers

@pytest.mark.parametrize('flags, words', [
    (dict(chat=True, num_samples=2), 'num_samples would do nothing in chat mode'),
    (dict(template='gemma'), 'template would do nothing in sample mode'),
    (dict(score='a.txt', top_k=5, seed=1), 'seed, top_k would do nothing in score mode'),
    (dict(score='a.txt', chat=True), 'chat and score exclude each other'),
    (dict(logprobs=True), 'logprobs=True needs output=jsonl'),
    (dict(stop='a|||'), 'contains an empty string'),
    (dict(repetition_penalty=0), 'repetition_penalty=0.0 must be from 0.01 to 100'),
    (dict(top_p=1.5, min_p=0.5), 'top_p=1.5 must be above 0 and at most 1'),
    (dict(min_p=0), 'min_p=0.0 must be above 0'), (dict(seed=2**63), 'must be from 0 to'),
    (dict(num_samples=0), 'num_samples=0 must be at least 1'), (dict(top_k=0), 'top_k=0 must be at least 1'),
    (dict(temperature=-0.1), 'temperature=-0.1 must be'), (dict(batch_size=0), 'batch_size=0 must be'),
    (dict(max_new_tokens=-1), 'max_new_tokens=-1 must be'), (dict(device='tpu'), "device='tpu' is not")])
def test_settings_that_cannot_work_are_refused(out, flags, words):
    assert words in refusal(out_dir=out, **flags)


def test_best_is_preferred_and_named_on_stderr(draw, out):
    write(out / 'ckpt.pt', gpt(seed=1, preset='modern'), iter_num=9)
    best = draw()
    assert draw.err == f'weights: {out / "best.pt"}, step 7; tokenizer: char\ndevice: cpu, float32\n'
    assert draw(out_dir='elsewhere', init_from=out) == best
    latest = draw(init_from=out / 'ckpt.pt')
    assert latest != best and f'weights: {out / "ckpt.pt"}, step 9' in draw.err
    (out / 'best.pt').write_bytes((out / 'best.pt').read_bytes()[:-100])
    assert draw() == latest and f'{out / "best.pt"} ' in draw.err and 'trying the next checkpoint' in draw.err
    assert 'train first: python train.py --out_dir=nowhere' in refusal(out_dir='nowhere')


@pytest.fixture
def nanogpt(tmp_path):
    """Flags for a ckpt.pt as nanoGPT's train.py writes it, with the meta.pkl of its dataset under data/."""
    def make(chars, dataset):
        (tmp_path / 'theirs').mkdir()
        model = gpt()
        weights = {f'_orig_mod.{name}': p for name, p in model.state_dict().items()}
        torch.save({'model': weights, 'optimizer': {}, 'model_args': model.config.model_args(),
                    'iter_num': 250, 'best_val_loss': torch.tensor(1.4), 'config': {'dataset': dataset}},
                   tmp_path / 'theirs' / 'ckpt.pt')
        (tmp_path / 'data' / 'chars').mkdir(parents=True)
        meta = {'vocab_size': len(chars), 'itos': dict(enumerate(chars))}
        if chars:
            (tmp_path / 'data' / 'chars' / 'meta.pkl').write_bytes(pickle.dumps(meta))
        return {'out_dir': tmp_path / 'theirs', 'data_dir': tmp_path / 'data'}
    return make


def test_nanogpts_checkpoint_finds_its_tokenizer_beside_its_data(draw, nanogpt, tmp_path):
    ours = draw()
    assert draw(**nanogpt(CHARS, 'chars')) == ours  # the same weights and characters
    assert f'ckpt.pt, step 250; tokenizer: from {tmp_path / "data" / "chars"}' in draw.err


@pytest.mark.parametrize('chars, dataset, words', [
    ('', 'chars', 'chars has none for 10 ids; set --data_dir'), (CHARS + 'xyz', 'chars', 'none for 10 ids'),
    (CHARS[:5], 'chars', 'none for 10 ids'), (CHARS, '../data/chars', 'must be a name below data_dir')])
def test_another_tokenizer_is_never_assumed(nanogpt, chars, dataset, words):
    """nanoGPT falls back to GPT-2's whatever the vocabulary, and prints garbage."""
    assert words in refusal(**nanogpt(chars, dataset))


def test_gpt2s_tokenizer_is_assumed_for_its_vocabulary_only(monkeypatch):
    """openwebtext has no meta.pkl."""
    monkeypatch.setattr('sample.TiktokenTokenizer', lambda name: f'the tokenizer {name}')
    for size in (50257, 50304, 50256, 65):
        weights = Weights('ckpt.pt', {'vocab_size': size}, {}, None, {'config': {'dataset': 'openwebtext'}})
        if size >= 50257:
            assert sample.tokenizer_for(weights, 'nowhere')[0] == 'the tokenizer gpt2'
        else:
            with pytest.raises(ValueError, match=f'has none for {size:,} ids'):
                sample.tokenizer_for(weights, 'nowhere')


def test_a_tokenizer_of_more_ids_than_the_model_is_refused(out):
    write(out / 'best.pt', gpt(9))
    assert 'the tokenizer has 10 ids, but the model has 9' in refusal(out_dir=out)
