// What pages of heat maps share: their arrays, labels of tokens, and rows of buttons.

// Base64 of uint16 codes of logarithms: 0 is zero, 65535 no finite number, any other c is
// exp(lo + step (c - 1)).
function decode(entry) {
  return once(`array/${entry.id}`, () => {
    const codes = new Uint16Array(bytesOf(byId(entry.id).textContent.trim()).buffer);
    return Float32Array.from(codes, (code) =>
      code === 0 ? 0 : code === 65535 ? NaN : Math.exp(entry.lo + entry.step * (code - 1)));
  });
}

const WORD_START = /^[\u0120\u2581]/;  // byte-level BPE, SentencePiece

function readable(token) {
  const text = token.replace(WORD_START, "").replace(/\u010a/g, "\u21b5");
  return text === "" ? "\u2423" : text;
}

function isolated(text) {
  return `\u2068${text}\u2069`;
}

// Whole letters, an emoji being one; isolated, so that a right-to-left token turns no other.
function shorten(token) {
  const letters = Array.from(readable(token));
  return isolated(letters.length > 14 ? letters.slice(0, 13).join("") + "\u2026" : letters.join(""));
}

// As much of a token as the room takes, cut at its end.
function fitted(context, token, room) {
  const text = shorten(token);
  if (context.measureText(text).width <= room) return text;
  let letters = Array.from(readable(token)).slice(0, 13);
  while (letters.length > 1 && context.measureText(letters.join("") + "\u2026").width > room) letters = letters.slice(0, -1);
  return isolated(letters.join("") + "\u2026");
}

const labelFont = (size) => `${size}px Inter, "Source Sans 3", system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif`;

// A row of buttons of which one is chosen: arrow keys move, Tab leaves.
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

// The query and key that an event on a heat map points at, or null.
function cellAt(canvas, event) {
  const { left, top, cell } = canvas.layout;
  const { L, S } = layerOf();
  const box = canvas.getBoundingClientRect();
  const s = Math.floor((event.clientX - box.left - left) / cell);
  const t = Math.floor((event.clientY - box.top - top) / cell);
  return s >= 0 && s < S && t >= 0 && t < L ? [t, s] : null;
}
