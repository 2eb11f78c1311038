/**
 * Host memory: who has what of the engine's container, its processes, and what is wrong. A bar of the parts, with the
 * limit as a line; two tables.
 */

import { count, duration, exact, gib, gibNumber, joined, known, UNKNOWN } from "./format.js";
import { bar, html, panel, sized, table } from "./html.js";
import { greatest, total } from "./model.js";
import { Asked } from "./store.js";

const asked = new Asked("memory/host", 10_000);
const SHOWN = 12;
/** Roles in the same container that are of no engine. */
const FOREIGN = new Set(["sidecar", "other"]);
const COLOURS = { shm: "--c-encoder-cache", page_cache: "--line", kernel: "--c-non-torch", none: "--line-5" };
const PROCESS_COLOURS = ["--line-0", "--line-1", "--line-2", "--line-3", "--line-4"];

export function hostView() {
  const answer = asked.now();
  if (!answer) return panel("host", "Host memory", null, html`<p class="empty">${asked.problem || "Not read yet."}</p>`);
  const { reading, parts: each, outlook, findings } = answer;
  const parts = { ...each, rows: byName(each.rows) };
  const soon = known(outlook.seconds_to_limit) && `full in ${duration(outlook.seconds_to_limit)} at this pace`;
  return panel(
    "host",
    "Host memory",
    null,
    known(parts.used_bytes) ? hostBar(reading.container, parts) : null,
    html`<p class="note-line">${joined("; ", headline(reading), soon)}</p>`,
    html`<ul class="findings">${findings.map(({ name, text, advice }) => html`<li key=${name}>${text}${advice ? ` (${advice})` : ""}</li>`)}</ul>`,
    known(parts.used_bytes) ? partsTable(parts) : null,
    reading.processes.length ? processTable(reading.processes) : html`<p class="empty">${reading.problems.join("; ")}</p>`,
  );
}

function hostBar(container, parts) {
  const rows = [...parts.rows, { kind: "none", name: "not attributed", bytes: parts.not_attributed_bytes }];
  let processes = 0;
  const colour = ({ kind }) => COLOURS[kind] ?? PROCESS_COLOURS[processes++ % PROCESS_COLOURS.length];
  const shown = rows.map((row) => ({ key: row.name, name: row.name, bytes: row.bytes ?? 0, colour: colour(row) }));
  const limit = container.limit_bytes;
  const lines = known(limit) ? [{ bytes: limit, title: `limit ${gib(limit)}`, kind: "limit" }] : [];
  return bar(shown, limit, lines, rows.slice(0, SHOWN).map(({ name, bytes }) => `${name} ${gib(bytes)}`).join(", "));
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

function byName(parts) {
  return groups(parts)
    .map(([name, group]) => ({ ...group[0], name, bytes: total(group.map(({ bytes }) => bytes)) }))
    .sort((one, other) => other.bytes - one.bytes);
}

function headline({ container, machine, shm }) {
  const shared = shm && `/dev/shm ${gib(shm.used_bytes)} of ${gib(shm.size_bytes)}`;
  if (!container) return joined("; ", `${gib(machine.available_bytes)} of ${gib(machine.total_bytes)} available`, shared);
  const limit = known(container.limit_bytes) ? ` of ${gib(container.limit_bytes)}` : ", without a limit";
  return joined("; ", `The engine's container keeps ${gib(container.kept_bytes)}${limit}; the kernel can drop the rest`, shared);
}

function partsTable(parts) {
  const rows = parts.rows
    .slice(0, SHOWN)
    .map(({ name, bytes, can_be_dropped: drops }) => [name, sized(bytes), drops ? "dropped when needed" : ""]);
  rows.push(["not attributed", sized(parts.not_attributed_bytes), ""]);
  if (parts.counted_twice_bytes) rows.push(["counted twice above", sized(-parts.counted_twice_bytes), ""]);
  const caption = `The engine's container: ${gib(parts.used_bytes)} as the kernel counts it`;
  return table({ caption, head: ["part", "GiB", ""], rows, numeric: [1] });
}

/** Files and shared memory count in each process that maps them: of several the largest is shown, not the sum. */
function processTable(processes) {
  const grouped = groups(processes);
  const rows = grouped.slice(0, 4 * SHOWN).map(([name, group]) => {
    const every = (field) => group.map((one) => one[field]);
    const [own, pid] = [every("anonymous_bytes"), group[0].pid];
    const largest = group.length > 1 ? `, largest ${gibNumber(greatest(own))}` : "";
    return [
      name,
      group.length === 1 && known(pid) ? String(pid) : UNKNOWN,
      html`<span title=${exact(total(own))}>${gibNumber(total(own))}${largest}</span>`,
      ...["file_bytes", "shmem_bytes", "peak_bytes"].map((field) => sized(greatest(every(field)))),
      count(total(every("threads"))),
      count(total(every("descriptors"))),
    ];
  });
  const engines = processes.filter(({ role }) => !FOREIGN.has(role)).length;
  const several = grouped.length < processes.length ? "; of several of one name: sums, but of file, shared and peak the largest" : "";
  return table({
    caption: `${count(processes.length)} processes of the container, ${count(engines)} of the engine, in GiB; file and shared memory counts in each that maps it${several}`,
    head: ["process", "pid", "anonymous", "file", "shared", "peak", "threads", "open files"],
    rows,
    numeric: [1, 2, 3, 4, 5, 6, 7],
  });
}
