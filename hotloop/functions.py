"""Python functions as rows for tuning: signature and docstring are the prompt, the body is the answer."""

import ast
import io
import textwrap
import warnings


def function_rows(source):
    """
    Yields {'prompt', 'completion'} of each documented function and method in Python source, without its
    decorators and moved to the margin. Functions without more than a docstring are left out. SyntaxError,
    or ValueError for a null byte, if it is not Python.
    """
    # the lines that Python counts; splitlines() also splits at form feeds
    lines = list(io.StringIO(source, newline=None))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # about strings such as '\d'
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not ast.get_docstring(node):
            continue
        first, docstring_end = node.lineno - 1, node.body[0].end_lineno
        if len(node.body) == 1 or node.body[1].lineno <= docstring_end:
            continue
        prompt = ''.join(lines[first:docstring_end])
        text = textwrap.dedent(prompt + ''.join(lines[docstring_end:node.end_lineno]))
        rows = list(io.StringIO(text))
        count = docstring_end - first
        if rows[0].startswith(('def ', 'async def ')):  # a string at the margin keeps dedent from moving it
            # the newline between them belongs to the body, as tokenizers join it with the indentation
            prompt = ''.join(rows[:count]).rstrip('\n')
            yield {'prompt': prompt, 'completion': text[len(prompt):]}
