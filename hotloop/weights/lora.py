"""LoRA: thin matrices beside frozen weights (arXiv 2106.09685), which may be in NF4 (QLoRA, 2305.14314)."""

import dataclasses
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from hotloop.data.chat import MARK, TEMPLATES
from hotloop.weights.nf4 import NF4Linear, rounded

EMBEDDINGS = ('transformer.wte.weight', 'lm_head.weight')  # which lora_embeddings trains
SAME = 1e-3  # two rows of a head that differ by less, relative to their length, were never told apart


@dataclass(frozen=True)
class LoRAConfig:
    # --- adapters
    lora_rank: int = 0  # train adapters of this rank beside the frozen weights of init_from; 0: off
    lora_alpha: float = 16.0  # an adapter's output is scaled by lora_alpha / lora_rank
    lora_rs: bool = False  # scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA, arXiv 2312.03732)
    lora_dropout: float = 0.0  # dropout on the inputs of adapters
    lora_targets: str = 'all'  # all, attn, mlp, or peft's names of matrices, such as q_proj,v_proj
    lora_embeddings: bool = False  # also train embedding and head, as peft's modules_to_save
    quantize: Literal['none', 'nf4'] = 'none'  # nf4: frozen weights in 4 bits, except embedding and head

    def problems(self):
        """List the problems with the settings, one sentence each."""
        wrong = []
        if self.lora_rank < 0:
            wrong.append(f'lora_rank={self.lora_rank} must not be negative; 0 trains all weights')
        if not 0 < self.lora_alpha < math.inf:
            wrong.append(f'lora_alpha={self.lora_alpha} must be above 0 and finite')
        if not 0 <= self.lora_dropout < 1:
            wrong.append(f'lora_dropout={self.lora_dropout} must be at least 0 and below 1')
        return wrong

    def scale(self):
        if self.lora_rs:
            return self.lora_alpha / math.sqrt(self.lora_rank)
        return self.lora_alpha / self.lora_rank


def check_lora(lora, cfg, given, is_new):
    """Raise ValueError if adapters contradict other settings of the run. given: {name: place}."""
    if not lora.lora_rank:
        for field in dataclasses.fields(lora):
            value = getattr(lora, field.name)
            is_alone = field.name in given and 'lora_rank' not in given  # --lora_rank=0 turns off a card's
            if value != field.default and is_alone:
                raise ValueError(f'{field.name}={value!r} applies only with a --lora_rank such as 16')
        return
    works = {'optimizer': ('adamw', 'adamw8bit'), 'ortho_penalty': (0,), 'shard': ('none',)}
    for name, values in works.items():
        value = getattr(cfg, name)
        if value not in values:
            raise ValueError(f'{name}={value!r} does not go with adapters; use --{name}={values[0]}')
    if is_new and cfg.init_from == 'scratch':
        raise ValueError(f'lora_rank={lora.lora_rank} adapts trained weights; name them with --init_from')


class LoRALinear(nn.Module):
    """
    Add adapters to a frozen Linear: rows start to end of the output gain scale * B A x. parts:
    [(start, end)], in order. One matrix of ours may hold several projections, such as queries.
    """

    def __init__(self, base, in_features, parts, cfg):
        super().__init__()
        self.base = base
        self.parts = parts
        self.scale = cfg.scale()
        self.dropout = nn.Dropout(cfg.lora_dropout)
        self.lora_A = nn.Parameter(torch.empty(len(parts) * cfg.lora_rank, in_features))
        num_rows = sum(end - start for start, end in parts)
        self.lora_B = nn.Parameter(torch.zeros(num_rows, cfg.lora_rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # peft's

    def forward(self, x):
        rows = x.reshape(-1, x.size(-1))
        y = self.base(rows)
        down = F.linear(self.dropout(rows), self.lora_A.to(x.dtype))  # (N, parts * rank)
        # This is one product in place; the zeros in B cost less than a product and a copy per part.
        y.addmm_(down, self.all_of_B(y.size(1)).to(x.dtype).T, alpha=self.scale)
        return y.view(*x.shape[:-1], -1)

    def all_of_B(self, num_rows):
        """Stack B of all parts, (num_rows, parts * rank): zero in the rows of other parts."""
        blocks = []
        done = 0
        sizes = [end - start for start, end in self.parts]
        for (start, end), B in zip(self.parts, self.lora_B.split(sizes), strict=True):
            blocks += [B.new_zeros(start - done, 0), B]
            done = end
        return torch.block_diag(*blocks, self.lora_B.new_zeros(num_rows - done, 0))


# -----------------------------------------------------------------------------
# which matrices

def projections(weights):
    """
    List what can have adapters in the weights of a GPT: {name: (matrix in a block, first row, last
    row + 1; None: all rows)}. The names are peft's: GPT-2's where positions are learned or not all
    layers attend, with one adapter for c_attn, and Llama's elsewhere.
    """
    if any(name.endswith(('.wpe.weight', '.attn.taps', '.attn.decay')) for name in weights):
        return {name: (name, 0, None) for name in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')}
    q = weights['transformer.h.0.attn.c_proj.weight'].size(1)
    k = (len(weights['transformer.h.0.attn.c_attn.weight']) - q) // 2
    n_ff = weights['transformer.h.0.mlp.c_proj.weight'].size(1)
    found = {'attn.q_proj': ('attn.c_attn', 0, q), 'attn.k_proj': ('attn.c_attn', q, q + k),
             'attn.v_proj': ('attn.c_attn', q + k, q + 2 * k), 'attn.o_proj': ('attn.c_proj', 0, None),
             'mlp.up_proj': ('mlp.c_fc', 0, n_ff)}
    if len(weights['transformer.h.0.mlp.c_fc.weight']) > n_ff:
        found['mlp.gate_proj'] = ('mlp.c_fc', n_ff, 2 * n_ff)
    return found | {'mlp.down_proj': ('mlp.c_proj', 0, None)}


def chosen(targets, table):
    """Select the rows of projections() that lora_targets names. Raises ValueError for an unknown name."""
    names = set()
    for word in targets.replace(' ', '').split(','):
        matches = [name for name in table if word == 'all' or word in (name, *name.split('.'))]
        if not matches:
            known = ', '.join(('all', 'attn', 'mlp', *table))
            raise ValueError(f'lora_targets={targets!r}: {word!r} matches nothing; this model has {known}')
        names.update(matches)
    return {name: place for name, place in table.items() if name in names}


# -----------------------------------------------------------------------------
# a run

def add_adapters(model, cfg, origin, env, seed):
    """
    Freeze a model, with its matrices in the run's dtype or in NF4, and add adapters in float32.
    origin: the name and the hash of its weights. Returns all that a checkpoint needs to know beside
    the adapters; 'parts' is {matrix in a block: [[projection, first row, last row + 1]]}.
    """
    parts = {}
    for name, (matrix, start, end) in chosen(cfg.lora_targets, projections(model.state_dict())).items():
        parts.setdefault(matrix, []).append([name, start, end])
    model.requires_grad_(False)
    for name in EMBEDDINGS:
        model.get_parameter(name).requires_grad_(cfg.lora_embeddings)
    num_frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    torch.manual_seed(seed)
    for block in model.transformer.h:
        for matrix, linear in list(block.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            base = linear
            if cfg.quantize == 'nf4':
                base = NF4Linear(linear.to(env.device))
            if matrix in parts:
                rows = [(start, end or linear.out_features) for _, start, end in parts[matrix]]
                base = LoRALinear(base, linear.in_features, rows, cfg)
            block.set_submodule(matrix, base)
    for p in model.parameters():
        if p.dim() > 1 and not p.requires_grad:
            p.data = p.data.to(env.dtype)
    return {**origin, **dataclasses.asdict(cfg), 'scale': cfg.scale(), 'parts': parts,
            'parameters': num_frozen}


def trainable(model):
    """List the parameters that a run trains."""
    return [p for p in model.parameters() if p.requires_grad]


def weights_to_save(model):
    """Return the state of a model: if it has adapters, only what is trained."""
    state = model.state_dict()
    if model.config.tie:  # sharded, each name has a tensor of its own
        state[EMBEDDINGS[1]] = state[EMBEDDINGS[0]]
    adapters = {name: w for name, w in state.items() if '.lora_' in name}
    if adapters and model.lm_head.weight.requires_grad:
        adapters |= {name: state[name] for name in EMBEDDINGS}
    return adapters or state


def embeddings_of(tensors):
    """Select embedding and head from the tensors of a run; {} if its adapters were trained alone."""
    return {name: tensors[name] for name in EMBEDDINGS if name in tensors}


def note_untrained_end(head, template, tokenizer, base):
    """
    Return a note if the id that ends an answer in a template has the same row of the head, (V, C), as
    another id, or None. Ids that never occur get equal gradients, and adapters cannot tell them apart.
    """
    name, end = 'the end of a text', tokenizer.eot
    if marks := MARK.findall(TEMPLATES[template].assistant[1]):
        name, end = marks[0], tokenizer.specials.get(marks[0])
    if end is None:
        return None
    row = head[end].float()
    same = 0
    for part in head.split(2**14):  # a float32 copy of a large head may not fit
        same += int(((part.float() - row).norm(dim=1) <= SAME * row.norm()).sum())
    if same < 2:
        return None
    return (f'note: {base} never learned {name} (its head has one row for {same} ids), so answers may not '
            'end; --lora_embeddings=True trains embedding and head beside the adapters')


# -----------------------------------------------------------------------------
# adapters on their own

def hash_weights(weights, before=''):
    """Hash {name: tensor} as float32 with SHA-256, after the text `before`, in hexadecimal."""
    digest = hashlib.sha256(before.encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].float().contiguous().numpy())
    return digest.hexdigest()


def adapters_of(tensors, parts):
    """
    Return {(layer, projection): (A, B)} of the tensors of a run: A is (rank, in), and B (rows, rank).
    parts: of its record, as add_adapters() returns it.
    """
    adapters = {}
    for name, A in tensors.items():
        if found := re.fullmatch(r'transformer\.h\.(\d+)\.(.+)\.lora_A', name):
            rows = parts[found[2]]
            up = tensors[f'{name[:-1]}B']
            ups = up.split([(end or len(up)) - start for _, start, end in rows])
            for (projection, _, _), down, up in zip(rows, A.chunk(len(rows)), ups, strict=True):
                adapters[int(found[1]), projection] = down, up
    return adapters


@torch.no_grad()
def merged(weights, adapters, scale, quantize):
    """
    Add adapters to the weights of a GPT, {name: tensor}, which are rounded first if quantize='nf4'.
    Returns float32, which replaces float32 weights in place. Raises ValueError if they do not fit.
    """
    in_blocks = re.compile(r'transformer\.h\.\d+\.\w+\.c_\w+\.weight')
    result = {}
    for name, weight in weights.items():
        result[name] = weight.float()
        if quantize == 'nf4' and in_blocks.fullmatch(name):
            result[name] = rounded(result[name])
    table = projections(weights)
    for (layer, projection), (A, B) in adapters.items():
        matrix, start, end = table.get(projection, ('', 0, 0))
        rows = result.get(f'transformer.h.{layer}.{matrix}.weight', A)[start:end]
        if rows.shape != (len(B), A.size(1)):
            raise ValueError(f'the base has no {projection} of {len(B)} x {A.size(1)} in layer {layer}')
        rows += scale * (B @ A)
    return result
