/**
 * The readings that charts are drawn from: oldest first, one in so many seconds and the last of all, bounded.
 */

import { rankKey } from "./model.js";

const MIN_GAP_SECONDS = 20;

/** A report in the shape of a reading of the history. */
export function readingOf(report) {
  const { requests_running, requests_waiting, kv_cache_usage_ratio, work } = report.engine;
  const ranks = report.ranks.map(({ dp_rank, rank, pid, used_bytes, free_bytes, components, host_memory }) => ({
    ...{ dp_rank, rank, pid, used_bytes, free_bytes, ...components },
    host_rss_bytes: host_memory.rss_bytes,
  }));
  return {
    ...{ at: report.taken_at, requests_running, requests_waiting, kv_cache_usage_ratio, ranks },
    requests_ended: work?.requests ?? null,
    proxy_requests_ended: report.proxy?.requests_ended ?? null,
    host_kept_bytes: report.host?.kept_bytes ?? null,
  };
}

/** Let lines end at each of the moments, oldest first: the reading after it begins another. */
export function breakAt(moments, readings) {
  let next = 0;
  for (const reading of readings) {
    const before = next;
    while (moments[next] <= reading.at) next++;
    if (next > before) reading.begins = true;
  }
}

/** The figures of a rank in a reading; undefined where it has none. */
export const rankIn = (reading, key) => reading.ranks.find((rank) => rankKey(rank) === key);

export class Series {
  constructor(seconds, step) {
    this.seconds = seconds;
    this.step = step;
    this.rows = [];
    /** Whether nothing could be measured since the last reading. */
    this.isInterrupted = false;
  }

  get last() {
    return this.rows.at(-1) ?? null;
  }

  /** Keep one reading, if it is newer than all; of each step the one with the most in use stays, so that no peak is lost. */
  add(reading) {
    const { rows, last } = this;
    if (reading.at === null || (last && reading.at <= last.at)) return;
    if (last && (this.isInterrupted || isOfOthers(last, reading))) reading.begins = true;
    this.isInterrupted = false;
    const before = rows.at(-2);
    if (before && !last.begins && Math.floor(before.at / this.step) === Math.floor(last.at / this.step))
      rows.splice(peak(last) > peak(before) ? -2 : -1, 1);
    rows.push(reading);
    while (rows[0].at < reading.at - this.seconds * 1.05) rows.shift();
  }

  /** Put the sidecar's readings in place of ours from their first on; those that came meanwhile stay. */
  merge(readings) {
    if (!readings.length) return;
    const [first, until] = [readings[0].at, readings[readings.length - 1].at];
    const later = this.rows.filter(({ at }) => at > until);
    const { isInterrupted } = this;
    this.isInterrupted = false;
    this.rows = this.rows.filter(({ at }) => at < first);
    for (const reading of [...readings, ...later]) this.add(reading);
    this.isInterrupted = isInterrupted;
  }

  /** Whether nothing is known of the time between a reading and the one before it. */
  isGapBefore(index) {
    const [reading, before] = [this.rows[index], this.rows[index - 1]];
    return Boolean(reading.begins) || reading.at - before.at > Math.max(MIN_GAP_SECONDS, this.step * 4);
  }

  /** The reading nearest to so many seconds ago, of the engine that runs now. */
  ago(seconds) {
    const begin = Math.max(0, this.rows.findLastIndex(({ begins }) => begins));
    return this.rows.find(({ at }, index) => index >= begin && at >= this.last.at - seconds);
  }

  /** By how much a count rose a second since the reading before; null where that is not known. */
  rate(name, index) {
    const [row, before] = [this.rows[index], this.rows[index - 1]];
    if (!before || this.isGapBefore(index)) return null;
    const rise = row[name] - before[name]; // a count that begins anew falls
    return row[name] === null || before[name] === null || !(rise >= 0) ? null : rise / (row.at - before.at);
  }
}

const peak = ({ ranks }) => ranks.reduce((most, { used_bytes: used }) => Math.max(most, used ?? 0), 0);

/** Whether a rank is another process than before: the memory of one does not become the other's. */
function isOfOthers(before, reading) {
  return reading.ranks.some((rank) => {
    const was = rankIn(before, rankKey(rank))?.pid;
    return rank.pid && was && was !== rank.pid;
  });
}
