// Panels of one step: workers over time, lengths, one rollout with its switches, drafter decisions.
import { color, el, fill, known, num, Panel, percent, seconds, table } from "/static/format.js";
import { bars, Chart } from "/static/charts.js";
import { Timeline } from "/static/timeline.js";

const SMALL = [120, 120, 160];

export class OfStep {
  constructor(host, chooseLine) {
    const grid = el("div", { class: "grid" });
    this.timeline = new Timeline(host);
    this.rollout = new Panel("panel-rollout", "One rollout", "running requests, drafted tokens, accept length");
    this.lines = el("select", { id: "rollout-line", onchange: () => chooseLine(Number(this.lines.value)) });
    this.picker = el("label", { class: "buttons" }, "rollout of ", this.lines);
    this.plots = ["running", "nodes", "accept"].map((name) => el("div", { class: "plot", id: `plot-${name}` }));
    this.switches = el("div", { id: "switches" });
    fill(this.rollout.body, this.picker, ...this.plots, this.switches);
    this.charts = this.plots.map((plot, place) => new Chart(plot, { height: SMALL[place], sync: "rollout", onZoom: (range) => this.zoom(range), onHover: (index) => this.hover(index) }));
    this.lengths = new Panel("panel-lengths-of-step", "Lengths in the step", "completions by length, log scale");
    this.bars = el("div", { class: "plot" });
    fill(this.lengths.body, this.bars);
    this.histogram = new Chart(this.bars, { height: 190 });
    this.decisions = new Panel("panel-decisions", "The drafter in the step", "");
    this.metrics = new Panel("panel-metrics", "All metrics of the step", "");
    host.append(this.rollout.node, grid);
    grid.append(this.lengths.node, el("div", { class: "column" }, this.decisions.node, this.metrics.node));
  }

  // runs: [{index, name, data}], chosen: index of the run whose rollout is shown, the one at `line`
  show(runs, chosen, line, rollout) {
    const own = runs.find((run) => run.index === chosen);
    this.timeline.show(runs.map(({ index, name, data }) => ({ index, name, step: data.step, step_s: data.step_s, timeline: data.timeline })));
    this.showLengths(own.data.lengths);
    this.showRollout(own, line, rollout);
    this.showDecisions(own.data.decisions);
    const metrics = Object.entries(own.data.metrics).filter(([name]) => name !== "step");
    this.metrics.node.hidden = !metrics.length;
    this.metrics.say(`${metrics.length} metrics of ${own.name}`);
    this.metrics.show(() => table(["metric", "value"], metrics.map(([name, value]) => [name, num(value)])));
  }

  showLengths(own) {
    this.lengths.node.hidden = !own;
    if (!own) return;
    const ink = color("--generating"), { counts, width } = own;
    const marks = [["median", own.p50], ["p99", own.p99], ["longest", own.max]].map(([name, x]) => ({ x, text: `${name} ${num(x)}`, color: color("--soft"), dash: true }));
    this.histogram.show({
      data: [counts.map((_, place) => (place + 0.5) * width), counts.map((count) => count || null)], series: [{ color: ink, fill: `${ink}99`, width: 0, paths: bars(0.9, 40), fillTo: 0.5 }],
      marks, unit: "completions", xLabel: "tokens", log: true, bottom: 0.5, range: [0, own.max * 1.03],
    });
    this.lengths.say(`${num(own.num)} completions, mean ${num(own.mean)}, median ${num(own.p50)}, p99 ${num(own.p99)}, longest ${num(own.max)}, ${num(own.num_cut)} cut`);
    this.lengths.show(() => table(["tokens", "completions"], counts.map((count, place) => [`${num(place * width)} to ${num((place + 1) * width - 1)}`, num(count)])));
  }

  showRollout({ name, data: { rollouts } }, chosen, rollout) {
    this.view = rollout;
    this.rollout.node.hidden = false;
    const isShown = this.view !== null;
    for (const node of [this.picker, ...this.plots]) node.hidden = !isShown;
    if (!isShown) {
      this.rollout.say(`speculation.jsonl of ${name} has no such step: it did not speculate`);
      fill(this.switches);
      this.rollout.show(null);
      return;
    }
    const options = rollouts.map((line, place) => el("option", { value: place, selected: place === chosen }, `worker ${line.worker}${line.kind === "training" ? "" : `, ${line.kind}`}`));
    fill(this.lines, ...options);
    this.range = null;
    this.drawRollout();
    this.describe(null);
    this.showSwitches();
    const view = this.view;
    this.rollout.show(() => table(["seconds", "running", "drafted tokens", "accept length"], view.seconds.map((at, place) => [num(at), num(view.running[place]), num(view.nodes[place]), num(view.accept_length[place])])));
  }

  zoom(range) {
    this.range = range;
    this.drawRollout();
  }

  drawRollout() {
    const view = this.view;
    const numbered = view.switches.length <= 30;
    const marks = view.switches.map(([x, drafts], place) => ({ x, color: color(drafts ? "--on" : "--off"), dash: true, text: numbered ? `${place + 1}` : "" }));
    const shared = { range: this.range ?? [0, view.end_s || 1], marks, room: ["accepted"] };
    const bare = marks.map((mark) => ({ ...mark, text: "" }));
    const end = (values) => values.findLast(known);
    const blue = color("--generating"), purple = color("--learning"), teal = color("--run-0");
    const [running, nodes, accept] = this.charts;
    running.show({ ...shared, data: [view.seconds, view.running], series: [{ color: blue, fill: `${blue}22`, width: 1.75 }], unit: "requests", labels: [{ value: end(view.running), text: "running", color: blue }] });
    nodes.show({ ...shared, marks: bare, data: [view.seconds, view.nodes], series: [{ color: purple }], unit: "drafted tokens per engine step", labels: [{ value: end(view.nodes), text: "drafted", color: purple }] });
    accept.show({ ...shared, marks: bare, data: [view.seconds, view.accept_length], series: [{ color: teal, spanGaps: false, points: { show: view.seconds.length <= 200, size: 3, fill: teal } }], unit: "accept length, tokens", xLabel: "seconds", labels: [{ value: end(view.accept_length), text: "accepted", color: teal }], top: 2 });
  }

  hover(index) {
    if (this.view) this.describe(index);
  }

  describe(index) {
    const view = this.view;
    if (index === null) {
      const accept = known(view.mean_accept_length) ? `, accept length ${num(view.mean_accept_length)}` : "";
      this.rollout.say(`${num(view.max_running)} requests, ${num(view.num_engine_steps)} engine steps in ${seconds(view.end_s)}${accept}, plain decoding for ${percent(view.plain_time_share)} of the time`);
    } else {
      const accept = known(view.accept_length[index]) ? `accept length ${num(view.accept_length[index])}` : "plain decoding";
      this.rollout.say(`${num(view.seconds[index], "s")}: ${num(view.running[index])} running, ${num(view.nodes[index])} drafted tokens per step, ${accept}`);
    }
  }

  showSwitches() {
    const { switches, num_switches: total } = this.view;
    if (!total) {
      fill(this.switches, el("p", { class: "soft" }, "It never switched between drafting and plain decoding."));
      return;
    }
    const rows = switches.map(([at, drafts, reason, running], place) => [`${place + 1}`, num(at, "s"), num(running), el("span", { class: drafts ? "on-text" : "off-text" }, drafts ? "drafting" : "plain"), reason || "no reason recorded"]);
    const open = this.switches.querySelector("details")?.open ?? rows.length <= 8;
    fill(this.switches, el("details", { open, class: "numbers" }, el("summary", {}, `${num(total)} switch${total === 1 ? "" : "es"} and their reasons${total > rows.length ? `, the last ${rows.length}` : ""}`), table(["", "time", "running", "to", "reason"], rows)));
  }

  showDecisions(decisions) {
    this.decisions.node.hidden = !decisions.length;
    const rows = decisions.map((each) => [each.what, `v${each.version}`, known(each.before) ? `${num(each.before)} \u2192 ${num(each.after)}` : "\u2013", num(each.num_tokens), each.reason || "\u2013"]);
    this.decisions.say(`${num(decisions.length)} decision${decisions.length === 1 ? "" : "s"}; expected accept length before and after`);
    fill(this.decisions.body, table(["", "version", "accept length", "tokens", "reason"], rows));
    this.decisions.show(null);
  }
}
