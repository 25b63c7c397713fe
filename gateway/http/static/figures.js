// The figures of a run, and in words what it showed: tokens a round, tokens a second, the multiplier.

import { metric } from "./api.js";
import { parting } from "./choice.js";
import { part } from "./element.js";

const ESTIMATE_EVERY_MS = 1000;

let plainBefore = null; // the last plain run: its rate, and of what

/** A number as it is read: few digits. */
export function short(number) {
  return number < 10 ? number.toFixed(1) : Math.round(number).toString();
}

/** Whether speculation runs with nothing beside it to compare with. */
function alone({ lanes }) {
  return lanes.length === 1 && lanes[0] === "drafted";
}

/** What a rate must have in common with another to be compared: the same work for the target. */
function work({ body, rule }, card) {
  return JSON.stringify([card?.id, card?.fingerprint, body.temperature, rule]);
}

export function clearFigures(asked) {
  for (const figure of ["tau", "rate"]) part(figure).textContent = "–";
  showGain(null, `multiplier${alone(asked) ? ": side by side measures it" : " over plain decoding"}`);
}

export function showFigures(asked, { drafted, plain }, card) {
  const shown = drafted ?? plain;
  part("tau").textContent = shown.tau?.toFixed(2) ?? "–";
  part("rate").textContent = shown.rate ? short(shown.rate) : "–";
  if (drafted?.rate && plain?.rate) showGain(drafted.rate / plain.rate, "multiplier, measured here");
  else if (!drafted) showGain(1, "multiplier: this is plain decoding");
  else if (alone(asked) && asked.depth && drafted.rate && plainBefore?.of === work(asked, card))
    showGain(drafted.rate / plainBefore.rate, "multiplier over the last plain run");
}

function showGain(gain, name) {
  part("gain").textContent = gain === null ? "–" : `${gain.toFixed(2)} ×`;
  part("gain-name").textContent = name;
}

/** Keep the rate of a plain run, to compare later ones with. */
export function keepPlain(asked, choice, card) {
  if (choice.rate) plainBefore = { rate: choice.rate, of: work(asked, card) };
}

/** Show what the gateway has found out about the multiplier at the depth that it chooses, until stopped. */
export function followEstimate(asked, choice) {
  if (!alone(asked) || asked.depth) return null;
  const tell = async () => {
    if (!choice.rounds.length) return;
    const gain = await metric("spire_multiplier_measured").catch(() => null);
    if (gain !== null) showGain(gain, "multiplier, by the gateway’s rounds");
  };
  const timer = setInterval(tell, ESTIMATE_EVERY_MS);
  return {
    stop() {
      clearInterval(timer);
      return tell();
    },
  };
}

/** What a lane says of its choice. */
export function facts(choice) {
  const told = [`${choice.ids.length} tokens`, `${choice.rounds.length} rounds`];
  if (choice.rate) told.push(`${short(choice.rate)} tokens/s`);
  if (choice.metrics) told.push(`first after ${short(choice.metrics.time_to_first_token_ms)} ms`);
  if (choice.finishReason === "stop") told.push("ended by the model");
  return told.join(" · ");
}

/** What a run has shown, once it is over. */
export function verdict({ drafted, plain }, card) {
  if (!drafted || !plain) {
    const { drafted: guesses, accepted } = drafted ?? plain;
    return guesses ? `Done: ${accepted} of ${guesses} draft tokens accepted.` : "Done.";
  }
  const at = parting(drafted, plain);
  if (at === null) return `Both texts are equal, in all ${plain.ids.length} tokens: speculation changed the speed alone.`;
  const reason = card.dtype === "float32" ? "" : ` In ${card.dtype} a token can turn where two are as good as equal.`;
  return `The texts part at token ${at + 1}.${reason}`;
}
