"""Downloads: retried, resumed, checked."""

import contextlib
import os
import sys
import time
from urllib.parse import urlsplit

from hotloop.files import Progress, first_line, hash_file, lock, sync_folder

BACKOFF = 1.0  # seconds before another attempt; grows with each that brings nothing new
PATIENCE = 30.0  # seconds without a byte before a connection counts as lost
ATTEMPTS = 6  # in a row that bring nothing new


def hub():
    """The address of the Hugging Face hub, or of the mirror in HF_ENDPOINT."""
    return os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')


def download(url, path, sha256=None):
    """
    Downloads a file unless it is there, and returns its path. It is written to path.part, which a later call
    resumes, and renamed once its length and its SHA-256 (the argument, or the hub's) are right.
    HF_ENDPOINT, HF_TOKEN (sent to the hub alone) and proxies apply. ValueError says what is wrong.
    """
    if os.path.exists(path):
        return path
    part, folder, held = path + '.part', os.path.dirname(path) or '.', None
    try:
        os.makedirs(folder, exist_ok=True)
        held = lock(path + '.lock')
        if not os.path.exists(path):
            print(f'downloading {url}', file=sys.stderr)
            linked = fetch(url, part)
            expected = sha256 or linked
            if expected and hash_file(part) != expected:
                os.remove(part)
                raise ValueError(f'{url} does not have the SHA-256 {expected}; it was deleted, try again')
            os.replace(part, path)
            sync_folder(folder)
    except OSError as e:
        raise ValueError(f'{url} cannot be downloaded to {path}: {e.strerror or first_line(e)}') from None
    finally:
        if held:
            held.release()
    for left in (part + '.etag', path + '.lock', path + '.lock.pid'):
        with contextlib.suppress(OSError):
            os.remove(left)
    return path


def fetch(url, part):
    """Downloads to the file `part`, resumed after each cut. Returns the SHA-256 from the hub, or None."""
    import requests
    from urllib3.util import Retry
    retry = Retry(5, connect=2, status_forcelist=(408, 425, 429, *range(500, 505)), raise_on_status=False,
                  backoff_factor=BACKOFF, respect_retry_after_header=False)
    failures, most = 0, 0
    with requests.Session() as session:
        for scheme in ('http://', 'https://'):
            session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
        while failures < ATTEMPTS:
            with request(session, url, part) as answer, \
                    contextlib.suppress(requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                if receive(answer, part):
                    return linked_hash(answer)
            size = os.path.getsize(part)
            failures = 0 if size > most else failures + 1
            most = max(size, most)
            time.sleep(BACKOFF * failures)
    raise ValueError(f'{url}: the connection broke {ATTEMPTS} times in a row; run this again to resume')


def request(session, url, part):
    """The server's answer: the rest of the file if `part` is the start of that version, else all of it."""
    import requests
    headers, etag, have = {'Accept-Encoding': 'identity'}, '', 0
    if url.startswith(hub() + '/') and os.environ.get('HF_TOKEN'):
        headers['Authorization'] = f'Bearer {os.environ["HF_TOKEN"]}'
    with contextlib.suppress(OSError), open(part + '.etag', encoding='utf-8') as f:
        etag, have = f.read(), os.path.getsize(part)
    if have and etag.startswith('"'):  # not a weak one, W/"..."
        headers |= {'Range': f'bytes={have}-', 'If-Range': etag}
    try:
        answer = session.get(url, headers=headers, stream=True, timeout=PATIENCE)
    except (requests.ConnectionError, requests.Timeout) as e:
        raise ValueError(f'{url}: no connection to {urlsplit(url).netloc} ({type(e).__name__}); '
                         'check the network and the proxy settings') from None
    status = answer.status_code
    is_rest = status == 206 and answer.headers.get('ETag') == etag
    if 'Range' in headers and status in (206, 416) and not is_rest:  # of another version: begin again
        os.remove(part + '.etag')
        return request(session, url, part)
    if status != 200 and not is_rest:
        remedy = 'try again later' if status >= 500 else 'check the address; does it need HF_TOKEN?'
        raise ValueError(f'{url} answers {status} {answer.reason}; {remedy}')
    if 'text/html' in answer.headers.get('Content-Type', '') and '.htm' not in url:
        raise ValueError(f'{url} is a web page; give the address of the file itself')
    return answer


def receive(answer, part):
    """Writes an answer to the file `part`, or appends it. Returns whether the file is complete."""
    etag, length = answer.headers.get('ETag', ''), answer.headers.get('Content-Length')
    if 'Content-Encoding' in answer.headers:  # they describe other bytes
        etag, length = '', None
    with open(part, 'ab' if answer.status_code == 206 else 'wb') as f:
        have = f.tell()
        if not have:
            with open(part + '.etag', 'w', encoding='utf-8') as version:
                version.write(etag)
        size = None if length is None else have + int(length)
        progress = Progress(size or 0)
        progress.add(have)
        for chunk in answer.iter_content(1 << 18):
            f.write(chunk)
            progress.add(len(chunk))
        progress.close()
        f.flush()
        os.fsync(f.fileno())
        return size in (None, f.tell())


def linked_hash(answer):
    """The SHA-256 that the hub sends before it redirects to where the bytes are; None if there is none."""
    for one in (*answer.history, answer):
        etag = one.headers.get('X-Linked-ETag', '').strip('"')
        if len(etag) == 64:  # git's hash of a small file has 40
            return etag
    return None
