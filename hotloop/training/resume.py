"""Resuming: the checkpoint to continue from, what may differ from it, the state that it restores."""

import contextlib
import dataclasses
import glob
import math
import os

import torch

from hotloop.data.dataset import dataset_folder, name_of_path, read_meta
from hotloop.system.text import shell
from hotloop.training.checkpoint import OPTIMIZERS, RunState, launch_id
from hotloop.training.dataloader import Split
from hotloop.training.run_dir import RunDir, find_latest
from hotloop.training.shard import shard_state

# these depend on the command and its machine, and do not come from a checkpoint
OWN = {'out_dir', 'init_from', 'eval_only', 'check', 'dry_run', 'report', 'max_minutes', 'device', 'backend'}
# nor do these from nanoGPT's, which has none of them: in a fork they may mean something else
FORKS = {'optimizer', 'depth', 'time_budget', 'lora_rank', 'quantize'}


def resolve_auto(cfg, in_files, notes):
    """
    The flags that init_from=auto stands for: resume if out_dir, or only the mirror, holds a checkpoint, even
    a damaged one; otherwise the start that the config files name. in_files: their init_from. Adds to the
    notes.
    """
    if RunDir(cfg.out_dir).checkpoints():
        return ['--init_from=resume']
    if cfg.mirror_dir and RunDir(cfg.mirror_dir).checkpoints():
        notes.append(f'init_from=auto: {cfg.out_dir} holds no checkpoint, but its mirror does: the run '
                     f'continues in {cfg.mirror_dir}')
        return ['--init_from=resume', f'--out_dir={cfg.mirror_dir}', '--mirror_dir=None']
    start = 'scratch' if in_files in ('auto', 'resume') else in_files
    notes.append(f'init_from=auto: {cfg.out_dir} holds no checkpoint; starting from {start}')
    return [f'--init_from={start}']


def find_resumed(cfg, notes):
    """
    The Resumed to continue from: with init_from=resume, or if torchrun restarted the process; otherwise None.
    Adds to the notes. ValueError if all checkpoints are missing or damaged.
    """
    out, resumed = RunDir(cfg.out_dir), None
    restarted = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') != '0'
    if restarted and out.checkpoints():
        latest, launch = find_latest(out), launch_id()
        if launch == 'none' and cfg.init_from != 'resume':
            raise ValueError('torchrun restarted a run on several nodes that has no --rdzv_id, so '
                             f'{cfg.out_dir} may hold another run; if it is this one, continue it with '
                             '--init_from=resume')
        # else it is the checkpoint of another run in this folder
        if launch != 'none' and latest.checkpoint.get('run_id') == launch:
            resumed = latest
            notes.append('torchrun restarted this run: resuming')
    if resumed is None and cfg.init_from == 'resume':
        if cfg.mirror_dir and RunDir(cfg.mirror_dir).checkpoints():
            resumed = find_latest(out, f'its mirror does: resume there with --out_dir={cfg.mirror_dir}')
        else:
            resumed = find_latest(out)
    if resumed:
        notes += [f'{why}; falling back to {resumed.path}' for why in resumed.damaged.values()]
    return resumed


def settings_of(checkpoint, shape):
    """{name: value} that a checkpoint gives the run that resumes it; shape: resolved, of its model."""
    saved = {**checkpoint['model_args'], **checkpoint.get('config', {}), **shape}
    own = OWN
    if 'state' not in checkpoint:  # nanoGPT's: its dtype and compile were chosen for another machine
        own = OWN | {'dtype'}
        if 'versions' not in checkpoint:  # our best.pt has them
            own |= FORKS
        if isinstance(saved.get('dataset'), str):
            saved['dataset'] = name_of_path(saved['dataset'])
        if saved.get('compile') is not False:  # its default, so no wish
            own |= {'compile'}
    return {name: value for name, value in saved.items() if name not in own}


def keep_batch(cfg, given, base):
    """
    With batch_size=auto a resumed run keeps its global batch, and what an evaluation reads. Returns a list
    with a note if a flag asks for another one.
    """
    field, asked = 'gradient_accumulation_steps', cfg.gradient_accumulation_steps
    is_other = given.get(field) == f'--{field}' and asked != base.get(field, asked)
    by_flag = {name for name in ('eval_iters', 'eval_tokens') if given.get(name) == f'--{name}'}
    kept = {'batch_size', 'gradient_accumulation_steps', 'eval_iters', 'eval_tokens'} - by_flag
    for name in kept:
        given.pop(name, None)  # a config file does not count, also not for give_way()
    for name in kept & base.keys():  # nanoGPT has no eval_tokens
        setattr(cfg, name, base[name])
    note = f'{field}={asked}: no effect, because batch_size=auto keeps the batch of a step'
    return [note] if is_other else []


def is_renamed(checkpoint, dataset):
    """Whether `dataset` may name the data of a checkpoint: they have fingerprints and equal weights."""
    settings = [checkpoint.get('config', {}).get('dataset', ''), dataset]
    before, now = ([word.partition(':')[2] for word in setting.split(',')] for setting in settings)
    return 'data' in checkpoint and before == now


def compare_settings(objects, given, base, bound):
    """
    A note for each setting given with another value than `base`, the checkpoint's. ValueError for those in
    `bound`, where None stands for the checkpoint's value.
    """
    notes, wrong, right = [], [], []
    for o in objects:
        for name, now in dataclasses.asdict(o).items():
            before = base.get(name, now)
            if name not in given or now == before or (name in bound and now is None):
                continue
            if name in bound:
                wrong.append(f'{given[name]}: {name}={now!r}, but the checkpoint has {before!r}, which '
                             'cannot change on resume')
                right.append(f'--{name}={before}')
            else:
                notes.append(f'{name}: {before!r} before, {now!r} now')
    if wrong:
        remedy = f'to continue it: {shell(*right)}; for a new run from its weights: --init_from=PATH'
        raise ValueError('\n'.join([*wrong, remedy]))
    return notes


def compare_context(checkpoint, context, cfg):
    """A list with a note if versions or the machine differ. ValueError if the data differ."""
    if 'data' in checkpoint and checkpoint['data'] != context['data']:
        name = checkpoint.get('config', {}).get('dataset', '')
        found = name and find_data(checkpoint['data'], name, cfg.data_dir)
        remedy = 'restore it, or start a new run with --init_from=PATH'
        if found:
            remedy = f'the one it was trained on is now in {cfg.data_dir}: resume with --dataset={found}'
        raise ValueError(f'the dataset is not the one this run was trained on: dataset={cfg.dataset!r} now, '
                         f'{name!r} before, with fingerprints {checkpoint["data"]} before, {context["data"]} '
                         f'now; {remedy}')
    before = {**checkpoint.get('versions', {}), **checkpoint.get('machine', {})}
    changed = []
    for name, now in {**context['versions'], **context['machine']}.items():
        if before.get(name, now) != now:
            changed.append(f'{name} {before[name]} before, {now} now')
    return [f'{"; ".join(changed)}; results may differ from an uninterrupted run'] if changed else []


def find_data(fingerprints, dataset, data_dir):
    """
    The setting `dataset` with the names that its data have now, such as NAME.1, by their fingerprints,
    {split: one for each dataset}; None if they are not in data_dir.
    """
    found = []
    for i, word in enumerate(dataset.split(',')):
        name, colon, weight = word.partition(':')
        folder = dataset_folder(data_dir, name)
        for path in [folder, *sorted(glob.glob(f'{glob.escape(folder)}.*'))]:
            with contextlib.suppress(ValueError):  # a damaged one
                splits = {split: Split(path, split, read_meta(path), 1) for split in fingerprints}
                if all(splits[split].fingerprint() == fingerprints[split].split()[i] for split in splits):
                    found.append(name + path.removeprefix(folder) + colon + weight)
                    break
    return ','.join(found) if len(found) == i + 1 else None


def restore(checkpoint, optimizers, scaler):
    """Restores optimizers and scaler. ValueError if one does not fit."""
    saved = [checkpoint[name] for name in OPTIMIZERS if name in checkpoint]
    remedy = 'start a new run from its weights with --init_from=PATH'
    if len(saved) != len(optimizers):
        raise ValueError(f'the checkpoint has the state of {len(saved)} optimizers, not of {len(optimizers)} '
                         f'(best.pt has none); {remedy}')
    misfit = 'the optimizer state of the checkpoint does not fit: {}; ' + remedy
    for optimizer, old in zip(optimizers, saved, strict=True):
        before, now = ([len(group['params']) for group in groups]
                       for groups in (old['param_groups'], optimizer.param_groups))
        if before != now:  # of an early nanoGPT, whose embeddings did not decay, or of a fork
            raise ValueError(misfit.format(f'its groups have {before} parameters, not {now}'))
        groups = []
        for now, before in zip(optimizer.param_groups, old['param_groups'], strict=True):
            groups.append({**now, 'params': before['params']})  # rates and kernels are those of the settings
        optimizer.load_state_dict({'state': shard_state(old['state'], optimizer), 'param_groups': groups})
        for p, values in optimizer.state.items():
            if isinstance(optimizer, torch.optim.AdamW) and 'exp_avg_sq' not in values:  # a fork's Sophia
                raise ValueError(misfit.format(f'it has {", ".join(values)} and no exp_avg_sq'))
            for name, value in values.items():
                found, shape = torch.as_tensor(value).shape, state_shape(name, p)
                if found != shape:  # AdamW's fused kernel would write beyond a shorter tensor
                    raise ValueError(misfit.format(f'{name} has shape {tuple(found)}, not {tuple(shape)}'))
    if scaler.is_enabled() and checkpoint.get('scaler'):
        scaler.load_state_dict(checkpoint['scaler'])


def state_shape(name, p):
    """The shape of a parameter's optimizer state by its name; the last four are those of adamw8bit."""
    scales = (-(-p.numel() // 256),)
    special = {'step': (), 'absmax1': scales, 'absmax2': scales, 'qmap1': (256,), 'qmap2': (256,)}
    return torch.Size(special.get(name, p.shape))


def state_from(checkpoint):
    """The RunState of a checkpoint of ours or of nanoGPT. Fields of other versions are dropped."""
    saved = checkpoint.get('state', checkpoint)  # nanoGPT has iter_num and best_val_loss beside the weights
    names = [f.name for f in dataclasses.fields(RunState)]
    state = RunState(**{name: saved[name] for name in names if name in saved})
    state.best_val_loss = float(state.best_val_loss)  # nanoGPT saves a tensor
    if 'tokens_seen' not in saved:  # nor does it count them
        values = {**checkpoint.get('config', {}), **checkpoint.get('model_args', {})}
        sizes = 'batch_size', 'gradient_accumulation_steps', 'block_size'
        state.tokens_seen = state.iter_num * math.prod(values.get(name, 0) for name in sizes)
    return state
