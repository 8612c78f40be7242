"""A web server that takes a body and answers with as many bytes as `X-Answer` asks for. Standard library only: it is
copied to the machine it runs on.

    python echo.py PORT
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            await reader.readexactly(int(fields.get("content-length", 0)))
            size = int(fields.get("x-answer", 0))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
            await writer.drain()
    writer.close()


async def main(port: int) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
