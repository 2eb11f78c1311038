/**
 * uPlot, dressed: lines or areas on one time axis, water lines, flags of what was done, the engine's states as a band.
 * Dragged over, it shows that time: so do all charts, and the address says which.
 */

import { STATES } from "./facts.js";
import { clock, gib, joined, known, words } from "./format.js";
import { Component, html, swatch } from "./html.js";
import { hrefOf, SPANS, windowText } from "./place.js";
import { engineMoves, shownTime, state } from "./store.js";

const uPlot = globalThis.uPlot;
const LEFT = 42; // of the axis, and so of the flags and the band
const RIGHT = 20;
const NEAR = 0.012; // flags that are nearer than this share of the width are one
const FLAGGED = new Set(["reset", "refusal", "mark", "incident", "sidecar", "snapshot", "recovery"]);

/** A colour as it is in the theme in force. */
const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

/**
 * Properties: `label`, `series` (a Series of readings), `time`, `lines` of `{name, variable, value(reading, index),
 * bold, format}`, `areas` (stacked in this order where true), `isClose` (the axis need not begin at 0), `per` (the axis'
 * unit), `tick(value)`, `waters` of `{value, variable, name}`, and `stamp`: drawn anew is only what has another.
 */
export class Chart extends Component {
  shouldComponentUpdate(next, own) {
    return next.stamp !== this.props.stamp || own !== this.state;
  }

  componentDidMount() {
    this.sizes = new ResizeObserver(() => this.draw(true));
    this.sizes.observe(this.box);
    this.draw();
  }

  componentDidUpdate(before) {
    if (before.stamp === this.props.stamp) return;
    const shape = (props) => `${props.lines.map(({ name, bold }) => `${name} ${bold}`)} ${props.areas} ${props.theme}`;
    if (shape(before) !== shape(this.props)) this.remove();
    this.draw();
  }

  componentWillUnmount() {
    this.sizes.disconnect();
    this.remove();
  }

  remove() {
    this.plot = this.plot?.destroy() ?? null;
  }

  /** Times, then one row for each line; null is what is not known, and a gap. */
  data() {
    const { series, lines, areas, time, per = 1 } = this.props;
    const times = [];
    const rows = lines.map(() => []);
    const told = lines.map(() => []);
    series.rows.forEach((reading, index) => {
      const next = series.rows[index + 1];
      if (reading.at > time[1] || (next && next.at < time[0])) return;
      if (times.length && series.isGapBefore(index)) {
        times.push((times[times.length - 1] + reading.at) / 2);
        for (const row of [...rows, ...told]) row.push(null);
      }
      times.push(reading.at);
      let sum = 0;
      lines.forEach((line, place) => {
        const value = line.value(reading, index) ?? null;
        told[place].push(value);
        sum += value ?? 0;
        rows[place].push(value === null ? null : (areas ? sum : value) / per);
      });
    });
    this.told = told;
    // The last area lies behind all others.
    return [times, ...(areas ? rows.reverse() : rows)];
  }

  range(data) {
    const { waters = [], isClose, per = 1 } = this.props;
    const values = [...data.slice(1).flat().filter(known), ...waters.map(({ value }) => value / per)];
    const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [isClose ? Infinity : 0, 0]);
    const room = (most - least) * 0.08 || 1;
    return [isClose ? Math.max(0, least - room) : 0, most + room];
  }

  draw(isResized = false) {
    const { offsetWidth: width, offsetHeight: height } = this.box;
    if (width < 60 || height < 40) return;
    const data = this.data();
    this.yRange = this.range(data);
    if (!this.plot) this.make(width, height, data);
    else if (isResized) this.plot.setSize({ width, height });
    else {
      this.plot.batch(() => {
        this.plot.setData(data, false);
        this.plot.setScale("x", { min: this.props.time[0], max: this.props.time[1] });
        this.plot.setScale("y", { min: this.yRange[0], max: this.yRange[1] });
      });
    }
  }

  make(width, height, data) {
    const { lines, areas, tick = String } = this.props;
    const isFine = () => this.props.time[1] - this.props.time[0] < 400;
    const hour = (at) => (isFine() ? clock(at).slice(-8) : clock(at).slice(0, -3));
    const grid = { stroke: colour("--grid"), width: 1 };
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", grid, ticks: { ...grid, size: 4 } };
    const drawn = areas ? [...lines].reverse() : lines;
    const options = {
      ...{ width, height, legend: { show: false }, padding: [8, RIGHT, 0, 0] },
      cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false }, y: false },
      scales: { x: { time: true, range: () => this.props.time }, y: { range: () => this.yRange } },
      axes: [
        { ...axis, size: 24, space: 76, values: (_, times) => times.map(hour) },
        { ...axis, size: LEFT, space: 30, values: (_, values) => values.map(tick) },
      ],
      // The grid over the areas: they are opaque, painted one over the other.
      drawOrder: areas ? ["series", "axes"] : ["axes", "series"],
      series: [
        {},
        ...drawn.map((line) => ({
          label: line.name,
          stroke: colour(areas ? "--panel" : line.variable),
          width: areas ? 0.75 : line.bold ? 2.25 : 1,
          fill: areas ? colour(line.variable) : undefined,
          points: { show: (_, __, from, to) => to - from < 2, size: 4, stroke: colour(line.variable) },
        })),
      ],
      hooks: { draw: [() => this.drawWaters()], setCursor: [() => this.read()], setSelect: [() => this.zoom()] },
    };
    this.plot = new uPlot(options, data, this.box);
  }

  drawWaters() {
    const { ctx, bbox } = this.plot;
    const ratio = uPlot.pxRatio;
    ctx.save();
    Object.assign(ctx, { font: `${11 * ratio}px system-ui, sans-serif`, textAlign: "left", textBaseline: "bottom", lineWidth: 1.5 * ratio });
    for (const { value, variable, name } of this.props.waters ?? []) {
      const y = Math.round(this.plot.valToPos(value / (this.props.per ?? 1), "y", true));
      ctx.strokeStyle = ctx.fillStyle = colour(variable);
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(name, bbox.left + 6 * ratio, y - 2 * ratio);
    }
    ctx.restore();
  }

  read() {
    const { idx, left } = this.plot?.cursor ?? {};
    const shown = known(idx) && left >= 0 && this.plot.over.matches(":hover") ? idx : null;
    if (shown !== (this.state.shown ?? null)) this.setState({ shown, left });
  }

  /** A drag over the chart: that time is shown. */
  zoom() {
    const { left, width } = this.plot.select;
    if (width < 4) return;
    const [from, to] = [left, left + width].map((x) => this.plot.posToVal(x, "x"));
    this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    location.assign(hrefOf(state.place, { t: windowText(from, to) }));
  }

  render({ label, time, lines, series }, { shown, left }) {
    const at = (moment) => ({ left: `calc(${LEFT}px + (100% - ${LEFT + RIGHT}px) * ${(moment - time[0]) / (time[1] - time[0])})` });
    return html`<div class="plot">
      <div class="chart" role="img" aria-label=${label} ref=${(box) => (this.box = box ?? this.box)}></div>
      <ul class="flags" aria-label="What was done">
        ${flags(time).map(
          ({ moment, kind, level, title }) =>
            html`<li key=${moment} class="flag" data-kind=${kind} data-level=${level} style=${at(Math.min(moment, time[1]))} title=${title}><span class="visually-hidden">${title}</span></li>`,
        )}
      </ul>
      ${band(time, series.rows[0]?.at ?? time[0])}
      ${
        known(shown) && series.rows.length && this.plot
          ? html`<div class="readout" aria-hidden="true" style=${left > this.plot.over.clientWidth / 2 ? { left: `${LEFT + 8}px` } : { right: `${RIGHT + 8}px` }}>
              <b>${clock(this.plot.data[0][shown])}</b>
              <table>
                ${lines.map((line, index) => html`<tr><th>${swatch(line.variable)}${line.name}</th><td>${line.format(this.told[index][shown])}</td></tr>`)}
              </table>
            </div>`
          : null
      }
    </div>`;
  }
}

/** The kind of flag that an event is; an act that was not done is another than one that was. */
export const flagOf = ({ kind, result }) => (kind === "reset" && result && result.outcome !== "done" ? "refusal" : kind);

/** What was done and marked in that time, oldest first; those that stand close together are one flag. */
function flags([from, to]) {
  const shown = [];
  for (const event of [...state.events].reverse()) {
    const { at, result, summary } = event;
    if (!FLAGGED.has(event.kind) || result?.outcome === "observed" || at < from || (at > to && state.place.from !== null)) continue;
    const kind = flagOf(event);
    const level = event.kind === "reset" && !(result?.credited_bytes > 0) ? "quiet" : "good";
    const title = joined(" ", clock(at), known(result?.credited_bytes) && `gave back ${gib(result.credited_bytes)}:`, summary);
    const last = shown[shown.length - 1];
    if (last?.kind === kind && at - last.moment < (to - from) * NEAR) last.title += `\n${title}`;
    else shown.push({ moment: at, kind, level, title });
  }
  return shown;
}

/** The engine's states in that time, as a band under the chart; of what was before the first reading nothing is said. */
function band([from, to], first) {
  const changes = engineMoves(state.events).reverse();
  const last = changes.length ? changes[changes.length - 1].into : state.report?.engine.state;
  const spans = [
    ...changes.map(({ at, from: name }, index) => ({ name, begin: changes[index - 1]?.at ?? first, end: at })),
    { name: last, begin: changes[changes.length - 1]?.at ?? first, end: Infinity },
  ]
    .map((span) => ({ ...span, begin: Math.max(span.begin, from), end: Math.min(span.end, to) }))
    .filter(({ name, begin, end }) => name && end > begin);
  const names = [...new Set(spans.map(({ name }) => words(name)))].join(", ");
  return html`<svg class="band" role="img" aria-label="The engine was: ${names}" viewBox="0 0 1000 1" preserveAspectRatio="none" style=${{ left: `${LEFT}px`, right: `${RIGHT}px` }}>
    ${spans.map(
      ({ name, begin, end }) =>
        html`<rect key=${begin} data-level=${STATES[name]?.level} x=${((begin - from) / (to - from)) * 1000} width=${((end - begin) / (to - from)) * 1000} height="1"><title>${words(name)}</title></rect>`,
    )}
  </svg>`;
}

/** The time shown: buttons, and the way back from a window. */
export function timeSwitch() {
  const { place } = state;
  const [begin, end] = shownTime();
  const shown = place.t || (end - begin > SPANS["15m"] ? "1h" : "15m");
  return html`<div class="switch" role="group" aria-label="Time shown">
    ${Object.keys(SPANS).map((t) => html`<a key=${t} href=${hrefOf(place, { t })} aria-current=${shown === t ? "true" : undefined}>${t}</a>`)}
    ${place.from !== null ? html`<a key="window" href=${hrefOf(place, { t: "" })} aria-current="true" title="Back to the last hour">${clock(place.from).slice(0, -3)} to ${clock(place.to).slice(0, -3)} ✕</a>` : null}
  </div>`;
}
