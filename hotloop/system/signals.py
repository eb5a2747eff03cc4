"""Signals that ask a run to stop: Ctrl-C, SIGTERM of a scheduler, SIGHUP of a closed terminal."""

import contextlib
import os
import signal

from hotloop.system.distributed import print0


class StopRequest:
    """Record a signal; the loop then saves and stops. A second SIGINT kills the process at once."""

    def __init__(self, env):
        self.env = env
        self.signal = None
        signal.signal(signal.SIGTERM, self.receive)
        signal.signal(signal.SIGINT, self.receive)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number, frame):
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if self.env.rank == 0:
                with contextlib.suppress(OSError):  # print() may be what the signal interrupted
                    os.write(2, b'\nstopping after this step and a save; Ctrl-C again exits now\n')

    def has_signal(self):
        """Return whether a signal came to this process."""
        return self.signal is not None

    def any_signal(self):
        """Return whether a signal came to any process. All of them must call it."""
        return self.env.any(self.has_signal())

    def forgiving_signals(self, function, *args):
        """
        Return function(*args), or None if it fails with a RuntimeError after a signal: Ctrl-C in a terminal
        also reaches the compiler that a step waits for.
        """
        try:
            return function(*args)
        except RuntimeError as e:
            if self.env.world > 1 or not self.has_signal():
                raise
            print0(f'the signal interrupted {function.__name__}(): {type(e).__name__}')
            return None

    def exit_code(self):
        """Return 128 + the signal's number, as shells do: 143, 130 or 129; 0 without a signal."""
        return 128 + self.signal if self.signal else 0
