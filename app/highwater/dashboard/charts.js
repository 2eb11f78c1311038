/**
 * uPlot, dressed: stacks and lines in GiB on one time axis, water lines, annotations, a readout under the pointer.
 */

import { colour } from "./palette.js";
import { el, setText, swatch } from "./dom.js";
import { clock } from "./format.js";

const uPlot = globalThis.uPlot;
const SYNC = "time";
const LETTER_PIXELS = 6.6;
const FLAG_PIXELS = 18;
const MAX_NOTES = 60;
const UNSEEN_EVERY_MS = 5000; // so that whoever scrolls, prints or takes a picture of the whole page finds them drawn

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {string} variable its colour
 * @property {boolean} [filled]
 * @property {(value: number) => string} format
 * @property {boolean} [stepped]
 * @property {boolean} [dashed] so that lines that lie one over the other are both seen
 */
/** @typedef {{at: number, kind: string, level?: string | null, label: string, title: string}} Annotation */
/** @typedef {{value: number, label: string, variable: string, solid?: boolean}} Water */
/**
 * @typedef {object} View what a chart shows
 * @property {[number, number]} time
 * @property {[number, number]} range of the values
 * @property {(number | null)[][]} data times, then one row for each series
 * @property {((number | null)[] | null)[]} [told] values for the readout, where they are not what is drawn
 * @property {Annotation[]} annotations
 * @property {Water[]} waters
 */

export class Chart {
  /**
   * @param {HTMLElement} parent @param {Series[]} series
   * @param {{height: number, label: string, lanes: number, unit: (value: number) => string}} options lanes: rows of flags
   */
  constructor(parent, series, options) {
    this.series = series;
    this.options = options;
    this.view = null;
    this.dirty = false;
    this.seen = true;
    this.drawnAt = -Infinity;
    this.readout = el("div", { class: "readout", hidden: true, "aria-hidden": "true" });
    this.box = el("div", { class: "chart", role: "img", "aria-label": options.label });
    parent.append(this.box);
    this.notes = [];
    this.plot = null;
    this.width = 0;
    all.add(this);
    sizes.observe(this.box);
    sights.observe(this.box);
  }

  show(view) {
    this.view = view;
    this.dirty = true;
    schedule();
  }

  /** What a screen reader says of it. */
  describe(text) {
    this.box.setAttribute("aria-label", text);
  }

  remove() {
    all.delete(this);
    sizes.unobserve(this.box);
    sights.unobserve(this.box);
    this.plot?.destroy();
    this.box.remove();
  }

  /** New colours: it is made anew. */
  repaint() {
    this.plot?.destroy();
    this.plot = null;
    this.notes = [];
    this.dirty = this.view !== null;
  }

  /** Whether it has to be drawn: at once where it is seen, now and then where it is not. */
  get due() {
    return this.dirty && (this.seen || performance.now() - this.drawnAt >= UNSEEN_EVERY_MS);
  }

  draw() {
    this.dirty = false;
    this.drawnAt = performance.now();
    const { view } = this;
    if (view === null || this.width < 40) return;
    if (this.plot === null) this.#make(view);
    else {
      this.plot.batch(() => {
        this.plot.setData(view.data, false);
        this.plot.setScale("x", { min: view.time[0], max: view.time[1] });
        this.plot.setScale("y", { min: view.range[0], max: view.range[1] });
      });
    }
  }

  resize(width) {
    if (Math.abs(width - this.width) < 1) return;
    this.width = width;
    if (this.plot) this.plot.setSize({ width, height: this.options.height });
    else {
      this.dirty = this.view !== null;
      schedule();
    }
  }

  #make(view) {
    const axis = {
      stroke: colour("--muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { stroke: colour("--grid"), width: 1, size: 4 },
    };
    const gap = colour("--panel");
    const options = {
      width: this.width,
      height: this.options.height,
      legend: { show: false },
      padding: [Math.max(4 + FLAG_PIXELS * this.options.lanes, 10), 14, 0, 0],
      cursor: {
        drag: { x: false, y: false },
        sync: { key: SYNC, setSeries: false },
        points: { show: false },
        y: false,
      },
      scales: { x: { time: true, range: () => this.view.time }, y: { range: () => this.view.range } },
      axes: [
        {
          ...axis,
          size: 28,
          space: 70,
          values: (_, times) =>
            times.map((at) =>
              clock(at)
                .slice(-8)
                .slice(0, this.#fine() ? 8 : 5),
            ),
        },
        { ...axis, size: 46, space: 28, values: (_, values) => values.map(this.options.unit) },
      ],
      // The grid over the areas: they are opaque, painted one over the other.
      drawOrder: ["series", "axes"],
      series: [
        {},
        ...this.series.map((one) => ({
          label: one.name,
          stroke: one.filled ? gap : colour(one.variable),
          width: one.filled ? 0.75 : 1.75,
          dash: one.dashed ? [7, 5] : undefined,
          fill: one.filled ? colour(one.variable) : undefined,
          points: {
            show: (_, __, from, to) => to - from < 2,
            size: 4,
            stroke: colour(one.variable),
            fill: colour(one.variable),
          },
          paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          spanGaps: false,
        })),
      ],
      hooks: {
        draw: [() => this.#drawWaters(), () => this.#placeNotes()],
        setCursor: [() => this.#read()],
      },
    };
    this.plot = new uPlot(options, view.data, this.box);
    this.plot.over.append(this.readout);
    this.plot.over.addEventListener("mouseenter", () => {
      this.hovered = true;
    });
    this.plot.over.addEventListener("mouseleave", () => {
      this.hovered = false;
      this.readout.hidden = true;
    });
  }

  /** Whether seconds are told on the time axis. */
  #fine() {
    return this.view.time[1] - this.view.time[0] < 400;
  }

  #drawWaters() {
    const { ctx, bbox } = this.plot;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "bottom";
    for (const { value, label, variable, solid } of this.view.waters) {
      if (value < this.view.range[0] || value > this.view.range[1]) continue;
      const y = Math.round(this.plot.valToPos(value, "y", true));
      ctx.strokeStyle = colour(variable);
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash(solid ? [] : [6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      if (!label) continue;
      const below = y - bbox.top < 14 * ratio;
      ctx.textBaseline = below ? "top" : "bottom";
      const width = ctx.measureText(label).width + 8 * ratio;
      ctx.fillStyle = colour("--panel");
      ctx.globalAlpha = 0.82;
      ctx.fillRect(bbox.left + 2 * ratio, below ? y + 2 * ratio : y - 15 * ratio, width, 13 * ratio);
      ctx.globalAlpha = 1;
      ctx.fillStyle = colour(variable);
      ctx.fillText(label, bbox.left + 6 * ratio, below ? y + 3 * ratio : y - 2 * ratio);
    }
    ctx.restore();
  }

  #placeNotes() {
    const [from, to] = this.view.time;
    const shown = this.view.annotations.filter(({ at }) => at >= from && at <= to).slice(-MAX_NOTES);
    while (this.notes.length < shown.length) {
      const note = el("div", { class: "note" }, el("span", { class: "note-flag" }));
      this.plot.over.append(note);
      this.notes.push(note);
    }
    const width = this.plot.over.clientWidth || this.width;
    // From the newest, and in the lowest lane that is free; where none is, only the line and a stub are left.
    const free = new Array(this.options.lanes).fill(Infinity);
    for (let index = this.notes.length - 1; index >= 0; index--) {
      const [note, annotation] = [this.notes[index], shown[index]];
      note.hidden = annotation === undefined;
      if (annotation === undefined) continue;
      const x = this.plot.valToPos(annotation.at, "x");
      note.style.setProperty("transform", `translateX(${Math.round(x)}px)`);
      note.dataset.kind = annotation.kind;
      note.dataset.level = annotation.level ?? "";
      note.title = annotation.title;
      const long = annotation.label.length * LETTER_PIXELS + 14;
      const leftward = x > width - long;
      const lane = free.findIndex((left) => (leftward ? x + 2 : x + long) <= left);
      if (lane >= 0) free[lane] = leftward ? x - long : x - 3;
      note.style.setProperty("top", `${-FLAG_PIXELS * (Math.max(lane, 0) + 1)}px`);
      note.classList.toggle("note-left", leftward);
      note.classList.toggle("note-bare", lane < 0);
      setText(note.firstElementChild, annotation.label);
    }
  }

  #read() {
    const { idx, left } = this.plot.cursor;
    const shown = this.hovered && idx !== null && idx !== undefined && left >= 0;
    this.readout.hidden = !shown;
    if (!shown) return;
    const at = this.view.data[0][idx];
    const rows = this.series.map((one, index) => {
      const value = (this.view.told?.[index] ?? this.view.data[index + 1])[idx];
      return el(
        "tr",
        {},
        el("th", {}, swatch(one.variable), one.name),
        el("td", {}, value === null || value === undefined ? "–" : one.format(value)),
      );
    });
    const { format, filled } = this.series[0];
    const sum = (this.view.told ?? []).reduce((whole, row) => whole + (row?.[idx] ?? 0), 0);
    if (filled && sum > 0) rows.unshift(el("tr", {}, el("th", {}, "used"), el("td", {}, format(sum))));
    const near = ((this.view.time[1] - this.view.time[0]) / this.plot.over.clientWidth) * 8;
    const notes = this.view.annotations.filter((note) => Math.abs(note.at - at) <= near).slice(-3);
    this.readout.replaceChildren(
      el("b", {}, clock(at)),
      el("table", {}, ...rows),
      ...notes.map((note) => el("p", {}, note.title)),
    );
    const right = left > this.plot.over.clientWidth / 2;
    this.readout.style.setProperty("left", right ? "auto" : `${left + 14}px`);
    this.readout.style.setProperty("right", right ? `${this.plot.over.clientWidth - left + 14}px` : "auto");
  }
}

// --- drawing: as many charts a frame as there is time for, those that are seen at once ---

const all = new Set();
let scheduled = false;

const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) of(entry.target)?.resize(Math.floor(entry.contentRect.width));
});
const sights = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const chart = of(entry.target);
      if (chart) chart.seen = entry.isIntersecting;
    }
    schedule();
  },
  { rootMargin: "200px" },
);

function of(box) {
  return [...all].find((chart) => chart.box === box);
}

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(drawOne);
}

function drawOne() {
  scheduled = false;
  const started = performance.now();
  for (const chart of all) {
    if (!chart.due) continue;
    chart.draw();
    // As many as fit into half a frame; the others are drawn in the next.
    if (performance.now() - started > 8) {
      schedule();
      return;
    }
  }
}

/** The theme changed. */
export function repaintAll() {
  for (const chart of all) chart.repaint();
  schedule();
}
