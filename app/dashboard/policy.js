/**
 * The policy: its rules as they stand, what they did last, and what they may still do.
 */

import { get } from "./api.js";
import { el, fill, scroll, table } from "./dom.js";
import { clock, count, gib, signalValue, UNKNOWN, words } from "./format.js";

const DECISIONS_SHOWN = 6;

/** The panel. */
export class PolicyPanel {
  /** @param {HTMLElement} box */
  constructor(box) {
    this.head = el("div", {});
    this.rules = el("div", {});
    this.decisions = el("div", {});
    box.append(this.head, this.rules, el("h3", {}, "Last decisions"), this.decisions);
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

  /** @param {any} policy as in the report @param {any[]} events newest first */
  update(policy, events) {
    const decisions = events
      .filter((event) => event.kind === "policy" || event.trigger === "policy")
      .slice(0, DECISIONS_SHOWN);
    const decided = decisions.map((event) => `${event.id} ${event.at}`).join();
    if (decided !== this.decided || !this.decisions.childElementCount) {
      this.decided = decided;
      fill(this.decisions, decisionList(decisions));
    }
    const shape = JSON.stringify([policy, this.source?.kept_in]);
    if (shape === this.shape) return;
    this.shape = shape;
    if (!policy) {
      fill(this.head, el("p", { class: "empty" }, "Not known."));
      fill(this.rules);
      return;
    }
    fill(this.head, this.#sentence(policy));
    fill(
      this.rules,
      policy.rules.length
        ? ruleTable(policy.rules)
        : el("p", { class: "empty" }, "No rules: nothing is done by itself."),
    );
  }

  #sentence({ state, mode, budget }) {
    const acts = mode === "observe" ? "It only observes: it decides and records, and does nothing." : "It acts.";
    const spent = budget
      ? ` ${count(budget.started_last_hour)} of ${count(budget.max_actions_per_hour)} actions this hour${budget.used_up ? `: used up${budget.until ? ` until ${clock(budget.until)}` : ""}` : ""}.`
      : "";
    const source = this.source
      ? ` From ${words(this.source.source)}${this.source.kept_in ? `, kept in ${this.source.kept_in}` : ""}.`
      : "";
    return el(
      "p",
      {},
      el(
        "span",
        { class: "pill", "data-level": state === "futile" ? "bad" : state === "below" ? "good" : "warn" },
        words(state),
      ),
      ` ${acts}${spent}${source}`,
    );
  }
}

function decisionList(decisions) {
  if (!decisions.length) return el("p", { class: "empty" }, "None yet.");
  return el(
    "ol",
    { class: "timeline" },
    ...decisions.map((event) => el("li", {}, el("time", {}, clock(event.at)), " ", event.summary)),
  );
}

function ruleTable(rules) {
  const rows = rules.map((rule) => [
    rule.name,
    words(rule.signal),
    signalValue(rule.signal, rule.value),
    signalValue(rule.signal, rule.high_water),
    signalValue(rule.signal, rule.low_water),
    words(rule.phase) + (rule.since ? ` since ${clock(rule.since)}` : ""),
    remedies(rule.remedies),
  ]);
  return scroll(
    "Rules of the policy",
    table({
      caption: "Rules",
      head: ["rule", "signal", "now", "high water", "low water", "state", "remedies"],
      rows,
      numeric: [2, 3, 4],
      wide: [6],
    }),
  );
}

function remedies(list) {
  return el(
    "ul",
    { class: "plain" },
    ...list.map((remedy) => {
      const freed = remedy.last_freed_bytes === null ? "" : `, freed ${gib(remedy.last_freed_bytes)}`;
      const last =
        remedy.last_run_at === null
          ? "not run yet"
          : `${remedy.last_outcome ?? UNKNOWN} ${clock(remedy.last_run_at)}${freed}`;
      const futile = remedy.futile ? `; futile${remedy.retry_at ? ` until ${clock(remedy.retry_at)}` : ""}` : "";
      return el("li", { title: remedy.last_reason ?? "" }, `${words(remedy.name)}: ${last}${futile}`);
    }),
  );
}
