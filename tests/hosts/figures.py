"""Figures of runs over hosts: `make bench-hosts` writes benchmarks/hosts.txt and hosts.json.

    python -m hosts.figures [--quick] FOLDER

All is measured in one run, on hosts of a bed that share this machine's cores: four hosts, of which
one, two and four have a worker, then three, of which one is killed again and again. `--quick` only
tries the script: two hosts, few steps, one kill.
"""

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
from typing import Any

import numpy as np
import ray

from end_to_end.workshop import Workshop, build
from hosts.bed import PORT, QUICK, Host, Running, bed, children, cluster, unavailable_because
from hosts.conftest import WORDS
from hosts.test_faults import steps_done
from hosts.test_training import train
from longtail.assembly.trainer import open_workers
from longtail.bench.common.card import Table, by_position, print_card
from longtail.bench.common.timing import Log, Spread, progress
from longtail.bench.e2e.arms import Texts, groups_of
from longtail.bench.e2e.simulated import Messages, Simulated, Speeds, resampled, simulate
from longtail.cluster.timeline import event_of
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import load
from longtail.model.hf.model import save_model
from longtail.types import SamplingParams
from support.tiny_models import tiny_model, tiny_tokenizer

_RUN = (*WORDS, "--run.checkpoint_every=1000", "--rollout.prompts_per_step=8")
_PLAIN = "--speculation.drafter=none"
KINDS = {
    "work": (*_RUN, "--rollout.max_tokens=400"),  # 32 texts of 150 tokens
    "little": (*_RUN, _PLAIN, "--rollout.max_tokens=1"),  # the fixed cost of a step
    # Of a larger model, in whole numbers of 8 bytes: gradients are nearly all that travels.
    "sums": (*_RUN, _PLAIN, "--rollout.max_tokens=8", "--learner.dtype=float32"),
}
_ALONE = ("--rollout.group_size=12", "--rollout.max_running=1", "--rollout.sharing=false", _PLAIN)
LONG = (*KINDS["work"], *_ALONE, "--run.steps=100000", "--cluster.worker_timeout_s=180")
"""Text after text, for longer than a new process needs: another worker is not idle before."""
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4}
RAYS_OWN = dict(zip(QUICK, ("5000", "3000", "10000", "5"), strict=True))
"""Ray's default patience with a silent host."""
_MORE = (8, 32, 128)
_TASKS = 50
_STEPS = 8
"""Simulated steps."""
FULL, TRIAL = ((1, 2, 4), 8, 10), ((1, 2), 3, 1)
"""Numbers of workers, of steps of a run, and of kills."""
Found = tuple[list[Table], dict[str, Any]]  # tables, and their numbers for JSON


# ---- hosts that work


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of a run after the first; bytes and CPU seconds are means."""

    workers: int
    step_s: Spread
    medians: dict[str, float]  # of metrics of time and of the network
    links: list[float]  # bytes that each host received and sent, one host after another
    at_work: list[int]  # hosts with a worker
    main_s: float  # CPU time of the driver's main thread, which coordinates, packs and logs
    driver_s: float  # the same of its threads, Ray's included; graders are other processes


def link_bytes(table: str) -> tuple[int, int]:
    """Return received and sent bytes of eth0 from /proc/net/dev."""
    (line,) = [each for each in table.splitlines() if each.strip().startswith("eth0:")]
    numbers = line.partition(":")[2].split()
    return int(numbers[0]), int(numbers[8])


def cpu_s(stat: str) -> float:
    """Return the CPU seconds, user and system, of a process or thread from its `stat` in /proc."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    samples, at_work = list[list[float]](), list[int]()
    for number in range(load(None, workshop.words(name, *words)[1:]).run.steps):
        run.until(lambda number=number: steps_done(workshop, name) > number)
        samples.append(counters(hosts, run))
        at_work = at_work or [each.number for each in hosts if each.has_worker]
    assert run.code() == 0, run.said()
    rows = workshop.metrics(name)[1:]
    told = [each for each in rows[0] if each.startswith(("network/", "timing_s/"))]
    medians = {each: statistics.median(row[each] for row in rows) for each in told}
    step_s = Spread.of([row["timing_s/step"] for row in rows])
    main_s, driver_s, *links = np.diff(samples, axis=0).mean(0).tolist()
    return Measured(workers, step_s, medians, links, at_work, main_s, driver_s)


def on_hosts(workers: Sequence[int], num_steps: int, workshop: Workshop, log: Log) -> Found:
    """Measure steps, sums and messages, and predict those of more workers."""
    steps, place = f"--run.steps={num_steps}", workshop.path / "large"
    large, tokenizer = tiny_model(**LARGE), tiny_tokenizer()
    save_model(large, place, eos_ids=tokenizer.eos_ids)
    tokenizer.save(place)
    assert workshop.train("one", *KINDS["work"], steps).code == 0
    one, texts, found = workshop.texts("one"), list[str](), {kind: [] for kind in KINDS}
    with bed() as made:
        hosts = cluster(made, max(workers))
        for count in workers:
            for kind, words in KINDS.items():
                model = place if kind == "sums" else workshop.model
                more = (steps, f"--model.path={model}")
                found[kind].append(measure(workshop, hosts, kind, count, *words, *more))
                log(f"{count} workers, {kind}: {found[kind][-1].step_s.text()} s a step")
            own = workshop.texts(f"work{count}")
            texts.append(f"{sum(own.get(name) == one[name] for name in one)} of {len(one | own)}")
        messages = measure_messages(workshop, hosts)
    counts = (*workers, *_MORE)
    work = predict(workshop, "work", found["work"][1], messages, counts)
    little = predict(workshop, "little", found["little"][0], messages, counts)
    num = sum(each.numel() for each in large.parameters())
    ring = [2 * (count - 1) / count * 8 * num for count in workers]
    values = {kind: [asdict(each) for each in runs] for kind, runs in found.items()}
    tables = [work_table(found["work"], texts), sums_table(found["sums"], ring)]
    return [*tables, more_table(counts, work, little, found["little"])], values | {
        "equal_texts": texts,
        "ring_bytes": ring,
        "messages": messages._asdict(),
        "simulated_workers": counts,
        "simulated_work": [asdict(each) for each in work],
        "simulated_little": [asdict(each) for each in little],
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
    named = ("workers", "texts as of one", "step", *kinds, "links", "main", "driver", "share")
    return Table(
        "One worker on each of some hosts; of a step: s, MB by kind and of all links, ms of CPU "
        "time of the driver's main thread and of all its threads, and the main thread's share",
        by_position(*named),
        rows,
    )


def sums_table(runs: Sequence[Measured], ring: Sequence[float]) -> Table:
    links = [[run.links[2 * host + way] for host in run.at_work for way in (0, 1)] for run in runs]
    rows = [
        (
            *(run.workers, Spread.of([each / 1e6 for each in own]), size / 1e6),
            f"{max(abs(each / size - 1.0) for each in own):.1%}" if size else "",
        )
        for run, own, size in zip(runs, links, ring, strict=True)
    ]
    return Table(
        "MB that each worker's host receives, and sends, in a step of a larger model; predicted: "
        "2 (W - 1) / W x 8 bytes for each of its parameters",
        by_position("workers", "measured", "predicted", "largest difference"),
        rows,
    )


def more_table(
    counts: Sequence[int],
    work: Sequence[Simulated],
    little: Sequence[Simulated],
    measured: Sequence[Measured],
) -> Table:
    """Return the table of the coordinator's time, and of the fixed cost of a step."""
    known = {run.workers: run.step_s.text(3) for run in measured}
    rows = [
        (
            *(count, one.step_s / _STEPS),
            *(f"{1e3 * each:.0f}" for each in (one.coordinator_s, one.messages_s)),
            f"{(one.coordinator_s + one.messages_s) * _STEPS / one.step_s:.1%}",
            *(f"{other.step_s / _STEPS + other.coordinator_s:.3f}", known.get(count)),
        )
        for count, one, other in zip(counts, work, little, strict=True)
    ]
    named = ("workers", "step", "CPU, ms", "messages, ms", "share", "fixed", "fixed, measured")
    return Table(
        "The coordinator in simulated time, with measured messages, in a step with as many texts a "
        "worker as above; share: of both, with the wait for answers; fixed: s of a step with one "
        "token a text, from that of one worker",
        by_position(*named),
        rows,
    )


# ---- more workers


def time_messages(words: Sequence[str]) -> None:
    """Print the seconds of an answer of a worker that generates, and what else takes this thread.

    Tasks and progress are asked of all workers at once: each takes CPU time here.
    """
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
        began = time.thread_time()
        pool.progress(range(pool.size))
        polls.append((time.thread_time() - began) / pool.size)
    while num < pool.size:
        num += len(pool.wait(1.0))
    began = time.thread_time()
    for _ in range(_TASKS):
        for worker in range(pool.size):
            pool.start(worker, Worker.ready)
        while num := num - len(pool.wait(1.0)):
            pass
        num = pool.size
    task_s = (time.thread_time() - began) / _TASKS / pool.size
    group.close()
    print(json.dumps([task_s, statistics.median(asks), statistics.mean(polls)]), flush=True)


def measure_messages(workshop: Workshop, hosts: Sequence[Host]) -> Messages:
    """Return the seconds of messages to workers, one on each host."""
    own = (f"--cluster.workers={len(hosts)}", f"--cluster.address={hosts[0].address}:{PORT}")
    script = "import sys; from hosts.figures import time_messages; time_messages(sys.argv[1:])"
    words = workshop.words("messages", *KINDS["work"], *own)[1:]
    run = hosts[0].python(script, *words, log=workshop.path / "messages.log")
    assert run.code() == 0, run.said()
    return Messages(*json.loads(run.said().splitlines()[-1]))


def predict(
    workshop: Workshop, kind: str, own: Measured, messages: Messages, counts: Sequence[int]
) -> list[Simulated]:
    """Simulate workers that have as many texts each as those of a measured run."""
    config = load(None, workshop.words("", *KINDS[kind])[1:])
    groups = groups_of(workshop.rollouts(f"{kind}{own.workers}"), config)[1:]
    groups = [groups[step % len(groups)] for step in range(_STEPS)]

    def simulated(speeds: Speeds, count: int, messages: Messages) -> Simulated:
        steps = [(step, speeds) for step in resampled(groups, count / own.workers)]
        return simulate(config, steps, count, messages)

    names = ("rollout", "learn", "publish", "step")
    rollout_s, learn_s, publish_s, step_s = (own.medians[f"timing_s/{each}"] for each in names)
    trial = Speeds(1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
    ratio = rollout_s * _STEPS / simulated(trial, own.workers, Messages(0.0, 0.0, 0.0)).rollout_s
    others_s = step_s - rollout_s - learn_s - publish_s
    speeds = Speeds(1e-3 * ratio, 0.0, 0.0, learn_s, publish_s, others_s)
    return [simulated(speeds, count, messages) for count in counts]


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
        run.until(lambda: steps_done(workshop, name) > 0)
        for number in range(num):
            time.sleep(1.0)
            host = next(each for each in others if each.has_worker)
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


def of_kills(num: int, workshop: Workshop, log: Log) -> Found:
    """Measure notices and recoveries with a quick Ray, and once with Ray's own patience."""
    found = {
        "of the test bed": kill_hosts(workshop, "kills", num, log),
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
    named = ("Ray's patience", "kills", "noticed", "generating", "recovered", "by a new process")
    title = (
        "A host killed while its worker generates: s until noticed, and from there until another "
        "writes its texts, the new process or a worker that is done with its own"
    )
    return [Table(title, by_position(*named), rows)], {"kills": found}


def main() -> None:
    """Measure all, and write the card."""
    if why := unavailable_because():
        sys.exit(why)
    *words, folder = sys.argv[1:]
    busy, size = os.getloadavg()[0], TRIAL if "--quick" in words else FULL
    with tempfile.TemporaryDirectory(prefix="longtail-hosts-") as place:
        workshop, log = build(Path(place)), progress("hosts")
        tables, values = on_hosts(*size[:2], workshop, log)
        more, kills = of_kills(size[2], workshop, log)
    about = {"bench": "hosts", "load": busy, "ray": ray.__version__}
    sentence = f"Ray {ray.__version__}; load of the machine at the start {busy:.1f}"
    sentence += "; a trial, whose times mean nothing" * (size is TRIAL)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        print_card([*tables, *more], about | values | kills, sentences=[sentence])
    print(said.getvalue())
    Path(folder, "hosts.txt").write_text(said.getvalue())
    Path(folder, "hosts.json").write_text(said.getvalue().splitlines()[-1] + "\n")


if __name__ == "__main__":
    main()
