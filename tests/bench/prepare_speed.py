"""
How fast prepare.py is, end to end, and its peak memory, beside tiktoken alone and datasets.map.

    $ python tests/bench/prepare_speed.py               # the built-in corpus, and the novels if there
    $ python tests/bench/prepare_speed.py --text=book.txt  # another text, plain or compressed
    $ python tests/bench/prepare_speed.py --gigabyte    # a text of 1 GB too, for the memory

tiktoken alone is encode_ordinary on one core over the same text in memory, without its startup. prepare.py
is the complete command, from the start of Python to the renamed folder. Needs GPT-2's ranks, from
TIKTOKEN_CACHE_DIR or a network.
"""

import functools
import glob
import json
import lzma
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from bench import SHARED, alternate, machine, parser_of, run, table

from hotloop.data.documents import documents_in
from hotloop.data.sources import files_of, stdlib_files

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


def speed(source, folder, rounds):
    """Return rows of MB/s, the share of tiktoken alone per process, and the peak memory."""
    texts, size = os.path.join(folder, 'texts.jsonl'), 0
    with open(texts, 'w') as f:
        for piece in documents_in(files_of(source, 'auto', 'data', '')):
            text = piece.parts[0][0]
            size += len(text.encode())
            f.write(json.dumps(text) + '\n')

    def ours(num_proc):
        return run([sys.executable, 'prepare.py', source, '--tokenizer=gpt2', f'--num_proc={num_proc}',
                    '--name=bench', f'--data_dir={folder}'])[:2]

    def mapped(num_proc):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            return run([sys.executable, '-c', MAP, texts, cache, str(num_proc)])[:2]

    def alone():
        _, megabytes, output = run([sys.executable, '-c', ALONE, texts])
        return float(output.splitlines()[-1]), megabytes
    sides = {'tiktoken alone': alone}
    for num_proc, words in ((1, '1 process'), (2, '2 processes')):
        sides[f'prepare.py, {words}'] = functools.partial(ours, num_proc)
        if find_spec('datasets'):
            sides[f'datasets.map, {words}'] = functools.partial(mapped, num_proc)
    results = alternate(sides, rounds)
    rates = {name: size / 1e6 / median([seconds for seconds, _ in pairs]) for name, pairs in results.items()}
    rows = []
    for name, rate in rates.items():
        each = rate / rates['tiktoken alone'] / (2 if ' 2 ' in name else 1)
        memory = max(megabytes for _, megabytes in results[name])
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


def main():
    parser = parser_of(__doc__, rounds=3, gigabyte=False)
    parser.add_argument('--text', action='append', help='a text to tokenize, or stdlib')
    args = parser.parse_args()
    if os.path.isdir(os.path.join(SHARED, 'tiktoken_cache')):
        os.environ.setdefault('TIKTOKEN_CACHE_DIR', os.path.join(SHARED, 'tiktoken_cache'))
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        sources = args.text or ['stdlib', *glob.glob(os.path.join(SHARED, 'novels.txt.xz'))]
        rows = []
        for source in sources:
            rows += speed(source, folder, args.rounds)
        if args.gigabyte:
            path = os.path.join(folder, 'gigabyte.txt')
            write_gigabyte(path)
            rows += speed(path, folder, 1)
    print(table(['text', 'tool', 'MB/s', 'relative to tiktoken alone, per process', 'peak MB'], rows))


if __name__ == '__main__':
    main()
