"""A stand-in for the Hugging Face hub on this machine, as far as downloads need it."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "1234567890" * 4
BRANCHES = ("main", "v2", COMMIT)


@dataclass
class FakeHub:
    """Repositories by id, each with its files; requests are recorded.

    Example: FakeHub(files={"owner/name": {"config.json": b"{}"}})
    """

    files: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    is_down: bool = False
    asked: list[str] = field(default_factory=list)

    def downloads(self) -> set[str]:
        """Return the names of all files that were sent."""
        sent = [path for path in self.asked if path.startswith("GET:") and "/resolve/" in path]
        return {path.rpartition("/")[2] for path in sent}


def _answer(hub: FakeHub, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and content of the answer to a request."""
    hub.asked.append(f"{method}:{path}")
    if hub.is_down:
        return 503, {}, b"down"
    words = path.partition("?")[0].strip("/").split("/")
    if words[:2] == ["api", "models"]:
        return _about(hub, "/".join(words[2:4]), words[4:])
    repository, name = "/".join(words[:2]), "/".join(words[4:])
    if repository in hub.gated:
        return 403, {"X-Error-Code": "GatedRepo"}, b""
    content = hub.files.get(repository, {}).get(name)
    if content is None:  # the client asks for more than models
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    digest = hashlib.sha256(content).hexdigest()
    return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, content


def _about(hub: FakeHub, repository: str, words: list[str]) -> tuple[int, dict[str, str], bytes]:
    if repository not in hub.files:
        return 401, {"X-Error-Code": "RepoNotFound"}, b""
    revision = words[1] if len(words) > 1 else "main"
    if revision not in BRANCHES:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    files = hub.files[repository]
    if words[:1] == ["tree"]:
        rows = [
            {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            for name, content in files.items()
        ]
        return 200, {}, json.dumps(rows).encode()
    siblings = [{"rfilename": name} for name in files]
    about = {"_id": "1", "id": repository, "sha": COMMIT, "siblings": siblings}
    return 200, {}, json.dumps(about).encode()


@contextmanager
def serve(hub: FakeHub) -> Iterator[str]:
    """Serve the hub on a port of this machine, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self) -> None:
            status, headers, content = _answer(hub, self.command, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = _send  # noqa: N815  (the names that http.server calls)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path, *, offline: bool) -> None:
    """Point huggingface_hub at the server of an address."""
    from huggingface_hub import constants

    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
