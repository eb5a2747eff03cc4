"""Translate families of Hugging Face: config.json to settings of GPTConfig, and names of weights."""

import math
import re

import torch

MLP_OF = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}
LLAMA = dict(position='rope', norm='rmsnorm_weight', mlp='swiglu', bias=False, embed_norm=False)
GEMMA = LLAMA | dict(norm='rmsnorm_offset', mlp='geglu', post_norm=True)
# {model_type: settings of GPTConfig that all its models share}
SETTINGS = {'gpt2': dict(bias=True), 'llama': LLAMA, 'mistral': LLAMA,
            'qwen2': LLAMA | dict(qkv_bias=True), 'qwen3': LLAMA | dict(qk_norm=True),
            'gemma2': GEMMA, 'gemma3_text': GEMMA | dict(qk_norm=True),
            'nanochat': LLAMA | dict(norm='rmsnorm', mlp='relu2', qk_norm=True, embed_norm=True)}

# The keys of a config.json that change what transformers computes and that have no setting here,
# each with the values that GPT computes; a missing key has the first one.
LLAMA_KEYS = {'hidden_act': ['silu'], 'attention_bias': [False], 'mlp_bias': [False],
              'partial_rotary_factor': [None, 1]}
GEMMA_KEYS = {'hidden_activation': ['gelu_pytorch_tanh'], 'attention_bias': [False],
              'use_bidirectional_attention': [None, False]}
GPT2_KEYS = {'activation_function': list(MLP_OF), 'scale_attn_weights': [True],
             'scale_attn_by_inverse_layer_idx': [False], 'add_cross_attention': [False]}
EVERY_KEYS = {'quantization_config': [None], 'quantization': [None],  # the latter is MLX's
              'auto_map': [None], 'is_causal': [True]}
ROPE_KEYS = {'rope_type': ['default', 'linear', 'llama3'], 'partial_rotary_factor': [None, 1],
             'low_freq_factor': [1], 'high_freq_factor': [4]}
# all other families have LLAMA_KEYS
SUPPORTED = {'gpt2': GPT2_KEYS, 'gemma2': GEMMA_KEYS, 'gemma3_text': GEMMA_KEYS,
             'nanochat': LLAMA_KEYS | {'hidden_act': ['relu2']}}

# {setting of GPTConfig: its key in a config.json} of GPT-2, and of all other families
GPT2_NAMES = {'n_layer': 'n_layer', 'n_head': 'n_head', 'n_embd': 'n_embd', 'n_ff': 'n_inner',
              'block_size': 'n_positions', 'vocab_size': 'vocab_size', 'norm_eps': 'layer_norm_epsilon',
              'tie': 'tie_word_embeddings'}
LLAMA_NAMES = {'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
               'n_kv_head': 'num_key_value_heads', 'n_embd': 'hidden_size', 'head_dim': 'head_dim',
               'n_ff': 'intermediate_size', 'block_size': 'max_position_embeddings',
               'vocab_size': 'vocab_size', 'norm_eps': 'rms_norm_eps', 'tie': 'tie_word_embeddings'}
NAMES = dict.fromkeys(SETTINGS, LLAMA_NAMES) | {'gpt2': GPT2_NAMES}

# what transformers assumes for keys that a config.json may lack
EVERY_DEFAULTS = {'n_inner': None, 'head_dim': None, 'tie_word_embeddings': False}
GEMMA_DEFAULTS = {'head_dim': 256, 'tie_word_embeddings': True, 'query_pre_attn_scalar': 256}
DEFAULTS = {
    'gpt2': {'n_positions': 1024, 'activation_function': 'gelu_new', 'layer_norm_epsilon': 1e-5,
             'tie_word_embeddings': True},
    'llama': {'num_key_value_heads': None},  # as many as attention heads
    'mistral': {'sliding_window': 4096},
    'qwen3': {'head_dim': 128},
    'nanochat': {'num_key_value_heads': None, 'final_logit_softcapping': 15.0},
    'gemma2': GEMMA_DEFAULTS | {'sliding_window': 4096, 'sliding_window_pattern': 2,
                                'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
    'gemma3_text': GEMMA_DEFAULTS | {'sliding_window': 4096, 'sliding_window_pattern': 6,
                                     'rope_theta': 1e6, 'rope_local_base_freq': 1e4}}
LETTERS = {'sliding_attention': 'S', 'full_attention': 'L'}  # of GPTConfig.window_pattern

# {module of a block: the modules of Hugging Face that it holds, one after the other}
BLOCK = {'ln_1': ('input_layernorm',), 'ln_2': ('post_attention_layernorm',),
         'attn.c_attn': ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
         'attn.c_proj': ('self_attn.o_proj',),
         'attn.q_norm': ('self_attn.q_norm',), 'attn.k_norm': ('self_attn.k_norm',),
         'mlp.c_fc': ('mlp.up_proj', 'mlp.gate_proj'), 'mlp.c_proj': ('mlp.down_proj',)}
GEMMA_BLOCK = BLOCK | {'ln_1_post': ('post_attention_layernorm',),
                       'ln_2': ('pre_feedforward_layernorm',),
                       'ln_2_post': ('post_feedforward_layernorm',)}
BLOCKS = dict.fromkeys(SETTINGS, BLOCK) | {
    'gemma2': GEMMA_BLOCK, 'gemma3_text': GEMMA_BLOCK,
    'nanochat': BLOCK | {'mlp.c_fc': ('mlp.fc1',), 'mlp.c_proj': ('mlp.fc2',)}}
OUTSIDE = {'model.embed_tokens': 'transformer.wte', 'model.norm': 'transformer.ln_f', 'lm_head': 'lm_head'}
# {preset: model_type of the Hugging Face form of a new model}
KIND_OF = {'gpt2': 'gpt2', 'modern': 'nanochat', 'hybrid': 'nanochat', 'qwen3': 'qwen3'}
CONV1D = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')


# -----------------------------------------------------------------------------
# settings

def model_args_from(config, path):
    """
    Translate a config.json of transformers 4 or 5 to settings of GPTConfig, as model_args. path:
    for messages. Raises ValueError naming an unsupported key.
    """
    kind = config.get('model_type')
    check_keys({'model_type': kind}, {'model_type': list(SETTINGS)}, path)
    config = {**EVERY_DEFAULTS, **DEFAULTS.get(kind, {}), **config}
    check_keys(config, {**EVERY_KEYS, **SUPPORTED.get(kind, LLAMA_KEYS)}, path)
    settings = dict(SETTINGS[kind])
    try:
        for ours, theirs in NAMES[kind].items():
            settings[ours] = number_of(config, theirs, ours, path)
        if kind == 'gpt2':
            return settings | {'mlp': MLP_OF[config['activation_function']]}
        if kind.startswith('gemma'):  # transformers' Gemma 3 has one of the soft-caps
            settings |= dict(embed_scale=math.sqrt(config['hidden_size']),
                             query_scale=config['query_pre_attn_scalar'] ** -0.5,
                             attn_softcap=(kind == 'gemma2' and config['attn_logit_softcapping']) or 0.0)
        if kind.startswith('gemma') or kind == 'nanochat':
            settings['softcap'] = config.get('final_logit_softcapping') or 0.0
        pattern = pattern_of(config, kind, path)
        if 'S' in pattern:
            settings |= {'window': config['sliding_window'], 'window_pattern': pattern}
        return settings | rope_of(config, 'S' in pattern and kind == 'gemma3_text', path)
    except KeyError as e:
        raise ValueError(f'{path} has no {e}') from None
    except (AttributeError, TypeError, ZeroDivisionError) as e:  # a number that is a text, or null
        raise ValueError(f'{path} has a value of the wrong kind: {e}') from e


def number_of(config, key, ours, path):
    """Return the number of a key, whose setting is `ours`. Raises ValueError if it is none."""
    value = config[key]
    if ours == 'tie':
        return bool(value)
    is_number = isinstance(value, int) or (ours == 'norm_eps' and isinstance(value, float))
    if not is_number and not (value is None and ours in ('n_kv_head', 'head_dim', 'n_ff')):
        raise ValueError(f'{path}: {key}={value!r} is not a number of its kind')
    return value


def check_keys(config, supported, path):
    """Raise ValueError if a key has none of its supported values; a missing key has the first one."""
    for key, values in supported.items():
        if config.get(key, values[0]) not in values:
            only = ', '.join(str(value) for value in values if value is not None) or 'none'
            raise ValueError(f'{path}: {key}={str(config[key])[:80]} is not supported, only {only}')


def pattern_of(config, kind, path):
    """Return a letter for each layer, or for a few that repeat: S for a sliding window, L for none."""
    is_off = kind.startswith('qwen') and not config.get('use_sliding_window')
    if config.get('sliding_window') is None or kind in ('llama', 'nanochat') or is_off:
        return 'L'
    if config.get('layer_types'):
        for name in config['layer_types']:
            check_keys({'layer_types': name}, {'layer_types': list(LETTERS)}, path)
        return ''.join(LETTERS[name] for name in config['layer_types'])
    if kind == 'mistral':
        return 'S'
    if kind.startswith('qwen'):
        first = min(config.get('max_window_layers', 28), config['num_hidden_layers'])
        return 'L' * first + 'S' * (config['num_hidden_layers'] - first)
    return 'S' * (config['sliding_window_pattern'] - 1) + 'L'


def rope_of(config, has_local, path):
    """Read rotary settings. has_local: layers with a window have their own base (Gemma 3)."""
    # The first is a key of transformers 4, the second of 5.
    rope = config.get('rope_scaling') or config.get('rope_parameters') or {}
    rope = {'rope_theta': config.get('rope_theta', 10000.0), **rope, **rope.get('full_attention', {})}
    rope.setdefault('rope_type', rope.get('type', 'default'))
    check_keys(rope, ROPE_KEYS, path)
    settings = {'rope_base': float(rope['rope_theta'])}
    if rope['rope_type'] != 'default':
        settings['rope_factor'] = float(rope['factor'])
    if rope['rope_type'] == 'llama3':
        settings['rope_context'] = rope['original_max_position_embeddings']
    if has_local:
        local = rope.get('sliding_attention', {'rope_theta': config['rope_local_base_freq']})
        check_keys(local, {'rope_type': ['default']}, path)
        settings['rope_local_base'] = float(local['rope_theta'])
    return settings


# -----------------------------------------------------------------------------
# weights

def swap_halves(weights, head_dim):
    """
    Swap the halves of each query and key head in the weights of a GPT, {name: tensor}: NanoChat's
    rotation turns the other way. The function is its own inverse.
    """
    for name, weight in weights.items():
        if name.endswith('attn.c_attn.weight'):
            n_query = weights[name.replace('c_attn', 'c_proj')].size(1)
            n_rotated = (len(weight) + n_query) // 2  # rows; the rest are values
            weights[name] = torch.cat((swap_rows(weight[:n_rotated], head_dim), weight[n_rotated:]))


def swap_rows(rows, head_dim):
    """Swap the halves of each head in rows of queries or keys."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)


def head_dim_of(model_args):
    return model_args['head_dim'] or model_args['n_embd'] // model_args['n_head']


def our_name(name, kind):
    """
    Translate the name of a weight to (our name, its place among those that are joined there); an
    unknown name stays as it is.
    """
    if kind == 'gpt2':
        return (name if name.startswith(('transformer.', 'lm_head.')) else f'transformer.{name}'), 0
    if not name.startswith(('model.', 'lm_head.')):  # saved without its head
        name = f'model.{name}'
    layer = re.fullmatch(r'model\.layers\.(\d+)\.(.+)\.(weight|bias)', name)
    if layer:
        for ours, theirs in BLOCKS[kind].items():
            if layer[2] in theirs:
                return f'transformer.h.{layer[1]}.{ours}.{layer[3]}', theirs.index(layer[2])
    module, _, suffix = name.rpartition('.')
    return f'{OUTSIDE.get(module, module)}.{suffix}', 0
