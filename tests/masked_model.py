"""The masked exchange as a small machine, with a server that does what it likes.

A story is one exchange as some sites were told it: who takes part, and what was asked.
Sites that were told the same story have masks that cancel; masks of different stories
have nothing in common. In a story the server chooses who is asked, which sum each site
is asked to confirm, and who is asked to reveal. What it knows then are sums of replies:
all combinations of the masked replies in which no mask is left that it cannot compute.

`Site` has the rules of `federation.secure.protocol` and `cohorts` as they are written
there; `rules` that are missing are holes. `search` goes through all stories in all
orders, and returns the first way by which something of one honest site alone is known.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from fedbilevel.federation.secure.masks import threshold

RULES = frozenset(
    {
        "one set in an exchange",  # a site confirms one set of survivors
        "one set for a question",  # and one wherever it is asked the same
        "enough confirm",  # before it reveals
        "enough in a sum",  # two thirds of the participants, and the minimum
        "cuts",  # numbers out of range are answered, not refused
        "rows are secret",  # a server cannot compute which of them are in a sum
        "rows for a question",  # others are drawn wherever another one is asked
    }
)
Members = tuple[int, ...]
Vector = tuple[Fraction, ...]


@dataclass(frozen=True)
class World:
    """How many sites there are, who of them works with the server, and the rules.

    Where replies are `of_batches`, another question has another reply. Else a server
    asks at a point nearby, and knows the same; `apart` is the rule against that. If
    rows are known, it asks until the first site has drawn others, and nobody else has.
    """

    sites: int
    minimum: int = 2
    colluding: frozenset[int] = frozenset()
    rules: frozenset[str] = RULES
    of_batches: bool = True
    apart: bool = False

    @property
    def honest(self) -> list[int]:
        """Those who follow the protocol."""
        return [k for k in range(self.sites) if k not in self.colluding]

    @property
    def wide(self) -> int:
        """How many replies a site has, to all questions."""
        drawn = self.of_batches and "rows for a question" in self.rules
        return 2 if drawn else 1

    def reply(self, site: int, question: int) -> int:
        """Return which of its replies a site gives."""
        known = "rows are secret" not in self.rules
        others = known and site != self.honest[0]
        return 0 if others else min(question, self.wide - 1)

    def needed(self, participants: Members) -> int:
        """Return how many must be in a sum, and confirm it."""
        if "enough in a sum" not in self.rules:
            return 1
        return max(threshold(len(participants)), self.minimum)


class Story(NamedTuple):
    """Who takes part, what is asked, who replied, and what each one confirmed."""

    participants: Members
    question: int
    confirmed: tuple[tuple[int, tuple[Members, ...]], ...]  # of those who replied


def may_confirm(
    world: World,
    site: int,
    participants: Members,
    members: Members,
    before: Iterable[Members],
) -> bool:
    """Say whether a site that replied confirms a sum, after others of this exchange."""
    if site not in members or not set(members) <= set(participants):
        return False
    if len(members) < world.needed(participants):
        return False
    once = "one set in an exchange" in world.rules
    return not once or all(one == members for one in before)


def may_answer(
    world: World, question: int, members: Members, past: dict[int, set[Members]]
) -> bool:
    """Say whether a site that was in past sums, by question, confirms another one."""
    same = past.get(question, set()) - {members}
    if same and "one set for a question" in world.rules:
        return False
    if not world.apart:
        return True
    return not set().union(*past.values()) - {members}


def answers(world: World, out_of_range: bool) -> str:
    """Return what is seen in the clear of a site that is asked for a reply."""
    return "masked" if "cuts" in world.rules or not out_of_range else "refused"


def stories(world: World) -> Iterator[Story]:
    """Return all that can happen in one exchange, but for what helps nobody."""
    everybody = range(world.sites)
    for size in range(world.minimum, world.sites + 1):
        for participants in itertools.combinations(everybody, size):
            sums = [
                members
                for many in range(1, size + 1)
                for members in itertools.combinations(participants, many)
            ]
            choices = [
                _choices(world, site, participants, sums)
                for site in participants
                if site in world.honest
            ]
            for chosen in itertools.product(*choices):
                confirmed = tuple(one for one in chosen if one is not None)
                for question in (0, 1):
                    yield Story(participants, question, confirmed)


def _choices(world, site, participants, sums):
    """Return what one site may have done: no reply, or one and what it confirmed."""
    allowed = [
        one for one in sums if may_confirm(world, site, participants, one, before=())
    ]
    some: list = [None, (site, ())]
    if "one set in an exchange" in world.rules:
        return some + [(site, (one,)) for one in allowed]
    return [*some, (site, tuple(allowed))]


def known_sums(world: World, story: Story) -> list[dict[int, Fraction]]:
    """Return the sums of honest replies that are known after a story."""
    replied = [site for site, _ in story.confirmed]
    shares, seeds = _revealed(world, story)
    own = {k for k in replied if shares[k] >= threshold(len(story.participants))}
    masks: list = [("own", k) for k in replied if k not in own]
    masks += [
        frozenset(pair)
        for pair in itertools.combinations(story.participants, 2)
        if frozenset(pair) not in seeds and not world.colluding & set(pair)
    ]
    rows = []
    for k in replied:
        row = [Fraction(mask == ("own", k)) for mask in masks]
        for place, mask in enumerate(masks):
            if isinstance(mask, frozenset) and k in mask:
                row[place] = Fraction(1 if k == min(mask) else -1)
        rows.append(row)
    free = _left_null_space(rows, len(replied))
    return [dict(zip(replied, one, strict=True)) for one in free]


def _revealed(world: World, story: Story) -> tuple[dict[int, int], set[frozenset]]:
    """Return how many shares of each secret are known, and the seeds of which pairs."""
    confirmed = dict(story.confirmed)
    shares = {k: len(world.colluding & set(story.participants)) for k in confirmed}
    seeds: set[frozenset[int]] = set()
    for members in set().union(*confirmed.values()) if confirmed else ():
        agreeing = [k for k in confirmed if members in confirmed[k]]
        supporting = len(agreeing) + len(world.colluding & set(members))
        enough = supporting >= world.needed(story.participants)
        if "enough confirm" in world.rules and not enough:
            continue
        for giver in agreeing:
            for other in set(story.participants) - set(members):
                seeds.add(frozenset((giver, other)))
            for other in set(members) & set(confirmed):
                shares[other] += 1
    return shares, seeds


def search(world: World, depth: int = 3) -> list[Story] | None:
    """Return the shortest way by which one site's reply is known, None if none is."""
    useful = _useful(world)
    start: tuple = (frozenset(), ())
    seen, queue = {start}, deque([(start, [])])
    while queue:
        (past, basis), way = queue.popleft()
        if _one_alone(world, basis):
            return way
        if len(way) == depth:
            continue
        for (question, confirmed, vectors), story in useful.items():
            if not all(
                may_answer(world, question, members, _past_of(past, site))
                for site, members in confirmed
            ):
                continue
            now = past | {(site, question, members) for site, members in confirmed}
            after = (now, _reduced([*basis, *vectors]))
            if after not in seen:
                seen.add(after)
                queue.append((after, [*way, story]))
    return None


def _useful(world: World) -> dict[tuple, Story]:
    """Return the stories after which a sum is known, one for each that are alike.

    Others are of no use later: masks of other stories are others.
    """
    found: dict[tuple, Story] = {}
    for story in stories(world):
        sums = known_sums(world, story)
        if not sums:
            continue
        vectors = [_vector(world, story.question, one) for one in sums]
        pairs = [(site, one) for site, all_ in story.confirmed for one in all_]
        about = (story.question, tuple(sorted(pairs)), _reduced(vectors))
        found.setdefault(about, story)
    return found


def _past_of(past: frozenset, site: int) -> dict[int, set[Members]]:
    found: dict[int, set[Members]] = {}
    for who, question, members in past:
        if who == site:
            found.setdefault(question, set()).add(members)
    return found


def _vector(world: World, question: int, known: dict) -> Vector:
    """Return a sum in the space of all honest replies, of each site and question."""
    place = {k: world.wide * n for n, k in enumerate(world.honest)}
    made = [Fraction(0)] * (world.wide * len(place))
    for site, factor in known.items():
        made[place[site] + world.reply(site, question)] = factor
    return tuple(made)


def _one_alone(world: World, basis: tuple[Vector, ...]) -> bool:
    """Say whether the sums that are known have one in which a site is alone."""
    if not basis:
        return False
    wide = len(basis[0]) // len(world.honest)
    for n in range(len(world.honest)):
        others = [one[: wide * n] + one[wide * (n + 1) :] for one in basis]
        if len(_reduced(others)) < len(basis):
            return True
    return False


def _reduced(rows: Iterable[Iterable[Fraction]]) -> tuple[Vector, ...]:
    """Return the reduced echelon form, which names the space that rows span."""
    left, done = [list(row) for row in rows], []
    for column in range(len(left[0]) if left else 0):
        pivot = next((row for row in left if row[column]), None)
        if pivot is None:
            continue
        left.remove(pivot)
        pivot = [entry / pivot[column] for entry in pivot]
        left, done = (
            [
                [a - row[column] * b for a, b in zip(row, pivot, strict=True)]
                for row in some
            ]
            for some in (left, done)
        )
        done.append(pivot)
    return tuple(map(tuple, done))


def _left_null_space(rows: list[list[Fraction]], count: int) -> list[Vector]:
    """Return a basis of the combinations of rows that are zero."""
    wide = len(rows[0]) if rows else 0
    joined = [
        [*row, *(Fraction(n == k) for k in range(count))] for n, row in enumerate(rows)
    ]
    return [
        one[wide:]
        for one in _reduced(joined)
        if not any(one[:wide]) and any(one[wide:])
    ]
