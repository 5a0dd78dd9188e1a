"""Listening sockets of processes; end_to_end/test_open_ports.py has those of a whole run."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from longtail.system.files import process_of
from support.listening import Listening, family, listening

LISTEN = """
import socket, sys
sock = socket.socket()
sock.bind((sys.argv[1], 0))
sock.listen()
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("address", "is_loopback"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_socket_of_a_child_is_found_with_its_address(address, is_loopback):
    words = [sys.executable, "-c", LISTEN, address]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert child.pid in family(os.getpid())
        (found,) = listening([child.pid])
        child.communicate()
    assert (found.address, found.port, found.is_loopback) == (address, port, is_loopback)


def test_ipv6_sockets_are_found():
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::ffff:127.0.0.1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        sock.listen()
        found = {each.port: each for each in listening([os.getpid()])}[sock.getsockname()[1]]
    assert found.address == "::ffff:127.0.0.1"
    assert found.is_loopback


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1"]
)
def test_an_address_that_other_machines_reach_is_not_loopback(address):
    assert not Listening(pid=1, program="raylet", address=address, port=1).is_loopback


def test_a_socket_that_does_not_listen_is_not_reported():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert port not in {each.port for each in listening([os.getpid()])}


def test_the_process_of_a_run_is_found_by_its_lock(tmp_path: Path):
    assert process_of(tmp_path) is None
    (tmp_path / ".lock").touch()
    assert process_of(tmp_path) is None
    with open(tmp_path / ".lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert process_of(tmp_path) == os.getpid()
