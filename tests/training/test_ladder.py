"""A time budget chooses the depth by the speed of the machine and a law of loss."""

import os
import re
import signal

import numpy as np
import pytest
from conftest import at_step, error_of, load, same, write_bins
from test_deadline import Clock

import train
from hotloop.data.dataset import open_datasets
from hotloop.training import depth, ladder
from hotloop.training.depth import num_parameters, rung
from hotloop.training.ladder import DEPTHS, Ladder, Text, expected_loss, worth
from hotloop.training.mixture import open_split

TEXT = Text(bits=2.0, bytes_per_token=1.0, num_bytes=1e7)
TINY_RUNG = {'block_size': 16, 'batch_size': 4, 'gradient_accumulation_steps': 1, 'log_interval': 1,
             'eval_tokens': 256}


def settings(*argv):
    return train.read_settings([*argv, '--device=cpu'])


@pytest.mark.parametrize('argv, dataset, layers, by_ladder', [
    (['--time_budget=5'], 'stdlib', 3, True),
    (['--time_budget=5', '--dataset=mine'], 'mine', 3, True),
    (['--time_budget=5', '--dataset=mine', '--depth=3'], 'mine', 3, True),
    (['--time_budget=5', '--depth=5', '--block_size=512', '--optimizer=adamw'], 'stdlib', 5, True),
    (['--depth=5', '--block_size=512'], 'stdlib', 5, False),
    (['--max_iters=5', '--dataset=mine', '--depth=3'], 'mine', 3, False),
    (['--time_budget=5', '--dataset=mine', '--n_layer=3'], 'mine', 3, False),
    (['--time_budget=5', 'config/shakespeare_cpu.py'], 'shakespeare_char', 4, False),
    (['--dataset=mine'], 'mine', 4, False),  # of quickstart
    (['--dataset=mine', '--n_layer=3'], 'mine', 3, False)])
def test_which_commands_the_ladder_serves(argv, dataset, layers, by_ladder):
    s = settings(*argv)
    assert (s.train.dataset, s.model.n_layer, s.choose_depth) == (dataset, layers, by_ladder)


def test_more_text_more_depth_and_fewer_repeats_are_better():
    assert expected_loss(4, 4e6, TEXT) < expected_loss(4, 2e6, TEXT)
    assert expected_loss(5, 4e6, TEXT) < expected_loss(4, 4e6, TEXT)
    small = TEXT._replace(num_bytes=1e6)
    assert expected_loss(4, 2e6, small) > expected_loss(4, 2e6, TEXT)
    assert worth(1e6, 1e6) == 1e6 and 1.8e6 < worth(2e6, 1e6) < 2e6 and worth(1e9, 1e6) < 6e6


def test_the_best_depth_grows_with_the_budget_and_the_machine():
    found = [Ladder(TEXT._replace(num_bytes=1e12), 257, flops).best(DEPTHS, seconds)
             for flops, seconds in ((1e11, 1), (1e11, 180), (1e11, 3600), (4e14, 3600), (4e14, 360000))]
    assert found[0] == 3 and found == sorted(found) and found[-1] >= 16 and len(set(found)) >= 3
    assert Ladder(TEXT, 257, 1e11).best(DEPTHS, -5) == 3  # the time is over


def test_a_timed_depth_corrects_its_neighbors():
    known = Ladder(TEXT, 257, 1e11)
    guess = known.seconds(4), known.seconds(6)
    known.timed = {3: 2 * known.guess(3), 8: known.guess(8)}
    assert known.seconds(4) == pytest.approx(2 * guess[0]) and known.seconds(6) == pytest.approx(guess[1])
    assert known.expect(4, 100).speed == pytest.approx(1 / known.seconds(4))


def test_the_text_is_described_by_its_bytes(tmp_path):
    """Noise needs all eight bits, repetition almost none."""
    noisy = np.random.default_rng(0).integers(0, 256, 50000)
    for name, ids in (('noise', noisy), ('same', np.zeros(50000, int))):
        write_bins(tmp_path / name, ids, ids[:1000])
    write_bins(tmp_path / 'tiny', [65, 66], [65, 66])
    texts = {}
    for name in ('noise', 'same', 'tiny'):
        datasets = open_datasets(name, str(tmp_path))
        texts[name] = ladder.describe_text(datasets, open_split(datasets, 'train', 16))
    assert texts['noise'].bits > 7.9 and texts['same'].bits < 0.1
    assert texts['noise'].bytes_per_token == 1 and texts['noise'].num_bytes == 50000


@pytest.fixture
def tiny_rungs(monkeypatch):
    """Rungs of the real rates and tiny shapes."""
    for module in (depth, ladder):
        monkeypatch.setattr(module, 'rung', lambda depth, world=1, block_size=None: {
            **rung(depth, world), **TINY_RUNG, 'n_layer': depth - 1, 'n_embd': 8 * depth, 'n_head': 2})
    monkeypatch.setattr(ladder, 'measure_flops', lambda *args: 1e11)
    monkeypatch.setattr(ladder, 'DEPTHS', (3, 4, 5))


def run(tmp_path, data_dir, *argv, out='out'):
    return train.main(['--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={tmp_path / out}',
                       '--device=cpu', '--compile=False', '--dtype=float32', *argv])


def test_a_budget_chooses_a_depth_and_says_so(tmp_path, data_dir, tiny_rungs, monkeypatch, capsys):
    """It ends on time. Its config.py repeats the run without a choice; a resume does not choose again."""
    clock = Clock(monkeypatch, step=1.0, batch=0.02)
    assert run(tmp_path, data_dir, '--time_budget=1') == 0
    out = capsys.readouterr().out
    depth = int(re.search(r'^ladder: depth (\d+) \(\*: timed here\); --depth=N', out, re.M)[1])
    assert re.search(r'^ +\d\* ', out, re.M) and re.search(rf'^ +{depth}[* ]', out, re.M)
    assert 'longer tokens learn more by then: prepare.py --tokenizer=bpe:1024' in out  # tiny is bytes
    assert 55 < clock.now <= 61
    config = load(tmp_path / 'out' / 'ckpt.pt')['config']
    assert config['depth'] == depth and config['n_layer'] == depth - 1 and config['optimizer'] == 'muon'
    monkeypatch.setattr(ladder, 'choose_depth', None)
    assert train.main([str(tmp_path / 'out/config.py'), f'--out_dir={tmp_path / "again"}']) == 0
    assert same(load(tmp_path / 'again/ckpt.pt')['model'], load(tmp_path / 'out/ckpt.pt')['model'])
    resume = [f'--out_dir={tmp_path / "out"}', '--init_from=resume']
    assert train.main(resume) == 0
    assert '--depth: depth=9' in error_of(train.main, [*resume, '--depth=9'])


def test_the_choice_follows_the_speeds_that_were_timed(tmp_path, data_dir, tiny_rungs, monkeypatch, capsys):
    """Not the guess, by which both machines are equal."""
    Clock(monkeypatch)
    chosen = []
    for speed in (1e13, 1e6):
        timed = []

        def time_depth(depth, *args, speed=speed, timed=timed):
            timed.append(depth)
            disturbed = 1.2 if timed.count(depth) == 1 else 1.0
            return disturbed * num_parameters(depth) / speed
        monkeypatch.setattr(ladder, 'time_depth', time_depth)
        run(tmp_path, data_dir, '--time_budget=4', '--max_iters=2', out=f'{speed}')
        config = load(tmp_path / f'{speed}' / 'ckpt.pt')['config']
        decay = config['weight_decay']
        chosen.append(config['depth'])
        depths = sorted(set(timed))
        assert chosen[-1] in timed and len(depths) <= 3
        assert sorted(timed) == (depths if len(depths) == 1 else sorted(2 * depths))
        slower = 1.2 if len(depths) == 1 else 1.0  # of two timings the faster one counts
        speed_in_table = f'{speed / slower / num_parameters(chosen[-1]):,.0f} '
        out = capsys.readouterr().out
        assert speed_in_table in out.split('bits per byte, expected')[1]
        assert ('the text will be read ' in out) == (speed == 1e13) == (decay > 0.1)
    assert chosen[0] > chosen[1] == 3


def test_the_smaller_of_two_depths_that_tie_is_chosen(monkeypatch):
    known = Ladder(TEXT, 257, 1e11)
    losses = {3: 2.011, 4: 2.0, 5: 1.995, 6: 2.1}
    monkeypatch.setattr(known, 'expect', lambda depth, left: ladder.Expected(depth, 0, 0, losses[depth]))
    assert known.best((3, 4, 5, 6), 100) == 3 and known.best((4, 5, 6), 100) == 4
    losses[3] = 2.02
    assert known.best((3, 4, 5, 6), 100) == 4


def test_a_depth_of_a_config_file_gets_its_rate_from_the_speed(tmp_path, data_dir, tiny_rungs, monkeypatch):
    (tmp_path / 'card.py').write_text('depth = 3\ntime_budget = 1.0\n')
    rates = []
    for words in ([str(tmp_path / 'card.py')], ['--depth=3', '--time_budget=1']):
        Clock(monkeypatch, step=1.0, batch=0.02)
        assert run(tmp_path, data_dir, *words) == 0
        rates.append(load(tmp_path / 'out' / 'ckpt.pt')['config']['muon_lr'])
    assert rates[0] == rates[1] > 0.01


def test_torchrun_restarts_a_run_without_a_new_choice(tmp_path, data_dir, tiny_rungs, monkeypatch):
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'mine')
    Clock(monkeypatch, step=1.0, batch=0.02)
    assert run(tmp_path, data_dir, '--time_budget=1', '--max_minutes=0.3') == 0
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    monkeypatch.setattr(ladder, 'choose_depth', None)
    assert run(tmp_path, data_dir, '--time_budget=1') == 0
    last = load(tmp_path / 'out' / 'ckpt.pt')
    assert last['iter_num'] == last['config']['max_iters']


def test_a_dry_run_says_that_the_depth_is_open(tmp_path, data_dir, capsys):
    assert run(tmp_path, data_dir, '--time_budget=1', '--dry_run') == 0
    assert 'depth: the run chooses it by its speed; this is a forecast of depth 3' in capsys.readouterr().out


def test_a_signal_during_the_timing_stops_the_run(tmp_path, data_dir, tiny_rungs, monkeypatch, capsys):
    at_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(tmp_path, data_dir, '--time_budget=1') == 143
