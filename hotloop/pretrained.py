"""Weights to start from: a run, a checkpoint, GPT-2 from the hub (safetensors)."""

import json
import math
import mmap
import os
import struct

import torch

from hotloop.checkpoint import load_checkpoint
from hotloop.download import download, hub
from hotloop.files import read_json
from hotloop.run_dir import RunDir
from hotloop.tokenizer import read_tokenizer_json

SAFETENSORS_DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
                      'I64': torch.int64, 'I32': torch.int32, 'I16': torch.int16, 'I8': torch.int8,
                      'U8': torch.uint8, 'BOOL': torch.bool}


def read_safetensors(path):
    """
    {name: tensor} of a .safetensors file, mapped and not copied. The format: 8 bytes of length, a JSON header, raw
    row-major bytes (https://github.com/huggingface/safetensors). Anything that does not add up is a ValueError.
    """
    with open(path, 'rb') as f:
        size = os.fstat(f.fileno()).st_size
        length = struct.unpack('<Q', f.read(8))[0] if size >= 8 else -1
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f'{path} is no safetensors file, or cut short: {size} bytes, header of {length}')
        try:
            header = json.loads(f.read(length))
            entries = []
            for name, e in header.items():
                if name != '__metadata__':
                    a, b = e['data_offsets']
                    if not isinstance(e['shape'], list) or not all(type(n) is int for n in (a, b, *e['shape'])):
                        raise ValueError(f'{name} has a shape or place that is not whole numbers')
                    entries.append((name, SAFETENSORS_DTYPES[e['dtype']], e['shape'], a, b))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f'{path} has a header that cannot be read: {e!r}') from None
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors, end = {}, 0
    for name, dtype, shape, a, b in sorted(entries, key=lambda entry: entry[3:]):
        count = math.prod(shape)
        fits = min(shape, default=0) >= 0 and a == end and b - a == count * dtype.itemsize
        if not fits or 8 + length + b > size or math.prod(n or 1 for n in shape) >= 2**62 or len(shape) > 64:
            raise ValueError(f'{path}: {name} of shape {shape} does not fit its place {a}..{b} in {size} bytes')
        whole = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + length + a) if count else torch.empty(0)
        tensors[name], end = whole.to(dtype).view(shape), b
    return tensors


def load_gpt2(folder):
    """
    (model_args, weights) of a Hugging Face folder of the GPT-2 family: config.json beside model.safetensors, in one file or in the
    shards that model.safetensors.index.json lists. ValueError where it is another family or does not fit.
    """
    path = os.path.join(folder, 'config.json')
    hf = read_json(path)
    activation = {'gelu_new': 'gelu_tanh', 'gelu': 'gelu', 'gelu_pytorch_tanh': 'gelu_tanh'}
    if hf.get('model_type') != 'gpt2':
        raise ValueError(f'{path}: model_type={hf.get("model_type")!r} is not read by this version, only gpt2')
    if str(hf.get('activation_function', 'gelu_new')) not in activation:
        raise ValueError(f'{path}: activation_function={hf["activation_function"]!r} is not supported, only '
                         f'{", ".join(activation)}')
    for name, usual in (('layer_norm_epsilon', 1e-5), ('scale_attn_weights', True),
                        ('scale_attn_by_inverse_layer_idx', False), ('add_cross_attention', False)):
        if hf.get(name, usual) != usual:
            raise ValueError(f'{path}: {name}={hf[name]} is not supported, only {usual}')
    try:
        args = dict(n_layer=hf['n_layer'], n_head=hf['n_head'], n_embd=hf['n_embd'], n_ff=hf.get('n_inner'),
                    block_size=hf.get('n_positions', 1024), vocab_size=hf['vocab_size'], bias=True,
                    mlp=activation[hf.get('activation_function', 'gelu_new')], tie=hf.get('tie_word_embeddings', True))
    except KeyError as e:
        raise ValueError(f'{path} does not give {e}') from None

    index = os.path.join(folder, 'model.safetensors.index.json')
    files = ['model.safetensors']
    if os.path.exists(index):
        places = read_json(index).get('weight_map')
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f'{index} does not say which file holds which weight')
        files = sorted({os.path.basename(name) for name in places.values()})
    state_dict = {}
    for name in files:
        if not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f'{os.path.join(folder, name)} does not exist; weights must be in safetensors files')
        for key, tensor in read_safetensors(os.path.join(folder, name)).items():
            key = key if key.startswith(('transformer.', 'lm_head.')) else f'transformer.{key}'
            # OpenAI's "Conv1D" stores (in, out)
            conv = key.endswith(('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight'))
            state_dict[key] = (tensor.t() if conv else tensor).float()
    wte = state_dict.get('transformer.wte.weight', torch.empty(0))
    args['tie'] = args['tie'] and torch.equal(state_dict.get('lm_head.weight', wte), wte)  # as transformers has it
    if args['tie']:
        state_dict['lm_head.weight'] = wte
    return args, state_dict


def open_weights(cfg):
    """What init_from names: (model_args, weights, tokenizer spec or None)."""
    if found := pretrained(cfg.init_from, cfg.data_dir):
        folder, tokenizer = found
        return *load_gpt2(folder), tokenizer
    path = cfg.init_from
    if os.path.isdir(path):
        found = [p for p in (os.path.join(path, 'best.pt'), *RunDir(path).checkpoints()) if os.path.exists(p)]
        if not found:
            raise ValueError(f'init_from={path!r} holds neither a checkpoint nor a Hugging Face config.json')
        path = found[0]
    if not os.path.exists(path):
        raise ValueError(f'init_from={path!r} is not scratch, resume or gpt2*, and no such file or folder exists')
    checkpoint = load_checkpoint(path)
    return checkpoint['model_args'], checkpoint['model'], checkpoint.get('tokenizer')


def pretrained(init_from, data_dir):
    """
    (folder in Hugging Face's layout, spec of its tokenizer) where init_from names one: a folder, or OpenAI's weights by
    name, downloaded once. None where it names none. Where no tokenizer lies there, GPT-2's by its vocabulary, or None.
    """
    names, folder = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'), init_from
    if init_from.startswith('gpt2') and not os.path.exists(init_from):
        if init_from not in names:
            raise ValueError(f'init_from={init_from!r} is not one of {", ".join(names)}, and no file or folder')
        folder = os.path.join(data_dir, 'pretrained', init_from)
        for file in ('config.json', 'model.safetensors'):
            download(f'{hub()}/openai-community/{init_from}/resolve/main/{file}', os.path.join(folder, file))
    elif not os.path.exists(os.path.join(init_from, 'config.json')):
        return None
    if any(os.path.exists(os.path.join(folder, name)) for name in ('tokenizer.json', 'vocab.json')):
        return folder, read_tokenizer_json(folder).spec()
    try:
        vocab_size = read_json(os.path.join(folder, 'config.json')).get('vocab_size')
    except (OSError, ValueError, RecursionError, AttributeError):  # model.py says what is wrong with it
        vocab_size = None
    return folder, {'kind': 'tiktoken', 'name': 'gpt2'} if vocab_size in (50257, 50304) else None


def find_checkpoint(cfg):
    """The file that init_from and out_dir mean; best.pt before ckpt.pt."""
    folder = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
    for path in (folder, os.path.join(folder, 'best.pt'), os.path.join(folder, 'ckpt.pt')):
        if os.path.isfile(path):
            return path
    if cfg.init_from != 'resume':
        raise ValueError(f'init_from={folder!r} is no file, no folder with a checkpoint, and no gpt2 model')
    raise ValueError(f'there is no checkpoint in {folder!r}; train one with: python train.py --out_dir={folder}')
