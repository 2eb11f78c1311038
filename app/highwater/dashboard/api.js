/**
 * All requests to the sidecar. The admin token lives in this module's memory and nowhere else; it travels in a
 * header that no other site can make a browser send, so there is no cookie to ride on.
 */

// "./" and not "/": the page also works beneath a reverse proxy's prefix.
const BASE = new URL("./", document.baseURI);
const OURS = { cache: "no-store", credentials: "same-origin", redirect: "error" };

let token = null;

/** A response that is not a success, with the server's own reason. */
export class Refusal extends Error {
  constructor(status, message, body = null) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

export const useToken = (value) => (token = value);
export const hasToken = () => token !== null;

export const get = (path) => call("GET", path);
/** A read that returns more with the token. */
export const getAsOperator = (path) => call("GET", path, undefined, true);
/** Control calls: with the token, if there is one. */
export const post = (path, body) => call("POST", path, body, true);
export const put = (path, body) => call("PUT", path, body, true);

async function call(method, path, body, asOperator = false) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (asOperator) Object.assign(headers, authorization());
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...OURS, method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Refusal(0, "the sidecar does not answer; is it running?");
  }
  return answered(response);
}

/** The token's header, where there is a token: it holds bytes, and other characters travel as UTF-8. */
function authorization() {
  return token === null ? {} : { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(token))}` };
}

async function answered(response) {
  const body = await response.json().catch(() => null);
  if (response.ok) return body;
  throw new Refusal(response.status, body?.error?.message ?? `the sidecar answered ${response.status}`, body);
}

/**
 * Server-sent events as `{event, data}`, until they end; `alive` is called whenever anything comes, keep-alives too. Not
 * EventSource: that one hides keep-alives, statuses and reasons.
 */
export async function* serverEvents(path, signal, alive) {
  // There is always a place for whoever has the token.
  const response = await fetch(new URL(path, BASE), { ...OURS, headers: { Accept: "text/event-stream", ...authorization() }, signal });
  if (!response.ok || response.body === null) await answered(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    const messages = (rest + value).split("\n\n");
    rest = messages.pop() ?? "";
    for (const message of messages) {
      const fields = Object.fromEntries(message.split("\n").map((line) => line.match(/^([^:]*): ?(.*)$/)?.slice(1) ?? [line, ""]));
      if (fields.data !== undefined) yield { event: fields.event ?? "message", data: fields.data };
    }
  }
}
