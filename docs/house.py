"""Draws the parts of the package, each above what it imports, as SVG.

`python docs/house.py` writes the drawing of CONTRIBUTING.md.
"""

import ast
from pathlib import Path

_WIDTH, _HEIGHT, _GAP, _ROW = 130, 34, 14, 84


def imports(folder: Path) -> dict[str, set[str]]:
    """Return which public parts of a package each of them imports."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        names = found.setdefault(part, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= _parts(node.module, [alias.name for alias in node.names])
    public = {part for part in found if not part.startswith("_")}
    return {part: (found[part] & public) - {part} for part in public}


def _parts(module: str, names: list[str]) -> set[str]:
    package, *rest = module.split(".")
    if package != "fedbilevel":
        return set()
    return {rest[0]} if rest else set(names)


def rows_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the parts by rows, each below all that import it; the top row first."""
    depth: dict[str, int] = {}

    def measured(part: str) -> int:
        if part not in depth:
            depth[part] = 1 + max(map(measured, graph[part]), default=0)
        return depth[part]

    deepest = max(map(measured, graph))
    levels = range(deepest, 0, -1)
    return [sorted(part for part in graph if depth[part] == one) for one in levels]


def needed(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out arrows that others imply: what is reached over a part in between."""
    reach: dict[str, set[str]] = {}

    def reached(part: str) -> set[str]:
        if part not in reach:
            reach[part] = graph[part].union(*map(reached, graph[part]))
        return reach[part]

    return {
        part: {
            one
            for one in below
            if not any(one in reached(other) for other in below - {one})
        }
        for part, below in graph.items()
    }


def drawn(folder: Path) -> str:
    """Return the picture of a package."""
    graph = imports(folder)
    rows = rows_of(graph)
    widest = max(map(len, rows)) * (_WIDTH + _GAP)
    places = {
        part: (
            (widest - len(row) * (_WIDTH + _GAP)) / 2 + k * (_WIDTH + _GAP),
            n * _ROW,
        )
        for n, row in enumerate(rows)
        for k, part in enumerate(row)
    }
    lines = [
        f'<line x1="{places[a][0] + _WIDTH / 2:.0f}" y1="{places[a][1] + _HEIGHT}" '
        f'x2="{places[b][0] + _WIDTH / 2:.0f}" y2="{places[b][1]}"/>'
        for a, below in sorted(needed(graph).items())
        for b in sorted(below)
    ]
    boxes = [
        f'<rect x="{x:.0f}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text x="{x + _WIDTH / 2:.0f}" y="{y + 22}">{part}</text>'
        for part, (x, y) in places.items()
    ]
    height = len(rows) * _ROW
    style = (
        "<style>.house line{stroke:gray}"
        ".house rect{fill:var(--md-default-bg-color,white);stroke:currentColor}"
        ".house text{fill:currentColor;text-anchor:middle;font-size:15px}</style>"
    )
    return (
        f'<svg class="house" role="img" aria-label="Parts and what they import" '
        f'viewBox="0 0 {widest} {height}" xmlns="http://www.w3.org/2000/svg">'
        f"{style}{''.join(lines)}{''.join(boxes)}</svg>"
    )


def alone(folder: Path) -> str:
    """Return the picture as a file, whose colors are not those of a page."""
    text = drawn(folder).replace("var(--md-default-bg-color,white)", "white")
    return text.replace("currentColor", "black") + "\n"


if __name__ == "__main__":
    here = Path(__file__).parent
    place = here / "figures" / "architecture.svg"
    place.write_text(alone(here.parent / "src" / "fedbilevel"))
