#!/bin/sh
# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
#
# from-packages.sh CODENAME OUT.tar [ARCHITECTURE]: a Debian root file system like debian:*-slim, from the mirror that this
# machine's apt uses. For another architecture the essential packages, and a Python for the tests to pack, are
# unpacked only: configuring takes minutes under emulation.
# The mirror is asked of apt at run time and written down nowhere but in the image's own sources.list, as apt there needs it.

set -eu
codename=$1
out=$2
case ${3-} in
    '') set -- --variant=minbase ;;
    *) set -- "--architectures=$3" --variant=extract '--include=?essential' --include=python3.11 ;;
esac

die() { printf '%s\n' "from-packages.sh: $*" >&2; exit 1; }

command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap"
[ "$(id -u)" -eq 0 ] || die "mmdebstrap runs as root here: run as root, or where an image registry answers"
# One machine may know several suites of one mirror; any suite's line names it.
# shellcheck disable=SC2016 # the dollars are apt's
mirror=$(apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian Debian //p' | head -n 1)
[ -n "$mirror" ] || die "this machine's apt knows no Debian mirror (run apt-get update?): $codename cannot be made here"

[ -w /dev/shm ] && export TMPDIR=/dev/shm # unpacking on tmpfs halves the time

# The hook merges /usr where the suite wants it; without it bookworm pulls usrmerge and all of perl.
# shellcheck disable=SC2016 # the dollar is the hook's
exec mmdebstrap --quiet "$@" \
    --hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr \
    --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --customize-hook='rm -f "$1/etc/hostname" "$1/etc/resolv.conf"' \
    "$codename" "$out" "deb $mirror $codename main"
