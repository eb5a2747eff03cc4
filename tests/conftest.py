"""Shared by the tests: a tiny dataset, training runs in this process, GPT-2's tokenizer, a local server."""

import http.server
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from hotloop.data.bpe import count_words, learn_merges
from hotloop.data.tokenizer import TiktokenTokenizer
from hotloop.training.evaluate import Evaluation

torch.set_num_threads(1)  # faster in models this small
os.environ['OMP_NUM_THREADS'] = '1'
ROOT = Path(train.__file__).resolve().parent  # of the repository
SHARED = os.path.join(ROOT.parent, 'shared', 'data')
WITH_BITSANDBYTES = (
    pytest.mark.slow,  # its import takes seconds
    pytest.mark.skipif(importlib.util.find_spec('bitsandbytes') is None, reason='needs bitsandbytes'))

# ten steps take a third of a second, with a warmup, a decay and three evaluations
TINY = dict(dataset='tiny', device='cpu', dtype='float32', compile=False, n_layer=2, n_head=2,
            n_embd=32, block_size=16, batch_size=4, gradient_accumulation_steps=2, max_iters=10,
            warmup_iters=3, learning_rate=5e-3, min_lr=5e-4, eval_interval=4, eval_tokens=1024)


def tiny_flags(out_dir, data_dir, **settings):
    """Return the flags of a run on TINY with these settings."""
    return [f'--{k}={v}' for k, v in {**TINY, 'data_dir': data_dir, **settings, 'out_dir': out_dir}.items()]


def write_bins(folder, tokens, val, tokenizer=None, vocab_size=257, dtype='uint16', masks=None):
    """Write a dataset: folder/{train,val}.bin, meta.json unless tokenizer is False, and masks."""
    os.makedirs(folder, exist_ok=True)
    splits = {'train': np.asarray(tokens), 'val': np.asarray(val)}
    for name, ids in splits.items():
        ids.astype(dtype).tofile(f'{folder}/{name}.bin')
        if masks:
            masks[name].astype(np.uint8).tofile(f'{folder}/{name}.mask.bin')
    meta = {'format': 1, 'dtype': dtype, 'vocab_size': vocab_size, 'tokenizer': tokenizer or {'kind': 'byte'},
            'eot': None, 'splits': {name: {'tokens': len(ids)} for name, ids in splits.items()},
            'source': 'by hand'}
    if tokenizer is not False:
        with open(f'{folder}/meta.json', 'w', encoding='utf-8') as f:
            json.dump(meta, f)
    return str(folder)


def train_bpe(texts, num_tokens):
    return learn_merges(count_words(texts), num_tokens)


def noise(n, seed=0, low=32, high=96):
    """Return n byte tokens with a skewed distribution, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.integers(low, high, n), rng.integers(low, high, n))


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """Write the dataset tiny: 4,001 training tokens, 487 to validate on, 30 windows of 16 and 6."""
    folder = tmp_path_factory.mktemp('data')
    write_bins(folder / 'tiny', noise(4001), noise(487, seed=1))
    return str(folder)


@pytest.fixture
def masked(tmp_path):
    """Write a dataset whose mask gets denser: no two micro-batches have as many targets."""
    def mask(n):
        random = torch.rand(n, generator=torch.Generator().manual_seed(2))
        return (random < torch.linspace(0.05, 1, n) ** 2).numpy()
    return write_bins(tmp_path / 'masked', noise(4001), noise(487, seed=1),
                      masks={'train': mask(4001), 'val': mask(487)})


@pytest.fixture
def train_tiny(tmp_path, data_dir):
    """train_tiny(out, *words, **settings) runs train.main on TINY. Returns its exit code."""
    def run(out='out', *words, **settings):
        settings = {'data_dir': data_dir, **settings}
        return train.main([*map(str, words), *tiny_flags(tmp_path / out, **settings)])
    return run


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """
    Restore signal handlers, threads and the precision of products, which training changes. Keep saves from
    waiting for the disk; in the processes that tests kill they still do.
    """
    monkeypatch.setattr('gc.collect', lambda *args: 0)  # half the time of a tiny run
    monkeypatch.setattr('os.fsync', lambda descriptor: None)  # each save of a tiny run waits for four
    precision = torch.get_float32_matmul_precision()  # on a GPU a run sets TF32
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(precision)
    torch.set_deterministic_debug_mode('default')
    if 'torch._inductor.config' in sys.modules:  # use_deterministic_algorithms() sets its switch, too
        torch.use_deterministic_algorithms(False)


def at_step(monkeypatch, step, action):
    """Call action() in this process during the given step, counted from now on over all runs."""
    original, count = train.train_step, itertools.count(1)

    def wrapped(*args, **kwargs):
        result = original(*args, **kwargs)
        if next(count) == step:
            action()
        return result
    monkeypatch.setattr(train, 'train_step', wrapped)


def stop_at(monkeypatch, step):
    """Send SIGTERM to this process during the given step, counted in the same way."""
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))


@pytest.fixture
def torchrun(tmp_path, data_dir):
    """
    torchrun(out, fault, step, ...) starts TINY on gloo processes, with the fault in the last one. They are
    forks of the agent unless forked is False. node: the agent's flags on one of several nodes.
    """
    import faults  # which imports this
    started = []

    def start(out, fault='', step=0, restarts=0, processes=2, forked=True, node=None, **settings):
        agent = [faults.__file__, 'torchrun'] if forked else ['-m', 'torch.distributed.run']
        words = ['--standalone', f'--nproc_per_node={processes}', f'--max-restarts={restarts}']
        command = [sys.executable, *agent, *(node or words), faults.__file__, fault, str(step),
                   *tiny_flags(tmp_path / out, data_dir, **settings)]
        process = subprocess.Popen(command, env=faults.environment(), text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        started.append(process)
        return process
    yield start
    for process in started:
        process.terminate()  # so that it ends its own
        process.communicate()


def scripted_losses(monkeypatch, *losses):
    """Let evaluations return these validation losses, one after another."""
    found = (Evaluation({'loss': loss, 'stderr': 0.1, 'bpb': None, 'tokens': 1}, {'loss': 1.0}, 0.0)
             for loss in losses)
    monkeypatch.setattr(train, 'evaluate_both', lambda *args, **kwargs: next(found))


def load(path):
    return torch.load(path, map_location='cpu', weights_only=True)


def same(a, b):
    """Return whether two nested values are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@torch.no_grad()
def all_logits(model, ids, documents=None):
    """Return the logits after each token, (B, T, V); forward() has those of the last one, or a loss."""
    kept = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: kept.append(out))
    model(ids, ids, documents)
    hook.remove()
    return model.softcap(kept[0].float())


def error_against(expected, logits):
    """Return the largest difference as a share of the largest logit."""
    return ((logits - expected).abs().max() / expected.abs().max()).item()


def rows(out, name):
    """Read the lines of a run's log.jsonl that have this name."""
    lines = map(json.loads, (out / 'log.jsonl').read_text(encoding='utf-8').splitlines())
    return [line for line in lines if name in line]


def error_of(call, *args, **kwargs):
    """Return the text of the ValueError that a call raises. Its frames would hold a run's lock."""
    try:
        call(*args, **kwargs)
    except ValueError as e:
        return str(e)
    pytest.fail('nothing was raised')


def free_port():
    with socket.create_server(('127.0.0.1', 0)) as server:
        return server.getsockname()[1]


def contents(folder):
    """Return {relative path: bytes} of everything below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


@pytest.fixture
def gpt2(monkeypatch):
    cache = os.path.join(SHARED, 'tiktoken_cache')
    if not os.path.isdir(cache):
        pytest.skip(f"{cache} with tiktoken's copy of GPT-2's BPE is not there, and tests stay offline")
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', cache)
    return TiktokenTokenizer('gpt2')


@pytest.fixture
def server(monkeypatch):
    """
    Serve on 127.0.0.1. server.script: functions of its handler, one per request, the
    last for all others; server.seen: request headers; server.url: of a file.
    """
    state = types.SimpleNamespace(script=[], seen=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            state.seen.append(self.headers)
            (state.script.pop(0) if len(state.script) > 1 else state.script[0])(self)

        def log_message(self, *args):
            pass
    httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    state.url = f'http://127.0.0.1:{httpd.server_port}/file.bin'
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()
