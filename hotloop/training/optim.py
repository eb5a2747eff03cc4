"""Muon, 8-bit AdamW, and the assignment of parameters to optimizers."""

import inspect

import torch
import torch.distributed as dist
from torch.nn import functional as F

from hotloop.training.shard import exchange, local

NS_STEPS = 5
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon


def build_optimizers(model, cfg, env):
    """
    Make [AdamW] with nanoGPT's two groups, or [AdamW, Muon], which takes the matrices inside
    blocks. Vectors do not decay. Each group has 'peak', its highest learning rate.
    """
    lr = cfg.learning_rate
    decay = cfg.weight_decay
    embedding = model.transformer.wte.weight
    rows = {}
    if cfg.optimizer == 'muon':
        rows = matrix_rows(model)
    trained = [p for p in model.parameters() if p.requires_grad]  # adapters alone, if there are any
    vectors = [p for p in trained if p.dim() < 2]
    matrices = [p for p in trained if p.dim() >= 2 and p not in rows]
    groups = [{'params': matrices, 'weight_decay': decay, 'peak': lr},
              {'params': vectors, 'weight_decay': 0.0, 'peak': lr}]
    if cfg.optimizer == 'muon':
        groups[0]['params'] = [p for p in matrices if p is not embedding]
        groups.append({'params': [embedding], 'weight_decay': decay, 'peak': lr})
    if cfg.optimizer == 'adamw8bit':
        return [adamw8bit(groups, lr, (cfg.beta1, cfg.beta2))]
    # fused: one kernel per group, which skips the update where train_step's found_inf is 1
    optimizers = [AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), fused=True)]
    if cfg.optimizer == 'muon':
        optimizers.append(Muon(rows, cfg.muon_lr, cfg.muon_momentum, decay, env))
    return optimizers


def matrix_rows(model):
    """Return {parameter: [rows of each independent matrix in it]} of the matrices inside blocks."""
    c = model.config
    rows = {p: [p.size(0)] for p in model.transformer.h.parameters() if p.dim() == 2}
    for block in model.transformer.h:
        rows[block.attn.c_attn.weight] = block.attn.rows
        if c.is_gated:
            rows[block.mlp.c_fc.weight] = [c.n_ff, c.n_ff]  # up, gate
    return rows


class Uncompiled:
    """Methods of torch.optim.Optimizer without wrappers that import torch._dynamo for a second."""
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch.optim.AdamW, whose steps are never part of a compiled graph."""
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def adamw8bit(groups, lr, betas):
    """
    Make the AdamW8bit of bitsandbytes (arXiv 2110.02861). Moments of 4,096 values and more are
    uint8, with a scale for each 256; smaller ones are float32.
    """
    import bitsandbytes

    class AdamW8bit(bitsandbytes.optim.AdamW8bit):
        """With found_inf set to 1 a step changes nothing."""

        def step(self):
            if not self.found_inf.item():  # waits for the device, as bitsandbytes does anyway
                super().step()

    return AdamW8bit(groups, lr, betas)


# -----------------------------------------------------------------------------
# Muon

def orthogonalize(G, dtype):
    """
    Set all singular values of matrices near 1 (0.7 to 1.2) by a Newton-Schulz iteration in dtype.
    G: (N, m, n), m <= n.
    """
    a, b, c = NS_COEFFICIENTS
    X = G.to(dtype)
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        A = X @ X.mT  # (N, m, m)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X


class Muon(Uncompiled, torch.optim.Optimizer):
    """
    Orthogonalized momentum: each matrix moves by an update whose singular values are all near 1.
    Matrices of one shape are stacked, because torch.optim.Muon, one matrix at a time, is slower;
    each process computes its share of them. With found_inf set to 1 a step changes nothing.
    """

    def __init__(self, rows, lr, momentum, weight_decay, env):
        """rows: as matrix_rows() returns them."""
        defaults = {'lr': lr, 'peak': lr, 'momentum': momentum, 'weight_decay': weight_decay}
        super().__init__(list(rows), defaults)
        self.rows = rows
        self.env = env
        self.is_sharded = any(local(p) is not p for p in rows)
        self.found_inf = torch.zeros((), device=env.device)
        # bf16 takes half the time where the run computes in it, and the iteration tolerates it
        self.dtype = torch.bfloat16 if env.dtype == torch.bfloat16 else torch.float32
        self.orthogonalize = orthogonalize
        if env.compile and env.device.type == 'cuda':  # on a CPU there is nothing to fuse
            self.orthogonalize = torch.compile(orthogonalize, dynamic=False)

    @torch.no_grad()
    def step(self):
        keep = 1.0 - self.found_inf  # 0 in a step that must change nothing
        for group in self.param_groups:
            params, momentum = group['params'], group['momentum']
            weights, grads, buffers = [], [], []
            for p in params:
                if not self.state[p]:
                    self.state[p]['momentum_buffer'] = torch.zeros_like(p)
                weights.append(local(p))
                grads.append(torch.where(self.found_inf > 0, 0.0, local(p.grad)))  # 0 * inf is NaN
                buffers.append(local(self.state[p]['momentum_buffer']))
                buffers[-1].lerp_(grads[-1], (1 - momentum) * keep)
            directions = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov's
            torch._foreach_mul_(weights, 1 - group['lr'] * group['weight_decay'] * keep)
            scale = -group['lr'] * keep
            if self.is_sharded:
                self.update_rows(params, directions, scale)
            else:
                self.update(weights, [self.rows[p] for p in params], directions, scale)

    def update(self, weights, rows, directions, scale):
        """Add scale x the orthogonalized directions to weights. rows: of the matrices in each."""
        by_shape = {}
        for weight, sizes, direction in zip(weights, rows, directions, strict=True):
            for part, matrix in zip(weight.split(sizes), direction.split(sizes), strict=True):
                # a tall matrix has fewer singular values than rows, which would move too little
                growth = max(part.size(0) / part.size(1), 1.0) ** 0.5
                if growth > 1:
                    part, matrix = part.T, matrix.T
                by_shape.setdefault((matrix.shape, growth), []).append((part, matrix))
        for (_, growth), pairs in by_shape.items():
            parts, matrices = zip(*pairs, strict=True)
            updates = self.orthogonalize_shared(torch.stack(matrices))  # (N, m, n)
            updates = updates.float() * (scale * growth)
            torch._foreach_add_(parts, updates.unbind())

    def orthogonalize_shared(self, stack):
        """Orthogonalize N matrices, of which each process computes its share and receives all."""
        world, rank = self.env.world, self.env.rank
        if world == 1 or self.is_sharded:
            return self.orthogonalize(stack, self.dtype)
        share = -(-len(stack) // world)
        padded = F.pad(stack, (0, 0, 0, 0, 0, world * share - len(stack)))
        mine = self.orthogonalize(padded[rank * share:(rank + 1) * share], self.dtype)
        gathered = mine.new_empty(padded.shape)  # in bf16 half the traffic of float32
        # torch 2.13 renamed all_gather_into_tensor
        all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
        all_gather(gathered, mine)
        return gathered[:len(stack)]

    def update_rows(self, params, directions, scale):
        """
        Run update() on sharded parameters, of which this process has some rows. It receives all
        rows of its share of the directions, orthogonalizes these, and returns the rows.
        """
        by_shape = {}
        for p, direction in zip(params, directions, strict=True):
            by_shape.setdefault((p.shape, tuple(self.rows[p])), []).append((p, direction))
        for (shape, rows), pairs in by_shape.items():
            stack = torch.stack([direction.to(self.dtype) for _, direction in pairs])
            mesh = pairs[0][0].device_mesh
            shape = torch.Size((len(pairs), *shape))
            matrices = exchange(stack, shape, mesh, 1, 0)  # some of the matrices, with all rows
            updates = torch.zeros_like(matrices)
            self.update(updates, [rows] * len(updates), matrices, torch.ones_like(scale))
            updates = exchange(updates, shape, mesh, 0, 1)
            for (p, _), update in zip(pairs, updates, strict=True):
                local(p).add_(update.float() * scale)
