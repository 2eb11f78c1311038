/**
 * Numbers, sizes and times as people read them. What is not known is a dash, never 0.
 */

export const UNKNOWN = "–";
export const GIB = 1024 ** 3;
const MINUS = "\u2212";
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat(undefined, { day: "2-digit", month: "short" });

export const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Bytes as a number of GiB, without the unit, with the digits that matter. */
export function gibNumber(bytes) {
  if (!known(bytes)) return UNKNOWN;
  // What rounds to nothing is nothing: "−0.000" would be a riddle.
  const value = Math.abs(bytes) < GIB / 2000 ? 0 : bytes / GIB;
  const size = Math.abs(value);
  const places = size === 0 || size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3;
  const text = value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  return text.replace("-", MINUS);
}

export const gib = (bytes) => known(bytes) ? `${gibNumber(bytes)} GiB` : UNKNOWN;

/** A number of GiB with its sign; what did not change is "=". */
export function changeText(bytes) {
  const text = gibNumber(bytes);
  return text === "0" ? "=" : known(bytes) && bytes > 0 ? `+${text}` : text;
}

/** The same, exactly, for a tooltip. */
export const exact = (bytes) => known(bytes) ? `${bytes.toLocaleString("en-US")} bytes` : "not known";
export const percent = (ratio) => known(ratio) ? `${(ratio * 100).toFixed(1)} %` : UNKNOWN;
export const count = (value) => known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : UNKNOWN;

/** A number of things a second, to the digit that matters. */
export const decimal = (value) => known(value) ? value.toLocaleString("en-US", { maximumSignificantDigits: value < 100 ? 2 : 3 }) : UNKNOWN;

export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** The time of day; with the day where that is not today.  unix seconds */
export function clock(unix) {
  if (!known(unix)) return UNKNOWN;
  const date = new Date(unix * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return today ? CLOCK.format(date) : `${DAY.format(date)} ${CLOCK.format(date)}`;
}

/** How many remedies the policy has started, as far back as the sidecar knows: at most an hour. */
export function actionsText({ actions_last_hour: done }, startedAt) {
  const span = Date.now() / 1000 - startedAt < 3600 ? `since the sidecar started at ${clock(startedAt)}` : "in the last hour";
  return `${count(done)} action${done === 1 ? "" : "s"} ${span}`;
}

/** A remedy that was done and gave no device memory back is no failure, and no success either. */
export function outcomeLevel({ outcome, credited_bytes: credited }) {
  if (outcome === "done") return credited > 0 ? "good" : "quiet";
  return { refused: "warn", failed: "bad" }[outcome] ?? "quiet";
}

/** A rule's signal value in its own unit. */
export function signalValue(signal, value) {
  if (!known(value)) return UNKNOWN;
  return signal.endsWith("_ratio") ? percent(value) : gib(value);
}

/** A remedy's, component's or state's name without underscores. */
export const words = (name) => String(name).replaceAll("_", " ");

/** The texts that are there, joined. */
export const joined = (separator, ...texts) => texts.filter(Boolean).join(separator);
