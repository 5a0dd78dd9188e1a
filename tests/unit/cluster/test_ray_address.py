"""Whether a Ray answers at an address: found out before any work, within seconds."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from longtail.cluster.ray import address as reach
from longtail.cluster.ray.address import check_answers
from longtail.config.rl import RunConfig
from longtail.errors import ClusterError


@pytest.fixture
def server() -> Iterator[Callable[[bytes | None], str]]:
    """An address where somebody listens, who answers these bytes; None: nothing."""
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as sock:

        def answer(words: bytes) -> None:
            with sock.accept()[0] as connection:
                assert connection.recv(100).startswith(b"PRI * HTTP/2.0")
                connection.sendall(words)

        def begin(words: bytes | None) -> str:
            if words is not None:
                pool.submit(answer, words)
            return f"127.0.0.1:{sock.getsockname()[1]}"

        yield begin


def test_a_server_that_speaks_grpc_is_taken(server):
    check_answers(server(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))))


@pytest.mark.parametrize("address", ["", "auto", "local", "here"])
def test_what_is_no_address_is_left_to_ray(address):
    check_answers(address)


def test_another_server_is_refused(server):
    address = server(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(
        ClusterError, match=r"no Ray answers there \(what answers is something else"
    ):
        check_answers(address)


def test_a_server_that_says_nothing_is_refused(server, monkeypatch):
    monkeypatch.setattr(reach, "ANSWER_S", 0.2)
    with pytest.raises(
        ClusterError, match=r"cluster.address = '127\S+': .*timed out.*leave it out"
    ):
        check_answers(server(None))


@pytest.mark.parametrize("port", ["closed", "99999999999"])
def test_a_place_where_nobody_listens_is_refused(port):
    with socket.socket() as sock:  # bound, so that nobody else takes it; closed to connections
        sock.bind(("127.0.0.1", 0))
        where = str(sock.getsockname()[1]) if port == "closed" else port
        with pytest.raises(ClusterError, match="no Ray answers there"):
            check_answers(f"ray://127.0.0.1:{where}")


def test_it_takes_less_than_ten_seconds():
    # A connection, the beginning of an answer; then Ray's own, see `RayWorkerPool`.
    assert 2 * reach.ANSWER_S + 5.0 < 10.0
    assert RunConfig().cluster.address == "", "by default nothing is asked"
