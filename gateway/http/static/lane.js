// A choice on the page: its text, token by token, and its rounds, a column each.

import { targetOf } from "./choice.js";
import { element } from "./element.js";

const KINDS = {
  accepted: "accepted from the draft",
  corrected: "corrected by the target",
  bonus: "added by the target",
  alone: "by the target alone",
};
const ENDS = {
  corrected: "then corrected by the target",
  bonus: "then one added by the target",
  alone: "one by the target alone",
};

export class Lane {
  #text;
  #rounds;
  #facts;
  #drawn = 0;

  constructor(section) {
    this.section = section;
    this.#text = section.querySelector(".text");
    this.#rounds = section.querySelector(".rounds");
    this.#facts = section.querySelector(".facts");
    section.addEventListener("pointerover", (event) => this.#point(event.target.closest("[data-round]")));
    section.addEventListener("pointerleave", () => this.#point(null));
    this.#rounds.addEventListener("focusin", (event) => this.#point(event.target.closest("[data-round]")));
    this.#rounds.addEventListener("focusout", () => this.#point(null));
    this.#rounds.addEventListener("keydown", (event) => this.#walk(event));
  }

  /** Begin with a prompt: a text goes on with it, a question stands above its answer. */
  clear(prompt, facts, asQuestion) {
    this.#drawn = 0;
    this.#rounds.replaceChildren();
    this.#text.replaceChildren(element(asQuestion ? "p" : "span", "prompt", prompt));
    this.say(facts);
  }

  say(facts) {
    this.#facts.textContent = facts;
  }

  /** Show what a choice has grown by. */
  show(choice) {
    for (const token of choice.news()) if (token.text) this.#text.append(drawToken(token));
    for (; this.#drawn < choice.rounds.length; this.#drawn++) {
      this.#rounds.append(drawRound(choice.rounds[this.#drawn], this.#drawn));
    }
    this.#rounds.scrollTop = this.#rounds.scrollHeight;
  }

  /** Mark a round and the tokens it gave, and no other. */
  #point(marked) {
    for (const old of this.section.querySelectorAll(".pointed")) old.classList.remove("pointed");
    if (!marked) return;
    const own = this.section.querySelectorAll(`[data-round="${marked.dataset.round}"]`);
    for (const part of own) part.classList.add("pointed");
  }

  /** The rounds are one stop of the tab key; arrows go from one to the next. */
  #walk(event) {
    const buttons = [...this.#rounds.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    const goals = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 };
    const goal = buttons[goals[event.key]];
    if (!goal) return;
    event.preventDefault();
    buttons[at].tabIndex = -1;
    goal.tabIndex = 0;
    goal.focus();
  }
}

function drawToken({ text, kind, round, probability }) {
  const token = element("span", `token ${kind}`, text);
  token.title = `${KINDS[kind]} · probability ${(100 * probability).toPrecision(2)} %`;
  if (round !== undefined) token.dataset.round = round;
  return token;
}

function drawRound(round, at) {
  const item = element("li"), button = element("button", "round");
  // Where the text ends in the midst of a round, the target's own token is not part of it.
  const end = round.tokens > round.accepted ? targetOf(round) : null;
  button.type = "button";
  button.tabIndex = at ? -1 : 0;
  button.dataset.round = at;
  const guesses = round.drafted ? [`${round.drafted} drafted`, `${round.accepted} accepted`] : [];
  button.title = `Round ${at + 1}: ${[...guesses, ...(end ? [ENDS[end]] : [])].join(", ")}`;
  button.setAttribute("aria-label", button.title);
  const slots = [...Array(round.drafted).keys()].map((slot) => (slot < round.accepted ? "accepted" : "rejected"));
  // The target's own token stands in the place of the first one that it rejected.
  if (end) slots[round.accepted] = end;
  button.append(...slots.map((kind) => element("i", `slot ${kind}`)));
  item.append(button);
  return item;
}

