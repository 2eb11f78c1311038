/**
 * What an operator can do here: mark a moment, give memory back, and see what that did, or why it was refused.
 */

import { hasToken, post, Refusal, useToken } from "./api.js";
import { byId, el, fill, setText } from "./dom.js";
import { duration, gib, joined, words } from "./format.js";
import { freedParts, freedRanks } from "./events.js";

const RESETS = [
  {
    path: "reset_encoder_cache",
    frees: "encoder outputs on the device; with release after it, the device sees the bytes too",
  },
  { path: "reset_mm_cache", frees: "processed images in host memory; no device memory at all" },
  { path: "reset_prefix_cache", frees: "KV blocks of cached prefixes, for new requests; no device memory at all" },
];
const MIN_KEPT = 32 * 1024 * 1024;
const UNAUTHORIZED = 401;
const FORBIDDEN = 403;

/** The panel, and the token. */
export class Controls {
  constructor(box, announce) {
    this.announce = announce;
    this.busy = false;
    this.result = el("div", { class: "result", role: "status", "aria-label": "What it did" });
    const field = { id: "mark-name", type: "text", maxlength: "128", placeholder: "before bench", autocomplete: "off" };
    this.name = el("input", field);
    this.mode = el(
      "select",
      { id: "mode" },
      el("option", { value: "safe" }, "safe: harms no request"),
      el("option", { value: "now" }, "now: as vLLM does it"),
    );
    box.append(this.#marking(), this.#reclaiming(), this.#resetting(), this.result);
    this.#tokenDialog();
  }

  #marking() {
    const form = el(
      "form",
      { class: "row", id: "mark-form" },
      el("label", { for: "mark-name" }, "Mark this moment"),
      this.name,
      el("button", { type: "submit" }, "Mark"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const name = this.name.value.trim();
      if (!name) {
        this.#say("Give the mark a name, for example “before bench”.", "warn");
        this.name.focus();
        return;
      }
      this.#do(
        "Marking",
        () => post("memory/marks", { name }),
        () => {
          this.name.value = "";
          this.#say(`Marked “${name}”.`, "good", [`/memory?since=${name} tells what changed since, by component.`]);
        },
      );
    });
    return form;
  }

  #reclaiming() {
    const reclaim = (dry_run) => () =>
      this.#confirmed(
        "Reclaim",
        () =>
          this.#do(
            dry_run ? "Asking what it would do" : "Reclaiming",
            () => post("memory/reclaim", { mode: this.mode.value, dry_run }),
            (body) => this.#told(body, dry_run),
          ),
        dry_run,
      );
    return el(
      "div",
      { class: "row" },
      el("button", { type: "button", class: "primary", id: "reclaim", onclick: reclaim(false) }, "Reclaim memory"),
      el("button", { type: "button", id: "dry-run", onclick: reclaim(true) }, "What would it do?"),
      el("span", { class: "pair" }, el("label", { for: "mode" }, "Mode"), this.mode),
    );
  }

  #resetting() {
    const reset = (path) => () =>
      this.#confirmed(words(path), () =>
        this.#do(
          words(path),
          () => post(`${path}?mode=${this.mode.value}`),
          (body) => this.#told({ results: [body] }, false),
        ),
      );
    const rows = RESETS.map(({ path, frees }) => {
      const button = { type: "button", id: path, "aria-describedby": `${path}-frees`, onclick: reset(path) };
      return el("li", {}, el("button", button, words(path)), el("span", { id: `${path}-frees` }, `frees ${frees}`));
    });
    return el("ul", { class: "resets" }, ...rows);
  }

  /** In mode now, ask first. */
  #confirmed(what, then, harmless = false) {
    if (this.mode.value === "safe" || harmless) {
      then();
      return;
    }
    const dialog = byId("confirm-dialog");
    const form = byId("confirm-form");
    setText(
      byId("confirm-text"),
      `${what} in mode “now” does not wait for a moment in which it harms nobody: requests under way may be cut short or slowed down, as with vLLM's own call. “safe” waits for one, or refuses.`,
    );
    form.onsubmit = (event) => {
      event.preventDefault();
      dialog.close();
      then();
    };
    byId("confirm-cancel").onclick = () => dialog.close();
    dialog.showModal();
  }

  /** One control call, with the token asked for where it is needed, and every refusal shown with its reason. */
  async #do(doing, call, done) {
    if (this.busy) return;
    this.#busy(true);
    this.#say(`${doing}…`, "quiet");
    try {
      done(await call());
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      if (error.status === UNAUTHORIZED) this.#askToken(error.message, () => this.#do(doing, call, done));
      else this.#refused(error);
    } finally {
      this.#busy(false);
    }
  }

  #busy(busy) {
    this.busy = busy;
    this.result.setAttribute("aria-busy", String(busy));
    for (const button of this.result.parentElement.querySelectorAll("button"))
      button.disabled = busy;
  }

  #refused({ status, message, body }) {
    if (status === FORBIDDEN) {
      this.#say("The sidecar has no admin token", "bad", [message]);
    } else if (body?.results) this.#told(body, Boolean(body.dry_run));
    else if (body?.outcome) this.#told({ results: [body] }, false);
    else this.#say(status === 0 ? "It could not be asked" : "Refused", "bad", [message]);
  }

  #told({ results }, dry) {
    const refused = results.every(({ outcome }) => outcome === "refused");
    const freed = results
      .filter(({ outcome }) => outcome === "done")
      .reduce((sum, { credited_bytes: bytes }) => sum + (bytes?.total ?? 0), 0);
    const done = results.some(({ outcome }) => outcome === "done");
    const failed = results.some(({ outcome }) => outcome === "failed");
    const what = freed > 0 ? `Gave back ${gib(freed)}` : done ? "Done: it gave no device memory back" : "Nothing was given back";
    this.#say(
      dry ? "What it would do" : refused ? "Refused" : what,
      refused || failed ? "bad" : freed > 0 ? "good" : "quiet",
      results.map((result) => outcome(result, dry)),
    );
  }

  #say(title, level, lines = []) {
    this.result.dataset.level = level;
    fill(
      this.result,
      el("strong", {}, title),
      ...lines.map((line) => (line instanceof Node ? line : el("p", {}, line))),
    );
  }

  // --- the token ---

  #tokenDialog() {
    this.dialog = byId("token-dialog");
    this.input = byId("token-input");
    this.again = () => {};
    byId("token-button").addEventListener("click", () => this.#askToken("", () => this.#tokenKept()));
    byId("token-cancel").addEventListener("click", () => this.dialog.close());
    byId("token-forget").addEventListener("click", () => {
      useToken(null);
      this.dialog.close();
      this.#tokenKept();
    });
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      useToken(this.input.value);
      this.dialog.close();
      this.#tokenKept();
      this.again();
    });
    this.dialog.addEventListener("close", () => {
      this.input.value = "";
    });
  }

  #askToken(problem, again) {
    const wrong = problem && hasToken();
    if (wrong) useToken(null);
    this.#tokenKept();
    this.again = again;
    setText(
      byId("token-problem"),
      wrong ? "The sidecar does not accept this token. Where it runs, highwater token prints the right one." : "",
    );
    byId("token-forget").hidden = !hasToken();
    if (problem) this.#say("This needs the admin token", "warn", [problem]);
    this.dialog.showModal();
    this.input.focus();
  }

  #tokenKept() {
    setText(byId("token-button"), hasToken() ? "Token in use" : "Admin token");
    byId("token-button").dataset.held = String(hasToken());
  }
}

/** One remedy's fate. */
function outcome(result, dry) {
  const { remedy, outcome: became, reason, freed_bytes: freed, quiesced_by: by, held_seconds: held, seconds } = result;
  const together = freed?.ranks?.length > 1 ? `, ${freed.ranks.length} ranks together` : "";
  const words_ =
    became === "done" && !dry
      ? `gave back ${gib(result.credited_bytes?.total)}${together} in ${duration(seconds)}`
      : dry && became !== "refused"
        ? "would run"
        : became;
  const how = { gate: "with new requests held", nothing: "" }[by] ?? "";
  return el(
    "div",
    { class: "one-result", "data-outcome": became },
    el(
      "p",
      {},
      el("b", {}, words(remedy)),
      `: ${joined(", ", words_, how, held && `requests waited ${duration(held)}`)}`,
    ),
    freed && became === "done" && freedParts(freed.components)
      ? el("p", {}, `${gib(freed.total)} less in use now: ${freedParts(freed.components)}`)
      : null,
    freed && became === "done" && freedRanks(freed.ranks) ? el("p", {}, freedRanks(freed.ranks)) : null,
    became === "done" && freed?.components.torch_cached_bytes < -MIN_KEPT
      ? el(
          "p",
          {},
          `PyTorch's allocator keeps ${gib(-freed.components.torch_cached_bytes)} of that; release, the first part of “Reclaim memory”, gives it back to the device.`,
        )
      : null,
    reason ? el("p", { class: "reason" }, reason) : null,
    el("p", { class: "fine" }, `It can free ${result.frees}; not ${result.does_not_free}.`),
  );
}
