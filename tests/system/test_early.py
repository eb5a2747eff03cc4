"""The check before the imports: it refuses what the script would refuse, at once, and nothing else."""

import ast
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from conftest import TINY

import train
from configurator import configure
from hotloop.system import early
from hotloop.system.early import check_early
from model import GPTConfig

ROOT = Path(train.__file__).parent
SCRIPTS = {'train.py': (('model.py', 'hotloop/weights/lora.py', 'train.py'),
                        (GPTConfig, train.LoRAConfig, train.TrainConfig), train)}


@pytest.fixture
def check(monkeypatch):
    """check(script, *argv): the text of its error, None if there is none."""
    monkeypatch.setattr(early.host, 'end_spins_early', lambda: None)

    def check_words(script, *argv):
        monkeypatch.setattr(sys, 'argv', [script, *map(str, argv)])
        try:
            return check_early(*SCRIPTS[script][0])
        except ValueError as e:
            return str(e)
    return check_words


@pytest.mark.parametrize('script, argv', [
    ('train.py', ['--bath_size=8']), ('train.py', ['--batch_size=x', '--nlayer=2']),
    ('train.py', ['--profile'])])
def test_it_refuses_in_the_words_of_the_script(check, monkeypatch, script, argv):
    monkeypatch.chdir(ROOT)
    _, classes, _ = SCRIPTS[script]
    with pytest.raises(ValueError) as e:
        configure(*classes, argv=argv)
    assert check(script, *argv) == str(e.value)


@pytest.mark.parametrize('found, words', [
    ('2.9.1+cu128', '2.9.1+cu128'), ('2.10.0', '2.10.0'), (None, None), ('2.11.0a0+git1', None),
    ('3.0', None)])
def test_an_old_torch_is_a_sentence(check, monkeypatch, found, words):
    def version(package):
        if found is None:
            raise PackageNotFoundError
        return found
    monkeypatch.setattr('importlib.metadata.version', version)
    assert check('train.py') == (words and f'this program needs torch 2.11 or later, and torch is {words}: '
                                           'pip install -c constraints.txt -r requirements.txt')


@pytest.mark.parametrize('script', ['prepare.py', 'train.py'])
@pytest.mark.parametrize('during', ['numpy', 'torch'])
def test_an_interrupt_or_a_missing_package_during_the_imports_has_no_traceback(script, during):
    """Any other error keeps it."""
    if (script, during) == ('prepare.py', 'torch'):
        pytest.skip('prepare.py imports no torch')
    code = """import runpy, sys
class Stop:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(name=name) if sys.argv[2] == 'missing' else eval(sys.argv[2])
sys.meta_path.insert(0, Stop())
runpy.run_path(sys.argv[3], run_name="__main__")"""

    def end(error):
        sys_argv = [sys.executable, '-c', code, during, error, script, 'nothing']
        done = subprocess.run(sys_argv, cwd=ROOT, text=True, capture_output=True, check=False)
        return done.returncode, done.stderr
    assert end('KeyboardInterrupt') in ((130, '\n'), (-signal.SIGINT, ''))  # for a shell both are 130
    code_of_exit, words = end('missing')  # torch warns first that it has no numpy
    assert code_of_exit == 1 and words.endswith(
        f'error: {during} is not installed: pip install -c constraints.txt -r requirements.txt\n')
    assert 'Traceback' in end('OSError')[1]


@pytest.mark.parametrize('script', ['prepare.py', 'train.py'])
def test_the_version_of_python_is_a_sentence(script):
    """Before numpy and configurator, which Python 3.9 cannot parse; the file itself has no later syntax."""
    code = (f'import runpy, sys; sys.version_info = (3, 9, 1); sys.modules["numpy"] = None; '
            f'sys.modules["configurator"] = None; runpy.run_path({script!r}, run_name="__main__")')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, (
        f'error: this program needs Python 3.11 or later, and {sys.executable} is Python 3.9: make a virtual '
        'environment with a later one\n'))
    for file in (script, 'hotloop/__init__.py'):
        source = (ROOT / file).read_text(encoding='utf-8')
        tree = ast.parse(source, feature_version=(3, 8))
        for index in (node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)):
            if any(isinstance(part, ast.Starred) for part in ast.iter_child_nodes(index)):
                assert ast.get_source_segment(source, index).startswith('(')  # a[b, *c] is Python 3.11's


@pytest.mark.parametrize('script', SCRIPTS)
def test_it_prints_the_help_of_the_script(check, capsys, script):
    _, classes, module = SCRIPTS[script]
    with pytest.raises(SystemExit):
        check(script, '--help')
    early_help = capsys.readouterr().out
    with pytest.raises(SystemExit):
        configure(*classes, argv=['-h'], about=module.__doc__)
    assert early_help == capsys.readouterr().out and len(early_help) > 1000


def test_it_leaves_to_the_script_what_it_cannot_know(check, tmp_path, capsys, monkeypatch):
    """Config files run there, and here nothing that needs torch can be read."""
    (tmp_path / 'card.py').write_text("import torch\nprint('once')\nn_haed = 5\n")
    assert check('train.py', tmp_path / 'card.py') is None
    error = check('train.py', tmp_path / 'card.py', '--bath_size=8')
    assert error.startswith('--bath_size: unknown setting') and '\n' not in error
    assert capsys.readouterr().out == ''
    monkeypatch.setattr(sys, 'argv', ['script.py'])
    path = tmp_path / 'script.py'
    path.write_text('from dataclasses import dataclass\nimport torch\n'
                    '@dataclass\nclass AConfig:\n    size: int = torch.iinfo(int)\n')
    assert check_early(str(path)) is None
    assert sys.modules['torch'].ones(1) == 1


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_script_that_refuses_has_not_imported_torch(script):
    done = subprocess.run([sys.executable, '-X', 'importtime', script, '--nonsense=1'], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    *imports, error = done.stderr.splitlines()
    assert done.returncode == 1 and error == "error: --nonsense: unknown setting 'nonsense'"
    assert len(imports) > 20 and not any('torch._' in line for line in imports)


UNCOMPILED = '''
import sys

import sample
import train

run = ['--out_dir=' + sys.argv[1], '--device=cpu']
train.main([*run, *sys.argv[2:]])
train.main([*run, '--init_from=resume', '--max_iters=3'])
sample.main([*run, '--start=a', '--num_samples=1', '--max_new_tokens=2'])
heavy = {'torch._dynamo', 'torch._inductor', 'torch.distributed.fsdp', 'torch.distributed.tensor', 'sympy'}
print('loaded:', heavy & sys.modules.keys())
'''


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path, data_dir):
    """It takes half of the start. torch imports it itself at many a call, as of AdamW.step()."""
    settings = {**TINY, 'data_dir': data_dir, 'max_iters': 2, 'optimizer': 'muon', 'sample_interval': 1,
                'sample_tokens': 2, 'loss_chunks': 2, 'window': 4}
    flags = [f'--{name}={value}' for name, value in settings.items()]
    done = subprocess.run([sys.executable, '-c', UNCOMPILED, tmp_path / 'out', *flags], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert done.stdout.endswith('loaded: set()\n'), done.stdout + done.stderr


@pytest.mark.parametrize('given, expected', [
    ({}, {'GOMP_SPINCOUNT': '1000'}), ({'GOMP_SPINCOUNT': '7'}, {'GOMP_SPINCOUNT': '7'}),
    ({'OMP_WAIT_POLICY': 'active'}, {'OMP_WAIT_POLICY': 'active'})])
def test_threads_sleep_early_unless_the_user_has_set_how_they_wait(monkeypatch, given, expected):
    monkeypatch.setattr(os, 'environ', dict(given))
    early.host.end_spins_early()
    assert os.environ == expected
