"""Arrows point one way: core <- strategies <- engine <- transport, runtime, jobs; the pure layers know no Ray."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from ray_lowcomm.strategies import ALGORITHMS

ROOT = Path(__file__).parents[2]
FOREIGN = {"ray", "mlflow", "pydantic", "pydantic_settings"}
ALLOWED = {
    "core": {"core"},
    "strategies": {"core", "strategies"},
    "engine": {"core", "strategies", "engine"},
    "integrations": {"core", "engine", "integrations"},
    "models": {"core", "models"},
    "data": {"core", "data"},
}


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("layer", ALLOWED)
def test_layer_imports_only_what_lies_below_it(layer: str) -> None:
    for file in (ROOT / "ray_lowcomm" / layer).rglob("*.py"):
        for name in _imports(file):
            parts = name.split(".")
            assert parts[0] not in FOREIGN, f"{file} imports {name}"
            if parts[0] == "ray_lowcomm" and len(parts) > 1:
                assert parts[1] in ALLOWED[layer], f"{file} imports {name}"


# each is loaded in a process of its own: what it must do without (Ray Train, and torch's compiler, take a second each)
LIGHT = {
    "pure layers": (("transport.local", "engine.replica", "strategies"), FOREIGN),
    "driver": (("runtime.driver",), {"ray.train", "torch._dynamo"}),
    "cohort": (("runtime.cohort",), {"torch._dynamo"}),
}


@pytest.mark.parametrize("what", LIGHT)
def test_what_is_loaded_does_without(what: str) -> None:
    modules, absent = LIGHT[what]
    code = f"import sys; import {', '.join(f'ray_lowcomm.{name}' for name in modules)}; " + (
        f"print([name for name in {sorted(absent)!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_engine_and_trainer_name_no_algorithm() -> None:
    names = set(ALGORITHMS)
    for file in [*(ROOT / "ray_lowcomm" / "engine").rglob("*.py"), *(ROOT / "ray_lowcomm" / "runtime").rglob("*.py")]:
        texts = {n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)}
        assert not names & {text for text in texts if isinstance(text, str)}, file


def test_no_module_of_the_engine_needs_itself() -> None:
    """Also not for its types only: what can be seen without running it, such as under TYPE_CHECKING, counts."""
    files = {f"ray_lowcomm.engine.{file.stem}": file for file in (ROOT / "ray_lowcomm" / "engine").glob("*.py")}
    needs = {name: _imports(file) & files.keys() - {name} for name, file in files.items()}
    assert "ray_lowcomm.engine.messages" in needs["ray_lowcomm.engine.coordinator"]
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


def test_files_stay_small() -> None:
    for folder in ("ray_lowcomm", "jobs", "tune_spaces", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= 400, f"{file}: what of it could be a file of its own?"
