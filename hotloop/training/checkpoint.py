"""Checkpoints: a kill cannot destroy one, and none is loaded before its checksums match."""

import contextlib
import copy
import dataclasses
import errno
import math
import os
import re
import shutil
import zipfile
from dataclasses import dataclass, field
from pickle import UnpicklingError

import numpy as np
import torch

from hotloop.system.files import first_line, replacing
from hotloop.training.divergence import what_next
from hotloop.training.shard import gather, is_sharded
from hotloop.weights.lora import weights_to_save

OPTIMIZERS = ('optimizer', 'muon')  # names of their states in a checkpoint


class DiskFull(ValueError):
    """There was no room for a checkpoint."""


def load_checkpoint(path):
    """
    Loads a checkpoint of ours or of nanoGPT onto the CPU. Checksums are verified first, because torch.load
    ignores them: of 400 files with one flipped bit it loaded 398 with wrong values.
    """
    if torch.__version__ < (2, 10):  # weights_only=True can be made to run code there
        raise ValueError(f'torch {torch.__version__} cannot load checkpoints safely (CVE-2026-24747): '
                         'pip install "torch>=2.11"')
    try:
        check_records(path)
        # mapped, the processes of a machine share the pages of the file: 8 copies would take 75 GB at 773M
        several = int(os.environ.get('WORLD_SIZE', '1')) > 1
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=several)
    except UnpicklingError as e:  # torch's own message recommends weights_only=False
        what = ''.join(re.findall(r' GLOBAL (\S+)', str(e))[:1]) or 'unknown'
        raise ValueError(f'{path} was rejected: it is not plain data ({what}) and could run code; save it '
                         'again where it was made, with numbers and text in place of other objects') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except Exception as e:  # reading damaged bytes can raise nearly anything
        raise ValueError(f'{path} is damaged or not a checkpoint: {first_line(e)}') from e
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= checkpoint.keys():
        raise ValueError(f'{path} is not a hotloop or nanoGPT checkpoint: "model" or "model_args" missing')
    prefixes = r'^(_orig_mod\.|module\.)+'  # of torch.compile and DDP, in any order
    checkpoint['model'] = {re.sub(prefixes, '', name): w for name, w in checkpoint['model'].items()}
    if 'transformer.h.0.ln_1.bias' in checkpoint['model']:  # nanoGPT before bias became a setting
        checkpoint['model_args'].setdefault('bias', True)
    return checkpoint


def check_records(path):
    """Raises unless `path` is a zip file whose records all match their CRC-32."""
    with zipfile.ZipFile(path) as z:
        # one flipped bit turns a record into a folder for torch, which then returns uninitialized memory
        if any(record.external_attr or record.compress_type or record.is_dir() for record in z.infolist()):
            raise ValueError('the list of records is invalid')
        if damaged := z.testzip():
            raise ValueError(f'the checksum of record {damaged} does not match')


def save_checkpoint(path, checkpoint, keep_old=None):
    """
    Replaces `path` at once: written under another name, read back, flushed to the disk, renamed. Plain
    torch.save left it destroyed by 38 of 100 kills. keep_old: a second name that keeps the old file.
    ValueError if that fails, and DiskFull, which is one, for want of space.
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
        kind = DiskFull if getattr(e, 'errno', None) in (errno.ENOSPC, errno.EDQUOT) else ValueError
        if 'unexpected pos' in why:  # torch's text for a full disk
            kind, why = DiskFull, 'the disk is full'
        with contextlib.suppress(OSError):  # the folder may be gone
            free = shutil.disk_usage(os.path.dirname(path) or '.').free
            why += f'; {free / 1e6:,.1f} MB are free, {size_in_bytes(checkpoint) / 1e6:,.1f} MB are needed'
        raise kind(f'{path} could not be written: {why}') from e


def snapshot(value, copies):
    """
    A copy of a nested value with all tensors in host memory, for a thread to write while the run continues.
    The file is the same. copies: {} at first; a tensor with two names, such as a tied head, is copied once.
    """
    if isinstance(value, dict):
        copied = copy.copy(value)  # state_dict() has an attribute
        for name, item in value.items():
            copied[name] = snapshot(item, copies)
        return copied
    if isinstance(value, list):
        return [snapshot(item, copies) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    key = value.data_ptr(), value.shape
    if key not in copies:  # from a GPU several times as fast into pinned memory
        copies[key] = torch.empty_like(value, device='cpu', pin_memory=value.is_cuda)
        copies[key].copy_(value, non_blocking=value.is_cuda)
    return copies[key].detach()  # two names stay two tensors of one storage


def size_in_bytes(value):
    """Bytes of all tensors in nested dictionaries."""
    if isinstance(value, dict):
        return sum(map(size_in_bytes, value.values()))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


@dataclass
class RunState:
    """The state of a run besides weights and optimizers."""
    iter_num: int = 0  # optimizer updates done
    best_val_loss: float = math.inf
    tokens_seen: int = 0
    evals_since_best: int = 0  # evaluations in a row without a lower loss
    evaluated_at: int = -1  # the step of the last evaluation in these two
    logged: list = field(default_factory=list)  # [summed loss, targets, skipped, steps] since the last line
    bad_in_a_row: int = 0  # consecutive non-finite steps up to now
    spikes_in_a_row: int = 0  # consecutive loss spikes up to now
    recent: list = field(default_factory=list)  # losses of the last normal steps
    seconds_used: float = 0.0  # of the time budget, up to the last save
    eval_fitted: bool = False  # whether eval_interval has been adapted to the time budget

    def shift(self, T, global_batch):
        """Windows read beyond iter_num steps of global_batch: not 0 if earlier steps had another one."""
        return self.tokens_seen // T - self.iter_num * global_batch


def launch_id():
    """What identifies the torchrun that started this process, over its restarts; 'none' if nothing does."""
    name, env = os.environ.get('TORCHELASTIC_RUN_ID'), os.environ
    if name and env.get('WORLD_SIZE') == env.get('LOCAL_WORLD_SIZE'):
        name += f' {os.getppid()}'  # on one node the name may be the default one, or be used again
    return name or 'none'


def settings_to_save(run):
    """All settings of a run in one dictionary."""
    model, lora, cfg = map(dataclasses.asdict, (run.model.config, run.lora, run.cfg))
    return {**model, **lora, **cfg, 'init_from': run.origin}


def checkpoint_of(run):
    """
    The state for a resume, in plain types, with nanoGPT's names. All processes of a sharded run must call it;
    rank 0 has the tensors. ValueError if a weight is not finite.
    """
    checkpoint = {'model': weights_to_save(run.model), 'scaler': run.scaler.state_dict(),
                  'model_args': run.model.config.model_args(), 'iter_num': run.state.iter_num,
                  'best_val_loss': run.state.best_val_loss, 'config': settings_to_save(run),
                  'state': dataclasses.asdict(run.state), **run.context}
    for name, optimizer in zip(OPTIMIZERS, run.optimizers, strict=False):
        checkpoint[name] = optimizer.state_dict()
    if is_sharded(run.model):
        checkpoint = gather(checkpoint)
    if not all(torch.isfinite(w).all() for w in checkpoint['model'].values()):
        raise ValueError(f'step {run.state.iter_num}: weights are not finite and are not saved. '
                         f'{what_next(run)}')
    return checkpoint


def context_of(datasets, splits, env):
    """The data, tokenizer and machine as a checkpoint records them."""
    metas = [dataset.meta for dataset in datasets]
    fingerprints = {}
    for name, split in splits.items():
        fingerprints[name] = ' '.join(part.fingerprint() for part in split.splits)
    device = torch.cuda.get_device_name(env.device) if env.device.type == 'cuda' else env.device.type
    context = {'tokenizer': metas[0]['tokenizer'], 'data': fingerprints,
               'run_id': launch_id(),
               'versions': {'torch': str(torch.__version__), 'numpy': np.__version__},
               'machine': {'device': device, 'dtype': str(env.dtype), 'world': env.world,
                           'threads': env.threads, 'compile': env.compile}}
    templates = {template for meta in metas for template in meta.get('templates', [])}
    if len(templates) == 1:  # with several, the template for chat is ambiguous
        context['template'] = templates.pop()
    if all(meta.get('bos') is not None for meta in metas):
        context['bos'] = metas[0]['bos']  # the first token of a prompt
    return context
