"""Judged answers: what counts as code, programs of tasks, what their processes may do, metrics."""

import gzip
import json
import sys

import pytest
from conftest import error_of
from test_sample import gpt, main, play, write

from hotloop.data.tokenizer import ByteTokenizer
from hotloop.inference.code_eval import (
    bleu,
    first_fence,
    is_code,
    judge,
    print_metrics,
    read_task,
    read_tasks,
    run_program,
    wilson,
)

ADD = {'task_id': 'T/0', 'prompt': 'import math\n\n\ndef add(a, b):\n    """The sum."""\n',
       'entry_point': 'add', 'canonical_solution': '    return a + b\n',
       'test': 'def check(f):\n    assert f(2, 3) == 5\n'}
SQUARE = {'task_id': 2, 'text': 'Write a function that squares.', 'code': 'def sq(x):\n    return x * x',
          'test_setup_code': 'import math', 'test_list': ['assert sq(3) == math.pow(3, 2)']}
SANITIZED = {'prompt': 'Square.', 'test_imports': ['import math'], 'test_list': SQUARE['test_list']}
SHORTEN = {'prompt': 'Shorten:\n```python\nx  =  1\n```', 'answer': 'x=1'}


@pytest.mark.parametrize('code, expected', [
    ('x = 1', True), ('print("a")', True), ('def f():\n    return 1', True), ('"\\d"\nx: int = 2', True),
    ('', False), ('\n', False), ('pass', False), ('...', False), ('"""text"""', False), ('# text', False),
    ('code', False), ('Answer: yes', False), ('yes, no', False), ('import os', False), ('lambda x: x', True),
    ('def f(:', False), ('Here is it:', False), ('\0', False), ('(' * 500, False)])
def test_code_parses_and_does_something(code, expected, recwarn):
    assert is_code(code) == expected and not recwarn


@pytest.mark.parametrize('answer, code', [
    ('x = 1\n', 'x = 1\n'), ('Sure:\n```python\nx = 1\n```\nand\n```\ny\n```', 'x = 1\n'),
    ('```\nx = 1', 'x = 1'), ('  ```py\n  x = 1\n    y\n  ```', '  x = 1\n    y\n')])
def test_the_first_fenced_block_is_the_code(answer, code):
    assert first_fence(answer) == code


@pytest.mark.parametrize('row, answer, outcome', [
    (ADD, '    return a + b\n', 'passed'), (ADD, '```\n    return a + b\n```', 'passed'),
    (ADD, '```python\ndef add(a, b):\n    return math.fsum([a, b])\n```', 'passed'),
    (ADD, 'def add(a, b):\n    return a + b', 'passed'), (ADD, '    return a - b', 'AssertionError'),
    (ADD, '    exit()', 'exit status 0 before the end'), (ADD, '    pass', 'not code'), (ADD, '', 'not code'),
    (ADD, '    """Text."""\n    ...', 'not code'), (ADD, ADD['prompt'], 'not code'),
    (ADD, '    return (', 'not code'), (SQUARE, SQUARE['code'], 'passed'),
    (ADD, '<think>\n```\na\n```</think>\n- so:\n  ```\n  def add(a, b):\n    return a + b\n  ```', 'passed'),
    (SANITIZED, SQUARE['code'], 'passed'), (SQUARE, 'def sq(x):\n    return x', 'AssertionError'),
    (SHORTEN, 'x = 1', 'not code'), (SHORTEN, 'x = 2', None)])
def test_an_answer_passes_if_its_program_and_the_tests_run(row, answer, outcome):
    """Imports of the prompt or the tests are in it. Tests of what is not code are not run."""
    verdict = judge(read_task(row, 'line 1', False), 7, answer, run=True)
    assert verdict.outcome == (None if row is SHORTEN else outcome)
    assert verdict.parses == (outcome != 'not code')
    assert judge(verdict.task, 7, answer, run=False).outcome is None


@pytest.mark.parametrize('row', [
    {**SQUARE, 'test_list': 'assert sq(3) == 9'}, {**SQUARE, 'test_imports': 'import math'},
    {**SQUARE, 'test_list': None}, {**ADD, 'prompt': 3}])
def test_a_task_of_the_wrong_types_is_named(row):
    """A text of tests would be joined by its characters."""
    assert error_of(read_task, row, 'line 7', False).startswith('line 7: ')


def test_the_question_of_a_task():
    """It is an instruction in a chat template, otherwise code to continue. Rows keep their fields."""
    bare, chat = [read_task(ADD, '', is_chat).turns[0][1] for is_chat in (False, True)]
    assert bare == ADD['prompt'] and chat.endswith(f'\n\n{bare}')
    bare, chat = [read_task(SQUARE, '', is_chat).turns[0][1] for is_chat in (False, True)]
    assert bare == f'"""\n{SQUARE["text"]}\n{SQUARE["test_list"][0]}\n"""\n'
    assert chat == f'{SQUARE["text"]}\nThe code should pass these tests:\n\n{SQUARE["test_list"][0]}'
    for row in ({'instruction': 'Do', 'input': 'it', 'output': 'x'}, {'prompt': 'it', 'answer': 'x'},
                {'messages': [{'role': 'user', 'content': 'it'}, {'role': 'assistant', 'content': 'x'},
                              {'role': 'user', 'content': 'and'}], 'test_list': None}):
        task = read_task(row, 'a.jsonl, line 3', True)
        assert task[4:] == ('x', '', '', ()) and task.prompt == task.turns[-1][1] == 'it'
        assert task.name == 'a.jsonl, line 3'


def test_a_row_whose_prompt_begins_a_function_has_a_body_as_its_answer():
    """prepare.py --format=functions writes such rows to val.jsonl."""
    prompt = ADD['prompt'].rstrip()
    task = read_task({'prompt': prompt, 'completion': '\n    return a + b'}, 'line 1', False)
    assert task.entry == 'add' and '\ndef' in task.stops
    assert judge(task, 0, '\n    return a + b\n', False).parses
    assert not judge(task, 0, '\n    return (', False).parses
    for prompt in ('Add two numbers', 'add', 'import math', ''):
        task = read_task({'prompt': prompt, 'completion': 'x'}, 'line 1', False)
        assert (task.entry, task.stops) == ('', ())


@pytest.mark.parametrize('row', [{'prompt': 'hi'}, {'messages': []}, 3, {'entry_point': 'f', 'test': ''},
                                 {'messages': [{'role': 'user', 'content': 'hi'}]}])
def test_a_row_that_is_not_a_task_is_refused(row):
    assert 'line 4' in error_of(read_task, row, 'line 4', False)


@pytest.mark.parametrize('program, reason', [
    ('import numpy\nassert numpy.ones(3).sum() == 3', 'passed'), ('print("x" * 10**5)', 'passed'),
    ('open("a.txt", "w").close()', 'passed'), ('if __name__ == "__main__":\n    1 / 0', 'passed'),
    ('from dataclasses import dataclass\n@dataclass\nclass A:\n    x: "int"', 'passed'),
    ('import os\nassert not os.environ.get("HOME") and os.listdir(".") == ["program.py"]', 'passed'),
    ('assert 1 == 2, "no"', 'AssertionError: no'), ('def', 'SyntaxError: invalid syntax'),
    ('exit(0)', 'exit status 0'), ('import os\nos._exit(1)', 'exit status 1'),
    ('input()', 'EOFError'), ('def f(): return f()\nf()', 'RecursionError'),
    ('import os\nos.kill(os.getpid(), 11)', 'exit status -11'),
    pytest.param('while True: pass', 'stopped after 1 s', marks=pytest.mark.slow),
    ('x = "a" * 2**33', 'MemoryError'),
    ('open("a", "wb").write(bytes(2 * 10**6))', 'OSError: [Errno 27]')])
def test_a_program_that_fails_or_exceeds_a_limit_gives_its_reason(program, reason):
    """Leaving before the tests is a failure, whatever the exit status."""
    assert run_program(program, seconds=1 if 'stopped' in reason else 10).startswith(reason)


def test_intervals_are_wilsons():
    for rate, n, low, high in ((0, 10, 0, 0.27753), (0.5, 10, 0.23659, 0.76341), (1, 164, 0.97711, 1)):
        assert wilson(rate, n) == pytest.approx((low, high), abs=1e-5)


def test_bleu_is_sacrebleus():
    """It compares the code, in a fence or not."""
    sacrebleu = pytest.importorskip('sacrebleu')
    rows = [ADD, SQUARE, {'prompt': 'p', 'answer': 'Yes:\n```\nx = [1, 2]\n```'}]
    answers = ['    return a + c\n', SQUARE['code'], '```\nx = [1, 3]\n```']
    verdicts = []
    for row, answer in zip(rows, answers, strict=True):
        verdicts.append(judge(read_task(row, 'line 1', False), 0, answer, False))
    value, low, high = bleu(verdicts)
    references = ['return a + b', SQUARE['code'], 'x = [1, 2]']
    expected = sacrebleu.corpus_bleu(['return a + c', SQUARE['code'], 'x = [1, 3]'], [references])
    assert value == pytest.approx(expected.score) and low < value < high


def test_samples_of_one_task_do_not_narrow_the_interval(monkeypatch, capsys):
    """BLEU is that of the first sample, where sacrebleu is installed."""
    tasks = [read_task({**ADD, 'task_id': i}, '', False) for i in range(10)]
    verdicts = [judge(task, seed, '    return 1', False)._replace(outcome='passed' if seed == 6 else 'no')
                for task in tasks for seed in (5, 6)]
    print_metrics(verdicts, 'jsonl')
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    syntax, passed, exact, *bleu = [list(line.values()) for line in lines]
    assert syntax[:4] == ['syntax', 10, 20, 1]
    assert passed == ['pass@1', 10, 20, 0.5, *wilson(0.5, 10)] and exact[:4] == ['exact', 10, 20, 0]
    assert all(row[:3] == ['bleu', 10, 10] for row in bleu)
    monkeypatch.setitem(sys.modules, 'sacrebleu.metrics', None)
    answer = ADD['canonical_solution']
    print_metrics([verdict._replace(parses=False, answer=answer) for verdict in verdicts], 'text')
    printed, err = capsys.readouterr()
    assert printed.splitlines()[-1].split() == ['exact', '10', '20', '1', '0.72247', '1']
    assert 'pip install sacrebleu' in err


@pytest.fixture
def tasks(tmp_path):
    """Write a compressed file of two tasks beside a run folder."""
    (tmp_path / 'out').mkdir()
    path = tmp_path / 'tasks.jsonl.gz'
    path.write_bytes(gzip.compress('\n\n'.join(map(json.dumps, (ADD, {**ADD, 'task_id': 'T/1'}))).encode()))
    return path


@pytest.mark.parametrize('template, before', [
    ('none', ''), ('alpaca', '### Instruction:\nComplete this Python function:\n\n')])
def test_the_command_judges_greedy_answers_in_the_template(tasks, monkeypatch, capsys, template, before):
    """A bare prompt's answer ends before a new function."""
    out = tasks.parent / 'out'
    write(out / 'best.pt', gpt(257, block_size=512), ByteTokenizer(), template=template)
    calls = play(monkeypatch, *b'    return a + b\n\ndef f(): pass\n')
    main(out_dir=out, eval_code=tasks, run_code=True, output='jsonl')
    first, second, *metrics = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first['task'], second['task'], first['seed'], first['outcome']) == ('T/0', 'T/1', 1337, 'passed')
    assert ('def f' in first['answer']) == (template == 'alpaca')
    assert metrics[0] == {'metric': 'syntax', 'tasks': 2, 'answers': 2, 'value': 1.0,
                          'low': pytest.approx(0.3424, abs=1e-4), 'high': 1.0}
    assert metrics[1]['metric'] == 'pass@1' and calls[0].sampling.temperature == 0
    assert before + ADD['prompt'] in ByteTokenizer().decode(calls[0].prompts[0]).decode()
    main(out_dir=out, eval_code=tasks)
    assert 'pass@1' not in capsys.readouterr().out  # no program is run


def test_tasks_in_parquet_are_those_of_the_lines(tmp_path):
    """As the hub publishes HumanEval and MBPP."""
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    for rows in ([ADD, ADD], [SQUARE]):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'a.parquet')
        assert read_tasks(str(tmp_path / 'a.parquet'), False) == [read_task(row, '', False) for row in rows]


@pytest.mark.parametrize('content, flags, words', [
    (b'', {}, 'has no tasks'),
    (b'{"prompt": "a", "answer": "b"}', dict(run_code=True), 'run_code=True needs tests'),
    (b'{"instruction": "a", "output": "b"}', {}, '--template'), (None, {}, 'No such file')])
def test_a_file_without_tasks_is_refused(tasks, content, flags, words):
    path = tasks.with_suffix('')
    write(tasks.parent / 'out' / 'best.pt', gpt(257), ByteTokenizer())
    if content is not None:
        path.write_bytes(content)
    assert words in error_of(main, out_dir=tasks.parent / 'out', eval_code=path, **flags)
