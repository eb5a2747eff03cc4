"""Download files, with retries, resuming and checksums."""

import contextlib
import os
import re
import sys
from urllib.parse import urlsplit

from hotloop.system.files import Progress, first_line, hash_file, lock, reason_of

ATTEMPTS = 5
BACKOFF = 1.0  # seconds before the second attempt; doubles with each
PATIENCE = 30.0  # seconds without a byte after which a connection counts as lost
BUSY = (408, 425, 429, 500, 502, 503, 504)  # status codes worth a retry


class Refused(ValueError):
    """A response with an error status."""

    def __init__(self, message, status):
        super().__init__(message)
        self.status = status


def hub():
    """Return the address of the Hugging Face hub, or of the mirror in HF_ENDPOINT."""
    return os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')


def hub_home():
    """Return the folder where Hugging Face's own tools keep models and the token."""
    return os.environ.get('HF_HOME') or os.path.expanduser('~/.cache/huggingface')


def hub_token():
    """Return the token in HF_TOKEN or of `hf auth login`, or ''."""
    if token := os.environ.get('HF_TOKEN'):
        return token
    with contextlib.suppress(OSError), open(os.path.join(hub_home(), 'token'), encoding='utf-8') as f:
        return f.read().strip()
    return ''


def read_url(url):
    """Return the bytes at an address, in one attempt. Raises what requests raises."""
    import requests
    response = requests.get(url, timeout=(min(PATIENCE, 5), PATIENCE))
    response.raise_for_status()
    return response.content


def download(url, path, sha256=None):
    """
    Download a file unless it exists, and return its path. A broken download stays in path.part, and
    the next call resumes it. HF_ENDPOINT, HF_HOME, HF_TOKEN (sent to the hub alone) and proxies
    apply. sha256: default is what the hub sends. Raises Refused with the status of a response.
    """
    import requests
    if os.path.exists(path):
        return path
    part = path + '.part'
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    held = lock(path + '.lock')
    print(f'downloading {url}', file=sys.stderr)
    try:
        expected = fetch(url, part, sha256)
        found = hash_file(part)
        if expected not in (None, found):
            os.remove(part)
            raise ValueError(f'{url} has SHA-256 {found}, not {expected}; the download was deleted; run the '
                             'command again')
        os.replace(part, path)
    except requests.RequestException as e:
        raise ValueError(f'{url} cannot be reached: {reason_of(e)}; check the network and the proxy '
                         f'settings, or put the file at {path}') from None
    except OSError as e:
        raise ValueError(f'{url} cannot be downloaded to {path}: {e.strerror or first_line(e)}') from None
    finally:
        if held:
            held.release()
        if not os.path.exists(part):
            for left in (part + '.etag', path + '.lock', path + '.lock.pid'):
                with contextlib.suppress(OSError):
                    os.remove(left)
    return path


def fetch(url, part, sha256):
    """Complete the file `part`. Returns its expected SHA-256 or None. Resumes while bytes arrive."""
    import requests
    most = 0
    while True:
        response = request(url, part)
        try:
            receive(response, part)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
            size = os.path.getsize(part)
            if size <= most:
                raise
            most = size
            continue
        for sent in (*response.history, response):  # The hub sends its hash before it redirects.
            if found := re.fullmatch('"([0-9a-f]{64})"', sent.headers.get('X-Linked-ETag', '')):
                return sha256 or found[1]
        return sha256


def request(url, part):
    """Ask for the rest of the file if `part` is a start of the same version, else for all of it."""
    import requests
    from urllib3.util import Retry
    retry = Retry(ATTEMPTS - 1, connect=1, backoff_factor=BACKOFF, status_forcelist=BUSY,
                  raise_on_status=False)
    session = requests.Session()
    for scheme in ('http://', 'https://'):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    headers = {'Accept-Encoding': 'identity'}
    if url.startswith(hub() + '/') and (token := hub_token()):
        headers['Authorization'] = f'Bearer {token}'
    etag = ''
    if os.path.exists(part) and os.path.exists(part + '.etag'):
        with open(part + '.etag', encoding='utf-8') as f:
            etag = f.read()
    if etag:
        headers |= {'Range': f'bytes={os.path.getsize(part)}-', 'If-Range': etag}
    response = session.get(url, headers=headers, stream=True, timeout=(min(PATIENCE, 5), PATIENCE))
    status = response.status_code
    if etag and (status == 416 or (status == 206 and response.headers.get('ETag') != etag)):
        os.remove(part + '.etag')  # The server has another version, so the download starts over.
        return request(url, part)
    if status not in (200, 206):
        hint = 'check the address'
        if status in (401, 403):
            hint = 'set HF_TOKEN to a token that may read it'
        if status in BUSY:
            hint = 'run the command again later'
        raise Refused(f'{url} returned {status} {response.reason}; {hint}', status)
    is_page = 'text/html' in response.headers.get('Content-Type', '')
    if is_page and not urlsplit(url).path.endswith(('.html', '.htm')):
        raise ValueError(f'{url} is a web page; give the address of the file itself')
    return response


def receive(response, part):
    """Write a response to `part`, or append it (206). Raises ConnectionError if it is cut off."""
    import requests
    # The request refuses encodings: one that is named is the compression of the file itself.
    response.raw.headers.pop('Content-Encoding', None)
    with open(part, 'ab' if response.status_code == 206 else 'wb') as f:
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
            raise requests.ConnectionError('the connection was lost')
