"""
How fast prepare.py is, end to end, and its peak memory, beside tiktoken alone and datasets.map.

    $ python tests/bench/prepare_speed.py               # the built-in corpus, and the novels if there
    $ python tests/bench/prepare_speed.py --text=book.txt  # another text, plain or compressed
    $ python tests/bench/prepare_speed.py --gigabyte    # a text of 1 GB too, for the memory
    $ python tests/bench/prepare_speed.py --bpe         # merges learned here, beside the package tokenizers

tiktoken alone is encode_ordinary on one core over the same text in memory, without its startup. prepare.py
is the complete command, from the start of Python to the renamed folder. Needs GPT-2's ranks, from
TIKTOKEN_CACHE_DIR or a network.
"""

import functools
import glob
import json
import lzma
import math
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import tokenizers
from bench import SHARED, alternate, machine, parser_of, run, table

from hotloop.data.bpe import count_words, learn_merges
from hotloop.data.documents import documents_in
from hotloop.data.sources import files_of, stdlib_files
from hotloop.data.tokenizer import BPETokenizer, TiktokenTokenizer

ALONE = """
import json, sys, time, tiktoken
texts = [json.loads(line) for line in open(sys.argv[1])]
encoding = tiktoken.get_encoding('gpt2')
start = time.perf_counter()
for text in texts:
    encoding.encode_ordinary(text)
print(time.perf_counter() - start)
"""

# as nanoGPT prepares OpenWebText: map over a dataset of documents, then one bin of the result
MAP = """
import datasets, json, numpy as np, sys, tiktoken
_, texts, folder, num_proc = sys.argv
encoding = tiktoken.get_encoding('gpt2')
datasets.disable_progress_bars()

def documents():
    for line in open(texts):
        yield {'text': json.loads(line)}

def tokenize(row):
    return {'ids': [*encoding.encode_ordinary(row['text']), encoding.eot_token]}

rows = datasets.Dataset.from_generator(documents, cache_dir=folder)
rows = rows.map(tokenize, remove_columns='text', num_proc=int(num_proc)).with_format('numpy')
with open(folder + '/train.bin', 'wb') as f:
    for batch in rows.iter(100):
        f.write(np.concatenate(list(batch['ids'])).astype(np.uint16).tobytes())
"""


def speed(source, folder, rounds, with_datasets):
    """Return rows of MB/s, the share of tiktoken alone per process, and the memory of one more run."""
    texts, size = os.path.join(folder, 'texts.jsonl'), 0
    with open(texts, 'w') as f:
        for piece in documents_in(files_of(source, 'auto', 'data', '')):
            text = piece.parts[0][0]
            size += len(text.encode())
            f.write(json.dumps(text) + '\n')

    def ours(num_proc, watch=False):
        return run([sys.executable, 'prepare.py', source, '--tokenizer=gpt2', f'--num_proc={num_proc}',
                    '--name=bench', f'--data_dir={folder}'], watch=watch)[:2]

    def mapped(num_proc, watch=False):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            return run([sys.executable, '-c', MAP, texts, cache, str(num_proc)], watch=watch)[:2]

    def alone(watch=False):
        return float(run([sys.executable, '-c', ALONE, texts])[2].splitlines()[-1]), math.nan
    sides = {'tiktoken alone': alone}
    for num_proc, words in ((1, '1 process'), (2, '2 processes')):
        sides[f'prepare.py, {words}'] = functools.partial(ours, num_proc)
        if with_datasets and find_spec('datasets'):
            sides[f'datasets.map, {words}'] = functools.partial(mapped, num_proc)
    results = alternate(sides, rounds)
    rates = {name: size / 1e6 / median([seconds for seconds, _ in pairs]) for name, pairs in results.items()}
    rows = []
    for name, rate in rates.items():
        each = rate / rates['tiktoken alone'] / (2 if ' 2 ' in name else 1)
        memory = sides[name](watch=True)[1]
        rows.append([os.path.basename(source), name, f'{rate:.1f}', f'{each:.2f}', f'{memory:,.0f}'])
    return rows


def write_gigabyte(path):
    """Write a text of 1 GB: the largest corpus at hand over and over, a word of it changed each time."""
    novels = os.path.join(SHARED, 'novels.txt.xz')
    if os.path.exists(novels):
        with lzma.open(novels) as f:
            text = f.read()
    else:
        text = b'\n\n'.join(Path(file).read_bytes() for file in stdlib_files())
    with open(path, 'wb') as f:
        while f.tell() < 1e9:
            f.write(text.replace(b' the ', b' the%d ' % f.tell()))


def learned_bpe(size):
    """Return rows on bpe:SIZE of the built-in corpus: seconds to learn, bytes per token."""
    texts = [Path(path).read_bytes().decode() for path in stdlib_files()]
    start = time.perf_counter()
    tokens = learn_merges(count_words(texts), size)
    seconds = time.perf_counter() - start
    sample = '\n'.join(texts[::7])
    rows = [[f'bpe:{size}', f'{seconds:.1f}'], ['gpt2', '']]
    for row, tokenizer in zip(rows, (BPETokenizer(tokens), TiktokenTokenizer('gpt2')), strict=True):
        row.append(f'{len(sample.encode()) / len(tokenizer.encode(sample)):.2f}')
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    start = time.perf_counter()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    seconds = time.perf_counter() - start
    return [*rows, ['tokenizers (Rust, all cores)', f'{seconds:.1f}', '']]


def main():
    parser = parser_of(__doc__, rounds=3, gigabyte=False, bpe=False)
    parser.add_argument('--text', action='append', help='a text to tokenize, or stdlib')
    parser.add_argument('--alone', action='store_true', help='without datasets.map')
    args = parser.parse_args()
    if os.path.isdir(os.path.join(SHARED, 'tiktoken_cache')):
        os.environ.setdefault('TIKTOKEN_CACHE_DIR', os.path.join(SHARED, 'tiktoken_cache'))
    print(machine())
    if args.bpe:
        print(table(['tokenizer', 'seconds to learn', 'bytes per token'], learned_bpe(8192)))
        return
    with tempfile.TemporaryDirectory() as folder:
        sources = args.text or ['stdlib', *glob.glob(os.path.join(SHARED, 'novels.txt.xz'))]
        for source in list(sources):
            if source.endswith('.xz') and not args.text:  # without the time of decompression, too
                plain = os.path.join(folder, os.path.basename(source)[:-3])
                with lzma.open(source) as f, open(plain, 'wb') as g:
                    g.write(f.read())
                sources.append(plain)
        rows = []
        for source in sources:
            rows += speed(source, folder, args.rounds, not args.alone)
        if args.gigabyte:
            path = os.path.join(folder, 'gigabyte.txt')
            write_gigabyte(path)
            rows += speed(path, folder, 1, not args.alone)
    print(table(['text', 'tool', 'MB/s', 'relative to tiktoken alone, per process', 'peak MB'], rows))


if __name__ == '__main__':
    main()
