// Conversations and settings in the browser's storage, one entry per conversation.
//
// Each tab shows its own conversation; all tabs share the list. A conversation that two tabs write is
// merged (`merged`). Nothing is sent to the server.

import { add, checked, merged, newConversation, newTurn } from "./conversation.js";

const PREFIX = "exl-chat-2:";
const SETTINGS = "exl-settings";
const CURRENT = "exl-current";
const DRAFT = "exl-draft";
const OLD = "exl-chat-1"; // the page's earlier form: one conversation without variants

export class Store {
  // `local`: storage that all tabs share. `tab`: storage of this tab.
  constructor(local, tab) {
    this.local = local;
    this.tab = tab;
    this.problems = [];
  }

  // All conversations, the latest first. Unreadable ones are reported in `problems`.
  list() {
    this.problems = [];
    const found = [];
    for (let i = 0; i < this.local.length; i++) {
      const key = this.local.key(i);
      if (!key.startsWith(PREFIX)) continue;
      const conversation = this.read(key);
      if (conversation) found.push(conversation);
    }
    return found.sort((a, b) => b.updated - a.updated);
  }

  read(key) {
    try {
      const text = this.local.getItem(key);
      return text === null ? null : checked(JSON.parse(text));
    } catch (error) {
      this.problems.push(`A stored conversation cannot be read: ${error.message}`);
      return null;
    }
  }

  load(id) {
    return this.read(PREFIX + id);
  }

  // Writes the conversation, with turns that another tab has added. Raises if the storage is full.
  save(conversation) {
    const whole = merged(this.load(conversation.id), conversation);
    this.local.setItem(PREFIX + conversation.id, JSON.stringify(whole));
  }

  remove(id) {
    this.local.removeItem(PREFIX + id);
  }

  idOfKey(key) {
    return key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
  }

  get currentId() {
    return this.tab.getItem(CURRENT);
  }

  set currentId(id) {
    this.tab.setItem(CURRENT, id);
  }

  get draft() {
    return this.tab.getItem(DRAFT) ?? "";
  }

  set draft(text) {
    this.tab.setItem(DRAFT, text);
  }

  get key() {
    return this.tab.getItem("exl-key");
  }

  set key(key) {
    this.tab.setItem("exl-key", key);
  }

  settings() {
    try {
      return JSON.parse(this.local.getItem(SETTINGS) ?? "{}") ?? {};
    } catch (error) {
      this.problems.push(`The stored settings cannot be read: ${error.message}`);
      return {};
    }
  }

  saveSettings(settings) {
    this.local.setItem(SETTINGS, JSON.stringify(settings));
  }

  // Takes over the one conversation that earlier versions of this page stored.
  takeOverOld() {
    const text = this.local.getItem(OLD);
    if (text === null) return;
    try {
      const { turns = [], settings = {} } = JSON.parse(text);
      const conversation = newConversation();
      let parent = "";
      turns.forEach((turn, i) => {
        const created = i;
        const ask = newTurn(parent, "user", String(turn.ask ?? ""), { created });
        add(conversation, ask);
        parent = ask.id;
        if (!turn.reply) return;
        const more = { created, reasoning: String(turn.reasoning ?? ""), end: "stop", about: String(turn.about ?? "") };
        const reply = newTurn(parent, "assistant", String(turn.reply), more);
        add(conversation, reply);
        parent = reply.id;
      });
      if (turns.length) this.save(conversation);
      this.saveSettings({ fields: settings, ...this.settings() });
    } catch (error) {
      this.problems.push(`The stored conversation cannot be read: ${error.message}`);
    }
    this.local.removeItem(OLD);
  }
}
