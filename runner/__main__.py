# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Where the prelude hands over to the runner.

It refuses to import what the verb at hand does not need: `relay` runs again and again, and each time a model call waits for it.
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit status (wire.ExitStatus)."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["relay"]:
        from boxstrap.runner import relay_verb  # noqa: PLC0415 (see above)

        return relay_verb.main(words[1:])
    from boxstrap.runner import verbs  # noqa: PLC0415 (see above)

    return verbs.main(words)


if __name__ == "__main__":
    raise SystemExit(main())
