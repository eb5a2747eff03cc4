"""
Seconds from the start of Python to the first line of training and to the first text of a sample.

    $ python tests/bench/start_speed.py                  # beside `import torch` alone
    $ python tests/bench/start_speed.py --before=CLONE   # also an earlier commit of this repository

The sides take turns; medians are printed. All run the same tiny model, uncompiled, on the CPU; the checkpoint
is made once, with this repository. The first round, which reads files from disk, is not counted.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

from bench import ROOT, alternate, machine, parser_of, run, table

TINY = ['--data_dir=.', '--dataset=tiny', '--device=cpu', '--dtype=float32', '--compile=False', '--threads=1',
        '--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=4',
        '--gradient_accumulation_steps=2', '--max_iters=1', '--warmup_iters=1', '--eval_tokens=64']
SAMPLE = ['--device=cpu', '--start=a', '--num_samples=1', '--max_new_tokens=20']
TORCH = 'import torch; print(torch.__version__)'


def seconds_to(line, command, folder):
    """Seconds until a command has printed a line that starts so; RuntimeError if it does not."""
    began, lines = time.perf_counter(), []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, 'PYTHONUNBUFFERED': '1'}) as process:
        for text in process.stdout:
            lines.append(text)
            if text.startswith(line):
                seconds = time.perf_counter() - began
                process.stdout.read()
                return round(seconds, 3)
    raise RuntimeError(f'{" ".join(command)} printed no {line!r}:\n{"".join(lines)[-2000:]}')


def main():
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument('--before', help='a clone of an earlier commit')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare = ['README.md', '--name=tiny', '--tokenizer=byte', f'--data_dir={folder}']
        run([sys.executable, 'prepare.py', *prepare])
        run([sys.executable, os.path.join(ROOT, 'train.py'), *TINY, '--out_dir=out'], cwd=folder)
        sides = {'import torch': partial(seconds_to, '2', [sys.executable, '-c', TORCH], folder)}
        for name, clone in (('before', args.before), ('now', ROOT)):
            if clone is None:
                continue
            train = [sys.executable, os.path.join(clone, 'train.py'), *TINY, f'--out_dir={name}']
            sample = [sys.executable, os.path.join(clone, 'sample.py'), *SAMPLE, '--out_dir=out']
            sides[f'first step, {name}'] = partial(seconds_to, 'step 1:', train, folder)
            sides[f'first text, {name}'] = partial(seconds_to, 'a', sample, folder)
        alternate(sides, 1)
        results = alternate(sides, args.rounds)
    print(f'{machine()}, medians of {args.rounds}')
    print(table(['', 'seconds', 'least', 'most'],
                [[name, f'{statistics.median(found):.2f}', min(found), max(found)]
                 for name, found in results.items()]))


if __name__ == '__main__':
    main()
