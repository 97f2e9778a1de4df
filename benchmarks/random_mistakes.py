"""Draws mistakes at random, of several kinds, the same number in every area.

An own sampler, since two well-known ones do not fit. cosmic-ray and mutmut list every
mutation of the package and run all of them: here tens of thousands, at seconds to
minutes each. Neither draws a seeded sample by area. Neither drops statements or swaps
arguments, which are mistakes that went unnoticed here. cosmic-ray has one test command
for a whole session. mutmut changes function bodies alone, and reaches them through
wrappers that hold every variant: no constant of a class is changed, and JAX would trace
the wrappers. The rest was here: copies, processes with JAX loaded, a list with reasons.

A mistake is a change of one expression or statement. Docstrings, texts, annotations,
decorators, imports, what is raised, and what only type checkers read are left alone.
"""

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Files that decide what a reply tells, and what is told about that.
PRIVACY = {
    "channels/accountant.py",
    "channels/discrete_gaussian.py",
    "federation/ledger.py",
    "federation/noise.py",
    "runtime/privacy.py",
}
_COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_OPERATORS = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Div,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.MatMult: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
_TEXTS = {"warn", "cast", "TypeVar", "NewType", "namedtuple"}


@dataclass(frozen=True)
class Change:
    """One change of a file: what stands between two offsets becomes another text."""

    file: str
    kind: str
    line: int
    lines: frozenset[int]  # who runs one of them, runs it
    start: int
    end: int
    new: str

    def piece(self, text: str) -> tuple[str, str]:
        """Return whole lines that are in the text once, before and after."""
        start, end = text.rfind("\n", 0, self.start) + 1, text.find("\n", self.end)
        while text.count(text[start:end]) > 1:
            start = text.rfind("\n", 0, start - 1) + 1
        before, after = text[start : self.start], text[self.end : end]
        return text[start:end], before + self.new + after


def area_of(file: str) -> str:
    """Return the area of a file: its package, apart from privacy."""
    if file in PRIVACY:
        return "privacy"
    first, below, _ = file.partition("/")
    return first if below else "top level"


def drawn(sources: Path, count: int, seed: int, areas: list[str]) -> list[Change]:
    """Return so many different mistakes, as many in each area, every kind as often."""
    paths = {
        path.relative_to(sources).as_posix(): path for path in sources.rglob("*.py")
    }
    known = sorted({area_of(file) for file in paths})
    if unknown := set(areas) - set(known):
        raise SystemExit(f"no such area: {unknown}; there are {known}")
    names = sorted(areas or known)
    found: dict[str, dict[str, list[Change]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(paths):
        if area_of(file) in names:
            for change in changes_of(file, paths[file].read_text()):
                found[area_of(file)][change.kind].append(change)
    draw, chosen = random.Random(seed), []
    draw.shuffle(names)  # or the last of the alphabet always get one less
    for number in range(count):
        kinds = found[names[number % len(names)]]
        kind = draw.choice(sorted(kind for kind in kinds if kinds[kind]))
        chosen.append(kinds[kind].pop(draw.randrange(len(kinds[kind]))))
    return chosen


def changes_of(file: str, text: str) -> Iterator[Change]:
    """Yield every mistake that can be made in a file."""
    tree, lines, starts = ast.parse(text), text.splitlines(keepends=True), [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int | None, column: int | None) -> int:
        """Return a place in the text; columns are those of bytes."""
        number = (line or 1) - 1
        return starts[number] + len(lines[number].encode()[:column].decode())

    runs = _lines_that_run(tree)
    for kind, node, new in _found(tree):
        place = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno, node.end_col_offset)
        written = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else "pass"
        near = runs.get(node.lineno, frozenset({node.lineno}))
        yield Change(file, kind, node.lineno, near, place, end, written)


def _lines_that_run(tree: ast.Module) -> dict[int, frozenset[int]]:
    """Return for a line those of which one is run where it matters.

    What a module names is of consequence where that name is read, what a class or the
    head of a function says wherever these are used.
    """
    found: dict[int, frozenset[int]] = {}
    read: dict[str, set[int]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read[node.id].add(node.lineno)
        if isinstance(node, ast.stmt):
            span = _span(node)
            if not hasattr(node, "body"):
                found |= dict.fromkeys(span, span)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = (one for one in node.body if not hasattr(one, "body"))
            found |= {line: _span(node) for one in fields for line in _span(one)}
        if isinstance(node, ast.FunctionDef):
            head = range(node.lineno, node.body[0].lineno)
            found |= dict.fromkeys(head, _span(node))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
            lines = read[names[0]] - _span(node) if names else None
            found |= dict.fromkeys(_span(node), frozenset(lines or _span(node)))
    return found


def _span(node: ast.stmt) -> frozenset[int]:
    """Return its lines."""
    return frozenset(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _found(tree: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Yield kind, node, and what stands in its place; a statement is dropped."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if _is_for_others(node):
            continue
        if isinstance(node, ast.expr):
            for kind, new in _of_expression(node):
                yield kind, node, new
        elif isinstance(node, ast.stmt) and _can_be_dropped(node):
            yield "statement", node, ast.Pass()
        if isinstance(node, ast.If | ast.While):
            if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
                yield "boolean", node.test, ast.UnaryOp(ast.Not(), node.test)
            for last in node.body:
                if isinstance(last, ast.Return):  # what follows is done in any case
                    yield "statement", last, ast.Pass()
        waiting += _parts(node)


def _is_for_others(node: ast.AST) -> bool:
    """Return whether type checkers alone read it, or only a command starts it."""
    match node:
        case ast.If(test=ast.Name("TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name("__name__"))):
            return True
    return False


def _parts(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node that are more than text, types or decoration."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Raise() | ast.Assert():
            return []
        case ast.JoinedStr() | ast.match_case(pattern=ast.MatchValue()):
            return []
        case ast.FunctionDef() | ast.Lambda():
            given = [*node.args.defaults, *node.args.kw_defaults]
            body = node.body if isinstance(node.body, list) else [node.body]
            return [*filter(None, given), *body]
        case ast.ClassDef():
            return [*node.body]
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.Call() if _is_text(node):
            return []
    return list(ast.iter_child_nodes(node))


def _is_text(call: ast.Call) -> bool:
    """Return whether a call makes an error or a type, or words a warning."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in _TEXTS or name.endswith(("Error", "Warning"))


def _can_be_dropped(node: ast.stmt) -> bool:
    """Return whether a program may be without a statement and not fail at once."""
    match node:
        case ast.Expr(value=ast.Call()):
            return True
        case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.Assign(targets=[ast.Name(name)], value=value):
            read = (part.id for part in ast.walk(value) if isinstance(part, ast.Name))
            return name in read
    return False


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield every kind of mistake in one expression, and the expression with it."""
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                    yield "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp() if not (_is_string(node.left) or _is_string(node.right)):
            for other in _OPERATORS[type(node.op)]:
                yield "arithmetic", ast.BinOp(node.left, other(), node.right)
        case ast.UnaryOp(op=ast.USub()):
            yield "arithmetic", node.operand
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", node.operand
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", ast.BoolOp(other, node.values)
            for place in range(len(node.values)):
                yield "boolean", _without(node, place)
        case ast.IfExp():
            yield "branch", ast.IfExp(node.test, node.orelse, node.body)
        case ast.Constant():
            for value in _other_values(node.value):
                yield "constant", ast.Constant(value)
        case ast.Call() if not _is_text(node):
            yield from (("argument", new) for new in _other_arguments(node))


def _without(node: ast.BoolOp, place: int) -> ast.expr:
    """Return `a and b` without one of them."""
    rest = [*node.values[:place], *node.values[place + 1 :]]
    return ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]


def _is_string(node: ast.expr) -> bool:
    """Return whether an operand is text, which no operator but + takes."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr)


def _other_values(value: object) -> list[bool | int | float]:
    """Return what stands in the place of a number or of True and False."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1] if value else [1]
        case float():
            return [2 * value, value / 2] if value else [1.0]
    return []


def _other_arguments(node: ast.Call) -> Iterator[ast.expr]:
    """Yield a call with two neighbors swapped, or without a named argument."""
    for place in range(len(node.args) - 1):
        first, second = node.args[place : place + 2]
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and ast.dump(first) != ast.dump(second):
            args = [*node.args[:place], second, first, *node.args[place + 2 :]]
            yield ast.Call(node.func, args, node.keywords)
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            named = [*node.keywords[:place], *node.keywords[place + 1 :]]
            yield ast.Call(node.func, node.args, named)
