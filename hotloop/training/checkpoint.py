"""Checkpoints of a run: a kill cannot destroy one, and none is loaded before its checksums match."""

import dataclasses
import math
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from hotloop.system import host
from hotloop.system.distributed import print0
from hotloop.system.files import checkpoint_paths, first_intact, replacing
from hotloop.system.text import first_line
from hotloop.training.parallel import gather, is_sharded, shard_state
from hotloop.weights.adapter import CONFIG, ORIGIN, TENSORS, write_adapter
from hotloop.weights.load import check_records, load_checkpoint
from hotloop.weights.lora import weights_to_save

OPTIMIZERS = ('optimizer', 'muon')  # names of their states in a checkpoint
KEEP = 2  # checkpoints of a run, in case the latest is damaged
ADAPTER = tuple(os.path.join('adapter', name) for name in (CONFIG, TENSORS, ORIGIN))
MIRRORED = ('config.py', 'log.jsonl', 'report.html', *ADAPTER, 'best.pt', 'ckpt.pt')
REMEDY = 'start a new run from its weights with --init_from=PATH'


@dataclass
class RunState:
    """The state of a run besides weights and optimizers."""
    iter_num: int = 0  # optimizer updates done
    best_val_loss: float = math.inf
    tokens_seen: int = 0
    evals_since_best: int = 0  # evaluations in a row without a lower loss
    evaluated_at: int | None = -1  # step of the last evaluation; None: its loss does not compare
    logged: list = field(default_factory=list)  # the Meter's sums since the last log line
    bad_in_a_row: int = 0  # consecutive non-finite steps up to now
    seconds_used: float = 0.0  # of the time budget, up to the last save
    decay_start: int | None = None  # the step at which the time budget began the decay
    max_iters: int | None = None  # the last step, which it decided then

    def count_evaluation(self, step, loss):
        """Count an evaluation. Returns whether this is the lowest validation loss yet."""
        self.evaluated_at = step
        if loss < self.best_val_loss:
            self.best_val_loss = loss
            self.evals_since_best = 0
            return True
        self.evals_since_best += 1
        return False

    def forget_losses(self):
        """Forget the losses so far, which are of other windows than the next ones: it evaluates at once."""
        self.best_val_loss = math.inf
        self.evals_since_best = 0
        self.evaluated_at = None

    def shift(self, T, global_batch):
        """Return the windows read beyond iter_num steps of global_batch: not 0 if it changed."""
        return self.tokens_seen // T - self.iter_num * global_batch


def checkpoint_of(model, optimizers, scaler, state, record):
    """
    Collect what a resume needs, in plain types, with nanoGPT's names. record: the settings, data,
    tokenizer and machine. All processes of a sharded run must call it; rank 0 gets the tensors.
    Raises ValueError if a weight is not finite.
    """
    checkpoint = {'model': dict(weights_to_save(model)), 'scaler': scaler.state_dict(),
                  'model_args': model.config.model_args(), 'iter_num': state.iter_num,
                  'best_val_loss': state.best_val_loss, 'state': dataclasses.asdict(state),
                  **record}
    for name, optimizer in zip(OPTIMIZERS, optimizers, strict=False):
        checkpoint[name] = optimizer.state_dict()
    if is_sharded(model):
        checkpoint = gather(checkpoint)
    if not all(torch.isfinite(w).all() for w in checkpoint['model'].values()):
        raise ValueError(f'step {state.iter_num}: weights are not finite and are not saved; lower '
                         'the learning rate and resume from the last checkpoint')
    return checkpoint


def save_checkpoint(path, checkpoint, keep_old=None):
    """
    Replace `path` at once: written under another name, read back, flushed to the disk, renamed.
    Plain torch.save left it destroyed by 38 of 100 kills. keep_old: a name that the old file gets
    first. Raises ValueError with the reason, such as a full disk.
    """
    try:
        with replacing(path) as f:
            torch.save(checkpoint, f)
            f.flush()
            check_records(f.name)
            if keep_old and os.path.exists(path):
                try:
                    os.link(path, keep_old)  # readers find `path` at any time
                except OSError:  # some file systems have no links
                    os.replace(path, keep_old)
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as e:
        why = getattr(e, 'strerror', None) or first_line(e)
        if 'unexpected pos' in why:  # torch's text for a full disk
            why = 'the disk is full'
        raise ValueError(f'{path} could not be written: {why}') from e


def snapshot(checkpoint):
    """Copy all tensors to host memory, for a thread to write while the run goes on."""
    copies = {}  # a tensor with two names, such as a tied head, is copied once

    def copy(value):
        if not isinstance(value, torch.Tensor):
            return value
        key = value.data_ptr(), value.shape
        if key not in copies:
            copies[key] = value.detach().to('cpu', copy=True)
        return copies[key].detach()  # two names stay two tensors of one storage
    return tree_map(copy, checkpoint)


def copy_file(source, target):
    """Copy a file so that a kill leaves the target complete or as it was."""
    with open(source, 'rb') as old, replacing(target) as new:
        shutil.copyfileobj(old, new, 1 << 20)


class Latest(NamedTuple):
    """The newest intact checkpoint of a folder."""
    checkpoint: dict
    path: str
    damaged: list  # the paths of newer ones
    written: int  # when it was, in ns


class Checkpoints:
    """
    The checkpoints of a run folder: best.pt, the latest ckpt.pt and the one before, which rank 0
    has. A thread writes them, and the next save or wait() reports how that ended.
    """

    def __init__(self, folder, saved_step=None, mirror=None, best_loss=math.inf):
        self.folder = folder
        self.saved_step = saved_step  # of ckpt.pt
        self.mirror = mirror
        self.seconds = 0.0  # of the last save
        self.best_loss = best_loss  # of the last best.pt that was written
        self.writer = ThreadPoolExecutor(1)
        self.saving = None  # the save under way

    def latest(self):
        """Load the newest intact checkpoint. Prints which are damaged; ValueError if all are."""
        paths = checkpoint_paths(self.folder)
        if not paths:
            raise ValueError(f'{self.folder} holds no checkpoint; start with --init_from=scratch, or from '
                             'weights with --init_from=PATH')
        written = {path: os.stat(path).st_mtime_ns for path in paths}
        path, checkpoint = first_intact(paths, load_checkpoint)
        return Latest(checkpoint, path, paths[:paths.index(path)], written[path])

    def promote(self, latest):
        """Make the checkpoint of a resume the latest one, and rename the damaged ones."""
        if os.stat(latest.path).st_mtime_ns != latest.written:  # by a process that was about to end
            raise ValueError(f'{latest.path} was written again in the meantime; run the command again')
        newest, best = (os.path.join(self.folder, name) for name in ('ckpt.pt', 'best.pt'))
        try:
            for path in latest.damaged:
                os.replace(path, path + '.damaged')
            if latest.path != newest:
                os.replace(latest.path, newest)
            if 'state' not in latest.checkpoint and not os.path.exists(best):
                copy_file(newest, best)  # of nanoGPT, whose only file holds the best weights
        except OSError as e:
            raise ValueError(f'checkpoints in {self.folder} could not be renamed or copied: {e}') from None
        if not os.path.exists(best):
            self.best_loss = math.inf

    def save(self, checkpoint, best, final=False):
        """
        Write a checkpoint, and best.pt before it if these weights are the best. A failure is
        printed, and training continues; a final save waits and raises ValueError.
        """
        self.wait()
        if final:
            self.write(checkpoint, best)
        else:
            self.saving = self.writer.submit(self.write, snapshot(checkpoint), best)

    def wait(self):
        """
        Wait for the save under way and print its failure. Then best_loss is that of the last best.pt that
        could be written.
        """
        saving, self.saving = self.saving, None
        try:
            if saving:
                saving.result()
        except ValueError as e:
            print0(f'{e}; training continues')

    def write(self, checkpoint, best):
        """
        Write best.pt if these weights are the best, ckpt.pt and the mirror, and drop older checkpoints.
        Raises ValueError with the reason if best.pt or ckpt.pt could not be written.
        """
        began = host.process_seconds()
        step = checkpoint['iter_num']
        keep_old = None
        if self.saved_step not in (None, step):
            keep_old = os.path.join(self.folder, f'ckpt-{self.saved_step:09d}.pt')
        failure = None
        if best:
            try:
                self.write_best(checkpoint)
            except Exception as e:  # a run is resumed from ckpt.pt, which must not depend on best.pt
                failure = e
                checkpoint['state']['evaluated_at'] = -1  # a resume evaluates this step again and saves it
        checkpoint['best_val_loss'] = checkpoint['state']['best_val_loss'] = self.best_loss
        save_checkpoint(os.path.join(self.folder, 'ckpt.pt'), checkpoint, keep_old)
        self.saved_step = step
        try:
            for path in checkpoint_paths(self.folder)[KEEP:]:
                os.remove(path)
        except OSError as e:
            print0(f'an older checkpoint could not be removed: {e}')
        self.copy()
        self.seconds = host.process_seconds() - began
        if failure:
            raise failure

    def write_best(self, checkpoint):
        """Write best.pt: weights, settings and tokenizer; adapters also for peft."""
        left_out = (*OPTIMIZERS, 'scaler', 'state')
        weights = {name: value for name, value in checkpoint.items() if name not in left_out}
        if 'lora' in checkpoint:
            write_adapter(os.path.join(self.folder, 'adapter'), checkpoint)
        keep_old = None
        if self.best_loss == math.inf:  # of a run that evaluates other windows than before
            keep_old = os.path.join(self.folder, 'best-before.pt')
        save_checkpoint(os.path.join(self.folder, 'best.pt'), weights, keep_old)
        self.best_loss = checkpoint['best_val_loss']

    def copy(self):
        """Copy the run to its mirror, if it has one, ckpt.pt last. Prints a failure."""
        if not self.mirror:
            return
        try:
            if not os.path.isdir(self.mirror):  # or the copy would be on the disk below an unmounted drive
                raise OSError('it is gone')
            for name in MIRRORED:
                source = os.path.join(self.folder, name)
                if os.path.exists(source):
                    target = os.path.join(self.mirror, name)
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    copy_file(source, target)
        except OSError as e:
            print0(f'mirror_dir={self.mirror} could not be written: {e.strerror or e}')


# -----------------------------------------------------------------------------
# resuming

def state_from(checkpoint):
    """Read the RunState of a checkpoint of ours or of nanoGPT. Unknown fields are dropped."""
    config = checkpoint.get('config', {})
    saved = checkpoint.get('state', checkpoint)  # nanoGPT's stand beside the weights
    names = [f.name for f in dataclasses.fields(RunState)]
    state = RunState(**{name: saved[name] for name in names if name in saved})
    if 'state' not in checkpoint:  # nanoGPT's loss is of a few random windows and compares with none of ours
        state.forget_losses()
    if 'tokens_seen' not in saved:  # it does not count them
        values = {**config, **checkpoint.get('model_args', {})}
        sizes = 'batch_size', 'gradient_accumulation_steps', 'block_size'
        state.tokens_seen = state.iter_num * math.prod(values.get(name, 0) for name in sizes)
    if config.get('decay_start') is not None and state.decay_start is None:  # was a setting once
        state.decay_start, state.max_iters = config['decay_start'], config['max_iters']
    return state


def restore(checkpoint, optimizers, scaler):
    """Restore optimizers and scaler. Raises ValueError if one does not fit."""
    saved = [checkpoint[name] for name in OPTIMIZERS if name in checkpoint]
    if len(saved) != len(optimizers):
        raise ValueError(f'the checkpoint has the state of {len(saved)} optimizers, not of '
                         f'{len(optimizers)} (best.pt has none); {REMEDY}')
    for optimizer, old in zip(optimizers, saved, strict=True):
        try:
            groups = []
            for current, group in zip(optimizer.param_groups, old['param_groups'], strict=True):
                # rates and kernels are those of the settings
                groups.append({**current, 'params': group['params']})
            shard_state(old['state'], optimizer)
            optimizer.load_state_dict({'state': old['state'], 'param_groups': groups})
            check_state(optimizer)
        except ValueError as e:  # of a fork of nanoGPT, or an early one
            raise ValueError(f'the optimizer of the checkpoint does not fit: {e}; {REMEDY}') from None
    if scaler.is_enabled() and checkpoint.get('scaler'):
        scaler.load_state_dict(checkpoint['scaler'])


def check_state(optimizer):
    """Raise ValueError unless the moments of an optimizer have the shapes of their parameters."""
    for p, values in optimizer.state.items():
        if isinstance(optimizer, torch.optim.AdamW) and 'exp_avg_sq' not in values:
            raise ValueError(f'it is not AdamW: its state is {", ".join(values)}')
        for name, value in values.items():
            is_moment = name != 'step' and not name.startswith(('absmax', 'qmap'))  # of adamw8bit
            if is_moment and value.shape != p.shape:  # AdamW's fused kernel would write beyond its end
                raise ValueError(f'{name} has shape {tuple(value.shape)}, not {tuple(p.shape)}')
