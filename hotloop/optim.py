"""Muon, and the assignment of parameters to optimizers."""

import torch
import torch.distributed as dist

NS_STEPS = 5
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, https://kellerjordan.github.io/posts/muon


def orthogonalize(G, dtype):
    """G, (N, m, n), m <= n, with all singular values near 1 (0.7 to 1.2), by a Newton-Schulz iteration."""
    a, b, c = NS_COEFFICIENTS
    X = G.to(dtype)
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        A = X @ X.mT  # (N, m, m)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.to(G.dtype)


class Muon(torch.optim.Optimizer):
    """
    Orthogonalized momentum: each matrix moves by an update whose singular values are all near 1. Matrices of
    one shape are stacked and divided among processes; torch.optim.Muon is slower: one at a time. rows:
    {parameter: [rows of each matrix in it]}. With found_inf set to 1 a step changes nothing.
    """

    def __init__(self, params, rows, lr, momentum, weight_decay, env):
        super().__init__(params, {'lr': lr, 'momentum': momentum, 'weight_decay': weight_decay})
        self.rows, self.env = rows, env
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
            grads = [torch.where(self.found_inf > 0, 0.0, p.grad) for p in params]  # 0 * inf would be NaN
            for p, grad in zip(params, grads, strict=True):
                if not self.state[p]:
                    self.state[p]['momentum_buffer'] = torch.zeros_like(p)
                self.state[p]['momentum_buffer'].lerp_(grad, (1 - momentum) * keep)
            buffers = [self.state[p]['momentum_buffer'] for p in params]
            nesterov = torch._foreach_lerp(grads, buffers, momentum)
            torch._foreach_mul_(params, 1 - group['lr'] * group['weight_decay'] * keep)
            self.update(params, nesterov, -group['lr'] * keep)

    def update(self, params, directions, scale):
        """Adds scale x the orthogonalized directions to params, all matrices of one shape at a time."""
        by_shape = {}
        for param, direction in zip(params, directions, strict=True):
            rows = self.rows[param]
            for weights, part in zip(param.split(rows), direction.split(rows), strict=True):
                # a tall matrix has fewer singular values than rows, so its rows would move too little
                growth = max(part.size(0) / part.size(1), 1.0) ** 0.5
                if growth > 1:
                    weights, part = weights.T, part.T
                by_shape.setdefault(part.shape, []).append((weights, part, growth))
        for matrices in by_shape.values():
            stack = torch.stack([part for _, part, _ in matrices])  # (N, m, n)
            for (weights, _, growth), update in zip(matrices, self.orthogonalize_shared(stack), strict=True):
                weights.add_(update * (scale * growth))

    def orthogonalize_shared(self, stack):
        """Each process orthogonalizes its share of the stack, (N, m, n), and receives all of it."""
        world, rank = self.env.world, self.env.rank
        if world == 1:
            return self.orthogonalize(stack, self.dtype)
        share = -(-len(stack) // world)
        padded = torch.zeros(share * world, *stack.shape[1:], device=stack.device, dtype=stack.dtype)
        padded[:len(stack)] = stack
        mine = self.orthogonalize(padded[rank * share:(rank + 1) * share], self.dtype)
        # torch 2.13 renamed all_gather_into_tensor
        all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
        all_gather(padded, mine.contiguous())
        return padded[:len(stack)]


def build_optimizers(model, cfg, env):
    """
    [AdamW] with nanoGPT's two groups, or [AdamW, Muon]; Muon takes the matrices inside
    blocks. Vectors and scalars do not decay. Each group has 'peak', its highest learning rate.
    """
    use_muon, lr, decay = cfg.optimizer == 'muon', cfg.learning_rate, cfg.weight_decay
    if cfg.embed_lr is not None and not use_muon:
        raise ValueError(f"embed_lr={cfg.embed_lr} applies only with optimizer='muon'")
    embedding, rows = model.transformer.wte.weight, matrix_rows(model)
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    if use_muon:
        matrices = [p for p in matrices if p not in rows and p is not embedding]
    groups = [{'params': matrices, 'weight_decay': decay, 'peak': lr},
              {'params': vectors, 'weight_decay': 0.0, 'peak': lr}]
    if use_muon:
        embed_lr = lr if cfg.embed_lr is None else cfg.embed_lr
        groups.append({'params': [embedding], 'weight_decay': decay, 'peak': embed_lr})
    # fused: one kernel per group, which skips the update where train_step's found_inf is 1
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), fused=True)
    if not use_muon:
        return [adamw]
    muon = Muon(list(rows), rows, cfg.muon_lr, cfg.muon_momentum, decay, env)
    muon.param_groups[0]['peak'] = cfg.muon_lr
    return [adamw, muon]


def matrix_rows(model):
    """{parameter: [rows of each independent matrix in it]} of the matrices inside blocks."""
    c = model.config
    kv_rows = c.n_kv_head * (c.n_embd // c.n_head)
    rows = {p: [p.size(0)] for p in model.transformer.h.parameters() if p.dim() == 2}
    for block in model.transformer.h:
        rows[block.attn.c_attn.weight] = [c.n_embd, kv_rows, kv_rows]  # queries, keys, values
        if c.mlp == 'swiglu':
            rows[block.mlp.c_fc.weight] = [c.n_ff, c.n_ff]  # up, gate
    return rows
