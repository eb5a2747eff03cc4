"""Load weights to start from: of a run, a checkpoint, a Hugging Face folder or a model of the hub."""

import contextlib
import dataclasses
import glob
import os
import re
import zipfile
from pickle import UnpicklingError
from typing import NamedTuple

import torch

from configurator import did_you_mean
from hotloop.data.download import GPT2_OWNER, cached_config, hub_folder, is_hub_name
from hotloop.data.tokenizer import GPT2_SPEC, GPT2_VOCAB_SIZES, spec_of
from hotloop.data.tokenizer_source import dataset_spec, read_tokenizer_json, template_of
from hotloop.system.files import first_intact, first_line, hash_file, read_json
from hotloop.weights.adapter import TENSORS, base_of, is_adapter, read_adapter
from hotloop.weights.families import CONV1D, model_args_from, our_name
from hotloop.weights.lora import adapters_of, frozen_weights, hash_source, hash_weights, merge
from hotloop.weights.safetensors import read_safetensors

GPT2_SHAPES = {name: dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=1024, vocab_size=50257,
                          bias=True, mlp='gelu_tanh')
               for name, n_layer, n_head, n_embd in (('gpt2', 12, 12, 768), ('gpt2-medium', 24, 16, 1024),
                                                     ('gpt2-large', 36, 20, 1280), ('gpt2-xl', 48, 25, 1600))}
KEYWORDS = ('scratch', 'resume')
INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
TIED = ('transformer.wte.weight', 'lm_head.weight')


class Weights(NamedTuple):
    path: str  # the file or folder they were read from
    model_args: dict  # for GPT.from_checkpoint
    weights: dict  # {name: tensor}
    tokenizer: dict | None  # its spec; None if the source has none
    checkpoint: dict  # the rest of the checkpoint; of a folder, its hf_config and template


def load_weights(source, data_dir):
    """
    Load the Weights of `source`: a run folder, a checkpoint file, a folder of adapters, a Hugging
    Face folder, or a model of the hub such as gpt2, which is downloaded once. Adapters are added to
    their base. Raises ValueError if the source is missing, damaged, or of an unsupported architecture.
    """
    if is_adapter(source):
        return add_folder(source, data_dir)
    folder = find_folder(source)
    if folder is not None:
        return folder_weights(folder, source)
    path, checkpoint = open_checkpoint(source)
    if 'lora' in checkpoint:
        checkpoint['model'] = add_run(checkpoint, path, data_dir)
    model_args, weights = checkpoint.pop('model_args'), checkpoint.pop('model')
    return Weights(path, model_args, weights, spec_of(checkpoint), checkpoint)


def folder_weights(folder, source):
    """Read the Weights of a Hugging Face folder, which `source` names."""
    model_args, weights = load_folder(folder)
    spec = None
    checkpoint = {'hf_config': read_json(os.path.join(folder, 'config.json'))}
    is_gpt2 = source.removeprefix(GPT2_OWNER) in GPT2_SHAPES and folder != source
    if not is_gpt2 and has_tokenizer(folder):  # tiktoken has GPT-2's
        spec = read_tokenizer_json(folder).spec()
        checkpoint['template'] = template_of(folder) or None
    elif model_args['vocab_size'] in GPT2_VOCAB_SIZES:
        spec = GPT2_SPEC
    return Weights(folder, model_args, weights, spec, checkpoint)


def has_tokenizer(folder):
    """Test whether a Hugging Face folder has a tokenizer other than GPT-2's in its old format."""
    paths = {name: os.path.join(folder, name) for name in os.listdir(folder)}
    if 'tokenizer.json' in paths or 'tokenizer.model' in paths:
        return True
    if 'vocab.json' not in paths:
        return False
    return read_json(paths['vocab.json']).get('Ġthe') != 262  # its id in GPT-2's


def find_folder(source):
    """Find or download the Hugging Face folder of `source`. Returns None for a checkpoint."""
    if os.path.exists(os.path.join(source, 'config.json')):
        return source
    if os.path.exists(source):
        return None
    if source in GPT2_SHAPES:
        return hub_folder(f'{GPT2_OWNER}{source}')
    return hub_folder(source) if is_hub_name(source) else None


def shape_of(source, data_dir):
    """Read the model_args of a source without a download. Raises ValueError if it is not here."""
    if is_adapter(source):
        return shape_of(base_of(source)['base'], data_dir)
    path = os.path.join(source, 'config.json')
    if is_hub_name(source):
        path = cached_config(source)
        if path is None:
            raise ValueError(f'{source!r} is not on disk, and a dry run downloads nothing; python '
                             f'sample.py --init_from={source} downloads it, or name a folder with '
                             'its config.json')
    elif not os.path.exists(path):
        return open_checkpoint(source)[1]['model_args']
    return model_args_from(read_json(path), path)


def weight_files(folder):
    """
    List the safetensors files of a folder: one file, which may have an old index beside it, or the
    shards in its index.
    """
    index = os.path.join(folder, INDEX)
    if os.path.exists(os.path.join(folder, SINGLE)) or not os.path.exists(index):
        return [SINGLE]
    names = read_json(index).get('weight_map')
    if not names:
        raise ValueError(f'{index} is damaged: it has no weight_map')
    return sorted({os.path.basename(name) for name in names.values()})


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
        what = ''.join(re.findall(r' GLOBAL (\S+)', str(e))[:1]) or 'unknown'
        raise ValueError(f'{path} was rejected: it is not plain data ({what}) and could run code; save it '
                         'again where it was made, with numbers and text in place of other objects') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except Exception as e:  # reading damaged bytes can raise nearly anything
        raise ValueError(f'{path} is damaged or not a checkpoint: {first_line(e)}') from e
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= checkpoint.keys():
        raise ValueError(f'{path} is not a hotloop or nanoGPT checkpoint: "model" or "model_args" missing')
    prefixes = r'^(_orig_mod\.|module\.)+'  # of torch.compile and DDP, in any order
    checkpoint['model'] = {re.sub(prefixes, '', name): w for name, w in checkpoint['model'].items()}
    if 'transformer.h.0.ln_1.bias' in checkpoint['model']:  # nanoGPT before bias became a setting
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


def checkpoint_paths(folder):
    """List the checkpoints of a run folder, the newest first, without best.pt."""
    newest = os.path.join(folder, 'ckpt.pt')
    pattern = os.path.join(glob.escape(folder), 'ckpt-' + '[0-9]' * 9 + '.pt')  # no copies of the user's
    older = sorted(glob.glob(pattern), reverse=True)
    return [newest, *older] if os.path.exists(newest) else older


def adapt_shape(model, settings, name):
    """
    Crop the context of a loaded model to the block_size of the command, or of the run to resume. name: that
    of its weights. Raises ValueError if the command gives another shape.
    """
    asked, given = dataclasses.asdict(settings.model), settings.given
    if (settings.latest or 'block_size' in given) and asked['block_size'] < model.config.block_size:
        model.crop_block_size(asked['block_size'])
    wrong = []
    for field, has in dataclasses.asdict(model.config).items():
        is_shape = field not in ('dropout', 'label_smoothing')
        if is_shape and field in given and asked[field] not in (None, has):
            or_less = ' or less' if field == 'block_size' else ''
            wrong.append(f'{given[field]}: {field}={asked[field]!r}, but {name} has {has!r}; use '
                         f'--{field}={has}{or_less}')
    if wrong:
        raise ValueError('\n'.join(wrong))


def check_start(name):
    """Raise ValueError if an init_from is no keyword, no path and no possible name of a hub model."""
    is_known = name in KEYWORDS or name in GPT2_SHAPES
    if not is_known and not os.path.exists(name) and not is_hub_name(name):
        raise ValueError(no_such_start(name))


def no_such_start(name):
    """Write the message about weights that do not exist."""
    beside = glob.glob(os.path.join(glob.escape(os.path.dirname(name)), '*')) if '/' in name else []
    known = [*KEYWORDS, *GPT2_SHAPES, *glob.glob('*'), *beside]
    hint = did_you_mean(name, known)
    return (f'{name!r} does not exist{hint}; train first, or name a run, a checkpoint, a Hugging Face '
            f'folder, one of {", ".join(GPT2_SHAPES)}, or a model of the hub such as Qwen/Qwen2.5-0.5B')


def open_start(cfg, resumed, adapts, env):
    """
    Open the weights that a run starts from or, resumed, adds its adapters to. Returns (name, Weights, and
    {'base': name, 'sha256': hash} of adapters or None). adapts: whether the run trains adapters.
    """
    name, base = cfg.init_from, None
    if env.rank:
        env.barrier()  # waits for rank 0, which downloads for all
    if resumed:
        base = {key: resumed.checkpoint['lora'][key] for key in ('base', 'sha256')}
        name, source = base['base'], open_base(base, resumed.path, cfg.data_dir)
    else:
        source = load_weights(name, cfg.data_dir)
        if adapts:
            base = {'base': name, 'sha256': hash_source(source)}
    if env.rank == 0:
        env.barrier()
    with contextlib.suppress(ValueError):  # its dataset is not here
        source = source._replace(tokenizer=tokenizer_of(source, cfg.data_dir))
    return name, source, base


def tokenizer_of(found, data_dir):
    """Find the spec of the tokenizer of Weights; nanoGPT's have that of their dataset."""
    return found.tokenizer or dataset_spec(found.path, found.checkpoint.get('config', {}),
                                           found.model_args['vocab_size'], data_dir)


def open_base(record, path, data_dir):
    """
    Open the Weights that the adapters in `path` were trained on: record['base'], with the hash
    record['sha256'] unless that is None. Raises ValueError if they are missing or have changed.
    """
    name, before = record['base'], record['sha256']
    remedy = ('restore it, or write where a copy of it is into adapter_config.json of a folder of adapters '
              'and give sample.py --init_from=FOLDER')
    try:
        base = load_weights(name, data_dir)
    except ValueError as e:
        raise ValueError(f'{path} holds adapters of {name!r}, which cannot be read: {e}; '
                         f'{remedy}') from None
    if before is not None and hash_source(base) != before:
        raise ValueError(f'{path} holds adapters of {name!r}, whose weights have changed since '
                         f'(SHA-256 {before[:12]}... before); {remedy}')
    return base


def add_run(checkpoint, path, data_dir):
    """Add the adapters of a run to the weights of its base. Returns {name: float32 tensor}."""
    lora = checkpoint['lora']
    # Sums with adapters depend on the machine, so their summands are hashed.
    checkpoint['sha256'] = hash_weights(checkpoint['model'], lora['sha256'])
    base = open_base(lora, path, data_dir)
    if 'hf_config' in base.checkpoint:
        checkpoint['hf_config'] = base.checkpoint['hf_config']
    weights = frozen_weights(base.weights, lora['quantize'])
    if 'transformer.wpe.weight' in weights:  # the run may have shortened the context
        rows = checkpoint['model_args']['block_size']
        weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:rows]
    merge(weights, adapters_of(checkpoint), lora['scale'])
    return weights


def add_folder(folder, data_dir):
    """Add the adapters of a folder to their base. Returns its Weights, with the tokenizer of the adapters."""
    lora = base_of(folder)
    base = open_base(lora, folder, data_dir)
    base.checkpoint['sha256'] = hash_file(os.path.join(folder, TENSORS))
    base.checkpoint['template'] = lora['template'] or base.checkpoint.get('template')
    weights = frozen_weights(base.weights, lora['quantize'])
    adapters, scale = read_adapter(folder, weights, base.path)
    merge(weights, adapters, scale)
    return base._replace(path=folder, weights=weights, tokenizer=lora['tokenizer'] or base.tokenizer)


def open_checkpoint(source):
    """Load (path, checkpoint) of a file, or of a run's first intact one: best.pt, ckpt.pt, older ones."""
    if not os.path.exists(source):
        raise ValueError(no_such_start(source))
    if not os.path.isdir(source):
        return source, load_checkpoint(source)
    best = os.path.join(source, 'best.pt')
    paths = checkpoint_paths(source)
    if os.path.exists(best):
        paths.insert(0, best)
    if not paths:
        raise ValueError(f'{source!r} holds neither a checkpoint, nor a Hugging Face config.json, nor '
                         'adapters')
    return first_intact(paths, load_checkpoint)


def load_folder(folder):
    """
    Load (model_args, weights) of a Hugging Face folder. Weights keep their dtype and stay in the
    mapped files, except matrices that are joined here.
    """
    path = os.path.join(folder, 'config.json')
    config = read_json(path)
    model_args = model_args_from(config, path)
    kind = config['model_type']
    names = os.listdir(folder)
    if SINGLE not in names and INDEX not in names:
        raise ValueError(f'{folder} has no {SINGLE}, and other formats are not read, because they '
                         'can run code. If you trust its source, transformers converts it: '
                         f'AutoModelForCausalLM.from_pretrained({folder!r})'
                         f'.save_pretrained({folder!r})')
    found = {}
    for file in weight_files(folder):
        for name, tensor in read_safetensors(os.path.join(folder, file)).items():
            place = our_name(name, kind)
            if place is None:
                continue
            if kind == 'gpt2' and name.endswith(CONV1D):  # OpenAI's "Conv1D" stores (in, out)
                tensor = tensor.t()
            found.setdefault(place[0], {})[place[1]] = tensor
    weights = {}
    for name, by_place in found.items():
        parts = [by_place[place] for place in sorted(by_place)]
        weights[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    # Of a tied pair a file may have either; a head that differs is kept, as in transformers.
    both = [weights[name] for name in TIED if name in weights]
    if model_args['tie'] and both:
        weights[TIED[0]] = both[0]
        weights[TIED[1]] = both[-1]
        model_args['tie'] = torch.equal(both[0], both[-1])
    return model_args, weights
