"""What the benches share: the machine in a line, alternating measurements, memory, tables, sys.path."""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARED = os.path.join(os.path.dirname(ROOT), 'shared', 'data')
sys.path.insert(0, ROOT)


def parser_of(doc, **defaults):
    """Make a parser with a flag of the same type for each of these defaults, and a switch for False."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        how = {'action': 'store_true'} if default is False else {'type': type(default), 'default': default}
        parser.add_argument(f'--{name}', **how)
    return parser


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def machine():
    """Name processor, cores, Python and date, to print beside a figure."""
    name = platform.processor() or platform.machine()
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f:
            name = next((line.split(':')[1].strip() for line in f if line.startswith('model name')), name)
    return f'{name}, {cores()} cores, Python {platform.python_version()}, {date.today()}'


def nanogpt(peer):
    """Import model.py of a clone of nanoGPT, whose training script cannot be imported."""
    spec = importlib.util.spec_from_file_location('nanogpt_model', os.path.join(peer, 'model.py'))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def alternate(sides, rounds):
    """Call the functions of {name: function} in turns. Returns {name: [results of `rounds` calls]}."""
    results = {name: [] for name in sides}
    for i in range(rounds):
        for name, side in sides.items():
            results[name].append(side())
            print(f'  round {i + 1}/{rounds}: {name}: {results[name][-1]}', file=sys.stderr, flush=True)
    return results


def run(command, cwd=ROOT, env=None):
    """Run a command. Returns (seconds, peak megabytes of its largest process, output)."""
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as process:
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f'{" ".join(command)} ended with {process.returncode}:\n{output[-2000:]}')
    return seconds, usage.ru_maxrss * 1024 / 1e6, output


def answer(command, **how):
    """Return what a command prints as a line of JSON."""
    lines = run(command, **how)[2].splitlines()
    return next(json.loads(line) for line in lines if line.startswith('{'))


def memory_now(field):
    """Return the bytes of this process, by a field of /proc: VmRSS now, VmHWM at the most."""
    with open('/proc/self/status') as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith(field))


def forget_peak():
    """Let VmHWM start again."""
    with open('/proc/self/clear_refs', 'w') as f:
        f.write('5')


def table(head, rows):
    """Write a Markdown table."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(map(str, line)) + ' |' for line in lines)
