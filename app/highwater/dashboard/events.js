/**
 * What happened: acts with what they gave back, what they cost and why; states, marks, incidents. Newest first.
 */

import { partsText, ranksText } from "./actions.js";
import { flagOf } from "./chart.js";
import { clock, count, duration, gib, joined, outcomeLevel, words } from "./format.js";
import { html, panel } from "./html.js";
import { total } from "./model.js";
import { changed, state } from "./store.js";

// Events on the first screen, and beside a verdict of more words; the words of them all and the verdict; of them at least.
const [SHOWN, FEW, LONG_VERDICT, WORDS, MIN_WORDS] = [3, 2, 24, 58, 28];
const QUIET_SECONDS = 2; // states that follow one another closer than this are not told on the first screen
const OUTCOMES = { observed: "would have run" };
const KEPT_AWAY = "highwater-put-away";
const LEVELS = { incident: "bad", refusal: "warn", state: "quiet", mark: "mark", baseline: "warn", recovery: "warn", sidecar: "warn" };

/** The names that this browser keeps of what was put away, with one more; without storage they come back with the page. */
function awayWith(...names) {
  try {
    const kept = [...JSON.parse(localStorage.getItem(KEPT_AWAY) ?? "[]"), ...names].slice(-100);
    if (names.length) localStorage.setItem(KEPT_AWAY, JSON.stringify(kept));
    return new Set(kept);
  } catch {
    return new Set([...away, ...names]);
  }
}

let away = new Set();
away = awayWith();

/** Who asked for it by a control call; empty where nobody did. */
function by({ caller, rule, trigger }) {
  if (rule) return `by rule ${rule}`;
  if (!caller) return trigger ? `by ${words(trigger)}` : "";
  return `${caller.address || "unknown address"}, ${caller.by === "token" ? "with the token" : "from this machine"}`;
}

/** An act in a line: what it gave back, by what, at which cost, and why; in short without the rule, which the why tells, and without what took no second. */
function actText(event, isShort) {
  const { result } = event;
  if (!result) return joined(" ", event.summary, by(event) && `(${by(event)})`);
  const gave = result.outcome === "done" ? (result.credited_bytes > 0 ? `gave back ${gib(result.credited_bytes)}` : "gave nothing back") : (OUTCOMES[result.outcome] ?? result.outcome);
  const waited = result.held_seconds && `requests waited ${duration(result.held_seconds)}`;
  const did = joined(", ", `${gave}: ${words(result.remedy)}`, result.seconds > (isShort ? 1 : 0) && duration(result.seconds), waited, !(isShort && event.why) && by(event), result.reason);
  return joined(". Why: ", did, event.why);
}

/** What was less in use after an act, with all that changed meanwhile. */
function lessText({ result }) {
  const less = result && joined(" · ", partsText(result.freed_components), ranksText(result.ranks));
  return less ? html`<small>less in use now: ${less}</small>` : null;
}

/** Events and incidents, newest first; an incident's own event has no page, and is not told twice. */
function all() {
  const incidents = state.incidents.incidents.map((incident) => ({
    id: incident.id,
    at: incident.last_at ?? incident.at,
    kind: "incident",
    level: incident.ended_at ? "quiet" : "bad",
    href: `memory/incidents/${encodeURIComponent(incident.id)}`,
    summary: incidentText(incident),
  }));
  const events = state.events.filter(({ kind }) => kind !== "incident" || !incidents.length);
  return [...events, ...incidents].sort((one, other) => other.at - one.at);
}

/** Its kind stands before it where its own words do not say it. */
function incidentText({ kind, summary, problem, count: times, ended_at: ended }) {
  const [name, text] = [words(kind ?? "incident"), summary || problem || ""];
  const head = [!text.includes(name) && name, times > 1 && `${count(times)} times`, ended && `over at ${clock(ended)}`];
  return joined(": ", joined(", ", ...head), text);
}

const cut = (all, most) => (all.length > most ? `${all.slice(0, most).join(" ")} …` : all.join(" "));

/** An event as a line; on the first screen in so many words at most. */
function line(event, most) {
  const name = `${event.kind} ${event.id} ${event.at}`;
  const text = actText(event, most);
  const shown = most ? cut(text.split(" "), most) : text;
  const level = event.result ? outcomeLevel(event.result) : (event.level ?? LEVELS[event.kind] ?? "quiet");
  return html`<li key=${name} data-kind=${event.kind}>
    <time datetime=${new Date(event.at * 1000).toISOString()}>${clock(event.at)}</time>
    ${most ? html`<i class="flag" role="img" aria-label=${event.kind} data-kind=${flagOf(event)} data-level=${level}></i>` : html`<span class="tag" data-level=${level}>${event.kind}</span>`}
    <span class="what" title=${text}>${event.href ? html`<a href=${event.href}>${shown}</a>` : shown}${most ? null : lessText(event)}</span>
    ${most && event.kind === "incident" ? html`<button type="button" class="quiet" aria-label="Put this incident away" onClick=${() => changed((away = awayWith(name)) && {})}>✕</button>` : null}
  </li>`;
}

export function eventsPanel() {
  const { sentence, grew, next, step } = state.report?.verdict ?? {};
  const said = joined(" ", sentence, grew, next, step).split(" ").length;
  const told = all().filter((event, index, events) => {
    const newer = events[index - 1];
    const isPassing = event.kind === "state" && ["state", "incident"].includes(newer?.kind) && newer.at - event.at < QUIET_SECONDS;
    return !isPassing && event.kind !== "policy" && !away.has(`${event.kind} ${event.id} ${event.at}`);
  });
  const first = told.slice(0, said > LONG_VERDICT ? FEW : SHOWN);
  const lengths = first.map((event) => actText(event, true).split(" ").length);
  let most = WORDS; // of each, so that all together are not too many
  while (total(lengths.map((length) => Math.min(length, most))) > Math.max(WORDS - said, MIN_WORDS)) most--;
  return panel(
    "events",
    "What happened",
    html`<a class="aside" href="dashboard#events">all</a>`,
    html`<ol class="timeline">${first.map((event) => line(event, most))}</ol>`,
  );
}

const OF_KIND = {
  all: () => true,
  acts: ({ result, kind }) => Boolean(result) || kind === "policy",
  marks: ({ kind }) => kind === "mark",
  states: ({ kind }) => ["state", "sidecar", "recovery", "baseline"].includes(kind),
  incidents: ({ kind }) => kind === "incident",
};
let kindShown = "all";

export function eventsView() {
  const events = all();
  const told = events.filter(OF_KIND[kindShown]);
  const choose = (kind) => () => ((kindShown = kind), changed());
  const choices = Object.keys(OF_KIND).map((kind) => html`<button type="button" key=${kind} aria-pressed=${String(kind === kindShown)} onClick=${choose(kind)}>${kind}</button>`);
  return panel(
    "events-all",
    "What happened",
    html`<div class="switch" role="group" aria-label="Kind">${choices}</div>`,
    told.length ? null : html`<p class="empty">None since ${clock(events[events.length - 1]?.at)}.</p>`,
    state.incidents.problem ? html`<p class="problem">${state.incidents.problem}</p>` : null,
    html`<ol class="timeline" aria-label="Events, newest first">${told.map((event) => line(event))}</ol>`,
  );
}
