"""How a program is best written for the device that runs it.

Mathematics says what is computed; these choices change how fast, never what. The
runtime makes them once, while it traces a program.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace

import jax
from jax.experimental.xla_metadata import set_xla_metadata


@dataclass(frozen=True)
class Evaluation:
    """Choices for one kind of device.

    `stacks_points` evaluates a map at two points in one stacked call, else one after
    the other: by a loop or, as `writes_out_points` says, by two calls in the program,
    which XLA orders as it likes. `draws_early` draws the samples of all factors of a
    series before its loop, else inside of it. `unroll` is the most factors in one turn
    of that loop. `writes_out_hashes` draws random bits by one kernel instead of a loop
    of many. `splits_kernels` lets XLA divide one kernel among the threads of all cores.
    `small_kernels` says that all of them are short: compiling counts for more.
    """

    stacks_points: bool
    draws_early: bool
    unroll: int
    writes_out_hashes: bool
    writes_out_points: bool = False
    splits_kernels: bool = True
    small_kernels: bool = False


# On the CPU a stacked product has two free axes, which XLA transposes first (softmax
# regression, 16 clients: 470 us a client step against 280 one after the other), and
# unrolling only compiles longer. Hashes in a loop add 70 us to the 85 of a small step.
PROCESSOR = Evaluation(
    stacks_points=False, draws_early=True, unroll=1, writes_out_hashes=True
)
# Rows that two points share are read once, for a product with the thin weights of both:
# the same regression on two cores takes 1530 to 1650 us one after the other and 920 to
# 1040 stacked with batches of 128, 720 to 780 and 430 to 690 with 64; with a hidden
# layer of 64 units it is 1040 and 1450. With 32 it was 430 and 460 while gathers were
# split among threads; where they are not, another machine's core takes 1382 and 1248.
THIN_PRODUCTS = Evaluation(
    stacks_points=True, draws_early=False, unroll=1, writes_out_hashes=True
)
# An H200 takes both points at once (1024 clients: 4.0 us a client step against 7.2). It
# shares a draw of two points inside the loop (4.5 to 4.1 us), and 9 % of a factor goes
# into the loop itself.
ACCELERATOR = Evaluation(
    stacks_points=True, draws_early=False, unroll=5, writes_out_hashes=False
)
# With weights of millions of numbers it gives stacked points an order of axes, in every
# factor, and the products another: a quarter of a step goes into transposing. Written
# out, a client step with 10.0M numbers takes 2720 us instead of 2958, with 1.07M 275
# instead of 291, and 154 instead of 186 where the loss works in bfloat16.
WIDE_PRODUCTS = replace(ACCELERATOR, stacks_points=False, writes_out_points=True)

_CURRENT: ContextVar[Evaluation] = ContextVar("evaluation", default=PROCESSOR)


def apart() -> AbstractContextManager:
    """Let functions under `jax.jit` stay functions in a program for a CPU.

    What XLA inlines it fuses, into each kernel that uses it: LLVM then compiles it as
    many times. A barrier would not do, since XLA takes it away before it fuses.
    """
    if jax.default_backend() != "cpu":
        return nullcontext()
    return set_xla_metadata(inlineable="false")


def current() -> Evaluation:
    """Return the choices that hold while this program is traced."""
    return _CURRENT.get()


@contextmanager
def using(evaluation: Evaluation) -> Iterator[None]:
    """Let the choices hold for programs that are traced inside."""
    token = _CURRENT.set(evaluation)
    try:
        yield
    finally:
        _CURRENT.reset(token)
