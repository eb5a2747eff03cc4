"""Checkpoints: written so that a kill cannot destroy one, loaded only after their checksums match."""

import contextlib
import dataclasses
import math
import os
import re
import shutil
import zipfile
from dataclasses import dataclass, field
from pickle import UnpicklingError

import numpy as np
import torch

from hotloop.files import first_line, replacing


def load_checkpoint(path):
    """
    Loads a checkpoint of ours or of nanoGPT onto the CPU. Checksums are verified first, because
    torch.load ignores the CRC-32 that torch.save writes: of 400 files with one flipped bit it loaded
    398 as wrong numbers. Only tensors and plain values are unpickled. ValueError says what is wrong.
    """
    if torch.__version__ < (2, 10):  # weights_only=True can be made to run code there
        raise ValueError(f'torch {torch.__version__} cannot load checkpoints safely (CVE-2026-24747): '
                         'pip install "torch>=2.11"')
    try:
        check_records(path)
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except UnpicklingError:  # torch's own message recommends weights_only=False
        raise ValueError(f'{path} holds more than tensors and plain values; loading it could run code, '
                         'so it is refused') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except Exception as e:  # reading damaged bytes can raise nearly anything
        why = first_line(e) or type(e).__name__
        raise ValueError(f'{path} is damaged or not a checkpoint: {why}') from e
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= checkpoint.keys():
        raise ValueError(f'{path} is not a checkpoint of ours or of nanoGPT: "model" or "model_args" missing')
    # torch.compile and DDP put prefixes before the names, in any order
    weights = checkpoint['model'].items()
    checkpoint['model'] = {re.sub(r'^(_orig_mod\.|module\.)+', '', name): weight for name, weight in weights}
    if 'transformer.h.0.ln_1.bias' in checkpoint['model']:  # nanoGPT before bias became a setting
        checkpoint['model_args'].setdefault('bias', True)
    return checkpoint


def check_records(path):
    """Raises unless `path` is a zip file whose records all match their CRC-32."""
    with zipfile.ZipFile(path) as z:
        # one flipped bit turns a record into a folder for torch, which then returns uninitialized memory
        if any(record.external_attr or record.compress_type or record.is_dir() for record in z.infolist()):
            raise ValueError('the list of records is wrong')
        if damaged := z.testzip():
            raise ValueError(f'the checksum of record {damaged} does not match')


def save_checkpoint(path, checkpoint, keep_old=None):
    """
    Replaces `path` at once: written under another name, read back, flushed to the disk, renamed.
    A kill at any moment leaves the old file or the new one; with torch.save onto the file itself,
    43 of 100 kills destroyed it. keep_old: a second name under which the old file stays. ValueError
    gives the free and the needed disk space.
    """
    try:
        with replacing(path) as f:
            torch.save(checkpoint, f)
            f.flush()
            check_records(f.name)
            if keep_old and os.path.exists(path) and not os.path.lexists(keep_old):
                try:
                    os.link(path, keep_old)
                except OSError:  # a file system without links
                    shutil.copyfile(path, keep_old)
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as e:
        why = getattr(e, 'strerror', None) or first_line(e)
        if 'unexpected pos' in why:  # torch's text for a full disk
            why = 'the disk is full'
        space = f'{size_in_bytes(checkpoint) / 1e6:,.1f} MB are needed'
        with contextlib.suppress(OSError):  # the folder itself may be gone
            free = shutil.disk_usage(os.path.dirname(path) or '.').free
            space = f'{free / 1e6:,.1f} MB are free, {space}'
        raise ValueError(f'{path} could not be written: {why}; {space}') from e


def size_in_bytes(value):
    """Bytes of all tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(size_in_bytes, value))
    return 0


@dataclass
class RunState:
    """The state of a run besides weights and optimizers."""
    iter_num: int = 0  # optimizer updates done
    best_val_loss: float = math.inf
    tokens_seen: int = 0
    logged: list = field(default_factory=list)  # [summed loss, targets, skipped, steps] since the last line
    bad_in_a_row: int = 0  # the last steps that were not finite
    spikes_in_a_row: int = 0  # the last steps whose loss was a spike
    recent: list = field(default_factory=list)  # losses of the last normal steps


def checkpoint_of(run):
    """
    Everything that a resume needs, as tensors and plain values, under nanoGPT's names where it has
    them. ValueError if a weight is not finite.
    """
    if not all(torch.isfinite(p).all() for p in run.model.parameters()):
        raise ValueError(f'step {run.state.iter_num}: weights are not finite and are not saved; '
                         'resume from the last checkpoint with --init_from=resume')
    optimizers = dict(zip(('optimizer', 'muon'), run.optimizers, strict=False))
    return {'model': run.model.state_dict(), **{name: o.state_dict() for name, o in optimizers.items()},
            'scaler': run.scaler.state_dict(), 'model_args': run.model.config.model_args(),
            'iter_num': run.state.iter_num, 'best_val_loss': run.state.best_val_loss, 'config': run.settings,
            'state': dataclasses.asdict(run.state), **run.context}


def restore(checkpoint, model, optimizers, scaler):
    """Restores weights, optimizers and scaler; returns the RunState. ValueError if anything does not fit."""
    model.load_weights(checkpoint['model'])
    saved = [checkpoint[name] for name in ('optimizer', 'muon') if name in checkpoint]
    if not saved:
        raise ValueError('the checkpoint has no optimizer state, and neither has any best.pt; '
                         'start a new run from its weights with --init_from=PATH')
    if len(saved) != len(optimizers):
        raise ValueError(f'the checkpoint has the state of {len(saved)} optimizers, but the settings create '
                         f'{len(optimizers)}; the optimizer cannot change on resume')
    for optimizer, state in zip(optimizers, saved, strict=True):
        restore_optimizer(optimizer, state)
    if scaler.is_enabled() and checkpoint.get('scaler'):
        scaler.load_state_dict(checkpoint['scaler'])
    return state_from(checkpoint)


def restore_optimizer(optimizer, saved):
    """Restores moments; learning rate, weight decay and kernel stay those of the current settings."""
    try:
        pairs = zip(optimizer.param_groups, saved['param_groups'], strict=True)
        groups = [{**group, 'params': old['params']} for group, old in pairs]
        optimizer.load_state_dict({'state': saved['state'], 'param_groups': groups})
    except (LookupError, TypeError, ValueError) as e:
        raise ValueError(f'the optimizer state of the checkpoint does not fit: {e}') from None
    for p, state in optimizer.state.items():
        for name, value in state.items():
            shape = torch.Size() if name == 'step' else p.shape
            if value.shape != shape:  # AdamW's fused kernel would write beyond a shorter tensor
                raise ValueError(f'the optimizer state of the checkpoint does not fit: {name} has shape '
                                 f'{tuple(value.shape)}, not {tuple(shape)}')


def state_from(checkpoint):
    """The RunState of a checkpoint of ours or of nanoGPT. Fields of other versions are dropped."""
    saved = checkpoint.get('state', checkpoint)  # nanoGPT has iter_num and best_val_loss beside the weights
    if 'iter_num' not in saved:
        raise ValueError("the checkpoint does not hold the step of its run: 'iter_num' is missing")
    names = [f.name for f in dataclasses.fields(RunState)]
    state = RunState(**{name: saved[name] for name in names if name in saved})
    state.best_val_loss = float(state.best_val_loss)  # nanoGPT saves a tensor
    if math.isnan(state.best_val_loss):
        state.best_val_loss = math.inf  # any loss will improve on it
    return state


def context_of(datasets, splits, env):
    """What a checkpoint records of its data, tokenizer and machine."""
    metas = [dataset.meta for dataset in datasets]
    fingerprints = {}
    for name, split in splits.items():
        fingerprints[name] = ' '.join(part.fingerprint() for part in split.splits)
    device = env.device.type
    if device == 'cuda':
        device = torch.cuda.get_device_name(env.device)
    context = {'tokenizer': metas[0]['tokenizer'], 'data': fingerprints,
               'run_id': os.environ.get('TORCHELASTIC_RUN_ID', 'none'),
               'versions': {'torch': str(torch.__version__), 'numpy': np.__version__},
               'machine': {'device': device, 'dtype': str(env.dtype), 'world': env.world,
                           'threads': env.threads, 'compile': env.compile}}
    templates = {template for meta in metas for template in meta.get('templates', [])}
    if len(templates) == 1:  # with several, the template of a chat is ambiguous
        context['template'] = templates.pop()
    if all(meta.get('bos') is not None for meta in metas):
        context['bos'] = metas[0]['bos']  # the first token of a prompt
    return context


def compare_context(checkpoint, context):
    """Notes on what differs from the checkpoint's machine. ValueError where the data differ."""
    if 'data' in checkpoint and checkpoint['data'] != context['data']:
        raise ValueError('the dataset is not the one this run was trained on: '
                         f'fingerprints {checkpoint["data"]} before, {context["data"]} now; '
                         'restore it, or start a new run with --init_from=PATH')
    notes = []
    for part in ('versions', 'machine'):
        before = checkpoint.get(part, {})
        for name, now in context[part].items():
            if before.get(name, now) != now:
                notes.append(f'{name}: {before[name]} before, {now} from here on; '
                             'bits may differ from those of an uninterrupted run')
    if checkpoint.get('state', {}).get('skips'):  # on_divergence=rollback of earlier versions
        notes.append('this run skipped data after a divergence; that is not repeated from here on')
    return notes
