"""The check that a Ray answers at an address, before any work and within seconds."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from longtail.cluster.ray.address import ANSWER_S, check_answers
from longtail.config.rl import RunConfig
from longtail.errors import ClusterError


@pytest.fixture
def server() -> Iterator[Callable[[bytes | None], str]]:
    """Return the address of a server that answers these bytes; None: no answer."""
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


def test_a_server_that_speaks_grpc_is_accepted(server):
    check_answers(server(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))))


@pytest.mark.parametrize("address", ["", "auto", "local", "here"])
def test_names_that_are_no_address_are_left_to_ray(address):
    check_answers(address)


def test_another_server_is_refused(server):
    address = server(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(
        ClusterError, match=r"no Ray answers there \(what answers is something else"
    ):
        check_answers(address)


def test_a_silent_server_is_refused(server):
    with pytest.raises(
        ClusterError, match=r"cluster.address = '127\S+': .*timed out.*leave it out"
    ):
        check_answers(server(None), timeout_s=0.2)


@pytest.mark.parametrize("port", ["closed", "99999999999"])
def test_an_address_without_a_listener_is_refused(port):
    with socket.socket() as sock:  # bound, so that no other process takes it; closed to connections
        sock.bind(("127.0.0.1", 0))
        where = str(sock.getsockname()[1]) if port == "closed" else port
        with pytest.raises(ClusterError, match="no Ray answers there"):
            check_answers(f"ray://127.0.0.1:{where}")


def test_the_check_takes_less_than_ten_seconds():
    # A connection, the beginning of an answer; then Ray's own, see `RayWorkerPool`.
    assert 2 * ANSWER_S + 5.0 < 10.0
    assert RunConfig().cluster.address == "", "by default nothing is asked"
