"""Runs fake_cuda.py, the CUDA paths on fake tensors, in a process with a 'cuda' device that is not there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
TORCH = Path(torch.__file__).parent


@pytest.fixture
def shim(tmp_path):
    """fake_cuda.cpp, built. Its interfaces are private to torch, so only the pinned version is tried."""
    pinned = next(line for line in (TESTS.parent / 'constraints.txt').read_text(encoding='utf-8').splitlines()
                  if line.startswith('torch=='))
    if torch.version.cuda or f'torch=={torch.__version__.split("+")[0]}' != pinned:
        pytest.skip(f'the shim needs {pinned} without CUDA, and this is {torch.__version__}')
    if not shutil.which('g++'):
        pytest.skip('there is no g++ to build the shim')
    path = tmp_path / 'fake_cuda.so'
    command = ['g++', '-O0', '-shared', '-fPIC', '-std=c++20', TESTS / 'fake_cuda.cpp', f'-I{TORCH}/include',
               f'-L{TORCH}/lib', f'-Wl,-rpath,{TORCH}/lib', '-lc10', '-ltorch_cpu', '-o', path]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f'the shim does not build: {built.stderr.strip()[:300]}')
    return path


@pytest.mark.slow
def test_cuda_paths(shim):
    command = [sys.executable, TESTS / 'fake_cuda.py', shim, '-q', '-o', 'addopts=', '-p', 'no:cacheprovider',
               '--assert=plain']  # rewriting asserts takes a second
    env = {**os.environ, 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
