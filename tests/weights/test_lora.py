"""LoRA: peft's arithmetic, files both ways, runs that resume to the same bits, errors that name the base."""

import dataclasses
import json
import shutil
from functools import partial

import pytest
import torch
from conftest import all_logits, error_of, load, rows, same, stop_at, tiny_flags
from faults import assert_equal_runs
from ranks import on_ranks

import sample
import train
from hotloop.data.encode import prompt_ids
from hotloop.data.tokenizer import BPETokenizer, tokenizer_from
from hotloop.inference.load import Model
from hotloop.system.distributed import Env
from hotloop.weights.adapter import CONFIG, ORIGIN, TENSORS, read_adapter, write_adapter
from hotloop.weights.export_tokenizer import tokenizer_files
from hotloop.weights.load import load_weights
from hotloop.weights.lora import (
    EMBEDDINGS,
    LoRAConfig,
    LoRALinear,
    adapters_of,
    add_adapters,
    chosen,
    hash_weights,
    merged,
    note_untrained_end,
    projections,
    trainable,
    weights_to_save,
)
from hotloop.weights.nf4 import NF4Linear
from hotloop.weights.safetensors import read_safetensors, write_safetensors
from model import GPT, GPTConfig, Linear
from sample import SampleConfig

LLAMA = dict(preset='modern', mlp='swiglu', n_kv_head=2, n_ff=48, zero_init=False)
GPT2 = dict(bias=True, mlp='gelu_tanh')


def gpt(**settings):
    torch.manual_seed(0)
    shape = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_embd=32)
    return GPT(GPTConfig(**shape | settings)).eval()


def adapt(model, dtype=torch.float32, **settings):
    """Add adapters whose B is not zero. Returns the checkpoint of such a run, as far as adapters go."""
    cfg = LoRAConfig(**{'lora_rank': 4, **settings})
    origin = {'base': 'out/base', 'sha256': hash_weights(model.state_dict())}
    record = add_adapters(model, cfg, origin, Env(dtype=dtype), 1)
    for name, p in model.named_parameters():
        if name.endswith('lora_B'):
            torch.nn.init.normal_(p, std=0.1)
    return {'model': weights_to_save(model), 'lora': record, 'model_args': dataclasses.asdict(model.config)}


IDS = torch.arange(32).view(2, 16)


# -----------------------------------------------------------------------------
# arithmetic

@pytest.mark.parametrize('parts', [[(0, 24)], [(0, 8), (8, 12), (12, 24)], [(2, 8), (12, 20)]])
@pytest.mark.parametrize('rs', [False, True])
def test_each_part_gains_its_own_product(parts, rs):
    """Values and gradients of the formula, part by part; rows without a part are those of the base."""
    torch.manual_seed(0)
    base, x = Linear(16, 24).requires_grad_(False), torch.randn(2, 5, 16, requires_grad=True)
    module = LoRALinear(base, 16, parts, LoRAConfig(lora_rank=4, lora_alpha=8, lora_rs=rs))
    assert torch.equal(module(x), base(x)) and not module.lora_B.any()
    assert module.lora_A.abs().max() <= 16**-0.5 and module.lora_A.std() > 0.5 * 16**-0.5
    torch.nn.init.normal_(module.lora_B)
    pieces = list(base(x).split(1, dim=-1))
    Bs = module.lora_B.split([end - start for start, end in parts])
    for (start, end), A, B in zip(parts, module.lora_A.split(4), Bs, strict=True):
        added = (8 / 2 if rs else 8 / 4) * x @ A.T @ B.T
        for row in range(start, end):
            pieces[row] = pieces[row] + added[..., row - start:row - start + 1]
    expected, weights = torch.cat(pieces, dim=-1), torch.randn(2, 5, 24)
    learned = [x, module.lora_A, module.lora_B]
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(torch.autograd.grad((module(x) * weights).sum(), learned),
                               torch.autograd.grad((expected * weights).sum(), learned))


def test_targets_are_named_as_in_peft():
    table, gpt2 = projections(gpt(**LLAMA).state_dict()), projections(gpt().state_dict())
    assert [*chosen('attn', table), *chosen('mlp', table)] == list(table)
    assert list(chosen('mlp', table)) == ['mlp.up_proj', 'mlp.gate_proj', 'mlp.down_proj']
    assert 'mlp.gate_proj' not in projections(gpt(preset='modern').state_dict())
    assert list(chosen('v_proj, q_proj', table)) == ['attn.q_proj', 'attn.v_proj']
    assert list(chosen('c_proj', gpt2)) == ['attn.c_proj', 'mlp.c_proj']  # both, as in peft
    assert list(chosen('attn.c_proj', gpt2)) == ['attn.c_proj']
    assert "lora_targets='q_proj,gate': 'gate' matches nothing" in error_of(chosen, 'q_proj,gate', table)


@pytest.mark.parametrize('settings', [GPT2, LLAMA])
@pytest.mark.parametrize('quantize', ['none', 'nf4'])
def test_only_adapters_learn_and_the_start_is_the_base(settings, quantize):
    """In float32, beside frozen weights of 16 bits or 4; embedding and head stay 16 bits."""
    model = gpt(**settings)
    expected = all_logits(model, IDS)
    cfg = LoRAConfig(lora_rank=2, quantize=quantize)
    add_adapters(model, cfg, {}, Env(dtype=torch.bfloat16), 1)
    assert all('.lora_' in name and p.dtype == torch.float32
               for name, p in model.named_parameters() if p.requires_grad)
    assert model.lm_head.weight.dtype == model.transformer.wte.weight.dtype == torch.bfloat16
    assert sum(isinstance(m, NF4Linear) for m in model.modules()) == (8 if quantize == 'nf4' else 0)
    model.compute_dtype = torch.bfloat16
    assert (all_logits(model, IDS) - expected).norm() < (0.3 if quantize == 'nf4' else 0.03) * expected.norm()


def gradients(recompute='none', compiled=False, **settings):
    """The loss and the gradients of adapters, with dropout, in one tensor."""
    model = gpt(**LLAMA).train()
    adapt(model, lora_dropout=0.1, **settings)
    forward = train.wrap(model, train.TrainConfig(recompute=recompute), Env(compile=compiled))[1]
    torch.manual_seed(2)
    loss = forward(*torch.randint(61, (2, 2, 16))).sum()
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    return torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in trainable(model))])


@pytest.mark.slow
@pytest.mark.parametrize('recompute, quantize', [('none', 'none'), ('full', 'nf4')])
def test_a_compiled_step_is_the_same(monkeypatch, recompute, quantize):
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='aot_eager'))
    torch._dynamo.reset()
    found = gradients(recompute, compiled=True, quantize=quantize)
    torch.testing.assert_close(found, gradients(quantize=quantize), rtol=1e-4, atol=1e-6)


def test_a_frozen_head_in_chunks_has_no_gradient_and_gives_those_of_one_piece():
    found = []
    for chunks in (1, 4):
        model = gpt(**LLAMA)
        adapt(model)
        model.loss_chunks = chunks
        model(*torch.arange(64).view(2, 2, 16) % 61).sum().backward()
        assert model.lm_head.weight.grad is None
        found.append([p.grad for p in trainable(model)])
    torch.testing.assert_close(*found)


# -----------------------------------------------------------------------------
# folders in peft's format

def test_an_adapter_for_another_base(tmp_path):
    write_adapter(tmp_path, adapt(gpt(**LLAMA)))
    adapters, _, scale = read_adapter(tmp_path)
    for model in (gpt(n_embd=64, **LLAMA), gpt(), gpt(**LLAMA | dict(n_layer=1))):
        error = error_of(merged, model.state_dict(), adapters, scale, 'none')
        assert error.startswith('the base has no '), error


@pytest.mark.parametrize('name, value', [
    ('rank_pattern', {'q_proj': 2}), ('layer_replication', [[0, 1], [0, 1]]),
    ('init_lora_weights', 'olora'), ('peft_type', 'IA3')])
def test_what_merged_cannot_do_is_refused(tmp_path, name, value):
    """Variants that peft has, adapters that change their base, and other tensors, as of DoRA."""
    write_adapter(tmp_path, adapt(gpt()))
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, name: value}))
    error = error_of(read_adapter, tmp_path)
    assert f'{tmp_path}/adapter_config.json: {name}={value} is not supported' in error
    (tmp_path / CONFIG).write_text('{"fine_tune_type": "lora"}')  # of mlx-lm
    assert 'has no r and lora_alpha' in error_of(read_adapter, tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**config, 'r': 16}))
    assert 'lora_B are not of the rank' in error_of(read_adapter, tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    tensors = read_safetensors(tmp_path / TENSORS)
    write_safetensors(tmp_path / TENSORS, tensors | {'base_model.model.x.lora_magnitude_vector': IDS})
    assert 'lora_magnitude_vector is not supported' in error_of(read_adapter, tmp_path)
    write_safetensors(tmp_path / TENSORS, {name: w for name, w in tensors.items() if 'lora_A' in name})
    assert 'lora_B are not of the rank' in error_of(read_adapter, tmp_path)
    write_safetensors(tmp_path / TENSORS, {name: w for name, w in tensors.items() if 'lora_B' in name})
    assert 'has no adapters' in error_of(read_adapter, tmp_path)


# -----------------------------------------------------------------------------
# runs

@pytest.fixture
def base(train_tiny, tmp_path):
    """A trained base; its folder is an absolute path, as if it were named on a command line."""
    train_tiny('base', max_iters=4)
    return dict(init_from=tmp_path / 'base', lora_rank=4)


@pytest.mark.parametrize('settings', [
    dict(lora_dropout=0.1, dropout=0.1, quantize='nf4', lora_embeddings=True),
    dict(lora_targets='c_attn', block_size=8, dtype='bfloat16')])
def test_ten_steps_of_tuning_equal_five_plus_five(train_tiny, tmp_path, base, monkeypatch, capsys, settings):
    """Adapters, optimizer, counters and the log; settings come from the checkpoint, and so does the base."""
    train_tiny('whole', **base, **settings)
    printed = capsys.readouterr().out
    stop_at(monkeypatch, 5)
    assert train_tiny('parts', **base, **settings) == 143
    given = {name: settings[name] for name in ('block_size', 'dtype') if name in settings}  # unlike TINY
    train_tiny('parts', resume=True, **given)
    assert_equal_runs(tmp_path / 'parts', tmp_path / 'whole')
    assert same(load(tmp_path / 'parts' / 'best.pt')['model'], load(tmp_path / 'whole' / 'best.pt')['model'])
    checkpoint = load(tmp_path / 'whole' / 'ckpt.pt')
    beside = {name for name in checkpoint['model'] if '.lora_' not in name}
    assert beside == (set(EMBEDDINGS) if 'lora_embeddings' in settings else set())
    assert checkpoint['lora']['base'] == str(base['init_from'])
    count = sum(w.numel() for name, w in checkpoint['model'].items() if name != EMBEDDINGS[1])  # tied
    assert f'{count:,} parameters are trained, ' in printed


@pytest.mark.parametrize('settings', [dict(lora_rank=8), dict(quantize='nf4', lora_embeddings=True)])
def test_best_pt_and_the_folder_give_the_model_that_was_evaluated(train_tiny, tmp_path, base, settings,
                                                                  capsys, data_dir):
    """And how the data of the adapters begin a text and write a chat."""
    rows_dir = shutil.copytree(data_dir, tmp_path / 'data')
    meta = json.loads((rows_dir / 'tiny' / 'meta.json').read_text())
    meta |= {'template': 'chatml', 'tokenizer': {'kind': 'byte', 'bos': 7, 'stops': []}}
    (rows_dir / 'tiny' / 'meta.json').write_text(json.dumps(meta))
    train_tiny('tuned', **base | settings, data_dir=rows_dir, learning_rate=2e-2, eval_interval=10)
    best, losses = rows(tmp_path / 'tuned', 'val_loss')[-1]['val_loss'], []
    for name in ('tuned', 'base'):
        capsys.readouterr()
        train_tiny('elsewhere', init_from=tmp_path / name, eval_only=True)
        losses.append(float(capsys.readouterr().out.split('val loss ')[1].split()[0]))
    assert losses[0] == pytest.approx(best, abs=1e-4) and losses[1] > best + 1e-3
    for folder in (tmp_path / 'tuned' / 'adapter', tmp_path / 'tuned'):
        found = Model(SampleConfig(init_from=str(folder)), GPT)
        assert (found.tokenizer.bos, found.template) == (7, 'chatml')
        assert found.weights.checkpoint.get('iter_num') in (None, 10)  # never the base's
        losses.append(all_logits(found.gpt, IDS))
    assert torch.equal(*losses[2:])
    config = json.loads((tmp_path / 'tuned' / 'adapter' / CONFIG).read_text())
    assert config['modules_to_save'] == (['wte', 'lm_head'] if 'lora_embeddings' in settings else None)
    if 'lora_embeddings' in settings:  # peft trains a tied pair apart
        path = tmp_path / 'tuned' / 'adapter' / TENSORS
        tensors = read_safetensors(path)
        tensors['base_model.model.lm_head.weight'] = tensors['base_model.model.lm_head.weight'] * 2
        write_safetensors(path, tensors)
        found = Model(SampleConfig(init_from=str(path.parent)), GPT)
        assert not found.gpt.config.tie and not torch.equal(all_logits(found.gpt, IDS), losses[2])


def test_a_folder_of_peft_may_have_more_tokens_and_their_tokenizer(train_tiny, tmp_path, base):
    pytest.importorskip('tokenizers')
    train_tiny('tuned', **base, lora_embeddings=True, max_iters=1)
    folder = tmp_path / 'tuned' / 'adapter'
    (folder / ORIGIN).unlink()  # peft writes none
    tensors = read_safetensors(folder / TENSORS)
    for name in ('transformer.wte', 'lm_head'):
        weight = tensors[f'base_model.model.{name}.weight']
        tensors[f'base_model.model.{name}.weight'] = torch.cat((weight, weight[:3]))
        for copy in ('modules_to_save', 'original_module'):  # as peft writes what it saves completely
            tensors[f'base_model.model.{name}.{copy}.weight'] = weight
    write_safetensors(folder / TENSORS, tensors)
    tokenizer = BPETokenizer([bytes([b]) for b in range(256)], specials={'<|im_end|>': 256})
    content = tokenizer_files(tokenizer, 'none', 8)['tokenizer.json']
    (folder / 'tokenizer.json').write_text(json.dumps(content))
    found = load_weights(str(folder))
    assert GPT.from_checkpoint(found.model_args, found.weights).config.vocab_size == len(weight) + 3
    tokenizer = tokenizer_from(found.tokenizer)
    assert prompt_ids(tokenizer, 'a<|im_end|>')[-1] == 256 and tokenizer.sizes[256] == 0


def test_a_run_of_mixed_layers_is_tuned(train_tiny, tmp_path):
    train_tiny('base', preset='modern', mixer='CA')
    train_tiny('tuned', init_from=tmp_path / 'base', lora_rank=2, learning_rate=1e-2)
    base, tuned = (load_weights(str(tmp_path / out)) for out in ('base', 'tuned'))
    GPT.from_checkpoint(tuned.model_args, tuned.weights)
    for matrix in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'):
        for layer in range(2):
            name = f'transformer.h.{layer}.{matrix}.weight'
            assert not torch.equal(base.weights[name], tuned.weights[name])


def test_adapters_of_a_run_fit_its_export(train_tiny, tmp_path):
    """Its family, NanoChat, has other names and rotates the other way."""
    train_tiny('base', preset='modern', key_shift=False, x0_mix=False)
    train_tiny('tuned', init_from=tmp_path / 'base', lora_rank=2, learning_rate=1e-2, max_iters=4)
    assert sample.main([f'--out_dir={tmp_path}/base', f'--export={tmp_path}/hf', '--device=cpu']) == 0
    tuned, folder = load_weights(str(tmp_path / 'tuned')).weights, tmp_path / 'tuned' / 'adapter'
    assert 'base_model.model.model.layers.0.mlp.fc1.lora_A.weight' in read_safetensors(folder / TENSORS)
    for name in ('base', 'hf'):
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, 'base_model_name_or_path': f'{tmp_path}/{name}'}))
        found = load_weights(str(folder)).weights
        assert all(torch.equal(found[key], tuned[key]) for key in tuned), name
    (folder / ORIGIN).unlink()  # as peft writes it
    found = load_weights(str(folder)).weights
    assert all(torch.equal(found[key], tuned[key]) for key in tuned)


def test_a_note_says_that_the_end_of_an_answer_was_never_learned():
    tokenizer = tokenizer_from({'kind': 'byte'})
    head = torch.randn(257, 8)
    assert note_untrained_end(head, 'joined', tokenizer, 'out') is None
    head[[9, 11]] = head[tokenizer.eot] * (1 + 1e-5)
    note = note_untrained_end(head, 'joined', tokenizer, 'out')
    assert note.startswith('note: out never learned the end of a text (its head has one row for 3 ids)')
    assert '--lora_embeddings=True' in note
    assert note_untrained_end(head, 'chatml', tokenizer, 'out') is None  # bytes spell its mark


@pytest.mark.parametrize('source', ['first/adapter', pytest.param('first', marks=pytest.mark.slow)])
def test_a_tuned_run_is_a_base_again(train_tiny, tmp_path, base, monkeypatch, source):
    """So is its folder of adapters. The base of a base is opened too; other sums give no other hash."""
    train_tiny('first', **base)
    second = {**base, 'init_from': tmp_path / source, 'lora_targets': 'mlp'}
    train_tiny('second', **second, max_iters=4)
    monkeypatch.setattr('hotloop.weights.load.merged', lambda weights, *args: weights)  # other sums
    assert train_tiny('second', init_from='resume', max_iters=6) == 0


def test_a_base_is_found_from_another_folder(train_tiny, tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_tiny('tuned', **{**base, 'init_from': 'base'}, max_iters=2)
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    assert load_weights(str(tmp_path / 'tuned')).weights
    train_tiny('elsewhere/base', max_iters=1)  # another run of that name
    assert load_weights(str(tmp_path / 'tuned')).weights
    train_tiny('base', max_iters=1)  # the base becomes base.1
    assert load_weights(str(tmp_path / 'tuned')).weights
    train_tiny('base.1', init_from='resume', max_iters=6)  # its best.pt is another one now
    assert load_weights(str(tmp_path / 'tuned')).weights


def test_a_base_that_changed_or_is_gone_is_named_on_resume(train_tiny, tmp_path, base):
    train_tiny('tuned', **base, max_iters=4)
    best = tmp_path / 'base' / 'best.pt'
    checkpoint = load(best)
    checkpoint['model']['transformer.ln_f.weight'][3] += 1e-6
    torch.save(checkpoint, best)
    (tmp_path / 'base' / 'ckpt.pt').unlink()
    for words in ('weights have changed', 'does not exist'):
        error = error_of(train_tiny, 'tuned', init_from='resume')
        assert f"tuned/ckpt.pt holds adapters of '{tmp_path / 'base'}'" in error and words in error
        shutil.rmtree(tmp_path / 'base', ignore_errors=True)


@pytest.mark.parametrize('settings, words', [
    (dict(lora_rank=4), 'lora_rank=4'), (dict(lora_rank=-1), 'lora_rank=-1'),
    (dict(lora_rank=4, init_from='gpt2', optimizer='muon'), "optimizer='muon'"),
    (dict(lora_rank=4, init_from='gpt2', ortho_penalty=0.1), 'ortho_penalty=0.1'),
    (dict(quantize='nf4'), "quantize='nf4' applies only with"),
    (dict(lora_rank=1, lora_alpha=0), 'lora_alpha=0.0'),
    (dict(lora_rank=1, lora_dropout=1), 'lora_dropout=1.0')])
def test_settings_that_contradict_each_other(train_tiny, settings, words):
    assert words in error_of(train_tiny, **settings)


def test_a_run_without_the_adapters_of_its_card_resumes(train_tiny, tmp_path):
    card = tmp_path / 'card.py'
    card.write_text('lora_rank = 4\nlora_alpha = 3\n')
    assert train_tiny('full', card, lora_rank=0, max_iters=1) == 0
    assert train_tiny('full', init_from='resume', max_iters=2) == 0


def test_a_base_is_not_moved_aside_and_adapters_do_not_appear_on_resume(train_tiny, tmp_path, base):
    error = error_of(train_tiny, 'base', **base)
    assert 'base\', which a new run renames; ' in error
    error = error_of(train_tiny, 'base', init_from='resume', lora_rank=4)
    assert '--lora_rank: lora_rank=4, but the checkpoint has 0, which cannot change on resume' in error


@pytest.mark.slow
def test_two_processes_tune_as_one_does(train_tiny, tmp_path, base, data_dir):
    """One micro-batch each, over gloo: the same global batches, so the same adapters within rounding."""
    train_tiny('one', **base, quantize='nf4')
    on_ranks(2, train.main, tiny_flags(tmp_path / 'two', data_dir, quantize='nf4', **base))
    one, two = (load(tmp_path / name / 'ckpt.pt')['model'] for name in ('one', 'two'))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


# -----------------------------------------------------------------------------
# against peft

def peft_model(kind, **settings):
    """A tiny random model of transformers, with peft's adapters on all of its linears, B not zero."""
    transformers, peft = pytest.importorskip('transformers'), pytest.importorskip('peft')
    torch.manual_seed(0)
    shape = dict(vocab_size=61, bos_token_id=0, eos_token_id=0)
    if kind == 'gpt2':
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0,
                                         embd_pdrop=0, attn_pdrop=0, **shape)
    else:
        config = transformers.AutoConfig.for_model(
            kind, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    targets = ['c_attn', 'c_proj', 'c_fc'] if kind == 'gpt2' else [
        'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj', 'fc1', 'fc2']
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, fan_in_fan_out=kind == 'gpt2',
                             task_type='CAUSAL_LM', **settings)
    tuned = peft.get_peft_model(model, config)
    for name, p in tuned.named_parameters():
        if 'lora_B' in name:
            torch.nn.init.normal_(p, std=0.1)
    return tuned


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_adapters_of_nanochat_load_in_peft_and_here(tmp_path):
    """Its rotation turns the other way, and two of its matrices have other names."""
    theirs, ids = peft_model('nanochat').unload(), torch.randint(61, (2, 16))
    import peft
    theirs.save_pretrained(tmp_path / 'base')
    base = load_weights(str(tmp_path / 'base'))
    tuned = GPT.from_checkpoint(base.model_args, base.weights)
    checkpoint = adapt(tuned) | base.checkpoint | {'model_args': base.model_args}
    checkpoint['lora'] |= {'base': str(tmp_path / 'base'), 'sha256': base.sha256()}
    write_adapter(tmp_path / 'adapter', checkpoint)
    expected = all_logits(tuned, ids)
    again = load_weights(str(tmp_path / 'adapter'))
    torch.testing.assert_close(all_logits(GPT.from_checkpoint(*again[1:3]), ids), expected)
    logits = peft.PeftModel.from_pretrained(theirs, tmp_path / 'adapter')(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('rs', [False, True])
@pytest.mark.parametrize('kind', ['gpt2', 'llama'])
def test_adapters_equal_pefts_and_their_files_load_both_ways(tmp_path, kind, rs):
    """Logits, gradients and merged weights to 1e-5. One matrix of ours may be three of theirs."""
    theirs, ids = peft_model(kind, use_rslora=rs), torch.randint(61, (2, 16))
    import peft
    theirs.save_pretrained(tmp_path / 'peft')
    peft_model(kind).unload().save_pretrained(tmp_path / 'base')
    source = load_weights(str(tmp_path / 'base'))
    ours, summed = (GPT.from_checkpoint(source.model_args, source.weights) for _ in range(2))
    adapters, _, scale = read_adapter(tmp_path / 'peft')
    merged(summed.state_dict(), adapters, scale, 'none')
    checkpoint = adapt(ours, lora_rs=rs)
    parts = checkpoint['lora']['parts']
    for place, tensors in adapters_of(checkpoint['model'], parts).items():
        for mine, read in zip(tensors, adapters[place], strict=True):
            mine.copy_(read)
    write_adapter(tmp_path / 'ours', checkpoint)
    again = peft.PeftModel.from_pretrained(peft_model(kind).unload(), tmp_path / 'ours')
    expected = theirs(ids).logits
    for logits in (all_logits(ours, ids), all_logits(summed, ids), again(ids).logits):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    targets = torch.roll(ids, -1, 1)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction='sum').backward()
    ours(ids, targets).sum().backward()
    found = {name: p.grad for name, p in theirs.named_parameters() if 'lora_' in name}
    own = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    for (layer, projection), gradients in adapters_of(own, parts).items():
        module = f'transformer.h.{layer}.{projection}'
        if kind == 'llama':
            module = f'model.layers.{layer}.{projection.replace("attn", "self_attn")}'
        for letter, grad in zip('AB', gradients, strict=True):
            expected = found.pop(f'base_model.model.{module}.lora_{letter}.default.weight')
            assert (grad - expected).norm() < 1e-5 * expected.norm()
    assert not found
