"""
Judge an idea: two settings of one card with the same data order and seeds, at equal steps (--steps), at
equal time (--minutes), or both.

    $ python tests/bench/compare.py --a='--mixer=A' --b='--mixer=CCAC' --seeds=5 --dataset=stdlib,novels
    $ python tests/bench/compare.py --a='' --b='--softcap=0' --steps=0 --minutes=3    # at equal time only
    $ python tests/bench/compare.py --board                                          # write LEADERBOARD.md

Runs of a and b alternate. A pair has the same seed, so it sees the same batches, and the difference of a pair
varies less than the losses. Each comparison adds a row to leaderboard.jsonl. Runs that have ended are kept in
--work and are not repeated until the source changes. --idea, --source and --kept describe the row. Datasets
are in --data_dir. --card is a config file, settings (--card=--depth=6), or both.
"""

import hashlib
import json
import math
import os
import shlex
import shutil
import sys
from pathlib import Path
from statistics import mean, median, stdev

from bench import ROOT, machine, parser_of, run, table

from hotloop.training.report import read_rows

ABOUT = """# Ideas, judged

Each row is pairs of runs with equal seeds and batches, by `python tests/bench/compare.py`, with which
anybody can judge another idea. A gain is the mean difference in bits per byte of the held-out text, with
its standard error; tokens/s is the ratio of speeds, which other work on the machine disturbs at equal
steps (none: two runs shared it). Rows with `--ideas` need their commit, which has the code of ideas that
did not stay: `git checkout` it. Ideas that gain nothing on two texts at three layers were not tried at six.
[LOG.md](LOG.md) has single runs of more.
"""
BOARD = os.path.join(ROOT, 'tests', 'bench', 'leaderboard.jsonl')


def source_hash():
    """Hash the source that a run depends on, so that its results are not kept after a change."""
    digest = hashlib.sha256()
    for path in sorted([*Path(ROOT).glob('*.py'), *Path(ROOT).glob('hotloop/*/*.py'),
                        *Path(ROOT).glob('config/*.py')]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_once(options, dataset, seed, length, args):
    """Train once, unless that was done. Returns the numbers of the last evaluation and the speed."""
    command = [sys.executable, 'train.py', *shlex.split(args.card), f'--dataset={dataset}',
               f'--data_dir={args.data_dir}', f'--seed={seed}', *length, *shlex.split(options)]
    key = hashlib.sha256(f'{source_hash()} {shlex.join(command[1:])}'.encode()).hexdigest()
    folder = os.path.join(args.work, key[:16])
    result = os.path.join(folder, 'result.json')
    if not os.path.exists(result):
        shutil.rmtree(folder, ignore_errors=True)
        seconds, _, _ = run([*command, f'--out_dir={folder}'])
        rows = read_rows(os.path.join(folder, 'log.jsonl'))
        last = [row for row in rows if 'val_bpb' in row][-1]
        speed = median(row['tokens_per_s'] for row in rows if 'tokens_per_s' in row)
        numbers = {'bpb': last['val_bpb'], 'steps': last['step'], 'seconds': seconds, 'tokens_per_s': speed}
        with open(result, 'w', encoding='utf-8') as f:
            json.dump(numbers, f)
    with open(result, encoding='utf-8') as f:
        return json.load(f)


def p_value(differences):
    """Return the two-sided p-value of a paired t-test."""
    n = len(differences)
    if not stdev(differences):
        return float(not mean(differences))
    t = abs(mean(differences)) / (stdev(differences) / math.sqrt(n))
    # the integral of the density of Student's t distribution by Simpson's rule, in u = atan(x / sqrt(n - 1))
    limit = math.atan(t / math.sqrt(n - 1))
    step = (math.pi / 2 - limit) / 1000
    density = [math.cos(limit + i * step) ** (n - 2) for i in range(1001)]
    area = step / 3 * (density[0] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]) + density[-1])
    return 2 * area * math.gamma(n / 2) / math.gamma((n - 1) / 2) / math.sqrt(math.pi)


def compare(dataset, kind, length, args):
    """Run all pairs on a dataset. Returns the row of the leaderboard."""
    sides = {'a': [], 'b': []}
    for seed in range(1, args.seeds + 1):
        for side, results in sides.items():
            results.append(run_once(getattr(args, side), dataset, seed, length, args))
            print(f'  {dataset}, seed {seed}, {side}: {results[-1]}', file=sys.stderr, flush=True)
    row = {name: getattr(args, name) for name in ('idea', 'source', 'kept', 'card', 'a', 'b', 'seeds')}
    row |= {'dataset': dataset, 'equal': kind, 'machine': machine(), 'commit': commit()}
    for side, results in sides.items():
        for name in ('bpb', 'seconds', 'tokens_per_s'):
            row[f'{name}_{side}'] = round(mean(result[name] for result in results), 5)
    gains = [a['bpb'] - b['bpb'] for a, b in zip(*sides.values(), strict=True)]
    row['gain'] = round(mean(gains), 5)
    if args.seeds > 1:
        row |= {'stderr': round(stdev(gains) / math.sqrt(len(gains)), 5), 'p': round(p_value(gains), 5)}
    return row


def commit():
    return run(['git', 'rev-parse', '--short', 'HEAD'])[2].strip()


def cells(row):
    """Return the cells of a row of the table."""
    gain = f'{row["gain"]:+.4f}'
    if 'stderr' in row:
        gain += f' ± {row["stderr"]:.4f} (p {row["p"]:.3f})'
    speed = ''
    if 'tokens_per_s_a' in row:
        speed = f'{row["tokens_per_s_b"] / row["tokens_per_s_a"]:.2f}'
    return [row['idea'] or f'`{row["b"]}`', row['source'], f'`{row["card"]} {row["b"]}`'.replace(' `', '`'),
            f'`{row["a"]}`' if row['a'] else 'the card', row['dataset'], row['equal'], row['seeds'],
            f'{row["bpb_a"]:.4f}', f'{row["bpb_b"]:.4f}', gain,
            speed, row['kept'], row['commit']]


HEAD = ['idea', 'source', 'settings', 'against', 'text', 'equal', 'seeds', 'bits per byte before', 'after',
        'gain', 'tokens/s', 'kept', 'commit']


def write_board():
    """Write LEADERBOARD.md from the rows of leaderboard.jsonl, the largest gain first."""
    rows = read_rows(BOARD)
    rows.sort(key=lambda row: -row['gain'])
    with open(BOARD.replace('leaderboard.jsonl', 'LEADERBOARD.md'), 'w', encoding='utf-8') as f:
        f.write(f'{ABOUT}\n{table(HEAD, map(cells, rows))}\n')


def main():
    parser = parser_of(__doc__, a='', b='', card='config/quickstart.py', dataset='stdlib', seeds=3, steps=600,
                       minutes=0.0, data_dir='data', work='out-compare', idea='', source='', kept='',
                       board=False)
    args = parser.parse_args()
    if args.board:
        return write_board()
    args.data_dir, args.work = (os.path.abspath(path) for path in (args.data_dir, args.work))
    lengths = []
    if args.steps:
        lengths.append((f'{args.steps} steps', ['--time_budget=None', f'--max_iters={args.steps}',
                                                f'--eval_interval={args.steps}', '--compile=False']))
    if args.minutes:
        lengths.append((f'{args.minutes:g} min', [f'--time_budget={args.minutes}', '--eval_interval=100000']))
    for dataset in args.dataset.split(','):
        for kind, length in lengths:
            row = compare(dataset, kind, length, args)
            print(json.dumps(row, indent=1), flush=True)
            with open(BOARD, 'a', encoding='utf-8') as f:
                f.write(json.dumps(row) + '\n')
    return None


if __name__ == '__main__':
    main()
