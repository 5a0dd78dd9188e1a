// The page: loads the runs' data, follows their files, and wires the panels.
import { el, fill, known, num, percent, seconds } from "/static/format.js";
import { ByStep } from "/static/by_step.js";
import { OfStep } from "/static/of_step.js";
import { Reader } from "/static/reader.js";

const $ = (id) => document.getElementById(id);
const state = { runs: [], views: [], chosen: 0, step: null, follows: true, zoom: null, line: null, latest: 0 };

// A report holds what the server would answer; its parts are named by their paths.
const embedded = JSON.parse($("data")?.textContent ?? "null");

async function get(path) {
  if (embedded) return embedded[path] ?? null;
  const response = await fetch(path, { credentials: "same-origin" });
  return response.ok ? response.json() : null;
}

const overviewPath = (run) => `/api/runs/${run}/overview`;
const path = (run, step, rest = "") => `/api/runs/${run}/steps/${step}${rest}`;

const byStep = new ByStep($("by-step"), { pick, zoom, scale, move: (count) => pick(state.step + count) });
const ofStep = new OfStep($("of-step"), (line) => { state.line = line; loadStep(); });
const reader = new Reader($("rows"), $("text"), $("order"), (index) => get(path(state.chosen, state.step, `/completions/${index}`)));

// The steps of the chosen run, ascending.
const steps = () => state.views[state.chosen]?.columns.step ?? [];

// ---- the runs

function runCards() {
  const cards = state.runs.map((run, index) => {
    const view = state.views[index];
    const newest = (name) => view.columns[name]?.findLast(known);
    const heldOut = view.held_out;
    const first = heldOut[0]?.[1], lastHeldOut = heldOut.at(-1)?.[1];
    const facts = [
      ["held-out reward", heldOut.length > 1 ? `${num(first)} \u2192 ${num(lastHeldOut)}` : num(first)],
      ["reward", num(newest("reward/mean"))],
      ["accept length", num(newest("speculation/accept_length"))],
      ["step", seconds(newest("timing_s/step"))],
      ["idle time used", percent(newest("cluster/idle_utilization"))],
    ].filter(([, value]) => value !== "\u2013");
    const steps = run.steps ? `step ${num(run.step)} of ${num(run.steps)}` : `step ${num(run.step)}`;
    const time = known(run.seconds) && run.state === "finished" ? ` in ${seconds(run.seconds)}` : "";
    const about = [run.settings.model, run.settings.workers ? `${run.settings.workers} worker${run.settings.workers === 1 ? "" : "s"}` : "", run.settings.drafter ? `drafter ${run.settings.drafter}` : ""].filter(Boolean).join(", ");
    const name = el("h2", {}, el("i", { class: `swatch run-${index}` }), run.name);
    return el("section", { class: "run", "aria-label": `run ${run.name}` }, name,
      el("p", { class: "state" }, el("b", { class: run.state }, run.state), `, ${steps}${time}`, el("span", { class: "soft" }, ` ${about}`)),
      el("dl", { class: "figures" }, ...facts.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))));
  });
  fill($("runs"), ...cards);
  document.title = `${state.runs.map((run) => run.name).join(", ")} \u2013 longtail view`;
}

function chooser() {
  const box = $("chosen-run");
  box.hidden = state.runs.length < 2;
  const options = state.runs.map((run, index) => el("label", {}, el("input", { type: "radio", name: "run", value: index, checked: index === state.chosen, onchange: () => { state.chosen = index; state.line = null; drawSteps(); loadStep(); } }), ` ${run.name}`));
  fill(box, el("legend", {}, "details of"), ...options);
}

async function refresh(changed) {
  const [runs, ...views] = await Promise.all([get("/api/runs"), ...changed.map((run) => get(overviewPath(run)))]);
  if (!runs) return;
  const isFirst = !state.runs.length;
  state.runs = runs;
  changed.forEach((run, place) => { if (views[place]) state.views[run] = views[place]; });
  if (isFirst) chooser();
  runCards();
  const newest = steps().at(-1);
  const isBehind = state.follows && known(newest) && newest !== state.step;
  if (isBehind) state.step = newest;
  drawSteps();
  const touched = isFirst || isBehind || state.step === newest;
  if (touched && known(state.step)) await loadStep();
  document.body.dataset.steps = state.views.map((view) => view.columns.step.length).join(" ");
}

// ---- over the steps

function drawSteps() {
  const runs = state.runs.map((run, index) => ({ index, name: run.name, view: state.views[index] })).filter((run) => run.view?.columns.step.length);
  const isEmpty = !runs.some((run) => run.index === state.chosen);
  $("by-step").hidden = isEmpty;
  $("step").hidden = isEmpty;
  const waiting = state.runs.length ? embedded ? "No step was in metrics.jsonl." : "No step is in metrics.jsonl yet; the page follows the run." : "";
  fill($("zoom"), isEmpty ? waiting : state.zoom ? `steps ${Math.ceil(state.zoom[0])} to ${Math.floor(state.zoom[1])}, press 0 to see all` : "");
  if (isEmpty) return;
  byStep.show({ runs, chosen: state.chosen, step: state.step, range: state.zoom });
}

function zoom(range) {
  const first = steps()[0], last = steps().at(-1);
  const [low, high] = range ? [Math.max(range[0], first), Math.min(range[1], last)] : [first, last];
  if (range && high - low < 2) return;
  state.zoom = low <= first && high >= last ? null : [low, high];
  drawSteps();
}

function scale(factor) {
  const first = steps()[0], last = steps().at(-1);
  const [low, high] = state.zoom ?? [first, last];
  const length = Math.min(Math.max(factor * (high - low), 2), last - first);
  const begin = Math.min(Math.max(state.step - length / 2, first), last - length);
  zoom([begin, begin + length]);
}

// ---- one step

function pick(step) {
  if (!steps().length) return;
  state.step = Math.round(Math.min(Math.max(step, steps()[0]), steps().at(-1)));
  state.follows = state.step === steps().at(-1);
  drawSteps();
  loadStep();
}

async function loadStep() {
  const request = ++state.latest;
  const { step, chosen } = state;
  $("step-number").value = step;
  $("step-title").textContent = `Step ${num(step)}`;
  $("follow").checked = state.follows;
  const [completions, ...found] = await Promise.all([get(path(chosen, step, "/completions")), ...state.runs.map((_, run) => get(path(run, step)))]);
  const rollouts = found[chosen]?.rollouts ?? [];
  const line = rollouts[state.line] ? state.line : rollouts.length - 1;
  const rollout = rollouts.length ? await get(path(chosen, step, `/rollouts/${line}`)) : null;
  if (request !== state.latest) return;
  const runs = state.runs.map((run, index) => ({ index, name: run.name, data: found[index] })).filter((run) => run.data);
  const isMissing = !runs.some((run) => run.index === chosen);
  fill($("missing"), isMissing && embedded ? "is not in this report, which has the newest steps; longtail view shows every step" : "");
  $("of-step").hidden = $("texts").hidden = isMissing;
  if (!isMissing) {
    ofStep.show(runs, chosen, line, rollout);
    reader.show(completions ?? { rows: [], num: 0 }, state.runs[chosen].settings.keeps_rollouts);
  }
  document.body.dataset.step = step;
}

$("previous").addEventListener("click", () => pick(state.step - 1));
$("next").addEventListener("click", () => pick(state.step + 1));
$("step-number").addEventListener("change", (event) => pick(Number(event.target.value)));
$("follow").addEventListener("change", (event) => {
  state.follows = event.target.checked;
  if (state.follows) pick(Infinity);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawSteps(); if (known(state.step)) loadStep(); });

// ---- following

function follow() {
  let working = Promise.resolve();
  const events = new EventSource("/events");
  events.addEventListener("open", () => { $("connection").textContent = "live"; $("connection").className = "live"; });
  events.addEventListener("error", () => { $("connection").textContent = "connection lost, trying again"; $("connection").className = "lost"; });
  events.addEventListener("changed", (event) => { working = working.then(() => refresh(JSON.parse(event.data))); });
}

if (embedded) {
  $("connection").textContent = `written ${embedded.written}`;
  refresh([0]);
} else follow();
