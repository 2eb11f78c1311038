/**
 * Elements and text. Whatever comes from a server is text here: nothing in this page ever parses HTML.
 */

/** An element; attributes (as in HTML; `on...` are listeners) and children that are null or undefined are left out. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`no element #${id}`);
  return element;
}

/** Write text only where it changed: layout and screen readers are left in peace. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Show elements in place of what is there. */
export function fill(parent, ...children) {
  parent.replaceChildren(...children);
}

/** Show or hide the panel around an element: an empty panel leaves its room to the others. */
export function showPanel(box, shown) {
  const panel = box.closest(".panel");
  if (panel.hidden === shown) panel.hidden = !shown;
}

/** A table of rows of nodes or text, with the indexes of its numeric and wide columns. */
function table({ caption, head, rows, numeric = [], wide = [] }) {
  const kind = (index) => (numeric.includes(index) ? "number" : wide.includes(index) ? "wide" : null);
  return el(
    "table",
    { class: "figures" },
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...head.map((text, index) => el("th", { scope: "col", class: kind(index) }, text)))),
    el(
      "tbody",
      {},
      ...rows.map((row) =>
        el(
          "tr",
          {},
          ...row.map((cell, index) =>
            index === 0 ? el("th", { scope: "row" }, cell) : el("td", { class: kind(index) }, cell),
          ),
        ),
      ),
    ),
  );
}

/** A table of text that is kept while its shape stays, so that a selection, a scroll and the focus outlive a reading. */
export class KeptTable {
  constructor(box, parts) {
    this.box = box;
    this.parts = parts;
    this.shape = "";
  }

  /** The first cell of each row is its header. */
  show(rows) {
    const shape = JSON.stringify(rows.map(([first]) => first));
    if (shape !== this.shape) {
      this.shape = shape;
      fill(this.box, scrollTable({ ...this.parts, rows }));
      return;
    }
    const cells = this.box.querySelectorAll("tbody th, tbody td");
    rows.flat().forEach((text, index) => setText(cells[index], text));
  }
}

/** A spot of a colour of the palette. */
export function swatch(variable) {
  const spot = el("i", { class: "swatch", "aria-hidden": "true" });
  spot.style.setProperty("background", `var(${variable})`);
  return spot;
}

/** A wide thing that scrolls by itself, also by keyboard. */
export function scroll(label, inner) {
  return el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, inner);
}

/** A table in such a region. */
export function scrollTable(parts, label = parts.caption) {
  return scroll(label, table(parts));
}
