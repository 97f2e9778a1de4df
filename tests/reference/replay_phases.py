"""Draws what clients will draw in one phase of a run, [client][t], as NumPy rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.algorithms import every_phase
from fedbilevel.hypergradient._base import Bundle
from fedbilevel.problem import Oracle
from fedbilevel.runtime import Job, keys

LONGEST = 64  # drawn whatever is asked for, so that a draw compiles only once


def draw_phase(job: Job, phase: str, count: int, draw: Callable) -> list[list[Any]]:
    """Return `draw(oracle, key)` for every client and its first `count` iterations."""
    where = (keys.ROUNDS, phase_number(job, phase))
    return _draw(job, where, count, draw)


def draw_setup(job: Job, count: int, draw: Callable) -> list[list[Any]]:
    """Return the same for the first phase before the rounds."""
    return _draw(job, (keys.SETUP, 0), count, draw)


def _draw(job: Job, where: tuple[int, int], count: int, draw: Callable):
    assert count <= LONGEST
    oracle = job.oracle(jnp.asarray(0))
    drawn = _draw_long(oracle, job.key, where, job.data.clients, draw)
    host = jax.tree.map(np.asarray, drawn)

    def one(client: int, t: int):
        return _plain(jax.tree.map(lambda leaf: leaf[client, t], host))

    return [[one(k, t) for t in range(count)] for k in range(job.data.clients)]


def phase_number(job: Job, phase: str) -> int:
    """Return the number by which the keys know a phase."""
    return [one.name for one in every_phase(job.algorithm.phases())].index(phase)


def _draw_long(oracle: Oracle, root, where, clients: int, draw: Callable):
    def of_client(client):
        turn = keys.client_turn(root, where, client, 0)
        mine = replace(oracle, client=client)
        return jax.vmap(lambda key: draw(mine, key))(turn.keys(LONGEST))

    return jax.vmap(of_client)(jnp.arange(clients))


def _plain(drawn):
    # Rows for batches, (xi, zeta_0, factors) for bundles.
    if isinstance(drawn, Bundle):
        rows, count = drawn.factors.rows, len(drawn.factors.rows["s"])
        factors = [{name: rows[name][j] for name in rows} for j in range(count)]
        return drawn.upper.rows, drawn.cross.rows, factors
    if isinstance(drawn, tuple):
        return tuple(map(_plain, drawn))
    return getattr(drawn, "rows", drawn)  # or the length of a random series


def xi(oracle: Oracle, key):
    """Draw an upper sample."""
    return oracle.draw_upper(key)


def zeta(oracle: Oracle, key):
    """Draw a lower sample."""
    return oracle.draw_lower(key)


def one_of_each(oracle: Oracle, key):
    """Draw an upper sample and, independent of it, a lower one."""
    return _both(oracle, key)


def bundle_of(job: Job):
    """Return the draw of a hypergradient's bundle."""
    rule: Any = job.algorithm.hypergradient  # pyright: ignore[reportAttributeAccessIssue]
    return eqx.Partial(_bundle, rule)


def bundle_and_zeta_of(job: Job):
    """Return the draw of a bundle and, independent of it, a lower sample."""
    rule: Any = job.algorithm.hypergradient  # pyright: ignore[reportAttributeAccessIssue]
    return eqx.Partial(_bundle_and_zeta, rule)


def three_lines(oracle: Oracle, key):
    """Draw zeta for omega, (xi, zeta) for q and (xi, zeta) for nu."""
    for_omega, for_q, for_nu = jr.split(key, 3)
    return zeta(oracle, for_omega), _both(oracle, for_q), _both(oracle, for_nu)


def _bundle(rule, oracle: Oracle, key):
    return rule.draw(oracle, key)


def _bundle_and_zeta(rule, oracle: Oracle, key):
    for_bundle, for_zeta = jr.split(key)
    return rule.draw(oracle, for_bundle), zeta(oracle, for_zeta)


def _both(oracle: Oracle, key):
    upper, lower = jr.split(key)
    return xi(oracle, upper), zeta(oracle, lower)
