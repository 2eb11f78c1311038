/**
 * What an operator can do here: one control call at a time, with the token asked for where it is needed, and every
 * refusal shown with its reason.
 */

import { hasToken, post, Refusal, useToken } from "./api.js";
import { COMPONENTS } from "./facts.js";
import { duration, gib, gibNumber, joined, known, words } from "./format.js";
import { Component, html } from "./html.js";
import { rankName, total } from "./model.js";
import { changed, state } from "./store.js";

const MIN_KEPT = 32 * 1024 * 1024;
const [UNAUTHORIZED, FORBIDDEN] = [401, 403];

let busy = false;

export const isBusy = () => busy;

/** Say what became of it, at the foot of the page. */
export const say = (title, level, lines = []) => changed({ action: { title, level, lines } });

/** One control call; `done` gets its response. */
export async function act(doing, call, done) {
  if (busy) return;
  busy = true;
  say(`${doing}…`, "quiet");
  try {
    done(await call());
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    if (error.status === UNAUTHORIZED) askToken(error.message, () => act(doing, call, done));
    else refused(error);
  } finally {
    busy = false;
    changed();
  }
}

function refused({ status, message, body }) {
  if (status === FORBIDDEN) say("The sidecar has no admin token", "bad", [message]);
  else if (body?.results) tell(body.results);
  else if (body?.outcome) tell([body]);
  else say(status === 0 ? "It could not be asked" : "Refused", "bad", [message]);
}

/** A reclaim, as the verdict or somebody wants it: what it would give is asked first, which changes nothing. */
export function reclaim(path, body) {
  const then = () => act("Giving memory back", () => post(path, body), ({ results }) => tell(results));
  const ask = ({ results }) => changed({ action: null, dialog: { kind: "reclaim", results, mode: body.mode, then } });
  return act("Asking what it would give back", () => post(`${path}?dry_run=true`, body), ask);
}

export const reset = (path, mode) => act(words(path), () => post(`${path}?mode=${mode}`), (body) => tell([body]));

/** In mode now, ask first. */
export function confirmed(what, mode, then) {
  if (mode === "safe") then();
  else changed({ dialog: { kind: "confirm", what, then } });
}

function tell(results) {
  const done = results.filter(({ outcome }) => outcome === "done");
  const freed = done.reduce((sum, { credited_bytes: bytes }) => sum + (bytes?.total ?? 0), 0);
  const isRefused = results.every(({ outcome }) => outcome === "refused");
  const isBad = isRefused || results.some(({ outcome }) => outcome === "failed");
  const nothing = done.length ? "Done: it gave no device memory back" : "Nothing was given back";
  const title = isRefused ? "Refused" : freed > 0 ? `Gave back ${gib(freed)}` : nothing;
  say(title, isBad ? "bad" : freed > 0 ? "good" : "quiet", results.flatMap(became));
}

/** What is less in use, by component, in words. */
export function partsText(components) {
  const there = COMPONENTS.filter(({ field }) => known(components?.[field]) && gibNumber(components[field]) !== "0");
  return there.map(({ field, name }) => `${name} ${gib(components[field])}`).join(", ");
}

/** The same by rank, where there are several. */
export function ranksText(ranks) {
  if (!ranks || ranks.length < 2) return "";
  return ranks.map((rank) => `${rankName(rank, ranks)}: ${gib(rank.used_bytes)}`).join(", ");
}

/** One remedy's fate, a line each. */
function became(result) {
  const { remedy, outcome, reason, freed_bytes: freed, quiesced_by: by, held_seconds: held, seconds } = result;
  const isDone = outcome === "done";
  const what = isDone ? `gave back ${gib(result.credited_bytes?.total)} in ${duration(seconds)}` : outcome;
  const kept = isDone ? -(freed?.components.torch_cached_bytes ?? 0) : 0;
  return [
    `${words(remedy)}: ${joined(", ", what, by === "gate" && "with new requests held", held && `requests waited ${duration(held)}`)}`,
    isDone && partsText(freed?.components) && `${gib(freed.total)} less in use now: ${partsText(freed.components)}`,
    isDone && ranksText(freed?.ranks),
    kept > MIN_KEPT && `PyTorch's allocator keeps ${gib(kept)} of that; release gives it back to the device.`,
    reason,
  ].filter(Boolean);
}

function mark(name) {
  const told = `/memory?since=${name} tells what changed since, by component.`;
  return act("Marking", () => post("memory/marks", { name }), () => say(`Marked “${name}”.`, "good", [told]));
}

/** What the last call did, until it is put away; while it runs, what it waits for. */
export function result() {
  const { action, report } = state;
  const lines = busy && report?.relief ? [report.relief.text] : (action?.lines ?? []);
  return html`<div class="result ${action ? "" : "empty"}" role="status" aria-label="What it did" aria-busy=${busy ? "true" : "false"} data-level=${action?.level}>
    ${action ? html`<strong>${action.title}</strong>${lines.map((line) => html`<p>${line}</p>`)}
      <button type="button" class="quiet" aria-label="Put this away" onClick=${() => changed({ action: null })}>✕</button>` : null}
  </div>`;
}

// --- dialogs ---

/** Ask for the admin token; `again` is what it was wanted for. */
export function askToken(problem = "", again = () => {}) {
  const isWrong = Boolean(problem) && hasToken();
  if (isWrong) useToken(null);
  if (problem) say("This needs the admin token", "warn", [problem]);
  const text = isWrong ? "The sidecar does not accept this token. Where it runs, highwater token prints the right one." : "";
  changed({ dialog: { kind: "token", problem: text, again } });
}

class Dialog extends Component {
  componentDidMount() {
    this.element.showModal();
    this.element.querySelector(this.props.first ?? "input, button")?.focus();
  }

  render({ name, title, children, submit, onSubmit }) {
    const close = () => changed({ dialog: null });
    return html`<dialog aria-labelledby="${name}-title" onClose=${close} ref=${(element) => (this.element = element)}>
      <form onSubmit=${(event) => (event.preventDefault(), this.element.close(), onSubmit(event.target.elements))}>
        <h2 id="${name}-title">${title}</h2>
        ${children}
        <div class="dialog-buttons">
          <button type="button" class="quiet" onClick=${() => this.element.close()}>Cancel</button>
          ${submit ? html`<button type="submit" class="primary">${submit}</button>` : null}
        </div>
      </form>
    </dialog>`;
  }
}

const CUTS_SHORT = "In mode “now” requests under way may be cut short or slowed down, as with vLLM's own call. “safe” waits for a moment that harms nobody, or refuses.";

function reclaimDialog({ results, mode, then }) {
  const able = results.filter(({ outcome }) => outcome !== "refused");
  const gain = total(able.map(({ can_give_bytes: bytes }) => bytes));
  const text = `Reclaim ${known(gain) ? gib(gain) : "memory"} now`;
  return html`<${Dialog} key="reclaim" name="reclaim" title="${text}?" submit=${able.length ? text : null} first=${mode === "now" ? "button" : "[type=submit]"} onSubmit=${then}>
    <ul class="findings">${results.map(({ remedy, outcome, reason, would }) => html`<li key=${remedy}><b>${words(remedy)}</b> ${outcome === "refused" ? `would be refused: ${reason}` : would}</li>`)}</ul>
    ${mode === "now" ? html`<p>${CUTS_SHORT}</p>` : null}
  <//>`;
}

/** The dialog that is open, if one is. */
export function dialog() {
  const { kind, problem, again, what, then } = state.dialog ?? {};
  if (kind === "reclaim") return reclaimDialog(state.dialog);
  if (kind === "token")
    return html`<${Dialog} key="token" name="token" title="Admin token" submit="Use it" onSubmit=${({ token }) => (useToken(token.value), changed(), again())}>
      <p>Marks, reclaims and resets need it. Where the sidecar runs, <code>highwater token</code> prints it. It stays in this page's memory until you close or reload it.</p>
      <label for="token-input">Token</label>
      <input id="token-input" name="token" type="password" autocomplete="off" spellcheck=${false} required />
      <p class="problem" role="alert">${problem}</p>
      ${hasToken() ? html`<button type="button" class="quiet" onClick=${() => (useToken(null), changed({ dialog: null }))}>Forget it</button>` : null}
    <//>`;
  if (kind === "confirm")
    return html`<${Dialog} key="confirm" name="confirm" title="Do it now?" submit="Do it now" onSubmit=${then}>
      <p>${what}: ${CUTS_SHORT}</p>
    <//>`;
  if (kind === "mark")
    return html`<${Dialog} key="mark" name="mark" title="Mark this moment" submit="Mark" onSubmit=${({ name }) => mark(name.value.trim())}>
      <label for="mark-name">Name</label>
      <input id="mark-name" name="name" maxlength="128" placeholder="before bench" autocomplete="off" required pattern=".*\\S.*" />
    <//>`;
  return null;
}
