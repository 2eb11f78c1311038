/**
 * The components of device memory, in the order in which they are stacked, from the bottom: what stands still first,
 * what moves on top. Their colours are in dashboard.css, told apart by lightness as well as by hue.
 */

/**
 * @typedef {object} Component
 * @property {string} field as in /memory
 * @property {string} name
 * @property {string} variable the colour's name in dashboard.css
 * @property {string} meaning
 */

/** @type {readonly Component[]} */
export const COMPONENTS = [
  { field: "weights_bytes", name: "weights", variable: "--c-weights", meaning: "the model's parameters and buffers" },
  { field: "kv_cache_bytes", name: "KV cache", variable: "--c-kv", meaning: "the preallocated KV pool" },
  {
    field: "non_torch_bytes",
    name: "non torch",
    variable: "--c-non-torch",
    meaning: "contexts, collectives, graphs, workspaces, other processes; on CPU the interpreter and the heap",
  },
  {
    field: "other_tensors_bytes",
    name: "other tensors",
    variable: "--c-other-tensors",
    meaning: "allocated by PyTorch and none of the others",
  },
  {
    field: "encoder_cache_bytes",
    name: "encoder cache",
    variable: "--c-encoder",
    meaning: "encoder outputs kept on the device",
  },
  {
    field: "torch_cached_bytes",
    name: "torch cached",
    variable: "--c-cached",
    meaning: "reserved by PyTorch's allocator and not allocated; release can give back a part of it",
  },
];

const LINES = 8;

/** The colour of the nth line. @param {number} index */
export function lineVariable(index) {
  return `--line-${index % LINES}`;
}

/** A colour as it is in the theme in force. @param {string} variable */
export function colour(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

