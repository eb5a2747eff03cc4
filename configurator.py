"""
Settings from Python files and --flags, checked against dataclasses.

    $ python train.py config/quickstart.py --batch_size=32 --compile=False

A setting is a dataclass field: its default is the only default, its annotation is the check, its
trailing comment is the help, and a comment `# --- name` opens a section. Files are plain Python.
They run in order in a namespace that holds the current values; flags come last and win.
"""

import __future__

import contextlib
import dataclasses
import difflib
import glob
import inspect
import json
import math
import numbers
import os
import re
import sys
import time
import traceback
import typing
from pathlib import Path
from typing import NamedTuple

HERE = os.path.dirname(os.path.realpath(__file__))
# {its name in another program: ours}
SYNONYMS = {
    'model_name_or_path': 'init_from', 'checkpoint_dir': 'out_dir', 'output_dir': 'out_dir',
    'num_layers': 'n_layer', 'num_heads': 'n_head', 'd_model': 'n_embd', 'hidden_size': 'n_embd',
    'context_length': 'block_size', 'max_seq_len': 'block_size', 'max_seq_length': 'block_size',
    'seq_len': 'block_size', 'max_length': 'block_size', 'max_steps': 'max_iters', 'num_steps': 'max_iters',
    'steps': 'max_iters', 'eval_steps': 'eval_interval', 'eval_every': 'eval_interval',
    'eval_freq': 'eval_interval', 'grad_accum': 'gradient_accumulation_steps', 'rope_theta': 'rope_base',
    'min_learning_rate': 'min_lr', 'early_stopping_patience': 'patience', 'precision': 'dtype',
    'resume_from_checkpoint': 'resume',
    'epochs': 'max_epochs', 'num_train_epochs': 'max_epochs', 'lr': 'learning_rate',
    'warmup_steps': 'warmup_iters', 'warmup_ratio': 'warmup_iters', 'max_grad_norm': 'grad_clip',
    'mixed_precision': 'dtype', 'gradient_checkpointing': 'recompute', 'lora_r': 'lora_rank',
    'load_in_4bit': 'quantize', 'prompt': 'start', 'max_tokens': 'max_new_tokens'}


class Configured(NamedTuple):
    """The settings of a command line."""
    objects: list  # one for each dataclass
    given: dict  # {name: place} of what files and flags set
    words: list  # the positional words


# -----------------------------------------------------------------------------
# values: the ones an annotation allows, from Python and from text

def alternatives(kind):
    """List the types and choices of an annotation: int | Literal['auto'] -> [int, 'auto']."""
    found = []
    for part in typing.get_args(kind):
        found += alternatives(part)
    return found or [kind]


def accept(value, kind):
    """Return the value in a type of the annotation: an int for 1e5 or NumPy's 3. Raises ValueError."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    for part in alternatives(kind):
        if part in (int, float) and is_number:
            with contextlib.suppress(OverflowError, ValueError):  # beyond a float's range, infinite, or NaN
                if part(value) == value and math.isfinite(value):
                    return part(value)
        if part is str and isinstance(value, str):
            if value.startswith('~/'):  # a shell leaves it after =, and in a file there is none
                value = os.path.expanduser(value)
            return str.__str__(value)  # plain, because a checkpoint with NumPy's str cannot be loaded
        if part in (bool, type(None)) and isinstance(value, part):
            return value
        if isinstance(part, str) and part == value:
            return part
    words = {int: 'an integer', float: 'a number', str: 'text', bool: 'True or False', type(None): 'None'}
    expected = ' or '.join(words.get(part, part) for part in alternatives(kind))
    raise ValueError(f'expected {expected}, not {value!r}')


def parse(text, kind):
    """Return the value of a flag's text, in a type of the annotation. Text is never run as code."""
    constants = {'true': True, 'false': False, 'none': None}
    for read in (lambda text: constants[text.lower()], int, float):
        try:
            return accept(read(text), kind)
        except (KeyError, ValueError):
            continue
    return accept(text, kind)


# -----------------------------------------------------------------------------
# sources: derived settings, files, and flags

def did_you_mean(word, known):
    """End a message with a question for the most similar of the known words, if there is one."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean {nearest[0]!r}?' if nearest else ''


def unknown(name, settings):
    """Return the error message for a name that is not a setting."""
    ours = SYNONYMS.get(name)
    return f'unknown setting {name!r}{did_you_mean(ours if ours in settings else name, settings)}'


class Assigned(dict):
    """The namespace of a config file. `lines` gets {name: line} of the assignments."""

    def __setitem__(self, name, value):
        self.lines[name] = sys._getframe(1).f_lineno
        super().__setitem__(name, value)


def read_file(path, settings):
    """
    Run a config file, the user's own code. settings: {name: (value, place)} so far. Returns those of the
    file, which are checked later, because a flag may override them, and the problems.
    """
    hint = did_you_mean(path, glob.glob('config/*.py'))
    if not path.endswith('.py'):
        return {}, [f'{path!r} is neither a config file (NAME.py) nor a setting (--name=value){hint}']
    if not os.path.exists(path):
        return {}, [f'{path} does not exist{hint}']
    values = {name: value for name, (value, _) in settings.items()}
    namespace = Assigned({'__name__': '__main__', '__file__': path, **values})
    before = dict(namespace)
    namespace.lines = {}
    try:
        source = Path(path).read_text(encoding='utf-8-sig')  # editors may write a byte-order mark
        # with this flag Python 3.14, too, keeps __annotations__ in the namespace
        exec(compile(source, path, 'exec', __future__.annotations.compiler_flag), namespace)
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        lines = [f', line {frame.lineno}' for frame in frames if frame.filename == path]
        return {}, [f'{path}{lines[-1] if lines else ""}: {type(e).__name__}: {e}']
    found, problems = {}, []
    for name in namespace.get('__annotations__', {}):
        if name not in namespace.lines:
            problems.append(f'{path}: "{name}: VALUE" sets nothing; write {name} = VALUE')
    # those that `global` or globals() assign have no line
    changed = [name for name, value in namespace.items() if name not in before or value is not before[name]]
    for name in dict.fromkeys([*namespace.lines, *changed]):
        if name not in namespace:  # deleted again, as the name of an exception is
            continue
        value = namespace[name]
        place = path
        if name in namespace.lines:
            place += f', line {namespace.lines[name]}'
        if name in settings:
            found[name] = value, place
        elif not (name.startswith('_') or callable(value) or inspect.ismodule(value)):
            problems.append(f'{place}: {unknown(name, settings)} (start the name of a helper with _)')
    return found, problems


def read_argv(argv, kinds):
    """Split a command line. kinds: {name: annotation}. Returns (words, {name: (value, place)}, problems)."""
    words, found, problems = [], {}, []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith('--'):
            words.append(arg)
            continue
        key, equals, value = arg.partition('=')
        name = key[2:].replace('-', '_')
        kind = kinds.get(name, str)
        following = rest[0] if rest else '--'
        is_value = not following.startswith('--')
        if bool in alternatives(kind):
            is_value = following.lower() in ('true', 'false', 'none', 'auto')
            is_value = is_value or (int in alternatives(kind) and following.isdecimal())
        if not equals:
            value = rest.pop(0) if is_value else None
        try:
            if name == 'config':
                raise ValueError('give the config file without --config')
            if name not in kinds:
                raise ValueError(unknown(name, kinds))
            # without a value a flag means True, which only a bool accepts
            value = accept(True, kind) if value is None else parse(value, kind)
            found[name] = value, f'--{name}'
        except ValueError as e:
            problems.append(f'{key}: {e}')
    return words, found, problems


def overlay(settings, found, pairs):
    """Put what a file or the flags set over settings. The first of a pair unsets the second, if alone."""
    settings.update(found)
    for first, second in pairs:
        if first in found and second not in found:
            settings[second] = None, settings[second][1]


def configure(*classes, argv=None, files=True, about='', derived=None, origin='the checkpoint', check=True,
              pairs=()):
    """
    Read a command line into one object per dataclass. files: positional words are config files to
    run. about: the text above the settings in --help. derived: {name: value} of a depth or a
    checkpoint, which files and flags override; origin names it in errors. check: call the problems()
    of the objects, which list what is wrong with them. pairs: two settings for one thing each; the
    second replaces the first, unless a later file or a flag gives the first alone. Raises ValueError
    with a line for each problem.
    """
    argv = sys.argv[1:] if argv is None else argv
    if '--help' in argv or '-h' in argv:
        print(help_text(classes, about), flush=True)  # a pipe may be closed
        sys.exit(0)
    fields = [field for cls in classes for field in dataclasses.fields(cls)]
    settings = {field.name: (field.default, None) for field in fields}  # (value, place)
    for name, value in (derived or {}).items():
        if name in settings:  # a checkpoint of another version may have more
            settings[name] = value, None
    words, flags, problems = read_argv(argv, {field.name: field.type for field in fields})
    for path in words if files else ():
        found, wrong = read_file(path, settings)
        overlay(settings, found, pairs)
        problems += wrong
    overlay(settings, flags, pairs)
    objects = []
    for cls in classes:
        values = {}
        for field in dataclasses.fields(cls):
            value, place = settings[field.name]
            try:
                values[field.name] = accept(value, field.type)
            except ValueError as e:
                problems.append(f'{place or origin}: {field.name}: {e}')
        objects.append(cls(**values))
    if problems:
        raise ValueError('\n'.join(problems))
    if check:
        check_problems(objects)
    return Configured(objects, {name: place for name, (_, place) in settings.items() if place}, words)


def check_problems(objects):
    """Raise ValueError with what the problems() of the objects list."""
    problems = [problem for o in objects for problem in o.problems()]
    if problems:
        raise ValueError('\n'.join(problems))


def help_text(classes, about=''):
    """List every setting with its default, comment and choices, by section, as in the source."""
    lines = [about.strip(), '', 'settings, as --name=value:']
    for cls in classes:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        source = inspect.getsource(cls)
        for heading, name, comment in re.findall(r'^    (?:# --- (.*)|(\w+): .*  # (.*))', source, re.M):
            if heading:
                lines += ['', heading]
                continue
            default = str(fields[name].default).encode('unicode_escape').decode()  # a line break is \\n
            choices = [part for part in alternatives(fields[name].type) if isinstance(part, str)]
            listed = f' [{", ".join(choices)}]' if len(choices) > 1 else ''
            lines.append(f'  {f"--{name}={default}":<36}  {comment}{listed}')
    return '\n'.join(lines)


def changed(objects):
    """Return {name: value} of the settings that differ from their defaults."""
    found = {}
    for o in objects:
        for field in dataclasses.fields(o):
            if getattr(o, field.name) != field.default:
                found[field.name] = getattr(o, field.name)
    return found


def print_error(text):
    """Print an error. Under torchrun rank 0 prints it, and torchrun's summary has that of each process."""
    path = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if path:
        about = {'py_callstack': text, 'timestamp': str(int(time.time()))}
        report = {'message': {'message': text, 'extraInfo': about}}  # the form of torch's @record
        Path(path).write_text(json.dumps(report), encoding='utf-8')
    if not path or os.environ.get('RANK') == '0':
        print(text, file=sys.stderr)


def call_main(main, *args):
    """
    Run a script's main and exit with the status that it returns, if any. A ValueError raised in our own
    files is printed as one message, with status 1; one from a library is a bug and keeps its traceback.
    """
    if hasattr(sys.stdout, 'reconfigure'):  # not in a notebook
        sys.stdout.reconfigure(errors='backslashreplace')  # a terminal that is not UTF-8 must not end a run
    try:
        status = main(*args)
        print(end='', flush=True)  # at exit, a closed pipe could not be handled
    except KeyboardInterrupt:
        print(file=sys.stderr)
        status = 130
    except BrokenPipeError:  # the reader of our output has exited, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's flush at exit fails
        status = 141
    except ValueError as e:
        filename = traceback.extract_tb(e.__traceback__)[-1].filename  # '<frozen codecs>' of Python's own
        folder = os.path.dirname(os.path.realpath(filename))
        is_own = folder == HERE or os.path.dirname(folder) == os.path.join(HERE, 'hotloop')
        if filename.startswith('<') or not is_own:
            raise
        print_error(f'error: {e}')
        status = 1
    if status is not None:
        sys.exit(status)
