"""
What the parts of a card cost: the time of compiled steps without each of them, in turns in one process.

    $ python tests/bench/part_speed.py --parts='--softcap=0;--mixer=CCA;--head_gate=False --multi_token=0'
    $ python tests/bench/part_speed.py --card=config/shakespeare_cpu.py --parts=--qk_norm=False --rounds=30

The machine's speed changes, so each round compares blocks of steps that ran within seconds; a ratio is the
median over the rounds. Beside the gain at equal steps (compare.py) it tells the gain at equal time.
"""

import random
import shlex
from statistics import median

from bench import machine, parser_of, table
from profile_step import run_steps

import train

WARM, BLOCK = 3, 8  # steps


def main():
    args = parser_of(__doc__, card='config/quickstart.py', parts='--softcap=0', rounds=16,
                     data_dir='data').parse_args()
    train.torch._dynamo.config.recompile_limit = 64  # of models, which are compiled from one forward
    runs, seconds = {}, {}
    for flags in ('', *args.parts.split(';')):
        settings = train.read_settings([args.card, f'--data_dir={args.data_dir}', '--time_budget=None',
                                        '--compile=True', *shlex.split(flags)])
        datasets = train.open_datasets(settings.train.dataset, args.data_dir)
        runs[flags] = train.Run(settings, datasets, train.setup(settings.train))
        run_steps(runs[flags], 0, WARM)
        seconds[flags] = []
    for number in range(args.rounds):
        for flags in random.sample(list(runs), len(runs)):
            seconds[flags].append(run_steps(runs[flags], WARM + number * BLOCK, BLOCK))
    rows = []
    for flags, values in seconds.items():
        ratio = median(a / b for a, b in zip(values, seconds[''], strict=True))
        rows.append([f'`{args.card} {flags}`', f'{1000 * median(values):.1f} ({1000 * min(values):.1f} to '
                     f'{1000 * max(values):.1f})', f'{ratio:.3f}'])
    print(machine())
    print(table(['settings', 'ms a step', 'time / that of the card'], rows))


if __name__ == '__main__':
    main()
