/**
 * Host memory: who has what of the engine's container, its processes, and what is wrong. A bar of the parts, with the
 * limit as a line; two tables.
 */

import { get } from "./api.js";
import { el, fill, scroll, setText, showPanel, table } from "./dom.js";
import { count, duration, exact, known, size, UNKNOWN } from "./format.js";

const ANEW_MS = 10_000;
const SHOWN = 12;
/** Of the parts' kinds. @type {Record<string, string>} */
const COLOURS = {
  shm: "--c-encoder-cache",
  page_cache: "--line",
  kernel: "--c-non-torch",
  none: "--line-5",
};
const PROCESS_COLOURS = ["--line-0", "--line-1", "--line-2", "--line-3", "--line-4"];

/** The panel. */
export class HostPanel {
  /** @param {HTMLElement} box */
  constructor(box) {
    this.bar = el("div", { class: "budget-bar", role: "img", "aria-label": "" });
    this.caption = el("p", { class: "note-line" });
    this.findings = el("ul", { class: "budget-findings" });
    this.tables = el("div", { class: "budget-tables" });
    this.asking = false;
    this.askedAt = -Infinity;
    this.box = box;
    box.append(this.bar, this.caption, this.findings, this.tables);
  }

  /** Asked for anew now and then, while reports say that there is something. @param {any} report */
  update(report) {
    showPanel(this.box, Boolean(report.host));
    if (report.host && Date.now() - this.askedAt > ANEW_MS) this.ask();
  }

  async ask() {
    if (this.asking || document.hidden) return;
    this.asking = true;
    this.askedAt = Date.now();
    try {
      this.#show(await get("memory/host"));
    } catch (error) {
      setText(this.caption, /** @type {Error} */ (error).message);
    } finally {
      this.asking = false;
    }
  }

  /** @param {any} answer */
  #show(answer) {
    const { reading, parts, outlook, findings } = answer;
    this.#draw(reading.container, parts);
    const soon = known(outlook.seconds_to_limit) ? `; full in ${duration(outlook.seconds_to_limit)} at this pace` : "";
    setText(this.caption, `${headline(reading)}${soon}`);
    fill(
      this.findings,
      ...findings.map((/** @type {any} */ one) => el("li", {}, `${one.text}${one.advice ? ` (${one.advice})` : ""}`)),
    );
    fill(this.tables, ...(known(parts.used_bytes) ? [partsTable(parts)] : []), processTable(reading.processes));
  }

  /** @param {any} container @param {any} parts */
  #draw(container, parts) {
    this.bar.hidden = !known(parts.used_bytes);
    if (this.bar.hidden) return;
    const rows = [...parts.rows, { kind: "none", name: "not attributed", bytes: parts.not_attributed_bytes }];
    const sum = rows.reduce((all, row) => all + row.bytes, 0);
    const whole = Math.max(sum, container.limit_bytes ?? 0, 1);
    let processes = 0;
    const pieces = rows.map((row) => {
      const colour = COLOURS[row.kind] ?? PROCESS_COLOURS[processes++ % PROCESS_COLOURS.length];
      const piece = el("span", { title: `${row.name}: ${size(row.bytes)}`, "data-part": row.kind });
      piece.style.setProperty("width", `${(row.bytes / whole) * 100}%`);
      piece.style.setProperty("background", `var(${colour})`);
      return piece;
    });
    const line = el("i", { class: "budget-line", title: `limit: ${size(container.limit_bytes)}` });
    line.hidden = !known(container.limit_bytes);
    line.style.setProperty("left", `${((container.limit_bytes ?? 0) / whole) * 100}%`);
    fill(this.bar, ...pieces, line);
    const words = rows.slice(0, SHOWN).map((row) => `${row.name} ${size(row.bytes)}`);
    this.bar.setAttribute("aria-label", words.join(", "));
  }
}

/** @param {any} reading */
function headline({ container, machine, shm }) {
  const shared = shm ? `; /dev/shm ${size(shm.used_bytes)} of ${size(shm.size_bytes)}` : "";
  if (!container) return `${size(machine.available_bytes)} of ${size(machine.total_bytes)} available${shared}`;
  const limit = known(container.limit_bytes) ? ` of ${size(container.limit_bytes)}` : ", without a limit";
  return `The engine's container keeps ${size(container.kept_bytes)}${limit}; the kernel can drop the rest${shared}`;
}

/** @param {any} parts */
function partsTable(parts) {
  const rows = parts.rows
    .slice(0, SHOWN)
    .map((/** @type {any} */ row) => [row.name, bytes(row.bytes), row.can_be_dropped ? "dropped when needed" : ""]);
  rows.push(["not attributed", bytes(parts.not_attributed_bytes), ""]);
  if (parts.counted_twice_bytes) rows.push(["counted twice above", bytes(-parts.counted_twice_bytes), ""]);
  const caption = `The engine's container: ${size(parts.used_bytes)} as the kernel counts it`;
  return scroll(caption, table({ caption, head: ["part", "size", ""], rows, numeric: [1] }));
}

/** @param {any[]} processes */
function processTable(processes) {
  const rows = processes
    .slice(0, 4 * SHOWN)
    .map((one) => [
      one.name,
      known(one.pid) ? String(one.pid) : UNKNOWN,
      ...[one.anonymous_bytes, one.file_bytes, one.shmem_bytes, one.peak_bytes].map(bytes),
      count(one.threads),
      count(one.descriptors),
    ]);
  const caption = `${count(processes.length)} processes of the engine; file and shared memory counts in each that maps it`;
  const head = ["process", "pid", "anonymous", "file", "shared", "peak", "threads", "open files"];
  return scroll(caption, table({ caption, head, rows, numeric: [1, 2, 3, 4, 5, 6, 7] }));
}

/** @param {number | null} value */
function bytes(value) {
  return el("span", { title: exact(value) }, size(value));
}
