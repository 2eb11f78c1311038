/**
 * The big numbers: how full, how much is left, whether it grows and when that ends, what could be given back.
 */

import { el, setText, swatch } from "./dom.js";
import {
  actionsText,
  clock,
  count,
  decimal,
  duration,
  exact,
  gib,
  gibNumber,
  joined,
  known,
  mib,
  percent,
  perSecond,
  signedGib,
  signalValue,
  sumOf,
  UNKNOWN,
  words,
} from "./format.js";
import { COMPONENTS } from "./facts.js";
import { rankName, reservedNotAllocated, total } from "./plots.js";
import { LEVELS, pressureOf } from "./pressure.js";

/** The rank with the largest value; null where none is known. */
function most(ranks, read) {
  return ranks
    .filter((rank) => known(read(rank)))
    .reduce((best, rank) => (best === null || read(rank) > read(best) ? rank : best), null);
}

/** When the first rank is at high water, if it goes on as now; null where one is there. */
function secondsToHighWater(report) {
  const pressures = report.ranks.map((rank) => pressureOf(report, rank)).filter((one) => one !== null);
  if (report.stale || pressures.some((one) => one.short_bytes > 0)) return null;
  const spans = pressures.map((one) => one.seconds_to_high_water).filter(known);
  return spans.length ? Math.min(...spans) : null;
}

/** One number, its name, and what it means here. */
class Tile {
  constructor(parent, name, title) {
    this.number = el("span", { class: "tile-number" }, UNKNOWN);
    this.unit = el("span", { class: "tile-unit" });
    this.of = el("span", { class: "tile-of" });
    this.sub = el("p", { class: "tile-sub" });
    this.extra = el("p", { class: "tile-extra" });
    this.tile = el(
      "article",
      { class: "tile", "data-tile": name },
      el("h2", {}, title, " ", this.of),
      el("p", { class: "tile-big" }, this.number, " ", this.unit),
      this.sub,
      this.extra,
    );
    parent.append(this.tile);
  }

  /** `of` says which ranks a figure is of, where there are several. */
  show({ number, unit = "", of = "", sub = "", extra = "", bytes, level = null }) {
    setText(this.number, number);
    setText(this.of, of);
    setText(this.unit, number === UNKNOWN ? "not known" : unit);
    setText(this.sub, sub);
    setText(this.extra, extra);
    this.tile.dataset.level = level ?? "";
    if (bytes !== undefined) {
      this.number.dataset.bytes = known(bytes) ? String(bytes) : "unknown";
      this.number.title = exact(bytes);
    }
  }

  showBytes(bytes, { signed = false, ...more }) {
    const number = signed ? signedGib(bytes).replace(" GiB", "") : gibNumber(bytes);
    this.show({ number, unit: "GiB", bytes, ...more });
  }
}

function componentName(field) {
  return COMPONENTS.find((one) => one.field === field)?.name ?? words(field);
}

export class Tiles {
  constructor(parent) {
    const tile = (name, title) => new Tile(parent, name, title);
    this.used = tile("used", "Device memory used");
    this.used.tile.classList.add("tile-wide");
    this.bar = new Bar();
    this.parts = new Map(COMPONENTS.map(({ field }) => [field, el("dd", {})]));
    const named = COMPONENTS.map(({ name, variable, field }) =>
      el("div", {}, el("dt", {}, swatch(variable), name), this.parts.get(field)),
    );
    this.used.tile.append(el("dl", { class: "parts" }, ...named), this.bar.box);
    this.headroom = tile("headroom", "Headroom");
    this.growth = tile("growth", "Growth since ready");
    this.encoder = tile("encoder", "Encoder cache");
    this.reserved = tile("reserved", "Reserved − allocated");
    this.host = tile("host", "Host memory");
    this.ofRanks = [this.headroom, this.growth, this.encoder, this.reserved, this.host];
    this.requests = tile("requests", "Requests");
    this.policy = tile("policy", "Policy");
    this.last = tile("last", "Last given back");
  }

  /** Takes a report, and events, newest first. */
  update(report, events, readings) {
    const { ranks } = report;
    const fullest = most(ranks, (rank) => rank.used_ratio) ?? most(ranks, (rank) => rank.used_bytes);
    this.#used(report, fullest);
    if (ranks.length) {
      this.#headroom(report);
      this.#growth(report);
      this.#encoder(report);
      this.#reserved(ranks);
      this.#host(ranks);
    } else for (const tile of this.ofRanks) tile.showBytes(null, { sub: "nothing read yet" });
    this.#requests(report, readings);
    this.#policy(report);
    this.#last(events.find(({ result }) => result?.outcome === "done" && result.credited_bytes > 0), events.at(-1));
  }

  #requests({ engine, proxy }, readings) {
    const ended = readings.rate("requests_ended", readings.length - 1);
    this.requests.show({
      number: count(engine.requests_running),
      unit: "running",
      sub: joined(", ", `${count(engine.requests_waiting)} waiting`, known(ended) && `${decimal(ended)} ended a second`),
      extra: joined(
        " · ",
        `KV cache ${percent(engine.kv_cache_usage_ratio)} in use`,
        proxy && `${count(proxy.requests_under_way)} under way in the proxy`,
      ),
    });
  }

  #last(event, oldest) {
    if (!event) {
      this.last.show({ number: UNKNOWN, sub: `nothing since ${clock(oldest?.at)}` });
      setText(this.last.unit, "");
      return;
    }
    const { result } = event;
    this.last.showBytes(result.credited_bytes, {
      of: sumOf(result.ranks),
      sub: words(result.remedy),
      extra: `${clock(event.at)} by ${event.rule ? `the policy, ${event.rule}` : words(event.trigger ?? "hand")}`,
    });
  }

  #used(report, fullest) {
    const { ranks } = report;
    const pressure = fullest ? pressureOf(report, fullest) : null;
    const water = pressure && fullest.total_bytes ? 1 - pressure.high_free_bytes / fullest.total_bytes : null;
    const ratio = fullest?.used_ratio ?? null;
    const over = pressure?.short_bytes > 0;
    this.used.showBytes(fullest?.used_bytes, {
      of: fullest && ranks.length > 1 ? `fullest of ${ranks.length}: ${rankName(fullest, ranks)}` : "",
      sub: fullest ? `of ${gib(fullest.total_bytes)} · ${percent(ratio)}` : "nothing read yet",
      extra: fullest
        ? `${mib(fullest.used_bytes)} of ${mib(fullest.total_bytes)} MiB${water === null ? "" : ` · high water ${percent(water)}${over ? ", passed" : ""}`}`
        : "",
      level: over ? "bad" : null,
    });
    for (const [field, part] of this.parts) {
      setText(part, gib(fullest?.components[field]));
      part.title = exact(fullest?.components[field]);
    }
    this.bar.show(fullest, water);
  }

  #headroom(report) {
    const { ranks } = report;
    const tightest = most(ranks, (rank) => (known(rank.free_bytes) ? -rank.free_bytes : null));
    const pressure = tightest ? pressureOf(report, tightest) : null;
    const missing = pressure?.short_bytes;
    const share = tightest?.budget;
    this.headroom.showBytes(tightest?.free_bytes, {
      of: ranks.length > 1 && tightest ? `least of ${ranks.length}: ${rankName(tightest, ranks)}` : "",
      sub: joined(
        " · ",
        "free on the device",
        known(share?.requested_bytes) &&
          `vLLM's share: ${gib(share.requested_bytes)} (${share.gpu_memory_utilization ?? UNKNOWN})`,
      ),
      extra: pressure
        ? `high water ${gib(pressure.high_free_bytes)}, low water ${gib(pressure.low_free_bytes)}${missing ? `: ${gib(missing)} missing` : ""}`
        : "",
      level: missing ? LEVELS[report.policy.level] : null,
    });
  }

  #growth(report) {
    const { growth, ranks } = report;
    const [highWater, full] = [secondsToHighWater(report), growth.seconds_to_full];
    const rate = growth.bytes_per_second;
    const ends = joined(
      ", ",
      known(highWater) && `high water in ${duration(highWater)}`,
      known(full) && `full in ${duration(full)}${growth.component ? ` (${componentName(growth.component)})` : ""}`,
      known(growth.refill_seconds) && `fills each ${duration(growth.refill_seconds)}, given back each time`,
    );
    const leak = (growth.series ?? []).find((one) => one.verdict === "leak" && !one.is_over);
    this.growth.showBytes(growth.since_ready_bytes, {
      signed: true,
      of: sumOf(ranks),
      sub: known(rate) ? `${perSecond(rate)} now` : "no steady pace now",
      extra: leak
        ? `${leak.owner}, ${leak.measure.replace(/_bytes$/, "").replaceAll("_", " ")}: ${leak.text}`
        : ends
          ? ends
          : growth.baseline_taken_at
            ? `ready at ${clock(growth.baseline_taken_at)}`
            : "",
      level: leak || (known(full) && full < 3600) ? "warn" : null,
    });
  }

  #encoder({ encoder_cache: cache, ranks }) {
    this.encoder.showBytes(cache?.device_bytes, {
      of: sumOf(ranks),
      sub: cache ? `${count(cache.entries)} entries${ranks.length > 1 ? " on the rank with most" : ""}` : "no reading of it",
      extra: joined(
        " · ",
        cache?.host_bytes && `${gib(cache.host_bytes)} on the host`,
        known(cache?.oldest_age_seconds) && `oldest at least ${duration(cache.oldest_age_seconds)}`,
      ),
    });
  }

  #reserved(ranks) {
    const values = ranks.map(reservedNotAllocated);
    const holder = most(ranks, reservedNotAllocated);
    const releasable = total(ranks.map((rank) => rank.releasable_bytes));
    this.reserved.showBytes(holder ? reservedNotAllocated(holder) : null, {
      of: holder && ranks.length > 1 ? `most of ${ranks.length}: ${rankName(holder, ranks)}` : "",
      sub: holder
        ? ranks.length > 1
          ? `${sumOf(ranks)}: ${gib(total(values))}`
          : "kept by PyTorch's allocator and not in use"
        : "PyTorch reports no figures on this device",
      extra: joined(
        " · ",
        known(releasable)
          ? `release can give back ${gib(releasable)}${ranks.length > 1 ? ", all ranks together" : ""}`
          : holder && "what release can give back is not known",
        (holder?.torch.alloc_retries || holder?.torch.ooms) &&
          `${count(holder.torch.alloc_retries)} retries, ${count(holder.torch.ooms)} out of memory`,
      ),
      level: holder?.torch.ooms ? "warn" : null,
    });
  }

  #host(ranks) {
    const rss = total(ranks.map((rank) => rank.host_memory.rss_bytes));
    const first = ranks.find((rank) => known(rank.host_memory.cgroup_used_bytes))?.host_memory;
    const limit = first?.cgroup_limit_bytes ?? first?.node_total_bytes;
    const node = ranks.find((rank) => known(rank.host_memory.node_available_bytes))?.host_memory;
    const where =
      first && known(limit)
        ? `control group ${gib(first.cgroup_used_bytes)} of ${gib(limit)}`
        : node
          ? `node ${gib(node.node_available_bytes)} available of ${gib(node.node_total_bytes)}`
          : "";
    this.host.showBytes(rss, {
      of: sumOf(ranks),
      sub: ranks.length > 1 ? `resident, ${ranks.length} workers together` : "resident, one worker",
      extra: where,
    });
  }

  #policy(report) {
    const { policy } = report;
    if (!policy) {
      this.policy.show({ number: UNKNOWN });
      return;
    }
    const rule = policy.rules.find((one) => one.phase === policy.level) ?? policy.rules[0];
    const level = LEVELS[policy.level];
    const [first, ...rest] = (rule?.reason ?? "").split("; ");
    this.policy.show({
      number: words(policy.level),
      unit: policy.mode === "observe" ? "observes only" : "acts",
      sub: rule ? first || stands(rule) : "no rules",
      extra: policy.rules.some((one) => one.is_dormant)
        ? "a rule cannot act, see above"
        : rest.join("; ") || actionsText(policy, report.sidecar_started_at),
      level: level === "good" || level === "quiet" ? null : level,
    });
  }
}

function stands({ name, signal, value, high_water: high }) {
  const where = signal === "device_free_bytes" ? "below" : "at"; // of free bytes fewer are worse
  const acts = known(high) ? `, acts ${where} ${signalValue(signal, high)}` : "";
  return `${name}: ${signalValue(signal, value)}${acts}`;
}

/** The fullest device as one bar of its components, with the high-water mark on it. */
class Bar {
  constructor() {
    this.parts = COMPONENTS.map(({ name, variable }) => {
      const part = el("span", { class: "bar-part", title: name });
      part.style.setProperty("background", `var(${variable})`);
      return part;
    });
    this.mark = el("span", { class: "bar-mark", hidden: true });
    this.box = el("div", { class: "bar", role: "img", "aria-label": "no reading yet" }, ...this.parts, this.mark);
  }

  show(rank, water) {
    const whole = rank?.total_bytes ?? null;
    const described = [];
    COMPONENTS.forEach(({ field, name }, index) => {
      const bytes = rank?.components[field];
      const part = this.parts[index];
      part.hidden = !known(bytes) || whole === null;
      if (part.hidden) return;
      part.style.setProperty("width", `${(bytes / whole) * 100}%`);
      part.title = `${name} ${gib(bytes)}`;
      described.push(`${name} ${gib(bytes)}`);
    });
    this.mark.hidden = water === null || whole === null;
    if (water !== null) this.mark.style.setProperty("left", `${water * 100}%`);
    this.mark.title = water === null ? "" : `high water ${percent(water)}`;
    this.box.setAttribute(
      "aria-label",
      described.length ? `${described.join(", ")}, of ${gib(whole)}` : "no reading yet",
    );
  }
}
