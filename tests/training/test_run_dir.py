"""The folder of a run: one owner at a time, no run overwritten, the last checkpoints kept, a mirror."""

import math
import os
import shutil

import pytest
import torch
from conftest import contents, error_of

from hotloop.training.checkpoint import Checkpoints
from hotloop.training.run_dir import open_folder, open_mirror, resume_command
from hotloop.weights.load import load_checkpoint
from train import TrainConfig

CONFIG = 'seed = 1\n'


def checkpoint(step):
    """Make a checkpoint of one small matrix."""
    return {'model': {'w': torch.full((99,), float(step))}, 'model_args': {}, 'iter_num': step,
            'best_val_loss': math.inf, 'state': {}}


def saved_run(path, steps=(1,)):
    """Make a run folder with these steps that nobody uses. Returns its Checkpoints."""
    held, _ = open_folder(str(path), True, CONFIG)
    run = Checkpoints(str(path))
    for step in steps:
        run.save(checkpoint(step), best=False, final=True)
    (path / 'log.jsonl').write_text('{"step": 1}\n')
    held.close()
    return run


def names(path):
    """List the files of a folder without the lock's."""
    return sorted(p.name for p in path.iterdir() if not p.name.startswith('.lock'))


# -----------------------------------------------------------------------------
# checkpoints

def test_the_last_checkpoints_are_kept(tmp_path):
    """Each is at its step, over a resume; one that is saved twice counts once."""
    saved_run(tmp_path / 'out', range(1, 10))
    run = Checkpoints(str(tmp_path / 'out'))
    run.promote(run.latest())
    for step in [10, 11, 11, 12, 13]:
        run.save(checkpoint(step), best=False, final=True)
        assert [os.path.basename(p) for p in run.paths()] == ['ckpt.pt', f'ckpt-{step - 1:09d}.pt']
        assert [load_checkpoint(p)['iter_num'] for p in run.paths()] == [step, step - 1]


def test_copies_that_a_user_made_are_neither_read_nor_removed(tmp_path):
    run, out = saved_run(tmp_path / 'out', (1, 2)), tmp_path / 'out'
    for name in ('ckpt-best.pt', 'ckpt-000000001.pt.damaged', 'ckpt-1.pt', 'ckpt.pt.backup'):
        shutil.copy(out / 'ckpt.pt', out / name)
    before = names(out)
    assert len(run.paths()) == 2
    run.save(checkpoint(3), best=False, final=True)
    assert set(names(out)) >= set(before) - {'ckpt-000000001.pt'}


@pytest.mark.parametrize('world, local, launcher', [
    ('1', '1', 'python'), ('16', '8', 'torchrun ...'),
    ('8', '8', 'torchrun --standalone --nproc_per_node=8')])
def test_the_command_that_resumes_starts_as_many_processes(monkeypatch, world, local, launcher):
    monkeypatch.setenv('WORLD_SIZE', world)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', local)
    expected = f"{launcher} train.py --init_from=resume --out_dir='my run' --device=cpu"
    assert resume_command(TrainConfig(out_dir='my run', device='cpu')) == expected


# -----------------------------------------------------------------------------
# the folder

@pytest.mark.parametrize('linked', [False, True])
def test_a_new_run_moves_the_old_one_aside(tmp_path, linked):
    """To out.1, then out.2, file for file; also where best.pt is all that was kept of it."""
    out = real = tmp_path / 'out'
    if linked:
        real = tmp_path / 'disk' / 'run'
        real.mkdir(parents=True)
        out.symlink_to(real)
    saved_run(out)
    first = {name: data for name, data in contents(out).items() if not name.startswith('.lock')}
    for number in (1, 2):
        held, moved = open_folder(str(out), True, CONFIG)
        assert moved == f'{real}.{number}' and names(out) == ['config.py']
        (out / 'best.pt').write_bytes(b'weights')
        held.close()
    assert first.items() <= contents(real.with_name(f'{real.name}.1')).items()
    assert names(real.with_name(f'{real.name}.2')) == ['best.pt', 'config.py']
    assert out.is_symlink() == linked


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    inside = str(tmp_path / 'file' / 'out')
    assert f'out_dir={inside!r} cannot be written: Not a dir' in error_of(open_folder, inside, False, CONFIG)
    assert f'mirror_dir={inside!r} cannot be' in error_of(open_mirror, inside, str(tmp_path), True)
    saved_run(tmp_path / 'run')
    monkeypatch.chdir(tmp_path / 'run')
    assert 'contains the current directory' in error_of(open_folder, '.', True, CONFIG)


@pytest.mark.parametrize('is_new', [True, False])
def test_a_folder_has_one_owner(tmp_path, is_new):
    """A second start names it and changes nothing. The kernel frees the lock of a process that dies."""
    saved_run(tmp_path / 'out')
    held, _ = open_folder(str(tmp_path / 'out'), False, CONFIG)
    before = contents(tmp_path)
    error = error_of(open_folder, str(tmp_path / 'out'), is_new, CONFIG)
    assert f'out is in use by process {os.getpid()}; wait for it' in error and '--out_dir' in error
    assert contents(tmp_path) == before
    held.close()
    _, moved = open_folder(str(tmp_path / 'out'), is_new, CONFIG)
    assert (moved is not None) == is_new


# -----------------------------------------------------------------------------
# the mirror

def test_a_mirror_holds_the_last_files_and_can_be_resumed(tmp_path, train_tiny):
    train_tiny(max_iters=6, mirror_dir=tmp_path / 'drive')
    here, there = contents(tmp_path / 'out'), contents(tmp_path / 'drive')
    files = ('config.py', 'log.jsonl', 'report.html', 'ckpt.pt', 'best.pt')
    assert there == {name: here[name] for name in files}
    train_tiny(init_from='resume', max_iters=7)
    assert not (tmp_path / 'drive.1').exists()
    assert train_tiny('drive', init_from='resume', max_iters=10, mirror_dir=None) == 0
    assert load_checkpoint(str(tmp_path / 'drive' / 'ckpt.pt'))['iter_num'] == 10


def test_a_mirror_of_another_run_is_moved_aside(train_tiny, tmp_path):
    for out, seed in (('first', 1), ('second', 2)):
        train_tiny(out, max_iters=2, seed=seed, mirror_dir=tmp_path / 'drive')
    train_tiny('first', init_from='resume', max_iters=4)  # the second run has taken the mirror
    expected = {'drive.1': (2, 1), 'drive.2': (2, 2), 'drive': (4, 1)}
    for folder, (step, seed) in expected.items():
        found = load_checkpoint(str(tmp_path / folder / 'ckpt.pt'))
        assert (found['iter_num'], found['config']['seed']) == (step, seed), folder


def test_a_copy_that_fails_is_printed_and_tried_again(tmp_path, capsys):
    run = saved_run(tmp_path / 'out')
    run.mirror = str(tmp_path / 'drive')
    (tmp_path / 'drive').write_text('a file')
    run.copy()
    assert 'drive could not be written' in capsys.readouterr().out
    (tmp_path / 'drive').unlink()
    run.copy()
    assert names(tmp_path / 'drive') == ['ckpt.pt', 'config.py', 'log.jsonl']
