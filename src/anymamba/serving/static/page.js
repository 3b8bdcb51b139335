import { Conversation, ServerError, ask, reply } from "/static/chat.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty",
  "max_tokens", "seed"];
const SAVED_SETTINGS = [...NUMBERS, "system", "stop"];

let conversation = new Conversation();
let running = null; // { node, controller } of the reply that is being written
let stateBytes = 0, bytesPerToken = 0; // of a conversation on the server, and of each of its tokens
const articles = new Map(); // article of each node

// Settings stay in the browser for good, the server's key while the tab is open.
const store = {
  get(name, where = localStorage) { try { return where.getItem(`anymamba.${name}`); } catch { return null; } },
  set(name, value, where = localStorage) { try { where.setItem(`anymamba.${name}`, value); } catch { /* private mode */ } },
};

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  for (; n >= 1024 && i < 3; i++) n /= 1024;
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
}

// Show the memory of the conversation on the server; phones hide the rest of the text.
function showMemory(tokens) {
  if (!stateBytes) return;
  const rest = tokens ? `for ${tokens.toLocaleString("en")} tokens` : bytesPerToken ? "and more per token" : "at any length";
  $("memory").replaceChildren(bytes(stateBytes + bytesPerToken * tokens), make("span", "rest", ` ${rest}`));
  $("memory").hidden = false;
}

function settings() {
  const body = {};
  for (const name of NUMBERS) if ($(name).value !== "" && $(name).validity.valid) body[name] = Number($(name).value);
  if ($("stop").value) body.stop = $("stop").value;
  return body;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text; // never markup: models write anything
  return element;
}

function button(text, label, onclick, disabled = false) {
  const element = make("button", "", text);
  element.type = "button";
  element.title = label;
  element.setAttribute("aria-label", label);
  element.disabled = disabled;
  element.addEventListener("click", onclick);
  return element;
}

function tools(node) {
  const row = make("div", "tools");
  const siblings = node.parent.children;
  const position = siblings.indexOf(node);
  const busy = running !== null;
  if (siblings.length > 1) {
    row.append(
      button("‹", "Previous version", () => choose(node, -1), busy || position === 0),
      make("span", "position", `${position + 1} of ${siblings.length}`),
      button("›", "Next version", () => choose(node, 1), busy || position === siblings.length - 1),
    );
  }
  if (node.role === "user") row.append(button("Edit", "Edit this message and continue from there", () => edit(node), busy));
  else {
    row.append(button("Try again", "Write this reply again", () => write(node.parent), busy));
    row.append(button("Copy", "Copy this reply", () => navigator.clipboard?.writeText(node.text)));
  }
  if (node.stats) row.append(make("span", "stats", node.stats));
  return row;
}

function article(node) {
  const element = make("article", node.role);
  element.setAttribute("aria-label", node.role === "user" ? "You" : "Model");
  element.append(make("div", "text", node.text));
  if (node.problem) element.append(make("div", "problem", node.problem));
  if (running?.node === node) element.classList.add("writing");
  else element.append(tools(node));
  return element;
}

function draw() {
  const path = conversation.path();
  $("empty").hidden = path.length > 0;
  articles.clear();
  $("messages").replaceChildren($("empty"), ...path.map((node) => {
    const element = article(node);
    articles.set(node, element);
    return element;
  }));
  $("send").hidden = running !== null;
  $("stop-now").hidden = running === null;
}

function atEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function toEnd() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function choose(node, by) {
  conversation.choose(node, by);
  draw();
}

function edit(node) {
  const element = articles.get(node);
  const box = make("textarea");
  box.value = node.text;
  box.rows = Math.min(12, node.text.split("\n").length + 1);
  box.setAttribute("aria-label", "Edit the message");
  const row = make("div", "tools");
  const send = () => {
    const text = box.value.trim();
    if (text) write(conversation.add(node.parent, "user", text));
  };
  row.append(button("Send", "Send the edited message", send), button("Cancel", "Leave it as it was", draw));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") draw();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  element.replaceChildren(box, row);
  box.focus();
}

// Let the model write another reply to `parent`.
async function write(parent) {
  if (running) return;
  notice("");
  const node = conversation.add(parent, "assistant", "");
  const controller = new AbortController();
  running = { node, controller };
  draw();
  toEnd();
  const began = performance.now();
  let first = 0, tokens = 0, usage = null;
  const speed = () => (tokens > 1 ? (1000 * (tokens - 1)) / (performance.now() - first) : 0);
  try {
    const body = { ...settings(), messages: conversation.messages(parent, $("system").value.trim()), return_token_ids: true };
    usage = await reply(body, $("key").value, controller.signal, (text, count) => {
      if (count && !first) first = performance.now();
      tokens += count;
      const follow = atEnd();
      node.text += text;
      if (text) articles.get(node)?.querySelector(".text").append(text);
      $("status").textContent = tokens ? `${tokens} tokens, ${speed().toFixed(1)} tokens/s` : "Reading ...";
      if (follow) toEnd();
    });
  } catch (error) {
    if (error.name !== "AbortError") {
      node.problem = error.message;
      if (error instanceof ServerError && error.status === 401) openSettings(true, "key");
    }
  }
  const stats = [];
  if (tokens) stats.push(`${tokens} tokens`, `${speed().toFixed(1)} tokens/s`, `first after ${((first - began) / 1000).toFixed(2)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    stats.push(`read ${usage.prompt_tokens - cached}, remembered ${cached}`);
    showMemory(usage.total_tokens);
  } else if (controller.signal.aborted) stats.push("stopped");
  node.stats = stats.join(" · ");
  running = null;
  $("status").textContent = "";
  const follow = atEnd();
  draw();
  if (follow) toEnd();
  $("input").focus();
}

function stop() {
  running?.controller.abort();
}

function send(event) {
  event?.preventDefault();
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  grow();
  const last = conversation.last();
  // A new question replaces one that got no reply.
  write(conversation.add(last.role === "user" ? last.parent : last, "user", text));
}

function grow() {
  const box = $("input");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function openSettings(open, field = "temperature") {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  if (open) $(field).focus();
}

async function greet() {
  try {
    const model = (await (await ask("/v1/models", $("key").value)).json()).data[0];
    $("model").textContent = document.title = model.id;
    $("max_tokens").max = model.max_tokens;
    stateBytes = model.state_bytes;
    bytesPerToken = model.state_bytes_per_token;
    showMemory(0);
    notice("");
  } catch (error) {
    notice(error.status === 401 ? "This server requires a key. Enter it in the settings." : error.message);
    if (error.status === 401) openSettings(true, "key");
  }
}

const dark = matchMedia("(prefers-color-scheme: dark)");
setTheme(store.get("theme") ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!store.get("theme")) setTheme(dark.matches ? "dark" : "light"); });
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  store.set("theme", theme);
});
for (const name of SAVED_SETTINGS) {
  const value = store.get(name);
  if (value !== null) $(name).value = value;
  $(name).addEventListener("change", () => store.set(name, $(name).value));
}
$("key").value = store.get("key", sessionStorage) ?? "";
$("key").addEventListener("change", () => { store.set("key", $("key").value, sessionStorage); greet(); });
$("open-settings").addEventListener("click", () => openSettings($("settings").hidden));
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("new").addEventListener("click", () => {
  stop();
  conversation = new Conversation();
  showMemory(0);
  draw();
  $("input").focus();
});
$("composer").addEventListener("submit", send);
$("stop-now").addEventListener("click", stop);
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if (!$("settings").hidden) { openSettings(false); $("open-settings").focus(); }
});
draw();
greet();
