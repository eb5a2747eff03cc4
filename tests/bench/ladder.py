"""
The law of loss behind hotloop/training/ladder.py: trains depths on texts, and fits bits per byte to the rows.

    $ python tests/bench/ladder.py --data_dir=data --datasets=stdlib,novels --depths=3,4,5 --megabytes=1,4
    $ python tests/bench/ladder.py --fit               # prints the constants and the error of each row

Each run is one row of ladder.jsonl beside this file; a run that has a row is not repeated. A row: dataset,
bits per byte of its text by bz2, its bytes, bytes per token, depth, bytes read, seed, and bits per byte of
2^18 held-out tokens; ten rows, which LOG.md names, have those of the complete held-out split.
Nothing is timed, so other work may run beside it. The fit minimizes squared relative errors. Rows of small
texts take no part in it: their held-out files differ from them more than the law knows.
"""

import itertools
import json
import os
import sys
import tempfile

import numpy as np
from bench import parser_of, run, table

from hotloop.data.dataset import open_datasets
from hotloop.training import ladder
from hotloop.training.depth import num_parameters, tokens_per_step
from hotloop.training.mixture import open_split

ROWS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'ladder.jsonl')


# Published results, so that the law holds for larger models too: parameters of the blocks, bytes, steps, bits
# per byte. modded-nanogpt's track 3: 3,250 steps of 524,288 tokens, 3.28 nats per GPT-2 token of 4.6 bytes (a
# guess). nanochat's 20 layers: 11.2 billion tokens of 4.8 bytes. The bz2 of their text is an estimate too
PUBLISHED, WEB = ((85e6, 7.8e9, 3250, 1.03), (393e6, 54e9, 21400, 0.853)), 2.2
GAMMAS = (0.33, 0.5, 0.75, 1.0)
SMALL = 4e6  # bytes of text
TEXTS = dict(data_dir='data', datasets='stdlib', depths='3,4,5')  # flags of both benches of the ladder
NAMES = ('FLOOR', 'WIDTH', 'ALPHA', 'LENGTH', 'BETA', 'START', 'GAMMA')


def read_rows(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf-8') as f:
        return [json.loads(line) for line in f]


def add_row(path, row):
    with open(path, 'a', encoding='utf-8') as f:
        f.write(json.dumps(row) + '\n')


def train(argv):
    """(seconds, lines) of a run of train.py; RuntimeError if it fails."""
    seconds, _, output = run([sys.executable, 'train.py', *argv])
    return seconds, output.splitlines()


def collect(args):
    """Trains what has no row yet."""
    done = {(row['dataset'], row['depth'], row['bytes'], row['seed']) for row in read_rows(ROWS)}
    for depth, megabytes, name in itertools.product(args.depths.split(','), args.megabytes.split(','),
                                                    args.datasets.split(',')):
        datasets = open_datasets(name, args.data_dir)
        text = ladder.describe_text(datasets, open_split(datasets, 'train', 256))
        tokens = tokens_per_step(int(depth))
        steps = max(round(1e6 * float(megabytes) / text.bytes_per_token / tokens), 1)
        num_bytes = round(steps * tokens * text.bytes_per_token)
        if (name, int(depth), num_bytes, args.seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            train([f'--dataset={name}', f'--data_dir={args.data_dir}', f'--depth={depth}',
                   f'--max_iters={steps}', f'--eval_interval={steps}', f'--eval_tokens={2**18}',
                   '--compile=False', f'--seed={args.seed}', f'--out_dir={folder}/out'])
            row = next(row for row in reversed(read_rows(f'{folder}/out/log.jsonl')) if 'val_bpb' in row)
        add_row(ROWS, {'dataset': name, 'bz2': round(text.bits, 4), 'text': round(text.num_bytes),
                       'bytes_per_token': round(text.bytes_per_token, 4), 'depth': int(depth),
                       'bytes': num_bytes, 'seed': args.seed, 'loss': round(row['val_bpb'], 4)})
        print(read_rows(ROWS)[-1], flush=True)


def fit(rows):
    """The constants of the law, in the order of NAMES, with the least squared relative errors."""
    points = []
    for row in rows:
        steps = row['bytes'] / row['bytes_per_token'] / tokens_per_step(row['depth'])
        points.append((num_parameters(row['depth']), ladder.worth(row['bytes'], row['text']), steps,
                       row['loss'], row['bz2']))
    points += [(*point, WEB) for point in PUBLISHED]
    parameters, seen, steps, loss, bz2 = np.array(points, float).T
    best = (np.inf, None)
    for alpha, beta, gamma in itertools.product(np.arange(0.1, 0.5, 0.02), np.arange(0.16, 0.5, 0.02),
                                                GAMMAS):
        terms = [bz2**2, parameters**-alpha, seen**-beta, steps**-gamma]
        terms = np.stack(terms, 1) / loss[:, None]
        factors = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0]
        error = np.square(terms @ factors - 1).sum()
        if factors.min() >= 0 and error < best[0]:
            floor, width, length, start = factors
            best = error, (floor, width, alpha, length, beta, start, gamma)
    return best[1]


def main():
    args = parser_of(__doc__, **TEXTS, megabytes='1', seed=1, fit=False).parse_args()
    if not args.fit:
        return collect(args)
    rows = read_rows(ROWS)
    constants = dict(zip(NAMES, map(float, fit([row for row in rows if row['text'] > SMALL])), strict=True))
    print(', '.join(f'{name} = {value:.4g}' for name, value in constants.items()))
    vars(ladder).update(constants)
    lines, errors = [], []
    for row in rows:
        text = ladder.Text(row['bz2'], row['bytes_per_token'], row['text'])
        expected = ladder.expected_loss(row['depth'], row['bytes'], text)
        error = abs(expected / row['loss'] - 1)
        if row['text'] > SMALL:
            errors.append(error)
        lines.append([row['dataset'], row['depth'], f'{row["bytes"] / 1e6:.2f}', f'{row["loss"]:.3f}',
                      f'{expected:.3f}', f'{error:.1%}'])
    print(table(['text', 'depth', 'MB read', 'bits per byte', 'fitted', 'error'], lines))
    print(f'median error {np.median(errors):.1%}, largest {max(errors):.1%}')


if __name__ == '__main__':
    main()
