"""Downloads from a local server that misbehaves: what is resumed, refused, and never kept."""

import contextlib
import gzip
import hashlib
import random

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


@pytest.mark.parametrize('ranges', ['if', 'always', None])
@pytest.mark.parametrize('changed', [False, True])
def test_the_next_command_resumes_the_same_version_only(server, tmp_path, ranges, changed):
    """Also with a server that ignores If-Range, and one that ignores ranges."""
    server.script = [answer(BODY[::-1] if changed else BODY, cut=600_000)]
    with pytest.raises(ValueError, match=r'cannot be downloaded: .*; run the command again to resume'):
        download(server.url, str(tmp_path / 'f'))
    assert 0 < (tmp_path / 'f.part').stat().st_size <= 600_000 and not (tmp_path / 'f').exists()
    server.script, before = [answer(ranges=ranges, etag='"v2"' if changed else '"v1"')], len(server.seen)
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}
    assert server.seen[before]['If-Range'] == '"v1"' and starts(server)[before] > 0


@pytest.mark.parametrize('reply, words', [
    (answer(b'', 404), 'returned 404 Not Found; check the address'),
    (answer(b'', 503), 'returned 503 Service Unavailable; '),
    (answer(b'<html>Log in', Content_Type='text/html; charset=utf-8'), 'is a web page; give'),
])
def test_one_sentence_and_no_file(server, tmp_path, reply, words):
    server.script = [reply]
    with pytest.raises(ValueError, match=words) as e:
        download(server.url, str(tmp_path / 'f'))
    assert str(e.value).startswith(server.url) and '\n' not in str(e.value)
    assert not contents(tmp_path)
    server.script = [answer()]
    with pytest.raises(ValueError, match=f'has SHA-256 {SHA256}, not 0000'):
        download(server.url, str(tmp_path / 'f'), '0' * 64)
    assert not contents(tmp_path)
    download(server.url, str(tmp_path / 'f'), SHA256)
    assert contents(tmp_path) == {'f': BODY}


def test_a_compressed_file_is_kept_as_it_is(server, tmp_path):
    """Many servers name the compression of a .gz file as an encoding of the response."""
    data = gzip.compress(random.Random(0).randbytes(800_000))
    server.script = [answer(data, Content_Encoding='gzip')]
    download(server.url, str(tmp_path / 'f.txt.gz'))
    assert contents(tmp_path) == {'f.txt.gz': data}


def test_without_a_network_the_error_names_where_to_put_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv('NO_PROXY', '*')
    url = 'http://127.0.0.1:9/f'  # the discard port, where nobody listens
    with pytest.raises(ValueError, match=f'cannot be downloaded: Connection refused; .* {tmp_path}/f$'):
        download(url, str(tmp_path / 'f'))


def test_a_file_that_is_there_is_not_fetched(server, tmp_path):
    (tmp_path / 'f').write_bytes(b'complete')
    assert download(server.url, str(tmp_path / 'f')) == str(tmp_path / 'f')
    assert not server.seen
