// Compares two models' maps and their difference. An array holds model A's rows, then model B's:
// [2, L, S] or [2, H, L, S].

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

// --- Arrays ------------------------------------------------------------------------------------------

// Returns [L, S] of model 0 or 1 for the chosen head, or the mean over heads.
function rowsOf(model) {
  const entry = layerOf().maps[state.map];
  const both = decode(entry);
  const own = both.subarray((model * both.length) / 2, ((model + 1) * both.length) / 2);
  return entry.heads ? overHeads(own, state.head, entry.heads, `${entry.id}/${model}`) : own;
}

let view = { key: null };

// Returns the three plates, drawn anew where something that they show has changed.
function plates() {
  const key = [state.sequence, state.layer, state.map, state.head, state.scale, dark()].join("/");
  if (view.key === key) return view.plates;
  const [a, b] = [rowsOf(0), rowsOf(1)];
  const top = Math.max(largest(a), largest(b));
  const apart = a.map((value, i) => b[i] - value);
  // What A takes is blue and what B takes orange, also where one takes more than the other: hues told
  // apart without red and green.
  const shown = {
    a: plateOf(a, top, "A", contents.models[0], false),
    b: plateOf(b, top, "B", contents.models[1], true),
    difference: plateOf(apart, largest(apart), "B \u2212 A", "blue: A takes more, orange: B takes more", true, true),
  };
  view = { key, plates: shown };
  return shown;
}

// Makes a plate of values [L, S], of which `top` has the full colour.
function plateOf(values, top, caption, meaning, norms, signed = false) {
  const colour = colourOf(norms);
  const cells = pixels(Array.from(values, (value) => colour(scaled(value, top))), layerOf());
  return {
    values, top, caption, meaning, cells: () => cells,
    textOf: (value) => percent(value, signed),
    legend: () => ({
      lowest: signed ? percent(-top) : "0", highest: percent(top, signed),
      colourAt: (share) => colour(scaled(signed ? 2 * share - 1 : share, 1)),
    }),
  };
}

const largest = (values) => values.reduce((top, value) => Math.max(top, Math.abs(value) || 0), 0);

// --- Numbers -----------------------------------------------------------------------------------------

function percent(value, signed = false) {
  if (Number.isNaN(value)) return "not finite";
  const text = `${Math.abs(100 * value).toPrecision(3)} %`;
  return Math.abs(value) < 5e-6 ? "0 %" : value < 0 ? `\u2212${text}` : signed ? `+${text}` : text;
}

const measure = (value) => value === null || value === undefined ? "" : value.toFixed(3).replace("-", "\u2212");

// --- Controls ----------------------------------------------------------------------------------------

function measured(layer, map, head) {
  return contents.table.find((row) => row.layer === contents.layers[layer].name && row.map === map && row.head === head);
}

// Puts a name above a bar for a share.
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

function showRest() {
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

// --- What the reader does ----------------------------------------------------------------------------

// Finds the pair at which the models are the farthest apart.
function startingPair() {
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
  const numbers = Object.values(shown).map((plate) => `${plate.caption} ${plate.textOf(plate.values[q * S + k])}`).join(", ");
  nameThePair(`: ${numbers}`, element("span", { className: "apart" }, ` \u00b7 total variation of this row ${measure(apart)}`));
}

const markPair = showPair;

byId("map").addEventListener("change", (event) => set({ map: event.target.value }));
startHeatMaps();
