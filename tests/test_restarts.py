"""Several processes and broken surroundings: who may resume what, and what must not be taken for good."""

import json

import numpy as np
import pytest
import torch
from conftest import write_bins

import train
from hotloop.checkpoint import RunState, save_checkpoint
from hotloop.dataloader import Split
from hotloop.device import choose_device, peak_flops
from hotloop.distributed import Env, check_agreement
from model import GPT, GPTConfig


def tiny_model(seed=0):
    torch.manual_seed(seed)
    return GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=8))


class Together(Env):
    """This process among others, whose numbers are given."""

    def sum(self, values):
        return np.asarray(values) + sum(np.array(other) for other in self.others)


@pytest.mark.parametrize('step, weights, good', [(5, 0.0, True), (4, 0.0, False), (5, 1e-3, False)])
def test_processes_that_start_from_different_places_are_stopped(step, weights, good):
    model, state = tiny_model(), RunState(iter_num=5)
    env = Together(world=2)
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    env.others = [(step, total + weights)]
    if good:
        check_agreement(model, state, env)
    else:
        with pytest.raises(ValueError, match='do not start from the same weights'):
            check_agreement(model, state, env)


@pytest.mark.parametrize('theirs, resumes', [('run7', True), ('run6', False), ('none', False)])
def test_a_restart_resumes_its_own_run_only(train_tiny, tmp_path, monkeypatch, theirs, resumes):
    """torchrun --max-restarts, after a start that died before it had moved an older run aside."""
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', theirs)
    train_tiny(max_iters=4)
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'run7' if theirs != 'none' else 'none')
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    train_tiny(max_iters=6)
    assert (tmp_path / 'out.1').exists() != resumes
    steps = [json.loads(line)['step'] for line in (tmp_path / 'out' / 'log.jsonl').read_text().splitlines()]
    assert steps[0] == 1 and steps[-1] == 6


def test_a_torn_log_is_no_reason_not_to_resume(train_tiny, tmp_path):
    train_tiny(max_iters=4)
    log = tmp_path / 'out' / 'log.jsonl'
    log.write_bytes(log.read_bytes() + b'\0\0\0\0\n[1]\n{"step": 9}\n{"step": 3, "lo')
    train_tiny(init_from='resume', max_iters=6)
    steps = [json.loads(line)['step'] for line in log.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 4, 5, 6, 6]


def test_any_mask_but_0_counts_once(tmp_path):
    mask = np.zeros(40)
    mask[10:20] = 255
    meta = {'dtype': 'uint16', 'vocab_size': 257, 'splits': {}, 'foreign': False}
    write_bins(tmp_path, range(40), range(40), masks={'train': mask, 'val': mask})
    split = Split(str(tmp_path), 'train', meta, 8)
    starts = [0, 8, 16, 24]
    assert split.num_targets(starts) == (split.gather(starts)[1] >= 0).sum() == 10
    before = split.fingerprint()
    mask[0] = 1
    write_bins(tmp_path, range(40), range(40), masks={'train': mask, 'val': mask})
    assert Split(str(tmp_path), 'train', meta, 8).fingerprint() != before


def test_a_stop_that_could_not_save_does_not_say_it_did(train_tiny, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise ValueError('ckpt.pt could not be written: 0 MB are free')
    monkeypatch.setattr('hotloop.checkpoint.save_checkpoint', full)
    with pytest.raises(ValueError, match='0 MB are free'):
        train_tiny(max_minutes=0)
    assert 'and saved' not in capsys.readouterr().out


def test_a_best_that_could_not_be_written_is_written_at_the_next_evaluation(train_tiny, tmp_path, monkeypatch):
    original, calls = save_checkpoint, []

    def once(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 1:
            raise ValueError('full for a moment')
        original(path, *args, **kwargs)
    monkeypatch.setattr('hotloop.checkpoint.save_checkpoint', once)
    found = iter([3.0, 4.0, 5.0])
    monkeypatch.setattr(train, 'evaluate_both',
                        lambda run, stop: ('', {'step': run.state.iter_num, 'val_loss': next(found)}))
    train_tiny(max_iters=6, eval_interval=2)
    assert torch.load(tmp_path / 'out' / 'best.pt')['iter_num'] == 4


@pytest.mark.parametrize('name', ['cuda:x', 'cuda:-1', 'cpu:7', 'mps:3', 'CPU', 'cuda:'])
def test_devices_that_no_machine_has(name):
    with pytest.raises(ValueError, match='is not one of auto, cuda'):
        choose_device(name)


def test_processes_cannot_share_one_device(train_tiny, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setattr('hotloop.device.choose_device', lambda name, rank: (torch.device('cpu'), ''))
    with pytest.raises(ValueError, match=r'2 processes cannot share .*leave out the number'):
        train_tiny(device='cuda:0')


def test_settings_that_do_nothing_and_rates_that_rise_are_said(train_tiny, capsys):
    train_tiny(max_iters=1, muon_lr=0.1, eval_iters=1, eval_tokens=64, learning_rate=1e-4, min_lr=1e-3)
    out = capsys.readouterr().out
    assert 'note: muon_lr does nothing' in out and 'note: eval_tokens does nothing' in out
    assert 'min_lr=0.001 is above learning_rate=0.0001' in out and 'note: min_lr' in out
    train_tiny(max_iters=1, optimizer='muon', muon_lr=0.1, lr_schedule='linear', decay_fraction=0.1)
    assert 'does nothing' not in capsys.readouterr().out


@pytest.mark.parametrize('name, peak', [('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA H100 PCIe', 756e12),
                                        ('NVIDIA H200', 989e12), ('NVIDIA H100 80GB HBM3', 989e12),
                                        ('NVIDIA RTX A1000', None), ('NVIDIA RTX A4000', None), ('NVIDIA L40', None),
                                        ('Tesla T4', 65e12), ('NVIDIA T400', None), ('NVIDIA A10G', 70e12),
                                        ('NVIDIA GeForce RTX 4090 Laptop GPU', None)])
def test_no_figure_is_better_than_a_wrong_one(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: name)
    assert peak_flops(torch.device('cuda', 0), torch.bfloat16) == peak
    assert peak_flops(torch.device('cpu'), torch.bfloat16) is None
