/**
 * The policy: its rules, how each rank stands to them, and changing it. And what gives memory back by hand.
 */

import { act, confirmed, isBusy, reclaim, reset, say } from "./actions.js";
import { put } from "./api.js";
import { GAIN_FIELDS, RESETS, WORDS } from "./facts.js";
import { actionsText, clock, gib, gibNumber, joined, known, signalValue, words } from "./format.js";
import { html, panel, table } from "./html.js";
import { rankName, total } from "./model.js";
import { Asked, changed, state } from "./store.js";

const asked = new Asked("policy", 60_000);
const LEVELS = { calm: "good", short: "warn", urgent: "bad" };
const SIZES = ["free", "acts at", "stops at", "missing", ...Object.keys(GAIN_FIELDS).map((name) => `${words(name)} can give`)];

let mode = "safe";
let edited = null; // the text of the rules, while somebody changes them

export function policyView() {
  const { report } = state;
  const policy = report?.policy;
  const source = asked.now(`${policy?.mode} ${policy?.rules.map(({ name }) => name).join(" ")}`);
  return html`${byHand()}
  ${
    policy
      ? panel(
          "policy",
          "Policy",
          html`<span class="tag" data-level=${LEVELS[policy.level] ?? "quiet"}>${WORDS[policy.level]}</span>`,
          html`<p>${joined(" ", `${policy.summary}.`, policy.mode === "observe" ? "It only watches." : "It may act by itself.", `${actionsText(policy, report.sidecar_started_at)}.`, source && `From ${words(source.source)}${source.kept_in ? `, kept in ${source.kept_in}` : ""}.`)}</p>`,
          policy.rules.length ? rulesTable(policy.rules) : html`<p class="empty">No rules: nothing is done by itself.</p>`,
          ranksTable(policy.rules),
          editor(policy, source),
        )
      : panel("policy", "Policy", null, html`<p class="empty">${asked.problem || "Not known."}</p>`)
  }`;
}

function byHand() {
  const run = (path) => () => confirmed(words(path), mode, () => reset(path, mode));
  return panel(
    "by-hand",
    "Give it back by hand",
    null,
    html`<p class="row">
      <button type="button" class="primary" disabled=${isBusy()} onClick=${() => reclaim("memory/reclaim", { mode })}>Reclaim memory</button>
      <label for="mode">Mode</label>
      <select id="mode" value=${mode} onChange=${(event) => ((mode = event.target.value), changed())}>
        <option value="safe">safe: harms no request</option>
        <option value="now">now: as vLLM does it</option>
      </select>
    </p>`,
    html`<ul class="resets">${RESETS.map(
      ({ name, frees, keeps }) => html`<li key=${name}><button type="button" disabled=${isBusy()} aria-describedby="${name}-frees" onClick=${run(name)}>${words(name)}</button> <span id="${name}-frees">frees ${frees}; not ${keeps}</span></li>`,
    )}</ul>`,
  );
}

function rulesTable(rules) {
  const rows = rules.map((rule) => {
    const since = rule.since ? ` since ${clock(rule.since)}` : "";
    const rests = rule.rest_until ? `, waits until ${clock(rule.rest_until)}` : "";
    return [
      rule.name,
      words(rule.signal),
      ...[rule.value, rule.high_water, rule.low_water].map((value) => signalValue(rule.signal, value)),
      html`${WORDS[rule.phase]}${since}${rests}${rule.reason ? html`<br />${rule.reason}` : null}`,
      html`<ul>${rule.remedies.map((remedy) => html`<li key=${remedy.name}>${remedyText(remedy, rule.ranks)}</li>`)}</ul>`,
    ];
  });
  return table({ caption: "Rules", head: ["rule", "signal", "now", "acts at", "stops at", "state", "remedies"], rows, numeric: [2, 3, 4], wide: [5, 6] });
}

/** What a remedy could give, and how it went last. */
function remedyText(remedy, ranks) {
  const gain = GAIN_FIELDS[remedy.name];
  const could = gain ? total(ranks.map((one) => one[gain])) : null;
  const freed = remedy.last_freed_bytes === null ? "" : `, gave back ${gib(remedy.last_freed_bytes)}`;
  const why = remedy.last_reason ? ` (${remedy.last_reason})` : "";
  const last = remedy.last_run_at === null ? "not run yet" : `${remedy.last_outcome ?? "run"} ${clock(remedy.last_run_at)}${freed}${why}`;
  const not = remedy.unavailable && `not by itself here: ${remedy.unavailable}`;
  return joined("; ", `${words(remedy.name)}: ${last}`, known(could) && `could give ${gib(could)}`, not);
}

function ranksTable(rules) {
  const rows = rules.flatMap((rule) =>
    rule.ranks.map((one) => [
      rankName(one, rule.ranks),
      rule.name,
      ...[one.free_bytes, one.high_free_bytes, one.low_free_bytes, one.short_bytes].map(gibNumber),
      ...Object.values(GAIN_FIELDS).map((field) => gibNumber(one[field])),
      one.note ?? "",
    ]),
  );
  if (!rows.length) return null;
  return table({ caption: "Each rank, in GiB", head: ["rank", "rule", ...SIZES, "note"], rows, numeric: SIZES.map((_, index) => index + 2), wide: [SIZES.length + 2] });
}

/** Sends a change of the policy; the sidecar validates it whole. */
function change(body) {
  return act("Changing the policy", () => put("policy", body), (answer) => {
    Object.assign(asked, { value: answer });
    edited = null;
    say("The policy is changed", "good", [`mode ${answer.mode}, ${answer.rules.length} rules${answer.kept_in ? `, kept in ${answer.kept_in}` : ", until the next restart"}`]);
  });
}

function editor(policy, source) {
  const other = policy.mode === "act" ? "observe" : "act";
  const send = (event) => {
    event.preventDefault();
    try {
      change({ rules: JSON.parse(edited) });
    } catch {
      say("That is no JSON", "bad", ["Rules are a list of objects, as GET /policy has them."]);
    }
  };
  return html`<div class="row">
      <button type="button" disabled=${isBusy()} onClick=${() => change({ mode: other })}>${other === "observe" ? "Observe only" : "Let it act"}</button>
      ${edited === null && source ? html`<button type="button" onClick=${() => ((edited = JSON.stringify(source.rules, null, 2)), changed())}>Change the rules</button>` : null}
    </div>
    ${edited === null ? null : html`<form onSubmit=${send}>
      <label for="rules">Rules, as JSON</label>
      <textarea id="rules" rows="14" spellcheck=${false} value=${edited} onInput=${(event) => (edited = event.target.value)}></textarea>
      <p class="row"><button type="submit" class="primary" disabled=${isBusy()}>Save the rules</button>
        <button type="button" onClick=${() => ((edited = null), changed())}>Cancel</button></p>
    </form>`}`;
}
