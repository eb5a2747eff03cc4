"""Every setting of train.py acts, --help lists every setting, every machine gets a recipe card."""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, load, noise, write_bins

import prepare
import sample
import train
from configurator import configure
from hotloop.data.sources import CORPORA
from hotloop.weights.load import Weights
from hotloop.weights.lora import LoRAConfig
from model import GPT, GPTConfig
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

SETTINGS = (GPTConfig, LoRAConfig, TrainConfig)


# -----------------------------------------------------------------------------
# every setting acts; what it would need is replaced by something that prints

def two_processes(m):
    """Make this one of two processes, up to the moment when they would meet."""
    def open_process_group(backend, device):
        raise ValueError(f'backend {backend}')
    m.setenv('WORLD_SIZE', '2')
    m.setattr(train.distributed, 'open_process_group', open_process_group)


def fake_compile(m):
    def compile_model(model, **options):
        print('compiled')
        return model
    m.setattr(torch, 'compile', compile_model)


def fake_checkpoint(m):
    def checkpoint(run, *args, **options):
        print('recomputed')
        return run(*args)
    m.setattr('hotloop.training.parallel.checkpoint', checkpoint)


def fake_wandb(m):
    wandb = types.ModuleType('wandb')
    wandb.__spec__ = ModuleSpec('wandb', None)  # as of an installed package
    wandb.init = lambda project, name, config, dir: print('wandb', project, os.path.basename(name))
    wandb.log = lambda numbers, step: print('wandb', step)
    m.setitem(sys.modules, 'wandb', wandb)


def fake_determinism(m):
    m.setattr(torch, 'set_deterministic_debug_mode', lambda mode: print('deterministic:', mode))


def fake_base(m):
    """Let adapters find weights with the shape of run_once()."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=257))
    found = Weights('base', model.config.model_args(), model.state_dict(), {'kind': 'byte'}, {})
    m.setattr('hotloop.weights.load.load_weights', lambda name: found)


# {what changes: {setting: a value that changes it}}
CHANGES = {
    'weights': dict(
        preset='modern', block_size=8, vocab_size=320, n_layer=2, n_head=4, n_kv_head=1, n_embd=24, n_ff=40,
        dropout=0.2, bias=True, position='rope', norm='rmsnorm', mlp='relu2', qk_norm=True, tie=False,
        zero_init=True, softcap=2, head_dim=4, qkv_bias=True, norm_eps=0.1, post_norm=True, embed_scale=2.0,
        query_scale=0.1, attn_softcap=0.5, x0_mix=True, key_shift=True, label_smoothing=0.1, seed=1,
        max_iters=4, max_epochs=0.05, dataset='other', batch_size=3, gradient_accumulation_steps=3,
        optimizer='muon', learning_rate=1e-3, weight_decay=0.0, beta1=0.8, beta2=0.8, grad_clip=0.1,
        decay_lr=False, lr_schedule='linear', warmup_iters=0, lr_decay_iters=2, min_lr=4e-3,
        dtype='bfloat16', rope_base=500, rope_factor=2.0, rope_context=8, rope_local_base=50.0,
        embed_norm=False, window=3, window_pattern='LS', muon_lr=0.1, embed_lr=0.1, muon_momentum=0.5,
        decay_fraction=1.0, depth=3, lora_rank=4, lora_alpha=4, lora_rs=True, lora_dropout=0.5,
        lora_targets='mlp', lora_embeddings=True, quantize='nf4', mixer='conv', num_taps=2, eigen='paper',
        num_eigenstates=8, num_features=4, feedback='dfa', ortho_penalty=0.1, bigram_rows=1000,
        value_embed=True, head_gate=True, multi_token=0.5),
    'files': dict(out_dir='elsewhere', eval_only=True, dry_run=True, always_save_checkpoint=False,
                  save_minutes=0, tensorboard=True),
    'lines': dict(
        time_budget=1e-4, eval_interval=1, eval_tokens=32, eval_iters=1, patience=1,
        log_interval=3, wandb_log=True, wandb_project='mine', wandb_run_name='mine', compile=True,
        loss_chunks=4, recompute='full', shard='full', deterministic=False),
    'error': dict(
        pack_rows=True, resume=True, init_from='resume', data_dir='elsewhere',
        mirror_dir='/dev/null/mirror', device='cuda:99', backend='gloo', auto_batch=True)}
ROPE = dict(position='rope')
LORA = dict(init_from='hub/base', lora_rank=2)
NO_PROGRESS = dict(learning_rate=1e-30, min_lr=0, eval_interval=1)  # no evaluation improves after the first
# settings of both runs, without which a setting has nothing to act on
BOTH = dict(
    num_taps=dict(mixer='conv'), eigen=dict(mixer='eigen'), num_eigenstates=dict(mixer='eigen'),
    num_features=dict(mixer='kernel'), ortho_penalty=dict(mixer='kernel'),
    rope_base=ROPE, rope_factor=ROPE,
    rope_context=dict(rope_factor=2.0, **ROPE), embed_norm=ROPE,
    rope_local_base=dict(window=8, **ROPE), window_pattern=dict(window=3), muon_lr=dict(optimizer='muon'),
    embed_lr=dict(optimizer='muon', preset='modern'),
    muon_momentum=dict(optimizer='muon'), decay_fraction=dict(lr_schedule='linear'),
    time_budget=dict(max_iters=5), resume=dict(init_from='resume'), lora_rank=LORA, lora_alpha=LORA,
    lora_rs=LORA, lora_dropout=LORA, lora_targets=LORA, lora_embeddings=LORA, quantize=LORA,
    always_save_checkpoint=NO_PROGRESS, patience=NO_PROGRESS, wandb_project=dict(wandb_log=True),
    wandb_run_name=dict(wandb_log=True))
PATCHES = dict(wandb_log=fake_wandb, wandb_project=fake_wandb,
               wandb_run_name=fake_wandb, compile=fake_compile, recompute=fake_checkpoint,
               deterministic=fake_determinism, backend=two_processes)


def without_clock(line):
    """Remove the numbers of a printed line that differ from run to run."""
    return re.sub(r'[\d.,]+[kM]? (tok/s|[MG]B|s\b)|[\ddhms ]+ left', '', line)


def run_once(folder, patch, settings):
    """Return what can be seen of a run of three steps: the weights, the error, the lines, the files."""
    flags = {**TINY, 'n_layer': 1, 'n_embd': 16, 'batch_size': 2, 'gradient_accumulation_steps': 1,
             'max_iters': 3, 'warmup_iters': 1, 'eval_interval': 100, 'eval_tokens': 128, **settings}
    flags['out_dir'] = folder / flags.get('out_dir', 'out')
    printed, error, weights = io.StringIO(), None, None
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(printed):
        m.setattr('hotloop.training.logger.write_report', lambda folders: None)
        if patch:
            patch(m)
        try:
            train.main([f'--{name}={value}' for name, value in flags.items()])
        except ValueError as e:
            error = str(e)
    if (flags['out_dir'] / 'ckpt.pt').exists():
        model = load(flags['out_dir'] / 'ckpt.pt')['model']
        weights = b''.join(w.numpy().tobytes() for w in model.values())
    lines = printed.getvalue().replace(str(folder), '').splitlines()
    # that a setting is listed does not show that it acts
    lines = [without_clock(line) for line in lines if not re.match(r'  \w+ = ', line)]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob('*'))
    return {'weights': weights, 'error': error, 'lines': lines, 'files': files}


@pytest.fixture(scope='module')
def observe(tmp_path_factory, data_dir):
    """observe(patch, **settings) returns what run_once sees; equal runs run once."""
    write_bins(Path(data_dir) / 'other', noise(4001, seed=7), noise(487, seed=8))
    seen = {}

    def run(patch=None, **settings):
        key = repr((patch, sorted(settings.items())))
        if key not in seen:
            seen[key] = run_once(tmp_path_factory.mktemp('run'), patch, {'data_dir': data_dir, **settings})
        return seen[key]
    return run


@pytest.mark.parametrize('name', [f.name for cls in SETTINGS for f in dataclasses.fields(cls)])
def test_every_setting_acts(observe, name):
    """Changed alone, it changes a weight, a file, a line or an error. A new setting needs an entry."""
    what = next(what for what, values in CHANGES.items() if name in values)
    both = BOTH.get(name, {})
    patch = fake_base if both is LORA else PATCHES.get(name)
    before = observe(patch, **both)
    after = observe(patch, **{**both, name: CHANGES[what][name]})
    assert before[what] != after[what], 'the setting changes nothing'
    if what != 'error':
        assert before['error'] is None and after['error'] is None


def test_no_setting_can_be_assigned_after_the_settings_are_resolved():
    for cls in (*SETTINGS, SampleConfig, PrepareConfig):
        assert cls.__dataclass_params__.frozen


# -----------------------------------------------------------------------------
# --help

@pytest.mark.parametrize('program, classes, choices', [
    (train, SETTINGS, 'layernorm, rmsnorm, rmsnorm_weight, rmsnorm_offset'),
    (sample, (SampleConfig,), 'none, int8'),
    (prepare, (PrepareConfig,), 'auto, text, jsonl, json, csv, parquet, functions')])
def test_help_lists_every_setting(program, classes, choices, capsys):
    """With its default, its own comment and its choices, in the order of the source, before any complaint."""
    with pytest.raises(SystemExit):
        program.main(['--seed=x', '--help'])
    flags = [line for line in capsys.readouterr().out.splitlines() if line.startswith('  --')]
    fields = [f for cls in classes for f in dataclasses.fields(cls)]
    source = ''.join(inspect.getsource(cls) for cls in classes)
    for line, field in zip(flags, fields, strict=True):
        default = str(field.default).replace('\n', r'\n')
        comment = re.search(rf'^    {field.name}: .*  # (.*)', source, re.M)[1]
        assert line.startswith(f'  --{field.name}={default}  ') and comment in line and len(comment) > 5
    assert any(line.endswith(f' [{choices}]') for line in flags)


# -----------------------------------------------------------------------------
# recipe cards


@pytest.mark.parametrize('memory, apple, device, card', [
    (80, False, 'auto', 'a100_fast'), (24, False, 'cuda:0', 'vram_24gb'), (6, False, 'auto', 'quickstart'),
    (80, False, 'cpu', 'quickstart'), (None, True, 'mps', 'shakespeare_char')])
def test_the_card_of_a_machine(monkeypatch, memory, apple, device, card):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: memory is not None)
    monkeypatch.setattr(torch.cuda, 'get_device_properties',
                        lambda device: types.SimpleNamespace(total_memory=memory * 1e9))
    monkeypatch.setattr('hotloop.training.recipes.choose_device',
                        lambda name: (torch.device('cuda', 0), 'it is there'))
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: apple)
    found, dataset, why = train.card_for_machine(device)
    assert found == f'config/{card}.py' and ('GPU memory' in why) == (memory is not None and device != 'cpu')
    assert configure(*SETTINGS, argv=[str(ROOT / found)]).objects[2].dataset == dataset
    # no machine is sent to a large download
    assert CORPORA[dataset].download < 0.5e9


def test_a_command_without_card_and_dataset_takes_the_card_of_the_machine(monkeypatch, tmp_path, capsys):
    """It prints which and why. A dataset or a card of the user's own is left alone."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    for argv, dataset in (([], 'stdlib'), (['--dataset=mine'], 'mine'),
                          ([str(ROOT / 'config' / 'gpt2_124m.py')], 'openwebtext')):
        with pytest.raises(ValueError, match=f'{dataset} does not exist'):
            train.main([f'--data_dir={tmp_path}', *argv])
        has_card = 'card: config/quickstart.py (no GPU' in capsys.readouterr().out
        assert has_card == (dataset != 'openwebtext')
