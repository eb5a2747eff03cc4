"""Documents to ids: what surrounds a document, which tokens count, and the processes that share the work."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import train_bpe

from hotloop.data.documents import Piece
from hotloop.data.encode import encode_batch, id_type
from hotloop.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer

BPE = BPETokenizer(train_bpe(['one two three ' * 9], 270))


def text_piece(text, start=True, end=True):
    return Piece([(text, False, True)], start, end, text)


def test_only_answers_and_the_end_count():
    """
    A text beside a chat counts, its pieces begin and end once, and bos does not count. An end-of-text id
    is not doubled, and counts if what it ends does. No token straddles an answer.
    """
    chat = [('ask', True, False), ('tell', False, True)]
    marked = [('ask', True, False), ('<|endoftext|>', True, True)]
    asked = [('tell', False, True), ('ask', True, False)]
    pieces = [text_piece('te', end=False), text_piece('xt', start=False)]
    pieces += [Piece(parts, True, True, 'k') for parts in (chat, marked, asked)]
    tokenizer = ByteTokenizer()
    tokenizer.bos = 0
    encoded = encode_batch(tokenizer, 256, 'train', pieces)
    assert encoded.ids.tolist() == [0, *b'text', 256, 0, *b'asktell', 256, 0, *b'ask', 256,
                                    0, *b'tellask', 256]
    assert encoded.mask.tolist() == [0, *[1] * 5, *[0] * 4, *[1] * 5, *[0] * 4, 1, 0, *[1] * 4, *[0] * 4]
    assert encoded.num_bytes == 1 + 4 + 1 + 7 + 1 + 3 + 1 + 7 and encoded.ends.tolist() == [6, 15, 20, 29]
    apart = Piece([('one th', True, False), ('ree', False, True)], True, True, 'k')
    ids = encode_batch(BPE, None, 'train', [apart]).ids.tolist()
    assert ids == [*BPE.encode('one th'), *BPE.encode('ree')] != BPE.encode('one three').tolist()


def test_ids_take_two_bytes_as_long_as_they_fit():
    large = CharTokenizer(''.join(map(chr, range(0x20000, 0x20000 + 2**16))), eot=True)
    assert (id_type(CharTokenizer(large.chars)), id_type(large)) == ('<u2', '<u4')
    ids = encode_batch(large, large.eot, 'train', [text_piece(large.chars[-1])]).ids
    assert ids.dtype == '<u4' and ids.tolist() == [2**16 - 1, 2**16]


def is_running(pid):
    status = Path(f'/proc/{pid}/stat')
    return status.exists() and status.read_text().rpartition(')')[2].split()[0] != 'Z'  # a zombie has ended


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_processes_end_with_the_one_that_started_them():
    """A kill -9 of the parent gives it no chance to end them."""
    code = '''if True:
        import itertools, os, time
        from hotloop.data import encode
        from hotloop.data import tokenizer
        encode.encode_batch = lambda *_: time.sleep(0.1)
        bpe = tokenizer.BPETokenizer([bytes([b]) for b in range(256)])
        for _ in encode.encode_all(bpe, itertools.repeat(('train', [])), num_proc=2):
            print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)'''
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) as parent:
        children = parent.stdout.readline().split()
        parent.kill()
    deadline = time.time() + 10
    while any(map(is_running, children)) and time.time() < deadline:
        time.sleep(0.02)
    assert len(children) == 2 and not any(map(is_running, children))
