#!/bin/sh
# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
# boxstrap.pyz: the head of the archive; what needs no Python, in POSIX sh (dash, bash, BusyBox ash).
#
# It looks at the box, brings an interpreter up, and hands over to Python. It downloads nothing, and it never uses the
# box's own Python. Every variable is called bx_…: a plain name may be exported in the task's environment, and a shell
# that assigns to it would change what the agent sees.
# shellcheck disable=SC2016  # code for Python, bash and eval stands in single quotes on purpose
# shellcheck disable=SC2317,SC2329  # verbs are called by their names, which shellcheck does not follow

main() {
    set -u
    bx_nl='
'
    bx_json='' bx_help='' bx_marks='' bx_stage='' bx_summing='' bx_ground='' bx_lock_made='' bx_probe=''
    for bx_value do
        case $bx_value in --json) bx_json=1 ;; --help | -h) bx_help=1 ;; --) break ;; esac
    done
    bx_verb=${1-help}
    is_archive "$0" || usage "\$0 is '$0', which is not this archive as a file; save it and run: sh /path/to/boxstrap.pyz"
    case $0 in /*) bx_archive=$0 ;; *) bx_archive=$PWD/$0 ;; esac
    [ $# -eq 0 ] || shift
    [ -z "$bx_help" ] || { help "$bx_verb" && exit 0; }
    case $bx_verb in
        check | install | clean)
            LC_ALL=C && export LC_ALL
            trap 'undo; exit 75' HUP INT TERM
            parse "$@" && "$bx_verb"
            ;;
        run | tail | status | stop | relay | shell | env) to_runner "$@" ;;
        help) help "${1-}" ;;
        *) usage "there is no verb '$bx_verb': check install clean run tail status stop shell env" ;;
    esac
}

say() { [ -n "$bx_json" ] || printf '%s\n' "$*"; }
warn() { printf 'boxstrap: %s\n' "$*" >&2; }
usage() { err usage "$1." "See: sh boxstrap.pyz $bx_verb --help" 64; }
check_cmd() { command -v "$1" >/dev/null 2>&1; }
ignore() { "$@" 2>/dev/null || :; }

# The seam of the fault sweep: where BOXSTRAP_FAULT names this step, the process dies here as if by a power cut; where it
# is a path, the step's name is added to that file.
step() {
    case ${BOXSTRAP_FAULT-} in
        '') ;;
        "$1") kill -9 $$ ;;
        /*) printf '%s\n' "$1" >>"$BOXSTRAP_FAULT" ;;
    esac
}

# bx_now becomes the seconds since boot, to hundredths, by a builtin.
now() { { read -r bx_now bx_rest </proc/uptime; } 2>/dev/null || bx_now=0; }

# mark PHASE: PHASE ends now.
mark() { now && bx_marks=$bx_marks${bx_marks:+,}$1:$bx_now; }

# err CODE MESSAGE REMEDY STATUS: one clear no, and the box as it was.
err() {
    LC_ALL=C
    if [ -n "$bx_json" ]; then
        quote "$1" && bx_text="{\"code\":$bx_quoted"
        quote "$2" && bx_text="$bx_text,\"message\":$bx_quoted"
        quote "$3" && bx_text="$bx_text,\"remedy\":$bx_quoted}"
        printf '{"v":1,"ok":false,"failure":%s}\n' "$bx_text"
    else
        warn "$1: $2${3:+ $3}"
    fi
    undo
    exit "$4"
}

# quote TEXT: bx_quoted becomes a JSON string. White space becomes a space, other control characters vanish, and a byte
# outside ASCII becomes a question mark, so that what is printed is valid JSON whatever the box holds.
quote() {
    bx_quoted='' bx_rest=$1
    bx_odd='[!] !#-[^-~]'
    while [ -n "$bx_rest" ]; do
        # shellcheck disable=SC2295  # the pattern is meant
        bx_plain=${bx_rest%%$bx_odd*}
        bx_quoted=$bx_quoted$bx_plain
        bx_rest=${bx_rest#"$bx_plain"}
        case $bx_rest in
            '') ;;
            \"*) bx_quoted=$bx_quoted\\\" ;;
            \\*) bx_quoted=$bx_quoted\\\\ ;;
            [[:space:]]*) bx_quoted="$bx_quoted " ;;
            [[:cntrl:]]*) ;;
            *) bx_quoted="$bx_quoted?" ;;
        esac
        bx_rest=${bx_rest#?}
    done
    bx_quoted="\"$bx_quoted\""
}

# first_line TEXT: bx_line becomes the first line of TEXT that says something.
first_line() {
    bx_line=${1#"$bx_nl"}
    bx_line=${bx_line%%"$bx_nl"*}
}

help() {
    bx_where='--agent NAME --runtime-root DIR --session-root DIR'
    bx_wants='--workdir DIR --glibc-floor X.Y --need-mib N --url URL… --loopback-ok'
    bx_statuses='Exit status: 0 done, 64 usage, 69 the box says no, 70 our bug, 73 install failed, 75 try again.'
    case $1 in
        check) set -- 'look at the box and say what is wrong; changes nothing' "[--json] $bx_where $bx_wants" ;;
        install) set -- 'publish a runtime under the runtime root, once' "[--json] $bx_where $bx_wants
        --digest SHA256 --interpreter FILE.tar.gz --interpreter-sha256 H [--payload FILE.tar.gz --payload-sha256 H]
        [--smoke MODULE]… [--lock-wait SECONDS] [--verify]" ;;
        clean) set -- 'remove runtimes, stages, locks and ended sessions' "[--json] $bx_where" ;;
        run) set -- 'start the agent of a session folder' '--session DIR [--wait | --hold | --detach | --prewarm] [--json]' ;;
        tail) set -- 'print evidence from a byte offset on' '--session DIR [--from N] [--wait SECONDS | --follow SECONDS] [--json]' ;;
        status) set -- 'say where a session stands' '--session DIR [--json]' ;;
        stop) set -- 'stop a session and print its receipt' '--session DIR [--wait SECONDS] [--remove] [--json]' ;;
        relay) set -- "join the controller's exec to the session's model gateway" \
            '--session DIR --controller ID [--poll [--ack N] [--wait SECONDS] [--batch N] [--answers BASE64|@FILE]]' ;;
        shell) set -- "open a shell in the agent's exact environment and workdir" '--session DIR [-- COMMAND…]' ;;
        env) set -- "print the agent's exact environment" '--session DIR [--json]' ;;
        *)
            printf '%s\n' 'usage: sh boxstrap.pyz VERB [OPTION]…' '' \
                'before the agent:  check install clean' 'with a session:    run tail status stop shell env' '' \
                'sh boxstrap.pyz VERB --help tells the options of a verb.' \
                "$bx_statuses"
            return 0
            ;;
    esac
    printf 'usage: sh boxstrap.pyz %s %s\n\n%s\n' "$bx_verb" "$2" "$1"
    [ "$bx_verb" != run ] || printf '%s\n' 'With --wait it exits with the outcome: 0 completed, 1 gave_up,' \
        '2 policy_budget_exhausted, 3 deadline_exceeded, 4 agent_failed, 5 model_failed, 6 resource_failed, 7 setup_failed,' \
        '8 sandbox_lost, 9 cancelled.'
    printf '%s\n' "$bx_statuses"
}

parse() {
    bx_agent='' bx_root='' bx_sessions='' bx_workdir='' bx_floor='' bx_need_mib='' bx_urls='' bx_loopback_ok='' bx_verify=
    bx_digest='' bx_interpreter='' bx_interpreter_sum='' bx_payload='' bx_payload_sum='' bx_smoke='' bx_lock_wait=120
    while [ $# -gt 0 ]; do
        bx_flag=$1
        shift
        case $bx_flag in
            --json) continue ;;
            --*=*)
                set -- "${bx_flag#*=}" "$@"
                bx_flag=${bx_flag%%=*}
                ;;
        esac
        case $bx_verb:$bx_flag in
            check:--loopback-ok | install:--loopback-ok) bx_loopback_ok=1 && continue ;;
            install:--verify) bx_verify=--verify && continue ;;
            *:--agent | *:--runtime-root | *:--session-root) ;;
            check:--workdir | check:--glibc-floor | check:--need-mib | check:--url) ;;
            install:--workdir | install:--glibc-floor | install:--need-mib | install:--url) ;;
            install:--digest | install:--interpreter | install:--interpreter-sha256) ;;
            install:--payload | install:--payload-sha256 | install:--smoke | install:--lock-wait) ;;
            *) usage "$bx_verb does not know '$bx_flag'" ;;
        esac
        case ${1-} in '' | --*) usage "$bx_flag needs a value" ;; esac
        bx_value=$1
        shift
        case $bx_flag:$bx_value in
            --agent:*[!a-z0-9-]*) usage "--agent is '$bx_value': needed are small letters, digits and '-'" ;;
            --*-sha256:*[!0-9a-f]* | --digest:*[!0-9a-f]*) usage "$bx_flag is '$bx_value', which is not lower-case hex" ;;
            --need-mib:*[!0-9]* | --lock-wait:*[!0-9]* | --need-mib:??????????* | --lock-wait:??????????*)
                usage "$bx_flag is '$bx_value', which is not a whole number of up to nine digits"
                ;;
            --glibc-floor:*[!0-9.]*) usage "--glibc-floor is '$bx_value', which is not like 2.35" ;;
            --glibc-floor:[0-9]*.[0-9]*) ;;
            --glibc-floor:*) usage "--glibc-floor is '$bx_value', which is not like 2.35" ;;
            --smoke:*[!A-Za-z0-9_./-]*) usage "--smoke is '$bx_value', which is no module and no path in the payload" ;;
            --url:*[[:space:][:cntrl:]]*) usage "--url is '$bx_value', which holds white space" ;;
            --url:http://?* | --url:https://?*) ;;
            --url:*) usage "--url is '$bx_value', which is not http:// or https://" ;;
            --runtime-root:*"$bx_nl"* | --session-root:*"$bx_nl"*) usage "$bx_flag holds a line end" ;;
            --runtime-root:/ | --session-root:/) usage "$bx_flag is the root of all" ;;
            --runtime-root:/* | --session-root:/*) ;;
            --runtime-root:* | --session-root:*) usage "$bx_flag is '$bx_value', which is not absolute" ;;
        esac
        case $bx_flag in
            --agent) bx_agent=$bx_value ;;
            --runtime-root) bx_root=${bx_value%/} ;;
            --session-root) bx_sessions=${bx_value%/} ;;
            --workdir) bx_workdir=$bx_value ;;
            --glibc-floor) bx_floor=$bx_value ;;
            --need-mib) bx_need_mib=$bx_value ;;
            --url) bx_urls="$bx_urls $bx_value" ;;
            --digest) bx_digest=$bx_value ;;
            --interpreter) bx_interpreter=$bx_value ;;
            --interpreter-sha256) bx_interpreter_sum=$bx_value ;;
            --payload) bx_payload=$bx_value ;;
            --payload-sha256) bx_payload_sum=$bx_value ;;
            --smoke) bx_smoke="$bx_smoke $bx_value" ;;
            --lock-wait) bx_lock_wait=$bx_value ;;
        esac
    done
    bx_root=${bx_root:-/opt/nemo-gym-${bx_agent:-command}}
    bx_sessions=${bx_sessions:-/tmp/nemo-gym-${bx_agent:-command}}
}

is_archive() {
    [ -f "$1" ] && {
        read -r bx_line && read -r bx_line && read -r bx_line && read -r bx_line
    } <"$1" && case $bx_line in '# boxstrap.pyz:'*) ;; *) return 1 ;; esac
}

# is_published FOLDER: a runtime is there that can run. Whether it is whole is for the manifest to say.
is_published() { [ -x "$1/python/bin/python3" ] && [ -f "$1/manifest.json" ] && [ -d "$1/app/boxstrap" ]; }

# find_runtime GLOB…: bx_runtime becomes a published runtime's folder: the one around this archive, else one that holds
# this very archive, else any.
find_runtime() {
    bx_runtime=
    is_published "${bx_archive%/*}" && bx_runtime=${bx_archive%/*} && return 0
    for bx_dir do
        is_published "$bx_dir" || continue
        bx_runtime=$bx_dir
        ! cmp -s "$bx_archive" "$bx_dir/boxstrap.pyz" 2>/dev/null || return 0
    done
    [ -n "$bx_runtime" ]
}

# find_loader PROGRAM: bx_loader becomes the program's PT_INTERP, or nothing when it is static. By builtins: `read`
# drops the NUL bytes, the string stands behind the program headers, and the other 2,000 bytes there hold no paths.
find_loader() {
    bx_loader='' bx_seen=0
    [ -r "$1" ] || return 0
    while [ "$bx_seen" -lt 2000 ] && { IFS= read -r bx_line || [ -n "$bx_line" ]; }; do
        bx_plain=${bx_line%%/ld*.so*}
        if [ "$bx_plain" != "$bx_line" ] && [ $((bx_seen + ${#bx_plain})) -lt 2000 ]; then
            bx_rest=${bx_line#"$bx_plain"/}
            bx_loader=${bx_rest%%.so*}.so
            bx_rest=${bx_rest#*.so}
            case $bx_rest in .[0-9]*) bx_loader=$bx_loader${bx_rest%"${bx_rest#??}"} ;; esac
            return 0
        fi
        bx_seen=$((bx_seen + ${#bx_line} + 1))
    done <"$1"
}

find_facts() {
    bx_os='' bx_arch='' bx_uid=
    { read -r bx_os </proc/sys/kernel/ostype; } 2>/dev/null || bx_os=$(uname -s 2>/dev/null)
    bx_arch=$(uname -m 2>/dev/null) || { read -r bx_arch </proc/sys/kernel/arch; } 2>/dev/null
    case $bx_arch in amd64) bx_arch=x86_64 ;; arm64) bx_arch=aarch64 ;; esac
    bx_uid=$(id -u 2>/dev/null) || while read -r bx_line bx_rest; do
        case $bx_line in Uid:) bx_uid=${bx_rest%%[!0-9]*} ;; esac
    done </proc/self/status
    case $bx_arch in
        x86_64) bx_canonical=/lib64/ld-linux-x86-64.so.2 ;;
        aarch64) bx_canonical=/lib/ld-linux-aarch64.so.1 ;;
        *) bx_canonical='' ;;
    esac
    find_loader /bin/sh
    [ -e /bin/sh ] || find_loader "/proc/$$/exe"
    bx_libc_version=
    case $bx_loader in
        ld-musl-*) bx_libc=musl ;;
        ld-linux*) bx_libc=glibc ;;
        '') if [ -e "$bx_canonical" ]; then bx_libc=glibc; else bx_libc=none; fi ;;
        *) bx_libc=other ;;
    esac
    [ "$bx_libc" != glibc ] || find_libc_version
}

# Words only: what decides is whether the pushed interpreter runs.
find_libc_version() {
    bx_line=$(getconf GNU_LIBC_VERSION 2>/dev/null) || bx_line=
    bx_libc_version=${bx_line#glibc }
    if [ -z "$bx_libc_version" ] && bx_line=$(ldd --version 2>/dev/null); then
        first_line "$bx_line" && bx_libc_version=${bx_line##* }
    fi
    if [ -z "$bx_libc_version" ]; then
        for bx_line in /lib/*/libc-2.*.so /lib/libc-2.*.so /lib64/libc-2.*.so; do
            [ ! -e "$bx_line" ] || { bx_libc_version=${bx_line##*libc-} && bx_libc_version=${bx_libc_version%.so}; }
        done
    fi
    case $bx_libc_version in [0-9]*.[0-9]*) ;; *) bx_libc_version= ;; esac
}

# older A B: version A is lower than B.
older() {
    bx_left=${1#*.} bx_right=${2#*.}
    bx_left=${bx_left%%[!0-9]*} bx_right=${bx_right%%[!0-9]*}
    [ "${1%%.*}" -lt "${2%%.*}" ] || { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "$bx_left" -lt "$bx_right" ]; }
}

# add CODE STATUS FOUND NEEDED REMEDY: one check joins the report.
add() {
    [ "$2" != fail ] || bx_refused=true
    quote "$1" && bx_item="{\"code\":$bx_quoted"
    quote "$2" && bx_item="$bx_item,\"status\":$bx_quoted"
    quote "$3" && bx_item="$bx_item,\"found\":$bx_quoted"
    quote "$4" && bx_item="$bx_item,\"needed\":$bx_quoted"
    quote "$5" && bx_item="$bx_item,\"remedy\":$bx_quoted}"
    bx_checks=$bx_checks${bx_checks:+,}$bx_item
    [ -z "$bx_json" ] || return 0
    bx_table=$bx_table$(printf '%-5s %-17s %s' "$2" "$1" "$3")$bx_nl
    case $2 in fail | warn) bx_table="$bx_table      needed: $4$bx_nl      $5$bx_nl" ;; esac
}

# examine WAY: all checks, then the judgement in bx_refused. WAY is payload, or published: then the runtime is there, and
# what only an installation needs is a warning.
examine() {
    bx_way=$1 bx_refused=false bx_checks='' bx_table='' bx_deferred=
    bx_enough="a Linux box with glibc, such as debian or ubuntu"
    find_facts
    if [ "$bx_os" = Linux ]; then add unsupported-os ok "$bx_os" Linux ""; else
        add unsupported-os fail "$bx_os" Linux "Use $bx_enough."
    fi
    case $bx_arch in
        x86_64 | aarch64) add unsupported-arch ok "$bx_arch" "x86_64 or aarch64" "" ;;
        *) add unsupported-arch fail "$bx_arch" "x86_64 or aarch64" "Use a box of one of these architectures." ;;
    esac
    check_libc
    bx_untried=
    [ "$bx_refused" = false ] || bx_untried='the box is refused already'
    check_tools
    bx_lock_found='' bx_mv_found=
    if [ "$bx_way" = published ]; then
        add not-writable skip "$bx_final is published" "a runtime root that can be written" ""
    else
        probe_root --runtime-root "$bx_root" && check_lock_and_space
    fi
    probe_root --session-root "$bx_sessions" || :
    if [ -z "$bx_workdir" ]; then add workdir-missing skip "no --workdir was given" "an existing folder" ""
    elif [ -d "$bx_workdir" ] && [ -x "$bx_workdir" ]; then add workdir-missing ok "$bx_workdir" "an existing folder" ""; else
        add workdir-missing fail "$bx_workdir is no folder that uid $bx_uid can enter" "an existing folder" \
            "Name the folder that the task lives in, as it is called inside the box."
    fi
    check_urls
    check_python
}

check_libc() {
    bx_found="$bx_libc${bx_libc_version:+ $bx_libc_version}"
    if [ "$bx_libc" = glibc ] && { [ -e "$bx_canonical" ] || [ -z "$bx_canonical" ]; }; then
        add unsupported-libc ok "$bx_found, $bx_canonical" "glibc with its loader" ""
    else
        case $bx_libc in
            none) bx_found="a static /bin/sh and no $bx_canonical" ;;
            glibc) bx_found="glibc, but no $bx_canonical" ;;
            *) bx_found="$bx_libc: /bin/sh asks for $bx_loader" ;;
        esac
        add unsupported-libc fail "$bx_found" "glibc with its loader $bx_canonical" \
            "Use $bx_enough; the interpreter and the agent's packages are built against glibc. Nothing was written."
        return 0
    fi
    if [ -z "$bx_floor" ]; then add libc-too-old skip "$bx_found" "none was named with --glibc-floor" ""
    elif [ -z "$bx_libc_version" ]; then
        add libc-too-old warn "a glibc that does not tell its version" "glibc $bx_floor" \
            "Nothing to do yet: install runs the interpreter and decides."
    elif older "$bx_libc_version" "$bx_floor"; then
        add libc-too-old warn "glibc $bx_libc_version" "glibc $bx_floor" \
            "Use a newer image, or an interpreter built against glibc $bx_libc_version or older; install runs it and decides."
    else add libc-too-old ok "glibc $bx_libc_version" "glibc $bx_floor" ""; fi
}

# A tool that is missing refuses the box where this way needs it, and is a warning where it does not.
check_tools() {
    for bx_tool in bash tar gzip sha256sum flock tee mv mkdir rm chmod; do
        case $bx_tool:$bx_way in
            bash:*) bx_status=fail && bx_why="the agent's shell" ;;
            tee:* | mv:*) bx_status=warn && bx_why="task scripts" ;;
            *:published) bx_status=warn && bx_why="installing a runtime" ;;
            *) bx_status=fail && bx_why="installing a runtime" ;;
        esac
        if ! check_cmd "$bx_tool"; then
            add missing-tool "$bx_status" "no $bx_tool" "$bx_tool, for $bx_why" "$(way_to_get "$bx_tool")"
            case $bx_tool in mkdir | rm | chmod) bx_untried="that takes $bx_tool" ;; esac
        elif ! bx_text=$(try_tool "$bx_tool" 2>&1); then
            first_line "$bx_text"
            add missing-tool "$bx_status" "a $bx_tool that does not work${bx_line:+: $bx_line}" "$bx_tool, for $bx_why" \
                "$(way_to_get "$bx_tool")"
        else
            case $bx_tool in mkdir | rm | chmod) ;; *) add missing-tool ok "$bx_tool" "$bx_tool, for $bx_why" "" ;; esac
        fi
    done
}

# way_to_get TOOL: print the command that puts it into the image, where the box knows one.
way_to_get() {
    case $1 in bash | tar | gzip) ;; flock) set -- "$1" util-linux ;; *) set -- "$1" coreutils ;; esac
    if check_cmd apt-get; then
        printf %s "Add $1 to the image: apt-get update && apt-get install -y --reinstall ${2-$1}"
        return 0
    fi
    for bx_value in dnf microdnf yum zypper; do
        ! check_cmd "$bx_value" || { printf %s "Add $1 to the image: $bx_value install -y ${2-$1}" && return 0; }
    done
    printf %s "Add $1 to the image."
}

# What can be tried without touching the box; flock and mv are tried in a probe folder.
try_tool() {
    case $1 in
        bash) BASH_ENV='' bash -c : ;;
        sha256sum) case $(sha256sum </dev/null) in e3b0c44298fc1c149afbf4c8996fb924*) ;; *) return 1 ;; esac ;;
    esac
}

# nearest PATH: bx_nearest becomes the nearest thing on the way up that exists.
nearest() {
    bx_nearest=$1
    while [ ! -e "$bx_nearest" ] && [ ! -L "$bx_nearest" ]; do
        bx_nearest=${bx_nearest%/*}
        bx_nearest=${bx_nearest:-/}
    done
}

# probe_root OPTION FOLDER: what the nearest folder that exists allows. Nothing of ours is executed in the session root.
probe_root() {
    nearest "$2"
    if [ -n "$bx_untried" ]; then
        if [ -d "$bx_nearest" ] && [ -w "$bx_nearest" ]; then
            add not-writable skip "$bx_nearest was not tried: $bx_untried" "$2 can be written" ""
        else
            add not-writable fail "$bx_nearest is not writable for uid $bx_uid" "$2 can be written" \
                "Name another folder with $1."
        fi
        return 1
    fi
    try_folder "$bx_nearest"
    bx_status=$?
    if [ "$bx_status" = 1 ]; then
        first_line "$bx_text"
        unprobe
        add not-writable fail "$bx_nearest: ${bx_line##*: } (uid $bx_uid)" "$2 can be written" "$(elsewhere "$1")"
        return 1
    fi
    [ "$1" = --session-root ] || try_lock_and_mv
    unprobe
    add not-writable ok "$bx_nearest" "$2 can be written" ""
    first_line "$bx_text"
    case $bx_status$1 in
        0*) add noexec ok "$bx_nearest" "programs run in $2" "" ;;
        *--session-root)
            add noexec warn "$bx_nearest: a program there does not start (${bx_line##*: })" "programs run in $2" \
                "Nothing to do, unless the agent installs programs into its HOME: then $(elsewhere "$1")"
            ;;
        *)
            add noexec fail "$bx_nearest: a program there does not start (${bx_line##*: })" "programs run in $2" \
                "$(elsewhere "$1")"
            ;;
    esac
}

# try_folder FOLDER: write a program there and have the kernel start it: a shell reads one from a noexec mount happily.
# Returns 1 when it was not written, 2 when it did not start; bx_text says why. To be followed by unprobe.
try_folder() {
    bx_tried=$1
    now && bx_probe=${1%/}/.boxstrap-probe-${BOXSTRAP_PROBE:-$$-$bx_now} # the controller knows it, and removes what a kill left
    stamp "$1"
    bx_text=$(write_probe 2>&1) || return 1
    bx_text=$("$bx_probe/run" 2>&1) || return 2
}

write_probe() {
    mkdir "$bx_probe" && printf '#!/bin/sh\nexit 0\n' >"$bx_probe/run" && chmod 700 "$bx_probe/run"
}

try_lock_and_mv() {
    bx_lock_found=$({ within 5 flock -n 9; } 9>"$bx_probe/lock" 2>&1) && bx_lock_found=ok
    mkdir "$bx_probe/a" && ignore mv -T "$bx_probe/a" "$bx_probe/b"
    [ ! -d "$bx_probe/b" ] || bx_mv_found=ok
}

# unprobe: the folder as it was, its time of change included.
unprobe() {
    ignore rm -rf "$bx_probe"
    bx_probe=
    restamp "$bx_tried"
}

# elsewhere OPTION: print what to type: the option with a folder that was tried and will do. In a subshell of its own.
elsewhere() {
    bx_word=sessions
    [ "$1" = --session-root ] || bx_word=runtimes
    for bx_dir in /var/tmp /tmp "${HOME-}" /dev/shm; do
        case $bx_dir in '' | / | "$bx_nearest") continue ;; esac
        [ -d "$bx_dir" ] || continue
        { try_folder "$bx_dir" && try_lock_and_mv; } 2>/dev/null
        bx_status=$?
        unprobe
        if [ "$bx_status" = 0 ] && has_room "$bx_dir" "$bx_word"; then
            printf %s "add: $1 ${bx_dir%/}/boxstrap-$bx_word"
            return 0
        fi
    done
    printf %s "name another folder with $1, on a file system that uid $bx_uid may write to and execute from; \
docker run --tmpfs ${bx_nearest%/}:exec makes one."
}

has_room() {
    [ "$2" = sessions ] && return 0
    free_mib "$1"
    [ "${bx_free:-0}" -ge "${bx_need_mib:-0}" ] && { [ "$bx_lock_found" = ok ] || ! check_cmd flock; }
}

# free_mib FOLDER: bx_free becomes the free space in MiB, or nothing when df does not say.
free_mib() {
    # shellcheck disable=SC2046  # the words of df's second line are wanted
    set -- $(df -Pk "$1" 2>/dev/null | { read -r bx_rest && read -r bx_rest && printf %s "$bx_rest"; })
    case ${4-} in '' | *[!0-9]*) bx_free= ;; *) bx_free=$(($4 / 1024)) ;; esac
}

# stamp FOLDER, restamp FOLDER: note its time of change, and give it back. BusyBox reads no fractions.
stamp() { bx_stamp=$(stat -c '%Y %y' "$1" 2>/dev/null); }
restamp() {
    [ -z "$bx_stamp" ] || touch -d "${bx_stamp#* }" "$1" 2>/dev/null || ignore touch -d "@${bx_stamp%% *}" "$1"
}

# within SECONDS COMMAND…: with a bound, where the box has `timeout`.
within() {
    if check_cmd timeout; then timeout "$@"; else shift && "$@"; fi
}

check_lock_and_space() {
    if ! check_cmd flock; then :
    elif [ "$bx_lock_found" = ok ]; then add lock-unsupported ok "flock in $bx_nearest" "a lock within 5 seconds" ""; else
        first_line "$bx_lock_found"
        add lock-unsupported fail "flock in $bx_nearest: ${bx_line:-no lock within 5 seconds}" "a lock within 5 seconds" \
            "$(elsewhere --runtime-root)"
    fi
    [ -n "$bx_mv_found" ] || ! check_cmd mv ||
        add missing-tool warn "a mv without -T" "mv -T, for task scripts" "Put GNU mv into the image."
    free_mib "$bx_nearest"
    if [ -z "$bx_free" ]; then add no-space skip "df does not say" "${bx_need_mib:-0} MiB in $bx_nearest" ""
    elif [ -z "$bx_need_mib" ]; then add no-space skip "$bx_free MiB in $bx_nearest" "none were named with --need-mib" ""
    elif [ "$bx_free" -ge "$bx_need_mib" ]; then add no-space ok "$bx_free MiB in $bx_nearest" "$bx_need_mib MiB" ""; else
        add no-space fail "$bx_free MiB in $bx_nearest" "$bx_need_mib MiB" \
            "Free some space, or $(elsewhere --runtime-root)"
    fi
}

# split_url URL: bx_host and bx_port become what a socket needs.
split_url() {
    bx_host=${1#*://}
    bx_host=${bx_host%%[/?#]*}
    bx_host=${bx_host##*@}
    case $1 in https:*) bx_port=443 ;; *) bx_port=80 ;; esac
    case $bx_host in
        \[*\]:*) bx_port=${bx_host##*\]:} && bx_host=${bx_host%\]:*} && bx_host=${bx_host#\[} ;;
        \[*\]) bx_host=${bx_host#\[} && bx_host=${bx_host%\]} ;;
        *:*) bx_port=${bx_host##*:} && bx_host=${bx_host%:*} ;;
    esac
    [ -n "$bx_host" ] || return 1
    case $bx_port in '' | *[!0-9]* | ??????*) return 1 ;; esac
}

is_loopback() {
    case $1 in
        127.* | 0.0.0.0 | 0 | ::1 | :: | 0:0:0:0:0:0:0:1 | ::ffff:127.*) ;;
        [Ll][Oo][Cc][Aa][Ll][Hh][Oo][Ss][Tt] | *.[Ll][Oo][Cc][Aa][Ll][Hh][Oo][Ss][Tt]) ;;
        *) return 1 ;;
    esac
}

# By name first; then a connection with a bound of 5 seconds, by bash where it is there, else later by Python.
check_urls() {
    set -f
    for bx_url in $bx_urls; do
        split_url "$bx_url" || usage "--url is '$bx_url', which has no host or no port"
        if is_loopback "$bx_host"; then
            if [ -z "$bx_loopback_ok" ]; then
                add url-loopback fail "$bx_url" "a host that means the same inside the sandbox" \
                    "Inside the box $bx_host is the box itself: give an address that it can reach, or say --loopback-ok \
where the box shares the host's network."
                continue
            fi
            add url-loopback ok "$bx_url is loopback, which was allowed" "a host that means the same inside the sandbox" ""
        fi
        if check_cmd bash && check_cmd timeout; then
            bx_text=$(BASH_ENV='' timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$bx_host" "$bx_port" 2>&1)
            bx_status=$?
        else bx_status=0 bx_text='/dev/tcp: No such file'; fi
        case $bx_status:$bx_text in
            *'/dev/tcp'*'No such file'*)
                bx_deferred="$bx_deferred $bx_url"
                add url-unreachable skip "not tried without Python" "$bx_url can be reached" "" && continue
                ;;
            0:*) add url-unreachable ok "$bx_host port $bx_port answers" "$bx_url can be reached" "" && continue ;;
            124:* | 143:*) bx_line='no answer within 5 seconds' ;;
            *) first_line "$bx_text" && bx_line=${bx_line##*: } ;;
        esac
        bx_status=fail
        [ -z "${http_proxy-}${https_proxy-}${HTTP_PROXY-}${HTTPS_PROXY-}" ] || bx_status=warn
        add url-unreachable "$bx_status" "$bx_host port $bx_port: $bx_line" "$bx_url can be reached" \
            "Check the address, and that the sandbox has a network that leads there; without one, let the controller relay."
    done
    set +f
}

check_python() {
    if [ "$bx_way" = published ]; then add no-python ok "$bx_final/python/bin/python3" "an interpreter that we supply" ""
    elif [ -n "$bx_interpreter" ] && [ -r "$bx_interpreter" ]; then
        add no-python ok "$bx_interpreter" "an interpreter that we supply" ""
    elif [ "$bx_verb" = install ]; then
        add no-python fail "${bx_interpreter:-no --interpreter}" "an interpreter that we supply" \
            "Push a packed interpreter and name it with --interpreter and --interpreter-sha256."
    elif find_runtime "$bx_root"/*; then
        add no-python ok "$bx_runtime/python/bin/python3" "an interpreter that we supply" ""
    else add no-python skip "nothing is published in $bx_root" "an interpreter that we supply; install brings it" ""; fi
}

# bx_report becomes the Report (wire.Report) as JSON.
write_report() {
    bx_facts=
    set -- os "$bx_os" arch "$bx_arch" libc "$bx_libc" libc_version "$bx_libc_version" loader "$bx_loader" uid "$bx_uid" \
        runtime_root "$bx_root" session_root "$bx_sessions" workdir "$bx_workdir"
    while [ $# -gt 0 ]; do
        quote "$2" && bx_facts="$bx_facts${bx_facts:+,}\"$1\":$bx_quoted"
        shift 2
    done
    bx_report="{\"v\":1,\"refused\":$bx_refused,\"facts\":{$bx_facts},\"checks\":[$bx_checks]}"
}

# The report is the answer, and the exit status says which.
answer_report() {
    write_report
    if [ "$bx_refused" = true ]; then bx_ok=false bx_status=69; else bx_ok=true bx_status=0; fi
    if [ -n "$bx_json" ]; then printf '{"v":1,"ok":%s,"report":%s}\n' "$bx_ok" "$bx_report"; else
        printf '%s' "$bx_table"
        if [ "$bx_refused" = true ]; then warn "this box is refused"; else say "this box will do"; fi
    fi
    undo
    exit "$bx_status"
}

check() {
    find_runtime "$bx_root"/* || :
    examine payload
    if [ -z "$bx_deferred" ] || [ -z "$bx_runtime" ]; then answer_report; fi
    write_report
    add_each --url "$bx_deferred"
    # shellcheck disable=SC2086  # bx_each is a list of checked words
    become_python bootstrap "$bx_runtime/python/bin/python3" "$bx_runtime/app" check ${bx_json:+--json} \
        --report "$bx_report" $bx_each
}

# add_each OPTION LIST: bx_each becomes the list with the option before each word.
add_each() {
    bx_each=
    set -f
    for bx_value in $2; do bx_each="$bx_each $1 $bx_value"; done
}

clean() {
    find_runtime "$bx_root"/* || if [ -e "$bx_root" ] || [ -e "$bx_sessions" ]; then
        err runtime-missing "found no runtime under $bx_root, needed is one to look after its sessions." \
            "Name its folder with --runtime-root, or remove $bx_root and $bx_sessions by hand." 69
    else
        say "nothing to remove"
        [ -z "$bx_json" ] || printf '{"v":1,"ok":true,"data":{"removed":[]}}\n'
        exit 0
    fi
    become_python bootstrap "$bx_runtime/python/bin/python3" "$bx_runtime/app" clean ${bx_json:+--json} \
        --root "$bx_root" --sessions "$bx_sessions"
}

# The verbs of a session are the runner's; only what says where its runtime is stays here.
to_runner() {
    bx_root='' bx_agent='' bx_count=$# bx_line=
    while [ "$bx_count" -gt 0 ]; do
        [ "$1" != -- ] || bx_line=--
        case $bx_line$1 in
            --runtime-root | --agent)
                [ "$bx_count" -gt 1 ] || usage "$1 needs a value"
                case $1 in --agent) bx_agent=$2 ;; *) bx_root=${2%/} ;; esac
                shift 2
                bx_count=$((bx_count - 2))
                ;;
            *)
                set -- "$@" "$1"
                shift
                bx_count=$((bx_count - 1))
                ;;
        esac
    done
    if [ -z "$bx_root$bx_agent" ]; then find_runtime /opt/nemo-gym-*/*
    else find_runtime "${bx_root:-/opt/nemo-gym-$bx_agent}"/*; fi ||
        err runtime-missing "found no runtime${bx_root:+ under $bx_root}, needed is one to run '$bx_verb' with." \
            "Install one first, or name its folder with --runtime-root." 69
    become_python runner "$bx_runtime/python/bin/python3" "$bx_runtime/app" "$bx_verb" "$@"
}

# LD_* variables are the task's: our interpreter must not see them, the agent's children must. They travel under
# another name, and runner/environment.py gives them back.
scrub() {
    eval "$(export -p | while read -r bx_name; do
        case $bx_name in
            'export LD_'* | 'declare -x LD_'*) bx_name=LD_${bx_name#*LD_} && bx_name=${bx_name%%=*} ;;
            *) continue ;;
        esac
        case $bx_name in *[!A-Za-z0-9_]*) continue ;; esac
        printf '[ -z "${%s+x}" ] || { export BOXSTRAP_TASK_%s="$%s"; unset %s; };' "$bx_name" "$bx_name" "$bx_name" "$bx_name"
    done)"
}

# become_python PACKAGE PYTHON PATH ARGUMENT…: run a package's main with PATH in front of sys.path, in UTF-8 mode,
# deaf to PYTHON* (-I), which stays in the environment for the agent's shells.
become_python() {
    bx_code="import sys; sys.path.insert(0, sys.argv.pop(1)); from boxstrap.$1.__main__ import main; sys.exit(main())"
    bx_python=$2
    shift 2
    scrub
    exec "$bx_python" -I -X utf8 -c "$bx_code" "$@"
}

install() {
    [ -n "$bx_agent" ] || usage "install needs --agent"
    [ ${#bx_digest} -eq 64 ] || usage "install needs --digest with 64 hex characters"
    umask 022
    bx_short=${bx_digest%"${bx_digest#????????????????}"}
    bx_final=$bx_root/$bx_short
    mark start
    if is_published "$bx_final"; then
        examine published
        [ "$bx_refused" = false ] || answer_report
        write_report
        mark check
        reuse
        [ -n "$bx_interpreter" ] || err runtime-missing "found $bx_final damaged, needed a whole runtime." \
            "Push the interpreter and the payload, and install again to repair it." 69
    fi
    examine payload
    [ "$bx_refused" = false ] || answer_report
    write_report
    mark check
    check_digest
    take_lock
    mark lock
    # Another installation may have held the lock until now.
    ! is_published "$bx_final" || reuse "$bx_short"
    sweep "$bx_short"
    stage
    publish
}

# reuse [HELD]: ends here when the published runtime is whole (0) or a URL is not reached (69); else returns.
reuse() {
    step reuse
    add_each --url "$bx_deferred"
    # shellcheck disable=SC2086  # both are lists of checked words
    (become_python bootstrap "$bx_final/python/bin/python3" "$bx_final/app" install --reuse ${bx_json:+--json} $bx_verify \
        --root "$bx_root" --digest "$bx_digest" --report "$bx_report" --marks "$bx_marks" $bx_each 2>/dev/null)
    bx_status=$?
    set +f
    case $bx_status in 0 | 69) sweep "${1-}" && undo && exit "$bx_status" ;; esac
}

# take_lock: fd 9 holds the kernel's lock on .lock-<digest>, which dies with its last holder.
#
# Who fails removes a lock file that was not there before. The race: A holds the lock, B waits for it, A fails and
# unlinks, C makes a new file and locks that. B then holds a lock on nothing. So who gets a lock looks whether the name
# still means it, and starts over when not.
take_lock() {
    step lock
    bx_lock=$bx_root/.lock-$bx_short bx_tries=0
    nearest "$bx_root" && bx_ground=$bx_nearest
    stamp "$bx_ground"
    while :; do
        bx_tries=$((bx_tries + 1))
        ignore mkdir -p "$bx_root"
        [ -e "$bx_lock" ] || bx_lock_made=1
        if bx_text=$( (exec 9<>"$bx_lock") 2>&1) && exec 9<>"$bx_lock"; then
            lock_within "$bx_lock_wait" || lock_timeout
            # shellcheck disable=SC3013  # dash, bash and BusyBox all know -ef
            if [ "/proc/$$/fd/9" -ef "$bx_lock" ] || [ ! -d /proc/$$ ]; then break; fi
        fi
        [ "$bx_tries" -lt 20 ] || {
            first_line "$bx_text"
            err not-writable "found ${bx_line##*: } at $bx_lock, needed is to write it." \
                "Name another folder with --runtime-root." 69
        }
    done
    step locked
    printf '%-20s\n' "$$" >&9
}

# util-linux waits by itself; BusyBox only tries.
lock_within() {
    flock -n 9 2>/dev/null && return 0
    case $(flock --help 2>&1) in *-w*) flock -w "$1" 9 && return 0 || return 1 ;; esac
    bx_waited=0
    until flock -n 9; do
        [ "$bx_waited" -lt "$1" ] || return 1
        bx_waited=$((bx_waited + 1))
        sleep 1
    done
}

lock_timeout() {
    bx_lock_made='' bx_ground=''
    holder
    err lock-timeout "found $bx_lock held${bx_holder:+ by $bx_holder} after $bx_lock_wait seconds, needed it free." \
        "Another installation is running: try again, or wait longer with --lock-wait." 75
}

# bx_holder becomes who holds the lock: who wrote its pid there or, when that one is dead, a child that has the file open.
holder() {
    bx_line='' bx_holder=''
    { read -r bx_line bx_rest <"$bx_lock"; } 2>/dev/null
    for bx_value in "/proc/${bx_line:-0}/fd/9" /proc/[0-9]*/fd/*; do
        # shellcheck disable=SC3013  # dash, bash and BusyBox all know -ef
        [ "$bx_value" -ef "$bx_lock" ] || continue
        bx_value=${bx_value#/proc/} && bx_value=${bx_value%%/*}
        [ "$bx_value" != $$ ] || continue
        { read -r bx_rest <"/proc/$bx_value/comm"; } 2>/dev/null
        bx_holder="pid $bx_value ($bx_rest)"
        return 0
    done
    bx_holder=${bx_line:+pid $bx_line}
}

# sweep [HELD]: a stage whose digest's lock is free belongs to nobody alive; so does one whose digest is HELD by us.
sweep() {
    for bx_dir in "$bx_root"/.stage-*; do
        [ -d "$bx_dir" ] || continue
        bx_line=${bx_dir##*/.stage-}
        bx_line=${bx_line%%-*}
        if [ "$bx_line" = "${1-}" ]; then ignore rm -rf "$bx_dir"; else
            ignore flock -n "$bx_root/.lock-$bx_line" rm -rf "$bx_dir"
        fi
    done
}

# sum_of FILE: print its sha256. Without words: where LD_PRELOAD names what is missing, every program begins with some.
sum_of() { bx_line=$(sha256sum <"$1") && printf '%s' "${bx_line%% *}"; }

# check_digest: the runtime's name is made of the digests of all that was pushed, this archive included.
check_digest() {
    bx_archive_sum=$(sum_of "$bx_archive" 2>/dev/null)
    bx_line=$(printf '%s\n' boxstrap-runtime-1 "$bx_interpreter_sum" "${bx_payload_sum:--}" "$bx_arch" "$bx_archive_sum" |
        sha256sum)
    [ "${bx_line%% *}" = "$bx_digest" ] || corrupt "$bx_archive with what it installs" "${bx_line%% *}" "$bx_digest"
}

# stage: the interpreter, checked, unpacked and run; the payload's sha256 meanwhile.
stage() {
    step stage
    bx_stage=$bx_root/.stage-$bx_short-$$
    bx_text=$(mkdir "$bx_stage" "$bx_stage/python" 2>&1) || unpack_failed "$bx_text"
    step staged
    if [ -n "$bx_payload" ]; then
        sum_of "$bx_payload" 2>/dev/null >"$bx_stage/payload.sha256" 9>&- &
        bx_summing=$!
    fi
    bx_sum=$(sum_of "$bx_interpreter" 2>/dev/null)
    [ "$bx_sum" = "$bx_interpreter_sum" ] || corrupt "$bx_interpreter" "$bx_sum" "$bx_interpreter_sum"
    step unpack
    bx_text=$({ gzip -dc <"$bx_interpreter" | { step untar && TAR_OPTIONS='' tar -xof - -C "$bx_stage/python"; }; } 2>&1) ||
        unpack_failed "$bx_text"
    step trial
    bx_staged=$bx_stage/python/bin/python3
    bx_text=$( (scrub && within 60 "$bx_staged" -I -c 'import ssl, zlib, ctypes, hashlib, socket') 2>&1) ||
        trial_failed "$bx_text"
    mark interpreter
    if [ -n "$bx_payload" ]; then
        wait "$bx_summing"
        bx_sum=''
        ignore read -r bx_sum <"$bx_stage/payload.sha256"
        [ "$bx_sum" = "$bx_payload_sum" ] || corrupt "$bx_payload" "$bx_sum" "$bx_payload_sum"
        rm -f "$bx_stage/payload.sha256"
        mark payload
    fi
}

# publish: Python fills the stage, proves it, and gives it its final name. It is not exec'd: whatever ends it, someone is
# left to put the box back.
publish() {
    step hand-over
    bx_stopped=
    trap bx_stopped=1 HUP INT TERM
    add_each --url "$bx_deferred" && bx_lists=$bx_each
    add_each --smoke "$bx_smoke" && bx_lists="$bx_lists $bx_each"
    # shellcheck disable=SC2086  # lists of checked words
    (become_python bootstrap "$bx_staged" "$bx_archive/site-packages" install --pid $$ ${bx_json:+--json} \
        --root "$bx_root" --digest "$bx_digest" --archive "$bx_archive" --archive-sha256 "$bx_archive_sum" --arch "$bx_arch" \
        --interpreter-sha256 "$bx_interpreter_sum" ${bx_payload:+--payload "$bx_payload"} \
        ${bx_payload:+--payload-sha256 "$bx_payload_sum"} --report "$bx_report" --marks "$bx_marks" $bx_lists)
    bx_status=$?
    set +f
    case $bx_status${bx_stopped:+ stopped} in
        0 | '0 stopped')
            # After a repair the damaged tree is here.
            ignore rm -rf "$bx_stage"
            exit 0
            ;;
        69 | 70 | 73 | 75) undo && exit "$bx_status" ;;
        *stopped) undo && exit 75 ;;
        *) err smoke-failed "found that the staged interpreter ended with status $bx_status while installing." \
            "Look at the lines above; when it was killed, give the box more memory." 73 ;;
    esac
}

corrupt() {
    err upload-corrupt "found sha256 ${2:-none} of $1, needed ${3:-one to compare with}." "Push the file again." 73
}

unpack_failed() {
    first_line "$1"
    case $1 in
        *'No space left'* | *'quota exceeded'*)
            err no-space "found no space left in $bx_root, needed is room for the runtime." \
                "Free some space, or name another disk with --runtime-root." 73
            ;;
        *)
            err upload-corrupt "found that $bx_interpreter does not unpack ($bx_line), needed is a packed interpreter." \
                "Push it again." 73
            ;;
    esac
}

# The run has decided; loaders and versions only word it.
trial_failed() {
    find_loader "$bx_staged"
    case $bx_loader in ?*) [ "$bx_loader" = "${bx_canonical##*/}" ] || err unsupported-arch "found an interpreter that asks \
for $bx_loader, needed one for $bx_arch, with ${bx_canonical##*/}." "Push the interpreter for $bx_arch." 69 ;; esac
    first_line "$1"
    case $1 in *GLIBC_2.*) ;; *)
        err smoke-failed "found that the pushed interpreter does not run here: ${bx_line:-it said nothing}." \
            "Push one that was packed for $bx_arch with glibc${bx_libc_version:+ $bx_libc_version} or older." 73
        ;;
    esac
    bx_line=2.0
    bx_words=$1
    while [ "$bx_words" != "${bx_words#*GLIBC_2.}" ]; do
        bx_words=${bx_words#*GLIBC_2.}
        bx_text=2.${bx_words%%[!0-9]*}
        if older "$bx_line" "$bx_text"; then bx_line=$bx_text; fi
    done
    err libc-too-old "found glibc ${bx_libc_version:-of an unknown version}, needed ${bx_floor:-$bx_line}: the interpreter \
does not start without GLIBC_$bx_line." \
        "Use an image with a newer glibc, or an interpreter built against glibc ${bx_libc_version:-2.17} or older." 69
}

# undo: the box as it was before `install`; what was published stays.
undo() {
    [ -z "$bx_probe" ] || unprobe
    [ -z "$bx_summing" ] || ignore wait "$bx_summing"
    [ -z "$bx_stage" ] || ignore rm -rf "$bx_stage"
    [ -n "$bx_ground" ] || return 0
    [ -z "$bx_lock_made" ] || is_published "$bx_final" || ignore rm -f "$bx_lock"
    bx_dir=$bx_root
    while [ "$bx_dir" != "$bx_ground" ] && rmdir "$bx_dir" 2>/dev/null; do
        bx_dir=${bx_dir%/*}
    done
    [ "$bx_dir" != "$bx_ground" ] || restamp "$bx_ground"
}

main "$@"; exit $?
