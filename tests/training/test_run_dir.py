"""The folder of a run: one owner at a time, no run overwritten, the last checkpoints kept, a mirror."""

import contextlib
import errno
import math
import os
import shutil
import signal
import threading

import pytest
import torch
from conftest import contents

from hotloop.training import run_dir
from hotloop.training.checkpoint import load_checkpoint
from hotloop.training.run_dir import Mirror, RunDir, find_latest

posix = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')


def checkpoint(step):
    return {'model': {'w': torch.full((99,), float(step))}, 'model_args': {}, 'iter_num': step,
            'best_val_loss': math.inf}


def saved_run(path, steps=(1,), keep=9):
    """A folder with checkpoints of these steps, which nobody uses."""
    run = RunDir(str(path))
    run.open(True, 'seed = 1\n')
    for step in steps:
        run.save(checkpoint(step), keep)
    (path / 'log.jsonl').write_text('{"step": 1}\n')
    run.release_lock()
    return RunDir(str(path))


def names(path):
    """Files of a folder without the lock's."""
    return sorted(p.name for p in path.iterdir() if not p.name.startswith('.lock'))


# -----------------------------------------------------------------------------
# checkpoints

def test_the_last_checkpoints_are_kept(tmp_path):
    """Each is intact and at its step, over a resume in between; a step that is saved twice counts once."""
    run = saved_run(tmp_path / 'out', range(1, 10), keep=3)
    resumed = find_latest(run)
    run.open(False, '')
    run.promote(resumed)
    for step in [10, 11, 11, 12, 13]:
        run.save(checkpoint(step), keep=3)
        assert [os.path.basename(p) for p in run.checkpoints()] == [
            'ckpt.pt', f'ckpt-{step - 1:09d}.pt', f'ckpt-{step - 2:09d}.pt']
        assert [load_checkpoint(p)['iter_num'] for p in run.checkpoints()] == [step, step - 1, step - 2]


@pytest.mark.parametrize('name, left, error', [
    ('ckpt.pt', [4], RuntimeError('[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598')),
    ('best.pt', [3], OSError(errno.ENOSPC, 'No space left on device'))])
def test_a_full_disk_gets_room_from_the_older_checkpoints(tmp_path, monkeypatch, capsys, name, left, error):
    """The disk holds three files. ckpt.pt and best.pt stay until the new file is complete."""
    run, save = saved_run(tmp_path / 'out', (1, 2, 3)), torch.save
    shutil.copy(run / 'ckpt.pt', run / 'best.pt')
    before = names(tmp_path / 'out')

    def limited(value, f):
        if sum(file.endswith('.pt') for file in names(tmp_path / 'out')) > 2:
            raise error
        assert {'ckpt.pt', 'best.pt'} <= set(names(tmp_path / 'out'))
        return save(value, f)
    monkeypatch.setattr(torch, 'save', limited)
    run.saved_step = 3
    if name == 'ckpt.pt':
        run.save(checkpoint(4), keep=9)
    else:
        run.write(name, checkpoint(4))
    assert capsys.readouterr().out == 'the disk is full: removed ckpt-000000002.pt, ckpt-000000001.pt\n'
    assert [load_checkpoint(path)['iter_num'] for path in run.checkpoints()] == left
    assert load_checkpoint(run / name)['iter_num'] == 4
    removed = {'ckpt-000000001.pt', 'ckpt-000000002.pt'}
    assert names(tmp_path / 'out') == sorted(set(before) - removed)


@pytest.mark.parametrize('number, removes', [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_without_room_the_last_checkpoint_stays(tmp_path, monkeypatch, capsys, number, removes):
    """The older ones are given up for want of space alone."""
    run = saved_run(tmp_path / 'out', (1, 2))
    assert run.how_to_go_on() == 'no step of this run is saved'  # as far as this process knows
    run.saved_step = 2

    def fail(*args):
        raise OSError(number, 'why')
    monkeypatch.setattr(torch, 'save', fail)
    with pytest.raises(ValueError, match=r'ckpt\.pt could not be written: why'):
        run.save(checkpoint(3), keep=9)
    steps = [load_checkpoint(path)['iter_num'] for path in run.checkpoints()]
    assert steps == ([2] if removes else [2, 1]) and ('removed' in capsys.readouterr().out) is removes
    assert run.how_to_go_on() == (f'step 2 is saved in {run / "ckpt.pt"}; resume with: python train.py '
                                  f'--init_from=resume --out_dir={run.path}')


@pytest.mark.parametrize('world, local, launcher', [
    ('1', '1', 'python'), ('16', '8', 'torchrun ...'), ('8', '8', 'torchrun --standalone --nproc_per_node=8')
])
def test_the_command_that_resumes_starts_as_many_processes(monkeypatch, world, local, launcher):
    monkeypatch.setenv('WORLD_SIZE', world)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', local)
    command = f"{launcher} train.py --init_from=resume --out_dir='my run'"
    assert RunDir('my run').resume_command() == command
    assert RunDir('my run', 'cpu').resume_command() == f'{command} --device=cpu'
    assert RunDir('my run', backend='gloo').resume_command() == f'{command} --backend=gloo'


def test_copies_that_a_user_made_are_neither_read_nor_removed(tmp_path):
    run = saved_run(tmp_path / 'out', (1, 2))
    for name in ('ckpt-best.pt', 'ckpt-000000001.pt.damaged', 'ckpt-1.pt', 'ckpt.pt.backup'):
        shutil.copy(run / 'ckpt.pt', run / name)
    before = names(tmp_path / 'out')
    assert len(run.checkpoints()) == 2
    run.save(checkpoint(3), keep=2)
    assert set(names(tmp_path / 'out')) >= set(before) - {'ckpt-000000001.pt'}


@pytest.mark.parametrize('how', ['flip', 'cut', 'folder'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, how):
    """And becomes the latest at once, so that a kill before the next save finds the same one."""
    run, newest = saved_run(tmp_path / 'out', (7, 1)), tmp_path / 'out' / 'ckpt.pt'
    data = bytearray(newest.read_bytes())
    data[data.index(b'\0\0\x80\x3f' * 9)] ^= 1  # a weight of step 1
    newest.write_bytes(data[:-200] if how == 'cut' else data)
    if how == 'folder':
        newest.unlink()
        newest.mkdir()
    resumed = find_latest(run)
    assert resumed.checkpoint['iter_num'] == 7 and resumed.path == run / 'ckpt-000000007.pt'
    assert list(resumed.damaged) == [str(newest)] and str(newest) in resumed.damaged[str(newest)]
    run.promote(resumed)
    assert names(tmp_path / 'out') == ['ckpt.pt', 'ckpt.pt.damaged', 'config.py', 'log.jsonl']
    assert find_latest(run).checkpoint['iter_num'] == 7 and not find_latest(run).damaged


def test_without_an_intact_checkpoint_nothing_is_resumed_or_touched(tmp_path):
    run = saved_run(tmp_path / 'out', (1, 2))
    for path in run.checkpoints():
        os.truncate(path, 500)
    before = contents(tmp_path)
    match = r'(?s)holds no intact .*=scratch\n.*ckpt\.pt is damaged.*ckpt-000000001\.pt is damaged'
    with pytest.raises(ValueError, match=match):
        find_latest(run)
    assert contents(tmp_path) == before
    with pytest.raises(ValueError, match='nothing holds no checkpoint; start with --init_from=scratch'):
        find_latest(RunDir(str(tmp_path / 'nothing')))


# -----------------------------------------------------------------------------
# the folder

def test_a_fresh_run_moves_the_old_one_aside(tmp_path):
    """To out.1, then out.2, file for file; also where best.pt is all that was kept of it."""
    saved_run(tmp_path / 'out')
    first = {name: data for name, data in contents(tmp_path / 'out').items() if not name.startswith('.lock')}
    for number in (1, 2):
        run = RunDir(str(tmp_path / 'out'))
        assert run.open(True, '') == [f'{run.path} held a run, which was moved to {run.path}.{number}']
        assert names(tmp_path / 'out') == ['config.py']
        (tmp_path / 'out' / 'best.pt').write_bytes(b'weights')
        run.release_lock()
    assert first.items() <= contents(tmp_path / 'out.1').items()
    assert names(tmp_path / 'out.2') == ['best.pt', 'config.py']


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / 'disk' / 'run').mkdir(parents=True)
    (tmp_path / 'out').symlink_to(tmp_path / 'disk' / 'run')
    saved_run(tmp_path / 'out')
    saved_run(tmp_path / 'out')
    assert (tmp_path / 'out').is_symlink() and not (tmp_path / 'out.1').exists()
    assert names(tmp_path / 'disk' / 'run') == names(tmp_path / 'disk' / 'run.1')


def test_files_of_a_killed_save_are_removed_and_no_others(tmp_path):
    run = saved_run(tmp_path / 'out')
    for name in ('ckpt.pt.77.tmp', 'best.pt.4242.tmp', 'log.jsonl.tmp', 'notes.tmp'):
        (tmp_path / 'out' / name).write_text('half')
    (tmp_path / 'out' / 'folder.tmp').mkdir()
    run.open(False, '')
    assert [name for name in names(tmp_path / 'out') if name.endswith('.tmp')] == ['folder.tmp', 'notes.tmp']


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, 'No space left on device')
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'config.py').write_text('seed = 2\n')
    monkeypatch.setattr(os, 'fsync', full)
    for out, words in (('out', 'No space left'), ('out/config.py/out', 'Not a directory')):
        with pytest.raises(ValueError, match=f'out_dir=.* cannot be written: {words}'):
            RunDir(str(tmp_path / out)).open(False, 'seed = 1\n')
    assert (tmp_path / 'out' / 'config.py').read_text() == 'seed = 2\n'
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r'mirror_dir=.* cannot be written: Not a dir.*; choose another'):
        Mirror(RunDir(str(tmp_path / 'out')), str(tmp_path / 'out' / 'config.py' / 'below'), False)
    saved_run(tmp_path / 'run')
    monkeypatch.chdir(tmp_path / 'run')
    with pytest.raises(ValueError, match=r'cannot be moved aside, .* contains the current directory; choose'):
        RunDir('.').open(True, '')


def test_a_config_file_of_the_users_is_not_replaced(tmp_path):
    (tmp_path / 'config.py').write_text('seed = 7\n')
    run = RunDir(str(tmp_path))
    words = r'config.py was not written by a run, which would replace it; rename it, or choose another folder'
    for create in (lambda: run.open(True, ''), lambda: Mirror(run, str(tmp_path), False)):
        with pytest.raises(ValueError, match=words):
            create()
    assert contents(tmp_path) == {'config.py': b'seed = 7\n'}


# -----------------------------------------------------------------------------
# the lock

@contextlib.contextmanager
def owner_of(path):
    """A process that has locked a folder; killed with kill -9 at the end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run = RunDir(str(path))
            run.open(False, '')
            os.write(write, b'locked')
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(read, 6) == b'locked'
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@posix
@pytest.mark.parametrize('fresh', [True, False])
def test_a_folder_has_one_owner_until_that_process_is_dead(tmp_path, fresh):
    """A second start names it and changes nothing; after kill -9 the next start gets the folder."""
    saved_run(tmp_path / 'out')
    run = RunDir(str(tmp_path / 'out'))
    with owner_of(tmp_path / 'out') as pid:
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=rf'out is in use by process {pid}; wait for it, .*--out_dir'):
            run.open(fresh, 'seed = 2\n')
        assert contents(tmp_path) == before
    assert len(run.open(fresh, 'seed = 2\n')) == fresh
    assert (tmp_path / 'out' / 'config.py').read_text() == 'seed = 2\n'


# -----------------------------------------------------------------------------
# the mirror

def mirrored(tmp_path, steps=(1,), ours=False):
    """The files of a mirror after a run saved these steps."""
    run = RunDir(str(tmp_path / 'out'))
    run.open(True, '')
    mirror = Mirror(run, str(tmp_path / 'drive'), ours)
    for step in steps:
        run.save(checkpoint(step), 2)
        mirror.update()
    mirror.close(20)
    assert not mirror.thread.is_alive()
    run.release_lock()
    return contents(tmp_path / 'drive')


def test_a_mirror_holds_the_last_files_and_can_be_resumed(tmp_path, train_tiny):
    train_tiny(max_iters=6, mirror_dir=tmp_path / 'drive')
    here, there = contents(tmp_path / 'out'), contents(tmp_path / 'drive')
    files = ('config.py', 'log.jsonl', 'report.html', 'ckpt.pt', 'best.pt')
    assert there == {name: here[name] for name in files}
    train_tiny(init_from='resume', max_iters=7, mirror_dir=f'{tmp_path}/out/../drive/')  # the same folder
    assert not (tmp_path / 'drive.1').exists()
    assert train_tiny('drive', init_from='resume', max_iters=10) == 0
    assert load_checkpoint(str(tmp_path / 'drive' / 'ckpt.pt'))['iter_num'] == 10


def test_a_mirror_of_another_run_is_moved_aside(tmp_path, capsys):
    first = mirrored(tmp_path)
    (tmp_path / 'drive' / 'ckpt.pt.77.tmp').write_text('half')
    assert 'ckpt.pt.77.tmp' not in mirrored(tmp_path, (2,), ours=True) and not (tmp_path / 'drive.1').exists()
    mirrored(tmp_path, (3,))
    assert f'drive held a run, which was moved to {tmp_path}/drive.1' in capsys.readouterr().out
    assert contents(tmp_path / 'drive.1').keys() == first.keys()


def test_a_mirror_that_another_run_took_over_is_not_overwritten_on_resume(train_tiny, tmp_path):
    for out, seed in (('first', 1), ('second', 2)):
        train_tiny(out, max_iters=2, seed=seed, mirror_dir=tmp_path / 'drive')
    assert train_tiny('first', init_from='resume', max_iters=4) == 0
    for folder, steps, seed in (('drive.1', 2, 1), ('drive.2', 2, 2), ('drive', 4, 1)):
        checkpoint = load_checkpoint(str(tmp_path / folder / 'ckpt.pt'))
        assert (checkpoint['iter_num'], checkpoint['config']['seed']) == (steps, seed)


def test_a_run_that_is_refused_leaves_the_mirror_of_the_running_one(train_tiny, tmp_path):
    train_tiny(max_iters=2, mirror_dir=tmp_path / 'drive')
    before = contents(tmp_path / 'drive')
    owner = RunDir(str(tmp_path / 'out'))
    owner.open(False, '')
    with pytest.raises(ValueError, match='in use by process'):
        train_tiny(mirror_dir=tmp_path / 'drive')
    assert contents(tmp_path / 'drive') == before and not (tmp_path / 'drive.1').exists()


def test_a_copy_that_fails_is_printed_and_tried_again(tmp_path, monkeypatch, capsys):
    original, failures = shutil.copyfileobj, [1, 2]

    def full_twice(*args):
        if failures:
            failures.pop()
            raise OSError(errno.ENOSPC, 'No space left on device')
        original(*args)
    monkeypatch.setattr(run_dir.shutil, 'copyfileobj', full_twice)
    assert mirrored(tmp_path, (1, 2)).keys() == {'config.py', 'ckpt.pt'}
    assert capsys.readouterr().out.count('not copied: No space left on device') == 2


def test_a_mirror_has_no_checkpoint_that_is_newer_than_its_best(tmp_path, monkeypatch):
    """The run saves step 2, a new best, while the best of step 1 is copied."""
    run, original, mirrored_steps = RunDir(str(tmp_path / 'out')), shutil.copyfileobj, []
    run.open(True, '')

    def copy(source, target, size):
        if source.name.endswith('best.pt') and run.saved_step == 1:
            run.save(checkpoint(2) | {'best_val_loss': 2.0}, 2)
        original(source, target, size)
        if source.name.endswith('ckpt.pt'):
            target.flush()
            mirrored_steps.append(load_checkpoint(target.name)['iter_num'])
    monkeypatch.setattr(run_dir.shutil, 'copyfileobj', copy)
    run.save(checkpoint(1) | {'best_val_loss': 3.0}, 2)
    mirror = Mirror(run, str(tmp_path / 'drive'), False)
    mirror.update()
    mirror.close(20)
    assert mirrored_steps == [1, 2]


def test_a_mirror_that_hangs_does_not_hold_the_run(tmp_path, monkeypatch, capsys):
    released = threading.Event()
    monkeypatch.setattr(run_dir.shutil, 'copyfileobj', lambda *args: released.wait(60))
    mirror = Mirror(saved_run(tmp_path / 'out'), str(tmp_path / 'drive'), False)
    mirror.close(0.01)
    released.set()
    mirror.thread.join()
    assert 'lacks the last checkpoint after 0.01 s' in capsys.readouterr().out
