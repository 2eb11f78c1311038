/**
 * What a report says of its ranks, looked up: names, the worst off, and the figures of the rule that watches them.
 */

import { joined, known, UNKNOWN } from "./format.js";

/** Data-parallel engines number their ranks from 0 each. */
export const rankKey = (rank) => `${rank.dp_rank ?? 0}:${rank.rank ?? 0}`;

export function rankName(rank, ranks) {
  const engines = new Set(ranks.map((other) => other.dp_rank ?? 0)).size;
  return engines > 1 ? `dp ${rank.dp_rank ?? 0} rank ${rank.rank ?? UNKNOWN}` : `rank ${rank.rank ?? UNKNOWN}`;
}

export function deviceName({ device, host }) {
  const place =
    device.type === null ? "device –" : device.index === null ? device.type : `${device.type}:${device.index}`;
  return joined(" · ", place, device.name, host);
}

/** The ranks, the worst off first, as the sidecar orders them; none without a report. */
export const worstFirst = (report) => (report?.rank_order ?? []).map((place) => report.ranks[place]);

/** The rank as the rule sees it that acts first on its device; null where none has waters for it. */
export function pressureOf(report, rank) {
  return (report.policy?.rules ?? [])
    .flatMap((rule) => rule.ranks)
    .filter((one) => rankKey(one) === rankKey(rank) && known(one.high_free_bytes))
    .reduce((first, one) => (first && first.high_free_bytes >= one.high_free_bytes ? first : one), null);
}

/** Between the most and the least. */
export const skew = (values) => greatest(values) - values.filter(known).reduce((least, value) => Math.min(least, value), Infinity);

/** The sum of those that are known; null where none is. */
export const total = (values) => values.filter(known).reduce((sum, value) => (sum ?? 0) + value, null);

export const greatest = (values) => values.filter(known).reduce((most, value) => Math.max(most ?? value, value), null);
