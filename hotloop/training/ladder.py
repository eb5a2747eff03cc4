"""
The ladder: with a time budget and no card, the depth of a model is the one that a law of loss and the speed
of this machine expect to be best at the deadline.
"""

import bz2
import copy
import dataclasses
import gc
import math
from typing import NamedTuple

import numpy as np

from hotloop.data.tokenizer import tokenizer_from
from hotloop.system import host
from hotloop.system.device import COMPILE_GAIN, COMPILE_SECONDS, device_memory, forget_trial, measure_flops
from hotloop.training.depth import num_parameters, rung, set_depth, set_weight_decay, tokens_per_step, width
from hotloop.training.mixture import open_split

DEPTHS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24)  # the rungs
SHARE = 0.05  # of the budget that timing takes at most, if no step is longer
EVALUATION = 0.08  # of the budget that the final evaluation takes, about
CLOSE = 0.03  # losses that differ by less are worth timing both depths
TIE = 0.01  # losses that differ by less are a tie, which the smaller and faster depth wins
SHORT = 180  # seconds of a budget below which only one rung is timed
BYTES_PER_PARAMETER = 16  # weights, gradients, and two moments in float32

# bits per byte = FLOOR bz2^2 + WIDTH parameters^-ALPHA + LENGTH bytes^-BETA + START steps^-GAMMA:
# the fit of tests/bench/ladder.py. bz2: bits per byte of the text in that format; parameters: of the blocks
FLOOR, WIDTH, ALPHA, LENGTH, BETA, START, GAMMA = 0.1587, 9.89, 0.24, 54.79, 0.30, 0.421, 0.33
SAMPLE = 2**20  # bytes of text for bz2
# epochs after the first are worth less and less: 15.4 in all for large models (arXiv 2305.16264). Small ones
# gained less from 1.3 MB of text; see tests/bench/LOG.md
REPEATS = 4.0
TOO_OFTEN = 10  # epochs of a small text after which its held-out loss falls no more; see there too


class Text(NamedTuple):
    """What the law of loss needs to know about a training text."""
    bits: float  # per byte, by bz2
    bytes_per_token: float
    num_bytes: float


def describe_text(datasets, split):
    """The Text of a training split. If its tokenizer is not available: about that of English in GPT-2's."""
    try:
        tokenizer = tokenizer_from(datasets[0].meta['tokenizer'])
    except ValueError:
        return Text(2.0, 4.4, 4.4 * split.num_tokens)
    texts, num_tokens = [], 0
    for part in split.splits:
        size = max(min(SAMPLE, part.num_tokens) // 8, 1)
        for start in np.linspace(0, part.num_tokens - size, 8).astype(np.int64):
            texts.append(tokenizer.decode(part.tokens[start:start + size].tolist()))
            num_tokens += size
    each = sum(map(len, texts)) / num_tokens
    text = b''.join(piece[:SAMPLE // len(texts)] for piece in texts)
    return Text(8 * len(bz2.compress(text)) / len(text), each, each * split.num_tokens)


def worth(num_bytes, text_bytes):
    """How many new bytes so many bytes read from a text are worth: repeats are worth less and less."""
    repeats = num_bytes / text_bytes - 1
    if repeats <= 0:
        return num_bytes
    return text_bytes * (1 + REPEATS * (1 - math.exp(-repeats / REPEATS)))


def expected_loss(depth, num_bytes, text):
    """Bits per byte of held-out text after training on num_bytes, repeated ones included."""
    steps = num_bytes / text.bytes_per_token / tokens_per_step(depth)
    length = worth(num_bytes, text.num_bytes)
    return (FLOOR * text.bits**2 + WIDTH * num_parameters(depth)**-ALPHA
            + LENGTH * length**-BETA + START * steps**-GAMMA)


class Expected(NamedTuple):
    """What a depth is expected to do by the deadline."""
    depth: int
    speed: float  # tokens/s, on all processes
    num_bytes: float  # read by the deadline, repeats included
    loss: float  # bits per byte


class Ladder:
    """What is known of the depths on this machine. timed: {depth: seconds of a token, uncompiled}."""

    def __init__(self, text, vocab_size, flops, compiled=False):
        self.text, self.vocab_size, self.flops, self.compiled = text, vocab_size, flops, compiled
        self.timed = {}

    def guess(self, depth):
        """Seconds of a token if none were timed: small matrices are slower than the large one of flops."""
        share = width(depth) / (width(depth) + 768)
        return 6 * (num_parameters(depth) + width(depth) * self.vocab_size) / (share * self.flops)

    def seconds(self, depth):
        """Seconds of a token: timed, or guessed in proportion to the nearest depth that was timed."""
        if not self.timed:
            return self.guess(depth)
        nearest = min(self.timed, key=lambda other: abs(math.log(other / depth)))
        return self.timed[nearest] * self.guess(depth) / self.guess(nearest)

    def expect(self, depth, left):
        """The Expected of a depth that has so many seconds left."""
        seconds, left = self.seconds(depth), left * (1 - EVALUATION)
        if self.compiled:
            left, seconds = left - COMPILE_SECONDS, seconds / COMPILE_GAIN
        num_bytes = max(left, 0.1) / seconds * self.text.bytes_per_token
        return Expected(depth, 1 / seconds, num_bytes, expected_loss(depth, num_bytes, self.text))

    def best(self, depths, left):
        """The smallest depth whose expected loss is within TIE of the lowest."""
        rows = [self.expect(depth, left) for depth in depths]
        lowest = min(row.loss for row in rows)
        return next(row.depth for row in rows if row.loss <= (1 + TIE) * lowest)

    def next_to_time(self, depths, left):
        """The best depth, or one that is expected to be as good within CLOSE and was not timed; else None."""
        rows = sorted((self.expect(depth, left) for depth in depths), key=lambda row: row.loss)
        close = (row.depth for row in rows if row.loss <= (1 + CLOSE) * rows[0].loss)
        return next((depth for depth in close if depth not in self.timed), None)

    def table(self, depths, left, best):
        """Lines: what is expected of the depths up to two above the best."""
        lines = ['ladder: depth  parameters  tokens/s  text read  bits per byte, expected']
        for row in (self.expect(depth, left) for depth in depths[:depths.index(best) + 3]):
            mark = '*' if row.depth in self.timed else ' '
            total = num_parameters(row.depth) + 2 * width(row.depth) * self.vocab_size
            lines.append(f'        {row.depth:5}{mark}{total / 1e6:9,.1f} M'
                         f'{row.speed:10,.0f}{row.num_bytes / 1e6:8,.1f} MB  {row.loss:.3f}')
        timed = ' (*: timed here)' if self.timed else ''
        return [*lines, f'ladder: depth {best}{timed}; --depth=N chooses another']


def choose_depth(settings, datasets, env, build_run, train_step):
    """
    Sets the depth of a run with a time budget, and adds its table to the notes. All processes call it.
    build_run, train_step: those of train.py, with which steps of a few depths are timed.
    """
    cfg = settings.train
    budget, depths = 60 * cfg.time_budget, [cfg.depth]
    end_of_timing = host.process_seconds() + SHARE / 2 * budget
    if 'depth' not in settings.given:
        room = device_memory(env.device) / 2 / BYTES_PER_PARAMETER
        depths = [depth for depth in DEPTHS if num_parameters(depth) < room] or DEPTHS[:1]
    if env.device.type == 'cuda' and 'batch_size' not in settings.given:
        settings.auto_batch = True
    text = describe_text(datasets, open_split(datasets, 'train', rung(DEPTHS[0])['block_size']))
    ladder = Ladder(text, datasets[0].meta['vocab_size'], measure_flops(env.device, env.dtype) * env.world,
                    env.compile)
    time_depths(ladder, depths, budget, end_of_timing, env,
                lambda depth: time_depth(depth, settings, datasets, env, build_run, train_step))
    left = budget - host.process_seconds()
    best = int(env.of_rank_0([ladder.best(depths, left)])[0])
    settings.notes += ladder.table(depths, left, best)
    if text.bytes_per_token < 1.5:
        settings.notes.append('ladder: longer tokens learn more by then: prepare.py --tokenizer=bpe:1024')
    num_bytes = ladder.expect(best, left).num_bytes
    cfg.depth, tokens, epochs = best, num_bytes / text.bytes_per_token, num_bytes / text.num_bytes
    if epochs > TOO_OFTEN:
        settings.notes.append(f'ladder: the text will be read {epochs:.0f} times, and after about '
                              f'{TOO_OFTEN} it teaches little more; more text would')
    # of each split; an evaluation has no backward pass, a third of the work
    eval_tokens = EVALUATION * budget / 2 * 3 / ladder.seconds(best)
    plan = env.of_rank_0([tokens / tokens_per_step(best, env.world), epochs, eval_tokens])
    steps, epochs, eval_tokens = plan.tolist()
    set_depth(best, settings.model, cfg, settings.given, env.world, steps)
    set_weight_decay(cfg, settings.given, epochs)
    if 'eval_tokens' not in settings.given:
        cfg.eval_tokens = 2 ** int(min(max(math.log2(eval_tokens), 14), 20))


def time_depths(ladder, depths, budget, end, env, seconds_of_token):
    """Times the depths that may be the best, until rank 0's clock is at `end`; then each once more."""
    most, left = 1 if budget < SHORT else 3, budget - host.process_seconds()
    while len(ladder.timed) < most:
        depth = ladder.next_to_time(depths, left) if host.process_seconds() <= end else None
        depth = int(env.of_rank_0([depth or 0])[0])
        if not depth:
            break
        ladder.timed[depth] = seconds_of_token(depth)
    for depth in list(ladder.timed) if len(ladder.timed) > 1 else []:  # other work comes and goes
        ladder.timed[depth] = min(ladder.timed[depth], seconds_of_token(depth))


def time_depth(depth, settings, datasets, env, build_run, train_step):
    """Seconds of a token in uncompiled steps of a depth: the fastest one after the first."""
    model_cfg, cfg = copy.copy(settings.model), copy.copy(settings.train)
    set_depth(depth, model_cfg, cfg, settings.given, env.world)
    settings = dataclasses.replace(settings, model=model_cfg, train=cfg, notes=[])
    run = build_run(settings, datasets, dataclasses.replace(env, compile=False))
    end, laps = host.process_seconds() + SHARE / 6 * 60 * cfg.time_budget, []
    while not laps or (len(laps) < 20 and not env.any(env.rank == 0 and host.process_seconds() > end)):
        lap = host.process_seconds()
        num_targets, loads = run.batches.step(len(laps))
        result = train_step(run.forward, loads, num_targets, run.optimizers, run.scaler, cfg, run.env)
        if result is None:  # a signal; the run will find it too
            break
        result.norm.item()  # waits for the device
        laps.append(host.process_seconds() - lap)
    tokens, env.stop = run.batches.global_batch * run.val.T, run.env.stop  # a signal stops the run itself
    del run, result
    gc.collect()
    forget_trial(env.device)
    return min(laps[1:] or laps or [1.0]) / tokens
