/**
 * What fills a rank: what never moves in one line, then what moves, the largest change first, with what gives it back.
 */

import { Chart, timeSwitch } from "./chart.js";
import { COMPONENTS } from "./facts.js";
import { changeText, clock, exact, GIB, gib, gibNumber, joined, known, percent } from "./format.js";
import { bar, html, panel, sized, swatch, table } from "./html.js";
import { byFree, deviceName, pressureOf, rankKey, rankName } from "./model.js";
import { hrefOf } from "./place.js";
import { rankIn } from "./series.js";
import { shownSeries, shownTime, state } from "./store.js";

const PAST_SECONDS = 900;
const FIXED = new Set(COMPONENTS.slice(0, 2).map(({ field }) => field)); // the stack begins with what stays
const MOVED_BYTES = 16 * 1024 * 1024;
const SPARK = { width: 72, height: 18, points: 48 };
const TABLE_ROWS = 60;
/** What gives each part back, and where the rank's pressure says how much. */
const GIVES = {
  encoder_cache_bytes: ["trim", "can_trim_bytes"],
  torch_cached_bytes: ["release", "can_release_bytes"],
  other_tensors_bytes: ["ends with its requests"],
};

/** The rank that is looked at: the chosen one, else the fullest. */
export function chosenRank() {
  const ranks = byFree(state.report?.ranks ?? []);
  return ranks.find((rank) => rankKey(rank) === state.place.rank) ?? ranks[0] ?? null;
}

/** Its parts, each with its change since a quarter of an hour ago, or since the engine began. */
function partsOf(rank) {
  const before = state.hour.last && state.hour.ago(PAST_SECONDS);
  const then = before && rankIn(before, rankKey(rank));
  const parts = COMPONENTS.filter(({ field }) => known(rank.components[field])).map((component) => {
    const bytes = rank.components[component.field];
    const was = then?.[component.field] ?? null;
    return { ...component, bytes, was, change: known(was) ? bytes - was : null };
  });
  const isFixed = ({ field, change }) => FIXED.has(field) && !(Math.abs(change ?? 0) > MOVED_BYTES);
  const rounded = ({ change }) => Math.round(Math.abs(change ?? 0) / MOVED_BYTES);
  const moving = parts.filter((part) => !isFixed(part)).sort((one, other) => rounded(other) - rounded(one));
  return { parts, fixed: parts.filter(isFixed), moving, since: before?.at ?? null };
}

function givesText(field, pressure) {
  const [what, figure] = GIVES[field] ?? [];
  if (!what) return "";
  const bytes = figure && pressure?.[figure];
  return known(bytes) ? `${what} ${gibNumber(bytes)}` : figure ? "" : what;
}

let sparks = { key: "", paths: new Map() };

/** The last quarter of an hour of a part as a line; made anew every few seconds. */
function spark(key, field) {
  const { hour } = state;
  const now = hour.last?.at ?? 0;
  const age = `${key} ${Math.floor(now / 5)} ${hour.rows.length}`;
  if (sparks.key !== age) sparks = { key: age, paths: new Map() };
  if (!sparks.paths.has(field)) sparks.paths.set(field, sparkPath(key, field, now));
  return html`<svg class="spark" aria-hidden="true" width=${SPARK.width} height=${SPARK.height}><path d=${sparks.paths.get(field)} /></svg>`;
}

function sparkPath(key, field, now) {
  const rows = state.hour.rows.filter(({ at }) => at > now - PAST_SECONDS);
  const every = Math.max(1, Math.floor(rows.length / SPARK.points));
  const some = rows.filter((_, index) => index % every === 0 || index === rows.length - 1);
  const points = some.map((row) => [row.at, rankIn(row, key)?.[field]]).filter(([, value]) => known(value));
  const values = points.map(([, value]) => value);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(most - least, MOVED_BYTES);
  const x = (at) => (((at - now + PAST_SECONDS) / PAST_SECONDS) * (SPARK.width - 2) + 1).toFixed(1);
  const y = (value) => (SPARK.height - 2 - ((value - least) / room) * (SPARK.height - 4)).toFixed(1);
  return points.map(([at, value], index) => `${index ? "L" : "M"}${x(at)} ${y(value)}`).join("");
}

/** The whole device in one bar, with the lines where memory is given back. */
function deviceBar(rank, pressure, parts) {
  const label = `${parts.map(({ name, bytes }) => `${name} ${gib(bytes)}`).join(", ")}, of ${gib(rank.total_bytes)}`;
  const water = (bytes, title, kind) => ({ bytes: rank.total_bytes - bytes, title: `${title} ${gib(bytes)} free`, kind });
  const waters = [[pressure?.high_free_bytes, "acts at", "high"], [pressure?.low_free_bytes, "stops at", "low"]];
  const lines = waters.filter(([bytes]) => known(bytes) && known(rank.total_bytes)).map((one) => water(...one));
  return bar(parts.map(({ field, name, bytes, variable }) => ({ key: field, name, bytes, colour: variable })), rank.total_bytes, lines, label);
}

export function partsPanel() {
  const rank = chosenRank();
  if (!rank) return panel("parts", "What fills it", null, html`<p class="empty">No rank has been read yet.</p>`);
  const ranks = state.report.ranks;
  const { parts, fixed, moving, since } = partsOf(rank);
  const pressure = pressureOf(state.report, rank);
  const span = state.hour.last && state.hour.last.at - since < PAST_SECONDS * 0.9 ? `since ${clock(since).slice(0, -3)}` : "in 15 min";
  const named = ranks.length > 1 ? html`<span class="aside">${rankName(rank, ranks)}</span>` : null;
  return panel(
    "parts",
    "What fills it",
    named,
    deviceBar(rank, pressure, parts),
    html`<p class="fixed">${fixed.map(({ field, name, variable, bytes }) => html`<span key=${field}>${swatch(variable)}${name} ${gibNumber(bytes)}</span>`)}</p>`,
    html`<table class="moving" aria-label="Parts that move, in GiB">
      <thead class="visually-hidden"><tr><th>part</th><th>now</th><th>last 15 minutes</th><th>change</th><th>given back by</th></tr></thead>
      <tbody>
        ${moving.map(
          ({ field, name, variable, bytes, change, meaning }) => html`<tr key=${field}>
            <th scope="row" title=${meaning}>${swatch(variable)}${name}</th>
            <td class="number" title=${exact(bytes)}>${gibNumber(bytes)}</td>
            <td>${spark(rankKey(rank), field)}</td>
            <td class="number change" title=${span}>${changeText(change)}</td>
            <td class="gives">${givesText(field, pressure)}</td>
          </tr>`,
        )}
      </tbody>
    </table>`,
  );
}

/** The view of one rank: its parts over time, and as a table. */
export function partsView(theme) {
  const rank = chosenRank();
  if (!rank) return partsPanel();
  const [report, key] = [state.report, rankKey(rank)];
  const { parts, since } = partsOf(rank);
  const pressure = pressureOf(report, rank);
  const time = shownTime();
  const series = shownSeries();
  const value = (field) => (reading) => rankIn(reading, key)?.[field];
  const lines = COMPONENTS.map(({ name, variable, field }) => ({ name, variable, format: gib, value: value(field) }));
  const name = rankName(rank, report.ranks);
  const choices = byFree(report.ranks).map(
    (one) => html`<a key=${rankKey(one)} href=${hrefOf(state.place, { rank: rankKey(one) })} aria-current=${one === rank ? "true" : undefined}>${rankName(one, report.ranks)}</a>`,
  );
  const label = `${name}: ${gib(rank.used_bytes)} of ${gib(rank.total_bytes)} used, ${percent(rank.used_ratio)}. ${parts.map((part) => `${part.name} ${gib(part.bytes)}`).join(", ")}`;
  const cells = ({ name, variable, field, bytes, was, change, meaning }) =>
    [html`${swatch(variable)}${name}`, sized(bytes), gibNumber(was), changeText(change), givesText(field, pressure), meaning];
  return html`${panel(
    "parts-time",
    `Where the memory is: ${name}`,
    timeSwitch(),
    report.ranks.length > 1 ? html`<nav class="switch" aria-label="Rank">${choices}</nav>` : null,
    html`<${Chart} key=${key} label=${label} series=${series} time=${time} lines=${lines} areas=${true} per=${GIB} theme=${theme} stamp=${stampOf(theme, time, key)} />`,
  )}
  ${panel(
    "parts-table",
    joined(" · ", "Now", deviceName(rank)),
    null,
    table({
      caption: `In GiB, with the change since ${clock(since)}`,
      head: ["part", "now", "then", "change", "given back by", "what it is"],
      rows: [
        ...parts.map(cells),
        ["free", sized(rank.free_bytes), "", "", pressure ? `acts at ${gibNumber(pressure.high_free_bytes)}, stops at ${gibNumber(pressure.low_free_bytes)}` : "", `of ${gib(rank.total_bytes)}`],
      ],
      numeric: [1, 2, 3],
      wide: [5],
    }),
    readingsTable(series, time, key),
  )}`;
}

/** The same as the chart, for people who do not see it. */
function readingsTable(series, [from, to], key) {
  const there = series.rows.filter(({ at }) => at >= from && at <= to);
  const every = Math.ceil(there.length / TABLE_ROWS);
  const fields = [...COMPONENTS.map(({ field }) => field), "used_bytes"];
  const some = there.filter((_, index) => (there.length - 1 - index) % every === 0).reverse();
  const rows = some.map((row) => [clock(row.at), ...fields.map((field) => gibNumber(rankIn(row, key)?.[field]))]);
  const head = ["at", ...COMPONENTS.map(({ name }) => name), "used"];
  return html`<details class="alt"><summary>As a table</summary>${table({ caption: "The chart, in GiB, newest first", head, rows, numeric: head.map((_, index) => index) })}</details>`;
}

/** What is drawn again only when this changes: a chart of an hour every two seconds, of a day every minute. */
export function stampOf(theme, [from, to], ...more) {
  const grain = Math.max(1, Math.round((to - from) / 1800));
  const { wide, events, wasAnswered } = state;
  return joined(" ", theme, Math.floor(to / grain), Math.round(to - from), events.length, String(wasAnswered), wide?.rows.length, ...more);
}
