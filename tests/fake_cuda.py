"""
CUDA paths without CUDA: the real step, evaluation and generation on fake tensors, which have a device, a
dtype and a shape, but no memory. A host tensor in a step, a host sync or a mix of dtypes raises; the bytes
that exist are counted. Kernels, streams, collectives, graphs and numbers are not seen.

    $ python tests/fake_cuda.py SHIM [options of pytest]  # SHIM: fake_cuda.cpp, built as in test_fake_cuda.py
"""

import ctypes
import sys

import pytest

if __name__ == '__main__':  # before torch is imported, which asks its registries only once
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    sys.exit(pytest.main([__file__, *sys.argv[2:]]))

from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from conftest import noise, write_bins
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from hotloop.inference.generate import Sampling, generate
from hotloop.inference.kv_cache import KVCache
from hotloop.inference.quantize import prepare_for_inference
from hotloop.system.distributed import Env
from hotloop.training import dataloader
from hotloop.training.checkpoint import Checkpoints
from hotloop.training.dataloader import Batches, Split
from hotloop.training.evaluate import evaluate
from hotloop.training.forecast import MACHINES, LiveBytes, flash_on_meta, memory_of
from hotloop.training.memory import choose_loss_chunks
from hotloop.training.optim import build_optimizers
from hotloop.weights.lora import LoRAConfig, add_adapters
from model import GPT, MLP, GPTConfig, Linear
from train import TrainConfig

CUDA = torch.device('cuda', 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten
ONE_DTYPE = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.index_put, aten.index_put_,
             aten._scaled_dot_product_flash_attention)
COPIES = (aten._to_copy, aten.copy_)


class Strict(LiveBytes):
    """Raises for what fake kernels let pass: arguments of several dtypes and, if asked, copies that wait."""
    supports_higher_order_operators = True

    def __init__(self, known=(), copies=False):
        super().__init__(known)
        self.copies = copies
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if isinstance(func, HigherOrderOperator):  # FlexAttention, whose bytes are not counted
            return func(*args, **(kwargs or {}))
        name, tensors = func.overloadpacket, [leaf for leaf in tree_leaves(args) if torch.is_tensor(leaf)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if name in ONE_DTYPE and len(dtypes) > 1:
            raise RuntimeError(f'{name} of several dtypes: {sorted(map(str, dtypes))}')
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the rows of this process
        self.calls[name.__name__] += 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.copies and name in COPIES and result.device != tensors[-1].device:
            non_blocking = (kwargs or {}).get('non_blocking') or True in args[2:]
            if not (non_blocking and hasattr(tensors[-1], 'pinned')):
                raise RuntimeError(f'a copy from {tensors[-1].device} to {result.device} that waits')
        return result


class Copies(TorchDispatchMode):
    """Lists whether each copy from the GPU to the host waits; one that does not needs a synchronize()."""

    def __init__(self):
        super().__init__()
        self.waited = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in COPIES and result.device.type == 'cpu' and args[-1].device == CUDA:
            self.waited.append(not (kwargs or {}).get('non_blocking'))
        return result


def pin_memory(tensor):
    """Fake tensors cannot be pinned; Strict looks for this mark."""
    tensor.pinned = True
    return tensor


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Every tensor is fake; three functions that do not take fake tensors, or ask for a GPU, are replaced."""
    monkeypatch.setattr('torch.cuda.amp.common.amp_definitely_not_available', lambda: False)
    monkeypatch.setattr(torch.Tensor, 'pin_memory', pin_memory)
    from_numpy, gather = torch.from_numpy, Split.gather

    def gather_on_host(split, starts):
        with unset_fake_temporarily():
            return gather(split, starts)
    monkeypatch.setattr(Split, 'gather', gather_on_host)
    with FakeTensorMode() as mode:
        monkeypatch.setattr(torch, 'from_numpy', lambda array: mode.from_tensor(from_numpy(array)))
        yield


@pytest.fixture
def split(tmp_path):
    """split(T) returns a training Split of windows of T tokens."""
    def build(T):
        write_bins(tmp_path / 'data', noise(20 * T), noise(5 * T))
        meta = {'dtype': 'uint16', 'vocab_size': 257, 'foreign': False, 'splits': {}}
        return Split(str(tmp_path / 'data'), 'train', meta, T)
    return build


def fake_gpt(dtype, chunks=1, **settings):
    tiny = dict(block_size=16, vocab_size=257, n_layer=1, n_head=4, n_embd=32)
    with CUDA:
        model = GPT(GPTConfig(**{**tiny, **settings}))
    model.compute_dtype, model.loss_chunks = dtype, chunks
    return model


def sum_bucket(reduced, bucket):
    """Reduce a bucket. The work of a fake process group has no result, which DDP's hook would read."""
    reduced.append(bucket)
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


dataloader.kept_on_device = lambda split, env: True  # no fake device says how much memory is free


def run_steps(model, split, world=1, documents=None, **settings):
    """Two real steps as train.py sets them up, of two micro-batches. Returns their Strict: peak and calls."""
    sizes = dict(batch_size=4, gradient_accumulation_steps=2 * world)
    cfg, dtype = TrainConfig(**{**sizes, **settings}), model.compute_dtype
    env = Env(rank=3 if world > 1 else 0, world=world, device=CUDA, dtype=dtype)
    batches, reduced = Batches(split(model.config.block_size), cfg, env), []
    scaler = torch.amp.GradScaler('cuda', enabled=dtype == FP16)
    _, forward = train.wrap(model, cfg, env)
    optimizers = build_optimizers(model, cfg, env)
    replicated = isinstance(forward, DistributedDataParallel)
    if replicated:
        forward.register_comm_hook(reduced, sum_bucket)
    known = [*model.parameters(), *model.buffers()]
    strict = Strict(known)
    for step in range(2):
        strict.copies = step > 0  # the first step may copy what later ones keep on the device
        reduced.clear()
        strict.calls.clear()
        with strict, flash_on_meta():
            data = batches.step(step)
            if documents is not None:
                loaders = [partial(with_documents, load, documents) for load in data.loaders]
                data = data._replace(loaders=loaders)
            result = train.train_step(forward, data, optimizers, scaler, cfg, env)
        assert {tensor.device for tensor in result} == {CUDA}
        assert sum(bucket.is_last() for bucket in reduced) == replicated  # each bucket once a step
    strict.peak += sum(tensor.nbytes for tensor in known)
    return strict


def with_documents(load, documents):
    x, y, seed = load()
    return x, y, documents, seed


# -----------------------------------------------------------------------------
# the step

@pytest.mark.parametrize('dtype, shape, chunks, settings', [
    (BF16, {}, 1, {}), (FP16, {}, 1, dict(optimizer='muon')), (FP32, {}, 1, {}),
    (BF16, dict(preset='modern'), 1, dict(optimizer='muon')), (FP16, dict(preset='modern'), 1, {}),
    (FP32, dict(preset='modern'), 1, dict(optimizer='muon')),
    (BF16, dict(n_kv_head=2, mlp='swiglu', bias=True), 1, dict(optimizer='muon')),
    (BF16, dict(preset='modern', n_kv_head=2, dropout=0.1, label_smoothing=0.1), 4, dict(recompute='full')),
    (BF16, dict(softcap=15.0, dropout=0.1), 1, dict(recompute='selective', grad_clip=0.0)),
    (FP16, dict(preset='modern', n_layer=2, mixer='CA', bigram_rows=64, value_embed=True, head_gate=True),
     1, dict(optimizer='muon'))], ids=str)
def test_a_step(split, dtype, shape, chunks, settings):
    run_steps(fake_gpt(dtype, chunks, **shape), split, **settings)


@pytest.mark.parametrize('shape, masked, recompute', [
    (dict(window=8, window_pattern='SL', n_layer=2), False, 'none'), (dict(attn_softcap=5.0), False, 'full'),
    (dict(window=8, n_kv_head=2), True, 'selective')], ids=str)
def test_a_step_within_windows_and_documents(split, monkeypatch, shape, masked, recompute):
    """FlexAttention's own fake kernel; its masks are made and used uncompiled."""
    monkeypatch.setattr('torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG', True)
    monkeypatch.setattr('model.compiled_alone', lambda function, **options: function)
    documents = torch.zeros(4, 16, dtype=torch.int64, device=CUDA) if masked else None
    run_steps(fake_gpt(BF16, preset='modern', **shape), split, documents=documents, recompute=recompute)


@pytest.mark.parametrize('quantize', ['none', 'nf4'])
def test_a_step_of_adapters(split, quantize):
    model = fake_gpt(BF16, preset='modern')
    with CUDA:
        add_adapters(model, LoRAConfig(lora_rank=4, quantize=quantize), {}, Env(device=CUDA, dtype=BF16), 0)
    run_steps(model, split)


@pytest.fixture
def group(monkeypatch):
    """Rank 3 of 8. Three functions of DDP read memory, which fake tensors do not have."""
    ddp, c10d = 'torch.nn.parallel.distributed', torch._C._distributed_c10d
    monkeypatch.setattr(f'{ddp}._verify_param_shape_across_processes', lambda *args: None)
    monkeypatch.setattr(c10d.Reducer, '_rebuild_buckets', lambda self: False)
    monkeypatch.setattr(c10d.Logger, 'set_runtime_stats_and_log', lambda self: None)
    dist.init_process_group('fake', store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


def test_gradients_are_views_of_ddps_buckets(split, group):
    """Without them they would take 4 more bytes a parameter."""
    model = fake_gpt(BF16)
    run_steps(model, split, world=8)
    assert all(p.grad._is_view() for p in model.parameters())


def test_hosts_exchange_numbers_without_the_gpu(group, monkeypatch):
    """Such as a wish to stop. A tensor of the GPU would wait for all that is queued on it."""
    seen = []
    monkeypatch.setattr(dist, 'all_reduce', lambda tensor: seen.append(tensor.device.type))
    monkeypatch.setattr(FakeTensor, 'numpy', lambda tensor: np.ones(()))
    assert Env(rank=3, world=8, device=CUDA).any(True) and seen == ['cpu']


def test_a_save_copies_everything_to_the_host_and_waits_before_it_writes(monkeypatch):
    """A copy that does not wait would let the thread write what is not there yet, with valid checksums."""
    model, copies, written = fake_gpt(BF16), Copies(), []
    checkpoint = {'model': model.state_dict(), 'optimizer': {'moment': torch.ones(3, device=CUDA)}}
    checkpoints = Checkpoints('folder')
    monkeypatch.setattr(Checkpoints, 'write', lambda self, saved, best: written.append(saved))
    monkeypatch.setattr(FakeTensor, 'data_ptr', lambda tensor: id(tensor))  # noqa: PLW0108  id alone is no method
    with copies:
        checkpoints.save(checkpoint, best=False)
        checkpoints.wait()
    tensors = [leaf for leaf in tree_leaves(written) if torch.is_tensor(leaf)]
    assert len(tensors) == len(checkpoint['model']) + 1 and {t.device.type for t in tensors} == {'cpu'}
    assert copies.waited == [True] * len(tensors)


@pytest.mark.parametrize('preset, dtype, settings', [
    ('gpt2', FP16, dict(recompute='full')), ('modern', BF16, dict(optimizer='muon'))])
def test_a_step_of_rank_3_of_8(split, group, preset, dtype, settings):
    run_steps(fake_gpt(dtype, preset=preset), split, world=8, **settings)


@pytest.fixture
def streams(monkeypatch):
    """CUDA's device, streams and events, which order nothing, and a mesh of real numbers."""
    for name in ('Stream', 'Event', 'current_stream', 'stream'):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    make = device_mesh.init_device_mesh

    def not_fake(*args):
        with unset_fake_temporarily():
            return make(*args)
    monkeypatch.setattr(device_mesh, 'init_device_mesh', not_fake)


@pytest.mark.parametrize('shard, gathers, reductions', [('optimizer', 3, 3), ('full', 10, 6)])
def test_a_sharded_step(split, group, streams, shard, gathers, reductions):
    """Of two blocks and the rest, once a step; or in both micro-batches, where blocks are gathered twice."""
    model = fake_gpt(BF16, preset='modern', n_layer=2)
    calls = run_steps(model, split, world=8, shard=shard, optimizer='muon').calls
    assert (calls['_allgather_base_'], calls['_reduce_scatter_base_']) == (gathers, reductions)


# -----------------------------------------------------------------------------
# planted defects: what each check is there for

def in_mlp(action):
    """Return a defect: action(x) in each MLP."""
    def plant(monkeypatch):
        forward = MLP.forward

        def with_action(self, x):
            action(x)
            return forward(self, x)
        monkeypatch.setattr(MLP, 'forward', with_action)
    return plant


def weights_not_cast(monkeypatch):
    monkeypatch.setattr(Linear, 'forward', lambda self, x: F.linear(x, self.weight))


@pytest.mark.parametrize('defect, words', [
    (in_mlp(lambda x: x + torch.ones(1, 16, 1)), 'at least two devices, cuda:0 and cpu'),
    (in_mlp(lambda x: bool(x.isfinite().all())), '_local_scalar_dense'),
    (in_mlp(lambda x: torch.from_numpy(np.ones(3)).pin_memory().to(CUDA)), 'a copy from cpu to cuda:0'),
    (weights_not_cast, r"aten.mm of several dtypes: \['torch.bfloat16', 'torch.float32'\]")])
def test_a_planted_defect_is_found(split, monkeypatch, defect, words):
    defect(monkeypatch)
    with pytest.raises(RuntimeError, match=words):
        run_steps(fake_gpt(BF16), split)


# -----------------------------------------------------------------------------
# evaluation and generation

@pytest.fixture
def answers(monkeypatch):
    """Return a list of what the host reads from the device, in order. Any other read raises."""
    queue = []
    monkeypatch.setattr(FakeTensor, 'tolist', lambda tensor: queue.pop(0))
    monkeypatch.setattr(FakeTensor, 'cpu', lambda tensor: queue.pop(0))
    yield queue
    assert not queue


@pytest.mark.parametrize('preset, dtype, chunks', [('gpt2', BF16, 1), ('modern', FP16, 3)])
def test_an_evaluation_reads_the_device_once(split, answers, preset, dtype, chunks):
    """7 windows in batches of 4."""
    answers.append(SimpleNamespace(double=lambda: SimpleNamespace(numpy=lambda: np.full(7, 32.0))))
    model = fake_gpt(dtype, chunks, preset=preset)
    with Strict(copies=True), flash_on_meta():
        result = evaluate(model, split(16), 7, 4, Env(device=CUDA))
    assert (result['loss'], result['tokens']) == (2.0, 7 * 16)


@pytest.mark.parametrize('dtype, masked, groups', [
    (BF16, False, 2), (BF16, True, 1), (FP16, False, 1), (FP32, False, 1)])
def test_only_flash_attention_sees_grouped_heads(monkeypatch, dtype, masked, groups):
    """In training, and with a cache of prompts whose lengths differ."""
    seen, attend = [], F.scaled_dot_product_attention

    def kernel(q, k, v, attn_mask, **settings):
        seen.append((attn_mask is not None, q.size(1) // k.size(1)))
        return attend(q, k, v, attn_mask, **settings)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', kernel)
    model = fake_gpt(dtype, preset='modern', n_kv_head=2)
    ids = torch.zeros(2, 8, dtype=torch.int64, device=CUDA)
    if masked:
        cache = KVCache(model.eval(), 2, 12, static=True)
        model(ids[:, :1], cache=cache)
    else:
        model(ids, ids)
    assert seen == [(masked, groups)]


@pytest.mark.parametrize('preset, dtype, quantize', [
    ('gpt2', BF16, 'none'), ('gpt2', BF16, 'int8'), ('modern', FP16, 'int8'), ('modern', FP32, 'none')])
@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'fixed shapes'])
def test_prompts_of_three_lengths(monkeypatch, answers, preset, dtype, quantize, compiled):
    """
    The first fills the context, which slides; the other two stop at the second token. Eager steps also read
    the lengths. The step of fixed shapes is not compiled; it keeps all rows.
    """
    monkeypatch.setattr(torch, 'compile', lambda function, **options: function)
    monkeypatch.setattr(GPT, 'to', lambda model, device: model)  # fake parameters cannot be moved
    marked = []  # a CUDA graph writes in place only to these
    monkeypatch.setattr('torch._dynamo.mark_static_address', marked.append)
    model = prepare_for_inference(fake_gpt(dtype, preset=preset, n_kv_head=2), CUDA, dtype, quantize)
    drawn = [[7.0, -1.0], [8.0, -1.0], [9.0, -1.0]]
    if compiled:
        answers += [[0, 0, 0], drawn, [0], drawn, drawn]
    else:
        answers += [[0, 0, 0], drawn, [0], [14, 3, 5], drawn, [15], drawn[:1]]
    sampling = Sampling(3, 0.8, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, dry=0.8,
                        sizes=np.ones(model.config.vocab_size), logprobs=True)
    stopped, texts = set(), []
    with Strict():
        for new in generate(model, [[1] * 16, [2] * 3, [3] * 5], sampling, [1, 2, 3], stopped, compiled):
            texts.append([sequence for sequence, _, _ in new])
            if len(texts) == 2:
                stopped |= {1, 2}
    assert texts == [[0, 1, 2], [0, 1, 2], [0]]
    assert len(marked) == compiled * (3 if preset == 'gpt2' else 4)  # keys, values, lengths and shifted keys


# -----------------------------------------------------------------------------
# memory

GPT2_124M = dict(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, n_embd=768)
LONG = dict(preset='modern', vocab_size=50304, block_size=2**15, n_layer=8, n_head=8, n_embd=1024)


def forecast_of(settings, memory, cfg):
    """Return the bytes that --dry_run forecasts for a step on a GPU with this much memory."""
    with unset_fake_temporarily():
        env = Env(device=CUDA, dtype=BF16)
        return sum(memory_of(GPTConfig(**settings), cfg, None, env, memory).values())


@pytest.mark.parametrize('shape, batch, cfg, machine, limit', [
    (GPT2_124M, 8, {}, 'H100', 10.25e9),  # 9.94 GB
    ({**GPT2_124M, 'preset': 'modern'}, 8, dict(optimizer='muon'), 'H100', 13.5e9),  # 13.10 GB
    (LONG, 1, dict(recompute='selective'), 'RTX 4090', 8e9),  # 7.24 GB in 13 chunks; 31 in 1, as on an H100
    (LONG, 4, dict(recompute='full'), 'H100', 18e9),  # 16.18 GB in 15 chunks
], ids=['124M', '124M modern', '32K', '4 x 32K'])
def test_a_step_needs_no_more_memory(split, shape, batch, cfg, machine, limit):
    """Uncompiled, in as many chunks as train.py chooses on this GPU. The forecast is the count."""
    memory, env = MACHINES[machine][1], Env(device=CUDA, dtype=BF16)
    chunks = choose_loss_chunks('auto', batch * shape['block_size'], shape['vocab_size'], env, memory=memory)
    peak = run_steps(fake_gpt(BF16, chunks, **shape), split, batch_size=batch, **cfg).peak
    assert peak < limit
    cfg = TrainConfig(batch_size=batch, gradient_accumulation_steps=2, **cfg)
    assert forecast_of(shape, memory, cfg) == pytest.approx(peak, rel=0.01)
