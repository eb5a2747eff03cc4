"""Write a model and its tokenizer as one GGUF file, which llama.cpp loads, with its package gguf."""

import json
import os

import torch

from hotloop.data.bpe import GPT2_SPLIT
from hotloop.system.files import optional, replacing
from hotloop.weights.export import differences, hf_tensors
from hotloop.weights.export_tokenizer import tokenizer_files
from hotloop.weights.families import CONV1D, SETTINGS

BLOCK = 32  # numbers of Q8_0 that share a scale
TYPES = {torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16'}  # as the package gguf names them
UNUSED, TOKEN_TYPES = 5, {None: 1, True: 3, False: 4}  # of ordinary, special and other added tokens

# settings of GPTConfig that may have any value, in all architectures and in some
SIZES = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_ff', 'norm_eps', 'tie',
         'rope_base', 'rope_factor')
MORE_SIZES = {'llama': ('head_dim', 'rope_context'), 'qwen3': ('head_dim',)}
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r'|\s*[\r\n]+|\s+(?!\S)|\s+')
# {how words are split, step by step: its name in llama.cpp}
SPLITS = {(GPT2_SPLIT,): 'gpt-2', ('digits', GPT2_SPLIT): 'smollm', (LLAMA3_SPLIT,): 'llama-bpe',
          (LLAMA3_SPLIT.replace('{1,3}', ''),): 'qwen2'}


def export_gguf(model, tokenizer, template, path, dtype, quantize):
    """
    Write a GPT, its tokenizer and its chat template ('none': no template) to a new file. Matrices
    are in the dtype or, if quantize, in Q8_0. Raises ValueError if llama.cpp has no such model.
    """
    kind = architecture(model.config)
    shape = shape_of(model.config, kind, tokenizer.n_vocab)
    metadata = {f'{kind}.{key}': value for key, value in shape.items()}
    metadata |= vocabulary(tokenizer, template, model.config.block_size)
    gguf = optional('gguf', 'writes GGUF files')
    used = gguf.GGMLQuantizationType['Q8_0' if quantize else TYPES[dtype]]
    if os.path.lexists(path):
        raise FileExistsError('File exists')
    with replacing(path) as f:
        writer = gguf.GGUFWriter(f.name, kind)
        writer.add_name(os.path.basename(path).removesuffix('.gguf'))
        writer.add_file_type(gguf.LlamaFileType['ALL_F32' if used.name == 'F32' else f'MOSTLY_{used.name}'])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
               str: writer.add_string, list: writer.add_array}
        for key, value in metadata.items():
            add[type(value)](key, value)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], model.config.n_layer)
        for name, tensor in gguf_tensors(model, kind, tokenizer.n_vocab).items():
            stored = used
            if quantize and tensor.size(-1) % BLOCK:
                stored = gguf.GGMLQuantizationType[TYPES[dtype]]
            if tensor.dim() == 1 or name == 'transformer.wpe.weight':  # llama.cpp adds these in float32.
                stored = gguf.GGMLQuantizationType.F32
            data = gguf.quantize(tensor.float().contiguous().numpy(), stored)
            writer.add_tensor(names.get_name(name, ('.weight', '.bias')), data, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    print(f'wrote {path}: {kind}, {used.name}')


def architecture(config):
    """Choose the architecture of a resolved GPTConfig. Raises ValueError if llama.cpp has none."""
    kind = 'qwen3' if config.qk_norm else 'qwen2' if config.qkv_bias else 'llama'
    if config.position == 'learned':
        kind = 'gpt2'
    settings = SETTINGS[kind] | {name: getattr(config, name) for name in SIZES + MORE_SIZES.get(kind, ())}
    if kind == 'gpt2' and config.mlp == 'gelu_tanh':
        settings['mlp'] = config.mlp
    differing = differences(config, type(config)(**settings).resolved(), kind)
    if differing:
        raise ValueError(f'only GPT-2, Llama, Qwen2 and Qwen3 are written for llama.cpp; its {kind} '
                         f'differs in {", ".join(differing)}; a run from scratch needs --mixer=attention '
                         '--x0_mix=False and --preset=gpt2 or --preset=qwen3')
    return kind


def shape_of(config, kind, n_vocab):
    """Return the metadata of a model's shape, without the prefix of its architecture."""
    shape = {'vocab_size': n_vocab, 'context_length': config.block_size, 'embedding_length': config.n_embd,
             'block_count': config.n_layer, 'feed_forward_length': config.n_ff,
             'attention.head_count': config.n_head, 'attention.head_count_kv': config.n_kv_head}
    if kind == 'gpt2':
        return shape | {'attention.layer_norm_epsilon': config.norm_eps}
    for key in ('attention.key_length', 'attention.value_length', 'rope.dimension_count'):
        shape[key] = config.head_dim
    shape |= {'attention.layer_norm_rms_epsilon': config.norm_eps, 'rope.freq_base': config.rope_base}
    if config.rope_factor != 1 and config.rope_context is None:  # With a context, a tensor has the factors.
        shape |= {'rope.scaling.type': 'linear', 'rope.scaling.factor': config.rope_factor}
    return shape


def gguf_tensors(model, kind, n_vocab):
    """Return {name in transformers: tensor as llama.cpp has it}, without the ids that pad the vocabulary."""
    c = model.config
    tensors = hf_tensors(model, kind)
    for name, tensor in tensors.items():
        if kind == 'gpt2' and name.endswith(CONV1D):
            tensors[name] = tensor.t()
        elif name.endswith(('wte.weight', 'embed_tokens.weight', 'lm_head.weight')):
            tensors[name] = tensor[:n_vocab]
        elif kind == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight')):
            # Its rotation turns channels 2i and 2i + 1 together, ours i and i + D/2.
            tensors[name] = tensor.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)
    if c.rope_context is not None:
        base = c.rope_base ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        # The angle at position 1 is the frequency, which llama.cpp divides by these factors.
        tensors['rope_freqs.weight'] = base / torch.atan2(model.sin[1, 0].double(), model.cos[1, 0].double())
    return tensors


def vocabulary(tokenizer, template, max_length):
    """Return the metadata of a tokenizer and its chat template. Raises ValueError if ids would differ."""
    files = tokenizer_files(tokenizer, template, max_length)
    file = files.get('tokenizer.json') or '{}'
    file = json.loads(file) if isinstance(file, str) else file
    split = SPLITS.get(steps_of(file.get('pre_tokenizer')))
    if not split or tokenizer.eot is None or file['normalizer'] not in (None, {'type': 'NFC'}):
        raise ValueError(f'a GGUF file cannot hold this {tokenizer.spec()["kind"]} tokenizer, only bytes and '
                         'byte-level BPEs with an end of text and a split of words that llama.cpp names: '
                         f'{", ".join(SPLITS.values())}')
    tokens = [f'[unused {i}]' for i in range(tokenizer.n_vocab)]
    types = [UNUSED] * tokenizer.n_vocab
    special = {added['content']: added['special'] for added in file['added_tokens']}
    ids = file['model']['vocab'] | {added['content']: added['id'] for added in file['added_tokens']}
    for token, i in ids.items():
        if i < tokenizer.n_vocab:
            tokens[i] = token
            types[i] = TOKEN_TYPES[special.get(token)]
    merges = [pair if isinstance(pair, str) else ' '.join(pair) for pair in file['model']['merges']]
    if not merges:  # A file holds no empty list, and no byte is spelled by these letters.
        merges = ['\u2581 \u2581']
    bos = tokenizer.eot if tokenizer.bos is None else tokenizer.bos  # Without one, llama.cpp takes id 11.
    made = {'ggml.model': 'gpt2', 'ggml.pre': split, 'ggml.tokens': tokens, 'ggml.token_type': types,
            'ggml.merges': merges, 'ggml.eos_token_id': tokenizer.eot, 'ggml.bos_token_id': bos,
            'ggml.add_bos_token': tokenizer.bos is not None}
    stops = {*files['generation_config.json']['eos_token_id']} - {tokenizer.eot}
    if stops:
        made['ggml.eot_token_id'] = max(stops)  # ends an answer, too
    jinja = files['tokenizer_config.json'].get('chat_template')
    if isinstance(jinja, list):  # several, by name
        jinja = next((one['template'] for one in jinja if one['name'] == 'default'), None)
    if jinja:
        made['chat_template'] = jinja
    return {f'tokenizer.{key}': value for key, value in made.items()}


def steps_of(pre_tokenizer):
    """Describe, step by step, how the pre-tokenizer of a tokenizer.json splits words."""
    steps = []
    for step in (pre_tokenizer or {}).get('pretokenizers', [pre_tokenizer or {'type': 'none'}]):
        if step['type'] == 'Digits' and step['individual_digits']:
            steps.append('digits')
        elif step['type'] != 'ByteLevel':
            steps.append(step.get('pattern', {}).get('Regex', step['type']))
        elif step.get('use_regex', True):
            steps.append(GPT2_SPLIT)
    return tuple(steps)
