/**
 * What fills a rank: what never moves in one line, then what moves, the largest change first, with what gives it back.
 */

import { Chart, timeSwitch } from "./chart.js";
import { COMPONENTS } from "./facts.js";
import { changeText, clock, exact, GIB, gib, gibNumber, joined, known, percent } from "./format.js";
import { bar, html, panel, sized, swatch, table } from "./html.js";
import { deviceName, pressureOf, rankKey, rankName, worstFirst } from "./model.js";
import { hrefOf } from "./place.js";
import { rankIn } from "./series.js";
import { shownSeries, shownTime, state } from "./store.js";

const PAST_SECONDS = 900;
const FIXED = new Set(COMPONENTS.slice(0, 2).map(({ field }) => field)); // the stack begins with what stays
const MOVED_BYTES = 16 * 1024 * 1024;
const SPARK = { width: 72, height: 18, points: 48, seconds: 5 };
const TABLE_ROWS = 60;
/** What gives each part back, and where the rank's pressure says how much. */
const GIVES = {
  encoder_cache_bytes: ["trim", "can_trim_bytes"],
  torch_cached_bytes: ["release", "can_release_bytes"],
  other_tensors_bytes: ["requests"],
};

/** The rank that is looked at: the chosen one, else the fullest. */
export function chosenRank() {
  const ranks = worstFirst(state.report);
  return ranks.find((rank) => rankKey(rank) === state.place.rank) ?? ranks[0] ?? null;
}

/** The components of a rank; what others hold beside them is a part of its own, where the sidecar knows of somebody. */
function componentsOf(rank) {
  const { growth, verdict } = state.report;
  const of = COMPONENTS.map((component) => ({ ...component, read: (figures) => figures?.[component.field] ?? null }));
  const grown = growth.ranks.find((one) => rankKey(one) === rankKey(rank))?.grown?.non_torch_bytes;
  if (!(grown > 0) || !(rank.shared_with || verdict.reason === "neighbour")) return of;
  const own = rank.components.non_torch_bytes - grown;
  const split = (bytes, part) => (known(bytes) ? part(bytes) : null);
  const place = COMPONENTS.findIndex(({ field }) => field === "non_torch_bytes");
  const inside = { ...of[place], read: ({ non_torch_bytes: bytes }) => split(bytes, (all) => Math.min(all, own)) };
  const outside = {
    ...{ field: "outside", name: "outside vLLM", variable: "--c-outside", gives: rank.shared_with ?? "" },
    meaning: "what others have taken on this device since the engine was ready",
    read: ({ non_torch_bytes: bytes }) => split(bytes, (all) => Math.max(all - own, 0)),
  };
  return of.toSpliced(place, 1, inside, outside);
}

/** Its parts, each with its change since a quarter of an hour ago, or since the engine began. */
function partsOf(rank) {
  const before = state.hour.last && state.hour.ago(PAST_SECONDS);
  const then = before && rankIn(before, rankKey(rank));
  const parts = componentsOf(rank).map((component) => {
    const [bytes, was] = [component.read(rank.components), then ? component.read(then) : null];
    return { ...component, bytes, was, change: known(was) ? bytes - was : null };
  }).filter(({ bytes }) => known(bytes));
  const isFixed = ({ field, change }) => FIXED.has(field) && !(Math.abs(change ?? 0) > MOVED_BYTES);
  const rounded = ({ change }) => Math.round(Math.abs(change ?? 0) / MOVED_BYTES);
  const moving = parts.filter((part) => !isFixed(part)).sort((one, other) => rounded(other) - rounded(one));
  return { parts, fixed: parts.filter(isFixed), moving, since: before?.at ?? null };
}

function givesText({ field, gives }, pressure) {
  const [what, figure] = GIVES[field] ?? [gives];
  if (!what) return "";
  const bytes = figure && pressure?.[figure];
  return bytes > 0 ? `${what} ${gibNumber(bytes)}` : figure ? "" : what;
}

/** The last quarter of an hour of a part as a line, another one every few seconds. */
function spark(key, read) {
  const now = Math.floor((state.hour.last?.at ?? 0) / SPARK.seconds) * SPARK.seconds;
  const rows = state.hour.rows.filter(({ at }) => at > now - PAST_SECONDS && at <= now);
  const every = Math.max(1, Math.floor(rows.length / SPARK.points));
  const some = rows.filter((_, index) => index % every === 0 || index === rows.length - 1);
  const points = some.map((row) => [row.at, rankIn(row, key)]).map(([at, figures]) => [at, figures && read(figures)]).filter(([, value]) => known(value));
  const values = points.map(([, value]) => value);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(most - least, MOVED_BYTES);
  const floor = least - (room - most + least) / 2; // what is still lies in the middle
  const x = (at) => (((at - now + PAST_SECONDS) / PAST_SECONDS) * (SPARK.width - 2) + 1).toFixed(1);
  const y = (value) => (SPARK.height - 2 - ((value - floor) / room) * (SPARK.height - 4)).toFixed(1);
  const path = points.map(([at, value], index) => `${index ? "L" : "M"}${x(at)} ${y(value)}`).join("");
  return html`<svg class="spark" aria-hidden="true" viewBox="0 0 ${SPARK.width} ${SPARK.height}" preserveAspectRatio="none"><path d=${path} /></svg>`;
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
    "What fills it, GiB",
    named,
    deviceBar(rank, pressure, parts),
    html`<p class="fixed">${fixed.map(({ field, name, variable, bytes }) => html`<span key=${field}>${swatch(variable)}${name} ${gibNumber(bytes)}</span>`)}</p>`,
    html`<table class="moving" aria-label="Parts that move, in GiB">
      <thead><tr><th><span class="visually-hidden">part</span></th><th class="number">now</th><th>15m</th><th class="number">change</th><th>given back</th></tr></thead>
      <tbody>
        ${moving.map(
          (part) => html`<tr key=${part.field}>
            <th scope="row" title=${part.meaning}>${swatch(part.variable)}${part.name}</th>
            <td class="number" title=${exact(part.bytes)}>${gibNumber(part.bytes)}</td>
            <td class="line">${spark(rankKey(rank), part.read)}</td>
            <td class="number change" title=${span}>${changeText(part.change)}</td>
            <td class="gives">${givesText(part, pressure)}</td>
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
  const value = (read) => (reading) => read(rankIn(reading, key) ?? {});
  const lines = parts.map(({ name, variable, read }) => ({ name, variable, format: gib, value: value(read) }));
  const name = rankName(rank, report.ranks);
  const choices = worstFirst(report).map(
    (one) => html`<a key=${rankKey(one)} href=${hrefOf(state.place, { rank: rankKey(one) })} aria-current=${one === rank ? "true" : undefined}>${rankName(one, report.ranks)}</a>`,
  );
  const label = `${name}: ${gib(rank.used_bytes)} of ${gib(rank.total_bytes)} used, ${percent(rank.used_ratio)}. ${parts.map((part) => `${part.name} ${gib(part.bytes)}`).join(", ")}`;
  const cells = (part) =>
    [html`${swatch(part.variable)}${part.name}`, sized(part.bytes), gibNumber(part.was), changeText(part.change), givesText(part, pressure), part.meaning];
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
    readingsTable(series, time, lines, (reading) => rankIn(reading, key)?.used_bytes),
  )}`;
}

/** The same as the chart, for people who do not see it. */
function readingsTable(series, [from, to], lines, used) {
  const there = series.rows.filter(({ at }) => at >= from && at <= to);
  const every = Math.ceil(there.length / TABLE_ROWS);
  const some = there.filter((_, index) => (there.length - 1 - index) % every === 0).reverse();
  const rows = some.map((row) => [clock(row.at), ...lines.map(({ value }) => gibNumber(value(row))), gibNumber(used(row))]);
  const head = ["at", ...lines.map(({ name }) => name), "used"];
  return html`<details class="alt"><summary>As a table</summary>${table({ caption: "The chart, in GiB, newest first", head, rows, numeric: head.map((_, index) => index) })}</details>`;
}

/** What is drawn again only when this changes: a chart of an hour every two seconds, of a day every minute. */
export function stampOf(theme, [from, to], ...more) {
  const grain = Math.max(1, Math.round((to - from) / 1800));
  const { wide, events, wasAnswered } = state;
  return joined(" ", theme, Math.floor(to / grain), Math.round(to - from), events.length, String(wasAnswered), wide?.rows.length, ...more);
}
