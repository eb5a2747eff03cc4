"""Load weights to start from: of a run, a checkpoint, adapters, a Hugging Face folder or a hub model."""

import contextlib
import dataclasses
import functools
import glob
import os
import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch

from configurator import did_you_mean
from hotloop.data.download import GPT2_OWNER, cached_config, hub_folder, is_hub_name
from hotloop.data.tokenizer import GPT2_SPEC, GPT2_VOCAB_SIZES, spec_of, template_of_record
from hotloop.data.tokenizer_source import dataset_spec, known_template, read_optional, read_tokenizer_json
from hotloop.system.distributed import print0
from hotloop.system.files import checkpoint_paths, first_intact, hash_file, read_json
from hotloop.system.text import first_line
from hotloop.weights.adapter import TENSORS, base_of, family_of, is_adapter, read_adapter, swap_nanochat
from hotloop.weights.families import CONV1D, head_dim_of, model_args_from, our_name, swap_halves
from hotloop.weights.lora import adapters_of, embeddings_of, hash_weights, merged
from hotloop.weights.safetensors import read_safetensors

GPT2_SHAPES = {name: dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=1024, vocab_size=50257,
                          bias=True, mlp='gelu_tanh')
               for name, n_layer, n_head, n_embd in (('gpt2', 12, 12, 768), ('gpt2-medium', 24, 16, 1024),
                                                     ('gpt2-large', 36, 20, 1280), ('gpt2-xl', 48, 25, 1600))}
KEYWORDS = ('scratch', 'resume')
WTE, HEAD = 'transformer.wte.weight', 'lm_head.weight'


class Weights(NamedTuple):
    path: str  # the file or folder they were read from
    model_args: dict  # for GPT.from_checkpoint
    weights: dict  # {name: tensor}
    tokenizer: dict | None  # its spec; None if the source has none
    checkpoint: dict  # the rest of the checkpoint; of a folder, its hf_config and template

    def sha256(self):
        """Hash the weights, 0.6 s per GB; with adapters base and adapters, as sums vary by machine."""
        return self.checkpoint.get('sha256') or hash_weights(self.weights)


def load_weights(source):
    """
    Load the Weights of `source`: a run folder, a checkpoint file, a folder of adapters, a Hugging
    Face folder, or a model of the hub such as gpt2, which is downloaded once. Adapters are added to
    their base. Raises ValueError if the source is missing, damaged, or of an unsupported architecture.
    """
    is_gpt2 = False
    if not os.path.exists(source):
        name = GPT2_OWNER + source if source in GPT2_SHAPES else source
        if is_hub_name(name):
            is_gpt2 = name.startswith(GPT2_OWNER)
            folder = hub_folder(name, ['config.json', 'adapter_config.json'])
            if not is_adapter(folder):
                shape_of(folder)  # refuses other architectures before their gigabytes come
            source = hub_folder(name)
    if is_adapter(source):
        return load_adapter(source)
    if os.path.exists(os.path.join(source, 'config.json')):
        return load_folder(source, is_gpt2)
    return load_run(source)


# -----------------------------------------------------------------------------
# runs and checkpoints

def load_run(source):
    """Load the Weights of a checkpoint file, or of a run's first intact checkpoint."""
    path, rest = open_checkpoint(source)
    model_args = rest.pop('model_args')
    weights = rest.pop('model')
    if 'lora' in rest:
        lora = rest['lora']
        base = open_base(lora, path)
        model_args['block_size'] = base.model_args['block_size']  # the run may have read shorter texts
        rest |= {'sha256': hash_weights(weights, lora['sha256']),
                 'hf_config': base.checkpoint.get('hf_config')}
        weights = merged(base.weights | embeddings_of(weights), adapters_of(weights, lora['parts']),
                         lora['scale'], lora['quantize'])
    return Weights(path, model_args, weights, spec_of(rest), rest)


def open_checkpoint(source):
    """Load (path, checkpoint) of a file, or of a run's first intact one: best.pt, ckpt.pt, older ones."""
    check_start(source)
    if source.endswith(('.safetensors', '.json', '.bin', '.gguf')):
        raise ValueError(f'{source} is no checkpoint; name the folder of a model, which has a config.json')
    if not os.path.isdir(source):
        return source, load_checkpoint(source)
    paths = checkpoint_paths(source, best=True)
    if not paths:
        raise ValueError(f'{source!r} holds neither a checkpoint, nor a Hugging Face config.json, '
                         'nor adapters; name a folder that does, perhaps one inside it')
    return first_intact(paths, load_checkpoint)


def load_checkpoint(path):
    """
    Load a checkpoint of ours or of nanoGPT onto the CPU. Checksums are verified first, because torch.load
    ignores them: of 400 files with one flipped bit it loaded 398 with wrong values.
    """
    if torch.__version__ < (2, 10):  # weights_only=True can be made to run code there
        raise ValueError(f'torch {torch.__version__} cannot load checkpoints safely (CVE-2026-24747): '
                         'pip install "torch>=2.11"')
    try:
        check_records(path)
        # mapped, the processes of a machine share the pages of the file: 8 copies would take 75 GB at 773M
        several = int(os.environ.get('WORLD_SIZE', '1')) > 1
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=several)
    except UnpicklingError as e:  # torch's own message recommends weights_only=False
        what = re.search(r' GLOBAL (\S+)|$', str(e))[1]
        raise ValueError(f'{path} was rejected: it is not plain data ({what}) and could run code') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except Exception as e:  # reading damaged bytes can raise nearly anything
        if isinstance(e, MemoryError) or 'allocate memory' in str(e):  # nor does an older one fit
            raise MemoryError(f'there is not enough memory to load {path}') from None
        raise ValueError(f'{path} is damaged or not a checkpoint: {first_line(e)}') from e
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= checkpoint.keys():
        raise ValueError(f'{path} is not a hotloop or nanoGPT checkpoint: "model" or "model_args" missing')
    # without the prefixes of torch.compile and DDP
    weights = {re.sub(r'^(_orig_mod\.|module\.)+', '', name): w for name, w in checkpoint['model'].items()}
    checkpoint['model'] = weights
    if 'transformer.h.0.ln_1.bias' in weights:  # nanoGPT before bias became a setting
        checkpoint['model_args'].setdefault('bias', True)
    return checkpoint


def check_records(path):
    """Raise ValueError unless `path` is a zip file whose records all match their CRC-32."""
    with zipfile.ZipFile(path) as z:
        # one flipped bit turns a record into a folder for torch, which then returns uninitialized memory
        if any(record.external_attr or record.compress_type or record.is_dir() for record in z.infolist()):
            raise ValueError('the list of records is invalid')
        if damaged := z.testzip():
            raise ValueError(f'the checksum of record {damaged} does not match')


# -----------------------------------------------------------------------------
# adapters

def load_adapter(folder):
    """Load the Weights of a folder of adapters, added to their base."""
    record = base_of(folder)
    matrices, embeddings, scale = read_adapter(folder)  # its errors before the base is downloaded
    base = open_base(record, folder)
    rest = {'sha256': hash_file(os.path.join(folder, TENSORS)),
            'hf_config': base.checkpoint.get('hf_config'),
            'template': record['template'] or known_template(folder) or template_of_record(base.checkpoint),
            'is_their_template': not record['template']}
    family = record['family']
    if not family and (rest['hf_config'] or not record['sha256']):  # older folders of ours are as trained
        family = family_of(rest['hf_config'], base.model_args)
    matrices = swap_nanochat(matrices, family, base.model_args)
    weights = merged(base.weights | embeddings, matrices, scale, record['quantize'])
    model_args = {**base.model_args, 'vocab_size': len(weights[WTE])}  # that of embeddings saved by peft
    if embeddings and not torch.equal(weights[WTE], weights[HEAD]):
        model_args['tie'] = False  # peft unties a tied pair
    spec = record['tokenizer']
    if not spec and os.path.exists(os.path.join(folder, 'tokenizer.json')):  # with tokens for its chats
        spec = read_tokenizer_json(folder).spec()
    return Weights(folder, model_args, weights, spec or base.tokenizer, rest)


def base_places(name, path):
    """
    List the places where the base `name` of the adapters in `path` may be, the likeliest first: as
    named, beside a folder of `path`, for commands in another folder than training, or moved to
    folder.1, folder.2, ... by a later run.
    """
    if name in GPT2_SHAPES:
        return [name]
    beside = [folder / name for folder in Path(path).resolve().parents]
    here = dict.fromkeys(place.resolve() for place in (Path(name), *beside) if place.exists())
    places = list(map(str, here))
    for place in here:
        places += sorted(glob.glob(glob.escape(str(place)) + '.[0-9]*'))
    return places or [name]


def open_base(record, path):
    """
    Load the Weights that the adapters in `path` were trained on: record['base'], with the hash
    record['sha256'] unless that is None. Raises ValueError if they are missing or have changed.
    """
    name = record['base']
    places = base_places(name, path)
    if record['sha256']:  # which also tells an older checkpoint of a run that went on
        folders = [place if os.path.isdir(place) else os.path.dirname(place) for place in places]
        places += [path for folder in folders for path in checkpoint_paths(folder)]
    else:
        places = places[:1]
    problem = None  # that of the likeliest place
    for place in places:
        try:
            base = load_weights(place)
        except ValueError as e:
            problem = problem or e
            continue
        if not record['sha256'] or record['sha256'] == base.sha256():
            return base
        problem = problem or f'its weights have changed (SHA-256 was {record["sha256"][:12]}...)'
    raise ValueError(f'{path} holds adapters of {name!r}: {problem}; restore it, or name a copy of it in '
                     'the adapter_config.json of the adapters (of a run: in adapter/) and use that folder')


# -----------------------------------------------------------------------------
# Hugging Face folders

def load_folder(folder, is_gpt2=False):
    """
    Load the Weights of a Hugging Face folder. They keep their dtype and stay in the mapped files,
    except matrices that are joined here. is_gpt2: tiktoken has its tokenizer.
    """
    path = os.path.join(folder, 'config.json')
    config = read_json(path)
    model_args = model_args_from(config, path)
    weights = read_tensors(folder, config['model_type'])
    if config['model_type'] == 'nanochat':
        swap_halves(weights, head_dim_of(model_args))
    # Of a tied pair a file may have either; a head that differs is kept, as in transformers.
    both = [weights[name] for name in (WTE, HEAD) if name in weights]
    if model_args['tie'] and both:
        weights |= {WTE: both[0], HEAD: both[-1]}
        model_args['tie'] = torch.equal(both[0], both[-1])
    spec = None
    rest = {'hf_config': config}
    vocab = read_optional(folder, 'vocab.json')  # an old format, of GPT-2 or of another model
    is_other = bool(vocab) and vocab.get('Ġthe') != 262
    if not is_gpt2 and (is_other or {'tokenizer.json', 'tokenizer.model'} & set(os.listdir(folder))):
        spec = read_tokenizer_json(folder).spec()
        rest |= {'template': known_template(folder), 'is_their_template': True}
    elif model_args['vocab_size'] in GPT2_VOCAB_SIZES:
        spec = GPT2_SPEC
    return Weights(folder, model_args, weights, spec, rest)


def read_tensors(folder, kind):
    """Map the safetensors of a folder, one file or shards, under our names. kind: its model_type."""
    paths = [os.path.join(folder, 'model.safetensors')]
    if not os.path.exists(paths[0]):
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), 'model-*.safetensors')))
    if not paths:
        raise ValueError(f'{folder} has no model.safetensors; a model of the hub is downloaded by a first '
                         'command with a network; if you trust its source, transformers makes a folder: '
                         'AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER) '
                         'and AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)')
    total = re.search(r'-of-(\d+)\.safetensors$', paths[0])
    if total and len(paths) != int(total[1]):
        raise ValueError(f'{folder} has {len(paths)} of {int(total[1])} files of weights; delete those that '
                         'model.safetensors.index.json does not list, or download it again')
    found = {}
    for path in paths:
        for name, tensor in read_safetensors(path).items():
            if name.endswith(('.attn.bias', '.attn.masked_bias', 'rotary_emb.inv_freq')):
                continue  # a buffer of an old version
            if kind == 'gpt2' and name.endswith(CONV1D):  # OpenAI's "Conv1D" stores (in, out)
                tensor = tensor.t()
            found[our_name(name, kind)] = tensor
    weights = {}
    for name, place in sorted(found):
        weights.setdefault(name, []).append(found[name, place])
    for name, parts in weights.items():
        weights[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return weights


# -----------------------------------------------------------------------------
# the start of a run

def check_start(name):
    """Raise ValueError if an init_from is no keyword, no path and no possible name of a hub model."""
    if name in (*KEYWORDS, *GPT2_SHAPES) or os.path.exists(name) or is_hub_name(name):
        return
    beside = glob.glob(os.path.join(glob.escape(os.path.dirname(name)), '*'))
    hint = did_you_mean(name, [*KEYWORDS, *GPT2_SHAPES, *beside])
    raise ValueError(f'{name!r} does not exist{hint}; train first, or name a run, a checkpoint, a Hugging '
                     f'Face folder, one of {", ".join(GPT2_SHAPES)}, or a hub model like Qwen/Qwen2.5-0.5B')


def shape_of(source):
    """Read the model_args of a source without a download. Raises ValueError if it is not here."""
    if source in GPT2_SHAPES:
        return GPT2_SHAPES[source]
    if is_adapter(source):
        return shape_of(base_places(base_of(source)['base'], source)[0])
    path = os.path.join(source, 'config.json')
    if is_hub_name(source):
        path = cached_config(source)
        if path is None:
            raise ValueError(f'{source!r} has no config.json on this disk, and a dry run downloads nothing; '
                             'name a folder with one')
    elif not os.path.exists(path):
        checkpoint = open_checkpoint(source)[1]
        shape = checkpoint['model_args']
        if 'lora' in checkpoint:  # whose run may have read shorter texts
            base = base_places(checkpoint['lora']['base'], source)[0]
            shape = {**shape, 'block_size': shape_of(base)['block_size']}
        return shape
    return model_args_from(read_json(path), path)


def open_start(cfg, resumed, adapts, env):
    """
    Open the weights that a run starts from or, resumed, adds its adapters to. Returns (name, Weights, and
    {'base': name, 'sha256': hash} of adapters or None). adapts: whether the run trains adapters.
    """
    name = cfg.init_from
    base = None
    load = functools.partial(load_weights, name)
    if resumed:
        base = {key: resumed.checkpoint['lora'][key] for key in ('base', 'sha256')}
        name = base['base']
        load = functools.partial(open_base, base, resumed.path)
    if env.rank == 0:
        source = env.together(load)
    else:
        env.together(bool)  # wait for rank 0, which downloads for all
        source = load()
    if adapts and not resumed:
        base = {'base': name, 'sha256': source.sha256()}
    with contextlib.suppress(ValueError):  # its dataset is not here
        source = source._replace(tokenizer=tokenizer_of(source, cfg.data_dir))
    return name, source, base


def tokenizer_of(found, data_dir):
    """Find the spec of the tokenizer of Weights; nanoGPT's have that of their dataset."""
    return found.tokenizer or dataset_spec(found.path, found.checkpoint.get('config', {}),
                                           found.model_args['vocab_size'], data_dir)


def adapt_shape(model, settings, name):
    """
    Crop the context of a model to the block_size of the command or of the run to resume. name: that of its
    weights. Raises ValueError if the command gives another shape.
    """
    asked, given = dataclasses.asdict(settings.model), settings.given
    context = model.config.block_size
    if (settings.latest or 'block_size' in given) and asked['block_size'] < context:
        if not settings.latest and not settings.lora.lora_rank:
            print0(f'note: the context is cut from {context:,} tokens to {asked["block_size"]:,}')
        model.crop_block_size(asked['block_size'])
    wrong = []
    for field, has in dataclasses.asdict(model.config).items():
        if field in given and asked[field] not in (None, has):
            or_less = ' or less' if field == 'block_size' else ''
            wrong.append(f'{given[field]}: {field}={asked[field]!r}, but {name} has {has!r}; use '
                         f'--{field}={has}{or_less}')
    if wrong:
        raise ValueError('\n'.join(wrong))
