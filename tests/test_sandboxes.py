# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What every sandbox adapter must do, held against each of them: one suite, three adapters, real children.

What only one adapter promises is in test_docker_sandbox.py, test_local_sandbox.py and test_gym_sandbox.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tuple_provider import TupleProvider

from boxstrap.controller.errors import EvidenceError
from boxstrap.controller.sandbox import ExecResult, Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.gym import GymSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.sandboxes.output import OUTPUT_MAX

MIB = 1024 * 1024


@dataclass(frozen=True)
class Place:
    """A sandbox, and a folder in it that the test may write to."""

    sandbox: Sandbox
    root: str
    codes: tuple[int, ...]
    """The exit codes to try: all of them where an exec is cheap."""

    async def exec(self, command: str, **options: object) -> ExecResult:
        """Run a command in it."""
        return await self.sandbox.exec(command, **options)  # type: ignore[arg-type]


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.container), "local", "gym"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each adapter in turn; the Gym one over a provider that answers with bare tuples."""
    if request.param == "docker":
        box = request.getfixturevalue("container")("debian:12", network="none")
        return Place(DockerSandbox(box.name), "/var/place", (*range(4), 63, 64, *range(124, 131), 137, 143, 254, 255))
    local = LocalSandbox(tmp_path / "box")
    sandbox = local if request.param == "local" else GymSandbox(TupleProvider(local))
    return Place(sandbox, str(tmp_path / "box" / "place"), tuple(range(256)))


async def until(place: Place, command: str, *, within_s: float = 10) -> None:
    """Wait until a command in the sandbox exits 0."""
    deadline = time.monotonic() + within_s
    while (await place.exec(command)).return_code != 0:
        assert time.monotonic() < deadline, f"not true within {within_s} s: {command}"


async def test_sandbox_has_the_protocols_shape(place: Place) -> None:
    """Each adapter is a Sandbox, and says for a person what it is."""
    assert isinstance(place.sandbox, Sandbox)
    assert place.sandbox.describe()  # type: ignore[attr-defined]
    assert isinstance(place.sandbox.shares_host_network, bool)  # type: ignore[attr-defined]


async def test_exec_gives_every_exit_code_as_it_is(place: Place) -> None:
    """The command's own status comes back; 125 to 137 of a living sandbox are nothing special."""
    some = asyncio.Semaphore(8)

    async def one(code: int) -> tuple[int, str | None]:
        async with some:
            result = await place.exec(f"exit {code}")
            return result.return_code, result.error_type

    assert await asyncio.gather(*map(one, place.codes)) == [(code, None) for code in place.codes]


async def test_exec_gives_a_signal_as_128_and_its_number(place: Place) -> None:
    """A shell that is killed ends as a shell would report it."""
    result = await place.exec("kill -KILL $$")
    assert (result.return_code, result.error_type) == (137, None)


async def test_exec_keeps_stdout_and_stderr_apart(place: Place) -> None:
    result = await place.exec("echo out; echo err >&2; echo out again")
    assert (result.stdout, result.stderr) == ("out\nout again\n", "err\n")


async def test_exec_replaces_what_is_not_utf8(place: Place) -> None:
    result = await place.exec(r"printf 'a\377b\303\244'")
    assert result.stdout == "a\N{REPLACEMENT CHARACTER}bä"


async def test_exec_loses_nothing_of_many_small_writes(place: Place) -> None:
    """Frames and chunks are put together in order, wherever the transport cut them."""
    result = await place.exec("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done")
    assert result.stdout == "".join(f"line {i}\n" for i in range(20000))


async def test_exec_bounds_output_and_says_so(place: Place) -> None:
    """20 MB on each stream: the first 16 MiB are kept, the cut is named, the command runs to its end."""
    fill = f"head -c {20 * MIB} /dev/zero | tr '\\0' a"
    result = await place.exec(f"{fill}; {fill} >&2; exit 3")
    assert result.return_code == 3
    for text in (result.stdout, result.stderr):
        assert text is not None
        assert text.startswith("a" * OUTPUT_MAX)
        assert text[OUTPUT_MAX:].startswith(f"\n[boxstrap: truncated at {OUTPUT_MAX} of ")


async def test_exec_runs_in_cwd(place: Place) -> None:
    result = await place.exec("pwd", cwd="/usr")
    assert result.stdout == "/usr\n"


async def test_exec_in_a_folder_that_is_missing_is_a_result(place: Place) -> None:
    """Nothing is raised for what the sandbox says no to."""
    result = await place.exec("echo ran", cwd="/no/such/folder")
    assert result.return_code != 0
    assert "ran" not in (result.stdout or "").splitlines()


async def test_exec_environment_is_the_sandboxes_and_what_was_given(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the host's environment leaks in; values keep their newlines and quotes."""
    monkeypatch.setenv("BOXSTRAP_CANARY", "leaked")
    result = await place.exec("env")
    assert "CANARY" not in (result.stdout or "")
    assert "PATH=" in (result.stdout or "")
    value = "two\nlines 'and' \"quotes\" $HOME"
    assert (await place.exec('printf %s "$GIVEN"', env={"GIVEN": value})).stdout == value


async def test_exec_hands_the_command_over_unchanged(place: Place) -> None:
    """Quotes, newlines, a here-document and non-ASCII text reach the shell as they are."""
    result = await place.exec("cat <<'END'\n$HOME `id` \"'\\ ä 猫\nEND\nprintf '%s|' 'a b' \"c'd\"")
    assert result.stdout == "$HOME `id` \"'\\ ä 猫\na b|c'd|"


async def test_exec_has_nothing_on_stdin(place: Place) -> None:
    """A tool that reads its input gets its end at once."""
    result = await place.exec("cat; echo ended", timeout_s=10)
    assert (result.stdout, result.return_code) == ("ended\n", 0)


async def test_exec_that_times_out_is_125_and_is_killed(place: Place) -> None:
    """The answer comes soon after the bound, with what was printed so far, and the command is gone."""
    begun = time.monotonic()
    result = await place.exec(f"mkdir -p {place.root}; echo $$ >{place.root}/pid; echo begun; sleep 60; echo late", timeout_s=1)
    took = time.monotonic() - begun
    assert (result.return_code, result.error_type) == (125, "timeout")
    assert (result.stdout or "") == "begun\n"
    assert "1 s" in (result.stderr or "")
    assert 1 <= took < 6
    await until(place, f"! kill -0 $(cat {place.root}/pid) 2>/dev/null")


async def test_exec_waits_for_the_command_and_not_for_its_background_child(place: Place) -> None:
    """A child that holds stdout open costs a moment, never its own lifetime."""
    begun = time.monotonic()
    result = await place.exec("sleep 60 & echo done; exit 4")
    assert (result.stdout, result.return_code) == ("done\n", 4)
    assert time.monotonic() - begun < 10


async def test_exec_that_closed_its_output_is_still_waited_for(place: Place) -> None:
    """End of file is not the end of the process."""
    result = await place.exec("exec >&- 2>&-; sleep 1; exit 6")
    assert result.return_code == 6


async def test_thirty_execs_at_once_do_not_mix(place: Place) -> None:
    results = await asyncio.gather(*(place.exec(f"echo {n}; echo e{n} >&2; exit {n}") for n in range(30)))
    assert [(r.stdout, r.stderr, r.return_code) for r in results] == [(f"{n}\n", f"e{n}\n", n) for n in range(30)]


async def test_a_cancelled_exec_ends_at_once_and_takes_its_command_along(place: Place) -> None:
    """Cancelling leaves no command behind, and the sandbox goes on."""
    command = f"mkdir -p {place.root}; echo $$ >{place.root}/pid; sleep 60; true"
    task = asyncio.create_task(place.sandbox.exec(command))
    await until(place, f"[ -s {place.root}/pid ]")
    task.cancel()
    begun = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 3
    await until(place, f"! kill -0 $(cat {place.root}/pid) 2>/dev/null")


async def test_execs_leave_no_descriptors_behind(place: Place) -> None:
    """What ends, times out or is cancelled gives its connection back."""

    def open_now() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async def some() -> None:
        await asyncio.gather(*(place.exec("echo x") for _ in range(8)))
        await place.exec("sleep 30", timeout_s=0.2)
        task = asyncio.create_task(place.sandbox.exec("sleep 30"))
        await place.exec("true")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await some()
    before = open_now()
    await some()
    await some()
    assert open_now() <= before + 4  # kept-alive connections come and go


@pytest.mark.parametrize("size", [0, 1, 20 * MIB + 7])
async def test_a_file_makes_the_round_trip_into_a_new_folder(place: Place, tmp_path: Path, size: int) -> None:
    """The same bytes come back; the folders were made; the exec's user can read it, mode 0644."""
    there = f"{place.root}/new/deep folder/it's"
    (tmp_path / "sent").write_bytes(os.urandom(size))
    await place.sandbox.upload(tmp_path / "sent", there)
    seen = await place.exec('stat -c "%s %a" "$WHERE" && cat "$WHERE" >/dev/null', env={"WHERE": there})
    assert (seen.stdout, seen.return_code) == (f"{size} 644\n", 0)
    await place.sandbox.download(there, tmp_path / "came" / "back")
    sent, came = ((tmp_path / name).read_bytes() for name in ("sent", "came/back"))
    assert hashlib.sha256(came).hexdigest() == hashlib.sha256(sent).hexdigest()
    assert [entry.name for entry in (tmp_path / "came").iterdir()] == ["back"]


async def test_upload_replaces_what_was_there(place: Place, tmp_path: Path) -> None:
    there = f"{place.root}/file"
    for text in ("a long first text", "short"):
        (tmp_path / "sent").write_text(text)
        await place.sandbox.upload(tmp_path / "sent", there)
    assert (await place.exec(f"cat {there}")).stdout == "short"


async def test_upload_of_a_missing_host_file_says_so(place: Place, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await place.sandbox.upload(tmp_path / "nothing", f"{place.root}/file")


async def test_download_of_a_missing_file_says_so(place: Place, tmp_path: Path) -> None:
    """FileNotFoundError, and nothing is left on the host."""
    with pytest.raises(FileNotFoundError):
        await place.sandbox.download(f"{place.root}/nothing", tmp_path / "got")
    assert not (tmp_path / "got").exists()


async def test_download_stops_at_its_cap(place: Place, tmp_path: Path) -> None:
    """A sandbox cannot fill the host's disk; what came is removed."""
    made = await place.exec(f"mkdir -p {place.root} && head -c {MIB} /dev/zero >{place.root}/big")
    assert made.return_code == 0
    with pytest.raises(EvidenceError, match="1000"):
        await place.sandbox.download(f"{place.root}/big", tmp_path / "out" / "got", max_bytes=1000)  # type: ignore[call-arg]
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


async def test_download_takes_only_regular_files(place: Place, tmp_path: Path) -> None:
    """A folder, a device and a fifo are refused, and none of them makes it wait."""
    await place.exec(f"mkdir -p {place.root} && mkfifo {place.root}/fifo")
    for what in ("/dev/zero", place.root, f"{place.root}/fifo"):
        with pytest.raises(OSError, match=r"regular file|directory"):
            await asyncio.wait_for(place.sandbox.download(what, tmp_path / "got"), 20)
    assert not (tmp_path / "got").exists()
