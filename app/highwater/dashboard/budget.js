/**
 * The KV cache and the start: why it is that much. The tightest rank's parts with the budget line, what was counted
 * nowhere, the KV cache in requests, and a paragraph to paste.
 */

import { count, gib, gibNumber, known, UNKNOWN } from "./format.js";
import { bar, html, panel, sized, table } from "./html.js";
import { Asked, state } from "./store.js";

const asked = new Asked("memory/budget", 60_000);
/** By the key of a part; the components' colours mean the same. */
const COLOURS = {
  ...{ weights: "--c-weights", kv_cache: "--c-kv-cache", process: "--c-non-torch", non_torch: "--c-non-torch" },
  ...{ persistent: "--c-other-tensors", consumed: "--c-other-tensors", activation: "--c-torch-cached" },
  ...{ profiled: "--c-torch-cached", graphs: "--line-3", mm_ipc: "--line-4", rescaled: "--line-4", unexplained: "--line-5" },
};

export function startView() {
  const { report } = state;
  const answer = asked.now(`${report?.engine.state} ${report?.ranks.map(({ pid }) => pid).join(" ")}`);
  const ranks = answer?.explanation.ranks.filter(({ parts }) => parts.length) ?? [];
  const [rank] = [...ranks].sort((one, other) => (one.available_bytes ?? Infinity) - (other.available_bytes ?? Infinity));
  if (!rank) {
    const text = asked.problem || (answer?.explanation.problems[0] ?? "Not read yet.");
    return panel("budget", "Why it is that much", null, html`<p class="empty">${text}</p>`);
  }
  const pool = answer.explanation.pools.find((one) => one.dp_rank === rank.dp_rank);
  return panel(
    "budget",
    "Why it is that much",
    null,
    budgetBar(rank),
    html`<p class="note-line">${rank.formula ?? ""}</p>`,
    parts(rank),
    pool ? conversations(pool) : null,
    html`<ul class="findings">${answer.findings.map(({ name, title, text }) => html`<li key=${name}><b>${title}</b> ${text}</li>`)}</ul>`,
    html`<p class="paste">${answer.explanation.paragraph}</p>`,
  );
}

function budgetBar(rank) {
  const shown = rank.parts
    .filter(({ key, bytes }) => bytes > 0 && COLOURS[key])
    .map(({ key, title, bytes }) => ({ key, name: title, bytes, colour: COLOURS[key] }));
  const words = shown.map(({ name, bytes }) => `${name} ${gib(bytes)}`).join(", ");
  const budget = `budget ${gib(rank.requested_bytes)}`;
  const lines = known(rank.requested_bytes) ? [{ bytes: rank.requested_bytes, title: budget, kind: "limit" }] : [];
  return bar(shown, rank.total_bytes, lines, `${words}; ${budget} of ${gib(rank.total_bytes)}`);
}

function parts(rank) {
  const rows = [
    ["total", rank.total_bytes, "", ""],
    ["requested", rank.requested_bytes, "", ""],
    ...rank.parts.map((part) => [part.title, part.bytes, part.grade, part.why]),
    ...rank.uncounted.map((part) => [part.title, part.bytes, "counted nowhere", part.why]),
    ["left outside the budget", rank.left_bytes, "", ""],
  ]
    .filter(([, bytes]) => known(bytes))
    .map(([title, bytes, ...rest]) => [title, sized(bytes), ...rest]);
  const caption = `Rank ${rank.rank ?? UNKNOWN}: the budget of its start, in GiB`;
  return table({ caption, head: ["part", "GiB", "grade", "what it is"], rows, numeric: [1], wide: [3] });
}

function conversations(pool) {
  const rows = pool.conversations.map(({ tokens, bytes, requests }) => [count(tokens), gibNumber(bytes), requests.toLocaleString("en-US")]);
  const caption = `The KV cache: ${count(pool.blocks)} blocks, ${count(pool.tokens)} tokens as vLLM prints it`;
  return table({ caption, head: ["tokens", "GiB each", "requests at once"], rows, numeric: [1, 2] });
}
