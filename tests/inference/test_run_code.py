"""Judged programs: what passes, what fails, and what is stopped without harm."""

import os

import pytest

from hotloop.inference import run_code as judge
from hotloop.inference.run_code import run_code

OUTSIDE = 'hotloop_escaped'


@pytest.mark.parametrize('program', [
    'x = 1', 'import numpy\nassert numpy.ones(3).sum() == 3', 'print("x" * 10**5)',
    'with open("a.txt", "w") as f:\n    f.write("a")\nimport os\nos.remove("a.txt")',
    'import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    open(d + "/a", "w").close()',
    'if __name__ == "__main__":\n    1 / 0',
    'from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int',
    'import os\nassert not os.environ.get("HOME") and os.listdir(".") == []'])
def test_a_program_that_runs_to_its_end_passes(program):
    assert run_code(program) is None


@pytest.mark.parametrize('program, reason', [
    ('assert 1 == 2, "no"', 'AssertionError: no'),
    ('def', 'SyntaxError: invalid syntax (program.py, line 1)'),
    ('exit(0)', 'SystemExit: 0'), ('import os\nos._exit(0)', 'exit code 0 before its end'),
    ('input()', 'EOFError: EOF when reading a line'), ('def f(): return f()\nf()', 'RecursionError: '),
    ('s = "\ud800"', 'UnicodeEncodeError: '),
    ('import faulthandler\nfaulthandler._sigsegv()', 'killed by SIGSEGV'),
    ('class E(Exception):\n    def __str__(self): return 1\nraise E', 'exit code 1 before its end')])
def test_a_program_that_fails_gives_its_reason(program, reason):
    """Leaving before the tests is a failure, whatever the exit code."""
    assert run_code(program).startswith(reason)


@pytest.mark.parametrize('program, reason', [
    ('while True: pass', 'stopped after 1 s'), ('import time\ntime.sleep(60)', 'stopped after 1 s'),
    ('x = "a" * 2**33', 'MemoryError'), ('x = []\nwhile True: x.append(bytes(10**8))', 'MemoryError'),
    ('f = open("a", "wb")\nwhile True: f.write(bytes(10**6))', 'OSError: [Errno 27]'),
    ('import os\nwhile True: os.fork()', 'PermissionError: os.fork is refused'),
    ('import os\nos.system("true")', 'PermissionError: os.system is refused'),
    ('import os\nos.kill(os.getppid(), 9)', 'PermissionError: os.kill is refused'),
    ('import subprocess\nsubprocess.run(["true"])', 'PermissionError: subprocess.Popen is refused'),
    ('import multiprocessing as m\nm.get_context("spawn").Process().start()',
     'PermissionError: a judged program starts no processes'),
    ('import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))',
     'PermissionError: resource.setrlimit'),
    ('import socket\nsocket.create_connection(("127.0.0.1", 1))', 'PermissionError: socket.getaddrinfo'),
    ('import ctypes', 'ImportError: ctypes is refused')])
def test_a_program_without_end_or_limit_is_stopped(program, reason):
    """It loops, waits, allocates, fills the disk, starts processes, lifts its limits, reaches the network."""
    assert run_code(program, seconds=1 if 'stopped' in reason else 10).startswith(reason)


@pytest.mark.parametrize('program', [
    f'open("../{OUTSIDE}", "w")', f'open(b"../{OUTSIDE}", "ab")', f'os.open("../{OUTSIDE}", os.O_CREAT)',
    f'os.chdir("..")\nopen("{OUTSIDE}", "x")', f'os.mkdir("../{OUTSIDE}")', f'os.symlink("..", "{OUTSIDE}")',
    f'open("a", "w").close()\nos.rename("a", "../{OUTSIDE}")', 'os.link(VICTIM, "a")', 'os.remove(VICTIM)',
    'os.chmod(VICTIM, 0)', 'os.truncate(VICTIM, 0)', 'open(VICTIM, "r+")',
    'import shutil\nshutil.rmtree(FOLDER)',
    f'd = os.open("..", os.O_RDONLY)\nos.open("{OUTSIDE}", os.O_CREAT, dir_fd=d)'])
def test_a_program_that_writes_outside_its_folder_is_stopped(tmp_path, monkeypatch, program):
    """Also as root. Neighboring files stay as they are."""
    monkeypatch.setattr(judge.tempfile, 'tempdir', str(tmp_path))
    (tmp_path / 'victim').write_text('intact')
    before = f'import os\nFOLDER = {str(tmp_path)!r}\nVICTIM = FOLDER + "/victim"\n'
    assert run_code(before + program).startswith('PermissionError: ')
    assert os.listdir(tmp_path) == ['victim'] and (tmp_path / 'victim').read_text() == 'intact'
    assert (tmp_path / 'victim').stat().st_mode & 0o400
