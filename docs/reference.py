"""Pages of wrappers and metrics, the table of errors, and programs of methods."""

import inspect
from dataclasses import MISSING
from typing import Any

from costs import ASKED

from fedbilevel import errors
from fedbilevel.algorithms.wrappers import WRAPPERS, Wrapper
from fedbilevel.evaluation.assessment import MEANINGS as OF_MODELS
from fedbilevel.report.page.sections import MEANINGS as OF_RUNS

# Metrics of tasks, by what measures them.
OF_TASKS = {
    "grad_norm_sq": "squared norm of the gradient of the whole problem at x",
    "upper_error": "distance of x from the solution",
    "lower_error": "distance of y from the lower solution at x",
    "criterion": "`grad_norm_sq` plus a multiple of the squared `lower_error`",
    "balanced_accuracy": "share of right answers, each class counting alike",
    "balanced_error": "share of wrong answers, each class counting alike",
    "worst_group_loss": "mean loss of the group with the larger one",
    "loss_gap": "difference of the mean losses of the two groups",
    "accuracy_gap": "difference of the accuracies of the two groups",
    "accuracy_group_0": "share of right answers in the first group",
    "accuracy_group_1": "share of right answers in the second group",
    "weight_group_1": "weight of the second group in training",
    "weight_auc": "chance that a right label has a larger weight than a wrong one",
    "weight_clean": "mean weight of rows with right labels",
    "weight_corrupted": "mean weight of rows with wrong labels",
    "new_task_error": "error on tasks that no client has, after adapting to them",
    "operation_0": "operation with the largest weight on the first edge",
    "operation_1": "operation with the largest weight on the second edge",
    "weight_SOURCE": "weight of a source of texts",
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(c) for c in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def shown(value: Any) -> str:
    """Return a default, as it is typed."""
    typed = str(value).lower() if isinstance(value, bool) else value
    return "" if value in ("", None, MISSING) else f"`{typed}`"


def program_of(name: str) -> str:
    """Return the smallest program that runs a method, and the same as a command."""
    options = ASKED.get(name, {})
    more = f", options={options!r}".replace("'", '"') if options else ""
    typed = "".join(f" --set {one}={value}" for one, value in options.items())
    return (
        "```python\nfrom fedbilevel.experiments import Experiment\n\n"
        f'result = Experiment("quadratic", "{name}", rounds=20{more}).run()\n'
        "print(result.final)\n```\n\nThe same from the command line:\n\n"
        f"    fedbilevel run quadratic --algorithm {name} --rounds 20{typed}\n"
    )


def wrappers_page() -> str:
    """Return every wrapper, with its parameters and what it does."""
    parts = [
        "# Wrappers\n\nA wrapper varies a method, and is itself one. Give it to a run "
        "with `--with`, as often as you like; the first is the innermost. Values "
        "follow in the order of the parameters, with colons between them. Values in "
        "brackets may be left out.\n\n"
        "    fedbilevel run quadratic --algorithm fedbio --with controls --with ball=20"
        "\n\nIn Python a wrapper is a function, such as "
        "`fedbilevel.algorithms.wrappers.controls(method)`.\n\n"
    ]
    rows = [(f"[{one.name}](#{one.name})", one.summary) for one in WRAPPERS.values()]
    parts.append(table(("wrapper", "what it does"), rows))
    return "".join(parts) + "".join(map(_wrapper, WRAPPERS.values()))


def _wrapper(one: Wrapper) -> str:
    rows = []
    for parameter in one.parameters.values():
        meaning = parameter.metadata.get("meaning", "")
        words = parameter.metadata.get("words")
        choices = f": {', '.join(words)}" if words else ""
        needed = parameter.default is MISSING
        default = "must be given" if needed else shown(parameter.default)
        rows.append((f"`{parameter.name}`", default, f"{meaning}{choices}"))
    listed = table(("parameter", "default", "meaning"), rows) if rows else ""
    return (
        f"\n## {one.name}\n\n{one.summary} Written `--with {one.usage()}`.\n\n{listed}"
    )


def metrics_page() -> str:
    """Return every metric, by where it is found."""
    shelves = {
        "How good the model is": (
            "Measured on rows that nobody trained on, with intervals, for the shared "
            "model and for simpler ones: in `quality.json` and in the report.",
            OF_MODELS,
        ),
        "Columns of every run": (
            "Measured after every so many rounds: in `result.columns`.",
            OF_RUNS,
        ),
        "Metrics of tasks": (
            "Further columns, which the [tasks](which-task.md) add. Measures of your "
            "own are functions of x and y: `fedbilevel.run(..., metrics=...)`.",
            OF_TASKS,
        ),
    }
    parts = ["# Metrics\n\nLower is better for losses and errors.\n"]
    for title, (about, meanings) in shelves.items():
        rows = [(f"`{name}`", meaning) for name, meaning in meanings.items()]
        parts.append(f"\n## {title}\n\n{about}\n\n{table(('metric', 'meaning'), rows)}")
    return "".join(parts)


def error_classes() -> dict[str, type[Exception]]:
    """Return the errors and warnings of the package, by name."""
    return {
        name: one
        for name, one in vars(errors).items()
        if isinstance(one, type)
        and issubclass(one, Exception)
        and one.__module__ == errors.__name__
    }


def errors_table() -> str:
    """Return the classes of errors and warnings, and what each is caught with."""
    rows = []
    for name, one in sorted(error_classes().items()):
        first = (inspect.getdoc(one) or "").split("\n\n")[0]
        bases = ", ".join(f"`{base.__name__}`" for base in one.__bases__)
        rows.append((f"`{name}`", bases, first))
    return (
        "\n## Classes\n\nImport them from `fedbilevel.errors`. All errors are "
        "`FedbilevelError`.\n\n" + table(("class", "is a", "when"), rows)
    )
