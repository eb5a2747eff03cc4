"""
The complete training loop: precision, accumulation, compilation, data parallelism and step.

    $ python train.py                                          # a recipe card chosen by the hardware
    $ python train.py config/shakespeare_char.py --device=cpu  # a recipe card, then flags
    $ python train.py --resume                                 # continue the run in out_dir, or start
    $ torchrun --standalone --nproc_per_node=8 train.py        # all GPUs of a node

A step is one optimizer update over batch_size x gradient_accumulation_steps sequences, which all processes
share. Everything random (the order of the data, dropout) is a function of the seed, the step and the
micro-batch. A killed run therefore resumes bit for bit, and a checkpoint holds no RNG state.

Under torchrun each process takes an equal share of the sequences of a step and of the windows of an
evaluation. DDP or, with shard, FSDP2 adds the gradients; Muon divides its matrices; rank 0 logs and saves.
"""

import hotloop.system.host  # noqa: F401  starts the clock of this process: before torch

# isort: split
import dataclasses
import functools
import gc
import importlib
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record as report_errors
from torch.nn.parallel import DistributedDataParallel

from configurator import call_main, changed, check_problems, configure
from hotloop.data.dataset import byte_table, check_tokenizer, open_datasets
from hotloop.data.tokenizer import template_of_record, tokenizer_from
from hotloop.mixers.feedback import feedback_matrices
from hotloop.mixers.kernel import add_orthogonal_gradient
from hotloop.system import distributed
from hotloop.system.device import (
    COMPILE_EVAL_PAYS,
    choose_compile,
    choose_device,
    choose_dtype,
    try_compile,
    use_threads,
)
from hotloop.system.distributed import Env, print0
from hotloop.system.files import checkpoint_paths
from hotloop.system.signals import StopRequest
from hotloop.system.text import counted, shell, short
from hotloop.training.checkpoint import OPTIMIZERS, Checkpoints, RunState, checkpoint_of, restore, state_from
from hotloop.training.dataloader import Batches, open_split, share_batch, upload
from hotloop.training.evaluate import evaluate_both, reads_other_windows
from hotloop.training.forecast import dry_run, flops_of, model_args_of
from hotloop.training.logger import Log, Meter, evaluation_text, print_length, print_run
from hotloop.training.memory import choose_batch_size, memory_advice, out_of_memory, set_loss_chunks
from hotloop.training.optim import build_optimizers, set_learning_rate
from hotloop.training.parallel import gradient_sync, is_sharded, local, release_mesh, set_blocks, shard_model
from hotloop.training.recipes import OWN_MODEL, card_for_machine, choose_settings
from hotloop.training.run_dir import may_replace, open_folder, write_config
from hotloop.training.schedule import Deadline, ahead_weights, learning_rate, plan_schedule, progress
from hotloop.training.settings import (
    checkpoint_settings,
    compare_record,
    compare_settings,
    record_of,
    setting_problems,
)
from hotloop.weights.load import adapt_shape, check_start, open_start
from hotloop.weights.lora import LoRAConfig, add_adapters, check_lora, note_untrained_end, trainable
from model import GPT, TRAINING_ONLY, GPTConfig, config_from


@dataclass(frozen=True)
class TrainConfig:
    # --- run
    out_dir: str = 'out'  # checkpoints, log and config of the run; an older run in it is moved aside
    init_from: str = 'scratch'  # scratch, resume, gpt2 (-medium, ...), a path, or a hub model
    resume: bool = False  # continue the run in out_dir if there is one; otherwise start
    eval_only: bool = False  # evaluate once and exit; no run is written
    dry_run: bool = False  # forecast memory, time and disk and exit; nothing is downloaded or written
    seed: int = 1337  # for initial weights, data order and dropout
    max_iters: int = 600000  # total steps, including those before a resume
    max_epochs: float | None = None  # passes over the data; replaces max_iters
    time_budget: float | None = None  # minutes for the run, which decides when the rate decays
    depth: int | None = None  # layers of a new model without a card; sets its shape, batch and rates
    # --- data
    dataset: str = 'openwebtext'  # folder in data_dir, made by prepare.py or nanoGPT; a:0.7,b:0.3: a mixture
    data_dir: str = 'data'  # folder that contains the datasets
    pack_rows: bool = False  # windows hold complete rows; attention stays within a row or a document
    batch_size: int = 12  # largest micro-batch, in sequences
    auto_batch: bool = False  # find the largest micro-batch that fits, for the same step
    gradient_accumulation_steps: int = 5 * 8  # micro-batches per step, over all processes
    # --- optimizer
    optimizer: Literal['adamw', 'adamw8bit', 'muon'] = 'adamw'  # muon: Muon in blocks, AdamW elsewhere
    learning_rate: float = 6e-4  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon
    embed_lr: float | None = None  # of a normalized embedding with its own head, with Muon; None: as AdamW
    weight_decay: float = 1e-1  # on matrices only
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    muon_momentum: float = 0.95  # of Muon
    grad_clip: float = 1.0  # maximum global gradient norm; 0: off
    feedback: Literal['backprop', 'dfa'] = 'backprop'  # dfa: direct feedback alignment between blocks
    multi_token: float = 0.0  # initial weight of the loss of the token two ahead; annealed to 0
    ortho_penalty: float = 0.0  # weight of |W W^T - I|^2, W of queries and keys, with mixer='kernel'
    # --- schedule
    decay_lr: bool = True  # warm up and decay; False: a constant learning_rate, as in nanoGPT
    lr_schedule: Literal['cosine', 'linear', 'onecycle'] = 'cosine'  # shape of the decay
    warmup_iters: int | float = 2000  # steps to the peak rate; below 1: a fraction of the run
    lr_decay_iters: int | None = None  # step at which the decay ends; None: max_iters
    min_lr: float = 6e-5  # final learning_rate of the decay; the other rates decay in proportion
    decay_fraction: float = 0.5  # final fraction of the run in which lr_schedule='linear' decays
    # --- evaluation and logging
    eval_interval: int = 2000  # steps between evaluations; the last step is always evaluated
    eval_tokens: int | None = 2**20  # maximum validation tokens of an evaluation; None: all
    eval_iters: int | None = None  # batches per split, as in nanoGPT; replaces eval_tokens
    patience: int | None = None  # stop after this many evaluations in a row without a lower loss; None: off
    log_interval: int = 1  # steps between log lines
    tensorboard: bool = False  # also log to TensorBoard, in out_dir/tensorboard
    wandb_log: bool = False  # also log to Weights & Biases
    wandb_project: str = 'hotloop'  # Weights & Biases project
    wandb_run_name: str | None = None  # Weights & Biases run name; None: out_dir
    # --- checkpoints
    always_save_checkpoint: bool = True  # save after each evaluation; False: only if the loss improved
    save_minutes: float = 15.0  # also save at least this often; 0: after every step
    mirror_dir: str | None = None  # a second folder, such as a mounted drive, to which checkpoints are copied
    # --- machine
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first available
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # compute dtype; weights are float32
    compile: bool | Literal['auto'] = 'auto'  # torch.compile; auto: if it works and pays
    loss_chunks: int | Literal['auto'] = 'auto'  # chunks for head and loss: less memory, slower
    recompute: Literal['none', 'selective', 'full'] = 'none'  # recompute blocks; selective: not attention
    shard: Literal['none', 'optimizer', 'full'] = 'none'  # split gradients and optimizer; full: weights too
    deterministic: bool | Literal['auto'] = 'auto'  # bit-identical runs; auto: on CPUs
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # torch.distributed backend

    problems = setting_problems


# (first, second): if second is set, first has no effect; first alone, in a flag or a later file, unsets it
PAIRS = ('max_iters', 'max_epochs'), ('eval_tokens', 'eval_iters')
# {setting: (another, the value of it without which the first has no effect)}
NEEDS = dict.fromkeys(('muon_lr', 'muon_momentum', 'embed_lr'), ('optimizer', 'muon'))
NEEDS |= {'decay_fraction': ('lr_schedule', 'linear')}
MODEL_SETTINGS = {f.name for f in dataclasses.fields(GPTConfig)} - set(TRAINING_ONLY)
ADAPTER_SETTINGS = {f.name for f in dataclasses.fields(LoRAConfig)} - {'lora_dropout'}
# a resume cannot change these, nor the data, which compare_record() compares
FIXED_ON_RESUME = MODEL_SETTINGS | ADAPTER_SETTINGS | {'optimizer', 'depth'}


# -----------------------------------------------------------------------------
# settings: defaults < depth or checkpoint < card and other files < flags

class Settings(NamedTuple):
    """The settings of a command line. Nothing changes them, but Run() drops the tensors of `latest`."""
    model: GPTConfig
    lora: LoRAConfig
    train: TrainConfig
    given: dict  # {name: place} of settings in a file or a flag
    latest: tuple | None  # the checkpoint to resume, as Checkpoints.latest() returns it


def read_settings(argv=None):
    """Read a command line. Raises ValueError if settings contradict each other or the checkpoint."""
    argv = sys.argv[1:] if argv is None else argv
    read = functools.partial(configure, GPTConfig, LoRAConfig, TrainConfig, about=__doc__, pairs=PAIRS)
    peek = read(argv=argv, check=False)  # to find where the other settings come from; files run twice
    _, _, cfg = peek.objects
    latest = find_latest(cfg)
    derived = {}
    # the other settings are those of the checkpoint in a resume; of a depth with --depth, or a time budget
    # without a setting of OWN_MODEL; of the machine's card, unless the command gives both a dataset and a
    # setting of OWN_MODEL; and the defaults beside a card or weights
    own = sorted(OWN_MODEL & peek.given.keys())
    names_nothing = cfg.init_from == 'scratch' and not peek.words  # neither weights nor a card
    chooses_depth = names_nothing and cfg.time_budget is not None and not own
    if latest:  # the settings of the run
        shape = dataclasses.asdict(config_from(latest.checkpoint['model_args']).resolved())
        derived = checkpoint_settings(latest.checkpoint, {name: shape[name] for name in MODEL_SETTINGS})
        gone = sorted(derived.keys() - {f.name for o in peek.objects for f in dataclasses.fields(o)})
        if gone:
            print0(f'settings of the checkpoint that no longer exist: {", ".join(gone)}')
    elif cfg.depth is not None or chooses_depth:  # those that suit the depth
        given_at = peek.given.get('n_layer')  # a flag beside --depth changes it on purpose
        if peek.given.get('depth') == '--depth' and given_at not in (None, '--n_layer'):
            raise ValueError(f'--depth={cfg.depth} and {given_at} both give the shape; omit one')
        # with a time budget it measures the machine, and processes join
        derived = choose_settings(cfg, peek.given)
    elif names_nothing and own and 'dataset' in peek.given:
        print0(f'card: none, because the command gives a dataset and {", ".join(own)}; the rest is '
               "nanoGPT's defaults (--depth=N chooses others)")
    elif names_nothing:  # those of the machine's card
        card, _, why = card_for_machine(cfg.device)
        print0(f'card: {card} ({why}); name a card to choose another')
        argv = [os.path.join(os.path.dirname(os.path.abspath(__file__)), card), *argv]
    found = read(argv=argv, derived=derived, check=False)
    model, lora, cfg = found.objects
    if latest:
        check_resume(found, derived, latest.checkpoint)
    check_problems(found.objects)
    check_lora(lora, cfg, found.given, is_new=latest is None)
    check_effects(found.given, cfg)
    world = int(os.environ.get('WORLD_SIZE', '1'))
    share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, world)  # raises if it cannot be shared
    return Settings(model, lora, cfg, found.given, latest)


def check_resume(found, derived, checkpoint):
    """
    Print the given settings that differ from `derived`, those of the checkpoint. Raises ValueError for those
    that cannot change.
    """
    _, _, cfg = found.objects
    began = checkpoint.get('config', {}).get('init_from', 'resume')  # older ones of ours record 'resume'
    names_weights = 'init_from' in found.given and 'resume' not in (began, cfg.init_from)
    differs = os.path.realpath(began) != os.path.realpath(cfg.init_from)
    if names_weights and differs and not cfg.eval_only:
        raise ValueError(f'{found.given["init_from"]}: init_from={cfg.init_from!r}, but the run in '
                         f'{cfg.out_dir} began from {began!r}; continue it with --init_from=resume, or '
                         'give a new run another --out_dir')
    fixed = set(FIXED_ON_RESUME)
    if 'data' not in checkpoint:  # nanoGPT's does not record them
        fixed.add('dataset')
    had_budget = derived.get('time_budget') is not None
    has_decayed = state_from(checkpoint).max_iters is not None
    if cfg.time_budget is not None and (has_decayed or not had_budget):  # --time_budget=None is allowed
        fixed.add('time_budget')
    compare_settings(found.objects, found.given, derived, fixed)


def check_effects(given, cfg):
    """Raise ValueError if a setting that the command gives has no effect, or contradicts the time budget."""
    place = given.get('lr_schedule')
    if cfg.time_budget is not None and place and cfg.lr_schedule != 'linear':
        raise ValueError(f'{place}: lr_schedule={cfg.lr_schedule!r} contradicts time_budget, whose decay is '
                         'linear; use --lr_schedule=linear, or remove time_budget')
    for name, (setting, value) in NEEDS.items():
        is_off = getattr(cfg, setting) != value
        if setting == 'lr_schedule' and cfg.time_budget is not None:  # whose decay is linear
            is_off = False
        if given.get(name) == f'--{name}' and is_off:  # a card may have it for another value
            raise ValueError(f'--{name} has no effect with {setting}={getattr(cfg, setting)!r}; omit it, or '
                             f'add --{setting}={value}')


def find_latest(cfg):
    """Load the checkpoint to resume: with init_from=resume, or with --resume if out_dir holds a run."""
    if not cfg.resume and cfg.init_from != 'resume':
        if os.environ.get('TORCHELASTIC_MAX_RESTARTS', '0') != '0':
            raise ValueError('torchrun --max-restarts needs --resume, so that a restarted run continues')
        return None
    holds_run = bool(checkpoint_paths(cfg.out_dir))
    if not holds_run and cfg.mirror_dir and checkpoint_paths(cfg.mirror_dir):
        raise ValueError(f'out_dir={cfg.out_dir!r} holds no run, but mirror_dir={cfg.mirror_dir!r} does; '
                         f'continue it with --resume {shell(f"--out_dir={cfg.mirror_dir}")} '
                         '--mirror_dir=None, or start a new run without resuming')
    may_start = cfg.init_from != 'resume' and not cfg.eval_only
    if not holds_run and may_start:
        return None
    return Checkpoints(cfg.out_dir).latest()


# -----------------------------------------------------------------------------
# setup: device, precision, processes, compilation

def setup(cfg):
    """Choose device, dtype and compilation, and join the process group."""
    rank = int(os.environ.get('RANK', '0'))
    world = int(os.environ.get('WORLD_SIZE', '1'))
    device, why_device = choose_device(cfg.device, int(os.environ.get('LOCAL_RANK', '0')))
    dtype, why_dtype = choose_dtype(cfg.dtype, device, training=True)
    if cfg.deterministic is True or (cfg.deterministic == 'auto' and device.type == 'cpu'):
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # read by cuBLAS when it starts
        # use_deterministic_algorithms() takes a second to import Inductor: below, only for a compiled run
        torch.set_deterministic_debug_mode('error')
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads uninitialized memory
    use_threads()
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32; Inductor's autotuning fails under the newer switch
    if world > 1:
        distributed.open_process_group(cfg.backend, device)
    minutes = cfg.time_budget
    if cfg.eval_only:  # too short to compile for
        minutes = 0.0
    compiles, why_compile = choose_compile(cfg.compile, device, minutes)
    if compiles and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)  # also sets Inductor's own switch
    reasons = {'device': why_device, 'dtype': why_dtype, 'compile': why_compile}
    return Env(rank, world, device, dtype, compiles, reasons)


def wrap(model, cfg, env):
    """Return the model for evaluations and the one for training, compiled and data parallel as env says."""
    if env.compile and env.device.type == 'cpu' and model.num_params() > 10**7:
        # recompute inputs of matrix products in the backward pass, such as bf16 copies of weights:
        # 0.88 of the memory of a 124M step in the same time. A private option, not measured on GPUs
        functorch = importlib.import_module('torch._functorch.config')
        functorch.ban_recompute_materialized_backward = False
    # with several processes each block is compiled alone, so that its gradients can be sent early
    set_blocks(model, cfg.recompute, compiles=env.compile and env.world > 1)
    if env.world == 1:
        train_model = torch.compile(model, dynamic=False) if env.compile else model
        # in evaluation mode it is compiled once more, which takes 10 to 20 s
        compiles_eval = cfg.time_budget is None or cfg.time_budget >= COMPILE_EVAL_PAYS
        return (train_model if compiles_eval else model), train_model
    if cfg.shard != 'none':
        shard_model(model, cfg.shard, env)
        return model, model
    device_ids = [env.device] if env.device.type == 'cuda' else None
    # buffers (tables of RoPE, random features) are equal on all processes already; a private name
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_buffers()]
    return model, DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True)


# -----------------------------------------------------------------------------
# the step

class StepResult(NamedTuple):
    """The results of a step: 0-d tensors on the device, not yet synchronized with the host."""
    loss: torch.Tensor  # summed over the targets of all processes, in nats
    norm: torch.Tensor  # of the gradients, before clipping
    skipped: torch.Tensor  # 1 if loss or gradients were not finite: nothing was updated


def train_step(model, data, optimizers, scaler, cfg, env, penalty=0.0):
    """
    Update the weights once. Returns a StepResult. The loss is the mean over the unmasked targets of the
    global batch, even if masks are uneven across micro-batches and processes.

    data: the StepData of Batches.step(). penalty: the current ortho_penalty.
    """
    num_targets, loaders = data
    params = trainable(model)
    # dropping gradients frees memory for activations; those of DDP are views of its buckets, and stay
    model.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    total = torch.zeros((), device=env.device)
    for i, load in enumerate(loaders):
        *batch, seed = load()  # batch: idx, targets and perhaps documents of GPT.forward()
        if env.device.type == 'cpu':
            torch.default_generator.manual_seed(seed)  # 2 microseconds; torch.manual_seed() takes 170
        else:
            torch.manual_seed(seed)
        with gradient_sync(model, cfg.shard, last=i + 1 == len(loaders)):
            loss = model(*batch).sum()
            # DDP and FSDP average over the processes, and the sum is wanted, so world multiplies the loss
            scaler.scale(loss / (max(num_targets, 1) / env.world)).backward()
        total += loss.detach()
    if env.world > 1:
        dist.all_reduce(total)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if penalty:
        add_orthogonal_gradient(getattr(model, 'module', model), penalty)
    norm = torch.nn.utils.get_total_norm([local(p.grad) for p in params])
    if is_sharded(model):
        norm = norm.square()  # the squares of this process's rows
        dist.all_reduce(norm)
        norm = norm.sqrt()
    skipped = (~torch.isfinite(norm + total)).float()
    # a CPU knows the norm here, and to multiply by 1 would take 1% of a step
    if cfg.grad_clip and (env.device.type != 'cpu' or norm + 1e-6 > cfg.grad_clip):
        torch.nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, norm)
    # Fused AdamW, Muon and adamw8bit read found_inf, as GradScaler.step() would set it: 1 skips the update.
    # GradScaler.step() itself waits for the device.
    # Apple's kernel ignores it (by PyTorch's source; not run), so there the host decides.
    if not (env.device.type == 'mps' and bool(skipped)):
        for optimizer in optimizers:
            optimizer.found_inf = skipped
            optimizer.step()
    scaler.update()
    return StepResult(total, norm, skipped)


# -----------------------------------------------------------------------------
# a run

class Start(NamedTuple):
    """The model that a run starts with."""
    model: GPT
    origin: dict  # what came with its weights, such as iter_num and hf_config; {} for new ones
    base: dict | None  # the name and hash of its weights, if adapters are added to them


def build_model(settings, dataset, env):
    """Make the model on the CPU: new, or from a checkpoint or weights. Returns a Start."""
    model_cfg, cfg, meta = settings.model, settings.train, dataset.meta
    checkpoint = settings.latest.checkpoint if settings.latest else {}
    if not checkpoint and cfg.init_from == 'scratch':
        size = meta['vocab_size']  # only a guess if prepare.py did not make the dataset
        if not meta['foreign'] and size >= 4096:  # GPUs multiply multiples of 64 faster
            size = math.ceil(size / 64) * 64
        config = dataclasses.replace(model_cfg, vocab_size=model_cfg.vocab_size or size)
        if config.vocab_size < meta['vocab_size'] and not meta['foreign']:
            raise ValueError(f'vocab_size={config.vocab_size} is smaller than the {meta["vocab_size"]} ids '
                             f'of the tokenizer of {cfg.dataset}')
        torch.manual_seed(cfg.seed)
        return Start(GPT(config), {}, None)
    override = {name: getattr(model_cfg, name) for name in TRAINING_ONLY}
    if checkpoint and not settings.lora.lora_rank:
        model = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model'], **override)
        return Start(model, checkpoint, None)
    name, source, base = open_start(cfg, settings.latest, settings.lora.lora_rank > 0, env)
    check_tokenizer(source.tokenizer, name, dataset)
    if not source.tokenizer:
        print0(f'note: {name} has no tokenizer; it cannot be checked that dataset={dataset.name} has its ids')
    model = GPT.from_checkpoint(source.model_args, source.weights, **override)
    adapt_shape(model, settings, name)
    return Start(model, source.checkpoint, base)


def check_masks(c, cfg, env):
    """Raise ValueError if attention needs masks on a GPU, and they cannot be compiled or used there."""
    has_mask = any(cfg.pack_rows or c.attn_softcap or (window or c.block_size) < c.block_size
                   for window in c.attention_windows())
    if not has_mask or env.device.type != 'cuda':
        return
    if c.dropout and c.position == 'learned' and not cfg.eval_only:  # it drops attention weights, too
        raise ValueError(f'dropout={c.dropout} cannot be combined with window, pack_rows or attn_softcap '
                         "on a GPU with position='learned'; use --dropout=0")
    failure = None if env.compile else try_compile(env.device)
    if failure:
        raise ValueError('on a GPU pack_rows, windows and attn_softcap need torch.compile, even with '
                         f'compile=False, and it fails here: {failure}')


def open_byte_table(meta, vocab_size, env):
    """Return the UTF-8 bytes of each token id; None if the tokenizer is not available to all processes."""
    table = None
    try:
        table = byte_table(meta, vocab_size)
    except ValueError as e:
        print0(f'bits per byte: not reported, because {e}')
    return None if env.any(table is None) else table


class Run:
    """What the loop uses, ready to train except for the folder of the run."""

    def __init__(self, settings, datasets, env):
        self.cfg, self.env = settings.train, env
        cfg, meta = self.cfg, datasets[0].meta
        checkpoint = settings.latest.checkpoint if settings.latest else {}
        self.model, origin, base = build_model(settings, datasets[0], env)
        model = self.model
        T, vocab_size = model.config.block_size, model.config.vocab_size
        check_masks(model.config, cfg, env)
        self.splits = {}
        for name in ('train', 'val'):
            self.splits[name] = open_split(datasets, name, T, cfg.pack_rows)
            for part in self.splits[name].splits:
                part.check_ids(vocab_size)
        # settings, tokenizer, data and machine, for the checkpoint
        self.record = record_of(settings, model, datasets, self.splits, env)
        if origin.get('hf_config'):  # of Hugging Face, by which the weights are exported
            self.record['hf_config'] = origin['hf_config']
        template = template_of_record(origin)
        if template and 'template' not in self.record:  # tuned on plain text, it still writes such chats
            self.record |= {'template': template, 'is_their_template': origin.get('is_their_template', False)}
        if checkpoint:
            compare_record(self.record, checkpoint, cfg.dataset)
        if base:  # adapters are trained
            self.record['lora'] = add_adapters(model, settings.lora, base, env, cfg.seed)
            if checkpoint:
                # the checkpoint has the adapters alone
                model.load_weights({**model.state_dict(), **checkpoint['model']})
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ValueError('the initial weights are not finite; start from an earlier checkpoint')
        if cfg.shard == 'none' or env.world == 1:
            model.to(env.device)  # otherwise shard_model() moves this process's rows
        model.compute_dtype = env.dtype
        batch_cfg = cfg
        global_batch = cfg.batch_size * cfg.gradient_accumulation_steps
        if cfg.auto_batch and not cfg.eval_only:
            size = choose_batch_size(model, self.splits['train'], env, cfg)
            accumulation = global_batch // size
            batch_cfg = dataclasses.replace(cfg, batch_size=size, gradient_accumulation_steps=accumulation)
        self.state = RunState()
        if checkpoint:
            self.state = state_from(checkpoint)
            if not cfg.eval_only and reads_other_windows(cfg, checkpoint.get('config', {})):
                self.state.forget_losses()
                print0('note: this run evaluates other windows than before, whose losses do not compare; the '
                       'best weights so far become best-before.pt')
        elif cfg.eval_only:
            self.state.iter_num = origin.get('iter_num', 0)
        self.batches = Batches(self.splits['train'], batch_cfg, env, self.state.shift(T, global_batch))
        set_loss_chunks(model, self.batches.micro_batch * T, cfg, env)
        if cfg.feedback == 'dfa':
            model.feedback = feedback_matrices(model.config, cfg.seed).to(env.device)
        if cfg.ortho_penalty and 'K' not in model.config.mixers():
            raise ValueError(f"ortho_penalty={cfg.ortho_penalty} applies only with mixer='kernel'; remove it")
        self.eval_model, self.train_model = wrap(model, cfg, env)
        # after wrap(), which may shard the parameters
        self.optimizers = [] if cfg.eval_only else build_optimizers(model, cfg, env)
        self.scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
        if checkpoint and not cfg.eval_only:
            restore(checkpoint, self.optimizers, self.scaler)
        for name in ('model', *OPTIMIZERS):  # settings.latest would keep them in memory
            checkpoint.pop(name, None)
        distributed.check_same_step(self.state.iter_num, env)
        self.byte_counts = open_byte_table(meta, vocab_size, env)
        end_is_frozen = base and self.record.get('template') and not settings.lora.lora_embeddings
        if end_is_frozen and self.byte_counts is not None:
            tokenizer = tokenizer_from(meta['tokenizer'])
            note = note_untrained_end(model.lm_head.weight, self.record['template'], tokenizer, base['base'])
            if note:
                print0(note)


# -----------------------------------------------------------------------------
# the loop

def train(run, schedule, checkpoints, log, stop):
    """Train until the last step, a signal, or early stopping. Returns the exit code."""
    cfg, env, state, batches, model = run.cfg, run.env, run.state, run.batches, run.model
    meter = Meter(batches, state, env, flops_of(model, batches.split.T).training)
    deadline = None
    if cfg.time_budget is not None:
        deadline = Deadline(cfg.time_budget, state, env)
    saved_at = time.monotonic()
    save_is_due = False

    def save(best, final):
        state.logged, state.bad_in_a_row = meter.state()
        if deadline:
            state.seconds_used = deadline.used()
        if env.rank == 0 or is_sharded(model):
            checkpoint = checkpoint_of(model, run.optimizers, run.scaler, state, run.record)
            if env.rank == 0:
                checkpoints.save(checkpoint, best, final)

    def seconds_left(step_seconds):
        if schedule.is_open:
            return max(deadline.left(), 0)
        return (schedule.max_iters - state.iter_num) * step_seconds

    while True:
        pause_began = time.perf_counter()
        step = state.iter_num
        is_last = step >= schedule.max_iters
        best = False
        # rank 0 alone knows saved_step; with several processes no step is met twice, so that all agree
        is_unsaved = step != checkpoints.saved_step
        stopping = stop.any_signal()
        is_due = is_last or state.evaluated_at is None or (step and step % cfg.eval_interval == 0)
        if is_due and step != state.evaluated_at:
            evaluation = stop.forgiving_signals(evaluate_both, run.eval_model, run.splits, cfg,
                                                batches.micro_batch, env, run.byte_counts, stop.has_signal)
            if evaluation is None:  # a signal came; the resumed run evaluates this step again
                stopping = True
            else:
                checkpoints.wait()
                # a loss whose best.pt could not be written does not count: the writer resets best_loss
                state.best_val_loss = env.broadcast(checkpoints.best_loss)
                best = state.count_evaluation(step, env.broadcast(evaluation.val['loss']))
                is_unsaved = True
                log.evaluation(step, evaluation)
                save_is_due = save_is_due or cfg.always_save_checkpoint
                if deadline:
                    deadline.evaluation_seconds = evaluation.seconds
        out_of_patience = cfg.patience is not None and state.evals_since_best >= cfg.patience and not is_last
        stopping = stopping or out_of_patience
        ends = is_last or stopping
        if stopping:
            meter.check(step, cfg, stopping=True)  # raises if the run has diverged: it is not saved
        # any(): the clocks of processes differ, and all must decide alike
        save_is_due = save_is_due or env.any(time.monotonic() - saved_at > 60 * cfg.save_minutes)
        # a periodic save waits for a finite step, or it would replace the last good ones
        if is_unsaved and step and (best or ends or (save_is_due and not meter.bad)):
            env.together(save, best, ends)  # the others wait for rank 0
            saved_at = time.monotonic()
            save_is_due = False
        if ends:
            break
        pause = time.perf_counter() - pause_began
        meter.exclude(pause)
        if deadline:
            deadline.excluded += pause

        lr = learning_rate(step, schedule, cfg)
        set_learning_rate(run.optimizers, lr, cfg.learning_rate)
        if cfg.multi_token:
            ahead = ahead_weights(cfg.multi_token, progress(step, schedule, deadline))
            model.ahead.copy_(upload(np.array(ahead, np.float32), env.device))  # does not wait for a GPU
        data = batches.step(step)
        penalty = cfg.ortho_penalty * min(step / max(schedule.warmup_iters, 1), 1.0)  # rises as the rate does
        result = stop.forgiving_signals(train_step, run.train_model, data, run.optimizers, run.scaler, cfg,
                                        env, penalty)
        if result is None:  # a signal ended it; the next round saves and stops
            continue
        meter.add(result, data.num_targets)
        step += 1
        state.iter_num = step
        state.tokens_seen += batches.global_batch * batches.split.T
        if schedule.is_open:  # this step may become the last
            schedule = decide_length(run, schedule, deadline, meter, checkpoints)
            save_is_due = save_is_due or not schedule.is_open  # a resume must keep the decision
        if step % cfg.log_interval == 0 or step in (1, schedule.max_iters):
            meter.check(step, cfg)
            log.step(state, lr, meter, seconds_left)
    log.end(state, is_last and not stop.has_signal(), out_of_patience, run.record.get('template'))
    return stop.exit_code()


def decide_length(run, schedule, deadline, meter, checkpoints):
    """Begin the decay of an open time budget after a step if it is time. Returns the schedule."""
    cfg, state, env, batches = run.cfg, run.state, run.env, run.batches
    step = state.iter_num
    meter.exclude(deadline.estimate_evaluation(schedule.decay_fraction, run.eval_model, run.splits, cfg,
                                               batches.micro_batch))
    last_step = deadline.last_step(step, schedule, max(checkpoints.seconds, 0.1), cfg.eval_interval)
    last_step = int(env.broadcast(last_step))  # by the clock of rank 0
    if not last_step:
        return schedule
    state.decay_start, state.max_iters = step, last_step
    schedule = plan_schedule(cfg, batches.split.num_windows, batches.global_batch, batches.shift, state)
    print0(f'time budget: decaying the learning rate over steps {step:,}-{last_step:,}')
    if step < schedule.warmup_iters:
        print0(f'note: it decays before the end of its warmup of {counted(schedule.warmup_iters, "step")}; '
               'give a lower --warmup_iters')
    if env.rank == 0:
        write_config(cfg.out_dir, run.record['config'], schedule)
    return schedule


def meta_model(settings, dataset):
    """Make the model of a command on the meta device, for dry_run(): hotloop/ does not import train.py."""
    model_args = model_args_of(settings)
    with torch.device('meta'):
        if not model_args:
            return build_model(settings, dataset, Env()).model
        override = {name: getattr(settings.model, name) for name in TRAINING_ONLY}
        model = GPT(dataclasses.replace(config_from(model_args), **override))
        adapt_shape(model, settings, settings.train.init_from)
    return model


def main(argv=None):
    run = env = None
    try:
        settings = read_settings(argv)
        cfg = settings.train
        if cfg.dry_run:
            print0('\n'.join(dry_run(settings, meta_model)))
            return 0
        if not settings.latest:
            check_start(cfg.init_from)
        datasets = open_datasets(cfg.dataset, cfg.data_dir)
        env = setup(cfg)
        run = Run(settings, datasets, env)
        return execute(run, settings, datasets[0].meta)
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        if env is None:  # while the checkpoint of a resume is loaded
            raise ValueError(str(e)) from None
        raise ValueError(memory_advice(run and run.batches, env)) from None
    finally:
        gc.unfreeze()
        if run:
            release_mesh(run.model)
        run = None  # DDP and FSDP hold the process group
        distributed.close_process_group(sys.exc_info()[0] is not None)


def execute(run, settings, meta):
    """Evaluate or train a run. Returns the exit code."""
    cfg, env, latest = run.cfg, run.env, settings.latest
    print0('settings that differ from the defaults:')
    differing = changed([settings.model, settings.lora, cfg])
    for name, value in differing.items():
        print0(f'  {name} = {value!r}  ({settings.given.get(name, "derived")})')
    print_run(run.model, run.record, run.batches, run.splits['val'], meta, cfg, env)
    if cfg.eval_only:
        if cfg.init_from == 'scratch' and not latest:
            print0('note: these weights are new; --init_from=resume evaluates the run in '
                   f'{cfg.out_dir}, --init_from=PATH others')
        evaluation = evaluate_both(run.eval_model, run.splits, cfg, run.batches.micro_batch, env,
                                   run.byte_counts)
        text, numbers = evaluation_text(run.state.iter_num, evaluation)
        print0(f'{text}\nperplexity {short(numbers["val_perplexity"])}, {numbers["val_tokens"]:,} tokens, '
               f'{evaluation.seconds:.1f} s')
        return 0
    batches = run.batches
    schedule = plan_schedule(cfg, batches.split.num_windows, batches.global_batch, batches.shift, run.state)
    print_length(cfg, schedule, run.state, batches)
    stop = StopRequest(env)
    resumed_at = run.state.iter_num if latest else None
    checkpoints = Checkpoints(cfg.out_dir, resumed_at, cfg.mirror_dir, run.state.best_val_loss)
    locks = env.together(open_folders, run, schedule, checkpoints, latest)
    log = env.together(Log, cfg, run.record['config'], env, resumed_at)
    if not latest:
        log.start(run.model, run.record, differing)
    gc.collect()
    gc.freeze()  # the collector skips existing objects; nanochat measured pauses of half a second
    try:
        return train(run, schedule, checkpoints, log, stop)
    finally:
        log.close(run.state.iter_num)
        if env.rank == 0:
            checkpoints.wait()
            checkpoints.copy()  # the last lines of the log, too
        for lock in locks:
            lock.close()


def open_folders(run, schedule, checkpoints, latest):
    """Prepare out_dir and mirror_dir on rank 0. Returns their locks."""
    cfg = run.cfg
    if run.env.rank:
        return []
    if cfg.mirror_dir:  # tried first, so that one that cannot be used moves no older run aside
        parent = os.path.dirname(os.path.realpath(cfg.mirror_dir))
        if not os.path.isdir(parent):  # or the copy would be on the disk below an unmounted drive
            raise ValueError(f'the parent of mirror_dir={cfg.mirror_dir!r} is not a folder; mount the drive, '
                             f'or make {parent}')
        open_folder('mirror_dir', cfg.mirror_dir, is_new=False).close()
    locks = [open_folder('out_dir', cfg.out_dir, latest is None)]
    if latest:
        checkpoints.promote(latest)
        print0(f'resuming at step {run.state.iter_num:,}')
    # a run that has ended keeps its config.py
    if run.state.iter_num < schedule.max_iters or not os.path.exists(os.path.join(cfg.out_dir, 'config.py')):
        write_config(cfg.out_dir, run.record['config'], schedule)
    if cfg.mirror_dir:
        is_own = latest is not None and may_replace(cfg.mirror_dir, cfg.out_dir, run.state.iter_num)
        locks.append(open_folder('mirror_dir', cfg.mirror_dir, not is_own))
    return locks


if __name__ == '__main__':
    report_errors(lambda: call_main(main))()  # under torchrun a traceback for a bug, not for a refusal
