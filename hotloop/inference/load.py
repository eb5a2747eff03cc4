"""Open a model with its tokenizer and chat template, and write texts with it."""

import dataclasses
import os

import torch

from configurator import configure
from hotloop.data.chat import prompt_of
from hotloop.data.tokenizer import template_of_record, tokenizer_from
from hotloop.inference.quantize import prepare_for_inference
from hotloop.inference.texts import make_prompts, write
from hotloop.system.device import choose_compile, choose_device, choose_dtype
from hotloop.system.host import cores
from hotloop.weights.load import load_weights, tokenizer_of

# of sample.py, that a call of generate() may change
SETTINGS = ('template', 'max_new_tokens', 'temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty',
            'dry', 'stop', 'seed')


class Model:
    """Hold a GPT, in float32 on the CPU until prepare(), with its tokenizer and chat template or 'none'."""

    def __init__(self, cfg, GPT):
        """
        Open the model that a SampleConfig names. GPT: model.GPT, not imported here. Raises
        ValueError if a setting is wrong, or the weights are missing, damaged or not supported.
        """
        self.cfg = cfg
        self.device, _ = choose_device(cfg.device)  # before gigabytes are read or downloaded
        if self.device.type == 'cuda':
            torch.cuda.set_device(self.device)  # Streams, events and CUDA graphs use the current device.
        self.dtype, _ = choose_dtype(cfg.dtype, self.device)
        choose_compile(cfg.compile, self.device)  # It fails early where torch.compile does not work.
        torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch ignores a container's CPU limit.
        source = cfg.init_from
        if source == 'resume':
            source = os.path.abspath(cfg.out_dir)  # or it might be looked for on the hub
        self.weights = load_weights(source)
        self.gpt = GPT.from_checkpoint(self.weights.model_args, self.weights.weights)
        self.weights.weights.clear()  # The model has its own copy.
        self.tokenizer = tokenizer = tokenizer_from(tokenizer_of(self.weights, cfg.data_dir))
        size = self.gpt.config.vocab_size
        known = {name: i for name, i in tokenizer.specials.items() if i < size}
        tokenizer.n_vocab -= len(tokenizer.specials) - len(known)  # Gemma 3 has one for images.
        tokenizer.specials = known
        if tokenizer.n_vocab > size:
            raise ValueError(f'{self.weights.path}: the tokenizer has {tokenizer.n_vocab:,} ids, the model '
                             f'{size:,}')
        self.template = cfg.template
        if cfg.template == 'auto':
            self.template = template_of_record(self.weights.checkpoint) or 'none'

    def prepare(self, pack=True):
        """
        Move the GPT to the device, in the dtype and quantization of the settings. Returns self. pack: as in
        prepare_for_inference(); packed weights have no gradients.
        """
        pack = pack and not self.cfg.compile
        prepare_for_inference(self.gpt, self.device, self.dtype, self.cfg.quantize, pack)
        return self

    def generate(self, prompt, stream=False, **settings):
        """
        Continue a text or answer a chat, [{'role': 'user', 'content': text}]. settings: those of
        SETTINGS, as in sample.py. Returns the new text, or with stream an iterator of its pieces.
        """
        others = settings.keys() - set(SETTINGS)
        if others:
            raise ValueError(f'{", ".join(sorted(others))}: generate() returns one text and takes '
                             f'{", ".join(SETTINGS)}; load() takes the settings of the model')
        cfg = checked(dataclasses.replace(self.cfg, num_samples=1, **settings))
        if isinstance(prompt, list):
            prompt = {'messages': prompt}
        made, = make_prompts(self, [prompt_of(prompt, 'the prompt')], cfg)
        pieces = (piece for _, piece in write(self, [made._replace(shown='')], cfg) if piece)
        return pieces if stream else ''.join(pieces)


def checked(cfg):
    """Return settings that Python code gave, as a command reads them. Raises ValueError for wrong ones."""
    (cfg,), *_ = configure(type(cfg), argv=[], derived=dataclasses.asdict(cfg), origin='the call')
    return cfg
