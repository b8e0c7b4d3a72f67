"""The structure of the package: imports point one way, and importing it needs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "splaxel_ns"
MODULES = sorted(PACKAGE.rglob("*.py"))


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """Modules that a file imports when it runs, wherever in it; not those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from runtime_imports(node)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}
IMPORTS = {
    module_name(path): {name for name in runtime_imports(ast.parse(path.read_text())) if name in NAMES}
    for path in MODULES
}


def test_no_circles() -> None:
    """Every module can be placed above all that it imports."""
    # The package's own __init__ imports lazily, inside functions; the ops re-export likewise.
    graph = {name: targets - {name, "splaxel_ns", "splaxel_ns.cuda"} for name, targets in IMPORTS.items()}
    while graph:
        free = [name for name, targets in graph.items() if not targets & graph.keys()]
        assert free, f"these import each other in a circle: {sorted(graph)}"
        for name in free:
            del graph[name]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("types", "partition"),
        ("partition", "render"),
        ("visibility", "render"),
        ("render", "model"),
        ("strategy", "model"),
        ("model", "pipeline"),
        ("datamanager", "pipeline"),
        ("viewer_panel", "pipeline"),
        ("pipeline", "config"),
        ("trainer", "config"),
    ],
)
def test_layers(low: str, high: str) -> None:
    """A lower layer reaches no higher one, directly or through others."""
    reached, queue = set(), [f"splaxel_ns.{low}"]
    while queue:
        for target in IMPORTS[queue.pop()] - reached - {"splaxel_ns"}:
            reached.add(target)
            queue.append(target)
    assert f"splaxel_ns.{high}" not in reached


def test_ops_stand_alone() -> None:
    """`splaxel_ns.cuda` knows nothing of the rest of the package, so it can be used without nerfstudio."""
    for name, targets in IMPORTS.items():
        if name.startswith("splaxel_ns.cuda"):
            assert {target for target in targets if not target.startswith("splaxel_ns.cuda")} <= {"splaxel_ns"}, name


def test_only_comm_may_communicate() -> None:
    allowed = {
        "comm": "torch.distributed",
        "rendezvous": "torch.distributed",
        "shards": "torch.distributed.checkpoint",
    }  # by module: below this name
    for path in MODULES:
        names = {name for name in runtime_imports(ast.parse(path.read_text())) if name.startswith("torch.distributed")}
        assert all(name.startswith(allowed.get(path.stem, "none")) for name in names), path


def test_plugin_modules_import_without_compiler(tmp_path: Path) -> None:
    """Method and dataparsers import with an empty PATH and an empty cache, and leave the cache empty."""
    code = (
        "import splaxel_ns, splaxel_ns.config, splaxel_ns.dataparsers.matrixcity, splaxel_ns.dataparsers.colmap; "
        "assert splaxel_ns.config.splaxel.config.method_name == 'splaxel'"
    )
    environment = {"PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
