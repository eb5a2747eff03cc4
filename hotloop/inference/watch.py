"""What the parts of a model put out while it runs, and how its predictions fare."""

import math
from collections import defaultdict
from functools import partial

import torch

LOGITS = 2**24  # computed at once
DEAD = 1e-3  # a unit or head whose output never exceeds this share of the RMS of its layer is dead


class Watch:
    """What the parts of a model put out while it runs, and what it predicts."""

    def __init__(self, model):
        self.model, self.num_tokens = model, 0
        self.squares, self.counts, self.peaks = defaultdict(float), defaultdict(int), {}
        self.targets = self.place = None  # of the batch and where they are in their documents, (B, T)
        self.done = 0  # how many of these T have their logits
        self.seen = []  # (position, loss, probability of the likeliest id, is it right, entropy) by (5, N)
        for layer, block in enumerate(model.transformer.h):
            block.register_forward_pre_hook(partial(self.enter, 'stream', layer))
            block.attn.c_proj.register_forward_pre_hook(partial(self.enter, 'heads', layer))
            block.mlp.c_proj.register_forward_pre_hook(partial(self.enter, 'units', layer))
            block.ln_1_post.register_forward_hook(partial(self.leave, 'attention', layer))
            block.ln_2_post.register_forward_hook(partial(self.leave, 'MLP', layer))
        model.lm_head.register_forward_hook(self.predict)

    def run(self, x, y, documents=None):
        """Runs the model on a batch."""
        B, T = x.shape
        place = torch.arange(T, device=x.device).expand(B, T)
        if documents is not None:  # each begins again
            begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
            place = place - torch.where(begins, place, 0).cummax(1).values
        self.targets, self.place, self.done = y, place, 0
        self.num_tokens += x.numel()
        self.model.loss_chunks = min(T, math.ceil(B * T * self.model.config.vocab_size / LOGITS))
        self.model(x, y, documents)

    def enter(self, name, layer, module, args):
        self.add(name, layer, args[0].float())

    def leave(self, name, layer, module, args, output):
        self.add(name, layer, output.float())

    def add(self, name, layer, x):
        """Adds activations, (B, T, C)."""
        self.squares[name, layer] += x.square().sum().item()
        self.counts[name, layer] += x.numel()
        if name in ('heads', 'units'):
            peaks = x.abs().amax((0, 1))
            if name == 'heads':
                peaks = peaks.view(self.model.config.n_head, -1).amax(1)
            self.peaks[name, layer] = torch.maximum(self.peaks.get((name, layer), peaks), peaks)

    def rms(self, name, layer):
        return math.sqrt(self.squares[name, layer] / self.counts[name, layer])

    def dead(self, name, layer):
        """(the number of units or heads that were always silent, their number)."""
        peaks = self.peaks[name, layer]
        return int((peaks <= DEAD * self.rms(name, layer)).sum()), len(peaks)

    def blocks(self):
        """A row for each block: the RMS of its input, and of what attention and MLP add to it; dead parts."""
        rows = []
        for layer in range(self.model.config.n_layer):
            row = {'block': layer} | {name: self.rms(name, layer) for name in ('stream', 'attention', 'MLP')}
            for name in ('heads', 'units'):
                row[f'dead {name}'], row[name] = self.dead(name, layer)
            rows.append(row)
        return rows

    def problems(self):
        """Sentences about what is dead or not finite."""
        found = []
        for layer in range(self.model.config.n_layer):
            for part, name in (('attention', 'heads'), ('MLP', 'units')):
                rms, (dead, total) = self.rms(part, layer), self.dead(name, layer)
                where = f'block {layer}, {part}'
                if not math.isfinite(rms):  # so is all that follows
                    return [*found, f'{where}: its output is NaN or too large, though all weights are finite']
                if dead == total:
                    found.append(f'{where}: dead: none of its {total:,} {name} ever fires')
                elif rms <= 1e-6 * self.rms('stream', layer):
                    found.append(f'{where}: dead: its output is zero')
                elif dead >= total / 2:
                    found.append(f'{where}: {dead:,} of {total:,} {name} never fire')
        if not torch.cat(self.seen, 1).isfinite().all():
            found.append('logits: NaN or too large, though the outputs of all blocks are finite')
        return found

    def predict(self, module, args, output):
        """Adds the predictions for the targets from their logits, (B, T, V) or the next part of T."""
        part = slice(self.done, self.done + output.size(1))
        self.done = part.stop
        targets = self.targets[:, part]
        log_p = self.model.softcap(output.float())[targets >= 0].log_softmax(1)  # (N, V)
        place, targets = self.place[:, part][targets >= 0], targets[targets >= 0]
        best, guess = log_p.max(1)
        loss = -log_p.gather(1, targets[:, None])[:, 0]
        entropy = torch.special.entr(log_p.exp()).sum(1)
        self.seen.append(torch.stack([place, loss, best.exp(), guess == targets, entropy]).cpu().double())

    def predictions(self):
        """{section: rows} of the loss by position and of calibration; {} without targets or finite losses."""
        place, loss, sure, right, entropy = torch.cat(self.seen, 1)  # (N,)
        if not (len(loss) and loss.isfinite().all()):
            return {}
        by_place, bins, error = [], [], 0.0
        power = torch.frexp(place).exponent  # 0 | 1 | 2 3 | 4 to 7: positions from 0
        for k in power.unique().tolist():
            chosen = power == k
            by_place.append({'from': int(place[chosen].min()) + 1, 'to': int(place[chosen].max()) + 1,
                             'tokens': int(chosen.sum()), 'loss': loss[chosen].mean().item(),
                             'accuracy': right[chosen].mean().item()})
        for k in range(10):
            chosen = (10 * sure).floor().clamp(max=9) == k
            if chosen.any():
                confidence, accuracy = sure[chosen].mean().item(), right[chosen].mean().item()
                bins.append({'p from': k / 10, 'p to': (k + 1) / 10, 'tokens': int(chosen.sum()),
                             'confidence': confidence, 'accuracy': accuracy})
                error += abs(confidence - accuracy) * bins[-1]['tokens'] / len(loss)
        total = {'tokens': len(loss), 'loss': loss.mean().item(), 'entropy': entropy.mean().item(),
                 'confidence': sure.mean().item(), 'accuracy': right.mean().item(),
                 'calibration error': error}
        return {'predictions': total, 'loss by position': by_place, 'calibration': bins}
