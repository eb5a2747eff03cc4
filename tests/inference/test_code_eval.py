"""Judged answers: what counts as code, which part of an answer that is, programs of tasks, metrics."""

import gzip
import json

import pytest
from conftest import error_of
from test_sample import gpt, main, play, write

from hotloop.data.tokenizer import ByteTokenizer
from hotloop.inference.code_eval import bleu, code_of, is_code, judge, metrics_of, task_of, wilson

ADD = {'task_id': 'T/0', 'prompt': 'import math\n\n\ndef add(a, b):\n    """The sum."""\n',
       'entry_point': 'add', 'canonical_solution': '    return a + b\n',
       'test': 'def check(f):\n    assert f(2, 3) == 5\n'}
SQUARE = {'task_id': 2, 'text': 'Write a function that squares.', 'code': 'def sq(x):\n    return x * x',
          'test_setup_code': 'import math', 'test_list': ['assert sq(3) == math.pow(3, 2)']}


@pytest.mark.parametrize('code', [
    'x = 1', 'print("a")', 'def f():\n    return 1', 'class A:\n    x = 1', 'async def f():\n    await g()',
    '"\\d"\nx: int = 2', 'while False:\n    pass'])
def test_code_parses_and_does_something(code, recwarn):
    assert is_code(code, 'Write a function.') and not recwarn


@pytest.mark.parametrize('code', [
    '', '\n', 'pass', '...', '"""text"""', '# text', 'code', 'state-of-the-art', 'Answer: yes', 'import os',
    'def f():\n    """Text."""', 'def f():\n    pass', 'class A:\n    ...', 'def f(:', 'Here is it:', '\0',
    '(' * 500, ADD['prompt'], 'Write(a)\n'])
def test_what_parses_by_accident_is_not_code(code):
    """Prose, empty bodies, and a copy of the prompt, also of one that is itself code."""
    assert not is_code(code, 'Write(a)')
    assert not is_code('x = 1', 'Shorten:\n```python\nx  =  1\n```')


@pytest.mark.parametrize('answer, code', [
    ('x = 1\n', 'x = 1'), ('Sure:\n```python\nx = 1\n```\nand\n```\ny\n```', 'x = 1'),
    ('```\nx = 1', 'x = 1'), ('  ```py\n  x = 1\n    y\n  ```', 'x = 1\n  y'), ('    return 1\n', 'return 1'),
    ('    return 1\n\n    # end\n\nadd(1)\n', 'return 1\n\n# end'),
    ('\n    return 1\n\ndef g(): 1', 'return 1'),
    ('    x = """\na\n  b\n"""\n    return (\n1)\n\nadd(1)', 'x = """\na\n  b\n"""\nreturn (\n1)'),
    ('    return (\n\nadd(1)', 'return ('), ('\n# c\n    return 1\n', '# c\nreturn 1'),
    ('return 1\nx', 'return 1\nx'), ('```\n    return 1\nadd(1)\n```', 'return 1'),
    ('def add(a):\n    return 1\nprint(2)', 'def add(a):\n    return 1\nprint(2)'),
    ('    def add(a):\n        return 1\n', 'def add(a):\n    return 1')])
def test_the_code_of_an_answer_to_humaneval(answer, code):
    """A fenced block before everything else; the body up to the first new statement at the top level."""
    assert code_of(answer, 'add') == code


@pytest.mark.parametrize('answer, outcome', [
    ('    return a + b\n\nadd(1)', 'passed'), ('return a + b', 'passed'),
    ('    c = """\n    x\ny"""\n    return a + b - (c != "\\n    x\\ny")\n\nadd(1)', 'passed'),
    ('```python\ndef add(a, b):\n    return math.fsum([a, b])\n```', 'passed'),
    ('    return a - b', 'AssertionError'), ('    exit()', 'SystemExit'),
    ('    pass', 'not code'), ('', 'not code'), (ADD['prompt'], 'not code'), ('    return (', 'not code')])
def test_an_answer_passes_if_its_program_and_the_tests_run(answer, outcome):
    """The prompt's imports are in it. Tests of what is not code are not run."""
    verdict = judge(task_of(ADD, 'line 1', False), 7, answer, run=True)
    assert verdict.outcome.split(':')[0] == outcome and verdict.parses == (outcome != 'not code')
    assert judge(verdict.task, 7, answer, run=False)._replace(outcome=outcome) == \
        verdict._replace(outcome=outcome)


@pytest.mark.parametrize('space', ['  ', '\t', '    ', '        '])
@pytest.mark.parametrize('end', ['', '\n{space}', '\n', '\n  {space}', None])
def test_a_body_is_indented_as_its_prompt(space, end):
    """By the place of the docstring, if it has one. The answer may have any indentation, or the function."""
    text = '' if end is None else f'{space}"""Adds.\n\n{space}add(1, 1) is 2.{end.format(space=space)}"""\n'
    task = task_of({**ADD, 'prompt': f'def add(a, b):\n{text}'}, 'line 1', False)
    for answer in (f'{space}return a + b\n', 'total = a + b\nreturn total', '   return a + b',
                   '```python\ndef add(a, b):\n    return a + b\n```'):
        assert judge(task, 7, answer, run=True).outcome == 'passed'


@pytest.mark.parametrize('text', ['', '        """Adds."""\n'])
def test_a_method_is_completed_in_its_class(text):
    method = f'class A:\n    x = 1\n\n    def add(self, a, b):  # a sum\n{text}'
    test = 'def check(f): assert A().add(2, 3) == 5\nadd = A'
    task = task_of({**ADD, 'prompt': method, 'test': test}, 'line 1', False)
    assert judge(task, 7, '        return a + b\n', run=True).outcome == 'passed'


def test_mbpp_has_a_list_of_tests():
    """With their imports: test_setup_code in the complete set, test_imports in the sanitized one."""
    task = task_of(SQUARE, 'line 1', False)
    assert judge(task, 0, SQUARE['code'], True).outcome == 'passed'
    assert judge(task, 0, 'def sq(x):\n    return x', True).outcome == 'AssertionError'
    sanitized = {**SQUARE, 'test_setup_code': None, 'test_imports': ['import math'], 'prompt': 'Square.'}
    assert judge(task_of(sanitized, 'line 1', True), 0, SQUARE['code'], True).outcome == 'passed'


def test_the_question_of_a_task():
    """In a chat template an instruction; otherwise code to continue. Instruction data keeps its fields."""
    (_, bare), (_, chat) = (task_of(ADD, '', is_chat).turns[0] for is_chat in (False, True))
    assert bare == ADD['prompt'] and chat == f'Complete this Python function:\n\n{bare}'
    (_, bare), (_, chat) = (task_of(SQUARE, '', is_chat).turns[0] for is_chat in (False, True))
    assert bare == f'"""\n{SQUARE["text"]}\n{SQUARE["test_list"][0]}\n"""\n'
    assert chat == f'{SQUARE["text"]}\nThe code should pass these tests:\n\n{SQUARE["test_list"][0]}'
    for row in ({'instruction': 'Do', 'input': 'it', 'output': 'x'}, {'prompt': 'it', 'answer': 'x'},
                {'messages': [{'role': 'user', 'content': 'it'}, {'role': 'assistant', 'content': 'x'}]}):
        task = task_of(row, 'a.jsonl, line 3', True)
        assert task[4:] == ('x', '', '', ()) and task.prompt == task.turns[-1][1] == 'it'
        assert task.name == 'a.jsonl, line 3' and judge(task, 0, 'x = 1', True).outcome is None


def test_a_row_whose_prompt_begins_a_function_has_a_body_as_its_answer():
    """As prepare.py --format=functions writes them to val.jsonl."""
    row = {'prompt': ADD['prompt'], 'completion': ADD['canonical_solution']}
    task = task_of(row, 'line 1', False)
    assert task.entry == 'add' and '\ndef' in task.stops and task.reference == row['completion']
    verdict = judge(task, 0, '    return a + b\n\nprint(add(1, 2))', False)
    assert verdict.code == 'return a + b' and verdict.parses
    for prompt in ('Add two numbers', 'add', 'import math', ''):
        task = task_of({'prompt': prompt, 'completion': 'x'}, 'line 1', False)
        assert (task.entry, task.stops) == ('', ())


@pytest.mark.parametrize('row, words', [
    ({'prompt': 'hi'}, 'line 4: expected a task of HumanEval (prompt, test, entry_point) or MBPP'),
    ({'messages': []}, 'its fields are: messages'),
    ({'messages': [{'role': 'user', 'content': 'hi'}]}, 'a row with a question and its answer; its fields'),
    ({**ADD, 'test': 3}, "line 4: field 'test' must be a string, not 3"),
    (3, 'line 4: a row must be an object'),
    ({**SQUARE, 'test_list': 'assert 1'}, 'must be lists of strings, not "assert 1"'),
    ({**SQUARE, 'test_imports': [1]}, 'line 4: test_list and test_imports must be lists of strings, not [1]'),
    ({**SQUARE, 'test_list': []}, 'must be lists of strings, not []')])
def test_a_row_that_is_not_a_task_is_refused(row, words):
    assert words in error_of(task_of, row, 'line 4', False)


def test_intervals_are_wilsons():
    assert wilson(0, 5)[0] == 0 and wilson(1, 5)[1] == 1
    for rate, n, low, high in ((0, 10, 0, 0.27753), (0.5, 10, 0.23659, 0.76341), (1, 164, 0.97711, 1)):
        assert wilson(rate, n) == pytest.approx((low, high), abs=1e-5)


def test_bleu_is_sacrebleus():
    """Of the code, in a fence or not. A repeated prompt adds nothing."""
    sacrebleu = pytest.importorskip('sacrebleu')
    fenced = {'prompt': 'p', 'answer': 'Yes:\n```\nx = [1, 2]\n```'}
    rows = [ADD, SQUARE, fenced, {'prompt': 'q', 'answer': 'y = 3'}]
    answers = ['    return a + c\n', SQUARE['code'], '```\nx = [1, 3]\n```', '']
    tasks = [task_of(row, 'line 1', False) for row in rows]
    value, low, high = bleu([judge(*pair, False) for pair in
                             ((task, 0, answer) for task, answer in zip(tasks, answers, strict=True))])
    references = ['return a + b', SQUARE['code'], 'x = [1, 2]', 'y = 3']
    expected = sacrebleu.corpus_bleu(['return a + c', *answers[1:2], 'x = [1, 3]', ''], [references])
    assert value == pytest.approx(expected.score) and low < value < high
    complete = judge(tasks[0], 0, ADD['prompt'] + '    return a + b', False)
    assert bleu([complete])[0] == pytest.approx(100) and bleu([complete._replace(code=ADD['prompt'])])[0] == 0


def test_samples_of_one_task_do_not_narrow_the_interval():
    """Its answers are alike. BLEU is of the first sample."""
    tasks = [task_of({**ADD, 'task_id': i}, '', False) for i in range(10)]
    verdicts = [judge(task, seed, '    return 1', False)._replace(outcome='passed' if seed == 6 else 'no')
                for task in tasks for seed in (5, 6)]
    rows = {row[0]: row for row in metrics_of(verdicts)}
    assert rows['syntax'][1:4] == (10, 20, 1) and rows['pass@1'] == ('pass@1', 10, 20, 0.5, *wilson(0.5, 10))
    if 'bleu' in rows:
        assert rows['bleu'][1:3] == (10, 10)


def test_a_missing_sacrebleu_is_named(monkeypatch, capsys):
    monkeypatch.setattr('hotloop.system.files.find_spec', lambda package: None)
    assert [row[0] for row in metrics_of([judge(task_of(ADD, '', False), 0, '', False)])] == ['syntax']
    assert 'note: no BLEU; sacrebleu computes BLEU: pip install sacrebleu\n' in capsys.readouterr().err


@pytest.fixture
def tasks(tmp_path):
    """A run folder and a compressed file of two tasks."""
    (tmp_path / 'out').mkdir()
    path = tmp_path / 'tasks.jsonl.gz'
    path.write_bytes(gzip.compress('\n\n'.join(map(json.dumps, (ADD, {**ADD, 'task_id': 'T/1'}))).encode()))
    return path


@pytest.mark.parametrize('template, before', [
    ('none', ''), ('alpaca', '### Instruction:\nComplete this Python function:\n\n')])
def test_the_command_judges_greedy_answers_in_the_template(tasks, monkeypatch, capsys, template, before):
    """Of the model's data. A bare prompt's answer ends before a new function."""
    out = tasks.parent / 'out'
    write(out / 'best.pt', gpt(257, block_size=512), ByteTokenizer(), template=template)
    calls = play(monkeypatch, *b'    return a + b\n\ndef f(): pass\n')
    main(out_dir=out, eval_code=tasks, run_code=True, output='jsonl')
    first, second, *metrics = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first['task'], second['task'], first['seed'], first['outcome']) == ('T/0', 'T/1', 1337, 'passed')
    assert first['code'] == 'return a + b' and ('def f' in first['answer']) == (template == 'alpaca')
    assert metrics[0] == {'metric': 'syntax', 'tasks': 2, 'answers': 2, 'value': 1.0,
                          'low': pytest.approx(0.3424, abs=1e-4), 'high': 1.0}
    assert metrics[1]['metric'] == 'pass@1' and calls[0].sampling.temperature == 0
    assert before + ADD['prompt'] in ByteTokenizer().decode(calls[0].prompts[0]).decode()


def test_an_answer_ends_at_the_stops_of_its_own_task(tasks, monkeypatch, capsys):
    out, answer = tasks.parent / 'out', '    return 1\n\ndef sq(x): return x * x\n'
    write(out / 'best.pt', gpt(257, block_size=512), ByteTokenizer())
    rows = ADD, {'prompt': '# A function that squares\n', 'completion': 'x'}
    tasks.write_bytes(gzip.compress('\n'.join(map(json.dumps, rows)).encode()))
    play(monkeypatch, *answer.encode())
    main(out_dir=out, eval_code=tasks, output='jsonl')
    first, second, *_ = map(json.loads, capsys.readouterr().out.splitlines())
    assert first['answer'] == '    return 1\n' and second['answer'] == answer


def test_the_table_and_explicit_sampling(tasks, monkeypatch, capsys):
    """Answers are not run unless --run_code asks for it. The file is one list, as the sanitized MBPP is."""
    out = tasks.parent / 'out'
    tasks.write_bytes(gzip.compress(json.dumps([ADD, {**ADD, 'task_id': 'T/1'}], indent=2).encode()))
    write(out / 'best.pt', gpt(257, block_size=512), ByteTokenizer())
    calls = play(monkeypatch, *b'    exit()')
    main(out_dir=out, eval_code=tasks, temperature=0.5, batch_size=3)
    printed, err = capsys.readouterr()
    lines = printed.splitlines()
    assert lines[0] == 'metric  tasks  answers   value  95% interval'
    assert lines[1] == 'syntax      2        6  1.0000  0.3424 to 1.0000 (Wilson)' and 'pass@1' not in printed
    assert [call.sampling.temperature for call in calls] == [0.5, 0.5]
    assert '3 answers to 2 tasks\n6 answers to 2 tasks\n' in err


@pytest.mark.parametrize('content, flags, words', [
    (b'', {}, 'tasks.jsonl has no tasks'),
    (b'{"prompt": "a", "answer": "b"}', dict(run_code=True), 'tasks.jsonl has no tests to run'),
    (b'{"instruction": "a", "output": "b"}', {}, 'tasks.jsonl has a chat or an instruction, which needs'),
    (b'[]', {}, 'tasks.jsonl has no tasks'), (b'[3]', {}, 'tasks.jsonl, element 1: a row must be an object'),
    (b'{', {}, 'tasks.jsonl, line 1 is not JSON'), (b'"\xff"', {}, 'is not UTF-8 text'),
    (b'"\xff"', dict(bad_utf8='replace'), 'line 1: expected a task of HumanEval'),
    (None, {}, 'tasks.jsonl cannot be read: No such file')])
def test_a_file_without_tasks_is_refused(tasks, content, flags, words):
    path, out = tasks.with_suffix(''), tasks.parent / 'out'
    write(out / 'best.pt', gpt(257), ByteTokenizer())
    if content is not None:
        path.write_bytes(content)
    assert words in error_of(main, out_dir=out, eval_code=path, **flags)


def test_running_code_needs_tasks_and_limits(tasks, monkeypatch):
    assert 'run_code=True needs eval_code' in error_of(main, run_code=True)
    monkeypatch.setattr('sample.os.name', 'nt')
    assert 'run_code=True needs Linux or macOS' in error_of(main, run_code=True, eval_code='a.jsonl')
