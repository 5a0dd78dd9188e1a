"""Figures of runs over hosts: `make bench-hosts` writes benchmarks/hosts.txt and hosts.json.

    python -m hosts.figures [--quick] FOLDER

All is measured in one run, on hosts of a bed that share this machine's cores: four hosts, of which
one, two and four have a worker, then three, of which one is killed again and again. `--quick` only
tries the script: two hosts, few steps, one kill.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from end_to_end.workshop import Workshop, build
from hosts.bed import PORT, Host, Running, bed, children, cluster, unavailable_because
from hosts.conftest import WORDS
from hosts.test_training import train
from longtail.assembly.trainer import open_workers
from longtail.bench.common.card import Table, by_position, print_card
from longtail.bench.common.timing import Log, Spread, progress
from longtail.bench.e2e.arms import Texts, groups_of
from longtail.bench.e2e.simulated import Messages, Simulated, Speeds, resampled, simulate
from longtail.cluster.timeline import event_of
from longtail.cluster.worker import Worker
from longtail.config.rl import load
from longtail.model.hf.model import save_model
from longtail.types import Request, SamplingParams
from support.tiny_models import tiny_model, tiny_tokenizer

_RUN = (*WORDS, "--run.checkpoint_every=1000", "--rollout.prompts_per_step=8")
_PLAIN = "--speculation.drafter=none"
WORK = (*_RUN, "--rollout.max_tokens=400")
"""32 texts of 150 tokens on average."""
LITTLE = (*_RUN, _PLAIN, "--rollout.max_tokens=1")
"""Next to no work: what is left is the fixed cost of a step."""
SUMS = (*_RUN, _PLAIN, "--rollout.max_tokens=8")
"""For a larger model: its gradients are nearly all that travels."""
LONG = (*WORK, _PLAIN, "--rollout.max_running=1", "--rollout.sharing=false")
"""Texts one after another: no worker is idle when a lost one is replaced."""
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4}
RAYS_OWN = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray's default patience with a silent host."""
_MESSAGES = "import sys; from hosts.figures import time_messages; time_messages(sys.argv[1:])"
KINDS = {"work": WORK, "little": LITTLE, "sums": SUMS}
_TASKS = 50
_STEPS = 8
"""Simulated steps."""
_STEP, _TOLD = "timing_s/step", ("network/", "timing_s/")
Found = tuple[list[Table], dict[str, Any]]
"""Tables, and the same for JSON."""


class Size(NamedTuple):
    """Numbers of workers, measured and simulated, steps of a run, and kills."""

    workers: tuple[int, ...] = (1, 2, 4)
    more: tuple[int, ...] = (1, 2, 4, 8, 32, 128)
    steps: int = 9
    kills: int = 10


QUICK = Size((1, 2), (1, 2, 8), steps=3, kills=1)


# ---- counters


class Sample(NamedTuple):
    """Counters at the end of a step."""

    received: tuple[int, ...]
    sent: tuple[int, ...]
    """Bytes of each host's link."""
    main_s: float
    """CPU seconds of the driver's main thread, which coordinates, packs and logs."""
    driver_s: float
    """The same of all its threads, Ray's included; graders are other processes."""


def link_bytes(table: str) -> tuple[int, int]:
    """Return received and sent bytes of eth0 from /proc/net/dev."""
    (line,) = [each for each in table.splitlines() if each.strip().startswith("eth0:")]
    numbers = line.partition(":")[2].split()
    return int(numbers[0]), int(numbers[8])


def cpu_s(stat: str) -> float:
    """Return the CPU seconds, user and system, of a process or thread from its `stat` in /proc."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ring_bytes(numbers: int, ranks: int) -> float:
    """Return the bytes that each rank sends, and receives, when whole numbers are added up."""
    return 2 * (ranks - 1) / ranks * 8 * numbers


def sample(hosts: Sequence[Host], run: Running) -> Sample:
    driver = f"/proc/{children(run.process.pid)[0]}"
    links = [link_bytes(Path(f"/proc/{each.space.init}/net/dev").read_text()) for each in hosts]
    received, sent = zip(*links, strict=True)
    stats = (f"{driver}/task/{Path(driver).name}/stat", f"{driver}/stat")
    return Sample(received, sent, *(cpu_s(Path(each).read_text()) for each in stats))


# ---- hosts that work


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of a run after the first."""

    workers: int
    at_work: list[int]
    """Hosts with a worker."""
    rows: list[dict[str, Any]]
    first: Sample
    last: Sample

    def spread(self, name: str) -> Spread:
        return Spread.of([row.get(name, 0.0) for row in self.rows])

    def a_step(self, counter: Callable[[Sample], float]) -> float:
        """Return how much a counter has grown a step."""
        return (counter(self.last) - counter(self.first)) / len(self.rows)

    def links(self) -> list[float]:
        """Return the bytes a step that each host with a worker has received, and sent."""
        ways = [lambda s, host: s.received[host], lambda s, host: s.sent[host]]
        return [self.a_step(partial(way, host=host)) for host in self.at_work for way in ways]

    def numbers(self) -> dict[str, Any]:
        """Return medians and means of a step."""
        return {
            **{name: self.spread(name).median for name in self.rows[0] if name.startswith(_TOLD)},
            "workers": self.workers,
            "step_s": self.spread("timing_s/step").numbers(),
            "links_bytes": self.links(),
            "sent_bytes": self.a_step(lambda s: sum(s.sent)),
            "main_thread_s": self.a_step(lambda s: s.main_s),
            "driver_s": self.a_step(lambda s: s.driver_s),
        }


def measure(
    workshop: Workshop, hosts: Sequence[Host], kind: str, workers: int, *words: str
) -> Measured:
    """Make a run, and read the counters after each step."""
    name = f"{kind}{workers}"
    run = train(workshop, hosts[0], name, *words, head=hosts[0], workers=workers)
    file, samples, at_work = workshop.path / name / "metrics.jsonl", list[Sample](), list[int]()
    for number in range(load(None, workshop.words(name, *words)[1:]).run.steps):
        run.until(lambda number=number: lines(file) > number)
        samples.append(sample(hosts, run))
        at_work = at_work or [each.number for each in hosts if works(each)]
    assert run.code() == 0, run.said()
    return Measured(workers, at_work, workshop.metrics(name)[1:], samples[0], samples[-1])


def lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def works(host: Host) -> bool:
    return "ray::_Actor" in host.shell("ps ax")


def on_hosts(size: Size, workshop: Workshop, log: Log) -> Found:
    """Measure steps, sums and messages, and predict those of more workers."""
    steps, found = f"--run.steps={size.steps}", dict[str, list[Measured]]()
    large, tokenizer, place = tiny_model(**LARGE), tiny_tokenizer(), workshop.path / "large"
    save_model(large, place, eos_ids=tokenizer.eos_ids)
    tokenizer.save(place)
    numbers = sum(each.numel() for each in large.parameters())
    assert workshop.train("one", *WORK, steps).code == 0
    one, texts = workshop.texts("one"), dict[int, str]()
    with bed() as made:
        hosts = cluster(made, max(size.workers))
        for count in size.workers:
            for kind, words in KINDS.items():
                more = (f"--model.path={place}", steps) if kind == "sums" else (steps,)
                run = measure(workshop, hosts, kind, count, *words, *more)
                found.setdefault(kind, []).append(run)
                log(f"{count} workers, {kind}: a step takes {run.spread(_STEP).text()} s")
            own = workshop.texts(f"work{count}")
            texts[count] = f"{sum(own.get(n) == one[n] for n in one)} of {len(one | own)}"
        messages = measure_messages(workshop, hosts)
    predicted = predict(workshop, found["work"][1], messages, size.more)
    values = {kind: [run.numbers() for run in runs] for kind, runs in found.items()}
    return [work_table(found["work"], texts), *more_tables(found, numbers, predicted)], values | {
        "equal_texts": texts,
        "ring_bytes": {count: ring_bytes(numbers, count) for count in size.workers},
        "messages": messages._asdict(),
        "predicted": [each.numbers() for each in predicted],
    }


def work_table(runs: Sequence[Measured], texts: Mapping[int, str]) -> Table:
    """Return the table of steps with work."""

    def megabytes(kind: str) -> Callable[[Measured], str]:
        return lambda run: f"{run.spread(f'network/{kind}_bytes').median / 1e6:.3f}"

    return Table(
        "One worker on each of some hosts; of a step: seconds, MB by kind and of all links, ms of "
        "CPU time of the driver's main thread, which coordinates, packs and logs, and of all threads",
        {
            "hosts": lambda run: run.workers,
            "texts of one process": lambda run: texts[run.workers],
            "step s": lambda run: run.spread(_STEP),
            **{kind: megabytes(kind) for kind in ("texts", "drafter", "other")},
            "links": lambda run: f"{run.a_step(lambda s: sum(s.sent)) / 1e6:.3f}",
            "main thread": lambda run: f"{1e3 * run.a_step(lambda s: s.main_s):.0f}",
            "driver": lambda run: f"{1e3 * run.a_step(lambda s: s.driver_s):.0f}",
        },
        runs,
    )


def more_tables(
    found: Mapping[str, Sequence[Measured]], numbers: int, predicted: Sequence["Predicted"]
) -> list[Table]:
    """Return the tables of gradients, and of more workers."""
    sums = [
        (run.workers, Spread.of([b / 1e6 for b in run.links()]), told / 1e6, f"{most:.1%}")
        for run in found["sums"]
        if (told := ring_bytes(numbers, run.workers))
        for most in [max(abs(each / told - 1.0) for each in run.links())]
    ]
    fixed = {run.workers: run.spread(_STEP) for run in found["little"]}
    more = [
        (
            each.workers,
            each.work.step_s / _STEPS,
            f"{1e3 * each.work.coordinator_s:.0f}",
            f"{1e3 * each.work.messages_s:.0f}",
            f"{each.share:.1%}",
            f"{1e3 * each.fixed_s:.0f}",
            fixed.get(each.workers) and fixed[each.workers].text(3),
        )
        for each in predicted
    ]
    return [
        Table(
            f"MB that the link of each worker's host receives, and sends, in a step of a model of "
            f"{numbers:,} parameters; predicted: 2 (W - 1) / W x 8 bytes for each",
            by_position("hosts", "measured", "predicted", "largest difference"),
            sums,
        ),
        Table(
            "The coordinator in simulated time, with measured messages: of a step with as many "
            "texts a worker as above; `fixed`: of one with next to no work, and as measured",
            by_position(
                "workers", "step s", "CPU ms", "messages ms", "share", "fixed ms", "fixed s"
            ),
            more,
        ),
    ]


# ---- more workers


def time_messages(words: Sequence[str]) -> None:
    """Print the seconds of messages to workers that generate, and of short tasks."""
    config = load(None, words)
    group = open_workers(config, max_prompt_len=8)
    group.publish()
    pool, sampling = group._pool, SamplingParams(max_tokens=config.rollout.max_tokens)
    requests = [Request(f"{i}#0", (5, 6), i, sampling, f"{i}") for i in range(32)]
    asks, polls = list[float](), list[float]()
    for worker in range(pool.size):
        pool.start(worker, Worker.generate, requests)
    num = 0
    while not num:
        num = len(pool.wait(0.0))
        began = time.perf_counter()
        pool.ask(pool.size - 1, Worker.lengths)
        asks.append(time.perf_counter() - began)
        pool.progress(range(pool.size))
        polls.append((time.perf_counter() - began - asks[-1]) / pool.size)
    while num < pool.size:
        num += len(pool.wait(1.0))
    began, num = time.perf_counter(), 0
    for _ in range(_TASKS):
        for worker in range(pool.size):
            pool.start(worker, Worker.ready)
        num += pool.size
        while num:
            num -= len(pool.wait(1.0))
    task_s = (time.perf_counter() - began) / _TASKS / pool.size
    group.close()
    print(json.dumps([task_s, statistics.median(asks), statistics.median(polls)]), flush=True)


def measure_messages(workshop: Workshop, hosts: Sequence[Host]) -> Messages:
    """Return the seconds of messages to a worker on each host."""
    own = (f"--cluster.workers={len(hosts)}", f"--cluster.address={hosts[0].address}:{PORT}")
    log = workshop.path / "messages.log"
    run = hosts[0].python(_MESSAGES, *workshop.words("messages", *WORK, *own)[1:], log=log)
    assert run.code() == 0, run.said()
    return Messages(*json.loads(run.said().splitlines()[-1]))


class Predicted(NamedTuple):
    """Simulated steps of work, and of next to none."""

    workers: int
    work: Simulated
    little: Simulated

    @property
    def share(self) -> float:
        """Share of a step of work in which the coordinator computes or messages pass."""
        return (self.work.coordinator_s + self.work.messages_s) / (self.work.step_s / _STEPS)

    @property
    def fixed_s(self) -> float:
        return self.little.step_s / _STEPS + self.little.coordinator_s

    def numbers(self) -> dict[str, Any]:
        own = {"workers": self.workers, "share": self.share, "fixed_s": self.fixed_s}
        return own | {"work": asdict(self.work), "little": asdict(self.little)}


def predict(
    workshop: Workshop, own: Measured, messages: Messages, counts: Sequence[int]
) -> list[Predicted]:
    """Simulate workers that have as many texts each as those of a measured run."""
    name = f"work{own.workers}"
    config = load(None, workshop.words(name, *WORK)[1:])
    groups = groups_of(workshop.rollouts(name), config)[1:]
    groups = [groups[step % len(groups)] for step in range(_STEPS)]
    rollout_s, learn_s, publish_s, step_s = (
        own.spread(f"timing_s/{each}").median for each in ("rollout", "learn", "publish", "step")
    )
    trial = [(texts, Speeds(1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)) for texts in groups]
    trial_s = simulate(config, trial, own.workers, Messages(0.0, 0.0, 0.0)).rollout_s / _STEPS
    others_s = step_s - rollout_s - learn_s - publish_s
    speeds = Speeds(1e-3 * rollout_s / trial_s, 0.0, 0.0, learn_s, publish_s, others_s)

    def simulated(texts: Sequence[Sequence[Texts]], speeds: Speeds, workers: int) -> Simulated:
        drawn = resampled(texts, workers / own.workers)
        return simulate(config, [(step, speeds) for step in drawn], workers, messages)

    short = [[e._replace(lengths=(1,) * len(e.lengths)) for e in step] for step in groups]
    nothing = Speeds(1e-6, 0.0, 0.0, 0.0, 0.0, 0.0)
    return [
        Predicted(count, simulated(groups, speeds, count), simulated(short, nothing, count))
        for count in counts
    ]


# ---- hosts that are killed


def recoveries(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, bool]]:
    """Return the seconds from each loss of a generating worker until its texts are written again.

    With whether its own new process writes them.
    """
    spans = sorted((each for each in events if each.get("ph") == "X"), key=lambda each: each["ts"])
    found = []
    for index, dead in enumerate(spans):
        before = [each["name"] for each in spans[:index] if each["tid"] == dead["tid"]]
        if dead["name"] == "dead" and before[-1:] == ["generating"]:
            again = next(each for each in spans[index:] if each["name"] == "generating")
            found.append(((again["ts"] - dead["ts"]) / 1e6, again["tid"] == dead["tid"]))
    return found


def kill_hosts(
    workshop: Workshop, name: str, num: int, log: Log, **env: str
) -> tuple[list[float], list[tuple[float, bool]]]:
    """Kill the host of worker 1 while it generates, and add another for it; again and again.

    Return the seconds to each notice, and the recoveries from there.
    """
    noticed, folder = list[float](), workshop.path / name
    rows, trace = folder / "metrics.jsonl", folder / "trace.json"
    with bed() as made:
        head, *others = cluster(made, 3, **env)
        words = (*LONG, "--run.steps=100000", "--cluster.worker_timeout_s=180")
        run = train(workshop, head, name, *words, head=head, workers=2)
        for number in range(num):
            begun = lines(rows)
            run.until(lambda begun=begun: lines(rows) > begun)
            time.sleep(1.0)
            host = next(each for each in others if works(each))
            host.kill()
            began = time.monotonic()
            run.until(lambda number=number: run.said().count("it is replaced") > number)
            noticed.append(time.monotonic() - began)
            log(f"{name}: kill {number + 1} of {num}, noticed after {noticed[-1]:.1f} s")
            run.until(lambda number=number: trace.read_text().count('"dead"') > number)
            others.remove(host)
            if number + 1 < num:
                others.append(made.add(**env))
                others[-1].join(head)
    events = [event_of(line) for line in trace.read_bytes().splitlines(keepends=True)]
    return noticed, recoveries(events)


def of_kills(size: Size, workshop: Workshop, log: Log) -> Found:
    """Measure notices and recoveries with a quick Ray, and once with Ray's own patience."""
    found = {
        "notice within 5 s": kill_hosts(workshop, "kills", size.kills, log),
        "Ray's defaults": kill_hosts(workshop, "defaults", 1, log, **RAYS_OWN),
    }
    rows = [
        (
            name,
            len(noticed),
            Spread.of(noticed).text(1),
            Spread.of([seconds for seconds, _ in again]).text(1),
            sum(is_own for _, is_own in again),
        )
        for name, (noticed, again) in found.items()
    ]
    title = "Hosts killed while generating; s until noticed, and from there until another writes on"
    columns = by_position("Ray's patience", "kills", "noticed", "recovered", "by a new process")
    return [Table(title, columns, rows)], {"kills": found}


def main() -> None:
    """Measure all, and write the card."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if why := unavailable_because():
        sys.exit(why)
    size, load_average = QUICK if options.quick else Size(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="longtail-hosts-") as place:
        workshop, log = build(Path(place)), progress("hosts")
        tables, values = on_hosts(size, workshop, log)
        more, kills = of_kills(size, workshop, log)
    about = {"bench": "hosts", "load_average": load_average, "ray": ray.__version__}
    sentence = f"Ray {ray.__version__}; load average at the start {load_average:.1f}"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        print_card([*tables, *more], about | values | kills, sentences=[sentence])
    text = said.getvalue()
    print(text)
    (options.folder / "hosts.txt").write_text(text)
    (options.folder / "hosts.json").write_text(text.splitlines()[-1] + "\n")


if __name__ == "__main__":
    main()
