import assert from "node:assert/strict";
import { test } from "node:test";

import { add, newConversation, newTurn, ROOT, shownTurns } from "../src/conversation.js";
import { Store } from "../src/store.js";

class Storage {
  constructor(limit = Infinity) {
    this.kept = new Map();
    this.limit = limit;
  }

  get length() { return this.kept.size; }
  key(i) { return [...this.kept.keys()][i] ?? null; }
  getItem(key) { return this.kept.get(key) ?? null; }
  removeItem(key) { this.kept.delete(key); }
  setItem(key, value) {
    if (value.length > this.limit) throw new Error("full");
    this.kept.set(key, String(value));
  }
}

function saved(store, text, updated) {
  const one = newConversation();
  add(one, newTurn(ROOT, "user", text));
  one.updated = updated;
  store.save(one);
  return one;
}

test("conversations are listed with the latest first, loaded and removed", () => {
  const store = new Store(new Storage(), new Storage());
  const old = saved(store, "old", 1), late = saved(store, "late", 2);
  store.saveSettings({ theme: "dark" });
  assert.deepEqual(store.list().map((one) => one.id), [late.id, old.id]);
  assert.deepEqual(store.load(old.id), old);
  store.remove(late.id);
  assert.deepEqual(store.list(), [old]);
  assert.equal(store.load(late.id), null);
});

test("saving keeps the turns that another tab has added", () => {
  const local = new Storage(), here = new Store(local, new Storage()), there = new Store(local, new Storage());
  const one = saved(here, "first", 1), other = there.load(one.id);
  add(other, newTurn(Object.keys(other.turns)[0], "assistant", "theirs"));
  there.save(other);
  here.save(one);
  assert.deepEqual(shownTurns(here.load(one.id)).map((turn) => turn.text), ["first", "theirs"]);
});

test("unreadable entries are reported, and the others are listed", () => {
  const local = new Storage(), store = new Store(local, new Storage());
  saved(store, "fine", 1);
  local.setItem("exl-chat-2:broken", "{");
  local.setItem("exl-chat-2:odd", '{"id": 5}');
  assert.equal(store.list().length, 1);
  assert.equal(store.problems.length, 2);
  local.setItem("exl-settings", "{");
  assert.deepEqual(store.settings(), {});
});

test("a full storage is an error of the caller", () => {
  const store = new Store(new Storage(10), new Storage());
  assert.throws(() => saved(store, "long", 1), /full/);
});

test("the conversation of the earlier page is taken over once", () => {
  const local = new Storage(), store = new Store(local, new Storage());
  const turns = [{ ask: "a", reply: "b", reasoning: "r", about: "5 tokens" }, { ask: "c", reply: "", error: "gone" }];
  local.setItem("exl-chat-1", JSON.stringify({ turns, settings: { seed: "7" } }));
  store.takeOverOld();
  store.takeOverOld();
  const [one] = store.list();
  assert.deepEqual(shownTurns(one).map((turn) => [turn.role, turn.text]), [["user", "a"], ["assistant", "b"], ["user", "c"]]);
  assert.equal(store.settings().fields.seed, "7");
  assert.equal(store.list().length, 1);
  local.setItem("exl-chat-1", "{");
  store.takeOverOld();
  assert.match(store.problems[0], /cannot be read/);
});
