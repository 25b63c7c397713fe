// The page: what is asked for, the state of the gateway, one or two completions on their way, and their figures.

import { ApiError, complete, getJson, metric, useKey } from "./api.js";
import { ASKED, Choice, parting } from "./choice.js";
import { Lane } from "./lane.js";

const LOOK_EVERY_MS = 3000;
const ESTIMATE_EVERY_MS = 1000;
const WAIT_EVERY_MS = 1000;

const RULES = {
  block: "Drafts are judged as a whole: at least as many are accepted as by rejection.",
  rejection: "A draft token stands with probability min(1, p/q).",
  invariant: "The target draws by noise of the seed and the position; a draft token stands if it is the same.",
};
const HEADINGS = {
  no_verifier: "The verifier is down",
  verifier_lost: "The verifier was lost",
  shutting_down: "The gateway is shutting down",
  invalid_api_key: "An API key is needed",
  queue_full: "Too much is waiting",
  rate_limit_exceeded: "This key has had what it may have for now",
  unreachable: "The gateway does not answer",
  cut: "The connection was cut",
  deadline_passed: "It took too long",
};
const HINTS = {
  no_verifier: "Start it again: this page notices when it is back.",
  verifier_lost: "Complete again once it is back.",
  shutting_down: "Ask another gateway, or try again later.",
  unreachable: "Start it again: this page notices when it is back.",
};

const part = (id) => document.getElementById(id);
const form = part("form");
const lanes = { drafted: new Lane(part("drafted")), plain: new Lane(part("plain")) };

let card = null; // of the model, once the gateway has told it
let running = null; // the AbortController of what runs
let ruleBefore = null; // the rule to go back to after side by side
let plainBefore = null; // the last plain run: its rate, and of what

// -- what is asked for ------------------------------------------------------------------------------------------------

function read() {
  const depth = part("depth").valueAsNumber;
  const speculation = part("speculation").checked;
  return {
    body: {
      ...ASKED,
      prompt: part("prompt").value,
      max_tokens: part("tokens").valueAsNumber,
      temperature: part("temperature").valueAsNumber,
      seed: part("seed").valueAsNumber,
    },
    rule: part("rule").value || undefined, // none is known before the model is
    depth,
    lanes: part("beside").checked ? ["drafted", "plain"] : [speculation ? "drafted" : "plain"],
  };
}

function bodyFor(name, asked) {
  const speculation = name === "plain" ? { draft: "off" } : asked.depth ? { k: asked.depth } : {};
  return { ...asked.body, speculation: { ...speculation, rule: asked.rule } };
}

/** Whether speculation runs with nothing beside it to compare with. */
function alone({ lanes }) {
  return lanes.length === 1 && lanes[0] === "drafted";
}

/** What a rate must have in common with another to be compared: the same work for the target. */
function work({ body, rule }) {
  return JSON.stringify([card?.id, card?.fingerprint, body.temperature, rule]);
}

function followControls() {
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
  for (const name of Object.keys(lanes)) lanes[name].section.hidden = !running && !read().lanes.includes(name);
  part("lanes").classList.toggle("two", read().lanes.length === 2);
}

function meet(model) {
  card = model;
  const draft = card.draft ? `${card.draft.kind} draft` : "no draft";
  part("model").textContent = `${card.id} · ${card.dtype} · ${draft}`;
  const rules = card.rules.filter((rule) => rule in RULES);
  part("rule").replaceChildren(...rules.map((rule) => new Option(rule, rule)));
  if (rules.includes("invariant")) part("rule").value = "invariant";
  part("tokens").max = card.max_model_len - 1;
  part("depth").max = Math.min(8, card.draft?.max_k ?? 8);
  part("speculation").checked = Boolean(card.draft);
  part("beside").disabled = !card.draft || !rules.includes("invariant");
  followControls();
}

// -- the gateway's state ----------------------------------------------------------------------------------------------

async function look() {
  try {
    const ready = await getJson("ready");
    const known = card?.id === ready.model && (card.draft?.kind ?? null) === ready.draft_kind;
    if (!known) meet((await getJson("v1/models")).data[0]);
    const draft = { connected: "ready", absent: "ready, the draft is away", off: "ready, without a draft" };
    say(draft[ready.draft], ready.draft === "absent" ? "degraded" : "ready");
    if (["no_verifier", "unreachable"].includes(part("error").dataset.code)) hideError();
  } catch (error) {
    if (error.code === "invalid_api_key") askForKey(error);
    const away = running && error.code === "no_verifier" ? ": what runs waits for it" : "";
    const heading = HEADINGS[error.code] ?? error.message;
    say(heading[0].toLowerCase() + heading.slice(1) + away, "down");
  }
}

function say(text, state) {
  const told = part("state").lastElementChild;
  if (told.textContent !== text) told.textContent = text;
  part("state").dataset.state = state;
}

/** Look again and again while somebody sees the page, but not for as long as a key is missing. */
async function watch() {
  for (;;) {
    if (!document.hidden && part("error").dataset.code !== "invalid_api_key") await look();
    await new Promise((wake) => setTimeout(wake, LOOK_EVERY_MS));
  }
}

function askForKey(error) {
  const first = part("key-field").hidden;
  part("key-field").hidden = false;
  showError(part("key").value ? error : new ApiError("Enter one that this gateway knows.", error));
  if (first) part("key").focus();
}

// -- errors -----------------------------------------------------------------------------------------------------------

function showError(error) {
  const box = part("error"), [heading, message, hint] = box.children;
  if (!error.code) console.error(error); // not the API's: a bug of this page
  box.dataset.code = error.code ?? "";
  heading.textContent = HEADINGS[error.code] ?? "This did not work";
  message.textContent = error.message;
  hint.textContent = HINTS[error.code] ?? (error.retryAfter ? `Try again in ${error.retryAfter} s.` : "");
  box.hidden = false;
}

function hideError() {
  part("error").hidden = true;
  part("error").dataset.code = "";
}

// -- a run ------------------------------------------------------------------------------------------------------------

async function run() {
  const asked = read(), choices = {};
  hideError();
  begin(asked);
  try {
    for (const name of asked.lanes) await decode(name, asked, choices);
    part("verdict").textContent = verdict(asked, choices);
  } catch (error) {
    part("verdict").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.code === "invalid_api_key") askForKey(error);
    else if (error.name !== "AbortError") showError(error);
  } finally {
    end();
  }
}

function begin(asked) {
  for (const figure of ["tau", "rate"]) part(figure).textContent = "–";
  showGain(null, `multiplier${alone(asked) ? ": side by side measures it" : " over plain decoding"}`);
  for (const name of Object.keys(lanes)) {
    lanes[name].section.hidden = !asked.lanes.includes(name);
    lanes[name].clear(asked.body.prompt, asked.lanes[0] === name ? "" : "waits for its turn");
  }
  part("verdict").textContent = "Decoding.";
  // Where the results are below the form, they would come unseen.
  if (part("results").getBoundingClientRect().top > 0.7 * innerHeight) part("results").scrollIntoView();
  running = new AbortController();
  swap("run", "stop");
  form.setAttribute("aria-busy", "true");
}

function end() {
  running = null;
  swap("stop", "run");
  form.setAttribute("aria-busy", "false");
  followControls();
}

async function decode(name, asked, choices) {
  const choice = (choices[name] = new Choice()), lane = lanes[name];
  const estimates = alone(asked) && !asked.depth ? followEstimate(choice) : null;
  const wait = tellWait(lane);
  try {
    for await (const chunk of complete(bodyFor(name, asked), running.signal)) {
      wait.stop();
      choice.add(chunk, performance.now());
      lane.show(choice);
      lane.say(facts(choice));
      showFigures(asked, choices);
    }
    if (name === "plain" && choice.rate) plainBefore = { rate: choice.rate, of: work(asked) };
  } finally {
    wait.stop();
    await estimates?.stop();
  }
}

/** Say how long the first token has been waited for, until stopped: a long prompt takes its time. */
function tellWait(lane) {
  const began = performance.now();
  const tell = () => lane.say(`reads the prompt: ${Math.round((performance.now() - began) / 1000)} s`);
  const timer = setInterval(tell, WAIT_EVERY_MS);
  tell();
  return { stop: () => clearInterval(timer) };
}

function facts(choice) {
  const told = [`${choice.ids.length} tokens`, `${choice.rounds.length} rounds`];
  if (choice.rate) told.push(`${short(choice.rate)} tokens/s`);
  if (choice.metrics) told.push(`first after ${short(choice.metrics.time_to_first_token_ms)} ms`);
  if (choice.finishReason === "stop") told.push("ended by the model");
  return told.join(" · ");
}

// -- figures ----------------------------------------------------------------------------------------------------------

function showFigures(asked, { drafted, plain }) {
  const shown = drafted ?? plain;
  part("tau").textContent = shown.tau?.toFixed(2) ?? "–";
  part("rate").textContent = shown.rate ? short(shown.rate) : "–";
  if (drafted?.rate && plain?.rate) showGain(drafted.rate / plain.rate, "multiplier, measured here");
  else if (!drafted) showGain(1, "multiplier: this is plain decoding");
  else if (alone(asked) && asked.depth && drafted.rate && plainBefore?.of === work(asked))
    showGain(drafted.rate / plainBefore.rate, "multiplier over the last plain run");
}

function showGain(gain, name) {
  part("gain").textContent = gain === null ? "–" : `${gain.toFixed(2)} ×`;
  part("gain-name").textContent = name;
}

/** Show what the gateway has found out about the multiplier at the depth that it chooses, until stopped. */
function followEstimate(choice) {
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

function verdict(asked, { drafted, plain }) {
  if (!drafted || !plain) {
    const { drafted: guesses, accepted } = drafted ?? plain;
    return guesses ? `Done: ${accepted} of ${guesses} draft tokens accepted.` : "Done.";
  }
  const at = parting(drafted, plain);
  if (at === null) return `Both texts are equal, in all ${plain.ids.length} tokens: speculation changed the speed alone.`;
  const reason = card.dtype === "float32" ? "" : ` In ${card.dtype} a token can turn where two are as good as equal.`;
  return `The texts part at token ${at + 1}.${reason}`;
}

function short(number) {
  return number < 10 ? number.toFixed(1) : Math.round(number).toString();
}

// -- wiring -----------------------------------------------------------------------------------------------------------

function start() {
  if (!running && form.reportValidity()) run();
}

/** Another button in the place of one, with its focus. */
function swap(shown, other) {
  const focused = document.activeElement === part(shown);
  part(other).hidden = false;
  part(shown).hidden = true;
  if (focused) part(other).focus({ preventScroll: true });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
part("stop").addEventListener("click", () => running?.abort());
form.addEventListener("input", followControls);
// What is wrong inside of closed details could not be shown.
form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
part("key").addEventListener("change", () => {
  useKey(part("key").value);
  hideError();
  look();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault(); // in some fields it would send the form as well
  start();
});

followControls();
watch();
