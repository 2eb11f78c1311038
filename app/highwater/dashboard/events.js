/**
 * What happened: the last resets with what each gave back, everything else, and the incidents.
 */

import { el, fill, scroll, scrollTable, showPanel } from "./dom.js";
import { clock, count, duration, exact, gib, gibNumber, joined, known, outcomeLevel, words } from "./format.js";
import { COMPONENTS } from "./facts.js";
import { rankName } from "./plots.js";

const RESETS_SHOWN = 12;
const EVENTS_SHOWN = 40;
const INCIDENTS_SHOWN = 8;
const KIND_LEVEL = {
  incident: "bad",
  refusal: "warn",
  state: "quiet",
  mark: "mark",
  baseline: "warn",
  recovery: "warn",
  sidecar: "warn",
};

/** What is less in use after a remedy, by component, in words. */
export function freedParts(components) {
  const parts = COMPONENTS.filter(({ field }) => known(components?.[field]) && gibNumber(components[field]) !== "0");
  return parts.map(({ field, name }) => `${name} ${gib(components[field])}`).join(", ");
}

/** The same by rank. */
export function freedRanks(ranks) {
  if (!ranks || ranks.length < 2) return "";
  return ranks.map((rank) => `${rankName(rank, ranks)}: ${gib(rank.used_bytes)}`).join(", ");
}

/** Who asked for it by a control call; empty where nobody did. */
function by(caller) {
  if (!caller) return "";
  return `${caller.address || "unknown address"}, ${caller.by === "token" ? "with the token" : "from this machine"}`;
}

/** Takes events, newest first. */
export function writeResets(box, events) {
  const resets = events.filter((event) => event.result !== null && event.result !== undefined).slice(0, RESETS_SHOWN);
  showPanel(box, resets.length > 0);
  const rows = resets.map(({ at, trigger, rule, result, caller }) => [
    clock(at),
    words(result.remedy),
    el("span", { class: "tag", "data-level": outcomeLevel(result) }, result.outcome),
    el(
      "span",
      { class: "freed", "data-bytes": result.credited_bytes ?? "unknown", title: exact(result.credited_bytes) },
      gibNumber(result.credited_bytes),
    ),
    joined(" · ", freedParts(result.freed_components), freedRanks(result.ranks)) ||
      (result.outcome === "done" ? "nothing" : ""),
    rule ? `policy, ${rule}` : joined(", ", words(trigger ?? ""), by(caller)),
    joined(
      "; ",
      result.seconds && duration(result.seconds),
      result.held_seconds && `held requests for ${duration(result.held_seconds)}`,
      result.reason,
    ),
  ]);
  const head = ["at", "remedy", "outcome", "given back, GiB", "less in use now", "by", "took, and why"];
  const caption = "What each gave back, all ranks together, and what was less in use after it, with all that changed meanwhile";
  fill(box, scrollTable({ caption, head, rows, numeric: [3], wide: [4, 6] }, "Last resets as a table"));
}

function eventLevel({ kind, result }) {
  return result ? outcomeLevel(result) : (KIND_LEVEL[kind] ?? "quiet");
}

/** Takes events, newest first. */
export function writeEvents(box, events) {
  showPanel(box, events.length > 0);
  const items = events
    .slice(0, EVENTS_SHOWN)
    .map((event) =>
      el(
        "li",
        { "data-kind": event.kind },
        el("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
        " ",
        el("span", { class: "tag", "data-level": eventLevel(event) }, event.kind),
        " ",
        event.summary,
        event.caller ? el("span", { class: "caller" }, ` (${by(event.caller)})`) : null,
      ),
    );
  fill(box, scroll("Events, newest first", el("ol", { class: "timeline tall" }, ...items)));
}

/** Takes the response of GET /memory/incidents; null before the first. */
export function writeIncidents(box, listed) {
  if (!listed) return;
  const problem = listed.problem ? [el("p", { class: "problem" }, listed.problem)] : [];
  showPanel(box, problem.length > 0 || listed.incidents.length > 0);
  const items = listed.incidents.slice(0, INCIDENTS_SHOWN).map((incident) => {
    const often = incident.count > 1 ? `, ${count(incident.count)} times` : "";
    const ended = incident.ended_at ? `, over at ${clock(incident.ended_at)}` : "";
    const href = `memory/incidents/${encodeURIComponent(incident.id)}`;
    const link = el("a", { href }, words(incident.kind ?? "incident"));
    const text = `${often}${ended}: ${incident.summary || incident.problem || ""}`;
    return el("li", {}, el("time", {}, clock(incident.at)), " ", link, text);
  });
  fill(box, el("ol", { class: "timeline" }, ...items), ...problem);
}
