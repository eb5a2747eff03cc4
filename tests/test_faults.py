"""What is promised of a run that something happens to: it is killed, stopped, its disk fills, a process of it dies."""

import ast
import contextlib
import hashlib
import os
import random
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from conftest import noise, write_bins
from faults import Server
from test_train import RECIPES, error_of, final, load, log, same, snapshot

import train
from model import load_checkpoint

ROOT = Path(train.__file__).parent
RECIPE = dict(dropout=0.1, **RECIPES[1])  # Muon's state beside AdamW's
posix = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')
pytestmark = posix


@pytest.fixture(scope='module')
def server(tmp_path_factory, data_dir):
    server = Server(tmp_path_factory.mktemp('faults'), data_dir)
    yield server
    server.close()


@pytest.fixture
def run(server, tmp_path):
    """The server, writing into this test's folder."""
    server.folder = tmp_path
    return server


def digest(out):
    """SHA-256 of all that the run in this folder has learnt: weights, optimizers, scaler, counters."""
    h = hashlib.sha256()

    def feed(x):
        if isinstance(x, dict | list | tuple):
            h.update(f'{type(x).__name__} {len(x)}'.encode())
            for item in x.items() if isinstance(x, dict) else x:
                feed(item)
        else:
            h.update(x.numpy().tobytes() if isinstance(x, torch.Tensor) else repr(x).encode())
    feed(final(out))
    return h.hexdigest()


def leftovers(out):
    return len(list(out.glob('*.tmp')))


# -----------------------------------------------------------------------------
# checkpoints: killed while they are written, damaged, without room

@pytest.mark.parametrize('kills', [15, pytest.param(int(os.environ.get('KILLS', '100')), marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_run_ends_with_the_bits_of_an_undisturbed_one(run, tmp_path, kills):
    """
    kill -9 after one to three saves and some milliseconds, many of them inside a save, until the run is through; then
    the next one. Each life finds a whole checkpoint: a resume that finds none exits with 1.
    """
    settings = dict(RECIPE, max_iters=40, save_interval=1)
    assert run('whole', **settings) == 0
    whole, rng, killed, inside = digest(tmp_path / 'whole'), random.Random(kills), 0, 0
    while killed < kills:
        code = -9
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        while code == -9:
            started = (tmp_path / 'out').exists()
            code = run('out', calls='save', times=rng.randint(2, 4), delay=rng.choice([0.004, 0.12]) * rng.random(),
                       init_from='resume' if started else 'scratch', **settings)
            killed += code == -9
            inside += code == -9 and leftovers(tmp_path / 'out') > 0
        assert code == 0, run.said('out')
        assert digest(tmp_path / 'out') == whole and leftovers(tmp_path / 'out') == 0
        assert log(tmp_path / 'out') == log(tmp_path / 'whole')
    print(f'{killed} kills, {inside} inside a save: 0 unreadable, 0 differences')
    assert inside > 0, 'no kill fell into a save: this has proved nothing'


def test_the_same_kills_destroy_checkpoints_that_are_written_in_place(run, tmp_path):
    """Or the test above could not fail."""
    rng = random.Random(0)
    for _ in range(20):
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        assert run('out', 'naive saves', calls='save', times=2, delay=0.004 * rng.random(), save_interval=1) == -9
        try:
            load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))
        except ValueError:
            return
    pytest.fail('20 kills, and no file was lost')


def test_killed_before_any_operation_on_its_files_a_run_keeps_what_it_promised(run, tmp_path):
    """Each time one is opened, linked, renamed or removed: keep_last checkpoints and the best are there and whole."""
    settings, deaths, code = dict(max_iters=5, save_interval=1, keep_last=3, eval_interval=2), 0, -9
    while code == -9:
        deaths += 1
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        code = run('out', 'dies before', deaths, **settings)
        out = train.OutDir(str(tmp_path / 'out'))
        steps = {load_checkpoint(path)['iter_num'] for path in out.checkpoints()}
        assert len(steps) >= min(3, max(steps, default=0)), f'{steps} are left of a death before operation {deaths}'
        if (best := tmp_path / 'out' / 'best.pt').exists():
            load_checkpoint(str(best))
        assert best.exists() or max(steps, default=0) < 2
    assert code == 0 and deaths > 20 and steps == {3, 4, 5}


@pytest.fixture(scope='module')
def two_checkpoints(server, tmp_path_factory):
    """A run of two steps that kept both, of a size at which most bytes are weights."""
    server.folder = tmp_path_factory.mktemp('two')
    assert server('out', n_embd=64, max_iters=2, save_interval=1) == 0
    return server.folder / 'out'


def spoil(data, rng):
    """A flipped bit, a file cut short, a block of zeros, or zeros where the power went before the end was written."""
    at, how = rng.randrange(len(data)), rng.choice(['flip', 'flip', 'cut', 'block', 'end'])
    if how == 'flip':
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:]
    if how == 'cut':
        return data[:at]
    end = len(data) if how == 'end' else min(at + 4096, len(data))
    return data[:at] + bytes(end - at) + data[end:]


@pytest.mark.parametrize('number', [200, pytest.param(int(os.environ.get('DAMAGED', '2000')), marks=pytest.mark.slow)])
def test_of_damaged_checkpoints_none_is_loaded_wrong(two_checkpoints, tmp_path, number):
    """It is named and the one before is taken, or the damage lay where nothing is kept and the content is the same."""
    shutil.copytree(two_checkpoints, tmp_path / 'out')
    newest, rng, fell_back = tmp_path / 'out' / 'ckpt.pt', random.Random(number), 0
    whole, data = load_checkpoint(str(newest)), newest.read_bytes()
    for _ in range(number):
        newest.write_bytes(spoil(data, rng))
        found = train.find_latest(train.OutDir(str(tmp_path / 'out')))
        if found.path == str(newest):
            assert same(found.checkpoint, whole)
        else:
            assert found.checkpoint['iter_num'] == 1 and str(newest) in found.damaged[str(newest)]
            fell_back += 1
    print(f'{number} damaged: {fell_back} fell back, {number - fell_back} harmless, 0 wrong')
    assert fell_back > 0.8 * number


def test_torch_alone_loads_flipped_bits_without_a_word(two_checkpoints, tmp_path):
    """Or the test above would test torch."""
    data, rng, silent = (two_checkpoints / 'ckpt.pt').read_bytes(), random.Random(0), 0
    whole = load(two_checkpoints / 'ckpt.pt')
    for _ in range(50):
        at = rng.randrange(len(data))
        (tmp_path / 'c.pt').write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:])
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter('ignore')
            silent += not same(load(tmp_path / 'c.pt'), whole)
    assert silent > 45


@pytest.mark.parametrize('how', ['folder', 'unreadable'])
def test_what_stands_in_the_place_of_the_newest_is_set_aside(two_checkpoints, tmp_path, train_tiny, capsys, how):
    if how == 'unreadable' and os.geteuid() == 0:
        pytest.skip('root reads everything')
    shutil.copytree(two_checkpoints, tmp_path / 'out')
    newest = tmp_path / 'out' / 'ckpt.pt'
    if how == 'folder':
        newest.unlink()
        newest.mkdir()
    else:
        newest.chmod(0)
    assert train_tiny(init_from='resume', n_embd=64, max_iters=2) == 0
    assert f'{newest} cannot be read' in capsys.readouterr().out
    assert same(final(tmp_path / 'out'), final(two_checkpoints))


def test_a_disk_that_takes_no_large_file_for_a_while_loses_nothing(run, tmp_path):
    """By RLIMIT_FSIZE, so the error is the kernel's and not one of ours; two saves fail, the third gets through."""
    settings = dict(RECIPE, max_iters=8, save_interval=1, eval_interval=100)
    assert run('whole', **settings) == 0
    assert run('out', 'small files', 4, 6, 50_000, **settings) == 0
    assert run.said('out').count('MB are needed; training goes on') == 2
    assert digest(tmp_path / 'out') == digest(tmp_path / 'whole') and leftovers(tmp_path / 'out') == 0


def test_a_disk_that_stays_full_ends_the_run_and_leaves_the_last_checkpoint(run, tmp_path):
    assert run('out', 'small files', 4, 1000, 50_000, max_iters=50, save_interval=1, eval_interval=100) == 1
    lines = run.said('out').splitlines()
    assert sum('training goes on' in line for line in lines) == 2 and lines[-1].startswith('error: ')
    assert 'ckpt.pt could not be written' in lines[-1] and 'MB are free' in lines[-1]
    assert load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] == 3
    assert leftovers(tmp_path / 'out') == 0


# -----------------------------------------------------------------------------
# resuming

@pytest.mark.parametrize('recipe', RECIPES)
def test_from_every_step_a_resume_ends_with_the_same_bits_and_losses(run, tmp_path, recipe):
    """Dropout, accumulation, clipping, warm-up and decay, each resume in a process of its own."""
    settings = dict(recipe, dropout=0.1, max_iters=20, eval_interval=6)
    assert run('whole', save_interval=1, keep_last=20, **settings) == 0
    whole, lines = digest(tmp_path / 'whole'), log(tmp_path / 'whole')
    for step in range(1, 20):
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        (tmp_path / 'out').mkdir()
        shutil.copy(tmp_path / 'whole' / f'ckpt-{step:09d}.pt', tmp_path / 'out' / 'ckpt.pt')
        shutil.copy(tmp_path / 'whole' / 'log.jsonl', tmp_path / 'out')
        assert run('out', init_from='resume', **settings) == 0
        assert digest(tmp_path / 'out') == whole and log(tmp_path / 'out') == lines, f'resumed from step {step}'


# -----------------------------------------------------------------------------
# signals

@pytest.mark.parametrize('calls, times', [('evaluate_any', 1), ('evaluate_any', 2), ('save', 1)])
def test_a_signal_during_an_evaluation_or_a_save_loses_neither(run, tmp_path, calls, times):
    """It ends with 143 when that is done, and resumed the log and the bits are those of an undisturbed run."""
    settings = dict(RECIPE, max_iters=12, eval_interval=4)
    assert run('whole', **settings) == 0
    assert run('out', calls=calls, times=times, number=signal.SIGTERM, **settings) == 143
    assert load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] in (4, 5) and leftovers(tmp_path / 'out') == 0
    assert run('out', init_from='resume', **settings) == 0
    assert digest(tmp_path / 'out') == digest(tmp_path / 'whole') and log(tmp_path / 'out') == log(tmp_path / 'whole')


def test_a_second_interrupt_ends_the_run_at_once(run, tmp_path):
    """Without a save, as a shell's 130 has it; the checkpoint before it is whole, and the run goes on from there."""
    settings = dict(RECIPE, max_iters=10, save_interval=3)
    assert run('whole', **settings) == 0
    assert run('out', 'interrupt twice', 5, **settings) == -signal.SIGINT
    assert load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] == 4  # the evaluation's
    assert run('out', init_from='resume', **settings) == 0
    assert digest(tmp_path / 'out') == digest(tmp_path / 'whole')


# -----------------------------------------------------------------------------
# security

NEVER = {'eval', 'exec', 'system', 'popen', 'extractall', 'unpack_archive', 'DataLoader'}
PICKLES = {'pickle', 'cPickle', 'dill', 'joblib', 'marshal', 'shelve'}
HARMLESS = {('model.py', 'self.eval'), ('train.py', 'model.eval'), ('prepare.py', 'pickle.UnpicklingError'),
            ('configurator.py', 'exec')}  # of config files, which are Python by the user's choice


def unsafe_calls(path):
    """The names of calls in a file that could run what they are given, or unpack it to anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if (name.split('.')[-1] in NEVER or name.split('.')[0] in PICKLES or 'allow_pickle' in options
                    or options.get('shell', 'False') != 'False'
                    or (name == 'torch.load' and options.get('weights_only') != 'True')):
                yield name


def test_no_code_of_ours_runs_what_it_is_given():
    """
    No pickle but the unpickler that knows plain containers, no eval, no shell, no archive. Nor worker processes that
    load data, which die on their own.
    """
    found = {(path.name, name) for path in ROOT.glob('*.py') for name in unsafe_calls(path)}
    assert found == HARMLESS


def test_the_search_for_it_finds_it(tmp_path):
    text = 'torch.load(p)\nx.run(c, shell=True)\neval("1")\nz.extractall()\npickle.loads(b)\nos.system(c)\n'
    (tmp_path / 'a.py').write_text(text + 'torch.load(p, weights_only=True)\nnp.load(p)\n')
    assert len(list(unsafe_calls(tmp_path / 'a.py'))) == 6


def test_a_dataset_cannot_lie_outside_of_data_dir(train_tiny, tmp_path):
    write_bins(tmp_path / 'x', noise(200), noise(100))
    before = snapshot(tmp_path)
    for name in ('../x', str(tmp_path / 'x'), 'a/../../x'):
        assert 'data_dir' in error_of(train_tiny, dataset=name, data_dir=tmp_path / 'data')
    assert snapshot(tmp_path) == before
