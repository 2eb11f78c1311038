/**
 * Host memory: who has what of the engine's container, its processes, and what is wrong. A bar of the parts, with the
 * limit as a line; two tables.
 */

import { el, fill, scrollTable, setText, showPanel } from "./dom.js";
import { count, duration, known, size, UNKNOWN } from "./format.js";
import { PartsPanel, sized } from "./parts.js";

const ANEW_MS = 10_000;
const SHOWN = 12;
/** Of the parts' kinds. */
const COLOURS = {
  shm: "--c-encoder-cache",
  page_cache: "--line",
  kernel: "--c-non-torch",
  none: "--line-5",
};
const PROCESS_COLOURS = ["--line-0", "--line-1", "--line-2", "--line-3", "--line-4"];

export class HostPanel extends PartsPanel {
  constructor(box) {
    super(box, "memory/host");
    box.append(this.bar, this.caption, this.findings, this.tables);
  }

  /** Read again now and then, while reports have host memory. */
  update(report) {
    showPanel(this.box, Boolean(report.host));
    if (report.host && Date.now() - this.askedAt > ANEW_MS) this.ask();
  }

  show({ reading, parts, outlook, findings }) {
    this.#draw(reading.container, parts);
    const soon = known(outlook.seconds_to_limit) ? `; full in ${duration(outlook.seconds_to_limit)} at this pace` : "";
    setText(this.caption, `${headline(reading)}${soon}`);
    fill(
      this.findings,
      ...findings.map((one) => el("li", {}, `${one.text}${one.advice ? ` (${one.advice})` : ""}`)),
    );
    fill(this.tables, ...(known(parts.used_bytes) ? [partsTable(parts)] : []), processTable(reading.processes));
  }

  #draw(container, parts) {
    this.bar.hidden = !known(parts.used_bytes);
    if (this.bar.hidden) return;
    const rows = [...parts.rows, { kind: "none", name: "not attributed", bytes: parts.not_attributed_bytes }];
    let processes = 0;
    const colour = ({ kind }) => COLOURS[kind] ?? PROCESS_COLOURS[processes++ % PROCESS_COLOURS.length];
    const shown = rows.map((row) => ({ key: row.kind, name: row.name, bytes: row.bytes, colour: colour(row) }));
    this.drawBar(shown, container.limit_bytes, container.limit_bytes, `limit: ${size(container.limit_bytes)}`);
    const words = rows.slice(0, SHOWN).map((row) => `${row.name} ${size(row.bytes)}`);
    this.bar.setAttribute("aria-label", words.join(", "));
  }
}

function headline({ container, machine, shm }) {
  const shared = shm ? `; /dev/shm ${size(shm.used_bytes)} of ${size(shm.size_bytes)}` : "";
  if (!container) return `${size(machine.available_bytes)} of ${size(machine.total_bytes)} available${shared}`;
  const limit = known(container.limit_bytes) ? ` of ${size(container.limit_bytes)}` : ", without a limit";
  return `The engine's container keeps ${size(container.kept_bytes)}${limit}; the kernel can drop the rest${shared}`;
}

function partsTable(parts) {
  const rows = parts.rows
    .slice(0, SHOWN)
    .map((row) => [row.name, sized(row.bytes), row.can_be_dropped ? "dropped when needed" : ""]);
  rows.push(["not attributed", sized(parts.not_attributed_bytes), ""]);
  if (parts.counted_twice_bytes) rows.push(["counted twice above", sized(-parts.counted_twice_bytes), ""]);
  const caption = `The engine's container: ${size(parts.used_bytes)} as the kernel counts it`;
  return scrollTable({ caption, head: ["part", "size", ""], rows, numeric: [1] });
}

function processTable(processes) {
  const rows = processes
    .slice(0, 4 * SHOWN)
    .map((one) => [
      one.name,
      known(one.pid) ? String(one.pid) : UNKNOWN,
      ...[one.anonymous_bytes, one.file_bytes, one.shmem_bytes, one.peak_bytes].map(sized),
      count(one.threads),
      count(one.descriptors),
    ]);
  const caption = `${count(processes.length)} processes of the engine; file and shared memory counts in each that maps it`;
  const head = ["process", "pid", "anonymous", "file", "shared", "peak", "threads", "open files"];
  return scrollTable({ caption, head, rows, numeric: [1, 2, 3, 4, 5, 6, 7] });
}
