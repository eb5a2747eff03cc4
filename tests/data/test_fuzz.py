"""
Whatever bytes are in a file: the answer is a result or a ValueError. The inputs are damaged valid ones, each
a function of its number: a hundred for each reader, 5,000 with -m slow.
"""

import json
import random

import numpy as np
import pytest
from conftest import write_bins

from hotloop.data.dataset import read_meta
from hotloop.training.dataloader import Split
from hotloop.weights.safetensors import read_safetensors

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
