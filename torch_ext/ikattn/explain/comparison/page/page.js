// Draws two models' maps and their difference. Every text reaches the page through textContent or
// fillText, never as markup.
//
// An array holds model A's rows, then model B's: [2, L, S] or [2, H, L, S].

const contents = JSON.parse(document.getElementById("contents").textContent);

const MAPS = {
  weights: "attention weight", per_head: "contribution of a head", similarity: "similarity",
  summed: "contribution N", with_residual: "N with residual (N_Res)",
  with_norm: "N after the norm (N_ResLN)", encoder: "whole block (N_Enc)", alti: "ALTI",
};
const MEASURES = [
  ["total_variation", "total variation"], ["jensen_shannon", "Jensen-Shannon, bits"],
  ["rank_correlation", "rank correlation"], ["entropy_a", "entropy A, bits"], ["entropy_b", "entropy B, bits"],
  ["mixing_ratio_a", "mixing ratio A"], ["mixing_ratio_b", "mixing ratio B"],
];

const state = { sequence: 0, layer: 0, head: null, map: null, scale: "linear", pinned: [0, 0], hover: null };

// --- Arrays ------------------------------------------------------------------------------------------

const layerOf = () => contents.sequences[state.sequence].layers[state.layer];
const tokensOf = (which) => contents.sequences[state.sequence].labels[layerOf()[which]];

// [L, S] of model 0 or 1: of the chosen head, or the mean over heads.
function rowsOf(model) {
  const { L, S, maps } = layerOf();
  const { heads } = maps[state.map];
  const [count, size] = [Math.max(heads, 1), L * S];
  const all = decode(maps[state.map]).subarray(model * count * size, (model + 1) * count * size);
  if (!heads) return all;
  if (state.head !== null) return all.subarray(state.head * size, (state.head + 1) * size);
  return once(`mean/${maps[state.map].id}/${model}`, () => Float32Array.from({ length: size }, (_, i) => {
    let sum = 0;
    for (let h = 0; h < heads; h++) sum += all[h * size + i];
    return sum / heads;
  }));
}

let view = { key: null };

// What the three heat maps show: values [L, S], the colour of a share of the largest, and the cells.
function plates() {
  const key = [state.sequence, state.layer, state.map, state.head, state.scale, dark()].join("/");
  if (view.key === key) return view.plates;
  const [a, b] = [rowsOf(0), rowsOf(1)];
  const top = Math.max(largest(a), largest(b));
  const apart = a.map((value, i) => b[i] - value);
  const [blue, orange] = [colourOf(false), colourOf(true)];
  const shown = {
    a: { values: a, top, caption: "A", meaning: contents.models[0], colour: blue },
    b: { values: b, top, caption: "B", meaning: contents.models[1], colour: orange },
    difference: {
      values: apart, top: largest(apart), caption: "B \u2212 A", signed: true,
      meaning: "blue: A takes more, orange: B takes more",
      colour: (share) => share < 0 ? blue(-share) : orange(share),
    },
  };
  for (const plate of Object.values(shown)) plate.cells = cellsOf(plate);
  view = { key, plates: shown };
  return shown;
}

const largest = (values) => values.reduce((top, value) => Math.max(top, Math.abs(value) || 0), 0);

// --- Colours and numbers -----------------------------------------------------------------------------

// From a share of the largest value, 0 to 1, to a colour. What A takes is blue and what B takes orange,
// also where one takes more than the other: hues that are told apart without red and green.
function colourOf(norms) {
  const levels = ramp(norms);
  return (share) => Number.isNaN(share) ? [190, 40, 120] : levels[Math.round(255 * Math.min(share, 1))];
}

function scaled(value, top) {
  const share = top > 0 ? value / top : value * 0;
  return state.scale === "root" ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share;
}

function percent(value, signed = false) {
  if (Number.isNaN(value)) return "not finite";
  const text = `${Math.abs(100 * value).toPrecision(3)} %`;
  return Math.abs(value) < 5e-6 ? "0 %" : value < 0 ? `\u2212${text}` : signed ? `+${text}` : text;
}

const measure = (value) => value === null || value === undefined ? "" : value.toFixed(3).replace("-", "\u2212");

// --- Tokens ------------------------------------------------------------------------------------------

// --- Controls ----------------------------------------------------------------------------------------

function measured(layer, map, head) {
  return contents.table.find((row) => row.layer === contents.layers[layer].name && row.map === map && row.head === head);
}

// A name above a bar for a share.
function withBar(text, share) {
  const bar = element("span");
  bar.style.width = `${100 * (share || 0)}%`;
  return [text, element("span", { className: "bar" }, bar)];
}

function showControls() {
  const { maps } = layerOf();
  const names = Object.keys(MAPS).filter((name) => name in maps);
  if (!names.includes(state.map)) [state.map] = names;
  byId("map").replaceChildren(...names.map((name) =>
    element("option", { value: name, selected: name === state.map }, MAPS[name])));
  const { heads } = maps[state.map];
  if (state.head >= heads) state.head = null;

  const shown = contents.sequences[state.sequence].layers;
  radios(byId("layer"), contents.layers.map((layer, value) => {
    const share = measured(value, state.map, null)?.total_variation;
    return { value, title: layer.name, disabled: !shown[value], children: withBar(layer.label, share),
      label: `Layer ${layer.label}, total variation ${measure(share)}` };
  }), state.layer, (layer) => set({ layer }));
  const choices = [null, ...Array.from({ length: heads }, (_, head) => head)];
  radios(byId("head"), choices.map((value) => {
    const share = measured(state.layer, state.map, value)?.total_variation;
    const text = value === null ? (heads ? "mean" : "all") : String(value);
    return { value, children: withBar(text, share), label: `Head ${text}, total variation ${measure(share)}` };
  }), state.head, (head) => set({ head }));
}

function showMeasures() {
  const head = state.head === null ? "mean over heads" : `head ${state.head}`;
  const which = layerOf().maps[state.map].heads ? `, ${head}` : "";
  byId("measures-label").textContent = `All texts: ${MAPS[state.map]}${which}`;
  const rows = contents.layers.map((layer, i) => [layer, i, measured(i, state.map, state.head)]).filter(([, , row]) => row);
  const there = MEASURES.filter(([name]) => rows.some(([, , row]) => row[name] !== null));
  const body = element("tbody", {}, ...rows.map(([layer, i, row]) => {
    const line = element("tr", { className: i === state.layer ? "chosen" : "", title: layer.name },
      element("td", {}, layer.label), ...there.map(([name]) => element("td", {}, measure(row[name]))));
    if (contents.sequences[state.sequence].layers[i]) line.addEventListener("click", () => set({ layer: i }));
    return line;
  }));
  byId("measures").replaceChildren(element("thead", {}, element("tr", {}, element("th", {}, "layer"),
    ...there.map(([, title]) => element("th", {}, title)))), body);
}

// --- Heat maps ---------------------------------------------------------------------------------------

function layoutOf(width, L, S, queries, keys, context) {
  context.font = labelFont(12);
  const longest = (tokens) => Math.min(92, Math.max(...tokens.map((token) => context.measureText(fitted(context, token, 200)).width)) + 8);
  let [left, top] = [longest(queries), longest(keys) * 0.85 + 10];
  let cell = Math.min(34, (width - left - 22) / S);
  const labelled = cell >= 9;
  if (!labelled) {  // only the row and the column of the pair are labelled
    [left, top] = [78, 66];
    cell = (width - left - 4) / S;
  }
  cell = cell >= 4 ? Math.floor(cell) : cell;
  return { left, top, cell, labelled, width, height: top + cell * L + 2 };
}

function draw(figure, plate) {
  const { L, S } = layerOf();
  const [queries, keys] = [tokensOf("queries"), tokensOf("keys")];
  const canvas = figure.querySelector("canvas");
  const context = canvas.getContext("2d");
  const layout = layoutOf(figure.clientWidth, L, S, queries, keys, context);
  const { left, top, cell } = layout;
  const sharp = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: layout.width * sharp, height: layout.height * sharp, layout });
  Object.assign(canvas.style, { width: `${layout.width}px`, height: `${layout.height}px` });
  context.scale(sharp, sharp);
  context.imageSmoothingEnabled = false;
  context.drawImage(plate.cells, left, top, cell * S, cell * L);

  const [q, k] = pair();
  const style = getComputedStyle(document.documentElement);
  const [ink, mark] = ["--ink", "--mark"].map((name) => style.getPropertyValue(name).trim());
  context.font = labelFont(layout.labelled ? Math.min(12, Math.max(9, cell - 1)) : 12);
  context.textBaseline = "middle";
  context.textAlign = "right";
  queries.forEach((token, t) => {
    if (!layout.labelled && t !== q) return;
    context.fillStyle = t === q ? mark : ink;
    context.fillText(fitted(context, token, left - 8), left - 6, top + cell * (t + 0.5));
  });
  context.textAlign = "left";
  keys.forEach((token, s) => {
    if (!layout.labelled && s !== k) return;
    context.save();
    context.translate(left + cell * (s + 0.5) + 2, top - 6);
    context.rotate(-Math.PI / 3.4);
    context.fillStyle = s === k ? mark : ink;
    context.fillText(fitted(context, token, (top - 10) / 0.81), 0, 0);
    context.restore();
  });
  context.strokeStyle = mark;
  context.strokeRect(left - 0.5, top + cell * q - 0.5, cell * S + 1, cell + 1);
  context.lineWidth = 2;
  context.strokeRect(left + cell * k - 1, top + cell * q - 1, cell + 2, cell + 2);

  const here = percent(plate.values[q * S + k], plate.signed);
  figure.querySelector("figcaption").replaceChildren(plate.caption, element("span", {}, plate.meaning));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${plate.caption}: ${queries[q]} reads ${keys[k]}: ${here}`);
  showLegend(figure.querySelector(".legend"), plate, here);
}

// One pixel for each cell.
function cellsOf(plate) {
  const { L, S } = layerOf();
  const cells = element("canvas", { width: S, height: L });
  const context = cells.getContext("2d");
  const image = context.createImageData(S, L);
  plate.values.forEach((value, i) => image.data.set([...plate.colour(scaled(value, plate.top)), 255], 4 * i));
  context.putImageData(image, 0, 0);
  return cells;
}

function showLegend(legend, plate, here) {
  const bar = element("canvas", { width: 256, height: 1 });
  const context = bar.getContext("2d");
  for (let x = 0; x < 256; x++) {
    const value = plate.signed ? (2 * x) / 255 - 1 : x / 255;
    context.fillStyle = css(plate.colour(scaled(value, 1)));
    context.fillRect(x, 0, 1, 1);
  }
  legend.replaceChildren(plate.signed ? percent(-plate.top) : "0", bar, percent(plate.top, plate.signed),
    element("span", {}, `\u00b7 here ${here}`));
}

// --- What the reader does ----------------------------------------------------------------------------

const pair = () => state.hover || state.pinned;

function set(change) {
  const before = layerOf();
  Object.assign(state, change, { hover: null });
  if (!layerOf()) state.layer = contents.sequences[state.sequence].layers.findIndex((layer) => layer !== null);
  showControls();
  const { L, S } = layerOf();
  if (!before || before.L !== L || before.S !== S || "sequence" in change) state.pinned = farthest();
  showMeasures();
  showPair();
}

// The pair at which the models are the farthest apart.
function farthest() {
  const { S } = layerOf();
  const { difference } = plates();
  const at = Math.max(0, difference.values.findIndex((value) => Math.abs(value) === difference.top));
  return [Math.floor(at / S), at % S];
}

function showPair() {
  const { S } = layerOf();
  const [q, k] = pair();
  const shown = plates();
  for (const [name, plate] of Object.entries(shown)) draw(byId(name), plate);
  const apart = shown.difference.values.subarray(q * S, (q + 1) * S).reduce((sum, value) => sum + Math.abs(value), 0) / 2;
  const numbers = Object.entries({ a: "A", b: "B", difference: "B \u2212 A" })
    .map(([name, title]) => `${title} ${percent(shown[name].values[q * S + k], shown[name].signed)}`).join(", ");
  byId("pair").replaceChildren(element("b", { className: "reader" }, element("bdi", {}, readable(tokensOf("queries")[q]))), ` (${q}) reads `,
    element("b", {}, element("bdi", {}, readable(tokensOf("keys")[k]))), ` (${k}): ${numbers}`,
    element("span", { className: "apart" }, ` \u00b7 total variation of this row ${measure(apart)}`));
}

let waiting = false;

// While the pointer moves: once per frame.
function hover(where) {
  state.hover = where;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    showPair();
  });
}

function pin(where) {
  Object.assign(state, { pinned: where, hover: null });
  showPair();
}

function listen() {
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
  byId("sequence").addEventListener("change", (event) => set({ sequence: Number(event.target.value) }));
  byId("map").addEventListener("change", (event) => set({ map: event.target.value }));
  byId("scale").addEventListener("change", (event) => set({ scale: event.target.value }));
  window.addEventListener("resize", showPair);
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
  set({ sequence: 0 });
}

start();
