"""Weights to start from: a run, a checkpoint, a Hugging Face folder, GPT-2 from the hub (safetensors)."""

import json
import math
import mmap
import os
import struct
import sys
from typing import NamedTuple

import torch

from hotloop.checkpoint import load_checkpoint
from hotloop.download import download, hub
from hotloop.files import read_json
from hotloop.run_dir import RunDir
from hotloop.tokenizer import read_tokenizer_json

GPT2_NAMES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
GPT2_VOCAB_SIZES = (50257, 50304)  # OpenAI's, and padded to a multiple of 64
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
    The Weights that `source` names: gpt2 (-medium, -large, -xl), downloaded once to data_dir/pretrained; a
    Hugging Face folder; a run folder; a checkpoint file. A path that exists wins over a name. ValueError if
    nothing is there or nothing is intact.
    """
    folder = hugging_face_folder(source, data_dir)
    if folder is None:
        path, checkpoint = open_checkpoint(source)
        model_args, weights = checkpoint.pop('model_args'), checkpoint.pop('model')
        return Weights(path, model_args, weights, checkpoint.get('tokenizer'), checkpoint)
    model_args, weights = load_gpt2(folder)
    tokenizer = None
    if os.path.exists(os.path.join(folder, 'tokenizer.json')):
        tokenizer = read_tokenizer_json(folder).spec()
    elif model_args['vocab_size'] in GPT2_VOCAB_SIZES:
        tokenizer = {'kind': 'tiktoken', 'name': 'gpt2'}
    return Weights(folder, model_args, weights, tokenizer, {})


def hugging_face_folder(source, data_dir):
    """The Hugging Face folder that `source` names, downloaded if need be; None if it names another thing."""
    if os.path.exists(os.path.join(source, 'config.json')):
        return source
    if os.path.exists(source) or source not in GPT2_NAMES:
        return None
    folder = os.path.join(data_dir, 'pretrained', source)
    for name in ('config.json', 'model.safetensors'):
        download(f'{hub()}/openai-community/{source}/resolve/main/{name}', os.path.join(folder, name))
    return folder


def open_checkpoint(source):
    """(path, checkpoint) of a file, or of a run folder's first intact one: best.pt, ckpt.pt, older ones."""
    paths = [source]
    if os.path.isdir(source):
        run = RunDir(source)
        paths = [path for path in (run / 'best.pt', *run.checkpoints()) if os.path.exists(path)]
    elif not os.path.exists(source):
        raise ValueError(f'{source!r} is not a file or a folder, nor one of {", ".join(GPT2_NAMES)}')
    if not paths:
        raise ValueError(f'{source!r} holds neither a checkpoint nor a Hugging Face config.json')
    for path in paths[:-1]:
        try:
            return path, load_checkpoint(path)
        except ValueError as e:
            print(f'{e}; trying the next checkpoint', file=sys.stderr)
    return paths[-1], load_checkpoint(paths[-1])


def load_gpt2(folder):
    """
    (model_args, weights) of a Hugging Face folder of the GPT-2 family: config.json beside model.safetensors,
    or beside the shards listed in model.safetensors.index.json. ValueError if GPT cannot compute it.
    """
    model_args, weights = read_gpt2_config(os.path.join(folder, 'config.json')), {}
    for path in weight_files(folder):
        for name, tensor in read_safetensors(path).items():
            if not name.startswith(('transformer.', 'lm_head.')):
                name = f'transformer.{name}'
            if name.endswith(CONV1D) and tensor.dim() == 2:  # OpenAI's "Conv1D" stores (in, out)
                tensor = tensor.t()
            weights[name] = tensor.float()
    embedding = weights.get('transformer.wte.weight')
    if model_args['tie'] and embedding is not None:
        head = weights.setdefault('lm_head.weight', embedding)
        model_args['tie'] = torch.equal(head, embedding)  # like transformers, keep a head that differs
    return model_args, weights


def read_gpt2_config(path):
    """The model_args that a config.json of the GPT-2 family describes."""
    config = read_json(path)
    activation = str(config.get('activation_function', 'gelu_new'))
    if config.get('model_type') != 'gpt2':
        raise ValueError(f'{path}: model_type={config.get("model_type")!r} is not supported, only gpt2')
    if activation not in MLP_OF:
        raise ValueError(f'{path}: activation_function={activation!r} is not supported, only '
                         f'{", ".join(MLP_OF)}')
    for name, only in (('layer_norm_epsilon', 1e-5), ('scale_attn_weights', True),
                       ('scale_attn_by_inverse_layer_idx', False), ('add_cross_attention', False)):
        if config.get(name, only) != only:
            raise ValueError(f'{path}: {name}={config[name]} is not supported, only {only}')
    try:
        return dict(n_layer=config['n_layer'], n_head=config['n_head'], n_embd=config['n_embd'],
                    n_ff=config.get('n_inner'), block_size=config.get('n_positions', 1024),
                    vocab_size=config['vocab_size'], bias=True, mlp=MLP_OF[activation],
                    tie=config.get('tie_word_embeddings', True))
    except KeyError as e:
        raise ValueError(f'{path} lacks {e}') from None


def weight_files(folder):
    """The safetensors files of a Hugging Face folder."""
    index, names = os.path.join(folder, 'model.safetensors.index.json'), ['model.safetensors']
    if os.path.exists(index):
        weight_map = read_json(index).get('weight_map')
        if not isinstance(weight_map, dict):
            raise ValueError(f'{index} has no weight_map')
        names = sorted({os.path.basename(str(name)) for name in weight_map.values()})
    paths = [os.path.join(folder, name) for name in names]
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f'{path} does not exist; weights must be in safetensors files')
    return paths


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
        size = len(data) - first
        if size < 0:
            raise ValueError('it is cut short')
        for name, entry in json.loads(data[8:first]).items():
            if name == '__metadata__':
                continue
            dtype, shape, (start, end) = DTYPES[entry['dtype']], entry['shape'], entry['data_offsets']
            count = math.prod(shape)
            if not 0 <= start <= end <= size or end - start != count * dtype.itemsize:
                raise ValueError(f'{name} of shape {shape} does not fit bytes {start} to {end} of {size}')
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=first + start)
            tensors[name] = flat.view(shape)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as e:
        raise ValueError(f'{path} is damaged or not a safetensors file: {e!r}') from None
    return tensors
