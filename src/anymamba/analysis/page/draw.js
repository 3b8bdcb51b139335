"use strict";
// Unpack the numbers, and draw the pictures: each function draws one canvas from its arguments.

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function unpackSeries(packed) {
  const levels = new DataView(bytes(packed.data).buffer);
  const span = packed.high - packed.low;
  return Float64Array.from({ length: levels.byteLength / 2 }, (_, i) => {
    const x = packed.low + ((levels.getInt16(2 * i, true) + 32768) / 65535) * span;
    return packed.log ? 10 ** x : x;
  });
}

function unpackLevels(packed) {
  return new Int8Array(bytes(packed.data).buffer);
}

function weightAt(matrix, row, column) {
  if (column > row) return 0;
  const level = matrix.levels[(row * (row + 1)) / 2 + column] / 127;
  return level ** 3 * matrix.most;
}

function rgb(color) {
  return [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
}

// A color for every level from -127 to 127, as pixels.
function palette() {
  const zero = rgb(css("--zero")), plus = rgb(css("--plus")), minus = rgb(css("--minus"));
  return Array.from({ length: 255 }, (_, i) => {
    const level = (i - 127) / 127, end = level < 0 ? minus : plus;
    return zero.map((from, c) => Math.round(from + (end[c] - from) * Math.abs(level)));
  });
}

function image(width, height, level) {
  const colors = palette(), canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), pixels = context.createImageData(width, height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const value = level(y, x);
      if (value === null) continue;
      pixels.data.set([...colors[value + 127], 255], 4 * (y * width + x));
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function matrixImage(matrix) {
  return image(matrix.side, matrix.side, (t, s) => (s > t ? null : matrix.levels[(t * (t + 1)) / 2 + s]));
}

function rotationImage(rotation, tokens) {
  return image(tokens, rotation.rows, (row, t) => rotation.levels[row * tokens + t]);
}

// A canvas at the sharpness of the screen: its context and size in CSS pixels.
function prepare(canvas) {
  const box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(box.width * scale);
  canvas.height = Math.round(box.height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  return [context, box.width, box.height];
}

function short(x) {
  if (x >= 1e9) return "∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) return x.toExponential(1).replace("e+", "e");
  return size >= 100 ? Math.round(x).toLocaleString("en") : Number(x.toPrecision(3)).toString();
}

// Map numbers to coordinates of a canvas, logarithmically if `isLog`, and choose at most a few marks.
function makeScale(low, high, isLog, from, to) {
  let marks = [];
  if (isLog) {
    if (high / low < 1.5) { low /= 1.25; high *= 1.25; }
    const offset = (x) => from + ((Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);
    const decades = Math.log10(high / low), step = Math.max(1, Math.ceil(decades / 4));
    const steps = decades > 2.5 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e += step) {
      marks.push(...steps.map((m) => m * 10 ** e).filter((x) => x >= 0.999 * low && x <= 1.001 * high));
    }
    return { offset, marks: marks.length ? marks : [low, high] };
  }
  if (high - low < 1e-12) { low -= 0.5; high += 0.5; }
  const offset = (x) => from + ((x - low) / (high - low)) * (to - from);
  const raw = (high - low) / 3, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + 1e-9; x += step) marks.push(Math.abs(x) < 1e-12 ? 0 : x);
  return { offset, marks };
}

const LEFT = 48;

function drawAxis(context, width, scale, middle = true) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const mark of scale.marks) {
    const y = Math.round(scale.offset(mark)) + 0.5;
    context.strokeStyle = css("--line");
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillStyle = css("--dim");
    if (middle) context.fillText(short(mark), LEFT - 7, y);
  }
}

// Lines over the tokens; `cursor` is the chosen token.
function drawLines(canvas, lines, { isLog = false, cursor = -1, least = null, most = null, filled = false } = {}) {
  const [context, width, height] = prepare(canvas), all = lines.flatMap((line) => [...line.values]).filter((x) => x < 1e9);
  const low = least ?? Math.min(...all, isLog ? Infinity : 0), high = most ?? Math.max(...all);
  if (!all.length) return;
  const scale = makeScale(low, high, isLog, height - 8, 8), count = lines[0].values.length;
  drawAxis(context, width, scale);
  const center = (i) => LEFT + ((i + 0.5) / count) * (width - LEFT);
  if (cursor >= 0) {
    context.fillStyle = css("--accent");
    context.globalAlpha = 0.22;
    const wide = Math.max(2, (width - LEFT) / count);
    context.fillRect(center(cursor) - wide / 2, 0, wide, height);
    context.globalAlpha = 1;
  }
  for (const line of lines) {
    context.strokeStyle = context.fillStyle = css(line.color);
    context.lineWidth = 1.4;
    context.lineJoin = "round";
    context.beginPath();
    line.values.forEach((x, i) => {
      if (filled) {
        const wide = Math.max(1, (width - LEFT) / count - 1), top = scale.offset(x), bottom = scale.offset(low);
        context.globalAlpha = i === cursor ? 1 : 0.75;
        context.fillRect(center(i) - wide / 2, top, wide, Math.max(1, bottom - top));
      } else {
        context[i ? "lineTo" : "moveTo"](center(i), scale.offset(Math.min(x, 1e9)));
      }
    });
    context.globalAlpha = 1;
    if (!filled && count > 1) context.stroke();
    if (!filled && (count === 1 || cursor >= 0)) {
      context.beginPath();
      context.arc(center(Math.max(0, cursor)), scale.offset(line.values[Math.max(0, cursor)]), 3, 0, 7);
      context.fill();
    }
  }
}

// One column of dots per layer.
function drawDots(canvas, columns, { isLog, least, most, chosen }) {
  const [context, width, height] = prepare(canvas), all = columns.flat().map((dot) => dot.value).filter((x) => x < 1e9);
  const low = least ?? Math.min(...all), high = most ?? Math.max(...all);
  if (!all.length) return;
  const scale = makeScale(low, high, isLog, height - 30, 10);
  drawAxis(context, width, scale);
  const wide = (width - LEFT) / columns.length, step = Math.ceil(columns.length / 24);
  columns.forEach((dots, i) => {
    const middle = LEFT + (i + 0.5) * wide;
    context.textAlign = "center";
    context.fillStyle = css("--dim");
    if (i % step === 0) context.fillText(columns.length > 8 ? i : `layer ${i}`, middle, height - 10);
    dots.forEach((dot, j) => {
      const spread = Math.min(wide * 0.7, 9 * dots.length);
      const x = middle + (dots.length > 1 ? (j / (dots.length - 1) - 0.5) * spread : 0);
      const isChosen = chosen && chosen[0] === i && chosen[1] === dot.number;
      context.fillStyle = css(isChosen ? "--plus" : "--accent");
      context.globalAlpha = isChosen ? 1 : 0.65;
      context.beginPath();
      context.arc(x, scale.offset(Math.min(high, Math.max(low, dot.value))), isChosen ? 5 : 3.5, 0, 7);
      context.fill();
      context.globalAlpha = 1;
      dot.at = [x, scale.offset(Math.min(high, Math.max(low, dot.value)))];
    });
  });
}

function drawMatrix(canvas, matrix, row, column) {
  const [context, width] = prepare(canvas), size = width / matrix.side;
  context.imageSmoothingEnabled = size < 1;
  context.fillStyle = css("--soft");
  context.fillRect(0, 0, width, width);
  context.drawImage(matrix.image, 0, 0, width, width);
  context.strokeStyle = css("--accent");
  context.lineWidth = 1;
  if (row >= 0) context.strokeRect(0.5, row * size, Math.max(size, (row + 1) * size) - 1, Math.max(size, 2));
  if (column >= 0) context.strokeRect(column * size, row * size, Math.max(size, 3), Math.max(size, 3));
  context.fillStyle = css("--dim");
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText("read: s →", width - 8, 8);
  context.fillText("reads: t ↓", width - 8, 24);
}

function drawRotations(canvas, rotation, tokens, cursor) {
  const [context, width, height] = prepare(canvas);
  context.imageSmoothingEnabled = false;
  context.drawImage(rotation.image, LEFT, 4, width - LEFT, height - 8);
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = css("--dim");
  context.fillText(`${rotation.unit} 0`, LEFT - 7, 10);
  if (rotation.rows > 1) context.fillText(`${rotation.rows * rotation.group - 1}`, LEFT - 7, height - 10);
  if (cursor < 0) return;
  const wide = (width - LEFT) / tokens;
  context.strokeStyle = css("--accent");
  context.strokeRect(LEFT + cursor * wide, 3, Math.max(2, wide), height - 6);
}
