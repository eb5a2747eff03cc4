"""The cache: what layers keep of previous tokens, so that a step computes only one token per row."""

import functools
import math

import torch

from hotloop.inference.quantize import Int8Linear


class KVCache:
    """
    k[layer] and v[layer] of attention are (B, K, num_positions, D), where row b fills the first length[b]
    positions. state[layer, name] is what else a layer remembers, (B, *state_shapes[name]), in float32:
    shifted keys and convolutions the last tokens that they mix, others sums over all tokens. Layer -1 is
    the table of bigrams.
    An empty cache takes prompts of any lengths, padded on the right; after that it takes one token per row.
    When a row is full, slide() of generate.py fills it anew.
    num_positions: at most the model's context. static: no shape depends on the number of tokens, as a
    compiled step requires. The dtype is the one that attention reads fastest.
    """

    def __init__(self, model, batch, num_positions, static=False):
        device, dtype = model.cos.device, model.compute_dtype
        if device.type == 'cpu' and not static:
            dtype = torch.float32  # the dtype of Attention on a CPU
        elif device.type == 'cpu' and isinstance(model.lm_head, Int8Linear):
            dtype = torch.bfloat16  # int8 products round their inputs to it anyway
        if static:  # powers of two, so that few prompts need another compilation
            num_positions = max(128, 2**(num_positions - 1).bit_length())
        self.num_positions = num_positions = min(num_positions, model.config.block_size)
        # zeros, not empty: a masked position has weight 0, and 0 times NaN is NaN
        zeros = functools.partial(torch.zeros, device=device)
        config = model.config
        self.k, self.v, self.state = {}, {}, {}
        for layer, mixer in enumerate(config.mixers()):
            if mixer == 'A':
                self.k[layer] = zeros(batch, config.n_kv_head, num_positions, config.head_dim, dtype=dtype)
                self.v[layer] = torch.zeros_like(self.k[layer])
            for name, shape in model.transformer.h[layer].attn.state_shapes.items():
                self.state[layer, name] = zeros(batch, *shape)
        if config.bigram_rows:
            self.state[-1, 'past'] = zeros(batch, 1, 1, 1)  # the last token's id + 1
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.prompt_lengths = None  # (B,), where prompts are padded
        self.static = static

    def tensors(self):
        """List the tensors that a step writes to."""
        return [*self.k.values(), *self.v.values(), *self.state.values(), self.length]

    def begin(self, T):
        """Prepare for the next T tokens of each row. Returns their positions, (B, T)."""
        device, self.end, self.mask = self.length.device, self.num_positions, None
        positions = self.length[:, None] + torch.arange(T, device=device)
        if not self.static:
            lengths = self.length.tolist()
            assert T == 1 or not any(lengths), 'a cache that is not empty takes one token at a time'
            self.end = max(lengths) + T
        # Without a mask a CPU saves a tenth of a small model's step.
        if self.static or min(lengths) < max(lengths):
            self.age = (positions - torch.arange(self.end, device=device))[:, None, None]
            self.mask = self.age >= 0  # (B, 1, 1, end)
        return positions

    def extend(self, layer, x):
        """Return x, (B, K, T, D), after the n past tokens, (B, K, n + T, D), and keep its last n."""
        past = self.state[layer, 'past']
        n = past.size(2)
        x = torch.cat((past.to(x.dtype), x), dim=2)
        last = x[:, :, x.size(2) - n:]
        if self.prompt_lengths is not None:
            rows = torch.arange(x.size(0), device=x.device)[:, None]
            places = self.prompt_lengths[:, None] + torch.arange(n, device=x.device)
            last = x.transpose(1, 2)[rows, places].transpose(1, 2)
        past.copy_(last)
        return x

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
        return attention.sdpa(q, k, v, mask)

    def finish(self, x):
        """Count the new tokens when all layers are done. (B, T, C) -> (B, C), each row's last token."""
        self.mask = self.age = None  # or a compiled step would return it
        if self.prompt_lengths is None:
            self.length += x.size(1)
            return x[:, -1]
        self.length += self.prompt_lengths
        return x[torch.arange(x.size(0), device=x.device), self.prompt_lengths - 1]

    def put(self, rows, other, sources):
        """Copy rows of another cache into these rows, one each."""
        for ours, theirs in zip(self.tensors()[:-1], other.tensors()[:-1], strict=True):
            ours[rows, :, :theirs.size(2)] = theirs[sources].to(ours.dtype)
        self.length[rows] = other.length[sources]

    def select(self, rows):
        """Keep these rows and drop the others, layer by layer, so that memory does not double."""
        self.length = self.length[rows]
        for kept in (self.k, self.v, self.state):
            for layer in kept:
                kept[layer] = kept[layer][rows]


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
