"""
Samples from a checkpoint, which holds the model's shape and its tokenizer. A run with adapters also needs its
base, and nanoGPT's checkpoints their dataset.

    $ python sample.py --start="The history of"                    # from the best checkpoint in out/
    $ python sample.py --out_dir=out.1 --start=FILE:prompt.txt     # a prompt from a file
    $ python sample.py --init_from=gpt2 --temperature=0            # OpenAI's weights, greedy
    $ python sample.py --start=FILE:prompts.jsonl --output=jsonl   # many prompts or chats in one batch
    $ python sample.py --chat                                      # chat in the template of its training data
    $ python sample.py --score=book.txt                            # loss and bits per byte of each document
    $ python sample.py --eval_code=HumanEval.jsonl.gz --run_code   # syntax, BLEU and pass@1 of its code
    $ python sample.py --diagnose                                  # its training, weights and predictions
    $ python sample.py --export=folder                             # write it for transformers
"""

if __name__ == '__main__':  # before torch, whose import takes seconds
    import hotloop.system.early
    from configurator import call_main
    call_main(hotloop.system.early.check_early, 'sample.py')

import codecs
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from configurator import call_main, configure
from hotloop.data.chat import CHATS, TEMPLATES, choose_template, parts_before_answer, prompt_of
from hotloop.data.documents import Format
from hotloop.data.rows import json_rows
from hotloop.data.text_file import open_text, standard_input
from hotloop.data.tokenizer import encode_parts, prompt_ids, tokenizer_from
from hotloop.inference.code_eval import judge, report, task_of
from hotloop.inference.diagnose import diagnose
from hotloop.inference.generate import GREEDY_BELOW, Sampling, generate
from hotloop.inference.quantize import prepare_for_inference
from hotloop.inference.score import print_json, score
from hotloop.system.device import choose_compile, choose_device, choose_dtype
from hotloop.system.files import counted, json_lines
from hotloop.system.host import cores
from hotloop.weights.adapter import base_of, merge_adapter
from hotloop.weights.export import export
from hotloop.weights.load import open_base, open_weights, tokenizer_of
from model import GPT

ERRORS = {'refuse': 'strict', 'replace': 'replace'}  # handlers of codecs, by bad_utf8
CHOOSE = f'choose one with --template: {", ".join(TEMPLATES)}'  # in messages about a missing template


@dataclass
class SampleConfig:
    # --- model
    init_from: str = 'resume'  # resume (from out_dir), gpt2 (-medium, -large, -xl), a path, or a hub model
    out_dir: str = 'out'  # where training left best.pt and ckpt.pt; best.pt is preferred
    data_dir: str = 'data'  # downloaded weights, and datasets with the tokenizers of nanoGPT's checkpoints
    adapter: str | None = None  # folder of adapters, ours or peft's; it names the base unless init_from does
    quantize: Literal['none', 'int8'] = 'none'  # int8: 8-bit weights, except embeddings
    # --- what to do
    start: str = '\n'  # the prompt, FILE:path (a .jsonl file has one per line), or - for standard input
    chat: bool = False  # interactive chat; an empty line ends it
    template: Literal[('auto', 'none', *TEMPLATES)] = 'auto'  # chat template; auto: of the training data
    system: str | None = None  # system prompt of chats and of prompts in a template
    score: str | None = None  # print the loss on each document of this file or folder
    format: Format = 'auto'  # for score: of the files; auto: by suffix; functions: Python functions as rows
    text_field: str | None = None  # for score: field of rows; None: text, content, or a conversation
    bad_utf8: Literal['refuse', 'replace'] = 'refuse'  # what to do with text that is not UTF-8
    eval_code: str | None = None  # answer the tasks of this .jsonl or list: HumanEval, MBPP, rows
    run_code: bool = False  # for eval_code: also run the tests, in a process with limits (pass@1)
    diagnose: bool = False  # examine training, weights, dead units, predictions; also in report.html
    export: str | None = None  # write the model to this new folder for transformers, in float32 or --dtype
    # --- text
    num_samples: int | None = None  # samples per prompt; None: 3, or 1 if temperature=0
    max_new_tokens: int = 500  # maximum number of new tokens per sample
    temperature: float = 0.8  # below 1 is less random; 0 always picks the most likely token (eval_code: 0)
    top_k: int | None = 200  # sample from the k most likely tokens; None: all
    top_p: float | None = None  # sample from the most likely tokens with this total probability; None: all
    min_p: float | None = None  # drop tokens below this fraction of the highest probability; None: off
    repetition_penalty: float = 1.0  # above 1 makes repeated tokens less likely (CTRL, arXiv 1909.05858)
    stop: str | None = None  # text or special token that ends a sample; several: a|||b; \n, \t
    past_context: Literal['slide', 'stop'] = 'slide'  # when the context is full: drop its oldest 1/8 or stop
    seed: int = 1337  # of the first sample; each sample depends only on its seed and prompt
    # --- output
    output: Literal['text', 'jsonl'] = 'text'  # jsonl: one object per line, with its finish reason
    logprobs: bool = False  # in the jsonl: token ids and log-probabilities, including stop tokens
    # --- machine
    batch_size: int = 64  # samples generated at once
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first available
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: bfloat16 on newer GPUs
    compile: bool = False  # torch.compile: 20 to 50 s for GPT-2 on a CPU

    def problems(self):
        """The problems with the settings, one sentence each."""
        ranges = {'num_samples': (1, math.inf), 'max_new_tokens': (0, math.inf), 'temperature': (0, math.inf),
                  'top_k': (1, math.inf), 'top_p': (1e-6, 1), 'min_p': (1e-6, 1),
                  'repetition_penalty': (0.01, 100), 'seed': (0, 2**62), 'batch_size': (1, math.inf)}
        wrong = []
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                limits = f'{least} or more' if most == math.inf else f'from {least} to {most}'
                wrong.append(f'{name}={value} must be {limits}')
        if self.stop is not None and '' in self.stop.split('|||'):
            wrong.append(f'stop={self.stop!r} contains an empty string; separate stop strings with |||')
        if self.logprobs and self.output != 'jsonl':
            wrong.append('logprobs=True needs output=jsonl')
        commands = [name for name in ('score', 'eval_code', 'chat', 'diagnose', 'export')
                    if getattr(self, name) not in (None, False)]
        if len(commands) > 1:
            wrong.append(f'{commands[0]} and {commands[1]} are two commands; give one of them')
        if self.template == 'none' and (self.chat or self.score is not None):
            wrong.append("template='none' keeps prompts as they are; chat and score need a template")
        if self.quantize != 'none' and {'export', 'diagnose'} & set(commands):
            wrong.append(f'{commands[0]} needs unquantized weights; leave quantize={self.quantize} out')
        for name, needed, what in (('run_code', 'eval_code', 'the file with the tasks'),
                                   ('format', 'score', 'the text'), ('text_field', 'score', 'the text')):
            value = getattr(self, name)
            if value not in (False, 'auto', None) and getattr(self, needed) is None:
                wrong.append(f'{name}={value!r} needs {needed}, {what}')
        if self.run_code and os.name == 'nt':
            wrong.append('run_code=True needs Linux or macOS, because Windows does not limit the memory and '
                         'the processes of a child; use WSL, or leave it out')
        return wrong


def open_gpt(cfg):
    """(Weights, the float32 model on the CPU with the adapter merged)."""
    source = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
    if cfg.adapter and cfg.init_from == 'resume':
        found = open_base(base_of(cfg.adapter), cfg.adapter, cfg.data_dir)
    else:
        found = open_weights(source, cfg.data_dir)
    model = GPT.from_checkpoint(found.model_args, found.weights)
    if cfg.adapter:
        merge_adapter(model, cfg.adapter, found)
    found.weights.clear()  # the model has its own copy
    return found, model


def open_model(cfg):
    """(Weights, the float32 model on the CPU, tokenizer, template: as asked, of its data or 'none')."""
    found, model = open_gpt(cfg)
    tokenizer = tokenizer_from(tokenizer_of(found, cfg.data_dir))
    tokenizer.begin, tokenizer.ends = found.checkpoint.get('bos'), found.checkpoint.get('ends', ())
    unused = [name for name, i in tokenizer.specials.items() if i >= model.config.vocab_size]
    if unused and tokenizer.n_vocab - len(unused) == model.config.vocab_size:  # of images in Gemma 3
        tokenizer.specials = {name: i for name, i in tokenizer.specials.items() if name not in unused}
        tokenizer.n_vocab = model.config.vocab_size
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f'{found.path}: the tokenizer has {tokenizer.n_vocab:,} ids, but the model has '
                         f'{model.config.vocab_size:,}')
    template = found.checkpoint.get('template', 'none') if cfg.template == 'auto' else cfg.template
    return found, model, tokenizer, template


def load(cfg, device, dtype):
    """(model on its device and ready for inference, tokenizer, template as of open_model())."""
    found, model, tokenizer, template = open_model(cfg)
    rows = 1 if cfg.chat else min(samples_of(cfg), cfg.batch_size)  # of a step; several prompts have more
    model = prepare_for_inference(model, device, dtype, cfg.quantize, pack=not cfg.compile, rows=rows)
    step = f', step {found.checkpoint["iter_num"]}' if 'iter_num' in found.checkpoint else ''
    spec = tokenizer.spec()
    print(f'weights: {found.path}{step}; tokenizer: {spec.get("name", spec["kind"])}\n'
          f'device: {device}, {str(dtype).removeprefix("torch.")}', file=sys.stderr)
    return model, tokenizer, template


class Prompt(NamedTuple):
    """A prompt, and what ends its answer."""
    given: object  # a chat: its messages
    shown: str  # above its answer
    ids: list
    stops: tuple = ()  # texts that end its answer, as those of the settings do


def read_prompts(start, errors='strict'):
    """
    The prompts that `start` stands for: itself, standard input, a file, or each line of a .jsonl file, as
    (the prompt as given, [(role, text)], the template that suits a row, or None for a text). errors: how to
    decode what is not UTF-8.
    """
    if start == '-':
        try:
            return [as_turn(standard_input().read().decode(errors=errors).removeprefix('\ufeff'))]
        except UnicodeDecodeError as e:
            raise ValueError(f'standard input is not UTF-8 at byte {e.start:,}; decode it first, or use '
                             '--bad_utf8=replace') from None
    if not start.startswith('FILE:'):
        if os.path.isfile(start):
            print(f'note: the prompt is the text {start!r}; FILE:{start} reads the file', file=sys.stderr)
        return [as_turn(start)]
    path = start.removeprefix('FILE:')
    with open_text(path, errors) as f:
        if not re.search(r'\.(jsonl|ndjson)(\.\w+)?$', path.lower()):  # compressed or not
            return [as_turn(f.read())]
        prompts = [as_turn(row) if isinstance(row, str) else prompt_of(row, where)
                   for where, row in json_lines(f, path)]
    if not prompts:
        raise ValueError(f'{path} has no prompts, one on each line')
    return prompts


def as_turn(text):
    """A text as read_prompts() returns it."""
    return text, [('user', text)], None


def make_prompts(rows, tokenizer, template, cfg):
    """
    The Prompts of rows as read_prompts() returns them, in the template; texts only if the settings name it.
    ValueError for a chat without a template, and for a system prompt that no prompt can use.
    """
    prompts = []
    for given, turns, suited in rows:
        text = given if isinstance(given, str) else turns[-1][1]
        if template in TEMPLATES and (suited or cfg.template != 'auto'):
            used = choose_template(template, suited)
            ids = turn_ids(tokenizer, turns, used, cfg.system)
            shown = text if used == 'joined' else f'{text}\n'
            prompts.append(Prompt(given, shown, ids, (TEMPLATES[used].assistant[1],)))
        elif suited not in (None, 'joined'):
            raise ValueError(f'{cfg.eval_code or cfg.start} has a chat or an instruction, which needs a '
                             f'template: {CHOOSE}')
        elif cfg.system:
            raise ValueError(f'system={cfg.system!r} needs a template: {CHOOSE}')
        else:
            prompts.append(Prompt(given, text, prompt_ids(tokenizer, text)))
    return prompts


def turn_ids(tokenizer, turns, template, system=None):
    """
    The ids of a conversation up to the assistant's next answer, as in training; never empty. system: a system
    prompt for turns that have none.
    """
    if system is not None and 'system' not in dict(turns):
        turns = [('system', system), *turns]
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    parts = parts_before_answer(turns, template)
    return begin + encode_parts(tokenizer, parts)[0].tolist() if parts else prompt_ids(tokenizer, '')


def stops_of(tokenizer, stop, more=()):
    """(texts, ids) that end a sample: those of the setting stop, more of them, the end-of-text id."""
    texts, ids = [], {tokenizer.eot, *tokenizer.ends} - {None}
    for text in [*(stop or '').replace('\\n', '\n').replace('\\t', '\t').split('|||'), *more]:
        if text in tokenizer.specials:
            ids.add(tokenizer.specials[text])
        elif text:
            texts.append(text)
    return texts, ids


class Text:
    """The text of one sequence as its tokens arrive. It ends before a stop text or a stop id."""

    def __init__(self, tokenizer, prompt, seed, stop):
        self.tokenizer, self.seed = tokenizer, seed
        self.given, self.start = prompt.given, prompt.shown
        self.stop_texts, self.stop_ids = stops_of(tokenizer, stop, prompt.stops)
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self.text, self.pending = '', ''  # final text, and text that may still become a stop
        self.tokens, self.logprobs = [], []
        self.finish = None  # 'stop', 'length' or 'context'

    def add(self, token, logprob):
        """Adds a token. Holds back bytes of an incomplete character and a possible start of a stop text."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.end('stop')
            return
        self.pending += self.decoder.decode(self.tokenizer.decode([token]))
        found = [self.pending.index(stop) for stop in self.stop_texts if stop in self.pending]
        if found:
            self.finish, certain = 'stop', min(found)
        else:
            beginnings = [stop[:n] for stop in self.stop_texts for n in range(len(stop))]
            waiting = [len(b) for b in beginnings if self.pending.endswith(b)]
            certain = len(self.pending) - max(waiting, default=0)
        self.text += self.pending[:certain]
        self.pending = self.pending[certain:]

    def end(self, reason):
        """Finishes the text. Bytes of an incomplete character become the replacement character."""
        self.finish = reason
        self.text += self.pending + self.decoder.decode(b'', final=True)


def write(model, tokenizer, prompts, seeds, cfg):
    """
    Continues each Prompt once with each seed, in one batch. Yields the Texts before the first
    step and after each step, ordered by prompt and seed. At the end all are finished.
    """
    sampling = Sampling(cfg.max_new_tokens, temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p,
                        min_p=cfg.min_p, repetition_penalty=cfg.repetition_penalty,
                        past_context=cfg.past_context, vocab=tokenizer.n_vocab, logprobs=cfg.logprobs)
    texts = [Text(tokenizer, prompt, seed, cfg.stop) for prompt in prompts for seed in seeds]
    stopped = set()
    yield texts
    for step in generate(model, [prompt.ids for prompt in prompts], sampling, num_samples=len(seeds),
                         seeds=[text.seed for text in texts], stopped=stopped, compiled=cfg.compile):
        for index, token, logprob in step:
            texts[index].add(token, logprob)
            if texts[index].finish:
                stopped.add(index)
        yield texts
    for text in texts:
        if not text.finish:
            text.end('length' if len(text.tokens) == cfg.max_new_tokens else 'context')
    yield texts


def samples_of(cfg):
    """The number of samples of each prompt."""
    return cfg.num_samples or (1 if cfg.temperature < GREEDY_BELOW else 3)


def batches(model, tokenizer, prompts, cfg):
    """Continues each prompt num_samples times, batch_size at a time. Yields what write() does, in order."""
    longest, size = max((len(prompt.ids) for prompt in prompts), default=0), model.config.block_size
    if longest > size:
        print(f'note: the prompt has {longest:,} tokens; the last {size:,} fit the context', file=sys.stderr)
    num_samples = samples_of(cfg)
    prompts_at_once = max(cfg.batch_size // num_samples, 1)
    for i in range(0, len(prompts), prompts_at_once):
        batch = prompts[i:i + prompts_at_once]
        for j in range(0, num_samples, cfg.batch_size):
            seeds = range(cfg.seed + j, cfg.seed + min(j + cfg.batch_size, num_samples))
            yield write(model, tokenizer, batch, seeds, cfg)


def sample(model, tokenizer, template, cfg):
    """Prints samples of each prompt, in order."""
    rows = read_prompts(cfg.start, ERRORS[cfg.bad_utf8])
    prompts = make_prompts(rows, tokenizer, template, cfg)
    for steps in batches(model, tokenizer, prompts, cfg):
        if cfg.output == 'text':
            print_in_order(steps, '\n---------------\n')
            continue
        *_, texts = steps
        for text in texts:
            row = {'prompt': text.given, 'seed': text.seed, 'text': text.text, 'finish': text.finish}
            if cfg.logprobs:
                row |= {'tokens': text.tokens, 'logprobs': text.logprobs}
            print_json(row)


def eval_code(model, tokenizer, template, cfg):
    """Judges the answers to the tasks of a file: prints the metrics, with output=jsonl the answers too."""
    is_chat = template in CHATS
    with open_text(cfg.eval_code, ERRORS[cfg.bad_utf8]) as f:
        lines = list(f)
        is_list = ''.join(lines[:1]).lstrip().startswith('[')  # as MBPP's sanitized-mbpp.json is
        rows = json_rows(lines, cfg.eval_code, '') if is_list else json_lines(lines, cfg.eval_code)
        tasks = [task_of(row, where, is_chat) for where, row in rows]
    if not tasks or (cfg.run_code and not any(task.tests for task in tasks)):
        raise ValueError(f'{cfg.eval_code} has no {"tests to run" if tasks else "tasks"}')
    prompts = make_prompts([(task, task.turns, task.template) for task in tasks], tokenizer, template, cfg)
    if not is_chat:
        prompts = [prompt._replace(stops=prompt.stops + prompt.given.stops) for prompt in prompts]
    verdicts = []
    for steps in batches(model, tokenizer, prompts, cfg):
        *_, texts = steps
        for text in texts:
            verdict = judge(text.given, text.seed, text.text, cfg.run_code)
            verdicts.append(verdict)
            if cfg.output == 'jsonl':
                print_json({**verdict._asdict(), 'task': verdict.task.name})
        print(f'{counted(len(verdicts), "answer")} to {counted(len(tasks), "task")}', file=sys.stderr)
    report(verdicts, cfg.output)


def print_in_order(steps, end):
    """Streams the Texts one after another, each between its prompt and `end`. Returns them."""
    turn, printed = 0, 0  # the Text to print, and how much of it is printed
    for texts in steps:
        while turn < len(texts):
            text = texts[turn]
            print((text.start + text.text)[printed:], end=end if text.finish else '', flush=True)
            printed = len(text.start + text.text)
            if not text.finish:
                break
            turn, printed = turn + 1, 0
    return texts


def chat(model, tokenizer, template, cfg):
    """Answers the user's messages until an empty one, 'exit' or the end of the input."""
    if template not in TEMPLATES:
        raise ValueError(f'the chat template of the model is not known; {CHOOSE}')
    standard_input()  # fails early if stdin is closed
    if hasattr(sys.stdin, 'reconfigure'):  # not in a notebook
        sys.stdin.reconfigure(errors='replace')  # a byte that is not UTF-8 must not end a chat
    print('a line that ends with \\ continues on the next; an empty line ends the chat', file=sys.stderr)
    stops, size = (TEMPLATES[template].assistant[1],), model.config.block_size
    limit = size - min(cfg.max_new_tokens, size // 4)  # leaves room for the answer
    turns, seed = [], cfg.seed
    while (message := read_message()).strip() not in ('', 'exit'):
        try:
            asked, ids = fit_turns(tokenizer, [*turns, ('user', message)], template, limit, cfg.system)
        except ValueError as e:  # too long, or characters that the tokenizer lacks
            print(f'note: {e}', file=sys.stderr)
            continue
        (answer,) = print_in_order(write(model, tokenizer, [Prompt('', '', ids, stops)], [seed], cfg), '\n')
        turns = [*asked, ('assistant', answer.text)]
        seed += 1


def read_message():
    """The user's next lines, up to one that does not end with a backslash; '' at the end of the input."""
    lines = []
    try:
        while not lines or lines[-1].endswith('\\'):
            lines.append(input('. ' if lines else '> '))
    except (EOFError, KeyboardInterrupt):
        print()
        return ''
    return '\n'.join(line.removesuffix('\\') for line in lines)


def fit_turns(tokenizer, turns, template, limit, system=None):
    """(the newest turns of at most `limit` ids, those ids up to the answer). ValueError if there are none."""
    for first in range(0, len(turns), 2):
        ids = turn_ids(tokenizer, turns[first:], template, system)
        if len(ids) <= limit:
            if first:
                print(f'note: the context is full; the oldest {first} turns are dropped', file=sys.stderr)
            return turns[first:], ids
    raise ValueError(f'the last message takes {len(ids):,} tokens with its template; the context has room '
                     f'for {limit:,} and an answer')


def main(argv=None):
    cfg, given, _ = configure(SampleConfig, argv=argv, about=__doc__)
    if cfg.eval_code is not None and 'temperature' not in given:
        cfg.temperature = 0.0
    if cfg.export is not None:
        found, model, tokenizer, template = open_model(cfg)
        dtype = torch.float32 if cfg.dtype == 'auto' else getattr(torch, cfg.dtype)
        export(model, tokenizer, template, cfg.export, dtype, found.checkpoint.get('hf_config'))
        return 0
    device, _ = choose_device(cfg.device)  # before gigabytes are read or downloaded
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # torch makes streams, events and CUDA graphs on the current device
    dtype, _ = choose_dtype(cfg.dtype, device)
    torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch ignores a container's CPU limit
    if cfg.diagnose:
        found, model = open_gpt(cfg)
        diagnose(found, model, device, dtype, cfg)
        return 0
    cfg.compile, _ = choose_compile(cfg.compile, device)
    if device.type == 'cuda' and cfg.quantize == 'int8' and not cfg.compile:
        print('note: quantize=int8 saves memory, but without --compile=True each token converts all weights, '
              f'which is slower than {str(dtype).removeprefix("torch.")} on {device}', file=sys.stderr)
    model, tokenizer, template = load(cfg, device, dtype)
    if cfg.score is not None:
        score(model, tokenizer, template, cfg)
    elif cfg.eval_code is not None:
        eval_code(model, tokenizer, template, cfg)
    elif cfg.chat:
        chat(model, tokenizer, template, cfg)
    else:
        sample(model, tokenizer, template, cfg)
    return 0


if __name__ == '__main__':
    call_main(main)
