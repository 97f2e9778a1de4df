"""Other packages and plain loops beside ours, in one run: processor seconds and ratios.

    python benchmarks/peers.py                    # makes runs/peers/venv, then measures
    python benchmarks/peers.py --only steps       # one part: hypergradients, clients...
    python benchmarks/peers.py --venv DIR         # an environment that there is already

The peers are installed into a virtual environment of their own, never into ours, and
all programs run there in one process, on one thread each, in turns. Everyone's answers
are compared with ours. It prints a table in Markdown.
"""

import argparse
import os
import platform
import subprocess
import sys
import venv
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USUAL = ROOT / "runs" / "peers" / "venv"
PARTS = ("hypergradients", "clients", "steps")
PEERS = ("jaxopt==0.8.5", "torchopt==0.7.3", "torch==2.13.0", "higher", "matplotlib")
# The first asks for `torch>=1.6.*`, which pip cannot read, the second for a NumPy that
# no longer runs with JAX; both work without what they ask for.
WITHOUT_REQUIREMENTS = ("betty-ml==0.1.1", "boat-torch==1.1.1")


def install(folder: Path) -> None:
    """Make the environment, or leave it alone if it is complete."""
    done = folder / "installed"
    wanted = "\n".join((*PEERS, *WITHOUT_REQUIREMENTS))
    if done.exists() and done.read_text() == wanted:
        return
    print(f"installing the peers into {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True)
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    for arguments in (
        (*constraints, "--editable", str(ROOT), "scipy"),
        PEERS,
        ("--no-deps", *WITHOUT_REQUIREMENTS),
    ):
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*command, *arguments], check=True)
    done.write_text(wanted)


def measure(parts: list[str]) -> None:
    """Time all parts in this process, and print the table."""
    warnings.simplefilter("ignore")  # TorchOpt would spend its time on warning
    import importlib

    import jax
    from peer_timing import Failed, table

    # A call that is handed to another thread costs more than a small hypergradient.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    rows, failed = [], []
    for part in parts:
        for found in importlib.import_module(f"peer_{part}").measured():
            (failed if isinstance(found, Failed) else rows).append(found)
            print(f"{found.work}: {found.peer}", file=sys.stderr, flush=True)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
    )
    print(table(rows))
    for one in failed:
        print(f"\nCould not be run: {one.peer}, {one.work}: {one.why}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time other packages beside ours.")
    parser.add_argument("--venv", type=Path, default=USUAL, help="environment of peers")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        return measure([chosen.only] if chosen.only else list(PARTS))
    folder = chosen.venv.resolve()
    install(folder)
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    again = [folder / "bin" / "python", __file__, "--inside"]
    again += ["--only", chosen.only] if chosen.only else []
    environment = {**os.environ, **one_thread, "XLA_FLAGS": flags}
    sys.exit(subprocess.run(again, env=environment).returncode)


if __name__ == "__main__":
    main()
