"""The import rules of design section 1, read from the syntax trees: who may enter which room, and who may
look at a clock."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("policies", "workloads", "sim", "executor", "results")
TOP_LEVEL = {*PACKAGES, "tests", "pyproject.toml", "Makefile", "README.md", "ARCHITECTURE.md", "LICENSE"}

MAY_IMPORT = {
    "policies.core": ("policies.core",),
    "policies.costs": ("policies.costs", "policies.core", "policies.process"),
    "policies.process": ("policies.process", "policies.core"),
    "policies": ("policies",),
    "workloads": ("workloads", "policies.core", "policies.process"),
    "results": ("results", "policies.core", "policies.process"),
    "sim": ("sim", "results", "policies", "workloads"),
    "executor": ("executor", "results", "policies", "workloads"),
}
"""Rooms of ours that a room may import. `sim` and `executor` write their run directories with `results`."""

NEVER_IMPORTS = {
    "policies": ("torch", "triton", "simpy", "numpy", "pandas"),
    "workloads": ("torch", "triton", "simpy"),
    "results": ("torch", "triton", "simpy"),
    "sim": ("torch", "triton"),
    "executor": ("simpy",),
}
CLOCK_CALLS = {"now", "utcnow", "today"}
OFF_THE_SIMULATED_PATH = ("sim/bench.py", "sim/progress.py")
"""They tell a person how long it takes; nothing that a simulation does comes back from them."""
ON_THE_WALL_CLOCK = ("sim/paced.py", "workloads/serving/desk.py", "workloads/serving/server.py")
"""Where real clients live, and the simulation that waits for them."""


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything `path` imports, wherever it stands; for `from a import b` both `a`
    and `a.b`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                folders = path.relative_to(ROOT).parent.parts
                module = ".".join(
                    [*folders[: len(folders) - node.level + 1], *([node.module] if node.module else [])]
                )
            else:
                module = node.module or ""
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def room_of(path: Path) -> str:
    """The most special room of `MAY_IMPORT` that holds `path`."""
    module = name_of(path).replace("/", ".")
    return max((room for room in MAY_IMPORT if is_in(module, room)), key=len)


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def breaches(paths: list[Path]) -> list[str]:
    """Every import of ours or of a banned library that the room of its file may not make."""
    found = []
    for path in paths:
        room = room_of(path)
        plain_imports = {(line, module) for line, module in imported(path)}
        for line, module in sorted(plain_imports):
            top = module.split(".")[0]
            if top == "policies" and room in ("workloads", "results"):
                is_allowed = any(is_in(module, allowed) for allowed in MAY_IMPORT[room])
                is_allowed = is_allowed or (module == "policies" and (line, "policies.core") in plain_imports)
            elif top in (*PACKAGES, "tests"):
                is_allowed = any(is_in(module, allowed) for allowed in MAY_IMPORT[room])
            else:
                is_allowed = top not in NEVER_IMPORTS[room.split(".")[0]]
            if not is_allowed:
                found.append(f"{name_of(path)}:{line} imports {module}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_from_a_room_it_may_not_enter(package: str) -> None:
    assert breaches(sources(package)) == []


def test_the_core_imports_the_standard_library_alone_and_neither_a_clock_nor_chance() -> None:
    found = []
    for path in sources("policies/core"):
        for line, module in imported(path):
            top = module.split(".")[0]
            if not is_in(module, "policies.core") and top not in sys.stdlib_module_names:
                found.append(f"{name_of(path)}:{line} imports {module}")
            if top in ("time", "datetime", "random", "secrets", "threading", "asyncio"):
                found.append(f"{name_of(path)}:{line} imports {module}")
    assert found == []


def test_nothing_on_the_simulated_path_reads_a_wall_clock() -> None:
    found = []
    for path in sources("policies", "workloads", "sim"):
        if name_of(path) in (*OFF_THE_SIMULATED_PATH, *ON_THE_WALL_CLOCK):
            continue
        found += [
            f"{name_of(path)}:{line} imports {module}"
            for line, module in imported(path)
            if is_in(module, "time")
        ]
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CLOCK_CALLS
            ):
                owner = ast.unparse(node.func.value)
                if owner.split(".")[-1] in ("datetime", "date", "time", "Timestamp"):
                    found.append(f"{name_of(path)}:{node.lineno} calls {owner}.{node.func.attr}")
    assert found == []


def test_only_the_command_line_imports_what_is_off_the_simulated_path() -> None:
    clocked = {name.removesuffix(".py").replace("/", ".") for name in OFF_THE_SIMULATED_PATH}
    importers = {
        name_of(path) for path in sources(*PACKAGES) for _, module in imported(path) if module in clocked
    }
    assert importers <= {"sim/cli.py"}
    served = {name.removesuffix(".py").replace("/", ".") for name in ON_THE_WALL_CLOCK}
    importers = {
        name_of(path) for path in sources(*PACKAGES) for _, module in imported(path) if module in served
    }
    outside = {name for name in importers if not name.startswith("workloads/serving/")}
    assert outside <= {
        "sim/serve.py",
        "executor/serve.py",
        "executor/clientele.py",
        "executor/lab/serving_cost.py",
    }


def test_policies_and_core_never_iterate_a_set() -> None:
    found = []
    for path in sources("policies"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.For | ast.comprehension):
                looped = node.iter
                is_call = isinstance(looped, ast.Call) and getattr(looped.func, "id", "") in (
                    "set",
                    "frozenset",
                )
                if isinstance(looped, ast.Set | ast.SetComp) or is_call:
                    found.append(f"{name_of(path)}:{looped.lineno} iterates {ast.unparse(looped)}")
    assert found == []


def test_no_code_asks_whether_it_is_simulated() -> None:
    found = []
    for path in sources("policies", "workloads", "executor"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                words = [
                    getattr(part, "id", getattr(part, "attr", "")).lower() for part in ast.walk(node.test)
                ]
                if any("simulat" in word or word in ("is_sim", "sim") for word in words):
                    found.append(f"{name_of(path)}:{node.lineno} asks {ast.unparse(node.test)}")
    assert found == []


def test_importing_all_that_a_simulation_needs_loads_neither_torch_nor_the_executor() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources("policies", "workloads", "results", "sim")
        if path.name not in ("__main__.py", "__init__.py")
    ]
    script = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]; "
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'triton', 'executor'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_top_level_names_are_exactly_those_of_the_design() -> None:
    visible = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    ignored = {name for name in visible if name in ("build", "__pycache__") or name.endswith(".egg-info")}
    assert visible - ignored <= TOP_LEVEL
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("*.py"))} == {
        *PACKAGES,
        "tests",
    }


def test_tests_are_flat_so_that_no_folder_of_theirs_can_shadow_a_package() -> None:
    assert [
        path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and list(path.rglob("*.py"))
    ] == []


def test_every_package_on_disk_is_listed_in_pyproject() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    )
    on_disk = {".".join(path.relative_to(ROOT).parent.parts) for path in sources(*PACKAGES)}
    assert listed == on_disk


@pytest.mark.parametrize(
    ("file", "line", "is_breach"),
    [
        ("policies/core/x.py", "import simpy", True),
        ("policies/core/x.py", "from policies.wcpb import Wavefront", True),
        ("policies/x.py", "from policies.core.seam.batch import Stage", False),
        ("policies/x.py", "def f():\n    import torch", True),
        ("policies/x.py", "from workloads import spec", True),
        ("workloads/x.py", "from policies import registry", True),
        ("workloads/x.py", "from policies import core", False),
        ("workloads/x.py", "from policies.registry import POLICIES", True),
        ("results/x.py", "from policies.core import runlog", False),
        ("results/x.py", "import sim.backend", True),
        ("sim/x.py", "import torch.nn", True),
        ("sim/x.py", "import importlib\nimportlib.import_module('executor.run')", True),
        ("executor/x.py", "from simpy import rt", True),
        ("executor/x.py", "from sim.backend import SimBackend", True),
        ("executor/x.py", "from policies.costs.latency import LatencyModel", False),
        ("policies/costs/x.py", "from policies.registry import POLICIES", True),
        ("executor/x.py", "from policies.registry import POLICIES", False),
        ("sim/x.py", "from . import backend", False),
        ("results/x.py", "from ..sim import backend", True),
    ],
)
def test_the_walk_sees_a_breach_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str, is_breach: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n", encoding="utf-8")
    assert bool(breaches([path])) == is_breach
