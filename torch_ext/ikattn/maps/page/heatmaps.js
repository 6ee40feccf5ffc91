// Draws heat maps and their controls, in both modes that have them: one recording, and a comparison.
//
// L queries are rows, S keys are columns, H heads. A mode has `showControls`, `showRest` (what does not
// follow the pair), `showPair`, `markPair` (the pair alone, while the pointer moves) and `startingPair`.
// A plate is a heat map: values [L, S], `cells` (makes a canvas with a pixel for each value), a caption,
// its meaning, `textOf` (a value in words), and `legend` (two ends, and the colour [r, g, b] of a place
// between them, 0 to 1).

const contents = JSON.parse(byId("contents").textContent);

const state = {
  sequence: 0, layer: 0, head: null, map: null, scale: "linear", diagonal: false, pinned: [0, 0], hover: null,
};

const layerOf = (layer = state.layer) => contents.sequences[state.sequence].layers[layer];

function tokensOf() {
  const shown = layerOf();
  const lists = contents.sequences[state.sequence].labels;
  return { queries: lists[shown.queries], keys: lists[shown.keys] };
}

const pair = () => state.hover || state.pinned;

// --- Arrays and tokens -------------------------------------------------------------------------------

// Base64 of uint16 codes of logarithms: 0 is zero, 65535 no finite number, any other c is
// exp(lo + step (c - 1)). Arrays with signs have 32768 more for a number below 0.
function decode(entry) {
  return once(`array/${entry.id}`, () => {
    const codes = new Uint16Array(bytesOf(byId(entry.id).textContent.trim()).buffer);
    const magnitude = (code) => (code === 0 ? 0 : Math.exp(entry.lo + entry.step * (code - 1)));
    return Float32Array.from(codes, (code) =>
      code === 65535 ? NaN : entry.signed && code > 32768 ? -magnitude(code - 32768) : magnitude(code));
  });
}

// Returns the part of one head in an array with heads as its first axis, or the sum over heads by a divisor.
function overHeads(values, head, heads, key, divisor = heads) {
  const size = values.length / heads;
  if (head !== null) return values.subarray(head * size, (head + 1) * size);
  return once(`${key}/heads`, () => {
    const sums = new Float32Array(size);
    values.forEach((value, i) => { sums[i % size] += value / divisor; });
    return sums;
  });
}

const WORD_START = /^[\u0120\u2581]/;  // byte-level BPE, SentencePiece

function readable(token) {
  const text = token.replace(WORD_START, "").replace(/\u010a/g, "\u21b5");
  return text === "" ? "\u2423" : text;
}

// Cuts a token between letters, of which an emoji is one; isolated, so that a right-to-left token turns no other.
function shorten(token) {
  const letters = Array.from(readable(token));
  return isolated(letters.length > 14 ? letters.slice(0, 13).join("") + "\u2026" : letters.join(""));
}

// Cuts a token at its end, where the room is less.
function fitted(context, token, room) {
  const text = shorten(token);
  if (context.measureText(text).width <= room) return text;
  let letters = Array.from(readable(token)).slice(0, 13);
  while (letters.length > 1 && context.measureText(letters.join("") + "\u2026").width > room) letters = letters.slice(0, -1);
  return isolated(letters.join("") + "\u2026");
}

const labelFont = (size) => `${size}px Inter, "Source Sans 3", system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif`;

// --- Controls ----------------------------------------------------------------------------------------

// Makes a row of buttons of which one is chosen: arrow keys move, Tab leaves.
function radios(container, items, chosen, choose) {
  const buttons = items.map((item) => {
    const button = element("button", { type: "button", title: item.title || "", disabled: !!item.disabled });
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", String(item.value === chosen));
    button.tabIndex = item.value === chosen ? 0 : -1;
    if (item.label) button.setAttribute("aria-label", item.label);
    if (item.className) button.className = item.className;
    button.append(...(item.children || [element("bdi", {}, item.text)]));
    button.dataset.value = String(item.value);
    button.addEventListener("click", () => choose(item.value, true));
    if (item.hover) button.addEventListener("pointerenter", () => item.hover(true));
    if (item.hover) button.addEventListener("pointerleave", () => item.hover(false));
    return button;
  });
  const hadFocus = container.contains(document.activeElement);
  container.replaceChildren(...buttons);
  if (hadFocus) (buttons.find((button) => button.tabIndex === 0) || buttons[0])?.focus();
  container.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const open = items.filter((item) => !item.disabled);
    const at = open.findIndex((item) => item.value === chosen);
    choose(open[(at + step + open.length) % open.length].value, true);
  };
}

// Presses the next button of a row, or the one before.
function move(strip, step) {
  const buttons = [...byId(strip).children].filter((button) => !button.disabled);
  const at = buttons.findIndex((button) => button.getAttribute("aria-checked") === "true");
  const next = buttons[at + step];
  if (next) next.click();
}

// --- Heat maps ---------------------------------------------------------------------------------------

// Returns the query and key that an event on a heat map points at, or null.
function cellAt(canvas, event) {
  const { left, top, cell } = canvas.layout;
  const { L, S } = layerOf();
  const box = canvas.getBoundingClientRect();
  const s = Math.floor((event.clientX - box.left - left) / cell);
  const t = Math.floor((event.clientY - box.top - top) / cell);
  return s >= 0 && s < S && t >= 0 && t < L ? [t, s] : null;
}

function layoutOf(width, L, S, queries, keys, context) {
  context.font = labelFont(12);
  const longest = (tokens) => Math.min(96, Math.max(...tokens.map((token) => context.measureText(shorten(token)).width)) + 8);
  let left = longest(queries);
  let top = longest(keys) * 0.85 + 10;
  let cell = Math.min(34, (width - left - 22) / S);
  const labelled = cell >= 9;
  if (!labelled) {  // only the hovered row and column are labelled
    left = 78;
    top = 66;
    cell = (width - left - 4) / S;
  }
  if (cell >= 4) cell = Math.floor(cell);
  return { left, top, cell, labelled, width, height: top + cell * L + 2 };
}

// Draws a plate into a figure, which is hidden where there is none.
function draw(figure, plate) {
  figure.hidden = !plate;
  if (!plate) return;
  const { L, S } = layerOf();
  const { queries, keys } = tokensOf();
  const canvas = figure.querySelector("canvas");
  const context = canvas.getContext("2d");
  const layout = layoutOf(figure.clientWidth, L, S, queries, keys, context);
  const { left, top, cell, labelled } = layout;
  const sharp = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: layout.width * sharp, height: layout.height * sharp, layout });
  Object.assign(canvas.style, { width: `${layout.width}px`, height: `${layout.height}px` });
  context.scale(sharp, sharp);
  context.font = labelFont(labelled ? Math.min(12, Math.max(9, cell - 1)) : 12);
  context.imageSmoothingEnabled = cell < 1;  // else some cells would not be seen at all
  context.drawImage(plate.cells(), left, top, cell * S, cell * L);
  if (cell >= 14) rule(context, layout, L, S);

  const [q, k] = pair();
  const style = getComputedStyle(document.documentElement);
  const [ink, mark] = ["--ink", "--mark"].map((name) => style.getPropertyValue(name).trim());
  context.textBaseline = "middle";
  context.textAlign = "right";
  queries.forEach((token, t) => {
    if (!labelled && t !== q) return;
    context.fillStyle = t === q ? mark : ink;
    context.fillText(fitted(context, token, left - 8), left - 6, top + cell * (t + 0.5));
  });
  context.textAlign = "left";
  keys.forEach((token, s) => {
    if (!labelled && s !== k) return;
    context.save();
    context.translate(left + cell * (s + 0.5) + 2, top - 6);
    context.rotate(-Math.PI / 3.4);
    context.fillStyle = s === k ? mark : ink;
    context.fillText(fitted(context, token, (top - 10) / 0.81), 0, 0);
    context.restore();
  });
  context.strokeStyle = mark;
  context.globalAlpha = 0.75;
  context.strokeRect(left - 0.5, top + cell * q - 0.5, cell * S + 1, cell + 1);
  context.globalAlpha = 1;
  context.lineWidth = 2;
  context.strokeRect(left + cell * k - 1, top + cell * q - 1, cell + 2, cell + 2);

  const here = plate.textOf(plate.values[q * S + k]);
  figure.querySelector("figcaption").replaceChildren(plate.caption, element("span", {}, plate.meaning));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${plate.caption}: ${queries[q]} reads ${keys[k]}: ${here}`);
  showLegend(figure.querySelector(".legend"), plate, here);
}

// Draws hairlines between cells that are large enough to have them.
function rule(context, { left, top, cell }, L, S) {
  context.strokeStyle = dark() ? "rgb(20 23 27 / .8)" : "rgb(251 250 248 / .9)";
  context.lineWidth = 1;
  context.beginPath();
  for (let s = 1; s < S; s++) { context.moveTo(left + cell * s, top); context.lineTo(left + cell * s, top + cell * L); }
  for (let t = 1; t < L; t++) { context.moveTo(left, top + cell * t); context.lineTo(left + cell * S, top + cell * t); }
  context.stroke();
}

function showLegend(legend, plate, here) {
  const { lowest, highest, colourAt } = plate.legend();
  const bar = element("canvas", { width: 256, height: 1 });
  const context = bar.getContext("2d");
  for (let x = 0; x < 256; x++) {
    context.fillStyle = css(colourAt(x / 255));
    context.fillRect(x, 0, 1, 1);
  }
  legend.replaceChildren(lowest, bar, highest, element("span", {}, `\u00b7 here ${here}`));
}

// Gives the colour of a share of the largest value, -1 to 1; below 0 it is one of the other colours.
function colourOf(norms) {
  const [own, other] = [ramp(norms), ramp(!norms)];
  return (share) => Number.isNaN(share) ? [190, 40, 120] : (share < 0 ? other : own)[Math.round(255 * Math.min(Math.abs(share), 1))];
}

// Returns the share that a value has of the largest, or its square root, with the value's sign.
function scaled(value, top, scale = state.scale) {
  const share = top > 0 ? value / top : value * 0;
  return scale === "root" ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share;
}

// Writes which token reads which, in both modes before what the mode says of them.
function nameThePair(...more) {
  const { queries, keys } = tokensOf();
  const [q, k] = pair();
  byId("pair").replaceChildren(element("b", { className: "reader" }, element("bdi", {}, readable(queries[q]))), ` (${q}) reads `,
    element("b", {}, element("bdi", {}, readable(keys[k]))), ` (${k})`, ...more);
}

// --- What the reader does ----------------------------------------------------------------------------

function set(change) {
  const before = layerOf();
  Object.assign(state, change, { hover: null });
  if (!layerOf()) state.layer = contents.sequences[state.sequence].layers.findIndex((layer) => layer !== null);
  showControls();
  const { L, S } = layerOf();
  if (!before || before.L !== L || before.S !== S || "sequence" in change) state.pinned = startingPair();
  showRest();
  showPair();
}

let waiting = false;

// Marks another pair while the pointer moves, once per frame.
function hover(where) {
  state.hover = where;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    markPair();
  });
}

function pin(where) {
  Object.assign(state, { pinned: where, hover: null });
  showPair();
}

function startHeatMaps() {
  byId("precision").textContent = contents.precision;
  for (const canvas of document.querySelectorAll("figure > canvas")) {
    canvas.addEventListener("pointermove", (event) => hover(cellAt(canvas, event)));
    canvas.addEventListener("pointerleave", () => hover(null));
    canvas.addEventListener("click", (event) => { const at = cellAt(canvas, event); if (at) pin(at); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      const { L, S } = layerOf();
      const [q, k] = state.pinned;
      pin([Math.max(0, Math.min(L - 1, q + step[0])), Math.max(0, Math.min(S - 1, k + step[1]))]);
    });
  }
  byId("scale").addEventListener("change", (event) => set({ scale: event.target.value }));
  window.addEventListener("resize", () => showPair());
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { "]": ["layer", 1], "[": ["layer", -1], ".": ["head", 1], ",": ["head", -1] }[event.key];
    if (step) move(...step);
  });
  startPage(contents, (sequence) => set({ sequence }), () => set({}));
  set({ sequence: 0 });
}
