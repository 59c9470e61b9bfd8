# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Puts a finished stage under its final name: a reader sees all of it or none of it.

It refuses to change a published tree in place: a damaged one is exchanged as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable

from boxstrap.bootstrap.steps import step

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}
"""The system call's numbers, from the kernel's tables: glibc has a wrapper only since 2.28."""


def publish(stage: str, final: str) -> str:
    """Rename the stage to its final name and see it on disk; the caller holds the lock.

    Afterwards the stage's name is gone, or holds the damaged tree that was exchanged.

    Returns:
        installed or repaired.

    Raises:
        OSError: the file system says no.
    """
    state = "installed"
    step("publish")
    try:
        os.rename(stage, final)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        replace(stage, final)
        state = "repaired"
    step("published")
    sync_folder(os.path.dirname(final))
    return state


def sync_folder(path: str) -> None:
    """Have the kernel write a folder's names to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exchange(one: str, other: str) -> bool:
    """Swap two names at once with renameat2(2); false where the kernel or the file system cannot."""
    number = _RENAMEAT2.get(os.uname().machine)
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    names = (ctypes.c_char_p(os.fsencode(one)), ctypes.c_char_p(os.fsencode(other)))
    arguments = (ctypes.c_long(number), _AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(libc.syscall(*arguments) == 0)


def replace(stage: str, final: str, *, exchange: Callable[[str, str], bool] = exchange) -> None:
    """Put the stage in place of a damaged tree, by the best way that the file system knows."""
    if exchange(stage, final):
        return
    aside = f"{stage}-old"
    try:
        # No exchange here: between these two renames a reader finds nothing, and never a half.
        os.rename(final, aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A folder from an image's lower layer cannot be renamed at all. Without its manifest it is not published.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{final}/manifest.json")
        shutil.rmtree(final)
    step("replace")
    os.rename(stage, final)
    shutil.rmtree(aside, ignore_errors=True)
