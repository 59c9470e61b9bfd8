# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Two environments: the task's own, and the agent's, which is the task's with HOME and XDG moved away (DESIGN 7).

It refuses to invent: what the task set stays as the task set it, and nothing of the host is in it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, MutableMapping

from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Request

SAVED = "BOXSTRAP_TASK_"
"""prelude.sh moves each LD_* variable to this prefix, so that the loader of our interpreter does not obey it."""
MARKER = "BOXSTRAP_SESSION"
"""In the environment of every process of a session: how a stray one is recognised."""
SESSION_DIR = "BOXSTRAP_SESSION_DIR"
EVENTS_FD = "BOXSTRAP_EVENTS_FD"
WAITS = "BOXSTRAP_WAITS"
"""Set for a driver that is started before its request is known: see agents/driver.py."""
GO = b"\n"
"""What such a driver reads from its standard input when the request is there."""
MODEL_URL = "BOXSTRAP_MODEL_URL"
"""Where an agent finds the gateway: the model's URL, with loopback in place of its host."""
ACTIVATION_BOUND_S = 60.0
SAVED_MAX = 16 * 1024 * 1024
"""Bytes of a saved environment that are read: the agent may have written the file."""
# Profiles are written for neither -e nor -u, which a box may export in SHELLOPTS; what they print is no variable.
_CAPTURE = "set +eu\nexec 3>&1 >&2\n{}\nexec env -0 >&3 3>&-"

TOOLCHAINS = {
    "CARGO_HOME": ".cargo",
    "RUSTUP_HOME": ".rustup",
    "NVM_DIR": ".nvm",
    "PYENV_ROOT": ".pyenv",
    "RBENV_ROOT": ".rbenv",
    "SDKMAN_DIR": ".sdkman",
    "GRADLE_USER_HOME": ".gradle",
    "GOPATH": "go",
    "GOCACHE": ".cache/go-build",
    "GOENV": ".config/go/env",
    "VOLTA_HOME": ".volta",
    "BUN_INSTALL": ".bun",
    "DENO_DIR": ".cache/deno",
    "OPAMROOT": ".opam",
    "PYTHONUSERBASE": ".local",
    "WORKON_HOME": ".local/share/virtualenvs",
    "POETRY_CACHE_DIR": ".cache/pypoetry",
    "UV_CACHE_DIR": ".cache/uv",
    "UV_PYTHON_INSTALL_DIR": ".local/share/uv/python",
    "PIP_CACHE_DIR": ".cache/pip",
    "NPM_CONFIG_USERCONFIG": ".npmrc",
    "NPM_CONFIG_CACHE": ".npm",
    "PNPM_HOME": ".local/share/pnpm",
    "YARN_CACHE_FOLDER": ".cache/yarn",
    "PLAYWRIGHT_BROWSERS_PATH": ".cache/ms-playwright",
    "GOENV_ROOT": ".goenv",
    "NODENV_ROOT": ".nodenv",
    "ASDF_DATA_DIR": ".asdf",
    "MISE_DATA_DIR": ".local/share/mise",
    "BUNDLE_USER_HOME": ".bundle",
    "COMPOSER_HOME": ".composer",
    "NUGET_PACKAGES": ".nuget/packages",
    "JULIA_DEPOT_PATH": ".julia",
    "STACK_ROOT": ".stack",
    "CABAL_DIR": ".cabal",
    "MIX_HOME": ".mix",
    "HEX_HOME": ".hex",
    "PUB_CACHE": ".pub-cache",
    "COURSIER_CACHE": ".cache/coursier",
    "HF_HOME": ".cache/huggingface",
    "TORCH_HOME": ".cache/torch",
    "NLTK_DATA": "nltk_data",
}
"""Toolchains and their stores that live in the real HOME, by the variable that pins each to its old place."""
LINKED = {
    **{name: name for name in (".m2", ".ivy2", ".sbt", ".lein", ".condarc", ".conda", ".gem", ".gemrc", ".Rprofile", ".jenv")},
    ".local/share/gem": ".data/gem",
    ".config/pip": ".config/pip",
    ".pip": ".pip",
    ".config/uv": ".config/uv",
    ".config/composer": ".config/composer",
    ".config/matplotlib": ".config/matplotlib",
}
"""The same for what has no variable of its own: a link in the session's HOME, below the XDG folders there are there."""


def initial() -> dict[str, str]:
    """Return the environment that this process was started with.

    os.environ is not it: CPython adds LC_CTYPE to its own environment where the locale is C (PEP 538, also under -I).
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            raw = file.read()
    except OSError:
        return dict(os.environ)
    return _parsed(raw)


def restore_task_variables(environ: MutableMapping[str, str]) -> None:
    """Undo for the next process what was done for ours: LD_* comes back, an LC_CTYPE of CPython's making goes."""
    if "LC_CTYPE" not in initial():
        environ.pop("LC_CTYPE", None)
    for name in [name for name in environ if name.startswith(SAVED)]:
        environ[name.removeprefix(SAVED)] = environ.pop(name)


def hide_loader_variables(environ: MutableMapping[str, str]) -> None:
    """Move the LD_* variables away, for the exec of our own interpreter."""
    for name in [name for name in environ if name.startswith("LD_")]:
        environ[SAVED + name] = environ.pop(name)


def task_environment(environ: Mapping[str, str], activation: str = "") -> dict[str, str]:
    """Return what the container gives every exec, after the optional activation snippet ran once in bash.

    Raises:
        ValueError: the snippet failed, or did not end within its bound.
    """
    task = dict(environ)
    restore_task_variables(task)
    for name in [name for name in task if name.startswith("BOXSTRAP_")]:
        del task[name]
    if not activation:
        return task
    try:
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-c", _CAPTURE.format(activation)],
            env=task,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ACTIVATION_BOUND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"the activation snippet did not end well: {error}") from error
    if done.returncode != 0:
        raise ValueError(f"the activation snippet exited {done.returncode}: {done.stderr[-400:].decode(errors='replace')}")
    return {
        name: value
        for name, value in _parsed(done.stdout).items()
        if name not in {"_", "SHLVL", "PWD", "OLDPWD"} or name in task
    }


def agent_environment(task: Mapping[str, str], request: Request, session: SessionPaths) -> dict[str, str]:
    """Return the agent's environment: the task's, with HOME and XDG in the session folder and git trusting the workdir."""
    real_home = task.get("HOME") or "/"
    env = dict(task)
    for variable, folder in TOOLCHAINS.items():
        old = os.path.join(real_home, folder)
        if variable not in env and os.path.exists(old):
            env[variable] = old
    env["HOME"] = session.home
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        env[f"XDG_{kind}_HOME"] = f"{session.home}/.{kind.lower()}"
    if "PWD" in env:  # the exec's own folder; some programs believe it rather than getcwd
        env["PWD"] = request.workdir
    env["XDG_RUNTIME_DIR"] = f"{session.home}/.runtime"
    count = int(env["GIT_CONFIG_COUNT"]) if env.get("GIT_CONFIG_COUNT", "").isdigit() else 0
    for offset, folder in enumerate(_workdir_names(request.workdir)):
        env[f"GIT_CONFIG_KEY_{count + offset}"] = "safe.directory"
        env[f"GIT_CONFIG_VALUE_{count + offset}"] = folder
        env["GIT_CONFIG_COUNT"] = str(count + offset + 1)
    env.update(request.env)
    env[MARKER] = request.session_id
    return env


def save(session: SessionPaths, env: Mapping[str, str]) -> None:
    """Keep the agent's environment for the verbs `env` and `shell`, as the kernel keeps one: entries that end in NUL.

    Raises:
        OSError: the session's folder cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(session.agent_env, flags, 0o600), "wb") as file:
        file.write(b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items()))


def saved(session: SessionPaths) -> dict[str, str] | None:
    """Return the environment that the agent was started with, or None when it was not started yet."""
    try:
        with open(os.open(session.agent_env, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return _parsed(file.read(SAVED_MAX))
    except OSError:
        return None


def _parsed(raw: bytes) -> dict[str, str]:
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def prepare_home(task: Mapping[str, str], request: Request, session: SessionPaths) -> None:
    """Make the session's HOME: private folders, a .gitconfig that includes the real one, links to toolchains."""
    for folder in ("", ".config", ".data", ".state", ".cache", ".runtime"):
        os.makedirs(os.path.join(session.home, folder), mode=0o700, exist_ok=True)
    os.makedirs(session.tmp, mode=0o700, exist_ok=True)
    real_home = task.get("HOME") or "/"
    lines = [f"[include]\n\tpath = {_git_quoted(os.path.join(real_home, '.gitconfig'))}\n"]
    lines += [f"[safe]\n\tdirectory = {_git_quoted(folder)}\n" for folder in _workdir_names(request.workdir)]
    with open(os.path.join(session.home, ".gitconfig"), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(lines)
    for name, link in LINKED.items():
        old, new = os.path.join(real_home, name), os.path.join(session.home, link)
        if os.path.exists(old) and not os.path.lexists(new):
            os.symlink(old, new)


def _workdir_names(workdir: str) -> list[str]:
    real = os.path.realpath(workdir)
    return [workdir] if real == workdir else [workdir, real]


def _git_quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
