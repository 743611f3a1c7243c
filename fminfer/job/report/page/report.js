
"use strict";
// The rows of a report. What a model or a file says is set as text, never as markup.

const $ = (id) => document.getElementById(id);
const { files, rows, labels } = JSON.parse($("data").textContent);
const LEVELS = [0.9, 0.5, 0.2, 0.05]; // the least probability of each colour but the last
const percent = (p) => {
  if (p < 0.001) return "< 0.1 %";
  return p >= 0.9995 && p < 1 ? "> 99.9 %" : `${(100 * p).toFixed(1)} %`;
};
const many = (count) => count.toLocaleString("en");
const seconds = (s) => `${s < 10 ? s.toFixed(3) : s.toFixed(1)} s`;
const listedOf = new WeakMap(); // a token's span, and its alternatives

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

// --- what a row says ---

function fill(element, { text, left_out, tail }) {
  element.append(text ?? "");
  if (left_out) {
    element.append(make("span", "cut", `… ${many(left_out)} characters left out here …`), tail);
  }
  return element;
}

function makeToken([text, logprob, listed, isGiven], isFirst) {
  const span = make("span", "token", text);
  if (isGiven) span.classList.add("given");
  if (logprob === null) return span;
  const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  span.classList.add(`level-${level < 0 ? LEVELS.length : level}`);
  if (/^\s*\n\s*$/.test(text)) span.classList.add("newline");
  span.tabIndex = isFirst ? 0 : -1; // arrow keys reach the others
  listedOf.set(span, listed);
  return span;
}

/** Return a part of a conversation: a title, a text, and calls of tools. */
function makePart(title, said, className = "") {
  const part = make("div", `part ${className}`);
  part.append(make("h4", "", title));
  const block = make("div", "said");
  block.dir = "auto";
  let isFirst = true;
  for (const piece of said.pieces ?? []) {
    block.append(makeToken(piece, isFirst && piece[1] !== null));
    if (piece[1] !== null) isFirst = false;
  }
  fill(block, said);
  if (block.textContent) part.append(block);
  for (const [name, given] of said.calls ?? []) part.append(make("p", "call", `${name}(${given})`));
  if (said.ids) part.append(fill(make("p", "meta", "token ids: "), said.ids));
  if (!block.textContent && !said.calls && !said.ids) part.append(make("p", "empty", "no text"));
  return part;
}

function titleOf({ who, is_ids }) {
  if (who === "line") return "The line as it stands";
  return who === "prompt" && is_ids ? "Prompt (token ids)" : who === "prompt" ? "Prompt" : who;
}

function makeChoice(choice, place, row) {
  const why = { stop: "complete", length: "reached max_tokens", tool_calls: "calls a tool" };
  const number = row.num_choices > 1 ? ` ${place + 1} of ${many(row.num_choices)}` : "";
  const [who, how] = isEcho(choice, row) ? ["Prompt", "no token drawn"] : ["Answer", why[choice.reason] ?? choice.reason];
  const parts = [`${who}${number}`, how];
  if (choice.stop) parts.push(`stopped by ${choice.stop}`);
  if (choice.logprobs) {
    const [sum, count] = choice.logprobs;
    parts.push(`${many(count)} logprobs: sum ${sum.toFixed(3)}, mean ${(sum / count).toFixed(3)} (${percent(Math.exp(sum / count))} a token)`);
  }
  const part = makePart(parts.join(" · "), choice, who === "Prompt" ? "question" : "answer");
  if (choice.odds) part.append(makeOdds(choice));
  return part;
}

/** Return the probabilities of a choice's labels, and what they have together of all that may come. */
function makeOdds(choice) {
  const box = make("div", "odds");
  for (const [label, p] of choice.odds) {
    box.append(makeOddsLine(label === textOf(choice) ? "chosen" : "", spell(label), p));
  }
  if (typeof choice.mass === "number") {
    box.append(make("p", "meta", `Labels have ${percent(choice.mass)} of the probability of all texts. What is above are shares of that.`));
  }
  return box;
}

const spell = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");

/** Return a name with a bar, as long as it is probable. */
function makeOddsLine(className, name, p) {
  const line = make("div", className);
  const bar = make("i", "");
  bar.style.width = `${100 * Math.min(1, p)}%`;
  line.append(make("b", "", name), bar, make("span", "", percent(p)));
  return line;
}

/** Tell whether a choice is its prompt alone, as where prompts are scored. */
const isEcho = (choice, row) => row.completion_tokens === 0 && textOf(choice) !== "";

/** Say what the row's true label is, and what came of it. */
function describeTruth({ truth, verdict }) {
  if (verdict === "missing") return "no true label";
  const ends = { right: "the answer is right", wrong: "the answer is wrong", stranger: "which is no label of the request" };
  return `true label ${truth}: ${ends[verdict]}`;
}

function tokensText(row) {
  if (row.completion_tokens === null || row.completion_tokens === undefined) return [];
  const cached = row.cached_tokens ? ` (${many(row.cached_tokens)} shared)` : "";
  return [`${many(row.prompt_tokens)}${cached} prompt + ${many(row.completion_tokens)} answer tokens`];
}

function makeBody(row) {
  const body = make("div", "body");
  for (const [place, asked] of row.asked.entries()) {
    const isQuestion = asked.who === "prompt" || place === row.asked.length - 1;
    if (asked.who === "note") body.append(make("p", "meta", asked.text));
    else body.append(makePart(titleOf(asked), asked, isQuestion ? "question" : ""));
  }
  if (!row.asked.length && !row.choices?.some((each) => isEcho(each, row))) body.append(make("p", "meta", "The request is not known: a Batch record does not repeat it."));
  if (row.error) {
    const { message, code, type, param } = row.error;
    body.append(make("p", "fault", `${code}: ${message}`));
    body.append(make("p", "meta", [type, param !== "None" && `field ${param}`].filter(Boolean).join(" · ")));
  }
  for (const [place, choice] of (row.choices ?? []).entries()) body.append(makeChoice(choice, place, row));
  if (row.num_choices > (row.choices ?? []).length) {
    body.append(make("p", "meta", `${many(row.num_choices - row.choices.length)} more choices in the output`));
  }
  const facts = [`${files[row.file]}, line ${many(row.line)}`];
  if (row.input_line) facts.push(`line ${many(row.input_line)} of the input`);
  if (row.label?.verdict) facts.push(describeTruth(row.label));
  if (row.id !== null) facts.push(`custom_id ${row.id}`);
  facts.push(...tokensText(row));
  if (typeof row.seconds === "number") facts.push(seconds(row.seconds));
  if (row.params.length) facts.push(row.params.map(([name, value]) => `${name} ${value}`).join(", "));
  if (row.tools.length) facts.push(`tools: ${row.tools.join(", ")}`);
  body.append(make("p", "meta", facts.join(" · ")));
  if (row.others) body.append(fill(make("p", "meta", "further keys: "), row.others));
  return body;
}

/** Scroll long boxes: of a prompt to its end, where rows differ; of an echoed one to the answer. */
function scrollBoxes(item, row) {
  const isEchoed = row.params.some(([name, value]) => name === "echo" && ["true", "1"].includes(value));
  for (const box of item.querySelectorAll(isEchoed ? ".said" : ".question .said")) {
    const drawn = box.querySelector(".token:not(.given)");
    const end = drawn ? drawn.offsetTop - box.offsetTop : Infinity;
    box.scrollTop = Math.min(end - box.clientHeight / 2, box.scrollHeight);
    if (box.scrollTop) box.previousElementSibling.append(" · scroll up for its beginning");
  }
}

// --- the list ---

const textOf = (said) => [
  ...(said.pieces ?? []).map(([text]) => text), said.text ?? "", said.tail ?? "",
  ...(said.calls ?? []).flat(),
].join("");

/** A wrong label is told on each of its rows, whatever the row is shown for. */
const reasonsOf = ({ why, label }) => (label?.verdict === "wrong" ? [...new Set([...why, "wrong"])] : why);
const sureness = (row) => (typeof row.label?.p === "number" ? row.label.p : null);

function makeRow(row, number) {
  const item = make("details", row.error ? "row is-error" : "row");
  item.id = `row-${number}`;
  const summary = make("summary", "");
  const start = make("span", "start");
  const [asked, answered] = row.start;
  start.append(make("bdi", "dim", asked));
  if (answered) start.append(" → ", make("bdi", "", answered));
  const figures = make("span", "figures", row.error ? "" : lengthOf(row));
  for (const why of reasonsOf(row)) if (why !== "sample") figures.append(make("span", `tag ${why}`, why));
  const name = make("span", "name");
  name.append(make("bdi", "", files[row.file]), `:${row.line}`);
  summary.append(name, start, figures);
  item.append(summary);
  item.addEventListener("toggle", () => {
    if (!item.open || item.children.length > 1) return;
    item.append(makeBody(row));
    scrollBoxes(item, row);
  });
  return item;
}

const likely = (row) => {
  const add = ([sum, count], { logprobs: [more, n] = [0, 0] }) => [sum + more, count + n];
  const [sum, count] = (row.choices ?? []).reduce(add, [0, 0]);
  return count ? -sum / count : -Infinity;
};
const lengthOf = (row) =>
  sureness(row) !== null ? percent(sureness(row)) : row.completion_tokens || likely(row) === -Infinity ? `${many(row.completion_tokens ?? 0)} tokens` : `mean\u00a0logprob\u00a0${(-likely(row)).toFixed(3)}`;
const items = rows.map(makeRow);
const searched = rows.map((row) =>
  [...row.asked.map(textOf), ...(row.choices ?? []).map(textOf), row.error?.code, row.error?.message, row.id, row.others?.text]
    .join("\n").toLowerCase(),
);

function showRows() {
  const text = $("search").value.trim().toLowerCase();
  const why = $("why").value;
  const order = $("order").value;
  const keys = {
    unlikely: likely,
    unsure: (row) => -(sureness(row) ?? Infinity),
    sure: (row) => sureness(row) ?? -Infinity,
  };
  const keyOf = keys[order] ?? ((row) => row[order] ?? -Infinity);
  const places = [...rows.keys()];
  if (order) places.sort((a, b) => keyOf(rows[b]) - keyOf(rows[a]) || a - b);
  $("list").append(...places.map((place) => items[place]));
  let count = 0;
  for (const [place, row] of rows.entries()) {
    const isShown = (!why || reasonsOf(row).includes(why)) && searched[place].includes(text);
    items[place].hidden = !isShown;
    count += isShown;
  }
  $("count").textContent = count === rows.length ? `${many(count)} rows` : `${many(count)} of ${many(rows.length)} rows`;
  hideHint();
}

function openNamed() {
  const item = document.getElementById(location.hash.slice(1));
  if (!item?.matches(".row")) return;
  if (item.hidden) {
    $("search").value = $("why").value = "";
    showRows();
  }
  item.open = true;
  item.scrollIntoView();
  item.querySelector("summary").focus({ preventScroll: true });
}

// --- alternatives of a token ---

/** Return the lines of the hint for one token: its alternatives, best first, and the rest. */
function describe(listed) {
  const rest = 1 - listed.reduce((sum, [, logprob]) => sum + Math.exp(logprob), 0);
  return [
    ...listed.map(([text, logprob, isChosen]) => makeOddsLine(isChosen ? "chosen" : "", spell(text), Math.exp(logprob))),
    makeOddsLine("others", "all others", Math.max(0, rest)),
  ];
}

function showHint(span) {
  if (!listedOf.has(span)) return;
  $("hint").replaceChildren(...listedOf.get(span).flatMap(describe));
  $("hint").hidden = false;
  span.setAttribute("aria-describedby", "hint");
  placeHint(span);
}

function placeHint(span) {
  const hint = $("hint");
  const box = [...span.getClientRects()].at(-1); // a line may break behind its first space
  const left = Math.min(box.left, document.documentElement.clientWidth - hint.offsetWidth - 8);
  const above = box.top - hint.offsetHeight - 6;
  hint.style.left = `${Math.max(8, left)}px`;
  hint.style.top = `${above < 8 ? box.bottom + 6 : above}px`;
}

const hideHint = () => ($("hint").hidden = true);

/** Keep the hint beside a token that has the focus: to reach it may have moved the page. */
function followScroll() {
  const focused = document.activeElement;
  if (!$("hint").hidden && focused?.matches(".token")) placeHint(focused);
  else hideHint();
}

/** Move from token to token by keys, as in a toolbar: one of them takes part in the tab order. */
function walk(event) {
  if (event.key === "Escape") hideHint();
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (!event.target.matches(".token") || !(event.key in steps)) return;
  const all = [...event.target.parentElement.querySelectorAll(".token[tabindex]")];
  const place = all.indexOf(event.target) + steps[event.key];
  const next = all[Math.max(0, Math.min(all.length - 1, place))];
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// --- labels ---

const MAX_CONFUSED = 30; // labels in the table of confusions
const OTHERS = -1; // stands for all further labels there

function makeBar(share) {
  const bar = make("i", "bar");
  bar.style.width = `${100 * share}%`;
  return bar;
}

/** Return a title and a table that scrolls where it is too wide; a cell is a text or an element. */
function makeTable(title, heads, lines) {
  const table = make("table", "");
  const head = table.createTHead().insertRow();
  for (const text of heads) {
    const cell = make("th", "", text);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const [name, ...cells] of lines) {
    const line = body.insertRow();
    const first = make("th", "", name);
    first.scope = "row";
    line.append(first);
    for (const cell of cells) line.insertCell().append(cell);
  }
  const box = make("div", "scroll card");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", title);
  box.append(table);
  const whole = make("div", "");
  whole.append(make("h3", "", title), box);
  return whole;
}

/** Return how many rows have each label as the true one. */
function countTruths() {
  const truths = labels.names.map(() => 0);
  for (const [truth, , count] of labels.pairs) truths[truth] += count;
  return truths;
}

function makeCounts() {
  const { names, counts, pairs } = labels;
  const truths = countTruths();
  const total = counts.reduce((sum, count) => sum + count, 0);
  const most = Math.max(...counts);
  const lines = names.map((name, place) => [
    name, many(counts[place]), counts[place] ? percent(counts[place] / total) : "0 %", makeBar(counts[place] / most),
    ...(pairs.length ? [many(truths[place])] : []),
  ]);
  return makeTable("How often each label was answered", ["label", "answered", "share", "", ...(pairs.length ? ["true"] : [])], lines);
}

/** Return the distribution of the answered labels' probabilities, and how many are right of each part. */
function makeBins() {
  const { bins, pairs } = labels;
  const most = Math.max(...bins.map(([, { num_rows }]) => num_rows));
  const isPart = bins.some(([, { num_rows, num_compared }]) => num_compared < num_rows);
  const lines = [];
  for (let place = 0; place < 10; place += 1) {
    const [, bin, interval] = bins.find(([first]) => first === place) ?? [place, { num_rows: 0, num_compared: 0 }];
    const share = (part) => (bin.num_compared ? `${(100 * part / bin.num_compared).toFixed(1)} %` : "–");
    const line = [`${10 * place} – ${10 * place + 10} %`.replaceAll(" ", "\u00a0"), many(bin.num_rows), makeBar(bin.num_rows / most)];
    if (pairs.length) {
      const [low, high] = bin.num_compared ? interval.map((value) => (100 * value).toFixed(1)) : [];
      if (isPart) line.push(many(bin.num_compared));
      line.push(share(bin.total), share(bin.num_right), bin.num_compared ? `${low} – ${high} %` : "–");
    }
    lines.push(line);
  }
  const heads = ["probability", "rows", ""];
  if (isPart && pairs.length) heads.push("compared");
  if (pairs.length) heads.push("mean probability", "right", "95 % interval");
  return makeTable("How sure the answered labels are", heads, lines);
}

/** Return a line for each true label and a column for each answered one; rare ones are joined. */
function makeConfusions() {
  const { names, counts, pairs } = labels;
  const truths = countTruths();
  const used = [...names.keys()].filter((place) => counts[place] + truths[place]);
  const ranked = [...used].sort((a, b) => counts[b] + truths[b] - counts[a] - truths[a]);
  const shown = new Set(ranked.slice(0, MAX_CONFUSED));
  const places = used.filter((place) => shown.has(place));
  if (places.length < used.length) places.push(OTHERS);

  const joined = new Map();
  const keyOf = (truth, answer) => `${truth} ${answer}`;
  for (const [truth, answer, count] of pairs) {
    const key = keyOf(...[truth, answer].map((place) => (shown.has(place) ? place : OTHERS)));
    joined.set(key, (joined.get(key) ?? 0) + count);
  }
  const nameOf = (place) => (place === OTHERS ? "(others)" : names[place]);
  const lines = [];
  for (const truth of places) {
    const found = places.map((answer) => joined.get(keyOf(truth, answer)) ?? 0);
    const total = found.reduce((sum, count) => sum + count, 0);
    if (!total) continue;
    const look = (answer, count) => {
      if (!count) return "none";
      if (truth === answer) return truth === OTHERS ? "" : "hit";
      return count >= total / 10 ? "miss" : "";
    };
    lines.push([nameOf(truth), ...found.map((count, place) => make("span", look(places[place], count), many(count)))]);
  }
  return makeTable("Which label was answered for which", ["true ↓ answered →", ...places.map(nameOf)], lines);
}

function showLabels() {
  const place = $("label-tables");
  if (!place) return;
  place.append(makeCounts());
  if (labels.pairs.length) place.append(makeConfusions());
  if (labels.bins.length) place.append(makeBins());
}

/** Take what no row is shown for, or can be ordered by, out of the fields. */
function fitFields() {
  const isSure = rows.some((row) => sureness(row) !== null);
  for (const option of document.querySelectorAll("#why .of-labels")) {
    if (!rows.some((row) => reasonsOf(row).includes(option.value))) option.remove();
  }
  for (const option of document.querySelectorAll("#order .of-labels")) if (!isSure) option.remove();
  if (isSure) $("order").value = "unsure";
}

showLabels();
fitFields();
$("filter").hidden = false;
$("filter").addEventListener("submit", (event) => event.preventDefault());
for (const id of ["search", "why", "order"]) $(id).addEventListener("input", showRows);
for (const name of ["pointerover", "focusin", "click"]) {
  $("list").addEventListener(name, ({ target }) => target.matches(".token") && showHint(target));
}
$("list").addEventListener("focusout", hideHint);
$("list").addEventListener("pointerout", ({ target }) => {
  const focused = document.activeElement;
  if (!target.matches(".token")) return; // the page may have moved under the pointer
  if (focused?.matches(".token")) showHint(focused);
  else hideHint();
});
$("list").addEventListener("keydown", walk);
window.addEventListener("scroll", followScroll, { passive: true, capture: true });
window.addEventListener("hashchange", openNamed);
showRows();
if (items.length) $("list").firstElementChild.open = true;
openNamed();
