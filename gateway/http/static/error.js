// The box that says what went wrong, and what to do about it.

import { part } from "./element.js";

export const HEADINGS = {
  no_verifier: "The verifier is down",
  verifier_lost: "The verifier was lost",
  shutting_down: "The gateway is shutting down",
  invalid_api_key: "An API key is needed",
  queue_full: "Too much is waiting",
  rate_limit_exceeded: "This key has had what it may have for now",
  context_length_exceeded: "Too long for the context",
  unreachable: "The gateway does not answer",
  cut: "The connection was cut",
  deadline_passed: "It took too long",
};
const HINTS = {
  no_verifier: "Start it again: this page notices when it is back.",
  verifier_lost: "Ask again once it is back.",
  shutting_down: "Ask another gateway, or try again later.",
  context_length_exceeded: "Shorten the prompt, ask for fewer tokens, or start a new chat.",
  unreachable: "Start it again: this page notices when it is back.",
};

export function showError(error) {
  const box = part("error"), [heading, message, hint] = box.children;
  if (!error.code) console.error(error); // not the API's: a bug of this page
  box.dataset.code = error.code ?? "";
  heading.textContent = HEADINGS[error.code] ?? "This did not work";
  message.textContent = error.message;
  hint.textContent = HINTS[error.code] ?? (error.retryAfter ? `Try again in ${error.retryAfter} s.` : "");
  box.hidden = false;
}

export function hideError() {
  part("error").hidden = true;
  part("error").dataset.code = "";
}

/** The code of the error that is shown; empty if none is. */
export function shownCode() {
  return part("error").dataset.code ?? "";
}
