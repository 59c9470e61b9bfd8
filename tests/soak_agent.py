# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The soak's two scripts for the inside of a box: the agent that writes and leaves daemons, and the hand that kills."""

from __future__ import annotations

from pathlib import Path

from containers import Box

PATH = "/work/chatty.sh"
KILL = "/work/kill.sh"

AGENT = r"""
# chatty.sh NAME LINES: numbered lines to stdout, each then to a side file; a daemon of one kind or another now and then.
i=0
while [ "$i" -lt "$2" ]; do
    i=$((i + 1))
    echo "line $i"
    echo "$i" >>"/work/side-$1"
    case $((i % 25)) in
        3) sleep 3000 & ;;
        8) setsid sleep 3000 >/dev/null 2>&1 </dev/null & ;;
        13) (env -i /usr/bin/setsid /bin/sh -c 'trap "" TERM HUP; sleep 3000; sleep 3000' >/dev/null 2>&1 </dev/null &) ;;
        17) head -c 300000 /dev/zero | tr '\0' x; echo ;;
        21) (env -i /usr/bin/setsid sleep 3000 >/dev/null 2>&1 </dev/null & kill -STOP $!) ;;
    esac
    sleep 0.03
done
"""

KILLER = r"""
# kill.sh WHAT SESSION-FOLDER: exit 0 if there was something to kill.
said=$(cat "$2/supervisor.json" 2>/dev/null) || exit 1
supervisor=${said#*'"pid":'} && supervisor=${supervisor%%,*}
watchdog=${said#*'"watchdog":['} && watchdog=${watchdog%%,*}
agent=$(cat "/proc/$supervisor/task/$supervisor/children" 2>/dev/null) && agent=${agent%% *}
[ -e "$2/receipt.json" ] && exit 1
case $1 in
    agent) [ -n "$agent" ] && kill -KILL "$agent" ;;
    supervisor) kill -KILL "$supervisor" ;;
    watchdog) kill -KILL "$watchdog" ;;
    both) kill -KILL "$watchdog"; kill -KILL "$supervisor" ;;
    stop-supervisor) kill -STOP "$supervisor" ;;
    stop-both) kill -STOP "$watchdog"; kill -STOP "$supervisor" ;;
    daemon | tail | pythons)
        for p in /proc/[0-9]*; do
            case $1:$(readlink "$p/exe"):$(tr '\0' ' ' <"$p/cmdline") in
                daemon:*:'sleep 3000 ' | tail:*'tail --session'* | pythons:*/python3*) kill -KILL "${p#/proc/}" ;;
            esac
        done
        :
        ;;
esac 2>/dev/null
"""


def put_into(box: Box, folder: Path) -> None:
    """Make /work in the box, with both scripts."""
    for text, remote in ((AGENT, PATH), (KILLER, KILL)):
        local = folder / Path(remote).name
        local.write_text(text.lstrip())
        box.put(local, remote)
    box.check("chmod 1777 /work")
