/**
 * What is drawn over time: the stack of each rank, and beside it, on the same axis, what moves with it.
 */

import { Chart } from "./charts.js";
import { el, fill, scrollTable, setText, showPanel, swatch } from "./dom.js";
import {
  clock,
  count,
  decimal,
  duration,
  gib,
  gibNumber,
  GIB,
  joined,
  known,
  outcomeLevel,
  percent,
  signalValue,
  signedGib,
  sumOf,
  words,
} from "./format.js";
import { COMPONENTS } from "./facts.js";
import { lineVariable } from "./palette.js";
import { chosen, rankKey } from "./readings.js";

const MAX_POINTS = 700;
const TABLE_ROWS = 12;
const AHEAD_SECONDS = 60;
const TABLE_EVERY_MS = 5000;
const MAX_LABEL = 14;
// Used this much of a device, its whole is the scale that tells; less, and the areas would lie flat on the floor.
const WHOLE_FROM = 0.4;
const STACK = [...COMPONENTS].reverse(); // painted from the top layer down, each over the one before

/** A chart with its title, and the same as a table for whoever does not see it. */
class Plot {
  constructor(parent, title, kind) {
    this.title = el("h3", {}, title);
    this.sub = el("span", { class: "plot-sub" });
    this.legend = el("ul", { class: "legend", hidden: true });
    this.empty = el("p", { class: "empty", hidden: true });
    this.place = el("div", { class: "plot-place" });
    this.alternative = el(
      "details",
      { class: "alt", ontoggle: () => this.#writeTable(true) },
      el("summary", {}, "As a table"),
    );
    this.figure = el(
      "figure",
      { class: "plot", "data-plot": kind },
      el("figcaption", {}, this.title, this.sub),
      this.legend,
      this.empty,
      this.place,
      this.alternative,
    );
    this.alternative.querySelector("summary").setAttribute("aria-label", `${title} as a table`);
    this.writtenAt = 0;
    this.chart = null;
    this.shape = "";
    parent.append(this.figure);
  }

  show(series, view, options) {
    const nothing = view.data.slice(1).every((row) => row.every((value) => value === null));
    this.empty.hidden = !nothing;
    setText(this.empty, nothing ? "Not known in this span." : "");
    const shape = series.map((one) => `${one.name}${one.variable}${one.filled}`).join();
    if (shape !== this.shape) {
      this.chart?.remove();
      this.chart = new Chart(this.place, series, { ...options, label: this.title.textContent });
      this.shape = shape;
      this.#writeLegend(series);
    }
    this.place.hidden = nothing;
    this.chart.show(view);
    this.chart.describe(options.described);
    this.#writeTable(false);
  }

  remove() {
    this.chart?.remove();
    this.figure.remove();
  }

  #writeLegend(series) {
    this.legend.hidden = series.length < 2 || Boolean(series[0].filled); // the components' is above all stacks
    fill(this.legend, ...series.map(({ name, variable }) => el("li", {}, swatch(variable), name)));
  }

  #writeTable(atOnce) {
    if (!this.alternative.open || !this.chart?.view) return;
    if (!atOnce && Date.now() - this.writtenAt < TABLE_EVERY_MS) return;
    this.writtenAt = Date.now();
    const { data, told } = this.chart.view;
    const step = Math.max(1, Math.ceil(data[0].length / TABLE_ROWS));
    const rows = [];
    for (let index = data[0].length - 1; index >= 0; index -= step) {
      rows.push([
        clock(data[0][index]),
        ...this.chart.series.map((one, row) => {
          const value = (told?.[row] ?? data[row + 1])[index];
          return value === null || value === undefined ? "–" : one.format(value);
        }),
      ]);
    }
    const head = ["time", ...this.chart.series.map((one) => one.name)];
    const caption = `${this.title.textContent}, newest first`;
    const shown = scrollTable({ caption, head, rows, numeric: head.map((_, index) => index).slice(1) });
    fill(this.alternative, this.alternative.firstElementChild, shown);
  }
}

export class Plots {
  constructor(readings, ranks, lines) {
    this.readings = readings;
    this.spanSeconds = 3600;
    this.scale = "auto";
    this.rankBox = ranks;
    this.lineBox = lines;
    this.none = el("p", { class: "empty" });
    ranks.append(this.none);
    this.stacks = new Map();
    this.lines = Object.fromEntries(LINES.map((line) => [line.kind, new Plot(lines, line.title, line.kind)]));
  }

  update(state) {
    const { report } = state;
    if (!report) return;
    const read = report.taken_at === null ? Date.now() / 1000 : report.taken_at + (report.age_seconds ?? 0);
    // What was just done is told before the next reading: it is shown at once.
    const told = Math.max(state.events[0]?.at ?? 0, state.marks[state.marks.length - 1]?.at ?? 0);
    const now = told > read && told < read + AHEAD_SECONDS ? told : read;
    const from = Math.max(now - this.spanSeconds, Math.min(this.readings.firstAt, now - 60));
    const time = ([from, now]);
    this.#stacks(state, time);
    const annotations = annotated(state, null);
    for (const line of LINES) this.#line(line, report, time, annotations);
    showPanel(this.lineBox, Object.values(this.lines).some((plot) => !plot.figure.hidden));
  }

  #stacks(state, time) {
    const { report } = state;
    const keys = report.ranks.map(rankKey);
    for (const [key, plot] of this.stacks) {
      if (keys.includes(key)) continue;
      plot.remove();
      this.stacks.delete(key);
    }
    this.rankBox.classList.toggle("many", report.ranks.length > 2);
    const height = report.ranks.length > 2 ? 180 : 290;
    setText(this.none, report.ranks.length ? "" : "No rank has been read yet.");
    this.none.hidden = report.ranks.length > 0;
    for (const rank of report.ranks) {
      const key = rankKey(rank);
      let plot = this.stacks.get(key);
      if (!plot) {
        plot = new Plot(this.rankBox, rankName(rank, report.ranks), "stack");
        plot.figure.dataset.rank = key;
        this.stacks.set(key, plot);
      }
      const notes = annotated(state, rank);
      const view = this.#stackView(rank, key, time, notes, report.policy?.rules ?? []);
      setText(
        plot.sub,
        `${deviceName(rank)} · ${gib(rank.used_bytes)} of ${gib(rank.total_bytes)} · ${percent(rank.used_ratio)}`,
      );
      const waters = watersTold(report.policy?.rules ?? [], rank);
      const described = `${rankName(rank, report.ranks)}: ${gib(rank.used_bytes)} of ${gib(rank.total_bytes)} used, ${percent(rank.used_ratio)}.${waters} ${told(notes, time)}`;
      plot.show(STACK_SERIES, view, { height, lanes: report.ranks.length > 2 ? 1 : 2, unit: String, described });
    }
  }

  #stackView(rank, key, time, annotations, rules) {
    const { readings } = this;
    const table = readings.ranks.get(key);
    const used = table?.used_bytes ?? new Float64Array(readings.capacity).fill(NaN);
    const indexes = chosen(readings, ...readings.span(...time), MAX_POINTS, (index) => used[index]);
    const data = [times(readings, indexes), ...STACK.map(() => new Array(indexes.length).fill(null))];
    const told = STACK.map(() => new Array(indexes.length).fill(null));
    let most = 0;
    indexes.forEach((index, place) => {
      if (index < 0 || !table || Number.isNaN(used[index])) return;
      let sum = 0;
      for (let layer = STACK.length - 1; layer >= 0; layer--) {
        const value = table[STACK[layer].field][index];
        if (Number.isNaN(value)) continue; // not known is not drawn, and not as 0 either
        sum += value;
        told[layer][place] = value;
        data[layer + 1][place] = sum / GIB;
      }
      most = Math.max(most, sum / GIB);
    });
    const total = rank.total_bytes === null ? null : rank.total_bytes / GIB;
    const whole = this.scale === "device" || (this.scale === "auto" && (rank.used_ratio ?? 0) >= WHOLE_FROM);
    const top = whole && total !== null ? total * 1.03 : most * 1.15 || 1;
    const waters = [...deviceWaters(rules, rank)];
    if (total !== null) waters.push({ value: total, label: "", variable: "--muted", solid: true });
    return { time, range: [0, top], data, told, annotations, waters };
  }

  #line(line, report, time, annotations) {
    const plot = this.lines[line.kind];
    const series = line.series(report);
    plot.figure.hidden = series.length === 0;
    if (!series.length) return;
    const { readings } = this;
    const columns = series.map((one) => one.value(readings));
    const weight = (index) => Math.max(...columns.map((column) => (Number.isNaN(column(index)) ? -1 : column(index))));
    const indexes = chosen(readings, ...readings.span(...time), MAX_POINTS, weight);
    let most = 0;
    let least = Infinity;
    const rows = columns.map((column) =>
      indexes.map((index) => {
        const value = index < 0 ? NaN : column(index);
        if (Number.isNaN(value)) return null;
        most = Math.max(most, value);
        least = Math.min(least, value);
        return value;
      }),
    );
    const waters = line.waters?.(report) ?? [];
    const nothing = rows.every((row) => row.every((value) => value === null));
    plot.figure.hidden = nothing;
    if (nothing) return;
    const view = {
      time,
      range: line.range(least === Infinity ? 0 : least, most),
      data: [times(readings, indexes), ...rows],
      annotations,
      waters,
    };
    const sub = line.sub(report);
    setText(plot.sub, sub);
    plot.show(series, view, {
      height: 150,
      lanes: 0,
      unit: line.unit,
      described: `${line.title}: ${sub}. ${told(annotations, time)}`,
    });
  }
}

const STACK_SERIES = STACK.map(({ name, variable }) => ({ name, variable, filled: true, format: gib }));

function times({ at }, indexes) {
  return indexes.map((index, place) => (index < 0 ? (at[indexes[place - 1]] + at[indexes[place + 1]]) / 2 : at[index]));
}

// --- the charts beside the stacks ---

const zeroTo = (least, most) => ([0, Math.max(most * 1.18, 0.001)]);
const gibTick = (value) => String(value);

/** One line for each rank.  variable of the only rank */
function byRank(variable, value) {
  return (report) =>
    report.ranks.map((rank, index) => ({
      name: rankName(rank, report.ranks),
      variable: report.ranks.length === 1 ? variable : lineVariable(index),
      dashed: index % 2 === 1,
      format: (number) => `${gibNumber(number * GIB)} GiB`,
      value: (readings) => {
        const table = readings.ranks.get(rankKey(rank));
        const read = table ? value(table) : () => NaN;
        return (at) => read(at) / GIB;
      },
    }));
}

function ofEngine(field, name, variable, format) {
  return { name, variable, stepped: true, format, value: (readings) => (index) => readings.engine[field][index] };
}

function aSecond(field, name, variable) {
  return { name, variable, format: decimal, value: (readings) => (index) => readings.rate(field, index) };
}

const hostGib = (number) => `${gibNumber(number * GIB)} GiB`;
const hostKept = (readings) => (index) => readings.engine.host_kept_bytes[index] / GIB;

const LINES = [
  {
    kind: "requests",
    title: "Requests",
    series: () => [
      ofEngine("requests_running", "running", "--line-0", count),
      ofEngine("requests_waiting", "waiting", "--line-1", count),
    ],
    range: (_, most) => [0, Math.max(Math.ceil(most * 1.2), 4)],
    unit: (value) => (Number.isInteger(value) ? String(value) : ""),
    sub: ({ engine }) => `${count(engine.requests_running)} running, ${count(engine.requests_waiting)} waiting`,
  },
  {
    kind: "request-rate",
    title: "Requests ended a second",
    // Short requests run and end between two readings: no chart of what runs at one moment shows them.
    series: ({ proxy }) => [
      aSecond("requests_ended", "by the engine's count", "--line-0"),
      ...(proxy ? [{ ...aSecond("proxy_requests_ended", "by the proxy's count", "--line-1"), dashed: true }] : []),
    ],
    range: zeroTo,
    unit: gibTick,
    sub: ({ engine, proxy }) =>
      joined(
        " · ",
        known(engine.work?.requests) && `${count(engine.work.requests)} since the engine started`,
        proxy && `${count(proxy.requests_ended)} through the proxy since the sidecar started`,
      ),
  },
  {
    kind: "encoder-cache",
    title: "Encoder cache on the device",
    series: byRank("--c-encoder-cache", (table) => (index) => table.encoder_cache_bytes[index]),
    range: zeroTo,
    unit: gibTick,
    waters: ({ policy }) => encoderWaters(policy?.rules ?? []),
    sub: ({ encoder_cache: cache, ranks }) => joined(", ", gib(cache?.device_bytes), sumOf(ranks)),
  },
  {
    kind: "reserved",
    title: "Reserved minus allocated",
    series: byRank(
      "--c-torch-cached",
      (table) => (index) => table.torch_reserved_bytes[index] - table.torch_allocated_bytes[index],
    ),
    range: zeroTo,
    unit: gibTick,
    sub: ({ ranks }) =>
      ranks.some((rank) => known(reservedNotAllocated(rank)))
        ? "fragments, captured graphs, and what release can give back"
        : "PyTorch keeps no statistics here",
  },
  {
    kind: "used",
    title: "Used, rank beside rank",
    series: (report) =>
      report.ranks.length > 1 ? byRank("--c-kv-cache", (table) => (index) => table.used_bytes[index])(report) : [],
    range: (least, most) => [Math.max(least - (most - least) * 0.3 - 0.05, 0), most + (most - least) * 0.3 + 0.05],
    unit: gibTick,
    sub: (report) => `skew ${gib(skew(report.ranks.map((rank) => rank.used_bytes)))}`,
  },
  {
    kind: "host",
    title: "Host memory of the workers (RSS)",
    series: byRank("--line-2", (table) => (index) => table.host_rss_bytes[index]),
    range: zeroTo,
    unit: gibTick,
    sub: ({ ranks }) => joined(", ", gib(total(ranks.map((rank) => rank.host_memory.rss_bytes))), sumOf(ranks)),
  },
  {
    kind: "host-container",
    title: "Host memory of the engine's container that stays",
    series: ({ host }) =>
      known(host?.kept_bytes)
        ? [{ ...ofEngine("host_kept_bytes", "stays", "--line-3", hostGib), stepped: false, value: hostKept }]
        : [],
    range: zeroTo,
    unit: gibTick,
    sub: ({ host }) => (known(host?.limit_bytes) ? `${gib(host.kept_bytes)} of ${gib(host.limit_bytes)}` : gib(host?.kept_bytes)),
  },
  {
    kind: "kv-usage",
    title: "KV cache in use by requests",
    series: () => [{ ...ofEngine("kv_cache_usage_ratio", "KV cache in use", "--c-kv-cache", percent), stepped: false }],
    range: () => [0, 1.05],
    unit: (value) => `${Math.round(value * 100)} %`,
    sub: ({ engine }) => percent(engine.kv_cache_usage_ratio),
  },
];

// --- water lines ---

/** Each rank's device has waters of its own: so many bytes free. */
function* deviceWaters(rules, rank) {
  if (!known(rank.total_bytes)) return;
  for (const one of ownPressures(rules, rank)) {
    // Without words, which would hide what they stand before: the legend has them.
    yield { value: (rank.total_bytes - one.high_free_bytes) / GIB, label: "", variable: "--high" };
    if (known(one.low_free_bytes))
      yield { value: (rank.total_bytes - one.low_free_bytes) / GIB, label: "", variable: "--low" };
  }
}

function watersTold(rules, rank) {
  return ownPressures(rules, rank)
    .map(({ high_free_bytes: high, low_free_bytes: low }) => ` High water ${gib(high)} free, low water ${gib(low)}.`)
    .join("");
}

function ownPressures(rules, rank) {
  return rules
    .flatMap((rule) => rule.ranks)
    .filter((one) => rankKey(one) === rankKey(rank) && known(one.high_free_bytes));
}

/** Of the rules that watch the encoder cache: a rank's own, and so are the lines. */
function encoderWaters(rules) {
  return rules
    .filter((rule) => rule.signal === "encoder_cache_bytes" && known(rule.high_water))
    .map((rule) => ({
      value: rule.high_water / GIB,
      label: `high water ${signalValue(rule.signal, rule.high_water)}`,
      variable: "--high",
    }));
}

// --- annotations ---

const SHOWN_KINDS = new Set(["reset", "refusal", "state", "incident", "snapshot", "recovery", "sidecar"]);

/** Resets, refusals, marks and the engine's states. On a rank's own chart a reset shows what that rank got. */
export function annotated({ events, marks }, rank) {
  const notes = events
    .filter((event) => SHOWN_KINDS.has(event.kind) && event.result?.outcome !== "observed")
    .map((event) => ({
      at: event.at,
      kind: noteKind(event),
      level: event.result ? outcomeLevel(event.result) : null,
      label: label(event, rank),
      title: joined("; ", `${clock(event.at)} ${event.summary}`, ownPart(event, rank)),
    }));
  for (const mark of marks)
    notes.push({ at: mark.at, kind: "mark", label: cut(mark.name), title: `${clock(mark.at)} mark “${mark.name}”` });
  return notes.sort((one, other) => one.at - other.at);
}

function noteKind(event) {
  if (event.kind !== "reset") return event.kind;
  return event.result?.outcome === "done" ? "reset" : "refusal";
}

function ownDelta({ result }, rank) {
  return rank && result?.ranks.find((delta) => rankKey(delta) === rankKey(rank));
}

/** The summary is of all ranks together. */
function ownPart(event, rank) {
  const own = event.result?.ranks.length > 1 ? ownDelta(event, rank) : null;
  return own && `on this rank ${gib(own.used_bytes)} less`;
}

function label(event, rank) {
  if (event.kind === "reset") {
    if (event.result?.outcome !== "done") return words(event.result?.outcome ?? "reset");
    const own = ownDelta(event, rank);
    const freed = own ? own.used_bytes : event.result.freed_bytes;
    const gone = !known(freed) ? "–" : gibNumber(freed) === "0" ? "±0" : signedGib(-freed);
    return `${words(event.result.remedy.replace(/^reset_/, ""))} ${gone}`;
  }
  if (event.kind === "state") return cut(event.summary.replace(/^engine \w+ -> (\w+).*$/s, "$1"));
  return event.kind;
}

function cut(text) {
  return text.length > MAX_LABEL ? `${text.slice(0, MAX_LABEL - 1)}…` : text;
}

function told(notes, [from, to]) {
  const shown = notes.filter(({ at }) => at >= from && at <= to);
  const span = `The last ${duration(to - from)}.`;
  return shown.length
    ? `${span} ${shown
        .slice(-5)
        .map((note) => note.title)
        .join("; ")}.`
    : span;
}

// --- words and sums that others use too ---

export function rankName(rank, ranks) {
  const engines = new Set(ranks.map((other) => other.dp_rank ?? 0)).size;
  return engines > 1 ? `dp ${rank.dp_rank ?? 0} rank ${rank.rank ?? "–"}` : `rank ${rank.rank ?? "–"}`;
}

export function deviceName({ device, host }) {
  const place =
    device.type === null ? "device –" : device.index === null ? device.type : `${device.type}:${device.index}`;
  return joined(" · ", place, device.name, host);
}

export function reservedNotAllocated({ torch }) {
  return known(torch.reserved_bytes) && known(torch.allocated_bytes)
    ? torch.reserved_bytes - torch.allocated_bytes
    : null;
}

/** Between the most and the least; null where fewer than two are known. */
export function skew(values) {
  const there = values.filter(known);
  return there.length > 1 ? Math.max(...there) - Math.min(...there) : null;
}

/** The sum of those that are known; null where none is. */
export function total(values) {
  const there = values.filter(known);
  return there.length ? there.reduce((sum, value) => sum + value, 0) : null;
}
