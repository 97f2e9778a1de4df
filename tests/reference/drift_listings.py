"""Local steps with corrections for drift and absence, in NumPy, for any blocks.

A point w is a list of blocks, `lines[i](w, sample)` the direction of block i, and
`samples[k][t][i]` what client k draws for it at iteration t. `cohorts[r]` are the
clients of round r, and `shares[k]` add up to 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def plain(G, now, before, d, a):
    """Return the sample."""
    return G(now)


def moving_average(G, now, before, d, a):
    """Return a step of a moving average."""
    return G(now) if a == 1 else (1 - a) * d + a * G(now)


def storm(G, now, before, d, a):
    """Return a step of STORM."""
    return G(now) if a == 1 else G(now) + (1 - a) * (d - G(before))


@dataclass
class Walk:
    """A method of one loop: its lines, steps and weights, and how it is corrected.

    Blocks move in the groups of `order`, each evaluated where those before have moved.
    With `gamma` the server steps along the sums of directions, as SimFBO's does.
    """

    lines: list[Callable]
    p: int
    step: Callable
    weight: Callable = lambda t: None
    estimator: Callable = plain
    drift: str | None = None
    absent: str = "keep"
    order: list[tuple[int, ...]] = field(default_factory=list)
    gamma: Any = None

    def run(self, w, samples, cohorts, shares, anchors=()):
        """Return w, d and c of the server after the last round, and all c_k.

        `anchors[r]` are a client and its samples, for each of the anchor of round r.
        """
        self.order = self.order or [tuple(range(len(w)))]
        zeros = [np.zeros_like(block) for block in w]
        d, c, own = zeros, zeros, [zeros] * len(samples)
        last, stood, all_stood = {}, {}, None
        for r, cohort in enumerate(cohorts):
            if self.drift == "anchor":
                told = [self._mean_sample(w, drawn) for _, drawn in anchors[r]]
                c = _mean(told, [shares[k] for k, _ in anchors[r]])
            ends, changes = [], []
            for k in cohort:
                missed = self.p * (r - 1 - last.get(k, -1))
                before = [w] * len(self.order)
                if r > 0 and missed == 0:
                    before = stood[k]
                elif r > 0 and self.absent == "correct":
                    before = all_stood
                turn = (r, samples[k], before, missed)
                w_k, d_k, sums, mean, stood[k] = self._local(w, d, c, own[k], *turn)
                changes.append(_subtract(mean, own[k]))
                own[k], last[k] = mean, r
                ends.append((w_k, d_k, sums))
            part = [shares[k] for k in cohort]
            ended, d, sums = (_mean(one, part) for one in zip(*ends, strict=True))
            if self.gamma is not None:
                moves = zip(w, self.gamma, sums, strict=True)
                ended = [block - g * q for block, g, q in moves]
            w = ended
            groups = zip(*(stood[k] for k in cohort), strict=True)
            all_stood = [_mean(group, part) for group in groups]
            if self.drift == "controls":
                moved = zip(c, _mean(changes, part), strict=True)
                c = [old + sum(part) * change for old, change in moved]
        return w, d, c, own

    def _local(self, start, d, c, c_k, r, drawn, before, missed):
        w, d = list(start), list(d)
        sums, total = ([np.zeros_like(one) for one in w] for _ in range(2))
        for t in range(r * self.p, (r + 1) * self.p):
            seen = []
            for group, was in zip(self.order, before, strict=True):
                at = list(w)
                seen.append(at)
                for i in group:

                    def raw(v, i=i, t=t):
                        return self.lines[i](v, drawn[t][i])

                    shift = self._shift(raw, start, c[i], c_k[i])

                    def G(v, raw=raw, shift=shift):
                        return raw(v) + shift

                    a = 1 if t == 0 or self.weight(t) is None else self.weight(t)[i]
                    if self.absent == "forget" and t == r * self.p:
                        a = 1 - (1 - a) ** (1 + missed)
                    d[i] = self.estimator(G, at, was, d[i], a)
                    sums[i], total[i] = sums[i] + d[i], total[i] + raw(at)
                    w[i] = w[i] - self.step(t)[i] * d[i]
            before = seen
        return w, d, sums, [one / self.p for one in total], before

    def _shift(self, raw, start, c, c_k):
        if self.drift == "controls":
            return c - c_k
        return c - raw(start) if self.drift == "anchor" else 0

    def _mean_sample(self, w, drawn):
        every = [
            [line(w, one[i]) for i, line in enumerate(self.lines)] for one in drawn
        ]
        return [np.mean(block, axis=0) for block in zip(*every, strict=True)]


def _mean(many, part):
    blocks = zip(*many, strict=True)
    return [np.average(np.stack(one), axis=0, weights=part) for one in blocks]


def _subtract(a, b):
    return [left - right for left, right in zip(a, b, strict=True)]
