/**
 * What is the matter and what to do, in a sentence each, above all else; and the pills at the top.
 */

import { el, fill, setAttribute, setText } from "./dom.js";
import { GAIN_FIELDS, STATES } from "./facts.js";
import { clock, count, duration, gib, joined, known, UNKNOWN, words } from "./format.js";
import { rankName } from "./plots.js";
import { shortRanks } from "./pressure.js";

/** Of each state of the engine: the word in its pill, and the title and the advice of its notice. */
const STATE_TEXTS = {
  ready: ["ready"],
  starting: [
    "starting",
    "The engine has not answered yet",
    "It may be loading its model. What you see here is all that is known until it answers.",
  ],
  paused: [
    "paused",
    "The engine is paused: it takes requests and runs none",
    "If nobody resumes it, POST /resume to vLLM does.",
  ],
  sleeping: ["sleeping", "The engine sleeps: its weights are off the device", "POST /wake_up to vLLM brings it back."],
  busy: ["busy", "The engine is busy: requests wait for a long step or call", "It goes on by itself."],
  slow: ["slow", "The engine's API server is slow to answer", "It goes on with what it has."],
  stuck: [
    "is stuck",
    "The engine is stuck: no request goes on",
    "Its /health may say 200 all the same. See the incidents below, and restart it if nothing else lets it go on.",
  ],
  not_answering: [
    "does not answer",
    "The engine does not answer",
    "Its /health may say 200 all the same. See the incidents below, and restart it if it does not go on.",
  ],
  gone: [
    "is gone",
    "The engine is gone",
    "Is vLLM running, and is engine_url right? The figures below are the last that were read.",
  ],
  stopped: ["stopped in order", "The engine was stopped in order", "Nothing failed: start it again to have it back."],
};
const VERDICT_LEVEL = { progressing: "good", idle: "quiet", busy: "warn", stuck: "bad", unknown: "quiet" };

const RANKS_TOLD = 4;
const RESTART_TOLD_SECONDS = 900;

/** @typedef {{state: "connecting" | "live" | "lost", reason: string, retryAt: number, since: number}} Connection */

/** A state's row of those, and its level: `level` in `EngineStatus` says the same of an orderly stop. */
function told({ state, stopped_at: stopped }) {
  return known(stopped) ? [STATE_TEXTS.stopped, "warn"] : [STATE_TEXTS[state] ?? [], STATES[state]?.level ?? "quiet"];
}

/** The pills of the header; what was last known is neither good nor bad now. */
export function writeEngine({ engine, progress: moves }, lastKnown, model, detail, state, progress) {
  setText(model, engine.model ?? "model not known");
  setText(detail, `vLLM ${engine.version ?? UNKNOWN} at ${engine.url}`);
  const [[word = engine.state], level] = told(engine);
  setText(state, joined(", ", `engine ${word}`, lastKnown));
  setAttribute(state, "data-level", lastKnown ? "quiet" : level);
  progress.hidden = !moves || lastKnown !== "";
  if (progress.hidden) return;
  setText(progress, `ranks ${moves.verdict === "unknown" ? "not known to move" : moves.verdict}`);
  setAttribute(progress, "data-level", VERDICT_LEVEL[moves.verdict] ?? "quiet");
  setAttribute(progress, "title", moves.summary);
}

/** The pill that shows how fresh the page is; age is in seconds since the reading, as of now. */
export function writeConnection(pill, connection, report, age) {
  const stale = report !== null && isStale(report, age);
  const state = connection.state === "live" && stale ? "stale" : connection.state;
  setAttribute(pill, "data-state", state);
  setAttribute(pill, "data-level", { live: "good", stale: "warn", lost: "bad", connecting: "quiet" }[state]);
  const read = !Number.isFinite(age)
    ? "nothing read yet"
    : age < 1.5
      ? "read just now"
      : `read ${duration(Math.round(age))} ago`;
  setText(
    pill,
    { live: `live · ${read}`, stale: `stale · ${read}`, lost: `connection lost · ${read}`, connecting: "connecting" }[
      state
    ],
  );
}

function isStale(report, age) {
  return report.stale || (report.taken_at !== null && age > Math.max(30, (report.age_seconds ?? 0) + 20));
}

/** The sentences above all else; unchanged ones are left alone, and figures change in place. */
export class Notices {
  constructor(box) {
    this.box = box;
    this.shape = "";
    this.frame = "";
  }

  update(report, connection, age, incidents, restartedAt) {
    const notices = [
      ...lost(connection, report),
      ...restarted(restartedAt),
      ...engine(report),
      ...stale(report, connection, age),
      ...ranks(report),
      ...policy(report),
      ...recent(incidents),
    ];
    const shape = JSON.stringify(notices);
    if (shape === this.shape) return;
    this.shape = shape;
    // What is said anew is announced anew: where only a figure moved, the text alone is changed.
    const frame = JSON.stringify(notices.map(({ text, items, ...kept }) => ({ ...kept, items: items?.length })));
    if (frame === this.frame) return this.#rewrite(notices);
    this.frame = frame;
    fill(this.box, ...notices.map(written));
  }

  #rewrite(notices) {
    notices.forEach(({ text, items = [] }, index) => {
      const [paragraph, ...lines] = this.box.children[index].querySelectorAll("p, li");
      if (text) setText(paragraph, text);
      items.forEach((item, line) => setText((text ? lines : [paragraph, ...lines])[line], item));
    });
  }
}

function written({ level, name, title, text, items = [], link, live }) {
  return el(
    "div",
    { class: "notice", role: level === "bad" ? "alert" : "status", "data-level": level, "data-notice": name },
    el("strong", {}, title),
    text ? el("p", { "aria-live": live ?? null }, text) : null,
    items.length ? el("ul", { "aria-live": live ?? null }, ...items.map((item) => el("li", {}, item))) : null,
    link ? el("a", { href: link.href }, link.text) : null,
  );
}

function* lost({ state, reason, since }, report) {
  if (state !== "lost") return;
  const as = report ? ` What you see is as of ${clock(since)}.` : "";
  yield {
    level: "bad",
    name: "connection",
    title: "The connection to the sidecar is lost",
    text: `${reason}.${as} This page tries again by itself every few seconds.`,
  };
}

function* restarted(at) {
  if (at === null || Date.now() / 1000 - at > RESTART_TOLD_SECONDS) return;
  yield {
    level: "warn",
    name: "restarted",
    title: `The sidecar restarted at ${clock(at)}: what it knew before is lost`,
    text: "Readings, events, marks and counts of actions begin there. What is older here, this page has kept by itself.",
  };
}

function* engine(report) {
  if (!report) return;
  const { hint, starved, url } = report.engine;
  const [[, title, advice], level] = told(report.engine);
  if (title)
    yield {
      level,
      name: "engine",
      title,
      text: hint && hint !== "not asked yet" ? hint : `${advice} (${url})`,
    };
  else if (hint) yield { level: "warn", name: "hint", title: starved?.length ? "A replica is starved" : "Something is missing", text: hint };
}

function* stale(report, connection, age) {
  if (!report || connection.state !== "live" || !isStale(report, age) || report.taken_at === null) return;
  if (STATES[report.engine.state]?.is_absent) return; // said already
  yield {
    level: "warn",
    name: "stale",
    title: "These figures are stale",
    text: `The last reading is from ${clock(report.taken_at)}. The policy does nothing until there is a fresh one.`,
  };
}

function* ranks(report) {
  if (!report?.ranks_missing.length) return;
  const { engine, progress } = report;
  // As `are_workers_hidden` in model/report.py has it: nothing could show a worker, so none is known to be missing.
  if (!report.ranks.length && !progress && !engine.capabilities.collective_rpc) {
    const text = "There is no worker extension and there are no recorders: whether all ranks run is not known.";
    yield { level: "warn", name: "ranks", title: "The workers cannot be read", text };
    return;
  }
  const there = `${count(report.ranks_reported)} of ${count(report.ranks_expected)} ranks reported`;
  const items = report.ranks_missing.map((rank) => {
    const seen = rank.last_seen_at ? `, last seen ${clock(rank.last_seen_at)} with ${gib(rank.used_bytes)}` : "";
    return `dp ${rank.dp_rank} pp ${rank.pp_rank} tp ${rank.tp_rank}: ${words(rank.status)}${rank.host ? ` on ${rank.host}` : ""}${seen}`;
  });
  yield { level: "warn", name: "ranks", title: `Ranks are missing: ${there}`, items };
}

function* policy(report) {
  const { policy: status } = report ?? {};
  if (!status) return;
  if (status.level === "short" || status.level === "urgent") yield shortage(status);
  for (const rule of status.rules) {
    if (!rule.is_dormant) continue;
    yield { level: "warn", name: "rule", title: `Rule ${rule.name} cannot act`, text: rule.reason ?? "" };
  }
}

function shortage({ level, summary, rules }) {
  const items = rules.flatMap((rule) =>
    shortRanks(rule)
      .slice(0, RANKS_TOLD)
      .map((one) => {
        const name = rankName(one, rule.ranks);
        return `${name}: ${gib(one.free_bytes)} free, ${gib(one.short_bytes)} missing; ${couldGive(one)}`;
      }),
  );
  return {
    level: level === "urgent" ? "bad" : "warn",
    name: "shortage",
    title: level === "urgent" ? "Memory is very short" : "Memory is short",
    text: `${summary}.`,
    items,
    live: "off", // the title is announced; how much it is just now is not, each second anew
  };
}

/** What could be given back on a rank, in words. */
function couldGive(one) {
  const sizes = Object.entries(GAIN_FIELDS).map(([name, field]) => [words(name), one[field]]);
  const gains = sizes.filter(([, size]) => size > 0).map(([name, size]) => `${name} ${gib(size)}`);
  if (gains.length) return `could give: ${gains.join(", ")}`;
  return sizes.every(([, size]) => known(size)) ? "nothing to give back" : "what could be given back is not known";
}

function* recent(incidents) {
  const newest = incidents[0];
  const at = newest ? (newest.last_at ?? newest.at) : null;
  if (!newest || at === null || Date.now() / 1000 - at > 3600) return;
  yield {
    level: "bad",
    name: "incident",
    title: `Incident at ${clock(at)}`,
    text: newest.summary,
    link: {
      href: `memory/incidents/${encodeURIComponent(newest.id)}`,
      text: "What was known, what it means, what to change",
    },
  };
}
