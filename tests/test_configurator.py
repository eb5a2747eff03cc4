"""Settings: what files and flags may contain, what is refused, and in which words."""

import dataclasses
import json
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
from conftest import ROOT

import train
from configurator import SYNONYMS, call_main, configure, print_error
from hotloop.weights.lora import LoRAConfig
from model import GPTConfig
from sample import SampleConfig

ALL = (GPTConfig, LoRAConfig, train.TrainConfig)


def conf(*argv, **kwargs):
    """Read a command line. Returns all settings as one dict, what was given, and the words."""
    (shape, run), places, words = configure(GPTConfig, train.TrainConfig, argv=list(argv), **kwargs)
    return vars(shape) | vars(run), places, words


def refusal(*argv):
    """Return the lines of the error that a command line gets."""
    with pytest.raises(ValueError) as e:
        conf(*argv)
    return str(e.value).split('\n')


@pytest.fixture
def card(tmp_path):
    """Write a config file. Returns its path."""
    def write(text, name='card.py'):
        (tmp_path / name).write_text(text, encoding='utf-8')
        return str(tmp_path / name)
    return write


# -----------------------------------------------------------------------------
# flags

@pytest.mark.parametrize('argv, name, value', [
    (['--n_layer=6'], 'n_layer', 6), (['--n-layer', '6'], 'n_layer', 6),
    (['--n_layer', '-6', '--n_layer=3'], 'n_layer', 3),  # the last flag wins
    (['--max_iters=1e3'], 'max_iters', 1000), (['--learning_rate=1'], 'learning_rate', 1.0),
    ([f'--max_iters={10**18 + 1}'], 'max_iters', 10**18 + 1),  # exact beyond what a float holds
    (['--eval-only', '--n_layer=6'], 'eval_only', True), (['--eval_only', 'true'], 'eval_only', True),
    (['--compile', 'False'], 'compile', False), (['--compile=True', '--compile', 'auto'], 'compile', 'auto'),
    (['--norm', 'rmsnorm'], 'norm', 'rmsnorm'), (['--n_ff=64', '--n_ff=none'], 'n_ff', None),
    (['--mirror_dir=None'], 'mirror_dir', None), (['--out_dir=None'], 'out_dir', 'None'),  # as annotated
    (['--mirror_dir=123'], 'mirror_dir', '123'), (['--wandb_project', ''], 'wandb_project', ''),
    (['--out_dir=a=b=c'], 'out_dir', 'a=b=c'), (['--out_dir=--n_layer'], 'out_dir', '--n_layer')])
def test_flags(argv, name, value):
    found, places, words = conf(*argv)
    assert found[name] == value and type(found[name]) is type(value)
    assert name in places and words == []


@pytest.mark.parametrize('flag, words', [
    *[(f'--n_layer={text}', 'an integer') for text in ('six', '6.5', '', 'True', '5*8', 'inf', 'None')],
    ('--learning_rate=nan', 'a number'), ('--n_ff=x', 'an integer or None'),
    ('--eval_only=1', 'True or False'),
    ('--position=alibi', 'learned or rope or None'), ('--compile=maybe', 'True or False or auto')])
def test_a_flag_of_the_wrong_type_names_what_was_expected(flag, words):
    key, _, text = flag.partition('=')
    assert refusal(flag) == [f'{key}: expected {words}, not {text!r}']


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    assert conf('--out_dir=~/a')[0]['out_dir'] == '/home/me/a'


def test_a_word_that_is_no_python_file_is_not_run(tmp_path):
    (tmp_path / 'book.txt').write_text('n_layer = 1')
    for word in (str(tmp_path / 'book.txt'), 'dataset=mine', str(tmp_path)):
        assert refusal(word) == [f'{word!r} is neither a config file (NAME.py) nor a setting (--name=value)']


def test_a_misspelled_flag_and_one_without_its_value():
    expected = ["--learing_rate: unknown setting 'learing_rate'; did you mean 'learning_rate'?"]
    assert refusal('--learing_rate=1e-3') == expected
    assert refusal('--learing_rate', '1e-3') == expected  # its value is not another mistake
    assert refusal('--config', 'a.py')== ['--config: give the config file without --config']
    assert refusal('--n-layer', '--eval_only') == ['--n-layer: expected an integer, not True']


@pytest.mark.parametrize('theirs', SYNONYMS)
def test_a_name_of_another_program_gets_ours(theirs):
    ours = SYNONYMS[theirs]
    fields = {field.name for cls in ALL for field in dataclasses.fields(cls)}
    classes = ALL if ours in fields else [SampleConfig]
    with pytest.raises(ValueError, match=f'unknown setting {theirs!r}; did you mean {ours!r}'):
        configure(*classes, argv=[f'--{theirs}=1'])


# -----------------------------------------------------------------------------
# files

@pytest.mark.filterwarnings('error')  # comparing NumPy's numbers may warn
def test_a_file_may_compute_import_and_define(card, monkeypatch, tmp_path):
    """As nanoGPT's files do: expressions over the current values, imports, helpers. Values become plain."""
    card('n_head = 6\n', 'hotloop_test_base.py')
    monkeypatch.syspath_prepend(tmp_path)
    path = card('''\
import time
from math import ceil
from hotloop_test_base import n_head
import numpy as np
wandb_run_name = np.str_('ft-' + str(time.time()))
try:
    import no_such_module
except ImportError as e:
    globals().update(beta1=0.5)
def big():
    global grad_clip
    grad_clip = 2.0
big()
min_lr = learning_rate / 10  # the default: this file sets it later
learning_rate = np.float32(0.5)
_half = 0.5 if __file__.endswith('.py') else 0
def double(n):
    dtype = 2
    return dtype * n
n_layer = double(ceil(3.1))
n_layer += 1
for _ in range(2):
    max_iters: int = 5
(n_ff := 1e3)
''')
    values, places, words = conf(path)
    expected = {'min_lr': 6e-4 / 10, 'learning_rate': 0.5, 'n_layer': 9, 'n_head': 6, 'max_iters': 5,
                'n_ff': 1000, 'beta1': 0.5, 'grad_clip': 2.0}
    assert {name: values[name] for name in expected} == expected
    assert values['wandb_run_name'].startswith('ft-1') and type(values['wandb_run_name']) is str
    assert set(places) == {*expected, 'wandb_run_name'} and words == [path]
    assert places['n_layer'] == f'{path}, line 21' and type(values['learning_rate']) is float


@pytest.mark.parametrize('text, problem', [
    # nanoGPT makes a new global of an unknown name and trains at the default
    ('n_layer = 3\n\n# x\nnlayer = 1\n', ", line 4: unknown setting 'nlayer'; did you mean 'n_layer'?"),
    ('\nif True:\n    nlayer = 2\n', ', line 3: unknown'),
    ("import numpy as np; n_layer = np.float32('inf')", ', line 1: n_layer: expected an integer, not '),
    ('learning_rate = 1e-3,', ', line 1: learning_rate: expected a number, not (0.001,)'),
    ('def compile():\n    pass\n', ', line 1: compile: expected '),
    ('n_layer = 1\nn_head = = 2\n', ': SyntaxError: invalid syntax (card.py, line 2)'),
    ('def f():\n    return 1 / 0\n\nn_head = f()\n', ', line 2: ZeroDivisionError: division by zero'),
    ("import json\njson.loads('{')\n", ', line 2: JSONDecodeError'),  # not the line of the library
    # valid Python, and training would start at the defaults
    ('n_layer: 8\n', ': "n_layer: VALUE" sets nothing; write n_layer = VALUE')])
def test_what_is_wrong_in_a_file_is_an_error_with_its_line(card, text, problem):
    path = card(text)
    assert refusal(path)[0].startswith(path + problem)


def test_a_home_folder_means_the_same_in_a_file_and_a_flag(card, monkeypatch):
    monkeypatch.setenv('HOME', '/home/ada')
    path = card("if __name__ == '__main__':\n    out_dir = '~/runs'\n")
    for word in (path, '--out_dir=~/runs'):
        assert conf(word)[0]['out_dir'] == '/home/ada/runs'


def test_flags_override_files_and_files_what_lies_below(card):
    first = card('n_layer = 1\nn_head = 1\nmax_iters = 1\ndtype = "auto"\n', 'a.py')
    second = card('\ufeffn_head = n_layer + 1\nmax_iters = n_ff\n', 'b.py')  # with a byte-order mark
    base = {'n_layer': 2, 'n_ff': 4, 'learning_rate': 1, 'gone': 1}
    values, places, words = conf('--max_iters=3', first, second, derived=base)
    assert (values['n_layer'], values['n_head'], values['max_iters'], values['n_ff']) == (1, 2, 3, 4)
    assert words == [first, second] and type(values['learning_rate']) is float
    assert places == {'n_layer': f'{first}, line 1', 'n_head': f'{second}, line 1',
                      'max_iters': '--max_iters', 'dtype': f'{first}, line 4'}  # also a default that is given


@pytest.mark.parametrize('below, by_file, by_flag, expected', [
    ({}, {'eval_iters': 20}, {'eval_tokens': 64}, dict(eval_iters=None, eval_tokens=64)),
    ({'eval_iters': 20}, {'eval_tokens': 64, 'eval_iters': 7}, {}, dict(eval_iters=7)),
    ({'max_epochs': 2.0}, {'max_iters': 12}, {}, dict(max_epochs=None, max_iters=12))])
def test_of_two_settings_for_one_thing_the_stronger_place_wins(card, below, by_file, by_flag, expected):
    """A flag over a file over a checkpoint; in one place the second replaces the first."""
    path = card(''.join(f'{name} = {value}\n' for name, value in by_file.items()))
    argv = [path, *(f'--{name}={value}' for name, value in by_flag.items())]
    found = configure(train.TrainConfig, argv=argv, derived=below, pairs=train.PAIRS)
    assert {name: getattr(found.objects[0], name) for name in expected} == expected


def test_all_problems_of_a_command_are_reported_together(card, monkeypatch):
    path = card("learing_rate = 1\nn_layer = 'x'\n")
    problems = refusal(path, 'missing.py', '--n_head=x', '--max_iters')
    starts = ('--n_head: expected', '--max_iters: expected', f'{path}, line 1: unknown setting',
              f'{path}, line 2: n_layer: expected', 'missing.py does not exist')
    assert all(map(str.startswith, sorted(problems), sorted(starts))) and len(problems) == len(starts)
    assert len(refusal('--n_layer=-1', '--max_iters=-1')) == 2  # of both classes
    word = 'config/train_shakespeare_char.py'  # nanoGPT's
    monkeypatch.chdir(ROOT)
    assert refusal(word) == [f"{word} does not exist; did you mean 'config/shakespeare_char.py'?"]


# -----------------------------------------------------------------------------
# the entry point of the scripts

@pytest.mark.parametrize('file, ours', [('hotloop/system/files.py', True), ('.venv/lib/x.py', False)])
def test_a_value_error_of_our_own_files_is_one_sentence(capsys, file, ours):
    """A .venv lies in the same folder."""
    namespace = {}
    code = "def fail():\n    raise ValueError('deep')\n"
    exec(compile(code, ROOT / file, 'exec'), namespace)
    with pytest.raises(SystemExit if ours else ValueError):
        call_main(namespace['fail'])
    assert capsys.readouterr().err == ('error: deep\n' if ours else '')


def test_ctrl_c_ends_with_the_status_130():
    with pytest.raises(SystemExit) as end:
        call_main(Mock(side_effect=KeyboardInterrupt))
    assert end.value.code == 130


def test_an_error_of_a_process_is_in_the_summary_of_torchrun(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', str(tmp_path / 'error.json'))
    for rank in (1, 0):
        monkeypatch.setenv('RANK', str(rank))
        print_error('error: 1')
        assert json.loads((tmp_path / 'error.json').read_text())['message']['message'] == 'error: 1'
        assert capsys.readouterr().err == 'error: 1\n' * (rank == 0)


def test_characters_that_a_terminal_lacks_do_not_end_a_command():
    script = 'import configurator; configurator.call_main(lambda: print("\u20ac 1"))'
    env = {**os.environ, 'PYTHONIOENCODING': 'latin-1'}
    printed = subprocess.check_output([sys.executable, '-c', script], cwd=ROOT, env=env)
    assert printed == b'\\u20ac 1\n'


def test_a_closed_pipe_ends_without_a_traceback():
    """All of the output is still in the buffer at the end."""
    script = 'import configurator; input(); configurator.call_main(lambda: print("x"))'
    with subprocess.Popen([sys.executable, '-c', script], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write(b'\n')
        process.stdin.close()
        assert process.stderr.read() == b'' and process.wait() == 141
