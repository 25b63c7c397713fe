// The form: what to ask for, with which draft, rule and seed.

import { ASKED } from "./choice.js";
import { element, part } from "./element.js";

const RULES = {
  block: "Drafts are judged as a whole: at least as many are accepted as by rejection.",
  rejection: "A draft token stands with probability min(1, p/q).",
  invariant: "The target draws by noise of the seed and the position; a draft token stands if it is the same.",
};
const QUESTIONS = [
  "What is the capital of France?",
  "A train travels 120 km in 90 minutes. How fast is it in km/h?",
  "Write a Python function that reverses a string.",
];
const BEGINNINGS = [
  "It was a cold and stormy night, and",
  "The old man looked at the sea and",
  "Once upon a time there was a king who",
];
// In a chat: at temperature 1 small models lose the thread, and few answers fit in 128 tokens.
const CHAT_TEMPERATURE = 0.7, CHAT_TOKENS = 256;
// Short enough to be read aloud and typed.
const SEEDS = 1_000_000;

let card = null; // of the model, once the gateway has told it
let ruleBefore = null; // the rule to go back to after side by side

// -- the model ------------------------------------------------------------------------------------------------------

/** Offer what this model and its draft can do. */
export function meet(model) {
  card = model;
  const rules = card.rules.filter((rule) => rule in RULES);
  part("rule").replaceChildren(...rules.map((rule) => new Option(rule, rule)));
  if (rules.includes("invariant")) part("rule").value = "invariant";
  part("tokens").max = card.max_model_len - 1;
  part("depth").max = card.draft?.max_k ?? 0;
  part("speculation").checked = Boolean(card.draft);
  const comparable = Boolean(card.draft) && rules.includes("invariant");
  part("beside").disabled = !comparable;
  part("beside").checked = comparable;
  if (card.chat_template) [part("temperature").value, part("tokens").value] = [CHAT_TEMPERATURE, CHAT_TOKENS];
  part("temperature").value = card.suggested_sampling.temperature ?? part("temperature").value;
  word(card.chat_template ? QUESTIONS : BEGINNINGS);
  follow();
}

/** Name the form's parts for chats or for completions, and offer examples. */
function word(examples) {
  const prompt = part("prompt"), untouched = prompt.value === prompt.defaultValue;
  part("prompt-name").textContent = card.chat_template ? "Message" : "Prompt";
  part("run-name").textContent = card.chat_template ? "Send" : "Complete";
  prompt.defaultValue = examples[0];
  if (untouched) prompt.value = examples[0];
  part("examples").replaceChildren(...examples.map(drawExample));
}

function drawExample(text) {
  const button = element("button", "example", text);
  button.type = "button";
  return button;
}

// -- the controls ---------------------------------------------------------------------------------------------------

/** Make the controls agree with one another. */
export function follow() {
  const depth = part("depth"), speculation = part("speculation"), beside = part("beside"), rule = part("rule");
  speculation.disabled = beside.checked || !card?.draft;
  if (beside.checked) speculation.checked = true;
  depth.disabled = !speculation.checked || !card?.draft;
  part("depth-value").textContent = depth.valueAsNumber || (card?.draft?.k ?? "auto");
  depth.setAttribute("aria-valuetext", depth.valueAsNumber ? `${depth.value} tokens` : "chosen by the gateway");
  part("temperature-value").textContent = part("temperature").value;
  if (beside.checked && !rule.disabled) [ruleBefore, rule.value] = [rule.value, "invariant"];
  if (!beside.checked && rule.disabled) rule.value = ruleBefore;
  rule.disabled = beside.checked;
  part("rule-help").textContent = RULES[rule.value] ?? "";
  part("seed").required = part("pinned").checked;
}

/** A seed that is typed is meant to stay. */
export function pin() {
  part("pinned").checked = Boolean(part("seed").value);
}

/** Draw a new seed unless one is pinned. */
export function drawSeed() {
  if (part("pinned").checked) return;
  part("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS;
}

// -- the request ----------------------------------------------------------------------------------------------------

/** The names of the lanes that a run will have: with speculation, plain, or both. */
function laneNames() {
  if (part("beside").checked) return ["drafted", "plain"];
  return [part("speculation").checked ? "drafted" : "plain"];
}

/** What the form asks for now; in a chat, after the messages of the conversation. */
export function read(conversation) {
  const prompt = part("prompt").value, chats = Boolean(card?.chat_template);
  return {
    prompt,
    chats,
    body: {
      ...(chats ? { messages: conversation.asking(prompt) } : { prompt }),
      max_tokens: part("tokens").valueAsNumber,
      temperature: part("temperature").valueAsNumber,
      seed: part("seed").valueAsNumber,
    },
    rule: part("rule").value || undefined, // none is known before the model is
    depth: part("depth").valueAsNumber,
    lanes: laneNames(),
  };
}

/** The request of a lane as its user would send it. */
export function requestFor(name, { chats, body, depth, rule }) {
  const speculation = name === "plain" ? { draft: "off" } : depth ? { k: depth } : {};
  return {
    path: chats ? "v1/chat/completions" : "v1/completions",
    body: { ...body, speculation: { ...speculation, rule } },
  };
}

/** The same request, with all that the page shows of the answer. */
export function watched({ path, body }) {
  const logprobs = body.messages ? true : 0;
  return { path, body: { ...body, ...ASKED, logprobs } };
}
