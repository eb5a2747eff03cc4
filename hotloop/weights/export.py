"""Writes a model as a Hugging Face folder that transformers loads: the inverse of families.py."""

import dataclasses
import json
import os
import re
import sys

import torch

from hotloop.system.files import replacing
from hotloop.weights.export_tokenizer import tokenizer_files
from hotloop.weights.families import (
    BLOCK,
    CONV1D,
    GEMMA_BLOCK,
    LETTERS,
    MLP_OF,
    OUTSIDE,
    names_of,
    settings_of,
)
from hotloop.weights.safetensors import write_safetensors

ARCHITECTURES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM', 'gemma2': 'Gemma2ForCausalLM',
                 'gemma3_text': 'Gemma3ForCausalLM'}
OUTSIDE_OF = {ours: theirs if theirs == 'lm_head' else f'model.{theirs}' for theirs, ours in OUTSIDE.items()}
BIASES = ('bias', 'qkv_bias')
TRAINING = ('preset', 'dropout', 'zero_init', 'label_smoothing')  # settings that do not change the function


def export(model, tokenizer, template, folder, dtype):
    """
    Writes a GPT in a dtype, its tokenizer and the template of its chats ('none' if it has none) to a folder,
    new or empty. ValueError names the settings that no model of transformers has.
    """
    if os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        raise ValueError(f'export={folder} exists and is not an empty folder; name a new one')
    config = counterpart(model.config)
    files = tokenizer_files(tokenizer, template, model.config.block_size)
    tensors = {name: tensor.to(dtype) for name, tensor in hf_tensors(model, config).items()}
    ids = {'eos_token_id': tokenizer.eot, 'bos_token_id': tokenizer.begin}  # None: not transformers' defaults
    config |= {'dtype': str(dtype).removeprefix('torch.'), **files.get('generation_config.json', ids)}
    try:
        os.makedirs(folder, exist_ok=True)
        write_safetensors(os.path.join(folder, 'model.safetensors'), tensors)
        for name, content in {**files, 'config.json': config}.items():  # with the last one it is complete
            text = content if isinstance(content, str) else json.dumps(content, indent=2)
            with replacing(os.path.join(folder, name)) as f:
                f.write(text.encode())
    except OSError as e:
        raise ValueError(f'export={folder} could not be written: {e.strerror or e}') from None
    print(f'wrote {folder}: {config["architectures"][0]}, {config["dtype"]}')
    if not files:
        print('note: without a tokenizer, because tokenizer.json has no form for one of characters',
              file=sys.stderr)


# -----------------------------------------------------------------------------
# settings

def counterpart(config):
    """
    The config.json of the model of transformers that computes what a GPTConfig does. ValueError if there is
    none: with the settings in which the nearest one differs.
    """
    ours, candidates, GPTConfig = function_of(config), [], type(config)  # parts do not import model.py
    for kind in ARCHITECTURES:
        made = nearest_config(config, kind)
        theirs = function_of(GPTConfig(**settings_of(made, 'config.json')).resolved())
        candidates.append(([name for name in ours if ours[name] != theirs[name]
                            and not (name in BIASES and theirs[name])], made))  # zeros
    differing, made = min(candidates, key=lambda candidate: len(candidate[0]))
    if differing:
        values = ', '.join(f'{name}={getattr(config, name)}' for name in differing)
        raise ValueError('transformers has no model that computes the same; the nearest is '
                         f'{made["model_type"]}, differing in {values}')
    return made


def function_of(config):
    """{setting: value} of a resolved GPTConfig; equal for those that compute the same."""
    c = {name: value for name, value in dataclasses.asdict(config).items() if name not in TRAINING}
    if config.norm == 'rmsnorm':
        c['norm'] = 'rmsnorm_weight'  # ones
    if config.position == 'learned':
        c['rope_base'] = c['rope_factor'] = c['rope_context'] = None
    c['window'], c['window_pattern'] = config.windows(), None
    if not any(c['window']) or (config.rope_factor == 1 and config.rope_local_base == config.rope_base):
        c['rope_local_base'] = None
    c['query_scale'] = config.query_scale or config.head_dim ** -0.5
    return c


def nearest_config(c, kind):
    """The config.json of the model of a family that is nearest to a GPTConfig."""
    made = {'model_type': kind, 'architectures': [ARCHITECTURES[kind]],
            **{theirs: getattr(c, ours) for ours, theirs in names_of(kind).items()}}
    if kind == 'gpt2':
        names = {ours: name for name, ours in reversed(MLP_OF.items())}
        return made | {'n_ctx': c.block_size,  # llama.cpp reads this one
                       'activation_function': names.get(c.mlp, 'gelu_new')}
    made['rope_theta'] = c.rope_base
    if c.rope_context is not None:
        made['rope_scaling'] = {'rope_type': 'llama3', 'factor': c.rope_factor, 'low_freq_factor': 1.0,
                                'high_freq_factor': 4.0, 'original_max_position_embeddings': c.rope_context}
    elif c.rope_factor != 1:
        made['rope_scaling'] = {'rope_type': 'linear', 'factor': c.rope_factor}
    windows = c.windows()
    if kind == 'mistral':
        made['sliding_window'] = c.window
    elif kind != 'llama':
        kinds = {letter: name for name, letter in LETTERS.items()}
        made |= {'sliding_window': c.window or c.block_size, 'use_sliding_window': any(windows),
                 'layer_types': [kinds['S' if window else 'L'] for window in windows]}
    if kind.startswith('gemma'):
        scale = c.query_scale or c.head_dim ** -0.5
        made |= {'hidden_activation': 'gelu_pytorch_tanh', 'query_pre_attn_scalar': round(scale ** -2),
                 'attn_logit_softcapping': c.attn_softcap or None,
                 'final_logit_softcapping': c.softcap or None}
    if kind == 'gemma3_text':
        made['rope_local_base_freq'] = c.rope_local_base or c.rope_base
    return made


# -----------------------------------------------------------------------------
# weights

def hf_tensors(model, config):
    """
    {name in transformers: tensor} of a GPT that the config.json describes. Biases that it lacks are 0,
    weights of norms 1.
    """
    c, kind, tensors = model.config, config['model_type'], {}
    with torch.device('meta'):
        shapes = type(model)(type(c)(**settings_of(config, 'config.json'))).state_dict()
    weights = model.state_dict()
    for name, like in shapes.items():
        if name not in weights:
            weights[name] = torch.full(like.shape, float(name.endswith('.weight')))
    if c.tie:
        del weights['lm_head.weight']
    for name, tensor in weights.items():
        module, _, suffix = name.rpartition('.')
        layer = re.fullmatch(r'transformer\.h\.(\d+)\.(.+)', module)
        if kind == 'gpt2':
            tensors[name] = tensor.t() if name.endswith(CONV1D) else tensor  # stored as (in, out)
        elif layer is None:
            tensors[f'{OUTSIDE_OF[module]}.{suffix}'] = tensor
        else:
            theirs = (GEMMA_BLOCK if kind.startswith('gemma') else BLOCK)[layer[2]]
            rows = len(tensor) // len(theirs)
            if layer[2] == 'attn.c_attn':
                rows = [heads * c.head_dim for heads in (c.n_head, c.n_kv_head, c.n_kv_head)]
            for part, matrix in zip(theirs, tensor.split(rows), strict=True):
                tensors[f'model.layers.{layer[1]}.{part}.{suffix}'] = matrix
    return tensors
