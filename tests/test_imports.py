# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Who may import whom (DESIGN 2), held by reading the source: imports in functions and by name count as well.

Arrows point from the controller towards the sandbox. What runs in a sandbox needs nothing that is not there.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent
MODULES = sorted(path for part in ("bootstrap", "runner", "controller") for path in (HOUSE / part).rglob("*.py"))

SHARED = ("boxstrap.runner.wire", "boxstrap.runner.layout", "boxstrap.runner.frames")
AGENT_SIDE = {  # what runs in an agent's interpreter, and what of that agent's packages it may use
    r"runner/agents/(\w+_driver|nooa_\w+|model_endpoint)\.py": (r"nooa(_\w+)?", "httpx", "certifi", "pydantic", "jsonschema"),
    r"runner/agents/.*litellm.*": (r".*",),
}
GATEWAY_SIDE = ("h11", "certifi")  # what lies beside our code in the archive: controller/archives.py, VENDORED
RULES = {"bootstrap": ("packaging", "boxstrap.bootstrap", *SHARED), "runner": ("boxstrap.runner",)}
IMPORTERS = {"import_module", "__import__", "run_module", "find_spec"}


def imported(source: str, package: str) -> dict[str, int]:
    """Name every module that a source imports, with its line: statements anywhere, and literals given to importlib.

    `package` is the one that the source is in, for relative imports.
    """
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update({alias.name: node.lineno for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            # `from boxstrap.runner import wire` imports boxstrap.runner.wire.
            names = [f"{base}.{alias.name}" for alias in node.names] if is_package(base) else [base]
            found.update(dict.fromkeys(names, node.lineno))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in IMPORTERS and isinstance(node.args[0].value, str):
                found[node.args[0].value] = node.lineno
    return found


def is_package(name: str) -> bool:
    """Say whether a name is one of our packages, of which a module can be imported."""
    return name == "boxstrap" or (name.startswith("boxstrap.") and (HOUSE / Path(*name.split(".")[1:])).is_dir())


def declared() -> set[str]:
    """Give the import names of the project's own dependencies."""
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in project["dependencies"]}
    differ = {"pyelftools": {"elftools"}, "docker": {"docker", "requests"}, "pbs-installer": {"pbs_installer"}}
    return {module for name in names for module in differ.get(name, {name.replace("-", "_")})}


def allowed(path: Path, name: str) -> bool:
    """Say whether the module at `path` may import `name`."""
    top = name.split(".", maxsplit=1)[0]
    here = path.relative_to(HOUSE).as_posix()
    if top in sys.stdlib_module_names:
        return True
    for pattern, packages in AGENT_SIDE.items():
        if re.fullmatch(pattern, here) and any(re.fullmatch(package, top) for package in packages):
            return True
    if re.fullmatch(r"runner/(gateway|upstream|authorities)\.py", here) and top in GATEWAY_SIDE:
        return True
    if has_own_lock(here) and top != "boxstrap":
        return True
    part = here.split("/")[0]
    if part == "controller":  # the root package is empty: it only tells where the house is
        return name == "boxstrap" or top in declared() or any(within(name, one) for one in ("boxstrap.controller", *SHARED))
    if is_agent_side(name.removeprefix("boxstrap.").replace(".", "/") + ".py") and not is_agent_side(here):
        return False
    return any(within(name, one) for one in RULES[part])


def is_agent_side(path: str) -> bool:
    """Say whether a module runs in an agent's interpreter, where there are packages that the runner's own has not."""
    return has_own_lock(path) or any(re.fullmatch(pattern, path) for pattern in AGENT_SIDE)


def has_own_lock(path: str) -> bool:
    """Say whether an agent's one module is its driver too: requirements/<agent>.in names the packages that it may use."""
    module = re.fullmatch(r"runner/agents/(\w+)\.py", path)
    return bool(module and (HOUSE / "requirements" / f"{module[1].replace('_', '-')}.in").is_file())


def within(name: str, package: str) -> bool:
    """Say whether a dotted name is a package or inside it."""
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_module_imports_only_what_its_side_may(path: Path) -> None:
    """Each module, each import."""
    package = ".".join(["boxstrap", *path.relative_to(HOUSE).parent.parts])
    wrong = {
        f"{path.relative_to(HOUSE)}:{line}: {name}"
        for name, line in imported(path.read_text(encoding="utf-8"), package).items()
        if not allowed(path, name)
    }
    assert not wrong


def test_modules_are_found() -> None:
    """An empty walk would hold every rule."""
    assert {path.relative_to(HOUSE).parts[0] for path in MODULES} == {"bootstrap", "runner", "controller"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a.b, c", {"a.b", "c"}),
        ("from a.b import c", {"a.b"}),
        ("from boxstrap.runner import wire, supervisor", {"boxstrap.runner.wire", "boxstrap.runner.supervisor"}),
        ("from . import wire", {"boxstrap.runner.wire"}),
        ("from .wire import Answer", {"boxstrap.runner.wire"}),
        ("from ..controller import push", {"boxstrap.controller.push"}),
        ("def f():\n    import a", {"a"}),
        ("importlib.import_module('a.b')", {"a.b"}),
        ("__import__('a')", {"a"}),
        ("if TYPE_CHECKING:\n    from a import b", {"a"}),
        ("importlib.import_module(name)", set()),
    ],
)
def test_imports_are_read_in_every_form(source: str, names: set[str]) -> None:
    """The reader itself: what it overlooked, no rule would hold."""
    assert set(imported(source, "boxstrap.runner")) == names


@pytest.mark.parametrize(
    ("module", "name", "may"),
    [
        ("bootstrap/install.py", "boxstrap.runner.wire", True),
        ("bootstrap/install.py", "boxstrap.runner.supervisor", False),
        ("bootstrap/install.py", "boxstrap.controller.push", False),
        ("bootstrap/install.py", "packaging.version", True),
        ("bootstrap/install.py", "pydantic", False),
        ("runner/supervisor.py", "boxstrap.bootstrap.install", False),
        ("runner/supervisor.py", "packaging", False),
        ("runner/gateway.py", "httpx", False),
        ("runner/gateway.py", "h11", True),
        ("runner/supervisor.py", "h11", False),
        ("runner/push.py", "certifi", False),
        ("runner/authorities.py", "certifi", True),
        ("runner/agents/nooa_driver.py", "nooa_bench.bench_agent", True),
        ("runner/agents/nooa_driver.py", "requests", False),
        ("runner/agents/nooa_driver.py", "boxstrap.runner.agents.model_endpoint", True),
        ("runner/agents/nooa.py", "boxstrap.runner.agents.nooa_driver", False),
        ("runner/agents/nooa.py", "httpx", False),
        ("runner/agents/mini_swe_agent.py", "minisweagent.agents.default", True),
        ("runner/agents/mini_swe_agent.py", "boxstrap.controller.push", False),
        ("runner/agents/opencode.py", "minisweagent", False),
        ("controller/push.py", "pydantic", True),
        ("controller/listening.py", "uvicorn", True),
        ("controller/push.py", "boxstrap.runner.layout", True),
        ("controller/push.py", "boxstrap.runner.evidence", False),
        ("controller/push.py", "boxstrap.bootstrap", False),
        ("controller/sandboxes/gym.py", "nemo_gym", False),
    ],
)
def test_import_rules_say_what_they_should(module: str, name: str, *, may: bool) -> None:
    """The rules themselves, for modules that exist and for ones that may."""
    assert allowed(HOUSE / module, name) is may
