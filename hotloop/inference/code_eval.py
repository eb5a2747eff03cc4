"""
Judges answers that should be Python code: syntax accuracy, BLEU against a reference, and pass@1 on tasks with
tests, in the formats of HumanEval (arXiv 2107.03374) and MBPP (arXiv 2108.07732). Tasks without tests are
rows of instruction data.
"""

import ast
import contextlib
import io
import json
import math
import re
import statistics
import sys
import textwrap
import tokenize
import warnings
from typing import NamedTuple

from hotloop.data.chat import as_object, check_text, form_of, prompt_of, turns_of
from hotloop.inference.run_code import run_code
from hotloop.inference.score import print_json
from hotloop.system.files import optional

FENCE = re.compile(r'^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)', re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r'(?:[ \t].*\n?|\n)*')  # lines that are indented or empty
# where the continuation of a bare prompt ends: the first are Codex's, for a function's body (2107.03374)
BODY_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint', '\n```')
PROGRAM_STOPS = ('\nassert', '\nif', '\nprint', '\n"""', '\n```')
ACTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom)  # what gives an expression an effect
EMPTY = (ast.Pass, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom,
         ast.Global, ast.Nonlocal)  # statements that do nothing by themselves


class Task(NamedTuple):
    """A task for a model. tests: code that raises an exception after a wrong answer; '' if there is none."""
    name: str
    turns: list  # [(role, text)] up to the answer
    template: str  # the one that suits them
    prompt: str  # what an answer must not copy; code, if the answer may continue it
    reference: str  # a right answer, '' if there is none
    entry: str = ''  # the function that the prompt begins, '' if it begins none
    tests: str = ''
    stops: tuple = ()  # texts that end the answer to a bare prompt


class Verdict(NamedTuple):
    """A judged answer. outcome: 'passed', the reason of a failure, or None if its tests were not run."""
    task: Task
    seed: int
    answer: str
    code: str
    parses: bool
    outcome: str | None


def task_of(row, where, is_chat):
    """
    The Task in a row: HumanEval's (prompt, test, entry_point), MBPP's (text or prompt, test_list), or
    instruction data. is_chat: the question goes into a chat template; otherwise the model continues the code
    of HumanEval, or for MBPP a docstring with the text and the tests. ValueError for other rows.
    """
    row = as_object(row, where)
    name = str(row.get('task_id', where))

    def text(field):
        return check_text(row.get(field), f'{where}: field {field!r}')
    if {'prompt', 'test', 'entry_point'} <= row.keys():
        prompt, entry = text('prompt'), text('entry_point')
        question = f'Complete this Python function:\n\n{prompt}' if is_chat else prompt
        return Task(name, [('user', question)], 'joined', prompt, text('canonical_solution'), entry,
                    f'{text("test")}\ncheck({entry})\n', BODY_STOPS)
    if 'test_list' in row:
        prompt, tests = text('text') or text('prompt'), lines_of(row['test_list'], where)
        question = f'{prompt}\nThe code should pass these tests:\n\n{tests}'
        if not is_chat:
            question = f'"""\n{prompt}\n{tests}\n"""\n'
        setup = f'{lines_of(row.get("test_imports") or [""], where)}\n{text("test_setup_code")}'
        return Task(name, [('user', question)], 'joined', prompt, text('code'), '', f'{setup}\n{tests}\n',
                    PROGRAM_STOPS)
    suited, fields = form_of(row)
    reply = [] if suited is None else turns_of(row, where, suited, fields)[-1:]
    if not reply or reply[0][0] != 'assistant':
        raise ValueError(f'{where}: expected a task of HumanEval (prompt, test, entry_point) or MBPP (text, '
                         'test_list), or a row with a question and its answer; its fields are: '
                         f'{", ".join(row)}')
    _, turns, suited = prompt_of(row, where)
    prompt = turns[-1][1]
    entry = function_begun(prompt) if suited == 'joined' else ''
    return Task(name, turns, suited, prompt, reply[0][1], entry, stops=BODY_STOPS if entry else ())


def lines_of(values, where):
    """The lines of code in a list of MBPP, as a text. ValueError for anything else or nothing."""
    if not values or not isinstance(values, list) or not all(isinstance(line, str) for line in values):
        raise ValueError(f'{where}: test_list and test_imports must be lists of strings, not '
                         f'{json.dumps(values)[:50]}')
    return '\n'.join(values)


def function_begun(prompt):
    """The name of the function at the end of a prompt that is Python, as prepare.py makes them; or ''."""
    tree = parsed(prompt)
    last = tree.body[-1] if tree and tree.body else None
    return last.name if isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef)) else ''


def judge(task, seed, answer, run):
    """The Verdict on an answer. run: run its tests, in a child process."""
    code = code_of(answer, task.entry)
    parses, outcome = is_code(code, task.prompt), None
    if run and task.tests:
        program = f'{completed(code, task)}\n{task.tests}'
        outcome = (run_code(program) or 'passed') if parses else 'not code'
    return Verdict(task, seed, answer, code, parses, outcome)


def unfenced(text):
    """The first fenced block in a text (``` to ``` or to the end), or else the complete text."""
    fenced = FENCE.search(text)
    return fenced[1] if fenced else text


def code_of(answer, entry):
    """
    The code in an answer: its first fenced block, or all of it, dedented. Where it should define the function
    `entry` and does not, it is the body: its indented lines up to the first new statement at the top level.
    """
    code = unfenced(answer)
    body = INDENTED.match(code)[0]
    if entry and not defines(code, entry) and body.strip():
        # a line at the margin may be inside a string or parentheses
        ends = [len(body), *(end.end() for end in re.finditer(r'\n(?=\S)|\Z', code))]
        code = next((code[:end] for end in ends if parsed(f'if 1:\n{code[:end]}')), body)
    return moved(code).strip('\n')


def moved(code, space=''):
    """The code with `space` in place of the indentation of its first statement. Strings stay as they are."""
    margin = re.search(r'^[ \t]*(?=[^\s#])|\Z', code, re.MULTILINE)[0]
    inside = set()  # numbers of lines that begin inside a string
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # of what is not Python
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            inside.update(range(token.start[0], token.end[0]))
    lines = code.split('\n')
    for number, line in enumerate(lines):
        if line.strip() and number not in inside:
            lines[number] = space + line.removeprefix(margin)
    return '\n'.join(lines)


def defines(code, entry):
    """Whether the code defines the function `entry`, a name that is not ''."""
    return bool(entry and re.search(rf'^\s*(async )?def {re.escape(entry)}\b', code, re.MULTILINE))


def completed(code, task):
    """The program of an answer: after the prompt that it continues, or alone."""
    if not task.entry:
        return code
    prompt = task.prompt.rstrip()
    space = space_after(prompt)
    # a definition of its own follows a prompt that may lack a body
    code = f'{space}pass\n{code}' if defines(code, task.entry) else moved(code, space)
    return f'{prompt}\n{code}'


def space_after(prompt):
    """The indentation of the statement that continues a prompt: after a docstring, or the first of a body."""
    lines, node = prompt.split('\n'), parsed(prompt)
    while getattr(node, 'body', None):
        node = node.body[-1]
    is_after = isinstance(node, ast.stmt)  # a prompt without a statement in its body does not parse
    return re.match(r'\s*', lines[node.lineno - 1 if is_after else -1])[0] + ('' if is_after else '    ')


def is_code(code, prompt):
    """
    Whether ast.parse reads the code and a statement in it has an effect. Empty code, pass, ..., a word, a
    docstring, an import or a copy of the prompt is not enough.
    """
    tree = parsed(code)
    is_copy = code.split() in (prompt.split(), unfenced(prompt).split())
    return tree is not None and not is_copy and any(has_effect(node) for node in ast.walk(tree))


def parsed(code):
    """ast.parse(code), or None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # about strings such as '\d'
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of null bytes and deep nesting
        return None


def has_effect(node):
    """Whether a node is a statement that does something by itself."""
    if isinstance(node, ast.Expr):
        return any(isinstance(part, ACTS) for part in ast.walk(node))
    is_bare = isinstance(node, ast.AnnAssign) and node.value is None  # a prose line, such as Answer: yes
    return isinstance(node, ast.stmt) and not isinstance(node, EMPTY) and not is_bare


def wilson(rate, n):
    """The 95% interval (low, high) of a rate of n tasks (Wilson 1927); also at 0 and 1."""
    z = statistics.NormalDist().inv_cdf(0.975)
    center, scale = rate + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # the roots are exactly 0 and 1 there
    return (center - half) / scale if rate > 0 else 0.0, (center + half) / scale if rate < 1 else 1.0


def bleu(verdicts):
    """
    (sacrebleu's BLEU from 0 to 100, low, high) of code against its references. The 95% interval is from 1000
    bootstrap samples of the tasks. ValueError if sacrebleu is missing.
    """
    metric = optional('sacrebleu.metrics', 'computes BLEU').BLEU(force=True)  # quiet about text with spaces
    codes = [without_prompt(v.code, v.task) for v in verdicts]
    references = [textwrap.dedent(unfenced(v.task.reference)) for v in verdicts]
    score = metric.corpus_score(codes, [references], n_bootstrap=1000)
    return score.score, max(score._mean - score._ci, 0.0), min(score._mean + score._ci, 100.0)


def without_prompt(code, task):
    """The code without lines of the prompt, if it repeats the function that the reference only continues."""
    if not defines(code, task.entry):
        return code
    known = {line.strip() for line in task.prompt.split('\n')}
    return '\n'.join(line for line in code.split('\n') if line.strip() not in known)


def metrics_of(verdicts):
    """[(metric, tasks, answers, value, low, high)] of verdicts, equally many for each task."""
    rates, rows = {'syntax': [v.parses for v in verdicts]}, []
    if run := [v.outcome == 'passed' for v in verdicts if v.outcome is not None]:
        rates['pass@1'] = run
    samples = len({v.seed for v in verdicts})
    for metric, values in rates.items():
        n, rate = len(values) // samples, statistics.mean(values)
        rows.append((metric, n, len(values), rate, *wilson(rate, n)))
    first = [v for v in verdicts if v.seed == verdicts[0].seed and v.task.reference]
    if first:
        try:
            rows.append(('bleu', len(first), len(first), *bleu(first)))
        except ValueError as e:
            print(f'note: no BLEU; {e}', file=sys.stderr)
    return rows


def report(verdicts, output):
    """Prints a row for each metric. output: 'text' or 'jsonl'."""
    if output == 'text':
        print('metric  tasks  answers   value  95% interval')
    for metric, tasks, answers, value, low, high in metrics_of(verdicts):
        if output == 'jsonl':
            print_json({'metric': metric, 'tasks': tasks, 'answers': answers, 'value': value, 'low': low,
                        'high': high})
            continue
        digits, interval = (2, 'bootstrap') if metric == 'bleu' else (4, 'Wilson')
        print(f'{metric:<6}  {tasks:>5,}  {answers:>7,}  {value:>6.{digits}f}  {low:.{digits}f} to '
              f'{high:.{digits}f} ({interval})')
