"""
Settings from Python files and --flags, checked against dataclasses.

    model_config, config, given, files = configure(GPTConfig, TrainConfig)

    $ python train.py config/quickstart.py --batch_size=32 --compile=False

A setting is a dataclass field: its default is the only default, its annotation is the check, its trailing
comment is the help, and a comment `# --- name` opens a section. Files are plain Python. They run in order in
a namespace that holds the current values; flags come last and win. A misspelled name or a wrong type, in a
file or a flag, is an error that names the place and the nearest setting. All errors are reported together.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import numbers
import os
import re
import sys
import traceback
import types
import typing


class SettingsError(ValueError):
    """One or more settings that cannot be used. The message has one line for each."""


# -----------------------------------------------------------------------------
# values: what an annotation allows, from Python and from text

def alternatives(kind):
    """The types and choices of an annotation: int | Literal['auto'] | None -> [int, 'auto', NoneType]."""
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return [kind]
    found = []
    for part in typing.get_args(kind):
        found += alternatives(part)
    return found


def expected(kind):
    """An annotation in words: Literal['a', 'b'] | None -> a, b or None."""
    names = {int: 'a whole number', float: 'a number', str: 'text', type(None): 'None'}
    words = []
    for part in alternatives(kind):
        words += ['True', 'False'] if part is bool else [names.get(part, part)]
    *first, last = words
    return f'{", ".join(first)} or {last}' if first else last


def is_number(value):
    """Whether a value is a finite number. True and False are not numbers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def accept(value, kind):
    """
    The value in the type of the annotation: 3 becomes 3.0 for a float, 1e5 becomes 100000 for an int, and
    numbers and texts of other libraries become Python's own, because checkpoints hold plain values only.
    ValueError if the annotation does not allow the value.
    """
    for part in alternatives(kind):
        if part in (int, float):
            if is_number(value) and (part is float or value == int(value)):
                return part(value)
        elif isinstance(part, str):
            if isinstance(value, str) and value == part:
                return part
        elif isinstance(value, part):
            return str(value) if part is str else value
    raise ValueError(f'expected {expected(kind)}, not {value!r}')


def word(text):
    """True, False or None if the text spells one of them; otherwise the text."""
    return {'true': True, 'false': False, 'none': None}.get(text.lower(), text)


def parse(text, kind):
    """The value of the annotation that the text of a flag stands for. Text is never run as code."""
    for read in (word, int, float, str):
        with contextlib.suppress(ValueError):
            return accept(read(text), kind)
    raise ValueError(f'expected {expected(kind)}, not {text!r}')


# -----------------------------------------------------------------------------
# sources: files and flags, and below them a checkpoint

OWN_FILE = '# all settings of the run in this folder'  # how the config.py begins that a run writes


def fields_of(classes):
    """{name: (annotation, default)} of all dataclasses, whose field names must differ."""
    fields = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in fields, f'{field.name} is a field of two settings classes'
            fields[field.name] = (hints[field.name], field.default)
    return fields


def unknown(name, fields, removed):
    """What to say about a name that is not a setting."""
    if name in removed:
        return f'setting {name!r} was removed; instead: {removed[name]}'
    nearest = difflib.get_close_matches(name, fields, n=1)
    hint = f'; did you mean {nearest[0]!r}?' if nearest else ''
    return f'unknown setting {name!r}{hint}'


def print_dropped(names, where):
    """Prints the settings of an older version that are ignored, once however many processes there are."""
    if names and os.environ.get('RANK', '0') == '0':
        print(f'{where}: dropped settings that this version does not have: {", ".join(names)}')


def assigned_lines(tree):
    """{name: line} of the names that the top-level statements of a file assign; the last line counts."""
    lines = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue  # their names are their own
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                lines[node.id] = node.lineno
    return lines


def failure(path, error):
    """Why a config file cannot be used, and where."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == path]
    if lines:  # an error of the running file
        return f'{path}, line {lines[-1]}: {type(error).__name__}: {error}'
    if isinstance(error, SyntaxError):
        return f'{path}, line {error.lineno or 1}: {error.msg}'
    return f'{path}: {getattr(error, "strerror", None) or error}'


def read_file(path, values, fields, removed):
    """
    Runs a config file, the user's own code, over the current values. A name that the file assigns must be a
    setting, a module or a function, or start with an underscore. Returns ({name: (value, place)}, problems).
    """
    namespace = {**values, '__name__': 'config', '__file__': path}
    try:
        with open(path, encoding='utf-8-sig') as f:  # editors on Windows write a byte-order mark
            source = f.read()
        tree = ast.parse(source, path)
        exec(compile(tree, path, 'exec'), namespace)
    except (Exception, SystemExit) as e:
        return {}, [failure(path, e)]
    found, problems, dropped, lines = {}, [], [], assigned_lines(tree)
    for name, value in namespace.items():
        place = f'{path}, line {lines[name]}' if name in lines else path
        if name in fields:
            if name in lines or value is not values[name]:
                try:
                    found[name] = (accept(value, fields[name][0]), place)
                except ValueError as e:
                    problems.append(f'{place}: {name}: {e}')
        elif name in removed and source.startswith(OWN_FILE):
            dropped.append(name)
        elif name in lines and not (name[0] == '_' or callable(value) or inspect.ismodule(value)):
            hint = '' if name in removed else ' (start the name of a helper with _)'
            problems.append(f'{place}: {unknown(name, fields, removed)}{hint}')
    print_dropped(dropped, path)
    return found, problems


def read_argv(argv, fields, removed):
    """Splits a command line into words and flags. Returns (words, {name: (value, place)}, problems)."""
    words, found, problems = [], {}, []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith('--'):
            words.append(arg)
            continue
        key, equals, text = arg[2:].partition('=')
        name = key.replace('-', '_')
        followed = bool(rest) and not rest[0].startswith('--')
        if name not in fields:
            problems.append(f'--{key}: {unknown(name, fields, removed)}')
            if followed and not equals:
                rest.pop(0)  # most likely the value of the misspelled flag
            continue
        kind = fields[name][0]
        if not equals and bool in alternatives(kind):
            text = 'True'
            with contextlib.suppress(ValueError, IndexError):  # unless a value of it follows
                parse(rest[0], kind)
                text = rest.pop(0)
        elif not equals and not followed:
            problems.append(f'--{key}: a value is missing; write --{name}=VALUE')
            continue
        elif not equals:
            text = rest.pop(0)
        try:
            found[name] = (parse(text, kind), f'--{name}')
        except ValueError as e:
            problems.append(f'--{key}: {e}')
    return words, found, problems


def read_base(base, values, fields):
    """Puts the settings of a checkpoint into the values. Returns {name: problem} of those that do not fit."""
    problems = {}
    for name, value in base.items():
        try:
            if name in fields:
                values[name] = accept(value, fields[name][0])
        except ValueError as e:
            problems[name] = f'the checkpoint has {name}={value!r}: {e}; give --{name}'
    print_dropped([name for name in base if name not in fields], 'the checkpoint')
    return problems


def configure(*classes, argv=None, files=True, about='', base=None, removed=None):
    """
    Reads a command line into one object per dataclass; their field names must differ. If a class has a method
    problems(), the sentences that it returns are errors.

    argv:    default sys.argv[1:]
    files:   whether positional words are config files to run; otherwise they are returned only
    about:   the text above the settings in --help
    base:    {name: value} below files and flags: the settings of a checkpoint
    removed: {name of an older version: what replaces it}

    Returns the objects, {name: place} of what files and flags set, and the positional words.
    SettingsError has one line for each problem.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if '--help' in argv or '-h' in argv:
        print(help_text(classes, about))
        sys.exit(0)
    fields, removed = fields_of(classes), removed or {}
    values = {name: default for name, (_, default) in fields.items()}
    unfit = read_base(base or {}, values, fields)
    words, flags, problems = read_argv(argv, fields, removed)
    given = {}
    for path in words if files else []:  # one after the other, because a file sees what those before it set
        found, wrong = read_file(path, values, fields, removed)
        problems += wrong
        for name, (value, place) in found.items():
            values[name], given[name] = value, place
    for name, (value, place) in flags.items():
        values[name], given[name] = value, place
    problems += [problem for name, problem in unfit.items() if name not in given]
    objects = [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)}) for cls in classes]
    if not problems:
        for o in objects:
            problems += o.problems() if hasattr(o, 'problems') else []
    if problems:
        raise SettingsError('\n'.join(problems))
    return *objects, given, words


# -----------------------------------------------------------------------------
# settings as text

def comments_of(cls):
    """Yields (section, field name, trailing comment) in the order of the class body."""
    section = cls.__name__
    names = {f.name for f in dataclasses.fields(cls)}
    for line in inspect.getsource(cls).splitlines():
        if heading := re.match(r'\s+# --- (.*)', line):
            section = heading[1]
        elif (field := re.match(r'\s+(\w+):[^#]*(?:#\s*(.*))?', line)) and field[1] in names:
            yield section, field[1], field[2] or ''


def help_text(classes, about=''):
    """Every setting with its default, its comment and its choices, by section."""
    lines = [about.strip(), '', 'settings, as --name=value or as name = value in a config file:']
    last = None
    for cls in classes:
        fields = fields_of([cls])
        for section, name, comment in comments_of(cls):
            if section != last:
                lines += ['', section]
                last = section
            kind, default = fields[name]
            if not str(default).isprintable():
                default = repr(default)
            choices = [part for part in alternatives(kind) if isinstance(part, str)]
            if len(choices) > 1:
                comment += f' [{", ".join(choices)}]'
            lines.append(f'  {f"--{name}={default}":<36}  {comment}')
    return '\n'.join(lines)


def differences(objects, given, otherwise='derived'):
    """One line for each setting that is not at its default: name, value, and its place or `otherwise`."""
    lines = []
    for o in objects:
        for f in dataclasses.fields(o):
            value = getattr(o, f.name)
            if value != f.default:
                lines.append(f'  {f.name} = {value!r}  ({given.get(f.name, otherwise)})')
    return '\n'.join(lines)


def as_file(objects, title):
    """All settings as the text of a config file, whose first line is the title."""
    lines = [f'# {title}', '']
    for o in objects:
        lines += [f'{f.name} = {getattr(o, f.name)!r}' for f in dataclasses.fields(o)]
    return '\n'.join(lines) + '\n'


# -----------------------------------------------------------------------------
# the entry point of a script

def call_main(main):
    """
    Runs a script's main and exits with the status that it returns. A ValueError raised by our own files is
    printed as one sentence, with status 1. One from deeper is a bug and keeps its traceback.
    """
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')  # printing a rare character must not end a run
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output is gone, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails to flush it at exit
        sys.exit(141)
    except ValueError as e:
        frames = [frame for frame, _ in traceback.walk_tb(e.__traceback__)]
        here = os.path.dirname(os.path.abspath(__file__))
        if os.path.dirname(frames[-1].f_code.co_filename) not in (here, os.path.join(here, 'hotloop')):
            raise  # a prefix would not do: .venv lies in the same folder
        print(f'error: {e}', file=sys.stderr)
        sys.exit(1)
