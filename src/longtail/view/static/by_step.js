// Panels over the steps of the runs. Curves of all runs share a plot; stacks are of the chosen run.
import { color, el, fill, known, num, Panel, runColor, seconds, table } from "/static/format.js";
import { bars, Chart, stacked } from "/static/charts.js";

const PHASES = [
  ["rollout", "timing_s/rollout", "--generating"], ["learn", "timing_s/learn", "--learning"],
  ["reward", "timing_s/reward", "--dead"],
  ["publish", "timing_s/publish", "--starting"], ["drafter", "timing_s/drafter", "--spot"],
  ["other", "timing_s/other", "--idle-ink"],
];
const IDLE = [["learned ahead", "cluster/learning_ahead_s", "--ahead"], ["trained the drafter", "cluster/spot_s", "--spot"], ["idle", "cluster/idle_s", "--idle-ink"]];

// Curves of a panel: name, column or points, and how its line looks.
const CURVES = {
  reward: { title: "Reward", unit: "mean of a step's completions", yUnit: "reward", curves: [
    { name: "train", column: "reward/mean" },
    { name: "held-out", points: (view) => view.held_out, strong: true },
  ] },
  accept: { title: "Accept length", unit: "tokens per verify step", yUnit: "tokens", curves: [
    { name: "measured", column: "speculation/accept_length", strong: true },
    { name: "expected", column: "drafter/expected_accept_length", dash: [4, 3] },
  ] },
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
      onPick: this.actions.pick, onZoom: this.actions.zoom, sync: "steps",
      onHover: (index) => this.hover(this.panels[id], index),
    });
    this.panels[id] = { panel, plot, chart, x: [], columns: [] };
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity }[event.key];
    const factor = { "+": 0.5, "-": 2, 0: Infinity, Escape: Infinity }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(step || factor)) return;
    if (step) this.actions.move(step);
    else this.actions.scale(factor);
    event.preventDefault();
  }

  // runs: [{index, name, view}], chosen: index, step: the chosen step, range: zoom or null
  show({ runs, chosen, step, range }) {
    this.step = step;
    for (const [id, spec] of Object.entries(CURVES)) this.curves(this.panels[id], spec, runs, range);
    const run = runs.find((each) => each.index === chosen);
    this.stack(this.panels.phases, PHASES, run.view.columns, range);
    this.stack(this.panels.idle, IDLE, run.view.columns, range);
  }

  curves(entry, spec, runs, range) {
    const several = runs.length > 1;
    const tables = [], series = [], labels = [], columns = [];
    for (const { index, name, view } of runs) {
      for (const curve of spec.curves) {
        if (several && curve.alone) continue;
        const points = curve.points ? curve.points(view) : view.columns.step.map((x, place) => [x, view.columns[curve.column][place]]);
        const end = points.findLast(([, value]) => known(value));
        if (!end) continue;
        const ink = runColor(index);
        tables.push([points.map(([x]) => x), points.map(([, value]) => value)]);
        series.push({ color: ink, width: curve.strong ? 2.25 : 1.25, dash: curve.dash, points: { show: Boolean(curve.points) || points.length <= 40, size: curve.points ? 7 : 4, fill: ink } });
        const text = several ? name : `${curve.name} ${num(end[1])}`;
        if (!several || curve.strong) labels.push({ value: end[1], x: end[0], text, short: several ? name : curve.name, color: ink });
        columns.push({ name: several ? `${name}: ${curve.name}` : curve.name, points: new Map(points), holds: Boolean(curve.points) });
      }
    }
    entry.panel.node.hidden = !tables.length;
    if (!tables.length) return;
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    this.draw(entry, columns, { data, series, labels, range: range ?? wide(data[0]), unit: spec.yUnit, log: spec.log });
  }

  stack(entry, parts, { step: x, ...found }, range) {
    const values = parts.map(([, column]) => found[column]);
    const isKnown = values.some((column) => column.some(known));
    entry.panel.node.hidden = !isKnown;
    if (!isKnown) return;
    const sums = stacked(x, values), few = x.length <= 60;
    const labels = parts.map(([name, column, ink], index) => {
      const value = found[column].at(-1) ?? 0;
      return { value: sums.at(-1 - index).at(-1) - value / 2, text: `${name} ${seconds(value)}`, short: name, color: color(`${ink}-text`) || color(ink), share: value / (sums[0].at(-1) || 1) };
    }).filter((label) => label.share >= 0.03);
    const series = parts.toReversed().map(([, , ink]) => ({ color: color(ink), fill: color(ink), width: few ? 0 : 0.5, paths: few ? bars() : undefined }));
    const columns = parts.map(([name], index) => ({ name, unit: "s", points: new Map(x.map((each, place) => [each, values[index][place]])) }));
    this.draw(entry, columns, { data: [x, ...sums], series, labels, range: range ?? wide(x, few ? 0.6 : 0), unit: "s" });
  }

  // columns: [{name, unit, points: values by step}], the numbers behind a chart
  draw(entry, columns, spec) {
    Object.assign(entry, { columns, x: spec.data[0] });
    entry.chart.show({ ...spec, marks: chosenMark(this.step), xLabel: "step", wholeX: true });
    this.describe(entry);
    const heads = columns.map(({ name, unit }) => (unit ? `${name}, ${unit}` : name));
    entry.panel.show(() => table(["step", ...heads], entry.x.map((x) => [num(x), ...columns.map(({ points }) => num(points.get(x)))])));
  }

  describe(entry) {
    const x = closest(entry.x, this.step ?? entry.x.at(-1));
    const aria = { valuemin: entry.x[0], valuemax: entry.x.at(-1), valuenow: x, valuetext: said(entry, x) };
    entry.panel.say(aria.valuetext);
    for (const [name, value] of Object.entries(aria)) entry.plot.setAttribute(`aria-${name}`, value);
  }

  hover(entry, index) {
    if (!entry.x.length) return;
    if (index === null) this.describe(entry);
    else entry.panel.say(said(entry, entry.x[index]));
  }
}

function chosenMark(step) {
  return known(step) ? [{ x: step, color: color("--chosen"), width: 1.5 }] : [];
}

const wide = (x, least = 0) => [x[0] - least, Math.max(x.at(-1) + least, x[0] + 1)];

function closest(values, wanted) {
  return values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best), values[0]);
}

// "step 6: train 0.41": the values at a step; held-out rewards hold on until the next one.
function said({ columns }, x) {
  const parts = columns.map(({ name, unit, points, holds }) => {
    const value = points.get(holds ? [...points.keys()].findLast((key) => key <= x) : x);
    return known(value) && (value || !unit) ? `${name} ${num(value, unit)}` : "";
  });
  return `step ${x}: ${parts.filter(Boolean).join(", ")}`;
}
