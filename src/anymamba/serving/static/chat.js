// The conversation as a tree, and the stream of a reply; independent of the page.

// Each message is a node. Its children are the versions of the next message, one of which is chosen.
export class Conversation {
  constructor() {
    this.root = { role: null, text: "", parent: null, children: [], chosen: -1 };
  }

  // Return the messages of the chosen branch.
  path() {
    const nodes = [];
    for (let node = this.root; node.chosen >= 0;) nodes.push((node = node.children[node.chosen]));
    return nodes;
  }

  add(parent, role, text) {
    const node = { role, text, parent, children: [], chosen: -1, stats: null, problem: "" };
    parent.children.push(node);
    parent.chosen = parent.children.length - 1;
    return node;
  }

  last() {
    return this.path().at(-1) ?? this.root;
  }

  choose(node, by) {
    const parent = node.parent;
    const next = parent.children.indexOf(node) + by;
    if (next >= 0 && next < parent.children.length) parent.chosen = next;
  }

  // Return the messages up to `node`, as the server expects them.
  messages(node, system) {
    const messages = [];
    for (; node.parent; node = node.parent) messages.unshift({ role: node.role, content: node.text });
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }
}

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch { /* not JSON: the status is all there is */ }
  throw new ServerError(response.status, message);
}

// Return the choice and the token counts of a chunk, each null if there is none.
function parseChunk(text) {
  let chunk = null;
  try {
    chunk = JSON.parse(text);
  } catch { /* not JSON: reported below */ }
  if (chunk?.error) throw new ServerError(0, String(chunk.error.message ?? "The server reported an error."));
  const choice = chunk?.choices?.[0] ?? null;
  const usage = chunk?.usage ?? null;
  const counts = [usage?.prompt_tokens, usage?.total_tokens, usage?.prompt_tokens_details?.cached_tokens];
  if (!Array.isArray(chunk?.choices) || (choice && !choice.delta) || (usage && !counts.every(Number.isFinite))) {
    throw new ServerError(0, "The server sent something that is not a part of a reply.");
  }
  return { choice, usage };
}

// Request a reply and pass its text to `onText` as it arrives; return the token counts at the end. A stream that ends
// early, or holds anything but chunks of a reply, is an error: nobody should take a part of a reply for the whole.
export async function reply(body, key, signal, onText) {
  const response = await ask("/v1/chat/completions", key, {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let usage = null;
  let isComplete = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") isComplete = true;
      if (!event.startsWith("data: ") || isComplete) continue;
      const chunk = parseChunk(event.slice(6));
      if (chunk.usage) usage = chunk.usage;
      if (chunk.choice) onText(String(chunk.choice.delta.content ?? ""), Number(chunk.choice.token_ids?.length ?? 0));
    }
  }
  if (!isComplete) throw new ServerError(0, "The reply was cut off.");
  return usage;
}
