/**
 * What the page and the sidecar both know: written by `make docs` from
 * app/highwater/model: engine.py, components.py, policy.py and remedies.py.
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

/**
 * The components of device memory, in the order in which they are stacked, from the bottom.
 * @type {readonly {field: string, name: string, variable: string, meaning: string}[]}
 */
export const COMPONENTS = [
  { field: "weights_bytes", name: "weights", variable: "--c-weights", meaning: "the model's parameters and buffers" },
  { field: "kv_cache_bytes", name: "KV cache", variable: "--c-kv-cache", meaning: "the preallocated KV pool" },
  { field: "non_torch_bytes", name: "non-torch", variable: "--c-non-torch", meaning: "contexts, collectives, graphs, workspaces, other processes on the device; on CPU the interpreter, its libraries and the heap" },
  { field: "other_tensors_bytes", name: "other tensors", variable: "--c-other-tensors", meaning: "allocated by PyTorch and none of the others: buffers, workspaces and graphs' inputs at rest, and activations while a step runs" },
  { field: "encoder_cache_bytes", name: "encoder cache", variable: "--c-encoder-cache", meaning: "encoder outputs kept on the device" },
  { field: "torch_cached_bytes", name: "allocator reserve", variable: "--c-torch-cached", meaning: "reserved by PyTorch's allocator and not allocated: fragments, captured graphs' memory, and what release can give back" },
];

/** Where a rank's pressure shows what each remedy could give there. @type {Record<string, string>} */
export const GAIN_FIELDS = { release: "can_release_bytes", trim_encoder_cache: "can_trim_bytes" };

/** The policy's levels and phases as people read them. @type {Record<string, string>} */
export const WORDS = { calm: "fine", short: "short", urgent: "very short", acting: "giving back", resting: "waiting", held: "cannot act", unknown: "not known" };

/** vLLM's own resets: what each frees, and what it does not. */
export const RESETS = [
  { name: "reset_encoder_cache", frees: "encoder outputs on the device; they go back to PyTorch's allocator, and with release to the device", keeps: "weights, KV pool, processor caches on the host" },
  { name: "reset_mm_cache", frees: "processed images in the API server's and EngineCore's host memory", keeps: "device memory: encoder outputs, weights and KV pool stay, and so does the allocator's reserve" },
  { name: "reset_prefix_cache", frees: "KV blocks that hold cached prefixes, for new requests", keeps: "device memory: the KV pool is preallocated and keeps its size" },
];
