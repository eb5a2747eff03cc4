"""gpu_report.sh all, small and on a CPU: it goes on after a part that fails."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / 'bench' / 'gpu_report.sh'


@pytest.mark.slow
def test_a_part_that_fails(tmp_path):
    """The peer is an empty folder, so generation fails; tests that need a GPU are skipped."""
    (tmp_path / 'peer').mkdir()
    out = tmp_path / 'report'
    env = {**os.environ, 'SHAPE': 'small', 'STEPS': '1', 'OUT': str(out),
           'PARTS': 'check generation test_gpu'}
    done = subprocess.run([SCRIPT, 'all', tmp_path / 'peer'], env=env, check=True, capture_output=True,
                          text=True)
    assert 'part generation failed' in done.stderr
    report = (out / 'report.md').read_text(encoding='utf-8')
    for words in ('## the machine', '## generation failed', 'FileNotFoundError', 'there is no GPU'):
        assert words in report
