// The completions of a step: a list, and the one to read with its drafted characters marked.
import { el, fill, known, num } from "/static/format.js";

const ORDERS = {
  index: () => 0,
  long: (a, b) => b.num_tokens - a.num_tokens,
  high: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
};

export class Reader {
  constructor(rows, text, order, load) {
    Object.assign(this, { rows, text, order, load });
    this.shown = [];
    this.index = null;
    this.latest = 0;
    order.addEventListener("change", () => this.list());
    rows.addEventListener("keydown", (event) => this.key(event));
  }

  show(data, keepsRollouts) {
    this.data = data;
    if (!data.num) {
      this.shown = [];
      fill(this.rows);
      fill(this.text, el("p", { class: "empty" }, keepsRollouts ? "rollouts.jsonl has no such step" : "This run keeps no rollouts (run.save_rollouts = false)."));
      return;
    }
    this.index = null;
    this.list();
  }

  list() {
    this.shown = this.data.rows.toSorted(ORDERS[this.order.value]);
    const options = this.shown.map((row, place) => el("div", { role: "option", id: `row-${place}`, class: "option", "aria-selected": "false", onclick: () => this.choose(place) },
      el("span", { class: "reward" }, num(row.reward)), el("span", { class: "tokens" }, num(row.num_tokens, "tok")), el("span", { class: "beginning" }, row.head.replaceAll("\n", " "))));
    if (this.data.num > this.shown.length) options.push(el("p", { class: "soft" }, `the first ${this.shown.length} of ${num(this.data.num)}`));
    fill(this.rows, ...options);
    this.choose(0, false);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !this.shown.length) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.place + step, 0), this.shown.length - 1));
  }

  async choose(place, scrolls = true) {
    this.place = place;
    const row = this.shown[place];
    this.rows.querySelectorAll("[aria-selected=true]").forEach((node) => node.setAttribute("aria-selected", "false"));
    const option = this.rows.children[place];
    option.setAttribute("aria-selected", "true");
    this.rows.setAttribute("aria-activedescendant", option.id);
    if (scrolls) option.scrollIntoView({ block: "nearest" });
    if (this.index === row.index) return;
    this.index = row.index;
    const request = ++this.latest;
    const found = await this.load(row.index);
    if (request === this.latest) this.read(found);
  }

  read(found) {
    if (!found) {
      fill(this.text, el("p", { class: "empty" }, "This completion cannot be read."));
      return;
    }
    const facts = [["reward", num(found.reward)], ["tokens", num(found.num_tokens)], ["ended by", found.finish_reason], ["policy version", num(found.policy_version)], ["prompt", found.prompt_id]];
    if (found.calls[0]) facts.push(["calls", `${num(found.calls[0])}, ${num(found.calls[1])} bad`]);
    const characters = Array.from(found.text), offsets = found.drafted ?? [];
    const turns = found.turns.length ? found.turns : [[0, characters.length, "", null]];
    const part = offsets.reduce((sum, at, place) => sum + (place % 2 ? at : -at), 0) / Math.max(characters.length, 1);
    const note = found.drafted
      ? el("p", { class: "soft" }, el("mark", {}, "Marked"), ` text was drafted and accepted: ${num(Math.round(1000 * part) / 10)}\u202f% of the characters.`)
      : el("p", { class: "soft" }, "The run did not keep which tokens were drafted.");
    fill(this.text,
      el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("h3", {}, "Prompt"), el("pre", { class: "prompt" }, found.prompt), el("h3", {}, "Completion"), note,
      ...turns.flatMap(([begin, end, role, reward]) => [
        role ? el("h4", {}, known(reward) ? `${role}, reward ${num(reward)}` : role) : null,
        el("pre", { class: role && role !== "assistant" ? "observation" : "completion" }, ...marked(characters, offsets, begin, end)),
      ]),
      found.is_cut ? el("p", { class: "soft" }, "The rest of this text is not shown.") : null);
  }
}

// The characters from `at` to `last`, those within pairs of offsets marked. Offsets count characters, not UTF-16 units.
function marked(characters, offsets, at, last) {
  const nodes = [];
  for (let place = 0; place < offsets.length; place += 2) {
    const begin = Math.max(offsets[place], at), end = Math.min(offsets[place + 1], last);
    if (end <= begin) continue;
    if (begin > at) nodes.push(characters.slice(at, begin).join(""));
    nodes.push(el("mark", {}, characters.slice(begin, end).join("")));
    at = end;
  }
  nodes.push(characters.slice(at, last).join(""));
  return nodes;
}
