"""Prompts in, texts out: encode prompts in a chat template, and continue them until they end."""

import codecs
import sys
from itertools import groupby
from typing import NamedTuple

from hotloop.data.chat import TEMPLATES, choose_template, parts_before_answer
from hotloop.data.encode import encode_parts, prompt_ids
from hotloop.inference.generate import GREEDY_BELOW, Sampling, generate

CHOOSE = f'choose one with --template: {", ".join(TEMPLATES)}'  # in errors about a missing template


# -----------------------------------------------------------------------------
# prompts

class Prompt(NamedTuple):
    given: object  # as the user gave it; a chat: its messages
    shown: str  # printed above its answer
    ids: list
    stops: list  # texts that end its answer
    is_answer: bool = False  # in a template


def make_prompts(opened, rows, cfg):
    """
    Encode rows of read_prompts() in the template of an opened Model; a plain text only if --template names
    one. Of a chat that is too long the oldest turns are dropped.
    """
    prompts = []
    tokenizer, template = opened.tokenizer, opened.template
    if cfg.template != 'auto':  # of one call of Model.generate()
        template = cfg.template
    for given, turns, suited in rows:
        text = given if isinstance(given, str) else turns[-1][1]
        if template in TEMPLATES and (suited or cfg.template != 'auto'):
            used = choose_template(template, suited)
            shown = text if used == 'joined' else f'{text}\n'
            try:
                _, ids = fit_turns(opened, turns, used, cfg.max_new_tokens)
            except ValueError:  # The last message alone is too long, as write() says.
                ids = turn_ids(tokenizer, turns, used)
            prompts.append(Prompt(given, shown, ids, split_stops(cfg.stop, used), is_answer=True))
        elif suited in (None, 'joined'):
            text = ''.join(part for part, *_ in parts_before_answer(turns, 'joined'))
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


def without_thoughts(role, text):
    """Return a turn; earlier thoughts leave, as in the templates of Qwen 3 and DeepSeek R1."""
    if role == 'assistant' and '</think>' in text:
        text = text.rpartition('</think>')[2].lstrip()
    return role, text


def fit_turns(opened, turns, template, max_new_tokens):
    """
    Drop thoughts, and the oldest turns after the system prompt, if there is one, until the rest leaves room
    for the answer in the context. Returns (turns, ids). Raises ValueError if the last message alone is too
    long.
    """
    turns = [without_thoughts(*turn) for turn in turns]
    size = opened.gpt.config.block_size
    limit = size - min(max_new_tokens, size // 4)
    system = [turn for turn in turns[:1] if turn[0] == 'system']
    turns = turns[len(system):]
    fitting = None
    for first in reversed(range(len(turns))):  # from the newest: a long history is not encoded
        if first and turns[first][0] != 'user':
            continue
        ids = turn_ids(opened.tokenizer, system + turns[first:], template)
        if len(ids) > limit:
            break
        fitting = first, ids
    if fitting:
        first, ids = fitting
        if first:
            print(f'note: the context is full; the oldest {first} turns are dropped', file=sys.stderr)
        return system + turns[first:], ids
    raise ValueError(f'the message takes {len(ids):,} tokens with its template; the context has room for '
                     f'{limit:,}; write less, or train with a --block_size above {size:,}')


# -----------------------------------------------------------------------------
# texts

class Text:
    """The continuation of a prompt as its tokens arrive. It ends before a stop text or a stop id."""

    def __init__(self, prompt, seed, tokenizer):
        self.prompt = prompt
        self.seed = seed
        self.tokenizer = tokenizer
        self.stop_ids = {tokenizer.eot, tokenizer.bos, *tokenizer.stops}  # bos begins another text
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


def sampling_of(cfg, tokenizer, is_answer):
    """Return the Sampling of settings. is_answer: in a template, where words may have to be repeated."""
    temperature = cfg.temperature
    dry = cfg.dry
    if temperature is None:
        temperature = 0.0 if cfg.eval_code else 0.8
    if dry is None:  # without it a third of a small model's samples loop: tests/bench/LOG.md
        is_exact = is_answer or cfg.eval_code or temperature < GREEDY_BELOW
        dry = 0.0 if is_exact else 0.2
    return Sampling(cfg.max_new_tokens, temperature, cfg.top_k, cfg.top_p, cfg.min_p, cfg.repetition_penalty,
                    dry, tokenizer.repeat_sizes, tokenizer.bos, tokenizer.n_vocab, cfg.output == 'logprobs')


def note_cut(length, size):
    """Say that the prompt of so many tokens is longer than the context."""
    if length > size:
        print(f'note: the prompt has {length:,} tokens; only the last {size:,} fit in the context',
              file=sys.stderr)


def write(opened, prompts, cfg):
    """
    Continue each Prompt num_samples times with an opened Model, batch_size at a time. Yields (Text, new
    characters), one Text after another, as soon as characters are certain. They begin with what the prompt
    shows, and the last of a Text come when it is finished.
    """
    tokenizer, size = opened.tokenizer, opened.gpt.config.block_size
    note_cut(max([len(prompt.ids) for prompt in prompts], default=0), size)
    # a file may have texts and chats, which are drawn differently
    for sampling, alike in groupby(prompts, lambda prompt: sampling_of(cfg, tokenizer, prompt.is_answer)):
        num_samples = cfg.num_samples or (1 if sampling.temperature < GREEDY_BELOW else 3)
        seeds = range(cfg.seed, cfg.seed + num_samples)
        texts = [Text(prompt, seed, tokenizer) for prompt in alike for seed in seeds]
        for first in range(0, len(texts), cfg.batch_size):
            batch = texts[first:first + cfg.batch_size]
            steps = write_batch(opened.gpt, batch, sampling, cfg.compile)
            for text in batch:
                printed = 0
                while True:
                    shown = text.prompt.shown + text.text
                    yield text, shown[printed:]
                    printed = len(shown)
                    if text.finish:
                        break
                    next(steps, None)


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
