"""Writes and reads folders of adapters in the format of peft, and merges them into their base."""

import json
import os
import re

from hotloop.system.files import read_json, replacing
from hotloop.weights.lora import (
    Adapter,
    LoRAConfig,
    adapters_of,
    frozen_weights,
    hash_source,
    merge,
    projections,
)
from hotloop.weights.safetensors import read_safetensors, write_safetensors

CONFIG, TENSORS, ORIGIN = 'adapter_config.json', 'adapter_model.safetensors', 'hotloop.json'
# of adapter_config.json: what else would compute something that merge() does not
ONLY = {'peft_type': 'LORA', 'bias': 'none', 'use_dora': False, 'lora_bias': False, 'modules_to_save': None,
        'rank_pattern': {}, 'alpha_pattern': {}, 'target_parameters': None, 'trainable_token_indices': None,
        'alora_invocation_tokens': None, 'layer_replication': None}
CHANGES_BASE = ('pissa', 'olora', 'corda', 'loftq')  # starts with which peft changes the base as it loads it


def write_adapter(folder, checkpoint):
    """
    Writes the adapters of a checkpoint so that peft loads them onto the base in its Hugging Face form. A file
    of ours beside them, hotloop.json, identifies the base and records how the data begin a text and mark the
    turns of a chat. ValueError if the disk is full.
    """
    lora, tensors, targets = checkpoint['lora'], {}, []
    for a in adapters_of(checkpoint):
        is_gpt2 = a.projection == a.matrix
        blocks, projection = 'transformer.h', a.projection
        if not is_gpt2:
            blocks, projection = 'model.layers', re.sub('^attn', 'self_attn', projection)
        module = f'base_model.model.{blocks}.{a.layer}.{projection}'
        tensors |= {f'{module}.lora_A.weight': a.A, f'{module}.lora_B.weight': a.B}
        targets.append(projection)
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': lora['base'],
              'r': lora['lora_rank'], 'lora_alpha': lora['lora_alpha'], 'use_rslora': lora['lora_rs'],
              'lora_dropout': lora['lora_dropout'], 'target_modules': list(dict.fromkeys(targets)),
              'fan_in_fan_out': is_gpt2, 'bias': 'none', 'inference_mode': True}
    origin = {name: lora[name] for name in ('base', 'sha256', 'quantize')}
    origin['habits'] = {'bos': checkpoint.get('bos'), 'template': checkpoint.get('template', 'none')}
    try:
        os.makedirs(folder, exist_ok=True)
        for name, value in ((CONFIG, config), (ORIGIN, origin)):
            with replacing(os.path.join(folder, name)) as f:
                f.write(json.dumps(value, indent=2).encode())
        write_safetensors(os.path.join(folder, TENSORS), tensors)
    except OSError as e:
        raise ValueError(f'{folder} could not be written: {e.strerror or e}') from None


def is_adapter(folder):
    """Whether a folder holds adapters."""
    return os.path.exists(os.path.join(folder, CONFIG))


def base_of(folder):
    """
    What is known of the weights that an adapter was trained on: {'base': name, 'sha256': their hash or None,
    'quantize': how they were rounded}; 'habits' of the adapter's data. ValueError if the folder has none.
    """
    if not is_adapter(folder) and is_adapter(os.path.join(folder, 'adapter')):
        raise ValueError(f'{folder} is a run; its adapter is --adapter={os.path.join(folder, "adapter")}')
    name = read_json(os.path.join(folder, CONFIG)).get('base_model_name_or_path') or 'an unknown base'
    path = os.path.join(folder, ORIGIN)  # peft writes none
    origin = read_json(path) if os.path.exists(path) else {}
    return {'sha256': None, 'quantize': 'none', 'habits': {}, **origin, 'base': name}


def merge_adapter(model, folder, source):
    """
    Adds an adapter folder, ours or peft's, to the float32 weights of a model. source: the Weights that the
    model has, which get the habits of the adapter's data. ValueError if the adapter was trained on others.
    """
    adapters, scale = read_adapter(folder, model, source.path)
    record = base_of(folder)
    if record['sha256'] is not None and record['sha256'] != hash_source(source):
        raise ValueError(f'{folder} was trained on {record["base"]}, with other weights than '
                         f'{source.path}; name its base with --init_from')
    weights = frozen_weights(model.state_dict(), record['quantize'])
    merge(weights, adapters, scale)
    model.load_weights(weights)
    source.checkpoint.update(record['habits'])


def read_adapter(folder, model, path):
    """([Adapter], scale) of a peft folder. path: of the model's weights, for errors."""
    config = read_json(os.path.join(folder, CONFIG))
    for name, value in ONLY.items():
        found = config.get(name, value)
        if found and found != value:
            raise ValueError(f'{folder}/{CONFIG}: {name}={found!r} is not supported, only {value!r}')
    start = str(config.get('init_lora_weights')).lower()
    if start.startswith(CHANGES_BASE):
        raise ValueError(f'{folder}/{CONFIG}: init_lora_weights={start!r} changes the base; save the adapter '
                         'with path_initial_model_for_weight_conversion, an option of peft')
    for name, least in (('r', 1), ('lora_alpha', 0)):
        value = config.get(name)
        if not isinstance(value, int | float) or value < least:
            raise ValueError(f'{folder}/{CONFIG}: {name}={value!r} must be a number of at least {least}')
    scale = LoRAConfig(config['r'], config['lora_alpha'], config.get('use_rslora', False)).scale()
    tensors, table, adapters = read_safetensors(os.path.join(folder, TENSORS)), projections(model), []
    trained_on = f'it was trained on {base_of(folder)["base"]}'
    for name in sorted(tensors):
        found = re.fullmatch(r'base_model\.model\.(?:transformer\.h|model\.layers)\.(\d+)\.(?:self_)?(.+)'
                             r'\.lora_([AB])\.weight', name)
        if not found or found[2] not in table or int(found[1]) >= model.config.n_layer:
            raise ValueError(f'{folder} does not fit {path}, which has nothing for {name}; {trained_on}')
        if found[3] == 'B':
            continue
        matrix, start, end = table[found[2]]
        other = name.replace('lora_A', 'lora_B')
        if other not in tensors:
            raise ValueError(f'{folder}/{TENSORS} lacks {other}')
        A, B = tensors[name].float(), tensors[other].float()
        in_features = model.transformer.h[0].get_submodule(matrix).in_features
        shapes = [(len(B), A.size(1)), (end - start, in_features)]
        if shapes[0] != shapes[1]:
            raise ValueError(f'{folder} does not fit {path}: {name} is for a matrix of {shapes[0]}, not of '
                             f'{shapes[1]}; {trained_on}')
        adapters.append(Adapter(int(found[1]), found[2], matrix, start, end, A, B))
    return adapters, scale
