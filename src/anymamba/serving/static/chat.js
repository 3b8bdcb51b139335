// A conversation as a tree, and the stream of a reply. Nothing here touches the page.

// Every message is a node; its children are the ways in which the conversation continued, one of them chosen.
export class Conversation {
  constructor() {
    this.root = { role: null, text: "", parent: null, children: [], chosen: -1 };
  }

  // The messages along the chosen way.
  path() {
    const found = [];
    for (let node = this.root; node.chosen >= 0;) found.push((node = node.children[node.chosen]));
    return found;
  }

  add(parent, role, text) {
    const node = { role, text, parent, children: [], chosen: -1, facts: null, problem: "" };
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

  // What the server is sent to reply after `node`.
  messages(node, system) {
    const found = [];
    for (; node.parent; node = node.parent) found.unshift({ role: node.role, content: node.text });
    return system ? [{ role: "system", content: system }, ...found] : found;
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
    message = (await response.json()).error.message;
  } catch { /* not JSON: the status will do */ }
  throw new ServerError(response.status, message);
}

// Ask for a reply; `onText` gets its pieces. Gives the number of tokens once it is complete.
export async function reply(body, key, signal, onText) {
  const response = await ask("/v1/chat/completions", key, {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "", usage = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ServerError(0, chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices[0];
      if (choice) onText(choice.delta.content ?? "", choice.token_ids?.length ?? 0);
    }
  }
  return usage;
}
