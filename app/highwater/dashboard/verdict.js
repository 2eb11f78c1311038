/**
 * The verdict, first of all: what the sidecar judges, in its words, with the one thing to do. This page judges nothing
 * but its own connection.
 */

import { askToken, isBusy, reclaim } from "./actions.js";
import { hasToken } from "./api.js";
import { clock, count, duration, gib, gibNumber, joined, known, percent, words } from "./format.js";
import { html } from "./html.js";
import { worstFirst } from "./model.js";
import { age, changed, state } from "./store.js";

const LEVELS = ["good", "warn", "bad"];

/** The verdict as it is shown: the sidecar's, or that the sidecar is silent. */
export function shown() {
  const { report, connection } = state;
  if (connection.state === "lost") {
    const as = report ? `What you see is as of ${clock(connection.since)}.` : "";
    const sentence = joined(" ", `The connection to the sidecar is lost: ${connection.reason}.`, as);
    return { state: "no connection", level: "bad", sentence, next: "This page tries again by itself every few seconds." };
  }
  if (!report) return { state: "connecting", level: "quiet", sentence: "Nothing has been read yet." };
  return { ...report.verdict, state: words(report.verdict.state), level: LEVELS[report.verdict.exit_status] ?? "quiet" };
}

export const title = () => joined(" · ", shown().state, "Highwater", state.report?.engine.model);

export function verdict() {
  const { state: word, level, sentence, grew, next, step, runbook, do: deed } = shown();
  return html`<section class="verdict" id="verdict" tabindex="-1" data-level=${level} aria-labelledby="verdict-word">
    <h2 id="verdict-word">${word}</h2>
    <div class="verdict-words">
      <p class="sentence">${sentence}</p>
      ${grew || next ? html`<p class="next">${joined(" ", grew, next)}</p>` : null}
      ${step && level !== "good" ? html`<p class="step">${coded(step)} ${deed?.path === runbook ? null : html`<a href=${runbook}>Runbook</a>`}</p>` : null}
    </div>
    <p class="deeds">
      ${deed ? button(deed, level) : null}
      <button type="button" disabled=${isBusy()} onClick=${() => changed({ dialog: { kind: "mark" } })}>Mark</button>
    </p>
  </section>`;
}

/** Text whose commands stand between backticks. */
const coded = (text) => text.split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part));

/** It is loud only where something is the matter. */
function button({ text, path, body }, level) {
  if (path && body)
    return html`<button type="button" class=${level === "good" ? undefined : "primary"} disabled=${isBusy()} onClick=${() => reclaim(path, body)}>${text}</button>`;
  if (path) return html`<a class="button" href=${path}>${text}</a>`;
  return html`<b class="deed">${text}</b>`;
}

/** The figures beside the verdict: of the worst rank, of the load, of the host. */
export function facts() {
  const { report } = state;
  const [worst] = worstFirst(report);
  if (!worst) return null;
  const { engine, host } = report;
  const { cgroup_used_bytes, cgroup_limit_bytes } = worst.host_memory;
  const [used, limit] = host ? [host.kept_bytes, host.limit_bytes] : [cgroup_used_bytes, cgroup_limit_bytes];
  const rows = [
    known(engine.requests_running) && ["requests", count(engine.requests_running), engine.requests_waiting > 0 && `${count(engine.requests_waiting)} waiting`],
    known(engine.kv_cache_usage_ratio) && ["KV used", percent(engine.kv_cache_usage_ratio), ""],
    known(used) && ["host memory", gibNumber(used), known(limit) ? `of ${gib(limit)}` : "GiB kept", `What the engine's container ${host ? "keeps; the kernel can drop the rest" : "uses"}`],
  ].filter(Boolean);
  return html`<dl class="facts" aria-label="Figures">
    ${rows.map(([name, value, of, title]) => html`<div key=${name} title=${title}><dt>${name}</dt><dd><b>${value}</b> ${of || null}</dd></div>`)}
  </dl>`;
}

/** Above it: which engine, how fresh, the token, the colours. */
export function header(changeTheme) {
  const { report, connection } = state;
  const engine = report?.engine;
  return html`<header class="top">
    <a class="brand" href="dashboard#now" aria-label="Highwater, the first screen"><svg viewBox="0 0 32 32" aria-hidden="true"><rect class="brand-box" x="2" y="2" width="28" height="28" rx="7" /><path class="brand-water" d="M2 19c4-4 7-4 10 0s7 4 10 0 6-3 8-2v6a7 7 0 0 1-7 7H9a7 7 0 0 1-7-7z" /><path class="brand-line" d="M7 11h18" /></svg></a>
    <h1>Highwater</h1>
    <p class="engine" title=${engine?.url}>${engine ? html`<b>${engine.model ?? "model not known"}</b> vLLM ${engine.version ?? "–"}` : "…"}</p>
    <p class="fresh" data-state=${freshness()}>${connection.state === "lost" ? "no connection" : readText()}</p>
    <button type="button" class="quiet" onClick=${() => askToken()} data-held=${String(hasToken())}>${hasToken() ? "Token in use" : "Admin token"}</button>
    <button type="button" class="quiet" aria-label="Colours: ${changeTheme.name}" title="Colours: ${changeTheme.name}" onClick=${changeTheme.next}>◐</button>
  </header>`;
}

/** How fresh the figures are: live, stale, or lost. */
export function freshness() {
  const { report, connection } = state;
  if (connection.state !== "live") return connection.state;
  const old = report && (report.stale || age() > Math.max(30, (report.age_seconds ?? 0) + 20));
  return old ? "stale" : "live";
}

function readText(seconds = age()) {
  if (!Number.isFinite(seconds)) return "nothing read yet";
  return seconds < 2 ? "read just now" : `read ${duration(Math.round(seconds))} ago`;
}
