#!/bin/sh
# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
#
# Makes sure that this machine runs aarch64 programs, in containers as well: `sh emulation.sh`. As root on a Debian kind of
# machine it installs qemu and registers it with the kernel; elsewhere it says what is missing. On aarch64 it does nothing.

set -u
REGISTERED=/proc/sys/fs/binfmt_misc/qemu-aarch64

main() {
    [ "$(uname -m)" != aarch64 ] || return 0
    registered && return 0
    [ "$(id -u)" -eq 0 ] || die "qemu for aarch64 is not registered with the kernel, and only root may do it"
    if ! command -v update-binfmts >/dev/null || ! command -v qemu-aarch64-static >/dev/null; then
        command -v apt-get >/dev/null || die "qemu for aarch64 is missing, and there is no apt-get to install it with"
        install || { apt-get -qq update && install; } || die "apt-get could not install qemu-user-static"
    fi
    [ -e /proc/sys/fs/binfmt_misc/register ] || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc ||
        die "this kernel offers no binfmt_misc"
    registered || update-binfmts --enable qemu-aarch64
    registered || die "qemu for aarch64 could not be registered so that containers see it"
}

install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends \
        qemu-user-static binfmt-support arch-test >&2
}

# The flag F keeps the interpreter open: containers have no file of that name.
registered() { grep -q '^enabled' "$REGISTERED" 2>/dev/null && grep -q '^flags: .*F' "$REGISTERED"; }

die() {
    printf '%s\n' "emulation.sh: $*" >&2
    exit 1
}

main "$@"
