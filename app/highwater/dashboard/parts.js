/**
 * A panel of parts with a bar of them and a limit as a line on it, read from the sidecar now and then.
 */

import { get } from "./api.js";
import { el, fill, setText } from "./dom.js";
import { exact, known, size } from "./format.js";

export class PartsPanel {
  /** A path's responses are given to `show`. */
  constructor(box, path) {
    this.box = box;
    this.path = path;
    this.bar = el("div", { class: "budget-bar", role: "img", "aria-label": "" });
    this.caption = el("p", { class: "note-line" });
    this.tables = el("div", { class: "budget-tables" });
    this.findings = el("ul", { class: "budget-findings" });
    this.asking = false;
    this.askedAt = -Infinity;
  }

  async ask() {
    if (this.asking || document.hidden) return;
    this.asking = true;
    this.askedAt = Date.now();
    try {
      this.show(await get(this.path));
    } catch (error) {
      setText(this.caption, error.message);
    } finally {
      this.asking = false;
    }
  }

  /** Parts are `{key, name, bytes, colour}`; the bar is as wide as they are together, or as the whole if that is more. */
  drawBar(parts, whole, limit, limitTitle) {
    const width = Math.max(parts.reduce((all, part) => all + part.bytes, 0), whole ?? 0, 1);
    const pieces = parts.map(({ key, name, bytes, colour }) => {
      const piece = el("span", { title: `${name}: ${size(bytes)}`, "data-part": key });
      piece.style.setProperty("width", `${(bytes / width) * 100}%`);
      piece.style.setProperty("background", `var(${colour})`);
      return piece;
    });
    const line = el("i", { class: "budget-line", title: limitTitle });
    line.hidden = !known(limit);
    line.style.setProperty("left", `${((limit ?? 0) / width) * 100}%`);
    fill(this.bar, ...pieces, line);
  }
}

/** A size, exact in its tooltip. */
export function sized(bytes) {
  return el("span", { title: exact(bytes) }, size(bytes));
}
