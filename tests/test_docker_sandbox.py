# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What only the docker adapter promises: a lost container is noticed at once, and files land where the task sees them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import docker.errors
import docker.tls
import pytest
from containers import Box, Containers

from boxstrap.controller.errors import SandboxLost, UsageError
from boxstrap.controller.sandboxes.docker import DockerSandbox, own_container

pytestmark = pytest.mark.container

NOTICED_S = 3.0
"""A lost sandbox is said to be lost within this."""


SLEEPING = """for f in /proc/[0-9]*/stat; do
    read -r _ name state _ <"$f" && case $name$state in "(sleep)S") echo "$name$state"; esac
done 2>/dev/null"""
"""Prints a line for each sleeping sleep; PID 1 of a box is one, and it reaps no zombies."""


@pytest.fixture
def box(container: Containers) -> Box:
    """A Debian box without a network."""
    return container("debian:12", network="none")


async def running(sandbox: DockerSandbox) -> asyncio.Task[object]:
    """Start a long exec, and return once it runs."""
    task: asyncio.Task[object] = asyncio.create_task(sandbox.exec("echo x >/tmp/begun; sleep 100; true"))
    deadline = time.monotonic() + 10
    while (await sandbox.exec("[ -s /tmp/begun ]")).return_code != 0:
        assert time.monotonic() < deadline
    return task


@pytest.mark.parametrize("verb", ["kill", "pause", "remove"])
async def test_a_container_that_goes_is_lost_at_once(box: Box, verb: str, tmp_path: Path) -> None:
    """Docker kill, pause and rm -f end a running exec within three seconds, and refuse the next one at once."""
    sandbox = DockerSandbox(box.name)
    task = await running(sandbox)
    begun = time.monotonic()
    await asyncio.to_thread(getattr(box, verb))
    result = await task
    assert (result.return_code, result.error_type) == (125, "sandbox_lost")  # type: ignore[attr-defined]
    assert time.monotonic() - begun < NOTICED_S
    begun = time.monotonic()
    after = await sandbox.exec("true")
    assert (after.return_code, after.error_type) == (125, "sandbox_lost")
    assert time.monotonic() - begun < NOTICED_S
    with pytest.raises(SandboxLost):
        await sandbox.upload(__file__, "/tmp/file")
    with pytest.raises(SandboxLost):
        await sandbox.download("/etc/passwd", tmp_path / "got")
    assert not os.listdir(tmp_path)  # noqa: PTH208 - blocking either way
    if verb == "pause":
        box.unpause()
        assert (await sandbox.exec("true")).return_code == 0


@pytest.mark.usefixtures("engine")
async def test_a_name_that_is_no_container_is_lost() -> None:
    """The message says what was looked for."""
    result = await DockerSandbox("boxstrap-no-such-container").exec("true")
    assert (result.return_code, result.error_type) == (125, "sandbox_lost")
    assert "boxstrap-no-such-container" in result.stderr


async def test_an_engine_that_is_not_there_is_lost_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong DOCKER_HOST is a sentence, not a traceback."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    result = await DockerSandbox("any").exec("true")
    assert (result.return_code, result.error_type) == (125, "sandbox_lost")
    assert "DOCKER_HOST" in result.stderr


async def test_output_that_comes_with_the_response_head_is_kept(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow host reads the engine's head and the output in one packet; the SDK's socket forgets the second part."""
    begin = http.client.HTTPResponse.begin

    def late(self: http.client.HTTPResponse) -> None:
        threading.Event().wait(0.3)
        begin(self)

    monkeypatch.setattr(http.client.HTTPResponse, "begin", late)
    result = await DockerSandbox(box.name).exec("echo kept; echo too >&2")
    assert (result.stdout, result.stderr) == ("kept\n", "too\n")


@pytest.mark.parametrize("options", [{"tmpfs": {"/there": "size=64m"}}, {"tmpfs": {"/there": ""}, "read_only": True}])
async def test_upload_reaches_a_tmpfs_mount_and_a_read_only_box(
    container: Containers, tmp_path: Path, options: dict[str, object]
) -> None:
    """The engine's archive calls do not: the file would be hidden, or refused."""
    box = container("debian:12", network="none", **options)  # type: ignore[arg-type]
    sandbox = DockerSandbox(box.name)
    (tmp_path / "sent").write_bytes(os.urandom(5_000_000))
    await sandbox.upload(tmp_path / "sent", "/there/a/b")
    await sandbox.download("/there/a/b", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "sent").read_bytes()


async def test_upload_into_a_full_or_forbidden_place_says_why(container: Containers, tmp_path: Path) -> None:
    """No space, a read-only root: the sandbox's own words are in the error."""
    box = container("debian:12", network="none", tmpfs={"/there": "size=1m"}, read_only=True)
    sandbox = DockerSandbox(box.name)
    (tmp_path / "sent").write_bytes(bytes(5_000_000))
    with pytest.raises(OSError, match="No space left"):
        await sandbox.upload(tmp_path / "sent", "/there/file")
    with pytest.raises(OSError, match="Read-only file system"):
        await sandbox.upload(tmp_path / "sent", "/opt/new/file")


@pytest.mark.parametrize(
    ("tag", "user", "uid"), [("nonroot", None, None), ("debian:12", 1234, "1234"), ("uid1234", None, "1234")]
)
async def test_files_and_commands_are_the_users(
    container: Containers, tmp_path: Path, tag: str, user: int | None, uid: str | None
) -> None:
    """The image's user or the given one, with or without a passwd entry: what is uploaded is theirs."""
    sandbox = DockerSandbox(container(tag, network="none").name, user=user)
    (tmp_path / "sent").write_text("text")
    await sandbox.upload(tmp_path / "sent", "/tmp/mine/file")
    seen = await sandbox.exec("id -u; stat -c %u /tmp/mine/file; cat /tmp/mine/file && echo more >>/tmp/mine/file")
    who, owner, rest = seen.stdout.split("\n", 2)
    assert (seen.return_code, rest) == (0, "text")
    assert who == owner == (uid or who) != "0"
    assert (await sandbox.exec("id -u", user=0)).stdout == "0\n"


@pytest.mark.parametrize("tag", ["alpine:3.22", "busybox"])
async def test_a_box_with_busybox_alone_is_enough(container: Containers, tmp_path: Path, tag: str) -> None:
    """All that is asked for is a POSIX sh and cat."""
    sandbox = DockerSandbox(container(tag, network="none").name)
    (tmp_path / "sent").write_bytes(os.urandom(100_000))
    await sandbox.upload(tmp_path / "sent", "/var/new/file")
    await sandbox.download("/var/new/file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "sent").read_bytes()
    begun = time.monotonic()
    assert (await sandbox.exec("sleep 60; true", timeout_s=1)).error_type == "timeout"
    assert time.monotonic() - begun < 5
    assert (await sandbox.exec(SLEEPING)).stdout == "(sleep)S\n"


async def test_a_box_without_a_shell_is_a_result(container: Containers, tmp_path: Path) -> None:
    """The engine's words come back, and a file cannot get in."""
    sandbox = DockerSandbox(container("noshell", network="none").name)
    result = await sandbox.exec("true")
    assert result.return_code in {126, 127}
    assert "/bin/sh" in result.stdout + result.stderr
    (tmp_path / "sent").write_text("text")
    with pytest.raises(OSError, match="/bin/sh"):
        await sandbox.upload(tmp_path / "sent", "/file")


async def test_an_unknown_user_is_a_result(box: Box) -> None:
    result = await DockerSandbox(box.name, user="nobody-here").exec("true")
    assert result.return_code != 0
    assert "nobody-here" in result.stdout + result.stderr


async def test_spawn_lets_go_and_the_engine_reaps(box: Box) -> None:
    """What is spawned runs on by itself, is not stopped by output that nobody reads, and leaves no zombie."""
    sandbox = DockerSandbox(box.name)
    begun = time.monotonic()
    await sandbox.spawn('head -c 3000000 /dev/zero; echo "$GIVEN" $(pwd) >/tmp/done', cwd="/usr", env={"GIVEN": "here"})
    assert time.monotonic() - begun < NOTICED_S
    deadline = time.monotonic() + 10
    while (seen := await sandbox.exec("cat /tmp/done")).return_code != 0:
        assert time.monotonic() < deadline
    assert seen.stdout == "here /usr\n"
    while "(sh) Z" in (seen := await sandbox.exec("cat /proc/[0-9]*/stat 2>/dev/null")).stdout:
        assert time.monotonic() < deadline, seen.stdout
    with pytest.raises(OSError, match="/no/such"):
        await sandbox.spawn("true", cwd="/no/such/folder")


async def test_many_cancelled_execs_leave_no_threads(box: Box) -> None:
    """Held execs cost no thread, and cancelling gives everything back."""
    sandbox = DockerSandbox(box.name)
    tasks = [asyncio.create_task(sandbox.exec("echo x >>/tmp/begun; sleep 100; true")) for _ in range(12)]
    deadline = time.monotonic() + 30
    while (await sandbox.exec("[ $(cat /tmp/begun | wc -l) = 12 ]")).return_code != 0:
        assert time.monotonic() < deadline
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("boxstrap-docker")]
    assert len(ours) <= 32
    while (await sandbox.exec(SLEEPING)).stdout != "(sleep)S\n":
        assert time.monotonic() < deadline


async def test_one_sandbox_serves_several_event_loops(box: Box) -> None:
    """A controller that restarts its loop keeps its sandbox."""
    sandbox = DockerSandbox(box.name)
    await sandbox.exec("true")
    result = await asyncio.to_thread(lambda: asyncio.run(sandbox.exec("echo again")))
    assert result.stdout == "again\n"


@pytest.fixture(params=["tcp", "tls"])
def remote(
    engine: docker.DockerClient, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[docker.DockerClient]:
    """A client that reaches the engine over loopback TCP, plain or with TLS, as a remote one is reached."""
    del engine
    context, tls = None, None
    if request.param == "tls":
        for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests prefers them to the client's own
            monkeypatch.delenv(name, raising=False)
        context, tls = _certified(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_relay, args=(server, context), daemon=True).start()
        client = docker.DockerClient(base_url=f"tcp://127.0.0.1:{server.getsockname()[1]}", tls=tls or False, timeout=20)
        yield client
        client.close()
        server.shutdown(socket.SHUT_RDWR)


def _certified(folder: Path) -> tuple[ssl.SSLContext, docker.tls.TLSConfig]:
    """Make a certificate for loopback, for the server's side and the client's."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=engine"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*made, *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, docker.tls.TLSConfig(ca_cert=str(certificate), verify=True)


def _relay(server: socket.socket, context: ssl.SSLContext | None) -> None:
    """Carry each connection to the engine's socket, both ways, until the server is shut down."""
    while True:
        try:
            near, _ = server.accept()
            near = context.wrap_socket(near, server_side=True) if context else near
        except OSError:
            return
        far = socket.socket(socket.AF_UNIX)
        far.connect(os.environ.get("DOCKER_HOST", "unix:///run/docker.sock").removeprefix("unix://"))
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


async def test_a_remote_engine_serves_as_well(box: Box, remote: docker.DockerClient, tmp_path: Path) -> None:
    """Exec, input and output travel over TCP and TLS too, several at once, and the bound holds."""
    sandbox = DockerSandbox(box.name, client=remote)
    codes = await asyncio.gather(*(sandbox.exec(f"echo {n}; exit {n}") for n in range(6)))
    assert [(one.stdout, one.return_code) for one in codes] == [(f"{n}\n", n) for n in range(6)]
    for size in (0, 3_000_000):
        (tmp_path / "sent").write_bytes(os.urandom(size))
        await sandbox.upload(tmp_path / "sent", "/var/new/file")
        await sandbox.download("/var/new/file", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (tmp_path / "sent").read_bytes()
    begun = time.monotonic()
    assert (await sandbox.exec("sleep 60", timeout_s=1)).error_type == "timeout"
    assert time.monotonic() - begun < NOTICED_S


def test_facts_say_whether_loopback_is_the_hosts(container: Containers) -> None:
    """Known before the first exec; the description names image and container."""
    own, shared = container("debian:12", network="none"), container("debian:12", network="host")
    assert not DockerSandbox(own.name).shares_host_network
    sandbox = DockerSandbox(shared.id[:12])
    assert sandbox.shares_host_network
    assert shared.name in sandbox.describe()
    assert "debian:12" in sandbox.describe()


async def test_own_container_lives_as_long_as_its_block(engine: docker.DockerClient, image: Callable[[str], str]) -> None:
    """The command's --image: made, usable, and removed."""
    tag = image("debian:12")
    with own_container(tag, network="none") as made:
        assert (await DockerSandbox(made).exec("echo in")).stdout == "in\n"
    with pytest.raises(docker.errors.NotFound):
        engine.containers.get(made)
    with pytest.raises(UsageError, match="boxstrap/no-such-image"), own_container("boxstrap/no-such-image:none"):
        pass
