/**
 * Numbers, sizes and times as people read them. What is not known is a dash, never 0.
 */

export const UNKNOWN = "–";
export const GIB = 1024 ** 3;
export const MIB = 1024 ** 2;

const MINUS = "\u2212";
const CLOCK = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});
const DAY = new Intl.DateTimeFormat(undefined, { day: "2-digit", month: "short" });

export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A number with enough digits to see what matters, and no more. */
function digits(value) {
  const size = Math.abs(value);
  const places = size === 0 || size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3;
  return value
    .toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places })
    .replace("-", MINUS);
}

/** Bytes as a number of GiB, without the unit. */
export function gibNumber(bytes) {
  if (!known(bytes)) return UNKNOWN;
  // What rounds to nothing is nothing: "−0.000" would be a riddle.
  return digits(Math.abs(bytes) < GIB / 2000 ? 0 : bytes / GIB);
}

/** Bytes as GiB. */
export function gib(bytes) {
  return known(bytes) ? `${gibNumber(bytes)} GiB` : UNKNOWN;
}

/** Bytes in the unit that fits: `44.30 GiB`, `268 MiB`, `128 KiB`. */
export function size(bytes) {
  if (!known(bytes)) return UNKNOWN;
  const small = Math.abs(bytes);
  if (small >= GIB) return gib(bytes);
  const [unit, name] = small >= MIB ? [MIB, "MiB"] : small >= 1024 ? [1024, "KiB"] : [1, "B"];
  const value = (bytes / unit).toLocaleString("en-US", { maximumFractionDigits: small < 100 * unit ? 1 : 0 });
  return `${value.replace("-", MINUS)} ${name}`;
}

/** Bytes as GiB with their sign. */
export function signedGib(bytes) {
  return known(bytes) && gibNumber(bytes) !== "0" && bytes > 0 ? `+${gib(bytes)}` : gib(bytes);
}

/** The same, exactly, for a tooltip. */
export function exact(bytes) {
  if (!known(bytes)) return "not known";
  const mib = (bytes / MIB).toLocaleString("en-US", { maximumFractionDigits: 1 });
  return `${mib} MiB, ${bytes.toLocaleString("en-US")} bytes`;
}

export function mib(bytes) {
  return known(bytes) ? (bytes / MIB).toLocaleString("en-US", { maximumFractionDigits: 0 }) : UNKNOWN;
}

export function percent(ratio) {
  return known(ratio) ? `${(ratio * 100).toFixed(1)} %` : UNKNOWN;
}

export function count(value) {
  return known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : UNKNOWN;
}

/** A number of things a second, to the digit that matters. */
export function decimal(value) {
  return known(value) ? value.toLocaleString("en-US", { maximumSignificantDigits: value < 100 ? 2 : 3 }) : UNKNOWN;
}

/** Bytes a second as MiB/s. */
export function perSecond(rate) {
  if (!known(rate)) return UNKNOWN;
  const value = rate / MIB;
  const text =
    Math.abs(value) < 0.05 ? "0" : value.toLocaleString("en-US", { maximumFractionDigits: 1 }).replace("-", MINUS);
  return `${value >= 0.05 ? "+" : ""}${text} MiB/s`;
}

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

/** What several ranks have together, said beside a figure; of one rank nothing needs to be said. */
export function sumOf(ranks) {
  return ranks.length > 1 ? `sum of ${ranks.length} ranks` : "";
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
export function words(name) {
  return String(name).replaceAll("_", " ");
}

/** The texts that are not empty, null or undefined, joined. */
export function joined(separator, ...texts) {
  return texts.filter(Boolean).join(separator);
}
