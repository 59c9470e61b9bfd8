# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What the scripted model says: a script is a list of turns, a turn is one answer of the model.

One script serves every agent: a turn that runs something is given as a shell command, and for agents that act in Python
also as Python. It refuses to look at anything but how often the model has answered in a conversation: the same
conversation always gets the same answer, and any number of sessions may hold one at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer. `result` ends the task; otherwise `python` or `shell` is run, otherwise `text` is all it says."""

    shell: str = ""
    python: str = ""
    result: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    reasoning: str = ""
    timeout_s: float = 60.0

    @property
    def code(self) -> str:
        """The turn as a cell of an agent whose tool is Python with a `self.shell`."""
        if self.python or not self.shell:
            return self.python
        return f"print(await self.shell.run({self.shell!r}, timeout={self.timeout_s}))"


DONE = Turn(
    result={
        "solution_description": "The last share takes the cents that integer division drops.",
        "evidence": "python3 -m unittest: Ran 3 tests, OK",
        "command_to_verify": "python3 -m unittest -q",
    },
    text="The bill is split to the last cent and the tests pass.",
)

FIX = "        shares = [total // people] * people\n        shares[-1] += total - sum(shares)\n        return shares\n"
"""The repair of the sample repository's bug (sample_repo.py); it replaces the line `return [total // people] * people`."""

_EDIT = f"""
path = "bills/split.py"
text = open(path).read()
broken = "        return [total // people] * people\\n"
assert broken in text, text
open(path, "w").write(text.replace(broken, {FIX!r}))
"""

# A daemon that forgot its parent, its session and the marker in its environment, and does not hold a pipe open.
_DAEMONS = (
    "(setsid sleep 600 </dev/null >/dev/null 2>&1 &) ; "
    "(env -i PATH=\"$PATH\" setsid sh -c 'sleep 601 & exec sleep 602' </dev/null >/dev/null 2>&1 &) ; "
    "nohup sleep 603 </dev/null >/dev/null 2>&1 & echo started"
)


def fix_bug(_: int) -> list[Turn]:
    """Read the code, edit it, run the tests, return the result: for the repository of sample_repo.py."""
    return [
        Turn(
            shell="git log --oneline && cat bills/split.py; python3 -B -m unittest -q",
            reasoning="The shares do not add up: first see the code.",
        ),
        Turn(
            shell=f"python3 - <<'EOF'{_EDIT}EOF",
            python=(
                "text = open('bills/split.py').read()\n"
                "print(await self.shell.read('bills/split.py'))\n"
                "assert '        return [total // people] * people\\n' in text\n"
                f"fixed = text.replace('        return [total // people] * people\\n', {FIX!r})\n"
                "print(await self.shell.write_file('bills/split.py', fixed))"
            ),
        ),
        Turn(shell="python3 -B -m unittest -q && git diff --stat"),
        DONE,
    ]


def write_script(_: int) -> list[Turn]:
    """Answer with the repair as a bash script: for an agent that asks once and offers no tools."""
    return [Turn(text=f"python3 - <<'EOF'{_EDIT}EOF\npython3 -B -m unittest -q")]


def sleep(seconds: int) -> list[Turn]:
    """Let the agent's tool run for long (600 s unless told otherwise): for deadlines."""
    long = seconds or 600
    return [Turn(shell=f"echo sleeping; sleep {long}", timeout_s=long + 60.0), DONE]


def spin(_: int) -> list[Turn]:
    """Block the agent's own event loop for ever: only a signal ends it."""
    return [Turn(python="while True:\n    pass", shell="while :; do :; done"), DONE]


def daemons(_: int) -> list[Turn]:
    """Leave processes behind that left the session, the group and the environment marker."""
    return [Turn(shell=_DAEMONS), DONE]


def give_up(_: int) -> list[Turn]:
    """Never call a tool: say that it cannot be done, for ever."""
    return [Turn(text="I cannot complete this task.")]


def chatter(turns: int) -> list[Turn]:
    """Take many small turns (20 unless told otherwise), then return the result."""
    return [Turn(shell=f"echo turn {turn}") for turn in range(turns or 20)] + [DONE]


def delegate(_: int) -> list[Turn]:
    """Let the agent ask sub-agents of its own, and install NOOA's summarizer with so small a budget that it acts each turn."""
    define = (
        "from nooa import Agent, PredictStrategy, strategy\n"
        "from nooa.agents import TokenBudgetSummarizer\n"
        "from nooa.config.summarizer_config import TokenBudgetConfig\n"
        "class Titles(Agent):\n"
        "    @strategy(PredictStrategy())\n"
        "    async def title(self, text: str) -> str:\n"
        '        """Give the text a title."""\n'
        "        ...\n"
        "TokenBudgetSummarizer.install(self, config=TokenBudgetConfig(max_tokens=1, preserve_recent=2))\n"
        "print(await Titles().title('a long text'))"
    )
    return [Turn(python=define), *(Turn(shell=f"echo turn {turn}") for turn in range(6)), DONE]


def unparsed(_: int) -> list[Turn]:
    """Call a tool in the way of a server that has no parser for its model's tool calls."""
    call = "<tool_call><function=execute_python><parameter=code>print('dug out')</parameter></function></tool_call>"
    return [Turn(text=call), DONE]


def flood(_: int) -> list[Turn]:
    """Show more than anyone wants to see: as output, as a value, and as a prompt from then on."""
    return [Turn(python="print('x' * 10**6)\n['é' * 10**6] * 10", shell="yes | head -c 1000000"), DONE]


def look_around(_: int) -> list[Turn]:
    """Show what the agent's shell was given: folder, environment, open files."""
    return [Turn(shell="pwd -P; env; readlink /proc/self/fd/* /proc/$$/fd/*"), DONE]


_COUNT = """import asyncio
print(await self.increment(by=2))
print(await self.increment(by="two"))
print(await asyncio.gather(self.increment(by=1), self.increment(by=1), self.read()))
print(await self.increment(3, note="positional"))
print(await self.increment(), await self.broken())"""
_STUBBORN = """try:
    print(await self.increment(by=1))
except BaseException as error:
    print('caught', type(error).__name__)
print('still here')"""


def count(_: int) -> list[Turn]:
    """Call granted functions: one by one, at once, wrongly."""
    return [Turn(python=_COUNT), DONE]


def count_fast(calls: int) -> list[Turn]:
    """Call a granted function one time after the other (100 unless told otherwise)."""
    return [Turn(python=f"for _ in range({calls or 100}):\n    await self.increment()"), DONE]


def count_on(_: int) -> list[Turn]:
    """Call a granted function and go on whatever comes of it, for ever."""
    return [Turn(python=_STUBBORN)]


def save_env(_: int) -> list[Turn]:
    """Write what the agent's shell was given into a file, byte for byte."""
    return [Turn(shell="env -0 >/tmp/agent-env"), DONE]


def crash(_: int) -> list[Turn]:
    """Make the agent's process kill itself."""
    return [Turn(python="import os\nos.kill(os.getpid(), 9)", shell="kill -9 $PPID"), DONE]


SCRIPTS: dict[str, Callable[[int], list[Turn]]] = {
    "fix-bug": fix_bug,
    "write-script": write_script,
    "sleep": sleep,
    "spin": spin,
    "daemons": daemons,
    "give-up": give_up,
    "chatter": chatter,
    "delegate": delegate,
    "unparsed": unparsed,
    "flood": flood,
    "look-around": look_around,
    "count": count,
    "count-fast": count_fast,
    "count-on": count_on,
    "save-env": save_env,
    "crash": crash,
}


def turns_of(spec: str) -> list[Turn] | None:
    """Return the turns of `NAME` or `NAME:NUMBER`; None when there is no script of that name."""
    name, _, number = spec.partition(":")
    script = SCRIPTS.get(name)
    return script(int(number or 0)) if script and (not number or number.isdigit()) else None
