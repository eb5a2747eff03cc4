"""
The training loop, all of it: machine, data order, optimizers, evaluation, checkpoints, logging.

    $ python train.py                                          # a recipe chosen by what the machine has
    $ python train.py config/shakespeare_char.py --device=cpu  # a recipe card, then flags
    $ python train.py --init_from=resume                       # go on with the run in out_dir
    $ torchrun --standalone --nproc_per_node=8 train.py        # all GPUs of a node

A step is one optimizer update over batch_size x gradient_accumulation_steps sequences, whatever the number of
processes. Everything random (the order of the data, dropout) is a function of the seed, the step and the micro-batch,
so a run that was killed goes on bit for bit, and nothing but tensors and counters has to be saved.
"""

import dataclasses
import functools
import gc
import importlib.util
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from typing import Literal, get_type_hints

import numpy as np
import torch
import torch.distributed as dist

from configurator import accept, as_file, call_main, configure
from hotloop.checkpoint import (
    RunState,
    checkpoint_of,
    compare_context,
    context_of,
    restore,
    save_checkpoint,
    state_from,
)
from hotloop.dataloader import Batches, Mixture, Split, micro_seed, open_split, windows_per_epoch
from hotloop.dataset import byte_table, check_tokenizer, open_datasets
from hotloop.device import choose_device, choose_dtype, device_memory, peak_memory, try_compile
from hotloop.distributed import Env, StopRequest, check_agreement, end_with_parent, open_process_group
from hotloop.divergence import MAX_BAD_STEPS, collect_steps
from hotloop.evaluate import eval_windows, evaluate_any
from hotloop.files import first_line, is_inside
from hotloop.generate import generate, read_later
from hotloop.host import cores
from hotloop.logger import Log, announce, log_step
from hotloop.memory import choose_batch_size, choose_loss_chunks, memory_advice, out_of_memory
from hotloop.optim import build_optimizers
from hotloop.pretrained import open_weights
from hotloop.run_dir import Mirror, RunDir, find_latest
from hotloop.tokenizer import Tokenizer, prompt_ids, tokenizer_from
from model import GPT, GPTConfig, config_from

MAX_ROLLBACKS = 3  # to one and the same checkpoint; after that other data does not help


@dataclass
class TrainConfig:
    # --- run
    out_dir: str = 'out'  # checkpoints, log and config of the run; one that is in use is moved aside
    init_from: str = 'scratch'  # scratch, resume, gpt2 (-medium, -large, -xl), or the path of a checkpoint or folder
    eval_only: bool = False  # evaluate once and exit; nothing is written
    profile: bool = False  # instead of training: tell where the time of a few warm steps goes, and write a trace
    seed: int = 1337  # initial weights, order of the data, dropout
    max_iters: int = 600000  # steps, counted from scratch
    max_epochs: float | None = None  # passes over the data instead; converted to steps
    max_minutes: float | None = None  # save and stop after this long, as on SIGTERM
    # --- data
    dataset: str = 'openwebtext'  # folder under data_dir, made by prepare.py or by nanoGPT; a:0.7,b:0.3 mixes
    data_dir: str = 'data'  # where datasets live
    data_on_device: bool | Literal['auto'] = 'auto'  # training split in the GPU's memory; auto: up to a tenth of it
    batch_size: int | Literal['auto'] = 12  # sequences of a micro-batch, at most; auto: as many as fit, same step
    gradient_accumulation_steps: int = 5 * 8  # micro-batches of a step over all processes
    # --- optimizer
    optimizer: Literal['adamw', 'muon'] = 'adamw'  # muon: matrices inside blocks by Muon, everything else by AdamW
    learning_rate: float = 6e-4  # peak, of AdamW
    muon_lr: float = 0.02  # peak, of Muon
    embed_lr: float | None = None  # peak, of the token embedding under muon; None: learning_rate
    weight_decay: float = 1e-1  # on matrices only
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    muon_momentum: float = 0.95  # of Muon
    grad_clip: float = 1.0  # largest norm of all gradients together; 0: off
    # --- schedule
    decay_lr: bool = True  # False: constant after the warm-up
    lr_schedule: Literal['cosine', 'linear'] = 'cosine'  # linear: constant, then down over the last decay_fraction
    warmup_iters: int = 2000  # steps from 0 to the peak
    lr_decay_iters: int | None = None  # step at which the decay ends; None: max_iters
    min_lr: float = 6e-5  # where the decay of learning_rate ends; others end in proportion
    decay_fraction: float = 0.5  # share of the run that lr_schedule='linear' decays over
    # --- evaluation and logging
    eval_interval: int = 2000  # steps between evaluations; there is always one at the end
    eval_tokens: int | None = 2**20  # most tokens of a split that one evaluation reads; None: all
    eval_iters: int | None = None  # batches of each split instead, nanoGPT's meaning
    log_interval: int = 1  # steps between lines
    on_divergence: Literal['stop', 'rollback'] = 'stop'  # rollback: to the last checkpoint, then past that data
    sample_interval: int | None = None  # steps between texts that the model writes, into the log; None: none
    sample_prompt: str = '\n'  # what they continue
    sample_tokens: int = 100  # their length
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = 'hotloop'  # its project
    wandb_run_name: str | None = None  # its run; None: out_dir
    # --- checkpoints
    always_save_checkpoint: bool = True  # save after each evaluation; False: only after those that improve
    save_interval: int | None = None  # save every so many steps besides; None: by save_minutes alone
    save_minutes: float = 15.0  # save at least this often
    keep_last: int = 2  # checkpoints kept, the latest among them
    mirror_dir: str | None = None  # a second place, such as a mounted drive, to which finished checkpoints are copied
    # --- machine
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first of them that is there
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of the computation; weights stay in float32
    compile: bool | Literal['auto'] = 'auto'  # torch.compile; auto: if a small trial works
    compile_mode: Literal['default', 'max-autotune-no-cudagraphs'] = 'default'  # of torch.compile
    loss_chunks: int | Literal['auto'] = 'auto'  # parts of head and loss: less memory, slower; auto: 1 while that fits
    threads: int | None = None  # CPU threads of a process; None: the machine's physical cores, shared out
    deterministic: bool | Literal['auto'] = 'auto'  # the same bits at every run; auto: on CPUs, where it costs 1%
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # of torch.distributed
    timeout_minutes: float = 10.0  # how long a process waits for the others before it gives up

    def problems(self):
        """What is wrong with the settings, a sentence each."""
        wrong = []
        for names, fits, must in (
                ('batch_size gradient_accumulation_steps eval_interval log_interval eval_tokens eval_iters threads '
                 'save_interval loss_chunks sample_interval sample_tokens', lambda v: v >= 1, 'be at least 1'),
                ('max_iters max_epochs max_minutes learning_rate muon_lr embed_lr min_lr weight_decay grad_clip '
                 'warmup_iters lr_decay_iters save_minutes seed', lambda v: v >= 0, 'not be negative'),
                ('beta1 beta2 muon_momentum', lambda v: 0 <= v < 1, 'be at least 0 and below 1'),
                ('timeout_minutes', lambda v: v > 0, 'be above 0'),
                ('decay_fraction', lambda v: 0 < v <= 1, 'be above 0 and at most 1'),
                ('seed', lambda v: v < 2**63, 'be below 2**63'),
                ('keep_last', lambda v: v >= 2, 'be at least 2: one file is no insurance against damage')):
            wrong += [f'{name}={getattr(self, name)} must {must}' for name in names.split()
                      if getattr(self, name) not in (None, 'auto') and not fits(getattr(self, name))]
        paths = {'out_dir': self.out_dir, 'mirror_dir': self.mirror_dir}
        unfit = [f'{name}={path!r} can be no folder; name another, or leave it out' for name, path in paths.items()
                 if path is not None and (not path or '\0' in path)]
        wrong += unfit
        if not unfit and self.mirror_dir and is_inside(self.out_dir, self.mirror_dir):
            wrong.append(f'out_dir={self.out_dir!r} is or lies in mirror_dir={self.mirror_dir!r}, and would be moved '
                         'aside with it; a mirror wants a folder of its own, on another disk')
        if self.wandb_log and importlib.util.find_spec('wandb') is None:
            wrong.append('wandb_log=True needs the package wandb: pip install wandb, or --wandb_log=False')
        return wrong


# -----------------------------------------------------------------------------
# the machine: device, dtype, compile, processes, each with the reason it was chosen


def setup(cfg):
    """Chooses and prepares device, dtype, compile and the process group; ValueError where cfg asks for too much."""
    rank, world, local_rank, local_world = (int(os.environ.get(name, default)) for name, default in (
        ('RANK', '0'), ('WORLD_SIZE', '1'), ('LOCAL_RANK', '0'), ('LOCAL_WORLD_SIZE', '1')))
    device, why_device = choose_device(cfg.device, local_rank)
    dtype, why_dtype = choose_dtype(cfg.dtype, device, training=True)
    if 'TORCHELASTIC_RUN_ID' in os.environ:
        end_with_parent()
    if cfg.deterministic is True or (cfg.deterministic == 'auto' and device.type == 'cpu'):
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # read by cuBLAS when it starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    threads = cfg.threads or max(1, cores(physical=True) // local_world)
    torch.set_num_threads(threads)
    if cfg.backend == 'nccl' and device.type != 'cuda' and world > 1:
        raise ValueError(f'backend=nccl works between GPUs, and the device is {device.type}; use --backend=gloo')
    if world > 1 and (device.type == 'mps' or ':' in cfg.device):
        raise ValueError(f'{world} processes cannot share device={cfg.device!r}; '
                         + ('use --device=cpu' if device.type == 'mps' else 'leave out the number'))
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = 'tf32'
    if world > 1:
        open_process_group(cfg.backend, device, rank, world, cfg.timeout_minutes)
    failure = try_compile(device) if cfg.compile else ''  # None: it works
    if cfg.compile is True and failure:
        raise ValueError(f'compile=True was asked for, but torch.compile fails here: {failure}; use --compile=False')
    why_compile = failure or 'a trial worked' if cfg.compile == 'auto' else 'asked for'
    reasons = {'device': why_device, 'dtype': why_dtype, 'compile': why_compile}
    return Env(rank, world, device, dtype, failure is None, threads, reasons)


def compiled(model, cfg, env):
    """The model, compiled where that was chosen."""
    if not env.compile:
        return model
    if env.device.type == 'cpu' and model.num_params() > 10**7:
        # what products of the backward pass read, bf16 copies of weights before all, is computed again and not kept:
        # 0.88 of the memory of a 124M step in the same time, where one of 0.8M would take 1.02 of its time. A private
        # switch; its price on GPUs has not been measured
        importlib.import_module('torch._functorch.config').ban_recompute_materialized_backward = False
    return torch.compile(model, dynamic=False, mode=cfg.compile_mode)


# -----------------------------------------------------------------------------
# data: which tokens a step sees, as a pure function of the seed and the step


# -----------------------------------------------------------------------------
# optimizers


def learning_rate(step, cfg):
    """The learning rate of a step, from 0: warm-up, then cosine to min_lr, or constant and linear to min_lr."""
    end = cfg.max_iters if cfg.lr_decay_iters is None else cfg.lr_decay_iters
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step >= end:
        return cfg.min_lr
    if cfg.lr_schedule == 'cosine':
        progress = (step - cfg.warmup_iters) / (end - cfg.warmup_iters)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share = min(1.0, (end - step) / (cfg.decay_fraction * end))
    return cfg.min_lr + share * (cfg.learning_rate - cfg.min_lr)


def set_learning_rate(optimizers, lr, peak):
    """Every group follows the schedule in proportion to its own peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak'] * (lr / peak if peak else 0.0)


# -----------------------------------------------------------------------------
# the step

def add_up(tensors):
    """The sum of each tensor over all processes, in its place, by one reduction."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def train_step(model, params, loads, num_targets, optimizers, scaler, clip, world=1, stop=None, dropout=0.0):
    """
    One optimizer update of `params` over the micro-batches that `loads` load. num_targets: how many targets count over
    the global batch, of all processes; the loss is their mean, however unevenly masks fall on micro-batches.
    Returns (the summed loss, the gradient's norm before clipping, 1 if something was not finite and the update was
    skipped, how many processes wish to stop): 0-d tensors that nobody has waited for. A process alone that gets a
    signal, which `stop` tells, gives the step up, in which nothing has changed yet, and returns None.
    """
    loss_sum, stops = torch.zeros(2, device=params[0].device)
    for p in params:
        p.grad = None  # rather than zero: what backward gives back of the activations has room for it
    for load in loads:
        if world == 1 and stop and stop.by_signal():
            return None
        x, y, seed = load()
        if dropout:
            torch.manual_seed(seed)
        loss = model(x, y).sum()
        scaler.scale(loss / max(num_targets, 1)).backward()
        loss_sum.add_(loss.detach())
    grads = [p.grad for p in params]
    if world > 1:
        stops.fill_(float(bool(stop and stop())))
        add_up([*grads, loss_sum, stops])  # the other two ride along
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm(grads)
    found_inf = (~torch.isfinite(norm + loss_sum)).float()
    if clip:
        torch.nn.utils.clip_grads_with_norm_(params, clip, norm)
    # on Apple GPUs the fused kernel overlooks found_inf (seen in PyTorch's source, not run): there the host decides
    skip = params[0].device.type == 'mps' and bool(found_inf)
    for optimizer in () if skip else optimizers:
        optimizer.found_inf = found_inf
        optimizer.step()
    scaler.update()
    return loss_sum, norm, found_inf, stops


# -----------------------------------------------------------------------------
# evaluation


# -----------------------------------------------------------------------------
# checkpoints


# -----------------------------------------------------------------------------
# settings: flags, files, the machine's card, and on resume the checkpoint

MACHINE_CARDS = (  # the recipe when none is named: the first whose need of GPU memory, in GB, is met
    (40, 'config/gpt2_124m_fast.py'),
    (0, 'config/quickstart.py'),
)
# a resumed run keeps these, and being told otherwise is an error
SHAPE = {f.name for f in dataclasses.fields(GPTConfig)} - {'dropout', 'label_smoothing'}
BOUND = SHAPE | {'dataset', 'optimizer'}
# may be changed; the change is printed
ANNOUNCED = ('batch_size', 'gradient_accumulation_steps', 'learning_rate', 'muon_lr', 'embed_lr', 'min_lr', 'seed',
             'weight_decay', 'beta1', 'beta2', 'muon_momentum', 'grad_clip', 'decay_lr', 'lr_schedule', 'warmup_iters',
             'lr_decay_iters', 'decay_fraction', 'compile_mode', 'deterministic', 'loss_chunks')
# belong to this command and this machine, never to the checkpoint
OWN = ('out_dir', 'init_from', 'eval_only', 'profile', 'max_minutes', 'device', 'backend')


def card_for_machine(device):
    """(card, reason): the recipe card for what the machine, or the device that was asked for, has."""
    memory = 0
    if torch.cuda.is_available() and device.startswith(('auto', 'cuda')):
        memory = torch.cuda.get_device_properties(choose_device(device)[0]).total_memory / 1e9
    card = next(card for need, card in MACHINE_CARDS if memory >= need)
    return card, f'{memory:.0f} GB of GPU memory' if memory else 'no GPU'


def read_settings(argv):
    """(model settings, training settings, {name: place}, Resumed or None, what to say, whether batch_size=auto)."""
    argv = sys.argv[1:] if argv is None else argv
    settings = functools.partial(configure, GPTConfig, TrainConfig, about=__doc__)
    model_cfg, cfg, given, files = settings(argv=argv)
    said = []
    if not files and 'dataset' not in given and cfg.init_from == 'scratch':
        card, why = card_for_machine(cfg.device)
        here = os.path.dirname(os.path.abspath(__file__))
        argv = [os.path.join(here, card), *argv]
        model_cfg, cfg, given, files = settings(argv=argv)
        said.append(f'card: {card} ({why}; name one to choose another)')
    elif files:
        said.append(f'card: {" ".join(files)}')
    elif cfg.init_from == 'scratch':
        said.append("card: none, which means nanoGPT's defaults; for this machine there is "
                    f'{card_for_machine(cfg.device)[0]}')
    auto_batch = cfg.batch_size == 'auto'
    if auto_batch:
        cfg.batch_size = given.below['batch_size']
    out, resumed = RunDir(cfg.out_dir), None
    if restarted_by_torchrun(out):
        cfg.init_from = 'resume'
        said.append('torchrun restarted this run: resuming')
    if cfg.init_from == 'resume':
        if cfg.mirror_dir and not out.checkpoints() and RunDir(cfg.mirror_dir).checkpoints():
            raise ValueError(f'init_from=resume, but {cfg.out_dir} holds no checkpoint; its mirror does: go on there '
                             f'with --out_dir={cfg.mirror_dir}')
        resumed = find_latest(out)
        if auto_batch:  # the step is that of the run, and not of a card or a flag that is given again
            given = {k: v for k, v in given.items() if k not in ('batch_size', 'gradient_accumulation_steps')}
        said += [f'{why}; falling back to {resumed.path}' for why in resumed.damaged.values()]
        resume_settings(model_cfg, cfg, given, resumed.checkpoint, said)
    if given.get('max_iters') == '--max_iters' and given.get('max_epochs') != '--max_epochs':
        cfg.max_epochs = None  # of a card or a checkpoint: the flag is later, and means the same thing
    return model_cfg, cfg, given, resumed, said, auto_batch


def restarted_by_torchrun(out):
    """Whether this process is a later try at the very run whose checkpoint is here, not at one that was here before."""
    run_id = os.environ.get('TORCHELASTIC_RUN_ID', 'none')
    if os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') == '0' or run_id == 'none' or not out.checkpoints():
        return False
    return find_latest(out).checkpoint.get('run_id') == run_id


def resume_settings(model_cfg, cfg, given, checkpoint, said):
    """Takes the checkpoint's settings into model_cfg and cfg, but for what was given and is allowed to change."""
    foreign = 'state' not in checkpoint  # nanoGPT's, whose dtype and compile speak of another machine
    own = (*OWN, 'dtype', 'compile') if foreign else OWN
    resolved = dataclasses.asdict(config_from(checkpoint['model_args']).resolved())
    was = {**checkpoint['model_args'], **checkpoint.get('config', {}), **{name: resolved[name] for name in SHAPE}}
    wrong = []
    for settings in (model_cfg, cfg):
        for name, kind in get_type_hints(type(settings)).items():
            now = getattr(settings, name)
            if name not in was or name in own:
                continue
            if name not in given or (now is None and name in SHAPE):
                try:
                    setattr(settings, name, accept(was[name], kind))
                except ValueError as e:
                    wrong.append(f'the checkpoint has {name}={was[name]!r}: {e}; give --{name}')
            elif now != was[name]:
                if name in BOUND:
                    wrong.append(f'{given[name]}: {name}={now!r}, but the checkpoint has {was[name]!r}; it cannot '
                                 'change on resume (to start a new run from these weights: --init_from=PATH)')
                elif name in ANNOUNCED:
                    said.append(f'{name}: {was[name]!r} before, {now!r} from here on')
    if 'mirror_dir' not in given and cfg.mirror_dir and is_inside(cfg.out_dir, cfg.mirror_dir):
        cfg.mirror_dir = None
        said.append('mirror_dir: none, for this is the mirror of another run')
    wrong = wrong or model_cfg.problems() + cfg.problems()
    if wrong:
        raise ValueError('\n'.join(wrong))


# -----------------------------------------------------------------------------
# data and model, opened together because the one must fit the other


def build_model(model_cfg, cfg, given, meta, checkpoint):
    """The model on the CPU, from scratch, a checkpoint or pretrained weights. ValueError where settings contradict."""
    if cfg.init_from == 'scratch':
        size = meta['vocab_size']
        if not meta['foreign'] and size >= 4096:  # GPUs multiply multiples of 64 faster; on a few ids padding is waste
            size = -(-size // 64) * 64
        config = dataclasses.replace(model_cfg, vocab_size=model_cfg.vocab_size or size)
        if config.vocab_size < meta['vocab_size'] and not meta['foreign']:
            raise ValueError(f'vocab_size={config.vocab_size} is smaller than the {meta["vocab_size"]} ids of the '
                             f'tokenizer of {cfg.dataset}')
        torch.manual_seed(cfg.seed)
        return GPT(config)
    if checkpoint is not None:
        check_tokenizer(checkpoint.get('tokenizer'), meta)
        return GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model'], dropout=model_cfg.dropout,
                          label_smoothing=model_cfg.label_smoothing)
    args, weights, tokenizer = open_weights(cfg)
    check_tokenizer(tokenizer, meta)
    model = GPT.from_checkpoint(args, weights, **{k: getattr(model_cfg, k) for k in ('dropout', 'label_smoothing') if k in given})
    has = model.config
    for f in dataclasses.fields(GPTConfig):
        asked = getattr(model_cfg, f.name)
        shorter = f.name == 'block_size' and asked < has.block_size
        if f.name in given and asked is not None and asked != getattr(has, f.name) and not shorter:
            raise ValueError(f'{given[f.name]}: {f.name}={asked!r}, but {cfg.init_from} has '
                             f'{getattr(has, f.name)!r}; leave it out')
    if 'block_size' in given:
        model.crop_block_size(model_cfg.block_size)
    return model


# -----------------------------------------------------------------------------
# the run


@dataclass
class Run:
    """What the loop works with, put together by main."""
    cfg: TrainConfig
    settings: dict  # all of them, flat, as the checkpoint keeps them
    env: Env
    model: GPT
    forward: torch.nn.Module  # the model, compiled where that was chosen
    batches: Batches
    val: Split | Mixture
    byte_counts: np.ndarray | None
    optimizers: list
    scaler: torch.amp.GradScaler
    params: list
    state: RunState
    out: RunDir
    log: Log
    context: dict  # what a checkpoint tells of tokenizer, data and machine
    stop: StopRequest | None = None
    mirror: Mirror | None = None
    tokenizer: Tokenizer | None = None  # where samples are asked for
    failed_saves: int = 0
    diverged_at: int | None = None  # a step; acted upon where all processes are at the same one


def evaluate_both(run, stop=None):
    """Validation and training loss: (line for people, numbers), or None where stop() became true meanwhile."""
    cfg, env = run.cfg, run.env
    num_val, num_train = eval_windows(cfg, run.val.T)
    began = time.perf_counter()
    evaluation = functools.partial(evaluate_any, run.forward, batch=run.batches.micro_batch, env=env,
                                   stop=stop)
    val = evaluation(run.val, num_val, byte_counts=run.byte_counts)
    train = val and evaluation(run.batches.split, num_train)
    if train is None:
        return None
    took, perplexity = time.perf_counter() - began, math.exp(min(val['loss'], 700))
    bpb = '' if val['bpb'] is None else f', {val["bpb"]:.4f} bits per byte'
    text = (f'step {run.state.iter_num}: val loss {val["loss"]:.4f} +- {val["stderr"]:.4f}, perplexity '
            f'{perplexity:.2f}{bpb} ({val["tokens"]:,} tokens); train loss {train["loss"]:.4f}; {took:.1f} s')
    losses = val.get('losses', {})
    text += ''.join(f', {name} {loss:.4f}' for name, loss in losses.items())
    return text, {'step': run.state.iter_num, **{f'val_{k}': val[k] for k in ('loss', 'stderr', 'bpb', 'tokens')},
                  'val_perplexity': perplexity, 'train_loss': train['loss'], 'eval_seconds': took,
                  **{f'val_loss_{name}': loss for name, loss in losses.items()}}


def evaluate_and_save(run, may_stop=True):
    """
    Evaluates, logs it, and saves what is the best so far, which it returns; a loss that is NaN never is, and ValueError
    ends a run that had no other. A signal cuts it short if it may, and leaves it for the next process.
    """
    found = evaluate_both(run, run.stop.by_signal if may_stop else None)
    run.state.evaluation_left = found is None
    if found is None:
        return False
    text, numbers = found
    run.log.write(text, **numbers)
    best = numbers['val_loss'] < run.state.best_val_loss
    if best:
        save_best(run, numbers['val_loss'])
    elif run.state.iter_num >= run.cfg.max_iters and not math.isfinite(run.state.best_val_loss):
        raise ValueError(f'step {run.state.iter_num}: no validation loss of this run was finite; it diverged, so start '
                         'anew with a lower learning_rate')
    return best


def save_best(run, loss):
    """best.pt: weights, shape and tokenizer, which is what sampling needs and a third of the size."""
    before, run.state.best_val_loss = run.state.best_val_loss, loss
    if run.env.rank:
        return
    without = ('optimizer', 'muon', 'scaler', 'state')
    best = {name: part for name, part in checkpoint_of(run).items() if name not in without}
    try:
        save_checkpoint(run.out / 'best.pt', best)
    except ValueError as e:
        if run.state.iter_num >= run.cfg.max_iters:
            raise
        run.state.best_val_loss = before  # so that best.pt is the best of those it could hold
        run.env.print_once(f'{e}; training goes on')


def write_sample(run):
    """
    What the model writes by now, into the log. The seed is of this step, and of nobody else: neither dropout nor the
    order of the data notices. On one process; the others wait for it at the next reduction.
    """
    if run.env.rank:
        return
    cfg, tokenizer, was_training = run.cfg, run.tokenizer, run.model.training
    eot, prompt = tokenizer.eot, prompt_ids(tokenizer, cfg.sample_prompt)
    run.model.eval()
    drawn = generate(run.model, [prompt], cfg.sample_tokens, stop={eot}, temperature=0.8, top_k=200,
                               seeds=[micro_seed(cfg.seed, run.state.iter_num, 0)], vocab=tokenizer.n_vocab)
    try:
        ids = [token for told in drawn for _, token, _ in told if token != eot]
        text = cfg.sample_prompt + tokenizer.decode(ids).decode('utf-8', 'replace')
    except ValueError as e:  # logits that are not finite: what becomes of such a run is for its losses to decide
        text = f'nothing: {e}'
    run.model.train(was_training)
    run.log.write(f'--- step {run.state.iter_num} writes:\n{text}\n---', step=run.state.iter_num, sample=text)


def save(run, final=False):
    """
    Saves the latest checkpoint. A disk that is full for a while does not end the run: it goes on to the next save, and
    gives up after three in a row. The final save of a process must succeed.
    """
    if run.env.rank:
        return
    checkpoint = checkpoint_of(run)
    try:
        run.out.save(checkpoint, run.cfg.keep_last)
    except ValueError as e:
        run.failed_saves += 1
        if run.failed_saves == 3 or final:
            raise
        run.env.print_once(f'{e}; training goes on')
    else:
        run.failed_saves = 0
        if run.mirror:
            run.mirror.update()


def give_up_or_roll_back(run):
    """
    After a divergence: ValueError, or back to the last good checkpoint, from where the data of the steps in between is
    left out. One that save_interval or an evaluation asked for comes first: a run that was stopped and resumed in
    between, and has others, goes back to the same one and stays exact.
    """
    cfg, state, here = run.cfg, run.state, run.diverged_at
    spiked = f' or a spike ({state.spikes_in_a_row})' if state.spikes_in_a_row else ''
    what = f'step {here}: loss or gradient was not finite{spiked} for {MAX_BAD_STEPS} steps in a row'
    if cfg.on_divergence == 'stop':
        raise ValueError(f'{what}; those steps changed no weight. Lower the learning rate, and '
                         'with dtype=float16 try bfloat16 or float32; go on with --init_from=resume, or let it go '
                         'back by itself with --on_divergence=rollback')

    def good(checkpoint):
        return not checkpoint.get('state', {}).get('bad_in_a_row')

    def planned(checkpoint):
        return good(checkpoint) and any(n and checkpoint['iter_num'] % n == 0
                                        for n in (cfg.save_interval, cfg.eval_interval))
    resumed = run.out.checkpoints() and (find_latest(run.out, planned) or find_latest(run.out, good))
    if not resumed:
        raise ValueError(f'{what}, and there is no checkpoint from before to go back to; lower the learning rate, or '
                         'save earlier with --save_interval')
    back = restore(resumed.checkpoint, run.model, run.optimizers, run.scaler)
    if sum(at == back.iter_num for at, _ in state.skips) >= MAX_ROLLBACKS:
        raise ValueError(f'{what}, {MAX_ROLLBACKS + 1} times after step {back.iter_num}, each time with other data; '
                         'lower the learning rate and go on with --init_from=resume')
    left_out = run.batches.place(here) - run.batches.place(back.iter_num)
    back.skips = [*state.skips, [back.iter_num, left_out]]
    vars(state).update(vars(back))
    run.batches.skip(state.skips)
    run.diverged_at = None
    run.env.sum(np.zeros(1))  # all have read it before it is renamed
    if run.env.rank == 0:
        run.out.promote(resumed)
    run.log.go_back(state)
    run.log.write(f'{what}: back to step {back.iter_num}, leaving out the data of {left_out} steps', step=back.iter_num,
                  rolled_back_from=here)


def train(run):
    """The loop. Returns the exit code: 0, or 128 + the signal that ended it."""
    cfg, env, state, batches, stop = run.cfg, run.env, run.state, run.batches, run.stop
    lagging = env.world > 1 and env.device.type == 'cuda'
    pending, stop_flag, saved_at = [], lambda: 0.0, time.monotonic()
    first_step = state.iter_num

    if state.evaluation_left:
        evaluate_and_save(run)
        if state.evaluation_left:
            return stop.exit_code()
        save(run)
    gc.collect()
    gc.freeze()  # what there is by now stays; nanochat saw pauses of half a second while it was looked through
    mark, mark_step, mark_waited = time.perf_counter(), state.iter_num, 0.0
    while state.iter_num < cfg.max_iters:
        lr = learning_rate(state.iter_num, cfg)
        set_learning_rate(run.optimizers, lr, cfg.learning_rate)
        num_targets, loads = batches.step(state.iter_num)
        told = train_step(run.forward, run.params, loads, num_targets, run.optimizers, run.scaler, cfg.grad_clip,
                          env.world, stop, run.model.config.dropout)
        if told is None:  # a signal in the midst of a step, of which nothing is kept
            collect_steps(run, pending)
            if state.iter_num > first_step:
                save(run, final=True)
            return stopped(run)
        loss, norm, bad, stops = told
        pending.append((loss, bad, num_targets))
        state.iter_num += 1
        state.tokens_seen += batches.global_batch * run.val.T
        last_flag, stop_flag = stop_flag, read_later(stops) if env.world > 1 else stop
        stopping = bool((last_flag if lagging else stop_flag)())

        step, last = state.iter_num, state.iter_num == cfg.max_iters
        log_due = step == 1 or step % cfg.log_interval == 0 or last
        eval_due = last or step % cfg.eval_interval == 0
        planned = cfg.save_interval is not None and step % cfg.save_interval == 0
        # what all processes come to at the same step; their clocks differ
        together = log_due or eval_due or planned or stopping or step % 50 == 0
        save_due = stopping or planned or time.monotonic() - saved_at > 60 * cfg.save_minutes
        if together or save_due:
            collect_steps(run, pending)  # waits for the device
        if together and run.diverged_at is not None:
            give_up_or_roll_back(run)
            mark, mark_step, mark_waited = time.perf_counter(), state.iter_num, batches.waited
            saved_at = time.monotonic()
            continue
        now = time.perf_counter()
        if log_due:
            log_step(run, lr, norm.item(), now - mark, step - mark_step, batches.waited - mark_waited,
                     first=mark_step == first_step)
            mark, mark_step, mark_waited = now, step, batches.waited

        best, state.evaluation_left = False, eval_due and (stopping or last)
        if last:
            save(run)  # the evaluation may take longer than whoever stops us waits
        if eval_due and (last or not stopping):
            best = evaluate_and_save(run, may_stop=not last)
            stopping = stopping or state.evaluation_left
            save_due = save_due or best or last or stopping or cfg.always_save_checkpoint
        if cfg.sample_interval and step % cfg.sample_interval == 0:
            write_sample(run)
        # checkpoints of a run that is diverging would push out the one to go back to
        diverging = run.diverged_at is not None or state.bad_in_a_row > 0
        if save_due and (stopping or last or not diverging):
            if cfg.on_divergence == 'rollback' and (planned or eval_due) and not state.bad_in_a_row:
                run.out.spare = step
            save(run, final=stopping or last)
            saved_at = time.monotonic()
        elif save_due:
            saved_at = -math.inf  # with the first step that is well
        mark += time.perf_counter() - now  # speed is of the steps alone
        if stopping and not last:
            env.sum(np.zeros(1))  # torchrun gives all 30 seconds from when the first has ended
            return stopped(run)
    memory = peak_memory(env.device)
    env.print_once(f'done: best val loss {state.best_val_loss:.4f}' + (f', peak memory {memory / 1e6:,.0f} MB' if memory
                else '') + f'; see what it writes: python sample.py --out_dir={shlex.quote(cfg.out_dir)}')
    return 0


def stopped(run):
    """Says how to go on; returns the exit code."""
    if run.state.iter_num:
        run.env.print_once(f'stopped at step {run.state.iter_num} and saved; go on with: python train.py '
                        f'--init_from=resume --out_dir={shlex.quote(run.cfg.out_dir)}')
    else:
        run.env.print_once('stopped before step 1: there is nothing to save')
    return run.stop.exit_code()


def profile_steps(run, warm=5, timed=20):
    """Prints where the time of a few warm steps goes, and writes out_dir/trace.json for chrome://tracing."""
    from torch.profiler import ProfilerActivity, profile
    cfg, env, batches = run.cfg, run.env, run.batches
    on_gpu = env.device.type == 'cuda'

    def steps(first, number):
        began = time.perf_counter()
        for step in range(first, first + number):
            num_targets, loads = batches.step(step)
            set_learning_rate(run.optimizers, learning_rate(step, cfg), cfg.learning_rate)
            loss, *_ = train_step(run.forward, run.params, loads, num_targets, run.optimizers, run.scaler,
                                  cfg.grad_clip, env.world, dropout=run.model.config.dropout)
        loss.item()  # waits for the device
        return (time.perf_counter() - began) / number
    steps(0, warm)
    seconds, waited = steps(warm, timed), batches.waited
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        steps(warm + timed, 3)
    if env.rank:
        return
    tokens = batches.global_batch * run.val.T
    print(profiler.key_averages().table(sort_by='self_cuda_time_total' if on_gpu else 'self_cpu_time_total',
                                        row_limit=25, max_name_column_width=70))
    os.makedirs(cfg.out_dir, exist_ok=True)
    profiler.export_chrome_trace(os.path.join(cfg.out_dir, 'trace.json'))
    print(f'{seconds * 1000:.1f} ms a step without the profiler, {tokens / seconds:,.0f} tok/s, data '
          f'{waited / (seconds * (warm + timed)):.1%}; the table is of 3 steps, and {cfg.out_dir}/trace.json is for '
          'chrome://tracing or perfetto')


def main(argv=None):
    model_cfg, cfg, given, resumed, said, auto_batch = read_settings(argv)
    datasets = open_datasets(cfg)
    env = setup(cfg)
    try:
        run = build_run(model_cfg, cfg, given, datasets, env, resumed, auto_batch, said)
        announce(run, model_cfg, given, said, datasets[0][2], resumed)
        if cfg.eval_only:
            env.print_once(evaluate_both(run)[0])
        elif cfg.profile:
            profile_steps(run)
        elif run.state.iter_num >= cfg.max_iters and not run.state.evaluation_left:
            env.print_once(f'nothing to do: the run is at step {run.state.iter_num:,} of {cfg.max_iters:,}')
        else:
            take_folder(run, resumed)
            return train_and_close(run)
        return 0
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        raise ValueError(f'the model does not fit the memory of {env.device} ({first_line(e)}); n_layer, n_embd, '
                         'block_size or batch_size must be smaller') from None
    finally:
        gc.unfreeze()
        if env.world > 1:
            dist.destroy_process_group()
            # torchrun ends all when one has ended; to a Python that is shutting down that would be a death by signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_run(model_cfg, cfg, given, datasets, env, resumed, auto_batch, said):
    """The Run, ready but for its folder. Adds to `said` what announce() is to tell."""
    meta, checkpoint = datasets[0][2], resumed.checkpoint if resumed else None
    in_turn = cfg.init_from not in ('scratch', 'resume')  # rank 0 goes first, and downloads for all
    if in_turn and env.rank:
        env.sum(np.zeros(1))
    model = build_model(model_cfg, cfg, given, meta, checkpoint)
    if in_turn and not env.rank:
        env.sum(np.zeros(1))
    T = model.config.block_size
    splits = {name: open_split(datasets, name, T) for name in ('train', 'val')}
    if env.rank == 0:
        for part in splits['train'].splits + splits['val'].splits:
            part.check_ids(model.config.vocab_size)
    context = context_of(datasets, splits, env)
    if checkpoint is not None:
        said += compare_context(checkpoint, context)
    tokenizer = tokenizer_from(meta['tokenizer']) if cfg.sample_interval else None
    if tokenizer:
        tokenizer.begin = context.get('bos')
        prompt_ids(tokenizer, cfg.sample_prompt)  # what it cannot read is said now, not in mid-run

    stop = None if cfg.eval_only or cfg.profile else StopRequest(cfg.max_minutes)
    model.to(env.device)
    model.compute_dtype = env.dtype
    forward = compiled(model, cfg, env)
    if auto_batch and not cfg.eval_only:
        said.append(choose_batch_size(model, splits['train'], env, cfg))
    batches = Batches(splits['train'], cfg, env)
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, batches.micro_batch * T, model.config.vocab_size,
                                           device_memory(env.device))
    if cfg.max_epochs is not None:
        per_epoch = windows_per_epoch(splits['train'].num_tokens, T)
        cfg.max_iters = math.ceil(cfg.max_epochs * per_epoch / batches.global_batch)
        said.append(f'max_epochs={cfg.max_epochs:g}: {cfg.max_iters:,} steps')
    optimizers = [] if cfg.eval_only else build_optimizers(model, cfg, env)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    state = RunState()
    if resumed:
        state = state_from(checkpoint) if cfg.eval_only else restore(checkpoint, model, optimizers, scaler)
    batches.skip(state.skips)
    check_agreement(model, state, env)
    settings = {**dataclasses.asdict(model.config), **dataclasses.asdict(cfg)}
    if resumed:  # where the weights first came from
        settings['init_from'] = str(checkpoint.get('config', {}).get('init_from', 'scratch'))
    return Run(cfg, settings, env, model, forward, batches, splits['val'],
               byte_table(meta, model.config.vocab_size, env), optimizers, scaler, list(model.parameters()), state,
               RunDir(cfg.out_dir), None, context, stop, tokenizer=tokenizer)


def take_folder(run, resumed):
    """Makes out_dir, and the mirror, this run's own, and opens its log."""
    cfg, env = run.cfg, run.env
    if env.rank == 0:
        run.mirror = cfg.mirror_dir and Mirror(run.out, cfg.mirror_dir)
        repeats = [run.model.config, dataclasses.replace(cfg, init_from=run.settings['init_from'])]
        text = as_file(repeats, 'all settings of the run in this folder; as a config file it repeats the run')
        for line in run.out.open(resumed is None, text):
            env.print_once(line)
        if run.mirror:
            before = resumed and resumed.checkpoint.get('config', {}).get('mirror_dir')
            run.mirror.open(ours=before and os.path.realpath(str(before)) == os.path.realpath(cfg.mirror_dir))
        if resumed:
            run.out.promote(resumed)
    run.log = Log(run.out, cfg, run.settings, env, run.state if resumed else None)


def train_and_close(run):
    """train(), and whatever comes of it the log and the mirror are closed. Returns the exit code."""
    patience = 20  # seconds that a mirror gets for what is left; torchrun kills 30 seconds after a signal
    try:
        code = train(run)
        patience = 20 if code else 300
        return code
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        if isinstance(e, MemoryError):  # numpy's, of the windows; torch has its own
            raise ValueError(f'a step of {run.batches.global_batch:,} sequences, batch_size x '
                             f'gradient_accumulation_steps, does not fit the memory: {first_line(e)}') from None
    finally:
        run.log.close()
        if run.mirror:
            run.mirror.close(patience)
    raise ValueError(memory_advice(run))  # out here, where the failed step's tensors are gone


if __name__ == '__main__':
    if 'TORCHELASTIC_RUN_ID' in os.environ:  # torchrun's summary shows the traceback of the process that failed first
        from torch.distributed.elastic.multiprocessing.errors import record
        call_main = record(call_main)
    call_main(main)
