/**
 * The encoder cache: what it holds, where, for how long, and the largest entries.
 */

import { getAsOperator } from "./api.js";
import { STATES } from "./facts.js";
import { clock, count, duration, gib, gibNumber, joined, known, UNKNOWN } from "./format.js";
import { bar, html, panel, sized, table } from "./html.js";
import { total } from "./model.js";
import { Asked, state } from "./store.js";

const SHOWN = 8;
const ASK_EVERY_MS = 15_000;
const HASH_SHOWN = 6; // at either end
const asked = new Asked(`memory/encoder-cache?limit=${SHOWN}`, Infinity);
let readAt = null;
let seen = ""; // what the report said of the cache when the list was asked for

export function encoderView() {
  const { report } = state;
  const cache = report?.encoder_cache;
  if (!cache) return panel("encoder", "Encoder cache", null, html`<p class="empty">This engine has none, or it was not read yet.</p>`);
  // The list is of another cache where the report says another thing of it now.
  const now = `${cache.entries} ${cache.device_bytes} ${cache.host_bytes}`;
  const reason = reasonNot(report);
  if (now !== seen && Date.now() - asked.askedAt > ASK_EVERY_MS && reason === null) ask(now);
  const facts = [
    ["Entries", count(cache.entries)],
    ["On the device, GiB", gibNumber(cache.device_bytes)],
    ["On the host, GiB", gibNumber(cache.host_bytes)],
    ["Capacity", known(cache.capacity_embeds) ? `${count(cache.capacity_embeds)} embeddings` : UNKNOWN],
    ["Oldest, at least", duration(cache.oldest_age_seconds)],
    ["Spilled, brought back", `${count(cache.spills)}, ${count(cache.restores)}`],
    ["Waited for that", duration(cache.restore_seconds)],
  ];
  const split = [
    { key: "device", name: "on the device", bytes: cache.device_bytes ?? 0, colour: "--c-encoder-cache" },
    { key: "host", name: "on the host", bytes: cache.host_bytes ?? 0, colour: "--line-2" },
  ];
  return panel(
    "encoder",
    "Encoder cache",
    report.ranks.length > 1 ? html`<span class="aside">bytes of ${report.ranks.length} ranks together, the rest of the fullest</span>` : null,
    html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd><b>${value}</b></dd></div>`)}</dl>`,
    total(split.map(({ bytes }) => bytes)) ? bar(split, null, [], split.map(({ name, bytes }) => `${gib(bytes)} ${name}`).join(", ")) : null,
    html`<h3>Largest entries</h3>`,
    list(),
    html`<p class="row">
      <button type="button" disabled=${reason !== null} onClick=${() => ask(now)}>Ask again</button>
      <span class="note-line" role="status">${reason ?? joined("; ", asked.problem, asked.value?.note)}</span>
    </p>`,
  );
}

async function ask(now) {
  seen = now;
  await asked.again("", getAsOperator);
  if (asked.problem === "") readAt = Date.now() / 1000 - (asked.value.age_seconds ?? 0);
}

/** Why the workers are left alone, where the entries are not in their recorders' files; null where they are not. */
function reasonNot({ engine, ranks }) {
  if (ranks.every(({ source }) => source === "recorder")) return null;
  return STATES[engine.state]?.takes_remedies ? null : `not asked while the engine is ${engine.state}`;
}

function list() {
  const ranks = asked.value?.ranks;
  if (!ranks) return null;
  const first = ranks.find(({ entries }) => entries?.length) ?? ranks[0];
  if (!first?.entries?.length) {
    const text = first ? `The cache was empty at ${clock(readAt)}.` : "The entries are not known: enter the admin token and ask again.";
    return html`<p class="empty">${text}</p>`;
  }
  const rows = first.entries.map(({ mm_hash: hash, bytes, shape, dtype, age_seconds, idle_seconds, residency, referenced }) => [
    html`<code title=${hash}>${short(String(hash))}</code>`,
    sized(bytes),
    ...[Array.isArray(shape) ? shape.join(" × ") : UNKNOWN, dtype ?? UNKNOWN, duration(age_seconds), duration(idle_seconds)],
    ...[residency ?? UNKNOWN, { true: "yes", false: "no" }[String(referenced)] ?? UNKNOWN],
  ]);
  return table({
    caption: `Rank ${first.rank ?? UNKNOWN}: ${count(rows.length)} of ${count(first.entries_total)} entries, as of ${clock(readAt)}`,
    label: "Largest entries of the encoder cache",
    head: ["hash", "GiB", "shape", "type", "age, at least", "idle", "where", "in use"],
    rows,
    numeric: [1, 4, 5],
  });
}

function short(hash) {
  return hash.length > 2 * HASH_SHOWN + 1 ? `${hash.slice(0, HASH_SHOWN)}…${hash.slice(-HASH_SHOWN)}` : hash;
}
