"""
Defects of CUDA paths, planted in copies of the repository: a test that needs no GPU fails on each.

    $ python tests/planted.py SHIM COPY  # prints what is not found in a COPY; SHIM: see fake_cuda.py
"""

import ctypes
import importlib
import io
import json
import multiprocessing
import os
import shutil
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

FAKE = 'tests/fake_cuda.py'
USED = 'torch._dynamo', 'torch._inductor.ir', 'torch.nn.attention.flex_attention'  # by these tests

# {what happens on a GPU: (file, text, replacement, file of tests, words that choose the test that fails)}
DEFECTS = {
    'every layer attends without its window': (
        'model.py', 'context.masks.get(self.window)', 'context.masks.get(None)', 'tests/test_model.py',
        'gpus_attention and True-'),
    'documents see those after them': (
        'model.py', 'documents[b, i] == documents[b, j]', 'documents[b, i] >= documents[b, j]',
        'tests/test_model.py', 'gpus_attention and True-'),
    'the cap of attention is lost': (
        'model.py', '(q, k, v, self.cap, mask,', '(q, k, v, None, mask,', 'tests/test_model.py',
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
    'each micro-batch reduces sharded gradients': (
        'hotloop/training/shard.py', 'model.set_requires_gradient_sync(last)', 'pass', FAKE,
        'sharded_step and optimizer'),
    'weights are gathered in each micro-batch': (
        'hotloop/training/shard.py', 'model.set_reshard_after_backward(last)', 'pass', FAKE,
        'sharded_step and optimizer'),
    'int8 weights of one row are copied to bfloat16': (
        'hotloop/inference/generate.py', 'dict(coordinate_descent_tuning=True)', 'dict()', FAKE,
        'int8_product'),
    'NF4 is restored by a view that is not fused': (
        'hotloop/weights/nf4.py', "nf4.codes.device.type == 'cpu')", 'True)', FAKE, 'nf4_is_restored'),
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


def find(folder, name):
    """
    Run the test of a defect, planted in a copy of the copy; or, for a file of tests, all that find defects in
    it, without any. Returns what is wrong: a defect that is not found, or a test that fails without.
    """
    planted = Path(f'{folder}.{os.getpid()}')
    shutil.copytree(folder, planted)  # with compiled sources
    if name in DEFECTS:
        path, old, new, tests, words = DEFECTS[name]
        source = (planted / path).read_text(encoding='utf-8')
        if source.count(old) != 1:
            return f'{path} has {source.count(old)} times {old}'
        (planted / path).write_text(source.replace(old, new), encoding='utf-8')
    else:
        tests, words = name, ' or '.join({f'({d[-1]})' for d in DEFECTS.values() if d[-2] == name})
    os.chdir(planted)
    output = io.StringIO()
    with redirect_stdout(output):
        code = pytest.main([tests, '-k', words, '-q', '-x', '-o', 'addopts=', '-p', 'no:cacheprovider',
                            '--assert=plain'])
    shutil.rmtree(planted)
    return '' if code == (name in DEFECTS) else output.getvalue()[-600:]


def main(shim, folder):
    """Import what the tests import but the sources, once; the tests of each defect run in a fork."""
    ctypes.CDLL(shim, mode=ctypes.RTLD_GLOBAL)
    files = sorted({defect[-2] for defect in DEFECTS.values()})
    sys.path[:0] = [folder, *{f'{folder}/{Path(file).parent}' for file in files}]
    for module in (*(Path(file).stem for file in files), *USED):
        importlib.import_module(module)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, '__file__', None)).startswith(folder):
            del sys.modules[name]
    with multiprocessing.get_context('fork').Pool(2, maxtasksperchild=1) as pool:
        names = [*files, *DEFECTS]
        wrong = pool.map(partial(find, folder), names, chunksize=1)
    print(json.dumps({name: why for name, why in zip(names, wrong, strict=True) if why}))


if __name__ == '__main__':
    main(*sys.argv[1:])
