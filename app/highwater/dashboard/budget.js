/**
 * The memory budget: why it is that much. A bar of the tightest rank with the budget line, its parts, what was counted
 * nowhere, the KV cache in requests, and a paragraph to paste.
 */

import { el, fill, scrollTable, setText, showPanel } from "./dom.js";
import { count, gib, known, size, UNKNOWN } from "./format.js";
import { PartsPanel, sized } from "./parts.js";

const ANEW_MS = 60_000;
/** By the key of a part; the colours of the chart above mean the same. */
const COLOURS = {
  weights: "--c-weights",
  process: "--c-non-torch",
  persistent: "--c-other-tensors",
  consumed: "--c-other-tensors",
  activation: "--c-torch-cached",
  non_torch: "--c-non-torch",
  graphs: "--line-3",
  profiled: "--c-torch-cached",
  mm_ipc: "--line-4",
  rescaled: "--line-4",
  kv_cache: "--c-kv-cache",
  unexplained: "--line-5",
};

export class BudgetPanel extends PartsPanel {
  constructor(box) {
    super(box, "memory/budget");
    this.paragraph = el("p", { class: "budget-words" });
    this.life = "";
    box.append(this.bar, this.caption, this.tables, this.findings, this.paragraph);
    setInterval(() => this.ask(), ANEW_MS);
  }

  /** Read again with every start of the engine, and once a minute. */
  update(report) {
    const life = `${report.engine.state} ${report.ranks.map((rank) => rank.pid).join(" ")}`;
    if (life === this.life) return;
    this.life = life;
    this.ask();
  }

  show({ explanation, findings }) {
    const ranks = explanation.ranks.filter((rank) => rank.parts.length);
    showPanel(this.box, ranks.length > 0); // nothing reports its start: the panel takes no room
    if (!ranks.length) return;
    const room = (one) => one.available_bytes ?? Infinity;
    const rank = ranks.reduce((best, one) => (room(one) < room(best) ? one : best));
    this.#draw(rank);
    const pool = explanation.pools.find((one) => one.dp_rank === rank.dp_rank);
    fill(this.tables, parts(rank), ...(pool ? [conversations(pool)] : []));
    fill(this.findings, ...findings.map((one) => el("li", {}, el("b", {}, one.title), ` ${one.text}`)));
    setText(this.paragraph, explanation.paragraph);
  }

  #draw(rank) {
    const shown = rank.parts
      .filter((part) => part.bytes > 0 && COLOURS[part.key])
      .map((part) => ({ key: part.key, name: part.title, bytes: part.bytes, colour: COLOURS[part.key] }));
    this.drawBar(shown, rank.total_bytes, rank.requested_bytes, `budget: ${gib(rank.requested_bytes)}`);
    const words = shown.map((part) => `${part.name} ${size(part.bytes)}`).join(", ");
    this.bar.setAttribute("aria-label", `${words}; budget ${gib(rank.requested_bytes)} of ${gib(rank.total_bytes)}`);
    setText(this.caption, rank.formula ?? "");
  }
}

function parts(rank) {
  const named = [
    ["total", rank.total_bytes, "", ""],
    ["requested", rank.requested_bytes, "", ""],
    ...rank.parts.map((part) => [part.title, part.bytes, part.grade, part.why]),
    ...rank.uncounted.map((part) => [part.title, part.bytes, "counted nowhere", part.why]),
    ["left outside the budget", rank.left_bytes, "", ""],
  ];
  const rows = named
    .filter(([, bytes]) => known(bytes))
    .map(([title, bytes, ...rest]) => [title, sized(bytes), ...rest]);
  const caption = `Rank ${rank.rank ?? UNKNOWN}: the budget of its start`;
  return scrollTable({ caption, head: ["part", "size", "grade", "what it is"], rows, numeric: [1], wide: [3] });
}

function conversations(pool) {
  const rows = pool.conversations.map((one) => [count(one.tokens), size(one.bytes), one.requests.toLocaleString("en-US")]);
  const caption = `The KV cache: ${count(pool.blocks)} blocks, ${count(pool.tokens)} tokens as vLLM prints it`;
  return scrollTable({ caption, head: ["tokens", "size each", "requests at once"], rows, numeric: [1, 2] });
}
