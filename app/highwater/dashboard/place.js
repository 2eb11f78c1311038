/**
 * Where somebody is on the page: the view, the time shown, the rank and the chart. All of it stands in the address, so
 * that a tab can be sent to a colleague: `#parts&t=6h&rank=0:3`, `#now&t=1795910000-1795913600`.
 */

export const SPANS = { "15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400 };
/** The views by their keys, 1 to 8; `now` is the first screen. */
export const VIEWS = [
  ["ranks", "Ranks"],
  ["parts", "Parts"],
  ["start", "Start"],
  ["encoder", "Encoder"],
  ["host", "Host"],
  ["policy", "Policy"],
  ["events", "Events"],
  ["plan", "Plan"],
];
/** Without a time it is the hour, or as much of it as is known. */
const FIRST = { view: "now", t: "", rank: "", chart: "free" };
const MIN_SECONDS = 10;

/** The place that an address names; what it does not know is as on the first screen. */
export function placeOf(hash) {
  const [view, ...pairs] = hash.replace(/^#/, "").split("&");
  // Whatever somebody typed can be read so: an address never keeps the page from starting.
  const given = Object.fromEntries(new URLSearchParams(pairs.join("&")));
  const place = { ...FIRST, ...given, view: VIEWS.some(([name]) => name === view) ? view : "now" };
  const [, from, to] = place.t.match(/^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)$/)?.map(Number) ?? [];
  const isWindow = to - from >= MIN_SECONDS;
  const t = isWindow || Object.hasOwn(SPANS, place.t) ? place.t : FIRST.t;
  return { ...place, t, span: isWindow ? to - from : SPANS[t || "1h"], from: isWindow ? from : null, to: isWindow ? to : null };
}

/** The address of a place that differs from another in what is given: relative, as of all that the page refers to. */
export function hrefOf(place, changes = {}) {
  const next = { ...place, ...changes };
  const pairs = ["t", "rank", "chart"].filter((name) => next[name] !== FIRST[name]);
  return `dashboard#${[next.view, ...pairs.map((name) => `${name}=${encodeURIComponent(next[name])}`)].join("&")}`;
}

/** The address of a window of time.  Unix seconds */
export function windowText(from, to) {
  return `${Math.round(from)}-${Math.round(Math.max(to, from + MIN_SECONDS))}`;
}
