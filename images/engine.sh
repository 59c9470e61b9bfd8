#!/bin/sh
# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
#
# Makes sure that a Docker engine answers: `sh images/engine.sh`.
# One that answers already is left alone (DOCKER_HOST is honoured). Otherwise, as root on a Debian kind of machine, docker.io is
# installed where dockerd is missing and dockerd is started, detached, with its log in a file. It never stops or restarts one.

set -u

SOCKET=/run/docker.sock
LOG=${BOXSTRAP_ENGINE_LOG:-/var/log/dockerd.log}
LOCK=${BOXSTRAP_ENGINE_LOCK:-/run/boxstrap-engine.lock}
START_WITHIN_S=60   # about 1 s on an idle machine
LOCK_WITHIN_S=300   # somebody else may be installing

main() {
    answers && return 0
    [ -z "${DOCKER_HOST:-}" ] || die "DOCKER_HOST is set to $DOCKER_HOST and no engine answers there: start that one, or unset DOCKER_HOST"
    [ "$(id -u)" -eq 0 ] || die "no Docker engine answers and only root may start one: start it, or run this script as root"
    need_cmd flock
    # The lock goes with this process; dockerd must not inherit it, hence 9>&- at its start.
    exec 9>"$LOCK" || die "cannot write the lock file $LOCK: name another with BOXSTRAP_ENGINE_LOCK"
    flock -w "$LOCK_WITHIN_S" 9 || die "another start of the engine has held $LOCK for $LOCK_WITHIN_S s: look at that process"
    answers && return 0
    check_cmd dockerd || install_docker
    answers && return 0 # the package may have started its service
    drop_stale_pid /run/docker.pid dockerd
    drop_stale_pid /run/docker/containerd/containerd.pid containerd
    start_engine
    say "engine up, log in $LOG"
}

answers() {
    if check_cmd docker; then
        timeout 20 docker version --format '{{.Server.Version}}' >/dev/null 2>&1
    else # an engine may be lent by its socket alone
        [ -z "${DOCKER_HOST:-}" ] && check_cmd curl && curl -sf -m 20 -o /dev/null --unix-socket "$SOCKET" http://localhost/_ping
    fi
}

install_docker() {
    check_cmd apt-get || die "dockerd is missing and there is no apt-get to install it with: install a Docker engine"
    say "installing docker.io"
    apt_install docker.io || die "apt-get could not install docker.io (its last words are above): install a Docker engine"
    check_cmd docker || apt_install docker-cli || die "docker.io came without the docker command: install docker-cli" # Debian 13 split it
}

apt_install() {
    # An index that was never fetched, or is too old, shows as a failed install; only then is it refreshed.
    apt_get install "$1" || { apt_get update && apt_get install "$1"; }
}

apt_get() {
    verb=$1
    shift
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$verb" ${1:+-y --no-install-recommends "$@"} >&2 9>&-
}

# /run may be on disk, and after a boot the number in a pid file may belong to anybody: dockerd would refuse to start.
drop_stale_pid() {
    [ -f "$1" ] || return 0
    case "$(readlink "/proc/$(cat "$1")/exe" 2>/dev/null)" in
        */"$2" | */"$2 (deleted)") ;;
        *) rm -f "$1" ;;
    esac
}

start_engine() {
    setsid dockerd -H "unix://$SOCKET" >"$LOG" 2>&1 </dev/null 9>&- &
    engine=$!
    tries=$((START_WITHIN_S * 5))
    until answers; do
        kill -0 "$engine" 2>/dev/null || die "dockerd ended at once; its last words: $(tail -n 2 "$LOG" | tr "\n" " ")"
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || die "dockerd runs (pid $engine) and does not answer within $START_WITHIN_S s: see $LOG"
        sleep 0.2
    done
}

say() { printf '%s\n' "engine.sh: $*" >&2; }
die() { say "$*"; exit 1; }
check_cmd() { command -v "$1" >/dev/null 2>&1; }
need_cmd() { check_cmd "$1" || die "this script needs $1, which is not here: install it"; }

main "$@"
