// The view of one turn: its text, its variants and its buttons.

import { variantsOf } from "./conversation.js";
import { button, copyText, make } from "./elements.js";
import { showMarkdown } from "./markdown.js";

export class TurnView {
  // `act`: functions of the page by name: edit, retry, continueReply, choose.
  constructor(turn, act) {
    this.turn = turn;
    this.act = act;
    this.isUser = turn.role === "user";
    this.text = make("div", { className: this.isUser ? "ask" : "reply" });
    this.reasoning = make("div", { className: "reasoning" });
    this.fold = make("details", {}, make("summary", {}, "Reasoning"), this.reasoning);
    this.error = make("div", { className: "error" });
    this.about = make("span", { className: "about" });
    this.variants = make("span", { className: "variants" });
    this.tools = make("div", { className: "tools" });
    const who = make("h2", { className: "unseen" }, this.isUser ? "You" : "Reply");
    this.root = make("article", { className: this.isUser ? "of-user" : "of-model" },
      who, ...(this.isUser ? [] : [this.fold]), this.text, this.error, this.tools);
    this.addTools();
  }

  addTools() {
    const { turn, act } = this;
    const copy = button("Copy", () => copyText(turn.text, this.text, copy));
    this.buttons = { copy, edit: button("Edit", () => this.edit()), retry: button("Retry", () => act.retry(turn)) };
    if (!this.isUser) this.buttons.next = button("Continue", () => act.continueReply(turn));
    this.tools.append(this.variants, ...Object.values(this.buttons), this.about);
  }

  // `isRunning`: this reply grows. `isBusy`: a reply of this conversation runs.
  show(conversation, { isRunning, isBusy }) {
    const { turn } = this;
    this.root.setAttribute("aria-busy", isRunning); // screen readers wait for the complete reply
    this.fold.hidden = !turn.reasoning;
    this.reasoning.textContent = turn.reasoning;
    this.error.hidden = !turn.error;
    this.error.textContent = turn.error;
    this.about.textContent = turn.about;
    if (this.isUser) this.text.textContent = turn.text;
    else showMarkdown(this.text, turn.text);
    const { copy, edit, retry, next } = this.buttons;
    copy.hidden = !turn.text;
    for (const one of [edit, retry]) one.hidden = isBusy;
    if (next) next.hidden = isBusy || !turn.text.trim();
    this.showVariants(variantsOf(conversation, turn), isBusy);
  }

  showVariants(variants, isBusy) {
    const at = variants.indexOf(this.turn);
    this.variants.hidden = variants.length < 2;
    if (variants.length < 2) return;
    const step = (label, name, to) => button(label, () => this.act.choose(variants[to], name), {
      ariaLabel: name, disabled: isBusy || !variants[to],
    });
    this.variants.replaceChildren(
      step("‹", "Previous variant", at - 1), `${at + 1}/${variants.length}`, step("›", "Next variant", at + 1));
  }

  // Replaces the text by a form. The changed text is a new variant.
  edit() {
    const { turn } = this;
    const field = make("textarea", { value: turn.text, rows: Math.min(turn.text.split("\n").length + 1, 16) });
    field.setAttribute("aria-label", this.isUser ? "Edit the message" : "Edit the reply");
    const form = make("form", { className: "edit" }, field);
    const close = () => { form.replaceWith(this.text); this.tools.hidden = false; };
    const save = make("button", { className: "main" }, this.isUser ? "Send" : "Save");
    form.append(make("div", { className: "bar" }, save, button("Cancel", close)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close();
      if (field.value.trim() && field.value !== turn.text) this.act.edit(turn, field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && this.isUser && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    this.text.replaceWith(form);
    this.tools.hidden = true;
    field.focus();
  }
}
