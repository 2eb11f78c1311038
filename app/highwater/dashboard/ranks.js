/**
 * Every rank's figures as they are now, and the legend of the components.
 */

import { el, setText, swatch } from "./dom.js";
import { exact, gib, gibNumber, known, percent } from "./format.js";
import { COMPONENTS } from "./facts.js";
import { deviceName, rankName, reservedNotAllocated, skew } from "./plots.js";
import { rankKey } from "./readings.js";

const WHOLE = "whole device";

const COLUMNS = [
  { name: "used", field: "used_bytes", read: (rank) => rank.used_bytes },
  ...COMPONENTS.map(({ name, field, variable }) => ({ name, field, variable, read: (rank) => rank.components[field] })),
  { name: "free", field: "free_bytes", read: (rank) => rank.free_bytes },
  { name: "total", field: "total_bytes", read: (rank) => rank.total_bytes },
  { name: "releasable", field: "releasable_bytes", read: (rank) => rank.releasable_bytes },
  { name: "reserved − allocated", field: "reserved_not_allocated", read: reservedNotAllocated },
  { name: "peak allocated", field: "peak_allocated_bytes", read: (rank) => rank.torch.peak_allocated_bytes },
  { name: "host RSS", field: "rss_bytes", read: (rank) => rank.host_memory.rss_bytes },
];

/** The components, and the lines across the stacks.   rules of the policy */
export function writeLegend(list, rules) {
  const waters = rules
    .map(({ ranks }) => ranks.filter((one) => known(one.high_free_bytes)))
    .filter((ranks) => ranks.length)
    .flatMap((ranks) => [
      ["--high", `high water${free(ranks.map((one) => one.high_free_bytes))}`],
      ["--low", `low water${free(ranks.map((one) => one.low_free_bytes))}`],
    ]);
  const shape = JSON.stringify(waters);
  if (shape === list.dataset.shape) return;
  list.dataset.shape = shape;
  list.replaceChildren(
    ...COMPONENTS.map(({ name, variable, meaning }) => el("li", { title: meaning }, swatch(variable), name)),
    ...[...waters, ["--muted", WHOLE]].map(([variable, text]) => {
      const dash = el("i", { class: text === WHOLE ? "dash solid" : "dash", "aria-hidden": "true" });
      dash.style.setProperty("border-color", `var(${variable})`);
      return el("li", {}, dash, text);
    }),
  );
}

/** Of water lines that are the same on all ranks, the bytes; else each rank's chart has its own. */
function free(sizes) {
  const shown = new Set(sizes.map(gib));
  return shown.size === 1 ? `: ${[...shown][0]} free` : ", each rank its own";
}

/** The table of ranks; cells are kept, so that a selection in it outlives a reading. */
export class RankTable {
  constructor(table) {
    this.table = table;
    this.shape = "";
    this.cells = new Map();
  }

  update(report) {
    const shape = JSON.stringify(report.ranks.map((rank) => [rankKey(rank), deviceName(rank)]));
    if (shape !== this.shape) this.#build(report, shape);
    this.table.hidden = !report.ranks.length;
    for (const rank of report.ranks) {
      for (const column of COLUMNS) this.#write(`${rankKey(rank)} ${column.field}`, column.read(rank));
      const ratio = this.cells.get(`${rankKey(rank)} used_ratio`);
      if (ratio) setText(ratio, percent(rank.used_ratio));
    }
    if (report.ranks.length > 1) {
      for (const column of COLUMNS) this.#write(`skew ${column.field}`, skew(report.ranks.map(column.read)));
    }
  }

  #write(name, bytes) {
    const cell = this.cells.get(name);
    if (!cell) return;
    setText(cell, gibNumber(bytes));
    cell.dataset.bytes = bytes === null || bytes === undefined ? "unknown" : String(bytes);
    cell.title = exact(bytes);
  }

  #build(report, shape) {
    this.shape = shape;
    this.cells.clear();
    const head = el(
      "tr",
      {},
      el("th", { scope: "col" }, "rank"),
      el("th", { scope: "col", class: "number" }, "used %"),
      ...COLUMNS.map(({ name, variable }) =>
        el("th", { scope: "col", class: "number" }, variable ? swatch(variable) : null, name),
      ),
    );
    const rows = report.ranks.map((rank) => this.#row(rankKey(rank), rankName(rank, report.ranks), deviceName(rank)));
    if (report.ranks.length > 1) rows.push(this.#row("skew", "skew", "most less least"));
    const caption = this.table.querySelector("caption");
    this.table.replaceChildren(caption, el("thead", {}, head), el("tbody", {}, ...rows));
  }

  #row(key, name, detail) {
    const cell = (field) => {
      const made = el("td", { class: "number", "data-cell": `${key} ${field}` });
      this.cells.set(`${key} ${field}`, made);
      return made;
    };
    const ratio = cell("used_ratio");
    const header = el("th", { scope: "row" }, name, el("small", {}, detail));
    const others = COLUMNS.map((column) => cell(column.field));
    return el("tr", { class: key === "skew" ? "skew" : null }, header, ratio, ...others);
  }
}
