"""Reads the imports: a lower layer never reaches up, and the core stays lean."""

import ast
import sys
from functools import cache
from pathlib import Path

import fedbilevel

ROOT = Path(fedbilevel.__file__).parent
# Each line may import itself and the lines above it.
LAYERS = [
    {"_types", "errors", "units"},
    {
        *("_tree", "_files", "_folders", "_registry", "_blocks", "_evaluation"),
        *("_schema", "_table_choices", "_text", "schedules"),
    },
    {"pytorch"},
    {"startup"},
    {"problem"},
    {"datasets"},
    {"models"},
    {"evaluation"},
    {"hypergradient"},
    {"estimators"},
    {"channels"},
    {"algorithms"},
    {"theory"},
    {"tasks"},
    {"runtime"},
    {"tracking"},
    {"result"},
    {"saved"},
    {"standings"},
    {"report"},
    {"studies"},
    {"federation"},
    {"experiments"},
    {"sklearn"},
    {"deployment"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
LOWEST = LAYERS[0] | LAYERS[1]
# What a layer must not know, though it lies above: estimators know no problem, channels
# replies as trees only, tasks no method, runtimes and studies objects and no names, a
# federation what it runs; data are files and NumPy; report reads results only.
FORBIDDEN = {
    "hypergradient": {"datasets", "estimators"},
    "estimators": {"datasets", "hypergradient", "problem"},
    "datasets": set(RANK) - {"datasets", "_files", "_table_choices", "errors"},
    "algorithms": {"datasets"},
    "channels": set(RANK) - {"channels", *LOWEST},
    "theory": {"channels", "datasets"},
    "tasks": {"hypergradient", "estimators", "algorithms", "channels", "theory"},
    "runtime": {"datasets", "tasks", "theory"},
    "studies": {"datasets", "tasks"},
    "federation": {"datasets", "tasks", "theory", "studies"},
    "evaluation": set(RANK) - {"evaluation"},
    "report": set(RANK)
    - {"saved", "standings", "result", "report", "errors", "evaluation", "_text"},
    "tracking": set(RANK) - {"tracking", "runtime", *LOWEST},
    "models": set(RANK) - {"models", "datasets", *LOWEST},
    "result": set(RANK) - {"result", "models", *LOWEST},
    "saved": set(RANK) - {"saved", "result", "_files", "_folders", "_text", "errors"},
}
READS_TEXT = {"experiments", "sklearn", "deployment", "cli"}
CORE = {"jax", "jaxlib", "equinox", "jaxtyping", "numpy"}
FLOWER = {"flwr", "cryptography", "google", "httpx"}  # and what it is made of
OPTIONAL = {
    "algorithms": {"optax"},
    "channels": {"dp_accounting"},
    "cli": {"typer", "rich", "flwr"},
    "datasets": {"sklearn", "PIL", "datasets", "tokenizers"},
    "deployment": FLOWER,
    "federation": FLOWER,
    "models": {"safetensors", "onnx"},
    "pytorch": {"torch"},
    "report": {"rich", "matplotlib", "plotly", "jinja2", "PIL"},
    "studies": {"optuna"},
    "sklearn": {"sklearn"},
    "tracking": {"tensorboardX", "mlflow", "wandb"},
    "result": {"matplotlib", "pandas"},
}
# Layers that are there only where their extra is.
EXTRA = {"federation", "deployment", "report", "cli", "sklearn"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
STANDARD = set(sys.stdlib_module_names) | {"fedbilevel"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path, *, at_once: bool = False) -> set[str]:
    """Return what a module imports: anywhere, or before any function is called."""
    found = set()
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif not (at_once and isinstance(node, FUNCTIONS)):
            waiting += ast.iter_child_nodes(node)
    return found


def third_parties(path: Path, *, at_once: bool = False) -> set[str]:
    """Return the packages of others that a module imports."""
    imported = imports_of(path, at_once=at_once)
    return {name.partition(".")[0] for name in imported} - STANDARD


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def reaches_up(layer: str, imported: str) -> bool:
    rank = RANK.get(imported, len(LAYERS))  # of what is nowhere: above all
    return rank > RANK[layer] or imported in FORBIDDEN.get(layer, ())


def test_no_layer_reaches_up():
    wrong = []
    for path in sources():
        for name in imports_of(path):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if target == "__version__":
                continue
            if package == "fedbilevel" and reaches_up(layer_of(path), target):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_only_those_who_read_text_import_experiments():
    for path in sources():
        if layer_of(path) not in READS_TEXT:
            wrong = {name for name in imports_of(path) if "fedbilevel.exp" in name}
            assert not wrong, path


def test_the_check_sees_a_layer_that_reaches_up():
    assert reaches_up("problem", "runtime")
    assert reaches_up("estimators", "problem")
    assert reaches_up("federation", "studies")
    assert not reaches_up("runtime", "algorithms")


def test_third_parties_are_imported_where_their_extra_is_used():
    for path in sources():
        allowed = CORE | OPTIONAL.get(layer_of(path), set())
        others = third_parties(path) - allowed
        assert not others, f"{path.relative_to(ROOT)}: {others}"


def test_the_core_imports_extras_only_when_they_are_asked_for():
    for path in sources():
        if layer_of(path) not in EXTRA:
            others = third_parties(path, at_once=True) - CORE
            assert not others, f"{path.relative_to(ROOT)}: {others}"


def test_the_check_sees_what_is_imported_at_once(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import jax\ndef f():\n    import optax\nclass A:\n    import rich\n"
    )
    assert third_parties(path, at_once=True) == {"jax", "rich"}
    assert third_parties(path) == {"jax", "rich", "optax"}


def module_of(path: Path) -> str:
    """Return the dotted name of a module, or of a package."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(imported: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            fresh = imported[waiting.pop()] - found
            found |= fresh
            waiting += fresh
        return found

    after = {name: reached(name) for name in imported}
    rings = {
        frozenset(other for other in after[name] if name in after[other])
        for name in imported
        if name in after[name]
    }
    return [set(ring) for ring in rings]


def test_no_modules_import_each_other():
    # Imports inside functions and those for type checkers alone count, too.
    modules = {module_of(path): path for path in sources()}

    def module(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    imported = {
        name: {module(one) for one in imports_of(path)} & modules.keys()
        for name, path in modules.items()
    }
    assert circles(imported) == []


def test_the_check_sees_modules_that_import_each_other():
    imported = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"e"}}
    assert sorted(map(sorted, circles(imported))) == [["b", "c"], ["e"]]


def test_data_are_read_without_jax():
    for path in sources():
        if layer_of(path) == "datasets":
            assert not third_parties(path) & {"jax", "equinox", "jaxtyping"}, path


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in sources()} == set(RANK)
