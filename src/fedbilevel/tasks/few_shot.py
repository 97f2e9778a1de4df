r"""Few-shot learning: client = learning task, and x is what makes a new task easy.

    f_k(x, y_k) = error of a network on client k's query set

`lower=head`: x are the hidden layers, y_k is the last one on top of them,

    g_k(x, y_k) = error on client k's support set + (strength/2) ||y_k||^2

`lower=proximal` (iMAML): y_k are all layers, x is what they are pulled to,

    g_k(x, y_k) = error on client k's support set + (strength/2) ||y_k - x||^2

`lower=unrolled` (MAML): y_k is where a few gradient steps U_k on the support set lead
all layers from x. The Hessian is the identity, the hypergradient that through U_k:

    g_k(x, y_k) = 1/2 ||y_k - U_k(x)||^2

`data=sinusoid` are waves, with half the mean square as error. Anything else is a name
or path of images in alphabets, as Omniglot's: a task is to classify some characters,
its error the cross entropy. Whole alphabets are kept for new tasks.

y_k never leaves its client. A row is a whole set, so oracles are exact with a batch of
one. Measured are the query sets of tasks that no client has, after adapting to their
support sets; the mean square of waves, the share of images classified wrong and right.
`random_features_...` is the same for a head on the layers of the start.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedbilevel._types import Lower, Pair, Scalar, Upper
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Layer, Predictor
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _domains
from fedbilevel.tasks._base import MEASURED_BELOW, Point, Task, settings
from fedbilevel.tasks._domains import AbstractKind, Episodes, Head, Sizes
from fedbilevel.tasks._labeled import check_choice
from fedbilevel.tasks._networks import Network, layers_of

_WAVES = "sinusoid"
_NEW_TASKS = 50
_KINDS = {"head": Head, "proximal": _domains.Proximal, "unrolled": _domains.Unrolled}
_PLAIN = MEASURED_BELOW | settings("batch=1 upper_weight=1 lower_weight=1")


class _Usual(NamedTuple):
    """Default values for a kind of lower problem."""

    recommended: str
    strength: float = 0.0
    inner_step: float = 0.0
    inner_steps: int = 0
    # One evaluation a step, at a y that has moved before: half the cost.
    algorithm: str = "fedbio-clientwise"


class _Setting(NamedTuple):
    """Default values for a data set."""

    clients: int
    sizes: Sizes
    recommended: str
    kinds: Mapping[str, _Usual]


_SETTINGS = {
    "sinusoid": _Setting(
        32,
        Sizes(ways=0, shots=10, queries=40),
        "local_steps=5",
        {
            "head": _Usual(
                "rounds=600 q=10 theta=0.4 upper_step=0.06 lower_step=0.4",
                0.001,
                algorithm="local-bsgvrm",
            ),
            "proximal": _Usual(
                "rounds=400 q=10 theta=0.03 upper_step=0.2 lower_step=0.03",
                0.5,
                0.05,
                100,
                "local-bsgvrm",
            ),
            "unrolled": _Usual(
                "rounds=600 q=2 theta=0.9 upper_step=0.2 lower_step=1", 0.0, 0.02, 5
            ),
        },
    ),
    "images": _Setting(
        40,
        Sizes(ways=5, shots=1, queries=15),
        "local_steps=3 rounds=40",
        {
            "head": _Usual("q=5 theta=0.15 upper_step=0.8 lower_step=0.3", 0.1),
            "proximal": _Usual(
                "q=10 theta=0.05 upper_step=0.2 lower_step=0.05", 1.0, 0.05, 20
            ),
            "unrolled": _Usual(
                "q=2 theta=0.9 upper_step=0.5 lower_step=1", 0.0, 0.2, 5
            ),
        },
    ),
}


_NEW, _RANDOM = "new_task", "random_features"  # what is measured, and compared with


class _NewTasks(eqx.Module):
    """How well tasks that no client has are learned with x."""

    episodes: Episodes
    kind: AbstractKind = eqx.field(static=True)
    head: Head = eqx.field(static=True)

    def __call__(self, x: Upper, y: Lower) -> dict[str, Array]:
        """Return the means over tasks."""
        return self.means(_NEW, self.kind, x, y)

    def means(
        self, name: str, kind: AbstractKind, x: Upper, y: Lower
    ) -> dict[str, Array]:
        """Adapt to every task from x, for a y of the same shape."""

        def of_task(episode: Episodes) -> dict[str, Scalar]:
            adapted = kind.adapt(x, y, episode.support)
            scores = kind.scores(x, adapted, episode.query["inputs"])
            return kind.loss.measure(scores, episode.query["targets"])

        # One by one: XLA spreads a batch of dense solves over the threads that the
        # simulator's devices wait on, and neither would ever end.
        found = jax.lax.map(of_task, self.episodes)
        return {f"{name}_{what}": jnp.mean(one) for what, one in found.items()}


def _with_random_features(task: Task, point: Point) -> dict[str, float]:
    """Measure a head on the layers of the start."""
    del point
    found: Any = task.metrics
    x, y = task.x, task.y
    if isinstance(x, Network):
        x, y = x.hidden, x.head
    means = found.means(_RANDOM, found.head, x, y)
    return {name: float(value) for name, value in means.items()}


def _check(data: str, lower: str, numbers: Mapping[str, float]) -> None:
    """Raise for a number that cannot be, or that nothing would read."""
    for name, value in numbers.items():
        if not 0 <= value < np.inf:
            raise InvalidInputError(
                f"{name}={value}: it must be positive, or 0 for the usual value."
            )
    unread = {
        "ways": "data=sinusoid has no classes" * (data == _WAVES),
        "strength": "with lower=unrolled nothing is held" * (lower == "unrolled"),
        "inner_step": "lower=head takes no such steps" * (lower == "head"),
        "inner_steps": "lower=head takes no such steps" * (lower == "head"),
    }
    for name, reason in unread.items():
        if reason and numbers[name]:
            raise InvalidInputError(f"{name}={numbers[name]}: {reason}. Leave it out.")


_TO_ADAPT = (
    "a run of few-shot leaves what new tasks begin with, which predicts none of them "
    "by itself. Adapt it to some labeled rows: {}, in Python with "
    "`Model.load(RUN)` or, elsewhere, with what `fedbilevel export` writes."
)
_FIT = "fit a linear layer on `model.scores(model.features(rows))`"
_TRAIN = "continue to train its layers on them, by a few gradient steps"


def _layers(x: Any, y: Any) -> tuple[Layer, ...]:
    """Return what tasks share as layers of a model: hidden ones, or all."""
    if isinstance(x, Network):
        return layers_of(x.hidden, x.head)
    return x.layers_of_model(y.weight.shape[-1])


def make(
    clients: int = 0,
    *,
    data: Annotated[
        str, "sinusoid, or a folder of alphabet/character01/*.png, as Omniglot"
    ] = "sinusoid",
    lower: Annotated[
        str, "what a learning task has of its own: head, proximal or unrolled"
    ] = "head",
    ways: Annotated[int, "characters to classify; 0 is 5"] = 0,
    shots: Annotated[
        int, "size of the support set; 0 is 10, or 1 of each character"
    ] = 0,
    queries: Annotated[
        int, "size of the query set; 0 is 40, or 15 of each character"
    ] = 0,
    strength: Annotated[
        float, "l2 strength below, for lower=head and lower=proximal; 0: usual for it"
    ] = 0.0,
    inner_step: Annotated[float, "size of a gradient step below; 0: usual for it"] = (
        0.0
    ),
    inner_steps: Annotated[
        int,
        "gradient steps of lower=unrolled, and those with which lower=proximal adapts "
        "to a new task; 0: usual for it",
    ] = 0,
    instance: Annotated[
        int,
        "random seed of the learning tasks, of the alphabets kept for new ones, and of "
        "the first network",
    ] = 0,
) -> Task:
    """Build the task; a 0 leaves a number to the data and the lower problem."""
    check_choice("lower", lower, tuple(_KINDS))
    counts = {"ways": ways, "shots": shots, "queries": queries}
    moves = {"inner_step": inner_step, "inner_steps": inner_steps}
    every = {"clients": clients, **counts, "strength": strength, **moves}
    _check(data, lower, every)
    setting = _SETTINGS[_WAVES if data == _WAVES else "images"]
    usual, of_head = setting.kinds[lower], setting.kinds["head"]
    sizes = replace(setting.sizes, **{name: n for name, n in counts.items() if n})
    tasks = (clients or setting.clients, _NEW_TASKS)
    if data == _WAVES:
        domain = _domains.waves(tasks, sizes, instance)
    else:
        domain = _domains.characters_of(data, tasks, sizes, instance)
    own, new, network, loss = domain
    kind = _KINDS[lower](
        loss,
        strength or usual.strength,
        inner_step or usual.inner_step,
        inner_steps or usual.inner_steps,
    )
    is_head = isinstance(kind, Head)
    head = kind if is_head else Head(loss, of_head.strength)
    metrics = _NewTasks(jax.tree.map(jnp.asarray, new), kind, head)
    x, y = kind.start(network)
    measured = [name.replace(_NEW, _RANDOM) for name in jax.eval_shape(metrics, x, y)]
    advice = _TO_ADAPT.format(_FIT if is_head else _TRAIN)
    above, below = (
        [
            {name: leaf[k : k + 1] for name, leaf in sets.items()}
            for k in range(tasks[0])
        ]
        for sets in (own.query, own.support)
    )
    return Task(
        Problem(kind.upper, kind.lower, private=Pair(False, True)),
        ClientData.from_clients(above, below),
        x,
        y,
        metrics,
        headline="new_task_error",
        recommended=_PLAIN | settings(f"{setting.recommended} {usual.recommended}"),
        conclusion=_with_random_features,
        concludes=dict.fromkeys(sorted(measured), "number"),
        algorithm=usual.algorithm,
        predictor=Predictor(_layers, loss.pixels, advice),
    )
