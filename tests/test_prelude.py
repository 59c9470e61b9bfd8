# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The prelude under every shell of this machine: its words, its facts, its report, and what it hands over."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from boxstrap.controller import artifacts
from boxstrap.runner.wire import Answer, Check

PRELUDE = Path(__file__).resolve().parent.parent / "bootstrap" / "prelude.sh"
SHELLS = {"dash": ["dash"], "bash": ["bash"], "bash-posix": ["bash", "--posix"], "ash": ["busybox", "sh"]}
VERBS = ["check", "install", "clean", "run", "tail", "status", "stop", "shell", "env"]
TOOLS = ["bash", "tar", "gzip", "sha256sum", "flock", "tee", "mv"]
ALSO = ["mkdir", "rm", "chmod", "uname", "id", "getconf", "stat", "touch", "df", "timeout", "sh", "rmdir", "cmp"]
_ANSWER = TypeAdapter(Answer)


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    """Each POSIX shell that is installed here."""
    argv = SHELLS[request.param]
    if not shutil.which(argv[0]):
        pytest.skip(f"{argv[0]} is not installed")
    return [str(shutil.which(argv[0])), *argv[1:]]


@pytest.fixture(scope="session")
def archive() -> Path:
    """The archive of this checkout."""
    return artifacts.archive().path


@pytest.fixture
def call(shell: list[str], tmp_path: Path) -> Callable[..., str]:
    """`call("older 2.31 2.35", "$bx_x")` runs a line with the prelude's functions, and returns its stdout."""
    functions = tmp_path / "functions.sh"
    functions.write_text("".join(PRELUDE.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")

    def run(line: str, *arguments: str | bytes) -> str:
        setup = f"set -u; LC_ALL=C; bx_json=1 bx_nl='\n' bx_probe= bx_stage= bx_summing= bx_ground=; . {functions}; {line}"
        done = subprocess.run([*shell, "-c", setup, "test", *arguments], capture_output=True, check=False, timeout=30)
        assert done.stderr == b"", done.stderr
        return done.stdout.decode()

    return run


def run(
    argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Runs to the end within a bound, with the environment of this process and `env`."""
    return subprocess.run(
        argv,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **kwargs,  # type: ignore[call-overload, no-any-return]
    )


def checked(done: subprocess.CompletedProcess[str]) -> dict[str, list[Check]]:
    """Reads a report strictly, as the controller does, and gives its checks by code."""
    assert done.stdout.count("\n") == 1, "one line and nothing else"
    answer = _ANSWER.validate_json(done.stdout)
    assert answer.report is not None, done.stdout
    assert answer.ok is not answer.report.refused
    assert done.returncode == (69 if answer.report.refused else 0)
    assert answer.report.refused == any(check.status == "fail" for check in answer.report.checks)
    found: dict[str, list[Check]] = {}
    for check in answer.report.checks:
        assert check.status in {"ok", "warn", "fail", "skip"}
        assert check.remedy or check.status not in {"fail", "warn"}, f"{check.code} says what to do"
        found.setdefault(check.code, []).append(check)
    return found


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    """Options that keep a check inside the test's own folder, whose name needs quoting."""
    ground = tmp_path / "a 'box'"
    ground.mkdir()
    return ["--runtime-root", f"{ground}/opt/runtimes", "--session-root", f"{ground}/tmp/sessions"]


# The words.


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        'a "quoted" \\ back\\\\slash',
        "[]!#^`~{}$(id)`id`'*?",
        "line\nend\ttab\rreturn",
        "\x01\x1b[31mred\x7f",
        "gr\u00fc\u00df\u00ef\u4e16\u754c",
        "-n",
        "%s %d \\n",
        " edges ",
    ],
)
def test_quote_prints_valid_json_whatever_it_is_given(call: Callable[..., str], text: str) -> None:
    """Printable ASCII stays as it is; white space becomes a space, control characters vanish, other bytes become '?'."""
    quoted = json.loads(call('quote "$1"; printf "%s" "$bx_quoted"', text))
    wanted = "".join(
        " " if letter.isspace() else "" if ord(letter) < 32 or ord(letter) == 127 else letter
        for letter in text.encode().decode("latin-1")
    )
    assert quoted.replace("?", "") == "".join(letter for letter in wanted if ord(letter) < 128).replace("?", "")


def test_quote_survives_every_byte(call: Callable[..., str]) -> None:
    """Bytes that are no UTF-8 are valid JSON too, and printable ASCII is unchanged."""
    every = bytes(range(1, 256))
    quoted = json.loads(call('quote "$1"; printf "%s" "$bx_quoted"', every))
    assert "".join(chr(code) for code in range(33, 127)) in quoted


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("2.31", "2.35", True),
        ("2.35", "2.35", False),
        ("2.36", "2.35", False),
        ("2.9", "2.17", True),
        ("2.17", "2.9", False),
        ("3.0", "2.35", False),
        ("2.31-13", "2.35", True),
        ("2.35.1", "2.35", False),
    ],
)
def test_older_compares_versions_by_number(call: Callable[..., str], one: str, other: str, expected: bool) -> None:
    """2.9 comes before 2.17, and what follows the minor number does not count."""
    assert call('if older "$1" "$2"; then printf yes; fi', one, other) == ("yes" if expected else "")


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://model:8000/v1", "model", "8000"),
        ("https://model/v1", "model", "443"),
        ("http://model", "model", "80"),
        ("http://user:pass@10.1.2.3:81/v1?x=a:b@c", "10.1.2.3", "81"),
        ("http://[::1]:8000/v1", "::1", "8000"),
        ("https://[fe80::1]/v1", "fe80::1", "443"),
        ("http://model?x=1", "model", "80"),
    ],
)
def test_split_url_finds_what_a_socket_needs(call: Callable[..., str], url: str, host: str, port: str) -> None:
    """Credentials, paths, queries and IPv6 brackets do not confuse it."""
    assert call('split_url "$1" && printf "%s %s" "$bx_host" "$bx_port"', url) == f"{host} {port}"


@pytest.mark.parametrize("url", ["http://:80/", "http://host:port/", "http://host:/", "http://host:999999/", "http:///path"])
def test_split_url_refuses_what_has_no_host_or_port(call: Callable[..., str], url: str) -> None:
    """An unusable URL is a usage error, not a probe that fails."""
    assert call('split_url "$1" || printf no', url) == "no"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1", True),
        ("localhost", True),
        ("LocalHost", True),
        ("api.localhost", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("128.0.0.1", False),
        ("host.docker.internal", False),
    ],
)
def test_loopback_is_told_by_name(call: Callable[..., str], host: str, expected: bool) -> None:
    """What means "this machine" is another machine inside the box."""
    assert call('if is_loopback "$1"; then printf yes; fi', host) == ("yes" if expected else "")


def test_trial_failed_names_the_newest_glibc_that_the_loader_asks_for(call: Callable[..., str]) -> None:
    """The loader names several versions; the largest is the one that is needed."""
    said = "\n".join(f"python3: libc.so.6: version `GLIBC_2.{minor}' not found (required by python3)" for minor in (33, 38, 9))
    line = 'bx_libc_version=2.31 bx_floor= bx_staged=/nonexistent; trial_failed "$1"'
    failure = _ANSWER.validate_json(call(line, said)).failure
    assert failure is not None
    assert failure.code == "libc-too-old"
    assert "2.31" in failure.message
    assert "2.38" in failure.message


# The loader of a program.


def elf(loader: bytes, *, at: int = 0x318) -> bytes:
    """Bytes as a program has them: a header with NULs and line ends in it, the loader's name, and more."""
    head = b"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\x00>\x00\x01\x00\x00\x00\n\x00\\\x00\xff\x00"
    return head + b"\x00" * (at - len(head)) + loader + b"\x00\x04\x00\x00\x00GNU\x00" + b"\xc3\x28\n" * 50


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (b"/lib64/ld-linux-x86-64.so.2", "ld-linux-x86-64.so.2"),
        (b"/lib/ld-linux-aarch64.so.1", "ld-linux-aarch64.so.1"),
        (b"/nix/store/abc-glibc-2.38/lib/ld-linux-x86-64.so.2", "ld-linux-x86-64.so.2"),
        (b"/lib/ld-musl-x86_64.so.1", "ld-musl-x86_64.so.1"),
        (b"/lib/ld-musl-aarch64.so.1", "ld-musl-aarch64.so.1"),
        (b"", ""),
    ],
)
def test_find_loader_reads_it_by_builtins(call: Callable[..., str], tmp_path: Path, loader: bytes, expected: str) -> None:
    """NUL bytes vanish, other bytes are no text, and still the name comes out; no program is run for it."""
    program = tmp_path / "program"
    program.write_bytes(elf(loader))
    assert call('PATH=; find_loader "$1"; printf %s "$bx_loader"', str(program)) == expected


def test_find_loader_takes_no_path_from_the_data_of_a_static_program(call: Callable[..., str], tmp_path: Path) -> None:
    """A static program may hold the name of a loader as a string; it is no loader of its own."""
    program = tmp_path / "static"
    program.write_bytes(elf(b"") + bytes(range(1, 256)) * 40 + b"/lib64/ld-linux-x86-64.so.2")
    assert call('find_loader "$1"; printf %s "$bx_loader"', str(program)) == ""


def test_find_loader_of_this_machine_agrees_with_its_shells(call: Callable[..., str]) -> None:
    """Real programs: dash and bash are dynamic here."""
    for program in ("dash", "bash"):
        found = call('find_loader "$1"; printf %s "$bx_loader"', str(Path(str(shutil.which(program))).resolve()))
        assert found.startswith("ld-"), program


# What is asked wrongly.


@pytest.mark.parametrize(
    "words",
    [
        ["frobnicate"],
        ["check", "--frobnicate"],
        ["check", "--agent"],
        ["check", "--agent", "../x"],
        ["check", "--runtime-root", "relative"],
        ["check", "--runtime-root", "/"],
        ["check", "--need-mib", "many"],
        ["check", "--glibc-floor", "new"],
        ["check", "--url", "ftp://x"],
        ["check", "--url", "http://x y"],
        ["check", "--digest", "0"],
        ["install", "--agent", "command"],
        ["install", "--agent", "command", "--digest", "0" * 63],
        ["install", "--agent", "command", "--digest", "G" * 64],
        ["install", "--smoke", "os; rm"],
    ],
)
def test_usage_errors_are_one_sentence_and_exit_64(shell: list[str], archive: Path, words: list[str]) -> None:
    """People get a sentence on stderr, and --json gets the same as a failure."""
    done = run([*shell, archive, *words])
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("boxstrap: usage: ")
    assert done.stderr.count("\n") == 1
    done = run([*shell, archive, *words, "--json"])
    failure = _ANSWER.validate_json(done.stdout).failure
    assert done.returncode == 64
    assert failure is not None
    assert failure.code == "usage"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_without_python(shell: list[str], archive: Path, verb: str) -> None:
    """Also where no tool can be found at all."""
    done = run([*shell, archive, verb, "--help"], env={"PATH": "/nowhere"})
    assert done.returncode == 0
    assert f"boxstrap.pyz {verb}" in done.stdout
    assert done.stderr == ""


def test_help_names_every_verb(shell: list[str], archive: Path) -> None:
    """Without a verb, and with `help`."""
    for words in ([], ["help"], ["--help"]):
        done = run([*shell, archive, *words])
        assert done.returncode == 0
        assert all(verb in done.stdout for verb in VERBS)


def test_prelude_refuses_to_run_from_a_pipe(shell: list[str], archive: Path) -> None:
    """`$0` is then the shell: without a file there is no zip to hand over to."""
    head = PRELUDE.read_text(encoding="utf-8")
    for done in (
        subprocess.run([*shell], input=head, capture_output=True, text=True, check=False, timeout=30),
        subprocess.run([*shell, "-c", head, shell[0], "check"], capture_output=True, text=True, check=False, timeout=30),
    ):
        assert done.returncode == 64
        assert "not this archive as a file" in done.stderr


@pytest.mark.parametrize("verb", ["run", "tail", "status", "stop", "shell", "env"])
def test_verbs_of_a_session_say_when_no_runtime_is_there(shell: list[str], archive: Path, tmp_path: Path, verb: str) -> None:
    """69 and a code, so that the controller knows that it has to install first."""
    done = run([*shell, archive, verb, "--runtime-root", tmp_path, "--session", "/nowhere", "--json"])
    failure = _ANSWER.validate_json(done.stdout).failure
    assert done.returncode == 69
    assert failure is not None
    assert failure.code == "runtime-missing"


def test_nothing_is_taken_over_from_exported_variables(shell: list[str], archive: Path, tmp_path: Path) -> None:
    """Our own names may be exported by whoever runs us: what they name is not removed."""
    (tmp_path / "kept").mkdir()
    names = ("bx_stage", "bx_probe", "bx_ground", "bx_root", "bx_lock", "bx_summing")
    done = run([*shell, archive, "check", "--frobnicate"], env=dict.fromkeys(names, str(tmp_path / "kept")))
    assert done.returncode == 64
    assert (tmp_path / "kept").is_dir()


# The report.


def test_check_of_a_good_box_is_ok_and_leaves_no_trace(shell: list[str], archive: Path, roots: list[str]) -> None:
    """Nothing is left behind, not even a newer time on the folder that was probed."""
    ground = Path(roots[1]).parents[1]
    os.utime(ground, (1_000_000_000, 1_000_000_000))
    found = checked(run([*shell, archive, "check", "--json", *roots, "--workdir", ground, "--glibc-floor", "2.17"]))
    assert {check.status for checks in found.values() for check in checks} <= {"ok", "skip"}
    assert {check.found for check in found["missing-tool"]} == set(TOOLS)
    assert [check.status for check in found["not-writable"] + found["noexec"] + found["lock-unsupported"]] == ["ok"] * 5
    assert list(ground.iterdir()) == []
    assert ground.stat().st_mtime == 1_000_000_000


def test_check_for_people_prints_a_line_for_every_check(shell: list[str], archive: Path, roots: list[str]) -> None:
    """What failed says what was needed and what to do."""
    done = run([*shell, archive, "check", *roots, "--workdir", "/no/such/folder"])
    assert done.returncode == 69
    lines = done.stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("fail  workdir-missing"))
    assert lines[at + 1].startswith("      needed: ")
    assert lines[at + 2].startswith("      ")
    assert any(line.startswith("ok    unsupported-libc") for line in lines)
    assert done.stderr == "boxstrap: this box is refused\n"


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., str]:
    """`tools(without="tar")` is a PATH that has everything but that."""

    def path(*, without: Sequence[str]) -> str:
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in {*TOOLS, *ALSO} - set(without):
            (folder / tool).symlink_to(str(shutil.which(tool)))
        return str(folder)

    return path


@pytest.mark.parametrize("tool", TOOLS)
def test_check_names_a_missing_tool(
    shell: list[str], archive: Path, roots: list[str], tools: Callable[..., str], tool: str
) -> None:
    """By its name; it refuses where we need it, and warns where only a task's scripts may."""
    if shell[1:] == ["sh"]:
        pytest.skip("BusyBox has its tools built in")
    done = run([*shell, archive, "check", "--json", *roots], env={"PATH": tools(without=[tool])})
    bad = [check for check in checked(done)["missing-tool"] if check.status != "ok"]
    assert [(check.found, check.status) for check in bad] == [(f"no {tool}", "warn" if tool in {"tee", "mv"} else "fail")]
    assert done.stderr == ""


def test_check_without_any_tool_still_reports(shell: list[str], archive: Path, roots: list[str]) -> None:
    """No probe needs what the report may call missing; nothing but the report is printed."""
    if shell[1:] == ["sh"]:
        pytest.skip("BusyBox has its tools built in")
    done = run([*shell, archive, "check", "--json", *roots, "--url", "http://10.0.0.1/"], env={"PATH": "/nowhere"})
    found = checked(done)
    assert {check.found for check in found["missing-tool"] if check.status == "fail"} >= {f"no {tool}" for tool in TOOLS[:5]}
    assert found["unsupported-libc"][0].status == "ok"
    assert found["url-unreachable"][0].status == "skip"
    assert done.stderr == ""


def test_check_does_not_believe_a_tool_that_does_not_work(
    shell: list[str], archive: Path, roots: list[str], tools: Callable[..., str]
) -> None:
    """A sha256sum that prints something else is none."""
    if shell[1:] == ["sh"]:
        pytest.skip("BusyBox has its tools built in")
    path = tools(without=["sha256sum"])
    Path(path, "sha256sum").write_text("#!/bin/sh\necho broken\n", encoding="utf-8")
    Path(path, "sha256sum").chmod(0o755)
    found = checked(run([*shell, archive, "check", "--json", *roots], env={"PATH": path}))
    assert [check.found for check in found["missing-tool"] if check.status == "fail"] == ["a sha256sum that does not work"]


def test_check_refuses_a_root_below_a_file(shell: list[str], archive: Path, tmp_path: Path) -> None:
    """The nearest thing on the way up is what counts, and the remedy names the option."""
    (tmp_path / "file").touch()
    found = checked(
        run([*shell, archive, "check", "--json", "--runtime-root", f"{tmp_path}/file/x", "--session-root", tmp_path])
    )
    assert found["not-writable"][0].status == "fail"
    assert "--runtime-root" in found["not-writable"][0].remedy


def test_check_counts_free_space_against_the_need(shell: list[str], archive: Path, roots: list[str]) -> None:
    """Nearly a petabyte is not there."""
    found = checked(run([*shell, archive, "check", "--json", *roots, "--need-mib", "999999999"]))
    assert found["no-space"][0].status == "fail"
    found = checked(run([*shell, archive, "check", "--json", *roots, "--need-mib", "1"]))
    assert found["no-space"][0].status == "ok"


def test_check_of_an_old_glibc_only_warns(shell: list[str], archive: Path, roots: list[str]) -> None:
    """What decides is whether the pushed interpreter runs; the warning has both numbers."""
    check = checked(run([*shell, archive, "check", "--json", *roots, "--glibc-floor", "2.99"]))["libc-too-old"][0]
    assert check.status == "warn"
    assert check.needed == "glibc 2.99"
    assert check.found.startswith("glibc 2.")


def test_check_survives_a_workdir_with_a_hostile_name(shell: list[str], archive: Path, roots: list[str]) -> None:
    """Quotes, line ends, escapes and bytes that are no UTF-8 reach the report as valid JSON."""
    workdir = b'/no "such"\\\n\x1b[31m\xff\xc3'
    done = subprocess.run([*shell, archive, "check", "--json", *roots, "--workdir", workdir], capture_output=True, check=False)
    answer = _ANSWER.validate_json(done.stdout)
    assert answer.report is not None
    assert answer.report.refused


# URLs.


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_check_refuses_loopback_urls_unless_told(shell: list[str], archive: Path, roots: list[str], port: int) -> None:
    """With --loopback-ok it is then tried like any other."""
    url = ["--url", f"http://127.0.0.1:{port}/v1"]
    found = checked(run([*shell, archive, "check", "--json", *roots, *url]))
    assert found["url-loopback"][0].status == "fail"
    assert "url-unreachable" not in found
    found = checked(run([*shell, archive, "check", "--json", *roots, *url, "--loopback-ok"]))
    assert found["url-loopback"][0].status == found["url-unreachable"][0].status == "ok"


def test_check_says_why_a_url_is_not_reached(shell: list[str], archive: Path, roots: list[str], port: int) -> None:
    """The system's reason, for each URL on its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    urls = ["--loopback-ok", "--url", f"http://127.0.0.1:{closed}/", "--url", f"http://127.0.0.1:{port}/"]
    found = checked(run([*shell, archive, "check", "--json", *roots, *urls], env={"http_proxy": "", "https_proxy": ""}))
    assert [check.status for check in found["url-unreachable"]] == ["fail", "ok"]
    assert "refused" in found["url-unreachable"][0].found


# The hand-over.


@pytest.fixture
def runtime(tmp_path: Path, archive: Path) -> Path:
    """A published runtime whose "interpreter" prints its arguments and its environment."""
    folder = tmp_path / "runtimes" / "0123456789abcdef"
    (folder / "python/bin").mkdir(parents=True)
    (folder / "app/boxstrap").mkdir(parents=True)
    python = folder / "python/bin/python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho --\nexec env -0\n', encoding="utf-8")
    python.chmod(0o755)
    (folder / "manifest.json").touch()
    shutil.copy(archive, folder / "boxstrap.pyz")
    return folder


def handed_over(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment that the interpreter was given."""
    arguments, _, env = done.stdout.partition("\n--\n")
    pairs = (entry.partition("=") for entry in env.rstrip("\0").split("\0"))
    return arguments.split("\n"), {name: value for name, _, value in pairs}


def test_hand_over_passes_the_verbs_own_words_on(shell: list[str], archive: Path, runtime: Path) -> None:
    """--runtime-root is the prelude's; all else arrives as it was, in order, and the interpreter is isolated."""
    words = ["--session", "/tmp/a b", "--json", "--from", "7", "--wait", "", "*"]
    done = run([*shell, archive, "tail", "--runtime-root", runtime.parent, *words])
    arguments, _ = handed_over(done)
    assert arguments[:4] == ["-I", "-X", "utf8", "-c"]
    assert arguments[5:] == [f"{runtime}/app", "tail", *words]


def test_hand_over_uses_the_runtime_that_the_archive_lies_in(shell: list[str], runtime: Path) -> None:
    """Also when the archive is named by a relative path."""
    done = run([*shell, "boxstrap.pyz", "status", "--session", "/s"], cwd=runtime)
    assert handed_over(done)[0][5:] == [f"{runtime}/app", "status", "--session", "/s"]


def test_hand_over_prefers_the_runtime_of_this_very_archive(shell: list[str], archive: Path, runtime: Path) -> None:
    """Another one may speak another version."""
    other = runtime.with_name("0000000000000000")
    shutil.copytree(runtime, other)
    (other / "boxstrap.pyz").write_text("older", encoding="utf-8")
    done = run([*shell, archive, "status", "--runtime-root", runtime.parent, "--session", "/s"])
    assert handed_over(done)[0][5] == f"{runtime}/app"


def test_hand_over_keeps_the_tasks_environment_and_hides_only_ld_variables(shell: list[str], runtime: Path) -> None:
    """LD_* travels under another name; every other variable reaches the interpreter as the task set it."""
    task = {
        "PATH": os.environ["PATH"],
        "HOME": "/root",
        "LD_LIBRARY_PATH": '/task/lib:/it\'s "quoted"\nLD_FAKE=1',
        "LD_BIND_NOW": "1",
        "LD_EMPTY": "",
        "PYTHONPATH": "/task/python",
        "PYTHONHOME": "/task/home",
        "LC_ALL": "C.UTF-8",
        "json": "1",
        "root": "/task",
        "verb": "x",
        "value": "y",
        "archive": "z",
        "MULTI": "line\nexport LD_PRELOAD='/evil'",
    }
    argv = [*shell, f"{runtime}/boxstrap.pyz", "status", "--session", "/s"]
    done = subprocess.run(argv, env=task, capture_output=True, text=True, check=False, timeout=30)
    _, env = handed_over(done)
    expected = {name: value for name, value in task.items() if not name.startswith("LD_")}
    expected |= {f"BOXSTRAP_TASK_{name}": value for name, value in task.items() if name.startswith("LD_")}
    shells_own = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert {name: value for name, value in env.items() if name not in shells_own} == expected
