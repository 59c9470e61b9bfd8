# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Tool servers as the controller sees them: from Gym's grants to the last cookie, with the real agent in a real box."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from artifacts_fixtures import runtime_tree
from containers import Containers, InternalNetwork
from counter_server import TOOLS, CounterServer
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel
from shapes import Validate, validate

from boxstrap.controller import tools
from boxstrap.controller.convert import story_in, to_observations
from boxstrap.controller.errors import PreflightError, SetupFailed, UsageError
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import SessionSpec, open_session
from boxstrap.controller.tool_jars import ToolJars
from boxstrap.runner.wire import Model, Outcome, ToolAccess, request_from, to_json

__all__ = ["runtime_tree", "validate"]


def test_access_is_made_of_what_gym_grants(validate: Validate) -> None:
    """Gym's own model, dumped, and the tools of its request; Gym has no field that is not ours."""
    grant = {"name": "counter.direct_http", "required": True, "base_url": "http://r:1/x", "cookies": {"a": "b"}, "headers": {}}
    said = validate("tool_access", grant)["said"]
    (access,) = tools.accesses_of([{"kind": "direct_http", **said}], TOOLS)
    assert (access.name, access.base_url, access.cookies, access.tools) == (grant["name"], "http://r:1/x", {"a": "b"}, TOOLS)
    assert validate("tool_access", {key: value for key, value in vars(access).items() if key != "tools"})


def test_access_survives_the_way_into_the_box(tmp_path: Path) -> None:
    access = ToolAccess(name="n", base_url="http://x", tools=TOOLS)
    spec = SessionSpec(session_id="s", agent="nooa", workdir="/", out=tmp_path, tool_accesses=[access])
    request = spec.request("", input=[{"role": "user", "content": "hello"}])
    assert request_from(to_json(request).encode()) == request


MCP = {"kind": "mcp", "name": "m", "connection": {"transport": "streamable_http", "url": "http://x", "headers": {}}}
HTTP = {"kind": "direct_http", "name": "h", "required": True, "base_url": "http://x"}


@pytest.mark.parametrize(
    ("grants", "offered", "word"),
    [
        ([{**MCP, "required": True}], [], "of kind 'mcp'"),
        ([HTTP, {**HTTP, "name": "i"}], TOOLS, "do not say whose"),
        ([HTTP, HTTP], [], "a name for each"),
        ([{**HTTP, "name": "a b"}], [], "needed name"),
        ([{**HTTP, "base_url": "ftp://x"}], [], "and URL"),
        ([{"kind": "direct_http", "name": "h"}], [], "lacks"),
        ([HTTP], [{"type": "web_search"}], "web_search"),
        ([HTTP], [{"type": "function", "name": "_x"}], "public names"),
        ([HTTP], [TOOLS[0], TOOLS[0]], "two functions"),
    ],
)
def test_grant_that_cannot_work_is_refused(grants: list[dict[str, Any]], offered: list[dict[str, object]], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        tools.accesses_of(grants, offered)


def test_accesses_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"name": "h", "base_url": "http://x", "tools": TOOLS}]))
    assert tools.read_accesses(file) == [ToolAccess(name="h", base_url="http://x", tools=TOOLS)]
    for wrong in ("{}", "[1]", '[{"name": "h"}]', '[{"name": "h", "base_url": "x", "typo": 1}]'):
        file.write_text(wrong)
        with pytest.raises(UsageError, match="needed a JSON list"):
            tools.read_accesses(file)


def test_optional_grant_of_another_kind_is_left_out() -> None:
    assert [access.name for access in tools.accesses_of([{**MCP, "required": False}, HTTP], TOOLS)] == ["h"]


async def test_agent_that_cannot_call_functions_is_refused(tmp_path: Path) -> None:
    """Before anything is pushed."""
    spec = SessionSpec(
        session_id="s", agent="command", workdir="/", out=tmp_path, tool_accesses=[ToolAccess(name="n", base_url="http://x")]
    )
    with pytest.raises(UsageError, match="cannot call"):
        async with open_session(LocalSandbox(tmp_path / "box"), spec):
            pass


@pytest.mark.parametrize(
    "left",
    [
        "no JSON",
        json.dumps({"n": {"a": "b\r\nX-Injected: 1"}}),
        json.dumps({"n": {"a b": "c"}}),
        json.dumps({"n": {"a": 1}}),
        json.dumps({"other": {"a": "stolen"}}),
        json.dumps({"n": {"a": "x" * tools.COOKIES_MAX}}),
    ],
)
async def test_cookies_that_are_none_are_not_believed(tmp_path: Path, left: str) -> None:
    """The sandbox may write anything there: then the cookies are those that were given."""
    box = LocalSandbox(tmp_path)
    jar = tmp_path / "jar"
    access = ToolAccess(name="n", base_url="http://x", cookies={"a": "given"})
    assert await tools.final_cookies(box, str(jar), [access], user=None) == {"a": "given"}
    jar.write_text(left)
    assert await tools.final_cookies(box, str(jar), [access], user=None) == {"a": "given"}
    jar.write_text(json.dumps({"n": {"a": "new", "b": "2"}}))
    assert await tools.final_cookies(box, str(jar), [access], user=None) == {"a": "new", "b": "2"}


@pytest.mark.container
@pytest.mark.parametrize("upstream", ["direct", "relay"])
async def test_stateful_server_is_used_from_a_box_that_reaches_nothing_else(
    container: Containers, internal_network: InternalNetwork, tmp_path: Path, validate: Validate, upstream: str
) -> None:
    """The whole way: probe, install, the real BenchAgent's calls with their parents, the last cookies, and the conversion.

    With relay the box has no network at all, and neither the servers' places nor their cookies and headers enter it.
    """
    make_sample_repo(tmp_path / "bills")
    box = container("task", network=internal_network.name if upstream == "direct" else "none")
    box.put(tmp_path / "bills", "/work/bills")
    host = internal_network.host if upstream == "direct" else "127.0.0.1"
    notes: list[str] = []
    with ScriptedModel(bind=host, strict=True) as model, CounterServer(bind=host) as counter:
        optional = ToolAccess(name="absent", base_url=f"http://{host}:9/x", required=False)
        spec = SessionSpec(
            session_id="count",
            agent="nooa",
            workdir="/work/bills",
            out=tmp_path / "out",
            model=Model(url=model.url, name="count"),
            upstream=upstream,
            tool_accesses=[counter.access(), optional],
        )
        async with open_session(DockerSandbox(box.id), spec, on_note=notes.append) as session:
            result = await session.invoke(spec.request(PROMPT))
        place = counter.url
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
    assert any("cannot be reached" in note for note in notes)
    assert (counter.counters, counter.overlaps) == ({"seeded": 8}, 0)
    assert {(call["grant"], call["cookies"]["session"]) for call in counter.calls} == {("g", "seeded")}
    assert result.resources_cookies == {"session": "seeded", "seen": "6"}
    told = (tmp_path / "out" / "request.json").read_text() + result.evidence.read_text()
    assert (place in told, "seeded" in told) == ((True, True) if upstream == "direct" else (False, False))
    story = story_in(tmp_path / "out")
    served = [use for use in story.tools if use.id.startswith("resource-")]
    cell = next(use for use in story.tools if use.name == "execute_python" and use.by_model)
    assert [use.parent for use in served] == [cell.id] * 8
    assert served[-1].output == "out of order"
    kinds = validate("observations", to_observations(story))["kinds"]
    assert kinds.count("ToolCallObservation") == len(story.tools) == 8 + 3
    assert box.check("ls -A /tmp") == ""


@pytest.mark.parametrize("upstream", ["direct", "relay"])
async def test_server_that_is_lost_while_the_agent_runs_fails_the_session(tmp_path: Path, upstream: str) -> None:
    """It was there when the session was opened; then nobody answers, and no reward can come of that."""
    make_sample_repo(tmp_path / "bills")
    with ScriptedModel(strict=True) as model, CounterServer() as counter:
        spec = SessionSpec(
            session_id=f"lost-{upstream}",
            agent="nooa",
            workdir=str(tmp_path / "bills"),
            out=tmp_path / "out",
            model=Model(url=model.url, name="count-on"),
            upstream=upstream,
            tool_accesses=[counter.access()],
            loopback_ok=True,
        )
        async with open_session(LocalSandbox(tmp_path / "box"), spec) as session:
            counter.close()
            result = await session.invoke(spec.request(PROMPT))
    assert (result.outcome, result.gradable, result.outcome.retryable) == (Outcome.RESOURCE_FAILED, False, True)
    assert "counter.direct_http" in result.detail
    assert result.resources_cookies == {"session": "seeded"}
    assert len(model.calls) == 1


@pytest.mark.parametrize(
    "name", ["tool:h/other", "tool:h/", "tool:other/increment", "tool:h/increment/..", "tool:../h/increment", ""]
)
def test_box_can_name_no_function_that_was_not_granted(tmp_path: Path, name: str) -> None:
    jars = ToolJars([ToolAccess(name="h", base_url="http://x/y", tools=TOOLS)], tmp_path / "jars")
    assert jars.server_of(name) is None
    server = jars.server_of("tool:h/increment")
    assert server is not None
    assert server.url == "http://x/y/increment"


def test_jars_outlive_their_controller(tmp_path: Path) -> None:
    """A controller that attaches again goes on with the cookies that the servers gave."""
    accesses = [ToolAccess(name="h", base_url="http://x", cookies={"a": "1", "b": "2"}, tools=TOOLS)]
    server = ToolJars(accesses, tmp_path / "jars").server_of("tool:h/read")
    assert server is not None
    server.keep(["a=new; Path=/; HttpOnly", "b=; Max-Age=0", "c=3"])
    again = ToolJars(accesses, tmp_path / "jars")
    assert again.cookies() == {"a": "new", "c": "3"}
    assert (tmp_path / "jars").stat().st_mode & 0o777 == 0o600


async def test_required_server_that_the_host_cannot_reach_fails_the_open(tmp_path: Path) -> None:
    """With relay it is the host that calls."""
    spec = SessionSpec(
        session_id="s",
        agent="nooa",
        workdir="/",
        out=tmp_path / "out",
        upstream="relay",
        tool_accesses=[ToolAccess(name="absent", base_url="http://127.0.0.1:9/x", tools=TOOLS)],
    )
    with pytest.raises(SetupFailed, match=r"absent.*cannot be reached"):
        async with open_session(LocalSandbox(tmp_path / "box"), spec):
            pass
    assert list((tmp_path / "box").rglob("*.pyz")) == []


@pytest.mark.container
async def test_required_server_that_is_not_there_fails_the_open(
    container: Containers, internal_network: InternalNetwork, tmp_path: Path
) -> None:
    """Before anything is installed, with the box as it was found."""
    box = container("task", network=internal_network.name)
    spec = SessionSpec(
        session_id="count",
        agent="nooa",
        workdir="/",
        out=tmp_path / "out",
        tool_accesses=[ToolAccess(name="absent", base_url=f"http://{internal_network.host}:9/x", tools=TOOLS)],
    )
    with pytest.raises(PreflightError, match="url-unreachable"):
        async with open_session(DockerSandbox(box.id), spec):
            pass
    assert [line for line in box.diff() if line != "C /tmp"] == []
