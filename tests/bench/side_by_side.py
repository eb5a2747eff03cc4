"""
A step of config/quickstart.py alone, and two runs at the same time on the same cores.

    $ python tests/bench/side_by_side.py --compile             # libgomp's own spinning, and ours
    $ python tests/bench/side_by_side.py --spins 0 100 10000   # other values of GOMP_SPINCOUNT too

Each row has two processes with their own setting. They stay and wait for their turn; all rows alternate. The
ratio is the step of one of two runs over the step of one alone: 2 if the two only share the cores.
"""

import os
import tempfile
import threading
from statistics import median

from bench import cores, machine, parser_of, table
from step_speed import SHAPES, Side, write_data

from hotloop.system.host import SPINS


def start(spins, folder, threads, compiling):
    """Two workers with the step of config/quickstart.py and this GOMP_SPINCOUNT; None: libgomp's own."""
    os.environ.pop('GOMP_SPINCOUNT', None)
    if spins is not None:
        os.environ['GOMP_SPINCOUNT'] = str(spins)
    recipe = dict(shape='quickstart', preset='modern', optimizer='muon', batch=8, compile=compiling)
    pair = [Side(f'spins {spins}', folder=folder, device='cpu', threads=threads, dtype='auto', **recipe)
            for _ in range(2)]
    for side in pair:
        side.start()
    return pair


def measure(sides, steps):
    """Milliseconds per step of each side, all at the same time."""
    workers = [threading.Thread(target=side.measure, args=(steps,)) for side in sides]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [1000 * side.seconds[-1] for side in sides]


def main():
    parser = parser_of(__doc__, rounds=5, threads=cores())
    parser.add_argument('--spins', type=int, nargs='*', default=[], help='more values of GOMP_SPINCOUNT')
    parser.add_argument('--steps', type=int, default=20, help='of each turn')
    parser.add_argument('--compile', action='store_true', help='compile the step, as the card does')
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder, SHAPES['quickstart']['vocab_size'], 2_000_000)
        pairs = {}
        for spins in (None, SPINS, *args.spins):
            pairs[spins] = start(spins, folder, args.threads, args.compile)
        alone, both = {spins: [] for spins in pairs}, {spins: [] for spins in pairs}
        for _ in range(args.rounds):
            for spins, pair in pairs.items():
                alone[spins] += measure(pair[:1], args.steps)
                both[spins] += measure(pair, args.steps)
        for spins, pair in pairs.items():
            one, two = median(alone[spins]), median(both[spins])
            rows.append(["libgomp's own" if spins is None else spins, f'{one:.1f}',
                         f'{min(alone[spins]):.1f} to {max(alone[spins]):.1f}', f'{two:.1f}',
                         f'{two / one:.2f}'])
            for side in pair:
                side.close()
    print(f'{machine()}, {args.threads} threads for each run, {args.rounds} rounds of {args.steps} steps')
    print(table(['GOMP_SPINCOUNT', 'ms alone', 'lowest to highest', 'ms, two runs', 'ratio'], rows))


if __name__ == '__main__':
    main()
