"""Reads the imports: a lower layer never reaches up, and the core stays lean."""

import ast
from pathlib import Path

import fedbilevel

ROOT = Path(fedbilevel.__file__).parent
# Each line may import itself and the lines above it.
LAYERS = [
    {"_types", "errors"},
    {"_tree", "_files", "_registry", "_blocks", "schedules"},
    {"problem"},
    {"theory"},
    {"datasets"},
    {"partition"},
    {"hypergradient"},
    {"estimators"},
    {"algorithms"},
    {"channels"},
    {"tasks"},
    {"runtime"},
    {"result"},
    {"run"},
    {"experiment"},
    {"deployment"},
    {"compare", "calibration"},
    {"planning", "scaling"},
    {"report"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SIBLINGS = {"hypergradient": {"estimators"}, "estimators": {"hypergradient", "problem"}}
# Report reads results only; tasks know nothing of algorithms; channels know replies as
# trees only; data are files and NumPy.
FORBIDDEN = {
    **SIBLINGS,
    "datasets": set(RANK) - {"datasets", "_files", "errors"},
    "partition": set(RANK) - {"partition", "datasets", "errors"},
    "channels": set(RANK) - {"channels", *LAYERS[0], *LAYERS[1]},
    "tasks": {"algorithms", "channels", "hypergradient", "estimators"},
    "report": set(RANK) - {"result", "report", "errors"},
    "result": set(RANK) - {"result", "_files", "errors"},
    "algorithms": {"tasks"},
}
CORE = {"jax", "jaxlib", "equinox", "jaxtyping", "numpy"}
FLOWER = {"flwr", "cryptography", "google", "httpx"}  # and what it is made of
OPTIONAL = {
    "channels": {"dp_accounting"},
    "cli": {"typer", "rich", "flwr"},
    "datasets": {"sklearn", "PIL", "datasets"},
    "deployment": FLOWER,
    "report": {"rich", "matplotlib"},
    "runtime": FLOWER,
    "tasks": {"sklearn"},
}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def reaches_up(layer: str, imported: str) -> bool:
    return RANK[imported] > RANK[layer] or imported in FORBIDDEN.get(layer, ())


def test_no_layer_reaches_up():
    wrong = []
    for path in sources():
        for name in imports_of(path):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == "fedbilevel" and reaches_up(layer_of(path), target):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_check_sees_a_layer_that_reaches_up():
    assert reaches_up("problem", "runtime")
    assert reaches_up("estimators", "problem")
    assert not reaches_up("runtime", "algorithms")


def test_third_parties_are_imported_where_their_extra_is_used():
    standard = set(__import__("sys").stdlib_module_names)
    for path in sources():
        allowed = CORE | OPTIONAL.get(layer_of(path), set()) | standard | {"fedbilevel"}
        used = {name.partition(".")[0] for name in imports_of(path)}
        assert used <= allowed, f"{path.relative_to(ROOT)}: {used - allowed}"


def test_data_are_read_without_jax():
    for path in sources():
        if layer_of(path) in {"datasets", "partition"}:
            used = {name.partition(".")[0] for name in imports_of(path)}
            assert not used & {"jax", "equinox", "jaxtyping"}, path


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in sources()} == set(RANK)


def test_modules_and_functions_stay_small():
    for path in sources():
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                start = body[0].lineno if body else node.lineno
                lines = (node.end_lineno or start) - start + 1
                assert lines <= 40, f"{path.relative_to(ROOT)}: {node.name} {lines}"
