# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Each box is what its name claims, asked of the running box itself; and the fixtures keep what they promise."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from boxes import BOXES, Box
from containers import Containers, InternalNetwork
from docker.client import DockerClient
from polling import eventually

pytestmark = pytest.mark.container

BUILD = Path(__file__).resolve().parent.parent / "images" / "build.py"
GLIBC = {"debian:11": "2.31", "debian:12": "2.36", "debian:13": "2.41", "ubuntu:22.04": "2.35", "ubuntu:24.04": "2.39"}
MUSL = "/lib/ld-musl-x86_64.so.1"
SEED_TOOLS = ("bash", "tar", "gzip", "sha256sum", "flock", "tee", "mv")
"""What the install of a payload needs (DESIGN 5)."""


def there(name: str) -> str:
    """Shell: says yes or no, by the box's own lookup."""
    return f"if command -v {name} >/dev/null; then echo yes; else echo no; fi"


@pytest.mark.parametrize("name", GLIBC)
def test_glibc_box_has_the_version_of_its_distribution(container: Containers, name: str) -> None:
    """The libc floor tests stand on these numbers."""
    box = container(name, network="none")
    distribution, version = name.split(":")
    assert box.check("getconf GNU_LIBC_VERSION") == f"glibc {GLIBC[name]}"
    assert box.check(". /etc/os-release; echo $ID $VERSION_ID") == f"{distribution} {version}"
    assert box.check(there("python3")) == "no"
    assert [box.check(there(tool)) for tool in SEED_TOOLS] == ["yes"] * len(SEED_TOOLS)


def test_alpine_is_musl_without_python_and_bash(container: Containers) -> None:
    box = container("alpine:3.22", network="none")
    assert box.check(". /etc/os-release; echo $ID $VERSION_ID").startswith("alpine 3.22")
    assert box.check(f"test -x {MUSL}; " + there("python3") + "; " + there("bash")) == "no\nno"


def test_python_alpine_is_musl_with_a_python_and_an_unprivileged_user(container: Containers) -> None:
    box = container("python-alpine:3.12", network="none")
    assert box.check(f"test -x {MUSL} && id -un && pwd") == "appuser\n/app"
    assert box.check("python3 -c 'import sys; print(*sys.version_info[:2])'") == "3 12"


@pytest.mark.parametrize("tool", ["flock", "tar", "sha256sum", "gzip"])
def test_box_without_a_tool_lacks_that_one_only(container: Containers, tool: str) -> None:
    """Otherwise a test of one missing tool would pass because of another."""
    box = container(f"no-{tool}", network="none")
    assert [name for name in SEED_TOOLS if box.check(there(name)) == "no"] == [tool]


def test_nonroot_box_runs_as_a_user_with_a_home(container: Containers) -> None:
    box = container("nonroot", network="none")
    assert box.check("id -un; echo $HOME; touch here; test -w /opt || echo refused") == "app\n/home/app\nrefused"


def test_uid1234_box_has_no_name_for_its_user(container: Containers) -> None:
    box = container("uid1234", network="none")
    assert box.check("id -u; echo $HOME; test -w / || echo refused") == "1234\n/\nrefused"
    assert box.exec("getent passwd 1234").code == 2


def test_busybox_has_a_shell_and_no_loader(container: Containers) -> None:
    box = container("busybox", network="none")
    assert box.check("; ".join(there(name) for name in ("sh", "tar", "bash", "python3"))) == "yes\nyes\nno\nno"
    assert box.exec("ls -d /lib /lib64 /usr").out == b""


def test_noshell_box_runs_one_binary_and_no_shell(container: Containers) -> None:
    box = container("noshell", network="none")
    ran = box.exec("true")
    assert ran.code in {126, 127}
    assert b"no such file" in ran.out.lower() or b"not found" in ran.out.lower()
    assert box.exec(["sleep", "0"]).code == 0


@pytest.mark.parametrize(("name", "release"), [("task", "12"), ("task13", "13")])
def test_task_box_commits_and_runs_unit_tests(container: Containers, name: str, release: str) -> None:
    """What a task's repository needs: git, a python3 of its own with unittest, and no network for either."""
    box = container(name, network="none")
    assert box.check(". /etc/os-release; echo $VERSION_ID; pwd") == f"{release}\n/testbed"
    box.check("git init -q . && git -c user.name=a -c user.email=a@b.invalid commit -q --allow-empty -m start")
    box.check("printf 'import unittest\\nclass T(unittest.TestCase):\\n def test(self): pass\\n' >test_it.py")
    assert "OK" in box.exec("python3 -m unittest test_it").err.decode()


def test_list_names_exactly_the_tags_that_the_engine_has(engine: DockerClient) -> None:
    """A box that is said to be present is there and of the present recipe; asked for by name, an absent one is a failure."""
    done = subprocess.run([sys.executable, BUILD, "--list"], check=False, capture_output=True, text=True)
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    tags = {tag for image in engine.images.list("boxstrap/*") for tag in image.tags}
    assert {tag for tag, state in said.items() if state == "present"} <= tags
    assert {tag for tag, state in said.items() if state == "absent: not made yet"}.isdisjoint(tags)
    for state in sorted(set(said.values())):
        tag = next(tag for tag in said if said[tag] == state)
        name = tag.removeprefix("boxstrap/").removesuffix(":latest")
        asked = subprocess.run([sys.executable, BUILD, "--list", name], check=False, capture_output=True, text=True)
        assert asked.returncode == (state != "present"), asked.stdout


def test_put_makes_folders_and_keeps_modes(container: Containers, tmp_path: Path) -> None:
    box = container("debian:12", network="none")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tree" / "run").chmod(0o750)
    box.put(tmp_path / "tree", "/srv/a/b", uid=1234)
    assert box.check("/srv/a/b/run; stat -c '%a %u' /srv/a/b/run") == "ran\n750 1234"


def test_diff_is_empty_until_something_is_written(container: Containers) -> None:
    """`A refused box is left exactly as it was found` is tested with this."""
    box = container("debian:12", network="none")
    assert box.exec("cat /etc/passwd").code == 0
    assert box.diff() == []
    box.check("touch /opt/x; rm /etc/issue")
    assert box.diff() == ["C /etc", "D /etc/issue", "C /opt", "A /opt/x"]


def test_exec_keeps_streams_environment_and_user_apart(container: Containers) -> None:
    box = container("debian:12", network="none", env={"FROM_BOX": "1"})
    ran = box.exec("echo $FROM_BOX $FROM_EXEC; id -u >&2; exit 7", user="1234", env={"FROM_EXEC": "2"})
    assert ran == (7, b"1 2\n", b"1234\n")


def test_kill_then_restart_keeps_the_files_and_ends_the_processes(container: Containers) -> None:
    box = container("debian:12", network="none")
    box.check("touch /opt/kept; sleep 1000 >/dev/null 2>&1 & ")
    box.kill()
    box.restart()
    assert box.check("ls /opt; cat /proc/[0-9]*/comm | grep -c sleep") == "kept\n1"


def test_limits_take_effect(container: Containers) -> None:
    """A read-only root with a tmpfs that refuses to execute: the flags reach the box."""
    box = container("debian:12", network="none", read_only=True, tmpfs={"/tmp": "rw,noexec,size=8m"})
    assert box.exec("touch /opt/x").code != 0
    assert box.exec("printf '#!/bin/sh\\n' >/tmp/x; chmod +x /tmp/x; exec /tmp/x").code == 126


class _Hello(http.server.BaseHTTPRequestHandler):
    """Answers every request with one word."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Says nothing."""


def test_internal_network_reaches_this_host_and_nothing_beyond(
    container: Containers, internal_network: InternalNetwork, request: pytest.FixtureRequest
) -> None:
    """A server on the host answers; a container elsewhere that answers the host does not, nor does a name server."""
    box = container("debian:12", network=internal_network.name)
    get = "exec 3<>/dev/tcp/{}/{} && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3"

    server = http.server.ThreadingHTTPServer((internal_network.host, 0), _Hello)
    request.addfinalizer(server.server_close)
    request.addfinalizer(server.shutdown)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def fetch(address: str, port: int) -> tuple[int, bytes]:
        ran = box.exec(["timeout", "3", "bash", "-c", get.format(address, port)])
        return ran.code, ran.out

    code, out = fetch(internal_network.host, server.server_address[1])
    assert (code, out[-5:]) == (0, b"hello")

    elsewhere = container("busybox")
    elsewhere.check("mkdir /www && echo hello >/www/index.html && httpd -p 80 -h /www")
    elsewhere.container.reload()
    address = elsewhere.container.attrs["NetworkSettings"]["Networks"]["bridge"]["IPAddress"]
    with urllib.request.urlopen(f"http://{address}", timeout=5) as answer:
        assert answer.read() == b"hello\n", "it is there, for others"
    code, out = fetch(address, 80)
    assert code in {1, 124}, "refused or unanswered"
    assert out == b""

    known = container("debian:12")
    mirror = known.check(
        r"cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | sed -n 's#.*http://\([^/ ]*\)/.*#\1#p' | head -n 1"
    )
    resolve = ["timeout", "3", "getent", "hosts", mirror]
    if known.exec(resolve).code == 0:  # else this machine has no name server to be kept from
        assert box.exec(resolve).code != 0


def test_eventually_waits_for_truth_and_says_what_it_saw_last() -> None:
    """It returns the first true value; on time-out the message holds the last one."""
    values = iter([0, 0, 5])
    assert eventually(functools.partial(next, values)) == 5
    with pytest.raises(AssertionError, match="last: 0"):
        eventually(lambda: 0, within_s=0.05)


def test_absent_image_skips_by_name_or_fails_where_required(
    image: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that must cover containers cannot pass by leaving them out; what no registry may have is left out by name."""
    for name, optional in (("no-such-box", False), ("no-such-luxury", True)):
        monkeypatch.setitem(BOXES, name, Box(name, "plain", "none", optional=optional))
    monkeypatch.delenv("BOXSTRAP_CONTAINERS", raising=False)
    for name in ("no-such-box", "no-such-luxury"):
        with pytest.raises(pytest.skip.Exception, match=f"boxstrap/{name} is absent"):
            image(name)
    monkeypatch.setenv("BOXSTRAP_CONTAINERS", "required")
    with pytest.raises(pytest.fail.Exception, match="required, and the image boxstrap/no-such-box"):
        image("no-such-box")
    with pytest.raises(pytest.skip.Exception, match="optional image boxstrap/no-such-luxury is absent"):
        image("no-such-luxury")
