# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Installing on this machine, with the real interpreter, into a folder of the test's own."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from boxstrap.bootstrap import clean, manifest, preflight, publish, unpack
from boxstrap.bootstrap.steps import FAULT, Clock
from boxstrap.controller import artifacts
from boxstrap.runner.layout import LOCK, STAGE, RuntimePaths, SessionPaths
from boxstrap.runner.wire import Answer, Failure, Installed, runtime_digest, to_json

_ANSWER = TypeAdapter(Answer)


def sha256(path: Path) -> str:
    """The file's sha256 in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Push:
    """What the controller would push, and where to install it: `ground` holds the runtime root and the session root."""

    ground: Path
    archive: Path
    interpreter: Path
    payload: Path | None = None
    smoke: tuple[str, ...] = ()
    promised: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The runtime root, which is not there yet."""
        return self.ground / "opt" / "runtimes"

    @property
    def digest(self) -> str:
        """The digest of what was meant to be pushed."""
        return runtime_digest(
            interpreter=self.sum_of(self.interpreter),
            payload=self.sum_of(self.payload) if self.payload else None,
            arch=os.uname().machine,
            archive=self.sum_of(self.archive),
        )

    @property
    def runtime(self) -> Path:
        """The published folder."""
        return Path(RuntimePaths(str(self.root), self.digest).path)

    def sum_of(self, path: Path) -> str:
        """What the controller says the file's sha256 is."""
        return self.promised.get(path.name) or sha256(path)

    def argv(self, *extra: str) -> list[str]:
        """The command line."""
        words = ["/bin/sh", str(self.archive), "install", "--json", "--agent", "test", "--digest", self.digest]
        words += ["--runtime-root", str(self.root), "--session-root", f"{self.ground}/tmp/sessions"]
        words += ["--interpreter", str(self.interpreter), "--interpreter-sha256", self.sum_of(self.interpreter)]
        if self.payload:
            words += ["--payload", str(self.payload), "--payload-sha256", self.sum_of(self.payload)]
        for name in self.smoke:
            words += ["--smoke", name]
        return [*words, *extra]

    def run(self, *extra: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Installs, and returns the exit status and what was printed."""
        done = subprocess.run(
            self.argv(*extra), env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False, timeout=120
        )
        return done.returncode, done.stdout

    def install(self, *extra: str) -> Installed:
        """Installs, which must go well."""
        status, out = self.run(*extra)
        assert status == 0, out
        installed = _ANSWER.validate_json(out).installed
        assert installed is not None
        return installed

    def fail(self, *extra: str) -> tuple[int, Failure]:
        """Installs, which must fail, and leave nothing at all."""
        os.utime(self.ground, (1_000_000_000, 1_000_000_000))
        status, out = self.run(*extra)
        failure = _ANSWER.validate_json(out).failure
        assert failure is not None, out
        assert failure.remedy
        assert list(self.ground.iterdir()) == []
        assert self.ground.stat().st_mtime == 1_000_000_000
        return status, failure


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real archive and the real interpreter, once for all tests."""
    folder = tmp_path_factory.mktemp("pushed")
    shutil.copy(artifacts.archive().path, folder / "boxstrap.pyz")
    shutil.copy(artifacts.interpreter(arch=os.uname().machine).path, folder / "python.tar.gz")
    return folder


@pytest.fixture
def ground() -> Iterator[Path]:
    """An empty folder, in memory where it can be: an interpreter is more than a thousand files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="a 'box' ", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def push(ground: Path, pushed: Path, tmp_path: Path) -> Push:
    """A push of the test's own, without a payload."""
    for name in ("boxstrap.pyz", "python.tar.gz"):
        shutil.copy(pushed / name, tmp_path)
    return Push(ground, tmp_path / "boxstrap.pyz", tmp_path / "python.tar.gz")


@pytest.fixture(scope="session")
def published(pushed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime root with one whole runtime in it, to be copied."""
    first = Push(tmp_path_factory.mktemp("published"), pushed / "boxstrap.pyz", pushed / "python.tar.gz")
    first.install()
    return first.root


@pytest.fixture
def installed(push: Push, published: Path) -> Push:
    """The same push, with its runtime published already."""
    shutil.copytree(published, push.root, symlinks=True)
    return push


Member = tuple[str, bytes | None, Mapping[str, object]]


def pack(path: Path, members: Sequence[Member]) -> Path:
    """Writes a .tar.gz; a member is its name, its contents (none: no file), and fields of TarInfo."""
    with tarfile.open(path, "w:gz") as tar:
        for name, contents, fields in members:
            member = tarfile.TarInfo(name)
            member.size = len(contents or b"")
            for key, value in fields.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(contents) if contents is not None else None)
    return path


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., Path]:
    """`packed(("a.py", b"", {}))` is a payload with these members."""

    def pack_members(*members: Member) -> Path:
        return pack(tmp_path / "payload.tar.gz", members)

    return pack_members


# Publishing.


def test_install_publishes_what_its_manifest_says(push: Push, packed: Callable[..., Path]) -> None:
    """Every file is listed with its size, sha256 and mode; nothing else is there; the interpreter runs the code."""
    payload = packed(("agent/__init__.py", b"answer = 42\n", {}), ("bin/tool", b"#!/bin/sh\necho 1.0\n", {"mode": 0o755}))
    wanted = replace(push, payload=payload, smoke=("agent", "bin/tool"))
    installed = wanted.install()
    runtime = wanted.runtime
    assert (installed.state, installed.path, installed.digest) == ("installed", str(runtime), wanted.digest)
    about = json.loads((runtime / "manifest.json").read_bytes())
    there = {str(path.relative_to(runtime)) for path in runtime.rglob("*") if not path.is_dir()}
    assert there - {"manifest.json"} == set(about["files"]) | set(about["links"])
    for name, (size, digest, mode) in about["files"].items():
        path = runtime / name
        assert (path.stat().st_size, sha256(path), path.stat().st_mode & 0o7777) == (size, digest, mode)
    assert about["digest"] == wanted.digest
    assert about["payload_sha256"] == sha256(payload)
    assert about["interpreter"].startswith("3.")
    assert {entry.name for entry in wanted.root.iterdir()} == {runtime.name, f"{LOCK}{runtime.name}"}
    assert set(installed.seconds) >= {"check", "lock", "interpreter", "payload", "smoke", "manifest", "total"}
    assert (runtime / "boxstrap.pyz").read_bytes() == push.archive.read_bytes()
    code = "import sys; sys.path[:0] = sys.argv[1:]; import agent, boxstrap.runner.wire as w; print(agent.answer, w.__cached__)"
    argv = [runtime / "python/bin/python3", "-I", "-c", code, runtime / "site", runtime / "app"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"42 {runtime}/app/boxstrap/runner/__pycache__/")


def test_install_compiles_our_code_under_its_final_name(push: Push) -> None:
    """A traceback names a file that is there, not the stage."""
    push.install()
    for path in (push.runtime / "app").rglob("*.pyc"):
        raw = path.read_bytes()
        assert raw[4] == 1, "unchecked-hash: a lost mtime does not matter"
        assert f"{STAGE}{push.digest[:16]}".encode() not in raw
        assert os.fsencode(push.runtime) in raw


def test_install_again_reuses_and_does_not_write(installed: Push) -> None:
    """Presence and size of all files are enough; the interpreter that was pushed is not needed again."""
    before = {path: path.lstat().st_mtime_ns for path in installed.root.rglob("*")}
    again = replace(installed, promised={installed.interpreter.name: sha256(installed.interpreter)})
    installed.interpreter.unlink()
    assert again.install().state == "reused"
    assert {path: path.lstat().st_mtime_ns for path in installed.root.rglob("*")} == before


@pytest.mark.parametrize(
    ("damage", "flags"),
    [
        (lambda runtime: (runtime / "app/boxstrap/runner/wire.py").unlink(), ()),
        (lambda runtime: (runtime / "app/boxstrap/runner/wire.py").write_text("short"), ()),
        (lambda runtime: flip(runtime / "app/boxstrap/runner/wire.py"), ("--verify",)),
        (lambda runtime: (runtime / "python/bin/python3").unlink(), ()),
        (lambda runtime: (runtime / "python/bin/python3").write_text("#!/bin/sh\nexit 7\n"), ()),
        (lambda runtime: (runtime / "manifest.json").unlink(), ()),
        (lambda runtime: (runtime / "manifest.json").write_text("{"), ()),
        (lambda runtime: shutil.rmtree(runtime / "app"), ()),
    ],
    ids=["gone", "short", "flipped", "no-interpreter", "dead-interpreter", "no-manifest", "torn-manifest", "no-app"],
)
def test_install_repairs_a_damaged_runtime_as_a_whole(
    installed: Push, damage: Callable[[Path], object], flags: tuple[str, ...]
) -> None:
    """Whatever is wrong: a fresh tree under the same name, and nothing of the old one left."""
    inode = installed.runtime.stat().st_ino
    damage(installed.runtime)
    assert installed.install(*flags).state == "repaired"
    assert installed.runtime.stat().st_ino != inode
    assert manifest.verify(str(installed.runtime), digest=installed.digest, hashes=True)[0] == []
    assert {entry.name for entry in installed.root.iterdir()} == {installed.runtime.name, f"{LOCK}{installed.runtime.name}"}
    assert installed.install(*flags).state == "reused"


def flip(path: Path) -> None:
    """Changes one byte and no size."""
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)


def test_install_of_a_damaged_runtime_without_an_interpreter_says_so(installed: Push) -> None:
    """The controller then pushes; the damaged tree is not touched."""
    (installed.runtime / "app/boxstrap/runner/wire.py").unlink()
    words = installed.argv()
    at = words.index("--interpreter")
    done = subprocess.run([*words[:at], *words[at + 2 :]], capture_output=True, text=True, check=False, timeout=60)
    failure = _ANSWER.validate_json(done.stdout).failure
    assert done.returncode == 69
    assert failure is not None
    assert failure.code == "runtime-missing"
    assert installed.runtime.is_dir()


def test_install_of_eight_at_once_installs_once(push: Push) -> None:
    """A, B, … H begin together: one of them installs, the others wait for its lock and reuse."""
    running = [subprocess.Popen(push.argv(), stdout=subprocess.PIPE, text=True) for _ in range(8)]
    answers = [_ANSWER.validate_json(process.communicate(timeout=120)[0]) for process in running]
    states = sorted(answer.installed.state if answer.installed else str(answer.failure) for answer in answers)
    assert states == ["installed"] + ["reused"] * 7


def test_install_sweeps_stages_whose_owner_is_dead(push: Push) -> None:
    """Of any digest, unless somebody holds that digest's lock."""
    dead, alive, ours = (f"{STAGE}{digest}-1" for digest in ("0" * 16, "1" * 16, push.digest[:16]))
    for name in (dead, alive, ours):
        (push.root / name / "python").mkdir(parents=True)
    with (push.root / f"{LOCK}{'1' * 16}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        push.install()
    names = {entry.name for entry in push.root.iterdir()}
    assert alive in names
    assert not {dead, ours} & names


# Failing.


def truncate(path: Path) -> None:
    """Loses the second half."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [truncate, flip])
@pytest.mark.parametrize("which", ["archive", "interpreter", "payload"])
def test_install_refuses_a_corrupt_upload(
    push: Push, packed: Callable[..., Path], which: str, damage: Callable[[Path], None]
) -> None:
    """What arrived is not what was sent: upload-corrupt, before anything of it is used, and nothing left behind."""
    wanted = replace(push, payload=packed(("agent.py", os.urandom(5000), {})))
    path: Path = getattr(wanted, which)
    promised = {path.name: sha256(path)}
    damage(path)
    status, failure = replace(wanted, promised=promised).fail()
    assert (status, failure.code) == (73, "upload-corrupt")
    assert promised[path.name][:8] in failure.message or which == "archive"


def test_install_refuses_a_member_that_would_leave(push: Push, packed: Callable[..., Path]) -> None:
    """unsafe-member, although the sha256 is as promised."""
    status, failure = replace(push, payload=packed(("../../escaped", b"x", {}))).fail()
    assert (status, failure.code) == (73, "unsafe-member")
    assert "../../escaped" in failure.message


@pytest.mark.parametrize(
    ("smoke", "says"),
    [
        ("absent_module", "No module named 'absent_module'"),
        ("broken", "wrong"),
        ("bin/tool", "status 9"),
        ("killer", "status 137"),
    ],
)
def test_install_refuses_what_does_not_run(push: Push, packed: Callable[..., Path], smoke: str, says: str) -> None:
    """smoke-failed with the reason, before anything is published."""
    tool = ("bin/tool", b"#!/bin/sh\nexit 9\n", {"mode": 0o755})
    killer = b"import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    payload = packed(("broken.py", b"raise RuntimeError('wrong')\n", {}), ("killer.py", killer, {}), tool)
    status, failure = replace(push, payload=payload, smoke=(smoke,)).fail()
    assert (status, failure.code) == (73, "smoke-failed")
    assert says in failure.message


def test_install_refuses_an_interpreter_that_does_not_run(push: Push, tmp_path: Path) -> None:
    """One for another architecture, for example: the system's words are passed on."""
    wrong = pack(tmp_path / "python.tar.gz", [("bin/python3", b"\x7fELF" + bytes(60), {"mode": 0o755})])
    status, failure = replace(push, interpreter=wrong).fail()
    assert (status, failure.code) == (73, "smoke-failed")
    assert "does not run here" in failure.message


def test_install_refuses_when_glibc_is_too_old_for_the_interpreter(push: Push, tmp_path: Path) -> None:
    """What decides is the run; the message has both numbers, and the status is a refusal."""
    script = b'#!/bin/sh\necho "$0: libc.so.6: version \\`GLIBC_2.99\' not found (required by $0)" >&2\nexit 1\n'
    wrong = pack(tmp_path / "python.tar.gz", [("bin/python3", script, {"mode": 0o755})])
    status, failure = replace(push, interpreter=wrong).fail("--glibc-floor", "2.99")
    assert (status, failure.code) == (69, "libc-too-old")
    assert "needed 2.99" in failure.message
    assert f"found glibc {os.confstr('CS_GNU_LIBC_VERSION').split()[1]}" in failure.message  # type: ignore[union-attr]


def test_install_refuses_when_glibc_is_too_old_for_the_payload(push: Push, packed: Callable[..., Path]) -> None:
    """The loader's words reach us through an ImportError."""
    payload = packed(("agent.py", b'raise ImportError("libc.so.6: version `GLIBC_2.99\' not found")\n', {}))
    status, failure = replace(push, payload=payload, smoke=("agent",)).fail()
    assert (status, failure.code) == (69, "libc-too-old")
    assert "found glibc 2." in failure.message
    assert "GLIBC_2.99" in failure.message


def test_install_that_is_told_to_stop_puts_the_box_back(push: Push, packed: Callable[..., Path]) -> None:
    """TERM to the prelude alone, or to both: what is half done is undone, what is done is not called undone."""
    signal_prelude = (
        "import os, signal\nprelude = int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])\n"
    )
    for also, status in (("", 0), ("os.kill(os.getppid(), signal.SIGTERM)\n", 75)):
        code = f"{signal_prelude}{also}os.kill(prelude, signal.SIGTERM)\n"
        wanted = replace(push, payload=packed(("agent.py", code.encode(), {})), smoke=("agent",))
        assert wanted.run()[0] == status
        assert wanted.runtime.exists() == (status == 0)
        assert list(wanted.root.glob(f"{STAGE}*")) == []


def test_install_gives_up_waiting_for_a_lock(push: Push) -> None:
    """75 after --lock-wait, naming the living process that holds it; the lock stays."""
    push.root.mkdir(parents=True)
    path = push.root / f"{LOCK}{push.digest[:16]}"
    with path.open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out = push.run("--lock-wait", "1")
    failure = _ANSWER.validate_json(out).failure
    assert status == 75
    assert failure is not None
    assert failure.code == "lock-timeout"
    assert f"held by pid {os.getpid()} (" in failure.message, "not the number that a dead one left there"
    assert path.exists()


# The fault sweep.


class Reader:
    """Looks at a runtime over and over while it is installed, as a session that starts now would."""

    def __init__(self, push: Push) -> None:
        self._push = push
        self._over = threading.Event()
        self.away = threading.Lock()
        """Held while the runtime is removed, which nobody but a test does."""
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.looks = 0
        self.halves: list[str] = []

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.03):
            with self.away:
                if not (self._push.runtime / "manifest.json").exists():
                    continue
                self.looks += 1
                self.halves += manifest.verify(str(self._push.runtime), digest=self._push.digest, hashes=False)[0]


def steps_of(push: Push, record: Path) -> list[str]:
    """Install once, and return the steps that it took, in order: what there is to be swept is found, not listed."""
    status, out = push.run(env={FAULT: str(record)})
    assert status == 0, out
    steps = list(dict.fromkeys(record.read_text(encoding="ascii").split()))
    shutil.rmtree(push.root)
    return steps


def note(name: str, text: str) -> None:
    """Keep the numbers of a sweep beside the table of boxes."""
    folder = Path(__file__).resolve().parent.parent / "build"
    folder.mkdir(exist_ok=True)
    (folder / f"sweep-{name}.txt").write_text(f"{name}: {text}\n", encoding="utf-8")


def faults_of(steps: Sequence[str]) -> list[str]:
    """Every way to die: the prelude's steps once; at Python's steps both processes, the prelude alone, Python alone."""
    faults = []
    for step in steps:
        name, _, python = step.partition("@")
        faults += [name, f"{name}@prelude", f"{name}@python"] if python else [name]
    return faults


def test_install_killed_at_any_step_leaves_all_or_nothing(push: Push, packed: Callable[..., Path], tmp_path: Path) -> None:
    """-9 at every step that an installation takes, and once more: whole, never half to a reader, and no stage left over."""
    wanted = replace(push, payload=packed(("agent.py", b"", {}), ("other.py", b"", {})), smoke=("agent",))
    steps = steps_of(wanted, tmp_path / "steps")
    assert {"lock", "untar", "first-member@python", "rename@python", "published@python"} <= set(steps), "it was recorded"
    faults = faults_of(steps)
    with Reader(wanted) as reader:
        for fault in faults:
            status, out = wanted.run(env={FAULT: fault})
            assert status != 0, f"{fault} was reached"
            if fault.endswith("@python") and not wanted.runtime.exists():  # the prelude lived, and put the box back
                assert (status, list(wanted.ground.iterdir())) == (73, []), (fault, out)
                continue
            assert wanted.install("--lock-wait", "60").state in {"installed", "reused"}, fault
            assert manifest.verify(str(wanted.runtime), digest=wanted.digest, hashes=True)[0] == [], fault
            assert {entry.name for entry in wanted.root.iterdir()} == {
                wanted.runtime.name,
                f"{LOCK}{wanted.runtime.name}",
            }, fault
            with reader.away:
                shutil.rmtree(wanted.root.parent)
    assert reader.halves == []
    assert reader.looks > 0
    note("install", f"{len(steps)} steps, {len(faults)} kills, {reader.looks} looks of a reader")


def test_repair_killed_at_any_step_leaves_the_old_or_the_new(installed: Push, tmp_path: Path) -> None:
    """A damaged runtime stays as it was until a whole one takes its name; what was exchanged is swept by the next."""

    def damage() -> None:
        (installed.runtime / "app/boxstrap/runner/wire.py").unlink()

    damage()
    status, _ = installed.run(env={FAULT: str(tmp_path / "steps")})
    assert status == 0
    steps = list(dict.fromkeys((tmp_path / "steps").read_text(encoding="ascii").split()))
    faults = [fault for fault in faults_of(steps) if fault.partition("@")[0] in {"reuse", "publish", "published", "rename"}]
    for fault in faults:
        damage()
        status, out = installed.run(env={FAULT: fault})
        assert status != 0, (fault, out)
        assert installed.install("--lock-wait", "60").state in {"repaired", "reused"}, fault
        assert manifest.verify(str(installed.runtime), digest=installed.digest, hashes=True)[0] == [], fault
        assert {entry.name for entry in installed.root.iterdir()} == {
            installed.runtime.name,
            f"{LOCK}{installed.runtime.name}",
        }, fault
    note("repair", f"{len(steps)} steps, {len(faults)} kills")


# Unpacking.


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("/absolute", b"", {})], "absolute"),
        ([("a/../../b", b"", {})], "'..'"),
        ([("..", None, {"type": tarfile.DIRTYPE})], "'..'"),
        ([("link", None, {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})], "leads out"),
        ([("a/link", None, {"type": tarfile.SYMTYPE, "linkname": "../../out"})], "leads out"),
        ([("a/link", None, {"type": tarfile.SYMTYPE, "linkname": "b/../../../out"})], "leads out"),
        ([("d", None, {"type": tarfile.SYMTYPE, "linkname": "."}), ("d/file", b"", {})], "passes through"),
        ([("file", b"", {}), ("file/inside", b"", {})], "passes through"),
        ([("file", b"", {}), ("file", b"", {})], "there before"),
        ([("d/x", b"", {}), ("d", b"", {})], "there before"),
        ([("hard", None, {"type": tarfile.LNKTYPE, "linkname": "../out"})], "hard link"),
        ([("hard", None, {"type": tarfile.LNKTYPE, "linkname": "absent"})], "hard link"),
        ([("null", None, {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})], "neither"),
        ([("block", None, {"type": tarfile.BLKTYPE})], "neither"),
        ([("pipe", None, {"type": tarfile.FIFOTYPE})], "neither"),
        ([("", b"", {})], "no name"),
        ([(".", b"", {})], "no name"),
    ],
)
def test_unpack_refuses_what_could_leave(tmp_path: Path, members: list[Member], says: str) -> None:
    """A failure, not an exception; and nothing was written outside."""
    into = tmp_path / "tree" / "into"
    into.mkdir(parents=True)
    found = unpack.unpack(str(pack(tmp_path / "x.tar.gz", members)), str(into))
    assert isinstance(found, Failure)
    assert (found.code, says in found.message) == ("unsafe-member", True), found.message
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["into"]


def test_unpack_records_what_it_wrote(tmp_path: Path) -> None:
    """Modes are 755 or 644 whatever the archive says; links that stay inside are kept; long names and large files too."""
    into = tmp_path / "into"
    into.mkdir()
    long = "/".join(["long" * 10] * 8)
    large = os.urandom(3_000_000)
    members: list[Member] = [
        (f"{long}/file", large, {"mode": 0o600}),
        ("./bin/run", b"#!", {"mode": 0o4711}),
        ("bin/again", None, {"type": tarfile.LNKTYPE, "linkname": "bin/run"}),
        ("lib/deep/link", None, {"type": tarfile.SYMTYPE, "linkname": "../../bin/run"}),
        ("empty", None, {"type": tarfile.DIRTYPE, "mode": 0o700}),
    ]
    found = unpack.unpack(str(pack(tmp_path / "x.tar.gz", members)), str(into))
    assert isinstance(found, manifest.Record)
    assert found == manifest.record_tree(str(into))
    assert found.files[f"{long}/file"] == (len(large), hashlib.sha256(large).hexdigest(), 0o644)
    assert found.files["bin/run"][2] == found.files["bin/again"][2] == 0o755
    assert found.links == {"lib/deep/link": "../../bin/run"}
    assert (into / "empty").stat().st_mode & 0o777 == 0o755


def test_unpack_of_no_archive_is_a_corrupt_upload(tmp_path: Path) -> None:
    """A failure, not an exception."""
    (tmp_path / "x").write_bytes(b"no archive")
    found = unpack.unpack(str(tmp_path / "x"), str(tmp_path))
    assert isinstance(found, Failure)
    assert found.code == "upload-corrupt"


def test_record_tree_refuses_links_that_lead_out(tmp_path: Path) -> None:
    """The interpreter was unpacked by tar: this is where its links are looked at."""
    (tmp_path / "link").symlink_to("../outside")
    with pytest.raises(ValueError, match="leads out"):
        manifest.record_tree(str(tmp_path))


# Publishing without the kernel's help, and the parts.


def test_publish_without_exchange_uses_two_renames(tmp_path: Path) -> None:
    """What a file system without RENAME_EXCHANGE gets: the same end, with nothing of the old tree left."""
    stage, final = tmp_path / "stage", tmp_path / "final"
    for folder in (stage, final):
        folder.mkdir()
        (folder / "manifest.json").write_text(folder.name, encoding="utf-8")
    publish.replace(str(stage), str(final), exchange=lambda _one, _other: False)
    assert (final / "manifest.json").read_text(encoding="utf-8") == "stage"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    """By the system call: both names are there at every moment."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert publish.exchange(str(tmp_path / "one"), str(tmp_path / "other"))
    assert (tmp_path / "one" / "other").exists()
    assert not publish.exchange(str(tmp_path / "one"), str(tmp_path / "absent"))


def test_clock_reads_the_preludes_marks() -> None:
    """Uptime at the end of each phase; the same phase twice is added."""
    clock = Clock("start:0.10,check:0.25,lock:1.25,check:1.50")
    assert clock.seconds.pop("hand-over") > 0
    assert clock.seconds == {"check": 0.4, "lock": 1.0}
    with clock.phase("app"):
        pass
    assert clock.total()["total"] >= 1.4
    assert "app" in clock.total()


def test_preflight_finishes_the_preludes_report() -> None:
    """What was skipped is tried by a socket, and the judgement follows."""
    text = to_json(
        {
            "v": 1,
            "refused": False,
            "facts": {"os": "Linux"},
            "checks": [{"code": "url-unreachable", "status": "skip", "found": "", "needed": "", "remedy": ""}],
        }
    )
    report = preflight.finish(preflight.read_report(text), urls=["http://127.0.0.1:1/v1"])
    assert report.refused
    assert [(check.code, check.status) for check in report.checks] == [("url-unreachable", "fail")]
    assert "refused" in report.checks[0].found
    assert "needed: http://127.0.0.1:1/v1" in preflight.table(report)
    with pytest.raises(ValueError, match="not a report"):
        preflight.read_report('{"v": 1}')


# Cleaning.


@pytest.fixture
def session(push: Push) -> SessionPaths:
    """A session folder that has ended."""
    folder = push.ground / "tmp" / "sessions" / "one"
    folder.mkdir(parents=True)
    paths = SessionPaths(str(folder))
    Path(paths.request).write_text("{}", encoding="utf-8")
    Path(paths.receipt).write_text("{}", encoding="utf-8")
    return paths


def cleaned(push: Push) -> tuple[int, Answer]:
    """Runs the verb by the archive that was pushed."""
    words = ["--runtime-root", str(push.root), "--session-root", f"{push.ground}/tmp/sessions"]
    argv = ["sh", str(push.archive), "clean", "--json", "--agent", "test", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, _ANSWER.validate_json(done.stdout)


def test_clean_removes_all_that_is_ours_and_nothing_else(installed: Push, session: SessionPaths) -> None:
    """What it does not know stays, and so do the folders that hold it."""
    (installed.root / f"{STAGE}{'0' * 16}-1").mkdir()
    (installed.root / ("f" * 16)).mkdir()
    other = Path(session.path).with_name("unfinished")
    other.mkdir()
    status, answer = cleaned(installed)
    assert status == 0
    assert answer.data is not None
    assert len(answer.data["removed"]) == 4  # type: ignore[arg-type]
    assert [path.name for path in installed.root.iterdir()] == ["f" * 16]
    assert [path.name for path in other.parent.iterdir()] == ["unfinished"]


def test_clean_of_everything_removes_the_roots_and_then_has_nothing_to_do(installed: Push, session: SessionPaths) -> None:
    """Twice is fine."""
    assert cleaned(installed)[0] == 0
    assert not installed.root.exists()
    assert not Path(session.path).parent.exists()
    assert cleaned(installed) == (0, Answer(ok=True, data={"removed": []}))


@pytest.mark.parametrize("sent", ["request.json", "prewarm.json"])
def test_clean_leaves_alone_what_is_about_to_start_and_takes_what_was_abandoned(
    installed: Push, session: SessionPaths, sent: str
) -> None:
    """A folder with a request and no claim, and a controller's push: young ones are somebody's, old ones nobody's."""
    begun = Path(session.path).with_name("begun")
    begun.mkdir()
    (begun / sent).write_text("{}", encoding="utf-8")
    pushed = begun.with_name(f".push-{'0' * 16}")
    pushed.mkdir()
    status, answer = cleaned(installed)
    assert status == 75
    assert answer.failure is not None
    assert answer.failure.code == "session-conflict"
    for folder in (begun, pushed):
        os.utime(folder, (1_000_000_000, 1_000_000_000))
    status, answer = cleaned(installed)
    assert status == 0
    assert answer.data is not None
    assert {str(begun), str(pushed), session.path} <= set(answer.data["removed"])  # type: ignore[call-overload]
    assert not begun.parent.exists()


def test_clean_refuses_while_a_session_runs(installed: Push, session: SessionPaths) -> None:
    """Its supervisor, or the parent that judges it, is told by pid and start time; a reused pid does not count."""
    start = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    dead = {"pid": os.getpid(), "start": start + 1, "watchdog": None}
    for keeper in ({**dead, "start": start}, {**dead, "watchdog": [os.getpid(), start]}):
        Path(session.supervisor).write_text(json.dumps(keeper), encoding="utf-8")
        status, answer = cleaned(installed)
        assert status == 75
        assert answer.failure is not None
        assert answer.failure.code == "session-conflict"
        assert installed.runtime.exists()
    Path(session.supervisor).write_text(json.dumps(dead), encoding="utf-8")
    assert cleaned(installed)[0] == 0


def test_clean_refuses_while_an_installation_runs(tmp_path: Path) -> None:
    """Its lock is held; nothing is removed."""
    path = tmp_path / f"{LOCK}{'0' * 16}"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = clean.clean(str(tmp_path), str(tmp_path / "sessions"))
    assert isinstance(found, Failure)
    assert found.code == "lock-timeout"
    assert path.exists()


def test_install_runs_deferred_url_checks_in_python(push: Push, tmp_path: Path) -> None:
    """Without `timeout` the prelude cannot bound a connection: Python refuses before anything is published."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in (
        "bash",
        "tar",
        "gzip",
        "sha256sum",
        "flock",
        "tee",
        "mv",
        "mkdir",
        "rm",
        "rmdir",
        "chmod",
        "uname",
        "stat",
        "touch",
    ):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    status, out = push.run("--url", "http://127.0.0.1:1/", "--loopback-ok", env={"PATH": str(folder), "http_proxy": ""})
    answer = _ANSWER.validate_json(out)
    assert status == 69
    assert answer.report is not None
    assert [check.status for check in answer.report.checks if check.code == "url-unreachable"] == ["fail"]
    assert list(push.ground.iterdir()) == []


def test_install_ignores_the_tasks_python_variables(push: Push) -> None:
    """PYTHONHOME and LD_LIBRARY_PATH of the box would break any interpreter that listened."""
    status, out = push.run(env={"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", "LD_LIBRARY_PATH": "/nowhere"})
    assert status == 0, out
