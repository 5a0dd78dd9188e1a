// Elements, numbers and colours. Every text of a run enters the page as a text node.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

export const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// 0.4312 -> "0.431", 17.24 -> "17.2", 32592 -> "32,592", unknown -> "-"
export function num(value, unit = "") {
  if (!known(value)) return "\u2013";
  const size = Math.abs(value);
  const digits = Number.isInteger(value) ? 0 : size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  const shown = value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: Math.min(digits, 2) });
  return unit ? `${shown}\u202f${unit}` : shown;
}

export const percent = (value) => (known(value) ? `${Math.round(100 * value)}\u202f%` : "\u2013");

export function seconds(value) {
  if (!known(value)) return "\u2013";
  if (value >= 7200) return `${num(Math.round(value / 360) / 10)}\u202fh`;
  if (value >= 300) return `${Math.round(value / 60)}\u202fmin`;
  if (value > 0 && value < 0.1) return `${num(1000 * value)}\u202fms`;
  return num(value, "s");
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const runColor = (index) => color(`--run-${index}`);

export function table(columns, rows, caption) {
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))));
  return el("div", { class: "wide" }, el("table", {}, caption ? el("caption", {}, caption) : null, el("thead", {}, head), el("tbody", {}, ...body)));
}

// A panel: title, unit and readout above a body, and the numbers behind it as a table on demand.
export class Panel {
  constructor(id, title, unit) {
    this.readout = el("p", { class: "readout", id: `${id}-readout` });
    this.body = el("div", { class: "body" });
    this.numbers = el("div");
    this.details = el("details", { class: "numbers", ontoggle: () => this.fillNumbers() }, el("summary", {}, "Numbers"), this.numbers);
    this.heading = el("h3", { id: `${id}-title` }, title, unit ? el("span", { class: "unit" }, ` ${unit}`) : "");
    this.node = el("figure", { class: "panel", id, "aria-labelledby": `${id}-title` }, el("figcaption", {}, this.heading, this.readout), this.body, this.details);
    this.makeNumbers = null;
  }

  show(makeNumbers) {
    this.makeNumbers = makeNumbers;
    this.details.hidden = !makeNumbers;
    this.fillNumbers();
  }

  fillNumbers() {
    if (this.details.open && this.makeNumbers) fill(this.numbers, this.makeNumbers());
  }

  say(...texts) {
    fill(this.readout, ...texts);
  }
}
