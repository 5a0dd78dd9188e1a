// Workers x time: one bar for each worker, coloured by its state; runs above each other in one scale.
import { el, fill, num, Panel, percent, seconds, svg, table } from "/static/format.js";

const STATES = { generating: "generates", spot: "trains the drafter", learning_ahead: "learns from finished groups", learning: "trains the policy", idle: "idle", starting: "starts", absent: "has no host", dead: "lost" };
const ROW = 20, GAP = 4, LEFT = 34, TOP = 16, AXIS = 20;

export class Timeline {
  constructor(host) {
    this.panel = new Panel("panel-timeline", "Workers over a step", "seconds");
    this.window = null;
    this.whole = [0, 1];
    this.runs = [];
    this.plot = el("div", { class: "plot timeline", tabindex: 0, role: "group", "aria-labelledby": "panel-timeline-title", onkeydown: (event) => this.key(event) });
    fill(this.panel.body, this.plot);
    host.append(this.panel.node);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // runs: [{index, name, step, timeline, step_s}]; seconds count from the beginning of the step
  show(runs) {
    const isSame = runs.length && this.runs.length === runs.length && runs.every((run, place) => run.step === this.runs[place].step);
    this.missing = runs.filter((run) => !run.timeline);
    this.runs = runs.filter((run) => run.timeline).map((run) => ({ ...run, shift: run.step_s ? Math.max(run.timeline.end_s - run.step_s, 0) : 0, ...run.timeline }));
    this.panel.node.hidden = false;
    if (!this.runs.length) {
      this.window = null;
      this.plot.replaceChildren(el("p", { class: "empty" }, "trace.json has no such step"));
      this.panel.say();
      this.panel.show(null);
      return;
    }
    this.whole = [0, Math.max(...this.runs.map((run) => run.end_s - run.shift))];
    this.earliest = -Math.max(...this.runs.map((run) => run.shift));
    if (!isSame) this.window = null;
    this.draw();
    this.panel.say(this.totals());
    this.panel.show(() => this.numbers());
  }

  totals() {
    const several = this.runs.length > 1;
    const lines = this.runs.map((run) => {
      const sums = Object.entries(this.sums(run)).filter(([, value]) => value > 0);
      const all = sums.reduce((total, [, value]) => total + value, 0);
      const length = run.end_s - run.shift;
      const first = this.runs[0].end_s - this.runs[0].shift;
      const speed = several && run !== this.runs[0] ? ` (${num(first / length)}x as fast as ${this.runs[0].name})` : "";
      const keys = sums.map(([state, value]) => el("span", { class: "key" }, el("i", { class: `swatch ${classOf(state)}` }), ` ${STATES[state] ?? state} ${seconds(value)} (${percent(value / all)})`));
      return el("span", { class: "totals" }, el("b", {}, several ? `${run.name}: ${seconds(length)}${speed}` : seconds(length)), " ", ...keys);
    });
    const missing = this.missing.map((run) => el("span", { class: "totals" }, `${run.name} has no such step`));
    return el("span", {}, ...lines, ...missing);
  }

  // Seconds of each state within the step itself.
  sums(run) {
    const sums = {};
    for (const state of Object.keys(STATES)) sums[state] = 0;
    for (const [, state, begin, end] of run.spans) sums[state] = (sums[state] ?? 0) + Math.max(end - Math.max(begin, run.shift), 0);
    return sums;
  }

  numbers() {
    const rows = this.runs.flatMap((run) => run.spans.map(([worker, state, begin, end]) => [run.name, num(worker), state, num(begin - run.shift), num(end - begin)]));
    const marks = this.runs.flatMap((run) => run.marks.map(([worker, when, name]) => [run.name, num(worker), name, num(when - run.shift)]));
    return el("div", {}, table(["run", "worker", "state", "begins, s", "lasts, s"], rows.slice(0, 500)), marks.length ? table(["run", "worker", "event", "at, s"], marks) : null);
  }

  key(event) {
    const [begin, end] = this.window ?? this.whole;
    const quarter = (end - begin) / 4;
    const windows = {
      ArrowLeft: [begin - quarter, end - quarter], ArrowRight: [begin + quarter, end + quarter],
      "+": [begin + quarter, end - quarter], "-": [begin - 2 * quarter, end + 2 * quarter], 0: null, Escape: null,
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in windows)) return;
    this.zoom(windows[event.key]);
    event.preventDefault();
  }

  zoom(window) {
    if (window) {
      const length = Math.min(window[1] - window[0], this.whole[1] - this.earliest);
      const begin = Math.min(Math.max(window[0], this.earliest), this.whole[1] - length);
      this.window = length < 1e-6 ? this.window : [begin, begin + length];
    } else this.window = null;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width || !this.runs.length) return;
    const [begin, end] = this.window ?? this.whole;
    const x = (value) => LEFT + ((value - begin) / (end - begin)) * (width - LEFT - 2);
    const several = this.runs.length > 1;
    const parts = [];
    let top = 0;
    for (const run of this.runs) {
      const drawn = new Set();
      if (several) parts.push(svg("text", { x: 0, y: top + 12, class: "strong" }, run.name));
      top += several ? TOP + 4 : run.marks.length ? TOP : 2;
      const rowHeight = run.workers.length > 24 ? Math.max(480 / run.workers.length, 3) : ROW + GAP;
      const height = Math.max(rowHeight - (rowHeight > 8 ? GAP : 1), 2);
      const rows = new Map(run.workers.map((worker, place) => [worker, top + place * rowHeight]));
      for (const [worker, y] of rows) if (rowHeight >= 12 || worker % 8 === 0) parts.push(svg("text", { x: LEFT - 6, y: y + height / 2, class: "row" }, `w${worker}`));
      for (const [worker, state, from, to] of run.spans) {
        const a = Math.max(x(from - run.shift), LEFT), b = Math.min(x(to - run.shift), width - 2);
        if (b <= LEFT || a >= width - 2 || b - a < 0.05) continue;
        const title = `worker ${worker} ${STATES[state] ?? state}, ${num(from - run.shift)} to ${num(to - run.shift)} s (${seconds(to - from)})`;
        parts.push(svg("rect", { x: a, y: rows.get(worker), width: Math.max(b - a, 0.4), height, class: classOf(state) }, svg("title", {}, title)));
        const name = STATES[state] ?? state;
        if (height >= 14 && !drawn.has(state) && b - a > name.length * 6.4 + 10) {
          drawn.add(state);
          parts.push(svg("text", { x: a + 6, y: rows.get(worker) + height / 2, class: `on ${classOf(state)}` }, name));
        }
      }
      const bottom = top + run.workers.length * rowHeight;
      this.marks(parts, run, { rows, height, top, x, left: LEFT, right: width });
      const stop = x(run.end_s - run.shift);
      if (several && stop > LEFT && stop < width) parts.push(svg("line", { x1: stop, x2: stop, y1: top - 4, y2: bottom, class: "end" }));
      top = bottom + (several ? 10 : 2);
    }
    parts.push(...this.axis(x, begin, end, width, top));
    const label = this.runs.map((run) => `${run.name}: ${run.workers.length} workers, ${seconds(run.end_s - run.shift)}`).join("; ");
    const drawing = svg("svg", { width, height: top + AXIS, role: "img", "aria-label": label });
    drawing.append(...parts);
    fill(this.plot, drawing);
    drawing.addEventListener("pointerdown", (event) => this.drag(event, drawing, begin, end, width));
    drawing.addEventListener("dblclick", () => this.zoom(null));
  }

  marks(parts, run, { rows, height, top, x, left, right }) {
    let free = -Infinity;
    for (const [worker, when, name] of run.marks) {
      const place = x(when - run.shift), y = rows.get(worker);
      if (place < left || place > right || y === undefined) continue;
      parts.push(svg("path", { d: `M${place - 4},${top - 6}h8l-4,5zV${y + height}`, class: "mark" }, svg("title", {}, `${name} at ${num(when - run.shift)} s`)));
      const room = name.length * 6 + 10;
      const start = place + room > right ? place - room : place + 7;
      if (start > free) parts.push(svg("text", { x: start, y: top - 5, class: "event" }, name));
      free = Math.max(free, start + room);
    }
  }

  axis(x, begin, end, width, top) {
    const step = niceStep((end - begin) / Math.max(width / 90, 2));
    const parts = [];
    for (let value = Math.ceil(begin / step) * step; value <= end + 1e-9; value += step) {
      parts.push(svg("text", { x: Math.min(x(value), width - 14), y: top + 14, class: "tick" }, `${+value.toFixed(6)} s`));
      parts.push(svg("line", { x1: x(value), x2: x(value), y1: top, y2: top + 4, class: "grid" }));
    }
    return parts;
  }

  drag(event, drawing, begin, end, width) {
    if (event.pointerType === "touch") return;
    const from = event.offsetX;
    const value = (place) => begin + ((place - LEFT) / (width - LEFT - 2)) * (end - begin);
    const shade = svg("rect", { y: 0, height: drawing.clientHeight, class: "selection" });
    drawing.append(shade);
    const left = drawing.getBoundingClientRect().left;
    const move = (next) => {
      const to = next.clientX - left;
      shade.setAttribute("x", Math.min(from, to));
      shade.setAttribute("width", Math.abs(to - from));
    };
    const up = (next) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", up);
      shade.remove();
      const to = next.clientX - left;
      if (Math.abs(to - from) > 5) this.zoom([value(Math.min(from, to)), value(Math.max(from, to))]);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up);
  }
}

const classOf = (state) => (state in STATES ? state : "other");

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}
