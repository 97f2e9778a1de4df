"""Errors by name. Every message says what is wrong, where, and what to do."""

import difflib
import errno
import importlib
from collections.abc import Iterable, Mapping
from typing import Any, Self


class FedbilevelError(Exception):
    """The base of every error this package raises on purpose."""


class InvalidInputError(FedbilevelError, ValueError):
    """An argument, a loss or a data set cannot be used as given."""


class AtClientError(FedbilevelError):
    """An error at one client: the message is `before`, the client, `after`.

    `client` counts from 0. Callers that know the clients' names add one by `at`.
    """

    def __init__(
        self, client: int, after: str, before: str = "", name: str = ""
    ) -> None:
        self.client, self._after, self._before = client, after, before
        who = f"client {client}" + (f" ({name})" if name else "")
        super().__init__(f"{before}{who}{after}")

    def at(self, name: str, client: int | None = None) -> Self:
        """Return the error with the name of the client, and its number elsewhere."""
        number = self.client if client is None else client
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        AtClientError.__init__(other, number, self._after, self._before, name)
        return other


class ClientInputError(AtClientError, InvalidInputError):
    """Data of one client, or a number where they are, cannot be used as given."""


class HeterogeneityWarning(UserWarning):
    """A method that needs clients to be alike was given clients that differ."""


class InterventionWarning(UserWarning):
    """A run was changed automatically, or its result is not its last point."""


class ConfigurationWarning(UserWarning):
    """A setting came too late for JAX to follow it."""


class DamagedFileWarning(UserWarning):
    """Saved files of a site could not be read, and were put aside."""


class UntrustedCacheWarning(UserWarning):
    """Stored programs are not used, since others could have written them."""


class CheckpointError(FedbilevelError):
    """A run folder cannot be written, read or continued."""


class StageError(FedbilevelError):
    """A stage of the reference runtime raised; names round, phase and client."""


class ClientStageError(AtClientError, StageError):
    """The stage was one of a client."""


class SecureAggregationError(FedbilevelError):
    """A mean cannot be taken, or not be taken safely, under masks."""


class MaskReuseError(SecureAggregationError):
    """A site was asked to use the masks of an exchange for a second reply."""


class RevealRefusedError(SecureAggregationError):
    """A site was asked for seeds that would open more than the sum."""


class CohortRefusedError(RevealRefusedError):
    """A site was asked for a sum whose difference to an earlier one says too much."""


class UnmaskingError(SecureAggregationError):
    """Replies and seeds do not fit together, so their sum means nothing.

    `suspects` says of clients what is wrong with what they sent, where that is known.
    """

    def __init__(self, message: str, suspects: Mapping[int, str] | None = None) -> None:
        self.suspects = dict(suspects or {})
        super().__init__(message)


def needed(name: str, sentence: str) -> Any:
    """Import an optional package, or raise a sentence that says how to get it."""
    try:
        importlib.import_module(name.partition(".")[0])
        return importlib.import_module(name)
    except ImportError:
        raise FedbilevelError(sentence) from None


def coarse_cure(kind: str) -> str:
    """Return the first remedy for frozen numbers of a short type."""
    return f"The frozen model was computed in {kind}: try --set precision=float32,"


class DivergedError(FedbilevelError):
    """A run diverged, and rollbacks did not help."""


class NonFiniteError(AtClientError, DivergedError):
    """A client returned NaN or infinity.

    `round` counts from 1, `client` from 0; `checkpoint` is the last good one, or None,
    be it that none was `due` before or that none was asked for. `theta` is the step of
    the method's Neumann series, if it has one; `frozen_type` the type of the frozen
    numbers of the problem, where it has half the usual digits; `cause` is what was
    wrong before the first step, where it was found out.
    """

    def __init__(
        self,
        round_number: int,
        phase: str,
        client: int,
        checkpoint: str | None,
        *,
        due: bool = False,
        theta: float | None = None,
        frozen_type: str = "",
        cause: str = "",
    ) -> None:
        self.round, self.phase = round_number, phase
        self.checkpoint, self.due, self.theta = checkpoint, due, theta
        self.frozen_type, self.cause = frozen_type, cause
        kept = "No checkpoint was written before. Ask for them to keep your work."
        if checkpoint:
            kept = f"The last good checkpoint is kept in {checkpoint}."
        elif due:
            kept = (
                "No checkpoint was written before: none was due yet. Ask for more of "
                "them, after fewer rounds, to keep your work."
            )
        cure = "Smaller step sizes are the usual cure."
        if theta is not None and theta > 0:
            cure = (
                "Smaller step sizes or a smaller theta are the usual cure: "
                f"theta={theta:.4g} needs a lower level that curves less than 1/theta "
                f"= {1 / theta:.4g}, wherever x and y go and not at the start alone."
            )
        if frozen_type:
            cure = f"{coarse_cure(frozen_type)} or smaller step sizes."
        super().__init__(
            client,
            f": the reply holds NaN or infinity. {cause or f'{cure} {kept}'}",
            f"round {round_number}, phase '{phase}', ",
        )


class OtherProcessError(FedbilevelError):
    """Another of several processes failed, or cannot be reached any more."""


_SYSTEM = {
    errno.ENOSPC: ("the disk is full", "Free some space. Files kept before are whole."),
    errno.EDQUOT: ("your share of the disk is used up", "Free some space."),
    errno.EROFS: ("the disk is read-only", "Choose a place that can be written."),
    errno.EACCES: ("this user may not", "Mend its permissions, or choose another."),
    errno.EPERM: ("this user may not", "Mend its permissions, or choose another."),
    errno.ENOTDIR: ("a file is where a folder is needed", "Choose another place."),
    errno.EEXIST: ("a file is where a folder is needed", "Choose another place."),
    errno.EISDIR: ("a folder is where a file is needed", "Choose another name."),
    errno.ENOENT: ("there is no such file or folder", "Check the path."),
    errno.ENAMETOOLONG: ("the name is too long", "Choose a shorter one."),
    errno.EIO: ("the disk reports an error", "Check the disk."),
}


def sentence_of(error: Exception) -> str:
    """Say in a sentence what was refused, by the system: where, and what to do."""
    if not isinstance(error, OSError):
        return str(error)
    reason, advice = _SYSTEM.get(error.errno or 0, (error.strerror, ""))
    if not reason:
        return str(error)
    where = f"{error.filename}: " if error.filename not in (None, "") else ""
    return f"{where}{reason}. {advice}".rstrip()


_MOST_LISTED = 12  # names
_LISTED = ("algorithm", "task", "wrapper")  # what a command lists


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InvalidInputError:
    """Build the error for an unknown name, with the nearest known ones.

    Few names are listed; of many, three that are near say more than all of them.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    listed = f"Known: {', '.join(names) or 'none'}."
    if len(names) > _MOST_LISTED:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
        hint = f" Did you mean {', '.join(map(repr, near[:-1]))} or {near[-1]!r}?"
        listed = f"There are {len(names)}"
        listed += f": `fedbilevel list {kind}s`." if kind in _LISTED else "."
    return InvalidInputError(f"unknown {kind} '{name}'.{hint} {listed}")
