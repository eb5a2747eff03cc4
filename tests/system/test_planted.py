"""Defects of CUDA paths, planted in a copy of the repository: a test that needs no GPU fails on each."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_fake_cuda import shim  # noqa: F401  a fixture

ROOT = Path(__file__).parents[2]
FAKE = 'tests/fake_cuda.py'

# {what happens on a GPU: (file, text, replacement, file of tests, words that choose the test that fails)}
DEFECTS = {
    'every layer attends without its window': (
        'model.py', 'masks.get(window) for window in windows]', 'masks.get(None) for window in windows]',
        'tests/test_model.py', 'gpus_attention'),
    'documents see those after them': (
        'model.py', 'documents[b, i] == documents[b, j]', 'documents[b, i] >= documents[b, j]',
        'tests/test_model.py', 'gpus_attention'),
    'the cap of attention is lost': (
        'model.py', '(q, k, v, self.cap, within,', '(q, k, v, None, within,', 'tests/test_model.py',
        'gpus_attention'),
    'the nibbles of NF4 change places': (
        'hotloop/weights/nf4.py', 'return pairs[codes.int()]', 'return pairs.flip(1)[codes.int()]',
        'tests/weights/test_nf4.py', 'both_look_ups'),
    'a checkpoint is written before it is copied': (
        'hotloop/training/checkpoint.py', ".to('cpu', copy=True)",
        ".to('cpu', copy=True, non_blocking=True)", FAKE, 'a_save_copies'),
    'a checkpoint is written while training changes it': (
        'hotloop/training/checkpoint.py', 'self.write, snapshot(checkpoint), best',
        'self.write, checkpoint, best', FAKE, 'a_save_copies'),
    'a look for a signal waits for the queue': (
        'hotloop/system/distributed.py', 'torch.tensor(array, dtype=torch.float64)',
        'torch.tensor(array, dtype=torch.float64, device=self.device)', FAKE, 'exchange_numbers'),
    'each micro-batch reduces gradients': (
        'hotloop/training/shard.py', 'return model.no_sync()', 'pass', FAKE, 'rank_3_of_8 and gpt2'),
    'gradients are copied into buckets': (
        'train.py', 'gradient_as_bucket_view=True', 'gradient_as_bucket_view=False', FAKE, 'views_of_ddps'),
    'a step of generation is not a graph': (
        'hotloop/inference/generate.py', 'torch._dynamo.mark_static_address(tensor)', 'pass', FAKE,
        'three_lengths and fixed and gpt2 and none'),
    'a hidden upload in the MLP': (
        'model.py', 'self.act(self.c_fc(x))', 'self.act(self.c_fc(x[:, list(range(x.size(1)))]))', FAKE,
        'test_a_step and float32 and not modern'),
    'batches are uploaded from memory that is not pinned': (
        'hotloop/training/dataloader.py', 'tensor.pin_memory().to(', 'tensor.to(', FAKE,
        'test_a_step and float32 and not modern'),
    'the host reads whether a step was finite': (
        'train.py', "if not (env.device.type == 'mps' and bool(skipped)):", 'if not bool(skipped):', FAKE,
        'test_a_step and float32 and not modern'),
    'grouped heads store all T x T weights': (
        'model.py', "if groups > 1 and q.device.type == 'cuda'", "if groups > 1 and q.device.type == 'xpu'",
        FAKE, 'only_flash')}


def ended(folder, tests, words, shim):  # noqa: F811
    """Run some tests in a copy. Returns pytest's exit code, 1 where one failed, and its output."""
    command = ['-m', 'pytest', tests] if tests != FAKE else [tests, shim]
    options = ['-k', words, '-q', '-x', '-o', 'addopts=', '-p', 'no:cacheprovider', '--assert=plain']
    env = {**os.environ, 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1', 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, *command, *options], cwd=folder, env=env, capture_output=True,
                          text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_each_planted_defect_is_found(tmp_path, shim):  # noqa: F811
    def find(number, defect):
        name, old, new, tests, words = defect
        folder = tmp_path / str(number)
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns('.*', '__pycache__', 'out*'))
        path = folder / name
        source = path.read_text(encoding='utf-8')
        assert source.count(old) == 1, f'{name} has {source.count(old)} times {old}'
        path.write_text(source.replace(old, new), encoding='utf-8')
        code, output = ended(folder, tests, words, shim)
        shutil.rmtree(folder)
        return '' if code == 1 and ' failed' in output else f'not found: {output[-600:]}'
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(DEFECTS, pool.map(find, range(len(DEFECTS)), DEFECTS.values()), strict=True))
    assert not any(found.values()), {name: why for name, why in found.items() if why}
