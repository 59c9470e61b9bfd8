# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A model server for benchmarks: answers each POST with the same JSON after a fixed time, and thinks of nothing.

python tests/benchmarks/slow_model.py SECONDS [BIND]     prints its URL as its first line
"""

from __future__ import annotations

import asyncio
import json
import sys

USAGE = {"input_tokens": 6400, "output_tokens": 50, "output_tokens_details": {"reasoning_tokens": 10}}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * 2000}]}
ANSWER = json.dumps({"id": "resp_1", "object": "response", "status": "completed", "output": [TEXT], "usage": USAGE}).encode()


async def serve(seconds: float, bind: str) -> None:
    """Serve until killed."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in asked.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
                await asyncio.sleep(seconds)
                writer.write(head + ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(one, bind, 0, backlog=512)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"))
