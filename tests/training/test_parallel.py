"""What acts on each block: recomputation with the same bits, and compilation that DDP's buckets overlap."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import train
from hotloop.system.distributed import Env
from model import GPT, GPTConfig
from train import TrainConfig

LAYERS = 3


def gradients(recompute, dropout=0.0):
    """Return the loss and all gradients of a small model in one tensor, with the same random numbers."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=LAYERS, n_head=2, n_embd=16, preset='modern',
                          zero_init=False, dropout=dropout))
    forward = train.wrap(model, TrainConfig(recompute=recompute), Env())[1]
    ids = torch.randint(61, (2, 16))
    loss = forward(ids, ids).sum()
    loss.backward()
    with torch.no_grad():
        assert torch.isfinite(forward(ids, ids)).all()  # an evaluation
    return torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())])


def matmuls(graph):
    return sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)


@pytest.mark.slow
def test_a_bucket_leaves_before_most_of_a_compiled_backward_pass(monkeypatch):
    """Two products of the head and eight of each block. Compiled as one, all of them ran before a bucket."""
    events, ids = [], torch.zeros(1, 8, dtype=torch.int64)

    def count_when_run(graph, _):
        def run(*args):
            events.extend(['matmul'] * matmuls(graph))
            return graph(*args)
        return make_boxed_func(run)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=count_when_run)
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    model = GPT(GPTConfig(vocab_size=61, block_size=8, n_layer=4, n_head=1, n_embd=192))
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)
    try:
        forward = train.wrap(model, TrainConfig(), Env(world=2, compile=True))[1]

        def hook(_, bucket):
            events.append('bucket')
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        forward.register_comm_hook(None, hook)
        for _ in range(2):  # DDP orders its buckets by the first backward pass
            events.clear()
            forward(ids, ids).sum().backward()
    finally:
        dist.destroy_process_group()
    assert events.count('matmul') == 2 + 4 * 8 and events.index('bucket') <= 2 + 8


class Count(TorchDispatchMode):
    """Counts calls of attention's kernel, and matrix products."""

    def __init__(self):
        super().__init__()
        self.attention = self.products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.attention += op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self.products += op is torch.ops.aten.mm.default
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize('recompute, attention, products', [('selective', 1, 3), ('full', 2, 3)])
def test_recomputation_runs_blocks_twice_and_changes_no_bit(recompute, attention, products):
    """Selective keeps attention's output. Nothing needs the output of the last of a block's four matrices."""
    with Count() as none:
        expected = gradients('none')
    with Count() as count:
        assert torch.equal(gradients(recompute), expected)
    assert count.attention - none.attention == LAYERS * (attention - 1)
    assert count.products - none.products == LAYERS * products
    assert torch.equal(gradients(recompute, dropout=0.2), gradients('none', dropout=0.2))
