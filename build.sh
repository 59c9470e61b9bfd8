#!/usr/bin/env bash
# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
#
# Sets up, builds, runs and tests boxstrap: the only entry that a newcomer needs. `./build.sh help` lists the commands.
# It works from any folder, as root or not, and writes nothing outside this folder but caches; `engine` and `images` say what they do.

set -euo pipefail
shopt -s inherit_errexit

main() {
    cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
    local command=${1:-help}
    [ $# -eq 0 ] || shift
    case $command in
        setup) setup ;;
        build)
            setup
            exec .venv/bin/python -m boxstrap.controller.cli build "$@"
            ;;
        demo)
            setup
            exec .venv/bin/python tests/demo.py "$@"
            ;;
        images)
            setup
            exec .venv/bin/python images/build.py "$@"
            ;;
        soak)
            setup
            PYTHONPATH=tests exec .venv/bin/python tests/soak.py "$@"
            ;;
        engine) exec sh images/engine.sh ;;
        test | lint | bench | lock)
            setup
            "run_$command" "$@"
            ;;
        help | -h | --help) usage ;;
        *)
            usage >&2
            die "found no command '$command'"
            ;;
    esac
}

usage() {
    cat <<'END'
./build.sh COMMAND

  build    build the archive, dist/boxstrap.pyz, and print its size (--agent nooa: the agent's payload too)
  demo     run the real agent in a sandbox, against a scripted model, and look at what it left
  test     run the tests; what follows goes to pytest. Container tests need an engine: BOXSTRAP_CONTAINERS=required
           fails where they would otherwise be left out
  lint     run all checks, or those named: ruff format types shell spdx
  engine   make sure that a Docker engine answers (as root on Debian: install and start one)
  images   make the boxes that the container tests need
  bench    run the benchmarks; names choose among tests/benchmarks
  soak     kill everything at random and count what is lost and left: --kills N [--seed N]
  setup    only make .venv from requirements/dev.txt
  lock     write requirements/dev.txt anew from pyproject.toml (--upgrade: newest versions)
  help     this text
END
}

say() { printf 'build.sh: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}
check_cmd() { command -v "$1" >/dev/null 2>&1; }

# The environment is .venv, from the lock, by hash.
setup() {
    # A finished set-up left copies of what it was made from.
    if cmp -s requirements/dev.txt .venv/.made-from-lock && cmp -s pyproject.toml .venv/.made-from-project &&
        .venv/bin/python -c '' 2>/dev/null; then
        return 0
    fi
    .venv/bin/python -c "$PYTHON_CHECK" 2>/dev/null || make_venv
    local uv
    uv=$(find_uv)
    say "installing requirements/dev.txt into .venv"
    VIRTUAL_ENV=$PWD/.venv "$uv" pip install --quiet --require-hashes --requirement requirements/dev.txt
    # The lock holds the build backend as well, so that nothing unpinned is fetched for our own package.
    VIRTUAL_ENV=$PWD/.venv "$uv" pip install --quiet --no-deps --no-build-isolation --editable .
    cp requirements/dev.txt .venv/.made-from-lock
    cp pyproject.toml .venv/.made-from-project
}

PYTHON_CHECK='import sys; sys.exit(sys.version_info < (3, 11))'

make_venv() {
    local python
    rm -rf .venv
    if python=$(find_python); then
        say "making .venv with $python"
        if uv_on_path; then
            uv venv --quiet --python "$python" .venv
        elif "$python" -c 'import venv, ensurepip' 2>/dev/null; then
            "$python" -m venv .venv
        elif "$python" -m pip --version >/dev/null 2>&1 && "$python" -c 'import venv' 2>/dev/null; then
            "$python" -m venv --without-pip .venv # its pip comes from the outside: see find_uv
            printf '%s\n' "$python" >.venv/.outer-python
        elif [ "$(id -u)" -eq 0 ] && check_cmd apt-get; then
            say "this Python has no venv module: installing python3-venv"
            apt_get install python3-venv 2>/dev/null || { apt_get update && apt_get install python3-venv; }
            "$python" -m venv .venv
        else
            die "found $python without the venv module and no uv; install python3-venv (Debian, Ubuntu) or uv, then run this again"
        fi
    elif uv_on_path; then
        say "no Python >= 3.11 is here: uv gets one"
        uv venv --quiet --python 3.13 .venv
    else
        die "found no Python >= 3.11 and no uv; install either, then run this again"
    fi
}

apt_get() {
    local verb=$1
    shift
    DEBIAN_FRONTEND=noninteractive apt-get "$verb" -y -qq "$@" >/dev/null
}

# A name on PATH may be a shim that starts an older one or none at all: each candidate is run.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 "$HOME"/.pyenv/versions/*/bin/python3; do
        if "$candidate" -c "$PYTHON_CHECK" >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

uv_on_path() { uv --version >/dev/null 2>&1; }

# Without a uv on PATH, the one that the lock names is installed by pip, by hash.
find_uv() {
    if uv_on_path; then
        command -v uv
        return
    fi
    if ! .venv/bin/uv --version >/dev/null 2>&1; then
        local wanted pip=(.venv/bin/python -m pip)
        [ ! -e .venv/.outer-python ] || pip=("$(cat .venv/.outer-python)" -m pip --python .venv/bin/python)
        wanted=$(mktemp)
        awk '/^uv==/ { on = 1 } on && /^[^ ]/ && !/^uv==/ { exit } on' requirements/dev.txt >"$wanted"
        say "installing uv into .venv"
        "${pip[@]}" install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement "$wanted" >&2
        rm -f "$wanted"
    fi
    printf '%s\n' "$PWD/.venv/bin/uv"
}

run_lock() {
    "$(find_uv)" pip compile --quiet pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes \
        --no-header --no-emit-index-url --no-emit-find-links --output-file requirements/dev.txt "$@"
}

engine_answers() {
    .venv/bin/python -c 'import docker; docker.from_env(timeout=10).ping()' >/dev/null 2>&1
}

run_test() {
    local left_out=""
    if engine_answers; then
        .venv/bin/python images/build.py || left_out="tests of the boxes that are absent (said above)"
    else
        left_out="all container tests, since no Docker engine answers (./build.sh engine starts one)"
    fi
    local status=0
    .venv/bin/python -m pytest "$@" || status=$?
    [ -z "$left_out" ] || [ "${BOXSTRAP_CONTAINERS:-}" = required ] || say "left out: $left_out"
    return "$status"
}

run_bench() {
    local names=("$@") name
    if [ ${#names[@]} -eq 0 ]; then
        mapfile -t names < <(cd tests/benchmarks && compgen -G 'bench_*.py')
        [ ${#names[@]} -gt 0 ] || die "found no tests/benchmarks/bench_*.py"
    fi
    for name in "${names[@]}"; do
        name=${name%.py}
        [ -f "tests/benchmarks/$name.py" ] || die "found no benchmark '$name' in tests/benchmarks"
        PYTHONPATH=tests .venv/bin/python "tests/benchmarks/$name.py"
    done
}

# Every check runs, then the failed ones are named.
run_lint() {
    local failed=() piece
    [ $# -gt 0 ] || set -- ruff format types shell spdx
    for piece in "$@"; do
        case $piece in
            ruff | format | types | shell | spdx) "lint_$piece" || failed+=("$piece") ;;
            *) die "found no check '$piece'; there are ruff format types shell spdx" ;;
        esac
    done
    [ ${#failed[@]} -eq 0 ] || die "lint failed: ${failed[*]}"
    say "lint clean"
}

lint_ruff() { .venv/bin/ruff check .; }
lint_format() { .venv/bin/ruff format --check .; }
lint_types() { .venv/bin/mypy; }

lint_shell() {
    local files=()
    mapfile -t files < <(ours | while read -r file; do
        [ -f "$file" ] && [ ! -L "$file" ] && head -n 1 -- "$file" | grep -Eq '^#!.*[ /](ba|da)?sh( |$)' && echo "$file"
    done)
    .venv/bin/shellcheck -- "${files[@]}"
}

lint_spdx() {
    local without
    # Empty files have nothing to license.
    without=$(ours '*.py' '*.sh' '*Dockerfile' '*.yaml' '.ci/run' |
        while read -r file; do [ ! -s "$file" ] || grep -q 'SPDX-License-Identifier: Apache-2.0' "$file" || echo "$file"; done)
    [ -z "$without" ] || {
        printf 'no SPDX header: %s\n' "$without" >&2
        return 1
    }
}

# The files of this project, those that are not committed yet included.
ours() { git ls-files --cached --others --exclude-standard -- "$@"; }

main "$@"
