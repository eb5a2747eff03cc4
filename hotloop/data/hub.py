"""Find models of the Hugging Face hub in its cache, or download them with huggingface_hub."""

import os
import re

from hotloop.system.files import first_line, optional, read_json

GPT2_OWNER = 'openai-community/'  # on the hub; here its models have short names
INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
TOKENIZER_FILES = ['tokenizer_config.json', 'chat_template.jinja', 'tokenizer.json']
MODEL_FILES = ['config.json', 'generation_config.json', 'tokenizer.model', 'vocab.json', SINGLE,
               'model-*.safetensors', INDEX, *TOKENIZER_FILES]


def is_hub_name(name):
    """Test whether a name may be a model of the hub: ORGANIZATION/MODEL, and nothing on disk."""
    looks = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) and not name.endswith(('.pt', '.json'))
    return bool(looks) and not os.path.exists(name)


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


def hub_model(name):
    """Find or download the folder of a model with its weights and, if it has one, its tokenizer."""
    return cached_model(name) or download(name, MODEL_FILES)


def hub_tokenizer(name):
    """Find or download the folder of a model with its tokenizer.json, without its weights."""
    folder = cached(name, TOKENIZER_FILES)
    if folder and os.path.exists(os.path.join(folder, 'tokenizer.json')):
        return folder
    return download(name, TOKENIZER_FILES)


def cached_model(name):
    """Find the folder of a model on this disk. Returns None if a file of its weights is missing."""
    folder = cached(name, MODEL_FILES)
    if folder is None:
        return None
    for file in ('config.json', *weight_files(folder)):
        if not os.path.exists(os.path.join(folder, file)):
            return None
    return folder


def cached(name, patterns):
    """Find a model in the cache of the hub, without a network; its files may be incomplete."""
    hub = optional('huggingface_hub', f'finds and downloads {name}')
    try:
        return hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True)
    except (OSError, ValueError):  # LocalEntryNotFoundError
        return None


def download(name, patterns):
    """Download the files of a model. Raises ValueError in one sentence, with the remedy."""
    hub = optional('huggingface_hub', f'downloads {name}')
    errors = optional('huggingface_hub.errors', f'downloads {name}')
    page = f'https://huggingface.co/{name}'
    try:
        return hub.snapshot_download(name, allow_patterns=patterns)
    except errors.GatedRepoError:
        reason = f'accept its license at {page}, and set HF_TOKEN or log in with: hf auth login'
    except errors.RepositoryNotFoundError:
        reason = f'{page} does not exist, or is private and HF_TOKEN may not read it'
    except Exception as e:  # of huggingface_hub, of its HTTP client and of the file system
        reason = first_line(e)
    raise ValueError(f'{name!r} is not on disk and could not be downloaded: {reason}')
