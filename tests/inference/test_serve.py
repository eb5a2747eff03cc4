"""The server: OpenAI's API by http.client and by the openai package, what it refuses, and its page."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, error_of, free_port
from test_sample import gpt, main, play, write

import sample
from hotloop import load
from hotloop.data.tokenizer import ByteTokenizer
from hotloop.inference import texts
from hotloop.inference.serve import LARGEST, Server

LONG = 10**6  # tokens that take minutes
USER = {'role': 'user', 'content': 'hi'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Make two run folders: base, and tuned for chat."""
    folder = tmp_path_factory.mktemp('serve')
    for name, more in (('base', {}), ('tuned', {'template': 'chatml'})):
        (folder / name).mkdir()
        write(folder / name / 'best.pt', gpt(257, block_size=160), ByteTokenizer(), **more)
    return folder


@pytest.fixture(scope='module')
def servers(folder):
    """Serve both models. Returns {name: Server}."""
    found = {}
    for name in ('base', 'tuned'):
        model = load(str(folder / name), device='cpu', max_new_tokens=LONG, serve=free_port())
        found[name] = Server(model)
        threading.Thread(target=found[name].serve_forever, args=(0.01,), daemon=True).start()
        threading.Thread(target=found[name].write_forever, daemon=True).start()
    yield found
    for server in found.values():
        server.shutdown()
        server.server_close()


def connect(server):
    return http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=60)


def ask(server, path='/v1/completions', body=None, method='POST', headers=(), **fields):
    """Send a request. Returns (status, the JSON of the answer)."""
    connection = connect(server)
    if body is None and method == 'POST':
        body = json.dumps(fields)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # of a body that is not read
        connection.request(method, path, body, dict(headers))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def text_of(server, **fields):
    status, answer = ask(server, **fields)
    assert status == 200, answer
    return answer['choices'][0]['text']


def events(server, path, **fields):
    """Return the events of a stream, the last of which must be [DONE]."""
    connection = connect(server)
    connection.request('POST', path, json.dumps({**fields, 'stream': True}))
    answer = connection.getresponse()
    assert answer.getheader('Content-Type') == 'text/event-stream'
    *lines, last, rest = answer.read().decode().split('\n\n')
    assert (last, rest) == ('data: [DONE]', '')
    return [json.loads(line.removeprefix('data: ')) for line in lines]


def drawn(capsys, folder, **flags):
    """Return the rows that sample.py prints."""
    capsys.readouterr()
    main(output='jsonl', num_samples=1, out_dir=folder, **flags)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# -----------------------------------------------------------------------------
# answers

def test_a_completion_is_the_text_of_sample_py(servers, folder, capsys):
    fields = dict(temperature=0.8, top_p=0.9, seed=5)
    row, = drawn(capsys, folder / 'base', start='ab', max_new_tokens=30, **fields)
    status, answer = ask(servers['base'], model='base', prompt='ab', max_tokens=30, **fields)
    assert status == 200 and answer['object'] == 'text_completion' and answer['model'] == 'base'
    assert answer['choices'] == [{'index': 0, 'text': row['text'], 'logprobs': None,
                                  'finish_reason': 'length'}]
    assert answer['usage'] == {'prompt_tokens': 2, 'completion_tokens': 30, 'total_tokens': 32}
    stop = row['text'][9]
    _, answer = ask(servers['base'], prompt=['ab'], max_tokens=30, stop=['zzzz', stop], **fields)
    choice, = answer['choices']
    assert (choice['text'], choice['finish_reason']) == (row['text'].split(stop)[0], 'stop')


def test_requests_without_a_seed_differ_and_settings_of_the_server_hold(servers, monkeypatch):
    fields = dict(prompt='ab', max_tokens=20)
    assert text_of(servers['base'], **fields) != text_of(servers['base'], **fields)
    greedy = text_of(servers['base'], temperature=0, **fields)
    server = servers['base']
    monkeypatch.setattr(server, 'cfg', dataclasses.replace(server.cfg, temperature=0.0, stop=greedy[5]))
    assert text_of(server, **fields) == greedy.split(greedy[5])[0]


def test_a_chat_is_in_the_template_and_ends_at_its_mark(servers, folder, tmp_path, capsys, monkeypatch):
    row = {'messages': [{'role': 'system', 'content': 'Be brief.'}, USER]}
    (tmp_path / 'p.jsonl').write_text(json.dumps(row))
    flags = dict(start=f'FILE:{tmp_path / "p.jsonl"}', max_new_tokens=20, seed=3)
    expected, = drawn(capsys, folder / 'tuned', **flags)
    chat = dict(path='/v1/chat/completions', seed=3, max_tokens=20)
    _, answer = ask(servers['tuned'], **row, **chat)
    assert answer['object'] == 'chat.completion'
    assert answer['choices'][0]['message'] == {'role': 'assistant', 'content': expected['text']}
    play(monkeypatch, *b'Four.<|im_end|>no')
    _, answer = ask(servers['tuned'], messages=[USER], **chat)
    assert answer['choices'][0] == {'index': 0, 'message': {'role': 'assistant', 'content': 'Four.'},
                                    'logprobs': None, 'finish_reason': 'stop'}


@pytest.mark.parametrize('path', ['/v1/completions', '/v1/chat/completions'])
def test_a_stream_has_the_same_text_in_pieces(servers, path):
    server = servers['tuned']
    fields = dict(path=path, prompt='ab', messages=[USER], max_tokens=20, seed=3)
    _, whole = ask(server, **fields)
    *pieces, end = events(server, **fields, stream_options={'include_usage': True})
    choices = [piece['choices'][0] for piece in pieces]
    reasons = [choice['finish_reason'] for choice in choices]
    assert reasons[-1] == 'length' and set(reasons[:-1]) == {None} and len(pieces) > 10
    assert end['choices'] == [] and end['usage'] == whole['usage']
    assert len({piece['id'] for piece in pieces}) == 1
    if 'chat' in path:
        assert [choice['delta'].get('role') for choice in choices[:2]] == ['assistant', None]
        assert pieces[0]['object'] == 'chat.completion.chunk'
        text = ''.join(choice['delta']['content'] for choice in choices)
        assert text == whole['choices'][0]['message']['content']
    else:
        assert ''.join(choice['text'] for choice in choices) == whole['choices'][0]['text']
    assert len(events(server, **fields)) == len(pieces)  # no usage unless it is asked for


@pytest.mark.slow
def test_twenty_requests_at_once_are_all_answered_each_as_if_alone(servers, monkeypatch):
    """Those that wait together share a batch; one with other settings does not."""
    server, batches = servers['base'], []

    def generate(model, prompts, *args):
        batches.append(len(prompts))
        time.sleep(0.2)  # Meanwhile the others arrive.
        yield from original(model, prompts, *args)
    original = texts.generate
    fields = [dict(prompt='abc'[:i % 3 + 1], seed=i, max_tokens=20, top_k=5 + i // 19) for i in range(20)]
    alone = [text_of(server, **f) for f in fields]
    monkeypatch.setattr(texts, 'generate', generate)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda f: text_of(server, **f), fields)) == alone
    assert sum(batches) == 20 and 2 < len(batches) < 8


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_hangs_up_frees_its_place(servers, monkeypatch, stream):
    """Also one that waits for its place; the server goes on."""
    server, jobs = servers['base'], []
    read_job = server.read_job
    monkeypatch.setattr(server, 'read_job', lambda *args: jobs.append(read_job(*args)) or jobs[-1])
    clients = []
    for number in range(2):
        body = json.dumps({'max_tokens': LONG, 'stream': stream, 'top_k': number + 1}).encode()
        head = f'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n'
        clients.append(socket.create_connection(('127.0.0.1', server.server_port)))
        clients[-1].sendall(head.encode() + body)
        end = time.monotonic() + 60
        while len(jobs) <= number or not jobs[0].text.tokens:
            assert time.monotonic() < end
            time.sleep(0.01)
    for client in clients:
        client.close()
    assert len(text_of(server, prompt='a', max_tokens=3, top_k=3)) == 3
    assert [job.text.finish for job in jobs] == ['cancelled', 'cancelled', 'length']


def test_an_error_of_the_model_is_told_and_the_server_goes_on(servers, monkeypatch):
    def generate(*args):
        yield []
        raise ValueError('the logits are\nnot finite')
    with monkeypatch.context() as m:
        m.setattr(texts, 'generate', generate)
        error = {'error': {'message': 'the logits are', 'type': 'server_error',
                           'code': 'internal_server_error'}}
        assert ask(servers['base'], prompt='a') == (500, error)
        connection = connect(servers['base'])
        connection.request('POST', '/v1/completions', '{"stream": true}')
        assert json.loads(connection.getresponse().read().split(b'data: ')[-1]) == error
    assert len(text_of(servers['base'], prompt='a', max_tokens=2)) == 2


# -----------------------------------------------------------------------------
# refusals

CHAT = '/v1/chat/completions'


@pytest.mark.parametrize('name, fields, status, words', [
    ('base', dict(path='/v2'), 404, '/v2 does not exist'),
    ('base', dict(path='/x', method='GET'), 404, '/x does not exist'),
    ('base', dict(body='{"a"'), 400, 'is not JSON'), ('base', dict(body='[1]'), 400, 'object'),
    ('base', dict(body='[' * 10**5), 400, 'is not JSON'),
    ('base', dict(messages=[USER]), 400, 'messages are for'),
    ('base', dict(prompt=['a', 'b']), 400, 'prompt must be'),
    ('base', dict(temperature=-1), 400, 'temperature=-1.0'), ('base', dict(seed=0.5), 400, 'seed: expected'),
    ('base', dict(max_tokens=LONG + 1), 400, '--max_new_tokens'), ('base', dict(n=2), 400, 'n=2 is not'),
    ('base', dict(stop=['a', 3]), 400, 'stop must be'), ('base', dict(echo=True), 400, 'echo=true is not'),
    ('base', dict(response_format={'type': 'json_object'}), 400, 'response_format={"type": "json'),
    ('base', dict(path=CHAT, messages=[USER]), 400, 'chat template of the model is not known'),
    ('tuned', dict(path=CHAT), 400, 'messages must be a list'),
    ('tuned', dict(path=CHAT, messages=[]), 400, 'with a user turn'),
    ('tuned', dict(path=CHAT, messages=[{'role': 'tool'}]), 400, "the role 'tool'"),
    ('tuned', dict(path=CHAT, messages=[{**USER, 'content': [1]}]), 400, 'parts that are no texts'),
    ('tuned', dict(path=CHAT, messages=[{**USER, 'content': 'a' * 200}]), 400, 'the context has room for'),
    ('base', dict(headers={'Host': 'evil.example'}), 403, 'Host is evil.example'),
    ('base', dict(headers={'Origin': 'http://evil.example:8000'}), 403, 'Origin is'),
    ('base', dict(headers={'Transfer-Encoding': 'chunked'}, body=iter([])), 413, 'Content-Length'),
    ('base', dict(headers={'Content-Length': '9' * 5000}, body=''), 413, 'at most')])
def test_a_request_that_cannot_be_answered_is_told_why(servers, name, fields, status, words):
    found, answer = ask(servers[name], **fields)
    assert (found, set(answer), set(answer['error'])) == (status, {'error'}, {'message', 'type', 'code'})
    assert words in answer['error']['message'] and answer['error']['type'].endswith('_error')


def test_a_large_body_is_refused_before_it_is_read(servers):
    with socket.create_connection(('127.0.0.1', servers['base'].server_port), 60) as s:
        s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n')
        assert s.recv(20).startswith(b'HTTP/1.1 413')  # before the first byte of the body
    prompt = 'a' * (LARGEST - 40)
    assert ask(servers['base'], prompt=prompt, max_tokens=1)[0] == 200


def test_fields_that_ask_for_nothing_are_taken(servers):
    nothing = dict(n=1, best_of=1, response_format={'type': 'text'}, logprobs=False, tools=[], stop=None,
                   top_k=-1)
    fields = dict(prompt='a', max_tokens=None, max_completion_tokens=3)
    assert len(text_of(servers['base'], **fields, **nothing)) == 3


def test_one_connection_takes_many_requests(servers):
    connection = connect(servers['base'])
    for _ in range(3):
        connection.request('POST', '/v1/completions', '{"max_tokens": 1}', {'Origin': 'http://localhost:8000'})
        assert connection.getresponse().read()
    connection.request('GET', '/v1/models')
    model, = json.loads(connection.getresponse().read())['data']
    assert (model['id'], model['chat'], model['context'], model['max_tokens']) == ('base', False, 160, LONG)


# -----------------------------------------------------------------------------
# the command, the openai package, the page

@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(folder):
    port = free_port()
    flags = ['--device=cpu', f'--out_dir={folder / "base"}', f'--serve={port}']
    # a shell in which these tests run in the background ignores SIGINT, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([sys.executable, 'sample.py', *flags], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = process.stdout.readline()
    assert f'http://127.0.0.1:{port}/v1' in line and 'model: base' in line
    assert f'serve={port}: Address already in use' in error_of(sample.main, flags)
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
    connection.request('POST', '/v1/completions', '{"stream": true, "max_tokens": 500}')
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and 'Traceback' not in errors
    with pytest.raises(ConnectionRefusedError):
        connect_to = socket.create_connection(('127.0.0.1', port))
        connect_to.close()


@pytest.mark.slow  # its import takes a second
def test_the_openai_package_is_a_client(servers):
    openai = pytest.importorskip('openai')
    client = openai.OpenAI(base_url=f'http://127.0.0.1:{servers["tuned"].server_port}/v1', api_key='none')
    assert [model.id for model in client.models.list()] == ['tuned']
    fields = dict(model='tuned', max_tokens=20, seed=3)
    whole = client.completions.create(prompt='ab', **fields)
    pieces = client.completions.create(prompt='ab', stream=True, **fields)
    assert ''.join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    whole = client.chat.completions.create(messages=[USER], **fields)
    pieces = client.chat.completions.create(messages=[USER], stream=True, **fields)
    assert ''.join(piece.choices[0].delta.content for piece in pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 20


def test_the_page_names_no_other_host(servers):
    connection = connect(servers['base'])
    connection.request('GET', '/')
    answer = connection.getresponse()
    policy, page = answer.getheader('Content-Security-Policy'), answer.read().decode()
    nonce, = re.findall(r'<script nonce="(\w+)">', page)
    assert "default-src 'none'" in policy and f"script-src 'nonce-{nonce}'" in policy
    assert not re.search(r'(?i)https?://|src=|@import|url\(', page)
