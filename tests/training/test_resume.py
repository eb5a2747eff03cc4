"""The laws of exact resume: a run that was stopped ends with the bits and the log of an uninterrupted one."""

import functools
import math
import os
import pickle
import re
import shutil

import pytest
import torch
from conftest import contents, error_of, load, noise, rows, same, stop_at, tiny_flags, write_bins
from faults import assert_equal_runs, final, log
from test_dataset import nanogpt_meta

import train
from hotloop.data.dataset import read_meta
from hotloop.system.device import try_compile
from hotloop.system.distributed import Env
from hotloop.training.dataloader import Batches, Split
from hotloop.training.settings import checkpoint_settings
from model import GPT, GPTConfig

# with accumulation, clipping, warmup and decay; a log line is under way when the run is stopped
RECIPE = dict(optimizer='muon', preset='modern', mixer='KA', ortho_penalty=1e-3, feedback='dfa', dropout=0.1,
              log_interval=3)


def interrupted(train_tiny, monkeypatch, out, step, **settings):
    """Train until SIGTERM ends the run after this step."""
    stop_at(monkeypatch, step)
    assert train_tiny(out, **settings) == 143


def change(out, function):
    checkpoint = load(out / 'ckpt.pt')
    function(checkpoint)
    torch.save(checkpoint, out / 'ckpt.pt')


# -----------------------------------------------------------------------------
# exactness

def test_fp16_resumes_with_its_scale(train_tiny, tmp_path, monkeypatch):
    """The first steps overflow; without the saved scaler they would do so again."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**30)
    monkeypatch.setattr(torch.amp, 'GradScaler', scaler)
    fp16 = dict(dtype='float16', max_iters=12, dropout=0.1)
    train_tiny('whole', **fp16)
    interrupted(train_tiny, monkeypatch, 'parts', 5, **fp16)
    assert load(tmp_path / 'parts' / 'ckpt.pt')['scaler']['scale'] == 2.0**25  # five overflows
    train_tiny('parts', init_from='resume', **fp16)
    assert same(final(tmp_path / 'parts'), final(tmp_path / 'whole'))


def run_in(folder, **settings):
    """run(out, **more) trains into a folder below this one."""
    def run(out, **more):
        return train.main(tiny_flags(folder / out, **{**settings, **more}))
    return run


@pytest.fixture(scope='module')
def halves(tmp_path_factory, data_dir):
    """Train a complete run on RECIPE, and one that is stopped at step 5."""
    folder = tmp_path_factory.mktemp('halves')
    run = run_in(folder, data_dir=data_dir, save_minutes=0, **RECIPE)
    run('whole')
    with pytest.MonkeyPatch.context() as m:
        interrupted(run, m, 'stopped', 5)
    return folder


@pytest.fixture
def stopped(halves, tmp_path):
    """Copy the run that was stopped at step 5 to the folder `out`."""
    return shutil.copytree(halves / 'stopped', tmp_path / 'out')


def test_resume_is_one_command_that_starts_and_resumes(train_tiny, tmp_path, monkeypatch, capsys, halves):
    """Started, killed and started again, it gives one run's bits; then it does nothing."""
    flags = dict(resume=True, save_minutes=0, **RECIPE)
    interrupted(train_tiny, monkeypatch, 'out', 5, **flags)
    train_tiny(**flags)
    assert_equal_runs(tmp_path / 'out', halves / 'whole')
    assert 'resuming at step 5' in capsys.readouterr().out
    before = contents(tmp_path), os.stat(tmp_path / 'out' / 'ckpt.pt').st_mtime_ns
    train_tiny(**flags)
    assert (contents(tmp_path), os.stat(tmp_path / 'out' / 'ckpt.pt').st_mtime_ns) == before
    remedy = 'to train further, give --max_iters=N\n'
    assert f'nothing to do: the run is at step 10 of 10; {remedy}' in capsys.readouterr().out
    train_tiny('late', max_iters=1, decay_lr=True, warmup_iters=2, learning_rate=1e-5)
    printed = capsys.readouterr().out
    assert 'above learning_rate=1e-05' in printed and 'within its warmup of 2 steps' in printed


def test_resume_never_starts_over_where_checkpoints_are(train_tiny, stopped, capsys):
    """A run whose checkpoints are all damaged is an error, file by file, and stays as it is."""
    for path in stopped.glob('ckpt*.pt'):
        os.truncate(path, 500)
    before = contents(stopped)
    assert 'ckpt-000000004.pt is damaged' in error_of(train_tiny, resume=True)
    assert 'ckpt.pt is damaged' in capsys.readouterr().err and contents(stopped) == before


def test_a_card_of_another_shape_is_told_which_flags_continue_the_run(stopped, tmp_path):
    """nanoGPT ignores the shape in a card on resume. All differences are named at once."""
    card = tmp_path / 'card.py'
    card.write_text('n_layer = 7\nn_embd = 64\nmax_iters = 99\n')
    words = [str(card), '--init_from=resume', f'--out_dir={stopped}']
    *wrong, remedy = error_of(train.read_settings, words).splitlines()
    assert [line.split(', but')[0] for line in wrong] == [f'{card}, line 1: n_layer=7',
                                                          f'{card}, line 2: n_embd=64']
    flags = remedy.removeprefix('to continue it: ').partition(';')[0].split()
    assert len(flags) == 2 and train.read_settings(words + flags).train.max_iters == 99


def test_a_damaged_checkpoint_costs_steps_and_no_bits(train_tiny, stopped, capsys, halves):
    newest = stopped / 'ckpt.pt'
    os.truncate(newest, newest.stat().st_size - 500)
    train_tiny(init_from='resume')
    assert f'{newest} is damaged' in capsys.readouterr().err
    assert (stopped / 'ckpt.pt.damaged').exists()
    assert_equal_runs(stopped, halves / 'whole')


@pytest.mark.slow
def test_compiled_runs_repeat_and_resume_bit_for_bit(tmp_path, monkeypatch):
    """With deterministic=False Inductor adds up the gradient of the embedding in any order."""
    if reason := try_compile(torch.device('cpu')):
        pytest.skip(reason)
    write_bins(tmp_path / 'tiny', noise(40001), noise(487, seed=1))
    run = run_in(tmp_path, compile=True, batch_size=32, block_size=64, n_embd=64, dropout=0.1,
                 data_dir=tmp_path)
    run('whole')
    torch._dynamo.reset()
    interrupted(run, monkeypatch, 'halves', 5)
    torch._dynamo.reset()
    run('halves', init_from='resume')
    assert same(final(tmp_path / 'halves'), final(tmp_path / 'whole'))


# -----------------------------------------------------------------------------
# settings on resume

@pytest.mark.parametrize('settings, words', [
    (dict(softcap=0), r'softcap=0\.0.* 15\.0'), (dict(n_head=3), r'n_head=3.* 2,'),
    (dict(optimizer='adamw'), r"optimizer='adamw'.* 'muon'"),
    (dict(dataset='other'), "dataset='other' is not the data of this run"),
    (dict(time_budget=3), r'time_budget=3\.0, but the checkpoint has None'),
    (dict(), "dataset='tiny' is not the data of this run")])
def test_what_a_run_is_bound_to_cannot_change(train_tiny, tmp_path, stopped, settings, words):
    """The error names both values, and no file changes. The last case is other tokens of the same name."""
    write_bins(tmp_path / 'data' / 'tiny', noise(4001, seed=5), noise(487, seed=1))
    shutil.copytree(tmp_path / 'data' / 'tiny', tmp_path / 'data' / 'other')
    before = contents(stopped)
    assert re.search(words, error_of(train_tiny, init_from='resume', data_dir=tmp_path / 'data', **settings))
    assert contents(stopped) == before


def test_data_of_a_run_may_have_another_name(train_tiny, tmp_path, stopped, data_dir):
    """prepare.py gives a dataset that it replaces the name NAME.1."""
    shutil.copytree(f'{data_dir}/tiny', tmp_path / 'data' / 'tiny.1')
    assert train_tiny(init_from='resume', data_dir=tmp_path / 'data', dataset='tiny.1') == 0
    assert load(stopped / 'ckpt.pt')['config']['dataset'] == 'tiny.1'


def test_a_time_budget_that_has_decided_cannot_change_but_end(stopped, capsys):
    change(stopped, lambda checkpoint: checkpoint['config'].update(time_budget=3.0))
    flags = ['--init_from=resume', f'--out_dir={stopped}', '--time_budget=10']
    assert train.read_settings(flags).train.time_budget == 10
    change(stopped, lambda checkpoint: checkpoint['state'].update(max_iters=900))
    assert 'to continue it: --time_budget=3.0;' in error_of(train.read_settings, flags)
    assert train.read_settings([*flags[:2], '--time_budget=None']).train.time_budget is None
    assert 'time_budget: 3.0 before, None now' in capsys.readouterr().out


def test_what_may_change_is_taken_and_printed(train_tiny, stopped, capsys):
    """With both values: rates, batches, lengths, and the machine."""
    change(stopped, lambda checkpoint: checkpoint['versions'].update(torch='2.11.0'))
    train_tiny(init_from='resume', learning_rate=0.25, batch_size=8, max_iters=7, dropout=0)
    out = capsys.readouterr().out
    for name, before, now in (('learning_rate', 0.005, 0.25), ('batch_size', 4, 8), ('max_iters', 10, 7),
                              ('torch', '2.11.0', str(torch.__version__))):
        assert f'{name}: {before!r} before, {now!r} now' in out
    checkpoint = load(stopped / 'ckpt.pt')
    assert checkpoint['iter_num'] == 7 and checkpoint['config']['dropout'] == 0.0
    assert [line['lr'] > 0.005 for line in log(stopped, 'step', 'lr')][-2:] == [True, True]


def test_with_another_batch_the_epochs_stay(train_tiny, tmp_path, monkeypatch):
    """Of 249 windows, 125 are half an epoch: 8 steps of 8, and 8 of 8 windows more or 4 of 16."""
    interrupted(train_tiny, monkeypatch, 'out', 8, max_epochs=0.5)
    train_tiny(init_from='resume', max_epochs=0.5, batch_size=8)
    checkpoint = load(tmp_path / 'out' / 'ckpt.pt')
    assert (checkpoint['iter_num'], checkpoint['state']['tokens_seen']) == (12, 128 * 16)


def test_config_py_of_a_run_repeats_it(train_tiny, halves, tmp_path):
    """Also where the shape came from the weights that the run started with."""
    train_tiny('a', init_from=halves / 'whole' / 'ckpt.pt', optimizer='muon', max_iters=4)
    train.main([str(tmp_path / 'a' / 'config.py'), f'--out_dir={tmp_path / "b"}'])
    assert_equal_runs(tmp_path / 'a', tmp_path / 'b')
    assert "began from '" in error_of(train_tiny, 'a', init_from='gpt2', resume=True)
    again = f'{halves}/./whole/ckpt.pt'
    assert train_tiny('a', init_from=again, resume=True, optimizer='muon', max_iters=4) == 0
    before = (tmp_path / 'b' / 'config.py').read_text()
    train_tiny('b', init_from='resume', max_iters=2, learning_rate=0.5)  # there is nothing to do
    assert (tmp_path / 'b' / 'config.py').read_text() == before


# -----------------------------------------------------------------------------
# checkpoints of others

def test_a_resume_needs_no_settings_also_of_a_run_of_commit_51291ce(halves, stopped):
    """
    Its settings and counters that are gone are ignored. One setting has another name now. Shape, data, rates
    and recipe come from the checkpoint; five steps and five more leave the weights, optimizers, counters and
    log of ten.
    """
    def as_then(checkpoint):
        checkpoint['config'].update(check=False, keep_last=2, warmup_iters=100, warmup_fraction=0.3)
        checkpoint['state'].update(recent=[5.5, 5.4], spikes_in_a_row=0, eval_fitted=False)
        checkpoint['run_id'] = 'none'
    change(stopped, as_then)
    train.main(['--init_from=resume', f'--out_dir={stopped}'])
    assert_equal_runs(stopped, halves / 'whole')
    assert same(load(stopped / 'best.pt')['model'], load(halves / 'whole' / 'best.pt')['model'])


def test_a_run_of_nanogpt_is_continued(tmp_path, capsys):
    """Its steps 4 and 5 are those of torch's AdamW with its groups, betas and schedule. It was compiled."""
    tokens, chars = noise(2001) - 32, ''.join(chr(32 + i) for i in range(65))
    folder = write_bins(tmp_path / 'data' / 'chars', tokens, tokens[:300], tokenizer=False)
    (tmp_path / 'data' / 'chars' / 'meta.pkl').write_bytes(pickle.dumps(nanogpt_meta(chars)))
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32))
    params = list(gpt.parameters())
    adamw = torch.optim.AdamW([{'params': [p for p in params if p.dim() >= 2], 'weight_decay': 0.1},
                               {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}],
                              lr=1e-3, betas=(0.9, 0.99))
    batches = Batches(Split(folder, 'train', read_meta(folder), 16),
                      train.TrainConfig(batch_size=4, gradient_accumulation_steps=2), Env())

    def step(n):
        for load_batch in batches.step(n)[1]:
            x, y, _ = load_batch()
            (gpt(x, y).sum() / 128).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for group in adamw.param_groups:
            group['lr'] = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (n - 2) / 3))
        adamw.step()
        adamw.zero_grad()
    for n in range(3):
        step(n)
    args = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=False, dropout=0.0)
    config = dict(args, dataset='chars', gradient_accumulation_steps=2, batch_size=4, learning_rate=1e-3,
                  max_iters=5, beta2=0.99, warmup_iters=2, lr_decay_iters=5, min_lr=1e-4, eval_iters=2,
                  init_from='scratch', out_dir='out-chars', backend='nccl', device='cuda', dtype='bfloat16',
                  compile=True)
    (tmp_path / 'out').mkdir()
    weights = {f'_orig_mod.module.{name}': weight for name, weight in gpt.state_dict().items()}
    torch.save({'model': weights, 'optimizer': adamw.state_dict(), 'model_args': {**args, 'vocab_size': 65},
                'iter_num': 3, 'best_val_loss': torch.tensor(4.1), 'config': config},
               tmp_path / 'out' / 'ckpt.pt')
    for n in (3, 4):
        step(n)
    command = ['--init_from=resume', f'--out_dir={tmp_path}/out', f'--data_dir={tmp_path}/data',
               '--device=cpu', '--dtype=float32', '--compile=False']
    error = error_of(train.main, [*command, '--lora_rank=4', '--optimizer=muon', '--depth=2'])
    assert error.count('cannot change') == 3
    train.main(command)
    ours = load(tmp_path / 'out' / 'ckpt.pt')
    assert ours['iter_num'] == 5 and ours['config']['beta2'] == 0.99
    assert ours['state']['tokens_seen'] == 5 * 128
    # its loss, of a few random windows, is measured again
    losses = {row['step']: row['val_loss'] for row in rows(tmp_path / 'out', 'val_loss')}
    best = load(tmp_path / 'out' / 'best.pt')
    assert losses.keys() == {3, 5} and best['best_val_loss'] == min(losses.values())
    assert best['best_val_loss'] == losses[best['iter_num']]
    for name, weight in gpt.state_dict().items():
        assert torch.allclose(ours['model'][name], weight, atol=1e-5), name
    assert 'char tokenizer' in capsys.readouterr().out


@pytest.mark.parametrize('config, kept', [
    ({'compile': False, 'dtype': 'bfloat16', 'device': 'cuda'}, {'compile': False}),
    ({'compile': True}, {}),  # nanoGPT's default, and no wish of its user
    ({'dtype': 'float32'}, {'dtype': 'float32'}),  # which is not
    ({'document_mask': True}, {'pack_rows': True})])  # of ours, before it was one setting
def test_settings_of_a_run_of_nanogpt_or_an_older_one(config, kept):
    settings = checkpoint_settings({'model_args': {}, 'config': {'seed': 1, **config}}, {})
    assert settings == {'seed': 1, 'optimizer': 'adamw', 'depth': None, 'lora_rank': 0, **kept}


def test_weights_that_are_not_finite_are_not_resumed(train_tiny, stopped):
    change(stopped, lambda checkpoint: checkpoint['model']['lm_head.weight'][0, 0].fill_(math.nan))
    assert re.search('weights .*are not finite', error_of(train_tiny, init_from='resume'))
