"""HTTP by hand, for what well-behaved clients do not do: breaking off within a request, reading very slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WINDOW = 2048  # bytes that the kernel may keep for a slow reader


@dataclass
class RawClient:
    """One connection."""

    host: str
    socket: socket.socket

    @classmethod
    async def open(cls, url: str) -> RawClient:
        place = urlsplit(url)
        one = socket.socket()
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)
        await asyncio.get_running_loop().sock_connect(one, (place.hostname or "", place.port or 80))
        return cls(place.netloc, one)

    async def send(self, path: str, body: dict[str, Any], part: float = 1.0) -> None:
        """Posts a body, or a part of the request."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
        whole = f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
        await asyncio.get_running_loop().sock_sendall(self.socket, whole[: int(len(whole) * part)])

    async def read_slowly(self, bite: int, pause: float) -> tuple[int, list[str]]:
        """The status, and the lines of a chunked body, read in bites with pauses (seconds) between them."""
        loop, found = asyncio.get_running_loop(), b""
        while more := await loop.sock_recv(self.socket, bite):
            found += more
            await asyncio.sleep(pause)
        head, _, rest = found.partition(b"\r\n\r\n")
        body = b""
        while b"chunked" in head and rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return int(head.split()[1]), [line for line in body.decode().split("\n") if line]

    def reset(self) -> None:
        """Resets the connection."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
