"use strict";
// All model output comes from the JSON block and is inserted as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// --- light and dark ---------------------------------------------------------------------------------------------

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light mode" : "Dark mode"; // what a click switches to
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(history.state?.dark ?? prefersDark.matches);
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  history.replaceState({ dark }, ""); // survives a reload
  setTheme(dark);
});

// --- a run that goes on ---------------------------------------------------------------------------------------------

if (data.refresh) {
  // Don't interrupt the reader: any input restarts the reload timer.
  let timer;
  const wait = () => { clearTimeout(timer); timer = setTimeout(() => location.reload(), 1000 * data.refresh); };
  for (const kind of ["pointerdown", "keydown", "wheel", "change"]) addEventListener(kind, wait, { passive: true });
  wait();
}

// --- pictures in the static part ----------------------------------------------------------------------------------

for (const image of document.querySelectorAll("img[data-image]")) image.src = data.images[image.dataset.image];

// --- curves: the values under the pointer -------------------------------------------------------------------------

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = data.charts[figure.dataset.chart];
  const svg = figure.querySelector("svg");
  const outputs = figure.querySelectorAll("output");
  const [left, top, right, bottom] = chart.box;
  const [first, last] = chart.limits;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", top);
  cursor.setAttribute("y2", bottom);
  const format = (value) => (chart.share ? `${(100 * value).toFixed(1)} %` : Number(value.toPrecision(4)).toString());
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * svg.viewBox.baseVal.width;
    const update = first + ((x - left) / (right - left)) * (last - first);
    const nearer = (best, value) => (Math.abs(value - update) < Math.abs(best - update) ? value : best);
    const nearest = chart.lines.flatMap((line) => line.x).reduce(nearer);
    chart.lines.forEach((line, i) => {
      const k = line.x.indexOf(line.x.reduce(nearer));
      const band = line.low[k] === line.high[k] ? "" : ` (${format(line.low[k])} to ${format(line.high[k])})`;
      const at = i === 0 || line.x[k] !== nearest ? ` at ${line.x[k]}` : "";
      outputs[i].textContent = `${format(line.mean[k])}${band}${at}`;
    });
    const place = left + ((nearest - first) / (last - first)) * (right - left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    svg.append(cursor);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.remove();
    for (const output of outputs) output.textContent = "";
  });
}

// --- episodes -----------------------------------------------------------------------------------------------------

const filters = {
  outcome: (episode) => ({ all: true, won: episode.success === true, lost: episode.success === false, open: episode.success === null })[byId("outcome").value],
  corrected: (step) => !byId("corrected").checked || step.verdict === "corrected",
  invalid: (step) => !byId("invalid").checked || !step.legal,
};
const wanted = (step) => filters.corrected(step) && filters.invalid(step);
const signed = (value) => (value === null ? "none" : `${value > 0 ? "+" : ""}${Number(value.toPrecision(3))}`);

class Pane {
  constructor(runIndex, updates) {
    this.root = byId("pane").content.firstElementChild.cloneNode(true);
    this.parts = {};
    for (const element of this.root.querySelectorAll("[data-f]")) this.parts[element.dataset.f] = element;
    const { run, updates: range, pick, back, on } = this.parts;
    data.runs.forEach((entry, i) => run.append(new Option(entry.name, i)));
    run.value = runIndex;
    run.closest("label").hidden = data.runs.length < 2;
    this.fillUpdates(updates);
    run.addEventListener("change", () => { this.fillUpdates("all"); this.refresh(); });
    range.addEventListener("change", () => this.refresh());
    pick.addEventListener("change", () => this.open(Number(pick.value)));
    back.addEventListener("click", () => this.move(-1));
    on.addEventListener("click", () => this.move(1));
    this.refresh();
  }

  get run() { return data.runs[this.parts.run.value]; }
  get episode() { return this.episodes[this.index]; }

  fillUpdates(selected) {
    const updates = [...new Set(this.run.episodes.map((episode) => episode.update))];
    const size = Math.max(1, Math.round(updates.length / 4));
    this.ranges = { all: updates, early: updates.slice(0, size), late: updates.slice(-size) };
    const say = (name, list) => `${name} (${list[0]}${list.length > 1 ? ` to ${list[list.length - 1]}` : ""})`;
    const options = [new Option("all", "all")];
    if (updates.length > 1) {
      options.push(new Option(say("first", this.ranges.early), "early"), new Option(say("last", this.ranges.late), "late"));
      for (const update of updates) {
        this.ranges[update] = [update];
        options.push(new Option(`update ${update}`, update));
      }
    }
    this.parts.updates.replaceChildren(...options);
    this.parts.updates.value = this.ranges[selected] && updates.length > 1 ? selected : "all";
  }

  refresh() {
    const updates = new Set(this.ranges[this.parts.updates.value]);
    const inRange = this.run.episodes.filter((episode) => updates.has(episode.update));
    this.episodes = inRange.filter((episode) => filters.outcome(episode) && episode.steps.some(wanted));
    const say = (e) => `update ${e.update}, env ${e.env}: ${{ true: "success", false: "no success", null: "not over" }[e.success]}, ${e.steps.length} step${e.steps.length === 1 ? "" : "s"}`;
    this.parts.pick.replaceChildren(...this.episodes.map((episode, i) => new Option(say(episode), i)));
    this.parts.count.textContent = this.episodes.length
      ? `${this.episodes.length} of ${this.run.episodes.length} episodes match`
      : "No episode matches these filters.";
    this.parts.body.hidden = this.episodes.length === 0;
    this.open(0);
  }

  open(index, step, matching = true) {
    this.index = index;
    if (!this.episode) return;
    if (matching && byId("match").checked) panes.filter((pane) => pane !== this).forEach((pane) => pane.match(this.episode.start));
    this.parts.pick.value = index;
    this.step = step ?? Math.max(0, this.episode.steps.findIndex(wanted));
    this.show();
  }

  /** Go to an episode with this start, if one matches the filters. */
  match(start) {
    const index = start === null ? -1 : this.episodes.findIndex((episode) => episode.start === start);
    if (index >= 0 && this.episode?.start !== start) this.open(index, undefined, false);
  }

  /** One step forward or back, across episodes. */
  move(by) {
    if (!this.episode) return;
    const next = this.step + by;
    if (next >= 0 && next < this.episode.steps.length) {
      this.step = next;
      this.show();
    } else this.turn(by, by < 0);
  }

  turn(by, atEnd = false) {
    const index = this.index + by;
    if (!this.episodes[index]) return;
    this.open(index, atEnd ? this.episodes[index].steps.length - 1 : 0);
  }

  show() {
    const { parts, episode } = this;
    const step = episode.steps[this.step];
    const { steps } = episode;
    parts.back.disabled = this.step === 0 && this.index === 0;
    parts.on.disabled = this.step === steps.length - 1 && this.index === this.episodes.length - 1;
    this.root.setAttribute("aria-label", `Episode of update ${episode.update}, environment ${episode.env}`);
    parts.timeline.replaceChildren(...steps.map((entry, i) => this.timelineButton(entry, i)));
    parts.image.hidden = step.image === null;
    if (step.image !== null) parts.image.src = data.images[step.image];
    parts.image.alt = `What the agent saw at step ${step.n + 1} of update ${step.update}`;
    const past = step.turns ? `, after ${step.turns} earlier turn${step.turns > 1 ? "s" : ""}` : "";
    parts.caption.textContent = `Update ${step.update}, step ${step.n + 1}${step.image === null ? " (picture left out for size)" : ""}${past}`;
    this.showEarlier(step);
    parts.badges.replaceChildren(...this.badges(step));
    parts.thought.textContent = step.thought || "(nothing)";
    parts.correction.hidden = !step.diff;
    if (step.diff) this.showDiff(step);
    parts.action.replaceChildren(make("span", "", step.action || "(none)"), make("span", "muted", step.legal ? " legal" : " not legal; "));
    if (!step.legal) parts.action.append(make("span", "muted", step.substitute ? "taken instead: " : "another action was taken, or the step was skipped"), make("span", "", step.substitute ?? ""));
    parts.bars.replaceChildren(...["reward", "value", "advantage"].flatMap((name) => this.bar(name, step[name])));
    this.showTokens(step);
    parts.prompt.textContent = data.prompts[step.prompt];
    byId("announce").textContent = `Update ${step.update}, environment ${episode.env}, step ${step.n + 1} of ${steps[steps.length - 1].n + 1}. ${[...parts.badges.children].map((badge) => badge.textContent).join(", ")}. Action ${step.action || "none"}. Reward ${signed(step.reward)}.`;
  }

  /** The pictures of earlier turns that the agent saw again, the oldest first. */
  showEarlier(step) {
    const earlier = step.earlier ?? [];
    this.parts.earlier.hidden = earlier.length === 0;
    this.parts.earlier.replaceChildren(...earlier.map((number, i) => {
      const image = make("img");
      image.src = data.images[number];
      image.alt = `Earlier picture ${i + 1} of ${earlier.length} that the agent saw again`;
      return image;
    }));
  }

  timelineButton(step, i) {
    const known = step.judged.length > 0;
    const right = step.judged.every(([, ok]) => ok);
    const truth = known ? (right ? "true thought" : "untrue thought") : "thought not judged";
    const button = make("button", !right || !step.legal ? "wrong" : known ? "right" : "", String(step.n + 1));
    button.type = "button";
    button.setAttribute("aria-label", `Step ${step.n + 1}, ${truth}`);
    if (i === this.step) button.setAttribute("aria-current", "step");
    button.addEventListener("click", () => { this.step = i; this.show(); this.root.focus({ preventScroll: true }); });
    const item = make("li");
    item.append(button);
    return item;
  }

  badges(step) {
    const { success } = this.episode;
    const badges = [success === null ? make("span", "badge", "not over") : success ? make("span", "badge good", "success") : make("span", "badge bad", "no success")];
    if (!step.valid) badges.push(make("span", "badge bad", `invalid: ${step.error}`));
    else if (!step.legal) badges.push(make("span", "badge bad", "illegal action"));
    for (const [part, right] of step.judged) badges.push(make("span", `badge ${right ? "good" : "bad"}`, `${part} ${right ? "✓" : "✗"}`));
    if (step.verdict) badges.push(make("span", `badge ${step.verdict === "right" ? "good" : "note"}`, `corrector: ${step.verdict}${step.reason ? ` (${step.reason})` : ""}`));
    return badges;
  }

  showDiff(step) {
    const tags = { "=": "span", "-": "del", "+": "ins" };
    // Put a space between removed and added text, so they don't read as one word.
    const apart = ([kind], i) => kind === "+" && i > 0 && step.diff[i - 1][0] === "-";
    this.parts.diff.replaceChildren(...step.diff.flatMap((piece, i) => [...(apart(piece, i) ? [" "] : []), make(tags[piece[0]], "", piece[1])]));
    if (step.correctAction && step.correctAction !== step.action) this.parts.diff.append(make("span", "muted", `\nso the action should be ${step.correctAction}`));
  }

  bar(name, value) {
    const track = make("div", "bar");
    const scale = this.run.scale[name];
    if (value && scale) {
      const fill = make("span", value > 0 ? "plus" : "minus");
      fill.style.setProperty("--w", `${(50 * Math.abs(value)) / scale}%`);
      track.append(fill);
    }
    return [make("span", "", name), track, make("span", "", signed(value))];
  }

  showTokens(step) {
    const strip = step.tokens.map((token, i) => {
      const p = step.logprobs[i];
      const span = make("span", i >= step.actionStart ? "act" : "", token || "⏎");
      if (!token) span.setAttribute("aria-label", "end of the response");
      span.style.setProperty("--p", p === null ? 0 : 1 - Math.exp(p));
      span.title = p === null ? "" : `log-prob ${p} (probability ${(100 * Math.exp(p)).toFixed(1)} %)`;
      return span;
    });
    if (step.moreTokens) strip.push(make("span", "muted", ` … ${step.moreTokens} more tokens`));
    this.parts.tokens.replaceChildren(...strip);
    const sum = (from, to) => step.logprobs.slice(from, to).reduce((total, p) => total + (p ?? 0), 0);
    const thought = sum(0, step.actionStart);
    const action = sum(step.actionStart);
    const weighted = this.run.thoughtCoef * thought;
    const share = weighted + action ? Math.round((100 * weighted) / (weighted + action)) : 0;
    this.parts.mass.textContent = `Log-prob of the thought ${thought.toFixed(2)}, of the action ${action.toFixed(2)}. With the thought's weight λ = ${this.run.thoughtCoef}, ${share} % of the response's log-prob lies in the thought.`;
  }
}

let panes = [];
const last = data.runs.length - 1;
const starts = (run) => new Set(run.episodes.map((episode) => episode.start).filter((start) => start !== null));
/** Whether the first and last run share a start. */
const comparable = last > 0 && [...starts(data.runs[0])].some((start) => starts(data.runs[last]).has(start));

function layOut() {
  const two = byId("compare").checked;
  const matched = two && byId("match").checked;
  const updates = matched ? ["all", "all"] : [data.runs.length > 1 ? "late" : "early", "late"];
  panes = [];
  panes = two ? [new Pane(0, updates[0]), new Pane(last, updates[1])] : [new Pane(0, "all")];
  byId("match").closest("label").hidden = !two || !comparable;
  byId("panes").classList.toggle("two", two);
  byId("panes").replaceChildren(...panes.map((pane) => pane.root));
  if (matched) openMatch();
}

/** The first pane's latest episode whose start the other pane has too. */
function openMatch() {
  const [one, other] = panes;
  const there = new Set(other.episodes.map((episode) => episode.start));
  const index = one.episodes.findLastIndex((episode) => episode.start !== null && there.has(episode.start));
  if (index >= 0) one.open(index);
}

if (byId("panes")) {
  for (const id of ["outcome", "corrected", "invalid"]) byId(id).addEventListener("change", () => panes.forEach((pane) => pane.refresh()));
  byId("match").checked = comparable;
  for (const id of ["compare", "match"]) byId(id).addEventListener("change", layOut);
  layOut();
  byId("announce").textContent = "";
  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.altKey || event.ctrlKey || event.metaKey || target.closest("input:not([type=checkbox]), select, textarea")) return;
    const focused = panes.filter((pane) => pane.root.contains(target));
    // Left and right work anywhere, on all panes; up and down scroll the page unless an episode has focus.
    const chosen = focused.length ? focused : panes;
    if (event.key === "ArrowRight") chosen.forEach((pane) => pane.move(1));
    else if (event.key === "ArrowLeft") chosen.forEach((pane) => pane.move(-1));
    else if (event.key === "ArrowDown" && focused.length) chosen.forEach((pane) => pane.turn(1));
    else if (event.key === "ArrowUp" && focused.length) chosen.forEach((pane) => pane.turn(-1));
    else return;
    event.preventDefault();
  });
}
