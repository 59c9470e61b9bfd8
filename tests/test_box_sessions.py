# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Whole sessions in difficult boxes: odd users, hostile variables, hostile workdirs, toolchains in the real HOME."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from box_fixtures import Rows, light, pushed, rows, start
from containers import Box, InternalNetwork
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel

from boxstrap.controller.collect import read_events
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.runner.wire import Model, Outcome

__all__ = ["light", "pushed", "rows", "start"]

pytestmark = pytest.mark.container
Start = Callable[..., Box]
SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}
"""What any shell sets for itself; everything else has to be accounted for."""
DOCUMENTED = {
    *("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
    *("GIT_CONFIG_COUNT", "BOXSTRAP_SESSION"),
}
"""What the agent's environment differs in from the task's (README), beside GIT_CONFIG_KEY_n and GIT_CONFIG_VALUE_n."""


class Prefixed(DockerSandbox):
    """A provider whose every exec begins in a way of its own."""

    before = ""

    async def exec(self, command: str, **how: Any) -> Any:
        """As the container, after `before`."""
        return await super().exec(self.before + command, **how)

    async def spawn(self, command: str, **how: Any) -> None:
        """As the container, after `before`."""
        await super().spawn(self.before + command, **how)


class Sessions:
    """Runs one session after the other in a box, and notes a row for each."""

    def __init__(self, out: Path, rows: Rows, network: InternalNetwork, start: Start) -> None:
        self.network = network
        self._out, self._rows, self._start = out, rows, start
        self._count = 0

    def box(self, image: str, **options: Any) -> Box:
        """A box that reaches this host's model."""
        return self._start(image, push=None, network=self.network.name, **options)

    async def run(
        self, box: Box, agent: str, *argv: str, before: str = "", script: str = "look-around", **fields: Any
    ) -> Result:
        """Open, invoke, close."""
        self._count += 1
        sandbox = Prefixed(box.id)
        sandbox.before = before
        with ScriptedModel(bind=self.network.host, script=script) as model:
            wanted = SessionSpec(
                **{
                    "session_id": f"box-{self._count}",
                    "agent": agent,
                    "workdir": "/",
                    "out": self._out / str(self._count),
                    "argv": list(argv),
                    "model": Model(url=model.url, name=script) if agent == "nooa" else None,
                    **fields,
                }
            )
            async with open_session(sandbox, wanted) as session:
                await session.invoke(wanted.request(PROMPT))
            result = session.result
        assert result is not None
        how = [f"--{name.replace('_', '-')} {fields[name]}" for name in ("runtime_root", "session_root") if name in fields]
        asked = " ".join([f"session {agent}", *how])
        user = str(fields.get("user") or "")
        self._rows.add(box, asked, str(result.outcome.value), "-", user=user, variables=before.strip("; "))
        assert result.receipt is not None
        assert result.receipt.cleanup_confirmed
        return result


@pytest.fixture
def sessions(tmp_path: Path, rows: Rows, internal_network: InternalNetwork, start: Start) -> Sessions:
    """Sessions of the test's own."""
    return Sessions(tmp_path / "out", rows, internal_network, start)


def printed(result: Result) -> list[str]:
    """The lines that agent `command` printed."""
    return [str(event.data["text"]) for event in read_events(result.evidence) if event.kind == "log"]


USERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # image, how the box is made, what the session is told, what HOME the task has
    "root": ("debian:12", {}, {}, "0 /root"),
    "named": ("nonroot", {}, {"runtime_root": "/home/app/runtimes"}, "1000 /home/app"),
    "number": ("uid1234", {}, {"runtime_root": "/var/tmp/runtimes", "session_root": "/var/tmp/sessions"}, "1234 /"),
    "asked": ("debian:12", {}, {"user": "4321:0", "runtime_root": "/var/tmp/runtimes"}, "4321 /"),
    "home-unset": ("debian:12", {}, {"before": "unset HOME; "}, "0 none"),
    "home-root": ("debian:12", {"env": {"HOME": "/"}}, {}, "0 /"),
    "read-only": (
        "debian:12",
        {"read_only": True, "tmpfs": {"/work": "exec,mode=1777"}},
        {"runtime_root": "/work/runtimes", "session_root": "/work/sessions"},
        "0 /root",
    ),
    "noexec-tmp": ("debian:12", {"tmpfs": {"/tmp": "noexec"}}, {}, "0 /root"),
}


@pytest.mark.parametrize("name", USERS)
async def test_session_runs_for_every_kind_of_user(sessions: Sessions, name: str) -> None:
    """`command` sees its uid, a private HOME that it can write, and the task's HOME where it was; NOOA runs where asked."""
    image, options, told, known = USERS[name]
    box = sessions.box(image, **options)
    uid, home = known.split()
    look = 'id -u; stat -c "%a %u" "$HOME" "${HOME%/*}"; touch "$HOME/mine" && echo wrote; umask'
    result = await sessions.run(box, "command", "sh", "-c", look, **told)
    assert result.outcome is Outcome.COMPLETED, result.detail
    assert printed(result)[:4] == [uid, f"700 {uid}", f"700 {uid}", "wrote"]
    assert home in {"none", "/"} or box.check(f"ls -A {home} | grep -v -e bash -e profile -e runtimes || :", user=uid) == ""
    if name in {"number", "named"}:
        result = await sessions.run(box, "nooa", **told)
        assert result.outcome is Outcome.COMPLETED, result.detail
        assert [event.data["status"] for event in read_events(result.evidence) if event.kind == "model_call"] == [200, 200]


HOSTILE = {
    "PYTHONPATH": "/hostile",
    "PYTHONHOME": "/nowhere/python",
    "PYTHONSTARTUP": "/hostile/json.py",
    "PYTHONWARNINGS": "error",
    "VIRTUAL_ENV": "/nowhere/venv",
    "CONDA_PREFIX": "/nowhere/conda",
    "CONDA_DEFAULT_ENV": "hostile",
    "LD_LIBRARY_PATH": "/hostile/lib:",
    "LD_PRELOAD": "/nowhere/missing.so",
    "BASH_ENV": "/hostile/bash_env",
    "ENV": "/hostile/bash_env",
    "LANG": "C",
    "TAR_OPTIONS": "--exclude=*",
    "TMPDIR": "/nowhere/tmp",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "user.name",
    "GIT_CONFIG_VALUE_0": "The Task",
    "SHIV_ROOT": "/nowhere/shiv",
    "SHIV_ENTRY_POINT": "hostile:main",
    "XDG_CONFIG_HOME": "/nowhere/config",
    "CDPATH": "/hostile",
    "EMPTY": "",
    "WORDS": "two  words 'and' \"quotes\"\nand a line",
}
SHADOWS = ("json", "ssl", "asyncio", "typing", "boxstrap", "nooa", "sitecustomize", "httpx")


def make_hostile(box: Box, folder: Path) -> None:
    """Put what the variables name into the box: modules that end whoever imports them, libraries that are none."""
    (folder / "lib").mkdir(parents=True)
    for name in SHADOWS:
        (folder / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    for name in ("libssl.so.3", "libcrypto.so.3", "libz.so.1", "libpython3.13.so.1.0", "libpython3.12.so.1.0"):
        (folder / "lib" / name).write_text("this is no library\n")
    (folder / "bash_env").write_text("FROM_BASH_ENV=1\n")
    box.put(folder, "/hostile")


def parsed(raw: bytes) -> dict[str, str]:
    """An environment as `env -0` prints it."""
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {name.decode(): value.decode() for name, _, value in pairs}


def differences(task: Mapping[str, str], agent: Mapping[str, str]) -> set[str]:
    """Names whose value differs, without those that a shell sets for itself."""
    return {name for name in {*task, *agent} - SHELLS_OWN if task.get(name) != agent.get(name)}


async def test_hostile_image_changes_nothing_for_us_and_all_of_it_reaches_the_shell(sessions: Sessions, tmp_path: Path) -> None:
    """NOOA runs, and `env -0` of its shell is the task's own but for what is documented; so is that of `command`."""
    box = sessions.box("task", env=HOSTILE)
    make_hostile(box, tmp_path / "hostile")
    for name in SHADOWS:
        box.check(["sh", "-c", f"mkdir -p '/work/der Ordner ü/{name}' && echo 1/0 >'/work/der Ordner ü/{name}/__init__.py'"])
        box.check(["sh", "-c", f"echo 1/0 >'/work/der Ordner ü/{name}.py'"])
    box.check(["sh", "-c", "ln -s 'der Ordner ü' '/work/ein Weg ö'"])
    workdir = "/work/ein Weg ö"
    task = parsed(box.exec(["env", "-0"]).out)
    assert {name: task[name] for name in HOSTILE} == HOSTILE
    result = await sessions.run(box, "nooa", script="save-env", workdir=workdir)
    assert result.outcome is Outcome.COMPLETED, result.detail
    agent = parsed(box.exec(["cat", "/tmp/agent-env"]).out)
    own = {f"GIT_CONFIG_{what}_{number}" for what in ("KEY", "VALUE") for number in (1, 2)}
    nooas = {"TERM"}  # its shell tool says that it is no terminal
    assert differences(task, agent) <= DOCUMENTED | own | nooas
    assert agent["GIT_CONFIG_COUNT"] == "3"
    assert (agent["GIT_CONFIG_VALUE_0"], agent["GIT_CONFIG_VALUE_1"]) == ("The Task", workdir)
    assert agent["PWD"] == workdir or agent["PWD"] == "/work/der Ordner ü"
    result = await sessions.run(box, "command", "env", "-0", workdir=workdir)
    said = parsed("\n".join(printed(result)).encode())
    assert {name: said.get(name) for name in HOSTILE if name not in DOCUMENTED} == {
        name: value for name, value in HOSTILE.items() if name not in DOCUMENTED
    }
    assert differences(task, said) <= DOCUMENTED | own | {"BOXSTRAP_PROMPT_FILE"}


async def test_workdir_is_the_one_that_was_named(sessions: Sessions, tmp_path: Path) -> None:
    """Where a box has /app and /testbed as well: the agent's shell starts in neither, and edits the repo that was meant."""
    box = sessions.box("task")
    for name in ("/app", "/testbed/bills", "/srv/the repo"):
        make_sample_repo(tmp_path / name.strip("/"))
        box.put(tmp_path / name.strip("/"), name)
    result = await sessions.run(box, "nooa", script="fix-bug", workdir="/srv/the repo")
    assert result.outcome is Outcome.COMPLETED, result.detail
    changed = {
        name: box.check(["git", "-C", name, "status", "--porcelain", "--ignored"]) for name in ("/app", "/testbed/bills")
    }
    assert changed == {"/app": "", "/testbed/bills": ""}
    assert box.check(["git", "-C", "/srv/the repo", "status", "--porcelain", "--ignored"]) == " M bills/split.py"


# Toolchains in the real HOME. Each command prints something that only the real HOME can give.

GO_MODULE = """
mkdir -p /proxy/example.invalid/dep/@v && cd /proxy/example.invalid/dep/@v
printf '{"Version":"v1.0.0"}' >v1.0.0.info; printf 'module example.invalid/dep\\n' >v1.0.0.mod; echo v1.0.0 >list
cat >/tmp/zip.py <<'END'
import zipfile
with zipfile.ZipFile("v1.0.0.zip", "w") as out:
    out.writestr("example.invalid/dep@v1.0.0/go.mod", "module example.invalid/dep\\n")
    out.writestr("example.invalid/dep@v1.0.0/dep.go", "package dep\\n\\nfunc Said() string { return \\"from the cache\\" }\\n")
END
python3 /tmp/zip.py
mkdir -p /work/app && cd /work/app
printf 'module app\\n\\ngo 1.19\\n\\nrequire example.invalid/dep v1.0.0\\n' >go.mod
printf 'package main\\n\\nimport "example.invalid/dep"\\n\\nfunc main() { println(dep.Said()) }\\n' >main.go
GOPROXY=file:///proxy GOSUMDB=off GOFLAGS=-mod=mod go mod download example.invalid/dep
GOPROXY=file:///proxy GOSUMDB=off GOFLAGS=-mod=mod go mod tidy 2>/dev/null
rm -rf /proxy
"""
CARGO_HOME = """
mkdir -p ~/.cargo/bin && printf '[alias]\\nours = "version"\\n' >~/.cargo/config.toml
printf '[v1]\\n"ripgrep 13.0.0 (registry+https://index.invalid)" = ["rg"]\\n' >~/.cargo/.crates.toml
"""
USER_SITE = """
site=$(python3 -c 'import site; print(site.getusersitepackages())')
mkdir -p "$site" && echo 'said = "from the user site"' >"$site/of_the_user.py"
"""
TOOLCHAINS = {
    "go": (GO_MODULE, "cd /work/app && GOPROXY=off GOSUMDB=off go run . 2>&1", "from the cache"),
    "cargo": (CARGO_HOME, "cargo install --list", "ripgrep v13.0.0 (registry `https://index.invalid"),
    "cargo alias": ("", "cargo ours", "cargo 1."),
    "python": (USER_SITE, "python3 -c 'import of_the_user as o; print(o.said)'", "from the user site"),
}


async def test_toolchains_in_the_real_home_keep_working(sessions: Sessions) -> None:
    """Go finds its module cache, cargo its crates and aliases, Python its user site: for the agent as for the task."""
    box = sessions.box("toolchains")
    for prepare, _, _ in TOOLCHAINS.values():
        box.check(prepare)
    for name, (_, command, expected) in TOOLCHAINS.items():
        assert expected in box.check(command), f"{name} works for the task"
        emptied = box.exec(command, env={"HOME": "/nowhere", "GOCACHE": "/tmp/cache"})
        assert expected not in emptied.out.decode(), f"{name} depends on HOME"
    all_of_them = "; ".join(f"({command})" for _, command, _ in TOOLCHAINS.values())
    result = await sessions.run(box, "command", "sh", "-c", all_of_them, workdir="/work/app")
    said = "\n".join(printed(result))
    for name, (_, _, expected) in TOOLCHAINS.items():
        assert expected in said, f"{name} works for the agent: {said}"
