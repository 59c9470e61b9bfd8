# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions in boxes without any network, whose model calls the controller makes: held execs, plain execs, lost controllers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from containers import Box, Containers
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel

from boxstrap.controller.collect import read_events
from boxstrap.controller.sandbox import ExecResult, Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.runner.wire import Event, Model, Outcome

KEY = "sk-canary-7f3a91c2d4e5"
ASK = str(Path(__file__).parent / "children" / "ask_model.py")


class Plain:
    """A sandbox with the protocol's three calls and nothing more."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner

    def roots(self, agent: str) -> tuple[str, str]:
        """Give the inner one's, where it has some."""
        from boxstrap.runner.layout import default_runtime_root, default_session_root

        roots = getattr(self._inner, "roots", None)
        return roots(agent) if roots else (default_runtime_root(agent), default_session_root(agent))

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 180,
        user: str | int | None = None,
    ) -> ExecResult:
        """Pass on."""
        return await self._inner.exec(command, cwd=cwd, env=env, timeout_s=timeout_s, user=user)

    async def upload(self, local_path: str | os.PathLike[str], remote_path: str) -> None:
        """Pass on."""
        await self._inner.upload(local_path, remote_path)

    async def download(self, remote_path: str, local_path: str | os.PathLike[str]) -> None:
        """Pass on."""
        await self._inner.download(remote_path, local_path)


def spec(tmp_path: Path, url: str, **fields: Any) -> SessionSpec:
    """Say what a relayed session is."""
    model = Model(
        url=url.replace("/v1", "/ng-rollout/secret-prefix/v1"), name="scripted", headers={"Authorization": f"Bearer {KEY}"}
    )
    defaults = {"session_id": f"r{os.getpid()}-{tmp_path.name}", "out": tmp_path / "out", "model": model, "upstream": "relay"}
    return SessionSpec(**{**defaults, **fields})


async def once(sandbox: Sandbox, wanted: SessionSpec, prompt: str = "p") -> Result:
    """Open, invoke, close."""
    async with open_session(sandbox, wanted) as session:
        result = await session.invoke(wanted.request(prompt))
    return session.result or result


def secrets_in(box: Box) -> str:
    """Name the files of a box that hold the host's key or path prefix: on its disk, in environments and command lines."""
    where = "/tmp /opt /work /root /etc /var /proc/[0-9]*/environ /proc/[0-9]*/cmdline"
    return box.exec(f"printf '%s\\n' {KEY[:9]}''{KEY[9:]} secret-''prefix | grep -rlsF -f - {where}").out.decode()


@pytest.mark.container
def test_search_for_secrets_finds_them(container: Containers) -> None:
    """The search itself: what it overlooks, the next test would promise."""
    box = container("task", network="none")
    box.check(f"echo x{KEY}x >/var/leak")
    assert secrets_in(box) == "/var/leak\n"


@pytest.mark.container
@pytest.mark.parametrize("transport", ["held", "plain"])
async def test_nooa_works_without_a_network_and_without_the_key(container: Containers, tmp_path: Path, transport: str) -> None:
    """The main job in a --network none box: the host's key and path prefix reach the model, and nothing in the box."""
    make_sample_repo(tmp_path / "bills")
    box = container("task", network="none")
    box.put(tmp_path / "bills", "/work/bills")
    sandbox: Sandbox = DockerSandbox(box.id)
    with ScriptedModel(strict=True) as model:
        wanted = spec(tmp_path, model.url, agent="nooa", workdir="/work/bills")
        seen: list[asyncio.Task[str]] = []

        def look(event: Event) -> None:
            if event.kind == "tool_call":  # while the agent works
                seen.append(asyncio.ensure_future(asyncio.to_thread(secrets_in, box)))

        async with open_session(sandbox if transport == "held" else Plain(sandbox), wanted, on_event=look) as session:
            result = await session.invoke(wanted.request(PROMPT))
            found = [*await asyncio.gather(*seen), secrets_in(box)]
        asked = list(model.calls)
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, []), result.detail
    assert box.check("git -C /work/bills status --porcelain --ignored") == " M bills/split.py"
    assert [call.headers["authorization"] for call in asked] == [f"Bearer {KEY}"] * 4
    assert {call.path for call in asked} == {"/ng-rollout/secret-prefix/v1/responses"}
    assert len(found) == 5
    assert set(found) == {""}
    assert KEY not in result.evidence.read_text()
    calls = [event.data for event in read_events(result.evidence) if event.kind == "model_call"]
    assert [call["status"] for call in calls] == [200] * 4
