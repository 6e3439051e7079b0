"""Command line that tries the tests: ``python -m tests.mutants FILE [...] [--count N] [--seed S] [--run COMMAND]``.

Each of N mutants is one small change to one of the product files, chosen by the seed: another comparison, a condition
turned round, a number that is one more, a statement that is left out. The tests that the change reaches are run against
it. A mutant that they do not catch is printed, and the file is put back as it was in any case. Run it in a clone: the
checkout changes while it runs.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = "python -m pytest -q -x -n 2 --dist loadfile --changed=HEAD --costs 0"
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
}


@dataclass(frozen=True)
class Mutant:
    """One changed file: what was changed, at which line, and the file's text with the change."""

    file: Path
    line: int
    change: str
    text: str


def mutants(file: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse(file.read_text("utf-8"))
    nodes = list(ast.walk(tree))
    skipped = _not_code(tree)
    for index, node in enumerate(nodes):
        if node in skipped:
            continue
        for choice in range(_choices(node)):
            changed = copy.deepcopy(tree)
            change = _change(list(ast.walk(changed))[index], choice)
            text = ast.unparse(ast.fix_missing_locations(changed))
            yield Mutant(file, getattr(node, "lineno", 0), change, text)


def _not_code(tree: ast.AST) -> set[ast.AST]:
    """Annotations, blocks for type checkers, and what tests cannot see: calls of loggers and texts of errors."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        apart: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign | ast.arg):
            apart.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            apart += [node.returns, *node.decorator_list]
        elif (
            (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
            or (isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "LOGGER.", "_logger.")))
            or isinstance(node, ast.JoinedStr)
        ):
            apart.append(node)
        for each in apart:
            if each is not None:
                found.update(ast.walk(each))
    return found


def _choices(node: ast.AST) -> int:
    if isinstance(node, ast.Compare):
        return int(type(node.ops[0]) in _COMPARISONS)
    if isinstance(node, ast.BoolOp | ast.If | ast.While | ast.IfExp):
        return 1
    if isinstance(node, ast.BinOp):
        return int(type(node.op) in _ARITHMETIC)
    if isinstance(node, ast.Constant):
        return int(isinstance(node.value, bool | int))
    if isinstance(node, ast.Expr):
        return int(isinstance(node.value, ast.Call | ast.Await))
    if isinstance(node, ast.Return):
        return int(node.value is not None and not isinstance(node.value, ast.Constant))
    return 0


def _change(node: ast.AST, choice: int) -> str:
    before = ast.unparse(node).splitlines()[0]
    if isinstance(node, ast.Compare):
        node.ops[0] = _COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.BinOp):
        node.op = _ARITHMETIC[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Expr | ast.Return):
        node.value = ast.Constant(None)
    after = ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]
    return f"{before}  ->  {after}"


def chosen(files: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """Mutants by chance: first a file, then a mutant of it, so that long files are not tried more than short ones."""
    dice = random.Random(seed)
    found: dict[Path, list[Mutant]] = {file: list(mutants(file)) for file in files}
    picked: list[Mutant] = []
    while len(picked) < count and any(found.values()):
        file = dice.choice([file for file, left in found.items() if left])
        picked.append(found[file].pop(dice.randrange(len(found[file]))))
    return picked


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N: they are known")
    parser.add_argument("--run", default=RUN, help=f"the tests, by default {RUN}")
    options = parser.parse_args()
    command = [sys.executable if word == "python" else word for word in shlex.split(options.run)]
    survived = 0
    picked = chosen([file.resolve() for file in options.files], options.count, options.seed)
    for number, mutant in enumerate(picked):
        if number < options.skip:
            continue
        original = mutant.file.read_text("utf-8")
        begun = time.monotonic()
        try:
            mutant.file.write_text(mutant.text, "utf-8")
            code = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
        finally:
            mutant.file.write_text(original, "utf-8")
        survived += code == 0
        place = f"{mutant.file.relative_to(ROOT)}:{mutant.line}"
        word = "SURVIVED" if code == 0 else f"caught ({code})"
        print(f"{number} {word} {time.monotonic() - begun:.0f} s {place}: {mutant.change}", flush=True)
    print(f"{survived} of {len(picked) - options.skip} survived, seed {options.seed}")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
