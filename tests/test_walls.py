"""The import rules of the package, checked in its source, so that lazy imports are covered, too."""

import ast
import functools
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.package_source import FILES, NAMES, PACKAGE, nodes_of, parsed

import lp_runtime

ROOT = Path(__file__).parents[1]
MAX_MODULES = 15  # in a folder, without __init__

# From the lowest layer up. A part may import itself and parts of lower layers only.
LAYERS = [
    {"errors"},
    {"config", "utils"},
    {"lookahead", "text"},
    {"constraints", "distributed", "kernels"},
    {"sampling", "sizing"},
    {"model"},
    {"calibration", "request"},
    {"chat", "decoder"},
    {"prefill"},
    {"engine"},
    {"dropin", "replica"},
    {"launchers"},
    {"runtime"},
    {"bench", "scheduler"},
    {"server"},
    {"entrypoints"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(name: str) -> str:
    """Return the part of the package that a file belongs to: a subpackage or a top-level module."""
    return name.removesuffix(".py").split("/")[0]


@functools.cache
def imports_of(name: str) -> list[tuple[str, bool]]:
    """Return (dotted name, whether it is lazy) of every import of a file; `from a import b` gives a.b.

    An import is lazy inside a function, or if it is for type checkers only.
    """
    results = []

    def visit(node: ast.AST, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            if isinstance(child, ast.Import):
                results.extend((alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name}: a relative import"
                results.extend((f"{child.module}.{alias.name}", lazy) for alias in child.names)
            is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"  # never run
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            visit(child, lazy or is_function or is_typing)

    visit(parsed(name), False)
    return results


@functools.cache
def chains_of(name: str) -> set[str | None]:
    """Return all attribute chains of a file, such as os.environ."""
    return {dotted(node) for node in nodes_of(name) if isinstance(node, ast.Attribute)}


def dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` of an attribute chain; None if it does not start with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return None


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def importers_of(*packages: str) -> set[str]:
    return {name for name in NAMES if any(under(module, *packages) for module, _ in imports_of(name))}


def test_import_scan_covers_package():
    assert {
        "lookahead/tree.py",
        "model/runner.py",
        "distributed/exchange.py",
        "runtime.py",
        "entrypoints/cli.py",
    } <= set(NAMES)
    assert "model/loading/loader.py" in importers_of("transformers")
    assert "distributed/transport/collectives.py" in importers_of("torch.distributed")


def test_imports_go_downward_only():
    names = [name for name in NAMES if name != "__init__.py"]
    assert not {part_of(name) for name in names} - LEVEL.keys(), "a new part of the package; give it a row in LAYERS"
    findings = []
    for name in names:
        part = part_of(name)
        for module, _ in imports_of(name):
            if not under(module, "lp_runtime"):
                continue
            other = (module.split(".") + ["__init__"])[1]
            if other not in LEVEL or (other != part and LEVEL[other] >= LEVEL[part]):
                findings.append(f"{name} imports {module}")
    assert not findings


def module_of(name: str) -> str:
    return ("lp_runtime/" + name).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_every_folder_is_installed():
    """pyproject.toml lists every folder: an editable install also finds folders that a wheel would lack."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    files = [*PACKAGE.rglob("*.py"), PACKAGE / "demo_model" / "config.json"]
    folders = {str(file.parent.relative_to(ROOT)).replace("/", ".") for file in files}
    conf = {str(file.parent.relative_to(ROOT)).replace("/", ".") for file in (ROOT / "conf").rglob("*.yaml")}
    assert set(named) == folders | {f"lp_runtime.{folder}" for folder in conf}


def folder_of(module: str) -> str:
    """Return the folder of a module; a top-level module is its own folder."""
    package, _, name = module.rpartition(".")
    is_package = (PACKAGE.parent / module.replace(".", "/")).is_dir()
    return module if is_package or package == "lp_runtime" else package


def import_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, also under TYPE_CHECKING and inside functions."""
    modules = {module_of(name): name for name in NAMES}

    def target(dotted_name: str) -> str | None:
        """Return the module that `from a import b` imports: a.b if that is a module, else a."""
        return next((each for each in (dotted_name, dotted_name.rpartition(".")[0]) if each in modules), None)

    return {
        module: {actual for imported, _ in imports_of(name) if (actual := target(imported))} - {module, "lp_runtime"}
        for module, name in modules.items()
        if module != "lp_runtime"
    }


def circle_in(graph: dict[str, set[str]]) -> str | None:
    """Return a cycle of a graph as text; None if there is none."""
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> str | None:
        if node in path:
            return " imports ".join([*path[path.index(node) :], node])
        if node in done:
            return None
        for other in sorted(graph[node]):
            if circle := visit(other, (*path, node)):
                return circle
        done.add(node)
        return None

    return next((circle for node in graph if (circle := visit(node, ()))), None)


def test_modules_have_no_import_cycles():
    assert circle_in(import_graph()) is None


def test_folders_have_no_import_cycles():
    folders: dict[str, set[str]] = {}
    for module, imported in import_graph().items():
        folders.setdefault(folder_of(module), set()).update(map(folder_of, imported))
    assert circle_in({folder: others - {folder} for folder, others in folders.items()}) is None


def test_folders_have_few_modules():
    """Folders have few modules, so that a reader finds a module by its folder."""
    for folder in {path.parent for path in FILES}:
        assert len(list(folder.glob("*.py"))) - 1 <= MAX_MODULES, folder


def test_lookahead_imports_neither_torch_nor_other_parts():
    for name in (name for name in NAMES if part_of(name) == "lookahead"):
        for module, _ in imports_of(name):
            assert not under(module, "torch", "transformers", "ray", "hydra", "omegaconf"), name
            if under(module, "lp_runtime"):
                assert under(module, "lp_runtime.lookahead", "lp_runtime.utils.jit"), name


def test_partition_imports_neither_torch_nor_os():
    modules = [module for module, _ in imports_of("distributed/partition/partition.py")]
    assert not any(under(module, "torch", "os") for module in modules)


def test_transformers_is_imported_only_in_four_folders():
    assert {part_of(name) for name in importers_of("transformers")} == {"model", "sampling", "dropin", "text"}


def test_sizing_imports_neither_torch_nor_os_nor_time():
    for name in (name for name in NAMES if part_of(name) == "sizing"):
        assert not any(under(module, "torch", "os", "time") for module, _ in imports_of(name)), name


def test_collectives_are_used_only_in_distributed():
    outside = {name for name in importers_of("torch.distributed") if part_of(name) != "distributed"}
    for name in outside:
        aliases = {
            alias.asname or alias.name
            for node in nodes_of(name)
            if isinstance(node, ast.Import)
            for alias in node.names
            if under(alias.name, "torch.distributed")
        }
        assert aliases, f"{name}: import torch.distributed as a whole, so that its uses can be seen"
        used = {chain for chain in chains_of(name) if chain and under(chain, *aliases)}
        stores = {f"{alias}.{store}" for alias in aliases for store in ("Store", "TCPStore")}
        assert used <= stores, f"{name} uses {used - stores}"  # rendezvous stores, in annotations


def test_torch_distributed_is_not_used_as_attribute_of_torch():
    for name in NAMES:
        assert not any(chain and under(chain, "torch.distributed") for chain in chains_of(name)), name


def test_ray_is_imported_lazily_and_only_in_its_modules():
    users = {
        "launchers/ray_booking.py",
        "launchers/ray_connection.py",
        "launchers/ray_launcher.py",
        "server/ray_serve.py",
    }
    assert importers_of("ray") == users
    assert all(lazy for name in users for module, lazy in imports_of(name) if under(module, "ray"))


def test_hydra_is_imported_only_by_overrides():
    assert importers_of("hydra", "omegaconf") == {"config/overrides.py"}


def test_environment_is_accessed_only_in_one_module():
    readers = set()
    for name in NAMES:
        if chains_of(name) & {"os.environ", "os.getenv", "os.environb", "os.putenv"}:
            readers.add(name)
        assert not any(under(module, "os.environ", "os.getenv") for module, _ in imports_of(name)), name
    assert readers == {"distributed/environment.py"}


def test_no_global_statements():
    for name in NAMES:
        assert not any(isinstance(node, ast.Global) for node in nodes_of(name)), name


# A torchrun rank imports everything and decodes.
DECODE_WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # importing it would raise
from lp_runtime.utils.startup import hide_triton_without_gpu
hide_triton_without_gpu()
import torch
import lp_runtime, lp_runtime.entrypoints.cli, lp_runtime.entrypoints.commands, lp_runtime.launchers
from lp_runtime import *
import lp_runtime.launchers.torchrun, lp_runtime.launchers.local, lp_runtime.launchers.spawn
with LookaheadRuntime(model=sys.argv[1]) as runtime:
    assert type(runtime.launcher).__name__ == "TorchrunLauncher"
    assert len(runtime.generate([1, 2, 3], max_new_tokens=5).token_ids) == 5
assert torch.cuda.is_available() or not sys.modules["triton"]
"""
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "test",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def run_python(code: str, *arguments: str, **environment: str) -> None:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# A mistyped override is refused on every rank before the imports, which take seconds.
REFUSE = """
import sys
from lp_runtime.entrypoints.cli import main
try:
    main(["gqus=2"])
except SystemExit as error:
    assert error.code == 2
heavy = {"torch", "transformers", "numba", "ray"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_bad_settings_are_refused_before_torch_is_imported():
    run_python(REFUSE)


def test_compile_ahead_does_not_import_torch():
    """The process that compiles while the command imports torch does not import torch itself."""
    run_python("import sys, lp_runtime.replica.compile_ahead; assert 'torch' not in sys.modules")


def test_every_public_name_can_be_imported():
    assert set(lp_runtime.__all__) == {*lp_runtime._HOMES, "__version__"}
    for name in lp_runtime._HOMES:
        assert getattr(lp_runtime, name).__module__.startswith("lp_runtime."), name
    with pytest.raises(AttributeError, match="no attribute 'LookaheadRuntme'"):
        lp_runtime.LookaheadRuntme  # noqa: B018


@pytest.mark.slow
def test_torchrun_rank_imports_and_decodes_without_ray(tiny_model_dir):
    run_python(DECODE_WITHOUT_RAY, str(tiny_model_dir), **TORCHRUN)
