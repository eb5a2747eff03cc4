"""GGUF files: llama.cpp computes the same and reads the same ids, and what it lacks is refused."""

import json
import random

import pytest
import requests
import torch
from conftest import all_logits, error_of
from test_export import BASE, CHATTED, MIXED, SCRATCH, family, own, redrawn
from test_sample import CHARS, gpt, main, write

from hotloop.data.bpe import GPT2_SPLIT
from hotloop.data.chat import CHATS
from hotloop.data.encode import prompt_ids
from hotloop.data.tokenizer import ByteTokenizer, CharTokenizer, HFTokenizer
from hotloop.inference.texts import turn_ids
from hotloop.weights.gguf import LLAMA3_SPLIT, architecture, export_gguf, vocabulary
from model import GPTConfig

gguf = pytest.importorskip('gguf', reason='writes the files')

SHAPES = ('gpt2', 'gpt2 with biases', 'preset qwen3', 'qwen3, tied')
IMPORTED = ('llama 2', 'llama 3', 'linear', 'smollm2', 'mistral 0.3', 'qwen2', 'qwen3')
REFUSED = [(dict(preset='modern'), ('mlp=relu2', 'key_shift=True', 'x0_mix=True', 'softcap=15.0')),
           (dict(window=5), ('window=5',)), (dict(mlp='relu2'), ('mlp=relu2',)),
           (dict(preset='qwen3', mixer='CA'), ('mixer=CA',)), (dict(head_dim=16), ('head_dim=16',)),
           (dict(preset='qwen3', rope_factor=8.0, rope_context=8), ('rope_context=8',))]


def test_each_tensor_has_the_type_that_llama_cpp_computes_with(tmp_path):
    """Vectors and learned positions stay in float32, and a matrix of 40 columns in float16."""
    model = redrawn(BASE | dict(n_ff=40, bias=True))
    for number, size in ((1, 'F16'), (7, 'Q8_0')):
        path = str(tmp_path / f'{size}.gguf')
        export_gguf(model, ByteTokenizer(), 'none', path, torch.float16, size == 'Q8_0')
        reader = gguf.GGUFReader(path)
        assert reader.fields['general.file_type'].contents() == number
        assert reader.fields['gpt2.context_length'].contents() == 16
        for tensor in reader.tensors:
            expected = 'F16' if 'ffn_down' in tensor.name else size
            if len(tensor.shape) == 1 or tensor.name == 'position_embd.weight':
                expected = 'F32'
            assert tensor.tensor_type.name == expected, tensor.name


@pytest.mark.parametrize('settings, words', REFUSED)
def test_a_model_that_llama_cpp_lacks_names_its_settings(settings, words):
    error = error_of(architecture, GPTConfig(**BASE | settings).resolved())
    assert 'are written for llama.cpp' in error and all(word in error for word in words)


def split(pattern):
    levels = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
    regex = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
    return {'type': 'Sequence', 'pretokenizers': [regex, levels]}


LEVELS = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
DIGITS = {'type': 'Sequence', 'pretokenizers': [{'type': 'Digits', 'individual_digits': True}, LEVELS]}
STEPS = {'gpt-2': LEVELS, 'smollm': DIGITS, 'llama-bpe': split(LLAMA3_SPLIT),
         'qwen2': split(LLAMA3_SPLIT.replace('{1,3}', ''))}
# texts on which the four differ, or that a faulty reader would cut elsewhere
ODD = ['a ', ' \n x \n', 'x   \n', 'a\n   y', '\r\n\r\n x', '1234567 89', "I'M I'Ve don’t 'S''s", '!!\n\n\n',
       'a\xa0\xa0b', '\u2028x\x1cy\u0085\u200b\ufeff', 'ⅫⅣ½٣٤٥٦٧𝟎', 'e\u0301\u0301 \u0301', '👨‍👩‍👧🇩🇪',
       '\0\0\0\x01', 'a<|endoftext|> b', '<|endoftext', '[unused 3]', 'ſKİı']


@pytest.mark.parametrize('name, steps', [*STEPS.items(), ('gpt-2', split(GPT2_SPLIT))])
def test_a_tokenizer_json_keeps_types_ends_and_template(name, steps):
    """Also ids that no token has, special and added ones, an end of answers, a first token, and NFC."""
    pytest.importorskip('tokenizers')
    file = from_own(pre_tokenizer=steps, normalizer={'type': 'NFC'})
    first = len(file['model']['vocab'])
    flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
    added = [('<s>', True), ('<|im_end|>', True), ('ab ab', False)]
    for i, (content, special) in enumerate(added, first + 1):
        file['model']['vocab'][content] = i
        file['added_tokens'].append({'id': i, 'content': content, 'special': special, **flags})
    tokenizer = HFTokenizer(json.dumps(file), eot=first - 1)
    tokenizer.bos = first + 1
    values = vocabulary(tokenizer, 'chatml', 8)
    made = {key.removeprefix('tokenizer.'): value for key, value in values.items()}
    assert made['ggml.pre'] == name
    assert made['ggml.tokens'][first - 1:] == ['<|endoftext|>', f'[unused {first}]', *(c for c, _ in added)]
    assert made['ggml.token_type'][first - 2:] == [1, 3, 5, 3, 3, 4]
    assert (made['ggml.bos_token_id'], made['ggml.add_bos_token']) == (first + 1, True)
    assert (made['ggml.eos_token_id'], made['ggml.eot_token_id']) == (first - 1, first + 2)
    assert "message['role'] == 'user'" in made['chat_template']
    several = [{'name': 'tools', 'template': 'a'}, {'name': 'default', 'template': 'b'}]  # of another model
    tokenizer.settings['kept'] = {'chat_template': several}
    assert vocabulary(tokenizer, None, 8)['tokenizer.chat_template'] == 'b'
    tokenizer.settings['kept'] = {'chat_template': several[:1]}
    assert 'tokenizer.chat_template' not in vocabulary(tokenizer, None, 8)


def from_own(**changes):
    """A tokenizer.json of our own BPE with other parts."""
    from hotloop.weights.export_tokenizer import tokenizer_json
    return {**tokenizer_json(own()), **changes}


def test_a_tokenizer_that_llama_cpp_lacks_is_refused():
    pytest.importorskip('tokenizers')
    odd = HFTokenizer(json.dumps(from_own(pre_tokenizer=split(r'\s+|\S+'))), eot=400)
    lower = HFTokenizer(json.dumps(from_own(normalizer={'type': 'Lowercase'})), eot=400)
    endless = HFTokenizer(json.dumps(from_own()))
    for tokenizer in (CharTokenizer(CHARS, eot=True), odd, lower, endless, own(pattern=r'\s+|\S+')):
        error = error_of(vocabulary, tokenizer, 'none', 8)
        assert 'a GGUF file cannot hold this' in error and 'gpt-2' in error


def test_the_command_writes_one_file(tmp_path, capsys):
    """An existing file is left alone; int8 in a folder is refused."""
    run, path = tmp_path / 'best.pt', tmp_path / 'model.gguf'
    write(run, gpt(257), ByteTokenizer())
    assert main(init_from=run, export=path, quantize='int8') == 0
    assert capsys.readouterr().out == f'wrote {path}: gpt2, Q8_0\n'
    before = path.read_bytes()
    assert error_of(main, init_from=run, export=path) == f'export={path} could not be written: File exists'
    assert path.read_bytes() == before and len([*tmp_path.iterdir()]) == 2
    assert 'ends in .gguf' in error_of(main, init_from=run, export=tmp_path / 'folder', quantize='int8')


# -----------------------------------------------------------------------------
# llama.cpp itself

def llama_cpp(path, n_ctx=64):
    """Open a GGUF file in llama.cpp. Returns a function that asks its HTTP server."""
    package = pytest.importorskip('xllamacpp', reason='llama.cpp is missing: pip install xllamacpp')
    params = package.CommonParams()
    params.model.path, params.n_ctx, params.port, params.verbosity = path, n_ctx, 0, -1
    params.cpuparams.n_threads = params.n_parallel = 1
    params.warmup = params.fit_params = False
    # By default these are in float16.
    params.cache_type_k = params.cache_type_v = package.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = package.Server(params)

    def ask(path, **fields):
        return requests.post(server.listening_address + path, json=fields, timeout=60).json()
    return ask


BOUNDS = {'float32': 1e-5, 'float16': 3e-3, 'bfloat16': 2e-2, 'q8_0': 5e-2}  # it also rounds activations


@pytest.mark.parametrize('name', [*SHAPES, *IMPORTED])
def test_llama_cpp_writes_the_same_greedy_text(tmp_path, name):
    """
    With the log-probabilities of all ids, except those of half a character, which it does not tell. Only two
    of the models are tried in other dtypes, too; the second has columns that Q8_0 cannot have.
    """
    model, start = family(name)[0] if name in IMPORTED else redrawn(SCRATCH[name]), list(b'ab c')
    for dtype, bound in BOUNDS.items():
        if dtype != 'float32' and name not in ('gpt2', 'qwen3'):
            continue
        path = str(tmp_path / dtype)
        quantize = dtype == 'q8_0'
        export_gguf(model, ByteTokenizer(), 'none', path, getattr(torch, 'float32' if quantize else dtype),
                    quantize)
        answer = llama_cpp(path)('/completion', prompt=start, n_predict=8, temperature=0, n_probs=257,
                                 return_tokens=True, logit_bias=[[i, False] for i in range(128, 257)])
        ids = torch.tensor([start + answer['tokens']])
        expected = all_logits(model, ids)[0, 3:-1, :257].log_softmax(-1)
        found = torch.zeros_like(expected)
        for row, step in zip(found, answer['completion_probabilities'], strict=True):
            for other in step['top_logprobs']:
                row[other['id']] = other['logprob']
        # Its GELU is a table in float16.
        assert (found - expected).abs().max() < max(bound, 1e-3 if name.startswith('gpt2') else 0), dtype
        if dtype == 'float32':
            assert answer['tokens'] == expected[:, :128].argmax(-1).tolist()


@pytest.mark.parametrize('name', [
    'byte', 'own', pytest.param('gpt2', marks=pytest.mark.slow), 'gpt-2', 'smollm', 'llama-bpe', 'qwen2'])
def test_llama_cpp_reads_the_same_ids(tmp_path, name, request):
    """With and without the names of special ids, after the first id that each text has."""
    tokenizer = {'own': own, 'byte': ByteTokenizer}.get(name)
    if name == 'gpt2':
        tokenizer = request.getfixturevalue('gpt2')
    elif tokenizer:
        tokenizer = tokenizer()
    else:
        pytest.importorskip('tokenizers')
        tokenizer = HFTokenizer(json.dumps(from_own(pre_tokenizer=STEPS[name])), eot=own().eot)
        tokenizer.bos = tokenizer.eot
    path, rng = str(tmp_path / 'model.gguf'), random.Random(0)
    export_gguf(gpt(tokenizer.n_vocab), tokenizer, 'none', path, torch.float32, quantize=False)
    ask = llama_cpp(path)
    texts = [MIXED, MIXED[::-1], *ODD, *(''.join(rng.choices(MIXED, k=60)) for _ in range(10))]
    for text in texts:
        found = ask('/tokenize', content=text, add_special=True)['tokens']
        assert found == prompt_ids(tokenizer, text), text
        found = ask('/tokenize', content=text, parse_special=False)['tokens']
        assert found == tokenizer.encode(text).tolist(), text


@pytest.mark.parametrize('template', CHATS)
def test_llama_cpp_writes_chats_as_in_training(tmp_path, template):
    tokenizer, path = ByteTokenizer(), str(tmp_path / 'model.gguf')
    tokenizer.bos = 256
    export_gguf(gpt(257), tokenizer, template, path, torch.float32, quantize=False)
    ask = llama_cpp(path)
    for turns in CHATTED:
        messages = [{'role': role, 'content': text} for role, text in turns]
        prompt = ask('/apply-template', messages=messages)['prompt']
        found = ask('/tokenize', content=prompt, add_special=True)['tokens']
        assert found == turn_ids(tokenizer, turns, template)
