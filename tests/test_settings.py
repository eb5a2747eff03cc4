"""What holds of settings: each of them does something, --help tells all of them, and every card resolves."""

import ast
import contextlib
import dataclasses
import glob
import hashlib
import importlib.machinery
import io
import os
import re
import runpy
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import TINY, noise, write_bins

import prepare
import sample
import train
from configurator import comments_of, configure
from hotloop.dataloader import share_batch
from hotloop.divergence import collect_steps as settle_
from model import GPTConfig
from train import TrainConfig

ROOT = Path(train.__file__).parent
CARDS = sorted(glob.glob(str(ROOT / 'config' / '*.py')))
FIELDS = {f.name: f for cls in (GPTConfig, TrainConfig) for f in dataclasses.fields(cls)}


# -----------------------------------------------------------------------------
# no setting may do nothing

def two_processes(m):
    """As under torchrun, up to the moment at which the processes would meet."""
    m.setenv('WORLD_SIZE', '2')
    m.setattr(train.dist, 'init_process_group', lambda backend, **_: (_ for _ in ()).throw(ValueError(backend)))


def fake_compile(m):
    """A compiler that says how it was asked."""
    def compile_model(model, dynamic=None, mode=None):
        print(f'compiled, mode {mode}')
        return model
    m.setattr(torch, 'compile', compile_model)
    m.setattr('hotloop.device.try_compile', lambda device: None)


def fake_wandb(m):
    """A wandb that prints what it is told."""
    wandb = types.ModuleType('wandb')
    wandb.__spec__ = importlib.machinery.ModuleSpec('wandb', None)
    wandb.init = lambda project, name, config: print('wandb', project, os.path.basename(name))
    wandb.log = lambda numbers, step: print('wandb', step)
    wandb.finish = lambda: None
    m.setitem(sys.modules, 'wandb', wandb)


def always_bad(m):
    """The second step is always one too many, as if nothing that it computed were finite."""
    collect_steps = settle_

    def settled(run, pending):
        collect_steps(run, pending)
        run.diverged_at = 2 if run.state.iter_num == 2 else None
    m.setattr('hotloop.divergence.collect_steps', settled)


def told_deterministic(m):
    m.setattr(torch, 'use_deterministic_algorithms', lambda on: print('deterministic:', on))


def told_timeout(m):
    """Two processes, which never meet: the error is the timeout that they were to have."""
    m.setenv('WORLD_SIZE', '2')
    m.setattr('hotloop.distributed.end_with_parent', lambda: None)

    def never(backend, device, rank, world, timeout_minutes):
        raise ValueError(f'waits {timeout_minutes} minutes')
    m.setattr('hotloop.distributed.open_process_group', never)


MUON = dict(optimizer='muon')
# name: (what must change, the changed value, settings of both runs, a patch around both)
TABLE = {
    'preset': ('weights', 'modern'),
    'block_size': ('weights', 8),
    'vocab_size': ('weights', 320),
    'n_layer': ('weights', 1),
    'n_head': ('weights', 4),
    'n_kv_head': ('weights', 1),
    'n_embd': ('weights', 16),
    'n_ff': ('weights', 64),
    'dropout': ('weights', 0.2),
    'bias': ('weights', True),
    'position': ('weights', 'rope'),
    'norm': ('weights', 'rmsnorm'),
    'mlp': ('weights', 'relu2'),
    'qk_norm': ('weights', True),
    'tie': ('weights', False),
    'zero_init': ('weights', True),
    'softcap': ('weights', 2),
    'x0_mix': ('weights', True),
    'label_smoothing': ('weights', 0.1),
    'out_dir': ('files', 'elsewhere'),
    'init_from': ('error', 'resume'),
    'eval_only': ('files', True),
    'profile': ('lines', True),
    'seed': ('weights', 1),
    'max_iters': ('weights', 4),
    'max_epochs': ('weights', 0.05),
    'max_minutes': ('weights', 0),
    'dataset': ('weights', 'other'),
    'data_dir': ('error', 'elsewhere'),
    'data_on_device': ('lines', True),
    'batch_size': ('weights', 2),
    'gradient_accumulation_steps': ('weights', 1),
    'optimizer': ('weights', 'muon'),
    'learning_rate': ('weights', 1e-3),
    'muon_lr': ('weights', 0.1, MUON),
    'embed_lr': ('weights', 0.1, MUON),
    'weight_decay': ('weights', 0.0),
    'beta1': ('weights', 0.8),
    'beta2': ('weights', 0.8),
    'muon_momentum': ('weights', 0.5, MUON),
    'grad_clip': ('weights', 0.1),
    'decay_lr': ('weights', False),
    'lr_schedule': ('weights', 'linear'),
    'warmup_iters': ('weights', 0),
    'lr_decay_iters': ('weights', 2),
    'min_lr': ('weights', 4e-3),
    'decay_fraction': ('weights', 1.0, dict(lr_schedule='linear')),
    'eval_interval': ('lines', 1),
    'eval_tokens': ('lines', 64),
    'eval_iters': ('lines', 1),
    'log_interval': ('lines', 3),
    'on_divergence': ('lines', 'rollback', dict(save_interval=1), always_bad),
    'sample_interval': ('lines', 2),
    'sample_prompt': ('lines', 'ab', dict(sample_interval=2)),
    'sample_tokens': ('lines', 5, dict(sample_interval=2)),
    'wandb_log': ('lines', True, {}, fake_wandb),
    'wandb_project': ('lines', 'mine', dict(wandb_log=True), fake_wandb),
    'wandb_run_name': ('lines', 'mine', dict(wandb_log=True), fake_wandb),
    # at a learning rate of 0 no evaluation after the first improves
    'always_save_checkpoint': ('files', False, dict(learning_rate=0, min_lr=0, eval_interval=1, keep_last=3)),
    'save_interval': ('files', 1),
    'save_minutes': ('files', 0),
    'keep_last': ('files', 3, dict(save_interval=1)),
    'mirror_dir': ('error', '/dev/null/mirror'),
    'device': ('error', 'cuda:99'),
    'dtype': ('weights', 'bfloat16'),
    'compile': ('lines', True, {}, fake_compile),
    'compile_mode': ('lines', 'max-autotune-no-cudagraphs', dict(compile=True), fake_compile),
    'loss_chunks': ('lines', 4),
    'threads': ('lines', 2),
    'deterministic': ('lines', False, {}, told_deterministic),
    'backend': ('error', 'nccl', {}, two_processes),
    'timeout_minutes': ('error', 3, {}, told_timeout),
}


def plain(line):
    """A printed line without what differs from run to run."""
    return re.sub(r'[\d.,]+ (ms|tok/s|MB|s\b)|data [\d.]+%|[\dhms]+ left', '', line)


@pytest.fixture(scope='module')
def observe(tmp_path_factory, data_dir):
    """observe(patch, **settings) -> what can be seen of a run of three steps; equal runs are run once."""
    write_bins(Path(data_dir) / 'other', noise(4001, seed=7), noise(487, seed=8))
    seen = {}

    def run(patch=None, **settings):
        key = repr((patch, sorted(settings.items())))
        if key not in seen:
            seen[key] = run_once(patch, settings)
        return seen[key]

    def run_once(patch, settings):
        folder = tmp_path_factory.mktemp('run')
        flags = {**TINY, 'data_dir': data_dir, 'max_iters': 3, 'warmup_iters': 1, 'eval_interval': 100, **settings}
        flags['out_dir'] = folder / flags.get('out_dir', 'out')
        printed, error, weights = io.StringIO(), None, None
        with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(printed):
            if patch:
                patch(m)
            try:
                train.main([f'--{k}={v}' for k, v in flags.items()])
            except ValueError as e:
                error = str(e)
        if (flags['out_dir'] / 'ckpt.pt').exists():
            model = torch.load(flags['out_dir'] / 'ckpt.pt', weights_only=True)['model']
            weights = hashlib.sha256(b''.join(name.encode() + w.numpy().tobytes() for name, w in model.items()))
        # the list of the settings themselves is no evidence that one of them acts
        lines = [plain(line.replace(str(folder), '')) for line in printed.getvalue().splitlines()
                 if not re.match(r'  \w+ = ', line)]
        return {'weights': weights and weights.hexdigest(), 'error': error, 'lines': lines,
                'files': sorted(str(p.relative_to(folder)) for p in folder.rglob('*'))}
    return run


def test_the_table_has_a_row_for_every_setting():
    """A new field needs one: the change that shows that it acts."""
    assert list(TABLE) == list(FIELDS)


@pytest.mark.parametrize('name', TABLE)
def test_every_setting_acts(observe, name):
    """Changed alone, it changes a weight, a file, a line or an error."""
    where, value, both, patch = (*TABLE[name], *({}, None)[len(TABLE[name]) - 2:])
    base, changed = observe(patch, **both), observe(patch, **{**both, name: value})
    assert base[where] != changed[where], f'{name}={value} changes nothing'
    if where != 'error' and patch is not always_bad:
        assert base['error'] is None and changed['error'] is None


def test_the_table_can_fail(observe):
    """Equal runs look equal, and so does one with a setting that has nothing to act on."""
    base = observe()
    for twin in (dict(wandb_project='hotloop'), dict(wandb_run_name='mine')):
        assert observe(**twin) == base, twin


# -----------------------------------------------------------------------------
# --help

@pytest.mark.parametrize('program, classes', [(train, (GPTConfig, TrainConfig)), (sample, (sample.SampleConfig,)),
                                              (prepare, (prepare.PrepareConfig, prepare.ReadConfig))])
def test_help_tells_every_setting(program, classes, capsys):
    """With its default and a comment, under the sections of the source and in their order."""
    with pytest.raises(SystemExit) as end:
        program.main(['--help'])
    assert not end.value.code
    text = capsys.readouterr().out
    lines = text.splitlines()
    told = [line for line in lines if line.startswith('  --')]
    fields = [f for cls in classes for f in dataclasses.fields(cls)]
    for line, f in zip(told, fields, strict=True):
        assert line.startswith((f'  --{f.name}={f.default}  ', f'  --{f.name}={f.default!r}  ')), line
        assert re.fullmatch(r'  --\w+=.*?\s{2,}\S.*', line), f'no comment: {line}'
    source = Path(program.__file__).read_text()
    if program is train:
        source = (ROOT / 'model.py').read_text() + source
    sections = re.findall(r'^    # --- (.*)$', source, re.M)
    places = [lines.index(section) for section in sections]
    assert sections and places == sorted(places)
    assert lines[0] == program.__doc__.strip().splitlines()[0]


def test_every_comment_says_something():
    """A field without a trailing comment would have no help."""
    for cls in (GPTConfig, TrainConfig, sample.SampleConfig, prepare.PrepareConfig, prepare.ReadConfig):
        comments = {name: comment for _, name, comment in comments_of(cls)}
        assert list(comments) == [f.name for f in dataclasses.fields(cls)]
        assert all(len(comment) > 5 for comment in comments.values()), comments


# -----------------------------------------------------------------------------
# recipe cards

@pytest.mark.parametrize('card', CARDS, ids=os.path.basename)
def test_every_card_resolves(card):
    """Without an unknown name, a wrong type or a combination that cannot work."""
    model_cfg, cfg, given, _ = configure(GPTConfig, TrainConfig, argv=[card])
    assert given and not model_cfg.problems() + cfg.problems()


@pytest.mark.parametrize('name', ['a100_fast', 'a100_production', 'a100_max', 'a100_mega'])
def test_a100_cards_run_on_any_number_of_gpus(name):
    """The global batch is the same on 1, 2, 4 and 8, and no micro-batch is larger than the card's."""
    _, cfg, _, _ = configure(GPTConfig, TrainConfig, argv=[str(ROOT / 'config' / f'{name}.py')])
    for world in (1, 2, 4, 8):
        micro, accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, world)
        assert micro * accumulation * world == cfg.batch_size * cfg.gradient_accumulation_steps
        assert micro <= cfg.batch_size


def test_the_card_of_a_machine(monkeypatch):
    """Largest need first, one for every machine, and each of them is there."""
    needs = [need for need, _ in train.MACHINE_CARDS]
    assert needs == sorted(needs, reverse=True) and needs[-1] == 0
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    for need, card in train.MACHINE_CARDS:
        monkeypatch.setattr(torch.cuda, 'get_device_properties',
                            lambda device, need=need: types.SimpleNamespace(total_memory=need * 1e9))
        monkeypatch.setattr('hotloop.device.choose_device', lambda name: (torch.device('cuda', 0), 'there is one'))
        assert train.card_for_machine('auto')[0] == card and (ROOT / card).exists()
        assert train.card_for_machine('cpu')[0] == train.MACHINE_CARDS[-1][1]


def test_no_card_and_no_dataset_takes_the_card_of_the_machine(monkeypatch):
    """And says which and why; a dataset or a card of one's own is left alone."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    _, cfg, _, _, said, _ = train.read_settings(['--max_iters=7'])
    assert cfg.max_iters == 7 and cfg.dataset == 'stdlib' and re.search(r'card: .*quickstart\.py \(no GPU', said[0])
    for argv in (['--dataset=mine'], [str(ROOT / 'config' / 'gpt2_124m.py')]):
        _, cfg, _, _, said, _ = train.read_settings(argv)
        assert cfg.dataset in ('mine', 'openwebtext') and cfg.max_iters == 600_000 and '(no GPU' not in ''.join(said)
    assert 'for this machine there is config/quickstart.py' in train.read_settings(['--dataset=mine'])[4][0]


# -----------------------------------------------------------------------------
# nanoGPT's own configs

NANOGPT = os.environ.get('NANOGPT')
nanogpt = pytest.mark.skipif(not NANOGPT, reason='NANOGPT is not set to a clone of nanoGPT')


def nanogpt_defaults():
    """{name: value} of the plain assignments at the top of nanoGPT's train.py."""
    found = {}
    for node in ast.parse(Path(NANOGPT, 'train.py').read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == 'config_keys':  # here the settings end
                break
            with contextlib.suppress(NameError):  # dtype asks torch
                found[node.targets[0].id] = eval(ast.unparse(node.value), {})
    return found


@nanogpt
@pytest.mark.parametrize('name', ['train_gpt2', 'finetune_shakespeare', 'eval_gpt2', 'eval_gpt2_medium',
                                  'eval_gpt2_large', 'eval_gpt2_xl', 'train_shakespeare_char'])
def test_configs_of_nanogpt_mean_what_they_meant(monkeypatch, name):
    """Every value the file sets, and every default that training depends on, is nanoGPT's."""
    fake_wandb(monkeypatch)  # train_gpt2.py asks for it
    monkeypatch.setattr(time, 'time', lambda: 1700000000.0)
    path = str(Path(NANOGPT, 'config', f'{name}.py'))
    model_cfg, cfg, given, _ = configure(GPTConfig, TrainConfig, argv=[path])
    ours = {**dataclasses.asdict(model_cfg), **dataclasses.asdict(cfg)}
    theirs = {k: v for k, v in runpy.run_path(path).items() if not k.startswith('__') and k != 'time'}
    assert set(theirs) == set(given)
    assert {k: ours[k] for k in theirs} == theirs
    # ours choose device, dtype and compile themselves, and None stands for max_iters and for the whole split
    free = ('device', 'dtype', 'compile', 'backend', 'eval_iters', 'lr_decay_iters', 'wandb_project', 'wandb_run_name')
    defaults = {k: v for k, v in nanogpt_defaults().items() if k not in given and k not in free}
    assert {k: ours[k] for k in defaults} == defaults and 'learning_rate' in {**defaults, **theirs}


def test_the_command_line_is_read_without_a_card_too(monkeypatch, tmp_path):
    """As python train.py runs it: nothing is handed to main, and the machine's card comes first."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr('sys.argv', ['train.py', f'--data_dir={tmp_path}', '--max_iters=3'])
    with pytest.raises(ValueError, match=r'stdlib does not exist; make it with: python prepare.py stdlib'):
        train.main()
