"""Weights to start from: a run, a checkpoint, a Hugging Face folder, GPT-2 from the hub (safetensors)."""

import json
import mmap
import os
import struct
import sys
from typing import NamedTuple

import torch

from hotloop.checkpoint import load_checkpoint
from hotloop.download import download, hub
from hotloop.files import read_json
from hotloop.lora import adapters_of, frozen_weights, hash_weights, merge
from hotloop.run_dir import RunDir
from hotloop.tokenizer import GPT2_SPEC, GPT2_VOCAB_SIZES, read_tokenizer_json

GPT2_SHAPES = {name: dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=1024, vocab_size=50257,
                          bias=True, mlp='gelu_tanh')
               for name, n_layer, n_head, n_embd in (('gpt2', 12, 12, 768), ('gpt2-medium', 24, 16, 1024),
                                                     ('gpt2-large', 36, 20, 1280), ('gpt2-xl', 48, 25, 1600))}
GPT2_NAMES = tuple(GPT2_SHAPES)
MLP_OF = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}
CONV1D = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')
DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
          'I64': torch.int64, 'I32': torch.int32, 'I16': torch.int16, 'I8': torch.int8,
          'U8': torch.uint8, 'BOOL': torch.bool}  # as safetensors names them


class Weights(NamedTuple):
    path: str  # the file or folder they were read from
    model_args: dict  # for GPT.from_checkpoint
    weights: dict  # {name: tensor}
    tokenizer: dict | None  # its spec; None if the source has none
    checkpoint: dict  # everything else in the checkpoint; {} for Hugging Face weights


def open_weights(source, data_dir):
    """
    The Weights of `source`: a Hugging Face folder, a run folder, a checkpoint file; or gpt2 (-medium, -large,
    -xl), downloaded once to data_dir/pretrained. ValueError if nothing is there or nothing is intact.
    """
    folder = source
    if source in GPT2_NAMES and not os.path.exists(source):
        folder = os.path.join(data_dir, 'pretrained', source)
        for name in ('config.json', 'model.safetensors'):
            download(f'{hub()}/openai-community/{source}/resolve/main/{name}', os.path.join(folder, name))
    if not os.path.exists(os.path.join(folder, 'config.json')):
        path, checkpoint = open_checkpoint(source)
        if 'lora' in checkpoint:
            checkpoint['model'] = merge_base(checkpoint, path, data_dir)
        model_args, weights = checkpoint.pop('model_args'), checkpoint.pop('model')
        return Weights(path, model_args, weights, checkpoint.get('tokenizer'), checkpoint)
    model_args, weights = load_gpt2(folder)
    tokenizer = GPT2_SPEC if model_args['vocab_size'] in GPT2_VOCAB_SIZES else None
    if os.path.exists(os.path.join(folder, 'tokenizer.json')):
        tokenizer = read_tokenizer_json(folder).spec()
    return Weights(folder, model_args, weights, tokenizer, {})


def open_base(record, path, data_dir):
    """The Weights below the adapters in `path`. ValueError if they are gone or have changed."""
    try:
        base = open_weights(record['base'], data_dir)
    except ValueError as e:
        raise ValueError(f'{path} holds adapters of {record["base"]!r}, which cannot be read: {e}') from None
    if hash_source(base) != record['sha256']:
        raise ValueError(f'{path} holds adapters of {record["base"]!r}, whose weights have changed since '
                         f'(SHA-256 {record["sha256"][:12]}... before); restore them there')
    return base


def hash_source(source):
    """The SHA-256 of Weights. Sums with adapters depend on the machine, so it is that of their summands."""
    return source.checkpoint.get('sha256') or hash_weights(source.weights)


def merge_base(checkpoint, path, data_dir):
    """{name: tensor} of a run that trained adapters: the weights of its base plus the adapters, float32."""
    lora = checkpoint['lora']
    checkpoint['sha256'] = hash_weights(checkpoint['model'], lora['sha256'])
    weights = frozen_weights(open_base(lora, path, data_dir).weights, lora['quantize'])
    if 'transformer.wpe.weight' in weights:  # the run may have shortened the context
        rows = checkpoint['model_args']['block_size']
        weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:rows]
    merge(weights, adapters_of(checkpoint), lora['scale'])
    return weights


def open_checkpoint(source):
    """(path, checkpoint) of a file, or of a run folder's first intact one: best.pt, ckpt.pt, older ones."""
    if not os.path.exists(source):
        raise ValueError(f'{source!r} does not exist; train first (python train.py --out_dir={source}), or '
                         f'name a run, a checkpoint, a Hugging Face folder or one of {", ".join(GPT2_NAMES)}')
    if not os.path.isdir(source):
        return source, load_checkpoint(source)
    run = RunDir(source)
    paths = [path for path in (run / 'best.pt', *run.checkpoints()) if os.path.exists(path)]
    if not paths:
        raise ValueError(f'{source!r} holds neither a checkpoint nor a Hugging Face config.json')
    for path in paths[:-1]:
        try:
            return path, load_checkpoint(path)
        except ValueError as e:
            print(f'{e}; trying the next checkpoint', file=sys.stderr)
    return paths[-1], load_checkpoint(paths[-1])


def load_gpt2(folder):
    """(model_args, weights) of a Hugging Face folder of the GPT-2 family, in one file or in shards."""
    model_args, weights, files = gpt2_args(os.path.join(folder, 'config.json')), {}, ['model.safetensors']
    index = os.path.join(folder, 'model.safetensors.index.json')
    if os.path.exists(index):
        files = sorted({os.path.basename(name) for name in read_json(index)['weight_map'].values()})
    for file in files:
        for name, tensor in read_safetensors(os.path.join(folder, file)).items():
            if not name.startswith(('transformer.', 'lm_head.')):
                name = f'transformer.{name}'
            if name.endswith(CONV1D):  # OpenAI's "Conv1D" stores (in, out)
                tensor = tensor.t()
            weights[name] = tensor.float()
    embedding = weights.get('transformer.wte.weight')
    if model_args['tie'] and embedding is not None:
        head = weights.setdefault('lm_head.weight', embedding)
        model_args['tie'] = torch.equal(head, embedding)  # like transformers, keeps a different head
    return model_args, weights


def gpt2_args(path):
    """The model_args in a config.json of the GPT-2 family. ValueError if GPT cannot compute it."""
    config = read_json(path)
    supported = {'model_type': ['gpt2'], 'activation_function': list(MLP_OF), 'layer_norm_epsilon': [1e-5],
                 'scale_attn_weights': [True], 'scale_attn_by_inverse_layer_idx': [False],
                 'add_cross_attention': [False]}
    for name, values in supported.items():
        if config.get(name, values[0]) not in values:
            only = ', '.join(map(str, values))
            raise ValueError(f'{path}: {name}={config[name]!r} is not supported, only {only}')
    return dict(n_layer=config['n_layer'], n_head=config['n_head'], n_embd=config['n_embd'],
                n_ff=config.get('n_inner'), block_size=config.get('n_positions', 1024),
                vocab_size=config['vocab_size'], bias=True,
                mlp=MLP_OF[config.get('activation_function', 'gelu_new')],
                tie=config.get('tie_word_embeddings', True))


def read_safetensors(path):
    """
    {name: tensor} of a safetensors file, memory-mapped: 8 bytes of header length, a JSON header, raw
    row-major bytes (https://github.com/huggingface/safetensors). ValueError if it is cut or damaged.
    """
    tensors = {}
    try:
        with open(path, 'rb') as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        first = 8 + struct.unpack_from('<Q', data)[0]  # byte of the tensors
        header = json.loads(data[8:first])
        header.pop('__metadata__', None)
        for name, entry in header.items():
            dtype, (start, end) = DTYPES[entry['dtype']], entry['data_offsets']
            if not 0 <= start < end:
                raise ValueError(f'{name} is at bytes {start} to {end}')
            count = (end - start) // dtype.itemsize
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=first + start)
            tensors[name] = flat.view(entry['shape'])
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror}; only safetensors is supported') from None
    except Exception as e:  # damaged bytes can raise nearly anything
        raise ValueError(f'{path} is damaged or not a safetensors file: {e!r}') from None
    return tensors
