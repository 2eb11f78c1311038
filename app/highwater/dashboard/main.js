/**
 * The page, wired: what the store knows is rendered, the view that the address names beneath the verdict.
 */

import { dialog, result } from "./actions.js";
import { startView } from "./budget.js";
import { encoderView } from "./encoder.js";
import { eventsView } from "./events.js";
import { clock } from "./format.js";
import { hostView } from "./host.js";
import { html, render } from "./html.js";
import { nowView } from "./now.js";
import { partsView } from "./parts.js";
import { planView } from "./plan.js";
import { hrefOf, VIEWS, windowText } from "./place.js";
import { policyView } from "./policy.js";
import { ranksView } from "./ranks.js";
import { age, begin, changed, onChange, shownTime, state, takeReport } from "./store.js";
import { facts, freshness, header, shown, title, verdict } from "./verdict.js";

const BEHIND = [ranksView, partsView, startView, encoderView, hostView, policyView, eventsView, planView]; // as VIEWS
const SHOW = { now: nowView, ...Object.fromEntries(VIEWS.map(([name], index) => [name, BEHIND[index]])) };

// --- colours ---

const THEMES = { "": "as the system", light: "light", dark: "dark" };
const { theme } = globalThis;

function nextTheme() {
  const names = Object.keys(THEMES);
  theme.chosen = names[(names.indexOf(theme.chosen) + 1) % names.length];
  try {
    localStorage.setItem("highwater-theme", theme.chosen);
  } catch {
    // No storage: it holds until the page is loaded again.
  }
  repaint();
}

const repaint = () => changed(theme.apply());

// --- what is shown ---

function page() {
  const { place, connection, said } = state;
  const colours = document.documentElement.hasAttribute("data-dark") ? "dark" : "light";
  return html`<div class="page" data-view=${place.view} data-fresh=${freshness()} style=${{ "--as-of": `"last known ${clock(connection.since)}"` }}>
    <a class="skip" href="#verdict" onClick=${(event) => (event.preventDefault(), document.getElementById("verdict").focus())}>Skip to the verdict</a>
    ${header({ name: THEMES[theme.chosen] ?? "", next: nextTheme })}
    <div class="visually-hidden" aria-live="polite">${said}</div>
    <main>
      <div class="head">${verdict()}${facts()}</div>
      ${SHOW[place.view](colours)}
    </main>
    ${result()}
    <nav class="views" aria-label="Views">
      <a href=${hrefOf(place, { view: "now" })} aria-current=${place.view === "now" ? "page" : undefined} data-key="Esc">Now</a>
      ${VIEWS.map(([name, text], index) => html`<a key=${name} href=${hrefOf(place, { view: name })} aria-current=${place.view === name ? "page" : undefined} aria-keyshortcuts=${index + 1} data-key=${index + 1}>${text}</a>`)}
    </nav>
    ${dialog()}
  </div>`;
}

const FAVICONS = { good: "favicon", quiet: "favicon", warn: "favicon-warn", bad: "favicon-bad" };

function show() {
  render(page(), document.getElementById("page"));
  document.title = title();
  const name = state.connection.state === "lost" ? "favicon-lost" : FAVICONS[shown().level];
  const icon = document.getElementById("favicon");
  if (!icon.href.endsWith(`/${name}.svg`)) icon.href = `dashboard/${name}.svg`;
  // What a slow sidecar still owes is not on the page yet.
  if (state.report && state.wasAnswered) document.body.dataset.ready = "true";
}

// --- keys ---

const TYPED = "input, select, textarea, dialog";

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.(TYPED) || state.dialog) return;
  const { place } = state;
  const [from, to] = shownTime();
  const moved = (left, right) => ({ t: windowText(left, right) });
  const half = (to - from) / 2;
  const changes = {
    Escape: { view: "now", t: place.view === "now" ? "" : place.t },
    "+": moved(from + half, to),
    "-": moved(from - half * 2, to),
  }[event.key] ?? (VIEWS[Number(event.key) - 1] && { view: VIEWS[Number(event.key) - 1][0] });
  if (!changes) return;
  event.preventDefault();
  location.assign(hrefOf(place, changes));
});

// --- on it goes ---

theme.system.addEventListener("change", repaint);
onChange(show);
show();
// "read 4 s ago" goes on by itself.
setInterval(() => age() > 1.5 && changed(), 1000);
begin();

// For tests, and for whoever looks at this page with a browser's tools.
export const inspect = { state, takeReport };
