"""Clients of `longtail bench serve`: HTTP/1.1 with the standard library, a connection per call.

Run as a module, in a process of its own, it reads jobs from standard input, one JSON object a line,
and answers each with one; its arguments are the CPUs that it keeps to.

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
    """The answer to one call.

    Example: Answer(status=200, text="42", num_tokens=2, first_s=0.01, total_s=0.03, is_whole=True)
    """

    status: int
    """HTTP status; 0 if the connection ended before it."""
    text: str
    """Text of the completion; for any status but 200, the body."""
    num_tokens: int
    first_s: float
    """Seconds to the first event of a stream, else to the answer."""
    total_s: float
    is_whole: bool
    """Whether the answer is complete."""


def head(path: str, length: int) -> bytes:
    """Return the head of a POST request with a body of `length` bytes."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


async def request(port: int, body: bytes, *, leave_after: int | None = None) -> Answer:
    """Make one call; with `leave_after`, disconnect after that number of bytes of the answer."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        writer.write(head(PATH, len(body)) + body)
        await writer.drain()
        if leave_after is not None:
            await reader.read(leave_after)
            return _disconnected(began)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(lines.split(" ", 2)[1])
        first_s, chunks = 0.0, []
        if "transfer-encoding: chunked" in lines:
            while size := int(await reader.readline(), 16):
                chunks.append((await reader.readexactly(size + 2))[:-2])
                first_s = first_s or time.perf_counter() - began
        else:
            chunks.append(await reader.read())
        return _answer(status, b"".join(chunks).decode(), began, first_s)
    except (OSError, EOFError, ValueError):  # the server disconnected
        return _disconnected(began)
    finally:
        writer.close()


def _answer(status: int, text: str, began: float, first_s: float) -> Answer:
    total_s = time.perf_counter() - began
    is_whole, num_tokens = True, 0
    if status == 200:
        events = [text]
        if text.startswith("data:"):
            is_whole = text.endswith("data: [DONE]\n\n")
            events = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")]
        parsed = [json.loads(event) for event in events]
        choices = [choice for event in parsed for choice in event.get("choices", ())]
        is_whole = is_whole and any(choice["finish_reason"] for choice in choices)
        text = "".join(choice["text"] for choice in choices)
        usages = [event["usage"] for event in parsed if event.get("usage")]
        num_tokens = sum(usage["completion_tokens"] for usage in usages)
    return Answer(
        status=status,
        text=text,
        num_tokens=num_tokens,
        first_s=first_s or total_s,
        total_s=total_s,
        is_whole=is_whole,
    )


def _disconnected(began: float) -> Answer:
    total_s = time.perf_counter() - began
    return Answer(status=0, text="", num_tokens=0, first_s=total_s, total_s=total_s, is_whole=False)


async def load(port: int, clients: int, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the calls with a number of clients, each its next call after its last answer."""
    answers: list[Answer | None] = [None] * len(calls)
    left = iter(enumerate(calls))

    async def client() -> None:
        for index, call in left:
            answers[index] = await request(port, json.dumps(call).encode())

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "answers": [asdict(each) for each in answers if each is not None]}


def main() -> None:
    """Do jobs until standard input ends."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, [int(word) for word in sys.argv[1:]])
    for line in sys.stdin:
        print(json.dumps(asyncio.run(load(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
