/**
 * The readings that the charts are drawn from: packed, oldest first, bounded. NaN is what is not known.
 */

import { COMPONENTS } from "./facts.js";

export const SPAN_SECONDS = 3600;
const MAX_NUMBERS = 1_000_000; // 8 MB, whatever the number of ranks
const MAX_SAMPLES = 4400; // an hour at one a second, and room so that the oldest need not go at every reading

const RANK_FIELDS = [
  "used_bytes",
  ...COMPONENTS.map(({ field }) => field),
  "torch_allocated_bytes",
  "torch_reserved_bytes",
  "host_rss_bytes",
  "pid",
];
const ENGINE_FIELDS = [
  "requests_running",
  "requests_waiting",
  "kv_cache_usage_ratio",
  "requests_ended",
  "proxy_requests_ended",
  "host_kept_bytes",
  "begins", // 1 where nothing was measured since the reading before: no line leads here
];
const RATE_SECONDS = 10;

/** Data-parallel engines number their ranks from 0 each. */
export function rankKey(rank) {
  return `${rank.dp_rank ?? 0}:${rank.rank ?? 0}`;
}

/** A report in the shape of a reading of the history. */
export function readingOf(report) {
  return {
    at: report.taken_at,
    ...Object.fromEntries(ENGINE_FIELDS.map((name) => [name, report.engine[name]])),
    requests_ended: report.engine.work?.requests ?? null,
    proxy_requests_ended: report.proxy?.requests_ended ?? null,
    host_kept_bytes: report.host?.kept_bytes ?? null,
    ranks: report.ranks.map((rank) => ({
      dp_rank: rank.dp_rank,
      rank: rank.rank,
      pid: rank.pid,
      used_bytes: rank.used_bytes,
      ...rank.components,
      torch_allocated_bytes: rank.torch.allocated_bytes,
      torch_reserved_bytes: rank.torch.reserved_bytes,
      host_rss_bytes: rank.host_memory.rss_bytes,
    })),
  };
}

/** Let lines end at each of the moments, oldest first: the reading after it begins another. */
export function breakAt(moments, readings) {
  let next = 0;
  for (const reading of readings) {
    const before = next;
    while (moments[next] <= reading.at) next++;
    reading.begins = next > before ? 1 : 0;
  }
}

export class Readings {
  constructor() {
    this.length = 0;
    this.capacity = MAX_SAMPLES;
    /** Nothing for longer than this is a gap in a line. */
    this.gapSeconds = 20;
    /** Whether nothing could be measured since the last reading. */
    this.isInterrupted = false;
    this.at = new Float64Array(this.capacity);
    this.ranks = new Map();
    this.engine = columns(ENGINE_FIELDS, this.capacity);
  }

  /** When the last one was taken; -Infinity before the first. */
  get lastAt() {
    return this.length ? this.at[this.length - 1] : -Infinity;
  }

  /** When the first one was taken; Infinity before it. */
  get firstAt() {
    return this.length ? this.at[0] : Infinity;
  }

  /** Keep one reading, if it is newer than all. */
  add(reading) {
    if (reading.at === null || reading.at <= this.lastAt) return;
    this.#know(reading.ranks);
    const begins = this.isInterrupted || reading.begins === 1 || this.#isOfOthers(reading.ranks);
    this.isInterrupted = false;
    // Polls faster than a second would fill the ring early: of each second the last stays.
    const again = !begins && this.length > 1 && reading.at - this.at[this.length - 2] < 0.95;
    if (!again && this.length === this.capacity) this.#forget(Math.ceil(this.capacity / 8));
    const index = again ? this.length - 1 : this.length++;
    this.at[index] = reading.at;
    const began = begins || (again && this.engine.begins[index] === 1);
    for (const name of ENGINE_FIELDS) this.engine[name][index] = reading[name] ?? NaN;
    this.engine.begins[index] = began ? 1 : 0;
    for (const table of this.ranks.values()) for (const name of RANK_FIELDS) table[name][index] = NaN;
    for (const rank of reading.ranks) {
      const table = this.ranks.get(rankKey(rank));
      if (table) for (const name of RANK_FIELDS) table[name][index] = rank[name] ?? NaN;
    }
  }

  /** Put the server's readings, oldest first, in place of ours from a moment on; those that came meanwhile stay. */
  replaceFrom(since, readings) {
    const until = readings.length ? readings[readings.length - 1].at : since;
    const later = this.#taken(firstAtOrAfter(this.at, this.length, until + 1e-6));
    const { isInterrupted } = this;
    this.isInterrupted = false;
    this.length = firstAtOrAfter(this.at, this.length, since);
    for (const reading of readings) this.add(reading);
    for (const reading of later) this.add(reading);
    this.isInterrupted = isInterrupted;
  }

  /** By how much a count rose a second, over the last seconds before a reading; NaN where that is not known. */
  rate(name, index) {
    const counts = this.engine[name];
    let first = index;
    while (first > 0 && this.at[index] - this.at[first] < RATE_SECONDS) {
      if (this.isGapBefore(first) || !(counts[first - 1] <= counts[first])) break; // a count that begins anew falls
      first--;
    }
    return first < index ? (counts[index] - counts[first]) / (this.at[index] - this.at[first]) : NaN;
  }

  /** Whether nothing is known of the time between a reading and the one before it. */
  isGapBefore(index) {
    return this.engine.begins[index] === 1 || this.at[index] - this.at[index - 1] > this.gapSeconds;
  }

  /** The indexes of a span: from, and one past the end. */
  span(from, to) {
    return [firstAtOrAfter(this.at, this.length, from), firstAtOrAfter(this.at, this.length, to + 1e-6)];
  }

  /** Whether a rank is another process than at the last reading: the memory of one does not become the other's. */
  #isOfOthers(ranks) {
    const last = this.length - 1;
    return ranks.some((rank) => {
      const before = last < 0 ? NaN : (this.ranks.get(rankKey(rank))?.pid[last] ?? NaN);
      return rank.pid && !Number.isNaN(before) && before !== rank.pid;
    });
  }

  #know(ranks) {
    const fresh = ranks.map(rankKey).filter((key) => !this.ranks.has(key));
    if (!fresh.length) return;
    for (const key of fresh) this.ranks.set(key, columns(RANK_FIELDS, this.capacity));
    const fits = Math.floor(MAX_NUMBERS / (this.ranks.size * RANK_FIELDS.length));
    if (fits < this.capacity) this.#shrink(Math.max(fits, 300));
  }

  /** Fewer samples for more ranks. */
  #shrink(capacity) {
    if (this.length > capacity) this.#forget(this.length - capacity);
    const cut = (table) => {
      for (const name of Object.keys(table)) table[name] = table[name].slice(0, capacity);
    };
    this.capacity = capacity;
    this.at = this.at.slice(0, capacity);
    cut(this.engine);
    for (const table of this.ranks.values()) cut(table);
  }

  /** Drop the oldest. */
  #forget(number) {
    const move = (values) => values.copyWithin(0, number, this.length);
    move(this.at);
    Object.values(this.engine).forEach(move);
    for (const table of this.ranks.values()) Object.values(table).forEach(move);
    this.length -= number;
  }

  /** Samples from an index on, as readings. */
  #taken(from) {
    const value = (number) => (Number.isNaN(number) ? null : number);
    const readings = [];
    for (let index = from; index < this.length; index++) {
      readings.push({
        at: this.at[index],
        ...Object.fromEntries(ENGINE_FIELDS.map((name) => [name, value(this.engine[name][index])])),
        ranks: [...this.ranks].map(([key, table]) => {
          const [dp_rank, rank] = key.split(":").map(Number);
          return { dp_rank, rank, ...Object.fromEntries(RANK_FIELDS.map((name) => [name, value(table[name][index])])) };
        }),
      });
    }
    return readings;
  }
}

function columns(names, capacity) {
  return Object.fromEntries(names.map((name) => [name, new Float64Array(capacity).fill(NaN)]));
}

function firstAtOrAfter(at, length, moment) {
  let [low, high] = [0, length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at[middle] < moment) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The indexes to draw: of each of so many equal parts of the span the one with the largest value, so that no peak is
 * lost; -1 stands for a gap.
 */
export function chosen(readings, from, to, most, weight) {
  const { at } = readings;
  if (to <= from) return [];
  // Parts of fixed borders: what is drawn must not flicker as the span moves on.
  const part = (at[to - 1] - at[from]) / most;
  const indexes = [];
  let last = -1;
  let lastPart = NaN;
  for (let index = from; index < to; index++) {
    const here = to - from <= most ? index : Math.floor(at[index] / part);
    const gap = index > from && readings.isGapBefore(index);
    if (here === lastPart && !gap) {
      if (weight(index) > weight(last) || Number.isNaN(weight(last))) indexes[indexes.length - 1] = last = index;
      continue;
    }
    if (gap) indexes.push(-1);
    indexes.push(index);
    last = index;
    lastPart = here;
  }
  return indexes;
}
