/**
 * What the page knows: reports, events, readings and the connection, and what is asked of the sidecar for them.
 */

import { get } from "./api.js";
import { STATES } from "./facts.js";
import { known } from "./format.js";
import { follow } from "./live.js";
import { placeOf, SPANS } from "./place.js";
import { breakAt, readingOf, Series } from "./series.js";

const EVENTS_KEPT = 300;
const MAX_RANK_READINGS = 3000; // asked for at once: writing more would hold up the sidecar's streams
const MAX_POINTS = 600;
const MIN_SECONDS = 60; // shown, where less is known
const FINE_SECONDS = 300;
const ANEW_MS = 60_000;
const NO_INCIDENTS = { incidents: [], problem: null };

export const state = {
  report: null,
  receivedAt: 0,
  events: [], // newest first
  incidents: NO_INCIDENTS,
  restartedAt: null, // when a sidecar began that knows nothing of what the one before it told this page
  wasAnswered: false, // whether the sidecar has said what was before, if only that it cannot
  connection: { state: "connecting", reason: "", since: 0 },
  hour: new Series(SPANS["1h"], SPANS["1h"] / MAX_POINTS),
  wide: null, // of the time that is looked at, where that is not in the hour
  place: placeOf(location.hash),
  said: "", // for screen readers: what changed by itself
  action: null, // what the last control call did
  dialog: null,
};

let [listener, requested] = [() => {}, false];

/** Call this once for any number of changes, in time for the next frame. */
export const onChange = (listen) => (listener = listen);

export function changed(changes = {}) {
  Object.assign(state, changes);
  if (requested) return;
  requested = true;
  const show = () => listener((requested = false));
  // A frame where the page is seen; a hidden page is written too, but not in a hurry.
  if (document.hidden) setTimeout(show, 1000);
  else requestAnimationFrame(show);
}

/** Seconds since the workers were read, as of now; NaN before the first reading. */
export function age() {
  const { report, receivedAt } = state;
  if (report?.taken_at == null) return NaN;
  return (report.age_seconds ?? 0) + (Date.now() - receivedAt) / 1000;
}

/** The time that the charts show.  Unix seconds */
export function shownTime() {
  const { place, report } = state;
  if (place.from !== null) return [place.from, place.to];
  const now = state.hour.last?.at ?? report?.taken_at ?? Date.now() / 1000;
  const first = place.t ? -Infinity : Math.min(state.hour.rows[0]?.at ?? now, now - MIN_SECONDS);
  return [Math.max(now - place.span, first), now];
}

/** The readings of that time. */
export const shownSeries = () => state.wide ?? state.hour;

export function takeReport(report) {
  const was = state.report;
  state.report = report;
  state.receivedAt = Date.now();
  for (const series of [state.hour, ...(state.wide?.isLive ? [state.wide] : [])]) {
    if (report.stale) series.isInterrupted = true;
    else if (report.taken_at !== null) series.add(readingOf(report));
  }
  if (was && was.verdict.state !== report.verdict.state) state.said = report.verdict.sentence;
  if (was?.sidecar_started_at !== report.sidecar_started_at) takeStart(report.sidecar_started_at, was !== null);
  changed();
}

/** The sidecar's start is an event of this page: what is beside it from before is not what the sidecar knows. */
function takeStart(at, isAnother) {
  if (!known(at)) return;
  if (isAnother) {
    // What the one before it kept in memory has no page any more.
    Object.assign(state, { restartedAt: at, incidents: NO_INCIDENTS });
    askIncidents();
  }
  const text = isAnother ? "restarted: what it knew before is lost" : "started: it knows nothing of what was before";
  keepEvents([{ id: 0, at, kind: "sidecar", summary: `sidecar ${text}` }]);
}

/** Add those that are not there yet. A sidecar that started again numbers from 1: the time tells them apart. */
function keepEvents(events) {
  const there = new Set(state.events.map(({ id, at }) => `${id} ${at}`));
  const fresh = events.filter(({ id, at }) => !there.has(`${id} ${at}`));
  state.events = [...fresh, ...state.events]
    .sort((one, other) => other.at - one.at || other.id - one.id)
    .slice(0, EVENTS_KEPT);
  changed();
}

/** Readings since a moment, in steps of so many seconds at least; null where the sidecar does not say. */
async function history(since, step) {
  try {
    const answer = await get(`memory/history?since=${since.toFixed(3)}&step=${step.toFixed(3)}`);
    const begins = [...outages(answer.events), state.report?.sidecar_started_at ?? 0].filter((at) => at > since);
    breakAt(begins.sort((one, other) => one - other), answer.readings);
    return answer;
  } catch {
    return null; // the stream goes on, and the charts with it
  }
}

/** The engine's moves from one state to the next: `{at, from, into}`. */
export const engineMoves = (events) =>
  events.filter((event) => event.state_after).map(({ at, state_before: from, state_after: into }) => ({ at, from, into }));

/** When the engine ended or hung, by the sidecar's events. */
function outages(events) {
  return engineMoves(events).filter(({ into }) => STATES[into]?.is_absent || STATES[into]?.is_hung).map(({ at }) => at);
}

const points = () => Math.min(MAX_POINTS, MAX_RANK_READINGS / Math.max(state.report?.ranks.length ?? 1, 1));

/** After a lost connection only what was missed: what this page still has stays. */
async function askHistory(missedSince) {
  const { hour } = state;
  const now = state.report?.taken_at ?? Date.now() / 1000;
  const since = Math.max(now - hour.seconds, missedSince);
  hour.step = hour.seconds / points();
  const answer = await history(since, (now - since) / points());
  if (answer) hour.merge(answer.readings);
  changed({ wasAnswered: true });
  // The last minutes in all: what is between two readings of an hour's steps may be another engine.
  const fine = answer && (await history(now - FINE_SECONDS, 0));
  if (fine) hour.merge(fine.readings);
  changed();
}

let asked = "";

/** The readings of a longer time than the hour, or of a window of it in finer steps. */
async function askWide() {
  const { place } = state;
  asked = place.t;
  if (place.from === null && place.span <= state.hour.seconds) return changed({ wide: null });
  const [from, to] = shownTime();
  const step = (to - from) / points();
  // The sidecar answers up to now: an old window is given in steps as fine as that allows.
  const answer = await history(from - step, Math.max(step, (Date.now() / 1000 - from) / (points() * 8)));
  if (!answer || asked !== place.t) return undefined;
  const wide = new Series(place.from === null ? place.span : Infinity, step);
  wide.isLive = place.from === null;
  wide.merge(answer.readings);
  return changed({ wide });
}

/** Asked again at the next connection, or within a minute. */
const askEvents = () => get(`memory/events?limit=${EVENTS_KEPT}`).then(({ events }) => keepEvents(events), () => {});
const askIncidents = () => get("memory/incidents").then((incidents) => changed({ incidents }), () => {});

function goTo() {
  const was = state.place;
  changed({ place: placeOf(location.hash) });
  if (was.t !== state.place.t) askWide();
}

/** What a view asks of the sidecar while it is looked at: again after so long, or as soon as it would be another answer. */
export class Asked {
  constructor(path, everyMs) {
    Object.assign(this, { path, everyMs, value: null, problem: "", askedAt: -Infinity, key: "", isAsking: false });
  }

  /** The last answer; it is asked for again where it is old, or where `key` is another. */
  now(key = "") {
    const isOld = key !== this.key || Date.now() - this.askedAt > this.everyMs;
    if (isOld && !this.isAsking && !document.hidden) this.again(key);
    return this.value;
  }

  async again(key = this.key, ask = get) {
    Object.assign(this, { key, isAsking: true, askedAt: Date.now() });
    try {
      this.value = await ask(this.path);
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    } finally {
      this.isAsking = false;
      changed();
    }
  }
}

/** Begin to follow the sidecar. */
export function begin() {
  let missedSince = -Infinity;
  addEventListener("hashchange", goTo);
  setInterval(askIncidents, ANEW_MS);
  askIncidents();
  follow({
    report: takeReport,
    event: (event) => {
      keepEvents([event]);
      if (event.kind === "incident") askIncidents();
    },
    open: () => {
      if (state.connection.state === "lost") state.said = "connected again";
      changed({ connection: { state: "live", reason: "", since: 0 } });
      askEvents();
      // Once the first report is there, which says of how many ranks.
      setTimeout(() => askHistory(missedSince).then(askWide), 0);
    },
    lost: (reason) => {
      const { connection, receivedAt } = state;
      if (connection.state !== "lost") state.said = "the connection to the sidecar is lost";
      const since = connection.state === "lost" ? connection.since : receivedAt / 1000;
      missedSince = state.hour.last?.at ?? -Infinity;
      changed({ connection: { state: "lost", reason, since } });
    },
  });
}
