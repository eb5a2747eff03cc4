"""The KV cache: keys and values of previous tokens, so that a step computes only one token per row."""

import math

import torch

from hotloop.inference.quantize import Int8Linear


class KVCache:
    """
    k[layer] and v[layer] are (B, K, num_positions, D), where row b fills the first length[b] positions.
    An empty cache takes prompts of any lengths, padded on the right; after that it takes one token per row.
    static: no shape depends on the number of tokens, as a compiled step requires.
    """

    def __init__(self, config, batch, num_positions, device, dtype, static=False):
        shape = (batch, config.n_kv_head, num_positions, config.head_dim)
        # zeros, not empty: a masked position has weight 0, and 0 times NaN is NaN
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        # with key_shift also the last key of each row, before it is shifted and rotated, (B, K, 1, D)
        last = (batch, config.n_kv_head, 1, config.head_dim)
        self.last = [torch.zeros(last, device=device, dtype=dtype)
                     for _ in range(config.n_layer if config.key_shift else 0)]
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.prompt_lengths = None  # (B,), where prompts are padded
        self.static = static

    def begin(self, T):
        """Prepare for the next T tokens of each row. Returns their positions, (B, T)."""
        device, self.end, self.mask = self.length.device, self.k[0].size(2), None
        positions = self.length[:, None] + torch.arange(T, device=device)
        self.follows = (positions > 0)[:, None, :, None] if self.last else None  # for before()
        if not self.static:
            lengths = self.length.tolist()
            assert T == 1 or not any(lengths), 'a cache that is not empty takes one token at a time'
            self.end = max(lengths) + T
        # Without a mask a CPU saves a tenth of a small model's step.
        if self.static or min(lengths) < max(lengths):
            self.age = (positions - torch.arange(self.end, device=device))[:, None, None]
            self.mask = self.age >= 0  # (B, 1, 1, end)
        return positions

    def before(self, layer, k):
        """Return the keys of the tokens before those of k, (B, K, T, D); zeros for the first."""
        last, new = self.last[layer], k[:, :, -1:]
        before = torch.cat((last.to(k.dtype), k[:, :, :-1]), dim=2) * self.follows
        if self.prompt_lengths is not None:
            rows = torch.arange(k.size(0), device=k.device)
            new = k[rows, :, self.prompt_lengths - 1, None]
        last.copy_(new)
        return before

    def attend(self, attention, q, k, v):
        """Store k and v, (B, K, T, D). Returns the attention of q, (B, H, T, D), to all of its row."""
        layer, window, end = attention.layer, attention.window, self.end
        for cached, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.mask is None:
                cached[:, :, end - new.size(2):end] = new
            else:
                rows = torch.arange(new.size(0), device=new.device)
                cached[rows, :, self.length] = new[:, :, 0].to(cached.dtype)
        if q.size(2) > 1:  # prompts, into an empty cache
            return attention.attend(q, k, v)
        first, mask = 0, self.mask
        if window is not None and mask is None:
            first = max(end - window, 0)
        elif window is not None:
            mask = mask & (self.age < window)
        k, v = self.k[layer][:, :, first:end], self.v[layer][:, :, first:end]
        if self.static and q.device.type == 'cpu':
            return attend_in_sums(q, k, v, mask, attention.cap)
        return attention.kernel(q, k, v, mask)

    def finish(self, x):
        """Count the new tokens when all layers are done. (B, T, C) -> (B, C), each row's last token."""
        self.mask = self.age = self.follows = None  # or a compiled step would return it
        if self.prompt_lengths is None:
            self.length += x.size(1)
            return x[:, -1]
        self.length += self.prompt_lengths
        return x[torch.arange(x.size(0), device=x.device), self.prompt_lengths - 1]

    def put(self, rows, other, sources):
        """Copy rows of another cache into these rows, one each."""
        end = other.k[0].size(2)
        for ours, theirs in zip(self.k + self.v, other.k + other.v, strict=True):
            ours[rows, :, :end] = theirs[sources].to(ours.dtype)
        for ours, theirs in zip(self.last, other.last, strict=True):
            ours[rows] = theirs[sources].to(ours.dtype)
        self.length[rows] = other.length[sources]

    def select(self, rows):
        """Keep these rows and drop the others, layer by layer, so that memory does not double."""
        self.length = self.length[rows]
        for layer in range(len(self.k)):
            self.k[layer] = self.k[layer][rows]
            self.v[layer] = self.v[layer][rows]
        self.last = [last[rows] for last in self.last]


def attend_in_sums(q, k, v, mask, cap):
    """
    Attention of one query, (B, H, 1, D), to (B, K, T, D) keys, as sums. Compiled for a CPU they read bf16
    keys in 1.1 ms (12 layers of 12 heads, 1,024 keys of 64); the kernel takes 2.5 and float32 keys.
    """
    B, K, _, D = k.shape
    q = q.view(B, K, -1, 1, D) * D**-0.5  # queries that share keys are adjacent
    scores = (q * k[:, :, None].float()).sum(-1)  # (B, K, H / K, T)
    if cap:
        scores = cap(scores)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return (weights[..., None] * v[:, :, None].float()).sum(-2).view(B, -1, 1, D)


def new_cache(model, batch, num_positions, static=False):
    """Make a cache of at most the model's context, in the dtype that attention reads fastest."""
    device, dtype = model.cos.device, model.compute_dtype
    if static:  # powers of two, so that few prompts need another compilation
        num_positions = max(128, 2**(num_positions - 1).bit_length())
    if device.type == 'cpu' and not static:
        dtype = torch.float32  # the dtype of Attention on a CPU
    elif device.type == 'cpu' and isinstance(model.lm_head, Int8Linear):
        dtype = torch.bfloat16  # int8 products round their inputs to it anyway
    return KVCache(model.config, batch, min(num_positions, model.config.block_size), device, dtype, static)
