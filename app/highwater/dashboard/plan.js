/**
 * Will it fit? A wish, or other flags, asked of the running engine's own layers; the answer first, then its figures.
 */

import { post, Refusal } from "./api.js";
import { count, gibNumber, known } from "./format.js";
import { html, panel, table } from "./html.js";
import { changed } from "./store.js";

const FLAGS = ["max_model_len", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "kv_cache_dtype"];
const WORDS = { fits: ["It fits", "good"], does_not_fit: ["It does not fit", "bad"] };

let answer = null;
let [asked, problem] = ["", ""];

async function ask(event) {
  event.preventDefault();
  const given = Object.fromEntries(new FormData(event.target));
  const flags = FLAGS.filter((name) => given[name]).map((name) => [name, Number.isFinite(Number(given[name])) ? Number(given[name]) : given[name]]);
  try {
    answer = await post("memory/plan", given.wish ? { wish: given.wish } : Object.fromEntries(flags));
    [asked, problem] = [given.wish || "one request of the whole length", ""];
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    [answer, problem] = [null, error.message];
  }
  changed();
}

export function planView() {
  return panel(
    "plan",
    "Will it fit?",
    null,
    html`<form class="plan-form" onSubmit=${ask}>
      <label for="wish">A wish</label><input id="wish" name="wish" placeholder="8 x 32k" autocomplete="off" />
      <span class="note-line">or other flags:</span>
      ${FLAGS.map((name) => html`<span key=${name} class="pair"><label for=${name}>--${name.replaceAll("_", "-")}</label><input id=${name} name=${name} size="10" autocomplete="off" /></span>`)}
      <button type="submit" class="primary">Plan</button>
    </form>`,
    html`<div role="status" aria-label="The plan">
      ${problem ? html`<p class="problem">${problem}</p>` : null}
      ${answer ? shown(answer) : null}
    </div>`,
  );
}

function shown({ status, kv_cache: kv, command_line: line, notes, road }) {
  const [title, level] = WORDS[status] ?? [status.replaceAll("_", " "), "warn"];
  const [low, high] = [kv.available_bytes_low, kv.available_bytes_high].map((bytes) => gibNumber(bytes ?? kv.available_bytes));
  const there = low === high ? low : `${low} to ${high}`;
  const rows = [
    ["tokens", count(kv.tokens)],
    ["requests at once", known(kv.max_concurrency) ? kv.max_concurrency.toFixed(2) : "–"],
    ["longest that fits", count(kv.max_model_len_that_fits)],
  ];
  return html`<p class="answer" data-level=${level}><b>${title}</b>${known(kv.needed_bytes) ? `: ${asked} needs ${gibNumber(kv.needed_bytes)} of ${there} GiB of KV cache` : ""}</p>
    ${kv.refusal ? html`<p class="problem">${kv.refusal}</p>` : null}
    ${line ? html`<pre class="paste">${line}</pre>` : null}
    ${table({ caption: road, head: ["the KV cache", ""], rows, numeric: [1] })}
    <ul class="findings">${notes.map((note) => html`<li>${note}</li>`)}</ul>`;
}
