"""gpu_report.sh all, small and on a CPU: it goes on after a part that fails, and resumes after a kill."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / 'bench' / 'gpu_report.sh'


@pytest.mark.slow
def test_a_part_that_fails_and_a_kill(tmp_path):
    """The peer is an empty folder, so generation fails; tests that need a GPU are skipped."""
    (tmp_path / 'peer').mkdir()
    out = tmp_path / 'report'
    parts = 'check generation test_gpu'
    env = {**os.environ, 'SHAPE': 'small', 'STEPS': '1', 'OUT': str(out), 'PARTS': parts}
    command = [SCRIPT, 'all', tmp_path / 'peer']
    first = subprocess.Popen(command, env=env, start_new_session=True)
    while not (out / 'check.md').exists():
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (out / 'report.md').exists()
    done = (out / 'check.md').stat().st_mtime_ns
    again = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert 'part generation failed' in again.stderr and (out / 'check.md').stat().st_mtime_ns == done
    report = (out / 'report.md').read_text(encoding='utf-8')
    assert '## generation failed' in report and 'FileNotFoundError' in report
    for words in ('## the machine', '## tests/system/test_gpu.py', 'there is no GPU'):
        assert words in report
