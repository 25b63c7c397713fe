// A chat's history: it lives in this page, and each request sends all of it.

import { element, part } from "./element.js";

const SPEAKERS = { user: "You", assistant: "Model" };

export class Conversation {
  #messages = [];

  get isEmpty() {
    return !this.#messages.length;
  }

  /** The messages of a request that asks this next. */
  asking(question) {
    return [...this.#messages, { role: "user", content: question }];
  }

  /** Keep a question with its answer. */
  keep(question, answer) {
    this.#messages = [...this.asking(question), { role: "assistant", content: answer }];
  }

  clear() {
    this.#messages = [];
    this.draw();
  }

  /** Show the messages before the next question, the last ones in view. */
  draw() {
    const history = part("history");
    history.replaceChildren(...this.#messages.map(drawMessage));
    history.hidden = this.isEmpty;
    history.scrollTop = history.scrollHeight;
  }
}

function drawMessage({ role, content }) {
  const item = element("li", role);
  item.append(element("strong", "", SPEAKERS[role]), element("p", "", content));
  return item;
}
