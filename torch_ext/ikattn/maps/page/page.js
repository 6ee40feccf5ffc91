// Draws the maps that the page carries.
//
// L queries are rows, S keys are columns, H heads.

const contents = JSON.parse(byId("contents").textContent);

const MAPS = [
  ["norms", "N", "Contribution N"],
  ["with_residual", "N + residual", "N_Res"],
  ["with_norm", "N + residual + norm", "N_ResLN"],
  ["encoder", "whole block", "N_Enc"],
  ["alti", "ALTI", "ALTI"],
];
const MEANINGS = {
  with_residual: "the same, with the token itself added on the diagonal",
  with_norm: "the same, through the normalisation that follows",
  encoder: "the same, through the block's second normalisation",
  alti: "how much nearer a token brings the output, as a share of its row",
};

const state = {
  sequence: 0, layer: 0, head: null, map: null, scale: "linear", diagonal: false,
  pinned: [0, 0], hover: null, theme: null,
};

// --- Arrays ------------------------------------------------------------------------------------------

function layerOf(layer = state.layer) {
  return contents.sequences[state.sequence].layers[layer];
}

function array(name, layer = state.layer) {
  const shown = layerOf(layer);
  return shown && shown.maps[name] ? decode(shown.maps[name]) : null;
}

// Of a map of each head: [L, S] of one head, or the mean over heads.
function headOrMean(name, layer, head) {
  const shown = layerOf(layer);
  const size = shown.L * shown.S;
  const heads = contents.layers[layer].heads;
  return once(`${state.sequence}/${layer}/${name}/${head}`, () => {
    const parts = perHead(name, layer);
    if (!parts) return null;
    if (head !== null) return parts.subarray(head * size, (head + 1) * size);
    const mean = new Float32Array(size);
    for (let h = 0; h < heads; h++) {
      for (let i = 0; i < size; i++) mean[i] += parts[h * size + i] / heads;
    }
    return mean;
  });
}

// [H, L, S]; contributions of each head are weights times value norms where the page has both.
function perHead(name, layer) {
  const direct = array(name, layer);
  if (direct || name !== "per_head") return direct;
  const weights = array("weights", layer);
  const norms = array("value_norms", layer);
  if (!weights || !norms) return null;
  const { L, S } = layerOf(layer);
  return once(`${state.sequence}/${layer}/product`, () =>
    weights.map((weight, i) => weight * norms[Math.floor(i / (L * S)) * S + (i % S)]));
}

// What a heat map shows: its values [L, S], its name and what they mean.
function weightsPlate(layer = state.layer, head = state.head) {
  const values = layerOf(layer) && headOrMean("weights", layer, head);
  if (!values) return null;
  const caption = head === null ? "Attention weight, mean over heads" : `Attention weight, head ${head}`;
  return { values, caption, meaning: "a: what the softmax gives, each row sums to 1", norms: false };
}

function normsPlate(layer = state.layer, head = state.head) {
  if (!layerOf(layer)) return null;
  const title = (MAPS.find(([name]) => name === state.map) || MAPS[0])[2];
  if (state.map !== "norms") {
    const values = array(state.map, layer);
    const note = head === null ? "" : " (all heads together)";
    return values && { values, caption: title + note, meaning: MEANINGS[state.map], norms: true };
  }
  const summed = array("summed", layer);
  if (head === null && summed) {
    return { values: summed, caption: "Contribution N, all heads together", meaning: "|Σ a f(x)|: what a token really adds", norms: true };
  }
  const values = headOrMean("per_head", layer, head);
  if (values) {
    const which = head === null ? "mean over heads" : `head ${head}`;
    return { values, caption: `Contribution N, ${which}`, meaning: "a |f(x)|: weight times value norm", norms: true };
  }
  return summed && { values: summed, caption: "Contribution N (all heads together)", meaning: "|Σ a f(x)|", norms: true };
}

const plates = () => ({ left: weightsPlate(), right: normsPlate() });

// --- Levels and numbers ------------------------------------------------------------------------------

function isSelf(layer = state.layer) {
  return contents.layers[layer].kind === "self";
}

// The largest value of the rows given, without what is left out.
function maximum(values, from, to, S, layer) {
  let largest = 0;
  for (let t = from; t < to; t++) {
    for (let s = 0; s < S; s++) {
      if (state.diagonal && isSelf(layer) && t === s) continue;
      const value = values[t * S + s];
      if (value > largest) largest = value;
    }
  }
  return largest;
}

// Levels 0..255 of a plate's cells; -1: left out, -2: no finite number.
function levelsOf(values, layer, scale = state.scale) {
  const { L, S } = layerOf(layer);
  const whole = maximum(values, 0, L, S, layer);
  const levels = new Int16Array(L * S);
  for (let t = 0; t < L; t++) {
    const top = scale === "row" ? maximum(values, t, t + 1, S, layer) : whole;
    for (let s = 0; s < S; s++) {
      const value = values[t * S + s];
      if (Number.isNaN(value)) levels[t * S + s] = -2;
      else if (state.diagonal && isSelf(layer) && t === s) levels[t * S + s] = -1;
      else {
        const share = top > 0 ? Math.min(value / top, 1) : 0;
        levels[t * S + s] = Math.round(255 * (scale === "root" ? Math.sqrt(share) : share));
      }
    }
  }
  return levels;
}

function levelColour(level, norms) {
  if (level === -1) return dark() ? [20, 23, 27] : [251, 250, 248];
  if (level === -2) return [190, 40, 120];
  return ramp(norms)[level];
}

function number(value) {
  if (value === null || value === undefined) return "";
  if (Number.isNaN(value)) return "not finite";
  if (value === 0) return "0";
  if (value >= 1e5 || value < 1e-4) return value.toExponential(1).replace("+", "");
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

// --- Tokens ------------------------------------------------------------------------------------------

const FOLDED = 60;  // more tokens than that are two lines that scroll

// As in a text: pieces of a word stand together, so they need no mark.
function flowing(token, isJoined) {
  const text = readable(token);
  return isJoined && text.length > 2 && text.startsWith("##") ? text.slice(2) : text;
}

function joined(tokens) {
  const marked = tokens.some((token) => WORD_START.test(token));
  const special = (token) => /^(<.*>|\[.*\])$/.test(token);
  return tokens.map((token, i) => token.startsWith("##") || (marked && i > 0 && !WORD_START.test(token)
    && !special(token) && !special(tokens[i - 1])));
}

function tokensOf() {
  const shown = layerOf();
  const lists = contents.sequences[state.sequence].labels;
  return { queries: lists[shown.queries], keys: lists[shown.keys] };
}

// --- Parts of the page -------------------------------------------------------------------------------

function thumbnail(plate, layer) {
  const canvas = element("canvas");
  if (!plate) return canvas;
  const { L, S } = layerOf(layer);
  canvas.width = S;
  canvas.height = L;
  paintCells(canvas.getContext("2d"), plate, layer, "root");  // small, and each by its own maximum
  return canvas;
}

// One pixel for each cell.
function paintCells(context, plate, layer, scale = state.scale) {
  const { L, S } = layerOf(layer);
  const image = context.createImageData(S, L);
  levelsOf(plate.values, layer, scale).forEach((level, i) => {
    image.data.set(levelColour(level, plate.norms), 4 * i);
    image.data[4 * i + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}

function showStrips() {
  const sequence = contents.sequences[state.sequence];
  radios(byId("layer"), contents.layers.map((layer, index) => {
    const there = sequence.layers[index] !== null;
    const plate = there ? normsPlate(index, null) || weightsPlate(index, null) : null;
    return { value: index, title: layer.name, label: `Layer ${layer.label}`, disabled: !there,
      children: [thumbnail(plate, index), layer.label] };
  }), state.layer, (index) => set({ layer: index }));

  const heads = contents.layers[state.layer].heads;
  const hasHeads = perHead("weights", state.layer) || perHead("per_head", state.layer);
  const all = { value: null, text: "all", children: [thumbnail(weightsPlate(state.layer, null) || normsPlate(state.layer, null), state.layer), "all"], label: "All heads" };
  const single = Array.from({ length: hasHeads ? heads : 0 }, (_, head) => ({
    value: head, label: `Head ${head}`,
    children: [thumbnail(weightsPlate(state.layer, head) || normsPlate(state.layer, head), state.layer), String(head)],
  }));
  radios(byId("head"), [all, ...single], state.head, (head) => set({ head }));
}

function showControls() {
  const shown = layerOf();
  const has = (name) => !!shown.maps[name];
  const there = MAPS.filter(([name]) => name === "norms"
    ? has("summed") || has("per_head") || (has("weights") && has("value_norms")) : has(name));
  if (!there.some(([name]) => name === state.map)) state.map = there.length ? there[0][0] : "norms";
  radios(byId("map"), there.map(([value, text, title]) => ({ value, text, title })), state.map,
    (map) => set({ map }));
  byId("map").parentElement.hidden = there.length === 0;
  byId("diagonal-label").hidden = !isSelf();
}

function showReading() {
  const { queries, keys } = tokensOf();
  const [q, k] = pair();
  const joins = joined(queries);
  radios(byId("queries"), queries.map((token, t) => ({
    value: t, text: flowing(token, joins[t]), title: token, className: joins[t] ? "joined" : "",
    hover: (inside) => hover(inside ? [t, strongest(t)] : null),
  })), q, (t) => pin([t, strongest(t)]));

  const { left, right } = plates();
  const norms = shownValueNorms();
  const rows = [
    left && ["weight", "a", left.values, q * keys.length, left],
    norms && ["value norm", "|f|", norms, 0, { norms: null }],
    right && ["contribution", "", right.values, q * keys.length, right],
  ].filter(Boolean);
  const keyJoins = joined(keys);
  // Long texts keep to two lines, which scroll: the maps stay in sight.
  byId("queries").classList.toggle("long", queries.length > FOLDED);
  byId("draws").replaceChildren(...rows.flatMap(([title, symbol, values, from, plate]) => {
    const levels = plate.norms === null ? null : levelsOf(plate.values, state.layer).subarray(from, from + keys.length);
    const top = values.reduce((largest, value) => Math.max(largest, value), 0);
    const chips = keys.map((token, s) => {
      const level = levels ? levels[s] : Math.round(255 * (top ? Math.min(values[s] / top, 1) : 0) * 0.32);
      const background = levels ? levelColour(level, plate.norms) : grey(level);
      const chip = element("span", { title: `${token}  ${number(values[from + s])}`, className: [keyJoins[s] ? "joined" : "", s === k ? "at" : ""].join(" ") }, element("bdi", {}, flowing(token, keyJoins[s])));
      chip.style.background = css(background);
      chip.style.color = legible(background);
      chip.addEventListener("pointerenter", () => hover([q, s]));
      chip.addEventListener("pointerleave", () => hover(null));
      chip.addEventListener("click", () => pin([q, s]));
      return chip;
    });
    return [element("h2", {}, title, element("em", {}, symbol)), element("div", { className: keys.length > FOLDED ? "tokens long" : "tokens" }, ...chips)];
  }));
}

// Between weight and contribution, which is their product; a long text has no room for a third copy.
function shownValueNorms() {
  return state.map === "norms" && layerOf().S <= 48 ? valueNorms() : null;
}

// |f(x)| of each key: of the chosen head, or the mean over heads.
function valueNorms() {
  const norms = array("value_norms");
  if (!norms) return null;
  const { S } = layerOf();
  if (state.head !== null) return norms.subarray(state.head * S, (state.head + 1) * S);
  const heads = contents.layers[state.layer].heads;
  return Float32Array.from({ length: S }, (_, s) => {
    let sum = 0;
    for (let h = 0; h < heads; h++) sum += norms[h * S + s];
    return sum / heads;
  });
}

function grey(level) {
  const ends = dark() ? [[29, 34, 40], [200, 205, 210]] : [[244, 243, 239], [60, 66, 74]];
  return ends[0].map((from, c) => Math.round(from + (ends[1][c] - from) * (level / 255)));
}

function legible(background) {
  const light = [0.2126, 0.7152, 0.0722].reduce((sum, part, c) => sum + part * (background[c] / 255) ** 2.2, 0);
  return light > 0.22 ? "#15181c" : "#ffffff";
}

// --- Heat maps ---------------------------------------------------------------------------------------

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
  canvas.width = layout.width * sharp;
  canvas.height = layout.height * sharp;
  canvas.style.width = `${layout.width}px`;
  canvas.style.height = `${layout.height}px`;
  canvas.layout = layout;
  context.scale(sharp, sharp);
  context.font = labelFont(labelled ? Math.min(12, Math.max(9, cell - 1)) : 12);

  const cells = element("canvas", { width: S, height: L });
  paintCells(cells.getContext("2d"), plate, state.layer);
  context.imageSmoothingEnabled = cell < 1;  // else some cells would not be seen at all
  context.drawImage(cells, left, top, cell * S, cell * L);
  if (cell >= 14) rule(context, layout, L, S);

  const [q, k] = pair();
  const style = getComputedStyle(document.documentElement);
  const [ink, quiet, mark] = ["--ink", "--quiet", "--mark"].map((name) => style.getPropertyValue(name).trim());
  context.textBaseline = "middle";
  queries.forEach((token, t) => {
    if (!labelled && t !== q) return;
    context.fillStyle = t === q ? mark : labelled ? ink : quiet;
    context.textAlign = "right";
    context.fillText(fitted(context, token, left - 8), left - 6, top + cell * (t + 0.5));
  });
  keys.forEach((token, s) => {
    if (!labelled && s !== k) return;
    context.save();
    context.translate(left + cell * (s + 0.5) + 2, top - 6);
    context.rotate(-Math.PI / 3.4);
    context.textAlign = "left";
    context.fillStyle = s === k ? mark : ink;
    context.fillText(fitted(context, token, (top - 10) / 0.81), 0, 0);
    context.restore();
  });
  context.strokeStyle = mark;
  context.lineWidth = 1;
  context.globalAlpha = 0.75;
  context.strokeRect(left - 0.5, top + cell * q - 0.5, cell * S + 1, cell + 1);
  context.globalAlpha = 1;
  context.lineWidth = 2;
  context.strokeRect(left + cell * k - 1, top + cell * q - 1, cell + 2, cell + 2);

  const at = plate.values[q * S + k];
  figure.querySelector("figcaption").replaceChildren(plate.caption, element("span", {}, plate.meaning));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${plate.caption}: ${queries[q]} reads ${keys[k]}: ${number(at)}`);
  showLegend(figure.querySelector(".legend"), plate);
}

// Hairlines between cells that are large enough to have them.
function rule(context, { left, top, cell }, L, S) {
  context.strokeStyle = dark() ? "rgb(20 23 27 / .8)" : "rgb(251 250 248 / .9)";
  context.lineWidth = 1;
  context.beginPath();
  for (let s = 1; s < S; s++) { context.moveTo(left + cell * s, top); context.lineTo(left + cell * s, top + cell * L); }
  for (let t = 1; t < L; t++) { context.moveTo(left, top + cell * t); context.lineTo(left + cell * S, top + cell * t); }
  context.stroke();
}

function showLegend(legend, plate) {
  const { L, S } = layerOf();
  const [q, k] = pair();
  const bar = element("canvas", { width: 256, height: 1 });
  const context = bar.getContext("2d");
  ramp(plate.norms).forEach((colour, level) => { context.fillStyle = css(colour); context.fillRect(level, 0, 1, 1); });
  const top = state.scale === "row" ? "row maximum" : number(maximum(plate.values, 0, L, S, state.layer));
  const kind = state.scale === "root" ? " (square root)" : "";
  legend.replaceChildren("0", bar, `${top}${kind}`, element("span", {}, `\u00b7 here ${number(plate.values[q * S + k])}`));
}

// --- Ledger ------------------------------------------------------------------------------------------

function showLedger() {
  const { L, S } = layerOf();
  const { queries, keys } = tokensOf();
  const [q, k] = pair();
  const heads = contents.layers[state.layer].heads;
  byId("pair").replaceChildren(element("b", { className: "reader" }, element("bdi", {}, readable(queries[q]))), ` (${q}) reads `,
    element("b", {}, element("bdi", {}, readable(keys[k]))), ` (${k})`);

  const pairOf = (values) => values && ((head) => values[(head * L + q) * S + k]);
  const keyOf = (values) => values && ((head) => values[head * S + k]);
  const columns = [
    ["similarity", pairOf(array("similarity"))],
    ["magnitude", keyOf(array("magnitude"))],
    ["weight a", pairOf(array("weights")), false],
    ["norm |f(x)|", keyOf(array("value_norms"))],
    ["contribution", pairOf(perHead("per_head", state.layer)), true],
  ].filter(([, value]) => value);
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "head"),
    ...columns.map(([title]) => element("th", {}, title)))));
  const body = element("tbody");
  for (let head = 0; head < heads && columns.length; head++) {
    const row = element("tr", { className: head === state.head ? "chosen" : "" }, element("td", {}, String(head)));
    for (const [, value, coloured] of columns) {
      const cell = element("td", {}, number(value(head)));
      if (coloured !== undefined) cell.append(barOf(value, head, heads, coloured));
      row.append(cell);
    }
    body.append(row);
  }
  table.append(body);
  byId("ledger").replaceChildren(...(columns.length ? [table] : []), sums(q, k, columns));
}

function barOf(value, head, heads, norms) {
  let top = 0;
  for (let other = 0; other < heads; other++) top = Math.max(top, value(other) || 0);
  const bar = element("span", { className: "bar" });
  bar.style.width = `${top ? (100 * (value(head) || 0)) / top : 0}%`;
  bar.style.background = css(ramp(norms)[170]);
  return bar;
}

function sums(q, k, columns) {
  const { S } = layerOf();
  const heads = contents.layers[state.layer].heads;
  const contribution = columns.find(([title]) => title === "contribution");
  const rows = [];
  let total = null;
  if (contribution) {
    total = 0;
    for (let head = 0; head < heads; head++) total += contribution[1](head);
    rows.push(["the heads' contributions added up", number(total)]);
  }
  const summed = array("summed");
  if (summed) {
    const norm = summed[q * S + k];
    const lost = total > 0 ? `, ${Math.max(0, Math.round(100 * (1 - norm / total)))} % cancels` : "";
    rows.push([`norm of their sum, N${lost}`, number(norm)]);
  }
  for (const [name, text] of [["with_residual", "with the residual"], ["with_norm", "after the norm"], ["encoder", "after the whole block"], ["alti", "ALTI"]]) {
    const values = array(name);
    if (values) rows.push([text, number(values[q * S + k])]);
  }
  for (const [name, text] of [["summed", "attention"], ["with_residual", "with residual"], ["with_norm", "after norm"], ["encoder", "whole block"]]) {
    const ratio = array(`mixing_ratio.${name}`);
    if (ratio) rows.push([`share from other tokens, ${text}`, `${(100 * ratio[q]).toFixed(1)} %`]);
  }
  const table = element("table", { className: "sums" });
  table.append(...rows.map(([text, value]) => element("tr", {}, element("td", {}, text), element("td", {}, value))));
  return table;
}

// --- What the reader does ----------------------------------------------------------------------------

const pair = () => state.hover || state.pinned;

function strongest(t) {
  const { right, left } = plates();
  const plate = right || left;
  const { S } = layerOf();
  let best = 0;
  for (let s = 1; s < S; s++) if (plate.values[t * S + s] > plate.values[t * S + best]) best = s;
  return best;
}

function set(change) {
  const kept = layerOf();
  Object.assign(state, change, { hover: null });
  let shown = layerOf();
  if (!shown) {
    state.layer = contents.sequences[state.sequence].layers.findIndex((layer) => layer !== null);
    shown = layerOf();
  }
  if (state.head !== null && state.head >= contents.layers[state.layer].heads) state.head = null;
  showControls();
  if (!kept || kept.L !== shown.L || kept.S !== shown.S || "sequence" in change) {
    const t = Math.min(Math.floor(shown.L / 2), shown.L - 1);
    state.pinned = [t, strongest(t)];
  }
  showStrips();
  showPair();
}

function showPair() {
  showReading();
  const { left, right } = plates();
  document.querySelector(".plates").classList.toggle("alone", !left || !right);
  draw(byId("left"), left);
  draw(byId("right"), right);
  showLedger();
  showFlow();
}

let waiting = false;

// While the pointer moves: the pieces that follow the pair, once per frame.
function hover(where) {
  state.hover = where;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    markPair();
  });
}

// Everything that shows the pair, but no button is replaced under the pointer.
function markPair() {
  const [q] = pair();
  const buttons = [...byId("queries").children];
  buttons.forEach((button, t) => button.setAttribute("aria-checked", String(t === q)));
  const rows = [...byId("draws").querySelectorAll(".tokens")];
  const { left, right } = plates();
  const shown = [left, shownValueNorms() && { norms: null }, right].filter(Boolean);
  const { S } = layerOf();
  const [, k] = pair();
  rows.forEach((row, i) => {
    const plate = shown[i];
    const levels = plate && plate.norms !== null ? levelsOf(plate.values, state.layer) : null;
    [...row.children].forEach((chip, s) => {
      chip.classList.toggle("at", s === k);
      if (!levels) return;
      const background = levelColour(levels[q * S + s], plate.norms);
      chip.style.background = css(background);
      chip.style.color = legible(background);
      chip.title = `${chip.textContent}  ${number(plate.values[q * S + s])}`;
    });
  });
  draw(byId("left"), left);
  draw(byId("right"), right);
  showLedger();
}

function pin(where) {
  state.pinned = where;
  state.hover = null;
  showPair();
}

function listen() {
  for (const figure of [byId("left"), byId("right")]) {
    const canvas = figure.querySelector("canvas");
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
  listenToFlow();
  byId("sequence").addEventListener("change", (event) => set({ sequence: Number(event.target.value) }));
  byId("scale").addEventListener("change", (event) => set({ scale: event.target.value }));
  byId("diagonal").addEventListener("change", (event) => set({ diagonal: event.target.checked }));
  window.addEventListener("resize", () => showPair());
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { "]": ["layer", 1], "[": ["layer", -1], ".": ["head", 1], ",": ["head", -1] }[event.key];
    if (step) move(...step);
  });
}

function start() {
  byId("about").textContent = contents.about;
  byId("precision").textContent = contents.precision;
  byId("sequence").replaceChildren(...contents.sequences.map((sequence, i) =>
    element("option", { value: String(i) }, `${i + 1}  ${isolated(sequence.title)}`)));
  startTheme(() => set({}));
  listen();
  // With many tokens most numbers are small against the largest.
  if (contents.sequences[0].layers.some((layer) => layer && layer.S > 100)) byId("scale").value = state.scale = "root";
  set({ sequence: 0 });
}

start();
