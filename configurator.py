"""
Settings from Python files and --flags, checked against dataclasses.

    model_config, config, given, files = configure(GPTConfig, TrainConfig)

    $ python train.py config/quickstart.py --batch_size=32 --compile=False

A setting is a dataclass field: its default is the only default, its annotation the check, its trailing comment the
help, and a comment `# --- name` opens a section. Files are plain Python, run in order in a namespace that holds the
current values; flags come last and win. Whatever is misspelt or of the wrong type, in a file as much as in a flag, is
an error that names the place and the nearest real setting, and all errors of one command are reported together.
"""

import ast
import contextlib
import dataclasses
import difflib
import errno
import inspect
import math
import numbers
import os
import re
import sys
import traceback
import types
import typing
from itertools import chain


class SettingsError(ValueError):
    """One or more settings that cannot be used; the message holds a line for each."""


# -----------------------------------------------------------------------------
# values: what an annotation allows, from Python and from text

def alternatives(kind):
    """The types and choices that an annotation allows: int | Literal['auto'] | None -> [int, 'auto', NoneType]."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [alternative for k in typing.get_args(kind) for alternative in alternatives(k)]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else [kind]


def expected(kind):
    """An annotation in words: Literal['a', 'b'] | None -> a, b or None."""
    names = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text', type(None): 'None'}
    words = [names.get(k, k) for k in alternatives(kind)]
    return ' or '.join([', '.join(words[:-1]), words[-1]] if len(words) > 1 else words)


def is_number(value):
    """True is no 1; NaN, infinity and what no float can hold are no numbers."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def accept(value, kind):
    """
    The value as the annotation has it: 3 where a float is asked becomes 3.0, and a text of numpy or of an enumeration
    plain, or it would stand in every checkpoint. ValueError where it does not fit.
    """
    for k in alternatives(kind):
        if k in (int, float):
            if is_number(value) and (k is float or value == int(value)):
                return k(value)  # 1e5 in a file is meant as a count
        elif isinstance(k, str):
            if isinstance(value, str) and value == k:
                return k
        elif isinstance(value, k):
            return ''.join(value) if k is str else value
    raise ValueError(f'expected {expected(kind)}, not {value!r}')


def parse(text, kind):
    """The text of a flag as a value of the annotation; text is never evaluated."""
    words = {'true': True, 'false': False, 'none': None}
    for read in (lambda text: words[text.lower()], int, float, str):
        with contextlib.suppress(ValueError, KeyError):
            return accept(read(text), kind)
    raise ValueError(f'expected {expected(kind)}, not {text!r}')


# -----------------------------------------------------------------------------
# one place of settings after another

def fields_of(classes):
    """{name: (annotation, default)} over all dataclasses, whose field names must not meet."""
    fields = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in fields, f'{field.name} is a field of two settings classes'
            fields[field.name] = (hints[field.name], field.default)
    return fields


def unknown(name, fields):
    near = difflib.get_close_matches(name, fields, n=1)
    return f'unknown setting {name!r}' + (f'; did you mean {near[0]!r}?' if near else '')


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
          ast.GeneratorExp)


def top_level_names(tree):
    """({name: line} of what a file assigns, names that it imports) at its top level."""
    assigned, imported, left = {}, set(), [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned[node.id] = max(node.lineno, assigned.get(node.id, 0))
        elif isinstance(node, ast.alias):
            imported.add((node.asname or node.name).split('.')[0])
        elif not isinstance(node, SCOPES):
            left += ast.iter_child_nodes(node)
    return assigned, imported


def read_file(path, values, fields):
    """
    Runs a config file, which is code, the user's own, over the current values: ({name: (value, place)}, problems).
    Every name that it leaves behind must be a setting, but for modules, functions and those with an underscore.
    """
    try:
        with open(path, encoding='utf-8-sig') as f:  # editors on Windows write a byte-order mark
            source = f.read()
        tree = ast.parse(source, path)
        code = compile(tree, path, 'exec')
        assigned, imported = top_level_names(tree)
    except (OSError, UnicodeDecodeError) as e:
        return {}, [f'{path}: {getattr(e, "strerror", None) or e}']
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        return {}, [f'{path}, line {getattr(e, "lineno", None) or 1}: {getattr(e, "msg", e)}']
    namespace = {**values, '__name__': 'config', '__file__': path}
    before = set(namespace)
    try:
        exec(code, namespace)
    except (Exception, SystemExit) as e:  # whatever the user's file raises is the user's to read, with its line
        lines = [line for frame, line in traceback.walk_tb(e.__traceback__) if frame.f_code.co_filename == path]
        return {}, [f'{path}, line {lines[-1] if lines else 1}: {type(e).__name__}: {e}']
    found, problems = {}, []
    for name, value in namespace.items():
        line = assigned.get(name)
        place = f'{path}, line {line}' if line else path
        if name in fields:
            if line or value is not values[name]:
                try:
                    found[name] = (accept(value, fields[name][0]), place)
                except ValueError as e:
                    problems.append(f'{place}: {name}: {e}')
        elif not (name in before or name.startswith('_') or isinstance(value, types.ModuleType) or callable(value)
                  or name in imported or ('*' in imported and not line)):
            problems.append(f'{place}: {unknown(name, fields)} (a helper of your own starts with an underscore)')
    return found, problems


def read_argv(argv, fields):
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
        if name not in fields:
            problems.append(f'--{key}: {unknown(name, fields)}')
            if not equals and rest and not rest[0].startswith('--'):
                rest.pop(0)  # most likely the value of the misspelt flag
            continue
        kind = fields[name][0]
        if not equals and bool in alternatives(kind):  # alone, or before what is no value of it
            text = 'True'
            with contextlib.suppress(ValueError, IndexError):
                parse(rest[0], kind)
                text = rest.pop(0)
        elif not equals:
            if not rest or rest[0].startswith('--'):
                problems.append(f'--{key}: a value is missing; write --{name}=VALUE')
                continue
            text = rest.pop(0)
        try:
            found[name] = (parse(text, kind), f'--{name}')
        except ValueError as e:
            problems.append(f'--{key}: {e}')
    return words, found, problems


class Given(dict):
    """{name: place} of what was given explicitly. below: {name: the value that was replaced there}."""

    def __init__(self):
        super().__init__()
        self.below = {}


def configure(*classes, argv=None, files=True, about=''):
    """
    Reads a command line into dataclasses of disjoint fields; a class's problems(), if it has that, tells what is wrong.

    argv: default sys.argv[1:]. files: positional words are config files to run, otherwise handed back untouched. about:
    the text above the settings in --help. Returns one instance a class, a Given, the positional words. SettingsError
    has a line for each problem.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if '--help' in argv or '-h' in argv:
        print(help_text(classes, about))
        sys.exit(0)
    fields = fields_of(classes)
    values = {name: default for name, (_, default) in fields.items()}
    given = Given()
    words, flags, problems = read_argv(argv, fields)
    # one after the other, for each file sees what those before it left; flags last
    for found, wrong in chain((read_file(path, values, fields) for path in words if files), [(flags, [])]):
        problems += wrong
        for name, (value, place) in found.items():
            if values[name] != value:
                given.below[name] = values[name]
            values[name], given[name] = value, place
    objects = [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)}) for cls in classes]
    if not problems:
        problems = [problem for o in objects if hasattr(o, 'problems') for problem in o.problems()]
    if problems:
        raise SettingsError('\n'.join(problems))
    return *objects, given, words


# -----------------------------------------------------------------------------
# settings in words

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
    """Every setting with its default, its comment and what may be chosen, by section."""
    lines, last = [about.strip(), '', 'settings, as --name=value or as name = value in a config file:'], None
    for cls in classes:
        fields = fields_of([cls])
        for section, name, comment in comments_of(cls):
            if section != last:
                lines += ['', section]
                last = section
            kind, default = fields[name]
            default = str(default) if str(default).isprintable() else repr(default)
            choices = [k for k in alternatives(kind) if isinstance(k, str)]
            choices = f' [{", ".join(choices)}]' if len(choices) > 1 else ''
            lines.append(f'  {f"--{name}={default}":<36}  {comment}{choices}')
    return '\n'.join(lines)


def differences(objects, given, otherwise='derived'):
    """One line for each setting that is not at its default: name, value, the place it was given, or `otherwise`."""
    lines = []
    for o in objects:
        for f in dataclasses.fields(o):
            value = getattr(o, f.name)
            if value != f.default:
                lines.append(f'  {f.name} = {value!r}  ({given.get(f.name, otherwise)})')
    return '\n'.join(lines)


def as_file(objects, title):
    """All settings as the text of a config file."""
    lines = [f'# {title}', '']
    for o in objects:
        lines += [f'{f.name} = {getattr(o, f.name)!r}' for f in dataclasses.fields(o)]
    return '\n'.join(lines) + '\n'


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # really, or beyond a quota


def drop_output():
    """What is printed from here on, and what could not be delivered so far, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def call_main(main):
    """Runs a script: a ValueError of our own files is a sentence and status 1; a deeper one keeps its traceback."""
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')  # a terminal that cannot show a character ends no run
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # what was written so far stands
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone, as head does
        drop_output()
        sys.exit(141)
    except OSError as e:
        if e.errno not in DISK_FULL:
            raise
        drop_output()
        print(f'error: the output could not be written: {e.strerror}', file=sys.stderr)
        sys.exit(1)
    except ValueError as e:
        where = [frame for frame, _ in traceback.walk_tb(e.__traceback__)][-1].f_code.co_filename
        ours = os.path.dirname(os.path.abspath(__file__))
        folder = os.path.dirname(os.path.abspath(where))
        if not os.path.isfile(where) or folder not in (ours, os.path.join(ours, 'hotloop')):
            raise
        print(f'error: {e}', file=sys.stderr)
        sys.exit(1)
