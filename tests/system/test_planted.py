"""Runs planted.py, which plants defects of CUDA paths in copies of the repository: a test finds each."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from test_fake_cuda import TESTS, shim  # noqa: F401  a fixture


@pytest.mark.slow
def test_each_planted_defect_is_found(tmp_path, shim):  # noqa: F811
    copy, hidden = tmp_path / 'copy', shutil.ignore_patterns('.*', 'out*', 'shared', 'bench', '*.png')
    shutil.copytree(TESTS.parent, copy, ignore=hidden)
    env = {**os.environ, 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1', 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, TESTS / 'planted.py', shim, copy], env=env, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
