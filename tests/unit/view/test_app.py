"""Answers of the page's server: to whom, and with which headers."""

import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from longtail.errors import ConfigError
from longtail.view.access import COOKIE, POLICY
from longtail.view.options import read_options
from longtail.view.run_files import open_runs
from longtail.view.server import running
from support.synthetic_run import append_steps

TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "run"
    append_steps(path, 1, 3)
    return path


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[httpx.Client]:
    with running(open_runs([str(directory)])) as url, httpx.Client(base_url=url) as opened:
        yield opened


@pytest.fixture(scope="module")
def guarded(directory: Path) -> Iterator[httpx.Client]:
    with running(open_runs([str(directory)]), token=TOKEN) as url, httpx.Client(base_url=url) as c:
        yield c


@pytest.mark.parametrize(
    "path",
    [
        "/", "/static/page.js", "/static/uPlot.LICENSE.txt", "/api/runs", "/api/runs/0/overview",
        "/api/runs/0/overview?first=2&last=9", "/api/runs/0/steps/2", "/api/runs/0/steps/-5",
        "/api/runs/0/steps/2/rollouts", "/api/runs/0/steps/2/rollouts/1",
        "/api/runs/0/steps/2/timeline?begin=0&end=1",
    ],
)  # fmt: skip
def test_the_pages_files_and_data_are_served_under_its_policy(
    client: httpx.Client, path: str
) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/static/../options.py", 404), ("/static/%2e%2e%2foptions.py", 404), ("/static/x", 404),
        ("/api/runs/1/overview", 404), ("/api/runs/-1/overview", 404), ("/api/runs/x/steps/1", 422),
        ("/api/runs/0/steps/2/rollouts/99", 404),
        ("/api/runs/0/steps/9/timeline?begin=0&end=1", 404),
        ("/api/runs/0/steps/2/timeline?begin=nan&end=1", 400),
        ("/api/runs/0/steps/2/timeline?begin=2&end=1", 400), ("/docs", 404), ("/openapi.json", 404),
    ],
)  # fmt: skip
def test_other_paths_are_refused(client: httpx.Client, path: str, status: int) -> None:
    assert client.get(path).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_only_reads(client: httpx.Client, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/7/overview", "/nowhere"])
def test_head_is_answered_as_get_without_a_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert {**head.headers, "date": ""} == {**get.headers, "date": ""}


def test_head_of_the_events_ends(client: httpx.Client) -> None:
    assert client.head("/events").headers["content-type"].startswith("text/event-stream")
    assert client.get("/api/runs").is_success  # on the same connection


def test_other_names_of_this_machine_are_refused_without_a_token(client: httpx.Client) -> None:
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/api/runs", headers={"Host": "localhost:99"}).status_code == 200


def test_a_token_is_needed_once_and_then_kept_in_a_cookie(guarded: httpx.Client) -> None:
    for path in ("/", "/api/runs", "/static/page.js", "/events", "/?token=wrong", "/?token=%ff"):
        assert guarded.get(path).status_code == 401
    moved = guarded.get("/", params={"token": TOKEN})
    assert moved.status_code == 303
    assert moved.headers["location"] == "/"
    cookie = moved.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    guarded.cookies.clear()
    assert guarded.get("/api/runs", headers={"Cookie": f"{COOKIE}={TOKEN}"}).status_code == 200
    assert guarded.get("/api/runs", headers={"Cookie": f"{COOKIE}=no"}).status_code == 401
    assert guarded.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).is_success
    assert guarded.get("/api/runs", headers={"Authorization": "Bearer no"}).status_code == 401


def test_events_tell_which_runs_have_grown(directory: Path, client: httpx.Client) -> None:
    with client.stream("GET", "/events") as events:
        lines = (line for line in events.iter_lines() if line.startswith("data:"))
        assert next(lines) == "data: [0]"
        append_steps(directory, 4, 4)
        assert next(lines) == "data: [0]"
    assert client.get("/api/runs/0/overview").json()["last"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "0.0.0.0"}, "a token is needed"),
        ({"port": 70_000}, "--port = 70000: it must be from 0 to 65535"),
        ({"runs": ["r"] * 5}, "at most 4"),
        ({"token_file": "/nowhere"}, "cannot be read"),
    ],
)
def test_wrong_options_are_named(
    change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGTAIL_VIEW_TOKEN", raising=False)
    given = {"runs": ["r"], "host": "127.0.0.1", "port": 0, "token_file": None}
    with pytest.raises(ConfigError, match=message):
        read_options(Namespace(**given | change))


def test_a_token_opens_the_page_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAIL_VIEW_TOKEN", TOKEN)
    given = Namespace(runs=["r"], host="0.0.0.0", port=0, token_file=None)
    assert read_options(given).token == TOKEN


@pytest.mark.slow
def test_the_command_serves_without_torch_until_a_signal(directory: Path) -> None:
    code = (
        "import sys; from longtail.cli.main import main; "
        "code = main(sys.argv[1:]); sys.exit(3 if 'torch' in sys.modules else code)"
    )
    words = [sys.executable, "-c", code, "view", str(directory), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", run.stdout.readline())
        assert url is not None
        with httpx.stream("GET", f"{url[0]}/events") as events:  # an open page does not hold it up
            assert next(events.iter_lines()) == "event: changed"
            run.send_signal(signal.SIGTERM)
            assert run.wait() == 0
