"""Serve a model to this machine: OpenAI's HTTP API, and a page at / that uses it."""

import contextlib
import itertools
import json
import os
import queue
import re
import select
import socket
import threading
import time
import uuid
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from hotloop.data.chat import CHATS, TEMPLATES, check_text, read_row
from hotloop.data.encode import prompt_ids
from hotloop.inference.load import checked
from hotloop.inference.texts import (
    Prompt,
    Text,
    fit_turns,
    note_cut,
    sampling_of,
    split_stops,
    write_batch,
)
from hotloop.system.files import parse_json
from hotloop.system.text import first_line

PORT = 8000  # of --serve alone
LARGEST = 2**20  # bytes of a request's body
NAMES = ('127.0.0.1', 'localhost')  # of this machine, in requests
COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'
# {field of a request: its setting}
SETTINGS = {'temperature': 'temperature', 'top_p': 'top_p', 'seed': 'seed', 'top_k': 'top_k',
            'min_p': 'min_p', 'repetition_penalty': 'repetition_penalty', 'dry': 'dry',
            'max_tokens': 'max_new_tokens', 'max_completion_tokens': 'max_new_tokens'}
# fields that would change the answer, except with this value
UNSUPPORTED = {'n': 1, 'best_of': 1, 'response_format': {'type': 'text'}, 'tools': [], 'functions': [],
               'logprobs': 0, 'top_logprobs': 0, 'logit_bias': {}, 'frequency_penalty': 0,
               'presence_penalty': 0, 'echo': False, 'suffix': ''}
POLICY = ("default-src 'none'; script-src 'nonce-{}'; style-src 'unsafe-inline'; "
          "img-src data:; connect-src 'self'")


class Job(NamedTuple):
    """A Text that a request waits for."""
    text: Text
    sampling: object
    news: queue.SimpleQueue  # (text so far, what finished it, or None) of each step


class Server(ThreadingHTTPServer):
    """Read each request in a thread of its own, and write all texts in the thread of write_forever()."""
    request_queue_size = 128  # connections that wait for their thread

    def __init__(self, opened):
        cfg = opened.cfg
        port = PORT if cfg.serve is True else cfg.serve
        try:
            super().__init__((NAMES[0], port), Handler)
        except OSError as e:
            raise ValueError(f'serve={port}: {e.strerror}; choose another port with --serve=PORT') from None
        self.opened, self.cfg = opened, cfg
        name = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
        self.name = os.path.basename(os.path.abspath(name)) if os.path.exists(name) else name
        self.seeds = itertools.count(cfg.seed)  # of requests without a seed
        self.jobs = queue.SimpleQueue()

    def write_forever(self):
        """Write the texts of jobs, the oldest first. Those that wait and sample alike share a batch."""
        waiting = []
        while True:
            while not waiting or not self.jobs.empty():
                waiting.append(self.jobs.get())
            sampling = waiting[0].sampling
            batch = [job for job in waiting if job.sampling == sampling][:self.cfg.batch_size]
            waiting = [job for job in waiting if job not in batch]
            batch = [job for job in batch if not job.text.finish]  # Clients of the others have hung up.
            if not batch:
                continue
            try:
                for _ in write_batch(self.opened.gpt, [job.text for job in batch], sampling, False):
                    for job in batch:
                        job.news.put((job.text.text, job.text.finish))
                    batch = [job for job in batch if not job.text.finish]
            except Exception as e:  # The server outlives a request that fails.
                for job in batch:
                    job.news.put((job.text.text, e))

    def read_job(self, body, is_chat):
        """Read the Job in the body of a request. Raises ValueError if it cannot be done."""
        tokenizer = self.opened.tokenizer
        settings = {'seed': next(self.seeds)}
        settings |= {ours: body[name] for name, ours in SETTINGS.items() if body.get(name) is not None}
        if settings.get('top_k') in (0, -1):  # other servers turn it off by these
            settings['top_k'] = None
        cfg = checked(replace(self.cfg, **settings))
        asked, most = cfg.max_new_tokens, self.cfg.max_new_tokens
        if asked > most:
            raise ValueError(f'max_tokens={asked} exceeds the --max_new_tokens={most} of the server')
        for name, value in UNSUPPORTED.items():
            if body.get(name) not in (None, value):
                raise ValueError(f'{name}={json.dumps(body[name])[:50]} is not supported')
        template = 'plain'
        if is_chat:
            template = self.opened.template
            if template not in TEMPLATES:
                raise ValueError('the chat template of the model is not known; '
                                 f'use {COMPLETIONS}, or start the server with --template')
            _, turns = read_row({'messages': body.get('messages')}, 'messages')
            if 'user' not in dict(turns):
                raise ValueError('messages must be a list of {"role": ..., "content": ...} with a user turn')
            _, ids = fit_turns(self.opened, turns, template, cfg.max_new_tokens)  # may drop the oldest
        else:
            prompt = body.get('prompt')
            if prompt is None and 'messages' in body:
                raise ValueError(f'messages are for {CHAT}; {COMPLETIONS} takes a prompt')
            if isinstance(prompt, list) and len(prompt) == 1:  # LangChain sends one as a list
                prompt = prompt[0]
            ids = prompt_ids(tokenizer, check_text(prompt, 'prompt'))
            note_cut(len(ids), self.opened.gpt.config.block_size)  # the page continues texts of any length
        stops = split_stops(cfg.stop, template)
        asked = body.get('stop') or []
        for stop in asked if isinstance(asked, list) else [asked]:
            stops.append(check_text(stop, 'stop'))
        text = Text(Prompt('', '', ids, [stop for stop in stops if stop]), cfg.seed, tokenizer)
        return Job(text, sampling_of(cfg, tokenizer, is_chat), queue.SimpleQueue())


class Handler(BaseHTTPRequestHandler):
    """Answer the requests of a connection."""
    protocol_version = 'HTTP/1.1'
    timeout = 60  # seconds that a client may let us wait
    disable_nagle_algorithm = True  # or the second write of an answer may wait 40 ms

    def handle(self):
        with contextlib.suppress(ConnectionError, TimeoutError):  # The client has hung up.
            super().handle()

    def parse_request(self):
        """Refuse requests from other sites' pages, also by DNS rebinding to this machine."""
        if not super().parse_request():
            return False
        for header in ('Host', 'Origin'):
            host = self.headers.get(header, NAMES[0])
            if re.sub(r'^http://|:\d+$', '', host) not in NAMES:
                self.send_error(403, f'{header} is {host}, and must be {" or ".join(NAMES)}')
                return False
        return True

    def do_GET(self):
        server = self.server
        if self.path == '/':
            nonce = uuid.uuid4().hex
            page = Path(__file__).with_name('page.html').read_bytes()
            page = page.replace(b'<script>', f'<script nonce="{nonce}">'.encode())
            self.send(200, page, 'text/html; charset=utf-8', nonce)
        elif self.path == '/v1/models':
            model = {'id': server.name, 'object': 'model', 'created': 0, 'owned_by': 'hotloop',
                     'chat': server.opened.template in CHATS, 'context': server.opened.gpt.config.block_size,
                     'max_tokens': server.cfg.max_new_tokens}
            self.send(200, {'object': 'list', 'data': [model]})
        else:
            self.send_error(404, f'{self.path} does not exist; GET has / and /v1/models')

    def do_POST(self):
        if self.path not in (COMPLETIONS, CHAT):
            return self.send_error(404, f'{self.path} does not exist; POST has {COMPLETIONS} and {CHAT}')
        length = self.headers.get('Content-Length', '')
        if not length.isdecimal() or len(length) > 12 or int(length) > LARGEST:
            return self.send_error(413, f'a request needs a Content-Length of at most {LARGEST} bytes')
        try:
            body = parse_json(self.rfile.read(int(length)), 'the body')
            if not isinstance(body, dict):
                raise ValueError('the body is not a JSON object')
            job = self.server.read_job(body, self.path == CHAT)
        except (ValueError, RecursionError) as e:  # the latter for very deep JSON
            return self.send_error(400, e)
        self.server.jobs.put(job)
        try:
            self.answer(job, body)
        finally:
            job.text.finish = job.text.finish or 'cancelled'  # It is skipped, or its row dropped.

    def answer(self, job, body):
        """Send the text of a job, in events as it comes or whole."""
        is_chat, stream = self.path == CHAT, bool(body.get('stream'))
        kind = 'chat.completion' if is_chat else 'text_completion'
        about = {'id': uuid.uuid4().hex, 'object': kind + '.chunk' * (is_chat and stream),
                 'created': int(time.time()), 'model': self.server.name}
        if stream:
            self.close_connection = True  # This ends the events.
            self.send(200, b'', 'text/event-stream')
        role = {'role': 'assistant'}  # in the first event of a chat
        sent = 0
        for text, finish in self.follow(job):
            if isinstance(finish, Exception):
                return self.send_event(error(500, finish)) if stream else self.send_error(500, finish)
            content = {'text': text[sent:] if stream else text}
            sent = len(text)
            if is_chat:
                content = {'delta' if stream else 'message': {**role, 'content': content['text']}}
            choice = {'index': 0, 'logprobs': None, **content, 'finish_reason': finish}
            if stream:
                self.send_event({**about, 'choices': [choice]})
                role = {}
        prompt = min(len(job.text.prompt.ids), self.server.opened.gpt.config.block_size)
        written = len(job.text.tokens)
        usage = {'prompt_tokens': prompt, 'completion_tokens': written, 'total_tokens': prompt + written}
        if not stream:
            return self.send(200, {**about, 'choices': [choice], 'usage': usage})
        options = body.get('stream_options')
        if isinstance(options, dict) and options.get('include_usage'):
            self.send_event({**about, 'choices': [], 'usage': usage})
        self.wfile.write(b'data: [DONE]\n\n')

    def follow(self, job):
        """Yield (text, finish) of each step. Raises ConnectionError once the client hangs up."""
        finish = None
        while not finish:
            text = None
            with contextlib.suppress(queue.Empty):
                text, finish = job.news.get(timeout=1)  # s; the job may wait for others
            poll = select.poll()  # select.select() takes no descriptor above 1,023
            poll.register(self.connection, select.POLLIN)
            if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError
            if text is not None:
                yield text, finish

    def send_event(self, value):
        self.wfile.write(b'data: %s\n\n' % json.dumps(value).encode())

    def send_error(self, status, message=None, explain=None):
        """Send an error as JSON and close the connection: its request may not be read to the end."""
        self.close_connection = True
        self.send(status, error(status, message or HTTPStatus(status).phrase))

    def send(self, status, content, kind='application/json', nonce=''):
        """
        Send an answer: bytes, or anything else as JSON. Without a length, the connection's end ends it.
        nonce: of the scripts that a page may run.
        """
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        self.send_header('Content-Type', kind)
        self.send_header('Content-Security-Policy', POLICY.format(nonce))
        self.send_header('Cache-Control', 'no-store')
        if self.close_connection:
            self.send_header('Connection', 'close')
        else:
            self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def error(status, message):
    kind = 'invalid_request_error' if status < 500 else 'server_error'
    return {'error': {'message': first_line(message), 'type': kind, 'code': HTTPStatus(status).name.lower()}}


def serve(opened, cfg):
    """Serve a model until Ctrl-C."""
    server = Server(opened)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://{NAMES[0]}:{server.server_port}'
    print(f"page: {url}, OpenAI's API: {url}/v1, model: {server.name}; Ctrl-C ends the server", flush=True)
    server.write_forever()
