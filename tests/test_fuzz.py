"""
Whatever is in a file or on a command line, the answer is a result or one sentence: no traceback, no hang, no memory.

A few hundred inputs a reader by default, 10,000 with -m slow; each is a function of its number. They are valid inputs
that were damaged: at random places in their bytes, or in their structure, where one value becomes another.
"""

import contextlib
import copy
import dataclasses
import io
import json
import os
import pickle
import random
import re
import signal
import string
import traceback
import warnings
import zipfile

import numpy as np
import pytest
import torch
from conftest import write_bins

import configurator
import sample
from configurator import as_file, configure, differences
from hotloop.bpe import train_bpe
from hotloop.checkpoint import compare_context, restore
from hotloop.dataloader import Split
from hotloop.dataset import check_tokenizer, dataset_folder, read_meta
from hotloop.distributed import Env
from hotloop.documents import ReadConfig
from hotloop.optim import build_optimizers
from hotloop.pretrained import load_gpt2, read_safetensors
from hotloop.run_dir import RunDir, find_latest
from hotloop.tokenizer import BPETokenizer, Tokenizer, encode_marked, read_tokenizer_json, tokenizer_from
from model import GPT, GPTConfig
from prepare import PrepareConfig, inspect_dataset
from sample import SampleConfig
from train import TrainConfig, build_model, resume_settings

resource = pytest.importorskip('resource')
if not os.path.exists('/proc/self/statm'):
    pytest.skip('memory is limited here as Linux does it', allow_module_level=True)
REPO = os.path.dirname(os.path.abspath(configurator.__file__))
SECONDS, MEMORY = 5, 10**9  # of the processor, and bytes beyond what is in use: what one small input may ask for

inputs = pytest.mark.parametrize('count', [200, pytest.param(10_000, marks=pytest.mark.slow)])


# -----------------------------------------------------------------------------
# the judge

class Hang(BaseException):
    """No except clause but a bare one may swallow it."""


@contextlib.contextmanager
def limits():
    """Memory and processor time of this process, for one input."""
    def stop(number, frame):
        raise Hang(f'{SECONDS} s of processor time')
    with open('/proc/self/statm') as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def outcome(read, *args):
    """What read(*args) returns, or the sentence that it ends with; anything else is an error of the test."""
    try:
        with limits():
            return read(*args)
    except ValueError as e:
        where = [frame for frame, _ in traceback.walk_tb(e.__traceback__)][-1].f_code.co_filename
        assert os.path.dirname(where) == REPO, f'the user would see a traceback of {where}: {e!r}'
        # an allocation that failed may have been caught, and told as damage
        assert not re.search(r'allocat|not enough memory|MemoryError', str(e)), f'memory: {e}'
        return str(e)


def each(count, make, read):
    """Reads `count` inputs, make(random.Random(number)); returns how many were refused, and were not."""
    refused = 0
    for number in range(count):
        given = make(random.Random(number))
        try:
            refused += isinstance(outcome(read, given), str)
        except BaseException as e:
            e.add_note(f'input {number}: {str(given)[:2000]!r}')
            raise
    return refused, count - refused


def refused(read, *args, words):
    """The sentence, when read(*args) ends with one that holds these words."""
    said = outcome(read, *args)
    assert isinstance(said, str) and re.search(words, said), said
    return said


@pytest.mark.parametrize('read, error', [
    (lambda: bytearray(2 * MEMORY), MemoryError), (lambda: json.loads('{'), AssertionError),
    (lambda: read_sentence('not enough memory'), AssertionError), (lambda: {}['x'], KeyError),
    (lambda: [None for _ in iter(int, 1)], Hang)])
def test_the_judge_sees_memory_hangs_and_tracebacks(monkeypatch, read, error):
    monkeypatch.setitem(globals(), 'SECONDS', 0.1)
    with pytest.raises(error):
        outcome(read)


def read_sentence(text):
    """A reader of the product that ends with a sentence which holds this text."""
    tokenizer_from({'kind': text})


# -----------------------------------------------------------------------------
# damage

def damaged(rng, data):
    """Bytes with a few accidents: overwritten, flipped, inserted, lost, repeated, cut off, or nothing of it left."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, from_, run = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 4, 8, 50])
        other = rng.choice([rng.randbytes(run), b'\0' * run, b'\xff' * run, b'\x7f' + b'\xff' * run])
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at:at + 1])
        before, after = data[:at], data[at:]
        data = rng.choice([before + other + after[len(other):], before + flipped + after[1:], before + other + after,
                           before + after[run:], before + data[from_:from_ + rng.randrange(1, 100)] + after,
                           before if rng.random() < 0.2 else data])
    return rng.randbytes(rng.randrange(200)) if rng.random() < 0.03 else data


NUMBERS = [0, 1, -1, 2, 3, 0.5, -0.0, 255, 256, 2**16, 2**31, 2**32, 2**63, 2**64, 10**30, -10**9, 10**9, 1e308, 1e-308,
           float('nan'), float('inf'), float('-inf'), True, False]
TEXTS = ['', 'x', '\0', '\ud800', 'é', '\U0001f600', '../..', 'a' * 3000, 'None', 'byte', 'gpt2', '(', '(a|a)*$', 'NFC']
ODD = [None, *NUMBERS, *TEXTS, [], {}, [[]], [None], [0] * 9, {'': None}, {'kind': 'byte'}, [{}], [1, [2, [3]]]]


def with_one_odd_value(rng, value, odd=ODD):
    """A copy of nested containers in which one value, or container, is another, or missing, or there twice."""
    value = copy.copy(value)
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inside or rng.random() < 0.15:
        return rng.choice([*odd, rng.choice(odd)])
    key = rng.choice(list(inside))
    kind = rng.randrange(12)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value[rng.choice(['', 'x', 'self', 'kind', f'{key}x'])] = value.pop(key)
    elif kind == 2:
        value[key] = value[rng.choice(list(inside))]
    elif kind == 3:
        value[key] = [value[key]]
    else:
        value[key] = with_one_odd_value(rng, value[key], odd)
    return value


# -----------------------------------------------------------------------------
# settings

PROGRAMS = [(GPTConfig, TrainConfig), (PrepareConfig, ReadConfig), (SampleConfig,)]
WORDS = ['', '-', '--', '---', '=', '--=', '==', '1e5', '1e400', 'nan', '-inf', '0x10', '1_0', '9' * 400, '9' * 5000,
         'true', 'False', 'None', 'null', '[]', '{}', '1,2', 'x', 'é', '\U0001f600', '\0', '\ud800', 'a\nb', '../..',
         '.', '/', 'auto', '/dev/null', 'nothere.py', '-h=1', '--help=1', '__import__("os")', 'muon', 'byte', 'bpe:300',
         'bpe:٣٠٠', 'a:1,b:2']


def a_command(rng):
    """(classes, argv): flags of a program, their values, and words beside them."""
    classes = rng.choice(PROGRAMS)
    defaults = {f.name: f.default for cls in classes for f in dataclasses.fields(cls)}
    argv = []
    for _ in range(rng.randrange(4)):
        name, default = rng.choice(list(defaults.items()))
        text = rng.choice([str(default), str(rng.choice(NUMBERS)), rng.choice(WORDS), rng.choice(TEXTS),
                           ''.join(rng.choices(string.printable + 'é\udcff\0٣²', k=rng.randrange(8)))])
        if rng.random() < 0.1:
            name = damaged(rng, name.encode()).decode('utf-8', 'surrogateescape')
        dashed = name.replace('_', '-')
        argv += rng.choice([[f'--{name}={text}'], [f'--{name}={default}'], [f'--{dashed}={text}'], [f'--{name}', text],
                            [f'--{name}'], [f'--{name}={text}'], [f'{name}={text}'] if rng.random() < 0.3 else []])
        argv += [text] if rng.random() < 0.05 else []
    return classes, argv


def settings_of(command):
    """All that a program does with its command line before it looks at anything else."""
    classes, argv = command
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            *objects, given, _ = configure(*classes, argv=argv)
    except SystemExit as e:
        assert e.code == 0 and {'--help', '-h'} & set(argv)
        return
    differences(objects, given)
    as_file(objects, 'x').encode('utf-8')
    for o in objects:
        for name in ('dataset', 'name'):
            if getattr(o, name, None) is not None:
                dataset_folder(o.data_dir, getattr(o, name))


@inputs
def test_any_command_line_gives_settings_or_a_sentence(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong, right = each(count, a_command, settings_of)
    assert wrong > 0.05 * count and right > 0.05 * count


CARDS = sorted(f for f in os.listdir(os.path.join(REPO, 'config')) if f.endswith('.py'))


def a_card(rng):
    """A card of ours with damage that never computes: what a file computes is its author's own affair."""
    names = [f.name for cls in (GPTConfig, TrainConfig) for f in dataclasses.fields(cls)]
    with open(os.path.join(REPO, 'config', rng.choice(CARDS)), 'rb') as f:
        lines = f.read().splitlines(keepends=True)
    for _ in range(rng.randrange(1, 4)):
        i = rng.randrange(len(lines))
        name, equals, _ = lines[i].partition(b' = ')
        value = rng.choice([*WORDS, *map(repr, NUMBERS), *map(repr, TEXTS)]).encode('utf-8', 'surrogatepass')
        lines[i] = rng.choice([damaged(rng, lines[i]), lines[rng.randrange(len(lines))], b'', b'  ' + lines[i],
                               name + equals + value + b'\n', b'del ' + name + b'\n',
                               rng.choice(names).encode() + b' = ' + value + b'\n'])
    text = b''.join(lines) if rng.random() < 0.95 else rng.randbytes(rng.randrange(300))
    return re.sub(rb'[*<%({]', b'+', text)


@inputs
@pytest.mark.filterwarnings('ignore::SyntaxWarning')
def test_any_config_file_gives_settings_or_a_sentence(count, tmp_path):
    card = tmp_path / 'card.py'

    def read(text):
        card.write_bytes(text)
        return configure(GPTConfig, TrainConfig, argv=[str(card)])
    wrong, right = each(count, a_card, read)
    assert wrong > 0.05 * count and right > 0.05 * count


# -----------------------------------------------------------------------------
# checkpoints

class Run:
    """A run of one tiny layer after one step: its folder, its checkpoint, and all that a resume and a sample read."""

    def __init__(self, folder, optimizer):
        self.folder, self.path = folder, os.path.join(folder, 'ckpt.pt')
        self.meta = {'vocab_size': 257, 'foreign': False, 'tokenizer': {'kind': 'byte'}}
        self.context = {'data': {'train': '1', 'val': '2'}, 'versions': {'torch': '3', 'numpy': '4'},
                        'machine': {'device': 'cpu', 'dtype': 'torch.float16', 'threads': 1}}
        shape = dict(preset='modern' if optimizer == 'muon' else 'gpt2', n_layer=1, n_head=2, n_embd=8, block_size=8)
        self.model_cfg, self.cfg = GPTConfig(**shape, vocab_size=257), TrainConfig(optimizer=optimizer, device='cpu')
        model = GPT(self.model_cfg)
        optimizers = build_optimizers(model, self.cfg, Env())
        scaler = torch.amp.GradScaler('cpu')
        self.step(model, optimizers)
        self.checkpoint = {
            'model': model.state_dict(), 'model_args': model.config.model_args(), 'scaler': scaler.state_dict(),
            **{name: o.state_dict() for name, o in zip(('optimizer', 'muon'), optimizers, strict=False)},
            'iter_num': 1, 'best_val_loss': 5.5, 'config': {**vars(self.model_cfg), **vars(self.cfg)},
            'state': {'iter_num': 1, 'best_val_loss': 5.5, 'tokens_seen': 8, 'logged': [1.0, 8, 0, 1]},
            'tokenizer': self.meta['tokenizer'], 'run_id': 'none', **self.context}

    def step(self, model, optimizers):
        ids = torch.zeros(1, min(8, model.config.block_size), dtype=torch.long)
        model(ids, ids).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    def resume(self, data):
        """As train.py --init_from=resume does, and one step, which shows whether the optimizer's state fits."""
        with open(self.path, 'wb') as f:
            f.write(data)
        said, model_cfg, cfg = [], GPTConfig(), TrainConfig(init_from='resume')
        resumed = find_latest(RunDir(self.folder))
        resume_settings(model_cfg, cfg, {}, resumed.checkpoint, said)
        resume_settings(GPTConfig(), TrainConfig(seed=1), {'seed': '--seed'}, resumed.checkpoint, said)
        model = build_model(model_cfg, cfg, {}, self.meta, resumed.checkpoint)
        compare_context(resumed.checkpoint, self.context)
        optimizers = build_optimizers(model, cfg, Env())
        state = restore(resumed.checkpoint, model, optimizers, torch.amp.GradScaler('cpu'))
        self.step(model, optimizers)
        return f'{state.iter_num:,}{state.tokens_seen:,}{state.best_val_loss:.4f}', sum(state.logged), said, model

    def sample(self, data):
        """As sample.py does."""
        with open(self.path, 'wb') as f:
            f.write(data)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return sample.main([f'--out_dir={self.folder}', '--start=a', '--max_new_tokens=1', '--num_samples=1',
                                '--device=cpu'])


@pytest.fixture(scope='module', params=['adamw', 'muon'])
def run(request, tmp_path_factory):
    torch.manual_seed(0)
    return Run(str(tmp_path_factory.mktemp('run')), request.param)


def saved(checkpoint):
    f = io.BytesIO()
    torch.save(checkpoint, f)
    return f.getvalue()


def with_records(data, change):
    """A checkpoint file whose records are change({name: bytes}), under checksums that match."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        records = {name: z.read(name) for name in z.namelist()}
    f = io.BytesIO()
    with zipfile.ZipFile(f, 'w') as z, warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of a name that is there twice
        for name, record in change(records):
            z.writestr(name, record)
    return f.getvalue()


def damaged_records(rng, data):
    def change(records):
        name = next(n for n in records if n.endswith('data.pkl'))
        if rng.random() < 0.2:
            name = rng.choice(list(records))
        new = damaged(rng, records[name])
        if rng.random() < 0.05:
            del records[name]
            name = rng.choice(['x', 'archive/data', 'archive/data.pkl/', '../x', 'archive/constants.pkl'])
        records[name] = new
        return [*records.items(), *([(name, b'')] if rng.random() < 0.02 else [])]
    return with_records(data, change)


ODD_TENSORS = [
    torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 3), torch.tensor([1, 2]), torch.tensor(True),
    torch.full((8, 8), float('nan')), torch.zeros(8, 8, dtype=torch.complex64), torch.zeros(8, 8).to_sparse(),
    torch.zeros(8, 8, device='meta'), torch.zeros(1).expand(8, 8), torch.zeros(1).expand(10**6, 10**6),
    torch.zeros(257, 8, dtype=torch.int8), torch.zeros(257, 8, dtype=torch.float8_e5m2),
    torch.zeros(257, 8, dtype=torch.complex64), torch.nn.Parameter(torch.zeros(8, 8)), torch.zeros(8, 8).t()]
ODD_VALUES = [*ODD, *ODD_TENSORS, torch.float32, torch.Size([3]), (1, 2), b'x', {1: 2}, {None: 1}, 1 + 2j, {3}]


def a_file(rng, run):
    """A checkpoint file: damaged as it is, damaged inside of matching checksums, or saved with an odd value."""
    kind = rng.randrange(5)
    if kind == 0:
        return damaged(rng, run.file)
    if kind == 1:
        return damaged_records(rng, run.file)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # what torch thinks of sparse tensors
        return saved(with_one_odd_value(rng, run.checkpoint, ODD_VALUES))


@inputs
@pytest.mark.parametrize('what', ['resume', 'sample'])
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_any_checkpoint_is_gone_on_from_or_refused_in_a_sentence(count, run, what):
    torch.set_num_threads(1)
    run.file = saved(run.checkpoint)
    assert not isinstance(outcome(getattr(run, what), run.file), str)
    wrong, right = each(count // 4, lambda rng: a_file(rng, run), getattr(run, what))
    assert wrong > 0.05 * count // 4 and right > 0.05 * count // 4


# -----------------------------------------------------------------------------
# datasets and tokenizers

def tokenizers():
    """A spec of each kind that carries its own tables."""
    tokens = train_bpe(['ab abab ba bab '] * 5, 262)
    return [{'kind': 'byte'}, {'kind': 'char', 'chars': '\n Helowrd', 'eot': True}, BPETokenizer(tokens).spec(),
            BPETokenizer(tokens, nfc=True, specials={'<s>': 270, '</s>': 268}, eot=268, bos=270).spec(),
            {'kind': 'tiktoken', 'name': 'gpt2'}]


def used(tokenizer):
    """All that the programs ask of a tokenizer, or of the spec of one."""
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer_from(tokenizer)
    for text in ('Hello wr\n', 'aé\U0001f600<|endoftext|></s> ' * 9, '\ud800', ''):
        with contextlib.suppress(ValueError):  # characters that a char tokenizer has not seen
            tokenizer.decode(encode_marked(tokenizer, text)).decode('utf-8', 'replace')
    assert len(tokenizer.sizes) == tokenizer.n_vocab
    assert tokenizer.eot is None or 0 <= tokenizer.eot < tokenizer.n_vocab
    json.dumps(tokenizer.spec())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A dataset whose meta.json is as tests write it."""
    return write_bins(tmp_path_factory.mktemp('data') / 'd', np.arange(99), np.arange(50))


def write(path, value):
    """Bytes as they are, anything else as JSON, which has neither all of Python's numbers nor all of its texts."""
    with open(path, 'wb') as f:
        f.write(value if isinstance(value, bytes) else json.dumps(value).encode())


@inputs
def test_any_meta_json_is_a_dataset_or_a_sentence(count, folder, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', folder)
    monkeypatch.setattr('tiktoken.load.read_file', lambda path: b'')  # no downloads
    path = os.path.join(folder, 'meta.json')
    with open(path, encoding='utf-8') as f:
        meta = json.load(f)
    sizes = (257, 10, 263, 271, 50257)
    metas = [{**meta, 'tokenizer': spec, 'vocab_size': n} for spec, n in zip(tokenizers(), sizes, strict=True)]

    def make(rng):
        value = rng.choice(metas)
        if rng.random() < 0.3:
            return damaged(rng, json.dumps(value).encode())
        return with_one_odd_value(rng, value) if rng.random() < 0.3 else \
            {**value, 'tokenizer': with_one_odd_value(rng, value['tokenizer'])}

    def read(value):
        write(path, value)
        meta = read_meta(folder)
        Split(folder, 'train', meta, 8).check_ids(10**9)
        check_tokenizer(meta['tokenizer'], {'tokenizer': meta['tokenizer']})
        inspect_dataset(folder)
        used(meta['tokenizer'])
    try:
        assert not any(isinstance(outcome(read, value), str) for value in metas[:-1])
        wrong, right = each(count, make, read)
    finally:
        write(path, meta)
    assert wrong > 0.05 * count and right > 0.05 * count


@inputs
def test_any_tokenizer_of_a_checkpoint_works_or_is_refused(count, monkeypatch):
    monkeypatch.setattr('tiktoken.load.read_file', lambda path: b'')  # no downloads
    specs, odd = tokenizers()[:-1], [*ODD, (1, 2), {1: 2}, b'x']
    assert not any(isinstance(outcome(used, spec), str) for spec in specs)
    wrong, right = each(count, lambda rng: with_one_odd_value(rng, rng.choice(specs), odd), used)
    assert wrong > 0.05 * count and right > 0.05 * count


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@inputs
def test_any_meta_pkl_is_characters_or_a_sentence(count, tmp_path):
    """Some of them name a function that would make a folder."""
    chars = 'abc'
    meta = {'vocab_size': 3, 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}
    ran = str(tmp_path / 'ran')

    def make(rng):
        value = with_one_odd_value(rng, meta, [*ODD, Malicious(ran)]) if rng.random() < 0.5 else meta
        data = pickle.dumps(value, protocol=rng.randrange(6))
        return damaged(rng, data) if rng.random() < 0.7 else data

    def read(data):
        (tmp_path / 'meta.pkl').write_bytes(data)
        used(read_meta(str(tmp_path))['tokenizer'])
    wrong, right = each(count, make, read)
    assert wrong > 0.05 * count and right > 0.05 * count and not os.path.exists(ran)


@pytest.fixture(scope='module')
def tokenizer_json():
    """A tokenizer.json as Hugging Face's tokenizers writes it, of 20 merges."""
    tokenizers = pytest.importorskip('tokenizers')
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.train_from_iterator(['the then there other '] * 5, tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=['<|endoftext|>'], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return json.loads(t.to_str())


@inputs
def test_any_tokenizer_json_is_a_tokenizer_or_a_sentence(count, tmp_path, tokenizer_json):
    config = {'eos_token': {'content': '<|endoftext|>'}, 'bos_token': '<|endoftext|>'}

    def make(rng):
        files = {'tokenizer.json': tokenizer_json, 'tokenizer_config.json': config}
        name = rng.choice(['tokenizer.json'] * 4 + ['tokenizer_config.json'])
        files[name] = damaged(rng, json.dumps(files[name]).encode()) if rng.random() < 0.4 else \
            with_one_odd_value(rng, files[name])
        return files

    def read(files):
        for name, value in files.items():
            write(tmp_path / name, value)
        used(read_tokenizer_json(str(tmp_path)))
    assert not isinstance(outcome(read, {'tokenizer.json': tokenizer_json, 'tokenizer_config.json': config}), str)
    wrong, right = each(count, make, read)
    assert wrong > 0.05 * count and right > 0.05 * count


# -----------------------------------------------------------------------------
# Hugging Face folders

@pytest.fixture(scope='module')
def gpt2_folder():
    """{file: content} of a tiny GPT-2; the safetensors file is (header, data)."""
    C, V, T = 4, 6, 5
    shapes = {'wte.weight': [V, C], 'wpe.weight': [T, C]}
    shapes |= {'ln_f.weight': [C], 'ln_f.bias': [C]}
    for name, size in (('attn.c_attn', 3 * C), ('attn.c_proj', C), ('mlp.c_fc', 4 * C), ('mlp.c_proj', C)):
        shapes |= {f'h.0.{name}.weight': [4 * C if name == 'mlp.c_proj' else C, size], f'h.0.{name}.bias': [size]}
    shapes |= {f'h.0.{name}.{w}': [C] for name in ('ln_1', 'ln_2') for w in ('weight', 'bias')}
    header, end = {'__metadata__': {'format': 'pt'}}, 0
    for name, shape in shapes.items():
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [end, end := end + 4 * int(np.prod(shape))]}
    config = {'model_type': 'gpt2', 'n_layer': 1, 'n_head': 2, 'n_embd': C, 'n_positions': T, 'vocab_size': V,
              'n_inner': None, 'activation_function': 'gelu_new', 'layer_norm_epsilon': 1e-5,
              'tie_word_embeddings': True}
    return {'config.json': config, 'model.safetensors': (header, bytes(end)),
            'model.safetensors.index.json': {'weight_map': dict.fromkeys(shapes, 'model.safetensors')}}


def safetensors_bytes(header, data):
    header = json.dumps(header).encode()
    return len(header).to_bytes(8, 'little') + header + data


@inputs
def test_any_safetensors_file_is_tensors_or_a_sentence(count, tmp_path, gpt2_folder):
    header, data = gpt2_folder['model.safetensors']
    path = tmp_path / 'x.safetensors'

    def make(rng):
        if rng.random() < 0.5:
            return damaged(rng, safetensors_bytes(header, data))
        return safetensors_bytes(with_one_odd_value(rng, header), data)

    def read(raw):
        path.write_bytes(raw)
        for tensor in read_safetensors(str(path)).values():
            tensor.float().sum()
    wrong, right = each(count, make, read)
    assert wrong > 0.05 * count and right > 0.05 * count


@inputs
def test_any_hugging_face_folder_is_a_model_or_a_sentence(count, tmp_path, gpt2_folder):
    header, data = gpt2_folder['model.safetensors']
    whole = {**gpt2_folder, 'model.safetensors': safetensors_bytes(header, data)}

    def make(rng):
        name = rng.choice(['model.safetensors'] * 4 + list(whole))
        files = dict(whole)
        if rng.random() < 0.4:
            value = whole[name]
            files[name] = damaged(rng, value if isinstance(value, bytes) else json.dumps(value).encode())
        elif name == 'model.safetensors':
            files[name] = safetensors_bytes(with_one_odd_value(rng, header), data)
        else:
            files[name] = with_one_odd_value(rng, whole[name])
        if rng.random() < 0.02:
            files[rng.choice(list(files))] = None
        return files

    def read(files):
        for name, value in files.items():
            path = tmp_path / name
            if value is None:
                path.unlink(missing_ok=True)
                path.mkdir()
            else:
                if path.is_dir():
                    path.rmdir()
                write(path, value)
        load_gpt2(str(tmp_path))(torch.zeros(1, 2, dtype=torch.long))
    assert not isinstance(outcome(read, whole), str)
    wrong, right = each(count, make, read)
    assert wrong > 0.05 * count and right > 0.05 * count


# -----------------------------------------------------------------------------
# what the above has found, and what it would need luck to find

def with_value(value, path, new):
    """A copy of nested containers in which the value at a path of keys is another."""
    value = copy.copy(value)
    value[path[0]] = with_value(value[path[0]], path[1:], new) if path[1:] else new
    return value


@pytest.mark.parametrize('path, new, words', [
    (['model', 'lm_head.weight'], torch.zeros(1).expand(257, 8), 'lies in 4 bytes'),
    (['model', 'lm_head.weight'], 3, 'lm_head.weight'),
    (['model', 'lm_head.weight'], torch.zeros(257, 8, dtype=torch.complex64), 'refused'),
    (['model', 'lm_head.weight'], torch.zeros(257, 8).int(), 'floating-point'),
    (['model', 3], torch.zeros(1), "'model' is no dict of names"),
    (['model_args', 'n_layer'], '1', "n_layer='1' is of the wrong type"),
    (['model_args', 'n_layer'], 1.5, 'n_layer=1.5'),
    (['model_args', 'n_ff'], 10**12, 'larger model'),
    (['model_args', 'block_size'], 10**9, 'larger model|angles'),
    (['model_args', 'softcap'], float('inf'), 'softcap=inf'),
    (['config'], [], "'config'"),
    (['config', 'seed'], torch.zeros(2), "'config' holds more"),
    (['versions'], 'x', "'versions'"),
    (['tokenizer'], [], "'tokenizer'"),
    (['state', 'iter_num'], -1, 'cannot be'),
    (['state', 'tokens_seen'], '8', "tokens_seen='8'"),
    (['state', 'logged'], [1], 'cannot be'),
    (['state', 'surprise'], 1, 'surprise'),
    (['iter_num'], None, 'cannot be'),
    (['iter_num'], 1.5, 'cannot be'),
    (['scaler', 'scale'], 'x', 'scaler'),
    (['optimizer'], 3, "'optimizer'"),
    (['optimizer', 'state'], [1], 'no dict of dicts'),
    (['optimizer', 'param_groups'], [{}, {}], 'does not fit'),
    (['optimizer', 'state', 0], {}, 'parameter 0 has {}'),
    (['optimizer', 'state', 0, 'exp_avg'], torch.zeros(2, 3), r'parameter 0 has .*\(2, 3\)'),
    (['optimizer', 'state', 0, 'step'], torch.zeros(5), r'\(5,\)'),
    (['optimizer', 'state', 0, 'exp_avg'], [], 'parameter 0')])
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_checkpoint_with_one_wrong_value_is_refused(run, path, new, words):
    """AdamW's fused kernel took an exp_avg that was too short, and wrote over whatever lay behind it."""
    refused(run.resume, saved(with_value(run.checkpoint, path, new)), words=words)


class Call:
    """Pickled as a call of one of the names that torch allows."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('call', [Call(bytearray, 10**12), Call(torch.FloatTensor, 10**11),
                                  Call(torch.UntypedStorage, 10**12), Call(set, [1])])
def test_a_checkpoint_cannot_ask_for_memory_by_a_call(run, call):
    assert 'refused' in outcome(run.sample, saved({**run.checkpoint, 'x': call}))


def test_a_checkpoint_that_holds_itself_is_read(run):
    loop = []
    loop.append(loop)
    assert not isinstance(outcome(run.sample, saved({**run.checkpoint, 'x': loop})), str)


@pytest.mark.parametrize('how', ['compressed', 'twice', 'behind others'])
def test_a_zip_file_that_two_readers_read_differently_is_refused(run, how):
    data = saved(run.checkpoint)
    if how == 'compressed':  # a thousand times what it is on the disk
        f = io.BytesIO()
        with zipfile.ZipFile(f, 'w', zipfile.ZIP_DEFLATED) as z:
            z.writestr('archive/data.pkl', bytes(10**7))
        data = f.getvalue()
    elif how == 'twice':
        data = with_records(data, lambda records: [*records.items(), next(iter(records.items()))])
    else:
        data = pickle.dumps({'model': {}}, protocol=2) + data
    refused(run.sample, data, words='claim more bytes|begin with records')


BPE = tokenizers()[3]


@pytest.mark.parametrize('spec', [
    {**BPE, 'specials': {'<s>': 10**9}, 'bos': 10**9, 'eot': None}, {**BPE, 'specials': {'<s>': -1, '</s>': 268}},
    {**BPE, 'eot': 268.0}, {**BPE, 'eot': 1e308}, {**BPE, 'eot': [1]}, {**BPE, 'bos': 10**6}, {**BPE, 'nfc': 'x'},
    {**BPE, 'pattern': r'(a|a)*$'}, {**BPE, 'pattern': None}, {**BPE, 'specials': []}])
def test_a_tokenizer_that_tiktoken_would_panic_or_swell_at_is_refused(spec):
    refused(used, spec, words='describes no tokenizer')


@pytest.mark.parametrize('change', [{'vocab_size': 10**18}, {'vocab_size': 256}, {'eot': 'x'}, {'tokenizer': []},
                                    {'splits': {s: {'tokens': 9, 'bytes': 'x'} for s in ('train', 'val')}}])
def test_a_meta_json_with_a_wrong_value_is_refused(tmp_path, change):
    folder = write_bins(tmp_path, np.arange(99), np.arange(50))
    with open(tmp_path / 'meta.json', encoding='utf-8') as f:
        meta = json.load(f)
    write(tmp_path / 'meta.json', {**meta, **change})
    refused(read_meta, folder, words='prepare the dataset again')


@pytest.mark.parametrize('data', [
    b'\x80\x02K\x01r\xff\xff\xff\x7f.',  # value number 2**31 - 1 of one
    pickle.dumps({'vocab_size': 10**4, 'itos': dict.fromkeys(range(10**4), 'a' * 10**6)})])  # 10 GB when joined
def test_a_small_meta_pkl_cannot_ask_for_gigabytes(tmp_path, data):
    (tmp_path / 'meta.pkl').write_bytes(data)
    refused(read_meta, str(tmp_path), words="not nanoGPT's meta.pkl")


def test_a_tokenizer_json_with_an_enormous_id_is_refused(tmp_path, tokenizer_json):
    write(tmp_path / 'tokenizer.json', with_value(tokenizer_json, ['model', 'vocab', 'a'], 10**11))
    refused(read_tokenizer_json, str(tmp_path), words='no whole number from 0')


@pytest.mark.parametrize('shape, size', [('', 4), ({}, 4), ([True], 4), ([1] * 65, 4), ([-1, -1], 4), ([[]], 4),
                                         ([0, 2**63], 0), ([0] + [1000] * 50, 0)])
def test_shapes_that_are_none_are_refused(tmp_path, shape, size):
    path = tmp_path / 'x.safetensors'
    header = {'x': {'dtype': 'F32', 'shape': shape, 'data_offsets': [0, size]}}
    path.write_bytes(safetensors_bytes(header, bytes(size)))
    refused(read_safetensors, str(path), words=str(path))


@pytest.mark.parametrize('name, value, words', [
    ('config.json', [], 'no object'), ('config.json', b'[' * 10**5, 'cannot be read'),
    ('model.safetensors.index.json', {}, 'holds which weight'),
    ('model.safetensors.index.json', {'weight_map': {'x': 3}}, 'holds which weight'),
    ('model.safetensors.index.json', b'\xff', 'cannot be read')])
def test_a_hugging_face_folder_with_a_wrong_file_is_refused(tmp_path, gpt2_folder, name, value, words):
    files = {**gpt2_folder, 'model.safetensors': safetensors_bytes(*gpt2_folder['model.safetensors']), name: value}
    for file, content in files.items():
        write(tmp_path / file, content)
    refused(load_gpt2, str(tmp_path), words=words)
