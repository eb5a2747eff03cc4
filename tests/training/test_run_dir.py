"""The folders of a run: one owner at a time, no run overwritten, the last checkpoints kept, a mirror."""

import math
import os
import shutil

import pytest
import torch
from conftest import contents, error_of

from configurator import configure
from hotloop.system.files import checkpoint_paths
from hotloop.training.checkpoint import Checkpoints
from hotloop.training.run_dir import open_folder, resume_command, write_config
from hotloop.weights.load import load_checkpoint
from model import GPTConfig
from train import TrainConfig


def checkpoint(step):
    """Make a checkpoint of one small matrix."""
    return {'model': {'w': torch.full((99,), float(step))}, 'model_args': {}, 'iter_num': step,
            'best_val_loss': math.inf, 'state': {}}


def save_run(path, steps=(1,)):
    """Make a run folder with these steps that nobody uses. Returns its Checkpoints."""
    held = open_folder('out_dir', str(path), True)
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
    """Each is at its step, over a resume; one that is saved twice counts once. A user's copies stay."""
    save_run(tmp_path / 'out', range(1, 10))
    run = Checkpoints(str(tmp_path / 'out'), saved_step=9)
    run.promote(run.latest())
    copies = {'ckpt-best.pt', 'ckpt-000000001.pt.damaged', 'ckpt-1.pt', 'ckpt.pt.backup'}
    for name in copies:
        shutil.copy(tmp_path / 'out' / 'ckpt.pt', tmp_path / 'out' / name)
    for step in [10, 11, 11, 12, 13]:
        run.save(checkpoint(step), best=False, final=True)
        paths = checkpoint_paths(str(tmp_path / 'out'))
        assert [os.path.basename(p) for p in paths] == ['ckpt.pt', f'ckpt-{step - 1:09d}.pt']
        assert [load_checkpoint(p)['iter_num'] for p in paths] == [step, step - 1]
    assert copies < set(names(tmp_path / 'out'))


def test_a_lost_best_pt_is_written_at_the_next_evaluation(tmp_path):
    """In this process, and in one that resumes from a checkpoint without the loss that is lost."""
    run = save_run(tmp_path / 'out')
    best = tmp_path / 'out' / 'best.pt'
    run.save(checkpoint(2) | {'best_val_loss': 2.0}, best=True, final=True)
    best.unlink()
    best.mkdir()
    with pytest.raises(ValueError, match=r'best\.pt could not be written'):
        run.save(checkpoint(3) | {'best_val_loss': 1.0}, best=True, final=True)
    for step in (3, 4):
        latest = run.latest().checkpoint
        run.wait()
        assert run.best_loss == 2.0 and (latest['iter_num'], latest['best_val_loss']) == (step, 2.0)
        assert ('evaluated_at' in latest['state']) == (step == 3)  # -1: evaluated again
        run.save(checkpoint(4) | {'best_val_loss': 1.0}, best=False, final=True)
    best.rmdir()
    run.save(checkpoint(5) | {'best_val_loss': 1.5}, best=True, final=True)
    run.wait()
    assert run.best_loss == 1.5 and load_checkpoint(str(best))['iter_num'] == 5


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
    save_run(out)
    first = {name: data for name, data in contents(out).items() if not name.startswith('.lock')}
    for _ in range(2):
        held = open_folder('out_dir', str(out), True)
        assert names(out) == []
        (out / 'best.pt').write_bytes(b'weights')
        held.close()
    assert first.items() <= contents(real.with_name(f'{real.name}.1')).items()
    assert names(real.with_name(f'{real.name}.2')) == names(out) == ['best.pt']
    assert out.is_symlink() == linked


def test_a_run_is_not_moved_from_under_the_shell(tmp_path, monkeypatch):
    save_run(tmp_path / 'run')
    monkeypatch.chdir(tmp_path / 'run')
    assert 'contains the current directory' in error_of(open_folder, 'out_dir', '.', True)


def test_a_run_is_not_moved_with_one_that_trains_inside(tmp_path):
    save_run(tmp_path / 'out')
    held = open_folder('out_dir', str(tmp_path / 'out' / 'sweep' / 'a'), True)
    error = error_of(open_folder, 'out_dir', str(tmp_path / 'out'), True)
    assert f'a is in use by process {os.getpid()}' in error and names(tmp_path) == ['out']
    held.close()
    open_folder('out_dir', str(tmp_path / 'out'), True).close()
    assert names(tmp_path) == ['out', 'out.1']


@pytest.mark.parametrize('is_new', [True, False])
def test_a_folder_has_one_owner(tmp_path, is_new):
    """A second start names it and changes nothing. The kernel frees the lock of a process that dies."""
    save_run(tmp_path / 'out')
    held = open_folder('out_dir', str(tmp_path / 'out'), False)
    before = contents(tmp_path)
    error = error_of(open_folder, 'out_dir', str(tmp_path / 'out'), is_new)
    assert f'out is in use by process {os.getpid()}; ' in error and ('--out_dir' in error) == is_new
    assert contents(tmp_path) == before
    held.close()
    open_folder('out_dir', str(tmp_path / 'out'), is_new).close()
    assert (tmp_path / 'out.1').exists() == is_new


def test_the_command_that_resumes_starts_as_many_processes(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '8')
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '4')
    command = "train.py --init_from=resume --out_dir='my run' --device=cpu"
    expected = f'torchrun --standalone --nproc_per_node=4 {command}'
    assert resume_command(TrainConfig(out_dir='my run', device='cpu')) == expected


@pytest.mark.parametrize('text', ['a\'b"c\\d\n#e', '\ud800', 'None', ''])
def test_config_py_read_back_gives_the_same_settings(tmp_path, text):
    """Types and -0.0 too."""
    shape = GPTConfig(block_size=10**30)
    run = TrainConfig(min_lr=-0.0, data_dir=text, wandb_run_name=text, compile=True)
    write_config(tmp_path, {**vars(shape), **vars(run)}, None)
    found = configure(GPTConfig, TrainConfig, argv=[str(tmp_path / 'config.py')])
    assert repr(found.objects) == repr([shape, run])
    assert len(found.given) == len(vars(shape)) + len(vars(run))


# -----------------------------------------------------------------------------
# the mirror

def test_a_mirror_holds_the_last_files_and_can_be_resumed(tmp_path, train_tiny):
    """A new run moves the run that was in it aside; a resumed run goes on with it."""
    train_tiny('other', max_iters=1, mirror_dir=tmp_path / 'drive')
    train_tiny(max_iters=6, mirror_dir=tmp_path / 'drive')
    assert load_checkpoint(str(tmp_path / 'drive.1' / 'ckpt.pt'))['iter_num'] == 1
    train_tiny(init_from='resume', max_iters=7)
    here = contents(tmp_path / 'out')
    files = ('config.py', 'log.jsonl', 'report.html', 'ckpt.pt', 'best.pt')
    assert contents(tmp_path / 'drive') == {name: here[name] for name in files} | {'.lock': here['.lock']}
    assert not (tmp_path / 'drive.2').exists()
    assert train_tiny('drive', init_from='resume', max_iters=10, mirror_dir=None) == 0
    assert load_checkpoint(str(tmp_path / 'drive' / 'ckpt.pt'))['iter_num'] == 10
    train_tiny(init_from='resume', max_iters=8)  # it is behind its mirror, which went on alone
    for name, step in (('drive.2', 10), ('drive', 8)):
        assert load_checkpoint(str(tmp_path / name / 'ckpt.pt'))['iter_num'] == step
    error = error_of(train_tiny, 'gone', resume=True, mirror_dir=tmp_path / 'drive')
    assert f'--out_dir={tmp_path / "drive"} --mirror_dir=None' in error


def test_a_resumed_run_does_not_replace_another_run_in_a_mirror(tmp_path, train_tiny):
    train_tiny('first', max_iters=1, mirror_dir=tmp_path / 'drive')
    train_tiny('second', max_iters=1)
    train_tiny('second', init_from='resume', max_iters=2, mirror_dir=tmp_path / 'drive')
    for name, step in (('drive.1', 1), ('drive', 2)):
        assert load_checkpoint(str(tmp_path / name / 'ckpt.pt'))['iter_num'] == step


def test_a_refused_mirror_moves_no_run_aside(tmp_path, train_tiny):
    train_tiny(max_iters=1)
    (tmp_path / 'file').touch()
    for name, words in (('file', 'mirror_dir='), ('drive/run', 'mount the drive')):
        assert words in error_of(train_tiny, max_iters=1, mirror_dir=tmp_path / name)
    assert (tmp_path / 'out' / 'ckpt.pt').exists() and not (tmp_path / 'out.1').exists()


def test_a_copy_that_fails_is_printed_and_tried_again(tmp_path, capsys):
    run = save_run(tmp_path / 'out')
    run.mirror = str(tmp_path / 'drive')
    run.copy()
    assert 'drive could not be written: it is gone' in capsys.readouterr().out
    assert not (tmp_path / 'drive').exists()
    (tmp_path / 'drive').mkdir()
    run.copy()
    assert names(tmp_path / 'drive') == ['ckpt.pt', 'log.jsonl']


def test_a_checkpoint_that_was_written_while_the_resume_began_is_not_replaced(tmp_path):
    """By a process that was about to end."""
    run = save_run(tmp_path / 'out')
    latest = run.latest()
    path = tmp_path / 'out' / 'ckpt.pt'
    os.utime(path, ns=(0, latest.written + 1))
    assert 'written again' in error_of(run.promote, latest)
