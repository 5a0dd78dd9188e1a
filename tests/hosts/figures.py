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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
from longtail.types import SamplingParams
from support.tiny_models import tiny_model, tiny_tokenizer

_RUN = (*WORDS, "--run.checkpoint_every=1000", "--rollout.prompts_per_step=8")
_PLAIN = "--speculation.drafter=none"
KINDS = {
    "work": (*_RUN, "--rollout.max_tokens=400"),  # 32 texts of 150 tokens
    "little": (*_RUN, _PLAIN, "--rollout.max_tokens=1"),  # the fixed cost of a step
    "sums": (*_RUN, _PLAIN, "--rollout.max_tokens=8"),  # of a larger model: its gradients travel
}
_ALONE = ("--rollout.group_size=12", "--rollout.max_running=1", "--rollout.sharing=false", _PLAIN)
LONG = (*KINDS["work"], *_ALONE, "--run.steps=100000", "--cluster.worker_timeout_s=180")
"""Text after text, for longer than a new process needs: another worker is not idle before."""
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4}
RAYS_OWN = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray's default patience with a silent host."""
_MESSAGES = "import sys; from hosts.figures import time_messages; time_messages(sys.argv[1:])"
_TASKS = 50
_STEPS = 8
"""Simulated steps."""
Found = tuple[list[Table], dict[str, Any]]
"""Tables, and their numbers for JSON."""


class Size(NamedTuple):
    """Numbers of workers, measured and simulated, steps of a run, and kills."""

    workers: tuple[int, ...] = (1, 2, 4)
    more: tuple[int, ...] = (1, 2, 4, 8, 32, 128)
    steps: int = 8
    kills: int = 10


QUICK = Size((1, 2), (1, 2, 8), steps=3, kills=1)


# ---- hosts that work


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of a run after the first; bytes and CPU seconds are means."""

    workers: int
    step_s: Spread
    medians: dict[str, float]
    """Metrics of time and of the network."""
    links: list[float]
    """Bytes that each host has received and sent, one host after another."""
    at_work: list[int]
    """Hosts with a worker."""
    main_s: float
    """CPU time of the driver's main thread, which coordinates, packs and logs."""
    driver_s: float
    """The same of all its threads, Ray's included; graders are other processes."""

    def of_workers(self) -> list[float]:
        """Return the part of `links` of hosts with a worker."""
        return [each for host in self.at_work for each in self.links[2 * host : 2 * host + 2]]


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


def counters(hosts: Sequence[Host], run: Running) -> list[float]:
    """Return CPU seconds of the driver's main thread and process, then the bytes of all links."""
    pid = children(run.process.pid)[0]
    stats = (f"/proc/{pid}/task/{pid}/stat", f"/proc/{pid}/stat")
    tables = [Path(f"/proc/{host.space.init}/net/dev").read_text() for host in hosts]
    return [
        *(cpu_s(Path(each).read_text()) for each in stats),
        *(each for table in tables for each in link_bytes(table)),
    ]


def measure(
    workshop: Workshop, hosts: Sequence[Host], kind: str, workers: int, *words: str
) -> Measured:
    """Make a run, and read the counters after each step."""
    name = f"{kind}{workers}"
    run = train(workshop, hosts[0], name, *words, head=hosts[0], workers=workers)
    file, samples, at_work = (
        workshop.path / name / "metrics.jsonl",
        list[list[float]](),
        list[int](),
    )
    for number in range(load(None, workshop.words(name, *words)[1:]).run.steps):
        run.until(lambda number=number: lines(file) > number)
        samples.append(counters(hosts, run))
        at_work = at_work or [each.number for each in hosts if works(each)]
    assert run.code() == 0, run.said()
    rows = workshop.metrics(name)[1:]
    told = [each for each in rows[0] if each.startswith(("network/", "timing_s/"))]
    medians = {each: statistics.median(row[each] for row in rows) for each in told}
    step_s = Spread.of([row["timing_s/step"] for row in rows])
    main_s, driver_s, *links = np.diff(samples, axis=0).mean(0).tolist()
    return Measured(workers, step_s, medians, links, at_work, main_s, driver_s)


def lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def works(host: Host) -> bool:
    return "ray::_Actor" in host.shell("ps ax")


def on_hosts(size: Size, workshop: Workshop, log: Log) -> Found:
    """Measure steps, sums and messages, and predict those of more workers."""
    steps, place = f"--run.steps={size.steps}", workshop.path / "large"
    large, tokenizer = tiny_model(**LARGE), tiny_tokenizer()
    save_model(large, place, eos_ids=tokenizer.eos_ids)
    tokenizer.save(place)
    assert workshop.train("one", *KINDS["work"], steps).code == 0
    one, texts, found = workshop.texts("one"), list[str](), {kind: [] for kind in KINDS}
    with bed() as made:
        hosts = cluster(made, max(size.workers))
        for count in size.workers:
            for kind, words in KINDS.items():
                model = place if kind == "sums" else workshop.model
                more = (steps, f"--model.path={model}")
                found[kind].append(measure(workshop, hosts, kind, count, *words, *more))
                log(f"{count} workers, {kind}: {found[kind][-1].step_s.text()} s a step")
            own = workshop.texts(f"work{count}")
            texts.append(f"{sum(own.get(name) == one[name] for name in one)} of {len(one | own)}")
        messages = measure_messages(workshop, hosts)
    predicted = predict(workshop, found["work"][1], messages, size.more)
    sizes = [ring_bytes(sum(p.numel() for p in large.parameters()), n) for n in size.workers]
    values = {kind: [asdict(each) for each in runs] for kind, runs in found.items()}
    tables = [work_table(found["work"], texts), sums_table(found["sums"], sizes)]
    return [*tables, more_table(predicted, found["little"])], values | {
        "equal_texts": texts,
        "ring_bytes": sizes,
        "messages": messages._asdict(),
        "predicted": predicted,
    }


def work_table(runs: Sequence[Measured], texts: Sequence[str]) -> Table:
    kinds = ("texts", "drafter", "other")
    rows = [
        (
            *(run.workers, equal, run.step_s),
            *(f"{run.medians[f'network/{kind}_bytes'] / 1e6:.3f}" for kind in kinds),
            f"{sum(run.links[1::2]) / 1e6:.3f}",
            *(f"{1e3 * each:.0f}" for each in (run.main_s, run.driver_s)),
            f"{run.main_s / run.step_s.median:.1%}",
        )
        for run, equal in zip(runs, texts, strict=True)
    ]
    title = (
        "One worker on each of some hosts; of a step: s, MB by kind and of all links, ms of CPU "
    )
    title += "time of the driver's main thread and of all its threads, the main thread's share"
    named = ("workers", "texts as of one", "step", *kinds, "links", "main", "driver", "share")
    return Table(title, by_position(*named), rows)


def sums_table(runs: Sequence[Measured], sizes: Sequence[float]) -> Table:
    title = (
        "MB that each worker's host receives, and sends, in a step of a larger model; predicted: "
    )
    title += "2 (W - 1) / W x 8 bytes for each of its parameters"
    rows = [
        (
            *(run.workers, Spread.of([each / 1e6 for each in run.of_workers()]), size / 1e6),
            f"{max(abs(each / size - 1.0) for each in run.of_workers()):.1%}" if size else "",
        )
        for run, size in zip(runs, sizes, strict=True)
    ]
    return Table(title, by_position("workers", "measured", "predicted", "difference"), rows)


def more_table(predicted: Sequence[Mapping[str, float]], little: Sequence[Measured]) -> Table:
    title = (
        "The coordinator in simulated time, with measured messages, of a step with as many texts "
    )
    title += "a worker as above, and the fixed cost: s of a step with next to no work"
    measured = {run.workers: run.step_s.text(3) for run in little}
    rows = [
        (
            *(f"{each['workers']:.0f}", each["step_s"]),
            *(f"{1e3 * each[name]:.0f}" for name in ("cpu_s", "messages_s")),
            *(f"{each['share']:.1%}", f"{each['fixed_s']:.3f}", measured.get(each["workers"])),
        )
        for each in predicted
    ]
    named = ("workers", "step", "CPU, ms", "messages, ms", "share", "fixed", "fixed, measured")
    return Table(title, by_position(*named), rows)


# ---- more workers


def time_messages(words: Sequence[str]) -> None:
    """Print the seconds of short tasks, and of messages to workers that generate."""
    config = load(None, words)
    group = open_workers(config, max_prompt_len=8)
    group.publish()
    pool, sampling = group._pool, SamplingParams(max_tokens=config.rollout.max_tokens)
    texts = Texts("texts", prompt_len=2, lengths=tuple(range(32)), is_learned=False)
    asks, polls, num = list[float](), list[float](), 0
    for worker in range(pool.size):
        pool.start(worker, Worker.generate, texts.requests(sampling))
    while not num:
        num = len(pool.wait(0.0))
        began = time.perf_counter()
        pool.ask(pool.size - 1, Worker.lengths)
        asks.append(time.perf_counter() - began)
        pool.progress(range(pool.size))
        polls.append((time.perf_counter() - began - asks[-1]) / pool.size)
    while num < pool.size:
        num += len(pool.wait(1.0))
    began = time.perf_counter()
    for _ in range(_TASKS):
        for worker in range(pool.size):
            pool.start(worker, Worker.ready)
        while num := num - len(pool.wait(1.0)):
            pass
        num = pool.size
    task_s = (time.perf_counter() - began) / _TASKS / pool.size
    group.close()
    print(json.dumps([task_s, statistics.median(asks), statistics.median(polls)]), flush=True)


def measure_messages(workshop: Workshop, hosts: Sequence[Host]) -> Messages:
    """Return the seconds of messages to a worker on each host."""
    own = (f"--cluster.workers={len(hosts)}", f"--cluster.address={hosts[0].address}:{PORT}")
    words = workshop.words("messages", *KINDS["work"], *own)[1:]
    run = hosts[0].python(_MESSAGES, *words, log=workshop.path / "messages.log")
    assert run.code() == 0, run.said()
    return Messages(*json.loads(run.said().splitlines()[-1]))


def predict(
    workshop: Workshop, own: Measured, messages: Messages, counts: Sequence[int]
) -> list[dict[str, float]]:
    """Simulate workers that have as many texts each as those of a measured run."""
    config = load(None, workshop.words("", *KINDS["work"])[1:])
    groups = groups_of(workshop.rollouts(f"work{own.workers}"), config)[1:]
    groups = [groups[step % len(groups)] for step in range(_STEPS)]
    short = [[e._replace(lengths=(1,) * len(e.lengths)) for e in step] for step in groups]

    def simulated(
        texts: Sequence[Sequence[Texts]], speeds: Speeds, count: int, messages: Messages
    ) -> Simulated:
        steps = [(step, speeds) for step in resampled(texts, count / own.workers)]
        return simulate(config, steps, count, messages)

    names = ("rollout", "learn", "publish", "step")
    rollout_s, learn_s, publish_s, step_s = (own.medians[f"timing_s/{each}"] for each in names)
    token = Speeds(1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
    token_s = 1e-3 * rollout_s * _STEPS
    token_s /= simulated(groups, token, own.workers, Messages(0.0, 0.0, 0.0)).rollout_s
    others_s = step_s - rollout_s - learn_s - publish_s
    speeds = Speeds(token_s, 0.0, 0.0, learn_s, publish_s, others_s)
    found = []
    for count in counts:
        work = simulated(groups, speeds, count, messages)
        little = simulated(short, token._replace(start_s=1e-6), count, messages)
        told = {"step_s": work.step_s / _STEPS, "cpu_s": work.coordinator_s}
        told |= {"workers": count, "messages_s": work.messages_s}
        told["share"] = (work.coordinator_s + work.messages_s) / told["step_s"]
        found.append(told | {"fixed_s": little.step_s / _STEPS + little.coordinator_s})
    return found


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
    noticed, trace = list[float](), workshop.path / name / "trace.json"
    with bed() as made:
        head, *others = cluster(made, 3, **env)
        run = train(workshop, head, name, *LONG, head=head, workers=2)
        run.until(lambda: lines(trace.with_name("metrics.jsonl")) > 0)
        for number in range(num):
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
                others[-1].join(head)  # the next step has begun
    events = [event_of(line) for line in trace.read_bytes().splitlines(keepends=True)]
    return noticed, recoveries(events)


def of_kills(size: Size, workshop: Workshop, log: Log) -> Found:
    """Measure notices and recoveries with a quick Ray, and once with Ray's own patience."""
    found = {
        "of the test bed": kill_hosts(workshop, "kills", size.kills, log),
        "Ray's default": kill_hosts(workshop, "default", 1, log, **RAYS_OWN),
    }
    rows = [
        (
            *(name, len(noticed), Spread.of(noticed), len(again)),
            Spread.of([seconds for seconds, _ in again]) if again else None,
            sum(is_own for _, is_own in again),
        )
        for name, (noticed, again) in found.items()
    ]
    title = (
        "A host killed while its worker generates: s until that is noticed, and from there until "
    )
    title += "another writes its texts, the new process or a worker that is done with its own"
    named = ("Ray's patience", "kills", "noticed", "generating", "recovered", "by a new process")
    return [Table(title, by_position(*named), rows)], {"kills": found}


def main() -> None:
    """Measure all, and write the card."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if why := unavailable_because():
        sys.exit(why)
    size, busy = QUICK if options.quick else Size(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="longtail-hosts-") as place:
        workshop, log = build(Path(place)), progress("hosts")
        tables, values = on_hosts(size, workshop, log)
        more, kills = of_kills(size, workshop, log)
    about = {"bench": "hosts", "load": busy, "ray": ray.__version__, "size": size._asdict()}
    sentence = f"Ray {ray.__version__}; load of the machine at the start {busy:.1f}"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        print_card([*tables, *more], about | values | kills, sentences=[sentence])
    print(said.getvalue())
    (options.folder / "hosts.txt").write_text(said.getvalue())
    (options.folder / "hosts.json").write_text(said.getvalue().splitlines()[-1] + "\n")


if __name__ == "__main__":
    main()
