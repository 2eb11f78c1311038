/**
 * The ranks: the worst off first, equal ones in one row; and every figure of each as a table.
 */

import { COMPONENTS } from "./facts.js";
import { clock, gib, gibNumber, known, percent, UNKNOWN, words } from "./format.js";
import { html, panel, sized, swatch, table } from "./html.js";
import { deviceName, pressureOf, rankKey, rankName, skew, worstFirst } from "./model.js";
import { chosenRank } from "./parts.js";
import { hrefOf } from "./place.js";
import { state } from "./store.js";

const ALIKE = 0.01; // of the device
const MAX_ROWS = 6;
const COLUMNS = [
  ["used", (rank) => rank.used_bytes],
  ...COMPONENTS.map(({ name, field, variable }) => [name, (rank) => rank.components[field], variable]),
  ["free", (rank) => rank.free_bytes],
  ["total", (rank) => rank.total_bytes],
  ["releasable", (rank) => rank.releasable_bytes],
  ["peak allocated", (rank) => rank.torch.peak_allocated_bytes],
  ["host RSS", (rank) => rank.host_memory.rss_bytes],
];

/** Groups of ranks that have about as much free, the worst off by itself. */
function alike(ranks) {
  const groups = [];
  for (const rank of ranks) {
    const isNear = groups.length > 1 && Math.abs(rank.free_bytes - groups.at(-1)[0].free_bytes) <= ALIKE * rank.total_bytes;
    if (isNear || groups.length >= MAX_ROWS) groups.at(-1).push(rank);
    else groups.push([rank]);
  }
  return groups;
}

/** The numbers of a group of ranks, those that follow one another as a span; of several engines each with its engine's. */
export function numbersOf(group, ranks) {
  if (new Set(ranks.map((rank) => rank.dp_rank ?? 0)).size > 1) return group.map((rank) => `${rank.dp_rank ?? 0}.${rank.rank ?? UNKNOWN}`).join(" ");
  const runs = [];
  for (const number of group.map(({ rank }) => rank ?? 0).sort((one, other) => one - other)) {
    if (number === runs.at(-1)?.[1] + 1) runs.at(-1)[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(" ");
}

export function ranksPanel() {
  const { report, place } = state;
  const ranks = report?.ranks ?? [];
  const chosen = chosenRank();
  const rows = alike(worstFirst(report)).map((group) => {
    const [rank] = group;
    const pressure = pressureOf(report, rank);
    const water = pressure?.high_free_bytes;
    const used = known(rank.used_ratio) ? `${rank.used_ratio * 100}%` : "0";
    const names = group.map((one) => rankName(one, ranks)).join(", ");
    const current = group.includes(chosen) ? "true" : undefined;
    return html`<li key=${rankKey(rank)}>
      <a href=${hrefOf(place, { rank: rankKey(rank), view: "parts" })} aria-current=${current} aria-label="${names}: ${gib(rank.free_bytes)} free, ${percent(rank.used_ratio)} used" title="${names}: ${deviceName(rank)}">
        <b>${numbersOf(group, ranks)}</b>
        <span class="meter" data-level=${pressure?.short_bytes ? "bad" : undefined} aria-hidden="true"><i style=${{ width: used }}></i>${known(water) ? html`<u style=${{ left: `${(1 - water / rank.total_bytes) * 100}%` }}></u>` : null}</span>
        <span class="number">${gibNumber(rank.free_bytes)}</span>
        <small>${group.length > 1 ? `×${group.length}` : ""}</small>
      </a>
    </li>`;
  });
  return panel("ranks", "Free by rank, GiB", null, missing(report), html`<ol class="rank-list">${rows}</ol>`);
}

/** Ranks that are not heard of. */
function missing(report) {
  if (!report?.ranks_missing.length || report.verdict.reason === "not_read") return null;
  return html`<ul class="missing" aria-label="Ranks that are missing">
    ${report.ranks_missing.map((rank) => html`<li>dp ${rank.dp_rank} pp ${rank.pp_rank} tp ${rank.tp_rank}: ${words(rank.status)}${rank.host ? ` on ${rank.host}` : ""}${rank.last_seen_at ? `, last seen ${clock(rank.last_seen_at)} with ${gib(rank.used_bytes)}` : ""}</li>`)}
  </ul>`;
}

export function ranksView() {
  const ranks = state.report?.ranks ?? [];
  const rows = ranks.map((rank) => [
    html`<a href=${hrefOf(state.place, { view: "parts", rank: rankKey(rank) })}>${rankName(rank, ranks)}</a><small>${deviceName(rank)}</small>`,
    percent(rank.used_ratio),
    ...COLUMNS.map(([, read]) => sized(read(rank))),
  ]);
  if (ranks.length > 1) rows.push([html`skew<small>most less least</small>`, "", ...COLUMNS.map(([, read]) => sized(skew(ranks.map(read))))]);
  const head = ["rank", "used %", ...COLUMNS.map(([name, , variable]) => (variable ? html`${swatch(variable)}${name}` : name))];
  return panel(
    "ranks-table",
    "Every rank",
    null,
    missing(state.report),
    ranks.length
      ? table({ caption: "Now, by rank, in GiB. – is not known.", label: "Memory by rank and component", head, rows, numeric: head.map((_, index) => index) })
      : html`<p class="empty">No rank has been read yet.</p>`,
    state.report ? html`<p class="note-line">Growth since the engine was ready, all ranks: ${gib(state.report.growth.since_ready_bytes)}.</p>` : null,
  );
}
