"""Muon, and which parameters go to which optimizer."""

import torch
import torch.distributed as dist

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


def build_optimizers(model, cfg, env):
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
    dtype = torch.bfloat16 if env.dtype == torch.bfloat16 else torch.float32
    muon = Muon(by_muon, rows, cfg.muon_lr, cfg.muon_momentum, cfg.weight_decay, dtype, env.world, env.rank,
                env.compile and env.device.type == 'cuda')  # on CPUs it is all matmul: nothing to fuse
    muon.param_groups[0]['peak'] = cfg.muon_lr
    return [adamw, muon]
