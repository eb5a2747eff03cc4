"""The folder of a run: one owner at a time, no run overwritten, the last checkpoints kept, a mirror."""

import contextlib
import errno
import math
import os
import shutil
import signal

import pytest
import torch
from conftest import contents

from configurator import OWN_FILE
from hotloop.training.checkpoint import Checkpoints
from hotloop.training.run_dir import open_folder, open_mirror, resume_command
from hotloop.weights.load import load_checkpoint
from train import TrainConfig

CONFIG = f'{OWN_FILE}\nseed = 1\n'


def checkpoint(step):
    return {'model': {'w': torch.full((99,), float(step))}, 'model_args': {}, 'iter_num': step,
            'best_val_loss': math.inf}


def saved_run(path, steps=(1,)):
    """The Checkpoints of a folder with these steps, which nobody uses."""
    held, _ = open_folder(str(path), True, CONFIG)
    run = Checkpoints(str(path))
    for step in steps:
        run.save(checkpoint(step), best=False, final=True)
    (path / 'log.jsonl').write_text('{"step": 1}\n')
    held.close()
    return run


def names(path):
    """Files of a folder without the lock's."""
    return sorted(p.name for p in path.iterdir() if not p.name.startswith('.lock'))


# -----------------------------------------------------------------------------
# checkpoints

def test_the_last_checkpoints_are_kept(tmp_path):
    """Each is intact and at its step, over a resume in between; a step that is saved twice counts once."""
    saved_run(tmp_path / 'out', range(1, 10))
    run = Checkpoints(str(tmp_path / 'out'))
    run.promote(run.latest())
    for step in [10, 11, 11, 12, 13]:
        run.save(checkpoint(step), best=False, final=True)
        assert [os.path.basename(p) for p in run.paths()] == ['ckpt.pt', f'ckpt-{step - 1:09d}.pt']
        assert [load_checkpoint(p)['iter_num'] for p in run.paths()] == [step, step - 1]


def test_a_save_that_fails_is_printed_and_a_final_one_is_an_error(tmp_path, monkeypatch, capsys):
    """The files before stay."""
    run = saved_run(tmp_path / 'out', (1, 2))
    before = contents(tmp_path)

    def fail(*args):
        raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(torch, 'save', fail)
    run.save(checkpoint(3), best=True)
    run.wait()
    words = 'could not be written: No space left on device'
    assert f'ckpt.pt {words}; training continues' in capsys.readouterr().out
    with pytest.raises(ValueError, match=words):
        run.save(checkpoint(4), best=False, final=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize('world, local, launcher', [
    ('1', '1', 'python'), ('16', '8', 'torchrun ...'),
    ('8', '8', 'torchrun --standalone --nproc_per_node=8')])
def test_the_command_that_resumes_starts_as_many_processes(monkeypatch, world, local, launcher):
    monkeypatch.setenv('WORLD_SIZE', world)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', local)
    command = f"{launcher} train.py --init_from=resume --out_dir='my run'"
    assert resume_command(TrainConfig(out_dir='my run')) == command
    assert resume_command(TrainConfig(out_dir='my run', device='cpu', backend='gloo')) == (
        f'{command} --device=cpu --backend=gloo')


def test_copies_that_a_user_made_are_neither_read_nor_removed(tmp_path):
    run, out = saved_run(tmp_path / 'out', (1, 2)), tmp_path / 'out'
    for name in ('ckpt-best.pt', 'ckpt-000000001.pt.damaged', 'ckpt-1.pt', 'ckpt.pt.backup'):
        shutil.copy(out / 'ckpt.pt', out / name)
    before = names(out)
    assert len(run.paths()) == 2
    run.save(checkpoint(3), best=False, final=True)
    assert set(names(out)) >= set(before) - {'ckpt-000000001.pt'}


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
    latest = run.latest()
    assert latest.checkpoint['iter_num'] == 7 and latest.path.endswith('ckpt-000000007.pt')
    assert list(latest.damaged) == [str(newest)] and str(newest) in latest.damaged[str(newest)]
    run.promote(latest)
    assert names(tmp_path / 'out') == ['ckpt.pt', 'ckpt.pt.damaged', 'config.py', 'log.jsonl']
    assert run.latest().checkpoint['iter_num'] == 7 and not run.latest().damaged


def test_without_an_intact_checkpoint_nothing_is_resumed_or_touched(tmp_path):
    run = saved_run(tmp_path / 'out', (1, 2))
    for path in run.paths():
        os.truncate(path, 500)
    before = contents(tmp_path)
    match = r'(?s)holds no intact .*=scratch\n.*ckpt\.pt is damaged.*ckpt-000000001\.pt is damaged'
    with pytest.raises(ValueError, match=match):
        run.latest()
    assert contents(tmp_path) == before
    with pytest.raises(ValueError, match='nothing holds no checkpoint; start with --init_from=scratch'):
        Checkpoints(str(tmp_path / 'nothing')).latest()


# -----------------------------------------------------------------------------
# the folder

def test_a_new_run_moves_the_old_one_aside(tmp_path):
    """To out.1, then out.2, file for file; also where best.pt is all that was kept of it."""
    out = tmp_path / 'out'
    saved_run(out)
    first = {name: data for name, data in contents(out).items() if not name.startswith('.lock')}
    for number in (1, 2):
        held, moved = open_folder(str(out), True, CONFIG)
        assert moved == f'{out}.{number}' and names(out) == ['config.py']
        (out / 'best.pt').write_bytes(b'weights')
        held.close()
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
    saved_run(tmp_path / 'out')
    for name in ('ckpt.pt.77.tmp', 'best.pt.4242.tmp', 'notes.tmp'):
        (tmp_path / 'out' / name).write_text('half')
    open_folder(str(tmp_path / 'out'), False, CONFIG)
    assert [name for name in names(tmp_path / 'out') if name.endswith('.tmp')] == ['notes.tmp']


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ValueError, match=r'out_dir=.* cannot be written: Not a directory'):
        open_folder(str(tmp_path / 'file' / 'out'), False, CONFIG)
    with pytest.raises(ValueError, match=r'mirror_dir=.* cannot be written: Not a directory'):
        open_mirror(str(tmp_path / 'file' / 'below'), str(tmp_path), None)
    saved_run(tmp_path / 'run')
    monkeypatch.chdir(tmp_path / 'run')
    with pytest.raises(ValueError, match=r'contains the current directory; choose'):
        open_folder('.', True, CONFIG)


def test_a_config_file_of_the_users_is_not_replaced(tmp_path):
    (tmp_path / 'config.py').write_text('seed = 7\n')
    for create in (lambda: open_folder(str(tmp_path), True, CONFIG),
                   lambda: open_mirror(str(tmp_path), str(tmp_path / 'out'), None)):
        with pytest.raises(ValueError, match=r'config.py was not written by a run'):
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
            opened = open_folder(str(path), False, CONFIG)
            assert opened  # holds the lock
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


@pytest.mark.parametrize('is_new', [True, False])
def test_a_folder_has_one_owner_until_that_process_is_dead(tmp_path, is_new):
    """A second start names it and changes nothing; after kill -9 the next start gets the folder."""
    saved_run(tmp_path / 'out')
    with owner_of(tmp_path / 'out') as pid:
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=rf'out is in use by process {pid}; wait for it, .*--out_dir'):
            open_folder(str(tmp_path / 'out'), is_new, CONFIG)
        assert contents(tmp_path) == before
    _, moved = open_folder(str(tmp_path / 'out'), is_new, CONFIG)
    assert (moved is not None) == is_new


# -----------------------------------------------------------------------------
# the mirror

def test_a_mirror_holds_the_last_files_and_can_be_resumed(tmp_path, train_tiny):
    train_tiny(max_iters=6, mirror_dir=tmp_path / 'drive')
    here, there = contents(tmp_path / 'out'), contents(tmp_path / 'drive')
    files = ('config.py', 'log.jsonl', 'report.html', 'ckpt.pt', 'best.pt')
    assert there == {name: here[name] for name in files}
    train_tiny(init_from='resume', max_iters=7, mirror_dir=f'{tmp_path}/out/../drive/')  # the same folder
    assert not (tmp_path / 'drive.1').exists()
    assert train_tiny('drive', init_from='resume', max_iters=10, mirror_dir=None) == 0
    assert load_checkpoint(str(tmp_path / 'drive' / 'ckpt.pt'))['iter_num'] == 10


def test_a_mirror_that_another_run_took_over_is_not_overwritten_on_resume(train_tiny, tmp_path):
    for out, seed in (('first', 1), ('second', 2)):
        train_tiny(out, max_iters=2, seed=seed, mirror_dir=tmp_path / 'drive')
    assert train_tiny('first', init_from='resume', max_iters=4) == 0
    for folder, steps, seed in (('drive.1', 2, 1), ('drive.2', 2, 2), ('drive', 4, 1)):
        found = load_checkpoint(str(tmp_path / folder / 'ckpt.pt'))
        assert (found['iter_num'], found['config']['seed']) == (steps, seed)


def test_a_copy_that_fails_is_printed_and_tried_again(tmp_path, monkeypatch, capsys):
    run = saved_run(tmp_path / 'out')
    run.mirror = str(tmp_path / 'drive')
    (tmp_path / 'drive').write_text('a file')
    run.copy()
    assert 'drive could not be written' in capsys.readouterr().out
    (tmp_path / 'drive').unlink()
    run.copy()
    assert names(tmp_path / 'drive') == ['ckpt.pt', 'config.py', 'log.jsonl']
