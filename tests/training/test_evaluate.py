"""An evaluation is the mean over fixed windows, whatever the batch is."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import noise, write_bins
from test_train import tiny_gpt

from hotloop.data.dataset import read_meta
from hotloop.system.distributed import Env
from hotloop.training.dataloader import Mixture, Split
from hotloop.training.evaluate import count_windows, eval_windows, evaluate, fixed_windows

TOKENS = noise(487, seed=1)  # 30 windows of 16 and a tail of 6
MASK = np.random.default_rng(2).random(487) < np.linspace(0.05, 1, 487) ** 2
BYTES = np.arange(257) % 4


@pytest.fixture
def splits(tmp_path):
    """{'plain': ..., 'masked': ...}: the same tokens."""
    masks = {'plain': None, 'masked': {'train': MASK, 'val': MASK}}
    folders = {name: write_bins(tmp_path / name, TOKENS, TOKENS, masks=masks[name]) for name in masks}
    return {name: Split(folders[name], 'val', read_meta(folders[name]), 16) for name in masks}


def nats_by_hand(model):
    """Nats of every target, one position after another, (486,)."""
    tokens, nats = torch.tensor(TOKENS), torch.zeros(486, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for rows, length in ((torch.arange(30) * 16, 16), (torch.tensor([480]), 6)):
            for t in range(length):
                logits = model(tokens[rows[:, None] + torch.arange(t + 1)])
                targets = tokens[rows + t + 1][:, None]
                nats[rows + t] = -logits.log_softmax(-1).double().gather(1, targets)[:, 0]
    model.train()
    return nats


@pytest.mark.parametrize('kind', ['plain', 'masked'])
def test_the_loss_is_the_mean_over_every_target_that_counts(splits, kind):
    """The tail included; bits per byte are over the bytes of those very targets."""
    model = tiny_gpt(bias=True)
    counts = torch.from_numpy(MASK[1:]) if kind == 'masked' else torch.ones(486, dtype=torch.bool)
    nats, targets = nats_by_hand(model)[counts], torch.tensor(TOKENS[1:])[counts]
    result = evaluate(model, splits[kind], None, 7, Env(), BYTES)
    assert result['tokens'] == counts.sum()
    assert result['loss'] == pytest.approx(nats.mean().item(), rel=1e-6)
    assert result['bpb'] == pytest.approx(nats.sum().item() / math.log(2) / BYTES[targets].sum(), rel=1e-6)
    assert model.training, 'the model was left in evaluation mode'
    if kind == 'plain':  # windows of equal length: the deviation of their means over sqrt(their number)
        stderr = nats[:480].view(30, 16).mean(1).std() / 30**0.5
        assert evaluate(model, splits[kind], 30, 8, Env())['stderr'] == pytest.approx(stderr.item(), rel=1e-4)


@pytest.mark.parametrize('num_windows', [None, 30, 2])
def test_an_evaluation_does_not_depend_on_the_batch(splits, num_windows):
    """The same windows, and the same loss, tokens and standard error."""
    model = tiny_gpt()
    expected = evaluate(model, splits['plain'], num_windows, 4, Env(), BYTES)
    assert expected['tokens'] == {None: 486, 30: 480, 2: 32}[num_windows], 'all include the tail'
    for batch in (1, 3, 64):
        result = evaluate(model, splits['plain'], num_windows, batch, Env(), BYTES)
        assert result == pytest.approx(expected, rel=1e-6), batch


@pytest.mark.parametrize('number', [2, 7, 29])
def test_a_capped_evaluation_spreads_its_windows_evenly(splits, number):
    """The first and the last full window are among them, and gaps differ by one at most."""
    [(_, starts)] = fixed_windows(splits['plain'], number)
    assert len(starts) == number and (starts[0], starts[-1]) == (0, 29 * 16)
    assert np.ptp(np.diff(starts)) <= 16


def test_batches_of_an_evaluation_have_one_shape(splits, monkeypatch):
    """So that the model is compiled once. A time budget reserves time by the number of windows."""
    seen, gather = [], Split.gather

    def spy(split, starts):
        seen.append(len(starts))
        return gather(split, starts)
    monkeypatch.setattr(Split, 'gather', spy)
    mixture = Mixture(['a', 'b'], list(splits.values()), [3, 1])
    for split, number in ((splits['plain'], None), (mixture, 27)):
        seen.clear()
        evaluate(tiny_gpt(), split, number, 4, Env())
        assert set(seen) == {4} and count_windows(split, number) <= sum(seen)
    assert count_windows(splits['plain'], None) == 31 and count_windows(mixture, 27) == 27


def test_label_smoothing_and_dropout_act_in_training_only(splits):
    plain, regularized = tiny_gpt(), tiny_gpt(label_smoothing=0.2, dropout=0.5)
    results = [evaluate(model, splits['plain'], None, 8, Env()) for model in (plain, regularized)]
    assert results[0] == results[1]
    x, y = map(torch.from_numpy, splits['plain'].gather([0]))
    assert not torch.allclose(plain(x, y), regularized(x, y), rtol=1e-3)


def test_a_mixture_has_the_mean_by_weight_and_the_losses_of_each(splits):
    """Bits per byte are over the bytes of the mixture, not the mean of two ratios."""
    model, mixture = tiny_gpt(), Mixture(['a', 'b'], list(splits.values()), [3, 1])
    both = evaluate(model, mixture, 20, 4, Env(), BYTES)
    a = evaluate(model, splits['plain'], 15, 4, Env(), BYTES)
    b = evaluate(model, splits['masked'], 5, 4, Env(), BYTES)
    assert both['loss'] == pytest.approx(0.75 * a['loss'] + 0.25 * b['loss'])
    assert both['losses'] == {'a': a['loss'], 'b': b['loss']} and both['tokens'] == a['tokens'] + b['tokens']
    assert both['stderr'] == pytest.approx(math.hypot(0.75 * a['stderr'], 0.25 * b['stderr']))
    bytes_per_token = [result['loss'] / math.log(2) / result['bpb'] for result in (a, b)]
    expected = both['loss'] / math.log(2) / (0.75 * bytes_per_token[0] + 0.25 * bytes_per_token[1])
    assert both['bpb'] == pytest.approx(expected)
    assert evaluate(model, mixture, None, 4, Env(), BYTES, stop=lambda: True) is None and model.training


def masked_split(folder, unmasked):
    """A Split of 100 tokens, of which the loss counts those at these places."""
    mask = np.zeros(100)
    mask[unmasked] = 1
    write_bins(folder, noise(100), noise(100), masks={'train': mask, 'val': mask})
    return Split(str(folder), 'val', read_meta(str(folder)), 16)


@pytest.mark.parametrize('unmasked, windows, found', [
    ([99], 1, 1), ([99], 7, 1), ([99], None, 1), ([17, 18, 50, 99], 2, 3), ([17, 18, 50, 99], 3, 4),
    ([0, 16, 17], 1, 1), ([0, 16, 17], 2, 2)])
def test_an_evaluation_reads_windows_that_have_a_target(tmp_path, unmasked, windows, found):
    """So few answers among long prompts are found. The short last window counts if all do."""
    split = masked_split(tmp_path, unmasked)
    assert evaluate(tiny_gpt(), split, windows, 4, Env())['tokens'] == found


@pytest.mark.parametrize('tokens, iters, size, windows', [
    (2**20, None, 10**7, (65536, 16384)), (None, None, 10**7, (None, 16384)), (10, None, 10**7, (1, 1)),
    (None, None, 6400, (None, 100)), (10, 3, 10**7, (12, 12))])
def test_how_much_an_evaluation_reads(tokens, iters, size, windows):
    """eval_tokens caps tokens; eval_iters counts batches of batch_size, as in nanoGPT."""
    cfg = SimpleNamespace(eval_tokens=tokens, eval_iters=iters, batch_size=4)
    assert eval_windows(cfg, SimpleNamespace(T=16, num_tokens=size)) == windows
