/**
 * Host memory: who has what of the engine's container, its processes, and what is wrong. A bar of the parts, with the
 * limit as a line; two tables.
 */

import { el, fill, scrollTable, setText, showPanel } from "./dom.js";
import { count, duration, exact, known, size, UNKNOWN } from "./format.js";
import { PartsPanel, sized } from "./parts.js";
import { total } from "./plots.js";

const ANEW_MS = 10_000;
const SHOWN = 12;
/** Roles in the same container that are of no engine. */
const FOREIGN = new Set(["sidecar", "other"]);
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

  show({ reading, parts: each, outlook, findings }) {
    const parts = { ...each, rows: byName(each.rows) };
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

/** Rows of one name: their number stands behind it, as that of the process did. */
function groups(rows) {
  const found = new Map();
  for (const row of rows) {
    const name = row.name.replace(/ \(pid \d+\)$/, "");
    found.set(name, [...(found.get(name) ?? []), row]);
  }
  return [...found].map(([name, group]) => [group.length > 1 ? `${name} x ${group.length}` : group[0].name, group]);
}

function greatest(values) {
  const there = values.filter(known);
  return there.length ? Math.max(...there) : null;
}

function byName(parts) {
  return groups(parts)
    .map(([name, group]) => ({ ...group[0], name, bytes: total(group.map((part) => part.bytes)) }))
    .sort((one, other) => other.bytes - one.bytes);
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

/** Files and shared memory count in each process that maps them: of several the largest is shown, not the sum. */
function processTable(processes) {
  const grouped = groups(processes);
  const rows = grouped.slice(0, 4 * SHOWN).map(([name, group]) => {
    const every = (field) => group.map((one) => one[field]);
    const [own, pid] = [every("anonymous_bytes"), group[0].pid];
    const largest = group.length > 1 ? `, largest ${size(greatest(own))}` : "";
    return [
      name,
      group.length === 1 && known(pid) ? String(pid) : UNKNOWN,
      el("span", { title: exact(total(own)) }, `${size(total(own))}${largest}`),
      ...["file_bytes", "shmem_bytes", "peak_bytes"].map((field) => sized(greatest(every(field)))),
      count(total(every("threads"))),
      count(total(every("descriptors"))),
    ];
  });
  const engines = processes.filter(({ role }) => !FOREIGN.has(role)).length;
  const caption = `${count(processes.length)} processes of the container, ${count(engines)} of the engine; file and shared memory counts in each that maps it${
    grouped.length < processes.length ? "; of several of one name: sums, but of file, shared and peak the largest" : ""
  }`;
  const head = ["process", "pid", "anonymous", "file", "shared", "peak", "threads", "open files"];
  return scrollTable({ caption, head, rows, numeric: [1, 2, 3, 4, 5, 6, 7] });
}
