"""The laws of the house: imports run one way, files stay short. Read with ast, so nothing is imported."""

import ast
import functools
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = ('model', 'train', 'prepare', 'sample', 'configurator')
SOURCES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts): path.read_text(encoding='utf-8')
           for path in (*(ROOT / f'{name}.py' for name in TOP), *(ROOT / 'hotloop').glob('*.py'))}


@functools.cache
def imports(source):
    """The names that a source imports anywhere, lazy imports too: of `from a import b` both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
    return found


def broken_laws(sources):
    """One sentence for each law that sources, {module: text}, break."""
    needs = {name: imports(text) for name, text in sources.items()}
    broken = []
    for name, text in sources.items():
        is_part = name.startswith('hotloop.')
        forbidden = set(TOP) - {'configurator'} if is_part else {'train', 'prepare', 'sample'}
        broken += [f'{name} imports {other}' for other in sorted(needs[name] & forbidden)]
        lines, limit = text.count('\n'), 280 if is_part else 650
        if lines > limit:
            broken.append(f'{name} has {lines} lines, more than {limit}')
    for other in sorted(needs['model']):
        if other.split('.')[0] not in {'torch', *sys.stdlib_module_names}:
            broken.append(f'model imports {other}')
    reached, waiting = set(), ['prepare']
    while waiting:
        name = waiting.pop()
        if name in sources and name not in reached:
            reached.add(name)
            waiting += needs[name]
            if any(other.split('.')[0] == 'torch' for other in needs[name]):
                broken.append(f'prepare reaches {name}, which imports torch')
    try:
        graphlib.TopologicalSorter({name: needs[name] & sources.keys() for name in sources}).prepare()
    except graphlib.CycleError as e:
        broken.append(f'a circle of imports: {" <- ".join(e.args[1])}')
    return broken


def test_the_laws_hold():
    assert broken_laws(SOURCES) == []


@pytest.mark.parametrize('name, line, words', [
    ('hotloop.files', 'import model', 'hotloop.files imports model'),
    ('sample', 'from train import Run', 'sample imports train'),
    ('model', 'import numpy as np', 'model imports numpy'),
    ('model', 'from hotloop.files import lock', 'model imports hotloop.files'),
    ('hotloop.host', 'def f():\n    from torch import nn', 'prepare reaches hotloop.host, which'),
    ('hotloop.files', 'from hotloop import tokenizer', 'a circle of imports'),
    ('hotloop.bpe', '\n' * 280, 'hotloop.bpe has'), ('model', '\n' * 650, 'model has')])
def test_a_broken_law_is_found(name, line, words):
    planted = SOURCES | {name: f'{SOURCES[name]}{line}\n'}
    new = set(broken_laws(planted)) - set(broken_laws(SOURCES))
    assert any(sentence.startswith(words) for sentence in new), new
