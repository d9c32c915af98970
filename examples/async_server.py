"""Serves completions over TCP: a client sends a line and gets the streamed reply.

Usage: async_server.py [MODEL [PORT]]. Try: nc 127.0.0.1 8765. `exl serve-lite` is the full server.
"""

from __future__ import annotations

import asyncio
import sys

from exl_core import AsyncGenerator, DynamicGenerator, ExlError, load_model


async def answer(
    jobs: AsyncGenerator, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One client. Its requests run in one batch with those of the others."""
    try:
        while line := await reader.readline():
            try:
                request = jobs.generator.request(line.decode().strip(), max_tokens=16)
                async for result in await jobs.submit(request):
                    writer.write(result.text.encode())
                    await writer.drain()  # a client that leaves cancels only its own job
            except (ExlError, UnicodeDecodeError) as error:
                writer.write(f"error: {error}".encode())
            writer.write(b"\n")
    finally:
        writer.close()


async def serve(model: str | None = None, port: str = "8765") -> None:
    async with AsyncGenerator(DynamicGenerator(load_model(model))) as jobs:
        server = await asyncio.start_server(
            lambda reader, writer: answer(jobs, reader, writer), "127.0.0.1", int(port)
        )
        print("port", server.sockets[0].getsockname()[1], flush=True)
        async with server:
            await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:3]))
