"""The laws of the house: imports run one way. Read with ast, so nothing is imported."""

import ast
import graphlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ('train', 'prepare', 'sample')
BELOW = {'system': (), 'mixers': (), 'data': ('system',), 'weights': ('system', 'data'),
         'training': ('system', 'data', 'weights'), 'inference': ('system', 'data', 'weights')}
SOURCES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts): path.read_text(encoding='utf-8')
           for path in (*ROOT.glob('*.py'), *(ROOT / 'hotloop').rglob('*.py'))}


def imports(source):
    """
    The names that a source imports anywhere, lazy imports too: of `from a import b` both a and a.b. With a
    file of a folder Python also runs the folder's __init__.py.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
    return found | {f'hotloop.{folder}.__init__' for folder in map(folder_of, found) if folder}


def folder_of(name):
    """'data' of hotloop.data and of hotloop.data.bpe; None outside the six folders."""
    package, _, rest = name.partition('.')
    folder = rest.partition('.')[0]
    return folder if package == 'hotloop' and folder in BELOW else None


def test_the_laws_hold():
    needs = {name: imports(text) for name, text in SOURCES.items()}
    broken = []
    for name in SOURCES:
        folder = folder_of(name)
        forbidden = set(COMMANDS)
        if folder:
            forbidden.add('model')
        for other in sorted(needs[name]):
            below = folder_of(other)
            # model has its own law; load() of the package is a door to the commands
            if other in forbidden and name not in ('model', 'hotloop.__init__'):
                broken.append(f'{name} imports {other}')
            if folder and below and below != folder and below not in BELOW[folder]:
                broken.append(f'{name} imports {other}, and {folder}/ may not import {below}/')
            package = other.split('.')[0]
            is_mixer = other.startswith('hotloop.mixers')  # imported when a config names it
            if name == 'model' and package not in {'torch', *sys.stdlib_module_names} and not is_mixer:
                broken.append(f'model imports {other}')
            if folder == 'data' and package == 'torch':
                broken.append(f'{name} imports {other}')
    reached, waiting = set(), ['prepare']
    while waiting:
        name = waiting.pop()
        if name in SOURCES and name not in reached:
            reached.add(name)
            waiting += needs[name]
            if any(other.split('.')[0] == 'torch' for other in needs[name]):
                broken.append(f'prepare reaches {name}, which imports torch')
    try:
        graphlib.TopologicalSorter({name: needs[name] & SOURCES.keys() for name in SOURCES}).prepare()
    except graphlib.CycleError as e:
        broken.append(f'a circle of imports: {" <- ".join(e.args[1])}')
    assert broken == []
