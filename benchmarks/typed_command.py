"""Runs a command as a newcomer would type it, and keeps what it leaves."""

import subprocess
import sys
import time
from pathlib import Path


def type_command(text: str, folder: Path) -> tuple[str, str, str]:
    """Return what it printed, what went wrong if anything did, and the seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "fedbilevel.cli", *text.split()]
    done = subprocess.run(
        [*command, "--out", str(folder), "--json"], capture_output=True, text=True
    )
    wrong = done.stderr.strip()[-500:] if done.returncode else ""
    return done.stdout, wrong, f"{time.perf_counter() - started:.0f}"
