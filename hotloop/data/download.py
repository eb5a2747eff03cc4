"""Download files of the web, and models and datasets of the Hugging Face hub."""

import contextlib
import os
import re
import sys
from urllib.parse import urlsplit

from hotloop.system.files import Progress, hash_file, optional, reason_of

TIMEOUT = (5, 30)  # seconds to connect, and without a byte

GPT2_OWNER = 'openai-community/'  # on the hub; here its models have short names
TOKENIZER_FILES = ['tokenizer_config.json', 'chat_template.jinja', 'tokenizer.json']
MODEL_FILES = ['config.json', 'generation_config.json', 'tokenizer.model', 'vocab.json',
               'model.safetensors', 'model-*.safetensors', 'model.safetensors.index.json',
               *TOKENIZER_FILES]


# -----------------------------------------------------------------------------
# files of the web

def read_url(url):
    """Return the bytes at an address, in one attempt. Raises what requests raises."""
    import requests  # 40 ms, which only a download pays
    response = requests.get(url, timeout=TIMEOUT)
    response.raise_for_status()
    return response.content


def download(url, path, sha256=None):
    """
    Download a file unless it exists, and return its path. A download that is cut off stays in
    path.part, and the next call resumes it.
    """
    if os.path.exists(path):
        return path
    part = path + '.part'
    os.makedirs(os.path.dirname(path), exist_ok=True)
    print(f'downloading {url}', file=sys.stderr)
    try:
        receive(request(url, part), part)
    except OSError as e:  # of requests, or of the disk
        raise ValueError(f'{url} cannot be downloaded: {reason_of(e)}; run the command again to '
                         f'resume, or put the file at {path}') from None
    with contextlib.suppress(FileNotFoundError):
        os.remove(part + '.etag')
    found = hash_file(part)
    if sha256 not in (None, found):
        os.remove(part)
        raise ValueError(f'{url} has SHA-256 {found}, not {sha256}; the download was deleted; run '
                         'the command again')
    os.replace(part, path)
    return path


def request(url, part):
    """Request the rest of the file if `part` is a start of the same version, else all of it."""
    import requests
    headers = {'Accept-Encoding': 'identity'}
    etag = ''
    if os.path.exists(part) and os.path.exists(part + '.etag'):
        with open(part + '.etag', encoding='utf-8') as f:
            etag = f.read()
    if etag:
        headers |= {'Range': f'bytes={os.path.getsize(part)}-', 'If-Range': etag}
    response = requests.get(url, headers=headers, stream=True, timeout=TIMEOUT)
    status = response.status_code
    if etag and (status == 416 or (status == 206 and response.headers.get('ETag') != etag)):
        os.remove(part + '.etag')  # The server has another version, so the download starts over.
        return request(url, part)
    if status not in (200, 206):
        raise ValueError(f'{url} returned {status} {response.reason}; check the address, or run '
                         'the command again later')
    is_page = 'text/html' in response.headers.get('Content-Type', '')
    if is_page and not urlsplit(url).path.endswith(('.html', '.htm')):
        raise ValueError(f'{url} is a web page; give the address of the file itself')
    return response


def receive(response, part):
    """Write a response to `part`, or append it (206). Raises ConnectionError if it is cut off."""
    # The request refuses encodings: one that is named is the compression of the file itself.
    response.raw.headers.pop('Content-Encoding', None)
    mode = 'wb'
    if response.status_code == 206:
        mode = 'ab'
    with open(part, mode) as f:
        with open(part + '.etag', 'w', encoding='utf-8') as version:
            version.write(response.headers.get('ETag', '').removeprefix('W/'))
        size = f.tell() + int(response.headers.get('Content-Length', 0))
        progress = Progress(size, f.tell())
        for chunk in response.iter_content(1 << 18):
            f.write(chunk)
            progress.add(len(chunk))
        progress.close()
        f.flush()
        os.fsync(f.fileno())
        if f.tell() < size:
            raise ConnectionError('the connection was lost')


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
    hub = optional('huggingface_hub', f'downloads {name}')
    try:
        return hub.snapshot_download(name, repo_type=kind, allow_patterns=patterns,
                                     local_dir=folder)
    except Exception as e:  # of huggingface_hub, of its HTTP client and of the file system
        reason = ' '.join(str(e).split()) or type(e).__name__
        raise ValueError(f'{name!r} could not be downloaded from the hub: {reason}') from None


def cached_config(name):
    """Find the config.json of a model in the cache of the hub. Returns None if it is missing."""
    hub = optional('huggingface_hub', f'finds {name}')
    path = hub.try_to_load_from_cache(name, 'config.json')
    if isinstance(path, str):
        return path
    return None
