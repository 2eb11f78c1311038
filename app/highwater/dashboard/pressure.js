/**
 * How the policy sees each rank: what is free, where it acts, what is missing, and what could be given back.
 */

import { known } from "./format.js";
import { rankKey } from "./readings.js";

/** How bad a level of the policy is, as the page's colours tell it. */
export const LEVELS = { calm: "good", short: "warn", urgent: "bad", held: "quiet", unknown: "quiet" };

/** The rank as seen by the rule that acts first on its device; null if no rule has waters for it. */
export function pressureOf(report, rank) {
  return (report.policy?.rules ?? [])
    .flatMap((rule) => rule.ranks)
    .filter((one) => rankKey(one) === rankKey(rank) && known(one.high_free_bytes))
    .reduce((first, one) => (first === null || one.high_free_bytes > first.high_free_bytes ? one : first), null);
}

/** The ranks of a rule that miss something, the worst off first. */
export function shortRanks(rule) {
  return rule.ranks.filter((one) => one.short_bytes > 0).sort((one, other) => other.short_bytes - one.short_bytes);
}
