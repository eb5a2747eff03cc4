"""
Judge answers that should be Python code: syntax accuracy, exact match and BLEU against a reference, and
pass@1 on tasks with tests. Tasks are HumanEval's (arXiv 2107.03374), MBPP's (arXiv 2108.07732), or rows of
instruction data.
"""

import ast
import contextlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import warnings
from typing import NamedTuple

from hotloop.data.chat import as_object, prompt_of, read_row
from hotloop.data.documents import open_text
from hotloop.inference.score import print_json
from hotloop.system.files import json_lines, optional, parse_json

FENCE = re.compile(r'^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)', re.DOTALL | re.MULTILINE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# These end the continuation of a bare prompt; the first are Codex's (arXiv 2107.03374).
BODY_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint', '\n```')
PROGRAM_STOPS = ('\nassert', '\nif', '\nprint', '\n"""', '\n```')


class Task(NamedTuple):
    """A task for a model."""
    name: str
    turns: list  # [(role, text)] up to the answer
    template: str  # the one that suits the turns
    prompt: str
    reference: str  # a correct answer, or ''
    entry: str = ''  # the function that the prompt begins and the answer continues, or ''
    tests: str = ''  # code that raises an exception after a wrong answer
    stops: tuple = ()  # texts that end the answer to a bare prompt


class Verdict(NamedTuple):
    """A judged answer. outcome: 'passed', why it failed, or None if its tests were not run."""
    task: Task
    seed: int
    answer: str
    code: str
    parses: bool
    outcome: str | None


# -----------------------------------------------------------------------------
# tasks

def read_tasks(path, is_chat):
    """
    Read the tasks of a .jsonl file, or of a JSON list as MBPP's sanitized-mbpp.json is. is_chat:
    questions go into a chat template; otherwise the model continues code.
    """
    with open_text(path) as f:
        text = f.read()
    rows = json_lines(text.split('\n'), path)
    if text.lstrip().startswith('['):
        rows = [(f'{path}, element {i}', row) for i, row in enumerate(parse_json(text, path), 1)]
    tasks = [read_task(row, where, is_chat) for where, row in rows]
    if not tasks:
        raise ValueError(f'{path} has no tasks')
    return tasks


def read_task(row, where, is_chat):
    """Read the Task in a row. where: file and line, for errors."""
    row = as_object(row, where)
    name = str(row.get('task_id', where))
    if {'prompt', 'test', 'entry_point'} <= row.keys():
        return humaneval_task(name, row, is_chat)
    if 'test_list' in row:
        return mbpp_task(name, row, is_chat)
    return row_task(name, row, where)


def humaneval_task(name, row, is_chat):
    question = f'Complete this Python function:\n\n{row["prompt"]}' if is_chat else row['prompt']
    tests = f'{row["test"]}\ncheck({row["entry_point"]})\n'
    return Task(name, [('user', question)], 'joined', row['prompt'], row.get('canonical_solution', ''),
                row['entry_point'], tests, BODY_STOPS)


def mbpp_task(name, row, is_chat):
    prompt = row.get('text') or row['prompt']  # the latter in sanitized-mbpp.json
    tests = '\n'.join(row['test_list'])
    question = f'"""\n{prompt}\n{tests}\n"""\n'
    if is_chat:
        question = f'{prompt}\nThe code should pass these tests:\n\n{tests}'
    setup = '\n'.join([row.get('test_setup_code') or '', *row.get('test_imports', [])])
    return Task(name, [('user', question)], 'joined', prompt, row.get('code', ''), '',
                f'{setup}\n{tests}\n', PROGRAM_STOPS)


def row_task(name, row, where):
    """Read a row of instruction data. One whose prompt ends in a function has its body as the answer."""
    reply = read_row(row, where)[1][-1:]
    if not reply or reply[0][0] != 'assistant':
        raise ValueError(f'{where}: expected a task of HumanEval (prompt, test, entry_point) or MBPP (text, '
                         f'test_list), or a row with a question and its answer, not {", ".join(row)}')
    _, turns, suited = prompt_of(row, where)
    prompt = turns[-1][1]
    tree = parse(prompt)
    if suited == 'joined' and tree and tree.body and isinstance(tree.body[-1], FUNCTIONS):
        return Task(name, turns, suited, prompt, reply[0][1], tree.body[-1].name, stops=BODY_STOPS)
    return Task(name, turns, suited, prompt, reply[0][1])


# -----------------------------------------------------------------------------
# one answer

def judge(task, seed, answer, run):
    """Judge an answer. run: run its tests, in a child process. Returns a Verdict."""
    code = first_fence(answer)
    program = complete(task, answer)
    parses = is_code(program, task.entry) and code.split() != first_fence(task.prompt).split()
    outcome = None
    if run and task.tests:
        outcome = run_program(f'{program}\n{task.tests}') if parses else 'not code'
    return Verdict(task, seed, answer, code, parses, outcome)


def first_fence(text):
    """Return the first fenced block of a text (``` to ``` or to the end), or the text itself."""
    fenced = FENCE.search(text)
    return fenced[1] if fenced else text


def complete(task, answer):
    """Return the program of an answer: after the prompt that it continues, or alone."""
    code = first_fence(answer)
    if not task.entry:
        return textwrap.dedent(code)  # A fence in a list is indented.
    if code == answer and not defines(code, task.entry):
        return task.prompt + answer
    return f'{task.prompt}\n{code}'  # A repeated function replaces the prompt's, but not its imports.


def defines(code, entry):
    return re.search(rf'^(async )?def {re.escape(entry)}\b', code, re.MULTILINE)


def is_code(program, entry=''):
    """
    Whether a program, or its function `entry`, parses and does more than pass, a word or a
    docstring.
    """
    tree = parse(program)
    if tree is None:
        return False
    body = tree.body
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.name == entry:
            body = node.body  # The last definition counts.
    return not all(does_nothing(statement) for statement in body)


def parse(code):
    """Return ast.parse(code), or None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # Python warns about strings such as '\d'.
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # null bytes and deep nesting
        return None


def does_nothing(statement):
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant | ast.Name)
    return isinstance(statement, ast.Pass)


# The child marks a complete run with its own exit status, because exit(0) ends a program before its tests.
COMPLETE = 86
CHILD = f'''
import os, resource, runpy, sys
for name, limit in (('CPU', int(sys.argv[1]) + 1), ('AS', 2**30), ('FSIZE', 2**20), ('CORE', 0)):
    if name != 'AS' or sys.platform != 'darwin':  # macOS does not limit memory.
        resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (limit, limit))
runpy.run_path('program.py', run_name='program')
os._exit({COMPLETE})
'''


def run_program(program, seconds=10):
    """
    Run a program in a child process with limits of time, memory and file size, in a temporary
    folder, with none of our environment. Returns 'passed' or why it failed. This stops accidents;
    it is not a sandbox, and does not stop a program that attacks this machine.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        with open(os.path.join(folder, 'program.py'), 'w', encoding='utf-8') as f:
            f.write(program)
        child = subprocess.Popen([sys.executable, '-I', '-B', '-c', CHILD, str(seconds)], cwd=folder,
                                 env={'OMP_NUM_THREADS': '1'}, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return f'stopped after {seconds} s'
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # All have ended.
                os.killpg(child.pid, signal.SIGKILL)  # also the processes that it started
            child.wait()
        if status == COMPLETE:
            return 'passed'
        if status < 0:
            return f'killed by {signal.Signals(-status).name}'
        errors.seek(0)
        lines = errors.read().decode('utf-8', 'replace').strip().split('\n')
        return lines[-1] or f'exit status {status} before the end'


# -----------------------------------------------------------------------------
# metrics of all answers

def wilson(rate, n):
    """Return the 95% interval (low, high) of a rate of n tasks (Wilson 1927); also at 0 and 1."""
    z = statistics.NormalDist().inv_cdf(0.975)
    center = rate + z * z / (2 * n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = (center - half) / scale if rate > 0 else 0.0  # without rounding errors
    high = (center + half) / scale if rate < 1 else 1.0
    return low, high


def bleu(verdicts):
    """
    Compute sacrebleu's BLEU from 0 to 100 and its 95% interval from 1000 bootstrap samples of the
    tasks. Returns (value, (low, high)). Raises ValueError if sacrebleu is missing.
    """
    metric = optional('sacrebleu.metrics', 'computes BLEU').BLEU(force=True)  # Code may look tokenized.
    codes = [verdict.code for verdict in verdicts]
    references = [first_fence(verdict.task.reference) for verdict in verdicts]
    score = metric.corpus_score(codes, [references], n_bootstrap=1000)
    return score.score, (max(score._mean - score._ci, 0.0), min(score._mean + score._ci, 100.0))


def print_metrics(verdicts, output):
    """Print a line for each metric of verdicts, of equally many answers to each task."""
    if output == 'text':
        print('metric  tasks  answers   value  95% interval')
    num_tasks = len({verdict.task.name for verdict in verdicts})
    referenced = [verdict for verdict in verdicts if verdict.task.reference]
    rates = {'syntax': [verdict.parses for verdict in verdicts],
             'pass@1': [verdict.outcome == 'passed' for verdict in verdicts if verdict.outcome],
             'exact': [verdict.answer.strip() == verdict.task.reference.strip() for verdict in referenced]}
    for metric, values in rates.items():
        if values:
            rate = statistics.mean(values)
            tasks = len(values) * num_tasks // len(verdicts)  # Samples of a task do not narrow the interval.
            print_metric(metric, tasks, len(values), rate, wilson(rate, tasks), output)
    if not any(verdict.parses for verdict in verdicts):
        print('note: no answer is Python code, which syntax and BLEU judge; exact compares complete answers '
              'with their references', file=sys.stderr)
    first = [verdict for verdict in referenced if verdict.seed == verdicts[0].seed]
    if first:
        try:
            print_metric('bleu', len(first), len(first), *bleu(first), output)
        except ValueError as e:
            print(f'note: no BLEU; {e}', file=sys.stderr)


def print_metric(metric, tasks, answers, value, interval, output):
    low, high = interval
    if output != 'text':
        print_json({'metric': metric, 'tasks': tasks, 'answers': answers, 'value': value, 'low': low,
                    'high': high})
    else:
        digits = 2 if metric == 'bleu' else 4
        print(f'{metric:<6}  {tasks:>5,}  {answers:>7,}  {value:>6.{digits}f}  {low:.{digits}f} to '
              f'{high:.{digits}f}')
