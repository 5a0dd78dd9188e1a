"""Hosts on one machine: a network joins them, and /mnt and /dev/shm are each host's own.

    bed process --pipe--> init of host 0   own processes, network 10.77.0.1, /mnt, /dev/shm
                     \\--> init of host 1   own processes, network 10.77.0.2, /mnt, /dev/shm
                      \\-> init of the switch, with a bridge between them

Other paths are the machine's: code, and a file system that the hosts share where a test uses it.
A host ends with its init, and that with its pipe, so nothing survives the process of the bed: the
kernel kills all processes of a host, and removes its network and its file systems.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from longtail.system.cache import cache_directory

ROOT = Path(__file__).parents[2]
PLACE = Path("/mnt")
"""Directory of a host's own files: the same path on every host, with other content."""
PORT = 6379
PATIENCE_S = 240.0
_TOKEN = secrets.token_hex(32)
_INIT = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
for words in sys.argv[1:]:
    subprocess.run(words.split(), check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries orphans
print("up", flush=True)
sys.stdin.read()
"""
_TRAIN = "import sys; from longtail.cli.main import main; sys.exit(main(sys.argv[1:]))"
QUICK: dict[str, str | None] = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray's own detection of a silent host: about 5 s instead of 45 s."""


def unavailable_because() -> str | None:
    """Return why this machine cannot make hosts; None if it can."""
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian: apt-get install iproute2 util-linux)"
    probe = "ip link add probe0 type veth peer name probe1 && mount -t tmpfs none /mnt"
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()[:200]}"


class _Space:
    """Namespaces of processes, mounts and network, which end with this object's process."""

    def __init__(self, *setup: str) -> None:
        words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._outer = subprocess.Popen(
            [*words, sys.executable, "-I", "-S", "-c", _INIT, *setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "up\n", "the namespace was not made"
        self.init = children(self._outer.pid)[0]

    def inside(self, *words: str, only_net: bool = False) -> list[str]:
        """Return a command line that runs `words` inside."""
        spaces = ["--net"] if only_net else ["--net", "--mount", "--pid", "--wd=/"]
        return ["nsenter", f"--target={self.init}", *spaces, "--", *words]

    def ip(self, words: str) -> None:
        """Run `ip` in the network."""
        subprocess.run(self.inside("ip", *words.split(), only_net=True), check=True)

    def end(self) -> None:
        """Kill all processes inside."""
        self._outer.kill()  # `--kill-child`: and with it the init
        self._outer.communicate()


@dataclass(slots=True)
class Host:
    """A host of the bed.

    Example: host.run("train", "--run.dir=/mnt/run").returncode == 0
    """

    number: int
    space: _Space
    switch: _Space
    env: dict[str, str] = field(default_factory=dict)
    interpreter: str = sys.executable

    @property
    def address(self) -> str:
        """Address on the hosts' network."""
        return f"10.77.0.{self.number + 1}"

    @property
    def files(self) -> Path:
        """The host's own files (`PLACE`), as they are seen from outside."""
        return Path(f"/proc/{self.space.init}/root{PLACE}")

    @property
    def has_worker(self) -> bool:
        """Whether a worker of a run is here."""
        return "ray::Actor" in self.shell("ps ax")

    def head(self, *words: str) -> None:
        """Start the head of a Ray here."""
        self._ray("--head", f"--port={PORT}", "--include-dashboard=false", *words)

    def join(self, head: "Host", *words: str) -> None:
        """Join the Ray of another host."""
        self._ray(f"--address={head.address}:{PORT}", *words)

    def longtail(self, *words: str, log: Path) -> "Running":
        """Start `longtail WORDS` here; its output goes to `log`."""
        return self.python(_TRAIN, *words, log=log)

    def python(self, script: str, *words: str, log: Path) -> "Running":
        """Start a script here; its output goes to `log`."""
        command = [self.interpreter, "-c", script, *words]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                self.space.inside(*command), env=self.env, stdout=file, stderr=file
            )
        return Running(process, log)

    def shell(self, script: str) -> str:
        """Run a script here; return what it prints."""
        words = self.space.inside("sh", "-c", script)
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout

    def cut(self) -> None:
        """Cut the link to the other hosts."""
        self.switch.ip(f"link set port{self.number} down")

    def mend(self) -> None:
        """Connect the link again."""
        self.switch.ip(f"link set port{self.number} up")

    def limit(self, rate: str) -> None:
        """Limit what the host sends, as "10mbit"; `tbf` is in more kernels than `netem`."""
        self.shell(f"tc qdisc add dev eth0 root tbf rate {rate} burst 64k latency 200ms")

    def kill(self) -> None:
        """End the host at once, as a loss of power does: no connection is closed."""
        self.cut()
        self.space.end()

    def _ray(self, *words: str) -> None:
        store = "--object-store-memory=80000000"
        own = f"--node-ip-address={self.address}"
        ray = f"{self.interpreter} -m ray.scripts.scripts start --disable-usage-stats"
        self.shell(" ".join((ray, "--num-cpus=1", store, own, *words)))


@dataclass(slots=True)
class Running:
    """A command on a host."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, while the command runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def code(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(PATIENCE_S)


class Bed:
    """Makes hosts, on which one Python runs longtail and Ray."""

    def __init__(self, interpreter: str = sys.executable) -> None:
        self._interpreter = interpreter
        self.hosts: list[Host] = []
        self._switch = _Space()
        self._switch.ip("link add bridge type bridge")
        self._switch.ip("link set bridge up")

    def add(self, **env: str | None) -> Host:
        """Add a host with these variables in its environment; None unsets one of the bed's."""
        number = len(self.hosts)
        space = _Space(
            "mount --make-rprivate /",
            f"mount -t tmpfs -o size=200m none {PLACE}",
            "mount -t tmpfs -o size=200m none /dev/shm",
        )
        host = Host(number, space, self._switch, _environment(env), self._interpreter)
        self.hosts.append(host)
        port = f"port{number}"
        space.ip(f"link add eth0 type veth peer name {port} netns {self._switch.init}")
        space.ip(f"address add {host.address}/24 dev eth0")
        space.ip("link set lo up")
        space.ip("link set eth0 up")
        self._switch.ip(f"link set {port} master bridge")
        self._switch.ip(f"link set {port} up")
        kernels = cache_directory() / "kernels"  # compiling takes 15 s of a processor
        for name in ("home/.cache/longtail", "tmp"):
            (host.files / name).mkdir(parents=True)
        if kernels.exists():
            shutil.copytree(kernels, host.files / "home/.cache/longtail/kernels")
        return host

    def close(self) -> None:
        """End all hosts."""
        for host in self.hosts:
            host.space.end()
        self._switch.end()


@contextmanager
def bed(interpreter: str = sys.executable) -> Iterator[Bed]:
    """Make a bed, which ends with the context."""
    made = Bed(interpreter)
    try:
        yield made
    finally:
        made.close()


def cluster(made: Bed, num: int, **env: str | None) -> list[Host]:
    """Add hosts of one processor each, joined to one Ray; the first is its head."""
    hosts = [made.add(**env) for _ in range(num)]
    hosts[0].head()
    for host in hosts[1:]:
        host.join(hosts[0])
    return hosts


def _environment(more: dict[str, str | None]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    wanted = {
        **kept, **QUICK, "HOME": f"{PLACE}/home", "TMPDIR": f"{PLACE}/tmp",
        "RAY_TMPDIR": str(PLACE), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN, "PYTHONUNBUFFERED": "1", **more,
    }  # fmt: skip
    return {name: value for name, value in wanted.items() if value is not None}


def children(pid: int) -> Sequence[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
