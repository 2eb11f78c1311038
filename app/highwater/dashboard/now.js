/**
 * The first screen: what moved, what fills it, the ranks, what happened. While an engine starts, its stages.
 */

import { Chart, timeSwitch } from "./chart.js";
import { eventsPanel } from "./events.js";
import { clock, count, decimal, duration, GIB, gib, known, percent, words } from "./format.js";
import { html, panel, table } from "./html.js";
import { pressureOf, rankKey, rankName, worstFirst } from "./model.js";
import { partsPanel, stampOf } from "./parts.js";
import { hrefOf } from "./place.js";
import { numbersOf, ranksPanel } from "./ranks.js";
import { rankIn } from "./series.js";
import { shownSeries, shownTime, state } from "./store.js";

const ofRanks = (name, byRank, more) => ({ name, byRank, format: gib, per: GIB, ...more });
const ofEngine = (name, format, ...lines) => ({ name, lines, format });
const row = (name, field, variable) => ({ name, variable, value: (reading) => reading[field] });
const rate = (name, field, variable) => ({ name, variable, value: (_, index) => shownSeries().rate(field, index) });

/** What can be shown over time. */
const CHARTS = {
  free: ofRanks("free memory", "free_bytes", { hasWaters: true }),
  used: ofRanks("used memory", "used_bytes", { isClose: true }),
  encoder: ofRanks("encoder cache", "encoder_cache_bytes"),
  reserve: ofRanks("allocator reserve", "torch_cached_bytes"),
  requests: ofEngine("requests", count, row("running", "requests_running", "--line-0"), row("waiting", "requests_waiting", "--line-1")),
  ended: ofEngine("requests ended a second", decimal, rate("by the engine's count", "requests_ended", "--line-0"), rate("by the proxy's count", "proxy_requests_ended", "--line-1")),
  kv: { ...ofEngine("KV cache in use", percent, row("in use", "kv_cache_usage_ratio", "--line-0")), tick: percent },
  rss: ofRanks("host memory of the workers", "host_rss_bytes"),
  host: { ...ofEngine("host memory that stays", gib, row("stays", "host_kept_bytes", "--line-3")), per: GIB },
};

/** The lines of a chart; of ranks the worst off is bold, and the others are beside it. */
function linesOf(chart, ranks) {
  if (chart.lines) return chart.lines.map((line) => ({ ...line, bold: true, format: chart.format }));
  const [worst] = ranks;
  return [...ranks].reverse().map((rank) => ({
    name: rankName(rank, ranks),
    variable: rank === worst ? "--line-0" : "--line-8",
    bold: rank === worst,
    format: gib,
    value: (reading) => rankIn(reading, rankKey(rank))?.[chart.byRank],
  }));
}

function movedPanel(theme) {
  const { report, place } = state;
  const shown = Object.hasOwn(CHARTS, place.chart) ? place.chart : "free";
  const chart = CHARTS[shown];
  const ranks = worstFirst(report);
  const [worst] = ranks;
  const pressure = chart.hasWaters && worst ? pressureOf(report, worst) : null;
  const waters = [
    { value: pressure?.high_free_bytes, variable: "--high", name: "acts at" },
    { value: pressure?.low_free_bytes, variable: "--low", name: "stops at" },
  ].filter(({ value }) => known(value));
  const [from, to] = shownTime();
  const series = shownSeries();
  const waterText = waters.map(({ name, value }) => `, ${name} ${gib(value)}`).join("");
  const now = worst && chart.byRank ? `: ${rankName(worst, ranks)} ${gib(series.last && rankIn(series.last, rankKey(worst))?.[chart.byRank])}${waterText}` : "";
  const first = series.rows[0]?.at;
  const choose = (event) => location.assign(hrefOf(place, { chart: event.target.value }));
  return panel(
    "moved",
    "What moved",
    html`<select aria-label="Shown" value=${shown} onChange=${choose}>
        ${Object.entries(CHARTS).map(([key, { name }]) => html`<option key=${key} value=${key}>${name}</option>`)}
      </select>
      ${first - from > (to - from) / 4 ? html`<span class="aside">known since ${clock(first).slice(0, -3)}</span>` : null}
      ${timeSwitch()}`,
    series.rows.length
      ? html`<${Chart} ...${chart} lines=${linesOf(chart, ranks)} series=${series} time=${[from, to]} waters=${waters} theme=${theme}
          label="${chart.name} in the last ${duration(to - from)}${now}"
          stamp=${stampOf(theme, [from, to], place.chart, worst ? rankKey(worst) : "")} />`
      : html`<p class="empty">Nothing has been read yet.</p>`,
  );
}

/** How far a start is, if it takes as long as the last one. */
function soFar({ loading_since: since, last_start_seconds: last }) {
  if (!known(since) || !known(last)) return null;
  const seconds = Date.now() / 1000 - since;
  return html`<label class="so-far">${duration(seconds)} of ${duration(last)}, the last start's time<progress max=${last} value=${Math.min(seconds, last)}></progress></label>`;
}

/** The stages of a start, rank by rank, as their recorders have them. */
function stagesPanel() {
  const ranks = (state.report.start_failure?.ranks ?? state.report.ranks.map((rank) => ({ ...rank, phases: rank.start }))).filter(({ phases }) => phases?.length);
  if (!ranks.length) return panel("stages", "The start", null, soFar(state.report.engine), html`<p class="empty">${state.report.start_failure?.summary ?? "No worker reports the stages of its start: that takes recorders."}</p>`);
  const names = [...new Set(ranks.flatMap(({ phases }) => phases.map(({ name }) => name)))];
  const cell = (phase) => (phase ? (phase.error ?? duration(phase.seconds)) : "");
  const took = (rank) => names.map((name) => cell(rank.phases.find((phase) => phase.name === name)));
  const alike = Object.values(Object.groupBy(ranks, (rank) => took(rank).join("|")));
  const rows = alike.map((group) => [group.length > 1 ? `ranks ${numbersOf(group, ranks)}` : rankName(group[0], ranks), ...took(group[0])]);
  return panel("stages", "The start", null, soFar(state.report.engine), table({ caption: "How long each stage took", head: ["rank", ...names.map(words)], rows }));
}

export function nowView(theme) {
  const isStarting = state.report?.verdict.state === "starting";
  return html`<div class="first">
    ${isStarting ? stagesPanel() : movedPanel(theme)}
    <div class="beside">${partsPanel()} ${ranksPanel()}</div>
    ${eventsPanel()}
  </div>`;
}
