// One choice of a completion as it grows: its tokens with their text and who chose them, its rounds, its speed.

// Text may begin so many letters behind the text before it, if bytes between the two form no character.
const MOST_UNKNOWN = 4;

/** The fields of a request whose chunks can be added to a choice. */
export const ASKED = {
  stream: true,
  return_token_ids: true,
  return_token_origins: true,
  return_rounds: true,
  return_metrics: true,
};

export class Choice {
  ids = [];
  rounds = [];
  finishReason = null;
  metrics = null;
  #letters = []; // by code point, as the API counts them
  #offsets = [];
  #logprobs = [];
  #spelling = new Spelling();
  #roundOf = [];
  #shown = 0;
  #firstAt = null;
  #lastAt = null;
  #atFirst = 0;

  /** Take over a chunk that came at `now`, in milliseconds. */
  add(chunk, now) {
    this.metrics = chunk.metrics ?? this.metrics;
    for (const piece of chunk.choices) this.#addPiece(piece, now);
  }

  #addPiece(piece, now) {
    for (const round of piece.rounds) {
      for (let at = 0; at < round.tokens; at++) this.#roundOf[round.begin + at] = this.rounds.length;
      this.rounds.push(round);
    }
    this.ids.push(...piece.token_ids);
    this.#letters.push(...(piece.text ?? piece.delta.content));
    this.#addLogprobs(piece.logprobs);
    this.finishReason = piece.finish_reason ?? this.finishReason;
    if (!piece.token_ids.length) return;
    if (this.#firstAt === null) [this.#firstAt, this.#atFirst] = [now, this.ids.length];
    this.#lastAt = now;
  }

  /** A completion tells where each token's text begins, a chat tells each token's bytes. */
  #addLogprobs({ content, text_offset, token_logprobs }) {
    this.#offsets.push(...(text_offset ?? content.map(({ bytes }) => this.#spelling.place(bytes, this.#letters))));
    this.#logprobs.push(...(token_logprobs ?? content.map(({ logprob }) => logprob)));
  }

  get text() {
    return this.#letters.join("");
  }

  /** The tokens whose text has come since the last call: {text, kind, round, probability}. */
  *news() {
    for (; this.#shown < this.#offsets.length; this.#shown++) {
      const at = this.#shown;
      const text = this.#letters.slice(this.#offsets[at], this.#offsets[at + 1]).join("");
      yield { text, kind: this.#kind(at), round: this.#roundOf[at], probability: Math.exp(this.#logprobs[at]) };
    }
  }

  #kind(at) {
    const round = this.rounds[this.#roundOf[at]];
    if (!round) return "alone";
    return at < round.begin + round.accepted ? "accepted" : targetOf(round);
  }

  get drafted() {
    return this.rounds.reduce((sum, round) => sum + round.drafted, 0);
  }

  get accepted() {
    return this.rounds.reduce((sum, round) => sum + round.accepted, 0);
  }

  /** Mean tokens a round. */
  get tau() {
    return this.rounds.length ? 1 + this.accepted / this.rounds.length : null;
  }

  /** Tokens a second once it decodes: as seen here while it runs, by the gateway's clock at the end. */
  get rate() {
    if (this.metrics?.mean_itl_ms) return 1000 / this.metrics.mean_itl_ms;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    return seconds > 0 ? (this.ids.length - this.#atFirst) / seconds : null;
  }
}

/** Finds the place of each token in a text, given the tokens' bytes one after another. */
class Spelling {
  #reader = new TextDecoder("utf-8", { ignoreBOM: true });
  #end = 0;

  place(bytes, letters) {
    const own = this.#reader.decode(Uint8Array.from(bytes), { stream: true });
    const begin = this.#end;
    // A tokenizer may drop the space before the first word. The name of a special token is not in the text at all.
    const found = [own, own.trimStart()].map((text) => endOf([...text], letters, begin)).find((end) => end !== null);
    this.#end = found ?? begin;
    return begin;
  }
}

/** Where a text that begins at a place, or a few letters behind it, ends; null where it does not begin there. */
function endOf(text, letters, begin) {
  for (let at = begin; at <= begin + MOST_UNKNOWN; at++) {
    if (text.every((letter, offset) => letters[at + offset] === letter)) return at + text.length;
  }
  return null;
}

/** What the target's own token of a round is. */
export function targetOf(round) {
  if (!round.drafted) return "alone";
  return round.accepted < round.drafted ? "corrected" : "bonus";
}

/** Where two choices part: the place of the first token that differs, null where none does. */
export function parting(one, other) {
  const most = Math.max(one.ids.length, other.ids.length);
  for (let at = 0; at < most; at++) if (one.ids[at] !== other.ids[at]) return at;
  return null;
}
