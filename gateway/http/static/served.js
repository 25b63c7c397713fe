// What is served here, in words: the target, what computes it, its draft, and from where drafting pays.

import { element, part } from "./element.js";

const UNITS = [
  [1e12, "T"],
  [1e9, "B"],
  [1e6, "M"],
  [1e3, "K"],
];

/** Show the gateway's card of the model, and the state that it told with it. */
export function showServed(card, ready) {
  const rows = { Model: model(card, ready), Context: context(card, ready), Kernels: ready.kernels };
  Object.assign(rows, card.draft ? ofDraft(card.draft) : { Draft: "none: decoding is plain" });
  part("facts").replaceChildren(...Object.entries(rows).map(([name, text]) => drawRow(name, text)));
  part("boards").hidden = !ready.boards;
  if (ready.boards) part("boards").href = ready.boards;
  part("model").textContent = [card.id, card.dtype, card.draft ? `${card.draft.kind} draft` : "no draft"].join(" · ");
}

function model({ parameters, dtype }, { device }) {
  return `${counted(parameters)} parameters, ${dtype}, on ${device}`;
}

function context({ max_model_len }, { max_sequences }) {
  return `${grouped(max_model_len)} tokens, ${grouped(max_sequences)} requests at once`;
}

function ofDraft(draft) {
  const k = draft.k === "auto" ? `k up to ${draft.max_k}, chosen for each round` : `k = ${draft.k}`;
  const memory = draft.bytes_per_sequence ? `${grouped(draft.bytes_per_sequence)} bytes a sequence, whatever its context` : null;
  return {
    Draft: `${draft.kind}, ${k}`,
    ...(memory && { "Draft’s memory": memory }),
    "Drafting pays": draft.k === "auto" ? pays(draft.gains) : "not compared, because k is fixed",
  };
}

/** From which context on drafting has paid so far, for each number of requests that decode together. */
function pays(gains) {
  if (!gains.length) return "not measured yet";
  const loads = [...new Set(gains.map((gain) => gain.sequences))];
  return loads.map((load) => `${requests(load)} ${from(gains.filter((gain) => gain.sequences === load))}`).join("; ");
}

function from(gains) {
  const paying = gains.filter((gain) => gain.multiplier > 1);
  const contexts = gains.map((gain) => gain.context);
  if (!paying.length) return `not up to ${grouped(Math.max(...contexts))} tokens`;
  const least = Math.min(...paying.map((gain) => gain.context)), best = Math.max(...paying.map((gain) => gain.multiplier));
  return `from ${grouped(least)} tokens on, up to ${best.toFixed(2)}\u00a0×`;
}

function requests(load) {
  return load === 1 ? "1 request:" : `${load} requests:`;
}

function drawRow(name, text) {
  const row = element("div");
  row.append(element("dt", "", name), element("dd", "", text));
  return row;
}

function grouped(number) {
  return number.toLocaleString("en");
}

/** A large number with two or three digits: 8.5 M, 135 M. */
function counted(number) {
  const [unit, letter] = UNITS.find(([unit]) => number >= unit) ?? [1, ""];
  const value = number / unit;
  return `${value < 100 ? Number(value.toPrecision(2)) : Math.round(value)} ${letter}`.trim();
}
