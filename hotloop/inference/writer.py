"""Write texts: encoded prompts, and their continuations as the tokens arrive, up to where they end."""

import codecs
import sys
from typing import NamedTuple

from hotloop.data.chat import TEMPLATES, parts_before_answer
from hotloop.data.encode import encode_parts, prompt_ids
from hotloop.inference.generate import Sampling, generate

# -----------------------------------------------------------------------------
# prompts

class Prompt(NamedTuple):
    given: object  # as the user gave it; a chat: its messages
    shown: str  # printed above its answer
    ids: list
    stops: list  # texts that end its answer


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


def fit_turns(model, tokenizer, system, turns, template, max_new_tokens):
    """
    Drop the oldest turns until the rest, after the system prompt, leaves room for the answer in the
    context. Returns (turns, all ids). Raises ValueError if the last message alone is too long.
    """
    size = model.config.block_size
    limit = size - min(max_new_tokens, size // 4)
    for first, (role, _) in enumerate(turns):
        if first and role != 'user':
            continue
        ids = turn_ids(tokenizer, system + turns[first:], template)
        if len(ids) <= limit:
            if first:
                print(f'note: the context is full; the oldest {first} turns are dropped', file=sys.stderr)
            return turns[first:], ids
    raise ValueError(f'the message takes {len(ids):,} tokens; the context has room for {limit:,}')


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


def sampling_of(cfg, tokenizer):
    """Return the Sampling of settings, with a temperature of 0 for eval_code and 0.9 for the rest."""
    temperature = cfg.temperature
    if temperature is None:
        temperature = 0.0 if cfg.eval_code else 0.9
    return Sampling(cfg.max_new_tokens, temperature, cfg.top_k, cfg.top_p, cfg.min_p,
                    cfg.repetition_penalty, tokenizer.n_vocab, cfg.output == 'logprobs')


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
