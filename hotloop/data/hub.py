"""Models of the Hugging Face hub: the folder of one, in the hub's own cache or downloaded once."""

import os
import re

from hotloop.data.download import download, hub, hub_home
from hotloop.system.files import read_json

GPT2_OWNER = 'openai-community/'  # on the hub; here its models have short names
INDEX, SINGLE = 'model.safetensors.index.json', 'model.safetensors'


def is_hub_name(name):
    """Whether a name may be a model of the hub: ORGANIZATION/MODEL, and nothing on disk."""
    looks = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) and not name.endswith(('.pt', '.json'))
    return bool(looks) and not os.path.exists(name)


def weight_files(folder):
    """
    The names of the safetensors files of a folder: one file, which may have an old index beside it, or the
    shards in its index. ValueError for a damaged index.
    """
    index = os.path.join(folder, INDEX)
    if os.path.exists(os.path.join(folder, SINGLE)) or not os.path.exists(index):
        return [SINGLE]
    names = read_json(index).get('weight_map')
    if not names:
        raise ValueError(f'{index} is damaged: it has no weight_map')
    return sorted({os.path.basename(name) for name in names.values()})


def find_on_disk(name, data_dir, needed):
    """The folder that holds a model of the hub and all needed(folder) files; None if it is not here."""
    caches = os.environ.get('HF_HUB_CACHE') or os.path.join(hub_home(), 'hub')
    cache = os.path.join(caches, f'models--{name.replace("/", "--")}')
    folders = [own_folder(name, data_dir)]
    head = os.path.join(cache, 'refs', 'main')
    if os.path.exists(head):
        with open(head, encoding='utf-8') as f:
            folders.append(os.path.join(cache, 'snapshots', f.read().strip()))
    for folder in folders:
        if all(os.path.exists(os.path.join(folder, file)) for file in needed(folder)):
            return folder
    return None


def own_folder(name, data_dir):
    return os.path.join(data_dir, 'pretrained', name.removeprefix(GPT2_OWNER))


def model_files(folder):
    return ['config.json', *weight_files(folder)]


def hub_model(name, data_dir):
    """The folder of a model of the hub, with its weights and, if it has one, its tokenizer."""
    found = find_on_disk(name, data_dir, model_files)
    if found:
        return found
    folder = own_folder(name, data_dir)
    fetch(name, 'config.json', folder)
    if not name.startswith(GPT2_OWNER):  # of which tiktoken has the tokenizer
        for file in ('generation_config.json', 'tokenizer_config.json', 'chat_template.jinja', INDEX):
            fetch(name, file, folder, required=False)
        any(fetch(name, file, folder, required=False)
            for file in ('tokenizer.json', 'tokenizer.model', 'vocab.json'))
    for file in weight_files(folder):
        fetch(name, file, folder)
    return folder


def hub_tokenizer(name, data_dir):
    """The folder of a model of the hub that has its tokenizer.json, without its weights."""
    found = find_on_disk(name, data_dir, lambda folder: ['tokenizer.json'])
    if found:
        return found
    folder = own_folder(name, data_dir)
    for file in ('tokenizer_config.json', 'chat_template.jinja'):
        fetch(name, file, folder, required=False)
    fetch(name, 'tokenizer.json', folder)
    return folder


def fetch(name, file, folder, required=True):
    """Downloads a file of a model. Returns whether the model has it. ValueError if it is required."""
    try:
        download(f'{hub()}/{name}/resolve/main/{file}', os.path.join(folder, file))
    except ValueError as e:
        status, page, hint = getattr(e, 'status', None), f'{hub()}/{name}', ''
        if status == 404 and not required:
            return False
        if status == 404:
            hint = f'; see {page}/tree/main: a model needs config.json, safetensors and tokenizer.json'
        elif status in (401, 403):
            hint = f'; check the name, and accept the license of a gated model at {page}'
        raise ValueError(f'{name!r} is not on disk, and {e}{hint}') from None
    return True
