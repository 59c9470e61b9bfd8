# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Checking and installing in real boxes: each is refused for its own reason, and left as it was found."""

from __future__ import annotations

import os
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from box_fixtures import ANSWER, PUSHED, ROOT, Ask, Pushed, Rows, ask, code_of, failed, installed_by, light, pushed, rows, start
from containers import Box, Containers, InternalNetwork
from polling import eventually
from scripted_model import ScriptedModel

from boxstrap.bootstrap.steps import FAULT
from boxstrap.runner.layout import LOCK
from boxstrap.runner.wire import runtime_digest

__all__ = ["ask", "light", "pushed", "rows", "start"]

pytestmark = pytest.mark.container
Start = Callable[..., Box]


def untouched(box: Box) -> bool:
    """Whether the engine sees no change in the box but our mount."""
    return [change for change in box.diff() if change not in {f"A {PUSHED}", "C /"}] == []


REFUSED = [
    ("alpine:3.22", {"unsupported-libc", "no bash"}),
    ("python-alpine:3.12", {"unsupported-libc", "no bash", "not-writable"}),
    ("busybox", {"unsupported-libc", "no bash", "no flock"}),
    ("no-flock", {"no flock"}),
    ("no-tar", {"no tar"}),
    ("no-sha256sum", {"no sha256sum"}),
    ("no-gzip", {"no gzip"}),
    ("nonroot", {"not-writable"}),
    ("uid1234", {"not-writable"}),
]


@pytest.mark.parametrize(("name", "reasons"), REFUSED, ids=[name for name, _ in REFUSED])
def test_box_is_refused_by_name_and_left_as_it_was(
    start: Start, ask: Ask, pushed: Pushed, name: str, reasons: set[str]
) -> None:
    """Check and install say the same, with status 69, and write nothing."""
    box = start(name)
    for verb, options in (("check", ()), ("install", pushed.options)):
        code, answer = ask(box, verb, options)
        assert (code, failed(answer)) == (69, reasons)
    assert untouched(box)


@pytest.mark.parametrize(
    ("name", "state"), [("debian:12", "installed"), ("debian:13", "installed"), ("ubuntu:22.04", ""), ("ubuntu:24.04", "")]
)
def test_box_with_a_new_enough_glibc_gets_a_runtime(start: Start, ask: Ask, light: Pushed, name: str, state: str) -> None:
    """Debian's and Ubuntu's; without a network, without a Python. What an older one is refused for is the floor."""
    box = start(name, push="light")
    assert ask(box, "check", ["--workdir", "/", "--need-mib", "100"])[1].ok
    code, answer = ask(box, "install", light.options)
    if state or code == 0:
        assert installed_by((code, answer)).state == "installed"
        assert installed_by(ask(box, "install", light.options)).state == "reused"
    else:
        assert code_of((code, answer)) == (69, "libc-too-old")
        assert untouched(box)


def test_box_with_an_older_glibc_is_refused_by_running_the_interpreter(start: Start, ask: Ask, pushed: Pushed) -> None:
    """Check only warns; install refuses with both numbers, and leaves nothing."""
    box = start("debian:11")
    code, answer = ask(box, "check", ["--glibc-floor", "2.35"])
    assert (code, failed(answer)) == (0, set())
    code, answer = ask(box, "install", pushed.options)
    assert code_of((code, answer)) == (69, "libc-too-old")
    assert answer.failure is not None
    assert "found glibc 2.31, needed 2.35" in answer.failure.message
    assert untouched(box)


# What the report names, and that what it says to do helps.


def remedy(box: Box, ask: Ask, options: tuple[str, ...], code: str) -> str:
    """What a report says to do about a code."""
    _, answer = ask(box, "check", options)
    assert answer.report is not None
    return str(next(check.remedy for check in answer.report.checks if (check.status, check.code) == ("fail", code)))


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("uid1234", {}, "not-writable"),
        ("nonroot", {}, "not-writable"),
        ("debian:12", {"tmpfs": {"/opt": "noexec"}}, "noexec"),
        ("debian:12", {"tmpfs": {"/opt": "exec,size=8m"}}, "no-space"),
        ("debian:12", {"read_only": True, "tmpfs": {"/var/tmp": "exec"}}, "not-writable"),
    ],
    ids=["uid", "user", "noexec", "full", "read-only"],
)
def test_box_whose_opt_is_no_use_is_told_what_to_type_and_that_works(
    start: Start, ask: Ask, light: Pushed, name: str, options: dict[str, object], code: str
) -> None:
    """`add: --runtime-root FOLDER`: the folder was tried; typed as it stands, the runtime installs."""
    box = start(name, push="light", **options)
    size = ("--need-mib", "40")
    advice = remedy(box, ask, size, code)
    typed = shlex.split(advice.partition("add: ")[2])
    assert typed[0] == "--runtime-root", advice
    more = typed
    if options.get("read_only"):  # both roots are to be named
        more = [*typed, "--session-root", "/var/tmp/sessions"]
    assert untouched(box)
    assert installed_by(ask(box, "install", [*light.options, *size, *more])).path.startswith(typed[1])


def test_box_without_any_writable_folder_is_told_how_to_get_one(start: Start, ask: Ask) -> None:
    """Read-only all over: the remedy is a mount; and typed as it stands, that mount makes the box good."""
    box = start("debian:12", read_only=True, tmpfs={"/dev/shm": "noexec"})
    advice = remedy(box, ask, (), "not-writable")
    assert "docker run --tmpfs /opt:exec" in advice
    _, answer = ask(box, "check")
    assert answer.report is not None
    assert all("Read-only file system" in check.found for check in answer.report.checks if check.status == "fail")
    assert ask(start("debian:12", read_only=True, tmpfs={"/opt": "exec", "/tmp": "exec"}), "check")[1].ok


def test_box_without_a_tool_is_told_the_command_that_brings_it(start: Start, ask: Ask) -> None:
    """`apt-get … util-linux` for flock, as it stands; skipped by name where this machine's boxes reach no package mirror."""
    box = start("no-flock", network="host")
    advice = remedy(box, ask, (), "missing-tool")
    command = advice.partition(": ")[2]
    assert command == "apt-get update && apt-get install -y --reinstall util-linux"
    if box.exec("apt-get update -qq").code != 0:
        pytest.skip("no package mirror answers from inside a box")
    box.check(f"{{ {command}; }} >/dev/null 2>&1")
    assert ask(box, "check", note="after its remedy")[1].ok


def test_box_with_every_problem_hears_of_all_in_one_report(start: Start, ask: Ask, light: Pushed) -> None:
    """Noexec, no room, no workdir, loopback, no Python: one report names each, with what was found, needed, and to do."""
    box = start("no-flock", push="light", tmpfs={"/opt": "noexec,size=8m"}, user="0:0")
    options = ["--workdir", "/none", "--url", "http://127.0.0.1:1/v1", "--need-mib", "500", "--digest", light.digest]
    code, answer = ask(box, "install", options, note="with everything wrong")
    reasons = {"no flock", "noexec", "no-space", "workdir-missing", "url-loopback", "no-python"}
    assert (code, failed(answer)) == (69, reasons)
    assert answer.report is not None
    assert all(check.found and check.needed and check.remedy for check in answer.report.checks if check.status == "fail")
    ran = box.exec(["sh", f"{PUSHED}/boxstrap.pyz", "check", "--agent", "test"])
    assert b"fail  missing-tool      no flock\n      needed: flock, for installing a runtime\n" in ran.out


def test_box_is_refused_for_one_thing_at_a_time(start: Start, ask: Ask, light: Pushed) -> None:
    """Each code on its own, in a box that is good otherwise."""
    box = start("debian:12", push="light")
    box.check("printf '#!/bin/sh\\necho flock: Function not implemented >&2; exit 1\\n' >/usr/local/bin/flock")
    box.check("printf '#!/bin/sh\\necho broken\\n' >/usr/local/sbin/sha256sum; chmod +x /usr/local/bin/flock")
    usual = "export PATH=/usr/bin:/bin; "
    rows = [
        ("lock-unsupported", "check", ["--agent", "test"], "export PATH=/usr/local/bin:/usr/bin:/bin; "),
        ("workdir-missing", "check", ["--workdir", "/none"], usual),
        ("url-loopback", "check", ["--url", "http://localhost:8000/v1"], usual),
        ("url-unreachable", "check", ["--url", "http://10.255.255.1:8000/v1"], usual),
        ("unsupported-arch", "check", [], "exec setarch i686 "),
        ("no-space", "check", ["--need-mib", "99999999"], usual),
        ("no-python", "install", ["--digest", light.digest], usual),
    ]
    for reason, verb, options, before in rows:
        code, answer = ask(box, verb, options, before=before, note=" ".join(options))
        assert (code, failed(answer)) == (69, {reason}), answer
    box.check("chmod +x /usr/local/sbin/sha256sum")
    code, answer = ask(box, "check", before="export PATH=/usr/local/sbin:/usr/bin:/bin; ")
    assert (code, failed(answer)) == (69, {"a sha256sum that does not work"})


def test_box_probes_urls_from_inside(start: Start, ask: Ask, internal_network: InternalNetwork) -> None:
    """What answers in there is fine; loopback is refused unless the box shares the host's network and says so."""
    with ScriptedModel(bind=internal_network.host) as model:
        assert ask(start("debian:12", network=internal_network.name), "check", ["--url", model.url], note="--url of the host")[
            1
        ].ok
        assert failed(ask(start("debian:12"), "check", ["--url", model.url], note="--url of the host")[1]) == {
            "url-unreachable"
        }
    with ScriptedModel() as model:
        box = start("debian:12", network="host")
        assert failed(ask(box, "check", ["--url", model.url], note="loopback, network host")[1]) == {"url-loopback"}
        assert ask(box, "check", ["--url", model.url, "--loopback-ok"], note="--loopback-ok, network host")[1].ok


# Mounts.


def test_box_with_noexec_tmp_will_do_and_is_warned(start: Start, ask: Ask, light: Pushed) -> None:
    """Nothing of ours is executed in the session root; the warning is for agents that install programs into their HOME."""
    box = start("debian:12", push="light", tmpfs={"/tmp": "noexec"})
    code, answer = ask(box, "check")
    assert (code, failed(answer)) == (0, set())
    assert answer.report is not None
    assert [check.code for check in answer.report.checks if check.status == "warn"] == ["noexec"]
    assert installed_by(ask(box, "install", light.options)).state == "installed"
    assert box.check("ls -A /tmp") == ""


def test_box_with_noexec_opt_is_refused(start: Start, ask: Ask, pushed: Pushed) -> None:
    """Files can be written and shells read them, but the kernel starts no program there."""
    box = start("debian:12", tmpfs={"/opt": "noexec", "/tmp": "noexec"})
    for verb, options in (("check", ()), ("install", pushed.options)):
        code, answer = ask(box, verb, options)
        assert (code, failed(answer)) == (69, {"noexec"})
    assert box.check("ls -A /opt /tmp") == "/opt:\n\n/tmp:"


def test_box_without_space_is_refused_before_or_cleaned_after(start: Start, ask: Ask, pushed: Pushed) -> None:
    """A full disk half way is no-space too, and the stage is gone: while the interpreter unpacks, or the payload."""
    for size in ("8m", "52m"):
        box = start("debian:12", tmpfs={"/opt": f"exec,size={size}"})
        code, answer = ask(box, "check", ["--need-mib", "100"])
        assert (code, failed(answer)) == (69, {"no-space"})
        assert code_of(ask(box, "install", pushed.options)) == (73, "no-space")
        assert box.check("ls -A /opt") == ""


# Races, damage, locks.


def test_box_gets_one_installation_from_twenty_installers(start: Start, ask: Ask, light: Pushed) -> None:
    """They begin together, /opt is another file system than /tmp; then it is reused, and repaired after damage."""
    box = start("debian:12", push="light", tmpfs={"/opt": "exec"})
    command = shlex.join(["sh", f"{PUSHED}/boxstrap.pyz", "install", "--json", "--agent", "test", *light.options])
    lines = box.check(f"for i in 0 1 2 3 4 5 6 7 8 9 a b c d e f g h i j; do {command} & done; wait").splitlines()
    answers = [ANSWER.validate_json(line).installed for line in lines]
    assert sorted(answer.state if answer else "failed" for answer in answers) == ["installed"] + ["reused"] * 19
    assert installed_by(ask(box, "install", light.options, note="after 20 at once")).state == "reused"
    member = f"{light.runtime}/app/boxstrap/runner/wire.py"
    for damage, flags in (
        ("rm {}", ()),
        ("truncate -s 9 {}", ()),
        ("printf x | dd of={} conv=notrunc status=none", ("--verify",)),
    ):
        box.check(damage.format(member))
        note = f"after {damage.split()[0] if 'dd' not in damage else 'a changed byte'} of a file"
        assert installed_by(ask(box, "install", [*light.options, *flags], note=note)).state == "repaired"
    assert installed_by(ask(box, "install", [*light.options, "--verify"])).state == "reused"
    assert box.check(f"ls -A {ROOT}").split() == [f"{LOCK}{light.digest[:16]}", light.digest[:16]]


def test_box_whose_lock_is_held_names_the_holder(start: Start, ask: Ask, light: Pushed) -> None:
    """By pid and name, although another number stands in the lock file; the box is as it was."""
    box = start("debian:12", push="light")
    lock = f"{ROOT}/{LOCK}{light.digest[:16]}"
    box.check(f"mkdir {ROOT}; echo 99999 >{lock}; flock {lock} sleep 600 </dev/null >/dev/null 2>&1 &")
    eventually(lambda: box.exec(["flock", "-n", lock, "true"]).code == 1)
    holder = box.check(f"for f in /proc/[0-9]*/fd/*; do [ $f -ef {lock} ] && echo ${{f%%/fd*}}; done; :")
    code, answer = ask(box, "install", [*light.options, "--lock-wait", "1"], note="with a held lock")
    assert code_of((code, answer)) == (75, "lock-timeout")
    assert answer.failure is not None
    named = answer.failure.message.partition("held by pid ")[2].split(" ")[0]
    assert named in {path.strip().removeprefix("/proc/") for path in holder.splitlines()}


def test_box_refuses_corrupt_uploads_and_is_left_as_it_was(start: Start, ask: Ask, pushed: Pushed, tmp_path: Path) -> None:
    """Truncated and flipped, archive, interpreter and payload: 73, upload-corrupt, and only the pushed files are there."""
    box = start("debian:12", push=None)
    for name in ("boxstrap.pyz", "python.tar.gz", "payload.tar.gz"):
        for damage in ("truncate", "flip"):
            for path in pushed.folder.iterdir():
                shutil.copy(path, tmp_path)
            raw = bytearray((tmp_path / name).read_bytes())
            raw[len(raw) * 3 // 4] ^= 1
            (tmp_path / name).write_bytes(raw if damage == "flip" else raw[: len(raw) // 2])
            box.put(tmp_path, PUSHED)
            asked = ask(box, "install", pushed.options, note=f"{damage} {name}")
            assert code_of(asked) == (73, "upload-corrupt"), (name, damage)
    assert {change.split(" ")[1].split("/")[1] for change in box.diff()} == {PUSHED.strip("/")}


def test_box_refuses_a_payload_that_escapes(start: Start, ask: Ask, light: Pushed, tmp_path: Path) -> None:
    """Through a link that leads out, with the sha256 that was promised."""
    shutil.copytree(light.folder, tmp_path / "pushed")
    with tarfile.open(tmp_path / "pushed" / "payload.tar.gz", "w:gz") as tar:
        link = tarfile.TarInfo("site-link")
        link.type, link.linkname = tarfile.SYMTYPE, "../../../etc"
        tar.addfile(link)
    box = start("debian:12", push=None)
    box.put(tmp_path / "pushed", PUSHED)
    sums = box.check(f"cd {PUSHED} && sha256sum python.tar.gz payload.tar.gz boxstrap.pyz | cut -d' ' -f1").split()
    digest = runtime_digest(interpreter=sums[0], payload=sums[1], arch=os.uname().machine, archive=sums[2])
    words = ["--digest", digest, "--interpreter", f"{PUSHED}/python.tar.gz", "--interpreter-sha256", sums[0]]
    words += ["--payload", f"{PUSHED}/payload.tar.gz", "--payload-sha256", sums[1]]
    assert code_of(ask(box, "install", words, note="a link that leads out")) == (73, "unsafe-member")
    assert {change.split(" ")[1].split("/")[1] for change in box.diff()} == {PUSHED.strip("/")}


def test_box_with_a_damaged_runtime_in_its_image_is_repaired_also_when_killed(
    start: Start, ask: Ask, container: Containers, light: Pushed, rows: Rows
) -> None:
    """A folder of a lower layer can be neither exchanged nor renamed (EXDEV): nobody takes what is left half way for whole."""
    first = start("debian:12", push="light")
    installed_by(ask(first, "install", light.options))
    first.check(f"rm {light.runtime}/app/boxstrap/runner/wire.py")
    image = first.container.commit()
    try:
        baked = Containers(container.client, tag_of=lambda name: name)
        try:
            for fault in ("", "replace"):
                box = baked(str(image.id), network="none", volumes=[light.volume()])
                rows.started(box, "debian:12 with a damaged runtime", {})
                argv = ["sh", f"{PUSHED}/boxstrap.pyz", "install", "--json", "--agent", "test", *light.options]
                if fault:
                    assert box.exec(argv, env={FAULT: fault}).code != 0
                state = installed_by(
                    ask(box, "install", light.options, note=f"after kill -9 at {fault}" if fault else "")
                ).state
                assert state == ("installed" if fault else "repaired")
                assert installed_by(ask(box, "install", [*light.options, "--verify"])).state == "reused"
                assert box.check(f"ls -A {ROOT}").split() == [f"{LOCK}{light.digest[:16]}", light.digest[:16]]
        finally:
            baked.remove()
    finally:
        container.client.images.remove(image.id, force=True)


def test_box_with_a_runtime_in_its_image_needs_nothing_but_bash(start: Start, ask: Ask, light: Pushed) -> None:
    """Mounted read-only into a read-only box, without the tools of an installation, without what was pushed, /tmp noexec."""
    host = os.fspath(light.folder.parent / "baked")
    first = start("debian:12", push="light", volumes=[f"{host}:{ROOT}"])
    installed_by(ask(first, "install", light.options))
    box = start("no-tar", push=None, volumes=[f"{host}:{ROOT}:ro"], read_only=True, tmpfs={"/tmp": "noexec"})
    env = {"PATH": "/tools"}
    made = start("no-tar", push=None, volumes=[f"{host}:{ROOT}:ro"])
    made.check("mkdir /tools; ln -s /bin/bash /bin/sh /tools; rm /usr/bin/gzip /usr/bin/flock")
    for where, how in ((box, {}), (made, env)):
        asked = ask(where, "install", ["--digest", light.digest], archive=f"{light.runtime}/boxstrap.pyz", env=how)
        assert installed_by(asked).state == "reused"


def test_box_is_told_that_the_interpreter_is_for_another_architecture(
    start: Start, ask: Ask, light: Pushed, tmp_path: Path
) -> None:
    """A program whose loader is the other one's, with the box's own name on it: refused by name, whether it starts or not."""
    shutil.copytree(light.folder, tmp_path / "pushed")
    program = bytearray(0x400)
    program[:20] = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\xb7\x00"
    program[0x318:0x333] = b"/lib/ld-linux-aarch64.so.1\0"
    (tmp_path / "python3").write_bytes(program)
    (tmp_path / "python3").chmod(0o755)
    with tarfile.open(tmp_path / "pushed" / "python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "python3", "bin/python3")
    box = start("debian:12", push=None)
    box.put(tmp_path / "pushed", PUSHED)
    sums = box.check(f"cd {PUSHED} && sha256sum python.tar.gz boxstrap.pyz | cut -d' ' -f1").split()
    digest = runtime_digest(interpreter=sums[0], payload=None, arch="x86_64", archive=sums[1])
    words = ["--digest", digest, "--interpreter", f"{PUSHED}/python.tar.gz", "--interpreter-sha256", sums[0]]
    assert code_of(ask(box, "install", words, note="an aarch64 interpreter")) == (69, "unsupported-arch")
    assert {change.split(" ")[1].split("/")[1] for change in box.diff()} == {PUSHED.strip("/")}
