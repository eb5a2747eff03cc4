"""Write a model as a Hugging Face folder that transformers loads: the inverse of families.py."""

import dataclasses
import json
import os
import re
import shutil
import sys

import torch

from hotloop.system.files import replacing
from hotloop.weights.export_tokenizer import tokenizer_files
from hotloop.weights.families import BLOCKS, CONV1D, KIND_OF, NAMES, OUTSIDE, model_args_from, swap_halves
from hotloop.weights.safetensors import write_safetensors

ARCHITECTURES = {'gpt2': 'GPT2LMHeadModel', 'nanochat': 'NanoChatForCausalLM', 'qwen3': 'Qwen3ForCausalLM'}
ACTIVATIONS = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new'}  # of GPT-2
SAME_FUNCTION = ('preset', 'dropout', 'zero_init', 'label_smoothing')  # settings of training alone
EMBEDDINGS = ('transformer.wte', 'transformer.wpe', 'lm_head')


def export(model, tokenizer, template, folder, dtype, hf_config=None):
    """
    Write a GPT in a dtype, its tokenizer and its chat template ('none': no template) to a new
    folder. hf_config: the config.json of the model it was started from; None if it was trained
    from scratch. Raises ValueError if transformers has no such model.
    """
    config = config_json(model.config, hf_config)
    files = tokenizer_files(tokenizer, template, model.config.block_size)
    ids = {'eos_token_id': tokenizer.eot, 'bos_token_id': tokenizer.bos}
    ids = files.get('generation_config.json') or ids
    for name in ('eos_token_id', 'bos_token_id'):
        # None is written too, because transformers assumes GPT-2's ids for keys that are missing.
        config[name] = ids.get(name, config.get(name))
    config['dtype'] = str(dtype).removeprefix('torch.')
    tensors = {name: w.to(dtype) for name, w in hf_tensors(model, config['model_type']).items()}
    os.makedirs(folder)
    try:
        write_safetensors(os.path.join(folder, 'model.safetensors'), tensors)
        # config.json comes last: a folder that has it is complete.
        for name, content in [*files.items(), ('config.json', config)]:
            if not isinstance(content, str):
                content = json.dumps(content, indent=2)
            with replacing(os.path.join(folder, name)) as f:
                f.write(content.encode())
    except BaseException:  # on a full disk, for example
        shutil.rmtree(folder)
        raise
    print(f'wrote {folder}: {config["model_type"]}, {config["dtype"]}')
    if not files:
        print('note: no tokenizer written: tokenizer.json cannot hold characters', file=sys.stderr)


def config_json(config, hf_config=None):
    """
    Return the config.json of a resolved GPTConfig: hf_config with the sizes that training may
    change, or that of its preset. Raises ValueError if it does not describe the same model.
    """
    hf_config = hf_config or scratch_config(config)
    made = {key: value for key, value in hf_config.items() if key != 'torch_dtype'}
    kind = made['model_type']
    for ours in ('block_size', 'vocab_size', 'tie'):
        made[NAMES[kind][ours]] = getattr(config, ours)
    if 'n_ctx' in made:
        made['n_ctx'] = config.block_size
    GPTConfig = type(config)  # The parts do not import model.py.
    theirs = GPTConfig(**model_args_from(made, 'config.json')).resolved()
    differing = differences(config, theirs, kind)
    if differing:
        raise ValueError(f'transformers has no such model: its {kind} differs in {", ".join(differing)}; '
                         'a run from scratch needs --mixer=attention --x0_mix=False and --preset=gpt2, '
                         '--preset=qwen3 or --preset=modern --key_shift=False')
    return made


def differences(config, theirs, kind):
    """List the settings that make a GPTConfig compute something other than `theirs`."""
    found = []
    for name, value in dataclasses.asdict(config).items():
        # Biases that the model lacks are written as zeros.
        is_zero = kind == 'gpt2' and name in ('bias', 'qkv_bias') and not value
        if value != getattr(theirs, name) and name not in SAME_FUNCTION and not is_zero:
            found.append(f'{name}={value}')
    return found


def scratch_config(config):
    """Return the config.json of a model trained from scratch: that of the family of its preset."""
    kind = KIND_OF[config.preset]
    made = {'model_type': kind, 'architectures': [ARCHITECTURES[kind]]}
    for ours, theirs in NAMES[kind].items():
        made[theirs] = getattr(config, ours)
    if kind == 'gpt2':  # llama.cpp reads n_ctx
        return made | {'n_ctx': None, 'activation_function': ACTIVATIONS.get(config.mlp, 'gelu_new')}
    made |= {'hidden_act': 'silu', 'rope_theta': config.rope_base}
    if kind == 'nanochat':
        made |= {'hidden_act': 'relu2', 'final_logit_softcapping': config.softcap or None,
                 'pad_token_id': None}  # else token 1 of the text would be masked
    return made


def hf_tensors(model, kind):
    """Return {name in transformers: tensor} of a GPT whose family is `kind`."""
    c = model.config
    weights = model.state_dict()
    if c.tie:
        del weights['lm_head.weight']
    if kind == 'nanochat':
        swap_halves(weights, c.head_dim)
    outside = {ours: theirs for theirs, ours in OUTSIDE.items()}
    tensors = {}
    for name, tensor in weights.items():
        module, _, suffix = name.rpartition('.')
        layer = re.fullmatch(r'transformer\.h\.(\d+)\.(.+)', module)
        if kind == 'gpt2':
            tensors[name] = tensor.t() if name.endswith(CONV1D) else tensor  # stored as (in, out)
            bias = f'{module}.bias'
            if bias not in weights and module not in EMBEDDINGS:
                tensors[bias] = torch.zeros(len(tensor))
        elif layer is None:
            tensors[f'{outside[module]}.{suffix}'] = tensor
        else:
            theirs = BLOCKS[kind][layer[2]]
            rows = len(tensor) // len(theirs)
            if layer[2] == 'attn.c_attn':
                rows = [heads * c.head_dim for heads in (c.n_head, c.n_kv_head, c.n_kv_head)]
            for part, matrix in zip(theirs, tensor.split(rows), strict=True):
                tensors[f'model.layers.{layer[1]}.{part}.{suffix}'] = matrix
    return tensors
