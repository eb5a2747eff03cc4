"""Settings: what files and flags may contain, what is refused, and in which words."""

import dataclasses
import enum
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import configurator
import sample
import train
from configurator import (
    SYNONYMS,
    SettingsError,
    accept,
    as_file,
    call_main,
    configure,
    differences,
)
from hotloop.weights.lora import LoRAConfig
from model import GPTConfig

REPO = os.path.dirname(os.path.abspath(configurator.__file__))


@dataclass
class Shape:
    # --- shape
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads
    n_ff: int | None = None  # channels inside; None: four times
    norm: Literal['layernorm', 'rmsnorm'] | None = None  # kind of norm

    def problems(self):
        return ['n_layer must not be negative'] if self.n_layer < 0 else []


@dataclass
class Loop:
    # --- run
    out_dir: str = 'out'  # where everything goes
    run_name: str | None = None  # its name
    eval_only: bool = False  # evaluate once
    # --- optimizer
    max_iters: int = 600000  # steps
    learning_rate: float = 6e-4  # peak
    min_lr: float = 6e-5  # floor
    # --- machine
    compile: bool | Literal['auto'] = 'auto'  # torch.compile
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of the computation

    def problems(self):
        return ['max_iters must not be negative'] if self.max_iters < 0 else []


def conf(*argv, **kwargs):
    """All settings of a command line as one dict, then what was given, then the words."""
    (shape, loop), given, words = configure(Shape, Loop, argv=list(argv), **kwargs)
    return vars(shape) | vars(loop), given, words


def refusal(*argv, **kwargs):
    """The lines of the error that a command line gets."""
    with pytest.raises(ValueError) as e:
        conf(*argv, **kwargs)
    return str(e.value).split('\n')


@pytest.fixture
def card(tmp_path):
    """Writes a config file and returns its path."""
    def write(text, name='card.py'):
        (tmp_path / name).write_text(text, encoding='utf-8')
        return str(tmp_path / name)
    return write


# -----------------------------------------------------------------------------
# flags

@pytest.mark.parametrize('argv, name, value', [
    (['--n_layer=6'], 'n_layer', 6), (['--n-layer', '6'], 'n_layer', 6),
    (['--n_layer', '-6', '--n_layer=3'], 'n_layer', 3),  # one dash is a negative number; the last flag wins
    (['--max_iters=1e3'], 'max_iters', 1000), (['--learning_rate=1'], 'learning_rate', 1.0),
    ([f'--max_iters={10**18 + 1}'], 'max_iters', 10**18 + 1),  # exact beyond what a float holds
    (['--eval-only', '--n_layer=6'], 'eval_only', True), (['--eval_only', 'true'], 'eval_only', True),
    (['--compile', 'False'], 'compile', False), (['--compile=True', '--compile', 'auto'], 'compile', 'auto'),
    (['--norm', 'rmsnorm'], 'norm', 'rmsnorm'), (['--n_ff=64', '--n_ff=none'], 'n_ff', None),
    (['--run_name=None'], 'run_name', None), (['--out_dir=None'], 'out_dir', 'None'),  # as annotated
    (['--run_name=123'], 'run_name', '123'), (['--out_dir', ''], 'out_dir', ''),
    (['--out_dir=a=b=c'], 'out_dir', 'a=b=c'), (['--out_dir=--n_layer'], 'out_dir', '--n_layer')])
def test_flags(argv, name, value):
    found, given, words = conf(*argv)
    assert found[name] == value and type(found[name]) is type(value)
    assert name in given and words == []


@pytest.mark.parametrize('flag, words', [
    *[(f'--n_layer={text}', 'an integer') for text in
      ('six', '6.5', '', 'True', '5*8', 'nan', 'inf', 'None', '9' * 400, '9' * 5000)],
    *[(f'--learning_rate={text}', 'a number') for text in ('nan', '-inf', 'False', '9' * 400)],
    ('--n_ff=x', 'an integer or None'), ('--eval_only=1', 'True or False'),
    ('--norm=batchnorm', 'layernorm or rmsnorm or None'), ('--compile=maybe', 'True or False or auto')])
def test_a_flag_of_the_wrong_type_names_what_was_expected(flag, words):
    key, _, text = flag.partition('=')
    assert refusal(flag) == [f'{key}: expected {words}, not {text!r}']


def test_a_misspelled_flag_names_the_nearest_setting():
    expected = ["--learing_rate: unknown setting 'learing_rate'; did you mean 'learning_rate'?"]
    assert refusal('--learing_rate=1e-3') == expected
    assert refusal('--learing_rate', '1e-3') == expected  # its value is not another mistake
    assert 'did you mean' not in refusal('--qqqqqqq=1')[0]
    assert len(refusal('--')) == len(refusal('--=3')) == 1
    assert refusal('--n-layer', '--eval_only') == ['--n-layer: a value is missing; write --n_layer=VALUE']


SCRIPTS = {'train': (GPTConfig, LoRAConfig, train.TrainConfig), 'sample': (sample.SampleConfig,)}


@pytest.mark.parametrize('script, flag, ours', [
    ('train', '--d_model=512', 'n_embd'),
    ('train', '--mixed-precision=bf16', 'dtype'), ('train', '--checkpoint_dir=a', 'out_dir'),
    ('train', '--epochs=3', 'max_epochs'), ('train', '--lr=1e-3', 'learning_rate'),
    ('train', '--max_steps=5', 'max_iters'), ('train', '--num_layers=2', 'n_layer'),
    ('sample', '--prompt=a', 'start'),
    ('sample', '--max_tokens=9', 'max_new_tokens')])
def test_a_name_of_another_program_gets_ours(script, flag, ours):
    with pytest.raises(SettingsError, match=f'unknown setting .*; did you mean {ours!r}'):
        configure(*SCRIPTS[script], argv=[flag])


def test_the_names_of_other_programs_are_not_ours():
    ours = {field.name for classes in SCRIPTS.values() for c in classes for field in dataclasses.fields(c)}
    assert set(SYNONYMS.values()) <= ours and not set(SYNONYMS) & ours


@pytest.mark.parametrize('value, kind, plain', [
    (np.float32(0.5), float, 0.5), (np.int64(3), int, 3), (np.str_('there'), str, 'there'),
    (enum.StrEnum('Kind', ['HALF']).HALF, Literal['half'], 'half'), (3, float, 3.0)])
def test_values_of_other_libraries_become_plain(value, kind, plain):
    """Checkpoints hold plain values only."""
    assert accept(value, kind) == plain and type(accept(value, kind)) is type(plain)


# -----------------------------------------------------------------------------
# files

def test_a_file_may_compute_import_and_define(card, monkeypatch, tmp_path):
    """As nanoGPT's files do: expressions over the current values, imports, helpers."""
    card('n_head = 7\n', 'hotloop_test_base.py')
    monkeypatch.syspath_prepend(tmp_path)
    path = card('''\
import time
from math import ceil
from hotloop_test_base import n_head
clock = time  # a module under any name
run_name = 'ft-' + str(time.time())
min_lr = learning_rate / 10  # the default: this file sets it later
learning_rate = 1
_half = 0.5
def double(n):
    inner = 2
    return inner * n
n_layer = double(ceil(3.1))
n_layer += 1
n_ff = 1e3
''')
    values, given, words = conf(path)
    expected = {'min_lr': 6e-4 / 10, 'learning_rate': 1.0, 'n_layer': 9, 'n_head': 7, 'n_ff': 1000}
    assert {name: values[name] for name in expected} == expected and values['run_name'].startswith('ft-1')
    assert set(given) == {*expected, 'run_name'} and words == [path]
    assert given['n_layer'] == f'{path}, line 13' and type(values['learning_rate']) is float


@pytest.mark.parametrize('text, problem', [
    # nanoGPT makes a new global of an unknown name and trains at the default
    ('n_layer = 3\n\n# x\nnlayer = 1\n', ", line 4: unknown setting 'nlayer'; did you mean 'n_layer'?"),
    ('\nif True:\n    nlayer = 2\n', ', line 3: unknown'), ('n_ff = (\n  x := 3)\n', ', line 2: unknown'),
    ('for n_layers in (1, 2):\n    pass\n', ', line 1: unknown'), ('a_b, n_ff = 1, 2\n', ', line 1: unknown'),
    ("\nn_layer = '3'", ", line 2: n_layer: expected an integer, not '3'"),
    ('n_layer = 10**5000', ', line 1: n_layer: '),  # more digits than Python prints
    ("import numpy as np; n_layer = np.float32('inf')", ', line 1: n_layer: expected an integer, not '),
    ('learning_rate = 1e-3,', ', line 1: learning_rate: expected a number, not (0.001,)'),
    ('learning_rate = 10**400', ', line 1: learning_rate: expected a number, not 1'),
    ('def compile():\n    pass\n', ', line 1: compile: expected '),
    ('n_layer = 1\nn_head = = 2\n', ': SyntaxError: invalid syntax (card.py, line 2)'),
    ('x\0y = 1\n', ': SyntaxError: source code string cannot contain null bytes'),
    ('def f():\n    return 1 / 0\n\nn_head = f()\n', ', line 2: ZeroDivisionError: division by zero'),
    ("import json\njson.loads('{')\n", ', line 2: JSONDecodeError'),  # not the line of the library
    ('\nexit(0)\n', ', line 2: SystemExit: 0')])
def test_what_is_wrong_in_a_file_is_an_error_with_its_line(card, text, problem):
    path = card(text)
    (line,) = refusal(path)
    assert line.startswith(path + problem)


@pytest.mark.parametrize('text, name', [
    ('n_layer: 8\n', 'n_layer'), ('n_lair: int\n', 'n_lair'), ("if True:\n    norm: 'rmsnorm'\n", 'norm')])
def test_an_annotation_that_sets_nothing_is_an_error_with_its_remedy(card, text, name):
    """`batch_size: 8` is valid Python, and training would start at the defaults."""
    path = card(text)
    assert refusal(path)[0] == f'{path}: "{name}: VALUE" sets nothing; write {name} = VALUE'


def test_every_form_of_assignment_counts_and_what_stands_in_functions_does_not(card):
    values, given, _ = conf(card('''\
"""A docstring."""
n_layer: int = 8
for _ in range(2):
    n_head = 5
(n_ff := 3)
n_ff += 1
def double(n):
    norm: int
    dtype = 5
    return 2 * n + n_layer
class Helper:
    max_iters: int
_unused = double(3)
'''))
    assert {name: place.rsplit(' ')[-1] for name, place in given.items()} == {
        'n_layer': '2', 'n_head': '4', 'n_ff': '6'}
    assert (values['n_layer'], values['n_head'], values['n_ff']) == (8, 5, 4)


@pytest.mark.parametrize('word, hint', [
    ('quickstart', 'config/quickstart.py'), ('config/quickstart', 'config/quickstart.py'),
    ('config/quikstart.py', 'config/quickstart.py'),
    ('train_shakespeare_char.py', 'config/shakespeare_char.py'),  # nanoGPT's
    ('config/train_gpt2.py', 'config/gpt2_124m.py'),
    ('n_layer=8', '--n_layer=8'), ('-n_layer=8', '--n_layer=8'), ('n-layer=8', '--n_layer=8'),
    ('n_layr=8', '--n_layer=8'), ('-eval_only', '--eval_only'), ('n_layer', '--n_layer')])
def test_a_word_that_is_no_file_gets_a_suggestion(monkeypatch, word, hint):
    """The nearest card beside the scripts, or the flag without its dashes."""
    monkeypatch.chdir(REPO)
    assert refusal(word) == [f'{word}: No such file or directory; did you mean {hint}?']


def test_a_card_in_another_folder_is_suggested_before_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    card = tmp_path / 'train_shakespeare_char.py'
    card.write_text('')
    word = str(card).replace('char', 'cher')
    assert refusal(word) == [f'{word}: No such file or directory; did you mean {os.path.relpath(card)}?']


def test_a_folder_is_not_a_config_file_and_a_config_file_needs_no_flag(tmp_path):
    assert refusal(str(tmp_path)) == [
        f'{tmp_path}: Is a directory; a run folder is given as --out_dir={tmp_path}']
    assert refusal('--config=card.py') == [
        "--config: unknown setting 'config'; a config file is given without a flag, as in: train.py FILE.py"]


def test_a_word_like_nothing_gets_no_suggestion(card):
    assert refusal('qqqqqqq') == ['qqqqqqq: No such file or directory; settings are given as --NAME=VALUE']
    path = card("open('quickstart')\n")  # a file that a card misses is not a card
    assert refusal(path)[0].endswith('No such file or directory')


def test_the_encoding_of_a_file(card, tmp_path):
    (tmp_path / 'latin.py').write_bytes(b"out_dir = 'caf\xe9'\n")
    assert 'decode byte 0xe9' in refusal(str(tmp_path / 'latin.py'))[0]
    assert conf(card('\ufeffn_layer = 3\n'))[0]['n_layer'] == 3  # editors on Windows write this mark


def test_later_files_win_over_earlier_and_flags_over_files_and_a_checkpoint_lies_below(card):
    first = card('n_layer = 1\nn_head = 1\nmax_iters = 1\ndtype = "auto"\n', 'a.py')
    second = card('n_head = n_layer + 1\nmax_iters = n_ff\n', 'b.py')
    base = {'n_layer': 2, 'n_ff': 4, 'learning_rate': 1}
    values, given, words = conf('--max_iters=3', first, second, below=base)
    assert (values['n_layer'], values['n_head'], values['max_iters'], values['n_ff']) == (1, 2, 3, 4)
    assert words == [first, second] and type(values['learning_rate']) is float
    assert given == {'n_layer': f'{first}, line 1', 'n_head': f'{second}, line 1', 'max_iters': '--max_iters',
                     'dtype': f'{first}, line 4'}  # a default that is given counts as given


@pytest.mark.parametrize('by_checkpoint, by_file, by_flag, expected', [
    ({}, {'eval_iters': 20}, {'eval_tokens': 64}, dict(eval_iters=None, eval_tokens=64)),
    ({'eval_iters': 20}, {'eval_tokens': 64}, {}, dict(eval_iters=None, eval_tokens=64)),
    ({'eval_iters': 20}, {'eval_tokens': None}, {}, dict(eval_iters=None, eval_tokens=None)),
    ({'eval_iters': 20}, {'eval_tokens': 64, 'eval_iters': 7}, {}, dict(eval_iters=7)),
    ({}, {'eval_tokens': 64}, {'eval_iters': 7}, dict(eval_iters=7)),
    ({'eval_iters': 20}, {}, {}, dict(eval_iters=20)),
    ({'max_epochs': 2.0}, {'max_iters': 12}, {}, dict(max_epochs=None, max_iters=12)),
    ({'max_iters': 12}, {}, {'max_epochs': 2.0}, dict(max_epochs=2.0))])
def test_of_two_settings_for_one_thing_the_stronger_place_wins(tmp_path, by_checkpoint, by_file, by_flag,
                                                               expected):
    """A flag over a file over a checkpoint; in one place the second replaces the first, as documented."""
    path = tmp_path / 'card.py'
    path.write_text(''.join(f'{name} = {value}\n' for name, value in by_file.items()))
    argv = [str(path), *(f'--{name}={value}' for name, value in by_flag.items())]
    found = configure(train.TrainConfig, argv=argv, below=by_checkpoint, pairs=train.PAIRS)
    assert {name: getattr(found.objects[0], name) for name in expected} == expected


def test_all_problems_of_a_command_are_reported_together(card):
    path = card("learing_rate = 1\nn_layer = 'x'\n")
    problems = refusal(path, 'missing.py', '--n_head=x', '--max_iters')
    starts = ('--n_head: expected', '--max_iters: a value is missing', f'{path}, line 1: unknown setting',
              f'{path}, line 2: n_layer: expected', 'missing.py: No such file')
    for problem, start in zip(sorted(problems), sorted(starts), strict=True):
        assert problem.startswith(start)
    assert len(refusal('--n_layer=-1', '--max_iters=-1')) == 2  # of both classes


def test_words_are_returned_but_not_run_with_files_false(card):
    path = card("raise SystemExit('this file must not run')\n")
    values, given, words = conf(path, '--n_layer', '3', 'a folder/', '-x', files=False)
    assert words == [path, 'a folder/', '-x'] and values['n_layer'] == 3 and set(given) == {'n_layer'}


# -----------------------------------------------------------------------------
# settings of a checkpoint, and of older versions

def test_a_value_of_a_checkpoint_that_no_longer_fits_names_the_flag():
    base = {'dtype': 'float8', 'n_layer': -1}
    assert refusal(below=base) == ["the checkpoint has dtype='float8': expected auto or float32 or bfloat16, "
                                  "not 'float8'; give --dtype"]
    assert conf('--dtype=float32', '--n_layer=2', below=base)[0]['dtype'] == 'float32'
    assert refusal('--dtype=float32', below=base) == ['n_layer must not be negative']


def test_settings_that_are_gone_are_errors_for_users_and_dropped_from_old_runs(card, capsys, monkeypatch):
    assert refusal('--profile', 'True')[0].startswith("--profile: unknown setting 'profile'")
    own = card(as_file({'n_layer': 3}) + 'profile = False\n', 'config.py')
    values, given, _ = conf(own)
    assert values['n_layer'] == 3 and 'profile' not in given
    assert conf(below={'n_layer': 4, 'profile': 1})[0]['n_layer'] == 4
    monkeypatch.setenv('RANK', '1')
    conf(below={'profile': 1})
    dropped = 'dropped settings that this version does not have: profile'
    assert capsys.readouterr().out.splitlines() == [f'{own}: {dropped}', f'the checkpoint: {dropped}']


# -----------------------------------------------------------------------------
# settings as text; test_cards.py reads the complete --help of every program

def test_help_comes_before_any_complaint_and_lists_choices(capsys):
    with pytest.raises(SystemExit) as e:
        conf('--n_layer=x', '--help', about='Trains things.\n')
    lines = capsys.readouterr().out.splitlines()
    assert not e.value.code and lines[0] == 'Trains things.'
    assert f'  {"--n_layer=12":<36}  number of blocks' in lines
    assert f'  {"--norm=None":<36}  kind of norm [layernorm, rmsnorm]' in lines


def test_differences_name_value_and_place(card):
    path = card('n_layer = 3\nn_head = 12\n')
    (shape, loop), given, _ = configure(Shape, Loop, argv=[path, '--out_dir=x'])
    loop.max_iters = 5
    assert differences([shape, loop], given).splitlines() == [
        f'  n_layer = 3  ({path}, line 1)', "  out_dir = 'x'  (--out_dir)", '  max_iters = 5  (derived)']


# with lone surrogates, which text() leaves out
awkward = (st.lists(st.characters() | st.integers(0xd800, 0xdfff).map(chr), max_size=20).map(''.join)
           | st.sampled_from(['', "it's", '"', '\\', '\n', 'é€😀', '#']))


@settings(max_examples=40, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n_layer=st.integers(0, 10**30), rate=st.floats(allow_nan=False, allow_infinity=False), out=awkward,
       name=awkward | st.none(), compile=st.sampled_from([True, False, 'auto']))
def test_as_file_read_back_gives_the_same_settings(tmp_path, n_layer, rate, out, name, compile):
    objects = [Shape(n_layer=n_layer), Loop(learning_rate=rate, out_dir=out, run_name=name, compile=compile)]
    path = tmp_path / 'config.py'
    path.write_text(as_file({**vars(objects[0]), **vars(objects[1])}), encoding='utf-8')
    (shape, loop), given, _ = configure(Shape, Loop, argv=[str(path)])
    assert repr([shape, loop]) == repr(objects)  # types and -0.0 too
    assert len(given) == len(dataclasses.fields(Shape)) + len(dataclasses.fields(Loop))


# -----------------------------------------------------------------------------
# the entry point of the scripts

def run(main, capsys):
    """(exit status, stdout, stderr) of a main."""
    with pytest.raises(SystemExit) as end:
        call_main(main)
    return end.value.code, *capsys.readouterr()


def test_a_value_error_of_our_own_is_one_sentence(capsys):
    assert run(lambda: 143, capsys) == (143, '', '')
    assert run(lambda: configure(Shape, argv=['--n_layr=3']), capsys) == (
        1, '', "error: --n_layr: unknown setting 'n_layr'; did you mean 'n_layer'?\n")


@pytest.mark.parametrize('file, ours', [('train.py', True), ('hotloop/system/files.py', True),
                                        ('.venv/lib/x.py', False), ('tests/test_x.py', False)])
def test_exactly_two_folders_are_ours(capsys, file, ours):
    """A .venv lies in the same folder."""
    namespace = {}
    code = "def fail():\n    raise ValueError('deep')\n"
    exec(compile(code, os.path.join(REPO, file), 'exec'), namespace)
    with pytest.raises(SystemExit if ours else ValueError):
        call_main(namespace['fail'])
    assert capsys.readouterr().err == ('error: deep\n' if ours else '')


def test_one_process_prints_an_error_in_the_settings(capsys, monkeypatch):
    """The others wait for it, because torchrun kills all once one has ended. Other errors are of a rank."""
    waits = []
    monkeypatch.setattr('time.sleep', waits.append)
    for rank in '012':
        monkeypatch.setenv('RANK', rank)
        monkeypatch.setenv('LOCAL_RANK', rank)
        code, out, err = run(lambda: configure(Shape, argv=['--n_head=x']), capsys)
        assert (code, out) == (1, '')
        assert err == ('error: --n_head: expected an integer, not \'x\'\n' if rank == '0' else '')
    assert len(waits) == 2 and issubclass(SettingsError, ValueError)
    assert run(lambda: accept('x', int), capsys)[2] == "error: expected an integer, not 'x'\n"


@pytest.mark.parametrize('stdout', [None, io.StringIO()])
def test_stdout_may_be_closed_or_a_notebooks(monkeypatch, stdout):
    monkeypatch.setattr(sys, 'stdout', stdout)
    assert call_main(lambda: None) is None


def test_a_main_without_a_status_returns(capsys):
    """check_early() comes before the rest of a script."""
    assert call_main(print, 'checked') is None and capsys.readouterr().out == 'checked\n'


def test_an_interrupt_ends_without_a_traceback(capsys):
    def interrupted():
        raise KeyboardInterrupt
    assert run(interrupted, capsys) == (130, '', '\n')


@pytest.mark.parametrize('main', [
    '[print("x" * 99) for _ in range(99999)]', 'print("x")', 'configurator.configure(argv=["--help"])'])
def test_a_closed_pipe_ends_without_a_traceback(main):
    """Also if all of the output is still in the buffer at the end."""
    script = f'import configurator; input(); configurator.call_main(lambda: {main})'
    with subprocess.Popen([sys.executable, '-c', script], cwd=REPO, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write(b'\n')
        process.stdin.close()
        assert process.stderr.read() == b'' and process.wait() == 141
