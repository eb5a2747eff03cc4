"""Checkpoints: written so that a kill costs none, read only after their checksums; what a run saves and restores."""

import contextlib
import dataclasses
import math
import os
import pickletools
import re
import shutil
import struct
import zipfile
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import get_type_hints

import numpy as np
import torch

from hotloop.files import first_line, sync_folder
from hotloop.optim import Muon


def load_checkpoint(path):
    """
    Reads a checkpoint file, ours or nanoGPT's, and proves it whole first: torch.load never looks at the CRC-32 that
    torch.save wrote, and of 400 flipped bits 398 loaded as wrong numbers without a word. Only plain values and tensors
    are unpickled. ValueError says what is wrong with the file.
    """
    if torch.__version__ < (2, 10):  # what weights_only=True lets through there runs code
        raise ValueError(f'torch {torch.__version__} loads no file safely (CVE-2026-24747): pip install "torch>=2.11"')
    try:
        wrong = check_records(path)
        checkpoint = None if wrong else torch.load(path, map_location='cpu', weights_only=True)
    except UnpicklingError:  # torch's own text for this advises the unsafe way
        wrong = MORE_THAN_TENSORS.format('an instruction that is not followed')
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except (zipfile.BadZipFile, struct.error, EOFError, ArithmeticError, AssertionError, AttributeError, LookupError,
            RuntimeError, TypeError, ValueError) as e:  # what unpickling of any bytes has been seen to raise
        raise ValueError(f'{path} is not a whole checkpoint: {first_line(e)}{other_format(path)}') from None
    if not wrong and (odd := wrong_with(checkpoint)):
        wrong = f"is no checkpoint of ours or nanoGPT's: {odd}"
    if wrong:
        raise ValueError(f'{path} {wrong}')
    # names without what torch.compile and DDP put before them, in any nesting
    checkpoint['model'] = {re.sub(r'^(_orig_mod\.|module\.)+', '', k): v for k, v in checkpoint['model'].items()}
    if 'transformer.h.0.ln_1.bias' in checkpoint['model']:  # nanoGPT's before it had the setting
        checkpoint['model_args'].setdefault('bias', True)
    return checkpoint


def other_format(path):
    """What to do with a file that is no checkpoint of ours but something else that is known, or ''."""
    with open(path, 'rb') as f:
        head = f.read(16)
    if head.startswith(b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'):
        return "; it is in torch's format of before 1.6: load it and save it again with a newer torch"
    if head[8:9] == b'{':
        return '; it may be a safetensors file: name its folder, which has a config.json too'
    return ''


# torch allows more, some of which takes any amount of memory: bytearray(10**12), an instruction of 30 bytes
CHECKPOINT_NAMES = re.compile(r'collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)'
                              r'|torch (Float|Double|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage')
MORE_THAN_TENSORS = 'holds more than tensors and plain values ({}); loading it could run code, so it is refused'


def check_records(path):
    """
    What is wrong with the records of a checkpoint, by their checksums and by the names in its pickle, or None.
    ValueError where the file is no list of records, each as long as it says.
    """
    with open(path, 'rb') as f, zipfile.ZipFile(f) as z:
        f.seek(0)
        names = z.namelist()
        # of two records of a name torch reads the first and zipfile the last; what has others before it, as no zip file
        if f.read(4) != b'PK\3\4' or len(set(names)) < len(names) or [n[-8:] for n in names].count('data.pkl') != 1:
            raise ValueError('it does not begin with records of different names, one of them data.pkl')
        if any(r.compress_type for r in z.infolist()) or sum(r.file_size for r in z.infolist()) > os.path.getsize(path):
            raise ValueError('its records claim more bytes than it has')
        # one bit there makes a record a folder to torch, which then hands out memory as it was (1 of 10,000 files)
        if any(r.external_attr or r.volume or r.is_dir() for r in z.infolist()):
            raise ValueError('its list of records is damaged')
        if damaged := z.testzip():
            return f'is damaged: the checksum of its record {damaged} does not match'
        pickled = z.read(next(name for name in names if name.endswith('data.pkl')))
    names = [arg for op, arg, _ in pickletools.genops(pickled) if op.name in ('GLOBAL', 'STACK_GLOBAL', 'INST')]
    strange = [name for name in names if not CHECKPOINT_NAMES.fullmatch(str(name))]
    return MORE_THAN_TENSORS.format(strange[0]) if strange else None


def wrong_with(checkpoint):
    """What is wrong with the containers of a checkpoint, or None: what is read from them later relies on it."""
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= checkpoint.keys():
        return "'model' and 'model_args' are missing"
    flat = ('model_args', 'config', 'data', 'versions', 'machine')
    for name in ('model', 'optimizer', 'muon', 'scaler', 'state', 'tokenizer', *flat):
        part = checkpoint.get(name, {})
        if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
            return f'{name!r} is no dict of names'
        if name in flat and not all(isinstance(value, str | int | float | None) for value in part.values()):
            return f'{name!r} holds more than numbers and text'
    if next(tensors_in(checkpoint.get('tokenizer')), None) is not None:
        return "'tokenizer' holds a tensor"
    for t in tensors_in(checkpoint):
        # an expanded tensor shows more numbers than it has, and a copy of it would need the memory
        if t.numel() * t.element_size() > t.untyped_storage().nbytes():
            return f'a tensor of {tuple(t.shape)} lies in {t.untyped_storage().nbytes()} bytes'
    for name, weight in checkpoint['model'].items():
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return f'the weight {name!r} is no tensor of floating-point numbers'
    return None


def save_checkpoint(path, checkpoint, keep_old=None):
    """
    Writes aside, flushes to the disk, reads every record back, renames. A kill at any moment leaves the old file or
    the new one: of 100 kills during plain torch.save onto one file 43 left it unreadable, of 100 during this none.
    keep_old: a second name that the old file keeps. ValueError, with free and needed space, where it cannot be written.
    """
    partial = f'{path}.{os.getpid()}.tmp'
    try:
        with open(partial, 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if wrong := check_records(partial):
            raise RuntimeError(f'what was written does not read back: it {wrong}')
        if keep_old and os.path.exists(path) and not os.path.lexists(keep_old):
            try:
                os.link(path, keep_old)
            except OSError:  # a file system without links
                shutil.copyfile(path, keep_old)
        os.replace(partial, path)
        sync_folder(os.path.dirname(path) or '.')
    # torch turns a full disk into a RuntimeError that hides the cause; the others are what reading back raises
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as e:
        with contextlib.suppress(OSError):
            os.remove(partial)
        free = ''
        with contextlib.suppress(OSError):  # where the folder itself has gone
            free = f'{shutil.disk_usage(os.path.dirname(path) or ".").free / 1e6:,.1f} MB are free, '
        need = sum(t.numel() * t.element_size() for t in tensors_in(checkpoint))
        why = getattr(e, 'strerror', None) or first_line(e)
        why = 'the disk takes no more' if 'unexpected pos' in why else why
        raise ValueError(f'{path} could not be written: {why}; {free}{need / 1e6:,.1f} MB are needed') from e


def tensors_in(value):
    """Every tensor in nested containers; looks into each container once, for a file can make one hold itself."""
    left, seen = [value], set()
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value


@dataclass
class RunState:
    """What the loop knows beside weights and optimizer; saved as it is."""
    iter_num: int = 0  # updates done
    evaluation_left: bool = False  # a stop came when one was due
    best_val_loss: float = math.inf
    tokens_seen: int = 0
    logged: list = field(default_factory=list)  # [summed loss, targets, skipped, steps] since the last line
    bad_in_a_row: int = 0  # steps that were not finite, or spikes
    spikes_in_a_row: int = 0  # of them, spikes
    recent: list = field(default_factory=list)  # losses of the last steps that were neither
    skips: list = field(default_factory=list)  # [step, number]: data left out after a divergence


def checkpoint_of(run):
    """
    Everything needed to go on, under nanoGPT's names where it has them; plain values, for weights_only=True.
    ValueError where the weights are not finite, as after a fault of the machine.
    """
    if not all(torch.isfinite(p).all() for p in run.model.parameters()):
        raise ValueError(f'step {run.state.iter_num}: the weights are not finite, and are not saved; go on from the '
                         'checkpoint before with --init_from=resume')
    optimizers = dict(zip(('optimizer', 'muon'), run.optimizers, strict=False))
    return {'model': run.model.state_dict(), **{name: o.state_dict() for name, o in optimizers.items()},
            'scaler': run.scaler.state_dict(), 'model_args': run.model.config.model_args(),
            'iter_num': run.state.iter_num, 'best_val_loss': run.state.best_val_loss, 'config': run.settings,
            'state': dataclasses.asdict(run.state), **run.context}


def restore(checkpoint, model, optimizers, scaler):
    """Puts a checkpoint's weights, optimizers and scaler back. Returns the RunState. ValueError where they differ."""
    model.load_weights(checkpoint['model'])
    saved = [checkpoint[name] for name in ('optimizer', 'muon') if name in checkpoint]
    if not saved:
        raise ValueError('the checkpoint holds no state of an optimizer, as best.pt does not; start from its weights '
                         'with --init_from=PATH')
    if len(saved) != len(optimizers):
        raise ValueError(f'the checkpoint holds the state of {len(saved)} optimizers, and the settings make '
                         f'{len(optimizers)}: optimizer cannot change on resume')
    for optimizer, state in zip(optimizers, saved, strict=True):
        # momenta come from the checkpoint; rates, decay and the kernel are as the settings made them
        options = [{k: v for k, v in group.items() if k != 'params'} for group in optimizer.param_groups]
        try:
            groups = [{'params': was['params'], **own} for was, own in zip(state['param_groups'], options, strict=True)]
            check_moments(optimizer, groups, state['state'])
            optimizer.load_state_dict({'state': state['state'], 'param_groups': groups})
        except (ValueError, LookupError, TypeError) as e:
            raise ValueError(f'the optimizer state of the checkpoint does not fit: {e}') from None
    if scaler.is_enabled() and checkpoint.get('scaler'):
        if scaler.state_dict().keys() != checkpoint['scaler'].keys() or \
                not all(isinstance(v, int | float) and 0 <= v < math.inf for v in checkpoint['scaler'].values()):
            raise ValueError(f'the scaler of the checkpoint does not fit: {checkpoint["scaler"]}')
        scaler.load_state_dict(checkpoint['scaler'])
    return state_from(checkpoint)


def check_moments(optimizer, groups, saved):
    """
    ValueError unless each parameter has all tensors of its optimizer, in its own shape, or, before the first step, no
    parameter has any. torch does not look: AdamW's fused kernel wrote beyond the end of a shorter one.
    """
    params = [p for group in optimizer.param_groups for p in group['params']]
    ids = [i for group in groups for i in group['params']]
    names = {'momentum_buffer'} if isinstance(optimizer, Muon) else {'step', 'exp_avg', 'exp_avg_sq'}
    if not isinstance(saved, dict) or not all(isinstance(moments, dict) for moments in saved.values()):
        raise ValueError('its state is no dict of dicts')
    if len(set(ids)) != len(params) or (saved and saved.keys() != set(ids)):
        raise ValueError(f'it has {len(saved)} states of {len(ids)} parameters, and the model has {len(params)}')
    for i, p in zip(ids, params, strict=True) if saved else ():
        shapes = {name: () if name == 'step' else tuple(p.shape) for name in names}
        found = {name: tuple(v.shape) for name, v in saved[i].items()
                 if isinstance(v, torch.Tensor) and v.is_floating_point()}
        if found != shapes or len(saved[i]) != len(shapes):
            raise ValueError(f'parameter {i} has {found}, not {shapes}')


def state_from(checkpoint):
    """The RunState of a checkpoint, ours or nanoGPT's. ValueError where it is none."""
    try:
        was = checkpoint.get('state') or {'iter_num': checkpoint['iter_num'],
                                          'best_val_loss': float(checkpoint['best_val_loss'])}
        state = RunState(**was)
        counts = [state.iter_num, state.tokens_seen, state.bad_in_a_row, state.spikes_in_a_row, *state.logged]
        fits = (all(isinstance(getattr(state, name), kind) for name, kind in get_type_hints(RunState).items())
                and type(checkpoint['iter_num']) is int and checkpoint['iter_num'] >= 0
                and len(state.logged) in (0, 4) and all(isinstance(n, int | float) and n >= 0 for n in counts)
                and all(isinstance(loss, float) for loss in state.recent)
                and all(type(n) is int and n >= 0 for at, number in state.skips for n in (at, number)))
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f'the checkpoint does not say where the run was: {type(e).__name__}: {e}') from None
    if not fits:
        raise ValueError(f'the checkpoint is of step {checkpoint["iter_num"]!r} and has {state}, which cannot be')
    if math.isnan(state.best_val_loss):
        state.best_val_loss = math.inf  # than which any loss is better
    return state


def context_of(datasets, splits, env):
    """What a checkpoint tells of its data, tokenizer and machine, beside the settings."""
    device = torch.cuda.get_device_name(env.device) if env.device.type == 'cuda' else env.device.type
    context = {'tokenizer': datasets[0][2]['tokenizer'], 'run_id': os.environ.get('TORCHELASTIC_RUN_ID', 'none'),
               'data': {n: ' '.join(part.fingerprint() for part in s.splits) for n, s in splits.items()},
               'versions': {'torch': str(torch.__version__), 'numpy': np.__version__},
               'machine': {'device': device, 'dtype': str(env.dtype), 'world': env.world,
                           'threads': env.threads, 'compile': env.compile}}
    templates = {template for _, _, meta, _ in datasets for template in meta.get('templates', [])}
    if len(templates) == 1:  # of several none can be called the one to talk to the model in
        context['template'] = templates.pop()
    if all(meta.get('bos') is not None for _, _, meta, _ in datasets):
        context['bos'] = datasets[0][2]['bos']  # with which a prompt begins
    return context


def compare_context(checkpoint, context):
    """ValueError if the data is not what the run was trained on; a line for each other difference."""
    if 'data' in checkpoint and checkpoint['data'] != context['data']:
        raise ValueError(f'the dataset is not the one this run was trained on: fingerprints {checkpoint["data"]} '
                         f'before, {context["data"]} now; restore it, or start a new run with --init_from=PATH')
    return [f'{name}: {was} before, {now} from here on; the bits of an unbroken run need the same'
            for part in ('versions', 'machine') for name, now in context[part].items()
            if (was := checkpoint.get(part, {}).get(name, now)) != now]
