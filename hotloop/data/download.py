"""Downloads with retries, resuming and checksums."""

import contextlib
import os
import re
import sys
import time
from urllib.parse import urlsplit

from hotloop.system.files import Progress, first_line, hash_file, lock, reason_of, rename, sync_folder

BACKOFF = 1.0  # seconds before another attempt; grows with each that fails
PATIENCE = 30.0  # seconds without a byte before a connection counts as lost
ATTEMPTS = 5  # in a row without progress
UNREACHED = 2  # attempts while the host has not answered at all
BUSY = (408, 425, 429, 500, 502, 503, 504)  # status codes worth a retry


class Refused(ValueError):
    """A server's answer with an error status."""

    def __init__(self, message, status):
        super().__init__(message)
        self.status = status


def hub():
    """The address of the Hugging Face hub, or of the mirror in HF_ENDPOINT."""
    return os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')


def hub_home():
    """The folder where Hugging Face's own tools keep models and the token."""
    return os.environ.get('HF_HOME') or os.path.expanduser('~/.cache/huggingface')


def hub_token():
    """The token in HF_TOKEN, or the one of `hf auth login`; '' if there is none."""
    if token := os.environ.get('HF_TOKEN'):
        return token
    with contextlib.suppress(OSError), open(os.path.join(hub_home(), 'token'), encoding='utf-8') as f:
        return f.read().strip()
    return ''


def download(url, path, sha256=None):
    """
    Downloads a file unless it is there, and returns its path. It is written to path.part, which a later call
    resumes, and renamed once its length and its SHA-256 (the argument, or what the hub sends) are right.
    HF_ENDPOINT, HF_HOME, HF_TOKEN (sent to the hub alone) and proxies apply. ValueError says what is wrong.
    """
    if os.path.exists(path):
        return path
    part = path + '.part'
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        held = lock(path + '.lock')
        try:
            print(f'downloading {url}', file=sys.stderr)
            linked = fetch(url, part)
            expected = sha256 or linked
            if expected and (found := hash_file(part)) != expected:
                os.remove(part)
                raise ValueError(f'{url} has SHA-256 {found}, not {expected}; the download was deleted; run '
                                 'the command again')
            rename(part, path)
            sync_folder(os.path.dirname(path) or '.')
        finally:
            if held:
                held.release()
            if not os.path.exists(part):  # complete, or never begun
                for left in (part + '.etag', path + '.lock', path + '.lock.pid'):
                    with contextlib.suppress(OSError):
                        os.remove(left)
    except OSError as e:
        raise ValueError(f'{url} cannot be downloaded to {path}: {e.strerror or first_line(e)}') from None
    return path


def fetch(url, part):
    """Downloads to the file part, with resuming. Returns the SHA-256 that the hub sends, or None."""
    import requests
    transient = requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError
    failures, most, reached = 0, 0, False
    with requests.Session() as session:
        while failures < (ATTEMPTS if reached else UNREACHED):
            time.sleep(BACKOFF * failures)
            reason = 'the connection was lost'
            try:
                with request(session, url, part) as answer:
                    reached = True
                    if answer.status_code in BUSY:
                        reason = f'{answer.status_code} {answer.reason}'
                    elif receive(answer, part):
                        return linked_hash(answer)
            except transient as e:
                reason = reason_of(e)
            size = os.path.getsize(part) if os.path.exists(part) else 0
            failures = 0 if reached and size > most else failures + 1
            most = max(size, most)
    if not reached:
        raise ValueError(f'{url} cannot be reached: {reason}; check the network and the proxy settings, or '
                         f'put the file at {part.removesuffix(".part")}')
    raise ValueError(f'{url}: {reason}, {ATTEMPTS} times in a row; check the network and the proxy settings, '
                     'or run the command again later')


def read_url(url):
    """The bytes at an address, in one attempt; raises what requests raises."""
    import requests
    answer = requests.get(url, timeout=(min(PATIENCE, 5), PATIENCE))
    answer.raise_for_status()
    return answer.content


def request(session, url, part):
    """The server's answer: the rest of the file if part is the start of the same version, or all of it."""
    headers, etag, have = {'Accept-Encoding': 'identity'}, '', 0
    if url.startswith(hub() + '/') and (token := hub_token()):
        headers['Authorization'] = f'Bearer {token}'
    with contextlib.suppress(OSError), open(part + '.etag', encoding='utf-8') as f:
        etag, have = f.read(), os.path.getsize(part)
    if etag and have:
        headers |= {'Range': f'bytes={have}-', 'If-Range': etag}
    answer = session.get(url, headers=headers, stream=True, timeout=(min(PATIENCE, 5), PATIENCE))
    status, rest = answer.status_code, answer.headers.get('Content-Range', '')
    is_rest = status == 206 and rest.startswith(f'bytes {have}-') and answer.headers.get('ETag') == etag
    if 'Range' in headers and status in (206, 416) and not is_rest:  # of another version: start over
        os.remove(part + '.etag')
        return request(session, url, part)
    if status not in (200, *BUSY) and not is_rest:
        hint = 'set HF_TOKEN to a token that may read it' if status in (401, 403) else 'check the address'
        raise Refused(f'{url} returned {status} {answer.reason}; {hint}', status)
    is_page = 'text/html' in answer.headers.get('Content-Type', '')
    if status == 200 and is_page and not urlsplit(url).path.endswith(('.html', '.htm')):
        raise ValueError(f'{url} is a web page; give the address of the file itself')
    return answer


def receive(answer, part):
    """Writes an answer to the file part, or appends it (206). Returns whether the file is complete."""
    etag, length = answer.headers.get('ETag', ''), answer.headers.get('Content-Length')
    if 'Content-Encoding' in answer.headers:
        if part.lower().endswith(('.gz.part', '.zst.part')):  # the file itself: without the header it is kept
            del answer.raw.headers['Content-Encoding']
        else:  # length and ranges refer to the encoded bytes
            etag, length = '', None
    with open(part, 'ab' if answer.status_code == 206 else 'wb') as f:
        have = f.tell()
        if not have:
            with open(part + '.etag', 'w', encoding='utf-8') as version:
                version.write('' if etag.startswith('W/') else etag)
        size = None if length is None else have + int(length)
        progress = Progress(size or 0, have)
        for chunk in answer.iter_content(1 << 18):
            f.write(chunk)
            progress.add(len(chunk))
        progress.close()
        f.flush()
        os.fsync(f.fileno())
        return size in (None, f.tell())


def linked_hash(answer):
    """The SHA-256 that the hub sends before it redirects to the file; None if there is none."""
    for one in (*answer.history, answer):
        if found := re.fullmatch('(?:W/)?"?([0-9a-f]{64})"?', one.headers.get('X-Linked-ETag', '')):
            return found[1]
    return None
