// The page: the state of the gateway, and one or two completions on their way.

import { ApiError, complete, getJson, hasKey, useKey } from "./api.js";
import { Choice } from "./choice.js";
import { copy } from "./clipboard.js";
import { Conversation } from "./conversation.js";
import { part } from "./element.js";
import { HEADINGS, hideError, showError, shownCode } from "./error.js";
import { clearFigures, facts, followEstimate, keepPlain, showFigures, verdict } from "./figures.js";
import { drawSeed, follow, meet, pin, read, requestFor, watched } from "./form.js";
import { Lane } from "./lane.js";
import { showServed } from "./served.js";
import { curl, python } from "./snippet.js";

const LOOK_EVERY_MS = 3000;
const WAIT_EVERY_MS = 1000;
const SNIPPETS = { curl, python };

const form = part("form");
const lanes = { drafted: new Lane(part("drafted")), plain: new Lane(part("plain")) };
const conversation = new Conversation();

let card = null; // of the model, once the gateway has told it
let running = null; // the AbortController of what runs
let asked = null; // what was asked last

// -- the gateway's state ----------------------------------------------------------------------------------------------

async function look() {
  try {
    const ready = await getJson("ready");
    const known = card?.id === ready.model && (card.draft?.kind ?? null) === ready.draft_kind;
    if (!known) await learn(ready);
    const draft = { connected: "ready", absent: "ready, the draft is away", off: "ready, without a draft" };
    say(draft[ready.draft], ready.draft === "absent" ? "degraded" : "ready");
    if (["no_verifier", "unreachable"].includes(shownCode())) hideError();
  } catch (error) {
    if (error.code === "invalid_api_key") askForKey(error);
    const away = running && error.code === "no_verifier" ? ": what runs waits for it" : "";
    const heading = HEADINGS[error.code] ?? error.message;
    say(heading[0].toLowerCase() + heading.slice(1) + away, "down");
  }
}

/** Ask what is served, and offer it in the form if that is new. */
async function learn(ready) {
  const before = card;
  card = (await getJson("v1/models")).data[0];
  showServed(card, ready);
  if (before?.fingerprint === card.fingerprint && before.draft?.name === card.draft?.name) return;
  meet(card);
}

function say(text, state) {
  const told = part("state").lastElementChild;
  if (told.textContent !== text) told.textContent = text;
  part("state").dataset.state = state;
}

/** Look again and again while somebody sees the page, but not for as long as a key is missing. */
async function watch() {
  for (;;) {
    if (!document.hidden && shownCode() !== "invalid_api_key") await look();
    await new Promise((wake) => setTimeout(wake, LOOK_EVERY_MS));
  }
}

function askForKey(error) {
  const first = part("key-field").hidden;
  part("key-field").hidden = false;
  part("gateway-links").hidden = true; // a browser that follows a link sends no key
  showError(part("key").value ? error : new ApiError("Enter one that this gateway knows.", error));
  if (first) part("key").focus();
}

// -- a run ------------------------------------------------------------------------------------------------------------

async function run() {
  const choices = {};
  drawSeed();
  asked = read(conversation);
  hideError();
  begin();
  try {
    for (const name of asked.lanes) await decode(name, choices);
    part("verdict").textContent = verdict(choices, card);
  } catch (error) {
    part("verdict").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.code === "invalid_api_key") askForKey(error);
    else if (error.name !== "AbortError") showError(error);
  } finally {
    end(choices[asked.lanes[0]]);
  }
  await showGains();
}

function begin() {
  clearFigures(asked);
  conversation.draw();
  for (const name of asked.lanes) {
    lanes[name].clear(asked.prompt, asked.lanes[0] === name ? "" : "waits for its turn", asked.chats);
  }
  if (asked.chats) part("prompt").value = "";
  showLanes(asked.lanes);
  part("results").dataset.state = "outcome";
  part("used-seed").textContent = asked.body.seed;
  part("copied").textContent = "";
  part("anew").hidden = true;
  part("verdict").textContent = "Decoding.";
  // Where the results are below the form, they would come unseen.
  if (part("results").getBoundingClientRect().top > 0.7 * innerHeight) part("results").scrollIntoView();
  running = new AbortController();
  swap("run", "stop");
  form.setAttribute("aria-busy", "true");
}

/** End a run. `choice`: that of the first lane, whose text a chat goes on with. */
function end(choice) {
  running = null;
  swap("stop", "run");
  form.setAttribute("aria-busy", "false");
  const answered = Boolean(choice?.ids.length);
  if (!answered) part("results").dataset.state = conversation.isEmpty ? "first" : "history";
  if (asked.chats) takeTurn(answered ? choice.text : null);
  follow();
}

/** Go on with a chat; without an answer the question goes back into its field. */
function takeTurn(answer) {
  if (answer !== null) conversation.keep(asked.prompt, answer);
  else part("prompt").value ||= asked.prompt;
  part("anew").hidden = conversation.isEmpty;
}

function beginAnew() {
  conversation.clear();
  part("results").dataset.state = "first";
  part("verdict").textContent = "";
  part("anew").hidden = true;
  part("prompt").focus();
}

function showLanes(names) {
  for (const name of Object.keys(lanes)) lanes[name].section.hidden = !names.includes(name);
  part("lanes").classList.toggle("two", names.length === 2);
}

async function decode(name, choices) {
  const choice = (choices[name] = new Choice()), lane = lanes[name];
  const estimates = followEstimate(asked, choice);
  const wait = tellWait(lane);
  try {
    for await (const chunk of complete(watched(requestFor(name, asked)), running.signal)) {
      wait.stop();
      choice.add(chunk, performance.now());
      lane.show(choice);
      lane.say(facts(choice));
      showFigures(asked, choices, card);
    }
    if (name === "plain") keepPlain(asked, choice, card);
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

/** Ask what the rounds so far have shown of the draft's gain. */
async function showGains() {
  const ready = await getJson("ready").catch(() => null);
  if (ready) await learn(ready).catch(() => null);
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

async function copySnippet(kind) {
  const request = requestFor(asked.lanes[0], asked);
  const text = SNIPPETS[kind]({ ...request, body: { model: card.id, ...request.body } }, hasKey());
  part("copied").textContent = (await copy(text)) ? "Copied." : "This browser does not let the page copy.";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
part("stop").addEventListener("click", () => running?.abort());
part("anew").addEventListener("click", beginAnew);
part("examples").addEventListener("click", (event) => {
  const example = event.target.closest("button");
  if (!example || running) return;
  part("prompt").value = example.textContent;
  start();
});
part("again").addEventListener("click", (event) => {
  const { copy: kind } = event.target.dataset;
  if (kind) copySnippet(kind);
});
part("seed").addEventListener("input", pin);
form.addEventListener("input", follow);
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

follow();
watch();
