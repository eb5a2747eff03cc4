"""Write and read folders of adapters in the format of peft, and merge them into their base."""

import json
import os
import re

from hotloop.data.tokenizer import spec_of, template_of_record
from hotloop.system.files import read_json, replacing
from hotloop.weights.lora import (
    Adapter,
    LoRAConfig,
    adapters_of,
    projections,
)
from hotloop.weights.safetensors import read_safetensors, write_safetensors

CONFIG = 'adapter_config.json'
TENSORS = 'adapter_model.safetensors'
ORIGIN = 'hotloop.json'  # identifies the base; records the tokenizer and chat template of its data
# the options in adapter_config.json that merge() supports, with their only values
ONLY = {'peft_type': 'LORA', 'bias': 'none', 'use_dora': False, 'lora_bias': False,
        'modules_to_save': None, 'rank_pattern': {}, 'alpha_pattern': {},
        'target_parameters': None, 'trainable_token_indices': None,
        'alora_invocation_tokens': None, 'layer_replication': None}
CHANGES_BASE = ('pissa', 'olora', 'corda', 'loftq')  # with these, loading changes the base


def write_adapter(folder, checkpoint):
    """
    Write the adapters of a checkpoint so that peft loads them onto the base in its Hugging Face
    form. Raises ValueError if the folder cannot be written.
    """
    lora = checkpoint['lora']
    tensors = {}
    targets = []
    for a in adapters_of(checkpoint):
        is_gpt2 = a.projection == a.matrix
        if is_gpt2:
            blocks = 'transformer.h'
            projection = a.projection
        else:
            blocks = 'model.layers'
            projection = re.sub('^attn', 'self_attn', a.projection)
        module = f'base_model.model.{blocks}.{a.layer}.{projection}'
        tensors[f'{module}.lora_A.weight'] = a.A
        tensors[f'{module}.lora_B.weight'] = a.B
        if projection not in targets:
            targets.append(projection)
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM',
              'base_model_name_or_path': lora['base'], 'r': lora['lora_rank'],
              'lora_alpha': lora['lora_alpha'], 'use_rslora': lora['lora_rs'],
              'lora_dropout': lora['lora_dropout'], 'target_modules': targets,
              'fan_in_fan_out': is_gpt2, 'bias': 'none', 'inference_mode': True}
    origin = {'base': lora['base'], 'sha256': lora['sha256'], 'quantize': lora['quantize'],
              'tokenizer': spec_of(checkpoint), 'template': template_of_record(checkpoint)}
    try:
        os.makedirs(folder, exist_ok=True)
        for name, value in ((CONFIG, config), (ORIGIN, origin)):
            with replacing(os.path.join(folder, name)) as f:
                f.write(json.dumps(value, indent=2).encode())
        write_safetensors(os.path.join(folder, TENSORS), tensors)
    except OSError as e:
        raise ValueError(f'{folder} could not be written: {e.strerror or e}') from None


def is_adapter(folder):
    """Test whether a folder holds adapters."""
    return os.path.exists(os.path.join(folder, CONFIG))


def base_of(folder):
    """
    Read which weights the adapters of a folder were trained on: {'base': name, 'sha256': their hash
    or None, 'quantize': how they were rounded, 'tokenizer' and 'template': those of the data, or None}.
    """
    config = read_json(os.path.join(folder, CONFIG))
    record = {'sha256': None, 'quantize': 'none', 'tokenizer': None, 'template': None}
    path = os.path.join(folder, ORIGIN)
    if os.path.exists(path):  # peft writes none
        record |= read_json(path)
        record['template'] = template_of_record(record.pop('habits', record))
    record['base'] = config.get('base_model_name_or_path') or 'an unknown base'
    return record


def read_adapter(folder, weights, path):
    """
    Read ([Adapter], scale) of a folder, ours or peft's. weights: of a GPT, its base, from `path`.
    Raises ValueError if the adapters do not fit.
    """
    config = read_json(os.path.join(folder, CONFIG))
    check_config(config, f'{folder}/{CONFIG}')
    lora = LoRAConfig(lora_rank=config['r'], lora_alpha=config['lora_alpha'],
                      lora_rs=config.get('use_rslora', False))
    tensors = read_safetensors(os.path.join(folder, TENSORS))
    table = projections(weights)
    trained_on = f'it was trained on {base_of(folder)["base"]}'
    pattern = re.compile(r'base_model\.model\.(?:transformer\.h|model\.layers)\.(\d+)'
                         r'\.(?:self_)?(.+)\.lora_([AB])\.weight')
    adapters = []
    for name in sorted(tensors):
        found = pattern.fullmatch(name)
        target = None
        if found and found[2] in table:
            matrix, start, end = table[found[2]]
            target = f'transformer.h.{found[1]}.{matrix}.weight'
        if target not in weights:
            raise ValueError(f'{folder} does not fit {path}, which has nothing for {name}; '
                             f'{trained_on}')
        if found[3] == 'B':
            continue
        A = tensors[name].float()
        B = tensors[name.replace('lora_A', 'lora_B')].float()
        in_features = weights[target].size(1)
        shape = (len(B), A.size(1))
        if shape != (end - start, in_features):
            raise ValueError(f'{folder} does not fit {path}: {name} is for a matrix of {shape}, '
                             f'not of {(end - start, in_features)}; {trained_on}')
        adapters.append(Adapter(int(found[1]), found[2], matrix, start, end, A, B))
    return adapters, lora.scale()


def check_config(config, path):
    """Raise ValueError if adapter_config.json describes something that merge() does not compute."""
    for name, value in ONLY.items():
        found = config.get(name, value)
        if found and found != value:
            raise ValueError(f'{path}: {name}={found!r} is not supported, only {value!r}')
    start = str(config.get('init_lora_weights')).lower()
    if start.startswith(CHANGES_BASE):
        raise ValueError(f'{path}: init_lora_weights={start!r} changes the base; save the adapter '
                         'with path_initial_model_for_weight_conversion, an option of peft')
    for name, least in (('r', 1), ('lora_alpha', 0)):
        value = config.get(name)
        if not isinstance(value, int | float) or value < least:
            raise ValueError(f'{path}: {name}={value!r} must be a number of at least {least}')
