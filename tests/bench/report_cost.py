"""
What a report costs: seconds, seconds of a core, memory and bytes of a page, by the number of log lines.

    $ python tests/bench/report_cost.py                  # logs of 100 to 100,000 lines

The goals: under 2 s and 2 MB for 100,000 lines. A run draws its report again only when 200 times the seconds
of the last one have passed, so all but the first and the last cost at most 0.5%.
"""

import json
import math
import os
import random
import resource
import tempfile
import time

from bench import parser_of, table

from hotloop.training.report import write_report


def write_log(folder, number):
    """A log of `number` lines as a run with a GPU writes them, with an evaluation of every 100 steps."""
    random.seed(0)
    with open(os.path.join(folder, 'log.jsonl'), 'w', encoding='utf-8') as f:
        for step in range(1, number + 1):
            loss = 3 + 8 * math.exp(-20 * step / number) + random.gauss(0, 0.05)
            row = {'step': step, 'loss': loss, 'lr': 6e-4 * random.random(), 'grad_norm': random.random(),
                   'tokens_seen': 491520 * step, 'peak_memory_mb': 41234.567, 'ms': 250 + random.random(),
                   'tokens_per_s': 1.9e6 + random.random(), 'data_share': 0.001, 'mfu': 0.45}
            if step % 100 == 0:
                row |= {'val_loss': loss, 'val_stderr': 0.01, 'val_bpb': loss / 3}
            f.write(json.dumps(row) + '\n')


def measure(folder):
    """(seconds, seconds of a core, bytes) of a report, the fastest of three."""
    times = []
    for _ in range(3):
        began, core = time.perf_counter(), time.process_time()
        path = write_report(folder)
        times.append((time.perf_counter() - began, time.process_time() - core))
    return *min(times), os.path.getsize(path)


def main():
    parser_of(__doc__).parse_args()
    rows = []
    for number in (100, 1000, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            write_log(folder, number)
            seconds, core, size = measure(folder)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        rows.append([f'{number:,}', f'{seconds:.3f}', f'{core:.3f}', f'{size / 1e3:,.0f}', f'{peak:,.0f}'])
    print(table(['log lines', 'seconds', 'of a core', 'page, KB', 'peak MB'], rows))


if __name__ == '__main__':
    main()
