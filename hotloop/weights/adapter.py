"""Write and read folders of adapters in the format of peft."""

import json
import os
import re

from hotloop.data.tokenizer import spec_of, template_of_record
from hotloop.system.files import read_json, replacing
from hotloop.weights.families import KIND_OF, check_keys, head_dim_of, swap_rows
from hotloop.weights.lora import EMBEDDINGS, LoRAConfig, adapters_of, embeddings_of
from hotloop.weights.safetensors import read_safetensors, write_safetensors

CONFIG = 'adapter_config.json'
TENSORS = 'adapter_model.safetensors'
ORIGIN = 'hotloop.json'  # identifies the base; records the tokenizer and chat template of its data
# Options in adapter_config.json that change the result but no tensor's name, with the values that
# merged() supports. Other ways to initialize, such as PiSSA, change the base.
SUPPORTED = {'peft_type': ['LORA'], 'rank_pattern': [{}, None], 'alpha_pattern': [{}, None],
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
    family = family_of(checkpoint.get('hf_config'), checkpoint['model_args'])
    adapters = swap_nanochat(adapters, family, checkpoint['model_args'])
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
    template = template_of_record(checkpoint)
    if checkpoint.get('is_their_template'):
        template = None  # that of the base
    origin = {'base': lora['base'], 'family': family, 'sha256': lora['sha256'], 'quantize': lora['quantize'],
              'tokenizer': spec_of(checkpoint), 'template': template}
    try:
        os.makedirs(folder, exist_ok=True)
        for name, value in ((CONFIG, config), (ORIGIN, origin)):
            with replacing(os.path.join(folder, name)) as f:
                f.write(json.dumps(value, indent=2).encode())
        write_safetensors(os.path.join(folder, TENSORS), tensors)
    except OSError as e:
        raise ValueError(f'{folder} could not be written: {e.strerror or e}') from None


def family_of(hf_config, model_args):
    """Return the model_type of the Hugging Face form of a base. hf_config: its config.json, or None."""
    return hf_config['model_type'] if hf_config else KIND_OF[model_args.get('preset', 'gpt2')]


def swap_nanochat(adapters, family, model_args):
    """
    Translate the adapters of a NanoChat to its projections and rotation, or back; see swap_halves().
    Those of other families stay as they are.
    """
    if family != 'nanochat':
        return adapters
    head_dim = head_dim_of(model_args)
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
    or None, 'family': model_type of the form in which they are stored, or None, 'quantize': how they were
    rounded, 'tokenizer' and 'template': those of the data, or None}.
    """
    record = {'sha256': None, 'family': None, 'quantize': 'none', 'tokenizer': None, 'template': None}
    path = os.path.join(folder, ORIGIN)
    if os.path.exists(path):  # peft writes none
        record |= read_json(path)
        record['template'] = template_of_record(record.pop('habits', record))  # older folders have habits
    name = read_json(os.path.join(folder, CONFIG)).get('base_model_name_or_path')
    return {**record, 'base': name or 'an unknown base'}


def read_adapter(folder):
    """
    Read the adapters in a folder, ours or peft's: (matrices as adapters_of() returns them, embeddings_of()
    what was trained too, scale). Raises ValueError if merged() cannot add them.
    """
    config = read_json(os.path.join(folder, CONFIG))
    check_keys(config, SUPPORTED, f'{folder}/{CONFIG}')
    if not {'r', 'lora_alpha'} <= config.keys():
        raise ValueError(f"{folder}/{CONFIG} has no r and lora_alpha: it is not of peft's LoRA")
    lora = LoRAConfig(lora_rank=config['r'], lora_alpha=config['lora_alpha'],
                      lora_rs=config.get('use_rslora', False))
    matrices = {}
    embeddings = {}
    tensors = read_safetensors(os.path.join(folder, TENSORS))
    for name, tensor in tensors.items():
        module = name.removeprefix('base_model.model.').removesuffix('.weight')
        place = re.fullmatch(r'(?:transformer\.h|model\.layers)\.(\d+)\.(?:self_)?(.+)\.lora_([AB])', module)
        if module.endswith('.original_module'):  # of the base, beside what peft has trained
            continue
        module = module.removesuffix('.modules_to_save')
        if module in SAVED:
            embeddings[SAVED[module]] = tensor
        elif place is None:
            raise ValueError(f'{folder}: {name} is not supported, only adapters of matrices in '
                             'blocks, and complete embeddings and heads')
        elif place[3] == 'A':
            B = tensors.get(name.replace('lora_A', 'lora_B'))
            if B is None or not tensor.dim() == B.dim() == 2 or not len(tensor) == B.size(1) == config['r']:
                raise ValueError(f'{folder}: {name} and its lora_B are not of the rank r={config["r"]!r}')
            matrices[int(place[1]), place[2]] = tensor.float(), B.float()
    if not (matrices or embeddings):
        raise ValueError(f'{folder}/{TENSORS} has no adapters')
    return matrices, embeddings, lora.scale()
