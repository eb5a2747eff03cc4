"""
Settings from Python files and --flags, checked against dataclasses.

    (model_config, config), given, files = configure(GPTConfig, TrainConfig)

    $ python train.py config/quickstart.py --batch_size=32 --compile=False

A setting is a dataclass field: its default is the only default, its annotation is the check, its trailing
comment is the help, and a comment `# --- name` opens a section. Files are plain Python. They run in order in
a namespace that holds the current values; flags come last and win. A misspelled name or a wrong type, in a
file or a flag, is an error that names the place and the nearest setting. Errors are reported together.
"""

import contextlib
import dataclasses
import difflib
import glob
import inspect
import math
import numbers
import os
import re
import sys
import time
import traceback
import typing
from typing import NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
PARTS = os.path.join(HERE, 'hotloop')
OWN_FILE = '# all settings of the run in this folder'  # the first words of the config.py that a run writes
# {its name in another program: ours}
SYNONYMS = {
    'resume_from_checkpoint': 'init_from', 'model_name_or_path': 'init_from', 'pretrained': 'init_from',
    'checkpoint_dir': 'out_dir', 'output_dir': 'out_dir', 'save_dir': 'out_dir',
    'num_layers': 'n_layer', 'num_heads': 'n_head', 'd_model': 'n_embd', 'hidden_size': 'n_embd',
    'context_length': 'block_size', 'max_seq_len': 'block_size', 'max_steps': 'max_iters',
    'epochs': 'max_epochs', 'num_train_epochs': 'max_epochs', 'grad_accum': 'gradient_accumulation_steps',
    'lr': 'learning_rate', 'scheduler': 'lr_schedule', 'warmup_steps': 'warmup_iters',
    'max_grad_norm': 'grad_clip', 'save_steps': 'save_interval', 'mixed_precision': 'dtype',
    'gradient_checkpointing': 'recompute', 'lora_r': 'lora_rank', 'load_in_4bit': 'quantize',
    'prompt': 'start', 'max_tokens': 'max_new_tokens', 'n': 'num_samples'}


class SettingsError(ValueError):
    """An error in the settings. Every process of a run finds it, so only one prints it."""


# -----------------------------------------------------------------------------
# values: the ones an annotation allows, from Python and from text

IN_WORDS = {int: 'an integer', float: 'a number', str: 'text', bool: 'True or False', type(None): 'None'}


def alternatives(kind):
    """The types and choices of an annotation: int | Literal['auto'] | None -> [int, 'auto', NoneType]."""
    found = []
    for part in typing.get_args(kind):
        found += alternatives(part)
    return found or [kind]


def accept(value, kind):
    """
    The value in the type of the annotation: 3 becomes 3.0 for a float, 1e5 becomes 100000 for an int, and
    NumPy's values become Python's, for checkpoints. ValueError if the annotation does not allow the value.
    """
    for part in alternatives(kind):
        if part in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an int that no float can hold
                if math.isfinite(value) and (part is float or value == int(value)):
                    return part(value)
        elif isinstance(part, str) and isinstance(value, str) and value == part:
            return part
        elif part is str and isinstance(value, str):
            return str(value)
        elif part in (bool, type(None)) and isinstance(value, part):
            return value
    expected = ' or '.join(IN_WORDS.get(part, part) for part in alternatives(kind))
    raise ValueError(f'expected {expected}, not {value!r}')


def constant(text):
    """True, False or None if the text spells one of them; otherwise the text."""
    return {'true': True, 'false': False, 'none': None}.get(text.lower(), text)


def parse(text, kind):
    """The value of a flag's text, in a type of the annotation. Text is never run as code."""
    for read in (constant, int, float):
        with contextlib.suppress(ValueError):
            return accept(read(text), kind)
    return accept(text, kind)


# -----------------------------------------------------------------------------
# sources: files and flags, and below them a checkpoint

def fields_of(classes):
    """{name: (annotation, default)} of all dataclasses, whose field names must differ."""
    fields = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in fields, f'{field.name} is a field of two settings classes'
            fields[field.name] = (hints[field.name], field.default)
    return fields


def unknown(name, fields):
    """Return the error message for a name that is not a setting."""
    hint = did_you_mean(name, {field: repr(field) for field in fields})
    if SYNONYMS.get(name) in fields:
        hint = f'; did you mean {SYNONYMS[name]!r}?'
    elif name in ('config', 'config_file') and 'out_dir' in fields:  # prepare.py takes none
        hint = '; a config file is given without a flag, as in: train.py FILE.py'
    return f'unknown setting {name!r}{hint}'


def print_dropped(names, where):
    """Print, once for all processes, the ignored settings of another version."""
    if names and os.environ.get('RANK', '0') == '0':
        print(f'{where}: dropped settings that this version does not have: {", ".join(names)}')


def read_base(base, settings, fields, flags):
    """Copies a checkpoint's values into the settings. Returns problems with those that no flag overrides."""
    problems = []
    for name, value in base.items():
        try:
            if name in fields:
                settings[name] = accept(value, fields[name][0]), None
        except ValueError as e:
            if name not in flags:
                problems.append(f'the checkpoint has {name}={value!r}: {e}; give --{name}')
    print_dropped([name for name in base if name not in fields], 'the checkpoint')
    return problems


class Assigned(dict):
    """The namespace of a config file. It records the line of each assignment."""

    def __init__(self, values):
        super().__init__(values)
        self.lines = {}

    def __setitem__(self, name, value):
        self.lines[name] = sys._getframe(1).f_lineno
        super().__setitem__(name, value)


def did_you_mean(word, known):
    """The end of a message that asks for the most similar of the known words, {word: text}; '' if none is."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean {known[nearest[0]]}?' if nearest else ''


def meant(word, fields):
    """A hint at the flag or the card that a word, which is not a file, was probably meant to be; or ''."""
    name, equals, value = word.lstrip('-').partition('=')
    name = name.replace('-', '_')
    if equals or word.startswith('-') or name in fields:
        known = {field: f'--{field}{equals}{value}' for field in fields}
    elif 'start' in fields and not word.endswith('.py'):
        return f'; a prompt is given as --start="{word}"'
    else:
        cards = glob.glob(os.path.join(HERE, 'config', '*.py'))
        cards += glob.glob(os.path.join(glob.escape(os.path.dirname(word)), '*.py'))  # beside it
        known = {prefix + os.path.splitext(os.path.basename(card))[0]: os.path.relpath(card)
                 for prefix in ('train_', '') for card in cards}  # the names of nanoGPT's begin with it
        name = os.path.splitext(os.path.basename(word))[0]
    hint = '' if word.endswith('.py') else '; settings are given as --NAME=VALUE'
    return did_you_mean(name, known) or hint


def explain_failure(error, path, fields):
    """Why a config file could not be read or run: the line, the reason, and a hint."""
    places = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == path]
    place, hint = f'{path}, line {places[-1]}' if places else path, ''
    reason = getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'  # strerror: of an OSError
    if isinstance(error, FileNotFoundError) and not places:
        hint = meant(path, fields)
    elif isinstance(error, IsADirectoryError) and not places:
        hint = f'; a run folder is given as --out_dir={path}'
    return f'{place}: {reason}{hint}'


def read_file(path, settings, fields):
    """
    Run a config file, the user's own code, over the settings and put its values into them. A name that it
    assigns must be a setting, a module or a function, or start with an underscore. Returns the problems.
    """
    values = {name: value for name, (value, _) in settings.items()}
    namespace = Assigned({**values, '__name__': 'config', '__file__': path})
    try:
        with open(path, encoding='utf-8-sig') as f:  # editors may write a byte-order mark
            source = f.read()
        exec(compile(source, path, 'exec'), namespace)
    except (Exception, SystemExit) as e:
        return [explain_failure(e, path, fields)]
    lines, problems, dropped = namespace.lines, [], []
    if 'start' in fields and {'dataset', 'learning_rate'} & lines.keys():  # nanoGPT's sample.py reads such
        return [f'{path} is for train.py; sample.py finds its run with --out_dir={namespace["out_dir"]}']
    for name in namespace.get('__annotations__', {}):
        if name not in lines:
            problems.append(f'{path}: "{name}: VALUE" sets nothing; write {name} = VALUE')
    for name, line in lines.items():
        value, place = namespace.get(name), f'{path}, line {line}'
        if name in fields:
            try:
                settings[name] = accept(value, fields[name][0]), place
            except ValueError as e:
                problems.append(f'{place}: {name}: {e}')
        elif name.startswith('_') or callable(value) or inspect.ismodule(value):
            continue  # a helper
        elif source.startswith(OWN_FILE):
            dropped.append(name)
        else:
            problems.append(f'{place}: {unknown(name, fields)} (start the name of a helper with _)')
    print_dropped(dropped, path)
    return problems


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
        kind = fields[name][0] if name in fields else str
        if not equals and bool in alternatives(kind):
            text = 'True'
            with contextlib.suppress(ValueError, IndexError):  # unless a value of it follows
                parse(rest[0], kind)
                text = rest.pop(0)
        elif not equals and rest and not rest[0].startswith('--'):
            text, equals = rest.pop(0), True
        try:
            if name not in fields:
                raise ValueError(unknown(name, fields))
            if not equals and not text:
                raise ValueError(f'a value is missing; write --{name}=VALUE')
            found[name] = (parse(text, kind), f'--{name}')
        except ValueError as e:
            problems.append(f'--{key}: {e}')
    return words, found, problems


def configure(*classes, argv=None, files=True, about='', below=None, check=True, pairs=()):
    """
    Reads a command line into one object per dataclass. Their problems() methods return the errors.

    files:   whether positional words are config files to run
    about:   the text above the settings in --help
    below:   {name: value} below files and flags: a card's, a depth's or a checkpoint's
    pairs:   two settings for one thing each; the one from the stronger place wins, and of an equal place the
             second. The other becomes None
    check:   whether to call problems(); without it check_problems() must follow, or another call with a base

    Returns a Configured.
    SettingsError has one line for each problem.
    """
    argv = sys.argv[1:] if argv is None else argv
    if '--help' in argv or '-h' in argv:
        print(help_text(classes, about, files), flush=True)  # a pipe may be closed
        sys.exit(0)
    fields = fields_of(classes)
    settings = {name: (default, None) for name, (_, default) in fields.items()}  # {name: (value, place)}
    words, flags, problems = read_argv(argv, fields)
    problems += read_base(below or {}, settings, fields, flags)
    if files:
        for path in words:
            problems += read_file(path, settings, fields)
    settings.update(flags)
    choose_one(settings, pairs)
    objects = [cls(**{f.name: settings[f.name][0] for f in dataclasses.fields(cls)}) for cls in classes]
    if problems:
        raise SettingsError('\n'.join(problems))
    if check:
        check_problems(objects)
    given = {name: place for name, (_, place) in settings.items() if place}
    return Configured(objects, given, words)


class Configured(NamedTuple):
    """The settings of a command line."""
    objects: list  # one for each dataclass
    given: dict  # {name: place} of what files and flags set
    words: list  # the positional words


def choose_one(settings, pairs):
    """
    Of each pair of settings for one thing, keep the one from the stronger place: a flag, then a config file,
    then what stands below. settings: {name: (value, place)}.
    """
    for pair in pairs:
        strengths = []
        for name in pair:
            place = settings[name][1]
            strengths.append(0 if place is None else 1 + place.startswith('--'))
        if strengths[0] > strengths[1]:
            settings[pair[1]] = None, settings[pair[1]][1]


def check_problems(objects):
    """SettingsError, if settings have problems."""
    if problems := [problem for o in objects for problem in o.problems()]:
        raise SettingsError('\n'.join(problems))


# -----------------------------------------------------------------------------
# settings as text

def help_text(classes, about='', files=True):
    """Every setting with its default, its comment and its choices, by section, in the order of the source."""
    in_files = ' or as name = value in a config file' if files else ''
    lines = [about.strip(), '', f'settings, as --name=value{in_files}:']
    for cls in classes:
        fields = fields_of([cls])
        for line in inspect.getsource(cls).splitlines():
            heading = re.match(r'\s+# --- (.*)', line)
            field = re.match(r'\s+(\w+):[^#]*(?:#\s*(.*))?', line)
            if heading:
                lines += ['', heading[1]]
            elif field and field[1] in fields:
                kind, default = fields[field[1]]
                if not str(default).isprintable():
                    default = repr(default)
                lines.append(f'  {f"--{field[1]}={default}":<36}  {field[2] or ""}')
                choices = [part for part in alternatives(kind) if isinstance(part, str)]
                if len(choices) > 1:
                    lines[-1] += f' [{", ".join(choices)}]'
    return '\n'.join(lines)


def differences(objects, given, hidden=()):
    """
    One line for each setting that is not at its default: name, value, and its place, or that it was derived.
    hidden: values that are not shown.
    """
    lines = []
    for o in objects:
        for f in dataclasses.fields(o):
            value = getattr(o, f.name)
            if value != f.default and value not in hidden:
                lines.append(f'  {f.name} = {value!r}  ({given.get(f.name, "derived")})')
    return '\n'.join(lines)


def as_file(values):
    """All settings, {name: value}, as the text of the config.py of a run."""
    lines = [f'{OWN_FILE}; as a config file it repeats the run', '']
    for name, value in values.items():
        lines.append(f'{name} = {value!r}')
    return '\n'.join(lines) + '\n'


# -----------------------------------------------------------------------------
# the entry point of a script

def call_main(main, *args):
    """
    Runs a script's main and exits with the status that it returns, if it returns one. A ValueError raised in
    our own files is printed as one message, with status 1; a SettingsError by one process of a machine only.
    A ValueError from a library is a bug and keeps its traceback.
    """
    if hasattr(sys.stdout, 'reconfigure'):  # not in a notebook, nor if it is closed
        sys.stdout.reconfigure(errors='backslashreplace')  # an unprintable character must not end a run
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
        if os.path.dirname(origin) != PARTS and origin != HERE:  # .venv lies in the same folder
            raise
        rank = os.environ.get('LOCAL_RANK', os.environ.get('RANK', '0'))
        if isinstance(e, SettingsError) and rank != '0':
            time.sleep(5)  # torchrun kills all processes when the first one ends, and rank 0 has to print
        else:
            print(f'error: {e}', file=sys.stderr)
        sys.exit(1)
