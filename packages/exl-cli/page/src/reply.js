// One running reply: its request, its place in the conversation, and its end.
//
// The reply joins the conversation with its first token. Until then everything that is shown stays,
// so that a retry that fails or is stopped has lost nothing.

import { add, childrenOf, messagesUpTo, newTurn } from "./conversation.js";
import { ServerError } from "./server.js";

const ENDS = { length: "cut off by the token limit", stopped: "stopped", interrupted: "interrupted" };

export class Reply {
  // parent     turn of the user that is answered
  // continued  reply that goes on, instead of a new one
  // settings   {system, model, fields}: fields of the request besides the messages
  constructor(conversation, { parent, continued = null, settings }) {
    this.conversation = conversation;
    this.parent = parent;
    this.continued = continued;
    this.settings = settings;
    this.turn = null; // set with the first token
    this.error = "";
    this.control = new AbortController();
    this.wasDropped = false;
  }

  get isWaiting() {
    return this.turn === null;
  }

  body() {
    const { system, model, fields } = this.settings;
    const last = this.continued ?? this.parent;
    const body = { ...fields, messages: messagesUpTo(this.conversation, last.id, system) };
    if (model) body.model = model;
    if (this.continued) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    return body;
  }

  stop() {
    this.control.abort();
  }

  // Runs the reply to its end. `onChange` is called after each event.
  async run(server, onChange = () => {}) {
    const result = {};
    try {
      for await (const event of server.reply(this.body(), this.control.signal)) {
        this.take(event, result);
        onChange();
      }
      this.begin(); // an empty reply
      this.finish(result.reason, result);
    } catch (error) {
      if (error.name === "AbortError") this.finish("stopped");
      else this.fail(error);
    }
    onChange();
  }

  take(event, result) {
    if (event.error) throw new ServerError(event.error.message);
    if (event.model) result.model = event.model;
    for (const { delta, finish_reason: reason } of event.choices) {
      const { content = "", reasoning_content: thought = "" } = delta;
      if (content || thought) {
        this.begin(event.model);
        this.turn.text += content ?? "";
        this.turn.reasoning += thought ?? "";
      }
      if (reason) result.reason = reason;
    }
    if (event.usage) Object.assign(result, { usage: event.usage, timings: event.timings });
  }

  // Puts the reply into the conversation.
  begin(model = "") {
    if (this.turn) return;
    const old = this.continued;
    if (old && !childrenOf(this.conversation, old.id).length) {
      this.turn = Object.assign(old, { end: null, error: "", about: "" });
      this.conversation.updated = Date.now();
      return;
    }
    const { text = "", reasoning = "" } = old ?? {};
    this.turn = newTurn(this.parent.id, "assistant", text, { reasoning, model });
    add(this.conversation, this.turn);
  }

  fail(error) {
    const isExpected = error instanceof ServerError;
    this.error = isExpected ? error.message : `The reply was interrupted: ${error.message}`;
    if (!this.turn) return;
    this.turn.error = this.error;
    this.finish("failed");
  }

  finish(end, figures) {
    if (this.turn) Object.assign(this.turn, { end: end ?? "stop", about: aboutReply(end, figures) });
    this.conversation.updated = Date.now();
  }
}

// One line on a reply: its end if it was cut, and its figures.
export function aboutReply(end, { usage, timings } = {}) {
  const parts = ENDS[end] ? [ENDS[end]] : [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings?.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (usage && timings) {
    const cached = timings.cache_n ? ` (${timings.cache_n} cached)` : "";
    parts.push(`prompt ${usage.prompt_tokens}${cached}`);
  }
  return parts.join(" · ");
}
