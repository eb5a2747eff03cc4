"""Folders for transformers: the same logits and ids there, the same bits here, what has no counterpart."""

import dataclasses
import errno
import json
import random

import pytest
import torch
from conftest import ROOT, all_logits, error_against, error_of, train_bpe
from test_families import ALL, TINY
from test_families import CASES as FAMILIES
from test_sample import CHARS, gpt, main, write

import prepare
from hotloop import load
from hotloop.data.chat import CHATS, parts_before_answer
from hotloop.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, tokenizer_from
from hotloop.data.tokenizer_source import known_template, read_tokenizer_json
from hotloop.inference.texts import turn_ids
from hotloop.weights.export import config_json, export
from hotloop.weights.export_tokenizer import tokenizer_files
from hotloop.weights.families import model_args_from
from hotloop.weights.load import load_weights
from hotloop.weights.safetensors import DTYPES, read_safetensors, write_safetensors
from model import GPT, GPTConfig
from train import read_settings

BASE = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=288)
NANOCHAT = BASE | dict(preset='modern', key_shift=False, x0_mix=False)
SCRATCH = {'gpt2': BASE, 'gpt2 with biases': BASE | dict(bias=True, mlp='gelu_tanh', n_ff=80, tie=False,
                                                         norm_eps=1e-3),
           'modern': NANOCHAT,
           'modern, grouped': NANOCHAT | dict(n_kv_head=2, tie=True, softcap=0.0, n_ff=80),
           'modern, wide': NANOCHAT | dict(rope_base=500.0, head_dim=16, norm_eps=1e-2, softcap=3.0),
           'preset qwen3': BASE | dict(preset='qwen3'),
           'qwen3, tied': BASE | dict(preset='qwen3', tie=True, n_kv_head=2, rope_base=500.0, norm_eps=1e-2)}
MIXED = ("Hello, world!  It's 12345 o'clock…\n\n\tTabs\t and   spaces   \r\nΣίσυφος ёлка 漢字 한국어 😀 café "
         "cafe\u0301 \u00a0nbsp\u3000\n \n\n   end 'll I'VE 1,234.5 ½² ٣٤ x=1;y=2 \0\x07\u2028\ufeff  ")
CHATTED = ([('user', 'Hi "you"')], [('user', ' a\n'), ('assistant', "b's"), ('user', 'c')],
           [('system', 'Be {{ brief }}.'), ('user', 'a')])


def redrawn(settings):
    """A GPT in which no weight is trivial."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**settings)).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * (0.15 if p.dim() > 1 else 0.3)
    return model


def family(name):
    """(a GPT with a shorter context than its config.json, the config.json) of a case of test_families."""
    kind, keys = FAMILIES[name]
    config = {**TINY, **keys, 'model_type': kind, 'vocab_size': 288, 'custom': 'stays'}
    return redrawn({**model_args_from(config, 'config.json'), 'block_size': 64}), config


@pytest.mark.parametrize('name', [*SCRATCH, *ALL])
def test_transformers_computes_the_same_and_the_weights_return(tmp_path, name):
    """
    test_families.py reads what transformers writes. Biases that the model lacks are 0. Padded rows of the
    vocabulary stay, and so do keys of config.json that we do not know.
    """
    transformers = pytest.importorskip('transformers')
    folder = str(tmp_path / 'out')
    ours, hf_config = family(name) if name in FAMILIES else (redrawn(SCRATCH[name]), None)
    export(ours, ByteTokenizer(), 'none', folder, torch.float32, hf_config)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation='eager')
    assert not any(info.values())
    if hf_config:
        assert theirs.config.model_type == hf_config['model_type'] and theirs.config.custom == 'stays'
        assert theirs.config.max_position_embeddings == 64
    ids = torch.randint(288, (2, 16))
    expected = all_logits(ours, ids)
    with torch.no_grad():
        assert error_against(expected, theirs(ids).logits) < 1e-5
    found = load_weights(folder)
    again = GPT.from_checkpoint(found.model_args, found.weights).eval()
    assert torch.equal(all_logits(again, ids), expected)
    weights = again.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in ours.state_dict().items())
    assert found.checkpoint['hf_config']['vocab_size'] == 288


@pytest.mark.parametrize('settings, words', [
    (dict(preset='modern'), 'its nanochat differs in key_shift=True, x0_mix=True; a run from scratch needs '
                            '--mixer=attention --x0_mix=False and --preset=gpt2'),
    (dict(preset='modern', key_shift=False, x0_mix=False, mixer='CA'), 'mixer=CA'),
    (dict(preset='qwen3', window=5), 'its qwen3 differs in window=5'),
    (dict(preset='qwen3', bias=True), 'bias=True'),
    (dict(n_kv_head=2), 'n_kv_head=2'), (dict(window=5), 'window=5'),
    (None, 'its qwen3 differs in n_layer=3')])
def test_a_model_that_transformers_lacks_names_its_settings(settings, words):
    if settings:
        error = error_of(config_json, GPTConfig(**BASE | settings).resolved())
    else:
        model, hf_config = family('qwen3')
        error = error_of(config_json, model.config, {**hf_config, 'num_hidden_layers': 4})
    assert 'transformers has no such model' in error and words in error


def test_safetensors_has_the_bits_for_the_package(tmp_path):
    """Of every dtype, both ways; each tensor begins at a multiple of its element."""
    safetensors = pytest.importorskip('safetensors.torch')
    tensors = {name: torch.arange(6).view(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {'b': torch.randn(7, 3).t(), 'é': torch.tensor(2.5)}
    ours = tmp_path / 'model.safetensors'
    theirs = tmp_path / 'theirs.safetensors'
    write_safetensors(str(ours), tensors)
    safetensors.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, theirs)
    for found in (safetensors.load_file(ours), read_safetensors(str(ours)), read_safetensors(str(theirs))):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    size = int.from_bytes(ours.read_bytes()[:8], 'little')
    header = json.loads(ours.read_bytes()[8:8 + size])
    for name, tensor in tensors.items():
        assert header[name]['data_offsets'][0] % tensor.element_size() == 0


def own(num_tokens=400, **more):
    rng = random.Random(0)
    words = [''.join(rng.choices('ab é', k=5)) for _ in range(500)]
    return BPETokenizer(train_bpe([MIXED, ' '.join(words)], num_tokens), **more)


def check_ids(tokenizer):
    """The tokenizers package has the same ids, on mixed and on random text."""
    tokenizers, rng = pytest.importorskip('tokenizers'), random.Random(1)
    texts = [MIXED, MIXED[::-1], '', ' ', '\n\n', 'qxz', ' \n x \n', 'caf\u00e9e\u0301']
    texts += [''.join(rng.choices(MIXED, k=200)) for _ in range(50)]
    content = tokenizer_files(tokenizer, 'none', 8)['tokenizer.json']
    theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
    theirs.encode_special_tokens = True
    for text in texts:
        assert theirs.encode(text).ids == tokenizer.encode(text).tolist(), text
    assert theirs.token_to_id('<|endoftext|>') == tokenizer.eot
    ids = tokenizer.encode(MIXED).tolist()
    assert theirs.decode(ids).encode() == tokenizer.decode(ids)


@pytest.mark.parametrize('tokenizer', [
    own(), ByteTokenizer(), BPETokenizer([*own().tokens, b'qxz']),
    own(pattern=r'\p{N}{1,3}+|\s+|[^\s\p{N}]++')], ids=['own', 'byte', 'unreachable', 'possessive'])
def test_ids_are_equal_in_the_tokenizers_package(tokenizer):
    """Also of a token that no merges give, if it is a word."""
    check_ids(tokenizer)


@pytest.mark.slow
def test_the_ids_of_gpt2_are_equal(gpt2):
    check_ids(gpt2)


def test_the_folder_keeps_end_stops_and_template(tmp_path):
    """In transformers and here. A tokenizer.json of a folder, its pad and a foreign template stay."""
    transformers = pytest.importorskip('transformers')
    tokenizer, model = own(specials={'<e>': 401, '<|im_end|>': 402}, eot=401), gpt(448)
    for name in ('a', 'b'):
        folder = tmp_path / name
        export(model, tokenizer, 'chatml', str(folder), torch.float32)
        found = load_weights(str(folder))
        assert found.tokenizer['stops'] == [402] and found.checkpoint['template'] == 'chatml'
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.encode('a <b>').tolist()
        assert theirs('a <b>').input_ids == ids and theirs.eos_token_id == 401
        settings = transformers.GenerationConfig.from_pretrained(folder)
        assert settings.eos_token_id == [401, 402]
        tokenizer = read_tokenizer_json(str(folder))
    first, second = ((tmp_path / name / 'tokenizer.json').read_bytes() for name in 'ab')
    assert first == second
    path = folder / 'tokenizer_config.json'
    path.write_text(json.dumps({'pad_token': {'content': '<e>'}, 'chat_template': '<|user|>{{ messages }}'}))
    found = load_weights(str(folder))
    tokenizer = tokenizer_from(found.tokenizer)
    export(model, tokenizer, found.checkpoint['template'], str(tmp_path / 'c'), torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'c')
    assert theirs.pad_token_id == 401 and theirs.chat_template == '<|user|>{{ messages }}'


def test_a_nanochat_folder_gives_its_template_and_begins_with_its_mark(tmp_path):
    """Its tokenizer.json does not say that documents begin with <|bos|>."""
    names = ['<|bos|>', '<|user_start|>', '<|user_end|>', '<|assistant_start|>', '<|assistant_end|>']
    tokenizer = own(specials={name: 401 + i for i, name in enumerate(names)}, eot=405)
    tokenizer.bos = 401
    folder = str(tmp_path / 'a')
    export(redrawn(NANOCHAT | dict(vocab_size=448)), tokenizer, 'nanochat', folder, torch.float32)
    found = load(folder, device='cpu')
    assert found.template == 'nanochat'
    turns = [('system', 'Be brief.'), ('user', 'a'), ('assistant', 'b'), ('user', 'c')]
    ids = turn_ids(found.tokenizer, turns, 'nanochat')
    a, b, c = (tokenizer.encode(text).tolist() for text in ('Be brief.\n\na', 'b', 'c'))
    assert ids == [401, 402, *a, 403, 404, *b, 405, 402, *c, 403, 404]


@pytest.mark.parametrize('template', CHATS)
def test_chats_are_as_in_training(tmp_path, template):
    transformers = pytest.importorskip('transformers')
    tokenizer = ByteTokenizer()
    tokenizer.bos = 256
    export(gpt(257), tokenizer, template, str(tmp_path / 'a'), torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'a')
    for turns in CHATTED:
        messages = [{'role': role, 'content': text} for role, text in turns]
        expected = ''.join(text for text, *_ in parts_before_answer(turns, template))
        made = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert made == '<|endoftext|>' + expected


def test_the_command_exports_a_run(tmp_path, capsys):
    """A folder that is not empty is left alone."""
    folder = tmp_path / 'hf'
    path = tmp_path / 'out' / 'best.pt'
    path.parent.mkdir()
    write(path, gpt(257), ByteTokenizer(), template='alpaca')
    assert main(out_dir=path.parent, export=folder, dtype='bfloat16') == 0
    assert capsys.readouterr().out == f'wrote {folder}: gpt2, bfloat16\n'
    assert known_template(folder) == 'alpaca'
    config = json.loads((folder / 'config.json').read_text())
    assert (config['dtype'], config['eos_token_id'], config['bos_token_id']) == ('bfloat16', [256], None)
    weights = read_safetensors(str(folder / 'model.safetensors'))
    assert weights['transformer.ln_f.bias'].dtype == torch.bfloat16
    assert main(init_from=folder, start='hi', max_new_tokens=2) == 0
    error = error_of(main, out_dir=path.parent, export=folder)
    assert error == f'export={folder} could not be written: File exists'


def test_texts_leave_a_model_its_own_chat_template_and_defaults(tmp_path, train_tiny):
    """Also as adapters, in a run and in a folder."""
    pytest.importorskip('tokenizers', reason='reads tokenizer.json')
    jinja = '{{ tools }}<|im_start|>user'
    base = str(tmp_path / 'base')
    export(gpt(257), ByteTokenizer(), 'none', base, torch.float32)
    (tmp_path / 'base' / 'chat_template.jinja').write_text(jinja)
    (tmp_path / 'base' / 'generation_config.json').write_text('{"temperature": 0.6, "bos_token_id": 7}')
    (tmp_path / 'a.txt').write_text('a text ' * 99)
    prepare.main([str(tmp_path / 'a.txt'), f'--tokenizer={base}', '--name=own', f'--data_dir={tmp_path}'])
    tune = dict(init_from=base, dataset='own', data_dir=str(tmp_path), n_embd=16, block_size=8, max_iters=1)
    train_tiny('full', **tune)
    train_tiny('lora', **tune, lora_rank=2)
    for source in ('base', 'full', 'lora', 'lora/adapter'):
        folder = tmp_path / 'exports' / source.replace('/', '-')
        folder.parent.mkdir(exist_ok=True)
        assert main(init_from=tmp_path / source, export=folder) == 0
        assert json.loads((folder / 'tokenizer_config.json').read_text())['chat_template'] == jinja
        defaults = json.loads((folder / 'generation_config.json').read_text())
        assert defaults == {'temperature': 0.6, 'bos_token_id': 7, 'eos_token_id': [256]}
    assert main(init_from=base, export=tmp_path / 'named', template='chatml') == 0
    assert json.loads((tmp_path / 'named' / 'tokenizer_config.json').read_text())['chat_template'] != jinja


def test_an_export_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    def write(path, tensors):
        raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr('hotloop.weights.export.write_safetensors', write)
    with pytest.raises(OSError, match='No space'):
        export(gpt(257), ByteTokenizer(), 'none', str(tmp_path / 'a'), torch.float32)
    assert not (tmp_path / 'a').exists()


def test_a_model_of_characters_is_exported_without_its_tokenizer(tmp_path, capsys):
    export(gpt(11), CharTokenizer(CHARS, eot=True), 'none', str(tmp_path / 'a'), torch.float32)
    assert 'no tokenizer written' in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / 'a').iterdir()) == ['config.json', 'model.safetensors']
    config = json.loads((tmp_path / 'a' / 'config.json').read_text())
    assert (config['eos_token_id'], config['bos_token_id']) == (10, None)  # not those of transformers


def test_readmes_command_trains_what_can_be_exported():
    """Though the card has settings that neither model has."""
    line = next(line for line in (ROOT / 'README.md').read_text().splitlines() if '--preset=qwen3 ' in line)
    command, other = line.split('#')
    first = command.split()[2:]
    for argv, kind in ((first, 'qwen3'), (first + other.split()[1:], 'nanochat')):
        model = read_settings(argv).model
        assert config_json(dataclasses.replace(model, vocab_size=1024).resolved())['model_type'] == kind


def test_a_run_of_adapters_is_exported_merged(train_tiny, tmp_path, capsys):
    """With the weights that sample.py computes with and the config.json of its base."""
    model, config = family('qwen2')
    export(model, ByteTokenizer(), 'none', str(tmp_path / 'base'), torch.float32, config)
    shape = dict(n_layer=3, n_head=4, n_embd=48, block_size=32)
    train_tiny('tuned', init_from=tmp_path / 'base', lora_rank=4, max_iters=4, learning_rate=2e-2, **shape)
    assert main(out_dir=tmp_path / 'tuned', export=tmp_path / 'hf') == 0
    exported, run, base = (load_weights(str(tmp_path / name)) for name in ('hf', 'tuned', 'base'))
    assert all(torch.equal(exported.weights[name], run.weights[name]) for name in run.weights)
    assert not torch.equal(run.weights['transformer.h.0.mlp.c_fc.weight'],
                           base.weights['transformer.h.0.mlp.c_fc.weight'])
    assert exported.checkpoint['hf_config']['max_position_embeddings'] == 64  # the base's, not the run's
    assert exported.checkpoint['hf_config']['custom'] == 'stays'
    capsys.readouterr()
    pytest.importorskip('gguf')
    assert main(out_dir=tmp_path / 'tuned', export=tmp_path / 'a.gguf') == 0
    assert capsys.readouterr().out == f'wrote {tmp_path}/a.gguf: qwen2, F32\n'
