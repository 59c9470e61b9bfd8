# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Fills the stage that the prelude began, proves it, and publishes it.

The prelude holds the lock, has checked the sha256 of every upload, and puts the box back when this ends badly. It refuses to
publish what was not run: the staged interpreter imports the agent first.
"""

from __future__ import annotations

import compileall
import errno
import os
import platform
import py_compile
import shutil
import subprocess
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from boxstrap.bootstrap import manifest
from boxstrap.bootstrap.manifest import Record
from boxstrap.bootstrap.publish import publish, sync_folder
from boxstrap.bootstrap.steps import Clock, step
from boxstrap.bootstrap.unpack import unpack
from boxstrap.runner.layout import RuntimePaths, StagePaths
from boxstrap.runner.wire import Code, Failure, Installed

SMOKE_WITHIN_S = 180.0
_SMOKE = "import importlib, sys; sys.path[:0] = sys.argv[1:3]\nfor name in sys.argv[3:]: importlib.import_module(name)"
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One installation: the stage with its interpreter in place, and what belongs beside it.

    `smoke` names modules to import; a name with a slash is a program of the payload that prints its version.
    """

    root: str
    digest: str
    pid: int
    archive: str
    archive_sha256: str
    arch: str
    interpreter_sha256: str
    payload: str | None = None
    payload_sha256: str | None = None
    smoke: tuple[str, ...] = ()

    @property
    def stage(self) -> StagePaths:
        """The prelude's own, which is named for its pid."""
        return StagePaths(self.root, self.digest, self.pid)


def install(plan: Plan, *, clock: Clock) -> Installed | Failure:
    """Fill, prove and publish the stage. A full disk is a failure like any other."""
    try:
        return _install(plan, clock)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return Failure(
            code=Code.NO_SPACE,
            message=f"found no space left in {plan.root} ({error.strerror}), needed is room for the runtime.",
            remedy="Free some space, or name another disk with --runtime-root.",
        )


def _install(plan: Plan, clock: Clock) -> Installed | Failure:
    stage = plan.stage
    record = Record()
    with clock.phase("payload"):
        os.mkdir(stage.site)
        if plan.payload:
            unpacked = unpack(plan.payload, stage.site)
            if isinstance(unpacked, Failure):
                return unpacked
            _merge(record, unpacked, "site/")
    with clock.phase("app"):
        _extract_app(plan.archive, stage.app)
        shutil.copyfile(plan.archive, stage.archive)
        record.files["boxstrap.pyz"] = (os.path.getsize(plan.archive), plan.archive_sha256, 0o644)
    with clock.phase("smoke"), ThreadPoolExecutor(max_workers=1) as pool:
        smoke = pool.submit(_smoke, plan)
        failure = _prove(plan, record, smoke)
        if failure:
            return failure
    with clock.phase("manifest"):
        about: dict[str, object] = {
            "digest": plan.digest,
            "arch": plan.arch,
            "interpreter": platform.python_version(),
            "interpreter_sha256": plan.interpreter_sha256,
            "payload_sha256": plan.payload_sha256,
            "archive_sha256": plan.archive_sha256,
            "seconds": clock.seconds,
        }
        manifest.write(stage.manifest, record, about)
        step("manifest-written")
        sync_folder(stage.path)
    final = RuntimePaths(plan.root, plan.digest)
    with clock.phase("rename"):
        state = publish(stage.path, final.path)
    return Installed(
        v=1,
        state=state,
        path=final.path,
        digest=plan.digest,
        files=len(record.files),
        bytes=record.bytes,
        seconds=clock.total(),
    )


def _prove(plan: Plan, record: Record, smoke: Future[Failure | None]) -> Failure | None:
    """Hash the interpreter and compile our code while the smoke run has the other core."""
    stage = plan.stage
    step("prove")
    try:
        _merge(record, manifest.record_tree(f"{stage.path}/python"), "python/")
    except ValueError as error:
        return Failure(
            code=Code.UNSAFE_MEMBER,
            message=f"found that in the interpreter {error}, needed are members that stay inside.",
            remedy="Pack the interpreter again; do not use this one.",
        )
    step("compile")
    compileall.compile_dir(
        stage.app,
        quiet=2,
        stripdir=stage.path,
        prependdir=RuntimePaths(plan.root, plan.digest).path,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    _merge(record, manifest.record_tree(stage.app), "app/")
    return smoke.result()


def _smoke(plan: Plan) -> Failure | None:
    """Import the modules in a fresh process, as a run will; start the programs."""
    stage = plan.stage
    modules = [name for name in plan.smoke if "/" not in name]
    runs = [[stage.python, "-I", "-B", "-X", "utf8", "-c", _SMOKE, stage.site, stage.app, *modules, "boxstrap.runner.verbs"]]
    runs += [[f"{stage.site}/{name}", "--version"] for name in plan.smoke if "/" in name]
    home = f"{stage.path}/smoke"
    os.mkdir(home, mode=0o700)
    try:
        for argv in runs:
            found = _run(argv, home)
            if found:
                what = (
                    "the packages do not import" if argv[0] == stage.python else f"{os.path.basename(argv[0])} does not start"
                )
                return _smoke_failure(f"{what} here: {found}", plan.arch)
    finally:
        shutil.rmtree(home)
    return None


def _smoke_failure(found: str, arch: str) -> Failure:
    if "GLIBC_" in found:
        return Failure(
            code=Code.LIBC_TOO_OLD,
            message=f"found {os.confstr('CS_GNU_LIBC_VERSION')}, needed a newer one: {found}.",
            remedy="Use an image with a newer glibc, or a payload built against an older one.",
        )
    return Failure(
        code=Code.SMOKE_FAILED,
        message=f"found that {found}, needed is a payload that runs before it is published.",
        remedy=f"Build the payload for {arch} and this interpreter again.",
    )


def _run(argv: list[str], home: str) -> str:
    """Run with a bound, away from the task's folder and HOME, and return what was wrong (nothing: it went well)."""
    try:
        done = subprocess.run(
            argv,
            cwd=home,
            env={**{name: value for name, value in os.environ.items() if not name.startswith("XDG_")}, "HOME": home},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SMOKE_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SMOKE_WITHIN_S:.0f} seconds"
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return ""
    said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return f"{said[-1] if said else 'it said nothing'} (exit status {done.returncode})"


def _extract_app(archive: str, into: str) -> None:
    """Unpack site-packages of the archive, whose sha256 the runtime's digest holds."""
    prefix = "site-packages/"
    with zipfile.ZipFile(archive) as source:
        for name in source.namelist():
            if not name.startswith(prefix) or name.endswith("/"):
                continue
            path = f"{into}/{name[len(prefix) :]}"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as sink:
                sink.write(source.read(name))


def _merge(record: Record, other: Record, prefix: str) -> None:
    record.files.update({f"{prefix}{name}": entry for name, entry in other.files.items()})
    record.links.update({f"{prefix}{name}": target for name, target in other.links.items()})
