"""Model families: the same logits and text as transformers, every switch seen, every other one refused."""

import copy
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import all_logits, error_against, error_of
from test_model import EVERYTHING, SMALL

import sample
from hotloop.data.encode import prompt_ids
from hotloop.inference.generate import Sampling, generate
from hotloop.inference.load import Model
from hotloop.inference.texts import turn_ids
from hotloop.weights.families import model_args_from
from hotloop.weights.load import load_weights
from model import GPT, GPTConfig

# large eps, small soft-caps and short windows, so that each matters in a tiny model
TINY = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=96, rms_norm_eps=1e-2, tie_word_embeddings=False)
WINDOW = dict(sliding_window=12)
GEMMA = dict(head_dim=16, query_pre_attn_scalar=24, **WINDOW)


def rope(theta, **scaling):
    return {'rope_theta': theta, 'rope_type': 'default', **scaling}


LLAMA3 = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
# {name: (model_type, keys of config.json as transformers 5 writes it)}; the first of each family is quick
CASES = {
    'llama 3': ('llama', dict(rope_parameters=rope(500.0, **LLAMA3), tie_word_embeddings=True)),
    'llama 2': ('llama', dict(num_key_value_heads=4)),
    'smollm2': ('llama', dict(num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True)),
    'linear': ('llama', dict(rope_parameters=rope(500.0, rope_type='linear', factor=4.0))),
    'mistral': ('mistral', dict(head_dim=16, rope_parameters=rope(500.0), **WINDOW)),
    'mistral 0.3': ('mistral', dict(sliding_window=None)),
    'qwen2': ('qwen2', dict(rope_parameters=rope(500.0))),
    'qwen2 with windows': ('qwen2', dict(use_sliding_window=True, max_window_layers=1, **WINDOW)),
    'qwen3': ('qwen3', dict(head_dim=16, rope_parameters=rope(500.0))),
    'gemma2': ('gemma2', dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0, **GEMMA)),
    'gemma3': ('gemma3_text', dict(num_hidden_layers=7, rope_parameters={
        'full_attention': rope(500.0), 'sliding_attention': rope(50.0)}, **GEMMA)),
    'gemma3 4b': ('gemma3_text', dict(num_hidden_layers=7, tie_word_embeddings=True, rope_parameters={
        'full_attention': rope(500.0, rope_type='linear', factor=8.0), 'sliding_attention': rope(50.0)},
        **GEMMA)),
    'nanochat': ('nanochat', dict(head_dim=16, final_logit_softcapping=2.0, rope_parameters=rope(500.0))),
    'nanochat, tied': ('nanochat', dict(final_logit_softcapping=None, tie_word_embeddings=True)),
}
QUICK = ('llama 3', 'mistral', 'qwen2', 'qwen3', 'gemma2', 'gemma3', 'nanochat')
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.fixture(scope='module')
def families(tmp_path_factory):
    """families(name) -> (folder in shards, model of transformers with random weights, ids, logits)."""
    transformers = pytest.importorskip('transformers', reason='compares with transformers')
    made = {}

    def make(name):
        if name not in made:
            kind, keys = CASES[name]
            config = transformers.AutoConfig.for_model(kind, **TINY | keys, bos_token_id=0, eos_token_id=1,
                                                       pad_token_id=0)
            torch.manual_seed(0)
            theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
            for name_of, p in theirs.named_parameters():  # no norm and no bias is trivial
                std = 0.3 if p.dim() == 1 or 'embed' in name_of or 'head' in name_of else 0.15
                torch.nn.init.normal_(p, std=std)
            folder = tmp_path_factory.mktemp('model')
            theirs.save_pretrained(folder, max_shard_size='40KB')
            ids = torch.randint(2, 97, (2, 64))  # without the id that pads
            with torch.no_grad():
                made[name] = folder, theirs, ids, theirs(ids).logits
        return made[name]
    return make


def read_folder(folder):
    """(model_args, weights) of a folder."""
    return load_weights(str(folder))[1:3]


@pytest.mark.parametrize('name', ALL)
def test_logits_and_greedy_text_equal_those_of_transformers(families, name):
    """From shards, to 1e-5 of the largest logit; the text with our cache and with theirs."""
    folder, theirs, ids, expected = families(name)
    assert len(list(folder.glob('*.safetensors'))) > 1
    model = GPT.from_checkpoint(*read_folder(folder)).eval()
    assert model.num_params() == theirs.num_parameters()
    logits = all_logits(model, ids)
    assert error_against(expected, logits) < 1e-5 and torch.equal(logits.argmax(-1), expected.argmax(-1))
    text = theirs.generate(ids[:, :30], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    ours = [[], []]
    for step in generate(model, ids[:, :30].tolist(), Sampling(20, temperature=0.0)):
        for row, token, _ in step:
            ours[row].append(token)
    assert ours == text[:, 30:].tolist() and len(set(ours[0] + ours[1])) > 1


def test_weights_in_bfloat16_become_float32_without_a_copy_in_between(families, tmp_path):
    half = copy.deepcopy(families('llama 3')[1]).bfloat16()
    half.save_pretrained(tmp_path)
    args, weights = read_folder(tmp_path)
    assert weights['transformer.wte.weight'].dtype == torch.bfloat16
    assert torch.equal(GPT.from_checkpoint(args, weights).lm_head.weight, half.lm_head.weight.float())


def test_the_embedding_scale_is_rounded_to_the_dtype_as_in_gemmas_training():
    shape = dict(n_embd=1152, n_layer=1, embed_scale=math.sqrt(1152))
    model = GPT(GPTConfig(**SMALL | EVERYTHING | shape))
    ones = torch.ones(1)
    assert model.transformer.ln_e(ones).item() == pytest.approx(33.941, abs=1e-3)
    assert model.transformer.ln_e(ones.bfloat16()).item() == 34.0


# -----------------------------------------------------------------------------
# config.json

def as_version_4(config):
    """A config.json of transformers 5 as transformers 4 writes it."""
    config = copy.deepcopy(config)
    ropes = config.pop('rope_parameters', {})
    config.pop('layer_types', None)
    local, full = ropes.get('sliding_attention'), ropes.get('full_attention', ropes)
    if full:
        config['rope_theta'] = full.pop('rope_theta')
        config['rope_scaling'] = None if full['rope_type'] == 'default' else full
    if local:
        config['rope_local_base_freq'] = local['rope_theta']
    return config


@pytest.mark.parametrize('name', CASES)
def test_both_forms_of_config_json_give_the_same_settings(name):
    kind, keys = CASES[name]
    config = {**TINY, **keys, 'model_type': kind}
    new, old = model_args_from(config, 'config.json'), model_args_from(as_version_4(config), 'config.json')
    assert new == old and GPTConfig(**new).problems() == []
    if kind == 'gemma3_text':
        kinds = [*['sliding_attention'] * 5, 'full_attention', 'sliding_attention']
        windows = GPTConfig(**model_args_from({**config, 'layer_types': kinds}, 'config.json')).windows()
        assert windows == GPTConfig(**new).windows() == [12] * 5 + [None, 12]


def test_unusual_keys_mean_what_they_mean_in_transformers():
    """Its Gemma 3 ignores one; rope_scaling, which users add, outranks rope_parameters."""
    def read(kind, **keys):
        return GPTConfig(**model_args_from({**TINY, **keys, 'model_type': kind}, 'config.json'))
    layers = ['full_attention', 'sliding_attention', 'full_attention']
    mixed = read('mistral', num_hidden_layers=3, sliding_window=5, layer_types=layers)
    assert mixed.windows() == [None, 5, None]
    scaled = read('llama', rope_parameters=rope(500.0), rope_theta=500.0,
                  rope_scaling={'rope_type': 'linear', 'factor': 4.0})
    assert (scaled.rope_base, scaled.rope_factor) == (500.0, 4.0)
    assert read('llama', rope_parameters={'rope_type': 'default'}, rope_theta=500.0).rope_base == 500.0
    assert read('gemma3_text', **GEMMA, attn_logit_softcapping=3.0).attn_softcap == 0


def test_keys_that_a_config_json_lacks_have_transformers_values(families):
    """Gemma's files leave out what equals the defaults."""
    least = {name: value for name, value in TINY.items() if name != 'tie_word_embeddings'}
    transformers = pytest.importorskip('transformers')
    for kind in ('llama', 'mistral', 'qwen2', 'qwen3', 'gemma2', 'gemma3_text', 'nanochat'):
        complete = transformers.AutoConfig.for_model(kind, **least).to_dict()
        lacking, complete = (GPTConfig(**model_args_from(config, 'config.json')).resolved()
                             for config in ({**least, 'model_type': kind}, complete))
        assert lacking.windows() == complete.windows()
        assert replace(lacking, window_pattern=None) == replace(complete, window_pattern=None)


@pytest.mark.parametrize('kind, keys, words', [
    ('phi3', {}, 'model_type=phi3 is not supported, only gpt2, llama'),
    ('llama', {'attention_bias': True}, 'attention_bias=True is not supported, only False'),
    ('llama', {'mlp_bias': True}, 'mlp_bias=True'), ('llama', {'hidden_act': 'gelu'}, 'hidden_act=gelu'),
    ('llama', {'rope_scaling': {'type': 'yarn', 'factor': 2.0}}, 'rope_type=yarn is not supported'),
    ('llama', {'rope_parameters': rope(1e4, **LLAMA3 | {'high_freq_factor': 8.0})}, 'high_freq_factor=8.0'),
    ('llama', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is not supported, only 1'),
    ('llama', {'quantization_config': {'bits': 4}}, "quantization_config={'bits': 4} is not supported"),
    ('llama', {'auto_map': {'AutoModel': 'x.py'}}, 'auto_map='),
    ('llama', {'is_causal': False}, 'is_causal=False is not supported, only True'),
    ('llama', {'hidden_size': None}, "has no 'hidden_size'"),
    ('llama', {'hidden_size': '32'}, "hidden_size='32' is not a number"),
    ('llama', {'rope_scaling': 'linear'}, 'has a value of the wrong kind'),
    ('gemma2', {'hidden_activation': 'gelu'}, 'hidden_activation=gelu'),
    ('gemma3_text', {'use_bidirectional_attention': True}, 'use_bidirectional_attention=True'),
    ('nanochat', {'hidden_act': 'silu'}, 'hidden_act=silu is not supported, only relu2'),
    ('gemma3_text', {'layer_types': ['chunked_attention']}, 'layer_types=chunked_attention is not supported'),
    ('gpt2', {}, "has no 'n_layer'")])
def test_a_switch_that_gpt_cannot_follow_is_refused_by_name(kind, keys, words):
    config = {name: value for name, value in {**TINY, **WINDOW, 'model_type': kind, **keys}.items()
              if value is not None}
    error = error_of(model_args_from, config, 'x/config.json')
    assert words in error and error.startswith('x/config.json')


# -----------------------------------------------------------------------------
# a folder as a base

TEMPLATE = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{% endfor %}"


@pytest.fixture
def llama_folder(families, tmp_path):
    """A copy of the tiny Llama 3 with a tokenizer that begins texts, two end ids and a chat template."""
    tokenizers = pytest.importorskip('tokenizers')
    folder = tmp_path / 'llama'
    shutil.copytree(families('llama 3')[0], folder)
    names = ['<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>', '<|start_header_id|>', '<|end_header_id|>']
    vocab = {name: i for i, name in enumerate([*names, *map(chr, range(33, 120))])}  # 92 of 97 ids
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.add_special_tokens(names)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single='<|begin_of_text|> $A', special_tokens=[('<|begin_of_text|>', 0)])
    backend.save(str(folder / 'tokenizer.json'))
    config = {'eos_token': '<|eot_id|>', 'bos_token': '<|begin_of_text|>', 'chat_template': TEMPLATE}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [1, 2]}))
    return folder


def opened(folder):
    """The Model of a folder as sample.py opens it."""
    return Model(sample.SampleConfig(init_from=str(folder)), GPT)


def test_a_folder_gives_bos_stops_and_template(llama_folder):
    """The begin id before prompts and chats, both end ids, the template that the chat template looks like."""
    model = opened(llama_folder)
    tokenizer = model.tokenizer
    assert (tokenizer.bos, model.template, model.gpt.config.vocab_size) == (0, 'llama3', 97)
    assert {tokenizer.eot, *tokenizer.stops} == {1, 2}
    assert prompt_ids(tokenizer, 'abc')[0] == 0 and tokenizer.n_vocab == 92
    ids = turn_ids(tokenizer, [('user', 'Hi')], 'llama3')
    assert ids[:2] == [0, 3] and ids.count(3) == 2


def test_special_ids_beyond_the_vocabulary_of_the_model_are_not_used(llama_folder):
    """As the one for images in Gemma 3's tokenizer."""
    tokenizer = json.loads((llama_folder / 'tokenizer.json').read_text())
    for i in range(92, 98):
        entry = {**tokenizer['added_tokens'][0], 'id': i, 'content': f'<extra_{i}>', 'special': i == 97}
        tokenizer['added_tokens'].append(entry)
    (llama_folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
    tokenizer = opened(llama_folder).tokenizer
    assert tokenizer.n_vocab == 97 and '<extra_97>' not in tokenizer.specials
    assert len(tokenizer.pieces) == 97
