"""Write a model and its tokenizer as one GGUF file (version 3), which llama.cpp loads."""

import json
import os
import re
import struct
import sys

import torch

from hotloop.data.bpe import GPT2_SPLIT
from hotloop.system.files import replacing
from hotloop.weights.export import config_json, hf_tensors
from hotloop.weights.export_tokenizer import tokenizer_files
from hotloop.weights.families import CONV1D

ALIGNMENT = 32  # each tensor begins at a multiple of as many bytes
BLOCK = 32  # numbers of q8_0 that share a scale
# {dtype: (its name, its type of tensors, its type of files)}; int8 stands for q8_0
DTYPES = {torch.float32: ('float32', 0, 0), torch.float16: ('float16', 1, 1),
          torch.bfloat16: ('bfloat16', 30, 32), torch.int8: ('q8_0', 8, 7)}
FORMATS = {bool: (7, '?'), int: (4, 'I'), float: (6, 'f')}  # types of metadata, and as struct has them
INT32, STRING, ARRAY = 5, 8, 9  # more types of metadata
UNUSED, TOKEN_TYPES = 5, {None: 1, True: 3, False: 4}  # of ordinary, special and other added tokens

# {model_type of transformers: architecture of llama.cpp that computes the same, if it has no windows}
ARCHITECTURES = {'gpt2': 'gpt2', 'llama': 'llama', 'mistral': 'llama', 'qwen2': 'qwen2', 'qwen3': 'qwen3'}
# {module in transformers: module in GGUF}
NAMES = {
    'transformer.wte': 'token_embd', 'transformer.wpe': 'position_embd', 'transformer.ln_f': 'output_norm',
    'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output',
    'ln_1': 'attn_norm', 'attn.c_attn': 'attn_qkv', 'attn.c_proj': 'attn_output', 'ln_2': 'ffn_norm',
    'mlp.c_fc': 'ffn_up', 'mlp.c_proj': 'ffn_down', 'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output', 'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm',
    'post_attention_layernorm': 'ffn_norm', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down'}
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r'|\s*[\r\n]+|\s+(?!\S)|\s+')
# {how words are split, step by step: its name in llama.cpp}
SPLITS = {(GPT2_SPLIT,): 'gpt-2', ('digits', GPT2_SPLIT): 'smollm', (LLAMA3_SPLIT,): 'llama-bpe',
          (LLAMA3_SPLIT.replace('{1,3}', ''),): 'qwen2'}


def export_gguf(model, tokenizer, template, path, dtype, quantize, hf_config=None):
    """
    Write a GPT, its tokenizer and its chat template ('none': no template) to a new file. Matrices
    are in the dtype or, if quantize, in q8_0. hf_config: as in export(). Raises ValueError if
    llama.cpp has no such model.
    """
    kind = architecture(model.config, hf_config)
    named, _, file_type = DTYPES[torch.int8 if quantize else dtype]
    metadata = {'general.architecture': kind, 'general.name': os.path.basename(path).removesuffix('.gguf'),
                'general.file_type': file_type, 'general.quantization_version': 2}
    shape = shape_of(model.config, kind, tokenizer.n_vocab)
    metadata |= {f'{kind}.{key}': value for key, value in shape.items()}
    metadata |= vocabulary(tokenizer, template, model.config.block_size)
    tensors = gguf_tensors(model, kind, tokenizer.n_vocab)
    if os.path.lexists(path):
        raise FileExistsError('File exists')
    with replacing(path) as f:
        write_gguf(f, metadata, tensors, dtype, quantize)
    print(f'wrote {path}: {kind}, {named}')
    if model.config.mlp == 'gelu':
        print('note: llama.cpp approximates GELU with tanh, so its logits differ slightly', file=sys.stderr)


def architecture(config, hf_config):
    """Choose the architecture of a resolved GPTConfig. Raises ValueError if llama.cpp has none."""
    kind = config_json(config, hf_config)['model_type']
    if kind not in ARCHITECTURES or config.window is not None:
        raise ValueError(f'llama.cpp has no such model: {kind} with window={config.window}; a run from '
                         'scratch needs --preset=gpt2 or --preset=qwen3')
    return ARCHITECTURES[kind]


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
    """Return {name in GGUF: tensor} of a GPT, without the ids that pad its vocabulary."""
    c = model.config
    tensors = {}
    for name, tensor in hf_tensors(model, kind).items():
        module, _, suffix = name.rpartition('.')
        layer = re.fullmatch(r'(?:transformer\.h|model\.layers)\.(\d+)\.(.+)', module)
        theirs = f'blk.{layer[1]}.{NAMES[layer[2]]}' if layer else NAMES[module]
        if kind == 'gpt2' and name.endswith(CONV1D):
            tensor = tensor.t()
        elif theirs in ('token_embd', 'output'):
            tensor = tensor[:n_vocab]
        elif kind == 'llama' and theirs.endswith(('attn_q', 'attn_k')):
            # Its rotation turns channels 2i and 2i + 1 together, ours i and i + D/2.
            tensor = tensor.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        tensors[f'{theirs}.{suffix}'] = tensor
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
    if file['normalizer']:
        print('note: llama.cpp does not compose characters to NFC: decomposed ones have other ids',
              file=sys.stderr)
    tokens = [f'[unused {i}]' for i in range(tokenizer.n_vocab)]
    types = [UNUSED] * tokenizer.n_vocab
    special = {added['content']: added['special'] for added in file['added_tokens']}
    ids = file['model']['vocab'] | {added['content']: added['id'] for added in file['added_tokens']}
    for token, i in ids.items():
        if i < tokenizer.n_vocab:
            tokens[i] = token
            types[i] = TOKEN_TYPES[special.get(token)]
    merges = [pair if isinstance(pair, str) else ' '.join(pair) for pair in file['model']['merges']]
    bos = tokenizer.eot if tokenizer.bos is None else tokenizer.bos  # Without one, llama.cpp takes id 11.
    made = {'ggml.model': 'gpt2', 'ggml.pre': split, 'ggml.tokens': tokens, 'ggml.token_type': types,
            'ggml.merges': merges, 'ggml.eos_token_id': tokenizer.eot, 'ggml.bos_token_id': bos,
            'ggml.add_bos_token': tokenizer.bos is not None}
    stops = {*files['generation_config.json']['eos_token_id']} - {tokenizer.eot}
    if stops:
        made['ggml.eot_token_id'] = max(stops)  # ends an answer, too
    if 'chat_template' in files['tokenizer_config.json']:
        made['chat_template'] = files['tokenizer_config.json']['chat_template']
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


def write_gguf(f, metadata, tensors, dtype, quantize):
    """Write a header, metadata, the place of each tensor with its last dimension first, and the tensors."""
    head = b'GGUF' + struct.pack('<IQQ', 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += string(key) + packed(value)
    encoded = []
    start = 0
    for name, tensor in tensors.items():
        used = torch.int8 if quantize and tensor.size(-1) % BLOCK == 0 else dtype
        if tensor.dim() == 1 or name == 'position_embd.weight':  # llama.cpp adds these in float32.
            used = torch.float32
        shape = tensor.shape[::-1]
        head += string(name) + struct.pack(f'<I{len(shape)}Q', len(shape), *shape)
        head += struct.pack('<IQ', DTYPES[used][1], start)
        encoded.append(q8_0(tensor) if used == torch.int8 else tensor.to(used))
        start += encoded[-1].nbytes + -encoded[-1].nbytes % ALIGNMENT
    f.write(head + bytes(-len(head) % ALIGNMENT))
    for tensor in encoded:
        f.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
        f.write(bytes(-tensor.nbytes % ALIGNMENT))


def q8_0(tensor):
    """Round to blocks of 34 bytes: a scale in float16 and 32 numbers in int8."""
    blocks = tensor.float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    numbers = (blocks / scales.clamp_min(1e-30)).round().to(torch.int8)
    return torch.cat((scales.half().view(torch.int8), numbers), dim=1)


def packed(value):
    """Return the bytes of a value of metadata, after those of its type."""
    if type(value) in FORMATS:
        kind, form = FORMATS[type(value)]
        return struct.pack(f'<I{form}', kind, value)
    if isinstance(value, str):
        return struct.pack('<I', STRING) + string(value)
    if value and isinstance(value[0], int):
        return struct.pack(f'<IIQ{len(value)}i', ARRAY, INT32, len(value), *value)
    return struct.pack('<IIQ', ARRAY, STRING, len(value)) + b''.join(map(string, value))


def string(text):
    data = text.encode()
    return struct.pack('<Q', len(data)) + data
