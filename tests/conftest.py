"""Shared by the tests: a tiny dataset, and training runs in this process."""

import json
import os
import signal

import numpy as np
import pytest
import torch

import train

# two layers, a third of a second for ten steps, with a warm-up, a decay and three evaluations
TINY = dict(dataset='tiny', device='cpu', compile=False, threads=1, n_layer=2, n_head=2, n_embd=32, block_size=16,
            batch_size=4, gradient_accumulation_steps=2, max_iters=10, warmup_iters=3, learning_rate=5e-3, min_lr=5e-4,
            eval_interval=4, eval_tokens=1024)


def write_bins(folder, tokens, val, tokenizer=None, vocab_size=257, dtype='uint16', masks=None):
    """A dataset by hand: folder/{train,val}.bin, meta.json unless tokenizer is False, and masks."""
    os.makedirs(folder, exist_ok=True)
    splits = {'train': np.asarray(tokens), 'val': np.asarray(val)}
    for name, ids in splits.items():
        ids.astype(dtype).tofile(f'{folder}/{name}.bin')
        if masks:
            masks[name].astype(np.uint8).tofile(f'{folder}/{name}.mask.bin')
    meta = {'format': 1, 'dtype': dtype, 'vocab_size': vocab_size, 'tokenizer': tokenizer or {'kind': 'byte'},
            'eot': None, 'splits': {name: {'tokens': len(ids)} for name, ids in splits.items()}, 'source': 'by hand'}
    if tokenizer is not False:
        with open(f'{folder}/meta.json', 'w', encoding='utf-8') as f:
            json.dump(meta, f)
    return str(folder)


def noise(n, seed=0, low=32, high=96):
    """n byte tokens, skewed so that there is something to learn."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.integers(low, high, n), rng.integers(low, high, n))


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """data_dir with the dataset tiny: 4,001 training tokens; 487 to validate on, 30 windows of 16 and a tail of 6."""
    folder = tmp_path_factory.mktemp('data')
    write_bins(folder / 'tiny', noise(4001), noise(487, seed=1))
    return str(folder)


@pytest.fixture
def train_tiny(tmp_path, data_dir):
    """train_tiny(out, *words, **settings) runs train.main on TINY with these; returns its exit code."""
    def run(out='out', *words, **settings):
        flags = {**TINY, 'data_dir': data_dir, **settings, 'out_dir': str(tmp_path / out)}
        return train.main([*map(str, words), *(f'--{k}={v}' for k, v in flags.items())])
    return run


@pytest.fixture(autouse=True)
def as_it_was():
    """Training takes over signals and threads of its process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
