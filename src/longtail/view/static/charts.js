// Line, area and bar charts: uPlot with direct labels at the right end of every series.
import { color, known } from "/static/format.js";

const FONT = "12px system-ui, sans-serif";
const HEIGHT = 190;

function axes(options) {
  const base = { stroke: color("--soft"), font: FONT, ticks: { show: false }, border: { show: false } };
  const decades = (plot, values) => values.map((value) => (plot.scales.y.distr === 3 && Math.log10(value) % 1 ? null : value));
  const grid = { stroke: color("--line"), width: 1, filter: decades };
  const compact = (value) => {
    if (!known(value)) return "";
    if (Math.abs(value) >= 1e6) return `${value / 1e6}M`;
    if (Math.abs(value) >= 10000) return `${value / 1000}k`;
    return `${+value.toPrecision(6)}`;
  };
  return [
    { ...base, grid: { show: false }, show: options.xLabel !== undefined, label: options.xLabel, labelFont: FONT, labelSize: 16, labelGap: 0, size: 24, gap: 4, space: 48, values: (_, values) => values.map(compact), incrs: options.wholeX ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6] : undefined },
    { ...base, grid, size: 44, gap: 4, space: 32, values: (_, values) => values.map(compact) },
  ];
}

// The unit of the y axis stands above it; series are named where they end.
function drawLabels(plot, unit, given) {
  const { ctx, bbox } = plot;
  const scale = devicePixelRatio;
  ctx.save();
  ctx.font = `${12 * scale}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  ctx.fillStyle = color("--soft");
  ctx.textAlign = "left";
  ctx.fillText(unit, 4 * scale, 8 * scale);
  const labels = given.map((label) => ({ ...label, y: plot.valToPos(label.value, "y", true) })).filter((label) => Number.isFinite(label.y));
  labels.sort((a, b) => a.y - b.y);
  const gap = 14 * scale;
  const top = bbox.top + 4 * scale;
  labels.forEach((label, index) => { label.y = Math.max(label.y, index ? labels[index - 1].y + gap : top); });
  const bottom = bbox.top + bbox.height - 2 * scale;
  for (let index = labels.length - 1; index >= 0; index--) {
    const below = index + 1 < labels.length ? labels[index + 1].y - gap : bottom;
    labels[index].y = Math.min(labels[index].y, below);
  }
  const right = bbox.left + bbox.width;
  for (const label of labels) {
    const end = known(label.x) ? plot.valToPos(label.x, "x", true) : right;
    ctx.fillStyle = label.color;
    ctx.fillText(label.text, Math.min(end, right) + 6 * scale, label.y);
  }
  ctx.restore();
}

// Vertical lines: {x, color, text, dash}; texts that would touch are left out.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const scale = devicePixelRatio;
  let end = 0;
  ctx.save();
  ctx.font = `${11 * scale}px system-ui, sans-serif`;
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.x, "x", true));
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = mark.color;
    ctx.lineWidth = (mark.width || 1) * scale;
    ctx.setLineDash(mark.dash ? [4 * scale, 3 * scale] : []);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const width = mark.text ? ctx.measureText(mark.text).width : 0;
    const left = Math.min(Math.max(x - width / 2, 0), ctx.canvas.width - width);
    if (!width || left < end) continue;
    ctx.fillText(mark.text, left, bbox.top - 4 * scale);
    end = left + width + 6 * scale;
  }
  ctx.restore();
}

function textWidth(texts) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = FONT;
  return Math.max(0, ...texts.map((text) => context.measureText(text).width));
}

// A chart. `show(spec)` draws it anew:
//   data     [x, ...ys]                 series  [{color, width, dash, fill, paths, points}]
//   labels   [{value, text, color}]     marks   [{x, color, text}]
//   room (texts for which labels have room)
//   unit, xLabel, log, wholeX, top (least top of y), range (of x)
export class Chart {
  constructor(host, { onPick, onZoom, onHover, height = HEIGHT, sync } = {}) {
    Object.assign(this, { host, onPick, onZoom, onHover, height, sync, plot: null, spec: null });
    new ResizeObserver(() => this.resize()).observe(host);
  }

  resize() {
    const width = this.host.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.show(this.spec);
  }

  show(spec) {
    this.spec = spec;
    this.plot?.destroy();
    const width = this.host.clientWidth;
    if (!width) return;
    const narrow = width < 420;
    const labels = (spec.labels || []).filter((label) => known(label.value)).map((label) => ({ ...label, text: narrow ? label.short || label.text : label.text }));
    const right = labels.length ? textWidth(spec.room ?? labels.map((label) => label.text)) + 12 : 12;
    const options = {
      width, height: this.height, legend: { show: false }, padding: [(spec.marks || []).some((mark) => mark.text) ? 34 : 20, right, spec.xLabel === undefined ? 8 : 0, 0],
      scales: { x: { time: false, range: spec.range ? () => spec.range : undefined }, y: { distr: spec.log ? 3 : 1, range: (_, low, high) => yRange(spec, low, high) } },
      axes: axes(spec),
      cursor: { y: false, drag: { x: Boolean(this.onZoom), y: false, setScale: false }, points: { size: 6 }, sync: this.sync ? { key: this.sync, setSeries: false } : undefined, bind: { dblclick: () => () => { this.onZoom?.(null); return null; } } },
      series: [{}, ...spec.series.map((each) => ({ spanGaps: true, points: { show: false }, width: 1.75, ...each, stroke: each.color }))],
      hooks: {
        drawClear: [(plot) => drawMarks(plot, spec.marks || [])],
        draw: [(plot) => drawLabels(plot, spec.unit, labels)],
        setCursor: [(plot) => this.onHover?.(plot.cursor.idx ?? null)],
        setSelect: [(plot) => this.selected(plot)],
        ready: [(plot) => this.ready(plot)],
      },
    };
    this.plot = new uPlot(options, spec.data, this.host);
  }

  ready(plot) {
    if (!this.onPick) return;
    let down = null;
    plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      if (down === null || Math.abs(event.clientX - down) > 4 || plot.cursor.idx === null) return;
      this.onPick(plot.data[0][plot.cursor.idx]);
    });
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 5 || !this.onZoom) return;
    const zoom = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onZoom(zoom);
  }
}

function yRange(spec, low, high) {
  if (!known(low) || !known(high)) return spec.log ? [0.5, 10] : [0, 1];
  if (spec.log) return [spec.bottom ?? 10 ** Math.floor(Math.log10(Math.max(low, 1e-6))), high * 1.25];
  const bottom = spec.zero === false ? low - 0.06 * (high - low || Math.abs(high) || 1) : Math.min(0, low);
  return [bottom, Math.max(high + 0.06 * (high - bottom), spec.top ?? 1e-9)];
}

// Cumulative sums for stacked areas, the whole first, so that each part covers what is below it.
export function stacked(x, parts) {
  const sums = [];
  let before = x.map(() => 0);
  for (const values of parts) {
    before = before.map((sum, index) => sum + (values[index] ?? 0));
    sums.unshift(before);
  }
  return sums;
}

export const bars = (share = 0.82, most = 60) => uPlot.paths.bars({ size: [share, most] });
