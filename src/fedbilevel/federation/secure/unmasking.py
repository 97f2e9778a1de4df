"""Removal of masks from a sum, and detection of clients that prevent it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NoReturn

import numpy as np

from fedbilevel.errors import UnmaskingError
from fedbilevel.federation.secure import layout, masks
from fedbilevel.federation.secure.layout import MaskedExchange, MaskedReply, Revealed

# Checks in a row: of a share, and of a seed, or of one's own secret.
_SHARE = slice(layout.BOX_BYTES, layout.BOX_BYTES + 8)
_LAST = slice(layout.BOX_BYTES + 8, layout.BOX_BYTES + 16)


def check_replies(exchange: MaskedExchange, replies: Mapping[int, MaskedReply]) -> None:
    """Raise if masked replies cannot be added up, before anything is revealed.

    Every two neighbors sent the check of the seed that they share; where the checks
    differ, the site that differs from more others is to blame, or both.
    """
    strangers = sorted(set(replies) - set(exchange.participants))
    kinds = {(one.words.dtype.name, one.words.shape) for one in replies.values()}
    if strangers or len(kinds) != 1 or {name for name, _ in kinds} != {"uint64"}:
        raise UnmaskingError(
            f"exchange {exchange.number}: {len(replies)} replies of types and shapes "
            f"{sorted(kinds)}, of clients {strangers} that were not announced. All "
            "must be uint64 arrays of one shape, and announced. Leave out the others."
        )
    clients, places = sorted(replies), exchange.places
    at = [places[client] for client in clients]
    checks = np.stack([replies[k].sealed[at][:, _LAST] for k in clients])
    apart = (checks != checks.swapaxes(0, 1)).any(axis=2)
    pairs = [(clients[i], clients[j]) for i, j in np.argwhere(apart) if i < j]
    if pairs:
        suspects = _to_blame(pairs, "has other seeds than clients {}")
        raise UnmaskingError(
            f"exchange {exchange.number}: clients {sorted(suspects)} do not have the "
            "seeds that others share with them. Nothing was revealed.",
            suspects,
        )


class Unmasking:
    """Opens the sum over the survivors, with what they revealed.

    `suspects` says whose part was wrong or missing, whether or not the rest sufficed.
    """

    def __init__(
        self,
        exchange: MaskedExchange,
        replies: Mapping[int, MaskedReply],
        revealed: Mapping[int, Revealed],
    ) -> None:
        self.exchange, self.replies, self.revealed = exchange, replies, revealed
        self.suspects = {
            client: "replied, but did not reveal what opens the sum"
            for client in sorted(set(replies) - set(revealed))
        }

    def total(self) -> np.ndarray:
        """Return the sum of the replies, as integers modulo 2^64, for `decode_mean`."""
        check_replies(self.exchange, self.replies)
        secrets, seeds = self._secrets(), self._seeds()
        total = np.zeros_like(next(iter(self.replies.values())).words)
        for client, reply in self.replies.items():
            total += reply.words
            own = masks.self_seed(secrets[client], self.exchange.digest)
            masks.add_mask(total, own, -1)
        for (client, other), seed in seeds.items():
            masks.add_mask(total, seed, -masks.sign(client, other))
        return total

    def _secrets(self) -> dict[int, bytes]:
        """Return the secrets of own masks, each from the shares that are good."""
        good, wrong = self._shares()
        blamed = _to_blame(wrong, "has shares that do not fit those of clients {}")
        self.suspects = blamed | self.suspects
        secrets = {}
        for client, shares in good.items():
            needed = masks.threshold(len(self._holders(client)))
            if len(shares) < needed:
                self._fail(
                    f"{len(shares)} of {needed} shares of client {client} are good"
                )
            some = dict(sorted(shares.items())[:needed])
            secret = masks.combine(some).to_bytes(layout.SHARE_BYTES, "little")
            found = self.exchange.check(b"secret", secret, client)
            if found != self._promised(client, client, _LAST):
                self.suspects[client] = "gave out shares that do not make its secret"
                self._fail(f"the secret of client {client} is not the promised one")
            secrets[client] = secret
        return secrets

    def _shares(self) -> tuple[dict[int, dict[int, bytes]], list[tuple[int, int]]]:
        """Return good shares of each client by point, and the givers of wrong ones."""
        good: dict[int, dict[int, bytes]] = {client: {} for client in self.replies}
        wrong, places = [], self.exchange.places
        for client in self.replies:
            for holder in self._holders(client):
                if holder not in self.revealed:
                    continue
                share = self.revealed[holder].shares[places[client]].tobytes()
                found = self.exchange.check(b"share", share, client, holder)
                if found == self._promised(client, holder, _SHARE):
                    good[client][places[holder] + 1] = share
                else:
                    wrong.append((client, holder))
        return good, wrong

    def _seeds(self) -> dict[tuple[int, int], bytes]:
        """Return the seeds that survivors share with dropped clients."""
        seeds, places = {}, self.exchange.places
        dropped = [k for k in self.exchange.participants if k not in self.replies]
        for client in self.replies:
            shared = set(self._holders(client)) & set(dropped)
            if shared and client not in self.revealed:
                self._fail(f"client {client} did not reveal its seeds")
            for other in sorted(shared):
                seed = self.revealed[client].seeds[places[other]].tobytes()
                found = self.exchange.check(b"seed", seed)
                if found != self._promised(client, other, _LAST):
                    self.suspects[client] = f"revealed a wrong seed with client {other}"
                    self._fail(f"the seed of clients {client} and {other} is wrong")
                seeds[client, other] = seed
        return seeds

    def _holders(self, client: int) -> list[int]:
        """Return the holders of a client's secret's shares, by its own rows."""
        filled = self.replies[client].sealed.any(axis=1)
        return [k for k, place in self.exchange.places.items() if filled[place]]

    def _promised(self, client: int, other: int, part: slice) -> bytes:
        return self.replies[client].sealed[self.exchange.places[other], part].tobytes()

    def _fail(self, why: str) -> NoReturn:
        raise UnmaskingError(
            f"exchange {self.exchange.number}: {why}, so that its sum cannot be opened",
            self.suspects,
        )


def _to_blame(pairs: Iterable[tuple[int, int]], what: str) -> dict[int, str]:
    """Name of every two that do not fit the one that fits fewer others, or both."""
    pairs = list(pairs)
    count = Counter(client for pair in set(pairs) for client in set(pair))
    others: dict[int, list[int]] = {}
    for one, other in pairs:
        for mine, theirs in {(one, other), (other, one)}:
            if count[mine] >= count[theirs]:
                others.setdefault(mine, []).append(theirs)
    return {k: what.format(sorted(set(them))) for k, them in sorted(others.items())}
