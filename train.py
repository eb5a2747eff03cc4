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

import contextlib
import dataclasses
import errno
import functools
import gc
import glob
import hashlib
import importlib
import importlib.util
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, get_type_hints

import numpy as np
import torch
import torch.distributed as dist

import prepare
from configurator import DISK_FULL, accept, as_file, call_main, configure, differences, drop_output
from model import (
    GPT,
    GPTConfig,
    choose_device,
    choose_dtype,
    config_from,
    first_line,
    load_checkpoint,
    load_gpt2,
    load_weights,
    model_from,
    read_later,
    save_checkpoint,
    try_compile,
)

try:
    import fcntl  # Linux and macOS; elsewhere out_dir cannot be locked, and start-up says so
except ImportError:
    fcntl = None

MAX_BAD_STEPS = 20  # bad steps in a row after which a run has diverged; fp16 halves its scale at each
MAX_ROLLBACKS = 3  # to one and the same checkpoint; after that other data does not help
SPIKE, SPIKE_WINDOW = 6.0, 128  # standard deviations above the mean of so many losses


def lies_in(path, folder):
    """Whether a path leads to a folder or below it."""
    return os.path.join(os.path.realpath(path), '').startswith(os.path.join(os.path.realpath(folder), ''))


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
        if not unfit and self.mirror_dir and lies_in(self.out_dir, self.mirror_dir):
            wrong.append(f'out_dir={self.out_dir!r} is or lies in mirror_dir={self.mirror_dir!r}, and would be moved '
                         'aside with it; a mirror wants a folder of its own, on another disk')
        if self.wandb_log and importlib.util.find_spec('wandb') is None:
            wrong.append('wandb_log=True needs the package wandb: pip install wandb, or --wandb_log=False')
        return wrong


# -----------------------------------------------------------------------------
# the machine: device, dtype, compile, processes, each with the reason it was chosen

def tell(text):
    """Prints what no run ends for: the terminal may be closed, a pipe broken, the disk under a file of output full."""
    try:
        print(text, flush=True)
    except OSError as e:
        if e.errno not in DISK_FULL:  # there it is delivered with the next line, or the one after
            drop_output()


@dataclass
class Machine:
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device('cpu'))
    dtype: torch.dtype = torch.float32
    compile: bool = False
    threads: int = 1
    reasons: dict = field(default_factory=dict)

    def say(self, text):
        """Prints once for all processes."""
        if self.rank == 0:
            tell(text)

    def sum(self, values):
        """Sums a float64 array over all processes."""
        if self.world == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64, device=self.device)  # a copy: the reduction is in place
        dist.all_reduce(t)
        return t.cpu().numpy()


def open_machine(cfg):
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
    threads = cfg.threads or max(1, prepare.cores(physical=True) // local_world)
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
    return Machine(rank, world, device, dtype, failure is None, threads, reasons)


def compiled(model, cfg, machine):
    """The model, compiled where that was chosen."""
    if not machine.compile:
        return model
    if machine.device.type == 'cpu' and model.num_params() > 10**7:
        # what products of the backward pass read, bf16 copies of weights before all, is computed again and not kept:
        # 0.88 of the memory of a 124M step in the same time, where one of 0.8M would take 1.02 of its time. A private
        # switch; its price on GPUs has not been measured
        importlib.import_module('torch._functorch.config').ban_recompute_materialized_backward = False
    return torch.compile(model, dynamic=False, mode=cfg.compile_mode)


def end_with_parent():
    """Has Linux send SIGTERM when torchrun dies; after a -9 its processes would go on, and write into out_dir."""
    if sys.platform != 'linux':
        return
    import ctypes
    PR_SET_PDEATHSIG = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)


def open_process_group(backend, device, rank, world, timeout_minutes):
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    options = {}
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
        # the agent keeps one store over all restarts; without a prefix for each, 9 of 14 restarts went wrong
        # (pytorch#135712)
        store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), world, is_master=False)
        options = {'store': dist.PrefixStore(f'try{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', store),
                   'rank': rank, 'world_size': world}
    # the optimizers import this at their first step, and its default arguments take the group that is there then:
    # gloo's threads outlived destroy_process_group and aborted 4 of 128 finished runs. Before there is a group, none is
    importlib.import_module('torch.distributed.nn.functional')
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **options)


def device_memory(device, system='/sys'):
    """Bytes of memory that the device has; of the host's, no more than a container may take."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    try:
        memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (AttributeError, ValueError):  # Windows has no sysconf; 16 GB is a guess
        memory = 16 * 2**30
    limit = prepare.first_of(f'{system}/fs/cgroup/memory.max')
    return min(memory, int(limit)) if limit.isdecimal() else memory


def choose_loss_chunks(asked, num_tokens, vocab_size, memory):
    """
    In how many parts a micro-batch's head and loss are computed: one, which is fastest, unless that would take over a
    quarter of the memory; then as many as make it a sixteenth.
    """
    need = 12 * num_tokens * vocab_size  # bytes of the logits, of their gradients, and of float32 copies of both
    if asked != 'auto':
        return min(asked, num_tokens)
    return 1 if need <= memory / 4 else min(math.ceil(16 * need / memory), num_tokens)


def attention_kernel(model, batch, machine):
    """The name of the kernel that scaled_dot_product_attention takes for this shape, or 'unknown'."""
    c = model.config
    try:
        q, k = (torch.empty(batch, heads, c.block_size, c.n_embd // c.n_head, device=machine.device,
                            dtype=machine.dtype, requires_grad=True) for heads in (c.n_head, c.n_kv_head))
        choice = torch._fused_sdp_choice(q, k, k, dropout_p=c.dropout, is_causal=True,
                                         enable_gqa=c.n_kv_head < c.n_head)
        return {int(v): name.lower() for name, v in torch.nn.attention.SDPBackend.__members__.items()}[choice]
    except (AttributeError, KeyError, RuntimeError):
        return 'unknown'


# dense bf16 peak in FLOP/s (fp16 where there is no bf16) by the device's name, from the makers' data sheets
PEAK_FLOPS = {'H200': 989e12, 'GH200': 989e12, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12, 'B200': 2250e12,
              'A100': 312e12, 'A10G': 70e12, 'A10': 125e12, 'A40': 150e12, 'L40S': 362e12, 'L4': 121e12, 'V100': 125e12,
              'T4': 65e12, 'RTX 3090': 71e12, 'RTX 4090': 165e12, 'RTX 5090': 210e12, 'MI300X': 1307e12}


def peak_flops(device, dtype):
    """Peak of one device in the dtype, or None when it is not known: no figure is better than a wrong one."""
    if device.type != 'cuda' or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    found = [key for key in PEAK_FLOPS if re.search(rf'\b{key}\b', name) and 'Laptop' not in name]
    return PEAK_FLOPS[max(found, key=len)] if found else None


# -----------------------------------------------------------------------------
# data: which tokens a step sees, as a pure function of the seed and the step

class Split:
    """One bin of a dataset, mapped; windows of T tokens and their targets, which are one further."""

    def __init__(self, folder, name, meta, T):
        path = os.path.join(folder, f'{name}.bin')
        self.tokens, self.path, self.T = prepare.open_bin(path, meta['dtype']), path, T
        self.num_tokens = len(self.tokens)
        told = meta['splits'].get(name, {}).get('tokens', self.num_tokens)
        if self.num_tokens != told:
            raise ValueError(f'{path} has {self.num_tokens:,} tokens, not the {told:,} of meta.json; prepare it again')
        self.order = functools.lru_cache(maxsize=2)(epoch_order)
        self.splits = [self]  # a Mixture has several
        self.known_vocab = math.inf if meta['foreign'] else meta['vocab_size']
        if self.num_tokens <= T:
            shorter = f' or --block_size={self.num_tokens - 1} at most' if self.num_tokens > 1 else ''
            raise ValueError(f'{path} has {self.num_tokens:,} tokens, too few for one window of block_size={T} and '
                             f'its target; use more text{shorter}')
        mask = os.path.join(folder, f'{name}.mask.bin')
        self.mask = None  # 1 where a token counts in the loss
        if os.path.exists(mask):
            self.mask = prepare.open_bin(mask, np.uint8)
            if len(self.mask) != self.num_tokens:
                raise ValueError(f'{mask} has {len(self.mask):,} bytes for {self.num_tokens:,} tokens')
            if not any(self.mask[at:at + (1 << 24)].any() for at in range(0, self.num_tokens, 1 << 24)):
                raise ValueError(f'{path} has no target that counts: its mask is 0 everywhere; prepare it again')

    def check_ids(self, vocab_size):
        """One pass over the bin: an id beyond the vocabulary would end in a CUDA assert without a name. Above a
        gigabyte, where a pass takes minutes, prepare.py's word is taken for its own bins."""
        if self.tokens.nbytes > 1e9 and self.known_vocab <= vocab_size:
            return
        for start in range(0, self.num_tokens, 1 << 24):
            block = self.tokens[start:start + (1 << 24)]
            if block.max() >= vocab_size:
                at = start + int(np.argmax(block >= vocab_size))
                raise ValueError(f'{self.path} has token id {self.tokens[at]} at position {at:,}, but the vocabulary '
                                 f'has {vocab_size} ids; the data was made with another tokenizer')

    def fingerprint(self):
        """A hash of the size and of 64 blocks over the whole bin: tells datasets apart without reading them."""
        h = hashlib.sha256(str(self.num_tokens).encode())
        for start in np.linspace(0, max(self.num_tokens - 4096, 0), 64).astype(np.int64):
            h.update(self.tokens[start:start + 4096].tobytes())
            if self.mask is not None:
                h.update(self.mask[start:start + 4096].tobytes())
        return h.hexdigest()[:16]

    def num_bytes(self):
        return self.tokens.nbytes + (0 if self.mask is None else self.mask.nbytes)

    def arrays(self, dtype=None):
        """(tokens, mask or None) in memory: ids of two bytes as int16, which torch can index, others as int32."""
        tokens = np.array(self.tokens, dtype=dtype or self.tokens.dtype)
        return tokens.view(f'i{tokens.itemsize}'), None if self.mask is None else np.array(self.mask)

    def gather(self, starts):
        """Inputs and targets of the windows at these positions: two (B, T) int64 arrays; -1 is not counted."""
        places = np.asarray(starts)[:, None] + np.arange(self.T + 1)
        tokens = self.tokens[places].astype(np.int64)
        x, y = tokens[:, :-1], tokens[:, 1:].copy()
        if self.mask is not None:
            y[self.mask[places[:, 1:]] == 0] = -1
        return np.ascontiguousarray(x), y

    def num_targets(self, starts):
        """How many targets of these windows count."""
        if self.mask is None:
            return len(starts) * self.T
        return sum(int(np.count_nonzero(self.mask[s + 1:s + 1 + self.T])) for s in starts)

    def starts(self, seed, index):
        """Where the windows of these numbers start, counted over all epochs; any shape of index."""
        per_epoch = windows_per_epoch(self.num_tokens, self.T)
        epochs, places, starts = index // per_epoch, index % per_epoch, np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            starts[epochs == epoch] = self.order(seed, self.num_tokens, self.T, epoch)[places[epochs == epoch]]
        return starts


class Mixture:
    """
    Several splits as one, in which a window is of each by its weight. Positions go on from one split to the next; of
    every MIXTURE windows each split has its share, to a window, in an order that the seed shuffles.
    """
    MIXTURE = 10_000

    def __init__(self, names, splits, weights):
        self.names, self.splits, self.T = names, splits, splits[0].T
        self.weights = [w / sum(weights) for w in weights]
        self.bases = np.cumsum([0, *(split.num_tokens for split in splits)])
        self.num_tokens = int(self.bases[-1])
        ends = np.round(np.cumsum(self.weights) * self.MIXTURE).astype(np.int64)
        self.shares = np.diff(ends, prepend=0)
        if not self.shares.all():
            raise ValueError(f'{names[int(self.shares.argmin())]} would never come: its weight is below 1 in '
                             f'{2 * self.MIXTURE:,} of all; give it more, or leave it out')
        self.block = functools.lru_cache(maxsize=2)(self.block)

    def num_bytes(self):
        return sum(split.num_bytes() for split in self.splits)

    def arrays(self):
        dtype = max((split.tokens.dtype for split in self.splits), key=lambda dtype: dtype.itemsize)
        tokens, masks = zip(*(split.arrays(dtype) for split in self.splits), strict=True)
        if all(mask is None for mask in masks):
            return np.concatenate(tokens), None
        masks = [np.ones(len(t), np.uint8) if m is None else m for t, m in zip(tokens, masks, strict=True)]
        return np.concatenate(tokens), np.concatenate(masks)

    def block(self, seed, number):
        """(which split, its how many-th window of the block) of each place in a block of MIXTURE windows."""
        which = np.random.default_rng((seed, number)).permutation(np.repeat(np.arange(len(self.splits)), self.shares))
        order = np.empty(self.MIXTURE, dtype=np.int64)
        for k in range(len(self.splits)):
            order[which == k] = np.arange(self.shares[k])
        return which, order

    def starts(self, seed, index):
        blocks, places, starts = index // self.MIXTURE, index % self.MIXTURE, np.empty_like(index)
        for number in np.unique(blocks).tolist():
            which, order = self.block(seed, number)
            for k, split in enumerate(self.splits):
                mine = (blocks == number) & (which[places] == k)
                starts[mine] = self.bases[k] + split.starts(seed + k, number * self.shares[k] + order[places[mine]])
        return starts

    def gather(self, starts):
        starts = np.asarray(starts)
        x, y = (np.empty((len(starts), self.T), dtype=np.int64) for _ in range(2))
        for mine, split, base in self.by_split(starts):
            x[mine], y[mine] = split.gather(starts[mine] - base)
        return x, y

    def num_targets(self, starts):
        starts = np.asarray(starts)
        return sum(split.num_targets(starts[mine] - base) for mine, split, base in self.by_split(starts))

    def by_split(self, starts):
        for k, split in enumerate(self.splits):
            mine = (starts >= self.bases[k]) & (starts < self.bases[k + 1])
            if mine.any():
                yield mine, split, self.bases[k]


def epoch_order(seed, num_tokens, T, epoch):
    """Where an epoch's windows start, in the order in which they come: each is cut at another offset and shuffled."""
    rng = np.random.default_rng((seed, epoch))
    windows = windows_per_epoch(num_tokens, T)
    offset = rng.integers(num_tokens - windows * T)
    return offset + T * rng.permutation(windows)


def windows_per_epoch(num_tokens, T):
    return max((num_tokens - 1) // T - 1, 1)


def share_batch(batch_size, accumulation, world):
    """
    (micro-batch, accumulation) of one process for a global batch of batch_size x accumulation sequences: the largest
    micro-batch up to batch_size that shares it out equally. ValueError names the nearest global batches that would do.
    """
    total = batch_size * accumulation
    if total % world:
        low, high = total // world * world, -(-total // world) * world
        nearest = ' or '.join(str(n) for n in (low, high) if n)
        raise ValueError(f'a global batch of batch_size={batch_size} x gradient_accumulation_steps={accumulation} = '
                         f'{total} sequences cannot be shared equally by {world} processes; {nearest} could')
    mine = total // world
    steps = next(n for n in range(-(-mine // batch_size), mine + 1) if mine % n == 0)
    return mine // steps, steps


class Batches:
    """
    The micro-batches of this process, step by step. On a GPU the split is kept in its memory and gathered there, or,
    where it is too large, a thread reads the next micro-batch into pinned memory while this one is computed.
    """

    def __init__(self, split, cfg, machine):
        self.split, self.cfg, self.machine = split, cfg, machine
        self.global_batch = cfg.batch_size * cfg.gradient_accumulation_steps
        self.micro_batch, self.accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps,
                                                          machine.world)
        self.skips = []  # [step, number]: from this step on the data of so many steps is left out
        self.waited = 0.0  # seconds spent on data
        self.tokens = self.mask = None  # the split, where it is kept on the device
        if kept_on_device(split, cfg, machine):
            self.tokens, self.mask = (None if a is None else torch.from_numpy(a).to(machine.device)
                                      for a in split.arrays())
        reads_ahead = machine.device.type == 'cuda' and self.tokens is None
        self.reader, self.ahead = ThreadPoolExecutor(1) if reads_ahead else None, {}

    def step(self, step):
        """(how many targets of the global batch count, [a function that loads (x, y, seed)] for each micro-batch)."""
        starts = self.starts(step)
        loads = [functools.partial(self.load, starts, step, i) for i in range(self.accumulation)]
        return self.split.num_targets(starts), loads

    def place(self, step):
        """Which batch of the order of the data a step sees: its own number, but for what is left out."""
        return step + sum(number for at, number in self.skips if step >= at)

    def starts(self, step):
        place = self.place(step)
        return self.split.starts(self.cfg.seed, np.arange(place * self.global_batch, (place + 1) * self.global_batch))

    def skip(self, skips):
        """Leaves out what a divergence may have come from; what was read ahead is forgotten."""
        self.skips, self.ahead = skips, {}

    def load(self, starts, step, i):
        began = time.perf_counter()
        if self.tokens is not None:
            x, y = self.gather(torch.from_numpy(starts[self.rows(i)]).to(self.machine.device))
        elif self.reader is None:
            x, y = (torch.from_numpy(a).to(self.machine.device) for a in self.split.gather(starts[self.rows(i)]))
        else:
            following = (step, i + 1) if i + 1 < self.accumulation else (step + 1, 0)
            ready = self.ahead.pop((step, i), None) or self.reader.submit(self.read, step, i)
            self.ahead = {following: self.reader.submit(self.read, *following)}
            x, y = (a.to(self.machine.device, non_blocking=True) for a in ready.result())
        self.waited += time.perf_counter() - began
        return x, y, micro_seed(self.cfg.seed, step, self.machine.rank * self.accumulation + i)

    def rows(self, i):
        """Which windows of a step are those of this process's micro-batch i."""
        first = (self.machine.rank * self.accumulation + i) * self.micro_batch
        return slice(first, first + self.micro_batch)

    def read(self, step, i):
        """A micro-batch in pinned memory, from which copies do not wait; torch keeps it until its copy is done."""
        return [torch.from_numpy(a).pin_memory() for a in self.split.gather(self.starts(step)[self.rows(i)])]

    def gather(self, starts):
        """What Split.gather() does, on the device."""
        places = starts[:, None] + torch.arange(self.split.T + 1, device=starts.device)  # (B, T + 1)
        tokens = self.tokens[places].long()
        if self.tokens.dtype == torch.int16:
            tokens &= 0xffff  # two bytes without a sign, which few operations know
        x, y = tokens[:, :-1], tokens[:, 1:]
        if self.mask is not None:
            y = torch.where(self.mask[places[:, 1:]] == 0, -1, y)
        return x.contiguous(), y.contiguous()


def kept_on_device(split, cfg, machine):
    """Whether the training split goes into the memory of the device."""
    return cfg.data_on_device is True or (cfg.data_on_device == 'auto' and machine.device.type == 'cuda' and
                                          split.num_bytes() <= 0.1 * torch.cuda.mem_get_info(machine.device)[0])


def out_of_memory(error):
    """Whether an exception says that memory was asked for and not there; on CPUs torch has no type for that."""
    return isinstance(error, MemoryError) or re.search('(allocate|out of) memory', str(error)) is not None


def batch_fits(model, batch, machine, cfg, reserve):
    """Whether forward and backward of so many sequences fit beside `reserve` bytes; all processes answer alike."""
    c, failed = model.config, 0.0
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, batch * c.block_size, c.vocab_size,
                                           device_memory(machine.device))
    try:
        held = torch.empty(reserve, dtype=torch.uint8, device=machine.device)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # those of the micro-batches before
        ids = torch.zeros(batch, c.block_size, dtype=torch.int64, device=machine.device)
        model(ids, ids).sum().backward()  # compiled, it needs less
        if machine.device.type == 'cuda':
            torch.cuda.synchronize(machine.device)
        del held
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        failed = 1.0
    model.zero_grad()
    if machine.device.type == 'cuda':
        torch.cuda.empty_cache()
    return not machine.sum(np.array([failed])).any()


def largest_batch(model, sequences, most, machine, cfg, reserve):
    """
    The largest micro-batch up to `most` that fits and divides `sequences`, one process's share of a step; None where
    not one does. At most 131,072 tokens, from where on nothing gets faster. CPUs promise memory that they do not have
    and kill who takes it, so there it is estimated first: 12 bytes a logit, 40 a channel of each layer, of half of all.
    """
    c = model.config
    most = min(most, max(2**17 // c.block_size, 1))
    if machine.device.type == 'cpu':
        each = c.block_size * (12 * c.vocab_size + 40 * c.n_layer * c.n_embd)
        most = min(most, max((device_memory(machine.device) // 2 - reserve) // each, 1))
    sizes = [n for n in range(min(sequences, most), 0, -1) if sequences % n == 0]
    return next((n for n in sizes if batch_fits(model, n, machine, cfg, reserve)), None)


def choose_batch_size(model, split, machine, cfg):
    """
    Puts the largest micro-batch that fits in place of cfg's, for the same step. What the optimizers and the data on
    the device will take is set aside. Returns what to say.
    """
    total = cfg.batch_size * cfg.gradient_accumulation_steps
    if cfg.eval_iters is not None:  # counts batches, and means those that were asked for
        cfg.eval_tokens, cfg.eval_iters = cfg.eval_iters * cfg.batch_size * split.T, None
    mine = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, machine.world)
    reserve = 8 * model.num_params() + (split.num_bytes() if kept_on_device(split, cfg, machine) else 0)
    found = largest_batch(model, math.prod(mine), total, machine, cfg, reserve)
    if found is None:
        raise ValueError(f'batch_size=auto: not even one sequence of {split.T} tokens fits the memory of '
                         f'{machine.device}; the model or block_size must be smaller, or try --loss_chunks=16')
    cfg.batch_size, cfg.gradient_accumulation_steps = found, total // found
    return f'batch_size=auto: {found}, gradient_accumulation_steps={total // found}'


def memory_advice(run):
    """What to say of a batch_size that does not fit, with one that does."""
    batches, alone = run.batches, dataclasses.replace(run.machine, world=1)
    reserve = 0 if any(o.state for o in run.optimizers) else 8 * run.model.num_params()
    found = batches.micro_batch > 1 and largest_batch(run.model, batches.micro_batch * batches.accumulation,
                                                      batches.micro_batch - 1, alone, run.cfg, reserve)
    said = (f'a micro-batch of {batches.micro_batch} sequences of {run.val.T} tokens does not fit the memory of '
            f'{run.machine.device}; ')
    if not found:
        return f'{said}neither does a smaller one: the model or block_size must be smaller, or try --loss_chunks=16'
    return (f'{said}--batch_size={found} --gradient_accumulation_steps={batches.global_batch // found} does and is the '
            'same step, as --batch_size=auto finds by itself')


def micro_seed(seed, step, micro):
    """Dropout's seed: the same for the same micro-batch of the same step on whatever process it runs."""
    return int(np.random.SeedSequence((seed, step, micro)).generate_state(1, np.uint64)[0] >> 1)


# -----------------------------------------------------------------------------
# optimizers

# Newton-Schulz iterations that push all singular values towards 1 (Keller Jordan, https://kellerjordan.github.io/posts/muon)
NS_STEPS, NS_A, NS_B, NS_C = 5, 3.4445, -4.7750, 2.0315


def orthogonalize(G, dtype):
    """The nearest semi-orthogonal matrix, roughly: singular values between 0.7 and 1.2. G: (N, m, n) with m <= n."""
    X = G.to(dtype)
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        A = X @ X.mT  # (N, m, m)
        B = torch.baddbmm(A, A, A, beta=NS_B, alpha=NS_C)
        X = torch.baddbmm(X, B, X, beta=NS_A)
    return X.to(G.dtype)


class Muon(torch.optim.Optimizer):
    """
    Momentum, orthogonalised: every matrix moves by an update whose singular values are all near 1.

    Matrices of one shape are stacked and iterated together; torch.optim.Muon takes them one by one, which costs more
    than a small model's whole step. `rows` says how a parameter falls into independent matrices: queries, keys and
    values share a parameter but not an update. found_inf, when set to 1, makes a step change nothing at all.
    """

    def __init__(self, params, rows, lr, momentum, weight_decay, dtype, world=1, rank=0, compiled=False):
        super().__init__(params, {'lr': lr, 'momentum': momentum, 'weight_decay': weight_decay})
        self.rows, self.dtype, self.world, self.rank = rows, dtype, world, rank
        self.found_inf = torch.zeros((), device=self.param_groups[0]['params'][0].device)
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False) if compiled else orthogonalize

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, momentum, decay = group['lr'], group['momentum'], group['weight_decay']
            params = group['params']
            for p in params:
                if not self.state[p]:
                    self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            buffers = [self.state[p]['momentum_buffer'] for p in params]
            grads, keep = [torch.where(self.found_inf > 0, 0.0, g) for g in grads], 1.0 - self.found_inf
            for g, b in zip(grads, buffers, strict=True):
                b.lerp_(g, (1 - momentum) * keep)
            nesterov = torch._foreach_lerp(grads, buffers, momentum)
            torch._foreach_mul_(params, 1 - lr * decay * keep)
            self.update(params, nesterov, -lr * keep)

    def update(self, params, directions, scale):
        """Adds scale x the orthogonalised directions, all matrices of a shape at a time."""
        shapes = {}
        for p, d in zip(params, directions, strict=True):
            for part, piece in zip(p.split(self.rows[p]), d.split(self.rows[p]), strict=True):
                wide = piece if piece.size(0) <= piece.size(1) else piece.T
                shapes.setdefault(wide.shape, []).append((part, wide, piece.size(0) > piece.size(1)))
        for matrices in shapes.values():
            stack = torch.stack([wide for _, wide, _ in matrices])  # (N, m, n)
            for (part, _, tall), u in zip(matrices, self.shared(stack), strict=True):
                # a tall matrix has fewer singular values than rows, so each row of an update would be too small
                size = max(1.0, part.size(0) / part.size(1)) ** 0.5
                part.add_((u.T if tall else u) * (scale * size))

    def shared(self, stack):
        """Each process orthogonalises its share of the stack, and all get the whole."""
        if self.world == 1:
            return self.orthogonalize(stack, self.dtype)
        N, each = stack.size(0), -(-stack.size(0) // self.world)
        padded = torch.zeros(each * self.world, *stack.shape[1:], device=stack.device, dtype=stack.dtype)
        padded[:N] = stack
        mine = padded[self.rank * each:(self.rank + 1) * each]
        whole = torch.empty_like(padded)
        gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
        gather(whole, self.orthogonalize(mine, self.dtype).contiguous())
        return whole[:N]


def build_optimizers(model, cfg, machine):
    """
    [AdamW] or [AdamW, Muon]. Each group carries 'peak', its learning rate at the top of the schedule. Weight decay is
    for matrices and embeddings; vectors and scalars go without, in two groups as nanoGPT has them.
    """
    wte = model.transformer.wte.weight
    by_muon = [p for p in model.transformer.h.parameters() if cfg.optimizer == 'muon' and p.dim() == 2]
    apart = {*by_muon, wte} if by_muon else set()
    rest = [p for p in model.parameters() if p not in apart]
    decayed = [p for p in rest if p.dim() >= 2]
    groups = [{'params': decayed, 'weight_decay': cfg.weight_decay, 'peak': cfg.learning_rate},
              {'params': [p for p in rest if p.dim() < 2], 'weight_decay': 0.0, 'peak': cfg.learning_rate}]
    if by_muon:
        groups.append({'params': [wte], 'weight_decay': cfg.weight_decay,
                       'peak': cfg.learning_rate if cfg.embed_lr is None else cfg.embed_lr})
    elif cfg.embed_lr is not None:
        raise ValueError(f"embed_lr={cfg.embed_lr} acts under optimizer='muon' only")
    # fused: one kernel a group, and it honours found_inf on the device, so a bad step is skipped without a sync
    adamw = torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)
    if not by_muon:
        return [adamw]
    c = model.config
    D = c.n_embd // c.n_head
    qkv = [c.n_embd, c.n_kv_head * D, c.n_kv_head * D]
    rows = {p: [p.size(0)] for p in by_muon}
    for block in model.transformer.h:
        rows[block.attn.c_attn.weight] = qkv
        if c.mlp == 'swiglu':
            rows[block.mlp.c_fc.weight] = [c.n_ff, c.n_ff]
    # bf16 where the run computes in it: half the time, and the iterations forgive its rounding
    dtype = torch.bfloat16 if machine.dtype == torch.bfloat16 else torch.float32
    muon = Muon(by_muon, rows, cfg.muon_lr, cfg.muon_momentum, cfg.weight_decay, dtype, machine.world, machine.rank,
                machine.compile and machine.device.type == 'cuda')  # on CPUs it is all matmul: nothing to fuse
    muon.param_groups[0]['peak'] = cfg.muon_lr
    return [adamw, muon]


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

@torch.no_grad()
def evaluate(model, split, num_windows, batch, machine, byte_counts=None, stop=None):
    """
    The loss on fixed windows of a split, the same ones whatever the batch or the number of processes: all of it, the
    tail included, or num_windows spread evenly. Label smoothing and dropout do not act.
    Returns {'loss': nats a token, 'stderr': its standard error over windows, 'tokens', 'bpb': bits per byte of the very
    tokens evaluated, None without byte_counts}; None when stop(), asked before each batch, said True on any process.
    """
    T, N = split.T, split.num_tokens
    total = -(-(N - 1) // T)
    windows = np.arange(total) if num_windows is None or num_windows >= total else \
        np.linspace(0, (N - 1) // T - 1, num_windows).round().astype(np.int64)
    sums = np.zeros((3, len(windows)))  # loss, targets, bytes of each window
    mine = np.arange(machine.rank, len(windows), machine.world)
    losses, stopped = [], False
    was_training = model.training
    model.eval()
    for at in range(0, len(mine), batch):
        if stopped := bool(stop and stop()):
            break
        chosen = mine[at:at + batch]
        x, y = eval_batch(split, windows[chosen], batch)
        losses.append(model(*(torch.from_numpy(a).to(machine.device) for a in (x, y)))[:len(chosen)])
        y = y[:len(chosen)]
        sums[1, chosen] = (y >= 0).sum(1)
        if byte_counts is not None:
            sums[2, chosen] = np.where(y >= 0, byte_counts[np.maximum(y, 0)], 0).sum(1)
    model.train(was_training)
    if losses and not stopped:
        sums[0, mine] = torch.cat(losses).cpu().double().numpy()
    *sums, stops = machine.sum(np.append(sums.ravel(), float(stopped)))
    if stops:
        return None
    loss, targets, num_bytes = np.reshape(sums, (3, -1))
    counted = targets > 0
    if not counted.any():
        raise ValueError(f'{split.path} has no target that counts in the windows evaluated; raise eval_tokens')
    mean = loss.sum() / targets.sum()
    spread = (loss - mean * targets)[counted]  # of a ratio of sums, windows being the sample
    n = int(counted.sum())
    stderr = float(np.sqrt((spread**2).sum() * n / max(n - 1, 1)) / targets.sum()) if n > 1 else float('nan')
    return {'loss': float(mean), 'stderr': stderr, 'tokens': int(targets.sum()),
            'bpb': float(loss.sum() / math.log(2) / num_bytes.sum()) if num_bytes.sum() > 0 else None}


def evaluate_any(model, split, num_windows, batch, machine, byte_counts=None, stop=None):
    """
    evaluate(), of a Mixture too: each of its splits on its share of the windows, and their mean by weight, as if the
    windows had been drawn as in training. 'losses' holds those of each.
    """
    if isinstance(split, Split):
        return evaluate(model, split, num_windows, batch, machine, byte_counts, stop)
    shares = [num_windows and max(round(num_windows * weight), 1) for weight in split.weights]
    each = [evaluate(model, s, n, batch, machine, byte_counts, stop)
            for s, n in zip(split.splits, shares, strict=True)]
    if None in each:
        return None
    loss, bits = float(np.dot(split.weights, [e['loss'] for e in each])), None
    if all(e['bpb'] for e in each):  # bits a token over bytes a token, both of the mixture
        bits = float(loss / np.dot(split.weights, [e['loss'] / e['bpb'] for e in each]))
    return {'loss': loss, 'stderr': float(np.linalg.norm(np.multiply(split.weights, [e['stderr'] for e in each]))),
            'tokens': sum(e['tokens'] for e in each), 'bpb': bits,
            'losses': {name: e['loss'] for name, e in zip(split.names, each, strict=True)}}


def eval_batch(split, windows, batch):
    """Windows by index as (batch, T) arrays: rows and the end of the last window that are not there count as -1."""
    T, N = split.T, split.num_tokens
    x, y = np.zeros((batch, T), dtype=np.int64), np.full((batch, T), -1, dtype=np.int64)
    starts = windows * T
    full = starts + T + 1 <= N
    if full.any():
        x[:len(windows)][full], y[:len(windows)][full] = split.gather(starts[full])
    for row in np.flatnonzero(~full):  # the last window of a split is shorter than T
        tail = split.tokens[starts[row]:].astype(np.int64)
        x[row, :len(tail) - 1], y[row, :len(tail) - 1] = tail[:-1], tail[1:]
        if split.mask is not None:
            y[row, :len(tail) - 1][split.mask[starts[row] + 1:] == 0] = -1
    return x, y


def eval_windows(cfg, T):
    """How many windows of the validation and of the training split an evaluation reads; None: all."""
    if cfg.eval_iters is not None:
        return cfg.eval_iters * cfg.batch_size, cfg.eval_iters * cfg.batch_size
    val = None if cfg.eval_tokens is None else max(cfg.eval_tokens // T, 1)
    # the training split is there to see over-fitting, for which a quarter is enough
    return val, max((2**18 if val is None else cfg.eval_tokens // 4) // T, 1)


# -----------------------------------------------------------------------------
# checkpoints

def move_aside(path):
    """Renames a folder, or what a link leads to, to the first free of path.1, path.2, ...; ValueError if it cannot."""
    plain = os.path.realpath(path)
    aside = next(f'{plain}.{n}' for n in range(1, 10**6) if not os.path.lexists(f'{plain}.{n}'))
    try:
        if lies_in(os.curdir, plain):
            raise OSError(errno.EBUSY, 'it is where this command was started')
        os.rename(plain, aside)
    except OSError as e:
        raise ValueError(f'{path} holds a run, and cannot be moved aside ({e.strerror or e}); choose another folder, '
                         'or go on with that run: --init_from=resume') from None
    return aside


RUN_FILES = ('config.py', 'log.jsonl', 'best.pt', 'ckpt.pt')


class OutDir:
    """The folder of a run, owned by one process: its lock, its checkpoints, its log."""

    def __init__(self, path):
        self.path, self.lock, self.saved_step = path, None, None
        self.spare = None  # the step of a checkpoint that stays beyond its time: where a rollback would go

    def __truediv__(self, name):
        return os.path.join(self.path, name)

    def checkpoints(self):
        """Checkpoint files, the newest first."""
        older = glob.glob(glob.escape(self / 'ckpt-') + '[0-9]' * 9 + '.pt')  # no copy that somebody made by hand
        return [p for p in [self / 'ckpt.pt', *sorted(older, reverse=True)] if os.path.exists(p)]

    def holds_run(self):
        return bool(self.checkpoints()) or any(os.path.exists(self / name) for name in ('best.pt', 'log.jsonl'))

    def open(self, fresh, config):
        """Takes the folder, moving the run that is in it aside if this one is fresh. Returns what to tell the user."""
        said = []
        try:
            if fresh and self.holds_run():
                self.take_lock()
                aside = move_aside(self.path)
                self.lock = self.lock and self.lock.close()  # None: the new folder has a lock of its own
                said.append(f'{self.path} held a run: moved to {aside}')
            os.makedirs(os.path.realpath(self.path), exist_ok=True)
            self.take_lock()
            for name in RUN_FILES:  # left by a save that was killed; the lock says that nobody is writing it
                for left in glob.glob(glob.escape(self / name) + '*.tmp'):
                    os.remove(left)
            with open(self / 'config.py', 'w', encoding='utf-8') as f:
                f.write(config)
        except OSError as e:
            raise ValueError(f'out_dir={self.path!r} cannot be written: {e.strerror or e}') from None
        if fcntl is None:
            said.append('out_dir is not locked on this system: start no second run in it')
        return said

    def take_lock(self):
        """Held until the process ends, however it ends. ValueError where another process holds it."""
        if self.lock or fcntl is None:
            return
        self.lock = open(self / '.lock', 'a+')  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            raise ValueError(f'{self.path} is in use by process {self.lock.read().strip() or "unknown"}; choose '
                             'another --out_dir') from None
        self.lock.truncate(0)
        self.lock.write(str(os.getpid()))
        self.lock.flush()

    def numbered(self, step):
        return None if step is None else self / f'ckpt-{step:09d}.pt'

    def save(self, checkpoint, keep):
        """Makes this the latest checkpoint and keeps the one before under its number; removes those beyond `keep`."""
        latest = self / 'ckpt.pt'
        save_checkpoint(latest, checkpoint, keep_old=self.numbered(self.saved_step)
                        if self.saved_step != checkpoint['iter_num'] else None)
        self.saved_step = checkpoint['iter_num']
        for old in self.checkpoints()[keep:]:
            if old != self.numbered(self.spare):
                with contextlib.suppress(OSError):  # it goes with the next
                    os.remove(old)

    def adopt(self, resumed):
        """Makes the checkpoint gone on from the latest; damaged ones are set aside, those rolled back removed."""
        for path in resumed.damaged:
            os.replace(path, path + '.damaged')
        for path in resumed.later:
            os.remove(path)
        if resumed.path != self / 'ckpt.pt':
            os.replace(resumed.path, self / 'ckpt.pt')
        self.saved_step = resumed.checkpoint['iter_num']


@dataclass
class Resumed:
    """A checkpoint to go on from, where it was, the newer ones that are damaged ({path: why}) or not wanted."""
    checkpoint: dict
    path: str
    damaged: dict
    later: list


def find_latest(out_dir, wanted=lambda checkpoint: True):
    """The newest checkpoint that is whole and wanted, None if those are not wanted; ValueError where none is whole."""
    damaged, later = {}, []
    for path in out_dir.checkpoints():
        try:
            checkpoint = load_checkpoint(path)
        except ValueError as e:
            damaged[path] = str(e)
        else:
            if wanted(checkpoint):
                return Resumed(checkpoint, path, damaged, later)
            later.append(path)
    if later:
        return None
    if not damaged:
        raise ValueError(f'init_from=resume, but {out_dir.path} holds no checkpoint; start with --init_from=scratch')
    raise ValueError('\n  '.join([f'no checkpoint in {out_dir.path} is whole:', *damaged.values()])
                     + '\nto start anew: --init_from=scratch')


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
    load_weights(model, checkpoint['model'])
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
    out, resumed = OutDir(cfg.out_dir), None
    if restarted_by_torchrun(out):
        cfg.init_from = 'resume'
        said.append('torchrun restarted this run: resuming')
    if cfg.init_from == 'resume':
        if cfg.mirror_dir and not out.checkpoints() and OutDir(cfg.mirror_dir).checkpoints():
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
    if 'mirror_dir' not in given and cfg.mirror_dir and lies_in(cfg.out_dir, cfg.mirror_dir):
        cfg.mirror_dir = None
        said.append('mirror_dir: none, for this is the mirror of another run')
    wrong = wrong or model_cfg.problems() + cfg.problems()
    if wrong:
        raise ValueError('\n'.join(wrong))


# -----------------------------------------------------------------------------
# data and model, opened together because the one must fit the other

def open_datasets(cfg):
    """[(name, folder, meta, weight)] of cfg.dataset: one, or several, by the weights after colons or by their size."""
    datasets = []
    for word in cfg.dataset.split(','):
        name, _, weight = word.partition(':')
        folder = prepare.dataset_folder(cfg.data_dir, name)
        for path in (folder, os.path.join(folder, 'train.bin'), os.path.join(folder, 'val.bin')):
            if not os.path.exists(path):
                raise ValueError(f'{path} does not exist; make it with: {prepare.how_to_make(name)}')
        meta = prepare.read_meta(folder)
        if datasets and not prepare.same_tokenizer(meta['tokenizer'], datasets[0][2]['tokenizer']):
            raise ValueError(f'the tokenizers of {datasets[0][0]} and {name} differ, so the same ids mean other text; '
                             'prepare one of them with the tokenizer of the other')
        datasets.append((name, folder, meta, weight))
    weights = [float(w) if re.fullmatch(r'\d+\.?\d*|\.\d+', w) else 0.0 for *_, w in datasets]
    if not any(w for *_, w in datasets):
        weights = [float(os.path.getsize(os.path.join(folder, 'train.bin')) // np.dtype(meta['dtype']).itemsize)
                   for _, folder, meta, _ in datasets]
    if not all(weights) and (len(datasets) > 1 or datasets[0][3]):
        raise ValueError(f'dataset={cfg.dataset!r}: give all of them a weight above 0, as in a:0.7,b:0.3, or none')
    return [(name, folder, meta, weight) for (name, folder, meta, _), weight in zip(datasets, weights, strict=True)]


def open_split(datasets, name, T):
    """The Split of that name of one dataset, the Mixture of several."""
    splits = [Split(folder, name, meta, T) for _, folder, meta, _ in datasets]
    return splits[0] if len(splits) == 1 else Mixture([d[0] for d in datasets], splits,
                                                           [d[3] for d in datasets])


def source_of(cfg):
    """Loads what init_from names: (function that builds the model, tokenizer spec or None), or None for scratch."""
    if found := prepare.pretrained(cfg.init_from, cfg.data_dir):
        folder, tokenizer = found
        return functools.partial(load_gpt2, folder), tokenizer
    path = cfg.init_from
    if os.path.isdir(path):
        found = [p for p in (os.path.join(path, 'best.pt'), *OutDir(path).checkpoints()) if os.path.exists(p)]
        if not found:
            raise ValueError(f'init_from={path!r} holds neither a checkpoint nor a Hugging Face config.json')
        path = found[0]
    if not os.path.exists(path):
        raise ValueError(f'init_from={path!r} is not scratch, resume or gpt2*, and no such file or folder exists')
    checkpoint = load_checkpoint(path)
    return functools.partial(model_from, checkpoint['model_args'], checkpoint['model']), checkpoint.get('tokenizer')


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
        return model_from(checkpoint['model_args'], checkpoint['model'], dropout=model_cfg.dropout,
                          label_smoothing=model_cfg.label_smoothing)
    build, tokenizer = source_of(cfg)
    check_tokenizer(tokenizer, meta)
    model = build(**{k: getattr(model_cfg, k) for k in ('dropout', 'label_smoothing') if k in given})
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


def check_tokenizer(tokenizer, meta):
    """ValueError where a checkpoint's tokenizer (None: unknown) is not the dataset's."""
    if tokenizer and not prepare.same_tokenizer(tokenizer, meta['tokenizer']):
        a, b = (f'{t.get("name") or t.get("kind")}' + (f' ({len(t["chars"])} characters)' if 'chars' in t else '')
                for t in (tokenizer, meta['tokenizer']))
        raise ValueError(f'the checkpoint was trained with the tokenizer {a}, the dataset was made with {b}: the same '
                         'ids would mean other text; prepare the data with the tokenizer of the checkpoint')


def byte_table(meta, vocab_size, machine):
    """Bytes of every id the model knows, (vocab_size,), or None where the tokenizer cannot be had."""
    try:
        table = prepare.tokenizer_from(meta['tokenizer']).sizes
    except ValueError as e:
        machine.say(f'bits per byte: not reported, {e}')
        return None
    return np.pad(table, (0, max(vocab_size - len(table), 0)))


# -----------------------------------------------------------------------------
# the run

class StopRequest:
    """
    SIGTERM, SIGINT, SIGHUP, which comes when the terminal goes, or the end of max_minutes: asks for a save as soon as
    that can be. A second SIGINT ends at once.
    """

    def __init__(self, max_minutes):
        self.signal = None
        self.deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)
        if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number, frame):
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.environ.get('RANK', '0') == '0':
                with contextlib.suppress(OSError):  # not print, in the midst of which we may be
                    os.write(2, b'\nstopping when it is saved; Ctrl-C again ends at once, unsaved\n')

    def __call__(self):
        return self.by_signal() or time.monotonic() >= self.deadline

    def by_signal(self):
        return self.signal is not None

    def exit_code(self):
        """128 + the signal's number, as shells have it: 143, 130, 129; 0 after max_minutes."""
        return 128 + self.signal if self.signal else 0


class Mirror:
    """
    A second place for what is finished in out_dir. A thread copies it, so that the run never waits for a slow disk, and
    what goes wrong there is said and harms nothing: it is tried again with the next checkpoint.
    """

    def __init__(self, out, path):
        self.out, self.path, self.copied, self.asked = out, path, {}, queue.SimpleQueue()
        try:
            os.makedirs(os.path.realpath(path), exist_ok=True)
            with open(os.path.join(path, '.hotloop'), 'w'):
                pass
            os.remove(os.path.join(path, '.hotloop'))
        except OSError as e:
            raise ValueError(f'mirror_dir={path!r} cannot be written: {e.strerror or e}; choose '
                             'another place, or --mirror_dir=None') from None

    def open(self, ours):
        """Starts copying, once out_dir is ours; another run that is there is moved aside."""
        if not ours and OutDir(self.path).holds_run():
            tell(f'mirror_dir: {self.path} held a run: moved to {move_aside(self.path)}')
        self.thread = threading.Thread(target=self.copy_all, daemon=True)
        self.thread.start()

    def update(self):
        """Asks for a copy of what is new; one that is under way comes first."""
        self.asked.put(True)

    def copy_all(self):
        while self.asked.get():
            for name in (name for name in RUN_FILES if os.path.exists(self.out / name)):
                try:
                    os.makedirs(os.path.realpath(self.path), exist_ok=True)
                    self.copy(self.out / name, os.path.join(self.path, name))
                except OSError as e:
                    tell(f'mirror_dir: {name} could not be copied to {self.path}: {e.strerror or e}; training goes on')

    def copy(self, source, target):
        with open(source, 'rb') as f:  # a file that is replaced meanwhile stays as it was opened
            about = os.fstat(f.fileno())
            version = about.st_ino, about.st_mtime_ns, about.st_size
            if self.copied.get(target) == version and os.path.exists(target):
                return
            with open(f'{target}.tmp', 'wb') as g:
                shutil.copyfileobj(f, g, 2**20)
                g.flush()
                os.fsync(g.fileno())
        os.replace(f'{target}.tmp', target)
        self.copied[target] = version

    def close(self, seconds):
        """Waits for the last copy, but not for ever."""
        self.asked.put(True)
        self.asked.put(False)
        self.thread.join(seconds)
        if self.thread.is_alive():
            tell(f'mirror_dir: {self.path} did not take the last checkpoint within {seconds} s')


class Log:
    """The same numbers as a line for people, a line of log.jsonl for programs, and to wandb when asked."""

    def __init__(self, out, cfg, settings, machine, resumed):
        self.machine, self.file, self.wandb, self.told = machine, None, None, False
        if machine.rank:
            return
        self.path = out / 'log.jsonl'
        self.open(resumed)
        if cfg.wandb_log:
            import wandb
            wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or cfg.out_dir, config=settings)
            self.wandb = wandb

    def write(self, text, **numbers):
        self.machine.say(text)
        if self.file:  # JSON knows neither NaN nor infinity
            told = {k: v for k, v in numbers.items() if v is not None and (isinstance(v, str) or math.isfinite(v))}
            self.attempt(self.file.write, json.dumps(told) + '\n')
        if self.wandb:
            self.wandb.log(numbers, step=numbers['step'])

    def open(self, state):
        """Forgets what comes after the state, if there is one, that the run goes on from."""
        if state is not None and os.path.exists(self.path):
            self.attempt(keep_lines, self.path, state.iter_num, state.evaluation_left)
        self.file = open(self.path, 'a', encoding='utf-8', buffering=1)  # noqa: SIM115

    def attempt(self, action, *args):
        """On a full disk, which is told once, a line waits in the buffer for the first that finds room."""
        try:
            action(*args)
        except OSError as e:
            if not self.told:
                self.machine.say(f'{self.path} could not be written: {e.strerror or e}; training goes on')
            self.told = True

    def go_back(self, state):
        if self.file:
            self.attempt(self.file.close)
            self.open(state)

    def close(self):
        if self.file:
            self.attempt(self.file.close)
        if self.wandb:
            self.wandb.finish()


def keep_lines(path, last_step, evaluation_left):
    """
    Drops the lines of a log that will come again, those after a step and, where it is left, its evaluation, and those
    that a crash left torn.
    """
    def belongs(line):
        try:
            told = json.loads(line)
            return told['step'] <= last_step - (evaluation_left and 'val_loss' in told)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
    with open(path, encoding='utf-8', errors='replace') as f, open(f'{path}.tmp', 'w', encoding='utf-8') as kept:
        kept.writelines(line for line in f if line.endswith('\n') and belongs(line))
    os.replace(f'{path}.tmp', path)


def duration(seconds):
    """90 -> 1m30s."""
    m, s = divmod(int(seconds), 60)
    h, m = divmod(m, 60)
    return f'{h}h{m:02d}m' if h else f'{m}m{s:02d}s' if m else f'{s}s'


def count(n, noun):
    """1 process, 2 processes."""
    return f'{n} {noun}' + ('' if n == 1 else 'es' if noun.endswith(('s', 'h')) else 's')


def peak_memory(device):
    """Most bytes in use so far: the allocator's on a GPU, the process's elsewhere; None where neither is told."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024


@dataclass
class Run:
    """What the loop works with, put together by main."""
    cfg: TrainConfig
    settings: dict  # all of them, flat, as the checkpoint keeps them
    machine: Machine
    model: GPT
    forward: torch.nn.Module  # the model, compiled where that was chosen
    batches: Batches
    val: Split | Mixture
    byte_counts: np.ndarray | None
    optimizers: list
    scaler: torch.amp.GradScaler
    params: list
    state: RunState
    out: OutDir
    log: Log
    context: dict  # what a checkpoint tells of tokenizer, data and machine
    stop: StopRequest | None = None
    mirror: Mirror | None = None
    tokenizer: prepare.Tokenizer | None = None  # where samples are asked for
    failed_saves: int = 0
    diverged_at: int | None = None  # a step; acted upon where all processes are at the same one


def evaluate_both(run, stop=None):
    """Validation and training loss: (line for people, numbers), or None where stop() became true meanwhile."""
    cfg, machine = run.cfg, run.machine
    num_val, num_train = eval_windows(cfg, run.val.T)
    began = time.perf_counter()
    evaluation = functools.partial(evaluate_any, run.forward, batch=run.batches.micro_batch, machine=machine,
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


def book_evaluation(run, may_stop=True):
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
    if run.machine.rank:
        return
    without = ('optimizer', 'muon', 'scaler', 'state')
    best = {name: part for name, part in checkpoint_of(run).items() if name not in without}
    try:
        save_checkpoint(run.out / 'best.pt', best)
    except ValueError as e:
        if run.state.iter_num >= run.cfg.max_iters:
            raise
        run.state.best_val_loss = before  # so that best.pt is the best of those it could hold
        run.machine.say(f'{e}; training goes on')


def write_sample(run):
    """
    What the model writes by now, into the log. The seed is of this step, and of nobody else: neither dropout nor the
    order of the data notices. On one process; the others wait for it at the next reduction.
    """
    if run.machine.rank:
        return
    cfg, tokenizer, was_training = run.cfg, run.tokenizer, run.model.training
    eot, prompt = tokenizer.eot, prepare.prompt_ids(tokenizer, cfg.sample_prompt)
    run.model.eval()
    drawn = run.model.generate([prompt], cfg.sample_tokens, stop={eot}, temperature=0.8, top_k=200,
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
    if run.machine.rank:
        return
    checkpoint = checkpoint_of(run)
    try:
        run.out.save(checkpoint, run.cfg.keep_last)
    except ValueError as e:
        run.failed_saves += 1
        if run.failed_saves == 3 or final:
            raise
        run.machine.say(f'{e}; training goes on')
    else:
        run.failed_saves = 0
        if run.mirror:
            run.mirror.update()


def settle(run, pending):
    """
    Waits for the steps in `pending` and books them: a step that was skipped never enters an average. The run has
    diverged when MAX_BAD_STEPS in a row were not finite, or, where that is a reason to roll back, spikes; at which step
    is found step by step, however many are pending, and kept in run.diverged_at.
    """
    state, rolls_back = run.state, run.cfg.on_divergence == 'rollback'
    loss_sum, targets, skipped, steps = state.logged or (0.0, 0, 0, 0)
    step = state.iter_num - len(pending)
    for loss, bad, num_targets in pending:
        step, steps = step + 1, steps + 1
        if bad.item():
            skipped += 1
            state.bad_in_a_row += 1
        else:
            loss_sum, targets = loss_sum + loss.item(), targets + num_targets
            book_loss(run, step, loss.item() / max(num_targets, 1))
        counted = state.bad_in_a_row - (0 if rolls_back else state.spikes_in_a_row)
        if counted >= MAX_BAD_STEPS and run.diverged_at is None:
            run.diverged_at = step
    pending.clear()
    state.logged = [loss_sum, targets, skipped, steps]


def book_loss(run, step, loss):
    """Books the loss of a step; a spike is told once, and spikes that stay are the new level in the end."""
    state, usual = run.state, run.state.recent
    if len(usual) < SPIKE_WINDOW // 4 or loss <= np.mean(usual) + SPIKE * max(np.std(usual), 1e-3):
        state.bad_in_a_row = state.spikes_in_a_row = 0
        state.recent = [*usual, loss][-SPIKE_WINDOW:]
        return
    if not state.spikes_in_a_row:
        run.log.write(f'step {step}: loss {loss:.4f} is a spike: the {len(usual)} steps before had '
                      f'{np.mean(usual):.4f} +- {np.std(usual):.4f}', step=step, spike=loss)
    state.bad_in_a_row, state.spikes_in_a_row = state.bad_in_a_row + 1, state.spikes_in_a_row + 1
    if run.cfg.on_divergence == 'stop' and state.spikes_in_a_row >= MAX_BAD_STEPS:
        state.bad_in_a_row, state.spikes_in_a_row, state.recent = 0, 0, []


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
    run.machine.sum(np.zeros(1))  # all have read it before it is renamed
    if run.machine.rank == 0:
        run.out.adopt(resumed)
    run.log.go_back(state)
    run.log.write(f'{what}: back to step {back.iter_num}, leaving out the data of {left_out} steps', step=back.iter_num,
                  rolled_back_from=here)


def log_step(run, lr, norm, seconds, steps, waited, first):
    """One line on the steps since the last. first: its seconds hold the compilation and say nothing about speed."""
    state, cfg, machine = run.state, run.cfg, run.machine
    loss_sum, targets, skipped, _ = state.logged
    state.logged = []
    loss = loss_sum / targets if targets else None
    tokens = steps * run.batches.global_batch * run.val.T
    flops = tokens * run.model.flops_per_token(run.val.T) / seconds / machine.world
    peak = peak_flops(machine.device, machine.dtype)
    mfu = flops / peak if peak else None
    memory = peak_memory(machine.device)
    left = (cfg.max_iters - state.iter_num) * seconds / steps
    speed = (f'{seconds / steps * 1000:.1f} ms, {tokens / seconds:,.0f} tok/s, mfu {f"{mfu:.1%}" if mfu else "n/a"}, '
             f'data {waited / seconds:.1%}, {duration(left)} left')
    text = (f'step {state.iter_num}/{cfg.max_iters}: loss {"n/a" if loss is None else f"{loss:.4f}"}, lr {lr:.2e}, '
            f'norm {norm:.2f}, {f"{seconds:.1f} s, start-up included" if first else speed}'
            + (f'; {skipped} steps skipped, not finite' if skipped else ''))
    speeds = {} if first else {'ms': seconds / steps * 1000, 'tokens_per_s': tokens / seconds, 'mfu': mfu,
                               'data_share': waited / seconds}
    run.log.write(text, step=state.iter_num, loss=loss, lr=lr, grad_norm=norm, tokens_seen=state.tokens_seen,
                  skipped=skipped or None, peak_memory_mb=memory and memory / 1e6, **speeds)


def train(run):
    """The loop. Returns the exit code: 0, or 128 + the signal that ended it."""
    cfg, machine, state, batches, stop = run.cfg, run.machine, run.state, run.batches, run.stop
    lagging = machine.world > 1 and machine.device.type == 'cuda'
    pending, stop_flag, saved_at = [], lambda: 0.0, time.monotonic()
    first_step = state.iter_num

    if state.evaluation_left:
        book_evaluation(run)
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
                          machine.world, stop, run.model.config.dropout)
        if told is None:  # a signal in the midst of a step, of which nothing is kept
            settle(run, pending)
            if state.iter_num > first_step:
                save(run, final=True)
            return stopped(run)
        loss, norm, bad, stops = told
        pending.append((loss, bad, num_targets))
        state.iter_num += 1
        state.tokens_seen += batches.global_batch * run.val.T
        last_flag, stop_flag = stop_flag, read_later(stops) if machine.world > 1 else stop
        stopping = bool((last_flag if lagging else stop_flag)())

        step, last = state.iter_num, state.iter_num == cfg.max_iters
        log_due = step == 1 or step % cfg.log_interval == 0 or last
        eval_due = last or step % cfg.eval_interval == 0
        planned = cfg.save_interval is not None and step % cfg.save_interval == 0
        # what all processes come to at the same step; their clocks differ
        together = log_due or eval_due or planned or stopping or step % 50 == 0
        save_due = stopping or planned or time.monotonic() - saved_at > 60 * cfg.save_minutes
        if together or save_due:
            settle(run, pending)  # waits for the device
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
            best = book_evaluation(run, may_stop=not last)
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
            machine.sum(np.zeros(1))  # torchrun gives all 30 seconds from when the first has ended
            return stopped(run)
    memory = peak_memory(machine.device)
    machine.say(f'done: best val loss {state.best_val_loss:.4f}' + (f', peak memory {memory / 1e6:,.0f} MB' if memory
                else '') + f'; see what it writes: python sample.py --out_dir={shlex.quote(cfg.out_dir)}')
    return 0


def stopped(run):
    """Says how to go on; returns the exit code."""
    if run.state.iter_num:
        run.machine.say(f'stopped at step {run.state.iter_num} and saved; go on with: python train.py '
                        f'--init_from=resume --out_dir={shlex.quote(run.cfg.out_dir)}')
    else:
        run.machine.say('stopped before step 1: there is nothing to save')
    return run.stop.exit_code()


def profile_steps(run, warm=5, timed=20):
    """Prints where the time of a few warm steps goes, and writes out_dir/trace.json for chrome://tracing."""
    from torch.profiler import ProfilerActivity, profile
    cfg, machine, batches = run.cfg, run.machine, run.batches
    on_gpu = machine.device.type == 'cuda'

    def steps(first, number):
        began = time.perf_counter()
        for step in range(first, first + number):
            num_targets, loads = batches.step(step)
            set_learning_rate(run.optimizers, learning_rate(step, cfg), cfg.learning_rate)
            loss, *_ = train_step(run.forward, run.params, loads, num_targets, run.optimizers, run.scaler,
                                  cfg.grad_clip, machine.world, dropout=run.model.config.dropout)
        loss.item()  # waits for the device
        return (time.perf_counter() - began) / number
    steps(0, warm)
    seconds, waited = steps(warm, timed), batches.waited
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        steps(warm + timed, 3)
    if machine.rank:
        return
    tokens = batches.global_batch * run.val.T
    print(profiler.key_averages().table(sort_by='self_cuda_time_total' if on_gpu else 'self_cpu_time_total',
                                        row_limit=25, max_name_column_width=70))
    os.makedirs(cfg.out_dir, exist_ok=True)
    profiler.export_chrome_trace(os.path.join(cfg.out_dir, 'trace.json'))
    print(f'{seconds * 1000:.1f} ms a step without the profiler, {tokens / seconds:,.0f} tok/s, data '
          f'{waited / (seconds * (warm + timed)):.1%}; the table is of 3 steps, and {cfg.out_dir}/trace.json is for '
          'chrome://tracing or perfetto')


def announce(run, model_cfg, given, said, meta, resumed):
    """What this run is, once, with the reasons."""
    cfg, machine, model, batches, say = run.cfg, run.machine, run.model, run.batches, run.machine.say
    for line in said:
        say(line)
    told = differences([model_cfg, cfg], given, 'checkpoint' if resumed else 'derived')
    say(f'settings that differ from the defaults:\n{told}')
    more = torch.cuda.device_count() if machine.device.type == 'cuda' and machine.world == 1 else 1
    say(f'device: {machine.device} ({machine.reasons["device"]}), {count(machine.world, "process")} of '
        f'{count(machine.threads, "thread")}'
        + (f'; {more} GPUs are here: "torchrun --standalone --nproc_per_node={more}" in place of "python" uses all'
           if more > 1 else ''))
    if machine.world > 1:
        say(f'processes: one that hears nothing of the others for {cfg.timeout_minutes:g} minutes gives up '
            '(timeout_minutes)')
    say(f'dtype: {str(machine.dtype).removeprefix("torch.")} ({machine.reasons["dtype"]})')
    say(f'compile: {"on" if machine.compile else "off"} ({machine.reasons["compile"]})')
    say(f'attention: scaled_dot_product_attention, {attention_kernel(model, batches.micro_batch, machine)} kernel')
    kind = meta['tokenizer'].get('name') or meta['tokenizer']['kind']
    shares = f' ({", ".join(f"{w:.1%}" for w in run.val.weights)})' if isinstance(run.val, Mixture) else ''
    say(f'data: {cfg.dataset}{shares}, {batches.split.num_tokens:,} training and {run.val.num_tokens:,} validation '
        f'tokens, {kind} tokenizer' + (' (no meta.json: read as nanoGPT would)' if meta['foreign'] else '')
        + (', kept on the device' if batches.tokens is not None else ''))
    c = model.config
    say(f'model: {c.preset}, {c.n_layer} layers x {c.n_embd} channels x {c.n_head} heads, context {c.block_size}, '
        f'vocabulary {c.vocab_size}: {model.num_params():,} parameters, '
        f'{model.flops_per_token(c.block_size) / 1e6:,.1f} MFLOP a token')
    say(f'batch: {count(batches.micro_batch, "sequence")} x {count(batches.accumulation, "micro-batch")} x '
        f'{count(machine.world, "process")} = '
        f'{batches.global_batch * c.block_size:,} tokens a step')
    epochs = cfg.max_iters * batches.global_batch / windows_per_epoch(batches.split.num_tokens, c.block_size)
    say(f'run: {cfg.max_iters:,} steps, {cfg.max_iters * batches.global_batch * c.block_size:,} tokens, {epochs:.2f} '
        f'epochs, into {cfg.out_dir}' + (f'; resuming at step {run.state.iter_num:,}' if resumed else ''))
    if model.loss_chunks > 1:
        say(f'loss: in {model.loss_chunks} parts, for memory')
    if cfg.decay_lr and cfg.min_lr > cfg.learning_rate:
        say(f'note: min_lr={cfg.min_lr:g} is above learning_rate={cfg.learning_rate:g}: the rate will rise')
    idle = {'muon_lr': cfg.optimizer == 'muon', 'muon_momentum': cfg.optimizer == 'muon', 'lr_schedule': cfg.decay_lr,
            'min_lr': cfg.decay_lr, 'lr_decay_iters': cfg.decay_lr, 'compile_mode': machine.compile,
            'decay_fraction': cfg.decay_lr and cfg.lr_schedule == 'linear', 'eval_tokens': cfg.eval_iters is None,
            'sample_prompt': cfg.sample_interval, 'sample_tokens': cfg.sample_interval}
    for name in (name for name, acts in idle.items() if name in given and not acts):
        say(f'note: {name} does nothing under the other settings')
    if cfg.warmup_iters >= cfg.max_iters:
        say(f'note: the warm-up of {cfg.warmup_iters} steps is longer than the run')


def main(argv=None):
    model_cfg, cfg, given, resumed, said, auto_batch = read_settings(argv)
    datasets = open_datasets(cfg)
    machine = open_machine(cfg)
    try:
        run = build_run(model_cfg, cfg, given, datasets, machine, resumed, auto_batch, said)
        announce(run, model_cfg, given, said, datasets[0][2], resumed)
        if cfg.eval_only:
            machine.say(evaluate_both(run)[0])
        elif cfg.profile:
            profile_steps(run)
        elif run.state.iter_num >= cfg.max_iters and not run.state.evaluation_left:
            machine.say(f'nothing to do: the run is at step {run.state.iter_num:,} of {cfg.max_iters:,}')
        else:
            take_folder(run, resumed)
            return train_and_close(run)
        return 0
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        raise ValueError(f'the model does not fit the memory of {machine.device} ({first_line(e)}); n_layer, n_embd, '
                         'block_size or batch_size must be smaller') from None
    finally:
        gc.unfreeze()
        if machine.world > 1:
            dist.destroy_process_group()
            # torchrun ends all when one has ended; to a Python that is shutting down that would be a death by signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_run(model_cfg, cfg, given, datasets, machine, resumed, auto_batch, said):
    """The Run, ready but for its folder. Adds to `said` what announce() is to tell."""
    meta, checkpoint = datasets[0][2], resumed.checkpoint if resumed else None
    in_turn = cfg.init_from not in ('scratch', 'resume')  # rank 0 goes first, and downloads for all
    if in_turn and machine.rank:
        machine.sum(np.zeros(1))
    model = build_model(model_cfg, cfg, given, meta, checkpoint)
    if in_turn and not machine.rank:
        machine.sum(np.zeros(1))
    T = model.config.block_size
    splits = {name: open_split(datasets, name, T) for name in ('train', 'val')}
    if machine.rank == 0:
        for part in splits['train'].splits + splits['val'].splits:
            part.check_ids(model.config.vocab_size)
    context = context_of(datasets, splits, machine)
    if checkpoint is not None:
        said += compare_context(checkpoint, context)
    tokenizer = prepare.tokenizer_from(meta['tokenizer']) if cfg.sample_interval else None
    if tokenizer:
        tokenizer.begin = context.get('bos')
        prepare.prompt_ids(tokenizer, cfg.sample_prompt)  # what it cannot read is said now, not in mid-run

    stop = None if cfg.eval_only or cfg.profile else StopRequest(cfg.max_minutes)
    model.to(machine.device)
    model.compute_dtype = machine.dtype
    forward = compiled(model, cfg, machine)
    if auto_batch and not cfg.eval_only:
        said.append(choose_batch_size(model, splits['train'], machine, cfg))
    batches = Batches(splits['train'], cfg, machine)
    model.loss_chunks = choose_loss_chunks(cfg.loss_chunks, batches.micro_batch * T, model.config.vocab_size,
                                           device_memory(machine.device))
    if cfg.max_epochs is not None:
        per_epoch = windows_per_epoch(splits['train'].num_tokens, T)
        cfg.max_iters = math.ceil(cfg.max_epochs * per_epoch / batches.global_batch)
        said.append(f'max_epochs={cfg.max_epochs:g}: {cfg.max_iters:,} steps')
    optimizers = [] if cfg.eval_only else build_optimizers(model, cfg, machine)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    state = RunState()
    if resumed:
        state = state_from(checkpoint) if cfg.eval_only else restore(checkpoint, model, optimizers, scaler)
    batches.skip(state.skips)
    check_agreement(model, state, machine)
    settings = {**dataclasses.asdict(model.config), **dataclasses.asdict(cfg)}
    if resumed:  # where the weights first came from
        settings['init_from'] = str(checkpoint.get('config', {}).get('init_from', 'scratch'))
    return Run(cfg, settings, machine, model, forward, batches, splits['val'],
               byte_table(meta, model.config.vocab_size, machine), optimizers, scaler, list(model.parameters()), state,
               OutDir(cfg.out_dir), None, context, stop, tokenizer=tokenizer)


def context_of(datasets, splits, machine):
    """What a checkpoint tells of its data, tokenizer and machine, beside the settings."""
    device = torch.cuda.get_device_name(machine.device) if machine.device.type == 'cuda' else machine.device.type
    context = {'tokenizer': datasets[0][2]['tokenizer'], 'run_id': os.environ.get('TORCHELASTIC_RUN_ID', 'none'),
               'data': {n: ' '.join(part.fingerprint() for part in s.splits) for n, s in splits.items()},
               'versions': {'torch': str(torch.__version__), 'numpy': np.__version__},
               'machine': {'device': device, 'dtype': str(machine.dtype), 'world': machine.world,
                           'threads': machine.threads, 'compile': machine.compile}}
    templates = {template for _, _, meta, _ in datasets for template in meta.get('templates', [])}
    if len(templates) == 1:  # of several none can be called the one to talk to the model in
        context['template'] = templates.pop()
    if all(meta.get('bos') is not None for _, _, meta, _ in datasets):
        context['bos'] = datasets[0][2]['bos']  # with which a prompt begins
    return context


def take_folder(run, resumed):
    """Makes out_dir, and the mirror, this run's own, and opens its log."""
    cfg, machine = run.cfg, run.machine
    if machine.rank == 0:
        run.mirror = cfg.mirror_dir and Mirror(run.out, cfg.mirror_dir)
        repeats = [run.model.config, dataclasses.replace(cfg, init_from=run.settings['init_from'])]
        text = as_file(repeats, 'all settings of the run in this folder; as a config file it repeats the run')
        for line in run.out.open(resumed is None, text):
            machine.say(line)
        if run.mirror:
            before = resumed and resumed.checkpoint.get('config', {}).get('mirror_dir')
            run.mirror.open(ours=before and os.path.realpath(str(before)) == os.path.realpath(cfg.mirror_dir))
        if resumed:
            run.out.adopt(resumed)
    run.log = Log(run.out, cfg, run.settings, machine, run.state if resumed else None)


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


def check_agreement(model, state, machine):
    """
    ValueError unless all processes start from the same step and weights: where nodes share no disk, one of them may
    have found another checkpoint, or none. Also the point after which nobody reads out_dir, and rank 0 may move it.
    """
    weights = sum(p.detach().cpu().double().sum().item() for p in model.parameters())  # Apple GPUs have no float64
    if not math.isfinite(weights):
        raise ValueError('the weights to start from are not finite; start from an earlier checkpoint or anew')
    mine = np.array([state.iter_num, weights])
    mean = machine.sum(mine) / machine.world
    if not np.allclose(mine, mean, rtol=1e-9, atol=1e-9):
        raise ValueError(f'the processes do not start from the same weights: this one is at step {state.iter_num:,}, '
                         f'all {machine.world} on average at {mean[0]:g}; out_dir must be a folder that all of them '
                         'share')


def compare_context(checkpoint, context):
    """ValueError if the data is not what the run was trained on; a line for each other difference."""
    if 'data' in checkpoint and checkpoint['data'] != context['data']:
        raise ValueError(f'the dataset is not the one this run was trained on: fingerprints {checkpoint["data"]} '
                         f'before, {context["data"]} now; restore it, or start a new run with --init_from=PATH')
    return [f'{name}: {was} before, {now} from here on; the bits of an unbroken run need the same'
            for part in ('versions', 'machine') for name, now in context[part].items()
            if (was := checkpoint.get(part, {}).get(name, now)) != now]


if __name__ == '__main__':
    if 'TORCHELASTIC_RUN_ID' in os.environ:  # torchrun's summary shows the traceback of the process that failed first
        from torch.distributed.elastic.multiprocessing.errors import record
        call_main = record(call_main)
    call_main(main)
