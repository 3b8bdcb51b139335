import { Conversation, ServerError, ask, reply } from "/static/chat.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty",
  "max_tokens", "seed"];
const KEPT = [...NUMBERS, "system", "stop"];

let conversation = new Conversation();
let running = null; // { node, controller } of the reply that is being written
let stateBytes = 0;
const shown = new Map(); // node -> its article

// What the browser keeps: settings for good, the server's key while the tab is open.
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

// What the server keeps of the conversation, once it is known; a phone has no room for the rest.
function showMemory(rest) {
  if (!stateBytes) return;
  $("memory").replaceChildren(bytes(stateBytes), make("span", "rest", ` ${rest}`));
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
  const made = make("button", "", text);
  made.type = "button";
  made.title = label;
  made.setAttribute("aria-label", label);
  made.disabled = disabled;
  made.addEventListener("click", onclick);
  return made;
}

function tools(node) {
  const row = make("div", "tools");
  const siblings = node.parent.children, place = siblings.indexOf(node);
  const busy = running !== null;
  if (siblings.length > 1) {
    row.append(
      button("‹", "Previous version", () => choose(node, -1), busy || place === 0),
      make("span", "place", `${place + 1} of ${siblings.length}`),
      button("›", "Next version", () => choose(node, 1), busy || place === siblings.length - 1),
    );
  }
  if (node.role === "user") row.append(button("Edit", "Edit this message and continue from there", () => edit(node), busy));
  else {
    row.append(button("Try again", "Write this reply again", () => write(node.parent), busy));
    row.append(button("Copy", "Copy this reply", () => navigator.clipboard?.writeText(node.text)));
  }
  if (node.facts) row.append(make("span", "facts", node.facts));
  return row;
}

function article(node) {
  const made = make("article", node.role);
  made.setAttribute("aria-label", node.role === "user" ? "You" : "Model");
  made.append(make("div", "text", node.text));
  if (node.problem) made.append(make("div", "problem", node.problem));
  if (running?.node === node) made.classList.add("writing");
  else made.append(tools(node));
  return made;
}

function draw() {
  const path = conversation.path();
  $("empty").hidden = path.length > 0;
  shown.clear();
  $("messages").replaceChildren($("empty"), ...path.map((node) => {
    const made = article(node);
    shown.set(node, made);
    return made;
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
  const place = shown.get(node);
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
  place.replaceChildren(box, row);
  box.focus();
}

// Let the model write a reply after `parent`, beside those that are there.
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
      if (text) shown.get(node)?.querySelector(".text").append(text);
      $("status").textContent = tokens ? `${tokens} tokens, ${speed().toFixed(1)} tokens/s` : "Reading ...";
      if (follow) toEnd();
    });
  } catch (error) {
    if (error.name !== "AbortError") {
      node.problem = error.message;
      if (error instanceof ServerError && error.status === 401) openSettings(true, "key");
    }
  }
  const facts = [];
  if (tokens) facts.push(`${tokens} tokens`, `${speed().toFixed(1)} tokens/s`, `first after ${((first - began) / 1000).toFixed(2)} s`);
  if (usage) {
    const known = usage.prompt_tokens_details.cached_tokens;
    facts.push(`read ${usage.prompt_tokens - known}, remembered ${known}`);
    showMemory(`for ${(usage.total_tokens).toLocaleString("en")} tokens`);
  } else if (controller.signal.aborted) facts.push("stopped");
  node.facts = facts.join(" · ");
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
  // After a question without an answer, a new one takes its place.
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
    showMemory("at any length");
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
for (const name of KEPT) {
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
  showMemory("at any length");
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
