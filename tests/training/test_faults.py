"""What holds when something happens to a run: a kill, a signal, damage, a full disk, a dead process."""

import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import faults
import pytest
from conftest import ROOT, same
from faults import SAVE, assert_equal_runs, final, leftovers, log
from ranks import Runs

from hotloop.system.files import checkpoint_paths
from hotloop.training.checkpoint import Checkpoints
from hotloop.weights.load import load_checkpoint

RECIPES = [dict(optimizer='adamw', dropout=0.1), dict(optimizer='muon', preset='modern', dropout=0.1)]
RECIPE = RECIPES[1]  # Muon's state beside AdamW's
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture
def run(tmp_path, data_dir):
    """Return Runs into this test's folder."""
    return Runs(tmp_path, data_dir)


def step_of(out):
    """Return the step of a run's last checkpoint, 0 where it has none."""
    path = out / 'ckpt.pt'
    return load_checkpoint(str(path))['iter_num'] if path.exists() else 0


# -----------------------------------------------------------------------------
# checkpoints: killed while they are written, damaged, without room

KILLS = int(os.environ.get('KILLS', '40'))


@pytest.mark.parametrize('kills, shared', [
    (2, {}), pytest.param(KILLS, {}, marks=pytest.mark.slow),
    pytest.param(KILLS // 10, dict(world=2, shard='full'), marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_bits(run, tmp_path, kills, shared):
    """
    kill -9 or SIGTERM after one to three saves and some milliseconds, many of them inside a save, until the
    run has finished; then the next run. Whatever a kill leaves is intact, the checkpoint before it, too.
    """
    settings = dict(RECIPE, max_iters=8, save_minutes=0, eval_interval=5, eval_tokens=64, **shared)
    assert run('whole', **settings) == 0
    rng, killed, terminated, inside = random.Random(kills), 0, 0, 0
    while killed < kills or not inside:
        code = -9
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        while code in (-9, 143):
            started = (tmp_path / 'out').exists()
            delay = rng.choice([0.004, 0.12]) * rng.random()
            code = run('out', calls=SAVE, times=rng.randint(2, 4), delay=delay,
                       number=rng.choice([signal.SIGKILL] * 3 + [TERM]),
                       init_from='resume' if started else 'scratch', **settings)
            killed += code == -9
            terminated += code == 143
            inside += code == -9 and leftovers(tmp_path / 'out') > 0
            for path in checkpoint_paths(str(tmp_path / 'out')):
                load_checkpoint(path)
        assert code == 0, run.printed('out')
        assert_equal_runs(tmp_path / 'out', tmp_path / 'whole')
        assert killed < kills + 100, 'no kill was inside a save, so this has proved nothing'
    print(f'{killed} kills, {inside} inside a save, {terminated} SIGTERMs: 0 unreadable, 0 differences')


@pytest.fixture(scope='module')
def two_checkpoints(tmp_path_factory, data_dir):
    """Train two steps and keep both checkpoints, of a size at which most bytes are weights."""
    folder = tmp_path_factory.mktemp('two')
    assert Runs(folder, data_dir)('out', n_embd=64, max_iters=2, save_minutes=0) == 0
    return folder / 'out'


def spoiled(data, rng):
    """Flip a bit, cut, lose or add bytes, or zero a block, or all up to the end, as a loss of power does."""
    at, how = rng.randrange(len(data)), rng.choice(['flip', 'flip', 'cut', 'lost', 'put in', 'block', 'end'])
    if how == 'flip':
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:]
    if how == 'cut':
        return data[:at]
    if how in ('lost', 'put in'):
        return data[:at] + (rng.randbytes(9) + data[at:] if how == 'put in' else data[at + 9:])
    end = len(data) if how == 'end' else min(at + 4096, len(data))
    return data[:at] + bytes(end - at) + data[end:]


DAMAGED = int(os.environ.get('DAMAGED', '1000'))


@pytest.mark.parametrize('count', [60, pytest.param(DAMAGED, marks=pytest.mark.slow)])
def test_no_damaged_checkpoint_is_loaded_wrong(two_checkpoints, tmp_path, count):
    """It is named and the one before is taken, or the damage is where nothing is stored."""
    shutil.copytree(two_checkpoints, tmp_path / 'out')
    newest, rng, fell_back = tmp_path / 'out' / 'ckpt.pt', random.Random(count), 0
    expected, data = load_checkpoint(str(newest)), newest.read_bytes()
    for _ in range(count):
        newest.write_bytes(spoiled(data, rng))
        found = Checkpoints(str(tmp_path / 'out')).latest()
        if found.path == str(newest):
            assert same(found.checkpoint, expected)
        else:
            assert found.checkpoint['iter_num'] == 1 and found.damaged == [str(newest)]
            fell_back += 1
    print(f'{count} damaged: {fell_back} fell back, {count - fell_back} harmless, 0 wrong')
    assert fell_back > 0.8 * count


@pytest.mark.parametrize('until, code', [pytest.param(7, 0, marks=pytest.mark.slow), (None, 1)])
def test_a_full_disk_ends_no_run_but_a_final_save_that_fails_is_an_error(run, tmp_path, until, code):
    """
    By RLIMIT_FSIZE, so the kernel makes the error, in its words or torch's. The last checkpoint that was
    written stays.
    """
    failed = r'ckpt\.pt could not be written: (the disk is full|File too large)'
    settings = dict(RECIPE, max_iters=9, save_minutes=0, eval_interval=100)
    limits = [4] if until is None else [4, until]
    assert run('out', 'small files', 50_000, *limits, **settings) == code
    printed = run.printed('out')
    assert len(re.findall(f'{failed}; training continues', printed)) == (3 if until else 5)
    assert step_of(tmp_path / 'out') == (9 if until else 3) and leftovers(tmp_path / 'out') == 0
    if until:
        assert run('whole', **settings) == 0
        assert same(final(tmp_path / 'out'), final(tmp_path / 'whole'))
    else:
        assert re.match(f'error: .*{failed}', printed.splitlines()[-1])


# -----------------------------------------------------------------------------
# signals

FORWARD = 'model.GPT.forward'  # twice a step, and twice an evaluation


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, data_dir):
    """Train 8 steps with evaluations after 3, 6 and 8."""
    folder = tmp_path_factory.mktemp('undisturbed')
    assert Runs(folder, data_dir)('whole', **SIGNALED) == 0
    return folder / 'whole'


SIGNALED = dict(RECIPE, max_iters=8, eval_interval=3, eval_tokens=64)


@pytest.mark.parametrize('when, times, numbers, code, step', [
    pytest.param('train.Meter', 1, [TERM], 143, 0, marks=pytest.mark.slow),  # before the first step
    (FORWARD, 3, [INT], 130, 2),  # in step 2, which is completed
    pytest.param(FORWARD, 4, [HUP, INT], 129, 2, marks=pytest.mark.slow),
    ('train.evaluate_both', 1, [TERM], 143, 3),  # the evaluation is left to the next process
    pytest.param('train.Checkpoints.save', 2, [TERM], 143, 7, marks=pytest.mark.slow),  # then one step
    pytest.param('train.evaluate_both', 3, [TERM], 143, 8, marks=pytest.mark.slow),  # of the last step
    ('train.evaluate_both', 2, [INT, INT], -INT, 3)])  # nothing more is saved
def test_a_signal_saves_within_a_step(run, tmp_path, undisturbed, when, times, numbers, code, step):
    """The exit code is 128 + the first signal; a second SIGINT ends at once. A resume has the same bits."""
    assert run('out', 'signal in', when, times, *map(int, numbers), **SIGNALED) == code, run.printed('out')
    assert step_of(tmp_path / 'out') == step and leftovers(tmp_path / 'out') == 0
    if code > 0:
        how = f'stopped: step {step} is saved' if step else 'stopped: before step 1'
        assert how in run.printed('out')
    if code:
        assert run('out', init_from='resume' if step else 'scratch', **SIGNALED) == 0
    assert_equal_runs(tmp_path / 'out', undisturbed)


# -----------------------------------------------------------------------------
# several processes

def ended(process):
    """Return (exit code, stdout, stderr) of a process that must end by itself."""
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize('recipe', RECIPES)
def test_a_run_may_change_the_number_of_its_processes_and_keeps_its_bits(run, torchrun, tmp_path, recipe):
    """
    2 equal 1, and so do 2, 1 and 2 again: one process computes two micro-batches, two compute one each. A
    signal to one stops both at one step: one save, and each ends with 143, for which torchrun returns 1.
    """
    settings = dict(recipe, max_iters=24)
    assert run('whole', **settings) == 0
    assert ended(torchrun('two', **settings))[0] == 0
    code, out, err = ended(torchrun('out', 'terminate', 7, **settings))
    assert code == 1 and len(re.findall(r'stopped: step [78] is saved', out)) == 1
    assert re.search(r'exitcode *: 143', err) and not re.search(r'exitcode *: (?!143)', err), err
    assert run('out', 'signal in', 'train.train_step', 7, int(TERM), init_from='resume', **settings) == 143
    assert step_of(tmp_path / 'out') in (14, 15)
    assert ended(torchrun('out', init_from='resume', **settings))[0] == 0
    for out in ('two', 'out'):
        assert_equal_runs(tmp_path / out, tmp_path / 'whole')


RESTARTED = dict(RECIPE, max_iters=24, eval_interval=5)
RESTARTS = int(os.environ.get('RESTARTS', '1'))


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_process_was_killed(run, torchrun, tmp_path):
    """Each time, with the bits of an undisturbed run."""
    assert run('whole', **RESTARTED) == 0
    for n in range(RESTARTS):
        process = torchrun(f'out{n}', 'kill', 20, restarts=2, forked=False, resume=True, **RESTARTED)
        code, out, err = ended(process)
        assert code == 0, err
        assert 'resuming at step 15' in out and 'exitcode: -9' in err
        assert_equal_runs(tmp_path / f'out{n}', tmp_path / 'whole')


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up_and_the_run_restarted(run, torchrun, tmp_path):
    """
    Asleep or stopped by SIGSTOP: the other one gives up after 5 seconds, torchrun kills after 30 more, and
    the restart ends with the same bits. Both at once, because they mostly wait.
    """
    settings = dict(RESTARTED)
    assert run('whole', **settings) == 0
    settings.update(restarts=2, resume=True)
    processes = {how: torchrun(how, how, 20, **settings) for how in ('hang', 'stop')}
    for how, process in processes.items():
        code, out, err = ended(process)
        assert code == 0 and 'resuming at step 15' in out, err
        assert re.search('[Tt]imed out|[Tt]imeout', err), 'the reason is not shown'
        assert same(final(tmp_path / how), final(tmp_path / 'whole'))


@pytest.mark.slow
def test_a_mistake_of_the_user_under_torchrun_is_a_sentence_without_our_traceback(tmp_path):
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               ROOT / 'train.py', '--dataset=nowhere']
    ran = subprocess.run(command, cwd=tmp_path, env=faults.environment(), capture_output=True, text=True,
                         check=False)
    assert ran.returncode == 1 and 'error: data/nowhere does not exist' in ran.stderr
    assert 'Root Cause' in ran.stderr and 'open_datasets' not in ran.stderr


@pytest.mark.slow
def test_all_processes_skip_a_step_that_is_not_finite_on_one(run, torchrun, tmp_path):
    """If one of them had updated, the bits would differ from then on."""
    settings = dict(RECIPE, max_iters=10)
    assert run('one', 'nan', 5, **settings) == 0
    assert ended(torchrun('two', 'nan', 5, **settings))[0] == 0
    assert [line['step'] for line in log(tmp_path / 'two', 'step', 'skipped')] == [5]
    assert_equal_runs(tmp_path / 'two', tmp_path / 'one')


# -----------------------------------------------------------------------------
# security

UNSAFE = {'eval', 'exec', 'os.system', 'os.popen', 'pickle.load', 'pickle.loads', 'np.load', 'marshal.loads',
          'shutil.unpack_archive', 'DataLoader'}


def unsafe_calls(source):
    """Yield the names of calls that could run what they are given or unpack it anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            unsafe_load = name == 'torch.load' and options.get('weights_only') != 'True'
            unsafe_option = 'allow_pickle' in options or options.get('shell', 'False') != 'False'
            if name in UNSAFE or name.endswith('.extractall') or unsafe_load or unsafe_option:
                yield name


def test_our_code_does_not_run_what_it_is_given():
    files = [*ROOT.glob('*.py'), *(ROOT / 'hotloop').rglob('*.py')]
    found = {(path.name, name) for path in files for name in unsafe_calls(path.read_text(encoding='utf-8'))}
    # Config files are the user's own Python. Judged programs run in a child that --run_code starts.
    assert found == {('configurator.py', 'exec')}
