"""
Whatever bytes are in a file or on a command line: the answer is a result or a ValueError. The inputs are
damaged valid ones, each a function of its number: a hundred for each reader, 5,000 with -m slow.
"""

import contextlib
import dataclasses
import io
import json
import random
import string
from pathlib import Path

import numpy as np
import pytest
from conftest import write_bins

import configurator
from configurator import as_file, configure, differences
from hotloop.data.dataset import read_meta
from hotloop.data.documents import ReadConfig
from hotloop.training.dataloader import Split
from hotloop.weights.safetensors import read_safetensors
from model import GPTConfig
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

CARDS = sorted((Path(configurator.__file__).parent / 'config').glob('*.py'))

inputs = pytest.mark.parametrize('count', [100, pytest.param(5000, marks=pytest.mark.slow)])


def damaged(rng, data):
    """Bytes with one accident or a few: overwritten, flipped, inserted, lost, repeated or cut off."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, start = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 2, 4, 8, 50])
        other = rng.choice([rng.randbytes(length), bytes(length), b'\xff' * length])
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at:at + 1])
        before, after, repeated = data[:at], data[at:], data[start:start + rng.randrange(1, 100)]
        data = rng.choice([before + other + after[length:], before + flipped + after[1:], before,
                           before + other + after, before + after[length:], before + repeated + after])
    return data


def each(count, make, read):
    """Calls read(make(random.Random(number))) for each number; returns how many calls raised ValueError."""
    refused = 0
    for number in range(count):
        given = make(random.Random(number))
        try:
            read(given)
        except ValueError:
            refused += 1
        except Exception as e:
            e.add_note(f'input {number}: {str(given)[:2000]!r}')
            raise
    return refused


@inputs
def test_a_safetensors_file_is_tensors_or_an_error(count, tmp_path):
    """Half of the damage is in the header."""
    path, header = tmp_path / 'x.safetensors', {'__metadata__': {'format': 'pt'}}
    for i in range(4):
        header[f'h.{i}.weight'] = {'dtype': 'F32', 'shape': [3, 2], 'data_offsets': [24 * i, 24 * i + 24]}
    header = json.dumps(header).encode()

    def make(rng):
        data = len(header).to_bytes(8, 'little') + header + bytes(96)
        if rng.random() < 0.5:
            return damaged(rng, data)
        new = damaged(rng, header)
        return len(new).to_bytes(8, 'little') + new + bytes(96)

    def read(raw):
        path.write_bytes(raw)
        for tensor in read_safetensors(str(path)).values():
            tensor.float().sum()
    assert 0.3 * count < each(count, make, read) < count


@inputs
def test_a_meta_json_is_a_dataset_or_an_error(count, tmp_path):
    tokenizer = {'kind': 'char', 'chars': '\n Helowrd', 'eot': False}
    folder = write_bins(tmp_path, np.arange(99) % 9, np.arange(50) % 9, tokenizer, 9)
    data = (tmp_path / 'meta.json').read_bytes()

    def read(raw):
        (tmp_path / 'meta.json').write_bytes(raw)
        Split(folder, 'train', read_meta(folder), 8)
    assert 0.3 * count < each(count, lambda rng: damaged(rng, data), read) < count


def random_card(rng):
    """One of our recipe cards with damaged, swapped or repeated lines. None of them computes for long."""
    lines = rng.choice(CARDS).read_bytes().splitlines(keepends=True)
    for _ in range(rng.randrange(1, 4)):
        i = rng.randrange(len(lines))
        name, equals, _ = lines[i].partition(b' = ')
        value = rng.choice(WORDS).encode('utf-8', 'surrogatepass')
        lines[i] = rng.choice([damaged(rng, lines[i]), rng.choice(lines), b'', b'  ' + lines[i],
                               name + equals + value + b'\n', b'del ' + name + b'\n'])
    text = b''.join(lines)
    return text.translate(bytes.maketrans(b'*<%({', b'+++++'))  # no powers, shifts and calls


@inputs
@pytest.mark.filterwarnings('ignore::SyntaxWarning')
def test_a_config_file_is_settings_or_an_error(count, tmp_path):
    card = tmp_path / 'card.py'

    def read(text):
        card.write_bytes(text)
        configure(GPTConfig, TrainConfig, argv=[str(card)])
    assert 0.05 * count < each(count, random_card, read) < count


PROGRAMS = [(GPTConfig, TrainConfig), (PrepareConfig, ReadConfig), (SampleConfig,)]
WORDS = ['', '-', '--', '=', '--=', '0', '-1', '0.5', '1e5', '1e400', 'nan', '-inf', '0x10', '1_0', '9' * 400,
         'true', 'False', 'None', 'null', '[]', '{}', '1,2', 'x', 'é', '\U0001f600', '\0', '\ud800', 'a\nb',
         '../..', 'auto', '/dev/null', 'missing.py', '-h=1', '--help=1', '__import__("os")', 'muon', 'byte',
         'bpe:300', 'bpe:٣٠٠']


def random_command(rng):
    """(dataclasses of a program, argv): flags, their values, and words beside them."""
    classes, argv = rng.choice(PROGRAMS), []
    for _ in range(rng.randrange(4)):
        field = rng.choice([field for cls in classes for field in dataclasses.fields(cls)])
        noise = ''.join(rng.choices(string.printable + '\udcff\0٣', k=3))
        name, text = field.name, rng.choice([str(field.default), rng.choice(WORDS), noise])
        if rng.random() < 0.1:
            name = damaged(rng, name.encode()).decode('utf-8', 'surrogateescape')
        argv += rng.choice([[f'--{name}={text}'], [f'--{name.replace("_", "-")}={text}'], [f'--{name}', text],
                            [f'--{name}={field.default}'], [f'--{name}'], [f'{name}={text}'], [text]])
    return classes, argv


@inputs
def test_a_command_line_is_settings_or_an_error(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(command):
        classes, argv = command
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                objects, given, _ = configure(*classes, argv=argv)
        except SystemExit as e:
            assert e.code == 0 and {'--help', '-h'} & set(argv)
            return
        differences(objects, given)
        as_file({name: value for o in objects for name, value in vars(o).items()}).encode('utf-8')
    assert 0.05 * count < each(count, random_command, read) < count
