// Draws the strongest paths by which a token at the top of a stack of self-attention layers draws from the
// tokens at its bottom: columns are the tokens below, between and above the layers.
//
// A_l [L, L] is the chosen map of layer l, all heads together, each row divided by its sum. At the top
// the target has the whole flow; below layer l token j has the sum over i of share(i) A_l[i, j]. A
// ribbon is one term of that sum, its width the term.

const LEAST = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2];  // shares of the flow, places of the slider
const FLOW_NOTES = {
  norms: " It leaves out the residual, by which a token keeps what it is.",
  with_norm: " It ends between two normalisations and overstates some tokens, more so with each layer; N_Enc does not.",
};

const flowPlate = (layer) => normsPlate(layer, null) || weightsPlate(layer, null);

// Returns the layers through which there is a flow, the lowest first; none where it would be of one layer, of
// cross-attention, or of rows and columns that are not the same tokens.
function stackOfLayers() {
  const { side } = contents.layers[state.layer];
  const { L } = layerOf();
  const stack = contents.layers.map((_, layer) => layer).filter((layer) =>
    isSelf(layer) && contents.layers[layer].side === side && layerOf(layer));
  const fits = stack.every((layer) => layerOf(layer).L === L && layerOf(layer).S === L && flowPlate(layer));
  return isSelf() && fits && stack.length > 1 ? stack : [];
}

// [L, L], each row divided by its sum; a row without a finite sum becomes 0.
function flowRows(layer) {
  const { values } = flowPlate(layer);
  const { L } = layerOf(layer);
  return once(`${state.sequence}/${layer}/flow/${state.map}`, () => {
    const rows = new Float64Array(L * L);
    for (let i = 0; i < L; i++) {
      let sum = 0;
      for (let j = 0; j < L; j++) sum += values[i * L + j];
      if (!(sum > 0 && Number.isFinite(sum))) continue;
      for (let j = 0; j < L; j++) rows[i * L + j] = values[i * L + j] / sum;
    }
    return rows;
  });
}

// Returns the share of each token in each column, the lowest first; the ribbons of at least `least` that
// hang together with the target; and how much of the flow goes along them all the way.
function flowInto(target, stack, least) {
  const { L } = layerOf();
  const shares = [new Float64Array(L)];
  shares[0][target] = 1;
  let carried = shares[0];
  const ribbons = [];
  for (let column = stack.length - 1; column >= 0; column--) {
    const rows = flowRows(stack[column]);
    const above = shares[0];
    const below = new Float64Array(L);
    const carriedBelow = new Float64Array(L);
    for (let i = 0; i < L; i++) {
      if (above[i] === 0) continue;
      for (let j = 0; j < L; j++) {
        const flow = above[i] * rows[i * L + j];
        below[j] += flow;
        if (flow < least || carried[i] === 0) continue;
        ribbons.push({ column, i, j, flow });
        carriedBelow[j] += carried[i] * rows[i * L + j];
      }
    }
    shares.unshift(below);
    carried = carriedBelow;
  }
  return { shares, ribbons, carried: total(carried) };
}

const total = (values) => values.reduce((sum, value) => sum + value, 0);
// Returns a token, with its place where the text has it more than once.
const nameOf = (j) => {
  const { queries } = tokensOf();
  return queries.indexOf(queries[j]) === queries.lastIndexOf(queries[j]) ? readable(queries[j]) : `${readable(queries[j])} (${j})`;
};
const percent = (share) => `${Number((100 * share).toPrecision(2))}\u00a0%`;

function showFlow() {
  const stack = stackOfLayers();
  byId("flow").hidden = stack.length === 0;
  if (stack.length === 0) return;
  const least = LEAST[byId("least").value];
  const [target] = state.pinned;
  const flow = flowInto(target, stack, least);
  byId("least").setAttribute("aria-valuetext", percent(least));
  byId("least-value").textContent = percent(least);
  byId("flow-meaning").textContent = `${flowPlate(stack[0]).caption.replace(", all heads together", "")} `
    + `of ${stack.length} layers, each row divided by its sum.${FLOW_NOTES[flowPlate(stack[0]).norms ? state.map : "norms"] || ""}`;
  sayFlow(flow, target);
  drawFlow(flow, target, stack);
}

// Says the flow in words: the largest shares at the bottom, and how much of all is drawn.
function sayFlow({ shares, carried }, target) {
  const lowest = shares[0];
  const largest = [...lowest.keys()].filter((j) => lowest[j] > 0).sort((a, b) => lowest[b] - lowest[a]).slice(0, 5);
  const named = (j) => element("bdi", {}, nameOf(j));
  const parts = largest.flatMap((j, place) => [place ? ", " : "", named(j), ` ${percent(lowest[j])}`]);
  const lost = 1 - total(lowest);
  byId("flow-sources").replaceChildren(element("b", { className: "reader" }, named(target)), " comes from ",
    ...(largest.length ? parts : ["nothing"]),
    lowest.filter((share) => share > 0).length > largest.length ? " and others. " : ". ",
    carried > 0 ? `The ribbons carry ${percent(carried)} all the way.` : "No ribbons that wide go all the way.",
    lost > 1e-3 ? ` ${percent(lost)} ends in rows that are 0 or not finite.` : "");
}

const FLOW = { wide: 120, gap: 7, row: 17, bar: 7, top: 24, step: 38, many: 40 };  // pixels; wide: of the whole flow

function drawFlow({ shares, ribbons }, target, stack) {
  const svg = byId("flow").querySelector("svg");
  const width = svg.parentElement.clientWidth;
  const left = width < 600 ? 84 : 124;
  const step = Math.max(FLOW.step, (width - left - FLOW.bar - 2) / stack.length);
  const { rows, height } = rowsOfFlow(shares, ribbons, target);
  svg.setAttribute("width", left + step * stack.length + FLOW.bar + 2);
  svg.setAttribute("height", height);
  const bars = barsOfFlow(shares, ribbons, target, rows, (column) => left + step * column);
  svg.replaceChildren(
    ...stack.map((layer, column) => heading(layer, left + FLOW.bar / 2 + step * (column + 0.5))),
    ...ribbons.map((ribbon) => ribbonShape(ribbon, bars, stack)),
    ...[...bars.values()].map((bar) => barShape(bar, target, stack)),
    ...[...rows].map(([j, row]) => rowLabel(j, row, left, target)),
  );
  svg.setAttribute("aria-label", `Flow into ${nameOf(target)}, ${ribbons.length} ribbons. ${byId("flow-sources").textContent}`);
}

function heading(layer, x) {
  const { name, label } = contents.layers[layer];
  const shape = drawn("text", { x, y: 11, class: layer === state.layer ? "chosen" : "" }, name);
  shape.append(label);
  return shape;
}

function ribbonShape(ribbon, bars, stack) {
  const { column, i, j, flow } = ribbon;
  const look = { class: i === j ? "own" : "from", "stroke-width": Math.max(0.75, FLOW.wide * flow) };
  return drawn("path", { d: course(ribbon, bars), ...look },
    `layer ${contents.layers[stack[column]].label}: ${nameOf(i)} takes ${percent(flow)} of the flow from ${nameOf(j)}`);
}

function barShape({ column, j, share, x, top, height }, target, stack) {
  const at = column === 0 ? "input" : `after layer ${contents.layers[stack[column - 1]].label}`;
  const isTarget = column === stack.length && j === target;
  const shape = drawn("rect", { x, y: top, width: FLOW.bar, height, rx: 1.5, class: isTarget ? "target" : "" },
    `${nameOf(j)}, ${at}: ${percent(share)} of the flow`);
  shape.addEventListener("click", () => pin([j, strongest(j)]));
  return shape;
}

function rowLabel(j, { middle }, left, target) {
  const { queries } = tokensOf();
  const ruler = once("ruler", () => element("canvas").getContext("2d"));
  ruler.font = labelFont(13);
  const shape = drawn("text", { x: left - 9, y: middle, class: j === target ? "token target" : "token" }, queries[j]);
  shape.append(fitted(ruler, queries[j], left - 16));
  shape.addEventListener("click", () => pin([j, strongest(j)]));
  return shape;
}

// Tokens that have a ribbon, and the target, each on one line through all columns.
function rowsOfFlow(shares, ribbons, target) {
  const shown = new Set([target, ...ribbons.flatMap(({ i, j }) => [i, j])]);
  const rows = new Map();
  const gap = shown.size > FLOW.many ? 0 : FLOW.gap;
  let y = FLOW.top;
  for (const j of [...shown].sort((a, b) => a - b)) {
    const height = Math.max(FLOW.row, FLOW.wide * Math.max(...shares.map((column) => column[j])));
    rows.set(j, { middle: y + height / 2 });
    y += height + gap;
  }
  return { rows, height: y };
}

const placeOf = (column, j) => `${column}/${j}`;

function barsOfFlow(shares, ribbons, target, rows, xOf) {
  const bars = new Map();
  const add = (column, j) => {
    const share = shares[column][j];
    const height = Math.max(1, FLOW.wide * share);
    const top = rows.get(j).middle - height / 2;
    // Ribbons leave to the left and come from the right, each below the one before.
    bars.set(placeOf(column, j), { column, j, share, height, top, x: xOf(column), leaving: top, coming: top });
  };
  add(shares.length - 1, target);
  for (const { column, i, j } of ribbons) {
    if (!bars.has(placeOf(column + 1, i))) add(column + 1, i);
    if (!bars.has(placeOf(column, j))) add(column, j);
  }
  return bars;
}

function course({ column, i, j, flow }, bars) {
  const from = bars.get(placeOf(column + 1, i));
  const to = bars.get(placeOf(column, j));
  const width = FLOW.wide * flow;
  const [x1, x2] = [from.x, to.x + FLOW.bar];
  const [y1, y2] = [from.leaving + width / 2, to.coming + width / 2];
  from.leaving += width;
  to.coming += width;
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

function drawn(tag, attributes, title) {
  const { namespaceURI } = byId("flow").querySelector("svg");
  const made = document.createElementNS(namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  const shown = document.createElementNS(namespaceURI, "title");
  shown.textContent = title;
  made.append(shown);
  return made;
}

byId("least").addEventListener("input", () => showFlow());
byId("flow").querySelector("svg").addEventListener("keydown", (event) => {
  const { L } = layerOf();
  const [target] = state.pinned;
  const next = { ArrowDown: target + 1, ArrowRight: target + 1, ArrowUp: target - 1, ArrowLeft: target - 1, Home: 0, End: L - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const t = Math.max(0, Math.min(L - 1, next));
  pin([t, strongest(t)]);
});
