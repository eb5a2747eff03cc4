"""
Judge Python code: syntax, exact match and BLEU against a reference, pass@1 on tasks with tests. Tasks
are HumanEval's (arXiv 2107.03374), MBPP's (arXiv 2108.07732), or rows of instruction data.
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

from hotloop.data.chat import as_object, check_text, first_of, read_row, text_of
from hotloop.data.documents import rows_in
from hotloop.data.sources import open_file
from hotloop.inference.score import print_row
from hotloop.system.files import optional

FENCE = re.compile(r'^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)', re.DOTALL | re.MULTILINE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# what expressions of code have, unlike prose
ACTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.comprehension, ast.NamedExpr)
# These end the continuation of a bare prompt; the first are Codex's (arXiv 2107.03374).
BODY_STOPS = ('\nclass', '\ndef', '\n@', '\n#', '\nif', '\nprint', '\n```')
PROGRAM_STOPS = ('\nassert', '\nif', '\nprint', '\n"""', '\n```')
METRIC = ('metric', 'tasks', 'answers', 'value', 'low', 'high')


class Task(NamedTuple):
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
    """Read the tasks of a file of rows. is_chat: ask questions, do not begin code."""
    tasks = [read_task(row, where, is_chat) for where, row in rows_in(open_file(path, path))]
    if not tasks:
        raise ValueError(f'{path} has no tasks')
    return tasks


def read_task(row, where, is_chat):
    """Read the Task in a row. where: file and line, for errors."""
    row = as_object(row, where)
    name = str(row.get('task_id', where))
    if {'entry_point', 'prompt', 'test'} <= row.keys():
        prompt = check_text(row['prompt'], f'{where}: prompt')
        question = f'Complete this Python function:\n\n{prompt}' if is_chat else prompt
        tests = f'{row["test"]}\ncheck({row["entry_point"]})\n'
        return Task(name, [('user', question)], 'joined', prompt, row.get('canonical_solution', ''),
                    row['entry_point'], tests, BODY_STOPS)
    if row.get('test_list') is not None:
        prompt = text_of(row, where, first_of(row, ('text', 'prompt')))  # the latter in sanitized-mbpp.json
        imports = row.get('test_imports') or []
        for lines in (row['test_list'], imports):
            if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
                raise ValueError(f'{where}: test_list and test_imports must be lists of text, '
                                 f'not {lines!r:.50}')
        tests = '\n'.join(row['test_list'])
        question = f'"""\n{prompt}\n{tests}\n"""\n'
        if is_chat:
            question = f'{prompt}\nThe code should pass these tests:\n\n{tests}'
        setup = '\n'.join([row.get('test_setup_code') or '', *imports])
        return Task(name, [('user', question)], 'joined', prompt, row.get('code', ''), '',
                    f'{setup}\n{tests}\n', PROGRAM_STOPS)
    suited, turns = read_row(row, where)
    while turns and turns[-1][0] != 'assistant':  # a chat may end with a question
        turns.pop()
    if len(turns) < 2:
        raise ValueError(f'{where}: expected a task of HumanEval or MBPP, or a row with a question and its '
                         f'answer, not {", ".join(row)}')
    *turns, (_, reference) = turns
    prompt = turns[-1][1]
    tree = parse(prompt)
    if suited == 'joined' and tree and tree.body and isinstance(tree.body[-1], FUNCTIONS):
        return Task(name, turns, suited, prompt, reference, tree.body[-1].name, stops=BODY_STOPS)
    return Task(name, turns, suited, prompt, reference)


# -----------------------------------------------------------------------------
# one answer

def judge(task, seed, answer, run):
    """Judge an answer. run: run its tests, in a child process. Returns a Verdict."""
    answer = answer.rpartition('</think>')[2]
    code = first_fence(answer)
    program = complete(task, answer, code)
    parses = is_code(program, task.entry) and code.split() != first_fence(task.prompt).split()
    outcome = None
    if run and task.tests:
        outcome = run_program(f'{program}\n{task.tests}') if parses else 'not code'
    return Verdict(task, seed, answer, code, parses, outcome)


def first_fence(text):
    """Return the first fenced block of a text (``` to ``` or to the end), or the text itself."""
    fenced = FENCE.search(text)
    return fenced[1] if fenced else text


def complete(task, answer, code):
    """Return the program of an answer: after the prompt that it continues, or alone."""
    if not task.entry:
        return textwrap.dedent(code)  # A fence in a list is indented.
    repeats = re.search(rf'^[ \t]*(async )?def {re.escape(task.entry)}\b', code, re.MULTILINE)
    if repeats:
        code = textwrap.dedent(code)
    if code == answer and not repeats:
        return task.prompt + answer
    return f'{task.prompt}\n{code}'  # A repeated function replaces the prompt's, but not its imports.


def is_code(program, entry=''):
    """Test whether a program, or its function `entry`, parses and does something."""
    tree = parse(program)
    if tree is None:
        return False
    body = tree.body
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.name == entry:
            body = node.body  # The last definition counts.
    for statement in body:
        # Prose such as `Answer: yes` parses too.
        acts = any(isinstance(node, ACTS) for node in ast.walk(statement))
        is_idle = isinstance(statement, ast.Expr | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.Pass)
        if acts or not is_idle or (isinstance(statement, ast.AnnAssign) and statement.value):
            return True
    return False


def parse(code):
    """Return ast.parse(code), or None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # Python warns about strings such as '\d'.
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # null bytes and deep nesting
        return None


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
    Run a program in a temporary folder, in a child process with limits and none of our environment.
    Returns 'passed' or why it failed. It stops accidents, not attacks: it is not a sandbox.
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
    return max((center - half) / scale, 0.0), min((center + half) / scale, 1.0)


def bleu(verdicts):
    """Compute sacrebleu's BLEU of 0 to 100, its 95% interval by bootstrap. Returns (value, low, high)."""
    metric = optional('sacrebleu.metrics', 'computes BLEU').BLEU(force=True)  # Code may look tokenized.
    references = [first_fence(verdict.task.reference) for verdict in verdicts]
    score = metric.corpus_score([verdict.code for verdict in verdicts], [references], n_bootstrap=1000)
    return score.score, max(score._mean - score._ci, 0.0), min(score._mean + score._ci, 100.0)


def print_metrics(verdicts, output):
    """Print a line for each metric of verdicts, of equally many answers to each task."""
    num_tasks = len({verdict.task.name for verdict in verdicts})
    referenced = [verdict for verdict in verdicts if verdict.task.reference]
    rates = {'syntax': [verdict.parses for verdict in verdicts],
             'pass@1': [verdict.outcome == 'passed' for verdict in verdicts if verdict.outcome],
             'exact': [verdict.answer.strip() == verdict.task.reference.strip() for verdict in referenced]}
    rows = []
    for metric, values in rates.items():
        if values:
            rate = statistics.mean(values)
            # Samples of a task do not narrow the interval.
            tasks = max(len(values) * num_tasks // len(verdicts), 1)
            rows.append((metric, tasks, len(values), rate, *wilson(rate, tasks)))
    first = [verdict for verdict in referenced if verdict.seed == verdicts[0].seed]
    if first:
        try:
            rows.append(('bleu', len(first), len(first), *bleu(first)))
        except ValueError as e:
            print(f'note: no BLEU; {e}', file=sys.stderr)
    for row in rows:
        print_row(dict(zip(METRIC, row, strict=True)), output, row is rows[0])
