"""Muon, 8-bit AdamW, and the assignment of parameters to optimizers."""

import inspect

import torch
import torch.distributed as dist
from torch.nn import functional as F

from hotloop.training.parallel import all_rows, local, own_rows

UPDATED = 2**26  # weights that Muon updates at once
# a, b and c of each iteration (Polar Express, arXiv 2505.16932)
POLAR_EXPRESS = ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5), (3.8917, -2.7725, 0.5061),
                 (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232))


def build_optimizers(model, cfg, env):
    """
    Make [AdamW] with nanoGPT's two groups, or [AdamW, Muon], which takes the matrices inside
    blocks. Vectors do not decay. Each group has 'peak', its highest learning rate.
    """
    lr = cfg.learning_rate
    decay = cfg.weight_decay
    betas = cfg.beta1, cfg.beta2
    trained = [p for p in model.parameters() if p.requires_grad]  # adapters alone, if there are any
    vectors = [p for p in trained if p.dim() < 2]
    matrices = [p for p in trained if p.dim() >= 2]
    groups = [{'params': matrices, 'weight_decay': decay, 'peak': lr},
              {'params': vectors, 'weight_decay': 0.0, 'peak': lr}]
    if cfg.optimizer == 'adamw8bit':
        return [adamw8bit(groups, lr, betas)]
    optimizers = []
    if cfg.optimizer == 'muon':
        rows, tables = matrix_rows(model), tables_of(model)
        groups[0]['params'] = [p for p in matrices if p not in rows and p not in tables]
        embedding = [p for p, name in tables.items() if name == 'wte']
        others = [p for p, name in tables.items() if name != 'wte']  # of pairs and of values
        peak, embedding_decay = lr, decay
        if cfg.embed_lr and model.config.embed_norm and not model.config.tie:
            # A normalized embedding takes 10 to 100 times the rate of the head (modded-nanogpt, nanochat), at
            # which the usual decay would erase rare tokens. The other tables need it: without decay they
            # memorize a text that is read several times.
            peak, embedding_decay = cfg.embed_lr, 0.0
        groups.append({'params': embedding, 'weight_decay': embedding_decay, 'peak': peak})
        if others:  # earlier checkpoints without these tables have no such group
            groups.append({'params': others, 'weight_decay': decay, 'peak': peak})
        optimizers = [Muon(rows, cfg.muon_lr, cfg.muon_momentum, decay, env)]
    # fused: one kernel per group, which skips the update where train_step's found_inf is 1
    return [AdamW(groups, lr=lr, betas=betas, fused=True), *optimizers]


def set_learning_rate(optimizers, lr, peak):
    """Set the rate of every group in proportion to its own peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak'] * (lr / peak)


def tables_of(model):
    """Return {parameter: name of its module} of the tables of a vector for each token or pair of tokens."""
    names = {p: name.split('.')[-2] for name, p in model.named_parameters()}
    return {p: name for p, name in names.items() if name in ('wte', 'bigrams', 'value_embed')}


def matrix_rows(model):
    """Return {parameter: [rows of each independent matrix in it]} of the matrices inside blocks."""
    c, tables = model.config, tables_of(model)
    rows = {p: [p.size(0)] for p in model.transformer.h.parameters() if p.dim() == 2 and p not in tables}
    for block in model.transformer.h:
        rows[block.attn.c_attn.weight] = block.attn.part_sizes
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
    """Make the AdamW8bit of bitsandbytes (arXiv 2110.02861): large moments are uint8."""
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
    """Set singular values of matrices, (N, m, n), m <= n, near 1: above 0.01 of the norm, to 0.85 to 1.15."""
    # The factor keeps singular values below 1 in bfloat16. float16 would lose small gradients before.
    X = (G / (1.02 * G.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT  # (N, m, m)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X


class Muon(Uncompiled, torch.optim.Optimizer):
    """
    Orthogonalized momentum: each matrix moves by an update whose singular values are all near 1.
    torch.optim.Muon, which computes one matrix at a time, is slower. Each process computes its share of
    the matrices. With found_inf set to 1 a step changes nothing.
    """

    def __init__(self, rows, lr, momentum, weight_decay, env):
        """rows: as matrix_rows() returns them."""
        defaults = {'lr': lr, 'peak': lr, 'momentum': momentum, 'weight_decay': weight_decay}
        super().__init__(list(rows), defaults)
        self.rows = rows
        self.env = env
        self.found_inf = torch.zeros((), device=env.device)
        # bf16 and, on GPUs, float16 take half the time or less, and the iteration tolerates them
        self.dtype = env.dtype if env.device.type == 'cuda' or env.dtype == torch.bfloat16 else torch.float32
        self.orthogonalize = orthogonalize
        if env.compile and env.device.type == 'cuda':  # on a CPU there is nothing to fuse
            torch._dynamo.config.recompile_limit = 64  # of shapes of stacks; beyond 8 they would stay eager
            self.orthogonalize = torch.compile(orthogonalize, dynamic=False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = sorted(group['params'], key=lambda p: tuple(p.shape))
            # one update of many matrices is faster, and of all of a large model takes its memory again
            size = max(UPDATED // max(p.numel() for p in params), 1)
            if local(params[0]) is not params[0]:
                size = self.env.world  # sharded: only so many are complete at once
            for start in range(0, len(params), size):
                self.update(params[start:start + size], group)

    def update(self, params, group):
        """Update parameters. Of all of them, matrices of one shape or its transpose are stacked."""
        keep = 1.0 - self.found_inf  # 0 in a step that must change nothing
        weights, grads, buffers = [], [], []
        for p in params:
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            weights.append(local(p))
            grads.append(torch.where(self.found_inf > 0, 0.0, local(p.grad)))  # 0 * inf is NaN
            buffers.append(local(self.state[p]['momentum_buffer']))
            buffers[-1].lerp_(grads[-1], (1 - group['momentum']) * keep)
        directions = torch._foreach_lerp(grads, buffers, group['momentum'])  # Nesterov's
        updates, matrices = [], {}  # {(m, n), m <= n: [(view of that shape, factor)]}
        for p, rows in zip(params, directions, strict=True):
            sent = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
            updates.append(all_rows(rows, p, sent))
            for part in updates[-1].split(self.rows[p]):
                view, factor = part, 1.0
                if part.size(0) > part.size(1):  # fewer singular values than rows: it would move too little
                    view, factor = part.mT, (part.size(0) / part.size(1)) ** 0.5
                matrices.setdefault(view.shape, []).append((view, factor))
        for views in matrices.values():
            stack = self.orthogonalize_shared(torch.stack([view for view, _ in views]))
            for (view, factor), result in zip(views, stack, strict=True):
                torch.mul(result, -group['lr'] * factor * keep, out=view)
        torch._foreach_mul_(weights, 1 - group['lr'] * group['weight_decay'] * keep)
        for p, weight, update in zip(params, weights, updates, strict=True):
            weight.add_(local(own_rows(update, p)))

    def orthogonalize_shared(self, stack):
        """Orthogonalize (N, m, n) matrices, of which each process computes its share and receives all."""
        world = self.env.world
        share = -(-len(stack) // world)
        mine = stack[self.env.rank * share:][:share]
        result = self.orthogonalize(mine, self.dtype)
        if world > 1:
            mine = F.pad(result, (0, 0, 0, 0, 0, share - len(result)))  # the last ones may have fewer
            gathered = mine.new_empty(world * share, *mine.shape[1:])  # in bf16 half the traffic
            dist.all_gather(list(gathered.chunk(world)), mine)
            result = gathered[:len(stack)]
        return result.float()
