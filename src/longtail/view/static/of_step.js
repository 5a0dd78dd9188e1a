// Panels of one step: workers over time, lengths, one rollout with its switches, drafter decisions.
import { color, el, fill, known, num, Panel, percent, runColor, seconds, table } from "/static/format.js";
import { bars, Chart } from "/static/charts.js";
import { Timeline } from "/static/timeline.js";

const SMALL = [120, 120, 160];

export class OfStep {
  constructor(host, actions) {
    this.actions = actions;
    const grid = el("div", { class: "grid" });
    this.timeline = new Timeline(host);
    this.rollout = new Panel("panel-rollout", "One rollout", "running requests, drafted tokens, accept length");
    this.lines = el("select", { id: "rollout-line", onchange: () => actions.chooseLine(Number(this.lines.value)) });
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
    this.showLengths(runs, chosen);
    this.showRollout(own, line, rollout);
    this.showDecisions(own.data.decisions);
    const metrics = Object.entries(own.data.metrics).filter(([name]) => name !== "step");
    this.metrics.node.hidden = !metrics.length;
    this.metrics.say(`${metrics.length} metrics of ${own.name}`);
    this.metrics.show(() => table(["metric", "value"], metrics.map(([name, value]) => [name, num(value)])));
  }

  showLengths(runs, chosen) {
    const found = runs.filter((run) => run.data.lengths).toSorted((a, b) => (a.index === chosen ? -1 : b.index === chosen ? 1 : 0));
    this.lengths.node.hidden = !found.length;
    if (!found.length) return;
    const tables = found.map(({ data: { lengths } }) => [lengths.counts.map((_, place) => (place + 0.5) * lengths.width), lengths.counts.map((count) => count || null)]);
    const own = found[0].data.lengths;
    const most = Math.max(...found.map(({ data }) => data.lengths.max));
    const ink = (index) => runColor(index);
    const series = found.map(({ index }, place) => (place === 0
      ? { color: ink(index), fill: `${ink(index)}99`, width: 0, paths: bars(0.9, 40), fillTo: 0.5 }
      : { color: ink(index), width: 0, points: { show: true, size: 7, fill: ink(index) }, paths: () => null }));
    const marks = [["median", own.p50], ["p99", own.p99], ["longest", own.max]].map(([name, x]) => ({ x, text: `${name} ${num(x)}`, color: color("--soft"), dash: true }));
    this.histogram.show({
      data: tables.length > 1 ? uPlot.join(tables) : tables[0], series, marks, unit: "completions", xLabel: "tokens", log: true, bottom: 0.5, range: [0, most * 1.03],
    });
    const describe = ({ name, data: { lengths } }) => `${runs.length > 1 ? `${name}: ` : ""}${num(lengths.num)} completions, mean ${num(lengths.mean)}, median ${num(lengths.p50)}, p99 ${num(lengths.p99)}, longest ${num(lengths.max)}, ${num(lengths.num_cut)} cut`;
    this.lengths.say(found.map(describe).join("; "));
    this.lengths.show(() => table(["run", "tokens", "completions"], found.flatMap(({ name, data: { lengths } }) => lengths.counts.map((count, place) => [name, `${num(place * lengths.width)} to ${num((place + 1) * lengths.width - 1)}`, num(count)]))));
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
    this.rollout.show(() => table(["seconds", "running", "drafted tokens", "most", "accept length", "plain"], view.seconds.map((at, place) => [num(at), num(view.running[place]), num(view.nodes[place]), num(view.most_nodes[place]), num(view.accept_length[place]), percent(view.plain_share[place])])));
  }

  zoom(range) {
    this.range = range;
    this.drawRollout();
  }

  drawRollout() {
    const view = this.view;
    const numbered = view.switches.length <= 30;
    const marks = view.switches.map(([x, drafts], place) => ({ x, color: color(drafts ? "--on" : "--off"), dash: true, text: numbered ? `${place + 1}` : "" }));
    const shades = plainSpans(view);
    const shared = { range: this.range ?? [0, view.end_s || 1], shades, marks, room: ["accepted"] };
    const bare = marks.map((mark) => ({ ...mark, text: "" }));
    const end = (values) => values.findLast(known);
    const blue = color("--generating"), purple = color("--learning"), teal = color("--run-0");
    const [running, nodes, accept] = this.charts;
    running.show({ ...shared, shadeText: "plain decoding", data: [view.seconds, view.running], series: [{ color: blue, fill: `${blue}22`, width: 1.75 }], unit: "requests", labels: [{ value: end(view.running), text: "running", color: blue }] });
    nodes.show({ ...shared, marks: bare, data: [view.seconds, view.most_nodes, view.nodes], series: [{ color: `${purple}55`, width: 1 }, { color: purple }], unit: "drafted tokens per engine step", labels: [{ value: end(view.nodes), text: "drafted", color: purple }] });
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

// Intervals in which most of the time was plain decoding.
function plainSpans(view) {
  const spans = [];
  view.plain_share.forEach((share, place) => {
    if (share <= 0.5) return;
    const from = view.seconds[place], to = view.seconds[place + 1] ?? view.end_s;
    const before = spans.at(-1);
    if (before && before.to === from) before.to = to;
    else spans.push({ from, to });
  });
  return spans;
}
