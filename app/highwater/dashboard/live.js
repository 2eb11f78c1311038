/**
 * The event stream, kept open: it reconnects by itself, and says how things stand.
 */

import { serverEvents } from "./api.js";

// The sidecar says something at least every 15 s. After that and some more, it is silent, or the connection dead.
const SILENCE_MS = 20_000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 5_000;

/**
 * Follow for as long as the page is there; the listener's `report` and `event` are handed what came, `open` is called when
 * a connection is there, again or for the first time, and `lost` with the reason when it ended.
 */
export async function follow(listener) {
  let wait = FIRST_RETRY_MS;
  for (;;) {
    const reason = await once(listener, () => (wait = FIRST_RETRY_MS));
    listener.lost(reason);
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, LAST_RETRY_MS);
  }
}

/** One connection; returns why it ended. */
async function once(listener, reached) {
  const abort = new AbortController();
  let watchdog = 0;
  const alive = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
  };
  alive();
  let open = () => (reached(), listener.open());
  try {
    for await (const { event, data } of serverEvents("memory/events", abort.signal, alive)) {
      open = open?.();
      if (event === "report") listener.report(JSON.parse(data));
      else if (event === "event") listener.event(JSON.parse(data));
    }
    return "the sidecar ended the stream";
  } catch (error) {
    if (abort.signal.aborted) return `nothing came for ${SILENCE_MS / 1000} s`;
    return error.status ? error.message : "the sidecar does not answer";
  } finally {
    clearTimeout(watchdog);
    abort.abort();
  }
}
