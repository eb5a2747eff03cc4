"""Windows and macOS: the commands need none of what only Linux has."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotloop.system import text as wording

ROOT = Path(__file__).resolve().parents[2]
# what Windows lacks; torch itself asks sys.platform, which therefore stays
WITHOUT = '''
import os, signal, sys, warnings
for name in ('fcntl', 'resource', 'pwd', 'grp', 'termios'):
    sys.modules[name] = None
for name in ('SIGHUP', 'SIGKILL', 'SIGSTOP', 'SIGQUIT', 'SIGALRM', 'SIGUSR1'):
    delattr(signal, name)
for name in ('fork', 'forkpty', 'killpg', 'getuid', 'posix_spawn', 'mkfifo', 'sched_getaffinity', 'sysconf'):
    if hasattr(os, name):
        delattr(os, name)
warnings.filterwarnings('ignore', 'only soft file lock')  # Windows has its own lock


def is_open(path):
    """Whether this process has a file open that is `path` or lies in it."""
    for number in os.listdir('/proc/self/fd'):
        try:
            name = os.readlink(f'/proc/self/fd/{number}')
        except OSError:  # of this list
            continue
        if (name + '/').startswith(os.path.abspath(path) + '/'):
            return True


def replace(old, new, move=os.replace):
    """As on Windows, for what is open, and for the name of a folder, which it does not replace."""
    if is_open(old) or is_open(new) or os.path.isdir(new):
        raise PermissionError(13, 'Access is denied', old)
    move(old, new)


if os.path.isdir('/proc/self/fd'):
    os.replace = replace
'''
COMMANDS = '''
import prepare, sample, train
os.makedirs('data/tiny')  # an empty folder is not in the way
prepare.main(['text.txt', '--name=tiny', '--tokenizer=char'])
prepare.main(['text.txt', '--name=tiny', '--tokenizer=byte'])
shape = '--n_layer=1 --n_head=1 --n_embd=8 --block_size=8 --batch_size=2 --gradient_accumulation_steps=1'
settings = '--device=cpu --dtype=float32 --compile=False --eval_tokens=64 --warmup_iters=0 --max_iters=2'
assert train.main(f'--dataset=tiny {shape} {settings}'.split()) == 0
assert train.main('--init_from=resume --max_iters=3'.split()) == 0
assert sample.main('--max_new_tokens=3 --num_samples=1 --device=cpu'.split()) == 0
assert sample.main('--diagnose --device=cpu'.split()) == 0
'''
SPAWN = '''
import sys
import prepare
from hotloop.data import documents
from hotloop.data import encode
if __name__ == '__main__':  # a spawned process imports this file
    sys.platform = 'darwin'
    documents.PIECE = encode.PIECE = 256
    prepare.main(['text.txt', '--name=tiny', '--tokenizer=bpe:300', '--num_proc=1'])
else:
    print('spawned')
'''


def run(code, folder):
    """What a child Python prints that runs this code as a script, in a folder with a text."""
    (folder / 'text.txt').write_text('A text of some words, wörds and ends.\n' * 200, encoding='utf-8')
    (folder / 'script.py').write_text(code, encoding='utf-8')
    done = subprocess.run([sys.executable, 'script.py'], cwd=folder, capture_output=True, text=True,
                          check=False, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_commands_run_without_fcntl_resource_sighup_and_fork(tmp_path):
    """As on Windows: import, prepare a text twice, train, resume, sample, diagnose."""
    assert 'step 3: val loss' in run(WITHOUT + COMMANDS, tmp_path)


@pytest.mark.slow
def test_the_tests_are_collected_without_them(tmp_path):
    words = ['--collect-only', '-qq', '-n0', '-m', '', '-p', 'no:cacheprovider', '--assert=plain',
             f'--rootdir={ROOT}', str(ROOT / 'tests')]
    run(f'{WITHOUT}\nimport pytest\nassert pytest.main({words!r}) == 0', tmp_path)


def test_processes_that_tokenize_are_spawned_on_macos(tmp_path):
    """It can fork, but its libraries do not survive that."""
    printed = run(SPAWN, tmp_path)
    assert printed.count('spawned') == 1 and 'train on it with' in printed


@pytest.mark.parametrize(('system', 'printed'), [
    ('nt', r'--data_dir=C:\data --name=x "--out_dir=my runs"'),
    ('posix', r"'--data_dir=C:\data' --name=x '--out_dir=my runs'")])
def test_commands_are_quoted_for_the_shell(monkeypatch, system, printed):
    """For cmd.exe single quotes are part of a name."""
    monkeypatch.setattr(wording, 'os', SimpleNamespace(name=system))
    assert wording.shell(r'--data_dir=C:\data', '--name=x', '--out_dir=my runs') == printed
