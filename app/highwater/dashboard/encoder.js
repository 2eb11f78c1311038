/**
 * The encoder cache: what it holds, where, for how long, and the largest entries.
 */

import { getAsOperator } from "./api.js";
import { el, fill, scrollTable, setText, showPanel } from "./dom.js";
import { STATES } from "./facts.js";
import { clock, count, duration, exact, gib, gibNumber, joined, known, UNKNOWN } from "./format.js";
import { total } from "./plots.js";

const SHOWN = 8;
const ASK_EVERY_MS = 15_000;
const HASH_SHOWN = 6; // at either end
const QUIET_VERDICTS = new Set(["progressing", "idle", "unknown"]);

export class EncoderPanel {
  constructor(box) {
    this.facts = el("dl", { class: "facts" });
    this.bar = el(
      "div",
      { class: "split", role: "img", "aria-label": "" },
      el("span", { class: "split-device" }),
      el("span", { class: "split-host" }),
    );
    this.list = el("div", {});
    this.status = el("p", { class: "note-line" });
    this.old = el("p", { class: "note-line" });
    this.read = null; // when the list was read, in Unix seconds, and what the report said of the cache then
    this.button = el("button", { type: "button", class: "quiet", onclick: () => this.#ask() }, "Ask again");
    this.askedAt = 0;
    this.asking = false;
    this.seen = false;
    this.sum = "";
    this.values = new Map();
    box.append(
      this.facts,
      this.bar,
      el("h3", {}, "Largest entries"),
      this.list,
      this.old,
      el("p", { class: "row" }, this.button, this.status),
    );
    new IntersectionObserver((entries) => {
      this.seen = entries.some((entry) => entry.isIntersecting);
    }).observe(box);
  }

  update(report) {
    this.report = report;
    const cache = report.encoder_cache;
    showPanel(this.facts, Boolean(cache)); // a model without images has none
    const ranks = report.ranks.length;
    this.#fact("Entries", count(cache?.entries));
    this.#fact(`On the device${ranks > 1 ? `, ${ranks} ranks` : ""}`, gib(cache?.device_bytes), cache?.device_bytes);
    this.#fact("Moved to the host", gib(cache?.host_bytes), cache?.host_bytes);
    this.#fact("Capacity", known(cache?.capacity_embeds) ? `${count(cache.capacity_embeds)} embeddings` : UNKNOWN);
    this.#fact("Oldest, at least", duration(cache?.oldest_age_seconds));
    const entries = report.ranks.map((rank) => rank.encoder_cache?.host_entries ?? null);
    this.#fact("Entries on the host", count(total(entries)));
    this.#fact("Spilled, brought back", cache ? `${count(cache.spills)}, ${count(cache.restores)}` : UNKNOWN);
    this.#fact("Waited for that", cache ? duration(cache.restore_seconds) : UNKNOWN);
    this.#split(cache);
    const [sum, waited, reason] = [this.#now(), Date.now() - this.askedAt, this.#reason()];
    if (this.seen && sum !== this.sum && waited > ASK_EVERY_MS && reason === null) {
      this.sum = sum;
      this.#ask();
    }
    const isOld = this.read !== null && this.read.sum !== sum && (reason !== null || waited > ASK_EVERY_MS);
    setText(this.old, isOld ? joined(": ", `list not read since ${clock(this.read.at)}`, reason ?? "") : "");
  }

  /** What the report says of the cache: the list is of another cache where this has changed since. */
  #now() {
    const cache = this.report?.encoder_cache;
    return `${cache?.entries} ${cache?.device_bytes} ${cache?.host_bytes}`;
  }

  #fact(name, text, bytes) {
    // By the first words: the number of ranks may change.
    const key = name.split(",")[0];
    let value = this.values.get(key);
    if (!value) {
      value = el("dd", { "data-fact": key });
      this.facts.append(el("div", {}, el("dt", {}, name), value));
      this.values.set(key, value);
    }
    setText(value.previousElementSibling, name);
    setText(value, text);
    if (bytes !== undefined) value.title = exact(bytes);
  }

  #split(cache) {
    const sum = (cache?.device_bytes ?? 0) + (cache?.host_bytes ?? 0);
    this.bar.hidden = sum === 0;
    if (sum === 0) return;
    const [device, host] = this.bar.children;
    device.style.setProperty("width", `${(cache.device_bytes / sum) * 100}%`);
    host.style.setProperty("width", `${(cache.host_bytes / sum) * 100}%`);
    this.bar.setAttribute(
      "aria-label",
      `${gib(cache.device_bytes)} on the device, ${gib(cache.host_bytes)} on the host`,
    );
  }

  /** Why the workers are left alone; null where they are not. */
  #reason() {
    const { engine, progress } = this.report ?? {};
    if (!engine) return "nothing is known of the engine yet";
    // Where the workers record themselves, the entries come from a file.
    if (!engine.capabilities.collective_rpc) {
      const recorded = this.report.ranks.some((rank) => rank.source === "recorder");
      return recorded ? null : "the workers cannot be asked: the worker extension is not loaded";
    }
    const traits = STATES[engine.state];
    // The entries are asked of the workers themselves: never where that could be one call too many.
    if (!traits?.answers || !traits.takes_remedies) {
      return known(engine.stopped_at) ? "the engine was stopped in order" : `not asked while the engine is ${engine.state}`;
    }
    if (progress && !QUIET_VERDICTS.has(progress.verdict)) return `not asked while the ranks are ${progress.verdict}`;
    return null;
  }

  async #ask() {
    const reason = this.#reason();
    if (reason !== null) setText(this.status, reason);
    if (reason !== null || this.asking) return;
    this.asking = true;
    this.askedAt = Date.now();
    try {
      this.#show(await getAsOperator(`memory/encoder-cache?limit=${SHOWN}`));
    } catch (error) {
      setText(this.status, error.message);
    } finally {
      this.asking = false;
    }
  }

  #show({ ranks, age_seconds: age, note }) {
    const at = Date.now() / 1000 - (age ?? 0);
    const asOf = known(age) ? `as of ${clock(at)}` : "";
    this.read = { at, sum: this.#now() };
    setText(this.status, joined("; ", asOf, note));
    const first = ranks.find((rank) => rank.entries?.length) ?? ranks[0];
    if (!first?.entries?.length) {
      const text = first ? `The cache was empty at ${clock(at)}.` : "The entries are not known: enter the admin token and ask again.";
      fill(this.list, el("p", { class: "empty" }, text));
      return;
    }
    const rows = first.entries.map((entry) => [
      el("code", { title: entry.mm_hash }, short(String(entry.mm_hash))),
      gibNumber(entry.bytes),
      Array.isArray(entry.shape) ? entry.shape.join(" × ") : UNKNOWN,
      entry.dtype ?? UNKNOWN,
      duration(entry.age_seconds),
      duration(entry.idle_seconds),
      entry.residency ?? UNKNOWN,
      entry.referenced === null || entry.referenced === undefined ? UNKNOWN : entry.referenced ? "yes" : "no",
    ]);
    const caption = `Rank ${first.rank ?? UNKNOWN}: ${count(rows.length)} of ${count(first.entries_total)} entries`;
    const head = ["hash", "GiB", "shape", "type", "age, at least", "idle", "where", "in use"];
    fill(this.list, scrollTable({ caption, head, rows, numeric: [1, 4, 5] }, "Largest entries of the encoder cache"));
  }
}

function short(hash) {
  return hash.length > 2 * HASH_SHOWN + 1 ? `${hash.slice(0, HASH_SHOWN)}…${hash.slice(-HASH_SHOWN)}` : hash;
}
