"""
Text from a checkpoint. The checkpoint holds the model's shape and its tokenizer, so nothing else is needed.

    $ python sample.py --start="The history of"                    # from the best checkpoint in out/
    $ python sample.py --out_dir=out.1 --start=FILE:prompt.txt     # a prompt from a file
    $ python sample.py --init_from=gpt2 --temperature=0            # OpenAI's weights, greedy
    $ python sample.py --start=FILE:prompts.jsonl --output=jsonl   # many prompts of any lengths in one batch
    $ python sample.py --chat                                      # in the template it was tuned in
    $ python sample.py --score=book.txt                            # loss and bits per byte of each document
"""

import codecs
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from configurator import call_main, configure
from hotloop.chat_template import TEMPLATES, render
from hotloop.dataset import dataset_folder, read_meta
from hotloop.device import choose_device, choose_dtype, try_compile
from hotloop.documents import open_text, standard_input
from hotloop.generate import GREEDY_BELOW, Sampling, generate
from hotloop.host import cores
from hotloop.pretrained import GPT2_VOCAB_SIZES, open_weights
from hotloop.quantize import prepare_for_inference
from hotloop.score import print_json, score
from hotloop.tokenizer import TiktokenTokenizer, Tokenizer, encode_parts, prompt_ids, tokenizer_from
from model import GPT


@dataclass
class SampleConfig:
    # --- model
    init_from: str = 'resume'  # resume (from out_dir), gpt2 (-medium, -large, -xl), or a path
    out_dir: str = 'out'  # where training left best.pt and ckpt.pt; best.pt is preferred
    data_dir: str = 'data'  # holds downloaded weights, and the tokenizers of nanoGPT's checkpoints
    quantize: Literal['none', 'int8'] = 'none'  # int8: weights in 8 bits, except embeddings
    # --- what to do
    start: str = '\n'  # the prompt, FILE:path (a .jsonl file has one a line), or - for standard input
    chat: bool = False  # answer what is typed, until an empty line
    template: Literal['auto', 'plain', 'joined', 'alpaca', 'chatml', 'gemma', 'llama3'] = 'auto'  # of turns
    score: str | None = None  # print the loss on each document of this file or folder
    text_field: str | None = None  # for score: field of rows; None: text, content, or a conversation
    bad_utf8: Literal['refuse', 'replace'] = 'refuse'  # for score: bytes that are not UTF-8
    # --- text
    num_samples: int | None = None  # texts to draw from each prompt; None: 3, or 1 if temperature=0
    max_new_tokens: int = 500  # the most tokens of a text
    temperature: float = 0.8  # below 1 is safer, 0 always takes the likeliest token
    top_k: int | None = 200  # draw from the k likeliest tokens; None: from all
    top_p: float | None = None  # draw from the likeliest tokens with this probability together; None: all
    min_p: float | None = None  # draw from tokens with this share of the highest probability; None: all
    repetition_penalty: float = 1.0  # above 1 makes repeated tokens less likely (CTRL, arXiv 1909.05858)
    stop: str | None = None  # text or special token that ends a sample; several: a|||b; \n, \t
    past_context: Literal['slide', 'stop'] = 'slide'  # full context: drop its oldest eighth, or stop
    seed: int = 1337  # of the first sample; each text depends on its own seed and prompt only
    # --- output
    output: Literal['text', 'jsonl'] = 'text'  # jsonl: one object a line, with the reason for its end
    logprobs: bool = False  # in the jsonl: ids and their log-probabilities, stop tokens included
    # --- machine
    batch_size: int = 64  # texts drawn at once
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first of them that exists
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: bfloat16 on newer GPUs
    compile: bool = False  # torch.compile: 20 to 50 s for GPT-2 on a CPU, then twice as fast

    def problems(self):
        """What is wrong with the settings, a sentence each."""
        wrong = []
        at_least = {'num_samples': 1, 'max_new_tokens': 0, 'temperature': 0, 'top_k': 1, 'batch_size': 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                wrong.append(f'{name}={value} must be at least {least}')
        for name in ('top_p', 'min_p'):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                wrong.append(f'{name}={value} must be above 0 and at most 1')
        if not 0 <= self.seed < 2**62:
            wrong.append(f'seed={self.seed} must be from 0 to 2**62')
        if not 0.01 <= self.repetition_penalty <= 100:
            wrong.append(f'repetition_penalty={self.repetition_penalty} must be from 0.01 to 100; 1 is off')
        if self.stop is not None and '' in self.stop.split('|||'):
            wrong.append(f'stop={self.stop!r} contains an empty string; separate stop strings with |||')
        if self.logprobs and self.output != 'jsonl':
            wrong.append('logprobs=True needs output=jsonl')
        if self.chat and self.score is not None:
            wrong.append('chat and score exclude each other; choose one')
        return wrong


# settings that act in some modes only
DRAWING = {'max_new_tokens', 'temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty', 'stop',
           'past_context', 'seed', 'compile'}
ACTS_IN = {'sample': DRAWING | {'start', 'num_samples', 'output', 'logprobs', 'batch_size'},
           'chat': DRAWING | {'template'},
           'score': {'template', 'text_field', 'bad_utf8', 'output', 'batch_size'}}


def mode_of(cfg, given):
    """sample, chat or score. ValueError if a setting was given that does nothing there."""
    mode = 'sample'
    if cfg.chat:
        mode = 'chat'
    if cfg.score is not None:
        mode = 'score'
    idle = given.keys() & set().union(*ACTS_IN.values()) - ACTS_IN[mode]
    if idle:
        raise ValueError(f'{", ".join(sorted(idle))} would do nothing in {mode} mode; leave it out')
    return mode


# -----------------------------------------------------------------------------
# the model

class Loaded(NamedTuple):
    model: GPT
    tokenizer: Tokenizer
    template: str  # that the model was tuned in, or 'none'


def load(cfg):
    """The Loaded model that the settings name, on the CPU."""
    source = cfg.init_from
    if source == 'resume':
        source = cfg.out_dir
        if not os.path.exists(source):
            raise ValueError(f'there is no {source!r}; train first: python train.py --out_dir={source}')
    found = open_weights(source, cfg.data_dir)
    model = GPT.from_checkpoint(found.model_args, found.weights)
    tokenizer, origin = tokenizer_for(found, cfg.data_dir)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f'{found.path}: the tokenizer has {tokenizer.n_vocab:,} ids, but the model has '
                         f'{model.config.vocab_size:,}')
    tokenizer.begin = found.checkpoint.get('bos')
    step = f', step {found.checkpoint["iter_num"]}' if 'iter_num' in found.checkpoint else ''
    print(f'weights: {found.path}{step}; tokenizer: {origin}', file=sys.stderr)
    return Loaded(model, tokenizer, str(found.checkpoint.get('template', 'none')))


def tokenizer_for(weights, data_dir):
    """
    (tokenizer, its name or origin). nanoGPT's checkpoints hold none: it is read from the dataset they were
    trained on. GPT-2's is assumed for GPT-2's vocabulary only.
    """
    if weights.tokenizer is not None:
        tokenizer = tokenizer_from(weights.tokenizer)
        return tokenizer, weights.tokenizer.get('name', weights.tokenizer['kind'])
    vocab_size = weights.model_args['vocab_size']
    dataset = weights.checkpoint.get('config', {}).get('dataset')
    folder = dataset_folder(data_dir, dataset) if dataset else data_dir
    if any(os.path.exists(os.path.join(folder, name)) for name in ('meta.json', 'meta.pkl')):
        tokenizer = tokenizer_from(read_meta(folder)['tokenizer'])
        padded = -(-tokenizer.n_vocab // 64) * 64
        if vocab_size in (tokenizer.n_vocab, padded):
            return tokenizer, f'from {folder}'
    if vocab_size in GPT2_VOCAB_SIZES:
        return TiktokenTokenizer('gpt2'), "GPT-2's, by the size of the vocabulary"
    raise ValueError(f'{weights.path} has no tokenizer, and {folder} has none for {vocab_size:,} ids; set '
                     '--data_dir to where its dataset is, or add the tokenizer.json of a Hugging Face model')


def to_device(model, device, dtype, cfg):
    """Moves the model to its device, ready for inference, and prints where it computes."""
    failure = try_compile(device) if cfg.compile else None
    if failure:
        raise ValueError(f'compile=True, but torch.compile fails here: {failure}; leave it out')
    torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch ignores a container's CPU limit
    model = prepare_for_inference(model, device, dtype, cfg.quantize, pack=not cfg.compile)
    int8 = ', weights in int8' if cfg.quantize == 'int8' else ''
    print(f'device: {device}, {str(dtype).removeprefix("torch.")}{int8}', file=sys.stderr)
    return model


# -----------------------------------------------------------------------------
# prompts in, texts out

def read_prompts(start):
    """The prompts that `start` stands for: itself, standard input, a file, or each line of a .jsonl file."""
    if start.startswith('FILE:'):
        path = start.removeprefix('FILE:')
        with open_text(path) as f:
            if re.search(r'\.(jsonl|ndjson)(\.\w+)?$', path.lower()):  # compressed or not
                return prompts_of_rows(f, path)
            return [f.read()]
    try:
        if start == '-':
            return [standard_input().read().decode('utf-8-sig')]
        start.encode()  # a shell may pass other bytes, which Python turns into surrogates
        return [start]
    except UnicodeError as e:
        raise ValueError(f'the prompt is not UTF-8 text: {e}') from None


def prompts_of_rows(lines, path):
    """The prompts in JSON lines: each line a text, or an object with the field prompt."""
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ValueError(f'{path}, line {number} is not JSON: {e}') from None
        prompt = row.get('prompt') if isinstance(row, dict) else row
        if not isinstance(prompt, str):
            raise ValueError(f'{path}, line {number}: expected a text, or an object with the field prompt')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f'{path} holds no prompt')
    return prompts


class Stops(NamedTuple):
    texts: list
    ids: frozenset


def stops_of(tokenizer, stop, mark=''):
    """The Stops of the setting `stop` and of a template's end mark. The end-of-text id always stops."""
    texts, ids = [], {tokenizer.eot} - {None}
    for text in [*(stop or '').replace('\\n', '\n').replace('\\t', '\t').split('|||'), mark]:
        if text in tokenizer.specials:
            ids.add(tokenizer.specials[text])
        elif text:
            texts.append(text)
    return Stops(texts, frozenset(ids))


class Text:
    """The text of one sequence as its tokens arrive. It ends before a stop text or a stop id."""

    def __init__(self, tokenizer, stops):
        self.tokenizer, self.stops = tokenizer, stops
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self.pieces, self.pending = [], ''
        self.tokens, self.logprobs = [], []
        self.finish = None  # 'stop', 'length' or 'context'

    def add(self, token, logprob):
        """
        Takes a token and returns the text that is now certain. A character whose bytes span several tokens
        waits until it is complete; what may begin a stop text waits until it turns out not to.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stops.ids:
            return self.end('stop')
        self.pending += self.decoder.decode(self.tokenizer.decode([token]))
        found = [self.pending.index(stop) for stop in self.stops.texts if stop in self.pending]
        if found:
            self.pending, self.finish = self.pending[:min(found)], 'stop'
            return self.release(len(self.pending))
        waiting = 0
        for stop in self.stops.texts:
            for n in range(1, len(stop)):
                if self.pending.endswith(stop[:n]):
                    waiting = max(waiting, n)
        return self.release(len(self.pending) - waiting)

    def end(self, reason):
        """The rest of the text. Bytes of an incomplete character become the replacement character."""
        self.finish = reason
        self.pending += self.decoder.decode(b'', final=True)
        return self.release(len(self.pending))

    def release(self, n):
        piece, self.pending = self.pending[:n], self.pending[n:]
        self.pieces.append(piece)
        return piece


def write(loaded, prompts, seeds, stops, cfg):
    """
    Continues each prompt, a list of ids, once with each seed, in one batch. Yields (index, new piece, Text)
    as tokens arrive, the last piece of a text with its `finish` set. Indices count the seeds of the first
    prompt, then those of the next.
    """
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p,
                        cfg.repetition_penalty, stop=stops.ids, past_context=cfg.past_context,
                        vocab=loaded.tokenizer.n_vocab, logprobs=cfg.logprobs)
    texts, stopped = [Text(loaded.tokenizer, stops) for _ in prompts for _ in seeds], set()
    for step in generate(loaded.model, prompts, sampling, num_samples=len(seeds), seeds=seeds * len(prompts),
                         stopped=stopped, compiled=cfg.compile):
        for index, token, logprob in step:
            piece = texts[index].add(token, logprob)
            if texts[index].finish:
                stopped.add(index)
            yield index, piece, texts[index]
    for index, text in enumerate(texts):
        if not text.finish:
            yield index, text.end('length' if len(text.tokens) == cfg.max_new_tokens else 'context'), text


def sample(loaded, cfg):
    """Draws num_samples texts from each prompt, batch_size of them at once, and prints them in order."""
    starts, size = read_prompts(cfg.start), loaded.model.config.block_size
    prompts = [prompt_ids(loaded.tokenizer, start) for start in starts]
    longest = max(len(prompt) for prompt in prompts)
    if longest > size:
        print(f'note: the prompt has {longest:,} tokens; the last {size:,} fit the context', file=sys.stderr)
    num_samples = cfg.num_samples or (1 if cfg.temperature < GREEDY_BELOW else 3)
    prompts_at_once = max(cfg.batch_size // num_samples, 1)
    for i in range(0, len(prompts), prompts_at_once):
        for j in range(0, num_samples, cfg.batch_size):
            chosen = slice(i, i + prompts_at_once)
            seeds = [cfg.seed + n for n in range(j, min(j + cfg.batch_size, num_samples))]
            pieces = write(loaded, prompts[chosen], seeds, stops_of(loaded.tokenizer, cfg.stop), cfg)
            drawn = [(start, seed) for start in starts[chosen] for seed in seeds]
            if cfg.output == 'text':
                print_in_order(pieces, [start for start, _ in drawn])
            else:
                print_rows(pieces, drawn, cfg.logprobs)


def print_in_order(pieces, starts):
    """Streams texts one after another, each behind its prompt; later texts wait for their turn."""
    waiting, finished, turn = [[start] for start in starts], set(), 0
    print(starts[0], end='', flush=True)
    for index, piece, text in pieces:
        if text.finish:
            finished.add(index)
        if index == turn:
            print(piece, end='', flush=True)
        else:
            waiting[index].append(piece)
        while turn in finished:
            turn += 1
            print('\n---------------', flush=True)
            if turn < len(starts):
                print(''.join(waiting[turn]), end='', flush=True)


def print_rows(pieces, drawn, logprobs):
    """Prints one JSON object for each text; drawn: (prompt, seed) of each."""
    texts = {index: text for index, _, text in pieces}
    for index, (start, seed) in enumerate(drawn):
        text = texts[index]
        row = {'prompt': start, 'seed': seed, 'text': ''.join(text.pieces), 'finish': text.finish}
        if logprobs:
            row |= {'tokens': text.tokens, 'logprobs': text.logprobs}
        print_json(row)


# -----------------------------------------------------------------------------
# chat

def chat(loaded, cfg):
    """Answers the user's lines until an empty line, 'exit' or the end of the input."""
    model, tokenizer, template = loaded
    if cfg.template != 'auto':
        template = cfg.template
    if template not in TEMPLATES:
        raise ValueError(f'the model was tuned in the template {template}; choose one with --template: '
                         f'{", ".join(TEMPLATES)}')
    chat_ids(tokenizer, [('user', '')], template)  # fails early if the tokenizer lacks a character of it
    standard_input()  # fails early if it is closed
    stops = stops_of(tokenizer, cfg.stop, TEMPLATES[template]['assistant'][1])
    size = model.config.block_size
    limit = size - min(cfg.max_new_tokens, size // 4)  # leaves room for the answer
    turns, seed = [], cfg.seed
    while (line := ask()).strip() not in ('', 'exit'):
        try:
            asked, ids = fit_turns(tokenizer, [*turns, ('user', line)], template, limit)
        except ValueError as e:  # too long, or characters that the tokenizer lacks
            print(f'note: {e}', file=sys.stderr)
            continue
        answer = []
        for _, piece, _ in write(loaded, [ids], [seed], stops, cfg):
            print(piece, end='', flush=True)
            answer.append(piece)
        print()
        turns = [*asked, ('assistant', ''.join(answer))]
        seed += 1


def chat_ids(tokenizer, turns, template):
    """Ids of a conversation, [(role, text)], up to where the assistant's next turn begins."""
    parts = render([*turns, ('assistant', '')], template)
    if TEMPLATES[template]['assistant'][1]:
        parts.pop()  # the mark that would end it
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    return begin + encode_parts(tokenizer, parts)[0].tolist()


def fit_turns(tokenizer, turns, template, limit):
    """(the newest turns of at most `limit` ids, those ids). ValueError if the last turn alone has more."""
    for first in range(0, len(turns), 2):
        ids = chat_ids(tokenizer, turns[first:], template)
        if len(ids) <= limit:
            if first:
                print(f'note: the context is full; the oldest {first} turns are dropped', file=sys.stderr)
            return turns[first:], ids
    raise ValueError(f'these are {len(ids):,} tokens, but the context has room for {limit:,} and an answer')


def ask():
    """The user's next line; '' at the end of the input."""
    while True:
        try:
            line = input('> ')
            line.encode()  # in some locales, bytes that are not UTF-8 arrive as surrogates
            return line
        except (EOFError, KeyboardInterrupt):
            print()
            return ''
        except UnicodeError:
            print('note: that was not UTF-8 text', file=sys.stderr)


# -----------------------------------------------------------------------------

def main(argv=None):
    cfg, given, _ = configure(SampleConfig, argv=argv, about=__doc__)
    mode = mode_of(cfg, given)
    device, _ = choose_device(cfg.device)  # before gigabytes are read or downloaded
    dtype, _ = choose_dtype(cfg.dtype, device)
    loaded = load(cfg)
    loaded = loaded._replace(model=to_device(loaded.model, device, dtype, cfg))
    if mode == 'score':
        score(*loaded, cfg)
    elif mode == 'chat':
        chat(loaded, cfg)
    else:
        sample(loaded, cfg)
    return 0


if __name__ == '__main__':
    call_main(main)
