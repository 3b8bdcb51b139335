// The page: what is chosen (layer, head, token, color), and what happens when that changes.

const data = JSON.parse($("data").textContent);
const count = data.tokens.length;
const chosen = { layer: 0, head: 0, token: count - 1, column: -1, color: "surprise" };

const code = (letter) => `\\x${letter.charCodeAt(0).toString(16).padStart(2, "0")}`;
const visible = (text) => (text === "" ? "·" : text.replace(/\n/g, "⏎").replace(/\t/g, "→").replace(/[\0-\x1f\x7f]/g, code));
// Show a token as it appears in the text: after a line break, the rest is on the next line.
const lines = (text) => (text === "" ? "·" : text.split("\n").map((part) => part && visible(part)).join("⏎\n"));
const several = (number, unit) => `${number.toLocaleString("en")} ${unit}${number === 1 ? "" : "s"}`;
const head = () => data.layers[chosen.layer].heads[chosen.head];
const lazy = (packed, name, make) => (packed[name] ??= make(packed));
const series = (name) => lazy(head()[name], "values", unpackSeries);

function matrixOf(head) {
  lazy(head.matrix, "levels", unpackLevels);
  lazy(head.matrix, "image", matrixImage);
  return head.matrix;
}

function element(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Buttons of which one is chosen; arrow keys move among them.
function choices(where, labels, pick) {
  const buttons = labels.map((label) => {
    const button = element("button", typeof label === "string" ? label : "", { type: "button", role: "radio" });
    if (typeof label !== "string") button.append(...label);
    return button;
  });
  const show = (i) => buttons.forEach((button, j) => {
    button.setAttribute("aria-checked", i === j);
    button.tabIndex = i === j ? 0 : -1;
  });
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => { show(i); pick(i); });
    button.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const next = (i + move + buttons.length) % buttons.length;
      buttons[next].focus();
      buttons[next].click();
    });
  });
  $(where).replaceChildren(...buttons);
  return { show, buttons };
}

const nats = (t) => (t > 0 ? -data.scores.logprob[t - 1] : 0);
const bits = (x) => (x / Math.LN2).toFixed(2);

function header() {
  const total = data.scores.logprob.reduce((sum, x) => sum - x, 0);
  const cut = data.whole > count ? `the first ${count.toLocaleString("en")} of ${data.whole.toLocaleString("en")}` : count;
  const parameters = data.parameters >= 1e6 ? `${(data.parameters / 1e6).toFixed(1)}M` : data.parameters.toLocaleString("en");
  $("name").textContent = data.name;
  $("summary").textContent = [
    data.family, several(data.layers.length, "layer"), `${several(data.layers[0].all, data.layers[0].unit)} each`,
    `${parameters} parameters`, `${cut} token${count > 1 ? "s" : ""}`, count > 1 ? `${bits(total / (count - 1))} bits per token` : "",
  ].filter(Boolean).join(" · ");
}

function text() {
  data.tokens.forEach((token, t) => {
    const span = element("span", lines(token), { role: "option", id: `t${t}`, class: token.trim() ? "" : "break" });
    span.addEventListener("mouseenter", () => chooseToken(t));
    $("text").append(span);
  });
  $("text").addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -count, End: count }[event.key];
    if (!move) return;
    event.preventDefault();
    chooseToken(Math.max(0, Math.min(count - 1, chosen.token + move)), true);
  });
}

function colorText() {
  const warm = css("--warm"), matrix = matrixOf(head()), cell = matrix.cell, row = Math.floor(chosen.token / cell);
  const weights = data.tokens.map((_, s) => (s > chosen.token ? 0 : weightAt(matrix, row, Math.floor(s / cell))));
  const most = Math.max(...weights.map(Math.abs)) || 1, plus = rgb(css("--plus")), minus = rgb(css("--minus"));
  data.tokens.forEach((_, t) => {
    const style = $(`t${t}`).style;
    if (chosen.color === "surprise") {
      style.background = `rgba(${warm}, ${Math.min(0.8, nats(t) / 9).toFixed(3)})`;
    } else {
      style.background = `rgba(${weights[t] < 0 ? minus : plus}, ${(0.75 * Math.sqrt(Math.abs(weights[t]) / most)).toFixed(3)})`;
    }
  });
  $("legend").textContent = chosen.color === "surprise"
    ? "the stronger, the less likely the model found the token"
    : `what the chosen token reads in layer ${chosen.layer}, ${data.layers[chosen.layer].unit} ${head().number}`;
}

function pick(text) {
  return element("code", text.trim() ? visible(text) : visible(text).replace(/ /g, "␣"));
}

const percent = (value) => (value < 0.01 ? "<0.01" : value < 1 ? value.toPrecision(1) : Math.round(value));

function describeToken() {
  const t = chosen.token, where = $("token");
  where.replaceChildren(element("b", `token ${t} `), pick(data.tokens[t]));
  if (t === 0) {
    where.append(" the first token is read, not predicted");
    return;
  }
  const rank = data.scores.rank[t - 1], chance = 100 * Math.exp(-nats(t));
  where.append(` ${bits(nats(t))} bits (${chance < 0.01 ? "<0.01" : chance.toPrecision(3)} %), `);
  where.append(rank === 0 ? "the likeliest" : `${rank.toLocaleString("en")} were likelier`);
  where.append(`; ${bits(data.scores.entropy[t - 1])} bits expected. Likeliest: `);
  data.scores.best[t - 1].forEach(([token, logprob]) => where.append(pick(token), ` ${percent(100 * Math.exp(logprob))} % `));
}

function chooseToken(t, scroll = false) {
  $(`t${chosen.token}`)?.removeAttribute("aria-selected");
  chosen.token = t;
  chosen.column = -1;
  const span = $(`t${t}`);
  span.setAttribute("aria-selected", "true");
  $("text").setAttribute("aria-activedescendant", span.id);
  if (scroll) span.scrollIntoView({ block: "nearest" });
  describeToken();
  if (chosen.color === "reads") colorText();
  drawCharts();
}

// Charts over the tokens: title, explanation and what they draw of the chosen head.
const CHARTS = [
  ["half_life", "Half-life", "tokens until half of the state is left, if all were like this one", () => [{ values: series("half_life"), color: "--accent" }], { isLog: true }],
  ["dt", "Step size Δ", "how much the token writes, and how much the state decays", () => [{ values: series("dt"), color: "--accent" }], { isLog: true }],
  ["norm", "State norm", "after the token", () => [{ values: series("norm"), color: "--accent" }], { least: 0 }],
  ["rank", "Effective rank", "directions that the state uses", () => [{ values: series("rank"), color: "--accent" }], { least: 0 }],
  ["read", "State and skip", "norms of what is read from the state (orange) and goes around it (violet)", () => [
    { values: series("read"), color: "--plus" }, { values: series("skip"), color: "--second" }], { least: 0 }],
];

function makeCharts() {
  for (const [name, title, note] of CHARTS) {
    const figure = element("figure", "");
    const caption = element("figcaption", "");
    caption.append(element("b", title), element("span", note), element("span", "", { id: `${name}-value` }));
    figure.append(caption, element("canvas", "", { id: name, height: 74, "aria-label": title }));
    $("series").append(figure);
  }
  for (const canvas of [...$("series").querySelectorAll("canvas"), $("rotations"), $("surprise")]) {
    canvas.style.height = `${canvas.getAttribute("height")}px`;
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(), t = ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * count;
      if (t >= 0 && t < count) chooseToken(Math.floor(t), true);
    });
  }
}

function drawCharts() {
  const cursor = chosen.token, rotation = head().rotation;
  $("surprise").parentElement.hidden = count < 2;
  if (count > 1) {
    const surprise = Float64Array.from(data.tokens, (_, t) => nats(t) / Math.LN2);
    drawLines($("surprise"), [{ values: surprise, color: "--accent" }], { cursor, least: 0, filled: true });
  }
  for (const [name, , , lines, options] of CHARTS) {
    const drawn = lines();
    drawLines($(name), drawn, { ...options, cursor });
    $(`${name}-value`).textContent = `: ${drawn.map((line) => short(line.values[cursor])).join(" and ")}`;
  }
  $("rotations-figure").hidden = !rotation;
  if (rotation) {
    lazy(rotation, "levels", unpackLevels);
    lazy(rotation, "image", (packed) => rotationImage(packed, count));
    drawRotations($("rotations"), rotation, count, cursor);
    const largest = Array.from({ length: rotation.rows }, (_, row) => rotation.levels[row * count + cursor] / 127 * rotation.most)
      .reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a), 0);
    $("rotations-title").replaceChildren(element("b", "Rotations"),
      `of the state's ${rotation.unit === "block" ? "blocks of four" : "pairs"}, at most ${short(rotation.most)} half circles: at this token up to ${short(largest)}`);
  }
  drawBig();
}

function drawBig() {
  const matrix = matrixOf(head()), row = Math.floor(chosen.token / matrix.cell);
  drawMatrix($("matrix"), matrix, row, chosen.column);
  const note = $("weight");
  if (chosen.column < 0) {
    const each = matrix.cell > 1 ? `each cell the strongest of ${matrix.cell} × ${matrix.cell}; ` : "";
    const ranks = matrix.ranks > 1 ? `root of the sum of squares over ${matrix.ranks} × ${matrix.ranks} ranks; ` : "";
    note.textContent = `${each}${ranks}strongest weight ${short(matrix.most)}`;
    return;
  }
  const s = Math.min(count - 1, chosen.column * matrix.cell), weight = weightAt(matrix, row, chosen.column);
  note.replaceChildren(element("b", `M[${chosen.token}, ${s}] = ${short(weight)}  `), pick(data.tokens[chosen.token]), " reads ", pick(data.tokens[s]));
}

function overview() {
  const where = [chosen.layer, head().number], dots = (value) => data.layers.map((layer) => layer.heads.map((head) => ({ number: head.number, value: value(head) })));
  const horizons = data.layers.map((layer) => layer.all > layer.heads.length
    ? layer.dots.map((value) => ({ number: -1, value })) : layer.heads.map((head) => ({ number: head.number, value: head.horizon })));
  const fractions = dots((head) => head.share);
  drawDots($("horizons"), horizons, { isLog: true, chosen: where });
  drawDots($("fractions"), fractions, { isLog: false, least: 0, most: 1, chosen: where });
  return { horizons, fractions };
}

let columns;
function clickDots(canvas, name) {
  canvas.style.height = `${canvas.getAttribute("height")}px`;
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const all = columns[name].flatMap((dots, layer) => dots.map((dot) => [Math.hypot(dot.at[0] - x, dot.at[1] - y), layer, dot.number]));
    const [far, layer, number] = all.reduce((a, b) => (b[0] < a[0] ? b : a));
    const index = data.layers[layer].heads.findIndex((head) => head.number === number);
    if (far < 20) chooseLayer(layer, Math.max(0, index));
  });
}

let layerButtons, headButtons;
function chooseLayer(layer, which = 0) {
  chosen.layer = layer;
  layerButtons.show(layer);
  const shown = data.layers[layer];
  headButtons = choices("heads", shown.heads.map((head) => {
    const label = element("span", "");
    label.append(element("b", `${head.number}`), element("span", `½ ${short(head.horizon)}`));
    return [element("canvas", "", { width: 76, height: 76 }), label];
  }), chooseHead);
  headButtons.buttons.forEach((button, i) => button.setAttribute("aria-label",
    `${shown.unit} ${shown.heads[i].number}, horizon ${short(shown.heads[i].horizon)} tokens`));
  $("heads-note").textContent = shown.all > shown.heads.length
    ? `${shown.heads.length} of ${shown.all.toLocaleString("en")} channels, by their horizons (½, in tokens, of a channel's slowest state)`
    : "number of the head, and its horizon ½ in tokens";
  drawThumbnails();
  headButtons.show(which);
  chooseHead(which);
}

function drawThumbnails() {
  headButtons.buttons.forEach((button, i) => {
    const [context, width, height] = prepare(button.querySelector("canvas")), matrix = matrixOf(data.layers[chosen.layer].heads[i]);
    context.imageSmoothingEnabled = matrix.side > width;
    context.fillStyle = css("--soft");
    context.fillRect(0, 0, width, height);
    context.drawImage(matrix.image, 0, 0, width, height);
  });
}

function chooseHead(which) {
  chosen.head = which;
  $("matrix-title").replaceChildren(element("b", `Layer ${chosen.layer}, ${data.layers[chosen.layer].unit} ${head().number}`), "what each token reads from those before it");
  columns = overview();
  colorText();
  drawCharts();
}

function redraw() {
  for (const layer of data.layers) for (const { matrix, rotation } of layer.heads) { delete matrix.image; if (rotation) delete rotation.image; }
  drawThumbnails();
  chooseHead(chosen.head);
}

header();
text();
makeCharts();
const colors = ["surprise", "reads"];
const colorButtons = choices("color", ["surprise", "what the chosen token reads"], (i) => { chosen.color = colors[i]; colorText(); });
colorButtons.show(0);
layerButtons = choices("layers", data.layers.map((_, i) => `${i}`), (i) => chooseLayer(i));
$("matrix").addEventListener("pointermove", (event) => {
  const box = $("matrix").getBoundingClientRect(), matrix = head().matrix;
  const row = Math.floor(((event.clientY - box.top) / box.height) * matrix.side);
  const column = Math.floor(((event.clientX - box.left) / box.width) * matrix.side);
  if (row < 0 || column < 0 || row >= matrix.side || column > row) return;
  chooseToken(Math.min(count - 1, row * matrix.cell), true);
  chosen.column = column;
  drawBig();
});
clickDots($("horizons"), "horizons");
clickDots($("fractions"), "fractions");
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
chooseLayer(0);
chooseToken(count - 1);
