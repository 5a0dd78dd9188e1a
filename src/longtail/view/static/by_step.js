// Panels over the steps of the runs. Curves of all runs share a plot; stacks are of the chosen run.
import { color, el, fill, known, num, Panel, percent, runColor, seconds, table } from "/static/format.js";
import { bars, Chart, stacked } from "/static/charts.js";

const PHASES = [
  ["rollout", "timing_s/rollout", "--generating"], ["learn", "timing_s/learn", "--learning"],
  ["reward", "timing_s/reward", "--dead"],
  ["publish", "timing_s/publish", "--starting"], ["drafter", "timing_s/drafter", "--spot"],
  ["other", "timing_s/other", "--idle-ink"],
];
const IDLE = [["learned ahead", "cluster/learning_ahead_s", "--ahead"], ["trained the drafter", "cluster/spot_s", "--spot"], ["idle", "cluster/idle_s", "--idle-ink"]];

const last = (values) => values.findLast((value) => known(value));
const at = (view, name, index) => view.columns[name]?.[index];

// Curves of a panel: name, column or points, and how its line looks.
const CURVES = {
  reward: { title: "Reward", unit: "mean of a step's completions", yUnit: "reward", curves: [
    { name: "train", column: "reward/mean" },
    { name: "held-out", points: (view) => view.held_out, strong: true },
  ] },
  accept: { title: "Accept length", unit: "tokens per verify step", yUnit: "tokens", curves: [
    { name: "measured", column: "speculation/accept_length", strong: true },
    { name: "expected", column: "drafter/expected_accept_length", dash: [4, 3] },
  ], versions: true },
  lengths: { title: "Lengths", unit: "tokens, log scale", yUnit: "tokens", log: true, curves: [
    { name: "longest", column: "response_length/max", strong: true },
    { name: "p99", column: "response_length/p99", alone: true },
    { name: "p90", column: "response_length/p90", alone: true },
    { name: "median", column: "response_length/p50" },
  ] },
  speed: { title: "Rollout speed", unit: "generated tokens per second", yUnit: "tokens/s", curves: [
    { name: "tokens/s", column: "rollout/tokens_per_s", strong: true },
  ] },
};

export class ByStep {
  constructor(host, actions) {
    this.actions = actions;
    this.panels = {};
    for (const [id, { title, unit }] of Object.entries(CURVES)) this.add(host, id, title, unit);
    this.add(host, "phases", "Seconds of a step", "by phase");
    this.add(host, "idle", "Idle seconds", "of all workers, and what filled them");
  }

  add(host, id, title, unit) {
    const panel = new Panel(`panel-${id}`, title, unit);
    const plot = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-labelledby": `panel-${id}-title`, onkeydown: (event) => this.key(event) });
    fill(panel.body, plot);
    host.append(panel.node);
    const chart = new Chart(plot, {
      onPick: (step) => this.actions.pick(step), onZoom: (range) => this.actions.zoom(range), sync: "steps",
      onHover: (index) => this.hover(id, index),
    });
    this.panels[id] = { panel, plot, chart, x: [], say: () => "" };
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (step) this.actions.move(step);
    else if (event.key === "Home") this.actions.move(-Infinity);
    else if (event.key === "End") this.actions.move(Infinity);
    else if (event.key === "+" || event.key === "=") this.actions.scale(0.5);
    else if (event.key === "-") this.actions.scale(2);
    else if (event.key === "0" || event.key === "Escape") this.actions.zoom(null);
    else return;
    event.preventDefault();
  }

  // runs: [{index, name, view}], chosen: index, step: the chosen step, range: zoom or null
  show({ runs, chosen, step, range }) {
    this.state = { runs, chosen, step };
    for (const [id, spec] of Object.entries(CURVES)) this.curves(id, spec, runs, chosen, step, range);
    const run = runs.find((each) => each.index === chosen);
    const share = (index) => at(run.view, "cluster/idle_utilization", index);
    const tail = (index) => (known(share(index)) ? `; ${percent(share(index))} of the idle time in rollouts was used` : "");
    this.stack("phases", PHASES, run, step, range, (index) => ` of ${seconds(at(run.view, "timing_s/step", index))}`);
    this.stack("idle", IDLE, run, step, range, tail);
  }

  curves(id, spec, runs, chosen, step, range) {
    const entry = this.panels[id];
    const several = runs.length > 1;
    const tables = [], series = [], labels = [], columns = [];
    for (const { index, name, view } of runs) {
      for (const curve of spec.curves) {
        if (several && curve.alone) continue;
        const points = curve.points ? curve.points(view) : view.columns.step.map((x, place) => [x, view.columns[curve.column][place]]);
        const values = points.map((point) => point[1]);
        if (!values.some(known)) continue;
        const ink = runColor(index);
        tables.push([points.map((point) => point[0]), values]);
        series.push({ color: ink, width: curve.strong ? 2.25 : 1.25, dash: curve.dash, points: { show: Boolean(curve.points) || points.length <= 40, size: curve.points ? 7 : 4, fill: ink } });
        const text = several ? name : `${curve.name} ${num(last(values))}`;
        const end = points.findLast((point) => known(point[1]))[0];
        if (!several || curve.strong) labels.push({ value: last(values), x: end, text, short: several ? name : curve.name, color: ink });
        columns.push({ run: name, name: curve.name, points: new Map(points), holds: curve.points ? Infinity : view.stride });
      }
    }
    const isKnown = tables.length > 0;
    entry.panel.node.hidden = !isKnown;
    if (!isKnown) return;
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    entry.x = data[0];
    const marks = spec.versions ? versionMarks(runs, chosen) : [];
    entry.chart.show({
      data, series, labels, range: range ?? wide(data[0]), marks: [...marks, ...chosenMark(step)],
      unit: spec.yUnit, xLabel: "step", log: spec.log, wholeX: true,
    });
    entry.say = (x) => runs.map(({ name }) => {
      const found = columns.filter((column) => column.run === name).map((column) => said(column, x)).filter(Boolean).join(", ");
      return found && several ? `${name} ${found}` : found;
    }).filter(Boolean).join("; ");
    this.describe(entry, step);
    entry.panel.show(() => table(["step", ...columns.map((column) => (several ? `${column.run}: ${column.name}` : column.name))], data[0].map((x) => [num(x), ...columns.map((column) => num(column.points.get(x)))])));
  }

  stack(id, parts, run, step, range, tail) {
    const entry = this.panels[id];
    const x = run.view.columns.step;
    const values = parts.map(([, column]) => run.view.columns[column]);
    const isKnown = values.some((column) => column.some(known));
    entry.panel.node.hidden = !isKnown;
    if (!isKnown) return;
    const sums = stacked(x, values);
    const reversed = parts.toReversed();
    const few = x.length <= 60;
    const place = x.length - 1;
    const whole = sums[0][place] || 1;
    const labels = reversed.map(([name, column, ink], index) => {
      const value = at(run.view, column, place) ?? 0;
      return { value: sums[index][place] - value / 2, text: `${name} ${seconds(value)}`, short: name, color: color(`${ink}-text`) || color(ink), share: value / whole };
    }).filter((label) => label.share >= 0.03);
    entry.x = x;
    entry.chart.show({
      data: [x, ...sums], labels, range: range ?? wide(x, few ? 0.6 : 0), marks: chosenMark(step), unit: "s", xLabel: "step", wholeX: true,
      series: reversed.map(([, , ink]) => ({ color: color(ink), fill: color(ink), width: few ? 0 : 0.5, paths: few ? bars() : undefined })),
    });
    entry.say = (step) => {
      const index = x.indexOf(step);
      const found = parts.map(([name, column]) => [name, at(run.view, column, index)]).filter(([, value]) => value > 0);
      return index < 0 ? "" : found.map(([name, value]) => `${name} ${seconds(value)}`).join(", ") + tail(index);
    };
    this.describe(entry, step);
    entry.panel.show(() => table(["step", ...parts.map(([name]) => `${name}, s`)], x.map((each, index) => [num(each), ...values.map((column) => num(column[index]))])));
  }

  describe(entry, step) {
    const x = closest(entry.x, step ?? entry.x.at(-1));
    const text = `step ${x}: ${entry.say(x)}`;
    entry.panel.say(text);
    entry.plot.setAttribute("aria-valuemin", entry.x[0]);
    entry.plot.setAttribute("aria-valuemax", entry.x.at(-1));
    entry.plot.setAttribute("aria-valuenow", x);
    entry.plot.setAttribute("aria-valuetext", text);
  }

  hover(id, index) {
    const entry = this.panels[id];
    if (!entry?.x.length || !this.state) return;
    if (index === null) this.describe(entry, this.state.step);
    else entry.panel.say(`step ${entry.x[index]}: ${entry.say(entry.x[index])}`);
  }
}

function chosenMark(step) {
  return known(step) ? [{ x: step, color: color("--chosen"), width: 1.5 }] : [];
}

function versionMarks(runs, chosen) {
  const run = runs.find((each) => each.index === chosen);
  return run.view.versions.map(([x, version]) => ({ x, text: `v${version}`, color: color("--soft"), dash: true, sparse: true }));
}

const wide = (x, least = 0) => [x[0] - least, Math.max(x.at(-1) + least, x[0] + 1)];

export function closest(values, wanted) {
  return values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best), values[0]);
}

// "train 0.41": the value at x. Joined steps stand at their last step; held-out rewards hold on.
function said({ name, points, holds }, x) {
  let found = null;
  for (const [place, value] of points) {
    if (!known(value)) continue;
    if (holds === Infinity ? place <= x : place >= x && place < x + holds) found = [place, value];
    if (place >= x && found) break;
  }
  if (!found) return "";
  const when = holds === Infinity && found[0] !== x ? ` after step ${num(found[0])}` : "";
  return `${name} ${num(found[1])}${when}`;
}
