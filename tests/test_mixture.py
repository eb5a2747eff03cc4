"""Several datasets in one run: each window is of one of them, by weight, as a pure function of seed and step."""

import json
import os

import numpy as np
import pytest
from conftest import TINY, noise, write_bins

import train
from hotloop.checkpoint import load_checkpoint
from hotloop.dataloader import Batches, Mixture, Split, open_split, windows_per_epoch
from hotloop.dataset import open_datasets, read_meta
from hotloop.distributed import Env
from hotloop.evaluate import evaluate, evaluate_any
from model import GPT
from train import TrainConfig


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Datasets whose tokens tell them apart: a of ids below 64, b from there to 127, wide of four bytes from 128 on."""
    folder = tmp_path_factory.mktemp('data')
    write_bins(folder / 'a', noise(3001, 0, 0, 64), noise(400, 1, 0, 64))
    write_bins(folder / 'b', noise(901, 2, 64, 128), noise(300, 3, 64, 128))
    write_bins(folder / 'wide', noise(501, 4, 128, 192), noise(200, 5, 128, 192), dtype='uint32')
    write_bins(folder / 'other', noise(501, 4), noise(200, 5), tokenizer={'kind': 'char', 'chars': 'abc'})
    return str(folder)


def mixture(folder, dataset, T=16, name='train'):
    return open_split(open_datasets(TrainConfig(dataset=dataset, data_dir=folder)), name, T)


def owner(x):
    """Which dataset the rows are of; all tokens of a row must agree."""
    ids = x // 64
    assert (ids == ids[:, :1]).all()
    return ids[:, 0]


def test_windows_are_drawn_by_weight_and_each_split_once_an_epoch(folder):
    mixed = mixture(folder, 'a:0.7,b:0.2,wide:0.1')
    index = np.arange(30_000)
    starts = mixed.starts(7, index)
    x, y = mixed.gather(starts)
    of = owner(x)
    assert owner(y).tolist() == of.tolist()
    for block in of.reshape(3, 10_000):
        assert [int((block == k).sum()) for k in range(3)] == [7000, 2000, 1000]
    assert abs(int((of[:500] == 0).sum()) - 350) < 50  # and any stretch of it has about that much
    for k, split in enumerate(mixed.splits):
        mine = starts[of == k] - mixed.bases[k]
        assert np.array_equal(mine, split.starts(7 + k, np.arange(len(mine))))
        per_epoch = windows_per_epoch(split.num_tokens, 16)
        assert len(np.unique(mine[:per_epoch])) == per_epoch


def test_the_order_is_a_pure_function_of_seed_and_step(folder):
    mixed, again = mixture(folder, 'a:1,b:1'), mixture(folder, 'a:1,b:1')
    steps = [mixed.starts(7, np.arange(s * 12, s * 12 + 12)) for s in range(2000)]
    for s in (1999, 0, 834, 833, 1200):  # over the seam of two blocks
        assert np.array_equal(again.starts(7, np.arange(s * 12, s * 12 + 12)), steps[s])
    assert np.array_equal(np.concatenate(steps), mixed.starts(7, np.arange(24_000)))
    assert not np.array_equal(mixed.starts(8, np.arange(100)), mixed.starts(7, np.arange(100)))


def test_without_weights_the_sizes_are_the_weights(folder):
    mixed = mixture(folder, 'a,wide')
    assert mixed.weights == pytest.approx([3001 / 3502, 501 / 3502])
    assert isinstance(mixture(folder, 'a'), Split) and isinstance(mixture(folder, 'a:1,b:3'), Mixture)
    assert mixture(folder, 'a:1,b:3').weights == [0.25, 0.75]


@pytest.mark.parametrize('world', [1, 2, 4])
def test_processes_share_out_the_global_batch(folder, world):
    mixed = mixture(folder, 'a:0.5,b:0.5')
    cfg = TrainConfig(batch_size=8, gradient_accumulation_steps=4)
    rows = [load()[0].numpy() for rank in range(world) for load in Batches(mixed, cfg, Env(rank, world)).step(6)[1]]
    expected = mixed.gather(mixed.starts(cfg.seed, np.arange(6 * 32, 7 * 32)))[0]
    assert np.array_equal(np.concatenate(rows), expected)


def test_masks_of_one_of_them_count(tmp_path):
    masks = {name: np.arange(n) % 2 for name, n in (('train', 500), ('val', 100))}
    write_bins(tmp_path / 'm', noise(500), noise(100), masks=masks)
    write_bins(tmp_path / 'p', noise(500), noise(100))
    mixed = mixture(str(tmp_path), 'm:1,p:1')
    starts = mixed.starts(1, np.arange(40))
    assert mixed.num_targets(starts) == (mixed.gather(starts)[1] >= 0).sum() < 40 * 16


@pytest.mark.parametrize('dataset, words', [
    ('a:x,b:0.5', 'give all of them a weight above 0'), ('a:0.5,b', 'give all of them a weight above 0'),
    ('a:0,b:1', 'give all of them'),
    ('a:0.00001,b:1', 'a would never come: its weight is below 1 in 20,000'), ('a:-1,b:1', 'give all of them'),
    ('a:nan,b:1', 'give all of them'), ('a:x', 'give all of them'),
    ('a,nothing', r'nothing does not exist; make it with: python prepare\.py'), ('a,,b', 'must be a name below'),
    ('a,../b', 'must be a name below'), ('a,other', 'the tokenizers of a and other differ')])
def test_mixtures_that_cannot_be(folder, dataset, words):
    with pytest.raises(ValueError, match=words):
        mixture(folder, dataset)


def test_a_run_on_two_resumes_bit_for_bit_and_tells_the_loss_of_each(folder, tmp_path, capsys):
    def run(out, **settings):
        flags = {**TINY, 'data_dir': folder, 'dataset': 'a:0.75,b:0.25', 'out_dir': tmp_path / out, **settings}
        return train.main([f'--{k}={v}' for k, v in flags.items()])
    assert run('whole') == 0
    out = capsys.readouterr().out
    assert 'data: a:0.75,b:0.25 (75.0%, 25.0%), 3,902 training and 700 validation tokens' in out
    assert run('parts', max_iters=6, lr_decay_iters=10) == 0 and run('parts', init_from='resume') == 0
    whole, parts = (load_checkpoint(str(tmp_path / name / 'ckpt.pt')) for name in ('whole', 'parts'))
    assert all((whole['model'][name] == parts['model'][name]).all() for name in whole['model'])
    told = [json.loads(line) for line in (tmp_path / 'whole' / 'log.jsonl').read_text().splitlines()]
    last = [line for line in told if 'val_loss' in line][-1]
    assert last['val_loss'] == pytest.approx(0.75 * last['val_loss_a'] + 0.25 * last['val_loss_b'])
    with pytest.raises(ValueError, match='dataset'):
        run('parts', init_from='resume', dataset='a:0.5,b:0.5', max_iters=12)


def test_its_loss_is_that_of_each_alone(folder, tmp_path):
    """evaluate() of each, weighed; bits per byte over the bytes of the mixture."""
    flags = {**TINY, 'data_dir': folder, 'dataset': 'a', 'out_dir': tmp_path / 'out', 'max_iters': 2}
    assert train.main([f'--{k}={v}' for k, v in flags.items()]) == 0
    checkpoint = load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))
    model = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model'])
    mixed, table = mixture(folder, 'a:0.75,b:0.25', name='val'), np.arange(257) % 4
    both = evaluate_any(model, mixed, None, 4, Env(), table)
    splits = [Split(path, 'val', read_meta(path), 16) for path in (os.path.join(folder, name) for name in 'ab')]
    a, b = (evaluate(model, split, None, 4, Env(), table) for split in splits)
    assert both['loss'] == pytest.approx(0.75 * a['loss'] + 0.25 * b['loss'])
    assert both['losses'] == {'a': a['loss'], 'b': b['loss']} and both['tokens'] == 698
    bytes_a, bytes_b = (e['loss'] / np.log(2) / e['bpb'] for e in (a, b))
    assert both['bpb'] == pytest.approx(both['loss'] / np.log(2) / (0.75 * bytes_a + 0.25 * bytes_b))
