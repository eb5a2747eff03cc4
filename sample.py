"""
Generate text from a checkpoint, which holds the model's shape and its tokenizer. A run with adapters
also needs its base, and a checkpoint of nanoGPT its dataset.

    $ python sample.py --start="The history of"                    # from the best checkpoint in out/
    $ python sample.py --out_dir=out.1 --start=FILE:prompt.txt     # a prompt from a file
    $ python sample.py --init_from=gpt2 --temperature=0            # OpenAI's weights, greedy
    $ python sample.py --start=FILE:prompts.jsonl --output=jsonl   # many prompts or chats in one batch
    $ python sample.py --chat --start='Be brief.'                  # chat, with a system prompt
    $ python sample.py --serve                                     # OpenAI's API and a page, on port 8000
    $ python sample.py --score=book.txt                            # loss and bits per byte
    $ python sample.py --eval_code=HumanEval.jsonl.gz --run_code   # syntax, BLEU and pass@1 of its code
    $ python sample.py --diagnose                                  # NaN, activations, loss by position
    $ python sample.py --export=folder                             # write it for transformers
    $ python sample.py --export=model.gguf --quantize=int8         # write it for llama.cpp
"""

from hotloop.system import host

if __name__ == '__main__':
    host.end_spins_early(10_000)  # before the import of torch; with 1,000 a token takes 1.4 times as long

import contextlib
import math
import os
import sys
from dataclasses import dataclass, replace
from typing import Literal

import torch

from configurator import call_main, configure
from hotloop.data.chat import CHATS, TEMPLATES, prompt_of
from hotloop.data.dataset import open_datasets
from hotloop.data.documents import open_text, rows_in
from hotloop.data.sources import open_file
from hotloop.inference.code_eval import judge, print_metrics, read_tasks
from hotloop.inference.diagnose import diagnose
from hotloop.inference.load import Model
from hotloop.inference.score import print_json, print_scores, read_documents, score_documents
from hotloop.inference.serve import serve
from hotloop.inference.texts import CHOOSE, Prompt, fit_turns, make_prompts, split_stops, write
from hotloop.mixers.feedback import feedback_matrices
from hotloop.training.dataloader import open_split
from hotloop.training.evaluate import fixed_windows
from hotloop.training.memory import out_of_memory
from hotloop.weights.export import export
from hotloop.weights.gguf import export_gguf
from model import GPT, positions_in

RANGES = {'num_samples': (1, math.inf), 'max_new_tokens': (0, math.inf), 'temperature': (0, math.inf),
          'top_k': (1, math.inf), 'top_p': (0, 1), 'min_p': (0, 1),
          'repetition_penalty': (0.01, 100), 'dry': (0, 100), 'seed': (0, 2**62), 'batch_size': (1, math.inf),
          'serve': (0, 65535)}  # 0: False
# {setting: the commands that it does nothing for}
NO_EFFECT = {'compile': ('serve', 'score', 'diagnose', 'export'), 'output': ('chat', 'serve', 'export'),
             'quantize': ('diagnose',)}
DIAGNOSED = 2**14  # tokens of validation data that --diagnose reads


@dataclass(frozen=True)
class SampleConfig:
    # --- model
    init_from: str = 'resume'  # resume (from out_dir), a run, a folder of weights or adapters, or a hub model
    out_dir: str = 'out'  # where training left best.pt and ckpt.pt; best.pt is preferred
    data_dir: str = 'data'  # datasets, which have the tokenizers of nanoGPT's checkpoints
    quantize: Literal['none', 'int8'] = 'none'  # int8: 8-bit weights, except embeddings; saves memory
    # --- what to do
    start: str = '\n'  # the prompt, FILE:path (of rows: one each), or - for standard input
    chat: bool = False  # interactive chat; start is its system prompt; `exit` or Ctrl-D ends it
    serve: bool | int = False  # a page and OpenAI's HTTP API for this machine; True: port 8000
    template: Literal[('auto', 'none', *TEMPLATES)] = 'auto'  # chat template; auto: of the training data
    score: str | None = None  # print the loss on each document of this file or folder
    eval_code: str | None = None  # answer the tasks of this .jsonl or list: HumanEval, MBPP, rows
    run_code: bool = False  # for eval_code: also run the tests, in a process with limits (pass@1)
    diagnose: bool = False  # examine training, weights, activations and loss by position
    export: str | None = None  # write a folder for transformers or a .gguf file, in float32 or --dtype
    # --- text
    num_samples: int | None = None  # samples per prompt; None: 3, or 1 if temperature=0
    max_new_tokens: int = 500  # maximum number of new tokens per sample, and of a request to --serve
    temperature: float | None = None  # 0 always picks the most likely token; None: 0.8, 0 for eval_code
    top_k: int | None = 200  # sample from the k most likely tokens; None: all
    top_p: float | None = None  # sample from the most likely tokens with this total probability; None: all
    min_p: float | None = None  # drop tokens below this fraction of the highest probability; None: off
    repetition_penalty: float = 1.0  # above 1: fewer tokens that occurred before (arXiv 1909.05858)
    dry: float | None = None  # penalty on repeats (DRY); None: 0.2, but 0 for chats, code and greedy texts
    stop: str | None = None  # text or special token that ends a sample; several: a|||b; \n, \t
    seed: int = 1337  # of the first sample; each sample depends only on its seed and prompt
    # --- output
    output: Literal['text', 'jsonl', 'logprobs'] = 'text'  # jsonl: an object a line; logprobs: also tokens
    # --- machine
    batch_size: int = 64  # samples generated at once
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first available
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: bfloat16 on newer GPUs
    compile: bool = False  # torch.compile: faster after 20 to 50 s (GPT-2 on a CPU)

    def problems(self):
        """List the problems with the settings, one sentence each."""
        problems = []
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                problems.append(f'{name}={value} must be from {least} to {most}')
        commands = [name for name in COMMANDS if getattr(self, name)]
        problems += [f"{name}='' names no file" for name in COMMANDS if getattr(self, name) == '']
        if len(commands) > 1:
            problems.append(f'{commands[0]} and {commands[1]} are two commands; give one of them')
        for name, without in NO_EFFECT.items():
            value = getattr(self, name)
            for command in without:
                if value != getattr(SampleConfig, name) and getattr(self, command):
                    problems.append(f'{name}={value} has no effect with {command}; omit it')
        if self.run_code and not self.eval_code:
            problems.append('run_code=True needs eval_code, the file with the tasks')
        if self.export and self.quantize != 'none' and not self.export.endswith('.gguf'):
            problems.append(f'quantize={self.quantize} needs an export that ends in .gguf, not {self.export}')
        return problems


# -----------------------------------------------------------------------------
# prompts

def read_prompts(start):
    """
    Read the prompts that `start` stands for: itself, standard input, a file, or each row of a
    file of rows. Returns [(prompt as given, [(role, text)], template that suits a row or None)].
    """
    if start == '-':
        try:
            start = sys.stdin.buffer.read().decode('utf-8-sig')
        except UnicodeDecodeError as e:
            raise ValueError(f'the input is not UTF-8: {e}') from None
    elif start.startswith('FILE:'):
        path = os.path.expanduser(start.removeprefix('FILE:'))
        if os.path.isfile(path):  # a pipe can be read only once
            file = open_file(path, path)
            if file.kind in ('json', 'jsonl', 'csv', 'parquet'):
                return [prompt_of(row, where) for where, row in rows_in(file)]
        with open_text(path) as f:
            start = f.read()
    return [prompt_of(start, '')]


# -----------------------------------------------------------------------------
# commands

def sample(opened, cfg):
    """Print samples of each prompt, in order."""
    rows = read_prompts(cfg.start)
    if not rows:
        raise ValueError(f'start={cfg.start!r} holds no prompt')
    chars = getattr(opened.tokenizer, 'chars', '\n')
    if cfg.start == '\n' and '\n' not in chars:  # trained on rows of one line
        rows = [prompt_of('', '')]
    if opened.template in CHATS and cfg.template == 'auto' and rows[0][2] is None:
        print(f'note: this model has a chat template: give --chat, or --template={opened.template} for one '
              'question', file=sys.stderr)
    for text, piece in write(opened, make_prompts(opened, rows, cfg), cfg):
        if cfg.output == 'text':
            print(piece, end='\n---------------\n' if text.finish else '', flush=True)
        elif text.finish:
            row = {'prompt': text.prompt.given, 'seed': text.seed, 'text': text.text, 'finish': text.finish}
            if cfg.output == 'logprobs':
                row |= {'tokens': text.tokens, 'logprobs': text.logprobs}
            print_json(row)


def score(opened, cfg):
    """Print the loss on each document of a file or folder."""
    documents = read_documents(cfg.score, opened.tokenizer, opened.template, cfg.data_dir)
    scores = score_documents(opened.gpt, opened.tokenizer, documents, cfg.batch_size)
    print_scores(scores, cfg.score, cfg.output)


def eval_code(opened, cfg):
    """Judge the answers to the tasks of a file. Prints the metrics, with output=jsonl also the answers."""
    is_chat = opened.template in CHATS
    tasks = read_tasks(cfg.eval_code, is_chat)
    if cfg.run_code and not any(task.tests for task in tasks):
        raise ValueError(f'run_code=True needs tests, and {cfg.eval_code} has none')
    prompts = make_prompts(opened, [(task, task.turns, task.template) for task in tasks], cfg)
    for prompt in prompts:
        if not is_chat:
            prompt.stops.extend(prompt.given.stops)
    verdicts = []
    for text, _ in write(opened, prompts, cfg):
        if not text.finish:
            continue
        verdict = judge(text.prompt.given, text.seed, text.text, cfg.run_code)
        verdicts.append(verdict)
        if cfg.output != 'text':
            print_json({**verdict._asdict(), 'task': verdict.task.name})
    print_metrics(verdicts, cfg.output)


def chat(opened, cfg):
    """Answer the user's lines until 'exit' or the end of the input."""
    template = opened.template
    if template not in TEMPLATES:
        raise ValueError(f'the chat template of the model is not known; {CHOOSE}')
    turns = []
    if cfg.start.strip():
        prompts = read_prompts(cfg.start)
        if not prompts:
            raise ValueError(f'start={cfg.start!r} holds no system prompt')
        turns = [('system', prompts[0][1][-1][1].strip())]
        fit_turns(opened, [*turns, ('user', '')], template, cfg.max_new_tokens)  # or none would fit
    cfg = replace(cfg, num_samples=1)
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # edits lines
        readline.parse_and_bind('set enable-bracketed-paste on')  # several pasted lines are one message
    for message in read_lines():
        try:
            turns, ids = fit_turns(opened, [*turns, ('user', message)], template, cfg.max_new_tokens)
        except ValueError as e:  # The message is too long, or has characters that the tokenizer lacks.
            print(f'note: {e}', file=sys.stderr)
            continue
        prompt = Prompt('', '', ids, split_stops(cfg.stop, template), is_answer=True)
        for text, piece in write(opened, [prompt], cfg):
            print(piece, end='\n' if text.finish else '', flush=True)
        turns.append(('assistant', text.text))
        cfg = replace(cfg, seed=cfg.seed + 1)


def read_lines():
    """Yield the lines of the user until 'exit' or the end of the input, without empty ones."""
    try:
        while (line := input('> ').strip()) != 'exit':
            if line:
                yield line
    except UnicodeDecodeError as e:
        raise ValueError(f'the input is not UTF-8: {e}') from None
    except EOFError:
        print()


def examine(opened, cfg):
    """Diagnose the model, with weights in float32."""
    opened.gpt.to(opened.device).eval().compute_dtype = opened.dtype
    settings = opened.weights.checkpoint.get('config', {})
    matrices = None
    if settings.get('feedback') == 'dfa':
        matrices = feedback_matrices(opened.gpt.config, settings['seed']).to(opened.device)
    diagnose(opened.gpt, validation_batches(opened, settings, cfg.data_dir), cfg.output, matrices)


def validation_batches(opened, settings, data_dir):
    """
    Yield batches for diagnose(): windows spread over the validation data of the training, which had these
    settings, or, if that is not here, random ids without targets.
    """
    weights, config = opened.weights, opened.gpt.config
    T = min(config.block_size, settings.get('block_size', math.inf))  # a base may have a longer one
    try:
        if not settings.get('dataset'):
            raise ValueError(f'{weights.path} does not name its dataset')
        with contextlib.redirect_stdout(sys.stderr):  # of what is printed about packing
            val = open_split(open_datasets(settings['dataset'], data_dir), 'val', T,
                             settings.get('pack_rows', False))
        trained_on = weights.checkpoint.get('data', {}).get('val')
        if trained_on not in (None, ' '.join(split.fingerprint() for split in val.splits)):
            raise ValueError(f'dataset={settings["dataset"]} in data_dir={data_dir} has changed')
    except ValueError as e:
        print(f'note: random ids and no loss by position, because {e}', file=sys.stderr)
        x = torch.randint(config.vocab_size, (max(DIAGNOSED // T, 1), min(T, DIAGNOSED)))
        yield x, torch.full_like(x, -1), torch.zeros_like(x)
        return
    for split, starts in fixed_windows(val, max(DIAGNOSED // T, 2)):
        for start in starts:
            x, y, *documents = [torch.from_numpy(part) for part in split.gather([start])]
            yield x, y, positions_in(documents[0] if documents else torch.zeros_like(x)), *documents


def write_export(opened, cfg):
    """Write the model for other programs."""
    model, tokenizer, template = opened.gpt, opened.tokenizer, opened.template
    if cfg.template == 'auto' and opened.weights.checkpoint.get('is_their_template'):
        template = 'none'  # of ours: the folder's own is kept
    dtype = torch.float32 if cfg.dtype == 'auto' else opened.dtype
    try:
        if cfg.export.endswith('.gguf'):
            export_gguf(model, tokenizer, template, cfg.export, dtype, cfg.quantize == 'int8')
        else:
            export(model, tokenizer, template, cfg.export, dtype, opened.weights.checkpoint.get('hf_config'))
    except OSError as e:
        raise ValueError(f'export={cfg.export} could not be written: {e.strerror or e}') from None


COMMANDS = {'score': score, 'eval_code': eval_code, 'chat': chat, 'serve': serve, 'diagnose': examine,
            'export': write_export}  # {setting: what it does instead of sample()}


def main(argv=None):
    (cfg,), *_ = configure(SampleConfig, argv=argv, about=__doc__)
    opened = Model(cfg, GPT)
    checkpoint, spec = opened.weights.checkpoint, opened.tokenizer.spec()
    step = f', step {checkpoint["iter_num"]}' if 'iter_num' in checkpoint else ''
    print(f'weights: {opened.weights.path}{step}; tokenizer: {spec.get("name", spec["kind"])}\n'
          f'device: {opened.device}, {str(opened.dtype).removeprefix("torch.")}', file=sys.stderr)
    command = next((COMMANDS[name] for name in COMMANDS if getattr(cfg, name)), sample)
    try:
        if not (cfg.export or cfg.diagnose):  # which take the weights as they are
            opened.prepare()
        command(opened, cfg)
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        raise ValueError(f'the model and its texts do not fit in the memory of {opened.device}; lower '
                         '--num_samples, --batch_size or --max_new_tokens, or use --quantize=int8') from None
    return 0


if __name__ == '__main__':
    call_main(main)
