"""What a script does before its imports, of which torch takes seconds: it checks the command line."""

import contextlib
import os
import sys

from configurator import HERE, SettingsError, configure, fields_of, read_argv, settings_module
from hotloop.system import host

PACKAGES = ('torch', 'numpy', 'tiktoken', 'requests')
INSTALL = 'pip install -c constraints.txt -r requirements.txt'


@contextlib.contextmanager
def without_torch():
    """Inside, `import torch` is an ImportError, also for the modules that are imported here."""
    torch = sys.modules.get('torch')
    sys.modules['torch'] = None
    try:
        yield
    finally:
        del sys.modules['torch']
        if torch:
            sys.modules['torch'] = torch


def check_torch():
    """SettingsError if torch is older than the code needs. If it is missing, its import says so."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that prepare.py saves
    with contextlib.suppress(PackageNotFoundError):
        found = version('torch')
        if tuple(map(int, found.split('.')[:2])) < (2, 11):
            raise SettingsError(f'this program needs torch 2.11 or later, and torch is {found}: {INSTALL}')


def explain_imports():
    """Installs a hook, so that Ctrl-C or a missing package during the imports prints no traceback."""
    def explain(kind, error, trace):
        if issubclass(kind, ModuleNotFoundError) and error.name in PACKAGES:
            print(f'error: {error.name} is not installed: {INSTALL}', file=sys.stderr)
        elif not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
    sys.excepthook = explain


def check_early(*sources):
    """
    Prints --help, or raises SettingsError for a wrong flag, before the imports of a script, of which torch
    takes seconds. sources: files beside this one with settings classes; the script comes last. The rest is
    left to the script: what needs torch, config files, and settings that contradict each other.
    """
    explain_imports()
    if sources[-1] == 'train.py':  # a token of sample.py would take up to 1.4 times as long
        host.end_spins_early()
    with without_torch(), contextlib.suppress(NameError):
        modules = [settings_module(os.path.join(HERE, source)) for source in sources]
        classes = []
        for module in modules:
            for name, value in vars(module).items():
                if name.endswith('Config') and value.__module__ == module.__name__:  # not an imported one
                    classes.append(value)
        if '--help' in sys.argv:
            configure(*classes, about=modules[-1].__doc__)
        *_, problems = read_argv(sys.argv[1:], fields_of(classes))
        if problems:
            raise SettingsError('\n'.join(problems))
    check_torch()
