"""What is promised of a run that something happens to: it is killed, stopped, its disk fills, a process of it dies."""

import ast
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from conftest import noise, write_bins
from faults import Server
from test_train import RECIPES, error_of, final, load, log, same, snapshot
from torch.torch_version import TorchVersion

import train
from hotloop.checkpoint import load_checkpoint
from hotloop.dataloader import Batches, Split
from hotloop.dataset import read_meta
from hotloop.device import try_compile
from hotloop.distributed import Env
from hotloop.run_dir import RunDir, find_latest

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
    """SHA-256 of all that the run in this folder has learnt: weights, optimizer states, scaler, counters."""
    h, learnt = hashlib.sha256(), final(out)
    for name in ('optimizer', 'muon'):  # rates are set anew before each step
        learnt[name] = learnt[name] and learnt[name]['state']

    def feed(x):
        if isinstance(x, dict | list | tuple):
            h.update(f'{type(x).__name__} {len(x)}'.encode())
            for item in x.items() if isinstance(x, dict) else x:
                feed(item)
        else:
            h.update(x.numpy().tobytes() if isinstance(x, torch.Tensor) else repr(x).encode())
    feed(learnt)
    return h.hexdigest()


def leftovers(out):
    return len(list(out.glob('*.tmp')))


# -----------------------------------------------------------------------------
# checkpoints: killed while they are written, damaged, without room

@pytest.mark.parametrize('kills', [10, pytest.param(int(os.environ.get('KILLS', '100')), marks=pytest.mark.slow)])
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
        out = RunDir(str(tmp_path / 'out'))
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
        found = find_latest(RunDir(str(tmp_path / 'out')))
        if found.path == str(newest):
            assert same(found.checkpoint, whole)
        else:
            assert found.checkpoint['iter_num'] == 1 and str(newest) in found.damaged[str(newest)]
            fell_back += 1
    print(f'{number} damaged: {fell_back} fell back, {number - fell_back} harmless, 0 wrong')
    assert fell_back > 0.8 * number


def test_a_record_that_became_a_folder_by_one_bit_is_damage(two_checkpoints, tmp_path):
    """torch then hands out memory as it was, where no checksum looks."""
    path = shutil.copytree(two_checkpoints, tmp_path / 'out') / 'ckpt.pt'
    data = bytearray(path.read_bytes())
    data[data.rindex(b'PK\1\2') + 38] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ValueError, match='its list of records is damaged'):
        load_checkpoint(str(path))


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


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('unshare'), reason='no unshare, which mounts without asking anybody')
@pytest.mark.parametrize('options, done, words', [('size=1000k', 2, 'ckpt.pt could not be written'),
                                                  ('ro', 0, 'cannot be written: Read-only file system')])
def test_a_disk_that_is_full_or_read_only(tmp_path, data_dir, options, done, words):
    """A disk of its own, which takes two checkpoints and not three: it ends after three saves have failed."""
    script = ('mkdir disk kept && mount -t tmpfs -o "$1" tmpfs disk || exit 77; shift; "$@"; code=$?; '
              'cp -r disk/. kept; exit $code')
    command = ['unshare', '-rm', 'sh', '-c', script, 'sh', options, sys.executable, ROOT / 'train.py',
               *faults.flags('disk/out', data_dir, save_interval=1, eval_interval=100)]
    ran = subprocess.run(command, cwd=tmp_path, env=faults.environment(), capture_output=True, text=True, check=False)
    if ran.returncode == 77 or ran.stderr.startswith('unshare:'):
        pytest.skip(f'no file system can be mounted here: {ran.stderr.strip()}')
    assert ran.returncode == 1 and words in ran.stderr.splitlines()[-1]
    if done:
        assert ran.stdout.count('training goes on') == 2 and 'MB are free' in ran.stderr
        kept = tmp_path / 'kept' / 'out'
        assert load_checkpoint(str(kept / 'ckpt.pt'))['iter_num'] == done and leftovers(kept) == 0
    else:
        assert 'step 1/' not in ran.stdout


# -----------------------------------------------------------------------------
# resuming

@pytest.mark.parametrize('recipe', [pytest.param(RECIPES[0], marks=pytest.mark.slow), RECIPES[1]])
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


def test_another_torch_or_number_of_threads_is_said_on_resume(two_checkpoints, tmp_path, train_tiny, capsys):
    """Both change the bits, and neither is a reason to refuse."""
    shutil.copytree(two_checkpoints, tmp_path / 'out')
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    checkpoint['versions']['torch'] = '2.11.0'
    torch.save(checkpoint, tmp_path / 'out' / 'ckpt.pt')
    train_tiny(init_from='resume', n_embd=64, max_iters=3, threads=2)
    said = [line for line in capsys.readouterr().out.splitlines() if 'from here on' in line]
    assert any(f'torch: 2.11.0 before, {torch.__version__} from' in line for line in said)
    assert any('threads: 1 before, 2 from' in line for line in said)


# -----------------------------------------------------------------------------
# signals

@pytest.mark.parametrize('place, times', [('evaluate', 1), ('evaluate', 2), ('save', 1), ('save_checkpoint', 2)])
def test_a_signal_during_an_evaluation_or_a_save_loses_neither(run, tmp_path, place, times):
    """It ends with 143 within a step, and resumed the log and the bits are those of an undisturbed run."""
    settings = dict(RECIPE, max_iters=12, eval_interval=4)
    assert run('whole', **settings) == 0
    assert run('out', 'terminated in', place, times, **settings) == 143
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


@pytest.mark.slow
def test_a_signal_during_compilation_ends_the_run_after_one_step(run, tmp_path):
    if sentence := try_compile(torch.device('cpu')):
        pytest.skip(sentence)
    settings = dict(dropout=0.1, max_iters=4, compile=True, gradient_accumulation_steps=1)
    assert run('out', calls='train_step', delay=0.3, number=signal.SIGTERM, **settings) == 143
    assert load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] == 1
    assert run('out', init_from='resume', **settings) == 0
    assert run('whole', **settings) == 0
    assert digest(tmp_path / 'out') == digest(tmp_path / 'whole')


# -----------------------------------------------------------------------------
# several processes

@pytest.fixture
def torchrun(tmp_path, data_dir):
    """torchrun(out, fault, step, ...) starts TINY on two gloo processes; in the last of them something may happen."""
    started = []

    def start(out, fault='', step=0, restarts=0, **settings):
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
                   f'--max-restarts={restarts}', faults.__file__, fault, str(step),
                   *faults.flags(tmp_path / out, data_dir, **settings)]
        started.append(subprocess.Popen(command, env={**faults.environment(), 'PYTHONWARNINGS': 'ignore'}, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]
    yield start
    for process in started:
        process.terminate()  # so that it ends its own
        process.communicate()


def ended(process):
    """(exit code, stdout, stderr) of a process that must come to its end."""
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize('recipe', RECIPES)
def test_a_run_may_change_the_number_of_its_processes_and_keeps_its_bits(run, torchrun, tmp_path, recipe):
    """One process computes two micro-batches a step, two compute one each: 2 equal 1, and so do 2, 1 and 2 again."""
    settings = dict(recipe, dropout=0.1, max_iters=24)
    assert run('whole', **settings) == 0
    assert ended(torchrun('two', **settings))[0] == 0
    assert ended(torchrun('out', 'terminate', 7, **settings))[0] == 1
    assert run('out', 'terminate', 7, init_from='resume', **settings) == 143
    assert 13 <= load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] <= 16  # one gives a step up, two end it
    assert ended(torchrun('out', init_from='resume', **settings))[0] == 0
    for out in ('two', 'out'):
        assert digest(tmp_path / out) == digest(tmp_path / 'whole') and log(tmp_path / out) == log(tmp_path / 'whole')


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_process_was_killed(run, torchrun, tmp_path):
    """Five times of five, with the bits of a run to which nothing happened."""
    settings = dict(RECIPE, max_iters=24, save_interval=5, eval_interval=100)
    assert run('whole', **settings) == 0
    for n in range(5):
        code, out, err = ended(torchrun(f'out{n}', 'kill', 20, restarts=2, **settings))
        assert code == 0, err
        assert out.count('torchrun restarted this run: resuming') == 1 and 'resuming at step 15' in out
        assert digest(tmp_path / f'out{n}') == digest(tmp_path / 'whole')
        assert log(tmp_path / f'out{n}') == log(tmp_path / 'whole')


@pytest.mark.slow
def test_without_restarts_a_killed_process_ends_the_run_and_leaves_its_checkpoint(run, torchrun, tmp_path):
    settings = dict(RECIPE, max_iters=24, save_interval=5, eval_interval=100)
    assert run('whole', **settings) == 0
    assert ended(torchrun('out', 'kill', 20, **settings))[0] == 1
    assert load_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] == 15
    assert ended(torchrun('out', init_from='resume', **settings))[0] == 0
    assert digest(tmp_path / 'out') == digest(tmp_path / 'whole')


TIMEOUT = pytest.mark.skipif('timeout_minutes' not in train.TrainConfig.__dataclass_fields__,
                             reason='collectives wait ten minutes, and no setting says otherwise')


@TIMEOUT
@pytest.mark.slow
def test_a_process_that_hangs_is_given_up_and_the_run_restarted(run, torchrun, tmp_path):
    """
    Asleep for ever or stopped by SIGSTOP: the collective of the other ends after its 5 seconds, torchrun waits 30 more
    before it kills, and the restart ends with the reference bits. Both at once, for they wait most of the time.
    """
    settings = dict(RECIPE, max_iters=24, save_interval=5, eval_interval=100)
    assert run('whole', **settings) == 0
    for how, process in [(how, torchrun(how, how, 20, restarts=2, timeout_minutes=5 / 60, **settings))
                         for how in ('hang', 'stop')]:
        code, out, err = ended(process)
        assert code == 0 and 'resuming at step 15' in out, err
        assert re.search('[Tt]imed out|[Tt]imeout', err), 'the reason is not shown'
        assert digest(tmp_path / how) == digest(tmp_path / 'whole')


@TIMEOUT
def test_the_timeout_of_collectives_is_the_one_asked_for(monkeypatch):
    """torch's own is 30 minutes, nccl's another: it is always passed, whatever it is."""
    found = {}
    monkeypatch.setattr(train.dist, 'init_process_group', lambda *args, **kwargs: found.update(kwargs))
    for name, value in (('WORLD_SIZE', '2'), ('RANK', '0')):
        monkeypatch.setenv(name, value)
    for settings in ({}, dict(timeout_minutes=0.5)):
        cfg = train.TrainConfig(device='cpu', compile=False, threads=1, **settings)
        train.setup(cfg)
        assert found['timeout'].total_seconds() == 60 * cfg.timeout_minutes


@pytest.mark.slow
def test_the_traceback_of_the_process_that_failed_is_shown_and_all_end(torchrun):
    code, _, err = ended(torchrun('out', 'raise', 3))
    assert code == 1 and 'IndexError: a bad batch' in err


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_a_sentence_and_no_traceback_of_ours(tmp_path):
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', ROOT / 'train.py',
               '--dataset=nowhere']
    ran = subprocess.run(command, cwd=tmp_path, env=faults.environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and 'error: data/nowhere does not exist' in ran.stderr
    assert f'File "{ROOT}/train.py' not in ran.stderr


@pytest.mark.slow
def test_all_processes_skip_a_step_that_is_not_finite_on_one(run, torchrun, tmp_path):
    """Had one of them stepped, its gradients would differ from then on and with them the bits."""
    settings = dict(RECIPE, max_iters=10)
    assert run('one', 'nan', 5, **settings) == 0
    assert ended(torchrun('two', 'nan', 5, **settings))[0] == 0
    assert [json.loads(line)['step'] for line in log(tmp_path / 'two', 'step', 'skipped')] == [5]
    assert digest(tmp_path / 'two') == digest(tmp_path / 'one')


@pytest.mark.slow
def test_all_processes_roll_back_together(run, torchrun, tmp_path):
    """Though only one sees what is bad, and saves by the clock, which come at other steps on each, lie in between."""
    settings = dict(RECIPE, max_iters=70, on_divergence='rollback', save_interval=10, eval_interval=100, log_interval=7)
    assert run('one', 'diverges', 25, **settings) == 0
    code, out, err = ended(torchrun('two', 'diverges', 25, save_minutes=0.0003, **settings))
    assert code == 0, err
    assert 'step 44: loss or gradient was not finite for 20 steps in a row: back to step 20, leaving out' in out
    assert digest(tmp_path / 'two') == digest(tmp_path / 'one')


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step(run, torchrun, tmp_path):
    """One save, and each ends with 143, of which torchrun makes a 1; resumed, the bits are those of an unbroken run."""
    settings = dict(RECIPE, max_iters=24)
    assert run('whole', **settings) == 0
    code, out, err = ended(torchrun('out', 'terminate', 13, **settings))
    assert code == 1 and len(re.findall(r'stopped at step 1[34] and saved', out)) == 1
    assert re.search(r'exitcode *: 143', err) and not re.search(r'exitcode *: (?!143)', err), err
    assert ended(torchrun('out', init_from='resume', **settings))[0] == 0
    assert digest(tmp_path / 'out') == digest(tmp_path / 'whole')


def children_of(pid):
    return [int(child) for child in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]


def alive(pid):
    """Whether it runs; a process that nobody has waited for does not."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] not in 'ZX'
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/task'), reason='looks for processes in /proc')
@pytest.mark.skipif(not re.search('prctl|DEATHSIG', Path(train.__file__).read_text()),
                    reason='processes outlive their launcher')
def test_processes_end_with_the_launcher_that_was_killed(torchrun, tmp_path):
    """They went on writing into out_dir, which the next start then found locked."""
    agent = torchrun('out', max_iters=10**6, eval_interval=10**6)
    wait_for(lambda: (tmp_path / 'out' / 'log.jsonl').exists() and log(tmp_path / 'out'))
    ranks = children_of(agent.pid)
    assert len(ranks) == 2
    agent.kill()
    try:
        wait_for(lambda: not any(map(alive, ranks)))
    finally:
        for pid in filter(alive, ranks):
            os.kill(pid, signal.SIGKILL)


def wait_for(what, seconds=60):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, 'waited in vain'
        time.sleep(0.05)


# -----------------------------------------------------------------------------
# data

@pytest.mark.parametrize('length', [0, 100])
def test_a_bin_that_was_cut_is_refused_at_the_start_and_on_resume(train_tiny, tmp_path, length):
    """By whole tokens, so that only its meta.json tells. Cut while it is mapped, it would end in SIGBUS."""
    folder = write_bins(tmp_path / 'data' / 'cut', noise(400), noise(200))
    train_tiny(dataset='cut', data_dir=tmp_path / 'data', max_iters=2)
    os.truncate(f'{folder}/train.bin', length)
    for init_from in ('resume', 'scratch'):
        assert re.search(rf'train\.bin has {length // 2} tokens, not the 400 of meta\.json; prepare it again',
                         error_of(train_tiny, dataset='cut', data_dir=tmp_path / 'data', init_from=init_from))


def anonymous_memory():
    return int(re.search(r'RssAnon:\s+(\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc/self/status')
def test_reading_data_takes_no_memory(tmp_path):
    """20,000 micro-batches over 200 MB; pages of the mapped file are the kernel's and do not count."""
    tokens = np.random.default_rng(0).integers(0, 256, 10**8).astype(np.uint16)
    folder = write_bins(tmp_path / 'large', tokens, tokens[:1000])
    del tokens
    cfg = train.TrainConfig(batch_size=4, gradient_accumulation_steps=5)
    batches = Batches(Split(folder, 'train', read_meta(folder), 128), cfg, Env())
    before = None
    for step in range(4000):
        if step == 10:
            before = anonymous_memory()
        for micro_batch in batches.step(step)[1]:
            micro_batch()
    assert anonymous_memory() - before < 50e6


# -----------------------------------------------------------------------------
# security

NEVER = {'eval', 'exec', 'system', 'popen', 'extractall', 'unpack_archive', 'DataLoader'}
PICKLES = {'pickle', 'cPickle', 'dill', 'joblib', 'marshal', 'shelve'}
HARMLESS = {('model.py', 'self.eval'), ('train.py', 'model.eval'), ('train.py', 'run.model.eval'),
            ('prepare.py', 'pickle.UnpicklingError'),
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


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize('init_from', ['resume', 'ckpt.pt', '.'])
def test_no_way_to_load_a_checkpoint_runs_the_code_in_it(two_checkpoints, tmp_path, train_tiny, init_from):
    (tmp_path / 'out').mkdir()
    code = Code(str(tmp_path / 'ran'))
    torch.save({**load(two_checkpoints / 'ckpt.pt'), 'extra': code}, tmp_path / 'out' / 'ckpt.pt')
    if init_from != 'resume':
        init_from = tmp_path / 'out' / init_from
    sentence = error_of(train_tiny, init_from=init_from, n_embd=64)
    assert 'refused' in sentence and 'weights_only' not in sentence and not (tmp_path / 'ran').exists()


def test_a_torch_that_can_be_made_to_run_code_loads_no_checkpoint(two_checkpoints, monkeypatch):
    """weights_only=True is no protection before 2.10."""
    monkeypatch.setattr(torch, '__version__', TorchVersion('2.9.1+cpu'))
    with pytest.raises(ValueError, match=r'2\.9\.1.*CVE-2026-24747.*pip install'):
        load_checkpoint(str(two_checkpoints / 'ckpt.pt'))


def test_a_dataset_cannot_lie_outside_of_data_dir(train_tiny, tmp_path):
    write_bins(tmp_path / 'x', noise(200), noise(100))
    before = snapshot(tmp_path)
    for name in ('../x', str(tmp_path / 'x'), 'a/../../x'):
        assert 'data_dir' in error_of(train_tiny, dataset=name, data_dir=tmp_path / 'data')
    assert snapshot(tmp_path) == before
