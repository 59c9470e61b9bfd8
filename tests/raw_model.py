# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A model server of nothing but bytes: records each request as it came on the wire, and answers with what it was given.

It refuses to understand anything: that is how a byte that changed on the way is seen.
"""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


def answer(body: bytes, *, kind: str = "application/json", status: int = 200, head: Sequence[str] = ()) -> list[bytes]:
    """Make an answer with a length."""
    lines = [f"HTTP/1.1 {status} Word", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *head]
    return ["\r\n".join([*lines, "", ""]).encode() + body]


def chunked(pieces: Sequence[bytes], *, kind: str = "text/event-stream", end: bool = True) -> list[bytes]:
    """Make an answer in chunks, one write a piece."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return [head, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), *([b"0\r\n\r\n"] if end else [])]


class RawModel:
    """Answers its n-th request with `answers[n]` (the last one for all that follow), write by write, `pause_s` between them."""

    def __init__(self, *answers: Sequence[bytes], pause_s: float = 0.0, tls: ssl.SSLContext | None = None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.written: list[float] = []
        self._pause_s = pause_s
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> RawModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.close()

    def heads(self) -> list[dict[str, str]]:
        """Give the headers of each request, names in lower case."""
        lines = [request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:] for request in self.requests]
        return [{name.lower(): value for name, _, value in (line.partition(": ") for line in some)} for some in lines]

    def targets(self) -> list[str]:
        """Give the first line of each request, without the version."""
        return [request.split(b" HTTP/")[0].decode() for request in self.requests]

    def bodies(self) -> list[bytes]:
        """Give the body of each request."""
        return [request.partition(b"\r\n\r\n")[2] for request in self.requests]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            data = b""
            while True:
                while b"\r\n\r\n" not in data:
                    piece = client.recv(65536)
                    if not piece:
                        return
                    data += piece
                head, _, rest = data.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                size = int(length[1]) if length else 0
                while len(rest) < size:
                    rest += client.recv(65536)
                data = rest[size:]
                with self._lock:
                    self.requests.append(head + b"\r\n\r\n" + rest[:size])
                    pieces = self.answers[min(len(self.requests), len(self.answers)) - 1]
                for piece in pieces:
                    client.sendall(piece)
                    self.written.append(time.monotonic())
                    time.sleep(self._pause_s)
                if b"Transfer-Encoding" not in pieces[0] and b"Content-Length" not in pieces[0]:
                    return  # its end is the end of the connection
                if pieces and pieces[-1] == b"":
                    return
        except OSError:
            return
        finally:
            client.close()


def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Make a server's TLS context for localhost, and the file of its certificate, which nobody trusts yet."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context, cert
