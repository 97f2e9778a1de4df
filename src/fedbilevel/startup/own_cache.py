"""Trusted folders of programs: only their user can write to them.

A stored program is run as it is. Another user with access would silently change
results.
"""

import os
import stat
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fedbilevel.errors import UntrustedCacheWarning, sentence_of


def cache_folder(kind: str) -> Path | None:
    """Return the folder of a kind of programs; none where others could write.

    Why it is not used is said once in a process.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base).absolute() / "fedbilevel" / kind
    return folder if _is_trusted(folder) else None


@cache
def _is_trusted(folder: Path) -> bool:
    try:
        _make(folder)
        # Other systems have homes that are closed, and no such owners.
        objection = objection_to(folder) if hasattr(os, "geteuid") else ""
    except OSError as error:
        objection = sentence_of(error)
    if objection:
        warnings.warn(
            f"programs in {folder} are not used: {objection.rstrip('.')}. The run goes "
            "on without them. Remove that folder, or choose another place by "
            "XDG_CACHE_HOME.",
            UntrustedCacheWarning,
            stacklevel=2,
        )
    return not objection


def _make(folder: Path) -> None:
    """Make a folder for its user alone; one that others could read is closed."""
    for one in (*reversed(folder.parents), folder):
        if not os.path.lexists(one):
            one.mkdir(mode=0o700, exist_ok=True)
    mode = folder.stat().st_mode
    if not _is_open(mode) and mode & 0o077:
        folder.chmod(0o700)


def objection_to(folder: Path) -> str:
    """Say which other user could change a folder, or nothing."""
    for place in _on_the_way(folder):
        about = place.lstat()
        if about.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        # In a folder like /tmp no user can remove files of others.
        keeps = stat.S_ISLNK(about.st_mode) or about.st_mode & stat.S_ISVTX
        if _is_open(about.st_mode) and not keeps:
            return f"others can write in {place}"
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        return f"{folder} is open to others"
    return _objection_to_files(folder)


def _on_the_way(path: Path) -> Iterator[Path]:
    """Yield whatever decides where a path leads: folders, links, and folders of those.

    A path that was followed once has no links without end.
    """
    for place in (*reversed(path.parents), path):
        yield place
        if place.is_symlink():
            yield from _on_the_way(place.parent / place.readlink())


def _objection_to_files(folder: Path) -> str:
    with os.scandir(folder) as files:
        for one in files:
            try:
                about = one.stat(follow_symlinks=False)
            except FileNotFoundError:  # another process of this user moved it in place
                continue
            if not stat.S_ISREG(about.st_mode):
                return f"{one.path} is no file of its own"
            if about.st_uid != os.geteuid():
                return f"{one.path} belongs to another user"
    return ""


def _is_open(mode: int) -> bool:
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
