r"""Regularized linear models of rows in one place, to compare a shared one with.

Classes: mean cross entropy + strength/2 ||W||^2, the intercepts free; of two classes
the second alone has a score. Solved by Newton's method, whose systems are solved by
conjugate gradients on products with the rows. Numbers: ridge regression, in closed
form. Columns are standardized on the rows that are fitted.
"""

from collections.abc import Callable

import numpy as np

_GRID = np.logspace(-4, 4, 10)  # of C, the inverse of rows times strength
_ALPHAS = np.logspace(-3, 5, 10)
_FOLDS = 5
_MOST_ROWS = 4000  # that choose a strength: with more, the choice matters little
_NEWTON_STEPS, _SYSTEM_STEPS = 50, 200
_WORSE = 2  # strengths in a row that are worse than the best end the search

Fitted = Callable[[np.ndarray], np.ndarray]  # from rows to what is predicted


def standardized(features: np.ndarray) -> Fitted:
    """Return what centers and scales columns; constant ones become 0."""
    center, spread = features.mean(axis=0), features.std(axis=0)
    spread = np.where(spread > 1e-9, spread, np.inf)
    return lambda asked: (asked - center) / spread


def base_rate(label: np.ndarray, classes: int) -> np.ndarray:
    """Return the share of every class; half a row more of each, so that none is 0."""
    counts = np.bincount(label, minlength=classes) + 0.5
    return counts / counts.sum()


def fit_classes(
    features: np.ndarray, label: np.ndarray, classes: int, inverse: float | None = None
) -> Fitted:
    """Fit classes; `inverse` is scikit-learn's C, chosen by five folds if left out.

    Classes without a row have the share that `base_rate` gives them.
    """
    columns, share = standardized(features), base_rate(label, classes)
    present, codes = np.unique(label, return_inverse=True)
    rows = columns(features)
    if inverse is None:
        inverse = _chosen_inverse(rows, codes, len(present))
    strength = 1 / (inverse * len(rows))
    weights = _newton(_Objective(rows, codes, len(present), strength))
    seen = share[present].sum() if len(present) < classes else 1.0

    def predict(asked: np.ndarray) -> np.ndarray:
        found = np.tile(share, (len(asked), 1))
        found[:, present] = seen * _probabilities(_scores(columns(asked), weights))
        return found

    return predict


def fit_numbers(
    features: np.ndarray, label: np.ndarray, alpha: float | None = None
) -> Fitted:
    """Fit numbers; `alpha` is scikit-learn's, chosen by five folds if left out."""
    columns = standardized(features)
    rows, center = columns(features), label.mean()
    if alpha is None:
        alpha = _chosen_alpha(rows, label)
    weights = _ridge(rows, label - center, np.asarray([alpha]))[:, 0]
    return lambda asked: center + columns(asked) @ weights


def _chosen_inverse(rows: np.ndarray, codes: np.ndarray, classes: int) -> float:
    rows, codes, fold = _dealt(rows, codes)
    parts = [fold == number for number in range(_FOLDS)]
    starts: list[np.ndarray | None] = [None] * _FOLDS
    losses: list[float] = []
    for inverse in _GRID:
        total = 0.0
        for number, left in enumerate(parts):
            kept, own = rows[~left], codes[~left]
            loss = _Objective(kept, own, classes, 1 / (inverse * len(kept)))
            weights = starts[number] = _newton(loss, starts[number], 1e-3)
            found = _probabilities(_scores(rows[left], weights))
            chances = found[np.arange(len(found)), codes[left]]
            total -= np.log(np.maximum(chances, 1e-15)).sum()
        losses.append(total)
        if len(losses) - 1 - int(np.argmin(losses)) >= _WORSE:
            break
    return float(_GRID[int(np.argmin(losses))])


def _chosen_alpha(rows: np.ndarray, label: np.ndarray) -> float:
    rows, label, fold = _dealt(rows, label)
    errors = np.zeros(len(_ALPHAS))
    for number in range(_FOLDS):
        left = fold == number
        kept, center, middle = rows[~left], label[~left].mean(), rows[~left].mean(0)
        weights = _ridge(kept - middle, label[~left] - center, _ALPHAS)
        predicted = center + (rows[left] - middle) @ weights
        errors += ((predicted - label[left][:, None]) ** 2).sum(axis=0)
    return float(_ALPHAS[int(np.argmin(errors))])


def _dealt(
    rows: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows that choose a strength, and the fold of each, with all labels."""
    order = np.random.default_rng(0).permutation(len(rows))[:_MOST_ROWS]
    order = order[np.argsort(label[order], kind="stable")]
    return rows[order], label[order], np.arange(len(order)) % _FOLDS


def _ridge(rows: np.ndarray, label: np.ndarray, alphas: np.ndarray) -> np.ndarray:
    """Return the weights of centered rows, a column for each alpha."""
    values, vectors = np.linalg.eigh(rows.T @ rows)
    along = vectors.T @ (rows.T @ label)
    return vectors @ (along[:, None] / (np.maximum(values, 0)[:, None] + alphas))


def _scores(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the scores of rows; the last row of the weights are intercepts."""
    return rows @ weights[:-1] + weights[-1]


def _probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the chance of every class; one column is the second of two classes."""
    if scores.shape[1] == 1:
        scores = np.hstack([np.zeros_like(scores), scores])
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    return chances / chances.sum(axis=1, keepdims=True)


class _Objective:
    """The regularized loss of rows, its gradient, and products with its Hessian."""

    def __init__(
        self, rows: np.ndarray, codes: np.ndarray, classes: int, strength: float
    ) -> None:
        self.rows, self.strength = rows, strength
        member = np.eye(classes)[codes]
        self.member = member[:, 1:] if classes == 2 else member
        self.codes, self.classes = codes, classes

    def start(self) -> np.ndarray:
        """Return weights of 0, whose intercepts give the shares of the classes."""
        weights = np.zeros((self.rows.shape[1] + 1, self.member.shape[1]))
        share = np.log(base_rate(self.codes, self.classes))
        weights[-1] = share[1] - share[0] if self.classes == 2 else share
        return weights

    def at(self, weights: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the value, the gradient, and the chances of the scored classes."""
        chances = _probabilities(_scores(self.rows, weights))
        own = chances[np.arange(len(chances)), self.codes]
        value = -np.log(np.maximum(own, 1e-300)).mean()
        value += 0.5 * self.strength * float(np.sum(weights[:-1] ** 2))
        if self.member.shape[1] == 1:
            chances = chances[:, 1:]
        slope = self._back(chances - self.member)
        slope[:-1] += self.strength * weights[:-1]
        return value, slope, chances

    def product(self, chances: np.ndarray, move: np.ndarray) -> np.ndarray:
        """Return the Hessian times a move."""
        change = _scores(self.rows, move)
        if chances.shape[1] == 1:
            bent = chances * (1 - chances) * change
        else:
            mean = np.sum(chances * change, axis=1, keepdims=True)
            bent = chances * (change - mean)
        found = self._back(bent)
        found[:-1] += self.strength * move[:-1]
        return found

    def _back(self, residual: np.ndarray) -> np.ndarray:
        found = np.vstack([self.rows.T @ residual, residual.sum(axis=0)])
        return found / len(self.rows)


def _newton(
    loss: _Objective, start: np.ndarray | None = None, tolerance: float = 1e-7
) -> np.ndarray:
    """Return the weights at which the gradient is below a tolerance."""
    weights = loss.start() if start is None else start
    value, slope, chances = loss.at(weights)
    for _ in range(_NEWTON_STEPS):
        size = float(np.linalg.norm(slope))
        if size <= tolerance:
            break
        # Solved as exactly as pays at this distance from the minimum.
        step = _solved(loss, chances, slope, min(0.1, size**0.5) * size)
        gain, length = float(np.sum(step * slope)), 1.0
        while length > 1e-6:
            found = loss.at(weights - length * step)
            if found[0] <= value - 1e-4 * length * gain + 1e-15:
                break
            length /= 2
        else:
            break  # rounding is all that is left
        weights, (value, slope, chances) = weights - length * step, found
    return weights


def _solved(
    loss: _Objective, chances: np.ndarray, slope: np.ndarray, tolerance: float
) -> np.ndarray:
    """Return the Newton step by conjugate gradients, scaled by the diagonal."""
    spread = (chances * (1 - chances)).mean(axis=0)
    scale = np.broadcast_to(spread, slope.shape).copy()  # columns have variance 1
    scale[:-1] += loss.strength
    scale = np.maximum(scale, 1e-12)
    step, left = np.zeros_like(slope), slope.copy()
    ready = left / scale
    along, size = ready, float(np.sum(left * ready))
    for _ in range(_SYSTEM_STEPS):
        bent = loss.product(chances, along)
        curvature = float(np.sum(along * bent))
        if curvature <= 0:
            break
        step = step + size / curvature * along
        left = left - size / curvature * bent
        if np.linalg.norm(left) <= tolerance:
            break
        ready = left / scale
        newer = float(np.sum(left * ready))
        along, size = ready + newer / size * along, newer
    return step if np.any(step) else slope
