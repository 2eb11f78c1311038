/**
 * Preact and htm, together: `html` makes elements of a template. Whatever stands in a `${}` is text, never markup.
 */

import { exact, gibNumber } from "./format.js";
import { Component, h, render } from "./vendor/preact-11.2.0/preact.mjs";
import htm from "./vendor/htm-3.1.1/htm.module.js";

export const html = htm.bind(h);
export { Component, render };

/** A table; cells are text, or elements. A column whose index is in `numeric` is right-aligned, in `wide` it wraps. */
export function table({ caption, head, rows, numeric = [], wide = [], label = caption }) {
  const kind = (index) => (numeric.includes(index) ? "number" : wide.includes(index) ? "wide" : undefined);
  return html`<div class="scroll" role="region" aria-label=${label} tabindex="0">
    <table class="figures">
      <caption>${caption}</caption>
      <thead><tr>${head.map((text, index) => html`<th scope="col" class=${kind(index)}>${text}</th>`)}</tr></thead>
      <tbody>
        ${rows.map(([first, ...rest]) => html`<tr><th scope="row">${first}</th>${rest.map((cell, index) => html`<td class=${kind(index + 1)}>${cell}</td>`)}</tr>`)}
      </tbody>
    </table>
  </div>`;
}

/** A panel with a heading; `aside` stands beside it. */
export const panel = (name, title, aside, ...children) => html`<section class="panel ${name}" aria-labelledby="${name}-title">
    <div class="panel-head"><h2 id="${name}-title">${title}</h2>${aside}</div>${children}</section>`;

/** A spot of a colour of the palette. */
export const swatch = (variable) => html`<i class="swatch" aria-hidden="true" style=${{ background: `var(${variable})` }}></i>`;

/** A number of GiB, exact in its tooltip. */
export const sized = (bytes) => html`<span title=${exact(bytes)}>${gibNumber(bytes)}</span>`;

/** A bar of parts `{key, name, bytes, colour}`, and lines `{bytes, title, kind}` across it, of a whole. */
export function bar(parts, whole, lines, label) {
  const width = Math.max(parts.reduce((sum, { bytes }) => sum + bytes, 0), whole ?? 0, 1);
  const share = (bytes) => `${(bytes / width) * 100}%`;
  return html`<div class="bar" role="img" aria-label=${label}>
    ${parts.map(({ key, name, bytes, colour }) => html`<span key=${key} title=${name} style=${{ width: share(bytes), background: `var(${colour})` }}></span>`)}
    ${lines.map(({ bytes, title, kind }) => html`<i class=${kind} title=${title} style=${{ left: share(bytes) }}></i>`)}
  </div>`;
}
