"""
Settings from Python files and --flags, checked against dataclasses.

    found = configure(GPTConfig, TrainConfig)
    model_config, config = found.objects

    $ python train.py config/quickstart.py --batch_size=32 --compile=False

A setting is a dataclass field: its default is the only default, its annotation is the check, its
trailing comment is the help, and a comment `# --- name` opens a section. Files are plain Python.
They run in order in a namespace that holds the current values; flags come last and win. A
misspelled name or a wrong type, in a file or a flag, is an error that names the place and the
nearest setting. All errors are reported together.
"""

import dataclasses
import difflib
import glob
import inspect
import math
import numbers
import os
import re
import sys
import traceback
import typing
from pathlib import Path
from typing import NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
OWN_FILE = '# all settings of the run in this folder'  # the config.py of a run begins with this
# {its name in another program: ours}
SYNONYMS = {
    'model_name_or_path': 'init_from', 'checkpoint_dir': 'out_dir', 'output_dir': 'out_dir',
    'num_layers': 'n_layer', 'num_heads': 'n_head', 'd_model': 'n_embd', 'hidden_size': 'n_embd',
    'context_length': 'block_size', 'max_seq_len': 'block_size', 'max_steps': 'max_iters',
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


def is_finite_number(value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # Python's integers have no limit.
        return False


def accept(value, kind):
    """
    Return the value in the type of the annotation: 3 becomes 3.0 for a float, 1e5 becomes 100000
    for an int, and NumPy's values become Python's, for checkpoints. Raises ValueError.
    """
    is_finite = is_finite_number(value)
    for part in alternatives(kind):
        if part is int and is_finite and value == int(value):
            return int(value)
        if part is float and is_finite:
            return float(value)
        if part is str and isinstance(value, str):
            return str(value)
        if part in (bool, type(None)) and isinstance(value, part):
            return value
        if isinstance(part, str) and part == value:
            return part
    words = {int: 'an integer', float: 'a number', str: 'text', bool: 'True or False',
             type(None): 'None'}
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
# sources: a layer below, files, and flags

def fields_of(classes):
    """Return {name: (annotation, default)} of all dataclasses, whose field names must differ."""
    fields = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in fields, f'{field.name} is a field of two settings classes'
            fields[field.name] = (hints[field.name], field.default)
    return fields


def did_you_mean(word, known):
    """End a message with a question for the most similar known word, {word: text}, if there is one."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean {known[nearest[0]]}?' if nearest else ''


def unknown(name, fields):
    """Return the error message for a name that is not a setting."""
    if SYNONYMS.get(name) in fields:
        return f'unknown setting {name!r}; did you mean {SYNONYMS[name]!r}?'
    return f'unknown setting {name!r}{did_you_mean(name, {field: repr(field) for field in fields})}'


class Assigned(dict):
    """The namespace of a config file. It records the line of each assignment."""

    def __init__(self, values):
        super().__init__(values)
        self.lines = {}

    def __setitem__(self, name, value):
        self.lines[name] = sys._getframe(1).f_lineno
        super().__setitem__(name, value)


def nearest_card(path):
    """Return a hint for a config file that does not exist."""
    cards = {}
    for card in glob.glob(os.path.join(HERE, 'config', '*.py')):
        cards[Path(card).stem] = os.path.relpath(card)
    name = Path(path).stem.removeprefix('train_')  # of nanoGPT's cards
    return did_you_mean(name, cards) or '; settings are given as --NAME=VALUE'


def read_file(path, settings, fields):
    """
    Run a config file, the user's own code, over the settings and put its values into them. A name
    that it assigns must be a setting, a module or a function, or start with an underscore. Returns
    the problems; values are checked when all sources are read, so that a flag may override them.
    """
    values = {name: value for name, (value, _) in settings.items()}
    namespace = Assigned({**values, '__name__': 'config', '__file__': path})
    try:
        with open(path, encoding='utf-8-sig') as f:  # editors may write a byte-order mark
            source = f.read()
        exec(compile(source, path, 'exec'), namespace)
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        lines = [f', line {frame.lineno}' for frame in frames if frame.filename == path]
        hint = nearest_card(path) if isinstance(e, FileNotFoundError) and not lines else ''
        return [f'{path}{lines[-1] if lines else ""}: {type(e).__name__}: {e}{hint}']
    problems = []
    for name in namespace.get('__annotations__', {}):
        if name not in namespace.lines:
            problems.append(f'{path}: "{name}: VALUE" sets nothing; write {name} = VALUE')
    for name, line in namespace.lines.items():
        value = namespace.get(name)
        place = f'{path}, line {line}'
        is_helper = name.startswith('_') or callable(value) or inspect.ismodule(value)
        if name in fields:
            settings[name] = value, place
        elif not is_helper and not source.startswith(OWN_FILE):  # an older run's may have more settings
            problems.append(f'{place}: {unknown(name, fields)} (start the name of a helper with _)')
    return problems


def read_argv(argv, fields):
    """Split a command line. Returns (words, {name: (value, place)}, problems)."""
    words, found, problems = [], {}, []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith('--'):
            words.append(arg)
            continue
        key, equals, text = arg[2:].partition('=')
        name = key.replace('-', '_')
        kind, _ = fields.get(name, (str, None))
        try:
            if not equals:
                text = following(rest, kind, name)
            if name not in fields:
                raise ValueError(unknown(name, fields))
            found[name] = parse(text, kind), f'--{name}'
        except ValueError as e:
            problems.append(f'--{key}: {e}')
    return words, found, problems


def following(rest, kind, name):
    """Take the text of a flag without = from the words after it. A flag of a bool needs none."""
    if bool in alternatives(kind):
        try:
            parse(rest[0], kind)
        except (IndexError, ValueError):
            return 'True'
        return rest.pop(0)
    if rest and not rest[0].startswith('--'):
        return rest.pop(0)
    raise ValueError(f'a value is missing; write --{name}=VALUE')


def configure(*classes, argv=None, files=True, about='', below=None, check=True, pairs=()):
    """
    Read a command line into one object per dataclass.

    files:   whether positional words are config files to run
    about:   the text above the settings in --help
    below:   {name: value} below files and flags: of a card, a depth or a checkpoint
    check:   whether to call the problems() of the objects, which list what is wrong with them
    pairs:   two settings for one thing each: flags override files, files override the checkpoint,
             and at an equal place the second overrides the first; the losing one becomes None

    Raises ValueError with one line for each problem.
    """
    argv = sys.argv[1:] if argv is None else argv
    if '--help' in argv or '-h' in argv:
        print(help_text(classes, about), flush=True)  # a pipe may be closed
        sys.exit(0)
    fields = fields_of(classes)
    settings = {name: (default, None) for name, (_, default) in fields.items()}  # (value, place)
    words, flags, problems = read_argv(argv, fields)
    for name, value in (below or {}).items():
        if name in fields:  # a checkpoint of another version may have more
            settings[name] = value, None
    if files:
        for path in words:
            problems += read_file(path, settings, fields)
    settings.update(flags)
    for first, second in pairs:
        _, place = settings[second]
        if strength(settings[first][1]) > strength(place):
            settings[second] = None, place
    values = {}
    for name, (value, place) in settings.items():
        try:
            values[name] = accept(value, fields[name][0])
        except ValueError as e:
            problems.append(f'{place or "the checkpoint"}: {name}: {e}')
    raise_all(problems)
    objects = []
    for cls in classes:
        objects.append(cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)}))
        if check:
            problems += objects[-1].problems()
    raise_all(problems)
    given = {name: place for name, (_, place) in settings.items() if place}
    return Configured(objects, given, words)


def raise_all(problems):
    """Raise one ValueError for all problems, if there are any."""
    if problems:
        raise ValueError('\n'.join(problems))


def strength(place):
    """Return 0 for a default or the layer below, 1 for a file and 2 for a flag."""
    if place is None:
        return 0
    return 2 if place.startswith('--') else 1


# -----------------------------------------------------------------------------
# settings as text

def help_text(classes, about=''):
    """List every setting with its default, comment and choices, by section, as in the source."""
    lines = [about.strip(), '', 'settings, as --name=value:']
    for cls in classes:
        fields = fields_of([cls])
        for line in inspect.getsource(cls).splitlines():
            heading = re.match(r'\s+# --- (.*)', line)
            field = re.match(r'\s+(\w+):[^#]*(?:#\s*(.*))?', line)
            if heading:
                lines += ['', heading[1]]
            elif field and field[1] in fields:
                kind, default = fields[field[1]]
                default = str(default).encode('unicode_escape').decode()  # a line break is \\n
                choices = [part for part in alternatives(kind) if isinstance(part, str)]
                listed = f' [{", ".join(choices)}]' if len(choices) > 1 else ''
                lines.append(f'  {f"--{field[1]}={default}":<36}  {field[2] or ""}{listed}')
    return '\n'.join(lines)


def differences(objects, given):
    """List the settings that differ from their defaults, and where each was set."""
    lines = []
    for o in objects:
        for field in dataclasses.fields(o):
            value = getattr(o, field.name)
            if value != field.default:
                place = given.get(field.name, 'derived')
                lines.append(f'  {field.name} = {value!r}  ({place})')
    return '\n'.join(lines)


def as_file(values):
    """Return all settings, {name: value}, as the text of the config.py of a run."""
    lines = [f'{OWN_FILE}; as a config file it repeats the run', '']
    for name, value in values.items():
        lines.append(f'{name} = {value!r}')
    return '\n'.join(lines) + '\n'


# -----------------------------------------------------------------------------
# the entry point of a script

def call_main(main, *args):
    """
    Run a script's main and exit with the status that it returns, if it returns one. A ValueError
    raised in our own files is printed as one message, with status 1. A ValueError from a library is
    a bug and keeps its traceback.
    """
    try:
        status = main(*args)
        print(end='', flush=True)  # at exit, a closed pipe could not be handled
        if status is not None:
            sys.exit(status)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has exited, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's flush at exit fails
        sys.exit(141)
    except ValueError as e:
        origin = os.path.dirname(traceback.extract_tb(e.__traceback__)[-1].filename)
        is_ours = origin == HERE or os.path.dirname(origin) == os.path.join(HERE, 'hotloop')
        if not is_ours:
            raise
        print(f'error: {e}', file=sys.stderr)
        sys.exit(1)
