"""
Text from a checkpoint, which carries its shape and its tokenizer, so that nothing else is needed.

    $ python sample.py --start="The history of"                    # from the best checkpoint in out/
    $ python sample.py --out_dir=out.1 --start=FILE:prompt.txt     # a prompt from a file
    $ python sample.py --init_from=gpt2 --temperature=0            # OpenAI's weights, greedy
    $ python sample.py --start=FILE:prompts.jsonl --output=jsonl   # many prompts, of any lengths, at once
    $ python sample.py --chat                                      # in the template of the data it was tuned on
    $ python sample.py --score=book.txt                            # loss and bits per byte of each document
"""

import codecs
import json
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from configurator import call_main, configure
from hotloop.chat_template import TEMPLATES, render
from hotloop.checkpoint import load_checkpoint
from hotloop.dataset import dataset_folder, read_meta
from hotloop.device import choose_device, choose_dtype, try_compile
from hotloop.documents import byte_blocks, standard_input
from hotloop.generate import GREEDY_BELOW, generate
from hotloop.host import cores
from hotloop.pretrained import find_checkpoint, load_gpt2, pretrained
from hotloop.quantize import for_inference
from hotloop.score import as_json, score
from hotloop.sources import COMPRESSED
from hotloop.tokenizer import TiktokenTokenizer, encode_marked, encode_parts, prompt_ids, tokenizer_from
from model import GPT


@dataclass
class SampleConfig:
    # --- model
    init_from: str = 'resume'  # resume (from out_dir), the path of a checkpoint, or gpt2 (-medium, -large, -xl)
    out_dir: str = 'out'  # where training left best.pt and ckpt.pt; best.pt is preferred
    data_dir: str = 'data'  # where weights by name are kept, and where nanoGPT's checkpoints find their tokenizer
    quantize: Literal['none', 'int8'] = 'none'  # int8: weights in 8 bits, but for embeddings
    # --- what to do
    start: str = '\n'  # the prompt, FILE:path (of a .jsonl file: one a line), or - for standard input
    chat: bool = False  # talk instead, until an empty line
    template: Literal['auto', 'plain', 'joined', 'alpaca', 'chatml', 'gemma', 'llama3'] = 'auto'  # auto: its data's
    score: str | None = None  # tell the loss on the documents of this file or folder instead
    text_field: str | None = None  # of rows there; None: text or content, or what instruction data is made of
    bad_utf8: Literal['refuse', 'replace'] = 'refuse'  # what to do there with bytes that are not UTF-8
    # --- text
    num_samples: int | None = None  # texts to draw from each prompt; None: 3, or the one that temperature=0 has
    max_new_tokens: int = 500  # tokens of each, at most
    temperature: float = 0.8  # below 1 plays safe, 0 takes the likeliest
    top_k: int | None = 200  # draw among the k likeliest only; None: all
    top_p: float | None = None  # draw among the likeliest that together have this probability; None: all
    min_p: float | None = None  # draw among those of this share of the likeliest one's probability; None: all
    repetition_penalty: float = 1.0  # above 1 makes what occurred less likely (CTRL, arXiv 1909.05858)
    stop: str | None = None  # text, or name of a special id, that ends a sample; several with ||| between; \n, \t
    past_context: Literal['slide', 'stop'] = 'slide'  # when the context is full: forget its oldest eighth, or stop
    seed: int = 1337  # of the first sample of a prompt; each has its own, and depends on nothing else
    # --- output
    output: Literal['text', 'jsonl'] = 'text'  # jsonl: an object a line, with what ended it
    logprobs: bool = False  # in the jsonl: ids and the model's log-probability of each, those of the stop too
    # --- machine
    batch_size: int = 64  # texts drawn at once
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first of them that is there
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: bfloat16 on GPUs that compute in it
    compile: bool | Literal['auto'] = 'auto'  # True: torch.compile; auto: CUDA graphs without it, nothing on CPUs

    def problems(self):
        wrong = []
        for name, least in (('num_samples', 1), ('max_new_tokens', 0), ('temperature', 0), ('top_k', 1), ('seed', 0),
                            ('batch_size', 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                wrong.append(f'{name}={getattr(self, name)} must be at least {least}')
        if self.seed >= 2**63 - (self.num_samples or 3):
            wrong.append(f'seed={self.seed} must be below 2**63')
        for name in ('top_p', 'min_p'):
            if getattr(self, name) is not None and not 0 < getattr(self, name) <= 1:
                wrong.append(f'{name}={getattr(self, name)} must be above 0 and at most 1')
        if not 0.01 <= self.repetition_penalty <= 100:
            wrong.append(f'repetition_penalty={self.repetition_penalty} must be from 0.01 to 100; 1 turns it off')
        if self.stop is not None and not all(self.stop.split('|||')):
            wrong.append(f'stop={self.stop!r} has an empty text, which is everywhere; ||| stands between texts')
        if self.logprobs and self.output != 'jsonl':
            wrong.append('logprobs=True needs output=jsonl to tell them')
        if self.chat and self.score is not None:
            wrong.append('chat and score are two things to do; leave out one of them')
        return wrong

    def idle(self):
        """Names of settings that do nothing in what is to be done."""
        drawing = {'temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty', 'stop', 'past_context', 'seed',
                   'max_new_tokens', 'compile'}
        several = {'start', 'num_samples', 'logprobs'}
        if self.score is not None:
            return drawing | several
        return {'bad_utf8', 'text_field'} | (several | {'output', 'batch_size'} if self.chat else {'template'})


def tokenizer_for(checkpoint, vocab_size, data_dir):
    """
    (tokenizer, where it is from). nanoGPT's checkpoints do not carry theirs: it is looked for beside the data they
    were trained on. GPT-2's is assumed for GPT-2's vocabulary only.
    """
    if 'tokenizer' in checkpoint:
        return tokenizer_from(checkpoint['tokenizer']), 'from the checkpoint'
    dataset = str(checkpoint.get('config', {}).get('dataset', ''))
    folder = dataset_folder(data_dir, dataset) if dataset else data_dir
    if os.path.exists(os.path.join(folder, 'meta.json')) or os.path.exists(os.path.join(folder, 'meta.pkl')):
        tokenizer = tokenizer_from(read_meta(folder)['tokenizer'])
        if vocab_size in (tokenizer.n_vocab, -(-tokenizer.n_vocab // 64) * 64):  # as it is, or padded
            return tokenizer, f'from {folder}'
    if vocab_size in (50257, 50304):
        return TiktokenTokenizer('gpt2'), "GPT-2's, by the size of the vocabulary"
    raise ValueError(f'the checkpoint carries no tokenizer, and {folder} has none for its vocabulary of {vocab_size}; '
                     'set --data_dir to where its dataset is')


def load(cfg):
    """(model, tokenizer, name of the template of its data) as the settings ask, on the CPU."""
    if found := pretrained(cfg.init_from, cfg.data_dir):
        folder, tokenizer = found
        print(f'weights: {folder}', file=sys.stderr)
        model = GPT.from_checkpoint(*load_gpt2(folder))
        if tokenizer is None:
            raise ValueError(f"{folder} holds no tokenizer.json, and GPT-2's tokenizer has another vocabulary than its "
                             f'{model.config.vocab_size:,} ids')
        return model, tokenizer_from(tokenizer), 'none'
    path = find_checkpoint(cfg)
    try:
        checkpoint = load_checkpoint(path)
    except ValueError as e:
        latest = os.path.join(os.path.dirname(path), 'ckpt.pt')
        if path in (cfg.init_from, latest) or not os.path.exists(latest):
            raise
        print(f'{e}; the latest checkpoint is taken instead', file=sys.stderr)
        path, checkpoint = latest, load_checkpoint(latest)
    model = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model'])
    tokenizer, source = tokenizer_for(checkpoint, model.config.vocab_size, cfg.data_dir)
    if type(checkpoint.get('bos')) is int and 0 <= checkpoint['bos'] < tokenizer.n_vocab:
        tokenizer.begin = checkpoint['bos']
    print(f'weights: {path}, step {checkpoint.get("iter_num", "unknown")}; tokenizer: {source}', file=sys.stderr)
    return model, tokenizer, str(checkpoint.get('template', 'none'))


def place(model, device, dtype, cfg):
    """Moves the model to where it computes; returns how it decodes, for GPT.generate."""
    torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch knows nothing of a container's quota
    for_inference(model, device, dtype, cfg.quantize, pack=cfg.compile is not True)
    print(f'device: {device}, {str(dtype).removeprefix("torch.")}' + ', weights in int8' * (cfg.quantize == 'int8'),
          file=sys.stderr)
    if cfg.compile is True:
        if failure := try_compile(device):
            raise ValueError(f'compile=True was asked for, but torch.compile fails here: {failure}; leave it out')
        print('compile=True: one compilation for each number of texts at once and each doubling of the context, before '
              'the second token', file=sys.stderr)
        return 'compiled'
    # a graph of plain kernels is ready in a moment, where compilation takes longer than most texts
    return 'graph' if cfg.compile == 'auto' and device.type == 'cuda' and cfg.max_new_tokens > 32 else 'eager'


# -----------------------------------------------------------------------------
# prompts in, texts out

def read_prompts(start):
    """The prompts that the setting start means: one, or those of a .jsonl file."""
    if start != '-' and not start.startswith('FILE:'):
        try:
            start.encode()  # bytes that could not be decoded are half characters in it
        except UnicodeEncodeError:
            raise ValueError(f'start={start!r} holds bytes that are not UTF-8') from None
        return [start]
    name = 'standard input' if start == '-' else start[5:]
    try:
        raw = standard_input().read() if start == '-' else b''.join(byte_blocks(name))
        text = raw.decode('utf-8-sig')
    except UnicodeDecodeError as e:
        raise ValueError(f'the prompts in {name} are not UTF-8 text: byte {e.object[e.start]:#04x} at '
                         f'{e.start}') from None
    if not name.lower().endswith(tuple(f'{s}{c}' for s in ('.jsonl', '.ndjson') for c in ('', *COMPRESSED))):
        return [text]
    prompts = []
    for number, line in enumerate(text.split('\n'), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(f'{name}, line {number}: {e}') from None
            prompts.append(row.get('prompt') if isinstance(row, dict) else row)
            if not isinstance(prompts[-1], str):
                raise ValueError(f'{name}, line {number}: a prompt is a text, or an object with the field prompt')
    if not prompts:
        raise ValueError(f'{name} holds no prompt')
    return prompts


class Text:
    """What one sequence says, as its tokens come: up to a stop text or a stop id, which are not part of it."""

    def __init__(self, tokenizer, stop_texts, stop_ids):
        self.tokenizer, self.stop_texts, self.stop_ids = tokenizer, stop_texts, stop_ids
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self.text, self.held, self.finish, self.tokens, self.logprobs = '', '', None, [], []

    def add(self, token, logprob):
        """
        The text that is certain now and was not before. A character whose bytes are spread over several tokens comes
        when it is complete, and what may be the beginning of a stop text when it turns out to be none.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            return self.end('stop')
        self.held += self.decoder.decode(self.tokenizer.decode([token]))
        found = [at for stop in self.stop_texts if (at := self.held.find(stop)) >= 0]
        if found:
            self.held, self.finish = self.held[:min(found)], 'stop'
            return self.release(len(self.held))
        beginning = max((n for stop in self.stop_texts for n in range(1, len(stop)) if self.held.endswith(stop[:n])),
                        default=0)
        return self.release(len(self.held) - beginning)

    def end(self, why):
        """The rest. Bytes that never became a character are the replacement sign."""
        self.finish = why
        self.held += self.decoder.decode(b'', final=True)
        return self.release(len(self.held))

    def release(self, n):
        piece, self.held = self.held[:n], self.held[n:]
        self.text += piece
        return piece


def stops_of(tokenizer, stop, mark=''):
    """(stop texts, stop ids) of the setting stop, of the mark that ends a turn, and the end of text always."""
    texts = [t for t in [*(stop or '').replace('\\n', '\n').replace('\\t', '\t').split('|||'), mark] if t]
    ids = {tokenizer.specials[text] for text in texts if text in tokenizer.specials}
    return [t for t in texts if t not in tokenizer.specials], ids | ({tokenizer.eot} - {None})


def write(model, tokenizer, prompts, cfg, decode, seeds, stops):
    """
    Continues prompts, lists of ids, with each of the seeds, in one batch. Yields (number of the text, new piece of it,
    Text) as they come, for the last time with text.finish set.
    """
    texts, stopped = [Text(tokenizer, *stops) for _ in prompts for _ in seeds], set()
    for told in generate(model, prompts, cfg.max_new_tokens, num_samples=len(seeds), seeds=seeds * len(prompts),
                               stop=stops[1], stopped=stopped, past_context=cfg.past_context, decode=decode,
                               vocab=tokenizer.n_vocab, logprobs=cfg.logprobs, temperature=cfg.temperature,
                               top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p,
                               repetition_penalty=cfg.repetition_penalty):
        for i, token, logprob in told:
            yield i, texts[i].add(token, logprob), texts[i]
            if texts[i].finish:
                stopped.add(i)
    for i, text in enumerate(texts):
        if not text.finish:
            yield i, text.end('length' if len(text.tokens) == cfg.max_new_tokens else 'context'), text


def in_order(pieces, beginnings):
    """Prints texts one after another, the one whose turn it is as it comes."""
    waiting, finished, turn = dict(enumerate(beginnings)), set(), 0
    print(waiting.pop(0), end='', flush=True)
    for i, piece, text in pieces:
        if text.finish:
            finished.add(i)
        if i == turn:
            print(piece, end='', flush=True)
        else:
            waiting[i] += piece
        while turn in finished:
            turn += 1
            print('\n---------------', flush=True)
            print(waiting.pop(turn, ''), end='', flush=True)


def sample(model, tokenizer, cfg, decode):
    """Draws num_samples texts from each prompt, batch_size of them at once."""
    num_samples = cfg.num_samples or (3 if cfg.temperature >= GREEDY_BELOW else 1)
    starts = read_prompts(cfg.start)
    prompts, size = [prompt_ids(tokenizer, start) for start in starts], model.config.block_size
    if (longest := max(map(len, prompts))) > size:
        print(f'note: the prompt has {longest:,} tokens, and the context holds {size:,}: its end is taken',
              file=sys.stderr)
    stops = stops_of(tokenizer, cfg.stop)
    at_once = max(cfg.batch_size // num_samples, 1)
    for first in range(0, len(prompts), at_once):
        for number in range(0, num_samples, cfg.batch_size):
            seeds = [cfg.seed + j for j in range(number, min(number + cfg.batch_size, num_samples))]
            batch = range(first, min(first + at_once, len(prompts)))
            pieces = write(model, tokenizer, [prompts[i] for i in batch], cfg, decode, seeds, stops)
            of_text = [(starts[i], seed) for i in batch for seed in seeds]
            if cfg.output == 'text':
                in_order(pieces, [start for start, _ in of_text])
                continue
            texts = {i: text for i, _, text in pieces}
            for i, (start, seed) in enumerate(of_text):
                line = {'prompt': start, 'seed': seed, 'text': texts[i].text, 'finish': texts[i].finish}
                if cfg.logprobs:
                    line |= {'tokens': texts[i].tokens, 'logprobs': texts[i].logprobs}
                print(as_json(line), flush=True)


# -----------------------------------------------------------------------------
# talking

def chat_ids(tokenizer, turns, template):
    """Ids of a conversation, [(role, text)], up to where the assistant's next words begin."""
    parts = render([*turns, ('assistant', '')], template)
    if TEMPLATES[template]['assistant'][1]:
        parts.pop()  # the mark that ends them
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    return begin + encode_parts(tokenizer, parts)[0].tolist()


def chat(model, tokenizer, template, cfg, decode):
    """Asks and answers until an empty line, 'exit' or the end of the input."""
    if cfg.template == 'auto' and template not in TEMPLATES:
        raise ValueError(f'the checkpoint was tuned in no template that is known (it says {template}); name one with '
                         f'--template: {", ".join(TEMPLATES)}')
    template = template if cfg.template == 'auto' else cfg.template
    marks = ''.join(mark for mark, *_ in render([('user', ''), ('assistant', '')], template))
    encode_marked(tokenizer, marks)  # may be characters that the tokenizer does not know
    standard_input()  # or there is nobody to talk to
    stops = stops_of(tokenizer, cfg.stop, TEMPLATES[template]['assistant'][1])
    size, turns, answered = model.config.block_size, [], 0
    room = min(cfg.max_new_tokens, size // 4)  # for the answer, at least
    while (said := ask()).strip() not in ('', 'exit'):
        asked = [*turns, ('user', said)]
        try:
            for forgotten in range(0, len(asked), 2):  # the oldest turns, until what is left leaves room
                ids = chat_ids(tokenizer, asked[forgotten:], template)
                if len(ids) + room <= size:
                    break
        except ValueError as e:  # characters that the tokenizer does not know
            print(f'note: {e}', file=sys.stderr)
            continue
        if len(ids) + room > size:
            print(f'note: that was {len(ids):,} tokens, too much for a context of {size:,} with an answer in it'
                  + '; a template of fewer words is --template=plain' * (template != 'plain'), file=sys.stderr)
            continue
        if forgotten:
            print(f'note: the context of {size:,} tokens is full; the oldest {forgotten} turns are forgotten',
                  file=sys.stderr)
        answer = ''
        for _, piece, _ in write(model, tokenizer, [ids], cfg, decode, [cfg.seed + answered], stops):
            print(piece, end='', flush=True)
            answer += piece
        print()
        turns = [*asked[forgotten:], ('assistant', answer)]
        answered += 1


def ask():
    """The next line of the user that can be read; empty at the end of the input."""
    while True:
        try:
            said = input('> ')
            said.encode()
            return said
        except (EOFError, KeyboardInterrupt):
            print()
            return ''
        except UnicodeError:  # from either, as the locale has it
            print('note: that was not UTF-8 text', file=sys.stderr)


# -----------------------------------------------------------------------------
# the loss on a text


# -----------------------------------------------------------------------------

def main(argv=None):
    cfg, given, _ = configure(SampleConfig, argv=argv, about=__doc__)
    if idle := cfg.idle() & given.keys():
        what = 'in a chat' if cfg.chat else 'where a text is scored' if cfg.score is not None else 'without --chat'
        raise ValueError(f'{", ".join(sorted(idle))} would do nothing {what}; leave it out')
    device, _ = choose_device(cfg.device)  # before gigabytes are read, or fetched
    dtype, _ = choose_dtype(cfg.dtype, device)
    model, tokenizer, template = load(cfg)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f'the tokenizer of these weights has {tokenizer.n_vocab:,} ids, and the model knows '
                         f'{model.config.vocab_size:,}')
    decode = place(model, device, dtype, cfg)
    if cfg.score is not None:
        score(model, tokenizer, template, cfg)
    elif cfg.chat:
        chat(model, tokenizer, template, cfg, decode)
    else:
        sample(model, tokenizer, cfg, decode)
    return 0


if __name__ == '__main__':
    call_main(main)
