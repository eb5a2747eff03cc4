"""
The complete training loop: precision, accumulation, compilation, data parallelism and step.

    $ python train.py                                          # a recipe card chosen by the hardware
    $ python train.py config/shakespeare_char.py --device=cpu  # a recipe card, then flags
    $ python train.py --init_from=resume                       # resume the run in out_dir
    $ torchrun --standalone --nproc_per_node=8 train.py        # all GPUs of a node

A step is one optimizer update over batch_size x gradient_accumulation_steps sequences, on any number of
processes. Everything random (the order of the data, dropout) is a function of the seed, the step and the
micro-batch. A killed run therefore resumes bit for bit, and a checkpoint holds only tensors and counters.
"""

if __name__ == '__main__':  # before torch, whose import takes seconds
    import hotloop.system.early
    from configurator import call_main
    call_main(hotloop.system.early.check_early, 'model.py', 'hotloop/weights/lora.py', 'train.py')

import dataclasses
import functools
import gc
import importlib.util
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import call_main, check_problems, configure, give_way
from hotloop.data.dataset import byte_table, check_tokenizer, open_datasets
from hotloop.data.tokenizer import Tokenizer
from hotloop.system.cards import card_for_machine, needs_card
from hotloop.system.check import check
from hotloop.system.device import EVALUATION_PAYS, choose_compile, choose_device, choose_dtype
from hotloop.system.distributed import DelayedFlag, Env, StopRequest, check_same_step, open_process_group
from hotloop.system.files import is_inside
from hotloop.system.host import threads_for
from hotloop.system.memory import (
    choose_batch_size,
    choose_loss_chunks,
    memory_advice,
    out_of_memory,
    set_batch_size,
)
from hotloop.training import depth, ladder, patience, resume
from hotloop.training.announce import announce
from hotloop.training.checkpoint import OPTIMIZERS, RunState, context_of
from hotloop.training.dataloader import Batches, Split, check_lengths, share_batch
from hotloop.training.deadline import Deadline, look_at_clock, report_end, set_budget
from hotloop.training.divergence import collect_steps, divergence_message
from hotloop.training.evaluate import evaluate_both
from hotloop.training.footprint import fits_sharded
from hotloop.training.forecast import dry_run, model_args_of
from hotloop.training.logger import Log, StepTimer, log_done, log_evaluation, log_step
from hotloop.training.mixture import Mixture, open_split
from hotloop.training.optim import build_optimizers
from hotloop.training.parallel import NO_BUFFERS, micro_batch, set_blocks
from hotloop.training.report import report
from hotloop.training.run_dir import Mirror, Resumed, RunDir
from hotloop.training.samples import sampling_tokenizer, write_sample
from hotloop.training.saves import (
    evaluate_missing,
    finish_save,
    save,
    save_is_late,
    stop_run,
    take_folder,
    track_best,
)
from hotloop.training.schedule import (
    learning_rate,
    schedule_problems,
    set_learning_rate,
    set_length,
    what_is_due,
)
from hotloop.training.shard import is_sharded, local, shard_model
from hotloop.weights.load import adapt_shape, check_start, open_start
from hotloop.weights.lora import LoRAConfig, add_adapters, check_lora, describe_adapters, trainable
from model import GPT, GPTConfig, config_from


@dataclass
class TrainConfig:
    # --- run
    out_dir: str = 'out'  # checkpoints, log and config of the run; an older run in it is moved aside
    init_from: str = 'scratch'  # scratch, resume, auto (either), gpt2 (-medium, ...), a path, or a hub model
    eval_only: bool = False  # evaluate once and exit; no run is written
    check: bool = False  # report what this machine can do and exit
    dry_run: bool = False  # forecast memory, time and disk and exit; nothing is downloaded or written
    report: str | None = None  # draw the curves of these run folders (a,b) in one HTML file and exit
    seed: int = 1337  # for initial weights, data order and dropout
    max_iters: int = 600000  # total steps, including those before a resume
    max_epochs: float | None = None  # passes over the data; replaces max_iters
    max_minutes: float | None = None  # save and stop after this long, as on SIGTERM
    time_budget: float | None = None  # minutes for the run, which then sets decay_start and max_iters itself
    depth: int | None = None  # layers of a modern model: sets shape, batch and rates
    # --- data
    dataset: str = 'openwebtext'  # folder in data_dir, made by prepare.py or nanoGPT; a:0.7,b:0.3: a mixture
    data_dir: str = 'data'  # folder that contains the datasets
    data_on_device: bool | Literal['auto'] = 'auto'  # training data in GPU memory; auto: up to 10% of it
    document_mask: bool = False  # attention stays within documents, which end with the end-of-text id
    pack_rows: bool = False  # windows of complete rows of instruction data, which do not see one another
    batch_size: int | Literal['auto'] = 12  # largest micro-batch, in sequences; auto: what fits
    gradient_accumulation_steps: int = 5 * 8  # micro-batches per step, over all processes
    # --- optimizer
    optimizer: Literal['adamw', 'adamw8bit', 'muon'] = 'adamw'  # muon: Muon in blocks, AdamW elsewhere
    learning_rate: float = 6e-4  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon
    embed_lr: float | None = None  # peak rate of the token embedding with muon; None: learning_rate
    weight_decay: float = 1e-1  # on matrices only
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    muon_momentum: float = 0.95  # of Muon
    grad_clip: float = 1.0  # maximum global gradient norm; 0: off
    # --- schedule
    decay_lr: bool = True  # False: learning_rate in every step, without a warmup, as in nanoGPT
    lr_schedule: Literal['cosine', 'linear', 'onecycle'] = 'cosine'  # see hotloop/training/schedule.py
    warmup_iters: int = 2000  # warmup steps from 0 (onecycle: from min_lr) to the peak rate
    warmup_fraction: float | None = None  # the same as a fraction of max_iters; replaces warmup_iters
    lr_decay_iters: int | None = None  # step at which the decay ends; None: max_iters
    min_lr: float = 6e-5  # final learning_rate of the decay; the other rates decay in proportion
    decay_fraction: float = 0.5  # final fraction of the run in which lr_schedule='linear' decays
    decay_start: int | None = None  # step at which that decay begins; None: by decay_fraction
    # --- evaluation and logging
    eval_interval: int = 2000  # steps between evaluations; the last step is always evaluated
    eval_tokens: int | None = 2**20  # maximum validation tokens of an evaluation; None: all
    eval_iters: int | None = None  # batches per split, as in nanoGPT; replaces eval_tokens
    patience: int | None = None  # stop after this many evaluations in a row without a lower loss; None: off
    log_interval: int = 1  # steps between log lines
    sample_interval: int | None = None  # steps between samples in the log; None: no samples
    sample_prompt: str = '\n'  # prompt of these samples
    sample_tokens: int = 100  # length of these samples
    tensorboard: bool = False  # also log to TensorBoard, in out_dir/tensorboard
    wandb_log: bool = False  # also log to Weights & Biases
    wandb_project: str = 'hotloop'  # Weights & Biases project
    wandb_run_name: str | None = None  # Weights & Biases run name; None: out_dir
    # --- checkpoints
    always_save_checkpoint: bool = True  # save after each evaluation; False: only if the loss improved
    save_interval: int | None = None  # also save every N steps; None: off
    save_minutes: float = 15.0  # also save at least this often
    keep_last: int = 2  # number of checkpoints to keep, including the latest
    mirror_dir: str | None = None  # a second folder, such as a mounted drive, to which checkpoints are copied
    # --- machine
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first available
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # compute dtype; weights are float32
    compile: bool | Literal['auto'] = 'auto'  # torch.compile; auto: if it works and pays
    compile_mode: Literal['default', 'max-autotune-no-cudagraphs'] = 'default'  # torch.compile mode
    loss_chunks: int | Literal['auto'] = 'auto'  # compute head and loss in parts: less memory, slower
    recompute: Literal['none', 'selective', 'full'] = 'none'  # recompute blocks; selective: except attention
    shard: Literal['none', 'optimizer', 'full'] = 'none'  # divide optimizer states; full: weights too
    threads: int | None = None  # CPU threads per process; None: OMP_NUM_THREADS, or its share of the cores
    deterministic: bool | Literal['auto'] = 'auto'  # bit-identical runs; auto: on CPUs
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # torch.distributed backend
    timeout_minutes: float = 10.0  # how long a process waits for the others before it gives up

    def problems(self):
        """The problems with the settings, one sentence each."""
        wrong = []
        above_0 = ('max_iters', 'max_epochs', 'batch_size', 'gradient_accumulation_steps', 'eval_interval',
                   'eval_tokens', 'eval_iters', 'log_interval', 'sample_interval', 'sample_tokens',
                   'save_interval', 'loss_chunks', 'threads', 'patience', 'depth', 'timeout_minutes')
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int | float) and value < 0:
                wrong.append(f'{name}={value} must not be negative')
            if name in above_0 and value == 0:
                wrong.append(f'{name}=0 must be above 0')
            if name in ('beta1', 'beta2', 'muon_momentum') and value >= 1:
                wrong.append(f'{name}={value} must be at least 0 and below 1')
        wrong += schedule_problems(self)
        if self.seed >= 2**63:
            wrong.append(f'seed={self.seed} must be below 2**63')
        if self.keep_last < 2:
            wrong.append(f'keep_last={self.keep_last} must be at least 2, in case one file is damaged')
        for name in ('out_dir', 'mirror_dir'):
            path = getattr(self, name)
            if path is not None and (not path or '\0' in path):
                wrong.append(f'{name}={path!r} is not a valid folder name')
        if not wrong and self.mirror_dir and is_inside(self.out_dir, self.mirror_dir):
            wrong.append(f'out_dir={self.out_dir!r} lies inside mirror_dir={self.mirror_dir!r}')
        if os.path.exists(self.init_from) and is_inside(self.init_from, self.out_dir) and not self.eval_only:
            wrong.append(f'init_from={self.init_from!r} would be moved aside with out_dir; choose another')
        if self.pack_rows and self.document_mask:
            wrong.append('pack_rows=True keeps rows apart already; remove document_mask=True')
        if self.pack_rows and self.data_on_device is True:
            wrong.append('pack_rows=True puts windows together on the host; remove data_on_device=True')
        if self.shard != 'none' and self.optimizer == 'adamw8bit':
            wrong.append(f'shard={self.shard!r} divides the states of adamw and muon, not of adamw8bit')
        if self.optimizer == 'adamw8bit' and importlib.util.find_spec('bitsandbytes') is None:
            wrong.append("optimizer='adamw8bit' needs the package bitsandbytes: pip install bitsandbytes")
        for name, package in (('wandb_log', 'wandb'), ('tensorboard', 'tensorboard')):
            if getattr(self, name) and importlib.util.find_spec(package) is None:
                wrong.append(f'{name}=True needs {package}: pip install {package}, or --{name}=False')
        return wrong


PAIRS = ('max_iters', 'max_epochs'), ('warmup_iters', 'warmup_fraction'), ('eval_tokens', 'eval_iters')


# -----------------------------------------------------------------------------
# settings from recipe cards, flags and, on resume, the checkpoint

SHAPE = {f.name for f in dataclasses.fields(GPTConfig)} - {'dropout', 'label_smoothing'}
ADAPTERS = {f.name for f in dataclasses.fields(LoRAConfig)} - {'lora_dropout'}
BOUND = SHAPE | ADAPTERS | {'dataset', 'optimizer', 'depth'}  # a resumed run cannot change these


@dataclass
class Settings:
    """The settings of a command line."""
    model: GPTConfig
    lora: LoRAConfig
    train: TrainConfig
    given: dict  # {name: place} of settings in a file or a flag
    resumed: Resumed | None
    notes: list  # lines to print once
    auto_batch: bool  # batch_size=auto: build_run() finds the largest micro-batch
    choose_depth: bool  # with a time budget: the ladder chooses the depth, or times the steps of a given one


def read_settings(argv=None):
    """The Settings of a command line. ValueError if they contradict each other or the checkpoint."""
    argv = sys.argv[1:] if argv is None else argv
    read = functools.partial(configure, GPTConfig, LoRAConfig, TrainConfig, about=__doc__)
    model_cfg, lora, cfg, given, files = read(argv=argv, check=False)
    notes, base = [], {}
    if cfg.init_from == 'auto':
        argv = argv + resume.resolve_auto(cfg, read(argv=files, check=False)[2].init_from, notes)
        model_cfg, lora, cfg, given, files = read(argv=argv, check=False)
    if cfg.init_from != 'resume':  # otherwise with the settings of the checkpoint, below
        check_problems([model_cfg, lora, cfg])
    if files:
        notes.append(f'card: {" ".join(files)}')
    on_ladder = not files and depth.applies(cfg, given)
    if not files and (on_ladder or needs_card(cfg, given)):
        card, why = card_for_machine(cfg.device)
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), card)
        if not on_ladder:
            notes.append(f'card: {card} ({why}); name a card to choose another')
            files, argv = [path], [path, *argv]
            model_cfg, lora, cfg, given, _ = read(argv=argv)
        elif 'dataset' not in given:
            cfg.dataset = read(argv=[path])[2].dataset
    resumed = resume.find_resumed(cfg, notes)
    if resumed:
        shape = dataclasses.asdict(config_from(resumed.checkpoint['model_args']).resolved())
        base = resume.settings_of(resumed.checkpoint, {name: shape[name] for name in SHAPE})
        base = {**dataclasses.asdict(LoRAConfig()), **base}  # earlier versions had no adapters
        if base.get('mirror_dir') and is_inside(cfg.out_dir, base['mirror_dir']):
            base['mirror_dir'] = None
            notes.append('mirror_dir: off, because out_dir is the mirror of the run')
        model_cfg, lora, cfg, given, _ = read(argv=argv, base=base)
        cfg.init_from = 'resume'
    auto_batch = cfg.batch_size == 'auto'
    if auto_batch and resumed:
        notes += resume.keep_batch(cfg, given, base)
    elif auto_batch:  # with the global batch of the config files
        _, _, below, by_file, _ = read(argv=files, check=False)  # flags may mend what is wrong in them
        cfg.batch_size = below.batch_size
        if 'batch_size' not in by_file or cfg.batch_size == 'auto':
            cfg.batch_size = TrainConfig.batch_size
            del given['batch_size']  # a depth has its own
    give_way(cfg, given, PAIRS)
    world = int(os.environ.get('WORLD_SIZE', '1'))
    if not resumed and (on_ladder or cfg.depth is not None):
        cfg.depth = cfg.depth or ladder.DEPTHS[0]  # until choose_depth()
        depth.set_depth(cfg.depth, model_cfg, cfg, given, world)
        check_problems([cfg])
    set_budget(cfg, given, resumed and resumed.checkpoint, notes)
    if resumed:
        bound = BOUND
        if resume.is_renamed(resumed.checkpoint, cfg.dataset):  # compare_context() identifies the data
            bound = BOUND - {'dataset'}
        notes += resume.compare_settings([model_cfg, lora, cfg], given, base, bound)
    if lora.lora_rank:
        check_lora(lora, cfg)
    share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, world)  # raises before the processes meet
    times_steps = on_ladder or (cfg.depth is not None and 'muon_lr' not in given)  # its rate depends on them
    return Settings(model_cfg, lora, cfg, given, resumed, notes, auto_batch, times_steps and not resumed
                    and cfg.time_budget is not None and not cfg.eval_only)


# -----------------------------------------------------------------------------
# setup: device, precision, processes, compilation

def setup(cfg):
    """Chooses device, dtype and compilation, and joins the process group. ValueError if cfg is impossible."""
    rank, world = int(os.environ.get('RANK', '0')), int(os.environ.get('WORLD_SIZE', '1'))
    device, why_device = choose_device(cfg.device, int(os.environ.get('LOCAL_RANK', '0')))
    dtype, why_dtype = choose_dtype(cfg.dtype, device, training=True)
    if cfg.deterministic is True or (cfg.deterministic == 'auto' and device.type == 'cpu'):
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # read by cuBLAS when it starts
        torch.set_deterministic_debug_mode('error')  # use_deterministic_algorithms() imports Inductor
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads uninitialized memory
    threads = cfg.threads or threads_for(int(os.environ.get('LOCAL_WORLD_SIZE', '1')))
    torch.set_num_threads(threads)
    if cfg.backend == 'nccl' and device.type != 'cuda' and world > 1:
        raise ValueError(f'backend=nccl needs GPUs, and the device is {device.type}; use --backend=gloo')
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32; Inductor's autotuning fails under the newer switch
    store = None
    if world > 1:
        store = open_process_group(cfg.backend, device, rank, world, cfg.timeout_minutes)
    compiles, why_compile = choose_compile(cfg.compile, device, cfg.time_budget)
    if compiles and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)  # also sets Inductor's own switch
    if cfg.time_budget is not None:
        cfg.compile = compiles  # a resumed run and config.py do not choose again
    reasons = {'device': why_device, 'dtype': why_dtype, 'compile': why_compile}
    return Env(rank, world, device, dtype, compiles, threads, reasons, None, store, cfg.timeout_minutes)


def wrap(model, cfg, env):
    """(the model for evaluations, the model for training), compiled and data parallel if env says so."""
    if env.compile and env.device.type == 'cpu' and model.num_params() > 10**7:
        # recompute inputs of matrix products in the backward pass, such as bf16 copies of weights:
        # 0.88 of the memory of a 124M step in the same time. A private option, not measured on GPUs
        functorch = importlib.import_module('torch._functorch.config')
        functorch.ban_recompute_materialized_backward = False
    set_blocks(model, cfg.recompute, cfg.compile_mode if env.compile and env.world > 1 else None)
    if env.world == 1:
        forward = torch.compile(model, dynamic=False, mode=cfg.compile_mode) if env.compile else model
        pays = cfg.time_budget is None or cfg.time_budget >= EVALUATION_PAYS
        return (forward if pays else model), forward
    if cfg.shard != 'none':
        shard_model(model, cfg.shard, env)
        return model, model
    device_ids = [env.device] if env.device.type == 'cuda' else None
    # the only buffers are RoPE tables, which are the same on every process
    return model, DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True, **NO_BUFFERS)


# -----------------------------------------------------------------------------
# the step

class StepResult(NamedTuple):
    """The results of a step: 0-d tensors on the device, not yet synchronized with the host."""
    loss: torch.Tensor  # summed over the targets of all processes, in nats
    norm: torch.Tensor  # of the gradients, before clipping
    skipped: torch.Tensor  # 1 if loss or gradients were not finite: nothing was updated
    stops: torch.Tensor  # number of processes that were asked to stop


def train_step(model, loads, num_targets, optimizers, scaler, cfg, env):
    """
    One optimizer update over the micro-batches that the functions in `loads` return. The loss is the mean
    over num_targets, the unmasked targets of the global batch, even if masks are uneven across micro-batches
    and processes. Returns a StepResult; None if this is the only process and a signal came between two
    micro-batches, in which case no weight has changed.
    """
    params = trainable(model)
    for p in params:
        if not isinstance(model, DistributedDataParallel):
            p.grad = None  # makes room for activations
        elif p.grad is not None:
            p.grad.zero_()  # it lies in a bucket of DDP
    loss_and_stops = torch.zeros(2, device=env.device)
    for i, load in enumerate(loads):
        if env.world == 1 and env.stop and env.stop.by_signal():
            return None
        *batch, seed = load()
        if env.device.type == 'cpu':
            torch.default_generator.manual_seed(seed)  # of dropout; 2 microseconds, not 170 for all devices
        else:
            torch.manual_seed(seed)
        with micro_batch(model, cfg.shard, last=i + 1 == len(loads)):
            loss = model(*batch).sum()
            # times world: DDP and FSDP average gradients over the processes, and the sum is wanted
            scaler.scale(loss / (max(num_targets, 1) / env.world)).backward()
        loss_and_stops[0] += loss.detach()
    if env.world > 1:
        loss_and_stops[1].fill_(bool(env.stop and env.stop()))  # an assignment would wait for the GPU
        dist.all_reduce(loss_and_stops)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([local(p.grad) for p in params])
    if is_sharded(model):
        norm = norm.square()  # of the rows of this process
        dist.all_reduce(norm)
        norm = norm.sqrt()
    skipped = (~torch.isfinite(norm + loss_and_stops[0])).float()
    if cfg.grad_clip:
        torch.nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, norm)
    # on Apple GPUs the fused kernel ignores found_inf (by PyTorch's source; not run), so the host decides
    if not (env.device.type == 'mps' and bool(skipped)):
        for optimizer in optimizers:
            optimizer.found_inf = skipped  # GradScaler's private handshake: 1 skips the update
            optimizer.step()
    scaler.update()
    return StepResult(loss_and_stops[0], norm, skipped, loss_and_stops[1])


# -----------------------------------------------------------------------------
# a run

@dataclass
class Run:
    """Everything that the loop needs; build_run() creates it."""
    cfg: TrainConfig
    lora: LoRAConfig
    origin: str  # init_from of the command that began the run
    env: Env
    model: GPT
    evaluated: torch.nn.Module  # the model, compiled if that pays; evaluations call it
    forward: torch.nn.Module  # the model, compiled if enabled, and data parallel; training calls it
    batches: Batches
    val: Split | Mixture
    byte_counts: np.ndarray | None  # UTF-8 bytes of each token id
    optimizers: list
    scaler: torch.amp.GradScaler
    state: RunState
    out: RunDir
    context: dict  # tokenizer, data and machine, for the checkpoint
    tokenizer: Tokenizer | None = None  # if samples are requested
    log: Log | None = None
    deadline: Deadline | None = None  # with a time budget
    mirror: Mirror | None = None
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    failed_saves: int = 0
    diverged_at: int | None = None  # the step; the run stops once all processes reach the same step


def build_model(settings, dataset, env):
    """
    (the model on the CPU: new, or from a checkpoint or weights; the step of its weights, 0 if unknown; the
    name and the hash of its weights if adapters are added to them). ValueError if settings differ.
    """
    model_cfg, cfg, given, meta = settings.model, settings.train, settings.given, dataset.meta
    resumed = settings.resumed.checkpoint if settings.resumed else {}
    if cfg.init_from == 'scratch':
        size = meta['vocab_size']
        if not meta['foreign'] and size >= 4096:  # GPUs multiply multiples of 64 faster
            size = math.ceil(size / 64) * 64
        config = dataclasses.replace(model_cfg, vocab_size=model_cfg.vocab_size or size)
        if config.vocab_size < meta['vocab_size'] and not meta['foreign']:
            raise ValueError(f'vocab_size={config.vocab_size} is smaller than the {meta["vocab_size"]} ids '
                             f'of the tokenizer of {cfg.dataset}')
        torch.manual_seed(cfg.seed)
        return GPT(config), 0, None
    if resumed and not settings.lora.lora_rank:
        model = GPT.from_checkpoint(resumed['model_args'], resumed['model'], dropout=model_cfg.dropout,
                                    label_smoothing=model_cfg.label_smoothing)
        return model, resumed.get('iter_num', 0), None
    name, source, base = open_start(cfg, settings.resumed, settings.lora.lora_rank > 0, env)
    check_tokenizer(source.tokenizer, name, dataset, cfg.data_dir)
    kept = [field for field in ('dropout', 'label_smoothing') if resumed or field in given]
    model = GPT.from_checkpoint(source.model_args, source.weights, **{f: getattr(model_cfg, f) for f in kept})
    adapt_shape(model, settings, name)
    return model, (resumed or source.checkpoint).get('iter_num', 0), base


def open_data(settings, datasets, config, env):
    """
    {'train': split, 'val': split} and the context for checkpoints, checked against the model's config and the
    run to resume. Adds to settings.notes.
    """
    cfg, notes, resumed = settings.train, settings.notes, settings.resumed
    by_name = {name: open_split(datasets, name, config.block_size, cfg.document_mask, cfg.pack_rows)
               for name in ('train', 'val')}
    splits = by_name['train'].splits + by_name['val'].splits
    if cfg.pack_rows:
        notes += [split.note for split in splits]
    else:
        check_lengths(splits, config.block_size)
    context = context_of(datasets, by_name, env)
    if resumed:
        notes += resume.compare_context(resumed.checkpoint, context, cfg)
        check_tokenizer(resumed.checkpoint.get('tokenizer'), resumed.path, datasets[0], cfg.data_dir)
    with env.patience():
        if env.rank == 0:
            for split in splits:
                split.check_ids(config.vocab_size)
        env.barrier()  # waits for rank 0
    return by_name, context


def build_run(settings, datasets, env):
    """The Run, ready to train except for its folder. Adds to settings.notes."""
    cfg, notes, resumed = settings.train, settings.notes, settings.resumed
    meta = datasets[0].meta
    model, step, base = build_model(settings, datasets[0], env)
    T, vocab_size = model.config.block_size, model.config.vocab_size
    splits, context = open_data(settings, datasets, model.config, env)
    tokenizer = sampling_tokenizer(cfg, meta, context)
    if not cfg.eval_only:
        env.stop = env.stop or StopRequest(cfg.max_minutes)
    if base:
        context['lora'] = add_adapters(model, settings.lora, base, env, cfg.seed)
        notes.append(describe_adapters(context['lora'], model, env.dtype))
        if resumed:
            model.load_weights({**model.state_dict(), **resumed.checkpoint['model']})
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError('the initial weights are not finite; start from an earlier checkpoint')
    if cfg.shard != 'none' and env.world == 1:
        notes.append(f'shard={cfg.shard}: no effect, because there is only one process')
    sharded = cfg.shard != 'none' and env.world > 1
    if not sharded:  # else wrap() moves the part of this process
        model.to(env.device)
    model.compute_dtype = env.dtype
    if settings.auto_batch and not cfg.eval_only:
        choose = functools.partial(choose_batch_size, fits=fits_sharded) if sharded else choose_batch_size
        set_batch_size(cfg, choose(model, splits['train'], env, cfg), T, env, notes)
    state = resume.state_from(resumed.checkpoint) if resumed else RunState(step if cfg.eval_only else 0)
    batches = Batches(splits['train'], cfg, env, state)
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, batches.micro_batch * T, vocab_size, env,
                                           frozen=base is not None)
    if not cfg.eval_only:
        notes += set_length(cfg, splits['train'].num_windows, batches.global_batch, batches.shift)
    epochs = cfg.max_iters * batches.global_batch / splits['train'].num_windows
    depth.adapt_to_length(cfg, settings.given, resumed, epochs)
    evaluated, forward = wrap(model, cfg, env)
    optimizers = [] if cfg.eval_only else build_optimizers(model, cfg, env)  # of what wrap() may have sharded
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    if resumed and not cfg.eval_only:
        resume.restore(resumed.checkpoint, optimizers, scaler)
    origin = cfg.init_from
    if resumed:
        origin = str(resumed.checkpoint.get('config', {}).get('init_from', 'scratch'))
        for name in ('model', *OPTIMIZERS):  # frees their memory
            resumed.checkpoint.pop(name, None)
    check_same_step(state.iter_num, env)
    byte_counts = None
    try:
        byte_counts = byte_table(meta, vocab_size)
    except ValueError as e:  # the tokenizer is not available here
        notes.append(f'bits per byte: not reported, because {e}')
    return Run(cfg, settings.lora, origin, env, model, evaluated, forward, batches, splits['val'],
               byte_counts, optimizers, scaler, state, RunDir(cfg.out_dir, cfg.device, cfg.backend), context,
               tokenizer)


# -----------------------------------------------------------------------------
# the loop

def train(run):
    """The loop. Returns the exit code: 0, or 128 + the number of the signal that ended it."""
    cfg, env, state, batches = run.cfg, run.env, run.state, run.batches
    first_step, pending, stop_asked = state.iter_num, [], DelayedFlag()
    if not evaluate_missing(run):
        return stop_run(run)
    timer, save_due = StepTimer(batches, first_step), False

    while state.iter_num < cfg.max_iters:
        lr = learning_rate(state.iter_num, cfg)
        set_learning_rate(run.optimizers, lr, cfg.learning_rate)
        num_targets, loads = batches.step(state.iter_num)
        result = train_step(run.forward, loads, num_targets, run.optimizers, run.scaler, cfg, env)
        if result is None:
            collect_steps(run, pending)
            if state.iter_num > first_step:
                save(run, final=True)
            return stop_run(run)
        pending.append((result, num_targets))
        state.iter_num += 1
        state.tokens_seen += batches.global_batch * run.val.T
        stopping = env.stop() if env.world == 1 else stop_asked(result.stops)

        save_due = look_at_clock(run, pending, timer) or save_due  # before `due`, which it changes
        due = what_is_due(state, cfg)
        together = due.log or due.evaluation or due.save or stopping or state.iter_num % 50 == 0
        save_due = save_due or due.save or stopping or save_is_late(run, together)
        if together or save_due:
            collect_steps(run, pending)  # waits for the device
        finish_save(run, wait=run.diverged_at is not None)  # the message below depends on what is saved
        if together and run.diverged_at is not None:
            raise ValueError(divergence_message(run))
        if due.log:
            log_step(run, lr, result.norm.item(), timer.lap(state.iter_num))
        timer.pause()
        evaluation, best = None, False
        if due.last:
            save(run)  # before the evaluation, which may outlast the grace period of a scheduler
        if due.evaluation and (due.last or not stopping):
            evaluation = evaluate_both(run, None if due.last else env.stop.by_signal)
            best = evaluation is not None and track_best(run, evaluation)
            stopping = stopping or evaluation is None or patience.is_out(run)
            save_due = save_due or best or due.last or stopping or cfg.always_save_checkpoint
        # it waits while steps are bad: checkpoints of a diverging run would replace the last good ones
        if save_due and (stopping or due.last or best or state.bad_in_a_row == 0):
            save(run, final=stopping or due.last)
            save_due = False
        if evaluation:
            # Each evaluation is logged once: a resume drops lines after the step of its checkpoint, so one of
            # this step must hold the result. The final save has replaced that of due.last, which does not
            log_evaluation(run, evaluation)
        if due.sample:
            write_sample(run)  # after the save, which may be urgent
        timer.resume()
        if stopping and not due.last:
            return stop_run(run)
    log_done(run)
    report_end(run)
    return 0


def meta_model(settings, dataset):
    """The model of a command on torch's meta device: shapes without weights."""
    model_args = model_args_of(settings)
    with torch.device('meta'):
        if not model_args:
            return build_model(settings, dataset, Env())[0]
        model = GPT(config_from(model_args))
        adapt_shape(model, settings, settings.train.init_from)
    return model


def inform(settings):
    """What a command that does not train prints: a report, a check or a forecast."""
    if settings.train.report is not None:
        return report(settings.train.report)
    return '\n'.join(check(settings.train) if settings.train.check else dry_run(settings, meta_model))


def main(argv=None):
    settings = read_settings(argv)
    cfg = settings.train
    if cfg.report is not None or cfg.check or cfg.dry_run:
        if os.environ.get('RANK', '0') == '0':
            print(inform(settings))
        return 0
    check_start(cfg.init_from)  # before a dataset, which depends on it
    datasets = open_datasets(cfg.dataset, cfg.data_dir)
    env = setup(cfg)
    try:
        return execute(settings, datasets, env)
    finally:
        gc.unfreeze()
        env.leave(failed=sys.exc_info()[0] is not None)


def execute(settings, datasets, env):
    """Evaluates or trains; returns the exit code. Closes log and mirror in any case."""
    run, code = None, None
    try:
        if settings.choose_depth:
            ladder.choose_depth(settings, datasets, env, build_run, train_step)
        run = build_run(settings, datasets, env)
        announce(run, settings, datasets[0].meta)
        if settings.train.eval_only:
            log_evaluation(run, evaluate_both(run))
            return 0
        take_folder(run, settings.resumed)
        gc.collect()
        gc.freeze()  # the collector skips existing objects; nanochat measured pauses of half a second
        if run.cfg.time_budget is not None:
            run.deadline = Deadline(run.cfg, env, run.state)
        code = train(run)
        return code
    except Exception as e:
        env.explain_loss(e, run)
        if not isinstance(e, (RuntimeError, MemoryError)) or not out_of_memory(e):
            raise
        raise ValueError(memory_advice(run, env, e, settings.train)) from None
    finally:
        if run and run.log:
            run.out.wait()
            run.log.close()
            if run.mirror:  # torchrun kills 30 seconds after a signal
                run.mirror.close(300 if code == 0 else 20)


if __name__ == '__main__':
    call_main(main)
