"""
Communication of a training step, counted, and the efficiency it allows on eight GPUs and on two nodes.

    $ python tests/bench/communication.py                                   # 124M, 354M, 773M; half an hour
    $ python tests/bench/communication.py --micro_batches=1 --sizes=124M

train.py's own step runs on fake tensors in a fake group of 8, in bf16, so nothing is computed or sent; a
dispatch mode sees each collective and its bytes. DDP's reducer does not run on fake tensors: its calls are
torch's buckets for these parameters, its bytes those of the gradients.

The efficiency is predicted, not measured. Assumed: H100s at 40% of their peak of 989 TFLOP/s; a ring, in
which each GPU sends (W - 1) / W of what is gathered or reduced and scattered, and twice that of an
all-reduce; 370 GB/s for this in a node, 25 GB/s between two nodes of 8. It lies between two figures: without
any overlap, and with communication hidden behind all computation.
"""

from unittest.mock import patch

import torch
import torch.distributed as dist
from bench import parser_of, table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from hotloop.system.device import PEAK_FLOPS
from hotloop.system.distributed import Env
from hotloop.system.flops import flops_per_token
from model import GPT, GPTConfig

SIZES = {'124M': dict(n_layer=12, n_head=12, n_embd=768), '354M': dict(n_layer=24, n_head=16, n_embd=1024),
         '773M': dict(n_layer=36, n_head=20, n_embd=1280)}
RECIPES = {'adamw': 'gpt2', 'muon': 'modern'}  # the preset of each optimizer
KINDS = {'allreduce_': 'all-reduce', '_allgather_base_': 'all-gather',
         '_reduce_scatter_base_': 'reduce-scatter', 'alltoall_base_': 'all-to-all'}
WORLD = 8
SYSTEMS = {'8 GPUs': (8, 370e9), '2 nodes': (16, 25e9)}  # processes, bytes per second
MFU = 0.4


class Count(TorchDispatchMode):
    """{kind: [calls, bytes]} of collectives: of the complete tensors; of all-to-all, what a process has."""

    def __init__(self):
        super().__init__()
        self.found = {kind: [0, 0] for kind in KINDS.values()}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == 'c10d':
            tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            count = self.found[KINDS[op._opname]]
            count[0] += 1
            count[1] += max(tensor.nbytes for tensor in tensors)
        return op(*args, **(kwargs or {}))


def count_step(settings, optimizer, shard, micro_batches, mesh):
    """({kind: [calls, bytes]} of a step after the first one, FLOPs of a token of 1,024)."""
    env = Env(rank=0, world=WORLD, dtype=torch.bfloat16)
    cfg = train.TrainConfig(optimizer=optimizer, shard=shard)
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    replaced = patch('torch.distributed.device_mesh.init_device_mesh', lambda *args: mesh)
    with FakeTensorMode(allow_non_fake_inputs=True), replaced:
        model = GPT(GPTConfig(vocab_size=50304, preset=RECIPES[optimizer], **settings))
        model.compute_dtype = env.dtype
        forward = model if shard == 'none' else train.wrap(model, cfg, env)[1]
        optimizers = train.build_optimizers(model, cfg, env)
        ids = torch.zeros(1, 16, dtype=torch.int64)
        loads = [lambda: (ids, ids, 0)] * micro_batches
        for _ in range(2):  # the first one initializes
            with Count() as count:
                train.train_step(forward, loads, 16, optimizers, scaler, cfg, env)
        if shard == 'none':
            params = list(model.parameters())[::-1]
            limits, dense = [2**20, 25 * 2**20], [False] * len(params)  # DDP's
            buckets, _ = dist._compute_bucket_assignment_by_size(params, limits, dense)
            count.found['all-reduce'][0] += len(buckets)
            count.found['all-reduce'][1] += 4 * model.num_params()
    return count.found, flops_per_token(model.config, 1024)


def wire_bytes(found, world):
    """The bytes that each of `world` GPUs sends in a step."""
    total = sum(num_bytes for _, num_bytes in found.values()) + found['all-reduce'][1]
    return total * (world - 1) / world


def main():
    parser = parser_of(__doc__, sizes=','.join(SIZES), micro_batches=4)
    parser.add_argument('--tokens', type=int, default=16384, help='of a micro-batch on each GPU')
    args = parser.parse_args()
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=WORLD)
    mesh, rows = init_device_mesh('cpu', (WORLD,)), []
    for size in args.sizes.split(','):
        for optimizer in RECIPES:
            for shard in ('none', 'optimizer', 'full'):
                found, flops = count_step(SIZES[size], optimizer, shard, args.micro_batches, mesh)
                cells = [f'{calls}, {sent / 1e6:,.0f}' if calls else '' for calls, sent in found.values()]
                compute = args.micro_batches * args.tokens * flops / (MFU * PEAK_FLOPS['H100'])
                for world, rate in SYSTEMS.values():
                    seconds = wire_bytes(found, world) / rate
                    cells.append(f'{seconds * 1e3:,.1f} ms: {compute / (compute + seconds):.0%} to '
                                 f'{min(compute / seconds, 1):.0%}')
                rows.append([size, optimizer, shard, *cells, f'{compute * 1e3:,.0f}'])
    dist.destroy_process_group()
    print(f'a step of {args.micro_batches} micro-batches of {args.tokens:,} tokens on each GPU; collectives: '
          f'calls, MB on one of {WORLD} processes; time and efficiency: predicted')
    head = ['model', 'optimizer', 'shard', *KINDS.values(), *SYSTEMS, 'compute, ms']
    print(table(head, rows))


if __name__ == '__main__':
    main()
