"""
Text from a checkpoint, which carries its shape and its tokenizer, so that nothing else is needed.

    $ python sample.py --start="The history of"                    # from the best checkpoint in out/
    $ python sample.py --out_dir=out.1 --start=FILE:prompt.txt     # a prompt from a file
    $ python sample.py --init_from=gpt2 --temperature=0            # OpenAI's weights, greedy
"""

import codecs
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from configurator import call_main, configure
from model import choose_device, choose_dtype, load_checkpoint, load_gpt2, model_from
from prepare import TiktokenTokenizer, dataset_folder, encode_marked, fetch_gpt2, read_meta, tokenizer_from


@dataclass
class SampleConfig:
    # --- model
    init_from: str = 'resume'  # resume (from out_dir), the path of a checkpoint, or gpt2 (-medium, -large, -xl)
    out_dir: str = 'out'  # where training left best.pt and ckpt.pt; best.pt is preferred
    data_dir: str = 'data'  # where weights by name are kept, and where nanoGPT's checkpoints find their tokenizer
    # --- text
    start: str = '\n'  # the prompt, or FILE:path; <|endoftext|> and other names of special ids stand for them
    num_samples: int = 3  # texts to draw
    max_new_tokens: int = 500  # tokens of each
    temperature: float = 0.8  # below 1 plays safe, 0 takes the likeliest
    top_k: int | None = 200  # draw among the k likeliest only; None: all
    top_p: float | None = None  # draw among the likeliest that together have this probability; None: all
    seed: int = 1337  # of the draw; each sample has its own
    # --- machine
    device: str = 'auto'  # cuda, cuda:1, mps, cpu; auto: the first of them that is there
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: bfloat16 on GPUs that compute in it

    def problems(self):
        wrong = []
        for name, least in (('num_samples', 1), ('max_new_tokens', 0), ('temperature', 0), ('top_k', 1), ('seed', 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                wrong.append(f'{name}={getattr(self, name)} must be at least {least}')
        if self.seed >= 2**63:
            wrong.append(f'seed={self.seed} must be below 2**63')
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong.append(f'top_p={self.top_p} must be above 0 and at most 1')
        return wrong


def find_checkpoint(cfg):
    """The file that init_from and out_dir mean; best.pt before ckpt.pt."""
    folder = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
    if os.path.isfile(folder):
        return folder
    for name in ('best.pt', 'ckpt.pt'):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    if cfg.init_from != 'resume':
        raise ValueError(f'init_from={folder!r} is no file, no folder with a checkpoint, and no gpt2 model')
    raise ValueError(f'there is no checkpoint in {folder!r}; train one with: python train.py --out_dir={folder}')


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
    """(model, tokenizer) as the settings ask, on the CPU."""
    if cfg.init_from.startswith('gpt2') and not os.path.exists(cfg.init_from):
        print(f'weights: {cfg.init_from}, OpenAI', file=sys.stderr)
        return load_gpt2(fetch_gpt2(cfg.init_from, cfg.data_dir)), TiktokenTokenizer('gpt2')
    path = find_checkpoint(cfg)
    checkpoint = load_checkpoint(path)
    model = model_from(checkpoint['model_args'], checkpoint['model'])
    tokenizer, source = tokenizer_for(checkpoint, model.config.vocab_size, cfg.data_dir)
    print(f'weights: {path}, step {checkpoint.get("iter_num", "unknown")}; tokenizer: {source}', file=sys.stderr)
    return model, tokenizer


def stream(model, tokenizer, prompt, cfg, seed):
    """
    Yields the text that continues the prompt, piece by piece. A character whose bytes are spread over several tokens
    comes when it is complete; bytes that never become a character come as the replacement sign.
    """
    if not prompt:
        prompt = [tokenizer.eot if tokenizer.eot is not None else 0]  # nothing before it: the start of a document
    idx = torch.tensor([prompt], device=model.cos.device)
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    for token in model.generate(idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, stop=tokenizer.eot,
                                vocab=tokenizer.n_vocab, seed=seed):
        yield decoder.decode(tokenizer.decode(token.tolist()))
    yield decoder.decode(b'', final=True)


def main(argv=None):
    cfg, *_ = configure(SampleConfig, argv=argv, about=__doc__)
    model, tokenizer = load(cfg)
    start = cfg.start
    if start.startswith('FILE:'):
        try:
            with open(start[5:], encoding='utf-8', newline='') as f:
                start = f.read()
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f'the prompt file {start[5:]} cannot be read: {e}') from None
    prompt = encode_marked(tokenizer, start)
    device, _ = choose_device(cfg.device)
    dtype, _ = choose_dtype(cfg.dtype, device)
    model.for_inference(device, dtype)
    for i in range(cfg.num_samples):
        print(start, end='', flush=True)
        for text in stream(model, tokenizer, prompt, cfg, cfg.seed + i):
            print(text, end='', flush=True)
        print('\n---------------', flush=True)
    return 0


if __name__ == '__main__':
    call_main(main)
