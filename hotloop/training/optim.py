"""Muon, and the assignment of parameters to optimizers."""

import inspect

import torch
import torch.distributed as dist

from hotloop.training.adamw8bit import adamw8bit
from hotloop.training.shard import local, matrices_to_rows, rows_to_matrices

NS_STEPS = 5
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, https://kellerjordan.github.io/posts/muon


def orthogonalize(G, dtype):
    """
    G, (N, m, n), m <= n, with all singular values near 1 (0.7 to 1.2), by a Newton-Schulz iteration in
    dtype, which is also that of the result.
    """
    a, b, c = NS_COEFFICIENTS
    X = G.to(dtype)
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        A = X @ X.mT  # (N, m, m)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X


class Uncompiled:
    """Methods of torch.optim.Optimizer without the wrappers, which import torch._dynamo. That takes 2 s."""
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch.optim.AdamW, whose steps are never part of a compiled graph."""
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(Uncompiled, torch.optim.Optimizer):
    """
    Orthogonalized momentum: each matrix moves by an update whose singular values are all near 1. Matrices of
    one shape are stacked and divided among processes; torch.optim.Muon is slower: one at a time. rows:
    {parameter: [rows of each matrix in it]}. With found_inf set to 1 a step changes nothing.
    """

    def __init__(self, rows, lr, momentum, weight_decay, env):
        defaults = {'lr': lr, 'peak': lr, 'momentum': momentum, 'weight_decay': weight_decay}
        super().__init__(list(rows), defaults)
        self.rows, self.env, self.growths = rows, env, {}
        self.sharded = any(local(p) is not p for p in rows)
        self.found_inf = torch.zeros((), device=env.device)
        # bf16 takes half the time where the run computes in it, and the iteration tolerates its rounding
        self.dtype = torch.bfloat16 if env.dtype == torch.bfloat16 else torch.float32
        self.orthogonalize = orthogonalize
        if env.compile and env.device.type == 'cuda':  # on a CPU it is only matmuls, with nothing to fuse
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
                grads.append(torch.where(self.found_inf > 0, 0.0, local(p.grad)))  # 0 * inf would be NaN
                buffers.append(local(self.state[p]['momentum_buffer']))
                buffers[-1].lerp_(grads[-1], (1 - momentum) * keep)
            nesterov = torch._foreach_lerp(grads, buffers, momentum)
            torch._foreach_mul_(weights, 1 - group['lr'] * group['weight_decay'] * keep)
            if self.sharded:
                self.update_rows(params, nesterov, -group['lr'] * keep)
            else:
                self.update(params, [self.rows[p] for p in params], nesterov, -group['lr'] * keep)

    def update_rows(self, params, directions, scale):
        """
        update() of sharded parameters: this process has some rows of each. It receives all rows of its share
        of the directions, orthogonalizes these, and gives the rows back.
        """
        by_shape, world, one = {}, self.env.world, torch.ones_like(scale)
        for p, direction in zip(params, directions, strict=True):
            by_shape.setdefault((p.shape, tuple(self.rows[p])), []).append((local(p), direction))
        for (shape, rows), pairs in by_shape.items():
            r, share = -(-shape[0] // world), -(-len(pairs) // world)
            # padded: neither the matrices nor their rows need divide evenly
            stack = scale.new_zeros(world * share, r, shape[1], dtype=self.dtype)
            for padded, (_, direction) in zip(stack, pairs, strict=False):
                padded[:len(direction)] = direction
            matrices = rows_to_matrices(stack, world)
            updates = torch.zeros_like(matrices)
            mine = min(max(len(pairs) - self.env.rank * share, 0), share)
            self.update(updates[:mine, :shape[0]], [rows] * mine, matrices[:mine, :shape[0]], one)
            stack = matrices_to_rows(updates, world)
            for padded, (weights, _) in zip(stack, pairs, strict=False):
                weights.add_(padded[:len(weights)].float() * scale)

    def update(self, params, rows, directions, scale):
        """
        Adds scale x the orthogonalized directions to params, all matrices of one shape at a time. rows: those
        of the matrices in each.
        """
        by_shape = {}
        for param, sizes, direction in zip(params, rows, directions, strict=True):
            for weights, part in zip(param.split(sizes), direction.split(sizes), strict=True):
                # a tall matrix has fewer singular values than rows, so its rows would move too little
                growth = max(part.size(0) / part.size(1), 1.0) ** 0.5
                if growth > 1:
                    weights, part = weights.T, part.T
                by_shape.setdefault(part.shape, []).append((weights, part, growth))
        for matrices in by_shape.values():
            weights, parts, growths = zip(*matrices, strict=True)
            if growths not in self.growths:  # uploaded once: a copy in each step would wait for the GPU
                self.growths[growths] = torch.tensor(growths, device=scale.device)[:, None, None]
            updates = self.orthogonalize_shared(parts) * (scale * self.growths[growths])  # (N, m, n), float32
            torch._foreach_add_(weights, updates.unbind())

    def orthogonalize_shared(self, parts):
        """Each process orthogonalizes its share of N (m, n) matrices and receives all of them, (N, m, n)."""
        world, rank = self.env.world, self.env.rank
        if world == 1 or self.sharded:
            return self.orthogonalize(torch.stack(parts), self.dtype)
        share = -(-len(parts) // world)
        mine = parts[rank * share:(rank + 1) * share]
        missing = share - len(mine)  # on the last processes, if the matrices do not divide evenly
        stack = torch.stack((*mine, *[torch.zeros_like(parts[0])] * missing))
        mine = self.orthogonalize(stack, self.dtype)
        gathered = mine.new_empty(share * world, *mine.shape[1:])  # in bf16 half the traffic of float32
        # torch 2.13 renamed all_gather_into_tensor
        all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
        all_gather(gathered, mine.contiguous())
        return gathered[:len(parts)]


def build_optimizers(model, cfg, env):
    """
    [AdamW] with nanoGPT's two groups, or [AdamW, Muon]; Muon takes the matrices inside
    blocks. Vectors and scalars do not decay. Each group has 'peak', its highest learning rate.
    """
    use_muon, lr, decay = cfg.optimizer == 'muon', cfg.learning_rate, cfg.weight_decay
    embedding, rows = model.transformer.wte.weight, matrix_rows(model) if use_muon else {}
    trained = [p for p in model.parameters() if p.requires_grad]  # adapters alone, if there are any
    vectors = [p for p in trained if p.dim() < 2]
    matrices = [p for p in trained if p.dim() >= 2]
    if use_muon:
        matrices = [p for p in matrices if p not in rows and p is not embedding]
    groups = [{'params': matrices, 'weight_decay': decay, 'peak': lr},
              {'params': vectors, 'weight_decay': 0.0, 'peak': lr}]
    if use_muon:
        groups.append({'params': [embedding], 'weight_decay': decay, 'peak': lr})
    if cfg.optimizer == 'adamw8bit':
        return [adamw8bit(groups, lr, (cfg.beta1, cfg.beta2), env.device)]
    # fused: one kernel per group, which skips the update where train_step's found_inf is 1
    adamw = AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), fused=True)
    if not use_muon:
        return [adamw]
    return [adamw, Muon(rows, cfg.muon_lr, cfg.muon_momentum, decay, env)]


def matrix_rows(model):
    """{parameter: [rows of each independent matrix in it]} of the matrices inside blocks."""
    c = model.config
    q_rows, kv_rows = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    rows = {p: [p.size(0)] for p in model.transformer.h.parameters() if p.dim() == 2}
    for block in model.transformer.h:
        rows[block.attn.c_attn.weight] = [q_rows, kv_rows, kv_rows]  # queries, keys, values
        if c.is_gated:
            rows[block.mlp.c_fc.weight] = [c.n_ff, c.n_ff]  # up, gate
    return rows
