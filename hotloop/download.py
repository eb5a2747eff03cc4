"""Downloads: retried, resumed, checked."""

import glob
import hashlib
import os
import re
import sys
import time

from hotloop.files import Progress, hash_file

ATTEMPTS, PAUSE = 6, 1.0  # in a row without a byte of progress; seconds before the second, doubling after that
PATIENCE = 30.0  # seconds without a byte after which a connection counts as cut


def hub():
    return os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')


def download(url, path, sha256=None):
    """
    One file, unless it is there already: written aside and renamed when its length and its hash (sha256, or the ETag
    where that is one) are right. A cut connection is resumed, a server's failure retried, now or by the next command.
    HF_ENDPOINT, HF_TOKEN and proxies are honoured. ValueError says what is wrong.
    """
    import requests
    if os.path.exists(path):
        return path
    print(f'downloading {url}', file=sys.stderr)
    attempt, most = 0, 0
    while True:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return fetch(url, path, sha256)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError, Interrupted) as e:
            here = sum(os.path.getsize(p) for p in glob.glob(glob.escape(path) + '.*.part'))
            attempt, most = 1 if here > most else attempt + 1, max(here, most)
            if attempt == ATTEMPTS:
                raise ValueError(f'{url} could not be downloaded, after {ATTEMPTS} attempts: '
                                 f'{type(e).__name__}: {e}') from None
            time.sleep(max(PAUSE * 2**(attempt - 1), min(getattr(e, 'wait', 0), 60)))
        except (requests.RequestException, OSError) as e:
            raise ValueError(f'{url} could not be downloaded: {type(e).__name__}: {e}') from None


class Interrupted(Exception):
    """An answer that another attempt may better; wait: seconds that the server asks for."""

    def __init__(self, text, wait=0.0):
        super().__init__(text)
        self.wait = wait


def fetch(url, path, sha256):
    """One attempt of download()."""
    import requests
    token = os.environ.get('HF_TOKEN') if url.startswith(hub() + '/') else None
    headers = {'Accept-Encoding': 'identity', **({'Authorization': f'Bearer {token}'} if token else {})}

    def get(more=()):
        return requests.get(url, headers=headers | dict(more), stream=True, timeout=PATIENCE)
    with get() as answer:
        check_answer(url, answer)
        # the hub tells length and hash on its first answer and redirects to where the bytes are
        told = {k.lower(): v for a in [*answer.history, answer] for k, v in a.headers.items()}
        encoded = answer.headers.get('Content-Encoding', 'identity') != 'identity'
        length = '' if encoded else answer.headers.get('Content-Length') or told.get('x-linked-size') or ''
        length = int(length) if length.isdecimal() else -1
        etag = sha256 or (told.get('x-linked-etag') or told.get('etag') or '').removeprefix('W/').strip('"')
        is_hash = sha256 or 'x-linked-etag' in told or url.startswith(hub() + '/')
        # the name of what is there so far says which version of the file it is of
        version = hashlib.sha256(f'{etag} {told.get("last-modified")} {length}'.encode()).hexdigest()[:8]
        part = f'{path}.{version}.part'
        with open(part, 'ab') as f:

            have, goes_on = f.tell(), False
            if 0 < have < length:
                with get({'Range': f'bytes={have}-'}) as rest:
                    told_range = rest.headers.get('Content-Range', '')
                    if goes_on := rest.status_code == 206 and told_range.startswith(f'bytes {have}-'):
                        receive(rest, f, length)
            if have != length and not goes_on:
                f.seek(f.truncate(0))
                receive(answer, f, length)
            size = f.tell()
            os.fsync(f.fileno())
    if 0 <= length != size:
        if size > length:
            os.remove(part)
        raise Interrupted(f'{size:,} bytes came, not {length:,}')
    # the hub's ETag is a SHA-256, or the SHA-1 of a git blob; other servers' say what they like
    kind = {64: hashlib.sha256, 40: lambda: hashlib.sha1(f'blob {size}\0'.encode())}.get(len(etag))
    found = hash_file(part, kind) if is_hash and kind and re.fullmatch('[0-9a-f]+', etag) else etag
    if found != etag:
        os.remove(part)
        raise ValueError(f'{url}: the hash of what came is {found}, not {etag}; run it again')
    os.replace(part, path)
    for left in glob.glob(glob.escape(path) + '.*.part'):  # of versions before this one
        os.remove(left)
    return path


def check_answer(url, answer):
    """ValueError or Interrupted unless the answer is a file."""
    if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
        wait = answer.headers.get('Retry-After', '')
        raise Interrupted(f'it answered {answer.status_code} {answer.reason}', int(wait) if wait.isdigit() else 0)
    if answer.status_code != 200:
        hint = '; set HF_TOKEN if it is yours to read' if answer.status_code in (401, 403) else ''
        raise ValueError(f'{url} answered {answer.status_code} {answer.reason}{hint}')
    if 'text/html' in answer.headers.get('Content-Type', '') and not url.partition('?')[0].endswith(('.html', '.htm')):
        raise ValueError(f'{url} is a web page, not the file; give the address of the file itself')


def receive(answer, f, length):
    """Writes the body behind what the file holds."""
    progress = Progress(length)
    progress.add(f.tell())
    for chunk in answer.iter_content(1 << 20):
        f.write(chunk)
        progress.add(len(chunk))
    f.flush()
    progress.close()
