// The gateway's REST API as this page uses it. The key lives in this module, for as long as the page does.

const UNREACHABLE = "The gateway does not answer: it was stopped, or the network is down.";
const CUT = "The answer ended before it was complete.";

let key = "";

export function useKey(value) {
  key = value.trim();
}

export function hasKey() {
  return Boolean(key);
}

/** What the gateway said against a request; `code` is the API's, "unreachable" or "cut". */
export class ApiError extends Error {
  constructor(message, { code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { code, retryAfter });
  }
}

export async function getJson(path) {
  return (await ask(path)).json();
}

/** The value of a metric without labels, null where there is none. */
export async function metric(name) {
  const text = await (await ask("metrics")).text();
  const line = text.split("\n").find((line) => line.startsWith(`${name} `));
  return line ? Number(line.split(" ")[1]) : null;
}

/** The chunks of a streamed completion or chat, as they come. Raises ApiError, also for an error in mid-stream. */
export async function* complete({ path, body }, signal) {
  const response = await ask(path, { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new ApiError(CUT, { code: "cut" });
}

async function ask(path, options = {}) {
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await answered(fetch(path, { ...options, headers, cache: "no-store" }), UNREACHABLE, "unreachable");
  if (response.ok) return response;
  const { status, statusText } = response;
  const told = await response.json().catch(() => ({}));
  const error = told.error ?? { message: `${status} ${statusText}` };
  throw new ApiError(error.message, { ...error, retryAfter: response.headers.get("Retry-After") });
}

/** What is awaited; what goes wrong on the way is an ApiError of this code. Who aborts gets the AbortError. */
async function answered(awaited, message, code) {
  try {
    return await awaited;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(message, { code });
  }
}

/** The data of server-sent events. Comments are left out. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await answered(reader.read(), CUT, "cut");
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
