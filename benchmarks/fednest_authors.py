# pyright: reportMissingImports=false
"""FedNest's published setting by its authors' program, beside ours.

    git clone https://github.com/mc-nya/FedNest /tmp/FedNest
    python benchmarks/peers.py --only steps         # makes the environment of the peers
    taskset -c 0 runs/peers/venv/bin/python benchmarks/fednest_authors.py /tmp/FedNest

Both run in one process on one core, in turns, on random rows of MNIST's shape: network
784-200-10 with dropout, 100 clients with 300 rows a level, 10 in an exchange, batches
of 64, 25 steps below, one above, 5 factors. A client must evaluate as many derivatives
on both sides. *passes* is as published: a mean slope is that of a pass over the rows,
in five batches; ours draws five. *one batch* is as we are: theirs gets one batch for a
pass, and 25 epochs of it. Printed are processor seconds of an exchange, medians, and
quartiles of the ratio.

Of the authors' program only what hands out rows is replaced, by slices of a tensor:
with images, read one by one, an exchange takes four times as long.
"""

import contextlib
import io
import os
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from peer_clients import Simulation
from peer_timing import Row, paired, table

from fedbilevel.algorithms import Phase
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.problem import ClientData, Problem, coin_mask
from fedbilevel.runtime import Job, Sampling
from fedbilevel.runtime.counts import count

CLIENTS, TOGETHER, ROWS, BATCH, STEPS = 100, 10, 300, 64, 25
BATCHES, EXCHANGES, ROUNDS_AT_ONCE = 5, 10, 2  # of a pass, of a round, of a call
FLAGS = "--hlr 0.01 --lr 0.01 --outer_tau 1 --local_bs 64 --gpu -1"  # of fig2.sh


class Slices:
    """Batches cut from a tensor, in the place of the authors' loader."""

    def __init__(self, most, split, **_):
        self.own, (self.rows, self.labels), self.most = split.idxs, split.dataset, most

    def __iter__(self):
        mixed = torch.tensor(np.random.permutation(self.own))
        for places in mixed.split(BATCH)[: self.most]:
            yield self.rows[places], self.labels[places]


class Authors:
    """The authors' program on given rows."""

    def __init__(self, features, labels, most):
        for name in ("cv2", "importlib_metadata"):  # imported there, and never used
            sys.modules.setdefault(name, mock.MagicMock())
        from core import Client_hr, ClientManage_hr, function
        from models.Nets import MLP
        from utils.options import args_parser

        self.settings, self.most = args_parser(), most
        self.settings.local_ep, self.of_client = STEPS // most, Client_hr
        self.manager, self.assign = ClientManage_hr, function.assign_hyper_gradient
        self.data = features.view(-1, 1, 28, 28), labels.view(-1)
        places = np.arange(labels.numel()).reshape(CLIENTS, 2, ROWS)
        self.users = {k: places[k, 0] for k in range(CLIENTS)}
        self.users |= {-k - 1: places[k, 1] for k in range(CLIENTS)}
        torch.manual_seed(0)
        self.net, self.draw = MLP(784, 200, 10), np.random.default_rng(0)
        self.levels = self.net.layer_input, self.net.header
        self.x = list(self.net.layer_input.parameters())
        self.step = torch.optim.SGD(self.x, lr=1)

    def _cohort(self):
        drawn = self.draw.choice(CLIENTS, TOGETHER, replace=False)
        task = (self.data, self.users, self.x)
        return self.manager.ClientManageHR(self.settings, self.net, drawn, *task)

    def run(self):
        """Run a round."""
        self.of_client.DataLoader = partial(Slices, self.most)
        with contextlib.redirect_stdout(io.StringIO()):
            self.net.load_state_dict(self._cohort().fed_in()[0])
            slope, exchanges = self._cohort().fed_out()
        assert exchanges == EXCHANGES - 2  # FedInn has two
        self.assign(self.x, slope)
        self.step.step()

    def counts(self):
        """Return what a client evaluates in a round, batch by batch."""
        calls, client, most = Counter(), self.of_client.Client, self.most

        def counting(name, kind, number):
            def called(*arguments):
                calls[kind] += number
                return plain(*arguments)

            plain = getattr(client, name)
            return mock.patch.object(client, name, called)

        with (
            counting("cross_entropy", "upper_gradients", 1),
            counting("cross_entropy_reg", "lower_gradient", 1),
            # What products differentiate is counted with the products.
            counting("grad_d_in_d_y", "lower_gradient", -most),
            counting("hvp_iter", "hessian_product", most),
            counting("hyper_grad", "cross_product", most),
        ):
            self.run()
        return {name: number // TOGETHER for name, number in calls.items()}


class Passes:
    """An oracle whose sample is five batches."""

    def __init__(self, oracle):
        self.oracle = oracle

    def __getattr__(self, name):
        found = getattr(self.oracle, name)
        if name.startswith("draw"):
            return lambda key: [found(one) for one in jax.random.split(key, BATCHES)]

        def mean(*arguments):
            every = [found(*arguments[:-1], batch) for batch in arguments[-1]]
            return jax.tree.map(lambda *leaves: sum(leaves) / BATCHES, *every)

        return mean


class FedNestInPasses(FedNest):
    """FedNest with a pass in the place of a batch, but for the steps below."""

    def phases(self):
        """Return the same phases, changed."""

        def changed(phase):
            def local(message, client, oracle, turn):
                return phase.local(message, client, Passes(oracle), turn)

            steps = phase.name == "inner_correct"
            return phase if steps else replace(phase, local=local)

        found = super().phases()
        return jax.tree.map(changed, found, is_leaf=lambda one: isinstance(one, Phase))


def our_job(method, features, labels, levels):
    """Return our job on the same rows, with the same weights and losses."""

    def upper(x, y, rows):
        hidden = jax.nn.relu(rows["features"] @ x[0].T + x[1])
        if "kept" in rows:
            hidden = jnp.where(rows["kept"], hidden / 0.5, 0)
        scores = jax.nn.log_softmax(hidden @ y[0].T + y[1])
        return -jnp.mean(jnp.take_along_axis(scores, rows["label"][:, None], 1))

    def lower(x, y, rows):
        return upper(x, y, rows) + 0.05 * sum(jnp.linalg.norm(leaf) for leaf in y)

    def dropped(key, rows):
        return {**rows, "kept": coin_mask(key, (len(rows["label"]), 200))}

    algorithm = method(
        **{"alpha": 0.01, "beta": 0.01 * STEPS},  # theirs does not divide by the parts
        **{"inner_rounds": 1, "local_steps": STEPS, "upper_steps": 1},
        **{"ell": 100.0, "terms": 5, "random_length": False},
    )
    pairs = zip(features.numpy(), labels.int().numpy(), strict=True)
    rows = [{"features": a, "label": b} for a, b in pairs]
    data = ClientData.from_clients(rows[1::2], rows[::2])
    problem = Problem(upper, lower, dropped, dropped)
    x, y = (
        [jnp.asarray(w.detach().numpy()) for w in one.parameters()] for one in levels
    )
    return Job.of(algorithm, problem, data, x, y, sampling=Sampling(BATCH, TOGETHER))


def main():
    assert len(os.sched_getaffinity(0)) == 1, "give it one core, by `taskset`"
    sys.path.insert(0, sys.argv[1])
    sys.argv[1:] = FLAGS.split()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    features = torch.randn(2 * CLIENTS, ROWS, 784)
    labels = torch.randint(10, (2 * CLIENTS, ROWS))
    rows, kinds = [], {"passes": (FedNestInPasses, BATCHES), "one batch": (FedNest, 1)}
    for pairing, (method, most) in kinds.items():
        theirs = Authors(features, labels, most)
        job = our_job(method, features, labels, theirs.levels)
        told, other = count(job, 1), theirs.counts()
        mine = {name: number // TOGETHER for name, number in told["calls"].items()}
        assert (mine, told["exchanges"]) == (other, EXCHANGES), (told, other)
        ours = partial(Simulation(job).advance, ROUNDS_AT_ONCE)
        found = paired(ours, theirs.run, ROUNDS_AT_ONCE * EXCHANGES, EXCHANGES)
        rows.append(Row(pairing, "the authors' program", *found, None, str(mine)))
    print(table(rows))


if __name__ == "__main__":
    main()
