"""
Wall-clock time to a loss: nanoGPT's training script and ours on the same bins, judged by one evaluator.

    $ python tests/bench/time_to_loss.py --peer=../nanoGPT                  # nanoGPT's README run for CPUs
    $ python tests/bench/time_to_loss.py --peer=../nanoGPT --seeds=3 --sweep  # and nanoGPT's best of a sweep
    $ python tests/bench/time_to_loss.py --peer=../nanoGPT --ours='config/quickstart.py --max_iters=300'

Time counts from the start of Python, with compilation, without evaluations and saves. The target is nanoGPT's
own loss at the end of its README run; the time at which it is crossed is interpolated between checkpoints.
The sides take turns. Needs nanoGPT's data/shakespeare_char, which its prepare.py makes, or --data_dir.
"""

import json
import os
import sys
import tempfile
from functools import partial
from itertools import pairwise
from statistics import median

from bench import ROOT, cores, machine, parser_of, run, table

# nanoGPT's README: "I only have a macbook"
README = ('config/train_shakespeare_char.py --device=cpu --eval_iters=1 --log_interval=500 --block_size=64 '
          '--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 '
          '--dropout=0.0')
# without compilation, which does not pay in such short runs; the last one was best with it
SWEEP = [f'--batch_size={batch} --learning_rate={lr} --min_lr={lr / 10} --max_iters={steps} '
         f'--lr_decay_iters={steps} --compile={compiled}' for batch, rates, horizons, compiled in (
             (12, (2e-3, 4e-3, 8e-3), (500, 700, 1000), False), (24, (4e-3, 8e-3), (400, 600), False),
             (8, (4e-3,), (1000, 1400), False), (12, (4e-3,), (1200,), True)) for lr in rates
         for steps in horizons]
OURS = 'config/shakespeare_cpu.py'

# runs a training script in this process; the clock stops while it evaluates and saves; weights go to a file
THEIRS = """
import json, os, sys, time
began, out, stopped = time.perf_counter(), sys.argv[1], [0.0, None]
script, argv = sys.argv[2], sys.argv[3:]
import torch
def stop():
    if torch.cuda.is_available(): torch.cuda.synchronize()
    stopped[1] = time.perf_counter()
def go(): stopped[0] += time.perf_counter() - stopped[1]; stopped[1] = None
evaluate, train, save = torch.nn.Module.eval, torch.nn.Module.train, torch.save
def eval_and_stop(self):
    if stopped[1] is None: stop()
    return evaluate(self)
def train_and_go(self, mode=True):
    if mode and stopped[1] is not None: go()
    return train(self, mode)
def keep(checkpoint, path):
    stop()
    now = stopped[1] - began - stopped[0]
    save({'model': checkpoint['model'], 'model_args': checkpoint['model_args'], 'seconds': now,
          'step': checkpoint['iter_num']}, f'{out}/{checkpoint["iter_num"]:06d}.pt')
    go()
torch.nn.Module.eval, torch.nn.Module.train, torch.save = eval_and_stop, train_and_go, keep
sys.argv, sys.path[0] = [script, *argv], os.path.dirname(script)
os.chdir(os.path.dirname(script))
import runpy
runpy.run_path(script, run_name='__main__')
"""

OURS_RUN = """
import sys, time
from types import SimpleNamespace
began, out, stopped = time.perf_counter(), sys.argv[1], 0.0
argv = sys.argv[2:]
sys.path.insert(0, {root!r})
import torch, train
def do_not_evaluate(model, *args):
    return SimpleNamespace(model=model, val={{'loss': 1.0}}, seconds=0.0)
def keep_weights(log, step, evaluation):
    global stopped
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the steps before are ours
    start = time.perf_counter()
    model = evaluation.model
    torch.save({{'model': model.state_dict(), 'model_args': model.config.model_args(),
                'seconds': start - began - stopped, 'step': step}}, f'{{out}}/{{step:06d}}.pt')
    stopped += time.perf_counter() - start
def do_not_save(checkpoints, checkpoint, best, final=False):
    checkpoints.saved_step = checkpoint['iter_num']
train.evaluate_both, train.Log.evaluation, train.Checkpoints.save = do_not_evaluate, keep_weights, do_not_save
train.main(argv)
"""


def weights_of(code, argv, threads, cwd):
    """Train. Returns the paths of the weights that the run wrote, in order."""
    folder = tempfile.mkdtemp()
    run([sys.executable, '-c', code, folder, *argv], cwd, {'OMP_NUM_THREADS': str(threads)})
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def judge(paths, data_folder, threads, windows):
    """
    Return [(seconds, step, validation loss)] of checkpoints by our evaluator, over so many windows of the
    split or all of it: in float32 on a CPU, in bf16 on a GPU.
    """
    import torch

    from hotloop.data.dataset import read_meta
    from hotloop.system.distributed import Env
    from hotloop.training.dataloader import Split
    from hotloop.training.evaluate import evaluate
    from model import GPT
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    env = Env(device=torch.device('cuda' if cuda else 'cpu'))
    curve = []
    for path in paths:
        checkpoint = torch.load(path, weights_only=True, map_location='cpu')
        weights = {name.removeprefix('_orig_mod.'): w for name, w in checkpoint['model'].items()}
        model = GPT.from_checkpoint(checkpoint['model_args'], weights).to(env.device)
        model.compute_dtype = torch.bfloat16 if cuda else torch.float32
        split = Split(data_folder, 'val', read_meta(data_folder), model.config.block_size)
        loss = evaluate(model, split, windows, 32, env)['loss']
        curve.append((checkpoint['seconds'], checkpoint['step'], loss))
        os.remove(path)
    return curve


def crossing(curve, target):
    """Return the seconds at which a curve reaches the target, between checkpoints; inf if never."""
    for (t0, _, a), (t1, _, b) in pairwise(curve):
        if a > target >= b:
            return t0 + (t1 - t0) * (a - target) / (a - b)
    return float('inf')


def main():
    parser = parser_of(__doc__, dataset='shakespeare_char', seeds=1, threads=cores())
    parser.add_argument('--peer', required=True, help='a clone of karpathy/nanoGPT')
    parser.add_argument('--data_dir', help="default: the peer's data")
    parser.add_argument('--ours', default=OURS, help='card and flags of our run')
    parser.add_argument('--theirs', default=README, help='card and flags of its run')
    parser.add_argument('--sweep', action='store_true', help="nanoGPT's recipe, other rates and horizons")
    parser.add_argument('--points', type=int, default=8, help='checkpoints of a run')
    parser.add_argument('--windows', type=int, help='of the validation split, evenly spaced; default: all')
    args = parser.parse_args()
    peer = os.path.abspath(args.peer)
    data_dir = os.path.abspath(args.data_dir or os.path.join(peer, 'data'))
    score = partial(judge, data_folder=os.path.join(data_dir, args.dataset), threads=args.threads,
                    windows=args.windows)

    def theirs(more, seed):
        words = [*args.theirs.split(), *more.split(), f'--dataset={args.dataset}']
        steps = int([w for w in words if w.startswith('--max_iters=')][-1].split('=')[1])
        with open(os.path.join(peer, 'train.py')) as f:  # it has no setting for the seed
            script = f.read().replace('1337', str(1337 + seed))
        with tempfile.NamedTemporaryFile('w', suffix='.py', dir=peer) as f:
            f.write(script)
            f.flush()
            with tempfile.TemporaryDirectory() as out:
                words += [f'--eval_interval={steps // args.points}', '--always_save_checkpoint=True',
                          f'--out_dir={out}']
                return score(weights_of(THEIRS, [f.name, *words], args.threads, peer))

    def ours(seed):
        import train
        words = [os.path.join(ROOT, w) if w.endswith('.py') else w for w in args.ours.split()]
        words += [f'--data_dir={data_dir}', f'--dataset={args.dataset}', f'--seed={1337 + seed}']
        cfg = train.read_settings(words).train
        with tempfile.TemporaryDirectory() as out:
            words += [f'--out_dir={out}', f'--eval_interval={max(cfg.max_iters // args.points, 1)}']
            return score(weights_of(OURS_RUN.format(root=ROOT), words, args.threads, ROOT))
    sides = {"nanoGPT, its README's recipe": lambda seed: theirs('', seed), f'ours, {args.ours}': ours}
    if args.sweep:
        sides |= {f'nanoGPT, {more}': lambda seed, more=more: theirs(more, seed) for more in SWEEP}
    curves = {name: [] for name in sides}
    for seed in range(args.seeds):
        for name, side in sides.items():
            curves[name].append(side(seed))
            points = ', '.join(f'{loss:.3f} at {t:.0f} s' for t, _, loss in curves[name][-1])
            print(f'  seed {seed}: {name}: {points}', file=sys.stderr, flush=True)
    reference = curves["nanoGPT, its README's recipe"]
    target = median([curve[-1][2] for curve in reference])
    base = median([curve[-1][0] for curve in reference])
    rows = []
    for name, of_seeds in curves.items():
        seconds = median([crossing(curve, target) for curve in of_seeds])
        if of_seeds is reference:
            seconds = base
        rows.append([name, f'{median([c[-1][2] for c in of_seeds]):.4f}',
                     f'{median([c[-1][0] for c in of_seeds]):.1f}', f'{seconds:.1f}',
                     f'1/{base / seconds:.1f}', len(of_seeds)])
    print(f'{machine()}, {args.threads} threads; loss to reach: {target:.4f}')
    print(table(['run', 'final loss', 'total seconds', 'seconds to the loss', 'relative to nanoGPT', 'seeds'],
                rows))
    print(json.dumps(curves), file=sys.stderr)


if __name__ == '__main__':
    main()
