"""Becomes a command that ends with the process that started it, whatever ended that.

    python launch.py PARENT COMMAND ...

PARENT is the number of the starting process. On Linux the system kills the command when
its parent is gone, even if that was killed itself; elsewhere a parent that was killed
leaves it behind. The output of the command is for its owner alone. It is a script, and
imports nothing of ours, so that it costs no time.
"""

import os
import signal
import sys

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl; it outlives exec


def main(parent: int, command: list[str]) -> None:
    """Tie this process to its parent, then become the command."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before prctl
            sys.exit(1)
    os.umask(0o077)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}.")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
