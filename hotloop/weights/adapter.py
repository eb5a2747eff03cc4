"""Write and read folders of adapters in the format of peft."""

import json
import os
import re

from hotloop.data.tokenizer import spec_of, template_of_record
from hotloop.system.files import read_json, replacing
from hotloop.weights.families import check_keys, head_dim_of, is_nanochat, swap_rows
from hotloop.weights.lora import EMBEDDINGS, LoRAConfig, adapters_of, embeddings_of
from hotloop.weights.safetensors import read_safetensors, write_safetensors

CONFIG = 'adapter_config.json'
TENSORS = 'adapter_model.safetensors'
ORIGIN = 'hotloop.json'  # identifies the base; records the tokenizer and chat template of its data
# the options in adapter_config.json that merged() supports, with their only values; other ways to
# initialize, such as PiSSA, change the base
SUPPORTED = {'peft_type': ['LORA'], 'bias': ['none'], 'use_dora': [False, None], 'lora_bias': [False, None],
             'rank_pattern': [{}, None], 'alpha_pattern': [{}, None],
             'target_parameters': [None, []], 'trainable_token_indices': [None, []],
             'alora_invocation_tokens': [None, []], 'layer_replication': [None, []],
             'init_lora_weights': [True, False, None, 'gaussian', 'eva', 'orthogonal']}
# {a name of peft's: ours}
SAVED = {'model.embed_tokens': EMBEDDINGS[0], 'transformer.wte': EMBEDDINGS[0], 'lm_head': EMBEDDINGS[1]}
NANOCHAT = {'mlp.up_proj': 'mlp.fc1', 'mlp.down_proj': 'mlp.fc2',  # {projection: its name there}, and back
            'mlp.fc1': 'mlp.up_proj', 'mlp.fc2': 'mlp.down_proj'}


def write_adapter(folder, checkpoint):
    """
    Write the adapters of a checkpoint so that peft loads them onto the base in its Hugging Face
    form. Raises ValueError if the folder cannot be written.
    """
    lora = checkpoint['lora']
    tensors = {}
    targets = {}  # names, in order
    adapters = adapters_of(checkpoint['model'], lora['parts'])
    if is_nanochat(checkpoint.get('hf_config')):
        adapters = swap_nanochat(adapters, head_dim_of(checkpoint['model_args']))
    for (layer, projection), (A, B) in adapters.items():
        is_gpt2 = projection in lora['parts']  # It has a matrix of its own.
        blocks = 'transformer.h'
        if not is_gpt2:
            blocks = 'model.layers'
            projection = re.sub('^attn', 'self_attn', projection)
        tensors[f'base_model.model.{blocks}.{layer}.{projection}.lora_A.weight'] = A
        tensors[f'base_model.model.{blocks}.{layer}.{projection}.lora_B.weight'] = B
        targets[projection] = True
    saved = embeddings_of(checkpoint['model'])
    for theirs, ours in SAVED.items():
        if ours in saved and theirs != ('model.embed_tokens' if is_gpt2 else 'transformer.wte'):
            tensors[f'base_model.model.{theirs}.weight'] = saved[ours]
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM',
              'base_model_name_or_path': lora['base'], 'r': lora['lora_rank'],
              'lora_alpha': lora['lora_alpha'], 'use_rslora': lora['lora_rs'],
              'lora_dropout': lora['lora_dropout'], 'target_modules': list(targets),
              'modules_to_save': ['wte' if is_gpt2 else 'embed_tokens', 'lm_head'] if saved else None,
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


def swap_nanochat(adapters, head_dim):
    """Translate adapters to NanoChat's projections and rotation, or back; see swap_halves()."""
    swapped = {}
    for (layer, projection), (A, B) in adapters.items():
        is_rotated = projection in ('attn.q_proj', 'attn.k_proj')
        swapped[layer, NANOCHAT.get(projection, projection)] = A, swap_rows(B, head_dim) if is_rotated else B
    return swapped


def is_adapter(folder):
    """Test whether a folder holds adapters."""
    return os.path.exists(os.path.join(folder, CONFIG))


def base_of(folder):
    """
    Read which weights the adapters of a folder were trained on: {'base': name, 'sha256': their hash
    or None, 'quantize': how they were rounded, 'tokenizer' and 'template': those of the data, or None}.
    """
    record = {'sha256': None, 'quantize': 'none', 'tokenizer': None, 'template': None}
    path = os.path.join(folder, ORIGIN)
    if os.path.exists(path):  # peft writes none
        record |= read_json(path)
        record['template'] = template_of_record(record.pop('habits', record))  # older folders have habits
    name = read_json(os.path.join(folder, CONFIG)).get('base_model_name_or_path')
    return {**record, 'base': name or 'an unknown base'}


def read_adapter(folder):
    """
    Read ({(layer, projection): (A, B)}, scale) of a folder, ours or peft's, as adapters_of() has them.
    read_embeddings() reads the rest.
    """
    config = read_json(os.path.join(folder, CONFIG))
    check_keys(config, SUPPORTED, f'{folder}/{CONFIG}')
    lora = LoRAConfig(lora_rank=config['r'], lora_alpha=config['lora_alpha'],
                      lora_rs=config.get('use_rslora', False))
    tensors = read_safetensors(os.path.join(folder, TENSORS))
    pattern = re.compile(r'base_model\.model\.(?:transformer\.h|model\.layers)\.(\d+)'
                         r'\.(?:self_)?(.+)\.lora_([AB])\.weight')
    adapters = {}
    for name, A in tensors.items():
        found = pattern.fullmatch(name)
        if our_embedding(name):
            continue
        if found is None:
            raise ValueError(f'{folder}: {name} is not supported, only matrices of blocks, wte and head')
        if found[3] == 'A':
            B = tensors[name.replace('lora_A', 'lora_B')]
            adapters[int(found[1]), found[2]] = A.float(), B.float()
    return adapters, lora.scale()


def our_embedding(name):
    """Return our name of an embedding or head in a folder of adapters, or None."""
    return SAVED.get(name.removeprefix('base_model.model.').removesuffix('.weight'))


def read_embeddings(folder):
    """Read the embedding and the head that were trained beside the adapters of a folder, {name: tensor}."""
    tensors = read_safetensors(os.path.join(folder, TENSORS))
    return {our_embedding(name): tensor for name, tensor in tensors.items() if our_embedding(name)}
