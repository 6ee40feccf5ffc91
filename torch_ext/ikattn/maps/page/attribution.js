// Colours texts by what their tokens add to a value. A text's scores are base64 of float32 [n, S],
// n targets and S tokens, little-endian.

const contents = JSON.parse(byId("contents").textContent);

const LONG = 400;  // a text of more tokens scrolls by itself
const LISTED = 15;  // how many of the largest parts are listed

// Targets first..last are summed, anchor is where their choice began; contrast is 0 to 100.
const state = { sequence: 0, first: 0, last: 0, anchor: 0, focus: 0, contrast: 0 };
let shown = [];  // contents, elements, scores [n, S] and sums [S] over the targets, for each text
let options = [];  // elements of the targets

const sequence = () => contents.sequences[state.sequence];

// --- Numbers -----------------------------------------------------------------------------------------

// Returns [S], the scores of the chosen targets added up.
function summed(scores, S) {
  const sums = new Float64Array(S);
  for (let target = state.first; target <= state.last; target++) {
    for (let j = 0; j < S; j++) sums[j] += scores[target * S + j];
  }
  return sums;
}

// Adds up numbers of the chosen targets; null where one is not finite.
function total(numbers) {
  let sum = 0;
  for (const number of numbers.slice(state.first, state.last + 1)) {
    if (number === null) return null;
    sum += number;
  }
  return sum;
}

const signed = (value) => (value > 0 && Number.isFinite(value) ? "+" : "") + number(value);

// --- Tokens ------------------------------------------------------------------------------------------

// Returns what stands before a token, what is coloured of it, and what stands after it.
function partsOf(text) {
  if (text === "") return ["", "\u00b7", ""];  // its letter stands at a token that follows
  if (/^[ \t]+$/.test(text)) return ["", text, ""];
  const [, before, core, after] = /^( *)([^]*?)(\n*)$/.exec(text);
  return [before, core.replace(/\n/g, "\u21b5\n").replace(/\r/g, "\u240d") + "\u21b5".repeat(after.length), after];
}

// Returns a token by itself in one line, for lists and labels.
function alone(text) {
  const [, core] = partsOf(text);
  return core.replace(/\n/g, "").replace(/^[ \t]+$/, (spaces) => "\u2423".repeat(spaces.length));
}

// Fills a container with tokens of which Tab reaches one and arrow keys the others.
function fill(container, texts, special, label) {
  const isSpecial = new Set(special);
  const elements = texts.map((text, j) => {
    const [, core] = partsOf(text);
    const token = element("bdi", { className: "token", tabIndex: j === 0 ? 0 : -1 }, core);
    token.setAttribute("role", "option");
    token.dataset.place = String(j);
    if (isSpecial.has(j)) token.classList.add("special");
    if (text === "") token.classList.add("mark");
    return token;
  });
  const flow = document.createDocumentFragment();
  texts.forEach((text, j) => {
    const [before, , after] = partsOf(text);
    flow.append(j === 0 ? before.slice(1) : before, elements[j], after);  // a text has no space before it
  });
  container.replaceChildren(flow);
  container.setAttribute("role", "listbox");
  container.setAttribute("aria-label", label);
  container.classList.toggle("long", texts.length > LONG);
  container.dir = direction(texts);
  return elements;
}

// Returns the direction of a whole text: its tokens are isolated from each other and do not tell.
function direction(texts) {
  const text = texts.join("");
  const right = (text.match(/[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/g) || []).length;
  return right > (text.match(/\p{L}/gu) || []).length / 2 ? "rtl" : "ltr";
}

// Returns the token that a key leads to from one of a text's; undefined for other keys.
function led(elements, at, key) {
  const ahead = getComputedStyle(elements[at].parentElement).direction === "rtl" ? -1 : 1;
  const last = elements.length - 1;
  const step = { ArrowRight: ahead, ArrowLeft: -ahead }[key];
  if (step) return Math.max(0, Math.min(last, at + step));
  if (key === "Home" || key === "End") return key === "End" ? last : 0;
  if (key === "ArrowDown" || key === "ArrowUp") return lineBeside(elements, at, key === "ArrowDown" ? 1 : -1);
  return undefined;
}

// Returns the nearest token of the line above or below.
function lineBeside(elements, at, step) {
  const own = elements[at].getBoundingClientRect();
  let best = at;
  let top = null;
  let nearest = Infinity;
  for (let j = at + step; j >= 0 && j < elements.length; j += step) {
    const box = elements[j].getBoundingClientRect();
    if (Math.abs(box.top - own.top) < 8) continue;
    if (top === null) top = box.top;
    if (Math.abs(box.top - top) >= 8) break;
    const off = Math.abs(box.left - own.left);
    if (off < nearest) [best, nearest] = [j, off];
  }
  return best;
}

function focusOn(elements, at) {
  elements.forEach((token, j) => { token.tabIndex = j === at ? 0 : -1; });
  elements[at].focus();
}

const placeOf = (target) => {
  const token = target instanceof Element ? target.closest("[data-place]") : null;
  return token ? Number(token.dataset.place) : null;
};

// --- The answer --------------------------------------------------------------------------------------

function showAnswer() {
  const { targets, value } = sequence();
  const canChoose = contents.apart && value.length > 1;
  byId("how").hidden = byId("all").hidden = !canChoose;
  byId("answer").hidden = targets === null && !canChoose;
  const texts = targets || value.map((_, i) => ` target ${i}`);
  options = fill(byId("targets"), texts, [], "Tokens of the answer");
  byId("targets").setAttribute("aria-multiselectable", "true");
  if (canChoose) return;
  byId("targets").removeAttribute("role");
  byId("targets").removeAttribute("aria-multiselectable");
  for (const option of options) {
    option.removeAttribute("role");
    option.removeAttribute("tabindex");
  }
}

function choose(anchor, focus) {
  Object.assign(state, { anchor, focus, first: Math.min(anchor, focus), last: Math.max(anchor, focus) });
  colour();
}

const chooseAll = () => choose(0, sequence().value.length - 1);

function markChosen() {
  if (!contents.apart || options.length < 2) return;
  const { targets, value } = sequence();
  options.forEach((option, i) => {
    option.setAttribute("aria-selected", String(i >= state.first && i <= state.last));
    option.setAttribute("aria-label", `${targets ? alone(targets[i]) : `target ${i}`}, value ${number(value[i])}`);
  });
}

function listenToAnswer() {
  const box = byId("targets");
  const isOpen = () => box.getAttribute("role") === "listbox";
  box.addEventListener("pointerdown", (event) => {
    const at = placeOf(event.target);
    if (!isOpen() || at === null || event.button !== 0) return;
    choose(event.shiftKey ? state.anchor : at, at);
    focusOn(options, at);
    event.preventDefault();
  });
  box.addEventListener("pointermove", (event) => {
    if (!isOpen() || !(event.buttons & 1)) return;
    const at = placeOf(document.elementFromPoint(event.clientX, event.clientY));
    if (at !== null && at !== state.focus && box.contains(document.elementFromPoint(event.clientX, event.clientY))) choose(state.anchor, at);
  });
  box.addEventListener("keydown", (event) => {
    const at = placeOf(event.target);
    if (!isOpen() || at === null) return;
    const next = led(options, at, event.key);
    if (next !== undefined) {
      choose(event.shiftKey ? state.anchor : next, next);
      focusOn(options, next);
    } else if (event.key === "Escape" || (event.key === "a" && (event.ctrlKey || event.metaKey))) chooseAll();
    else if (event.key === "Enter" || event.key === " ") choose(event.shiftKey ? state.anchor : at, at);
    else return;
    event.preventDefault();
  });
  byId("all").addEventListener("click", chooseAll);
}

// --- The texts ---------------------------------------------------------------------------------------

function showTexts() {
  shown = sequence().texts.map((text) => {
    const container = element("div", { className: "text" });
    const elements = fill(container, text.texts, text.special, text.title);
    const heading = element("h2", {}, text.title);
    if (text.padding) heading.append(` (without ${text.padding} token${text.padding > 1 ? "s" : ""} of padding)`);
    for (const name of ["pointerover", "focusin"]) container.addEventListener(name, (event) => tell(own, placeOf(event.target)));
    for (const name of ["pointerleave", "focusout", "scroll"]) container.addEventListener(name, () => tell(null));
    container.addEventListener("click", (event) => {
      const at = placeOf(event.target);
      if (at !== null) focusOn(elements, at);
    });
    container.addEventListener("keydown", (event) => {
      const at = placeOf(event.target);
      const next = at === null ? undefined : led(elements, at, event.key);
      if (next === undefined) return;
      event.preventDefault();
      focusOn(elements, next);
    });
    const own = { text, elements, scores: new Float32Array(bytesOf(text.scores).buffer), sums: null, node: element("section", {}, heading, container) };
    return own;
  });
  byId("texts").replaceChildren(...shown.map((own) => own.node));
}

// Shows everything that depends on the chosen targets and on the contrast.
function colour() {
  let largest = 0;
  for (const own of shown) {
    own.sums = summed(own.scores, own.text.texts.length);
    for (const sum of own.sums) {
      if (Number.isFinite(sum)) largest = Math.max(largest, Math.abs(sum));
    }
  }
  const full = largest * 10 ** (-state.contrast / 50);
  for (const { text, elements, sums } of shown) {
    elements.forEach((token, j) => {
      const sum = sums[j];
      const share = full > 0 && Number.isFinite(sum) ? Math.min(Math.abs(sum) / full, 1) : 0;
      token.classList.toggle("for", sum > 0);
      token.classList.toggle("against", sum < 0);
      token.classList.toggle("broken", !Number.isFinite(sum));
      token.style.setProperty("--share", share.toFixed(3));
      token.setAttribute("aria-label", `${alone(text.texts[j])} ${signed(sum)}`);
    });
  }
  markChosen();
  showLegend(full);
  showSum();
  showLargest(largest);
  tell(null);
}

function showLegend(full) {
  const isShare = total(sequence().bias) === null;  // of a rollout, which says nothing of the sign
  const beyond = state.contrast > 0;
  byId("lowest").textContent = isShare ? "0" : `${beyond ? "\u2264 " : ""}${number(-full)}`;
  byId("highest").textContent = `${beyond ? "\u2265 " : ""}${signed(full)}`;
  byId("bar").classList.toggle("shares", isShare);
  byId("meaning").textContent = isShare ? "orange: the token's share" : "orange: for the answer, blue: against it";
}

// Shows the terms of the value.
function showSum() {
  const { value, bias } = sequence();
  const rest = total(bias);
  const count = state.last - state.first + 1;
  const rows = shown.map(({ text, sums }) => [
    shown.length > 1 ? `tokens of the ${text.title.toLowerCase()}` : "tokens",
    sums.reduce((sum, each) => sum + each, 0),
  ]);
  if (rest !== null) rows.push(["no token", rest]);
  const of = contents.apart && value.length > 1 ? `, ${count} of ${value.length} targets` : "";
  rows.push([rest === null ? `value${of} (scores are shares)` : `value${of}`, total(value)]);
  byId("sum").replaceChildren(...rows.map(([name, amount], i) =>
    element("tr", {}, element("td", {}, name), element("td", {}, (i && i < rows.length - 1 ? signed : number)(amount)))));
}

function showLargest(largest) {
  const all = shown.flatMap((own) => [...own.sums].map((sum, j) => ({ own, j, sum })));
  const ranked = all.filter(({ sum }) => Number.isFinite(sum) && sum !== 0);
  ranked.sort((a, b) => Math.abs(b.sum) - Math.abs(a.sum));
  byId("largest").replaceChildren(...ranked.slice(0, LISTED).map(({ own, j, sum }) => {
    const bar = element("span", { className: sum < 0 ? "bar less" : "bar" });
    bar.style.setProperty("--share", (Math.abs(sum) / largest).toFixed(3));
    const place = ` ${shown.length > 1 ? `${own.text.title.toLowerCase()} ` : ""}${own.text.first + j}`;
    const name = element("span", { className: "name" }, element("bdi", {}, alone(own.text.texts[j])), element("small", {}, place));
    const button = element("button", { type: "button" }, name, bar, element("span", { className: "number" }, signed(sum)));
    const mark = (is) => own.elements[j].classList.toggle("at", is);
    button.addEventListener("pointerenter", () => mark(true));
    button.addEventListener("pointerleave", () => mark(false));
    button.addEventListener("focus", () => mark(true));
    button.addEventListener("blur", () => mark(false));
    button.addEventListener("click", () => {
      own.elements[j].scrollIntoView({ block: "center" });
      focusOn(own.elements, j);
    });
    return element("li", {}, button);
  }));
}

// Shows a token's own number beside it.
function tell(own, j = null) {
  const tip = byId("tip");
  tip.hidden = !own || j === null;
  if (tip.hidden) return;
  tip.replaceChildren(element("b", {}, signed(own.sums[j])), "  ",
    element("bdi", {}, alone(own.text.texts[j])), `, token ${own.text.first + j}`);
  const token = own.elements[j].getClientRects()[0];
  if (!token) return;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(4, Math.min(token.left, innerWidth - width - 4));
  const top = token.top > height + 8 ? token.top - height - 6 : token.bottom + 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

// --- The page ----------------------------------------------------------------------------------------

function showSequence(index) {
  state.sequence = index;
  showAnswer();
  showTexts();
  chooseAll();
}

byId("choose").hidden = contents.sequences.length < 2;
byId("contrast").addEventListener("input", (event) => {
  state.contrast = Number(event.target.value);
  colour();
});
listenToAnswer();
startPage(contents, showSequence, () => {});
showSequence(0);
