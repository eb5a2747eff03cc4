"""
Runs a judged Python program in a child process with limits. This stops accidents (a loop, a fork, a full
memory, a file in the wrong place); it is not a sandbox and does not stop a program that attacks it.
The child runs this file: at the end, as a script.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import types

SECONDS = 10  # of a program, on the clock and on the CPU
MEMORY = 2**30  # bytes of its address space
FILE_SIZE = 2**20  # bytes of a file that it writes
ENVIRONMENT = {'OMP_NUM_THREADS': '1'}  # numpy's threads would each take memory
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# audit events (docs.python.org/3/library/audit_events.html) by their beginnings
REFUSED = ('os.fork', 'os.exec', 'os.posix_spawn', 'os.spawn', 'os.system', 'os.kill', 'pty.spawn',
           'subprocess.', 'socket.connect', 'socket.bind', 'socket.send', 'socket.get', 'ctypes.', 'sqlite3.',
           'resource.', 'cpython.PyInterpreterState_New')
CHANGES = ('os.remove', 'os.rename', 'os.rmdir', 'os.mkdir', 'os.link', 'os.symlink', 'os.truncate',
           'os.chmod', 'os.chown', 'os.chflags', 'os.utime', 'os.setxattr', 'os.removexattr')


def run_code(program, seconds=SECONDS):
    """
    None if the program, a text, runs to its end; otherwise the reason, such as AssertionError. It has a
    folder of its own, deleted afterwards, and no input, output or variables of ours. Not for Windows.
    """
    done = secrets.token_hex(8)  # the child answers with it; exit(0) before the tests does not
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as answer:
        command = [sys.executable, '-I', '-B', os.path.abspath(__file__), str(seconds)]
        child = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=answer,
                                 stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            child.communicate(f'{done}\n{program}'.encode('utf-8', 'surrogatepass'), seconds)
        except subprocess.TimeoutExpired:
            return f'stopped after {seconds} s'
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
        answer.seek(0)
        outcome = answer.read(500).decode('utf-8', 'replace')
    if outcome == done:
        return None
    if child.returncode < 0:
        return f'killed by {signal.Signals(-child.returncode).name}'
    return outcome or f'exit code {child.returncode} before its end'


def set_limits(seconds):
    """Limits this process and what it starts. macOS does not limit memory."""
    import resource  # Windows has none
    # CPU: after the parent's timeout, which names the reason; root ignores NPROC
    limits = {'CPU': seconds + 1, 'FSIZE': FILE_SIZE, 'NPROC': 0, 'NOFILE': 64, 'CORE': 0}
    if sys.platform != 'darwin':
        limits['AS'] = MEMORY
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f'RLIMIT_{name}'), (limit, limit))


def guard():
    """Refuses, from now on and for good, processes, the network and changes outside the current folder."""
    import _posixsubprocess  # Windows has none
    folder, resolve = os.path.join(os.path.realpath('.'), ''), os.path.realpath

    def is_outside(path):
        return not os.path.join(resolve(os.fsdecode(path)), '').startswith(folder)

    def refuse(*_):
        raise PermissionError('a judged program starts no processes')

    def hook(event, args):
        if event.startswith(REFUSED):
            raise PermissionError(f'{event} is refused in a judged program')
        if event == 'import' and args[0] == '_ctypes':  # C calls are not audited
            raise ImportError('ctypes is refused in a judged program')
        paths = [arg for arg in args if isinstance(arg, str | bytes | os.PathLike)]
        if event == 'open':
            # an open folder would lead out of this one, by dir_fd
            paths = [path for path in paths[:1] if args[2] & WRITES or os.path.isdir(path)]
        if (event == 'open' or event in CHANGES) and any(map(is_outside, paths)):
            raise PermissionError(f'{event} outside its folder is refused in a judged program')
    _posixsubprocess.fork_exec = refuse  # multiprocessing calls it, without an event
    sys.addaudithook(hook)


def child():
    """Runs the program of standard input and writes how it ended to standard output. Never returns."""
    done, _, program = sys.stdin.buffer.read().decode('utf-8', 'surrogatepass').partition('\n')
    answer, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    set_limits(int(sys.argv[1]))
    guard()
    # by another name than __main__, so that a main block does not run
    module = sys.modules['program'] = types.ModuleType('program')
    try:
        exec(compile(program, 'program.py', 'exec'), vars(module))
        outcome = done
    except BaseException as e:  # SystemExit too
        outcome = f'{type(e).__name__}: {e}'.strip(': ').split('\n')[0]
    os.write(answer, outcome.encode('utf-8', 'replace')[:500])
    os._exit(0)  # threads of the program may still run


if __name__ == '__main__':
    child()
