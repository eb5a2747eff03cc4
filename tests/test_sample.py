"""Sampling: a checkpoint in, text out; whose tokenizer it is, and what is refused."""

import io
import os
import pickle
import random
import subprocess
import sys
import zipfile

import pytest
import torch

import sample
from model import GPT, GPTConfig, load_checkpoint, save_checkpoint
from prepare import ByteTokenizer, CharTokenizer

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
    """Has GPT.generate yield these tokens, whatever the weights; returns the list of its calls."""
    calls = []

    def generate(self, idx, max_new_tokens, *args, **kwargs):
        calls.append((idx.tolist(), max_new_tokens, args, kwargs))
        for token in tokens:
            yield torch.tensor([token])

    monkeypatch.setattr(GPT, 'generate', generate)
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
    assert 'the prompt file nowhere.txt cannot be read' in refusal(out_dir=out, start='FILE:nowhere.txt')
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9')
    assert 'latin.txt cannot be read: ' in refusal(out_dir=out, start=f'FILE:{tmp_path / "latin.txt"}')


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
    assert draw(temperature=1.0, top_k=1) == [expected]
    assert draw(temperature=1.0, top_p=1e-6) == [expected]
    assert draw(temperature=1.0) != [expected]


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
    (_, _, _, kwargs), = calls
    assert kwargs['stop'] == 256 and kwargs['vocab'] == 257


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
    pieces = list(sample.stream(gpt(257), ByteTokenizer(), [60], sample.SampleConfig(), 1))
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

    def generate(self, idx, *args, **kwargs):
        for token in b'xyz':
            seen.append(screen.shown)
            yield torch.tensor([token])

    monkeypatch.setattr(GPT, 'generate', generate)
    monkeypatch.setattr(sys, 'stdout', screen)
    sample.main([f'--out_dir={out}', '--start=<', '--num_samples=1', '--device=cpu'])
    assert seen == ['<', '<x', '<xy']


# -----------------------------------------------------------------------------
# which checkpoint

def test_best_is_preferred_and_said_on_stderr(draw, out):
    write(out / 'ckpt.pt', gpt(seed=1), iter_num=9)
    best = draw()
    assert f'weights: {out / "best.pt"}, step 7; tokenizer: from the checkpoint' in draw.err
    assert 'weights:' not in draw.out  # stdout is the text alone
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
    assert done.stderr == f'weights: {os.path.join("out", "best.pt")}, step 7; tokenizer: from the checkpoint\n'
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
    monkeypatch.setattr(sample, 'TiktokenTokenizer', lambda name: f'the tokenizer {name}')
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
