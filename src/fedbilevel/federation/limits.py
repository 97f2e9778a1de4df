"""What a site allows a server, whoever that is; set by the site's operator."""

import math
from dataclasses import dataclass, fields
from typing import Any

from fedbilevel._schema import Limits
from fedbilevel.channels import SecureMean
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.privacy import is_noisy, privacy_of_releases

MEASURES = ("none", "scalars")


@dataclass(frozen=True)
class SiteLimits(Limits):
    """How much a site tells, and from how many rows.

    `measure` is none, or scalars: the loss and the metrics of all its rows, a number
    each, no gradient. Where it is left out a site measures, unless its replies are
    masked or noisy: a number in the clear would go around that. With noise measuring
    cannot be allowed, as epsilon would not count it; with masks the operator may.

    `max_exchanges` are the replies that a site gives, and as many measurements at most;
    `max_epsilon` is the privacy that it spends, both over all federations that its
    state folder has seen. `minimum_batch` and `minimum_rows` are refused to go below.
    Nothing but `measure` is limited by default: a site cannot know how long a run is.
    """

    def __post_init__(self) -> None:
        if self.measure not in (None, *MEASURES):
            raise InvalidInputError(
                f"measure='{self.measure}': choose {' or '.join(MEASURES)}."
            )
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InvalidInputError(
                    f"{one.name}={value}: a limit is above 0 and finite; leave it out "
                    "to have none."
                )

    def measures(self, job: Job) -> bool:
        """Say whether the site measures."""
        if self.measure is None:
            masked = isinstance(job.channel.reduction, SecureMean)
            return not (masked or is_noisy(job))
        return self.measure == "scalars"

    def check(self, job: Job) -> None:
        """Raise unless a site with these rows and settings may start at all."""
        sizes = (job.data.upper_sizes, job.data.lower_sizes)
        rows = min(int(size[0]) for size in sizes)
        if rows < self.minimum_rows:
            raise InvalidInputError(
                f"this site has {rows} rows at one of the levels, but minimum_rows is "
                f"{self.minimum_rows}. Take part with more rows, or allow fewer."
            )
        batches = [job.upper_batch or rows, job.lower_batch or rows]
        batch = min(*batches, rows)
        if batch < self.minimum_batch:
            raise InvalidInputError(
                f"a sample is of {batch} rows, but minimum_batch is "
                f"{self.minimum_batch}. Choose a larger batch, on the server and at "
                "all sites alike, or allow smaller ones."
            )
        self._check_noise(job)

    def _check_noise(self, job: Job) -> None:
        if is_noisy(job) and self.measure == "scalars":
            raise InvalidInputError(
                "measure='scalars' with noise: measurements have none, so that epsilon "
                "would not hold. Leave out one of them."
            )
        if self.max_epsilon is None:
            return
        if not is_noisy(job):
            raise InvalidInputError(
                f"max_epsilon={self.max_epsilon:g} without noise: there is no epsilon "
                "that could be kept. Add clip and noise, or leave out the limit."
            )
        privacy_of_releases(job, {(1, 1): 1})  # or why it cannot be computed

    @staticmethod
    def read(given: dict[str, Any]) -> "SiteLimits":
        """Read limits from names and texts, as Flower's node configuration has them."""
        kinds = {"measure": str, "max_epsilon": float}
        names = [one.name for one in fields(SiteLimits) if one.name in given]
        try:
            found = {name: kinds.get(name, int)(given[name]) for name in names}
        except ValueError as error:
            raise InvalidInputError(f"the limits of this node: {error}.") from error
        return SiteLimits(**found)
