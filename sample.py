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
    $ python sample.py --diagnose                                  # NaN, activations, loss by position
    $ python sample.py --export=folder                             # write it for transformers
"""

import codecs
import math
import re
import sys
from dataclasses import dataclass, replace
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
UNUSED = {'score': TEXT, 'eval_code': ('start',), 'chat': ('num_samples', 'output', 'batch_size'),
          'diagnose': (*TEXT, 'template', 'batch_size', 'quantize'),
          'export': (*TEXT, 'output', 'batch_size', 'device', 'compile', 'quantize')}
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
        commands = [name for name in UNUSED if getattr(self, name)]
        if len(commands) > 1:
            problems.append(f'{commands[0]} and {commands[1]} are two commands; give one of them')
        if self.run_code and not self.eval_code:
            problems.append('run_code=True needs eval_code, the file with the tasks')
        return problems


def open_model(cfg):
    """
    Open a float32 model on the CPU. Returns (Weights, which were freed, model, tokenizer, chat
    template): the template that the settings name, or that of the training data, or 'none'.
    """
    weights = load_weights(cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from)
    model = GPT.from_checkpoint(weights.model_args, weights.weights)
    weights.weights.clear()  # The model has its own copy.
    tokenizer = tokenizer_from(tokenizer_of(weights, cfg.data_dir))
    size = model.config.vocab_size
    known = {name: i for name, i in tokenizer.specials.items() if i < size}
    tokenizer.n_vocab -= len(tokenizer.specials) - len(known)  # Gemma 3 has one for images.
    tokenizer.specials = known
    if tokenizer.n_vocab > size:
        raise ValueError(f'{weights.path}: the tokenizer has {tokenizer.n_vocab:,} ids, the model {size:,}')
    template = cfg.template
    if template == 'auto':
        template = template_of_record(weights.checkpoint) or 'none'
    return weights, model, tokenizer, template


# -----------------------------------------------------------------------------
# prompts

class Prompt(NamedTuple):
    given: object  # as the user gave it; a chat: its messages
    shown: str  # printed above its answer
    ids: list
    stops: list  # texts that end its answer


def read_prompts(start):
    """
    Read the prompts that `start` stands for: itself, standard input, a file, or each line of a
    .jsonl file. Returns [(prompt as given, [(role, text)], template that suits a row or None)].
    """
    if start == '-':
        start = sys.stdin.buffer.read().decode()
    elif start.startswith('FILE:'):
        path = start.removeprefix('FILE:')
        with open_text(path) as f:
            if re.search(r'\.(jsonl|ndjson)(\.\w+)?$', path.lower()):  # compressed or not
                return [prompt_of(row, where) for where, row in json_lines(f, path)]
            start = f.read()
    return [prompt_of(start, '')]


def make_prompts(rows, tokenizer, template, cfg):
    """Encode rows of read_prompts() in the template; texts only if the settings name it."""
    prompts = []
    for given, turns, suited in rows:
        text = given if isinstance(given, str) else turns[-1][1]
        if template in TEMPLATES and (suited or cfg.template != 'auto'):
            used = choose_template(template, suited)
            shown = text if used == 'joined' else f'{text}\n'
            ids = turn_ids(tokenizer, turns, used)
            prompts.append(Prompt(given, shown, ids, split_stops(cfg.stop, used)))
        elif suited in (None, 'joined'):
            prompts.append(Prompt(given, text, prompt_ids(tokenizer, text), split_stops(cfg.stop)))
        else:
            raise ValueError(f'a chat or an instruction needs a template; {CHOOSE}')
    return prompts


def split_stops(stop, template='plain'):
    """List the texts that end an answer: those of the setting `stop`, and the template's."""
    texts = (stop or '').replace('\\n', '\n').replace('\\t', '\t').split('|||')
    return [text for text in [*texts, TEMPLATES[template].assistant[1]] if text]


def turn_ids(tokenizer, turns, template):
    """Encode a conversation up to the assistant's next answer, as in training; never empty."""
    parts = parts_before_answer(turns, template)
    if not parts:
        return prompt_ids(tokenizer, '')
    ids = encode_parts(tokenizer, parts)[0].tolist()
    return ids if tokenizer.bos is None else [tokenizer.bos, *ids]


# -----------------------------------------------------------------------------
# texts

class Text:
    """The continuation of a prompt as its tokens arrive. It ends before a stop text or a stop id."""

    def __init__(self, prompt, seed, tokenizer):
        self.prompt = prompt
        self.seed = seed
        self.tokenizer = tokenizer
        self.stop_ids = {tokenizer.eot, *tokenizer.stops}
        self.stop_ids |= {tokenizer.specials.get(stop) for stop in prompt.stops}
        self.bytes = b''
        self.text = ''  # of the bytes, what is certain
        self.tokens = []
        self.logprobs = []
        self.finish = None  # 'stop' or 'length'

    def add(self, token, logprob):
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.end('stop')
            return
        self.bytes += self.tokenizer.decode([token])
        self.text, stopped = certain_text(self.bytes, self.prompt.stops)
        if stopped:
            self.finish = 'stop'

    def end(self, reason):
        """Finish the text with all bytes. An incomplete character becomes the replacement character."""
        self.finish = reason
        self.text = self.bytes.decode('utf-8', 'replace')


def certain_text(data, stops):
    """
    Decode UTF-8 up to the first stop text, without an incomplete character or the beginning of a
    possible stop text at its end. Returns (text, whether a stop text was found).
    """
    text, _ = codecs.utf_8_decode(data, 'replace')
    found = [text.index(stop) for stop in stops if stop in text]
    if found:
        return text[:min(found)], True
    held_back = 0
    for stop in stops:
        for length in range(len(stop)):
            if text.endswith(stop[:length]):
                held_back = max(held_back, length)
    return text[:len(text) - held_back], False


def write(model, tokenizer, prompts, cfg):
    """
    Continue each Prompt num_samples times, batch_size at a time. Yields (Text, new characters), one
    Text after another, as soon as characters are certain. They begin with what the prompt shows,
    and the last of a Text come when it is finished.
    """
    temperature = cfg.temperature
    if temperature is None:
        temperature = 0.0 if cfg.eval_code else 0.9
    num_samples = cfg.num_samples
    if num_samples is None:
        num_samples = 1 if temperature < GREEDY_BELOW else 3
    sampling = Sampling(cfg.max_new_tokens, temperature, cfg.top_k, cfg.top_p, cfg.min_p,
                        cfg.repetition_penalty, tokenizer.n_vocab, cfg.output == 'logprobs')
    size = model.config.block_size
    longest = max([len(prompt.ids) for prompt in prompts], default=0)
    if longest > size:
        print(f'note: the prompt has {longest:,} tokens; only the last {size:,} fit in the context',
              file=sys.stderr)
    seeds = range(cfg.seed, cfg.seed + num_samples)
    texts = [Text(prompt, seed, tokenizer) for prompt in prompts for seed in seeds]
    for first in range(0, len(texts), cfg.batch_size):
        batch = texts[first:first + cfg.batch_size]
        current = 0  # the Text that is shown
        printed = 0  # characters of it
        for _ in write_batch(model, batch, sampling, cfg.compile):
            while current < len(batch):
                text = batch[current]
                shown = text.prompt.shown + text.text
                yield text, shown[printed:]
                printed = len(shown)
                if not text.finish:
                    break
                current += 1
                printed = 0


def write_batch(model, texts, sampling, compiled):
    """Continue Texts in one batch until all are finished. Yields before and after each step."""
    stopped = set()
    yield
    for step in generate(model, [text.prompt.ids for text in texts], sampling,
                         [text.seed for text in texts], stopped, compiled):
        for index, token, logprob in step:
            texts[index].add(token, logprob)
            if texts[index].finish:
                stopped.add(index)
        yield
    for text in texts:
        if not text.finish:
            text.end('length')
    yield


# -----------------------------------------------------------------------------
# commands

def sample(model, tokenizer, template, cfg):
    """Print samples of each prompt, in order."""
    rows = read_prompts(cfg.start)
    if template in CHATS and cfg.template == 'auto' and rows and isinstance(rows[0][0], str):
        print(f'note: this model was tuned for chat; give --chat, or --template={template} for one question',
              file=sys.stderr)
    for text, piece in write(model, tokenizer, make_prompts(rows, tokenizer, template, cfg), cfg):
        if cfg.output == 'text':
            print(piece, end='\n---------------\n' if text.finish else '', flush=True)
        elif text.finish:
            row = {'prompt': text.prompt.given, 'seed': text.seed, 'text': text.text, 'finish': text.finish}
            if cfg.output == 'logprobs':
                row |= {'tokens': text.tokens, 'logprobs': text.logprobs}
            print_json(row)


def eval_code(model, tokenizer, template, cfg):
    """Judge the answers to the tasks of a file. Prints the metrics, with output=jsonl also the answers."""
    tasks = read_tasks(cfg.eval_code, template in CHATS)
    if cfg.run_code and not any(task.tests for task in tasks):
        raise ValueError(f'run_code=True needs tests, and {cfg.eval_code} has none')
    rows = [(task, task.turns, task.template) for task in tasks]
    prompts = make_prompts(rows, tokenizer, template, cfg)
    for prompt in prompts:
        if template not in CHATS:
            prompt.stops.extend(prompt.given.stops)
    verdicts = []
    for text, _ in write(model, tokenizer, prompts, cfg):
        if not text.finish:
            continue
        verdict = judge(text.prompt.given, text.seed, text.text, cfg.run_code)
        verdicts.append(verdict)
        if cfg.output != 'text':
            print_json({**verdict._asdict(), 'task': verdict.task.name})
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
    cfg = replace(cfg, num_samples=1)
    while (message := read_line()) not in ('', 'exit'):
        try:
            turns, ids = fit_turns(tokenizer, system, [*turns, ('user', message)], template, limit)
        except ValueError as e:  # The message is too long, or has characters that the tokenizer lacks.
            print(f'note: {e}', file=sys.stderr)
            continue
        prompt = Prompt('', '', ids, split_stops(cfg.stop, template))
        for text, piece in write(model, tokenizer, [prompt], cfg):
            print(piece, end='\n' if text.finish else '', flush=True)
        turns.append(('assistant', text.text))
        cfg = replace(cfg, seed=cfg.seed + 1)


def read_line():
    """Read a line of the user. Returns '' at the end of the input."""
    try:
        return input('> ').strip()
    except EOFError:
        print()
        return ''


def fit_turns(tokenizer, system, turns, template, limit):
    """
    Drop the oldest turns until the rest, after the system prompt, has at most `limit` ids. Returns
    (turns, all ids). Raises ValueError if the last message alone is too long.
    """
    for first in range(0, len(turns), 2):
        ids = turn_ids(tokenizer, system + turns[first:], template)
        if len(ids) <= limit:
            if first:
                print(f'note: the context is full; the oldest {first} turns are dropped', file=sys.stderr)
            return turns[first:], ids
    raise ValueError(f'the message takes {len(ids):,} tokens; the context has room for {limit:,}')


def validation_batches(weights, model, data_dir):
    """
    Yield batches for diagnose(): windows spread over the validation data of the training or, if that
    is not here, random ids without targets.
    """
    T = model.config.block_size
    settings = weights.checkpoint.get('config', {})
    try:
        if not settings.get('dataset'):
            raise ValueError(f'{weights.path} does not name its dataset')
        val = open_split(open_datasets(settings['dataset'], data_dir), 'val', T,
                         settings.get('document_mask', False), settings.get('pack_rows', False))
        trained_on = weights.checkpoint.get('data', {}).get('val')
        if trained_on not in (None, ' '.join(split.fingerprint() for split in val.splits)):
            raise ValueError(f'dataset={settings["dataset"]} in data_dir={data_dir} has changed')
    except ValueError as e:
        print(f'note: random ids and no loss by position, because {e}', file=sys.stderr)
        x = torch.randint(model.config.vocab_size, (max(DIAGNOSED // T, 1), min(T, DIAGNOSED)))
        yield x, torch.full_like(x, -1), torch.zeros_like(x)
        return
    for split, starts in fixed_windows(val, max(DIAGNOSED // T, 2)):
        for start in starts:
            x, y, *documents = [torch.from_numpy(part) for part in split.gather([start])]
            yield x, y, positions_in(documents[0] if documents else torch.zeros_like(x)), *documents


def main(argv=None):
    (cfg,), given, _ = configure(SampleConfig, argv=argv, about=__doc__)
    for command, names in UNUSED.items():
        for name in names:
            if getattr(cfg, command) and given.get(name, '').startswith('--'):
                print(f'note: --{name} has no effect with --{command}', file=sys.stderr)
    device, _ = choose_device(cfg.device)  # before gigabytes are read or downloaded
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # Streams, events and CUDA graphs are made on the current device.
    dtype, _ = choose_dtype(cfg.dtype, device)
    if cfg.quantize == 'int8' and device.type == 'cuda' and (cfg.num_samples > 1 or not cfg.compile):
        print('note: on a GPU int8 saves memory, but only one sample at a time with --compile=True reads '
              'fewer bytes than bfloat16', file=sys.stderr)
    choose_compile(cfg.compile, device)  # It fails early where torch.compile does not work.
    torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch ignores a container's CPU limit.
    weights, model, tokenizer, template = open_model(cfg)
    if cfg.export:
        export(model, tokenizer, template, cfg.export, torch.float32 if cfg.dtype == 'auto' else dtype,
               weights.checkpoint.get('hf_config'))
        return 0
    step = f', step {weights.checkpoint["iter_num"]}' if 'iter_num' in weights.checkpoint else ''
    spec = tokenizer.spec()
    print(f'weights: {weights.path}{step}; tokenizer: {spec.get("name", spec["kind"])}\n'
          f'device: {device}, {str(dtype).removeprefix("torch.")}', file=sys.stderr)
    if cfg.diagnose:
        model.to(device).eval().compute_dtype = dtype
        diagnose(model, validation_batches(weights, model, cfg.data_dir), cfg.output)
        return 0
    prepare_for_inference(model, device, dtype, cfg.quantize, pack=not cfg.compile)
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
