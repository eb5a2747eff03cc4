"""What the benches share: the machine in a line, alternating measurements, memory, tables, sys.path."""

import argparse
import contextlib
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


def run(command, cwd=ROOT, env=None, watch=False):
    """
    Run a command. Returns (seconds, peak megabytes, output); RuntimeError if it fails. With `watch`, which
    slows it down, the memory of the process and its children is sampled, shared pages counted once (on Linux;
    else 0).
    """
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as process:
        while watch and process.poll() is None:
            peak = max(peak, sum(map(proportional_memory, family(process.pid))))
            time.sleep(0.1)
        output = process.stdout.read()
        process.wait()
        seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f'{" ".join(command)} ended with {process.returncode}:\n{output[-2000:]}')
    return seconds, peak / 1e6, output


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


def family(pid):
    """List a process and all its descendants; none when it has ended, or not on Linux."""
    members = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f'/proc/{pid}/task'):
            with open(f'/proc/{pid}/task/{task}/children') as f:
                for child in f.read().split():
                    members += family(int(child))
    return [pid, *members]


def proportional_memory(pid):
    """Return the bytes of a process; a page that n processes share counts as 1/n."""
    try:
        with open(f'/proc/{pid}/smaps_rollup') as f:
            return next((1024 * int(line.split()[1]) for line in f if line.startswith('Pss:')), 0)
    except OSError:
        return 0


def table(head, rows):
    """Write a Markdown table."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(map(str, line)) + ' |' for line in lines)
