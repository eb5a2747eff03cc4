"""Downloads from a local server that misbehaves: what is refused, and never kept."""

import contextlib
import gzip
import random

import pytest
from conftest import contents

from hotloop.data.download import download

BODY = bytes(range(256)) * 4000  # a megabyte, several chunks


def answer(body=BODY, status=200, cut=None, **headers):
    """Sends the body, at most `cut` bytes of it."""
    def send(handler):
        handler.send_response(status)
        for name, value in {'Content-Length': len(body), **headers}.items():
            handler.send_header(name.replace('_', '-'), str(value))
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(body[:cut])
    return send


@pytest.mark.parametrize('reply, words', [
    (answer(cut=600_000), 'cannot be downloaded: .*; run the command again, or put the file at'),
    (answer(b'', 404), 'cannot be downloaded: 404 Not Found; '),
    (answer(b'<html>Log in', Content_Type='text/html; charset=utf-8'), 'is a web page; give'),
])
def test_a_failed_download_is_one_sentence_and_starts_again(server, tmp_path, reply, words):
    server.script = [reply]
    with pytest.raises(ValueError, match=words) as e:
        download(server.url, str(tmp_path / 'f'))
    assert str(e.value).startswith(server.url) and '\n' not in str(e.value)
    assert not contents(tmp_path)
    server.script = [answer()]
    download(server.url, str(tmp_path / 'f'))
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
    path = str(tmp_path / 'f')
    with pytest.raises(ValueError, match=f'cannot be downloaded: Connection refused; .* {path}$'):
        download(url, path)
