# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""SWE-bench's kind of box: the env is active in the agent's shell, git trusts the repository, the patch is the agent's."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from containers import Box, Containers, InternalNetwork
from sample_repo import PROMPT
from scripted_model import ScriptedModel
from swe_bench_box import ROOT, furnish, patch_of, start_over

from boxstrap.controller.collect import read_events
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.runner.agents import mini_swe_agent, nooa, opencode
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Model, Outcome, Request, to_json

ACTIVATE = f". {ROOT}/bin/activate testbed >/dev/null"
TESTS = "python3 -B -m unittest -q"
EMBEDDED = SessionPaths("/tmp/embedded")
DRIVERS = {"nooa": nooa, "mini-swe-agent": mini_swe_agent}


async def session(box: Box, spec: SessionSpec) -> tuple[Result, RuntimePaths]:
    """Run one session, and give the runtime that it left published."""
    async with open_session(DockerSandbox(box.id), spec) as opened:
        result = await opened.invoke(spec.request(PROMPT))
        assert opened.runtime is not None
        return result, opened.runtime


def run_embedded(box: Box, request: Request, runtime: RuntimePaths, folder: Path) -> None:
    """Run the same agent by hand: the driver, or the program, in the activated env, with nobody around it."""
    (folder / "request.json").write_text(to_json(request), encoding="ascii")
    (folder / "prompt").write_text(request.prompt, encoding="utf-8")
    box.put(folder, EMBEDDED.path)
    env = {"HOME": f"{EMBEDDED.path}/home", "BUN_TMPDIR": EMBEDDED.path}
    env |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "/testbed"}
    assert request.model is not None
    if request.agent in DRIVERS:
        launch = DRIVERS[request.agent].launch(request, EMBEDDED, runtime)
        argv = launch.argv
        env |= {**launch.env, "BOXSTRAP_EVENTS_FD": "9", "BOXSTRAP_SESSION_DIR": EMBEDDED.path}
    else:
        argv = [f"{runtime.site}/bin/opencode", "run", "--format", "json", "--auto", "--title", "task"]
        config = opencode.config_of(request.model, {"context": 131072, "output": 16384})
        env |= {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    words = shlex.join(["env", *(f"{name}={value}" for name, value in env.items()), *argv])
    ran = box.exec(["bash", "-c", f"{ACTIVATE}; cd /testbed; {words} 9>{EMBEDDED.path}/events <{EMBEDDED.path}/prompt"])
    assert ran.code == 0, (ran.out + ran.err).decode(errors="replace")[-2000:]
    box.check(f"rm -rf {EMBEDDED.path}")


@pytest.mark.container
@pytest.mark.parametrize("agent", ["nooa", "opencode", "mini-swe-agent"])
async def test_patch_is_the_same_embedded_and_in_the_sandbox(
    container: Containers, internal_network: InternalNetwork, tmp_path: Path, agent: str
) -> None:
    """The env's tests pass for the agent, its patch passes them for the owner, and is the one that it makes without us."""
    box = container("task", network=internal_network.name)
    furnish(box, tmp_path)
    assert box.exec(["bash", "-c", f"cd /testbed && {TESTS}"]).code != 0, "the tests must need the env"
    with ScriptedModel(bind=internal_network.host) as model:
        spec = SessionSpec(
            session_id="swe",
            agent=agent,
            workdir="/testbed",
            out=tmp_path / "out",
            model=Model(url=model.url, name="scripted", api="responses" if agent == "nooa" else "chat"),
            activation="swe-bench",
        )
        result, runtime = await session(box, spec)
        patch = patch_of(box)
        assert (result.outcome, result.gaps) == (Outcome.COMPLETED, []), result.detail
        assert box.exec(["bash", "-c", f"{ACTIVATE}; cd /testbed && {TESTS}"]).code == 0
        start_over(box)
        (tmp_path / "embedded" / "home").mkdir(parents=True)
        run_embedded(box, spec.request(PROMPT), runtime, tmp_path / "embedded")
    assert patch.startswith("diff --git a/bills/split.py b/bills/split.py\n")
    assert patch.count("diff --git") == 1
    assert patch == patch_of(box)
    answers = [str(event.data["output"]) for event in read_events(result.evidence) if event.kind == "tool_result"]
    assert "Count in euros" in answers[0], "git must trust the repository of another user"
    assert any("Ran 3 tests" in answer and "OK" in answer for answer in answers), "the agent's shell must have the env"
    assert box.check("git -c safe.directory=/testbed -C /testbed status --porcelain --ignored") == " M bills/split.py"


async def environment_of(box: Box, out: Path, activation: str) -> tuple[Result, dict[str, str]]:
    """Run `env` as the agent, and read what it printed."""
    spec = SessionSpec(session_id="env", agent="command", workdir="/tmp", out=out, argv=["env"], activation=activation)
    result, _ = await session(box, spec)
    lines = [str(event.data["text"]) for event in read_events(result.evidence) if event.data.get("stream") == "stdout"]
    return result, dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.container
async def test_preset_changes_nothing_in_a_box_without_the_env(container: Containers, tmp_path: Path) -> None:
    box = container("debian:12", network="none")
    _, plain = await environment_of(box, tmp_path / "plain", "")
    result, preset = await environment_of(box, tmp_path / "preset", "swe-bench")
    assert result.outcome is Outcome.COMPLETED
    assert preset == plain


@pytest.mark.container
async def test_preset_survives_talkative_scripts_that_fail_and_read_what_is_unset(
    container: Containers, tmp_path: Path
) -> None:
    """What the scripts print is in nobody's variable, also where the container exports bash's strictest options."""
    box = container("task", network="none", env={"SHELLOPTS": "errexit:nounset"})
    furnish(box, tmp_path)
    result, env = await environment_of(box, tmp_path / "out", "swe-bench")
    assert result.outcome is Outcome.COMPLETED, result.detail
    assert (env["CONDA_DEFAULT_ENV"], env["LEDGER_CURRENCY"]) == ("testbed", "EUR")
    assert env["PATH"].startswith(f"{ROOT}/envs/testbed/bin:")
    assert not [name for name, value in env.items() if "conda-like" in name + value]


@pytest.mark.container
async def test_env_that_cannot_be_activated_is_a_setup_failure(container: Containers, tmp_path: Path) -> None:
    box = container("task", network="none")
    box.check(f"mkdir -p {ROOT}/envs/testbed {ROOT}/bin && : > {ROOT}/bin/activate")
    result, _ = await environment_of(box, tmp_path / "out", "swe-bench")
    assert result.outcome is Outcome.SETUP_FAILED
    assert "was not activated" in result.detail
