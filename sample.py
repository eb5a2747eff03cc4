"""
Generate text from a checkpoint, which holds the model's shape and its tokenizer. A run with adapters
also needs its base, and a checkpoint of nanoGPT its dataset.

    $ python sample.py --start="The history of"                    # from the best checkpoint in out/
    $ python sample.py --out_dir=out.1 --start=FILE:prompt.txt     # a prompt from a file
    $ python sample.py --init_from=gpt2 --temperature=0            # OpenAI's weights, greedy
    $ python sample.py --start=FILE:prompts.jsonl --output=jsonl   # many prompts or chats in one batch
    $ python sample.py --chat --start='Be brief.'                  # chat, with a system prompt
    $ python sample.py --score=book.txt                            # loss and bits per byte
    $ python sample.py --eval_code=HumanEval.jsonl.gz --run_code   # syntax, BLEU and pass@1 of its code
    $ python sample.py --diagnose                                  # training, weights, activations
    $ python sample.py --export=folder                             # write it for transformers
"""

import codecs
import math
import re
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from configurator import call_main, configure
from hotloop.data.chat import CHATS, TEMPLATES, choose_template, parts_before_answer, prompt_of
from hotloop.data.dataset import open_datasets
from hotloop.data.documents import open_text
from hotloop.data.encode import encode_parts, prompt_ids
from hotloop.data.tokenizer import template_of_record, tokenizer_from
from hotloop.inference.code_eval import judge, print_metrics, read_tasks
from hotloop.inference.diagnose import diagnose
from hotloop.inference.generate import GREEDY_BELOW, Sampling, generate
from hotloop.inference.quantize import prepare_for_inference
from hotloop.inference.score import print_json, print_scores, read_documents, score_documents
from hotloop.system.device import choose_compile, choose_device, choose_dtype
from hotloop.system.files import json_lines
from hotloop.system.host import cores
from hotloop.training.dataloader import open_split
from hotloop.training.evaluate import fixed_windows
from hotloop.weights.export import export
from hotloop.weights.load import load_weights, tokenizer_of
from model import GPT, positions_in

CHOOSE = f'choose one with --template: {", ".join(TEMPLATES)}'  # in errors about a missing template
RANGES = {'num_samples': (1, math.inf), 'max_new_tokens': (0, math.inf), 'temperature': (0, math.inf),
          'top_k': (1, math.inf), 'top_p': (1e-6, 1), 'min_p': (1e-6, 1),
          'repetition_penalty': (0.01, 100), 'seed': (0, 2**62), 'batch_size': (1, math.inf)}
# the settings of drawn texts, and those that each command does not use
TEXT = ('start', 'num_samples', 'max_new_tokens', 'temperature', 'top_k', 'top_p', 'min_p',
        'repetition_penalty', 'stop', 'seed')
UNUSED = {'score': TEXT, 'diagnose': (*TEXT, 'template', 'batch_size'), 'eval_code': ('start',),
          'export': (*TEXT, 'output', 'batch_size', 'device', 'compile'),
          'chat': ('num_samples', 'output', 'batch_size')}
DIAGNOSED = 2**14  # tokens of validation data that --diagnose reads


@dataclass(frozen=True)
class SampleConfig:
    # --- model
    init_from: str = 'resume'  # resume (from out_dir), a run, a folder of weights or adapters, or a hub model
    out_dir: str = 'out'  # where training left best.pt and ckpt.pt; best.pt is preferred
    data_dir: str = 'data'  # downloaded weights, and datasets with the tokenizers of nanoGPT's checkpoints
    quantize: Literal['none', 'int8'] = 'none'  # int8: 8-bit weights, except embeddings
    # --- what to do
    start: str = '\n'  # the prompt, FILE:path (a .jsonl file has one per line), or - for standard input
    chat: bool = False  # interactive chat, of which start is the system prompt; an empty line ends it
    template: Literal[('auto', 'none', *TEMPLATES)] = 'auto'  # chat template; auto: of the training data
    score: str | None = None  # print the loss on each document of this file or folder
    eval_code: str | None = None  # answer the tasks of this .jsonl or list: HumanEval, MBPP, rows
    run_code: bool = False  # for eval_code: also run the tests, in a process with limits (pass@1)
    diagnose: bool = False  # examine training, weights, activations and loss by position
    export: str | None = None  # write the model to this new folder for transformers, in float32 or --dtype
    # --- text
    num_samples: int | None = None  # samples per prompt; None: 3, or 1 if temperature=0
    max_new_tokens: int = 500  # maximum number of new tokens per sample
    temperature: float | None = None  # 0 always picks the most likely token; None: 0.9, 0 for eval_code
    top_k: int | None = 200  # sample from the k most likely tokens; None: all
    top_p: float | None = None  # sample from the most likely tokens with this total probability; None: all
    min_p: float | None = None  # drop tokens below this fraction of the highest probability; None: off
    repetition_penalty: float = 1.0  # above 1 makes repeated tokens less likely (CTRL, arXiv 1909.05858)
    stop: str | None = None  # text or special token that ends a sample; several: a|||b; \n, \t
    seed: int = 1337  # of the first sample; each sample depends only on its seed and prompt
    # --- output
    output: Literal['text', 'jsonl', 'logprobs'] = 'text'  # jsonl: an object a line; logprobs: also tokens
    # --- machine
    batch_size: int = 64  # samples generated at once
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first available
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: bfloat16 on newer GPUs
    compile: bool = False  # torch.compile: 20 to 50 s for GPT-2 on a CPU

    def problems(self):
        """List the problems with the settings, one sentence each."""
        problems = []
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                problems.append(f'{name}={value} must be from {least} to {most}')
        if self.stop is not None and '' in self.stop.split('|||'):
            problems.append(f'stop={self.stop!r} contains an empty string; separate stop strings with |||')
        if self.run_code and not self.eval_code:
            problems.append('run_code=True needs eval_code, the file with the tasks')
        names = ('score', 'eval_code', 'chat', 'diagnose', 'export')
        commands = [name for name in names if getattr(self, name)]
        if len(commands) > 1:
            problems.append(f'{commands[0]} and {commands[1]} are two commands; give one of them')
        if self.template == 'none' and (self.chat or self.score):
            problems.append("template='none' keeps prompts as they are; chat and score need a template")
        if self.quantize != 'none' and (self.export or self.diagnose):
            problems.append(f'{commands[0]} needs unquantized weights; remove quantize={self.quantize}')
        return problems


# -----------------------------------------------------------------------------
# the model

class Opened(NamedTuple):
    weights: object  # the Weights, which were freed
    model: GPT  # float32, on the CPU, with the adapter merged
    tokenizer: object
    template: str  # as requested, or that of the training data, or 'none'


def open_gpt(cfg):
    """Load weights into a float32 GPT on the CPU. Returns (Weights, GPT)."""
    source = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
    weights = load_weights(source, cfg.data_dir)
    model = GPT.from_checkpoint(weights.model_args, weights.weights)
    weights.weights.clear()  # The model has its own copy.
    return weights, model


def open_model(cfg):
    """Open a model with its tokenizer and chat template. Returns Opened."""
    weights, model = open_gpt(cfg)
    tokenizer = tokenizer_from(tokenizer_of(weights, cfg.data_dir))
    unused = [name for name, i in tokenizer.specials.items() if i >= model.config.vocab_size]
    if unused and tokenizer.n_vocab - len(unused) == model.config.vocab_size:  # of images in Gemma 3
        tokenizer.specials = {name: i for name, i in tokenizer.specials.items() if name not in unused}
        tokenizer.n_vocab = model.config.vocab_size
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f'{weights.path}: the tokenizer has {tokenizer.n_vocab:,} ids, but the model has '
                         f'{model.config.vocab_size:,}')
    template = cfg.template
    if template == 'auto':
        template = template_of_record(weights.checkpoint) or 'none'
    return Opened(weights, model, tokenizer, template)


# -----------------------------------------------------------------------------
# prompts

class Prompt(NamedTuple):
    given: object  # as the user gave it; a chat: its messages
    shown: str  # printed above its answer
    ids: list
    stops: tuple = ()  # texts that end its answer, besides those of the settings


def read_prompts(start):
    """
    Read the prompts that `start` stands for: itself, standard input, a file, or each line of a
    .jsonl file. Returns [(prompt as given, [(role, text)], template that suits a row or None)].
    """
    if start == '-':
        return [text_prompt(sys.stdin.buffer.read().decode().removeprefix('\ufeff'))]
    if not start.startswith('FILE:'):
        return [text_prompt(start)]
    path = start.removeprefix('FILE:')
    with open_text(path) as f:
        if not re.search(r'\.(jsonl|ndjson)(\.\w+)?$', path.lower()):  # compressed or not
            return [text_prompt(f.read())]
        prompts = []
        for where, row in json_lines(f, path):
            prompts.append(text_prompt(row) if isinstance(row, str) else prompt_of(row, where))
    if not prompts:
        raise ValueError(f'{path} has no prompts, one on each line')
    return prompts


def text_prompt(text):
    return text, [('user', text)], None


def make_prompts(rows, tokenizer, template, cfg):
    """Encode rows of read_prompts() in the template; texts only if the settings name it."""
    prompts = []
    for given, turns, suited in rows:
        text = given if isinstance(given, str) else turns[-1][1]
        if template in TEMPLATES and (suited or cfg.template != 'auto'):
            used = choose_template(template, suited)
            ids = turn_ids(tokenizer, turns, used)
            shown = text if used == 'joined' else f'{text}\n'
            prompts.append(Prompt(given, shown, ids, (TEMPLATES[used].assistant[1],)))
        elif suited not in (None, 'joined'):
            raise ValueError(f'a chat or an instruction needs a template; {CHOOSE}')
        else:
            prompts.append(Prompt(given, text, prompt_ids(tokenizer, text)))
    return prompts


def turn_ids(tokenizer, turns, template):
    """
    Encode a conversation up to the assistant's next answer, as in training. Returns a list that is
    never empty.
    """
    parts = parts_before_answer(turns, template)
    if not parts:
        return prompt_ids(tokenizer, '')
    ids = encode_parts(tokenizer, parts)[0].tolist()
    return ids if tokenizer.bos is None else [tokenizer.bos, *ids]


# -----------------------------------------------------------------------------
# texts

def stops_of(tokenizer, stop, more=()):
    """Collect what ends a sample: the setting `stop`, more texts, end-of-text ids. Returns (texts, ids)."""
    texts = []
    ids = {tokenizer.eot, *tokenizer.stops} - {None}
    for text in [*(stop or '').replace('\\n', '\n').replace('\\t', '\t').split('|||'), *more]:
        if text in tokenizer.specials:
            ids.add(tokenizer.specials[text])
        elif text:
            texts.append(text)
    return texts, ids


class Text:
    """The text of one sequence as its tokens arrive. It ends before a stop text or a stop id."""

    def __init__(self, tokenizer, prompt, seed, stop):
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.seed = seed
        self.stop_texts, self.stop_ids = stops_of(tokenizer, stop, prompt.stops)
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self.text = ''
        self.pending = ''  # the end of the text, which may still become a stop text
        self.tokens = []
        self.logprobs = []
        self.finish = None  # 'stop' or 'length'

    def add(self, token, logprob):
        """Add a token. Bytes of an incomplete character and a possible stop text are held back."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.end('stop')
            return
        self.pending += self.decoder.decode(self.tokenizer.decode([token]))
        ready = len(self.pending)
        found = [self.pending.index(stop) for stop in self.stop_texts if stop in self.pending]
        if found:
            self.finish = 'stop'
            ready = min(found)
        else:
            for stop in self.stop_texts:
                for length in range(len(stop)):
                    if self.pending.endswith(stop[:length]):
                        ready = min(ready, len(self.pending) - length)
        self.text += self.pending[:ready]
        self.pending = self.pending[ready:]

    def end(self, reason):
        """Finish the text. Bytes of an incomplete character become the replacement character."""
        self.finish = reason
        self.text += self.pending + self.decoder.decode(b'', final=True)


def temperature_of(cfg):
    if cfg.temperature is not None:
        return cfg.temperature
    return 0.0 if cfg.eval_code else 0.9


def write(model, tokenizer, prompts, seeds, cfg):
    """
    Continue each Prompt once with each seed, in one batch. Yields the Texts before the first step
    and after each step, ordered by prompt and seed. At the end all are finished.
    """
    sampling = Sampling(cfg.max_new_tokens, temperature=temperature_of(cfg), top_k=cfg.top_k,
                        top_p=cfg.top_p, min_p=cfg.min_p, repetition_penalty=cfg.repetition_penalty,
                        vocab=tokenizer.n_vocab, logprobs=cfg.output == 'logprobs')
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
            text.end('length')
    yield texts


def write_batches(model, tokenizer, prompts, cfg):
    """Continue each prompt num_samples times, batch_size at a time. Yields write() of each batch."""
    longest = max([len(prompt.ids) for prompt in prompts], default=0)
    if longest > model.config.block_size:
        print(f'note: the prompt has {longest:,} tokens; only the last {model.config.block_size:,} fit in '
              'the context', file=sys.stderr)
    num_samples = cfg.num_samples
    if num_samples is None:
        num_samples = 1 if temperature_of(cfg) < GREEDY_BELOW else 3
    prompts_at_once = max(cfg.batch_size // num_samples, 1)
    for i in range(0, len(prompts), prompts_at_once):
        for j in range(0, num_samples, cfg.batch_size):
            seeds = range(cfg.seed + j, cfg.seed + min(j + cfg.batch_size, num_samples))
            yield write(model, tokenizer, prompts[i:i + prompts_at_once], seeds, cfg)


def print_in_order(steps, end):
    """Stream the Texts one after another, each between its prompt and `end`. Returns them."""
    current = 0  # the Text that is printed
    printed = 0  # characters of it
    for texts in steps:
        while current < len(texts):
            text = texts[current]
            shown = text.prompt.shown + text.text
            print(shown[printed:], end=end if text.finish else '', flush=True)
            printed = len(shown)
            if not text.finish:
                break
            current += 1
            printed = 0
    return texts


# -----------------------------------------------------------------------------
# commands

def sample(model, tokenizer, template, cfg):
    """Print samples of each prompt, in order."""
    rows = read_prompts(cfg.start)
    given, _, _ = rows[0]
    if template in CHATS and cfg.template == 'auto' and isinstance(given, str):
        print('note: this model was tuned for chat; give --chat to talk to it, or --template='
              f'{template} to ask one question', file=sys.stderr)
    prompts = make_prompts(rows, tokenizer, template, cfg)
    for steps in write_batches(model, tokenizer, prompts, cfg):
        if cfg.output == 'text':
            print_in_order(steps, '\n---------------\n')
            continue
        *_, texts = steps
        for text in texts:
            row = {'prompt': text.prompt.given, 'seed': text.seed, 'text': text.text, 'finish': text.finish}
            if cfg.output == 'logprobs':
                row |= {'tokens': text.tokens, 'logprobs': text.logprobs}
            print_json(row)


def eval_code(model, tokenizer, template, cfg):
    """Judge the answers to the tasks of a file. Prints the metrics, with output=jsonl also the answers."""
    is_chat = template in CHATS
    tasks = read_tasks(cfg.eval_code, is_chat)
    if cfg.run_code and not any(task.tests for task in tasks):
        raise ValueError(f'run_code=True needs tests, and {cfg.eval_code} has none')
    prompts = []
    for prompt in make_prompts([(task, task.turns, task.template) for task in tasks],
                               tokenizer, template, cfg):
        stops = prompt.stops if is_chat else prompt.stops + prompt.given.stops
        prompts.append(prompt._replace(stops=stops))
    verdicts = []
    for steps in write_batches(model, tokenizer, prompts, cfg):
        *_, texts = steps
        for text in texts:
            verdict = judge(text.prompt.given, text.seed, text.text, cfg.run_code)
            verdicts.append(verdict)
            if cfg.output != 'text':
                print_json({**verdict._asdict(), 'task': verdict.task.name})
        print(f'{len(verdicts):,} answers to {len(tasks):,} tasks', file=sys.stderr)
    print_metrics(verdicts, cfg.output)


def chat(model, tokenizer, template, cfg):
    """Answer the user's lines until an empty one, 'exit' or the end of the input."""
    if template not in TEMPLATES:
        raise ValueError(f'the chat template of the model is not known; {CHOOSE}')
    size = model.config.block_size
    limit = size - min(cfg.max_new_tokens, size // 4)  # This leaves room for the answer.
    system = []
    if cfg.start.strip():
        system = [('system', read_prompts(cfg.start)[0][0])]
    turns = []
    seed = cfg.seed
    while (message := read_line()) not in ('', 'exit'):
        try:
            turns, ids = fit_turns(tokenizer, system, [*turns, ('user', message)], template, limit)
        except ValueError as e:  # The message is too long, or has characters that the tokenizer lacks.
            print(f'note: {e}', file=sys.stderr)
            continue
        prompt = Prompt('', '', ids, (TEMPLATES[template].assistant[1],))
        answer, = print_in_order(write(model, tokenizer, [prompt], [seed], cfg), '\n')
        turns.append(('assistant', answer.text))
        seed += 1


def read_line():
    """Read a line of the user. Returns '' at the end of the input."""
    try:
        return input('> ').strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ''


def fit_turns(tokenizer, system, turns, template, limit):
    """
    Drop the oldest turns until the rest, after the system prompt, has at most `limit` ids. Returns
    (turns, all ids). Raises ValueError if the last message alone is too long.
    """
    for first in range(0, len(turns), 2):
        ids = turn_ids(tokenizer, [*system, *turns[first:]], template)
        if len(ids) <= limit:
            if first:
                print(f'note: the context is full; the oldest {first} turns are dropped', file=sys.stderr)
            return turns[first:], ids
    raise ValueError(f'the message takes {len(ids):,} tokens with its template; the context has room for '
                     f'{limit:,} and an answer')


def diagnose_model(cfg, device, dtype):
    """Diagnose a model on its validation data, or on random ids if that is not here."""
    weights, model = open_gpt(cfg)
    T, vocab_size = model.config.block_size, model.config.vocab_size
    try:
        batches = validation_batches(weights, T, cfg.data_dir)
    except ValueError as e:
        print(f'note: random ids and no loss by position, because {e}', file=sys.stderr)
        x = torch.randint(vocab_size, (max(DIAGNOSED // T, 1), min(T, DIAGNOSED)))
        batches = [(x, torch.full_like(x, -1))]
    model.to(device).eval().compute_dtype = dtype
    diagnose(model, weights, (with_positions(*batch, device=device) for batch in batches), cfg.output)


def with_positions(x, y, documents=None, *, device):
    """Return a batch of diagnose() on the device, from tensors of a Split."""
    position = torch.arange(x.size(1)).expand_as(x)
    if documents is not None:
        documents = documents.to(device)
        position = positions_in(documents)
    return x.to(device), y.to(device), position.to(device), documents


def validation_batches(weights, T, data_dir):
    """
    Spread windows over the validation data of a training. Returns batches of tensors, one window
    each. Raises ValueError if the data is not in data_dir.
    """
    settings = weights.checkpoint.get('config', {})
    if not settings.get('dataset'):
        raise ValueError(f'{weights.path} does not name its dataset')
    val = open_split(open_datasets(settings['dataset'], data_dir), 'val', T,
                     settings.get('document_mask', False), settings.get('pack_rows', False))
    trained_on = weights.checkpoint.get('data', {}).get('val')
    if trained_on not in (None, ' '.join(split.fingerprint() for split in val.splits)):
        raise ValueError(f'dataset={settings["dataset"]} in data_dir={data_dir} has changed since training')
    batches = []
    for split, starts in fixed_windows(val, max(DIAGNOSED // T, 2)):
        for start in starts:
            batches.append([torch.from_numpy(part) for part in split.gather([start])])
    return batches


def main(argv=None):
    (cfg,), given, _ = configure(SampleConfig, argv=argv, about=__doc__)
    for command, names in UNUSED.items():
        for name in names:
            if getattr(cfg, command) and given.get(name, '').startswith('--'):
                print(f'note: --{name} has no effect with --{command}', file=sys.stderr)
    if cfg.export:
        opened = open_model(cfg)
        dtype = torch.float32 if cfg.dtype == 'auto' else getattr(torch, cfg.dtype)
        export(opened.model, opened.tokenizer, opened.template, cfg.export, dtype,
               opened.weights.checkpoint.get('hf_config'))
        return 0
    device, _ = choose_device(cfg.device)  # before gigabytes are read or downloaded
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # Streams, events and CUDA graphs are made on the current device.
    dtype, _ = choose_dtype(cfg.dtype, device)
    choose_compile(cfg.compile, device)  # It fails early where torch.compile does not work.
    torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch ignores a container's CPU limit.
    if cfg.diagnose:
        diagnose_model(cfg, device, dtype)
        return 0
    weights, model, tokenizer, template = open_model(cfg)
    model = prepare_for_inference(model, device, dtype, cfg.quantize, pack=not cfg.compile)
    step = f', step {weights.checkpoint["iter_num"]}' if 'iter_num' in weights.checkpoint else ''
    spec = tokenizer.spec()
    print(f'weights: {weights.path}{step}; tokenizer: {spec.get("name", spec["kind"])}\n'
          f'device: {device}, {str(dtype).removeprefix("torch.")}', file=sys.stderr)
    if cfg.score:
        documents = read_documents(cfg.score, tokenizer, template, cfg)
        print_scores(score_documents(model, tokenizer, documents, cfg.batch_size), cfg.score, cfg.output)
    elif cfg.eval_code:
        eval_code(model, tokenizer, template, cfg)
    elif cfg.chat:
        chat(model, tokenizer, template, cfg)
    else:
        sample(model, tokenizer, template, cfg)
    return 0


if __name__ == '__main__':
    call_main(main)
