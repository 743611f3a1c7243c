"use strict";
// The page of `fminfer serve`. What a model or the server says is set as text, never as markup.

const $ = (id) => document.getElementById(id);
const percent = (p) => (p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);

function make(tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

// --- the server ---

const KEY = "fminfer-key";
let asking = null;

/** Ask for the key; the promise tells whether one was given. Calls share one question. */
function askForKey(why) {
  const dialog = $("key-dialog");
  asking ??= new Promise((resolve) => {
    $("change-key").hidden = false;
    $("key-why").textContent = why;
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "use";
      if (isGiven) sessionStorage.setItem(KEY, $("key").value);
      $("key").value = "";
      asking = null;
      resolve(isGiven);
    }, { once: true });
  });
  return asking;
}

function send(path, { body, signal }) {
  const key = sessionStorage.getItem(KEY);
  return fetch(path, {
    method: body ? "POST" : "GET",
    headers: {
      ...(key && { Authorization: `Bearer ${key}` }),
      ...(body && { "Content-Type": "application/json" }),
    },
    body: body && JSON.stringify(body),
    signal,
  });
}

async function call(path, options = {}) {
  let answer = await send(path, options);
  while (answer.status === 401) {
    const sent = sessionStorage.getItem(KEY) !== null;
    const message = sent ? "That key is not this server's." : "This server asks for an API key.";
    if (!(await askForKey(message))) throw new Error(message);
    answer = await send(path, options);
  }
  if (!answer.ok) throw new Error(await errorOf(answer));
  return answer;
}

async function errorOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${answer.status}. ${text.slice(0, 300)}`;
  }
}

/** Yield the objects of a stream of events; those that keep it alive hold nothing new. */
async function* readEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// --- tokens ---

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // the least probability of each colour but the last
const tokensOf = new WeakMap(); // a span has one token, or those that share a character

/** Return what a chunk says of its tokens, chat or completion: [{ text, logprob, others }]. */
function tokensIn({ logprobs }) {
  const byLogprob = (others) => others.sort((a, b) => b.logprob - a.logprob);
  if (logprobs?.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token,
      logprob,
      others: byLogprob(top_logprobs.map((each) => ({ text: each.token, logprob: each.logprob }))),
    }));
  }
  return (logprobs?.tokens ?? []).map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    others: byLogprob(
      Object.entries(logprobs.top_logprobs[i]).map(([other, logprob]) => ({ text: other, logprob })),
    ),
  }));
}

/** Return a token's bytes. `bytes:\xe2\x80` is how a piece of a character is spelled. */
function bytesOf(text) {
  if (!/^bytes:.*\\x/s.test(text)) return [...new TextEncoder().encode(text)];
  return [...text.slice(6).matchAll(/\\x(..)|(.)/gs)].map(([, hex, plain]) =>
    hex ? parseInt(hex, 16) : plain.charCodeAt(0),
  );
}

/** Return how many of the tokens make whole characters, 0 if none yet, and their text. */
function firstWhole(tokens, isLast) {
  const decode = (bytes, stream) =>
    new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes), { stream });
  const bytes = [];
  for (const [place, token] of tokens.entries()) {
    bytes.push(...bytesOf(token.text));
    const text = decode(bytes, false);
    const isWhole = decode(bytes, true) === text; // in a stream, a piece would be waited for
    if (isWhole || (isLast && place === tokens.length - 1)) return [place + 1, text];
  }
  return [0, ""];
}

/** A text that grows with its tokens. Where no token has the text, it is shown plainly. */
class TokenText {
  #element;
  #tail = document.createTextNode(""); // text whose tokens have not come
  #tokens = []; // tokens whose text has not come

  constructor(element) {
    this.#element = element;
    element.append(this.#tail);
  }

  add(text, tokens, isLast) {
    this.#tail.appendData(text);
    this.#tokens.push(...tokens);
    while (this.#tokens.length && this.#placeNext(isLast));
  }

  #placeNext(isLast) {
    let [count, piece] = firstWhole(this.#tokens, isLast);
    const tail = this.#tail.data;
    if (!tail.includes(piece) && piece.startsWith(tail)) {
      if (!isLast) return false; // the server holds back what may become a stop string
      piece = tail; // a stop string has cut it
    }
    if (!count) return false;
    const tokens = this.#tokens.splice(0, count);
    const start = tail.indexOf(piece);
    if (!piece || start < 0) return true; // a token without text, such as the one that ends
    const covered = this.#tail.splitText(start);
    this.#tail = covered.splitText(piece.length);
    covered.replaceWith(this.#cover(piece, tokens));
    return true;
  }

  #cover(piece, tokens) {
    const p = Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0));
    const level = LEVELS.findIndex((least) => p >= least);
    const span = make("span", `token level-${level < 0 ? LEVELS.length : level}`, piece);
    if (/^\s*\n\s*$/.test(piece)) span.classList.add("newline");
    span.tabIndex = this.#element.querySelector(".token") ? -1 : 0; // arrow keys reach the others
    tokensOf.set(span, tokens);
    return span;
  }
}

/** Return the lines of the hint for one token: its alternatives, best first, and the rest. */
function describe(token) {
  const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  const line = (className, text, p) => {
    const row = make("div", className, "");
    const bar = make("i", "", "");
    bar.style.width = `${100 * p}%`;
    row.append(make("b", "", text), bar, make("span", "", percent(p)));
    return row;
  };
  const isListed = token.others.some(({ text }) => text === token.text);
  const all = isListed ? token.others : [...token.others, token];
  const rest = 1 - all.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0);
  return [
    ...all.map(({ text, logprob }) =>
      line(text === token.text ? "chosen" : "", visible(text), Math.exp(logprob)),
    ),
    line("others", "all others", Math.max(0, rest)),
  ];
}

function showHint(span) {
  const hint = $("hint");
  hint.replaceChildren(...tokensOf.get(span).flatMap(describe));
  hint.hidden = false;
  span.setAttribute("aria-describedby", "hint");
  const box = [...span.getClientRects()].at(-1); // a line may break behind its first space
  const left = Math.min(box.left, document.documentElement.clientWidth - hint.offsetWidth - 8);
  const above = box.top - hint.offsetHeight - 6;
  hint.style.left = `${Math.max(8, left)}px`;
  hint.style.top = `${above < 8 ? box.bottom + 6 : above}px`;
}

const hideHint = () => ($("hint").hidden = true);

/** Move from token to token by keys, as in a toolbar: one of them takes part in the tab order. */
function walk(event) {
  if (event.key === "Escape") hideHint();
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (!event.target.matches(".token") || !(event.key in steps)) return;
  const all = [...event.target.parentElement.querySelectorAll(".token")];
  const place = all.indexOf(event.target) + steps[event.key];
  const next = all[Math.max(0, Math.min(all.length - 1, place))];
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// --- asking ---

const messages = { chat: [], completion: [] };
let hasTemplate = true;
let running = null; // the AbortController of the answer that comes

const modeNow = () => document.forms.ask.elements.mode.value;

function settings() {
  const names = ["temperature", "max_tokens", "top_p", "seed"].filter((name) => $(name).value);
  return Object.fromEntries(names.map((name) => [name, $(name).valueAsNumber]));
}

function requestOf(mode, text) {
  const streamed = { stream: true, stream_options: { include_usage: true }, ...settings() };
  if (mode === "completion") return ["v1/completions", { prompt: text, logprobs: 5, ...streamed }];
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  const conversation = [...system, ...messages.chat, { role: "user", content: text }];
  return [
    "v1/chat/completions",
    { messages: conversation, logprobs: true, top_logprobs: 5, ...streamed },
  ];
}

function addEntry(log, className, title) {
  const entry = make("article", `entry ${className}`, "");
  const said = make("div", "said", "");
  entry.append(make("h3", "", title), said);
  log.append(entry);
  return said;
}

/** Join the pieces of tool calls as they come. */
function addToolCalls(calls, pieces) {
  for (const { index, id, function: part } of pieces) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += part?.name ?? "";
    calls[index].function.arguments += part?.arguments ?? "";
  }
}

/** Show an answer while it comes into `said`; fill `message` with what an assistant has said. */
async function follow(answer, said, message, times) {
  const shown = new TokenText(said);
  const calls = [];
  const tools = make("pre", "tool", "");
  const log = said.closest(".log");
  let end = {};
  for await (const { choices, usage } of readEvents(answer)) {
    end = { ...end, ...(usage && { usage }) };
    for (const choice of choices) {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      const text = choice.text ?? choice.delta.content ?? "";
      const tokens = tokensIn(choice);
      if (!times.first && (text || tokens.length || choice.delta?.tool_calls)) {
        times.first = performance.now();
        $("status").textContent = "Answering…";
      }
      message.content += text;
      shown.add(text, tokens, Boolean(choice.finish_reason));
      addToolCalls(calls, choice.delta?.tool_calls ?? []);
      if (calls.length) {
        message.tool_calls = calls;
        tools.textContent = calls.map((each) => `${each.function.name}(${each.function.arguments})`).join("\n");
        said.after(tools);
      }
      if (choice.finish_reason) end.reason = choice.finish_reason;
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
  }
  return end;
}

function summary({ reason, usage }, { start, first }) {
  const seconds = (performance.now() - first) / 1000;
  const why = { stop: "Complete", length: "Reached max tokens", tool_calls: "Calls a tool" };
  const parts = [why[reason] ?? reason];
  if (usage) parts.push(`${usage.prompt_tokens} prompt + ${usage.completion_tokens} answer tokens`);
  if (first) parts.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
  if (usage?.completion_tokens > 1 && seconds > 0) {
    parts.push(`then ${((usage.completion_tokens - 1) / seconds).toFixed(0)} tokens/s`);
  }
  return parts.join(" · ");
}

/** Ask, and show the answer. What fails goes back into the empty field, to be sent again. */
async function ask(mode, text) {
  const log = $(`${mode}-log`);
  const conversation = messages[mode];
  const [path, body] = requestOf(mode, text);
  const question = mode === "chat" ? addEntry(log, "user", "You") : null;
  const said = addEntry(log, "assistant", mode === "chat" ? "Model" : "Completion");
  (question ?? said).append(mode === "chat" ? text : make("span", "given", text));
  const meta = make("p", "meta", "");
  said.after(meta);
  log.scrollTop = log.scrollHeight;
  const message = { role: "assistant", content: "" };
  const times = { start: performance.now() };
  try {
    const answer = await call(path, { body, signal: running.signal });
    const end = await follow(answer, said, message, times);
    meta.textContent = summary(end, times);
    $("status").textContent = "Done.";
  } catch (error) {
    const isStopped = error.name === "AbortError";
    meta.textContent = isStopped ? "Stopped" : "";
    $("status").textContent = isStopped ? "Stopped." : "Failed; see the answer.";
    if (!isStopped) meta.replaceWith(make("p", "error", explain(error)));
    if (!message.content) {
      if (!$("text").value && mode === modeNow()) $("text").value = text;
      return;
    }
  }
  conversation.push({ role: "user", content: text }, message);
}

// fetch throws a TypeError where there is no connection.
const explain = (error) =>
  error instanceof TypeError ? "The server does not answer. Is it running?" : error.message;

async function submit(event) {
  event.preventDefault();
  if (running) return;
  const mode = modeNow();
  const text = $("text").value;
  if (mode === "chat") $("text").value = "";
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("status").textContent = "Waiting for tokens…";
  $(`${mode}-log`).ariaBusy = "true"; // a screen reader reads the answer once it is whole
  await ask(mode, text);
  $(`${mode}-log`).ariaBusy = "false";
  running = null;
  $("stop").disabled = true;
  showMode();
}

function clear() {
  const mode = modeNow();
  running?.abort();
  hideHint();
  messages[mode] = [];
  for (const entry of $(`${mode}-log`).querySelectorAll(".entry")) entry.remove();
  $("status").textContent = "";
}

function showMode() {
  const isChat = modeNow() === "chat";
  document.body.dataset.mode = modeNow();
  $("text-label").textContent = isChat ? "Message" : "Prompt";
  $("send-note").textContent = isChat ? "Enter sends, Shift + Enter breaks the line" : "Ctrl + Enter sends";
  $("send").disabled = Boolean(running) || (isChat && !hasTemplate);
  showExamples(isChat);
  hideHint();
}

function sendByKey(event) {
  const isSent = modeNow() === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (event.key !== "Enter" || !isSent || event.isComposing || $("send").disabled) return;
  event.preventDefault();
  document.forms.ask.requestSubmit();
}

// --- what stands around ---

let model = "model";

function showExamples(isChat) {
  const base = new URL("v1", document.baseURI).href;
  const path = isChat ? "chat/completions" : "completions";
  const said = isChat
    ? { messages: [{ role: "user", content: "Say hello" }] }
    : { prompt: "Question: How do you go from the porch to the den?\nAnswer:" };
  const body = { model, ...said, max_tokens: 32 };
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = $("change-key").hidden ? "" : ` \\\n  -H "Authorization: Bearer $FMINFER_API_KEY"`;
  $("try-curl").textContent =
    `curl ${base}/${path}${key} \\\n  -H "Content-Type: application/json" \\\n  -d '${quoted}'`;
  const named = Object.entries(body).map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`);
  $("try-python").textContent =
    `${key ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key=${key ? 'os.environ["FMINFER_API_KEY"]' : '"none"'})\n` +
    `answer = client.${path.replace("/", ".")}.create(\n${named.join("")})\n` +
    `print(answer.choices[0].${isChat ? "message.content" : "text"})`;
}

/** Copy the code beside a button. navigator.clipboard is only there for HTTPS and localhost. */
function copy({ target }) {
  getSelection().selectAllChildren(target.previousElementSibling);
  target.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl + C";
  setTimeout(() => (target.textContent = "Copy"), 2000);
}

async function loadModel() {
  try {
    const [found] = (await (await call("v1/models")).json()).data;
    model = found.id;
    hasTemplate = found.has_chat_template !== false;
    const context = found.max_model_len?.toLocaleString("en");
    $("model").textContent = context ? `${model} · context ${context} tokens` : model;
    document.title = `${model} · fminfer`;
    if (!hasTemplate) {
      $("chat-empty").textContent =
        "This model has no chat template, so it cannot chat here. Start the server with " +
        "--chat-template FILE, or take Completion.";
      document.forms.ask.elements.mode.value = "completion";
    }
  } catch (error) {
    $("model").textContent = "unknown model";
    $("status").textContent = explain(error);
  }
  showMode();
}

const rates = Array(60).fill(0);

function showStats(stats) {
  const rounded = (value) =>
    value?.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 }) ?? "–";
  $("num_running").textContent = stats?.num_running ?? "–";
  $("num_waiting").textContent = stats?.num_waiting ?? "–";
  $("kv_usage").textContent = stats ? `${(100 * stats.kv_usage).toFixed(1)} %` : "–";
  $("kv-bar").style.width = `${100 * (stats?.kv_usage ?? 0)}%`;
  for (const name of ["prompt_tokens_per_s", "generation_tokens_per_s"]) {
    $(name).textContent = rounded(stats?.[name]);
  }
  rates.shift();
  rates.push(stats?.generation_tokens_per_s ?? 0);
  const most = Math.max(1, ...rates);
  $("spark").setAttribute("points", rates.map((rate, i) => `${i},${19 - (18 * rate) / most}`).join(" "));
}

async function pollStats() {
  if (document.visibilityState === "visible") {
    try {
      const answer = await send("stats", { signal: AbortSignal.timeout(5000) });
      showStats(answer.ok ? await answer.json() : null);
    } catch {
      showStats(null);
    }
  }
  setTimeout(pollStats, 1000);
}

document.forms.ask.addEventListener("submit", submit);
for (const choice of document.forms.ask.elements.mode) choice.addEventListener("change", showMode);
$("text").addEventListener("keydown", sendByKey);
for (const button of document.querySelectorAll(".code button")) button.addEventListener("click", copy);
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("change-key").addEventListener("click", async () => {
  if (await askForKey("Requests are sent with this key.")) loadModel();
});
for (const log of document.querySelectorAll(".log")) {
  for (const name of ["pointerover", "focusin", "click"]) {
    log.addEventListener(name, ({ target }) => target.matches(".token") && showHint(target));
  }
  for (const name of ["pointerout", "focusout", "scroll"]) log.addEventListener(name, hideHint);
  log.addEventListener("keydown", walk);
}
window.addEventListener("scroll", hideHint, { passive: true });
loadModel();
pollStats();
