/**
 * The memory budget: why it is that much. A bar of the tightest rank with the budget line, its parts, what was counted
 * nowhere, the KV cache in requests, and a paragraph to paste.
 */

import { get } from "./api.js";
import { el, fill, scroll, setText, showPanel, table } from "./dom.js";
import { count, exact, gib, known, size, UNKNOWN } from "./format.js";

const ANEW_MS = 60_000;
/** Of the parts' keys; what is the same in the chart above has the same colour. @type {Record<string, string>} */
const COLOURS = {
  weights: "--c-weights",
  process: "--c-non-torch",
  persistent: "--c-other-tensors",
  consumed: "--c-other-tensors",
  activation: "--c-torch-cached",
  non_torch: "--c-non-torch",
  graphs: "--line-3",
  profiled: "--c-torch-cached",
  mm_ipc: "--line-4",
  kv_cache: "--c-kv-cache",
  unexplained: "--line-5",
};

/** The panel. */
export class BudgetPanel {
  /** @param {HTMLElement} box */
  constructor(box) {
    this.bar = el("div", { class: "budget-bar", role: "img", "aria-label": "" });
    this.caption = el("p", { class: "note-line" });
    this.tables = el("div", { class: "budget-tables" });
    this.findings = el("ul", { class: "budget-findings" });
    this.paragraph = el("p", { class: "budget-words" });
    this.life = "";
    this.asking = false;
    box.append(this.bar, this.caption, this.tables, this.findings, this.paragraph);
    this.box = box;
    setInterval(() => this.ask(), ANEW_MS);
  }

  /** It is asked for anew with every start of the engine, and once a minute. @param {any} report */
  update(report) {
    const life = `${report.engine.state} ${report.ranks.map((/** @type {any} */ rank) => rank.pid).join(" ")}`;
    if (life === this.life) return;
    this.life = life;
    this.ask();
  }

  async ask() {
    if (this.asking || document.hidden) return;
    this.asking = true;
    try {
      this.#show(await get("memory/budget"));
    } catch (error) {
      setText(this.caption, /** @type {Error} */ (error).message);
    } finally {
      this.asking = false;
    }
  }

  /** @param {any} answer */
  #show({ explanation, findings }) {
    const ranks = explanation.ranks.filter((/** @type {any} */ rank) => rank.parts.length);
    showPanel(this.box, ranks.length > 0); // nothing reports its start: the panel takes no room
    if (!ranks.length) return;
    const room = (/** @type {any} */ one) => one.available_bytes ?? Infinity;
    const rank = ranks.reduce((/** @type {any} */ best, /** @type {any} */ one) => (room(one) < room(best) ? one : best));
    this.#draw(rank);
    const pool = explanation.pools.find((/** @type {any} */ one) => one.dp_rank === rank.dp_rank);
    fill(this.tables, parts(rank), ...(pool ? [conversations(pool)] : []));
    fill(this.findings, ...findings.map((/** @type {any} */ one) => el("li", {}, el("b", {}, one.title), ` ${one.text}`)));
    setText(this.paragraph, explanation.paragraph);
  }

  /** @param {any} rank */
  #draw(rank) {
    const shown = rank.parts.filter((/** @type {any} */ part) => part.bytes > 0 && COLOURS[part.key]);
    const whole = Math.max(rank.total_bytes ?? 0, sum(shown));
    const pieces = shown.map((/** @type {any} */ part) => {
      const piece = el("span", { title: `${part.title}: ${size(part.bytes)}`, "data-part": part.key });
      piece.style.setProperty("width", `${(part.bytes / whole) * 100}%`);
      piece.style.setProperty("background", `var(${COLOURS[part.key]})`);
      return piece;
    });
    const line = el("i", { class: "budget-line", title: `budget: ${gib(rank.requested_bytes)}` });
    line.hidden = !known(rank.requested_bytes);
    line.style.setProperty("left", `${((rank.requested_bytes ?? 0) / whole) * 100}%`);
    fill(this.bar, ...pieces, line);
    const words = shown.map((/** @type {any} */ part) => `${part.title} ${size(part.bytes)}`).join(", ");
    this.bar.setAttribute("aria-label", `${words}; budget ${gib(rank.requested_bytes)} of ${gib(rank.total_bytes)}`);
    setText(this.caption, rank.formula ?? "");
  }
}

/** @param {any[]} list */
function sum(list) {
  return list.reduce((all, part) => all + part.bytes, 0);
}

/** @param {any} rank */
function parts(rank) {
  const named = [
    ["total", rank.total_bytes, "", ""],
    ["requested", rank.requested_bytes, "", ""],
    ...rank.parts.map((/** @type {any} */ part) => [part.title, part.bytes, part.grade, part.why]),
    ...rank.uncounted.map((/** @type {any} */ part) => [part.title, part.bytes, "counted nowhere", part.why]),
    ["left outside the budget", rank.left_bytes, "", ""],
  ];
  const rows = named
    .filter(([, bytes]) => known(bytes))
    .map(([title, bytes, grade, why]) => [title, el("span", { title: exact(bytes) }, size(bytes)), grade, why]);
  const caption = `Rank ${rank.rank ?? UNKNOWN}: the budget of its start`;
  return scroll(caption, table({ caption, head: ["part", "size", "grade", "what it is"], rows, numeric: [1], wide: [3] }));
}

/** @param {any} pool */
function conversations(pool) {
  const rows = pool.conversations.map((/** @type {any} */ one) => [
    count(one.tokens),
    size(one.bytes),
    one.requests.toLocaleString("en-US"),
  ]);
  const caption = `The KV cache: ${count(pool.blocks)} blocks, ${count(pool.tokens)} tokens as vLLM prints it`;
  return scroll(caption, table({ caption, head: ["tokens", "size each", "requests at once"], rows, numeric: [1, 2] }));
}
