"""Download files from the web, and models and datasets from the Hugging Face hub."""

import os
import re
import sys
from urllib.parse import urlsplit

from hotloop.system.files import counting, optional, replacing
from hotloop.system.text import reason_of

TIMEOUT = (5, 30)  # seconds to connect, and between bytes

GPT2_OWNER = 'openai-community/'  # on the hub; here its models have short names
TOKENIZER_FILES = ['tokenizer_config.json', 'chat_template.jinja', 'tokenizer.json', 'config.json',
                   'generation_config.json']  # the last two name ids that end an answer
MODEL_FILES = ['tokenizer.model', 'vocab.json', 'model.safetensors', 'model-*.safetensors',
               'adapter_config.json', 'adapter_model.safetensors', *TOKENIZER_FILES]


# -----------------------------------------------------------------------------
# files of the web

def open_url(url, **options):
    """Request an address. Returns the response. Raises OSError."""
    import requests  # 40 ms, which only a download pays
    response = requests.get(url, timeout=TIMEOUT, **options)
    if not response.ok:
        raise OSError(response.status_code, f'{response.status_code} {response.reason}')
    return response


def download(url, path):
    """Download a file unless it exists, and return its path. An error or a kill leaves no file."""
    if os.path.exists(path):
        print(f'{path} was downloaded before; delete it to download {url} again', file=sys.stderr)
        return path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    print(f'downloading {url}', file=sys.stderr)
    try:
        response = open_url(url, headers={'Accept-Encoding': 'identity'}, stream=True)
        is_page = 'text/html' in response.headers.get('Content-Type', '')
        if is_page and not urlsplit(url).path.endswith(('.html', '.htm')):
            raise ValueError(f'{url} is a web page; give the address of the file itself')
        with replacing(path) as f:
            # The request refuses encodings, so one in the reply is that of the file itself.
            response.raw.headers.pop('Content-Encoding', None)
            size = int(response.headers.get('Content-Length', 0))
            for chunk in counting(response.iter_content(1 << 18), len, size):
                f.write(chunk)
            if f.tell() < size:
                raise ConnectionError('the connection was lost')
    except OSError as e:  # of requests, or of the disk
        raise ValueError(f'{url} cannot be downloaded: {reason_of(e)}; run the command again, or put '
                         f'the file at {path}') from None
    return path


# -----------------------------------------------------------------------------
# the hub

def is_hub_name(name):
    """Test whether a name may be a model of the hub: ORGANIZATION/MODEL, and nothing on disk."""
    looks = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) and not name.endswith(('.pt', '.json'))
    return bool(looks) and not os.path.exists(name)


def hub_folder(name, patterns=MODEL_FILES, kind='model', folder=None):
    """
    Download the files of a repository on the hub that match the patterns, unless they are in its
    cache or in `folder`. Returns the folder. Without a network, files that are complete are found.
    """
    hub = optional('huggingface_hub', f'downloads {name!r}, which is not on this disk')
    try:
        return hub.snapshot_download(name, repo_type=kind, allow_patterns=patterns, local_dir=folder)
    except Exception as e:  # of huggingface_hub, of its HTTP client and of the file system
        raise ValueError(f'{name!r} is not on this disk, and could not be downloaded: {type(e).__name__} '
                         f'{" ".join(str(e).split())}') from None


def cached_config(name):
    """Find the config.json of a model in the cache of the hub. Returns None if it is missing."""
    path = optional('huggingface_hub', f'finds {name}').try_to_load_from_cache(name, 'config.json')
    return path if isinstance(path, str) else None
