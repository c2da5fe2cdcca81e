"""Imports run downwards only: pipeline -> capture, train -> draft -> cache, target -> schemas."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "schemas": set(),
    "cache": {"schemas"},
    "target": {"schemas", "cache"},
    "draft": {"schemas", "cache", "target"},
    "capture": {"schemas", "cache", "target", "draft"},
    "train": {"schemas", "cache", "draft"},
    "pipeline": {"schemas", "cache", "target", "draft", "capture", "train"},
}


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        found |= {name.split(".")[0] for name in names}
    return found & set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_downwards(package):
    files = list((ROOT / package).glob("**/*.py"))
    assert files
    for path in files:
        assert imported_packages(path) <= MAY_IMPORT[package] | {package}, path


@pytest.mark.parametrize("package", sorted(set(MAY_IMPORT) - {"pipeline"}))
def test_only_the_pipeline_prints(package):
    for path in (ROOT / package).glob("**/*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"], path


def test_no_pickle_and_no_unsafe_load():
    for package in MAY_IMPORT:
        for path in (ROOT / package).glob("**/*.py"):
            text = path.read_text(encoding="utf-8")
            assert "weights_only=False" not in text, path
            assert "torch.load(" not in text, path
            assert "pickle" not in {
                a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names
            }, path
