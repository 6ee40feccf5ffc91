// Makes elements and colours for all pages, the index of the command among them. Texts reach a page
// through textContent or fillText, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);

const WEIGHT_COLOURS = {
  light: ["#f4f3ef", "#d3e1ea", "#a5c6dd", "#6fa5cb", "#3f80b2", "#1f5a90", "#0d3563"],
  dark: ["#1d2228", "#1f3850", "#25557f", "#3678ab", "#5a9fd2", "#93c6ec", "#dcefff"],
};
const NORM_COLOURS = {
  light: ["#f4f3ef", "#f3dfc4", "#ecc08b", "#de9a55", "#c2712f", "#934c1c", "#58290d"],
  dark: ["#1d2228", "#43301f", "#6e4a24", "#a06a2d", "#cf9145", "#f0bb7d", "#ffe8cb"],
};

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const derived = new Map();

function once(key, compute) {
  if (!derived.has(key)) derived.set(key, compute());
  return derived.get(key);
}

const dark = () => document.documentElement.dataset.theme === "dark";

function ramp(norms) {
  const stops = (norms ? NORM_COLOURS : WEIGHT_COLOURS)[dark() ? "dark" : "light"];
  return once(`ramp/${norms}/${dark()}`, () => {
    const parts = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
    return Array.from({ length: 256 }, (_, level) => {
      const position = (level / 255) * (parts.length - 1);
      const low = Math.min(Math.floor(position), parts.length - 2);
      return parts[low].map((part, c) => Math.round(part + (parts[low + 1][c] - part) * (position - low)));
    });
  });
}

// Returns a canvas with one pixel of the colour [r, g, b] of each cell.
function pixels(colours, { L, S }) {
  const canvas = element("canvas", { width: S, height: L });
  const context = canvas.getContext("2d");
  const image = context.createImageData(S, L);
  colours.forEach((colour, i) => image.data.set([...colour, 255], 4 * i));
  context.putImageData(image, 0, 0);
  return canvas;
}

const css = (colour) => `rgb(${colour[0]} ${colour[1]} ${colour[2]})`;

// Takes the theme of the reader's system, until they press the button.
function startTheme(redraw) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
    byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
  };
  const follow = () => show(system.matches ? "dark" : "light");
  const followAndDraw = () => { follow(); redraw(); };
  follow();
  system.addEventListener("change", followAndDraw);
  byId("theme").addEventListener("click", () => {
    system.removeEventListener("change", followAndDraw);
    show(dark() ? "light" : "dark");
    redraw();
  });
}

function bytesOf(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

// Returns a number with three digits; "" for one that is not there.
function number(value) {
  if (value === undefined) return "";
  if (value === null || !Number.isFinite(value)) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const digits = size >= 1e5 || size < 1e-4 ? size.toExponential(2).replace("+", "")
    : size >= 1000 ? size.toFixed(0) : size.toPrecision(3);
  return (value < 0 ? "\u2212" : "") + digits;
}

const isolated = (text) => `\u2068${text}\u2069`;

// Fills in what every mode of the page has: a line about it, the choice of a sequence, and the theme.
function startPage(contents, showSequence, redraw) {
  byId("about").textContent = contents.about;
  byId("sequence").replaceChildren(...contents.sequences.map(({ title }, i) =>
    element("option", { value: String(i) }, `${i + 1}  ${isolated(title)}`)));
  byId("sequence").addEventListener("change", (event) => showSequence(Number(event.target.value)));
  startTheme(redraw);
}
