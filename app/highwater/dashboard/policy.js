/**
 * The policy: how memory stands, its rules, how each rank stands to them, and what was done last.
 */

import { get } from "./api.js";
import { el, fill, KeptTable } from "./dom.js";
import { GAIN_FIELDS } from "./facts.js";
import { actionsText, clock, gib, gibNumber, joined, known, signalValue, words } from "./format.js";
import { rankName, total } from "./plots.js";
import { LEVELS } from "./pressure.js";

const DECISIONS_SHOWN = 6;

const RULES = {
  caption: "Rules",
  head: ["rule", "signal", "now", "high water", "low water", "state", "remedies"],
  numeric: [2, 3, 4],
  wide: [5, 6],
};
const GAINS = Object.keys(GAIN_FIELDS).map((name) => `${words(name)} can give`);
const SIZES = ["free", "high water", "low water", "missing", ...GAINS];
const RANKS = {
  caption: "Each rank, in GiB",
  head: ["rank", "rule", ...SIZES, "note"],
  numeric: SIZES.map((_, index) => index + 2),
  wide: [SIZES.length + 2],
};

export class PolicyPanel {
  constructor(box) {
    this.head = el("div", {});
    this.none = el("p", { class: "empty", hidden: true }, "No rules: nothing is done by itself.");
    const [rules, ranks] = [el("div", { class: "lines" }), el("div", {})];
    this.rules = new KeptTable(rules, RULES);
    this.ranks = new KeptTable(ranks, RANKS);
    this.decisions = el("div", {});
    this.tables = el("div", {}, this.none, rules, ranks);
    box.append(this.head, this.tables, el("h3", {}, "Last decisions"), this.decisions);
    this.shape = "";
    this.source = null;
    this.decided = "";
  }

  /** Where the policy comes from is not in the report. */
  async ask() {
    try {
      this.source = await get("policy");
      this.shape = "";
    } catch {
      // The rules themselves are in every report; where they come from can wait.
    }
  }

  /** Takes a report, and events, newest first. */
  update({ policy, sidecar_started_at: startedAt }, events) {
    const decisions = events
      .filter((event) => event.kind === "policy" || event.trigger === "policy")
      .slice(0, DECISIONS_SHOWN);
    const decided = decisions.map((event) => `${event.id} ${event.at}`).join();
    if (decided !== this.decided || !decisions.length) {
      this.decided = decided;
      fill(this.decisions, decisionList(decisions, events.at(-1)));
    }
    const shape = JSON.stringify([policy, this.source?.kept_in, startedAt]);
    if (shape === this.shape) return;
    this.shape = shape;
    if (!policy) {
      fill(this.head, el("p", { class: "empty" }, "Not known."));
      this.tables.hidden = true;
      return;
    }
    fill(this.head, this.#sentence(policy, startedAt));
    this.tables.hidden = false;
    this.none.hidden = policy.rules.length > 0;
    this.rules.box.hidden = !policy.rules.length;
    this.rules.show(policy.rules.map(ruleRow));
    const ranks = policy.rules.flatMap((rule) => rule.ranks.map((one) => rankRow(rule, one)));
    this.ranks.box.hidden = !ranks.length;
    this.ranks.show(ranks);
  }

  #sentence(policy, startedAt) {
    const { level, summary, mode } = policy;
    const acts = mode === "observe" ? "Mode observe: it only watches." : "Mode act: it may act by itself.";
    const source = this.source
      ? ` From ${words(this.source.source)}${this.source.kept_in ? `, kept in ${this.source.kept_in}` : ""}.`
      : "";
    return el(
      "p",
      {},
      el("span", { class: "pill", "data-level": LEVELS[level] ?? "quiet" }, words(level)),
      ` ${summary}. ${acts} ${actionsText(policy, startedAt)}.${source}`,
    );
  }
}

/** The oldest event that is known, of whatever kind, says how far back that is. */
function decisionList(decisions, oldest) {
  if (!decisions.length) return el("p", { class: "empty" }, `None since ${clock(oldest?.at)}.`);
  return el(
    "ol",
    { class: "timeline" },
    ...decisions.map((event) => el("li", {}, el("time", {}, clock(event.at)), " ", event.summary)),
  );
}

function ruleRow(rule) {
  const since = rule.since ? ` since ${clock(rule.since)}` : "";
  const rests = rule.rest_until ? `, cooldown until ${clock(rule.rest_until)}` : "";
  return [
    rule.name,
    words(rule.signal),
    signalValue(rule.signal, rule.value),
    signalValue(rule.signal, rule.high_water),
    signalValue(rule.signal, rule.low_water),
    `${words(rule.phase)}${since}${rests}${rule.reason ? `\n${rule.reason}` : ""}`,
    rule.remedies.map((remedy) => remedyLine(remedy, rule.ranks)).join("\n"),
  ];
}

/** What a remedy could give, and how it went last. */
function remedyLine(remedy, ranks) {
  const gain = GAIN_FIELDS[remedy.name];
  const could = gain ? total(ranks.map((one) => one[gain])) : null;
  const freed = remedy.last_freed_bytes === null ? "" : `, gave back ${gib(remedy.last_freed_bytes)}${remedy.last_freed_ranks.length > 1 ? `, ${remedy.last_freed_ranks.length} ranks together` : ""}`;
  const why = remedy.last_reason ? ` (${remedy.last_reason})` : "";
  const last =
    remedy.last_run_at === null
      ? "not run yet"
      : `${remedy.last_outcome ?? "run"} ${clock(remedy.last_run_at)}${freed}${why}`;
  return joined(
    "; ",
    `${words(remedy.name)}: ${last}`,
    known(could) && `could give ${gib(could)}${ranks.length > 1 ? `, ${ranks.length} ranks together` : ""}`,
    remedy.unavailable && `not by itself here: ${remedy.unavailable}`,
  );
}

function rankRow(rule, one) {
  const waters = [one.free_bytes, one.high_free_bytes, one.low_free_bytes, one.short_bytes];
  const gains = Object.values(GAIN_FIELDS).map((field) => one[field]);
  return [rankName(one, rule.ranks), rule.name, ...[...waters, ...gains].map(gibNumber), one.note ?? ""];
}
