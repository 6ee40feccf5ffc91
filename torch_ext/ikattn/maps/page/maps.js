// Shows one recording: a layer's weights beside its contributions, and both of a pair in numbers.

const MAPS = [
  ["norms", "N", "Contribution N"],
  ["with_residual", "N + residual", "N_Res", "the same, with the token itself added on the diagonal"],
  ["with_norm", "N + residual + norm", "N_ResLN", "the same, through the normalisation that follows"],
  ["encoder", "whole block", "N_Enc", "the same, through the block's second normalisation"],
  ["alti", "ALTI", "ALTI", "how much nearer a token brings the output, as a share of its row"],
  ["projection", "signed part", "Part in the output",
    "the length along the attention's output, below 0 where it points away; rows over all heads add up to 1"],
];

// --- Arrays ------------------------------------------------------------------------------------------

function array(name, layer = state.layer) {
  const entry = layerOf(layer)?.maps[name];
  return entry ? decode(entry) : null;
}

// Returns [L, S] of one head of a map, or the mean over heads; of signed parts the sum, for they add.
function headOrMean(name, layer, head) {
  const { heads } = contents.layers[layer];
  const parts = perHead(name, layer);
  return parts && overHeads(parts, head, heads, `${state.sequence}/${layer}/${name}`, name === "projection" ? 1 : heads);
}

// Returns [H, L, S]; contributions of each head are weights times value norms where the page has both.
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

// Makes a plate of values [L, S], in the colours of norms or of weights.
const plateOf = (values, caption, meaning, norms) => ({
  values, caption, meaning, norms, textOf: number,
  cells: () => cellsOf(values, norms, state.layer),
  legend: () => {
    const { L, S } = layerOf();
    const top = state.scale === "row" ? "row maximum" : number(maximum(values, 0, L, S, state.layer));
    const kind = state.scale === "root" ? " (square root)" : "";
    const isSigned = values.some((value) => value < 0);
    const colourAt = (share) => colourOf(norms)(isSigned ? 2 * share - 1 : share);
    return { lowest: isSigned ? `\u2212${top}` : "0", highest: `${top}${kind}`, colourAt };
  },
});

function weightsPlate(layer = state.layer, head = state.head) {
  const values = layerOf(layer) && headOrMean("weights", layer, head);
  if (!values) return null;
  const caption = head === null ? "Attention weight, mean over heads" : `Attention weight, head ${head}`;
  return plateOf(values, caption, "a: what the softmax gives, each row sums to 1", false);
}

function normsPlate(layer = state.layer, head = state.head) {
  if (!layerOf(layer)) return null;
  const [, , title, meaning] = MAPS.find(([name]) => name === state.map) || MAPS[0];
  if (state.map === "projection") {
    const parts = headOrMean("projection", layer, head);
    const which = head === null ? "all heads" : `head ${head}`;
    return parts && plateOf(parts, `${title}, ${which}`, meaning, false);
  }
  if (state.map !== "norms") {
    const values = array(state.map, layer);
    const note = head === null ? "" : " (all heads together)";
    return values && plateOf(values, title + note, meaning, true);
  }
  const summed = array("summed", layer);
  if (head === null && summed) {
    return plateOf(summed, "Contribution N, all heads together", "|Σ a f(x)|: what a token really adds", true);
  }
  const values = headOrMean("per_head", layer, head);
  if (values) {
    const which = head === null ? "mean over heads" : `head ${head}`;
    return plateOf(values, `Contribution N, ${which}`, "a |f(x)|: weight times value norm", true);
  }
  return summed && plateOf(summed, "Contribution N (all heads together)", "|Σ a f(x)|", true);
}

const plates = () => ({ left: weightsPlate(), right: normsPlate() });

// --- Colours and numbers -----------------------------------------------------------------------------

const isSelf = (layer = state.layer) => contents.layers[layer].kind === "self";

// Returns the largest magnitude of the rows given, without what is left out.
function maximum(values, from, to, S, layer) {
  let largest = 0;
  for (let t = from; t < to; t++) {
    for (let s = 0; s < S; s++) {
      if (state.diagonal && isSelf(layer) && t === s) continue;
      const value = Math.abs(values[t * S + s]);
      if (value > largest) largest = value;
    }
  }
  return largest;
}

// Returns the colours of a map's cells; those left out have that of the paper.
function coloursOf(values, norms, layer, scale = state.scale) {
  const { L, S } = layerOf(layer);
  const whole = maximum(values, 0, L, S, layer);
  const paper = dark() ? [20, 23, 27] : [251, 250, 248];
  const colour = colourOf(norms);
  const colours = [];
  for (let t = 0; t < L; t++) {
    const top = scale === "row" ? maximum(values, t, t + 1, S, layer) : whole;
    for (let s = 0; s < S; s++) {
      const value = values[t * S + s];
      const isOut = state.diagonal && isSelf(layer) && t === s && !Number.isNaN(value);
      colours.push(isOut ? paper : colour(scaled(value, top, scale)));
    }
  }
  return colours;
}

// --- Tokens ------------------------------------------------------------------------------------------

const FOLDED = 60;  // more tokens than that are two lines that scroll

// Returns a token as in a text, where pieces of a word stand together and need no mark.
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

// --- Parts of the page -------------------------------------------------------------------------------

function thumbnail(plate, layer) {
  return plate ? cellsOf(plate.values, plate.norms, layer, "root") : element("canvas");
}

function cellsOf(values, norms, layer, scale = state.scale) {
  return pixels(coloursOf(values, norms, layer, scale), layerOf(layer));
}

function showRest() {
  const sequence = contents.sequences[state.sequence];
  radios(byId("layer"), contents.layers.map((layer, index) => {
    const there = sequence.layers[index] !== null;
    const plate = there ? normsPlate(index, null) || weightsPlate(index, null) : null;
    return { value: index, title: layer.name, label: `Layer ${layer.label}`, disabled: !there,
      children: [thumbnail(plate, index), layer.label] };
  }), state.layer, (index) => set({ layer: index }));

  const heads = contents.layers[state.layer].heads;
  const hasHeads = perHead("weights", state.layer) || perHead("per_head", state.layer) || array("projection");
  const all = { value: null, text: "all", children: [thumbnail(weightsPlate(state.layer, null) || normsPlate(state.layer, null), state.layer), "all"], label: "All heads" };
  const single = Array.from({ length: hasHeads ? heads : 0 }, (_, head) => ({
    value: head, label: `Head ${head}`,
    children: [thumbnail(weightsPlate(state.layer, head) || normsPlate(state.layer, head), state.layer), String(head)],
  }));
  radios(byId("head"), [all, ...single], state.head, (head) => set({ head }));
}

function showControls() {
  const shown = layerOf();
  if (state.head >= contents.layers[state.layer].heads) state.head = null;
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
  const [q] = pair();
  const joins = joined(queries);
  radios(byId("queries"), queries.map((token, t) => ({
    value: t, text: flowing(token, joins[t]), title: token, className: joins[t] ? "joined" : "",
    hover: (inside) => hover(inside ? [t, strongest(t)] : null),
  })), q, (t) => pin([t, strongest(t)]));

  // Long texts keep to two lines, which scroll: the maps stay in sight.
  byId("queries").classList.toggle("long", queries.length > FOLDED);
  const keyJoins = joined(keys);
  byId("draws").replaceChildren(...readingRows().flatMap((row) => {
    const chips = keys.map((token, s) => {
      const chip = element("span", { className: keyJoins[s] ? "joined" : "" }, element("bdi", {}, flowing(token, keyJoins[s])));
      chip.addEventListener("pointerenter", () => hover([pair()[0], s]));
      chip.addEventListener("pointerleave", () => hover(null));
      chip.addEventListener("click", () => pin([pair()[0], s]));
      return chip;
    });
    paint(chips, row);
    return [element("h2", {}, row.title, element("em", {}, row.symbol)), element("div", { className: keys.length > FOLDED ? "tokens long" : "tokens" }, ...chips)];
  }));
}

// Returns the rows of tokens that are read by that of the pair: the number of each, and its colour.
function readingRows() {
  const { S } = layerOf();
  const [q] = pair();
  const ofPlate = (plate, title, symbol) => {
    const all = [plate.values, coloursOf(plate.values, plate.norms, state.layer)];
    const [values, colours] = all.map((each) => each.slice(q * S, (q + 1) * S));
    return { title, symbol, values, colourOf: (s) => colours[s] };
  };
  const { left, right } = plates();
  const norms = shownValueNorms();
  const top = norms && norms.reduce((largest, value) => Math.max(largest, value), 0);
  const greyOf = (s) => grey(Math.round(255 * (top ? Math.min(norms[s] / top, 1) : 0) * 0.32));
  return [
    left && ofPlate(left, "weight", "a"),
    norms && { title: "value norm", symbol: "|f|", values: norms, colourOf: greyOf },
    right && ofPlate(right, "contribution", ""),
  ].filter(Boolean);
}

// Colours the tokens of a row, says their numbers, and marks the one of the pair.
function paint(chips, { values, colourOf }) {
  const { keys } = tokensOf();
  const [, k] = pair();
  chips.forEach((chip, s) => {
    const background = colourOf(s);
    chip.style.background = css(background);
    chip.style.color = legible(background);
    chip.title = `${keys[s]}  ${number(values[s])}`;
    chip.classList.toggle("at", s === k);
  });
}

// Returns |f(x)| of each key for the chosen head, or the mean over heads. They stand between weight and
// contribution, which is their product; a long text has no room for a third copy.
function shownValueNorms() {
  const norms = state.map === "norms" && layerOf().S <= 48 ? array("value_norms") : null;
  return norms && overHeads(norms, state.head, contents.layers[state.layer].heads, `${state.sequence}/${state.layer}/norms`);
}

function grey(level) {
  const ends = dark() ? [[29, 34, 40], [200, 205, 210]] : [[244, 243, 239], [60, 66, 74]];
  return ends[0].map((from, c) => Math.round(from + (ends[1][c] - from) * (level / 255)));
}

function legible(background) {
  const light = [0.2126, 0.7152, 0.0722].reduce((sum, part, c) => sum + part * (background[c] / 255) ** 2.2, 0);
  return light > 0.22 ? "#15181c" : "#ffffff";
}

// --- Ledger ------------------------------------------------------------------------------------------

function showLedger() {
  const { L, S } = layerOf();
  const [q, k] = pair();
  const heads = contents.layers[state.layer].heads;
  nameThePair();

  const pairOf = (values) => values && ((head) => values[(head * L + q) * S + k]);
  const keyOf = (values) => values && ((head) => values[head * S + k]);
  const columns = [
    ["similarity", pairOf(array("similarity"))],
    ["magnitude", keyOf(array("magnitude"))],
    ["weight a", pairOf(array("weights")), false],
    ["norm |f(x)|", keyOf(array("value_norms"))],
    ["contribution", pairOf(perHead("per_head", state.layer)), true],
    ["part", pairOf(array("projection")), false],
  ].filter(([, value]) => value);
  const cellOf = (head, [, value, coloured]) =>
    element("td", {}, number(value(head)), ...(coloured === undefined ? [] : [barOf(value, head, heads, coloured)]));
  const rows = Array.from({ length: heads }, (_, head) => element("tr", { className: head === state.head ? "chosen" : "" },
    element("td", {}, String(head)), ...columns.map((column) => cellOf(head, column))));
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "head"),
    ...columns.map(([title]) => element("th", {}, title)))), element("tbody", {}, ...rows));
  byId("ledger").replaceChildren(...(columns.length ? [table] : []), sums(q, k, columns));
}

function barOf(value, head, heads, norms) {
  let top = 0;
  for (let other = 0; other < heads; other++) top = Math.max(top, Math.abs(value(other)) || 0);
  const bar = element("span", { className: "bar" });
  bar.style.width = `${top ? (100 * Math.abs(value(head) || 0)) / top : 0}%`;
  bar.style.background = css(ramp(value(head) < 0 ? !norms : norms)[170]);
  return bar;
}

function sums(q, k, columns) {
  const { S } = layerOf();
  const heads = contents.layers[state.layer].heads;
  const contribution = columns.find(([title]) => title === "contribution");
  const rows = [];
  const parts = contribution ? Array.from({ length: heads }, (_, head) => contribution[1](head)) : [];
  const whole = total(parts);
  if (contribution) rows.push(["the heads' contributions added up", number(whole)]);
  const summed = array("summed");
  if (summed) {
    const norm = summed[q * S + k];
    const lost = whole > 0 ? `, ${Math.max(0, Math.round(100 * (1 - norm / whole)))} % cancels` : "";
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
  return element("table", { className: "sums" },
    ...rows.map(([text, value]) => element("tr", {}, element("td", {}, text), element("td", {}, value))));
}

// --- What the reader does ----------------------------------------------------------------------------

function strongest(t) {
  const { right, left } = plates();
  const plate = right || left;
  const { S } = layerOf();
  let best = 0;
  for (let s = 1; s < S; s++) if (plate.values[t * S + s] > plate.values[t * S + best]) best = s;
  return best;
}

function startingPair() {
  const t = Math.min(Math.floor(layerOf().L / 2), layerOf().L - 1);
  return [t, strongest(t)];
}

function showPair() {
  showReading();
  const { left, right } = plates();
  document.querySelector(".plates").classList.toggle("alone", !left || !right);
  drawPair();
  showFlow();
}

function drawPair() {
  for (const [name, plate] of Object.entries(plates())) draw(byId(name), plate);
  showLedger();
}

// Shows the pair everywhere, and replaces no button under the pointer.
function markPair() {
  const [q] = pair();
  [...byId("queries").children].forEach((button, t) => button.setAttribute("aria-checked", String(t === q)));
  const rows = readingRows();
  byId("draws").querySelectorAll(".tokens").forEach((row, i) => paint([...row.children], rows[i]));
  drawPair();
}

byId("diagonal").addEventListener("change", (event) => set({ diagonal: event.target.checked }));
// With many tokens most numbers are small against the largest.
if (contents.sequences[0].layers.some((layer) => layer && layer.S > 100)) byId("scale").value = state.scale = "root";
startHeatMaps();
