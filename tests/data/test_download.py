"""Downloads from a local server that misbehaves: what is resumed, retried, refused, and never kept."""

import contextlib
import gzip
import hashlib
import os
import random
import threading

import pytest
from conftest import contents

from hotloop.data.download import download

BODY = bytes(range(256)) * 4000  # a megabyte, several chunks
SHA256 = hashlib.sha256(BODY).hexdigest()


def answer(body=BODY, status=200, cut=None, ranges='if', etag='"v1"', **headers):
    """Sends the body, at most `cut` bytes of it. ranges: 'if' the ETag matches, 'always', or never (None)."""
    def send(handler):
        start, wanted = 0, handler.headers.get('Range')
        matches = ranges == 'always' or (ranges == 'if' and handler.headers.get('If-Range') == etag)
        if wanted and status == 200 and matches:
            start = int(wanted.removeprefix('bytes=').removesuffix('-'))
        handler.send_response(206 if start else status)
        if start:
            handler.send_header('Content-Range', f'bytes {start}-{len(body) - 1}/{len(body)}')
        sent = {'Content-Length': len(body) - start, 'ETag': etag, **headers}
        for name, value in sent.items():
            if value is not None:
                handler.send_header(name.replace('_', '-'), str(value))
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(body[start:] if cut is None else body[start:start + cut])
    return send


def starts(server):
    """The first byte that each request asked for."""
    return [int(seen.get('Range', 'bytes=0-')[6:-1]) for seen in server.seen]


def test_a_busy_server_is_asked_again(server, tmp_path):
    server.script = [answer(b'later', 503), answer()]
    assert download(server.url, str(tmp_path / 'new' / 'f')) == str(tmp_path / 'new' / 'f')
    assert contents(tmp_path) == {os.path.join('new', 'f'): BODY}


@pytest.mark.parametrize('ranges', ['if', 'always', None])
@pytest.mark.parametrize('changed', [False, True])
def test_the_next_command_resumes_the_same_version_only(server, tmp_path, ranges, changed):
    """Also with a server that ignores If-Range, and one that ignores ranges."""
    server.script = [answer(BODY[::-1] if changed else BODY, cut=600_000)]
    with pytest.raises(ValueError, match=r'cannot be reached: .*; run the command again to resume'):
        download(server.url, str(tmp_path / 'f'))
    assert 0 < (tmp_path / 'f.part').stat().st_size <= 600_000 and not (tmp_path / 'f').exists()
    server.script, before = [answer(ranges=ranges, etag='"v2"' if changed else '"v1"')], len(server.seen)
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}
    assert server.seen[before]['If-Range'] == '"v1"' and starts(server)[before] > 0


@pytest.mark.parametrize('reply, words, requests', [
    (answer(b'', 404), 'returned 404 Not Found; check the address', 1),
    (answer(b'', 503), 'returned 503 Service Unavailable; ', 5),
    (answer(b'<html>Log in', Content_Type='text/html; charset=utf-8'), 'is a web page; give', 1),
])
def test_one_sentence_and_no_file(server, tmp_path, reply, words, requests):
    server.script = [reply]
    with pytest.raises(ValueError, match=words) as e:
        download(server.url, str(tmp_path / 'f'))
    assert str(e.value).startswith(server.url) and '\n' not in str(e.value) and len(server.seen) == requests
    assert not contents(tmp_path)
    server.script = [answer()]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}


def test_a_hash_that_does_not_match_is_an_error(server, tmp_path):
    server.script = [answer()]
    download(server.url, str(tmp_path / 'a'), SHA256)
    with pytest.raises(ValueError, match=f'has SHA-256 {SHA256}, not 0000'):
        download(server.url, str(tmp_path / 'b'), '0' * 64)
    assert 'b' not in contents(tmp_path) and 'b.part' not in contents(tmp_path)


def test_a_compressed_file_is_kept_as_it_is(server, tmp_path):
    """Many servers name the compression of a .gz file as an encoding of the response."""
    data = gzip.compress(random.Random(0).randbytes(800_000))
    server.script = [answer(data, Content_Encoding='gzip')]
    download(server.url, str(tmp_path / 'f.txt.gz'))
    assert contents(tmp_path) == {'f.txt.gz': data}


def test_a_connection_that_hangs_is_cut(server, tmp_path, monkeypatch):
    monkeypatch.setattr('hotloop.data.download.PATIENCE', 0.3)
    done = threading.Event()

    def hang(handler):
        answer(cut=600_000)(handler)
        handler.wfile.flush()
        done.wait(20)
    server.script = [hang]
    try:
        with pytest.raises(ValueError, match='run the command again to resume'):
            download(server.url, str(tmp_path / 'f'))
    finally:
        done.set()
    assert (tmp_path / 'f.part').stat().st_size > 0


def test_without_a_network_the_error_names_where_to_put_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr('hotloop.data.download.BACKOFF', 0.001)
    monkeypatch.setenv('NO_PROXY', '*')
    url = 'http://127.0.0.1:9/f'  # the discard port, where nobody listens
    with pytest.raises(ValueError, match=f'cannot be reached: Connection refused; .* {tmp_path}/f$'):
        download(url, str(tmp_path / 'f'))


def test_a_file_that_is_there_is_not_fetched(server, tmp_path):
    (tmp_path / 'f').write_bytes(b'complete')
    assert download(server.url, str(tmp_path / 'f')) == str(tmp_path / 'f')
    assert not server.seen
