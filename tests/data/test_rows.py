"""Python functions as rows for tuning."""

import ast
import json

import pytest

import prepare
from configurator import SettingsError
from hotloop.data.dataset import read_meta
from hotloop.data.holdout import holdout_hash
from hotloop.data.rows import functions_of

SOURCE = '''
@cache
def area(w, h):
    """The area."""

    # of a rectangle
    return w * h

class Shape:
    async def grow(
            self, by):
        """
        Grows.
        """
        self.w += by  # in place
        def inner(x):
            """Inner."""
            return x
        return inner

    def undocumented(self):
        return 1

    def abstract(self):
        """Only a docstring."""

    def one_line(self): "doc"; return 1

    def margin(self):
        """A string at
margin."""
        return 1
'''


def test_documented_functions_become_prompts_and_bodies():
    """Without decorators, at the margin; functions without a body of their own are left out."""
    rows = list(functions_of(SOURCE))
    assert [row['prompt'] for row in rows] == [
        'def area(w, h):\n    """The area."""',
        'async def grow(\n        self, by):\n    """\n    Grows.\n    """',
        'def inner(x):\n    """Inner."""']
    assert [row['completion'] for row in rows] == [
        '\n\n    # of a rectangle\n    return w * h\n',
        '\n    self.w += by  # in place\n    def inner(x):\n        """Inner."""\n        return x\n'
        '    return inner\n',
        '\n    return x\n']
    for row in rows:
        ast.parse(row['prompt'] + row['completion'])


@pytest.mark.parametrize('before', ['\f\n', '"\u2028"\n', ''])
@pytest.mark.parametrize('newline', ['\n', '\r\n', '\r'])
def test_lines_are_those_that_python_counts(recwarn, before, newline):
    source = before + 'def f():\n    "A\fdocstring."\n    return "\\d"\n'
    rows = list(functions_of(source.replace('\n', newline)))
    assert rows == [{'prompt': 'def f():\n    "A\fdocstring."', 'completion': '\n    return "\\d"\n'}]
    assert not recwarn.list


def test_functions_of_a_file_are_held_out_together(tmp_path, monkeypatch, capsys):
    """The held-out files are those of the same texts, so a model of the texts has not seen them."""
    monkeypatch.chdir(tmp_path)
    for i in range(20):
        body = ''.join(f'def f{n}():\n    """File {i}."""\n    return {n}\n' for n in range(1 + i % 3))
        (tmp_path / 'code').mkdir(exist_ok=True)
        (tmp_path / 'code' / f'm{i}.py').write_text(body)
    for i, text in enumerate(('print "2"', 'def f(:', 'x = "\0"')):
        (tmp_path / 'code' / f'not{i}.py').write_text(text)
    (tmp_path / 'code' / 'notes.txt').write_text('not code')
    prepare.main(['code', '--format=functions', '--name=rows'])
    out = capsys.readouterr().out
    assert 'skipped 3 files that this Python cannot parse: code/not0.py: ' in out
    assert 'prompt-completion pairs) in the joined template' in out and 'note:' not in out
    lines = (tmp_path / 'data' / 'rows' / 'val.jsonl').read_text().splitlines()
    held = [json.loads(line) for line in lines]
    files = {row['prompt'].split('File ')[1].split('.')[0] for row in held}
    hashes = sorted(holdout_hash(f'm{i}.py', 1337) for i in range(20))
    assert 0 < len(files) < 10 and {holdout_hash(f'm{i}.py', 1337) for i in files} <= set(hashes[:5])
    assert all(len([row for row in held if f'File {i}.' in row['prompt']]) == 1 + int(i) % 3 for i in files)
    (tmp_path / 'data' / 'rows' / 'val.jsonl').unlink()
    prepare.main(['code', '--format=functions', '--name=rows'])
    assert (tmp_path / 'data' / 'rows' / 'val.jsonl').exists()
    prepare.main(['code', '--format=functions', '--text_field=completion', '--name=bodies'])
    val = read_meta('data/bodies')['splits']['val']
    assert val['documents'] == len(held) and val['bytes'] == sum(len(row['completion']) for row in held)
    prepare.main(['--inspect', 'rows'])
    assert 'val: ' in capsys.readouterr().out


def test_held_out_rows_with_answers_are_kept_as_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{'instruction': f'Add {i} and 1.', 'output': f'{i} + 1'} for i in range(50)]
    rows += [{'messages': [{'role': 'user', 'content': 'Hi.'}]}, {'text': 'no task'}]
    (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    prepare.main(['rows.jsonl'])
    held = [json.loads(line) for line in (tmp_path / 'data' / 'rows' / 'val.jsonl').read_text().splitlines()]
    assert 0 < len(held) < 20 and all(row in rows[:50] for row in held)
    assert read_meta('data/rows')['splits']['val']['documents'] - len(held) in (0, 1)  # the text
    (tmp_path / 'more.jsonl').write_bytes((tmp_path / 'rows.jsonl').read_bytes())
    prepare.main(['rows.jsonl', '--val=more.jsonl', '--name=all'])
    assert len((tmp_path / 'data' / 'all' / 'val.jsonl').read_text().splitlines()) == 50


def test_long_functions_are_left_out_of_training_and_judging(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i in range(8):
        short = f'def f{i}():\n    """Number {i}."""\n    return {i}\n'
        (tmp_path / f'm{i}.py').write_text(short + short.replace('Number', 'A number with more words'))
    prepare.main(['.', '--format=functions', '--name=rows', f'--max_function={len(short)}'])
    assert 'left out 8 functions longer than max_function' in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / 'data' / 'rows' / 'val.jsonl').read_text().splitlines()]
    assert rows and all('more words' not in row['prompt'] for row in rows)
    with pytest.raises(SettingsError, match='max_function=700 must be at least 1, and applies only'):
        prepare.main(['.', '--max_function=700'])
