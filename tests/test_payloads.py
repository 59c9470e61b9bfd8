# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Payloads: what the locks promise, and the real lean payload, from the user's cache or built now."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from boxstrap.controller import artifacts, elf, interpreter_sources, payloads, tarball
from boxstrap.controller.cache import Cache
from boxstrap.controller.errors import ArtifactError, UsageError

HOST = artifacts.host_arch()
FOREIGN = "aarch64" if HOST == "x86_64" else "x86_64"
AGENT_ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": "/nonexistent",
    "OTLP_ENDPOINT": "http://127.0.0.1:9/v1/traces",
    "NEMO_OO_PROJECT_DIR": "/nonexistent",
    "NEMO_OO_USER_DIR": "/nonexistent",
}
"""What keeps NOOA from reading the host's configuration and from probing the network."""


@pytest.fixture(scope="session")
def python() -> artifacts.Interpreter:
    """The interpreter that this host's sessions use."""
    return artifacts.interpreter(arch=HOST)


@pytest.fixture(scope="session")
def lean(python: artifacts.Interpreter) -> artifacts.Payload:
    """The lean payload for it."""
    payload = artifacts.payload("nooa", interpreter=python)
    assert payload is not None
    return payload


@pytest.fixture(scope="session")
def runtime(python: artifacts.Interpreter, lean: artifacts.Payload, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, unpacked: python/ and site/."""
    folder = tmp_path_factory.mktemp("runtime")
    tarball.unpack(python.path, folder / "python")
    tarball.unpack(lean.path, folder / "site")
    return folder


def run(runtime: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code as the box will: -I, nothing of the host in the environment, only site/ on sys.path."""
    code = f"import sys; sys.path.append({str(runtime / 'site')!r})\n{code}"
    command = [runtime / "python" / "bin" / "python3", "-I", "-c", code]
    return subprocess.run(command, env=AGENT_ENVIRONMENT, cwd="/", check=False, capture_output=True, text=True)


# The locks


@pytest.mark.parametrize("lock", ["nooa-lean.txt", "nooa-full.txt"])
def test_lock_pins_every_package_with_hashes(lock: str) -> None:
    """Nothing is resolved later, and nothing in the file tells where it was made."""
    text = (payloads.REQUIREMENTS / lock).read_text()
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(entries) >= 20
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.]+( ;[^\n]*)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\\n)?)+", entry), entry
    assert not re.search(r"://|--index|--find-links|/(home|root|work|tmp)/", text)


def test_lock_of_lean_is_inside_full() -> None:
    """Both come from one resolution of NOOA; lean leaves litellm out."""

    def pins(lock: str) -> set[str]:
        return set(re.findall(r"^[a-z0-9.-]+==[\w.]+", (payloads.REQUIREMENTS / lock).read_text(), re.MULTILINE))

    lean, full = pins("nooa-lean.txt"), pins("nooa-full.txt")
    assert lean <= full
    assert {pin.partition("==")[0] for pin in full - lean} >= {"litellm", "openai"}


# The lean payload


def test_lean_imports_alone_under_the_packed_interpreter(lean: artifacts.Payload, runtime: Path) -> None:
    """The benchmark agent imports with -I and nothing but site/, and every module of it is inside the runtime."""
    assert lean.smoke == ("nooa_bench.bench_agent",)
    code = f"""
import nooa_bench.bench_agent
files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
print([f for f in files if not f.startswith({str(runtime)!r})])
print(nooa_bench.bench_agent.BenchAgent.__name__)
"""
    done = run(runtime, code)
    assert (done.stdout.split("\n")[:2], done.returncode) == (["[]", "BenchAgent"], 0), done.stderr


def test_lean_runs_an_agent_with_a_client_of_our_own(runtime: Path) -> None:
    """A real BenchAgent calls the model, edits a file and returns its result, without litellm; tracing stays off."""
    code = """
import asyncio, json, os, tempfile
from nooa.unifiedllm import LLMResponse, ToolCall, UnifiedLLM
from nooa_bench.bench_agent import BenchAgent
os.chdir(tempfile.mkdtemp())
turns = [
    ("execute_python", {"code": "print((await self.shell.run('echo from-the-shell > made.txt; cat made.txt')))"}),
    ("return_result", {"result": {"solution_description": "made it", "evidence": "cat", "command_to_verify": "cat made.txt"}}),
]
class Scripted(UnifiedLLM):
    def count_tokens(self, *a, **k): return 10
    def call(self, *a, **k): raise AssertionError
    async def acall(self, *a, **k):
        name, arguments = turns.pop(0)
        call = ToolCall(id=f"c{len(turns)}", name=name, arguments=json.dumps(arguments))
        function = {"name": name, "arguments": call.arguments}
        message = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
        return LLMResponse(None, "", [call], "tool_calls", message)
agent = BenchAgent(Scripted(model="scripted"))
agent._install_python_tools(os.getcwd())
agent.problem_statement = "make it"
result = asyncio.run(agent._solve_task("make it"))
print("RESULT", result.solution_description, open("made.txt").read().strip())
import litellm
print("STAND-IN", litellm.__file__)
"""
    done = run(runtime, code)
    assert "RESULT made it from-the-shell" in done.stdout, done.stdout + done.stderr
    assert f"STAND-IN {runtime}/site/litellm/__init__.py" in done.stdout


def test_lean_holds_nothing_that_no_run_reads(runtime: Path) -> None:
    """No scripts, installer records, stubs or .pth files; licences stay."""
    site = runtime / "site"
    names = [path.name for path in site.rglob("*") if path.is_file()]
    assert not [name for name in names if name in {"RECORD", "INSTALLER"} or name.endswith((".pth", ".pyi", ".a", ".tsx"))]
    assert not (site / "bin").exists()
    assert [name for name in names if name.startswith("LICENSE")]
    assert len(names) < 1700


def test_lean_ships_unchecked_bytecode_without_paths(runtime: Path) -> None:
    """Every module's .pyc is used whatever its source's time (PEP 552), and names no folder of this host."""
    cache = str(Cache().root).encode()
    compiled = list((runtime / "site").rglob("*.pyc"))
    assert len(compiled) == len(list((runtime / "site").rglob("*.py"))) > 500
    for path in compiled:
        content = path.read_bytes()
        assert content[4:8] == b"\x01\x00\x00\x00"
        assert cache not in content


def test_lean_facts_are_those_of_its_files(lean: artifacts.Payload, python: artifacts.Interpreter, runtime: Path) -> None:
    """It adds nothing to what the box needs: its wheels are manylinux2014 or older."""
    assert (lean.agent, lean.variant, lean.arch, lean.python) == ("nooa", "lean", HOST, python.minor)
    assert lean.glibc_floor == elf.glibc_floor(elf.walk(runtime / "site")) == "2.17"


def test_lean_is_reproducible(lean: artifacts.Payload, python: artifacts.Interpreter, runtime: Path, tmp_path: Path) -> None:
    """Built again under another umask, without a look at the cache, it has the same digest."""
    before = os.umask(0o077)
    try:
        compiler = runtime / "python" / "bin" / "python3"
        recipe = payloads.recipe_for("nooa", "lean")
        payloads.build(recipe, tmp_path / "x.tar.gz", arch=HOST, minor=python.minor, compiler=compiler, smoke=False)
    finally:
        os.umask(before)
    assert tarball.sha256_of(tmp_path / "x.tar.gz") == lean.sha256


def test_lean_for_another_architecture_is_built_here(python: artifacts.Interpreter, tmp_path: Path) -> None:
    """Wheels are fetched, never built, and bytecode has no architecture; that it was not tried is said."""
    said: list[str] = []
    foreign = replace(python, arch=FOREIGN)
    payload = artifacts.payload("nooa", interpreter=foreign, cache=tmp_path, report=said.append)
    assert payload is not None
    assert payload.arch == FOREIGN
    assert f"the {FOREIGN} payload is not tried here: this host is {HOST}" in said
    tarball.unpack(payload.path, tmp_path / "site")
    found = list(elf.walk(tmp_path / "site"))
    assert {elf.read(path).arch for path in found} == {FOREIGN}
    assert len(found) >= 2
    assert list((tmp_path / "site").rglob("*.pyc"))


# The stand-in for litellm


@pytest.mark.parametrize(
    "code",
    [
        "import litellm; litellm.acompletion",
        "from litellm import token_counter",
        "import litellm.types.utils",
        "from litellm.llms.openai.chat.gpt_transformation import OpenAIGPTConfig",
        "from litellm.exceptions import RateLimitError",
    ],
)
def test_stand_in_refuses_more_and_names_the_full_payload(runtime: Path, code: str) -> None:
    """An upgrade of NOOA that reaches for more fails loudly, and the text says what to do."""
    done = run(runtime, code)
    assert done.returncode == 1
    assert re.search(r"litellm[\w.]* is not in boxstrap's lean payload.*use --payload full", done.stderr.splitlines()[-1])


def test_stand_in_has_what_nooa_touches(runtime: Path) -> None:
    """Two switches that are set, one exception that is caught by name, one base class; and introspection does not trip it."""
    code = """
import inspect, litellm
from litellm.exceptions import ContextWindowExceededError
from litellm.integrations.custom_logger import CustomLogger
litellm.modify_params = litellm.disable_aiohttp_transport = True
assert issubclass(ContextWindowExceededError, Exception) and str(ContextWindowExceededError("m", "x", "y")) == "m"
CustomLogger(); inspect.getmembers(litellm); assert not hasattr(litellm, "__wrapped__")
"""
    assert run(runtime, code).stderr == ""


# What can go wrong


def test_payload_of_command_is_none(python: artifacts.Interpreter) -> None:
    """An agent that installs nothing has no payload, and nothing is built."""
    assert artifacts.payload("command", interpreter=python) is None
    assert artifacts.payload("nooa", variant="none", interpreter=python) is None


def test_payload_unknown_is_said(python: artifacts.Interpreter) -> None:
    """The error lists what there is."""
    with pytest.raises(UsageError, match=r"no 'huge' payload for the agent 'nooa'.*nooa lean, nooa full"):
        artifacts.payload("nooa", variant="huge", interpreter=python)


def tiny(tmp_path: Path, lock: str) -> payloads.Recipe:
    """A recipe with a lock of its own."""
    (tmp_path / "tiny.txt").write_text(lock)
    return payloads.Recipe(lock=str(tmp_path / "tiny.txt"), platform="manylinux2014", smoke=())


def one_pin() -> str:
    """The smallest package of the lean lock, as its lines stand there."""
    text = (payloads.REQUIREMENTS / "nooa-lean.txt").read_text()
    found = re.search(r"^annotated-types==(?:.*\\\n)+.*\n", text, re.MULTILINE)
    assert found
    return found.group()


def build(recipe: payloads.Recipe, tmp_path: Path) -> None:
    """Build a recipe for this host, without trying it."""
    payloads.build(recipe, tmp_path / "x.tar.gz", arch=HOST, minor="3.13", compiler=Path(sys.executable), smoke=False)


def test_payload_wrong_hash_is_refused(tmp_path: Path) -> None:
    """A wheel that is not the one of the lock is never packed."""
    lock = re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, one_pin())
    with pytest.raises(ArtifactError, match=r"uv could not install.*[Hh]ash"):
        build(tiny(tmp_path, lock), tmp_path)
    assert not (tmp_path / "x.tar.gz").exists()


def test_payload_without_a_hash_is_refused(tmp_path: Path) -> None:
    """A pin alone does not say which bytes."""
    with pytest.raises(ArtifactError, match=r"uv could not install.*hash"):
        build(tiny(tmp_path, one_pin().split(" \\")[0] + "\n"), tmp_path)


def test_payload_ignores_the_workdirs_uv_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository's own uv.toml decides nothing, wherever the command is started."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "uv.toml").write_text('offline = true\nindex-url = "http://127.0.0.1:9/simple"\n')
    monkeypatch.chdir(tmp_path / "repo")
    build(tiny(tmp_path, one_pin()), tmp_path)


def test_payload_offline_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network and an empty cache: what could not be installed, for what, and what to look at."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with pytest.raises(ArtifactError) as caught:
        build(tiny(tmp_path, one_pin()), tmp_path)
    assert f"for {HOST} and Python 3.13" in str(caught.value)
    assert "index that uv is configured to use" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_payload_without_uv_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither beside our Python nor on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"uv was not found.*pip install uv"):
        payloads.build(
            tiny(tmp_path, one_pin()), tmp_path / "x.tar.gz", arch=HOST, minor="3.13", compiler=tmp_path, smoke=False
        )


def test_payload_that_does_not_import_is_not_cached(runtime: Path, tmp_path: Path) -> None:
    """The smoke runs on the packed bytes before anybody gets them."""
    recipe = replace(tiny(tmp_path, one_pin()), smoke=("no_such_agent",))
    python = runtime / "python" / "bin" / "python3"
    with pytest.raises(ArtifactError, match="does not import no_such_agent: ModuleNotFoundError"):
        payloads.build(recipe, tmp_path / "x.tar.gz", arch=HOST, minor="3.13", compiler=python, smoke=True)


def test_compiler_of_a_minor_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Bytecode of another minor would be useless in silence."""
    with pytest.raises(ArtifactError, match=r"Compiling for Python 3\.99"):
        interpreter_sources.compiler(Cache(), "3.99", tmp_path)
