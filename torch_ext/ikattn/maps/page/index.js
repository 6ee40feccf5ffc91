// Sorts and filters the lines of the list. It comes with all of them, to be read without scripts, too;
// with scripts only the rows in view, and some around them, stay in the page.

const list = byId("lines");
const lines = [...list.children].map((item) => ({ item, numbers: [item.value, ...numbersOf(item)], text: "" }));
const SORTS = [["line", 1], ["length", -1], ["mixing ratio", -1], ["entropy", -1]];  // 1: smallest first
const SPARE = 12;  // rows above and below those in view

const state = { sort: 0, direction: 1, found: lines };

// Returns the numbers of tokens, mixing ratio and entropy; NaN where there is none.
function numbersOf(item) {
  return [...item.querySelectorAll("data")].map(({ value }) => (value === "" ? NaN : Number(value)));
}

// Sorts lines without a number last in both directions; equals keep the order of the text.
function sort() {
  const { sort: by, direction } = state;
  const rank = ({ numbers }) => (Number.isNaN(numbers[by]) ? Infinity : direction * numbers[by]);
  lines.sort((a, b) => (rank(a) === rank(b) ? a.numbers[0] - b.numbers[0] : rank(a) - rank(b)));
}

function filter() {
  const sought = byId("search").value.trim().toLowerCase();
  state.found = sought === "" ? lines : lines.filter((line) => {
    line.text ||= line.item.querySelector(".text").textContent.toLowerCase();
    return line.text.includes(sought);
  });
  const count = (number) => number.toLocaleString("en");
  const of = sought ? `${count(state.found.length)} of ` : "";
  byId("count").textContent = `${of}${count(lines.length)} lines`;
}

// Rows in view at their places; those that stay are not touched, so that the focus stays.
function render() {
  const { found } = state;
  const row = parseFloat(getComputedStyle(list).getPropertyValue("--row"));
  const first = Math.max(0, Math.floor((window.scrollY - list.offsetTop) / row) - SPARE);
  const shown = found.slice(first, first + Math.ceil(window.innerHeight / row) + 2 * SPARE);
  const kept = new Set(shown.map(({ item }) => item));
  list.style.height = `${found.length * row}px`;
  for (const item of [...list.children]) if (!kept.has(item)) item.remove();
  shown.forEach(({ item }, at) => {
    item.style.top = `${(first + at) * row}px`;
    item.setAttribute("aria-posinset", String(first + at + 1));
    item.setAttribute("aria-setsize", String(found.length));
    if (list.children[at] !== item) list.insertBefore(item, list.children[at] || null);
    if (item.dataset.map && !item.querySelector("canvas")) drawMap(item);
  });
}

function showSorts() {
  [...byId("sort").children].forEach((button, by) => {
    const arrow = state.direction === 1 ? "\u2191" : "\u2193";
    button.setAttribute("aria-pressed", String(by === state.sort));
    button.textContent = by === state.sort ? `${SORTS[by][0]} ${arrow}` : SORTS[by][0];
    button.setAttribute("aria-label", `${SORTS[by][0]}${by === state.sort ? `, ${state.direction === 1 ? "smallest" : "largest"} first` : ""}`);
  });
}

function sortBy(by) {
  const direction = by === state.sort ? -state.direction : SORTS[by][1];
  Object.assign(state, { sort: by, direction });
  sort();
  filter();
  showSorts();
  render();
}

// L x S bytes, the square roots of the cells over the largest.
function drawMap(item) {
  const [name, L, S, codes] = item.dataset.map.split(" ");
  const colours = ramp(name !== "weights");
  const canvas = pixels(Array.from(bytesOf(codes), (level) => colours[level]), { L: Number(L), S: Number(S) });
  canvas.setAttribute("aria-hidden", "true");
  item.querySelector("canvas")?.remove();
  item.prepend(canvas);
}

startTheme(() => lines.filter(({ item }) => item.querySelector("canvas")).forEach(({ item }) => drawMap(item)));
byId("sort").append(...SORTS.map((_, by) => {
  const button = element("button", { type: "button" });
  button.addEventListener("click", () => sortBy(by));
  return button;
}));
byId("search").addEventListener("input", () => { filter(); render(); });
window.addEventListener("scroll", () => render(), { passive: true });
window.addEventListener("resize", () => render());
byId("controls").hidden = byId("theme").hidden = false;
list.className = "in-view";
list.replaceChildren();  // all at once, where render would take them out one by one
showSorts();
filter();
render();
