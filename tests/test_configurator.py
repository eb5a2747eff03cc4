"""Settings: what files and flags may say, what is refused and in which words."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import typing
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import configurator
from configurator import SettingsError, accept, as_file, call_main, configure, differences, parse

REPO = os.path.dirname(os.path.abspath(configurator.__file__))


@dataclass
class Shape:
    # --- shape
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads
    n_ff: int | None = None  # channels inside; None: four times
    dropout: float = 0.0  # share of zeros
    norm: Literal['layernorm', 'rmsnorm'] | None = None  # kind of norm


@dataclass
class Loop:
    # --- run
    out_dir: str = 'out'  # where everything goes
    run_name: str | None = None  # its name
    eval_only: bool = False  # evaluate once
    # --- optimizer
    max_iters: int = 600000  # steps
    lr_decay_iters: int | None = None  # end of the decay
    learning_rate: float = 6e-4  # peak
    min_lr: float = 6e-5  # floor
    grad_clip: float | None = 1.0  # None: off
    batch_size: int = 12  # sequences
    gradient_accumulation_steps: int = 40  # micro-batches
    # --- machine
    compile: bool | Literal['auto'] = 'auto'  # torch.compile
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of the computation
    tf32: bool | None = None  # None: the machine's choice

    def problems(self):
        return [f'{n}={getattr(self, n)} must not be negative' for n in ('max_iters', 'batch_size')
                if getattr(self, n) < 0]


def conf(*argv, **kwargs):
    """Both objects as one namespace, then given, then the words."""
    shape, loop, given, words = configure(Shape, Loop, argv=list(argv), **kwargs)
    return {**vars(shape), **vars(loop)}, given, words


def setting(*argv):
    """The values that a command line changes."""
    defaults, _, _ = conf()
    return {k: v for k, v in conf(*argv)[0].items() if v != defaults[k] or type(v) is not type(defaults[k])}


def refusal(*argv):
    """The lines of the error that a command line gets."""
    with pytest.raises(SettingsError) as e:
        conf(*argv)
    return str(e.value).split('\n')


@pytest.fixture
def card(tmp_path):
    """Writes a config file and returns its path."""
    def write(text, name='card.py'):
        path = tmp_path / name
        path.write_text(text, encoding='utf-8')
        return str(path)
    return write


# -----------------------------------------------------------------------------
# flags

@pytest.mark.parametrize('argv, expected', [
    (['--n_layer=6'], {'n_layer': 6}),
    (['--n_layer', '6'], {'n_layer': 6}),
    (['--n-layer=6'], {'n_layer': 6}),
    (['--n-layer', '6'], {'n_layer': 6}),
    (['--lr-decay_iters=7'], {'lr_decay_iters': 7}),
    (['--n_layer=-6'], {'n_layer': -6}),
    (['--n_layer', '-6'], {'n_layer': -6}),  # one dash is a negative number, not a flag
    (['--max_iters=1e3'], {'max_iters': 1000}),
    (['--max_iters=2.0'], {'max_iters': 2}),
    (['--learning_rate=1'], {'learning_rate': 1.0}),
    (['--learning_rate=1e-3'], {'learning_rate': 1e-3}),
    (['--eval_only'], {'eval_only': True}),
    (['--eval-only'], {'eval_only': True}),
    (['--eval_only=true'], {'eval_only': True}),
    (['--eval_only', 'True'], {'eval_only': True}),
    (['--eval_only=True', '--eval_only', 'false'], {}),
    (['--eval_only', '--n_layer=6'], {'eval_only': True, 'n_layer': 6}),
    (['--compile'], {'compile': True}),
    (['--compile', 'False'], {'compile': False}),
    (['--compile=True', '--compile', 'auto'], {}),
    (['--tf32', 'none', '--compile=False'], {'compile': False}),
    (['--dtype=float32'], {'dtype': 'float32'}),
    (['--norm', 'rmsnorm'], {'norm': 'rmsnorm'}),
    (['--norm=None'], {}),
    (['--grad_clip=None'], {'grad_clip': None}),
    (['--grad_clip=none'], {'grad_clip': None}),
    (['--n_ff=64', '--n_ff=None'], {}),
    (['--out_dir=a=b=c'], {'out_dir': 'a=b=c'}),
    (['--out_dir', 'a=b'], {'out_dir': 'a=b'}),
    (['--out_dir='], {'out_dir': ''}),
    (['--out_dir', ''], {'out_dir': ''}),
    (['--out_dir=--n_layer'], {'out_dir': '--n_layer'}),
    (['--out_dir=two words\nand lines'], {'out_dir': 'two words\nand lines'}),
    (['--n_layer=1', '--n_layer=2', '--n_layer=3'], {'n_layer': 3}),  # the last one wins
    ([f'--max_iters={10**18 + 1}'], {'max_iters': 10**18 + 1}),  # exact beyond what a float holds
])
def test_flags_that_are_understood(argv, expected):
    assert setting(*argv) == expected
    got, _, _ = conf(*argv)
    for name, value in expected.items():
        assert type(got[name]) is type(value), f'{name} is a {type(got[name])}'


@pytest.mark.parametrize('text', ['123', '1e3', 'True', 'None', '__import__("os").getcwd()', '[1, 2]', "'quoted'",
                                  '1/0', ' padded ', 'nan'])
def test_text_is_never_evaluated(text):
    assert conf(f'--out_dir={text}')[0]['out_dir'] == text
    assert conf('--out_dir', text)[0]['out_dir'] == text


def test_none_is_a_value_only_where_the_annotation_allows_it():
    assert conf('--run_name=None')[0]['run_name'] is None
    assert conf('--run_name=123')[0]['run_name'] == '123'
    assert conf('--out_dir=None')[0]['out_dir'] == 'None'
    assert refusal('--n_layer=None') == ["--n_layer: expected a whole number, not 'None'"]
    assert refusal('--eval_only=None') == ["--eval_only: expected True or False, not 'None'"]


@pytest.mark.parametrize('flag, words', [
    ('--n_layer=six', 'a whole number'),
    ('--n_layer=6.5', 'a whole number'),
    ('--n_layer=', 'a whole number'),
    ('--n_layer=True', 'a whole number'),
    ('--n_layer=5*8', 'a whole number'),  # an expression belongs in a file
    ('--n_layer=nan', 'a whole number'),
    ('--n_layer=inf', 'a whole number'),
    ('--n_layer=1e400', 'a whole number'),
    ('--n_layer=' + '9' * 400, 'a whole number'),
    ('--n_layer=' + '9' * 5000, 'a whole number'),  # more digits than Python turns into an int
    ('--learning_rate=nan', 'a number'),
    ('--learning_rate=-inf', 'a number'),
    ('--learning_rate=Infinity', 'a number'),
    ('--learning_rate=1e999', 'a number'),
    ('--learning_rate=' + '9' * 400, 'a number'),
    ('--learning_rate=False', 'a number'),
    ('--grad_clip=off', 'a number or None'),
    ('--n_ff=x', 'a whole number or None'),
    ('--eval_only=1', 'True or False'),
    ('--eval_only=yes', 'True or False'),
    ('--dtype=float16', 'auto, float32 or bfloat16'),
    ('--norm=batchnorm', 'layernorm, rmsnorm or None'),
    ('--compile=maybe', 'True or False or auto'),
])
def test_a_flag_of_the_wrong_type_is_refused_with_what_was_expected(flag, words):
    key, _, text = flag.partition('=')
    (line,) = refusal(flag)
    assert line.startswith(f'{key}: expected ') and line.endswith(f', not {text!r}')
    said = line.removeprefix(f'{key}: expected ').removesuffix(f', not {text!r}')
    assert re.split(', | or ', said) == re.split(', | or ', words)


def test_a_misspelt_flag_names_itself_and_the_nearest_setting():
    assert refusal('--learing_rate=1e-3') == ["--learing_rate: unknown setting 'learing_rate'; did you mean "
                                              "'learning_rate'?"]
    assert refusal('--learing_rate', '1e-3') == refusal('--learing_rate=1e-3')  # its value is not another mistake
    assert 'did you mean' not in refusal('--qqqqqqq=1')[0]
    assert "'batch_size'" in refusal('--batchsize=3')[0]
    assert len(refusal('--')) == len(refusal('--=3')) == 1


@pytest.mark.parametrize('argv', [['--n_layer'], ['--n_layer', '--eval_only'], ['--out-dir', '--eval_only']])
def test_a_flag_without_its_value_says_so(argv):
    (line,) = refusal(*argv)
    assert line.startswith(f'{argv[0]}: a value is missing') and '=VALUE' in line


def test_a_bare_flag_leaves_the_config_file_after_it_alone(card):
    path = card('n_layer = 3\n')
    values, _, words = conf('--eval_only', path)
    assert values['eval_only'] is True and values['n_layer'] == 3 and words == [path]
    values, _, words = conf('--compile', path)
    assert values['compile'] is True and values['n_layer'] == 3 and words == [path]


# -----------------------------------------------------------------------------
# files

def test_nanogpts_own_files_work_unchanged(card):
    """Imports, computed values, helpers and names of other settings, as in nanoGPT's config/*.py."""
    path = card('''\
# finetune
import time
import os.path as p
from math import ceil, pi

out_dir = 'out-' + p.join('a', 'b')
wandb = None if False else time  # a module under any name
run_name = 'ft-' + str(time.time())
gradient_accumulation_steps = 5 * 8 * 2
max_iters = 5000
lr_decay_iters = max_iters
min_lr = learning_rate / 10  # the default of a setting that this file does not set
learning_rate = 1e-3
_half = 0.5
dropout = _half / 2
def double(x):
    inner = 2
    return inner * x
class Helper:
    attribute = 3
n_layer = double(ceil(pi)) + Helper.attribute
batch_size = sum(i for i in range(4))
n_head: int = 4
n_head += 4
''')
    values, given, words = conf(path)
    assert values['run_name'].startswith('ft-1') and words == [path]
    expected = {'out_dir': os.path.join('out-a', 'b'), 'gradient_accumulation_steps': 80, 'max_iters': 5000,
                'lr_decay_iters': 5000, 'min_lr': 6e-4 / 10, 'learning_rate': 1e-3, 'dropout': 0.25, 'n_layer': 11,
                'batch_size': 6, 'n_head': 8}
    assert {k: values[k] for k in expected} == expected
    assert set(given) == {*expected, 'run_name'}


def test_nanogpts_shakespeare_card_fits_the_real_settings(card):
    """nanoGPT's config/train_shakespeare_char.py and finetune_shakespeare.py, its names and its spelling of values."""
    from model import GPTConfig
    from train import TrainConfig
    char = card('''\
# train a miniature character-level shakespeare model
out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent because we'll overfit
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
''')
    tune = card('''\
import time
wandb_run_name = 'ft-' + str(time.time())
init_from = 'gpt2-xl'
device = 'cpu'
dtype = 'bfloat16'
compile = False
backend = 'nccl'
decay_lr = False
weight_decay = 1e-1
grad_clip = 1
eval_only = True
bias = True
''', 'tune.py')
    model_cfg, cfg, given, _ = configure(GPTConfig, TrainConfig, argv=[char, tune])
    assert (model_cfg.n_layer, model_cfg.block_size, model_cfg.dropout, model_cfg.bias) == (6, 256, 0.2, True)
    assert (cfg.max_iters, cfg.eval_iters, cfg.compile, cfg.init_from) == (5000, 200, False, 'gpt2-xl')
    assert cfg.grad_clip == 1.0 and isinstance(cfg.grad_clip, float)
    assert len(given) == 22 + 11 - 1  # wandb_run_name is in both
    assert given['wandb_run_name'] == f'{tune}, line 2'


def test_a_misspelt_name_in_a_file_is_an_error_with_file_line_and_nearest_name(card):
    """nanoGPT's exec makes `learing_rate = 1e-3` a new global and trains at the default."""
    path = card('n_layer = 3\n\n# a comment\nlearing_rate = 1e-3\n')
    assert refusal(path)[0].startswith(f"{path}, line 4: unknown setting 'learing_rate'; did you mean 'learning_rate'?")
    assert len(refusal(path)) == 1


@pytest.mark.parametrize('text, line', [
    ('\nif True:\n    nlayer = 2\n', 3),
    ('for n_layers in range(2):\n    pass\n', 1),
    ('a_b, n_layer = 1, 2\n', 1),
    ('n_layer = 1\n\nlearnin_rate: float = 2.0\n', 3),
    ('n_layer = (\n  other := 3)\n', 2),
])
def test_an_unknown_name_is_found_wherever_a_file_binds_it(card, text, line):
    path = card(text)
    (problem,) = refusal(path)
    assert problem.startswith(f'{path}, line {line}: unknown setting')


@pytest.mark.parametrize('text, words', [
    ("n_layer = '3'", "n_layer: expected a whole number, not '3'"),
    ('n_layer = 3.5', 'n_layer: expected a whole number, not 3.5'),
    ('n_layer = True', 'n_layer: expected a whole number, not True'),
    ('n_layer = None', 'n_layer: expected a whole number, not None'),
    ("n_layer = float('inf')", 'n_layer: expected a whole number, not inf'),
    ("import numpy as np; n_layer = np.float32('inf')", 'n_layer: expected a whole number, not '),
    ("import numpy as np; learning_rate = np.float16('inf')", 'learning_rate: expected a number, not '),
    ("learning_rate = float('nan')", 'learning_rate: expected a number, not nan'),
    ("learning_rate = '1e-3'", "learning_rate: expected a number, not '1e-3'"),
    ('learning_rate = False', 'learning_rate: expected a number, not False'),
    ('learning_rate = 1j', 'learning_rate: expected a number, not 1j'),
    ('learning_rate = 1e-3,', 'learning_rate: expected a number, not (0.001,)'),  # a comma too many
    ('learning_rate = 10**400', 'learning_rate: expected a number, not 1'),
    ('out_dir = 3', 'out_dir: expected text, not 3'),
    ('out_dir = None', 'out_dir: expected text, not None'),
    ("out_dir = b'out'", "out_dir: expected text, not b'out'"),
    ('run_name = 3', 'run_name: expected text or None, not 3'),
    ('eval_only = 1', 'eval_only: expected True or False, not 1'),
    ("eval_only = 'True'", "eval_only: expected True or False, not 'True'"),
    ("dtype = 'float16'", "dtype: expected auto, float32 or bfloat16, not 'float16'"),
    ('dtype = None', 'dtype: expected auto, float32 or bfloat16, not None'),
])
def test_a_wrong_type_in_a_file_is_refused_with_its_line(card, text, words):
    path = card(f'# one line above\n{text}\n')
    (line,) = refusal(path)
    assert line.startswith(f'{path}, line 2: {words}')


@pytest.mark.filterwarnings('error')
def test_values_of_other_libraries_become_plain(card):
    """As they are they would stand in checkpoints, which hold plain values only."""
    path = card("import enum; import numpy as np; from math import *\n"
                "class Kind(enum.StrEnum):\n    HALF = 'bfloat16'\n    def __str__(self):\n        return 'half'\n"
                "dtype, out_dir = Kind.HALF, np.str_('there')\nlearning_rate, n_layer = np.float32(0.5), np.int64(3)\n")
    values, *_ = conf(path)
    found = tuple(values[name] for name in ('dtype', 'out_dir', 'learning_rate', 'n_layer'))
    assert found == ('bfloat16', 'there', 0.5, 3) and [type(value) for value in found] == [str, str, float, int]


def test_an_enormous_number_in_a_file_is_an_error_and_no_traceback(card):
    """10**5000 has more digits than Python prints."""
    (line,) = refusal(card('n_layer = 10**5000\n'))
    assert 'line 1: n_layer' in line


def test_numbers_in_a_file_take_the_annotations_type(card):
    values, _, _ = conf(card('max_iters = 1e5\nlearning_rate = 1\ngrad_clip = None\nn_ff = 2**10\ncompile = True\n'))
    assert values['max_iters'] == 100000 and type(values['max_iters']) is int
    assert values['learning_rate'] == 1.0 and type(values['learning_rate']) is float
    assert values['grad_clip'] is None and values['n_ff'] == 1024 and values['compile'] is True


def test_later_wins_file_then_file_then_flag_wherever_the_flag_stands(card):
    first = card('n_layer = 1\nn_head = 1\nmax_iters = 1\n', 'a.py')
    second = card('n_head = n_layer + 1\nmax_iters = 2\n', 'b.py')
    values, given, words = conf('--max_iters=3', first, second)
    assert (values['n_layer'], values['n_head'], values['max_iters']) == (1, 2, 3)
    assert words == [first, second]
    assert given == {'n_layer': f'{first}, line 1', 'n_head': f'{second}, line 1', 'max_iters': '--max_iters'}
    assert given.below['max_iters'] == 2 and given.below['n_head'] == 1 and given.below['n_layer'] == 12
    assert conf(second, first)[0]['n_head'] == 1


def test_given_holds_what_was_said_even_where_it_is_the_default(card):
    """A resumed run tells an explicit default from an absent one."""
    path = card('n_layer = 12\n')
    assert conf(path, '--dtype=auto')[1] == {'n_layer': f'{path}, line 1', 'dtype': '--dtype'}
    assert conf()[1] == {}


def test_a_function_under_a_settings_name_is_no_value(card):
    path = card('def compile():\n    pass\n')
    (line,) = refusal(path)
    assert line.startswith(f'{path}: compile: expected ')


def test_what_a_file_imports_from_another_may_set_settings_and_helpers(card, tmp_path, monkeypatch):
    card('n_layer = 5\nwidth = 8\n', 'hotloop_test_base.py')
    monkeypatch.syspath_prepend(tmp_path)
    path = card('from hotloop_test_base import n_layer, width\nn_head = width\n')
    values, given, _ = conf(path)
    assert (values['n_layer'], values['n_head']) == (5, 8) and set(given) == {'n_layer', 'n_head'}


def test_every_problem_of_a_command_is_reported_at_once(card):
    first = card("learing_rate = 1\nn_layer = 'x'\n", 'a.py')
    broken = card('n_layer = 1\nn_head = = 2\n', 'b.py')
    raising = card('n_layer = 1\nn_head = 1 // 0\n', 'c.py')
    lines = refusal(first, broken, raising, 'missing.py', '--n_head=x', '--bach_size=3', '--max_iters')
    parts = ['--n_head: expected', "--bach_size: unknown setting 'bach_size'; did you mean 'batch_size'?",
             '--max_iters: a value is missing', f"{first}, line 1: unknown setting 'learing_rate'",
             f'{first}, line 2: n_layer: expected', f'{broken}, line 2: ', f'{raising}, line 2: ZeroDivisionError',
             'missing.py: No such file']
    assert len(lines) == len(parts)
    for part in parts:
        assert sum(part in line for line in lines) == 1, part


def test_problems_that_need_the_whole_object_are_collected_too():
    assert refusal('--max_iters=-1', '--batch_size=-2') == ['max_iters=-1 must not be negative',
                                                            'batch_size=-2 must not be negative']


@pytest.mark.parametrize('text, line, words', [
    ('n_layer = 1\nn_head = = 2\n', 2, 'invalid syntax'),
    ('n_layer = 1\n  n_head = 2\n', 2, 'unexpected indent'),
    ('n_layer = (1\n', 1, 'never closed'),
    ('n_layer = 1\n\nn_head = undefined_name\n', 3, "NameError: name 'undefined_name' is not defined"),
    ('def f():\n    return 1 / 0\n\nn_head = f()\n', 2, 'ZeroDivisionError: division by zero'),  # where it happens
    ("n_layer = 1\nimport json\njson.loads('{')\n", 3, 'JSONDecodeError'),  # the file's line, not the library's
    ('import no_such_module_of_ours\n', 1, 'ModuleNotFoundError'),
    ("raise ValueError('mine')\n", 1, 'ValueError: mine'), ('\nexit(0)\n', 2, 'SystemExit: 0'),
    ('n_layer = 1\n\nreturn\n', 3, "'return' outside function"),  # Python finds this one only when it compiles
    ('x\0y = 1\n', 1, 'null bytes'),
])
def test_a_file_that_cannot_run_gives_its_name_and_line(card, text, line, words):
    path = card(text)
    (problem,) = refusal(path)
    assert problem.startswith(f'{path}, line {line}: ') and words in problem


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    latin = tmp_path / 'latin.py'
    latin.write_bytes(b"out_dir = 'caf\xe9'\n")
    assert 'decode byte 0xe9' in refusal(str(latin))[0] and refusal(str(latin))[0].startswith(str(latin))
    assert refusal(str(tmp_path)) == [f'{tmp_path}: Is a directory']
    assert refusal('nowhere.py') == ['nowhere.py: No such file or directory']
    assert len(refusal('a\0b.py')) == 1


def test_a_deeply_nested_expression_is_no_traceback(card):
    """600 terms are a left-leaning tree of depth 600, deeper than a recursive visitor may go."""
    path = card('n_layer = ' + '+'.join(['1'] * 600) + '\n')
    try:
        assert conf(path)[0]['n_layer'] == 600
    except SettingsError as e:
        assert str(e).startswith(path)


def test_the_callers_defaults_are_not_touched_by_a_run(card):
    conf(card('n_layer = 3\nout_dir = "x"\n'), '--n_head=2')
    assert conf()[0]['n_layer'] == 12 and Shape.n_layer == 12 and conf()[0]['out_dir'] == 'out'


def test_words_pass_through_unread_with_files_false(card):
    values, given, words = conf('book.txt', '--n_layer', '3', 'a folder/', '-x', files=False)
    assert words == ['book.txt', 'a folder/', '-x'] and values['n_layer'] == 3 and set(given) == {'n_layer'}
    path = card("raise SystemExit('this file must not run')\n")
    assert conf(path, files=False)[2] == [path]


def test_argv_defaults_to_the_programs_own(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['train.py', '--n_layer=3'])
    assert configure(Shape)[0].n_layer == 3


def test_two_classes_may_not_share_a_field():
    with pytest.raises(AssertionError, match='n_layer'):
        configure(Shape, Shape, argv=[])


# -----------------------------------------------------------------------------
# settings in words

def test_help_lists_every_setting_with_default_comment_and_section(capsys):
    for flag in (['--help'], ['-h'], ['--n_layer=x', '--help']):  # help comes before complaints
        with pytest.raises(SystemExit) as e:
            conf(*flag, about='Trains things.\n')
        assert e.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == 'Trains things.'
        at = [lines.index(s) for s in ('shape', 'run', 'optimizer', 'machine')]
        assert at == sorted(at)
        for cls in (Shape, Loop):
            comments = {name: comment for _, name, comment in configurator.comments_of(cls)}
            hints = typing.get_type_hints(cls)
            assert list(comments) == [f.name for f in dataclasses.fields(cls)]
            for f in dataclasses.fields(cls):
                assert comments[f.name], f.name
                kinds = [hints[f.name], *typing.get_args(hints[f.name])]  # a choice, or a choice or None
                choices = next((typing.get_args(k) for k in kinds if typing.get_origin(k) is typing.Literal), ())
                told = re.escape(f' [{", ".join(choices)}]') if len(choices) > 1 else ''
                line = rf'  --{f.name}={re.escape(str(f.default))} +{re.escape(comments[f.name])}{told}'
                assert sum(bool(re.fullmatch(line, got)) for got in lines) == 1, f.name
        assert '--n_layer=12' in lines[at[0] + 1] and lines[at[0] + 1].endswith('number of blocks')


def test_every_real_setting_has_a_comment_of_its_own():
    from hotloop.documents import ReadConfig
    from model import GPTConfig
    from prepare import PrepareConfig
    from sample import SampleConfig
    from train import TrainConfig
    for cls in (GPTConfig, TrainConfig, PrepareConfig, ReadConfig, SampleConfig):
        told = {name: comment for _, name, comment in configurator.comments_of(cls)}
        assert set(told) == {f.name for f in dataclasses.fields(cls)}
        assert [name for name, comment in told.items() if len(comment) < 4] == []


def test_differences_name_value_and_place(card):
    path = card('n_layer = 3\nn_head = 12\n')
    shape, loop, given, _ = configure(Shape, Loop, argv=[path, '--out_dir=x'])
    loop.max_iters = 5  # as when epochs are converted to steps
    assert differences([shape, loop], given).splitlines() == [
        f'  n_layer = 3  ({path}, line 1)', "  out_dir = 'x'  (--out_dir)", '  max_iters = 5  (derived)']
    assert differences(configure(Shape, argv=[])[:1], {}) == ''


# lone surrogates apart: text() leaves them out however it is asked
awkward = (st.lists(st.characters() | st.integers(0xd800, 0xdfff).map(chr), max_size=20).map(''.join)
           | st.sampled_from(['', "it's", '"', '\\', '\n', 'é€😀', '#']))
finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n_layer=st.integers(-10**30, 10**30), rate=finite, clip=finite | st.none(), out=awkward,
       name=awkward | st.none(), compile=st.sampled_from([True, False, 'auto']), tf32=st.sampled_from([True, None]))
def test_as_file_read_back_gives_the_same_settings(tmp_path, n_layer, rate, clip, out, name, compile, tf32):
    objects = [Shape(n_layer=n_layer), Loop(learning_rate=rate, grad_clip=clip, out_dir=out, run_name=name,
                                            compile=compile, tf32=tf32)]
    path = tmp_path / 'config.py'
    path.write_text(as_file(objects, 'all settings'), encoding='utf-8')
    shape, loop, given, _ = configure(Shape, Loop, argv=[str(path)])
    assert [shape, loop] == objects
    assert [repr(v) for v in vars(loop).values()] == [repr(v) for v in vars(objects[1]).values()]  # -0.0 and types too
    assert len(given) == len(dataclasses.fields(Shape)) + len(dataclasses.fields(Loop))
    assert path.read_text(encoding='utf-8').startswith('# all settings\n')


# -----------------------------------------------------------------------------
# fuzzing: whatever comes in, a setting or an error, never a crash

@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(['--n_layer', '--n_layer=', '--eval_only', '--compile', '--out_dir', '--dtype=', '3',
                                 '--grad-clip', '--help=x', '--nope', 'None', '-1', '1e9', 'auto', '--'])
                | st.text(max_size=8).map(lambda t: '--' + t) | st.text(max_size=8), max_size=6))
@example(['--max_iters=' + '1' * 4301])
@example(['--learning_rate=1_0'])
def test_any_command_line_gives_settings_or_a_settings_error(argv):
    try:
        shape, loop, _, _ = configure(Shape, Loop, argv=argv, files=False)
    except SettingsError as e:
        assert str(e).strip()
        return
    except SystemExit as e:
        assert e.code == 0 and {'--help', '-h'} & set(argv)
        return
    for o in (shape, loop):
        for name, (kind, _) in configurator.fields_of([type(o)]).items():
            value = getattr(o, name)
            assert accept(value, kind) == value and type(accept(value, kind)) is type(value)


# nothing here reaches the file system or loops: literals, arithmetic, broken syntax, this module's names
snippets = st.sampled_from([
    'n_layer = ', 'learning_rate = ', 'out_dir = ', 'eval_only = ', 'x = ', '_x = ', '3', '0.5', "'a'", 'None', '1 / 0',
    'True', '\n', '\n', '\n', ' ', '    ', '(', ')', '[', ']', ',', ':', '# c', 'if n_layer: ', 'def f(): ', 'return 1',
    'pass', 'del n_layer', 'lambda: 0', 'raise ValueError', 'import math', 'é', '"', "'''", '\\', '*', '==', '{', '}',
    'class C: ', 'yield', 'break', 'n_layer.real', '[i for i in (1, 2)]', 'with', 'global n_layer', '1e999', '-', '\t'])


@settings(max_examples=150, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(snippets, max_size=12).map(''.join) | st.text('n_layer =1\n()[]\'"#:,.+-\\éx\0\r', max_size=30))
@example('del n_layer\n')
@example('n_layer = 1 if 0 else')
@pytest.mark.filterwarnings('ignore::SyntaxWarning')
def test_any_file_gives_settings_or_a_settings_error(tmp_path, text):
    path = tmp_path / 'fuzz.py'
    path.write_text(text, encoding='utf-8', newline='')
    try:
        shape, loop, given, _ = configure(Shape, Loop, argv=[str(path)])
    except SettingsError as e:
        assert all(line.startswith(str(path)) for line in str(e).split('\n') if 'negative' not in line)
        return
    assert all(place.startswith(str(path)) for place in given.values())
    assert type(shape.n_layer) is int and math.isfinite(loop.learning_rate) and isinstance(loop.out_dir, str)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(finite | st.integers(-10**12, 10**12))
def test_a_number_survives_its_own_spelling(value):
    assert parse(repr(value), float) == float(value)
    assert parse(str(int(value)) if abs(value) < 2**53 else '7', int) == (int(value) if abs(value) < 2**53 else 7)


# -----------------------------------------------------------------------------
# the entry point of the scripts

def test_our_value_error_is_one_sentence_and_status_1(capsys):
    with pytest.raises(SystemExit) as e:
        call_main(lambda: configure(Shape, argv=['--n_layr=3']))
    captured = capsys.readouterr()
    assert e.value.code == 1 and captured.out == ''
    assert captured.err == "error: --n_layr: unknown setting 'n_layr'; did you mean 'n_layer'?\n"


@pytest.mark.parametrize('code', [0, 143])
def test_mains_return_value_is_the_status(code):
    with pytest.raises(SystemExit) as e:
        call_main(lambda: code)
    assert e.value.code == code


def test_a_deeper_value_error_keeps_its_traceback(capsys):
    """A ValueError from a library is a defect of ours; a sentence would hide where."""
    import json
    with pytest.raises(json.JSONDecodeError):
        call_main(lambda: json.loads('{'))
    with pytest.raises(KeyError):
        call_main(lambda: {}['x'])
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('folder', [REPO, '/'])
@pytest.mark.parametrize('filename', ['<string>', '<frozen os>'])
def test_code_without_a_file_is_not_ours_wherever_the_program_runs(monkeypatch, folder, filename):
    """'<frozen os>' is a name relative to nothing; the current folder must not make it one of our files."""
    monkeypatch.chdir(folder)
    namespace = {}
    exec(compile("def fail():\n    raise ValueError('deep')\n", filename, 'exec'), namespace)
    with pytest.raises(ValueError, match='deep'):
        call_main(namespace['fail'])


def test_a_script_run_from_elsewhere_ends_with_one_line(tmp_path):
    done = subprocess.run([sys.executable, os.path.join(REPO, 'prepare.py'), '--val_fraction=2', '--tokenizer=x'],
                          cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith('error: tokenizer=') and 'val_fraction=2.0' in done.stderr
    assert 'Traceback' not in done.stderr


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / 'card.py').write_bytes(b'\xef\xbb\xbfn_layer = 3\n')
    assert configure(Shape, argv=[str(tmp_path / 'card.py')])[0].n_layer == 3


def test_an_interrupt_ends_a_program_without_a_traceback(capsys):
    def interrupted():
        print('so far', end='')
        raise KeyboardInterrupt
    with pytest.raises(SystemExit) as end:
        call_main(interrupted)
    told = capsys.readouterr()
    assert end.value.code == 130 and told.out == 'so far' and told.err == '\n'
