/**
 * What the page and the sidecar both know: written by `make docs` from app/readings.py.
 */

/** What follows from each state of the engine. @type {Record<string, any>} */
export const STATES = {
  starting: { level: "warn", is_absent: true, lacks_weights: true },
  ready: { level: "good", serves: true, is_up: true, answers: true, takes_remedies: true },
  paused: { level: "warn", is_up: true, answers: true, takes_remedies: true, is_held: true },
  sleeping: { level: "warn", is_up: true, answers: true, is_held: true, lacks_weights: true },
  busy: { level: "warn", serves: true, is_up: true, is_late: true },
  slow: { level: "warn", serves: true, is_up: true, takes_remedies: true, is_late: true },
  stuck: { level: "bad", is_hung: true, is_lost: true },
  not_answering: { level: "bad", is_hung: true },
  gone: { level: "bad", is_absent: true, is_lost: true },
};
