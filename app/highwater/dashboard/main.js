/**
 * The page, wired: readings come in, everything that shows something is told.
 */

import { get } from "./api.js";
import { BudgetPanel } from "./budget.js";
import { Controls } from "./controls.js";
import { byId, el, setAttribute, setText } from "./dom.js";
import { repaintAll } from "./charts.js";
import { EncoderPanel } from "./encoder.js";
import { STATES } from "./facts.js";
import { clock, joined, known } from "./format.js";
import { writeEvents, writeIncidents, writeResets } from "./events.js";
import { HostPanel } from "./host.js";
import { follow } from "./live.js";
import { Notices, writeConnection, writeEngine } from "./notices.js";
import { Plots } from "./plots.js";
import { PolicyPanel } from "./policy.js";
import { RankTable, writeLegend } from "./ranks.js";
import { breakAt, readingOf, Readings, SPAN_SECONDS } from "./readings.js";
import { Tiles } from "./tiles.js";

const EVENTS_KEPT = 300;
const MAX_RANK_READINGS = 3000; // asked for at once: writing more would hold up the sidecar's streams
const FINE_SECONDS = 300;
const ANEW_MS = 60_000;
const MAX_HISTORY_WAIT_MS = 3000;
const NO_INCIDENTS = { incidents: [], problem: null };

const readings = new Readings();
let missedSince = -Infinity;
const state = {
  report: null,
  receivedAt: 0,
  events: [], // newest first
  marks: [],
  hasHistory: false, // the charts begin with all that there is, or with what comes where it does not
  wasAnswered: false, // whether the sidecar has said what there is, if only that it cannot
  incidents: null,
  restartedAt: null, // when a sidecar began that knows nothing of what the one before it told this page
  connection: { state: "connecting", reason: "", retryAt: 0, since: 0 },
};

const tiles = new Tiles(byId("now"));
const plots = new Plots(readings, byId("rank-charts"), byId("line-charts"));
const rankTable = new RankTable(byId("rank-table"));
const notices = new Notices(byId("notices"));
const budget = new BudgetPanel(byId("budget"));
const encoder = new EncoderPanel(byId("encoder"));
const host = new HostPanel(byId("host"));
const policy = new PolicyPanel(byId("policy"));
new Controls(byId("controls"), announce);
const legend = byId("legend");
const asOf = [...document.querySelectorAll(".panel-head h2, .tile h2")].map((head) => {
  const note = el("small", { class: "as-of" });
  head.append(" ", note);
  return note;
});

function stateWord({ state, stopped_at: stopped }) {
  return known(stopped) ? "stopped in order" : state;
}

/** For screen readers: what changed by itself. */
function announce(text) {
  setText(byId("announcer"), text);
}

/** Seconds since the workers were read, as of now. */
function age() {
  if (state.report === null || state.report.taken_at === null) return NaN;
  return (state.report.age_seconds ?? 0) + (Date.now() - state.receivedAt) / 1000;
}

// --- what comes in ---

function takeReport(report) {
  const was = state.report;
  state.report = report;
  state.receivedAt = Date.now();
  if (report.stale) readings.isInterrupted = true;
  else if (report.taken_at !== null) readings.add(readingOf(report));
  if (was && was.engine.state !== report.engine.state) announce(`engine ${stateWord(report.engine)}`);
  if (was?.sidecar_started_at !== report.sidecar_started_at) takeStart(report.sidecar_started_at, was !== null);
  request();
}

/** The sidecar's start is an event of this page: what is beside it from before is not what the sidecar knows. */
function takeStart(at, isAnother) {
  if (!known(at)) return;
  if (isAnother) {
    state.restartedAt = at;
    // What the one before it kept in memory has no page any more.
    state.incidents = NO_INCIDENTS;
    writeIncidents(byId("incidents"), state.incidents);
    askIncidents();
  }
  const text = isAnother ? "restarted: what it knew before is lost" : "started: it knows nothing of what was before";
  keepEvents([{ id: 0, at, kind: "sidecar", summary: `sidecar ${text}` }]);
}

function takeEvent(event) {
  keepEvents([event]);
  if (event.kind === "mark") askMarks();
  if (event.kind === "incident") askIncidents();
  if (event.kind === "policy" || event.kind === "baseline") policy.ask();
  request();
}

/** Add those that are not there yet. A sidecar that started again numbers from 1: the time tells them apart. */
function keepEvents(events) {
  const there = new Set(state.events.map(({ id, at }) => `${id} ${at}`));
  const fresh = events.filter(({ id, at }) => !there.has(`${id} ${at}`));
  if (!fresh.length) return;
  state.events = [...fresh, ...state.events]
    .sort((one, other) => other.at - one.at || other.id - one.id)
    .slice(0, EVENTS_KEPT);
  eventsChanged = true;
}

/** An hour in few readings first, then the last minutes in all; after a lost connection only what was missed. */
async function askHistory() {
  const now = state.report?.taken_at ?? Date.now() / 1000;
  const ranks = Math.max(state.report?.ranks.length ?? 1, 1);
  const since = Math.max(now - SPAN_SECONDS, missedSince);
  const coarse = await history(since, (now - since) / Math.min(900, MAX_RANK_READINGS / ranks));
  state.wasAnswered = true;
  beginCharts();
  if (coarse === null) return;
  readings.gapSeconds = Math.max(20, readings.gapSeconds, coarse.step * 4);
  if (coarse.readings.length) readings.replaceFrom(coarse.readings[0].at, coarse.readings);
  request();
  const fine = await history(now - FINE_SECONDS, 0);
  if (fine?.readings.length) readings.replaceFrom(fine.readings[0].at, fine.readings);
  request();
}

function beginCharts() {
  state.hasHistory = true;
  request();
}

async function history(since, step) {
  try {
    const answer = await get(`memory/history?since=${since.toFixed(3)}&step=${step.toFixed(3)}`);
    breakAt([...outages(answer.events), state.report?.sidecar_started_at ?? 0].sort((a, b) => a - b), answer.readings);
    state.marks = answer.marks;
    eventsChanged = true;
    return answer;
  } catch {
    return null; // the stream goes on, and the charts with it
  }
}

/** When the engine ended or hung, by the sidecar's events. */
function outages(events) {
  return events
    .filter(({ kind, summary }) => {
      const traits = kind === "state" ? STATES[summary.match(/^engine \w+ -> (\w+)/)?.[1]] : undefined;
      return traits?.is_absent || traits?.is_hung;
    })
    .map(({ at }) => at);
}

async function askMarks() {
  const answer = await history(Date.now() / 1000 + 3600, 0);
  if (answer) request();
}

async function askEvents() {
  try {
    keepEvents((await get(`memory/events?limit=${EVENTS_KEPT}`)).events);
    request();
  } catch {
    // Asked again at the next connection.
  }
}

async function askIncidents() {
  try {
    state.incidents = await get("memory/incidents");
    writeIncidents(byId("incidents"), state.incidents);
    request();
  } catch {
    // Asked again within a minute.
  }
}

// --- what is shown ---

let requested = false;
let eventsChanged = true;

function request() {
  if (requested) return;
  requested = true;
  // A frame where the page is seen; a hidden page is written too, but not in a hurry.
  if (document.hidden) setTimeout(show, 1000);
  else requestAnimationFrame(show);
}

function show() {
  requested = false;
  const { report, events } = state;
  if (eventsChanged) {
    eventsChanged = false;
    writeResets(byId("resets"), events);
    writeEvents(byId("events"), events);
  }
  showFreshness();
  if (report === null) return;
  tiles.update(report, events, readings);
  rankTable.update(report);
  writeLegend(legend, report.policy?.rules ?? []);
  budget.update(report);
  encoder.update(report);
  host.update(report);
  policy.update(report, events);
  if (!state.hasHistory) return;
  plots.update(state);
  // What a slow sidecar still owes is not on the page yet, although its charts have begun.
  if (state.wasAnswered) document.body.dataset.ready = "true";
}

function showFreshness() {
  const { report, connection, incidents, restartedAt } = state;
  const isLost = connection.state === "lost";
  const lastKnown = isLost && report ? `last known ${clock(connection.since)}` : "";
  if (report) writeEngine(report, lastKnown, byId("model"), byId("engine-detail"), byId("engine-state"), byId("progress"));
  writeConnection(byId("connection"), connection, report, age());
  notices.update(report, connection, age(), incidents?.incidents ?? [], restartedAt);
  for (const note of asOf) setText(note, lastKnown);
  document.body.classList.toggle("old", Boolean(isLost || report?.stale));
  document.body.classList.toggle("lost", isLost);
  const engine = report?.engine;
  const said = isLost ? "no connection" : engine && engine.state !== "ready" ? stateWord(engine) : "";
  document.title = joined(" · ", said, "Highwater", engine?.model);
  setAttribute(byId("favicon"), "href", `dashboard/favicon${isLost ? "-lost" : ""}.svg`);
}

// --- switches ---

/** A group of buttons of which one is pressed. */
function switches(name, choose) {
  const buttons = document.querySelectorAll(`[data-${name}]`);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      choose(button.dataset[name]);
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      request();
    });
  }
}
switches("span", (seconds) => (plots.spanSeconds = Number(seconds)));
switches("scale", (scale) => (plots.scale = scale));

const THEMES = { "": "as the system", light: "light", dark: "dark" };
const { theme } = globalThis;
const themeButton = byId("theme-button");

function showTheme() {
  theme.apply();
  themeButton.title = `Colours: ${THEMES[theme.chosen] ?? ""}`;
  themeButton.setAttribute("aria-label", themeButton.title);
  repaintAll();
}

themeButton.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme.chosen = names[(names.indexOf(theme.chosen) + 1) % names.length];
  try {
    localStorage.setItem("highwater-theme", theme.chosen);
  } catch {
    // No storage: it holds until the page is loaded again.
  }
  showTheme();
});
theme.system.addEventListener("change", showTheme);
showTheme();

// --- on it goes ---

setInterval(showFreshness, 1000);
setTimeout(beginCharts, MAX_HISTORY_WAIT_MS);
setInterval(askIncidents, ANEW_MS);
policy.ask();
askIncidents();
follow({
  report: takeReport,
  event: takeEvent,
  open: () => {
    if (state.connection.state === "lost") announce("connected again");
    state.connection = { state: "live", reason: "", retryAt: 0, since: 0 };
    // What was missed: after a restart of the sidecar there is little of it, and what this page still has stays.
    askEvents();
    setTimeout(askHistory, 0);
  },
  lost: (reason, retryAt) => {
    if (state.connection.state !== "lost") announce("the connection to the sidecar is lost");
    const since = state.connection.state === "lost" ? state.connection.since : state.receivedAt / 1000;
    missedSince = readings.lastAt;
    state.connection = { state: "lost", reason, retryAt, since };
    request();
  },
});

/** For tests, and for whoever looks at this page with a browser's tools. */
export const inspect = { takeReport, readings, plots, state };
