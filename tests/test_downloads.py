"""Downloads from a server that misbehaves on purpose: what is resumed, what is retried, and what is never kept."""

import contextlib
import gzip
import hashlib
import http.server
import os
import threading
from types import SimpleNamespace

import pytest
from conftest import contents

import prepare
from hotloop.download import download
from hotloop.files import lock

BODY = bytes(range(256)) * 20_000  # five megabytes: several chunks
GOOD = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server(monkeypatch):
    """server.script: functions, one an answer, the last for all that follow; server.seen: the requests' headers."""
    monkeypatch.setattr('hotloop.download.PAUSE', 0.001)
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(dict(self.headers))
            script = state.script
            (script.pop(0) if len(script) > 1 else script[0])(self)

        def log_message(self, *args):
            pass
    httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    seen = []
    monkeypatch.setenv('HF_ENDPOINT', f'http://127.0.0.1:{httpd.server_port}')  # whose ETags are hashes
    state = SimpleNamespace(script=[], seen=seen, url=f'http://127.0.0.1:{httpd.server_port}/file.bin')
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def answer(body=BODY, status=200, cut=None, ranges=True, length=None, **headers):
    """An answer that honours Range if `ranges`, and breaks off after `cut` bytes."""
    def give(handler):
        start = 0
        wanted = handler.headers.get('Range')
        if wanted and ranges and status == 200:
            start = int(wanted.removeprefix('bytes=').removesuffix('-'))
        part = body[start:]
        handler.send_response(206 if start else status)
        if start:
            handler.send_header('Content-Range', f'bytes {start}-{len(body) - 1}/{len(body)}')
        handler.send_header('Content-Length', str(len(part) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace('_', '-'), value)
        handler.end_headers()
        with contextlib.suppress(OSError):  # the other side asks for the rest only, and has gone
            handler.wfile.write(part if cut is None else part[:cut])
    return give


def test_a_cut_connection_is_resumed_where_it_broke(server, tmp_path):
    server.script = [answer(cut=2_000_000, ETag=f'"{GOOD}"'), answer(ETag=f'"{GOOD}"')]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}
    starts = [int(seen['Range'].removeprefix('bytes=').removesuffix('-')) for seen in server.seen if 'Range' in seen]
    assert starts and 0 < starts[0] <= 2_000_000


def test_however_often_it_breaks_as_long_as_something_comes(server, tmp_path):
    server.script = [answer(cut=1_100_000, ETag=f'"{GOOD}"')] * 11 + [answer(ETag=f'"{GOOD}"')]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}


def test_a_second_command_goes_on_with_what_the_first_got(server, tmp_path, monkeypatch):
    server.script = [answer(cut=3_000_000, ETag=f'"{GOOD}"'), answer(status=503)]
    with pytest.raises(ValueError, match='could not be downloaded, after 6 attempts: Interrupted: it answered 503'):
        download(server.url, str(tmp_path / 'f'))
    (left,) = contents(tmp_path).values()
    assert BODY.startswith(left) and len(left) >= 2**20 and not (tmp_path / 'f').exists()
    server.script, before = [answer(ETag=f'"{GOOD}"')], len(server.seen)
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}
    assert [seen.get('Range') for seen in server.seen[before:]] == [None, f'bytes={len(left)}-']


def test_what_is_left_of_another_version_is_not_continued(server, tmp_path):
    old = BODY[::-1]
    server.script = [answer(old, cut=3_000_000, ETag=f'"{hashlib.sha256(old).hexdigest()}"'), answer(status=500)]
    with pytest.raises(ValueError, match='500'):
        download(server.url, str(tmp_path / 'f'))
    server.script = [answer(ETag=f'"{GOOD}"')]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}  # and the other one's part is gone


def test_a_server_without_ranges_gives_it_all_again(server, tmp_path):
    server.script = [answer(cut=2_000_000, ETag='"x"', ranges=False), answer(ETag='"x"', ranges=False)]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}


@pytest.mark.parametrize('status', [429, 500, 503])
def test_a_failure_of_the_server_is_tried_again(server, tmp_path, status):
    server.script = [answer(b'later', status), answer(b'later', status, Retry_After='0'), answer()]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY} and len(server.seen) == 3


@pytest.mark.parametrize('script, words, requests', [
    ([answer(b'not here', 404)], 'answered 404 Not Found$', 1),
    ([answer(b'no', 401)], 'answered 401 Unauthorized; set HF_TOKEN', 1),
    ([answer(b'<html>Log in</html>', Content_Type='text/html; charset=utf-8')], 'is a web page, not the file', 1),
    ([answer(ETag='"' + '0' * 64 + '"')], f'the hash of what came is {GOOD}, not 0000', 1),
    ([answer(b'', 503)], 'after 6 attempts: Interrupted: it answered 503', 6),
])
def test_one_sentence_and_no_file(server, tmp_path, script, words, requests):
    server.script = script
    with pytest.raises(ValueError, match=words) as e:
        download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {} and len(server.seen) == requests
    assert str(e.value).startswith(server.url) and '\n' not in str(e.value)


def test_a_connection_that_hangs_is_cut_and_resumed(server, tmp_path, monkeypatch):
    monkeypatch.setattr('hotloop.download.PATIENCE', 0.3)
    done = threading.Event()

    def hang(handler):
        answer(cut=2_000_000, ETag=f'"{GOOD}"')(handler)
        handler.wfile.flush()
        done.wait(20)
    server.script = [hang, answer(ETag=f'"{GOOD}"')]
    try:
        download(server.url, str(tmp_path / 'f'))
    finally:
        done.set()
    assert contents(tmp_path) == {'f': BODY} and any('Range' in seen for seen in server.seen)


@pytest.mark.parametrize('to, words', [('file:///etc/passwd', 'InvalidSchema'), ('ftp://127.0.0.1/f', 'InvalidSchema'),
                                       ('', 'TooManyRedirects')])
def test_a_redirect_leads_to_another_page_or_nowhere(server, tmp_path, to, words):
    server.script = [answer(b'', 302, Location=to or server.url)]
    with pytest.raises(ValueError, match=f'could not be downloaded: {words}'):
        download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {}


def test_a_length_that_is_no_number_is_none(server, tmp_path):
    server.script = [answer(length='many', ETag=f'"{GOOD}"')]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}


def test_a_body_of_untold_length_begins_anew(server, tmp_path):
    """What was cut before may be all there is of a file, and is no beginning of it."""
    def chunked(cut):
        def give(handler):
            handler.protocol_version = 'HTTP/1.1'
            handler.send_response(200)
            handler.send_header('Transfer-Encoding', 'chunked')
            handler.end_headers()
            for at in range(0, len(BODY), 2**20)[:cut]:
                part = BODY[at:at + 2**20]
                handler.wfile.write(f'{len(part):x}\r\n'.encode() + part + b'\r\n')
            handler.wfile.write(b'' if cut else b'0\r\n\r\n')
            handler.close_connection = True
        return give
    server.script = [chunked(2), chunked(None)]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY} and len(server.seen) == 2


def test_only_the_hubs_etags_are_hashes(server, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:1')
    for name, etag in (('f', '0' * 64), ('g', '0' * 40)):
        server.script = [answer(ETag=f'"{etag}"')]
        download(server.url, str(tmp_path / name))
    server.script = [answer(ETag='"x"', X_Linked_Etag=f'"{"0" * 64}"')]
    with pytest.raises(ValueError, match='the hash of what came is'):
        download(server.url, str(tmp_path / 'h'))
    assert contents(tmp_path) == {'f': BODY, 'g': BODY}


def test_a_connection_that_always_breaks_ends(server, tmp_path):
    server.script = [answer(cut=1_500_000, ETag=f'"{GOOD}"', ranges=False)]
    with pytest.raises(ValueError, match='after 6 attempts'):
        download(server.url, str(tmp_path / 'f'))
    assert not (tmp_path / 'f').exists() and len(server.seen) < 20


def test_a_hash_that_is_known_beforehand(server, tmp_path):
    server.script = [answer(ETag='"a server\'s own"')]
    download(server.url, str(tmp_path / 'f'), GOOD)
    with pytest.raises(ValueError, match='the hash of what came is'):
        download(server.url, str(tmp_path / 'g'), '1' * 64)
    assert list(contents(tmp_path)) == ['f']


def test_a_body_that_is_compressed_on_the_way_is_not_measured(server, tmp_path):
    server.script = [answer(gzip.compress(BODY), Content_Encoding='gzip')]
    download(server.url, str(tmp_path / 'f'))
    assert contents(tmp_path) == {'f': BODY}


def test_what_is_there_is_not_fetched_again(server, tmp_path):
    (tmp_path / 'f').write_bytes(b'whole')
    assert download(server.url, str(tmp_path / 'f')) == str(tmp_path / 'f') and not server.seen


def test_two_processes_do_not_fetch_one_file(server, tmp_path):
    pytest.importorskip('fcntl')
    server.script = [answer(ETag='"v"')]
    version = hashlib.sha256(f'v None {len(BODY)}'.encode()).hexdigest()[:8]
    with open(tmp_path / f'f.{version}.part', 'ab') as f:
        lock(f.fileno(), 'f')
        with pytest.raises(ValueError, match=r'another process is writing .*part'):
            download(server.url, str(tmp_path / 'f'))


def test_the_token_goes_to_the_hub_and_to_nobody_else(server, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_TOKEN', 'hf_secret')
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:1')
    server.script = [answer()]
    download(server.url, str(tmp_path / 'f'))
    monkeypatch.setenv('HF_ENDPOINT', server.url.rsplit('/', 1)[0])
    download(server.url, str(tmp_path / 'g'))
    assert [seen.get('Authorization') for seen in server.seen] == [None, 'Bearer hf_secret']


def test_a_url_is_a_source(server, tmp_path, capsys):
    text = 'words from afar ' * 100
    server.script = [answer(text.encode(), Content_Type='text/plain')]
    for _ in range(2):
        prepare.main([server.url.replace('file.bin', 'tale.txt?raw=true'), f'--data_dir={tmp_path}'])
    assert len(server.seen) == 1 and os.listdir(tmp_path / 'downloads')[0].endswith('-tale.txt')
    raw = b''.join((tmp_path / 'tale' / f'{s}.bin').read_bytes()[::2] for s in ('train', 'val'))
    assert raw.decode() == text
