"""Answers of the page's server: to whom, and with which headers."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from longtail.config.command_options import ViewOptions
from longtail.errors import ConfigError
from longtail.view import command
from longtail.view.run_files import open_runs
from longtail.view.server import COOKIE, POLICY
from support.http_threads import viewing
from support.synthetic_run import append_steps

TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "run"
    append_steps(path, 1, 3)
    return path


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[httpx.Client]:
    with viewing(open_runs([str(directory)])) as url, httpx.Client(base_url=url) as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200), ("/static/page.js", 200), ("/static/page.css", 200), ("/api/runs", 200),
        ("/api/runs/0/overview", 200),
        ("/api/runs/0/steps/2", 200), ("/api/runs/0/steps/-5", 200),
        ("/api/runs/0/steps/2/completions", 200), ("/api/runs/0/steps/2/completions/1", 200),
        ("/api/runs/0/steps/2/rollouts/1", 200), ("/static/../command.py", 404),
        ("/static/%2e%2e%2fcommand.py", 404), ("/static/x", 404), ("/api/runs/1/overview", 404),
        ("/api/runs/-1/overview", 404), ("/api/runs/x/steps/1", 422),
        ("/api/runs/0/steps/2/completions/99", 404), ("/api/runs/0/steps/2/rollouts/-1", 404),
        ("/docs", 404), ("/openapi.json", 404),
    ],
)  # fmt: skip
def test_files_and_data_are_served_under_the_pages_policy(client, path, status):
    response = client.get(path)
    assert response.status_code == status
    assert response.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_only_reads(client, method):
    assert client.request(method, "/api/runs").status_code == 405


def test_other_names_of_this_machine_are_refused_without_a_token(client):
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/api/runs", headers={"Host": "localhost:99"}).status_code == 200


def test_a_token_is_needed_once_and_then_kept_in_a_cookie(directory):
    runs = open_runs([str(directory)])
    with viewing(runs, token=TOKEN) as url, httpx.Client(base_url=url) as guarded:
        for path in ("/", "/api/runs", "/static/page.js", "/events", "/?token=no", "/?token=%ff"):
            assert guarded.get(path).status_code == 401
        moved = guarded.get("/", params={"token": TOKEN})
        assert (moved.status_code, moved.headers["location"]) == (303, "/")
        cookie = moved.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        guarded.cookies.clear()
        assert guarded.get("/api/runs", headers={"Cookie": f"{COOKIE}={TOKEN}"}).is_success
        assert guarded.get("/api/runs", headers={"Cookie": f"{COOKIE}=no"}).status_code == 401


def test_events_tell_which_runs_have_grown(directory, client):
    with client.stream("GET", "/events") as events:
        lines = (line for line in events.iter_lines() if line.startswith("data:"))
        assert next(lines) == "data: [0]"
        append_steps(directory, 4, 4)
        assert next(lines) == "data: [0]"
    assert client.get("/api/runs/0/overview").json()["columns"]["step"][-1] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "0.0.0.0"}, "a token is needed"),
        ({"runs": ("r",) * 5}, "at most 4"),
        ({"token_file": "/nowhere"}, "cannot be read"),
        ({}, "no run has written there"),
    ],
)
def test_wrong_options_are_named(change, message, monkeypatch):
    monkeypatch.delenv("LONGTAIL_VIEW_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=message):
        command.run(ViewOptions(**{"runs": ("nowhere",), "port": 0} | change))


@pytest.mark.slow
def test_the_command_serves_without_torch_until_a_signal(directory):
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
