import assert from "node:assert/strict";
import { test } from "node:test";

import {
  add, asMarkdown, checked, choose, fileName, matches, merged, messagesUpTo, newConversation, newTurn, ROOT, shownTurns,
  titleOf, variantsOf,
} from "../src/conversation.js";

let clock = 1;
const turn = (parent, role, text, more = {}) => newTurn(parent, role, text, { created: clock++, ...more });

function talk() {
  const one = newConversation(), ask = turn(ROOT, "user", "Hello *you*\nsecond line");
  const reply = turn(ask.id, "assistant", "Hi."), again = turn(reply.id, "user", "And now?");
  for (const each of [ask, reply, again]) add(one, each);
  return { one, ask, reply, again };
}

const textsOf = (one) => shownTurns(one).map((each) => each.text);

test("a retried reply is a variant, and hides what followed the other one", () => {
  const { one, ask, reply } = talk();
  const other = turn(ask.id, "assistant", "Good day.");
  add(one, other);
  assert.deepEqual(textsOf(one), ["Hello *you*\nsecond line", "Good day."]);
  assert.deepEqual(variantsOf(one, other), [reply, other]);
  choose(one, reply);
  assert.deepEqual(textsOf(one), ["Hello *you*\nsecond line", "Hi.", "And now?"]);
});

test("an edited first message begins another conversation of the same list entry", () => {
  const { one, ask } = talk();
  const edited = turn(ROOT, "user", "Other");
  add(one, edited);
  assert.deepEqual(textsOf(one), ["Other"]);
  choose(one, ask);
  assert.equal(textsOf(one).length, 3);
});

test("without a choice the latest variant is shown; a choice of a deleted variant is ignored", () => {
  const { one, ask } = talk();
  add(one, turn(ask.id, "assistant", "later"));
  one.chosen = { [ask.id]: "gone" };
  assert.deepEqual(textsOf(one).slice(1), ["later"]);
});

test("a circle of parents ends", () => {
  const one = newConversation(), a = turn("", "user", "a"), b = turn(a.id, "assistant", "b");
  add(one, a);
  add(one, b);
  a.parent = b.id;
  assert.deepEqual(shownTurns(one), []);
  assert.deepEqual(messagesUpTo(one, b.id).length, 2);
});

test("messages leave out failed replies with their questions", () => {
  const { one, reply, again } = talk();
  const failed = turn(again.id, "assistant", " ");
  const last = turn(failed.id, "user", "Still there?");
  add(one, failed);
  add(one, last);
  assert.deepEqual(messagesUpTo(one, last.id, "Be brief."), [
    { role: "system", content: "Be brief." }, { role: "user", content: "Hello *you*\nsecond line" },
    { role: "assistant", content: "Hi." }, { role: "user", content: "Still there?" },
  ]);
  assert.deepEqual(messagesUpTo(one, reply.id, " ").at(-1), { role: "assistant", content: "Hi." });
});

test("titles come from the first message, files from titles", () => {
  const { one } = talk();
  assert.equal(titleOf(one), "Hello *you*");
  one.title = "Über / ../x";
  assert.equal(fileName(one, "md"), "U-ber-x.md");
  assert.equal(titleOf(newConversation()), "New chat");
  one.title = "";
  Object.values(one.turns)[0].text = "x".repeat(100);
  assert.equal(titleOf(one).length, 60);
});

test("search finds words of all variants and of the title", () => {
  const { one, ask } = talk();
  add(one, turn(ask.id, "assistant", "Buongiorno"));
  assert.ok(matches(one, "now HI") && matches(one, "buon") && matches(one, ""));
  assert.ok(!matches(one, "hello missing"));
  one.title = "Greetings";
  assert.ok(matches(one, "greet"));
});

test("the export has the shown turns", () => {
  const { one, reply } = talk();
  reply.model = "tiny";
  assert.equal(asMarkdown(one), "# Hello *you*\n\n## You\n\nHello *you*\nsecond line\n\n## tiny\n\nHi.\n\n## You\n\nAnd now?\n");
});

test("two tabs' versions are merged, and a text that grew wins", () => {
  const { one, ask, reply } = talk();
  const stored = structuredClone(one);
  stored.updated = one.updated + 5;
  stored.title = "by the other tab";
  stored.turns[reply.id].text += " More.";
  const theirs = turn(ask.id, "assistant", "theirs"), ours = turn(ask.id, "assistant", "ours");
  add(stored, theirs);
  stored.updated = one.updated + 5;
  one.turns[ours.id] = ours;
  const both = merged(stored, one);
  assert.equal(Object.keys(both.turns).length, 5);
  assert.equal(both.turns[reply.id].text, "Hi. More.");
  assert.equal(both.title, "by the other tab");
  assert.equal(merged(null, one), one);
});

test("only conversations are read", () => {
  const { one } = talk();
  assert.deepEqual(checked(JSON.parse(JSON.stringify(one))), one);
  for (const bad of [null, [], "x", {}, { id: "a", turns: [] }, { id: "a", turns: { b: { id: "b" } } },
    { id: "a", turns: { b: { id: "b", parent: "", role: "system", text: "" } } }]) {
    assert.throws(() => checked(bad), TypeError);
  }
  const odd = checked({ id: "a", turns: { b: { id: "b", parent: "", role: "user", text: "t", about: { toString: 1 }, created: "x" } }, chosen: { "": 5 } });
  assert.deepEqual([odd.turns.b.about, odd.turns.b.created, odd.chosen], ["", 0, {}]);
});
