"""
Does a run with a time budget end on time, with its rate decayed, on the depth that is best at the deadline?

    $ python tests/bench/deadline.py --data_dir=data --datasets=stdlib,novels --minutes=1,3 --depths=3,4,5
    $ python tests/bench/deadline.py --report        # the table of the rows so far

For each text, budget and seed: the run whose depth the ladder chooses, and the same with each of the depths.
One evaluation of the complete held-out split, outside the budget, judges all. Kernels are compiled anew, as
in a first run. Every run adds a row to deadline.jsonl beside this file, and a run that has a row is not
repeated. Needs an idle machine.
"""

import itertools
import os
import re
import tempfile
from statistics import median

from bench import machine, parser_of, table
from ladder import TEXTS, add_row, read_rows, train

ROWS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'deadline.jsonl')


def measure(name, minutes, seed, depth, data_dir):
    """The row of one run; depth 0: the ladder chooses it."""
    with tempfile.TemporaryDirectory() as folder:
        out, data = f'{folder}/out', [f'--dataset={name}', f'--data_dir={data_dir}']
        chosen = [f'--depth={depth}'] if depth else []
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = f'{folder}/kernels'
        seconds, lines = train([*data, *chosen, f'--time_budget={minutes:g}', f'--seed={seed}',
                                f'--out_dir={out}'])
        log, expected = read_rows(f'{out}/log.jsonl'), {}
        for line in lines:
            found = re.match(r' +(\d+)[* ] +[\d,.]+ M +[\d,]+ +[\d,.]+ MB +([\d.]+)$', line)
            if found:
                expected[found[1]] = float(found[2])
            elif found := re.match(r'ladder: depth (\d+)', line):
                depth = int(found[1])
        _, judged = train([*data, '--eval_only', f'--init_from={out}/ckpt.pt', '--eval_tokens=None',
                           '--compile=False', '--batch_size=32'])
    bpb = float(re.search(r'([\d.]+) bits per byte', '\n'.join(judged))[1])
    rates = [row['lr'] for row in log if 'lr' in row]
    return {'dataset': name, 'minutes': minutes, 'seed': seed, 'by_ladder': not chosen, 'depth': depth,
            'seconds': round(seconds, 1), 'steps': max(row['step'] for row in log),
            'last_rate': rates[-1] / max(rates), 'bpb': bpb, 'expected': expected, 'machine': machine()}


def report(rows):
    """The table: per text and budget the depth chosen, its time and loss, and the best of all depths."""
    lines, errors = [], []
    for name, minutes in dict.fromkeys((row['dataset'], row['minutes']) for row in rows):
        here = [row for row in rows if (row['dataset'], row['minutes']) == (name, minutes)]
        ours = [row for row in here if row['by_ladder']]
        if not ours:
            continue
        by_depth = {}
        for row in here:
            by_depth.setdefault(row['depth'], []).append(row['bpb'])
        reached = {depth: median(found) for depth, found in by_depth.items()}
        best, bpb = min(reached, key=reached.get), median(row['bpb'] for row in ours)
        for depth, value in reached.items():
            forecasts = [row['expected'][str(depth)] for row in ours if str(depth) in row['expected']]
            errors += [abs(forecast / value - 1) for forecast in forecasts]
        expected = median(row['expected'][str(row['depth'])] for row in ours)
        lines.append([name, f'{minutes:g}', len(ours), '/'.join(str(row['depth']) for row in ours),
                      '/'.join(f'{row["seconds"]:.0f}' for row in ours), f'{expected:.3f}', f'{bpb:.3f}',
                      ', '.join(f'{depth}: {value:.3f}' for depth, value in sorted(reached.items())),
                      f'{bpb / reached[best] - 1:+.1%}'])
    print(table(['text', 'minutes', 'seeds', 'depth', 'seconds', 'expected', 'bits per byte', 'by depth',
                 'beside the best'], lines))
    if errors:
        print(f'expected and reached differ by {median(errors):.1%} (median of {len(errors)})')


def main():
    args = parser_of(__doc__, **TEXTS, minutes='1,3', seeds=1, report=False).parse_args()
    keys = [(row['dataset'], row['minutes'], row['seed'], 0 if row['by_ladder'] else row['depth'])
            for row in read_rows(ROWS)]
    minutes, depths = map(float, args.minutes.split(',')), [0, *map(int, args.depths.split(','))]
    for key in itertools.product(args.datasets.split(','), minutes, range(1, args.seeds + 1), depths):
        if not args.report and key not in keys:
            add_row(ROWS, measure(*key, args.data_dir))
            print(read_rows(ROWS)[-1], flush=True)
    report(read_rows(ROWS))


if __name__ == '__main__':
    main()
