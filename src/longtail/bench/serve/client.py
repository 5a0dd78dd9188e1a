"""Callers of a server, for `longtail bench serve`; a process of their own when time is taken.

HTTP/1.1 in the standard library alone, a connection a call, so that the client costs as little as a
client can. Run as a module it reads jobs from standard input, one JSON object a line, and answers
each with one; words on its command line are the CPUs that it keeps to.

    {"port": 8000, "clients": 2, "calls": [{"model": ...}, ...]} -> {"seconds": 1.0, "answers": ...}
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one call came to.

    Example: Answer(status=200, text="42", num_tokens=2, first_s=0.01, total_s=0.03, is_whole=True)
    """

    status: int
    """0: the connection ended before there was one."""
    text: str
    """Of the completion; of anything but 200, the body."""
    num_tokens: int
    first_s: float
    """Until the first event of a stream; else until the answer."""
    total_s: float
    is_whole: bool
    """It came to its end."""


async def ask(
    port: int, body: bytes, *, leave_after: int | None = None, path: str = PATH
) -> Answer:
    """Make one call; hang up after so many bytes of the answer, None: read it to the end."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        if leave_after is not None:
            await reader.read(leave_after)
            return _answer(0, b"", began, 0.0, is_whole=False)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(lines.split(" ", 2)[1])
        first, chunks, whole = 0.0, [], True
        if "transfer-encoding: chunked" in lines:
            while size := int(await reader.readline(), 16):
                chunks.append((await reader.readexactly(size + 2))[:-2])
                first = first or time.perf_counter() - began
        else:
            chunks.append(await reader.read())
        return _answer(status, b"".join(chunks), began, first, is_whole=whole)
    except (OSError, EOFError, ValueError):  # it hung up
        return _answer(0, b"", began, 0.0, is_whole=False)
    finally:
        writer.close()


def _answer(status: int, body: bytes, began: float, first: float, *, is_whole: bool) -> Answer:
    total = time.perf_counter() - began
    text, tokens = body.decode(), 0
    if status == 200:
        streamed = text.startswith("data:")
        is_whole = is_whole and (not streamed or text.endswith("data: [DONE]\n\n"))
        events = (
            [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            if streamed
            else [json.loads(text)]
        )
        choices = [choice for event in events for choice in event.get("choices", ())]
        is_whole = is_whole and any(choice["finish_reason"] for choice in choices)
        text = "".join(choice["text"] for choice in choices)
        tokens = sum(event["usage"]["completion_tokens"] for event in events if event.get("usage"))
    return Answer(
        status=status,
        text=text,
        num_tokens=tokens,
        first_s=first or total,
        total_s=total,
        is_whole=is_whole,
    )


async def load(port: int, clients: int, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Let so many clients make the calls, each the next one when it has its answer."""
    answers: list[Answer | None] = [None] * len(calls)
    left = iter(enumerate(calls))

    async def client() -> None:
        for index, call in left:
            answers[index] = await ask(port, json.dumps(call).encode())

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "answers": [asdict(each) for each in answers if each is not None]}


def main() -> None:
    """Do jobs until there are no more."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, [int(word) for word in sys.argv[1:]])
    for line in sys.stdin:
        print(json.dumps(asyncio.run(load(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
